//! Answers to faults and events.
//!
//! Owns the thread that reads every userfaultfd. It reads with the state's lock held and applies
//! what it read under the same hold, so no thread sees the one without the other: a forked child
//! runs from the moment its event is read, and is known by then.
//!
//! What a fault brings in is decided here; how it comes in is `swap_in`'s.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use rustix::event::epoll;
use swaptide_engine::mm::types::{PAGES_PER_CHUNK, PageNo};
use swaptide_engine::readahead::locality::SwapIn;
use swaptide_ipc::{Counter, LAST_ORDER, OfOrder};
use swaptide_sys::Errno;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::uffd::{Event, Message, Uffd};

use crate::reclaim::margin;
use crate::region::RegionPage;
use crate::space::{Space, SpaceId, SpaceState};
use crate::state::{GUARD_TIMEOUT, Inner, PagerState, ROOM_TOKEN, STOP_FAULTS, is_hole};
use crate::swap_in::{FIRST_PAGES, FaultSite, MAX_PAGES_PER_FAULT, PageLoader};

/// Pages that are brought in together of what a program wants in.
const WINDOW_PAGES: usize = 64;
/// Without a limit, what one fault may bring in is bounded as under this one.
const DEFAULT_WINDOW_LIMIT_BYTES: u64 = 128 << 20;

/// The thread that answers.
struct FaultThread {
    inner: Arc<Inner>,
    loader: PageLoader,
}

/// What the thread does.
pub(crate) fn run(inner: Arc<Inner>) {
    // A fault is a thread that waits.
    swaptide_sys::affinity::go_first();
    let mut thread = FaultThread { inner: inner.clone(), loader: PageLoader::new() };
    let mut events =
        [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
            64];
    // There is more to bring in that a program wants, and room for it.
    let mut comes_in = false;
    while inner.stop.load(Relaxed) & STOP_FAULTS == 0 {
        let wait_ms: i64 = {
            let state = inner.lock();
            let is_short = state.shortages.is_any();
            let is_short = is_short && !state.waiting.is_empty();
            let looks = |space: &Space| space.guard.is_none() || space.needs_restore();
            if is_short || state.spaces.values().any(looks) { 5 } else { 100 }
        };
        let timeout = if comes_in { 0 } else { wait_ms * 1_000_000 };
        let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: timeout };
        let ready = match epoll::wait(&inner.poll, &mut events[..], Some(&timeout)) {
            Ok(count) => count,
            Err(Errno::INTR) => continue,
            Err(errno) => {
                (inner.log)(&format!(
                    "shared memory: waiting for faults: {errno}; they are no longer served"
                ));
                return;
            }
        };
        let mut state = inner.lock();
        for event in &events[..ready] {
            let data = event.data.u64();
            let id = SpaceId(data >> 1);
            if data == ROOM_TOKEN {
                let _ = rustix::io::read(&inner.room, &mut [0u8; 8]);
            } else if data & 1 == 1 {
                thread.guard_gone(&mut state, id);
            } else {
                thread.read_events(&mut state, id);
            }
        }
        for (id, addr, wp) in std::mem::take(&mut state.waiting) {
            thread.answer(&mut state, id, addr, wp);
        }
        if ready == 0 && !comes_in || wait_ms == 5 {
            thread.check_unguarded(&mut state);
        }
        comes_in = thread.swap_in_some(&mut state);
        if !state.waiting.is_empty() || !state.advised.into.is_empty() {
            inner.work.notify_all();
        }
    }
}

impl FaultThread {
    /// True when nothing may come in before something goes out.
    fn is_full(&self, state: &PagerState) -> bool {
        !self.has_room(state, FIRST_PAGES) && !state.is_stuck()
    }

    /// True when `pages` pages may come in within the limit.
    fn has_room(&self, state: &PagerState, pages: usize) -> bool {
        let Some(limit) = self.inner.limit().filter(|_| state.engaged) else { return true };
        let used = (state.counts().resident * PAGE_SIZE) as u64 + self.inner.own_bytes_before();
        used + (pages * PAGE_SIZE) as u64 <= limit
    }

