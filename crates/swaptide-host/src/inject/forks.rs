//! Forks of programs that load no library: held until everything of the process is in.
//!
//! Owns the filters by which the supervisor is told of forks of such programs
//! (`swaptide_sys::fork_filter`), and the forks under way.
//!
//! | stage | until |
//! |---|---|
//! | `Held` | the process says that everything is in ([`swaptide_ipc::ProcSlot::fork_held`]); then the call is made |
//! | `Made` | the thread is seen outside of the call |
//! | `Stopping` | it stops, for it could not be seen otherwise |
//!
//! Invariants
//! 1. A call is made only while its process holds everything, or manages nothing. If that does not
//!    come about in [`HOLD_TIMEOUT`], or what is out does not fit into memory, the call fails.
//! 2. A process holds everything until none of its threads is in such a call.
//! 3. A thread is traced for the moment of a stop, and without `CAP_SYS_PTRACE`.
//!
//! Locks: none. All of it happens in the supervisor's first thread, whose waits report the stops.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::{Duration, Instant};

use rustix::thread::CapabilitySet;
use swaptide_ipc::{ProcSlot, ProcState, Segment, SlotIndex};
use swaptide_sys::Errno;
use swaptide_sys::fork_filter::{FilterState, ForkFilter, WaitingFork};
use swaptide_sys::process::{CallOfThread, call_of, proc_info, process_of};
use swaptide_sys::ptrace::{Tracee, TraceeStop, seize_alone};

use crate::capability::without;
use crate::memctl::controller::detach::fits;

/// The time in which everything of a process comes in.
const HOLD_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two looks at forks under way, and at those that have just begun.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
const QUICK_INTERVAL: Duration = Duration::from_micros(100);
const QUICK_TIME: Duration = Duration::from_millis(5);
/// A thread that has run for so long since its call was made is stopped.
const RUN_TIME: Duration = Duration::from_millis(2);
/// Filters that are read at a time; more have their forks made at once.
const MAX_FILTERS: usize = 256;
/// Ancestors of a process that are looked at.
const MAX_GENERATIONS: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq)]
enum HoldStage {
    Held,
    Made,
    Stopping(Tracee),
}

struct HeldFork {
    filter: Arc<ForkFilter>,
    waiting: WaitingFork,
    pid: u32,
    slot: SlotIndex,
    stage: HoldStage,
    since: Instant,
    is_over: bool,
}

impl HeldFork {
    /// Looks whether the next stage is reached. `order`: the number that the process must have
    /// seen.
    fn look(&mut self, words: &ProcSlot, order: Option<u32>) {
        match self.stage {
            HoldStage::Held => {
                let is_same = words.pid.load(Relaxed) == self.pid && is_held(words);
                if !is_same || order == Some(words.fork_held.load(Acquire)) {
                    (self.stage, self.since) = (HoldStage::Made, Instant::now());
                    self.is_over = self.filter.let_go(self.waiting).is_err();
                } else if self.since.elapsed() > HOLD_TIMEOUT
                    && proc_info(self.pid).is_some_and(|info| info.stopped)
                {
                    // Stopped, it brings nothing in.
                    self.since = Instant::now();
                } else if self.since.elapsed() > HOLD_TIMEOUT {
                    let _ = self.filter.refuse(self.waiting, Errno::AGAIN);
                    self.is_over = true;
                }
            }
            HoldStage::Made => match call_of(self.waiting.tid) {
                CallOfThread::Fork => {}
                CallOfThread::Gone | CallOfThread::Other => self.is_over = true,
                CallOfThread::Unknown if self.since.elapsed() < RUN_TIME => {}
                CallOfThread::Unknown => self.stop(),
            },
            HoldStage::Stopping(_) => {
                // A thread that another one's exec has ended is told of by no wait.
                self.is_over |= call_of(self.waiting.tid) == CallOfThread::Gone;
            }
        }
    }

    /// Has the thread stop: it does so outside of a call.
    fn stop(&mut self) {
        let tid = self.waiting.tid;
        let seized = without(CapabilitySet::SYS_PTRACE, || seize_alone(tid));
        match seized.unwrap_or(Err(Errno::PERM)) {
            Ok(tracee) => {
                let _ = tracee.interrupt();
                self.stage = HoldStage::Stopping(tracee);
            }
            // It has a debugger, say. A fork takes less than that.
            Err(_) => self.is_over = self.since.elapsed() > 50 * RUN_TIME,
        }
    }
}

/// The forks under way.
#[derive(Default)]
pub(crate) struct HeldForks {
    filters: Vec<Arc<ForkFilter>>,
    forks: Vec<HeldFork>,
    /// Processes that have set a filter, and when they began: what they start is under it, too.
    setters: HashMap<u32, u64>,
    /// The order that each process has.
    orders: HashMap<u32, u32>,
    last_order: u32,
}

impl HeldForks {
    /// A process's filter, or the word that there is one already. True if there is.
    pub(crate) fn add(&mut self, pid: u32, filter: Option<OwnedFd>) -> bool {
        let Some(filter) = filter else { return self.is_filtered(pid) };
        if self.filters.len() >= MAX_FILTERS {
            return false;
        }
        self.setters.retain(|pid, began| is_same(*pid, *began));
        let Some(info) = proc_info(pid) else { return false };
        self.setters.insert(pid, info.start_time);
        self.filters.push(Arc::new(ForkFilter::from_fd(filter)));
        true
    }

