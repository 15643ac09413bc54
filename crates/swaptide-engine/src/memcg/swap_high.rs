//! `swap.high`: a process that grows in a group that has more on swap areas than that is slowed
//! down.
//!
//! The supervisor says in the process's slot what [`THROTTLE_PAGES`] fresh pages cost in waiting
//! time; the pages are there at once, and the thread that asked for them is woken when the time is
//! over. So only what grows waits, no thread waits longer than [`MAX_DELAY`] for a fault, and
//! nothing is ended.
//!
//! Invariants
//! 1. A thread that is held is woken when its time is over, at the latest before the handler waits
//!    without a bound.
//! 2. During a fork no thread is held: the forking one must come to its end.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use swaptide_ipc::{Counter, ProcSlot, THROTTLE_PAGES};
use swaptide_sys::thread::{Nanos, now};
use swaptide_sys::uffd::Uffd;

use crate::mm::types::{PageNo, range_of};

/// The longest that one fault waits.
const MAX_DELAY: Duration = Duration::from_secs(2);
/// A shorter delay is carried over until enough has accumulated.
const MIN_DELAY: Duration = Duration::from_millis(1);

/// Threads that asked for new memory and are answered later.
pub(crate) struct Throttle {
    /// Threads that wait, by the pages they wait for, and until when.
    held: VecDeque<(Nanos, PageNo)>,
    /// The wait for growth that no thread has served yet.
    owed: Duration,
}

impl Throttle {
    pub(crate) fn new() -> Throttle {
        Throttle { held: VecDeque::with_capacity(64), owed: Duration::ZERO }
    }

    /// `pages` fresh ones are in, at `price_us` for [`THROTTLE_PAGES`] of them.
    pub(crate) fn grew(&mut self, pages: usize, price_us: u32) {
        if price_us == 0 {
            self.owed = Duration::ZERO;
            return;
        }
        let cost = Duration::from_nanos(u64::from(price_us) * 1000 * pages as u64 / THROTTLE_PAGES);
        self.owed = (self.owed + cost).min(MAX_DELAY);
    }

    /// The time that is owed, if it is worth a wait.
    fn due(&mut self) -> Option<Duration> {
        (self.owed >= MIN_DELAY).then(|| std::mem::take(&mut self.owed))
    }

    /// True while a thread waits.
    pub(crate) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// The time that the handler may wait for a message; `None` for no bound.
    pub(crate) fn time_left(&self) -> Option<Duration> {
        let (first, _) = self.held.iter().min_by_key(|(until, _)| until.0)?;
        Some(Duration::from_nanos(first.0.saturating_sub(now().0)))
    }

    /// Has the thread wait that asked for a page, which is there, if it is its turn to and nothing
    /// `forbids` it. False if it is to be woken at once.
    pub(crate) fn hold_fault(&mut self, slot: &ProcSlot, page: PageNo, forbids: bool) -> bool {
        let forbids = forbids || self.held.len() == self.held.capacity();
        match self.due() {
            Some(time) if !forbids => {
                self.held.push_back((Nanos(now().0 + time.as_nanos() as u64), page));
                slot.count(Counter::SwapHighWaits, 1);
                true
            }
            _ => false,
        }
    }

    /// Wakes those whose time is over.
    pub(crate) fn wake_held(&mut self, slot: &ProcSlot, uffd: &Uffd) {
        if self.held.is_empty() {
            return;
        }
        let now = now();
        let at_once = slot.control.throttle_us.load(Relaxed) == 0;
        self.held.retain(|(until, page)| {
            let over = at_once || until.0 <= now.0;
            if over {
                let _ = uffd.wake(range_of(*page, 1));
            }
            !over
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttle_wait_is_per_page_and_bounded() {
        let mut throttle = Throttle::new();
        throttle.grew(THROTTLE_PAGES as usize / 4, 2000);
        assert_eq!(throttle.due(), None, "half a millisecond");
        throttle.grew(THROTTLE_PAGES as usize / 4, 2000);
        assert_eq!((throttle.due(), throttle.due()), (Some(MIN_DELAY), None));
        throttle.grew(1 << 20, 1_000_000);
        assert_eq!(throttle.due(), Some(MAX_DELAY));
        throttle.grew(THROTTLE_PAGES as usize, 500);
        throttle.grew(1, 0);
        throttle.grew(THROTTLE_PAGES as usize, 600);
        assert_eq!(throttle.due(), None, "what was owed before it sank below is forgotten");
    }

    #[test]
    fn the_handler_waits_until_the_first_throttled_fault_is_due() {
        let mut throttle = Throttle::new();
        assert_eq!(throttle.time_left(), None);
        let now = now().0;
        throttle.held.push_back((Nanos(now + 900_000_000), PageNo(1)));
        throttle.held.push_back((Nanos(now + 500_000_000), PageNo(2)));
        assert!(throttle.time_left().expect("a bound") <= Duration::from_millis(500));
        throttle.held.push_back((Nanos(0), PageNo(3)));
        assert_eq!(throttle.time_left(), Some(Duration::ZERO));
    }
}
