//! The engine of one process: what its threads share.

mod memory;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release, Ordering::SeqCst, fence,
};
use std::time::Duration;

use swaptide_core::{Expect, FolioId, SharedGate, SlotContent as TableSlot, SwapEntry};
use swaptide_ipc::{Counter, OfOrder, POOL_PERCENT_ALONE, ProcSlot, Segment, SlotIndex};
use swaptide_sys::lock::{Lock, futex};
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::sock::Conn;
use swaptide_sys::thread::{now, yield_now};
use swaptide_sys::uffd::{Features, Uffd};

pub use self::memory::{FrameOwners, Mm, MmClocks, VmaChanges};
use crate::EngineError;
use crate::backing::devices::{Devices, OpenArea, filler_of};
use crate::backing::remote_queue::RemoteReads;
use crate::fault_injection::Injection;
use crate::memcg::acceptance::{Acceptance, Verdict};
use crate::memcg::charge::Charge;
use crate::memcg::pool_sizing::{PoolSample, PoolSizer};
use crate::memcg::psi::StallClock;
use crate::memcg::small::Small;
use crate::memcg::thrash::ThrashDetector;
use crate::mm::batch::Jobs;
use crate::mm::busy::Busy;
use crate::mm::change_order::LateChanges;
use crate::mm::fault_hold::FaultHold;
use crate::mm::lru::Queues;
use crate::mm::page_table::PageTable;
use crate::mm::references::References;
use crate::mm::staging::{FrameNo, Staging};
use crate::mm::types::{ChunkNo, MAX_FILLERS, PAGES_PER_LEAF};
use crate::mm::vma_set::VmaSet;
use crate::readahead::Readahead;
use crate::readahead::history::SharedMissHistory;
use crate::requests::HandlerRequests;
use crate::requests::fork_control::ForkControl;
use crate::sched::fault_servers::FaultServers;
use crate::sched::handed::Handed;
use crate::sched::handler_cpu::leave_sched_idle;

/// The time without writes to swap areas after they took nothing.
const AREA_FULL_BACKOFF: Duration = Duration::from_millis(100);

/// The userfaultfd features that the engine needs. Forks it learns of by [`Features::EVENT_FORK`],
/// or they are followed ([`crate::fork`]).
pub(crate) const FEATURES: Features = Features::EVENT_REMAP
    .union(Features::EVENT_REMOVE)
    .union(Features::EVENT_UNMAP)
    .union(Features::THREAD_ID)
    .union(Features::MOVE)
    .union(Features::POISON);

/// Called by a thread that has waited for long at the gate, or for a lock of the swap core: the
/// thread that holds it may have lost its CPU, or be the handler in the idle class.
static YIELD: fn() = || {
    yield_now();
    leave_sched_idle();
};

