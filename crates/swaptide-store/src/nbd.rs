//! A network block device (NBD) as a place for extents: the client's side of the transmission
//! phase.
//!
//! The maker of an [`Nbd`] has connected and negotiated: what comes in here are sockets in the
//! transmission phase, the [`Export`] they lead to, and a [`Dialer`] that makes more of them. From
//! there on everything is here: many requests in flight on several connections, replies in any
//! order, time limits, and the replay of what was under way when a connection broke.
//!
//! A connection serves one call at a time. A call takes one that is idle (more than one for a deep
//! queue, as far as the export allows) or dials, puts all its requests in flight, and hands the
//! connections back when the last reply is in. So no thread ever writes into another's buffer, a
//! connection that breaks concerns one call, what has to be replayed is on that call's stack, and a
//! fault does not queue behind a batch of writes in one socket. With an export that allows a single
//! connection ([`Export::connections`]), calls take turns.
//!
//! A connection is given up when it ends, when what comes over it is not the protocol, or when a
//! request has waited longer than [`Options::request_limit`]. Its requests then go out again on
//! another. A call whose requests make no progress for its timeout ([`Options::read_timeout`],
//! [`Options::write_timeout`]) fails with `ETIMEDOUT`. What the server itself refuses is not tried
//! again.
//!
//! A write or trim that was sent and not answered may be carried out at any later time, also when
//! its connection has ended, and when its replay is long done and the block holds something else.
//! Nothing in the protocol excludes that: requests of two connections have no order, and a server
//! that hangs up may still be working on what it had. [`Certainty`] tells the caller, which must
//! leave the range alone then. Before a late write is replayed, its connection is also shut down
//! for sending, and the server given some time ([`Options::drain`]) to finish what it has.
//!
//! Nothing a server sends is believed: lengths and places are checked against the request that the
//! reply names, only requests of this connection can be named, a request's buffer is reachable
//! through that request alone, and bytes no request waits for end the connection.
//!
//! Invariants:
//! 1. An idle connection has nothing under way and nothing unread that was asked for.
//! 2. `open` counts idle connections and those in a call; it is at most [`Export::connections`].
//! 3. A read succeeds only when each of its bytes came exactly once.
//!
//! Locks: none. Idle connections are descriptors in atomic words, so that a fork at any moment
//! leaves the child a state it can `Nbd::forget`; a call that finds neither an idle connection nor
//! leave to dial sleeps on a futex.

mod batch;
mod connection;
mod pool;
mod request;
mod wire;

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::time::Duration;
use std::boxed::Box;
use std::vec::Vec;

use swaptide_sys::thread::now;
use swaptide_sys::{Errno, OwnedFd};

use self::pool::Pool;
use self::request::{Failure, Job, NbdRequest};
use crate::PAGE_SIZE;
use crate::block::BlockRun;

/// The most connections to one export.
pub const MAX_CONNECTIONS: u32 = pool::MAX_POOLED_CONNECTIONS as u32;
/// Bytes of one request: enough for a disk, little enough that a few of them share a deep queue.
const MAX_TRANSFER_BYTES: u32 = 128 << 10;
/// After a write could not reach the server, writes fail at once for so long.
const WRITE_BACKOFF: Duration = Duration::from_secs(1);

bitflags::bitflags! {
    /// The features of an export: the transmission flags of the protocol.
    #[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
    pub struct Flags: u16 {
        /// Set in all flags that a server sends.
        const HAS_FLAGS = 1 << 0;
        /// Nothing can be written.
        const READ_ONLY = 1 << 1;
        /// Knows `FLUSH`.
        const SEND_FLUSH = 1 << 2;
        /// Knows the flag "to the disk before the reply".
        const SEND_FUA = 1 << 3;
        /// Knows `TRIM`.
        const SEND_TRIM = 1 << 5;
        /// What one connection has written all others read, and a flush on one is a flush of all.
        /// Without it, two processes that share extents (after a fork) may see different things
        /// there: the page's tag tells, but the page is lost.
        const CAN_MULTI_CONN = 1 << 8;
    }
}

/// The facts negotiated about an export.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Export {
    /// Bytes of the export.
    pub size: u64,
    /// Its features.
    pub flags: Flags,
    /// Replies may be structured.
    pub structured: bool,
    /// The longest transfer the server takes. Taken as a page at least and 32 MiB at most.
    pub longest: u32,
    /// Connections to use at most, of all that the export allows: 1 unless
    /// [`Flags::CAN_MULTI_CONN`] is set.
    pub connections: u32,
}

