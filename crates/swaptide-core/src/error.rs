//! What can go wrong: an allocation that finds no place, an exchange that finds another state than
//! it was told.

use crate::entry::{SlotContent, SlotInfo};
use crate::ids::{ClusterIndex, FolioId, SwapEntry};

/// Why an allocation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// As many slots are used as the device holds: free some, or use another device.
    #[error("the swap device is full: free slots or use another device")]
    Full,
    /// Enough slots are free, but no aligned run of that order: split the folio.
    #[error("no aligned run of free slots of that order: split the folio")]
    NoRun,
    /// The device is being taken away (or no device is permitted): use another one.
    #[error("no swap device is open for allocation: use another device")]
    Disabled,
    /// No memory for the cluster's header or table: reclaim and try again.
    #[error("no memory for a swap table: reclaim memory and try again")]
    NoMemory,
}

/// The state an operation was told to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Expected {
    /// Every slot holds this folio.
    Folio(FolioId),
    /// This folio, not mapped (count 0).
    CacheOnly(FolioId),
    /// A shadow: the page is out.
    Shadow,
    /// A folio or a shadow, with any count.
    Used,
    /// Folio or shadow with a count of at least 1.
    Mapped,
    /// Used, with a count of exactly 1 (or 0 in the cache).
    LastUser,
    /// A free slot, for an allocation.
    Free,
    /// A range of 1 to 512 slots in one cluster of this device.
    Range,
    /// A count that can still grow (the overflow table needed memory and got none).
    CountRoom,
}

/// The slot content that the caller of an exchange of folios and shadows expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Expect {
    /// Every slot holds this folio.
    Folio(FolioId),
    /// Every slot holds a shadow.
    Shadow,
    /// Every slot is used, by whatever.
    Any,
}

/// A slot was not in the state the caller expected. Nothing was changed.
///
/// Where the caller lost a race that its protocol allows ([`Mismatch::exists`],
/// [`Mismatch::gone`]), it tries again; everywhere else a mismatch is corruption and the process
/// should stop with this message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{entry} ({cluster}): expected {expected:?}, found {slot:?} with count {count}, zero {zero}, \
    {group}",
    slot = .found.slot,
    count = .found.count,
    zero = .found.zero,
    group = .found.group
)]
pub struct Mismatch {
    /// The first slot that did not match.
    pub entry: SwapEntry,
    /// The cluster that the slot is in.
    pub cluster: ClusterIndex,
    /// The content expected.
    pub expected: Expected,
    /// The content found.
    pub found: SlotInfo,
}

impl Mismatch {
    /// A shadow was expected and a folio found: another thread swapped it in first.
    pub fn exists(&self) -> bool {
        self.expected == Expected::Shadow && matches!(self.found.slot, SlotContent::Folio(_))
    }

    /// The slot is free: its last user went away first.
    pub fn gone(&self) -> bool {
        self.found.slot == SlotContent::Free && self.expected != Expected::Range
    }
}
