//! The allocator before cluster lists: it scans the static map under the device's one lock.
//! (docs/linux-swap.md, "Earlier designs": 6.9 and 6.10)
//!
//! - A run of order `o` comes from the CPU's current cluster of that order, or from the next wholly
//!   free cluster, or not at all.
//! - A single slot comes from a per-CPU cache of 64, filled 64 at a time in the same way; when no
//!   cluster is free, by a scan of the whole map, the lock dropped meanwhile.
//! - Freed slots collect in a second per-CPU cache of 64 and cannot be allocated until it is given
//!   back in one go.
//! - A cluster in part used is on no list. It is free again when its last slot is.
//! - The caches are in use while more than 320 slots per CPU are free, and drained when fewer than
//!   128 are.
//!
//! Left out: the random restart of the scan at 64 MiB borders (it spreads CPUs over the trees of
//! large devices) and discard.
//!
//! Locks: a CPU's cache, then the device.

use crate::designs::map::{HAS_CACHE, SlotMap, free_order};
use crossbeam_utils::CachePadded;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use swaptide_core::SpinLock;
use swaptide_core::{ORDERS, SLOTS_PER_CLUSTER};

const CACHE: usize = 64;
const ON: u32 = 5 * CACHE as u32;
const OFF: u32 = 2 * CACHE as u32;
const CLUSTER: u32 = SLOTS_PER_CLUSTER as u32;

/// What the device's lock guards.
struct ScanDevice {
    free: VecDeque<u32>,
    /// Used slots of each cluster.
    used: Box<[u16]>,
    /// Per CPU and order: the next slot to look at.
    next: Box<[Option<u32>]>,
    /// Per CPU: where the last scan of the map ended.
    base: Box<[u32]>,
    /// No slot outside of `lowest..=highest` is free.
    lowest: u32,
    highest: u32,
}

#[derive(Default)]
struct SlotCache {
    slots: Vec<u32>,
    returned: Vec<u32>,
}

/// The allocator of one device.
pub struct ScanAllocator {
    map: SlotMap,
    device: CachePadded<SpinLock<ScanDevice>>,
    caches: Box<[CachePadded<SpinLock<SlotCache>>]>,
    caching: AtomicBool,
    free: CachePadded<AtomicU32>,
    /// Each cluster's lock: what guards the bytes of slots in use.
    clusters: Box<[SpinLock<()>]>,
}

impl ScanAllocator {
    /// A device of whole clusters whose first slot is its header, for `cpus` CPUs.
    pub fn new(slots: u32, cpus: usize) -> Self {
        let clusters = slots / CLUSTER;
        let slots = clusters * CLUSTER;
        let mut used: Box<[u16]> = (0..clusters).map(|_| 0).collect();
        if let Some(first) = used.first_mut() {
            *first = 1;
        }
        let device = ScanDevice {
            free: free_order(clusters).collect(),
            used,
            next: vec![None; cpus * ORDERS].into(),
            base: vec![0; cpus].into(),
            lowest: 1,
            highest: slots.saturating_sub(1),
        };
        ScanAllocator {
            map: SlotMap::new(slots),
            device: CachePadded::new(SpinLock::new(device)),
            caches: (0..cpus).map(|_| CachePadded::default()).collect(),
            caching: AtomicBool::new(false),
            free: CachePadded::new(AtomicU32::new(slots.saturating_sub(1))),
            clusters: (0..clusters).map(|_| SpinLock::new(())).collect(),
        }
    }

    /// The static arrays.
    pub fn map(&self) -> &SlotMap {
        &self.map
    }

    /// `2^order` aligned slots, each marked as cached.
    pub(crate) fn alloc(&self, cpu: usize, order: usize) -> Option<u32> {
        if order > 0 {
            let mut device = self.device.lock();
            return self.take_from_cluster(&mut device, cpu, order);
        }
        if !self.caching() {
            return self.single(cpu);
        }
        let mut cache = self.caches[cpu].lock();
        if cache.slots.is_empty() {
            let mut device = self.device.lock();
            while cache.slots.len() < CACHE
                && let Some(off) = self.take_from_cluster(&mut device, cpu, 0)
            {
                cache.slots.push(off);
            }
            drop(device);
            if cache.slots.is_empty() {
                drop(cache);
                return self.single(cpu);
            }
            // Handed out in the order of their numbers.
            cache.slots.reverse();
        }
        cache.slots.pop()
    }

