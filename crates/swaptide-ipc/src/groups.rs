//! The table of groups: what each may have of the swap areas, and what it has.
//!
//! A group is a number here; its name, its limits of memory and its members are the
//! supervisor's. Group 0 is the root and an ancestor of all.
//!
//! What is charged. An extent is charged to a group once, however many processes of the group hold
//! it, and in the same way to every ancestor of the group: `swap_used` is the number of different
//! extents that processes of the group and of those below it hold. Two groups whose processes share
//! an extent since a fork are both charged: each of them keeps its bytes from all others. A
//! common ancestor is charged once.
//!
//! Invariants
//! 1. `refs[g][x]` is the number of processes in `g` and below it that hold extent `x`, and
//!    `swap_used` of `g` is the number of extents where that is not 0, plus those that a lease
//!    under way has reserved.
//! 2. All changes are made between `Segment::change` and its end, so that a reader that finds no
//!    change under way, and none since, has found consistent numbers; a process that dies in a
//!    change leaves it under way, by which the supervisor knows that it has to count
//!    ([`Segment::audit`]).
//! 3. A process's extents are charged to the group in its slot's `group`, which only the process
//!    itself changes, while it holds any.
//! 4. Sharing never fails: a fork may take a group over its maximum. A lease never does.
//! 5. All zeros is a root without limits.
//!
//! Locks: none.

use std::sync::atomic::{AtomicU16, Ordering::Relaxed, Ordering::SeqCst};

use crate::area::{AreaId, AreaMask, AreaState};
use crate::group::{GroupIndex, GroupSlot, MAX_GROUPS};
use crate::ids::{ExtentId, MAX_EXTENTS, SlotIndex};
use crate::layout::{ProcSlot, Segment};

/// A change of the holders of extents, under way until this is dropped.
#[must_use]
struct SettingsChange<'a>(&'a ProcSlot);

impl Drop for SettingsChange<'_> {
    fn drop(&mut self) {
        self.0.changes.fetch_sub(1, SeqCst);
    }
}

/// In a slot's `changes`: how many are under way lies below, how many there were above.
const STARTED: u64 = 1 << 32 | 1;

impl ProcSlot {
    fn change(&self) -> SettingsChange<'_> {
        self.changes.fetch_add(STARTED, SeqCst);
        SettingsChange(self)
    }
}

impl Segment {
    /// What stands of a group.
    ///
    /// # Panics
    /// When the number is not below [`MAX_GROUPS`].
    pub fn group(&self, index: GroupIndex) -> &GroupSlot {
        &self.groups.slots[index.0 as usize]
    }

    /// Makes a group out of a number that nothing uses. Supervisor only.
    pub fn make_group(&self, index: GroupIndex, parent: GroupIndex) {
        let group = self.group(index);
        group.parent_plus.store(parent.0 + 1, Relaxed);
        group.areas_excluded.store(0, Relaxed);
        group.set_swap_max(None);
        group.max_events.store(0, Relaxed);
        group.fail_events.store(0, Relaxed);
    }

    /// A group and its ancestors, the root last.
    pub fn ancestry(&self, index: GroupIndex) -> impl Iterator<Item = GroupIndex> {
        // As many steps as there are groups: a damaged table ends as well.
        let parent =
            |of: &GroupIndex| match self.groups.slots.get(of.0 as usize)?.parent_plus.load(Relaxed)
            {
                0 => None,
                plus => Some(GroupIndex((plus - 1) % MAX_GROUPS as u32)),
            };
        std::iter::successors(Some(index), parent).take(MAX_GROUPS)
    }

    fn group_of(&self, index: SlotIndex) -> GroupIndex {
        GroupIndex(self.slot(index).group.load(SeqCst) % MAX_GROUPS as u32)
    }

    /// True while the process at `index` is charged to another group than it belongs to.
    pub fn is_moving(&self, index: SlotIndex) -> bool {
        let slot = self.slot(index);
        slot.group.load(Relaxed) != slot.control.group_wanted.load(Relaxed)
    }

