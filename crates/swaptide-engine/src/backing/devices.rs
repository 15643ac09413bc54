//! The two devices of a process and the swap layer over them.
//!
//! Owns: for compressed memory and for the swap areas behind it, the slots (`swaptide-core`) and
//! the data (`swaptide-store`) of each. The areas (files, block devices) share one device: on which
//! of them a page's data lies is decided when a piece of it is leased.
//!
//! Invariants
//! 1. A slot's data is stored before its table entry becomes a shadow, and dropped before or
//!    together with the slot.
//! 2. Only one thread at a time works on a slot: the worker whose staging slab holds the folio, or
//!    the holder of the memory lock.
//!
//! Locks: the devices' own, taken last (see `lib`).

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use swaptide_core::{
    CpuId, Expect, FolioId, GroupId, Kind, Order, Shadow, SwapDevice, SwapEntry, SwapOffset,
    SwapType, TableMemory,
};
use swaptide_ipc::{
    AreaId, AreaMask, AreaState, ExportFacts, ExtentId, Segment, SlotIndex, Transport,
};
use swaptide_store::codec::{Scheme, Unpacker};
use swaptide_store::file::{
    AreaDirectory, EXTENT_BYTES, Extent, ExtentSource, FileDevice, FilePlace, HandedOver,
    InjectedFault, Leaving, Location, MAX_AREAS, Opened, ServerId,
};
use swaptide_store::nbd::{Dialer, Export, Flags};
use swaptide_store::zram::Zram;
use swaptide_store::{Page, Slot};
use swaptide_sys::Errno;
use swaptide_sys::affinity::{current_cpu, own_affinity};
use swaptide_sys::lock::Lock;
use swaptide_sys::mem::{Advice, Mapping, advise};
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::thread::now;

use crate::EngineError;
use crate::fault_injection::{Injection, is_read_short};
use crate::mm::types::{FillerNo, MAX_FILLERS};

/// Swap type of compressed memory.
pub(crate) const POOL: SwapType = SwapType::new(0).expect("a swap type");
/// Swap type of all swap areas.
pub(crate) const AREA: SwapType = SwapType::new(1).expect("a swap type");
/// Slots of the compressed memory's device. They cost nothing until used; no program has more
/// swapped pages (256 GiB).
const POOL_SLOTS: u32 = 1 << 26;

/// Slots for an extent of 512 blocks: packed pages may be a quarter of a block on average.
const SLOTS_PER_EXTENT: u32 = 2048;
/// Slots that there are at least: areas may be added later (64 GiB of pages).
const MIN_AREA_SLOTS: u32 = 1 << 24;

/// Slots that a device has at least where address space is refused (1 GiB of pages).
const MIN_SLOTS: u32 = 1 << 18;

/// The swap areas have room for copies of what the program has again, while more than this part of
/// them is free.
const ROOMY_DIVISOR: u64 = 4;

/// An area that did not take a write is left alone for so long, where there is another one. One
/// that fails again and again the supervisor retires.
const FAILED_WRITE_BACKOFF: Duration = Duration::from_millis(200);
/// The time for which a process leases no extent of an area that RLIMIT_FSIZE forbids it to write:
/// it may have another limit by then.
const FILE_SIZE_LIMIT_BACKOFF: Duration = Duration::from_secs(10);

/// The folio that stands in the swap cache while a slot gets another shadow.
const RENEWING: FolioId = FolioId(u32::MAX >> 9);
/// The folio of the first thread that puts pages in place, while it brings in what the slot holds;
/// the other threads' follow.
const LOADING: FolioId = FolioId(u32::MAX >> 10);

// The segment's areas and the store's are the same.
const _: () = assert!(MAX_AREAS == swaptide_ipc::MAX_AREAS);
/// The group of everything as long as a run has only one.
const GROUP: GroupId = GroupId(0);
/// CPUs that allocate in clusters of their own; those beyond share them.
const MAX_CPUS: u32 = 256;

/// Asks the supervisor for the descriptor of an area. Fails with what this process lacks for that,
/// or `NODEV`.
pub type OpenArea = fn(AreaId) -> Result<OwnedFd, Errno>;

