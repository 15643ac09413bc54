//! One region: where each of its pages is, and what is known of its use.
//!
//! Owns: the memory file, the state of every page, and per 64 KiB (a chunk) the marks of the queue.
//! The counts are the states', summed up.
//!
//! Invariants
//! 1. A page whose state is `Zero`, `Pool`, `Area` or `Lost` is a hole of the memory file; one that
//!    is `Present` or `Leaving` is none, but where a program has punched it itself.
//! 2. A page in state `Pool` or `Area` has its data there, at the slot of its number; in any other
//!    state nothing is there.
//! 3. A chunk's epoch changes whenever one of its pages goes out or comes in; a page's departures
//!    whenever it goes out.
//!
//! Locks: none; the pager's state holds it.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use swaptide_engine::mm::heat::{ChunkHeat, RecordWatch, is_soon};
use swaptide_engine::mm::types::PAGES_PER_CHUNK;
use swaptide_engine::readahead::locality::{Locality, Reading};
use swaptide_store::Slot;
use swaptide_sys::maps::DeviceNumber;

/// A region, by its memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId {
    /// The device of memory files: another file system may have a file with the same inode and
    /// name.
    pub device: DeviceNumber,
    /// Inode of the memory file.
    pub inode: u64,
}

impl RegionId {
    /// That of a memory file.
    pub fn of(memory: &File) -> std::io::Result<RegionId> {
        let file = memory.metadata()?;
        Ok(RegionId { device: DeviceNumber::of_number(file.dev()), inode: file.ino() })
    }
}

/// The location of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RegionPage {
    /// It was never touched, or was given up: zeros.
    Absent,
    /// In the memory file.
    Present,
    /// In the memory file, write-protected everywhere, on its way out.
    Leaving,
    /// Out, and all zeros.
    Zero,
    /// Out, in compressed memory.
    Pool,
    /// Out, on a swap area.
    Area,
    /// The stored page could not be brought back.
    Lost,
}

impl RegionPage {
    /// Out, and to be brought back when it is touched.
    pub(crate) fn is_out(self) -> bool {
        matches!(self, RegionPage::Zero | RegionPage::Pool | RegionPage::Area)
    }

    /// In the memory file.
    pub fn is_in(self) -> bool {
        matches!(self, RegionPage::Present | RegionPage::Leaving)
    }
}

/// The state of a chunk of 64 KiB.
#[derive(Clone, Copy, Default)]
pub struct RegionChunk {
    /// See invariant 3.
    pub epoch: u32,
    /// Which of its pages stay when the others go.
    pub heat: ChunkHeat,
    /// It stands in the queue for going out.
    pub queued: bool,
    /// It stands in the log of compressed memory.
    pub logged: bool,
    /// It stands among what a program wants out.
    pub wanted: bool,
    /// The kernel writes to a word of it when a thread ends: it does not go out.
    pub stays: bool,
    /// It was put at the head of the queue, and not taken from there since.
    pub ahead: bool,
}

/// Pages by where they are.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Counts {
    /// In the memory file.
    pub resident: usize,
    /// Out, and all zeros.
    pub zero: usize,
    /// Out, in compressed memory.
    pub pool: usize,
    /// Out, on a swap area.
    pub file: usize,
    /// Not to be brought back.
    pub lost: usize,
}

impl Counts {
    fn of(&mut self, state: RegionPage) -> Option<&mut usize> {
        match state {
            RegionPage::Absent => None,
            RegionPage::Present | RegionPage::Leaving => Some(&mut self.resident),
            RegionPage::Zero => Some(&mut self.zero),
            RegionPage::Pool => Some(&mut self.pool),
            RegionPage::Area => Some(&mut self.file),
            RegionPage::Lost => Some(&mut self.lost),
        }
    }

    /// Pages that a program would miss.
    pub fn out(&self) -> usize {
        self.zero + self.pool + self.file + self.lost
    }

    /// Adds the counts of another shared region.
    pub fn add(&mut self, other: &Counts) {
        self.resident += other.resident;
        self.zero += other.zero;
        self.pool += other.pool;
        self.file += other.file;
        self.lost += other.lost;
    }
}

/// A shared region: its memory file, and the state of every page.
pub struct Region {
    /// Device and inode of its memory file.
    pub id: RegionId,
    /// Its memory file.
    pub memory: Arc<File>,
    /// The slot of its first page.
    pub base: u32,
    /// Evidence for readahead: where faults went.
    pub locality: Locality,
    /// A process had it mapped once: when none has any more, it is gone.
    pub attached: bool,
    /// Never goes out again: something of it could not be taken out.
    pub kept: bool,
    states: Vec<RegionPage>,
    departures: Vec<u16>,
    /// When each page went out last, by the pager's clock.
    gone: Vec<u32>,
    chunks: Vec<RegionChunk>,
    counts: Counts,
    readings: Vec<(Range<usize>, Reading)>,
}

