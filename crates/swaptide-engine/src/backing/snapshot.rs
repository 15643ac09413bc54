//! What backs a range of pages: compressed memory, a swap area, zeros, the swap cache, or several
//! of them.
//!
//! Owns: [`Snapshot`], what the words and the slots of up to [`MAX_SNAPSHOT_PAGES`] neighbouring
//! pages said at a moment.
//!
//! Rules
//! 1. The words are copied under the memory lock ([`Snapshot::note`]); the slots are looked at
//!    without it, and without any lock of theirs ([`Snapshot::look`]). So a snapshot may be out of
//!    date as soon as it is taken.
//! 2. A load by a snapshot begins with a second look, under the memory lock
//!    ([`crate::fault::loading`]), and takes what is still as it was.

use swaptide_core::{SlotContent as TableSlot, SwapEntry};

use crate::backing::devices::{AREA, Devices, NO_ENTRY, filler_of};
use crate::mm::page_table::{PageState, PageTable};
use crate::mm::types::PageNo;

/// Most pages of a snapshot.
pub(crate) const MAX_SNAPSHOT_PAGES: usize = 64;

/// The location of one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageLocation {
    /// Not swapped: the program has it, or nothing has.
    Absent,
    /// In compressed memory of this process.
    Pool,
    /// On a swap area.
    Area,
    /// On a server alone.
    Remote,
    /// It is all zeros; there is nothing to load.
    Zero,
    /// On its way out, in a staging frame.
    Cached,
    /// Another thread brings it in.
    Loading,
    /// Its slot is not what a swapped page's is: it changed between the two checks.
    Changed,
}

impl PageLocation {
    /// There is data to bring from a device that answers soon.
    fn is_stored(self) -> bool {
        matches!(self, PageLocation::Pool | PageLocation::Area | PageLocation::Zero)
    }
}

/// The backing of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// Nothing of it is swapped.
    Nothing,
    /// All that is swapped is in compressed memory (and zeros).
    Pool,
    /// All is on a swap area (and zeros).
    Area,
    /// All is zeros: nothing to load.
    Zero,
    /// All is in the swap cache.
    Cached,
    /// The numbers of pages in compressed memory and on a swap area, or some of them on their way.
    Mixed {
        /// Pages in compressed memory.
        pool: usize,
        /// Pages on a swap area.
        area: usize,
    },
}

/// The location of each page of a range, read without the lock.
pub struct Snapshot {
    first: PageNo,
    len: usize,
    entries: [SwapEntry; MAX_SNAPSHOT_PAGES],
    places: [PageLocation; MAX_SNAPSHOT_PAGES],
}

impl Snapshot {
    /// Copies the words of `n` pages (at most [`MAX_SNAPSHOT_PAGES`]) from `first` on.
    pub fn note(table: &PageTable, first: PageNo, n: usize) -> Snapshot {
        let mut snapshot = Snapshot {
            first,
            len: n.min(MAX_SNAPSHOT_PAGES),
            entries: [NO_ENTRY; MAX_SNAPSHOT_PAGES],
            places: [PageLocation::Absent; MAX_SNAPSHOT_PAGES],
        };
        for k in 0..snapshot.len {
            if let PageState::Swapped(entry) = table.get(first.plus(k)) {
                snapshot.entries[k] = entry;
                // Until its slot is looked at.
                snapshot.places[k] = PageLocation::Changed;
            }
        }
        snapshot
    }

    /// Looks at the slots of the words that were copied.
    pub fn look(&mut self, devices: &Devices) {
        for (entry, place) in self.entries.iter().zip(&mut self.places).take(self.len) {
            if *place == PageLocation::Absent {
                continue;
            }
            *place = match devices.slots(entry.ty()).lookup(entry.offset()) {
                TableSlot::Folio(folio) if filler_of(folio).is_some() => PageLocation::Loading,
                TableSlot::Folio(_) => PageLocation::Cached,
                TableSlot::Shadow { zero: true, .. } => PageLocation::Zero,
                TableSlot::Shadow { .. }
                    if entry.ty() == AREA && devices.areas.is_remote(*entry) =>
                {
                    PageLocation::Remote
                }
                TableSlot::Shadow { .. } if entry.ty() == AREA => PageLocation::Area,
                TableSlot::Shadow { .. } => PageLocation::Pool,
                TableSlot::Free | TableSlot::Bad => PageLocation::Changed,
            };
        }
    }

    /// A chunk as a test wants it: a page is on a swap area, in compressed memory, or not swapped.
    #[cfg(test)]
    pub(crate) fn made_up(first: PageNo, is_on_area: impl Fn(usize) -> Option<bool>) -> Snapshot {
        let n = crate::mm::types::PAGES_PER_CHUNK;
        let mut snapshot = Snapshot::note(&PageTable::new(), first, n);
        for k in 0..snapshot.len {
            snapshot.places[k] = match is_on_area(k) {
                Some(true) => PageLocation::Area,
                Some(false) => PageLocation::Pool,
                None => PageLocation::Absent,
            };
        }
        snapshot
    }

    /// The first page of the range, in memory or not.
    pub fn first(&self) -> PageNo {
        self.first
    }

