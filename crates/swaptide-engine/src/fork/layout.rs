//! Where a forked child has what the parent's table knows.
//!
//! A thread that changes mappings does so under the kernel's lock of the address space, and tells
//! of it after that lock is free; so does a fork. The order in which a fork and other threads'
//! changes are read is therefore not the order in which they happened:
//!
//! | happened | read | the parent's table, when the fork is read | the child |
//! |---|---|---|---|
//! | change, fork | change, fork | has the change, or has noted it | has it |
//! | fork, change | fork, change | has it not | has it not |
//! | change, fork | fork, change | has it **not** | **has** it |
//! | fork, change | change, fork | **has** it, or has noted it | has it **not** |
//!
//! What the kernel offers: from before a change until its event was read and its thread has run,
//! every fill is refused ([`Coverage::Changing`]). So when that ends after a fork event was read,
//! every change that the child may have was read as well; and a change that was read when nothing
//! was under way is older than any fork that is read later. The changes in between fall into
//! histories that have nothing to do with each other; of each the child has a first part, and which
//! one its userfaultfd tells: what of the places concerned is armed there. A fresh mapping is no
//! event, and looks the same where something else was before: what the handler arms is therefore a
//! change as well ([`VmaChange::Armed`]).
//!
//! Owns: the changes in which a child differs from its parent's table.
//!
//! Invariants
//! 1. `undone` are changes that the table has and the child has not; `done` those that the child
//!    has and the table has not. Each in the order in which they happened to one page.
//! 2. An `Unmap` that only ends a `Remap`'s old place is in neither: the `Remap` says it.
//! 3. No two pages of the table have the same place in the child: what was armed after the fork has
//!    none where something else still is.
//! 4. A page given up (`MADV_DONTNEED`) may have either contents in the child if that was read
//!    before the fork, so it is always taken as given up; but not where a change before it did not
//!    reach the child. If it was read after the fork, the child has the page.
//!
//! A range that a thread unmaps while another forks past the hook may be in the child with zeros:
//! the child of such a program cannot know whether it has the range at all.
//!
//! Locks: none.

use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::uffd::Coverage;

use crate::mm::types::{PageNo, range_of};
use crate::mm::vma_change::{VmaChange, overlap};

fn shifted(page: PageNo, from: VirtAddr, to: VirtAddr) -> PageNo {
    PageNo(page.0.wrapping_sub(PageNo::of(from).0).wrapping_add(PageNo::of(to).0))
}

/// The places in a forked child of the ranges that the parent has listed.
#[derive(Clone, Default, Debug)]
pub struct Layout {
    undone: Vec<VmaChange>,
    done: Vec<VmaChange>,
}

impl Layout {
    /// Judges which changes a child has. `applied`: in the table, and perhaps later than the fork;
    /// `noted`: not in the table, and perhaps earlier, but for the `certain` first ones, which are.
    /// `armed`: whether the child has an armed mapping at a page; `managed`: the first address of a
    /// range at which the table has one managed. What is applied and says that something is
    /// unmapped says it of what the table knew.
    pub fn judge(
        applied: &[VmaChange],
        (noted, certain): (&[VmaChange], usize),
        mut armed: impl FnMut(PageNo) -> bool,
        managed: impl Fn(VirtRange) -> Option<VirtAddr>,
    ) -> Layout {
        let all: Vec<VmaChange> = applied.iter().chain(noted).copied().collect();
        let certain = if certain > 0 { applied.len() + certain } else { 0 };
        let ends = ends_of_moves(&all);
        let mut has = vec![false; all.len()];
        for history in histories(&all, &ends) {
            let read_before = ReadBefore { applied: applied.len(), certain };
            let cut = history.cut(&all, &ends, read_before, &mut armed, &managed);
            history.changes.iter().take(cut).for_each(|at| has[*at] = true);
        }
        for at in 0..all.len() {
            if let VmaChange::Dropped(range) = all[at] {
                let lacks = |k: usize| {
                    !has[k] && !ends.contains(&Some(k)) && !matches!(all[k], VmaChange::Dropped(_))
                };
                has[at] = !(0..at).any(|k| lacks(k) && all[k].concerns(range));
            }
        }
        let chosen = |part: std::ops::Range<usize>, wanted: bool| {
            part.filter(|k| has[*k] == wanted && !ends.contains(&Some(*k)))
                .map(|k| all[k])
                .collect::<Vec<_>>()
        };
        Layout {
            undone: chosen(0..applied.len(), false),
            done: chosen(applied.len()..all.len(), true),
        }
    }