impl Region {
    /// A region of which nothing has been touched.
    pub fn new(id: RegionId, memory: Arc<File>, pages: usize, base: u32) -> Region {
        Region {
            id,
            memory,
            base,
            locality: Locality::new(),
            attached: false,
            kept: false,
            states: vec![RegionPage::Absent; pages],
            departures: vec![0; pages],
            gone: vec![0; pages],
            chunks: vec![RegionChunk::default(); pages.div_ceil(PAGES_PER_CHUNK)],
            counts: Counts::default(),
            readings: Vec::new(),
        }
    }

    /// Length in pages.
    pub fn pages(&self) -> usize {
        self.states.len()
    }

    /// Sums over its pages.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Where a page is.
    pub fn state(&self, page: usize) -> RegionPage {
        self.states[page]
    }

    /// A page is somewhere else now.
    pub fn set(&mut self, page: usize, state: RegionPage) {
        let before = std::mem::replace(&mut self.states[page], state);
        if let Some(count) = self.counts.of(before) {
            *count -= 1;
        }
        if let Some(count) = self.counts.of(state) {
            *count += 1;
        }
        if before.is_in() != state.is_in() {
            let chunk = &mut self.chunks[page / PAGES_PER_CHUNK];
            chunk.epoch = chunk.epoch.wrapping_add(1);
        }
        let heat = &mut self.chunks[page / PAGES_PER_CHUNK].heat;
        if before.is_in() && state.is_out() {
            self.departures[page] = self.departures[page].wrapping_add(1);
            heat.end_rounds(bit(page));
        }
        if matches!(state, RegionPage::Absent | RegionPage::Lost) {
            heat.forget(bit(page));
        }
    }

    /// A page goes out at a time of the pager's clock.
    pub(crate) fn goes(&mut self, page: usize, place: RegionPage, clock: u32) {
        self.gone[page] = clock;
        self.set(page, place);
    }

    /// A page is in again at a time of the pager's clock, where `resident` are in. `is_asked`: a
    /// thread waits for it. True if it is to stay for a while ([`swaptide_engine::mm::heat`]).
    pub(crate) fn came_back(
        &mut self,
        page: usize,
        clock: u32,
        resident: usize,
        is_asked: bool,
        records: &mut RecordWatch,
    ) -> bool {
        self.set(page, RegionPage::Present);
        let is_soon = is_soon(clock.wrapping_sub(self.gone[page]).into(), resident);
        self.chunks[page / PAGES_PER_CHUNK].heat.came_back(bit(page), is_soon, is_asked, records)
    }

    /// A page was written to on its way out: it stays, and longer than it would have.
    pub(crate) fn keep(&mut self, page: usize) {
        self.set(page, RegionPage::Present);
        self.chunks[page / PAGES_PER_CHUNK].heat.second_chance(bit(page));
    }

    /// The slot of a page.
    pub fn slot(&self, page: usize) -> Slot {
        Slot(self.base + page as u32)
    }

    /// Returns the state of a chunk.
    pub fn chunk(&mut self, chunk: usize) -> &mut RegionChunk {
        &mut self.chunks[chunk]
    }

    /// The number of times that a page has gone out, wrapping: one that was out, and is out in the
    /// same place at the same number, has not been in between.
    pub(crate) fn departures(&self, page: usize) -> u16 {
        self.departures[page]
    }

    /// The pages of a chunk.
    pub(crate) fn chunk_pages(&self, chunk: usize) -> Range<usize> {
        chunk * PAGES_PER_CHUNK..((chunk + 1) * PAGES_PER_CHUNK).min(self.pages())
    }

    /// The number of chunks of 64 KiB, the last one perhaps in part.
    pub(crate) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// Runs of pages in a range of which `wanted` is true.
    pub fn runs(
        &self,
        range: Range<usize>,
        wanted: impl Fn(RegionPage) -> bool,
    ) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for page in range.start..range.end.min(self.pages()) {
            if wanted(self.states[page]) {
                match runs.last_mut() {
                    Some(run) if run.end == page => run.end += 1,
                    _ => runs.push(page..page + 1),
                }
            }
        }
        runs
    }

    /// The program said how it reads a range.
    pub fn say(&mut self, range: Range<usize>, reading: Reading) {
        let mut rest = Vec::new();
        for (old, said) in self.readings.drain(..) {
            for part in [old.start..old.end.min(range.start), old.start.max(range.end)..old.end] {
                if !part.is_empty() {
                    rest.push((part, said));
                }
            }
        }
        if reading != Reading::Unknown && !range.is_empty() {
            rest.push((range, reading));
        }
        self.readings = rest;
    }

    /// Returns the advice given for a page.
    pub(crate) fn reading(&self, page: usize) -> Reading {
        self.readings
            .iter()
            .find(|(range, _)| range.contains(&page))
            .map_or(Reading::Unknown, |(_, said)| *said)
    }
}

