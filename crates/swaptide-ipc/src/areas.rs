//! The table of swap areas: the devices beyond compressed memory, and which of their extents are
//! whose.
//!
//! An *area* is a swap file, a block device or a network export. The extents of all areas have one
//! numbering, in which those of an area follow each other; between two areas at least one number is
//! unused, so that what lies on two devices never looks like one piece.
//!
//! An area may have a *mirror*: a device of its own number, from which nothing is leased. What is
//! written to an extent of the area is written to the same place of the mirror as well.
//!
//! Invariants
//! 1. Only the supervisor adds, closes and removes areas; all processes lease.
//! 2. An area is removed only when it is closed and none of its extents is held. A lease looks
//!    once more whether the area is open, and of the generation that it was, after it has counted
//!    itself in; so a closed area without a held extent stays without one.
//! 3. An area's number may be used again, with a higher generation: a process that remembers
//!    anything of an area remembers the generation with it.
//! 4. A mirror comes before its area and goes with it.
//! 5. The order of areas is one word: a lease sees one whole order, at worst an older one.
//! 6. An extent is in doubt from before its holder sends a server a change of it until that is
//!    answered. In doubt it is not leased, also when its holder gives it back or is killed: the
//!    mark and the number of holders are one word, and a lease begins at a word of zero.

use std::sync::atomic::{
    AtomicU16, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst, fence,
};

use crate::area::{Area, AreaId, AreaMask, AreaState, ExtentPlace, MAX_AREAS, NewArea, Spot};
use crate::ids::{EXTENT_BYTES, ExtentId, MAX_EXTENTS, SlotIndex};
use crate::layout::{ProcSlot, Segment};

/// In the word of an extent's holders: a server may still carry out something there that was sent
/// to it and never answered. The holders are counted below.
const IN_DOUBT: u16 = 1 << 15;
const HOLDERS: u16 = IN_DOUBT - 1;

/// The order of areas in one word: four bits an area, the first one lowest, and how many there are.
#[derive(Clone, Copy)]
struct Sequence {
    numbers: u64,
    len: u32,
}

impl Sequence {
    fn at(self, place: u32) -> AreaId {
        AreaId((self.numbers >> (4 * place) & 15) as u8)
    }
}

/// An extent that no process held, taken and counted into its area. Given back on drop.
struct TakenExtent<'a> {
    extent: ExtentId,
    refs: &'a AtomicU16,
    area: &'a Area,
}

impl TakenExtent<'_> {
    /// The process at `index` holds it from now on.
    fn keep(self, segment: &Segment, index: SlotIndex) {
        segment.set_held(index, self.extent);
        std::mem::forget(self);
    }
}

impl Drop for TakenExtent<'_> {
    fn drop(&mut self) {
        // Uncounted where it was counted, whichever area has the number now.
        self.area.used.fetch_sub(1, SeqCst);
        self.refs.fetch_sub(1, SeqCst);
    }
}

fn is_open(state: AreaState) -> bool {
    state == AreaState::Open
}

impl Segment {
    /// What stands of an area.
    ///
    /// # Panics
    /// When the number is not below [`MAX_AREAS`].
    pub fn area(&self, id: AreaId) -> &Area {
        &self.header.areas.slots[usize::from(id.0)]
    }

    /// The areas that there are.
    pub fn areas(&self) -> impl Iterator<Item = (AreaId, &Area)> {
        (0..MAX_AREAS as u8)
            .map(AreaId)
            .zip(&self.header.areas.slots)
            .filter(|(_, area)| area.state() != AreaState::None)
    }

    /// Counts changes of the table.
    pub fn areas_epoch(&self) -> u32 {
        self.header.areas.epoch.load(Acquire)
    }

    /// True if any area is open.
    pub fn has_area(&self) -> bool {
        self.header.areas.count.load(Acquire) != 0
    }

    /// Extents of all open areas.
    pub fn extents(&self) -> u32 {
        self.areas()
            .filter(|(_, area)| area.state() == AreaState::Open)
            .map(|(_, area)| area.extents())
            .sum()
    }

