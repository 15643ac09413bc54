//! What faults and reclaim do to the engine's data structures, without a userfaultfd and without a
//! program: for the experiment that asks how far several threads get (`swaptide lab scaling`).
//!
//! Owns: a page table with its queues, under one lock as in the engine, compressed memory, and an
//! account. Pages are numbers; all have the same contents.
//!
//! Locks: as the engine's ([`crate::engine::Engine::mm`] is `tables` here).

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use swaptide_core::{FolioId, Shadow, SwapEntry};
use swaptide_ipc::{Counter, Segment, SlotIndex};
use swaptide_store::codec::{Compressor, Packed, Scheme, Unpacker};
use swaptide_store::{Page, Slot};
use swaptide_sys::AsFd;
use swaptide_sys::lock::Lock;
use swaptide_sys::mem::{SharedMap, memfd_create};
use swaptide_sys::page::PAGE_SIZE;

use crate::EngineError;
use crate::backing::devices::{Devices, entry_plus};
use crate::fault::loading::Loading;
use crate::memcg::charge::Charge;
use crate::mm::busy::Busy;
use crate::mm::lru::Queues;
use crate::mm::page_table::{PageState, PageTable};
use crate::mm::types::{ChunkNo, FillerNo, MAX_FILLERS, PAGES_PER_CHUNK, PageNo, folios};

/// The first page: an address that a program could have.
const FIRST: PageNo = PageNo(0x7000_0000);
/// Threads at most.
pub const MAX_THREADS: usize = MAX_FILLERS;

/// The work of one step of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepKind {
    /// All that a fault on a page in compressed memory does, and what takes as many pages out
    /// again.
    Whole,
    /// A word of the page table changes, and changes back, under the lock.
    PageTable,
    /// A slot is allocated, enters and leaves the swap cache, and is freed; no other lock is taken.
    Slots,
    /// The account is published, and counters are raised.
    Accounts,
}

struct SharedTables {
    table: PageTable,
    queues: Queues,
    busy: Busy,
    evicted: u32,
}

/// The structures that the threads share.
pub struct Structures {
    tables: Lock<SharedTables>,
    devices: Devices,
    charge: Charge,
    segment: &'static Segment,
    index: SlotIndex,
    /// A page as it lies in compressed memory.
    packed: Vec<u8>,
    pages: usize,
}

/// One of the threads.
pub struct StepThread<'a> {
    of: &'a Structures,
    number: usize,
    loading: Loading,
    unpacker: Unpacker,
    page: Box<Page>,
    /// Steps of the parts that count them.
    steps: usize,
    random: u64,
}

impl Structures {
    /// Structures for `pages` pages (whole chunks), all of them in compressed memory. Their segment
    /// stays for the rest of the process's life.
    ///
    /// # Errors
    /// When memory is refused.
    ///
    /// # Panics
    /// When compressed memory takes less than `pages`.
    pub fn new(pages: usize) -> Result<Structures, EngineError> {
        let no_memory = |e| EngineError::Memory("a segment", e);
        let fd = memfd_create(c"scaling", Segment::BYTES as u64).map_err(no_memory)?;
        let map = SharedMap::map(fd.as_fd(), Segment::BYTES).map_err(no_memory)?;
        let segment = Segment::raw(map).map_err(|_| EngineError::Devices("too small a segment"))?;
        let index = segment.claim(std::process::id(), 0).expect("a place in a new segment");
        let place = Arc::new(AtomicU32::new(index.0));
        let no_area = |_| Err(swaptide_sys::Errno::NODEV);
        let devices = Devices::new(segment, place, no_area, 1)?;
        let mut page: Box<Page> = Box::new([0; PAGE_SIZE]);
        for (k, byte) in page.iter_mut().enumerate() {
            // A quarter that hardly shrinks, and the rest one word.
            *byte = if k < PAGE_SIZE / 4 { (k * k / 7) as u8 } else { 7 };
        }
        let mut compressor = Compressor::new(Scheme::from_number(0));
        let Packed::Bytes(bytes) = compressor.compress(&page) else {
            panic!("such a page shrinks");
        };
        let pages = pages.next_multiple_of(PAGES_PER_CHUNK);
        let structures = Structures {
            tables: Lock::new(SharedTables {
                table: PageTable::new(),
                queues: Queues::default(),
                busy: Busy::default(),
                evicted: 0,
            }),
            devices,
            charge: Charge::new(1 << 40, 75, 0),
            segment,
            index,
            packed: bytes.to_vec(),
            pages,
        };
        for chunk in 0..pages / PAGES_PER_CHUNK {
            let mut tables = structures.tables.lock();
            let chunk = ChunkNo(FIRST.chunk().0 + chunk);
            for page in (0..PAGES_PER_CHUNK).map(|k| chunk.first().plus(k)) {
                tables.table.set(page, PageState::Present);
            }
            let folios = structures.take(&mut tables, chunk, 0);
            drop(tables);
            structures.store(&folios);
            structures.finish(chunk, &folios);
        }
        Ok(structures)
    }

