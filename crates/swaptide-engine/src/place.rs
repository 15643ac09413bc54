//! Where the handler runs.
//!
//! A fault is a conversation of two threads that never run at the same time. On one CPU it costs two switches; on two it costs two
//! wake-ups of a sleeping CPU, which is many times as much on a virtual machine. So the handler follows the thread that faults.
//!
//! Owns: the CPU the handler is bound to.

use swaptide_sys::affinity::{CpuSet, clear_own_affinity, current_cpu, own_affinity, set_own_affinity, thread_cpu};

/// Faults between two looks at where the faulting thread runs.
const LOOK_EVERY: u32 = 16;

/// See the module's description.
pub struct Place {
    allowed: Option<CpuSet>,
    bound: Option<u32>,
    last_tid: u32,
    faults: u32,
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
        Place { allowed, bound: None, last_tid: 0, faults: 0 }
    }

    /// A fault of thread `tid` is about to be answered.
    pub fn follow(&mut self, tid: u32) {
        let Some(allowed) = &self.allowed else { return };
        self.faults = self.faults.wrapping_add(1);
        if tid == self.last_tid && !self.faults.is_multiple_of(LOOK_EVERY) {
            return;
        }
        if tid != self.last_tid && !self.faults.is_multiple_of(4) {
            return;
        }
        self.last_tid = tid;
        let Some(cpu) = thread_cpu(tid) else { return };
        if Some(cpu) == self.bound && cpu == current_cpu() || !allowed.contains(cpu) {
            return;
        }
        if set_own_affinity(cpu).is_ok() {
            self.bound = Some(cpu);
        } else {
            let _ = clear_own_affinity(allowed);
            self.bound = None;
        }
    }

    /// The handler has nothing to do.
    pub fn before_wait(&mut self) {}
}
