//! Putting pages in their place: moved in from frames, copied in from buffers, or poisoned.
//!
//! Runs of four pages and more are moved in from staging frames, recycled from swap-out; fewer are
//! copied in, which needs no flush of other CPUs.
//!
//! Guard pages of the program (`MADV_GUARD_INSTALL`, Linux 6.13): a touch is a SIGSEGV, and the
//! contents are gone. The kernel sends no event for them. Where the program asks through libc, the
//! agent installs the guard, gives the range up with `MADV_DONTNEED` (which sends the event that
//! empties the words), and installs it again, since a page may have come in between. A bare
//! instruction is not seen: the words then keep what they were, and the guard is found when
//! something is put there.
//!
//! Owns: the pages of zeros and the fresh pages for growth.
//! [`crate::engine::KnownMemory::guarded`] says that the program has had a guard.
//!
//! Invariants
//! 1. A fill replaces no guard, but for what follows. `UFFDIO_MOVE` and `UFFDIO_POISON` answer
//!    `EEXIST` on one; `UFFDIO_COPY` fills over it, so what it fills is looked at first. Until the
//!    process has a guard that is known, two kinds of pages are not, since a check takes a
//!    microsecond of the nine that a page from compressed memory takes:
//!    - the page of a waiting thread: a touch of a guard is no userfaultfd fault;
//!    - pages that a repeated sequence foretells. One check, of the 2 MiB around the first of them,
//!      serves all that come for one fault. So they may replace the first guard that is installed
//!      past libc over memory that is out (docs/semantics.md).
//! 2. A slot whose page is a guard is released, and its word becomes `Empty`: the guard discarded
//!    the contents. Any other page that the program has where the word says swapped ends the
//!    process.
//! 3. Fills never wake.
//!
//! Locks: none of its own. A check and the fill behind it happen under the memory lock or inside
//! the gate ([`crate::fault::placing`]), and the event of the agent's `MADV_DONTNEED` is read and
//! applied under both: a fill that was looked at before the guard was installed is undone by that.

use std::sync::atomic::Ordering::Relaxed;

use swaptide_core::SwapEntry;
use swaptide_ipc::Counter;
use swaptide_sys::Errno;
use swaptide_sys::lock::Guard;
use swaptide_sys::maps::MapsFile;
use swaptide_sys::mem::Mapping;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::pagemap::Pagemap;
use swaptide_sys::uffd::{MoveFlags, Progress, Uffd};

use crate::EngineError;
use crate::engine::{Engine, Mm};
use crate::events::brought::BroughtPages;
use crate::fault::placing::Placing;
use crate::fault_injection::HandlerFaults;
use crate::mm::page_table::PageState;
use crate::mm::staging::{FrameRun, really_moved};
use crate::mm::types::{PAGES_PER_LEAF, PageNo, range_of};

/// Fewer pages than this are copied in.
pub(crate) const MIN_MOVE_PAGES: usize = 4;
const ZEROS_BYTES: usize = 64 << 10;
const FRESH_BYTES: usize = PAGES_PER_LEAF * PAGE_SIZE;

/// Why a fill stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stop {
    /// Events are unread, or a fork through no hook goes first.
    Again,
    /// The mapping is gone or not armed.
    Gone,
    /// Another thread brings the page in, and wakes who waits for it.
    Taken,
    /// The program has a page there.
    Exists,
    /// The range was another one at the second look: nothing was put in place.
    Stale,
    /// Every buffer for remote reads is in use.
    NoBuffer,
    /// It cannot be read, and no thread has asked for it: it stays where it is.
    Unreadable,
}

/// Pages that lie ready to be put in place.
#[derive(Clone, Copy)]
pub(crate) struct LoadedPages {
    /// Their address: memory of the engine that nothing writes to meanwhile.
    pub(crate) from: VirtAddr,
    /// The staging frames that this is, if it is.
    pub(crate) run: Option<FrameRun>,
    /// How many.
    pub(crate) len: usize,
}

