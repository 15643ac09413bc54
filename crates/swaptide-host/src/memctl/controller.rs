//! The thread that keeps processes within their budgets: those of one run, or of all runs of a
//! host.
//!
//! Owns the members ([`ProcessTree`]), the groups ([`GroupTree`]) and their members
//! (`Memberships`), the supervisor's side of every process slot, the totals of processes that are
//! gone, and the swap areas' holes. Each tick it reads what everybody uses, lets `policy::decide`
//! judge, and carries out the decision through the segment: `limit_bytes`, `engage`, the
//! `wake_seq`, and what follows from a process's group.
//!
//! Invariants
//! 1. A slot is released only if the kernel says at that moment that its process is gone
//!    (`life`): the number of a dead process may belong to another one, and a failed question
//!    says nothing. Its counters go into the totals of its run first.
//! 2. An area's bytes are freed only while their extent is kept from everybody
//!    ([`Segment::while_unheld`]).
//! 3. Groups and tiers change between two ticks only.
//! 4. Only members of the tree, as the kernel reports it, are charged or killed; a number in the
//!    segment makes nobody one. What the segment says of amounts is bounded before it is added up
//!    (docs/segment.md).
//!
//! Locks: none; the rest of the supervisor talks to the thread through a channel.

pub(crate) mod detach;
pub(crate) mod sample;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use swaptide_ipc::{
    Counter, EXTENT_BYTES, GroupIndex, NO_LIMIT, ProcSlot, ProcState, Segment, SlotIndex,
};
use swaptide_sys::PAGE_SIZE;
use swaptide_sys::process::pidfd_open;
use swaptide_sys::sock::poll_readable;

use crate::cgroup::psi::TimeShare;
use crate::cgroup::tree::{GroupError, GroupPath, GroupTree, GroupUsage, GroupView};
use crate::memctl::policy::{self, Bounds, Process, Sharing};
use crate::memctl::proactive::IdleReclaim;
use crate::memctl::processes::{Life, ProcessTree, life};
use crate::memctl::shared_pager::SharedPager;
use crate::report::totals::{ProcessView, Totals, View};
use crate::swap::areas::Areas;

use self::sample::Watch;
use crate::memctl::cgroup_limit::CgroupLimit;
use crate::memctl::membership::Memberships;
use crate::memctl::proactive::IdleGroups;
pub use crate::memctl::reclaim_requests::ReclaimOutcome;
use crate::memctl::reclaim_requests::ReclaimRequests;
use crate::memctl::strict::{Excess, Reason};

/// How long a client of the controller waits for it: a tick of many processes on a busy machine.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// How often is looked for runs that are over.
const RUN_RECORD_MAX_AGE: Duration = Duration::from_millis(500);

/// What the keeper is asked.
pub enum ControllerRequest {
    /// A process joined: look at it now.
    Joined(u32),
    /// Do this between two ticks.
    Do(Box<dyn FnOnce(&mut MemoryController) + Send>),
    /// End.
    Stop,
}

/// Asks the keeper something and waits; `None` when it has ended.
pub fn ask<T: Send + 'static>(
    keeper: &Sender<ControllerRequest>,
    f: impl FnOnce(&mut MemoryController) -> T + Send + 'static,
) -> Option<T> {
    let (answer, result) = channel();
    let task = move |keeper: &mut MemoryController| {
        // The client may have stopped waiting.
        let _ = answer.send(f(keeper));
    };
    keeper.send(ControllerRequest::Do(Box::new(task))).ok()?;
    result.recv_timeout(REQUEST_TIMEOUT).ok()
}

/// Those of some processes that are kept; none where the keeper has ended.
pub(crate) fn kept(keeper: &Sender<ControllerRequest>, pids: Vec<u32>) -> Vec<u32> {
    let kept =
        |keeper: &mut MemoryController| pids.into_iter().filter(|pid| keeper.keeps(*pid)).collect();
    ask(keeper, kept).unwrap_or_default()
}

