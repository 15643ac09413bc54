//! The handler: the one thread that reads the program's userfaultfd.
//!
//! Owns: the userfaultfd, the buffers of the fault path, and the worker with which it reclaims when the background workers have not kept up.
//!
//! Invariants
//! 1. A message that was read is acted upon before the next read, or stands in `pending`; events are applied before faults.
//! 2. A fault is answered by filling its page and waking, or by waking alone, in which case the thread faults again. None is forgotten.
//! 3. While an event is unread the kernel refuses fills with EAGAIN; the handler then reads events and tries again.

use std::collections::VecDeque;
use std::time::Duration;

use swaptide_ipc::Counter;
use swaptide_sys::{AsFd, Errno};
use swaptide_sys::maps::MapsFile;
use swaptide_sys::mem::Mapping;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr};
use swaptide_sys::pagemap::Pagemap;
use swaptide_sys::page::VirtRange;
use swaptide_sys::sock::poll_readable;
use swaptide_sys::thread::now;
use swaptide_sys::uffd::{Event, Features, Message, Uffd};

use crate::EngineError;
use crate::bell::Ring;
use crate::engine::Engine;
use crate::fault::Served;
use crate::ids::{PAGES_PER_LEAF, PageNo, range_of};
use crate::locality::Locality;
use crate::place::Place;
use crate::reclaim::Worker;

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

/// What the engine needs of the kernel.
pub const FEATURES: Features = Features::EVENT_FORK
    .union(Features::EVENT_REMAP)
    .union(Features::EVENT_REMOVE)
    .union(Features::EVENT_UNMAP)
    .union(Features::THREAD_ID)
    .union(Features::MOVE)
    .union(Features::POISON);

/// Messages of one read.
const MESSAGES: usize = 16;
/// Bytes of the buffer for pages that are copied in.
pub const COPY_BYTES: usize = 256 << 10;

/// See the module's description.
pub struct Handler {
    pub(crate) engine: &'static Engine,
    pub(crate) uffd: Uffd,
    pub(crate) pending: VecDeque<Fault>,
    pub(crate) worker: Worker,
    pub(crate) locality: Locality,
    pub(crate) hints: Vec<(VirtRange, crate::locality::Reading)>,
    pub(crate) place: Place,
    /// Pages are loaded here before they are copied in.
    pub(crate) copy: Mapping,
    /// Fresh pages for growth come from here when no staging frame is free.
    pub(crate) mint: Mapping,
    pub(crate) zeros: Mapping,
    pub(crate) pagemap: Pagemap,
    pub(crate) maps: MapsFile,
    pub(crate) maps_buf: Box<[u8]>,
    pub(crate) found: Vec<VirtRange>,
    pub(crate) gaps: Vec<VirtRange>,
    /// A fork is under way: the userfaultfd is non-blocking.
    pub(crate) forking: bool,
    /// Events are noted and not applied, faults held.
    pub(crate) deferring: bool,
    /// The forking thread has returned from fork(2).
    pub(crate) fork_done: bool,
    /// The forked child's userfaultfd.
    pub(crate) child: Option<Uffd>,
    /// Events noted during a fork. Its memory is there before: nothing may be allocated then.
    pub(crate) noted: Vec<Event>,
}

impl Handler {
    /// A handler for a new engine.
    ///
    /// # Errors
    /// When a userfaultfd or memory is refused.
    pub fn new(engine: &'static Engine) -> Result<Handler, EngineError> {
        let uffd = Uffd::open(FEATURES, false).map_err(EngineError::Open)?;
        uffd.register_missing(engine.bells.range()).map_err(|e| EngineError::Memory("registering the bells", e))?;
        Handler::with(engine, uffd)
    }

