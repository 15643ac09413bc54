//! The swap cache on the way in: a thread that brings pages in puts its folio into their slots
//! first, all slots of a run at once (docs/linux-swap.md, "Exchanges of the swap cache").
//!
//! So two threads never load one page, and a slot with such a folio stands for the same data until
//! its thread has ended the load, whatever becomes of the page's word meanwhile: write-back passes
//! it by, and a page that the program gives up is dropped at the end.
//!
//! Owns: the slots of one load, with the shadows that they had.
//!
//! Invariants
//! 1. A load is begun and ended under the memory lock, and a thread has one at a time. It is ended
//!    before its thread answers, hands over or queues the fault.
//! 2. Where the handler works alone no other thread's load stands
//!    ([`crate::events::reader::UffdReader::begin_alone`]).
//! 3. A page's word is never changed by its load before the page is in place.
//!
//! Locks: none of its own.

use swaptide_core::{Expect, FolioId, Shadow, SlotContent as TableSlot, SwapEntry};

use crate::backing::devices::{Devices, NO_ENTRY, entry_plus, filler_of, folio_of};
use crate::backing::snapshot::MAX_SNAPSHOT_PAGES;
use crate::mm::busy::Busy;
use crate::mm::page_table::{PageState, PageTable};
use crate::mm::types::{FillerNo, PageNo};

/// One load in progress: 1 to [`MAX_SNAPSHOT_PAGES`] neighbouring pages whose slots hold the folio
/// of the loading thread.
pub(crate) struct Loading {
    filler: FillerNo,
    first: PageNo,
    len: usize,
    entries: [SwapEntry; MAX_SNAPSHOT_PAGES],
    shadows: [Shadow; MAX_SNAPSHOT_PAGES],
    /// A bit for each page: it is all zeros.
    zeros: u64,
    /// A bit for each page: it is in the program, and its slot goes when the load ends.
    released: u64,
}

const _: () = assert!(MAX_SNAPSHOT_PAGES <= u64::BITS as usize);

/// Why no load was begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotBegun {
    /// The first page is not what it was.
    Stale,
    /// Another thread brings it in.
    Exists(FillerNo),
    /// Nothing may be put in place now, and so nothing is loaded ([`crate::sched::handed`]).
    Refused,
}

impl Loading {
    /// No load.
    pub(crate) fn new(filler: FillerNo) -> Loading {
        Loading {
            filler,
            first: PageNo(0),
            len: 0,
            entries: [NO_ENTRY; MAX_SNAPSHOT_PAGES],
            shadows: [Shadow(0); MAX_SNAPSHOT_PAGES],
            zeros: 0,
            released: 0,
        }
    }

    fn folio(&self) -> FolioId {
        folio_of(self.filler)
    }

    /// Begins a load of the pages from `first` on that still have these entries, as far as their
    /// slots hold nothing but shadows. Gives how many, at least 1.
    ///
    /// # Errors
    /// When it is not even the first.
    pub(crate) fn begin(
        &mut self,
        devices: &Devices,
        table: &PageTable,
        busy: &mut Busy,
        first: PageNo,
        entries: &[SwapEntry],
    ) -> Result<usize, NotBegun> {
        debug_assert_eq!(self.len, 0, "a thread has one load at a time");
        (self.first, self.zeros, self.released) = (first, 0, 0);
        let same = |k: &usize| table.get(first.plus(*k)) == PageState::Swapped(entries[*k]);
        let n = (0..entries.len().min(MAX_SNAPSHOT_PAGES)).take_while(same).count();
        while self.len < n {
            let run = run_of_cluster(&entries[self.len..n]);
            let entered = self.enter(devices, entries[self.len], run);
            self.entries[self.len..self.len + entered]
                .copy_from_slice(&entries[self.len..self.len + entered]);
            self.len += entered;
            if entered < run {
                break;
            }
        }
        if self.len > 0 {
            busy.begin_loading(self.filler, first, self.len);
            return Ok(self.len);
        }
        match entries.first().filter(|_| n > 0).and_then(|entry| other_filler(devices, *entry)) {
            Some(other) => Err(NotBegun::Exists(other)),
            None => Err(NotBegun::Stale),
        }
    }

    /// Puts the folio into up to `run` slots of one cluster. Gives how many, from the first on.
    fn enter(&mut self, devices: &Devices, entry: SwapEntry, run: usize) -> usize {
        let (slots, first) = (devices.slots(entry.ty()), entry.offset());
        let mut n = 0;
        while n < run
            && let TableSlot::Shadow { zero, .. } = slots.lookup(first.plus(n as u32))
        {
            self.zeros |= u64::from(zero) << (self.len + n);
            n += 1;
        }
        if n == 0 {
            return 0;
        }
        let folio = self.folio();
        let shadows = &mut self.shadows[self.len..self.len + n];
        // A slot with a shadow becomes another one under the memory lock alone.
        if let Err(mismatch) = slots.shadow_to_folio(first, n as u32, folio, Some(shadows)) {
            crate::fatal(&format!("a slot changed under the memory lock: {mismatch}"));
        }
        n
    }

