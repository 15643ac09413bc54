//! The layout of the segment.

use std::sync::atomic::{
    AtomicU16, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};
use std::time::Duration;

use swaptide_sys::lock::futex;
use swaptide_sys::mem::SharedMap;
use swaptide_sys::thread::Nanos;

use crate::area::{Area, MAX_AREAS};
use crate::counters::{Counter, FaultHistogram, RefaultHistogram};
use crate::group::Groups;
use crate::ids::{ExtentId, MAX_EXTENTS, SlotIndex};
use crate::optional_limit::OptionalLimit;

/// First word of every segment.
pub const MAGIC: u64 = 0x7377_6170_7469_6465;
/// Version of the layout; supervisor and agent must agree.
pub const VERSION: u32 = 20;
/// Processes that can be managed at one time.
pub const MAX_PROCS: usize = 512;
/// The limit of a process that is being released.
pub const NO_LIMIT: u64 = 1 << 46;
/// No word of bytes of one process counts for more, whatever stands there: that of all processes
/// together is no overflow.
const MAX_BYTES: u64 = NO_LIMIT;
/// No counter of one process counts for more.
const MAX_COUNT: u64 = 1 << 47;
/// The smallest budget: a floor for the program, staging frames, tables and a compressed pool.
pub const MIN_BUDGET_BYTES: u64 = 16 << 20;
/// How fast a program may grow at most, by which the time of the next look is set.
pub const MAX_GROWTH_BYTES_PER_S: u64 = 6_000_000_000;
/// The share of a process's limit that compressed memory may take where nothing stands behind it,
/// in percent.
pub const POOL_PERCENT_ALONE: u32 = 75;
/// Pages that the price of growth past `swap.high` is for ([`ProcControl::throttle_us`]).
pub const THROTTLE_PAGES: u64 = 64;

const COUNTERS: usize = Counter::ALL.len();

/// The life-cycle state of a managed process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ProcState {
    /// No process has the slot.
    Free = 0,
    /// Waiting: the process fits, nothing of it is managed.
    Watching = 1,
    /// Its memory is managed.
    Engaged = 2,
    /// Its memory cannot be managed (the reason went to the log); it counts against the budget all
    /// the same.
    Refused = 3,
    /// Its memory was managed, or might have been, and was released for good; it does not count
    /// against the budget any more.
    Detached = 4,
}

/// The header of a segment.
#[repr(C)]
pub struct Header {
    /// [`MAGIC`], written last by the supervisor.
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// Process id of the supervisor.
    pub supervisor: AtomicU32,
    /// The supervisor's process-id namespace (inode of /proc/self/ns/pid; 0: not known).
    pub pid_namespace: AtomicU64,
    /// The key of all swap areas, drawn by the supervisor for this run; four little-endian words.
    pub key: [AtomicU64; 4],
    /// The tree's budget in bytes.
    pub budget_bytes: AtomicU64,
    /// Counts processes that could not claim a slot.
    pub slots_exhausted: AtomicU64,
    /// One more than the highest slot ever claimed: a walk over all slots stops here and leaves
    /// the pages behind untouched.
    pub slots_end: AtomicU32,
    /// Not 0: the kernel reports no forks here (that takes `CAP_SYS_PTRACE`), so the
    /// supervisor follows the forking thread.
    pub followed_forks: AtomicU32,
    /// The turn in which calls that may write past page tables begin, in the lowest bit; whether
    /// they are counted.
    pub past_writes_turn: AtomicU32,
    /// Bounds and compression settings of compressed memory.
    pub pool: PoolConfig,
    /// Settings of readahead at swap-in.
    pub swap_in: SwapInConfig,
    /// Faults to be injected.
    pub injection: InjectionConfig,
    /// The swap areas (see [`crate::areas`]).
    pub(crate) areas: AreaTable,
}

