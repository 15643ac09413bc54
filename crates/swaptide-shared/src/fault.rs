//! Answers to faults and events.
//!
//! Owns the thread that reads every userfaultfd; the reclaim thread does so, too, where events are
//! in its way. They read with the state's lock held and apply what they read under the same hold,
//! so no thread sees the one without the other: a forked child runs from the moment its event is
//! read, and is known by then.
//!
//! What a fault brings in is decided here, and becomes loads (`loading`). The reader does one by
//! itself that a fault waits for, if it needs no disk; for others, and for what comes along with a
//! page, it wakes servers ([`serve`]), one for each load that needs a disk, and some for those that
//! do not. With few CPUs it does all that need no disk, and with one CPU all loads. How pages come
//! in is `swap_in`'s.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use swaptide_engine::mm::types::{PAGES_PER_CHUNK, PageNo};
use swaptide_engine::readahead::locality::SwapIn;
use swaptide_ipc::{Counter, LAST_ORDER, OfOrder};
use swaptide_sys::Errno;
use swaptide_sys::page::{PAGE_SIZE, VirtRange};
use swaptide_sys::uffd::{Event, Message, Uffd};

use crate::loading::{Load, LoadJob, PendingFault};
use crate::region::RegionPage;
use crate::space::{FaultSite, Space, SpaceId, SpaceState};
use crate::state::{GUARD_TIMEOUT, Inner, PagerState, ROOM_TOKEN, STOP_FAULTS, is_hole, margin};
use crate::swap_in::{MAX_PAGES_PER_FAULT, PAGES_PER_LOAD, PageLoader};

/// After so long faults are looked at again that wait for something that no event tells of.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// The same where nothing is known to wait.
const QUIET_INTERVAL: Duration = Duration::from_millis(100);
/// One of this many servers is woken for loads that need no disk: these are over in microseconds,
/// and on a few CPUs the threads that fault have more use for them.
const SERVERS_PER_HELPER: usize = 2;
/// Times that events in the way of reclaim are read, one after the other.
const MAX_SETTLING_READS: usize = 8;
/// Without a limit, what one fault may bring in is bounded as under this one.
const DEFAULT_WINDOW_LIMIT_BYTES: u64 = 128 << 20;

/// A thread that answers: the reader, a server, or the reclaim thread.
pub(crate) struct FaultThread {
    inner: Arc<Inner>,
    loader: PageLoader,
}

/// Runs the reader. `servers` is the number of threads that [`serve`].
pub(crate) fn run(inner: Arc<Inner>, servers: usize) {
    // A fault is a thread that waits.
    swaptide_sys::affinity::go_first();
    let mut thread = FaultThread::new(inner.clone());
    let mut events =
        [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
            64];
    let helpers = servers / SERVERS_PER_HELPER;
    // There is more to bring in, and no need to wait for an event.
    let mut comes_in = false;
    let mut retried = Instant::now();
    while inner.stop.load(Relaxed) & STOP_FAULTS == 0 {
        let looks_again = {
            let state = inner.lock();
            let looks = |space: &Space| space.guard.is_none() || space.needs_restore();
            let is_later = !state.faults.later.is_empty() || state.forgets_later;
            is_later || state.spaces.values().any(looks)
        };
        let timeout = match looks_again {
            _ if comes_in => Duration::ZERO,
            true => RETRY_INTERVAL,
            false => QUIET_INTERVAL,
        };
        let tv_nsec = i64::from(timeout.subsec_nanos());
        let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec };
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
        for fault in std::mem::take(&mut state.faults.room) {
            thread.answer(&mut state, fault);
        }
        let is_due = looks_again && retried.elapsed() >= RETRY_INTERVAL;
        if ready == 0 && !comes_in || is_due {
            retried = Instant::now();
            thread.check_unguarded(&mut state);
        }
        thread.swap_in_some(&mut state);
        if !state.faults.room.is_empty() || !state.advised.into.is_empty() {
            inner.work.notify_all();
        }
        let job = match servers {
            0 => state.loads.take(),
            _ => state.loads.take_short(helpers == 0),
        };
        let disks = state.loads.disks();
        let short = state.loads.waiting() - disks;
        for _ in 0..(disks + short.min(helpers)).min(servers) {
            inner.loads_wait.notify_one();
        }
        if let Some(job) = job {
            drop(state);
            state = thread.load(job);
        }
        comes_in = match servers {
            0 => state.loads.waiting() > 0,
            _ => state.loads.has_short(helpers == 0),
        };
    }
}