    /// Extents leased, of all areas.
    pub fn extents_used(&self) -> u32 {
        self.areas().map(|(_, area)| area.used()).sum()
    }

    /// Returns the place of an extent; `None` if it is no area's.
    pub fn place_of(&self, extent: ExtentId) -> Option<ExtentPlace> {
        let (id, area) = self.area_of(extent)?;
        // Between the search and here a damaged table may say something else again.
        let within =
            u64::from(extent.0.saturating_sub(area.span.first.load(Relaxed))) * EXTENT_BYTES;
        let spot =
            |area: &Area| (area.generation(), area.base_bytes.load(Relaxed).saturating_add(within));
        let (generation, offset) = spot(area);
        let mirror = area.mirror().map(|id| {
            let (generation, offset) = spot(self.area(id));
            Spot { area: id, generation, offset }
        });
        Some(ExtentPlace { area: id, generation, offset, mirror })
    }

    fn area_of(&self, extent: ExtentId) -> Option<(AreaId, &Area)> {
        self.areas().find(|(_, area)| area.range().contains(&extent.0))
    }

    /// True if what lies in an extent is not encrypted.
    pub fn is_plain(&self, extent: ExtentId) -> bool {
        self.area_of(extent).is_some_and(|(_, area)| area.is_unencrypted())
    }

    /// True if an extent lies on a rotational device.
    pub fn is_rotational(&self, extent: ExtentId) -> bool {
        self.area_of(extent).is_some_and(|(_, area)| area.is_rotational())
    }

    /// Adds an area and opens it. `None` when all numbers are taken, of areas or of extents.
    /// Supervisor only.
    pub fn add_area(&self, new: NewArea) -> Option<AreaId> {
        let id = self.header.areas.slots.iter().position(|area| area.state() == AreaState::None)?;
        let mut taken: Vec<_> =
            self.areas().map(|(_, area)| area.range()).filter(|range| !range.is_empty()).collect();
        taken.sort_by_key(|range| range.start);
        let mut first = 0;
        for range in taken {
            if range.start > first + new.extents.min(MAX_EXTENTS as u32) {
                break;
            }
            // Ranges of a damaged table may lie over each other.
            first = first.max(range.end + 1);
        }
        if new.extents == 0 || first as usize + new.extents as usize > MAX_EXTENTS {
            return None;
        }
        Some(self.fill_in(id, first, new, AreaState::Open))
    }

    /// Adds a mirror, a file or a block device. `None` when all numbers of areas are taken.
    /// Supervisor only.
    pub fn add_mirror(&self, priority: i32, base_bytes: u64) -> Option<AreaId> {
        let id = self.header.areas.slots.iter().position(|area| area.state() == AreaState::None)?;
        let new = NewArea { base_bytes, ..NewArea::of_file(priority, 0) };
        Some(self.fill_in(id, 0, new, AreaState::Mirror))
    }

    /// Removes a mirror whose area was not added. Supervisor only.
    pub fn drop_mirror(&self, id: AreaId) {
        self.area(id).state.store(AreaState::None as u32, SeqCst);
        self.sort_areas();
    }

    fn fill_in(&self, id: usize, first: u32, new: NewArea, state: AreaState) -> AreaId {
        let area = &self.header.areas.slots[id];
        area.generation.fetch_add(1, SeqCst);
        // A reader of anything that follows sees the new generation.
        fence(Release);
        area.transport.store(new.transport as u32, Relaxed);
        area.priority.store(new.priority, Relaxed);
        area.span.first.store(first, Relaxed);
        area.span.count.store(new.extents, Relaxed);
        area.base_bytes.store(new.base_bytes, Relaxed);
        area.mirror.store(new.mirror.map_or(0, |mirror| u32::from(mirror.0) + 1), Relaxed);
        area.plain.store(u32::from(new.plain), Relaxed);
        area.rotational.store(u32::from(new.rotational), Relaxed);
        area.export_bytes.store(new.export.bytes, Relaxed);
        area.export
            .flags
            .store(u32::from(new.export.flags) | u32::from(new.export.structured) << 16, Relaxed);
        area.export.longest.store(new.export.longest, Relaxed);
        area.export.connections.store(new.export.connections, Relaxed);
        // Not `used`: nothing is held, and a late `lease_in` counts itself in and out
        // again.
        for word in [&area.hint, &area.errors, &area.in_doubt] {
            word.store(0, Relaxed);
        }
        // What was sent to another device does not arrive on this one.
        for refs in &self.extent_refs[area.range().start as usize..area.range().end as usize] {
            refs.fetch_and(HOLDERS, SeqCst);
        }
        area.state.store(state as u32, SeqCst);
        self.sort_areas();
        AreaId(id as u8)
    }

