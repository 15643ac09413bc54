//! The forked child: from its parent's bequest to an engine of its own.
//!
//! Owns: what was handed over, until the child's handler has it.
//!
//! Invariants
//! 1. Nothing is allocated before the parent's answer is known: the copy of the allocator may be
//!    torn.
//! 2. The table first follows the changes of mappings that this process has, then learns which
//!    pages came with the hand-over, then forgets what did not come along.
//!
//! Locks: no thread of the copy holds one, whatever the lock's word says.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use swaptide_ipc::{MAX_AREAS, SlotIndex};
use swaptide_store::file::{HandedOver, Opened};
use swaptide_sys::maps::MapsFile;
use swaptide_sys::mem::{Mapping, is_mapped_in};
use swaptide_sys::page::{PAGE_SIZE, VirtRange};
use swaptide_sys::process::{parent, proc_info};
use swaptide_sys::sock::{Conn, poll_readable};
use swaptide_sys::thread::getpid;
use swaptide_sys::uffd::{Event, Uffd};
use swaptide_sys::{AsFd, AsRawFd, Errno, FromRawFd, OwnedFd};

use crate::EngineError;
use crate::engine::Engine;
use crate::events::apply::{apply, apply_late, apply_now};
use crate::fork::allow_fork::deny_fork;
use crate::fork::protocol::{
    DECLINED, DECLINED_SLOT, Decline, MESSAGE_BYTES, MSG_SERVING, NO_ENGINE, NO_ENGINE_INCOMPLETE,
    decode,
};
use crate::memcg::psi::StallClock;
use crate::memcg::thrash::ThrashDetector;
use crate::mm::page_table::PageState;
use crate::mm::types::PageNo;
use crate::mm::vma_change::VmaChange;
use crate::pager::Pager;
use crate::readahead::Readahead;
use crate::requests::fork_control::NO_FORK;
use crate::sched::deadline::Deadline;

/// The data and descriptors that a child's handler got from its parent's.
pub struct ForkHandoff {
    conn: Conn,
    uffd: Option<Uffd>,
    areas: Vec<HandedOver>,
    served: Vec<PageNo>,
    changes: Vec<VmaChange>,
}

impl ForkHandoff {
    /// Tells the parent's handler that this process serves itself.
    ///
    /// # Errors
    /// When the parent is gone, which is no harm any more.
    pub fn taken(&self) -> Result<(), Errno> {
        self.conn.send(&[MSG_SERVING], &[])
    }

    /// Tells the parent's handler that this process cannot serve itself; returns when all its
    /// memory is there.
    ///
    /// # Errors
    /// When the parent is gone: what is swapped is lost, and the process must be stopped.
    pub fn declined(&self) -> Result<(), Errno> {
        self.conn.send(&[DECLINED], &[])?;
        wait_for_memory(&self.conn).map(drop)
    }
}

/// A count, that many words, and what follows them.
fn counted(words: &[usize]) -> (&[usize], &[usize]) {
    match words.split_first() {
        Some((count, rest)) => rest.split_at((*count).min(rest.len())),
        None => (&[], &[]),
    }
}

/// The timeout for the parent's handler, which may have much to copy.
const PARENT_TIMEOUT: Duration = Duration::from_secs(600);

/// The next message of the parent's handler.
fn receive(conn: &Conn, buf: &mut [u8], fds: &mut [Option<OwnedFd>]) -> Result<usize, Errno> {
    let mut deadline = Deadline::new(PARENT_TIMEOUT);
    while poll_readable(&[conn.as_fd()], Some(Duration::from_millis(40)))? == 0 {
        if deadline.is_over(|| proc_info(parent()).is_some_and(|parent| parent.stopped)) {
            return Err(Errno::TIMEDOUT);
        }
    }
    let received = match conn.recv(buf, fds) {
        // The parent's end was closed with the hello unread: its last word lies behind this error.
        Err(Errno::CONNRESET) => conn.recv(buf, fds),
        received => received,
    };
    received.map(|(n, _)| n)
}

/// Waits until the parent's handler says that all memory is there. True when this process may
/// allocate from its copy of the engine's memory.
fn wait_for_memory(conn: &Conn) -> Result<bool, Errno> {
    let mut word = [0u8; 8];
    let n = receive(conn, &mut word, &mut [])?;
    match u64::from_le_bytes(word) {
        NO_ENGINE if n == 8 => Ok(true),
        NO_ENGINE_INCOMPLETE if n == 8 => Ok(false),
        _ => Err(Errno::PROTO),
    }
}

