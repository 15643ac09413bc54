//! fork: a child that serves itself from its own copy of everything.
//!
//! The engine's memory is private, so that a forked child has a copy of the page table, the swap table, the compressed pool. What it lacks are
//! threads, descriptors and its own userfaultfd, which the kernel hands to the parent's handler. The hand-over:
//!
//! | forking thread (parent) | parent's handler | child |
//! |---|---|---|
//! | makes a pair of sockets, rings `ForkPrepare`, waits | takes one of them, parks the workers, gives free frames back: **prepared** | |
//! | runs fork(2); its own faults are served | holds the faults and notes the events of all other threads | |
//! | | reads the fork event: **handing over**; holds every fault of the parent | may fault in libc's own code: the parent's handler copies the page in |
//! | rings `ForkDone`, waits | waits | starts its handler, which says its process slot through the other socket |
//! | | makes the slot a holder of every extent, sends userfaultfd and swap file, the pages copied, the events noted | takes over, says so, goes on |
//! | goes on | applies the events, answers the faults: **none** | |
//!
//! A child that cannot take over (no slot is free, it has no thread, its process-id namespace is another, ...) says that instead, before or after
//! it was sent what it needs. Then the parent's handler copies every swapped page to it, and it goes on without an engine.
//!
//! Invariants
//! 1. From *prepared* to the hand-over nothing in the engine's memory changes but by the forking thread's own faults, while it waits for them and so
//!    cannot be inside fork(2): the child's copy is of one moment, and equals the parent's until the hand-over.
//! 2. No staging frame is full and no folio is in the swap cache at that moment: frames need not be shared.
//! 3. Extents of the swap file are frozen before the fork: neither process writes or frees a byte of them until one holder is left.
//! 4. A child that does not come through the hook (a raw clone) gets every swapped page copied in and its userfaultfd closed, and so does
//!    what it forks before that is done.

use std::sync::atomic::{
    AtomicI32, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::time::Duration;
use swaptide_sys::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};

use swaptide_core::Slot as TableSlot;
use swaptide_ipc::{Counter, ExtentId, SlotIndex};
use swaptide_store::{Page, Slot};
use swaptide_sys::Errno;
use swaptide_sys::lock::futex;
use swaptide_sys::mem::{Mapping, is_mapped_in};
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::process::{blocked_in, pidfd_getfd, pidfd_open, pidfd_open_thread};
use swaptide_sys::sock::{Conn, Listener, poll_readable};
use swaptide_sys::thread::getpid;
use swaptide_sys::uffd::{Coverage, Event, Message, Uffd};

use crate::EngineError;
use crate::devices::POOL;
use crate::engine::Engine;
use crate::handler::Handler;
use crate::ids::{PageNo, pages_of, range_of};
use crate::pagetable::PageState;

/// No fork is under way.
pub const NONE: u32 = 0;
/// The handler stands still for the forking thread.
pub const PREPARED: u32 = 1;

/// Most events of other threads that are noted during a fork.
pub(crate) const NOTED: usize = 16 << 10;
/// Instead of a length: the child shall go on without an engine; all its memory is there.
const OFF: u64 = u64::MAX;
/// The same, and the child's copy of the engine's memory may be torn: nothing may be allocated from it any more.
const OFF_TORN: u64 = u64::MAX - 1;
/// The child's word at the end: it serves itself, or it cannot.
const TAKEN: u8 = b'T';
const DECLINED: u8 = b'D';
/// In a child's hello instead of its slot: a [`Decline`] less than this.
const NO_SLOT: u32 = u32::MAX;
/// No descriptor.
const NONE_FD: i32 = -1;

/// Why a forked child goes on without an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Decline {
    /// The supervisor's table of processes is full.
    TableFull = 0,
    /// It has a process-id namespace of its own.
    Namespace = 1,
    /// It got no thread.
    NoThread = 2,
}

impl Decline {
    fn why(self) -> &'static str {
        match self {
            Decline::TableFull => "the supervisor's table of processes is full",
            Decline::Namespace => "it has a process-id namespace of its own",
            Decline::NoThread => "it got no thread (see the limits on processes)",
        }
    }

    fn of(word: u32) -> Option<Decline> {
        [Decline::TableFull, Decline::Namespace, Decline::NoThread].into_iter().find(|d| NO_SLOT - *d as u32 == word)
    }
}
/// Bytes of one message of the hand-over.
const MESSAGE_BYTES: usize = 32 << 10;

