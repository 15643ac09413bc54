//! The fault path: from a page the program waits for to the page in its place.
//!
//! [`Handler::serve`] looks at the page's word. Empty: growth, with as many zeroed pages as the
//! stream of first touches bears. Swapped: the page, an aligned range around it, or a window from
//! it on: [`crate::readahead::locality`] foretells, [`crate::backing::snapshot`] says where the
//! pages are, [`crate::readahead::policy`] decides. A folio still in the swap cache is copied back
//! from its frame.
//!
//! Rules
//! 1. Room is made before a page is filled: when the workers have not kept up, the handler reclaims
//!    itself, and the waiting thread pays.
//! 2. Runs of four pages and more are moved in from staging frames, recycled from swap-out; fewer
//!    are copied in, which needs no flush of other CPUs. Growth copies the page asked for alone:
//!    two or three are not worth a move.
//! 3. A slot is released only after its page is in the program. A page whose data is damaged is
//!    poisoned.
//! 4. Fills never wake; [`Handler::answer`] wakes last. Of a window the first chunk is brought in,
//!    its thread is woken, and the rest is read then: readahead is not waited for, and ends where
//!    there is no room.
//! 5. Of a window a page may be left out, to see whether it is wanted
//!    ([`crate::readahead::sampling`]).
//! 6. What is copied in is the page that a thread waits for, or is known to hold no guard page
//!    ([`crate::fault::guards`]).
//! 7. Several pages are loaded without the memory lock, by a snapshot. A range that is another one
//!    at the second look is dropped whole, counted (`swpin_stale`, `swpin_fallback`), and the page
//!    asked for comes alone.

use std::sync::atomic::Ordering::Relaxed;

use swaptide_core::{Slot as TableSlot, SwapEntry};
use swaptide_ipc::{Counter, OfOrder};
use swaptide_store::Page;
use swaptide_sys::Errno;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::thread::Nanos;
use swaptide_sys::uffd::{MoveFlags, Progress};

use crate::backing::devices::POOL;
use crate::backing::snapshot::{self, PageLocation, Snapshot};
use crate::engine::Mm;
use crate::event_loop::{COPY_BYTES, Fault, Handler};
use crate::mm::page_table::PageState;
use crate::mm::staging::FrameRun;
use crate::mm::types::{ChunkNo, PAGES_PER_CHUNK, PageNo, pages_of, range_of};
use crate::readahead::locality::Reading;
use crate::readahead::policy::{Costs, SwapInPlan, SwapInRequest, SwappedIn, admit};

/// Fewer pages than this are copied in.
const MOVE_FROM: usize = 4;
/// Pages that are brought in at a time: moves of this size cost little for each page.
pub(crate) const COPY_GROUP_PAGES: usize = 64;
/// Beyond every page of a program.
pub(crate) const LAST_PAGE: PageNo = PageNo(1 << 36);
const _: () = assert!(
    COPY_GROUP_PAGES * PAGE_SIZE <= COPY_BYTES && COPY_GROUP_PAGES <= snapshot::MAX_SNAPSHOT_PAGES
);
/// Out-of-date snapshots of a single page in a row before other messages get their turn.
const MAX_STALE_SNAPSHOTS: u32 = 8;
/// What a fault costs besides bringing pages in, and what a page from compressed memory costs with
/// the one that goes out for it, in nanoseconds.
const FAULT_NS: u64 = 8_000;
const POOL_NS: u64 = 6_000;

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
    /// The page was sent for: its thread is woken when it lands.
    Away,
    /// It is to be sent for when there is a place for it.
    Crowded,
}

/// Why a fill stopped.
pub(crate) enum Stop {
    /// Events are unread.
    Again,
    /// The mapping is gone or not armed.
    Gone,
    /// The program has a page there.
    Exists,
    /// The range was another one at the second look: nothing was put in place.
    Stale,
    /// No more can be sent for at the moment.
    Crowded,
}

