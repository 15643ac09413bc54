//! The engine's page table: what every managed page of the program is.
//!
//! Owns: one word for each page of the 64 KiB in use and one [`Chunk`] for each of them, under a
//! directory by address.
//!
//! Invariants
//! 1. A page's word is `Present` or `PresentClean` only between the moment its presence was
//!    established (a scan at adoption, a fill by a handler) and the moment it is taken out or given
//!    up. A page whose word is neither is never taken out, whatever the kernel maps there.
//! 2. A chunk's masks of present and swapped pages are derived from its words by [`PageTable::set`]
//!    alone; `shared` and `own` are told, and hold present pages only.
//! 3. A chunk with present pages stands in the queue of resident chunks, or all its present pages
//!    are shared and it stands in that of shared ones ([`crate::mm::lru`]).
//! 4. `epoch` of a chunk changes whenever one of its words changes from or to `Swapped`: a value
//!    read before a piece of unlocked work and found again after it proves that the swap entries of
//!    the chunk are the same *and* stand for the same data.
//!
//! Locks: none; the table lies inside the engine's memory lock.

use swaptide_core::{SwapEntry, SwapType};
use swaptide_sys::mem::prefetch;
use swaptide_sys::page::PAGE_SIZE;

use crate::mm::heat::ChunkHeat;
use crate::mm::types::{
    CHUNKS_PER_LEAF, ChunkNo, MANAGED_END, PAGES_PER_CHUNK, PAGES_PER_LEAF, PageNo,
};

const LEAVES_PER_MID: usize = 8192;
const MAX_MIDS: usize = 8192;
const _: () = assert!(MAX_MIDS * LEAVES_PER_MID * PAGES_PER_LEAF * PAGE_SIZE == MANAGED_END.0);

/// The state of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageState {
    /// Never filled, or given up by the program: the next touch gets zeros.
    Empty,
    /// The program has it.
    Present,
    /// The program has it, and the slot of the swap entry still holds what it was when it was
    /// brought in: if it has not been written since, it needs no second compression when it goes
    /// out again.
    PresentClean(SwapEntry),
    /// Its data is where the swap entry says.
    Swapped(SwapEntry),
    /// Its data could not be brought back; the page is poisoned in the program.
    Poisoned,
}

const EMPTY: u32 = 0;
const PRESENT: u32 = 1;
const POISONED: u32 = 2;
const SWAPPED: u32 = 2 << 30;
const PRESENT_CLEAN: u32 = 3 << 30;
const KIND: u32 = 3 << 30;

fn is_present(word: u32) -> bool {
    word == PRESENT || word & KIND == PRESENT_CLEAN
}

fn is_swapped(word: u32) -> bool {
    word & KIND == SWAPPED
}

impl Chunk {
    /// Pages that are present and not known to be shared: those that can be moved out.
    pub(crate) fn movable(&self) -> u16 {
        self.present & !self.shared
    }
}

impl PageState {
    fn word(self) -> u32 {
        match self {
            PageState::Empty => EMPTY,
            PageState::Present => PRESENT,
            PageState::Poisoned => POISONED,
            PageState::PresentClean(entry) => PRESENT_CLEAN | entry.raw(),
            PageState::Swapped(entry) => SWAPPED | entry.raw(),
        }
    }

    fn of(word: u32) -> PageState {
        match word {
            EMPTY => PageState::Empty,
            PRESENT => PageState::Present,
            POISONED => PageState::Poisoned,
            other => {
                let entry = SwapEntry::from_raw(other & !KIND).expect("a word made from an entry");
                if is_swapped(other) {
                    PageState::Swapped(entry)
                } else {
                    PageState::PresentClean(entry)
                }
            }
        }
    }
}

/// The state of a chunk of 64 KiB.
#[derive(Clone, Copy, Default, Debug)]
pub struct Chunk {
    /// Pages that are present.
    pub present: u16,
    /// Pages that are swapped.
    pub swapped: u16,
    /// Pages that are present and that another process has, too, since a fork, as far as is known:
    /// the kernel did not move them. Told by [`PageTable::share`].
    pub shared: u16,
    /// Pages that are present and were faulted for writing since the last fork: what keeps one of
    /// them from being moved is no sharing. Told by [`PageTable::make_own`].
    pub own: u16,
    /// See the module's fourth invariant; drawn from one count for the whole table, so that no two
    /// changes share a value.
    pub epoch: u32,
    /// Which of its pages stay when the others go.
    pub heat: ChunkHeat,
    /// [`QUEUED`], [`POOL_LOGGED`], [`UNMOVABLE`], [`CLEAN_LOGGED`], [`RECOMPRESSED_LOGGED`],
    /// [`SHARED_LOGGED`], [`OWN_LOGGED`], [`AREA_CLEAN_LOGGED`].
    pub flags: u8,
    /// Words that are not empty.
    used: u8,
}

