//! Recompression: pages that stay long in compressed memory are compressed again, with zstd, before
//! any of them goes to a swap area.
//!
//! lz4 is what pages get that may be wanted again soon; zstd takes half the bytes and some
//! microseconds more at the next touch. So the chunks that went to compressed memory longest ago,
//! and whose pages have been out for about as long as a page stays in the program, are taken from
//! the log's old end, and put into the log of *recompressed* chunks, from which write-back takes
//! its pages first. What gets smaller by less than an eighth stays as it is. No page is tried
//! twice: compressed memory notes it.
//!
//! Where the last pages got hardly smaller, or where pages come back from swap areas so late that
//! no packing would have kept them, most chunks are logged there untried, and one in sixteen is
//! looked at; ever fewer, while those get hardly smaller either.
//!
//! It is done when compressed memory comes near its share, and while the program is idle
//! ([`crate::reclaim::idle`]).
//!
//! Owns: the buffers of one batch, and how much was saved lately.
//!
//! Invariant: what was copied out without the memory lock is replaced under it, and only if the
//! page's word and its chunk's epoch are what they were: so the slot still holds that page. The
//! slot, its shadow and its word stay as they are; a concurrent load finds the one form or
//! the other.

use std::ops::Range;

use swaptide_core::{SlotContent as TableSlot, SwapEntry};
use swaptide_ipc::Counter;
use swaptide_store::codec::{Choice, Compressor, Unpacker};
use swaptide_store::{Page, Slot};
use swaptide_sys::page::PAGE_SIZE;

use crate::backing::devices::POOL;
use crate::engine::{Engine, Mm};
use crate::mm::page_table::PageState;
use crate::mm::types::{ChunkNo, PAGES_PER_CHUNK, PageNo};

/// A batch is that many pages, and what more its last chunk has: few, because the thread has other
/// things to do.
const BATCH_PAGES: usize = 8;
/// Bytes that are moved to make room where there is none.
const HOLES_BYTES: usize = 256 << 10;
/// Chunks looked at for one batch.
const MAX_CHUNKS_PER_BATCH: usize = 64;
/// Saved bytes in 1/1024 of the tried ones, below which most chunks are left untried.
const MIN_SAVED_1024: u32 = 100;
/// One chunk in this many is tried: at first, and later on at the least.
const SAMPLE_EVERY_CHUNKS: u32 = 16;
const MAX_SAMPLE_EVERY_CHUNKS: u32 = 512;

struct RepackItem {
    page: PageNo,
    entry: SwapEntry,
    chunk: ChunkNo,
    epoch: u32,
    /// Its range in `tight`; `None` when it did not get smaller.
    tight: Option<Range<usize>>,
}

/// Compresses with zstd what stays in compressed memory.
pub struct Recompress {
    items: Vec<RepackItem>,
    packed: Vec<u8>,
    tight: Vec<u8>,
    plain: Box<Page>,
    /// Smoothed part of the bytes that was saved, in 1/1024.
    gain: u32,
    /// Chunks left untried since one was tried, and before one is.
    skipped: u32,
    every: u32,
}

impl Default for Recompress {
    fn default() -> Self {
        Self::new()
    }
}

impl Recompress {
    /// Empty buffers; they are made at first use.
    pub fn new() -> Recompress {
        Recompress {
            items: Vec::new(),
            packed: Vec::new(),
            tight: Vec::new(),
            plain: Box::new([0; PAGE_SIZE]),
            gain: 300,
            skipped: 0,
            every: SAMPLE_EVERY_CHUNKS,
        }
    }

