//! The thread that keeps processes within their budgets: those of one run, or of all runs of a
//! host.
//!
//! Owns the members ([`ProcessTree`]), the groups and which processes are in them (`groups`), the
//! runs with the totals of their processes that are gone (`runs`), what is remembered of each
//! process slot (`sample`), and the swap areas' holes. Each tick it reads what every process uses,
//! lets `policy::decide` judge, and carries out the decision through the segment: `limit_bytes`,
//! `engage`, the `wake_seq`, and what follows from a process's group.
//!
//! Invariants
//! 1. A slot is released only if the kernel says at that moment that its process is gone
//!    (`life`): the number of a dead process may belong to another one, and a failed question
//!    says nothing. Its counters go into the totals of its run first.
//! 2. An area's bytes are freed only while no process can lease their extent
//!    ([`Segment::while_unheld`]).
//! 3. Groups and tiers change between two ticks only.
//! 4. Only members of the tree, as the kernel reports it, are charged or killed; a number in the
//!    segment makes no process one. What the segment says of amounts is bounded before it is added
//!    up (docs/segment.md).
//!
//! Locks: none; the rest of the supervisor talks to the thread through a channel.

pub(crate) mod detach;
mod flow;
mod groups;
mod large;
mod runs;
mod sample;
mod slots;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use swaptide_ipc::{
    Counter, EXTENT_BYTES, GroupIndex, NO_LIMIT, ProcSlot, ProcState, Segment, SlotIndex, Transport,
};
use swaptide_sys::PAGE_SIZE;

use self::groups::{BudgetNode, GroupControl, Nodes};
use self::large::LargeProcesses;
pub use self::runs::ManagedRun;
use self::runs::{RunUsage, Runs};
use self::sample::Watches;
use self::slots::SlotOwners;
use crate::cgroup::tree::{GroupError, GroupPath, GroupTree, GroupView};
use crate::memctl::cgroup_limit::CgroupLimit;
use crate::memctl::policy::{self, Process, Sharing};
use crate::memctl::proactive::IdleReclaim;
use crate::memctl::processes::{Life, ProcessTree, life};
pub use crate::memctl::reclaim_requests::ReclaimOutcome;
use crate::memctl::shared_pager::SharedPager;
use crate::memctl::stall::OnStall;
use crate::memctl::strict::Reason;
use crate::report::series::PageTraffic;
use crate::report::totals::{ProcessView, Totals, View};
use crate::swap::areas::Areas;

/// The time that a client waits for the controller: a tick of many processes on a busy machine.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How soon a process that is started is looked at where memory is short, and how often at first;
/// where another one was started within [`STARTS_AGE`].
const START_INTERVAL: Duration = Duration::from_millis(1);
const STARTS_AGE: Duration = Duration::from_secs(2);
const YOUNG_AGE: Duration = Duration::from_millis(20);

/// A request to the controller.
pub enum ControllerRequest {
    /// A process joined: look at it now.
    Joined(u32),
    /// Do this between two ticks.
    Do(Box<dyn FnOnce(&mut MemoryController) + Send>),
    /// End the controller's thread.
    Stop,
}

/// Asks the controller something and waits; `None` when it has ended.
pub fn ask<T: Send + 'static>(
    controller: &Sender<ControllerRequest>,
    f: impl FnOnce(&mut MemoryController) -> T + Send + 'static,
) -> Option<T> {
    let (answer, result) = channel();
    let task = move |controller: &mut MemoryController| {
        // The client may have stopped waiting.
        let _ = answer.send(f(controller));
    };
    controller.send(ControllerRequest::Do(Box::new(task))).ok()?;
    result.recv_timeout(REQUEST_TIMEOUT).ok()
}

/// Those of some processes that are kept; none where the controller has ended.
pub(crate) fn kept(controller: &Sender<ControllerRequest>, pids: Vec<u32>) -> Vec<u32> {
    let kept = |controller: &mut MemoryController| {
        pids.into_iter().filter(|pid| controller.keeps(*pid)).collect()
    };
    ask(controller, kept).unwrap_or_default()
}