    /// The thread of a number below [`MAX_THREADS`], of `threads`.
    pub fn thread(&self, number: usize) -> StepThread<'_> {
        StepThread {
            of: self,
            number,
            loading: Loading::new(FillerNo(number as u8)),
            unpacker: Unpacker::new(),
            page: Box::new([0; PAGE_SIZE]),
            steps: 0,
            random: (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1,
        }
    }

    /// Gives the present pages of a chunk slots, as the largest folios that they make.
    fn take(
        &self,
        tables: &mut SharedTables,
        chunk: ChunkNo,
        number: usize,
    ) -> Vec<(SwapEntry, u8)> {
        let mut taken = Vec::with_capacity(PAGES_PER_CHUNK);
        for (first, order) in folios(tables.table.chunk(chunk).present) {
            let folio = FolioId((number * PAGES_PER_CHUNK + first) as u32);
            let entry = self.devices.alloc_pool(order, folio).expect("slots for all pages");
            for k in 0..1usize << order {
                let page = chunk.first().plus(first + k);
                tables.table.set(page, PageState::Swapped(entry_plus(entry, k as u32)));
            }
            taken.push((entry, order));
        }
        tables.evicted += 1;
        taken
    }

    fn store(&self, folios: &[(SwapEntry, u8)]) {
        for (entry, order) in folios {
            for k in 0..1u32 << order {
                let slot = Slot(entry_plus(*entry, k).offset().0);
                self.devices.pool.insert(slot, &Packed::Bytes(&self.packed)).expect("room");
            }
        }
    }

    fn finish(&self, chunk: ChunkNo, folios: &[(SwapEntry, u8)]) {
        let mut guard = self.tables.lock();
        let tables = &mut *guard;
        for (entry, order) in folios {
            let slots = self.devices.slots(entry.ty());
            let swaptide_core::SlotContent::Folio(folio) = slots.lookup(entry.offset()) else {
                panic!("a folio on its way out left the swap cache");
            };
            self.devices.to_shadow(*entry, 1 << order, folio, Shadow(tables.evicted));
        }
        tables.queues.pooled(&mut tables.table, chunk);
    }

    fn publish(&self, tables: &SharedTables) {
        self.charge.publish(tables.table.present(), 0, self.devices.pool.pool_bytes());
        black_box(self.charge.room() < self.charge.goal());
    }
}