    /// Returns the location of the `k`-th page.
    pub fn place(&self, k: usize) -> PageLocation {
        self.places[k]
    }

    /// The entries from the first page on.
    pub fn entries(&self) -> &[SwapEntry] {
        &self.entries[..self.len]
    }

    /// The number of pages, from the first on, that can be loaded from the devices.
    pub fn stored(&self) -> usize {
        self.places[..self.len].iter().take_while(|place| place.is_stored()).count()
    }

    /// The number of pages, from the first on, that are remote.
    pub(crate) fn any_remote(&self) -> usize {
        self.places[..self.len].iter().take_while(|place| **place == PageLocation::Remote).count()
    }

    /// Remote pages count as local: they are to be waited for.
    pub(crate) fn wait_for_remote(&mut self) {
        self.places[..self.len]
            .iter_mut()
            .filter(|place| **place == PageLocation::Remote)
            .for_each(|place| *place = PageLocation::Area);
    }

    /// Returns the backing of `n` pages from the `k`-th on.
    pub fn backing(&self, k: usize, n: usize) -> Backing {
        let (mut pool, mut area, mut zero, mut other, mut cached) = (0, 0, 0, 0, 0);
        for place in self.places[..self.len].iter().skip(k).take(n) {
            match place {
                PageLocation::Absent => {}
                PageLocation::Pool => pool += 1,
                PageLocation::Area | PageLocation::Remote => area += 1,
                PageLocation::Zero => zero += 1,
                PageLocation::Cached => cached += 1,
                PageLocation::Loading | PageLocation::Changed => other += 1,
            }
        }
        match (pool, area, zero, cached, other) {
            (0, 0, 0, 0, 0) => Backing::Nothing,
            (0, 0, 0, _, 0) => Backing::Cached,
            (0, 0, _, 0, 0) => Backing::Zero,
            (_, 0, _, 0, 0) => Backing::Pool,
            (0, _, _, 0, 0) => Backing::Area,
            _ => Backing::Mixed { pool, area },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::devices::folio_of;
    use crate::backing::devices::testing::{self, on_area};
    use crate::mm::types::FillerNo;
    use swaptide_core::{FolioId, Shadow};

    const FOLIO: FolioId = FolioId(7);

    /// Devices, and a table.
    fn devices() -> (Devices, PageTable) {
        (testing::devices(), PageTable::new())
    }

    fn pooled(devices: &Devices, zero: bool) -> SwapEntry {
        testing::pooled(devices, Shadow(1), zero)
    }

    fn filed(devices: &Devices) -> SwapEntry {
        on_area(devices, Shadow(1))
    }

    fn look(devices: &Devices, table: &PageTable, first: PageNo, n: usize) -> Snapshot {
        let mut snapshot = Snapshot::note(table, first, n);
        snapshot.look(devices);
        snapshot
    }

    #[test]
    fn every_backing_of_a_range_is_told_from_the_others() {
        let (devices, mut table) = devices();
        let first = PageNo(0x7000_0000);
        let mut set = |k: usize, state| {
            table.set(first.plus(k), state);
        };
        for k in 0..4 {
            set(k, PageState::Swapped(pooled(&devices, false)));
            set(4 + k, PageState::Swapped(filed(&devices)));
            set(8 + k, PageState::Swapped(pooled(&devices, true)));
            set(12 + k, PageState::Swapped(devices.alloc_pool(0, FOLIO).expect("a slot")));
        }
        let other = folio_of(FillerNo(3));
        set(16, PageState::Swapped(devices.alloc_pool(0, other).expect("a slot")));
        set(20, PageState::Present);
        let all = look(&devices, &table, first, MAX_SNAPSHOT_PAGES);
        assert_eq!(all.backing(0, 4), Backing::Pool);
        assert_eq!(all.backing(4, 4), Backing::Area);
        assert_eq!(all.backing(8, 4), Backing::Zero);
        assert_eq!(all.backing(12, 4), Backing::Cached);
        assert_eq!(all.backing(17, 8), Backing::Nothing);
        assert_eq!(all.place(16), PageLocation::Loading);
        assert!(matches!(all.backing(16, 1), Backing::Mixed { .. }), "another's page");
        assert_eq!(all.backing(2, 4), Backing::Mixed { pool: 2, area: 2 });
        assert_eq!(all.backing(4, 8), Backing::Area, "zeros belong to whatever they lie next to");
        assert_eq!(all.backing(10, 4), Backing::Mixed { pool: 0, area: 0 });
        assert_eq!(all.stored(), 12);
    }

    #[test]
    fn a_slot_freed_between_the_looks_is_not_loaded_from() {
        let (devices, mut table) = devices();
        let first = PageNo(0x7000_0000);
        let entry = pooled(&devices, false);
        table.set(first, PageState::Swapped(entry));
        let mut snapshot = Snapshot::note(&table, first, 1);
        devices.drop_swapped(entry);
        snapshot.look(&devices);
        assert_eq!((snapshot.place(0), snapshot.stored()), (PageLocation::Changed, 0));
        assert!(matches!(snapshot.backing(0, 1), Backing::Mixed { .. }));
    }
}
