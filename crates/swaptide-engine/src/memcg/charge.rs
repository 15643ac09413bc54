//! What a process costs, against what it may cost.
//!
//! Owns: the limit the supervisor set, the parts of the charge that are kept as they change
//! (managed pages, frames, compressed pool) and the rest, which is measured: everything anonymous
//! that is not under management.
//!
//! Invariant: `charged()` is at least what the kernel accounts to the process as anonymous memory
//! at the last [`Charge::measure`], give or take the kernel's own per-CPU slack (a few hundred
//! KiB), plus what was filled since.
//!
//! Locks: none; atomics, each read on its own.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};

use swaptide_ipc::{NO_LIMIT, ProcSlot};
use swaptide_sys::page::PAGE_SIZE;
use swaptide_sys::process::StatmFd;

use crate::memcg::acceptance::{Acceptance, Verdict};
use crate::memcg::cow_group::CowGroup;
use crate::mm::types::{CHUNK_BYTES, CHUNKS_PER_LEAF};

/// Copies of pages that the program has again take at most this part of the limit.
const CLEAN_COPIES_DIVISOR: u64 = 128;

/// Where a fault brings in fewer pages than this, on average, they come in one by one.
const SPARSE_PAGES_PER_CHUNK: u32 = 2;

/// Where nothing can be put any more, at least this part of what there is to divide stays with the
/// program.
const MIN_RESIDENT_DIVISOR: u64 = 8;

/// By so much at a time the program may go past its limit where it cannot work within, and to this
/// part of the limit at most.
const GRACE_STEP: u64 = 64 << 10;
const GRACE_DIVISOR: u64 = 20;

/// Where memory that cannot go out reaches the limit, this part of the limit is left for what can,
/// within these bounds: without it the program would make no progress.
const LEAST_MOVABLE_DIVISOR: u64 = 32;
const LEAST_MOVABLE_BYTES: u64 = 256 << 10;
const MOST_LEAST_MOVABLE_BYTES: u64 = 8 << 20;

/// Compressed memory that a fork shares with its parent, from which on it is worth something to
/// keep it so.
const MIN_SHARED_POOL_BYTES: u64 = 16 << 20;

/// The share of compressed memory in a copy-on-write group, in 1/1024.
const COW_GROUP_SHARE_1024: u32 = 960;
/// The growth allowed to compressed memory when a copy-on-write group has ended, in 1/1024.
const COW_GROUP_SLACK_1024: u32 = 16;
/// The least share that a fork leaves to each of the two processes, if there was that much.
const MIN_FORK_SHARE_BYTES: u64 = 4 << 20;

/// What compressed memory may take.
struct PoolBounds {
    /// Its share in 1/1024 of what is divided.
    share: AtomicU32,
    /// Bytes for all processes together; 0: no bound.
    cap: AtomicU64,
    /// Bytes that the other processes take of those.
    used_by_others: AtomicU64,
    /// Bytes that this process's may take for its group's sake.
    group_max: AtomicU64,
    acceptance: Acceptance,
}

/// The memory use of a process, by kind, and its limit; all in bytes.
pub struct Charge {
    limit: AtomicU64,
    grace: AtomicU64,
    bounds: PoolBounds,
    pages: AtomicU64,
    pool: AtomicU64,
    ready: AtomicU64,
    rest: AtomicI64,
    surge: AtomicI64,
    /// Bytes of managed memory that cannot go out, as of the last look at the mappings.
    unmovable: AtomicU64,
    /// Pages go out one by one, and so they come in.
    scattered: AtomicBool,
    /// Smoothed pages that a fault brings in, in 1/16.
    brought_16: AtomicU32,
    /// Bytes in shared memory that are this process's to pay for.
    shared_bytes: AtomicU64,
    /// Sharing of this process's memory with others since a fork.
    pub(crate) cow_group: CowGroup,
}

