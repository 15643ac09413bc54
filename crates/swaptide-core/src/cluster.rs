//! The record of one cluster, and the counts too large for their words.
//! (docs/linux-swap.md, "Clusters" and "Swap table")
//!
//! Invariants (cluster lock):
//! 1. The table is in use exactly while `used > 0`, or while the allocator holds the lock and is
//!    filling the cluster.
//! 2. `used` is the number of words that are not free; bad slots count as used.
//! 3. `order` is set by the first allocation into an empty cluster and stands until the cluster is
//!    empty again.
//! 4. `list` names the list the cluster is on; [`ListId::None`] with the lock free means: being
//!    discarded, or never used.
//! 5. A line of eight words without its bit in `open` has no free slot. (With the bit it may have
//!    one.)
//! 6. A word whose count is 255 has an entry in `overflow`, and no other word has.
//!
//! Locks: `state` is the cluster lock. A folio is locked before it, the lists lock and the pool's
//! lock after it.

use crate::entry::{COUNT_OVERFLOW, Entry};
use crate::sync::{AtomicU32, AtomicUsize, Ordering, SpinGuard, SpinLock};
use crate::table::TableState;

/// End of an intrusive list, and "no cluster".
pub(crate) const NO_CLUSTER: u32 = u32::MAX;

/// The list that a cluster is on; the number is an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListId {
    None,
    Free,
    Full,
    Discard,
    Nonfull(u8),
    Frag(u8),
}

/// The state of a cluster, without its words.
pub(crate) struct Cluster {
    /// Neighbours on the list named by `state.list`; lists lock.
    pub prev: AtomicU32,
    pub next: AtomicU32,
    state: SpinLock<ClusterState>,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Cluster>() <= 40);

/// Words in one cache line of a table.
pub(crate) const SLOTS_PER_LINE: usize = 8;
const _: () = assert!(crate::ids::SLOTS_PER_CLUSTER / SLOTS_PER_LINE <= u64::BITS as usize);

/// The part under the cluster lock.
pub(crate) struct ClusterState {
    overflow: Option<Box<Overflow>>,
    /// The state of the table.
    pub table: TableState,
    pub used: u16,
    pub order: u8,
    /// The CPU that took slots of it last: a hint.
    pub last_cpu: u8,
    pub list: ListId,
    /// Lines of the table that may have a free slot; a line is [`SLOTS_PER_LINE`] words, one cache
    /// line.
    pub open: u64,
    /// Something was freed since the last scan of the whole cluster for its own order.
    pub holes: bool,
}

impl Default for Cluster {
    fn default() -> Self {
        Cluster {
            prev: AtomicU32::new(NO_CLUSTER),
            next: AtomicU32::new(NO_CLUSTER),
            state: SpinLock::new(ClusterState {
                overflow: None,
                table: TableState::Bare,
                used: 0,
                order: 0,
                last_cpu: 0,
                list: ListId::None,
                open: u64::MAX,
                holes: false,
            }),
        }
    }
}

impl Cluster {
    pub fn lock(&self) -> SpinGuard<'_, ClusterState> {
        self.state.lock()
    }

    pub fn try_lock(&self) -> Option<SpinGuard<'_, ClusterState>> {
        self.state.try_lock()
    }
}

/// The rest of the counts that do not fit their words: (slot in cluster, count - 255).
#[derive(Default)]
struct Overflow {
    counts: Vec<(u16, u32)>,
}

impl ClusterState {
    /// The true count of slot `i`, whose word is `entry`.
    pub fn count(&self, i: usize, entry: Entry) -> u32 {
        if entry.count() < COUNT_OVERFLOW { entry.count() } else { COUNT_OVERFLOW + self.rest(i) }
    }

    fn rest(&self, i: usize) -> u32 {
        let found =
            self.overflow.iter().flat_map(|o| &o.counts).find(|(slot, _)| usize::from(*slot) == i);
        found.map_or(0, |(_, rest)| *rest)
    }

    /// Makes sure that the count of slot `i` can grow by one. `bytes` keeps account of the overflow
    /// tables' memory.
    pub(crate) fn reserve_count(
        &mut self,
        i: usize,
        entry: Entry,
        more: usize,
        bytes: &AtomicUsize,
    ) -> bool {
        if entry.count() < COUNT_OVERFLOW - 1 {
            return true;
        }
        if entry.count() == COUNT_OVERFLOW {
            return self.rest(i) < u32::MAX - COUNT_OVERFLOW;
        }
        let before = self.overflow_bytes();
        let overflow = self.overflow.get_or_insert_default();
        let room = overflow.counts.try_reserve(more).is_ok();
        bytes.fetch_add(self.overflow_bytes() - before, Ordering::Relaxed);
        room
    }

