//! Asynchronous swap-in of remote pages, which only a server has. They are sent for, and the
//! handler continues.
//!
//! Owns: what was sent for and has not landed ([`RemoteReads`], and the handler's [`InFlight`]),
//! and the memory it is read into.
//!
//! | who | does |
//! |---|---|
//! | handler ([`Handler::send_for`]) | notes entries and stamps of far pages, a chunk at a time, and leaves the thread waiting that asked for one |
//! | reader ([`Engine::read_far`]) | takes what was sent for meanwhile and lies on one server, reads it at once, signals the handler |
//! | handler ([`Handler::complete`]) | puts in place what is still what it was, and wakes the threads that wait |
//!
//! So a program's threads wait for the network side by side, readahead is on its way while its
//! stream is worked through, and a server that is away stops those alone that want what it has: not
//! all readers wait for one server, and none goes to one that keeps another waiting.
//!
//! Invariants
//! 1. No page is sent for twice at a time.
//! 2. A page lands only where its word and its slot's stamp are what they were when it was sent
//!    for. What else was read is dropped.
//! 3. A thread that waits for a page that was sent for is woken when the read ends, whatever its
//!    result. If it is not there, its thread faults again.
//! 4. Only a page that a thread had asked for by the time it was sent for is poisoned when it
//!    cannot be read: who asked later has not waited long enough.
//! 5. A seat's memory is the reader's from when its order is sent until it is back, and the
//!    handler's else.
//! 6. Before a fork all has landed, readers allocate nothing, and until its end nothing is sent
//!    for: the forking thread may wait for a lock whose holder waits for a page.
//!
//! A reader that ends takes the process with it, as the handler does
//! ([`Engine::look_after_threads`]): threads that wait for its pages would wait for ever.
//!
//! Locks: the queue's, for a look, with no other one taken under it. A reader waits for a server
//! with an inbox of the device locked, and no other lock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};
use std::time::Duration;

use swaptide_core::SwapEntry;
use swaptide_ipc::{Counter, OfOrder};
use swaptide_store::file::{FileDevice, ReadError, ReadErrorKind, ServerId, Stamp};
use swaptide_store::{Page, Slot};
use swaptide_sys::Errno;
use swaptide_sys::affinity::{CpuSet, clear_own_affinity, own_affinity};
use swaptide_sys::eventfd::EventFd;
use swaptide_sys::lock::{Lock, futex};
use swaptide_sys::mem::Mapping;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr};
use swaptide_sys::thread::{Nanos, Tid, gettid, lives, now, sleep};

use crate::backing::devices::NO_ENTRY;
use crate::backing::snapshot::Snapshot;
use crate::engine::{Engine, Mm};
use crate::event_loop::{Fault, Handler};
use crate::fault::load::READ_RETRY_DELAYS;
use crate::fault::path::{LAST_PAGE, Stop};
use crate::mm::page_table::PageState;
use crate::mm::types::{ChunkNo, PAGES_PER_CHUNK, PageNo, range_of};
use crate::readahead::policy::SwappedIn;

/// Orders that can be under way.
const MAX_REMOTE_READS: usize = 64;
const READ_BUFFER_BYTES: usize = PAGES_PER_CHUNK * PAGE_SIZE;
/// Readers at most. Each takes all that waits for its server, so that a deep queue does not need
/// many; one less may read from one server.
const MAX_READERS: usize = 5;
/// Orders that a reader takes at a time.
const MAX_READS_PER_TURN: usize = 8;
/// A server that a reader has waited for so long gets no other one.
const SLOW_SERVER: Duration = Duration::from_secs(1);
/// What a test sets to have a reader end with an order in its hand.
pub(crate) const FAIL_OF_A_READER: u32 = 5;
/// Tries to put a page in its place, while events are unread.
const MAX_INSTALL_TRIES: u32 = 64;
/// After so many faults for which nothing was sent for, far pages are the exception.
const RARE_AFTER_FAULTS: u32 = 64;
/// With more seats than this in use, their memory is given back when all has landed.
const KEPT_BUFFERS: u32 = 4;