impl Handler {
    /// Serves the page of a fault that is looked at since `at`.
    pub(crate) fn serve(&mut self, page: PageNo, fault: Fault, at: Nanos) -> Served {
        // A worker faults pages in order to take them out.
        let is_of_program = !self.is_of_worker(fault);
        // What is looked at later comes from memory meanwhile.
        self.prefetcher.bring_near(page);
        let (state, region) = {
            let mut mm = self.engine.mm.lock();
            if is_of_program {
                mm.grace.note(fault.tid, page, at);
            }
            (mm.table.get(page), mm.regions.find(page.addr()))
        };
        let Some(region) = region else { return Served::Unmanaged };
        let result = match state {
            PageState::Present | PageState::PresentClean(_) => return self.is_already_mapped(page),
            PageState::Poisoned => {
                let _ = self.uffd.poison(range_of(page, 1));
                return Served::Spurious;
            }
            PageState::Empty => self.demand_zero(page, region),
            PageState::Swapped(_) if self.remote.begin_wait(page) => {
                self.stalls();
                return Served::Away;
            }
            PageState::Swapped(entry) => {
                self.engine.devices.prefetch(entry);
                self.stalls();
                self.remote.asks(Some(page));
                let result = self.swap_in(page, entry, region);
                self.submit();
                self.remote.asks(None);
                result
            }
        };
        match result {
            Ok(()) if self.remote.has(page) => Served::Away,
            Ok(()) => Served::Filled,
            Err(Stop::Again | Stop::Stale) => Served::Again,
            Err(Stop::Gone | Stop::Exists) => Served::Spurious,
            Err(Stop::Crowded) => Served::Crowded,
        }
    }

    /// Two threads touched the page and the other's fault was answered; or the kernel dropped a
    /// page that was freed lazily, and zeros are right. The lock is held: a worker must not take
    /// the page out between the look at its word and the zeros.
    fn is_already_mapped(&mut self, page: PageNo) -> Served {
        let mm = self.engine.mm.lock();
        if !matches!(mm.table.get(page), PageState::Present | PageState::PresentClean(_)) {
            // It went out meanwhile; the thread faults again and finds it swapped.
            return Served::Spurious;
        }
        match self.uffd.zero_pages(range_of(page, 1), true).error {
            Some(Errno::AGAIN) => Served::Again,
            _ => Served::Spurious,
        }
    }

    /// True while events are noted and not applied: only the page asked for is known to be what the
    /// table says.
    fn is_alone(&self) -> bool {
        self.deferring || self.giving
    }

    /// Answers a first touch.
    fn demand_zero(&mut self, page: PageNo, region: VirtRange) -> Result<(), Stop> {
        let engine = self.engine;
        // While events are noted and not applied, what surrounds the page may be something else by
        // now.
        let window = if self.is_alone() {
            1
        } else {
            self.locality.growth_window(page, engine.charge.window_pages())
        };
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
        // Two and three pages are steps to larger windows, and are not filled.
        let step = n;
        if n < MOVE_FROM {
            n = 1;
        }
        let mut done = 0;
        while done < n {
            let filled = if n == 1 {
                self.copy_zeros(page)
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
                // Mapped although its word is empty: perhaps about to be dropped (see `events`), so
                // it is left alone.
                Err(Stop::Exists) if done == 0 => done = 1,
                // A fill must not reach into another mapping, and a read-only one takes copies
                // alone.
                Err(Stop::Gone) if done == 0 && n > 1 => {
                    n = self.in_mapping(page, n).min(n / 2);
                    if n < MOVE_FROM {
                        n = 1;
                    }
                }
                // The page asked for is in; the rest is a gift.
                Err(_) if done > 0 => break,
                Err(stop) => {
                    engine.publish_usage(mm);
                    return Err(stop);
                }
            }
        }
        engine.publish_usage(mm);
        drop(guard);
        self.locality.grew_as(page, done, if step < MOVE_FROM { step } else { done });
        engine.charge.brought(done);
        self.throttle.grew(done, engine.slot().throttle_us.load(Relaxed));
        engine.count(Counter::Pgminfault, 1);
        Ok(())
    }

    /// Copies a page of zeros to where a thread waits for one.
    fn copy_zeros(&mut self, page: PageNo) -> Result<usize, Stop> {
        self.copy_in(page, self.zeros.as_ptr(), 1)
    }

    /// Moves zeroed frames in: recycled ones if there are, else fresh ones.
    fn move_zeros(&mut self, mm: &mut Mm, page: PageNo, n: usize) -> Result<usize, Stop> {
        if let Some(run) = mm.staging.take_run(n) {
            let addr = mm.staging.run_addr(run);
            // SAFETY: the frames of the run are full, free and taken by nobody else.
            unsafe { std::ptr::write_bytes(addr.as_ptr::<u8>(), 0, run.len * PAGE_SIZE) };
            let progress = self.move_in(mm, page, addr, run.len);
            return finish_run(mm, run, progress);
        }
        let bytes = n * PAGE_SIZE;
        if self.fresh_pages.populate_write(0, bytes).is_err() {
            return self.copy_zeros(page);
        }
        let progress = self.move_in(mm, page, VirtAddr(self.fresh_pages.as_ptr() as usize), n);
        let filled = finish_fill(progress);
        if !matches!(filled, Ok(k) if k == n) {
            let _ = self.fresh_pages.discard(0, bytes);
        }
        filled
    }