impl Charge {
    /// A charge of nothing under a limit of `limit` bytes.
    pub fn new(limit: u64, pool_percent: u64, pool_cap: u64) -> Charge {
        Charge {
            limit: AtomicU64::new(limit),
            grace: AtomicU64::new(0),
            bounds: PoolBounds {
                share: AtomicU32::new((pool_percent * 1024 / 100) as u32),
                cap: AtomicU64::new(pool_cap),
                used_by_others: AtomicU64::new(0),
                group_max: AtomicU64::new(u64::MAX),
                acceptance: Acceptance::new(0, 0),
            },
            pages: AtomicU64::new(0),
            pool: AtomicU64::new(0),
            ready: AtomicU64::new(0),
            rest: AtomicI64::new(0),
            surge: AtomicI64::new(0),
            unmovable: AtomicU64::new(0),
            scattered: AtomicBool::new(false),
            brought_16: AtomicU32::new(16 * SPARSE_PAGES_PER_CHUNK),
            shared_bytes: AtomicU64::new(0),
            cow_group: CowGroup::default(),
        }
    }

    /// The same with a rule by which compressed memory takes pages.
    pub(crate) fn with_acceptance(self, acceptance: Acceptance) -> Charge {
        Charge { bounds: PoolBounds { acceptance, ..self.bounds }, ..self }
    }

    /// The limit in bytes.
    pub fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    /// Bytes that the pools of all processes may take together; 0 when only the limits bound them.
    pub fn pool_cap(&self) -> u64 {
        self.bounds.cap.load(Relaxed)
    }

    /// The pools of all other processes take `bytes`.
    pub(crate) fn others_pool(&self, bytes: u64) {
        self.bounds.used_by_others.store(bytes, Relaxed);
    }

    /// Takes over what the supervisor wrote.
    pub(crate) fn take_limit(&self, slot: &ProcSlot) {
        let limit = slot.control.limit_bytes.load(Relaxed);
        // For a fork everything comes in, and stays.
        let is_held = slot.control.fork_hold.load(Relaxed) != 0;
        let limit = if is_held { NO_LIMIT } else { limit };
        if limit != 0 && self.cow_group.accepts_limit(limit) {
            self.limit.store(limit, Relaxed);
        }
        self.bounds.group_max.store(slot.control.pool_max.get().unwrap_or(u64::MAX), Relaxed);
        self.cow_group.on_hint(slot.control.cow_hint.load(Relaxed));
    }

    /// Returns the share that a fork leaves to each of the two: half of the limit, if there is that
    /// much. Where there is something to keep, it is not heeded at once
    /// ([`CowGroup::set_fork_limit`]). In both processes, before another limit is taken over.
    pub(crate) fn split_limit(&self) -> u64 {
        // Of several forks before the supervisor has looked each leaves half of what the last one
        // left.
        let limit = self.cow_group.fork_limit_in_force().unwrap_or_else(|| self.limit());
        let half = (limit / 2).max(MIN_FORK_SHARE_BYTES.min(limit));
        if self.is_pool_worth_sharing() {
            self.cow_group.set_fork_limit(half);
        }
        half
    }

    /// The program makes no progress within its limit (see [`crate::memcg::thrash`]): it may exceed
    /// it by a little more.
    pub(crate) fn grant_grace(&self) {
        let most = self.limit() / GRACE_DIVISOR;
        self.grace.store((self.grace.load(Relaxed) + GRACE_STEP).min(most), Relaxed);
    }

    /// Takes back some of what [`Charge::grant_grace`] gave.
    pub(crate) fn decay_grace(&self) {
        let grace = self.grace.load(Relaxed);
        self.grace.store(grace - (grace / 64 + PAGE_SIZE as u64).min(grace), Relaxed);
    }

    /// Publishes managed pages (the program's and full frames), how many of them are free frames,
    /// and the pool's bytes.
    pub fn publish(&self, pages: usize, ready: usize, pool_bytes: usize) {
        self.ready.store(ready as u64, Relaxed);
        self.pages.store(pages as u64, Relaxed);
        self.pool.store(pool_bytes as u64, Relaxed);
    }

