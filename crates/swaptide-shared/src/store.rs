//! Where pages of shared regions are while they are out.
//!
//! Owns: compressed memory of the pager's own, and its part of the swap file. A page's slot follows from its region and number, so no slots are
//! allocated; which of the two devices has it, its state says.
//!
//! Locks: the devices' own.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use swaptide_ipc::{ExtentId, Segment, SlotIndex};
use swaptide_store::codec::{Choice, Compressor, Packed, PackedKind, Unpacker};
use swaptide_store::file::{Extent, ExtentSource, FileDevice};
use swaptide_store::zram::Zram;
use swaptide_store::{Page, Slot};
use swaptide_sys::{Errno, OwnedFd};

use crate::region::PageState;

/// Slots of compressed memory and of the file: 256 GiB of regions.
pub const SLOTS: u32 = 1 << 26;

struct Leases {
    segment: &'static Segment,
    index: SlotIndex,
}

impl ExtentSource for Leases {
    fn lease(&self) -> Option<Extent> {
        self.segment.lease_extent(self.index).map(|extent| Extent(extent.0))
    }

    fn release(&self, extent: Extent, _punched: bool) {
        self.segment.release_extent(self.index, ExtentId(extent.0));
    }
}

/// See the module's description.
pub struct Store {
    pool: Zram,
    file: Option<FileDevice>,
    /// Bytes that compressed memory may take.
    pool_limit: AtomicUsize,
    scratch: Mutex<Vec<u8>>,
}

/// A page that was put away, or was not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// It is there.
    In(PageState),
    /// There is no room for it.
    Full,
    /// It does not compress and waits for [`Store::write`].
    ForFile,
}

impl Store {
    /// Compressed memory, and a part of the swap file if there is one.
    ///
    /// # Errors
    /// When the address space for compressed memory is refused.
    pub fn new(segment: &'static Segment, index: SlotIndex, file: Option<OwnedFd>) -> Result<Store, Errno> {
        let pool = Zram::new(SLOTS).map_err(|_| Errno::NOMEM)?;
        let mut key = [0u8; 32];
        for (bytes, word) in key.chunks_exact_mut(8).zip(&segment.header.key) {
            bytes.copy_from_slice(&word.load(Relaxed).to_le_bytes());
        }
        let mut salt = [0u8; 8];
        rustix::rand::getrandom(&mut salt, rustix::rand::GetRandomFlags::empty())?;
        let file = file.map(|fd| FileDevice::new(fd, key, u64::from_le_bytes(salt), Box::new(Leases { segment, index })));
        Ok(Store { pool, file, pool_limit: AtomicUsize::new(usize::MAX), scratch: Mutex::new(Vec::new()) })
    }

    /// Whether there is a swap file.
    pub fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// Sets what compressed memory may take.
    pub fn set_pool_limit(&self, bytes: usize) {
        self.pool_limit.store(bytes, Relaxed);
    }

    /// Bytes by which compressed memory is over its limit.
    pub fn pool_excess(&self) -> usize {
        self.pool.pool_bytes().saturating_sub(self.pool_limit.load(Relaxed))
    }

    /// Bytes that compressed memory takes.
    pub fn pool_bytes(&self) -> usize {
        self.pool.pool_bytes()
    }

    /// Bytes of tables.
    pub fn metadata_bytes(&self) -> usize {
        self.pool.metadata_bytes() + self.file.as_ref().map_or(0, |file| file.stats().metadata_bytes)
    }

    /// Puts a page into compressed memory, unless it belongs in the file.
    pub fn put(&self, slot: Slot, page: &Page, compressor: &mut Compressor) -> Put {
        let packed = compressor.compress(page);
        match packed {
            Packed::Zero => return Put::In(PageState::Zero),
            Packed::Raw(_) if self.file.is_some() => return Put::ForFile,
            _ => {}
        }
        // With a file behind it, what is over the limit is written back; without one, this is the end.
        if self.file.is_none() && self.pool_excess() > 0 {
            return Put::Full;
        }
        match self.pool.insert(slot, &packed) {
            Ok(()) => Put::In(PageState::Pool),
            Err(_) if self.file.is_some() => Put::ForFile,
            Err(_) => Put::Full,
        }
    }

    /// Writes pages to the file as they are. False when that failed: then none of them is there.
    pub fn write(&self, pages: &[(Slot, &Page)]) -> bool {
        let Some(file) = &self.file else { return false };
        let pages: Vec<(Slot, Packed<'_>)> = pages.iter().map(|(slot, page)| (*slot, Packed::Raw(page))).collect();
        file.write(&pages).is_ok()
    }

    /// Copies pages from compressed memory to the file, as they are there. Answers for each whether it is in both now; a page that left meanwhile
    /// is not.
    pub fn copy_back(&self, slots: &[Slot], unpacker: &mut Unpacker) -> Vec<bool> {
        let Some(file) = &self.file else { return vec![false; slots.len()] };
        let mut bytes = self.scratch.lock().expect("no thread of the pager panics");
        bytes.clear();
        let mut kinds: Vec<Option<(PackedKind, usize)>> = Vec::with_capacity(slots.len());
        for slot in slots {
            let start = bytes.len();
            kinds.push(self.pool.packed(*slot, &mut bytes, unpacker).ok().map(|kind| (kind, start)));
        }
        let packed = |kind: PackedKind, start: usize| kind.with(&bytes[start..start + kind.len()]);
        let pages: Vec<(Slot, Packed<'_>)> = slots
            .iter()
            .zip(&kinds)
            .filter_map(|(slot, kind)| Some((*slot, packed(kind.as_ref()?.0, kind.as_ref()?.1)?)))
            .collect();
        let written = file.write(&pages).is_ok();
        kinds.iter().map(|kind| written && kind.is_some()).collect()
    }

    /// Brings pages back. Answers with those that could not be. Their data stays where it is.
    pub fn load(&self, pages: &mut [(Slot, PageState, &mut Page)], unpacker: &mut Unpacker) -> Vec<Slot> {
        let mut failed = Vec::new();
        let mut from_file: Vec<(Slot, &mut Page)> = Vec::new();
        for (slot, state, page) in pages {
            match state {
                PageState::Zero => page.fill(0),
                PageState::Pool => {
                    if self.pool.load(*slot, page, unpacker).is_err() {
                        failed.push(*slot);
                    }
                }
                PageState::File => from_file.push((*slot, page)),
                _ => failed.push(*slot),
            }
        }
        if let Some(file) = self.file.as_ref().filter(|_| !from_file.is_empty())
            && file.read(&mut from_file).is_err()
        {
            // Some are there perhaps: one by one.
            for (slot, page) in from_file {
                if file.read(&mut [(slot, page)]).is_err() {
                    failed.push(slot);
                }
            }
        }
        failed
    }

    /// Forgets a page's data.
    pub fn free(&self, slot: Slot, state: PageState) {
        match (state, &self.file) {
            (PageState::Pool, _) => drop(self.pool.free(slot)),
            (PageState::File, Some(file)) => drop(file.free(slot)),
            _ => {}
        }
    }

    /// Gives back what compressed memory does not need.
    pub fn compact(&self) {
        self.pool.compact(256 << 10);
    }
}

/// A compressor for the codec of a segment.
pub fn compressor(segment: &Segment) -> Compressor {
    Compressor::new(Choice::from_number(segment.header.pool_codec.load(Relaxed)))
}
