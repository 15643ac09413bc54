//! Remote pages: a server alone has them, and the time it takes has no bound. They are sent for,
//! and the handler continues.
//!
//! | thread | does |
//! |---|---|
//! | handler ([`InFlight::send_for`]) | notes entries and stamps of remote pages, a chunk at a time, and leaves the thread waiting that asked for one |
//! | reader ([`crate::backing::remote_queue`]) | reads them |
//! | handler ([`crate::fault::complete`]) | puts in place what is still what it was, and wakes the threads that wait |
//!
//! So a program's threads wait for the network at the same time, readahead is on its way while its
//! stream is worked through, and a server that is away stops those threads alone that want what it
//! has.
//!
//! Owns: what was sent for and has not landed.
//!
//! Invariants
//! 1. No page is sent for twice at a time.
//! 2. A page lands only where its word and its slot's stamp are what they were when it was sent
//!    for. What else was read is dropped.
//! 3. A thread that waits for a page that was sent for is woken when it landed, whatever came of
//!    it. If the page is not there, the thread faults again.
//! 4. Only a page that a thread had asked for by the time it was sent for is poisoned when it
//!    cannot be read: a thread that asked later has not waited long enough.
//!
//! Locks: the memory lock, while words are looked at; the queue's alone.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed};

use swaptide_core::{SlotContent as TableSlot, SwapEntry};
use swaptide_store::Slot;
use swaptide_store::file::{ServerId, Stamp};
use swaptide_sys::page::PAGE_SIZE;
use swaptide_sys::thread::{Nanos, now};

use crate::backing::devices::{AreaTier, NO_ENTRY};
use crate::backing::remote_queue::{MAX_READERS, MAX_REMOTE_READS, RemoteRead};
use crate::backing::snapshot::Snapshot;
use crate::engine::{Engine, Mm};
use crate::fault::install::Stop;
use crate::mm::page_table::PageState;
use crate::mm::types::{ChunkNo, LAST_PAGE, PAGES_PER_CHUNK, PageNo};
use crate::sched::handed::Fault;
use crate::sched::handler_cpu::HandlerCpu;

/// After this many faults without a remote read, remote pages are the exception.
const RARE_AFTER_FAULTS: u32 = 64;

/// A read that was sent to a server, with the state of its pages at that time.
pub(crate) struct InFlightRead {
    pub(super) buffer: usize,
    pub(super) chunk: ChunkNo,
    pub(super) server: ServerId,
    pub(super) wanted: u16,
    /// Pages that a thread waited for then.
    pub(super) asked: u16,
    /// Others that one came to wait for since.
    pub(super) waited: u16,
    pub(super) entries: [SwapEntry; PAGES_PER_CHUNK],
    pub(super) stamps: [Option<Stamp>; PAGES_PER_CHUNK],
    pub(super) at: Nanos,
}

impl InFlightRead {
    pub(super) fn page(&self, k: usize) -> PageNo {
        self.chunk.first().plus(k)
    }

    /// True when a page's word and stamp are what they were, and no other thread brings it in.
    pub(super) fn still_valid(&self, mm: &Mm, areas: &AreaTier, k: usize) -> bool {
        let entry = self.entries[k];
        let slot = areas.slots.lookup(entry.offset());
        mm.table.get(self.page(k)) == PageState::Swapped(entry)
            && matches!(slot, TableSlot::Shadow { .. })
            && areas.device.stamp(Slot(entry.offset().0)) == self.stamps[k]
    }
}

/// The handler's part of what is under way.
pub(crate) struct InFlight {
    pub(super) sent: Vec<InFlightRead>,
    /// Orders that are not sent yet: more of their chunks may follow.
    pub(super) drafts: Vec<RemoteRead>,
    /// A bit for each buffer in use, and how many were at most since their memory was given back.
    pub(super) buffers: u64,
    pub(super) most: u32,
    /// The page whose fault is being answered.
    pub(super) asking: Option<PageNo>,
    /// Pages sent for since that began.
    pub(super) pages: usize,
    /// Faults since the last request.
    pub(super) quiet: u32,
    /// Faults that found no buffer.
    pub(super) crowd: VecDeque<Fault>,
}