/// Settings of compressed memory. Written by the supervisor.
#[repr(C)]
pub struct PoolConfig {
    /// Upper bound of one process's compressed memory in bytes, over all processes (0: only the
    /// percentage counts).
    pub cap_bytes: AtomicU64,
    /// Share of a process's limit that its compressed memory may take, in percent.
    pub percent: AtomicU32,
    /// `max_pool_percent`: what of a process's limit its compressed memory may take at most, in
    /// percent (0: nothing was said).
    pub max_percent: AtomicU32,
    /// `accept_threshold_percent`: compressed memory that has reached a bound takes nothing until
    /// it has fallen below this percentage of it (0: it always takes, and writes back for it).
    pub accept_percent: AtomicU32,
    /// The number of a choice of codecs (0: the default).
    pub codec: AtomicU32,
}

/// Settings of swap-in. Written by the supervisor.
#[repr(C)]
pub struct SwapInConfig {
    /// Windows from the swap file, and from compressed memory in front of it, are at most two to
    /// the power of page-cluster pages.
    pub page_cluster: OptionalLimit<AtomicU32>,
    /// The largest order of a swap-in. For comparisons: with order 0, every fault brings its page
    /// alone.
    pub largest_order: OptionalLimit<AtomicU32>,
}

/// Faults to be injected, for tests. Written by the supervisor.
#[repr(C)]
pub struct InjectionConfig {
    /// Slots that may be claimed (0: all of them). Less is for tests of a full table.
    pub slots_max: AtomicU32,
    /// One in N loads of several pages is treated as stale at its second check (0: none).
    pub stale_every: AtomicU32,
    /// One in N fills of several pages ends half way, as it does when an event is unread (0: none).
    pub part_every: AtomicU32,
    /// One in N transfers of a process to or from the first area fails, in one way or another (0:
    /// none).
    pub io_fault_every: AtomicU32,
    /// How engines end after some faults: 1 and 2: the handler or a worker finds a check failed; 3:
    /// the handler's thread is gone; 4: there is no memory for an engine; 5: at its first order, a
    /// thread is gone that reads from servers (0: they do not). Other numbers have other things go
    /// wrong (`fault_injection` of the engine).
    pub fail: AtomicU32,
}

/// The swap areas and their order.
#[repr(C)]
pub(crate) struct AreaTable {
    /// Counts changes of the areas.
    pub(crate) epoch: AtomicU32,
    /// The number of open areas.
    pub(crate) count: AtomicU32,
    /// The next of several areas of one priority.
    pub(crate) turn: AtomicU32,
    /// The open areas in the order of their priorities, four bits each.
    pub(crate) order: AtomicU64,
    pub(crate) slots: [Area; MAX_AREAS],
}

/// One process.
#[repr(C, align(64))]
pub struct ProcSlot {
    /// Process id; 0 while the slot is free.
    pub pid: AtomicU32,
    /// [`ProcState`].
    pub state: AtomicU32,
    /// Process id of the parent whose memory this one shares since a fork (0: none).
    pub forked_from: AtomicU32,
    /// Not 0: the process has asked for management, and waits.
    pub engage_now: AtomicU32,
    /// Threads of the engine in this process.
    pub engine_threads: AtomicU32,
    /// What the agent says of itself.
    pub agent: AgentWords,
    /// The group that its extents are charged to. Differs from the one that the process belongs to
    /// ([`ProcControl::group_wanted`]) until the process has seen that.
    pub group: AtomicU32,
    /// Changes of what it holds (see [`crate::groups`]).
    pub(crate) changes: AtomicU64,
    /// The supervisor's orders to the process.
    pub control: ProcControl,
    /// Its memory use.
    pub usage: ProcUsage,
    /// Counters by [`Counter`].
    pub counters: [AtomicU64; COUNTERS],
    /// Fault times.
    pub faults: FaultHistogram,
    /// The memory that would have kept the pages that came back.
    pub refaults: RefaultHistogram,
    /// Extents that the process holds, a bit each.
    pub held: [AtomicU64; MAX_EXTENTS / 64],
}