/// A member at a tick.
pub(super) struct TickMember {
    pub(super) pid: u32,
    pub(super) slot: Option<SlotIndex>,
    pub(super) run: u32,
    pub(super) group: GroupIndex,
}

/// The memory controller: its thread owns all of this.
pub struct MemoryController {
    segment: &'static Segment,
    areas: Arc<Areas>,
    areas_epoch: u32,
    budget: u64,
    /// The largest so far.
    most_budget: u64,
    cgroup_limit: CgroupLimit,
    tree: ProcessTree,
    owners: SlotOwners,
    groups: GroupControl,
    runs: Runs,
    watches: Watches,
    last_tick: Instant,
    /// Memory is short, and a program may be started that fills it at once.
    awaits_starts: bool,
    /// Reports to the user of a run.
    say: Box<SayToRun>,
    large: LargeProcesses,
}

/// Reports one line to the user of a run.
pub(crate) type SayToRun = dyn Fn(&ManagedRun, &str) + Send;

impl MemoryController {
    /// A controller without runs.
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
            most_budget: budget,
            cgroup_limit: CgroupLimit::default(),
            tree: ProcessTree::default(),
            owners: SlotOwners::default(),
            groups: GroupControl::new(groups),
            runs: Runs::new(),
            watches: Watches::new(segment),
            last_tick: Instant::now(),
            awaits_starts: false,
            say: Box::new(|_, _| ()),
            large: LargeProcesses::default(),
        }
    }

    /// Reports processes that have this number of bytes, and by the other function those that load
    /// no library, have the agent, are to be managed, and grow fast.
    pub(crate) fn reporting(
        self,
        least: u64,
        report: Box<dyn Fn(u32) + Send>,
        report_engaged: Box<dyn Fn(u32) + Send>,
    ) -> MemoryController {
        MemoryController { large: LargeProcesses::new(least, report, report_engaged), ..self }
    }

    /// Reports by `say` what the user of a run must know at once.
    pub(crate) fn saying(self, say: Box<SayToRun>) -> MemoryController {
        MemoryController { say, ..self }
    }

    /// Counts shared memory, too.
    pub(crate) fn with_shared(mut self, shared: &'static SharedPager) -> MemoryController {
        self.watches.shared = Some(shared);
        self
    }

    /// Keeps within what the memory cgroups of this process leave, too: all that it keeps is in
    /// them.
    pub(crate) fn within_cgroups(self) -> MemoryController {
        MemoryController { cgroup_limit: CgroupLimit::of_own_cgroups(), ..self }
    }

    /// Keeps a run, too.
    pub fn add_run(&mut self, run: ManagedRun) {
        self.tree.add_root(run.root);
        self.tree.add_launcher(run.launcher, run.root);
        self.runs.add(run);
    }

    /// A running process of a run that is kept.
    pub(crate) fn attach(&mut self, pid: u32, root: u32) {
        self.tree.attach(pid, root);
    }

    /// The thread: ticks until it is told to stop or no client is left.
    pub fn run(mut self, requests: Receiver<ControllerRequest>) {
        // It only looks, but it must look in time.
        swaptide_sys::affinity::go_first();
        let mut next = Instant::now();
        loop {
            let rest = next.saturating_duration_since(Instant::now());
            let most = if self.awaits_starts { START_INTERVAL } else { rest };
            match requests.recv_timeout(rest.min(most)) {
                Ok(ControllerRequest::Joined(pid)) => drop(self.tree.admit(pid)),
                Ok(ControllerRequest::Do(task)) => {
                    self.tick();
                    task(&mut self);
                }
                Ok(ControllerRequest::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout)
                    if Instant::now() < next && !self.tree.may_have_grown() =>
                {
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            next = Instant::now() + self.tick();
        }
    }

    /// One look at everything; answers with the time until the next.
    fn tick(&mut self) -> Duration {
        let elapsed = self.last_tick.elapsed();
        self.last_tick = Instant::now();
        if std::mem::replace(&mut self.areas_epoch, self.segment.areas_epoch()) != self.areas_epoch
        {
            self.groups.tree.publish();
        }
        let slots = self.owners.look(self.segment);
        self.tree.look();
        for pid in slots.keys() {
            self.tree.admit(*pid);
        }
        for (pid, index) in &slots {
            let copied_nothing = sample::copied_nothing(self.segment.slot(*index));
            self.tree.discount_engine_faults(*pid, copied_nothing * PAGE_SIZE as u64);
        }
        let dead = self.tree.sample();
        self.groups.members.forget(&dead);
        for pid in self.tree.leaderless() {
            // If no other thread is left, the one that reads this ends the process.
            if let Some(slot) = slots.get(&pid) {
                self.segment.slot(*slot).signal_leader_exit();
            }
        }
        let pids: Vec<u32> = self.tree.pids().collect();
        let members: Vec<TickMember> =
            pids.into_iter().map(|pid| self.member(pid, slots.get(&pid).copied())).collect();
        // Regions are charged to the same cgroups, and count as used here, too.
        let regions = |member: &TickMember| self.watches.own_regions(member.slot);
        let resident =
            members.iter().map(|member| self.tree.used(member.pid) + regions(member)).sum();
        let left = self.cgroup_limit.look(resident).unwrap_or(u64::MAX);
        if left < self.budget {
            self.runs.note_cgroup_left(left);
        }
        let (bounds, nodes) = self.groups.bounds(self.budget.min(left), &self.runs);
        let processes: Vec<Process> =
            members.iter().map(|member| self.judge(member, &nodes, elapsed)).collect();
        // Not those of a process that lives and is no member: what it holds is needed, or the
        // segment lies, and then nothing is lost. Nor where the number of a dead member lives
        // again, for the slot may be the new process's by now, nor where the kernel cannot be
        // asked.
        let claimed: Vec<(SlotIndex, u32)> =
            self.segment.claimed().map(|(index, slot)| (index, slot.pid.load(Relaxed))).collect();
        for (index, pid) in claimed {
            if self.tree.contains(pid) {
                continue;
            }
            if life(pid) == Life::Gone {
                self.release(index);
            } else if dead.contains(&pid) {
                self.watches.forget(index, pid);
            }
        }
        if self.segment.audit_is_due() {
            self.audit();
        }
        self.areas.measure();
        let stalled = |index| self.watches.stalled(index);
        let usage = self.runs.note_peaks(self.segment, stalled, &members, &processes, self.budget);
        self.record(&usage, left, elapsed);
        let counted = self.watches.counted(&members, &processes);
        let is_near = policy::is_near(&bounds, &counted);
        let sizes = members.iter().zip(&processes);
        let sizes = sizes.map(|(member, process)| (member.pid, process.used));
        self.large.look(sizes, is_near, self.last_tick);
        self.awaits_starts = is_near && self.tree.found_within(STARTS_AGE);
        let decision = policy::decide(&bounds, &counted, elapsed);
        let sharing: Vec<Sharing> = members
            .iter()
            .map(|member| self.watches.sharing(&self.tree, member, elapsed))
            .collect();
        let lent = policy::cow_credit(&bounds, &counted, &sharing);
        for ((at, limit), fair) in decision.limits.iter().zip(&decision.fair) {
            let Some(index) = members[*at].slot else { continue };
            let has_limit =
                command(self.segment.slot(index), limit + lent[*at], decision.engage.contains(at));
            self.watches.note_limit(index, *fair, has_limit.then_some(lent[*at]));
        }
        self.say_looked(&members, &counted, &decision.engage);
        self.watches.has_looked = true;
        self.groups.bound_pools(self.segment, &members, &decision.limits);
        self.groups.account(&self.watches, &members, &processes, elapsed, |group| {
            nodes.get(&BudgetNode::Group(group)).is_some_and(|at| decision.starved.contains(at))
        });
        for root in self.runs.iter().map(|run| run.root).collect::<Vec<_>>() {
            self.enforce(root, &members, &processes);
            self.look_for_stalls(root, &members);
        }
        self.runs.forget_ended(&mut self.tree);
        let interval = policy::interval(&bounds, &counted);
        let is_young = is_near && self.tree.found_within(YOUNG_AGE);
        (if is_young { interval.min(START_INTERVAL) } else { interval })
            .min(self.groups.reclaims.step(&self.groups.tree))
            .min(self.runs.stall_interval().unwrap_or(Duration::MAX))
    }

    /// Says that processes were looked at, and which of them are to be managed now.
    fn say_looked(&self, members: &[TickMember], processes: &[Process], engage: &[usize]) {
        for (at, member) in members.iter().enumerate() {
            let Some(slot) = member.slot.map(|index| self.segment.slot(index)) else { continue };
            // With the load of who waits for it: who sees it sees the order to be managed.
            slot.control.looked.store(1, Release);
            if engage.contains(&at) && slot.agent.past_libc.load(Relaxed) != 0 {
                self.large.note_engaged(member.pid, processes[at].growth);
            }
        }
    }

    /// Returns the state of a process; a new one gets its group.
    fn member(&mut self, pid: u32, slot: Option<SlotIndex>) -> TickMember {
        let run = self.tree.root_of(pid);
        let of_run = self.runs.get(run).and_then(|kept| kept.run.group);
        let group = self.groups.assign(pid, of_run, slot.map(|index| self.segment.slot(index)));
        TickMember { pid, slot, run, group }
    }

    /// Returns a process's demand on the budget.
    fn judge(&mut self, member: &TickMember, nodes: &Nodes, elapsed: Duration) -> Process {
        let node = groups::node_of(member, &self.runs, nodes);
        let MemoryController { tree, runs, watches, budget, .. } = self;
        watches.judge(tree, runs, member, node, *budget, elapsed)
    }

    /// The runs that are kept.
    pub fn runs(&self) -> impl Iterator<Item = &ManagedRun> {
        self.runs.iter()
    }

    /// The run of a process: one in it, or the one that the user started.
    pub fn run_of(&self, pid: u32) -> Option<&ManagedRun> {
        let by_launcher = self.runs().find(|run| run.launcher == pid || run.root == pid);
        by_launcher.or_else(|| self.runs.get(self.tree.root_of(pid)).map(|kept| &kept.run))
    }

    /// Whose a process is that is kept here.
    pub(crate) fn owner_of(&self, pid: u32) -> Option<u32> {
        self.runs.get(self.tree.root_of(pid)).map(|kept| kept.run.uid)
    }

    /// Adds what this look has shown to the series of the runs that are recorded. `left`: what the
    /// memory cgroups leave.
    fn record(&mut self, usage: &BTreeMap<u32, RunUsage>, left: u64, elapsed: Duration) {
        let roots = self.runs.recorded();
        if roots.is_empty() {
            return;
        }
        let leased = |transport: Transport| {
            let areas = self.segment.areas().filter(|(_, area)| area.transport() == transport);
            areas.map(|(_, area)| u64::from(area.used()) * EXTENT_BYTES).sum::<u64>()
        };
        let (file, network) = (leased(Transport::File), leased(Transport::Nbd));
        for root in roots {
            let Some(kept) = self.runs.get(root) else { continue };
            let Some(recorder) = &kept.recorder else { continue };
            let at = recorder.at(self.last_tick);
            let counted = recorder.is_due(at).then(|| self.traffic(root));
            let usage = usage.get(&root).copied().unwrap_or_default();
            let levels = usage.levels(self.most_of(&kept.run).min(left), file, network);
            let stall_us = usage.stalled.of_time(elapsed);
            if let Some(recorder) = self.runs.get_mut(root).and_then(|kept| kept.recorder.as_mut())
            {
                recorder.look(at, levels, stall_us, counted);
            }
        }
    }

    /// What a run has counted so far.
    fn traffic(&self, root: u32) -> PageTraffic {
        let Some(kept) = self.runs.get(root) else { return PageTraffic::default() };
        let slots: Vec<&ProcSlot> = self.run_slots(root).collect();
        PageTraffic::of(|counter| {
            let before = kept.totals.get(counter);
            slots.iter().fold(before, |sum, slot| sum.saturating_add(slot.counted(counter)))
        })
    }

    /// The slots of a run's processes.
    fn run_slots(&self, root: u32) -> impl Iterator<Item = &'static ProcSlot> {
        let slots = self.owners.iter().map(|(pid, index)| (pid, self.segment.slot(index)));
        // One that was given back since has been counted.
        slots
            .filter(move |(pid, slot)| {
                slot.pid.load(Relaxed) == *pid
                    && self.tree.contains(*pid)
                    && self.tree.root_of(*pid) == root
            })
            .map(|(_, slot)| slot)
    }

    /// Ends a run that was started with `--strict` and has more than it may (see
    /// [`strict`](crate::memctl::strict)).
    fn enforce(&mut self, root: u32, members: &[TickMember], processes: &[Process]) {
        let Some(most) =
            self.runs.get(root).filter(|kept| kept.run.strict).map(|kept| self.most_of(&kept.run))
        else {
            return;
        };
        let own = || members.iter().zip(processes).filter(|(member, _)| member.run == root);
        let counted: u64 = own().map(|(_, process)| process.used).sum();
        let anonymous: u64 =
            own().map(|(member, process)| process.used.min(self.tree.used(member.pid))).sum();
        let full = self.totals(root).get(Counter::SwapFull);
        let Some(kept) = self.runs.get_mut(root) else { return };
        let now = Instant::now();
        let pids = own().map(|(member, _)| member.pid);
        let shared = kept.excess.mapped_shared(pids, most.saturating_sub(anonymous), now);
        let used = counted.max(anonymous.saturating_add(shared));
        if let Some(reason) = kept.excess.look(used, most, full > kept.swap_full, now) {
            kept.totals.strict_kill = true;
            if reason == Reason::OverBudget {
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

    /// Reports processes of a run that make almost no progress for lack of memory, and does what
    /// `--on-stall` says (see [`stall`](crate::memctl::stall)).
    fn look_for_stalls(&mut self, root: u32, members: &[TickMember]) {
        let Some(kept) = self.runs.get_mut(root) else { return };
        if kept.totals.waits.is_killed {
            // Also the processes that it has started since.
            self.tree.kill_all(root);
            return;
        }
        let (policy, at) = (kept.run.stall, Instant::now());
        let own = members.iter().filter(|member| member.run == root);
        kept.stalls.keep_only(|pid| self.tree.contains(pid));
        let mut found = Vec::new();
        for member in own {
            let Some(slot) = member.slot.map(|index| self.segment.slot(index)) else { continue };
            if slot.state() == ProcState::Engaged {
                found.extend(kept.stalls.look(member.pid, slot, policy, at));
            }
        }
        let waits = &mut kept.totals.waits;
        waits.lost_us = waits.lost_us.max(kept.stalls.most_lost_us());
        if found.is_empty() {
            return;
        }
        waits.stalls.count += found.len() as u64;
        waits.stalls.last = found.last().cloned();
        waits.is_killed |= policy.then == OnStall::Kill;
        let run = kept.run.clone();
        let budget = self.chosen_budget(&run);
        for verdict in found {
            (self.say)(&run, &(verdict.describe(budget) + policy.then.what_is_done()));
        }
        match policy.then {
            OnStall::Continue => {}
            OnStall::Stop => self.tree.signal_all(root, libc::SIGSTOP),
            OnStall::Kill => self.tree.kill_all(root),
        }
    }

    /// The budget that the user of a run has chosen: what `--ram` said under a daemon, or the whole
    /// budget where the run has this controller for itself.
    fn chosen_budget(&self, run: &ManagedRun) -> Option<u64> {
        run.max.or_else(|| (run.root == std::process::id()).then_some(self.budget))
    }

    /// The most that a run may have.
    fn most_of(&self, run: &ManagedRun) -> u64 {
        let group =
            run.group.and_then(|group| self.groups.tree.least(group, |settings| settings.ram_max));
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

    /// A run, all but what the controller does not know: its number, name and age.
    pub fn view(&self, root: u32) -> View {
        let totals = self.totals(root);
        let slots: HashMap<u32, (SlotIndex, &ProcSlot)> = self
            .owners
            .iter()
            .map(|(pid, index)| (pid, (index, self.segment.slot(index))))
            .collect();
        let process = |pid: u32| {
            let resident_bytes = self.tree.used(pid);
            let group = self
                .groups
                .tree
                .get(self.groups.members.of(pid))
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
            let mut own = Totals::default();
            own.add(slot);
            ProcessView {
                pid,
                group,
                state: state.into(),
                limit_bytes: ProcSlot::bytes(&slot.control.limit_bytes),
                fair_bytes: self.watches.fair(*index, pid),
                resident_bytes,
                pool_bytes: ProcSlot::bytes(&slot.usage.pool_bytes),
                swapped_pool_bytes: ProcSlot::bytes(&slot.usage.swapped_pool_bytes),
                swapped_file_bytes: ProcSlot::bytes(&slot.usage.swapped_file_bytes),
                pages_in: own.pages_in(),
                pages_out: own.pages_out(),
                faults: own.get(Counter::Pgmajfault),
                stall_us: own.get(Counter::StallUs),
                fault_us: own.fault_times(),
            }
        };
        let processes: Vec<ProcessView> =
            self.tree.pids().filter(|pid| self.tree.root_of(*pid) == root).map(process).collect();
        View {
            budget_bytes: self.runs.get(root).map_or(self.budget, |kept| self.most_of(&kept.run)),
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
            stalls: totals.waits.stalls.clone(),
            ..View::default()
        }
    }

    /// Returns the totals of a run so far.
    pub fn totals(&self, root: u32) -> Totals {
        let mut totals =
            self.runs.get(root).map_or_else(Totals::default, |kept| kept.totals.clone());
        totals.areas = self.areas.view().into_iter().map(|(_, view)| view).collect();
        self.run_slots(root).for_each(|slot| totals.add(slot));
        let groups = &self.groups.tree;
        totals.groups = groups.iter().map(|(index, _)| groups.view(index)).collect();
        totals
    }

    /// Returns the totals of a run that ends, with its series if it was recorded.
    pub fn final_totals(&self, root: u32) -> Totals {
        let mut totals = self.totals(root);
        let recorder = self.runs.get(root).and_then(|kept| kept.recorder.as_ref());
        totals.series = recorder
            .map(|recorder| recorder.series(PageTraffic::of(|counter| totals.get(counter))));
        totals
    }

    fn release(&mut self, index: SlotIndex) {
        let pid = self.segment.slot(index).pid.load(Relaxed);
        // A process that came and went between two ticks was seen in no run; where there is only
        // one, it was that.
        let run = self.watches.forget(index, pid).or(self.runs.only());
        if let Some(kept) = run.and_then(|run| self.runs.get_mut(run)) {
            kept.totals.add(self.segment.slot(index));
        }
        let mut freed = Vec::new();
        self.segment.release(index, |extent| freed.push(extent));
        for extent in freed {
            self.areas.give_back(extent);
        }
    }

    /// The groups and the tiers.
    pub fn groups(&mut self) -> &mut GroupTree {
        &mut self.groups.tree
    }

    /// Removes a group that no process is in, managed or not. The next group that is made may get
    /// its number.
    ///
    /// # Errors
    /// As of [`GroupTree::remove`].
    pub(crate) fn remove_group(&mut self, path: &GroupPath) -> Result<(), GroupError> {
        self.groups.remove(path)
    }

    /// True if a process is kept here.
    pub(crate) fn keeps(&self, pid: u32) -> bool {
        self.tree.contains(pid)
    }

    /// Moves a process that is kept here to a group, where it and its later children stay.
    pub(crate) fn move_process(&mut self, pid: u32, group: GroupIndex) {
        if self.keeps(pid) {
            self.groups.members.fix(pid, group);
        }
    }

    /// The groups from one downwards, as they are.
    ///
    /// # Errors
    /// [`GroupError::NotFound`].
    pub fn group_views(&self, path: &GroupPath) -> Result<Vec<GroupView>, GroupError> {
        let groups = &self.groups.tree;
        let top = groups.find(path)?;
        let below =
            groups.iter().filter(|(index, _)| groups.ancestry(*index).any(|above| above == top));
        Ok(below.map(|(index, _)| groups.view(index)).collect())
    }

    /// The swap areas that the processes use.
    pub fn areas(&self) -> &Areas {
        &self.areas
    }

    /// Bytes that all processes together may have.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Has another budget from here on.
    pub(crate) fn set_budget(&mut self, budget: u64) {
        self.budget = budget;
        self.most_budget = self.most_budget.max(budget);
        self.segment.header.budget_bytes.store(budget, Relaxed);
    }

    /// The largest budget so far: what peaks are compared with.
    pub(crate) fn most_budget(&self) -> u64 {
        self.most_budget
    }

    /// Whether and when idle groups lose memory.
    pub(crate) fn set_idle(&mut self, rule: Option<IdleReclaim>) {
        self.groups.idle.set_rule(rule);
    }

    /// Takes over a live process of the previous supervisor, in this group. The caller has learned
    /// from the kernel that the process has the segment mapped.
    pub(crate) fn adopt(&mut self, pid: u32, group: GroupIndex) {
        if self.groups.tree.get(group).is_some() && self.tree.admit_known(pid) {
            self.groups.members.fix(pid, group);
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
    pub(crate) fn release_slot(&mut self, index: SlotIndex) {
        self.release(index);
    }

    /// Has a group go out as far as it can, and stay there; or lets it come back.
    pub(crate) fn freeze(&mut self, group: GroupIndex, on: bool) {
        if on {
            self.groups.frozen.insert(group)
        } else {
            self.groups.frozen.remove(&group)
        };
    }

    /// Asks the processes of a group and of those below it to bring in what is swapped, as far as
    /// there is room.
    pub fn preload(&mut self, group: GroupIndex) {
        for slot in self.groups.slots_of(self.segment, group) {
            slot.control.preload.store(1, Relaxed);
            slot.wake();
        }
    }

    /// How many of them have not done so yet; with `give_up`, they shall leave it.
    pub fn preloading(&self, group: GroupIndex, give_up: bool) -> usize {
        let slots = self.groups.slots_of(self.segment, group);
        let busy: Vec<_> = slots.filter(|slot| slot.control.preload.load(Relaxed) != 0).collect();
        if give_up {
            busy.iter().for_each(|slot| slot.control.preload.store(0, Relaxed));
        }
        busy.len()
    }

    /// The groups that stay out.
    pub(crate) fn frozen(&self) -> impl Iterator<Item = GroupIndex> {
        self.groups.frozen.iter().copied()
    }

    /// Takes memory from a group until `bytes` went out; `done` is told how much did.
    pub fn reclaim(&mut self, group: GroupIndex, bytes: u64, done: Sender<ReclaimOutcome>) {
        self.groups.reclaims.begin(group, bytes, done, &self.groups.tree);
    }
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
