//! One swap device: its clusters, tables, lists and counters. (docs/linux-swap.md,
//! "Clusters" and "Devices and priorities")
//!
//! The operations that change slots are in [`crate::exchange`]; it passes those that take more
//! than one exchange on to [`crate::alloc`], [`crate::reclaim`] and [`crate::moving`].
//!
//! Invariants:
//! 1. [`SwapDevice::used`] counts reserved and taken slots without the bad ones, and never exceeds
//!    the capacity: an allocation reserves first ([`crate::per_cpu`]) and searches then, so a
//!    reservation of one slot always has a free slot to find.
//! 2. An allocation that saw `enabled` has reserved before: a thread that stores `enabled = false`
//!    and then reads `used == 0` has the device to itself (both sequentially consistent).
//! 3. A new device holds a few bytes per 16384 slots; records come with the first use of a cluster,
//!    32 at a time, and a table's memory with the first slot of its cluster. Addresses for all
//!    tables are there from the start: 8 bytes a slot that take no memory.
//!
//! Locks, in order: cluster, then lists. The hook given to [`SwapDevice::with_free_notify`] runs
//! under the cluster lock.

use crate::cluster::ListId;
use crate::cluster::{Cluster, ClusterState, NO_CLUSTER};
use crate::entry::{Entry, SlotContent, SlotInfo};
use crate::ids::{
    ClusterIndex, MAX_SLOTS, Order, SLOTS_PER_CLUSTER, SwapEntry, SwapOffset, SwapType,
};
use crate::lists::{Headers, Lists};
use crate::per_cpu::{BATCH, CpuIndex, PerCpu};
#[cfg(not(loom))]
use crate::sync::TableMemory;
use crate::sync::{AtomicBool, AtomicU32, AtomicUsize, Ordering, SpinLock};
use crate::table::{Table, TableDiscard, Tables};
use crossbeam_utils::CachePadded;

/// The access times of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Any place costs the same: a current cluster per CPU and order.
    Solid,
    /// Seeks cost: one cursor for all CPUs and orders moves over the device, so that writes follow
    /// each other. (docs/linux-swap.md, "Rotational devices")
    Rotational,
}

/// The first choice of a search whose current cluster has no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SearchOrder {
    /// Clusters in use that have room, then empty ones: fewer tables, and runs survive longer.
    /// (docs/linux-swap.md, "Search order": since 6.18)
    #[default]
    NonfullFirst,
    /// Empty clusters first, as 6.12 to 6.17. Devices with discard always do that.
    FreeFirst,
}

/// Called with the first slot and the number of slots that just became free, under their cluster's
/// lock: they cannot be allocated before the hook returns. It must not call back into the device.
pub type FreeNotify = Box<dyn Fn(SwapOffset, u32) + Send + Sync>;

/// Numbers about a device. Taken one after the other while others continue, so that they may differ
/// by what happened meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Slots the device was made with.
    pub slots: u32,
    /// Most slots that can be used at one time: the limit, or all but the bad ones.
    pub capacity: u32,
    /// Slots in use, bad ones not counted.
    pub used: u32,
    /// Slots that cannot be used.
    pub bad: u32,
    /// Clusters without a used slot, those that wait for their discard not counted.
    pub clusters_free: u32,
    /// Clusters without a used slot that wait for their discard.
    pub clusters_discard: u32,
    /// Clusters with a table.
    pub tables: u32,
}

/// A swap device: slots 0 to `slots` - 1, each free, in the swap cache, swapped out, or bad.
pub struct SwapDevice {
    pub(crate) ty: SwapType,
    slots: u32,
    pub(crate) discard: bool,
    pub(crate) headers: Headers,
    pub(crate) tables: Tables,
    pub(crate) lists: CachePadded<SpinLock<Lists>>,
    /// The number of slots in use, and each CPU's last allocation.
    pub(crate) per_cpu: PerCpu<BATCH>,
    bad: AtomicU32,
    limit: AtomicU32,
    enabled: AtomicBool,
    pub(crate) overflow_bytes: AtomicUsize,
    /// Of a rotational device: cluster and slot behind the last allocation.
    pub(crate) cursor: Option<SpinLock<(u32, usize)>>,
    pub(crate) free_first: bool,
    pub(crate) notify: Option<FreeNotify>,
    pub(crate) reclaim: Option<crate::CacheReclaim>,
}