/// What the forking thread, the handler and the child share.
pub struct ForkControl {
    /// [`NONE`] or [`PREPARED`]; a futex word.
    pub phase: AtomicU32,
    /// The forking thread.
    pub forker: AtomicU32,
    token: AtomicU64,
    parent: AtomicU32,
    /// The pair of sockets in the forking thread's own table of descriptors: the handler's end and the child's. A socket with a name
    /// could not be reached from another network namespace. Without them (the table is full) there is one with a name.
    ends: [AtomicI32; 2],
}

impl Default for ForkControl {
    fn default() -> Self {
        Self::new()
    }
}

impl ForkControl {
    /// No fork is under way.
    pub const fn new() -> ForkControl {
        ForkControl {
            phase: AtomicU32::new(NONE),
            forker: AtomicU32::new(0),
            token: AtomicU64::new(0),
            parent: AtomicU32::new(0),
            ends: [const { AtomicI32::new(NONE_FD) }; 2],
        }
    }

    /// In the forking thread, before it rings: makes the sockets.
    pub fn open_ends(&self) {
        let numbers = Conn::pair().map_or([NONE_FD; 2], |(a, b)| [a.into_fd().into_raw_fd(), b.into_fd().into_raw_fd()]);
        self.ends.iter().zip(numbers).for_each(|(end, number)| end.store(number, Release));
    }