    /// Bytes charged.
    fn charged(&self) -> u64 {
        let kept = self.pages.load(Relaxed) * PAGE_SIZE as u64 + self.pool.load(Relaxed);
        kept.saturating_add_signed(self.rest.load(Relaxed)) + self.shared_bytes.load(Relaxed)
    }

    /// `bytes` of this process lie in shared memory, where they are not measured.
    pub(crate) fn set_shared_bytes(&self, bytes: u64) {
        self.shared_bytes.store(bytes, Relaxed);
    }

    /// True when there is so much in compressed memory that it is worth something to look after
    /// what forks do with it.
    pub(crate) fn is_pool_worth_sharing(&self) -> bool {
        self.pool() >= MIN_SHARED_POOL_BYTES
    }

    /// Bytes that are not under management.
    pub fn rest(&self) -> i64 {
        self.rest.load(Relaxed)
    }

    /// Sets the result of [`Charge::measure`], for tests.
    #[cfg(test)]
    pub(crate) fn set_rest(&self, rest: i64) {
        self.rest.store(rest, Relaxed);
    }

    /// Measures the rest again. `kept` must have been published just before.
    pub fn measure(&self, statm: &StatmFd) {
        if let Some(anon) = statm.anon_rss() {
            let kept = self.pages.load(Relaxed) * PAGE_SIZE as u64 + self.pool.load(Relaxed);
            let rest = anon as i64 - kept as i64;
            let grown = rest - self.rest.swap(rest, Relaxed);
            let surge = self.surge.load(Relaxed);
            self.surge.store(grown.max(surge - surge / 128 - 1).max(0), Relaxed);
        }
    }

    /// Of what is managed `bytes` cannot go out.
    pub(crate) fn set_unmovable(&self, bytes: u64) {
        self.unmovable.store(bytes, Relaxed);
    }

    /// True if more is charged than the limit.
    pub(crate) fn is_past_limit(&self) -> bool {
        self.charged() > self.limit()
    }

    /// True if more is charged than the limit, or nearly as much.
    pub(crate) fn is_near_limit(&self) -> bool {
        self.charged() > self.limit() - self.limit() / LEAST_MOVABLE_DIVISOR
    }

    /// The limit, or what cannot go out and a little for the rest, where that is more.
    fn bearable_limit(&self) -> u64 {
        let limit = self.limit();
        let least =
            (limit / LEAST_MOVABLE_DIVISOR).clamp(LEAST_MOVABLE_BYTES, MOST_LEAST_MOVABLE_BYTES);
        let unmovable = self.unmovable.load(Relaxed).saturating_add(self.rest().max(0) as u64);
        // What is out takes some, too.
        let pool = self.pool().min(least);
        limit.max(unmovable.saturating_add(pool + least))
    }

    /// Bytes that may still be filled before the limit is reached; negative beyond it. What the
    /// program lately grew by between two scans in memory that is not managed yet is kept free, up
    /// to an eighth of the limit.
    pub(crate) fn headroom(&self) -> i64 {
        let limit = self.bearable_limit() as i64;
        limit + self.grace.load(Relaxed) as i64
            - self.charged() as i64
            - self.surge.load(Relaxed).min(self.limit() as i64 / 8)
    }

    /// Bytes that may be filled: the headroom, and the free frames, which are charged already and
    /// are filled first.
    pub fn room(&self) -> i64 {
        self.headroom() + (self.ready.load(Relaxed) * PAGE_SIZE as u64) as i64
    }

    /// Reclaim continues until the headroom is this.
    pub fn high(&self) -> i64 {
        (self.limit() / 32).clamp(1 << 20, 32 << 20) as i64
    }

    /// The last batch was made of many short moves (or not): so little comes in for a fault, too,
    /// and less need be kept free for it.
    pub(crate) fn set_scattered(&self, scattered: bool) {
        self.scattered.store(scattered, Relaxed);
    }

    /// A fault brought in `pages`. Of two that are told at once one may not count.
    pub(crate) fn brought(&self, pages: usize) {
        let mean = self.brought_16.load(Relaxed);
        self.brought_16.store((mean * 15 + 16 * pages as u32) / 16, Relaxed);
    }