/// A run: the processes under one supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ManagedRun {
    /// Whose descendants its processes are.
    pub root: u32,
    /// The process that the user started.
    pub front: u32,
    /// Whose it is.
    pub uid: u32,
    /// The program's name.
    pub program: String,
    /// When it began, in seconds since 1970.
    pub started: f64,
    /// The group that they are in, unless they were moved; where there is none, that of their
    /// cgroup.
    #[serde(skip)]
    pub group: Option<GroupIndex>,
    /// The most that they may have together, where that is not its group's matter.
    pub max: Option<u64>,
    /// They are killed when they have more than they may for long, or swap space is out.
    pub strict: bool,
}

/// A run, and what it did so far.
pub(super) struct RunRecord {
    pub(super) run: ManagedRun,
    /// Stands for the root; none where it was gone already.
    pidfd: Option<OwnedFd>,
    /// What its dead have counted, and the most that there was at a time.
    pub(super) totals: Totals,
    /// Of times that swap space was out, those before it was last within its budget.
    swap_full: u64,
    excess: Excess,
}

/// A member at a tick.
pub(super) struct TickMember {
    pub(super) pid: u32,
    pub(super) slot: Option<SlotIndex>,
    pub(super) run: u32,
    pub(super) group: GroupIndex,
}

/// The keeper.
pub struct MemoryController {
    pub(super) segment: &'static Segment,
    areas: Arc<Areas>,
    areas_epoch: u32,
    pub(super) budget: u64,
    pub(super) tree: ProcessTree,
    /// Which slot is whose. A process keeps the first one that it was seen with, whatever others
    /// say.
    bound: HashMap<u32, SlotIndex>,
    groups: GroupTree,
    places: Memberships,
    squeezes: ReclaimRequests,
    idlers: IdleGroups,
    pub(super) runs: BTreeMap<u32, RunRecord>,
    watches: HashMap<SlotIndex, Watch>,
    pub(super) refused: HashSet<u32>,
    last_tick: Instant,
    /// A process that is first seen from now on was not there before.
    pub(super) has_looked: bool,
    pub(super) shared: Option<&'static SharedPager>,
    /// What the pager of another process can have at most: all memory there is.
    pub(super) most_shared: u64,
    looked_at_runs: Instant,
    frozen: BTreeSet<GroupIndex>,
    ceiling: CgroupLimit,
}

impl MemoryController {
    /// A keeper of nobody yet.
    pub fn new(
        segment: &'static Segment,
        areas: Arc<Areas>,
        groups: GroupTree,
        budget: u64,
    ) -> MemoryController {
        MemoryController {
            segment,
            areas,
            areas_epoch: 0,
            budget,
            tree: ProcessTree::default(),
            bound: HashMap::new(),
            groups,
            places: Memberships::default(),
            squeezes: ReclaimRequests::default(),
            idlers: IdleGroups::default(),
            runs: BTreeMap::new(),
            watches: HashMap::new(),
            refused: HashSet::new(),
            last_tick: Instant::now(),
            has_looked: false,
            shared: None,
            most_shared: crate::units::ram_total(),
            looked_at_runs: Instant::now(),
            frozen: BTreeSet::new(),
            ceiling: CgroupLimit::default(),
        }
    }

    /// Counts shared memory, too.
    pub(crate) fn with_shared(self, shared: &'static SharedPager) -> MemoryController {
        MemoryController { shared: Some(shared), ..self }
    }

    /// Keeps within what the memory cgroups of this process leave, too: all that it keeps is in
    /// them.
    pub(crate) fn within_cgroups(self) -> MemoryController {
        MemoryController { ceiling: CgroupLimit::of_own_cgroups(), ..self }
    }