    /// In the forking thread or the child: closes the handler's end, or the child's.
    pub fn close_end(&self, child_end: bool) {
        let number = self.ends[usize::from(child_end)].swap(NONE_FD, AcqRel);
        if number != NONE_FD {
            // SAFETY: opened by `open_ends` in this thread's table, or its parent's, and owned by nobody else.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }

    /// The number of the child's end, to be kept open.
    pub fn child_end(&self) -> Option<i32> {
        Some(self.ends[1].load(Acquire)).filter(|number| *number != NONE_FD)
    }

    /// In the child's handler, which has a copy of the child's end in a table of its own.
    ///
    /// # Safety
    /// The calling thread has a table of its own, in which the number is the child's end, and calls this once.
    pub unsafe fn own_child_end(&self) -> Option<Conn> {
        // SAFETY: the caller's promise.
        self.child_end().map(|number| Conn::from_fd(unsafe { OwnedFd::from_raw_fd(number) }))
    }

    /// In the forking thread of the child: takes the child's end out of the program's table.
    pub fn take_child_end(&self) -> Option<Conn> {
        let number = Some(self.ends[1].swap(NONE_FD, AcqRel)).filter(|number| *number != NONE_FD)?;
        // SAFETY: opened by `open_ends`, and owned by nobody else.
        Some(Conn::from_fd(unsafe { OwnedFd::from_raw_fd(number) }))
    }

    /// In the handler, which has a table of its own: the handler's end.
    fn take_end(&self) -> Option<Conn> {
        let number = Some(self.ends[0].load(Acquire)).filter(|number| *number != NONE_FD)?;
        // The thread's own table where the kernel can name a thread; else the first thread's, which is the same one but in odd programs.
        let task = pidfd_open_thread(self.forker.load(Acquire)).or_else(|_| pidfd_open(getpid().0)).ok()?;
        pidfd_getfd(task.as_fd(), number).ok().map(Conn::from_fd)
    }

    /// Waits until the phase is `phase`.
    pub fn wait(&self, phase: u32) {
        loop {
            let now = self.phase.load(Acquire);
            if now == phase {
                return;
            }
            futex::wait(&self.phase, now, Some(Duration::from_millis(100)), futex::Scope::Private);
        }
    }

    fn set(&self, phase: u32) {
        self.phase.store(phase, Release);
        futex::wake(&self.phase, u32::MAX >> 1, futex::Scope::Private);
    }

    /// The name of the parent's socket, made without allocating.
    fn socket_name(&self) -> ([u8; 64], usize) {
        use std::io::Write;
        let mut name = [0u8; 64];
        let mut rest = &mut name[..];
        let _ = write!(rest, "swaptide-fork-{}-{:016x}", self.parent.load(Relaxed), self.token.load(Relaxed));
        let len = 64 - rest.len();
        (name, len)
    }
}

/// Where the child will answer.
enum Door {
    Pair(Conn),
    Named(Listener),
    Shut,
}

/// An event as it goes over the socket.
fn encode(event: &Event) -> Option<[u64; 4]> {
    match event {
        Event::Unmap(r) => Some([1, r.start.0 as u64, r.end.0 as u64, 0]),
        Event::Remap { from, to, len } => Some([2, from.0 as u64, to.0 as u64, *len as u64]),
        // Given up at the same moment as the fork: the child may have either contents.
        _ => None,
    }
}

impl Handler {
    /// The forking thread has rung. Returns when the fork is over.
    pub(crate) fn fork(&mut self) {
        let engine = self.engine;
        let forker = engine.fork.forker.load(Acquire);
        self.forking = true;
        self.place.leave(swaptide_sys::thread::now());
        // The last fork's end may have been told after its hand-over.
        self.fork_done = false;
        self.park_workers();
        while self.worker.store_waiting(engine) {}
        engine.mm.lock().staging.trim(0);
        let _ = self.mint.discard(0, self.mint.len());
        if let Some(file) = &engine.devices.file {
            file.device.freeze_all();
        }
        let token = swaptide_sys::thread::now().0.rotate_left(17) ^ u64::from(forker);
        engine.fork.token.store(token, Relaxed);
        engine.fork.parent.store(getpid().0, Relaxed);
        let door = match engine.fork.take_end() {
            Some(conn) => Door::Pair(conn),
            None => {
                let (name, len) = engine.fork.socket_name();
                match Listener::bind_abstract(&name[..len]) {
                    Ok(listener) => Door::Named(listener),
                    Err(errno) => crate::fatal(&format!("no socket for a child's hand-over: {}", swaptide_sys::Why(errno))),
                }
            }
        };
        self.deferring = true;
        engine.fork.set(PREPARED);
        loop {
            if let Some(at) = self.pending.iter().position(|f| f.tid == forker) {
                let Some(fault) = self.pending.remove(at) else { continue };
                self.apply_noted();
                self.answer(fault);
                continue;
            }
            if self.child.is_some() || self.fork_done {
                break;
            }
            self.read_within(Some(Duration::from_millis(1)));
            self.help_the_lock_holder(forker);
        }
        if let Some(child) = self.child.take() {
            if self.torn {
                (engine.start.log)(
                    "a fork found the engine at work for another thread: the child gets all its memory at once and is not managed",
                );
            }
            self.hand_over(child, door);
            engine.shared_pages.store(true, Relaxed);
            engine.count(Counter::Forks, 1);
        }
        self.fork_is_over();
    }

    /// Another thread's fault is held. If the forking thread waits for a lock (libc's fork takes those of malloc), the other may be its holder and must
    /// go on. That changes the engine's memory while the forking thread could get its lock and copy it: if it is not seen waiting for a
    /// lock before and after, the copy is taken as torn and not used.
    fn help_the_lock_holder(&mut self, forker: u32) {
        const FUTEX: u64 = 202;
        if self.child.is_some() || self.pending.is_empty() || blocked_in(forker) != Some(FUTEX) {
            return;
        }
        self.apply_noted();
        if let Some(fault) = self.pending.pop_front() {
            self.answer(fault);
        }
        if self.child.is_some() || blocked_in(forker) != Some(FUTEX) {
            self.torn = true;
        }
    }

    fn park_workers(&mut self) {
        let engine = self.engine;
        engine.park.store(1, Release);
        loop {
            engine.work.store(1, Release);
            futex::wake(&engine.work, u32::MAX >> 1, futex::Scope::Private);
            if engine.parked.load(Acquire) == engine.workers.load(Acquire) {
                return;
            }
            // A worker may be waiting for the handler to read its bell, or for a page.
            self.drain_events();
            if let Some(fault) = self.pending.pop_front() {
                self.answer(fault);
            }
        }
    }

    fn fork_is_over(&mut self) {
        let engine = self.engine;
        self.deferring = false;
        self.fork_done = false;
        self.torn = false;
        self.noted_before_fork = 0;
        self.forking = false;
        self.apply_noted();
        engine.park.store(0, Release);
        futex::wake(&engine.park, u32::MAX >> 1, futex::Scope::Private);
        // The next fork counts who stands still: nobody may be on its way out of this one.
        while engine.parked.load(Acquire) != 0 {
            swaptide_sys::thread::yield_now();
        }
        engine.fork.set(NONE);
    }

    /// Applies what was noted. They have been read, so that the kernel no longer holds moves back for them: this must come before a worker goes on, and
    /// before a fault is answered. The forking thread must not be inside fork(2), or back from it.
    fn apply_noted(&mut self) {
        if self.noted.is_empty() {
            return;
        }
        let engine = self.engine;
        let mut mm = engine.mm.lock();
        for event in self.noted.drain(..) {
            engine.apply(&mut mm, event);
        }
        engine.settle(&mm);
        let is_late = !mm.late.is_empty();
        drop(mm);
        if is_late {
            let deferring = std::mem::replace(&mut self.deferring, false);
            self.read_late();
            self.deferring = deferring;
        }
    }

    /// Notes an event for after the fork.
    pub(crate) fn note_event(&mut self, event: Event) {
        // Behind the fork event memory may be allocated again.
        if self.child.is_none() && self.noted_before_fork == 0 && self.noted.len() == self.noted.capacity() {
            crate::fatal("more than 16384 changes of mappings during one fork");
        }
        self.noted.push(event);
    }

    /// Serves the child until it serves itself, and gives it what it needs for that.
    ///
    /// Another thread may fork past the hook at the same time. Then nobody can tell whose child is whose: all are served, and when the one
    /// that came through the hook says hello, all get everything.
    fn hand_over(&mut self, child: Uffd, mut door: Door) {
        let mut children = vec![child];
        let mut served: Vec<u64> = Vec::new();
        loop {
            self.wait_for_child(&children, &door);
            self.drain_events();
            self.serve_forker(&children, &mut served);
            if let Some(another) = self.child.take() {
                children.push(another);
                self.torn = true;
            }
            for child in &children {
                self.read_child(child, &mut served);
            }
            let knocks = |fd| matches!(poll_readable(&[fd], Some(Duration::ZERO)), Ok(ready) if ready != 0);
            let conn = match std::mem::replace(&mut door, Door::Shut) {
                Door::Pair(conn) if knocks(conn.as_fd()) => Some(conn),
                Door::Named(listener) if knocks(listener.as_fd()) => {
                    let conn = listener.accept().map(|(conn, _)| conn).ok();
                    door = Door::Named(listener);
                    conn
                }
                closed => {
                    door = closed;
                    None
                }
            };
            if let Some(conn) = conn {
                match self.send(&conn, &children, &served) {
                    Ok(()) => return,
                    Err(errno) => {
                        (self.engine.start.log)(&format!("handing over to a child failed: {}", swaptide_sys::Why(errno)))
                    }
                }
            }
            children.retain(|child| child.coverage(self.engine.bells.range()) != Coverage::Gone);
            if children.is_empty() {
                if self.fork_done {
                    return;
                }
                // It was another thread's; this one's fork is yet to come, and the engine's memory has changed meanwhile.
                self.torn = true;
            }
        }
    }

    /// Waits a moment for whoever may have something to say.
    fn wait_for_child(&self, children: &[Uffd], door: &Door) {
        let mut fds = vec![self.uffd.as_fd()];
        match door {
            Door::Pair(conn) => fds.push(conn.as_fd()),
            Door::Named(listener) => fds.push(listener.as_fd()),
            Door::Shut => {}
        }
        fds.extend(children.iter().take(4).map(|child| child.as_fd()));
        // What cannot be waited for is looked at again.
        let _ = poll_readable(&fds, Some(Duration::from_millis(2)));
    }

    /// Answers a fault of the forking thread: it may be back from fork(2), or, if another thread forked past the hook and this is that one's
    /// child, not yet in it, and then it must go on. The children get the page first.
    fn serve_forker(&mut self, children: &[Uffd], served: &mut Vec<u64>) {
        let forker = self.engine.fork.forker.load(Acquire);
        let Some(at) = self.pending.iter().position(|fault| fault.tid == forker) else { return };
        let page = PageNo::of(self.pending[at].addr);
        let inside = |start: VirtAddr, len: usize| VirtRange { start, end: start.offset(len) }.contains(page.addr());
        let changed = |event: &Event| match event {
            Event::Remove(range) | Event::Unmap(range) => range.contains(page.addr()),
            Event::Remap { from, to, len } => inside(*from, *len) || inside(*to, *len),
            _ => false,
        };
        if self.noted.iter().any(changed) || self.engine.mm.lock().regions.find(page.addr()).is_none() {
            return;
        }
        let Some(fault) = self.pending.remove(at) else { return };
        for child in children {
            if self.copy_to(child, page) {
                served.push(page.0 as u64);
            }
        }
        self.answer(fault);
    }

    /// The process behind a userfaultfd has ended or executed another program.
    fn is_gone(&self, child: &Uffd) -> bool {
        child.coverage(self.engine.bells.range()) == Coverage::Gone
    }

    /// The child's next message, if it lives to send one.
    fn hear(&self, conn: &Conn, children: &[Uffd], message: &mut [u8]) -> Result<(), Errno> {
        while poll_readable(&[conn.as_fd()], Some(Duration::from_millis(10)))? == 0 {
            if children.iter().all(|child| self.is_gone(child)) {
                return Err(Errno::SRCH);
            }
        }
        let (n, _) = conn.recv(message, &mut [])?;
        if n == message.len() { Ok(()) } else { Err(Errno::PROTO) }
    }

    fn read_child(&mut self, child: &Uffd, served: &mut Vec<u64>) {
        let mut messages = Message::buffer::<8>();
        let Ok(n) = child.read(&mut messages) else { return };
        for message in &mut messages[..n] {
            match message.decode() {
                Event::Fault { addr, .. } => {
                    let page = PageNo::of(addr);
                    if self.copy_to(child, page) {
                        served.push(page.0 as u64);
                        self.engine.count(Counter::ForkServed, 1);
                    }
                    let _ = child.wake(range_of(page, 1));
                }
                Event::Fork { uffd } => self.fill_stranger(&uffd),
                // The child waits in its hook; libc's own code changes no mapping there.
                _ => {}
            }
        }
    }

    /// Copies what this process has for a page to another one. True when the page is there now and was not before.
    fn copy_to(&mut self, child: &Uffd, page: PageNo) -> bool {
        let engine = self.engine;
        loop {
            let mm = engine.mm.lock();
            let range = range_of(page, 1);
            let progress = match mm.table.get(page) {
                PageState::Swapped(entry) => {
                    // SAFETY: the buffer is the handler's own.
                    let buffer = unsafe { self.copy.slice_mut(0, PAGE_SIZE) };
                    let out: &mut Page = buffer.try_into().expect("a page's bytes");
                    let loaded = match engine.devices.slots(entry.ty()).lookup(entry.offset()) {
                        TableSlot::Folio(folio) => {
                            let frame = mm.frame_of(entry, folio);
                            // SAFETY: the frame is full while the memory lock is held.
                            out.copy_from_slice(unsafe { &*mm.staging.addr(frame).as_ptr::<Page>() });
                            true
                        }
                        _ if entry.ty() == POOL => engine.devices.pool.load(Slot(entry.offset().0), out).is_ok(),
                        _ => engine
                            .devices
                            .file
                            .as_ref()
                            .is_some_and(|f| f.device.read(&mut [(Slot(entry.offset().0), out)]).is_ok()),
                    };
                    if loaded {
                        // SAFETY: the buffer is the handler's own; the destination is another process's missing page.
                        unsafe { child.copy_pages(page.addr(), self.copy.as_ptr(), PAGE_SIZE, true, false) }
                    } else {
                        engine.count(Counter::PagesPoisoned, 1);
                        child.poison(range)
                    }
                }
                PageState::Poisoned => child.poison(range),
                PageState::Empty | PageState::Present | PageState::Kept(_) => child.zero_pages(range, true),
            };
            match progress.error {
                None => return true,
                Some(Errno::AGAIN | Errno::NOMEM) => {
                    // The child changes its mappings: its events must be read before anything can be copied.
                    drop(mm);
                    self.read_stranger(child);
                    swaptide_sys::thread::yield_now();
                }
                // There already, its mapping gone, or the child gone.
                Some(_) => return false,
            }
        }
    }

    /// Answers a child's hello: `[process slot, process id, token]`.
    fn send(&mut self, conn: &Conn, children: &[Uffd], served: &[u64]) -> Result<(), Errno> {
        let engine = self.engine;
        let mut hello = [0u8; 16];
        self.hear(conn, children, &mut hello)?;
        let word = |at: usize| u32::from_le_bytes(hello[at..at + 4].try_into().expect("four bytes"));
        let token = u64::from_le_bytes(hello[8..16].try_into().expect("eight bytes"));
        if token != engine.fork.token.load(Relaxed) {
            return Err(Errno::PROTO);
        }
        let declined = Decline::of(word(0));
        if let Some(decline) = declined {
            (engine.start.log)(&format!("forked child {} gets all its memory and is not managed: {}", word(4), decline.why()));
        }
        let [child] = children else {
            children.iter().for_each(|child| self.fill_stranger(child));
            return conn.send(&OFF_TORN.to_le_bytes(), &[]);
        };
        if declined.is_some() || self.torn {
            self.fill_stranger(child);
            return conn.send(&if self.torn { OFF_TORN } else { OFF }.to_le_bytes(), &[]);
        }
        let index = SlotIndex(word(0));
        if let Some(file) = &engine.devices.file {
            file.device.leased(|extent| engine.start.segment.share_extent(index, ExtentId(extent.0)));
        }
        let mut words: Vec<u64> = vec![served.len() as u64];
        words.extend_from_slice(served);
        words.extend(self.noted[..self.noted_before_fork].iter().filter_map(encode).flatten());
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let file = engine.devices.file.as_ref().map(|f| f.fd.lock());
        let total = (bytes.len() as u64).to_le_bytes();
        match &file {
            Some(fd) => conn.send(&total, &[child.as_fd(), fd.as_fd()])?,
            None => conn.send(&total, &[child.as_fd()])?,
        }
        drop(file);
        for part in bytes.chunks(MESSAGE_BYTES) {
            conn.send(part, &[])?;
        }
        let mut answer = [0u8];
        self.hear(conn, children, &mut answer)?;
        if answer == [TAKEN] {
            return Ok(());
        }
        self.fill_stranger(child);
        if let Some(file) = &engine.devices.file {
            file.device.leased(|extent| {
                engine.start.segment.release_extent(index, ExtentId(extent.0));
            });
        }
        conn.send(&OFF.to_le_bytes(), &[])
    }

    /// A fork that came through no hook.
    pub(crate) fn stranger(&mut self, child: Uffd) {
        (self.engine.start.log)("a fork came through no hook of libc: the child gets all its memory at once and is not managed");
        self.engine.shared_pages.store(true, Relaxed);
        self.engine.count(Counter::Forks, 1);
        self.fill_stranger(&child);
    }

    /// Gives a process everything that is swapped, and those that it forks meanwhile: they have what it had at that moment.
    fn fill_stranger(&mut self, child: &Uffd) {
        let regions: Vec<VirtRange> = self.engine.mm.lock().regions.iter().collect();
        for region in regions {
            let pages = pages_of(region);
            let end = PageNo(pages.end);
            let mut at = PageNo(pages.start);
            loop {
                let next = self.engine.mm.lock().table.next_used(at, end);
                let Some(page) = next.filter(|p| *p < end) else { break };
                let state = self.engine.mm.lock().table.get(page);
                if matches!(state, PageState::Swapped(_) | PageState::Poisoned) {
                    self.copy_to(child, page);
                }
                at = page.plus(1);
            }
        }
        // A fork that began before the last page was there is told of only after it. While one is under way the kernel says so.
        loop {
            self.read_stranger(child);
            if child.coverage(self.engine.bells.range()) != Coverage::Changing {
                break;
            }
            swaptide_sys::thread::yield_now();
        }
    }

    /// Reads what a process tells that will not be managed. A fault comes again after its descriptor is closed, a change of mappings is its own
    /// affair; what it has forked gets what it gets itself.
    fn read_stranger(&mut self, child: &Uffd) {
        let mut messages = Message::buffer::<8>();
        loop {
            let n = child.read(&mut messages).unwrap_or(0);
            for message in &mut messages[..n] {
                if let Event::Fork { uffd } = message.decode() {
                    self.fill_stranger(&uffd);
                }
            }
            if n == 0 {
                return;
            }
        }
    }
}

/// What a child's handler got from its parent's.
pub struct Inheritance {
    conn: Conn,
    uffd: Option<Uffd>,
    file: Option<OwnedFd>,
    served: Vec<PageNo>,
    events: Vec<Event>,
}

impl Inheritance {
    /// Tells the parent's handler that this process serves itself.
    ///
    /// # Errors
    /// When the parent is gone, which is no harm any more.
    pub fn taken(&self) -> Result<(), Errno> {
        self.conn.send(&[TAKEN], &[])
    }

    /// Tells the parent's handler that this process cannot serve itself; returns when all its memory is there.
    ///
    /// # Errors
    /// When the parent is gone: what is swapped is lost, and the process must be stopped.
    pub fn declined(&self) -> Result<(), Errno> {
        self.conn.send(&[DECLINED], &[])?;
        hear_off(&self.conn).map(drop)
    }
}

/// Waits until the parent's handler says that all memory is there. True when this process may allocate from its copy of the engine's memory.
fn hear_off(conn: &Conn) -> Result<bool, Errno> {
    let mut word = [0u8; 8];
    let (n, _) = conn.recv(&mut word, &mut [])?;
    match u64::from_le_bytes(word) {
        OFF if n == 8 => Ok(true),
        OFF_TORN if n == 8 => Ok(false),
        _ => Err(Errno::PROTO),
    }
}

impl Engine {
    /// In the child, before any engine thread runs: forgets the parent's threads.
    pub fn forked(&self) {
        // The parent's handler may have held the lock at the moment of the fork, to note another thread's fault or event: it changes nothing
        // that the lock guards then (invariant 1).
        // SAFETY: no other thread exists in this process.
        unsafe { self.mm.force_unlock() };
        // SAFETY: as above; workers stood still, outside of the devices.
        unsafe { self.devices.pool.force_unlock() };
        if let Some(file) = &self.devices.file {
            // SAFETY: as above.
            unsafe { file.device.force_unlock() };
        }
        self.park.store(0, Relaxed);
        self.parked.store(0, Relaxed);
        self.workers.store(0, Relaxed);
        self.work.store(0, Relaxed);
        self.bells.reset();
        self.shared_pages.store(true, Relaxed);
    }

    /// Closes the userfaultfd of an engine that never began.
    ///
    /// # Safety
    /// Nothing is managed, and nobody uses the engine any more.
    pub unsafe fn close_uffd(&self) {
        // SAFETY: the caller's promise; the box that owns the number is never dropped.
        drop(unsafe { OwnedFd::from_raw_fd(self.uffd().as_fd().as_raw_fd()) });
    }

    /// Says hello to the parent's handler, through the child's end if there is one.
    fn greet(&self, end: Option<Conn>, first: u32) -> Result<Conn, Errno> {
        let conn = match end {
            Some(conn) => conn,
            None => {
                let (name, len) = self.fork.socket_name();
                Conn::connect_abstract(&name[..len])?
            }
        };
        let mut hello = [0u8; 16];
        hello[..4].copy_from_slice(&first.to_le_bytes());
        hello[4..8].copy_from_slice(&getpid().0.to_le_bytes());
        hello[8..].copy_from_slice(&self.fork.token.load(Relaxed).to_le_bytes());
        conn.send(&hello, &[])?;
        Ok(conn)
    }

    /// In a child that cannot take over: returns when all its memory is there and its copy of the engine is of no use any more. Allocates
    /// nothing. True when others may allocate.
    ///
    /// # Errors
    /// When the parent is gone: what is swapped is lost, and the process must be stopped.
    pub fn decline(&self, end: Option<Conn>, why: Decline) -> Result<bool, Errno> {
        hear_off(&self.greet(end, NO_SLOT - why as u32)?)
    }

    /// In the child's handler thread: asks the parent's handler for what the child needs.
    ///
    /// # Errors
    /// When the parent is gone.
    ///
    /// Nothing is allocated before the answer is known: this process's copy of the allocator may be torn.
    pub fn inherit(&self, end: Option<Conn>, index: SlotIndex) -> Result<Option<Inheritance>, Errno> {
        let conn = self.greet(end, index.0)?;
        let mut total = [0u8; 8];
        let mut fds = [None, None];
        let (n, _) = conn.recv(&mut total, &mut fds)?;
        if n == 8 && [OFF, OFF_TORN].contains(&u64::from_le_bytes(total)) {
            return Ok(None);
        }
        let [uffd, file] = fds;
        let (Some(uffd), 8) = (uffd, n) else { return Err(Errno::PROTO) };
        let mut bytes = vec![0u8; u64::from_le_bytes(total) as usize];
        let mut at = 0;
        while at < bytes.len() {
            let end = bytes.len().min(at + MESSAGE_BYTES);
            let (n, _) = conn.recv(&mut bytes[at..end], &mut [])?;
            if n == 0 {
                return Err(Errno::PROTO);
            }
            at += n;
        }
        let words: Vec<usize> =
            bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().expect("eight bytes")) as usize).collect();
        let count = words.first().copied().unwrap_or(0);
        let served = words.iter().skip(1).take(count).map(|p| PageNo(*p)).collect();
        let events = words[(1 + count).min(words.len())..]
            .chunks_exact(4)
            .filter_map(|w| match w[0] {
                1 => Some(Event::Unmap(VirtRange { start: VirtAddr(w[1]), end: VirtAddr(w[2]) })),
                2 => Some(Event::Remap { from: VirtAddr(w[1]), to: VirtAddr(w[2]), len: w[3] }),
                _ => None,
            })
            .collect();
        Ok(Some(Inheritance { conn, uffd: Some(Uffd::from_fd(uffd)), file, served, events }))
    }
}

