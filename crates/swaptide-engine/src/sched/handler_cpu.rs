//! The CPU and scheduling class of the handler.
//!
//! A fault is an exchange between two threads that never run at the same time. On one CPU it costs
//! two switches; on two it costs two wake-ups of a sleeping CPU, which is many times as much on a
//! virtual machine. So the handler follows the thread that faults.
//!
//! That alone is not enough where a CPU is idle: the kernel then wakes the thread there, away from
//! the handler. So while one thread faults again and again, the handler runs in the idle class: the
//! CPU it occupies counts as free, and the thread it wakes stays. In that class the handler would
//! starve when there is other work. So it measures: the time that the two waited for a CPU, less
//! the time that one waited for the other, is what other threads took. It enters the class only if
//! that is little, checks again at intervals and after each long wait, and stays out the longer the
//! less its last stay was worth. (How many threads want a CPU says less: the kernel counts, for
//! milliseconds, those that have just gone to sleep.) It cannot see that it starves: others do. A
//! worker that finds a message unread for some milliseconds, and a thread that has waited as long
//! for a lock (the handler may hold it), call [`leave_sched_idle`], which puts it into the normal
//! class; a thread that makes a request, and so waits for the handler, calls [`boost_once`] first.
//!
//! Where several threads fault in turns it follows none of them ([`HandlerCpu::in_crowd`]).
//!
//! Owns: the CPU the handler is bound to, and its class; the CPU that workers keep away from.
//!
//! Where the thread runs is asked often at first and ever less often while the answer stays the
//! same; another thread's fault starts over. A handler in the idle class that comes to its turn and
//! finds nothing to read knows that the thread is elsewhere, and asks at the next fault.
//!
//! Workers that keep away from one CPU may be bound to another one by that, and a worker that wakes
//! on the handler's drives the thread away. So a handler that goes to another CPU sends the workers
//! from there before they wake.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use swaptide_sys::affinity::{
    CpuSet, CpuTimes, ThreadStat, ThreadTimes, clear_own_affinity, current_cpu, go_normally,
    own_affinity, own_nice, sched_idle, sched_normal, set_affinity, set_own_affinity,
    take_long_slice,
};
use swaptide_sys::thread::{Nanos, gettid, yield_now};

/// Faults between two checks of the CPU that the faulting thread runs on: at first, and at most.
const MIN_LOOK_FAULTS: u32 = 8;
const MAX_LOOK_FAULTS: u32 = 128;
/// More than a batch takes to be stored in memory.
const LONG_APART_FAULTS: u32 = 256;
/// Before several threads are seen to fault in turns, only every Nth change of threads is followed.
const FOLLOW_EVERY: u32 = 4;
/// Faults of one thread in a row, after which the handler goes to the idle class.
const FAULTS_BEFORE_IDLE_CLASS: u32 = 64;
/// Faults further apart than this, in nanoseconds, do not count as one exchange.
const MAX_GAP_NS: u64 = 200_000;
/// Faults between two checks of the CPU time that other threads take. There are fewer after a check
/// that found contention; that many checks in a row must find it.
const CROWD_CHECK_FAULTS: u32 = 32;
const CROWD_RECHECK_FAULTS: u32 = 8;
const CROWD_CHECKS: u32 = 2;
/// The CPU is contended if other threads take more than one part in this many of the time: the
/// handler would hardly run in the idle class then. A host that takes a virtual machine's CPUs away
/// takes less, and from either class.
const CROWD_DIVISOR: u64 = 2;
/// If an answer, or the wait for the next fault, takes longer than this, the check is made at once.
const SLOW_ANSWER_NS: u64 = 300_000;
/// If the CPU is contended, the handler stays out of the idle class and checks again after this
/// time. It also returns after this time from a stay that was worth it.
const CROWD_RETRY_NS: u64 = 2_000_000;
/// The time that the handler stays out of the idle class after a stay that was not worth it: at
/// first, and at most. One wait may take a second.
const MIN_STAY_OUT_NS: u64 = 50_000_000;
const MAX_STAY_OUT_NS: u64 = 20_000_000_000;

/// A stay in which this many faults were answered was worth it, however short: each was answered
/// several microseconds sooner.
const MIN_STAY_FAULTS: u32 = 1000;

/// There is no way back from the idle class.
const NO_RETURN: Nanos = Nanos(u64::MAX);

/// In place of a CPU's number: none is known.
pub(crate) const NO_CPU: u32 = u32::MAX;

