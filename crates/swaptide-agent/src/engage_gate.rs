//! Holds threads that map memory while the engine starts: threads that fill memory at full speed
//! would take the CPUs from the thread that is to bound them, and be far past the budget by then.
//!
//! Owns: the gate of this process.
//!
//! Invariants
//! 1. A thread is held until [`ENGAGE_TIMEOUT`] after the start began at most, however many
//!    mappings it makes and however long the start takes.
//! 2. The starting thread, a child that libc has forked, and a thread under a filter are not held.
//!    The last makes no system call here.
//!
//! Locks: none.

use std::sync::atomic::{
    AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::time::Duration;

use swaptide_sys::lock::futex;
use swaptide_sys::thread::{Nanos, gettid, now};

use crate::own_pid::is_own_process;
use crate::seccomp;

/// The longest time that a mapping waits for management to begin.
pub(crate) const ENGAGE_TIMEOUT: Duration = Duration::from_millis(50);

static GATE: EngageGate = EngageGate::new();

struct EngageGate {
    /// The thread that starts an engine, while it does; 0: none. Waiters sleep on this word.
    starter: AtomicU32,
    /// Until when others wait for it ([`Nanos`]).
    until: AtomicU64,
}

impl EngageGate {
    const fn new() -> EngageGate {
        EngageGate { starter: AtomicU32::new(0), until: AtomicU64::new(0) }
    }

    fn close(&self, starter: u32, until: Nanos) {
        self.until.store(until.0, Relaxed);
        // With the loads of `hold`: who sees the starter sees until when.
        self.starter.store(starter, Release);
    }

    fn open(&self) {
        // With the loads of `hold`: a thread that has waited sees the engine.
        self.starter.store(0, Release);
        futex::wake(&self.starter, u32::MAX, futex::Scope::Private);
    }

    /// Holds the thread `tid` while the gate is closed. True if it has waited.
    fn hold(&self, tid: u32, is_confined: impl Fn() -> bool) -> bool {
        let mut has_waited = false;
        loop {
            let starter = self.starter.load(Acquire);
            if starter == 0 || starter == tid || is_confined() {
                return has_waited;
            }
            let left = self.until.load(Relaxed).saturating_sub(now().0);
            if left == 0 {
                return has_waited;
            }
            let left = Some(Duration::from_nanos(left));
            futex::wait(&self.starter, starter, left, futex::Scope::Private);
            has_waited = true;
        }
    }
}

/// The start of an engine: the gate is closed until it is dropped.
pub(crate) struct EngineStart(());

impl EngineStart {
    /// This thread starts an engine. Filters that threads have set past libc were looked for.
    pub(crate) fn begin() -> EngineStart {
        GATE.close(gettid().0, Nanos(now().0 + ENGAGE_TIMEOUT.as_nanos() as u64));
        EngineStart(())
    }
}

impl Drop for EngineStart {
    fn drop(&mut self) {
        GATE.open();
    }
}

/// Holds the calling thread while an engine starts. True if it has waited; then a filter may have
/// been set meanwhile.
#[must_use]
pub(crate) fn wait_for_start() -> bool {
    // A child of vfork has its parent's word. A filter that was looked for before the gate was
    // closed is seen once it is seen closed.
    is_starting() && !seccomp::is() && is_own_process() && GATE.hold(gettid().0, seccomp::is)
}

/// True while an engine starts: its handler serves no request yet.
pub(crate) fn is_starting() -> bool {
    GATE.starter.load(Acquire) != 0
}

/// In a child that libc has forked: a thread of its parent, or of a process before that, was the
/// starter.
pub(crate) fn forked() {
    GATE.starter.store(0, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    const STARTER: u32 = 1;
    const OTHER: u32 = 2;

    fn closed_for(time: Duration) -> EngageGate {
        let gate = EngageGate::new();
        gate.close(STARTER, Nanos(now().0 + time.as_nanos() as u64));
        gate
    }

    #[test]
    fn a_start_holds_a_thread_once_however_many_mappings_it_makes() {
        let began = now();
        let gate = closed_for(Duration::from_millis(30));
        assert!(gate.hold(OTHER, || false));
        assert!(now().since(began) >= Duration::from_millis(30));
        // Each of these would take 30 ms otherwise.
        assert!((0..1000).all(|_| !gate.hold(OTHER, || false)));
        assert!(now().since(began) < Duration::from_secs(10));
    }

    #[test]
    fn the_end_of_the_start_lets_all_threads_continue() {
        let began = now();
        let gate = closed_for(Duration::from_secs(100));
        std::thread::scope(|scope| {
            let held: Vec<_> = (0..4)
                .map(|n| {
                    scope.spawn({
                        let gate = &gate;
                        move || gate.hold(OTHER + n, || false)
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(20));
            gate.open();
            held.into_iter().for_each(|thread| {
                thread.join().expect("it ends");
            });
        });
        assert!(now().since(began) < Duration::from_secs(50));
        assert!(!gate.hold(OTHER, || false), "the gate is open");
    }

    #[test]
    fn the_starter_and_threads_under_a_filter_are_not_held() {
        let began = now();
        let gate = closed_for(Duration::from_secs(100));
        assert!(!gate.hold(STARTER, || false));
        assert!(!gate.hold(OTHER, || true));
        assert!(now().since(began) < Duration::from_secs(50));
    }
}
