//! The parent's handler around a fork: what it ends before it, and begins again after it.
//!
//! Owns: whether the copy of the engine's memory can be used by the child ([`ForkServer`]).
//!
//! Invariants
//! 1. While it is prepared the handler allocates nothing: the forking thread copies the allocator's
//!    memory too.
//! 2. What was noted is applied before a worker continues, and before a fault is answered.
//! 3. A fork through no hook that is read meanwhile is attended to before anything else is done
//!    ([`ForkServer::serve_untracked`]).
//!
//! Locks: the memory lock, never while it waits.

use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use swaptide_ipc::Counter;
use swaptide_sys::AsFd;
use swaptide_sys::lock::futex;
use swaptide_sys::sock::Conn;
use swaptide_sys::thread::{Nanos, now, yield_now};

use crate::engine::Engine;
use crate::events::fork_state::ForkPhase;
use crate::events::late_look::LATE_EVENT_TIMEOUT;
use crate::events::reader::Interrupted;
use crate::fault::complete::complete;
use crate::fault::path::FaultPath;
use crate::fault_injection::StopPoint;
use crate::fork::allow_fork::{
    allow_again, allow_fork_of_regions, deny_fork, list_grown, list_left,
};
use crate::fork::child_uffd::receive_child_uffd;
use crate::fork::help::{Forker, MIN_WAIT_TIME};
use crate::fork::populate::Populator;
use crate::pager::Pager;
use crate::readahead::history::SharedMissHistory;
use crate::requests::fork_control::{NO_FORK, PREPARED, REFUSED};
use swaptide_sys::uffd::Coverage;

/// The time for which a pause between changes of mappings is waited for after a fork, while all
/// threads that fault wait. What was closed in doubt is looked at again at the next fork.
const MAX_CLOSING_TIME: Duration = Duration::from_millis(20);

/// The parent's part of forks.
#[derive(Default)]
pub(crate) struct ForkServer {
    pub(super) populator: Populator,
    /// The engine's memory changed while it may have been copied.
    pub(super) torn: bool,
    /// When the fork under way was prepared.
    pub(super) prepared_at: Nanos,
    /// The number of the list of regions at that time.
    list_then: u64,
}

impl ForkServer {
    /// Attends to forks through no hook that were read. Returns when none is left and no change of
    /// mappings is late.
    pub(crate) fn serve_untracked(&mut self, pager: &mut Pager) {
        while !pager.path.reader.fork.untracked.is_empty() {
            self.populator.populate_untracked(pager);
            if !pager.path.engine.mm.lock().changes.late.is_empty() {
                pager.path.reader.read_late();
            }
        }
    }

    /// Serves the forks that interrupted a read.
    fn after_read(&mut self, pager: &mut Pager, read: Result<(), Interrupted>) {
        if read.is_err() {
            self.serve_untracked(pager);
        }
    }

    /// Applies the events that are there now, and waits a moment for one to come.
    pub(super) fn drain(&mut self, pager: &mut Pager) {
        let read = pager.path.reader.drain();
        self.after_read(pager, read);
    }

    /// A thread is about to fork. Returns when the fork is over.
    pub(crate) fn fork(&mut self, pager: &mut Pager) {
        let engine = pager.path.engine;
        let forker = engine.fork.forker.load(Acquire);
        if !has_free_descriptor(engine) {
            // The event of a fork could not be read.
            engine.fork.set(REFUSED);
            return;
        }
        pager.path.reader.fork.phase = ForkPhase::Quiescing;
        pager.path.reader.cpu.leave(now());
        // The last fork's end may have been told after its hand-over.
        pager.path.reader.fork.is_done = false;
        engine.injection().stop_at(StopPoint::BeforeFork);
        self.quiesce_workers(pager);
        while pager.path.worker.store_waiting(engine) {}
        engine.mm.lock().staging.trim(0);
        pager.path.installer.discard_fresh();
        // The child makes buffers of its own, and would never free these.
        pager.path.loader.ahead.clear();
        engine.devices.areas.device.freeze_all();
        open_history(engine);
        let token = now().0.rotate_left(17) ^ u64::from(forker);
        engine.fork.token.store(token, Relaxed);
        let conn = engine.fork.take_end().or_else(|| engine.fork.fetch_end());
        if engine.fork.followed {
            if conn.is_none() {
                // A child that is followed sends its userfaultfd.
                self.fork_is_over(pager);
                engine.fork.set(REFUSED);
                return;
            }
            self.open_mappings(pager);
        }
        engine.fork.shut(conn.is_none());
        pager.path.reader.fork.phase = ForkPhase::Prepared;
        self.prepared_at = now();
        self.list_then = engine.mm.lock().regions.changes();
        pager.path.reader.fork.has_applied = false;
        engine.fork.set(PREPARED);
        engine.injection().stop_at(StopPoint::Prepared);
        self.await_child(pager, forker, conn.as_ref());
        self.torn |= pager.path.reader.fork.is_torn;
        if let Some(child) = pager.path.reader.fork.child.take() {
            if self.torn {
                (engine.start.log)(
                    "a fork began while the engine served another thread: the child gets all its \
                    memory at once and is not managed",
                );
            }
            self.hand_over(pager, child, conn);
            engine.record_new_sharing();
            engine.count(Counter::Forks, 1);
        }
        self.fork_is_over(pager);
    }

