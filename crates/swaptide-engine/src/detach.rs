//! Letting the program go: everything is brought back, and the process continues as if there had
//! been no engine.
//!
//! The supervisor asks for it by a word in the process's slot, and has lifted its limit by then, so
//! that nothing goes out any more. While nobody faults, and after every so many answers to those
//! that never cease to, the handler brings in what is swapped, in the order of addresses; then it
//! parks the workers, stores what is on its way, and looks again. When nothing is out any more,
//! the caller keeps forks away and calls [`Handler::detach`].
//!
//! Invariants
//! 1. The userfaultfd is closed only while the table has no page that is swapped, no frame is full,
//!    and no change of mappings is read but not applied: what the kernel fills from then on with
//!    zeros was empty.
//! 2. If the supervisor changes its mind before, the engine continues as it was.
//! 3. Threads that wait for the handler by then continue: the kernel wakes those that wait at the
//!    userfaultfd, [`crate::requests::HandlerRequests`] all others.
//!
//! A page that is lost is poisoned in the page tables, which closing does not change: it stays a
//! bus error.
//!
//! Locks: the memory lock.

use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Duration;

use swaptide_sys::lock::futex;
use swaptide_sys::page::{VirtAddr, VirtRange};

use crate::event_loop::Handler;
use crate::fault::path::{COPY_GROUP_PAGES, LAST_PAGE};
use crate::mm::page_table::{PageState, PageTable};
use crate::mm::types::{ChunkNo, PageNo, range_of};
use crate::mm::vma_set::VmaSet;
use crate::readahead::policy::SwappedIn;
use crate::vma::dontfork;

/// Groups that are brought in between two looks for faults.
const GROUPS: usize = 4;

impl Handler {
    /// Brings in some of what is swapped. True when nothing is out any more; the workers stand
    /// still then.
    pub(crate) fn detach_some(&mut self) -> bool {
        let engine = self.engine;
        for _ in 0..GROUPS {
            let Some(at) = self.detaching else { return false };
            if engine.slot().detach.load(Relaxed) == 0 {
                self.detaching = None;
                return false;
            }
            let Some(page) = engine.mm.lock().table.next_used(at, LAST_PAGE) else {
                return self.is_all_in();
            };
            let first = PageNo(page.0 / COPY_GROUP_PAGES * COPY_GROUP_PAGES);
            let mut came = SwappedIn::new(first);
            // A program that changes its mappings without pause leaves moments only behind the
            // reading of an event. What is not to be had now is met again at the next round.
            let _ = self.swap_in_span(first, COPY_GROUP_PAGES, LAST_PAGE, &mut came);
            if self.is_any_out(first) {
                self.drain_events();
                let _ = self.swap_in_range(first, COPY_GROUP_PAGES);
            }
            self.detaching = Some(first.plus(COPY_GROUP_PAGES));
        }
        false
    }

    /// True when some of a group is swapped.
    fn is_any_out(&self, first: PageNo) -> bool {
        let mm = self.engine.mm.lock();
        (first.chunk().0..first.plus(COPY_GROUP_PAGES).chunk().0)
            .any(|chunk| mm.table.chunk(ChunkNo(chunk)).swapped != 0)
    }

    /// Parks the workers if nothing is swapped, and looks again. False if there is more to bring
    /// in; it starts over then.
    fn is_all_in(&mut self) -> bool {
        let engine = self.engine;
        self.detaching = Some(PageNo(0));
        if engine.mm.lock().table.swapped() > 0 {
            return false;
        }
        self.park_workers();
        while self.worker.store_waiting(engine) {}
        // Who publishes otherwise stands still.
        engine.publish_slot();
        if self.is_detach_possible() {
            return true;
        }
        self.unpark_workers();
        false
    }

    /// Faults that wait are no reason against it: nothing is out, so what they wait for is zeros or
    /// there, and the kernel answers them then.
    fn is_detach_possible(&self) -> bool {
        let mm = self.engine.mm.lock();
        mm.table.swapped() == 0
            && mm.jobs.in_flight == 0
            && self.remote.is_empty()
            && mm.late.is_empty()
            && self.untracked_children.is_empty()
            && self.requests.is_empty()
            && !self.forking
    }

    /// Lets the program go, if nothing is out. False if something is by now: the handler is to be
    /// run again. Nobody may be about to fork.
    ///
    /// After that the engine is used no more; its workers end.
    pub fn detach(&mut self) -> bool {
        let engine = self.engine;
        self.read_within(Some(Duration::ZERO));
        // What is registered stays so until the last descriptor is closed.
        if !self.is_detach_possible()
            || engine.slot().detach.load(Relaxed) == 0
            || !(engine.start.release_hold)()
        {
            self.unpark_workers();
            return false;
        }
        {
            let mut guard = engine.mm.lock();
            let mm = &mut *guard;
            // A forked child knows of lost pages that its own page tables do not have yet.
            let mut at = PageNo(0);
            while let Some(page) = mm.table.next_used(at, LAST_PAGE) {
                match mm.table.get(page) {
                    PageState::Poisoned => drop(self.uffd.poison(range_of(page, 1))),
                    PageState::PresentClean(entry) => engine.devices.drop_swapped(entry),
                    _ => {}
                }
                at = page.plus(1);
            }
            mm.staging.retire();
            // Before the doors are open to everybody: who stands there continues.
            engine.bells.close();
            let _ = self.uffd.unregister(engine.bells.request_pages());
            // SAFETY: only this thread and workers have a reference to it, and those stand
            // still and end.
            unsafe { engine.close_uffd() };
            mm.table = PageTable::new();
            if engine.followed {
                dontfork::restore(mm, VirtRange { start: VirtAddr(0), end: VirtAddr(usize::MAX) });
            }
            (mm.regions, mm.armed) = (VmaSet::default(), VmaSet::default());
        }
        let _ = self.fresh_pages.discard(0, self.fresh_pages.len());
        engine.devices.file.device.clear();
        engine.devices.pool.compact(usize::MAX);
        engine.devices.pool.trim();
        engine.publish_slot();
        engine.retired.store(true, Release);
        engine.park.store(0, Release);
        futex::wake(&engine.park, u32::MAX >> 1, futex::Scope::Private);
        engine.far.call();
        true
    }
}
