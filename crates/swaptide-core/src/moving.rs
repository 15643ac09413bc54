//! Moving slots: out of sparse clusters, so that these empty ([`CompactionRun`]), and off a
//! device that is to be taken away ([`SwapSpace::swapoff`]).
//!
//! The core knows a slot's word, its owner knows which page tables point to it: a [`Mover`] is
//! told what goes where and repoints the users. A unit moves as a whole: a folio in the swap cache
//! with all the slots it has, a swapped-out run of the cluster's own order (so that it can still
//! come in as one), or a single slot.
//!
//! Invariants:
//! 1. A unit moves under the locks of both clusters, and a look-up finds it at every moment: the
//!    new words are there before its users are switched, the old ones until they are.
//! 2. A word moves as it is: folio or shadow, zero flag, group, and its exact count.
//! 3. Compaction takes no slot out of the capacity and never empties into a cluster that is
//!    sparser.
//!
//! Locks: two cluster locks, by type and cluster number, ascending. (docs/linux-swap.md, "Devices
//! and priorities", for swapoff; which slots are moved where is swaptide's own.)

use crate::alloc::free_run;
use crate::cluster::ListId;
use crate::cluster::{ClusterState, SLOTS_PER_LINE};
use crate::device::SwapDevice;
use crate::entry::{Entry, SlotContent, SlotInfo};
use crate::error::{AllocError, Expect};
use crate::ids::{
    ClusterIndex, CpuId, FolioId, GroupId, ORDERS, Order, SLOTS_PER_CLUSTER, SwapEntry, SwapOffset,
    SwapType,
};
use crate::space::{SpaceError, SwapSpace, TypeMask};
use crate::sync::{SpinGuard, relax};

/// Clusters of each list that [`SwapDevice::compact`] considers at a time: where each has few
/// holes, those of all together must hold one more.
const SAMPLE_CLUSTERS: u32 = 96;

/// Walks of a device that move nothing before [`SwapSpace::swapoff`] gives up.
#[cfg(not(loom))]
const IDLE_PASSES: u32 = 64;
#[cfg(loom)]
const IDLE_PASSES: u32 = 4;

/// How long it waits after such a walk: long enough to give up the CPU once ([`crate::set_yield`])
/// to the holder of a page.
#[cfg(not(loom))]
const SPINS_BETWEEN_PASSES: u32 = 512;
#[cfg(loom)]
const SPINS_BETWEEN_PASSES: u32 = 1;

/// What the new slots hold while their data is being copied. No user has their entries yet, and no
/// folio may have this number.
const MOVING: FolioId = FolioId(u32::MAX);

/// Slots that move together.
#[derive(Clone, Copy, Debug)]
pub struct Move<'a> {
    /// The first slot, or the place where it would be: aligned to the number of slots, a power of
    /// two.
    pub from: SwapEntry,
    /// The first of the new slots.
    pub to: SwapEntry,
    /// What each of the slots holds, with its exact count. [`SlotContent::Free`]: this one is not
    /// part of the unit.
    pub slots: &'a [SlotInfo],
}

impl Move<'_> {
    /// Old and new entry of each slot that moves, and what it holds.
    pub fn each(&self) -> impl Iterator<Item = (SwapEntry, SwapEntry, SlotInfo)> + '_ {
        let used = (0u32..).zip(self.slots).filter(|(_, info)| info.slot != SlotContent::Free);
        used.map(|(i, info)| (self.from.plus(i), self.to.plus(i), *info))
    }
}

/// The owner of the slots' data and users.
pub trait Mover {
    /// Copies the data to another device ([`SwapSpace::swapoff`] only). May take its time: no lock
    /// is held, and the slots may change meanwhile, in which case the copy is dropped again (the
    /// new slots are freed). `false`: not now.
    fn copy(&mut self, _slots: &Move<'_>) -> bool {
        true
    }

    /// From now on the users of the old slots use the new ones, and what the owner keeps for each
    /// slot is under its new number. No [`crate::FreeNotify`] follows for the old slots. Called
    /// under the locks of both clusters: it must not wait and not call the device. `false`: some of
    /// the users cannot be changed now; nothing has happened.
    fn switch(&mut self, slots: &Move<'_>) -> bool;
}

/// The result of [`SwapDevice::compact`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    /// Slots whose contents have another number now.
    pub moved: u32,
    /// Clusters that are empty now, with their tables.
    pub emptied: u32,
}

