//! The fault path: from a page the program waits for to the page in its place.
//!
//! [`FaultPath::serve`] looks at the page's word. Empty: growth, with as many zeroed pages as the
//! stream of first touches bears. Swapped: [`crate::fault::swap_in`].
//!
//! Owns: the parts that serve faults, and the way to make room of one thread that does: the
//! handler, or a fault server ([`crate::fault_server`]).
//!
//! Rules
//! 1. Room is made before a page is filled: when the workers have not kept up, the handler reclaims
//!    itself, and the waiting thread pays ([`crate::fault::direct_reclaim`]).
//! 2. Growth copies the page asked for alone, or moves four and more: two or three are not worth a
//!    move.
//! 3. Fills never wake. The answer to the fault wakes last; of a window its thread is woken as soon
//!    as the first chunk is in ([`crate::fault::swap_in`]).
//! 4. When a fork through no hook is read meanwhile, the fault ends with [`Served::Again`]: nothing
//!    was put in place, or all that belongs together.
//!
//! Locks: the memory lock, for a check or a fill, and the gate before it
//! ([`crate::fault::placing`]).

use std::sync::atomic::Ordering::Relaxed;

use swaptide_ipc::Counter;
use swaptide_sys::Errno;
use swaptide_sys::lock::Guard;
use swaptide_sys::mem::Mapping;
use swaptide_sys::page::{PAGE_SIZE, VirtRange};
use swaptide_sys::thread::Nanos;

use crate::EngineError;
use crate::engine::{Engine, Mm};
use crate::events::reader::UffdReader;
use crate::fault::direct_reclaim::{self, MAX_PUT_OFF};
use crate::fault::install::{Installer, MIN_MOVE_PAGES, Stop};
use crate::fault::load::Loader;
use crate::fault::loading::Loading;
use crate::fault::placing::Placing;
use crate::fault::remote::InFlight;
use crate::fault_injection::HandlerFaults;
use crate::memcg::psi::Stall;
use crate::memcg::swap_high::Throttle;
use crate::mm::page_table::PageState;
use crate::mm::types::{FillerNo, PageNo, pages_of, range_of};
use crate::reclaim::worker::Worker;
use crate::sched::handed::Fault;

/// Bytes of the buffer for pages that are copied in.
pub(crate) const COPY_BYTES: usize = 256 << 10;

/// The result of serving a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Served {
    /// The page is there.
    Filled,
    /// It was there already, or its mapping is gone.
    Spurious,
    /// Events are unread: read them and try again.
    Again,
    /// The address is not managed.
    Unmanaged,
    /// The page was sent for: its thread is woken when it lands.
    InFlight,
    /// Another thread brings the page in, and wakes who waits for it.
    Taken,
    /// It is to be sent for when a buffer is free.
    NoBuffer,
}

/// Fills pages for faults; its parts are those that one fault needs.
pub(crate) struct FaultPath {
    pub(crate) engine: &'static Engine,
    pub(crate) reader: UffdReader,
    /// The number of times that the present request was put off.
    pub(crate) tries: u32,
    pub(crate) installer: Installer,
    pub(crate) loader: Loader,
    /// The load under way.
    pub(super) loading: Loading,
    filler: FillerNo,
    /// Pages that were sent for.
    pub(crate) remote: InFlight,
    /// The worker state with which the handler itself reclaims.
    pub(crate) worker: Worker,
    pub(crate) stall: Stall,
    /// Threads that wait because they grew past `swap.high`.
    pub(crate) throttle: Throttle,
    /// A page that is left out of the window that is being brought in.
    pub(super) leaves_out: Option<PageNo>,
    /// Pages are loaded here before they are copied in.
    pub(crate) copy: Mapping,
    pub(crate) tests: HandlerFaults,
}

impl FaultPath {
    /// The parts of an engine's handler that serve faults.
    ///
    /// # Errors
    /// When memory or a file of /proc is refused.
    pub(crate) fn new(engine: &'static Engine) -> Result<FaultPath, EngineError> {
        FaultPath::with(engine, UffdReader::new(engine)?, FillerNo(0))
    }

    /// The same of a fault server.
    ///
    /// # Errors
    /// As for [`FaultPath::new`].
    pub(crate) fn of_server(
        engine: &'static Engine,
        filler: FillerNo,
    ) -> Result<FaultPath, EngineError> {
        FaultPath::with(engine, UffdReader::of_server(engine), filler)
    }

    fn with(
        engine: &'static Engine,
        reader: UffdReader,
        filler: FillerNo,
    ) -> Result<FaultPath, EngineError> {
        Ok(FaultPath {
            engine,
            installer: Installer::new(engine, reader.is_server)?,
            reader,
            tries: 0,
            loader: Loader::new(engine),
            loading: Loading::new(filler),
            filler,
            remote: InFlight::new(),
            worker: Worker::new(engine.devices.scheme),
            stall: Stall::new(&engine.serving.stalls),
            throttle: Throttle::new(),
            leaves_out: None,
            copy: Mapping::reserve(COPY_BYTES)
                .map_err(|e| EngineError::Memory("the copy buffer", e))?,
            tests: HandlerFaults::new(engine.injection()),
        })
    }

