//! The fault path: from a page the program waits for to the page in its place.
//!
//! [`Handler::serve`] looks at the page's word. Empty: growth, with as many zeroed pages as the stream of first touches bears. Swapped: the page,
//! its chunk, or a window of chunks, as [`crate::locality`] says; a folio still in the swap cache is copied back from its frame.
//!
//! Rules
//! 1. Room is made before a page is filled: when the workers have not kept up, the handler reclaims itself, and the waiting thread pays.
//! 2. Runs of four pages and more are moved in from staging frames, recycled from swap-out; fewer are copied in, which needs no
//!    flush of other CPUs.
//! 3. A slot is released only after its page is in the program. A page whose data is damaged is poisoned.
//! 4. Fills never wake; [`Handler::answer`] wakes last.

use std::sync::atomic::Ordering::Relaxed;

use swaptide_core::{Slot as TableSlot, SwapEntry};
use swaptide_ipc::Counter;
use swaptide_store::{Page, Slot};
use swaptide_sys::Errno;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::uffd::{MoveFlags, Progress};

use crate::bell::Hint;
use crate::devices::{NO_ENTRY, POOL};
use crate::engine::{Mm, NO_RANGE};
use crate::handler::{COPY_BYTES, Handler};
use crate::ids::{ChunkNo, PAGES_PER_CHUNK, PageNo, pages_of, range_of};
use crate::locality::{Reading, SwapIn};
use crate::pagetable::PageState;
use crate::reclaim::Step;
use crate::staging::FrameRun;

/// Fewer pages than this are copied in.
const MOVE_FROM: usize = 4;

/// What became of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Served {
    /// The page is there.
    Filled,
    /// It was there already, or its mapping is gone.
    Spurious,
    /// Events are unread: read them and try again.
    Again,
    /// The address is not managed.
    Unmanaged,
}

/// Why a fill stopped.
pub(crate) enum Stop {
    /// Events are unread.
    Again,
    /// The mapping is gone or not armed.
    Gone,
    /// The program has a page there.
    Exists,
}

impl Handler {
    /// Serves one page.
    pub(crate) fn serve(&mut self, page: PageNo) -> Served {
        let (state, region) = {
            let mm = self.engine.mm.lock();
            (mm.table.get(page), mm.regions.find(page.addr()))
        };
        let Some(region) = region else { return Served::Unmanaged };
        let result = match state {
            PageState::Present | PageState::Kept(_) => return self.already_there(page),
            PageState::Poisoned => {
                let _ = self.uffd.poison(range_of(page, 1));
                return Served::Spurious;
            }
            PageState::Empty => self.grow(page, region),
            PageState::Swapped(_) => self.swap_in(page, region),
        };
        match result {
            Ok(()) => Served::Filled,
            Err(Stop::Again) => Served::Again,
            Err(Stop::Gone | Stop::Exists) => Served::Spurious,
        }
    }

    /// Two threads touched the page and the other's fault was answered; or the kernel dropped a page that was freed lazily, and zeros are right.
    /// The lock is held: a worker must not take the page out between the look at its word and the zeros.
    fn already_there(&mut self, page: PageNo) -> Served {
        let mm = self.engine.mm.lock();
        if !matches!(mm.table.get(page), PageState::Present | PageState::Kept(_)) {
            // It went out meanwhile; the thread faults again and finds it swapped.
            return Served::Spurious;
        }
        match self.uffd.zero_pages(range_of(page, 1), true).error {
            Some(Errno::AGAIN) => Served::Again,
            _ => Served::Spurious,
        }
    }

    /// Makes room for `n` pages.
    fn make_room(&mut self, n: usize) {
        let engine = self.engine;
        let bytes = (n * PAGE_SIZE) as i64;
        for _ in 0..64 {
            if engine.charge.room() >= bytes {
                return;
            }
            if engine.park.load(Relaxed) != 0 {
                return;
            }
            match self.worker.step(engine) {
                Step::Took(pages) => engine.count(Counter::PgstealDirect, pages),
                Step::Again => self.drain_events(),
                Step::Nothing => {
                    let mut mm = engine.mm.lock();
                    mm.staging.trim(n);
                    engine.settle(&mm);
                    return;
                }
            }
        }
    }