/// Runs a server, which does loads.
pub(crate) fn serve(inner: Arc<Inner>) {
    swaptide_sys::affinity::go_first();
    let mut thread = FaultThread::new(inner.clone());
    let mut state = inner.lock();
    while inner.stop.load(Relaxed) & STOP_FAULTS == 0 {
        state = match state.loads.take() {
            Some(job) => {
                drop(state);
                thread.load(job)
            }
            None => inner.wait_for_loads(state),
        };
    }
}

impl FaultThread {
    /// With its buffers.
    pub(crate) fn new(inner: Arc<Inner>) -> FaultThread {
        FaultThread { inner, loader: PageLoader::new() }
    }

    /// In the reclaim thread: applies what an address space tells whose events are unread, if
    /// `concerns` is true of it. False if one is still changing.
    pub(crate) fn settle(
        &mut self,
        state: &mut PagerState,
        concerns: impl Fn(&Space) -> bool,
    ) -> bool {
        let mut has_read = false;
        let mut is_settled = true;
        let is_changing =
            |space: &Space| concerns(space) && space.standing() == SpaceState::Changing;
        for _ in 0..MAX_SETTLING_READS {
            let changing = state.spaces.iter().filter(|(_, space)| is_changing(space));
            let changing: Vec<SpaceId> = changing.map(|(id, _)| *id).collect();
            is_settled = changing.is_empty();
            if is_settled {
                break;
            }
            has_read = true;
            changing.into_iter().for_each(|id| self.read_events(state, id));
            // A thread whose event was read has to run before the change is over.
            std::thread::yield_now();
        }
        if has_read {
            // Loads that faults among them wait for are the reader's to begin.
            self.inner.tell_room();
        }
        is_settled
    }

    /// True when nothing may come in before something goes out.
    fn is_full(&self, state: &PagerState) -> bool {
        !self.has_room(state, PAGES_PER_LOAD) && !state.is_stuck()
    }

    /// True when `pages` pages may come in within the limit, with those that are on their way.
    fn has_room(&self, state: &PagerState, pages: usize) -> bool {
        let Some(limit) = self.inner.limit().filter(|_| state.engaged) else { return true };
        let pages = pages + state.counts().resident + state.loads.pages();
        (pages * PAGE_SIZE) as u64 + self.inner.own_bytes_before() <= limit
    }

