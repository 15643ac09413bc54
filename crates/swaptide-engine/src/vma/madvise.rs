//! Work that no fault asks for: the program's advice about its memory, and what the run asks for.
//! It never delays a fault.
//!
//! Owns: how far bringing everything in has come ([`Preload`]). Locks: the memory lock, for a check
//! or a group of pages at a time.

use std::sync::atomic::Ordering::{Relaxed, Release};

use swaptide_ipc::{Counter, OfOrder};
use swaptide_sys::page::{PAGE_SIZE, VirtRange};

use crate::engine::NO_RANGE;
use crate::events::apply::drop_pages;
use crate::events::reader::Interrupted;
use crate::fault::install::Stop;
use crate::fault::path::FaultPath;
use crate::fault::swap_in::COPY_GROUP_PAGES;
use crate::mm::dontfork;
use crate::mm::page_table::PageState;
use crate::mm::types::{LAST_PAGE, PAGES_PER_CHUNK, PageNo, pages_of};
use crate::readahead::locality::Reading;
use crate::readahead::policy::SwappedIn;
use crate::reclaim::worker::Step;
use crate::requests::Hint;
use crate::vma::adopt::Adopter;

/// Groups that are brought in unasked between two checks for faults.
const PRELOAD_GROUPS: usize = 4;
/// Buffers for remote pages that a group may take: one for each chunk and server. What is left is
/// for the program's own faults, too.
const PRELOAD_BUFFERS: usize = 16;
const _: () = assert!(PRELOAD_BUFFERS >= 4 * COPY_GROUP_PAGES / PAGES_PER_CHUNK);
/// Tries to bring one page in of a range that is to be released, while events are unread.
const MAX_RELEASE_TRIES: u32 = 1000;

/// Acts on a hint.
///
/// # Errors
/// [`Interrupted`] when a fork through no hook was read: a hint that must be done is not done yet.
pub(crate) fn hint(
    path: &mut FaultPath,
    adopter: &mut Adopter,
    hint: Hint,
    range: VirtRange,
) -> Result<(), Interrupted> {
    let is_detaching = path.engine.slot().control.detach.load(Relaxed) != 0;
    match hint {
        Hint::Sequential => note_reading(path, range, Reading::Sequential),
        Hint::Random => note_reading(path, range, Reading::Random),
        Hint::Normal => note_reading(path, range, Reading::Unknown),
        // A program that is to be let go has everything brought back: one thread that continues
        // sending pages out would keep it from ending.
        Hint::Cold | Hint::PageOut if is_detaching => {}
        Hint::Cold => mark_cold(path, range),
        Hint::PageOut => {
            mark_cold(path, range);
            page_out(path, range);
        }
        Hint::Release => return release(path, range),
        Hint::Mapped => return adopter.adopt_mapping(path, range.start, true),
        Hint::WillNeed => will_need(path, range),
    }
    Ok(())
}

fn note_reading(path: &FaultPath, range: VirtRange, reading: Reading) {
    path.engine.serving.readahead.lock().hints.note(range, reading);
}

/// Marks the resident pages of a range as the next to go out.
fn mark_cold(path: &FaultPath, range: VirtRange) {
    let mut guard = path.engine.mm.lock();
    let mm = &mut *guard;
    let pages = pages_of(range);
    let (mut at, end) = (PageNo(pages.start), PageNo(pages.end));
    mm.fault_hold.give_up(at, end);
    // The range may be far larger than what is there of it.
    while let Some(page) = mm.table.next_used(at, end).filter(|page| *page < end) {
        mm.queues.first_to_go(&mut mm.table, page.chunk());
        at = page.chunk().first().plus(PAGES_PER_CHUNK);
    }
}

/// Takes out as many pages as a range has.
fn page_out(path: &mut FaultPath, range: VirtRange) {
    let mut left = range.len() / PAGE_SIZE;
    while left > 0 {
        match path.worker.step(path.engine) {
            Step::Took(pages) => left = left.saturating_sub(pages),
            // It is a hint: what is left stays.
            Step::Again if path.reader.drain().is_err() => return,
            Step::Again => {}
            Step::Nothing => return,
        }
    }
}

/// Brings a range in, as far as there is room for it.
fn will_need(path: &mut FaultPath, range: VirtRange) {
    let engine = path.engine;
    let budget = engine.charge.headroom().max(0) as usize / 2 / PAGE_SIZE;
    let pages = pages_of(range);
    let (mut at, end) =
        (PageNo(pages.start), PageNo(pages.end.min(pages.start.saturating_add(budget))));
    loop {
        let next = engine.mm.lock().table.next_used(at, end);
        let Some(page) = next.filter(|page| *page < end) else { return };
        let mut swapped_in = SwappedIn::new(page);
        if path.swap_in_span(page.chunk().first(), PAGES_PER_CHUNK, page, &mut swapped_in).is_err()
        {
            return;
        }
        swapped_in.blocks(|order, n| engine.count_order(OfOrder::Swpin, order, n));
        at = page.chunk().first().plus(PAGES_PER_CHUNK);
    }
}

