//! What the program says of its memory, and what the run asks for: not answers to faults, and so
//! never at their cost.
//!
//! Owns: nothing; the ranges that were spoken of stand in the handler. Locks: the memory lock, for
//! a look or a group of pages at a time.

use std::sync::atomic::Ordering::{Relaxed, Release};

use swaptide_ipc::{Counter, OfOrder};
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};

use crate::engine::NO_RANGE;
use crate::event_loop::Handler;
use crate::fault::path::{COPY_GROUP_PAGES, LAST_PAGE, Stop};
use crate::mm::page_table::PageState;
use crate::mm::types::{PAGES_PER_CHUNK, PageNo, pages_of};
use crate::readahead::locality::Reading;
use crate::readahead::policy::SwappedIn;
use crate::reclaim::worker::Step;
use crate::requests::Hint;
use crate::vma::dontfork;

/// Groups that are brought in unasked between two looks for faults.
const PRELOAD_GROUPS: usize = 4;
/// Places among the orders for far pages that a group may take: one for each chunk and server. What
/// is left are those of the program's own faults, too.
const PRELOAD_SEATS: usize = 16;
const _: () = assert!(PRELOAD_SEATS >= 4 * COPY_GROUP_PAGES / PAGES_PER_CHUNK);

impl Handler {
    /// What the program said of how an address is read.
    pub(crate) fn reading(&self, addr: VirtAddr) -> Reading {
        self.hints
            .iter()
            .rev()
            .find(|(range, _)| range.contains(addr))
            .map_or(Reading::Unknown, |(_, reading)| *reading)
    }

    /// Acts on a hint.
    pub(crate) fn hint(&mut self, hint: Hint, range: VirtRange) {
        let engine = self.engine;
        match hint {
            Hint::Sequential => self.note(range, Reading::Sequential),
            Hint::Random => self.note(range, Reading::Random),
            Hint::Normal => self.note(range, Reading::Unknown),
            // Who is to be detached has everything brought back: one thread that continues sending
            // pages out would keep it from ending.
            Hint::Cold | Hint::PageOut if engine.slot().detach.load(Relaxed) != 0 => {}
            Hint::Cold | Hint::PageOut => {
                let mut guard = engine.mm.lock();
                let mm = &mut *guard;
                // The range may be far larger than what is there of it.
                let pages = pages_of(range);
                mm.grace.give_up(PageNo(pages.start), PageNo(pages.end));
                let (mut at, end) = (PageNo(pages.start), PageNo(pages.end));
                while let Some(page) = mm.table.next_used(at, end).filter(|page| *page < end) {
                    mm.queues.first_to_go(&mut mm.table, page.chunk());
                    at = page.chunk().first().plus(PAGES_PER_CHUNK);
                }
                drop(guard);
                if hint == Hint::PageOut {
                    let mut left = range.len() / PAGE_SIZE;
                    while left > 0 {
                        match self.worker.step(engine) {
                            Step::Took(pages) => left = left.saturating_sub(pages),
                            Step::Again => self.drain_events(),
                            Step::Nothing => break,
                        }
                    }
                }
            }
            Hint::Release => self.release(range),
            Hint::Mapped => self.adopt_mapping(range.start),
            Hint::WillNeed => {
                let budget = engine.charge.headroom().max(0) as usize / 2 / PAGE_SIZE;
                let pages = pages_of(range);
                let (mut at, end) = (
                    PageNo(pages.start),
                    PageNo(pages.end.min(pages.start.saturating_add(budget))),
                );
                loop {
                    let next = engine.mm.lock().table.next_used(at, end);
                    let Some(page) = next.filter(|page| *page < end) else { break };
                    let mut came = SwappedIn::new(page);
                    if self
                        .swap_in_span(page.chunk().first(), PAGES_PER_CHUNK, page, &mut came)
                        .is_err()
                    {
                        break;
                    }
                    came.blocks(|order, n| engine.count_order(OfOrder::Swpin, order, n));
                    at = page.chunk().first().plus(PAGES_PER_CHUNK);
                }
            }
        }
    }