impl Export {
    /// The bytes of one request.
    const fn chunk(&self) -> u32 {
        let longest =
            if self.longest < MAX_TRANSFER_BYTES { self.longest } else { MAX_TRANSFER_BYTES };
        if longest < PAGE_SIZE as u32 {
            PAGE_SIZE as u32
        } else {
            longest - longest % PAGE_SIZE as u32
        }
    }
}

/// Timeouts.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// A request that has waited so long for its reply is late, and its connection broken.
    pub request_limit: Duration,
    /// A reading call gives up when nothing of it was answered for so long.
    pub read_timeout: Duration,
    /// The same for writing, trimming and flushing. Shorter, where what is not written can go
    /// elsewhere.
    pub write_timeout: Duration,
    /// The time that a server may take to hang up before a late write is replayed.
    pub drain: Duration,
    /// Every write reaches the server's disk before it counts as done, if the export can do that:
    /// what was written then outlives the server's machine.
    pub durable: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            request_limit: Duration::from_secs(30),
            read_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(5),
            drain: Duration::from_secs(5),
            durable: false,
        }
    }
}

/// Makes connections.
pub trait Dialer: Send + Sync {
    /// A connected stream socket in the transmission phase of the same export, closed on exec. May
    /// block, for a bounded time. Is called by threads that must not use libc's hidden state.
    fn dial(&self) -> Result<OwnedFd, Errno>;
}

/// The outcome of a change: it may still happen after its call, or cannot.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Certainty {
    /// Everything that was sent was answered.
    Answered,
    /// Something that was sent was not answered on that connection; it may be carried out at any
    /// time, even if it succeeded on another one meanwhile.
    InDoubt,
}

/// Event counts of the connections to an export.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct NbdStats {
    /// Connections dialed.
    pub dialed: u64,
    /// Dialing that failed.
    pub dial_failed: u64,
    /// Connections that ended or failed while requests were under way.
    pub broken: u64,
    /// Of those, because a request was late.
    pub late: u64,
    /// Of those, because what came was not the protocol.
    pub garbled: u64,
    /// Requests that were sent again on another connection.
    pub replayed: u64,
    /// Requests the server refused.
    pub refused: u64,
    /// Requests that were given up without an answer.
    pub given_up: u64,
}

#[derive(Default)]
struct Counters {
    dialed: AtomicU64,
    dial_failed: AtomicU64,
    broken: AtomicU64,
    late: AtomicU64,
    garbled: AtomicU64,
    replayed: AtomicU64,
    refused: AtomicU64,
    given_up: AtomicU64,
}

/// The client of one export.
pub struct Nbd {
    export: Export,
    options: Options,
    dialer: Box<dyn Dialer>,
    pool: Pool,
    /// Numbers the times a connection was taken, so that no cookie is used twice.
    serial: AtomicU64,
    /// Writes fail before this moment without being tried; see [`WRITE_BACKOFF`].
    writes_rest: AtomicU64,
    /// No second connection for a call is dialed before this moment.
    extras_rest: AtomicU64,
    counters: Counters,
}

impl Nbd {
    /// A client of `export`. `connected` are sockets in the transmission phase that are there
    /// already; others are dialed.
    #[must_use]
    pub fn new(
        export: Export,
        options: Options,
        dialer: Box<dyn Dialer>,
        connected: Vec<OwnedFd>,
    ) -> Nbd {
        let pool = Pool::new(if export.flags.contains(Flags::CAN_MULTI_CONN) {
            export.connections
        } else {
            1
        });
        for fd in connected {
            if let Some(seat) = pool.seat() {
                seat.fill(fd);
            }
        }
        Nbd {
            export,
            options,
            dialer,
            pool,
            serial: AtomicU64::new(0),
            writes_rest: AtomicU64::new(0),
            extras_rest: AtomicU64::new(0),
            counters: Counters::default(),
        }
    }