/// The swap areas as this process sees them: extents leased in the shared segment, and descriptors
/// from the supervisor.
#[derive(Clone)]
struct SegmentExtents {
    segment: &'static Segment,
    index: Arc<AtomicU32>,
    open: OpenArea,
    /// Held over any change of what is held: it must not change while it moves to another group.
    change: Arc<Lock<()>>,
    /// Until when nothing is leased of an area that did not take a write, if another one has room.
    back_off_until_ns: Arc<[AtomicU64; MAX_AREAS]>,
    /// Until when nothing is leased of an area that this process may not write to, as its own
    /// limits say.
    barred: Arc<[AtomicU64; MAX_AREAS]>,
    /// Reads and writes so far, where a test counts them.
    transfers: Arc<[AtomicU32; 2]>,
    injection: Injection,
}

impl SegmentExtents {
    fn index(&self) -> SlotIndex {
        SlotIndex(self.index.load(Relaxed))
    }

    /// Areas that nothing is to be leased of for the moment.
    fn backed_off(&self) -> u32 {
        Self::now_in(&self.back_off_until_ns)
    }

    fn now_in(until: &[AtomicU64; MAX_AREAS]) -> u32 {
        let now = now().0;
        (0..)
            .zip(until)
            .filter(|(_, until)| now < until.load(Relaxed))
            .fold(0, |mask, (area, _)| mask | 1 << area)
    }

    /// Goes over to the group that the process belongs to now. Under `change`.
    fn follow_group(&self) {
        if self.segment.is_moving(self.index()) {
            self.segment.regroup(self.index());
        }
    }
}

impl ExtentSource for SegmentExtents {
    fn lease(&self) -> Option<Extent> {
        let _change = self.change.lock();
        self.follow_group();
        let (backed_off, barred) = (self.backed_off(), Self::now_in(&self.barred));
        let lease = |mask: u32| self.segment.lease_charged_in(self.index(), AreaMask(mask));
        let elsewhere = (backed_off != 0).then(|| lease(!backed_off & !barred)).flatten();
        elsewhere.or_else(|| lease(!barred)).map(|extent| Extent(extent.0))
    }

    fn back_off(&self, extent: Extent) -> bool {
        let Some(place) = self.segment.place_of(ExtentId(extent.0)) else { return false };
        if let Some(until) = self.back_off_until_ns.get(usize::from(place.area.0)) {
            until.store(now().0 + FAILED_WRITE_BACKOFF.as_nanos() as u64, Relaxed);
        }
        self.segment
            .has_room_in(self.index(), AreaMask(!self.backed_off() & !Self::now_in(&self.barred)))
    }

    fn bar(&self, extent: Extent) {
        let Some(place) = self.segment.place_of(ExtentId(extent.0)) else { return };
        if let Some(until) = self.barred.get(usize::from(place.area.0)) {
            until.store(now().0 + FILE_SIZE_LIMIT_BACKOFF.as_nanos() as u64, Relaxed);
        }
    }

    fn release(&self, extent: Extent, _punched: bool) {
        let _change = self.change.lock();
        self.segment.release_charged(self.index(), self.index(), ExtentId(extent.0));
    }

    fn release_shared(&self, extent: Extent) -> bool {
        let _change = self.change.lock();
        let (index, extent) = (self.index(), ExtentId(extent.0));
        self.segment.release_charged(index, index, extent)
            && self.segment.retake_charged(index, extent)
    }

    fn is_plain(&self, extent: Extent) -> bool {
        self.segment.is_plain(ExtentId(extent.0))
    }

    fn is_rotational(&self, extent: Extent) -> bool {
        self.segment.is_rotational(ExtentId(extent.0))
    }

    fn is_in_doubt(&self, extent: Extent) -> bool {
        self.segment.is_in_doubt(ExtentId(extent.0))
    }

    fn is_on_server(&self, extent: Extent) -> bool {
        let place = self.segment.place_of(ExtentId(extent.0));
        place.is_some_and(|place| self.segment.area(place.area).transport() == Transport::Nbd)
    }

    fn defers_release(&self, _extent: Extent) -> bool {
        true
    }

    fn server_of(&self, extent: Extent) -> Option<ServerId> {
        let place = self.segment.place_of(ExtentId(extent.0))?;
        let is_remote =
            place.mirror.is_none() && self.segment.area(place.area).transport() == Transport::Nbd;
        is_remote.then_some(ServerId(place.area.0))
    }
}

