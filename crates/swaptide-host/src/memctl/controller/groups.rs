//! The groups: what each may have, which processes are in it, and what bounds it for a time.
//!
//! Owns the tree of groups, the membership of processes, and what keeps a group below its settings:
//! requests to reclaim, idleness, freezing.
//!
//! Locks: none; the controller's thread alone.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use swaptide_ipc::{Counter, GroupIndex, ProcSlot, ProcState, Segment};

use super::TickMember;
use super::runs::Runs;
use super::sample::Watches;
use crate::cgroup::tree::{GroupError, GroupPath, GroupTree, GroupUsage};
use crate::memctl::membership::Memberships;
use crate::memctl::policy::{Bounds, Process};
use crate::memctl::proactive::IdleGroups;
use crate::memctl::reclaim_requests::ReclaimRequests;

/// Where a bound stands in the division of the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum BudgetNode {
    Group(GroupIndex),
    Run(u32),
}

/// Where the bounds stand.
pub(super) type Nodes = HashMap<BudgetNode, usize>;

/// The bound that counts for a member: that of its run, where the run is in the member's group.
pub(super) fn node_of(member: &TickMember, runs: &Runs, nodes: &Nodes) -> usize {
    let in_its_runs_group =
        runs.get(member.run).is_some_and(|kept| kept.run.group == Some(member.group));
    let of_run = nodes.get(&BudgetNode::Run(member.run)).filter(|_| in_its_runs_group);
    of_run.or_else(|| nodes.get(&BudgetNode::Group(member.group))).copied().unwrap_or(0)
}

/// The tree of groups, the group of each process, and bounds for a time.
pub(super) struct GroupControl {
    pub(super) tree: GroupTree,
    pub(super) members: Memberships,
    pub(super) reclaims: ReclaimRequests,
    pub(super) idle: IdleGroups,
    /// Groups that stay out.
    pub(super) frozen: BTreeSet<GroupIndex>,
}

impl GroupControl {
    pub(super) fn new(tree: GroupTree) -> GroupControl {
        GroupControl {
            tree,
            members: Memberships::default(),
            reclaims: ReclaimRequests::default(),
            idle: IdleGroups::default(),
            frozen: BTreeSet::new(),
        }
    }

    /// Removes a group that no process is in, managed or not. The next group that is made may get
    /// its number.
    pub(super) fn remove(&mut self, path: &GroupPath) -> Result<(), GroupError> {
        let index = self.tree.find(path)?;
        if self.tree.usage(index).processes > 0 {
            return Err(GroupError::Busy(
                path.clone(),
                "processes are in it; end them, or move them to another group",
            ));
        }
        self.tree.remove(path)?;
        self.frozen.remove(&index);
        self.idle.forget(index);
        Ok(())
    }

    /// The group of a process, which is found when it is seen for the first time; its slot is told
    /// what follows from it.
    pub(super) fn assign(
        &mut self,
        pid: u32,
        of_run: Option<GroupIndex>,
        slot: Option<&ProcSlot>,
    ) -> GroupIndex {
        let group = self.members.look(pid, of_run, &self.tree);
        if let Some(slot) = slot {
            let no_writeback = u32::from(!self.tree.writes_back(group));
            if slot.control.group_wanted.load(Relaxed) != group.0
                || slot.control.no_writeback.load(Relaxed) != no_writeback
            {
                slot.control.group_wanted.store(group.0, Relaxed);
                slot.control.no_writeback.store(no_writeback, Relaxed);
                slot.wake();
            }
            slot.control.throttle_us.store(self.tree.price_of_growth(group), Relaxed);
        }
        group
    }