/// Some pages of a chunk, to be read and as they were read. A bit for each page.
#[derive(Clone, Copy, Debug)]
struct RemoteRead {
    seat: usize,
    server: ServerId,
    slots: [Slot; PAGES_PER_CHUNK],
    wanted: u16,
    read: u16,
    lost: u16,
    /// No fault has led to it: those that one has go first.
    unasked: bool,
}

#[derive(Default)]
struct Queue {
    sent: VecDeque<RemoteRead>,
    back: VecDeque<RemoteRead>,
    /// What each reader waits for, and since when.
    calls: [Option<(ServerId, Nanos)>; MAX_READERS],
}

impl Queue {
    /// Takes orders in, before those that no fault has led to.
    fn send(&mut self, orders: impl Iterator<Item = RemoteRead>) {
        for order in orders {
            let at = if order.unasked {
                None
            } else {
                self.sent.iter().position(|before| before.unasked)
            };
            self.sent.insert(at.unwrap_or(self.sent.len()), order);
        }
    }

    /// A reader comes for orders: those of the first server that it may go to.
    fn take(&mut self, reader: usize, orders: &mut Vec<RemoteRead>) {
        let now = now();
        self.calls[reader] = None;
        let may_go = |server: ServerId| {
            let (mut there, mut late) = (0, false);
            for (_, since) in self.calls.iter().flatten().filter(|(to, _)| *to == server) {
                there += 1;
                late |= now.since(*since) > SLOW_SERVER;
            }
            !late && there < MAX_READERS - 1
        };
        let Some(server) =
            self.sent.iter().map(|order| order.server).find(|server| may_go(*server))
        else {
            return;
        };
        let mut at = 0;
        while at < self.sent.len() && orders.len() < MAX_READS_PER_TURN {
            if self.sent[at].server == server {
                orders.extend(self.sent.remove(at));
            } else {
                at += 1;
            }
        }
        self.calls[reader] = Some((server, now));
    }
}

/// What the handler and the readers share.
pub struct RemoteReads {
    queue: Lock<Queue>,
    /// Futex word of idle readers: raised when something was sent for, and when they shall end.
    calls: AtomicU32,
    /// What the handler waits for, besides messages. A request would be an event, and the kernel
    /// fills no page before an event's thread has gone on.
    gong: Lock<Option<Arc<EventFd>>>,
    /// It was struck, and the handler has not looked yet.
    struck: AtomicBool,
    readers: AtomicU32,
    /// Those of them that have allocated what they need: a fork waits for that
    /// ([`RemoteReads::is_settled`], which acquires what they release).
    settled: AtomicU32,
    /// Their numbers, 0 where there is none.
    tids: [AtomicU32; MAX_READERS],
    idle: AtomicU32,
    /// Where readers may run: the handler, who starts them, is bound to one CPU.
    cpus: Lock<Option<CpuSet>>,
    /// No reader could be started.
    refused: AtomicBool,
    seats: Mapping,
}

impl RemoteReads {
    /// Nothing was sent for.
    ///
    /// # Errors
    /// When address space is refused.
    pub(crate) fn new() -> Result<RemoteReads, Errno> {
        let queue = Queue {
            sent: VecDeque::with_capacity(MAX_REMOTE_READS),
            back: VecDeque::with_capacity(MAX_REMOTE_READS),
            ..Queue::default()
        };
        Ok(RemoteReads {
            queue: Lock::new(queue),
            calls: AtomicU32::new(0),
            gong: Lock::new(None),
            struck: AtomicBool::new(false),
            readers: AtomicU32::new(0),
            settled: AtomicU32::new(0),
            tids: [const { AtomicU32::new(0) }; MAX_READERS],
            idle: AtomicU32::new(0),
            cpus: Lock::new(None),
            refused: AtomicBool::new(false),
            seats: Mapping::reserve(MAX_REMOTE_READS * READ_BUFFER_BYTES)?,
        })
    }

    /// What is struck when something is back, for a new handler.
    pub(crate) fn open_event(&self) -> Result<Arc<EventFd>, Errno> {
        let gong = Arc::new(EventFd::new()?);
        // A parent's is not closed: its number means something else here.
        std::mem::forget(self.gong.lock().replace(Arc::clone(&gong)));
        *self.cpus.lock() = own_affinity().ok();
        Ok(gong)
    }