impl SwapDevice {
    /// A device of `slots` slots (at most [`MAX_SLOTS`], more are cut off), all free, open for
    /// allocation. `cpus` is the number of per-CPU states; a larger CPU number wraps around.
    ///
    /// The tables' addresses come from the allocator, as zeros: one that writes these itself makes
    /// a large device cost its 8 bytes a slot from the start. Where that is so, or is unknown,
    /// [`SwapDevice::new_in`] is the better choice.
    ///
    /// # Panics
    /// When there is no memory for the first few KiB.
    pub fn new(ty: SwapType, slots: u32, cpus: usize, kind: Kind) -> SwapDevice {
        Self::over(Tables::new(clusters_of(slots)), ty, slots, cpus, kind)
    }

    /// The same with its tables in memory that was reserved for them: at least
    /// [`SwapDevice::table_bytes`] of it.
    ///
    /// # Panics
    /// When the memory is too small, or there is none for the first few KiB.
    #[cfg(not(loom))]
    pub fn new_in(
        memory: TableMemory,
        ty: SwapType,
        slots: u32,
        cpus: usize,
        kind: Kind,
    ) -> SwapDevice {
        Self::over(Tables::new_in(clusters_of(slots), memory), ty, slots, cpus, kind)
    }

    /// Bytes of address space for the tables of `slots` slots.
    #[cfg(not(loom))]
    pub const fn table_bytes(slots: u32) -> usize {
        Tables::bytes_of(clusters_of(slots))
    }

    fn over(tables: Tables, ty: SwapType, slots: u32, cpus: usize, kind: Kind) -> SwapDevice {
        let (slots, clusters) = (slots.min(MAX_SLOTS), clusters_of(slots));
        let cpus = if kind == Kind::Rotational { 1 } else { cpus.max(1) };
        let device = SwapDevice {
            ty,
            slots,
            discard: false,
            headers: Headers::new(clusters),
            tables,
            lists: CachePadded::new(SpinLock::new(Lists::new(clusters as u32))),
            per_cpu: PerCpu::new(cpus),
            bad: AtomicU32::new(0),
            limit: AtomicU32::new(u32::MAX),
            enabled: AtomicBool::new(true),
            overflow_bytes: AtomicUsize::new(0),
            cursor: (kind == Kind::Rotational).then(|| SpinLock::new((0, 0))),
            free_first: false,
            notify: None,
            reclaim: None,
        };
        device.close_last_cluster(clusters as u32);
        device
    }

    /// Emptied clusters wait on a list until [`SwapDevice::next_discard`] and
    /// [`SwapDevice::discard_done`] took them off.
    pub fn with_discard(mut self, discard: bool) -> Self {
        self.discard = discard;
        self
    }

    /// Sets the first choice of a search.
    pub fn with_search_order(mut self, order: SearchOrder) -> Self {
        self.free_first = order == SearchOrder::FreeFirst;
        self
    }

    /// At most `limit` slots are used at one time, though `slots` numbers exist. A store that maps
    /// slots to places itself (all of swaptide's do) gives the slot space room to spare, and no run
    /// of slots is ever hard to find.
    pub fn with_limit(self, limit: u32) -> Self {
        self.set_limit(limit);
        self
    }

    /// Tells the owner of the slots' data when slots become free, before they can be allocated
    /// again.
    pub fn with_free_notify(mut self, notify: FreeNotify) -> Self {
        self.notify = Some(notify);
        self
    }

