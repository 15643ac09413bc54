//! Making room: pages go out, and from compressed memory to the file.
//!
//! Owns the thread that does it. Only it stores pages, so what is stored for a page is never older
//! than what was stored before.
//!
//! A batch goes out in three steps:
//!
//! | step | lock | what |
//! |---|---|---|
//! | protect | held | the oldest chunks are chosen, their pages become `Leaving` and are write-protected in every mapping of every address space, mapped or not |
//! | store | no | possible writers past page tables are looked for; the pages are read through the memory file and stored |
//! | punch | held | if nothing changed: what is still `Leaving` is punched out of the file, and the protection is lifted |
//!
//! Why no write is lost. From the end of `protect` on no page table entry permits a write:
//! existing ones are protected, and where there is none a mark stands that makes one which comes
//! protected. A thread that writes faults; its fault is answered under the lock, which makes the
//! page `Present`, and then it does not go out. So of a page that is `Leaving` at `punch`,
//! what was read at `store` is the last that was written, unless a process had an entry that
//! `protect` did not reach:
//!
//! 1. A forked child: its entries are copies, of protected ones if the fork came later. If it came
//!    earlier and its event is unread, its parent's mappings are *changing* for the kernel;
//!    `protect` is refused. If the event was read since, the generation is another one.
//! 2. A mapping that was moved takes entries and marks with it. One that was doubled or grown has
//!    none in its new part: the kernel says `changing` until the event is read, then the generation
//!    is another one; and what a call of `mremap` may map at further addresses does not go out from
//!    the hook before it to the one after it, for what grows in place is no event.
//! 3. A process without userfaultfd cannot have the memory mapped: mappings come from
//!    [`attach`](swaptide_ipc::shared::attach), or by fork.
//! 4. Devices write past page tables, and so does `process_vm_writev`: `pinned`.
//!
//! So `punch` asks every address space again, under the lock, whether a change is under way, reads
//! what it tells, and compares the generation. The punch itself takes the entries of every mapping,
//! those of an unread child too, before it takes the page.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use swaptide_engine::mm::heat::ChunkHeat;
use swaptide_engine::mm::types::{CHUNK_ORDER, PAGES_PER_CHUNK};
use swaptide_ipc::{Counter, OfOrder};
use swaptide_store::codec::{Compressor, Unpacker};
use swaptide_store::{Page, Slot};
use swaptide_sys::Errno;
use swaptide_sys::page::PAGE_SIZE;

use crate::fault::FaultThread;
use crate::huge_pages::HugePages;
use crate::pinned::{PastWriters, may_write_to, pinned};
use crate::region::{Region, RegionId, RegionPage, bit};
use crate::space::{Space, SpaceId};
use crate::state::{
    Inner, PagerState, ReclaimOrder, STOP_ROOM, is_hole, margin, punch, write_pages,
};
use crate::store::{PutOutcome, compressor};

/// Most pages of one batch.
const MAX_BATCH_PAGES: usize = 1024;
/// Fewest pages of one that is made for room: a part of the margin, and no more than these.
const LEAST_BATCH_DIVISOR: u64 = 2;
const LEAST_BATCH_PAGES: u64 = 128;
/// Pages that go from compressed memory to the file together.
const WRITEBACK_BATCH_PAGES: usize = 128;

/// The time for which a region that waits is not tried again: at least, and in times of what the
/// questions took.
const EXEMPT_TIME: Duration = Duration::from_millis(20);
const EXEMPT_REST: u32 = 4;
/// Batches in a row of which all waits, after which there is a pause.
const MAX_WAITS: u32 = 16;
/// The time for which no fault waits for room after nothing could go out.
const FULL_BACKOFF: Duration = Duration::from_millis(20);

/// The thread that makes room, with what it works with.
struct ReclaimThread {
    inner: Arc<Inner>,
    compressor: Compressor,
    unpacker: Unpacker,
    buffer: Vec<u8>,
    huge_pages: HugePages,
    /// Batches in a row under which something changed.
    tries: u32,
    /// Regions that lately were found to wait, and until when they are not tried again.
    waiting: HashMap<RegionId, Instant>,
    /// Batches in a row of which all waits.
    waits: u32,
    past_writers: PastWriters,
    answers: FaultThread,
}