impl AreaDirectory for SegmentExtents {
    fn locate(&self, extent: Extent) -> Option<Location> {
        let place = self.segment.place_of(ExtentId(extent.0))?;
        let mirror = place.mirror.map(|spot| FilePlace {
            area: spot.area.0,
            generation: spot.generation,
            offset: spot.offset,
        });
        Some(Location {
            spot: FilePlace {
                area: place.area.0,
                generation: place.generation,
                offset: place.offset,
            },
            mirror,
        })
    }

    fn open(&self, area: u8) -> Result<Opened, Errno> {
        let (id, open) = (AreaId(area), self.open);
        let area = self.segment.area(id);
        Ok(match area.transport() {
            Transport::File => Opened::File(open(id)?),
            Transport::Nbd => {
                let ExportFacts { bytes, flags, structured, longest, connections } = area.export();
                let export = Export {
                    size: bytes,
                    flags: Flags::from_bits_retain(flags),
                    structured,
                    longest,
                    connections,
                };
                Opened::Nbd {
                    connection: open(id).ok(),
                    export,
                    dialer: Box::new(Redial { open, id }),
                }
            }
        })
    }

    fn failed(&self, area: u8) {
        self.segment.area(AreaId(area)).count_error();
    }

    fn doubt(&self, extent: Extent) -> bool {
        self.segment.doubt_extent(ExtentId(extent.0))
    }

    fn clear_doubt(&self, extent: Extent) {
        self.segment.clear_doubt(ExtentId(extent.0));
    }

    fn injected_fault(&self, area: u8, writes: bool) -> Option<InjectedFault> {
        if !writes && is_read_short(self.injection.fail, &self.transfers[0]) {
            return Some(InjectedFault::Fails(Errno::NOMEM));
        }
        let every = self.injection.io_fault_every;
        if every == 0 || area != 0 {
            return None;
        }
        let n = self.transfers[usize::from(writes)].fetch_add(1, Relaxed);
        const FAULTS: [InjectedFault; 5] = [
            InjectedFault::Fails(Errno::IO),
            InjectedFault::Short,
            InjectedFault::Slow(Duration::from_millis(30)),
            InjectedFault::Torn,
            InjectedFault::Fails(Errno::NOSPC),
        ];
        n.is_multiple_of(every).then(|| FAULTS[(n / every) as usize % FAULTS.len()])
    }
}

/// Asks the supervisor for another connection to an export.
struct Redial {
    open: OpenArea,
    id: AreaId,
}

impl Dialer for Redial {
    fn dial(&self) -> Result<OwnedFd, Errno> {
        (self.open)(self.id)
    }
}

/// Gives the memory of an empty swap table back.
fn give_back(page: *const u8, len: usize) {
    let start = VirtAddr(page.addr());
    // SAFETY: the swap layer passes whole pages of a table of its own that nothing uses; they read
    // as zeros afterwards, as it expects. The engine's memory is not registered with a userfaultfd:
    // this is no event. On failure the memory is merely kept.
    let _ = unsafe { advise(VirtRange { start, end: start.offset(len) }, Advice::DontNeed) };
}

/// A device of `slots` slots, or of fewer where so much address space is refused: its tables lie in
/// a mapping of their own (a word for each slot), which takes memory only where it is written to.
fn slot_device(ty: SwapType, mut slots: u32) -> Result<SwapDevice, EngineError> {
    let mapping = loop {
        match Mapping::reserve(SwapDevice::table_bytes(slots)) {
            Ok(mapping) => break mapping,
            // Strict overcommit: a smaller device is better than none.
            Err(_) if slots / 2 >= MIN_SLOTS => slots /= 2,
            Err(errno) => return Err(EngineError::Memory("the swap tables' address space", errno)),
        }
    };
    let (start, len) =
        (NonNull::new(mapping.as_ptr()).expect("no mapping starts at zero"), mapping.len());
    // SAFETY: new private memory, hence zeros on whole pages; nothing else refers to it, and it
    // stays until the mapping is dropped.
    let memory = unsafe { TableMemory::new(start, len, Box::new(mapping)) };
    // By their numbers: some of these may not be the process's.
    let last = own_affinity().ok().and_then(|cpus| cpus.iter().last()).unwrap_or(0);
    let cpus = last.saturating_add(1).min(MAX_CPUS) as usize;
    Ok(SwapDevice::new_in(memory, ty, slots, cpus, Kind::Solid).with_table_discard(give_back))
}