impl Handler {
    /// In a forked child: mappings that its parent kept for itself (`MADV_DONTFORK`) are not here, and what stands in their place is the engine's
    /// own, made since. Their pages are given up.
    fn forget_what_did_not_come(&mut self) -> Result<(), EngineError> {
        let engine = self.engine;
        let regions: Vec<VirtRange> = engine.mm.lock().regions.iter().collect();
        let mut missing = Vec::new();
        for region in regions {
            let mut at = region.start;
            while at < region.end {
                let next = self.maps.vma_at_or_next(at).map_err(|e| EngineError::Memory("reading /proc/self/maps", e))?;
                let Some(vma) = next.map(|info| info.vma().range).filter(|vma| vma.start < region.end) else {
                    missing.push(VirtRange { start: at, end: region.end });
                    break;
                };
                if at < vma.start {
                    missing.push(VirtRange { start: at, end: vma.start });
                }
                at = at.max(vma.start);
                let end = vma.end.min(region.end);
                crate::adopt::program_parts(VirtRange { start: at, end }, |part| {
                    if at < part.start {
                        missing.push(VirtRange { start: at, end: part.start });
                    }
                    at = part.end;
                });
                if at < end {
                    missing.push(VirtRange { start: at, end });
                    at = end;
                }
            }
        }
        let mut mm = engine.mm.lock();
        for range in missing {
            engine.apply(&mut mm, Event::Unmap(range));
        }
        Ok(())
    }