    /// Returns the place in the child of a page of the parent's table; `None` if it has freed it,
    /// or never had it.
    pub fn place(&self, page: PageNo) -> Option<PageNo> {
        let mut at = page;
        for (k, change) in self.undone.iter().enumerate().rev() {
            match *change {
                VmaChange::Moved { from, to, .. } if change.reaches(range_of(at, 1)) => {
                    at = shifted(at, to, from)
                }
                // The child has there what was taken away before. Where nothing was, it has this or
                // nothing.
                VmaChange::Armed(range)
                    if range.contains(at.addr())
                        && self.undone[..k].iter().any(|c| c.takes(range_of(at, 1))) =>
                {
                    return None;
                }
                _ => {}
            }
        }
        for change in &self.done {
            match *change {
                VmaChange::Moved { from, to, .. } if change.takes(range_of(at, 1)) => {
                    at = shifted(at, from, to)
                }
                _ if change.concerns(range_of(at, 1)) => return None,
                _ => {}
            }
        }
        Some(at)
    }

    /// Returns the parent's page number of a page of the child; `None` if it has none.
    pub(crate) fn origin(&self, page: PageNo) -> Option<PageNo> {
        let mut at = page;
        for change in self.done.iter().rev() {
            match *change {
                VmaChange::Moved { from, to, .. } if change.reaches(range_of(at, 1)) => {
                    at = shifted(at, to, from)
                }
                _ if change.takes(range_of(at, 1)) => return None,
                _ => {}
            }
        }
        for change in &self.undone {
            if let VmaChange::Moved { from, to, .. } = *change
                && change.takes(range_of(at, 1))
            {
                at = shifted(at, from, to);
            }
        }
        (self.place(at) == Some(page)).then_some(at)
    }

    /// The changes that the child has and the table lacks.
    pub fn done(&self) -> &[VmaChange] {
        &self.done
    }

    /// The child has made a change itself.
    pub fn changed(&mut self, change: VmaChange) {
        self.done.push(change);
    }
}

/// For each change the later `Unmap` that only ends its old place, if it is a move and there is
/// one.
fn ends_of_moves(all: &[VmaChange]) -> Vec<Option<usize>> {
    let mut ends = vec![None; all.len()];
    for (at, change) in all.iter().enumerate() {
        if let VmaChange::Gone(range) = change {
            let of = |k: &usize| {
                ends[*k].is_none()
                    && matches!(all[*k], VmaChange::Moved { .. })
                    && all[*k].source() == Some(*range)
            };
            if let Some(of) = (0..at).rev().find(of) {
                ends[of] = Some(at);
            }
        }
    }
    ends
}

/// Changes that have to do with each other, because one concerns what another left or took, in the
/// order in which they were read. What a child has of them is a first part.
struct History {
    changes: Vec<usize>,
    ranges: Vec<VirtRange>,
}

fn histories(all: &[VmaChange], ends: &[Option<usize>]) -> Vec<History> {
    let mut histories: Vec<History> = Vec::new();
    for (at, change) in all.iter().enumerate() {
        if matches!(change, VmaChange::Dropped(_)) || ends.contains(&Some(at)) {
            continue;
        }
        let mut joined = History {
            changes: Vec::new(),
            ranges: [change.source(), change.target()].into_iter().flatten().collect(),
        };
        let (touched, apart): (Vec<History>, Vec<History>) =
            std::mem::take(&mut histories).into_iter().partition(|h| {
                h.ranges.iter().any(|r| joined.ranges.iter().any(|other| overlap(*r, *other)))
            });
        for history in touched {
            joined.changes.extend(history.changes);
            for range in history.ranges {
                if !joined.ranges.contains(&range) {
                    joined.ranges.push(range);
                }
            }
        }
        joined.changes.push(at);
        joined.changes.sort_unstable();
        histories = apart;
        histories.push(joined);
    }
    histories
}

