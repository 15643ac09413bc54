//! Requests for pages that a server alone has, between the handler and the threads that read them.
//!
//! | thread | does |
//! |---|---|
//! | handler ([`crate::fault::remote`]) | sends requests, and is told when some are back |
//! | reader ([`RemoteReads::serve`]) | takes what was sent meanwhile and lies on one server, reads it at once, signals the event |
//!
//! Not all readers wait for one server, and none goes to one that keeps another waiting.
//!
//! Owns: the requests that were sent and not taken back, and the memory pages are read into.
//!
//! Invariants
//! 1. A buffer's memory is the reader's from when its request is sent until it is back, and the
//!    handler's else.
//! 2. Before a fork all has landed, readers allocate nothing, and until its end nothing is sent
//!    for: the forking thread may wait for a lock whose holder waits for a page.
//!
//! A reader that ends takes the process with it, as the handler does
//! ([`crate::Engine::look_after_threads`]): the threads that wait for its pages would wait for
//! ever.
//!
//! Locks: the queue's, for a check, with no other one taken under it. A reader waits for a server
//! with an inbox of the device locked, and no other lock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};
use std::time::Duration;

use swaptide_store::file::{FileDevice, READ_RETRY_DELAYS, ReadError, ReadErrorKind, ServerId};
use swaptide_store::{Page, Slot};
use swaptide_sys::Errno;
use swaptide_sys::affinity::{CpuSet, clear_own_affinity, own_affinity};
use swaptide_sys::eventfd::EventFd;
use swaptide_sys::lock::{Lock, futex};
use swaptide_sys::mem::Mapping;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr};
use swaptide_sys::thread::{Nanos, Tid, gettid, lives, now, sleep};

use crate::backing::shortage::OwnShortage;
use crate::fault_injection::Injection;
use crate::mm::types::PAGES_PER_CHUNK;

/// Requests that can be under way.
pub(crate) const MAX_REMOTE_READS: usize = 64;
const READ_BUFFER_BYTES: usize = PAGES_PER_CHUNK * PAGE_SIZE;
/// Readers at most. Each takes all that waits for its server, so that a deep queue does not need
/// many; one less may read from one server.
pub(crate) const MAX_READERS: usize = swaptide_store::file::MAX_REMOTE_READERS;
/// Requests that a reader takes at a time.
const MAX_READS_PER_TURN: usize = 8;
/// A server that a reader has waited for so long gets no other one.
const SLOW_SERVER_TIME: Duration = Duration::from_secs(1);

/// Some pages of a chunk, to be read and as they were read. A bit for each page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteRead {
    pub(crate) buffer: usize,
    pub(crate) server: ServerId,
    pub(crate) slots: [Slot; PAGES_PER_CHUNK],
    pub(crate) wanted: u16,
    pub(crate) read: u16,
    pub(crate) lost: u16,
    /// No fault has led to it: those that one has go first.
    pub(crate) unasked: bool,
}

/// The result of one attempt to read. The remaining pages are those that failed.
enum Attempt {
    /// The server has answered for all.
    Answered,
    /// It does not answer.
    Unanswered,
    /// This process could not ask it.
    Short(ReadError),
}

#[derive(Default)]
pub(crate) struct Queue {
    pub(crate) sent: VecDeque<RemoteRead>,
    pub(crate) back: VecDeque<RemoteRead>,
    /// The server that each reader waits for, and the start of its wait.
    pub(crate) calls: [Option<(ServerId, Nanos)>; MAX_READERS],
}

impl Queue {
    /// Takes requests in, before those that no fault has led to.
    pub(crate) fn send(&mut self, requests: impl Iterator<Item = RemoteRead>) {
        for request in requests {
            let at = if request.unasked {
                None
            } else {
                self.sent.iter().position(|before| before.unasked)
            };
            self.sent.insert(at.unwrap_or(self.sent.len()), request);
        }
    }

    /// A reader comes for requests: those of the first server that it may go to.
    fn take(&mut self, reader: usize, requests: &mut Vec<RemoteRead>) {
        let now = now();
        self.calls[reader] = None;
        let may_go = |server: ServerId| {
            let (mut there, mut late) = (0, false);
            for (_, since) in self.calls.iter().flatten().filter(|(to, _)| *to == server) {
                there += 1;
                late |= now.since(*since) > SLOW_SERVER_TIME;
            }
            !late && there < MAX_READERS - 1
        };
        let Some(server) =
            self.sent.iter().map(|request| request.server).find(|server| may_go(*server))
        else {
            return;
        };
        let mut at = 0;
        while at < self.sent.len() && requests.len() < MAX_READS_PER_TURN {
            if self.sent[at].server == server {
                requests.extend(self.sent.remove(at));
            } else {
                at += 1;
            }
        }
        self.calls[reader] = Some((server, now));
    }
}