    /// Slots that only the swap cache holds are won back through `hook` as the device fills.
    pub fn with_cache_reclaim(mut self, hook: crate::CacheReclaim) -> Self {
        self.reclaim = Some(hook);
        self
    }

    /// Gives the memory of unused tables back through `discard`; without it the memory is kept for
    /// later use by the same clusters.
    ///
    /// # Panics
    /// When the device has been used, or slots were marked bad.
    pub fn with_table_discard(mut self, discard: TableDiscard) -> Self {
        assert!(
            self.used() == 0 && self.bad.load(Ordering::Relaxed) == 0,
            "{} is in use already",
            self.ty
        );
        // A last cluster that is not whole is in use from the start.
        self.tables.set_discard(discard, SwapOffset(self.slots).cluster());
        self
    }

    /// Changes the limit of [`SwapDevice::with_limit`]. Below what is used, nothing is allocated
    /// until enough was freed.
    pub fn set_limit(&self, limit: u32) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// The device's number.
    pub fn ty(&self) -> SwapType {
        self.ty
    }

    /// Slots the device was made with.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Opens or closes the device for allocation. After closing, [`SwapDevice::used`] only falls.
    pub fn set_allocation_enabled(&self, enabled: bool) {
        self.enabled.store(enabled, Ordering::SeqCst);
    }

    /// Is the device open for allocation?
    pub fn allocation_enabled(&self) -> bool {
        self.enabled.load(Ordering::SeqCst)
    }

    /// Slots in use, with those just being allocated.
    pub fn used(&self) -> u32 {
        self.per_cpu.used()
    }

    /// Most slots that can be in use.
    pub fn capacity(&self) -> u32 {
        let usable = self.slots - self.bad.load(Ordering::Relaxed);
        usable.min(self.limit.load(Ordering::Relaxed))
    }

    /// Is more than half of the device used, and is there a hook to ask for cached slots?
    pub(crate) fn crowded(&self) -> bool {
        self.reclaim.is_some() && u64::from(self.used()) * 2 > u64::from(self.capacity())
    }

    /// Would [`SwapDevice::compact`] win at least `clusters` clusters? Counts the tables that the
    /// used slots do not need.
    pub fn worth_compacting(&self, clusters: u32) -> bool {
        let usage = self.usage();
        let tail = (self.slots().next_multiple_of(SLOTS_PER_CLUSTER as u32)) - self.slots();
        let needed = (usage.used + usage.bad + tail).div_ceil(SLOTS_PER_CLUSTER as u32);
        usage.tables >= needed + clusters
    }

    /// The device's numbers.
    pub fn usage(&self) -> Usage {
        let lists = self.lists.lock();
        let clusters_free = lists.len(ListId::Free) + (lists.fresh_end - lists.fresh);
        let clusters_discard = lists.len(ListId::Discard);
        drop(lists);
        Usage {
            slots: self.slots,
            capacity: self.capacity(),
            used: self.used(),
            bad: self.bad.load(Ordering::Relaxed),
            clusters_free,
            clusters_discard,
            tables: self.tables.in_use(),
        }
    }

    /// Bytes of memory the device holds: all of them, counted, not estimated.
    pub fn metadata_bytes(&self) -> usize {
        size_of::<Self>()
            + self.headers.bytes()
            + self.tables.bytes()
            + self.per_cpu.bytes()
            + self.overflow_bytes.load(Ordering::Relaxed)
    }

    /// Returns the content of slot `off`. Takes no lock; the answer was true at a moment during the
    /// call, and a caller that acts on it says in the exchange what it expects. A slot beyond the
    /// end is bad.
    #[inline]
    pub fn lookup(&self, off: SwapOffset) -> SlotContent {
        self.word(off).slot()
    }

    /// Prefetches the word of slot `off`, which will be looked up soon. Waits for nothing.
    #[inline]
    pub fn prefetch(&self, off: SwapOffset) {
        self.tables.prefetch(off);
    }

