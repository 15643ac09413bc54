//! Calls of processes that write to memory past its page tables.
//!
//! `process_vm_writev` takes the pages that it is to write to, for writing, and then reads what to
//! write. Write protection that comes in between does not stop it. So each such call is counted
//! while it lasts, and who has protected pages waits until all calls have ended that may have begun
//! before. Each writes a page at most, from memory that was touched just before.
//!
//! Calls that begin later meet the protection. They are counted apart, by *turn*, so that they are
//! not waited for: the one who waits begins another turn, and waits for those of the turn before;
//! and does so twice, for of each turn there may be some from before.
//!
//! Owns: the turn, and the counts. Locks: none. All accesses are `SeqCst`: a call is counted before
//! the kernel takes a page for it, and the counts are looked at after the pages were protected.

use std::sync::atomic::Ordering::SeqCst;

use crate::{ProcSlot, Segment};

/// In the word of the turn: there is shared memory, and calls are to be counted.
const WATCHED: u32 = 2;

impl Segment {
    /// Calls are to be counted from now on.
    pub fn watch_past_writes(&self) {
        self.header.past_writes_turn.fetch_or(WATCHED, SeqCst);
    }

    /// True if calls are to be counted.
    pub fn watches_past_writes(&self) -> bool {
        self.header.past_writes_turn.load(SeqCst) & WATCHED != 0
    }

    /// Makes a call that may write past page tables, by the process that has the slot.
    pub fn write_past<R>(&self, slot: &ProcSlot, call: impl FnOnce() -> R) -> R {
        let turn = self.header.past_writes_turn.load(SeqCst) as usize % 2;
        slot.agent.past_writes_begun.fetch_add(1, SeqCst);
        slot.agent.past_writes[turn].fetch_add(1, SeqCst);
        let result = call();
        slot.agent.past_writes[turn].fetch_sub(1, SeqCst);
        result
    }

    /// Begins another turn, and returns the one before: its calls are to be waited for.
    pub fn next_turn_of_past_writes(&self) -> usize {
        self.header.past_writes_turn.fetch_xor(1, SeqCst) as usize % 2
    }

    /// The processes that are in a call of a turn, and how many calls each has begun so far,
    /// wrapping.
    pub fn past_writers(&self, turn: usize) -> impl Iterator<Item = (u32, u32)> {
        let is_in = move |slot: &&ProcSlot| slot.agent.past_writes[turn % 2].load(SeqCst) != 0;
        let writer =
            |slot: &ProcSlot| (slot.pid.load(SeqCst), slot.agent.past_writes_begun.load(SeqCst));
        self.claimed().map(|(_, slot)| slot).filter(is_in).map(writer)
    }
}

#[cfg(test)]
mod tests {
    use crate::layout::test_segment;

    #[test]
    fn calls_that_began_before_are_seen_whatever_their_turn() {
        let segment = test_segment();
        let slot = segment.slot(segment.claim(7, 0).expect("a slot"));
        assert!(!segment.watches_past_writes());
        segment.watch_past_writes();
        let writers = |turn| segment.past_writers(turn).map(|(pid, _)| pid).collect::<Vec<_>>();
        segment.write_past(slot, || {
            let old = segment.next_turn_of_past_writes();
            assert_eq!(writers(old), [7]);
            // One that begins now is of the next turn.
            segment.write_past(slot, || {
                assert_eq!((writers(old), writers(1 - old)), (vec![7], vec![7]));
                assert_eq!(segment.next_turn_of_past_writes(), 1 - old);
            });
            assert_eq!((writers(old), writers(1 - old)), (vec![7], vec![]));
        });
        assert_eq!((writers(0), writers(1)), (vec![], vec![]));
        assert!(segment.watches_past_writes());
    }
}