/// The thread of this process that is in the idle class; 0 when none is.
static IN_IDLE_CLASS: AtomicU32 = AtomicU32::new(0);
/// It was taken out of the class by another thread and does not know yet.
static TAKEN_OUT_OF_IDLE: AtomicBool = AtomicBool::new(false);
/// It was for a moment.
static BOOSTED: AtomicBool = AtomicBool::new(false);

/// True while the handler may starve.
pub(crate) fn may_starve() -> bool {
    IN_IDLE_CLASS.load(Relaxed) != 0
}

/// Puts the handler into the normal class, if it is in the idle one. Any thread may call it.
pub(crate) fn leave_sched_idle() {
    let tid = IN_IDLE_CLASS.swap(0, Relaxed);
    if tid != 0 {
        // Should the handler leave or enter the class at this moment, it is in the normal one now
        // and sees the flag that is set below.
        let _ = sched_normal(tid);
        TAKEN_OUT_OF_IDLE.store(true, Relaxed);
    }
}

/// Lets the handler come to its turn for what the caller is about to ask of it. It may go back to
/// the idle class a little later, unless others want the CPU.
pub(crate) fn boost_once() {
    let tid = IN_IDLE_CLASS.load(Relaxed);
    if tid != 0 {
        let _ = sched_normal(tid);
        BOOSTED.store(true, Relaxed);
    }
}

/// A forked child has none of its parent's threads.
fn forget() {
    IN_IDLE_CLASS.store(0, Relaxed);
    TAKEN_OUT_OF_IDLE.store(false, Relaxed);
    BOOSTED.store(false, Relaxed);
}

/// Changes the class of the calling thread, the handler.
fn idle_class(on: bool) -> bool {
    if !on {
        IN_IDLE_CLASS.store(0, Relaxed);
    }
    let done = sched_idle(on).is_ok();
    if on && done {
        IN_IDLE_CLASS.store(gettid().0, Relaxed);
    }
    done
}

/// Keeps a worker away from the handler's CPU, and, while single pages are asked for, from
/// keeping others waiting: a thread that is drawn to the worker's CPU all the same (some kernels
/// rather put a thread on the CPU of a running one than wake an idle CPU) is to have it soon.
pub struct WorkerAffinity {
    allowed: Option<CpuSet>,
    from: u32,
    has_long_slice: bool,
}

/// Yields of a worker while one thread faults for single pages. That thread may be drawn to the
/// worker's CPU; and where it has had a little more of it than the worker, it waits until the
/// worker sleeps or a tick comes, though the worker could wait better: some hundred faults' time.
/// So the worker yields every few pages. (Half as often this costs as much as it saves; twice as
/// often the worker gets nowhere.)
#[derive(Default)]
pub struct YieldEvery(u32);

/// Pages after which the kernel is asked.
const YIELD_AFTER: u32 = 8;

impl YieldEvery {
    /// A page is about to be stored. `is_single`: one thread faults for single pages meanwhile.
    pub(crate) fn for_a_page(&mut self, is_single: bool) {
        self.0 += 1;
        if self.0 >= YIELD_AFTER {
            self.0 = 0;
            if is_single {
                yield_now();
            }
        }
    }
}

impl Default for WorkerAffinity {
    fn default() -> Self {
        Self::new()
    }
}

impl WorkerAffinity {
    /// The worker may run on any CPU.
    pub fn new() -> WorkerAffinity {
        WorkerAffinity {
            allowed: own_affinity().ok().filter(|cpus| cpus.count() > 1),
            from: NO_CPU,
            has_long_slice: false,
        }
    }

    /// Sets whether threads that wake on the calling thread's CPU run at once.
    pub fn yield_now(&mut self, on: bool) {
        if std::mem::replace(&mut self.has_long_slice, on) != on {
            if on { take_long_slice() } else { go_normally() }
        }
    }

    /// Keeps the calling thread away from `cpu` ([`NO_CPU`]: from none).
    pub(crate) fn keep_from(&mut self, cpu: u32) {
        if cpu == self.from {
            return;
        }
        self.from = cpu;
        if let Some(allowed) = &self.allowed {
            let mut cpus = *allowed;
            if cpu != NO_CPU {
                cpus.remove(cpu);
            }
            let _ = clear_own_affinity(&cpus);
        }
    }
}

/// The CPU times of the handler and of the faulting thread at one moment.
#[derive(Clone, Copy)]
struct Times {
    own: CpuTimes,
    theirs: CpuTimes,
    at: Nanos,
}