/// The parameters of a new engine.
pub struct Start {
    /// Shared with the supervisor and all processes of the run.
    pub segment: &'static Segment,
    /// The process's place in it at first; a forked child gets another ([`Engine::set_index`]).
    pub index: SlotIndex,
    /// Asks the supervisor for the descriptor of a swap area.
    pub open_area: OpenArea,
    /// A number no other process of the run uses: it keeps the nonces of the swap areas' cipher
    /// apart.
    pub salt: u64,
    /// Writes one line to the log, if there is one.
    pub log: fn(&str),
    /// True for the name of the program's own file: its zero-initialised data is managed, a
    /// library's is not.
    pub main_object: fn(&[u8]) -> bool,
    /// True for a range that the program wants treated apart at a fork: it is never managed.
    pub excluded: fn(VirtRange) -> bool,
    /// True while threads that move mappings wait for the handler
    /// ([`crate::requests::HandlerRequests::fence`]): a program through libc with several.
    pub waits_at_fences: fn() -> bool,
    /// True once the program has asked, through libc, for memory that its children are not to have.
    pub gives_fork_advice: fn() -> bool,
    /// Returns a bit for each page of a chunk that must stay: the kernel accesses it without a
    /// fault.
    pub pinned: fn(ChunkNo) -> u16,
    /// Starts a thread that runs [`Engine::serve_remote_reads`]. False if there can be none.
    pub spawn_reader: fn() -> bool,
    /// Starts a thread that runs [`crate::serve_faults`]. False if there can be none.
    pub spawn_server: fn() -> bool,
    /// Has other holders of the userfaultfd close it; false if that is not so within a moment.
    pub release_hold: fn() -> bool,
    /// Has another holder for a forked child's userfaultfd while this process serves it: it closes
    /// its own when something is sent on the connection, or when the child has it held itself.
    pub hold_child: fn(BorrowedFd<'_>) -> Option<Conn>,
    /// A flag that pages may have readers outside; the hooks set it.
    pub references: &'static References,
}

/// The process's knowledge of memory that its children are not to have. Neither is taken back: each
/// process looks for what was advised before once, and acts on what it found for the rest of its
/// life.
#[derive(Default)]
pub(crate) struct KnownForkAdvice {
    /// The address space was searched.
    pub(crate) is_sought: AtomicBool,
    /// There was such memory.
    pub(crate) is_found: AtomicBool,
}

/// Kinds of memory that the program has had.
#[derive(Default)]
pub struct KnownMemory {
    /// Guard pages (see [`crate::fault::install`]).
    pub guarded: AtomicBool,
    /// Memory that children are not to have (see [`crate::vma::fork_advice`]).
    pub(crate) fork_advice: KnownForkAdvice,
}

/// Swap space that took nothing.
#[derive(Default)]
struct SwapFull {
    /// Pages could not be stored anywhere: told once.
    is_told: AtomicBool,
    /// Until then nothing is written to swap areas: they took nothing a moment ago.
    area_rests_until: AtomicU64,
}

/// The threads that reclaim.
#[derive(Default)]
pub struct Workers {
    /// The number of running threads, fault servers among them.
    pub running: AtomicU32,
    /// Those that do not wait on `work`.
    pub awake: AtomicU32,
    /// Futex word on which idle ones wait: raised when there may be work.
    pub work: AtomicU32,
    /// Odd while pages are chosen and taken out: see [`Engine::await_taking`].
    pub(crate) taking: AtomicU32,
    /// Not 0: they stop at their next quiescent point.
    pub quiesce: AtomicU32,
    /// The number of them that are stopped there.
    pub quiesced: AtomicU32,
    /// The thread ids of the first ones, for the handler to place them; 0: none.
    pub tids: [AtomicU32; PLACED_WORKERS],
    /// One is to find a check failed (injected).
    pub fails: AtomicBool,
}

/// The handler's thread, as other threads see it.
pub struct HandlerThread {
    /// Its id; 0 before there is one.
    pub tid: AtomicU32,
    /// The CPU that workers keep away from (see [`crate::sched::handler_cpu`]).
    pub cpu: AtomicU32,
    /// Raised when it begins to wait for messages and when it continues: odd while it waits.
    pub turns: AtomicU32,
}

/// The threads that serve faults, and what they share.
pub struct Serving {
    /// The thread that applies events, and serves faults.
    pub handler: HandlerThread,
    /// Threads that serve faults next to it.
    pub(crate) servers: FaultServers,
    /// Predictions from earlier faults.
    pub(crate) readahead: Lock<Readahead>,
    /// The time that threads of the program wait for memory.
    pub(crate) stalls: Lock<StallClock>,
    /// Inside are threads that put pages in place without the memory lock; the thread that reads a
    /// message has it closed.
    pub(crate) gate: SharedGate,
}

/// The state of the staging frames that can be read without the memory lock.
pub struct FrameMarks {
    /// The address of the first.
    base: VirtAddr,
    /// A bit for each frame in use whose page is no longer swapped: it was copied back, or given
    /// up. Changed under the memory lock; the thread that stores a batch may look without it, to
    /// spare work.
    pub cancelled: Box<[AtomicU64]>,
}

/// Descriptors and names that a forked child replaces with its own.
struct OwnNames {
    uffd: AtomicPtr<Uffd>,
    /// The place in the segment; the devices have it, too.
    index: Arc<AtomicU32>,
}

/// All that the threads of the engine share; one for each managed process.
pub struct Engine {
    /// The memory lock; ARCHITECTURE.md has the lock order.
    pub mm: Lock<Mm>,
    /// Compressed memory and the swap areas.
    pub devices: Devices,
    /// The memory use of the process, and its limit.
    pub charge: Charge,
    /// The size of small mappings, and a flag that they are managed.
    pub small: Small,
    /// Requests to the handler.
    pub handler_requests: HandlerRequests,
    /// The state that forking threads and the handler share.
    pub fork: ForkControl,
    /// Pages that were sent for.
    pub(crate) remote_reads: RemoteReads,
    /// The threads that reclaim.
    pub workers: Workers,
    /// The threads that serve faults, and what they share.
    pub serving: Serving,
    /// The program was detached: workers end at their quiescent point.
    pub retired: AtomicBool,
    /// The kinds of memory that the program has had.
    pub known: KnownMemory,
    /// Marks of staging frames.
    pub frames: FrameMarks,
    /// Swap space that took nothing.
    swap_full: SwapFull,
    /// The parameters with which the engine was started.
    pub start: Start,
    own: OwnNames,
}

impl Engine {
    /// The failures that a test injects.
    pub fn injection(&self) -> Injection {
        self.devices.injection()
    }

