//! What the pager's threads share: the regions, the address spaces, and what changes them.
//!
//! Owns the regions, the address spaces that have them mapped, and the queue of what goes out next.
//!
//! Locks: `state`, held for an answer or a step of reclaim, over system calls that wait for no
//! process and, where everything of an address space is brought back, over reading the file; then
//! the devices' own. What faults ask for is loaded without it (`loading`). No thread waits for an
//! event with it. `memories` is taken under it or alone.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::fs::FallocateFlags;
use swaptide_engine::mm::heat::RecordWatch;
use swaptide_engine::mm::types::PAGES_PER_CHUNK;
use swaptide_ipc::shared::{Attached, REGION_NAME, UNKNOWN_REGIONS};
use swaptide_ipc::{Counter, ProcState, Segment, SlotIndex};
use swaptide_sys::mem::memfd_create;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::process::StatmFd;
use swaptide_sys::sock::Conn;
use swaptide_sys::uffd::Uffd;
use swaptide_sys::{AsFd, AsRawFd, BorrowedFd, Errno, OwnedFd};

use crate::huge_pages::HugePages;
use crate::loading::{LoadQueue, PendingFault};
use crate::region::{Counts, Region, RegionId, RegionPage, SlotSpace};
use crate::shortage::Shortages;
use crate::space::{Piece, Space, SpaceId, SpaceState, scan};
use crate::store::{SLOTS, Store};

/// The time that a process may be without a guard before its regions are brought back whole.
pub(crate) const GUARD_TIMEOUT: Duration = Duration::from_secs(1);
/// In this time the guard of a forked child comes, unless none comes.
const CHILD_GUARD_TIMEOUT: Duration = Duration::from_millis(300);
/// In this time a mapping has grown that is being grown, unless its thread is stopped.
const HOLD_TIMEOUT: Duration = Duration::from_millis(300);
/// Regions larger than this are not taken.
pub const MAX_REGION_BYTES: u64 = 64 << 30;
/// A region that is not attached after this time was abandoned by the process that asked for it.
const UNATTACHED_TIMEOUT: Duration = Duration::from_secs(30);

/// The number of [`Inner::room`] at the poll.
pub(crate) const ROOM_TOKEN: u64 = u64::MAX;
/// The thread that makes room is to end.
pub(crate) const STOP_ROOM: u32 = 1;
/// The threads that answer are to end.
pub(crate) const STOP_FAULTS: u32 = 2;

pub(crate) struct Inner {
    pub segment: &'static Segment,
    pub index: SlotIndex,
    pub store: Store,
    /// The failures that a test injects.
    pub fail: u32,
    pub log: fn(&str),
    pub close: fn(Conn),
    pub state: Mutex<PagerState>,
    /// Wakes reclaim.
    pub work: Condvar,
    pub poll: OwnedFd,
    /// Tells the fault thread that there is room.
    pub room: OwnedFd,
    /// Wakes the threads that load.
    pub loads_wait: Condvar,
    /// [`STOP_ROOM`] and [`STOP_FAULTS`].
    pub stop: AtomicU32,
    /// Files of all regions, for queries of what they hold.
    pub memories: Mutex<HashMap<RegionId, Arc<File>>>,
    pub statm: Option<StatmFd>,
    pub own_bytes: AtomicU64,
}

/// The requests that programs have made by advice.
#[derive(Default)]
pub(crate) struct AdvisedPages {
    /// Chunks to take out.
    pub out: VecDeque<(RegionId, u32)>,
    /// Ranges to bring in, as far as they are not in yet.
    pub into: VecDeque<(RegionId, Range<usize>)>,
}

/// In which order pages go out.
#[derive(Default)]
pub(crate) struct ReclaimOrder {
    /// Chunks, the oldest first.
    pub queue: VecDeque<(RegionId, u32)>,
    /// Pages that went out.
    pub clock: u32,
    /// Whether pages that came back soon do so again.
    pub records: RecordWatch,
}

/// Faults that wait, and for no load.
#[derive(Default)]
pub(crate) struct WaitingFaults {
    /// For room.
    pub room: Vec<PendingFault>,
    /// For a layout, or until pages can be read and written: some time later.
    pub later: Vec<PendingFault>,
}

