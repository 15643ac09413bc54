//! What the controller makes of one process at each look: how it stands, what it uses, how hard it
//! presses, and what it shares.
//!
//! Owns what is remembered of a slot between two looks (`Watch`). Everything else is read from
//! the segment and the tree.
//!
//! Invariants
//! 1. A watch is of one process: a slot that another process has now starts over.
//! 2. What is wanted before a fork says nothing of the copy-on-write group after it: pressure
//!    begins at none then.
//!
//! Locks: none; the controller's thread alone.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use swaptide_ipc::{Counter, ProcSlot, ProcState, RefaultHistogram, Segment, SlotIndex};
use swaptide_sys::PAGE_SIZE;
use swaptide_sys::process::proc_info;
use swaptide_sys::thread::now;

use crate::cgroup::psi::TimeShare;
use crate::memctl::controller::TickMember;
use crate::memctl::controller::flow::{MemoryExtent, PageCounts, PageFlow, WorkingsetEstimate};
use crate::memctl::controller::runs::Runs;
use crate::memctl::policy::{self, Process, RecentSum, Sharing, StableMin, Standing};
use crate::memctl::processes::ProcessTree;
use crate::memctl::shared_pager::SharedPager;
use crate::report::working_set::refaults_since;

/// A process that shares this much with another, and has as much in compressed memory, is of a
/// copy-on-write group; it stays one as long as it shares half of that.
const MIN_COW_GROUP_BYTES: u64 = 8 << 20;

/// A wait that continues for so long may be that of a process which is stopped: then it is none.
const LONG_STALL: Duration = Duration::from_millis(100);

/// What is remembered of a slot between two ticks.
#[derive(Default)]
struct Watch {
    pid: u32,
    run: u32,
    flow: PageFlow,
    workingset: WorkingsetEstimate,
    /// It shares much since a fork, compressed memory among it (see
    /// [`policy`](crate::memctl::policy)).
    in_cow_group: bool,
    pressure: u64,
    used: u64,
    waits: Waits,
    /// What of its limit is lent, and what it shared lately.
    lent: u64,
    stable: StableMin,
    /// What came to it by faults while it shares pages, and what of that was copied lately.
    grown: Option<i64>,
    lately: RecentSum,
    /// Raised whenever it is seen to be in a copy-on-write group.
    word: u32,
    /// What it would have if all were divided at once.
    fair: u64,
}

/// How long threads waited for memory.
#[derive(Clone, Copy, Default)]
struct Waits {
    /// In microseconds, so far.
    us: u64,
    /// What part of the time that was since the last look, and lately.
    part: TimeShare,
    lately: TimeShare,
}

impl Waits {
    fn follow(&mut self, us: u64, elapsed: Duration) {
        self.part = TimeShare::of(us.saturating_sub(self.us), elapsed);
        self.us = us.max(self.us);
        self.lately = self.lately.averaged(self.part, elapsed);
    }
}

/// What a process shows that it wants, at a look.
struct ShownNeed {
    /// Bytes by which it has grown.
    grown: u64,
    /// Bytes that it has shown to work on.
    workingset: u64,
}

/// What is seen of a process at a look.
struct ProcessSample {
    used: u64,
    pages: PageCounts,
    in_cow_group: bool,
    stalled_us: u64,
    /// The most that its pressure can count for.
    most: u64,
    /// What it has, also of what it shares since a fork.
    extent: MemoryExtent,
}

/// A process without an engine, of which only the memory it uses is known.
fn unmanaged(group: usize, used: u64, growth: u64) -> Process {
    Process {
        group,
        standing: Standing::Unmanaged,
        used,
        pressure: 0,
        fixed: 0,
        swapped: 0,
        limit: 0,
        growth,
        engine_goes_first: false,
        kept: 0,
        workingset: 0,
    }
}

/// Bytes a second.
fn rate(bytes: u64, elapsed: Duration) -> u64 {
    (bytes as f64 / elapsed.as_secs_f64().max(1e-4)) as u64
}

/// What a process of a copy-on-write group keeps: of compressed memory its own part, at least half;
/// and a little to work with.
fn kept_bytes(pool: u64, shared: u64, fixed: u64) -> u64 {
    pool - shared.min(pool / 2) + fixed.min(policy::FLOOR_BYTES) + policy::FLOOR_BYTES
}

