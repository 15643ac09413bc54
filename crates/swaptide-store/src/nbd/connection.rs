//! A connection in a call: what goes out on it, and what the bytes that come in mean.

use core::ops::Range;
use std::boxed::Box;
use std::collections::VecDeque;
use std::vec;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::IoSlice;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, send, sendmsg, shutdown,
};
use swaptide_sys::thread::{Nanos, now};
use swaptide_sys::{BorrowedFd, Errno};

use core::time::Duration;

use super::pool::Link;
use super::request::{Failure, Job, MAX_BATCH_REQUESTS, NbdRequest, State};
use super::wire::{self, Garbled, Head};
use super::{Nbd, Relaxed};

/// Bytes received before they are looked at.
const INPUT_BYTES: usize = 16 << 10;
/// The rest of a read is received directly at its place if it is at least this long; otherwise by
/// way of the input.
const MIN_DIRECT_BYTES: usize = INPUT_BYTES / 2;
/// Receives in a row, before the caller looks at the clock.
const MAX_RECEIVES: usize = 64;
/// Requests in one system call.
const MAX_REQUESTS_PER_SEND: usize = 16;
const INDEX_BITS: u32 = MAX_BATCH_REQUESTS.trailing_zeros();

/// Why a connection is of no more use.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Broken {
    /// It ended, or the server is about to end it.
    Ended,
    /// Nothing came for too long.
    Late,
    /// The data received violates the protocol.
    Garbled,
}

impl From<Garbled> for Broken {
    fn from(_: Garbled) -> Broken {
        Broken::Garbled
    }
}

/// The parser state: the element that the next byte belongs to.
enum Incoming {
    /// The head of a reply.
    Head,
    /// Data for this part of a read's buffer.
    Data { index: usize, part: Range<u32>, last: bool },
    /// Bytes of the field that says where a chunk's data belong.
    DataPlace { index: usize, len: u32, last: bool },
    /// Where zeros are, and how many.
    HolePlace { index: usize, last: bool },
    /// Bytes of an error number and the length of a message.
    Error { index: usize, len: u32, last: bool },
    /// Text of an error's message, which is read and dropped.
    Skip { index: usize, left: u32, last: bool },
}

pub(super) struct Connection<'p> {
    link: Link<'p>,
    structured: bool,
    serial: u64,
    queue: VecDeque<usize>,
    /// Bytes of the first in the queue that are out.
    sent: usize,
    under_way: usize,
    /// When the last reply was complete, or the first request came.
    last_progress: Nanos,
    incoming: Incoming,
    input: Box<[u8]>,
    unread: Range<usize>,
}

