//! What the memory lock guards: the page table, the managed ranges, the staging frames and the
//! orders of reclaim, of one process.
//!
//! Locks: none of its own; the engine's memory lock is around all of it.

use swaptide_core::{FolioId, Shadow, SlotContent as TableSlot, SwapEntry};
use swaptide_sys::page::VirtRange;

use crate::backing::devices::{AREA, Devices, POOL};
use crate::memcg::pool_sizing::PoolSizer;
use crate::memcg::thrash::ThrashDetector;
use crate::mm::batch::Jobs;
use crate::mm::busy::Busy;
use crate::mm::change_order::LateChanges;
use crate::mm::fault_hold::FaultHold;
use crate::mm::heat::is_soon;
use crate::mm::lru::Queues;
use crate::mm::page_table::{PageState, PageTable};
use crate::mm::staging::{FrameNo, Staging};
use crate::mm::types::{ChunkNo, PAGES_PER_CHUNK, PAGES_PER_LEAF, PageNo};
use crate::mm::vma_change::VmaChange;
use crate::mm::vma_set::VmaSet;
use crate::sched::handed::Handed;

/// Chunks put back at a time.
const MAX_CHUNKS_PUT_BACK: usize = 8;
/// Bits of a shadow's clock.
const SHADOW_MASK: u32 = (1 << 28) - 1;
/// Pages of one step of a shadow's clock.
const SHADOW_STEP_PAGES: u64 = 8;

/// The owners of the staging frames. It has entries for the frames that were ever used
/// ([`Mm::reach`]); untouched memory costs nothing.
pub struct FrameOwners {
    /// For each frame in use: its page.
    pub owner: Vec<PageNo>,
    /// For the first frame of each folio in the swap cache: its first swap entry.
    pub base: Vec<SwapEntry>,
    /// For each frame in use: the entry whose slot may hold the same data from before, if any.
    pub kept: Vec<Option<SwapEntry>>,
}

/// Changes of mappings between the kernel and the page table.
pub struct VmaChanges {
    /// Some were read and are noted by the handler, not applied: the kernel does not refuse moves
    /// for them any more, and where a word says that a page is, another may be. Nothing is taken
    /// out.
    pub behind: bool,
    /// Those that were read before one that happened earlier (see [`crate::events::apply`]).
    pub late: LateChanges,
    /// Old places of moves that were read, until it was read as well that they were left (see
    /// [`crate::events::apply`]).
    pub owed: Vec<VirtRange>,
    /// Old places of moves of managed memory that are still mapped, or were not yet told to be
    /// left, as long as they are not managed themselves: what keeps them out of forks is swaptide's
    /// advice, not the program's. Only where forks are followed.
    pub left: VmaSet,
    /// What was kept out of forks though it may have been the program's own by then.
    pub closed_in_doubt: VmaSet,
    /// Those that were applied since a moment in which none was under way: a child whose fork is
    /// read later may not have them (see [`crate::fork::layout`]).
    pub recent: Vec<VmaChange>,
}

/// Counts of pages and forks that serve as clocks.
#[derive(Default)]
pub struct MmClocks {
    /// Pages taken out so far: what shadows hold, in steps of [`SHADOW_STEP_PAGES`].
    pub evicted: u64,
    /// Pages that became the program's so far.
    pub arrived: u64,
    /// Of those, how many have had pages copied for them that a fork had left shared.
    pub copied_for: u64,
    /// Raised at each fork: what was made own before it is no longer.
    pub forks: u32,
}