/// Pages on their way out.
struct ReclaimBatch {
    runs: Vec<(RegionId, Range<usize>)>,
    /// Chunks among them that a program asked for.
    wanted: Vec<(RegionId, u32)>,
    generation: u64,
}

impl ReclaimBatch {
    fn pages(&self) -> usize {
        self.runs.iter().map(|(_, run)| run.len()).sum()
    }
}

/// A page that was put away. Its slot stands here because its region may be gone before it is known
/// to be out.
struct Stored {
    region: RegionId,
    page: usize,
    /// Its place among the pages that were read.
    at: usize,
    slot: Slot,
    put: PutOutcome,
}

impl Stored {
    /// True if another page is the next one in the region, and among what was read: what is put
    /// back together is one piece there.
    fn is_before(&self, next: &Stored) -> bool {
        self.region == next.region && self.page + 1 == next.page && self.at + 1 == next.at
    }
}

/// The result of an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    /// This many pages went out.
    Out(usize),
    /// There is nothing that may go.
    Nothing,
    /// All that was chosen waits; there may be others.
    Waits,
    /// Something changed meanwhile: try again.
    Again,
    /// There is no room for more.
    Full,
}

/// Runs the reclaim thread.
pub(crate) fn run(inner: Arc<Inner>) {
    let mut thread = ReclaimThread {
        compressor: compressor(inner.segment),
        inner: inner.clone(),
        unpacker: Unpacker::new(),
        buffer: Vec::new(),
        huge_pages: HugePages::new(),
        tries: 0,
        waiting: HashMap::new(),
        waits: 0,
        past_writers: PastWriters::default(),
        answers: FaultThread::new(inner.clone()),
    };
    let mut waits = Duration::ZERO;
    while inner.stop.load(Relaxed) & STOP_ROOM == 0 {
        if !waits.is_zero() {
            let state = inner.lock();
            // A poisoned lock is met at the next one.
            drop(inner.work.wait_timeout(state, waits));
        }
        inner.take_orders();
        waits = thread.turn();
    }
}

impl ReclaimThread {
    /// Does what there is to do, a step of it; answers with the time until it is worth looking
    /// again.
    fn turn(&mut self) -> Duration {
        self.inner
            .segment
            .slot(self.inner.index)
            .usage
            .shared_bytes
            .store(self.inner.resident_bytes(), Relaxed);
        let Some(limit) = self.inner.limit() else { return Duration::from_millis(20) };
        if !self.inner.lock().engaged {
            return Duration::from_millis(2);
        }
        self.set_pool_limit(limit);
        if self.inner.store.follow_areas() {
            return Duration::ZERO;
        }
        if self.inner.store.has_file() && self.inner.store.pool_excess() > 0 && self.write_back() {
            return Duration::ZERO;
        }
        let (over, wanted) = {
            let state = self.inner.lock();
            // What is on its way is to find room.
            let pages = state.counts().resident + state.loads.pages();
            let used = (pages * PAGE_SIZE) as u64 + self.inner.own_bytes();
            self.tell_use(&state);
            (used.saturating_sub(limit - margin(limit)), !state.advised.out.is_empty())
        };
        if over == 0 && !wanted {
            self.inner.store.tidy();
            return Duration::from_millis(5);
        }
        let mut outcome = self.batch(batch_pages(over, limit, self.tries));
        self.waits = if outcome == Outcome::Waits { self.waits.saturating_add(1) } else { 0 };
        if self.waits >= MAX_WAITS {
            outcome = Outcome::Nothing;
        }
        // Not where something waits for as long as a program wants: no fault is to wait for that.
        if outcome == Outcome::Nothing && self.waiting.is_empty() && self.inner.lock().is_passing()
        {
            outcome = Outcome::Again;
        }
        if over > 0 && matches!(outcome, Outcome::Nothing | Outcome::Full) {
            self.inner.lock().stuck_until = Some(Instant::now() + FULL_BACKOFF);
        }
        self.inner.tell_room();
        match outcome {
            Outcome::Out(_) | Outcome::Waits => Duration::ZERO,
            Outcome::Again => Duration::from_micros(200),
            Outcome::Nothing => Duration::from_millis(5),
            Outcome::Full => {
                self.inner.count(Counter::SwapFull, 1);
                FULL_BACKOFF
            }
        }
    }

