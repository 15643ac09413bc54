//! Bringing swapped pages in: the page asked for, an aligned range around it, or a window from it
//! on.
//!
//! [`crate::readahead::locality`] foretells, [`crate::backing::snapshot`] says where the pages are,
//! [`crate::readahead::policy`] decides; [`crate::fault::load`] gets the data and
//! [`crate::fault::install`] puts it in place. A folio still in the swap cache is copied back from
//! its frame.
//!
//! Rules
//! 1. A slot is released only after its page is in the program. A page whose data is damaged is
//!    poisoned.
//! 2. Of a window the first chunk is brought in, its thread is woken, and the rest is read then:
//!    readahead is not waited for, and ends where there is no room.
//! 3. Of a window a page may be left out, to see whether it is wanted
//!    (`crate::readahead::sampling`).
//! 4. Pages are loaded without the memory lock, by a snapshot, and under a folio of this thread in
//!    the swap cache ([`crate::fault::loading`]). What another thread brings in is left to it. A
//!    range that is another one after the load is dropped whole, counted (`swpin_stale`,
//!    `swpin_fallback`), and the page asked for comes alone.
//!
//! Locks: the memory lock, for a check or a fill, and the gate before it
//! ([`crate::fault::placing`]); that of [`crate::readahead::Readahead`].

use swaptide_core::{SlotContent as TableSlot, SwapEntry};
use swaptide_ipc::{Counter, OfOrder};
use swaptide_store::Page;
use swaptide_sys::lock::Guard;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};

use crate::backing::devices::{POOL, filler_of};
use crate::backing::snapshot::{self, PageLocation, Snapshot};
use crate::engine::Mm;
use crate::fault::direct_reclaim::has_room;
use crate::fault::install::{LoadedPages, MIN_MOVE_PAGES, Stop};
use crate::fault::load::readahead_limits;
use crate::fault::loading::{NotBegun, other_filler};
use crate::fault::path::{COPY_BYTES, FaultPath};
use crate::memcg::pool_sizing::{FAULT_NS, POOL_NS};
use crate::mm::page_table::PageState;
use crate::mm::types::{ChunkNo, PAGES_PER_CHUNK, PageNo, pages_of, range_of};
use crate::readahead::locality::{Reading, SwapIn};
use crate::readahead::policy::{Costs, SwapInPlan, SwapInRequest, SwappedIn, admit};

/// Pages that are brought in at a time: moves of this size cost little for each page.
pub(crate) const COPY_GROUP_PAGES: usize = 64;
const _: () = assert!(
    COPY_GROUP_PAGES * PAGE_SIZE <= COPY_BYTES && COPY_GROUP_PAGES <= snapshot::MAX_SNAPSHOT_PAGES
);
/// Out-of-date snapshots of a single page in a row before other messages get their turn.
const MAX_STALE_SNAPSHOTS: u32 = 8;

/// The source of a page that was put in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// A staging frame: it was on its way out.
    Frame,
    /// A server: its slot holds a shadow.
    Server {
        /// A thread waits for it.
        is_asked: bool,
    },
    /// A device, as this page of the thread's load.
    Load(usize),
}