    /// Brings in a window of what programs want in, if there is room. True when there is more to
    /// bring in at once: faults are answered in between.
    fn swap_in_some(&mut self, state: &mut PagerState) -> bool {
        while let Some((id, pages)) = state.advised.into.front().cloned() {
            let region = state.regions.get(&id);
            let out = |page: &usize| region.is_some_and(|region| region.state(*page).is_out());
            let Some(start) = pages.clone().find(out) else {
                state.advised.into.pop_front();
                continue;
            };
            // What reclaim keeps free has room for this much.
            let most = self.inner.limit().map_or(WINDOW_PAGES, |limit| {
                (margin(limit) as usize / PAGE_SIZE).clamp(1, WINDOW_PAGES)
            });
            if !self.has_room(state, most) {
                if state.is_stuck() {
                    // None will be made for it. It was a wish, and no more.
                    state.advised.into.clear();
                }
                return false;
            }
            let len = (start..pages.end.min(start + most)).take_while(out).count();
            if let Some((_, left)) = state.advised.into.front_mut() {
                // What cannot be brought in now comes when it is touched.
                left.start = start + len;
            }
            self.inner.fill(state, None, id, start..start + len, &mut self.loader);
            return true;
        }
        false
    }

    /// The guard of an address space hung up: its process has ended or executed another program, or
    /// soon will have.
    fn guard_gone(&self, state: &mut PagerState, id: SpaceId) {
        let Some(space) = state.spaces.get_mut(&id) else { return };
        space.guard.take().into_iter().for_each(self.inner.close);
        // Another program may go by that number now.
        space.pid = None;
        space.unguarded = Instant::now();
        state.generation += 1;
        if space.standing() == SpaceState::Gone {
            self.inner.forget_space(state, id);
        }
    }

    /// Looks at address spaces without a guard, and at faults that wait.
    fn check_unguarded(&mut self, state: &mut PagerState) {
        // Their mappings could not be read when they changed: no memory, or no descriptor.
        let unread: Vec<SpaceId> = state
            .spaces
            .iter()
            .filter(|(_, space)| space.stale && !space.broken && space.pid.is_some())
            .map(|(id, _)| *id)
            .collect();
        unread.into_iter().for_each(|id| self.inner.learn(state, id));
        let alone: Vec<SpaceId> = state
            .spaces
            .iter()
            .filter(|(_, space)| space.guard.is_none() || space.needs_restore())
            .map(|(id, _)| *id)
            .collect();
        for id in alone {
            let space = &state.spaces[&id];
            if space.standing() == SpaceState::Gone {
                self.inner.forget_space(state, id);
            } else if space.needs_restore()
                || space.unguarded.elapsed() > GUARD_TIMEOUT && !space.restored
            {
                self.inner.restore_space(state, id);
            }
        }
        self.inner.forget_unmapped(state);
        for (id, addr, wp) in std::mem::take(&mut state.held) {
            self.answer(state, id, addr, wp);
        }
    }