    /// A handler for a forked child, over its parent's bequest.
    ///
    /// # Errors
    /// When a userfaultfd or memory is refused: the child must decline then.
    pub fn inherited(
        engine: &'static Engine,
        index: SlotIndex,
        salt: u64,
        left: &mut Inheritance,
    ) -> Result<Handler, EngineError> {
        engine.set_index(index);
        let uffd = left.uffd.take().ok_or(EngineError::Devices("no userfaultfd was handed over"))?;
        // A fork without a hook at the same moment could have had its descriptor taken for this child's: it would be another process's memory.
        // That one may have something at the same address: zeros for a page that it has never touched are no harm there, and not to be
        // seen here.
        let probe = Mapping::reserve(PAGE_SIZE).map_err(|e| EngineError::Memory("a page to try the userfaultfd on", e))?;
        uffd.register_missing(probe.range())
            .map_err(|e| EngineError::Memory("trying the userfaultfd that was handed over", e))?;
        let _ = uffd.zero_pages(probe.range(), true);
        let ours = is_mapped_in(probe.range().start).unwrap_or(false);
        let _ = uffd.unregister(probe.range());
        drop(probe);
        if !ours {
            return Err(EngineError::Devices("the userfaultfd that was handed over is another process's"));
        }
        engine.set_uffd(uffd);
        let mut handler = Handler::new(engine)?;
        engine.mm.lock().staging.reopen()?;
        if let Some(file) = &engine.devices.file {
            match left.file.take() {
                Some(fd) => {
                    file.inherit(fd, salt).map_err(|_| EngineError::Devices("the swap file's descriptor could not be doubled"))?
                }
                None => return Err(EngineError::Devices("the swap file was not handed over")),
            }
        }
        for page in std::mem::take(&mut left.served) {
            let mut mm = engine.mm.lock();
            match mm.table.get(page) {
                PageState::Swapped(entry) => engine.release(&mm, entry),
                PageState::Kept(entry) => engine.devices.drop_swapped(entry),
                _ => {}
            }
            if mm.regions.find(page.addr()).is_some() {
                mm.mark_present(page);
            }
        }
        handler.forget_what_did_not_come()?;
        for event in std::mem::take(&mut left.events) {
            // The parent's other threads changed mappings at the moment of the fork: the child has the change or has it not.
            let happened = match &event {
                Event::Unmap(range) => handler.uffd.coverage(*range) != Coverage::Whole,
                Event::Remap { to, len, .. } => {
                    handler.uffd.coverage(VirtRange { start: *to, end: to.offset(*len) }) == Coverage::Whole
                }
                _ => false,
            };
            if happened {
                engine.apply(&mut engine.mm.lock(), event);
            }
        }
        engine.apply_late(&mut engine.mm.lock());
        engine.fork.set(NONE);
        Ok(handler)
    }
}