    fn move_in(&self, mm: &Mm, page: PageNo, from: VirtAddr, n: usize) -> Progress {
        let flags = MoveFlags { dont_wake: true, allow_src_holes: false };
        // SAFETY: the source are the engine's own pages, read by nobody any more; the destination
        // is a missing page of the program, or the kernel refuses with EEXIST.
        let mut progress = unsafe { self.uffd.move_pages(page.addr(), from, n * PAGE_SIZE, flags) };
        progress.done = mm.staging.moved(
            progress,
            VirtRange { start: from, end: from.offset(n * PAGE_SIZE) },
            false,
        ) * PAGE_SIZE;
        progress
    }

    /// Brings back what a fault asks for and what it foretells.
    fn swap_in(&mut self, page: PageNo, entry: SwapEntry, region: VirtRange) -> Result<(), Stop> {
        let engine = self.engine;
        if self.is_alone() {
            self.make_room(1);
            return self.swap_in_page(page, 1);
        }
        let window = match self.remote.is_usual()
            || entry.ty() != POOL && engine.devices.file.is_remote(entry)
        {
            true => engine.charge.far_window_pages(),
            false => engine.charge.window_pages(),
        };
        let most = self.readahead_limits().most(window, engine.devices.is_backed());
        self.held_came = 0;
        let evidence =
            self.locality.swap_in(PageNo::of(region.start), page, self.reading(page.addr()), most);
        engine.count(Counter::SwapRaHit, self.locality.take_hits());
        let ask = SwapInRequest {
            page,
            region: &pages_of(region),
            evidence,
            wanted_16: self.locality.density_x16().into(),
            most,
            costs: Costs { fault: FAULT_NS, pool: POOL_NS, file: self.read_ns },
        };
        let admitted = admit(
            &ask,
            |chunk| self.snapshot(chunk.first(), PAGES_PER_CHUNK),
            |order| self.refused(order),
        );
        let mut came = SwappedIn::new(page);
        match admitted {
            SwapInPlan::Page => {
                self.make_room(1);
                self.swap_in_page(page, most)?;
                self.follow(page, most);
                return Ok(());
            }
            SwapInPlan::Around { first, order } => {
                self.make_room(1 << order);
                if !self.has_room(1 << order) {
                    self.refused(order);
                    return self.swap_in_range(page, 1);
                }
                self.swap_in_span(first, 1 << order, page, &mut came)?;
            }
            SwapInPlan::Onward(pages) => {
                let first = pages.min(PAGES_PER_CHUNK);
                self.make_room(first);
                if !self.has_room(first) {
                    self.refused(first.ilog2() as u8);
                    return self.swap_in_range(page, 1);
                }
                self.leaves_out = self.locality.leave_out(page, pages);
                let brought = self.swap_in_span(page, first, page, &mut came);
                if brought.is_err() {
                    self.leaves_out = None;
                }
                brought?;
                // The thread continues while its window is filled; a fault it meets there waits for
                // the rest.
                if pages > first && !self.remote.has(page) {
                    let _ = self.uffd.wake(range_of(page, 1));
                }
                let mut at = first;
                while at < pages {
                    let n = (pages - at).min(COPY_GROUP_PAGES);
                    self.make_room(n);
                    if !self.has_room(n) {
                        self.refused(n.ilog2() as u8);
                        break;
                    }
                    if self.swap_in_span(page.plus(at), n, page, &mut came).is_err() {
                        break;
                    }
                    at += n;
                }
                self.leaves_out = None;
            }
        }
        came.blocks(|order, n| engine.count_order(OfOrder::Swpin, order, n));
        // What was sent for comes too, a little later.
        self.locality.record_swapped_in(came.pages() + self.remote.asks(Some(page)));
        if self.remote.has(page) {
            self.count_ahead(came.pages());
            return Ok(());
        }
        self.count_ahead(came.pages().saturating_sub(1));
        engine.mm.lock().split.fault(came.pages());
        engine.charge.brought(came.pages());
        Ok(())
    }