/// Slots of one cluster that move together are all in `start..start + n`.
#[derive(Clone, Copy)]
struct Unit {
    start: usize,
    n: usize,
}

/// What a slot of the unit that starts at `start` is: the folio, or shadows.
fn belongs(first: Entry, entry: Entry) -> bool {
    match first.slot() {
        SlotContent::Folio(folio) => entry.holds(folio),
        _ => entry.is_shadow(),
    }
}

struct LockedCluster<'a> {
    device: &'a SwapDevice,
    index: ClusterIndex,
    state: SpinGuard<'a, ClusterState>,
}

impl<'a> LockedCluster<'a> {
    fn new(device: &'a SwapDevice, index: ClusterIndex) -> Self {
        LockedCluster { device, index, state: device.cluster(index).lock() }
    }

    /// Two clusters, locked in the order that all code keeps to. They are not the same.
    fn both(a: (&'a SwapDevice, ClusterIndex), b: (&'a SwapDevice, ClusterIndex)) -> (Self, Self) {
        if (a.0.ty(), a.1) < (b.0.ty(), b.1) {
            let first = LockedCluster::new(a.0, a.1);
            (first, LockedCluster::new(b.0, b.1))
        } else {
            let first = LockedCluster::new(b.0, b.1);
            (LockedCluster::new(a.0, a.1), first)
        }
    }

    fn get(&self, i: usize) -> Entry {
        self.device.table(self.index).get_locked(i)
    }

    fn info(&self, i: usize) -> SlotInfo {
        let entry = self.get(i);
        SlotInfo { count: self.state.count(i, entry), ..entry.info() }
    }

    /// The unit that slot `i`, in use, is part of.
    fn unit(&self, i: usize, whole: bool) -> Unit {
        let word = self.get(i);
        if word.is_shadow() {
            let n = 1usize << self.state.order;
            let start = i & !(n - 1);
            let run = whole && (start..start + n).all(|i| self.get(i).is_shadow());
            return if run { Unit { start, n } } else { Unit { start: i, n: 1 } };
        }
        // All that the folio still has: some of its slots may have been freed.
        let low = (0..i).find(|&at| belongs(word, self.get(at))).unwrap_or(i);
        let high = (i + 1..SLOTS_PER_CLUSTER).rfind(|&at| belongs(word, self.get(at))).unwrap_or(i);
        let n = (low ^ high).checked_ilog2().map_or(1, |bit| 2 << bit);
        Unit { start: low & !(n - 1), n }
    }

    /// What the slots of a unit hold that slot `i` is part of, the others shown as free.
    fn gather(&self, unit: Unit, i: usize, infos: &mut Vec<SlotInfo>) {
        let word = self.get(i);
        infos.clear();
        infos.extend((unit.start..unit.start + unit.n).map(|at| {
            match belongs(word, self.get(at)) {
                true => self.info(at),
                false => Entry::FREE.info(),
            }
        }));
    }

    /// Room for the counts that do not fit their words.
    fn room_for_counts(&mut self, infos: &[SlotInfo]) -> bool {
        let large = infos.iter().filter(|info| info.count >= crate::entry::COUNT_OVERFLOW).count();
        self.state.reserve_overflow(large, &self.device.overflow_bytes)
    }

    /// After `moved` slots have gone: the cluster goes where it belongs. `true`: it is empty.
    fn left(&mut self, moved: u32) -> bool {
        self.state.used -= moved as u16;
        if self.state.used == 0 {
            self.device.close(self.index, &mut self.state);
            return true;
        }
        self.state.holes = true;
        let order = self.state.order;
        self.device.move_to(self.index, &mut self.state, ListId::Nonfull(order));
        false
    }
}

