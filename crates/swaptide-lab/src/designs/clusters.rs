//! The allocator with cluster lists over the static map: what stood before the swap table.
//! (docs/linux-swap.md, "Clusters" and "Earlier designs": 6.12 to 6.17)
//!
//! Each cluster has a lock; lists free, `nonfull[order]`, `frag[order]`, full, linked through the
//! clusters, under the device's lock. A CPU has a current cluster for each order. Order of the
//! search: current cluster; a free one; `nonfull[o]`, each once, what does not serve goes to
//! `frag[o]`; `frag[o]`, each once; a single slot also from clusters of other orders.
//!
//! Locks: cluster, then lists. From a list a cluster is only try-locked.

use crate::designs::map::{HAS_CACHE, SlotMap, free_order};
use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use swaptide_core::{ORDERS, SLOTS_PER_CLUSTER};
use swaptide_core::{SpinGuard, SpinLock};

const CLUSTER: u32 = SLOTS_PER_CLUSTER as u32;
const NONE: u32 = u32::MAX;
const NOWHERE: u64 = u64::MAX;

const OFF_LIST: usize = usize::MAX;
const FREE: usize = 0;
const FULL: usize = 1;
const LISTS: usize = 2 + 2 * ORDERS;

const fn nonfull(order: usize) -> usize {
    2 + order
}

const fn frag(order: usize) -> usize {
    2 + ORDERS + order
}

struct MapCluster {
    used: u32,
    order: usize,
    list: usize,
}

struct MapLists {
    heads: [(u32, u32); LISTS],
    lens: [u32; LISTS],
    links: Box<[(u32, u32)]>,
}

/// The allocator of one device.
pub struct ClusterAllocator {
    map: SlotMap,
    clusters: Box<[SpinLock<MapCluster>]>,
    lists: CachePadded<SpinLock<MapLists>>,
    /// Of each CPU.
    cursors: Box<[CachePadded<[AtomicU64; ORDERS]>]>,
    /// The device's account of what is used, which every allocation and every free changes.
    used: CachePadded<AtomicU32>,
}

impl MapLists {
    fn push(&mut self, list: usize, index: u32, cluster: &mut MapCluster) {
        cluster.list = list;
        let (head, tail) = self.heads[list];
        self.links[index as usize] = (tail, NONE);
        if tail == NONE {
            self.heads[list] = (index, index);
        } else {
            self.links[tail as usize].1 = index;
            self.heads[list] = (head, index);
        }
        self.lens[list] += 1;
    }

    fn unlink(&mut self, index: u32, cluster: &mut MapCluster) {
        let list = std::mem::replace(&mut cluster.list, OFF_LIST);
        if list == OFF_LIST {
            return;
        }
        let (prev, next) = self.links[index as usize];
        if prev == NONE {
            self.heads[list].0 = next
        } else {
            self.links[prev as usize].1 = next
        }
        if next == NONE {
            self.heads[list].1 = prev
        } else {
            self.links[next as usize].0 = prev
        }
        self.lens[list] -= 1;
    }
}

impl ClusterAllocator {
    /// A device of whole clusters, at least one, whose first slot is its header, for `cpus` CPUs.
    pub fn new(slots: u32, cpus: usize) -> Self {
        let clusters = slots / CLUSTER;
        let mut lists = MapLists {
            heads: [(NONE, NONE); LISTS],
            lens: [0; LISTS],
            links: vec![(NONE, NONE); clusters as usize].into(),
        };
        let mut table: Vec<MapCluster> =
            (0..clusters).map(|_| MapCluster { used: 0, order: 0, list: OFF_LIST }).collect();
        table[0].used = 1;
        lists.push(nonfull(0), 0, &mut table[0]);
        free_order(clusters).for_each(|index| lists.push(FREE, index, &mut table[index as usize]));
        ClusterAllocator {
            map: SlotMap::new(clusters * CLUSTER),
            clusters: table.into_iter().map(SpinLock::new).collect(),
            lists: CachePadded::new(SpinLock::new(lists)),
            cursors: (0..cpus)
                .map(|_| CachePadded::new([const { AtomicU64::new(NOWHERE) }; ORDERS]))
                .collect(),
            used: CachePadded::default(),
        }
    }

