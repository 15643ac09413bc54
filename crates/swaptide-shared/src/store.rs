//! Where pages of shared regions are while they are out.
//!
//! Owns: compressed memory of the pager's own, and its part of the swap areas. A page's slot
//! follows from its region and number, so no slots are allocated; which of the two devices has it,
//! its state says.
//!
//! Locks: the devices' own.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use swaptide_engine::fault_injection::is_read_short;
use swaptide_engine::memcg::acceptance::{Acceptance, Verdict};
use swaptide_ipc::{
    Area, AreaId, AreaMask, AreaState, ExtentId, ProcSlot, Segment, SlotIndex, Transport,
};
use swaptide_store::codec::{Compressor, Packed, PackedKind, Scheme, Unpacker};
use swaptide_store::file::{
    AreaDirectory, Extent, ExtentSource, FileDevice, FilePlace, InjectedFault, Leaving, Location,
    Opened, READ_RETRY_DELAYS, ReadError,
};
use swaptide_store::zram::Zram;
use swaptide_store::{Page, Slot};
use swaptide_sys::thread::sleep;
use swaptide_sys::{Errno, OwnedFd};

use crate::region::RegionPage;

/// Slots of compressed memory and of the file: 256 GiB of regions.
pub const SLOTS: u32 = 1 << 26;

/// Opens an area. Fails with the error of a resource that this process lacks, or `NODEV`.
pub type FileOpener = Arc<dyn Fn(AreaId) -> Result<OwnedFd, Errno> + Send + Sync>;

/// The swap areas as the pager sees them: extents leased in the segment, and descriptors.
///
/// An engine has its own (`SegmentExtents`), for a process does more with areas: it leases of
/// servers, with connections, mirrors and extents in doubt; it avoids an area that failed; its
/// forked children hold its extents and have other slots. The pager leases of files and block
/// devices alone, and is never forked. What the two have in common is the segment's own: leasing,
/// charging and looking up an extent.
#[derive(Clone)]
struct SharedExtents {
    segment: &'static Segment,
    index: SlotIndex,
    open: FileOpener,
    /// Held over any change of what is held: it must not change while it moves to another group.
    change: Arc<Mutex<()>>,
    /// The failure that a test injects, and the number of reads so far if it counts them.
    fail: u32,
    reads: Arc<AtomicU32>,
}

impl SharedExtents {
    fn change(&self) -> MutexGuard<'_, ()> {
        let guard = self.change.lock().expect("no thread panics with it");
        if self.segment.is_moving(self.index) {
            self.segment.regroup(self.index);
        }
        guard
    }

    /// The areas that are files or block devices: only processes have connections to the network's.
    fn files(&self) -> AreaMask {
        let is_file =
            |area: &Area| area.transport() == Transport::File && area.state() == AreaState::Open;
        let files = self.segment.areas().filter(|(_, area)| is_file(area));
        AreaMask(files.fold(0, |mask, (id, _)| mask | 1 << id.0))
    }
}

impl ExtentSource for SharedExtents {
    fn lease(&self) -> Option<Extent> {
        let _change = self.change();
        self.segment.lease_charged_in(self.index, self.files()).map(|extent| Extent(extent.0))
    }

    fn release(&self, extent: Extent, _punched: bool) {
        let _change = self.change();
        self.segment.release_charged(self.index, self.index, ExtentId(extent.0));
    }

    fn is_plain(&self, extent: Extent) -> bool {
        self.segment.is_plain(ExtentId(extent.0))
    }
}

impl AreaDirectory for SharedExtents {
    fn locate(&self, extent: Extent) -> Option<Location> {
        let place = self.segment.place_of(ExtentId(extent.0))?;
        let spot =
            FilePlace { area: place.area.0, generation: place.generation, offset: place.offset };
        // Only network areas have mirrors, and nothing of shared memory goes there.
        Some(Location { spot, mirror: None })
    }

    fn open(&self, area: u8) -> Result<Opened, Errno> {
        let is_file = self.segment.area(AreaId(area)).transport() == Transport::File;
        if is_file { (self.open)(AreaId(area)).map(Opened::File) } else { Err(Errno::NODEV) }
    }

    fn failed(&self, area: u8) {
        self.segment.area(AreaId(area)).count_error();
    }

    fn injected_fault(&self, _area: u8, writes: bool) -> Option<InjectedFault> {
        let is_short = !writes && is_read_short(self.fail, &self.reads);
        is_short.then_some(InjectedFault::Fails(Errno::NOMEM))
    }
}