    /// Reads what an address space tells, and answers.
    fn read_events(&mut self, state: &mut PagerState, id: SpaceId) {
        let mut messages = Message::buffer::<32>();
        let mut faults: Vec<(VirtAddr, bool)> = Vec::new();
        let mut children: Vec<Uffd> = Vec::new();
        let mut changed = false;
        // The events of a busy program are read in turns with those of others.
        for _ in 0..4 {
            let Some(space) = state.spaces.get(&id) else { return };
            let Ok(count) = space.uffd.read(&mut messages) else { break };
            for message in &mut messages[..count] {
                match message.decode() {
                    Event::Fault { addr, wp, .. } => faults.push((addr.page_down(), wp)),
                    Event::Fork { uffd } => children.push(uffd),
                    // A mapping whose pages are dropped keeps its data: what is given up for good
                    // comes by a request.
                    Event::Remove(_) => {}
                    Event::Remap { .. } | Event::Unmap(_) => changed = true,
                    Event::Unknown(number) => {
                        (self.inner.log)(&format!("shared memory: event {number:#x} is not known"))
                    }
                }
            }
            if count < messages.len() {
                break;
            }
        }
        for uffd in children {
            let layout = state.spaces.get(&id).map_or(Vec::new(), |space| space.layout.clone());
            let unsure = changed || state.spaces.get(&id).is_some_and(|space| space.stale);
            self.inner.count(Counter::Forks, 1);
            match self.inner.add_space(state, uffd, None, layout) {
                Ok(child) => {
                    if let Some(space) = state.spaces.get_mut(&child) {
                        space.stale = unsure;
                    }
                }
                // It would not be served: its memory would read as zeros where pages are out.
                Err(errno) => swaptide_sys::thread::abort_with(&[
                    b"swaptide: a forked process with shared memory cannot be watched (",
                    format!("{}", swaptide_sys::ErrnoName(errno)).as_bytes(),
                    b"); stopped rather than given wrong data",
                ]),
            }
        }
        if changed {
            self.inner.learn(state, id);
        }
        for (addr, wp) in faults {
            self.answer(state, id, addr, wp);
        }
    }

    /// Answers one fault.
    fn answer(&mut self, state: &mut PagerState, id: SpaceId, addr: VirtAddr, wp: bool) {
        let Some(space) = state.spaces.get(&id) else { return };
        let place = match space.translate(addr) {
            Some(place) if !space.stale => Some(place),
            _ => {
                // After a change that was not told: a mapping that grew into what was its own
                // before.
                self.inner.learn(state, id);
                let Some(space) = state.spaces.get(&id) else { return };
                if space.stale && space.restored {
                    self.answer_unknown(state, id, addr, wp);
                    return;
                }
                if space.stale {
                    state.held.push((id, addr, wp));
                    return;
                }
                space.translate(addr)
            }
        };
        let at = VirtRange::from_len(addr, PAGE_SIZE);
        let Some((piece, page)) = place else {
            // It is no longer mapped, which a waiting thread finds out.
            wake(state, id, at);
            return;
        };
        let site = FaultSite { space: id, piece };
        let comes_in = |state: RegionPage| state == RegionPage::Absent || state.is_out();
        if state.regions.get(&piece.region).is_some_and(|region| comes_in(region.state(page)))
            && self.is_full(state)
        {
            state.waiting.push((id, addr, wp));
            return;
        }
        let Some(region) = state.regions.get_mut(&piece.region) else {
            wake(state, id, at);
            return;
        };
        match region.state(page) {
            RegionPage::Absent => self.grow(state, site, page),
            RegionPage::Zero | RegionPage::Pool | RegionPage::Area => {
                if !self.swap_in(state, site, page) {
                    state.waiting.push((id, addr, wp));
                    return;
                }
            }
            RegionPage::Leaving if wp => {
                // It is written to: it stays, and so does what is around it, for a while.
                region.set(page, RegionPage::Present);
                region.chunk(page / PAGES_PER_CHUNK).hot = true;
                self.inner.count(Counter::SwapCacheHit, 1);
            }
            // A program gave it up by itself.
            RegionPage::Present if !wp && is_hole(&region.memory, &(page..page + 1)) => {
                region.set(page, RegionPage::Absent);
                self.grow(state, site, page);
            }
            RegionPage::Present | RegionPage::Leaving => {}
            RegionPage::Lost => {
                if let Some(space) = state.spaces.get(&id) {
                    // A thread that touches it gets a signal.
                    let _ = space.uffd.poison(at);
                }
            }
        }
        // Whatever the protection was for is over, or the page was taken out of it just now.
        if wp && let Some(space) = state.spaces.get(&id) {
            let protected = state
                .regions
                .get(&piece.region)
                .is_some_and(|region| region.state(page) == RegionPage::Leaving);
            if !protected && space.uffd.write_protect(at, false) == Err(Errno::AGAIN) {
                state.held.push((id, addr, wp));
                return;
            }
        }
        wake(state, id, at);
    }