    /// Keeps a run, too.
    pub fn add_run(&mut self, run: ManagedRun) {
        self.tree.add_root(run.root);
        self.tree.add_front(run.front, run.root);
        let pidfd = pidfd_open(run.root).ok();
        self.runs.insert(
            run.root,
            RunRecord {
                run,
                pidfd,
                totals: Totals::default(),
                swap_full: 0,
                excess: Excess::default(),
            },
        );
    }

    /// The thread: ticks until it is told to stop or nobody is left to tell it.
    pub fn run(mut self, requests: Receiver<ControllerRequest>) {
        // It only looks, but it must look in time.
        swaptide_sys::affinity::go_first();
        let mut interval = Duration::ZERO;
        loop {
            match requests.recv_timeout(interval) {
                Ok(ControllerRequest::Joined(pid)) => drop(self.tree.admit(pid)),
                Ok(ControllerRequest::Do(task)) => {
                    self.tick();
                    task(&mut self);
                }
                Ok(ControllerRequest::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
            interval = self.tick();
        }
    }

    /// One look at everything; answers with the time until the next.
    fn tick(&mut self) -> Duration {
        let elapsed = self.last_tick.elapsed();
        self.last_tick = Instant::now();
        if std::mem::replace(&mut self.areas_epoch, self.segment.areas_epoch()) != self.areas_epoch
        {
            self.groups.publish();
        }
        let slots = self.slots();
        self.tree.look();
        for pid in slots.keys() {
            self.tree.admit(*pid);
        }
        for (pid, index) in &slots {
            self.tree.discount_engine_faults(*pid, self.copied_nothing(*index) * PAGE_SIZE as u64);
        }
        let dead = self.tree.sample();
        self.places.forget(&dead);
        for pid in self.tree.leaderless() {
            // If no other thread is left, the one that reads this ends the process.
            if let Some(slot) = slots.get(&pid) {
                self.segment.slot(*slot).signal_leader_exit();
            }
        }
        let pids: Vec<u32> = self.tree.pids().collect();
        let members: Vec<TickMember> =
            pids.into_iter().map(|pid| self.member(pid, slots.get(&pid).copied())).collect();
        let (bounds, nodes) = self.bounds(&members);
        let processes: Vec<Process> =
            members.iter().map(|member| self.judge(member, &nodes, elapsed)).collect();
        // Not those of a process that lives and is no member: what it holds is needed, or somebody
        // has lied, and then nothing is lost. Nor where the number of a dead member lives again,
        // for the slot may be the new process's by now, nor where the kernel cannot be asked.
        let claimed: Vec<(SlotIndex, u32)> =
            self.segment.claimed().map(|(index, slot)| (index, slot.pid.load(Relaxed))).collect();
        for (index, pid) in claimed {
            if self.tree.contains(pid) {
                continue;
            }
            if life(pid) == Life::Gone {
                self.release(index);
            } else if dead.contains(&pid) {
                self.watches.remove(&index);
                self.refused.remove(&pid);
            }
        }
        if self.segment.audit_is_due() {
            self.audit();
        }
        self.measure(&processes, &members);
        let counted = self.counted(&members, &processes);
        let decision = policy::decide(&bounds, &counted, elapsed);
        let sharing: Vec<Sharing> =
            members.iter().map(|member| self.sharing(member, elapsed)).collect();
        let lent = policy::cow_credit(&bounds, &counted, &sharing);
        for ((at, limit), fair) in decision.limits.iter().zip(&decision.fair) {
            let Some(index) = members[*at].slot else { continue };
            let has_limit =
                command(self.segment.slot(index), limit + lent[*at], decision.engage.contains(at));
            if let Some(watch) = self.watches.get_mut(&index) {
                watch.fair = *fair;
                if has_limit {
                    watch.lent = lent[*at];
                }
            }
        }
        self.has_looked = true;
        self.bound_pools(&members, &decision.limits);
        self.account(&members, &processes, elapsed, |group| {
            nodes.get(&BudgetNode::Group(group)).is_some_and(|at| decision.starved.contains(at))
        });
        for root in self.runs.keys().copied().collect::<Vec<_>>() {
            self.enforce(root, &members, &processes);
        }
        if self.looked_at_runs.elapsed() > RUN_RECORD_MAX_AGE {
            self.looked_at_runs = Instant::now();
            self.forget_runs();
        }
        policy::interval(&bounds, &counted).min(self.squeezes.step(&self.groups))
    }

    /// Whose slot is which. Another slot in which the number of a process stands is nobody's.
    fn slots(&mut self) -> HashMap<u32, SlotIndex> {
        let mut slots = HashMap::new();
        for (index, slot) in self.segment.claimed() {
            let pid = slot.pid.load(Relaxed);
            let own = self.bound.get(&pid);
            if own
                .is_none_or(|own| *own == index || self.segment.slot(*own).pid.load(Relaxed) != pid)
            {
                slots.insert(pid, index);
                self.bound.insert(pid, index);
            }
        }
        self.bound.retain(|pid, _| slots.contains_key(pid));
        slots
    }

    /// Forgets runs whose supervisor is gone, and nobody is left of.
    fn forget_runs(&mut self) {
        let gone = |kept: &RunRecord| {
            let ended = |pidfd: &OwnedFd| {
                poll_readable(&[pidfd.as_fd()], Some(Duration::ZERO)).is_ok_and(|ready| ready != 0)
            };
            kept.pidfd.as_ref().is_none_or(ended)
        };
        let gone: Vec<u32> =
            self.runs.iter().filter(|(_, kept)| gone(kept)).map(|(root, _)| *root).collect();
        for root in gone {
            if !self.tree.pids().any(|pid| self.tree.root_of(pid) == root) {
                self.tree.forget_root(root);
                self.runs.remove(&root);
            }
        }
    }

    /// The runs that are kept.
    pub fn runs(&self) -> impl Iterator<Item = &ManagedRun> {
        self.runs.values().map(|kept| &kept.run)
    }

    /// The run of a process: one in it, or the one that the user started.
    pub fn run_of(&self, pid: u32) -> Option<&ManagedRun> {
        let by_front = self.runs().find(|run| run.front == pid || run.root == pid);
        by_front.or_else(|| self.runs.get(&self.tree.root_of(pid)).map(|kept| &kept.run))
    }

    /// Whose a process is that is kept here.
    pub(crate) fn owner_of(&self, pid: u32) -> Option<u32> {
        self.runs.get(&self.tree.root_of(pid)).map(|kept| kept.run.uid)
    }

    /// What is known of a process; one without gets its group.
    fn member(&mut self, pid: u32, slot: Option<SlotIndex>) -> TickMember {
        let run = self.tree.root_of(pid);
        let group = self.places.look(
            pid,
            self.runs.get(&run).and_then(|kept| kept.run.group),
            &self.groups,
        );
        if let Some(slot) = slot.map(|index| self.segment.slot(index)) {
            let no_writeback = u32::from(!self.groups.writes_back(group));
            if slot.control.group_wanted.load(Relaxed) != group.0
                || slot.control.no_writeback.load(Relaxed) != no_writeback
            {
                slot.control.group_wanted.store(group.0, Relaxed);
                slot.control.no_writeback.store(no_writeback, Relaxed);
                slot.wake();
            }
            slot.control.throttle_us.store(self.groups.price_of_growth(group), Relaxed);
        }
        TickMember { pid, slot, run, group }
    }

    /// What each group may have, and below its group each run that has a maximum of its own; and
    /// where these stand.
    fn bounds(&mut self, members: &[TickMember]) -> (Vec<Bounds>, HashMap<BudgetNode, usize>) {
        let resident = members.iter().map(|member| self.tree.used(member.pid)).sum();
        let left = self.ceiling.look(resident).unwrap_or(u64::MAX);
        if left < self.budget {
            for kept in self.runs.values_mut() {
                kept.totals.cgroup_left =
                    Some(kept.totals.cgroup_left.map_or(left, |least| least.min(left)));
            }
        }
        let mut bounds = Vec::new();
        let mut nodes = HashMap::new();
        for index in self.groups.downwards() {
            let Some(group) = self.groups.get(index) else { continue };
            let own = if index == GroupIndex::ROOT { self.budget.min(left) } else { u64::MAX };
            let frozen = self.frozen.contains(&index);
            let squeezed = self.squeezes.bound(index);
            let bound = [squeezed, self.idlers.bound(index)].into_iter().flatten().min();
            let high = group.settings.ram_high.unwrap_or(u64::MAX);
            nodes.insert(BudgetNode::Group(index), bounds.len());
            bounds.push(Bounds {
                parent: group
                    .parent
                    .and_then(|parent| nodes.get(&BudgetNode::Group(parent)).copied())
                    .unwrap_or(0),
                max: group.settings.ram_max.unwrap_or(u64::MAX).min(own),
                high: if frozen { 0 } else { bound.map_or(high, |bound| bound.min(high)) },
                low: if frozen || squeezed.is_some() { 0 } else { group.settings.ram_low },
            });
        }
        for (root, kept) in &self.runs {
            if let (Some(max), Some(group)) = (kept.run.max, kept.run.group) {
                nodes.insert(BudgetNode::Run(*root), bounds.len());
                let parent = nodes.get(&BudgetNode::Group(group)).copied().unwrap_or(0);
                bounds.push(Bounds { parent, max, high: u64::MAX, low: 0 });
            }
        }
        (bounds, nodes)
    }

    /// Notes the most that each run has at a time.
    fn measure(&mut self, processes: &[Process], members: &[TickMember]) {
        #[derive(Default)]
        struct Sum {
            resident: u64,
            footprint: u64,
            pool: u64,
        }
        let mut sums: BTreeMap<u32, Sum> = BTreeMap::new();
        for (process, member) in processes.iter().zip(members) {
            let sum = sums.entry(member.run).or_default();
            sum.resident += process.used;
            let Some(slot) = member.slot.map(|index| self.segment.slot(index)) else {
                sum.footprint += process.used;
                continue;
            };
            let own =
                [&slot.usage.pool_bytes, &slot.usage.staging_bytes, &slot.usage.overhead_bytes]
                    .map(ProcSlot::bytes);
            let swapped = ProcSlot::bytes(&slot.usage.swapped_pool_bytes)
                + ProcSlot::bytes(&slot.usage.swapped_file_bytes);
            sum.footprint += process.used.saturating_sub(own.iter().sum()) + swapped;
            sum.pool += own[0];
        }
        self.areas.measure();
        for (run, sum) in sums {
            if let Some(RunRecord { totals, .. }) = self.runs.get_mut(&run) {
                totals.peak_resident = totals.peak_resident.max(sum.resident);
                totals.peak_footprint = totals.peak_footprint.max(sum.footprint);
                totals.peak_pool = totals.peak_pool.max(sum.pool);
            }
        }
    }

    /// Divides what groups may have of compressed memory among their processes, as memory is
    /// divided.
    fn bound_pools(&self, members: &[TickMember], limits: &[(usize, u64)]) {
        let mut given: HashMap<GroupIndex, u64> = HashMap::new();
        let above = |member: &TickMember| self.groups.ancestry(member.group).collect::<Vec<_>>();
        // What shall stay out goes on to the swap areas, where there are any.
        let bound =
            |group: GroupIndex| match self.frozen.contains(&group) && self.segment.has_area() {
                true => Some(0),
                false => self.groups.get(group).and_then(|group| group.settings.zswap_max),
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
            if let Some(slot) = members[*at].slot.map(|index| self.segment.slot(index)) {
                slot.control
                    .pool_max_plus
                    .store(most.map_or(0, |most| most.saturating_add(1)), Relaxed);
            }
        }
    }

    fn account(
        &mut self,
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
                let slot = self.segment.slot(index);
                let stalled =
                    self.watches.get(&index).map_or_else(TimeShare::default, |watch| watch.stalled);
                usage.stalled = usage.stalled.or(stalled);
                usage.zswap += ProcSlot::bytes(&slot.usage.pool_bytes);
                usage.refaults += slot.counted(Counter::WorkingsetRefault);
                usage.swapped += ProcSlot::bytes(&slot.usage.swapped_pool_bytes)
                    + ProcSlot::bytes(&slot.usage.swapped_file_bytes);
            }
        }
        self.groups.account(&own, elapsed, starved);
        self.idlers.look(&self.groups);
    }

