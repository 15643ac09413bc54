//! A run of processes that were attached to: from the agent's way into the first one until nothing
//! of swaptide's is in any of them.
//!
//! Owns the stage of the run.
//!
//! | stage | until |
//! |---|---|
//! | `Beginning` | the first process has the agent, or cannot be given it |
//! | `Attached` | all processes have ended or were let go, or this one is told to end |
//! | `LettingGo` | everything has come back; or it does not: then `Attached` again |
//! | `Withdrawing` | no process has the agent any more |
//! | `Keeping` | no process is under a filter of forks, or another supervisor reads the filters |
//!
//! Processes whose forks were held are under a filter for good, and their forks fail without a
//! reader: the supervisor stays for them.
//!
//! Locks: none.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use swaptide_sys::Errno;
use swaptide_sys::eventfd::EventFd;
use swaptide_sys::process::proc_info;

use super::Supervisor;
use crate::control::filter_offers::{FilterOffer, FilterOffers, FilterRequest};
use crate::control::server::ControlSocket;
use crate::inject::{Tracer, has_agent};
use crate::memctl::controller::detach::AttachState;
use crate::memctl::controller::{self, ControllerRequest, MemoryController};
use crate::run::attach::AttachTarget;
use crate::run::channel::LauncherMessage;
use crate::run::ending::ends;
use crate::units::human;

/// The time in which the first process is to stop for the agent.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(10);
/// The same where it cannot be traced: another thread of it may be executing a program.
const TRACE_TIMEOUT: Duration = Duration::from_millis(500);
/// Without a page that comes back, processes are managed as before.
const BACK_TIMEOUT: Duration = Duration::from_secs(30);
/// The time in which agents leave: that of their threads, and some more.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(15);
/// Between two looks at the processes while the stage is about to end, and while it is not.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
const QUIET_INTERVAL: Duration = Duration::from_millis(250);
/// Between two looks at what processes under a filter have started.
const NOTE_INTERVAL: Duration = Duration::from_secs(1);

enum AttachStage {
    Beginning,
    Attached,
    /// The least that was left: processes, and bytes that are out.
    LettingGo(usize, u64),
    Withdrawing,
    Keeping,
}

/// The state of such a run.
pub(super) struct AttachedRun {
    target: u32,
    stage: AttachStage,
    /// When the stage began, or came a step further.
    since: Instant,
    looked: Instant,
    noted: Instant,
    /// Processes that were given the agent, and the stack of the program that was.
    given: BTreeMap<u32, u64>,
    is_told_to_end: bool,
    /// It has not come about, which the user knows.
    has_failed: bool,
    offers: FilterOffers,
    requests: Receiver<FilterRequest>,
    wake: Arc<EventFd>,
}

impl AttachedRun {
    /// # Errors
    /// Without a descriptor.
    pub(super) fn new(target: &AttachTarget) -> Result<AttachedRun, Errno> {
        let (offers, requests, wake) = FilterOffers::new()?;
        let now = Instant::now();
        Ok(AttachedRun {
            target: target.pid,
            stage: AttachStage::Beginning,
            since: now,
            looked: now,
            noted: now,
            given: BTreeMap::new(),
            is_told_to_end: false,
            has_failed: false,
            offers,
            requests,
            wake,
        })
    }

    /// What hands its filters over.
    pub(super) fn offers(&self) -> FilterOffers {
        self.offers.clone()
    }

    /// Readable when another supervisor asks for its filters.
    pub(super) fn awaited(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn look_interval(&self) -> Duration {
        match self.stage {
            AttachStage::Keeping => NOTE_INTERVAL,
            AttachStage::Attached if !self.is_told_to_end => QUIET_INTERVAL,
            _ => LOOK_INTERVAL,
        }
    }

    /// The time until the next look.
    pub(super) fn timeout(&self) -> Option<Duration> {
        Some(self.look_interval().saturating_sub(self.looked.elapsed()))
    }

    /// One that ends other programs has processes let go.
    pub(super) fn note_signal(&mut self, signal: i32) {
        self.is_told_to_end |= ends(signal);
    }

    fn enter(&mut self, stage: AttachStage) {
        (self.stage, self.since) = (stage, Instant::now());
    }

    /// Processes that have the agent still: not those that have executed another program.
    fn left(&self, state: &AttachState) -> Vec<u32> {
        let has_it = |(pid, stack): (&u32, &u64)| {
            let info = proc_info(*pid).filter(|info| !info.zombie && info.stack_start == *stack)?;
            let is_over = state.released.contains(pid) && !has_agent(*pid);
            (!is_over).then_some(info.pid)
        };
        self.given.iter().filter_map(has_it).collect()
    }
}

/// Those of some processes that have an agent: what others have said before they executed another
/// program counts no more.
fn with_agent(pids: BTreeSet<u32>) -> BTreeSet<u32> {
    pids.into_iter().filter(|pid| has_agent(*pid)).collect()
}

impl Supervisor {
    fn ask<T: Send + 'static>(
        &self,
        f: impl FnOnce(&mut MemoryController) -> T + Send + 'static,
    ) -> Option<T> {
        controller::ask(self.controller.as_ref()?, f)
    }