/// The CPU in whose cluster the calling thread allocates: should it go to another one meanwhile,
/// that is no more than a lock waited for.
fn this_cpu() -> CpuId {
    CpuId(current_cpu() as u16)
}

/// Compressed memory and the swap areas, with the slots of both.
pub struct Devices {
    /// Slots of compressed memory.
    pub pool_slots: SwapDevice,
    /// Data of compressed memory.
    pub pool: Zram,
    /// The tier below compressed memory, if there is one at the moment ([`Devices::is_backed`]).
    pub areas: AreaTier,
    /// The compression of pages.
    pub scheme: Scheme,
    /// Pages that compressed memory had populated when that was counted last.
    pub(crate) populated_counted: AtomicU64,
    segment: &'static Segment,
}

/// Slots and data of the swap areas: what lies on which of them is the data's matter.
pub struct AreaTier {
    /// The allocation of slots, for all areas together.
    pub slots: SwapDevice,
    /// The placement of each slot's page on the areas.
    pub device: FileDevice,
    extents: SegmentExtents,
    roomy: AtomicBool,
    /// There are areas that are remote.
    has_remote: AtomicBool,
    /// Some of what lies there shall be moved to other areas.
    leaving: AtomicBool,
}

impl AreaTier {
    /// Has what is held of the areas charged to the group that the process belongs to now.
    pub(crate) fn follow_group(&self) {
        let _change = self.extents.change.lock();
        self.extents.follow_group();
    }

    /// Opens the areas that are files: a program may make itself unable to ask for them.
    fn open_files(&self) {
        let files =
            self.extents.segment.areas().filter(|(_, area)| area.transport() == Transport::File);
        let opened = files.filter_map(|(id, area)| {
            Some(HandedOver {
                area: id.0,
                generation: area.generation(),
                opened: AreaDirectory::open(&self.extents, id.0).ok()?,
            })
        });
        self.device.abandon(opened.collect());
    }

    /// In a forked child, before anything else: its parent's other threads may have held the locks
    /// at the fork.
    ///
    /// # Safety
    /// As of [`FileDevice::force_unlock`].
    pub unsafe fn force_unlock(&self) {
        // SAFETY: the caller's promise; `change` guards no data of this process.
        unsafe {
            self.extents.change.force_unlock();
            self.device.force_unlock();
        }
    }

    /// In a forked child: what it was given, and a salt of its own.
    pub fn inherit(&self, descriptors: Vec<HandedOver>, salt: u64) {
        self.device.abandon(descriptors);
        self.device.rekey_salt(salt);
    }

    fn look_for_remote(&self) {
        let is_remote =
            self.extents.segment.areas().any(|(_, area)| area.transport() == Transport::Nbd);
        self.has_remote.store(is_remote, Relaxed);
    }

    /// True when writing may take an unknown time.
    pub(crate) fn has_remote(&self) -> bool {
        self.has_remote.load(Relaxed)
    }

    /// True when a page's data is to be had from a server alone.
    pub(crate) fn is_remote(&self, entry: SwapEntry) -> bool {
        self.has_remote() && self.device.server_of(Slot(entry.offset().0)).is_some()
    }

    /// The table of areas has changed: looks what shall be left.
    pub(crate) fn look_at_areas(&self) {
        self.look_for_remote();
        let closed = |extent: Extent| {
            let place = self.extents.segment.place_of(ExtentId(extent.0));
            place.is_some_and(|place| {
                self.extents.segment.area(place.area).state() == AreaState::Closed
            })
        };
        self.leaving.store(self.device.set_leaving(closed) > 0, Relaxed);
    }

    /// Moves some of what lies on closed areas to others. False when there is nothing to move, or
    /// it cannot be moved at the moment.
    pub(crate) fn leave_areas(&self) -> bool {
        if !self.leaving.load(Relaxed) {
            return false;
        }
        let left = self.device.leave();
        if left == Leaving::Done {
            self.leaving.store(false, Relaxed);
        }
        matches!(left, Leaving::Left(_))
    }
}