/// The chunk stands in the queue of resident chunks.
pub(crate) const QUEUED: u8 = 1;
/// The chunk stands in the log of chunks that went to compressed memory.
pub(crate) const POOL_LOGGED: u8 = 2;
/// Moving the chunk out failed for a reason that lasts (locked memory, protection).
pub(crate) const UNMOVABLE: u8 = 4;
/// The chunk stands in the log of chunks of which copies are kept.
pub(crate) const CLEAN_LOGGED: u8 = 8;

/// The chunk stands in the log of chunks that were in compressed memory for long (see
/// `crate::reclaim::recompress`).
pub(crate) const RECOMPRESSED_LOGGED: u8 = 16;
/// The chunk stands in the queue of chunks with shared pages.
pub(crate) const SHARED_LOGGED: u8 = 32;
/// The chunk stands in the list of chunks with pages that were made this process's own.
pub(crate) const OWN_LOGGED: u8 = 64;
/// The chunk stands in the log of chunks of which copies are kept on swap areas.
pub(crate) const AREA_CLEAN_LOGGED: u8 = 128;
/// The chunk stands in some queue, where its flag must be found again.
const LISTED: u8 = QUEUED
    | POOL_LOGGED
    | CLEAN_LOGGED
    | RECOMPRESSED_LOGGED
    | SHARED_LOGGED
    | OWN_LOGGED
    | AREA_CLEAN_LOGGED;

/// 64 KiB: what the table is made of, so that memory touched here and there costs little.
struct Cell {
    words: [u32; PAGES_PER_CHUNK],
    chunk: Chunk,
}

type Leaf = [Option<Box<Cell>>; CHUNKS_PER_LEAF];

type Mid = Vec<Option<Box<Leaf>>>;

/// A word for each managed page, in chunks, each with its masks and heat.
pub struct PageTable {
    top: Vec<Option<Mid>>,
    present: usize,
    swapped: usize,
    kept: usize,
    shared: usize,
    leaves: usize,
    cells: usize,
    epoch: u32,
}

impl Default for PageTable {
    fn default() -> Self {
        Self::new()
    }
}

impl PageTable {
    /// An empty table for the 47 bits of a program's addresses. Pages above ([`MANAGED_END`]) are
    /// `Empty` and cannot be set to anything else.
    pub fn new() -> PageTable {
        let mut top = Vec::new();
        top.resize_with(MAX_MIDS, || None);
        PageTable { top, present: 0, swapped: 0, kept: 0, shared: 0, leaves: 0, cells: 0, epoch: 0 }
    }

    /// Pages that are present.
    pub fn present(&self) -> usize {
        self.present
    }

    /// Pages that are swapped.
    pub fn swapped(&self) -> usize {
        self.swapped
    }

    /// Pages that are present and of which a slot holds a copy.
    pub(crate) fn clean_copies(&self) -> usize {
        self.kept
    }

    /// Pages that are present and known to be shared.
    pub fn shared(&self) -> usize {
        self.shared
    }

    /// The kernel did not move a present page: another process has it, too.
    pub fn share(&mut self, page: PageNo) {
        let bit = 1u16 << page.in_chunk();
        let mut marked = 0;
        self.update(page.chunk(), |chunk| {
            marked = usize::from(chunk.movable() & bit != 0);
            chunk.shared |= chunk.present & bit;
        });
        self.shared += marked;
    }

    /// Nothing is known of a chunk's pages being shared any more; gives those that were.
    pub(crate) fn unshare(&mut self, chunk: ChunkNo) -> u16 {
        let mut were = 0;
        self.update(chunk, |chunk| were = std::mem::take(&mut chunk.shared));
        self.shared -= were.count_ones() as usize;
        were
    }

    /// Pages of a chunk were faulted for writing: those that are present are this process's own,
    /// until [`PageTable::forget_own`].
    pub(crate) fn make_own(&mut self, chunk: ChunkNo, pages: u16) {
        self.update(chunk, |chunk| chunk.own |= chunk.present & pages);
    }

    /// A fork shares all pages again: which of a chunk are this process's own is unknown.
    pub(crate) fn forget_own(&mut self, chunk: ChunkNo) {
        self.update(chunk, |chunk| chunk.own = 0);
    }