impl InFlight {
    pub(crate) fn new() -> InFlight {
        InFlight {
            sent: Vec::with_capacity(MAX_REMOTE_READS),
            drafts: Vec::with_capacity(MAX_REMOTE_READS),
            buffers: 0,
            most: 0,
            asking: None,
            pages: 0,
            quiet: RARE_AFTER_FAULTS,
            crowd: VecDeque::with_capacity(64),
        }
    }

    /// Nothing is under way, and no thread waits for anything to be.
    pub(crate) fn is_empty(&self) -> bool {
        self.sent.is_empty() && self.crowd.is_empty()
    }

    /// True when a page was sent for.
    pub(crate) fn has(&self, page: PageNo) -> bool {
        self.of_chunk(page.chunk()) >> page.in_chunk() & 1 != 0
    }

    /// A thread waits for a page that is swapped to `entry`. False when that was not sent for: what
    /// was may be an earlier one of the same page, which has been given up since.
    pub(crate) fn begin_wait(&mut self, page: PageNo, entry: SwapEntry) -> bool {
        let (k, bit) = (page.in_chunk(), 1 << page.in_chunk());
        let is_it = |sent: &&mut InFlightRead| {
            sent.chunk == page.chunk() && sent.wanted & bit != 0 && sent.entries[k] == entry
        };
        let request = self.sent.iter_mut().find(is_it);
        request.map(|sent| sent.waited |= bit).is_some()
    }