    /// Counts pages that came unasked since the last call, but for those that a rotational disk had
    /// brought before: they were counted then.
    pub(crate) fn count_ahead(&mut self, pages: usize) {
        let held = std::mem::take(&mut self.held_came);
        self.engine.count(Counter::SwapRa, pages.saturating_sub(held));
    }

    /// A range of that order was asked for and is not brought in whole.
    fn refused(&self, order: u8) {
        self.engine.count_order(OfOrder::SwpinFallback, order, 1);
    }

    /// What backs `n` pages (at most [`COPY_GROUP_PAGES`]) from `first` on.
    fn snapshot(&self, first: PageNo, n: usize) -> Snapshot {
        let mut snapshot =
            Snapshot::note(&self.engine.mm.lock().table, first, n.min(COPY_GROUP_PAGES));
        snapshot.look(&self.engine.devices);
        snapshot
    }

    /// Brings in one page: what [`Handler::swap_in_range`] does, in the fewest steps for a page in
    /// compressed memory. One from the file may bring its neighbours there, `most` pages together.
    pub(crate) fn swap_in_page(&mut self, page: PageNo, most: usize) -> Result<(), Stop> {
        let engine = self.engine;
        let state = engine.mm.lock().table.get(page);
        let entry = match state {
            PageState::Swapped(entry) if entry.ty() == POOL => entry,
            PageState::Swapped(_)
                if most > 1
                    && self.reading(page.addr()) != Reading::Random
                    && self.locality.reads_around() =>
            {
                let (start, n) = self.around_in_file(page, most);
                self.make_room(n);
                if n == 1 || !self.has_room(n) {
                    return self.swap_in_range(page, 1);
                }
                // What keeps a neighbour away is no reason for the page not to come.
                match self.swap_in_range(start, n) {
                    Err(Stop::Stale) => return self.swap_in_range(page, 1),
                    Err(stop) if start == page => return Err(stop),
                    Err(_) => return self.swap_in_range(page, 1),
                    Ok(()) => {}
                }
                self.count_ahead(n - 1);
                let mut came = SwappedIn::new(start);
                came.add(start, n);
                came.blocks(|order, n| engine.count_order(OfOrder::Swpin, order, n));
                return Ok(());
            }
            _ => return self.swap_in_range(page, 1),
        };
        let (loaded, zero) = match engine.devices.pool_slots.lookup(entry.offset()) {
            TableSlot::Shadow { zero: true, .. } => (true, true),
            TableSlot::Shadow { .. } => {
                // SAFETY: the buffer is the handler's own.
                let out = unsafe { &mut *self.copy.as_ptr().cast::<Page>() };
                (self.load_pool(&[entry], std::slice::from_mut(out)) == 1, false)
            }
            _ => (false, false),
        };
        let mut guard = engine.mm.lock();
        let mm = &mut *guard;
        if !loaded || mm.table.get(page) != PageState::Swapped(entry) {
            drop(guard);
            return self.swap_in_range(page, 1);
        }
        let from = if zero { self.zeros.as_ptr() } else { self.copy.as_ptr() };
        let from = VirtAddr(from as usize);
        match self.fill_on_record(page, from, 1, |handler| handler.copy_in(page, from.as_ptr(), 1))
        {
            Err(Stop::Exists) => return self.resolve_mapped_twice(mm, page, entry).map(drop),
            Err(stop) => return Err(stop),
            Ok(_) => {}
        }
        self.finish_swap_in(mm, page, entry);
        self.report_load_cost(mm);
        mm.split.fault(1);
        engine.charge.brought(1);
        engine.publish_usage(mm);
        drop(guard);
        engine.count(if zero { Counter::SwpinZero } else { Counter::Zswpin }, 1);
        Ok(())
    }

    /// The neighbours of a page that lie in the file as it does, in the aligned `most` pages around
    /// it or its chunk: the first, and how many.
    fn around_in_file(&self, page: PageNo, most: usize) -> (PageNo, usize) {
        let mm = self.engine.mm.lock();
        let there = |page: usize| match mm.table.get(PageNo(page)) {
            PageState::Swapped(entry) => entry.ty() != POOL,
            _ => false,
        };
        let block = 1 << most.min(PAGES_PER_CHUNK).ilog2();
        let first = page.0 / block * block;
        let start = (first..page.0).rev().take_while(|p| there(*p)).last().unwrap_or(page.0);
        let end =
            (page.0 + 1..first + block).take_while(|p| there(*p)).last().unwrap_or(page.0) + 1;
        (PageNo(start), end - start)
    }

