//! One call: some requests, brought to their ends over the connections that can be had.

use core::time::Duration;
use std::vec::Vec;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use swaptide_sys::Errno;
use swaptide_sys::thread::{Nanos, now, sleep};

use super::connection::{Broken, Connection};
use super::request::{Failure, MAX_BATCH_REQUESTS, NbdRequest, State};
use super::wire;
use super::{Flags, Nbd, Relaxed};
use crate::block::is_own_shortage;

/// Requests on one connection at a time: the kernel's buffers hold them, and the server has enough
/// to choose from.
const MAX_REQUESTS_PER_CONNECTION: usize = 64;
/// Requests that make another connection worth using: servers work on about as many of one
/// connection at once.
const REQUESTS_PER_EXTRA_CONNECTION: usize = 16;
/// No extra connection is tried for so long after one was refused.
const EXTRAS_REST: Duration = Duration::from_secs(10);

/// Brings requests to their ends; each has an outcome then.
pub(super) fn run(nbd: &Nbd, requests: &mut [NbdRequest<'_>], timeout: Duration) {
    for group in requests.chunks_mut(MAX_BATCH_REQUESTS) {
        RequestBatch {
            nbd,
            requests: group,
            connections: Vec::new(),
            last_progress: now(),
            timeout,
            failures: 0,
            short_of: None,
        }
        .run();
    }
    let failed = |which: fn(Failure) -> bool| {
        requests.iter().filter(|r| r.outcome().is_err_and(which)).count() as u64
    };
    let is_refused = |failure| matches!(failure, Failure::Refused(_));
    nbd.counters.refused.fetch_add(failed(is_refused), Relaxed);
    let given_up = failed(|failure| !matches!(failure, Failure::Refused(_)));
    nbd.counters.given_up.fetch_add(given_up, Relaxed);
}

struct RequestBatch<'c, 'b> {
    nbd: &'c Nbd,
    requests: &'c mut [NbdRequest<'b>],
    connections: Vec<Connection<'c>>,
    /// When it last made progress.
    last_progress: Nanos,
    timeout: Duration,
    /// Connections that failed since.
    failures: u32,
    /// The shortage of this process, if any, that made the last attempt to connect fail.
    short_of: Option<Errno>,
}

impl RequestBatch<'_, '_> {
    fn run(mut self) {
        let mut widened = false;
        while self.requests.iter().any(|request| !request.is_done()) {
            if self.time_left().is_zero() || (self.connections.is_empty() && !self.connect()) {
                self.give_up();
                break;
            }
            if !widened {
                widened = true;
                self.widen();
            }
            self.assign();
            let flags =
                if self.nbd.options.durable && self.nbd.export.flags.contains(Flags::SEND_FUA) {
                    wire::FLAG_FUA
                } else {
                    0
                };
            let requests = &mut *self.requests;
            let broken = self
                .connections
                .iter_mut()
                .position(|connection| connection.send(requests, flags).is_err());
            match broken {
                // What came before it broke may tell more.
                Some(i) => {
                    self.hear(i, true);
                }
                None => self.listen(),
            }
        }
        for connection in self.connections {
            connection.put_back();
        }
    }

    fn time_left(&self) -> Duration {
        self.timeout.saturating_sub(now().since(self.last_progress))
    }

    /// Has a first connection, however long it takes; `false` when no time is left.
    fn connect(&mut self) -> bool {
        let nbd = self.nbd;
        loop {
            let seen = nbd.pool.changes();
            if let Some(link) = nbd.pool.take() {
                self.connections.push(Connection::new(link, nbd));
                return true;
            }
            let left = self.time_left();
            if let Some(seat) = nbd.pool.seat() {
                // At once the first time: a restarted server waits already.
                if self.failures > 1 {
                    sleep(Duration::from_millis(10 << (self.failures - 2).min(6)).min(left));
                }
                match nbd.dialer.dial() {
                    Ok(fd) => {
                        nbd.counters.dialed.fetch_add(1, Relaxed);
                        self.connections.push(Connection::new(seat.link(fd), nbd));
                        self.short_of = None;
                        return true;
                    }
                    Err(errno) => {
                        nbd.counters.dial_failed.fetch_add(1, Relaxed);
                        self.failures += 1;
                        self.short_of = Some(errno).filter(|errno| is_own_shortage(*errno));
                    }
                }
            } else {
                nbd.pool.wait(seen, left);
            }
            if self.time_left().is_zero() {
                return false;
            }
        }
    }

    /// Takes more connections for a deep queue, those that can be had without waiting for others.
    fn widen(&mut self) {
        let nbd = self.nbd;
        let wanted = self
            .requests
            .len()
            .div_ceil(REQUESTS_PER_EXTRA_CONNECTION)
            .min(nbd.pool.most() as usize);
        while self.connections.len() < wanted {
            if let Some(link) = nbd.pool.take() {
                self.connections.push(Connection::new(link, nbd));
                continue;
            }
            if now().0 < nbd.extras_rest.load(Relaxed) {
                break;
            }
            let Some(seat) = nbd.pool.seat() else { break };
            match nbd.dialer.dial() {
                Ok(fd) => {
                    nbd.counters.dialed.fetch_add(1, Relaxed);
                    self.connections.push(Connection::new(seat.link(fd), nbd));
                }
                Err(_) => {
                    nbd.counters.dial_failed.fetch_add(1, Relaxed);
                    nbd.extras_rest.store(now().0 + EXTRAS_REST.as_nanos() as u64, Relaxed);
                    break;
                }
            }
        }
    }

