//! The handler: the one thread that reads the program's userfaultfd.
//!
//! Owns: the userfaultfd, the buffers of the fault path, and the worker with which it reclaims when
//! the background workers have not kept up.
//!
//! Invariants
//! 1. A message that was read is acted upon before the next read, or stands in `pending`; events
//!    are applied before faults.
//! 2. A fault is answered by filling its page and waking, or by waking alone, in which case the
//!    thread faults again. None is forgotten.
//! 3. While an event is unread the kernel refuses fills with EAGAIN; the handler then reads events
//!    and tries again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::time::Duration;

use swaptide_ipc::Counter;
use swaptide_store::codec::Unpacker;
use swaptide_store::file::ReadAhead;
use swaptide_sys::eventfd::EventFd;
use swaptide_sys::maps::MapsFile;
use swaptide_sys::mem::Mapping;
use swaptide_sys::page::VirtRange;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr};
use swaptide_sys::pagemap::Pagemap;
use swaptide_sys::sock::poll_readable;
use swaptide_sys::thread::{Nanos, now};
use swaptide_sys::uffd::{Coverage, Event, Message, Uffd};
use swaptide_sys::{AsFd, Errno};

use crate::EngineError;
use crate::engine::{Engine, Mm};
use crate::fault::path::Served;
use crate::fault::remote::InFlight;
use crate::fork::UnmanagedChild;
use crate::fork::brought::BroughtPages;
use crate::fork::layout::VmaChange;
use crate::memcg::pool_sizing::Loads;
use crate::memcg::psi::Stall;
use crate::memcg::swap_high::Throttle;
use crate::memcg::thrash::ThrashDetector;
use crate::mm::types::{PAGES_PER_LEAF, PageNo, range_of};
use crate::readahead::history::TemporalPrefetcher;
use crate::readahead::locality::Locality;
use crate::reclaim::worker::Worker;
use crate::requests::{FaultRequest, HandlerRequest};
use crate::sched::handler_cpu::HandlerCpu;
use crate::vma::small::Candidates;
use crate::vma::unmovable::Unmovable;

/// A fault that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Where.
    pub addr: VirtAddr,
    /// The waiting thread.
    pub tid: u32,
    /// Times it was tried in vain.
    pub tries: u32,
}

/// How long an event is waited for that another one shows to be on its way: its thread only has to
/// come to its turn.
pub(crate) const LATE_EVENT_TIMEOUT: Duration = Duration::from_secs(1);
/// Faults before an engine ends that a test wants to end.
const FAULTS_BEFORE_INJECTED_FAILURE: u32 = 500;
/// Answers after which a program that is to be detached has some of it brought in, though faults
/// wait.
const FAULTS_PER_DETACH_STEP: u32 = 16;
/// How long the next message is waited for awake.
const BUSY_WAIT: Duration = Duration::from_micros(50);
/// Messages of one read.
const MESSAGES_PER_READ: usize = 16;
/// Bytes of the buffer for pages that are copied in.
pub const COPY_BYTES: usize = 256 << 10;

