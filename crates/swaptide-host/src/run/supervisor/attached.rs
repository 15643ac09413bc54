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

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use swaptide_sys::Errno;
use swaptide_sys::eventfd::EventFd;

use super::Supervisor;
use crate::control::filter_offers::{FilterOffers, FilterRequest};
use crate::inject::has_agent;
use crate::memctl::controller::{self, ControllerRequest, MemoryController};
use crate::run::attach::AttachTarget;
use crate::run::channel::LauncherMessage;
use crate::run::ending::ends;
use crate::units::human;

/// The time in which the first process is to stop for the agent.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Without a page that comes back, processes are managed as before.
const BACK_TIMEOUT: Duration = Duration::from_secs(30);
/// The time in which agents leave: that of their threads, and some more.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(15);
/// Between two looks at the processes.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

enum AttachStage {
    Beginning,
    Attached,
    /// These are let go; the least that was left of them, and since when.
    LettingGo(BTreeSet<u32>, (usize, u64)),
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
    is_told_to_end: bool,
    /// It has not come about, which the user knows.
    has_failed: bool,
    /// The filters have another reader.
    is_relieved: bool,
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
            is_told_to_end: false,
            has_failed: false,
            is_relieved: false,
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

    /// The time until the next look.
    pub(super) fn timeout(&self) -> Option<Duration> {
        let is_looking = !matches!(self.stage, AttachStage::Keeping);
        is_looking.then(|| LOOK_INTERVAL.saturating_sub(self.looked.elapsed()))
    }

    /// One that ends other programs has processes let go.
    pub(super) fn note_signal(&mut self, signal: i32) {
        self.is_told_to_end |= ends(signal);
    }

    fn enter(&mut self, stage: AttachStage) {
        (self.stage, self.since) = (stage, Instant::now());
    }
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
        let is_due = run.looked.elapsed() >= LOOK_INTERVAL;
        if is_due {
            run.looked = Instant::now();
        }
        match run.stage {
            AttachStage::Keeping => {
                let forks = self.tracer.as_ref().map(|tracer| &tracer.forks);
                let is_needed = |run: &AttachedRun| match forks {
                    None => false,
                    Some(forks) if run.is_relieved => forks.has_forks(),
                    Some(forks) => forks.has_filters(),
                };
                self.attached.as_ref().is_some_and(is_needed)
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
        let outcomes = self.tracer.as_mut().map(|tracer| tracer.take_outcomes());
        for (pid, result) in outcomes.into_iter().flatten() {
            if result.is_ok() {
                self.counter.admit(pid);
                let attach = move |controller: &mut MemoryController| controller.attach(pid, root);
                let request = ControllerRequest::Do(Box::new(attach));
                let _ = self.controller.as_ref().map(|controller| controller.send(request));
            }
            let Some(run) = &mut self.attached else { continue };
            if pid != run.target || !matches!(run.stage, AttachStage::Beginning) {
                continue;
            }
            match result {
                Ok(()) => {
                    run.enter(AttachStage::Attached);
                    if !self.prepared.quiet {
                        let budget = human(self.prepared.place.frame.budget);
                        self.say(format!(
                            "process {pid} and what it starts are within {budget} from now on; \
                            Ctrl-C lets them go"
                        ));
                    }
                }
                Err(errno) => {
                    let why = match errno {
                        Errno::PERM => {
                            "it cannot be traced (it may not be dumped, or \
                            /proc/sys/kernel/yama/ptrace_scope forbids it)"
                        }
                        Errno::SRCH => "it has ended",
                        Errno::NOMEM => "it has no memory left",
                        _ => "it cannot be given the agent",
                    };
                    self.fail(format!("process {pid}: {why}; nothing was changed"));
                }
            }
        }
    }

    /// The run has not come about.
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
        let _ = self.tracer.as_mut().map(crate::inject::Tracer::stop);
        if let Some(run) = &mut self.attached {
            run.enter(AttachStage::Withdrawing);
        }
    }

