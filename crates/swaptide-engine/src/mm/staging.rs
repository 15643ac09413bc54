//! Staging frames: where pages wait between the program and the devices, and the frames that go
//! round for ever.
//!
//! Owns: one area of the process's memory, cut into slabs of 512 frames, and a second area with a
//! userfaultfd of its own, the *[`DiscardArea`]*, through which frames go back to the kernel. The
//! frames are registered with the program's userfaultfd, and pages are moved out on it: the kernel
//! then refuses a move while a change of mappings is unread, which is what makes moving by address
//! safe (see `events`). For the same reason frames cannot be given up where they are: that would be
//! an event of its own. They are moved to the discard area and given up there.
//!
//! A frame with a physical page is *full*. Swap-out moves the program's pages into an empty slab;
//! once written their frames are free but full, and growth and swap-in move the same physical pages
//! back into the program.
//!
//! Invariants
//! 1. The engine reads or writes only full frames. A touch of a frame that is not full would be a
//!    fault that its own handler cannot answer.
//! 2. A slab is in one place at a time: empty (no frame full), ready (some frames full and free),
//!    with a batch, or lent as a whole: the frames of a run are the taker's alone until
//!    [`Staging::run_used`]; or on its way to the discard area ([`Discard`]).
//! 3. Once the program may have given references to its pages away ([`References`]), no frame is
//!    lent: all are given up. Nothing writes to a page that came from the program then.
//! 4. `full_frames` is the sum of the full bits and the lent frames of all slabs, and of what is on
//!    its way to the discard area: what the area costs in memory.
//! 5. Neither area is locked in memory, whatever the program locks: the kernel moves a page between
//!    two areas that are both locked, so locked memory would go out. (Between one that is and one
//!    that is not it refuses.)
//!
//! Locks: it lies inside the engine's memory lock. A worker reads the frames of its own slab
//! without it. The discard area has a lock of its own, behind that one: giving 512 pages back takes
//! some hundred microseconds, for which no thread that answers faults shall have to wait.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use swaptide_sys::Errno;
use swaptide_sys::lock::Lock;
use swaptide_sys::mem::Mapping;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::pagemap::Pagemap;
use swaptide_sys::uffd::{Features, MoveFlags, Progress, Uffd};

use crate::EngineError;
use crate::mm::references::References;
use crate::mm::types::{ChunkNo, PAGES_PER_CHUNK, PAGES_PER_LEAF, PageNo, range_of};

/// Times in a row that the discard area is found full before something else must be wrong.
const MAX_FULL_RETRIES: u32 = 16;
/// Milliseconds for which a frame may be pinned before it cannot be given back.
const MAX_PINNED_MS: u32 = 1000;

const MAX_SLABS: usize = 48;
const SLAB_BYTES: usize = PAGES_PER_LEAF * PAGE_SIZE;

/// A slab of staging frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlabNo(u16);

/// A staging frame, counted over all slabs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameNo(pub u32);

impl SlabNo {
    /// The frame at a place of the slab.
    pub fn frame(self, place: usize) -> FrameNo {
        debug_assert!(place < PAGES_PER_LEAF);
        FrameNo(u32::from(self.0) * PAGES_PER_LEAF as u32 + place as u32)
    }
}

#[derive(Clone)]
struct Slab {
    /// Full frames, but for those that are lent.
    full: [u64; PAGES_PER_LEAF / 64],
    /// The number of set bits in `full`.
    count: usize,
    /// Frames of runs that were taken and neither used nor given back yet.
    lent: usize,
}

/// A run of full, free frames that the taker will move away or give back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrameRun {
    first: FrameNo,
    /// Frames of the run, the first included.
    pub len: usize,
}

/// The area to which frames are moved to be freed.
struct DiscardArea {
    map: Mapping,
    uffd: Uffd,
    pagemap: Pagemap,
}

/// A slab whose frames are free and go back to the kernel.
pub struct Discard {
    slab: SlabNo,
    start: VirtAddr,
    full: [u64; PAGES_PER_LEAF / 64],
    count: usize,
    discard_area: Arc<Lock<DiscardArea>>,
}

/// The slabs of staging frames, and which frames are full, lent or empty.
pub struct Staging {
    map: Mapping,
    discard_area: Arc<Lock<DiscardArea>>,
    pagemap: Pagemap,
    slabs: Vec<Slab>,
    empty: Vec<SlabNo>,
    ready: VecDeque<SlabNo>,
    cursor: usize,
    full_frames: usize,
    ready_frames: usize,
    references: &'static References,
}