    /// Closes an area. Supervisor only.
    pub fn close_area(&self, id: AreaId) {
        self.area(id).state.store(AreaState::Closed as u32, SeqCst);
        self.sort_areas();
    }

    /// Leases nothing of an area for a while. Supervisor only.
    pub fn pause_area(&self, id: AreaId) {
        self.area(id).state.store(AreaState::Paused as u32, SeqCst);
        self.sort_areas();
    }

    /// Opens an area again that was closed or paused. Supervisor only.
    pub fn reopen_area(&self, id: AreaId) {
        self.area(id).state.store(AreaState::Open as u32, SeqCst);
        self.sort_areas();
    }

    /// Removes an area and its mirror; false when it is open, or some of it is still held.
    /// Supervisor only.
    pub fn remove_area(&self, id: AreaId) -> bool {
        let area = self.area(id);
        let may = area.state() == AreaState::Closed && area.used() == 0;
        if may {
            area.state.store(AreaState::None as u32, SeqCst);
            if let Some(mirror) = area.mirror() {
                self.area(mirror).state.store(AreaState::None as u32, SeqCst);
            }
            self.sort_areas();
        }
        may
    }

    /// Processes that hold extents of an area.
    pub fn holders(&self, id: AreaId) -> Vec<u32> {
        let range = self.area(id).range();
        let holds = |slot: &ProcSlot| {
            range.clone().any(|extent| {
                slot.held[extent as usize / 64].load(Relaxed) >> (extent % 64) & 1 == 1
            })
        };
        self.claimed()
            .filter(|(_, slot)| holds(slot))
            .map(|(_, slot)| slot.pid.load(Relaxed))
            .collect()
    }

    /// Rewrites the order of open areas.
    fn sort_areas(&self) {
        let mut open: Vec<_> =
            self.areas().filter(|(_, area)| area.state() == AreaState::Open).collect();
        open.sort_by_key(|(_, area)| std::cmp::Reverse(area.priority()));
        let numbers = open.iter().rev().fold(0, |word, (id, _)| word << 4 | u64::from(id.0));
        self.header.areas.order.store(numbers, Relaxed);
        self.header.areas.count.store(open.len() as u32, Release);
        self.header.areas.epoch.fetch_add(1, Release);
    }

    fn sequence(&self) -> Sequence {
        let len = self.header.areas.count.load(Acquire).min(MAX_AREAS as u32);
        Sequence { numbers: self.header.areas.order.load(Relaxed), len }
    }

    /// Takes a free extent for the process at `index`: of the area with the highest priority that
    /// has one and that `mask` permits. Areas of one priority take turns. `None` when there is
    /// none.
    pub fn lease_extent(&self, index: SlotIndex, mask: AreaMask) -> Option<ExtentId> {
        let sequence = self.sequence();
        let mut from = 0;
        while from < sequence.len {
            let priority = self.area(sequence.at(from)).priority();
            let equals = (from..sequence.len)
                .take_while(|&at| self.area(sequence.at(at)).priority() == priority)
                .count() as u32;
            let turn = if equals > 1 { self.header.areas.turn.fetch_add(1, Relaxed) } else { 0 };
            for step in 0..equals {
                let id = sequence.at(from + turn.wrapping_add(step) % equals);
                if mask.contains(id)
                    && let Some(extent) = self.lease_in(index, self.area(id))
                {
                    return Some(extent);
                }
            }
            from += equals;
        }
        None
    }

