//! A whole swap layer of each kind behind one interface: allocator, swap cache, swap count, group.
//!
//! | layer       | allocator | count and group | swap cache |
//! |-------------|-----------|-----------------|------------|
//! | [`Before`] of `ScanAllocator` | one lock, free clusters only | static arrays | trees |
//! | [`Before`] of `ClusterAllocator` | cluster lists | static arrays | trees |
//! | [`SwapTable`] | swaptide's core | in the table | the table |
//!
//! What the old layers do one after the other (mark the map, then insert in the tree; take out of
//! the tree, then unmark the map) is done in the kernel's order, each step under its own lock. The
//! caller keeps to the rule that a folio is locked by its user.

use crate::designs::clusters::ClusterAllocator;
use crate::designs::forest::{Cached, Forest, Shape};
use crate::designs::map::{HAS_CACHE, SlotMap};
use crate::designs::scanning::ScanAllocator;
use swaptide_core::{
    CpuId, Expect, FolioId, GroupId, Kind, Order, SearchOrder, Shadow, SlotContent, SwapDevice,
    SwapOffset, SwapType, ZeroMask,
};

/// One page's way out and back, in the steps that every layer has.
pub trait Layer: Sync {
    /// Slots for a folio of `2^order` pages: allocated, in the swap cache, count 1, charged to a
    /// group. `None`: no run.
    fn swap_out(&self, cpu: usize, order: usize, folio: FolioId) -> Option<u32>;
    /// The folio that holds the slot's page, if one does.
    fn lookup(&self, off: u32) -> Option<FolioId>;
    /// The folio leaves the cache; a shadow stays.
    fn leave(&self, off: u32, n: u32, folio: FolioId, shadow: Shadow);
    /// A folio enters the cache for swapped-out slots.
    fn enter(&self, off: u32, n: u32, folio: FolioId);
    /// One more user of each slot.
    fn dup(&self, off: u32, n: u32);
    /// One user less of each slot, not the last.
    fn put(&self, off: u32, n: u32);
    /// The last user goes: the slots are free, and out of the cache.
    fn free(&self, cpu: usize, off: u32, n: u32);
    /// Bytes of metadata held at this moment.
    fn bytes(&self) -> usize;
    /// Lock waits of all layers of this kind so far.
    fn waits(&self) -> u64;
}

/// What [`Before`] asks of an allocator over a static map.
pub trait Allocator: Sync {
    /// See `ScanAllocator::alloc`, `ClusterAllocator::alloc`.
    fn alloc(&self, cpu: usize, order: usize) -> Option<u32>;
    /// See `ScanAllocator::free`, `ClusterAllocator::free`.
    fn free(&self, cpu: usize, off: u32, n: u32);
    /// Changes bytes of the map under the cluster's lock.
    fn change(&self, off: u32, n: u32, new: impl Fn(u8) -> u8);
    /// The static arrays.
    fn map(&self) -> &SlotMap;
    /// Bytes without the arrays.
    fn bytes(&self) -> usize;
}

macro_rules! allocator {
    ($type:ty, |$a:ident, $cpu:ident, $off:ident, $n:ident| $free:expr) => {
        impl Allocator for $type {
            fn alloc(&self, cpu: usize, order: usize) -> Option<u32> {
                self.alloc(cpu, order)
            }
            fn free(&self, $cpu: usize, $off: u32, $n: u32) {
                let $a = self;
                $free
            }
            fn change(&self, off: u32, n: u32, new: impl Fn(u8) -> u8) {
                self.change(off, n, new);
            }
            fn map(&self) -> &SlotMap {
                self.map()
            }
            fn bytes(&self) -> usize {
                self.bytes()
            }
        }
    };
}

allocator!(ScanAllocator, |a, cpu, off, n| a.free(cpu, off, n));
allocator!(ClusterAllocator, |a, _cpu, off, n| a.free(off, n));

/// A layer of static arrays and trees.
pub struct Before<A> {
    alloc: A,
    cache: Forest,
}

impl Before<ScanAllocator> {
    /// The layer before the allocator seed and the search-space seed.
    pub fn scanning(slots: u32, cpus: usize) -> Self {
        Before { alloc: ScanAllocator::new(slots, cpus), cache: Forest::new(Shape::Split, slots) }
    }
}

impl Before<ClusterAllocator> {
    /// The layer before the swap-table seed.
    pub fn clusters(slots: u32, cpus: usize) -> Self {
        Before {
            alloc: ClusterAllocator::new(slots, cpus),
            cache: Forest::new(Shape::Small, slots),
        }
    }
}

impl<A: Allocator> Layer for Before<A> {
    fn swap_out(&self, cpu: usize, order: usize, folio: FolioId) -> Option<u32> {
        let off = self.alloc.alloc(cpu, order)?;
        let n = 1 << order;
        self.alloc.map().charge(off, n, 1);
        assert!(self.cache.insert(off, n, folio), "slot {off} was free and cached");
        self.alloc.change(off, n, |byte| byte + 1);
        Some(off)
    }

    #[inline]
    fn lookup(&self, off: u32) -> Option<FolioId> {
        match self.cache.lookup(off) {
            Cached::Folio(folio) => Some(folio),
            _ => None,
        }
    }

    fn leave(&self, off: u32, n: u32, folio: FolioId, shadow: Shadow) {
        assert!(self.cache.remove(off, n, folio, shadow), "{folio} is not at slot {off}");
        self.alloc.change(off, n, |byte| byte & !HAS_CACHE);
    }

    fn enter(&self, off: u32, n: u32, folio: FolioId) {
        self.alloc.change(off, n, |byte| byte | HAS_CACHE);
        assert!(self.cache.insert(off, n, folio), "slot {off} is cached already");
    }