    /// [`Segment::lease_extent`], within the group's areas and maximum, and charged to it.
    pub fn lease_charged(&self, index: SlotIndex) -> Option<ExtentId> {
        self.lease_charged_in(index, AreaMask::ALL)
    }

    /// The same, of the areas in `within` alone.
    pub fn lease_charged_in(&self, index: SlotIndex, within: AreaMask) -> Option<ExtentId> {
        let _change = self.slot(index).change();
        let own = self.group_of(index);
        let mut reserved = 0;
        for group in self.ancestry(own) {
            if !self.group(group).reserve() {
                self.group(group).max_events.fetch_add(1, Relaxed);
                break;
            }
            reserved += 1;
        }
        let mask = AreaMask(!self.group(own).areas_excluded() & within.0);
        let extent = if reserved == self.ancestry(own).count() {
            self.lease_extent(index, mask)
        } else {
            None
        };
        match extent {
            Some(extent) => self.ancestry(own).for_each(|group| {
                self.refs(group, extent).fetch_add(1, SeqCst);
            }),
            None => {
                self.group(own).fail_events.fetch_add(1, Relaxed);
                self.ancestry(own).take(reserved).for_each(|group| {
                    self.group(group).swap_used.fetch_sub(1, SeqCst);
                });
            }
        }
        extent
    }

    /// True if one of the areas in `within` that the group may use is open and has room.
    pub fn has_room_in(&self, index: SlotIndex, within: AreaMask) -> bool {
        let mask = AreaMask(!self.group(self.group_of(index)).areas_excluded() & within.0);
        self.areas().any(|(id, area)| {
            mask.contains(id) && area.state() == AreaState::Open && area.has_room()
        })
    }

    /// `Segment::share_extent` by the process at `from`, charged to the group of the one at `to`.
    pub fn share_charged(&self, from: SlotIndex, to: SlotIndex, extent: ExtentId) {
        let _change = self.slot(from).change();
        self.hold(self.group_of(to), extent);
        self.share_extent(to, extent);
    }

    /// [`Segment::release_extent`], and no longer charged. `by` is the process that does it: the
    /// holder itself, or the one that shared it.
    pub fn release_charged(&self, by: SlotIndex, index: SlotIndex, extent: ExtentId) -> bool {
        let _change = self.slot(by).change();
        if !self.holds(index, extent) {
            return false;
        }
        self.drop_hold(self.group_of(index), extent);
        self.release_extent(index, extent)
    }

    /// After a [`Segment::release_charged`] that was the last: holds the extent again, charged, so
    /// that its bytes can be freed before it is released once more. As a lease, it is taken back
    /// from a process that dies meanwhile. False where a process holds it by now.
    pub fn retake_charged(&self, index: SlotIndex, extent: ExtentId) -> bool {
        let _change = self.slot(index).change();
        let taken = self.retake_extent(index, extent);
        if taken {
            self.hold(self.group_of(index), extent);
        }
        taken
    }

    /// Charges everything that the process at `index` holds to the group that it belongs to now.
    /// Only the process itself does it, and leases and releases nothing meanwhile.
    pub fn regroup(&self, index: SlotIndex) {
        let slot = self.slot(index);
        let _change = slot.change();
        let (old, new) = (
            self.group_of(index),
            GroupIndex(slot.control.group_wanted.load(SeqCst) % MAX_GROUPS as u32),
        );
        self.each_held(index, |extent| self.hold(new, extent));
        slot.group.store(new.0, SeqCst);
        self.each_held(index, |extent| self.drop_hold(old, extent));
    }

