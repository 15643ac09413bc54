//! A batch: chunks on their way from the program to the devices.
//!
//! Owns: one slab of staging frames while pages are in it, and what is known of those pages.
//!
//! A batch has three parts: [`Batch::take`] (memory lock held: choose chunks, move their pages to
//! the frames of one slab, one after the other without gaps, give them slots in the swap cache),
//! [`Batch::store`] (no lock: compress from the frames; a touch now finds the folio in the swap
//! cache and copies the page back), [`Batch::finish`] (memory lock held: what was not cancelled
//! becomes a shadow; the frames are free). Taking and storing may be done by two threads:
//! between the two the batch stands in [`Jobs`](crate::mm::batch::Jobs).
//!
//! Invariants
//! 1. Between take and finish, the frames of the slab are read by the batch's holder alone, and
//!    no thread moves them.
//! 2. A page is moved out only while its word is `Present` and the memory lock is held, and only of
//!    a mapping that was seen to be armed in this batch ([`crate::reclaim::unarmed`]).
//! 3. A page that no device takes stays in compressed memory's raw form: it is never dropped.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use swaptide_core::{Expect, FolioId, SwapEntry};
use swaptide_ipc::{Counter, OfOrder};
use swaptide_store::codec::{Compressor, Packed, Unpacker};
use swaptide_store::{Page, Slot};
use swaptide_sys::Errno;
use swaptide_sys::page::{PAGE_SIZE, VirtRange};
use swaptide_sys::thread::now;
use swaptide_sys::uffd::MoveFlags;

use crate::backing::devices::{AREA, POOL, entry_plus};
use crate::engine::{Engine, Mm};
use crate::mm::batch::{
    BackingPage, Batch, MAX_MOVES_PER_BATCH, MoveRun, OutgoingFolio, Places, TakenChunk,
};
use crate::mm::heat::ChunkHeat;
use crate::mm::page_table::{PageState, UNMOVABLE};
use crate::mm::staging::{FrameNo, SlabNo};
use crate::mm::types::{CHUNKS_PER_LEAF, PAGES_PER_CHUNK, PageNo, folios, range_of};
use crate::reclaim::copies;
use crate::reclaim::unarmed::{self, Lookup, Seen};
use crate::sched::handler_cpu::YieldEvery;

/// Fewer pages than this in a move, on average, make a batch a scattered one.
const DENSE_PAGES_PER_MOVE: usize = 8;
/// Chunks that are looked at for one batch.
const MAX_SCANNED_CHUNKS: usize = 4096;

impl BackingPage {
    /// A page that is to go to a swap area. Packed bytes are added to `bytes`.
    fn new(
        frame: FrameNo,
        entry: SwapEntry,
        packed: &Packed<'_>,
        bytes: &mut Vec<u8>,
    ) -> BackingPage {
        let packed = match packed {
            Packed::Bytes(packed) => {
                let start = bytes.len();
                bytes.extend_from_slice(packed);
                Some(start..bytes.len())
            }
            _ => None,
        };
        BackingPage { frame, entry, packed, area_entry: None }
    }

    /// The page as it is stored.
    ///
    /// # Safety
    /// The frame is full and nothing writes to it.
    unsafe fn packed<'b>(&self, engine: &'b Engine, bytes: &'b [u8]) -> Packed<'b> {
        match &self.packed {
            Some(range) => Packed::Bytes(&bytes[range.clone()]),
            // SAFETY: the caller's.
            None => Packed::Raw(unsafe { &*engine.frame_addr(self.frame).as_ptr::<Page>() }),
        }
    }
}

/// Notes why a page stays, so that it is not tried again at once.
fn note_unmoved(engine: &Engine, mm: &mut Mm, page: PageNo, error: Errno) {
    match error {
        // Freed lazily, without an event: the program's next touch gets zeros.
        Errno::NOENT => forget_content(engine, mm, page),
        Errno::BUSY => {
            engine.count(Counter::PagesBusy, 1);
            // What was faulted for writing since the last fork is this process's own: it is in use
            // elsewhere (pinned for input or output, say).
            let is_own = mm.table.chunk(page.chunk()).own >> page.in_chunk() & 1 == 1;
            if !is_own {
                mm.table.share(page);
                mm.queues.shared(&mut mm.table, page.chunk());
            }
        }
        Errno::FAULT if mm.staging.is_guard(page) => {
            // A guard was installed past libc, and discarded the contents.
            engine.known.guarded.store(true, Relaxed);
            forget_content(engine, mm, page);
        }
        // Locked or protected memory.
        Errno::INVAL => mm.table.update(page.chunk(), |c| c.flags |= UNMOVABLE),
        _ => engine.count(Counter::PagesBusy, 1),
    }
}