    /// Brings in what is swapped of `n` pages (at most [`COPY_GROUP_PAGES`]) from `start` on;
    /// `page`, if it lies there, must be among it. What came is noted in `came`.
    pub(crate) fn swap_in_span(
        &mut self,
        start: PageNo,
        n: usize,
        page: PageNo,
        came: &mut SwappedIn,
    ) -> Result<(), Stop> {
        let mut mask = 0u64;
        {
            let mm = self.engine.mm.lock();
            for chunk in start.chunk().0..=start.plus(n - 1).chunk().0 {
                let swapped = u64::from(mm.table.chunk(ChunkNo(chunk)).swapped);
                let first = chunk * PAGES_PER_CHUNK;
                mask |= if first >= start.0 {
                    swapped << (first - start.0)
                } else {
                    swapped >> (start.0 - first)
                };
            }
        }
        if n < 64 {
            mask &= (1 << n) - 1;
        }
        if let Some(out) = self.leaves_out.filter(|out| (start.0..start.0 + n).contains(&out.0)) {
            let bit = 1 << (out.0 - start.0);
            if mask & bit != 0 {
                mask &= !bit;
                self.locality.left_out(out);
            }
        }
        while mask != 0 {
            let first = mask.trailing_zeros() as usize;
            let len = (mask >> first).trailing_ones() as usize;
            mask &= if first + len == 64 { 0 } else { u64::MAX << (first + len) };
            let run = start.plus(first);
            let asked = run <= page && page < run.plus(len);
            match self.swap_in_range(run, len) {
                Ok(()) if self.remote.is_empty() => came.add(run, len),
                Ok(()) => (0..len)
                    .map(|k| run.plus(k))
                    .filter(|page| !self.remote.has(*page))
                    .for_each(|page| came.add(page, 1)),
                Err(Stop::Stale) if asked => {
                    // The range changed under the load: what was loaded is dropped, and the page
                    // comes alone.
                    self.swap_in_range(page, 1)?;
                    came.add(page, 1);
                }
                Err(stop) if asked => return Err(stop),
                Err(_) => {}
            }
        }
        self.submit();
        Ok(())
    }

    /// Brings in `n` neighbouring swapped pages. [`Stop::Stale`] only where there are several: one
    /// is tried again.
    pub(crate) fn swap_in_range(&mut self, page: PageNo, n: usize) -> Result<(), Stop> {
        let engine = self.engine;
        let mut at = 0;
        let mut stale = 0;
        let mut waits = false;
        while at < n {
            let mut snapshot = self.snapshot(page.plus(at), n - at);
            if waits || !self.may_send() {
                snapshot.wait_for_remote();
            }
            match snapshot.place(0) {
                PageLocation::Absent => at += 1,
                PageLocation::Far => match self.send_for(&snapshot, snapshot.any_remote()) {
                    // It changed, or nobody reads.
                    Err(Stop::Stale) => waits = true,
                    sent => at += sent?,
                },
                PageLocation::Cached => at += self.swap_in_cached(page.plus(at))?,
                PageLocation::Pool | PageLocation::File | PageLocation::Zero => {
                    let filled = self.swap_in_stored(&snapshot);
                    engine.publish_usage(&engine.mm.lock());
                    match filled {
                        Err(Stop::Stale) if n == 1 && stale < MAX_STALE_SNAPSHOTS => stale += 1,
                        Err(Stop::Stale) if n == 1 => return Err(Stop::Again),
                        filled => at += filled?,
                    }
                }
                // Its slot was freed between the two looks: write-back has just moved it.
                PageLocation::Changed if stale < MAX_STALE_SNAPSHOTS => stale += 1,
                PageLocation::Changed => {
                    let mm = engine.mm.lock();
                    let PageState::Swapped(entry) = mm.table.get(page.plus(at)) else { continue };
                    if let slot @ (TableSlot::Free | TableSlot::Bad) =
                        engine.devices.slots(entry.ty()).lookup(entry.offset())
                    {
                        crate::fatal(&format!(
                            "page {:?} is swapped to {entry:?} and that slot is {slot:?}",
                            page.plus(at).addr()
                        ))
                    }
                }
            }
        }
        Ok(())
    }