    /// Gives back, uncharged, everything that was held by a process that is gone, or by the program
    /// that it was before it executed another; calls `freed` for each extent that no process holds
    /// any more.
    pub(crate) fn forget_holds(&self, index: SlotIndex, freed: impl FnMut(ExtentId)) {
        let slot = self.slot(index);
        // The number of changes stays, for the same one must not come twice.
        if slot.changes.fetch_and(!u64::from(u32::MAX), SeqCst) as u32 != 0 {
            self.groups.audit_due.store(1, SeqCst);
        }
        let _change = slot.change();
        let group = self.group_of(index);
        self.each_held(index, |extent| self.drop_hold(group, extent));
        self.release_extents(index, freed);
    }

    /// Says that something may have been left behind: by a supervisor that was killed, say.
    /// Supervisor only.
    pub fn demand_audit(&self) {
        self.groups.audit_due.store(1, SeqCst);
    }

    /// As [`Segment::while_unheld`], for another thread of the supervisor than the one that counts:
    /// meanwhile nothing is counted.
    pub fn while_trimmed(&self, extent: ExtentId, f: impl FnOnce()) -> bool {
        self.groups.trims.fetch_add(STARTED, SeqCst);
        let did = self.while_unheld(extent, f);
        self.groups.trims.fetch_sub(1, SeqCst);
        did
    }

    /// Clears the count of trims that a killed supervisor had begun; [`Segment::audit`] corrects
    /// their charges. Supervisor only.
    pub fn forget_trims(&self) {
        self.groups.trims.fetch_and(!u64::from(u32::MAX), SeqCst);
    }

    /// True when a process died in a change, so that [`Segment::audit`] has something to put right.
    pub fn audit_is_due(&self) -> bool {
        self.groups.audit_due.load(SeqCst) != 0
    }

    fn refs(&self, group: GroupIndex, extent: ExtentId) -> &AtomicU16 {
        &self.groups.refs[group.0 as usize][extent.0 as usize]
    }

    fn hold(&self, group: GroupIndex, extent: ExtentId) {
        for group in self.ancestry(group) {
            if self.refs(group, extent).fetch_add(1, SeqCst) == 0 {
                self.group(group).swap_used.fetch_add(1, SeqCst);
            }
        }
    }

    fn drop_hold(&self, group: GroupIndex, extent: ExtentId) {
        for group in self.ancestry(group) {
            if self.refs(group, extent).fetch_sub(1, SeqCst) == 1 {
                self.group(group).swap_used.fetch_sub(1, SeqCst);
            }
        }
    }

    fn holds(&self, index: SlotIndex, extent: ExtentId) -> bool {
        self.slot(index).held[extent.0 as usize / 64].load(SeqCst) >> (extent.0 % 64) & 1 == 1
    }

    fn each_held(&self, index: SlotIndex, mut f: impl FnMut(ExtentId)) {
        for (word_index, word) in self.slot(index).held.iter().enumerate() {
            let mut bits = word.load(SeqCst);
            while bits != 0 {
                f(ExtentId((word_index * 64) as u32 + bits.trailing_zeros()));
                bits &= bits - 1;
            }
        }
    }

    /// The number of changes so far; `None` while one is under way.
    fn quiet(&self) -> Option<u64> {
        let slots = self.procs.iter().map(|slot| &slot.changes);
        let mut words = slots.chain([&self.groups.trims]).map(|word| word.load(SeqCst));
        words.try_fold(0u64, |sum, word| (word as u32 == 0).then_some(sum.wrapping_add(word >> 32)))
    }