/// The page has no content any more, and what is kept of it is not needed.
fn forget_content(engine: &Engine, mm: &mut Mm, page: PageNo) {
    if let PageState::PresentClean(entry) = mm.table.set(page, PageState::Empty) {
        engine.devices.drop_swapped(entry);
    }
}

/// A run that is refused because it crosses into another mapping goes chunk by chunk, and such a
/// chunk page by page: how many pages next.
fn within_mapping(page: PageNo, attempt: usize) -> usize {
    let in_chunk = PAGES_PER_CHUNK - page.in_chunk();
    if attempt > in_chunk { in_chunk } else { 1 }
}

impl Batch {
    /// Chooses chunks and moves them to a slab. Returns the pages moved; with none, the batch is as
    /// empty as before.
    ///
    /// At most `want` chunks are chosen.
    pub(crate) fn take(
        &mut self,
        engine: &Engine,
        mm: &mut Mm,
        seen: &mut Seen,
        want: usize,
    ) -> usize {
        self.chunks.clear();
        self.runs.clear();
        self.leaving.clear();
        self.to_area.clear();
        self.packed.clear();
        self.goes_to_area = Places::NONE;
        self.zeros = Places::NONE;
        self.unchanged = Places::NONE;
        self.kept.clear();
        seen.clear();
        (self.refused, self.tried) = (false, false);
        self.pages = 0;
        // What a server has read is applied first; the kernel does not refuse moves for it.
        self.refused = mm.handed.has_event();
        if mm.changes.behind || self.refused {
            return 0;
        }
        let Some(slab) = mm.staging.take_empty() else { return 0 };
        self.tried = true;
        // Before the first check of what is pinned.
        engine.workers.taking.fetch_add(1, SeqCst);
        self.choose(engine, mm, want.min(CHUNKS_PER_LEAF));
        let mut moves = 0;
        for index in 0..self.runs.len() {
            if self.refused {
                break;
            }
            self.pages += self.move_out(engine, mm, seen, slab, self.runs[index], &mut moves);
        }
        engine.workers.taking.fetch_add(1, SeqCst);
        for index in 0..self.chunks.len() {
            self.give_slots(engine, mm, slab, index);
        }
        if self.pages == 0 {
            mm.staging.give_back(slab);
            return 0;
        }
        self.slab = Some(slab);
        mm.jobs.in_flight += self.pages;
        engine.charge.set_scattered(self.pages < DENSE_PAGES_PER_MOVE * moves);
        mm.clocks.evicted += self.pages as u64;
        self.pages
    }

    /// Chooses the chunks that go and plans their moves. Where nothing is found but pages that stay
    /// for some rounds, the oldest of them go: to find nothing is for when nothing can go.
    fn choose(&mut self, engine: &Engine, mm: &mut Mm, want: usize) {
        let any_stay = self.choose_in_one_pass(engine, mm, want, ChunkHeat::pass_over);
        if self.chunks.is_empty() && any_stay {
            let none_stays = |heat: &mut ChunkHeat, pages| {
                heat.end_rounds(pages);
                0
            };
            self.choose_in_one_pass(engine, mm, want, none_stays);
        }
    }

