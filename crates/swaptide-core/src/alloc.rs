//! Finding free slots.
//!
//! The search, for a run of order `o`:
//! 1. the CPU's current cluster of that order, from where the last allocation ended;
//! 2. on a device with discard, or told so ([`crate::SearchOrder`]): an empty cluster;
//! 3. `nonfull[o]`, each once: what does not serve moves to `frag[o]`. While there are empty
//!    clusters and `o` > 0, a few of them: the others are the first next time;
//! 4. an empty cluster: one that was used before rather than a fresh one, so that the device's
//!    footprint stays small;
//! 5. when more than half of the device is used: a full cluster's slots that only the swap cache
//!    holds, then `nonfull[o]` again ([`crate::reclaim`]); then a few of `frag[o]`;
//! 6. an empty cluster that still waits for its discard: the discard is a favour, the slot is
//!    needed;
//! 7. order 0 only: any other cluster with a free slot, by `frag[1]`, `nonfull[1]`, `frag[2]`, ...,
//!    `frag[0]`.
//!
//! (docs/linux-swap.md, "Search order".) On a rotational device step 1 is the cursor:
//! from where the last allocation of any CPU and order ended, cluster by cluster in the order of
//! their numbers, a bounded number of them; clusters are not devoted to orders there.
//! (docs/linux-swap.md, "Rotational devices")
//!
//! Invariants:
//! 1. A cluster with data serves its own order, and order 0 when nothing else is left (stealing
//!    does not change its order).
//! 2. `holes` says that a part of the cluster was freed after the last scan passed it: such a
//!    cluster stays on `nonfull[o]` though a CPU fills it, and a CPU that reaches its end looks at
//!    it once more from the start. (With the kernel's rule, any scan moves it to `frag[o]`, and the
//!    holes are forgotten.)
//! 3. Order 0 does not fail while a slot is free: the reservation says that one is, so the search
//!    is repeated for a while when it was hidden (its cluster locked by another thread for a
//!    moment).

use crate::cluster::ListId;
use crate::cluster::{ClusterState, SLOTS_PER_LINE};
use crate::device::SwapDevice;
use crate::entry::Entry;
use crate::error::AllocError;
use crate::ids::{
    ClusterIndex, CpuId, FolioId, GroupId, ORDERS, Order, SLOTS_PER_CLUSTER, SwapOffset,
};
use crate::per_cpu::{BATCH, CpuIndex, PerCpu};
use crate::reclaim;
use crate::sync::{AtomicU64, Ordering, SpinGuard, relax};
use crate::table::Table;

/// Clusters of `nonfull[o]`, o > 0, looked at in one search while there are empty ones.
const NONFULL_SCANS: u32 = 4;

/// Clusters of `frag[o]` looked at in one search.
const FRAG_SCANS: u32 = 4;

/// Clusters that the cursor of a rotational device passes in one search.
const SWEEP_CLUSTERS: u32 = 64;

/// Searches by order 0 before it believes that the free slot it reserved is out of reach (in
/// clusters being discarded).
#[cfg(not(loom))]
const ORDER_0_ROUNDS: u32 = 1024;
#[cfg(loom)]
const ORDER_0_ROUNDS: u32 = 3;

const NOWHERE: u64 = u64::MAX;

/// One search: what is wanted, and for which CPU and group.
struct Search<'a> {
    device: &'a SwapDevice,
    order: Order,
    /// The order of the clusters that serve it: its own, or 0 where clusters are not devoted to
    /// orders.
    class: u8,
    entry: Entry,
    /// The CPU it is for.
    own: CpuIndex,
    /// The end of that CPU's last allocation of this order.
    cursor: &'a AtomicU64,
    no_memory: bool,
}

type FoundCluster<'a> = (ClusterIndex, SpinGuard<'a, ClusterState>);