    /// Ends a run that was started with `--strict` and has more than it may (see
    /// [`strict`](crate::memctl::strict)).
    fn enforce(&mut self, root: u32, members: &[TickMember], processes: &[Process]) {
        let Some(most) =
            self.runs.get(&root).filter(|kept| kept.run.strict).map(|kept| self.most_of(&kept.run))
        else {
            return;
        };
        let own = || members.iter().zip(processes).filter(|(member, _)| member.run == root);
        let counted: u64 = own().map(|(_, process)| process.used).sum();
        let anonymous: u64 =
            own().map(|(member, process)| process.used.min(self.tree.used(member.pid))).sum();
        let full = self.totals(root).get(Counter::SwapFull);
        let Some(kept) = self.runs.get_mut(&root) else { return };
        let now = Instant::now();
        let pids = own().map(|(member, _)| member.pid);
        let shared = kept.excess.mapped_shared(pids, most.saturating_sub(anonymous), now);
        let used = counted.max(anonymous.saturating_add(shared));
        if let Some(reason) = kept.excess.look(used, most, full > kept.swap_full, now) {
            kept.totals.strict_kill = true;
            if reason == Reason::Lasting {
                kept.totals.strict_used.get_or_insert(used);
            }
        }
        if kept.totals.strict_kill {
            // Also the processes that it has started since the last time.
            self.tree.kill_all(root);
        }
        if used <= most {
            kept.swap_full = full;
        }
    }