impl Staging {
    /// Makes the areas; the caller registers the frames ([`Staging::range`]) with the program's
    /// userfaultfd.
    ///
    /// # Errors
    /// When memory or a userfaultfd is refused.
    pub fn new(references: &'static References) -> Result<Staging, EngineError> {
        let map = Mapping::reserve_aligned(MAX_SLABS * SLAB_BYTES, SLAB_BYTES)
            .map_err(|e| EngineError::Memory("staging frames", e))?;
        map.unlock();
        Ok(Staging {
            map,
            discard_area: Arc::new(Lock::new(DiscardArea::new()?)),
            pagemap: pagemap()?,
            slabs: vec![Slab { full: [0; PAGES_PER_LEAF / 64], count: 0, lent: 0 }; MAX_SLABS],
            empty: (0..MAX_SLABS as u16).rev().map(SlabNo).collect(),
            ready: VecDeque::with_capacity(MAX_SLABS),
            cursor: 0,
            full_frames: 0,
            ready_frames: 0,
            references,
        })
    }

    /// Returns a bit for each page of a chunk that this process alone has mapped; none if that
    /// cannot be read.
    pub fn owned(&self, chunk: ChunkNo) -> u16 {
        self.pagemap.exclusive(chunk.first().addr(), PAGES_PER_CHUNK).unwrap_or(0)
    }

    /// True for a page that is a guard (see [`crate::fault::install`]).
    pub(crate) fn is_guard(&self, page: PageNo) -> bool {
        self.pagemap.first_guard(range_of(page, 1)).is_some()
    }

    /// In a forked child: the discard area is registered with nothing; registers it again. The
    /// frames came with the program's userfaultfd.
    ///
    /// # Errors
    /// When a userfaultfd is refused.
    pub(crate) fn reopen(&mut self) -> Result<(), EngineError> {
        debug_assert_eq!(self.full_frames, 0);
        // The parent's descriptor was never in this process's table under this number: forget it,
        // do not close it.
        std::mem::forget(std::mem::replace(&mut self.pagemap, pagemap()?));
        self.discard_area.lock().reopen()
    }

    /// The range of all frames.
    pub fn range(&self) -> VirtRange {
        self.map.range()
    }

    /// The address of a frame.
    pub fn addr(&self, frame: FrameNo) -> VirtAddr {
        VirtAddr(self.map.as_ptr() as usize + frame.0 as usize * PAGE_SIZE)
    }

    /// Frames of the area.
    pub(crate) fn frames(&self) -> usize {
        MAX_SLABS * PAGES_PER_LEAF
    }

    /// Frames with a physical page.
    pub(crate) fn full_frames(&self) -> usize {
        self.full_frames
    }

    /// Full frames that are free to be used (invariant 3).
    pub(crate) fn ready_frames(&self) -> usize {
        if self.references.are_possible() { 0 } else { self.ready_frames }
    }

    /// An empty slab for a worker; at need one is made by giving free frames back to the kernel.
    pub(crate) fn take_empty(&mut self) -> Option<SlabNo> {
        if let Some(slab) = self.empty.pop() {
            return Some(slab);
        }
        self.discard_one(0);
        self.empty.pop()
    }

    /// The worker moved `len` pages to the frames from `place` on.
    pub fn filled(&mut self, slab: SlabNo, place: usize, len: usize) {
        let slab = &mut self.slabs[slab.0 as usize];
        for at in place..place + len {
            debug_assert_eq!(slab.full[at / 64] >> (at % 64) & 1, 0);
            slab.full[at / 64] |= 1 << (at % 64);
        }
        slab.count += len;
        self.full_frames += len;
    }

    /// The worker is done with its slab: all its full frames are free.
    pub fn give_back(&mut self, slab: SlabNo) {
        if self.slabs[slab.0 as usize].count == 0 {
            self.empty.push(slab);
        } else {
            self.ready_frames += self.slabs[slab.0 as usize].count;
            self.ready.push_back(slab);
        }
    }