impl Engine {
    /// In the child, before any engine thread runs: forgets the parent's threads.
    pub fn forked(&self) {
        // The parent's handler may have held the lock at the moment of the fork, to note another
        // thread's fault or event: it changes nothing that the lock guards then (invariant 1).
        // SAFETY: no other thread exists in this process.
        unsafe { self.mm.force_unlock() };
        self.workers.taking.store(0, Relaxed);
        // SAFETY: no other thread exists in this process. Workers were quiesced outside of the
        // devices.
        unsafe { self.devices.pool.force_unlock() };
        // SAFETY: no other thread exists in this process.
        unsafe { self.devices.areas.force_unlock() };
        // SAFETY: no other thread exists in this process.
        unsafe { self.remote_reads.forked() };
        // SAFETY: no other thread exists in this process.
        unsafe { self.fork.childrens_history.force_unlock() };
        // SAFETY: no other thread exists in this process. Servers were quiesced.
        unsafe {
            self.serving.readahead.force_unlock();
            self.serving.stalls.force_unlock();
        }
        self.serving.servers.forked();
        self.serving.gate.reset();
        self.workers.quiesce.store(0, Relaxed);
        self.workers.quiesced.store(0, Relaxed);
        self.workers.running.store(0, Relaxed);
        self.workers.tids.iter().for_each(|tid| tid.store(0, Relaxed));
        self.workers.work.store(0, Relaxed);
        self.workers.awake.store(0, Relaxed);
        self.handler_requests.reset();
        self.serving.handler.tid.store(0, Relaxed);
    }

    /// Closes the userfaultfd of an engine that never began.
    ///
    /// # Safety
    /// Nothing is managed, and nothing uses the engine any more.
    pub unsafe fn close_uffd(&self) {
        // SAFETY: the caller's promise; the box that owns the number is never dropped.
        drop(unsafe { OwnedFd::from_raw_fd(self.uffd().as_fd().as_raw_fd()) });
    }

    /// Says hello to the parent's handler. If that has not waited, its last word lies at the
    /// child's end.
    fn greet(&self, end: Option<Conn>, first: u32) -> Result<Conn, Errno> {
        let conn = end.ok_or(Errno::PROTO)?;
        let mut hello = [0u8; 16];
        hello[..4].copy_from_slice(&first.to_le_bytes());
        hello[4..8].copy_from_slice(&getpid().0.to_le_bytes());
        hello[8..].copy_from_slice(&self.fork.token.load(Relaxed).to_le_bytes());
        match conn.send(&hello, &[]) {
            Ok(()) | Err(Errno::PIPE) => Ok(conn),
            Err(errno) => Err(errno),
        }
    }

    /// In a child that cannot take over: returns when all its memory is there and its copy of the
    /// engine is of no use any more. Allocates nothing. True when others may allocate.
    ///
    /// # Errors
    /// When the parent is gone: what is swapped is lost, and the process must be stopped.
    pub fn decline(&self, end: Option<Conn>, why: Decline) -> Result<bool, Errno> {
        wait_for_memory(&self.greet(end, DECLINED_SLOT - why as u32)?)
    }

    /// In the child's handler thread: asks the parent's handler for what the child needs.
    ///
    /// # Errors
    /// When the parent is gone.
    ///
    /// Nothing is allocated before the answer is known: this process's copy of the allocator may be
    /// torn.
    pub fn inherit(
        &self,
        end: Option<Conn>,
        index: SlotIndex,
    ) -> Result<Option<ForkHandoff>, Errno> {
        let conn = self.greet(end, index.0)?;
        let mut total = [0u8; 8];
        let mut fds: [Option<OwnedFd>; 1 + MAX_AREAS] = Default::default();
        let n = receive(&conn, &mut total, &mut fds)?;
        if n == 8 && [NO_ENGINE, NO_ENGINE_INCOMPLETE].contains(&u64::from_le_bytes(total)) {
            return Ok(None);
        }
        let mut fds = fds.into_iter();
        let uffd = fds.next().flatten();
        let (Some(uffd), 8) = (uffd, n) else { return Err(Errno::PROTO) };
        let mut bytes = vec![0u8; u64::from_le_bytes(total) as usize];
        let mut at = 0;
        while at < bytes.len() {
            let end = bytes.len().min(at + MESSAGE_BYTES);
            let n = receive(&conn, &mut bytes[at..end], &mut [])?;
            if n == 0 {
                return Err(Errno::PROTO);
            }
            at += n;
        }
        let words: Vec<usize> = bytes
            .chunks_exact(8)
            .map(|b| u64::from_le_bytes(b.try_into().expect("eight bytes")) as usize)
            .collect();
        let (areas, rest) = counted(&words);
        let (served, changes) = counted(rest);
        let areas = areas.iter().zip(fds).filter_map(|(word, fd)| {
            Some(HandedOver {
                area: (word >> 32) as u8,
                generation: *word as u32,
                opened: Opened::File(fd?),
            })
        });
        let areas = areas.collect();
        let served = served.iter().map(|p| PageNo(*p)).collect();
        let changes = changes.chunks_exact(4).filter_map(decode).collect();
        Ok(Some(ForkHandoff { conn, uffd: Some(Uffd::from_fd(uffd)), areas, served, changes }))
    }
}

