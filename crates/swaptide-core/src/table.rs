//! The swap tables and where they come from.
//!
//! A table is 512 atomic words, one page exactly. It belongs to a cluster from the cluster's first slot to its last, and then
//! goes back to the pool of its device. The pool's memory is type-stable ([`crate::sync`], invariant 1): a reader that still
//! looks at a table given back sees free slots, or another cluster's words, and finds out by reading the publication again
//! ([`crate::cluster::Cluster::word`]).
//!
//! Invariants:
//! 1. Every word of a table in the pool is 0.
//! 2. A table belongs to at most one cluster.
//!
//! Lock: `free`, innermost; taken with a cluster lock held.

use crate::entry::Entry;
use crate::ids::SLOTS_PER_CLUSTER;
use crate::sync::{AtomicU32, AtomicU64, Directory, Ordering, SpinLock, read_locked};

/// Tables made together. Small, so that a small device stays small.
#[cfg(not(loom))]
const TABLES_PER_CHUNK: usize = 8;
#[cfg(loom)]
const TABLES_PER_CHUNK: usize = 1;

/// Tables in the pool that keep their memory, for clusters that empty and fill again and again.
const WARM: usize = 16;

/// The words of one cluster.
#[repr(C, align(4096))]
pub(crate) struct Table([AtomicU64; SLOTS_PER_CLUSTER]);

#[cfg(not(loom))]
const _: () = assert!(size_of::<Table>() == 4096 && align_of::<Table>() == 4096);

impl Default for Table {
    fn default() -> Self {
        Table(core::array::from_fn(|_| AtomicU64::new(Entry::FREE.0)))
    }
}

impl Table {
    /// The word of slot `i`. Acquire pairs with the release of [`Table::set`]: a reader that sees another owner's word also sees
    /// that the table changed hands.
    #[inline]
    pub fn get(&self, i: usize) -> Entry {
        Entry(self.0[i].load(Ordering::Acquire))
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

/// Number of a table in its pool, from 1 (0 in a publication means: no table).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct TableIndex(pub u32);

/// Gives the memory of an unused table back to the system, leaving it readable as zeros (`MADV_DONTNEED` on its one page).
pub type TableDiscard = fn(page: *const u8, len: usize);

#[derive(Default)]
struct Free {
    /// Given back, memory kept.
    warm: Vec<u32>,
    /// Given back, memory discarded.
    cold: Vec<u32>,
    /// Tables ever made or handed out: the next fresh one.
    next: u32,
}

/// All tables of one device.
pub(crate) struct TablePool {
    tables: Directory<Table, TABLES_PER_CHUNK>,
    free: SpinLock<Free>,
    in_use: AtomicU32,
    discard: Option<TableDiscard>,
}

impl TablePool {
    pub fn new(clusters: usize) -> Self {
        TablePool {
            tables: Directory::new(clusters),
            free: SpinLock::new(Free::default()),
            in_use: AtomicU32::new(0),
            discard: None,
        }
    }

    pub fn set_discard(&mut self, discard: TableDiscard) {
        self.discard = Some(discard);
    }

    #[inline]
    pub fn get(&self, index: TableIndex) -> &Table {
        self.tables.get(index.0 as usize - 1).expect("a published table was made")
    }

    /// A table of free slots; `None` when there is no memory.
    pub fn take(&self) -> Option<TableIndex> {
        let mut free = self.free.lock();
        let index = match free.warm.pop().or_else(|| free.cold.pop()) {
            Some(index) => index,
            None => {
                let index = free.next;
                self.tables.make(index as usize)?;
                // Room to give all of them back: `put` must not need memory.
                let all = index as usize + 1;
                let (warm, cold) = (free.warm.len(), free.cold.len());
                free.warm.try_reserve(all - warm).ok()?;
                if self.discard.is_some() {
                    free.cold.try_reserve(all - cold).ok()?;
                }
                free.next += 1;
                index
            }
        };
        self.in_use.fetch_add(1, Ordering::Relaxed);
        Some(TableIndex(index + 1))
    }

    /// Takes back a table; every word in it is 0 and no cluster publishes it.
    pub fn put(&self, index: TableIndex) {
        self.in_use.fetch_sub(1, Ordering::Relaxed);
        let cold = self.discard.filter(|_| self.free.lock().warm.len() >= WARM);
        if let Some(discard) = cold {
            let table: *const Table = self.get(index);
            discard(table.cast(), size_of::<Table>());
            self.free.lock().cold.push(index.0 - 1);
        } else {
            self.free.lock().warm.push(index.0 - 1);
        }
    }

    pub fn in_use(&self) -> u32 {
        self.in_use.load(Ordering::Relaxed)
    }

    /// Bytes held, without the tables whose memory was discarded.
    pub fn bytes(&self) -> usize {
        let free = self.free.lock();
        let lists = (free.warm.capacity() + free.cold.capacity()) * size_of::<u32>();
        self.tables.bytes() + lists - free.cold.len() * size_of::<Table>()
    }
}