    fn batch(&mut self, pages: usize) -> Outcome {
        if self.huge_pages.come_unasked() {
            self.keep_all();
            return Outcome::Nothing;
        }
        let mut batch = match self.protect(pages) {
            Ok(Some(batch)) => batch,
            Ok(None) => return Outcome::Nothing,
            Err(_) => {
                self.tries = self.tries.saturating_add(1);
                return Outcome::Again;
            }
        };
        self.leave_exempted(&mut batch);
        if batch.runs.is_empty() {
            return Outcome::Waits;
        }
        let mut stored = Vec::with_capacity(batch.pages());
        if !self.store(&batch, &mut stored) {
            stored.iter().for_each(|stored| self.drop_stored(stored));
            self.unprotect(&mut self.inner.lock(), &batch);
            return Outcome::Nothing;
        }
        let full = !stored.is_empty() && stored.iter().all(|stored| stored.put == PutOutcome::Full);
        match self.finish(&batch, &stored) {
            Some(out) => {
                self.tries = 0;
                if full { Outcome::Full } else { Outcome::Out(out) }
            }
            None => {
                self.tries = self.tries.saturating_add(1);
                self.inner.lock().want_again(batch.wanted);
                Outcome::Again
            }
        }
    }

    /// Reads the pages of a batch and puts them away. False when one of its regions is gone.
    fn store(&mut self, batch: &ReclaimBatch, stored: &mut Vec<Stored>) -> bool {
        self.buffer.resize(batch.pages() * PAGE_SIZE, 0);
        let mut at = 0;
        let mut for_file: Vec<(usize, Slot, usize)> = Vec::new();
        for (id, run) in &batch.runs {
            let bytes = at * PAGE_SIZE..(at + run.len()) * PAGE_SIZE;
            let found = self
                .inner
                .lock()
                .regions
                .get(id)
                .map(|region| (region.memory.clone(), region.base));
            let Some((memory, base)) = found else { return false };
            if memory
                .read_exact_at(&mut self.buffer[bytes.clone()], (run.start * PAGE_SIZE) as u64)
                .is_err()
            {
                return false;
            }
            let (pages, _) = self.buffer[bytes].as_chunks::<PAGE_SIZE>();
            for (page, data) in run.clone().zip(pages) {
                let slot = Slot(base + page as u32);
                let put = self.inner.store.put(slot, data, &mut self.compressor);
                match put {
                    PutOutcome::Poor => self.inner.count(Counter::RejectCompressPoor, 1),
                    PutOutcome::Refused(at_limit) => {
                        self.inner.count(Counter::RejectPoolFull, 1);
                        self.inner.count(Counter::PoolLimitHit, at_limit.into());
                    }
                    PutOutcome::In(_) | PutOutcome::Full => {}
                }
                if matches!(put, PutOutcome::Poor | PutOutcome::Refused(_)) {
                    for_file.push((stored.len(), slot, at));
                }
                stored.push(Stored { region: *id, page, at, slot, put });
                at += 1;
            }
        }
        let (pages, _) = self.buffer.as_chunks::<PAGE_SIZE>();
        for some in for_file.chunks(WRITEBACK_BATCH_PAGES) {
            let batch: Vec<(Slot, &Page)> =
                some.iter().map(|(_, slot, at)| (*slot, &pages[*at])).collect();
            let written = self.inner.store.write(&batch);
            if !written {
                self.inner.count(Counter::WriteErrors, 1);
            }
            for (number, slot, at) in some {
                stored[*number].put = match written {
                    true => PutOutcome::In(RegionPage::Area),
                    false => self.inner.store.keep(*slot, &pages[*at], &mut self.compressor),
                };
            }
        }
        true
    }