/// Compressed memory and swap files for pages of shared regions.
pub struct Store {
    pool: Zram,
    file: FileDevice,
    areas: SharedExtents,
    /// The table of areas, as of the last check, and whether something lies on one that is being
    /// taken away.
    looked: AtomicU32,
    leaving: AtomicBool,
    /// Bytes that compressed memory may take: its share, and its bound, where it has one.
    pool_limit: AtomicU64,
    pool_bound: AtomicU64,
    acceptance: Acceptance,
    scratch: Mutex<Vec<u8>>,
}

/// Pages that were not brought back. Their data stays where it is.
#[derive(Debug, Default)]
pub struct Unloaded {
    /// Pages that cannot be read, or are not what was stored.
    pub failed: Vec<Slot>,
    /// Pages that this process could not read for want of memory or descriptors. That says nothing
    /// of them.
    pub short: Vec<Slot>,
    /// The first error of those.
    pub shortage: Option<ReadError>,
    /// Something was read from the areas.
    pub has_read: bool,
}

/// A page that was put away, or was not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// It is stored, and there from now on.
    In(RegionPage),
    /// There is no room for it.
    Full,
    /// It does not compress and waits for [`Store::write`].
    Poor,
    /// Compressed memory refuses it ([`swaptide_engine::memcg::acceptance`]); it waits for
    /// [`Store::write`]. Whether its bound was met just now.
    Refused(bool),
}

impl Store {
    /// Compressed memory, and a part of the swap areas. `fail`: what a test wants to fail, see
    /// [`PagerSettings::fail`](crate::PagerSettings::fail).
    ///
    /// # Errors
    /// When the address space for compressed memory is refused.
    pub fn new(
        segment: &'static Segment,
        index: SlotIndex,
        open: FileOpener,
        fail: u32,
    ) -> Result<Store, Errno> {
        let pool = Zram::new(SLOTS).map_err(|_| Errno::NOMEM)?;
        let mut key = [0u8; 32];
        for (bytes, word) in key.chunks_exact_mut(8).zip(&segment.header.key) {
            bytes.copy_from_slice(&word.load(Relaxed).to_le_bytes());
        }
        let mut salt = [0u8; 8];
        rustix::rand::getrandom(&mut salt, rustix::rand::GetRandomFlags::empty())?;
        let (change, reads) = (Arc::default(), Arc::default());
        let areas = SharedExtents { segment, index, open, change, fail, reads };
        let file = FileDevice::over(
            Box::new(areas.clone()),
            key,
            u64::from_le_bytes(salt),
            Box::new(areas.clone()),
        );
        Ok(Store {
            pool,
            file,
            areas,
            looked: AtomicU32::new(segment.areas_epoch()),
            leaving: AtomicBool::new(false),
            pool_limit: AtomicU64::new(u64::MAX),
            pool_bound: AtomicU64::new(u64::MAX),
            acceptance: Acceptance::new(
                segment.header.pool.max_percent.load(Relaxed),
                segment.header.pool.accept_percent.load(Relaxed),
            ),
            scratch: Mutex::default(),
        })
    }

    /// True if there is anything beyond compressed memory that takes pages: a file or a block
    /// device.
    pub fn has_file(&self) -> bool {
        let SharedExtents { segment, index, .. } = &self.areas;
        segment.has_area()
            && segment.slot(*index).control.no_writeback.load(Relaxed) == 0
            && self.areas.files() != AreaMask(0)
    }

    /// Follows changes of the areas: moves some of what lies on one that is being taken away. False
    /// when there is nothing to move.
    pub fn follow_areas(&self) -> bool {
        let segment = self.areas.segment;
        let epoch = segment.areas_epoch();
        if self.looked.swap(epoch, Relaxed) != epoch {
            let closed = |extent: Extent| {
                let place = segment.place_of(ExtentId(extent.0));
                place.is_some_and(|place| segment.area(place.area).state() == AreaState::Closed)
            };
            self.leaving.store(self.file.set_leaving(closed) > 0, Relaxed);
        }
        if !self.leaving.load(Relaxed) {
            return false;
        }
        let left = self.file.leave();
        if left == Leaving::Done {
            self.leaving.store(false, Relaxed);
        }
        matches!(left, Leaving::Left(_))
    }