    /// Serves the forking thread, and others while that is waiting, until its child is there or
    /// there is none.
    fn await_child(&mut self, pager: &mut Pager, forker: u32, conn: Option<&Conn>) {
        let engine = pager.path.engine;
        let mut watched = Forker::new(forker);
        let mut helped = false;
        loop {
            self.serve_untracked(pager);
            let reader = &mut pager.path.reader;
            // First: a page that is answered after a fork event goes to the child before.
            if reader.fork.child.is_some() || reader.fork.is_done {
                return;
            }
            if let Some(at) = reader.pending.iter().position(|fault| fault.tid == forker) {
                let Some(fault) = reader.pending.remove(at) else { continue };
                // The forking thread is not in fork(2) yet: its child will have what is here now.
                reader.fork.is_lost = false;
                reader.fork.brought.clear();
                reader.apply_noted();
                pager.answer(fault);
                let reader = &mut pager.path.reader;
                if reader.fork.phase == ForkPhase::Prepared && reader.fork.child.is_none() {
                    reader.fork.brought.clear();
                }
                continue;
            }
            let timeout = if helped { Duration::ZERO } else { MIN_WAIT_TIME };
            let read = match conn {
                Some(conn) if engine.fork.followed => {
                    // Faults change the table, and not the list of what is managed.
                    let is_list_whole = !reader.fork.has_applied
                        && engine.mm.lock().regions.changes() == self.list_then;
                    receive_child_uffd(reader, conn, timeout, !self.torn || is_list_whole)
                }
                _ => reader.read_within(Some(timeout)),
            };
            self.after_read(pager, read);
            helped = watched.help(pager, &mut self.torn);
        }
    }

    /// Quiesces the workers, with nothing of theirs half done, and has remote pages arrive.
    pub(crate) fn quiesce_workers(&mut self, pager: &mut Pager) {
        let engine = pager.path.engine;
        pager.path.reader.begin_alone();
        loop {
            engine.workers.quiesce.store(1, Release);
            engine.workers.work.store(1, Release);
            engine.serving.servers.call();
            futex::wake(&engine.workers.work, u32::MAX >> 1, futex::Scope::Private);
            let quiesced =
                engine.workers.quiesced.load(Acquire) == engine.workers.running.load(Acquire);
            // A server that could not serve its last fault has handed it over.
            let is_all_taken = !engine.serving.servers.is_told();
            if quiesced
                && is_all_taken
                && pager.path.remote.is_empty()
                && engine.remote_reads.are_initialized()
            {
                engine.serving.servers.end_call();
                return;
            }
            // A worker may be waiting for the handler to read its request, or for a page.
            self.drain(pager);
            pager.path.remote.submit(engine);
            complete(&mut pager.path);
            self.serve_untracked(pager);
            if let Some(fault) = pager.path.reader.pending.pop_front() {
                pager.answer(fault);
                self.serve_untracked(pager);
            }
        }
    }

