//! Loads that are under way.
//!
//! What a fault brings in is decided under the state's lock; it is loaded from the store without
//! it, by any of the threads that serve; and it is put in under the lock again, as far as it is
//! still what was noted. So loads of several faults run on several CPUs, and the lock is not held
//! while the store is waited for.
//!
//! Owns: which loads wait for a thread and which pages are on their way, the faults that wait for
//! one of those, and how a page is noted.
//!
//! Invariants
//! 1. A page is put in only if it stands as it was noted: in the same region (its memory file is
//!    kept open meanwhile, so no other gets its number), in the same place, and it has not gone out
//!    again since. Otherwise what was loaded is dropped.
//! 2. A page is on its way in one load at most, but for what is brought back under the lock
//!    (`restore` in `swap_in`), which waits for none.
//! 3. A fault on a page that is on its way waits here, and is answered when that load ends, however
//!    it ends. A load that a fault waits for does not wait behind one that comes later.
//!
//! Locks: none; the pager's state holds it.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use swaptide_store::Slot;
use swaptide_sys::page::VirtAddr;

use crate::region::{Region, RegionId, RegionPage};
use crate::space::{FaultSite, SpaceId};

/// A fault that was read and not answered yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingFault {
    pub space: SpaceId,
    pub addr: VirtAddr,
    /// A write to a page that is protected.
    pub wp: bool,
    /// A load for it was dropped, or found nothing: what comes along was decided then.
    pub again: bool,
}

/// A page that is out, as it was when its load was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NotedPage {
    page: usize,
    place: RegionPage,
    departures: u16,
}

/// Pages of one region that are loaded together, in ascending order.
pub(crate) struct Load {
    pub region: RegionId,
    memory: Arc<File>,
    base: u32,
    pages: Vec<NotedPage>,
}

impl Load {
    /// Those of `pages` that are out now.
    pub(crate) fn of(region: &Region, pages: impl Iterator<Item = usize>) -> Load {
        let noted = |page: usize| {
            let place = region.state(page);
            let departures = region.departures(page);
            place.is_out().then_some(NotedPage { page, place, departures })
        };
        Load {
            region: region.id,
            memory: Arc::clone(&region.memory),
            base: region.base,
            pages: pages.filter_map(noted).collect(),
        }
    }

    /// The number of pages.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// The slots of the pages, and where each is.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (Slot, RegionPage)> + '_ {
        self.pages.iter().map(|noted| (Slot(self.base + noted.page as u32), noted.place))
    }

    /// The page that a slot is of.
    pub(crate) fn page_of(&self, slot: Slot) -> usize {
        (slot.0 - self.base) as usize
    }

    /// Runs of pages: the first one's place in the load, and their numbers.
    pub(crate) fn runs(
        &self,
        wanted: impl Fn(usize) -> bool,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        let mut runs: Vec<(usize, Range<usize>)> = Vec::new();
        for (at, noted) in self.pages.iter().enumerate().filter(|(_, noted)| wanted(noted.page)) {
            match runs.last_mut() {
                Some((_, run)) if run.end == noted.page => run.end += 1,
                _ => runs.push((at, noted.page..noted.page + 1)),
            }
        }
        runs.into_iter()
    }

    /// True if it is the region that the pages were noted in.
    pub(crate) fn is_of(&self, region: &Region) -> bool {
        Arc::ptr_eq(&self.memory, &region.memory)
    }

    /// True if a page stands as it was noted (invariant 1), in the region of the load.
    pub(crate) fn stands(&self, region: &Region, page: usize) -> bool {
        let Ok(at) = self.pages.binary_search_by_key(&page, |noted| noted.page) else {
            return false;
        };
        let NotedPage { place, departures, .. } = self.pages[at];
        region.state(page) == place && region.departures(page) == departures
    }

    fn has(&self, page: usize) -> bool {
        self.pages.binary_search_by_key(&page, |noted| noted.page).is_ok()
    }

    /// True if a swap area has to be read.
    fn reads_area(&self) -> bool {
        self.pages.iter().any(|noted| noted.place == RegionPage::Area)
    }
}

/// A load, and what it is for.
pub(crate) struct LoadJob {
    pub load: Load,
    /// The place at which the pages are to be mapped; none for pages brought in by advice.
    pub site: Option<FaultSite>,
    /// The fault that it is for, and its page; none for what comes along.
    pub fault: Option<(usize, PendingFault)>,
}

/// The loads.
#[derive(Default)]
pub(crate) struct LoadQueue {
    /// Those that a fault waits for, and the others, the oldest first.
    urgent: VecDeque<LoadJob>,
    ahead: VecDeque<LoadJob>,
    /// Runs of pages that are on their way: of the queues, and of what a thread has taken.
    coming: Vec<(RegionId, Range<usize>)>,
    /// Faults that wait for a page of these.
    parked: Vec<(RegionId, usize, PendingFault)>,
}