    /// Answers a fault in a space whose mappings are not known, and for which everything was
    /// brought back: what is missing was never touched, wherever it is, or is lost.
    fn answer_unknown(&self, state: &mut PagerState, id: SpaceId, addr: VirtAddr, wp: bool) {
        let counts = state.counts();
        if counts.out() > counts.lost {
            // Something could not be brought back for want of memory: it is tried again.
            self.inner.restore_space(state, id);
            let counts = state.counts();
            if counts.out() > counts.lost {
                state.held.push((id, addr, wp));
                return;
            }
        }
        let Some(space) = state.spaces.get(&id) else { return };
        let at = VirtRange::from_len(addr, PAGE_SIZE);
        if !wp && state.counts().lost > 0 {
            // It may be a page that is lost: never zeros.
            let _ = space.uffd.poison(at);
        } else {
            let _ = space.uffd.zero_pages(at, false);
            let _ = space.uffd.write_protect(at, false);
        }
        let _ = space.uffd.wake(at);
    }

    /// Pages that one fault may bring in.
    fn bound(&self) -> usize {
        let limit = self.inner.limit().unwrap_or(DEFAULT_WINDOW_LIMIT_BYTES);
        let bound = (limit / 64) as usize / PAGE_SIZE;
        // As for a process's own memory: with a file, page-cluster says how far is read ahead, of
        // compressed memory in front of it too.
        let bound = match self.inner.segment.header.swap_in.page_cluster_plus.load(Relaxed) {
            0 => bound,
            plus if self.inner.store.has_file() => {
                bound.min(1 << (plus - 1).min(u32::from(LAST_ORDER)))
            }
            _ => bound,
        };
        match self.inner.segment.header.swap_in.largest_order_plus.load(Relaxed) {
            0 => bound.clamp(1, MAX_PAGES_PER_FAULT),
            plus => bound.clamp(1, 1 << (plus - 1).min(u32::from(LAST_ORDER))),
        }
    }

    /// Pages that were not touched yet.
    fn grow(&self, state: &mut PagerState, site: FaultSite, page: usize) {
        let bound = self.bound();
        let Some(region) = state.regions.get_mut(&site.piece.region) else { return };
        let window = region.locality.growth_window(PageNo(page), bound);
        let end = (page + window).min(region.pages());
        let run = region
            .runs(page..end, |state| state == RegionPage::Absent)
            .first()
            .cloned()
            .unwrap_or(page..page + 1);
        let space = state.spaces.get(&site.space);
        if let (Some(space), Some(range)) = (space, site.piece.addresses(site.piece.region, &run)) {
            // What of it fails is made below.
            let _ = space.uffd.zero_pages(range, true);
        }
        // Makes what is missing and touches nothing that is there.
        let (at, len) = ((run.start * PAGE_SIZE) as u64, (run.len() * PAGE_SIZE) as u64);
        if !is_full(&region.memory, &run)
            && let Err(errno) =
                rustix::fs::fallocate(&region.memory, rustix::fs::FallocateFlags::empty(), at, len)
        {
            (self.inner.log)(&format!(
                "shared memory: no memory for a page: {}",
                swaptide_sys::ErrnoName(errno)
            ));
            return;
        }
        for page in run.clone() {
            region.set(page, RegionPage::Present);
        }
        region.locality.grew(PageNo(page), run.len());
        self.inner.count(Counter::Pgminfault, 1);
        for chunk in run.start / PAGES_PER_CHUNK..run.end.div_ceil(PAGES_PER_CHUNK) {
            state.enqueue(site.piece.region, chunk);
        }
    }

