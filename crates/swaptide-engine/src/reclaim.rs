//! Swap-out: chunks leave the program for staging frames, are compressed and stored.
//!
//! Owns: what one worker needs for a batch.
//!
//! A batch has three parts: *take* (memory lock held: choose chunks, move their pages to the frames of one slab, give them slots in the swap
//! cache), *store* (no lock: compress from the frames; a touch now finds the folio in the swap cache and copies the page back), *finish*
//! (memory lock held: what was not cancelled becomes a shadow; the frames are free).
//!
//! Invariants
//! 1. Between take and finish, the frames of the slab are read by this worker alone and moved by nobody.
//! 2. A page is moved out only while its word is `Present` and the memory lock is held.
//! 3. A page that no device takes stays in compressed memory's raw form: it is never dropped.

use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use swaptide_core::{Expect, FolioId, SwapEntry};
use swaptide_ipc::Counter;
use swaptide_store::codec::{Compressor, Packed};
use swaptide_store::{Page, Slot};
use swaptide_sys::Errno;
use swaptide_sys::lock::futex;
use swaptide_sys::mem::{Advice, advise};
use swaptide_sys::page::{PAGE_SIZE, VirtRange};
use swaptide_sys::process::StatmFd;
use swaptide_sys::thread::{now, yield_now};
use swaptide_sys::uffd::MoveFlags;

use crate::bell::Ring;
use crate::devices::{FILE, entry_plus};
use crate::engine::{Engine, Mm};
use crate::ids::{CHUNK_ORDER, ChunkNo, PAGES_PER_CHUNK, PAGES_PER_LEAF, PageNo, folios, range_of};
use crate::pagetable::{PageState, STUCK};
use crate::staging::{FrameNo, SlabNo};
use crate::writeback::Writeback;

/// How often an idle worker looks at the accounts.
const TICK: Duration = Duration::from_millis(20);
/// The same while the limit is near.
const TICK_NEAR: Duration = Duration::from_millis(1);

/// A folio on its way out.
#[derive(Clone, Copy)]
struct Leaving {
    place: usize,
    order: u8,
    entry: SwapEntry,
    chunk: ChunkNo,
}

/// One run of pages to move: program page, frame of the slab, length.
#[derive(Clone, Copy)]
struct Run {
    page: PageNo,
    place: usize,
    len: usize,
}

/// What a batch came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// So many pages left the program.
    Took(usize),
    /// Nothing could be taken before the handler has read what the program did to its mappings.
    Again,
    /// There is nothing that can be taken.
    Nothing,
}

/// See the module's description.
pub struct Worker {
    compressor: Compressor,
    chunks: Vec<(ChunkNo, u16)>,
    runs: Vec<Run>,
    leaving: Vec<Leaving>,
    raw: Vec<(FrameNo, SwapEntry)>,
    /// Frames whose page may be the same as what an old slot holds, with that slot's entry, in the order of `leaving`.
    kept_entries: Vec<(usize, SwapEntry)>,
    /// Frames that are the same: their old slots stand.
    unchanged: [u64; PAGES_PER_LEAF / 64],
    /// Where an old slot is loaded to be compared.
    old: Box<Page>,
    /// Pages that could not be moved because another process may share them since a fork.
    shared: Vec<PageNo>,
    /// The kernel refused a move because an event is unread.
    refused: bool,
    is_raw: [u64; PAGES_PER_LEAF / 64],
    writeback: Writeback,
}

impl Default for Worker {
    fn default() -> Self {
        Self::new()
    }
}

impl Worker {
    /// A worker with its buffers.
    pub fn new() -> Worker {
        Worker {
            compressor: Compressor::new(),
            chunks: Vec::with_capacity(64),
            runs: Vec::with_capacity(64),
            leaving: Vec::with_capacity(512),
            raw: Vec::with_capacity(512),
            kept_entries: Vec::with_capacity(512),
            unchanged: [0; PAGES_PER_LEAF / 64],
            old: Box::new([0; PAGE_SIZE]),
            shared: Vec::with_capacity(256),
            refused: false,
            is_raw: [0; PAGES_PER_LEAF / 64],
            writeback: Writeback::new(),
        }
    }

