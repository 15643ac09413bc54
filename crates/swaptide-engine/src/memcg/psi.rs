//! Stall time: how long threads of the program wait for memory.
//!
//! A thread *stalls* from the moment at which the handler looks at its fault until it is woken, if
//! the page was swapped, or room had to be made for it first; while a remote page is awaited; and
//! while it is held for `swap.high`. Counted is the time in which at least one does, as the
//! kernel's `some` of memory.pressure. What a thread waits before the handler comes to it is not
//! seen: no message tells when it began.
//!
//! Invariants
//! 1. `stalled_since` is not 0 exactly while a thread stalls, so that a wait that continues can be
//!    seen from outside. It is cleared before what it came to is counted, with a fence between;
//!    [`swaptide_ipc::ProcSlot::stalled_us`] reads in the other order: it may see a moment less,
//!    never the same moment twice.
//! 2. A process that is stopped does not stall, nor does its handler see that time passes: the
//!    supervisor moves `stalled_since` on ([`swaptide_ipc::ProcSlot::restart_stall`]).
//! 3. What is counted in microseconds loses nothing: the rest is kept for the next time.
//!
//! Locks: none; it is the handler's.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::Release, fence};

use swaptide_ipc::{Counter, ProcSlot};
use swaptide_sys::thread::Nanos;

/// Since when a thread of the program waits for memory, if one does.
#[derive(Default)]
pub(crate) struct Stall {
    on: bool,
    /// Nanoseconds that were not counted yet: less than a microsecond.
    rest: u64,
    /// The fault that is being answered: when that began.
    fault: Option<Nanos>,
}

impl Stall {
    /// A thread stalls from `at` on, if none did before; `word` is the slot's.
    fn begin(&mut self, word: &AtomicU64, at: Nanos) {
        if !self.on {
            self.on = true;
            word.store(at.0, Relaxed);
        }
    }

    /// No thread stalls any more; gives the microseconds to count.
    fn end(&mut self, word: &AtomicU64, at: Nanos) -> usize {
        if !std::mem::take(&mut self.on) {
            return 0;
        }
        let nanos = at.0.saturating_sub(word.swap(0, Relaxed)) + self.rest;
        // A reader that sees what is counted now (acquires the counter) sees that the wait is over.
        fence(Release);
        self.rest = nanos % 1000;
        (nanos / 1000) as usize
    }

    /// True while a thread stalls.
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// A fault is being answered since then; `None`: none is.
    pub(crate) fn answers_since(&mut self, began: Option<Nanos>) {
        self.fault = began;
    }

    /// The thread whose fault is being answered stalls, and did so from the beginning of that.
    pub(crate) fn stalls(&mut self, slot: &ProcSlot) {
        if let Some(began) = self.fault {
            self.begin(&slot.usage.stalled_since, began);
        }
    }

    /// A thread that was answered stalls from now on.
    pub(crate) fn stalls_from(&mut self, slot: &ProcSlot, at: Nanos) {
        self.begin(&slot.usage.stalled_since, at);
    }

    /// The thread that was answered stalls no more, nor does any other unless something
    /// `is_awaited`: a page that was sent for, or the end of a delay.
    pub(crate) fn stalls_until(&mut self, slot: &ProcSlot, at: Nanos, is_awaited: bool) {
        if self.on && !is_awaited {
            let micros = self.end(&slot.usage.stalled_since, at);
            slot.count(Counter::StallUs, micros as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalled_time_is_the_exact_time_with_waiting_threads() {
        let word = AtomicU64::new(0);
        let mut stall = Stall::default();
        assert_eq!(stall.end(&word, Nanos(900)), 0);
        // Two at once are one.
        stall.begin(&word, Nanos(1_000));
        stall.begin(&word, Nanos(5_000));
        assert_eq!((stall.is_on(), word.load(Relaxed)), (true, 1_000));
        assert_eq!(stall.end(&word, Nanos(11_600)), 10);
        assert_eq!((stall.is_on(), word.load(Relaxed)), (false, 0));
        // Nothing ran for a while: the supervisor restarts it.
        stall.begin(&word, Nanos(12_000));
        word.store(14_400, Relaxed);
        assert_eq!(stall.end(&word, Nanos(15_000)), 1, "0.6 + 0.6");
        let mut again = |at: u64| {
            stall.begin(&word, Nanos(at));
            stall.end(&word, Nanos(at + 700))
        };
        assert_eq!(
            (again(20_000), again(30_000), again(40_000)),
            (0, 1, 1),
            "0.2 + 0.7, 0.9 + 0.7, 0.6 + 0.7"
        );
    }
}
