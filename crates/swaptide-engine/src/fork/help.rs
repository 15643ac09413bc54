//! What other threads get from the handler while it stands still for a fork.
//!
//! Between *prepared* and fork(2) the forking thread runs other libraries' fork handlers, which
//! take locks. A thread that holds such a lock may be waiting for the handler: at a page, in a hook
//! of `mmap`, `madvise`, `mremap` or `realloc`. It must continue, or all three wait for ever.
//!
//! Owns: how much CPU time the forking thread has used since it continues.
//!
//! Invariants
//! 1. Hints that may be dropped are answered at once and are not done. What was mapped is found at
//!    the next look, which is due when the fork is over.
//! 2. Everything else changes the engine's memory. It is done only while the forking thread waits
//!    in a system call that is no fork, or has used [`SPIN_CPU_TIME`] of CPU time and no fork is
//!    under way by the kernel's word. If it is not seen waiting before and after, the copy counts
//!    as torn and the child does not use it.
//! 3. Where forks are told of, the kernel refuses fills and moves from the moment a fork copies
//!    managed memory until its event was read, and nothing is done after that event. So the child
//!    has every page that the table says is present.
//! 4. Where forks are followed nothing tells when the copy is made: a page that came in meanwhile
//!    may be missing in the child. Each is recorded with what it held
//!    ([`brought`](crate::fork::brought)), and the child gets that. No range is released: the table
//!    must know all that the child may lack.
//!
//! Locks: the memory lock, never while it waits.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use swaptide_store::Page;
use swaptide_sys::page::VirtAddr;
use swaptide_sys::process::waits_outside_fork;
use swaptide_sys::thread::{Nanos, Tid, cpu_time_of};
use swaptide_sys::uffd::Coverage;

use crate::event_loop::Handler;
use crate::fault::path::Stop;
use crate::fork::{MAX_HELPED_PAGES, MAX_PAGES_PER_FAULT};
use crate::mm::types::PageNo;
use crate::requests::{HandlerRequest, Hint};

/// CPU time after which the forking thread is taken to spin for a lock.
const SPIN_CPU_TIME: Duration = Duration::from_millis(20);

/// What is known of the forking thread.
pub(super) struct Forker {
    tid: u32,
    /// Its CPU time when it was first seen to continue.
    began: Option<Nanos>,
}

impl Forker {
    pub(super) fn new(tid: u32) -> Forker {
        Forker { tid, began: None }
    }

    fn waits(&self) -> bool {
        waits_outside_fork(self.tid)
    }

    fn spins(&mut self) -> bool {
        let Some(used) = cpu_time_of(Tid(self.tid)) else { return false };
        used.since(*self.began.get_or_insert(used)) >= SPIN_CPU_TIME
    }
}

impl Handler {
    /// Answers the hints that may be dropped (invariant 1).
    pub(super) fn drop_hints(&mut self) {
        let bells = &self.engine.bells;
        if !self.requests.contains(&HandlerRequest::Hint) || !bells.may_be_dropped() {
            return;
        }
        self.requests.retain(|ring| *ring != HandlerRequest::Hint);
        if let Some((Hint::Mapped, _)) = bells.take_hint() {
            self.note_request(HandlerRequest::Adopt);
        }
        bells.answer();
    }

    /// Helps one of those who wait, if the forking thread may be waiting for them (invariant 2).
    /// True if somebody was helped.
    pub(super) fn help(&mut self, forker: &mut Forker) -> bool {
        self.drop_hints();
        self.wake_held();
        let asks = self
            .requests
            .iter()
            .any(|ring| matches!(ring, HandlerRequest::Fence | HandlerRequest::Hint));
        let engine = self.engine;
        if self.child.is_some() || !engine.fork.goes_on() || self.pending.is_empty() && !asks {
            return false;
        }
        if engine.followed && self.brought.len() >= MAX_HELPED_PAGES - MAX_PAGES_PER_FAULT {
            return false;
        }
        let waits = forker.waits();
        if !waits
            && (!forker.spins() || self.uffd.coverage(engine.bells.range()) == Coverage::Changing)
        {
            return false;
        }
        self.seen_waiting = false;
        let recorded = self.brought.len();
        self.apply_noted();
        if let Some(fault) = self.pending.pop_front() {
            self.answer(fault);
        } else if self.requests.contains(&HandlerRequest::Fence) {
            self.requests.retain(|ring| *ring != HandlerRequest::Fence);
            self.fence();
            if engine.followed {
                // What was listed just now is kept out of forks.
                self.allow_fork_of_regions();
            }
        } else if let Some((hint, range)) = engine.bells.take_hint() {
            if engine.followed && hint == Hint::Release {
                // Its requester asks again.
                engine.bells.refused.store(true, Release);
            } else {
                self.hint(hint, range);
            }
            if self.child.is_some() {
                // It is done when the fork is over.
                engine.bells.put_back(hint);
            } else {
                self.requests.retain(|ring| *ring != HandlerRequest::Hint);
                engine.bells.answer();
            }
        } else {
            self.requests.retain(|ring| *ring != HandlerRequest::Hint);
            engine.bells.answer();
        }
        if self.child.is_some() || !waits || !self.seen_waiting && !forker.waits() {
            self.torn = true;
        } else {
            // The forking thread was not in fork(2): its child will have the pages.
            self.brought.truncate(recorded);
        }
        true
    }

    /// A fault is answered, and its thread about to be woken. Nothing that a fork copies is changed
    /// after this, and the forking thread may wait for just that thread: so it is looked at now.
    pub(crate) fn is_about_to_wake(&mut self) {
        if self.deferring {
            self.seen_waiting = Forker::new(self.engine.fork.forker.load(Acquire)).waits();
        }
    }

    /// Fills up to `n` pages from `first` on with what lies at `from`, by `fill`, and records those
    /// that were filled, if a fork is followed just now (invariant 4).
    pub(crate) fn fill_on_record(
        &mut self,
        first: PageNo,
        from: VirtAddr,
        n: usize,
        fill: impl FnOnce(&mut Handler) -> Result<usize, Stop>,
    ) -> Result<usize, Stop> {
        if !self.deferring || !self.engine.followed {
            return fill(self);
        }
        let recorded = self.brought.len();
        // SAFETY: the pages to fill from are the handler's own while it fills: its buffer, frames
        // that it took, or a full frame under the memory lock.
        let contents = unsafe { std::slice::from_raw_parts(from.as_ptr::<Page>(), n) };
        self.brought.record(first, contents);
        let filled = fill(self);
        self.brought.truncate(recorded + filled.as_ref().map_or(0, |filled| *filled));
        filled
    }

    /// Lets the threads that wait for a hint's answer continue while a child is served.
    pub(super) fn attend_hints(&mut self) {
        self.drop_hints();
        self.wake_held();
    }

    /// What a test wants to fail at this stage of a fork.
    pub(super) fn inject_standstill(&self, stage: u32) {
        let header = &self.engine.start.segment.header;
        while header.fail.load(Acquire) == stage {
            swaptide_sys::thread::sleep(Duration::from_millis(100));
        }
    }
}
