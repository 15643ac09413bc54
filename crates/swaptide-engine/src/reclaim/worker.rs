//! Reclaim: which thread takes memory out of the program, and when.
//!
//! Pages leave in batches ([`crate::reclaim::swap_out`]). Taking one is a matter of page tables,
//! storing it one of compression. Where pages lie scattered, a move costs an interruption of every
//! CPU that runs the process: so the *handler* takes those batches, on the CPU of the thread whose
//! faults it answers, while the worker sleeps, and the worker stores them. Dense batches need few
//! moves; the worker takes them itself. When room runs short, the thread that notices does both.
//!
//! | thread | takes | stores |
//! |---|---|---|
//! | worker | dense batches below the high mark, any below half the low mark | whatever waits |
//! | handler, after a fault ([`Worker::balance`]) | below the high mark, when nothing is in flight | |
//! | handler, before a fill ([`Worker::step`]) | when there is no room | what it took, or what waits |
//!
//! Owns: a compressor and an unpacker, and the thread's part in recompression and write-back.
//!
//! Worker 0 also keeps the accounts ([`Worker::run`]), requests adoption, moves the division
//! between resident and compressed memory ([`crate::memcg::pool_sizing`]) and writes back.

use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use swaptide_ipc::{Counter, MAX_GROWTH_BYTES_PER_S};
use swaptide_store::codec::{Compressor, Scheme, Unpacker};
use swaptide_store::zram::Zram;
use swaptide_sys::AsFd;
use swaptide_sys::lock::futex;
use swaptide_sys::mem::{Advice, Mapping, advise};
use swaptide_sys::page::PAGE_SIZE;
use swaptide_sys::process::StatmFd;
use swaptide_sys::sock::poll_readable;
use swaptide_sys::thread::{Nanos, gettid, now, yield_now};

use crate::engine::{Engine, Mm};
use crate::fault_injection;
use crate::mm::batch::Batch;
use crate::mm::types::{ChunkNo, MIN_BYTES, range_of};
use crate::reclaim::copies;
use crate::reclaim::idle::IdleDetector;
use crate::reclaim::recompress::Recompress;
use crate::reclaim::unarmed::Seen;
use crate::reclaim::writeback::Writeback;
use crate::requests::HandlerRequest;
use crate::sched::handler_cpu::{self, NO_CPU, WorkerAffinity};

/// Looks for memory to adopt may take a sixteenth of the time, a third while they find some.
const ADOPT_TIME_DIVISOR: u64 = 16;
const ADOPT_TIME_DIVISOR_GROWN: u64 = 3;
/// The interval at which an idle worker checks the accounts.
const TICK: Duration = Duration::from_millis(20);
/// The same while the limit is near.
const TICK_NEAR_LIMIT: Duration = Duration::from_millis(1);
/// The same while a thread faults again and again with the handler on its CPU: a thread that wakes
/// up, if only for a check, may part the two.
const TICK_SINGLE_FAULTER: Duration = Duration::from_millis(4);
/// A handler that neither waits nor reads for so long starves, or does something long, and then it
/// is no harm if it does it in the normal class.
const STARVED_HANDLER_TIME: Duration = Duration::from_millis(3);
/// The shortest interval between two changes of the division into resident and compressed memory.
const DIVISION_INTERVAL: Duration = Duration::from_millis(10);
/// Bytes that compressed memory may waste, beyond a part of what it stores, before it is made
/// compact: this part, or half of it while no thread wants anything.
const COMPACT_SLACK_BYTES: usize = 1 << 20;
const HOLES_DIVISOR: usize = 16;
/// Bytes that are moved at a time then.
const COMPACT_STEP_BYTES: usize = 512 << 10;
/// Where that frees less than this part of them, compaction rests for some intervals.
const COMPACT_WORTH_DIVISOR: usize = 8;
const COMPACT_REST: u32 = 8;
/// Compressed memory smaller than this part of the limit is not made smaller for its own sake, and
/// not written back when nothing can be taken.
pub(crate) const MIN_POOL_DIVISOR: u64 = 16;
/// Batches that may wait for a worker.
const MAX_QUEUED_BATCHES: usize = 2;