/// What the agent of a process says of itself. Written by the process, but for
/// [`AgentWords::past_libc`], which the supervisor makes 0.
#[repr(C)]
pub struct AgentWords {
    /// Not 0: its forks come through no hook, and wait until it has said in `fork_held` that they
    /// may be made.
    pub past_libc: AtomicU32,
    /// The number in [`ProcControl::fork_hold`] that it has seen: since then everything is in, and
    /// stays, until that is 0.
    pub fork_held: AtomicU32,
    /// Not 0: its threads run before those of the program.
    pub goes_first: AtomicU32,
    /// Threads of the process in a call that may write past page tables, by the turn in which they
    /// began ([`Segment::next_turn_of_past_writes`]).
    pub past_writes: [AtomicU32; 2],
    /// The number of such calls that have begun, wrapping.
    pub past_writes_begun: AtomicU32,
}

impl AgentWords {
    fn clear(&self) {
        clear_words([&self.past_libc, &self.fork_held, &self.goes_first]);
        clear_words(&self.past_writes);
    }
}

/// In [`ProcControl::detach`]: the agent was put into the process while it ran, and leaves it.
pub const WITHDRAW: u32 = 2;

/// The supervisor's orders to a process. Written by the supervisor, but for
/// [`ProcControl::preload`], which both write.
#[repr(C)]
pub struct ProcControl {
    /// Bytes of anonymous memory that the process may keep resident, everything included.
    pub limit_bytes: AtomicU64,
    /// Bytes that its compressed memory may have for its group's sake; without, as many as its
    /// limit permits.
    pub pool_max: OptionalLimit<AtomicU64>,
    /// Futex word: raised, and its waiters woken, when `limit_bytes` or `engage` changed.
    pub wake_seq: AtomicU32,
    /// Futex word: raised, and its waiters woken, while the first thread of the process has ended
    /// and others live.
    pub leader_exited: AtomicU32,
    /// Not 0: the process shall put its memory under management.
    pub engage: AtomicU32,
    /// The group that the process belongs to.
    pub group_wanted: AtomicU32,
    /// Not 0: nothing goes to the swap areas, neither from compressed memory nor past it.
    pub no_writeback: AtomicU32,
    /// Not 0: everything that is swapped shall come in, as far as there is room; the process makes
    /// it 0 when it has. Its supervisor may do so before.
    pub preload: AtomicU32,
    /// Microseconds that a thread waits for [`THROTTLE_PAGES`] fresh pages, because its group has
    /// more than `swap.high`.
    pub throttle_us: AtomicU32,
    /// Not 0: everything shall come in, whatever room there is, and the process be released.
    /// 0 again when the supervisor has changed its mind; the process has done it when its state is
    /// [`ProcState::Detached`]. [`WITHDRAW`]: nothing of swaptide's shall stay in it then.
    pub detach: AtomicU32,
    /// Not 0: much of its memory is another's, too, since a fork. Another number each time the
    /// supervisor has seen that.
    pub cow_hint: AtomicU32,
    /// Not 0: the supervisor has decided once whether the process is to be managed.
    pub looked: AtomicU32,
    /// Futex word. Not 0: a thread is about to fork past libc; everything shall come in, whatever
    /// limit there is, and stay until this is 0. Another number for each time.
    pub fork_hold: AtomicU32,
}

/// The memory use of a process. Written by the process.
#[repr(C)]
pub struct ProcUsage {
    /// Bytes of the program's memory that is managed and resident.
    pub managed_bytes: AtomicU64,
    /// Bytes of shared memory that this process is the pager of, resident.
    pub shared_bytes: AtomicU64,
    /// Bytes in staging frames.
    pub staging_bytes: AtomicU64,
    /// Bytes of compressed memory.
    pub pool_bytes: AtomicU64,
    /// Bytes of tables and the engine's other memory.
    pub overhead_bytes: AtomicU64,
    /// Bytes of the program that are swapped to compressed memory, uncompressed size.
    pub swapped_pool_bytes: AtomicU64,
    /// Bytes of the program that are swapped to the areas.
    pub swapped_file_bytes: AtomicU64,
    /// Largest sum of resident and swapped bytes.
    pub peak_footprint_bytes: AtomicU64,
    /// While a thread of the process waits for memory: since when, in nanoseconds of the monotonic
    /// clock; else 0. What is over is in [`Counter::StallUs`].
    pub stalled_since: AtomicU64,
}