    /// What each group may have, all together at most `budget`, and below its group each run that
    /// has a maximum of its own; and where these stand.
    pub(super) fn bounds(&self, budget: u64, runs: &Runs) -> (Vec<Bounds>, Nodes) {
        let mut bounds = Vec::new();
        let mut nodes = Nodes::new();
        for index in self.tree.downwards() {
            let Some(group) = self.tree.get(index) else { continue };
            let own = if index == GroupIndex::ROOT { budget } else { u64::MAX };
            let frozen = self.frozen.contains(&index);
            let reclaimed = self.reclaims.bound(index);
            let bound = [reclaimed, self.idle.bound(index)].into_iter().flatten().min();
            let high = group.settings.ram_high.unwrap_or(u64::MAX);
            nodes.insert(BudgetNode::Group(index), bounds.len());
            bounds.push(Bounds {
                parent: group
                    .parent
                    .and_then(|parent| nodes.get(&BudgetNode::Group(parent)).copied())
                    .unwrap_or(0),
                max: group.settings.ram_max.unwrap_or(u64::MAX).min(own),
                high: if frozen { 0 } else { bound.map_or(high, |bound| bound.min(high)) },
                low: if frozen || reclaimed.is_some() { 0 } else { group.settings.ram_low },
            });
        }
        for run in runs.iter() {
            if let (Some(max), Some(group)) = (run.max, run.group) {
                nodes.insert(BudgetNode::Run(run.root), bounds.len());
                let parent = nodes.get(&BudgetNode::Group(group)).copied().unwrap_or(0);
                bounds.push(Bounds { parent, max, high: u64::MAX, low: 0 });
            }
        }
        (bounds, nodes)
    }

    /// Divides what groups may have of compressed memory among their processes, as memory is
    /// divided.
    pub(super) fn bound_pools(
        &self,
        segment: &Segment,
        members: &[TickMember],
        limits: &[(usize, u64)],
    ) {
        let mut given: HashMap<GroupIndex, u64> = HashMap::new();
        let above = |member: &TickMember| self.tree.ancestry(member.group).collect::<Vec<_>>();
        // What shall stay out is written back to the swap areas, where there are any.
        let bound = |group: GroupIndex| match self.frozen.contains(&group) && segment.has_area() {
            true => Some(0),
            false => self.tree.get(group).and_then(|group| group.settings.zswap_max),
        };
        for (at, limit) in limits {
            for group in above(&members[*at]).into_iter().filter(|group| bound(*group).is_some()) {
                *given.entry(group).or_default() += limit;
            }
        }
        for (at, limit) in limits {
            let part = |group: GroupIndex| {
                let (most, all) = (bound(group)?, given.get(&group).copied()?.max(1));
                Some((u128::from(most) * u128::from(*limit) / u128::from(all)) as u64)
            };
            let most = above(&members[*at]).into_iter().filter_map(part).min();
            if let Some(slot) = members[*at].slot.map(|index| segment.slot(index)) {
                slot.control.pool_max.set(most);
            }
        }
    }

    /// Notes what the groups use, and looks for idle ones.
    pub(super) fn account(
        &mut self,
        watches: &Watches,
        members: &[TickMember],
        processes: &[Process],
        elapsed: Duration,
        starved: impl Fn(GroupIndex) -> bool,
    ) {
        let mut own: BTreeMap<GroupIndex, GroupUsage> = BTreeMap::new();
        for (member, process) in members.iter().zip(processes) {
            let usage = own.entry(member.group).or_default();
            usage.ram += process.used;
            usage.processes += 1;
            if let Some(index) = member.slot {
                let slot = watches.segment.slot(index);
                usage.stalled = usage.stalled.or(watches.stalled(index));
                usage.zswap += ProcSlot::bytes(&slot.usage.pool_bytes);
                usage.refaults += slot.counted(Counter::WorkingsetRefault);
                usage.swapped += ProcSlot::bytes(&slot.usage.swapped_pool_bytes)
                    + ProcSlot::bytes(&slot.usage.swapped_file_bytes);
            }
        }
        self.tree.account(&own, elapsed, starved);
        self.idle.look(&self.tree);
    }

    /// The managed processes of a group and of those below it.
    pub(super) fn slots_of(
        &self,
        segment: &'static Segment,
        group: GroupIndex,
    ) -> impl Iterator<Item = &'static ProcSlot> {
        let engaged = segment.claimed().map(|(_, slot)| slot);
        engaged.filter(|slot| slot.state() == ProcState::Engaged).filter(move |slot| {
            let own = self.members.of(slot.pid.load(Relaxed));
            self.tree.ancestry(own).any(|above| above == group)
        })
    }
}
