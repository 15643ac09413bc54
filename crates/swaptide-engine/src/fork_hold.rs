//! Forks past libc that are announced before they are made: everything comes in, and stays until
//! the fork is over.
//!
//! Only programs that load no library fork so, and the supervisor is told of it: the thread waits
//! in the call (`swaptide_sys::fork_filter`). It writes a number into the process's slot, and lets
//! the fork be made when the handler has written the same ([`ForkHold`]). The child is a copy in
//! which nothing is missing: it needs no pager, and nothing of its parent, which may end at once.
//!
//! Owns: how far that has come.
//!
//! Invariants
//! 1. From the number's being written to the order that ends it no page is out, and none goes out:
//!    the workers are quiesced and the limit is lifted.
//! 2. Where forks are followed, managed memory is open for forks exactly as long. A fork that is
//!    not announced lacks that memory and reads no zeros in its place.
//!
//! Locks: the memory lock.

use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use crate::engine::Engine;
use crate::fork::{ForkServer, resume_workers};
use crate::pager::Pager;
use crate::requests::fork_control::{HELD, NO_FORK};
use crate::swap_in_all::SwapInAll;

/// Between two looks whether the fork is over, where no message comes.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// How long threads that fault are kept waiting by a look for a pause between changes.
const MAX_FAULT_DELAY: Duration = Duration::from_millis(20);

/// The number of the fork that is to be held for; 0: none.
fn wanted(engine: &Engine) -> u32 {
    engine.slot().control.fork_hold.load(Acquire)
}

/// The progress of bringing everything in for a fork.
#[derive(Default)]
pub(crate) struct ForkHold(SwapInAll);

impl ForkHold {
    /// A thread is about to fork, or has forked.
    pub(crate) fn begin(&mut self, engine: &Engine) {
        engine.charge.take_limit(engine.slot());
        if wanted(engine) != 0 {
            self.0.begin();
        }
    }

    /// True while something is to come in for it.
    pub(crate) fn is_wanted(&self) -> bool {
        self.0.is_wanted()
    }

    /// Brings in some of what is swapped. When nothing is out any more it says so, and returns when
    /// the fork is over.
    pub(crate) fn step(&mut self, pager: &mut Pager, forks: &mut ForkServer) {
        if self.0.step(pager, forks, |engine| wanted(engine) != 0) {
            self.0.end();
            hold(pager, forks);
        }
    }
}

/// Nothing is out, and the workers are quiesced.
fn hold(pager: &mut Pager, forks: &mut ForkServer) {
    let engine = pager.path.engine;
    let slot = engine.slot();
    let mut is_open = !engine.fork.followed;
    // What moves meanwhile stays open.
    engine.fork.set(HELD);
    loop {
        is_open = is_open || forks.try_to_open_mappings(pager, MAX_FAULT_DELAY);
        match wanted(engine) {
            0 => break,
            number if is_open => slot.agent.fork_held.store(number, Release),
            // Mappings change without pause.
            _ => {}
        }
        // What is read of a fork is attended to: its child has everything.
        let _ = pager.path.reader.read_within(Some(LOOK_INTERVAL));
        forks.serve_untracked(pager);
        while let Some(fault) = pager.path.reader.pending.pop_front() {
            pager.answer(fault);
            forks.serve_untracked(pager);
        }
    }
    slot.agent.fork_held.store(0, Relaxed);
    if engine.fork.followed {
        forks.close_mappings(pager);
    }
    engine.fork.set(NO_FORK);
    engine.charge.take_limit(slot);
    resume_workers(engine);
}