    /// Writes the oldest pages of compressed memory to the file. False when there was nothing to
    /// write, or it failed.
    fn write_back(&mut self) -> bool {
        let mut chosen: Vec<(RegionId, usize, Slot, u32)> = Vec::new();
        {
            let mut state = self.inner.lock();
            while chosen.len() < WRITEBACK_BATCH_PAGES {
                let Some((id, chunk)) = state.pool_log.pop_front() else { break };
                let Some(region) = state.regions.get_mut(&id) else { continue };
                region.chunk(chunk as usize).logged = false;
                let epoch = region.chunk(chunk as usize).epoch;
                for page in region
                    .chunk_pages(chunk as usize)
                    .filter(|page| region.state(*page) == RegionPage::Pool)
                {
                    chosen.push((id, page, region.slot(page), epoch));
                }
            }
        }
        if chosen.is_empty() {
            return false;
        }
        let slots: Vec<Slot> = chosen.iter().map(|(_, _, slot, _)| *slot).collect();
        let copied = self.inner.store.copy_back(&slots, &mut self.unpacker);
        let mut state = self.inner.lock();
        let mut counts = state.counts();
        let moved = copied.iter().filter(|copied| **copied).count();
        counts.file += moved;
        self.inner.publish(&counts);
        let mut again: Vec<(RegionId, usize)> = Vec::new();
        for ((id, page, slot, epoch), copied) in chosen.into_iter().zip(copied) {
            let chunk = page / PAGES_PER_CHUNK;
            // Whether nothing of its chunk has come in meanwhile, if the page itself has not.
            let is_same = state.regions.get_mut(&id).and_then(|region| {
                let is_pooled = region.slot(page) == slot && region.state(page) == RegionPage::Pool;
                is_pooled.then(|| region.chunk(chunk).epoch == epoch)
            });
            if copied && is_same == Some(true) {
                self.inner.store.free(slot, RegionPage::Pool);
                if let Some(region) = state.regions.get_mut(&id) {
                    region.set(page, RegionPage::Area);
                }
                self.inner.count(Counter::Zswpwb, 1);
                self.inner.count(Counter::Pswpout, 1);
                continue;
            }
            if copied {
                self.inner.store.free(slot, RegionPage::Area);
            }
            if is_same.is_some() {
                // What stays in compressed memory is to be met again.
                again.push((id, chunk));
            }
        }
        if moved == 0 {
            self.inner.count(Counter::WriteErrors, 1);
        }
        for (id, chunk) in again {
            self.log_chunk(&mut state, id, chunk);
        }
        self.inner.publish(&state.counts());
        drop(state);
        self.inner.store.tidy();
        moved > 0
    }

    fn set_pool_limit(&self, limit: u64) {
        let percent = match self.inner.segment.header.pool.percent.load(Relaxed) {
            0 => 60,
            percent => u64::from(percent),
        };
        self.inner.store.set_pool_limit(limit, percent);
    }

    /// Nothing goes out any more of what there is now: it may consist of huge pages.
    fn keep_all(&self) {
        let mut kept = 0;
        for region in self.inner.lock().regions.values_mut() {
            kept += usize::from(!std::mem::replace(&mut region.kept, true));
        }
        if kept > 0 {
            (self.inner.log)(
                "shared memory: the kernel gives it huge pages unasked, and parts of those cannot \
                 go out: it stays in memory; set transparent_hugepage/shmem_enabled to never or \
                 advise",
            );
        }
    }

    /// Publishes what the memory controller and the report ask for.
    fn tell_use(&self, state: &PagerState) {
        let slot = self.inner.segment.slot(self.inner.index);
        let counts = state.counts();
        slot.usage.managed_bytes.store((counts.resident * PAGE_SIZE) as u64, Relaxed);
        slot.usage.pool_bytes.store(self.inner.store.pool_bytes() as u64, Relaxed);
        slot.usage.overhead_bytes.store(self.inner.store.metadata_bytes() as u64, Relaxed);
    }

    fn log_chunk(&self, state: &mut PagerState, id: RegionId, chunk: usize) {
        if let Some(region) = state.regions.get_mut(&id)
            && !std::mem::replace(&mut region.chunk(chunk).logged, true)
        {
            state.pool_log.push_back((id, chunk as u32));
        }
    }