    /// Frees slots that [`ScanAllocator::alloc`] gave.
    pub fn free(&self, cpu: usize, off: u32, n: u32) {
        (off..off + n).for_each(|slot| self.map.set(slot, HAS_CACHE));
        if !self.caching() {
            self.give_back(off..off + n);
            return;
        }
        let mut cache = self.caches[cpu].lock();
        for slot in off..off + n {
            cache.returned.push(slot);
            if cache.returned.len() == CACHE {
                self.give_back(cache.returned.drain(..));
            }
        }
    }

    /// Changes the bytes of slots in use, under their cluster's lock.
    pub(crate) fn change(&self, off: u32, n: u32, new: impl Fn(u8) -> u8) {
        let _cluster = self.clusters[(off / CLUSTER) as usize].lock();
        (off..off + n).for_each(|slot| self.map.set(slot, new(self.map.get(slot))));
    }

    /// Slots that are neither used nor in a CPU's cache.
    fn free_slots(&self) -> u32 {
        self.free.load(Ordering::Relaxed)
    }

    /// Bytes for clusters, lists and caches.
    pub fn bytes(&self) -> usize {
        let device = self.device.lock();
        let lists = device.free.capacity() * size_of::<u32>() + size_of_val(&*device.used);
        let cursors = size_of_val(&*device.next) + size_of_val(&*device.base);
        lists
            + cursors
            + size_of_val(&*self.clusters)
            + self.caches.len() * 2 * CACHE * size_of::<u32>()
    }

    /// Are the CPUs' caches in use? Turns them on and off.
    fn caching(&self) -> bool {
        let (free, cpus) = (self.free_slots(), self.caches.len() as u32);
        let on = self.caching.load(Ordering::Relaxed);
        if on && free < OFF * cpus {
            self.caching.store(false, Ordering::Relaxed);
            self.drain();
            return false;
        }
        if !on && free > ON * cpus {
            self.caching.store(true, Ordering::Relaxed);
            return true;
        }
        on
    }

    fn drain(&self) {
        for cache in &self.caches {
            let mut cache = cache.lock();
            let SlotCache { slots, returned } = &mut *cache;
            self.give_back(slots.drain(..).chain(returned.drain(..)));
        }
    }