    /// Makes an engine with nothing under management.
    ///
    /// # Errors
    /// When memory or a userfaultfd is refused.
    pub fn new(start: Start) -> Result<Engine, EngineError> {
        let staging = Staging::new(start.references)?;
        let frames = staging.frames();
        let staging_base = staging.addr(FrameNo(0));
        let handler_requests = HandlerRequests::new()?;
        let followed = start.segment.header.followed_forks.load(Relaxed) != 0;
        let features = if followed { FEATURES } else { FEATURES | Features::EVENT_FORK };
        let uffd = Uffd::open(features, true).map_err(EngineError::Open)?;
        uffd.register_missing(handler_requests.range())
            .map_err(|e| EngineError::Memory("registering the request pages", e))?;
        uffd.register_missing(handler_requests.request_pages())
            .map_err(|e| EngineError::Memory("registering the fault request pages", e))?;
        uffd.register_missing(staging.range())
            .map_err(|e| EngineError::Memory("registering the staging frames", e))?;
        let header = &start.segment.header;
        let slot = start.segment.slot(start.index);
        let index = Arc::new(AtomicU32::new(start.index.0));
        let devices = Devices::new(start.segment, index.clone(), start.open_area, start.salt)?;
        let percent = match header.pool.percent.load(Relaxed) {
            0 => u64::from(POOL_PERCENT_ALONE),
            percent => u64::from(percent),
        };
        let acceptance = Acceptance::new(
            header.pool.max_percent.load(Relaxed),
            header.pool.accept_percent.load(Relaxed),
        );
        let charge = Charge::new(
            slot.control.limit_bytes.load(Relaxed),
            percent,
            header.pool.cap_bytes.load(Relaxed),
        );
        let charge = charge.with_acceptance(acceptance);
        let servers = FaultServers::new(devices.injection());
        swaptide_sys::lock::on_long_wait(leave_sched_idle);
        swaptide_core::set_yield(&YIELD);
        Ok(Engine {
            mm: Lock::new(Mm {
                table: PageTable::new(),
                regions: VmaSet::default(),
                armed: VmaSet::default(),
                staging,
                frames: FrameOwners {
                    owner: Vec::with_capacity(frames),
                    base: Vec::with_capacity(frames),
                    kept: Vec::with_capacity(frames),
                },
                queues: Queues::default(),
                held: NO_RANGE,
                changes: VmaChanges {
                    behind: false,
                    late: LateChanges::with_capacity(64),
                    owed: Vec::with_capacity(256),
                    left: VmaSet::default(),
                    closed_in_doubt: VmaSet::default(),
                    recent: Vec::with_capacity(64),
                },
                jobs: Jobs::default(),
                pool_sizer: PoolSizer::new(),
                clocks: MmClocks::default(),
                fault_hold: FaultHold::default(),
                thrash: ThrashDetector::default(),
                handed: Handed::new(servers.is_forced),
                busy: Busy::default(),
            }),
            devices,
            charge,
            small: Small::default(),
            handler_requests,
            fork: ForkControl::new(followed),
            remote_reads: RemoteReads::new()
                .map_err(|e| EngineError::Memory("the buffers for remote pages", e))?,
            workers: Workers::default(),
            serving: Serving {
                handler: HandlerThread {
                    tid: AtomicU32::new(0),
                    cpu: AtomicU32::new(crate::sched::handler_cpu::NO_CPU),
                    turns: AtomicU32::new(0),
                },
                servers,
                readahead: Lock::new(Readahead::new()),
                stalls: Lock::new(StallClock::default()),
                gate: SharedGate::new(MAX_FILLERS),
            },
            retired: AtomicBool::new(false),
            known: KnownMemory::default(),
            frames: FrameMarks {
                base: staging_base,
                cancelled: (0..frames.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            },
            swap_full: SwapFull::default(),
            start,
            own: OwnNames { uffd: AtomicPtr::new(Box::into_raw(Box::new(uffd))), index },
        })
    }

    /// The process's place in the segment.
    pub fn slot(&self) -> &'static ProcSlot {
        self.start.segment.slot(self.slot_index())
    }