    /// Answers a first touch.
    fn grow(&mut self, page: PageNo, region: VirtRange) -> Result<(), Stop> {
        let engine = self.engine;
        let window = self.locality.growth_window(page, engine.charge.window_pages());
        let end = PageNo(pages_of(region).end);
        self.make_room(window);
        let mut guard = engine.mm.lock();
        let mm = &mut *guard;
        if mm.table.get(page) != PageState::Empty || mm.regions.find(page.addr()).is_none() {
            // An event that was read while room was made changed it; the thread faults again.
            return Err(Stop::Gone);
        }
        let mut n = 1;
        while n < window && page.plus(n) < end && mm.table.get(page.plus(n)) == PageState::Empty {
            n += 1;
        }
        let mut done = 0;
        while done < n {
            let filled = if n < MOVE_FROM {
                self.copy_zeros(page.plus(done), n - done)
            } else {
                self.move_zeros(mm, page.plus(done), n - done)
            };
            match filled {
                Ok(filled) => {
                    for k in done..done + filled {
                        mm.mark_present(page.plus(k));
                    }
                    done += filled;
                }
                // Mapped although its word is empty: perhaps about to be dropped (see `events`), so it is left alone.
                Err(Stop::Exists) if done == 0 => done = 1,
                // A fill must not reach into another mapping, and a read-only one takes copies alone: the page by itself, then.
                Err(Stop::Gone) if done == 0 && n > 1 => n = 1,
                // The page asked for is in; the rest is a gift.
                Err(_) if done > 0 => break,
                Err(stop) => {
                    engine.settle(mm);
                    return Err(stop);
                }
            }
        }
        engine.settle(mm);
        drop(guard);
        self.locality.grew(page, done);
        engine.count(Counter::Pgminfault, 1);
        Ok(())
    }

    fn copy_zeros(&mut self, page: PageNo, n: usize) -> Result<usize, Stop> {
        // SAFETY: the zero pages are the engine's own and never written.
        let progress = unsafe { self.uffd.copy_pages(page.addr(), self.zeros.as_ptr(), n * PAGE_SIZE, true, false) };
        settle_fill(progress)
    }

    /// Moves zeroed frames in: recycled ones if there are, else fresh ones.
    fn move_zeros(&mut self, mm: &mut Mm, page: PageNo, n: usize) -> Result<usize, Stop> {
        if let Some(run) = mm.staging.take_run(n) {
            let addr = mm.staging.run_addr(run);
            // SAFETY: the frames of the run are full, free and taken by nobody else.
            unsafe { std::ptr::write_bytes(addr.as_ptr::<u8>(), 0, run.len * PAGE_SIZE) };
            let progress = self.move_in(mm, page, addr, run.len);
            return settle_run(mm, run, progress);
        }
        let bytes = n * PAGE_SIZE;
        if self.mint.populate_write(0, bytes).is_err() {
            return self.copy_zeros(page, 1);
        }
        let progress = self.move_in(mm, page, VirtAddr(self.mint.as_ptr() as usize), n);
        let filled = settle_fill(progress);
        if !matches!(filled, Ok(k) if k == n) {
            let _ = self.mint.discard(0, bytes);
        }
        filled
    }

    fn move_in(&self, mm: &Mm, page: PageNo, from: VirtAddr, n: usize) -> Progress {
        let flags = MoveFlags { dont_wake: true, allow_src_holes: false };
        // SAFETY: the source are the engine's own pages, read by nobody any more; the destination is a missing page of the program, or the
        // kernel refuses with EEXIST.
        let mut progress = unsafe { self.uffd.move_pages(page.addr(), from, n * PAGE_SIZE, flags) };
        progress.done = mm.staging.moved(progress, VirtRange { start: from, end: from.offset(n * PAGE_SIZE) }, false) * PAGE_SIZE;
        progress
    }