impl FaultPath {
    /// Brings back what a fault asks for and what it foretells.
    pub(super) fn swap_in(
        &mut self,
        page: PageNo,
        entry: SwapEntry,
        region: VirtRange,
    ) -> Result<(), Stop> {
        let engine = self.engine;
        // First: a fault that is put off has asked nothing of what others foretell.
        self.make_room(1)?;
        if self.reader.fork.notes_events() {
            return self.swap_in_page(page, 1);
        }
        let is_remote = entry.ty() != POOL && engine.devices.areas.is_remote(entry);
        if is_remote && self.reader.is_server {
            // The handler sends for it, and asks what it foretells.
            return Err(Stop::Again);
        }
        let window = match self.remote.is_usual() || is_remote {
            true => engine.charge.remote_window_pages(),
            false => engine.charge.window_pages(),
        };
        let most = readahead_limits(engine).most(window, engine.devices.is_backed());
        self.loader.held_came = 0;
        let (evidence, density_x16) = self.foretell(page, region, most);
        engine.devices.prefetch_data(entry);
        let request = SwapInRequest {
            page,
            region: &pages_of(region),
            evidence,
            density_x16: density_x16.into(),
            most,
            costs: Costs { fault: FAULT_NS, pool: POOL_NS, area: self.loader.read_ns },
        };
        let plan = admit(
            &request,
            |chunk| self.snapshot(chunk.first(), PAGES_PER_CHUNK),
            |order| self.refused(order),
        );
        let mut swapped_in = SwappedIn::new(page);
        match plan {
            SwapInPlan::Page => {
                self.swap_in_page(page, most)?;
                self.follow_history(page, most);
                return Ok(());
            }
            SwapInPlan::Around { first, order } => {
                if self.make_room(1 << order).is_err() || !has_room(engine, 1 << order) {
                    self.refused(order);
                    return self.swap_in_range(page, 1);
                }
                self.swap_in_span(first, 1 << order, page, &mut swapped_in)?;
            }
            SwapInPlan::Onward(pages) => {
                let first = pages.min(PAGES_PER_CHUNK);
                if self.make_room(first).is_err() || !has_room(engine, first) {
                    self.refused(first.ilog2() as u8);
                    return self.swap_in_range(page, 1);
                }
                self.leaves_out = engine.serving.readahead.lock().locality.leave_out(page, pages);
                let brought = self.swap_in_span(page, first, page, &mut swapped_in);
                if brought.is_err() {
                    self.leaves_out = None;
                }
                brought?;
                // The thread continues while its window is filled; a fault it meets there waits for
                // the rest.
                if pages > first && !self.remote.has(page) {
                    let _ = self.reader.uffd.wake(range_of(page, 1));
                }
                let mut at = first;
                while at < pages {
                    let n = (pages - at).min(COPY_GROUP_PAGES);
                    if self.make_room(n).is_err() || !has_room(engine, n) {
                        self.refused(n.ilog2() as u8);
                        break;
                    }
                    if self.swap_in_span(page.plus(at), n, page, &mut swapped_in).is_err() {
                        break;
                    }
                    at += n;
                }
                self.leaves_out = None;
            }
        }
        swapped_in.blocks(|order, n| engine.count_order(OfOrder::Swpin, order, n));
        // What was sent for comes too, a little later.
        let sent = self.remote.asks(Some(page));
        engine.serving.readahead.lock().locality.record_swapped_in(swapped_in.pages() + sent);
        if self.remote.has(page) {
            self.count_ahead(swapped_in.pages());
            return Ok(());
        }
        self.count_ahead(swapped_in.pages().saturating_sub(1));
        engine.mm.lock().pool_sizer.fault(swapped_in.pages());
        engine.charge.brought(swapped_in.pages());
        Ok(())
    }

    /// Returns the prediction from earlier faults, at most `most` pages, and how dense what was
    /// brought in was used.
    fn foretell(&self, page: PageNo, region: VirtRange, most: usize) -> (SwapIn, u32) {
        let engine = self.engine;
        let mut guard = engine.serving.readahead.lock();
        let readahead = &mut *guard;
        readahead.prefetcher.prefetch_entry(page);
        let reading = readahead.hints.reading(page.addr());
        let locality = &mut readahead.locality;
        let evidence = locality.swap_in(PageNo::of(region.start), page, reading, most);
        engine.count(Counter::SwapRaHit, locality.take_hits());
        (evidence, locality.density_x16())
    }

    /// Counts pages that came unasked since the last call, but for those that a rotational disk had
    /// brought before: they were counted then.
    fn count_ahead(&mut self, pages: usize) {
        let held = std::mem::take(&mut self.loader.held_came);
        self.engine.count(Counter::SwapRa, pages.saturating_sub(held));
    }

    /// A range of that order was asked for and is not brought in whole.
    fn refused(&self, order: u8) {
        self.engine.count_order(OfOrder::SwpinFallback, order, 1);
    }

    /// Returns the backing of `n` pages (at most [`COPY_GROUP_PAGES`]) from `first` on.
    fn snapshot(&self, first: PageNo, n: usize) -> Snapshot {
        let mut snapshot =
            Snapshot::note(&self.engine.mm.lock().table, first, n.min(COPY_GROUP_PAGES));
        snapshot.look(&self.engine.devices);
        snapshot
    }