    /// Bytes of the table itself.
    pub fn bytes(&self) -> usize {
        self.leaves * size_of::<Leaf>() + self.cells * size_of::<Cell>()
    }

    fn cell(&self, chunk: ChunkNo) -> Option<&Cell> {
        let leaf = chunk.0 / CHUNKS_PER_LEAF;
        let mid = self.top.get(leaf / LEAVES_PER_MID)?.as_ref()?;
        mid[leaf % LEAVES_PER_MID].as_ref()?[chunk.0 % CHUNKS_PER_LEAF].as_deref()
    }

    fn cell_mut(&mut self, chunk: ChunkNo) -> &mut Cell {
        let leaf = chunk.0 / CHUNKS_PER_LEAF;
        let mid = self.top[leaf / LEAVES_PER_MID].get_or_insert_with(|| {
            let mut mid = Vec::new();
            mid.resize_with(LEAVES_PER_MID, || None);
            mid
        });
        let leaves = &mut self.leaves;
        let leaf = mid[leaf % LEAVES_PER_MID].get_or_insert_with(|| {
            *leaves += 1;
            Box::new([const { None }; CHUNKS_PER_LEAF])
        });
        let cells = &mut self.cells;
        leaf[chunk.0 % CHUNKS_PER_LEAF].get_or_insert_with(|| {
            *cells += 1;
            Box::new(Cell { words: [EMPTY; PAGES_PER_CHUNK], chunk: Chunk::default() })
        })
    }

    /// What a page is.
    pub fn get(&self, page: PageNo) -> PageState {
        self.cell(page.chunk())
            .map_or(PageState::Empty, |cell| PageState::of(cell.words[page.in_chunk()]))
    }

    /// Prefetches what leads to the word of a page that will be looked at soon.
    /// [`PageTable::prefetch_word`], a little later, does not wait for it then.
    pub(crate) fn prefetch_leaf(&self, page: PageNo) {
        let number = page.0 / PAGES_PER_LEAF;
        if let Some(Some(mid)) = self.top.get(number / LEAVES_PER_MID)
            && let Some(leaf) = &mid[number % LEAVES_PER_MID]
        {
            prefetch(&leaf[page.chunk().0 % CHUNKS_PER_LEAF]);
        }
    }

    /// Prefetches the word and the chunk of a page that will be looked at soon.
    pub(crate) fn prefetch_word(&self, page: PageNo) {
        if let Some(cell) = self.cell(page.chunk()) {
            prefetch(&cell.words[page.in_chunk()]);
            prefetch(&cell.chunk);
        }
    }

    /// Changes what a page is; gives what it was.
    pub fn set(&mut self, page: PageNo, state: PageState) -> PageState {
        let word = state.word();
        if word == EMPTY && self.cell(page.chunk()).is_none() {
            return PageState::Empty;
        }
        let epoch = self.epoch.wrapping_add(1);
        let cell = self.cell_mut(page.chunk());
        let old = std::mem::replace(&mut cell.words[page.in_chunk()], word);
        if old == word {
            return state;
        }
        let bit = 1u16 << page.in_chunk();
        let chunk = &mut cell.chunk;
        chunk.used = chunk.used + u8::from(old == EMPTY) - u8::from(word == EMPTY);
        chunk.present = chunk.present & !bit | if is_present(word) { bit } else { 0 };
        chunk.swapped = chunk.swapped & !bit | if is_swapped(word) { bit } else { 0 };
        // A page that stays present stays with the processes that have it.
        let left = is_present(old) && !is_present(word);
        let was_shared = usize::from(left && chunk.shared & bit != 0);
        if left {
            chunk.shared &= !bit;
            chunk.own &= !bit;
            chunk.heat.end_rounds(bit);
        }
        if word == EMPTY {
            chunk.heat.forget(bit);
        }
        if is_swapped(old) || is_swapped(word) {
            chunk.epoch = epoch;
        }
        let unused = chunk.used == 0;
        self.epoch = epoch;
        self.shared -= was_shared;
        self.present = self.present + usize::from(is_present(word)) - usize::from(is_present(old));
        self.swapped = self.swapped + usize::from(is_swapped(word)) - usize::from(is_swapped(old));
        self.kept = self.kept + usize::from(word & KIND == PRESENT_CLEAN)
            - usize::from(old & KIND == PRESENT_CLEAN);
        if unused {
            self.drop_cell(page.chunk());
        }
        PageState::of(old)
    }