/// In a forked child: mappings that its parent kept for itself (`MADV_DONTFORK`) are not here,
/// and what stands in their place is the engine's own, made since; and what is not armed is
/// something else. Their pages are given up.
fn forget_missing(engine: &Engine, maps: &mut MapsFile) -> Result<(), EngineError> {
    let regions: Vec<VirtRange> = engine.mm.lock().regions.iter().collect();
    let mut missing = Vec::new();
    for region in regions {
        let mut at = region.start;
        while at < region.end {
            let next = maps
                .vma_at_or_next(at)
                .map_err(|e| EngineError::Memory("reading /proc/self/maps", e))?;
            let found = next.as_ref().map(|info| (info.vma().range, info.vma().is_private_anon()));
            let Some((vma, is_anon)) = found.filter(|(vma, _)| vma.start < region.end) else {
                missing.push(VirtRange { start: at, end: region.end });
                break;
            };
            if at < vma.start {
                missing.push(VirtRange { start: at, end: vma.start });
            }
            at = at.max(vma.start);
            let end = vma.end.min(region.end);
            crate::vma::adopt::program_parts(VirtRange { start: at, end }, |part| {
                if at < part.start {
                    missing.push(VirtRange { start: at, end: part.start });
                }
                // Another thread has mapped something over it, and that was read after the fork.
                if !is_anon || engine.uffd().is_unarmed(part) {
                    missing.push(part);
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
        apply(engine, &mut mm, Event::Unmap(range));
    }
    Ok(())
}

/// The pager of a forked child, over what its parent has handed over.
///
/// # Errors
/// When a userfaultfd or memory is refused: the child must decline then.
pub(crate) fn inherited(
    engine: &'static Engine,
    index: SlotIndex,
    salt: u64,
    left: &mut ForkHandoff,
) -> Result<Pager, EngineError> {
    engine.set_index(index);
    let uffd = left.uffd.take().ok_or(EngineError::Devices("no userfaultfd was handed over"))?;
    // A fork without a hook at the same moment could have had its descriptor taken for this
    // child's: it would be another process's memory. That one may have something at the same
    // address: zeros for a page that it has never touched are no harm there, and not to be seen
    // here.
    let probe = Mapping::reserve(PAGE_SIZE)
        .map_err(|e| EngineError::Memory("a page to try the userfaultfd on", e))?;
    uffd.register_missing(probe.range())
        .map_err(|e| EngineError::Memory("trying the userfaultfd that was handed over", e))?;
    let _ = uffd.zero_pages(probe.range(), true);
    let ours = is_mapped_in(probe.range().start).unwrap_or(false);
    let _ = uffd.unregister(probe.range());
    drop(probe);
    if !ours {
        return Err(EngineError::Devices(
            "the userfaultfd that was handed over is another process's",
        ));
    }
    engine.set_uffd(uffd);
    let mut pager = Pager::new(engine)?;
    // What the parent's threads wait for is nothing here, nor is what was foretold to them.
    *engine.serving.stalls.lock() = StallClock::default();
    *engine.serving.readahead.lock() = Readahead::new();
    if let Some(history) = engine.fork.childrens_history.lock().take() {
        engine.serving.readahead.lock().prefetcher.inherit(history);
    }
    engine.mm.lock().staging.reopen()?;
    engine.record_new_sharing();
    engine.devices.areas.inherit(std::mem::take(&mut left.areas), salt);
    {
        let mut mm = engine.mm.lock();
        mm.handed.forked();
        mm.thrash = ThrashDetector::default();
        mm.changes.behind = false;
        mm.changes.recent.clear();
        // They are in their order; what the parent's threads owe is not owed here.
        mm.changes.owed.clear();
        for event in std::mem::take(&mut left.changes).into_iter().filter_map(VmaChange::event) {
            apply_now(engine, &mut mm, event);
        }
        apply_late(engine, &mut mm);
        mm.changes.recent.clear();
    }
    for page in std::mem::take(&mut left.served) {
        let mut mm = engine.mm.lock();
        match mm.table.get(page) {
            PageState::Swapped(entry) => engine.release(&mm, entry),
            PageState::PresentClean(entry) => engine.devices.drop_swapped(entry),
            _ => {}
        }
        if mm.regions.find(page.addr()).is_some() {
            mm.mark_present(page);
        }
    }
    forget_missing(engine, &mut pager.path.installer.maps)?;
    if engine.fork.followed {
        deny_fork(engine);
    }
    engine.charge.split_limit();
    engine.charge.take_limit(engine.slot());
    engine.charge.inherit(swaptide_sys::process::parent());
    engine.fork.set(NO_FORK);
    Ok(pager)
}