    /// Like [`SwapDevice::lookup`], with count (saturated at 255), zero flag and group.
    #[inline]
    pub fn info(&self, off: SwapOffset) -> SlotInfo {
        self.word(off).info()
    }

    #[inline]
    pub(crate) fn word(&self, off: SwapOffset) -> Entry {
        // Behind the last slot, but within its cluster, the words are bad.
        self.tables.word(off).unwrap_or(Entry::BAD)
    }

    /// Calls `f` for every used slot of a cluster (bad ones are not used). Takes no lock: what is
    /// allocated or freed meanwhile may be seen or not.
    pub fn for_each_used(&self, index: ClusterIndex, mut f: impl FnMut(SwapOffset, SlotInfo)) {
        let Some(table) = self.used_table(index) else { return };
        for i in 0..SLOTS_PER_CLUSTER {
            let word = table.get(i);
            if word.is_used() {
                f(index.slot(i), word.info());
            }
        }
    }

    /// The table of a cluster, unless no cluster near it was used yet: walks pass by those without
    /// touching their tables.
    fn used_table(&self, index: ClusterIndex) -> Option<&Table> {
        self.headers.get(index.0 as usize).and_then(|_| self.tables.get(index))
    }

    /// The first used slot at or after `from`. Clusters that were never used are skipped whole.
    pub fn next_used(&self, from: SwapOffset) -> Option<SwapOffset> {
        let mut off = from;
        while off.0 < self.slots {
            let index = off.cluster();
            let used = self.used_table(index).and_then(|table| {
                (off.in_cluster()..SLOTS_PER_CLUSTER).find(|&i| table.get(i).is_used())
            });
            match used {
                Some(i) => return Some(index.slot(i)),
                None => off = ClusterIndex(index.0 + 1).first(),
            }
        }
        None
    }