    /// Brings back what a fault asks for and what it foretells.
    fn swap_in(&mut self, page: PageNo, region: VirtRange) -> Result<(), Stop> {
        let engine = self.engine;
        let bound = (engine.charge.window_pages() / PAGES_PER_CHUNK).max(1);
        let swapped = engine.mm.lock().table.chunk(page.chunk()).swapped;
        let first = swapped.trailing_zeros() as usize == page.in_chunk();
        let plan = self.locality.swap_in(page, first, self.reading(page.addr()), bound);
        match plan {
            SwapIn::Page => {
                self.make_room(1);
                self.bring(page, 1)?;
            }
            SwapIn::Chunks(chunks) => {
                let first = page.chunk();
                let end = PageNo(pages_of(region).end);
                for k in 0..chunks {
                    let chunk = first.plus(k);
                    if chunk.first() >= end {
                        break;
                    }
                    self.make_room(PAGES_PER_CHUNK);
                    let brought = self.bring_chunk(chunk, page);
                    if k == 0 {
                        brought?;
                        // The thread goes on while its window is filled; a fault it meets there waits for the rest.
                        if chunks > 1 {
                            let _ = self.uffd.wake(range_of(page, 1));
                        }
                    } else if brought.is_err() {
                        break;
                    }
                    self.locality.whole(chunk);
                }
            }
        }
        Ok(())
    }

    /// Brings in the swapped pages of a chunk; the page asked for must be among them if it lies in the chunk.
    fn bring_chunk(&mut self, chunk: ChunkNo, page: PageNo) -> Result<(), Stop> {
        let mask = self.engine.mm.lock().table.chunk(chunk).swapped;
        let mut brought = 0;
        for (first, len) in crate::ids::runs(mask) {
            let start = chunk.first().plus(first);
            let asked = start <= page && page < start.plus(len);
            match self.bring(start, len) {
                Ok(()) => brought += len,
                Err(stop) if asked => return Err(stop),
                Err(_) => {}
            }
        }
        if brought == PAGES_PER_CHUNK {
            self.engine.count(Counter::Swpin64k, 1);
        }
        if page.chunk() != chunk {
            self.engine.count(Counter::SwapRa, brought);
        }
        Ok(())
    }

    /// Brings in `n` neighbouring swapped pages of one chunk.
    pub(crate) fn bring(&mut self, page: PageNo, n: usize) -> Result<(), Stop> {
        let engine = self.engine;
        let mut at = 0;
        while at < n {
            let mut guard = engine.mm.lock();
            let mm = &mut *guard;
            let PageState::Swapped(entry) = mm.table.get(page.plus(at)) else {
                at += 1;
                continue;
            };
            let filled = match engine.devices.slots(entry.ty()).lookup(entry.offset()) {
                TableSlot::Folio(folio) => {
                    let frame = mm.frame_of(entry, folio);
                    let from = mm.staging.addr(frame);
                    // SAFETY: the frame is full and stays so while the memory lock is held.
                    let progress = unsafe { self.uffd.copy_pages(page.plus(at).addr(), from.as_ptr(), PAGE_SIZE, true, false) };
                    match settle_fill(progress) {
                        Err(Stop::Exists) => self.overtaken(page.plus(at), entry),
                        Err(stop) => Err(stop),
                        Ok(filled) => {
                            engine.count(Counter::SwapCacheHit, 1);
                            self.landed(mm, page.plus(at), entry);
                            Ok(filled)
                        }
                    }
                }
                TableSlot::Shadow { .. } if entry.ty() == POOL => self.bring_pool(mm, page.plus(at), n - at),
                TableSlot::Shadow { .. } => {
                    drop(guard);
                    let filled = self.bring_file(page.plus(at), n - at);
                    let mm = engine.mm.lock();
                    engine.settle(&mm);
                    at += filled?;
                    continue;
                }
                other => {
                    crate::fatal(&format!("page {:?} is swapped to {entry:?} and that slot is {other:?}", page.plus(at).addr()))
                }
            };
            engine.settle(mm);
            at += filled?;
        }
        Ok(())
    }