#[derive(Default)]
pub(crate) struct PagerState {
    pub regions: BTreeMap<RegionId, Region>,
    pub spaces: BTreeMap<SpaceId, Space>,
    pub order: ReclaimOrder,
    pub advised: AdvisedPages,
    /// Chunks with pages in compressed memory, the oldest first.
    pub pool_log: VecDeque<(RegionId, u32)>,
    /// Changes with every address space and layout: what was protected everywhere at one number is
    /// so only while it stands.
    pub generation: u64,
    /// Missing pages are the pager's to fill.
    pub engaged: bool,
    /// Loads that are under way.
    pub loads: LoadQueue,
    /// Faults that wait for something else.
    pub faults: WaitingFaults,
    /// Until then no fault waits for room: there was nothing to make it of.
    pub stuck_until: Option<Instant>,
    /// The resources that this process is short of at the moment.
    pub shortages: Shortages,
    /// Regions are mapped nowhere, as far as is known: they are looked at again.
    pub forgets_later: bool,
    next_space: u64,
    slots: SlotSpace,
    created: HashMap<RegionId, Instant>,
}

/// A thread of the pager has panicked with regions half changed, or a load half done.
pub(crate) fn half_changed() -> ! {
    swaptide_sys::thread::abort_with(&[
        b"swaptide: the pager of shared memory failed a check; it is stopped rather than hand out \
        wrong data",
    ])
}

/// Numbers of an address space's two descriptors at the poll.
fn token(space: SpaceId, guard: bool) -> epoll::EventData {
    epoll::EventData::new_u64(space.0 << 1 | u64::from(guard))
}