impl StepThread<'_> {
    fn next_random(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random as usize
    }

    /// Does one step.
    ///
    /// # Panics
    /// When a page is not what it must be.
    pub fn step(&mut self, part: StepKind) {
        match part {
            StepKind::Whole => self.fault(),
            StepKind::PageTable => {
                // Far from the pages of the others.
                let page = PageNo(FIRST.0 * 2 + (self.number << 20) + self.steps % 4096);
                self.steps += 1;
                let mut tables = self.of.tables.lock();
                tables.table.set(page, PageState::Present);
                tables.table.set(page, PageState::Empty);
            }
            StepKind::Slots => {
                let devices = &self.of.devices;
                let folio = FolioId(self.number as u32);
                let entry = devices.alloc_pool(0, folio).expect("a slot");
                devices.to_shadow(entry, 1, folio, Shadow(1));
                let slots = devices.slots(entry.ty());
                slots.shadow_to_folio(entry.offset(), 1, folio, None).expect("this thread's slot");
                devices.free_slot(entry, swaptide_core::Expect::Folio(folio));
            }
            StepKind::Accounts => {
                let slot = self.of.segment.slot(self.of.index);
                self.of.charge.publish(self.steps, 0, 0);
                self.of.charge.brought(1);
                slot.count(Counter::Pgmajfault, 1);
                slot.count(Counter::Zswpin, 1);
                self.steps += 1;
            }
        }
    }

    /// Brings in a page that is out, chosen at random. While more than half are in, the chunk goes
    /// out that is in longest.
    fn fault(&mut self) {
        while !self.bring_in() {}
        while self.of.tables.lock().table.present() > self.of.pages / 2 && self.reclaim() {}
    }

    /// False where the page that was chosen is not out, or another thread has it.
    fn bring_in(&mut self) -> bool {
        let of = self.of;
        let page = FIRST.plus(self.next_random() % of.pages);
        let state = of.tables.lock().table.get(page);
        let PageState::Swapped(entry) = state else { return false };
        let begun = {
            let mut guard = of.tables.lock();
            let tables = &mut *guard;
            self.loading.begin(&of.devices, &tables.table, &mut tables.busy, page, &[entry])
        };
        if begun.is_err() {
            // On its way out, or another thread's.
            return false;
        }
        let slot = Slot(entry.offset().0);
        of.devices.pool.load(slot, &mut self.page, &mut self.unpacker).expect("what was stored");
        {
            let mut guard = of.tables.lock();
            let tables = &mut *guard;
            assert_eq!(self.loading.unchanged(&tables.table), 1, "another thread took the page");
            tables.table.set(page, PageState::Present);
            tables.queues.arrived(&mut tables.table, page.chunk());
            self.loading.release(0);
            self.loading.end(&of.devices, &mut tables.busy);
            of.publish(tables);
        }
        of.segment.slot(of.index).count(Counter::Pgmajfault, 1);
        true
    }

    /// False when no chunk is in.
    fn reclaim(&mut self) -> bool {
        let of = self.of;
        let (chunk, folios) = {
            let mut guard = of.tables.lock();
            let tables = &mut *guard;
            let Some(chunk) = tables.queues.next_resident(&mut tables.table) else {
                return false;
            };
            let folios = of.take(tables, chunk, self.number);
            of.publish(tables);
            (chunk, folios)
        };
        of.store(&folios);
        of.finish(chunk, &folios);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_bring_pages_in_and_out_and_lose_none() {
        const PAGES: usize = 1024;
        let structures = Structures::new(PAGES).expect("structures");
        std::thread::scope(|scope| {
            for number in 0..4 {
                let mut thread = structures.thread(number);
                scope.spawn(move || {
                    for part in
                        [StepKind::Whole, StepKind::PageTable, StepKind::Slots, StepKind::Accounts]
                    {
                        (0..3000).for_each(|_| thread.step(part));
                    }
                });
            }
        });
        let tables = structures.tables.lock();
        let (present, swapped) = (tables.table.present(), tables.table.swapped());
        assert_eq!(present + swapped, PAGES);
        assert!(present > 0 && swapped > 0, "{present} in, {swapped} out");
        assert_eq!(structures.devices.pool_slots.usage().used as usize, swapped);
        assert!(!tables.busy.is_any_loading());
    }
}