    /// Chooses pages that were asked for, and `most` of others, and protects them. `None` when
    /// nothing may go out; an error when some address space is changing.
    fn protect(&mut self, most: usize) -> Result<Option<ReclaimBatch>, Errno> {
        let now = Instant::now();
        self.waiting.retain(|_, until| *until > now);
        let inner = Arc::clone(&self.inner);
        let mut state = inner.lock();
        // The kernel refuses what is to be done in one that is changing, and no fault is answered.
        self.answers.settle(&mut state, |_| true);
        let mut runs: Vec<(RegionId, Range<usize>)> = Vec::new();
        let mut count = 0;
        let mut forbidden = state.forbidden();
        forbidden.extend(self.waiting.keys());
        let held = state.held_pages();
        let stays = |id: RegionId, chunk: u32| {
            let pages = chunk as usize * PAGES_PER_CHUNK..(chunk as usize + 1) * PAGES_PER_CHUNK;
            let overlaps = |(region, held): &(RegionId, Range<usize>)| {
                *region == id && held.start < pages.end && pages.start < held.end
            };
            forbidden.contains(&id) || held.iter().any(overlaps)
        };
        let (mut wanted, mut later) = (Vec::new(), Vec::new());
        while count < MAX_BATCH_PAGES
            && let Some((id, chunk)) = state.advised.out.pop_front()
        {
            let Some(region) = state.regions.get_mut(&id) else { continue };
            let marks = region.chunk(chunk as usize);
            marks.wanted = false;
            if marks.stays {
                continue;
            }
            if stays(id, chunk) {
                later.push((id, chunk));
                continue;
            }
            count += take_chunk(region, chunk as usize, none_stays, &mut runs);
            wanted.push((id, chunk));
        }
        // What will soon be allowed waits for it; what will not was asked for in vain.
        if !state.is_passing() {
            later.retain(|(id, _)| self.waiting.contains_key(id));
        }
        state.want_again(later);
        // With none that may, the queue would only be turned round.
        let may_any = state.regions.keys().any(|id| !forbidden.contains(id));
        // Where nothing is found but pages that stay for some rounds, the oldest of them go.
        for (pass, pass_over) in [ChunkHeat::pass_over, none_stays].into_iter().enumerate() {
            let PagerState { regions, order: ReclaimOrder { queue, .. }, .. } = &mut *state;
            let mut left = if may_any && (pass == 0 || count == 0) { queue.len() } else { 0 };
            while count < most.min(MAX_BATCH_PAGES) && left > 0 {
                left -= 1;
                let Some((id, chunk)) = queue.pop_front() else { break };
                let Some(region) = regions.get_mut(&id) else { continue };
                if !region.chunk(chunk as usize).stays && !stays(id, chunk) {
                    count += take_chunk(region, chunk as usize, pass_over, &mut runs);
                }
                let some = region
                    .chunk_pages(chunk as usize)
                    .any(|page| region.state(page) == RegionPage::Present);
                let marks = region.chunk(chunk as usize);
                let is_twice = std::mem::take(&mut marks.ahead) && marks.queued;
                if !is_twice {
                    marks.queued = some;
                    queue.extend(some.then_some((id, chunk)));
                }
            }
        }
        self.inner.count(Counter::Pgscan, count as u64);
        if count == 0 {
            return Ok(None);
        }
        let batch = ReclaimBatch { runs, wanted, generation: state.generation };
        let ids: Vec<SpaceId> = state.spaces.keys().copied().collect();
        for id in ids {
            let space = &state.spaces[&id];
            let protect = |(region, run): &(RegionId, Range<usize>)| {
                space
                    .addresses(*region, run)
                    .find_map(|range| space.uffd.write_protect(range, true).err())
            };
            match batch.runs.iter().find_map(protect) {
                None => {}
                Some(Errno::SRCH) => {
                    // Gone, and with it every writer.
                    self.unprotect(&mut state, &batch);
                    state.want_again(batch.wanted);
                    self.inner.forget_space(&mut state, id);
                    return Err(Errno::SRCH);
                }
                Some(errno) => {
                    if errno != Errno::AGAIN {
                        self.inner.learn(&mut state, id);
                    }
                    self.unprotect(&mut state, &batch);
                    state.want_again(batch.wanted);
                    return Err(errno);
                }
            }
        }
        Ok(Some(batch))
    }