    /// The number of that place.
    pub(crate) fn slot_index(&self) -> SlotIndex {
        SlotIndex(self.own.index.load(Relaxed))
    }

    /// The userfaultfd with which the program's memory is registered; another one after a fork.
    pub fn uffd(&self) -> &'static Uffd {
        // SAFETY: the pointer comes from a box that is never freed, and is replaced only in a
        // forked child before its threads start.
        unsafe { &*self.own.uffd.load(Acquire) }
    }

    /// In a forked child: its own userfaultfd. The parent's number means nothing here; it is
    /// forgotten, not closed.
    pub(crate) fn set_uffd(&self, uffd: Uffd) {
        self.own.uffd.store(Box::into_raw(Box::new(uffd)), Release);
    }

    /// In a forked child: its own place in the segment.
    pub(crate) fn set_index(&self, index: SlotIndex) {
        self.own.index.store(index.0, Relaxed);
    }

    /// Adds to a counter.
    pub fn count(&self, counter: Counter, n: usize) {
        if n > 0 {
            self.slot().count(counter, n as u64);
        }
    }

    /// Adds to a counter of an order, if orders like it are counted.
    pub(crate) fn count_order(&self, kind: OfOrder, order: u8, n: usize) {
        if let Some(counter) = kind.counter(order) {
            self.count(counter, n);
        }
    }

    /// The address of a staging frame, without the memory lock.
    pub(crate) fn frame_addr(&self, frame: FrameNo) -> VirtAddr {
        self.frames.base.offset(frame.0 as usize * PAGE_SIZE)
    }

    /// Waits while pages are chosen and taken out that were looked at before this call. What is
    /// pinned by then is not chosen any more.
    pub fn await_taking(&self, pause: fn()) {
        fence(SeqCst);
        let seen = self.workers.taking.load(SeqCst);
        // It is as long as a batch of moves takes, and never waits for a thread of the program.
        while seen % 2 == 1 && self.workers.taking.load(SeqCst) == seen {
            pause();
        }
    }