    /// A swapped page is in the program: its heat is set, its slot released.
    fn landed(&mut self, mm: &mut Mm, page: PageNo, entry: SwapEntry) {
        let engine = self.engine;
        if let Some(distance) = mm.refault_distance(&engine.devices, entry) {
            engine.count(Counter::WorkingsetRefault, 1);
            if (distance as usize) < mm.queues.resident_len() / 2 {
                mm.table.update(page.chunk(), |c| c.hot = 1);
                engine.count(Counter::WorkingsetActivate, 1);
            }
        }
        let stored = matches!(engine.devices.slots(entry.ty()).lookup(entry.offset()), TableSlot::Shadow { .. });
        if stored && entry.ty() == POOL && engine.charge.keeps_copies() {
            mm.mark_kept(page, entry);
        } else {
            mm.mark_present(page);
            mm.release(&engine.devices, entry);
        }
    }

    /// Brings in pages from compressed memory, from `page` on, as many as are there in a row, at most `n`.
    fn bring_pool(&mut self, mm: &mut Mm, page: PageNo, n: usize) -> Result<usize, Stop> {
        let engine = self.engine;
        let mut entries = [NO_ENTRY; PAGES_PER_CHUNK];
        let mut len = 0;
        while len < n.min(PAGES_PER_CHUNK) {
            let PageState::Swapped(entry) = mm.table.get(page.plus(len)) else { break };
            if entry.ty() != POOL || !matches!(engine.devices.pool_slots.lookup(entry.offset()), TableSlot::Shadow { .. }) {
                break;
            }
            entries[len] = entry;
            len += 1;
        }
        if len >= MOVE_FROM
            && mm.staging.ready_frames() >= len
            && let Some(run) = mm.staging.take_run(len)
        {
            return self.bring_frames(mm, page, &entries[..len.min(run.len)], run);
        }
        // SAFETY: the buffer is the handler's own.
        let buffer = unsafe { self.copy.slice_mut(0, len * PAGE_SIZE) };
        for (k, out) in buffer.chunks_exact_mut(PAGE_SIZE).enumerate() {
            let out: &mut Page = out.try_into().expect("a page's bytes");
            if engine.devices.pool.load(Slot(entries[k].offset().0), out).is_err() {
                if k == 0 {
                    return self.poison(mm, page, entries[0]);
                }
                len = k;
                break;
            }
        }
        // SAFETY: as above.
        let progress = unsafe { self.uffd.copy_pages(page.addr(), self.copy.as_ptr(), len * PAGE_SIZE, true, false) };
        match (progress.done, progress.error) {
            (0, Some(Errno::EXIST)) => self.overtaken(page, entries[0]),
            (0, Some(Errno::NOENT)) if len > 1 => return self.bring_pool(mm, page, 1),
            _ => {}
        }
        let filled = settle_fill(progress)?;
        self.landed_all(mm, page, &entries[..filled]);
        Ok(filled)
    }

    /// Loads into staging frames and moves them in.
    fn bring_frames(&mut self, mm: &mut Mm, page: PageNo, entries: &[SwapEntry], run: FrameRun) -> Result<usize, Stop> {
        let engine = self.engine;
        let base = mm.staging.run_addr(run);
        let mut loaded = 0;
        for entry in entries {
            // SAFETY: the frames of the run are full, free and taken by nobody else.
            let out = unsafe { &mut *base.offset(loaded * PAGE_SIZE).as_ptr::<Page>() };
            if engine.devices.pool.load(Slot(entry.offset().0), out).is_err() {
                break;
            }
            loaded += 1;
        }
        if loaded == 0 {
            mm.staging.run_used(run, 0);
            return self.poison(mm, page, entries[0]);
        }
        let progress = self.move_in(mm, page, base, loaded);
        mm.staging.run_used(run, progress.done / PAGE_SIZE);
        if progress.done == 0 {
            match progress.error {
                Some(Errno::EXIST) => self.overtaken(page, entries[0]),
                // A read-only mapping takes copies, not moves, and a fill must not reach into another mapping.
                Some(Errno::INVAL | Errno::NOENT) => return self.bring_pool(mm, page, 1),
                _ => {}
            }
        }
        let filled = settle_fill(progress)?;
        self.landed_all(mm, page, &entries[..filled]);
        Ok(filled)
    }

