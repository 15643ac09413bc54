//! What programs ask for by advice (madvise(2)) for ranges of regions.
//!
//! Owns nothing. Locks: the pager's state, for each piece of advice; what has to be waited for is
//! waited for without it.

use std::collections::HashSet;
use std::ops::Range;
use std::time::{Duration, Instant};

use swaptide_engine::mm::types::PAGES_PER_CHUNK;
use swaptide_engine::readahead::locality::Reading;
use swaptide_ipc::shared::{
    ADVICE_HOLD, ADVICE_KEEP, ADVICE_RELEASE, ADVICE_REMOVE, AdviceOutcome,
};
use swaptide_sys::Errno;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};

use crate::region::{RegionId, RegionPage};
use crate::space::{GrowthHold, Piece, Space, SpaceId, SpaceState, scan};
use crate::state::{Inner, PagerState, is_hole, punch};

/// Mappings of one process that may be growing at a time.
const MAX_HOLDS: usize = 1024;
/// Ranges that programs may want in at a time; more are not brought in ahead.
const MAX_WANTED_IN: usize = 64;

/// Takes the advice of programs.
pub(crate) struct AdviceTaker<'a>(pub &'a Inner);

impl AdviceTaker<'_> {
    /// Handles the advice of a program for a range.
    pub fn advise(&self, pid: u32, addr: usize, len: usize, advice: i32) -> AdviceOutcome {
        let Some(end) = addr.checked_add(len).filter(|end| *end <= usize::MAX - PAGE_SIZE) else {
            return AdviceOutcome::Elsewhere;
        };
        let range = VirtRange { start: VirtAddr(addr).page_down(), end: VirtAddr(end).page_up() };
        if advice == ADVICE_KEEP {
            return self.keep_range(pid, range);
        }
        let mut state = self.0.lock();
        let found = state
            .spaces
            .iter()
            .find(|(_, space)| space.pid == Some(pid) && space.standing() != SpaceState::Gone);
        let found = found.map(|(id, _)| *id);
        if advice == ADVICE_REMOVE {
            return self.remove(&mut state, pid, found, range);
        }
        let Some(id) = found else { return AdviceOutcome::Elsewhere };
        match advice {
            ADVICE_HOLD => return self.hold(&mut state, id, range),
            ADVICE_RELEASE => {
                if let Some(space) = state.spaces.get_mut(&id)
                    && let Some(at) = space.holds.iter().position(|hold| hold.range == range)
                {
                    space.holds.swap_remove(at);
                }
                self.0.learn(&mut state, id);
                return AdviceOutcome::Taken;
            }
            _ => {}
        }
        let space = state.spaces.get(&id).filter(|space| !space.stale);
        let parts = space.map_or(Vec::new(), |space| clip(&space.layout, range));
        for (id, pages) in &parts {
            self.advise_pages(&mut state, *id, pages.clone(), advice);
        }
        self.0.work.notify_all();
        if parts.is_empty() { AdviceOutcome::Elsewhere } else { AdviceOutcome::Taken }
    }

    /// What a range of a process maps is to stay. While mappings are being changed the kernel lifts
    /// no protection: that is waited for without the lock, under which the change is read.
    fn keep_range(&self, pid: u32, range: VirtRange) -> AdviceOutcome {
        const MAX_TRIES: usize = 100;
        for _ in 0..MAX_TRIES {
            let mut state = self.0.lock();
            let mut spaces = state.spaces.values();
            // One that has no region mapped, or is a child whose guard has not come.
            let is_its =
                |space: &&Space| space.pid == Some(pid) && space.standing() != SpaceState::Gone;
            let Some(space) = spaces.find(is_its) else { return AdviceOutcome::Elsewhere };
            let parts = Some(space).filter(|space| !space.stale);
            let parts = parts.map(|space| clip(&space.layout, range));
            let outcome = parts.map(|parts| self.keep(&mut state, parts));
            if let Some(outcome) = outcome.filter(|outcome| *outcome != AdviceOutcome::Failed) {
                return outcome;
            }
            drop(state);
            std::thread::sleep(Duration::from_millis(1));
        }
        AdviceOutcome::Failed
    }

    /// Brings pages in that are to stay as long as their region is there.
    fn keep(&self, state: &mut PagerState, parts: Vec<(RegionId, Range<usize>)>) -> AdviceOutcome {
        let mut outcome = AdviceOutcome::Elsewhere;
        for (id, pages) in parts {
            let Some(region) = state.regions.get_mut(&id) else { continue };
            let pages = pages.start.min(region.pages())..pages.end.min(region.pages());
            for chunk in pages.start / PAGES_PER_CHUNK..pages.end.div_ceil(PAGES_PER_CHUNK) {
                region.chunk(chunk).stays = true;
            }
            // What is on its way out may be of it: it stays, and the protection is lifted, for no
            // thread that ends waits for that.
            state.generation += 1;
            for page in pages.clone() {
                if region.state(page) == RegionPage::Leaving {
                    region.set(page, RegionPage::Present);
                }
            }
            let is_in = self.0.restore(state, id, pages.clone()) && lift_all(state, id, &pages);
            if outcome != AdviceOutcome::Failed {
                outcome = if is_in { AdviceOutcome::Taken } else { AdviceOutcome::Failed };
            }
        }
        outcome
    }

    /// A thread is about to grow a mapping: what it may come to map stays in until it has.
    fn hold(&self, state: &mut PagerState, id: SpaceId, range: VirtRange) -> AdviceOutcome {
        let unsure = |space: &Space| {
            space.stale || !space.holds.is_empty() || space.standing() != SpaceState::Quiet
        };
        if state.spaces.get(&id).is_some_and(unsure) {
            // The mapping may have become another one, by a thread that has not settled yet.
            self.0.learn(state, id);
        }
        // What is on its way out may be of it.
        state.generation += 1;
        let Some(space) = state.spaces.get_mut(&id) else { return AdviceOutcome::Elsewhere };
        if space.holds.len() >= MAX_HOLDS {
            return AdviceOutcome::Failed;
        }
        let pages = space.pages_to_come(range);
        space.holds.push(GrowthHold { range, pages, since: Instant::now() });
        AdviceOutcome::Taken
    }

    /// Gives pages up, in the place of the kernel: all of them at one moment, whether in memory or
    /// out. What is written after a thread has read zeros there stays.
    fn remove(
        &self,
        state: &mut PagerState,
        pid: u32,
        known: Option<SpaceId>,
        range: VirtRange,
    ) -> AdviceOutcome {
        let is_sure = |space: &&Space| {
            !space.stale && space.holds.is_empty() && space.standing() == SpaceState::Quiet
        };
        let is_whole = |parts: &[(RegionId, Range<usize>)]| {
            parts.iter().map(|(_, pages)| pages.len()).sum::<usize>() == range.pages()
        };
        let space = known.and_then(|id| state.spaces.get(&id)).filter(is_sure);
        let mut parts = space.map_or(Vec::new(), |space| clip(&space.layout, range));
        if !is_whole(&parts) {
            // A process whose guard has not come is not known by its number, and its mappings are
            // all the same what it says.
            let regions: HashSet<RegionId> = state.regions.keys().copied().collect();
            let Ok(layout) = scan(pid, &regions) else { return AdviceOutcome::Failed };
            parts = clip(&layout, range);
        }
        if !is_whole(&parts) {
            return AdviceOutcome::Elsewhere;
        }
        let done = parts.into_iter().all(|(id, pages)| self.discard(state, id, pages));
        if done { AdviceOutcome::Taken } else { AdviceOutcome::Failed }
    }

    fn advise_pages(&self, state: &mut PagerState, id: RegionId, pages: Range<usize>, advice: i32) {
        const NORMAL: i32 = 0;
        const RANDOM: i32 = 1;
        const SEQUENTIAL: i32 = 2;
        const WILLNEED: i32 = 3;
        const COLD: i32 = 20;
        const PAGEOUT: i32 = 21;
        let chunks = |pages: &Range<usize>| {
            pages.start / PAGES_PER_CHUNK..pages.end.div_ceil(PAGES_PER_CHUNK)
        };
        let Some(region) = state.regions.get_mut(&id) else { return };
        // A mapping may be longer than what it maps.
        let pages = pages.start.min(region.pages())..pages.end.min(region.pages());
        match advice {
            NORMAL => region.say(pages, Reading::Unknown),
            RANDOM => region.say(pages, Reading::Random),
            SEQUENTIAL => region.say(pages, Reading::Sequential),
            WILLNEED => self.want_in(state, id, pages),
            COLD => {
                for chunk in chunks(&pages).rev() {
                    let is_in = region.chunk_pages(chunk).any(|page| region.state(page).is_in());
                    let marks = region.chunk(chunk);
                    marks.heat.end_rounds(u16::MAX);
                    // It stands in the queue twice then, and is skipped the second time.
                    if is_in && !std::mem::replace(&mut marks.ahead, true) {
                        state.order.queue.push_front((id, chunk as u32));
                    }
                }
            }
            PAGEOUT => chunks(&pages).for_each(|chunk| state.want_out(id, chunk)),
            _ => {}
        }
    }

    /// Has pages brought in, as many as half of the limit holds, by the thread that answers
    /// faults. No thread waits for them.
    fn want_in(&self, state: &mut PagerState, id: RegionId, pages: Range<usize>) {
        let most = self.0.limit().map_or(usize::MAX, |limit| (limit / 2) as usize / PAGE_SIZE);
        let queued: usize = state.advised.into.iter().map(|(_, pages)| pages.len()).sum();
        let Some(region) = state.regions.get(&id) else { return };
        let mut left = most.saturating_sub(queued);
        let mut end = pages.start;
        while end < pages.end && left > 0 {
            left -= usize::from(region.state(end).is_out());
            end += 1;
        }
        if pages.start < end && state.advised.into.len() < MAX_WANTED_IN {
            state.advised.into.push_back((id, pages.start..end));
            self.0.tell_room();
        }
    }

    /// Pages are given up: they read as zeros. False when they could not be.
    fn discard(&self, state: &mut PagerState, id: RegionId, pages: Range<usize>) -> bool {
        let Some(region) = state.regions.get_mut(&id) else { return true };
        // A mapping may be longer than what it maps.
        let pages = pages.start.min(region.pages())..pages.end.min(region.pages());
        if pages.is_empty() {
            return true;
        }
        if punch(&region.memory, &pages).is_err() {
            return false;
        }
        let all = is_hole(&region.memory, &pages);
        for page in pages {
            self.0.store.free(region.slot(page), region.state(page));
            // A part of a huge page that could not be split is zeros, and still there.
            let is_there = !all && !is_hole(&region.memory, &(page..page + 1));
            region.set(page, if is_there { RegionPage::Present } else { RegionPage::Absent });
        }
        self.0.publish(&state.counts());
        true
    }
}

/// Lifts protection of pages in every address space. False where the kernel refuses, for mappings
/// are being changed there.
fn lift_all(state: &PagerState, id: RegionId, pages: &Range<usize>) -> bool {
    let mut ranges = state
        .spaces
        .values()
        .flat_map(|space| space.addresses(id, pages).map(move |range| (space, range)));
    ranges.all(|(space, range)| {
        let is_lifted = space.uffd.write_protect(range, false) != Err(Errno::AGAIN);
        let _ = space.uffd.wake(range);
        is_lifted
    })
}

/// The pages of regions that a range of addresses maps.
fn clip(layout: &[Piece], range: VirtRange) -> Vec<(RegionId, Range<usize>)> {
    let part = |piece: &Piece| {
        let (from, to) = (piece.range.start.max(range.start), piece.range.end.min(range.end));
        (from < to).then(|| {
            let first = piece.page + (from.0 - piece.range.start.0) / PAGE_SIZE;
            (piece.region, first..first + (to.0 - from.0) / PAGE_SIZE)
        })
    };
    layout.iter().filter_map(part).collect()
}