/// Chunks the sharing of whose pages is broken at a time.
const UNSHARE_BATCH_CHUNKS: usize = 16;
/// Chunks with shared pages that are looked at again at a time.
const MAX_REVIEWED_CHUNKS: usize = 512;
/// The same where there is nothing else to take, and under one hold of the lock.
const REVIEWED_CHUNKS_PER_HOLD: usize = 64;
/// The interval between two checks while there is nothing else to take.
const REVIEW_INTERVAL: Duration = Duration::from_millis(1);
/// Of the pages that arrived, at most this many count when pages are to be copied.
const MAX_COUNTED_PAGES: u64 = 1024;
/// So often in a row may breaking the sharing of pages lead to nothing: something else holds them
/// (pinned for input or output, say).
const MAX_FAILED_UNSHARES: u32 = 4;
/// Then sharing is broken only this often.
const UNSHARE_BACKOFF: Duration = Duration::from_millis(100);

/// The result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// This many pages left the program.
    Took(usize),
    /// Nothing could be taken before the handler has read what the program did to its mappings.
    Again,
    /// There is nothing that can be taken.
    Nothing,
}

/// Takes pages out: the work of one thread, or of the handler in its stead.
pub struct Worker {
    compressor: Compressor,
    unpacker: Unpacker,
    recompress: Recompress,
    writeback: Writeback,
    /// The number of times in a row that sharing was broken and nothing could be taken.
    failed_unshares: u32,
    /// When sharing was broken last.
    unshared_at: Nanos,
    /// When pages were looked at again last, for want of others.
    looked_at: Nanos,
    /// True if the last call of `take` looked for chunks.
    tried: bool,
    /// The armed mappings found.
    seen: Seen,
}

impl Worker {
    /// A worker with its buffers.
    pub fn new(scheme: Scheme) -> Worker {
        Worker {
            compressor: Compressor::new(scheme),
            unpacker: Unpacker::new(),
            recompress: Recompress::new(),
            writeback: Writeback::new(),
            failed_unshares: 0,
            unshared_at: Nanos(0),
            looked_at: Nanos(0),
            tried: false,
            seen: Seen::default(),
        }
    }

    /// Stores a batch that waits, or takes one and stores it.
    pub fn step(&mut self, engine: &Engine) -> Step {
        self.step_of(engine, engine.charge.batch_chunks())
    }

    /// The same, with at most `want` chunks in a batch.
    pub(crate) fn step_of(&mut self, engine: &Engine, want: usize) -> Step {
        let batch = {
            let mut mm = engine.mm.lock();
            match mm.jobs.longest_waiting() {
                Some(batch) => batch,
                None => match self.take(engine, &mut mm, want) {
                    Ok(batch) => batch,
                    Err(step) => return step,
                },
            }
        };
        Step::Took(self.store(engine, batch))
    }

    /// Stores one batch that waits. False when there is none.
    pub(crate) fn store_waiting(&mut self, engine: &Engine) -> bool {
        let batch = engine.mm.lock().jobs.longest_waiting();
        match batch {
            Some(batch) => {
                self.store(engine, batch);
                true
            }
            None => false,
        }
    }

    /// Called by the handler when it has answered: takes a batch for the workers, if room gets
    /// short and they have nothing to do.
    pub(crate) fn balance(&mut self, engine: &Engine) {
        let charge = &engine.charge;
        if charge.room() >= charge.goal() || engine.workers.quiesce.load(Acquire) != 0 {
            return;
        }
        let mut mm = engine.mm.lock();
        let urgent = charge.room() < charge.goal() / 2
            && mm.jobs.in_flight < MAX_QUEUED_BATCHES * crate::mm::types::PAGES_PER_LEAF;
        if mm.jobs.in_flight > 0 && !urgent {
            return;
        }
        if let Ok(batch) = self.take(engine, &mut mm, charge.batch_chunks()) {
            mm.jobs.push(batch);
            engine.publish_usage(&mm);
            drop(mm);
            engine.call_workers();
        }
    }

