//! Reading the program's userfaultfd: changes of mappings are applied, faults and requests queued.
//!
//! Owns: the queues of what was read and is to be answered, and the state of a fork as far as it
//! decides what is done with an event ([`ForkState`]).
//!
//! Invariants
//! 1. A message that was read is acted upon before the next read, or stands in `pending`, in
//!    `requests` or in the fork's state. Nothing is answered here.
//! 2. While an event is unread the kernel refuses fills with EAGAIN. So every part that fills pages
//!    reads on ([`UffdReader::drain`]) and tries again.
//! 3. When a fork through no hook was read, nothing is applied to the table any more before its
//!    child has its pages, and nothing is taken out. A part below the event loop that reads learns
//!    it as [`Interrupted`], leaves its work as it is, and is called again when that is done.
//! 4. Where there are fault servers, they read as well, but for the time in which the handler works
//!    alone ([`UffdReader::begin_alone`]). What they have handed over is taken before the next
//!    message is read.
//!
//! Locks: the memory lock, while messages are read and applied; where servers may fill, the gate is
//! closed before it (`fault/placing.rs`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::Duration;

use swaptide_sys::eventfd::EventFd;
use swaptide_sys::process::waits_outside_fork;
use swaptide_sys::sock::poll_readable;
use swaptide_sys::thread::{now, sleep, yield_now};
use swaptide_sys::uffd::{Coverage, Event, Message, Uffd};
use swaptide_sys::{AsFd, Errno};

use crate::EngineError;
use crate::engine::{Engine, Mm};
use crate::events::apply::{apply, apply_first_late, apply_late, next_late_step};
use crate::events::brought::BroughtPages;
use crate::events::fork_state::{ForkPhase, ForkState};
use crate::events::late_look::{LATE_EVENT_TIMEOUT, LateLook};
use crate::mm::change_order::LateStep;
use crate::mm::types::PageNo;
use crate::requests::HandlerRequest;
use crate::sched::fault_servers::HandlerSets;
use crate::sched::handed::Fault;
use crate::sched::handler_cpu::HandlerCpu;

/// A fork through no hook was read: its child must have its pages before anything else is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Interrupted;

/// The time that the handler polls for the next message before it sleeps.
const BUSY_WAIT: Duration = Duration::from_micros(50);
/// The same of a fault server, and of the handler, while several threads fault.
const CROWD_WAIT: Duration = Duration::from_micros(30);
/// Between two checks whether a server has ended its load.
const LOAD_PAUSE: Duration = Duration::from_micros(50);
/// The time to wait for an event that a refused fill shows to be pending.
const DRAIN_WAIT: Duration = Duration::from_micros(200);
/// Descriptors that must be free where a fault server is started: it needs seven at most.
const FREE_DESCRIPTORS: usize = 32;
/// Messages of one read.
const MESSAGES_PER_READ: usize = 16;
/// A thread waits for one fault at a time, and nothing may be allocated during a fork.
const MAX_PENDING_FAULTS: usize = 4096;

/// Reads the userfaultfd: applies changes of mappings, queues faults and requests.
pub(crate) struct UffdReader {
    pub(crate) engine: &'static Engine,
    pub(crate) uffd: &'static Uffd,
    /// The CPU and scheduling class of the handler.
    pub(crate) cpu: HandlerCpu,
    /// Faults that wait for their answer.
    pub(crate) pending: VecDeque<Fault>,
    /// Requests that were read and not served yet, each once.
    pub(crate) requests: Vec<HandlerRequest>,
    pub(crate) fork: ForkState,
    /// Signalled when remote pages are back; a fault server sends for none.
    pub(crate) remote_event: Option<Arc<EventFd>>,
    /// The next wait is one for remote pages, too: a wait for an event that is due is not ended by
    /// them.
    pub(crate) awaits_remote: bool,
    /// The wait sets, if there are fault servers.
    sets: Option<HandlerSets>,
    /// It is a fault server's, which reads nothing by this.
    pub(crate) is_server: bool,
    /// No server reads or fills; always so where there are none.
    is_alone: bool,
    /// Several threads fault in turns.
    is_crowd: bool,
    /// At some time they did while servers paid.
    has_shared_crowd: bool,
}