impl Times {
    /// Nanoseconds that others took: what each of the two waited beyond what the other ran, for on
    /// one CPU they wait for each other.
    fn taken_since(self, then: Times) -> u64 {
        let since = |now: CpuTimes, then: CpuTimes| CpuTimes {
            ran: now.ran.saturating_sub(then.ran),
            waited: now.waited.saturating_sub(then.waited),
        };
        let (own, theirs) = (since(self.own, then.own), since(self.theirs, then.theirs));
        own.waited.saturating_sub(theirs.ran) + theirs.waited.saturating_sub(own.ran)
    }
}

/// Measures the CPU time that other threads take, while the handler and one thread take turns.
struct CrowdWatch {
    /// CPU times of the handler and of the thread during an exchange, and their values at the last
    /// check.
    own: Option<ThreadTimes>,
    theirs: Option<ThreadTimes>,
    looked: Option<Times>,
    /// Faults until the next check.
    look_in: u32,
    /// Checks in a row that found contention.
    crowded: u32,
    /// When the fault was read that is being answered, and whether it was long in coming.
    began: Nanos,
    late: bool,
}

/// The handler's stay in the idle class, or out of it.
struct IdleStay {
    /// The handler is in the idle class.
    inside: bool,
    /// Faults answered since it went there.
    served: u32,
    /// Not before then does it go there again.
    retry_at: Nanos,
    stay_out_ns: u64,
}

/// On which CPU and in which scheduling class the handler runs.
pub struct HandlerCpu {
    allowed: Option<CpuSet>,
    bound: Option<u32>,
    tid: u32,
    stat: Option<ThreadStat>,
    changes: u32,
    /// Faults until the next check, and from that to the one after.
    left: u32,
    every: u32,
    /// Faults of the same thread in a row.
    row: u32,
    /// Messages that were waited for elsewhere, since the handler was last seen to be where the
    /// thread is.
    apart: u32,
    /// Several threads fault in turns.
    is_in_crowd: bool,
    /// When the last fault was answered.
    last: Nanos,
    crowd: CrowdWatch,
    idle: IdleStay,
}

impl Default for HandlerCpu {
    fn default() -> Self {
        Self::new()
    }
}

impl HandlerCpu {
    /// Unbound, in the normal class.
    pub fn new() -> HandlerCpu {
        forget();
        HandlerCpu::with(own_affinity().ok().filter(|cpus| cpus.count() > 1))
    }

    fn with(allowed: Option<CpuSet>) -> HandlerCpu {
        HandlerCpu {
            allowed,
            bound: None,
            tid: 0,
            stat: None,
            changes: 0,
            left: 0,
            every: MIN_LOOK_FAULTS,
            row: 0,
            apart: 0,
            is_in_crowd: false,
            last: Nanos(0),
            crowd: CrowdWatch {
                own: None,
                theirs: None,
                looked: None,
                look_in: 0,
                crowded: 0,
                began: Nanos(0),
                late: false,
            },
            idle: IdleStay {
                inside: false,
                served: 0,
                retry_at: Nanos(0),
                stay_out_ns: MIN_STAY_OUT_NS,
            },
        }
    }

    /// Of a thread that is not placed: the kernel does it.
    pub(crate) fn unplaced() -> HandlerCpu {
        HandlerCpu::with(None)
    }

    /// The thread that was woken is not where the handler is.
    pub fn elsewhere(&mut self) {
        self.left = 0;
    }

    /// The thread that was woken is not where the handler is, and will not be for long. If it has
    /// been for long (a thread that is awake may wait for a disk), it is followed.
    pub fn later(&mut self) {
        self.apart += 1;
        self.left = if self.apart < LONG_APART_FAULTS { self.left.max(2) } else { 0 };
    }

    /// Sends workers away from a CPU. `workers`: their ids; 0: none. (They follow other changes
    /// themselves, when they next run: [`WorkerAffinity`].)
    fn move_worker_away(&self, cpu: u32, workers: &[AtomicU32]) {
        let Some(mut cpus) = self.allowed else { return };
        cpus.remove(cpu);
        for tid in workers.iter().map(|worker| worker.load(Relaxed)).filter(|tid| *tid != 0) {
            // One that has just ended needs no place.
            let _ = set_affinity(tid, &cpus);
        }
    }

    /// The CPU that workers must keep away from: with a handler in the idle class it seems to be
    /// free; `NO_CPU` if there is none.
    pub(crate) fn own_cpu(&self) -> u32 {
        if self.idle.inside { self.bound.unwrap_or(NO_CPU) } else { NO_CPU }
    }

