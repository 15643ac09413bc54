//! The two devices of a process and the swap layer over them.
//!
//! Owns: for compressed memory and for the swap file, the slots (`swaptide-core`) and the data (`swaptide-store`) of each.
//!
//! Invariants
//! 1. A slot's data is stored before its table entry becomes a shadow, and dropped before or together with the slot.
//! 2. Only one thread at a time works on a slot: the worker whose staging slab holds the folio, or the holder of the memory lock.
//!
//! Locks: the devices' own, taken last (see `lib`).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use swaptide_core::{CpuId, FolioId, GroupId, Kind, Order, Shadow, SwapDevice, SwapEntry, SwapOffset, SwapType};
use swaptide_ipc::{ExtentId, Segment, SlotIndex};
use swaptide_store::codec::Unpacker;
use swaptide_store::file::{EXTENT_BYTES, Extent, ExtentSource, FileDevice};
use swaptide_store::zram::Zram;
use swaptide_store::{Page, Slot};
use swaptide_sys::lock::Lock;
use swaptide_sys::mem::{Advice, advise};
use swaptide_sys::page::{VirtAddr, VirtRange};

use crate::EngineError;

/// Swap type of compressed memory.
pub const POOL: SwapType = SwapType::new(0).expect("a swap type");
/// Swap type of the swap file.
pub const FILE: SwapType = SwapType::new(1).expect("a swap type");
/// Slots of the compressed memory's device. They cost nothing until used; no program has more swapped pages (256 GiB).
pub const POOL_SLOTS: u32 = 1 << 26;

/// Slots of the file's device for an extent of 512 blocks: packed pages may be a quarter of a block on average.
const SLOTS_PER_EXTENT: u32 = 2048;

/// The folio that stands in the swap cache while a slot gets another shadow.
const RENEWING: FolioId = FolioId(u32::MAX >> 9);

/// The group of everything as long as a run has only one.
const GROUP: GroupId = GroupId(0);
const CPU: CpuId = CpuId(0);

/// Extents of the swap file, leased in the shared segment for this process.
struct Leases {
    segment: &'static Segment,
    index: Arc<AtomicU32>,
}

impl Leases {
    fn index(&self) -> SlotIndex {
        SlotIndex(self.index.load(Relaxed))
    }
}

impl ExtentSource for Leases {
    fn lease(&self) -> Option<Extent> {
        self.segment.lease_extent(self.index()).map(|extent| Extent(extent.0))
    }

    fn release(&self, extent: Extent, _punched: bool) {
        self.segment.release_extent(self.index(), ExtentId(extent.0));
    }
}

/// Gives the memory of an empty swap table back.
fn give_back(page: *const u8, len: usize) {
    let start = VirtAddr(page.addr());
    // SAFETY: the swap layer passes whole pages of a table of its own that nobody uses; they read as zeros afterwards, as it expects. The
    // engine's memory is not registered with a userfaultfd: this is no event. On failure the memory is merely kept.
    let _ = unsafe { advise(VirtRange { start, end: start.offset(len) }, Advice::DontNeed) };
}

/// See the module's description.
pub struct Devices {
    /// Slots of compressed memory.
    pub pool_slots: SwapDevice,
    /// Data of compressed memory.
    pub pool: Zram,
    /// The swap file, if the run has one.
    pub file: Option<FileTier>,
}

/// The swap file's slots and data.
pub struct FileTier {
    /// Slots.
    pub slots: SwapDevice,
    /// Data.
    pub device: FileDevice,
    /// The file itself, to hand to a forked child.
    pub fd: Lock<OwnedFd>,
    /// Bytes of the file, for all processes together.
    bytes: u64,
    roomy: AtomicBool,
}

impl FileTier {
    /// In a forked child: the file under its number there, and a salt of its own.
    pub fn inherit(&self, fd: OwnedFd, salt: u64) -> std::io::Result<()> {
        self.device.forget_ring();
        self.device.replace_fd(fd.try_clone()?);
        self.device.rekey_salt(salt);
        // The parent's number means something else here, or nothing: it is forgotten, not closed.
        std::mem::forget(std::mem::replace(&mut *self.fd.lock(), fd));
        Ok(())
    }
}

impl Devices {
    /// Makes the devices.
    ///
    /// # Errors
    /// When memory is refused.
    pub fn new(
        segment: &'static Segment,
        index: Arc<AtomicU32>,
        file: Option<OwnedFd>,
        salt: u64,
    ) -> Result<Devices, EngineError> {
        let pool = Zram::new(POOL_SLOTS).map_err(|_| EngineError::Devices("the compressed pool's address space was refused"))?;
        let extents = segment.header.extents.load(Relaxed);
        let file = match file {
            Some(fd) if extents > 0 => {
                let mut key = [0u8; 32];
                for (bytes, word) in key.chunks_exact_mut(8).zip(&segment.header.key) {
                    bytes.copy_from_slice(&word.load(Relaxed).to_le_bytes());
                }
                let slots = SwapDevice::new(FILE, extents.saturating_mul(SLOTS_PER_EXTENT).min(1 << 28), 1, Kind::Solid)
                    .with_table_discard(give_back);
                let leases = Box::new(Leases { segment, index });
                let same = fd.try_clone().map_err(|_| EngineError::Devices("the swap file's descriptor could not be doubled"))?;
                let device = FileDevice::new(same, key, salt, leases);
                Some(FileTier { slots, device, fd: Lock::new(fd), bytes: u64::from(extents) * EXTENT_BYTES, roomy: true.into() })
            }
            _ => None,
        };
        let pool_slots = SwapDevice::new(POOL, POOL_SLOTS, 1, Kind::Solid).with_table_discard(give_back);
        Ok(Devices { pool_slots, pool, file })
    }