    /// Takes the regions out of a batch that are mapped by a process which may write past its page
    /// tables, or to which another one may: they wait. It does not ask for the others.
    fn leave_exempted(&mut self, batch: &mut ReclaimBatch) {
        let began = Instant::now();
        let of_batch: HashSet<RegionId> = batch.runs.iter().map(|(id, _)| *id).collect();
        let mappers: Vec<(u32, HashSet<RegionId>)> = {
            let state = self.inner.lock();
            let mapped = |space: &Space| {
                let regions = space.layout.iter().map(|piece| piece.region).collect();
                Some((space.pid?, regions)).filter(|(_, regions)| !of_batch.is_disjoint(regions))
            };
            state.spaces.values().filter_map(mapped).collect()
        };
        let writers = self.past_writers.look(self.inner.segment);
        // All of a process's: else each of them would have it asked again.
        let mut waiting: HashSet<RegionId> = HashSet::new();
        for (pid, regions) in mappers {
            let is_written = || writers.iter().any(|writer| may_write_to(*writer, pid));
            if !regions.is_subset(&waiting) && (is_written() || pinned(pid).is_some()) {
                waiting.extend(regions);
            }
        }
        if waiting.is_empty() {
            return;
        }
        let now = Instant::now();
        let until = now + EXEMPT_TIME.max((now - began) * EXEMPT_REST);
        self.waiting.extend(waiting.iter().map(|id| (*id, until)));
        let is_waiting = |(id, _): &mut (RegionId, Range<usize>)| waiting.contains(id);
        let rest = ReclaimBatch {
            runs: batch.runs.extract_if(.., is_waiting).collect(),
            wanted: Vec::new(),
            generation: batch.generation,
        };
        batch.wanted.retain(|(id, _)| !waiting.contains(id));
        self.inner.count(Counter::PagesBusy, rest.pages() as u64);
        self.unprotect(&mut self.inner.lock(), &rest);
    }

    /// Nothing of a batch goes out.
    fn unprotect(&self, state: &mut PagerState, batch: &ReclaimBatch) {
        for (id, run) in &batch.runs {
            if let Some(region) = state.regions.get_mut(id) {
                for page in run.clone() {
                    if region.state(page) == RegionPage::Leaving {
                        region.set(page, RegionPage::Present);
                    }
                }
            }
            self.lift(state, *id, run);
            for chunk in run.start / PAGES_PER_CHUNK..run.end.div_ceil(PAGES_PER_CHUNK) {
                let some = |region: &crate::region::Region| {
                    region.chunk_pages(chunk).any(|page| region.state(page).is_in())
                };
                if state.regions.get(id).is_some_and(some) {
                    state.enqueue(*id, chunk);
                }
            }
        }
    }

    /// Lifts protection, which wakes waiting threads. Where it cannot be lifted now, they are woken
    /// all the same: the next write faults and lifts it.
    fn lift(&self, state: &PagerState, id: RegionId, run: &Range<usize>) {
        for space in state.spaces.values() {
            for range in space.addresses(id, run) {
                if space.uffd.write_protect(range, false).is_err() {
                    let _ = space.uffd.wake(range);
                }
            }
        }
    }

    /// Frees what a page was put into that does not go out. Its slot may be another region's by
    /// now, of which nothing can be stored there: only this thread stores.
    fn drop_stored(&self, stored: &Stored) {
        if let PutOutcome::In(place) = stored.put {
            self.inner.store.free(stored.slot, place);
        }
    }

    /// Takes stored pages out of the memory files. `None` when something changed meanwhile, and
    /// nothing went out.
    fn finish(&mut self, batch: &ReclaimBatch, stored: &[Stored]) -> Option<usize> {
        let inner = Arc::clone(&self.inner);
        let mut state = inner.lock();
        let concerned = |id: &RegionId| batch.runs.iter().any(|(region, _)| region == id);
        let is_mapped = |space: &Space| space.layout.iter().any(|piece| concerned(&piece.region));
        // What is read now and changes where something is mapped makes another generation.
        let quiet =
            self.answers.settle(&mut state, is_mapped) && state.generation == batch.generation;
        let mut outs: Vec<(&Stored, RegionPage)> = Vec::new();
        for stored in stored {
            let PutOutcome::In(place) = stored.put else { continue };
            let (id, page) = (stored.region, stored.page);
            if quiet
                && state
                    .regions
                    .get(&id)
                    .is_some_and(|region| region.state(page) == RegionPage::Leaving)
            {
                outs.push((stored, place));
            } else {
                self.drop_stored(stored);
            }
        }
        // Known to be out before it is.
        let mut counts = state.counts();
        for (_, place) in &outs {
            match place {
                RegionPage::Area => counts.file += 1,
                _ => counts.pool += 1,
            }
        }
        self.inner.publish(&counts);
        let mut out = 0;
        for run in outs.chunk_by(|(a, _), (b, _)| a.is_before(b)) {
            out += self.take_out(&mut state, run);
        }
        state.order.clock = state.order.clock.wrapping_add(out as u32);
        self.unprotect(&mut state, batch);
        self.inner.publish(&state.counts());
        // After the page is no longer counted as there.
        self.inner.count(Counter::Pgsteal, out as u64);
        self.tell_use(&state);
        quiet.then_some(out)
    }