    fn landed_all(&mut self, mm: &mut Mm, page: PageNo, entries: &[SwapEntry]) {
        for (k, entry) in entries.iter().enumerate() {
            self.landed(mm, page.plus(k), *entry);
        }
        self.engine.count(Counter::Pswpin, entries.len());
        self.engine.count(Counter::Zswpin, entries.len());
    }

    /// Brings in pages from the file. The memory lock is not held while it is read: the words of swapped pages are the handler's alone,
    /// and write-back only makes entries of the file, never changes them.
    fn bring_file(&mut self, page: PageNo, n: usize) -> Result<usize, Stop> {
        let engine = self.engine;
        let Some(file) = &engine.devices.file else { crate::fatal("an entry of the swap file without a swap file") };
        let mut entries = [NO_ENTRY; PAGES_PER_CHUNK];
        let mut len = 0;
        {
            let mm = engine.mm.lock();
            while len < n.min(PAGES_PER_CHUNK) {
                let PageState::Swapped(entry) = mm.table.get(page.plus(len)) else { break };
                if entry.ty() == POOL
                    || !matches!(engine.devices.slots(entry.ty()).lookup(entry.offset()), TableSlot::Shadow { .. })
                {
                    break;
                }
                entries[len] = entry;
                len += 1;
            }
        }
        debug_assert!(len * PAGE_SIZE <= COPY_BYTES);
        // SAFETY: the buffer is the handler's own.
        let buffer = unsafe { self.copy.slice_mut(0, len * PAGE_SIZE) };
        let mut requests: Vec<(Slot, &mut Page)> = buffer
            .chunks_exact_mut(PAGE_SIZE)
            .zip(&entries)
            .map(|(out, entry)| (Slot(entry.offset().0), out.try_into().expect("a page's bytes")))
            .collect();
        if let Err(error) = file.device.read(&mut requests) {
            if len > 1 {
                return self.bring_file(page, 1);
            }
            (engine.start.log)(&format!("reading page {:?} from the swap file failed: {error}", page.addr()));
            let mut mm = engine.mm.lock();
            return self.poison(&mut mm, page, entries[0]);
        }
        let mut mm = engine.mm.lock();
        // SAFETY: as above.
        let progress = unsafe { self.uffd.copy_pages(page.addr(), self.copy.as_ptr(), len * PAGE_SIZE, true, false) };
        match (progress.done, progress.error) {
            (0, Some(Errno::EXIST)) => self.overtaken(page, entries[0]),
            (0, Some(Errno::NOENT)) if len > 1 => {
                drop(mm);
                return self.bring_file(page, 1);
            }
            _ => {}
        }
        let filled = settle_fill(progress)?;
        for (k, entry) in entries[..filled].iter().enumerate() {
            self.landed(&mut mm, page.plus(k), *entry);
        }
        engine.count(Counter::Pswpin, filled);
        Ok(filled)
    }

    /// The program has a page where its word says swapped. One of the two is wrong, and nobody can tell which.
    fn overtaken(&mut self, page: PageNo, entry: SwapEntry) -> ! {
        crate::fatal(&format!("page {:?} is swapped to {entry:?} and mapped as well", page.addr()))
    }

    /// A page's data is lost: a touch of it is a bus error from now on, never wrong data.
    fn poison(&mut self, mm: &mut Mm, page: PageNo, entry: SwapEntry) -> Result<usize, Stop> {
        let engine = self.engine;
        match self.uffd.poison(range_of(page, 1)).error {
            Some(Errno::AGAIN) => return Err(Stop::Again),
            Some(Errno::NOENT) => return Err(Stop::Gone),
            _ => {}
        }
        mm.table.set(page, PageState::Poisoned);
        mm.release(&engine.devices, entry);
        engine.count(Counter::PagesPoisoned, 1);
        (engine.start.log)(&format!("page {:?} cannot be brought back and is poisoned", page.addr()));
        Ok(1)
    }

