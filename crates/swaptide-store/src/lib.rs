//! Where the data of swap slots lives.
//!
//! Two devices, each addressed by [`Slot`]: [`zram::Zram`] keeps pages compressed in this
//! process's own memory, [`file::FileDevice`] keeps them encrypted in extents that several
//! processes share, of a swap file or of an export that [`nbd`] reaches. [`codec`] turns a page
//! into what a device stores and back.
//!
//! A device knows nothing of swap counts, tiers or policy: the caller never loads a slot it has
//! freed, and never writes one slot from two threads at once. What the devices promise in return:
//!
//! 1. A load either returns exactly what was last stored at that slot, or an error that names the
//!    slot.
//! 2. A store that fails leaves every slot as it was.
//! 3. All state is in private memory: a forked child owns a complete, independent copy of a device
//!    (see [`file::FileDevice::freeze_all`] for the part of it that is on disk).
//!
//! The crate is used inside unmodified programs: it starts no thread, keeps no thread-local state,
//! prints nothing and allocates only through the global allocator and its own mappings.

mod block;
pub mod codec;
pub mod file;
pub mod nbd;
pub mod zram;

/// Bytes in a page, the unit a slot holds.
pub const PAGE_SIZE: usize = 4096;

/// The contents of one page.
pub type Page = [u8; PAGE_SIZE];

/// Slots whose records are allocated and freed together.
const CLUSTER_SLOTS: usize = 512;

/// A place on one device: the offset part of a swap entry.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Slot(pub u32);

impl Slot {
    /// The slot `n` places further.
    #[must_use]
    pub const fn offset(self, n: u32) -> Slot {
        Slot(self.0 + n)
    }

    /// The cluster of this slot and its place in it.
    const fn split(self) -> (usize, usize) {
        (self.0 as usize / CLUSTER_SLOTS, self.0 as usize % CLUSTER_SLOTS)
    }
}

impl core::fmt::Debug for Slot {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Slot({})", self.0)
    }
}

impl core::fmt::Display for Slot {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", self.0)
    }
}