    /// Sets what compressed memory may take: of a limit of `limit` bytes `percent`, and where it is
    /// bounded for all processes together, what the others leave.
    pub fn set_pool_limit(&self, limit: u64, percent: u64) {
        let SharedExtents { segment, index, .. } = &self.areas;
        let others = || {
            segment
                .claimed()
                .filter(|(other, _)| other != index)
                .map(|(_, slot)| ProcSlot::bytes(&slot.usage.pool_bytes))
                .sum::<u64>()
        };
        let cap = match segment.header.pool.cap_bytes.load(Relaxed) {
            0 => u64::MAX,
            cap => cap.saturating_sub(others()),
        };
        let bound = cap.min(self.acceptance.bound(limit));
        self.pool_bound.store(bound, Relaxed);
        // The limit and the percentage are words that any process of the run can write.
        self.pool_limit.store((limit / 100).saturating_mul(percent).min(bound), Relaxed);
    }

    /// Bytes by which compressed memory is over what it may have; while it refuses pages, over the
    /// threshold from which on it takes them again.
    pub fn pool_excess(&self) -> u64 {
        let mut goal = self.pool_limit.load(Relaxed);
        if self.acceptance.is_full() {
            goal = goal.min(self.acceptance.threshold(self.pool_bound.load(Relaxed)));
        }
        (self.pool.pool_bytes() as u64).saturating_sub(goal)
    }

    /// Bytes that compressed memory takes.
    pub fn pool_bytes(&self) -> usize {
        self.pool.pool_bytes()
    }

    /// Bytes of tables.
    pub fn metadata_bytes(&self) -> usize {
        self.pool.metadata_bytes() + self.file.stats().metadata_bytes
    }

    /// Puts a page into compressed memory, unless it belongs in the file.
    pub fn put(&self, slot: Slot, page: &Page, compressor: &mut Compressor) -> PutOutcome {
        let packed = compressor.compress(page);
        let has_file = self.has_file();
        match packed {
            Packed::Zero => return PutOutcome::In(RegionPage::Zero),
            Packed::Raw(_) if has_file => return PutOutcome::Poor,
            Packed::Bytes(_) if has_file => {
                match self
                    .acceptance
                    .ask(self.pool.pool_bytes() as u64, self.pool_bound.load(Relaxed))
                {
                    Verdict::Takes => {}
                    answer => return PutOutcome::Refused(answer == Verdict::AtLimit),
                }
            }
            _ => {}
        }
        // With a file behind it, what is over the limit is written back; without one, this is the
        // end.
        if !has_file && self.pool_excess() > 0 {
            return PutOutcome::Full;
        }
        match self.pool.insert(slot, &packed) {
            Ok(()) => PutOutcome::In(RegionPage::Pool),
            Err(_) if has_file => PutOutcome::Refused(true),
            Err(_) => PutOutcome::Full,
        }
    }

    /// Puts a page into compressed memory that belongs in the file, which does not take it.
    pub fn keep(&self, slot: Slot, page: &Page, compressor: &mut Compressor) -> PutOutcome {
        let kept =
            self.pool_excess() == 0 && self.pool.insert(slot, &compressor.compress(page)).is_ok();
        if kept { PutOutcome::In(RegionPage::Pool) } else { PutOutcome::Full }
    }

