//! A request to a server: what it asks for, where it is, and what came of it.

use core::ops::Range;
use std::vec::Vec;

use swaptide_sys::Errno;

use super::wire::{self, Garbled};

/// Most requests carried out together: what cookies have room for.
pub(super) const MAX_BATCH_REQUESTS: usize = 1024;
/// Pieces of a reply that may wait for others, besides those that come in order.
const MAX_EARLY_PIECES: usize = 64;

/// A request to the server.
pub(super) enum Job<'b> {
    Read(&'b mut [u8]),
    Write(&'b [u8]),
    Trim(u32),
    Flush,
}

/// Why a request failed.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Failure {
    /// The server says so.
    Refused(Errno),
    /// The server did not answer, within the timeout.
    Unreachable,
    /// No connection to it could be made all the time, for want of something of this process's own.
    /// Of reads alone: what is not written goes elsewhere.
    Short(Errno),
}

impl Failure {
    pub(super) fn errno(self) -> Errno {
        match self {
            Failure::Refused(errno) | Failure::Short(errno) => errno,
            // No server can say this: the caller can tell it from a refusal.
            Failure::Unreachable => Errno::TIMEDOUT,
        }
    }
}

/// The state of a request.
///
/// ```text
/// Waiting -> Queued -> Sent -> Done
///    ^---------+--------'            its connection broke
/// ```
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// On no connection: to be sent, perhaps again.
    Waiting,
    /// Will go out on the connection taken with this serial number.
    Queued(u64),
    /// Sent on that connection, and not answered.
    Sent(u64),
    Done(Result<(), Failure>),
}

pub(super) struct NbdRequest<'b> {
    pub(super) job: Job<'b>,
    pub(super) offset: u64,
    pub(super) state: State,
    /// The server has told an error; more of the reply may follow.
    pub(super) error: Option<Errno>,
    /// Was sent on a connection that broke.
    pub(super) again: bool,
    /// Was sent, as a whole or in part, on a connection that is given up without an answer: the
    /// server may carry it out at any time.
    pub(super) in_doubt: bool,
    /// The part of a read that came in order, and the parts that did not.
    came: Range<u32>,
    pieces: Vec<Range<u32>>,
}

impl<'b> NbdRequest<'b> {
    pub(super) fn new(offset: u64, job: Job<'b>) -> NbdRequest<'b> {
        NbdRequest {
            job,
            offset,
            state: State::Waiting,
            error: None,
            again: false,
            in_doubt: false,
            came: 0..0,
            pieces: Vec::new(),
        }
    }

    /// The bytes of the export that it is about.
    pub(super) fn len(&self) -> u32 {
        match &self.job {
            Job::Read(buf) => buf.len() as u32,
            Job::Write(bytes) => bytes.len() as u32,
            Job::Trim(len) => *len,
            Job::Flush => 0,
        }
    }

    /// The bytes that follow it on the wire.
    pub(super) fn payload(&self) -> &[u8] {
        if let Job::Write(bytes) = self.job { bytes } else { &[] }
    }

    /// Returns its encoding.
    pub(super) fn head(&self, cookie: u64, flags: u16) -> [u8; wire::REQUEST_HEADER_BYTES] {
        let (command, flags) = match self.job {
            Job::Read(_) => (wire::READ, 0),
            Job::Write(_) => (wire::WRITE, flags),
            Job::Trim(_) => (wire::TRIM, 0),
            Job::Flush => (wire::FLUSH, 0),
        };
        wire::request(command, flags, cookie, self.offset, self.len())
    }

    /// Notes that the bytes of a read from `offset` of the export on come now. Tells where in its
    /// buffer they belong; refused if that is not inside, or something came there before.
    pub(super) fn receive(&mut self, offset: u64, len: u32) -> Result<Range<u32>, Garbled> {
        let Job::Read(buf) = &self.job else { return Err(Garbled) };
        let from = offset.checked_sub(self.offset).ok_or(Garbled)?;
        let to =
            from.checked_add(len.into()).filter(|to| *to <= buf.len() as u64).ok_or(Garbled)?;
        let part = from as u32..to as u32;
        let apart = |other: &Range<u32>| part.end <= other.start || other.end <= part.start;
        if part.is_empty() || !apart(&self.came) || !self.pieces.iter().all(apart) {
            return Err(Garbled);
        }
        if part.start == self.came.end {
            self.came.end = part.end;
        } else if self.pieces.len() < MAX_EARLY_PIECES {
            self.pieces.push(part.clone());
        } else {
            return Err(Garbled);
        }
        Ok(part)
    }

    /// True if all of it came, if it reads. No two of its pieces overlap, and all lie inside: their
    /// lengths tell.
    pub(super) fn complete(&self) -> bool {
        let Job::Read(buf) = &self.job else { return true };
        self.came.len() + self.pieces.iter().map(ExactSizeIterator::len).sum::<usize>() == buf.len()
    }

    /// The result; `Unreachable` for one that no server has answered.
    pub(super) fn outcome(&self) -> Result<(), Failure> {
        if let State::Done(outcome) = self.state { outcome } else { Err(Failure::Unreachable) }
    }

    /// True if the server may still carry out a change, whatever the outcome was.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.in_doubt && self.changes()
    }

    pub(super) fn changes(&self) -> bool {
        matches!(self.job, Job::Write(_) | Job::Trim(_))
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.state, State::Done(_))
    }

    /// To be sent again, for its connection broke.
    pub(super) fn set_back(&mut self) {
        self.again |= matches!(self.state, State::Sent(_));
        self.state = State::Waiting;
        self.error = None;
        self.came = 0..0;
        self.pieces.clear();
    }
}
