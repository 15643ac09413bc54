//! The parent's handler around a fork: standing still before it, going on after it.
//!
//! Owns: what the handler notes of other threads meanwhile.
//!
//! Invariants
//! 1. While it is prepared the handler allocates nothing: the forking thread copies the allocator's
//!    memory too.
//! 2. What was noted is applied before a worker continues, and before a fault is answered.
//!
//! Locks: the memory lock, never while it waits.

use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use swaptide_ipc::Counter;
use swaptide_sys::AsFd;
use swaptide_sys::lock::futex;
use swaptide_sys::uffd::Event;

use crate::event_loop::Handler;
use crate::fork::control::{NONE, PREPARED, REFUSED};
use crate::fork::help::Forker;
use crate::fork::layout::VmaChange;
use crate::readahead::history::SharedMissHistory;

/// Tests want the handler to stand still for good: before it is prepared, when it is, and while a
/// child is served.
const FAIL_BEFORE: u32 = 10;
const FAIL_PREPARED: u32 = 11;
pub(super) const FAIL_HANDING_OVER: u32 = 12;

impl Handler {
    /// The forking thread has rung. Returns when the fork is over.
    pub(crate) fn fork(&mut self) {
        let engine = self.engine;
        let forker = engine.fork.forker.load(Acquire);
        if !self.has_free_descriptor() {
            // The event of a fork could not be read.
            engine.fork.set(REFUSED);
            return;
        }
        self.forking = true;
        self.cpu.leave(swaptide_sys::thread::now());
        // The last fork's end may have been told after its hand-over.
        self.fork_done = false;
        self.inject_standstill(FAIL_BEFORE);
        self.park_workers();
        while self.worker.store_waiting(engine) {}
        engine.mm.lock().staging.trim(0);
        let _ = self.fresh_pages.discard(0, self.fresh_pages.len());
        // The child makes buffers of its own, and nobody would ever give these back there.
        self.ahead.clear();
        engine.devices.file.device.freeze_all();
        self.open_history();
        let token = swaptide_sys::thread::now().0.rotate_left(17) ^ u64::from(forker);
        engine.fork.token.store(token, Relaxed);
        let door = engine.fork.take_end().or_else(|| engine.fork.fetch_end());
        if engine.followed {
            if door.is_none() {
                // A child that is followed sends its userfaultfd.
                self.fork_is_over();
                engine.fork.set(REFUSED);
                return;
            }
            self.allow_fork();
        }
        engine.fork.shut(door.is_none());
        self.deferring = true;
        engine.fork.set(PREPARED);
        self.inject_standstill(FAIL_PREPARED);
        let mut watched = Forker::new(forker);
        let mut helped = false;
        loop {
            if let Some(at) = self.pending.iter().position(|f| f.tid == forker) {
                let Some(fault) = self.pending.remove(at) else { continue };
                self.apply_noted();
                let brought = self.brought.len();
                self.answer(fault);
                if !self.has_forked {
                    // The forking thread was not in fork(2): its child will have the page.
                    self.brought.truncate(brought);
                }
                continue;
            }
            if self.child.is_some() || self.fork_done {
                break;
            }
            let patience = if helped { Duration::ZERO } else { Duration::from_millis(1) };
            match &door {
                Some(conn) if engine.followed => self.receive_child_uffd(conn, patience),
                _ => self.read_within(Some(patience)),
            }
            helped = self.help(&mut watched);
        }
        if let Some(child) = self.child.take() {
            if self.torn {
                (engine.start.log)(
                    "a fork began while the engine served another thread: the child gets all its \
                    memory at once and is not managed",
                );
            }
            self.hand_over(child, door);
            engine.is_shared_anew();
            engine.count(Counter::Forks, 1);
        }
        self.fork_is_over();
    }

    /// A book for what this process's children do, if they are worth one.
    fn open_history(&self) {
        let mut book = self.engine.childrens_book.lock();
        if book.is_none() && self.engine.charge.is_pool_worth_sharing() {
            // Without it, children begin their own.
            *book = SharedMissHistory::new(self.engine.charge.limit()).ok();
        }
    }

    /// Whether one more descriptor fits into the handler's table: the limit is the process's, and
    /// the program may have lowered it.
    fn has_free_descriptor(&self) -> bool {
        self.uffd.as_fd().try_clone_to_owned().is_ok()
    }

    pub(crate) fn park_workers(&mut self) {
        let engine = self.engine;
        // Who asked for a fork may have been read while a worker's fault was answered: that worker
        // stands still only when it has its page.
        if let Some(fault) = self.answering.filter(|fault| self.is_of_worker(*fault)) {
            self.pending.push_front(fault);
        }
        loop {
            // Each time: a fork that was asked for meanwhile is over by then, and has let them go
            // on.
            engine.park.store(1, Release);
            engine.work.store(1, Release);
            futex::wake(&engine.work, u32::MAX >> 1, futex::Scope::Private);
            let stand_still = engine.parked.load(Acquire) == engine.workers.load(Acquire);
            if stand_still && self.remote.is_empty() && engine.far.is_settled() {
                return;
            }
            // A worker may be waiting for the handler to read its request, or for a page.
            self.drain_events();
            self.submit();
            self.complete();
            if let Some(fault) = self.pending.pop_front() {
                self.answer(fault);
            }
        }
    }

    fn fork_is_over(&mut self) {
        let engine = self.engine;
        self.deferring = false;
        self.fork_done = false;
        self.torn = false;
        self.has_forked = false;
        self.forking = false;
        self.brought.clear();
        self.apply_noted();
        if engine.followed {
            self.deny_fork();
        }
        self.unpark_workers();
        engine.fork.set(NONE);
    }

    pub(crate) fn unpark_workers(&mut self) {
        let engine = self.engine;
        engine.park.store(0, Release);
        futex::wake(&engine.park, u32::MAX >> 1, futex::Scope::Private);
        // Who parks them next counts who stands still: nobody may be on its way out of this one.
        while engine.parked.load(Acquire) != 0 {
            swaptide_sys::thread::yield_now();
        }
    }

    /// Applies what was noted. They have been read, so that the kernel no longer holds moves back
    /// for them: this must come before a worker continues, and before a fault is answered. The
    /// forking thread must not be inside fork(2), or back from it.
    pub(crate) fn apply_noted(&mut self) {
        if self.noted.is_empty() {
            return;
        }
        let engine = self.engine;
        let mut mm = engine.mm.lock();
        for event in self.noted.drain(..).filter_map(VmaChange::event) {
            engine.apply(&mut mm, event);
        }
        mm.behind = false;
        engine.publish_usage(&mm);
        let is_late = !mm.late.is_empty();
        drop(mm);
        if is_late {
            let deferring = std::mem::replace(&mut self.deferring, false);
            self.read_late();
            self.deferring = deferring;
        }
    }

    /// Notes an event for after the fork.
    pub(crate) fn note_event(&mut self, event: Event) {
        let Some(change) = VmaChange::of(&event) else {
            crate::fatal(&format!("the userfaultfd sent {event:?} during a fork"));
        };
        // Behind the fork event memory may be allocated again.
        if self.deferring && !self.has_forked && self.noted.len() == self.noted.capacity() {
            crate::fatal("more than 16384 changes of mappings during one fork");
        }
        if self.child.is_none() {
            self.brought.note_change(change);
        }
        self.noted.push(change);
    }
}