    /// In a forked child: it has no readers, and nothing was under way (invariant 6).
    ///
    /// # Safety
    /// No other thread exists in this process.
    pub(crate) unsafe fn forked(&self) {
        // SAFETY: the caller's promise. A reader changes nothing under the lock when there is
        // nothing to take.
        unsafe {
            self.queue.force_unlock();
            self.gong.force_unlock();
            self.cpus.force_unlock();
        }
        self.struck.store(false, Relaxed);
        self.readers.store(0, Relaxed);
        self.settled.store(0, Relaxed);
        self.tids.iter().for_each(|tid| tid.store(0, Relaxed));
        self.queue.lock().calls = Default::default();
        self.idle.store(0, Relaxed);
        self.refused.store(false, Relaxed);
    }

    /// False when one of the readers is gone.
    pub(crate) fn are_all_there(&self) -> bool {
        let tids = self.tids.iter().map(|tid| tid.load(Relaxed));
        tids.filter(|tid| *tid != 0).all(|tid| lives(Tid(tid)))
    }

    /// True when no reader is about to allocate anything but for an order.
    pub(crate) fn is_settled(&self) -> bool {
        self.settled.load(Acquire) == self.readers.load(Relaxed)
    }

    /// Idle readers look again.
    pub(crate) fn call(&self) {
        self.calls.fetch_add(1, Release);
        futex::wake(&self.calls, u32::MAX >> 1, futex::Scope::Private);
    }

    fn buffer(&self, seat: usize) -> VirtAddr {
        VirtAddr(self.seats.as_ptr() as usize + seat * READ_BUFFER_BYTES)
    }

    /// The pages that an order's wanted bits name, and where they are read to.
    fn pages(&self, order: &RemoteRead) -> impl Iterator<Item = (u16, Slot, &mut Page)> {
        let base = self.buffer(order.seat);
        let (slots, wanted) = (order.slots, order.wanted);
        (0..PAGES_PER_CHUNK).filter(move |k| wanted >> k & 1 != 0).map(move |k| {
            // SAFETY: the page lies in the order's seat, which nobody else uses while the reader
            // has the order (invariant 5), and each is given once.
            let page = unsafe { &mut *base.offset(k * PAGE_SIZE).as_ptr::<Page>() };
            (1 << k, slots[k], page)
        })
    }

    /// Reads what was ordered of one server, at once. What fails is tried again, as often and for
    /// as long as any other page ([`READ_RETRY_DELAYS`]), and then lost; when the server does not
    /// answer, all that is left is lost.
    fn read(&self, device: &FileDevice, orders: &mut [RemoteRead], log: fn(&str)) {
        // What is still to be had of each order.
        let mut left: [u16; MAX_READS_PER_TURN] =
            core::array::from_fn(|n| orders.get(n).map_or(0, |order| order.wanted));
        let mut pauses = [Duration::ZERO].into_iter().chain(READ_RETRY_DELAYS);
        loop {
            let answered = self.try_to_read(device, orders, &mut left, log);
            if !answered || left == [0; MAX_READS_PER_TURN] {
                break;
            }
            let Some(pause) = pauses.next() else { break };
            sleep(pause);
        }
        for (order, left) in orders.iter_mut().zip(left) {
            order.lost = left;
        }
    }

    /// Tries once to read what is left; what has failed is left then. A page that fails is put
    /// aside, for the others' sake. False when the server does not answer.
    fn try_to_read(
        &self,
        device: &FileDevice,
        orders: &mut [RemoteRead],
        left: &mut [u16; MAX_READS_PER_TURN],
        log: fn(&str),
    ) -> bool {
        let mut failed = [0u16; MAX_READS_PER_TURN];
        let mut answered = true;
        loop {
            let mut requests: Vec<(Slot, &mut Page)> =
                Vec::with_capacity(orders.len() * PAGES_PER_CHUNK);
            for (order, left) in orders.iter().zip(&*left) {
                requests.extend(
                    self.pages(order)
                        .filter(|(bit, ..)| left & bit != 0)
                        .map(|(_, slot, page)| (slot, page)),
                );
            }
            let Err(ReadError { slot, kind }) = device.read(&mut requests) else { break };
            drop(requests);
            let found = orders.iter().zip(&mut *left).zip(&mut failed).find_map(
                |((order, left), failed)| {
                    let bits = (0..PAGES_PER_CHUNK).map(|k| (1u16 << k, order.slots[k]));
                    let (bit, _) =
                        bits.into_iter().find(|(bit, of)| *left & bit != 0 && *of == slot)?;
                    Some((left, failed, bit))
                },
            );
            let Some((of_it, failed_of_it, bit)) = found else {
                crate::fatal("a slot failed that was not asked for")
            };
            *of_it &= !bit;
            // What was freed meanwhile is nobody's loss.
            if kind == ReadErrorKind::NoSuchSlot {
                continue;
            }
            *failed_of_it |= bit;
            log(&format!("read from a server failed: {}", ReadError { slot, kind }));
            if kind == ReadErrorKind::Io(Errno::TIMEDOUT) {
                for (left, failed) in left.iter_mut().zip(&mut failed) {
                    *failed |= core::mem::take(left);
                }
                answered = false;
                break;
            }
        }
        for (order, left) in orders.iter_mut().zip(&*left) {
            order.read |= left;
        }
        *left = failed;
        answered
    }
}

