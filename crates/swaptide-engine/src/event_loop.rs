//! The handler: the thread that applies what the program's userfaultfd tells.
//!
//! It reads messages ([`crate::events::reader`]), answers faults ([`crate::pager`]), attends to
//! forks ([`crate::fork`]) and serves requests of the program's threads ([`crate::requests`]).
//! Nothing below this module serves a request: parts that must read on queue what they read.
//!
//! Owns: those parts, and how long answered request pages are looked after.
//!
//! Invariants
//! 1. Before a fault is answered, a request served or a page put in place, every fork through no
//!    hook that was read has its pages ([`ForkServer::serve_untracked`]).
//! 2. Events are applied before faults that were read with them.
//! 3. What an interruption leaves undone is done again, or its thread asks again.
//! 4. All that is not the answer to a fault is done alone: no fault server reads or fills meanwhile
//!    ([`crate::sched::handed`]).
//!
//! Locks: none of its own.

use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::time::Duration;

use swaptide_ipc::SlotIndex;
use swaptide_sys::process::StatmFd;
use swaptide_sys::thread::{Nanos, gettid, now};

use crate::EngineError;
use crate::detach::{self, Detach};
use crate::engine::Engine;
use crate::events::late_look::LATE_EVENT_TIMEOUT;
use crate::fault::complete::complete;
use crate::fork::{ForkHandoff, ForkServer, inherited};
use crate::fork_hold::ForkHold;
use crate::pager::Pager;
use crate::requests::{FaultRequest, HandlerRequest};
use crate::vma::madvise::{self, Preload};

/// Answers after which a program that is to be let go has some of it brought in, though faults
/// wait.
const FAULTS_PER_DETACH_STEP: u32 = 16;
/// Between two checks of request pages that are to be emptied.
const REQUEST_PAGE_INTERVAL: Duration = Duration::from_millis(1);

/// The handler's loop: what it reads, answers and does unasked.
pub struct Handler {
    engine: &'static Engine,
    pager: Pager,
    forks: ForkServer,
    preload: Preload,
    detach: Detach,
    fork_hold: ForkHold,
    /// Until when request pages that are not empty yet are looked after.
    request_pages_until: Option<Nanos>,
}

impl Handler {
    /// The handler of an engine.
    ///
    /// # Errors
    /// When memory or a file of /proc is refused.
    pub fn new(engine: &'static Engine) -> Result<Handler, EngineError> {
        Ok(Handler::with(engine, Pager::new(engine)?))
    }

    /// A handler for a forked child, over what its parent has handed over.
    ///
    /// # Errors
    /// When a userfaultfd or memory is refused: the child must decline then.
    pub fn inherited(
        engine: &'static Engine,
        index: SlotIndex,
        salt: u64,
        left: &mut ForkHandoff,
    ) -> Result<Handler, EngineError> {
        Ok(Handler::with(engine, inherited(engine, index, salt, left)?))
    }

    fn with(engine: &'static Engine, pager: Pager) -> Handler {
        Handler {
            engine,
            pager,
            forks: ForkServer::default(),
            preload: Preload::default(),
            detach: Detach::default(),
            fork_hold: ForkHold::default(),
            request_pages_until: None,
        }
    }

    /// Looks for memory to adopt, before there are faults to answer. A second time where much of
    /// what is left is small mappings: the program fills more of them at full speed, and the first
    /// worker would see it too late. Not after a check that a fork interrupted: that is left to
    /// [`Handler::run`], which attends to the fork first.
    pub fn adopt(&mut self) {
        let is_whole = self.pager.adopt();
        let engine = self.engine;
        let Ok(statm) = StatmFd::open_self() else { return };
        engine.charge.measure(&statm);
        if is_whole && self.pager.adopter.small_mappings_matter(engine) {
            self.pager.adopt();
            // What was adopted counts by its pages from here on.
            engine.charge.measure(&statm);
        }
    }

    /// Serves until the process ends. Returns when the program is to be let go and nothing of it is
    /// out: [`Handler::detach`] does it then, or this is called again.
    pub fn run(&mut self) {
        let engine = self.engine;
        engine.serving.handler.tid.store(gettid().0, Relaxed);
        // One is answered before this can return, for what is asked meanwhile must be read.
        let mut answers = 1u32;
        loop {
            self.pager.path.reader.end_alone();
            complete(&mut self.pager.path);
            self.forks.serve_untracked(&mut self.pager);
            if self.pager.path.reader.pending.is_empty() {
                self.read_next();
            }
            self.serve_requests();
            self.pager.path.wake_held();
            if self.pager.path.reader.pending.is_empty() && self.preload.is_due(&self.pager.path) {
                self.begin_alone();
                self.preload.step(&mut self.pager.path);
            }
            // Threads that give memory up and touch it again never cease to fault.
            let is_due = (self.detach.is_wanted() || self.fork_hold.is_wanted())
                && (self.pager.path.reader.pending.is_empty()
                    || answers.is_multiple_of(FAULTS_PER_DETACH_STEP));
            if is_due {
                self.begin_alone();
            }
            if is_due && self.fork_hold.is_wanted() {
                self.fork_hold.step(&mut self.pager, &mut self.forks);
            } else if is_due && self.detach.step(&mut self.pager, &mut self.forks) {
                self.pager.path.stalls_until(now());
                return;
            }
            self.forks.serve_untracked(&mut self.pager);
            if let Some(fault) = self.pager.path.reader.pending.pop_front() {
                self.pager.answer(fault);
                answers = answers.wrapping_add(1);
                let path = &mut self.pager.path;
                path.worker.balance(engine);
                if path.reader.wants_server() {
                    path.reader.start_server();
                }
                path.tests.after_answer(&engine.workers.fails);
            }
        }
    }