    fn give_back(&self, slots: impl Iterator<Item = u32>) {
        let mut device = self.device.lock();
        for slot in slots {
            self.map.set(slot, 0);
            let cluster = slot / CLUSTER;
            device.used[cluster as usize] -= 1;
            if device.used[cluster as usize] == 0 {
                device.free.push_back(cluster);
            }
            (device.lowest, device.highest) = (device.lowest.min(slot), device.highest.max(slot));
            self.free.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// From the CPU's current cluster of the order, or a free one.
    fn take_from_cluster(&self, device: &mut ScanDevice, cpu: usize, order: usize) -> Option<u32> {
        let (cursor, n) = (cpu * ORDERS + order, 1 << order);
        loop {
            let at = match device.next[cursor] {
                // The cluster became free meanwhile and is on the list: it may be another
                // cursor's next.
                Some(at) if device.used[(at / CLUSTER) as usize] == 0 => None,
                at => at,
            };
            let at = match at {
                Some(at) => at,
                None => device.free.pop_front()? * CLUSTER,
            };
            let end = (at / CLUSTER + 1) * CLUSTER;
            let found = (at..end).step_by(n as usize).find(|&at| self.map.all_free(at, n));
            device.next[cursor] = found.map(|at| at + n).filter(|&next| next < end);
            if let Some(off) = found {
                self.take(device, off, n);
                return Some(off);
            }
        }
    }

    /// One slot, from a cluster or by a scan of the map.
    fn single(&self, cpu: usize) -> Option<u32> {
        let mut device = self.device.lock();
        if let Some(off) = self.take_from_cluster(&mut device, cpu, 0) {
            return Some(off);
        }
        loop {
            let (base, lowest, highest) = (device.base[cpu], device.lowest, device.highest);
            drop(device);
            let mut slots = (base + 1..=highest).chain(lowest..=base);
            let found = slots.find(|&slot| slot < self.map.slots() && self.map.get(slot) == 0)?;
            device = self.device.lock();
            if self.map.get(found) == 0 {
                self.take(&mut device, found, 1);
                device.base[cpu] = found;
                return Some(found);
            }
        }
    }

    fn take(&self, device: &mut ScanDevice, off: u32, n: u32) {
        (off..off + n).for_each(|slot| self.map.set(slot, HAS_CACHE));
        device.used[(off / CLUSTER) as usize] += n as u16;
        self.free.fetch_sub(n, Ordering::Relaxed);
        if off == device.lowest {
            device.lowest += n;
        }
        if off + n == device.highest + 1 {
            device.highest -= n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use std::collections::BTreeMap;

    #[test]
    fn a_partly_used_cluster_serves_no_large_run() {
        let a = ScanAllocator::new(4 * CLUSTER, 1);
        let runs: Vec<u32> = std::iter::from_fn(|| a.alloc(0, 4)).collect();
        assert_eq!(runs.len(), 3 * 32, "three whole clusters; the first one holds the header");
        // Half of every cluster is free again, in whole runs of the very order, and none is found.
        runs.iter().step_by(2).for_each(|&off| a.free(0, off, 16));
        assert_eq!(a.alloc(0, 4), None);
        // A whole cluster is.
        runs.iter()
            .filter(|off| **off / CLUSTER == 2)
            .skip(1)
            .step_by(2)
            .for_each(|&off| a.free(0, off, 16));
        assert_eq!(a.alloc(0, 4), Some(2 * CLUSTER));
    }

    #[test]
    fn single_slots_are_found_to_the_last() {
        let slots = 4 * CLUSTER;
        let a = ScanAllocator::new(slots, 1);
        let mut all: Vec<u32> = std::iter::from_fn(|| a.alloc(0, 0)).collect();
        all.sort_unstable();
        assert!(all.iter().copied().eq(1..slots), "every slot but the header, once");
        a.free(0, 777, 1);
        assert_eq!((a.alloc(0, 0), a.alloc(0, 0)), (Some(777), None));
    }

    #[test]
    fn slots_of_random_histories_never_overlap() {
        let a = ScanAllocator::new(16 * CLUSTER, 2);
        let mut random = Random::new(3);
        let mut owned: Vec<(u32, u32)> = Vec::new();
        let mut used = BTreeMap::new();
        for _ in 0..40_000 {
            let cpu = random.below(2) as usize;
            if random.below(100) < 55 {
                let order = [0, 0, 0, 2, 4, 9][random.below(6) as usize];
                let Some(off) = a.alloc(cpu, order) else { continue };
                assert_eq!(off % (1 << order), 0);
                assert!(
                    (off..off + (1 << order))
                        .all(|slot| slot > 0 && used.insert(slot, ()).is_none())
                );
                owned.push((off, 1 << order));
            } else if !owned.is_empty() {
                let (off, n) = owned.swap_remove(random.below(owned.len() as u32) as usize);
                (off..off + n).for_each(|slot| assert_eq!(used.remove(&slot), Some(())));
                a.free(cpu, off, n);
            }
        }
        owned.into_iter().for_each(|(off, n)| a.free(0, off, n));
        a.drain();
        assert_eq!(
            (a.free_slots(), a.device.lock().free.len()),
            (16 * CLUSTER - 1, 15),
            "everything came back"
        );
    }

    #[test]
    fn the_caches_are_used_while_there_is_room() {
        let a = ScanAllocator::new(4 * CLUSTER, 1);
        let first = a.alloc(0, 0).unwrap();
        assert_eq!((first, a.caches[0].lock().slots.len()), (CLUSTER, CACHE - 1));
        a.free(0, first, 1);
        assert_eq!(
            (a.map.get(first), a.caches[0].lock().returned.len()),
            (HAS_CACHE, 1),
            "not yet free"
        );
        while a.free_slots() >= OFF {
            a.alloc(0, 0).unwrap();
        }
        a.alloc(0, 0).unwrap();
        assert!(!a.caching.load(Ordering::Relaxed) && a.map.get(first) == 0);
    }
}