/// How many changes were read before a fork, and how many are known to have happened before it.
#[derive(Clone, Copy)]
struct ReadBefore {
    applied: usize,
    certain: usize,
}

impl History {
    /// The number of changes that the child has: of those that are certain all; of the rest the one
    /// that explains best what it has armed; of several numbers the one that is nearest to what was
    /// read before the fork.
    ///
    /// What is armed where something was unmapped says little: a neighbour may have grown over it,
    /// and no event tells of that.
    fn cut(
        &self,
        all: &[VmaChange],
        ends: &[Option<usize>],
        read_before: ReadBefore,
        armed: &mut impl FnMut(PageNo) -> bool,
        managed: &impl Fn(VirtRange) -> Option<VirtAddr>,
    ) -> usize {
        let is_at = |range: Option<VirtRange>, place: VirtAddr| {
            range.is_some_and(|range| range.contains(place))
        };
        let ranges = self.changes.iter().flat_map(|at| {
            [all[*at].source(), all[*at].target()].into_iter().flatten().map(move |r| (*at, r))
        });
        // An `Unmap` that was not applied may begin before what the table knows there.
        let mut places: Vec<VirtAddr> = ranges
            .map(|(at, range)| match at < read_before.applied {
                true => range.start,
                false => managed(range).unwrap_or(range.start),
            })
            .collect();
        places.sort_unstable();
        places.dedup();
        let seen: Vec<bool> = places.iter().map(|place| armed(PageNo::of(*place))).collect();
        // Before all of them: of what the first change of a place says.
        let mut expected: Vec<bool> = places
            .iter()
            .map(|place| {
                let concerns = |at: &&usize| {
                    is_at(all[**at].source(), *place) || is_at(all[**at].target(), *place)
                };
                match self.changes.iter().find(concerns).map(|at| (*at, all[*at])) {
                    Some((_, c @ (VmaChange::Moved { .. } | VmaChange::Armed(_)))) => {
                        is_at(c.source(), *place)
                    }
                    Some((at, VmaChange::Gone(_))) if at < read_before.applied => true,
                    _ => managed(range_of(PageNo::of(*place), 1)).is_some(),
                }
            })
            .collect();
        let before = |read: usize| self.changes.partition_point(|at| *at < read);
        let (usual, least) = (before(read_before.applied), before(read_before.certain));
        let mut best = (0, usize::MAX, least);
        for cut in 0..=self.changes.len() {
            if cut > 0 {
                let at = self.changes[cut - 1];
                // A move without an end is one that leaves its old place mapped
                // (`MREMAP_DONTUNMAP`).
                let leaves = ends[at].is_some() || matches!(all[at], VmaChange::Gone(_));
                for (place, expected) in places.iter().zip(&mut expected) {
                    if leaves && is_at(all[at].source(), *place) {
                        *expected = false;
                    }
                    if is_at(all[at].target(), *place) {
                        *expected = true;
                    }
                }
            }
            let agrees = expected.iter().zip(&seen).filter(|(a, b)| a == b).count();
            let distance = cut.abs_diff(usual);
            if cut >= least && (agrees > best.0 || agrees == best.0 && distance < best.1) {
                best = (agrees, distance, cut);
            }
        }
        best.2
    }
}