impl Inner {
    pub fn lock(&self) -> MutexGuard<'_, PagerState> {
        self.state.lock().unwrap_or_else(|_| half_changed())
    }

    /// Waits until there is something to load, or may be.
    pub(crate) fn wait_for_loads<'a>(
        &self,
        state: MutexGuard<'a, PagerState>,
    ) -> MutexGuard<'a, PagerState> {
        self.loads_wait.wait(state).unwrap_or_else(|_| half_changed())
    }

    pub fn count(&self, counter: Counter, n: u64) {
        self.segment.slot(self.index).count(counter, n);
    }

    pub fn resident_bytes(&self) -> u64 {
        let memories = self.memories.lock().expect("no thread panics here");
        memories
            .values()
            .filter_map(|memory| memory.metadata().ok())
            .map(|data| data.blocks() * 512)
            .sum()
    }

    /// Bytes of this process's own memory, compressed memory among it.
    pub(crate) fn own_bytes(&self) -> u64 {
        let measured = self.statm.as_ref().and_then(StatmFd::anon_rss);
        if let Some(bytes) = measured {
            self.own_bytes.store(bytes, Relaxed);
        }
        self.own_bytes.load(Relaxed)
    }

    /// The same, as of the last time it was measured.
    pub(crate) fn own_bytes_before(&self) -> u64 {
        self.own_bytes.load(Relaxed)
    }

    /// Has faults that wait for room looked at again.
    pub(crate) fn tell_room(&self) {
        // A counter that is full has told it already.
        let _ = rustix::io::write(&self.room, &1u64.to_ne_bytes());
    }

    /// The limit; `None` while there is none.
    pub fn limit(&self) -> Option<u64> {
        match self.segment.slot(self.index).control.limit_bytes.load(Relaxed) {
            0 => None,
            bytes => Some(bytes),
        }
    }

    /// Makes known what is swapped. Called before pages go out, so that the pager's end at any
    /// moment is told from a harmless one.
    pub fn publish(&self, counts: &Counts) {
        let slot = self.segment.slot(self.index);
        slot.usage
            .swapped_pool_bytes
            .store(((counts.pool + counts.zero + counts.lost) * PAGE_SIZE) as u64, Relaxed);
        slot.usage.swapped_file_bytes.store((counts.file * PAGE_SIZE) as u64, Relaxed);
    }

    fn watch(&self, fd: BorrowedFd<'_>, space: SpaceId, guard: bool) -> Result<(), Errno> {
        epoll::add(&self.poll, fd, token(space, guard), epoll::EventFlags::IN)
    }

    pub(crate) fn create_region(&self, bytes: u64) -> Result<Arc<File>, Errno> {
        let bytes = bytes
            .checked_next_multiple_of(PAGE_SIZE as u64)
            .filter(|bytes| (1..=MAX_REGION_BYTES).contains(bytes));
        let bytes = bytes.ok_or(Errno::INVAL)?;
        if HugePages::new().come_unasked() {
            return Err(Errno::NOTSUP);
        }
        let memory = File::from(memfd_create(REGION_NAME, bytes)?);
        let id = RegionId::of(&memory).map_err(|_| Errno::IO)?;
        let memory = Arc::new(memory);
        let pages = bytes as usize / PAGE_SIZE;
        let mut state = self.lock();
        let base = state.slots.take(pages, SLOTS).ok_or(Errno::NOSPC)?;
        state.regions.insert(id, Region::new(id, memory.clone(), pages, base));
        state.created.insert(id, Instant::now());
        self.memories.lock().expect("no thread panics here").insert(id, memory.clone());
        Ok(memory)
    }

    /// All mappings of a process are to be known.
    pub fn attach(&self, pid: u32, fd: Option<OwnedFd>) -> Attached {
        if pid == std::process::id() {
            // Its forks would wait for the pager with the allocator's locks held, and the pager for
            // those.
            return Attached::Refused;
        }
        let mut state = self.lock();
        let known = state
            .spaces
            .iter()
            .find(|(_, space)| space.pid == Some(pid) && space.standing() != SpaceState::Gone);
        let known = known.map(|(id, _)| *id);
        let id = match (known, fd) {
            (Some(id), _) => id,
            (None, None) => return Attached::Descriptor,
            (None, Some(fd)) => {
                let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
                if !name.is_ok_and(|name| name.as_os_str() == "anon_inode:[userfaultfd]") {
                    return Attached::Refused;
                }
                match self.add_space(&mut state, Uffd::from_fd(fd), Some(pid), Vec::new()) {
                    Ok(id) => id,
                    Err(_) => return Attached::Refused,
                }
            }
        };
        self.learn(&mut state, id);
        if state.spaces.get(&id).is_some_and(|space| !space.broken && !space.stale) {
            return Attached::Done;
        }
        // Of what a process has just mapped nothing is out. Were its address space kept, nothing of
        // any region would go out as long as that lives, and all would come back.
        if known.is_none() && state.spaces.get(&id).is_some_and(|space| !space.broken) {
            self.forget_space(&mut state, id);
        }
        Attached::Refused
    }

    pub(crate) fn add_space(
        &self,
        state: &mut PagerState,
        uffd: Uffd,
        pid: Option<u32>,
        layout: Vec<Piece>,
    ) -> Result<SpaceId, Errno> {
        state.next_space += 1;
        let id = SpaceId(state.next_space);
        self.watch(uffd.as_fd(), id, false)?;
        state.generation += 1;
        state.spaces.insert(id, Space::new(uffd, pid, layout));
        Ok(id)
    }

    /// Reads the layout of an address space again and registers what is not registered yet.
    pub(crate) fn learn(&self, state: &mut PagerState, id: SpaceId) {
        state.generation += 1;
        let known: HashSet<RegionId> = state.regions.keys().copied().collect();
        let engaged = state.engaged;
        let Some(space) = state.spaces.get_mut(&id) else { return };
        space.stale = true;
        let Some(pid) = space.pid else { return };
        // A mapping may go while it is being registered; then it is not there at the next check.
        for _ in 0..16 {
            let layout = match scan(pid, &known) {
                Ok(layout) => layout,
                // The thread that was asked has ended, and another one may live.
                Err(Errno::SRCH) if space.standing() != SpaceState::Gone => continue,
                Err(_) => break,
            };
            let register = |piece: &Piece| match engaged {
                true => space.uffd.register_missing_wp(piece.range),
                false => space.uffd.register_wp(piece.range),
            };
            let failed = layout.iter().find_map(|piece| register(piece).err());
            space.layout = layout;
            match failed {
                None => {
                    space.stale = false;
                    break;
                }
                // Another userfaultfd has it, which knows nothing of what is out.
                Some(Errno::BUSY) => {
                    space.broken = true;
                    self.restore_space(state, id);
                    break;
                }
                Some(_) => {}
            }
        }
        let Some(space) = state.spaces.get_mut(&id) else { return };
        let standing = space.standing();
        space.is_ahead |= standing == SpaceState::Changing;
        if space.stale && standing == SpaceState::Gone {
            self.forget_space(state, id);
        }
        self.forget_unmapped(state);
    }

    /// An address space is gone.
    pub(crate) fn forget_space(&self, state: &mut PagerState, id: SpaceId) {
        if let Some(mut space) = state.spaces.remove(&id) {
            // A copy of the descriptor would keep it in the poll otherwise.
            let _ = epoll::delete(&self.poll, space.uffd.as_fd());
            if let Some(guard) = space.guard.take() {
                let _ = epoll::delete(&self.poll, guard.as_fd());
                (self.close)(guard);
            }
            state.faults.later.retain(|fault| fault.space != id);
            state.faults.room.retain(|fault| fault.space != id);
            state.loads.forget_space(id);
            self.forget_unmapped(state);
        }
    }

    /// Drops the regions that no process maps any more. None while some address space is changing:
    /// a child whose fork is unread may have them.
    pub(crate) fn forget_unmapped(&self, state: &mut PagerState) {
        let mut mapped: HashSet<RegionId> = HashSet::new();
        for space in state.spaces.values() {
            mapped.extend(space.layout.iter().map(|piece| piece.region));
        }
        for id in &mapped {
            if let Some(region) = state.regions.get_mut(id) {
                region.attached = true;
            }
        }
        let is_unsure = |space: &Space| space.stale || space.standing() == SpaceState::Changing;
        let old = |id: &RegionId| {
            state.created.get(id).is_none_or(|made| made.elapsed() > UNATTACHED_TIMEOUT)
        };
        let mut gone: Vec<RegionId> = state
            .regions
            .values()
            .filter(|region| !mapped.contains(&region.id) && (region.attached || old(&region.id)))
            .map(|region| region.id)
            .collect();
        state.forgets_later = !gone.is_empty() && state.spaces.values().any(is_unsure);
        if state.forgets_later {
            gone.clear();
        }
        for id in gone {
            if let Some(region) = state.regions.remove(&id) {
                for page in 0..region.pages() {
                    self.store.free(region.slot(page), region.state(page));
                }
                state.slots.give(region.base, region.pages());
                state.created.remove(&id);
                self.memories.lock().expect("no thread panics here").remove(&id);
            }
        }
        self.publish(&state.counts());
    }

    /// A process's guard has come. One of no address space that lacks a guard has no region mapped,
    /// as a rule, and is told so.
    pub(crate) fn stand_guard(&self, pid: u32, landmark: Option<VirtAddr>, conn: Conn, byte: u8) {
        let mut state = self.lock();
        let mut reply = [byte, 0, 0, 0, 0];
        reply[1..].copy_from_slice(&self.index.0.to_le_bytes());
        let Some(mark) = landmark.filter(|landmark| landmark.is_page_aligned()) else {
            return (self.close)(conn);
        };
        let mark = VirtRange::from_len(mark, PAGE_SIZE);
        let mut is_sure = true;
        let mut is_marked = |space: &Space| {
            let registered = match space.guard {
                None => space.uffd.register_wp(mark),
                Some(_) => return false,
            };
            if registered.is_ok() {
                let _ = space.uffd.unregister(mark);
            }
            // Another error says nothing of what is mapped there, while there is something.
            is_sure &= matches!(registered, Ok(()) | Err(Errno::INVAL | Errno::SRCH))
                || space.standing() == SpaceState::Gone;
            registered.is_ok()
        };
        let id = match state.spaces.iter_mut().find(|(_, space)| is_marked(space)) {
            Some((id, space))
                if conn.send(&reply, &[space.uffd.as_fd()]).is_ok()
                    && self.watch(conn.as_fd(), *id, true).is_ok() =>
            {
                space.guard = Some(conn);
                space.pid = Some(pid);
                space.restored = false;
                *id
            }
            Some(_) => return (self.close)(conn),
            None => {
                // Its fork's event would have been read before it ran. But a mapping that another
                // thread was about to attach came along without one.
                let is_known =
                    |space: &Space| space.pid == Some(pid) && space.standing() != SpaceState::Gone;
                let regions: HashSet<RegionId> = state.regions.keys().copied().collect();
                let _ = match scan(pid, &regions) {
                    // It cannot be asked, or one with its number is known.
                    Err(_) => Ok(()),
                    _ if !is_sure || state.spaces.values().any(is_known) => Ok(()),
                    Ok(layout) if layout.is_empty() => conn.send(&[byte], &[]),
                    Ok(_) => conn.send(&[byte, UNKNOWN_REGIONS], &[]),
                };
                return (self.close)(conn);
            }
        };
        self.learn(&mut state, id);
        self.work.notify_all();
    }
}