    /// True while a thread waits for what was sent for, or is to be.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.crowd.is_empty() || self.sent.iter().any(|sent| sent.asked | sent.waited != 0)
    }

    /// The pages of a chunk that were sent for.
    fn of_chunk(&self, chunk: ChunkNo) -> u16 {
        self.sent
            .iter()
            .filter(|sent| sent.chunk == chunk)
            .fold(0, |pages, sent| pages | sent.wanted)
    }

    /// Bytes that are under way.
    pub(crate) fn bytes(&self) -> usize {
        self.sent.iter().map(|sent| sent.wanted.count_ones() as usize * PAGE_SIZE).sum()
    }

    /// True when there is a place for that many requests.
    pub(crate) fn has_buffers(&self, n: usize) -> bool {
        MAX_REMOTE_READS - self.buffers.count_ones() as usize >= n
    }

    /// A fault is being answered, or pages are brought in that no thread asked for ([`LAST_PAGE`]);
    /// `None`: no more. Gives the pages that were sent for since the last call.
    pub(crate) fn asks(&mut self, page: Option<PageNo>) -> usize {
        self.asking = page;
        self.quiet = self.quiet.saturating_add(1);
        std::mem::take(&mut self.pages)
    }

    /// True while something is sent for again and again.
    pub(crate) fn is_usual(&self) -> bool {
        self.quiet < RARE_AFTER_FAULTS
    }

    /// A fault waits for a buffer.
    pub(crate) fn wait(&mut self, fault: Fault) {
        self.crowd.push_back(fault);
    }

    /// The request that is put together for a chunk and a server: the last one, or a new one. None
    /// if there is no buffer for it.
    fn draft(
        &mut self,
        chunk: ChunkNo,
        server: ServerId,
    ) -> Option<(&mut RemoteRead, &mut InFlightRead)> {
        if self.drafts.is_empty()
            || self.sent.last().is_none_or(|sent| (sent.chunk, sent.server) != (chunk, server))
        {
            let buffer = (!self.buffers).trailing_zeros();
            if buffer as usize >= MAX_REMOTE_READS {
                return None;
            }
            self.buffers |= 1 << buffer;
            self.most = self.most.max(buffer + 1);
            let buffer = buffer as usize;
            let unasked = self.asking == Some(LAST_PAGE);
            let (entries, stamps) = ([NO_ENTRY; PAGES_PER_CHUNK], [None; PAGES_PER_CHUNK]);
            self.drafts.push(RemoteRead {
                buffer,
                server,
                slots: [Slot(0); PAGES_PER_CHUNK],
                wanted: 0,
                read: 0,
                lost: 0,
                unasked,
            });
            self.sent.push(InFlightRead {
                buffer,
                chunk,
                server,
                wanted: 0,
                asked: 0,
                waited: 0,
                entries,
                stamps,
                at: now(),
            });
        }
        self.drafts.last_mut().zip(self.sent.last_mut())
    }

    /// True when pages of a server may be sent for rather than waited for: for the fault that is
    /// being answered.
    pub(crate) fn may_send(&self, engine: &Engine) -> bool {
        self.asking.is_some() && !engine.remote_reads.refused.load(Relaxed)
    }

    /// Sends for the first `n` pages of a snapshot, which a server has, as far as there are
    /// buffers. Gives how many pages that are; at least 1.
    pub(crate) fn send_for(
        &mut self,
        engine: &Engine,
        cpu: &HandlerCpu,
        snapshot: &Snapshot,
        n: usize,
    ) -> Result<usize, Stop> {
        let first = snapshot.first();
        let mut at = 0;
        while at < n {
            let piece = (PAGES_PER_CHUNK - first.plus(at).in_chunk()).min(n - at);
            let entries = &snapshot.entries()[at..at + piece];
            match self.send_for_some(engine, cpu, first.plus(at), entries) {
                Ok(()) => at += piece,
                Err(stop) if at == 0 => return Err(stop),
                Err(_) => break,
            }
        }
        Ok(at)
    }

    /// The same for pages of one chunk.
    fn send_for_some(
        &mut self,
        engine: &Engine,
        cpu: &HandlerCpu,
        first: PageNo,
        entries: &[SwapEntry],
    ) -> Result<(), Stop> {
        if !is_read_for(engine, cpu) {
            // No thread reads; the handler has to.
            return Err(Stop::Stale);
        }
        let (chunk, base) = (first.chunk(), first.in_chunk());
        let (there, asking) = (self.of_chunk(chunk), self.asking);
        let mm = engine.mm.lock();
        let (device, mut new) = (&engine.devices.areas.device, 0);
        for (k, entry) in (base..).zip(entries).filter(|(k, _)| there >> k & 1 == 0) {
            let (page, slot) = (chunk.first().plus(k), Slot(entry.offset().0));
            let (Some(stamp), Some(server)) = (device.stamp(slot), device.server_of(slot)) else {
                continue;
            };
            if mm.table.get(page) != PageState::Swapped(*entry) {
                continue;
            }
            let Some((request, sent)) = self.draft(chunk, server) else {
                return if new == 0 { Err(Stop::NoBuffer) } else { Ok(()) };
            };
            (sent.entries[k], sent.stamps[k], request.slots[k]) = (*entry, Some(stamp), slot);
            sent.wanted |= 1 << k;
            request.wanted = sent.wanted;
            if asking == Some(page) {
                sent.asked |= 1 << k;
            }
            new += 1;
        }
        drop(mm);
        self.pages += new;
        // All of it was sent for before, or some is another page's by now.
        if new == 0 && there == 0 { Err(Stop::Stale) } else { Ok(()) }
    }

    /// Sends what was put together.
    pub(crate) fn submit(&mut self, engine: &Engine) {
        if self.drafts.is_empty() {
            return;
        }
        self.quiet = 0;
        engine.remote_reads.queue.lock().send(self.drafts.drain(..));
        engine.remote_reads.call();
    }
}

/// True when a reader takes what is sent for. Readers are started when they are needed.
fn is_read_for(engine: &Engine, cpu: &HandlerCpu) -> bool {
    let remote = &engine.remote_reads;
    let readers = remote.readers.load(Relaxed);
    if remote.idle.load(Acquire) == 0 && readers < MAX_READERS as u32 {
        // One that is started in the idle class would stay there.
        if cpu.normally(engine.start.spawn_reader) {
            remote.readers.store(readers + 1, Relaxed);
            engine.slot().engine_threads.fetch_add(1, Relaxed);
        } else if readers == 0 {
            remote.refused.store(true, Relaxed);
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests;