    /// The most that a run may have.
    fn most_of(&self, run: &ManagedRun) -> u64 {
        let group =
            run.group.and_then(|group| self.groups.least(group, |settings| settings.ram_max));
        [Some(self.budget), run.max, group].into_iter().flatten().min().unwrap_or(self.budget)
    }

    /// Puts right what a process left behind that died while it leased or released.
    fn audit(&self) {
        let mut freed = Vec::new();
        // Where others are in the middle of a change all the time, the next tick tries again.
        if self.segment.audit(|extent| freed.push(extent)) {
            for extent in freed {
                self.areas.give_back(extent);
            }
        }
    }

    /// A run, all but what the keeper does not know: its number, name and age.
    pub fn view(&self, root: u32) -> View {
        let totals = self.totals(root);
        let slots: HashMap<u32, (SlotIndex, &ProcSlot)> = self
            .bound
            .iter()
            .map(|(pid, index)| (*pid, (*index, self.segment.slot(*index))))
            .collect();
        let process = |pid: u32| {
            let resident_bytes = self.tree.used(pid);
            let group = self
                .groups
                .get(self.places.of(pid))
                .map_or_else(String::new, |group| group.path.to_string());
            let Some((index, slot)) = slots.get(&pid) else {
                return ProcessView {
                    pid,
                    group,
                    state: "unmanaged".into(),
                    resident_bytes,
                    ..ProcessView::default()
                };
            };
            let state = match slot.state() {
                ProcState::Engaged => "engaged",
                ProcState::Watching => "watching",
                ProcState::Refused | ProcState::Free => "unmanaged",
                ProcState::Detached => "detached",
            };
            ProcessView {
                pid,
                group,
                state: state.into(),
                limit_bytes: ProcSlot::bytes(&slot.control.limit_bytes),
                fair_bytes: self
                    .watches
                    .get(index)
                    .filter(|watch| watch.pid == pid)
                    .map_or(0, |watch| watch.fair),
                resident_bytes,
                pool_bytes: ProcSlot::bytes(&slot.usage.pool_bytes),
                swapped_pool_bytes: ProcSlot::bytes(&slot.usage.swapped_pool_bytes),
                swapped_file_bytes: ProcSlot::bytes(&slot.usage.swapped_file_bytes),
            }
        };
        let processes: Vec<ProcessView> =
            self.tree.pids().filter(|pid| self.tree.root_of(*pid) == root).map(process).collect();
        View {
            budget_bytes: self.runs.get(&root).map_or(self.budget, |kept| self.most_of(&kept.run)),
            resident_bytes: processes.iter().map(|process| process.resident_bytes).sum(),
            peak_resident_bytes: totals.peak_resident,
            peak_footprint_bytes: totals.peak_footprint,
            file_bytes: u64::from(self.segment.extents_used()) * EXTENT_BYTES,
            processes,
            stats: Counter::ALL
                .iter()
                .map(|counter| (counter.name().to_owned(), totals.get(*counter)))
                .collect(),
            fault_us: totals.fault_times(),
            ..View::default()
        }
    }