impl Engine {
    /// What a reader does, until the program is detached.
    pub fn read_far(&self) {
        let far = &self.far;
        if let Some(cpus) = &*far.cpus.lock() {
            let _ = clear_own_affinity(cpus);
        }
        let gong = far.gong.lock().clone();
        let mut orders = Vec::with_capacity(MAX_READS_PER_TURN);
        let number = far.settled.fetch_add(1, Release) as usize;
        let (Some(gong), Some(tid)) = (gong, far.tids.get(number)) else { return };
        tid.store(gettid().0, Relaxed);
        loop {
            // Before the look at `retired`: who ends the readers sets that first, and calls them
            // then.
            let calls = far.calls.load(Acquire);
            if self.retired.load(Acquire) {
                break;
            }
            far.queue.lock().take(number, &mut orders);
            if orders.is_empty() {
                far.idle.fetch_add(1, AcqRel);
                futex::wait(&far.calls, calls, None, futex::Scope::Private);
                far.idle.fetch_sub(1, AcqRel);
                continue;
            }
            if self.start.segment.header.fail.load(Relaxed) == FAIL_OF_A_READER {
                swaptide_sys::thread::exit_thread();
            }
            far.read(&self.devices.file.device, &mut orders, self.start.log);
            far.queue.lock().back.extend(orders.drain(..));
            // The handler acquires it, and looks into the queue after that.
            if !far.struck.swap(true, AcqRel) {
                gong.signal();
            }
        }
        tid.store(0, Relaxed);
    }
}

/// What was sent for, as it was then.
struct InFlightRead {
    seat: usize,
    chunk: ChunkNo,
    server: ServerId,
    wanted: u16,
    /// Pages that a thread waited for then.
    asked: u16,
    /// Others that one came to wait for since.
    waited: u16,
    entries: [SwapEntry; PAGES_PER_CHUNK],
    stamps: [Option<Stamp>; PAGES_PER_CHUNK],
    at: Nanos,
}

impl InFlightRead {
    fn page(&self, k: usize) -> PageNo {
        self.chunk.first().plus(k)
    }

    /// True when a page's word and stamp are what they were.
    fn stands(&self, mm: &Mm, device: &FileDevice, k: usize) -> bool {
        let entry = self.entries[k];
        mm.table.get(self.page(k)) == PageState::Swapped(entry)
            && device.stamp(Slot(entry.offset().0)) == self.stamps[k]
    }
}

/// The handler's part of what is under way.
pub(crate) struct InFlight {
    sent: Vec<InFlightRead>,
    /// Orders that are not sent yet: more of their chunks may follow.
    drafts: Vec<RemoteRead>,
    /// A bit for each seat in use, and how many were at most since their memory was given back.
    seats: u64,
    most: u32,
    /// The page whose fault is being answered.
    asking: Option<PageNo>,
    /// Pages sent for since that began.
    pages: usize,
    /// Faults since the last order.
    quiet: u32,
    /// Faults that found no seat.
    crowd: VecDeque<Fault>,
}

impl InFlight {
    pub(crate) fn new() -> InFlight {
        InFlight {
            sent: Vec::with_capacity(MAX_REMOTE_READS),
            drafts: Vec::with_capacity(MAX_REMOTE_READS),
            seats: 0,
            most: 0,
            asking: None,
            pages: 0,
            quiet: RARE_AFTER_FAULTS,
            crowd: VecDeque::with_capacity(64),
        }
    }