/// Moves or copies pages to their place in the program, or poisons them.
pub(crate) struct Installer {
    engine: &'static Engine,
    uffd: &'static Uffd,
    /// It is a fault server's.
    is_server: bool,
    /// The page whose thread waits for the answer under way.
    pub(crate) asked: Option<PageNo>,
    /// Everything is to come in: pages that cannot be read are poisoned, though none was asked for.
    pub(crate) brings_all: bool,
    /// Single pages need no check of their own ([`Installer::look_together`]).
    looked_together: bool,
    /// Fresh pages for growth come from here when no staging frame is free.
    fresh_pages: Mapping,
    zeros: Mapping,
    pub(crate) pagemap: Pagemap,
    pub(crate) maps: MapsFile,
}

impl Installer {
    /// With its pages, none of which has memory yet.
    ///
    /// # Errors
    /// When memory or a file of /proc is refused.
    pub(crate) fn new(engine: &'static Engine, is_server: bool) -> Result<Installer, EngineError> {
        let memory = |what| move |e| EngineError::Memory(what, e);
        let zeros = Mapping::reserve(ZEROS_BYTES).map_err(memory("the zero pages"))?;
        let fresh_pages =
            Mapping::reserve_aligned(FRESH_BYTES, FRESH_BYTES).map_err(memory("fresh pages"))?;
        fresh_pages.unlock();
        Ok(Installer {
            engine,
            uffd: engine.uffd(),
            is_server,
            asked: None,
            brings_all: false,
            looked_together: false,
            fresh_pages,
            zeros,
            pagemap: Pagemap::open_self().map_err(memory("/proc/self/pagemap"))?,
            maps: MapsFile::open_self().map_err(memory("/proc/self/maps"))?,
        })
    }

    /// A page of zeros.
    pub(crate) fn zero_page(&self) -> VirtAddr {
        VirtAddr(self.zeros.as_ptr() as usize)
    }

    /// Gives the memory of fresh pages back.
    pub(crate) fn discard_fresh(&self) {
        let _ = self.fresh_pages.discard(0, self.fresh_pages.len());
    }

    /// Whether pages may be put in place under this hold of the memory lock.
    ///
    /// # Errors
    /// [`Stop::Again`] when not ([`crate::sched::handed`]).
    pub(crate) fn may_fill(&self, mm: &Mm) -> Result<(), Stop> {
        if mm.handed.may_fill(self.is_server) { Ok(()) } else { Err(Stop::Again) }
    }

    /// Copies a page of zeros to where a thread waits for one.
    pub(crate) fn copy_zeros(&self, page: PageNo) -> Result<usize, Stop> {
        self.copy_in(page, self.zero_page(), 1)
    }

    /// Moves `n` zeroed frames in: recycled ones if there are, else fresh ones.
    pub(crate) fn move_zeros(
        &self,
        placing: &Placing,
        mut guard: Guard<'static, Mm>,
        page: PageNo,
        n: usize,
    ) -> (Guard<'static, Mm>, Result<usize, Stop>) {
        let Some(run) = guard.staging.take_run(n) else {
            return placing.put(guard, || self.move_fresh(page, n));
        };
        let addr = guard.staging.run_addr(run);
        let (mut guard, progress) = placing.put(guard, || {
            // SAFETY: the frames of the run are full, free and not taken elsewhere.
            unsafe { std::ptr::write_bytes(addr.as_ptr::<u8>(), 0, run.len * PAGE_SIZE) };
            self.move_in(page, addr, run.len)
        });
        // Frames that were moved in are gone, the rest is given back.
        guard.staging.run_used(run, progress.done / PAGE_SIZE);
        (guard, finish_fill(progress))
    }

    /// Moves `n` fresh pages in.
    fn move_fresh(&self, page: PageNo, n: usize) -> Result<usize, Stop> {
        let bytes = n * PAGE_SIZE;
        if self.fresh_pages.populate_write(0, bytes).is_err() {
            return self.copy_zeros(page);
        }
        let progress = self.move_in(page, VirtAddr(self.fresh_pages.as_ptr() as usize), n);
        let filled = finish_fill(progress);
        if !matches!(filled, Ok(k) if k == n) {
            let _ = self.fresh_pages.discard(0, bytes);
        }
        filled
    }