/// See the module's description.
pub struct Handler {
    pub(crate) engine: &'static Engine,
    pub(crate) uffd: &'static Uffd,
    pub(crate) pending: VecDeque<Fault>,
    /// The fault that is being answered.
    pub(crate) answering: Option<Fault>,
    pub(crate) worker: Worker,
    /// What pages are decompressed with.
    pub(crate) unpacker: Unpacker,
    /// What loading from compressed memory cost since it was told to the division.
    pub(crate) loads: Loads,
    pub(crate) locality: Locality,
    pub(crate) prefetcher: TemporalPrefetcher,
    /// Pages that were sent for, and what is struck when some are back.
    pub(crate) remote: InFlight,
    pub(crate) wake_event: Arc<EventFd>,
    /// The next wait is one for remote pages, too: a thread that waits for an event that is due has
    /// nothing of them.
    listens: bool,
    /// A page that is left out of the window that is being brought in.
    pub(crate) leaves_out: Option<PageNo>,
    /// What was read from rotational disks, and not asked for yet; and how many pages of the last
    /// read had been.
    pub(crate) ahead: ReadAhead,
    pub(crate) held_hits: usize,
    /// Of the pages that came for the fault that is being answered, how many had been.
    pub(crate) held_came: usize,
    /// Smoothed time of reading a page from the file, in nanoseconds.
    pub(crate) read_ns: u64,
    /// Loads of several pages so far; every Nth is treated as stale (0: none).
    pub(crate) large_loads: u32,
    pub(crate) stale_every: u32,
    /// The same of fills that end half way.
    pub(crate) large_fills: u32,
    pub(crate) part_every: u32,
    pub(crate) hints: Vec<(VirtRange, crate::readahead::locality::Reading)>,
    pub(crate) cpu: HandlerCpu,
    /// Pages are loaded here before they are copied in.
    pub(crate) copy: Mapping,
    /// Fresh pages for growth come from here when no staging frame is free.
    pub(crate) fresh_pages: Mapping,
    pub(crate) zeros: Mapping,
    pub(crate) pagemap: Pagemap,
    pub(crate) maps: MapsFile,
    pub(crate) maps_buf: Box<[u8]>,
    pub(crate) found: Vec<VirtRange>,
    pub(crate) gaps: Vec<VirtRange>,
    /// Small mappings that the look under way has found.
    pub(crate) candidates: Candidates,
    /// Memory that cannot go out.
    pub(crate) unmovable: Unmovable,
    /// Where the mappings adopted last have the kernel's page of zeros.
    pub(crate) zeros_mapped: Vec<VirtRange>,
    /// A look at all mappings is under way; another one was asked for meanwhile.
    pub(crate) adopting: bool,
    pub(crate) adopt_again: bool,
    /// Fences are being answered; another one was come to meanwhile.
    pub(crate) fencing: bool,
    pub(crate) fence_again: bool,
    /// Fault requests are being answered; another came meanwhile; some are not empty yet, until
    /// when they are looked after.
    answering_doors: bool,
    knocked_again: bool,
    doors_until: Option<Nanos>,
    /// Requests that were not served yet.
    pub(crate) requests: Vec<HandlerRequest>,
    /// Children of forks that came through no hook.
    pub(crate) untracked_children: Vec<Uffd>,
    /// A fork is under way.
    pub(crate) forking: bool,
    /// Events are noted and not applied, faults held.
    pub(crate) deferring: bool,
    /// The forking thread has returned from fork(2).
    pub(crate) fork_done: bool,
    /// The forked child's userfaultfd.
    pub(crate) child: Option<Uffd>,
    /// A fork event was read: memory may be allocated again.
    pub(crate) has_forked: bool,
    /// Children of forks that came through no hook are being given their pages: events are noted
    /// and not applied.
    pub(crate) giving: bool,
    /// Such children, but for the one that is given its pages now.
    pub(crate) recipients: Vec<UnmanagedChild>,
    /// How many of them there were since events were applied last.
    pub(crate) untracked_since_quiesce: usize,
    /// The engine's memory changed while it may have been copied.
    pub(crate) torn: bool,
    /// The forking thread was seen waiting after the engine's memory was changed for another
    /// thread.
    pub(crate) seen_waiting: bool,
    /// Pages that came in during a fork that is followed: its child may lack them
    /// ([`crate::fork`]).
    pub(crate) brought: BroughtPages,
    /// Events noted during a fork. Its memory is there before: nothing may be allocated then.
    pub(crate) noted: Vec<VmaChange>,
    /// Where bringing in what is swapped continues, unasked by any fault.
    pub(crate) preload: Option<PageNo>,
    /// Threads that wait because they grew past `swap.high`.
    pub(crate) throttle: Throttle,
    pub(crate) stall: Stall,
    pub(crate) squeeze: ThrashDetector,
    /// Faults until this engine ends as a test wants it (0: never).
    pub(crate) fails_at: u32,
    /// The program is to be detached: where bringing everything in continues.
    pub(crate) detaching: Option<PageNo>,
}

