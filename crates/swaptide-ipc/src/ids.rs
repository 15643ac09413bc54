//! Numbers of extents and process slots, and how many there can be.

/// Bytes of one extent of a swap area: a cluster of 512 slots.
pub const EXTENT_BYTES: u64 = 2 << 20;

/// Most extents of all areas together (128 GiB), the numbers between them among them.
pub const MAX_EXTENTS: usize = 65536;

/// An extent of a swap area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExtentId(pub u32);

/// The place of a process in the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotIndex(pub u32);