    /// Makes room for `n` pages.
    ///
    /// # Errors
    /// [`Stop::Again`] when events must be read first.
    pub(crate) fn make_room(&mut self, n: usize) -> Result<(), Stop> {
        let FaultPath { reader, worker, stall, tries, .. } = self;
        direct_reclaim::make_room(reader, worker, stall, n, *tries)
    }

    /// From here on pages are put in place: without the memory lock, where servers are there and
    /// the handler does not work alone. The memory lock must be free.
    pub(super) fn begin_placing(&self) -> Placing {
        if self.reader.is_alone() {
            Placing::locked(self.engine)
        } else {
            Placing::inside(self.engine, self.filler)
        }
    }

    /// True while something is sent for that a thread waits for, or a thread is held.
    fn is_awaited(&self) -> bool {
        self.remote.is_awaited() || self.throttle.holds()
    }

    /// The thread that was answered stalls no more from `at` on.
    pub(crate) fn stalls_until(&mut self, at: Nanos) {
        let is_awaited = self.is_awaited();
        self.stall.stalls_until(self.engine.slot(), at, is_awaited);
    }

    /// A fault server is to stop: its buffers have no memory then.
    pub(crate) fn give_buffers_up(&mut self) {
        self.installer.discard_fresh();
        let _ = self.copy.discard(0, self.copy.len());
        self.loader.ahead.clear();
    }

    /// Wakes the threads whose delay for `swap.high` is over.
    pub(crate) fn wake_held(&mut self) {
        self.throttle.wake_held(self.engine.slot(), self.reader.uffd);
    }

    /// Serves the page of a fault that is looked at since `at`.
    pub(crate) fn serve(&mut self, page: PageNo, fault: Fault, at: Nanos) -> Served {
        // A worker faults pages in order to take them out.
        let is_of_program = !self.reader.is_of_worker(fault);
        self.tries = fault.tries;
        // What is looked at later comes from memory meanwhile.
        self.engine.serving.readahead.lock().prefetcher.prefetch_index(page);
        let (state, region) = {
            let mut mm = self.engine.mm.lock();
            if self.reader.is_server && self.installer.may_fill(&mm).is_err() {
                // Nothing is asked of what faults foretell before the handler asks it.
                return Served::Again;
            }
            if is_of_program {
                mm.fault_hold.note(fault.tid, page, at);
            }
            if let Some(other) = mm.busy.filler_of(page) {
                mm.busy.want(other, page);
                return Served::Taken;
            }
            (mm.table.get(page), mm.regions.find(page.addr()))
        };
        let Some(region) = region else { return Served::Unmanaged };
        let result = match state {
            PageState::Present | PageState::PresentClean(_) => return self.is_already_mapped(page),
            PageState::Poisoned => return self.poison_again(page),
            PageState::Empty => self.demand_zero(page, region),
            PageState::Swapped(entry) if self.remote.begin_wait(page, entry) => {
                self.stall.stalls(self.engine.slot());
                return Served::InFlight;
            }
            PageState::Swapped(entry) => {
                self.engine.devices.prefetch_slot(entry);
                self.stall.stalls(self.engine.slot());
                self.remote.asks(Some(page));
                let result = self.swap_in(page, entry, region);
                self.remote.submit(self.engine);
                self.remote.asks(None);
                result
            }
        };
        match result {
            Ok(()) if self.remote.has(page) && self.is_out(page) => Served::InFlight,
            Ok(()) => Served::Filled,
            Err(Stop::Again | Stop::Stale | Stop::Unreadable) => Served::Again,
            Err(Stop::Gone | Stop::Exists) => Served::Spurious,
            Err(Stop::Taken) => Served::Taken,
            Err(Stop::NoBuffer) => Served::NoBuffer,
        }
    }

    /// True while a page is swapped: what was sent for may be one that the program has given up
    /// since, and the page is a new one.
    fn is_out(&self, page: PageNo) -> bool {
        matches!(self.engine.mm.lock().table.get(page), PageState::Swapped(_))
    }

    /// A poisoned page is not there: the kernel dropped it with what it was moved or unmapped with.
    fn poison_again(&self, page: PageNo) -> Served {
        let mm = self.engine.mm.lock();
        if self.installer.may_fill(&mm).is_err() {
            return Served::Again;
        }
        if mm.table.get(page) == PageState::Poisoned {
            let _ = self.reader.uffd.poison(range_of(page, 1));
        }
        Served::Spurious
    }