impl UffdReader {
    /// Nothing was read yet.
    ///
    /// # Errors
    /// When memory or a descriptor is refused.
    pub(crate) fn new(engine: &'static Engine) -> Result<UffdReader, EngineError> {
        Ok(UffdReader {
            engine,
            uffd: engine.uffd(),
            cpu: HandlerCpu::new(),
            pending: VecDeque::with_capacity(MAX_PENDING_FAULTS),
            requests: Vec::with_capacity(64),
            fork: ForkState::new(engine.fork.followed)
                .map_err(|e| EngineError::Memory("pages that come in during forks", e))?,
            remote_event: Some(
                engine
                    .remote_reads
                    .open_event()
                    .map_err(|e| EngineError::Memory("an eventfd for remote pages", e))?,
            ),
            awaits_remote: false,
            sets: None,
            is_server: false,
            is_alone: true,
            is_crowd: false,
            has_shared_crowd: engine.serving.servers.is_forced,
        })
    }

    /// A fault server's: it reads nothing, and what needs that is handed over.
    pub(crate) fn of_server(engine: &'static Engine) -> UffdReader {
        UffdReader {
            engine,
            uffd: engine.uffd(),
            cpu: HandlerCpu::unplaced(),
            pending: VecDeque::new(),
            requests: Vec::new(),
            fork: ForkState::unused(),
            remote_event: None,
            awaits_remote: false,
            sets: None,
            is_server: true,
            is_alone: false,
            is_crowd: false,
            has_shared_crowd: false,
        }
    }

    /// True if another fault server is to be started.
    pub(crate) fn wants_server(&self) -> bool {
        self.has_shared_crowd
            && self.engine.serving.servers.is_one_wanted(self.engine.charge.limit())
            && !self.fork.is_busy()
    }

    /// True if a server's descriptors leave some for what a fork needs.
    fn has_free_descriptors(&self) -> bool {
        let fd = self.uffd.as_fd();
        let copies: [_; FREE_DESCRIPTORS] = std::array::from_fn(|_| fd.try_clone_to_owned());
        copies.iter().all(Result::is_ok)
    }

    /// Starts a fault server.
    pub(crate) fn start_server(&mut self) {
        let engine = self.engine;
        if !self.has_free_descriptors() {
            return engine.serving.servers.give_up();
        }
        if self.sets.is_none() {
            let Some(remote) = &self.remote_event else { return };
            match engine.serving.servers.open(self.uffd, remote) {
                Ok(sets) => self.sets = Some(sets),
                Err(_) => return engine.serving.servers.give_up(),
            }
        }
        // Before it runs: a fork waits for it.
        engine.workers.running.fetch_add(1, Relaxed);
        engine.serving.servers.count_started();
        // In the idle class it would stay there.
        if self.cpu.normally(engine.start.spawn_server) {
            engine.slot().engine_threads.fetch_add(1, Relaxed);
            // It reads nothing before the handler, which works alone now, has ended that.
            engine.mm.lock().handed.are_servers = true;
        } else {
            engine.workers.running.fetch_sub(1, Relaxed);
            engine.serving.servers.count_refused();
        }
    }

    /// From here on no server reads or fills, and what they have handed over is taken. That may be
    /// a fork through no hook, which is to be attended to before anything else is done.
    pub(crate) fn begin_alone(&mut self) {
        if self.is_alone {
            return;
        }
        let engine = self.engine;
        let closed = engine.serving.gate.close();
        let mut mm = engine.mm.lock();
        self.set_alone(&mut mm);
        self.take_handed(&mut mm);
        let is_late = !mm.changes.late.is_empty();
        drop(mm);
        drop(closed);
        self.await_loads();
        if is_late && self.fork.untracked.is_empty() {
            self.read_late();
        }
    }

    fn set_alone(&mut self, mm: &mut Mm) {
        mm.handed.set_alone(true);
        self.is_alone = true;
    }

    /// True while no server reads or fills.
    pub(crate) fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// Waits until servers have ended their loads: what they were bringing in when the handler
    /// began to work alone they put in place no more, and give back.
    fn await_loads(&self) {
        let mut turns = 0u32;
        while self.engine.mm.lock().busy.is_any_loading() {
            turns = turns.saturating_add(1);
            // One from a disk takes longer.
            if turns < 64 { yield_now() } else { sleep(LOAD_PAUSE) }
        }
    }

