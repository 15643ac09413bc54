//! What a batch knows of the pages it holds, and the batches that wait.
//!
//! The work on a batch is [`crate::reclaim::swap_out`]'s.
//!
//! Owns: the buffers of a batch. Locks: none; [`Jobs`] is guarded by the memory lock.

use std::collections::VecDeque;
use std::ops::Range;

use swaptide_core::SwapEntry;
use swaptide_store::Page;
use swaptide_sys::page::PAGE_SIZE;

use crate::mm::staging::{FrameNo, SlabNo};
use crate::mm::types::{ChunkNo, PAGES_PER_LEAF, PageNo};

/// Moves of one batch at most: each costs about a microsecond, more where another CPU runs the
/// program, and all happen under the lock.
pub(crate) const MAX_MOVES_PER_BATCH: usize = 128;

/// A chunk of the batch: its pages lie one after the other from `place` on.
#[derive(Clone, Copy)]
pub(crate) struct TakenChunk {
    pub(crate) chunk: ChunkNo,
    /// The number of pages to move.
    pub(crate) planned: u16,
    /// The number of pages moved; the kernel refused the others.
    pub(crate) moved: u16,
    /// Place in the slab of the first planned page.
    pub(crate) place: usize,
}

/// A folio on its way out.
#[derive(Clone, Copy)]
pub(crate) struct OutgoingFolio {
    pub(crate) place: usize,
    pub(crate) order: u8,
    pub(crate) entry: SwapEntry,
    pub(crate) chunk: ChunkNo,
}

/// A page on its way to a swap area.
pub(crate) struct BackingPage {
    pub(crate) frame: FrameNo,
    /// Its entry in compressed memory, which it leaves if a swap area takes it.
    pub(crate) entry: SwapEntry,
    /// The range of its bytes in `Batch::packed`; `None` if it is stored as it is in its frame.
    pub(crate) packed: Option<Range<usize>>,
    /// Its entry on a swap area, which has taken it.
    pub(crate) area_entry: Option<SwapEntry>,
}

/// One run of pages to move: program page, place in the slab, length, and which chunk of the batch
/// it begins in.
#[derive(Clone, Copy)]
pub(crate) struct MoveRun {
    pub(crate) page: PageNo,
    pub(crate) place: usize,
    pub(crate) len: usize,
    pub(crate) index: usize,
}

/// A set of places of the slab.
#[derive(Clone, Copy)]
pub(crate) struct Places(pub(crate) [u64; PAGES_PER_LEAF / 64]);

impl Places {
    pub(crate) const NONE: Places = Places([0; PAGES_PER_LEAF / 64]);

    pub(crate) fn add(&mut self, place: usize) {
        self.0[place / 64] |= 1 << (place % 64);
    }

    pub(crate) fn has(&self, place: usize) -> bool {
        self.0[place / 64] >> (place % 64) & 1 == 1
    }

    /// Returns a bit for each of `n` places (at most 64) from `first` on that is in the set.
    pub(crate) fn of(&self, first: usize, n: usize) -> u64 {
        (0..n).filter(|k| self.has(first + k)).fold(0, |bits, k| bits | 1 << k)
    }
}

/// Chunks on their way from the program to the devices.
pub struct Batch {
    pub(crate) slab: Option<SlabNo>,
    pub(crate) chunks: Vec<TakenChunk>,
    pub(crate) runs: Vec<MoveRun>,
    pub(crate) leaving: Vec<OutgoingFolio>,
    /// The number of pages moved to frames.
    pub(crate) pages: usize,
    /// Pages that do not compress, or that compressed memory refuses: they go to a swap area.
    pub(crate) to_area: Vec<BackingPage>,
    pub(crate) goes_to_area: Places,
    /// The bytes of those that are compressed.
    pub(crate) packed: Vec<u8>,
    /// Places whose page is all zeros.
    pub(crate) zeros: Places,
    /// Places whose page may be the same as what an old slot holds, with that slot's entry, in the
    /// order of `leaving`.
    pub(crate) kept: Vec<(usize, SwapEntry)>,
    /// Places that are the same: their old slots stand.
    pub(crate) unchanged: Places,
    /// The kernel refused a move because an event is unread.
    pub(crate) refused: bool,
    /// Chunks were looked for: neither is a change of mappings noted and not applied, nor was a
    /// slab missing.
    pub(crate) tried: bool,
    /// The buffer into which an old slot is loaded to be compared.
    pub(crate) old: Box<Page>,
}

impl Default for Batch {
    fn default() -> Self {
        Self::new()
    }
}

/// Batches that were taken and wait to be stored, and batches out of use.
#[derive(Default)]
#[allow(
    clippy::vec_box,
    reason = "a batch goes from hand to hand under the memory lock: a pointer is moved, not its \
        three hundred bytes"
)]
pub struct Jobs {
    pub(crate) waiting: VecDeque<Box<Batch>>,
    pub(crate) spare: Vec<Box<Batch>>,
    /// Pages between take and finish.
    pub in_flight: usize,
}

impl Jobs {
    /// The batch that waits longest.
    pub(crate) fn longest_waiting(&mut self) -> Option<Box<Batch>> {
        self.waiting.pop_front()
    }

    /// True when a batch waits.
    pub fn any(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// A batch to take with.
    pub(crate) fn blank(&mut self) -> Box<Batch> {
        self.spare.pop().unwrap_or_default()
    }

    /// The batch is taken: a worker, or the handler, is to store it.
    pub fn push(&mut self, batch: Box<Batch>) {
        self.waiting.push_back(batch);
    }

    /// The batch is of no use any more.
    pub(crate) fn retire(&mut self, batch: Box<Batch>) {
        self.spare.push(batch);
    }
}

impl Batch {
    /// An empty batch with its buffers.
    pub fn new() -> Batch {
        Batch {
            slab: None,
            chunks: Vec::with_capacity(64),
            runs: Vec::with_capacity(2 * MAX_MOVES_PER_BATCH),
            leaving: Vec::with_capacity(512),
            pages: 0,
            to_area: Vec::with_capacity(512),
            goes_to_area: Places::NONE,
            packed: Vec::new(),
            zeros: Places::NONE,
            kept: Vec::with_capacity(512),
            unchanged: Places::NONE,
            refused: false,
            tried: false,
            old: Box::new([0; PAGE_SIZE]),
        }
    }

    /// The number of pages moved.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// True when the kernel refused a move because an event is unread.
    pub fn refused(&self) -> bool {
        self.refused
    }

    /// True when chunks were looked for at all.
    pub fn tried(&self) -> bool {
        self.tried
    }
}