    /// True while pages come in one by one: little need be kept free for them, however many go out
    /// together.
    pub(crate) fn is_sparse(&self) -> bool {
        self.scattered.load(Relaxed) || self.brought_16.load(Relaxed) < 16 * SPARSE_PAGES_PER_CHUNK
    }

    /// While there is less room than this, the thread that serves faults reclaims.
    pub fn goal(&self) -> i64 {
        match (self.scattered.load(Relaxed), self.is_sparse()) {
            (true, _) => self.high() / 4,
            (false, true) => self.high() / 8,
            (false, false) => self.high(),
        }
    }

    /// While there is less room than this, workers take something out themselves: dense batches
    /// early, scattered ones only when the thread that serves faults does not keep up (see
    /// [`crate::reclaim::worker`]).
    pub fn due(&self) -> i64 {
        if self.scattered.load(Relaxed) { self.high() / 16 } else { self.goal() }
    }

    /// Chunks that reclaim takes at a time: a small limit must not have a large part of it on its
    /// way.
    pub(crate) fn batch_chunks(&self) -> usize {
        (self.limit() as usize / 128 / CHUNK_BYTES).clamp(2, CHUNKS_PER_LEAF)
    }

    /// Free frames worth keeping for the next growth or swap-in.
    pub(crate) fn keep_frames(&self) -> usize {
        let frames = (self.limit() as usize / 64 / PAGE_SIZE).clamp(32, 1024);
        if self.is_sparse() { frames / 16 } else { frames }
    }

    /// Most pages that one fault fills.
    pub(crate) fn window_pages(&self) -> usize {
        (self.limit() as usize / 64 / PAGE_SIZE).clamp(16, 512)
    }

    /// The same where the pages are remote: a window is all that comes in the time of one answer.
    pub(crate) fn remote_window_pages(&self) -> usize {
        (self.limit() as usize / 16 / PAGE_SIZE).clamp(16, 512)
    }

    /// Bytes that the compressed pool may take before its oldest pages go to a swap area.
    pub fn pool_limit(&self) -> u64 {
        let share = if self.cow_group.is_active() {
            COW_GROUP_SHARE_1024.max(self.pool_share())
        } else {
            self.pool_share()
        };
        (self.divisible() / 1024 * u64::from(share)).min(self.pool_bound())
    }

    /// Bytes that the compressed pool may take whatever its share is: those of `zram:SIZE` that
    /// other processes leave, those of the group, and those of `max_pool_percent`; `u64::MAX` where
    /// nothing bounds it.
    pub fn pool_bound(&self) -> u64 {
        let cap = match self.pool_cap() {
            0 => u64::MAX,
            cap => cap.saturating_sub(self.bounds.used_by_others.load(Relaxed)),
        };
        cap.min(self.bounds.group_max.load(Relaxed)).min(self.bounds.acceptance.bound(self.limit()))
    }

    /// Whether compressed memory takes pages, now that it has `pool` bytes.
    pub(crate) fn ask_pool(&self, pool: u64) -> Verdict {
        self.bounds.acceptance.ask(pool, self.pool_bound())
    }

    /// True while compressed memory refuses pages, as of the last one that was to be stored.
    pub(crate) fn pool_refuses(&self) -> bool {
        self.bounds.acceptance.is_full()
    }

    /// Bytes down to which the oldest pages of compressed memory go to the swap areas.
    pub(crate) fn pool_goal(&self) -> u64 {
        let limit = self.pool_limit();
        if self.pool_refuses() {
            limit.min(self.bounds.acceptance.threshold(self.pool_bound()))
        } else {
            limit
        }
    }

    /// True when nothing should leave the program that only compressed memory can take: it is past
    /// its bound, or so far past its share that little stays resident.
    pub(crate) fn pool_is_full(&self) -> bool {
        let pool = self.pool();
        let resident = self.pages.load(Relaxed) * PAGE_SIZE as u64;
        let bounded = self.pool_bound() != u64::MAX;
        pool > self.pool_limit() && (bounded || resident < self.divisible() / MIN_RESIDENT_DIVISOR)
    }