    /// Servers may read again, if there are any and no fork is attended to.
    pub(crate) fn end_alone(&mut self) {
        let is_due = self.is_alone && self.sets.is_some();
        if !is_due || self.fork.is_busy() || !self.fork.untracked.is_empty() {
            return;
        }
        let engine = self.engine;
        let mut mm = engine.mm.lock();
        // What it changes was read, and is not applied yet.
        if !mm.changes.late.is_empty() {
            return;
        }
        self.is_alone = false;
        mm.handed.set_alone(false);
        let may_read = mm.handed.may_servers_read();
        drop(mm);
        if may_read {
            engine.serving.servers.admit();
        }
    }

    /// Takes what servers have handed over. True if there was something.
    fn take_handed(&mut self, mm: &mut Mm) -> bool {
        let engine = self.engine;
        engine.serving.servers.end_telling(&mm.handed);
        let before = self.pending.len();
        self.pending.extend(mm.handed.take_faults());
        let Some(event) = mm.handed.take_event() else { return self.pending.len() > before };
        self.take(mm, event);
        if mm.handed.may_servers_read() {
            engine.serving.servers.admit();
        }
        true
    }

    /// Reads what there is or comes within `timeout`: events are applied, faults and requests
    /// queued.
    ///
    /// Reading is what lets the changing thread continue and the kernel move pages again. So it
    /// happens with the memory lock held, and the events are applied before it is given back: a
    /// worker that holds the lock and whose move the kernel does not refuse works with a table that
    /// knows of every change so far.
    ///
    /// # Errors
    /// [`Interrupted`] when a fork through no hook was read.
    pub(crate) fn read_within(&mut self, timeout: Option<Duration>) -> Result<(), Interrupted> {
        // A handler in the idle class comes to its turn when the thread it woke has stopped again:
        // then there is something to read.
        let expected = timeout.is_none() && self.cpu.is_idle();
        if !expected && !self.wait(timeout) && !self.engine.serving.servers.is_told() {
            return self.check_untracked();
        }
        let mut messages = Message::buffer::<MESSAGES_PER_READ>();
        let engine = self.engine;
        // This counts as a turn although it did not poll.
        engine.serving.handler.turns.fetch_add(2, Relaxed);
        let was_alone = self.is_alone;
        // What is read may be a change of mappings: no thread is between a check of a page's word
        // and the fill then.
        let closed = (!was_alone).then(|| engine.serving.gate.close());
        let mut mm = engine.mm.lock();
        let has_taken = self.sets.is_some() && self.take_handed(&mut mm);
        // What is read here servers cannot take, and a thread that waits at no fence may go on
        // while several are read.
        let could_read = mm.handed.may_servers_read();
        let is_one = could_read || !(engine.start.waits_at_fences)();
        let most = if is_one { 1 } else { MESSAGES_PER_READ };
        match self.uffd.read(&mut messages[..most]) {
            Ok(n) => {
                for message in &mut messages[..n] {
                    let event = message.decode();
                    self.take(&mut mm, event);
                }
            }
            Err(Errno::AGAIN) if expected && !has_taken => {
                drop((mm, closed));
                if !self.may_busy_wait() {
                    self.cpu.elsewhere();
                    self.wait(None);
                }
                return self.check_untracked();
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => crate::fatal(&format!(
                "read from the userfaultfd failed: {}",
                swaptide_sys::ErrnoName(errno)
            )),
        }
        // When nothing is under way, no fork is that could be older than what was applied, but one
        // that was read just now: its thread may have gone on.
        let met = self.fork.populating || !self.fork.untracked.is_empty();
        if !mm.changes.recent.is_empty()
            && !self.fork.phase.is_deferring()
            && !met
            && self.uffd.coverage(engine.handler_requests.range()) != Coverage::Changing
        {
            mm.changes.recent.clear();
        }
        engine.publish_usage(&mm);
        if let Some(next) = self.pending.front() {
            mm.table.prefetch_word(PageNo::of(next.addr));
        }
        let is_late = !mm.changes.late.is_empty();
        if is_late && self.sets.is_some() {
            // Nothing that comes next may be read by a server.
            self.set_alone(&mut mm);
        }
        self.look_at_crowd(&mut mm, could_read);
        drop((mm, closed));
        if self.is_alone && !was_alone {
            self.await_loads();
        }
        self.cpu.in_crowd(self.is_crowd);
        if is_late && !met {
            self.read_late();
        }
        self.check_untracked()
    }

    /// Sees whether several threads fault, and whether servers pay then: they may read from now on,
    /// or no longer. `could_read`: they could before this hold of the memory lock read anything.
    fn look_at_crowd(&mut self, mm: &mut Mm, could_read: bool) {
        let servers = &self.engine.serving.servers;
        self.is_crowd = mm.handed.is_crowd();
        mm.handed.do_servers_pay = servers.pay();
        self.has_shared_crowd |= mm.handed.is_crowd_shared();
        // While the handler works alone none may; they are admitted when it ends that.
        if mm.handed.may_servers_read() && !could_read {
            servers.admit();
        }
    }

    /// Applies the events that are there now, and waits a moment for one to come.
    ///
    /// # Errors
    /// As for [`UffdReader::read_within`].
    pub(crate) fn drain(&mut self) -> Result<(), Interrupted> {
        if self.is_server {
            return Err(Interrupted);
        }
        self.read_within(Some(DRAIN_WAIT))
    }

    /// Applies the events that are there, until none is on its way. False when that did not come
    /// within a moment.
    ///
    /// # Errors
    /// As for [`UffdReader::read_within`].
    pub(crate) fn await_quiet(&mut self) -> Result<bool, Interrupted> {
        let began = now();
        loop {
            self.read_within(Some(Duration::ZERO))?;
            if self.uffd.coverage(self.engine.handler_requests.range()) != Coverage::Changing {
                return Ok(true);
            }
            if now().since(began) > DRAIN_WAIT {
                return Ok(false);
            }
            yield_now();
        }
    }

    /// Whether a fork through no hook stands in the way.
    ///
    /// # Errors
    /// [`Interrupted`] when one does.
    fn check_untracked(&self) -> Result<(), Interrupted> {
        let interrupts = !self.fork.populating && !self.fork.untracked.is_empty();
        if interrupts { Err(Interrupted) } else { Ok(()) }
    }

    /// The thread that was woken is not on this CPU. Where a worker is awake the kernel may have
    /// drawn it there, and will again: to follow it (which sends the worker away) would only have
    /// the two CPUs change places. Until the worker sleeps the next message is waited for awake.
    /// True when there is one.
    fn may_busy_wait(&mut self) -> bool {
        let engine = self.engine;
        if !engine.single_faulter() {
            return false;
        }
        let began = now();
        while engine.workers.awake.load(Relaxed) != 0 && now().since(began) < BUSY_WAIT {
            let polled = poll_readable(&[self.uffd.as_fd()], Some(Duration::ZERO));
            if polled.is_ok_and(|ready| ready != 0) {
                self.cpu.later();
                return true;
            }
        }
        false
    }

    /// While several threads fault, the next message comes soon, and to sleep until then costs two
    /// wake-ups, perhaps of a CPU that has gone idle. So it polls for a moment, and yields the CPU
    /// between two polls. True when there is a message, or something was handed over.
    pub(crate) fn wait_awake(&self) -> bool {
        let (engine, began) = (self.engine, now());
        while now().since(began) < CROWD_WAIT && !engine.is_quiescing() {
            let polled = poll_readable(&[self.uffd.as_fd()], Some(Duration::ZERO));
            if polled.is_ok_and(|ready| ready != 0)
                || !self.is_server && engine.serving.servers.is_told()
            {
                return true;
            }
            yield_now();
        }
        false
    }

    /// Waits for a message, and if `awaits_remote` for a remote page to be back. False if no
    /// message came. Others can see that the handler waits, and does not starve.
    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let with_remote = std::mem::take(&mut self.awaits_remote);
        if timeout.is_none() && !with_remote && self.is_crowd && self.wait_awake() {
            return true;
        }
        self.engine.serving.handler.turns.fetch_add(1, Relaxed);
        let ready = match (&self.sets, &self.remote_event) {
            (Some(sets), _) => sets.wait(with_remote, timeout),
            (None, Some(remote)) if with_remote => {
                let fds = [self.uffd.as_fd(), remote.as_fd()];
                matches!(poll_readable(&fds, timeout), Ok(ready) if ready & 1 != 0)
            }
            _ => matches!(poll_readable(&[self.uffd.as_fd()], timeout), Ok(ready) if ready != 0),
        };
        self.engine.serving.handler.turns.fetch_add(1, Relaxed);
        ready
    }