    /// Takes up to `want` neighbouring free frames; none once they may be read from outside
    /// (invariant 3).
    pub(crate) fn take_run(&mut self, want: usize) -> Option<FrameRun> {
        if self.references.are_possible() {
            return None;
        }
        let slab_no = *self.ready.front()?;
        let slab = &mut self.slabs[slab_no.0 as usize];
        let is_full = |slab: &Slab, at: usize| slab.full[at / 64] >> (at % 64) & 1 == 1;
        let mut first = self.cursor;
        while first < PAGES_PER_LEAF && !is_full(slab, first) {
            first += if first.is_multiple_of(64) && slab.full[first / 64] == 0 { 64 } else { 1 };
        }
        if first >= PAGES_PER_LEAF {
            // Frames below the cursor were given back by a taker that failed.
            self.cursor = 0;
            debug_assert!(slab.count > 0);
            return self.take_run(want);
        }
        let mut len = 0;
        while len < want && first + len < PAGES_PER_LEAF && is_full(slab, first + len) {
            slab.full[(first + len) / 64] &= !(1 << ((first + len) % 64));
            len += 1;
        }
        slab.count -= len;
        slab.lent += len;
        self.cursor = first + len;
        self.ready_frames -= len;
        if slab.count == 0 {
            self.ready.pop_front();
            self.cursor = 0;
        }
        Some(FrameRun { first: slab_no.frame(first), len })
    }

    /// The address of a run's first frame.
    pub(crate) fn run_addr(&self, run: FrameRun) -> VirtAddr {
        self.addr(run.first)
    }

    /// `used` frames of the run were moved away; the rest is given back.
    pub(crate) fn run_used(&mut self, run: FrameRun, used: usize) {
        self.full_frames -= used;
        let slab_no = SlabNo((run.first.0 as usize / PAGES_PER_LEAF) as u16);
        let first = run.first.0 as usize % PAGES_PER_LEAF;
        let slab = &mut self.slabs[slab_no.0 as usize];
        slab.lent -= run.len;
        let back = run.len - used;
        if back > 0 {
            if slab.count == 0 {
                self.ready.push_front(slab_no);
            }
            for at in first + used..first + run.len {
                slab.full[at / 64] |= 1 << (at % 64);
            }
            slab.count += back;
            self.ready_frames += back;
            self.cursor = 0;
        } else if slab.count == 0 && slab.lent == 0 {
            self.empty.push(slab_no);
        }
    }

    /// Gives free frames back to the kernel until at most `keep` are left (whole slabs at a time).
    /// Returns the frames given back.
    pub fn trim(&mut self, keep: usize) -> usize {
        let before = self.ready_frames;
        while self.discard_one(keep) {}
        before - self.ready_frames
    }

    fn discard_one(&mut self, keep: usize) -> bool {
        let Some(discard) = self.spare(keep) else { return false };
        discard.release_frames();
        self.discarded(discard);
        true
    }

    /// A slab of free frames that may go back to the kernel, where more than `keep` are free. The
    /// caller has them thrown away, for which the memory lock need not be held, and tells
    /// [`Staging::discarded`]; until then they are charged.
    pub(crate) fn spare(&mut self, keep: usize) -> Option<Discard> {
        let keep = if self.references.are_possible() { 0 } else { keep };
        if self.ready_frames <= keep {
            return None;
        }
        let at = self.ready.iter().rposition(|slab| self.slabs[slab.0 as usize].lent == 0)?;
        let slab_no = self.ready.remove(at)?;
        if at == 0 {
            self.cursor = 0;
        }
        let slab = &mut self.slabs[slab_no.0 as usize];
        self.ready_frames -= slab.count;
        let full = std::mem::replace(&mut slab.full, [0; PAGES_PER_LEAF / 64]);
        let count = std::mem::take(&mut slab.count);
        Some(Discard {
            slab: slab_no,
            start: self.addr(slab_no.frame(0)),
            full,
            count,
            discard_area: Arc::clone(&self.discard_area),
        })
    }

    /// The kernel has the frames.
    pub(crate) fn discarded(&mut self, discard: Discard) {
        self.full_frames -= discard.count;
        self.empty.push(discard.slab);
    }

    /// The frames are used no more: nothing of them stays, or stays registered.
    pub(crate) fn retire(&mut self) {
        self.trim(0);
        let discard_area = self.discard_area.lock();
        let _ = discard_area.uffd.unregister(discard_area.map.range());
    }

    /// Pages that a move really moved. When it stops early the kernel may have moved more than it
    /// says; the engine's own side of the move, which nothing else touches, tells: `engine_side`
    /// holds pages now (they were moved there) or no longer (they were moved away).
    pub fn moved(&self, progress: Progress, engine_side: VirtRange, there: bool) -> usize {
        really_moved(&self.pagemap, progress, engine_side, there)
    }
}

fn pagemap() -> Result<Pagemap, EngineError> {
    Pagemap::open_self().map_err(|e| EngineError::Memory("/proc/self/pagemap", e))
}