impl Devices {
    /// The failures that a test injects.
    pub(crate) fn injection(&self) -> Injection {
        self.areas.extents.injection
    }

    /// Prefetches the slot of an entry of compressed memory that will be loaded soon, and the
    /// handle that leads to its data.
    pub(crate) fn prefetch_slot(&self, entry: SwapEntry) {
        if entry.ty() == POOL {
            self.pool_slots.prefetch(entry.offset());
            self.pool.prefetch_handle(Slot(entry.offset().0));
        }
    }

    /// Prefetches the data itself, a little later.
    pub(crate) fn prefetch_data(&self, entry: SwapEntry) {
        if entry.ty() == POOL {
            self.pool.prefetch(Slot(entry.offset().0));
        }
    }

    /// Makes the devices. `open` asks the supervisor for the descriptor of an area.
    ///
    /// # Errors
    /// When memory is refused.
    pub fn new(
        segment: &'static Segment,
        index: Arc<AtomicU32>,
        open: OpenArea,
        salt: u64,
    ) -> Result<Devices, EngineError> {
        let injection = Injection::of(&segment.header);
        let pool = match injection.pool_room() {
            Some(bytes) => Zram::with_room(POOL_SLOTS, bytes),
            None => Zram::new(POOL_SLOTS),
        };
        let pool = pool
            .map_err(|_| EngineError::Devices("the compressed pool's address space was refused"))?;
        let pool_slots = slot_device(POOL, POOL_SLOTS)?;
        let mut key = [0u8; 32];
        for (bytes, word) in key.chunks_exact_mut(8).zip(&segment.header.key) {
            bytes.copy_from_slice(&word.load(Relaxed).to_le_bytes());
        }
        let slots =
            segment.extents().saturating_mul(SLOTS_PER_EXTENT).clamp(MIN_AREA_SLOTS, 1 << 27);
        let slots = slot_device(AREA, slots)?;
        let extents = SegmentExtents {
            segment,
            index,
            open,
            change: Arc::new(Lock::new(())),
            back_off_until_ns: Arc::default(),
            barred: Arc::default(),
            transfers: Arc::default(),
            injection,
        };
        let device =
            FileDevice::over(Box::new(extents.clone()), key, salt, Box::new(extents.clone()));
        let tier = AreaTier {
            slots,
            device,
            extents,
            roomy: true.into(),
            has_remote: false.into(),
            leaving: false.into(),
        };
        tier.look_for_remote();
        tier.open_files();
        let scheme = Scheme::from_number(segment.header.pool.codec.load(Relaxed));
        Ok(Devices {
            pool_slots,
            pool,
            areas: tier,
            scheme,
            populated_counted: AtomicU64::new(0),
            segment,
        })
    }

    /// True if compressed memory certainly has slots and address space for `coming` pages, if
    /// `in_flight` others that have a slot go there as well.
    pub(crate) fn pool_has_room(&self, in_flight: usize, coming: usize) -> bool {
        let usage = self.pool_slots.usage();
        (usage.capacity - usage.used) as usize >= coming
            && self.pool.room_pages() >= in_flight + coming
    }

    /// True if there is anything beyond compressed memory that takes pages.
    pub(crate) fn is_backed(&self) -> bool {
        self.segment.has_area()
    }

    /// The slots of a swap type.
    pub fn slots(&self, ty: SwapType) -> &SwapDevice {
        if ty == POOL { &self.pool_slots } else { &self.areas.slots }
    }

    /// Slots for a folio of `2^order` pages in compressed memory.
    pub(crate) fn alloc_pool(&self, order: u8, folio: FolioId) -> Option<SwapEntry> {
        self.pool_slots
            .alloc_folio(this_cpu(), Order::new(order)?, folio, GROUP)
            .ok()
            .map(|offset| SwapEntry::new(POOL, offset))
    }

    /// A slot for one page on a swap area.
    pub(crate) fn alloc_area(&self, folio: FolioId) -> Option<SwapEntry> {
        self.areas
            .slots
            .alloc_folio(this_cpu(), Order::ZERO, folio, GROUP)
            .ok()
            .map(|offset| SwapEntry::new(AREA, offset))
    }

    /// True when the areas have little room left, at the last [`Devices::metadata_bytes`].
    pub(crate) fn area_is_scarce(&self) -> bool {
        !self.areas.roomy.load(Relaxed)
    }

