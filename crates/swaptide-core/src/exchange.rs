//! The operations on slots: every way one changes its state. (docs/linux-swap.md, "Exchanges of the
//! swap cache") Allocation, reclaim of cached slots and compaction are done by their own modules;
//! the rest is exchanges.
//!
//! ```text
//! free --alloc_folio--> folio, count 1 --folio_to_shadow--> shadow, count >= 1
//! shadow, count >= 1 --shadow_to_folio--> folio, count >= 1
//! folio, count 1 --put--> folio, count 0 (cache only) --folio_release, folio_to_shadow--> free
//! shadow, count 1 --put--> free          folio or shadow, count <= 1 --free--> free
//! count n --dup--> count n + 1           folio --replace_folio--> folio          bad: for ever
//! ```
//!
//! Invariants:
//! 1. An exchange covers 1 to 512 slots of one cluster and is atomic: every slot is checked under
//!    the cluster lock before the first one is changed, and the check runs in every build.
//! 2. No exchange allocates memory, except [`SwapDevice::dup`] past a count of 254.
//! 3. Slots that become free are reported to the device's hook before the cluster lock is given up.

use crate::alloc;
use crate::cluster::ListId;
use crate::cluster::{ClusterState, SLOTS_PER_LINE};
use crate::device::SwapDevice;
use crate::entry::{Entry, SlotInfo};
use crate::error::{AllocError, Expect, Expected, Mismatch};
use crate::ids::{
    ClusterIndex, CpuId, FolioId, GroupId, MAX_SLOTS, Order, SLOTS_PER_CLUSTER, Shadow, SwapEntry,
    SwapOffset,
};
use crate::moving::{Compacted, CompactionRun, Mover};
use crate::reclaim;
use crate::sync::SpinGuard;
use crate::table::Table;
use core::ops::Range;

/// The pages of a range that are all zeros.
#[derive(Clone, Copy, Debug)]
pub enum ZeroMask<'a> {
    /// As their slots say already: a clean folio leaves the cache.
    Keep,
    /// No page of the range is all zeros.
    None,
    /// All pages of the range are all zeros.
    All,
    /// Bit `i % 64` of word `i / 64` for page `i`; pages behind the end are not.
    Bits(&'a [u64]),
}

impl ZeroMask<'_> {
    fn apply(self, i: usize, entry: Entry) -> Entry {
        match self {
            ZeroMask::Keep => entry,
            ZeroMask::None => entry.with_zero(false),
            ZeroMask::All => entry.with_zero(true),
            ZeroMask::Bits(words) => {
                entry.with_zero(words.get(i / 64).is_some_and(|word| word >> (i % 64) & 1 == 1))
            }
        }
    }
}

/// A range of slots under its cluster's lock.
struct SlotRun<'a> {
    device: &'a SwapDevice,
    index: ClusterIndex,
    state: SpinGuard<'a, ClusterState>,
    table: &'a Table,
    slots: Range<usize>,
}

impl SwapDevice {
    /// Allocates `2^order` aligned slots for `folio`: each is in the swap cache and has a count of
    /// 1, the page table that is about to point to it. `cpu` chooses the per-CPU state.
    ///
    /// # Errors
    /// [`AllocError`]; nothing was changed. Order 0 gets [`AllocError::NoRun`] only while the last
    /// free slots are in clusters that are being discarded.
    #[inline]
    pub fn alloc_folio(
        &self,
        cpu: CpuId,
        order: Order,
        folio: FolioId,
        group: GroupId,
    ) -> Result<SwapOffset, AllocError> {
        alloc::alloc_folio(self, cpu, order, folio, group)
    }

    /// Asks for the slots that only the swap cache holds in up to `clusters` clusters, full ones
    /// first, those looked at least recently first. Returns how many slots became free.
    pub fn reclaim_cached(&self, clusters: u32) -> u32 {
        reclaim::cached(self, clusters)
    }

    /// Moves up to about `max` slots out of the sparsest clusters into the holes of fuller ones. A
    /// cluster that empties gives up its table. Where slots are names (a store maps them to places,
    /// as all of swaptide's do) nothing is copied: a move costs its owner one changed page-table
    /// word. `tear` also moves swapped-out runs slot by slot when no run is free for them.
    ///
    /// Made for the background: it holds two cluster locks for one pair of clusters at a time, and
    /// looks at 96 clusters of each list.
    pub fn compact(&self, max: u32, tear: bool, mover: &mut dyn Mover) -> Compacted {
        CompactionRun::new(self, max, mover).run(tear)
    }

    /// A folio leaves the swap cache: its slots get `shadow` and their zero flags. Slots with count
    /// 0 become free. The number of freed slots is returned.
    ///
    /// # Errors
    /// Nothing is changed unless every slot holds `folio`.
    pub fn folio_to_shadow(
        &self,
        off: SwapOffset,
        n: u32,
        folio: FolioId,
        shadow: Shadow,
        zero: ZeroMask<'_>,
    ) -> Result<u32, Mismatch> {
        let run = self.run(off, n, Expected::Folio(folio))?;
        run.check(Expected::Folio(folio), |_, _, entry| entry.holds(folio))?;
        Ok(run.exchange(|_, at, i, entry| match entry.count() {
            0 => Entry::FREE,
            _ => zero.apply(i - at, entry.with_shadow(shadow)),
        }))
    }