    /// Looks at one batch. False when nothing has been in compressed memory for long, or zstd is
    /// not wanted.
    pub fn step(
        &mut self,
        engine: &Engine,
        compressor: &mut Compressor,
        unpacker: &mut Unpacker,
    ) -> bool {
        if engine.devices.scheme.choice != Choice::Both {
            return false;
        }
        self.items.clear();
        let mut looked = 0;
        {
            let mut guard = engine.mm.lock();
            let mm = &mut *guard;
            // A page that came back by now would have come back while it was resident in a program
            // that has twice the memory.
            let old = (mm.table.present() / 2) as u64;
            mm.put_back_young(&engine.devices);
            while looked < MAX_CHUNKS_PER_BATCH && self.items.len() < BATCH_PAGES {
                if mm
                    .oldest_not_recompressed(&engine.devices)
                    .is_some_and(|distance| distance < old)
                {
                    break;
                }
                let Some(chunk) = mm.queues.next_pooled(&mut mm.table) else { break };
                looked += 1;
                if (self.gain < MIN_SAVED_1024 || !mm.pool_sizer.tighter_helps())
                    && self.skipped < self.every
                {
                    self.skipped += 1;
                } else {
                    self.skipped = 0;
                    self.choose(engine, mm, chunk);
                }
                mm.queues.log_recompressed(&mut mm.table, chunk);
            }
        }
        self.compress(engine, compressor, unpacker);
        if !self.items.is_empty() {
            let tight = self.items.iter().filter(|item| item.tight.is_some()).count();
            self.every = if tight > self.items.len() / 4 {
                SAMPLE_EVERY_CHUNKS
            } else {
                (self.every * 2).min(MAX_SAMPLE_EVERY_CHUNKS)
            };
        }
        self.exchange(engine);
        looked > 0
    }

    /// Notes the pages of a chunk that are in compressed memory.
    fn choose(&mut self, engine: &Engine, mm: &Mm, chunk: ChunkNo) {
        let epoch = mm.table.chunk(chunk).epoch;
        for page in (0..PAGES_PER_CHUNK).map(|k| chunk.first().plus(k)) {
            if let PageState::Swapped(entry) = mm.table.get(page)
                && entry.ty() == POOL
                && matches!(
                    engine.devices.pool_slots.lookup(entry.offset()),
                    TableSlot::Shadow { .. }
                )
            {
                self.items.push(RepackItem { page, entry, chunk, epoch, tight: None });
            }
        }
    }

    /// Compresses copies of the pages. No lock is held; pages that were tried before are dropped
    /// from the batch.
    fn compress(&mut self, engine: &Engine, compressor: &mut Compressor, unpacker: &mut Unpacker) {
        let Recompress { items, packed, tight, plain, gain, .. } = self;
        tight.clear();
        items.retain_mut(|item| {
            packed.clear();
            if !engine.devices.pool.not_recompressed(Slot(item.entry.offset().0), packed) {
                return false;
            }
            // The fault path tells of damage when the page is needed.
            if unpacker.unpack(packed, &mut plain[..]).is_err() {
                return false;
            }
            let mut saved = 0;
            if let Some(bytes) = compressor.compress_tightly(plain, packed.len() / 8 * 7) {
                let start = tight.len();
                tight.extend_from_slice(bytes);
                item.tight = Some(start..tight.len());
                saved = packed.len() - bytes.len();
            }
            *gain = (*gain * 63 + (saved * 1024 / packed.len()) as u32) / 64;
            true
        });
    }

    /// Puts what got smaller in its place, where the page is still the one that was copied.
    fn exchange(&mut self, engine: &Engine) {
        let tried = self.items.len();
        if tried == 0 {
            return;
        }
        let (mut better, mut saved) = (0, 0);
        for is_last in [false, true] {
            let guard = engine.mm.lock();
            self.items.retain(|item| {
                if guard.table.get(item.page) != PageState::Swapped(item.entry)
                    || guard.table.chunk(item.chunk).epoch != item.epoch
                {
                    return false;
                }
                let bytes = item.tight.as_ref().map(|range| &self.tight[range.clone()]);
                let Ok(less) =
                    engine.devices.pool.replace_recompressed(Slot(item.entry.offset().0), bytes)
                else {
                    return true;
                };
                better += usize::from(bytes.is_some());
                saved += less;
                false
            });
            engine.publish_usage(&guard);
            drop(guard);
            if self.items.is_empty() || is_last {
                break;
            }
            // Compressed memory is at its bound, and what was replaced so far has left holes.
            engine.devices.pool.compact(HOLES_BYTES);
        }
        engine.count(Counter::Zswprecomp, better);
        engine.count(Counter::ZswprecompTried, tried);
        engine.count(Counter::ZswprecompSaved, saved);
    }
}