    /// True for a process that is under one of the filters: it has set it, or one that it descends
    /// from.
    pub(crate) fn is_filtered(&self, pid: u32) -> bool {
        let mut at = pid;
        for _ in 0..MAX_GENERATIONS {
            let Some(info) = proc_info(at) else { return false };
            if self.setters.get(&at) == Some(&info.start_time) {
                return true;
            }
            at = info.ppid;
        }
        false
    }

    /// Readable when a thread waits.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.filters.iter().map(|filter| filter.as_fd())
    }

    /// The longest time until the next [`HeldForks::attend`].
    pub(crate) fn timeout(&self) -> Option<Duration> {
        let is_young = |fork: &HeldFork| fork.since.elapsed() < QUICK_TIME;
        let interval = if self.forks.iter().any(is_young) { QUICK_INTERVAL } else { LOOK_INTERVAL };
        (!self.forks.is_empty()).then_some(interval)
    }

    /// True for a thread that is about to stop.
    pub(crate) fn has(&self, tid: u32) -> bool {
        self.forks
            .iter()
            .any(|fork| matches!(fork.stage, HoldStage::Stopping(_)) && fork.waiting.tid == tid)
    }

    /// Takes in the threads that wait, and lets those go that may fork, and those that have.
    pub(crate) fn attend(&mut self, segment: &Segment) {
        self.read(segment);
        for fork in &mut self.forks {
            fork.look(segment.slot(fork.slot), self.orders.get(&fork.pid).copied());
        }
        self.forget_done(segment);
    }

    fn read(&mut self, segment: &Segment) {
        let states = ForkFilter::look(self.filters.iter().map(|filter| &**filter));
        let filters: Vec<_> = self.filters.iter().cloned().zip(states).collect();
        for (filter, _) in filters.iter().filter(|(_, state)| *state == FilterState::Waiting) {
            // One at a time: there may be more at the next look. One that was killed meanwhile does
            // not wait.
            if let Ok(waiting) = filter.next() {
                self.begin(segment, filter, waiting);
            }
        }
        let is_in_use = |(filter, state)| (state != FilterState::Ended).then_some(filter);
        self.filters = filters.into_iter().filter_map(is_in_use).collect();
    }

    fn begin(&mut self, segment: &Segment, filter: &Arc<ForkFilter>, waiting: WaitingFork) {
        let pid = process_of(waiting.tid);
        let managed = pid.and_then(|pid| {
            let is_its = |slot: &ProcSlot| slot.pid.load(Relaxed) == pid;
            segment.claimed().find(|(_, slot)| is_its(slot)).map(|(at, slot)| (pid, at, slot))
        });
        let Some((pid, slot, words)) = managed.filter(|(.., words)| is_held(words)) else {
            // One that ends is gone, which is no matter.
            let _ = filter.let_go(waiting);
            return;
        };
        if !fits(words) {
            let _ = filter.refuse(waiting, Errno::NOMEM);
            return;
        }
        for fork in &mut self.forks {
            // Its last fork is over.
            fork.is_over |= fork.waiting.tid == waiting.tid && fork.stage == HoldStage::Made;
        }
        if !self.orders.contains_key(&pid) {
            self.last_order = self.last_order.wrapping_add(1).max(1);
            self.orders.insert(pid, self.last_order);
            words.hold_for_fork(self.last_order);
        }
        let (filter, since) = (Arc::clone(filter), Instant::now());
        let (stage, is_over) = (HoldStage::Held, false);
        self.forks.push(HeldFork { filter, waiting, pid, slot, stage, since, is_over });
    }

    /// Ends the orders of processes that have no fork under way.
    fn forget_done(&mut self, segment: &Segment) {
        let done: Vec<HeldFork> = self.forks.extract_if(.., |fork| fork.is_over).collect();
        for HeldFork { pid, slot, .. } in done {
            if self.forks.iter().any(|fork| fork.pid == pid) {
                continue;
            }
            self.orders.remove(&pid);
            let words = segment.slot(slot);
            if words.pid.load(Relaxed) == pid {
                words.hold_for_fork(0);
            }
        }
    }

    /// The wait has reported a stop, or the end, of a thread that [`HeldForks::has`].
    pub(crate) fn changed(&mut self, tid: u32, stop: TraceeStop) {
        for fork in &mut self.forks {
            if let HoldStage::Stopping(tracee) = fork.stage
                && tracee.tid() == tid
            {
                let signal = if let TraceeStop::Signal(signal) = stop { signal } else { 0 };
                // One that is gone is.
                let _ = tracee.release(signal);
                fork.is_over = true;
            }
        }
    }
}

/// True while a process lives that began then.
fn is_same(pid: u32, began: u64) -> bool {
    proc_info(pid).is_some_and(|info| info.start_time == began)
}

/// True for a process whose forks are held: its agent says so, and may manage it.
fn is_held(words: &ProcSlot) -> bool {
    words.past_libc.load(Acquire) != 0
        && matches!(words.state(), ProcState::Watching | ProcState::Engaged)
}
