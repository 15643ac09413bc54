//! The pager: its threads, and what processes ask of it.
//!
//! Its threads: one reads the userfaultfds and answers; servers (one less than there are CPUs, and
//! seven at most) load what faults ask for while it reads on (`fault`), and sleep otherwise; one
//! makes room ([`crate::reclaim`]). Requests come from the thread that serves the socket. What they
//! share, with its locks, is in `state`.

use std::fs::File;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll};
use swaptide_ipc::shared::{AdviceOutcome, NO_REGION_NOW};
use swaptide_ipc::{AgentRequest, Segment, SlotIndex};
use swaptide_sys::page::VirtAddr;
use swaptide_sys::process::StatmFd;
use swaptide_sys::sock::Conn;
use swaptide_sys::thread::abort_with;
use swaptide_sys::{AsFd, Errno, OwnedFd};

use crate::advice::AdviceTaker;
use crate::region::{Counts, RegionId};
use crate::shortage;
use crate::state::{Inner, PagerState, ROOM_TOKEN, STOP_FAULTS, STOP_ROOM};
use crate::store::{FileOpener, Store};

/// Between two attempts to bring everything back.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(5);

/// Most threads that load next to the one that reads: each takes memory, of the limit.
const MAX_SERVERS: usize = 7;

/// The parameters of a pager.
pub struct PagerSettings {
    /// The segment of the run; the pager's limit and counters are in a slot of it.
    pub segment: &'static Segment,
    /// Opens a swap area.
    pub open: FileOpener,
    /// Tells of what went wrong.
    pub log: fn(&str),
    /// The failure that a test injects: a number of `fault_injection` of the engine, or 0. Not the
    /// segment's word, which any process of the run can write.
    pub fail: u32,
    /// Closes a connection that a client made. What a client has left in it must keep no thread.
    pub close: fn(Conn),
}

/// Counts of a pager at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagerStats {
    /// The number of shared regions.
    pub regions: usize,
    /// Address spaces that have them mapped.
    pub spaces: usize,
    /// Pages by where they are. Before a pager has begun to manage, all are nowhere.
    pub pages: Counts,
    /// Bytes in the memory files.
    pub resident_bytes: u64,
    /// Bytes that compressed memory takes.
    pub pool_bytes: u64,
}

/// The pager. Dropping it brings everything back first; when its process is killed, a process that
/// has memory swapped in it is stopped by its guard.
pub struct SharedMemoryPager {
    inner: Arc<Inner>,
    /// The reader, and the servers.
    faults: Vec<JoinHandle<()>>,
    room: Option<JoinHandle<()>>,
}