impl Handler {
    /// The handler of an engine.
    ///
    /// # Errors
    /// When memory or a file of /proc is refused.
    pub fn new(engine: &'static Engine) -> Result<Handler, EngineError> {
        let memory = |what| move |e| EngineError::Memory(what, e);
        let zeros = Mapping::reserve(64 << 10).map_err(memory("the zero pages"))?;
        let copy = Mapping::reserve(COPY_BYTES).map_err(memory("the copy buffer"))?;
        let mint = Mapping::reserve_aligned(PAGES_PER_LEAF * PAGE_SIZE, PAGES_PER_LEAF * PAGE_SIZE)
            .map_err(memory("fresh pages"))?;
        mint.unlock();
        let header = &engine.start.segment.header;
        Ok(Handler {
            engine,
            uffd: engine.uffd(),
            // A thread waits for one fault at a time, and nothing may be allocated during a fork.
            pending: VecDeque::with_capacity(4096),
            answering: None,
            worker: Worker::new(engine.scheme),
            unpacker: Unpacker::new(),
            loads: Loads::default(),
            locality: Locality::new(),
            prefetcher: TemporalPrefetcher::new(),
            remote: InFlight::new(),
            listens: false,
            wake_event: engine.far.open_event().map_err(memory("an eventfd for remote pages"))?,
            leaves_out: None,
            ahead: ReadAhead::default(),
            held_hits: 0,
            held_came: 0,
            read_ns: 60_000,
            large_loads: 0,
            stale_every: header.stale_every.load(Relaxed),
            large_fills: 0,
            part_every: header.part_every.load(Relaxed),
            hints: Vec::new(),
            cpu: HandlerCpu::new(),
            copy,
            fresh_pages: mint,
            zeros,
            pagemap: Pagemap::open_self().map_err(memory("/proc/self/pagemap"))?,
            maps: MapsFile::open_self().map_err(memory("/proc/self/maps"))?,
            maps_buf: vec![0; 64 << 10].into_boxed_slice(),
            found: Vec::with_capacity(256),
            zeros_mapped: Vec::with_capacity(64),
            gaps: Vec::with_capacity(16),
            candidates: Candidates::default(),
            unmovable: Unmovable::default(),
            requests: Vec::with_capacity(64),
            untracked_children: Vec::with_capacity(4),
            forking: false,
            deferring: false,
            fork_done: false,
            child: None,
            has_forked: false,
            adopting: false,
            adopt_again: false,
            fencing: false,
            fence_again: false,
            answering_doors: false,
            knocked_again: false,
            doors_until: None,
            giving: false,
            recipients: Vec::new(),
            untracked_since_quiesce: 0,
            torn: false,
            seen_waiting: false,
            brought: BroughtPages::new(engine.followed)
                .map_err(memory("pages that come in during forks"))?,
            noted: Vec::with_capacity(crate::fork::MAX_NOTED_EVENTS),
            preload: None,
            throttle: Throttle::new(),
            stall: Stall::default(),
            squeeze: ThrashDetector::default(),
            fails_at: if matches!(header.fail.load(Relaxed), 1..=4) {
                FAULTS_BEFORE_INJECTED_FAILURE
            } else {
                0
            },
            detaching: None,
        })
    }

    /// Serves until the process ends. Returns when the program is to be detached and nothing of it
    /// is out: [`Handler::detach`] does it then, or this is called again.
    pub fn run(&mut self) {
        self.engine.handler_tid.store(swaptide_sys::thread::gettid().0, Relaxed);
        // One is answered before this can return, for what is asked meanwhile must be read.
        let mut answers = 1u32;
        loop {
            self.complete();
            if self.pending.is_empty() {
                if self.stall.is_on() {
                    self.stalls_until(now());
                }
                match self.preload.filter(|_| !self.preload_waits()).or(self.detaching) {
                    // Faults go first.
                    Some(_) => self.read_within(Some(Duration::ZERO)),
                    None => {
                        self.listens = true;
                        let patience = self.empty_request_pages(self.throttle.time_left());
                        self.read_within(patience);
                    }
                }
            }
            self.attend_fork();
            self.wake_held();
            if self.pending.is_empty() && !self.forking {
                if std::mem::take(&mut self.adopt_again) {
                    self.adopt();
                }
                self.preload_some();
            }
            // Threads that give memory up and touch it again never cease to fault.
            let is_due = self.detaching.is_some()
                && (self.pending.is_empty() || answers.is_multiple_of(FAULTS_PER_DETACH_STEP));
            if is_due && !self.forking && self.detach_some() {
                self.stalls_until(now());
                return;
            }
            if let Some(fault) = self.pending.pop_front() {
                self.answer(fault);
                answers = answers.wrapping_add(1);
                if !self.forking {
                    self.worker.balance(self.engine);
                }
                if self.fails_at > 0 {
                    self.inject_failure();
                }
            }
        }
    }