impl<'p> Connection<'p> {
    pub(super) fn new(link: Link<'p>, nbd: &Nbd) -> Connection<'p> {
        Connection {
            link,
            structured: nbd.export.structured,
            serial: nbd.serial.fetch_add(1, Relaxed),
            queue: VecDeque::new(),
            sent: 0,
            under_way: 0,
            last_progress: now(),
            incoming: Incoming::Head,
            input: vec![0; INPUT_BYTES].into_boxed_slice(),
            unread: 0..0,
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.link.fd()
    }

    pub(super) fn serial(&self) -> u64 {
        self.serial
    }

    /// Requests offered and not answered.
    pub(super) fn under_way(&self) -> usize {
        self.under_way
    }

    /// True if the server may have a request of the call: some of it went out on this connection.
    pub(super) fn has_sent(&self, index: usize, request: &NbdRequest<'_>) -> bool {
        request.state == State::Sent(self.serial)
            || (self.sent > 0 && self.queue.front() == Some(&index))
    }

    pub(super) fn last_progress(&self) -> Nanos {
        self.last_progress
    }

    /// True if there is something to send.
    pub(super) fn sends(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The call's request of that number goes out on this connection.
    pub(super) fn offer(&mut self, index: usize) {
        if self.under_way == 0 {
            self.last_progress = now();
        }
        self.under_way += 1;
        self.queue.push_back(index);
    }

    /// Sends as much as the socket takes.
    pub(super) fn send(
        &mut self,
        requests: &mut [NbdRequest<'_>],
        write_flags: u16,
    ) -> Result<(), Broken> {
        while !self.queue.is_empty() {
            let mut heads = [[0; wire::REQUEST_HEADER_BYTES]; MAX_REQUESTS_PER_SEND];
            for (head, &index) in heads.iter_mut().zip(&self.queue) {
                *head = requests[index].head(self.serial << INDEX_BITS | index as u64, write_flags);
            }
            let mut slices: [IoSlice<'_>; 2 * MAX_REQUESTS_PER_SEND] =
                core::array::from_fn(|_| IoSlice::new(&[]));
            let mut skip = self.sent;
            for ((pair, head), &index) in slices.chunks_mut(2).zip(&heads).zip(&self.queue) {
                let payload = requests[index].payload();
                pair[0] = IoSlice::new(&head[skip.min(head.len())..]);
                pair[1] = IoSlice::new(&payload[skip.saturating_sub(head.len())..]);
                skip = 0;
            }
            let slices = &slices[..2 * self.queue.len().min(MAX_REQUESTS_PER_SEND)];
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let mut left =
                match sendmsg(self.link.fd(), slices, &mut SendAncillaryBuffer::default(), flags) {
                    Ok(n) => n,
                    Err(Errno::INTR) => continue,
                    Err(Errno::AGAIN) => return Ok(()),
                    Err(_) => return Err(Broken::Ended),
                };
            while let Some(&index) = self.queue.front() {
                let rest = wire::REQUEST_HEADER_BYTES + requests[index].payload().len() - self.sent;
                if left < rest {
                    self.sent += left;
                    break;
                }
                left -= rest;
                self.sent = 0;
                self.queue.pop_front();
                requests[index].state = State::Sent(self.serial);
            }
        }
        Ok(())
    }

    /// Receives what there is.
    pub(super) fn receive(&mut self, requests: &mut [NbdRequest<'_>]) -> Result<(), Broken> {
        for _ in 0..MAX_RECEIVES {
            let direct = match &mut self.incoming {
                Incoming::Data { index, part, .. }
                    if self.unread.is_empty() && part.len() >= MIN_DIRECT_BYTES =>
                {
                    Some((*index, part))
                }
                _ => None,
            };
            let answer = match &direct {
                Some((index, part)) => {
                    let Job::Read(buf) = &mut requests[*index].job else {
                        return Err(Broken::Garbled);
                    };
                    recv(
                        self.link.fd(),
                        &mut buf[part.start as usize..part.end as usize],
                        RecvFlags::DONTWAIT,
                    )
                }
                None => {
                    self.input.copy_within(self.unread.clone(), 0);
                    self.unread = 0..self.unread.len();
                    recv(self.link.fd(), &mut self.input[self.unread.end..], RecvFlags::DONTWAIT)
                }
            };
            let n = match answer {
                Ok((0, _)) => return Err(Broken::Ended),
                Ok((n, _)) => n,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(()),
                Err(_) => return Err(Broken::Ended),
            };
            match direct {
                Some((_, part)) => part.start += n as u32,
                None => self.unread.end += n,
            }
            self.digest(requests)?;
            if self.under_way == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Takes in what was received, as far as it goes.
    fn digest(&mut self, requests: &mut [NbdRequest<'_>]) -> Result<(), Broken> {
        loop {
            let bytes = &self.input[self.unread.clone()];
            let (used, next) = match &mut self.incoming {
                Incoming::Head => {
                    if bytes.is_empty() {
                        return Ok(());
                    }
                    // Nothing is asked for, so nothing may come.
                    if self.under_way == 0 {
                        return Err(Broken::Garbled);
                    }
                    let Some((head, used)) = wire::head(bytes)? else { return Ok(()) };
                    (used, self.begin(head, requests)?)
                }
                Incoming::Data { index, part, last } => {
                    let Job::Read(buf) = &mut requests[*index].job else {
                        return Err(Broken::Garbled);
                    };
                    let used = bytes.len().min(part.len());
                    buf[part.start as usize..][..used].copy_from_slice(&bytes[..used]);
                    part.start += used as u32;
                    if part.start < part.end {
                        self.unread.start += used;
                        return Ok(());
                    }
                    let (index, last) = (*index, *last);
                    (used, self.end_chunk(index, last, requests)?)
                }
                &mut Incoming::DataPlace { index, len, last } => {
                    let Some(offset) = wire::u64_at(bytes, 0) else { return Ok(()) };
                    let part = requests[index].receive(offset, len)?;
                    (8, Incoming::Data { index, part, last })
                }
                &mut Incoming::HolePlace { index, last } => {
                    let Some((offset, len)) = wire::u64_at(bytes, 0).zip(wire::u32_at(bytes, 8))
                    else {
                        return Ok(());
                    };
                    let part = requests[index].receive(offset, len)?;
                    let Job::Read(buf) = &mut requests[index].job else {
                        return Err(Broken::Garbled);
                    };
                    buf[part.start as usize..part.end as usize].fill(0);
                    (12, self.end_chunk(index, last, requests)?)
                }
                &mut Incoming::Error { index, len, last } => {
                    let Some((error, text)) = wire::u32_at(bytes, 0).zip(wire::u16_at(bytes, 4))
                    else {
                        return Ok(());
                    };
                    if u32::from(text) > len - 6 || error == 0 {
                        return Err(Broken::Garbled);
                    }
                    if error == wire::SHUTDOWN {
                        return Err(Broken::Ended);
                    }
                    requests[index].error.get_or_insert(wire::errno(error));
                    (6, Incoming::Skip { index, left: len - 6, last })
                }
                Incoming::Skip { index, left, last } => {
                    let used = bytes.len().min(*left as usize);
                    *left -= used as u32;
                    if *left > 0 {
                        self.unread.start += used;
                        return Ok(());
                    }
                    let (index, last) = (*index, *last);
                    (used, self.end_chunk(index, last, requests)?)
                }
            };
            self.unread.start += used;
            self.incoming = next;
        }
    }

    /// Returns the element that follows the head of a reply.
    fn begin(&mut self, head: Head, requests: &mut [NbdRequest<'_>]) -> Result<Incoming, Broken> {
        let cookie = match head {
            Head::Simple { cookie, .. } | Head::Chunk { cookie, .. } => cookie,
        };
        let index = (cookie & (MAX_BATCH_REQUESTS as u64 - 1)) as usize;
        let asked =
            requests.get(index).is_some_and(|request| request.state == State::Sent(self.serial));
        if !asked || cookie >> INDEX_BITS != self.serial {
            return Err(Broken::Garbled);
        }
        let request = &mut requests[index];
        let reads = matches!(request.job, Job::Read(_));
        match head {
            Head::Simple { error: 0, .. } if reads => {
                let part = request.receive(request.offset, request.len())?;
                Ok(Incoming::Data { index, part, last: true })
            }
            Head::Simple { error: 0, .. } => self.end_chunk(index, true, requests),
            Head::Simple { error: wire::SHUTDOWN, .. } => Err(Broken::Ended),
            Head::Simple { error, .. } => {
                request.error.get_or_insert(wire::errno(error));
                self.end_chunk(index, true, requests)
            }
            Head::Chunk { .. } if !self.structured => Err(Broken::Garbled),
            Head::Chunk { kind: wire::CHUNK_NONE, last: true, len: 0, .. } => {
                self.end_chunk(index, true, requests)
            }
            Head::Chunk { kind: wire::CHUNK_DATA, last, len: 9.., .. } if reads => {
                let Head::Chunk { len, .. } = head else { unreachable!("it is matched here") };
                Ok(Incoming::DataPlace { index, len: len - 8, last })
            }
            Head::Chunk { kind: wire::CHUNK_HOLE, last, len: 12, .. } if reads => {
                Ok(Incoming::HolePlace { index, last })
            }
            Head::Chunk { kind, last, len, .. }
                if kind & wire::CHUNK_ERROR != 0 && (6..=wire::MAX_ERROR_BYTES).contains(&len) =>
            {
                Ok(Incoming::Error { index, len, last })
            }
            Head::Chunk { .. } => Err(Broken::Garbled),
        }
    }

    /// A chunk is complete; with the last one, its reply.
    fn end_chunk(
        &mut self,
        index: usize,
        last: bool,
        requests: &mut [NbdRequest<'_>],
    ) -> Result<Incoming, Broken> {
        if last {
            let request = &mut requests[index];
            let outcome = match request.error {
                Some(errno) => Err(Failure::Refused(errno)),
                None if request.complete() => Ok(()),
                None => return Err(Broken::Garbled),
            };
            request.state = State::Done(outcome);
            self.under_way -= 1;
            self.last_progress = now();
        }
        Ok(Incoming::Head)
    }

    /// Hands the connection back when nothing is under way on it; ends it if it brought more than
    /// was asked for.
    pub(super) fn put_back(self) {
        if self.under_way == 0 && self.unread.is_empty() && matches!(self.incoming, Incoming::Head)
        {
            self.link.put_back();
        } else {
            self.end();
        }
    }

    /// Ends the connection, also for other holders of its descriptor.
    pub(super) fn end(self) {
        let _ = shutdown(self.link.fd(), Shutdown::Both);
    }

    /// Tells the server that nothing more comes, and waits until it has hung up.
    pub(super) fn drain(&self, time: Duration) {
        if shutdown(self.link.fd(), Shutdown::Write).is_err() {
            return;
        }
        let start = now();
        let mut discarded = [0; 4096];
        loop {
            let left = time.saturating_sub(now().since(start));
            if left.is_zero() {
                return;
            }
            let left = Timespec {
                tv_sec: left.as_secs().min(1 << 30) as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            let _ =
                poll(&mut [PollFd::from_borrowed_fd(self.link.fd(), PollFlags::IN)], Some(&left));
            match recv(self.link.fd(), &mut discarded[..], RecvFlags::DONTWAIT) {
                Ok((1.., _)) | Err(Errno::AGAIN | Errno::INTR) => {}
                Ok((0, _)) | Err(_) => return,
            }
        }
    }
}

/// Ends an idle connection as the protocol wants it.
pub(super) fn send_disconnect(fd: BorrowedFd<'_>) {
    let _ =
        send(fd, &wire::request(wire::DISC, 0, 0, 0, 0), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    let _ = shutdown(fd, Shutdown::Write);
}