    /// Goes on until no change of mappings is late: what happened before it is read if it is on its
    /// way, and the kernel refuses everything until then (see [`crate::mm::change_order`]). Ends
    /// early when a fork through no hook was read. The handler works alone.
    pub(crate) fn read_late(&mut self) {
        let engine = self.engine;
        debug_assert!(self.is_alone);
        let is_fenced = (engine.start.waits_at_fences)();
        let began = now();
        let mut look = LateLook::default();
        // Without fences a moment in which no change is on its way may be short.
        let (mut first, mut is_all_read) = (None, !is_fenced);
        loop {
            let is_changing =
                self.uffd.coverage(engine.handler_requests.range()) == Coverage::Changing;
            let mut mm = engine.mm.lock();
            // Faults that servers had read when the handler became alone.
            self.take_handed(&mut mm);
            // Where threads change mappings without pause it is not to be seen that none is on its
            // way, but after so long it had been read.
            let waited = now().since(began);
            let most = LATE_EVENT_TIMEOUT * if is_fenced { 1 } else { 2 };
            if is_all_read && (!is_changing || waited > most) {
                apply_late(engine, &mut mm);
            }
            engine.publish_usage(&mm);
            if mm.changes.late.is_empty() || self.check_untracked().is_err() {
                return;
            }
            let step = if is_fenced || waited > LATE_EVENT_TIMEOUT {
                LateStep::Read
            } else {
                if std::mem::replace(&mut first, mm.changes.late.first()) != mm.changes.late.first()
                {
                    look.begin_again();
                }
                drop(mm);
                // Meanwhile this thread alone could change what is late.
                let seen = look.look();
                mm = engine.mm.lock();
                match seen {
                    Some((calls, may_come)) => next_late_step(engine, &mut mm, calls, may_come),
                    None => LateStep::Read,
                }
            };
            if step == LateStep::Apply {
                apply_first_late(engine, &mut mm);
            }
            drop(mm);
            match step {
                LateStep::Apply => {}
                LateStep::Wait => sleep(LOAD_PAUSE),
                LateStep::Read => {
                    self.wait(Some(Duration::from_millis(1)));
                    let mut message = Message::buffer::<1>();
                    is_all_read = self.read_into(&mut engine.mm.lock(), &mut message) == 0;
                }
            }
        }
    }