    /// Does a load, without the lock but for its end, and answers the faults that wait for it.
    fn load(&mut self, job: LoadJob) -> MutexGuard<'_, PagerState> {
        let unloaded = self.loader.load(&self.inner.store, &job.load);
        let mut state = self.inner.lock();
        let asked = job.fault.map(|(page, _)| page);
        let place = (job.site, asked);
        let is_in = self.inner.put_in(&mut state, place, &job.load, &unloaded, &self.loader);
        for (page, fault) in state.loads.ended(&job) {
            let region = state.regions.get(&job.load.region).filter(|r| job.load.is_of(r));
            let fault = PendingFault { again: true, ..fault };
            match region.map(|region| region.state(page)) {
                Some(RegionPage::Present) if !fault.wp => {
                    wake(&state, fault.space, VirtRange::from_len(fault.addr, PAGE_SIZE));
                }
                // It could not be read, or put in, for want of something of this process's own.
                Some(place) if place.is_out() && !is_in => state.faults.later.push(fault),
                _ => self.answer(&mut state, fault),
            }
        }
        if !state.faults.room.is_empty() {
            self.inner.work.notify_all();
        }
        // The reader may sleep until an event comes.
        let has_room = self.has_room(&state, PAGES_PER_LOAD);
        let has_wishes = !state.advised.into.is_empty() || !state.faults.room.is_empty();
        if !state.faults.later.is_empty() || has_wishes && has_room {
            self.inner.tell_room();
        }
        state
    }

    /// Begins a load of what programs want in by advice, if there is room and nothing else to load.
    fn swap_in_some(&self, state: &mut PagerState) {
        while state.loads.waiting() == 0
            && let Some((id, pages)) = state.advised.into.front().cloned()
        {
            let (region, loads) = (state.regions.get(&id), &state.loads);
            let out = |page: &usize| {
                region.is_some_and(|region| region.state(*page).is_out()) && !loads.has(id, *page)
            };
            let (Some(start), Some(region)) = (pages.clone().find(out), region) else {
                state.advised.into.pop_front();
                continue;
            };
            // What reclaim keeps free has room for this much.
            let most = self.inner.limit().map_or(PAGES_PER_LOAD, |limit| {
                (margin(limit) as usize / PAGE_SIZE).clamp(1, PAGES_PER_LOAD)
            });
            if !self.has_room(state, most) {
                if state.is_stuck() {
                    // None will be made for it. It was a wish, and no more.
                    state.advised.into.clear();
                }
                return;
            }
            let len = (start..pages.end.min(start + most)).take_while(out).count();
            let load = Load::of(region, start..start + len);
            if let Some((_, left)) = state.advised.into.front_mut() {
                // What cannot be brought in now comes when it is touched.
                left.start = start + len;
            }
            state.loads.add(LoadJob { load, site: None, fault: None });
        }
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
        for fault in std::mem::take(&mut state.faults.later) {
            self.answer(state, fault);
        }
    }

    /// Reads what an address space tells, and answers.
    fn read_events(&mut self, state: &mut PagerState, id: SpaceId) {
        let mut messages = Message::buffer::<32>();
        let mut faults: Vec<PendingFault> = Vec::new();
        let mut children: Vec<Uffd> = Vec::new();
        let mut changed = false;
        // The events of a busy program are read in turns with those of others.
        for _ in 0..4 {
            let Some(space) = state.spaces.get(&id) else { return };
            let Ok(count) = space.uffd.read(&mut messages) else { break };
            for message in &mut messages[..count] {
                match message.decode() {
                    Event::Fault { addr, wp, .. } => {
                        let addr = addr.page_down();
                        faults.push(PendingFault { space: id, addr, wp, again: false })
                    }
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
            let is_unsure = |space: &Space| space.stale || space.is_ahead;
            let unsure = changed || state.spaces.get(&id).is_some_and(is_unsure);
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
        if let Some(space) = state.spaces.get_mut(&id)
            && space.is_ahead
            && space.standing() == SpaceState::Quiet
        {
            space.is_ahead = false;
        }
        if changed {
            self.inner.learn(state, id);
        }
        for fault in faults {
            self.answer(state, fault);
        }
    }

    /// Answers one fault, begins its load, or has it wait.
    fn answer(&self, state: &mut PagerState, fault: PendingFault) {
        let PendingFault { space: id, addr, wp, .. } = fault;
        let Some(space) = state.spaces.get(&id) else { return };
        let place = match space.translate(addr) {
            Some(place) if !space.stale => Some(place),
            _ => {
                // After a change that was not told: a mapping that grew into what was its own
                // before.
                self.inner.learn(state, id);
                let Some(space) = state.spaces.get(&id) else { return };
                if space.stale && space.restored {
                    self.answer_unknown(state, fault);
                    return;
                }
                if space.stale {
                    state.faults.later.push(fault);
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
        let place = state.regions.get(&piece.region).map(|region| region.state(page));
        let is_out = place.is_some_and(RegionPage::is_out);
        if is_out && state.loads.has(piece.region, page) {
            state.loads.park(piece.region, page, fault);
            return;
        }
        if (is_out || place == Some(RegionPage::Absent)) && self.is_full(state) {
            state.faults.room.push(fault);
            return;
        }
        let Some(region) = state.regions.get_mut(&piece.region) else {
            wake(state, id, at);
            return;
        };
        match region.state(page) {
            RegionPage::Absent => self.grow(state, site, page),
            RegionPage::Zero | RegionPage::Pool | RegionPage::Area => {
                self.swap_in(state, site, page, fault);
                return;
            }
            RegionPage::Leaving if wp => {
                // It is written to: it stays, for a while.
                region.keep(page);
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
                state.faults.later.push(fault);
                return;
            }
        }
        wake(state, id, at);
    }

    /// Answers a fault in a space whose mappings are not known, and for which everything was
    /// brought back: what is missing was never touched, wherever it is, or is lost.
    fn answer_unknown(&self, state: &mut PagerState, fault: PendingFault) {
        let PendingFault { space: id, addr, wp, .. } = fault;
        let counts = state.counts();
        if counts.out() > counts.lost {
            // Something could not be brought back for want of memory: it is tried again.
            self.inner.restore_space(state, id);
            let counts = state.counts();
            if counts.out() > counts.lost {
                state.faults.later.push(fault);
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
        let bound = match self.inner.segment.header.swap_in.page_cluster.get() {
            Some(order) if self.inner.store.has_file() => {
                bound.min(1 << order.min(u32::from(LAST_ORDER)))
            }
            _ => bound,
        };
        match self.inner.segment.header.swap_in.largest_order.get() {
            None => bound.clamp(1, MAX_PAGES_PER_FAULT),
            Some(order) => bound.clamp(1, 1 << order.min(u32::from(LAST_ORDER))),
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

    /// A page that is out, and what is likely to be wanted with it: loads begin.
    fn swap_in(&self, state: &mut PagerState, site: FaultSite, page: usize, fault: PendingFault) {
        let bound = self.bound();
        let id = site.piece.region;
        let coming = state.loads.of(id);
        let Some(region) = state.regions.get_mut(&id) else { return };
        if fault.again {
            let load = Load::of(region, page..page + 1);
            state.loads.add(LoadJob { load, site: Some(site), fault: Some((page, fault)) });
            return;
        }
        let reading = region.reading(page);
        let foretold = region.locality.swap_in(PageNo(0), PageNo(page), reading, bound);
        let wanted = match foretold {
            SwapIn::Page => page..page + 1,
            SwapIn::Chunk => region.chunk_pages(page / PAGES_PER_CHUNK),
            SwapIn::Onward(n) => page..page + n,
        };
        let wanted = wanted.start..wanted.end.min(region.pages());
        let is_coming = |page: usize| coming.iter().any(|coming| coming.contains(&page));
        // Now and then one is left out, to see whether it is wanted.
        let chosen = match foretold {
            SwapIn::Onward(_) => region.locality.leave_out(PageNo(page), wanted.len()),
            _ => None,
        };
        let out = chosen.map(|out| out.0);
        let out = out.filter(|out| region.state(*out).is_out() && !is_coming(*out));
        if let Some(out) = out {
            region.locality.left_out(PageNo(out));
        }
        let comes = |page: &usize| Some(*page) != out && !is_coming(*page);
        let all = Load::of(region, wanted.clone().filter(comes));
        region.locality.record_swapped_in(all.len() + usize::from(out.is_some()));
        let hits = region.locality.take_hits();
        self.inner.count(Counter::SwapRaHit, hits as u64);
        self.inner.count(Counter::SwapRa, all.len().saturating_sub(1) as u64);
        self.inner.count(Counter::Pgmajfault, 1);
        for (_, run) in all.runs(|_| true) {
            self.count_orders(&run);
        }
        // First what was asked for, then the rest.
        let first = page / PAGES_PER_LOAD * PAGES_PER_LOAD;
        let around = |start: usize| wanted.start.max(start)..wanted.end.min(start + PAGES_PER_LOAD);
        let rest = (wanted.start / PAGES_PER_LOAD..wanted.end.div_ceil(PAGES_PER_LOAD))
            .map(|block| block * PAGES_PER_LOAD)
            .filter(|start| *start != first);
        for start in [first].into_iter().chain(rest) {
            let load = Load::of(region, around(start).filter(comes));
            if load.len() > 0 {
                let fault = (start == first).then_some((page, fault));
                state.loads.add(LoadJob { load, site: Some(site), fault });
            }
        }
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

/// True when no hole is in a range of pages.
fn is_full(memory: &std::fs::File, pages: &Range<usize>) -> bool {
    let (start, end) = ((pages.start * PAGE_SIZE) as u64, (pages.end * PAGE_SIZE) as u64);
    rustix::fs::seek(memory, rustix::fs::SeekFrom::Hole(start)).is_ok_and(|hole| hole >= end)
}