    /// Copies a page back that is in the swap cache, if it still is. Gives how many were.
    fn swap_in_cached(&mut self, page: PageNo) -> Result<usize, Stop> {
        let engine = self.engine;
        let mut guard = engine.mm.lock();
        let mm = &mut *guard;
        let PageState::Swapped(entry) = mm.table.get(page) else { return Ok(0) };
        let TableSlot::Folio(folio) = engine.devices.slots(entry.ty()).lookup(entry.offset())
        else {
            return Ok(0);
        };
        let frame = mm.frame_of(entry, folio);
        let from = mm.staging.addr(frame);
        // The frame is full and stays so while the memory lock is held.
        let filled =
            self.fill_on_record(page, from, 1, |handler| handler.copy_in(page, from.as_ptr(), 1));
        let filled = match filled {
            Err(Stop::Exists) => {
                let dropped = self.resolve_mapped_twice(mm, page, entry);
                engine.publish_usage(mm);
                return dropped;
            }
            Err(stop) => return Err(stop),
            Ok(filled) => filled,
        };
        engine.count(Counter::SwapCacheHit, 1);
        self.finish_swap_in(mm, page, entry);
        engine.publish_usage(mm);
        Ok(filled)
    }

    /// A swapped page is in the program: its heat is set, its slot released.
    pub(crate) fn finish_swap_in(&mut self, mm: &mut Mm, page: PageNo, entry: SwapEntry) {
        let engine = self.engine;
        let distance = mm.refault_distance(&engine.devices, entry);
        // Where there is room, what comes back soon was sent out by the program itself.
        if self.squeeze.came_back(distance) && engine.charge.room() < engine.charge.goal() {
            engine.charge.grant_grace();
        }
        let Some(distance) = distance else {
            // Wanted again before it was even stored: it gets a second chance.
            mm.table.update(page.chunk(), |c| c.hot = 1);
            mm.mark_present(page);
            engine.release(mm, entry);
            return;
        };
        engine.count(Counter::WorkingsetRefault, 1);
        mm.split.refault(distance, entry.ty() != POOL);
        if (distance as usize) < mm.table.present() / 2 {
            mm.table.update(page.chunk(), |c| c.hot = 1);
            engine.count(Counter::WorkingsetActivate, 1);
        }
        let kept = mm.table.clean_copies();
        let keeps = match entry.ty() {
            POOL => engine.charge.keeps_copies(kept, mm.table.swapped() + kept),
            // What compressed memory refuses goes to the file however soon it comes back.
            _ => {
                let late = mm.split.belongs_to_file(distance) && !engine.charge.may_compact_old();
                (late || engine.charge.pool_refuses()) && engine.devices.file_is_roomy()
            }
        };
        if keeps {
            mm.mark_clean(page, entry);
        } else {
            mm.mark_present(page);
            engine.release(mm, entry);
        }
    }

    /// Brings in the pages at the front of a snapshot that are on the devices: what is in
    /// compressed memory is loaded, what is in the file is read in one go. Gives how many, at least
    /// 1.
    ///
    /// The memory lock is not held while they are loaded: the words of swapped pages are the
    /// handler's alone but for write-back, which gives them entries of the file. So a word that is
    /// found again stands for what was loaded.
    fn swap_in_stored(&mut self, snapshot: &Snapshot) -> Result<usize, Stop> {
        let engine = self.engine;
        let page = snapshot.first();
        let mut len = snapshot.stored();
        let run = if len >= MOVE_FROM {
            let mut mm = engine.mm.lock();
            if mm.staging.ready_frames() >= len { mm.staging.take_run(len) } else { None }
        } else {
            None
        };
        let from = match run {
            Some(run) => {
                len = len.min(run.len);
                engine.mm.lock().staging.run_addr(run)
            }
            None => VirtAddr(self.copy.as_ptr() as usize),
        };
        // SAFETY: the frames of the run are full, free and taken by nobody else; the copy buffer is
        // the handler's own and as long.
        let buffer = unsafe { std::slice::from_raw_parts_mut(from.as_ptr::<Page>(), len) };
        let loaded = self.load(snapshot, buffer);
        let injected = len > 1 && self.inject_stale();
        let mut guard = engine.mm.lock();
        let mm = &mut *guard;
        let same = if injected { 0 } else { snapshot.still_valid(&mm.table, len) };
        if same < len || loaded == 0 {
            if let Some(run) = run {
                mm.staging.run_used(run, 0);
            }
            if same < len {
                // Write-back moved a page to the file, or an event took it.
                engine.count(Counter::SwpinStale, 1);
                self.refused(len.ilog2() as u8);
                return Err(Stop::Stale);
            }
            return self.poison(mm, page, snapshot.entries()[0]);
        }
        let filled = self.install(mm, page, from, loaded, run);
        let filled = match filled {
            Err(Stop::Exists) => return self.resolve_mapped_twice(mm, page, snapshot.entries()[0]),
            filled => filled?,
        };
        self.report_load_cost(mm);
        // Those that were held have been counted when they were read.
        let held = std::mem::take(&mut self.held_hits);
        let (mut pool, mut file) = (0, 0);
        for k in 0..filled {
            match snapshot.place(k) {
                PageLocation::Pool => pool += 1,
                PageLocation::File => file += 1,
                _ => {}
            }
            self.finish_swap_in(mm, page.plus(k), snapshot.entries()[k]);
        }
        self.held_came += held.min(file);
        engine.count(Counter::Zswpin, pool);
        engine.count(Counter::Pswpin, file - held.min(file));
        engine.count(Counter::SwpinZero, filled - pool - file);
        Ok(filled)
    }