/// Whether the process behind a userfaultfd has an armed mapping at a page; `None` while it is
/// changing.
pub(crate) fn is_armed(uffd: &swaptide_sys::uffd::Uffd, page: PageNo) -> Option<bool> {
    match uffd.coverage(range_of(page, 1)) {
        Coverage::Whole => Some(true),
        Coverage::Changing => None,
        Coverage::NotWhole | Coverage::Gone => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::types::pages_of;
    use std::collections::BTreeMap;

    const PLACE_BYTES: usize = 4 << 12;

    fn at(place: usize) -> VirtAddr {
        VirtAddr(0x10_0000 + place * PLACE_BYTES)
    }

    fn range(place: usize) -> VirtRange {
        VirtRange { start: at(place), end: at(place).offset(PLACE_BYTES) }
    }

    fn moved(from: usize, to: usize) -> VmaChange {
        VmaChange::Moved { from: at(from), to: at(to), len: PLACE_BYTES }
    }

    /// The number of the block at each place.
    type World = BTreeMap<usize, u32>;

    fn place_of(addr: VirtAddr) -> usize {
        (addr.0 - at(0).0) / PLACE_BYTES
    }

    fn happen(world: &mut World, call: usize, change: VmaChange) {
        match change {
            VmaChange::Moved { from, to, .. } => {
                if let Some(block) = world.remove(&place_of(from)) {
                    world.insert(place_of(to), block);
                }
            }
            VmaChange::Gone(range) => {
                world.remove(&place_of(range.start));
            }
            VmaChange::Armed(range) => {
                world.insert(place_of(range.start), FIRST_LATER_BLOCK + call as u32);
            }
            VmaChange::Dropped(_) => {}
        }
    }

    /// The first address of a range that lies in one of the places that are managed.
    fn first_of(is_managed: impl Fn(usize) -> bool) -> impl Fn(VirtRange) -> Option<VirtAddr> {
        move |range: VirtRange| {
            pages_of(range)
                .map(|page| PageNo(page).addr())
                .find(|addr| *addr >= at(0) && is_managed(place_of(*addr)))
        }
    }

    /// By what a child has armed, where all is managed.
    fn told_apart(
        applied: &[VmaChange],
        noted: &[VmaChange],
        armed: impl FnMut(PageNo) -> bool,
    ) -> Layout {
        Layout::judge(applied, (noted, 0), armed, first_of(|_| true))
    }

    /// Blocks from this number on were armed later.
    const FIRST_LATER_BLOCK: u32 = 100;

    /// Every way to cut a history in two: the child has what is before the cut, whatever was
    /// applied to the table. What was armed is applied.
    fn all_cuts(blocks: &[usize], calls: &[&[VmaChange]]) {
        let start: World =
            blocks.iter().enumerate().map(|(block, place)| (*place, block as u32)).collect();
        let least = calls
            .iter()
            .rposition(|c| c.iter().any(|c| matches!(c, VmaChange::Armed(_))))
            .map_or(0, |at| at + 1);
        let of = |first: usize| {
            calls[..first]
                .iter()
                .enumerate()
                .flat_map(|(call, c)| c.iter().map(move |change| (call, *change)))
        };
        for cut in 0..=calls.len() {
            for applied in least..=calls.len() {
                let mut child = start.clone();
                of(cut).for_each(|(call, change)| happen(&mut child, call, change));
                let mut table = start.clone();
                of(applied).for_each(|(call, change)| happen(&mut table, call, change));
                let flat = |calls: &[&[VmaChange]]| {
                    calls.iter().flat_map(|c| c.iter()).copied().collect::<Vec<_>>()
                };
                let layout = Layout::judge(
                    &flat(&calls[..applied]),
                    (&flat(&calls[applied..]), 0),
                    |page| child.contains_key(&place_of(page.addr())),
                    first_of(|place| table.contains_key(&place)),
                );
                for (place, block) in &table {
                    let found =
                        layout.place(PageNo::of(at(*place))).map(|page| place_of(page.addr()));
                    let real = child.iter().find(|(_, b)| *b == block).map(|(place, _)| *place);
                    if let Some(real) = real {
                        assert_eq!(
                            found,
                            Some(real),
                            "block {block}: cut {cut}, applied {applied}, {layout:?}"
                        );
                        let origin =
                            layout.origin(PageNo::of(at(real))).map(|page| place_of(page.addr()));
                        assert_eq!(
                            origin,
                            Some(*place),
                            "block {block} back: cut {cut}, applied {applied}, {layout:?}"
                        );
                    } else if *block >= FIRST_LATER_BLOCK && cut + 1 >= least {
                        // Something is armed only when no fork can be older than what was applied,
                        // if that is to be had.
                        let free = found.is_none_or(|place| !child.contains_key(&place));
                        assert!(
                            free,
                            "block {block}, younger than the child, is at {found:?}: cut {cut}, \
                            applied {applied}, {layout:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn moved_block_found_before_and_after_fork() {
        all_cuts(&[0, 1], &[&[moved(0, 5), VmaChange::Gone(range(0))]]);
        all_cuts(
            &[0, 1],
            &[
                &[moved(0, 5), VmaChange::Gone(range(0))],
                &[moved(5, 6), VmaChange::Gone(range(5))],
                &[moved(6, 0), VmaChange::Gone(range(6))],
            ],
        );
    }

    #[test]
    fn a_block_that_moves_over_another_one_is_found() {
        all_cuts(&[0, 1], &[&[VmaChange::Gone(range(1)), moved(0, 1), VmaChange::Gone(range(0))]]);
    }

    #[test]
    fn blocks_that_follow_each_other_are_told_apart() {
        all_cuts(
            &[0, 2],
            &[&[moved(0, 1), VmaChange::Gone(range(0))], &[moved(2, 0), VmaChange::Gone(range(2))]],
        );
        all_cuts(
            &[0, 1],
            &[&[moved(1, 2), VmaChange::Gone(range(1))], &[moved(0, 1), VmaChange::Gone(range(0))]],
        );
    }

    #[test]
    fn discard_at_fork_empties_only_its_range() {
        let layout = told_apart(&[], &[VmaChange::Dropped(range(0))], |_| true);
        assert_eq!(layout.place(PageNo::of(at(0))), None);
        assert_eq!(layout.place(PageNo::of(at(1))), Some(PageNo::of(at(1))));
        // The child has not seen the move, so what was given up at the new place is not what it has
        // there.
        let over = [
            VmaChange::Gone(range(1)),
            moved(0, 1),
            VmaChange::Gone(range(0)),
            VmaChange::Dropped(range(1)),
        ];
        let layout = told_apart(&[], &over, |_| true);
        assert_eq!(layout.place(PageNo::of(at(1))), Some(PageNo::of(at(1))), "{layout:?}");
    }

    #[test]
    fn a_block_that_goes_to_and_fro_is_where_it_is_armed() {
        let back_and_forth: Vec<[VmaChange; 2]> = (0..9)
            .map(|k| {
                if k % 2 == 0 {
                    [moved(0, 5), VmaChange::Gone(range(0))]
                } else {
                    [moved(5, 0), VmaChange::Gone(range(5))]
                }
            })
            .collect();
        all_cuts(&[0], &back_and_forth.iter().map(|call| &call[..]).collect::<Vec<_>>());
    }

    #[test]
    fn block_moved_over_range_existed_before() {
        // Without that, the child that has both blocks could as well have the one after its first
        // move.
        all_cuts(
            &[0, 2],
            &[
                &[VmaChange::Gone(range(2)), moved(0, 2), VmaChange::Gone(range(0))],
                &[moved(2, 1), VmaChange::Gone(range(2))],
            ],
        );
    }

    #[test]
    fn range_armed_without_block_stays_in_place() {
        // Its first page may be another mapping's by now: that says nothing of the others.
        let layout = told_apart(&[VmaChange::Armed(range(1))], &[], |_| false);
        assert_eq!(layout.place(PageNo::of(at(1)).plus(1)), Some(PageNo::of(at(1)).plus(1)));
        // But it is not put into what the child has there from before.
        let layout = Layout {
            undone: vec![VmaChange::Gone(range(1)), VmaChange::Armed(range(1))],
            done: Vec::new(),
        };
        assert_eq!(layout.place(PageNo::of(at(1))), None);
    }

    #[test]
    fn fresh_mapping_not_mistaken_for_old_one() {
        // The block goes over one fresh mapping, and another is made where it has been.
        let over = [VmaChange::Gone(range(2)), moved(1, 2), VmaChange::Gone(range(1))];
        let on = [moved(2, 0), VmaChange::Gone(range(2))];
        let back = [moved(0, 1), VmaChange::Gone(range(0))];
        let fresh = [VmaChange::Armed(range(2))];
        all_cuts(&[1, 2], &[&over, &on, &back, &fresh]);
        all_cuts(&[1, 2], &[&over, &on, &back, &fresh, &over, &on]);
        all_cuts(&[1], &[&fresh, &over, &on, &fresh]);
        all_cuts(
            &[0],
            &[&back, &[VmaChange::Armed(range(0))], &[moved(1, 5), VmaChange::Gone(range(1))]],
        );
    }

    #[test]
    fn move_may_be_reported_after_arming() {
        let told = [moved(0, 1), VmaChange::Gone(range(0))];
        for (child_has, place) in [(0, 0), (1, 1)] {
            for applied in 0..=told.len() {
                let before: Vec<VmaChange> = [VmaChange::Armed(range(1))]
                    .into_iter()
                    .chain(told[..applied].iter().copied())
                    .collect();
                // What was armed is the block: the fresh mapping that was meant is gone.
                let layout = Layout::judge(
                    &before,
                    (&told[applied..], 0),
                    |page| place_of(page.addr()) == child_has,
                    first_of(|place| place == 1),
                );
                let now = if applied > 0 { 1 } else { 0 };
                let found = layout.place(PageNo::of(at(now))).map(|page| place_of(page.addr()));
                assert_eq!(found, Some(place), "applied {applied}: {layout:?}");
            }
        }
    }

    #[test]
    fn unmapped_range_gone_in_child_unless_armed() {
        let layout = told_apart(&[], &[VmaChange::Gone(range(0))], |_| true);
        assert_eq!(layout.done(), []);
        let layout = told_apart(&[], &[VmaChange::Gone(range(0))], |_| false);
        assert_eq!(layout.done(), [VmaChange::Gone(range(0))]);
    }

    #[test]
    fn a_neighbour_that_grew_over_a_place_does_not_bring_it_back() {
        let gone = [VmaChange::Gone(range(1)), VmaChange::Gone(range(2))];
        let layout =
            |certain| Layout::judge(&[], (&gone, certain), |_| true, first_of(|place| place < 3));
        assert_eq!(layout(0).done(), []);
        assert_eq!(layout(1).done(), &gone[..1]);
        assert_eq!(layout(2).done(), gone);
    }

    #[test]
    fn an_unmap_is_told_by_what_was_managed_of_its_range() {
        // Where it begins nothing was, neither before nor after.
        let gone = VirtRange { start: range(0).start, end: range(1).end };
        let noted = [VmaChange::Gone(gone)];
        for is_there in [false, true] {
            let layout = Layout::judge(
                &[],
                (&noted, 0),
                |page| is_there && place_of(page.addr()) == 1,
                first_of(|place| place == 1),
            );
            assert_eq!(layout.done().is_empty(), is_there);
        }
    }

    #[test]
    fn what_was_armed_at_the_end_of_a_hole_is_not_put_into_what_was_there() {
        // Both were applied; the child has what was there before.
        let hole = VirtRange { start: range(0).start, end: range(1).end };
        let applied = [VmaChange::Gone(hole), VmaChange::Armed(range(1))];
        let layout = Layout::judge(&applied, (&[], 0), |_| true, first_of(|place| place == 1));
        assert_eq!(layout.place(PageNo::of(at(1))), None, "{layout:?}");
    }

    #[test]
    fn dontunmap_move_found_at_target() {
        let layout = told_apart(&[], &[moved(0, 1)], |_| true);
        assert_eq!(layout.place(PageNo::of(at(0))), Some(PageNo::of(at(1))));
        let layout = told_apart(&[], &[moved(0, 1)], |page| page == PageNo::of(at(0)));
        assert_eq!(layout.place(PageNo::of(at(0))), Some(PageNo::of(at(0))));
    }
}