    /// Counts all holds and puts right what a process that died in a change has left behind; calls
    /// `freed` for each extent that no process holds although it was counted. False when changes
    /// were under way all the time: to be tried again. Supervisor only, which releases nothing
    /// meanwhile.
    pub fn audit(&self, mut freed: impl FnMut(ExtentId)) -> bool {
        for _ in 0..4 {
            let Some(before) = self.quiet() else { continue };
            self.groups.audit_due.store(0, SeqCst);
            let found = Audit::of(self);
            if self.quiet() != Some(before) {
                self.groups.audit_due.store(1, SeqCst);
                continue;
            }
            // Differences, not new values: what others change from here on is added to them.
            found.leased.into_iter().for_each(|(area, missing)| self.correct_used(area, missing));
            for (extent, missing) in found.extents {
                if self.correct_refs(extent, missing) {
                    freed(extent);
                }
            }
            for (group, extent, missing) in found.charges {
                self.refs(group, extent).fetch_add(missing as u16, SeqCst);
            }
            for (group, missing) in found.used {
                self.group(group).swap_used.fetch_add(missing as u32, SeqCst);
            }
            return true;
        }
        false
    }
}

/// By how much what is counted differs from what is held; in two's complement, for adding.
#[derive(Default)]
struct Audit {
    leased: Vec<(AreaId, i32)>,
    extents: Vec<(ExtentId, i16)>,
    charges: Vec<(GroupIndex, ExtentId, i16)>,
    used: Vec<(GroupIndex, i32)>,
}

impl Audit {
    fn of(segment: &Segment) -> Audit {
        let mut held = vec![0u16; MAX_EXTENTS];
        let mut charged = vec![0u16; MAX_EXTENTS * MAX_GROUPS];
        let end = segment.procs.len() as u32;
        for index in (0..end).map(SlotIndex) {
            let groups: Vec<GroupIndex> = segment.ancestry(segment.group_of(index)).collect();
            segment.each_held(index, |extent| {
                held[extent.0 as usize] += 1;
                // A damaged table may have a circle of groups, so that one is there often.
                groups.iter().for_each(|group| {
                    let charged = &mut charged[group.0 as usize * MAX_EXTENTS + extent.0 as usize];
                    *charged = charged.saturating_add(1);
                });
            });
        }
        let mut audit = Audit { leased: segment.missing_used(&held), ..Audit::default() };
        for (extent, held) in (0..).map(ExtentId).zip(&held) {
            let missing = held.wrapping_sub(segment.counted_holders(extent)) as i16;
            if missing != 0 {
                audit.extents.push((extent, missing));
            }
        }
        for (group, charged) in (0..).map(GroupIndex).zip(charged.chunks(MAX_EXTENTS)) {
            for (extent, charged) in (0..).map(ExtentId).zip(charged) {
                let missing = charged.wrapping_sub(segment.refs(group, extent).load(SeqCst)) as i16;
                if missing != 0 {
                    audit.charges.push((group, extent, missing));
                }
            }
            let used = charged.iter().filter(|charged| **charged > 0).count() as u32;
            let missing = used.wrapping_sub(segment.group(group).swap_used()) as i32;
            if missing != 0 {
                audit.used.push((group, missing));
            }
        }
        audit
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::area::NewArea;
    use crate::layout::test_segment;

    const A: GroupIndex = GroupIndex(1);
    const B: GroupIndex = GroupIndex(2);
    const INNER: GroupIndex = GroupIndex(3);
    const AREA: NewArea = NewArea::of_file(0, 100);

    /// The root, `/a`, `/b` and `/a/inner`.
    fn grouped() -> &'static Segment {
        let segment = test_segment();
        segment.add_area(AREA).expect("area");
        segment.make_group(A, GroupIndex::ROOT);
        segment.make_group(B, GroupIndex::ROOT);
        segment.make_group(INNER, A);
        segment
    }

    fn member(segment: &Segment, pid: u32, group: GroupIndex) -> SlotIndex {
        let index = segment.claim(pid, 0).expect("slot");
        segment.slot(index).control.group_wanted.store(group.0, Relaxed);
        segment.regroup(index);
        index
    }

    fn used(segment: &Segment) -> [u32; 4] {
        [GroupIndex::ROOT, A, B, INNER].map(|group| segment.group(group).swap_used())
    }

    fn is_sound(segment: &Segment) -> bool {
        let audit = Audit::of(segment);
        audit.leased.is_empty()
            && audit.extents.is_empty()
            && audit.charges.is_empty()
            && audit.used.is_empty()
    }