    /// True when a test wants this load to be out of date.
    pub(crate) fn inject_stale(&mut self) -> bool {
        self.large_loads = self.large_loads.wrapping_add(1);
        self.stale_every != 0 && self.large_loads.is_multiple_of(self.stale_every)
    }

    /// Puts loaded pages in their place: moves them there when they lie in staging frames, else
    /// copies them.
    pub(crate) fn install(
        &mut self,
        mm: &mut Mm,
        page: PageNo,
        from: VirtAddr,
        len: usize,
        run: Option<FrameRun>,
    ) -> Result<usize, Stop> {
        self.fill_on_record(page, from, len, |handler| handler.fill(mm, page, from, len, run))
    }

    /// [`Handler::install`] without a record of it.
    fn fill(
        &mut self,
        mm: &mut Mm,
        page: PageNo,
        from: VirtAddr,
        len: usize,
        run: Option<FrameRun>,
    ) -> Result<usize, Stop> {
        let mut len = len;
        if len > 1 && self.part_every != 0 {
            self.large_fills = self.large_fills.wrapping_add(1);
            // As if an event were unread by then.
            len /= 1 + usize::from(self.large_fills.is_multiple_of(self.part_every));
        }
        if let Some(run) = run {
            let progress = self.move_in(mm, page, from, len);
            if progress.done > 0 || !matches!(progress.error, Some(Errno::INVAL | Errno::NOENT)) {
                mm.staging.run_used(run, progress.done / PAGE_SIZE);
                return finish_fill(progress);
            }
        }
        // A read-only mapping takes copies, not moves, and a fill must not reach into another
        // mapping.
        let filled = loop {
            // The pages are the handler's own, in frames or in its buffer.
            match self.copy_in(page, from.as_ptr(), len) {
                Err(Stop::Gone) if len > 1 => len = self.in_mapping(page, len),
                filled => break filled,
            }
        };
        if let Some(run) = run {
            mm.staging.run_used(run, 0);
        }
        filled
    }

    /// How many of `len` pages from `page` on (more than 1) lie in its mapping; fewer than `len`.
    fn in_mapping(&mut self, page: PageNo, len: usize) -> usize {
        match self.maps.vma_at(page.addr()) {
            Ok(Some(info)) => {
                ((info.vma().range.end.0 - page.addr().0) / PAGE_SIZE).clamp(1, len - 1)
            }
            _ => 1,
        }
    }

    /// A page's data is lost: a touch of it is a bus error from now on, never wrong data.
    pub(crate) fn poison(
        &mut self,
        mm: &mut Mm,
        page: PageNo,
        entry: SwapEntry,
    ) -> Result<usize, Stop> {
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

/// Frames of a run that were moved in are gone, the rest is given back.
fn finish_run(mm: &mut Mm, run: FrameRun, progress: Progress) -> Result<usize, Stop> {
    mm.staging.run_used(run, progress.done / PAGE_SIZE);
    finish_fill(progress)
}

/// Pages filled, or why none was.
pub(crate) fn finish_fill(progress: Progress) -> Result<usize, Stop> {
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