/// Moves the words of a unit to `at` of another cluster, if the mover switches its users. Returns
/// how many slots moved; 0: it refused, and the other cluster's slots hold `otherwise` again, as
/// before.
///
/// The new words are there before the users are switched, and the old ones until after: a look-up
/// finds the page whichever entry it goes by.
fn carry(
    source: &mut LockedCluster<'_>,
    dest: &mut LockedCluster<'_>,
    slots: &Move<'_>,
    otherwise: Entry,
    mover: &mut dyn Mover,
) -> u32 {
    let (from, to) = (source.device.table(source.index), dest.device.table(dest.index));
    let (start, at) = (slots.from.offset().in_cluster(), slots.to.offset().in_cluster());
    let used = || slots.slots.iter().enumerate().filter(|(_, info)| info.slot != SlotContent::Free);
    for (k, info) in used() {
        to.set(at + k, dest.state.give_count(at + k, from.get_locked(start + k), info.count));
    }
    if !mover.switch(slots) {
        for (k, _) in used() {
            dest.state.drop_count(at + k, to.get_locked(at + k), &dest.device.overflow_bytes);
            to.set(at + k, otherwise);
        }
        return 0;
    }
    for (k, _) in used() {
        let i = start + k;
        source.state.drop_count(i, from.get_locked(i), &source.device.overflow_bytes);
        from.set(i, Entry::FREE);
        source.state.open |= 1 << (i / SLOTS_PER_LINE);
    }
    used().count() as u32
}

/// One call of [`SwapDevice::compact`].
pub(crate) struct CompactionRun<'a> {
    device: &'a SwapDevice,
    /// Slots that it may move, about.
    max: u32,
    mover: &'a mut dyn Mover,
    infos: Vec<SlotInfo>,
    done: Compacted,
}

impl<'a> CompactionRun<'a> {
    pub(crate) fn new(device: &'a SwapDevice, max: u32, mover: &'a mut dyn Mover) -> Self {
        let infos = Vec::with_capacity(SLOTS_PER_CLUSTER);
        CompactionRun { device, max, mover, infos, done: Compacted::default() }
    }

    pub(crate) fn run(mut self, tear: bool) -> Compacted {
        let mut stuck = Vec::new();
        while self.done.moved < self.max {
            let mut clusters = self.sample();
            clusters.sort_unstable();
            let Some(at) = clusters.iter().position(|(_, index)| !stuck.contains(index)) else {
                break;
            };
            let (used, source) = clusters.remove(at);
            clusters.retain(|(other, _)| *other >= used);
            let holes: usize =
                clusters.iter().map(|(used, _)| SLOTS_PER_CLUSTER - usize::from(*used)).sum();
            if holes < usize::from(used) {
                break;
            }
            let before = self.done;
            for whole in [true, false] {
                for &(_, dest) in clusters.iter().rev() {
                    let is_empty = self.empty_into(source, dest, whole);
                    if is_empty || self.done.moved >= self.max {
                        break;
                    }
                }
                if !tear || self.done.emptied > before.emptied || self.done.moved >= self.max {
                    break;
                }
            }
            if self.done.emptied == before.emptied {
                stuck.push(source);
            }
        }
        self.done
    }

    /// Used slots and number of some of the clusters that are in use and have a free slot.
    fn sample(&self) -> Vec<(u16, ClusterIndex)> {
        let mut found = Vec::new();
        let lists = self.device.lists.lock();
        for list in
            (0..ORDERS as u8).flat_map(|order| [ListId::Nonfull(order), ListId::Frag(order)])
        {
            lists.look(&self.device.headers, list, SAMPLE_CLUSTERS, |index, state| {
                found.push((state.used, index))
            });
        }
        found
    }