    fn lease_in(&self, index: SlotIndex, area: &Area) -> Option<ExtentId> {
        let generation = area.generation();
        let total = area.extents();
        if !area.has_room() {
            return None;
        }
        let first = area.span.first.load(Relaxed);
        let start = area.hint.load(Relaxed);
        for step in 0..total {
            let number = start.wrapping_add(step) % total;
            let extent = ExtentId(first.saturating_add(number));
            // The numbers may be those of another area by now: read while its place was being given
            // away.
            if self.extent_refs.get(extent.0 as usize)?.load(Relaxed) != 0 {
                continue;
            }
            if let Some(taken) = self.take_unheld(extent, area, generation, is_open) {
                area.hint.store(number + 1, Relaxed);
                taken.keep(self, index);
                return Some(extent);
            }
            if area.state() != AreaState::Open || area.changed_since(generation) {
                return None;
            }
        }
        None
    }

    /// Takes an extent that no process holds. The area is counted in before it is looked at, and
    /// stays if it is in a state that `allows` does, and still the one whose extent this is.
    fn take_unheld<'a>(
        &'a self,
        extent: ExtentId,
        area: &'a Area,
        generation: u32,
        allows: impl FnOnce(AreaState) -> bool,
    ) -> Option<TakenExtent<'a>> {
        let refs = &self.extent_refs[extent.0 as usize];
        refs.compare_exchange(0, 1, SeqCst, Relaxed).ok()?;
        area.used.fetch_add(1, SeqCst);
        let taken = TakenExtent { extent, refs, area };
        let stays = allows(area.state())
            && !area.changed_since(generation)
            && area.range().contains(&extent.0);
        stays.then_some(taken)
    }

    /// Holds an extent again that no process holds, so that what lies there can be freed. False
    /// where a process does, or its area is not open.
    pub(crate) fn retake_extent(&self, index: SlotIndex, extent: ExtentId) -> bool {
        let Some((_, area)) = self.area_of(extent) else { return false };
        let taken = self.take_unheld(extent, area, area.generation(), is_open);
        let is_taken = taken.is_some();
        taken.into_iter().for_each(|taken| taken.keep(self, index));
        is_taken
    }

    /// Makes the process at `index` a further holder of an extent that the caller holds.
    pub(crate) fn share_extent(&self, index: SlotIndex, extent: ExtentId) {
        self.extent_refs[extent.0 as usize].fetch_add(1, SeqCst);
        self.set_held(index, extent);
    }

    /// Gives back the hold of the process at `index`. True when no process holds the extent any
    /// more: its bytes belong to no process.
    pub fn release_extent(&self, index: SlotIndex, extent: ExtentId) -> bool {
        let word = &self.slot(index).held[extent.0 as usize / 64];
        let bit = 1u64 << (extent.0 % 64);
        if word.fetch_and(!bit, SeqCst) & bit == 0 {
            return false;
        }
        self.unref(extent)
    }

    /// Runs `f` while the extent is kept from all processes, if no process holds it; what frees its
    /// bytes on the device goes in there, for otherwise the extent could be leased and written in
    /// between. True when `f` ran.
    pub fn while_unheld(&self, extent: ExtentId, f: impl FnOnce()) -> bool {
        let Some((_, area)) = self.area_of(extent) else { return false };
        let is_there = |state| state != AreaState::None;
        let taken = self.take_unheld(extent, area, area.generation(), is_there);
        if taken.is_some() {
            f();
        }
        taken.is_some()
    }

    /// True when only one process holds the extent.
    pub fn sole_holder(&self, extent: ExtentId) -> bool {
        self.extent_refs[extent.0 as usize].load(Acquire) & HOLDERS == 1
    }

    /// Says that something is sent to a server now that changes an extent. Its holder does, before
    /// it sends. True when the extent was not in doubt before: then the answer settles it.
    pub fn doubt_extent(&self, extent: ExtentId) -> bool {
        self.extent_refs[extent.0 as usize].fetch_or(IN_DOUBT, SeqCst) & IN_DOUBT == 0
    }

    /// Says that all of it was answered.
    pub fn clear_doubt(&self, extent: ExtentId) {
        self.extent_refs[extent.0 as usize].fetch_and(HOLDERS, SeqCst);
    }

    /// True if something that was sent to an extent's server may not have been answered.
    pub fn is_in_doubt(&self, extent: ExtentId) -> bool {
        self.extent_refs[extent.0 as usize].load(Acquire) & IN_DOUBT != 0
    }

    /// The extents of an area that no process holds and none can lease, for they are in doubt.
    pub fn extents_in_doubt(&self, id: AreaId) -> impl Iterator<Item = ExtentId> {
        self.area(id)
            .range()
            .map(ExtentId)
            .filter(|extent| self.extent_refs[extent.0 as usize].load(Relaxed) == IN_DOUBT)
    }

    /// Lets an extent that is in doubt be leased again, if no process holds it. Supervisor only.
    pub fn clear_stale_doubt(&self, extent: ExtentId) {
        // Where it is not so any more there is nothing to clear.
        let _ = self.extent_refs[extent.0 as usize].compare_exchange(IN_DOUBT, 0, SeqCst, Relaxed);
    }

    /// Gives back all holds of the process at `index`; calls `freed` for each extent that no
    /// process holds any more.
    pub(crate) fn release_extents(&self, index: SlotIndex, mut freed: impl FnMut(ExtentId)) {
        for (word_index, word) in self.slot(index).held.iter().enumerate() {
            let mut bits = word.swap(0, SeqCst);
            while bits != 0 {
                let extent = ExtentId((word_index * 64) as u32 + bits.trailing_zeros());
                bits &= bits - 1;
                if self.unref(extent) {
                    freed(extent);
                }
            }
        }
    }

    fn set_held(&self, index: SlotIndex, extent: ExtentId) {
        self.slot(index).held[extent.0 as usize / 64].fetch_or(1 << (extent.0 % 64), SeqCst);
    }

    fn unref(&self, extent: ExtentId) -> bool {
        // Before the count is lowered: a closed area without a held extent may be gone at once.
        let area = self.area_of(extent);
        if self.extent_refs[extent.0 as usize].fetch_sub(1, SeqCst) & HOLDERS != 1 {
            return false;
        }
        if let Some((_, area)) = area {
            area.used.fetch_sub(1, SeqCst);
        }
        true
    }

    /// Corrects the references of an extent by as many as `missing` says; true when that leaves
    /// none. (See [`crate::groups`].)
    pub(crate) fn correct_refs(&self, extent: ExtentId, missing: i16) -> bool {
        let before = self.extent_refs[extent.0 as usize].fetch_add(missing as u16, SeqCst);
        before.wrapping_add(missing as u16) & HOLDERS == 0
    }

    /// Returns the number of processes counted as holders of an extent.
    pub(crate) fn counted_holders(&self, extent: ExtentId) -> u16 {
        self.extent_refs[extent.0 as usize].load(SeqCst) & HOLDERS
    }

    /// Returns by how many extents of each area the number held exceeds the number counted as used.
    pub(crate) fn missing_used(&self, held: &[u16]) -> Vec<(AreaId, i32)> {
        let missing = |area: &Area| {
            let held = held
                .get(area.range().start as usize..area.range().end as usize)
                .unwrap_or_default();
            let used = held.iter().filter(|holders| **holders > 0).count() as u32;
            // The word itself: what is added to it has to make it right.
            used.wrapping_sub(area.used.load(SeqCst)) as i32
        };
        self.areas()
            .map(|(id, area)| (id, missing(area)))
            .filter(|(_, missing)| *missing != 0)
            .collect()
    }

    /// Adds `missing` to the area's count of leased extents.
    pub(crate) fn correct_used(&self, id: AreaId, missing: i32) {
        self.area(id).used.fetch_add(missing as u32, SeqCst);
    }
}

#[cfg(test)]
mod tests;
