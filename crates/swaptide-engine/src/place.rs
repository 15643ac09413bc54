//! Where the handler runs.
//!
//! A fault is a conversation of two threads that never run at the same time. On one CPU it costs two switches; on two it costs two
//! wake-ups of a sleeping CPU, which is many times as much on a virtual machine. So the handler follows the thread that faults.
//!
//! That alone is not enough where a CPU is idle: the kernel then wakes the thread there, away from the handler. So while one thread faults again
//! and again, the handler runs in the idle class: the CPU it occupies counts as free, and the thread it wakes stays. In that class
//! the handler starves beside other work, for a second at a time. The kernel counts how long a thread waited for a CPU: the handler asks for
//! its own waiting before it enters the class, and there after each fault that came late. Where it waited it goes back to the normal class.
//!
//! Owns: the CPU the handler is bound to, and its class.
//!
//! Where the thread runs is asked often at first and ever less often while the answer stays the same; another thread's fault
//! starts over.

use swaptide_sys::affinity::{
    CpuSet, SchedStat, ThreadStat, clear_own_affinity, current_cpu, own_affinity, own_nice, sched_idle, set_own_affinity,
};
use swaptide_sys::thread::{Nanos, gettid};

/// Faults between two looks at where the faulting thread runs: at first, and at most.
const LOOK_FIRST: u32 = 8;
const LOOK_LAST: u32 = 128;
/// Where several threads fault, only every so manyth change of threads is followed.
const FOLLOW_EVERY: u32 = 4;
/// Faults of one thread in a row, after which the handler goes to the idle class, if it did not wait since the first of these.
const IN_A_ROW: u32 = 64;
const WAITS_FROM: u32 = 32;
/// Faults further apart than this may have waited for the handler.
const GAP_NS: u64 = 200_000;
/// Having waited so long for a CPU is too long.
const DELAY_NS: u64 = 150_000;
/// How long the handler then stays out of the idle class: at first, and at most. One wait may take a second.
const STAY_OUT_NS: u64 = 50_000_000;
const STAY_OUT_LAST_NS: u64 = 60_000_000_000;

/// No CPU.
pub const NO_CPU: u32 = u32::MAX;

/// Keeps a worker away from the handler's CPU.
pub struct Aside {
    allowed: Option<CpuSet>,
    from: u32,
}

impl Default for Aside {
    fn default() -> Self {
        Self::new()
    }
}

impl Aside {
    /// Anywhere.
    pub fn new() -> Aside {
        Aside { allowed: own_affinity().ok().filter(|cpus| cpus.count() > 1), from: NO_CPU }
    }

    /// Keeps the calling thread away from `cpu` ([`NO_CPU`]: from none).
    pub fn keep_from(&mut self, cpu: u32) {
        if cpu == self.from {
            return;
        }
        self.from = cpu;
        if let Some(allowed) = &self.allowed {
            let mut cpus = allowed.clone();
            if cpu != NO_CPU {
                cpus.remove(cpu);
            }
            let _ = clear_own_affinity(&cpus);
        }
    }
}

/// See the module's description.
pub struct Place {
    allowed: Option<CpuSet>,
    bound: Option<u32>,
    tid: u32,
    stat: Option<ThreadStat>,
    changes: u32,
    /// Faults until the next look, and from that to the one after.
    left: u32,
    every: u32,
    /// Faults of the same thread in a row.
    row: u32,
    /// The handler is in the idle class.
    idle: bool,
    /// The handler's own waiting, and how much of it there was when it was looked at last.
    own: Option<SchedStat>,
    waited: u64,
    /// When the last fault was read.
    last: Nanos,
    entered: Nanos,
    /// Not before then does the handler go to the idle class again.
    retry_at: Nanos,
    stay_out_ns: u64,
}

impl Default for Place {
    fn default() -> Self {
        Self::new()
    }
}

impl Place {
    /// Unbound.
    pub fn new() -> Place {
        let allowed = own_affinity().ok().filter(|cpus| cpus.count() > 1);
        Place {
            allowed,
            bound: None,
            tid: 0,
            stat: None,
            changes: 0,
            left: 0,
            every: LOOK_FIRST,
            row: 0,
            idle: false,
            own: None,
            waited: 0,
            last: Nanos(0),
            entered: Nanos(0),
            retry_at: Nanos(0),
            stay_out_ns: STAY_OUT_NS,
        }
    }