    /// Only the first `n` pages (at least 1) are loaded. In the hold of the memory lock in which
    /// the load began: a thread that waits for one of the others would not be woken at its end.
    pub(crate) fn shorten(&mut self, devices: &Devices, busy: &mut Busy, n: usize) {
        debug_assert!(n > 0, "a load of no page would not be ended");
        for k in n..self.len {
            self.end_page(devices, k);
        }
        self.len = self.len.min(n);
        busy.begin_loading(self.filler, self.first, self.len);
    }

    /// True when the `k`-th page is all zeros.
    pub(crate) fn is_zero(&self, k: usize) -> bool {
        self.zeros >> k & 1 == 1
    }

    /// The shadow that the `k`-th page's slot had.
    pub(crate) fn shadow(&self, k: usize) -> Shadow {
        self.shadows[k]
    }

    /// The number of pages, from the first on, for which `is_zero` agrees with what was noted.
    pub(crate) fn as_seen(&self, is_zero: impl Fn(usize) -> bool) -> usize {
        (0..self.len).take_while(|k| self.is_zero(*k) == is_zero(*k)).count()
    }

    /// The number of pages, from the first on, whose words have not changed since the load began.
    pub(crate) fn unchanged(&self, table: &PageTable) -> usize {
        let same =
            |k: &usize| table.get(self.first.plus(*k)) == PageState::Swapped(self.entries[*k]);
        (0..self.len).take_while(same).count()
    }

    /// The `k`-th page is in place and its word says so; its slot is needed no more.
    pub(crate) fn release(&mut self, k: usize) {
        self.released |= 1 << k;
    }

    /// The pages that are not in place, or whose copies are kept.
    pub(crate) fn unreleased(&self) -> impl Iterator<Item = PageNo> {
        let (first, released) = (self.first, self.released);
        (0..self.len).filter(move |k| released >> k & 1 == 0).map(move |k| first.plus(k))
    }

    /// Ends the load, if there is one: a slot that is needed no more is freed, the others get their
    /// shadows back. Gives the pages for which threads wait that others have left to this one: it
    /// is to wake them when it has given the memory lock back.
    pub(crate) fn end(&mut self, devices: &Devices, busy: &mut Busy) -> Option<(PageNo, usize)> {
        if self.len == 0 {
            return None;
        }
        let mut k = 0;
        while k < self.len {
            let released = (self.released >> k).trailing_ones() as usize;
            if released == 0 {
                self.end_page(devices, k);
                k += 1;
                continue;
            }
            let run = run_of_cluster(&self.entries[k..self.len.min(k + released)]);
            devices.drop_run(self.entries[k], run as u32, Expect::Folio(self.folio()));
            k += run;
        }
        let pages = (self.first, self.len);
        self.len = 0;
        busy.end_loading(self.filler).then_some(pages)
    }

    /// Ends the load of a page that is not in place, or whose copy is kept.
    fn end_page(&self, devices: &Devices, k: usize) {
        let (entry, folio) = (self.entries[k], self.folio());
        // The program may have given it up meanwhile ([`crate::engine::Engine::release`]).
        if devices.slots(entry.ty()).count(entry.offset()) == 0 {
            devices.drop_run(entry, 1, Expect::Folio(folio));
        } else {
            devices.return_shadow(entry, folio, self.shadows[k]);
        }
    }
}

/// The number of entries, from the first on, that follow each other in one cluster.
fn run_of_cluster(entries: &[SwapEntry]) -> usize {
    let follows = |(k, entry): (usize, &SwapEntry)| {
        let first = entries[0];
        *entry == entry_plus(first, k as u32)
            && entry.offset().cluster() == first.offset().cluster()
    };
    entries.iter().enumerate().take_while(|entry| follows(*entry)).count()
}

