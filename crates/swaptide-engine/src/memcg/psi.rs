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
//! Owns: that clock ([`StallClock`]), and what one thread that serves faults adds to it
//! ([`Stall`]).
//!
//! Locks: the clock's, below the memory lock.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::Release, fence};

use swaptide_ipc::{Counter, ProcSlot};
use swaptide_sys::lock::Lock;
use swaptide_sys::thread::Nanos;

/// The time for which at least one thread of the program has waited for memory.
#[derive(Default)]
pub(crate) struct StallClock {
    /// Threads that serve faults for which one waits.
    servers: u32,
    /// When none waited any more.
    ended: Nanos,
    /// Nanoseconds that were not counted yet: less than a microsecond.
    rest: u64,
}

impl StallClock {
    /// A thread stalls from `at` on; `word` is the slot's.
    fn begin(&mut self, word: &AtomicU64, at: Nanos) {
        if self.servers == 0 {
            // What was counted to its end is not counted again.
            word.store(at.0.max(self.ended.0), Relaxed);
        }
        self.servers += 1;
    }

    /// It stalls no more; gives the microseconds to count.
    fn end(&mut self, word: &AtomicU64, at: Nanos) -> usize {
        self.servers -= 1;
        if self.servers != 0 {
            return 0;
        }
        self.ended = at;
        let nanos = at.0.saturating_sub(word.swap(0, Relaxed)) + self.rest;
        // A reader that sees what is counted now (acquires the counter) sees that the wait is over.
        fence(Release);
        self.rest = nanos % 1000;
        (nanos / 1000) as usize
    }
}

/// The wait of a thread of the program for what one thread serves.
pub(crate) struct Stall {
    clock: &'static Lock<StallClock>,
    on: bool,
    /// The fault that is being answered: when that began.
    fault: Option<Nanos>,
}

impl Stall {
    /// No thread stalls.
    pub(crate) fn new(clock: &'static Lock<StallClock>) -> Stall {
        Stall { clock, on: false, fault: None }
    }

    /// A thread stalls from `at` on, if none did before.
    fn begin(&mut self, slot: &ProcSlot, at: Nanos) {
        if !std::mem::replace(&mut self.on, true) {
            self.clock.lock().begin(&slot.usage.stalled_since, at);
        }
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
            self.begin(slot, began);
        }
    }

    /// A thread that was answered stalls from now on.
    pub(crate) fn stalls_from(&mut self, slot: &ProcSlot, at: Nanos) {
        self.begin(slot, at);
    }

    /// The thread that was answered stalls no more, nor does any other unless something
    /// `is_awaited`: a page that was sent for, or the end of a delay.
    pub(crate) fn stalls_until(&mut self, slot: &ProcSlot, at: Nanos, is_awaited: bool) {
        if self.on && !is_awaited {
            self.on = false;
            let micros = self.clock.lock().end(&slot.usage.stalled_since, at);
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
        let mut clock = StallClock::default();
        // Two at once are one.
        clock.begin(&word, Nanos(1_000));
        clock.begin(&word, Nanos(5_000));
        assert_eq!(word.load(Relaxed), 1_000);
        assert_eq!(clock.end(&word, Nanos(6_000)), 0);
        assert_eq!(clock.end(&word, Nanos(11_600)), 10);
        assert_eq!(word.load(Relaxed), 0);
        // Its fault was read while another thread's was answered: that time was counted.
        clock.begin(&word, Nanos(11_000));
        assert_eq!(clock.end(&word, Nanos(11_600)), 0);
        // Nothing ran for a while: the supervisor restarts it.
        clock.begin(&word, Nanos(12_000));
        word.store(14_400, Relaxed);
        assert_eq!(clock.end(&word, Nanos(15_000)), 1, "0.6 + 0.6");
        let mut again = |at: u64| {
            clock.begin(&word, Nanos(at));
            clock.end(&word, Nanos(at + 700))
        };
        assert_eq!(
            (again(20_000), again(30_000), again(40_000)),
            (0, 1, 1),
            "0.2 + 0.7, 0.9 + 0.7, 0.6 + 0.7"
        );
    }
}