    /// Brings in some of what is swapped, in the order of addresses. It is over when all is there;
    /// for now, when there is no room for more: nothing goes out for its sake. Far pages are sent
    /// for, many at a time, and land later: it is over when they have.
    pub(crate) fn preload_some(&mut self) {
        let engine = self.engine;
        for _ in 0..PRELOAD_GROUPS {
            let Some(at) = self.preload else { return };
            let room = engine.charge.headroom() - self.remote.bytes() as i64;
            if engine.slot().preload.load(Relaxed) == 0 || room < engine.charge.high() {
                self.preload = None;
                return;
            }
            if !self.remote.has_buffers(PRELOAD_SEATS) {
                return;
            }
            let next = engine.mm.lock().table.next_used(at, LAST_PAGE);
            let Some(page) = next else {
                self.preload = Some(LAST_PAGE);
                if !self.remote.is_empty() {
                    return;
                }
                self.preload = None;
                engine.slot().preload.store(0, Release);
                return;
            };
            let first = PageNo(page.0 / COPY_GROUP_PAGES * COPY_GROUP_PAGES);
            let mut came = SwappedIn::new(first);
            // What does not come now comes when it is wanted.
            self.remote.asks(Some(LAST_PAGE));
            let brought = self.swap_in_span(first, COPY_GROUP_PAGES, LAST_PAGE, &mut came);
            self.remote.asks(None);
            if brought.is_err() {
                self.preload = None;
                return;
            }
            engine.count(Counter::SwapRa, came.pages());
            came.blocks(|order, n| engine.count_order(OfOrder::Swpin, order, n));
            self.preload = Some(first.plus(COPY_GROUP_PAGES));
        }
    }

    /// True while there is nothing to do for it but to wait for what is under way.
    pub(crate) fn preload_waits(&self) -> bool {
        self.preload.is_some_and(|at| {
            !self.remote.is_empty() && (at == LAST_PAGE || !self.remote.has_buffers(PRELOAD_SEATS))
        })
    }

    /// Brings a range in and detaches it.
    pub(crate) fn release(&mut self, range: VirtRange) {
        let engine = self.engine;
        engine.mm.lock().held = range;
        let pages = pages_of(range);
        let end = PageNo(pages.end);
        let mut at = PageNo(pages.start);
        let mut tries = 0;
        // What a fork has copied is not to leave the table before the child has it.
        while self.child.is_none() {
            let next = engine.mm.lock().table.next_used(at, end);
            let Some(page) = next.filter(|p| *p < end) else { break };
            match self.swap_in_range(page, 1) {
                Err(Stop::Again) if tries < 1000 => {
                    tries += 1;
                    self.drain_events();
                }
                _ => at = page.plus(1),
            }
        }
        let mut mm = engine.mm.lock();
        mm.held = NO_RANGE;
        if self.child.is_some() {
            engine.bells.refused.store(true, Release);
            return;
        }
        let mut at = PageNo(pages.start);
        while let Some(page) = mm.table.next_used(at, end).filter(|page| *page < end) {
            if matches!(mm.table.get(page), PageState::Swapped(_)) {
                engine.bells.refused.store(true, Release);
                (engine.start.log)("a range could not be swapped in completely and stays managed");
                return;
            }
            at = page.plus(1);
        }
        // What is not armed needs no disarming; a part that is unmapped makes the call fail after
        // its neighbours were done.
        let _ = self.uffd.unregister(range);
        if engine.followed {
            dontfork::restore(&mm, range);
        }
        crate::vma::events::drop_pages(&mut mm, engine, range);
        mm.regions.remove(range);
        mm.armed.remove(range);
        engine.publish_usage(&mm);
    }

    fn note(&mut self, range: VirtRange, reading: Reading) {
        self.hints.retain(|(r, _)| !(range.start <= r.start && r.end <= range.end));
        if reading != Reading::Unknown && self.hints.len() < 256 {
            self.hints.push((range, reading));
        }
    }
}