    /// False when nothing is left to do.
    pub(super) fn attend_attached(&mut self) -> bool {
        self.serve_offers();
        self.note_outcomes();
        let Some(run) = &mut self.attached else { return false };
        if run.noted.elapsed() >= NOTE_INTERVAL {
            run.noted = Instant::now();
            let _ = self.tracer.as_mut().map(|tracer| tracer.forks.note_descendants());
        }
        let is_due = run.looked.elapsed() >= run.look_interval();
        if is_due {
            run.looked = Instant::now();
        }
        match run.stage {
            AttachStage::Keeping => {
                let forks = self.tracer.as_ref().map(|tracer| &tracer.forks);
                forks.is_some_and(|forks| forks.has_filters() || forks.has_forks())
            }
            _ if !is_due => true,
            AttachStage::Beginning => self.look_beginning(),
            AttachStage::Attached => self.look_attached(),
            AttachStage::LettingGo(..) => self.look_letting_go(),
            AttachStage::Withdrawing => self.look_withdrawing(),
        }
    }

    /// Processes that have the agent are served and counted.
    fn note_outcomes(&mut self) {
        let root = std::process::id();
        let outcomes = self.tracer.as_mut().map(Tracer::take_outcomes);
        for (pid, result) in outcomes.into_iter().flatten() {
            let Some(run) = &mut self.attached else { return };
            if result.is_ok() {
                run.given.extend(proc_info(pid).map(|info| (pid, info.stack_start)));
                self.counter.admit(pid);
                let attach = move |controller: &mut MemoryController| controller.attach(pid, root);
                let request = ControllerRequest::Do(Box::new(attach));
                let _ = self.controller.as_ref().map(|controller| controller.send(request));
            }
            if pid != run.target || !matches!(run.stage, AttachStage::Beginning) {
                continue;
            }
            match result {
                Ok(()) => {
                    run.enter(AttachStage::Attached);
                    let frame = &self.prepared.place.frame;
                    let line = (!self.prepared.quiet).then(|| {
                        let (program, budget) = (&frame.subject.program, human(frame.budget));
                        format!(
                            "{program}: process {pid} and what it starts are within {budget} from \
                            now on"
                        )
                    });
                    if let Some(channel) = &mut self.channel {
                        channel.send(&LauncherMessage::Attached(line));
                    }
                }
                Err(Errno::PERM) if run.since.elapsed() < TRACE_TIMEOUT => {}
                Err(errno) => {
                    let why = match errno {
                        Errno::PERM => {
                            "it cannot be traced: another tracer has it, it may not be dumped, or \
                            /proc/sys/kernel/yama/ptrace_scope forbids it"
                        }
                        Errno::SRCH => "it has ended",
                        Errno::NOMEM => "it has no memory left",
                        Errno::BUSY => "it has no memory of its own",
                        _ => "it cannot be given the agent",
                    };
                    self.fail(format!("process {pid}: {why}; nothing was changed"));
                }
            }
        }
    }

    /// The run has not come about: no process was given the agent.
    fn fail(&mut self, why: String) {
        if let Some(mut channel) = self.channel.take() {
            channel.send(&LauncherMessage::Failed(why));
        }
        if let Some(run) = &mut self.attached {
            run.has_failed = true;
        }
        self.begin_withdrawal();
    }

    fn begin_withdrawal(&mut self) {
        let _ = self.tracer.as_mut().map(Tracer::pause);
        if let Some(run) = &mut self.attached {
            run.enter(AttachStage::Withdrawing);
        }
    }

    fn look_beginning(&mut self) -> bool {
        let Some(run) = &self.attached else { return false };
        let pid = run.target;
        let info = proc_info(pid).filter(|info| !info.zombie);
        let why = match info {
            _ if run.is_told_to_end => "told to end before the agent was in it",
            None => "it has ended",
            Some(info) if info.stopped && !self.is_stopping(pid) => "it is stopped",
            _ if run.since.elapsed() > BEGIN_TIMEOUT => {
                "it does not stop for the agent: it waits in the kernel, for a disk or for a child \
                that is about to execute a program"
            }
            _ => return true,
        };
        self.fail(format!("process {pid}: {why}; nothing was changed"));
        true
    }

    /// True for a process that is stopped by the tracer.
    fn is_stopping(&self, pid: u32) -> bool {
        self.tracer.as_ref().is_some_and(|tracer| tracer.has(pid))
    }