/// See [`SwapDevice::alloc_folio`].
pub(crate) fn alloc_folio(
    device: &SwapDevice,
    cpu: CpuId,
    order: Order,
    folio: FolioId,
    group: GroupId,
) -> Result<SwapOffset, AllocError> {
    let own = device.per_cpu.of(cpu.0.into());
    reserve_or_reclaim(device, own, order.pages())?;
    let entry = Entry::new_folio(folio, group);
    let class = if device.cursor.is_some() { 0 } else { order.index() as u8 };
    let cursor = device.per_cpu.current(own, order.index());
    let mut search = Search { device, order, class, entry, own, cursor, no_memory: false };
    let rounds = if order == Order::ZERO { ORDER_0_ROUNDS } else { 1 };
    let mut spins = 0;
    for _ in 0..rounds {
        if let Some(off) = search.current() {
            return Ok(off);
        }
        if let Some(off) = search.lists() {
            // What comes next follows it.
            if let Some(cursor) = &device.cursor {
                *cursor.lock() = (off.cluster().0, off.in_cluster() + order.pages() as usize);
            }
            return Ok(off);
        }
        if search.no_memory {
            break;
        }
        relax(&mut spins);
    }
    device.per_cpu.undo(order.pages());
    Err(if search.no_memory { AllocError::NoMemory } else { AllocError::NoRun })
}

/// Takes `n` slots out of the capacity. When the device is full, slots that only the swap cache
/// holds are asked for first.
#[inline]
fn reserve_or_reclaim(device: &SwapDevice, cpu: CpuIndex, n: u32) -> Result<(), AllocError> {
    match device.reserve(cpu, n) {
        Err(AllocError::Full) if device.reclaim.is_some() && reclaim::when_full(device, n) => {
            device.reserve(cpu, n)
        }
        done => done,
    }
}

impl<'a> Search<'a> {
    /// Step 1: the CPU's own cluster.
    #[inline]
    fn current(&mut self) -> Option<SwapOffset> {
        if self.device.cursor.is_some() {
            return self.sweep();
        }
        let current = self.cursor.load(Ordering::Relaxed);
        if current == NOWHERE {
            return None;
        }
        let (index, next) = (ClusterIndex((current >> 32) as u32), current as u32 as usize);
        let mut state = self.device.cluster(index).lock();
        let own = state.order == self.class;
        if state.used == 0 || !(own || self.order == Order::ZERO) {
            self.cursor.store(NOWHERE, Ordering::Relaxed);
            return None;
        }
        let mut found = self.take(index, &mut state, next);
        if found.is_none() && own && state.holes && next > 0 {
            state.holes = false;
            found = self.take(index, &mut state, 0);
        }
        let home = if own && !(found.is_some() && state.holes) {
            ListId::Frag(state.order)
        } else {
            state.list
        };
        self.keep_current(index, state, home, found)
    }

    /// Steps 2 to 7.
    fn lists(&mut self) -> Option<SwapOffset> {
        let own = self.class;
        let early = if self.device.discard || self.device.free_first { self.empty() } else { None };
        early
            .or_else(|| {
                self.scan(ListId::Nonfull(own), self.nonfull_scans(), Some(ListId::Frag(own)))
            })
            .or_else(|| self.empty())
            .or_else(|| self.reclaimed())
            .or_else(|| self.scan(ListId::Frag(own), FRAG_SCANS, None))
            .or_else(|| self.emptied())
            .or_else(|| self.waiting_for_discard())
            .or_else(|| self.steal())
    }

    /// The number of clusters with room that are checked before an empty one is taken. Where slots
    /// are freed one by one nearly every cluster has room, and hardly one a run: to look at all of
    /// them for each folio costs more than the rest of the allocation. What was not looked at is
    /// the first next time.
    fn nonfull_scans(&self) -> u32 {
        if self.order == Order::ZERO {
            return u32::MAX;
        }
        let lists = self.device.lists.lock();
        if lists.len(ListId::Free) > 0 || lists.fresh != lists.fresh_end {
            NONFULL_SCANS
        } else {
            u32::MAX
        }
    }

    /// A cluster that is empty: from the list of free ones, or never used before.
    fn empty(&mut self) -> Option<SwapOffset> {
        let (device, mut lists) = (self.device, self.device.lists.lock());
        let taken = match lists.pop(&device.headers, ListId::Free) {
            Some(taken) => Some(taken),
            None if lists.fresh == lists.fresh_end => None,
            None => {
                let fresh = lists.pop_fresh(&device.headers);
                self.no_memory |= fresh.is_none();
                fresh
            }
        };
        drop(lists);
        self.fill(taken?)
    }

    /// Step 5, its first half.
    fn reclaimed(&mut self) -> Option<SwapOffset> {
        let won = self.device.crowded() && reclaim::cached(self.device, 1) > 0;
        let found = if won {
            self.scan(ListId::Nonfull(self.class), u32::MAX, Some(ListId::Frag(self.class)))
        } else {
            None
        };
        found.or_else(|| self.emptied())
    }