    /// As [`Batch::choose`], looking at each chunk once: pages that neighbour each other in the
    /// program go in one move, also across chunks. `pass_over` gives those of some pages that stay.
    /// True if any do.
    fn choose_in_one_pass(
        &mut self,
        engine: &Engine,
        mm: &mut Mm,
        want: usize,
        pass_over: impl Fn(&mut ChunkHeat, u16) -> u16,
    ) -> bool {
        let (mut scanned, mut any_stay) = (0, false);
        let bound = mm.queues.resident_len().min(MAX_SCANNED_CHUNKS);
        let mut place = 0;
        let now = now();
        while self.chunks.len() < want && self.runs.len() < MAX_MOVES_PER_BATCH && scanned < bound {
            let Some(chunk) = mm.queues.next_resident(&mut mm.table) else { break };
            scanned += 1;
            let info = mm.table.chunk(chunk);
            let mut movable = info.movable();
            if movable == 0 {
                continue;
            }
            movable &= !(engine.start.pinned)(chunk);
            movable &= !mm.fault_hold.spared(chunk, now);
            let range = range_of(chunk.first(), PAGES_PER_CHUNK);
            let held = range.start < mm.held.end && mm.held.start < range.end;
            if info.flags & UNMOVABLE != 0 || held {
                // A reason that lasts may still end: the chunk is tried again when it comes round.
                mm.table.update(chunk, |chunk| chunk.flags &= !UNMOVABLE);
                movable = 0;
            }
            let mut stay = 0;
            mm.table.update(chunk, |chunk| stay = pass_over(&mut chunk.heat, movable));
            any_stay |= stay != 0;
            movable &= !stay;
            if movable == 0 {
                mm.queues.arrived(&mut mm.table, chunk);
                continue;
            }
            let index = self.chunks.len();
            self.chunks.push(TakenChunk { chunk, planned: movable, moved: 0, place });
            for (first, len) in crate::mm::types::runs(movable) {
                let run = MoveRun { page: chunk.first().plus(first), place, len, index };
                place += len;
                match self.runs.last_mut() {
                    Some(last) if last.page.plus(last.len) == run.page => last.len += len,
                    _ => self.runs.push(run),
                }
            }
        }
        engine.count(Counter::Pgscan, scanned * PAGES_PER_CHUNK);
        any_stay
    }

    /// Moves one run out; what cannot be moved is left where it is. Notes what moved in the chunks'
    /// masks.
    fn move_out(
        &mut self,
        engine: &Engine,
        mm: &mut Mm,
        seen: &mut Seen,
        slab: SlabNo,
        run: MoveRun,
        moves: &mut usize,
    ) -> usize {
        let mut at = 0;
        let mut moved = 0;
        let mut again = 0;
        // A move must lie in one mapping: where a run crosses into another, it goes chunk by chunk,
        // and such a chunk page by page.
        let mut most = run.len;
        while at < run.len {
            let attempt = (run.len - at).min(most);
            let page = run.page.plus(at);
            let to = mm.staging.addr(slab.frame(run.place + at));
            let flags = MoveFlags { dont_wake: true, allow_src_holes: false };
            let source = range_of(page, attempt);
            match seen.ask(engine, mm, source) {
                Lookup::Armed => {}
                Lookup::NotOne if attempt > 1 => {
                    most = within_mapping(page, attempt);
                    continue;
                }
                Lookup::NotOne
                    if mm.regions.find(page.addr()).is_none()
                        || unarmed::forget(engine, mm, source) =>
                {
                    at += 1;
                    continue;
                }
                Lookup::NotOne | Lookup::Unread => {
                    self.refused = true;
                    break;
                }
            }
            *moves += 1;
            let bytes = attempt * PAGE_SIZE;
            // SAFETY: the destination is a frame of this batch's own empty slab; the source are
            // pages of the program that it has by their words, and the move is atomic.
            let progress = unsafe { engine.uffd().move_pages(to, page.addr(), bytes, flags) };
            let done =
                mm.staging.moved(progress, VirtRange { start: to, end: to.offset(bytes) }, true);
            mm.staging.filled(slab, run.place + at, done);
            for k in at..at + done {
                let page = run.page.plus(k);
                self.chunks[run.index + page.chunk().0 - run.page.chunk().0].moved |=
                    1 << page.in_chunk();
            }
            at += done;
            moved += done;
            if done > 0 && run.page.plus(at).in_chunk() == 0 {
                most = PAGES_PER_CHUNK;
            }
            let page = run.page.plus(at);
            match progress.error {
                // After a part the true reason shows at the next try.
                _ if done > 0 || at >= run.len => {}
                None => {}
                Some(Errno::AGAIN) if again < 4 => again += 1,
                Some(Errno::AGAIN) => {
                    self.refused = true;
                    break;
                }
                Some(Errno::INVAL) if attempt > 1 => most = within_mapping(page, attempt),
                Some(error) => {
                    note_unmoved(engine, mm, page, error);
                    at += 1;
                }
            }
        }
        moved
    }

