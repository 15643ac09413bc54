//! The arrays that stood for every slot whether used or not: one byte of swap map, two bytes of
//! group. (docs/linux-swap.md, "Earlier designs")
//!
//! A byte of the map: bits 0..6 the swap count (63: bad), bit 6 "in the swap cache". The zero map,
//! one bit for each slot, is left out.
//!
//! Invariant: a byte changes only under the lock of the allocator that owns the map; readers of
//! single bytes take none.

use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

/// The slot cannot be used.
const BAD: u8 = 0x3f;
/// The slot is in the swap cache (or in a per-CPU cache of slots).
pub(crate) const HAS_CACHE: u8 = 0x40;

/// The order in which a new device's clusters stand on the free list, the header's left out: one of
/// each 64 MiB, then the next one of each, so that CPUs that fill clusters at the same time do so
/// in different trees. (docs/linux-swap.md, "Earlier designs"; the swap table dropped it)
pub(crate) fn free_order(clusters: u32) -> impl Iterator<Item = u32> {
    const COLUMNS: u32 = 32;
    let column = move |k: u32| (k..clusters).step_by(COLUMNS as usize);
    (0..COLUMNS).flat_map(column).filter(|&cluster| cluster > 0)
}

/// The static arrays of one device.
pub struct SlotMap {
    counts: Box<[AtomicU8]>,
    groups: Box<[AtomicU16]>,
}

impl SlotMap {
    /// Arrays for `slots` slots, the first one bad: it holds the device's header.
    pub fn new(slots: u32) -> Self {
        let map = SlotMap {
            counts: (0..slots).map(|_| AtomicU8::new(0)).collect(),
            groups: (0..slots).map(|_| AtomicU16::new(0)).collect(),
        };
        map.set(0, BAD);
        map
    }

    /// The byte of a slot.
    #[inline]
    pub fn get(&self, off: u32) -> u8 {
        self.counts[off as usize].load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn set(&self, off: u32, byte: u8) {
        self.counts[off as usize].store(byte, Ordering::Relaxed);
    }

    /// Are `n` slots from `off` all free?
    #[inline]
    pub(crate) fn all_free(&self, off: u32, n: u32) -> bool {
        self.counts[off as usize..(off + n) as usize]
            .iter()
            .all(|byte| byte.load(Ordering::Relaxed) == 0)
    }

    /// Records the group that is charged for `n` slots from `off`.
    pub(crate) fn charge(&self, off: u32, n: u32, group: u16) {
        self.groups[off as usize..(off + n) as usize]
            .iter()
            .for_each(|g| g.store(group, Ordering::Relaxed));
    }

    /// Slots there are.
    pub(crate) fn slots(&self) -> u32 {
        self.counts.len() as u32
    }

    /// Bytes of both arrays.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.counts) + size_of_val(&*self.groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_on_the_free_list_are_in_different_trees() {
        let order: Vec<u32> = free_order(70).collect();
        assert_eq!(order[..6], [32, 64, 1, 33, 65, 2]);
        let mut sorted = order;
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(1..70), "every cluster but the first, once");
    }

    #[test]
    fn a_map_is_three_bytes_a_slot() {
        let map = SlotMap::new(1024);
        assert_eq!((map.bytes(), map.slots(), map.get(0), map.get(1)), (3072, 1024, BAD, 0));
        map.set(5, HAS_CACHE);
        map.charge(4, 2, 7);
        assert!(map.all_free(1, 4) && !map.all_free(4, 2));
        assert!(map.groups[4..6].iter().all(|g| g.load(Ordering::Relaxed) == 7));
    }
}