    /// Takes one batch out.
    pub fn step(&mut self, engine: &Engine) -> Step {
        let taken = {
            let mut mm = engine.mm.lock();
            let Some(slab) = mm.staging.take_empty() else { return Step::Nothing };
            let moved = self.take(engine, &mut mm, slab);
            if moved == 0 {
                mm.staging.give_back(slab);
                None
            } else {
                Some((slab, moved))
            }
        };
        let Some((slab, moved)) = taken else { return if self.refused { Step::Again } else { Step::Nothing } };
        self.store(engine, slab);
        let to_file = self.store_raw(engine);
        let mut mm = engine.mm.lock();
        self.finish_raw(engine, &mut mm, &to_file);
        self.finish(engine, &mut mm, slab);
        mm.staging.give_back(slab);
        mm.staging.trim(engine.charge.keep_frames());
        engine.settle(&mm);
        drop(mm);
        engine.count(Counter::Pgsteal, moved);
        Step::Took(moved)
    }

    /// Breaks the sharing of pages that a fork left shared, so that the next batch can take them. No lock is held: a page that is gone
    /// meanwhile is a fault, which the handler answers. So never in the handler itself.
    fn unshare(&mut self) -> bool {
        let any = !self.shared.is_empty();
        for page in self.shared.drain(..) {
            // SAFETY: faulting a page of the program for writing changes nothing but its sharing. A page that is gone is an error.
            let _ = unsafe { advise(range_of(page, 1), Advice::PopulateWrite) };
        }
        any
    }

    /// Chooses chunks and moves them to the slab. Returns the pages moved.
    fn take(&mut self, engine: &Engine, mm: &mut Mm, slab: SlabNo) -> usize {
        let want = engine.charge.batch_chunks();
        self.chunks.clear();
        self.runs.clear();
        self.leaving.clear();
        self.raw.clear();
        self.is_raw = [0; PAGES_PER_LEAF / 64];
        self.unchanged = [0; PAGES_PER_LEAF / 64];
        self.kept_entries.clear();
        self.shared.clear();
        let mut scanned = 0;
        let bound = mm.queues.resident_len().min(4096);
        while self.chunks.len() < want && scanned < bound {
            let Some(chunk) = mm.queues.next_resident(&mut mm.table) else { break };
            scanned += 1;
            let info = mm.table.chunk(chunk);
            if info.present == 0 {
                continue;
            }
            let range = range_of(chunk.first(), PAGES_PER_CHUNK);
            let held = range.start < mm.held.end && mm.held.start < range.end;
            if info.hot > 0 || info.flags & STUCK != 0 || held || (engine.start.pinned)(chunk) {
                mm.table.update(chunk, |c| {
                    c.hot = c.hot.saturating_sub(1);
                    // A reason that lasts may still end: the chunk is tried again when it comes round.
                    c.flags &= !STUCK;
                });
                mm.queues.arrived(&mut mm.table, chunk);
                continue;
            }
            self.chunks.push((chunk, info.present));
        }
        engine.count(Counter::Pgscan, scanned * PAGES_PER_CHUNK);
        self.plan();
        let mut moved = 0;
        self.refused = false;
        for index in 0..self.runs.len() {
            if self.refused {
                break;
            }
            moved += self.move_out(engine, mm, slab, self.runs[index]);
        }
        for index in 0..self.chunks.len() {
            self.give_slots(engine, mm, slab, index);
        }
        moved
    }

    /// The runs to move: pages that neighbour each other in the program and in the slab go in one call, also across chunks.
    fn plan(&mut self) {
        for (block, &(chunk, mask)) in self.chunks.iter().enumerate() {
            for (first, len) in crate::ids::runs(mask) {
                let run = Run { page: chunk.first().plus(first), place: block * PAGES_PER_CHUNK + first, len };
                match self.runs.last_mut() {
                    Some(last) if last.page.plus(last.len) == run.page && last.place + last.len == run.place => last.len += len,
                    _ => self.runs.push(run),
                }
            }
        }
        for (_, mask) in &mut self.chunks {
            *mask = 0;
        }
    }