    /// What a run did so far.
    pub fn totals(&self, root: u32) -> Totals {
        let mut totals =
            self.runs.get(&root).map_or_else(Totals::default, |kept| kept.totals.clone());
        totals.areas = self.areas.view().into_iter().map(|(_, view)| view).collect();
        for (pid, index) in &self.bound {
            let slot = self.segment.slot(*index);
            // One that was given back since has been counted.
            if slot.pid.load(Relaxed) == *pid
                && self.tree.contains(*pid)
                && self.tree.root_of(*pid) == root
            {
                totals.add(slot);
            }
        }
        totals.groups = self.groups.iter().map(|(index, _)| self.groups.view(index)).collect();
        totals
    }

    fn release(&mut self, index: SlotIndex) {
        let pid = self.segment.slot(index).pid.load(Relaxed);
        // A process that came and went between two ticks was seen in no run; where there is only
        // one, it was that.
        let only = self.runs.keys().next().copied().filter(|_| self.runs.len() == 1);
        let seen =
            self.watches.remove(&index).filter(|watch| watch.pid == pid).map(|watch| watch.run);
        if let Some(kept) = seen.or(only).and_then(|run| self.runs.get_mut(&run)) {
            kept.totals.add(self.segment.slot(index));
        }
        self.refused.remove(&pid);
        let mut freed = Vec::new();
        self.segment.release(index, |extent| freed.push(extent));
        for extent in freed {
            self.areas.give_back(extent);
        }
    }