    /// Writes pages to the file as they are. False when that failed: then none of them is there.
    pub fn write(&self, pages: &[(Slot, &Page)]) -> bool {
        let pages: Vec<(Slot, Packed<'_>)> =
            pages.iter().map(|(slot, page)| (*slot, Packed::Raw(page))).collect();
        self.file.write(&pages).is_ok()
    }

    /// Copies pages from compressed memory to the file, as they are there. Answers for each whether
    /// it is in both now; a page that left meanwhile is not.
    pub fn copy_back(&self, slots: &[Slot], unpacker: &mut Unpacker) -> Vec<bool> {
        let mut bytes = self.scratch.lock().expect("no thread of the pager panics");
        bytes.clear();
        let mut kinds: Vec<Option<(PackedKind, usize)>> = Vec::with_capacity(slots.len());
        for slot in slots {
            let start = bytes.len();
            kinds
                .push(self.pool.packed(*slot, &mut bytes, unpacker).ok().map(|kind| (kind, start)));
        }
        let packed = |kind: PackedKind, start: usize| kind.with(&bytes[start..start + kind.len()]);
        let pages: Vec<(Slot, Packed<'_>)> = slots
            .iter()
            .zip(&kinds)
            .filter_map(|(slot, kind)| Some((*slot, packed(kind.as_ref()?.0, kind.as_ref()?.1)?)))
            .collect();
        let written = self.file.write(&pages).is_ok();
        kinds.iter().map(|kind| written && kind.is_some()).collect()
    }

    /// Brings pages back. Answers with those that could not be.
    pub fn load(
        &self,
        pages: &mut [(Slot, RegionPage, &mut Page)],
        unpacker: &mut Unpacker,
    ) -> Unloaded {
        let mut unloaded = Unloaded::default();
        let mut from_file: Vec<(Slot, &mut Page)> = Vec::new();
        for (slot, state, page) in pages {
            match state {
                RegionPage::Zero => page.fill(0),
                RegionPage::Pool => {
                    if self.pool.load(*slot, page, unpacker).is_err() {
                        unloaded.failed.push(*slot);
                    }
                }
                RegionPage::Area => from_file.push((*slot, page)),
                _ => unloaded.failed.push(*slot),
            }
        }
        if from_file.is_empty() {
            return unloaded;
        }
        unloaded.has_read = true;
        if self.file.read(&mut from_file).is_ok() {
            return unloaded;
        }
        // Some are there perhaps: one by one. All share the pauses, for faults of others may wait.
        unloaded.has_read = false;
        let mut pauses = READ_RETRY_DELAYS.into_iter();
        for (slot, page) in from_file {
            let mut result = self.file.read(&mut [(slot, &mut *page)]);
            while let Err(error) = &result
                && self.file.may_succeed_later(error)
                && let Some(pause) = pauses.next()
            {
                sleep(pause);
                result = self.file.read(&mut [(slot, &mut *page)]);
            }
            match result {
                Ok(()) => unloaded.has_read = true,
                Err(error) if error.is_own_shortage() => {
                    unloaded.short.push(slot);
                    unloaded.shortage.get_or_insert(error);
                }
                Err(_) => unloaded.failed.push(slot),
            }
        }
        unloaded
    }

    /// Forgets a page's data.
    pub fn free(&self, slot: Slot, state: RegionPage) {
        match state {
            RegionPage::Pool => drop(self.pool.free(slot)),
            RegionPage::Area => drop(self.file.free(slot)),
            _ => {}
        }
    }

    /// Gives back what compressed memory does not need, a little at a time.
    pub(crate) fn tidy(&self) {
        self.pool.compact(256 << 10);
        if self.pool.stored_bytes() == 0 && self.pool.pool_bytes() > 0 {
            self.pool.trim();
        }
    }
}

/// A compressor for the codec of a segment.
pub fn compressor(segment: &Segment) -> Compressor {
    Compressor::new(Scheme::from_number(segment.header.pool.codec.load(Relaxed)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;
    use swaptide_ipc::{EXTENT_BYTES, NewArea};
    use swaptide_sys::AsFd;
    use swaptide_sys::mem::{SharedMap, memfd_create};
    use swaptide_sys::page::PAGE_SIZE;

    /// The number by which the first 60 reads fail as for want of memory.
    const SHORT_FOR_A_WHILE: u32 = 14;

    fn segment() -> &'static Segment {
        let fd = memfd_create(c"test", Segment::BYTES as u64).expect("memfd");
        let map = SharedMap::map(fd.as_fd(), Segment::BYTES).expect("map");
        Segment::raw(map).expect("segment")
    }

    /// A store over one area, whose descriptor is not to be had while `lacks` is set.
    fn store(lacks: &Arc<AtomicBool>, fail: u32) -> (&'static Segment, Store) {
        let file = memfd_create(c"area", 4 * EXTENT_BYTES).expect("memfd");
        store_in(File::from(file), lacks, fail)
    }

    /// The same in a file.
    fn store_in(file: File, lacks: &Arc<AtomicBool>, fail: u32) -> (&'static Segment, Store) {
        let segment = segment();
        let id = segment.add_area(NewArea::of_file(0, 4)).expect("an area");
        let index = segment.claim(std::process::id(), 0).expect("a slot");
        let lacks = Arc::clone(lacks);
        let open: FileOpener = Arc::new(move |asked| {
            assert_eq!(asked, id);
            if lacks.load(Relaxed) {
                Err(Errno::MFILE)
            } else {
                Ok(file.try_clone().unwrap().into())
            }
        });
        (segment, Store::new(segment, index, open, fail).expect("a store"))
    }

    fn load(store: &Store, slots: &[Slot]) -> (Unloaded, Vec<Page>) {
        let mut pages = vec![[0; PAGE_SIZE]; slots.len()];
        let mut requests: Vec<_> = slots
            .iter()
            .zip(&mut pages)
            .map(|(slot, page)| (*slot, RegionPage::Area, page))
            .collect();
        let unloaded = store.load(&mut requests, &mut Unpacker::new());
        (unloaded, pages)
    }

    #[test]
    fn a_page_is_not_lost_for_want_of_memory() {
        let (_, store) = store(&Arc::default(), SHORT_FOR_A_WHILE);
        let slots = [Slot(3), Slot(4), Slot(900)];
        let contents = slots.map(|slot| [slot.0 as u8; PAGE_SIZE]);
        assert!(store.write(&[0, 1, 2].map(|at| (slots[at], &contents[at]))));
        let (unloaded, _) = load(&store, &slots);
        assert!(unloaded.failed.is_empty() && !unloaded.has_read, "{unloaded:?}");
        assert_eq!(unloaded.short, slots);
        assert!(unloaded.shortage.is_some_and(|error| error.is_own_shortage()));
        let pages = (0..60).map(|_| load(&store, &slots)).find(|(unloaded, _)| unloaded.has_read);
        let (unloaded, pages) = pages.expect("the shortage is over after 60 reads");
        assert!(unloaded.failed.is_empty(), "{unloaded:?}");
        for (slot, page) in slots.iter().zip(&pages) {
            let is_in = page.iter().all(|byte| *byte == slot.0 as u8);
            assert!(is_in || unloaded.short.contains(slot), "{slot:?}");
        }
        // What is no page is still told as such.
        let (unloaded, _) = load(&store, &[Slot(5), Slot(4)]);
        assert_eq!((unloaded.failed, unloaded.short), (vec![Slot(5)], vec![]));
    }

    #[test]
    fn a_page_is_not_lost_where_a_read_fails_for_a_moment() {
        let memfd = rustix::fs::memfd_create("area", rustix::fs::MemfdFlags::CLOEXEC);
        let file = File::from(memfd.expect("memfd"));
        file.set_len(4 * EXTENT_BYTES).expect("the area has its size");
        let store = store_in(file.try_clone().expect("a descriptor"), &Arc::default(), 0).1;
        let contents = [8; PAGE_SIZE];
        assert!(store.write(&[(Slot(3), &contents)]));
        let mut bytes = vec![0; 4 * EXTENT_BYTES as usize];
        file.read_exact_at(&mut bytes, 0).expect("the area can be read");
        file.set_len(0).expect("the area can be cut");
        let other = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(15));
            file.write_all_at(&bytes, 0).expect("the area can be written");
        });
        let (unloaded, pages) = load(&store, &[Slot(3)]);
        other.join().expect("the other thread ends");
        assert!(unloaded.has_read && unloaded.failed.is_empty(), "{unloaded:?}");
        assert_eq!(pages[0], contents);
    }