    #[test]
    fn trimmed_extents_uncharged_after_kill() {
        let segment = test_segment();
        segment.add_area(AREA).expect("area");
        let holder = segment.claim(10, 0).expect("slot");
        let extent = segment.lease_charged(holder).expect("extent");
        assert!(!segment.while_trimmed(extent, || panic!("it is held")));
        segment.release_charged(holder, holder, extent);
        let did = segment.while_trimmed(extent, || {
            assert!(!segment.audit(|_| panic!("it is kept")), "nothing is counted meanwhile");
            let others: Vec<_> = std::iter::from_fn(|| segment.lease_charged(holder)).collect();
            assert!(!others.contains(&extent));
            for other in others {
                segment.release_charged(holder, holder, other);
            }
        });
        assert!(did && segment.audit(|_| panic!("nothing is missing")));
        // Killed in the middle of it.
        segment.groups.trims.fetch_add(STARTED, SeqCst);
        segment.extent_refs[extent.0 as usize].store(1, SeqCst);
        segment.forget_trims();
        let mut freed = Vec::new();
        assert!(segment.audit(|extent| freed.push(extent)));
        assert_eq!(freed, [extent]);
    }

    #[test]
    fn an_extent_is_charged_to_the_holders_group_and_all_above_it() {
        let segment = grouped();
        let holder = member(segment, 10, INNER);
        let extents: Vec<_> =
            (0..3).map(|_| segment.lease_charged(holder).expect("extent")).collect();
        assert_eq!(used(segment), [3, 3, 0, 3]);
        assert!(segment.release_charged(holder, holder, extents[0]));
        assert!(
            !segment.release_charged(holder, holder, extents[0]),
            "a second release does nothing"
        );
        assert_eq!(used(segment), [2, 2, 0, 2]);
        segment.release(holder, |_| {});
        assert_eq!(used(segment), [0; 4]);
        assert!(is_sound(segment));
    }

    #[test]
    fn child_in_group_shared_extents_charged_once() {
        let segment = grouped();
        let parent = member(segment, 10, INNER);
        let extent = segment.lease_charged(parent).expect("extent");
        let child = segment.claim(11, 10).expect("slot");
        segment.share_charged(parent, child, extent);
        assert_eq!(used(segment), [1, 1, 0, 1], "one group holds it, twice");
        segment.slot(child).control.group_wanted.store(B.0, Relaxed);
        assert!(segment.is_moving(child));
        segment.regroup(child);
        assert!(!segment.is_moving(child));
        assert_eq!(used(segment), [1; 4], "two groups hold it; the root has it once");
        segment.release(parent, |_| panic!("the child holds it"));
        assert_eq!(used(segment), [1, 0, 1, 0]);
        let mut freed = Vec::new();
        segment.release(child, |x| freed.push(x));
        assert_eq!((freed, used(segment)), (vec![extent], [0; 4]));
        assert!(is_sound(segment));
    }

    #[test]
    fn exec_uncharges_what_the_program_held() {
        let segment = grouped();
        let index = member(segment, 10, A);
        segment.lease_charged(index).expect("extent");
        assert_eq!(segment.claim(10, 0), Some(index));
        assert_eq!(used(segment), [0; 4]);
        assert_eq!(segment.slot(index).group.load(Relaxed), A.0, "it stays in its group");
        assert!(is_sound(segment));
    }