/// Brings a range in and lets it go. Where some of it cannot be brought in it stays managed, and
/// [`crate::requests::HandlerRequests`] says so to the thread that asked.
///
/// # Errors
/// [`Interrupted`] when a fork through no hook was read: it is to be called again.
pub(crate) fn release(path: &mut FaultPath, range: VirtRange) -> Result<(), Interrupted> {
    let engine = path.engine;
    engine.mm.lock().held = range;
    let brought = swap_in_all(path, range);
    let mut mm = engine.mm.lock();
    mm.held = NO_RANGE;
    brought?;
    if path.reader.fork.child.is_some() {
        engine.handler_requests.refused.store(true, Release);
        return Ok(());
    }
    let pages = pages_of(range);
    let (mut at, end) = (PageNo(pages.start), PageNo(pages.end));
    while let Some(page) = mm.table.next_used(at, end).filter(|page| *page < end) {
        if matches!(mm.table.get(page), PageState::Swapped(_)) {
            engine.handler_requests.refused.store(true, Release);
            (engine.start.log)("a range could not be swapped in completely and stays managed");
            return Ok(());
        }
        at = page.plus(1);
    }
    // What is not armed needs no disarming; a part that is unmapped makes the call fail after its
    // neighbours were done.
    let _ = path.reader.uffd.unregister(range);
    if engine.fork.followed {
        dontfork::restore(mm.dontfork_ranges(), range);
    }
    drop_pages(&mut mm, engine, range);
    mm.regions.remove(range);
    mm.armed.remove(range);
    mm.changes.left.remove(range);
    engine.publish_usage(&mm);
    Ok(())
}

/// Brings in what of a range is swapped, as far as it can be had.
fn swap_in_all(path: &mut FaultPath, range: VirtRange) -> Result<(), Interrupted> {
    let pages = pages_of(range);
    let (mut at, end) = (PageNo(pages.start), PageNo(pages.end));
    let mut tries = 0;
    // What a fork has copied is not to leave the table before the child has it.
    while path.reader.fork.child.is_none() {
        let next = path.engine.mm.lock().table.next_used(at, end);
        let Some(page) = next.filter(|p| *p < end) else { break };
        // A thread waits for all of it.
        path.installer.brings_all = true;
        let brought = path.swap_in_range(page, 1);
        path.installer.brings_all = false;
        match brought {
            Err(Stop::Again) if tries < MAX_RELEASE_TRIES => {
                tries += 1;
                path.reader.drain()?;
            }
            _ => at = page.plus(1),
        }
    }
    Ok(())
}

/// Bringing everything in, unasked by any fault.
#[derive(Default)]
pub(crate) struct Preload {
    /// The page at which it continues; `None`: it is not wanted.
    at: Option<PageNo>,
}

impl Preload {
    /// From now on everything is wanted in memory; continues where it was.
    pub(crate) fn begin(&mut self) {
        self.at = self.at.or(Some(PageNo(0)));
    }

    /// True while it has something to do, rather than to wait for what is under way.
    pub(crate) fn is_due(&self, path: &FaultPath) -> bool {
        self.at.is_some_and(|at| {
            path.remote.is_empty() || at != LAST_PAGE && path.remote.has_buffers(PRELOAD_BUFFERS)
        })
    }

    /// Brings in some of what is swapped, in the order of addresses. It is over when all is there;
    /// for now, when there is no room for more: nothing goes out for its sake. Remote pages are
    /// sent for, many at a time, and land later: it is over when they have.
    pub(crate) fn step(&mut self, path: &mut FaultPath) {
        let engine = path.engine;
        for _ in 0..PRELOAD_GROUPS {
            let Some(at) = self.at else { return };
            let room = engine.charge.headroom() - path.remote.bytes() as i64;
            if engine.slot().control.preload.load(Relaxed) == 0 || room < engine.charge.high() {
                self.at = None;
                return;
            }
            if !path.remote.has_buffers(PRELOAD_BUFFERS) {
                return;
            }
            let next = engine.mm.lock().table.next_used(at, LAST_PAGE);
            let Some(page) = next else {
                self.at = Some(LAST_PAGE);
                if !path.remote.is_empty() {
                    return;
                }
                self.at = None;
                engine.slot().control.preload.store(0, Release);
                return;
            };
            let first = PageNo(page.0 / COPY_GROUP_PAGES * COPY_GROUP_PAGES);
            let mut swapped_in = SwappedIn::new(first);
            // What does not come now comes when it is wanted.
            path.remote.asks(Some(LAST_PAGE));
            let brought = path.swap_in_span(first, COPY_GROUP_PAGES, LAST_PAGE, &mut swapped_in);
            path.remote.asks(None);
            // What cannot be read is left to the thread that asks for it.
            if brought.is_err_and(|stop| stop != Stop::Unreadable) {
                self.at = None;
                return;
            }
            engine.count(Counter::SwapRa, swapped_in.pages());
            swapped_in.blocks(|order, n| engine.count_order(OfOrder::Swpin, order, n));
            self.at = Some(first.plus(COPY_GROUP_PAGES));
        }
    }
}