    /// Opens managed mappings for a fork that is followed; the workers are quiesced.
    ///
    /// A mapping that another thread has just moved is not where the table has it, and would stay
    /// closed. So it is done again until no change was under way from before it to after it. A
    /// thread that moves mappings through libc waits for the handler, and so for the fork; past
    /// libc threads could continue for ever.
    fn open_mappings(&mut self, pager: &mut Pager) {
        if !self.try_to_open_mappings(pager, LATE_EVENT_TIMEOUT) {
            (pager.path.engine.start.log)(
                "mappings are moved without pause: a forked child may lack some of them",
            );
            allow_fork_of_regions(&mut pager.path);
        }
    }

    /// As for [`ForkServer::open_mappings`]; false if changes had no pause for so long.
    pub(crate) fn try_to_open_mappings(&mut self, pager: &mut Pager, most: Duration) -> bool {
        let began = now();
        loop {
            if is_quiet(&pager.path) {
                self.open_doubtful(pager);
                list_left(pager);
                list_grown(pager);
                allow_fork_of_regions(&mut pager.path);
                if is_quiet(&pager.path) {
                    return true;
                }
            }
            if now().since(began) > most {
                return false;
            }
            let read = pager.path.reader.await_quiet().map(drop);
            self.after_read(pager, read);
        }
    }

    /// Closes them again, after the fork. What another thread has mapped over one meanwhile is the
    /// program's own, and is not to be missing in its children: where a change was under way, what
    /// is not listed any more when it was read is opened again.
    pub(crate) fn close_mappings(&mut self, pager: &mut Pager) {
        let engine = pager.path.engine;
        let began = now();
        let is_over = || now().since(began) > MAX_CLOSING_TIME;
        loop {
            while !is_quiet(&pager.path) && !is_over() {
                let read = pager.path.reader.await_quiet().map(drop);
                self.after_read(pager, read);
            }
            self.open_doubtful(pager);
            deny_fork(engine);
            if is_quiet(&pager.path) {
                return;
            }
            let mm = &mut *engine.mm.lock();
            mm.regions.iter().for_each(|region| mm.changes.closed_in_doubt.insert(region));
            if is_over() {
                return;
            }
        }
    }

    /// Opens what was closed and turned out not to be managed. No change of mappings is under way.
    fn open_doubtful(&mut self, pager: &mut Pager) {
        let engine = pager.path.engine;
        let mut gone = Vec::new();
        {
            let mm = &mut *engine.mm.lock();
            let doubtful = std::mem::take(&mut mm.changes.closed_in_doubt);
            doubtful.iter().for_each(|range| mm.regions.gaps(range, |gap| gone.push(gap)));
        }
        gone.into_iter().for_each(|range| allow_again(engine, &mut pager.path, range));
    }

    fn fork_is_over(&mut self, pager: &mut Pager) {
        let reader = &mut pager.path.reader;
        reader.fork.phase = ForkPhase::None;
        reader.fork.is_done = false;
        reader.fork.is_torn = false;
        reader.fork.is_lost = false;
        self.torn = false;
        reader.fork.brought.clear();
        reader.apply_noted();
        self.serve_untracked(pager);
        let engine = pager.path.engine;
        if engine.fork.followed {
            self.close_mappings(pager);
        }
        resume_workers(engine);
        engine.fork.set(NO_FORK);
    }
}

/// True if no change of mappings is under way.
fn is_quiet(path: &FaultPath) -> bool {
    path.reader.uffd.coverage(path.engine.handler_requests.range()) != Coverage::Changing
}

/// A history of misses that this process's children share, if they are worth one.
fn open_history(engine: &Engine) {
    let mut history = engine.fork.childrens_history.lock();
    if history.is_none() && engine.charge.is_pool_worth_sharing() {
        // Without it, children begin their own.
        *history = SharedMissHistory::new(engine.charge.limit()).ok();
    }
}

/// True if one more descriptor fits into the handler's table: the limit is the process's, and the
/// program may have lowered it.
fn has_free_descriptor(engine: &Engine) -> bool {
    engine.uffd().as_fd().try_clone_to_owned().is_ok()
}

/// Lets the workers continue.
pub(crate) fn resume_workers(engine: &Engine) {
    engine.workers.quiesce.store(0, Release);
    futex::wake(&engine.workers.quiesce, u32::MAX >> 1, futex::Scope::Private);
    // The next time they are quiesced, those that are quiesced are counted: none may be on its way
    // out of this one.
    while engine.workers.quiesced.load(Acquire) != 0 {
        yield_now();
    }
}
