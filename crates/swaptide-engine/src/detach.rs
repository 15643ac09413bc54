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
use crate::fork::{ForkServer, resume_workers};
use crate::mm::dontfork;
use crate::mm::page_table::{PageState, PageTable};
use crate::mm::types::{LAST_PAGE, PageNo, range_of};
use crate::mm::vma_set::VmaSet;
use crate::pager::Pager;
use crate::swap_in_all::{SwapInAll, is_all_in};

/// The progress of detaching the program.
#[derive(Default)]
pub(crate) struct Detach(SwapInAll);

impl Detach {
    /// The program is to be let go.
    pub(crate) fn begin(&mut self) {
        self.0.begin();
    }

    /// True while it is.
    pub(crate) fn is_wanted(&self) -> bool {
        self.0.is_wanted()
    }

    /// Brings in some of what is swapped. True when nothing is out any more; the workers are
    /// quiesced then.
    pub(crate) fn step(&mut self, pager: &mut Pager, forks: &mut ForkServer) -> bool {
        let is_wanted = |engine: &Engine| engine.slot().control.detach.load(Relaxed) != 0;
        self.0.step(pager, forks, is_wanted)
    }
}

/// Lets the program go, if nothing is out. False if something is by now: the handler is to be run
/// again.
pub(crate) fn detach(path: &mut FaultPath) -> bool {
    let engine = path.engine;
    let is_read = path.reader.read_within(Some(Duration::ZERO)).is_ok();
    // What is registered stays so until the last descriptor is closed.
    if !is_read
        || !is_all_in(path)
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
    engine.devices.areas.device.close();
    engine.devices.pool.compact(usize::MAX);
    engine.devices.pool.trim();
    engine.publish_slot();
    engine.retired.store(true, Release);
    engine.workers.quiesce.store(0, Release);
    futex::wake(&engine.workers.quiesce, u32::MAX >> 1, futex::Scope::Private);
    engine.remote_reads.call();
    true
}