impl PagerState {
    /// Pages by where they are, in all regions.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        self.regions.values().for_each(|region| counts.add(&region.counts()));
        counts
    }

    /// Regions of which nothing may go out.
    pub(crate) fn forbidden(&self) -> HashSet<RegionId> {
        let mut all: HashSet<RegionId> =
            self.regions.values().filter(|region| region.kept).map(|region| region.id).collect();
        for space in self.spaces.values().filter(|space| space.forbids()) {
            // What it maps now may be more than what is known.
            if space.stale && !space.broken {
                return self.regions.keys().copied().collect();
            }
            all.extend(space.layout.iter().map(|piece| piece.region));
        }
        for space in self.spaces.values() {
            if space.holds.iter().any(|hold| hold.pages.is_none()) {
                all.extend(space.layout.iter().map(|piece| piece.region));
            }
        }
        all
    }

    /// True when there was nothing to make room of, a moment ago.
    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck_until.is_some_and(|until| Instant::now() < until)
    }

    /// Pages of which nothing may go out while mappings of them grow.
    pub(crate) fn held_pages(&self) -> Vec<(RegionId, Range<usize>)> {
        let holds = self.spaces.values().flat_map(|space| &space.holds);
        holds.filter_map(|hold| hold.pages.clone()).collect()
    }

    /// True while what forbids going out is about to pass: a forked child whose guard is on its
    /// way, a mapping that is being grown.
    pub(crate) fn is_passing(&self) -> bool {
        self.spaces.values().any(|space| {
            space.holds.iter().any(|hold| hold.since.elapsed() < HOLD_TIMEOUT)
                || space.guard.is_none() && space.unguarded.elapsed() < CHILD_GUARD_TIMEOUT
        })
    }

    /// Has a chunk go out of which something is in.
    pub(crate) fn want_out(&mut self, id: RegionId, chunk: usize) {
        let Some(region) = self.regions.get_mut(&id) else { return };
        let is_in = chunk < region.chunk_count()
            && region.chunk_pages(chunk).any(|page| region.state(page).is_in());
        if is_in && !std::mem::replace(&mut region.chunk(chunk).wanted, true) {
            self.advised.out.push_back((id, chunk as u32));
        }
    }

    /// Has chunks go out that were asked for, and could not go.
    pub(crate) fn want_again(&mut self, chunks: Vec<(RegionId, u32)>) {
        chunks.into_iter().for_each(|(id, chunk)| self.want_out(id, chunk as usize));
    }

    /// Puts a chunk at the end of the queue, if it does not stand in it.
    pub(crate) fn enqueue(&mut self, id: RegionId, chunk: usize) {
        if let Some(region) = self.regions.get_mut(&id)
            && !std::mem::replace(&mut region.chunk(chunk).queued, true)
        {
            self.order.queue.push_back((id, chunk as u32));
        }
    }
}