    /// True while the handler is in the idle class.
    pub(crate) fn is_idle(&self) -> bool {
        self.idle.inside
    }

    /// A fault of thread `tid` was read; it is `now`. `workers`: their ids; 0: none.
    pub fn follow(&mut self, tid: u32, now: Nanos, workers: &[AtomicU32]) {
        if self.allowed.is_none() || self.is_in_crowd {
            return;
        }
        self.row = if tid == self.tid { self.row.saturating_add(1) } else { 0 };
        self.follow_cpu(tid, workers);
        let gap = now.since(self.last).as_nanos() as u64;
        self.crowd.began = now;
        self.crowd.late = gap > SLOW_ANSWER_NS;
        if !self.idle.inside {
            if self.row == FAULTS_BEFORE_IDLE_CLASS / 2 && self.idle.retry_at != NO_RETURN {
                self.listen(now);
            }
            if self.row >= FAULTS_BEFORE_IDLE_CLASS && gap < MAX_GAP_NS && now >= self.idle.retry_at
            {
                self.enter(now);
            }
        } else if self.row == 0 || TAKEN_OUT_OF_IDLE.swap(false, Relaxed) {
            self.leave(now);
        } else if BOOSTED.swap(false, Relaxed) {
            // In a crowd it would starve in that class with the request unread.
            self.leave_until(Nanos(now.0.saturating_add(CROWD_RETRY_NS)));
        }
    }

    /// Several threads fault in turns from here on, or no longer. Meanwhile it follows none: each
    /// fault is another one's, and to see where that runs and to go there costs a good part of the
    /// answer.
    pub(crate) fn in_crowd(&mut self, is_in_crowd: bool) {
        if std::mem::replace(&mut self.is_in_crowd, is_in_crowd) == is_in_crowd {
            return;
        }
        self.leave(swaptide_sys::thread::now());
        (self.tid, self.row) = (0, 0);
        if let (Some(allowed), Some(_)) = (&self.allowed, self.bound.take()) {
            let _ = clear_own_affinity(allowed);
        }
    }

    /// The thread is about to be woken; it is `now`.
    pub(crate) fn answered(&mut self, now: Nanos) {
        self.last = now;
        if !self.idle.inside {
            return;
        }
        self.idle.served = self.idle.served.saturating_add(1);
        self.crowd.look_in = self.crowd.look_in.saturating_sub(1);
        if self.crowd.look_in > 0
            && !self.crowd.late
            && now.since(self.crowd.began).as_nanos() as u64 <= SLOW_ANSWER_NS
        {
            return;
        }
        self.crowd.crowded = if self.is_crowded(now) { self.crowd.crowded + 1 } else { 0 };
        self.crowd.look_in =
            if self.crowd.crowded > 0 { CROWD_RECHECK_FAULTS } else { CROWD_CHECK_FAULTS };
        if self.crowd.crowded >= CROWD_CHECKS {
            self.leave(now);
        }
    }

    /// Starts an exchange: measures the CPU times of both threads from now on.
    fn listen(&mut self, now: Nanos) {
        if self.crowd.own.is_none() {
            self.crowd.own = ThreadTimes::open(gettid().0);
        }
        self.crowd.theirs = ThreadTimes::open(self.tid);
        self.crowd.looked = self.times(now);
    }

    fn times(&self, at: Nanos) -> Option<Times> {
        Some(Times {
            own: self.crowd.own.as_ref()?.read()?,
            theirs: self.crowd.theirs.as_ref()?.read()?,
            at,
        })
    }

    /// True when others took more of the time since the last check than they may, or that is
    /// unknown.
    fn is_crowded(&mut self, now: Nanos) -> bool {
        let times = self.times(now);
        let (Some(then), Some(now)) = (std::mem::replace(&mut self.crowd.looked, times), times)
        else {
            return true;
        };
        now.taken_since(then) > now.at.since(then.at).as_nanos() as u64 / CROWD_DIVISOR
    }

    /// To the idle class, if it can be left again.
    fn enter(&mut self, now: Nanos) {
        if self.is_crowded(now) {
            self.idle.retry_at = Nanos(now.0.saturating_add(CROWD_RETRY_NS));
            return;
        }
        // Without a privilege there is no way back. A thread that was given precedence at its start
        // (a negative nice value) has it.
        TAKEN_OUT_OF_IDLE.store(false, Relaxed);
        if own_nice() >= 0 || !idle_class(true) {
            self.idle.retry_at = NO_RETURN;
            return;
        }
        self.idle.served = 0;
        self.idle.inside = true;
        self.crowd.crowded = 0;
    }