    /// The CPU that workers must keep away from: beside a handler in the idle class it seems to be free; `NO_CPU` if there is none.
    pub fn own_cpu(&self) -> u32 {
        if self.idle { self.bound.unwrap_or(NO_CPU) } else { NO_CPU }
    }

    /// True while the handler is in the idle class.
    pub fn is_idle(&self) -> bool {
        self.idle
    }

    /// A fault of thread `tid` was read; it is `now`.
    pub fn follow(&mut self, tid: u32, now: Nanos) {
        if self.allowed.is_none() {
            return;
        }
        self.row = if tid == self.tid { self.row.saturating_add(1) } else { 0 };
        self.follow_cpu(tid);
        let gap = now.since(std::mem::replace(&mut self.last, now)).as_nanos() as u64;
        if self.idle {
            if self.row == 0 || gap > GAP_NS && self.has_waited() {
                self.leave(now);
            }
        } else if self.row == WAITS_FROM {
            let _ = self.has_waited();
        } else if self.row >= IN_A_ROW && gap < GAP_NS && now >= self.retry_at {
            self.enter(now);
        }
    }

    /// True when the handler has waited for a CPU since this was asked last, for too long; or when the kernel does not say.
    fn has_waited(&mut self) -> bool {
        if self.own.is_none() {
            self.own = SchedStat::open(gettid().0);
        }
        let Some(waited) = self.own.as_ref().and_then(SchedStat::waited) else { return true };
        waited.saturating_sub(std::mem::replace(&mut self.waited, waited)) > DELAY_NS
    }

    /// To the idle class, if it can be left again and nobody else wants the CPU.
    fn enter(&mut self, now: Nanos) {
        // Without a privilege there is no way back. A thread that was given precedence at its start (a negative nice value) has it.
        if own_nice() >= 0 {
            self.retry_at = Nanos(u64::MAX);
            return;
        }
        if self.has_waited() || sched_idle(true).is_err() {
            self.stay_out(now);
            return;
        }
        self.entered = now;
        self.idle = true;
    }

    /// What `f` does is done in the normal class: the kernel may make threads for it, which would starve in this one.
    pub fn normally<T>(&self, f: impl FnOnce() -> T) -> T {
        if !self.idle {
            return f();
        }
        let _ = sched_idle(false);
        let answer = f();
        let _ = sched_idle(true);
        answer
    }

    /// Back to the normal class.
    pub fn leave(&mut self, now: Nanos) {
        if !self.idle {
            return;
        }
        let _ = sched_idle(false);
        self.idle = false;
        self.row = 0;
        // A stay that was worth it starts over with a short absence.
        if now.since(self.entered).as_nanos() as u64 > 10 * self.stay_out_ns {
            self.stay_out_ns = STAY_OUT_NS / 2;
        }
        self.stay_out(now);
    }

    /// Not again for twice as long as the last time.
    fn stay_out(&mut self, now: Nanos) {
        self.row = 0;
        self.stay_out_ns = (2 * self.stay_out_ns).min(STAY_OUT_LAST_NS);
        self.retry_at = Nanos(now.0.saturating_add(self.stay_out_ns));
    }

    fn follow_cpu(&mut self, tid: u32) {
        let Some(allowed) = &self.allowed else { return };
        if tid != self.tid {
            self.changes = self.changes.wrapping_add(1);
            if self.tid != 0 && !self.changes.is_multiple_of(FOLLOW_EVERY) {
                return;
            }
            self.tid = tid;
            self.stat = ThreadStat::open(tid);
            self.left = 0;
            self.every = LOOK_FIRST;
        }
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        let Some(cpu) = self.stat.as_ref().and_then(ThreadStat::cpu) else { return };
        if Some(cpu) == self.bound && cpu == current_cpu() {
            self.every = (self.every * 2).min(LOOK_LAST);
            self.left = self.every;
            return;
        }
        self.every = LOOK_FIRST;
        self.left = self.every;
        if !allowed.contains(cpu) {
            return;
        }
        if set_own_affinity(cpu).is_ok() {
            self.bound = Some(cpu);
        } else {
            let _ = clear_own_affinity(allowed);
            self.bound = None;
        }
    }
}