    fn take(&mut self, engine: &Engine, mm: &mut Mm, want: usize) -> Result<Box<Batch>, Step> {
        self.tried = false;
        if engine.is_full(mm) {
            return Err(Step::Nothing);
        }
        let mut batch = mm.jobs.blank();
        let taken = batch.take(engine, mm, &mut self.seen, want);
        self.tried = batch.tried();
        let refused = batch.refused();
        if taken > 0 {
            return Ok(batch);
        }
        mm.jobs.retire(batch);
        Err(if refused { Step::Again } else { Step::Nothing })
    }

    fn store(&mut self, engine: &Engine, mut batch: Box<Batch>) -> usize {
        let pages = batch.pages();
        batch.store(engine, &mut self.compressor, &mut self.unpacker);
        let mut mm = engine.mm.lock();
        batch.finish(engine, &mut mm);
        mm.jobs.retire(batch);
        while let Some(discard) = mm.staging.spare(engine.charge.keep_frames()) {
            engine.publish_usage(&mm);
            drop(mm);
            discard.release_frames();
            mm = engine.mm.lock();
            mm.staging.discarded(discard);
        }
        engine.publish_usage(&mm);
        let present = mm.table.present();
        drop(mm);
        // What went out is no longer there when it is counted: the controller adds both up.
        engine.publish_present(present);
        engine.count(Counter::Pgsteal, pages);
        pages
    }

    /// Moves one batch of compressed pages to a swap area. False when there was nothing to move or
    /// nowhere to put it.
    pub fn write_back(&mut self, engine: &Engine) -> bool {
        let charge = &engine.charge;
        let may = charge.cow_group.may_write_back()
            || charge.pool() > charge.pool_bound()
            || charge.pool_refuses()
            || engine.devices.pool.is_scarce();
        may && self.writeback.step(engine, &mut self.unpacker)
    }

    /// Makes compressed memory smaller when it is near its share or past it: first by better
    /// compression, then by what goes to a swap area; where it is far past, by both. False when
    /// there is nothing to do, or nothing more can be done.
    fn shrink_pool(&mut self, engine: &Engine) -> bool {
        let charge = &engine.charge;
        let (pool, most) = (charge.pool(), charge.pool_goal());
        if engine.devices.pool.is_scarce() && engine.devices.is_backed() {
            return self.write_back(engine);
        }
        if pool < most / 4 * 3 {
            return false;
        }
        let better = !charge.cow_group.is_active()
            && self.recompress.step(engine, &mut self.compressor, &mut self.unpacker);
        let hurries = charge.pool_overflows() || charge.pool_refuses();
        let written = pool > most && (!better || hurries) && self.write_back(engine);
        better || written
    }

    /// Makes compressed memory smaller while no thread wants anything, so that there is room when
    /// one does. False when nothing is cold.
    fn recompress_some(&mut self, engine: &Engine) -> bool {
        let pool = &engine.devices.pool;
        if self.recompress.step(engine, &mut self.compressor, &mut self.unpacker) {
            return true;
        }
        // What it freed lies in holes.
        has_holes(pool, 2 * HOLES_DIVISOR) && pool.compact(COMPACT_STEP_BYTES) > 0
    }

    /// Breaks the sharing of pages that a fork left shared, so that the next batch can take them.
    /// Never in the handler itself: [`fault_for_writing`]. False when there is none.
    ///
    /// Each costs a page until it is out, so they are the next to go: were they to wait for their
    /// turn, all that is shared would be there twice before any of it had left.
    fn unshare(&mut self, engine: &Engine, needs: bool) -> bool {
        if self.failed_unshares >= MAX_FAILED_UNSHARES
            && now().since(self.unshared_at) < UNSHARE_BACKOFF
        {
            return false;
        }
        self.unshared_at = now();
        let mut chunks = [(ChunkNo(0), 0u16); UNSHARE_BATCH_CHUNKS];
        let (mut n, mut copied, mut made_own) = (0, 0, 0);
        let forks = {
            let mut guard = engine.mm.lock();
            let mm = &mut *guard;
            mm.clocks.copied_for =
                mm.clocks.copied_for.max(mm.clocks.arrived.saturating_sub(MAX_COUNTED_PAGES));
            for _ in 0..REVIEWED_CHUNKS_PER_HOLD {
                if n == UNSHARE_BATCH_CHUNKS || !needs && mm.clocks.copied_for >= mm.clocks.arrived
                {
                    break;
                }
                let Some(chunk) = mm.queues.next_shared(&mut mm.table) else { break };
                let own = mm.review(chunk);
                let others = mm.table.unshare(chunk);
                if own | others != 0 {
                    chunks[n] = (chunk, own | others);
                    n += 1;
                    copied += others.count_ones() as usize;
                    made_own += own.count_ones() as usize;
                    mm.clocks.copied_for += u64::from(others.count_ones());
                }
            }
            mm.clocks.forks
        };
        engine.count(Counter::PagesUnshared, copied);
        engine.count(Counter::EngineFaults, made_own);
        fault_for_writing(engine, &chunks[..n], forks);
        n > 0
    }