    /// A cluster that emptied because its cached slots were won back.
    fn emptied(&mut self) -> Option<SwapOffset> {
        if self.device.reclaim.is_some() { self.empty() } else { None }
    }

    /// The cursor of a rotational device.
    #[cold]
    fn sweep(&mut self) -> Option<SwapOffset> {
        let device = self.device;
        let mut cursor = device.cursor.as_ref()?.lock();
        let clusters = device.slots().div_ceil(SLOTS_PER_CLUSTER as u32);
        let (mut index, mut slot) = *cursor;
        let found = (0..=SWEEP_CLUSTERS.min(clusters)).find_map(|_| {
            if index >= clusters {
                (index, slot) = (0, 0);
            }
            let found = self.sweep_cluster(ClusterIndex(index), slot);
            (index, slot) = (index + 1, 0);
            found
        });
        if let Some(off) = found {
            *cursor = (off.cluster().0, off.in_cluster() + self.order.pages() as usize);
        }
        found
    }

    /// A run in that very cluster, at or after `slot`.
    fn sweep_cluster(&mut self, index: ClusterIndex, slot: usize) -> Option<SwapOffset> {
        let device = self.device;
        let mut lists = device.lists.lock();
        if (lists.fresh..lists.fresh_end).contains(&index.0) {
            let fresh = (lists.fresh == index.0).then(|| lists.pop_fresh(&device.headers))?;
            self.no_memory |= fresh.is_none();
            drop(lists);
            return self.fill(fresh?);
        }
        drop(lists);
        let mut state = device.cluster(index).lock();
        if state.list == ListId::Free {
            device.move_to(index, &mut state, ListId::None);
            return self.fill((index, state));
        }
        if state.used == 0 {
            return None;
        }
        let found = self.take(index, &mut state, slot);
        let home = if found.is_some() { ListId::Frag(0) } else { state.list };
        self.keep_current(index, state, home, found)
    }

    /// Step 6: a cluster that waits for its discard.
    fn waiting_for_discard(&mut self) -> Option<SwapOffset> {
        if !self.device.discard {
            return None;
        }
        let taken = self.device.lists.lock().pop(&self.device.headers, ListId::Discard);
        self.fill(taken?)
    }

    /// Allocates from an empty cluster taken off its list.
    fn fill(&mut self, (index, mut state): FoundCluster<'a>) -> Option<SwapOffset> {
        self.device.open(index, &mut state, self.class);
        let found = self.take(index, &mut state, 0);
        assert!(
            found.is_some(),
            "{index} of {} is empty and has no free run of {}",
            self.device.ty,
            self.order
        );
        self.keep_current(index, state, ListId::Frag(self.class), found)
    }

    /// Scans up to `max` clusters of a list, each from its start. `to`: where a scanned cluster
    /// goes; `None` is back to its list.
    fn scan(&self, list: ListId, max: u32, to: Option<ListId>) -> Option<SwapOffset> {
        if self.order == Order::MAX && self.order != Order::ZERO {
            return None;
        }
        // Of a rotational device's clusters, none of which is devoted to an order, many may have no
        // run of it.
        let max = if self.device.cursor.is_some() { max.min(SWEEP_CLUSTERS) } else { max };
        let rounds = max.min(self.device.lists.lock().len(list));
        for _ in 0..rounds {
            let taken = self.device.lists.lock().pop(&self.device.headers, list);
            let (index, mut state) = taken?;
            if state.order == self.class {
                state.holes = false;
            }
            let found = self.take(index, &mut state, 0);
            let cached = if found.is_none() && self.device.crowded() {
                self.cached_run(index)
            } else {
                None
            };
            let off = self
                .keep_current(index, state, to.unwrap_or(list), found)
                .or_else(|| self.win(index, cached?));
            if off.is_some() {
                return off;
            }
        }
        None
    }

    /// A run of a locked cluster in which every slot is free or held by the swap cache alone.
    fn cached_run(&self, index: ClusterIndex) -> Option<usize> {
        let (n, table) = (self.order.pages() as usize, self.device.tables.get(index)?);
        let good = |i| {
            let word = table.get_locked(i);
            word.is_free() || word.is_cache_only()
        };
        (0..SLOTS_PER_CLUSTER).step_by(n).find(|&at| (at..at + n).all(good))
    }