    /// Brings in one page: what [`FaultPath::swap_in_range`] does, in the fewest steps for a page
    /// in compressed memory. One from a swap area may bring its neighbours there, `most` pages
    /// together.
    fn swap_in_page(&mut self, page: PageNo, most: usize) -> Result<(), Stop> {
        let engine = self.engine;
        let (state, is_begun) = {
            let mut mm = engine.mm.lock();
            let state = mm.table.get(page);
            let is_begun = match state {
                PageState::Swapped(entry) if entry.ty() == POOL => {
                    self.begin_load(&mut mm, page, &[entry]).is_ok()
                }
                _ => false,
            };
            (state, is_begun)
        };
        match state {
            PageState::Swapped(entry) if is_begun => self.swap_in_pooled(page, entry),
            PageState::Swapped(entry)
                if entry.ty() != POOL && most > 1 && self.reads_around(page) =>
            {
                self.swap_in_with_neighbours(page, most)
            }
            _ => self.swap_in_range(page, 1),
        }
    }

    /// Brings in the page of a load of one page, which is in compressed memory.
    fn swap_in_pooled(&mut self, page: PageNo, entry: SwapEntry) -> Result<(), Stop> {
        let engine = self.engine;
        let is_zero = self.loading.is_zero(0);
        let is_loaded = is_zero || {
            // SAFETY: the buffer is the thread's own.
            let out = unsafe { &mut *self.copy.as_ptr().cast::<Page>() };
            self.loader.load_pool(&[entry], std::slice::from_mut(out)) == 1
        };
        let placing = self.begin_placing();
        let mut guard = engine.mm.lock();
        if !is_loaded || self.loading.unchanged(&guard.table) == 0 {
            self.end_load(guard);
            drop(placing);
            return self.swap_in_range(page, 1);
        }
        let from = if is_zero {
            self.installer.zero_page()
        } else {
            VirtAddr(self.copy.as_ptr() as usize)
        };
        let mut result = self.installer.may_fill(&guard).map(|()| 0);
        if result.is_ok() {
            let (installer, record) = (&self.installer, self.reader.record());
            (guard, result) = placing.put(guard, || installer.copy_page(record, page, from));
        }
        let mm = &mut *guard;
        match result {
            Ok(_) => {
                self.finish_swap_in(mm, page, entry, Origin::Load(0));
                self.loader.report_load_cost(mm);
                mm.pool_sizer.fault(1);
                engine.charge.brought(1);
                engine.count(if is_zero { Counter::SwpinZero } else { Counter::Zswpin }, 1);
            }
            Err(Stop::Exists) => {
                result = self.installer.resolve_mapped_twice(mm, page, entry);
            }
            Err(_) => {}
        }
        self.end_load(guard);
        result.map(drop)
    }

    /// Brings in a page that is on a swap area, with its neighbours there.
    fn swap_in_with_neighbours(&mut self, page: PageNo, most: usize) -> Result<(), Stop> {
        let engine = self.engine;
        let (start, n) = self.around_on_area(page, most);
        if n == 1 || self.make_room(n).is_err() || !has_room(engine, n) {
            return self.swap_in_range(page, 1);
        }
        // What keeps a neighbour away is no reason for the page not to come.
        match self.swap_in_range(start, n) {
            Err(Stop::Stale | Stop::Unreadable) => return self.swap_in_range(page, 1),
            Err(stop) if start == page => return Err(stop),
            Err(_) => return self.swap_in_range(page, 1),
            Ok(()) => {}
        }
        self.count_ahead(n - 1);
        let mut swapped_in = SwappedIn::new(start);
        swapped_in.add(start, n);
        swapped_in.blocks(|order, n| engine.count_order(OfOrder::Swpin, order, n));
        Ok(())
    }

    /// Begins a load of the pages from `first` on that still have these entries.
    ///
    /// # Errors
    /// As for [`crate::fault::loading::Loading::begin`].
    fn begin_load(
        &mut self,
        mm: &mut Mm,
        first: PageNo,
        entries: &[SwapEntry],
    ) -> Result<usize, NotBegun> {
        if self.installer.may_fill(mm).is_err() {
            return Err(NotBegun::Refused);
        }
        let devices = &self.engine.devices;
        self.loading.begin(devices, &mm.table, &mut mm.busy, first, entries)
    }