    /// Moves one run out; what cannot be moved is left where it is. Sets the bits of what moved in the chunks' masks.
    fn move_out(&mut self, engine: &Engine, mm: &mut Mm, slab: SlabNo, run: Run) -> usize {
        let mut at = 0;
        let mut moved = 0;
        let mut again = 0;
        // A move must lie in one mapping: where a run crosses into another, it goes chunk by chunk, and such a chunk page by page.
        let mut most = run.len;
        while at < run.len {
            let attempt = (run.len - at).min(most);
            let page = run.page.plus(at);
            let frame = slab.frame(run.place + at);
            let flags = MoveFlags { dont_wake: true, allow_src_holes: false };
            // SAFETY: the destination is a frame of this worker's own empty slab; the source are pages of the program whose words say
            // that the program has them, and the move is atomic against its touches.
            let progress = unsafe { engine.uffd().move_pages(mm.staging.addr(frame), page.addr(), attempt * PAGE_SIZE, flags) };
            let to = mm.staging.addr(frame);
            let done = mm.staging.moved(progress, VirtRange { start: to, end: to.offset(attempt * PAGE_SIZE) }, true);
            mm.staging.filled(slab, run.place + at, done);
            for k in at..at + done {
                let place = run.place + k;
                self.chunks[place / PAGES_PER_CHUNK].1 |= 1 << (place % PAGES_PER_CHUNK);
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
                Some(Errno::NOENT) => {
                    // The program's page is gone without an event: freed lazily. Its next touch gets zeros.
                    if let PageState::Kept(entry) = mm.table.set(page, PageState::Empty) {
                        engine.devices.drop_swapped(entry);
                    }
                    at += 1;
                }
                Some(Errno::AGAIN) if again < 4 => again += 1,
                Some(Errno::AGAIN) => {
                    self.refused = true;
                    break;
                }
                Some(Errno::BUSY) => {
                    engine.count(Counter::PagesBusy, 1);
                    if engine.shared_pages.load(Relaxed) && self.shared.len() < self.shared.capacity() {
                        self.shared.push(page);
                    }
                    at += 1;
                }
                Some(Errno::INVAL) if attempt > 1 => {
                    let in_chunk = PAGES_PER_CHUNK - page.in_chunk();
                    most = if attempt > in_chunk { in_chunk } else { 1 };
                }
                Some(Errno::INVAL) => {
                    // Locked or protected memory: the chunk is not tried again at once.
                    mm.table.update(page.chunk(), |c| c.flags |= STUCK);
                    at += 1;
                }
                Some(_) => {
                    engine.count(Counter::PagesBusy, 1);
                    at += 1;
                }
            }
        }
        moved
    }

    /// Puts the moved pages of a chunk into the swap cache, as the largest folios they make; queues what stayed again.
    fn give_slots(&mut self, engine: &Engine, mm: &mut Mm, slab: SlabNo, index: usize) {
        let (chunk, moved) = self.chunks[index];
        let block = index * PAGES_PER_CHUNK;
        for (first, order) in folios(moved) {
            self.give_folio(engine, mm, slab, chunk, block, first, order);
        }
        mm.evictions = mm.evictions.wrapping_add(1);
        if mm.table.chunk(chunk).present != 0 {
            mm.queues.arrived(&mut mm.table, chunk);
        }
    }

    #[allow(clippy::too_many_arguments, reason = "one step of a batch: all of it is the batch's state")]
    fn give_folio(&mut self, engine: &Engine, mm: &mut Mm, slab: SlabNo, chunk: ChunkNo, block: usize, first: usize, order: u8) {
        let frame = slab.frame(block + first);
        let Some(entry) = engine.devices.alloc_pool(order, FolioId(frame.0)) else {
            if order == 0 {
                crate::fatal("no swap slot is left for a page that was taken out (256 GiB are swapped out)");
            }
            engine.count(Counter::SwpoutFallback, 1);
            let half = 1 << (order - 1);
            self.give_folio(engine, mm, slab, chunk, block, first, order - 1);
            self.give_folio(engine, mm, slab, chunk, block, first + half, order - 1);
            return;
        };
        mm.base[frame.0 as usize] = entry;
        for k in 0..1usize << order {
            let page = chunk.first().plus(first + k);
            let frame = FrameNo(frame.0 + k as u32);
            mm.owner[frame.0 as usize] = page;
            mm.uncancel(frame);
            mm.kept[frame.0 as usize] = match mm.table.set(page, PageState::Swapped(entry_plus(entry, k as u32))) {
                PageState::Kept(old) => {
                    self.kept_entries.push((block + first + k, old));
                    Some(old)
                }
                _ => None,
            };
        }
        if order == CHUNK_ORDER {
            engine.count(Counter::Swpout64k, 1);
        }
        self.leaving.push(Leaving { place: block + first, order, entry, chunk });
    }

