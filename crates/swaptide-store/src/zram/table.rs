//! From a slot to what is stored for it: four bytes per slot, and the values of same-filled pages.
//!
//! Owns the handle of every slot, in arrays of [`CLUSTER_SLOTS`] that exist while one of their
//! slots is in use, and the table of the words that same-filled pages repeat. Few words are common
//! to many pages, so each distinct one is kept once, counted.

use std::collections::BTreeMap;

use swaptide_sys::mem::prefetch;

use super::pool::ObjectId;
use crate::{CLUSTER_SLOTS, Slot};

/// The content of a slot.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Handle {
    /// No page is stored for the slot.
    Empty,
    /// A page of one repeated word.
    Same(SameId),
    /// An object of the pool.
    Object(ObjectId),
}

/// A word in the table of same-filled values.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct SameId(u32);

impl Handle {
    const OBJECT: u32 = 1 << 31;

    fn encode(self) -> u32 {
        match self {
            Handle::Empty => 0,
            Handle::Same(id) => id.0 + 1,
            Handle::Object(id) => Self::OBJECT | id.bits(),
        }
    }

    fn decode(bits: u32) -> Handle {
        match bits {
            0 => Handle::Empty,
            _ if bits & Self::OBJECT == 0 => Handle::Same(SameId(bits - 1)),
            _ => Handle::Object(ObjectId::from_bits(bits & !Self::OBJECT)),
        }
    }
}

struct HandleCluster {
    handles: [u32; CLUSTER_SLOTS],
    used: usize,
}

/// The handles of all slots.
pub(super) struct Handles {
    clusters: Vec<Option<Box<HandleCluster>>>,
    max_slots: u32,
    allocated: usize,
    used: usize,
}

impl Handles {
    pub(super) fn new(max_slots: u32) -> Handles {
        // Room for all, so that nothing is ever copied; what is not used is not touched, and costs
        // nothing.
        let clusters = Vec::with_capacity((max_slots as usize).div_ceil(CLUSTER_SLOTS));
        Handles { clusters, max_slots, allocated: 0, used: 0 }
    }

    pub(super) fn get(&self, slot: Slot) -> Handle {
        let (cluster, index) = slot.split();
        match self.clusters.get(cluster) {
            Some(Some(cluster)) => Handle::decode(cluster.handles[index]),
            _ => Handle::Empty,
        }
    }

    /// Prefetches the handle of a slot.
    pub(super) fn prefetch(&self, slot: Slot) {
        let (cluster, index) = slot.split();
        if let Some(Some(cluster)) = self.clusters.get(cluster) {
            prefetch(&cluster.handles[index]);
            // It changes when the slot is freed.
            prefetch(&cluster.used);
        }
    }

    /// Stores a handle and returns the one before.
    pub(super) fn set(&mut self, slot: Slot, handle: Handle) -> Handle {
        assert!(
            slot.0 < self.max_slots,
            "compressed memory: slot {slot} of a device with {} slots",
            self.max_slots
        );
        let (at, index) = slot.split();
        if at >= self.clusters.len() {
            if handle == Handle::Empty {
                return Handle::Empty;
            }
            self.clusters.resize_with(at + 1, || None);
        }
        let place = &mut self.clusters[at];
        if place.is_none() {
            if handle == Handle::Empty {
                return Handle::Empty;
            }
            self.allocated += 1;
        }
        let cluster = place.get_or_insert_with(|| {
            Box::new(HandleCluster { handles: [0; CLUSTER_SLOTS], used: 0 })
        });
        let before =
            Handle::decode(core::mem::replace(&mut cluster.handles[index], handle.encode()));
        let (had, has) =
            (usize::from(before != Handle::Empty), usize::from(handle != Handle::Empty));
        cluster.used = cluster.used + has - had;
        self.used = self.used + has - had;
        if cluster.used == 0 {
            *place = None;
            self.allocated -= 1;
        }
        before
    }

    /// Returns the number of slots that have a page.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        self.clusters.len() * size_of::<Option<Box<HandleCluster>>>()
            + self.allocated * size_of::<HandleCluster>()
    }
}

/// The words of same-filled pages, each with the number of pages that hold it.
#[derive(Default)]
pub(super) struct SameTable {
    words: Vec<(u64, u32)>,
    unused: Vec<u32>,
    index: BTreeMap<u64, u32>,
    pages: usize,
}

impl SameTable {
    pub(super) fn add(&mut self, word: u64) -> SameId {
        self.pages += 1;
        if let Some(&id) = self.index.get(&word) {
            self.words[id as usize].1 += 1;
            return SameId(id);
        }
        let id = match self.unused.pop() {
            Some(id) => {
                self.words[id as usize] = (word, 1);
                id
            }
            None => {
                self.words.push((word, 1));
                (self.words.len() - 1) as u32
            }
        };
        self.index.insert(word, id);
        SameId(id)
    }

    pub(super) fn get(&self, id: SameId) -> u64 {
        let (word, count) = self.words[id.0 as usize];
        assert!(count > 0, "compressed memory: a handle points at an unused same-filled value");
        word
    }

    pub(super) fn remove(&mut self, id: SameId) {
        let (word, count) = &mut self.words[id.0 as usize];
        *count =
            count.checked_sub(1).expect("compressed memory: a same-filled page is freed twice");
        self.pages -= 1;
        if *count == 0 {
            self.index.remove(word);
            self.unused.push(id.0);
        }
    }

    /// Pages that are same-filled, zero pages among them.
    pub(super) fn pages(&self) -> usize {
        self.pages
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        // A tree node holds up to 11 pairs and is at least about half full.
        self.words.capacity() * size_of::<(u64, u32)>()
            + self.unused.capacity() * 4
            + self.index.len() * 24
    }
}