    /// Nothing is under way, and nobody waits for anything to be.
    pub(crate) fn is_empty(&self) -> bool {
        self.sent.is_empty() && self.crowd.is_empty()
    }

    /// True when a page was sent for.
    pub(crate) fn has(&self, page: PageNo) -> bool {
        self.of_chunk(page.chunk()) >> page.in_chunk() & 1 != 0
    }

    /// A thread waits for a page. False when it was not sent for.
    pub(crate) fn begin_wait(&mut self, page: PageNo) -> bool {
        let bit = 1 << page.in_chunk();
        let order =
            self.sent.iter_mut().find(|sent| sent.chunk == page.chunk() && sent.wanted & bit != 0);
        order.map(|sent| sent.waited |= bit).is_some()
    }

    /// True while a thread waits for what was sent for, or is to be.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.crowd.is_empty() || self.sent.iter().any(|sent| sent.asked | sent.waited != 0)
    }

    /// The pages of a chunk that were sent for.
    fn of_chunk(&self, chunk: ChunkNo) -> u16 {
        self.sent
            .iter()
            .filter(|sent| sent.chunk == chunk)
            .fold(0, |pages, sent| pages | sent.wanted)
    }

    /// Bytes that are under way.
    pub(crate) fn bytes(&self) -> usize {
        self.sent.iter().map(|sent| sent.wanted.count_ones() as usize * PAGE_SIZE).sum()
    }

    /// True when there is a place for so many orders.
    pub(crate) fn has_buffers(&self, n: usize) -> bool {
        MAX_REMOTE_READS - self.seats.count_ones() as usize >= n
    }

    /// A fault is being answered, or pages are brought in that nobody asked for ([`LAST_PAGE`]);
    /// `None`: no more. Gives the pages that were sent for since the last call.
    pub(crate) fn asks(&mut self, page: Option<PageNo>) -> usize {
        self.asking = page;
        self.quiet = self.quiet.saturating_add(1);
        std::mem::take(&mut self.pages)
    }

    /// True while something is sent for again and again.
    pub(crate) fn is_usual(&self) -> bool {
        self.quiet < RARE_AFTER_FAULTS
    }

    /// A fault waits for a seat.
    pub(crate) fn wait(&mut self, fault: Fault) {
        self.crowd.push_back(fault);
    }

    /// The order that is put together for a chunk and a server: the last one, or a new one. None if
    /// there is no seat for it.
    fn draft(
        &mut self,
        chunk: ChunkNo,
        server: ServerId,
    ) -> Option<(&mut RemoteRead, &mut InFlightRead)> {
        if self.drafts.is_empty()
            || self.sent.last().is_none_or(|sent| (sent.chunk, sent.server) != (chunk, server))
        {
            let seat = (!self.seats).trailing_zeros();
            if seat as usize >= MAX_REMOTE_READS {
                return None;
            }
            self.seats |= 1 << seat;
            self.most = self.most.max(seat + 1);
            let seat = seat as usize;
            let unasked = self.asking == Some(LAST_PAGE);
            let (entries, stamps) = ([NO_ENTRY; PAGES_PER_CHUNK], [None; PAGES_PER_CHUNK]);
            self.drafts.push(RemoteRead {
                seat,
                server,
                slots: [Slot(0); PAGES_PER_CHUNK],
                wanted: 0,
                read: 0,
                lost: 0,
                unasked,
            });
            self.sent.push(InFlightRead {
                seat,
                chunk,
                server,
                wanted: 0,
                asked: 0,
                waited: 0,
                entries,
                stamps,
                at: now(),
            });
        }
        self.drafts.last_mut().zip(self.sent.last_mut())
    }
}

impl Handler {
    /// True when far pages may be sent for rather than waited for: for the fault that is being
    /// answered.
    pub(crate) fn may_send(&self) -> bool {
        self.remote.asking.is_some()
            && !(self.forking
                || self.deferring
                || self.giving
                || self.engine.far.refused.load(Relaxed))
    }

