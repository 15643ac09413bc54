//! Draining: the daemon takes no run any more, and those that it has come to their end.
//!
//! Owns whether that is so, and how long a daemon that is told to end waits for it.
//!
//! Locks: none. The flags are set before the controller is asked for the runs that it has. A run is
//! added on the controller's thread, which reads them first: its channel orders the two.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// How often a daemon that is about to end looks whether runs are left.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Whether runs are taken, and the time that those which are there get at the end.
#[derive(Debug)]
pub(super) struct Drain {
    is_on: AtomicBool,
    is_ending: AtomicBool,
    is_closed: AtomicBool,
    grace_s: AtomicU32,
}

impl Drain {
    /// Runs are taken; at the end they get `grace_s` seconds.
    pub(super) fn new(grace_s: u32) -> Drain {
        Drain {
            is_on: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            grace_s: AtomicU32::new(grace_s),
        }
    }

    /// No run is taken from now on, or they are taken again.
    pub(super) fn set(&self, on: bool) {
        self.is_on.store(on, Relaxed);
    }

    /// The daemon waits for its runs, and ends then: that is not taken back.
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Relaxed)
    }

    /// The daemon looks for runs a last time: one that comes now is cut off, and asks the next one.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Relaxed);
    }

    /// The daemon has looked for runs a last time, or is about to.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Relaxed)
    }

    /// No run is taken.
    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Relaxed)
    }

    /// The time that runs get at the end, as the configuration has it now.
    pub(super) fn set_grace(&self, seconds: u32) {
        self.grace_s.store(seconds, Relaxed);
    }

    /// The daemon is told to end: when it does so at the latest.
    pub(super) fn end(&self) -> GracePeriod {
        let grace = Duration::from_secs(self.grace_s.load(Relaxed).into());
        // Without it a client that comes now is cut off, and asks the next daemon.
        if !grace.is_zero() {
            self.set(true);
            self.is_ending.store(true, Relaxed);
        }
        GracePeriod { grace, latest: Instant::now() + grace }
    }
}

/// The end of a daemon that waits for its runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct GracePeriod {
    /// The time that they get.
    pub grace: Duration,
    /// The moment at which it ends, whatever is left.
    pub latest: Instant,
}