/// The state that the memory lock guards.
pub struct Mm {
    /// The state of every page.
    pub table: PageTable,
    /// Ranges that are registered and listed in `table`.
    pub regions: VmaSet,
    /// Mappings that are registered, or about to be, and not listed in `regions` (see
    /// [`crate::vma::adopt`]): nothing is taken out there.
    pub armed: VmaSet,
    /// Frames that pages are moved through, full and empty ones.
    pub staging: Staging,
    /// The owner of each frame.
    pub frames: FrameOwners,
    /// The order in which chunks go out, are compressed again and are written back.
    pub queues: Queues,
    /// A range that is being detached: nothing of it is taken out.
    pub held: VirtRange,
    /// Changes of mappings that were read and wait for others.
    pub changes: VmaChanges,
    /// Batches on their way.
    pub jobs: Jobs,
    /// Decides, by refaults, on the division between resident and compressed memory.
    pub pool_sizer: PoolSizer,
    /// Counts of pages and forks, by which distances are measured.
    pub clocks: MmClocks,
    /// Pages that threads must get to use.
    pub fault_hold: FaultHold,
    /// Detects, by refaults, that the program makes no progress.
    pub(crate) thrash: ThrashDetector,
    /// Messages that fault servers have read for the handler.
    pub(crate) handed: Handed,
    /// The pages that threads work on without the lock.
    pub(crate) busy: Busy,
}