    /// Reads what there is and takes it in. Gives the number of messages.
    fn read_into(&mut self, mm: &mut Mm, messages: &mut [Message]) -> usize {
        let n = self.uffd.read(messages).unwrap_or(0);
        for message in &mut messages[..n] {
            let event = message.decode();
            self.take(mm, event);
        }
        n
    }

    /// Reads what there is, while everything that was not a fault is noted.
    pub(crate) fn read_noting(&mut self) {
        let engine = self.engine;
        let mut messages = Message::buffer::<MESSAGES_PER_READ>();
        let mut mm = engine.mm.lock();
        // Faults that servers had read when the handler became alone.
        self.take_handed(&mut mm);
        self.read_into(&mut mm, &mut messages);
    }

    /// Takes an event in: what changes the table is applied at once, what asks for work is queued.
    fn take(&mut self, mm: &mut Mm, event: Event) {
        let engine = self.engine;
        let request = match &event {
            Event::Remove(range) => engine.handler_requests.decode_in(range.start),
            _ => None,
        };
        match (event, request) {
            (Event::Fault { addr, .. }, _)
                if engine.handler_requests.request_pages().contains(addr) =>
            {
                self.note_request(HandlerRequest::RequestPage)
            }
            (Event::Fault { addr, tid, .. }, _) => {
                let fault = Fault { addr, tid, tries: 0 };
                if !self.is_of_worker(fault) {
                    mm.handed.crowd.note(tid);
                }
                mm.table.prefetch_leaf(PageNo::of(addr));
                self.pending.push_back(fault)
            }
            (_, Some(HandlerRequest::ForkDone)) => self.fork.is_done = true,
            (_, Some(request)) => self.note_request(request),
            (Event::Fork { uffd }, _)
                if self.fork.phase.is_deferring() && self.fork.child.is_none() =>
            {
                self.fork.phase = ForkPhase::Forked;
                self.fork.child = Some(self.fork.new_child(uffd));
            }
            (Event::Fork { uffd }, _) => {
                self.fork.is_torn |= self.fork.phase.is_deferring();
                let child = self.fork.new_child(uffd);
                self.fork.untracked.push(child);
                self.set_alone(mm);
            }
            // What follows a fork event may be earlier than the fork: the child must be looked at
            // first.
            (event, None) if self.fork.notes_events() || !self.fork.untracked.is_empty() => {
                mm.changes.behind = true;
                self.fork.note(&event);
            }
            (event, None) => apply(engine, mm, event),
        }
    }