    /// Puts the moved pages of a chunk into the swap cache, as the largest folios they make; queues
    /// what stayed again.
    fn give_slots(&mut self, engine: &Engine, mm: &mut Mm, slab: SlabNo, index: usize) {
        let taken = self.chunks[index];
        for (first, order) in folios(taken.moved) {
            // The planned pages before this one lie before it.
            let place =
                taken.place + (taken.planned & ((1u32 << first) - 1) as u16).count_ones() as usize;
            self.give_folio(
                engine,
                mm,
                slab,
                OutgoingFolio {
                    place,
                    order,
                    entry: crate::backing::devices::NO_ENTRY,
                    chunk: taken.chunk,
                },
                first,
            );
        }
        if mm.table.chunk(taken.chunk).movable() != 0 {
            mm.queues.arrived(&mut mm.table, taken.chunk);
        }
    }

    /// Slots for one folio, whose first page is the chunk's `first`-th; for its halves, if there
    /// are none of that order.
    fn give_folio(
        &mut self,
        engine: &Engine,
        mm: &mut Mm,
        slab: SlabNo,
        mut leaving: OutgoingFolio,
        first: usize,
    ) {
        let OutgoingFolio { place, order, chunk, .. } = leaving;
        let frame = slab.frame(place);
        let Some(entry) = engine.devices.alloc_pool(order, FolioId(frame.0)) else {
            if order == 0 {
                crate::fatal(
                    "no swap slot is left for a page on its way out (256 GiB are swapped out)",
                );
            }
            engine.count(Counter::SwpoutFallback, 1);
            engine.count_order(OfOrder::SwpoutFallback, order, 1);
            let half = 1 << (order - 1);
            self.give_folio(engine, mm, slab, OutgoingFolio { order: order - 1, ..leaving }, first);
            self.give_folio(
                engine,
                mm,
                slab,
                OutgoingFolio { order: order - 1, place: place + half, ..leaving },
                first + half,
            );
            return;
        };
        leaving.entry = entry;
        mm.reach(FrameNo(frame.0 + (1 << order)));
        mm.frames.base[frame.0 as usize] = entry;
        for k in 0..1usize << order {
            let page = chunk.first().plus(first + k);
            let frame = FrameNo(frame.0 + k as u32);
            mm.frames.owner[frame.0 as usize] = page;
            engine.uncancel(frame);
            mm.frames.kept[frame.0 as usize] =
                match mm.table.set(page, PageState::Swapped(entry_plus(entry, k as u32))) {
                    PageState::PresentClean(old) => {
                        self.kept.push((place + k, old));
                        Some(old)
                    }
                    _ => None,
                };
        }
        self.leaving.push(leaving);
    }