    /// Runs `f` in the normal class: the kernel may make threads for it, which would starve in this
    /// one.
    pub(crate) fn normally<T>(&self, f: impl FnOnce() -> T) -> T {
        if !self.idle.inside {
            return f();
        }
        idle_class(false);
        let answer = f();
        idle_class(true);
        answer
    }

    /// Back to the normal class.
    pub fn leave(&mut self, now: Nanos) {
        if !self.idle.inside {
            return;
        }
        let away = if self.idle.served >= MIN_STAY_FAULTS {
            self.idle.stay_out_ns = MIN_STAY_OUT_NS;
            CROWD_RETRY_NS
        } else {
            self.idle.stay_out_ns = (2 * self.idle.stay_out_ns).min(MAX_STAY_OUT_NS);
            self.idle.stay_out_ns
        };
        self.leave_until(Nanos(now.0.saturating_add(away)));
    }

    /// Back to the normal class, at least until then.
    fn leave_until(&mut self, until: Nanos) {
        idle_class(false);
        self.idle.inside = false;
        self.row = 0;
        self.idle.retry_at = until;
    }

    fn follow_cpu(&mut self, tid: u32, workers: &[AtomicU32]) {
        let Some(allowed) = &self.allowed else { return };
        if tid != self.tid {
            self.changes = self.changes.wrapping_add(1);
            if self.tid != 0 && !self.changes.is_multiple_of(FOLLOW_EVERY) {
                return;
            }
            self.tid = tid;
            self.stat = ThreadStat::open(tid);
            self.left = 0;
            self.every = MIN_LOOK_FAULTS;
        }
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        let Some(cpu) = self.stat.as_ref().and_then(ThreadStat::cpu) else { return };
        self.apart = 0;
        if Some(cpu) == self.bound && cpu == current_cpu() {
            self.every = (self.every * 2).min(MAX_LOOK_FAULTS);
            self.left = self.every;
            return;
        }
        self.every = MIN_LOOK_FAULTS;
        self.left = self.every;
        if !allowed.contains(cpu) {
            return;
        }
        let allowed = *allowed;
        let go = || {
            if self.idle.inside {
                self.move_worker_away(cpu, workers);
            }
            set_own_affinity(cpu).is_ok()
        };
        // In the idle class it would wait here for a worker that comes from there, or there for one
        // that has not gone.
        self.bound = if self.normally(go) { Some(cpu) } else { None };
        if self.bound.is_none() {
            let _ = clear_own_affinity(&allowed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stay_is_worth_what_it_answered() {
        let mut place = HandlerCpu::new();
        let mut away = |served| {
            (place.idle.inside, place.idle.served) = (true, served);
            place.leave(Nanos(7));
            (place.idle.retry_at.0 - 7, place.idle.stay_out_ns)
        };
        assert_eq!(
            [away(0).0, away(MIN_STAY_FAULTS - 1).0],
            [2 * MIN_STAY_OUT_NS, 4 * MIN_STAY_OUT_NS]
        );
        assert_eq!(away(MIN_STAY_FAULTS), (CROWD_RETRY_NS, MIN_STAY_OUT_NS));
        assert_eq!(away(0).0, 2 * MIN_STAY_OUT_NS);
        assert_eq!((0..20).map(|_| away(0).0).max(), Some(MAX_STAY_OUT_NS));
    }

    #[test]
    fn a_thread_that_stays_elsewhere_is_followed_in_the_end() {
        let mut place = HandlerCpu::new();
        let asks = |place: &mut HandlerCpu| {
            place.later();
            place.left == 0
        };
        assert_eq!((0..1000).position(|_| asks(&mut place)), Some(LONG_APART_FAULTS as usize - 1));
        place.apart = 0;
        assert!(!asks(&mut place));
    }

    #[test]
    fn waiting_only_for_each_other_is_no_stolen_time() {
        let times = |own: [u64; 2], theirs: [u64; 2]| Times {
            own: CpuTimes { ran: own[0], waited: own[1] },
            theirs: CpuTimes { ran: theirs[0], waited: theirs[1] },
            at: Nanos(0),
        };
        let then = times([100, 50], [30, 70]);
        assert_eq!(times([170, 80], [60, 140]).taken_since(then), 0, "30 and 70 of each other");
        assert_eq!(times([170, 180], [60, 140]).taken_since(then), 100);
        assert_eq!(times([170, 80], [60, 1140]).taken_since(then), 1000);
    }
}