    /// The word with a count one higher; room was made by [`ClusterState::reserve_count`].
    pub(crate) fn count_up(&mut self, i: usize, entry: Entry) -> Entry {
        match entry.count() {
            COUNT_OVERFLOW => {
                *self.rest_mut(i) += 1;
                entry
            }
            count => {
                if count + 1 == COUNT_OVERFLOW {
                    self.overflow.get_or_insert_default().counts.push((i as u16, 0));
                }
                entry.with_count(count + 1)
            }
        }
    }

    /// The word with a count one lower; the count is at least 1.
    pub fn count_down(&mut self, i: usize, entry: Entry, bytes: &AtomicUsize) -> Entry {
        if entry.count() < COUNT_OVERFLOW {
            return entry.with_count(entry.count() - 1);
        }
        let rest = self.rest_mut(i);
        if *rest > 0 {
            *rest -= 1;
            return entry;
        }
        self.drop_rest(i, bytes);
        entry.with_count(COUNT_OVERFLOW - 1)
    }

    /// Makes room for `n` more counts that do not fit their words.
    pub(crate) fn reserve_overflow(&mut self, n: usize, bytes: &AtomicUsize) -> bool {
        if n == 0 {
            return true;
        }
        let before = self.overflow_bytes();
        let room = self.overflow.get_or_insert_default().counts.try_reserve(n).is_ok();
        bytes.fetch_add(self.overflow_bytes() - before, Ordering::Relaxed);
        room
    }

    /// The word of slot `i` leaves the cluster: its overflow entry goes.
    pub(crate) fn drop_count(&mut self, i: usize, entry: Entry, bytes: &AtomicUsize) {
        if entry.count() == COUNT_OVERFLOW {
            self.drop_rest(i, bytes);
        }
    }

    /// A word that comes to slot `i` with that count; room was made by
    /// [`ClusterState::reserve_overflow`].
    pub(crate) fn give_count(&mut self, i: usize, entry: Entry, count: u32) -> Entry {
        if entry.count() == COUNT_OVERFLOW {
            self.overflow.get_or_insert_default().counts.push((i as u16, count - COUNT_OVERFLOW));
        }
        entry
    }

    fn drop_rest(&mut self, i: usize, bytes: &AtomicUsize) {
        let before = self.overflow_bytes();
        if let Some(overflow) = &mut self.overflow {
            overflow.counts.retain(|(slot, _)| usize::from(*slot) != i);
            if overflow.counts.is_empty() {
                self.overflow = None;
            }
        }
        bytes.fetch_sub(before - self.overflow_bytes(), Ordering::Relaxed);
    }

    fn rest_mut(&mut self, i: usize) -> &mut u32 {
        let counts = self.overflow.as_mut().map(|o| &mut o.counts);
        let found = counts.and_then(|c| c.iter_mut().find(|(slot, _)| usize::from(*slot) == i));
        &mut found.expect("a count of 255 has an overflow entry").1
    }

    /// The cluster is empty: back to the state of a new one, still off every list or on the one it
    /// is on.
    pub fn reset(&mut self, bytes: &AtomicUsize) {
        bytes.fetch_sub(self.overflow_bytes(), Ordering::Relaxed);
        self.overflow = None;
        self.order = 0;
        self.open = u64::MAX;
        self.holes = false;
    }

    fn overflow_bytes(&self) -> usize {
        self.overflow
            .as_ref()
            .map_or(0, |o| size_of::<Overflow>() + o.counts.capacity() * size_of::<(u16, u32)>())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ids::{FolioId, GroupId};

    #[test]
    fn counts_overflow_and_come_back() {
        let bytes = AtomicUsize::new(0);
        let cluster = Cluster::default();
        let mut state = cluster.lock();
        let mut word = Entry::new_folio(FolioId(1), GroupId(2));
        for n in 1..1000 {
            assert_eq!(state.count(7, word), n);
            assert!(state.reserve_count(7, word, 1, &bytes));
            word = state.count_up(7, word);
        }
        assert!(bytes.load(Ordering::Relaxed) > 0);
        for n in (0..1000).rev() {
            word = state.count_down(7, word, &bytes);
            assert_eq!(state.count(7, word), n);
        }
        assert_eq!(bytes.load(Ordering::Relaxed), 0);
        assert_eq!(word, Entry::new_folio(FolioId(1), GroupId(2)).with_count(0));
    }

    impl core::fmt::Debug for Entry {
        fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
            write!(f, "{:?}", self.info())
        }
    }
}
