//! Write-back: the oldest pages of compressed memory go to a swap area when compressed memory has
//! its share.
//!
//! Owns: the buffers of one batch.
//!
//! A batch takes chunks from the log's old end under the memory lock; without it, it copies their
//! pages out of compressed memory as they are, packed, gives them slots on a swap area and writes
//! them; and takes the lock again to exchange the entries. Pages of one repeated word stay: they
//! cost nothing where they are.
//!
//! Invariant: an entry is exchanged only if its chunk's epoch is what it was when the page was
//! chosen; otherwise the page was brought in or given up meanwhile, what was copied may be another
//! page's, and the copy on the swap area is dropped. So is it while a thread brings the page in.

use std::ops::Range;

use swaptide_core::{Expect, FolioId, Shadow, SlotContent as TableSlot, SwapEntry};
use swaptide_ipc::Counter;
use swaptide_store::codec::{Packed, PackedKind, Unpacker};
use swaptide_store::{Page, Slot};

use crate::backing::devices::POOL;
use crate::engine::{Engine, Mm};
use crate::mm::page_table::PageState;
use crate::mm::types::{ChunkNo, PAGES_PER_CHUNK, PageNo, runs};
use crate::reclaim::copies;

/// Pages of a batch.
const BATCH_PAGES: usize = 128;
/// The folio that stands in the areas' swap cache while a page is written.
const WRITING: FolioId = FolioId(u32::MAX >> 8);

struct Moving {
    page: PageNo,
    old: SwapEntry,
    shadow: Shadow,
    chunk: ChunkNo,
    epoch: u32,
    /// Its new entry, and its range in `data`; `None` when it stays.
    copy: Option<(SwapEntry, Range<usize>, PackedKind)>,
}

/// Writes the oldest pages of compressed memory to a swap area.
pub struct Writeback {
    data: Vec<u8>,
    moving: Vec<Moving>,
}

impl Default for Writeback {
    fn default() -> Self {
        Self::new()
    }
}

/// Drops copies of pages that the program has: they are the first to go, for they cost nothing but
/// a later compression. False when there are none.
fn drop_copies(engine: &Engine) -> bool {
    let mut guard = engine.mm.lock();
    let mm = &mut *guard;
    let mut dropped = 0;
    while dropped < BATCH_PAGES
        && let Some(chunk) = mm.queues.next_clean(&mut mm.table)
    {
        dropped += copies::drop_of_chunk(engine, mm, chunk, POOL);
    }
    engine.publish_usage(mm);
    dropped > 0
}

impl Writeback {
    /// Empty buffers; they are made at first use.
    pub fn new() -> Writeback {
        Writeback { data: Vec::new(), moving: Vec::new() }
    }