    /// The groups and the tiers.
    pub fn groups(&mut self) -> &mut GroupTree {
        &mut self.groups
    }

    /// Whether a process is kept here.
    pub(crate) fn keeps(&self, pid: u32) -> bool {
        self.tree.contains(pid)
    }

    /// Moves a process that is kept here to a group, where it and its later children stay.
    pub(crate) fn move_process(&mut self, pid: u32, group: GroupIndex) {
        if self.keeps(pid) {
            self.places.fix(pid, group);
        }
    }

    /// The groups from one downwards, as they are.
    ///
    /// # Errors
    /// [`GroupError::NotFound`].
    pub fn group_views(&self, path: &GroupPath) -> Result<Vec<GroupView>, GroupError> {
        let top = self.groups.find(path)?;
        let below = self
            .groups
            .iter()
            .filter(|(index, _)| self.groups.ancestry(*index).any(|above| above == top));
        Ok(below.map(|(index, _)| self.groups.view(index)).collect())
    }

    /// The swap areas.
    pub fn areas(&self) -> &Areas {
        &self.areas
    }

    /// The budget.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Has another budget from here on.
    pub(crate) fn set_budget(&mut self, budget: u64) {
        self.budget = budget;
    }

    /// Whether and when idle groups lose memory.
    pub(crate) fn set_idle(&mut self, rule: Option<IdleReclaim>) {
        self.idlers.set_rule(rule);
    }