    /// Takes a run of pages out.
    fn take_out(&self, state: &mut PagerState, run: &[(&Stored, RegionPage)]) -> usize {
        let clock = state.order.clock;
        let (first, id) = (run[0].0, run[0].0.region);
        let Some(region) = state.regions.get_mut(&id) else { return 0 };
        let pages = first.page..first.page + run.len();
        let punched = punch(&region.memory, &pages);
        if punched.is_err() || !is_hole(&region.memory, &pages) {
            // A part of a huge page that could not be split was cleared, not punched: it gets back
            // what was read of it, and stays.
            let read = &self.buffer[first.at * PAGE_SIZE..(first.at + run.len()) * PAGE_SIZE];
            if write_pages(&region.memory, pages.start, read).is_err() {
                swaptide_sys::thread::abort_with(&[
                    b"swaptide: shared memory could not be put back; stopped",
                ]);
            }
            region.kept = true;
            for (stored, place) in run {
                self.inner.store.free(stored.slot, *place);
            }
            return 0;
        }
        let mut logged = Vec::new();
        for (Stored { page, .. }, place) in run {
            region.goes(*page, *place, clock);
            match place {
                RegionPage::Zero => self.inner.count(Counter::SwpoutZero, 1),
                RegionPage::Pool => {
                    self.inner.count(Counter::Zswpout, 1);
                    logged.push(page / PAGES_PER_CHUNK);
                }
                _ => self.inner.count(Counter::Pswpout, 1),
            }
        }
        logged.dedup();
        for chunk in logged {
            self.log_chunk(state, id, chunk);
        }
        let chunk_of = |page: usize| page / PAGES_PER_CHUNK;
        for chunk in run.chunk_by(|(a, _), (b, _)| chunk_of(a.page) == chunk_of(b.page)) {
            let on_area = chunk.iter().filter(|(_, place)| *place == RegionPage::Area).count();
            let of_order = match on_area {
                _ if chunk.len() < PAGES_PER_CHUNK => continue,
                0 => OfOrder::Zswpout,
                PAGES_PER_CHUNK => OfOrder::Swpout,
                _ => continue,
            };
            if let Some(counter) = of_order.counter(CHUNK_ORDER) {
                self.inner.count(counter, 1);
            }
        }
        run.len()
    }
}

/// The pages to take for `over` bytes too many; 0 for none. `tries`: batches in a row under which
/// something changed; the longer one takes, the sooner that happens.
///
/// No fewer than a part of the margin: most of what a batch costs are questions to the kernel about
/// each process that has the memory mapped, however many pages it is of.
fn batch_pages(over: u64, limit: u64, tries: u32) -> usize {
    if over == 0 {
        return 0;
    }
    let part = (margin(limit) / LEAST_BATCH_DIVISOR / PAGE_SIZE as u64).min(LEAST_BATCH_PAGES);
    let pages = (over / PAGE_SIZE as u64).max(part).min(MAX_BATCH_PAGES as u64);
    (pages >> tries.min(u64::BITS - 1)).max(PAGES_PER_CHUNK as u64) as usize
}

/// No page stays for its rounds.
fn none_stays(heat: &mut ChunkHeat, pages: u16) -> u16 {
    heat.end_rounds(pages);
    0
}

/// Makes the pages of a chunk leave that are there, but for those that `pass_over` says are to
/// stay; gives their number.
fn take_chunk(
    region: &mut Region,
    chunk: usize,
    pass_over: fn(&mut ChunkHeat, u16) -> u16,
    runs: &mut Vec<(RegionId, Range<usize>)>,
) -> usize {
    if chunk >= region.chunk_count() {
        return 0;
    }
    let pages = region.chunk_pages(chunk);
    let present = |page: &usize| region.state(*page) == RegionPage::Present;
    let there = pages.clone().filter(present).fold(0, |mask, page| mask | bit(page));
    let go = there & !pass_over(&mut region.chunk(chunk).heat, there);
    for page in pages.filter(|page| go & bit(*page) != 0) {
        region.set(page, RegionPage::Leaving);
        match runs.last_mut() {
            Some((other, last)) if *other == region.id && last.end == page => last.end += 1,
            _ => runs.push((region.id, page..page + 1)),
        }
    }
    go.count_ones() as usize
}

#[cfg(test)]
mod tests;