/// The state that the handler and the readers share.
pub struct RemoteReads {
    pub(crate) queue: Lock<Queue>,
    /// Futex word of idle readers: raised when something was sent for, and when they shall end.
    pub(crate) calls: AtomicU32,
    /// The eventfd that the handler waits for, besides messages. A request would be an event, and
    /// the kernel fills no page before an event's thread has gone on.
    pub(crate) event: Lock<Option<Arc<EventFd>>>,
    /// It was signalled, and the handler has not looked yet.
    pub(crate) signalled: AtomicBool,
    pub(crate) readers: AtomicU32,
    /// Those of them that have allocated what they need: a fork waits for that
    /// ([`RemoteReads::are_initialized`], which acquires what they release).
    pub(crate) initialized: AtomicU32,
    /// Their numbers, 0 where there is none.
    pub(crate) tids: [AtomicU32; MAX_READERS],
    pub(crate) idle: AtomicU32,
    /// The CPUs that readers may run on: the handler, which starts them, is bound to one.
    pub(crate) cpus: Lock<Option<CpuSet>>,
    /// No reader could be started.
    pub(crate) refused: AtomicBool,
    pub(crate) buffers: Mapping,
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
            event: Lock::new(None),
            signalled: AtomicBool::new(false),
            readers: AtomicU32::new(0),
            initialized: AtomicU32::new(0),
            tids: [const { AtomicU32::new(0) }; MAX_READERS],
            idle: AtomicU32::new(0),
            cpus: Lock::new(None),
            refused: AtomicBool::new(false),
            buffers: Mapping::reserve(MAX_REMOTE_READS * READ_BUFFER_BYTES)?,
        })
    }

    /// Opens the eventfd that is signalled when a read has ended, for a new handler.
    pub(crate) fn open_event(&self) -> Result<Arc<EventFd>, Errno> {
        let event = Arc::new(EventFd::new()?);
        // A parent's is not closed: its number means something else here.
        std::mem::forget(self.event.lock().replace(Arc::clone(&event)));
        *self.cpus.lock() = own_affinity().ok();
        Ok(event)
    }

    /// Lets the calling thread, which the handler has made, run wherever the process may.
    pub(crate) fn run_anywhere(&self) {
        if let Some(cpus) = &*self.cpus.lock() {
            let _ = clear_own_affinity(cpus);
        }
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
            self.event.force_unlock();
            self.cpus.force_unlock();
        }
        self.signalled.store(false, Relaxed);
        self.readers.store(0, Relaxed);
        self.initialized.store(0, Relaxed);
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

    /// True when no reader is about to allocate anything but for a request.
    pub(crate) fn are_initialized(&self) -> bool {
        self.initialized.load(Acquire) == self.readers.load(Relaxed)
    }

    /// Idle readers look again.
    pub(crate) fn call(&self) {
        self.calls.fetch_add(1, Release);
        futex::wake(&self.calls, u32::MAX >> 1, futex::Scope::Private);
    }

    pub(crate) fn buffer_addr(&self, buffer: usize) -> VirtAddr {
        VirtAddr(self.buffers.as_ptr() as usize + buffer * READ_BUFFER_BYTES)
    }

    /// The pages that a request's wanted bits name, and where they are read to.
    fn pages(&self, request: &RemoteRead) -> impl Iterator<Item = (u16, Slot, &mut Page)> {
        let base = self.buffer_addr(request.buffer);
        let (slots, wanted) = (request.slots, request.wanted);
        (0..PAGES_PER_CHUNK).filter(move |k| wanted >> k & 1 != 0).map(move |k| {
            // SAFETY: the page lies in the request's buffer, which nothing else uses while the
            // reader has the request (invariant 1), and each is given once.
            let page = unsafe { &mut *base.offset(k * PAGE_SIZE).as_ptr::<Page>() };
            (1 << k, slots[k], page)
        })
    }

    /// Reads what was requested of one server, at once. What fails is tried again, as often and for
    /// as long as any other page ([`READ_RETRY_DELAYS`]), and then lost; when the server does not
    /// answer, all that is left is lost. What fails for want of something of this process's own is
    /// tried again until it succeeds ([`crate::backing::shortage`]).
    fn read(&self, device: &FileDevice, requests: &mut [RemoteRead], is_test: bool, log: fn(&str)) {
        // What is still to be had of each request.
        let mut left: [u16; MAX_READS_PER_TURN] =
            core::array::from_fn(|n| requests.get(n).map_or(0, |request| request.wanted));
        let mut pauses = [Duration::ZERO].into_iter().chain(READ_RETRY_DELAYS);
        let mut shortage = OwnShortage::default();
        loop {
            let began = now();
            match self.try_to_read(device, requests, &mut left, log) {
                Attempt::Short(error) => {
                    shortage.pause(&error, began, is_test, log);
                    continue;
                }
                Attempt::Unanswered => break,
                Attempt::Answered if left == [0; MAX_READS_PER_TURN] => break,
                Attempt::Answered => shortage.end(),
            }
            let Some(pause) = pauses.next() else { break };
            sleep(pause);
        }
        for (request, left) in requests.iter_mut().zip(left) {
            request.lost = left;
        }
    }

    /// Tries once to read what is left; what has failed is left then. A page that fails is put
    /// aside, for the others' sake.
    fn try_to_read(
        &self,
        device: &FileDevice,
        requests: &mut [RemoteRead],
        left: &mut [u16; MAX_READS_PER_TURN],
        log: fn(&str),
    ) -> Attempt {
        let mut failed = [0u16; MAX_READS_PER_TURN];
        let mut attempt = Attempt::Answered;
        loop {
            let mut pages: Vec<(Slot, &mut Page)> =
                Vec::with_capacity(requests.len() * PAGES_PER_CHUNK);
            for (request, left) in requests.iter().zip(&*left) {
                pages.extend(
                    self.pages(request)
                        .filter(|(bit, ..)| left & bit != 0)
                        .map(|(_, slot, page)| (slot, page)),
                );
            }
            let Err(error) = device.read(&mut pages) else { break };
            drop(pages);
            let ReadError { slot, kind } = error;
            if error.is_own_shortage() {
                // All that is left is still to be had.
                for (left, failed) in left.iter_mut().zip(&mut failed) {
                    *failed |= core::mem::take(left);
                }
                attempt = Attempt::Short(error);
                break;
            }
            let found = requests.iter().zip(&mut *left).zip(&mut failed).find_map(
                |((request, left), failed)| {
                    let bits = (0..PAGES_PER_CHUNK).map(|k| (1u16 << k, request.slots[k]));
                    let (bit, _) =
                        bits.into_iter().find(|(bit, of)| *left & bit != 0 && *of == slot)?;
                    Some((left, failed, bit))
                },
            );
            let Some((of_it, failed_of_it, bit)) = found else {
                crate::fatal("a slot failed that was not asked for")
            };
            *of_it &= !bit;
            // What was freed meanwhile is not needed any more.
            if kind == ReadErrorKind::NoSuchSlot {
                continue;
            }
            *failed_of_it |= bit;
            log(&format!("read from a server failed: {}", ReadError { slot, kind }));
            if kind == ReadErrorKind::Io(Errno::TIMEDOUT) {
                for (left, failed) in left.iter_mut().zip(&mut failed) {
                    *failed |= core::mem::take(left);
                }
                attempt = Attempt::Unanswered;
                break;
            }
        }
        for (request, left) in requests.iter_mut().zip(&*left) {
            request.read |= left;
        }
        *left = failed;
        attempt
    }

    /// Runs a reader, until the program is detached (`has_ended`).
    pub(crate) fn serve(
        &self,
        device: &FileDevice,
        has_ended: impl Fn() -> bool,
        test: Injection,
        log: fn(&str),
    ) {
        self.run_anywhere();
        let event = self.event.lock().clone();
        let mut requests = Vec::with_capacity(MAX_READS_PER_TURN);
        let number = self.initialized.fetch_add(1, Release) as usize;
        let (Some(event), Some(tid)) = (event, self.tids.get(number)) else { return };
        tid.store(gettid().0, Relaxed);
        loop {
            // Before the check of `retired`: the thread that ends the readers sets that first, and
            // calls them then.
            let calls = self.calls.load(Acquire);
            if has_ended() {
                break;
            }
            self.queue.lock().take(number, &mut requests);
            if requests.is_empty() {
                self.idle.fetch_add(1, AcqRel);
                futex::wait(&self.calls, calls, None, futex::Scope::Private);
                self.idle.fetch_sub(1, AcqRel);
                continue;
            }
            test.end_remote_reader();
            self.read(device, &mut requests, test.shortens_timeouts(), log);
            self.queue.lock().back.extend(requests.drain(..));
            // The handler acquires it, and looks into the queue after that.
            if !self.signalled.swap(true, AcqRel) {
                event.signal();
            }
        }
        tid.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests;