    #[test]
    fn segment_writes_cannot_fail_reads() {
        let (segment, store) = store(&Arc::default(), 0);
        assert!(store.write(&[(Slot(3), &[3; PAGE_SIZE])]));
        for fail in 0..=32 {
            segment.header.injection.fail.store(fail, Relaxed);
            let (unloaded, pages) = load(&store, &[Slot(3)]);
            assert!(unloaded.has_read && unloaded.short.is_empty(), "{fail}: {unloaded:?}");
            assert_eq!(pages[0][..], [3; PAGE_SIZE]);
        }
    }

    #[test]
    fn amounts_of_the_segment_that_cannot_be_are_no_overflow() {
        let (segment, store) = store(&Arc::default(), 0);
        for pid in [1, 2, 3] {
            let index = segment.claim(pid, 0).expect("a slot");
            segment.slot(index).usage.pool_bytes.store(u64::MAX, Relaxed);
        }
        segment.header.pool.cap_bytes.store(u64::MAX, Relaxed);
        store.set_pool_limit(u64::MAX, u64::from(u32::MAX));
        assert_eq!(store.pool_excess(), 0, "nothing is in compressed memory");
        segment.header.pool.cap_bytes.store(1, Relaxed);
        store.set_pool_limit(u64::MAX, u64::from(u32::MAX));
        assert_eq!(store.pool_limit.load(Relaxed), 0, "others have more than all");
    }

    #[test]
    fn a_page_is_not_lost_for_want_of_a_descriptor() {
        let lacks = Arc::new(AtomicBool::new(false));
        let (segment, store) = store(&lacks, 0);
        let slot = Slot(7);
        assert!(store.write(&[(slot, &[7; PAGE_SIZE])]));
        // What was opened is forgotten, as in an area that is opened for the first time.
        store.file.abandon(Vec::new());
        lacks.store(true, Relaxed);
        let (unloaded, _) = load(&store, &[slot]);
        assert_eq!((unloaded.failed, unloaded.short), (vec![], vec![slot]));
        lacks.store(false, Relaxed);
        let (unloaded, pages) = load(&store, &[slot]);
        assert!(unloaded.has_read && unloaded.short.is_empty(), "{unloaded:?}");
        assert_eq!(pages[0][..], [7; PAGE_SIZE]);
        assert_eq!(segment.areas().next().expect("the area").1.errors(), 0);
    }
}
