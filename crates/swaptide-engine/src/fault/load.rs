//! From the devices into the handler's buffers: what a snapshot says is on them.
//!
//! Owns: what loading costs, as it is told to the division of the limit; and, of swap areas on
//! rotational disks, what was read ahead ([`swaptide_store::file::ReadAhead`]). Nothing here
//! touches the program or its words: a caller that put pages into a buffer looks again whether they
//! are still meant.
//!
//! Rules
//! 1. Zeros are not loaded, compressed pages are decompressed one by one, all that is on a swap
//!    area is read in one go.
//! 2. A page that is read alone from a rotational disk brings along what was written next to it:
//!    `2^page-cluster` pages at most (8 where nothing is said), and 1/128 of the limit, as many as
//!    the last ones proved worth it. None where the program is past its limit: then what is held is
//!    given up. (docs/linux-swap.md, "Readahead". The windows of streams are
//!    [`crate::readahead::locality`]'s.)
//! 3. A page that cannot be read is tried five times within a tenth of a second, and then poisoned;
//!    so is one that came over a network and is not what was written. What is wrong on a disk is
//!    poisoned at once, and so is what a server was asked for that does not answer.
//! 4. A page that this process cannot read for want of memory or descriptors is never poisoned
//!    ([`crate::backing::shortage`]).

use swaptide_core::SwapEntry;
use swaptide_ipc::Counter;
use swaptide_store::codec::{Codec, Unpacker};
use swaptide_store::file::{
    Ahead, MAX_BLOCK_PAGES, READ_RETRY_DELAYS, ReadAhead, ReadError, ReadErrorKind,
};
use swaptide_store::{Page, Slot};
use swaptide_sys::Errno;
use swaptide_sys::thread::{Nanos, now, sleep};

use crate::backing::shortage::OwnShortage;
use crate::backing::snapshot::{PageLocation, Snapshot};
use crate::engine::{Engine, Mm};
use crate::memcg::pool_sizing::Loads;
use crate::mm::types::PageNo;
use crate::readahead::policy::ReadaheadLimits;
use crate::sched::handler_cpu::HandlerCpu;

/// `page-cluster` where nothing is said.
const PAGE_CLUSTER: u8 = 3;

/// The assumed cost of reading a page from a swap area before one was read, in nanoseconds.
const FIRST_READ_NS: u64 = 60_000;

/// Loads pages from the devices into buffers of the handler.
pub(crate) struct Loader {
    engine: &'static Engine,
    /// The decompressor.
    pub(crate) unpacker: Unpacker,
    /// The cost of loads from compressed memory since the last report to the pool sizer.
    loads: Loads,
    /// Pages that were read ahead from rotational disks and not asked for yet.
    pub(crate) ahead: ReadAhead,
    /// The number of pages of the last read that had been read ahead.
    pub(crate) held_hits: usize,
    /// Of the pages that came for the fault that is being answered, how many had been.
    pub(crate) held_came: usize,
    /// Smoothed time of reading a page from a swap area, in nanoseconds.
    pub(crate) read_ns: u64,
    pub(crate) shortage: OwnShortage,
    /// The last load is to be repeated: it failed for lack of a resource of this process's own.
    is_short: bool,
    /// The first page is not needed now: a server that does not answer is waited for once, and a
    /// read that fails is not tried again.
    pub(crate) is_hint: bool,
}

impl Loader {
    /// Nothing was loaded yet.
    pub(crate) fn new(engine: &'static Engine) -> Loader {
        Loader {
            engine,
            unpacker: Unpacker::new(),
            loads: Loads::default(),
            ahead: ReadAhead::default(),
            held_hits: 0,
            held_came: 0,
            read_ns: FIRST_READ_NS,
            shortage: OwnShortage::default(),
            is_short: false,
            is_hint: false,
        }
    }

    /// Loads pages from compressed memory. Gives how many came before the first that could not be.
    pub(crate) fn load_pool(&mut self, entries: &[SwapEntry], out: &mut [Page]) -> usize {
        let pool = &self.engine.devices.pool;
        // The time is not wanted where nothing is compressed with zstd.
        let began = self.loads.any_zstd.then(now);
        let (mut loaded, mut zstd) = (0, 0);
        for (entry, out) in entries.iter().zip(out) {
            let Ok(codec) = pool.load(Slot(entry.offset().0), out, &mut self.unpacker) else {
                break;
            };
            loaded += 1;
            zstd += u32::from(codec == Some(Codec::Zstd));
        }
        self.loads.pages += loaded as u32;
        self.loads.zstd += zstd;
        // What came of one codec alone tells what that costs.
        if zstd > 0 && zstd as usize == loaded {
            self.loads.any_zstd = true;
            if let Some(began) = began {
                self.loads.zstd_ns += now().since(began).as_nanos() as u64;
                self.loads.timed += zstd;
            }
        }
        loaded
    }

    /// Now and then, tells the division what loads cost.
    pub(crate) fn report_load_cost(&mut self, mm: &mut Mm) {
        if self.loads.pages >= 64 {
            let any_zstd = self.loads.zstd > 0;
            mm.pool_sizer
                .loaded(std::mem::replace(&mut self.loads, Loads { any_zstd, ..Loads::default() }));
        }
    }