    /// Bytes to be divided between managed pages and compressed memory: the limit less what is not
    /// under management, but not less than half.
    pub(crate) fn divisible(&self) -> u64 {
        let limit = self.limit();
        limit.saturating_sub(self.rest().max(0) as u64).max(limit / 2)
    }

    /// The share of the compressed pool, in 1/1024 of [`Charge::divisible`].
    pub(crate) fn pool_share(&self) -> u32 {
        self.bounds.share.load(Relaxed)
    }

    /// Gives the compressed pool another share.
    pub(crate) fn set_pool_share(&self, share: u32) {
        self.bounds.share.store(share, Relaxed);
    }

    /// True when compressed memory is so far above its share that nothing may go to it before
    /// something went to a swap area.
    pub(crate) fn pool_overflows(&self) -> bool {
        let margin =
            (self.limit() / 32).min((self.bounds.group_max.load(Relaxed) / 8).max(256 << 10));
        self.pool() > self.pool_limit() + margin
    }

    /// True while compressed memory may hold one more copy of a page that the program has again:
    /// `kept` of the `pages` it holds are such. They save a compression, and cost room; what they
    /// take is bounded, and they are the first to go. In a copy-on-write group they cost nothing:
    /// the others have the same memory, which giving them up would not free but have copied.
    pub(crate) fn keeps_copies(&self, kept: usize, pages: usize) -> bool {
        let bytes = self.pool() as u128 * kept as u128 / pages.max(1) as u128;
        let few =
            bytes < u128::from(self.limit() / CLEAN_COPIES_DIVISOR) || self.cow_group.is_active();
        few && self.pool() < self.pool_limit()
    }

    /// True in a fork while compressed memory is well below its share. What comes from a swap area
    /// then goes there when it goes out again, however old it is: a child that reads all that its
    /// parent had (to save it) would else read much of it twice. Elsewhere that loses more than it
    /// gains.
    pub(crate) fn may_compact_old(&self) -> bool {
        self.cow_group.is_child_member() && self.pool() < self.pool_limit() / 8 * 7
    }

    /// Looks whether this process is still in a copy-on-write group; called now and then.
    pub(crate) fn follow_cow_group(&self) {
        self.cow_group.look_for_parent();
        if self.cow_group.follow(self.pool() > self.pool_goal()) {
            // What grew meanwhile is divided again, but not by writing away at once what the next
            // child would have as well.
            let has = (u128::from(self.pool()) * 1024 / u128::from(self.divisible().max(1))) as u32
                + COW_GROUP_SLACK_1024;
            self.bounds
                .share
                .fetch_max(has.min(crate::memcg::pool_sizing::MAX_SHARE_1024), Relaxed);
        }
    }

    /// This process is a fork of `parent`; what it has, it shares with it. So little that many
    /// small forks could have as much again each does not count.
    pub fn inherit(&self, parent: u32) {
        if self.is_pool_worth_sharing() {
            self.cow_group.inherit(parent);
        }
    }

