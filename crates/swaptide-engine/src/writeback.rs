//! Write-back: the oldest pages of compressed memory go to the file when compressed memory has its share.
//!
//! Owns: the buffers of one batch.
//!
//! A batch takes chunks from the log's old end under the memory lock, loads their pages and writes them without it, and takes the lock again
//! to exchange the entries.
//!
//! Invariant: an entry is exchanged only if its chunk's epoch is what it was when the page was chosen; otherwise the page was brought in or
//! given up meanwhile, what was loaded may be another page's, and the copy in the file is dropped.

use swaptide_core::{Expect, FolioId, Shadow, Slot as TableSlot, SwapEntry};
use swaptide_ipc::Counter;
use swaptide_store::codec::Packed;
use swaptide_store::{Page, Slot};

use crate::devices::POOL;
use crate::engine::{Engine, Mm};
use crate::ids::{ChunkNo, PAGES_PER_CHUNK, PageNo, runs};
use crate::pagetable::PageState;

/// Pages of a batch.
const BATCH: usize = 128;
/// The folio that stands in the file's swap cache while a page is written.
const WRITING: FolioId = FolioId(u32::MAX >> 8);

struct Moving {
    page: PageNo,
    old: SwapEntry,
    new: SwapEntry,
    shadow: Shadow,
    chunk: ChunkNo,
    epoch: u32,
    /// Place in `data`; `None` when it could not be loaded.
    data: Option<usize>,
    valid: bool,
}

/// See the module's description.
pub struct Writeback {
    data: Vec<Page>,
    moving: Vec<Moving>,
}

impl Default for Writeback {
    fn default() -> Self {
        Self::new()
    }
}

/// Drops copies of pages that the program has: they are the first to go, for they cost nothing but a later compression. False when there are none.
fn drop_copies(engine: &Engine) -> bool {
    let mut guard = engine.mm.lock();
    let mm = &mut *guard;
    let mut dropped = 0;
    while dropped < BATCH
        && let Some(chunk) = mm.queues.next_copied(&mut mm.table)
    {
        for page in (0..PAGES_PER_CHUNK).map(|k| chunk.first().plus(k)) {
            if let PageState::Kept(entry) = mm.table.get(page)
                && entry.ty() == POOL
            {
                mm.table.set(page, PageState::Present);
                engine.devices.drop_swapped(entry);
                dropped += 1;
            }
        }
    }
    engine.settle(mm);
    dropped > 0
}

impl Writeback {
    /// Empty buffers; they are made at first use.
    pub fn new() -> Writeback {
        Writeback { data: Vec::new(), moving: Vec::new() }
    }

    /// Moves one batch. False when there was nothing to move or nowhere to put it.
    pub fn step(&mut self, engine: &Engine) -> bool {
        if drop_copies(engine) {
            return true;
        }
        self.data.resize(BATCH, [0; 4096]);
        self.moving.clear();
        {
            let mut guard = engine.mm.lock();
            let mm = &mut *guard;
            while self.moving.len() + PAGES_PER_CHUNK <= BATCH {
                let Some(chunk) = mm.queues.next_pooled(&mut mm.table) else { break };
                if !self.load_chunk(engine, mm, chunk) {
                    break;
                }
            }
        }
        if self.moving.is_empty() {
            let mm = engine.mm.lock();
            engine.settle(&mm);
            return false;
        }
        let Some(file) = &engine.devices.file else { return false };
        let mut loaded = 0;
        for moving in &mut self.moving {
            // The fault path tells of damage when the page is needed; and this may be no damage, but a page that is gone.
            if engine.devices.pool.load(Slot(moving.old.offset().0), &mut self.data[loaded]).is_ok() {
                moving.data = Some(loaded);
                loaded += 1;
            }
        }
        let pages: Vec<(Slot, Packed<'_>)> =
            self.moving.iter().filter_map(|m| Some((Slot(m.new.offset().0), Packed::Raw(&self.data[m.data?])))).collect();
        let written = file.device.write(&pages);
        let mut guard = engine.mm.lock();
        let mm = &mut *guard;
        if let Err(error) = written {
            (engine.start.log)(&format!("writing to the swap file failed, the pages stay in memory: {error}"));
            engine.count(Counter::WriteErrors, 1);
            for moving in &self.moving {
                engine.devices.free_slot(moving.new, Expect::Folio(WRITING));
                mm.queues.pooled(&mut mm.table, moving.chunk);
            }
            return false;
        }
        let mut moved = 0;
        // All are checked before the first is exchanged: an exchange changes its chunk's epoch.
        for moving in &mut self.moving {
            moving.valid = moving.data.is_some()
                && mm.table.get(moving.page) == PageState::Swapped(moving.old)
                && mm.table.chunk(moving.chunk).epoch == moving.epoch;
        }
        for moving in &self.moving {
            if moving.data.is_none() {
                engine.devices.free_slot(moving.new, Expect::Folio(WRITING));
                continue;
            }
            engine.devices.to_shadow(moving.new, 1, WRITING, moving.shadow);
            if moving.valid {
                mm.moved_to_file(moving.page, moving.new);
                engine.devices.drop_swapped(moving.old);
                moved += 1;
            } else {
                engine.devices.drop_swapped(moving.new);
            }
        }
        engine.count(Counter::Zswpwb, moved);
        engine.count(Counter::Pswpout, moved);
        engine.settle(mm);
        true
    }

    /// Loads the pages of a chunk that are in compressed memory. False when the file is full.
    fn load_chunk(&mut self, engine: &Engine, mm: &mut Mm, chunk: ChunkNo) -> bool {
        let info = mm.table.chunk(chunk);
        for (first, len) in runs(info.swapped) {
            for page in (first..first + len).map(|k| chunk.first().plus(k)) {
                let PageState::Swapped(old) = mm.table.get(page) else { continue };
                if old.ty() != POOL {
                    continue;
                }
                let TableSlot::Shadow { shadow, .. } = engine.devices.pool_slots.lookup(old.offset()) else { continue };
                let Some(new) = engine.devices.alloc_file(WRITING) else {
                    if engine.devices.file.is_none() {
                        break;
                    }
                    if !engine.swap_full.swap(true, std::sync::atomic::Ordering::Relaxed) {
                        (engine.start.log)("the swap file is full: compressed memory stays past its share");
                    }
                    engine.count(Counter::SwapFull, 1);
                    mm.queues.pooled(&mut mm.table, chunk);
                    return false;
                };
                self.moving.push(Moving { page, old, new, shadow, chunk, epoch: info.epoch, data: None, valid: false });
            }
        }
        true
    }
}