    /// True when little is left to take but what other processes have, too.
    fn is_short_of_own(engine: &Engine) -> bool {
        let mm = engine.mm.lock();
        let shared = mm.table.shared();
        // What it has for itself alone goes out first, until that is less than what it shares.
        shared > 0 && (mm.table.present() - shared) < shared
    }

    /// Returns the result of a step, after breaking the sharing that kept it from taking more.
    ///
    /// What a process has for itself goes first. To take out what another has, too, frees nothing
    /// until that one does so as well, and costs a copy: it takes from the others what they were
    /// lent. So it is done for the sake of what comes alone, a page for a page, and until the
    /// process has a little of its own to exchange; and where it is past its limit with nothing
    /// else to take.
    fn after_unsharing(&mut self, engine: &Engine, step: Step) -> Step {
        match step {
            Step::Took(_) => {
                if Worker::is_short_of_own(engine) {
                    self.unshare(engine, false);
                }
                self.failed_unshares = 0;
            }
            // Where nothing can be stored, or an event is to be read first, it is not for what is
            // shared that nothing was taken.
            Step::Nothing if self.tried => {
                if now().since(self.looked_at) >= REVIEW_INTERVAL {
                    self.looked_at = now();
                    if look_again(engine, REVIEWED_CHUNKS_PER_HOLD) {
                        return Step::Again;
                    }
                }
                if self.unshare(engine, engine.charge.headroom() < 0) {
                    self.failed_unshares += 1;
                    if self.failed_unshares < MAX_FAILED_UNSHARES {
                        return Step::Again;
                    }
                }
            }
            Step::Nothing | Step::Again => {}
        }
        step
    }

    /// The life of a background worker, until the program is detached. Worker 0 looks after the
    /// accounts.
    pub fn run(&mut self, engine: &Engine, index: usize) {
        let mut housekeeping = (index == 0).then(Housekeeping::new);
        let mut affinity = WorkerAffinity::new();
        let placed = engine.workers.tids.get(index);
        if let Some(placed) = placed {
            placed.store(gettid().0, Relaxed);
        }
        engine.workers.awake.fetch_add(1, Relaxed);
        loop {
            if !engine.quiescent_point() {
                if let Some(placed) = placed {
                    placed.store(0, Relaxed);
                }
                engine.workers.awake.fetch_sub(1, Relaxed);
                return;
            }
            affinity.keep_from(engine.serving.handler.cpu.load(Relaxed));
            affinity.yield_now(engine.single_faulter());
            if let Some(housekeeping) = &mut housekeeping {
                housekeeping.watch(engine);
                housekeeping.look(engine);
            }
            if engine.injection().churns_own_mappings() {
                map_and_unmap(engine);
            }
            let idle = self.work(engine, housekeeping.as_mut());
            if idle {
                let tick = tick(engine, housekeeping.is_some());
                engine.workers.work.store(0, Release);
                if !engine.mm.lock().jobs.any() {
                    engine.workers.awake.fetch_sub(1, Relaxed);
                    futex::wait(&engine.workers.work, 0, Some(tick), futex::Scope::Private);
                    engine.workers.awake.fetch_add(1, Relaxed);
                }
            }
        }
    }