    /// Drops the data of a slot that holds a shadow, and the slot.
    #[track_caller]
    pub(crate) fn drop_swapped(&self, entry: SwapEntry) {
        self.drop_run(entry, 1, Expect::Shadow);
    }

    /// Drops the data of `n` slots of one cluster, and the slots, which hold what `expect` says.
    #[track_caller]
    pub(crate) fn drop_run(&self, first: SwapEntry, n: u32, expect: Expect) {
        for entry in (0..n).map(|k| first.plus(k)) {
            let slot = Slot(entry.offset().0);
            let is_held = match entry.ty() {
                AREA => self.areas.device.free(slot),
                _ => self.pool.free(slot),
            };
            if !is_held {
                let caller = std::panic::Location::caller();
                crate::fatal(&format!(
                    "swap entry {entry:?} is in use and its device holds nothing for it (found at \
                    {caller})"
                ));
            }
        }
        if let Err(mismatch) = self.slots(first.ty()).free(first.offset(), n, expect) {
            crate::fatal(&format!("a swap slot was not what it must be: {mismatch}"));
        }
    }

    /// The folio of a thread that brought a page in leaves the swap cache, and the slot stays: it
    /// gets its shadow back.
    pub(crate) fn return_shadow(&self, entry: SwapEntry, folio: FolioId, shadow: Shadow) {
        let slots = self.slots(entry.ty());
        if let Err(mismatch) =
            slots.folio_to_shadow(entry.offset(), 1, folio, shadow, swaptide_core::ZeroMask::Keep)
        {
            crate::fatal(&format!("a slot was not what its load had made it: {mismatch}"));
        }
    }

    /// The page of an entry whose slot holds the folio of a thread that brings it in is given up:
    /// that thread drops it.
    pub(crate) fn abandon_to_loader(&self, entry: SwapEntry) {
        if let Err(mismatch) = self.slots(entry.ty()).put(entry.offset(), 1) {
            crate::fatal(&format!("a page that is brought in was given up twice: {mismatch}"));
        }
    }

    /// True while the swap areas have room for what its pages' program has again, at the last
    /// [`Devices::metadata_bytes`].
    pub(crate) fn area_is_roomy(&self) -> bool {
        self.areas.roomy.load(Relaxed) && self.is_backed()
    }

    /// True when a slot certainly holds what the page is. `buffer` is scratch.
    pub fn holds(
        &self,
        entry: SwapEntry,
        page: &Page,
        buffer: &mut Page,
        unpacker: &mut Unpacker,
    ) -> bool {
        let slot = Slot(entry.offset().0);
        if entry.ty() == AREA {
            self.areas.device.unchanged(slot, page)
        } else {
            self.pool.load(slot, buffer, unpacker).is_ok() && buffer == page
        }
    }

    /// Gives a slot that holds a shadow a newer one: its page came in, was not changed, and went
    /// out again.
    pub(crate) fn renew_shadow(&self, entry: SwapEntry, shadow: Shadow) {
        let (slots, offset) = (self.slots(entry.ty()), entry.offset());
        let renewed = slots.shadow_to_folio(offset, 1, RENEWING, None).and_then(|_| {
            slots.folio_to_shadow(offset, 1, RENEWING, shadow, swaptide_core::ZeroMask::Keep)
        });
        if let Err(mismatch) = renewed {
            crate::fatal(&format!(
                "a page went out as it was before, and its slot was not what it must be: {mismatch}"
            ));
        }
    }

    /// Frees a slot alone.
    pub(crate) fn free_slot(&self, entry: SwapEntry, expect: Expect) {
        if let Err(mismatch) = self.slots(entry.ty()).free(entry.offset(), 1, expect) {
            crate::fatal(&format!("a swap slot was not what it must be: {mismatch}"));
        }
    }

    /// Turns `n` slots from folio to shadow.
    pub(crate) fn to_shadow(&self, entry: SwapEntry, n: u32, folio: FolioId, shadow: Shadow) {
        self.to_shadow_with_zeros(entry, n, folio, shadow, 0);
    }