    /// A thread has asked for something, or the handler itself owes it. Each kind is noted once:
    /// serving it serves all threads that have asked, and there is room without allocating.
    pub(crate) fn note_request(&mut self, request: HandlerRequest) {
        if !self.requests.contains(&request) {
            self.requests.push(request);
        }
    }

    /// The next request that is to be served: that of a thread that is about to fork comes after
    /// all others, whose threads may hold locks that it waits for.
    pub(crate) fn next_request(&mut self) -> Option<HandlerRequest> {
        let is_other = |request: &HandlerRequest| *request != HandlerRequest::ForkPrepare;
        let at = self.requests.iter().position(is_other).unwrap_or(0);
        (!self.requests.is_empty()).then(|| self.requests.remove(at))
    }

    /// Takes a request out of the queue. False when it was not there.
    pub(crate) fn take_request(&mut self, request: HandlerRequest) -> bool {
        let at = self.requests.iter().position(|of| *of == request);
        at.map(|at| self.requests.remove(at)).is_some()
    }

    /// Applies what was noted. Those events have been read, so that the kernel no longer holds
    /// moves back for them: this must come before a worker continues, and before a fault is
    /// answered. The forking thread must not be inside fork(2), or back from it.
    pub(crate) fn apply_noted(&mut self) {
        if self.fork.noted.is_empty() {
            return;
        }
        self.fork.has_applied = true;
        let engine = self.engine;
        let mut mm = engine.mm.lock();
        for event in self.fork.noted.drain(..).filter_map(|noted| noted.change.event()) {
            apply(engine, &mut mm, event);
        }
        mm.changes.behind = false;
        engine.publish_usage(&mm);
        let is_late = !mm.changes.late.is_empty();
        drop(mm);
        if is_late {
            let phase = self.fork.phase;
            if phase.is_deferring() {
                self.fork.phase = ForkPhase::Quiescing;
            }
            self.read_late();
            self.fork.phase = phase;
        }
    }

    /// The record of pages that come in, while a fork is followed.
    pub(crate) fn record(&mut self) -> Option<&mut BroughtPages> {
        (self.fork.phase.is_deferring() && self.engine.fork.followed)
            .then_some(&mut self.fork.brought)
    }

    /// True for a fault of a worker, which faults pages for writing.
    pub(crate) fn is_of_worker(&self, fault: Fault) -> bool {
        self.engine.workers.tids.iter().any(|tid| tid.load(Relaxed) == fault.tid)
    }

    /// A fault, a fence or a hint is done, and its thread about to be woken. Nothing that a fork
    /// copies is changed after this, and the forking thread may wait for just that thread: so it is
    /// looked at now.
    pub(crate) fn is_about_to_wake(&mut self) {
        if self.fork.phase.is_deferring() {
            self.fork.seen_waiting = waits_outside_fork(self.engine.fork.forker.load(Acquire));
        }
    }
}