    /// Makes the handler work alone, and serves the forks that servers have read.
    fn begin_alone(&mut self) {
        self.pager.path.reader.begin_alone();
        self.forks.serve_untracked(&mut self.pager);
    }

    /// Waits for the next messages, and reads them. With something to do unasked it only looks for
    /// them: a thread that faults goes first.
    fn read_next(&mut self) {
        let path = &mut self.pager.path;
        if path.stall.is_on() {
            path.stalls_until(now());
        }
        let is_busy = self.detach.is_wanted() || self.fork_hold.is_wanted();
        let read = if self.preload.is_due(path) || is_busy {
            path.reader.read_within(Some(Duration::ZERO))
        } else {
            path.reader.awaits_remote = !path.remote.is_empty();
            let timeout = self.empty_request_pages();
            self.pager.path.reader.read_within(timeout)
        };
        if read.is_err() {
            self.forks.serve_untracked(&mut self.pager);
        }
    }

    /// Serves what threads have asked for.
    fn serve_requests(&mut self) {
        while let Some(request) = self.pager.path.reader.next_request() {
            self.begin_alone();
            match request {
                HandlerRequest::Adopt => {
                    self.pager.adopt();
                }
                HandlerRequest::Hint => self.serve_hint(),
                HandlerRequest::Fence => self.pager.answer_fences(),
                HandlerRequest::Preload => self.preload.begin(),
                HandlerRequest::Detach => self.detach.begin(),
                HandlerRequest::ForkHold => self.fork_hold.begin(self.engine),
                HandlerRequest::RequestPage => self.serve_request_pages(),
                HandlerRequest::ForkPrepare => self.forks.fork(&mut self.pager),
                HandlerRequest::ForkDone => {}
            }
        }
    }

    /// Does what the hint in the mailbox asks for, and lets its thread continue.
    fn serve_hint(&mut self) {
        let handler_requests = &self.engine.handler_requests;
        if let Some((hint, range)) = handler_requests.take_hint() {
            let Pager { path, adopter } = &mut self.pager;
            if madvise::hint(path, adopter, hint, range).is_err() {
                handler_requests.put_back(hint);
                path.reader.note_request(HandlerRequest::Hint);
                return;
            }
        }
        handler_requests.answer();
    }

    /// Does what is wanted at the request pages, and lets the threads continue that wait there.
    fn serve_request_pages(&mut self) {
        let handler_requests = &self.engine.handler_requests;
        let Pager { path, adopter } = &mut self.pager;
        let mut at = 0;
        while let Some((index, request, range)) = handler_requests.waiting_at(at) {
            at = index + 1;
            let mut is_done = true;
            let served = match request {
                FaultRequest::Fence => adopter.adopt_mapping(path, range.start, false),
                FaultRequest::Release => {
                    // What the mailbox was answered stays.
                    let before = handler_requests.refused.swap(false, AcqRel);
                    let released = madvise::release(path, range);
                    is_done = !handler_requests.refused.swap(before, AcqRel);
                    released
                }
                // Answered by the end of everything.
                FaultRequest::Detach => {
                    self.detach.begin();
                    continue;
                }
            };
            if served.is_err() {
                path.reader.note_request(HandlerRequest::RequestPage);
                break;
            }
            handler_requests.done_at(index, is_done);
        }
        self.request_pages_until = Some(Nanos(now().0 + LATE_EVENT_TIMEOUT.as_nanos() as u64));
        handler_requests.release_answered(path.reader.uffd);
    }

    /// Looks after request pages that are not empty; how long a message is waited for then. One
    /// whose thread does not come back (a signal handler left it) is given up after a moment.
    fn empty_request_pages(&mut self) -> Option<Duration> {
        let path = &self.pager.path;
        let timeout = path.throttle.time_left();
        let Some(until) = self.request_pages_until else { return timeout };
        if !self.engine.handler_requests.release_answered(path.reader.uffd) || now() > until {
            self.request_pages_until = None;
            return timeout;
        }
        Some(timeout.unwrap_or(Duration::MAX).min(REQUEST_PAGE_INTERVAL))
    }

    /// Lets the program go, if nothing is out. False if something is by now: the handler is to be
    /// run again. No thread may be about to fork.
    ///
    /// After that the engine is used no more; its workers end.
    pub fn detach(&mut self) -> bool {
        detach::detach(&mut self.pager.path)
    }
}