/// A page's bit in the masks of its chunk.
pub(crate) fn bit(page: usize) -> u16 {
    1 << (page % PAGES_PER_CHUNK)
}

/// Numbers of slots, given out in clusters.
#[derive(Default)]
pub struct SlotSpace {
    free: Vec<Range<u32>>,
    end: u32,
}

const CLUSTER: u32 = 512;

impl SlotSpace {
    /// A range for `pages` pages, if there is one among `most` slots.
    pub fn take(&mut self, pages: usize, most: u32) -> Option<u32> {
        let len = u32::try_from(pages).ok()?.checked_next_multiple_of(CLUSTER)?;
        if let Some(at) = self.free.iter().position(|range| range.len() >= len as usize) {
            let base = self.free[at].start;
            self.free[at].start += len;
            if self.free[at].is_empty() {
                self.free.swap_remove(at);
            }
            return Some(base);
        }
        let base = self.end;
        self.end = base.checked_add(len).filter(|end| *end <= most)?;
        Some(base)
    }

    /// Gives a range back.
    pub fn give(&mut self, base: u32, pages: usize) {
        let mut range = base..base + (pages as u32).next_multiple_of(CLUSTER);
        while let Some(at) =
            self.free.iter().position(|free| free.end == range.start || free.start == range.end)
        {
            let free = self.free.swap_remove(at);
            range = range.start.min(free.start)..range.end.max(free.end);
        }
        if range.end == self.end {
            self.end = range.start;
        } else {
            self.free.push(range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn region(pages: usize) -> Region {
        let memory = swaptide_sys::mem::memfd_create(c"test", pages as u64 * 4096).expect("memfd");
        let memory = File::from(memory);
        Region::new(RegionId::of(&memory).expect("stat"), Arc::new(memory), pages, 0)
    }

    #[test]
    fn runs_are_whole_and_epochs_follow_what_leaves_and_returns() {
        let mut region = region(40);
        for page in [0, 1, 2, 17, 18, 39] {
            region.set(page, RegionPage::Present);
        }
        assert_eq!(region.runs(0..100, RegionPage::is_in), [0..3, 17..19, 39..40]);
        assert_eq!(region.runs(1..18, RegionPage::is_in), [1..3, 17..18]);
        let epoch = region.chunk(1).epoch;
        region.set(17, RegionPage::Leaving);
        assert_eq!(region.chunk(1).epoch, epoch, "it is still there");
        region.set(17, RegionPage::Pool);
        assert_ne!(region.chunk(1).epoch, epoch);
        assert_eq!(region.counts(), Counts { resident: 5, pool: 1, ..Counts::default() });
        assert_eq!((region.chunk_pages(2), region.chunk_count()), (32..40, 3));
    }

    #[test]
    fn last_state_of_page_counts() {
        let mut region = region(100);
        region.say(0..100, Reading::Sequential);
        region.say(40..60, Reading::Random);
        region.say(50..55, Reading::Unknown);
        let said: Vec<_> =
            [0, 39, 40, 50, 54, 55, 59, 60, 99].map(|page| region.reading(page)).into();
        use Reading::{Random, Sequential, Unknown};
        assert_eq!(
            said,
            [
                Sequential, Sequential, Random, Unknown, Unknown, Random, Random, Sequential,
                Sequential
            ]
        );
    }

    proptest! {
        #[test]
        fn slots_are_given_once(
            takes in proptest::collection::vec((1usize..3000, any::<bool>()), 1..60),
        ) {
            let mut space = SlotSpace::default();
            let mut held: Vec<(u32, usize)> = Vec::new();
            for (pages, give) in takes {
                if give && !held.is_empty() {
                    let (base, pages) = held.swap_remove(pages % held.len());
                    space.give(base, pages);
                } else if let Some(base) = space.take(pages, 1 << 16) {
                    let clash = |(other, n): &(u32, usize)| {
                        base < other + *n as u32 && *other < base + pages as u32
                    };
                    prop_assert!(!held.iter().any(clash) && base + pages as u32 <= 1 << 16);
                    held.push((base, pages));
                }
            }
            for (base, pages) in held {
                space.give(base, pages);
            }
            prop_assert_eq!((space.end, space.free.len()), (0, 0), "all is one piece again");
        }
    }
}