impl Watch {
    /// Takes over what is seen now, `elapsed` after the last look.
    fn follow(&mut self, seen: ProcessSample, elapsed: Duration) -> ShownNeed {
        if std::mem::replace(&mut self.in_cow_group, seen.in_cow_group) != seen.in_cow_group {
            // A fork: what either wanted before says nothing.
            self.flow = PageFlow::new(seen.pages);
            self.pressure = if seen.in_cow_group { 0 } else { self.pressure };
        }
        let moves = self.flow.follow(seen.pages, elapsed);
        let bytes = moves.pressing(seen.in_cow_group).saturating_mul(PAGE_SIZE as u64);
        let rate = bytes as f64 / elapsed.as_secs_f64().max(1e-4);
        let (before, rate) = (self.pressure.min(seen.most), (rate as u64).min(seen.most));
        self.pressure = if seen.in_cow_group {
            policy::average(before, rate, elapsed)
        } else {
            policy::smooth(before, rate, elapsed)
        };
        self.waits.follow(seen.stalled_us, elapsed);
        let workingset = if seen.in_cow_group {
            // What it worked on before the fork it may keep, as long as it does. What comes back
            // meanwhile is the other processes', too.
            self.workingset.follow(moves, seen.extent, 0, elapsed).min(seen.used)
        } else {
            self.workingset.follow(moves, seen.extent, seen.most, elapsed)
        };
        let grown = seen.used.saturating_sub(std::mem::replace(&mut self.used, seen.used));
        ShownNeed { grown, workingset }
    }
}

/// Minor faults of a process so far that copied nothing: those that its engine made, and those that
/// it answered.
pub(super) fn copied_nothing(slot: &ProcSlot) -> u64 {
    [Counter::EngineFaults, Counter::Pgmajfault].iter().map(|counter| slot.counted(*counter)).sum()
}

/// Of the `refaults` of a process so far, those of pages that would have stayed with the whole
/// budget. The pager of shared memory has no distances: all of them.
fn near_refaults(slot: &ProcSlot, refaults: u64, budget: u64) -> u64 {
    let counts = refaults_since(slot, None);
    let is_near = |bucket: &usize| {
        RefaultHistogram::bound(*bucket).saturating_mul(PAGE_SIZE as u64) <= budget
    };
    let near = (0..counts.len()).take_while(is_near).map(|bucket| counts[bucket]);
    if counts.iter().all(|pages| *pages == 0) { refaults } else { near.sum() }
}

/// How the process of a slot stands to the budget.
fn standing(slot: &ProcSlot) -> Standing {
    match (slot.state(), slot.control.engage.load(Relaxed)) {
        (ProcState::Engaged, _) => Standing::Engaged,
        (ProcState::Watching, 0) if slot.engage_now.load(Relaxed) != 0 => Standing::Asking,
        (ProcState::Watching, 0) => Standing::Watching,
        (ProcState::Watching, _) => Standing::Engaged,
        (ProcState::Refused | ProcState::Free | ProcState::Detached, _) => Standing::Unmanaged,
    }
}

/// What is remembered of all slots.
pub(super) struct Watches {
    pub(super) segment: &'static Segment,
    by_slot: HashMap<SlotIndex, Watch>,
    /// Processes that were counted as refused.
    refused: HashSet<u32>,
    /// A process that is first seen from now on was not there before.
    pub(super) has_looked: bool,
    /// The pager of shared memory, where it is this process's.
    pub(super) shared: Option<&'static SharedPager>,
    /// What the pager of another process can have at most: all memory there is.
    most_shared: u64,
}

impl Watches {
    pub(super) fn new(segment: &'static Segment) -> Watches {
        Watches {
            segment,
            by_slot: HashMap::new(),
            refused: HashSet::new(),
            has_looked: false,
            shared: None,
            most_shared: crate::units::ram_total(),
        }
    }

    /// Bytes of shared memory in memory that a slot stands for, if it is this process's pager's.
    pub(super) fn own_regions(&self, slot: Option<SlotIndex>) -> u64 {
        slot.zip(self.shared).map_or(0, |(slot, shared)| shared.resident_bytes(slot))
    }