/// Makes words 0.
fn clear_words<'a>(words: impl IntoIterator<Item = &'a AtomicU32>) {
    for word in words {
        word.store(0, Relaxed);
    }
}

impl ProcControl {
    /// Copies a parent's values to a forked child: the group, and what follows from it.
    fn inherit(&self, parent: &ProcControl) {
        for (own, parents) in [
            (&self.group_wanted, &parent.group_wanted),
            (&self.no_writeback, &parent.no_writeback),
            (&self.throttle_us, &parent.throttle_us),
        ] {
            own.store(parents.load(Relaxed), Relaxed);
        }
        self.pool_max.set(parent.pool_max.get());
    }

    /// As for a process of which nothing was said. The futex words keep their numbers.
    fn clear(&self) {
        clear_words([
            &self.engage,
            &self.group_wanted,
            &self.no_writeback,
            &self.preload,
            &self.throttle_us,
            &self.detach,
            &self.cow_hint,
            &self.looked,
            &self.fork_hold,
        ]);
        self.pool_max.set(None);
        self.limit_bytes.store(0, Relaxed);
    }
}

impl ProcUsage {
    /// The process holds nothing at the moment.
    fn clear(&self) {
        for word in [
            &self.managed_bytes,
            &self.shared_bytes,
            &self.staging_bytes,
            &self.pool_bytes,
            &self.overhead_bytes,
            &self.swapped_pool_bytes,
            &self.swapped_file_bytes,
            &self.stalled_since,
        ] {
            word.store(0, Relaxed);
        }
    }
}

impl ProcSlot {
    /// What a word of bytes says, within `MAX_BYTES`: for readers of the word of another process,
    /// which may be anything.
    pub fn bytes(word: &AtomicU64) -> u64 {
        word.load(Relaxed).min(MAX_BYTES)
    }

    /// Returns a counter, capped at `MAX_COUNT`.
    pub fn counted(&self, counter: Counter) -> u64 {
        self.counters[counter as usize].load(Relaxed).min(MAX_COUNT)
    }

    /// Adds to a counter.
    pub fn count(&self, counter: Counter, n: u64) {
        self.counters[counter as usize].fetch_add(n, Relaxed);
    }

    /// Takes back what was counted before it had happened, and did not.
    pub fn uncount(&self, counter: Counter, n: u64) {
        self.counters[counter as usize].fetch_sub(n, Relaxed);
    }

    /// The state; a word that is none of them (a damaged segment) reads as free.
    pub fn state(&self) -> ProcState {
        match self.state.load(Acquire) {
            1 => ProcState::Watching,
            2 => ProcState::Engaged,
            3 => ProcState::Refused,
            4 => ProcState::Detached,
            _ => ProcState::Free,
        }
    }

    /// Microseconds in which a thread waited for memory, `now` (of the monotonic clock) among them
    /// if one does. May fall back for a moment when a wait ends.
    pub fn stalled_us(&self, now: Nanos) -> u64 {
        // In this order: what is counted is not under way any more. Pairs with the fence of the
        // engine's `stall`.
        let over = self.counters[Counter::StallUs as usize].load(Acquire);
        over.saturating_add(self.stalls_for(now).as_micros() as u64)
    }

    /// Returns the length at `now` of the present wait for memory; zero if no thread waits.
    pub fn stalls_for(&self, now: Nanos) -> Duration {
        match self.usage.stalled_since.load(Relaxed) {
            0 => Duration::ZERO,
            since => Duration::from_nanos(now.0.saturating_sub(since)),
        }
    }

    /// Restarts the present wait at `now`: the time before does not count, for the process was
    /// stopped.
    pub fn restart_stall(&self, now: Nanos) {
        let since = self.usage.stalled_since.load(Relaxed);
        if since != 0 {
            // When it has ended meanwhile there is nothing to move.
            let _ = self.usage.stalled_since.compare_exchange(since, now.0, Relaxed, Relaxed);
        }
    }