    /// Publishes the account after a change under the lock, and calls the workers when little is
    /// left.
    pub(crate) fn publish_usage(&self, mm: &Mm) {
        self.charge.publish(
            mm.table.present() + mm.staging.full_frames(),
            mm.staging.ready_frames(),
            self.devices.pool.pool_bytes(),
        );
        if self.is_reclaim_due(mm) {
            self.call_workers();
        }
    }

    /// Writes the number of resident pages to the process slot. Several workers may do so at the
    /// same time; a value that is out of date stands until the next look of a worker.
    pub(crate) fn publish_present(&self, pages: usize) {
        self.slot().usage.managed_bytes.store((pages * PAGE_SIZE) as u64, Relaxed);
    }

    /// True when a worker shall take a batch out.
    pub(crate) fn is_reclaim_due(&self, mm: &Mm) -> bool {
        self.charge.room() + ((mm.jobs.in_flight * PAGE_SIZE) as i64) < self.charge.due()
    }

    /// A fork has left all pages shared with another process. The memory lock must be free.
    pub(crate) fn record_new_sharing(&self) {
        let mm = &mut *self.mm.lock();
        mm.clocks.forks = mm.clocks.forks.wrapping_add(1);
        mm.queues.forget_own(&mut mm.table);
    }

    /// Lets the refaults so far move the division between resident and compressed memory.
    pub(crate) fn balance_pool(&self) {
        let mut guard = self.mm.lock();
        let mm = &mut *guard;
        let charge = &self.charge;
        if charge.cow_group.is_active() {
            // What comes back meanwhile tells nothing of how it should be divided afterwards.
            mm.pool_sizer.forget();
            return;
        }
        let oldest = mm.oldest_pooled(&self.devices);
        let at = PoolSample {
            share: charge.pool_share(),
            limit: charge.divisible(),
            resident: mm.table.present() as u64,
            pool: charge.pool(),
            oldest,
            recompressed: mm.queues.any_recompressed(),
        };
        let share = mm.pool_sizer.decide(at);
        if self.devices.is_backed() {
            charge.set_pool_share(share);
        }
    }

    /// True when there is no place for what would leave the program: it stays, past the limit if
    /// need be.
    ///
    /// So is it where compressed memory could not take another batch: what was taken out must have
    /// a place there in the end, also if every area refuses it.
    pub(crate) fn is_full(&self, mm: &Mm) -> bool {
        let alone = !self.devices.is_backed() || self.area_rests();
        let at_end = !self.devices.pool_has_room(mm.jobs.in_flight, PAGES_PER_LEAF);
        let full = alone && (at_end || self.charge.pool_is_full());
        if full {
            self.report_swap_full("swap space is full: exceeding the budget");
        }
        full || at_end
    }

    /// True when a page that is to be stored shall go past compressed memory, because that is at
    /// its bound, or near the end of its addresses, and there is something behind it.
    pub(crate) fn pool_refuses(&self) -> bool {
        match self.charge.ask_pool(self.devices.pool.pool_bytes() as u64) {
            Verdict::Takes if self.devices.pool.is_scarce() => {}
            Verdict::Takes => return false,
            Verdict::AtLimit => self.count(Counter::PoolLimitHit, 1),
            Verdict::NotYet => {}
        }
        self.devices.is_backed() && !self.area_rests()
    }

    /// Something had no place on a device; the first time it is logged.
    pub(crate) fn report_swap_full(&self, what: &str) {
        if !self.swap_full.is_told.swap(true, Relaxed) {
            (self.start.log)(what);
        }
        self.count(Counter::SwapFull, 1);
    }

    /// Bytes that the pools of the tree's other processes take.
    pub(crate) fn pool_of_others(&self) -> u64 {
        let own = self.slot_index();
        self.start
            .segment
            .claimed()
            .filter(|(index, _)| *index != own)
            .map(|(_, slot)| ProcSlot::bytes(&slot.usage.pool_bytes))
            .sum()
    }