    /// The static arrays.
    pub fn map(&self) -> &SlotMap {
        &self.map
    }

    /// Bytes for clusters, lists and cursors.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.clusters)
            + size_of_val(&*self.lists.lock().links)
            + size_of_val(&*self.cursors)
    }

    /// `2^order` aligned slots, each marked as cached.
    pub(crate) fn alloc(&self, cpu: usize, order: usize) -> Option<u32> {
        let cursor = &self.cursors[cpu][order];
        let current = cursor.load(Ordering::Relaxed);
        if current != NOWHERE {
            let (index, next) = ((current >> 32) as u32, current as u32);
            let cluster = self.clusters[index as usize].lock();
            if (cluster.order == order || order == 0) && cluster.used > 0 {
                let list = cluster.list;
                if let Some(off) = self.take(cursor, index, cluster, order, next, list) {
                    return Some(off);
                }
            } else {
                cursor.store(NOWHERE, Ordering::Relaxed);
            }
        }
        self.pop(FREE)
            .and_then(|(index, mut cluster)| {
                cluster.order = order;
                self.take(cursor, index, cluster, order, 0, nonfull(order))
            })
            .or_else(|| self.scan(cursor, nonfull(order), order, frag(order)))
            .or_else(|| self.scan(cursor, frag(order), order, frag(order)))
            .or_else(|| {
                let others = (1..ORDERS).filter(|_| order == 0).flat_map(|o| [frag(o), nonfull(o)]);
                others.into_iter().find_map(|list| self.scan(cursor, list, 0, list))
            })
    }

    /// Frees slots that [`ClusterAllocator::alloc`] gave.
    pub fn free(&self, off: u32, n: u32) {
        let index = off / CLUSTER;
        let mut cluster = self.clusters[index as usize].lock();
        (off..off + n).for_each(|slot| self.map.set(slot, 0));
        cluster.used -= n;
        self.used.fetch_sub(n, Ordering::Relaxed);
        let list = if cluster.used == 0 { FREE } else { nonfull(cluster.order) };
        self.move_to(index, &mut cluster, list);
    }

    /// Changes the bytes of slots in use, under their cluster's lock.
    pub(crate) fn change(&self, off: u32, n: u32, new: impl Fn(u8) -> u8) {
        let _cluster = self.clusters[(off / CLUSTER) as usize].lock();
        (off..off + n).for_each(|slot| self.map.set(slot, new(self.map.get(slot))));
    }

    fn pop(&self, list: usize) -> Option<(u32, SpinGuard<'_, MapCluster>)> {
        let mut lists = self.lists.lock();
        let mut index = lists.heads[list].0;
        while index != NONE {
            if let Some(mut cluster) = self.clusters[index as usize].try_lock() {
                lists.unlink(index, &mut cluster);
                return Some((index, cluster));
            }
            index = lists.links[index as usize].1;
        }
        None
    }

    fn scan(&self, cursor: &AtomicU64, list: usize, order: usize, to: usize) -> Option<u32> {
        let rounds = self.lists.lock().lens[list];
        (0..rounds)
            .map_while(|_| self.pop(list))
            .find_map(|(index, cluster)| self.take(cursor, index, cluster, order, 0, to))
    }

    /// Takes the first run at or after slot `from` of a locked cluster, then puts the cluster on
    /// `list`, or where full ones go.
    fn take(
        &self,
        cursor: &AtomicU64,
        index: u32,
        mut cluster: SpinGuard<'_, MapCluster>,
        order: usize,
        from: u32,
        list: usize,
    ) -> Option<u32> {
        let (n, base) = (1 << order, index * CLUSTER);
        let room = cluster.used + n <= CLUSTER;
        let starts = (base + from.next_multiple_of(n)..base + CLUSTER).step_by(n as usize);
        let found = starts.take_while(|_| room).find(|&at| self.map.all_free(at, n));
        if let Some(off) = found {
            (off..off + n).for_each(|slot| self.map.set(slot, HAS_CACHE));
            cluster.used += n;
            self.used.fetch_add(n, Ordering::Relaxed);
        }
        let list = if cluster.used == CLUSTER { FULL } else { list };
        self.move_to(index, &mut cluster, list);
        let next = found.map(|off| off + n - base).filter(|&next| next < CLUSTER);
        cursor.store(
            next.map_or(NOWHERE, |next| u64::from(index) << 32 | u64::from(next)),
            Ordering::Relaxed,
        );
        found
    }

    fn move_to(&self, index: u32, cluster: &mut MapCluster, list: usize) {
        if cluster.list != list {
            let mut lists = self.lists.lock();
            lists.unlink(index, cluster);
            lists.push(list, index, cluster);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use std::collections::BTreeSet;

    #[test]
    fn a_partly_used_cluster_serves_its_order() {
        let a = ClusterAllocator::new(4 * CLUSTER, 1);
        let runs: Vec<u32> = std::iter::from_fn(|| a.alloc(0, 4)).collect();
        assert_eq!(runs.len(), 3 * 32);
        let mut freed: Vec<u32> = runs.iter().copied().step_by(2).collect();
        freed.iter().for_each(|&off| a.free(off, 16));
        let mut again: Vec<u32> = std::iter::from_fn(|| a.alloc(0, 4)).collect();
        freed.sort_unstable();
        again.sort_unstable();
        assert_eq!(freed, again, "this is what the cluster lists are for");
        a.free(runs[0], 16);
        let mut singles: Vec<u32> = std::iter::from_fn(|| a.alloc(0, 0)).collect();
        singles.sort_unstable();
        assert!(
            singles.into_iter().eq((1..CLUSTER).chain(runs[0]..runs[0] + 16)),
            "single slots steal last"
        );
    }

    #[test]
    fn slots_of_random_histories_never_overlap() {
        let a = ClusterAllocator::new(16 * CLUSTER, 2);
        let mut random = Random::new(5);
        let mut owned: Vec<(u32, u32)> = Vec::new();
        let mut used = BTreeSet::new();
        for _ in 0..40_000 {
            if random.below(100) < 55 {
                let order = [0, 0, 0, 2, 4, 9][random.below(6) as usize];
                let Some(off) = a.alloc(random.below(2) as usize, order) else { continue };
                assert_eq!(off % (1 << order), 0);
                assert!((off..off + (1 << order)).all(|slot| slot > 0 && used.insert(slot)));
                owned.push((off, 1 << order));
            } else if !owned.is_empty() {
                let (off, n) = owned.swap_remove(random.below(owned.len() as u32) as usize);
                (off..off + n).for_each(|slot| assert!(used.remove(&slot)));
                a.free(off, n);
            }
        }
        while let Some(off) = a.alloc(0, 0) {
            assert!(used.insert(off));
            owned.push((off, 1));
        }
        assert_eq!(
            used.len() as u32,
            16 * CLUSTER - 1,
            "a single slot is found while there is one"
        );
        owned.into_iter().for_each(|(off, n)| a.free(off, n));
        let lists = a.lists.lock();
        assert_eq!((lists.lens[FREE], lists.lens[nonfull(0)]), (15, 1), "everything came back");
    }

    #[test]
    fn threads_never_share_a_slot() {
        let a = ClusterAllocator::new(64 * CLUSTER, 4);
        let owner: Vec<AtomicU64> = (0..64 * CLUSTER).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|s| {
            for t in 0..4u64 {
                let (a, owner) = (&a, &owner);
                s.spawn(move || {
                    let mut random = Random::new(t);
                    let mut owned: Vec<(u32, u32)> = Vec::new();
                    for _ in 0..20_000 {
                        let order = [0, 0, 4][random.below(3) as usize];
                        if random.below(2) == 0
                            && let Some(off) = a.alloc(t as usize, order)
                        {
                            let n = 1 << order;
                            for slot in off..off + n {
                                assert_eq!(owner[slot as usize].swap(t + 1, Ordering::Relaxed), 0);
                            }
                            owned.push((off, n));
                        } else if !owned.is_empty() {
                            let (off, n) =
                                owned.swap_remove(random.below(owned.len() as u32) as usize);
                            (off..off + n)
                                .for_each(|slot| owner[slot as usize].store(0, Ordering::Relaxed));
                            a.free(off, n);
                        }
                    }
                });
            }
        });
    }
}