impl SharedMemoryPager {
    /// Starts a pager.
    ///
    /// # Errors
    /// When there is no slot in the segment, no memory, or no thread.
    pub fn start(settings: PagerSettings) -> Result<SharedMemoryPager, Errno> {
        let PagerSettings { segment, open, log, fail, close } = settings;
        let index = segment.claim(std::process::id(), 0).ok_or(Errno::NOSPC)?;
        segment.watch_past_writes();
        let inner = Arc::new(Inner {
            segment,
            index,
            store: Store::new(segment, index, open, fail)?,
            fail,
            log,
            close,
            state: Mutex::new(PagerState::default()),
            work: Condvar::new(),
            poll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            room: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            loads_wait: Condvar::new(),
            stop: AtomicU32::new(0),
            memories: Mutex::default(),
            statm: StatmFd::open_self().ok(),
            own_bytes: AtomicU64::new(0),
        });
        epoll::add(
            &inner.poll,
            &inner.room,
            epoll::EventData::new_u64(ROOM_TOKEN),
            epoll::EventFlags::IN,
        )?;
        let mut pager = SharedMemoryPager { inner: inner.clone(), faults: vec![], room: None };
        let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get());
        // When the kernel refuses one, the servers made so far suffice.
        let servers = (1..cpus.min(MAX_SERVERS + 1))
            .map_while(|_| thread(&inner, "shared-server", crate::fault::serve).ok());
        pager.faults.extend(servers);
        let servers = pager.faults.len();
        let reader = move |inner| crate::fault::run(inner, servers);
        pager.faults.push(thread(&inner, "shared-faults", reader)?);
        pager.room = Some(thread(&inner, "shared-room", crate::reclaim::run)?);
        Ok(pager)
    }

    #[cfg(test)]
    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    /// The pager's slot in the segment.
    pub fn index(&self) -> SlotIndex {
        self.inner.index
    }

    /// Bytes of all regions that are in memory, managed or not.
    pub fn resident_bytes(&self) -> u64 {
        self.inner.resident_bytes()
    }

    /// A snapshot of the counts of regions, address spaces and pages, and of the bytes in use.
    pub fn stats(&self) -> PagerStats {
        let state = self.inner.lock();
        PagerStats {
            regions: state.regions.len(),
            spaces: state.spaces.len(),
            pages: state.counts(),
            resident_bytes: self.inner.resident_bytes(),
            pool_bytes: self.inner.store.pool_bytes() as u64,
        }
    }

    /// Answers a request of process `pid`, as [`swaptide_ipc::shared`] makes it.
    pub fn serve(
        &self,
        request: AgentRequest,
        body: &[u8],
        fd: Option<OwnedFd>,
        conn: Conn,
        pid: u32,
    ) {
        let number = |at: usize| {
            body.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes)
        };
        let byte = request as u8;
        if request == AgentRequest::Guard {
            let landmark = number(0).map(|landmark| VirtAddr(landmark as usize));
            return self.inner.stand_guard(pid, landmark, conn, byte);
        }
        // A client that hung up has gone without an answer.
        let _ = match request {
            AgentRequest::Region => {
                match number(0).and_then(|bytes| self.create_region(bytes).ok()) {
                    Some(memory) => conn.send(&[byte], &[memory.as_fd()]),
                    None => conn.send(&[byte, NO_REGION_NOW], &[]),
                }
            }
            AgentRequest::Attach => conn.send(&[byte, self.inner.attach(pid, fd) as u8], &[]),
            AgentRequest::Advise => {
                let advice = body
                    .get(16..20)
                    .and_then(|bytes| bytes.try_into().ok())
                    .map(i32::from_le_bytes);
                let answer = match (number(0), number(8), advice) {
                    (Some(addr), Some(len), Some(advice)) => {
                        let taker = AdviceTaker(&self.inner);
                        taker.advise(pid, addr as usize, len as usize, advice)
                    }
                    _ => AdviceOutcome::Elsewhere,
                };
                conn.send(&[byte, answer as u8], &[])
            }
            _ => Ok(()),
        };
        (self.inner.close)(conn);
    }

    /// A new region: its memory file, to be mapped and [attached](swaptide_ipc::shared::attach).
    ///
    /// # Errors
    /// For a length that is none, and when memory is refused.
    pub(crate) fn create_region(&self, bytes: u64) -> Result<Arc<File>, Errno> {
        self.inner.create_region(bytes)
    }

    /// Sets the limit, where no supervisor does: bytes of regions in memory, compressed memory and
    /// the process's own together. From the first call on regions are managed.
    pub(crate) fn set_limit(&self, bytes: u64) {
        let slot = self.inner.segment.slot(self.inner.index);
        slot.control.limit_bytes.store(bytes.max(1), Relaxed);
        slot.control.engage.store(1, Release);
        self.inner.work.notify_all();
    }
}

impl SharedMemoryPager {
    /// Brings everything back. False when it is to be tried again: this process is short of
    /// something.
    fn restore_all(&self) -> bool {
        let mut state = self.inner.lock();
        let all: Vec<(RegionId, usize)> =
            state.regions.values().map(|region| (region.id, region.pages())).collect();
        all.into_iter()
            .fold(true, |done, (id, pages)| self.inner.restore(&mut state, id, 0..pages) && done)
    }
}

impl Drop for SharedMemoryPager {
    fn drop(&mut self) {
        self.inner.stop.fetch_or(STOP_ROOM, Relaxed);
        self.inner.work.notify_all();
        // A thread that panicked has ended as well.
        self.room.take().map(JoinHandle::join);
        let (began, bound) = (Instant::now(), shortage::bound(false));
        while !self.restore_all() {
            if began.elapsed() > bound {
                abort_with(&[b"swaptide: shared memory cannot be brought back; stopped"]);
            }
            std::thread::sleep(SHORTAGE_PAUSE);
        }
        {
            // With the lock: a server that has not seen it waits by now, and is woken.
            let _state = self.inner.lock();
            self.inner.stop.fetch_or(STOP_FAULTS, Relaxed);
        }
        self.inner.loads_wait.notify_all();
        self.faults.drain(..).for_each(|thread| drop(thread.join()));
    }
}

fn thread(
    inner: &Arc<Inner>,
    name: &str,
    body: impl FnOnce(Arc<Inner>) + Send + 'static,
) -> Result<JoinHandle<()>, Errno> {
    let inner = Arc::clone(inner);
    let spawned = std::thread::Builder::new().name(name.into()).spawn(move || body(inner));
    spawned.map_err(|_| Errno::AGAIN)
}