    /// A cell without a used word goes, unless its chunk still stands in a queue, where its flag
    /// must be found again.
    fn drop_cell(&mut self, chunk: ChunkNo) {
        if self.cell(chunk).is_none_or(|cell| cell.chunk.flags & LISTED != 0) {
            return;
        }
        let number = chunk.0 / CHUNKS_PER_LEAF;
        if let Some(mid) = &mut self.top[number / LEAVES_PER_MID]
            && let Some(leaf) = &mut mid[number % LEAVES_PER_MID]
        {
            leaf[chunk.0 % CHUNKS_PER_LEAF] = None;
            self.cells -= 1;
            if leaf.iter().all(Option::is_none) {
                mid[number % LEAVES_PER_MID] = None;
                self.leaves -= 1;
            }
        }
    }

    /// Returns the state of a chunk.
    pub fn chunk(&self, chunk: ChunkNo) -> Chunk {
        self.cell(chunk).map_or(Chunk::default(), |cell| cell.chunk)
    }

    /// True when a page of a chunk is present and a slot of that type holds a copy of it.
    pub(crate) fn has_copy_on(&self, chunk: ChunkNo, ty: SwapType) -> bool {
        let is_copy = |word: &u32| match PageState::of(*word) {
            PageState::PresentClean(entry) => entry.ty() == ty,
            _ => false,
        };
        self.cell(chunk).is_some_and(|cell| cell.words.iter().any(is_copy))
    }

    /// True when something is known of a chunk: then it has flags.
    pub(crate) fn is_used(&self, chunk: ChunkNo) -> bool {
        self.cell(chunk).is_some()
    }

    /// Changes a chunk's heat and flags. Without effect on one of which nothing is known.
    pub fn update(&mut self, chunk: ChunkNo, change: impl FnOnce(&mut Chunk)) {
        if self.cell(chunk).is_some() {
            let cell = self.cell_mut(chunk);
            change(&mut cell.chunk);
            if cell.chunk.used == 0 {
                self.drop_cell(chunk);
            }
        }
    }