/// The other thread that brings the page of an entry in, if one does.
pub(crate) fn other_filler(devices: &Devices, entry: SwapEntry) -> Option<FillerNo> {
    match devices.slots(entry.ty()).lookup(entry.offset()) {
        TableSlot::Folio(folio) => filler_of(folio),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::devices::testing::{devices, on_area, pooled};

    const FIRST: PageNo = PageNo(0x7000_0000);
    const SERVER: FillerNo = FillerNo(2);

    /// A table in which the pages from [`FIRST`] on have these entries.
    fn table_of(entries: &[SwapEntry]) -> PageTable {
        let mut table = PageTable::new();
        for (k, entry) in entries.iter().enumerate() {
            table.set(FIRST.plus(k), PageState::Swapped(*entry));
        }
        table
    }

    fn slot(devices: &Devices, entry: SwapEntry) -> TableSlot {
        devices.slots(entry.ty()).lookup(entry.offset())
    }

    #[test]
    fn installed_slots_freed_others_get_shadows() {
        let devices = devices();
        let entries: Vec<SwapEntry> = (0..6)
            .map(|k| pooled(&devices, Shadow(k), k == 3))
            .chain([on_area(&devices, Shadow(6)), pooled(&devices, Shadow(7), false)])
            .collect();
        let (table, mut busy) = (table_of(&entries), Busy::default());
        let mut loading = Loading::new(SERVER);
        assert_eq!(loading.begin(&devices, &table, &mut busy, FIRST, &entries), Ok(8));
        assert!(busy.is_any_loading());
        assert_eq!((0..8).filter(|k| loading.is_zero(*k)).collect::<Vec<_>>(), [3]);
        for (k, entry) in entries.iter().enumerate() {
            assert_eq!(loading.shadow(k), Shadow(k as u32));
            let seen = loading.as_seen(|at| (at == 3) != (at == k));
            assert_eq!(seen, k, "a slot that has become another one meanwhile");
            assert_eq!(slot(&devices, *entry), TableSlot::Folio(folio_of(SERVER)));
        }
        [0, 1, 2, 4, 6].into_iter().for_each(|k| loading.release(k));
        assert!(loading.unreleased().eq([3, 5, 7].map(|k| FIRST.plus(k))));
        assert_eq!(loading.end(&devices, &mut busy), None);
        assert!(!busy.is_any_loading());
        for (k, entry) in entries.iter().enumerate() {
            let expected = match k {
                3 => TableSlot::Shadow { shadow: Shadow(3), zero: true },
                5 | 7 => TableSlot::Shadow { shadow: Shadow(k as u32), zero: false },
                _ => TableSlot::Free,
            };
            assert_eq!(slot(&devices, *entry), expected, "page {k}");
        }
    }

    #[test]
    fn of_two_threads_one_loads_a_page_and_wakes_the_others_thread() {
        let devices = devices();
        let entries: Vec<SwapEntry> = (0..4).map(|k| pooled(&devices, Shadow(k), false)).collect();
        let (table, mut busy) = (table_of(&entries), Busy::default());
        let (mut first, mut second) = (Loading::new(FillerNo(0)), Loading::new(SERVER));
        assert_eq!(first.begin(&devices, &table, &mut busy, FIRST.plus(2), &entries[2..]), Ok(2));
        assert_eq!(second.begin(&devices, &table, &mut busy, FIRST, &entries), Ok(2), "up to it");
        assert_eq!(second.end(&devices, &mut busy), None);
        let later = second.begin(&devices, &table, &mut busy, FIRST.plus(3), &entries[3..]);
        assert_eq!(later, Err(NotBegun::Exists(FillerNo(0))));
        assert!(!busy.want(FillerNo(0), FIRST), "not one of its pages: it would not be woken");
        assert!(busy.want(FillerNo(0), FIRST.plus(3)));
        assert_eq!(first.end(&devices, &mut busy), Some((FIRST.plus(2), 2)));
        assert_eq!(second.begin(&devices, &table, &mut busy, FIRST.plus(3), &entries[3..]), Ok(1));
        second.end(&devices, &mut busy);
    }

    #[test]
    fn a_page_that_is_given_up_or_moved_meanwhile_is_not_as_it_was() {
        let devices = devices();
        let entries: Vec<SwapEntry> = (0..3).map(|k| pooled(&devices, Shadow(k), false)).collect();
        let (mut table, mut busy) = (table_of(&entries), Busy::default());
        let mut loading = Loading::new(SERVER);
        assert_eq!(loading.begin(&devices, &table, &mut busy, FIRST, &entries), Ok(3));
        assert_eq!(loading.unchanged(&table), 3);
        // The last one is given up, the second is moved elsewhere.
        table.set(FIRST.plus(2), PageState::Empty);
        devices.abandon_to_loader(entries[2]);
        assert_eq!(loading.unchanged(&table), 2);
        table.set(FIRST.plus(1), PageState::Empty);
        table.set(FIRST.plus(99), PageState::Swapped(entries[1]));
        assert_eq!(loading.unchanged(&table), 1);
        // Before a slot is free that it could have.
        let other = pooled(&devices, Shadow(9), false);
        loading.release(0);
        loading.end(&devices, &mut busy);
        assert_eq!(slot(&devices, entries[0]), TableSlot::Free);
        assert!(matches!(slot(&devices, entries[1]), TableSlot::Shadow { .. }), "it has a page");
        assert_eq!(slot(&devices, entries[2]), TableSlot::Free);
        let stale = loading.begin(&devices, &table, &mut busy, FIRST, &[other]);
        assert_eq!(stale, Err(NotBegun::Stale));
    }

    #[test]
    fn a_shortened_load_leaves_the_rest_as_it_was() {
        let devices = devices();
        let entries: Vec<SwapEntry> = (0..3).map(|k| pooled(&devices, Shadow(k), false)).collect();
        let (table, mut busy) = (table_of(&entries), Busy::default());
        let mut loading = Loading::new(SERVER);
        assert_eq!(loading.begin(&devices, &table, &mut busy, FIRST, &entries), Ok(3));
        loading.shorten(&devices, &mut busy, 1);
        assert!(matches!(slot(&devices, entries[1]), TableSlot::Shadow { .. }));
        assert_eq!(loading.unchanged(&table), 1);
        assert_eq!(loading.unreleased().collect::<Vec<_>>(), [FIRST]);
        loading.end(&devices, &mut busy);
        assert!(matches!(slot(&devices, entries[0]), TableSlot::Shadow { .. }));
    }
}
