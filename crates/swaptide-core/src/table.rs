//! The swap tables: 512 atomic words for each cluster in use. (docs/linux-swap.md,
//! "Swap table")
//!
//! A table is one page exactly, and all tables of a device lie one after the other in one range of
//! addresses ([`TableMemory`]), whether their clusters are used or not: so a slot's word is found
//! by its number alone, with one load. The range costs memory only where it was written to: the
//! system makes it real page by page. When a cluster's last slot goes, the table's page goes back
//! to the system, if the device has a hook for that ([`TableDiscard`]), and reads as zeros from
//! then on; otherwise it is kept for the cluster's next life, and emptied clusters are used before
//! fresh ones.
//!
//! Invariants:
//! 1. A table is memory of its cluster alone, as long as the device lives. A look-up that comes
//!    late reads words that were this cluster's, or 0, which is a free slot: no thread has to wait
//!    for readers, and no reader has to look twice.
//! 2. Every word of the table of an empty cluster is 0.
//! 3. Nothing is written to a table that is neither in use nor warm: `in_use + warm` pages are all
//!    the memory there is.

use crate::entry::Entry;
use crate::ids::{ClusterIndex, SLOTS_PER_CLUSTER, SwapOffset};
#[cfg(not(loom))]
use crate::sync::TableMemory;
use crate::sync::{AtomicU32, AtomicU64, Ordering, Paged, Pages, prefetch, read_locked};

/// With a hook to give memory back, one table of an empty cluster keeps its memory for this many in
/// use (and at most 16 do), for clusters that empty and fill again and again.
const IN_USE_FOR_ONE_WARM: u32 = 64;

/// The words of one cluster.
pub(crate) type Table = Paged<AtomicU64, SLOTS_PER_CLUSTER>;

#[cfg(not(loom))]
const _: () = assert!(size_of::<Table>() == 4096 && align_of::<Table>() == 4096);

impl Table {
    /// The word of slot `i`. Acquire pairs with the release of [`Table::set`]: a reader of a word
    /// sees what was stored before it.
    #[inline]
    pub fn get(&self, i: usize) -> Entry {
        read(&self.0[i])
    }

    /// The word of slot `i`; the caller holds the cluster lock.
    #[inline]
    pub(crate) fn get_locked(&self, i: usize) -> Entry {
        Entry(read_locked(&self.0[i]))
    }

    /// Stores the word of slot `i`; the caller holds the cluster lock.
    #[inline]
    pub fn set(&self, i: usize, entry: Entry) {
        self.0[i].store(entry.0, Ordering::Release);
    }
}

#[inline]
fn read(word: &AtomicU64) -> Entry {
    Entry(word.load(Ordering::Acquire))
}

/// Gives the memory of empty tables back to the system, leaving it readable as zeros
/// (`MADV_DONTNEED` on its page, or the pages of several). Called under the cluster's lock, or
/// before the tables can be used.
pub type TableDiscard = fn(page: *const u8, len: usize);

/// The state of a cluster's table; part of the cluster's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TableState {
    /// The cluster is empty; its table takes no memory: it was not used before, or its memory was
    /// given back.
    Bare,
    /// The cluster is empty; the table has its memory.
    Warm,
    /// The cluster is in use.
    InUse,
}

/// All tables of one device.
pub(crate) struct Tables {
    pages: Pages<SLOTS_PER_CLUSTER>,
    in_use: AtomicU32,
    warm: AtomicU32,
    discard: Option<TableDiscard>,
}

impl Tables {
    /// Bytes of memory for the tables of `clusters` clusters.
    #[cfg(not(loom))]
    pub const fn bytes_of(clusters: usize) -> usize {
        clusters * size_of::<Table>()
    }

    /// The tables of `clusters` clusters, in memory of the allocator.
    pub fn new(clusters: usize) -> Self {
        #[cfg(loom)]
        return Self::over(Pages::new(clusters));
        #[cfg(not(loom))]
        Self::new_in(clusters, TableMemory::allocate(Self::bytes_of(clusters)))
    }

    /// The same in memory that was reserved for them.
    #[cfg(not(loom))]
    pub fn new_in(clusters: usize, memory: TableMemory) -> Self {
        Self::over(Pages::new(clusters, memory))
    }

    fn over(pages: Pages<SLOTS_PER_CLUSTER>) -> Self {
        Tables { pages, in_use: AtomicU32::new(0), warm: AtomicU32::new(0), discard: None }
    }

    /// Sets the hook, on a device of which only the tables behind the first `empty` ones were used.
    pub(crate) fn set_discard(&mut self, discard: TableDiscard, empty: ClusterIndex) {
        self.discard = Some(discard);
        // An allocator may have written the zeros itself.
        if empty.0 > 0 {
            discard(self.pages.start(), empty.0 as usize * size_of::<Table>());
        }
    }

    fn warm_ones(&self) -> u32 {
        (self.in_use() / IN_USE_FOR_ONE_WARM).min(16)
    }

    /// The table of a cluster; `None` behind the last one. Reading one that was never used may cost
    /// a page fault, and never memory of its own.
    #[inline]
    pub fn get(&self, cluster: ClusterIndex) -> Option<&Table> {
        self.pages.get(cluster.0 as usize)
    }

    /// The word of a slot, without any lock: it was there at a moment during the call. `None`: the
    /// device has no such cluster.
    #[inline]
    pub fn word(&self, off: SwapOffset) -> Option<Entry> {
        self.pages.word(off.0 as usize).map(read)
    }

    /// The word of a slot will be looked at soon.
    #[inline]
    pub fn prefetch(&self, off: SwapOffset) {
        if let Some(word) = self.pages.word(off.0 as usize) {
            prefetch(word);
        }
    }

    /// The table of a locked cluster is about to be used.
    pub fn open(&self, cluster: ClusterIndex, state: &mut TableState) {
        debug_assert_ne!(*state, TableState::InUse);
        match (*state, self.get(cluster)) {
            (TableState::Warm, _) => _ = self.warm.fetch_sub(1, Ordering::Relaxed),
            // By writing what is there already: a search, which reads first, would have a page of
            // zeros mapped and then another one in its place.
            (_, Some(table)) => table.set(0, Entry::FREE),
            _ => {}
        }
        *state = TableState::InUse;
        self.in_use.fetch_add(1, Ordering::Relaxed);
    }

    /// The last slot of a locked cluster is gone: every word is 0.
    pub fn close(&self, cluster: ClusterIndex, state: &mut TableState) {
        debug_assert_eq!(*state, TableState::InUse);
        self.in_use.fetch_sub(1, Ordering::Relaxed);
        match (self.discard, self.get(cluster)) {
            (Some(discard), Some(table))
                if self.warm.load(Ordering::Relaxed) >= self.warm_ones() =>
            {
                discard(core::ptr::from_ref(table).cast(), size_of::<Table>());
                *state = TableState::Bare;
            }
            _ => {
                self.warm.fetch_add(1, Ordering::Relaxed);
                *state = TableState::Warm;
            }
        }
    }

    pub fn in_use(&self) -> u32 {
        self.in_use.load(Ordering::Relaxed)
    }

    /// Bytes held (invariant 3). Page tables are the system's: 8 bytes for each of these pages, 4
    /// KiB at least for each GiB of swap in use.
    pub fn bytes(&self) -> usize {
        (self.in_use() + self.warm.load(Ordering::Relaxed)) as usize * size_of::<Table>()
    }
}