    /// Every used slot once, in order, as it is met: what swapoff walks after closing the device.
    /// It repeats the walk until [`SwapDevice::used`] is 0.
    pub fn drain(&self) -> impl Iterator<Item = (SwapOffset, SlotInfo)> + '_ {
        let mut at = Some(SwapOffset(0));
        core::iter::from_fn(move || {
            let off = self.next_used(at?)?;
            at = (off.0 + 1 < self.slots).then(|| off.plus(1));
            Some((off, self.info(off)))
        })
    }

    /// An emptied cluster to be discarded on the device; give it back with
    /// [`SwapDevice::discard_done`]. Until then none of its slots is allocated.
    pub fn next_discard(&self) -> Option<ClusterIndex> {
        self.lists.lock().pop(&self.headers, ListId::Discard).map(|(index, _state)| index)
    }

    /// Up to `max` clusters of [`SwapDevice::next_discard`], for one batched discard.
    pub fn take_emptied(&self, max: usize) -> Vec<ClusterIndex> {
        core::iter::from_fn(|| self.next_discard()).take(max).collect()
    }

    /// Emptied clusters that wait for their discard.
    pub fn discards_waiting(&self) -> u32 {
        self.lists.lock().len(ListId::Discard)
    }

    /// Discards up to `max` emptied clusters in the background: `discard` is called with first slot
    /// and number of slots of each stretch of neighbours, so that one call covers as much as it
    /// can; then they are free. Returns the number of clusters.
    pub fn discard_batch(&self, max: usize, mut discard: impl FnMut(SwapOffset, u32)) -> usize {
        let mut batch = self.take_emptied(max);
        batch.sort_unstable();
        for stretch in batch.chunk_by(|a, b| a.0 + 1 == b.0) {
            let end = ClusterIndex(stretch[0].0 + stretch.len() as u32).first().0.min(self.slots);
            discard(stretch[0].first(), end - stretch[0].first().0);
            stretch.iter().for_each(|&index| self.discard_done(index));
        }
        batch.len()
    }

    /// The cluster was discarded, or need not be: it is free.
    ///
    /// # Panics
    /// When the cluster did not come from [`SwapDevice::next_discard`]: it may hold data.
    pub fn discard_done(&self, index: ClusterIndex) {
        let cluster = self.cluster(index);
        let mut state = cluster.lock();
        assert!(
            state.list == ListId::None && state.used == 0,
            "{index} of {} is not being discarded (list {:?}, {} slots used)",
            self.ty,
            state.list,
            state.used
        );
        self.move_to(index, &mut state, ListId::Free);
    }

    /// The cluster of `order` most worth emptying, among the first few of the fragmented ones: the
    /// one with the fewest used slots. Moving its pages elsewhere (swap in, swap out) wins back a
    /// whole cluster and its table.
    pub fn fragmented_candidate(&self, order: Order) -> Option<ClusterIndex> {
        self.candidate([ListId::Frag(order.index() as u8), ListId::Nonfull(order.index() as u8)])
    }

    /// The full cluster looked at least recently: its slots that only the swap cache holds can be
    /// won back without any I/O.
    pub fn full_candidate(&self) -> Option<ClusterIndex> {
        self.turn(ListId::Full)
    }

    fn candidate(&self, from: [ListId; 2]) -> Option<ClusterIndex> {
        const CANDIDATE_CLUSTERS: usize = 8;
        let mut best: Option<(u16, ClusterIndex)> = None;
        for list in from {
            for _ in 0..CANDIDATE_CLUSTERS {
                let Some((index, mut state)) = self.lists.lock().pop(&self.headers, list) else {
                    break;
                };
                if best.is_none_or(|(used, _)| state.used < used) {
                    best = Some((state.used, index));
                }
                self.move_to(index, &mut state, list);
            }
        }
        best.map(|(_, index)| index)
    }

    /// Takes `n` slots out of the capacity; the error says why not. While a large allocation still
    /// searches, and before it fails, a small one may find its slots reserved: "full" is exact but
    /// for allocations under way.
    #[inline]
    pub(crate) fn reserve(&self, cpu: CpuIndex, n: u32) -> Result<(), crate::AllocError> {
        // Looked at before, too: a caller that tries on a closed device again and again must not
        // show as use of it.
        if !self.allocation_enabled() {
            return Err(crate::AllocError::Disabled);
        }
        if !self.per_cpu.take(cpu, n, self.capacity()) {
            return Err(crate::AllocError::Full);
        }
        if !self.allocation_enabled() {
            self.per_cpu.undo(n);
            return Err(crate::AllocError::Disabled);
        }
        Ok(())
    }

    pub(crate) fn cluster(&self, index: ClusterIndex) -> &Cluster {
        self.headers.get(index.0 as usize).expect("a cluster in use has a record")
    }

    /// The table of a locked cluster.
    pub(crate) fn table(&self, index: ClusterIndex) -> &Table {
        self.tables.get(index).expect("every cluster has a table")
    }

    /// The entry of a slot of a cluster.
    pub(crate) fn entry(&self, index: ClusterIndex, in_cluster: usize) -> SwapEntry {
        SwapEntry::new(self.ty, index.slot(in_cluster))
    }

    /// The first cluster of a list, which goes to its end.
    pub(crate) fn turn(&self, list: ListId) -> Option<ClusterIndex> {
        let (index, mut state) = self.lists.lock().pop(&self.headers, list)?;
        self.move_to(index, &mut state, list);
        Some(index)
    }

    /// Puts a locked cluster on `list`, from whichever it is on.
    pub(crate) fn move_to(&self, index: ClusterIndex, state: &mut ClusterState, list: ListId) {
        if state.list != list {
            let mut lists = self.lists.lock();
            lists.unlink(&self.headers, index, state);
            lists.push(&self.headers, index, state, list);
        }
    }

    /// An empty, locked cluster is about to be used for that order.
    pub(crate) fn open(&self, index: ClusterIndex, state: &mut ClusterState, order: u8) {
        debug_assert_eq!(state.used, 0);
        self.tables.open(index, &mut state.table);
        state.order = order;
    }

    /// Takes the table from a locked cluster in which no slot is used any more, and puts the
    /// cluster where empty ones go.
    pub(crate) fn close(&self, index: ClusterIndex, state: &mut ClusterState) {
        debug_assert_eq!(state.used, 0);
        debug_assert!((0..SLOTS_PER_CLUSTER).all(|i| self.table(index).get_locked(i).is_free()));
        self.tables.close(index, &mut state.table);
        state.reset(&self.overflow_bytes);
        self.move_to(index, state, if self.discard { ListId::Discard } else { ListId::Free });
    }

    /// Marks free slots as bad: they are never allocated. The cluster keeps a table from now on and
    /// serves order 0 first.
    ///
    /// # Errors
    /// Nothing is changed when a slot is not free, or the range leaves its cluster.
    ///
    /// # Panics
    /// When there is no memory for the cluster's record.
    pub fn mark_bad(&self, off: SwapOffset, n: u32) -> Result<(), crate::Mismatch> {
        self.check_range(off, n)?;
        self.make_up_to(off.cluster());
        let (index, start) = (off.cluster(), off.in_cluster());
        let mut state = self.cluster(index).lock();
        if state.used == 0 {
            self.open(index, &mut state, 0);
        }
        let table = self.table(index);
        let range = start..start + n as usize;
        if let Some(i) = range.clone().find(|&i| !table.get_locked(i).is_free()) {
            return Err(self.mismatch(
                index.slot(i),
                crate::Expected::Free,
                table.get_locked(i).info(),
            ));
        }
        range.for_each(|i| table.set(i, Entry::BAD));
        state.used += n as u16;
        self.bad.fetch_add(n, Ordering::Relaxed);
        let order = state.order;
        let full = usize::from(state.used) == SLOTS_PER_CLUSTER;
        self.move_to(index, &mut state, if full { ListId::Full } else { ListId::Nonfull(order) });
        Ok(())
    }

    /// Makes the records of all clusters up to `index`; those that were never used go to the free
    /// list.
    fn make_up_to(&self, index: ClusterIndex) {
        loop {
            let mut lists = self.lists.lock();
            if lists.fresh > index.0 {
                return;
            }
            let (made, mut state) =
                lists.pop_fresh(&self.headers).expect("no memory for the records of clusters");
            lists.push(&self.headers, made, &mut state, ListId::Free);
        }
    }

    /// The slots behind the end in the last cluster are bad. They count neither as slots nor as bad
    /// ones.
    fn close_last_cluster(&self, clusters: u32) {
        let tail = (clusters as usize * SLOTS_PER_CLUSTER) - self.slots as usize;
        if tail == 0 {
            return;
        }
        let index = ClusterIndex(clusters - 1);
        self.lists.lock().fresh_end = index.0;
        let cluster = self
            .headers
            .make(index.0 as usize)
            .expect("no memory for the record of the last cluster");
        let mut state = cluster.lock();
        self.open(index, &mut state, 0);
        let table = self.table(index);
        (SLOTS_PER_CLUSTER - tail..SLOTS_PER_CLUSTER).for_each(|i| table.set(i, Entry::BAD));
        state.used = tail as u16;
        self.move_to(index, &mut state, ListId::Nonfull(0));
    }
}

/// Clusters of a device of `slots` slots.
const fn clusters_of(slots: u32) -> usize {
    let slots = if slots < MAX_SLOTS { slots } else { MAX_SLOTS };
    (slots as usize).div_ceil(SLOTS_PER_CLUSTER)
}

const _: () = assert!(NO_CLUSTER as u64 > (MAX_SLOTS as u64) / SLOTS_PER_CLUSTER as u64);