    /// Changes the state.
    pub fn set_state(&self, state: ProcState) {
        self.state.store(state as u32, Release);
    }

    /// What a forked child has of its parent: the group, and what comes of it.
    fn inherit(&self, parent: &ProcSlot) {
        self.group.store(parent.group.load(Relaxed), Relaxed);
        self.control.inherit(&parent.control);
    }

    /// Reports that the first thread has ended, and wakes waiters on `leader_exited`.
    pub fn signal_leader_exit(&self) {
        self.control.leader_exited.fetch_add(1, Release);
        futex::wake(&self.control.leader_exited, i32::MAX as u32, futex::Scope::Shared);
        if self.state() == ProcState::Watching {
            self.wake();
        }
    }

    /// Has everything come in and stay (see [`ProcControl::fork_hold`]), or lets it go out again
    /// (0).
    pub fn hold_for_fork(&self, number: u32) {
        self.control.fork_hold.store(number, Release);
        futex::wake(&self.control.fork_hold, i32::MAX as u32, futex::Scope::Shared);
        // Where nothing is managed yet, another thread waits.
        self.wake();
    }

    /// Increments `wake_seq` and wakes its waiters, which read the slot again.
    pub fn wake(&self) {
        self.control.wake_seq.fetch_add(1, Release);
        futex::wake(&self.control.wake_seq, i32::MAX as u32, futex::Scope::Shared);
    }
}

/// The whole segment, as it lies in the memfd. All zeros is an empty one.
#[repr(C)]
pub struct Segment {
    /// The part for all processes.
    pub header: Header,
    /// Holders of each extent, and whether it is in doubt (see [`crate::areas`]).
    pub extent_refs: [AtomicU16; MAX_EXTENTS],
    /// A slot for each managed process.
    pub procs: [ProcSlot; MAX_PROCS],
    /// Limits and charges of the groups.
    pub groups: Groups,
}

/// Why a segment cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// The map is smaller than a segment.
    #[error(
        "the shared segment is too small: the supervisor and the agent are of different builds; \
        install both from one"
    )]
    TooSmall,
    /// The first word is not [`MAGIC`].
    #[error("the shared segment is not set up; start the program with swaptide run")]
    NotASegment,
    /// Supervisor and agent come from different builds.
    #[error(
        "the shared segment has version {0}, this build speaks {own}: install supervisor and agent \
        from one build",
        own = VERSION
    )]
    Version(u32),
}

impl Segment {
    /// Bytes of a segment (pages that are not touched cost nothing).
    pub const BYTES: usize = size_of::<Segment>();