    /// The number of pages, of `n`, that there is room for now, at least 1: where there are
    /// servers, several threads may have seen the same room.
    fn within_room(&self, mm: &Mm, n: usize) -> usize {
        if !mm.handed.are_servers {
            return n;
        }
        let room = (self.engine.charge.room() / PAGE_SIZE as i64).max(1) as usize;
        n.min(room)
    }

    /// Two threads touched the page and the other's fault was answered; or the kernel dropped a
    /// page that was freed lazily, and zeros are right. The lock is held: a worker must not take
    /// the page out between the check of its word and the zeros.
    fn is_already_mapped(&mut self, page: PageNo) -> Served {
        let mm = self.engine.mm.lock();
        if !matches!(mm.table.get(page), PageState::Present | PageState::PresentClean(_)) {
            // It went out meanwhile; the thread faults again and finds it swapped.
            return Served::Spurious;
        }
        if self.installer.may_fill(&mm).is_err() {
            return Served::Again;
        }
        match self.reader.uffd.zero_pages(range_of(page, 1), true).error {
            Some(Errno::AGAIN) => Served::Again,
            _ => Served::Spurious,
        }
    }

    /// Answers a first touch.
    fn demand_zero(&mut self, page: PageNo, region: VirtRange) -> Result<(), Stop> {
        let engine = self.engine;
        // First: a fault that is put off has asked nothing of what others foretell.
        self.make_room(1)?;
        // While events are noted and not applied, what surrounds the page may be something else by
        // now.
        let window = if self.reader.fork.notes_events() {
            1
        } else {
            engine
                .serving
                .readahead
                .lock()
                .locality
                .growth_window(page, engine.charge.window_pages())
        };
        let end = PageNo(pages_of(region).end);
        let may_grow = self.tries < MAX_PUT_OFF && self.make_room(window).is_ok();
        let window = if may_grow { window } else { 1 };
        let placing = self.begin_placing();
        let mut guard = engine.mm.lock();
        let mm = &mut *guard;
        if let Some(other) = mm.busy.filler_of(page) {
            mm.busy.want(other, page);
            return Err(Stop::Taken);
        }
        if mm.table.get(page) != PageState::Empty || mm.regions.find(page.addr()).is_none() {
            // Another thread, or an event that one has read, changed it; the thread faults again.
            return Err(Stop::Gone);
        }
        self.installer.may_fill(mm)?;
        let window = self.within_room(mm, window);
        let is_free = |page: PageNo| {
            mm.table.get(page) == PageState::Empty && mm.busy.filler_of(page).is_none()
        };
        let mut n = 1;
        while n < window && page.plus(n) < end && is_free(page.plus(n)) {
            n += 1;
        }
        // Two and three pages are steps to larger windows, and are not filled.
        let step = n;
        if n < MIN_MOVE_PAGES {
            n = 1;
        }
        if placing.is_inside() {
            mm.busy.begin_filling(self.filler, page, n);
        }
        let (mut guard, done) = self.grow(&placing, guard, page, n);
        let is_wanted = guard.busy.end_filling(self.filler);
        engine.publish_usage(&guard);
        drop(guard);
        drop(placing);
        if is_wanted {
            let _ = self.reader.uffd.wake(range_of(page, n));
        }
        let done = done?;
        let step = if step < MIN_MOVE_PAGES { step } else { done };
        engine.serving.readahead.lock().locality.grew_as(page, done, step);
        engine.charge.brought(done);
        self.throttle.grew(done, engine.slot().control.throttle_us.load(Relaxed));
        engine.count(Counter::Pgminfault, 1);
        Ok(())
    }

    /// Fills `n` pages from `page` on, which nothing has touched, with zeros. Gives how many, at
    /// least 1.
    fn grow(
        &mut self,
        placing: &Placing,
        mut guard: Guard<'static, Mm>,
        page: PageNo,
        mut n: usize,
    ) -> (Guard<'static, Mm>, Result<usize, Stop>) {
        let mut done = 0;
        while done < n {
            let filled;
            (guard, filled) = if n == 1 {
                placing.put(guard, || self.installer.copy_zeros(page))
            } else {
                self.installer.move_zeros(placing, guard, page.plus(done), n - done)
            };
            match filled {
                Ok(filled) => {
                    for k in done..done + filled {
                        guard.mark_present(page.plus(k));
                    }
                    done += filled;
                }
                // Mapped although its word is empty: perhaps about to be dropped (see `events`), so
                // it is left alone.
                Err(Stop::Exists) if done == 0 => done = 1,
                // A fill must not reach into another mapping, and a read-only one takes copies
                // alone.
                Err(Stop::Gone) if done == 0 && n > 1 => {
                    n = self.installer.in_mapping(page, n).min(n / 2);
                    if n < MIN_MOVE_PAGES {
                        n = 1;
                    }
                }
                // The page asked for is in; the rest is readahead.
                Err(_) if done > 0 => break,
                Err(stop) => return (guard, Err(stop)),
            }
        }
        (guard, Ok(done))
    }
}