    /// Moves one batch. False when there was nothing to move or nowhere to put it.
    pub fn step(&mut self, engine: &Engine, unpacker: &mut Unpacker) -> bool {
        if drop_copies(engine) {
            return true;
        }
        if !engine.devices.is_backed() || engine.area_rests() {
            return false;
        }
        let mut chosen = 0;
        {
            let mut guard = engine.mm.lock();
            let mm = &mut *guard;
            self.moving.clear();
            if !mm.queues.any_recompressed() {
                mm.put_back_young(&engine.devices);
            }
            while self.moving.len() + PAGES_PER_CHUNK <= BATCH_PAGES
                && let Some(chunk) = mm.queues.next_to_areas(&mut mm.table)
            {
                self.choose(engine, mm, chunk);
                chosen += 1;
            }
        }
        let room = self.copy_out(engine, unpacker);
        let pages: Vec<(Slot, Packed<'_>)> = self
            .moving
            .iter()
            .filter_map(|m| m.copy.as_ref())
            .map(|copy| (Slot(copy.0.offset().0), packed(&self.data, copy)))
            .collect();
        let going = pages.len();
        let written = copies::write(engine, &pages);
        drop(pages);
        let mut guard = engine.mm.lock();
        let mm = &mut *guard;
        if let Err(error) = written {
            engine.write_failed(&error);
            for moving in &self.moving {
                if let Some((new, ..)) = &moving.copy {
                    engine.devices.free_slot(*new, Expect::Folio(WRITING));
                }
                mm.queues.pooled(&mut mm.table, moving.chunk);
            }
            return false;
        }
        let moved = self.exchange(engine, mm);
        if !room {
            for moving in &self.moving {
                mm.queues.pooled(&mut mm.table, moving.chunk);
            }
        }
        engine.count(Counter::Zswpwb, moved);
        engine.count(Counter::Pswpout, moved);
        engine.publish_usage(mm);
        room && (going > 0 || chosen > 0)
    }

    /// Notes the pages of a chunk that are in compressed memory.
    fn choose(&mut self, engine: &Engine, mm: &mut Mm, chunk: ChunkNo) {
        let info = mm.table.chunk(chunk);
        for (first, len) in runs(info.swapped) {
            for page in (first..first + len).map(|k| chunk.first().plus(k)) {
                let PageState::Swapped(old) = mm.table.get(page) else { continue };
                if old.ty() != POOL {
                    continue;
                }
                let TableSlot::Shadow { shadow, .. } =
                    engine.devices.pool_slots.lookup(old.offset())
                else {
                    continue;
                };
                self.moving.push(Moving {
                    page,
                    old,
                    shadow,
                    chunk,
                    epoch: info.epoch,
                    copy: None,
                });
            }
        }
    }

    /// Copies the pages out and gives them slots. False when the swap areas have none left.
    fn copy_out(&mut self, engine: &Engine, unpacker: &mut Unpacker) -> bool {
        self.data.clear();
        for moving in &mut self.moving {
            let start = self.data.len();
            // The fault path tells of damage when the page is needed; and this may be no damage,
            // but a page that is gone.
            let Ok(kind) =
                engine.devices.pool.packed(Slot(moving.old.offset().0), &mut self.data, unpacker)
            else {
                continue;
            };
            if matches!(kind, PackedKind::Zero | PackedKind::Same(_)) {
                continue;
            }
            let Some(new) = copies::alloc_slot(engine, WRITING) else {
                engine.report_swap_full(
                    "the swap areas are full: compressed memory exceeds its share",
                );
                engine.rest_area();
                return false;
            };
            moving.copy = Some((new, start..self.data.len(), kind));
        }
        true
    }

    /// Gives the pages their new entries. Gives how many.
    fn exchange(&mut self, engine: &Engine, mm: &mut Mm) -> usize {
        // All are checked before the first is exchanged: an exchange changes its chunk's epoch.
        let valid: Vec<bool> = self
            .moving
            .iter()
            .map(|m| {
                mm.table.get(m.page) == PageState::Swapped(m.old)
                    && mm.table.chunk(m.chunk).epoch == m.epoch
                    && holds_shadow(engine, m.old)
            })
            .collect();
        let mut moved = 0;
        for (moving, valid) in self.moving.iter().zip(valid) {
            let Some((new, ..)) = &moving.copy else { continue };
            engine.devices.to_shadow(*new, 1, WRITING, moving.shadow);
            // Looked at again: should a page stand here twice, it moves once.
            if valid && mm.table.get(moving.page) == PageState::Swapped(moving.old) {
                mm.moved_to_area(moving.page, *new);
                engine.devices.drop_swapped(moving.old);
                moved += 1;
            } else {
                engine.devices.drop_swapped(*new);
                // A neighbour came in: what stays in compressed memory is to be met again.
                if mm.table.get(moving.page) == PageState::Swapped(moving.old) {
                    mm.queues.pooled(&mut mm.table, moving.chunk);
                }
            }
        }
        moved
    }
}

/// False while a thread brings in what a slot of compressed memory holds.
fn holds_shadow(engine: &Engine, entry: SwapEntry) -> bool {
    let slot = engine.devices.pool_slots.lookup(entry.offset());
    matches!(slot, TableSlot::Shadow { .. })
}

fn packed<'d>(
    data: &'d [u8],
    (_, range, kind): &(SwapEntry, Range<usize>, PackedKind),
) -> Packed<'d> {
    let bytes = &data[range.clone()];
    match kind {
        PackedKind::Raw => {
            let page: &Page = bytes.try_into().expect("a raw page is a page long");
            Packed::Raw(page)
        }
        _ => Packed::Bytes(bytes),
    }
}