    /// Tests want to see how a program ends whose engine does.
    #[cold]
    fn inject_failure(&mut self) {
        self.fails_at -= 1;
        match self.engine.start.segment.header.fail.load(Relaxed) {
            _ if self.fails_at > 0 => {}
            1 => panic!("a check failed (injected)"),
            2 => self.engine.fails.store(true, Relaxed),
            3 => swaptide_sys::thread::exit_thread(),
            _ => std::alloc::handle_alloc_error(std::alloc::Layout::new::<u64>()),
        }
    }

    /// Reads what there is or comes within `timeout`: events are applied, faults queued.
    ///
    /// Reading is what lets the changing thread continue and the kernel move pages again. So it
    /// happens with the memory lock held, and the events are applied before it is given back: a
    /// worker that holds the lock and whose move the kernel does not refuse works with a table that
    /// knows of every change so far.
    pub(crate) fn read_within(&mut self, timeout: Option<Duration>) {
        // A handler in the idle class comes to its turn when the thread it woke has stopped again:
        // then there is something to read.
        let expected = timeout.is_none() && self.cpu.is_idle();
        if !expected && !self.wait(timeout) {
            return;
        }
        let mut messages = Message::buffer::<MESSAGES_PER_READ>();
        let engine = self.engine;
        // It comes to its turn, though it did not wait.
        engine.turns.fetch_add(2, Relaxed);
        let mut mm = engine.mm.lock();
        match self.uffd.read(&mut messages) {
            Ok(n) => {
                for message in &mut messages[..n] {
                    let event = message.decode();
                    self.take(&mut mm, event);
                }
            }
            Err(Errno::AGAIN) if expected => {
                drop(mm);
                if self.may_busy_wait() {
                    return;
                }
                self.cpu.elsewhere();
                self.wait(None);
                return;
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => crate::fatal(&format!(
                "read from the userfaultfd failed: {}",
                swaptide_sys::ErrnoName(errno)
            )),
        }
        // When nothing is under way, no fork is that could be older than what was applied, but one
        // that was read just now: its thread may have gone on.
        let met = self.giving || !self.untracked_children.is_empty();
        if !mm.recent.is_empty()
            && !self.deferring
            && !met
            && self.uffd.coverage(engine.bells.range()) != Coverage::Changing
        {
            mm.recent.clear();
        }
        engine.publish_usage(&mm);
        let is_late = !mm.late.is_empty();
        drop(mm);
        if self.giving {
            return;
        }
        self.populate_untracked();
        if is_late {
            self.read_late();
        }
        self.serve_requests();
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
        while engine.awake.load(Relaxed) != 0 && now().since(began) < BUSY_WAIT {
            let polled = poll_readable(&[self.uffd.as_fd()], Some(Duration::ZERO));
            if polled.is_ok_and(|ready| ready != 0) {
                self.cpu.later();
                return true;
            }
        }
        false
    }

    /// Waits for a message, and where it `listens` for a far page to be back. False if no message
    /// came. Others can see that the handler waits, and does not starve.
    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.engine.turns.fetch_add(1, Relaxed);
        let fds = [self.uffd.as_fd(), self.wake_event.as_fd()];
        let awaited = if std::mem::take(&mut self.listens) && !self.remote.is_empty() {
            &fds
        } else {
            &fds[..1]
        };
        let ready = matches!(poll_readable(awaited, timeout), Ok(ready) if ready & 1 != 0);
        self.engine.turns.fetch_add(1, Relaxed);
        ready
    }

    /// Reads on until no change of mappings is late: what happened before it is on its way, and the
    /// kernel refuses everything until it was read (see [`crate::vma::events`]).
    pub(crate) fn read_late(&mut self) {
        let engine = self.engine;
        let began = now();
        loop {
            self.wait(Some(Duration::from_millis(1)));
            let mut messages = Message::buffer::<1>();
            let mut mm = engine.mm.lock();
            if let Ok(n) = self.uffd.read(&mut messages) {
                for message in &mut messages[..n] {
                    let event = message.decode();
                    self.take(&mut mm, event);
                }
            } else if self.uffd.coverage(engine.bells.range()) != Coverage::Changing
                || now().since(began) > LATE_EVENT_TIMEOUT
            {
                // None is on its way. Where threads change mappings without pause that is not to be
                // seen, but after so long it had been read.
                engine.apply_late(&mut mm);
            }
            engine.publish_usage(&mm);
            let over = mm.late.is_empty();
            drop(mm);
            self.populate_untracked();
            if over {
                return;
            }
        }
    }