    /// A folio enters the swap cache for swapped-out slots (swap-in): all at once, without
    /// allocating. The shadows that were there are written to `shadows`.
    ///
    /// # Errors
    /// Nothing is changed unless every slot holds a shadow. A folio that was there first shows as
    /// [`Mismatch::exists`], a slot that was freed as [`Mismatch::gone`].
    pub fn shadow_to_folio(
        &self,
        off: SwapOffset,
        n: u32,
        folio: FolioId,
        mut shadows: Option<&mut [Shadow]>,
    ) -> Result<(), Mismatch> {
        let run = self.run(off, n, Expected::Shadow)?;
        run.check(Expected::Shadow, |_, _, entry| entry.is_shadow())?;
        run.exchange(|_, at, i, entry| {
            if let Some(shadow) = shadows.as_deref_mut().and_then(|s| s.get_mut(i - at)) {
                *shadow = entry.shadow();
            }
            entry.with_folio(folio)
        });
        Ok(())
    }

    /// Folio `to` takes the place of `from` (migration, or the parts of a split).
    ///
    /// # Errors
    /// Nothing is changed unless every slot holds `from`.
    pub fn replace_folio(
        &self,
        off: SwapOffset,
        n: u32,
        from: FolioId,
        to: FolioId,
    ) -> Result<(), Mismatch> {
        let run = self.run(off, n, Expected::Folio(from))?;
        run.check(Expected::Folio(from), |_, _, entry| entry.holds(from))?;
        run.exchange(|_, _, _, entry| entry.with_folio(to));
        Ok(())
    }

    /// One more page table points to each of the slots (fork). A count of 0 is raised too: the
    /// caller holds the folio.
    ///
    /// # Errors
    /// Nothing is changed unless every slot is used, and every count can grow.
    pub fn dup(&self, off: SwapOffset, n: u32) -> Result<(), Mismatch> {
        let mut run = self.run(off, n, Expected::Used)?;
        run.check(Expected::Used, |_, _, entry| entry.is_used())?;
        for i in run.slots.clone() {
            let entry = run.table.get_locked(i);
            if !run.state.reserve_count(i, entry, n as usize, &self.overflow_bytes) {
                return Err(self.mismatch(run.index.slot(i), Expected::CountRoom, entry.info()));
            }
        }
        run.exchange(|state, _, i, entry| state.count_up(i, entry));
        Ok(())
    }

    /// One page table less points to each of the slots. Swapped-out slots with count 0 become free,
    /// cached ones stay until their folio leaves. The number of freed slots is returned.
    ///
    /// # Errors
    /// Nothing is changed unless every slot is used and has a count of at least 1.
    pub fn put(&self, off: SwapOffset, n: u32) -> Result<u32, Mismatch> {
        let run = self.run(off, n, Expected::Mapped)?;
        run.check(Expected::Mapped, |_, _, entry| entry.is_used() && entry.count() > 0)?;
        Ok(run.exchange(|state, _, i, entry| {
            let entry = state.count_down(i, entry, &self.overflow_bytes);
            if entry.is_shadow() && entry.count() == 0 { Entry::FREE } else { entry }
        }))
    }

    /// Frees slots whose last user goes away, whatever they hold as long as it is as `expect` says.
    /// The number of freed slots is returned: `n`.
    ///
    /// # Errors
    /// Nothing is changed unless every slot matches and has no other user (count 1, or 0 in the
    /// cache).
    pub fn free(&self, off: SwapOffset, n: u32, expect: Expect) -> Result<u32, Mismatch> {
        let expected = match expect {
            Expect::Folio(folio) => Expected::Folio(folio),
            Expect::Shadow => Expected::Shadow,
            Expect::Any => Expected::Used,
        };
        let run = self.run(off, n, expected)?;
        run.check(expected, |_, _, entry| match expect {
            Expect::Folio(folio) => entry.holds(folio),
            Expect::Shadow => entry.is_shadow(),
            Expect::Any => entry.is_used(),
        })?;
        run.check(Expected::LastUser, |_, _, entry| entry.count() <= 1)?;
        Ok(run.exchange(|_, _, _, _| Entry::FREE))
    }

    /// A folio that is no longer needed on the device gives its slots back. The number of freed
    /// slots is returned: `n`.
    ///
    /// # Errors
    /// Nothing is changed unless every slot holds `folio` with a count of 0.
    pub fn folio_release(&self, off: SwapOffset, n: u32, folio: FolioId) -> Result<u32, Mismatch> {
        let run = self.run(off, n, Expected::CacheOnly(folio))?;
        run.check(Expected::CacheOnly(folio), |_, _, entry| {
            entry.holds(folio) && entry.is_cache_only()
        })?;
        Ok(run.exchange(|_, _, _, _| Entry::FREE))
    }