    /// Returns the negotiated facts.
    #[must_use]
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// Reads at `offset`; short only at the end of the export.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, Errno> {
        let len = self.inside(offset, buf.len());
        let mut requests = Vec::new();
        push_reads(&mut requests, offset, &mut buf[..len], self.export.chunk());
        self.done(&mut requests, self.options.read_timeout)
    }

    /// Reads all of several places at once. On failure, tells which block (of a page's size)
    /// failed: the number of its run's first block plus its place in the run.
    pub(crate) fn read_all(&self, runs: &mut [BlockRun<'_>]) -> Result<(), (usize, Errno)> {
        self.read_all_within(runs, self.options.read_timeout)
    }

    /// The same with the timeout of a write.
    pub(crate) fn read_all_briefly(&self, runs: &mut [BlockRun<'_>]) -> Result<(), (usize, Errno)> {
        self.read_all_within(runs, self.options.write_timeout)
    }

    fn read_all_within(
        &self,
        runs: &mut [BlockRun<'_>],
        timeout: Duration,
    ) -> Result<(), (usize, Errno)> {
        if let Some(run) =
            runs.iter().find(|run| self.inside(run.offset, run.buf.len()) < run.buf.len())
        {
            let good = self.inside(run.offset, run.buf.len()) / PAGE_SIZE;
            return Err((run.first + good, Errno::IO));
        }
        let chunk = self.export.chunk();
        let mut requests = Vec::with_capacity(runs.len());
        let mut firsts = Vec::with_capacity(runs.len());
        for run in runs {
            push_reads(&mut requests, run.offset, run.buf, chunk);
            firsts.extend(
                (firsts.len()..requests.len())
                    .enumerate()
                    .map(|(i, _)| run.first + i * (chunk as usize / PAGE_SIZE)),
            );
        }
        batch::run(self, &mut requests, timeout);
        for (request, first) in requests.iter_mut().zip(firsts) {
            let Err(failure) = request.outcome() else { continue };
            let offset = request.offset;
            let Job::Read(buf) = &mut request.job else { unreachable!("nothing else was pushed") };
            if !matches!(failure, Failure::Refused(_)) || buf.len() <= PAGE_SIZE {
                return Err((first, failure.errno()));
            }
            // Which of its blocks it is.
            let mut blocks = Vec::with_capacity(buf.len() / PAGE_SIZE);
            push_reads(&mut blocks, offset, buf, PAGE_SIZE as u32);
            batch::run(self, &mut blocks, timeout);
            for (i, block) in blocks.iter().enumerate() {
                block.outcome().map_err(|failure| (first + i, failure.errno()))?;
            }
        }
        Ok(())
    }

    /// Writes at `offset`: all of it or, if a part fails that is not the first, what lies before
    /// that. 0 at the end of the export.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
        self.write_surely(offset, bytes).0
    }

    /// The same; also tells whether some of it may still be carried out later.
    pub fn write_surely(&self, offset: u64, bytes: &[u8]) -> (Result<usize, Errno>, Certainty) {
        let len = self.inside(offset, bytes.len());
        let mut requests = Vec::new();
        push_writes(&mut requests, offset, &bytes[..len], self.export.chunk());
        let answer = self.change(&mut requests);
        (answer, certainty(&requests))
    }

    /// Reads several places at once, all within the export. On failure, tells which place failed.
    pub fn read_many(&self, places: &mut [(u64, &mut [u8])]) -> Result<(), (usize, Errno)> {
        let mut requests = Vec::with_capacity(places.len());
        let mut numbers = Vec::with_capacity(places.len());
        for (number, (offset, buf)) in places.iter_mut().enumerate() {
            if self.inside(*offset, buf.len()) < buf.len() {
                return Err((number, Errno::INVAL));
            }
            push_reads(&mut requests, *offset, buf, self.export.chunk());
            numbers.resize(requests.len(), number);
        }
        batch::run(self, &mut requests, self.options.read_timeout);
        first_failure(&requests, &numbers)
    }

    /// Writes several places at once, all within the export. On failure, tells which place failed;
    /// what the others hold then is unknown.
    pub fn write_many(&self, places: &[(u64, &[u8])]) -> Result<(), (usize, Errno)> {
        let mut requests = Vec::with_capacity(places.len());
        let mut numbers = Vec::with_capacity(places.len());
        for (number, &(offset, bytes)) in places.iter().enumerate() {
            if self.inside(offset, bytes.len()) < bytes.len() {
                return Err((number, Errno::NOSPC));
            }
            push_writes(&mut requests, offset, bytes, self.export.chunk());
            numbers.resize(requests.len(), number);
        }
        let _ = self.change(&mut requests);
        first_failure(&requests, &numbers)
    }

    /// Tells the server that a range's contents are not needed any more. What it reads as
    /// afterwards is the server's business. `EOPNOTSUPP` where the export does not know that.
    pub fn trim(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.trim_surely(offset, len).0
    }

    /// The same; also tells whether some of it may still be carried out later.
    pub fn trim_surely(&self, offset: u64, len: u64) -> (Result<(), Errno>, Certainty) {
        if !self.export.flags.contains(Flags::SEND_TRIM) {
            return (Err(Errno::OPNOTSUPP), Certainty::Answered);
        }
        let mut left = len.min(self.export.size.saturating_sub(offset));
        let mut requests = Vec::new();
        let most = u64::from(u32::MAX) / PAGE_SIZE as u64 * PAGE_SIZE as u64;
        let mut at = offset;
        while left > 0 {
            let some = left.min(most);
            requests.push(NbdRequest::new(at, Job::Trim(some as u32)));
            (at, left) = (at + some, left - some);
        }
        let answer = self.change(&mut requests).map(drop);
        (answer, certainty(&requests))
    }

    /// Waits until everything written so far is on the server's disk. At once where the export does
    /// not know that.
    pub fn flush(&self) -> Result<(), Errno> {
        if !self.export.flags.contains(Flags::SEND_FLUSH) {
            return Ok(());
        }
        self.change(&mut [NbdRequest::new(0, Job::Flush)]).map(drop)
    }

    /// In a forked child, before its first call: leaves the parent's connections alone, which two
    /// processes must never both use, and dials its own. The descriptors are not closed: in this
    /// process their numbers may be other files.
    ///
    /// Whatever the parent's other threads were doing at the fork does not matter here; the child
    /// has one thread only.
    pub(crate) fn forget(&self) {
        self.pool.forget();
    }

    /// Puts a connected socket in the transmission phase among the idle connections; closes it if
    /// there are enough.
    pub fn adopt(&self, fd: OwnedFd) {
        if let Some(seat) = self.pool.seat() {
            seat.fill(fd);
        }
    }

    /// All counters at one moment.
    #[must_use]
    pub fn stats(&self) -> NbdStats {
        let c = &self.counters;
        NbdStats {
            dialed: c.dialed.load(Relaxed),
            dial_failed: c.dial_failed.load(Relaxed),
            broken: c.broken.load(Relaxed),
            late: c.late.load(Relaxed),
            garbled: c.garbled.load(Relaxed),
            replayed: c.replayed.load(Relaxed),
            refused: c.refused.load(Relaxed),
            given_up: c.given_up.load(Relaxed),
        }
    }

    /// Returns the number of bytes, of `len` at `offset`, that the export has.
    fn inside(&self, offset: u64, len: usize) -> usize {
        usize::try_from(self.export.size.saturating_sub(offset)).unwrap_or(usize::MAX).min(len)
    }

    /// Carries out requests that change something.
    fn change(&self, requests: &mut [NbdRequest<'_>]) -> Result<usize, Errno> {
        if now().0 < self.writes_rest.load(Relaxed) {
            return Err(Errno::TIMEDOUT);
        }
        let answer = self.done(requests, self.options.write_timeout);
        if requests.iter().any(|request| request.outcome() == Err(Failure::Unreachable)) {
            self.writes_rest.store(now().0 + WRITE_BACKOFF.as_nanos() as u64, Relaxed);
        }
        answer
    }

    /// Carries out requests that follow each other; the bytes of those before the first that
    /// failed, or why the very first did.
    fn done(&self, requests: &mut [NbdRequest<'_>], timeout: Duration) -> Result<usize, Errno> {
        batch::run(self, requests, timeout);
        let mut bytes = 0;
        for (i, request) in requests.iter().enumerate() {
            match request.outcome() {
                Ok(()) => bytes += request.len() as usize,
                Err(failure) if i == 0 => return Err(failure.errno()),
                Err(_) => break,
            }
        }
        Ok(bytes)
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        while let Some(link) = self.pool.take() {
            connection::send_disconnect(link.fd());
        }
    }
}

fn certainty(requests: &[NbdRequest<'_>]) -> Certainty {
    if requests.iter().any(NbdRequest::is_in_doubt) {
        Certainty::InDoubt
    } else {
        Certainty::Answered
    }
}

fn first_failure(requests: &[NbdRequest<'_>], numbers: &[usize]) -> Result<(), (usize, Errno)> {
    let failed = requests
        .iter()
        .zip(numbers)
        .find_map(|(request, number)| Some((*number, request.outcome().err()?.errno())));
    failed.map_or(Ok(()), Err)
}

fn push_reads<'b>(
    requests: &mut Vec<NbdRequest<'b>>,
    mut offset: u64,
    buf: &'b mut [u8],
    chunk: u32,
) {
    for part in buf.chunks_mut(chunk as usize) {
        let len = part.len() as u64;
        requests.push(NbdRequest::new(offset, Job::Read(part)));
        offset += len;
    }
}

fn push_writes<'b>(
    requests: &mut Vec<NbdRequest<'b>>,
    mut offset: u64,
    bytes: &'b [u8],
    chunk: u32,
) {
    for part in bytes.chunks(chunk as usize) {
        requests.push(NbdRequest::new(offset, Job::Write(part)));
        offset += part.len() as u64;
    }
}

#[cfg(test)]
pub(crate) mod tests;