    /// The same (at most 64 slots), where the pages whose bits are set in `zeros` are all zeros:
    /// the thread that brings them back need not ask the device.
    pub(crate) fn to_shadow_with_zeros(
        &self,
        entry: SwapEntry,
        n: u32,
        folio: FolioId,
        shadow: Shadow,
        zeros: u64,
    ) {
        let mask = swaptide_core::ZeroMask::Bits(std::slice::from_ref(&zeros));
        if let Err(mismatch) =
            self.slots(entry.ty()).folio_to_shadow(entry.offset(), n, folio, shadow, mask)
        {
            crate::fatal(&format!(
                "a folio left the swap cache and its slots were not what they must be: {mismatch}"
            ));
        }
    }

    /// Bytes of tables and handles. Looks how full the areas are, too: what all processes have
    /// leased is taken, but for what is free of this one's.
    pub fn metadata_bytes(&self) -> usize {
        let stats = self.areas.device.stats();
        let (extents, used) = (self.segment.extents(), self.segment.extents_used());
        let bytes = u64::from(extents) * EXTENT_BYTES;
        let free = u64::from(extents.saturating_sub(used)) * EXTENT_BYTES + stats.free_bytes;
        self.areas.roomy.store(free > bytes / ROOMY_DIVISOR, Relaxed);
        let areas = self.areas.slots.metadata_bytes() + stats.metadata_bytes;
        self.pool_slots.metadata_bytes() + self.pool.metadata_bytes() + areas
    }
}

/// The folio by which a thread brings pages in.
pub(crate) fn folio_of(filler: FillerNo) -> FolioId {
    FolioId(LOADING.0 + u32::from(filler.0))
}

/// The thread that brings in the page of a slot that holds this folio; `None` of a folio that is a
/// staging frame.
pub(crate) fn filler_of(folio: FolioId) -> Option<FillerNo> {
    let at = folio.0.checked_sub(LOADING.0)? as usize;
    (at < MAX_FILLERS).then_some(FillerNo(at as u8))
}

/// The offset of an entry `n` slots further.
pub(crate) fn entry_plus(entry: SwapEntry, n: u32) -> SwapEntry {
    entry.plus(n)
}

/// An entry that stands where none is meant yet.
pub(crate) const NO_ENTRY: SwapEntry = SwapEntry::new(POOL, SwapOffset(0));

/// Devices for tests of what stands on them.
#[cfg(test)]
pub(crate) mod testing {
    use swaptide_ipc::NewArea;
    use swaptide_store::codec::Packed;
    use swaptide_sys::AsFd;
    use swaptide_sys::mem::{SharedMap, memfd_create};
    use swaptide_sys::page::PAGE_SIZE;

    use super::*;

    const FOLIO: FolioId = FolioId(7);

    /// Devices with a swap area of a few extents.
    pub(crate) fn devices() -> Devices {
        let fd = memfd_create(c"segment", Segment::BYTES as u64).expect("memfd");
        let map = SharedMap::map(fd.as_fd(), Segment::BYTES).expect("map");
        let segment = Segment::raw(map).expect("segment");
        segment.add_area(NewArea::of_file(0, 8)).expect("an area");
        let index = segment.claim(10, 0).expect("slot");
        let open: OpenArea = |_| memfd_create(c"swap", 16 << 20);
        Devices::new(segment, Arc::new(AtomicU32::new(index.0)), open, 1).expect("devices")
    }

    /// The entry of a page that lies in compressed memory.
    pub(crate) fn pooled(devices: &Devices, shadow: Shadow, zero: bool) -> SwapEntry {
        let entry = devices.alloc_pool(0, FOLIO).expect("a slot");
        let page = [0x5a; PAGE_SIZE];
        let packed = if zero { Packed::Zero } else { Packed::Raw(&page) };
        devices.pool.insert(Slot(entry.offset().0), &packed).expect("room");
        devices.to_shadow_with_zeros(entry, 1, FOLIO, shadow, u64::from(zero));
        entry
    }

    /// The entry of a page that lies on the swap area.
    pub(crate) fn on_area(devices: &Devices, shadow: Shadow) -> SwapEntry {
        let entry = devices.alloc_area(FOLIO).expect("a slot");
        let page = [0x5a; PAGE_SIZE];
        let written = devices.areas.device.write(&[(Slot(entry.offset().0), Packed::Raw(&page))]);
        written.expect("the page is written");
        devices.to_shadow(entry, 1, FOLIO, shadow);
        entry
    }
}