    /// A handler over a userfaultfd that is set up already (a forked child's).
    ///
    /// # Errors
    /// When memory or a file of /proc is refused.
    pub fn with(engine: &'static Engine, uffd: Uffd) -> Result<Handler, EngineError> {
        let memory = |what| move |e| EngineError::Memory(what, e);
        let zeros = Mapping::reserve(64 << 10).map_err(memory("the zero pages"))?;
        let copy = Mapping::reserve(COPY_BYTES).map_err(memory("the copy buffer"))?;
        let mint = Mapping::reserve_aligned(PAGES_PER_LEAF * PAGE_SIZE, PAGES_PER_LEAF * PAGE_SIZE).map_err(memory("fresh pages"))?;
        Ok(Handler {
            engine,
            uffd,
            pending: VecDeque::with_capacity(256),
            worker: Worker::new(),
            locality: Locality::new(),
            hints: Vec::new(),
            place: Place::new(),
            copy,
            mint,
            zeros,
            pagemap: Pagemap::open_self().map_err(memory("/proc/self/pagemap"))?,
            maps: MapsFile::open_self().map_err(memory("/proc/self/maps"))?,
            maps_buf: vec![0; 64 << 10].into_boxed_slice(),
            found: Vec::with_capacity(256),
            gaps: Vec::with_capacity(16),
            forking: false,
            deferring: false,
            fork_done: false,
            child: None,
            noted: Vec::with_capacity(crate::fork::NOTED),
        })
    }

    /// Serves until the process ends.
    pub fn run(&mut self) -> ! {
        loop {
            if self.pending.is_empty() {
                self.place.before_wait();
                self.read();
            }
            if let Some(fault) = self.pending.pop_front() {
                self.answer(fault);
            }
        }
    }

    /// Reads what there is, waiting if there is nothing: events are applied, faults queued.
    pub(crate) fn read(&mut self) {
        let mut messages = Message::buffer::<MESSAGES>();
        match self.uffd.read(&mut messages) {
            Ok(n) => {
                for message in &mut messages[..n] {
                    let event = message.decode();
                    self.take(event);
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => crate::fatal(&format!("reading the userfaultfd failed: {errno}")),
        }
    }

    /// Applies the events that are there now, and waits a moment for one to come.
    pub(crate) fn drain_events(&mut self) {
        if !self.forking && self.uffd.set_nonblocking(true).is_err() {
            crate::fatal("the userfaultfd cannot be made non-blocking");
        }
        let _ = poll_readable(&[self.uffd.as_fd()], Some(Duration::from_micros(200)));
        self.read();
        if !self.forking && self.uffd.set_nonblocking(false).is_err() {
            crate::fatal("the userfaultfd cannot be made blocking");
        }
    }

    pub(crate) fn take(&mut self, event: Event) {
        match event {
            Event::Fault { addr, tid, .. } => self.pending.push_back(Fault { addr, tid, tries: 0 }),
            Event::Fork { uffd } if self.deferring && self.child.is_none() => self.child = Some(uffd),
            Event::Remove(range) if self.deferring && self.engine.bells.decode_in(range.start) == Some(Ring::ForkDone) => self.fork_done = true,
            Event::Fork { uffd } => self.stranger(uffd),
            event if self.deferring => self.note_event(event),
            Event::Remove(range) if self.engine.bells.range().contains(range.start) => self.rung(range.start),
            other => self.apply(other),
        }
    }

    /// Applies a change of mappings.
    pub(crate) fn apply(&mut self, event: Event) {
        match event {
            Event::Remove(range) => self.engine.removed(range),
            Event::Unmap(range) => self.engine.unmapped(range),
            Event::Remap { from, to, len } => self.engine.remapped(from, to, len),
            Event::Fault { .. } | Event::Fork { .. } => {}
            Event::Unknown(kind) => crate::fatal(&format!("the userfaultfd sent a message of the unknown kind {kind}")),
        }
    }

    fn rung(&mut self, at: VirtAddr) {
        match self.engine.bells.decode(at) {
            Some(Ring::Adopt) => self.adopt(),
            Some(Ring::ForkPrepare) => self.fork(),
            Some(Ring::Hint) => {
                if let Some((hint, range)) = self.engine.bells.take_hint() {
                    self.hint(hint, range);
                }
                self.engine.bells.answer();
            }
            Some(Ring::ForkDone) | None => {}
        }
    }

    /// Answers one fault, or queues it again.
    pub(crate) fn answer(&mut self, mut fault: Fault) {
        let started = now();
        let page = PageNo::of(fault.addr);
        self.place.follow(fault.tid);
        match self.serve(page) {
            Served::Filled => {
                let _ = self.uffd.wake(range_of(page, 1));
                self.engine.slot().faults.record(now().since(started).as_nanos() as u64);
                self.engine.count(Counter::Pgmajfault, 1);
            }
            Served::Spurious => {
                let _ = self.uffd.wake(range_of(page, 1));
            }
            Served::Again => {
                fault.tries += 1;
                self.drain_events();
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