    /// The segment in a map that stays for the rest of the process's life, before it is set up.
    ///
    /// # Errors
    /// [`SegmentError::TooSmall`].
    pub fn raw(map: SharedMap) -> Result<&'static Segment, SegmentError> {
        if map.len() < Self::BYTES {
            return Err(SegmentError::TooSmall);
        }
        let start = map.leak();
        // SAFETY: the map is page aligned, at least as long as a Segment, never unmapped (leaked),
        // and every bit pattern is a valid Segment, which consists of atomics only; other processes
        // change it through atomics too.
        Ok(unsafe { start.cast::<Segment>().as_ref() })
    }

    /// The segment in a map, checked.
    ///
    /// # Errors
    /// See [`SegmentError`].
    pub fn open(map: SharedMap) -> Result<&'static Segment, SegmentError> {
        let segment = Self::raw(map)?;
        if segment.header.magic.load(Acquire) != MAGIC {
            return Err(SegmentError::NotASegment);
        }
        match segment.header.version.load(Relaxed) {
            VERSION => Ok(segment),
            other => Err(SegmentError::Version(other)),
        }
    }

    /// Claims a slot for process `pid`. A slot it had before it executed another program is taken
    /// over with its counters and without its extents. `None` when all are taken.
    pub fn claim(&self, pid: u32, forked_from: u32) -> Option<SlotIndex> {
        let end = (self.header.slots_end.load(Relaxed) as usize).min(MAX_PROCS);
        if let Some(index) = self.procs[..end].iter().position(|slot| slot.pid.load(Relaxed) == pid)
        {
            let index = SlotIndex(index as u32);
            self.forget_holds(index, |_| {});
            let slot = self.slot(index);
            let control = &slot.control;
            clear_words([&control.engage, &control.detach, &control.fork_hold, &control.looked]);
            control.limit_bytes.store(0, Relaxed);
            slot.usage.clear();
            slot.agent.clear();
            slot.forked_from.store(forked_from, Relaxed);
            slot.set_state(ProcState::Watching);
            return Some(index);
        }
        let max = match self.header.injection.slots_max.load(Relaxed) {
            0 => MAX_PROCS,
            max => max as usize,
        };
        for (index, slot) in self.procs.iter().take(max).enumerate() {
            if slot.pid.load(Relaxed) == 0
                && slot.pid.compare_exchange(0, pid, AcqRel, Relaxed).is_ok()
            {
                // A process that forked may have shared extents with a child that was gone by then.
                self.forget_holds(SlotIndex(index as u32), |_| {});
                slot.forked_from.store(forked_from, Relaxed);
                if let Some(parent) = self.procs[..end]
                    .iter()
                    .find(|parent| forked_from != 0 && parent.pid.load(Relaxed) == forked_from)
                {
                    slot.inherit(parent);
                }
                self.header.slots_end.fetch_max(index as u32 + 1, Relaxed);
                slot.set_state(ProcState::Watching);
                return Some(SlotIndex(index as u32));
            }
        }
        self.header.slots_exhausted.fetch_add(1, Relaxed);
        None
    }

    /// The slot at an index.
    ///
    /// # Panics
    /// When the index is not one that [`Segment::claim`] gave.
    pub fn slot(&self, index: SlotIndex) -> &ProcSlot {
        &self.procs[index.0 as usize]
    }

    /// Every slot that a process holds (claimed, and its claim complete).
    pub fn claimed(&self) -> impl Iterator<Item = (SlotIndex, &ProcSlot)> {
        let end = (self.header.slots_end.load(Relaxed) as usize).min(MAX_PROCS);
        (0..)
            .map(SlotIndex)
            .zip(&self.procs[..end])
            .filter(|(_, slot)| slot.state() != ProcState::Free && slot.pid.load(Acquire) != 0)
    }

    /// Clears a slot whose process is gone and gives back its extents; calls `freed` for each
    /// extent that no process holds any more. Supervisor only (invariant 3).
    pub fn release(&self, index: SlotIndex, freed: impl FnMut(ExtentId)) {
        let slot = self.slot(index);
        self.forget_holds(index, freed);
        for counter in &slot.counters {
            counter.store(0, Relaxed);
        }
        for bucket in &slot.faults.buckets {
            bucket.store(0, Relaxed);
        }
        slot.faults.max_ns.store(0, Relaxed);
        for bucket in &slot.refaults.pages {
            bucket.store(0, Relaxed);
        }
        slot.control.clear();
        slot.usage.clear();
        slot.usage.peak_footprint_bytes.store(0, Relaxed);
        clear_words([&slot.group, &slot.engage_now, &slot.engine_threads, &slot.forked_from]);
        slot.agent.clear();
        slot.set_state(ProcState::Free);
        slot.pid.store(0, Release);
    }
}