    fn move_in(&self, page: PageNo, from: VirtAddr, n: usize) -> Progress {
        let flags = MoveFlags { dont_wake: true, allow_src_holes: false };
        // SAFETY: the source are the engine's own pages, not read any more; the destination
        // is a missing page of the program, or the kernel refuses with EEXIST.
        let mut progress = unsafe { self.uffd.move_pages(page.addr(), from, n * PAGE_SIZE, flags) };
        let source = VirtRange { start: from, end: from.offset(n * PAGE_SIZE) };
        progress.done = really_moved(&self.pagemap, progress, source, false) * PAGE_SIZE;
        progress
    }

    /// Copies `n` pages in from the engine's memory at `from`, which nothing writes to meanwhile,
    /// as far as no guard is in the way. [`Stop::Exists`] when the first page is a guard or is
    /// there.
    fn copy_in(&self, page: PageNo, from: VirtAddr, n: usize) -> Result<usize, Stop> {
        let needs_no_look = n == 1
            && (self.asked == Some(page) || self.looked_together)
            && !self.engine.known.guarded.load(Relaxed);
        let n = if needs_no_look { n } else { self.before_guard(page, n) };
        if n == 0 {
            return Err(Stop::Exists);
        }
        // SAFETY: the caller's pages are the engine's own, in frames or buffers that nothing
        // changes meanwhile.
        finish_fill(unsafe {
            self.uffd.copy_pages(page.addr(), from.as_ptr(), n * PAGE_SIZE, true, false)
        })
    }

    /// Copies one page in, on the record if there is one. `from` as for
    /// [`LoadedPages::from`].
    pub(crate) fn copy_page(
        &self,
        record: Option<&mut BroughtPages>,
        page: PageNo,
        from: VirtAddr,
    ) -> Result<usize, Stop> {
        // SAFETY: nothing writes to the page meanwhile.
        unsafe { BroughtPages::filling(record, page, from, 1, || self.copy_in(page, from, 1)) }
    }

    /// Puts loaded pages in their place, on the record if there is one: moves them there when they
    /// lie in staging frames, else copies them. Gives how many, at least 1.
    pub(crate) fn install(
        &mut self,
        placing: &Placing,
        mut guard: Guard<'static, Mm>,
        record: Option<&mut BroughtPages>,
        tests: &mut HandlerFaults,
        page: PageNo,
        loaded: LoadedPages,
    ) -> (Guard<'static, Mm>, Result<usize, Stop>) {
        let LoadedPages { from, run, len } = loaded;
        let (mut moved, mut filled) = (0, self.may_fill(&guard).map(|()| 0));
        if filled.is_ok() {
            let fill =
                || self.fill(page, LoadedPages { len: tests.part_of(len), ..loaded }, &mut moved);
            // SAFETY: nothing writes to the pages meanwhile.
            let put = || unsafe { BroughtPages::filling(record, page, from, len, fill) };
            (guard, filled) = placing.put(guard, put);
        }
        if let Some(run) = run {
            guard.staging.run_used(run, moved);
        }
        (guard, filled)
    }

    /// `moved`: how many of the frames went to the program.
    fn fill(
        &mut self,
        page: PageNo,
        LoadedPages { from, run, mut len }: LoadedPages,
        moved: &mut usize,
    ) -> Result<usize, Stop> {
        if run.is_some() {
            let progress = self.move_in(page, from, len);
            if progress.done > 0 || !matches!(progress.error, Some(Errno::INVAL | Errno::NOENT)) {
                *moved = progress.done / PAGE_SIZE;
                return finish_fill(progress);
            }
        }
        // A read-only mapping takes copies, not moves, and a fill must not reach into another
        // mapping.
        loop {
            // The pages are the thread's own, in frames or in its buffer.
            match self.copy_in(page, from, len) {
                Err(Stop::Gone) if len > 1 => len = self.in_mapping(page, len),
                filled => return filled,
            }
        }
    }

    /// The number of pages, of `len` (more than 1) from `page` on, that lie in its mapping:
    /// at least 1 and at most `len - 1`.
    pub(crate) fn in_mapping(&mut self, page: PageNo, len: usize) -> usize {
        match self.maps.vma_at(page.addr()) {
            Ok(Some(info)) => {
                ((info.vma().range.end.0 - page.addr().0) / PAGE_SIZE).clamp(1, len - 1)
            }
            _ => 1,
        }
    }