    /// Sends for the first `n` pages of a snapshot, which are far, as far as there are seats. Gives
    /// how many pages that are; at least 1.
    pub(crate) fn send_for(&mut self, snapshot: &Snapshot, n: usize) -> Result<usize, Stop> {
        let first = snapshot.first();
        let mut at = 0;
        while at < n {
            let piece = (PAGES_PER_CHUNK - first.plus(at).in_chunk()).min(n - at);
            let entries = &snapshot.entries()[at..at + piece];
            match self.send_for_some(first.plus(at), entries) {
                Ok(()) => at += piece,
                Err(stop) if at == 0 => return Err(stop),
                Err(_) => break,
            }
        }
        Ok(at)
    }

    /// The same for pages of one chunk.
    fn send_for_some(&mut self, first: PageNo, entries: &[SwapEntry]) -> Result<(), Stop> {
        let engine = self.engine;
        if !self.is_read_for() {
            // Nobody reads; the handler has to.
            return Err(Stop::Stale);
        }
        let (chunk, base) = (first.chunk(), first.in_chunk());
        let (there, asking) = (self.remote.of_chunk(chunk), self.remote.asking);
        let mm = engine.mm.lock();
        let (device, mut new) = (&engine.devices.file.device, 0);
        for (k, entry) in (base..).zip(entries).filter(|(k, _)| there >> k & 1 == 0) {
            let (page, slot) = (chunk.first().plus(k), Slot(entry.offset().0));
            let (Some(stamp), Some(server)) = (device.stamp(slot), device.server_of(slot)) else {
                continue;
            };
            if mm.table.get(page) != PageState::Swapped(*entry) {
                continue;
            }
            let Some((order, sent)) = self.remote.draft(chunk, server) else {
                return if new == 0 { Err(Stop::Crowded) } else { Ok(()) };
            };
            (sent.entries[k], sent.stamps[k], order.slots[k]) = (*entry, Some(stamp), slot);
            sent.wanted |= 1 << k;
            order.wanted = sent.wanted;
            if asking == Some(page) {
                sent.asked |= 1 << k;
            }
            new += 1;
        }
        drop(mm);
        self.remote.pages += new;
        // All of it was sent for before, or some is another page's by now.
        if new == 0 && there == 0 { Err(Stop::Stale) } else { Ok(()) }
    }

    /// Sends what was put together.
    pub(crate) fn submit(&mut self) {
        if self.remote.drafts.is_empty() {
            return;
        }
        self.remote.quiet = 0;
        self.engine.far.queue.lock().send(self.remote.drafts.drain(..));
        self.engine.far.call();
    }

    /// True when somebody reads what is sent for. Readers are started when they are needed.
    fn is_read_for(&self) -> bool {
        let far = &self.engine.far;
        let readers = far.readers.load(Relaxed);
        if far.idle.load(Acquire) == 0 && readers < MAX_READERS as u32 {
            // One that is started in the idle class would stay there.
            if self.cpu.normally(self.engine.start.spawn_reader) {
                far.readers.store(readers + 1, Relaxed);
                self.engine.slot().engine_threads.fetch_add(1, Relaxed);
            } else if readers == 0 {
                far.refused.store(true, Relaxed);
                return false;
            }
        }
        true
    }

    /// Puts in place what is back.
    pub(crate) fn complete(&mut self) {
        let far = &self.engine.far;
        if self.remote.sent.is_empty() || self.deferring || self.giving {
            return;
        }
        // In this order: who strikes when the word is free again is heard. The queue is looked at
        // in any case: a fork may come in between here, and the one that had heard is still at its
        // first order.
        if far.struck.load(Acquire) {
            self.wake_event.clear();
            far.struck.swap(false, AcqRel);
        }
        loop {
            let back = far.queue.lock().back.pop_front();
            let Some(order) = back else { break };
            let Some(at) = self.remote.sent.iter().position(|sent| sent.seat == order.seat) else {
                crate::fatal("something came back that was not sent for");
            };
            // A fork may come in between: then this is not waited for.
            let sent = self.remote.sent.swap_remove(at);
            self.install_read(&sent, order.read);
            self.poison_lost(&sent, order.lost & sent.asked);
            self.remote.seats &= !(1 << sent.seat);
            let _ = self.uffd.wake(range_of(sent.chunk.first(), PAGES_PER_CHUNK));
            if sent.asked != 0 {
                self.engine.slot().faults.record(now().since(sent.at).as_nanos() as u64);
                self.engine.count(Counter::Pgmajfault, 1);
            }
        }
        self.pending.extend(self.remote.crowd.drain(..));
        // Not while another order is in hand: a fork that comes in between lands what is left.
        if self.remote.seats == 0 && self.remote.most > KEPT_BUFFERS {
            let _ = far.seats.discard(0, far.seats.len());
            self.remote.most = 0;
        }
    }