    /// Reads what there is, while everything that was not a fault is noted.
    pub(crate) fn read_noting(&mut self) {
        let engine = self.engine;
        let mut messages = Message::buffer::<MESSAGES_PER_READ>();
        let mut mm = engine.mm.lock();
        if let Ok(n) = self.uffd.read(&mut messages) {
            for message in &mut messages[..n] {
                let event = message.decode();
                self.take(&mut mm, event);
            }
        }
    }

    /// Applies the events that are there now, and waits a moment for one to come.
    pub(crate) fn drain_events(&mut self) {
        self.read_within(Some(Duration::from_micros(200)));
    }

    /// Takes an event in: what changes the table is applied at once, what asks for work is queued.
    pub(crate) fn take(&mut self, mm: &mut Mm, event: Event) {
        let ring = match &event {
            Event::Remove(range) => self.engine.bells.decode_in(range.start),
            _ => None,
        };
        match (event, ring) {
            (Event::Fault { addr, .. }, _) if self.engine.bells.request_pages().contains(addr) => {
                self.note_request(HandlerRequest::Door)
            }
            (Event::Fault { addr, tid, .. }, _) => {
                self.pending.push_back(Fault { addr, tid, tries: 0 })
            }
            (_, Some(HandlerRequest::ForkDone)) => self.fork_done = true,
            (_, Some(ring)) => self.note_request(ring),
            (Event::Fork { uffd }, _) if self.deferring && self.child.is_none() => {
                self.has_forked = true;
                self.child = Some(uffd);
            }
            (Event::Fork { uffd }, _) => self.untracked_children.push(uffd),
            // What follows a fork event may be earlier than the fork: the child must be looked at
            // first.
            (event, None)
                if self.deferring || self.giving || !self.untracked_children.is_empty() =>
            {
                mm.behind = true;
                self.note_event(event);
            }
            (event, None) => self.engine.apply(mm, event),
        }
    }

    /// A request has come, or the handler itself owes what it asks for. Each is noted once, and
    /// served for all that asked: so there is room without allocating.
    pub(crate) fn note_request(&mut self, ring: HandlerRequest) {
        if !self.requests.contains(&ring) {
            self.requests.push(ring);
        }
    }

    /// Serves the requests, unless a fork is under way: then it waits for its end. To
    /// stand still for a fork is for [`Handler::run`] alone: here a fault or a hint may be half
    /// answered, and who waits for that may have a lock that the forking thread waits for.
    pub(crate) fn serve_requests(&mut self) {
        self.populate_untracked();
        while !self.forking {
            let Some(at) =
                self.requests.iter().position(|ring| *ring != HandlerRequest::ForkPrepare)
            else {
                return;
            };
            match self.requests.remove(at) {
                HandlerRequest::Adopt => self.adopt(),
                HandlerRequest::Hint => {
                    if let Some((hint, range)) = self.engine.bells.take_hint() {
                        self.hint(hint, range);
                    }
                    self.engine.bells.answer();
                }
                HandlerRequest::Fence => self.fence(),
                HandlerRequest::Preload => self.preload = self.preload.or(Some(PageNo(0))),
                HandlerRequest::Detach => self.detaching = self.detaching.or(Some(PageNo(0))),
                HandlerRequest::ForkPrepare | HandlerRequest::ForkDone => {}
                HandlerRequest::Door => self.serve_request_pages(),
            }
        }
    }

    /// Stands still for a fork, if one was asked for.
    fn attend_fork(&mut self) {
        if let Some(at) = self.requests.iter().position(|ring| *ring == HandlerRequest::ForkPrepare)
        {
            self.requests.remove(at);
            self.fork();
            self.serve_requests();
        }
    }