    fn look_attached(&mut self) -> bool {
        let root = std::process::id();
        let Some(state) = self.ask(move |controller| controller.attach_state(root)) else {
            return false;
        };
        let managed = with_agent(state.managed);
        let Some(run) = &mut self.attached else { return false };
        run.given.retain(|pid, _| state.pids.contains(pid));
        // One that executes another program is neither for a moment.
        let is_let_go = !run.given.is_empty()
            && managed.is_empty()
            && run.given.keys().all(|pid| state.released.contains(pid));
        if state.pids.is_empty() || is_let_go {
            self.begin_withdrawal();
        } else if std::mem::take(&mut run.is_told_to_end) {
            let asked = managed.clone();
            let has_begun = match self.ask(move |controller| controller.detach(&asked)) {
                _ if managed.is_empty() => None,
                Some(begun) => Some(begun),
                None => return false,
            };
            match (has_begun, &mut self.attached) {
                (None, _) => self.begin_withdrawal(),
                (Some(Ok(())), Some(run)) => {
                    run.enter(AttachStage::LettingGo(usize::MAX, u64::MAX));
                    let _ = self.tracer.as_mut().map(Tracer::pause);
                }
                (Some(Err(why)), _) => self.say(why),
                _ => return false,
            }
        }
        true
    }

    fn look_letting_go(&mut self) -> bool {
        let root = std::process::id();
        // A process may have executed another program since, or have just got the agent.
        let look = move |controller: &mut MemoryController| {
            controller.withdraw(root);
            let managed = with_agent(controller.attach_state(root).managed);
            controller.detaching(&managed)
        };
        let Some(now) = self.ask(look) else { return false };
        let Some(AttachedRun { stage: AttachStage::LettingGo(processes, out), since, .. }) =
            &mut self.attached
        else {
            return false;
        };
        if (now.processes, now.out) < (*processes, *out) {
            (*processes, *out, *since) = (now.processes, now.out, Instant::now());
        }
        let is_stuck = since.elapsed() > BACK_TIMEOUT;
        if now.processes == 0 {
            self.begin_withdrawal();
        } else if now.short || is_stuck {
            let _ = self.ask(move |controller| controller.keep_all(root));
            let why = if now.short { "memory ran short" } else { "no more pages came in" };
            self.say(format!("{why}: {} processes stay within their budget", now.processes));
            let _ = self.tracer.as_mut().map(Tracer::resume);
            if let Some(run) = &mut self.attached {
                run.enter(AttachStage::Attached);
            }
        }
        true
    }

    fn look_withdrawing(&mut self) -> bool {
        let root = std::process::id();
        let withdraw = move |controller: &mut MemoryController| {
            controller.withdraw(root);
            controller.attach_state(root)
        };
        let Some(state) = self.ask(withdraw) else { return false };
        let Some(run) = &self.attached else { return false };
        let left = run.left(&state);
        let has_failed = run.has_failed;
        if !left.is_empty() && run.since.elapsed() <= WITHDRAW_TIMEOUT {
            return true;
        }
        for pid in left {
            let is_stopped = proc_info(pid).is_some_and(|info| info.stopped);
            let why = if is_stopped { "; it is stopped" } else { "" };
            self.say(format!("process {pid}: a thread of swaptide's stays in it{why}"));
        }
        let is_needed = self.tracer.as_ref().is_some_and(|tracer| tracer.forks.has_filters());
        if !has_failed {
            self.finish(0, is_needed);
        }
        if is_needed {
            self.keep_filters();
        }
        is_needed
    }

    /// From here on only forks of processes that are under a filter are answered.
    fn keep_filters(&mut self) {
        let _ = self.socket.as_mut().map(ControlSocket::keep_filters);
        let _ = self.tracer.as_mut().map(Tracer::end);
        if let Some(controller) = self.controller.take() {
            let _ = controller.send(ControllerRequest::Stop);
        }
        // What ends the user's session is not to end what processes of the system need.
        let _ = rustix::process::setsid();
        if let Some(run) = &mut self.attached {
            run.enter(AttachStage::Keeping);
        }
    }

    /// Answers supervisors that attach to processes which were let go.
    fn serve_offers(&mut self) {
        let (Some(run), Some(tracer)) = (&mut self.attached, &mut self.tracer) else { return };
        run.wake.clear();
        let is_keeping = matches!(run.stage, AttachStage::Keeping);
        while let Ok(request) = run.requests.try_recv() {
            match request {
                FilterRequest::Lend(pid, answer) => {
                    tracer.forks.note_descendants();
                    let is_under = tracer.forks.has_filters() && tracer.forks.is_filtered(pid);
                    let offer = match is_under {
                        false => FilterOffer::None,
                        true if !is_keeping || tracer.forks.is_lent() => FilterOffer::InUse,
                        true => tracer.forks.lend().map_or(FilterOffer::InUse, FilterOffer::Lent),
                    };
                    if answer.send(offer).is_err() {
                        tracer.forks.take_back();
                    }
                }
                FilterRequest::Taken => tracer.forks.give_up(),
                FilterRequest::Returned => tracer.forks.take_back(),
            }
        }
    }
}