    /// Ends a load, and gives the memory lock back. Threads wake that wait for pages of it, and
    /// whose faults others have left to this one.
    fn end_load(&mut self, mut guard: Guard<'static, Mm>) {
        let mm = &mut *guard;
        for page in self.loading.unreleased() {
            // Write-back may have passed it by, and its chunk stands in no queue then.
            if matches!(mm.table.get(page), PageState::Swapped(entry) if entry.ty() == POOL) {
                mm.queues.pooled(&mut mm.table, page.chunk());
            }
        }
        let waiting = self.loading.end(&self.engine.devices, &mut mm.busy);
        self.engine.publish_usage(mm);
        drop(guard);
        if let Some((first, n)) = waiting {
            let _ = self.reader.uffd.wake(range_of(first, n));
        }
    }

    /// True if the neighbours of a page on a swap area are worth bringing in with it.
    fn reads_around(&self, page: PageNo) -> bool {
        let readahead = self.engine.serving.readahead.lock();
        readahead.hints.reading(page.addr()) != Reading::Random && readahead.locality.reads_around()
    }

    /// The neighbours of a page that lie on a swap area as it does, in the aligned `most` pages
    /// around it or its chunk: the first, and how many.
    fn around_on_area(&self, page: PageNo, most: usize) -> (PageNo, usize) {
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
    /// `page`, if it lies there, must be among it. What came is noted in `swapped_in`.
    pub(crate) fn swap_in_span(
        &mut self,
        start: PageNo,
        n: usize,
        page: PageNo,
        swapped_in: &mut SwappedIn,
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
                self.engine.serving.readahead.lock().locality.left_out(out);
            }
        }
        while mask != 0 {
            let first = mask.trailing_zeros() as usize;
            let len = (mask >> first).trailing_ones() as usize;
            mask &= if first + len == 64 { 0 } else { u64::MAX << (first + len) };
            let run = start.plus(first);
            let asked = run <= page && page < run.plus(len);
            match self.swap_in_range(run, len) {
                Ok(()) if self.remote.is_empty() => swapped_in.add(run, len),
                Ok(()) => (0..len)
                    .map(|k| run.plus(k))
                    .filter(|page| !self.remote.has(*page))
                    .for_each(|page| swapped_in.add(page, 1)),
                // It took its time, as the next ones would, and no thread waits for any of them.
                Err(Stop::Unreadable) if self.installer.asked.is_none() => {
                    self.remote.submit(self.engine);
                    return Err(Stop::Unreadable);
                }
                Err(Stop::Stale | Stop::Unreadable) if asked => {
                    // The range changed under the load, or a page before it cannot be read: what
                    // was loaded is dropped, and the page comes alone.
                    self.swap_in_range(page, 1)?;
                    swapped_in.add(page, 1);
                }
                Err(stop) if asked => return Err(stop),
                Err(_) => {}
            }
        }
        self.remote.submit(self.engine);
        Ok(())
    }

    /// Brings in `n` neighbouring swapped pages. [`Stop::Stale`] only where there are several: one
    /// is tried again. [`Stop::Unreadable`] only where one of them was not asked for: one that was
    /// is poisoned.
    pub(crate) fn swap_in_range(&mut self, page: PageNo, n: usize) -> Result<(), Stop> {
        let engine = self.engine;
        let mut at = 0;
        let mut stale = 0;
        let mut waits = false;
        while at < n {
            let mut snapshot = self.snapshot(page.plus(at), n - at);
            let may_send = self.remote.may_send(engine) || self.reader.is_server;
            if waits || self.reader.fork.is_busy() || !may_send {
                snapshot.wait_for_remote();
            }
            match snapshot.place(0) {
                PageLocation::Absent => at += 1,
                // The handler sends for it.
                PageLocation::Remote if self.reader.is_server => return Err(Stop::Again),
                PageLocation::Remote => match self.remote.send_for(
                    engine,
                    &self.reader.cpu,
                    &snapshot,
                    snapshot.any_remote(),
                ) {
                    // It changed, or no thread reads.
                    Err(Stop::Stale) => waits = true,
                    sent => at += sent?,
                },
                PageLocation::Cached => at += self.swap_in_cached(page.plus(at))?,
                PageLocation::Loading if self.installer.asked == Some(page.plus(at)) => {
                    self.leave_to_loader(page.plus(at), snapshot.entries()[0])?;
                }
                PageLocation::Loading => at += 1,
                PageLocation::Pool | PageLocation::Area | PageLocation::Zero => {
                    match self.swap_in_stored(&snapshot) {
                        Err(Stop::Stale) if n == 1 && stale < MAX_STALE_SNAPSHOTS => stale += 1,
                        Err(Stop::Stale) if n == 1 => return Err(Stop::Again),
                        Err(Stop::Taken) if self.installer.asked != Some(page.plus(at)) => at += 1,
                        filled => at += filled?,
                    }
                }
                // Its slot was freed between the two checks: write-back has just moved it.
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

    /// Another thread brings the page in that was asked for: its fault is left to that one, if it
    /// is still so.
    ///
    /// # Errors
    /// [`Stop::Taken`] then; [`Stop::Again`] where the page was moved since its load began, so that
    /// it would not be woken here.
    fn leave_to_loader(&self, page: PageNo, entry: SwapEntry) -> Result<(), Stop> {
        let engine = self.engine;
        let mut mm = engine.mm.lock();
        match other_filler(&engine.devices, entry) {
            Some(other) if mm.table.get(page) == PageState::Swapped(entry) => {
                engine.count(Counter::SwpinExists, 1);
                if mm.busy.want(other, page) { Err(Stop::Taken) } else { Err(Stop::Again) }
            }
            _ => Ok(()),
        }
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
        if filler_of(folio).is_some() {
            return Ok(0);
        }
        let frame = mm.frame_of(entry, folio);
        let from = mm.staging.addr(frame);
        self.installer.may_fill(mm)?;
        // The frame is full and stays so while the memory lock is held.
        let filled = self.installer.copy_page(self.reader.record(), page, from);
        let filled = match filled {
            Err(Stop::Exists) => {
                let dropped = self.installer.resolve_mapped_twice(mm, page, entry);
                engine.publish_usage(mm);
                return dropped;
            }
            Err(stop) => return Err(stop),
            Ok(filled) => filled,
        };
        engine.count(Counter::SwapCacheHit, 1);
        self.finish_swap_in(mm, page, entry, Origin::Frame);
        engine.publish_usage(mm);
        Ok(filled)
    }

    /// A swapped page is in the program: its heat is set, its slot released.
    pub(crate) fn finish_swap_in(
        &mut self,
        mm: &mut Mm,
        page: PageNo,
        entry: SwapEntry,
        origin: Origin,
    ) {
        let engine = self.engine;
        let is_asked = match origin {
            Origin::Server { is_asked } => is_asked,
            Origin::Frame | Origin::Load(_) => self.installer.asked == Some(page),
        };
        let distance = match origin {
            Origin::Frame => None,
            Origin::Server { .. } => mm.refault_distance(&engine.devices, entry),
            Origin::Load(k) => Some(mm.age(self.loading.shadow(k))),
        };
        // Where there is room, what comes back soon was sent out by the program itself.
        if mm.thrash.came_back(distance) && engine.charge.room() < engine.charge.goal() {
            engine.charge.grant_grace();
        }
        let Some(distance) = distance else {
            // Wanted again before it was even stored: it gets a second chance.
            mm.came_back(page, 0, is_asked);
            mm.table.update(page.chunk(), |chunk| chunk.heat.second_chance(page.bit()));
            mm.mark_present(page);
            engine.release(mm, entry);
            return;
        };
        engine.count(Counter::WorkingsetRefault, 1);
        engine.slot().refaults.record(mm.table.present() as u64 + distance);
        mm.pool_sizer.refault(distance, entry.ty() != POOL);
        if mm.came_back(page, distance, is_asked) {
            engine.count(Counter::WorkingsetActivate, 1);
        }
        let kept = mm.table.clean_copies();
        let keeps = match entry.ty() {
            POOL => engine.charge.keeps_copies(kept, mm.table.swapped() + kept),
            // What compressed memory refuses goes to a swap area however soon it comes back.
            _ => {
                let late =
                    mm.pool_sizer.belongs_on_areas(distance) && !engine.charge.may_compact_old();
                (late || engine.charge.pool_refuses()) && engine.devices.area_is_roomy()
            }
        };
        if keeps {
            mm.mark_clean(page, entry);
            return;
        }
        mm.mark_present(page);
        match origin {
            Origin::Load(k) => self.loading.release(k),
            Origin::Frame | Origin::Server { .. } => engine.release(mm, entry),
        }
    }

    /// Brings in the pages at the front of a snapshot that are on the devices: what is in
    /// compressed memory is loaded, what is on a swap area is read in one go. Gives how many, at
    /// least 1.
    fn swap_in_stored(&mut self, snapshot: &Snapshot) -> Result<usize, Stop> {
        let engine = self.engine;
        let page = snapshot.first();
        let loaded = {
            let mut guard = engine.mm.lock();
            let mm = &mut *guard;
            let entries = &snapshot.entries()[..snapshot.stored()];
            let len = match self.begin_load(mm, page, entries) {
                Ok(len) => len,
                Err(NotBegun::Stale) => {
                    self.count_stale(entries.len());
                    return Err(Stop::Stale);
                }
                Err(NotBegun::Refused) => return Err(Stop::Again),
                Err(NotBegun::Exists(other)) => {
                    engine.count(Counter::SwpinExists, 1);
                    if self.installer.asked == Some(page) && !mm.busy.want(other, page) {
                        return Err(Stop::Again);
                    }
                    return Err(Stop::Taken);
                }
            };
            // A slot that was freed and given out again since the snapshot may be another one.
            let seen = self.loading.as_seen(|k| snapshot.place(k) == PageLocation::Zero);
            if seen == 0 {
                self.end_load(guard);
                self.count_stale(entries.len());
                return Err(Stop::Stale);
            }
            self.loading.shorten(&engine.devices, &mut mm.busy, seen);
            let len = len.min(seen);
            let run = match len {
                MIN_MOVE_PAGES.. if mm.staging.ready_frames() >= len => mm.staging.take_run(len),
                _ => None,
            };
            match run {
                Some(run) => {
                    self.loading.shorten(&engine.devices, &mut mm.busy, run.len);
                    let from = mm.staging.run_addr(run);
                    LoadedPages { from, run: Some(run), len: len.min(run.len) }
                }
                None => LoadedPages { from: VirtAddr(self.copy.as_ptr() as usize), run: None, len },
            }
        };
        // SAFETY: the frames of the run are full, free and not taken elsewhere; the copy buffer is
        // the thread's own and as long.
        let buffer =
            unsafe { std::slice::from_raw_parts_mut(loaded.from.as_ptr::<Page>(), loaded.len) };
        self.loader.is_hint = !self.installer.gives_up(page);
        let n = self.loader.load(&self.reader.cpu, snapshot, buffer);
        let is_short = self.loader.was_short();
        let injected = loaded.len > 1 && self.tests.is_stale();
        let placing = self.begin_placing();
        let mut guard = engine.mm.lock();
        let same = if injected { 0 } else { self.loading.unchanged(&guard.table) };
        if same < loaded.len || n == 0 {
            if let Some(run) = loaded.run {
                guard.staging.run_used(run, 0);
            }
            let result = if same < loaded.len {
                // The program has changed it.
                self.count_stale(loaded.len);
                Err(Stop::Stale)
            } else if is_short {
                Err(Stop::Again)
            } else if self.installer.gives_up(page) {
                self.installer.poison(&mut guard, page, snapshot.entries()[0])
            } else {
                Err(Stop::Unreadable)
            };
            self.end_load(guard);
            return result;
        }
        let loaded = LoadedPages { len: n, ..loaded };
        let (record, tests) = (self.reader.record(), &mut self.tests);
        let (mut guard, filled) =
            self.installer.install(&placing, guard, record, tests, page, loaded);
        let mm = &mut *guard;
        let filled = match filled {
            Err(Stop::Exists) => {
                self.installer.resolve_mapped_twice(mm, page, snapshot.entries()[0])
            }
            Ok(filled) => {
                self.loader.report_load_cost(mm);
                self.finish_stored(mm, snapshot, filled);
                Ok(filled)
            }
            Err(stop) => Err(stop),
        };
        self.end_load(guard);
        filled
    }

    /// The first `filled` pages of a snapshot, which this thread has loaded, are in place.
    fn finish_stored(&mut self, mm: &mut Mm, snapshot: &Snapshot, filled: usize) {
        // Those that were held have been counted when they were read.
        let held = std::mem::take(&mut self.loader.held_hits);
        let (mut pool, mut area) = (0, 0);
        for k in 0..filled {
            match snapshot.place(k) {
                PageLocation::Pool => pool += 1,
                PageLocation::Area => area += 1,
                _ => {}
            }
            let (page, entry) = (snapshot.first().plus(k), snapshot.entries()[k]);
            self.finish_swap_in(mm, page, entry, Origin::Load(k));
        }
        self.loader.held_came += held.min(area);
        let engine = self.engine;
        engine.count(Counter::Zswpin, pool);
        engine.count(Counter::Pswpin, area - held.min(area));
        engine.count(Counter::SwpinZero, filled - pool - area);
    }

    /// A load of `n` pages is dropped.
    fn count_stale(&self, n: usize) {
        self.engine.count(Counter::SwpinStale, 1);
        self.refused(n.ilog2() as u8);
    }

    /// Brings in what came after a page that came without a stream the last time it was asked for,
    /// if the program repeats its accesses.
    fn follow_history(&mut self, page: PageNo, most: usize) {
        let engine = self.engine;
        if most < 2
            || self.remote.is_usual()
            || self.remote.has(page)
            || engine.serving.readahead.lock().hints.reading(page.addr()) == Reading::Random
        {
            return;
        }
        let is_out =
            |page: PageNo| matches!(engine.mm.lock().table.get(page), PageState::Swapped(_));
        let (replayed, turn) = {
            let prefetcher = &mut engine.serving.readahead.lock().prefetcher;
            prefetcher.learn(page, engine.charge.limit(), most, is_out);
            (prefetcher.take_replayed(), prefetcher.asked_of())
        };
        engine.count(Counter::SwapRaHit, replayed);
        self.loader.held_came = 0;
        let (mut swapped_in, mut is_first) = (0, true);
        let (mut brought, mut near) = (None, None);
        loop {
            let (next, coming) = {
                let prefetcher = &mut engine.serving.readahead.lock().prefetcher;
                if let Some(is_read) = brought.take() {
                    prefetcher.brought(is_read);
                }
                // Another thread's fault was asked about meanwhile: then this one ends.
                let next = (prefetcher.asked_of() == turn).then(|| prefetcher.ahead()).flatten();
                (next, prefetcher.coming())
            };
            let Some(next) = next else { break };
            if let Some(entry) = near.take() {
                engine.devices.prefetch_data(entry);
            }
            let is_out = {
                let mm = engine.mm.lock();
                near = FaultPath::prefetch_words(&mm, coming);
                matches!(mm.table.get(next), PageState::Swapped(_))
            };
            if let Some(entry) = near {
                engine.devices.prefetch_slot(entry);
            }
            if !is_out {
                continue;
            }
            if std::mem::take(&mut is_first) {
                self.installer.look_together(next);
            }
            // The page asked for is in: what cannot come now is no reason against it.
            if self.make_room(1).is_err() || !has_room(engine, 1) {
                break;
            }
            let held = self.loader.held_came;
            if self.swap_in_page(next, 1).is_err() {
                break;
            }
            brought = Some(self.loader.held_came == held);
            swapped_in += 1;
        }
        self.installer.end_looking_together();
        self.count_ahead(swapped_in);
    }

    /// Prefetches what leads to the words of two pages that come later, and looks at the word of
    /// one that was prefetched so: its entry, if it is swapped. So a page's table, slot and data
    /// are each prefetched while an earlier page is loaded.
    fn prefetch_words(mm: &Mm, [slot, word, leaf]: [Option<PageNo>; 3]) -> Option<SwapEntry> {
        leaf.inspect(|page| mm.table.prefetch_leaf(*page));
        word.inspect(|page| mm.table.prefetch_word(*page));
        match mm.table.get(slot?) {
            PageState::Swapped(entry) => Some(entry),
            _ => None,
        }
    }
}