    /// Moves what it can from one cluster to another. `true`: the first is empty, or gone.
    fn empty_into(&mut self, source: ClusterIndex, dest: ClusterIndex, whole: bool) -> bool {
        let (device, before) = (self.device, self.done.moved);
        let (mut source, mut dest) = LockedCluster::both((device, source), (device, dest));
        // Others continued meanwhile.
        if source.state.used == 0 {
            return true;
        }
        if dest.state.used < source.state.used {
            return false;
        }
        // It will never be empty.
        if (0..SLOTS_PER_CLUSTER).any(|i| source.get(i) == Entry::BAD) {
            return false;
        }
        let mut moved = 0;
        // Nothing is freed in the other cluster meanwhile: what was searched for single slots need
        // not be searched again.
        let mut behind = 0;
        // Nor need runs of a length of which there is none.
        let mut too_long = usize::MAX;
        let mut i = 0;
        while i < SLOTS_PER_CLUSTER && before + moved < self.max && too_long > 1 {
            if !source.get(i).is_used() || source.get(i).holds(MOVING) {
                i += 1;
                continue;
            }
            let unit = source.unit(i, whole);
            // Between a folio's slots may lie others.
            let next = if source.get(i).is_shadow() { unit.start + unit.n } else { i + 1 };
            if unit.n >= too_long {
                i = next;
                continue;
            }
            let at = free_run(
                device.table(dest.index),
                &dest.state,
                unit.n,
                if unit.n == 1 { behind } else { 0 },
            );
            if at.is_none() {
                too_long = unit.n;
            }
            if let Some(at) = at {
                behind = if unit.n == 1 { at + 1 } else { behind };
                source.gather(unit, i, &mut self.infos);
                let (from, to) =
                    (device.entry(source.index, unit.start), device.entry(dest.index, at));
                if dest.room_for_counts(&self.infos) {
                    let n = carry(
                        &mut source,
                        &mut dest,
                        &Move { from, to, slots: &self.infos },
                        Entry::FREE,
                        &mut *self.mover,
                    );
                    dest.state.used += n as u16;
                    moved += n;
                }
            }
            i = next;
        }
        self.done.moved += moved;
        if usize::from(dest.state.used) == SLOTS_PER_CLUSTER {
            device.move_to(dest.index, &mut dest.state, ListId::Full);
        }
        let empty = moved > 0 && source.left(moved);
        self.done.emptied += u32::from(empty);
        empty
    }
}

impl SwapSpace {
    /// Closes a device and moves everything that is on it to other devices of `mask`, by their
    /// priority. The number of moved slots is returned; the device is then empty, closed, and can
    /// be taken with [`SwapSpace::take`]. Other threads continue meanwhile.
    ///
    /// # Errors
    /// [`SpaceError::NoRoom`]: the others have no room (checked first, and at every allocation);
    /// [`SpaceError::Refused`]: users or folios could not be changed in several attempts. The
    /// device is open again in both cases; what was moved stays where it is now.
    /// [`SpaceError::NoDevice`]: there is no such device.
    pub fn swapoff(
        &self,
        ty: SwapType,
        mask: TypeMask,
        mover: &mut dyn Mover,
    ) -> Result<u32, SpaceError> {
        let device = self.device(ty).ok_or(SpaceError::NoDevice(ty))?;
        let mask = mask.without(ty);
        device.set_allocation_enabled(false);
        let (mut moved, mut idle) = (0, 0);
        let outcome = loop {
            if device.used() == 0 {
                return Ok(moved);
            }
            let room: u64 = self
                .devices()
                .filter(|d| mask.contains(d.ty()) && d.allocation_enabled())
                .map(room_of)
                .sum();
            if room < device.used().into() {
                break SpaceError::NoRoom(ty, device.used());
            }
            let before = moved;
            match self.move_all(device, mask, mover, &mut moved) {
                Ok(()) if moved == before => idle += 1,
                Ok(()) => idle = 0,
                Err(_) => break SpaceError::NoRoom(ty, device.used()),
            }
            if idle > IDLE_PASSES {
                break SpaceError::Refused(ty, device.used());
            }
            // What is still used was just being allocated, or is being changed.
            let mut spins = 0;
            (0..if moved == before { SPINS_BETWEEN_PASSES } else { 1 })
                .for_each(|_| relax(&mut spins));
        };
        device.set_allocation_enabled(true);
        Err(outcome)
    }

    /// One walk over the device.
    fn move_all(
        &self,
        device: &SwapDevice,
        mask: TypeMask,
        mover: &mut dyn Mover,
        moved: &mut u32,
    ) -> Result<(), AllocError> {
        let mut infos = Vec::with_capacity(SLOTS_PER_CLUSTER);
        let mut at = SwapOffset(0);
        while let Some(off) = device.next_used(at) {
            let (next, n) = match self.move_unit(device, off, true, mask, mover, &mut infos) {
                // No run for a swapped-out one elsewhere: slot by slot.
                Err(AllocError::NoRun) => {
                    self.move_unit(device, off, false, mask, mover, &mut infos)?
                }
                other => other?,
            };
            *moved += n;
            at = next;
        }
        Ok(())
    }