    fn look_beginning(&mut self) -> bool {
        let Some(run) = &self.attached else { return false };
        let pid = run.target;
        if run.is_told_to_end {
            self.fail(format!("process {pid}: told to end before the agent was in it"));
        } else if run.since.elapsed() > BEGIN_TIMEOUT {
            self.fail(format!(
                "process {pid}: it does not stop for the agent: it waits in the kernel, for a disk \
                or for a child that is about to execute a program; nothing was changed"
            ));
        }
        true
    }

    fn look_attached(&mut self) -> bool {
        let root = std::process::id();
        let Some(state) = self.ask(move |controller| controller.attach_state(root)) else {
            return false;
        };
        let Some(run) = &mut self.attached else { return false };
        let is_over = state.pids.is_empty() || state.managed == 0 && state.released > 0;
        if is_over {
            self.begin_withdrawal();
        } else if run.is_told_to_end {
            run.is_told_to_end = false;
            let pids = state.pids;
            let detach =
                move |controller: &mut MemoryController| controller.detach(&pids).map(|()| pids);
            match self.ask(detach) {
                Some(Ok(pids)) => {
                    if let Some(run) = &mut self.attached {
                        run.enter(AttachStage::LettingGo(pids, (usize::MAX, u64::MAX)));
                    }
                }
                Some(Err(why)) if state.managed > 0 => self.say(why),
                _ => self.begin_withdrawal(),
            }
        }
        true
    }

    fn look_letting_go(&mut self) -> bool {
        let Some(AttachedRun { stage: AttachStage::LettingGo(pids, least), since, .. }) =
            &mut self.attached
        else {
            return false;
        };
        let (asked, kept) = (pids.clone(), pids.clone());
        let Some(controller) = &self.controller else { return false };
        let Some(now) = controller::ask(controller, move |controller| controller.detaching(&asked))
        else {
            return false;
        };
        if (now.processes, now.out) < *least {
            (*least, *since) = ((now.processes, now.out), Instant::now());
        }
        let is_stuck = since.elapsed() > BACK_TIMEOUT;
        if now.processes == 0 {
            self.begin_withdrawal();
        } else if now.short || is_stuck {
            let _ = self.ask(move |controller| controller.keep_after_all(&kept));
            let why = if now.short { "memory ran short" } else { "no more pages came in" };
            self.say(format!("{why}: {} processes stay within their budget", now.processes));
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
        let pids = self.ask(withdraw).map_or_else(BTreeSet::new, |state| state.pids);
        let left: Vec<u32> = pids.into_iter().filter(|pid| has_agent(*pid)).collect();
        let is_late =
            self.attached.as_ref().is_some_and(|run| run.since.elapsed() > WITHDRAW_TIMEOUT);
        if !left.is_empty() && !is_late {
            return true;
        }
        for pid in left {
            self.say(format!("process {pid}: a thread of swaptide's stays in it"));
        }
        let is_needed = self.tracer.as_ref().is_some_and(|tracer| tracer.forks.has_filters());
        if self.attached.as_ref().is_some_and(|run| !run.has_failed) {
            self.finish(0, is_needed);
        }
        if is_needed {
            let _ = self.socket.as_mut().map(crate::control::server::ControlSocket::keep_filters);
            if let Some(run) = &mut self.attached {
                run.enter(AttachStage::Keeping);
            }
        }
        is_needed
    }

    /// Answers supervisors that attach to processes which were let go.
    fn serve_offers(&mut self) {
        let Some(run) = &mut self.attached else { return };
        run.wake.clear();
        while let Ok(request) = run.requests.try_recv() {
            let is_keeping = matches!(run.stage, AttachStage::Keeping);
            let forks = self.tracer.as_ref().map(|tracer| &tracer.forks);
            match request {
                FilterRequest::Offer(pid, answer) => {
                    let forks = forks.filter(|forks| is_keeping && forks.is_filtered(pid));
                    let _ = answer.send(forks.and_then(|forks| forks.offer().ok()));
                }
                FilterRequest::Taken => run.is_relieved |= is_keeping,
            }
        }
    }
}