    /// Does what is wanted at the doors, and lets those continue who stand there.
    fn serve_request_pages(&mut self) {
        // As in `fence`.
        if self.answering_doors {
            self.knocked_again = true;
            return;
        }
        self.answering_doors = true;
        let bells = &self.engine.bells;
        loop {
            self.knocked_again = false;
            let mut at = 0;
            while let Some((index, knock, range)) = bells.waiting_at(at) {
                at = index + 1;
                let mut is_done = true;
                match knock {
                    FaultRequest::Fence => self.adopt_mapping(range.start),
                    FaultRequest::Release => {
                        // What the mailbox was answered stays.
                        let before = bells.refused.swap(false, AcqRel);
                        self.release(range);
                        is_done = !bells.refused.swap(before, AcqRel);
                    }
                    // Answered by the end of everything.
                    FaultRequest::Detach => {
                        self.detaching = self.detaching.or(Some(PageNo(0)));
                        continue;
                    }
                }
                bells.done_at(index, is_done);
            }
            if !self.knocked_again {
                break;
            }
        }
        self.answering_doors = false;
        self.doors_until = Some(Nanos(now().0 + LATE_EVENT_TIMEOUT.as_nanos() as u64));
        bells.release_answered(self.uffd);
    }

    /// Looks after doors that are not empty; how long a message is waited for then. One whose
    /// thread does not come back (a signal handler left it) is given up after a moment.
    fn empty_request_pages(&mut self, patience: Option<Duration>) -> Option<Duration> {
        let Some(until) = self.doors_until else { return patience };
        if !self.engine.bells.release_answered(self.uffd) || now() > until {
            self.doors_until = None;
            return patience;
        }
        Some(patience.unwrap_or(Duration::MAX).min(Duration::from_millis(1)))
    }

    /// Lists what of moved or grown mappings is armed and not listed yet, and lets their threads go
    /// on.
    pub(crate) fn fence(&mut self) {
        // Adoption reads on, and so may come here again: a place that was answered there may be
        // another thread's when this continues.
        if self.fencing {
            self.fence_again = true;
            return;
        }
        self.fencing = true;
        let engine = self.engine;
        loop {
            self.fence_again = false;
            engine.bells.answer_fences(|at| self.adopt_mapping(at));
            if !self.fence_again {
                break;
            }
        }
        self.fencing = false;
    }

    /// Answers one fault, or queues it again.
    pub(crate) fn answer(&mut self, fault: Fault) {
        let outer = self.answering.replace(fault);
        self.answer_it(fault);
        self.answering = outer;
    }

    /// True for a fault of a worker, which faults pages for writing.
    pub(crate) fn is_of_worker(&self, fault: Fault) -> bool {
        self.engine.worker_tids.iter().any(|tid| tid.load(Relaxed) == fault.tid)
    }

    fn answer_it(&mut self, mut fault: Fault) {
        let started = now();
        let page = PageNo::of(fault.addr);
        self.answers_since(Some(started));
        self.cpu.follow(fault.tid, started, &self.engine.worker_tids);
        self.engine.handler_cpu.store(self.cpu.own_cpu(), Relaxed);
        let served = self.serve(page, fault, started);
        self.answers_since(None);
        match served {
            Served::Filled => {
                let answered = now();
                self.engine.slot().faults.record(answered.since(started).as_nanos() as u64);
                self.engine.count(Counter::Pgmajfault, 1);
                self.cpu.answered(answered);
                if !self.is_of_worker(fault) && self.hold_fault(page) {
                    self.stalls_from(answered);
                    return;
                }
                self.stalls_until(answered);
                self.is_about_to_wake();
                // Last: the thread may have this CPU at once.
                let _ = self.uffd.wake(range_of(page, 1));
            }
            Served::Spurious => {
                self.is_about_to_wake();
                let _ = self.uffd.wake(range_of(page, 1));
            }
            Served::Away => {}
            Served::Crowded => self.remote.wait(fault),
            Served::Again => {
                fault.tries += 1;
                // A thread that changes mappings without pause leaves moments only between the
                // reading of its event and its next one.
                if !fault.tries.is_multiple_of(8) {
                    self.drain_events();
                }
                if fault.tries > 64 {
                    // Let it fault afresh: other events and faults get their turn.
                    let _ = self.uffd.wake(range_of(page, 1));
                } else {
                    self.pending.push_front(fault);
                }
            }
            Served::Unmanaged => {
                self.drain_events();
                if !self.adopt_at(fault.addr) || fault.tries > 8 {
                    let _ = self.uffd.wake(range_of(page, 1));
                } else {
                    fault.tries += 1;
                    self.pending.push_front(fault);
                }
            }
        }
    }
}