    /// From here to [`Installer::end_looking_together`] single pages come that a repeated sequence
    /// foretells, `page` first: looks for guards around that one, for all of them (invariant 1).
    pub(crate) fn look_together(&mut self, page: PageNo) {
        let known = &self.engine.known.guarded;
        let leaf = PageNo(page.0 / PAGES_PER_LEAF * PAGES_PER_LEAF);
        if !known.load(Relaxed)
            && self.pagemap.first_guard(range_of(leaf, PAGES_PER_LEAF)).is_some()
        {
            known.store(true, Relaxed);
        }
        self.looked_together = true;
    }

    /// From here on each page is looked at by itself again.
    pub(crate) fn end_looking_together(&mut self) {
        self.looked_together = false;
    }

    /// Looks for guards in memory that begins to be managed.
    pub(crate) fn look_at_adopted(&self, range: VirtRange) {
        if self.pagemap.first_guard(range).is_some() {
            self.engine.known.guarded.store(true, Relaxed);
        }
    }

    /// The number of pages, of `n`, before the first guard.
    fn before_guard(&self, page: PageNo, n: usize) -> usize {
        self.pagemap
            .first_guard(range_of(page, n))
            .map_or(n, |at| (at.0 - page.addr().0) / PAGE_SIZE)
    }

    /// The program has something where a word says swapped. A guard discarded the contents, and the
    /// slot is released. Anything else: one of the two is wrong, and nothing tells which.
    pub(crate) fn resolve_mapped_twice(
        &self,
        mm: &mut Mm,
        page: PageNo,
        entry: SwapEntry,
    ) -> Result<usize, Stop> {
        if self.before_guard(page, 1) != 0 {
            crate::fatal(&format!(
                "page {:?} is swapped to {entry:?} and also mapped",
                page.addr()
            ));
        }
        self.engine.known.guarded.store(true, Relaxed);
        mm.table.set(page, PageState::Empty);
        self.engine.release(mm, entry);
        Ok(1)
    }

    /// True when a page that cannot be read is poisoned: its thread waits for it, or the process
    /// cannot go on before it has everything. A hint or readahead destroys nothing.
    pub(crate) fn gives_up(&self, page: PageNo) -> bool {
        self.brings_all || self.asked == Some(page)
    }

    /// A page's data is lost: a touch of it is a bus error from now on, never wrong data.
    pub(crate) fn poison(
        &self,
        mm: &mut Mm,
        page: PageNo,
        entry: SwapEntry,
    ) -> Result<usize, Stop> {
        self.may_fill(mm)?;
        let engine = self.engine;
        // Before: its reader is woken by it, and may end the process, and with it this thread, at
        // once.
        engine.count(Counter::PagesPoisoned, 1);
        let poisoned = self.uffd.poison(range_of(page, 1)).error;
        if let Some(errno @ (Errno::AGAIN | Errno::NOENT)) = poisoned {
            engine.slot().uncount(Counter::PagesPoisoned, 1);
            return Err(if errno == Errno::AGAIN { Stop::Again } else { Stop::Gone });
        }
        if poisoned == Some(Errno::EXIST) {
            // The program has something there, and not what the slot held.
            engine.slot().uncount(Counter::PagesPoisoned, 1);
            return self.resolve_mapped_twice(mm, page, entry);
        }
        mm.table.set(page, PageState::Poisoned);
        engine.release(mm, entry);
        (engine.start.log)(&format!("page {:?} cannot be swapped in and is poisoned", page.addr()));
        Ok(1)
    }
}

/// Pages filled, or why none was.
fn finish_fill(progress: Progress) -> Result<usize, Stop> {
    if progress.done > 0 {
        return Ok(progress.done / PAGE_SIZE);
    }
    match progress.error {
        None => Ok(0),
        Some(Errno::EXIST) => Err(Stop::Exists),
        Some(Errno::AGAIN | Errno::NOMEM | Errno::BUSY) => Err(Stop::Again),
        // The mapping is gone or no longer armed: the thread faults again, on whatever is there
        // now.
        Some(_) => Err(Stop::Gone),
    }
}
