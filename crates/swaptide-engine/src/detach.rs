//! Letting the program go: everything is brought back, and the process continues as if there had
//! been no engine.
//!
//! The supervisor asks for it by a word in the process's slot, and has lifted its limit by then, so
//! that nothing goes out any more. While no thread faults, and after every few answers to those
//! that never cease to, the handler brings in what is swapped, in the order of addresses; then it
//! parks the workers, stores what is on its way, and looks again. When nothing is out any more, the
//! thread that runs the handler keeps forks away and calls [`crate::event_loop::Handler::detach`].
//!
//! Owns: how far that has come ([`Detach`]).
//!
//! Invariants
//! 1. The userfaultfd is closed only while the table has no page that is swapped, no frame is full,
//!    and no change of mappings is read but not applied: what the kernel fills from then on with
//!    zeros was empty.
//! 2. If the supervisor changes its mind before, the engine continues as it was.
//! 3. A thread that waits for the handler by then continues: the kernel wakes those that wait at
//!    the userfaultfd, [`crate::requests::HandlerRequests`] all others.
//!
//! A page that is lost is poisoned in the page tables, which closing does not change: it stays a
//! bus error.
//!
//! Locks: the memory lock.

use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Duration;

use swaptide_sys::lock::futex;
use swaptide_sys::page::{VirtAddr, VirtRange};

use crate::engine::Engine;
use crate::fault::path::FaultPath;
use crate::fault::swap_in::COPY_GROUP_PAGES;
use crate::fork::{ForkServer, resume_workers};
use crate::mm::dontfork;
use crate::mm::page_table::{PageState, PageTable};
use crate::mm::types::{ChunkNo, LAST_PAGE, PageNo, range_of};
use crate::mm::vma_set::VmaSet;
use crate::pager::Pager;
use crate::readahead::policy::SwappedIn;

/// Groups that are brought in between two checks for faults.
const GROUPS_PER_STEP: usize = 4;

/// The progress of detaching the program.
#[derive(Default)]
pub(crate) struct Detach {
    /// The page at which bringing everything in continues; `None`: the program is not to be let go.
    at: Option<PageNo>,
}

impl Detach {
    /// The program is to be let go.
    pub(crate) fn begin(&mut self) {
        self.at = self.at.or(Some(PageNo(0)));
    }

    /// True while it is.
    pub(crate) fn is_wanted(&self) -> bool {
        self.at.is_some()
    }

    /// Brings in some of what is swapped. True when nothing is out any more; the workers are
    /// quiesced then.
    pub(crate) fn step(&mut self, pager: &mut Pager, forks: &mut ForkServer) -> bool {
        let engine = pager.path.engine;
        for _ in 0..GROUPS_PER_STEP {
            let Some(at) = self.at else { return false };
            if engine.slot().control.detach.load(Relaxed) == 0 {
                self.at = None;
                if engine.is_quiescing() {
                    // It was about to be let go.
                    resume_workers(engine);
                }
                return false;
            }
            let Some(page) = engine.mm.lock().table.next_used(at, LAST_PAGE) else {
                return self.is_all_in(pager, forks);
            };
            let first = PageNo(page.0 / COPY_GROUP_PAGES * COPY_GROUP_PAGES);
            let mut swapped_in = SwappedIn::new(first);
            // A program that changes its mappings without pause leaves moments only behind the
            // reading of an event. What is not to be had now is met again at the next round.
            let path = &mut pager.path;
            let _ = path.swap_in_span(first, COPY_GROUP_PAGES, LAST_PAGE, &mut swapped_in);
            if is_any_out(engine, first) {
                if path.reader.drain().is_err() {
                    return false;
                }
                let _ = path.swap_in_range(first, COPY_GROUP_PAGES);
            }
            self.at = Some(first.plus(COPY_GROUP_PAGES));
        }
        false
    }

    /// Parks the workers if nothing is swapped, and looks again. False if there is more to bring
    /// in; it begins again then.
    fn is_all_in(&mut self, pager: &mut Pager, forks: &mut ForkServer) -> bool {
        let engine = pager.path.engine;
        self.at = Some(PageNo(0));
        if engine.mm.lock().table.swapped() > 0 {
            return false;
        }
        forks.quiesce_workers(pager);
        while pager.path.worker.store_waiting(engine) {}
        // The worker that publishes otherwise is quiesced.
        engine.publish_slot();
        if is_possible(&pager.path) {
            return true;
        }
        resume_workers(engine);
        false
    }
}

/// True when some of a group is swapped.
fn is_any_out(engine: &Engine, first: PageNo) -> bool {
    let mm = engine.mm.lock();
    (first.chunk().0..first.plus(COPY_GROUP_PAGES).chunk().0)
        .any(|chunk| mm.table.chunk(ChunkNo(chunk)).swapped != 0)
}

/// Faults that wait are no reason against it: nothing is out, so what they wait for is zeros or
/// there, and the kernel answers them then.
fn is_possible(path: &FaultPath) -> bool {
    let mm = path.engine.mm.lock();
    mm.table.swapped() == 0
        && mm.jobs.in_flight == 0
        && path.remote.is_empty()
        && mm.changes.late.is_empty()
        && path.reader.fork.untracked.is_empty()
        && path.reader.requests.is_empty()
        && !path.reader.fork.phase.is_under_way()
}

/// Lets the program go, if nothing is out. False if something is by now: the handler is to be run
/// again.
pub(crate) fn detach(path: &mut FaultPath) -> bool {
    let engine = path.engine;
    let is_read = path.reader.read_within(Some(Duration::ZERO)).is_ok();
    // What is registered stays so until the last descriptor is closed.
    if !is_read
        || !is_possible(path)
        || engine.slot().control.detach.load(Relaxed) == 0
        || !(engine.start.release_hold)()
    {
        resume_workers(engine);
        return false;
    }
    {
        let mut guard = engine.mm.lock();
        let mm = &mut *guard;
        // A forked child knows of lost pages that its own page tables do not have yet.
        let mut at = PageNo(0);
        while let Some(page) = mm.table.next_used(at, LAST_PAGE) {
            match mm.table.get(page) {
                PageState::Poisoned => drop(path.reader.uffd.poison(range_of(page, 1))),
                PageState::PresentClean(entry) => engine.devices.drop_swapped(entry),
                _ => {}
            }
            at = page.plus(1);
        }
        mm.staging.retire();
        // Before the request pages are unregistered: a thread that waits at one continues.
        engine.handler_requests.close();
        let _ = path.reader.uffd.unregister(engine.handler_requests.request_pages());
        // SAFETY: every reference to it is this thread's, or a worker's, and those are quiesced
        // and end.
        unsafe { engine.close_uffd() };
        mm.table = PageTable::new();
        if engine.fork.followed {
            let all = VirtRange { start: VirtAddr(0), end: VirtAddr(usize::MAX) };
            dontfork::restore(mm.dontfork_ranges(), all);
        }
        (mm.regions, mm.armed) = (VmaSet::default(), VmaSet::default());
        mm.changes.owed.clear();
    }
    path.installer.discard_fresh();
    engine.devices.areas.device.clear();
    engine.devices.pool.compact(usize::MAX);
    engine.devices.pool.trim();
    engine.publish_slot();
    engine.retired.store(true, Release);
    engine.workers.quiesce.store(0, Release);
    futex::wake(&engine.workers.quiesce, u32::MAX >> 1, futex::Scope::Private);
    engine.remote_reads.call();
    true
}