    /// What the program said of how an address is read.
    fn reading(&self, addr: VirtAddr) -> Reading {
        self.hints.iter().rev().find(|(range, _)| range.contains(addr)).map_or(Reading::Unknown, |(_, reading)| *reading)
    }

    /// Acts on a hint.
    pub(crate) fn hint(&mut self, hint: Hint, range: VirtRange) {
        let engine = self.engine;
        match hint {
            Hint::Sequential => self.note(range, Reading::Sequential),
            Hint::Random => self.note(range, Reading::Random),
            Hint::Normal => self.note(range, Reading::Unknown),
            Hint::Cold | Hint::PageOut => {
                let mut guard = engine.mm.lock();
                let mm = &mut *guard;
                for page in pages_of(range).step_by(PAGES_PER_CHUNK) {
                    let chunk = PageNo(page).chunk();
                    mm.queues.first_to_go(&mut mm.table, chunk);
                }
                drop(guard);
                if hint == Hint::PageOut {
                    let mut left = range.len() / PAGE_SIZE;
                    while left > 0 {
                        match self.worker.step(engine) {
                            Step::Took(pages) => left = left.saturating_sub(pages),
                            Step::Again => self.drain_events(),
                            Step::Nothing => break,
                        }
                    }
                }
            }
            Hint::Release => self.release(range),
            Hint::WillNeed => {
                let budget = engine.charge.headroom().max(0) as usize / 2 / PAGE_SIZE;
                for page in pages_of(range).take(budget).step_by(PAGES_PER_CHUNK) {
                    if self.bring_chunk(PageNo(page).chunk(), PageNo(page)).is_err() {
                        break;
                    }
                }
            }
        }
    }

    /// Brings a range in and lets it go.
    fn release(&mut self, range: VirtRange) {
        let engine = self.engine;
        engine.mm.lock().held = range;
        let pages = pages_of(range);
        let end = PageNo(pages.end);
        let mut at = PageNo(pages.start);
        let mut tries = 0;
        loop {
            let next = engine.mm.lock().table.next_used(at, end);
            let Some(page) = next.filter(|p| *p < end) else { break };
            match self.bring(page, 1) {
                Err(Stop::Again) if tries < 1000 => {
                    tries += 1;
                    self.drain_events();
                }
                _ => at = page.plus(1),
            }
        }
        let mut mm = engine.mm.lock();
        mm.held = NO_RANGE;
        if (pages.start..pages.end).any(|page| matches!(mm.table.get(PageNo(page)), PageState::Swapped(_))) {
            (engine.start.log)("a range could not be brought in whole and stays managed");
            return;
        }
        // What is not armed needs no disarming; a part that is unmapped makes the call fail after its neighbours were done.
        let _ = self.uffd.unregister(range);
        crate::events::drop_pages(&mut mm, &engine.devices, range);
        mm.regions.remove(range);
        engine.settle(&mm);
    }

    fn note(&mut self, range: VirtRange, reading: Reading) {
        self.hints.retain(|(r, _)| !(range.start <= r.start && r.end <= range.end));
        if reading != Reading::Unknown && self.hints.len() < 256 {
            self.hints.push((range, reading));
        }
    }
}

/// Frames of a run that were moved in are gone, the rest is given back.
fn settle_run(mm: &mut Mm, run: FrameRun, progress: Progress) -> Result<usize, Stop> {
    mm.staging.run_used(run, progress.done / PAGE_SIZE);
    settle_fill(progress)
}

/// Pages filled, or why none was.
fn settle_fill(progress: Progress) -> Result<usize, Stop> {
    if progress.done > 0 {
        return Ok(progress.done / PAGE_SIZE);
    }
    match progress.error {
        None => Ok(0),
        Some(Errno::EXIST) => Err(Stop::Exists),
        Some(Errno::AGAIN | Errno::NOMEM | Errno::BUSY) => Err(Stop::Again),
        // The mapping is gone or no longer armed: the thread faults again, on whatever is there now.
        Some(_) => Err(Stop::Gone),
    }
}
