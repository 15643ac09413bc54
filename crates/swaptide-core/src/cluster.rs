//! The record of one cluster, and the counts too large for their words.
//!
//! Invariants (cluster lock):
//! 1. A table is published exactly while `used > 0`, or while the allocator holds the lock and is filling the cluster.
//! 2. `used` is the number of words that are not free; bad slots count as used.
//! 3. `order` is set by the first allocation into an empty cluster and stands until the cluster is empty again.
//! 4. `list` names the list the cluster is on; [`ListId::None`] with the lock free means: being discarded, or never used.
//! 5. A line of eight words without its bit in `open` has no free slot. (With the bit it may have one.)
//! 6. A word whose count is 255 has an entry in `overflow`, and no other word has.
//!
//! Locks: `state` is the cluster lock. A folio is locked before it, the lists lock and the pool's lock after it.

use crate::entry::{COUNT_OVERFLOW, Entry};
use crate::lists::ListId;
use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, Guard, Ordering, SpinLock, read_locked};
use crate::table::{TableIndex, TablePool};

/// End of an intrusive list, and "no cluster".
pub(crate) const NO_CLUSTER: u32 = u32::MAX;

/// A publication is `generation << TABLE_BITS | table`: 44 bits of generation never come round.
const TABLE_BITS: u32 = 20;
const TABLE_MASK: u64 = (1 << TABLE_BITS) - 1;
#[cfg(not(loom))]
const _: () = assert!((crate::ids::MAX_SLOTS >> crate::ids::CLUSTER_SHIFT) + 2 < 1 << TABLE_BITS);

/// What a cluster is, without its words.
pub(crate) struct Cluster {
    /// Which table holds the words. Written under the cluster lock, read without.
    publication: AtomicU64,
    /// Neighbours on the list named by `state.list`; lists lock.
    pub prev: AtomicU32,
    pub next: AtomicU32,
    state: SpinLock<State>,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Cluster>() <= 48);

/// Words in one cache line of a table.
pub(crate) const SLOTS_PER_LINE: usize = 8;
const _: () = assert!(crate::ids::SLOTS_PER_CLUSTER / SLOTS_PER_LINE <= u64::BITS as usize);

/// The part under the cluster lock.
pub(crate) struct State {
    overflow: Option<Box<Overflow>>,
    pub used: u16,
    pub order: u8,
    pub list: ListId,
    /// Lines of the table that may have a free slot; a line is [`SLOTS_PER_LINE`] words, one cache line.
    pub open: u64,
    /// Something was freed since the last scan of the whole cluster for its own order.
    pub holes: bool,
}

impl Default for Cluster {
    fn default() -> Self {
        Cluster {
            publication: AtomicU64::new(0),
            prev: AtomicU32::new(NO_CLUSTER),
            next: AtomicU32::new(NO_CLUSTER),
            state: SpinLock::new(State { overflow: None, used: 0, order: 0, list: ListId::None, open: u64::MAX, holes: false }),
        }
    }
}

impl Cluster {
    pub fn lock(&self) -> Guard<'_, State> {
        self.state.lock()
    }

    pub fn try_lock(&self) -> Option<Guard<'_, State>> {
        self.state.try_lock()
    }

    /// Has the cluster a table at this moment? Takes no lock.
    pub fn has_table(&self) -> bool {
        table_of(self.publication.load(Ordering::Acquire)).is_some()
    }

    /// The table; the caller holds the cluster lock.
    pub fn table(&self) -> Option<TableIndex> {
        table_of(read_locked(&self.publication))
    }

    /// Publishes `table`, or takes the table away. Cluster lock.
    pub fn publish(&self, table: Option<TableIndex>) {
        let generation = (read_locked(&self.publication) >> TABLE_BITS) + 1;
        // Release pairs with the acquire in `word`: the words of a table published here are readable.
        self.publication.store(generation << TABLE_BITS | table.map_or(0, |t| u64::from(t.0)), Ordering::Release);
    }

    /// The word of slot `i`, without any lock. The word was in this cluster's table at a moment during the call.
    ///
    /// Between reading the publication and reading the word the table may be given back and lent to another cluster. A word
    /// written by the other owner was released after this cluster's publication changed, so the second look at the publication
    /// sees the change; the generation keeps a table that came back from looking the same.
    #[inline]
    pub fn word(&self, pool: &TablePool, i: usize) -> Entry {
        let mut before = self.publication.load(Ordering::Acquire);
        loop {
            let Some(table) = table_of(before) else { return Entry::FREE };
            let word = pool.get(table).get(i);
            let after = self.publication.load(Ordering::Acquire);
            if before == after {
                return word;
            }
            before = after;
        }
    }
}

fn table_of(publication: u64) -> Option<TableIndex> {
    let table = publication & TABLE_MASK;
    (table != 0).then_some(TableIndex(table as u32))
}

/// The rest of the counts that do not fit their words: (slot in cluster, count - 255).
#[derive(Default)]
struct Overflow {
    counts: Vec<(u16, u32)>,
}

impl State {
    /// The true count of slot `i`, whose word is `entry`.
    pub fn count(&self, i: usize, entry: Entry) -> u32 {
        if entry.count() < COUNT_OVERFLOW { entry.count() } else { COUNT_OVERFLOW + self.rest(i) }
    }

    fn rest(&self, i: usize) -> u32 {
        let found = self.overflow.iter().flat_map(|o| &o.counts).find(|(slot, _)| usize::from(*slot) == i);
        found.map_or(0, |(_, rest)| *rest)
    }

    /// Makes sure that the count of slot `i` can grow by one. `bytes` keeps account of the overflow tables' memory.
    pub fn reserve_count(&mut self, i: usize, entry: Entry, more: usize, bytes: &AtomicUsize) -> bool {
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

    /// The word with a count one higher; room was made by [`State::reserve_count`].
    pub fn count_up(&mut self, i: usize, entry: Entry) -> Entry {
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
        let before = self.overflow_bytes();
        if let Some(overflow) = &mut self.overflow {
            overflow.counts.retain(|(slot, _)| usize::from(*slot) != i);
            if overflow.counts.is_empty() {
                self.overflow = None;
            }
        }
        bytes.fetch_sub(before - self.overflow_bytes(), Ordering::Relaxed);
        entry.with_count(COUNT_OVERFLOW - 1)
    }

    fn rest_mut(&mut self, i: usize) -> &mut u32 {
        let counts = self.overflow.as_mut().map(|o| &mut o.counts);
        let found = counts.and_then(|c| c.iter_mut().find(|(slot, _)| usize::from(*slot) == i));
        &mut found.expect("a count of 255 has an overflow entry").1
    }

    /// The cluster is empty: back to the state of a new one, still off every list or on the one it is on.
    pub fn reset(&mut self, bytes: &AtomicUsize) {
        bytes.fetch_sub(self.overflow_bytes(), Ordering::Relaxed);
        self.overflow = None;
        self.order = 0;
        self.open = u64::MAX;
        self.holes = false;
    }

    fn overflow_bytes(&self) -> usize {
        self.overflow.as_ref().map_or(0, |o| size_of::<Overflow>() + o.counts.capacity() * size_of::<(u16, u32)>())
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