    /// Loads the pages at the front of a snapshot. Gives how many came before the first that could
    /// not be.
    pub(crate) fn load(
        &mut self,
        cpu: &HandlerCpu,
        snapshot: &Snapshot,
        out: &mut [Page],
    ) -> usize {
        let entries = snapshot.entries();
        self.held_hits = 0;
        let mut loaded = out.len();
        let mut on_area = 0;
        let mut at = 0;
        while at < loaded {
            let place = snapshot.place(at);
            let run = (at..loaded).take_while(|k| snapshot.place(*k) == place).count();
            match place {
                PageLocation::Zero => out[at..at + run].iter_mut().for_each(|page| page.fill(0)),
                PageLocation::Area => on_area += run,
                _ => {
                    let good = self.load_pool(&entries[at..at + run], &mut out[at..at + run]);
                    if good < run {
                        loaded = at + good;
                    }
                }
            }
            at += run;
        }
        if on_area == 0 {
            return loaded;
        }
        let is_on_area = |k: &usize| snapshot.place(*k) == PageLocation::Area;
        let mut requests: Vec<(usize, Slot, &mut Page)> = out[..loaded]
            .iter_mut()
            .enumerate()
            .filter(|(k, _)| is_on_area(k))
            .map(|(k, out)| (k, Slot(entries[k].offset().0), out))
            .collect();
        self.read_file(cpu, snapshot.first(), &mut requests).unwrap_or(loaded)
    }

    /// Reads pages from a swap area: each with its place from `first` on. Gives the first place
    /// that could not be read.
    fn read_file(
        &mut self,
        cpu: &HandlerCpu,
        first: PageNo,
        pages: &mut [(usize, Slot, &mut Page)],
    ) -> Option<usize> {
        let engine = self.engine;
        let areas = &engine.devices.areas;
        let began = now();
        engine.note_disk();
        let most = self.cluster_window();
        let mut requests: Vec<(Slot, &mut Page)> =
            pages.iter_mut().map(|(_, slot, out)| (*slot, &mut **out)).collect();
        let ahead = &mut self.ahead;
        let error = match cpu.normally(|| ahead.read(&areas.device, &mut requests, most)) {
            Ok(Ahead { hits, ahead }) => {
                self.shortage.end();
                engine.count(Counter::SwapRaHit, hits);
                engine.count(Counter::SwapRa, ahead);
                engine.count(Counter::Pswpin, ahead);
                self.held_hits = hits;
                let read = pages.len() - hits + ahead;
                if read > 0 {
                    let ns = now().since(began).as_nanos() as u64;
                    self.read_ns = (self.read_ns * 15 + ns / read as u64) / 16;
                    engine.mm.lock().pool_sizer.read(read, ns);
                }
                return None;
            }
            Err(error) => error,
        };
        drop(requests);
        if self.is_hint && matches!(error.kind, ReadErrorKind::Io(Errno::TIMEDOUT)) {
            return pages.first().map(|(k, ..)| *k);
        }
        // One by one, to have those that can be read.
        if !error.is_own_shortage() {
            (engine.start.log)(&format!("read from a swap area failed: {error}"));
        }
        for (at, (k, slot, out)) in pages.iter_mut().enumerate() {
            let mut began = now();
            let mut result = areas.device.read(&mut [(*slot, &mut **out)]);
            for pause in READ_RETRY_DELAYS {
                let is_vain =
                    |error: &ReadError| self.is_hint || !areas.device.may_succeed_later(error);
                if result.as_ref().map_or_else(is_vain, |()| true) {
                    break;
                }
                sleep(pause);
                began = now();
                result = areas.device.read(&mut [(*slot, &mut **out)]);
            }
            if let Err(error) = &result
                && error.is_own_shortage()
            {
                self.is_short = true;
                self.wait_for_means(error, began);
                return Some(*k);
            }
            self.shortage.end();
            if let Err(error) = result {
                if at == 0 {
                    (engine.start.log)(&format!(
                        "page {:?} cannot be read from a swap area: {error}",
                        first.plus(*k).addr()
                    ));
                }
                return Some(*k);
            }
        }
        None
    }

    /// A read that began at `began` has failed for want of something of this process's own: waits a
    /// moment.
    pub(crate) fn wait_for_means(&mut self, error: &ReadError, began: Nanos) {
        let (is_test, log) = (self.engine.injection().shortens_timeouts(), self.engine.start.log);
        self.shortage.pause(error, began, is_test, log);
    }

    /// True when what the last load could not have is to be loaded again.
    pub(crate) fn was_short(&mut self) -> bool {
        std::mem::take(&mut self.is_short)
    }

    /// Pages that one from a rotational disk may come with, itself among them.
    fn cluster_window(&mut self) -> usize {
        let charge = &self.engine.charge;
        let cluster = readahead_limits(self.engine).page_cluster.unwrap_or(PAGE_CLUSTER);
        if charge.room() < 0 {
            self.ahead.clear();
            return 1;
        }
        (1 << cluster).min(MAX_BLOCK_PAGES).min(charge.window_pages() / 2)
    }
}

/// The bounds of readahead. They are read each time, for they may change during the run.
pub(crate) fn readahead_limits(engine: &Engine) -> ReadaheadLimits {
    let header = &engine.start.segment.header;
    ReadaheadLimits::new(header.swap_in.page_cluster.get(), header.swap_in.largest_order.get())
}