    /// Works until there is nothing to do, or, with the accounts to keep, for about a millisecond:
    /// a program that grows in new mappings is seen by them alone. True when there is nothing more
    /// to do.
    fn work(&mut self, engine: &Engine, mut housekeeping: Option<&mut Housekeeping>) -> bool {
        let charge = &engine.charge;
        let brief = housekeeping.is_some();
        let began = now();
        let over = || {
            brief && now().since(began) >= TICK_NEAR_LIMIT
                || engine.workers.quiesce.load(Acquire) != 0
        };
        // One that keeps the accounts leaves it to others, where there are any.
        let servers = engine.serving.servers.started();
        let workers = engine.workers.running.load(Relaxed).saturating_sub(servers);
        let releases = !brief || workers < 2;
        while !over() {
            let has_released = releases && engine.devices.areas.device.release_one_extent();
            if self.store_waiting(engine) {
                continue;
            }
            if engine.is_reclaim_due(&engine.mm.lock()) {
                let step = self.step(engine);
                match self.after_unsharing(engine, step) {
                    Step::Took(_) => continue,
                    Step::Again => {
                        yield_now();
                        continue;
                    }
                    Step::Nothing if charge.headroom() < 0 => {
                        let mut mm = engine.mm.lock();
                        mm.staging.trim(0);
                        engine.publish_usage(&mm);
                    }
                    Step::Nothing => {}
                }
            }
            if self.shrink_pool(engine) || brief && engine.devices.areas.leave_areas() {
                continue;
            }
            if let Some(housekeeping) = &mut housekeeping
                && charge.pool() >= charge.limit() / MIN_POOL_DIVISOR
                && !charge.cow_group.is_active()
                && housekeeping.has_time(engine)
            {
                if self.recompress_some(engine) {
                    continue;
                }
                housekeeping.idle.stopped();
            }
            if !has_released {
                return true;
            }
        }
        false
    }
}

/// The time that an idle worker may sleep. The worker that `keeps` the accounts alone sees what the
/// program makes of new mappings, and it must not be more than half of what is free by the next
/// look; the others have something to do only where the limit is near.
fn tick(engine: &Engine, keeps: bool) -> Duration {
    let charge = &engine.charge;
    let shortest = if engine.serving.handler.cpu.load(Relaxed) == NO_CPU {
        TICK_NEAR_LIMIT
    } else {
        TICK_SINGLE_FAULTER
    };
    if !keeps {
        return if charge.headroom() < 4 * charge.high() { shortest } else { TICK };
    }
    let free = charge.headroom().max(0) as u64;
    Duration::from_micros(free / 2 / (MAX_GROWTH_BYTES_PER_S / 1_000_000)).clamp(shortest, TICK)
}

/// Pages that were shared are not for ever: the other process writes to them, ends, or executes a
/// program, which is not told. So chunks are looked at again now and then: while some of those
/// have pages for this process alone, more and more.
#[derive(Default)]
struct Review {
    looks: usize,
}

impl Review {
    fn step(&mut self, engine: &Engine) {
        let looks = self.looks.max(1);
        self.looks =
            if look_again(engine, looks) { (looks * 4).min(MAX_REVIEWED_CHUNKS) } else { 1 };
    }
}

/// Looks whether pages of up to `looks` chunks are still shared. True if some are not: they can go.
fn look_again(engine: &Engine, looks: usize) -> bool {
    let (mut any, mut left) = (false, looks);
    while left > 0 {
        let mut found = [(ChunkNo(0), 0u16); REVIEWED_CHUNKS_PER_HOLD];
        let mut n = 0;
        let (forks, more) = {
            let mut guard = engine.mm.lock();
            let mm = &mut *guard;
            let looks = left.min(REVIEWED_CHUNKS_PER_HOLD).min(mm.queues.shared_len());
            for _ in 0..looks {
                let Some(chunk) = mm.queues.next_shared(&mut mm.table) else { break };
                let own = mm.review(chunk);
                if own != 0 {
                    found[n] = (chunk, own);
                    n += 1;
                }
            }
            (mm.clocks.forks, looks == REVIEWED_CHUNKS_PER_HOLD)
        };
        engine.count(
            Counter::EngineFaults,
            found[..n].iter().map(|(_, pages)| pages.count_ones() as usize).sum(),
        );
        fault_for_writing(engine, &found[..n], forks);
        any |= n > 0;
        left = if more { left - REVIEWED_CHUNKS_PER_HOLD.min(left) } else { 0 };
    }
    any
}