    /// Sets or clears the zero flags of slots in use.
    ///
    /// # Errors
    /// Nothing is changed unless every slot is used.
    pub fn set_zero(&self, off: SwapOffset, n: u32, zero: ZeroMask<'_>) -> Result<(), Mismatch> {
        let run = self.run(off, n, Expected::Used)?;
        run.check(Expected::Used, |_, _, entry| entry.is_used())?;
        run.exchange(|_, at, i, entry| zero.apply(i - at, entry));
        Ok(())
    }

    /// The exact count of a slot; 0 when it is free.
    pub fn count(&self, off: SwapOffset) -> u32 {
        let Ok(run) = self.run(off, 1, Expected::Used) else { return 0 };
        let i = run.slots.start;
        run.state.count(i, run.table.get_locked(i))
    }

    /// Could one folio of `n` pages be swapped in here? Every slot a shadow, all with one zero flag
    /// and one group: these two are returned. Takes no lock; [`SwapDevice::shadow_to_folio`]
    /// decides.
    pub fn swap_in_range(&self, off: SwapOffset, n: u32) -> Option<(bool, GroupId)> {
        self.check_range(off, n).ok()?;
        let first = self.word(off);
        let alike = |entry: Entry| {
            entry.is_shadow() && entry.zero() == first.zero() && entry.group() == first.group()
        };
        (0..n).all(|i| alike(self.word(off.plus(i)))).then(|| (first.zero(), first.group()))
    }

    #[inline]
    pub(crate) fn check_range(&self, off: SwapOffset, n: u32) -> Result<(), Mismatch> {
        let fits = n > 0
            && off.in_cluster() + n as usize <= SLOTS_PER_CLUSTER
            && off.0.saturating_add(n) <= self.slots();
        if fits { Ok(()) } else { Err(self.mismatch(off, Expected::Range, self.info(off))) }
    }

    #[cold]
    pub(crate) fn mismatch(
        &self,
        off: SwapOffset,
        expected: Expected,
        found: SlotInfo,
    ) -> Mismatch {
        let entry = SwapEntry::new(self.ty, SwapOffset(off.0.min(MAX_SLOTS - 1)));
        Mismatch { entry, cluster: off.cluster(), expected, found }
    }

    // Inlined with `check` and `exchange`: a `SlotRun` handed over in memory costs a single slot
    // more than its exchange.
    #[inline(always)]
    fn run(&self, off: SwapOffset, n: u32, expected: Expected) -> Result<SlotRun<'_>, Mismatch> {
        self.check_range(off, n)?;
        let free = || self.mismatch(off, expected, Entry::FREE.info());
        let cluster = self.headers.get(off.cluster().0 as usize).ok_or_else(free)?;
        let state = cluster.lock();
        let table = self.tables.get(off.cluster()).ok_or_else(free)?;
        let start = off.in_cluster();
        Ok(SlotRun {
            device: self,
            index: off.cluster(),
            state,
            table,
            slots: start..start + n as usize,
        })
    }
}

impl SlotRun<'_> {
    /// The first slot for which `right` does not hold, as an error.
    #[inline(always)]
    fn check(
        &self,
        expected: Expected,
        right: impl Fn(&ClusterState, usize, Entry) -> bool,
    ) -> Result<(), Mismatch> {
        for i in self.slots.clone() {
            let entry = self.table.get_locked(i);
            if !right(&self.state, i, entry) {
                let found = SlotInfo { count: self.state.count(i, entry), ..entry.info() };
                return Err(self.device.mismatch(self.index.slot(i), expected, found));
            }
        }
        Ok(())
    }

    /// Replaces every word by what `new` makes of it (given the state, the first slot, the slot,
    /// the word), then puts the cluster where it belongs. Returns how many slots became free.
    #[inline(always)]
    fn exchange(
        mut self,
        mut new: impl FnMut(&mut ClusterState, usize, usize, Entry) -> Entry,
    ) -> u32 {
        let start = self.slots.start;
        let mut freed = 0;
        let mut first_free = None;
        for i in self.slots.clone() {
            let entry = new(&mut self.state, start, i, self.table.get_locked(i));
            self.table.set(i, entry);
            if entry.is_free() {
                freed += 1;
                self.state.open |= 1 << (i / SLOTS_PER_LINE);
                first_free.get_or_insert(i);
            } else if let Some(first) = first_free.take() {
                self.notify(first..i);
            }
        }
        if let Some(first) = first_free {
            self.notify(first..self.slots.end);
        }
        if freed == 0 {
            return 0;
        }
        self.state.used -= freed as u16;
        if self.state.used == 0 {
            self.device.close(self.index, &mut self.state);
        } else {
            self.state.holes = true;
            let order = self.state.order;
            self.device.move_to(self.index, &mut self.state, ListId::Nonfull(order));
        }
        let (device, cpu) = (self.device, self.device.per_cpu.of_short(self.state.last_cpu));
        drop(self);
        // Last: a reservation finds the slots it was given.
        device.per_cpu.give(cpu, freed);
        freed
    }

    fn notify(&self, slots: Range<usize>) {
        if let Some(notify) = &self.device.notify {
            notify(self.index.slot(slots.start), slots.len() as u32);
        }
    }
}