impl LoadQueue {
    /// A load is to be done.
    pub(crate) fn add(&mut self, job: LoadJob) {
        let id = job.load.region;
        self.coming.extend(job.load.runs(|_| true).map(|(_, run)| (id, run)));
        match job.fault {
            Some(_) => self.urgent.push_back(job),
            None => self.ahead.push_back(job),
        }
    }

    /// The next load, for a thread that calls [`LoadQueue::ended`] when it is done.
    pub(crate) fn take(&mut self) -> Option<LoadJob> {
        self.urgent.pop_front().or_else(|| self.ahead.pop_front())
    }

    /// The same for the thread that reads events: one that needs no disk, and that a fault waits
    /// for, unless it does what comes along as well.
    pub(crate) fn take_short(&mut self, comes_along: bool) -> Option<LoadJob> {
        let queues = [Some(&mut self.urgent), comes_along.then_some(&mut self.ahead)];
        queues.into_iter().flatten().find_map(|queue| {
            let at = queue.iter().position(|job| !job.load.reads_area())?;
            queue.remove(at)
        })
    }

    /// True if there is one for [`LoadQueue::take_short`].
    pub(crate) fn has_short(&self, comes_along: bool) -> bool {
        let is_short = |job: &LoadJob| !job.load.reads_area();
        self.urgent.iter().any(is_short) || comes_along && self.ahead.iter().any(is_short)
    }

    /// The number of waiting loads that need a disk.
    pub(crate) fn disks(&self) -> usize {
        self.urgent.iter().chain(&self.ahead).filter(|job| job.load.reads_area()).count()
    }

    /// The number of loads that wait for a thread.
    pub(crate) fn waiting(&self) -> usize {
        self.urgent.len() + self.ahead.len()
    }

    /// True if a page is on its way.
    pub(crate) fn has(&self, region: RegionId, page: usize) -> bool {
        self.coming.iter().any(|(id, run)| *id == region && run.contains(&page))
    }

    /// Runs of a region's pages that are on their way.
    pub(crate) fn of(&self, region: RegionId) -> Vec<Range<usize>> {
        self.coming.iter().filter(|(id, _)| *id == region).map(|(_, run)| run.clone()).collect()
    }

    /// Pages that are on their way, and not yet counted as resident.
    pub(crate) fn pages(&self) -> usize {
        self.coming.iter().map(|(_, run)| run.len()).sum()
    }

    /// A fault waits for a page that is on its way.
    pub(crate) fn park(&mut self, region: RegionId, page: usize, fault: PendingFault) {
        self.parked.push((region, page, fault));
        let is_of = |job: &LoadJob| job.load.region == region && job.load.has(page);
        if let Some(job) = self.ahead.iter().position(is_of).and_then(|at| self.ahead.remove(at)) {
            self.urgent.push_back(job);
        }
    }

    /// A load has ended. Gives the faults that waited for it, each with its page.
    pub(crate) fn ended(&mut self, job: &LoadJob) -> Vec<(usize, PendingFault)> {
        let id = job.load.region;
        for (_, run) in job.load.runs(|_| true) {
            if let Some(at) = self.coming.iter().position(|coming| *coming == (id, run.clone())) {
                self.coming.swap_remove(at);
            }
        }
        let is_of =
            |page: usize| job.load.pages.binary_search_by_key(&page, |noted| noted.page).is_ok();
        let parked = self.parked.extract_if(.., |(region, page, _)| *region == id && is_of(*page));
        parked.map(|(_, page, fault)| (page, fault)).chain(job.fault).collect()
    }

    /// The faults of an address space that is gone wait for nothing.
    pub(crate) fn forget_space(&mut self, space: SpaceId) {
        self.parked.retain(|(.., fault)| fault.space != space);
    }
}

#[cfg(test)]
mod tests {
    use swaptide_sys::page::{PAGE_SIZE, VirtRange};

    use super::*;
    use crate::space::Piece;

    fn region(pages: usize) -> Region {
        let fd = swaptide_sys::mem::memfd_create(c"test", (pages * PAGE_SIZE) as u64);
        let memory = File::from(fd.expect("memfd"));
        Region::new(RegionId::of(&memory).expect("stat"), Arc::new(memory), pages, 512)
    }

    fn job(region: &Region, pages: Range<usize>, fault: Option<(usize, PendingFault)>) -> LoadJob {
        let range = VirtRange::from_len(VirtAddr(1 << 30), region.pages() * PAGE_SIZE);
        let piece = Piece { range, region: region.id, page: 0 };
        let site = Some(FaultSite { space: SpaceId(1), piece });
        LoadJob { load: Load::of(region, pages), site, fault }
    }

    fn fault(page: usize) -> (usize, PendingFault) {
        let addr = VirtAddr(page * PAGE_SIZE);
        (page, PendingFault { space: SpaceId(1), addr, wp: false, again: false })
    }

