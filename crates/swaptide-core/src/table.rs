//! The swap tables: 512 atomic words for each cluster in use. (kernel-facts B2, B4; seed: swap-table-phase1)
//!
//! A table is one page exactly. It has a fixed place, found by shifting the slot's number: [`Directory`] keeps the tables of sixteen
//! neighbouring clusters together, so that a look-up is one shift, one index into the directory (a word for 32 MiB of swap, which
//! stays in the nearest cache) and one load. Tables come into being with the first slot of one of the sixteen. When a cluster's last slot
//! goes, the table's memory goes back to the system page by page, if the device has a hook for that ([`TableDiscard`]), and reads as
//! zeros from then on; otherwise it is kept for the cluster's next life, and emptied clusters are used before fresh ones.
//!
//! Invariants:
//! 1. A table is memory of its cluster alone, as long as the device lives. A look-up that comes late reads words that were this
//!    cluster's, or 0, which is a free slot: nobody has to wait for readers, and no reader has to look twice.
//! 2. Every word of the table of an empty cluster is 0.

use crate::entry::Entry;
use crate::ids::{ClusterIndex, SLOTS_PER_CLUSTER, SwapOffset};
use crate::sync::{AtomicU32, AtomicU64, Directory, Ordering, Paged, read_locked};

/// Tables made together. Few, so that a small device stays small; many, so that the directory of a large one does: 256 KiB for 1 TiB.
#[cfg(not(loom))]
const TABLES_PER_CHUNK: usize = 16;
#[cfg(loom)]
const TABLES_PER_CHUNK: usize = 1;

/// With a hook to give memory back, one table of an empty cluster keeps its memory for so many in use (and at most 16 do), for clusters
/// that empty and fill again and again.
const IN_USE_FOR_ONE_WARM: u32 = 64;

/// The words of one cluster.
pub(crate) type Table = Paged<AtomicU64, SLOTS_PER_CLUSTER>;

#[cfg(not(loom))]
const _: () = assert!(size_of::<Table>() == 4096 && align_of::<Table>() == 4096);

impl Default for Table {
    fn default() -> Self {
        Paged(core::array::from_fn(|_| AtomicU64::new(Entry::FREE.0)))
    }
}

impl Table {
    /// The word of slot `i`. Acquire pairs with the release of [`Table::set`]: who sees a word sees what was stored before it.
    #[inline]
    pub fn get(&self, i: usize) -> Entry {
        read(&self.0[i])
    }

    /// The word of slot `i`; the caller holds the cluster lock.
    #[inline]
    pub fn get_locked(&self, i: usize) -> Entry {
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

/// Gives the memory of an empty table back to the system, leaving it readable as zeros (`MADV_DONTNEED` on its
/// page, or the pages of several). Called under the cluster's lock, or before anybody can use the table.
pub type TableDiscard = fn(page: *const u8, len: usize);

/// What became of a cluster's table; part of the cluster's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TableState {
    /// Not used before.
    Fresh,
    /// The cluster is empty; the table has its memory.
    Warm,
    /// The cluster is empty; the table's memory was given back.
    Gone,
    /// The cluster is in use.
    InUse,
}

/// All tables of one device.
pub(crate) struct Tables {
    tables: Directory<Table, TABLES_PER_CHUNK>,
    in_use: AtomicU32,
    warm: AtomicU32,
    discarded: AtomicU32,
    discard: Option<TableDiscard>,
}

impl Tables {
    pub fn new(clusters: usize) -> Self {
        Tables {
            tables: Directory::new(clusters),
            in_use: AtomicU32::new(0),
            warm: AtomicU32::new(0),
            discarded: AtomicU32::new(0),
            discard: None,
        }
    }

    /// Sets the hook. `used`: the only cluster whose table is in use, if there is one.
    pub fn set_discard(&mut self, discard: TableDiscard, used: Option<ClusterIndex>) {
        self.discard = Some(discard);
        let made = used.map(|index| index.0 as usize / TABLES_PER_CHUNK * TABLES_PER_CHUNK);
        let others = made.into_iter().flat_map(|first| first..first + TABLES_PER_CHUNK).filter_map(|i| self.tables.get(i));
        let own = used.and_then(|index| self.get(index)).map(core::ptr::from_ref);
        for table in others.filter(|table| own != Some(core::ptr::from_ref(*table))) {
            discard(core::ptr::from_ref(table).cast(), size_of::<Table>());
            self.discarded.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn warm_ones(&self) -> u32 {
        (self.in_use() / IN_USE_FOR_ONE_WARM).min(16)
    }

    /// The table of a cluster, if it was made.
    #[inline]
    pub fn get(&self, cluster: ClusterIndex) -> Option<&Table> {
        self.tables.get(cluster.0 as usize)
    }

    /// The word of a slot, without any lock: it was there at a moment during the call. `None`: no cluster near it was used yet.
    #[inline]
    pub fn word(&self, off: SwapOffset) -> Option<Entry> {
        self.tables.value(off.0 as usize).map(read)
    }

    /// The table of a locked cluster is about to be used. `false`: there is no memory for it.
    pub fn open(&self, cluster: ClusterIndex, state: &mut TableState) -> bool {
        debug_assert_ne!(*state, TableState::InUse);
        // The neighbours made with it hold no memory until they are used, if there is a way to do without.
        let give_back = |tables: &[Table]| {
            if let Some(discard) = self.discard {
                discard(tables.as_ptr().cast(), size_of_val(tables));
            }
        };
        match self.tables.make_with(cluster.0 as usize, give_back) {
            None => return false,
            Some((_, true)) if self.discard.is_some() => {
                self.discarded.fetch_add(TABLES_PER_CHUNK as u32, Ordering::Relaxed);
            }
            Some(_) => {}
        }
        match *state {
            TableState::Warm => _ = self.warm.fetch_sub(1, Ordering::Relaxed),
            TableState::Fresh if self.discard.is_none() => {}
            TableState::Fresh | TableState::Gone => _ = self.discarded.fetch_sub(1, Ordering::Relaxed),
            TableState::InUse => {}
        }
        *state = TableState::InUse;
        self.in_use.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// The last slot of a locked cluster is gone: every word is 0.
    pub fn close(&self, cluster: ClusterIndex, state: &mut TableState) {
        debug_assert_eq!(*state, TableState::InUse);
        self.in_use.fetch_sub(1, Ordering::Relaxed);
        match (self.discard, self.get(cluster)) {
            (Some(discard), Some(table)) if self.warm.load(Ordering::Relaxed) >= self.warm_ones() => {
                discard(core::ptr::from_ref(table).cast(), size_of::<Table>());
                self.discarded.fetch_add(1, Ordering::Relaxed);
                *state = TableState::Gone;
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

    /// Bytes held, without the tables whose memory was given back.
    pub fn bytes(&self) -> usize {
        self.tables.bytes() - self.discarded.load(Ordering::Relaxed) as usize * size_of::<Table>()
    }
}