    #[test]
    fn no_lease_goes_past_a_maximum_of_the_group_or_above_it() {
        let segment = grouped();
        let (inner, other) = (member(segment, 10, INNER), member(segment, 11, A));
        segment.group(A).set_swap_max(Some(3));
        segment.group(INNER).set_swap_max(Some(2));
        let mut leased: Vec<_> = std::iter::from_fn(|| segment.lease_charged(inner)).collect();
        assert_eq!((leased.len(), used(segment)), (2, [2, 2, 0, 2]));
        leased.extend(std::iter::from_fn(|| segment.lease_charged(other)));
        assert_eq!((leased.len(), used(segment)), (3, [3, 3, 0, 2]));
        let events =
            |group| (segment.group(group).max_events(), segment.group(group).fail_events());
        assert_eq!((events(INNER), events(A)), ((1, 1), (1, 1)));
        segment.group(INNER).set_swap_max(Some(0));
        assert_eq!(segment.lease_charged(inner), None);
        assert_eq!(events(INNER), (2, 2));
        let child = segment.claim(12, 10).expect("slot");
        segment.share_charged(inner, child, leased[0]);
        assert_eq!(used(segment), [3, 3, 0, 2]);
        segment.group(A).set_swap_max(None);
        segment.group(INNER).set_swap_max(None);
        while segment.lease_charged(inner).is_some() {}
        assert_eq!(
            (used(segment)[0], events(INNER)),
            (100, (2, 3)),
            "the areas are full, which is no group's maximum"
        );
        assert!(is_sound(segment));
    }

    #[test]
    fn a_lease_keeps_off_the_areas_that_the_group_may_not_use() {
        let segment = grouped();
        let other = segment.add_area(NewArea { priority: 7, extents: 3, ..AREA }).expect("area");
        let (inner, outer) = (member(segment, 10, INNER), member(segment, 11, A));
        segment.group(INNER).exclude_areas(1 << other.0);
        let place = |extent: Option<ExtentId>| {
            segment.place_of(extent.expect("extent")).expect("place").area
        };
        assert_eq!(place(segment.lease_charged(inner)), AreaId(0));
        assert_eq!(place(segment.lease_charged(outer)), other);
        segment.group(INNER).exclude_areas(u32::MAX);
        assert_eq!(segment.lease_charged(inner), None);
        assert_eq!((segment.group(INNER).max_events(), segment.group(INNER).fail_events()), (0, 1));
        assert!(is_sound(segment));
    }

    #[test]
    fn the_last_holder_retakes_an_extent_to_free_it_exclusively() {
        let segment = grouped();
        let (parent, child) = (member(segment, 10, INNER), member(segment, 11, B));
        let extent = segment.lease_charged(parent).expect("extent");
        segment.share_charged(parent, child, extent);
        assert!(!segment.release_charged(parent, parent, extent));
        assert!(!segment.retake_charged(parent, extent), "the child holds it");
        assert!(segment.release_charged(child, child, extent));
        assert!(segment.retake_charged(child, extent) && !segment.retake_charged(parent, extent));
        assert_eq!(used(segment), [1, 0, 1, 0]);
        assert!(is_sound(segment));
        // It dies before it has released it: the supervisor takes it back.
        let mut freed = Vec::new();
        segment.release(child, |extent| freed.push(extent));
        assert_eq!((freed, used(segment)), (vec![extent], [0; 4]));
        segment.close_area(AreaId(0));
        assert!(
            !segment.retake_charged(parent, extent),
            "a closed area without a held extent stays without one"
        );
        assert!(is_sound(segment));
    }

    #[test]
    fn a_process_killed_in_a_change_leaves_no_charge() {
        let segment = grouped();
        let (dead, other) = (member(segment, 10, INNER), member(segment, 11, B));
        let kept = segment.lease_charged(other).expect("extent");
        let lost = segment.lease_charged(dead).expect("extent");
        // As far as a lease comes: reserved; leased; charged below and not above.
        std::mem::forget(segment.slot(dead).change());
        for group in segment.ancestry(INNER) {
            assert!(segment.group(group).reserve());
        }
        let between = segment.lease_extent(dead, AreaMask::ALL).expect("extent");
        segment.refs(INNER, between).fetch_add(1, SeqCst);
        segment.slot(dead).held[0].fetch_and(!(1 << between.0), SeqCst);
        segment.correct_used(AreaId(0), -1);
        assert!(!segment.audit(|_| panic!("it may still be at work")) && !segment.audit_is_due());
        let mut freed = Vec::new();
        segment.release(dead, |x| freed.push(x));
        assert_eq!(freed, [lost]);
        assert!(!is_sound(segment) && segment.audit_is_due());
        assert!(segment.audit(|x| freed.push(x)) && !segment.audit_is_due());
        assert_eq!(freed, [lost, between]);
        assert!(is_sound(segment));
        assert_eq!(used(segment), [1, 0, 1, 0]);
        assert!(segment.audit(|_| panic!("nothing is amiss")));
        assert!(segment.holds(other, kept));
    }