    /// Compresses and stores. No lock is held; the devices take their own.
    ///
    /// # Panics
    /// When nothing was taken.
    pub fn store(&mut self, engine: &Engine, compressor: &mut Compressor, unpacker: &mut Unpacker) {
        let slab = self.slab.expect("a batch that was taken");
        let mut zero = 0;
        let mut stored = 0;
        let mut same = 0;
        let (mut poor, mut refused) = (0, 0);
        let mut kept = self.kept.iter().peekable();
        let mut yielder = YieldEvery::default();
        for leaving in &self.leaving {
            let (stored_before, to_area_before) = (stored + zero, self.to_area.len());
            let refuses = engine.pool_refuses();
            for k in 0..1usize << leaving.order {
                let place = leaving.place + k;
                yielder.for_a_page(engine.single_faulter());
                let frame = slab.frame(place);
                let entry = entry_plus(leaving.entry, k as u32);
                // The program has it back already.
                if engine.is_cancelled(frame) {
                    kept.next_if(|kept| kept.0 == place);
                    continue;
                }
                // SAFETY: the frame is full and this batch's (invariant 1); nothing writes it
                // before `finish`.
                let page = unsafe { &*engine.frame_addr(frame).as_ptr::<Page>() };
                if let Some((_, old)) = kept.next_if(|kept| kept.0 == place) {
                    // Old slots of frames on their way out belong to this batch until `finish`.
                    if engine.devices.holds(*old, page, &mut self.old, unpacker) {
                        self.unchanged.add(place);
                        same += 1;
                        continue;
                    }
                }
                let packed = compressor.compress(page);
                let slot = Slot(entry.offset().0);
                let goes_to_area = match packed {
                    Packed::Raw(_) if engine.devices.is_backed() => {
                        poor += 1;
                        true
                    }
                    Packed::Bytes(_) if refuses => {
                        refused += 1;
                        true
                    }
                    _ if engine.devices.pool.insert(slot, &packed).is_err() => {
                        refused += 1;
                        true
                    }
                    Packed::Zero => {
                        zero += 1;
                        self.zeros.add(place);
                        false
                    }
                    _ => {
                        stored += 1;
                        false
                    }
                };
                if goes_to_area {
                    self.to_area.push(BackingPage::new(frame, entry, &packed, &mut self.packed));
                    self.goes_to_area.add(place);
                }
            }
            let n = 1 << leaving.order;
            if stored + zero - stored_before == n {
                engine.count_order(OfOrder::Zswpout, leaving.order, 1);
            } else if self.to_area.len() - to_area_before == n {
                engine.count_order(OfOrder::Swpout, leaving.order, 1);
            }
        }
        engine.count(Counter::SwpoutZero, zero);
        engine.count(Counter::SwpoutClean, same);
        engine.count(Counter::Zswpout, stored);
        engine.count(Counter::RejectCompressPoor, poor);
        engine.count(Counter::RejectPoolFull, refused);
        self.store_to_areas(engine);
        if refused > 0 {
            // A worker is to make room in compressed memory.
            engine.call_workers();
        }
    }