    /// The slot's process is gone. Gives its run, if it was watched.
    pub(super) fn forget(&mut self, index: SlotIndex, pid: u32) -> Option<u32> {
        self.refused.remove(&pid);
        self.by_slot.remove(&index).filter(|watch| watch.pid == pid).map(|watch| watch.run)
    }

    /// What a process would have if all were divided at once.
    pub(super) fn fair(&self, index: SlotIndex, pid: u32) -> u64 {
        self.by_slot.get(&index).filter(|watch| watch.pid == pid).map_or(0, |watch| watch.fair)
    }

    /// What part of the time since the last look its threads have waited for memory.
    pub(super) fn stalled(&self, index: SlotIndex) -> TimeShare {
        self.by_slot.get(&index).map_or_else(TimeShare::default, |watch| watch.waits.part)
    }

    /// Notes what a process would have, and, where it got a new limit, what of that is
    /// lent.
    pub(super) fn note_limit(&mut self, index: SlotIndex, fair: u64, lent: Option<u64>) {
        if let Some(watch) = self.by_slot.get_mut(&index) {
            watch.fair = fair;
            watch.lent = lent.unwrap_or(watch.lent);
        }
    }

    /// What is divided: processes that were detached take nothing of the budget, or those that are
    /// still managed would have to pay for them.
    pub(super) fn counted(&self, members: &[TickMember], processes: &[Process]) -> Vec<Process> {
        let is_let_go = |member: &TickMember| {
            member.slot.is_some_and(|index| self.segment.slot(index).state() == ProcState::Detached)
        };
        let used = |member: &TickMember, process: &Process| {
            if is_let_go(member) { 0 } else { process.used }
        };
        members
            .iter()
            .zip(processes)
            .map(|(member, process)| Process { used: used(member, process), ..*process })
            .collect()
    }

    /// What a process asks of the budget.
    pub(super) fn judge(
        &mut self,
        tree: &ProcessTree,
        runs: &mut Runs,
        member: &TickMember,
        group: usize,
        budget: u64,
        elapsed: Duration,
    ) -> Process {
        let pid = member.pid;
        let of_shared = |slot: SlotIndex| match self.shared {
            Some(shared) => shared.resident_bytes(slot),
            // Another process's pager says how it stands.
            None => self.segment.slot(slot).usage.shared_bytes.load(Relaxed).min(self.most_shared),
        };
        let used = tree.used(pid) + member.slot.map_or(0, of_shared);
        let Some(index) = member.slot else {
            return unmanaged(group, used, rate(tree.gained(pid), elapsed));
        };
        let slot = self.segment.slot(index);
        let standing = standing(slot);
        if slot.state() == ProcState::Refused
            && self.refused.insert(pid)
            && let Some(kept) = runs.get_mut(member.run)
        {
            kept.totals.refused += 1;
        }
        let (shared, pool) = (tree.shared(pid), ProcSlot::bytes(&slot.usage.pool_bytes));
        let in_cow_group = self.is_in_cow_group(index, pid, shared.min(pool));
        let pages = self.page_counts(index, pid, budget);
        let at = now();
        if slot.stalls_for(at) > LONG_STALL && proc_info(pid).is_some_and(|info| info.stopped) {
            slot.restart_stall(at);
        }
        let stalled_us = slot.stalled_us(at);
        let began_small = self.has_looked && slot.forked_from.load(Relaxed) == 0;
        // A program that was not there before has from lately what it has gained since it was seen
        // without a place. A fork begins with much.
        let before = used.saturating_sub(if began_small { tree.gained(pid) } else { 0 });
        let new = || Watch {
            pid,
            run: member.run,
            flow: PageFlow::new(pages),
            in_cow_group,
            used: before,
            waits: Waits { us: stalled_us, ..Waits::default() },
            ..Watch::default()
        };
        let swapped = ProcSlot::bytes(&slot.usage.swapped_pool_bytes)
            + ProcSlot::bytes(&slot.usage.swapped_file_bytes);
        let watch = self.by_slot.entry(index).or_insert_with(new);
        if watch.pid != pid {
            *watch = new();
        }
        let limit = ProcSlot::bytes(&slot.control.limit_bytes).saturating_sub(watch.lent);
        // More than is out, or than there is, counts for no more, and would only last longer.
        let wanted = watch.follow(
            ProcessSample {
                used,
                pages,
                in_cow_group,
                stalled_us,
                most: swapped.min(budget),
                extent: MemoryExtent::new(used.saturating_add(shared), pool, swapped),
            },
            elapsed,
        );
        let growth = match standing {
            Standing::Watching => rate(wanted.grown, elapsed),
            _ => 0,
        };
        let moves = [&slot.usage.managed_bytes, &slot.usage.shared_bytes, &slot.usage.pool_bytes]
            .map(ProcSlot::bytes);
        let fixed = moves.iter().fold(used, |rest, bytes| rest.saturating_sub(*bytes));
        // A process that waits for a slow device moves few bytes, and wants what is out no less.
        let pressure = watch.pressure.max(watch.waits.lately.of_bytes(swapped));
        let kept = if in_cow_group { kept_bytes(pool, shared, fixed).min(used) } else { 0 };
        Process {
            group,
            standing,
            used,
            pressure,
            fixed,
            swapped,
            limit,
            growth,
            engine_goes_first: slot.agent.goes_first.load(Relaxed) != 0,
            kept,
            workingset: wanted.workingset,
        }
    }