    /// Wakes idle workers.
    pub(crate) fn call_workers(&self) {
        if self.workers.work.swap(1, Release) == 0 {
            futex::wake(&self.workers.work, 1, futex::Scope::Private);
        }
    }

    /// True while one thread alone faults again and again, for single pages, and the handler is on
    /// its CPU: then every microsecond that the two are parted counts, and what workers do has
    /// time.
    pub(crate) fn single_faulter(&self) -> bool {
        self.serving.handler.cpu.load(Relaxed) != crate::sched::handler_cpu::NO_CPU
            && self.charge.is_sparse()
    }

    /// Publishes what a supervisor shows.
    pub(crate) fn publish_slot(&self) {
        let (present, full, swapped, table) = {
            let mm = self.mm.lock();
            self.charge.publish(
                mm.table.present() + mm.staging.full_frames(),
                mm.staging.ready_frames(),
                self.devices.pool.pool_bytes(),
            );
            (mm.table.present(), mm.staging.full_frames(), mm.table.swapped(), mm.table.bytes())
        };
        self.charge.set_shared_bytes(
            self.fork.childrens_history.lock().as_ref().map_or(0, SharedMissHistory::used_bytes),
        );
        let populated = self.devices.pool.populated();
        let fresh =
            populated.saturating_sub(self.devices.populated_counted.swap(populated, Relaxed));
        self.count(Counter::EngineFaults, fresh as usize);
        let slot = self.slot();
        let file_pages = self.devices.areas.slots.usage().used as usize;
        let page = PAGE_SIZE as u64;
        self.publish_present(present);
        slot.usage.staging_bytes.store(full as u64 * page, Relaxed);
        slot.usage.pool_bytes.store(self.charge.pool(), Relaxed);
        slot.usage.overhead_bytes.store((table + self.devices.metadata_bytes()) as u64, Relaxed);
        slot.usage
            .swapped_pool_bytes
            .store(swapped.saturating_sub(file_pages) as u64 * page, Relaxed);
        slot.usage.swapped_file_bytes.store(file_pages as u64 * page, Relaxed);
        let unmanaged = self.charge.rest().max(0) as u64;
        slot.usage
            .peak_footprint_bytes
            .fetch_max((present + swapped) as u64 * page + unmanaged, Relaxed);
    }

    /// Notes that the swap areas take nothing. Asking them again and again would cost more than
    /// what is to be had.
    pub(crate) fn rest_area(&self) {
        self.swap_full
            .area_rests_until
            .store(now().0.saturating_add(AREA_FULL_BACKOFF.as_nanos() as u64), Relaxed);
    }

    /// True for a while after the swap areas took nothing, and where the group's pages stay in
    /// memory.
    pub(crate) fn area_rests(&self) -> bool {
        if self.slot().control.no_writeback.load(Relaxed) != 0 {
            return true;
        }
        let until = self.swap_full.area_rests_until.load(Relaxed);
        until != 0 && now().0 < until
    }

    /// A write to a swap area failed; nothing is lost.
    pub(crate) fn write_failed(&self, error: &swaptide_store::file::WriteError) {
        (self.start.log)(&format!("write to a swap area failed, pages stay in memory: {error}"));
        self.count(Counter::WriteErrors, 1);
        self.rest_area();
    }

    /// True when the page of a staging frame is no longer swapped.
    pub(crate) fn is_cancelled(&self, frame: FrameNo) -> bool {
        self.frames.cancelled[frame.0 as usize / 64].load(Relaxed) >> (frame.0 % 64) & 1 == 1
    }

    /// Notes that the page of a staging frame is no longer swapped. The memory lock is held.
    fn cancel(&self, frame: FrameNo) {
        self.frames.cancelled[frame.0 as usize / 64].fetch_or(1 << (frame.0 % 64), Relaxed);
    }