/// Returns the bytes that stay free under a limit, so that faults find room.
pub(crate) fn margin(limit: u64) -> u64 {
    (limit / 64).clamp(256 << 10, 16 << 20).min(limit / 2)
}

/// Makes a hole of pages.
pub(crate) fn punch(memory: &File, pages: &Range<usize>) -> Result<(), Errno> {
    let (at, len) = ((pages.start * PAGE_SIZE) as u64, (pages.len() * PAGE_SIZE) as u64);
    rustix::fs::fallocate(memory, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len)
}

/// True when a range of pages is one hole.
pub(crate) fn is_hole(memory: &File, pages: &Range<usize>) -> bool {
    let (start, end) = ((pages.start * PAGE_SIZE) as u64, (pages.end * PAGE_SIZE) as u64);
    match rustix::fs::seek(memory, rustix::fs::SeekFrom::Data(start)) {
        Ok(data) => data >= end,
        Err(errno) => errno == Errno::NXIO,
    }
}

/// Not all pages were written.
#[derive(Debug)]
pub(crate) struct ShortWrite {
    /// The number of pages written, from the first on: programs may have them already.
    pub written: usize,
    pub error: std::io::Error,
}

/// Writes whole pages into a hole.
pub(crate) fn write_pages(memory: &File, page: usize, bytes: &[u8]) -> Result<(), ShortWrite> {
    let mut done = 0;
    while done < bytes.len() {
        let error = match memory.write_at(&bytes[done..], (page * PAGE_SIZE + done) as u64) {
            Ok(0) => std::io::ErrorKind::WriteZero.into(),
            Ok(more) => {
                done += more;
                continue;
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => error,
        };
        if !done.is_multiple_of(PAGE_SIZE) {
            // A limit on file size that is no multiple of a page, say.
            swaptide_sys::thread::abort_with(&[
                b"swaptide: half a page of shared memory could be put back; stopped",
            ]);
        }
        return Err(ShortWrite { written: done / PAGE_SIZE, error });
    }
    Ok(())
}

impl Inner {
    /// Takes over the limit, and begins to manage when told to.
    pub(crate) fn take_orders(&self) {
        let slot = self.segment.slot(self.index);
        if slot.control.engage.load(Relaxed) != 0
            && slot.state() != ProcState::Engaged
            && self.engage()
        {
            slot.set_state(ProcState::Engaged);
            self.count(Counter::Engaged, 1);
        }
    }

    /// Makes missing pages the pager's to fill, everywhere. False when some address space is
    /// changing: try again.
    fn engage(&self) -> bool {
        let mut state = self.lock();
        if state.engaged {
            return true;
        }
        let pieces: Vec<(SpaceId, VirtRange)> = state
            .spaces
            .iter()
            .flat_map(|(id, space)| space.layout.iter().map(|piece| (*id, piece.range)))
            .collect();
        for (id, range) in pieces {
            if state.spaces[&id].uffd.register_missing_wp(range).is_err()
                && state.spaces[&id].standing() != SpaceState::Gone
            {
                return false;
            }
        }
        // A fork whose event is unread has copied what was registered before.
        if state
            .spaces
            .values()
            .any(|space| space.standing() == SpaceState::Changing || space.stale)
        {
            return false;
        }
        state.engaged = true;
        state.generation += 1;
        // From here on only this pager fills pages: what is there now is all there is.
        let mut present = Vec::new();
        for region in state.regions.values_mut() {
            let mut at = 0;
            while let Ok(data) = rustix::fs::seek(&region.memory, rustix::fs::SeekFrom::Data(at)) {
                let hole = rustix::fs::seek(&region.memory, rustix::fs::SeekFrom::Hole(data))
                    .unwrap_or(data + PAGE_SIZE as u64);
                for page in data as usize / PAGE_SIZE
                    ..(hole as usize).div_ceil(PAGE_SIZE).min(region.pages())
                {
                    region.set(page, RegionPage::Present);
                    present.push((region.id, page / PAGES_PER_CHUNK));
                }
                at = hole;
            }
        }
        present.dedup();
        for (id, chunk) in present {
            state.enqueue(id, chunk);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use super::*;

    #[test]
    fn pages_written_before_error_reported() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory: File = memfd_create("pages", flags).expect("a file").into();
        memory.set_len(3 * PAGE_SIZE as u64).expect("its size");
        fcntl_add_seals(&memory, SealFlags::GROW).expect("a seal");
        let short = write_pages(&memory, 1, &[7; 4 * PAGE_SIZE]).expect_err("it cannot grow");
        assert_eq!(short.written, 2, "{short:?}");
        let mut last = [0; PAGE_SIZE];
        memory.read_exact_at(&mut last, 2 * PAGE_SIZE as u64).expect("it is there");
        assert_eq!(last, [7; PAGE_SIZE]);
        assert!(write_pages(&memory, 0, &[8; 3 * PAGE_SIZE]).is_ok());
    }
}