    #[test]
    fn many_processes_at_once_leave_exact_charges() {
        let segment = grouped();
        segment.group(A).set_swap_max(Some(40));
        let groups = [GroupIndex::ROOT, A, B, INNER];
        let (start, leased_below_a) = (&std::sync::Barrier::new(4), &AtomicU32::new(0));
        std::thread::scope(|scope| {
            for number in 0..4u32 {
                scope.spawn(move || {
                    let index = member(segment, 100 + number, groups[number as usize]);
                    let mut held = Vec::new();
                    start.wait();
                    for round in 0..3000u32 {
                        match round.wrapping_mul(2_654_435_761) >> 28 {
                            0..=7 => {
                                let extent = segment.lease_charged(index);
                                if extent.is_some()
                                    && segment
                                        .ancestry(segment.group_of(index))
                                        .any(|group| group == A)
                                {
                                    leased_below_a.fetch_add(1, Relaxed);
                                }
                                held.extend(extent);
                            }
                            8..=13 => {
                                held.pop()
                                    .map(|extent| segment.release_charged(index, index, extent));
                            }
                            14 => {
                                let child =
                                    segment.claim(1000 + number, 100 + number).expect("slot");
                                held.iter().for_each(|extent| {
                                    segment.share_charged(index, child, *extent)
                                });
                                segment.release(child, |_| panic!("the parent holds it"));
                            }
                            _ => {
                                segment
                                    .slot(index)
                                    .control
                                    .group_wanted
                                    .store((number + round) % 4, SeqCst);
                                segment.regroup(index);
                            }
                        }
                        assert!(segment.group(GroupIndex::ROOT).swap_used() <= 100 + 4);
                    }
                });
            }
        });
        assert!(is_sound(segment));
        // What a group holds at the end is chance: one thread may have taken everything and gone
        // elsewhere.
        assert!(leased_below_a.load(Relaxed) > 0);
        assert!(!segment.audit_is_due());
        for index in (0..8).map(SlotIndex) {
            segment.release(index, |_| {});
        }
        assert_eq!(used(segment), [0; 4]);
        assert!(is_sound(segment));
    }

    #[test]
    fn counting_while_others_are_at_work_breaks_nothing() {
        let segment = grouped();
        let done = std::sync::atomic::AtomicBool::new(false);
        // The trace of one that died.
        segment.group(B).swap_used.fetch_add(3, SeqCst);
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let index = member(segment, 10, INNER);
                let mut held = Vec::new();
                for round in 0..20_000u32 {
                    match round % 7 {
                        0..=3 => held.extend(segment.lease_charged(index)),
                        _ => drop(
                            held.pop().map(|extent| segment.release_charged(index, index, extent)),
                        ),
                    }
                    if round % 64 == 0 {
                        std::thread::yield_now();
                    }
                }
                done.store(true, SeqCst);
            });
            while !done.load(SeqCst) {
                segment.audit(|_| panic!("no extent was lost"));
            }
            worker.join().expect("the worker");
        });
        assert!(segment.audit(|_| panic!("no extent was lost")));
        assert!(is_sound(segment));
        assert_eq!(segment.group(B).swap_used(), 0);
    }
}
