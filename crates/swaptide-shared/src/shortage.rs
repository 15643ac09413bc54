//! Pages that cannot come back for a while, because this process is short of memory or descriptors:
//! they cannot be read from the swap areas, or not be written into their memory file.
//!
//! Owns: how long that has failed so in a row. Locks: none; inside the state's.

use std::time::Duration;

use swaptide_engine::sched::deadline::Deadline;

use crate::store::Unloaded;

/// The time for which reads of the swap areas, or writes to memory files, may fail in a row because
/// this process is short of memory or descriptors.
const SHORTAGE_TIMEOUT: Duration = Duration::from_secs(30);
/// The same where a test wants to see what happens then.
const SHORTAGE_TIMEOUT_IN_TESTS: Duration = Duration::from_secs(2);

/// The bound of that time.
pub(crate) fn bound(is_test: bool) -> Duration {
    if is_test { SHORTAGE_TIMEOUT_IN_TESTS } else { SHORTAGE_TIMEOUT }
}

/// The present shortages.
#[derive(Default)]
pub(crate) struct Shortages {
    /// Of reads from the swap areas.
    pub(crate) reads: Shortage,
    /// Of writes into memory files.
    pub(crate) writes: Shortage,
}

/// The time for which reads, or writes, have failed so. Such a page stays out, and is asked for
/// again: nothing is wrong with it, and what ends the shortage may wait for the state's lock.
#[derive(Default)]
pub(crate) struct Shortage(Option<Deadline>);

impl Shortage {
    /// True when the last attempt failed so.
    pub(crate) fn is_any(&self) -> bool {
        self.0.is_some()
    }

    /// After an attempt to load pages. False when reads have failed so for too long.
    pub(crate) fn follow(&mut self, unloaded: &Unloaded, bound: Duration) -> bool {
        self.attempted(unloaded.has_read, !unloaded.short.is_empty(), bound)
    }

    /// After an attempt of which something was `done`, or nothing and something `failed` so. False
    /// when that has failed for too long.
    pub(crate) fn attempted(&mut self, done: bool, failed: bool, bound: Duration) -> bool {
        if done {
            self.0 = None;
        } else if failed {
            return !self.0.get_or_insert_with(|| Deadline::new(bound)).is_over(|| false);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_store::Slot;

    #[test]
    fn a_shortage_ends_with_a_read_or_exceeds_its_bound() {
        let short = || Unloaded { short: vec![Slot(1)], has_read: false, ..Unloaded::default() };
        let mut shortage = Shortage::default();
        assert!(shortage.follow(&short(), Duration::from_secs(60)));
        // What is in compressed memory says nothing of it.
        assert!(shortage.follow(&Unloaded::default(), Duration::ZERO) && shortage.is_any());
        let read = Unloaded { short: vec![Slot(1)], has_read: true, ..Unloaded::default() };
        assert!(shortage.follow(&read, Duration::ZERO) && !shortage.is_any());
        assert!(!shortage.follow(&short(), Duration::ZERO));
    }
}