    /// Compresses and stores. No lock is held; the devices take their own.
    fn store(&mut self, engine: &Engine, slab: SlabNo) {
        let mut zero = 0;
        let mut stored = 0;
        let mut same = 0;
        let mut kept = self.kept_entries.iter().peekable();
        for leaving in &self.leaving {
            for k in 0..1usize << leaving.order {
                let place = leaving.place + k;
                let frame = slab.frame(place);
                let entry = entry_plus(leaving.entry, k as u32);
                // SAFETY: the frame is full and this worker's (invariant 1); nobody writes it before `finish`.
                let page = unsafe { &*engine.frame_addr(frame).as_ptr::<Page>() };
                if let Some((_, old)) = kept.next_if(|kept| kept.0 == place) {
                    // Old slots of frames on their way out belong to this worker until `finish`.
                    if engine.devices.pool.load(Slot(old.offset().0), &mut self.old).is_ok() && *self.old == *page {
                        self.unchanged[place / 64] |= 1 << (place % 64);
                        same += 1;
                        continue;
                    }
                }
                let packed = self.compressor.compress(page);
                match packed {
                    Packed::Zero => zero += 1,
                    Packed::Raw(_) if engine.devices.file.is_some() => {
                        self.raw.push((frame, entry));
                        self.is_raw[place / 64] |= 1 << (place % 64);
                        continue;
                    }
                    _ => stored += 1,
                }
                if engine.devices.pool.insert(Slot(entry.offset().0), &packed).is_err() {
                    crate::fatal("the compressed pool's address space is full");
                }
            }
        }
        engine.count(Counter::SwpoutZero, zero);
        engine.count(Counter::SwpoutClean, same);
        engine.count(Counter::Zswpout, stored);
        engine.count(Counter::Pswpout, stored);
    }

    /// Pages that do not compress: the file is cheaper for them than compressed memory. What it does not take goes to compressed memory
    /// raw. The memory lock is *not* held.
    fn store_raw(&mut self, engine: &Engine) -> Vec<(FrameNo, SwapEntry, SwapEntry)> {
        let mut to_file = Vec::new();
        if self.raw.is_empty() {
            return to_file;
        }
        let Some(file) = &engine.devices.file else { return to_file };
        for &(frame, entry) in &self.raw {
            if let Some(place) = engine.devices.alloc_file(FolioId(frame.0)) {
                to_file.push((frame, entry, place));
            }
        }
        for batch in to_file.chunks(256) {
            let pages: Vec<(Slot, &Page)> = batch
                .iter()
                // SAFETY: as in `store`.
                .map(|&(frame, _, place)| (Slot(place.offset().0), unsafe { &*engine.frame_addr(frame).as_ptr::<Page>() }))
                .collect();
            if let Err(error) = file.device.write(&pages) {
                (engine.start.log)(&format!("writing to the swap file failed, the pages stay in memory: {error}"));
                engine.count(Counter::WriteErrors, 1);
                for &(frame, _, place) in &to_file {
                    file.device.free(Slot(place.offset().0));
                    engine.devices.free_slot(place, Expect::Folio(FolioId(frame.0)));
                }
                to_file.clear();
                break;
            }
        }
        let mut written = to_file.iter().map(|t| t.0).peekable();
        for &(frame, entry) in &self.raw {
            if written.next_if_eq(&frame).is_none() {
                if !engine.swap_full.swap(true, Relaxed) {
                    (engine.start.log)("the swap file takes no more pages: memory stays past the budget");
                }
                engine.count(Counter::SwapFull, 1);
                // SAFETY: as in `store`.
                let page = unsafe { &*engine.frame_addr(frame).as_ptr::<Page>() };
                if engine.devices.pool.insert(Slot(entry.offset().0), &Packed::Raw(page)).is_err() {
                    crate::fatal("the compressed pool's address space is full");
                }
            }
        }
        engine.count(Counter::Pswpout, self.raw.len());
        to_file
    }

