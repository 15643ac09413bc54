//! What fault servers have read and the handler is to do; and who may read and fill.
//!
//! The handler and the fault servers ([`crate::fault_server`]) read one userfaultfd. A server
//! serves the faults that it reads. What else it reads, and faults that it cannot serve, it leaves
//! here.
//!
//! Owns: one message that is no fault, faults, and whether the handler works alone.
//!
//! Invariants
//! 1. A server reads only while no event stands here and the handler does not work alone. So at
//!    most one event stands here, and the handler applies events in the order in which the kernel
//!    told of them.
//! 2. While an event stands here nothing is filled and nothing is taken out: it was read, so that
//!    the kernel no longer refuses that, and the table does not know of it yet.
//! 3. While the handler works alone no server fills anything. It does so for all that is not the
//!    answer to a fault: what it reads of the address space meanwhile stays true as if there were
//!    no servers.
//!
//! Locks: none of its own; the memory lock guards all of it.

use std::collections::VecDeque;

use swaptide_sys::page::VirtAddr;
use swaptide_sys::uffd::Event;

/// A fault that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// An address of the page that is missing.
    pub addr: VirtAddr,
    /// Thread id of the thread that waits.
    pub tid: u32,
    /// Times it was tried in vain.
    pub tries: u32,
}

/// The amount that a change of threads between two faults adds to the score, and its maximum.
const SCORE_OF_CHANGE: u32 = 4;
const MAX_SCORE: u32 = 64;
/// From this score on several threads fault; below the other, one.
const CROWD_SCORE: u32 = 32;
const SINGLE_SCORE: u32 = 4;

/// Detects that several threads fault in turns.
#[derive(Default, Debug)]
pub(crate) struct Concurrency {
    last: u32,
    score: u32,
    is_crowd: bool,
}

impl Concurrency {
    /// A fault of a thread was read.
    pub(crate) fn note(&mut self, tid: u32) {
        if std::mem::replace(&mut self.last, tid) == tid {
            self.score = self.score.saturating_sub(1);
        } else {
            self.score = (self.score + SCORE_OF_CHANGE).min(MAX_SCORE);
        }
        self.is_crowd = self.score >= if self.is_crowd { SINGLE_SCORE } else { CROWD_SCORE };
    }
}

/// The messages that fault servers have read and left for the handler: at most one event, and any
/// number of faults.
pub struct Handed {
    /// Servers are there.
    pub(crate) are_servers: bool,
    /// Servers read however few threads fault: a test wants it.
    is_forced: bool,
    /// Servers pay ([`crate::sched::fault_servers`]), as far as the handler has seen.
    pub(crate) do_servers_pay: bool,
    is_alone: bool,
    event: Option<Event>,
    faults: VecDeque<Fault>,
    pub(crate) crowd: Concurrency,
}

impl Handed {
    /// There are no servers. `is_forced`: they will read however few threads fault.
    pub(crate) fn new(is_forced: bool) -> Handed {
        Handed {
            are_servers: false,
            is_forced,
            do_servers_pay: false,
            is_alone: true,
            event: None,
            faults: VecDeque::with_capacity(64),
            crowd: Concurrency::default(),
        }
    }

    /// In a forked child: what stands here is its parent's, and it has no servers.
    pub(crate) fn forked(&mut self) {
        self.are_servers = false;
        self.do_servers_pay = false;
        self.is_alone = true;
        self.faults.clear();
        self.crowd = Concurrency::default();
    }

    /// True if a server may read the next message.
    pub(crate) fn may_servers_read(&self) -> bool {
        !self.is_alone && self.event.is_none() && (self.is_forced || self.is_crowd_shared())
    }

    /// True while several threads fault, and servers pay.
    pub(crate) fn is_crowd_shared(&self) -> bool {
        self.crowd.is_crowd && self.do_servers_pay
    }

    /// True while several threads fault.
    pub(crate) fn is_crowd(&self) -> bool {
        self.crowd.is_crowd
    }

    /// True while an event waits for the handler: nothing goes in or out.
    pub(crate) fn has_event(&self) -> bool {
        self.event.is_some()
    }

    /// True if pages may be put in place now, by a server or by the handler.
    pub(crate) fn may_fill(&self, is_server: bool) -> bool {
        self.event.is_none() && !(is_server && self.is_alone)
    }

    /// The handler works alone from here on, or no longer.
    pub(crate) fn set_alone(&mut self, is_alone: bool) {
        self.is_alone = is_alone;
    }

    /// A server has read what is no fault that it serves.
    ///
    /// # Panics
    /// When one stands here already.
    pub(crate) fn leave_event(&mut self, event: Event) {
        assert!(self.event.is_none(), "a server read where an event was handed over");
        self.event = Some(event);
    }

    /// A server cannot serve a fault.
    pub(crate) fn leave_fault(&mut self, fault: Fault) {
        self.faults.push_back(fault);
    }

    /// The event, for the handler.
    pub(crate) fn take_event(&mut self) -> Option<Event> {
        self.event.take()
    }

    /// The faults, for the handler.
    pub(crate) fn take_faults(&mut self) -> impl Iterator<Item = Fault> + '_ {
        self.faults.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrency_follows_faulting_threads() {
        let mut crowd = Concurrency::default();
        let mut is_crowd_after = |tid: u32| {
            crowd.note(tid);
            crowd.is_crowd
        };
        assert!(!(0..1000).any(|_| is_crowd_after(7)), "one thread");
        let first = (0..100).position(|turn| is_crowd_after(7 + turn % 2));
        assert!(first.is_some_and(|turns| turns < 20), "{first:?}");
        assert!((0..100).all(|turn| is_crowd_after(7 + turn % 2)));
        let ends = (0..100).position(|_| !is_crowd_after(9));
        assert!(ends.is_some_and(|turns| turns > 16), "{ends:?}");
        assert!(!(0..1000).any(|turn| is_crowd_after(if turn % 16 == 0 { 1 } else { 2 })));
    }

    #[test]
    fn servers_read_only_while_the_handler_answers_faults() {
        let mut handed = Handed::new(true);
        assert!(!handed.may_servers_read());
        assert_eq!((handed.may_fill(true), handed.may_fill(false)), (false, true));
        handed.set_alone(false);
        assert!(handed.may_servers_read() && handed.may_fill(true));
        handed.leave_event(Event::Unknown(1));
        assert!(!handed.may_servers_read());
        assert!(!handed.may_fill(true) && !handed.may_fill(false));
        assert!(handed.take_event().is_some());
        assert!(handed.may_servers_read());
        handed.is_forced = false;
        assert!(!handed.may_servers_read(), "one thread faults");
        handed.do_servers_pay = true;
        (0..100).for_each(|turn| handed.crowd.note(7 + turn % 2));
        assert!(handed.may_servers_read());
        handed.do_servers_pay = false;
        assert!(!handed.may_servers_read(), "CPUs are few");
    }
}
