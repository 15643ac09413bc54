//! Bringing in everything that is swapped, a little at a time.
//!
//! While no thread faults, and after every few answers to those that never cease to, the handler
//! brings in what is swapped, in the order of addresses; then it parks the workers, stores what is
//! on its way, and looks again. The limit is lifted meanwhile, so that nothing goes out.
//!
//! Owns: how far that has come ([`SwapInAll`]). Locks: the memory lock.

use std::time::Duration;

use swaptide_sys::thread::now;

use crate::engine::Engine;
use crate::events::reader::Interrupted;
use crate::fault::path::FaultPath;
use crate::fault::swap_in::COPY_GROUP_PAGES;
use crate::fork::{ForkServer, resume_workers};
use crate::mm::types::{ChunkNo, LAST_PAGE, PageNo};
use crate::pager::Pager;
use crate::readahead::policy::SwappedIn;

/// Groups that are brought in between two checks for faults.
const GROUPS_PER_STEP: usize = 4;
/// Attempts to bring in a page of a group between two changes of mappings.
const TRIES_PER_GROUP: usize = 2 * COPY_GROUP_PAGES;
/// How long a thread that faults meanwhile is kept waiting.
const MAX_FAULT_DELAY: Duration = Duration::from_millis(20);

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
            let path = &mut pager.path;
            path.installer.brings_all = true;
            let _ = path.swap_in_span(first, COPY_GROUP_PAGES, LAST_PAGE, &mut swapped_in);
            path.installer.brings_all = false;
            // What is not to be had now is met again at the next round.
            self.at = Some(first.plus(COPY_GROUP_PAGES));
            if is_any_out(engine, first) {
                let brought_in = bring_in_between_changes(path, first);
                // Threads that fault have waited for some time.
                if brought_in.is_err() || !path.reader.pending.is_empty() {
                    return false;
                }
            }
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

/// Brings in what is swapped of a group, a few pages at a time: a program that changes its mappings
/// without pause leaves moments only in which no change is unread, too short to load a group in.
/// Threads that fault are not kept waiting for long.
///
/// # Errors
/// As for [`crate::events::reader::UffdReader::read_within`].
fn bring_in_between_changes(path: &mut FaultPath, first: PageNo) -> Result<(), Interrupted> {
    path.reader.begin_alone();
    let began = now();
    for _ in 0..TRIES_PER_GROUP {
        let Some(page) = first_out(path.engine, first) else { break };
        if path.reader.await_quiet()? {
            path.installer.brings_all = true;
            let _ = path.swap_in_range(page, 1);
            path.installer.brings_all = false;
        }
        if now().since(began) > MAX_FAULT_DELAY {
            break;
        }
    }
    Ok(())
}

/// True when some of a group is swapped.
fn is_any_out(engine: &Engine, first: PageNo) -> bool {
    first_out(engine, first).is_some()
}

/// The first page of a group that is swapped.
fn first_out(engine: &Engine, first: PageNo) -> Option<PageNo> {
    let mm = engine.mm.lock();
    (first.chunk().0..first.plus(COPY_GROUP_PAGES).chunk().0)
        .map(ChunkNo)
        .map(|chunk| (chunk, mm.table.chunk(chunk).swapped))
        .find(|(_, swapped)| *swapped != 0)
        .map(|(chunk, swapped)| chunk.first().plus(swapped.trailing_zeros() as usize))
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