    /// A process that lives and was kept by the supervisor before this one, in this group. The
    /// caller has the kernel's word that it has the segment.
    pub(crate) fn adopt(&mut self, pid: u32, group: GroupIndex) {
        if self.groups.get(group).is_some() && self.tree.admit_known(pid) {
            self.places.fix(pid, group);
        }
    }

    /// A process of the supervisor before this one whose mappings cannot be read. It stays in its
    /// group if it descends from a run that is kept here; else it is left alone, and keeps what it
    /// has.
    pub(crate) fn adopt_descendant(&mut self, pid: u32, group: GroupIndex) {
        if self.tree.admit(pid) {
            self.adopt(pid, group);
        }
    }

    /// The slot of a process that is gone.
    pub(crate) fn bury(&mut self, index: SlotIndex) {
        self.release(index);
    }

    /// Has a group go out as far as it can, and stay there; or lets it come back.
    pub(crate) fn freeze(&mut self, group: GroupIndex, on: bool) {
        if on {
            self.frozen.insert(group)
        } else {
            self.frozen.remove(&group)
        };
    }

    /// Asks the processes of a group and of those below it to bring in what is swapped, as far as
    /// there is room.
    pub fn preload(&mut self, group: GroupIndex) {
        for (_, slot) in self.members_of(group) {
            slot.control.preload.store(1, Relaxed);
            slot.wake();
        }
    }

    /// How many of them have not done so yet; with `give_up`, they shall leave it.
    pub fn preloading(&self, group: GroupIndex, give_up: bool) -> usize {
        let busy: Vec<_> = self
            .members_of(group)
            .filter(|(_, slot)| slot.control.preload.load(Relaxed) != 0)
            .collect();
        if give_up {
            busy.iter().for_each(|(_, slot)| slot.control.preload.store(0, Relaxed));
        }
        busy.len()
    }

    /// The managed processes of a group and of those below it.
    fn members_of(
        &self,
        group: GroupIndex,
    ) -> impl Iterator<Item = (SlotIndex, &'static ProcSlot)> {
        let engaged = self.segment.claimed().filter(|(_, slot)| slot.state() == ProcState::Engaged);
        engaged.filter(move |(_, slot)| {
            self.groups.ancestry(self.places.of(slot.pid.load(Relaxed))).any(|above| above == group)
        })
    }

    /// The groups that stay out.
    pub(crate) fn frozen(&self) -> impl Iterator<Item = GroupIndex> {
        self.frozen.iter().copied()
    }

    /// Takes memory from a group until `bytes` went out; `done` is told how much did.
    pub fn reclaim(&mut self, group: GroupIndex, bytes: u64, done: Sender<ReclaimOutcome>) {
        self.squeezes.begin(group, bytes, done, &self.groups);
    }
}

/// Where a bound stands in the division of the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum BudgetNode {
    Group(GroupIndex),
    Run(u32),
}

/// Carries a limit over to a process, if it is news, and asks it to be managed, if it was not yet.
/// True when it was news.
fn command(slot: &ProcSlot, limit: u64, engage: bool) -> bool {
    // All of it is on its way in.
    let limit = if slot.control.detach.load(Relaxed) != 0 { NO_LIMIT } else { limit };
    let old = slot.control.limit_bytes.load(Relaxed);
    let changes = engage || old.abs_diff(limit) > old / 100;
    if changes {
        slot.control.limit_bytes.store(limit, Relaxed);
        if engage {
            slot.control.engage.store(1, Relaxed);
        }
        // Its release makes both stores visible to the thread that wakes.
        slot.wake();
    }
    changes
}

#[cfg(test)]
mod tests;