impl Mm {
    /// All that may have the `MADV_DONTFORK` advice against forks that are not followed
    /// ([`crate::mm::dontfork`]).
    pub(crate) fn dontfork_ranges(&self) -> impl Iterator<Item = VirtRange> + '_ {
        let changes = &self.changes;
        let left = changes.left.iter().chain(changes.owed.iter().copied());
        self.regions.iter().chain(self.armed.iter()).chain(left)
    }

    /// Makes room for what is known of the frames before `end`. The memory is reserved: nothing is
    /// allocated.
    pub fn reach(&mut self, end: FrameNo) {
        let end = end.0 as usize;
        if self.frames.owner.len() < end {
            let frames = end.next_multiple_of(PAGES_PER_LEAF);
            self.frames.owner.resize(frames, PageNo(0));
            self.frames.base.resize(frames, crate::backing::devices::NO_ENTRY);
            self.frames.kept.resize(frames, None);
        }
    }

    /// Looks again which pages of a chunk are shared with other processes. Gives those that were
    /// known as such and no longer are: a write fault on one of them copies nothing, and after it
    /// the kernel moves the page.
    pub(crate) fn review(&mut self, chunk: ChunkNo) -> u16 {
        let were = self.table.unshare(chunk);
        if were == 0 {
            return 0;
        }
        let own = were & self.staging.owned(chunk);
        for page in (0..PAGES_PER_CHUNK)
            .filter(|at| (were & !own) >> at & 1 == 1)
            .map(|at| chunk.first().plus(at))
        {
            self.table.share(page);
        }
        if were != own {
            self.queues.shared(&mut self.table, chunk);
        }
        own
    }

    /// The staging frame that holds the page of a swap entry whose slot holds a folio.
    pub(crate) fn frame_of(&self, entry: SwapEntry, folio: FolioId) -> FrameNo {
        let base = self.frames.base[folio.0 as usize];
        let step = entry.offset().0.wrapping_sub(base.offset().0);
        if base.ty() != entry.ty() || step >= 512 {
            crate::fatal(&format!(
                "entry {entry:?} names folio {folio:?}, whose entries start at {base:?}"
            ));
        }
        FrameNo(folio.0 + step)
    }

    /// A page is the program's again (or for the first time).
    pub(crate) fn mark_present(&mut self, page: PageNo) {
        self.clocks.arrived += 1;
        self.table.set(page, PageState::Present);
        self.queues.arrived(&mut self.table, page.chunk());
    }

    /// A page is the program's again and its slot stays as it is.
    pub(crate) fn mark_clean(&mut self, page: PageNo, entry: SwapEntry) {
        self.clocks.arrived += 1;
        self.table.set(page, PageState::PresentClean(entry));
        self.queues.arrived(&mut self.table, page.chunk());
        if entry.ty() == POOL {
            self.queues.log_clean(&mut self.table, page.chunk());
        } else {
            self.queues.log_clean_on_areas(&mut self.table, page.chunk(), entry.ty());
        }
    }

    /// The number of pages evicted since the page of an entry; `None` if its slot holds a folio.
    pub(crate) fn refault_distance(&self, devices: &Devices, entry: SwapEntry) -> Option<u64> {
        match devices.slots(entry.ty()).lookup(entry.offset()) {
            TableSlot::Shadow { shadow, .. } => Some(self.age(shadow)),
            _ => None,
        }
    }

    /// A swapped page comes back after `distance` others went out: notes how long it is to stay.
    /// `is_asked`: a thread waits for it. True if it stays for its record's sake.
    pub(crate) fn came_back(&mut self, page: PageNo, distance: u64, is_asked: bool) -> bool {
        let is_soon = is_soon(distance, self.table.present());
        let (bit, records) = (page.bit(), &mut self.queues.records);
        let mut stays = false;
        self.table.update(page.chunk(), |chunk| {
            stays = chunk.heat.came_back(bit, is_soon, is_asked, records);
        });
        stays
    }

    /// The number of pages evicted since the page with this shadow.
    pub fn age(&self, shadow: Shadow) -> u64 {
        u64::from(self.shadow().0.wrapping_sub(shadow.0) & SHADOW_MASK) * SHADOW_STEP_PAGES
    }

    /// The distance of the page that went to compressed memory longest ago; 0 when that is not
    /// known.
    pub(super) fn oldest_pooled(&self, devices: &Devices) -> u64 {
        let pages = self
            .queues
            .oldest_pooled()
            .flat_map(|chunk| (0..PAGES_PER_CHUNK).map(move |k| chunk.first().plus(k)));
        pages
            .filter_map(|page| match self.table.get(page) {
                PageState::Swapped(entry) if entry.ty() == POOL => {
                    self.refault_distance(devices, entry)
                }
                _ => None,
            })
            .next()
            .unwrap_or(0)
    }

    /// The distance of the page that went to compressed memory longest ago of those that were not
    /// looked at since; `None` when that is not known.
    pub(crate) fn oldest_not_recompressed(&self, devices: &Devices) -> Option<u64> {
        self.queues
            .oldest_not_recompressed()
            .filter_map(|chunk| self.pooled_for(devices, chunk))
            .max()
    }

    /// The distance of the page of a chunk that went to compressed memory longest ago, 0 when it is
    /// on its way; `None` when none is there.
    fn pooled_for(&self, devices: &Devices, chunk: ChunkNo) -> Option<u64> {
        let pages = (0..PAGES_PER_CHUNK).map(|k| chunk.first().plus(k));
        pages
            .filter_map(|page| match self.table.get(page) {
                PageState::Swapped(entry) if entry.ty() == POOL => {
                    Some(self.refault_distance(devices, entry).unwrap_or(0))
                }
                _ => None,
            })
            .max()
    }

    /// Puts chunks that stand at the old end of those not recompressed for pages that have been
    /// back meanwhile behind the others, and drops those that have nothing in compressed memory any
    /// more. Such a chunk is younger than some further back; were it left, nothing behind it would
    /// be old enough to be looked at.
    pub(crate) fn put_back_young(&mut self, devices: &Devices) {
        let mut oldest = None;
        for _ in 0..MAX_CHUNKS_PUT_BACK {
            let Some(first) = self.queues.oldest_not_recompressed().next() else { return };
            let Some(age) = self.pooled_for(devices, first) else {
                self.queues.next_pooled(&mut self.table);
                continue;
            };
            let oldest = *oldest.get_or_insert_with(|| {
                self.queues
                    .not_recompressed_further_back()
                    .filter_map(|chunk| self.pooled_for(devices, chunk))
                    .max()
            });
            if Some(age) >= oldest {
                return;
            }
            self.queues.put_back_first();
        }
    }

    /// The shadow of what goes out now.
    pub fn shadow(&self) -> Shadow {
        Shadow((self.clocks.evicted / SHADOW_STEP_PAGES) as u32 & SHADOW_MASK)
    }

    /// Writes the entry of a page whose data moved from compressed memory to a swap area. The old
    /// slot is the caller's to free.
    pub(crate) fn moved_to_area(&mut self, page: PageNo, entry: SwapEntry) {
        debug_assert_eq!(entry.ty(), AREA);
        self.table.set(page, PageState::Swapped(entry));
    }
}