    /// Bytes of the compressed pool.
    pub fn pool(&self) -> u64 {
        self.pool.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charge_is_sum_of_kept_and_rest() {
        let charge = Charge::new(64 << 20, 75, 0);
        charge.publish(1024, 256, 1 << 20);
        assert_eq!(charge.charged(), (4 << 20) + (1 << 20));
        assert_eq!(charge.headroom(), (64 - 5) << 20);
        assert_eq!(charge.room(), (64 - 4) << 20);
        assert_eq!(charge.pool_limit(), 48 << 20);
    }

    #[test]
    fn a_thrashing_program_gets_a_twentieth_more_and_gives_it_back() {
        let charge = Charge::new(40 << 20, 75, 0);
        charge.publish(40 << 8, 0, 0);
        assert_eq!(charge.headroom(), 0);
        charge.grant_grace();
        assert_eq!(charge.headroom(), 64 << 10);
        (0..100).for_each(|_| charge.grant_grace());
        assert_eq!(charge.headroom(), 2 << 20);
        (0..1000).for_each(|_| charge.decay_grace());
        assert_eq!(charge.headroom(), 0);
    }

    #[test]
    fn what_cannot_go_out_leaves_a_little_for_the_rest() {
        let charge = Charge::new(128 << 20, 75, 0);
        charge.set_rest(100 << 20);
        assert_eq!(charge.headroom(), 28 << 20);
        charge.set_rest(200 << 20);
        assert_eq!((charge.headroom(), charge.is_past_limit()), (4 << 20, true));
        charge.publish(5 << 8, 0, 0);
        assert_eq!(charge.headroom(), -1 << 20, "more than that goes out");
        // Of what is managed some is locked.
        charge.set_rest(0);
        charge.publish(150 << 8, 0, 0);
        assert_eq!(charge.headroom(), -22 << 20);
        charge.set_unmovable(140 << 20);
        assert_eq!(charge.headroom(), -6 << 20);
        charge.publish(142 << 8, 0, 3 << 20);
        assert_eq!(charge.headroom(), 2 << 20);
        charge.publish(142 << 8, 0, 9 << 20);
        assert_eq!(charge.headroom(), -3 << 20, "some of it is to be written to an area");
        charge.set_unmovable(0);
        charge.publish(100 << 8, 0, 0);
        assert_eq!((charge.headroom(), charge.is_past_limit()), (28 << 20, false));
    }

    #[test]
    fn shared_memory_is_charged() {
        let charge = Charge::new(64 << 20, 75, 0);
        charge.publish(1024, 0, 0);
        charge.set_shared_bytes(1 << 20);
        assert_eq!((charge.charged(), charge.headroom()), (5 << 20, 59 << 20));
    }

    #[test]
    fn a_fork_halves_the_limit_later_where_a_pool_is_shared() {
        let (charge, slot) = (Charge::new(64 << 20, 75, 0), slot());
        let takes = |limit: u64| {
            slot.control.limit_bytes.store(limit, Relaxed);
            charge.take_limit(slot);
            charge.limit() >> 20
        };
        assert_eq!(charge.split_limit(), 32 << 20);
        assert_eq!(takes(32 << 20), 32);
        assert_eq!(takes(64 << 20), 64);
        charge.publish(0, 0, 16 << 20);
        assert_eq!(charge.split_limit(), 32 << 20);
        assert_eq!(
            (takes(32 << 20), takes(50 << 20), takes(32 << 20)),
            (64, 50, 32),
            "until the supervisor has seen the child"
        );
        assert_eq!(Charge::new(3 << 20, 75, 0).split_limit(), 3 << 20);
    }

    #[test]
    fn a_cow_group_keeps_compressed_memory() {
        let (charge, slot) = (Charge::new(64 << 20, 50, 0), slot());
        charge.publish(0, 0, 15 << 20);
        charge.inherit(swaptide_sys::process::parent());
        assert!(!charge.cow_group.is_active(), "so little is not worth it");
        charge.publish(0, 0, 33 << 20);
        assert!(
            !charge.keeps_copies(500, 1000)
                && !charge.may_compact_old()
                && charge.pool_limit() == 32 << 20
        );
        charge.inherit(swaptide_sys::process::parent());
        charge.follow_cow_group();
        assert!(
            charge.keeps_copies(500, 1000)
                && charge.may_compact_old()
                && charge.pool_limit() == 60 << 20
        );
        charge.publish(0, 0, 61 << 20);
        assert!(!charge.keeps_copies(500, 1000) && !charge.may_compact_old(), "past its share");
        charge.publish(0, 0, 40 << 20);
        charge.inherit(1 << 30);
        charge.follow_cow_group();
        assert!(
            !charge.may_compact_old() && charge.keeps_copies(500, 1000),
            "the parent is another one, but that may not be all"
        );
        std::thread::sleep(std::time::Duration::from_millis(220));
        charge.follow_cow_group();
        assert!(!charge.keeps_copies(500, 1000));
        assert!(
            (40 << 20..42 << 20).contains(&charge.pool_limit()),
            "what it has now stays for the next child"
        );
        slot.control.cow_hint.store(1, Relaxed);
        charge.take_limit(slot);
        assert!(charge.keeps_copies(500, 1000), "the supervisor says so");
    }

    #[test]
    fn where_pages_go_out_one_by_one_less_is_kept_free() {
        let charge = Charge::new(512 << 20, 75, 0);
        let dense = (charge.goal(), charge.due(), charge.keep_frames());
        charge.set_scattered(true);
        let scattered = (charge.goal(), charge.due(), charge.keep_frames());
        charge.set_scattered(false);
        (0..64).for_each(|_| charge.brought(1));
        let sparse = (charge.goal(), charge.due(), charge.keep_frames());
        (0..8).for_each(|_| charge.brought(16));
        let dense_again = (charge.goal(), charge.due(), charge.keep_frames());
        assert_eq!(dense, (16 << 20, 16 << 20, 1024));
        assert_eq!(dense_again, dense);
        assert_eq!(
            sparse,
            (2 << 20, 2 << 20, 64),
            "what comes in is little, though much goes out at once"
        );
        assert_eq!(scattered, (4 << 20, 1 << 20, 64), "the handler begins before the workers do");
    }

    #[test]
    fn pool_without_areas_full_at_bound() {
        let charge = Charge::new(64 << 20, 75, 0);
        charge.publish(4096, 0, 49 << 20);
        assert!(!charge.pool_is_full(), "16 MiB are resident");
        charge.publish(1024, 0, 60 << 20);
        assert!(charge.pool_is_full());
        let bounded = Charge::new(64 << 20, 75, 8 << 20);
        bounded.publish(8192, 0, 7 << 20);
        assert!(!bounded.pool_is_full());
        bounded.others_pool(2 << 20);
        assert!(bounded.pool_is_full(), "the bound is for all processes together");
    }

    #[test]
    fn a_pool_that_was_full_is_written_back_down_to_its_threshold() {
        let charge = Charge::new(100 << 20, 60, 0).with_acceptance(Acceptance::new(20, 50));
        assert_eq!(
            (charge.pool_bound(), charge.pool_limit(), charge.pool_goal()),
            (20 << 20, 20 << 20, 20 << 20)
        );
        assert_eq!(charge.ask_pool(20 << 20), Verdict::AtLimit);
        assert_eq!((charge.pool_goal(), charge.pool_refuses()), (10 << 20, true));
        assert_eq!(
            (charge.ask_pool(11 << 20), charge.ask_pool(10 << 20)),
            (Verdict::NotYet, Verdict::Takes)
        );
        assert_eq!(charge.pool_goal(), 20 << 20);
        charge.set_pool_share(100);
        assert_eq!(
            charge.pool_goal(),
            (100 << 20) / 1024 * 100,
            "a smaller share is for write-back alone"
        );
    }

    fn slot() -> &'static ProcSlot {
        let fd = swaptide_sys::mem::memfd_create(c"test", swaptide_ipc::Segment::BYTES as u64)
            .expect("memfd");
        let map = swaptide_sys::mem::SharedMap::map(
            std::os::fd::AsFd::as_fd(&fd),
            swaptide_ipc::Segment::BYTES,
        )
        .expect("map");
        let segment = swaptide_ipc::Segment::raw(map).expect("segment");
        segment.slot(segment.claim(10, 0).expect("slot"))
    }

    #[test]
    fn a_group_bounds_the_pool_of_a_process() {
        let slot = slot();
        let charge = Charge::new(64 << 20, 75, 0);
        charge.publish(4096, 0, 10 << 20);
        charge.take_limit(slot);
        assert_eq!(charge.pool_limit(), 48 << 20);
        slot.control.pool_max.set(Some(8 << 20));
        charge.take_limit(slot);
        assert_eq!(charge.pool_limit(), 8 << 20);
        assert!(charge.pool_is_full() && charge.pool_overflows());
        slot.control.pool_max.set(None);
        charge.take_limit(slot);
        assert!(!charge.pool_is_full());
    }
}