    /// The first page at or after `page` and (roughly) before `end` whose chunk is in use: lets a
    /// walk skip what is empty.
    pub fn next_used(&self, page: PageNo, end: PageNo) -> Option<PageNo> {
        let mut leaf = page.0 / PAGES_PER_LEAF;
        let last = end.0.div_ceil(PAGES_PER_LEAF);
        while leaf < last {
            match self.top.get(leaf / LEAVES_PER_MID)? {
                None => leaf = (leaf / LEAVES_PER_MID + 1) * LEAVES_PER_MID,
                Some(mid) if mid[leaf % LEAVES_PER_MID].is_none() => leaf += 1,
                Some(mid) => {
                    let first = PageNo((leaf * PAGES_PER_LEAF).max(page.0));
                    let cells = mid[leaf % LEAVES_PER_MID].as_deref().into_iter().flatten();
                    let used = cells
                        .enumerate()
                        .skip(first.chunk().0 % CHUNKS_PER_LEAF)
                        .find(|(_, cell)| cell.is_some());
                    match used {
                        Some((at, _)) => {
                            return Some(PageNo(
                                (leaf * PAGES_PER_LEAF + at * PAGES_PER_CHUNK).max(page.0),
                            ));
                        }
                        None => leaf += 1,
                    }
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_record_outlives_the_way_out_and_back_and_ends_with_the_data() {
        let entry = SwapEntry::new(SwapType::new(0).unwrap(), swaptide_core::SwapOffset(7));
        let (page, neighbour) = (PageNo(1603), PageNo(1604));
        let (chunk, bit) = (page.chunk(), page.bit());
        let mut table = PageTable::new();
        table.set(neighbour, PageState::Present);
        table.set(page, PageState::Swapped(entry));
        table.update(chunk, |chunk| {
            chunk.heat.came_soon(bit);
            chunk.heat.stay_by_record(bit);
        });
        table.set(page, PageState::Present);
        let mut stays = 0;
        table.update(chunk, |chunk| stays = chunk.heat.pass_over(u16::MAX));
        assert_eq!(stays, bit, "its rounds came in with it, and its neighbour has none");
        table.update(chunk, |chunk| chunk.heat.second_chance(bit));
        table.set(page, PageState::Swapped(entry));
        let mut heat = table.chunk(chunk).heat;
        assert!(heat.has_record(bit) && heat.pass_over(bit) == 0, "rounds end when it goes");
        table.set(page, PageState::Empty);
        assert!(!table.chunk(chunk).heat.has_record(bit), "what comes there is something else");
    }

    #[test]
    fn any_page_may_be_prefetched_and_none_is_made() {
        let mut table = PageTable::new();
        table.set(PageNo(5000), PageState::Present);
        let (cells, leaves) = (table.cells, table.leaves);
        for page in [0, 4999, 5000, 5000 + PAGES_PER_LEAF, usize::MAX / PAGE_SIZE] {
            table.prefetch_leaf(PageNo(page));
            table.prefetch_word(PageNo(page));
        }
        assert_eq!((table.cells, table.leaves), (cells, leaves));
        assert_eq!(table.get(PageNo(5000)), PageState::Present);
    }

    proptest! {
        #[test]
        fn the_table_is_a_map_and_its_masks_and_sums_agree(
            ops in prop::collection::vec((0usize..3000, 0u32..9), 1..400),
        ) {
            let mut table = PageTable::new();
            let mut model = BTreeMap::new();
            let mut shared = std::collections::BTreeSet::new();
            let mut own = std::collections::BTreeSet::new();
            for (page, kind) in ops {
                let is_present = matches!(
                    model.get(&page),
                    Some(PageState::Present | PageState::PresentClean(_))
                );
                if kind >= 7 {
                    table.make_own(PageNo(page).chunk(), 1 << PageNo(page).in_chunk());
                    own.extend(is_present.then_some(page));
                    if kind == 8 {
                        table.forget_own(PageNo(page).chunk());
                        own.retain(|other| other / 16 != page / 16);
                    }
                    continue;
                }
                if kind >= 5 {
                    table.share(PageNo(page));
                    shared.extend(is_present.then_some(page));
                    if kind == 6 {
                        let were = table.unshare(PageNo(page).chunk());
                        let chunk = page / 16 * 16;
                        prop_assert_eq!(
                            were,
                            (0..16)
                                .filter(|i| shared.contains(&(chunk + i)))
                                .fold(0u16, |m, i| m | 1 << i)
                        );
                        shared.retain(|page| !(chunk..chunk + 16).contains(page));
                    }
                    continue;
                }
                let state = match kind {
                    0 => PageState::Empty,
                    1 => PageState::Present,
                    2 => PageState::Poisoned,
                    3 => PageState::PresentClean(
                        SwapEntry::from_raw(page as u32 * 5).expect("an entry"),
                    ),
                    _ => {
                        PageState::Swapped(SwapEntry::from_raw(page as u32 * 7).expect("an entry"))
                    }
                };
                let old = table.set(PageNo(page), state);
                if is_present && !matches!(state, PageState::Present | PageState::PresentClean(_)) {
                    shared.remove(&page);
                    own.remove(&page);
                }
                let expected = if state == PageState::Empty {
                    model.remove(&page)
                } else {
                    model.insert(page, state)
                };
                prop_assert_eq!(old, expected.unwrap_or(PageState::Empty));
            }
            for page in 0..3000 {
                prop_assert_eq!(
                    table.get(PageNo(page)),
                    model.get(&page).copied().unwrap_or(PageState::Empty)
                );
            }
            prop_assert_eq!(table.shared(), shared.len());
            for chunk in 0..3000 / 16 {
                let info = table.chunk(ChunkNo(chunk));
                let mask_of = |set: &std::collections::BTreeSet<usize>| {
                    (0..16)
                        .filter(|i| set.contains(&(chunk * 16 + i)))
                        .fold(0u16, |m, i| m | 1 << i)
                };
                let mask = mask_of(&shared);
                prop_assert!(
                    info.shared == mask
                        && info.movable() == info.present & !mask
                        && info.own == mask_of(&own)
                );
            }
            prop_assert_eq!(
                table.present(),
                model
                    .values()
                    .filter(|s| matches!(s, PageState::Present | PageState::PresentClean(_)))
                    .count()
            );
            prop_assert_eq!(
                table.clean_copies(),
                model.values().filter(|s| matches!(s, PageState::PresentClean(_))).count()
            );
            prop_assert_eq!(
                table.swapped(),
                model.values().filter(|s| matches!(s, PageState::Swapped(_))).count()
            );
            for chunk in 0..3000 / 16 {
                let mask = (0..16)
                    .filter(|i| {
                        matches!(
                            model.get(&(chunk * 16 + i)),
                            Some(PageState::Present | PageState::PresentClean(_))
                        )
                    })
                    .fold(0u16, |m, i| m | 1 << i);
                prop_assert_eq!(table.chunk(ChunkNo(chunk)).present, mask);
            }
            let mut at = PageNo(0);
            let mut walked = 0;
            while let Some(page) = table.next_used(at, PageNo(3000)) {
                walked += usize::from(model.contains_key(&page.0));
                at = page.plus(1);
            }
            prop_assert_eq!(walked, model.len());
        }
    }
}