    /// Moves the unit of one slot to another device. Returns the slot behind the unit, and how many
    /// slots moved.
    fn move_unit(
        &self,
        device: &SwapDevice,
        off: SwapOffset,
        whole: bool,
        mask: TypeMask,
        mover: &mut dyn Mover,
        infos: &mut Vec<SlotInfo>,
    ) -> Result<(SwapOffset, u32), AllocError> {
        let (index, i) = (off.cluster(), off.in_cluster());
        let unit = {
            let source = LockedCluster::new(device, index);
            if source.state.used == 0 || !source.get(i).is_used() || source.get(i).holds(MOVING) {
                return Ok((off.plus(1), 0));
            }
            let unit = source.unit(i, whole);
            source.gather(unit, i, infos);
            unit
        };
        let last =
            infos.iter().rposition(|info| info.slot != SlotContent::Free).unwrap_or(unit.n - 1);
        let next = index.slot(unit.start + last).plus(1);
        let order = Order::from_pages(unit.n as u32).expect("a unit's size is a power of two");
        let to = self.alloc_folio(mask, CpuId(0), order, MOVING, GroupId(0))?;
        let other = self.device(to.ty()).expect("it just gave slots");
        let slots = Move { from: device.entry(index, unit.start), to, slots: infos };
        let moved =
            if mover.copy(&slots) { transfer(device, i, unit, &slots, other, mover) } else { 0 };
        if moved == 0 {
            let freed = other.free(to.offset(), unit.n as u32, Expect::Folio(MOVING));
            assert!(freed.is_ok(), "slots held for a move changed: {freed:?}");
        }
        Ok((next, moved))
    }
}

/// The second half of a unit's move, when its data has been copied. 0: something changed, or its
/// owner refused.
fn transfer(
    device: &SwapDevice,
    i: usize,
    unit: Unit,
    slots: &Move<'_>,
    other: &SwapDevice,
    mover: &mut dyn Mover,
) -> u32 {
    let (index, to) = (slots.from.offset().cluster(), slots.to.offset());
    let (mut source, mut dest) = LockedCluster::both((device, index), (other, to.cluster()));
    let range = unit.start..unit.start + unit.n;
    let same =
        |(i, info): (usize, &SlotInfo)| info.slot == SlotContent::Free || source.info(i) == *info;
    // All that was copied is as it was, and a folio has no slot more.
    let unchanged = source.state.used > 0
        && range.clone().zip(slots.slots).all(same)
        && (source.get(i).is_shadow()
            || range.zip(slots.slots).all(|(at, info)| {
                belongs(source.get(i), source.get(at)) == (info.slot != SlotContent::Free)
            }));
    if !unchanged || !dest.room_for_counts(slots.slots) {
        return 0;
    }
    let at = to.in_cluster();
    let table = other.table(dest.index);
    let held = (at..at + unit.n).all(|j| table.get_locked(j).holds(MOVING));
    assert!(held, "{} and the {} slots from it on, held for a move, changed", slots.to, unit.n);
    let moved = carry(&mut source, &mut dest, slots, table.get_locked(at), mover);
    if moved == 0 {
        return 0;
    }
    let spare = unit.n as u32 - moved;
    if spare > 0 {
        for (j, _) in (at..).zip(slots.slots).filter(|(_, info)| info.slot == SlotContent::Free) {
            table.set(j, Entry::FREE);
            dest.state.open |= 1 << (j / SLOTS_PER_LINE);
        }
        // Something moved, so the cluster does not empty.
        dest.left(spare);
    }
    source.left(moved);
    let cpus = (
        device.per_cpu.of_short(source.state.last_cpu),
        other.per_cpu.of_short(dest.state.last_cpu),
    );
    drop((source, dest));
    other.per_cpu.give(cpus.1, spare);
    device.per_cpu.give(cpus.0, moved);
    moved
}

fn room_of(device: &SwapDevice) -> u64 {
    device.capacity().saturating_sub(device.used()).into()
}