    /// Forgets such a note. The memory lock is held.
    pub(crate) fn uncancel(&self, frame: FrameNo) {
        self.frames.cancelled[frame.0 as usize / 64].fetch_and(!(1 << (frame.0 % 64)), Relaxed);
    }

    /// A page's swap entry is not needed any more: its data is dropped, now or by the thread that
    /// is storing it or bringing it in.
    #[track_caller]
    pub fn release(&self, mm: &Mm, entry: SwapEntry) {
        match self.devices.slots(entry.ty()).lookup(entry.offset()) {
            TableSlot::Folio(folio) if filler_of(folio).is_some() => {
                self.devices.abandon_to_loader(entry)
            }
            TableSlot::Folio(folio) => self.cancel(mm.frame_of(entry, folio)),
            TableSlot::Shadow { .. } => self.devices.drop_swapped(entry),
            other => {
                crate::fatal(&format!("swap entry {entry:?} is in use and its slot is {other:?}"))
            }
        }
    }

    /// Frees the slot of a cancelled folio page.
    pub(crate) fn free_cancelled(&self, frame: FrameNo, entry: SwapEntry, folio: FolioId) {
        self.uncancel(frame);
        self.devices.free_slot(entry, Expect::Folio(folio));
    }

    /// Runs a thread that reads pages of servers, until the program is detached.
    pub fn serve_remote_reads(&self) {
        self.remote_reads.serve(
            &self.devices.areas.device,
            || self.retired.load(Acquire),
            self.injection(),
            self.start.log,
        );
    }

    /// Ends the process if the thread is gone that answers faults, or one that reads remote pages:
    /// a filter of system calls may have ended it. Faults would wait for ever, workers wait for the
    /// handler too, and with the last of the engine's threads the userfaultfd would be closed.
    pub fn look_after_threads(&self) {
        if !self.remote_reads.are_all_there() && !self.retired.load(Relaxed) {
            crate::fatal("a reader thread has ended");
        }
        if !self.serving.servers.are_all_there() && !self.retired.load(Relaxed) {
            crate::fatal("a fault server has ended");
        }
        let handler = self.serving.handler.tid.load(Relaxed);
        if handler != 0
            && !self.retired.load(Relaxed)
            && !swaptide_sys::thread::lives(swaptide_sys::thread::Tid(handler))
        {
            crate::fatal("the handler thread has ended");
        }
    }

    /// A thread that serves faults is about to wait for a disk: where servers pay then alone, they
    /// read from now on. The memory lock must be free.
    pub(crate) fn note_disk(&self) {
        if self.serving.servers.note_disk() {
            let mut mm = self.mm.lock();
            mm.handed.do_servers_pay = true;
            let may_read = mm.handed.may_servers_read();
            drop(mm);
            if may_read {
                self.serving.servers.admit();
            }
        }
    }

    /// True while workers and fault servers are to come to their quiescent points.
    pub(crate) fn is_quiescing(&self) -> bool {
        self.workers.quiesce.load(Acquire) != 0
    }

    /// Waits while the workers are to be quiesced. Called by them, and by fault servers, where
    /// nothing of theirs is half done. False when they shall end.
    pub(crate) fn quiescent_point(&self) -> bool {
        if self.workers.quiesce.load(Acquire) == 0 {
            return true;
        }
        self.workers.quiesced.fetch_add(1, Release);
        futex::wake(&self.workers.quiesced, 1, futex::Scope::Private);
        while self.workers.quiesce.load(Acquire) != 0 {
            futex::wait(&self.workers.quiesce, 1, None, futex::Scope::Private);
        }
        self.workers.quiesced.fetch_sub(1, Release);
        !self.retired.load(Acquire)
    }
}

/// An empty range.
pub(crate) const NO_RANGE: VirtRange = VirtRange { start: VirtAddr(0), end: VirtAddr(0) };

/// Workers that the handler places; there is one for each CPU, and with many CPUs one more
/// wake-up hurts less.
const PLACED_WORKERS: usize = 16;