    #[test]
    fn a_page_that_went_out_again_does_not_stand() {
        let mut region = region(40);
        for page in 0..20 {
            region.set(page, RegionPage::Pool);
        }
        region.set(5, RegionPage::Present);
        let load = Load::of(&region, 0..20);
        assert_eq!(load.len(), 19);
        assert!(load.is_of(&region) && load.stands(&region, 4) && !load.stands(&region, 5));
        // Another page of the chunk comes in: this one is what it was.
        region.set(6, RegionPage::Present);
        assert!(load.stands(&region, 4) && !load.stands(&region, 6));
        // It goes out again, to the same place with other contents; its neighbour does not.
        region.set(6, RegionPage::Leaving);
        region.set(6, RegionPage::Pool);
        assert!(!load.stands(&region, 6) && load.stands(&region, 4));
        // It is written away: loaded from where it was, it may be anything.
        region.set(17, RegionPage::Area);
        assert!(!load.stands(&region, 17) && load.stands(&region, 18));
        // It is given up: zeros.
        region.set(18, RegionPage::Absent);
        assert!(!load.stands(&region, 18) && !load.stands(&region, 30));
        let slots: Vec<_> = load.slots().map(|(slot, _)| slot.0).collect();
        assert_eq!((slots[0], slots[5], load.page_of(Slot(518))), (512, 518, 6));
    }

    #[test]
    fn another_region_of_the_same_number_is_another() {
        let region = region(4);
        let load = Load::of(&region, 0..4);
        let again = Region::new(region.id, Arc::new(region.memory.try_clone().unwrap()), 4, 512);
        assert!(load.is_of(&region) && !load.is_of(&again) && load.len() == 0);
    }

    #[test]
    fn a_fault_on_a_page_that_is_coming_waits_for_its_load() {
        let mut region = region(40);
        for page in (0..30).filter(|page| *page != 3) {
            region.set(page, RegionPage::Pool);
        }
        let mut loads = LoadQueue::default();
        loads.add(job(&region, 16..30, None));
        loads.add(job(&region, 0..16, Some(fault(1))));
        assert_eq!((loads.waiting(), loads.pages()), (2, 29));
        assert!(loads.has(region.id, 2) && !loads.has(region.id, 3) && loads.has(region.id, 16));
        assert_eq!(loads.of(region.id), [16..30, 0..3, 4..16]);
        loads.park(region.id, 2, fault(2).1);
        let first = loads.take_short(false).expect("the fault's goes first");
        assert!(
            !loads.has_short(false) && loads.take_short(false).is_none() && loads.has(region.id, 2)
        );
        assert_eq!(loads.ended(&first), [fault(2), fault(1)]);
        assert!(!loads.has(region.id, 2) && loads.has(region.id, 20));
        let second = loads.take().expect("the other");
        loads.park(region.id, 20, fault(20).1);
        assert_eq!(loads.ended(&second), [fault(20)]);
        assert_eq!((loads.pages(), loads.waiting()), (0, 0));
        loads.park(region.id, 1, fault(1).1);
        loads.forget_space(SpaceId(1));
        assert!(loads.parked.is_empty());
    }

    #[test]
    fn faulting_load_precedes_later_loads() {
        let mut region = region(400);
        (0..400).for_each(|page| region.set(page, RegionPage::Pool));
        let mut loads = LoadQueue::default();
        loads.add(job(&region, 0..16, None));
        loads.park(region.id, 7, fault(7).1);
        let came = (1..20).find(|n| {
            loads.add(job(&region, n * 16..n * 16 + 1, Some(fault(n * 16))));
            let job = loads.take().expect("there are loads");
            loads.ended(&job).contains(&fault(7))
        });
        assert_eq!(came, Some(1));
    }

    #[test]
    fn the_reader_takes_no_load_that_reads_a_disk() {
        let mut region = region(40);
        region.set(0, RegionPage::Area);
        region.set(1, RegionPage::Pool);
        let mut loads = LoadQueue::default();
        loads.add(job(&region, 0..1, Some(fault(0))));
        assert!(!loads.has_short(false) && loads.take_short(false).is_none());
        loads.add(job(&region, 1..2, Some(fault(1))));
        assert_eq!(loads.take_short(false).and_then(|job| job.fault), Some(fault(1)));
        // What comes along it takes only if it is to.
        loads.add(job(&region, 1..2, None));
        loads.add(job(&region, 0..1, None));
        assert_eq!((loads.waiting(), loads.disks()), (3, 2));
        assert!(!loads.has_short(false) && loads.take_short(false).is_none());
        assert!(loads.has_short(true) && loads.take_short(true).is_some());
        assert!(!loads.has_short(true) && loads.take_short(true).is_none());
        assert_eq!(loads.take().and_then(|job| job.fault), Some(fault(0)));
    }

    #[test]
    fn runs_tell_where_they_begin_in_the_load() {
        let mut region = region(20);
        for page in [1, 2, 3, 7, 8, 9] {
            region.set(page, RegionPage::Zero);
        }
        let load = Load::of(&region, 0..20);
        let runs: Vec<_> = load.runs(|page| page != 8).collect();
        assert_eq!(runs, [(0, 1..4), (3, 7..8), (5, 9..10)]);
    }
}