    /// Pages that do not compress, for which a swap area is cheaper than compressed memory, and
    /// those that it refuses. What no swap area takes goes there all the same, past its bound. The
    /// memory lock is *not* held.
    fn store_to_areas(&mut self, engine: &Engine) {
        if self.to_area.is_empty() {
            return;
        }
        if !engine.area_rests() {
            for page in &mut self.to_area {
                page.area_entry = copies::alloc_slot(engine, FolioId(page.frame.0));
            }
        }
        let pages: Vec<(Slot, Packed<'_>)> = self
            .to_area
            .iter()
            .filter_map(|page| {
                let slot = Slot(page.area_entry?.offset().0);
                // SAFETY: the frame is full and this batch's (invariant 1) until `finish`.
                Some((slot, unsafe { page.packed(engine, &self.packed) }))
            })
            .collect();
        let mut written = pages.len();
        let result = copies::write(engine, &pages);
        drop(pages);
        if let Err(error) = result {
            engine.write_failed(&error);
            for page in &mut self.to_area {
                if let Some(place) = page.area_entry.take() {
                    engine.devices.free_slot(place, Expect::Folio(FolioId(page.frame.0)));
                }
            }
            written = 0;
        }
        for page in self.to_area.iter().filter(|page| page.area_entry.is_none()) {
            engine.report_swap_full("the swap areas are full: exceeding the budget");
            // SAFETY: the frame is full and this batch's (invariant 1) until `finish`.
            let packed = unsafe { page.packed(engine, &self.packed) };
            if engine.devices.pool.insert(Slot(page.entry.offset().0), &packed).is_err() {
                // `Engine::is_full` has seen to it that there is room.
                crate::fatal(
                    "a page that went out has no place: compressed memory's address space is full",
                );
            }
        }
        engine.count(Counter::Pswpout, written);
        engine.count(Counter::Zswpout, self.to_area.len() - written);
    }

    /// What was not cancelled becomes a shadow; the frames are free. The memory lock is held.
    ///
    /// # Panics
    /// When nothing was taken.
    pub(crate) fn finish(&mut self, engine: &Engine, mm: &mut Mm) {
        let slab = self.slab.take().expect("a batch that was taken");
        self.finish_on_areas(engine, mm);
        let devices = &engine.devices;
        let shadow = mm.shadow();
        for leaving in &self.leaving {
            let n = 1usize << leaving.order;
            let folio = FolioId(slab.frame(leaving.place).0);
            let plain = (0..n).all(|k| {
                let place = leaving.place + k;
                let frame = slab.frame(place);
                !engine.is_cancelled(frame)
                    && mm.frames.kept[frame.0 as usize].is_none()
                    && !self.goes_to_area.has(place)
            });
            if plain {
                devices.to_shadow_with_zeros(
                    leaving.entry,
                    n as u32,
                    folio,
                    shadow,
                    self.zeros.of(leaving.place, n),
                );
                // The program may have moved them since they were taken.
                for place in [leaving.place, leaving.place + n - 1] {
                    let page = mm.frames.owner[slab.frame(place).0 as usize];
                    mm.queues.pooled(&mut mm.table, page.chunk());
                }
                continue;
            }
            for k in 0..n {
                let place = leaving.place + k;
                let frame = slab.frame(place);
                let entry = entry_plus(leaving.entry, k as u32);
                if let Some(old) = mm.frames.kept[frame.0 as usize].take() {
                    if self.unchanged.has(place) && !engine.is_cancelled(frame) {
                        self.return_to_old_slots(engine, mm, frame, entry, old, folio);
                        continue;
                    }
                    devices.drop_swapped(old);
                }
                if engine.is_cancelled(frame) {
                    devices.pool.free(Slot(entry.offset().0));
                    engine.free_cancelled(frame, entry, folio);
                } else if devices.pool.contains(Slot(entry.offset().0)) {
                    devices.to_shadow_with_zeros(entry, 1, folio, shadow, self.zeros.of(place, 1));
                    let page = mm.frames.owner[frame.0 as usize];
                    mm.queues.pooled(&mut mm.table, page.chunk());
                } else {
                    // It went to a swap area, and `finish_on_areas` gave its page the new entry.
                    devices.free_slot(entry, Expect::Folio(folio));
                }
            }
        }
        mm.jobs.in_flight -= self.pages;
        mm.staging.give_back(slab);
    }

    /// The page is what its old slot holds: it gets that entry again.
    fn return_to_old_slots(
        &self,
        engine: &Engine,
        mm: &mut Mm,
        frame: FrameNo,
        entry: SwapEntry,
        old: SwapEntry,
        folio: FolioId,
    ) {
        let page = mm.frames.owner[frame.0 as usize];
        if mm.table.get(page) != PageState::Swapped(entry) {
            crate::fatal(&format!(
                "page {:?} went out as entry {entry:?} and is {:?}",
                page.addr(),
                mm.table.get(page)
            ));
        }
        mm.table.set(page, PageState::Swapped(old));
        engine.devices.free_slot(entry, Expect::Folio(folio));
        engine.devices.renew_shadow(old, mm.shadow());
        if old.ty() == POOL {
            mm.queues.pooled(&mut mm.table, page.chunk());
        }
    }

    /// Pages that went to a swap area get their new entries. Called before the folios are looked
    /// at.
    fn finish_on_areas(&mut self, engine: &Engine, mm: &mut Mm) {
        let devices = &engine.devices;
        let shadow = mm.shadow();
        for &BackingPage { frame, entry, area_entry: place, .. } in &self.to_area {
            let Some(place) = place else { continue };
            let folio = FolioId(frame.0);
            devices.to_shadow(place, 1, folio, shadow);
            if engine.is_cancelled(frame) {
                devices.drop_swapped(place);
                continue;
            }
            debug_assert_eq!(place.ty(), AREA);
            let page = mm.frames.owner[frame.0 as usize];
            if mm.table.get(page) != PageState::Swapped(entry) {
                crate::fatal(&format!(
                    "page {:?} was written to a swap area as entry {entry:?} and is {:?}",
                    page.addr(),
                    mm.table.get(page)
                ));
            }
            mm.moved_to_area(page, place);
        }
    }
}
