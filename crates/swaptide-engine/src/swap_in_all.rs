//! Bringing in everything that is swapped, a little at a time.
//!
//! While no thread faults, and after every few answers to those that never cease to, the handler
//! brings in what is swapped, in the order of addresses; then it parks the workers, stores what is
//! on its way, and looks again. The limit is lifted meanwhile, so that nothing goes out.
//!
//! Owns: how far that has come ([`SwapInAll`]). Locks: the memory lock.

use crate::engine::Engine;
use crate::fault::path::FaultPath;
use crate::fault::swap_in::COPY_GROUP_PAGES;
use crate::fork::{ForkServer, resume_workers};
use crate::mm::types::{ChunkNo, LAST_PAGE, PageNo};
use crate::pager::Pager;
use crate::readahead::policy::SwappedIn;

/// Groups that are brought in between two checks for faults.
const GROUPS_PER_STEP: usize = 4;

/// The progress of bringing everything in.
#[derive(Default)]
pub(crate) struct SwapInAll {
    /// The page at which it continues; `None`: that is not wanted.
    at: Option<PageNo>,
}

impl SwapInAll {
    /// Everything is to come in.
    pub(crate) fn begin(&mut self) {
        self.at = self.at.or(Some(PageNo(0)));
    }

    /// True while it is.
    pub(crate) fn is_wanted(&self) -> bool {
        self.at.is_some()
    }

    /// It is not to come in any more.
    pub(crate) fn end(&mut self) {
        self.at = None;
    }

    /// Brings in some of what is swapped, while that `is_wanted`. True when nothing is out any
    /// more; the workers are quiesced then.
    pub(crate) fn step(
        &mut self,
        pager: &mut Pager,
        forks: &mut ForkServer,
        is_wanted: impl Fn(&Engine) -> bool,
    ) -> bool {
        let engine = pager.path.engine;
        for _ in 0..GROUPS_PER_STEP {
            let Some(at) = self.at else { return false };
            if !is_wanted(engine) {
                self.at = None;
                if engine.is_quiescing() {
                    // Everything was about to be in.
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
        if is_all_in(&pager.path) {
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

/// True when nothing is out, nothing on its way and no change of mappings unread. Faults that wait
/// are no reason against it: nothing is out, so what they wait for is zeros or there.
pub(crate) fn is_all_in(path: &FaultPath) -> bool {
    let mm = path.engine.mm.lock();
    mm.table.swapped() == 0
        && mm.jobs.in_flight == 0
        && path.remote.is_empty()
        && mm.changes.late.is_empty()
        && path.reader.fork.untracked.is_empty()
        && path.reader.requests.is_empty()
        && !path.reader.fork.phase.is_under_way()
}