    /// Asks for the cached slots of a run of a cluster that was released, and takes the run if that
    /// made it free.
    fn win(&self, index: ClusterIndex, at: usize) -> Option<SwapOffset> {
        reclaim::in_cluster(self.device, index, at..at + self.order.pages() as usize);
        let mut state = self.device.cluster(index).lock();
        // What emptied is on the free list: the search comes to that.
        if state.used == 0 || !(state.order == self.class || self.order == Order::ZERO) {
            return None;
        }
        let found = self.take(index, &mut state, at);
        let home = state.list;
        self.keep_current(index, state, home, found)
    }

    /// Step 7: a free slot of another CPU's cluster.
    fn steal(&self) -> Option<SwapOffset> {
        if self.order != Order::ZERO {
            return None;
        }
        let others =
            (1..ORDERS as u8).flat_map(|order| [ListId::Frag(order), ListId::Nonfull(order)]);
        others.chain([ListId::Frag(0)]).find_map(|list| self.scan(list, u32::MAX, None))
    }

    /// Takes the first free run at or after slot `start` of a locked cluster.
    #[inline]
    fn take(&self, index: ClusterIndex, state: &mut ClusterState, start: usize) -> Option<usize> {
        let n = self.order.pages() as usize;
        let table = self.device.tables.get(index)?;
        let at = free_run(table, state, n, start)?;
        (at..at + n).for_each(|i| table.set(i, self.entry));
        state.used += n as u16;
        state.last_cpu = PerCpu::<BATCH>::short(self.own);
        if n >= SLOTS_PER_LINE {
            state.open &= !(lines_of(n) << (at / SLOTS_PER_LINE));
        } else if n == 1 && start <= at / SLOTS_PER_LINE * SLOTS_PER_LINE {
            // The search came by every line from its start on up to this one's.
            state.open &= !(((1 << (at / SLOTS_PER_LINE)) - 1)
                & !((1 << start.div_ceil(SLOTS_PER_LINE)) - 1));
        }
        Some(at)
    }

    /// After an attempt: the cluster goes to its list, the CPU's state remembers where it was.
    #[inline]
    fn keep_current(
        &self,
        index: ClusterIndex,
        mut state: SpinGuard<'_, ClusterState>,
        home: ListId,
        found: Option<usize>,
    ) -> Option<SwapOffset> {
        let full = usize::from(state.used) == SLOTS_PER_CLUSTER;
        self.device.move_to(index, &mut state, if full { ListId::Full } else { home });
        let next = found
            .map(|at| at + self.order.pages() as usize)
            .filter(|&next| !full && next < SLOTS_PER_CLUSTER);
        // The cursor is a hint: a lost update costs a search, nothing else.
        self.cursor.store(
            next.map_or(NOWHERE, |next| u64::from(index.0) << 32 | next as u64),
            Ordering::Relaxed,
        );
        found.map(|at| index.slot(at))
    }
}

/// The lines that `n` slots cover, from bit 0 on.
#[inline]
fn lines_of(n: usize) -> u64 {
    u64::MAX >> (u64::BITS as usize - n.div_ceil(SLOTS_PER_LINE))
}

/// The first free, aligned run of `n` slots at or after slot `start` of a locked cluster with a
/// table.
#[inline]
pub(crate) fn free_run(
    table: &Table,
    state: &ClusterState,
    n: usize,
    start: usize,
) -> Option<usize> {
    if usize::from(state.used) + n > SLOTS_PER_CLUSTER {
        return None;
    }
    let lines = lines_of(n);
    let mut at = start.next_multiple_of(n);
    while at + n <= SLOTS_PER_CLUSTER {
        let line = at / SLOTS_PER_LINE;
        let open = state.open >> line;
        if open & lines != lines {
            // The next line with a free slot; the run's own first line may be open and another one
            // not.
            let skip = (open & !1).trailing_zeros() as usize;
            at = ((line + skip) * SLOTS_PER_LINE)
                .next_multiple_of(n)
                .max((at + 1).next_multiple_of(n));
            continue;
        }
        // From the back: a used slot near the end of the run is as good a reason as one near its
        // start.
        if (at..at + n).rev().all(|i| table.get_locked(i).is_free()) {
            return Some(at);
        }
        at += n;
    }
    None
}