    /// The pages of a process so far, `near` for this budget.
    fn page_counts(&self, index: SlotIndex, pid: u32, budget: u64) -> PageCounts {
        let slot = self.segment.slot(index);
        // Read first: an engine counts what went out when it is no longer there, so hardly a page
        // counts twice.
        let steals = slot.counted(Counter::Pgsteal);
        let resident = ProcSlot::bytes(&slot.usage.managed_bytes) / PAGE_SIZE as u64;
        let refaults = slot.counted(Counter::WorkingsetRefault);
        let before = self.by_slot.get(&index).filter(|watch| watch.pid == pid);
        let near = match before.map(|watch| &watch.flow) {
            Some(flow) if flow.refaults() == refaults => flow.near(),
            _ => near_refaults(slot, refaults, budget),
        };
        PageCounts { refaults, near, steals, resident }
    }

    /// Whether a process has as much in common with others as one of their copy-on-write group.
    /// `common`: bytes of compressed memory that are shared. One that was has half to lose.
    fn is_in_cow_group(&self, index: SlotIndex, pid: u32, common: u64) -> bool {
        let was =
            self.by_slot.get(&index).is_some_and(|watch| watch.pid == pid && watch.in_cow_group);
        common >= if was { MIN_COW_GROUP_BYTES / 2 } else { MIN_COW_GROUP_BYTES }
    }

    /// What a process has of pages that others have too.
    pub(super) fn sharing(
        &mut self,
        tree: &ProcessTree,
        member: &TickMember,
        elapsed: Duration,
    ) -> Sharing {
        let Some(index) = member.slot else { return Sharing::default() };
        // What engines make their own to take it out is not to come twice.
        let slot = self.segment.slot(index);
        let unshared = slot.counted(Counter::PagesUnshared) + copied_nothing(slot);
        let Some(watch) = self.by_slot.get_mut(&index) else { return Sharing::default() };
        let grown =
            tree.grown(member.pid).map(|bytes| bytes as i64 - (unshared * PAGE_SIZE as u64) as i64);
        let before = std::mem::replace(&mut watch.grown, grown);
        // A process that begins to share had all that before.
        let copied = grown.zip(before).map_or(0, |(grown, before)| (grown - before).max(0) as u64);
        let shared = tree.shared(member.pid);
        let stable = watch.stable.follow(shared, elapsed);
        watch.word = watch.word.wrapping_add(1).max(1);
        slot.control.cow_hint.store(if watch.in_cow_group { watch.word } else { 0 }, Relaxed);
        Sharing {
            bytes: if watch.in_cow_group { shared } else { stable },
            lent: watch.lent,
            in_cow_group: watch.in_cow_group,
            copied: watch.lately.add(copied, elapsed),
        }
    }
}
