//! The thread that forks, and how long others wait for it.
//!
//! Some things cannot be done while a thread of the process forks. A thread that wants one of them
//! waits until the fork is over. But fork handlers of other libraries run between this library's
//! and fork(2), and may take a lock that just this thread holds: then both would wait for ever. So
//! after a while it gives up, and its call fails with `EAGAIN`.
//!
//! Owns: which thread forks, and whether it may have made its copy yet. Both are written with
//! [`crate::process::FORK_LOCK`] held.
//!
//! Invariant: a thread that is back from fork(2) waits for the handler alone, so that time does not
//! count.
//!
//! Locks: none.

use std::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use swaptide_sys::process::waits_outside_fork;
use swaptide_sys::thread::{Nanos, now};

/// The thread that is between its prepare handler and the other end, if one is.
pub(crate) static FORKING: AtomicU32 = AtomicU32::new(0);
/// Odd from the end of this library's prepare handler until fork(2) has returned. No two forks have
/// the same number.
static COPYING: AtomicU32 = AtomicU32::new(0);

/// A forking thread that is seen blocked outside of fork(2) for so long, all looks together, waits
/// for a lock.
const MAX_OUTSIDE: Duration = Duration::from_secs(2);
/// A fork that takes so long is not waited for, wherever its thread is.
const MAX_FORK: Duration = Duration::from_secs(15);
/// Between two checks of where it is.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Most that one check adds to the time that counts: only turns of the waiting thread do.
const MAX_STEP: Duration = Duration::from_millis(50);

/// The calling thread continues with other libraries' handlers, and with fork(2).
pub(crate) fn goes_on() {
    COPYING.store(COPYING.load(Relaxed).wrapping_add(1) | 1, Release);
}

/// The calling thread, or its copy in the child, is back from fork(2).
pub(crate) fn is_back() {
    COPYING.store((COPYING.load(Relaxed) | 1).wrapping_add(1), Release);
}

/// The state of the fork that a caller would wait for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    /// No fork that has not made its copy.
    NoFork,
    /// One that is under way.
    Waits,
    /// One that was waited for long enough.
    Over,
}

/// The time for which the caller has waited for the fork that is under way.
pub(crate) struct ForkWait {
    fork: u32,
    looked: Nanos,
    outside: Duration,
    all: Duration,
}

impl ForkWait {
    /// No time has passed yet; the clock starts now.
    pub(crate) fn new() -> ForkWait {
        ForkWait::from(0, now())
    }

    fn from(fork: u32, looked: Nanos) -> ForkWait {
        ForkWait { fork, looked, outside: Duration::ZERO, all: Duration::ZERO }
    }

    /// To be asked at least every [`MAX_STEP`].
    pub(crate) fn turn(&mut self) -> Turn {
        let is_outside = || waits_outside_fork(FORKING.load(Relaxed));
        self.turn_at(COPYING.load(Acquire), now(), is_outside)
    }

    fn turn_at(&mut self, fork: u32, now: Nanos, is_outside: impl FnOnce() -> bool) -> Turn {
        if fork.is_multiple_of(2) {
            return Turn::NoFork;
        }
        if self.fork != fork {
            *self = ForkWait::from(fork, now);
            return Turn::Waits;
        }
        let passed = now.since(self.looked);
        if passed >= LOOK_INTERVAL {
            self.looked = now;
            let step = passed.min(MAX_STEP);
            self.all += step;
            if is_outside() {
                self.outside += step;
            }
        }
        if self.outside >= MAX_OUTSIDE || self.all >= MAX_FORK { Turn::Over } else { Turn::Waits }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Milliseconds until a fork is waited for no longer, looked at every `step` of them.
    fn waits(step: u64, is_outside: impl Fn(u64) -> bool) -> u64 {
        let mut wait = ForkWait::from(7, Nanos(0));
        (0..1_000_000)
            .step_by(step as usize)
            .find(|at| wait.turn_at(7, Nanos(at * 1_000_000), || is_outside(*at)) == Turn::Over)
            .expect("it ends")
    }

    #[test]
    fn a_fork_is_waited_for_until_its_thread_has_waited_for_long() {
        assert_eq!(waits(1, |_| true), 2_000);
        assert_eq!(waits(1, |_| false), 15_000);
        let naps = waits(1, |at| !at.is_multiple_of(200));
        assert!((2_000..2_500).contains(&naps), "{naps}: one that is seen awake at times");
        assert_eq!(waits(1_000, |_| true), 40_000, "turns count and no time without one");
    }

    #[test]
    fn each_fork_is_waited_for_by_itself() {
        let mut wait = ForkWait::from(1, Nanos(0));
        let at = |ms: u64| Nanos(ms * 1_000_000);
        for ms in (0..1_990).step_by(30) {
            assert_eq!(wait.turn_at(1, at(ms), || true), Turn::Waits);
        }
        assert_eq!(wait.turn_at(2, at(2_000), || true), Turn::NoFork);
        for ms in (2_000..3_980).step_by(30) {
            assert_eq!(wait.turn_at(3, at(ms), || true), Turn::Waits);
        }
        assert_eq!(wait.turn_at(3, at(4_040), || true), Turn::Over);
    }

    #[test]
    fn the_number_tells_forks_apart_and_where_they_are() {
        let number = || COPYING.load(Relaxed);
        goes_on();
        let first = number();
        is_back();
        let between = number();
        is_back();
        goes_on();
        assert!(first % 2 == 1 && between % 2 == 0 && number() % 2 == 1 && number() != first);
        is_back();
    }
}