/// Makes pages of some chunks this process's own, so that they can be moved, and these chunks the
/// next to go. No lock is held: a page that is gone meanwhile is a fault, which the handler
/// answers. What the kernel does not do, and what a fork since the check (`forks`: their number
/// then) has shared again, is not known to be its own.
fn fault_for_writing(engine: &Engine, chunks: &[(ChunkNo, u16)], forks: u32) {
    for (chunk, pages) in chunks {
        let mut own = 0;
        for (first, len) in crate::mm::types::runs(*pages) {
            // SAFETY: faulting a page of the program for writing changes nothing but its sharing. A
            // page that is gone is an error.
            if unsafe { advise(range_of(chunk.first().plus(first), len), Advice::PopulateWrite) }
                .is_ok()
            {
                own |= (((1u32 << len) - 1) << first) as u16;
            }
        }
        let mut guard = engine.mm.lock();
        let mm = &mut *guard;
        mm.queues.made_own(&mut mm.table, *chunk, if mm.clocks.forks == forks { own } else { 0 });
    }
}

/// The additional duties of worker 0.
struct Housekeeping {
    statm: Option<StatmFd>,
    rest_at_adoption: i64,
    ticks: u32,
    /// When the division between resident and compressed memory was looked at last.
    divided: Nanos,
    /// The changes of the swap areas seen so far.
    areas: u32,
    review: Review,
    /// The handler had something to do: its turns by then, and since when.
    still: Option<(u32, Nanos)>,
    idle: IdleDetector,
    /// Intervals until compressed memory may be compacted again.
    compact_in: u32,
}

impl Housekeeping {
    fn new() -> Housekeeping {
        Housekeeping {
            statm: StatmFd::open_self().ok(),
            rest_at_adoption: 0,
            ticks: 0,
            divided: now(),
            areas: 0,
            review: Review::default(),
            still: None,
            idle: IdleDetector::new(now()),
            compact_in: 0,
        }
    }

    /// Sees to it that the handler comes to its turn (see [`crate::sched::handler_cpu`]). Takes no
    /// lock: the handler may hold it.
    fn watch(&mut self, engine: &Engine) {
        let turns = engine.serving.handler.turns.load(Relaxed);
        let is_unread = || {
            let polled = poll_readable(&[engine.uffd().as_fd()], Some(Duration::ZERO));
            polled.is_ok_and(|ready| ready != 0)
        };
        if !handler_cpu::may_starve() || !turns.is_multiple_of(2) && !is_unread() {
            self.still = None;
            return;
        }
        let now = now();
        match self.still {
            Some((then, since)) if then == turns => {
                if now.since(since) >= STARVED_HANDLER_TIME {
                    handler_cpu::leave_sched_idle();
                }
            }
            _ => self.still = Some((turns, now)),
        }
    }

    /// True when nothing has come in or gone out for a while, and no other thread wants the CPU.
    fn has_time(&mut self, engine: &Engine) -> bool {
        let counters = &engine.slot().counters;
        let happened = [Counter::Pgmajfault, Counter::Pgsteal]
            .map(|counter| counters[counter as usize].load(Relaxed));
        self.idle.is_idle(happened[0].wrapping_add(happened[1]), now())
    }

