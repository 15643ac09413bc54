//! Memory that a program keeps apart from its children: it is not managed.
//!
//! After `MADV_WIPEONFORK` a child finds a mapping empty; were it managed, the child would get what
//! its parent has there. The advice belongs to the mapping: it moves and grows with it, past libc
//! too, and no event tells. So once a program has given such advice, what a scan wants to adopt is
//! looked up in `/proc/self/smaps` first. Where forks are followed the same is done for
//! `MADV_DONTFORK`, which is what managed memory bears there ([`crate::mm::dontfork`]).
//!
//! Owns: what the last scans have found.
//!
//! Invariants
//! 1. While advice was given ([`ForkAdvice::matters`]), nothing is adopted but what was found to be
//!    without it after it was armed, and new mappings whose makers wait for that.
//! 2. What is armed and found to have it after that stays armed and is not listed: another thread
//!    may move managed memory there at any moment, and that must not be disarmed. Its faults are
//!    answered with zeros, as the kernel would, while all changes that were read are applied and
//!    none of them has put managed memory there.
//!
//! Locks: the memory lock, for one scan. It is the handler's.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use swaptide_sys::maps::{Advised, MapsFile, for_each_advised_vma};
use swaptide_sys::mem::own_ranges;
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::thread::{Nanos, now};

use crate::engine::Engine;
use crate::mm::vma_set::VmaSet;

/// The time for which advice once found counts as given: for each check the kernel walks all page
/// tables.
const ADVICE_MAX_AGE: Duration = Duration::from_secs(1);
/// Of how much time these scans may take one part: what is new waits.
const ADVICE_TIME_DIVISOR: u32 = 8;
const EVERYWHERE: VirtAddr = VirtAddr(usize::MAX);

/// The ranges that the program keeps apart from its children.
#[derive(Default)]
pub(crate) struct ForkAdvice {
    known: VmaSet,
    /// When the last scan ended.
    looked_at: Option<Nanos>,
    /// The time that the scan since the last start has taken.
    took: Duration,
    /// `known` is all that there was when the scan for memory to adopt began.
    is_fresh: bool,
    /// It is too early for a scan.
    is_early: bool,
}

impl ForkAdvice {
    /// A scan for memory to adopt begins. The first one of a process and those that it forks finds
    /// what was advised before.
    pub(crate) fn begin(&mut self, engine: &Engine, buf: &mut [u8]) {
        self.is_fresh = false;
        self.is_early = self.looked_at.is_some_and(|then| {
            now().since(then) < (self.took * ADVICE_TIME_DIVISOR).min(ADVICE_MAX_AGE)
        });
        if !self.is_early {
            self.took = Duration::ZERO;
        }
        if !engine.known.fork_advice.is_sought.swap(true, Relaxed) {
            self.look_everywhere(engine, buf);
        }
    }

    /// True if there may be such memory.
    pub(crate) fn matters(engine: &Engine) -> bool {
        engine.known.fork_advice.is_found.load(Relaxed) || (engine.start.gives_fork_advice)()
    }

    /// True if something of a range has such advice, or is taken to have it, before it is armed.
    /// What was found a moment ago counts.
    pub(crate) fn holds(
        &mut self,
        engine: &Engine,
        buf: &mut [u8],
        maps: &MapsFile,
        range: VirtRange,
    ) -> bool {
        if is_of_managed(engine, maps, range) {
            return false;
        }
        if self.is_fresh || self.is_recent() && self.known.overlaps(range) {
            return self.known.overlaps(range);
        }
        if self.is_early {
            return true;
        }
        self.look_everywhere(engine, buf);
        self.known.overlaps(range)
    }

    /// True if something of an armed range has such advice.
    pub(crate) fn has(
        &mut self,
        engine: &Engine,
        buf: &mut [u8],
        maps: &MapsFile,
        range: VirtRange,
    ) -> bool {
        if is_of_managed(engine, maps, range) {
            return false;
        }
        self.look(engine, buf, range.end);
        self.known.overlaps(range)
    }

    /// The same by the scan that was just made.
    pub(crate) fn is_in(&self, engine: &Engine, maps: &MapsFile, range: VirtRange) -> bool {
        self.known.overlaps(range) && !is_of_managed(engine, maps, range)
    }

    /// True if all of a range is the program's, and is kept apart as far as was seen last: for
    /// what is told, not for what is done.
    pub(crate) fn is_said_of(&self, engine: &Engine, range: VirtRange) -> bool {
        let is_found = self.known.find(range.start).is_some_and(|found| found.end >= range.end);
        (is_found || (engine.start.excluded)(range)) && !is_own(range)
    }

    /// True if a range touches what was found a moment ago.
    pub(crate) fn is_known(&self, engine: &Engine, range: VirtRange) -> bool {
        ForkAdvice::matters(engine) && self.is_recent() && self.known.overlaps(range)
    }

    fn is_recent(&self) -> bool {
        self.looked_at.is_some_and(|then| now().since(then) < ADVICE_MAX_AGE)
    }

    /// Looks at all mappings.
    pub(crate) fn look_everywhere(&mut self, engine: &Engine, buf: &mut [u8]) {
        self.look(engine, buf, EVERYWHERE);
        self.is_fresh = true;
    }

    /// Looks at all mappings that begin below `end`. Where that cannot be done all of them count as
    /// having the advice.
    fn look(&mut self, engine: &Engine, buf: &mut [u8], end: VirtAddr) {
        let began = now();
        let below = VirtRange { start: VirtAddr(0), end };
        self.known.remove(below);
        let mut has_seen = false;
        let done = for_each_advised_vma(buf, |range, advised| {
            has_seen = true;
            if range.start >= end {
                return false;
            }
            if has_fork_advice(engine, range, advised) {
                self.known.insert(range);
                // What may be dropped is no memory that a userfaultfd can have.
                if advised.wiped && !advised.droppable && !is_own(range) {
                    engine.known.fork_advice.is_found.store(true, Relaxed);
                }
            }
            true
        });
        if done.is_err() || !has_seen {
            self.known.insert(below);
        }
        let ended = now();
        self.took += ended.since(began);
        self.looked_at = Some(ended);
    }
}

/// True if a range lies in one mapping with managed memory, and so is as that is.
fn is_of_managed(engine: &Engine, maps: &MapsFile, range: VirtRange) -> bool {
    maps.vma_at(range.start).is_ok_and(|info| {
        info.is_some_and(|info| engine.mm.lock().regions.overlaps(info.vma().range))
    })
}

/// True if all of a range is this library's.
fn is_own(range: VirtRange) -> bool {
    let mut is_own = false;
    own_ranges(|own| is_own |= own.start <= range.start && range.end <= own.end);
    is_own
}

fn has_fork_advice(engine: &Engine, range: VirtRange, advised: Advised) -> bool {
    let is_ours = || {
        let mm = engine.mm.lock();
        mm.regions.overlaps(range) || mm.changes.left.overlaps(range)
    };
    advised.wiped || engine.fork.followed && advised.not_copied && !is_ours()
}