/// Pages that a move really moved ([`Staging::moved`]).
pub(crate) fn really_moved(
    pagemap: &Pagemap,
    progress: Progress,
    engine_side: VirtRange,
    there: bool,
) -> usize {
    if progress.error.is_none() {
        return progress.done / PAGE_SIZE;
    }
    match pagemap.leading(engine_side, there) {
        Ok(pages) => pages,
        Err(errno) => crate::fatal(&format!(
            "the page map cannot be read: {}",
            swaptide_sys::ErrnoName(errno)
        )),
    }
}

impl Discard {
    /// Gives the pages back to the kernel.
    pub(crate) fn release_frames(&self) {
        self.discard_area.lock().take(self.start, &self.full);
    }
}

impl DiscardArea {
    fn new() -> Result<DiscardArea, EngineError> {
        let map = Mapping::reserve_aligned(SLAB_BYTES, SLAB_BYTES)
            .map_err(|e| EngineError::Memory("the discard area", e))?;
        map.unlock();
        let uffd = Self::open(map.range())?;
        Ok(DiscardArea { map, uffd, pagemap: pagemap()? })
    }

    fn open(range: VirtRange) -> Result<Uffd, EngineError> {
        let uffd = Uffd::open(Features::MOVE, true).map_err(EngineError::Open)?;
        uffd.register_missing(range)
            .map_err(|e| EngineError::Memory("registering the discard area", e))?;
        Ok(uffd)
    }

    /// See [`Staging::reopen`].
    fn reopen(&mut self) -> Result<(), EngineError> {
        std::mem::forget(std::mem::replace(&mut self.uffd, Self::open(self.map.range())?));
        std::mem::forget(std::mem::replace(&mut self.pagemap, pagemap()?));
        Ok(())
    }

    /// Every run of full frames of the slab that begins at `start` is moved here; then all is given
    /// up.
    fn take(&mut self, start: VirtAddr, full: &[u64; PAGES_PER_LEAF / 64]) {
        let is_full = |at: usize| full[at / 64] >> (at % 64) & 1 == 1;
        let mut at = 0;
        let mut in_vain = 0;
        while at < PAGES_PER_LEAF {
            if !is_full(at) {
                at += 1;
                continue;
            }
            let mut len = 1;
            while at + len < PAGES_PER_LEAF && is_full(at + len) {
                len += 1;
            }
            let from = start.offset(at * PAGE_SIZE);
            let to = self.map.range().start.offset(at * PAGE_SIZE);
            let flags = MoveFlags { dont_wake: true, allow_src_holes: false };
            // SAFETY: the frames are free: nothing reads them any more. The discard area is empty.
            let progress = unsafe { self.uffd.move_pages(to, from, len * PAGE_SIZE, flags) };
            let from = VirtRange { start: from, end: from.offset(len * PAGE_SIZE) };
            let moved = really_moved(&self.pagemap, progress, from, false);
            at += moved;
            in_vain = if moved == 0 { in_vain + 1 } else { 0 };
            match progress.error {
                None | Some(Errno::AGAIN | Errno::NOENT) => {}
                // The kernel begins a part of a move again that it has done in part, and meets its
                // own pages there. What lies in the discard area is no longer needed.
                Some(Errno::EXIST) if in_vain < MAX_FULL_RETRIES => {
                    if let Err(errno) = self.map.discard(0, SLAB_BYTES) {
                        crate::fatal(&format!(
                            "emptying the discard area failed: {}",
                            swaptide_sys::ErrnoName(errno)
                        ));
                    }
                }
                Some(Errno::BUSY) if in_vain < MAX_PINNED_MS => {
                    // A fork without a hook left it shared: a write makes it this process's own
                    // again. Or its references (of pipes, by `tee`) are enough for the kernel to
                    // take it for pinned: then it is waited for. It keeps its contents, which
                    // may be read elsewhere.
                    let frame = start.offset(at.min(PAGES_PER_LEAF - 1) * PAGE_SIZE).as_ptr::<u8>();
                    // SAFETY: a free frame that is full, or the call would have gone on.
                    unsafe { frame.write_volatile(frame.read_volatile()) };
                    if in_vain > MAX_FULL_RETRIES {
                        swaptide_sys::thread::sleep(Duration::from_millis(1));
                    }
                }
                Some(errno) => crate::fatal(&format!(
                    "release of staging frames failed: {}",
                    swaptide_sys::ErrnoName(errno)
                )),
            }
        }
        if let Err(errno) = self.map.discard(0, SLAB_BYTES) {
            crate::fatal(&format!(
                "release of staging frames failed: {}",
                swaptide_sys::ErrnoName(errno)
            ));
        }
    }
}