    /// Puts the pages in place that were read, in runs.
    fn install_read(&mut self, sent: &InFlightRead, read: u16) {
        let injected = sent.wanted.count_ones() > 1 && self.inject_stale();
        let mut left = if injected { 0 } else { read };
        self.make_room(left.count_ones() as usize);
        if !self.has_room(left.count_ones() as usize) {
            left &= sent.asked;
        }
        let mut came = SwappedIn::new(sent.chunk.first());
        let mut tries = 0;
        while left != 0 && tries < MAX_INSTALL_TRIES {
            let k = left.trailing_zeros() as usize;
            let run = (left >> k).trailing_ones() as usize;
            match self.install_run(sent, k, run) {
                Ok(0) | Err(Stop::Gone) => left &= !(1 << k),
                Ok(n) => {
                    came.add(sent.page(k), n);
                    left &= !(u16::MAX >> (PAGES_PER_CHUNK - n) << k);
                }
                Err(_) => {
                    tries += 1;
                    self.drain_events();
                }
            }
        }
        let (engine, pages) = (self.engine, came.pages());
        if pages < sent.wanted.count_ones() as usize {
            engine.count(Counter::SwpinStale, usize::from(injected));
            engine.count_order(OfOrder::SwpinFallback, sent.wanted.count_ones().ilog2() as u8, 1);
        }
        came.blocks(|order, n| engine.count_order(OfOrder::Swpin, order, n));
        engine.count(Counter::SwapRa, pages.saturating_sub((sent.asked != 0).into()));
        if pages > 0 {
            let mut mm = engine.mm.lock();
            mm.split.read(pages, now().since(sent.at).as_nanos() as u64);
            mm.split.fault(pages);
        }
    }

    /// Puts `n` neighbours from the `k`-th page on in place. Gives how many; 0 when the first is
    /// not what it was.
    fn install_run(&mut self, sent: &InFlightRead, k: usize, n: usize) -> Result<usize, Stop> {
        let engine = self.engine;
        let mut guard = engine.mm.lock();
        let mm = &mut *guard;
        let same =
            (k..k + n).take_while(|k| sent.stands(mm, &engine.devices.file.device, *k)).count();
        if same == 0 {
            engine.count(Counter::SwpinStale, 1);
            return Ok(0);
        }
        let from = engine.far.buffer(sent.seat).offset(k * PAGE_SIZE);
        let filled = match self.install(mm, sent.page(k), from, same, None) {
            Err(Stop::Exists) => {
                let dropped = self.resolve_mapped_twice(mm, sent.page(k), sent.entries[k]);
                engine.publish_usage(mm);
                return dropped;
            }
            filled => filled?,
        };
        let at = now();
        for k in (k..k + filled).filter(|k| (sent.asked | sent.waited) >> k & 1 == 1) {
            mm.grace.lands(sent.page(k), at);
        }
        for k in k..k + filled {
            self.finish_swap_in(mm, sent.page(k), sent.entries[k]);
        }
        engine.publish_usage(mm);
        engine.count(Counter::Pswpin, filled);
        Ok(filled)
    }

    /// Poisons the pages that a thread asked for and that cannot be read.
    fn poison_lost(&mut self, sent: &InFlightRead, lost: u16) {
        let engine = self.engine;
        for k in (0..PAGES_PER_CHUNK).filter(|k| lost >> k & 1 != 0) {
            for _ in 0..MAX_INSTALL_TRIES {
                let mut mm = engine.mm.lock();
                if !sent.stands(&mm, &engine.devices.file.device, k) {
                    break;
                }
                match self.poison(&mut mm, sent.page(k), sent.entries[k]) {
                    Err(Stop::Again) => {
                        drop(mm);
                        self.drain_events();
                    }
                    _ => break,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