    /// The slots of a swap type.
    ///
    /// # Panics
    /// When an entry of the file's type turns up and the run has no file: the entry is damaged.
    pub fn slots(&self, ty: SwapType) -> &SwapDevice {
        if ty == POOL { &self.pool_slots } else { &self.file.as_ref().expect("a swap entry of type 1 needs a swap file").slots }
    }

    /// Slots for a folio of `2^order` pages in compressed memory.
    pub fn alloc_pool(&self, order: u8, folio: FolioId) -> Option<SwapEntry> {
        self.pool_slots.alloc_folio(CPU, Order::new(order)?, folio, GROUP).ok().map(|offset| SwapEntry::new(POOL, offset))
    }

    /// A slot for one page in the file.
    pub fn alloc_file(&self, folio: FolioId) -> Option<SwapEntry> {
        let file = self.file.as_ref()?;
        file.slots.alloc_folio(CPU, Order::ZERO, folio, GROUP).ok().map(|offset| SwapEntry::new(FILE, offset))
    }

    /// Drops the data of a slot that holds a shadow, and the slot.
    #[track_caller]
    pub fn drop_swapped(&self, entry: SwapEntry) {
        let (ty, offset) = (entry.ty(), entry.offset());
        let held = match &self.file {
            Some(file) if ty == FILE => file.device.free(Slot(offset.0)),
            _ => self.pool.free(Slot(offset.0)),
        };
        if !held {
            let caller = std::panic::Location::caller();
            crate::fatal(&format!("swap entry {entry:?} is in use and its device holds nothing for it (found at {caller})"));
        }
        self.free_slot(entry, swaptide_core::Expect::Shadow);
    }

    /// True while the file has room for what its pages' program has again, at the last [`Devices::metadata_bytes`].
    pub fn file_is_roomy(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.roomy.load(Relaxed))
    }

    /// True when a slot certainly holds what the page is. `buffer` is scratch.
    pub fn holds(&self, entry: SwapEntry, page: &Page, buffer: &mut Page, unpacker: &mut Unpacker) -> bool {
        let slot = Slot(entry.offset().0);
        match &self.file {
            Some(file) if entry.ty() == FILE => file.device.unchanged(slot, page),
            _ => self.pool.load(slot, buffer, unpacker).is_ok() && buffer == page,
        }
    }

    /// Gives a slot that holds a shadow a newer one: its page came in, was not changed, and went out again.
    pub fn renew_shadow(&self, entry: SwapEntry, shadow: Shadow) {
        let (slots, offset) = (self.slots(entry.ty()), entry.offset());
        let renewed = slots
            .shadow_to_folio(offset, 1, RENEWING, None)
            .and_then(|_| slots.folio_to_shadow(offset, 1, RENEWING, shadow, swaptide_core::ZeroMask::Keep));
        if let Err(mismatch) = renewed {
            crate::fatal(&format!("a page went out as it was before, and its slot was not what it must be: {mismatch}"));
        }
    }

    /// Frees a slot alone.
    pub fn free_slot(&self, entry: SwapEntry, expect: swaptide_core::Expect) {
        if let Err(mismatch) = self.slots(entry.ty()).free(entry.offset(), 1, expect) {
            crate::fatal(&format!("a swap slot was not what it must be: {mismatch}"));
        }
    }

    /// Turns `n` slots from folio to shadow.
    pub fn to_shadow(&self, entry: SwapEntry, n: u32, folio: FolioId, shadow: Shadow) {
        self.to_shadow_with_zeros(entry, n, folio, shadow, 0);
    }

    /// The same (at most 64 slots), where the pages whose bits are set in `zeros` are all zeros: who brings them back need not ask the device.
    pub fn to_shadow_with_zeros(&self, entry: SwapEntry, n: u32, folio: FolioId, shadow: Shadow, zeros: u64) {
        let mask = swaptide_core::ZeroMask::Bits(std::slice::from_ref(&zeros));
        if let Err(mismatch) = self.slots(entry.ty()).folio_to_shadow(entry.offset(), n, folio, shadow, mask) {
            crate::fatal(&format!("a folio left the swap cache and its slots were not what they must be: {mismatch}"));
        }
    }

    /// Bytes of tables and handles. Looks how full the file is, too.
    pub fn metadata_bytes(&self) -> usize {
        let file = self.file.as_ref().map_or(0, |file| {
            let stats = file.device.stats();
            file.roomy.store(stats.block_bytes < file.bytes / 4 * 3, Relaxed);
            file.slots.metadata_bytes() + stats.metadata_bytes
        });
        self.pool_slots.metadata_bytes() + self.pool.metadata_bytes() + file
    }
}

/// The offset of an entry `n` slots further.
pub fn entry_plus(entry: SwapEntry, n: u32) -> SwapEntry {
    entry.plus(n)
}

/// An entry that stands where none is meant yet.
pub const NO_ENTRY: SwapEntry = SwapEntry::new(POOL, SwapOffset(0));