    /// A page that is out, and what is likely to be wanted with it. False when it could not be
    /// read, or put in, for want of something of this process's own.
    fn swap_in(&mut self, state: &mut PagerState, site: FaultSite, page: usize) -> bool {
        let bound = self.bound();
        let id = site.piece.region;
        let Some(region) = state.regions.get_mut(&id) else { return true };
        let reading = region.reading(page);
        let foretold = region.locality.swap_in(PageNo(0), PageNo(page), reading, bound);
        let wanted = match foretold {
            SwapIn::Page => page..page + 1,
            SwapIn::Chunk => region.chunk_pages(page / PAGES_PER_CHUNK),
            SwapIn::Onward(n) => page..page + n,
        };
        let wanted = wanted.start..wanted.end.min(region.pages());
        // Now and then one is left out, to see whether it is wanted.
        let chosen = match foretold {
            SwapIn::Onward(_) => region.locality.leave_out(PageNo(page), wanted.len()),
            _ => None,
        };
        let out = chosen.map(|out| out.0).filter(|out| region.state(*out).is_out());
        if let Some(out) = out {
            region.locality.left_out(PageNo(out));
        }
        let ahead = region
            .runs(wanted.clone(), RegionPage::is_out)
            .iter()
            .map(|run| run.len())
            .sum::<usize>();
        region.locality.record_swapped_in(ahead);
        let hits = region.locality.take_hits();
        self.inner.count(Counter::SwapRaHit, hits as u64);
        self.inner.count(Counter::SwapRa, ahead.saturating_sub(1) as u64);
        self.inner.count(Counter::Pgmajfault, 1);
        for run in without(region.runs(wanted.clone(), RegionPage::is_out), out) {
            self.count_orders(&run);
        }
        // First what was asked for, then waiting threads, then the rest.
        let first = wanted.start.max(page / FIRST_PAGES * FIRST_PAGES)
            ..wanted.end.min((page / FIRST_PAGES + 1) * FIRST_PAGES);
        let mut is_in = true;
        for run in without(region.runs(first.clone(), RegionPage::is_out), out) {
            is_in &= self.inner.fill(state, Some(site), id, run.clone(), &mut self.loader)
                || !run.contains(&page);
        }
        if !is_in || first == wanted {
            return is_in;
        }
        if let Some(range) = site.piece.addresses(id, &(page..page + 1)) {
            wake(state, site.space, range);
        }
        for rest in [wanted.start..first.start, first.end..wanted.end] {
            let runs = state
                .regions
                .get(&id)
                .map_or(Vec::new(), |region| region.runs(rest, RegionPage::is_out));
            for run in without(runs, out) {
                self.inner.fill(state, Some(site), id, run, &mut self.loader);
            }
        }
        true
    }

    /// Counts the aligned blocks of a window, each at the largest size it is part of.
    fn count_orders(&self, window: &Range<usize>) {
        let mut at = window.start;
        while at < window.end {
            let fits = |order: u8| at.is_multiple_of(1 << order) && at + (1 << order) <= window.end;
            let order = (0..=LAST_ORDER).rev().find(|order| fits(*order)).unwrap_or(0);
            if let Some(counter) = OfOrder::Swpin.counter(order) {
                self.inner.count(counter, 1);
            }
            at += 1 << order;
        }
    }
}

fn wake(state: &PagerState, id: SpaceId, at: VirtRange) {
    if let Some(space) = state.spaces.get(&id) {
        let _ = space.uffd.wake(at);
    }
}

/// Runs of pages without one page.
fn without(mut runs: Vec<Range<usize>>, out: Option<usize>) -> Vec<Range<usize>> {
    let Some(out) = out else { return runs };
    if let Some(at) = runs.iter().position(|run| run.contains(&out)) {
        let run = runs.remove(at);
        runs.splice(
            at..at,
            [run.start..out, out + 1..run.end].into_iter().filter(|part| !part.is_empty()),
        );
    }
    runs
}

/// True when no hole is in a range of pages.
fn is_full(memory: &std::fs::File, pages: &Range<usize>) -> bool {
    let (start, end) = ((pages.start * PAGE_SIZE) as u64, (pages.end * PAGE_SIZE) as u64);
    rustix::fs::seek(memory, rustix::fs::SeekFrom::Hole(start)).is_ok_and(|hole| hole >= end)
}