    /// Gives every connection its share of what waits.
    fn assign(&mut self) {
        for (i, request) in self.requests.iter_mut().enumerate() {
            if request.state != State::Waiting {
                continue;
            }
            let Some(connection) =
                self.connections.iter_mut().min_by_key(|connection| connection.under_way())
            else {
                return;
            };
            if connection.under_way() >= MAX_REQUESTS_PER_CONNECTION {
                return;
            }
            connection.offer(i);
            request.state = State::Queued(connection.serial());
            if core::mem::take(&mut request.again) {
                self.nbd.counters.replayed.fetch_add(1, Relaxed);
            }
        }
    }

    /// Waits until something can be received or sent, and receives.
    fn listen(&mut self) {
        let now_ = now();
        let limit = self.nbd.options.request_limit;
        let mut time = self.time_left();
        for connection in &self.connections {
            if connection.under_way() > 0 {
                time = time.min(limit.saturating_sub(now_.since(connection.last_progress())));
            }
        }
        let mut polls: Vec<PollFd<'_>> = Vec::with_capacity(self.connections.len());
        for connection in &self.connections {
            let out = if connection.sends() { PollFlags::OUT } else { PollFlags::empty() };
            polls.push(PollFd::from_borrowed_fd(connection.fd(), PollFlags::IN | out));
        }
        let time = Timespec {
            tv_sec: time.as_secs().min(1 << 30) as i64,
            tv_nsec: time.subsec_nanos().into(),
        };
        // A signal is as good as a time that is over: everything is looked at again.
        let _ = poll(&mut polls, Some(&time));
        let heard =
            polls.iter().enumerate().filter(|(_, poll)| poll.revents().intersects(!PollFlags::OUT));
        let heard = heard.fold(0u32, |mask, (i, _)| mask | 1 << i);
        // From the last: one that breaks is taken out of the list.
        for i in (0..self.connections.len()).rev() {
            if heard & 1 << i != 0 && !self.hear(i, false) {
                continue;
            }
            // After what has come was heard: this thread may be the one that is late. And also
            // then: a server that sends without end has not answered yet.
            if self.connections[i].under_way() > 0
                && now().since(self.connections[i].last_progress()) >= limit
            {
                self.broke(i, Broken::Late);
            }
        }
    }

    /// Receives what has come on a connection, which may be known to be broken; `false` if it is
    /// gone then.
    fn hear(&mut self, i: usize, broken: bool) -> bool {
        let connection = &mut self.connections[i];
        let before = connection.under_way();
        let heard = connection.receive(self.requests);
        if connection.under_way() < before {
            self.last_progress = now();
            self.failures = 0;
        }
        match heard {
            Err(why) => self.broke(i, why),
            Ok(()) if broken => self.broke(i, Broken::Ended),
            Ok(()) => return true,
        }
        false
    }

    /// Queues the requests of a broken connection for another one.
    fn broke(&mut self, i: usize, why: Broken) {
        let connection = self.connections.swap_remove(i);
        let counters = &self.nbd.counters;
        if connection.under_way() > 0 {
            counters.broken.fetch_add(1, Relaxed);
        }
        match why {
            Broken::Late => drop(counters.late.fetch_add(1, Relaxed)),
            Broken::Garbled => drop(counters.garbled.fetch_add(1, Relaxed)),
            Broken::Ended => {}
        }
        self.failures += 1;
        let mut changes = false;
        for (index, request) in self.requests.iter_mut().enumerate() {
            if let State::Queued(serial) | State::Sent(serial) = request.state
                && serial == connection.serial()
            {
                request.in_doubt |= connection.has_sent(index, request);
                changes |= matches!(request.state, State::Sent(_)) && request.changes();
                request.set_back();
            }
        }
        if why == Broken::Late && changes {
            connection.drain(self.nbd.options.drain.min(self.time_left()));
        }
        connection.end();
    }

    /// Fails all requests that are not done.
    fn give_up(&mut self) {
        for (index, request) in self.requests.iter_mut().enumerate() {
            if !request.is_done() {
                request.in_doubt |=
                    self.connections.iter().any(|connection| connection.has_sent(index, request));
                let failure = match self.short_of {
                    Some(errno) if !request.changes() => Failure::Short(errno),
                    _ => Failure::Unreachable,
                };
                request.state = State::Done(Err(failure));
            }
        }
        for connection in self.connections.drain(..) {
            if connection.under_way() > 0 { connection.end() } else { connection.put_back() }
        }
    }
}