    /// What was not cancelled becomes a shadow.
    fn finish(&mut self, engine: &Engine, mm: &mut Mm, slab: SlabNo) {
        let devices = &engine.devices;
        let shadow = mm.shadow();
        for leaving in &self.leaving {
            let n = 1usize << leaving.order;
            let folio = FolioId(slab.frame(leaving.place).0);
            let plain = (0..n).all(|k| {
                let place = leaving.place + k;
                let frame = slab.frame(place);
                !mm.is_cancelled(frame) && mm.kept[frame.0 as usize].is_none() && self.is_raw[place / 64] >> (place % 64) & 1 == 0
            });
            if plain {
                devices.to_shadow(leaving.entry, n as u32, folio, shadow);
                mm.queues.pooled(&mut mm.table, leaving.chunk);
                continue;
            }
            for k in 0..n {
                let frame = slab.frame(leaving.place + k);
                let entry = entry_plus(leaving.entry, k as u32);
                let place = leaving.place + k;
                if let Some(old) = mm.kept[frame.0 as usize].take() {
                    let unchanged = self.unchanged[place / 64] >> (place % 64) & 1 == 1;
                    if unchanged && !mm.is_cancelled(frame) {
                        let page = mm.owner[frame.0 as usize];
                        if mm.table.get(page) != PageState::Swapped(entry) {
                            crate::fatal(&format!(
                                "page {:?} went out as entry {entry:?} and is {:?}",
                                page.addr(),
                                mm.table.get(page)
                            ));
                        }
                        mm.table.set(page, PageState::Swapped(old));
                        devices.free_slot(entry, Expect::Folio(folio));
                        mm.queues.pooled(&mut mm.table, page.chunk());
                        continue;
                    }
                    devices.drop_swapped(old);
                }
                if mm.is_cancelled(frame) {
                    devices.pool.free(Slot(entry.offset().0));
                    mm.free_cancelled(devices, frame, entry, folio);
                } else if devices.pool.contains(Slot(entry.offset().0)) {
                    devices.to_shadow(entry, 1, folio, shadow);
                    mm.queues.pooled(&mut mm.table, leaving.chunk);
                } else {
                    // It went to the file, and `finish_raw` gave its page the new entry.
                    devices.free_slot(entry, Expect::Folio(folio));
                }
            }
        }
    }

    /// Pages that went to the file get their new entries. Called with the memory lock held, before `finish`.
    fn finish_raw(&mut self, engine: &Engine, mm: &mut Mm, to_file: &[(FrameNo, SwapEntry, SwapEntry)]) {
        let devices = &engine.devices;
        let shadow = mm.shadow();
        for &(frame, entry, place) in to_file {
            let folio = FolioId(frame.0);
            devices.to_shadow(place, 1, folio, shadow);
            if mm.is_cancelled(frame) {
                devices.drop_swapped(place);
                continue;
            }
            debug_assert_eq!(place.ty(), FILE);
            let page = mm.owner[frame.0 as usize];
            if mm.table.get(page) != PageState::Swapped(entry) {
                crate::fatal(&format!(
                    "page {:?} was written to the file as entry {entry:?} and is {:?}",
                    page.addr(),
                    mm.table.get(page)
                ));
            }
            mm.moved_to_file(page, place);
        }
    }

    /// The life of a background worker. Worker 0 looks after the accounts.
    pub fn run(&mut self, engine: &Engine, index: usize) -> ! {
        let statm = if index == 0 { StatmFd::open_self().ok() } else { None };
        let mut rest_at_adoption = 0;
        let mut ticks = 0u32;
        loop {
            engine.stand_still();
            let looked = now();
            if let Some(statm) = &statm {
                ticks = ticks.wrapping_add(1);
                engine.publish_slot();
                engine.charge.take_limit(engine.slot());
                engine.charge.measure(statm);
                let rest = engine.charge.rest();
                let step = (engine.charge.limit() / 128).clamp(256 << 10, 4 << 20) as i64;
                if rest < rest_at_adoption {
                    rest_at_adoption = rest;
                }
                if rest - rest_at_adoption > step || ticks.is_multiple_of(64) {
                    engine.bells.ring(Ring::Adopt);
                    engine.charge.measure(statm);
                    rest_at_adoption = engine.charge.rest();
                }
            }
            let mut idle = true;
            let mut rounds = 0;
            while engine.charge.headroom() < engine.charge.high() && engine.park.load(Acquire) == 0 {
                idle = false;
                let step = self.step(engine);
                let step = if self.unshare() { Step::Again } else { step };
                if step == Step::Again {
                    yield_now();
                }
                if step == Step::Nothing {
                    idle = true;
                    if engine.charge.headroom() < 0 {
                        let mut mm = engine.mm.lock();
                        mm.staging.trim(0);
                        engine.settle(&mm);
                    }
                    break;
                }
                rounds += 1;
                // A program that grows in new mappings is seen by the accounts alone.
                if index == 0 && now().since(looked) >= TICK_NEAR {
                    break;
                }
            }
            if index == 0 && engine.charge.pool() > engine.charge.pool_limit() && engine.park.load(Acquire) == 0 {
                idle &= !self.writeback.step(engine);
            }
            if idle {
                let near = engine.charge.headroom() < 4 * engine.charge.high();
                engine.work.store(0, Release);
                if engine.charge.headroom() >= engine.charge.low() || engine.mm.lock().queues.resident_len() == 0 || rounds == 0 {
                    futex::wait(&engine.work, 0, Some(if near { TICK_NEAR } else { TICK }), futex::Scope::Private);
                }
            }
        }
    }
}