/// An empty segment.
#[cfg(test)]
pub(crate) fn test_segment() -> &'static Segment {
    let fd = swaptide_sys::mem::memfd_create(c"test", Segment::BYTES as u64).expect("memfd");
    let map = SharedMap::map(std::os::fd::AsFd::as_fd(&fd), Segment::BYTES).expect("map");
    Segment::raw(map).expect("raw")
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_sys::mem::memfd_create;

    #[test]
    fn claimed_slots_are_known_and_a_process_has_only_one() {
        let segment = test_segment();
        let first = segment.claim(10, 0).expect("slot");
        let gone = segment.claim(11, 0).expect("slot");
        let last = segment.claim(12, 0).expect("slot");
        segment.release(gone, |_| ());
        assert_eq!(segment.claim(10, 0), Some(first));
        assert_eq!(segment.claimed().map(|(index, _)| index).collect::<Vec<_>>(), [first, last]);
    }

    #[test]
    fn segment_json_has_the_offsets_of_the_layout() {
        use std::mem::offset_of;
        let mirror = offset_of!(Segment, header)
            + offset_of!(Header, areas)
            + offset_of!(AreaTable, slots)
            + crate::area::MIRROR_AT;
        let fail = offset_of!(Segment, header)
            + offset_of!(Header, injection)
            + offset_of!(InjectionConfig, fail);
        let full = offset_of!(ProcSlot, counters) + 8 * Counter::SwapFull as usize;
        let names = [
            ("SEGMENT_HEADER", size_of::<Header>()),
            ("SEGMENT_SLOTS_END", offset_of!(Header, slots_end)),
            ("SEGMENT_FAIL", fail),
            ("SEGMENT_MIRROR", mirror),
            ("SEGMENT_PROCS", offset_of!(Segment, procs)),
            ("SEGMENT_SLOT", size_of::<ProcSlot>()),
            ("SEGMENT_SWAP_FULL", full),
            ("SEGMENT_GROUPS", offset_of!(Segment, groups)),
        ];
        let lines: Vec<String> =
            names.iter().map(|(name, at)| format!("    \"{name}\": {at}")).collect();
        let expected = format!("{{\n{}\n}}\n", lines.join(",\n"));
        assert_eq!(include_str!("../../../tests/e2e/segment.json"), expected);
    }

    #[test]
    fn the_document_of_the_segment_has_every_word() {
        let document = include_str!("../../../docs/segment.md");
        let sources = [
            include_str!("layout.rs"),
            include_str!("area.rs"),
            include_str!("group.rs"),
            include_str!("counters.rs"),
        ];
        let words_of = |structure: &str| {
            let begins = format!("struct {structure} {{\n");
            let body =
                sources.iter().find_map(|source| source.split_once(&begins)).expect("source");
            let lines = body.1.lines().take_while(|line| *line != "}");
            let fields = lines.filter_map(|line| line.trim_start().split_once(": "));
            let words: Vec<&str> = fields
                .filter(|(_, kind)| kind.contains("Atomic"))
                .filter_map(|(name, _)| name.rsplit(' ').next())
                .collect();
            assert!(!words.is_empty(), "{structure} has no words");
            words
        };
        for (heading, structures) in [
            (
                "Header",
                &["Header", "PoolConfig", "SwapInConfig", "InjectionConfig", "AreaTable"][..],
            ),
            ("Areas", &["Area", "AreaSpan", "ExportWords", "Segment"]),
            (
                "Slots",
                &[
                    "ProcSlot",
                    "AgentWords",
                    "ProcControl",
                    "ProcUsage",
                    "FaultHistogram",
                    "RefaultHistogram",
                ],
            ),
            ("Groups", &["GroupSlot", "Groups"]),
        ] {
            let begins = format!("\n## {heading}");
            let section = document.split_once(&begins).expect("its heading").1;
            let section = section.split("\n## ").next().unwrap_or_default();
            let quoted: Vec<&str> = section
                .split('`')
                .skip(1)
                .step_by(2)
                .flat_map(|name| {
                    name.split(|letter: char| !(letter == '_' || letter.is_alphanumeric()))
                })
                .collect();
            for structure in structures {
                for word in words_of(structure) {
                    assert!(quoted.contains(&word), "{heading}: no row has {structure}::{word}");
                }
            }
        }
    }

    #[test]
    fn an_unset_segment_is_refused() {
        let fd = memfd_create(c"test", Segment::BYTES as u64).expect("memfd");
        let map = SharedMap::map(std::os::fd::AsFd::as_fd(&fd), Segment::BYTES).expect("map");
        assert_eq!(Segment::open(map).err(), Some(SegmentError::NotASegment));
    }
}