    /// Measures, takes over a new limit, and requests adoption when memory that is not managed has
    /// grown.
    fn look(&mut self, engine: &Engine) {
        let Some(statm) = &self.statm else { return };
        self.ticks = self.ticks.wrapping_add(1);
        fault_injection::fail_worker(&engine.workers.fails);
        engine.publish_slot();
        engine.charge.take_limit(engine.slot());
        if engine.start.segment.is_moving(engine.slot_index()) {
            engine.devices.areas.follow_group();
        }
        if engine.slot().control.preload.load(Relaxed) != 0 {
            engine.handler_requests.submit(HandlerRequest::Preload);
        }
        if engine.slot().control.detach.load(Relaxed) != 0 {
            engine.handler_requests.submit(HandlerRequest::Detach);
        }
        // The thread that follows these orders at once may not have been made.
        let slot = engine.slot();
        if slot.control.fork_hold.load(Relaxed) != slot.agent.fork_held.load(Relaxed) {
            engine.handler_requests.submit(HandlerRequest::ForkHold);
        }
        engine.charge.measure(statm);
        let areas = engine.start.segment.areas_epoch();
        if std::mem::replace(&mut self.areas, areas) != areas {
            engine.devices.areas.look_at_areas();
        }
        copies::drop_where_scarce(engine);
        engine.devices.areas.device.trim_remote();
        if engine.charge.pool_cap() != 0 {
            engine.charge.others_pool(engine.pool_of_others());
        }
        if now().since(self.divided) >= DIVISION_INTERVAL {
            self.divided = now();
            engine.charge.follow_cow_group();
            if engine.charge.room() < 2 * engine.charge.high() {
                self.review.step(engine);
            }
            engine.balance_pool();
            engine.charge.decay_grace();
            // Pages that left it leave holes.
            let pool = &engine.devices.pool;
            self.compact_in = self.compact_in.saturating_sub(1);
            if self.compact_in == 0
                && has_holes(pool, HOLES_DIVISOR)
                && pool.compact(COMPACT_STEP_BYTES) < COMPACT_STEP_BYTES / COMPACT_WORTH_DIVISOR
            {
                self.compact_in = COMPACT_REST;
            }
        }
        let rest = engine.charge.rest();
        let step = (engine.charge.limit() / 128).clamp(256 << 10, 4 << 20) as i64;
        self.rest_at_adoption = self.rest_at_adoption.min(rest);
        engine.small.follow(&engine.charge);
        let small = &engine.small;
        let is_grown = rest - self.rest_at_adoption > step;
        if is_grown && small.may_look(ADOPT_TIME_DIVISOR_GROWN)
            || self.ticks.is_multiple_of(64) && small.may_look(ADOPT_TIME_DIVISOR)
            || small.may_look(ADOPT_TIME_DIVISOR_GROWN) && small.is_look_due()
        {
            engine.handler_requests.submit(HandlerRequest::Adopt);
            engine.charge.measure(statm);
            self.rest_at_adoption = engine.charge.rest();
        }
    }
}

/// True if compressed memory wastes more than one part in `divisor`.
fn has_holes(pool: &Zram, divisor: usize) -> bool {
    let stored = pool.stored_bytes();
    pool.pool_bytes() > stored + stored / divisor + COMPACT_SLACK_BYTES
}

/// What a test wants: see [`fault_injection::Injection::churns_own_mappings`].
///
/// # Panics
/// If any of it is taken for the program's.
#[cold]
fn map_and_unmap(engine: &Engine) {
    let mut held = [const { None }; 8];
    let is_managed = |held: &[Option<Mapping>]| {
        let mm = engine.mm.lock();
        held.iter().flatten().any(|own| mm.regions.overlaps(own.range()))
    };
    for round in 0..256 {
        let Ok(mapping) = Mapping::reserve(MIN_BYTES + round % 7 * PAGE_SIZE) else { return };
        // SAFETY: nothing else refers to the mapping.
        let bytes = unsafe { mapping.slice_mut(0, mapping.len()) };
        bytes.iter_mut().step_by(PAGE_SIZE).for_each(|byte| *byte = 1);
        held[round % 8] = Some(mapping);
        if round % 8 == 0 {
            engine.handler_requests.submit(HandlerRequest::Adopt);
        }
        // The end of what was there before comes after it: its event may not be under way yet.
        let since = now();
        while is_managed(&held) {
            assert!(
                now().since(since) < Duration::from_secs(2),
                "the engine's own memory is managed"
            );
            engine.handler_requests.submit(HandlerRequest::Adopt);
        }
    }
}
