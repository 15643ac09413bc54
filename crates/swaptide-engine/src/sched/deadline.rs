//! How long another thread or process is waited for.
//!
//! Two kinds of waits: a thread of the program waits for the handler with all signals blocked
//! ([`Waited`]), and an engine thread waits for another process ([`Deadline`]).
//!
//! Invariants
//! 1. A thread that waits with all signals blocked ends the process after some seconds if a signal
//!    that would end it is pending. No handler of the program runs there.
//! 2. Only time in which the waiting thread itself came to its turn counts, and no time in which
//!    the awaited process was stopped. An overloaded machine or a debugger is no hang.
//!
//! Locks: none. Nothing is allocated.

use std::time::Duration;

use swaptide_sys::lock::futex;
use swaptide_sys::thread::{Nanos, end_if_told, now};

/// The time that a thread of the program waits on a futex word of the engine between two checks.
pub const WAIT_SLICE: Duration = Duration::from_millis(100);
/// Turns in vain after which a signal may end the process.
const MAX_IDLE_SLICES: u32 = 20;
/// Most that one check adds to the time that counts.
const MAX_STEP: Duration = Duration::from_millis(50);
/// Between two checks whether the awaited process is stopped.
const STOPPED_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Counts the turns of a thread of the program that waits with all signals blocked.
#[derive(Default)]
pub struct Waited(u32);

impl Waited {
    /// After a turn. `mask`: the thread's own signal mask. What it blocks ends nothing.
    pub fn turn(&mut self, how: futex::Wait, mask: u64) {
        self.0 = self.0.saturating_add(u32::from(how == futex::TimedOut));
        if self.0 >= MAX_IDLE_SLICES {
            end_if_told(mask);
        }
    }
}

/// A bound on how long a process is waited for.
pub struct Deadline {
    last: Nanos,
    looked: Nanos,
    spent: Duration,
    bound: Duration,
}

impl Deadline {
    /// The bound counts from now.
    pub fn new(bound: Duration) -> Deadline {
        Deadline::from(now(), bound)
    }

    fn from(begin: Nanos, bound: Duration) -> Deadline {
        Deadline { last: begin, looked: begin, spent: Duration::ZERO, bound }
    }

    /// True if the deadline is over. Call it at least every [`MAX_STEP`]. `stopped` tells whether
    /// the awaited process is stopped; it is asked once a second.
    pub fn is_over(&mut self, stopped: impl FnOnce() -> bool) -> bool {
        self.is_over_at(now(), stopped)
    }

    fn is_over_at(&mut self, now: Nanos, stopped: impl FnOnce() -> bool) -> bool {
        self.spent += now.since(self.last).min(MAX_STEP);
        self.last = now;
        if now.since(self.looked) >= STOPPED_CHECK_INTERVAL {
            self.looked = now;
            if stopped() {
                // What it has had of its time before does not count either: it begins again.
                self.spent = Duration::ZERO;
            }
        }
        self.spent >= self.bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Nanos {
        Nanos(ms * 1_000_000)
    }

    #[test]
    fn only_turns_count() {
        let mut deadline = Deadline::from(at(0), Duration::from_millis(180));
        assert!(!deadline.is_over_at(at(50), || false));
        // Ten seconds without a turn are one step.
        assert!(!deadline.is_over_at(at(10_000), || false));
        assert!(!deadline.is_over_at(at(10_040), || false));
        assert!(deadline.is_over_at(at(20_000), || false));
    }

    #[test]
    fn stopped_processes_are_waited_for() {
        let mut deadline = Deadline::from(at(0), Duration::from_secs(2));
        assert!((1..1000).all(|turn| !deadline.is_over_at(at(turn * 40), || true)));
        let goes_on =
            (1000..1051).filter(|turn| deadline.is_over_at(at(turn * 40), || false)).count();
        assert!(goes_on > 0, "two seconds after it was continued");
    }
}