    fn dup(&self, off: u32, n: u32) {
        self.alloc.change(off, n, |byte| byte + 1);
    }

    fn put(&self, off: u32, n: u32) {
        self.alloc.change(off, n, |byte| byte - 1);
    }

    fn free(&self, cpu: usize, off: u32, n: u32) {
        self.cache.clear(off, n);
        self.alloc.map().charge(off, n, 0);
        self.alloc.free(cpu, off, n);
    }

    fn bytes(&self) -> usize {
        self.alloc.map().bytes()
            + self.alloc.bytes()
            + self.cache.static_bytes()
            + self.cache.dynamic_bytes()
    }

    fn waits(&self) -> u64 {
        swaptide_core::lock_waits()
    }
}

/// swaptide's core.
pub struct SwapTable(SwapDevice);

impl SwapTable {
    /// A device of `slots` slots. More `names` than slots may be had: see
    /// [`SwapDevice::with_limit`].
    pub fn new(slots: u32, names: u32, cpus: usize) -> Self {
        let memory = crate::designs::memory::reserve(SwapDevice::table_bytes(names));
        let device = SwapDevice::new_in(
            memory,
            SwapType::new(0).expect("type 0 exists"),
            names,
            cpus,
            Kind::Solid,
        );
        SwapTable(device.with_limit(slots))
    }

    /// The memory of empty tables goes back to the system at once. (The trees' nodes stay in their
    /// pools, so the comparisons of speed do without.)
    pub(crate) fn giving_back(self) -> Self {
        SwapTable(self.0.with_table_discard(crate::designs::memory::discard))
    }

    /// With the search order of the allocator seed: empty clusters first.
    pub(crate) fn free_first(slots: u32, names: u32, cpus: usize) -> Self {
        SwapTable(Self::new(slots, names, cpus).0.with_search_order(SearchOrder::FreeFirst))
    }

    /// The device.
    pub fn device(&self) -> &SwapDevice {
        &self.0
    }
}

const BROKEN: &str = "the layer's user told it the slots' state";

impl Layer for SwapTable {
    fn swap_out(&self, cpu: usize, order: usize, folio: FolioId) -> Option<u32> {
        let order = Order::new(order as u8)?;
        self.0.alloc_folio(CpuId(cpu as u16), order, folio, GroupId(1)).ok().map(|off| off.0)
    }

    #[inline]
    fn lookup(&self, off: u32) -> Option<FolioId> {
        match self.0.lookup(SwapOffset(off)) {
            SlotContent::Folio(folio) => Some(folio),
            _ => None,
        }
    }

    fn leave(&self, off: u32, n: u32, folio: FolioId, shadow: Shadow) {
        self.0.folio_to_shadow(SwapOffset(off), n, folio, shadow, ZeroMask::None).expect(BROKEN);
    }

    fn enter(&self, off: u32, n: u32, folio: FolioId) {
        self.0.shadow_to_folio(SwapOffset(off), n, folio, None).expect(BROKEN);
    }

    fn dup(&self, off: u32, n: u32) {
        self.0.dup(SwapOffset(off), n).expect(BROKEN);
    }

    fn put(&self, off: u32, n: u32) {
        self.0.put(SwapOffset(off), n).expect(BROKEN);
    }

    fn free(&self, _cpu: usize, off: u32, n: u32) {
        self.0.free(SwapOffset(off), n, Expect::Any).expect(BROKEN);
    }

    fn bytes(&self) -> usize {
        self.0.metadata_bytes()
    }

    fn waits(&self) -> u64 {
        swaptide_core::lock_waits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers() -> Vec<Box<dyn Layer>> {
        let slots = 64 * 512;
        vec![
            Box::new(Before::scanning(slots, 2)),
            Box::new(Before::clusters(slots, 2)),
            Box::new(SwapTable::new(slots, slots, 2)),
        ]
    }

    #[test]
    fn every_layer_leads_the_same_life() {
        for layer in layers() {
            let empty = layer.bytes();
            for order in [0, 4, 9] {
                let n = 1 << order;
                let off = layer.swap_out(0, order, FolioId(5)).unwrap();
                assert!((off..off + n).all(|slot| layer.lookup(slot) == Some(FolioId(5))));
                layer.dup(off, n);
                layer.leave(off, n, FolioId(5), Shadow(9));
                assert_eq!(layer.lookup(off), None);
                layer.enter(off, n, FolioId(6));
                assert_eq!(layer.lookup(off + n - 1), Some(FolioId(6)));
                layer.put(off, n);
                layer.leave(off, n, FolioId(6), Shadow(10));
                assert!(layer.bytes() >= empty);
                layer.free(0, off, n);
                assert_eq!(layer.lookup(off), None);
            }
        }
    }

    #[test]
    fn every_layer_fills_to_the_last_slot() {
        for layer in layers() {
            let mut offs: Vec<u32> =
                (0..).map_while(|i| layer.swap_out(0, 0, FolioId(i))).collect();
            let taken = offs.len();
            assert!((64 * 512 - 1..=64 * 512).contains(&taken), "{taken}");
            offs.iter()
                .enumerate()
                .for_each(|(i, &off)| assert_eq!(layer.lookup(off), Some(FolioId(i as u32))));
            offs.sort_unstable();
            offs.dedup();
            assert_eq!(offs.len(), taken);
            offs.into_iter().for_each(|off| layer.free(0, off, 1));
            assert!(layer.swap_out(0, 9, FolioId(1)).is_some(), "all is free again");
        }
    }
}
