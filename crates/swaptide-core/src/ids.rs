//! The identifiers of the swap layer. Every id is a newtype, so a slot number, a cluster number and
//! a folio number never meet in one bare integer.
//!
//! Units: a slot is one 4 KiB page of swap; an order `k` run is `2^k` slots; a cluster is
//! [`SLOTS_PER_CLUSTER`] slots. (docs/linux-swap.md, "Clusters")

use core::fmt;

/// log2 of [`SLOTS_PER_CLUSTER`]. Models under loom use tiny clusters: a model explores every
/// interleaving.
#[cfg(not(loom))]
pub const CLUSTER_SHIFT: u32 = 9;
/// log2 of [`SLOTS_PER_CLUSTER`] (model size).
#[cfg(loom)]
pub const CLUSTER_SHIFT: u32 = 2;

/// Slots in one cluster: as many as a 2 MiB folio has pages.
pub const SLOTS_PER_CLUSTER: usize = 1 << CLUSTER_SHIFT;

/// Number of orders: 0 to 9, that is 4 KiB to 2 MiB.
pub const ORDERS: usize = CLUSTER_SHIFT as usize + 1;

/// Number of swap types, that is of devices, one entry can tell apart.
pub const SWAP_TYPES: usize = 4;

const OFFSET_BITS: u32 = 28;
const ENTRY_BITS: u32 = OFFSET_BITS + 2;
const _: () = assert!(SWAP_TYPES == 1 << (ENTRY_BITS - OFFSET_BITS));

/// Most slots one device can have: one less than 2^28 (1 TiB), so that no entry is all ones.
pub const MAX_SLOTS: u32 = (1 << OFFSET_BITS) - 1;

macro_rules! show {
    ($name:ident, $prefix:literal) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

/// Number of a swap device: 0 to [`SWAP_TYPES`] - 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwapType(u8);
show!(SwapType, "type ");

impl SwapType {
    /// The type with number `n`; `None` when `n` is not below [`SWAP_TYPES`].
    pub const fn new(n: u8) -> Option<Self> {
        if (n as usize) < SWAP_TYPES { Some(SwapType(n)) } else { None }
    }

    /// The number, for indexing.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Slot number on one device, below [`MAX_SLOTS`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwapOffset(pub u32);
show!(SwapOffset, "slot ");

impl SwapOffset {
    /// The cluster this slot is in.
    pub const fn cluster(self) -> ClusterIndex {
        ClusterIndex(self.0 >> CLUSTER_SHIFT)
    }

    /// Position of the slot in its cluster.
    pub(crate) const fn in_cluster(self) -> usize {
        self.0 as usize & (SLOTS_PER_CLUSTER - 1)
    }

    /// The slot `n` further on.
    pub const fn plus(self, n: u32) -> Self {
        SwapOffset(self.0 + n)
    }
}

/// Swap entry: the stable handle that stands in a page table for a swapped page.
/// `type << 28 | offset`, 30 bits, never all ones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwapEntry(u32);

impl SwapEntry {
    /// The entry of slot `offset` on device `ty`.
    ///
    /// # Panics
    /// When `offset` is not below [`MAX_SLOTS`]: such a slot exists on no device.
    pub const fn new(ty: SwapType, offset: SwapOffset) -> Self {
        assert!(offset.0 < MAX_SLOTS, "a swap offset is below 2^28 - 1");
        SwapEntry((ty.0 as u32) << OFFSET_BITS | offset.0)
    }

    /// The entry with these 30 bits; `None` when they are not an entry's.
    pub const fn from_raw(raw: u32) -> Option<Self> {
        if raw >> ENTRY_BITS == 0 && raw & MAX_SLOTS != MAX_SLOTS {
            Some(SwapEntry(raw))
        } else {
            None
        }
    }

    /// The 30 bits, for storing in a page table.
    pub const fn raw(self) -> u32 {
        self.0
    }

    /// The device that the entry is of.
    pub const fn ty(self) -> SwapType {
        SwapType((self.0 >> OFFSET_BITS) as u8)
    }

    /// The slot on the device.
    pub const fn offset(self) -> SwapOffset {
        SwapOffset(self.0 & MAX_SLOTS)
    }

    /// The entry `n` slots further on, on the same device.
    pub const fn plus(self, n: u32) -> Self {
        Self::new(self.ty(), self.offset().plus(n))
    }
}

impl fmt::Display for SwapEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "swap entry {}:{:#x}", self.ty().0, self.offset().0)
    }
}

impl fmt::Debug for SwapEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:#x}", self.ty().0, self.offset().0)
    }
}

/// Number of a cluster on its device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterIndex(pub u32);
show!(ClusterIndex, "cluster ");

impl ClusterIndex {
    /// First slot of the cluster.
    pub const fn first(self) -> SwapOffset {
        SwapOffset(self.0 << CLUSTER_SHIFT)
    }

    pub(crate) const fn slot(self, in_cluster: usize) -> SwapOffset {
        SwapOffset((self.0 << CLUSTER_SHIFT) | in_cluster as u32)
    }
}

/// Order of a folio or of a run of slots: `2^order` pages, 0 to [`ORDERS`] - 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Order(u8);
show!(Order, "order ");

impl Order {
    /// One page.
    pub const ZERO: Order = Order(0);
    /// A whole cluster.
    pub const MAX: Order = Order(ORDERS as u8 - 1);

    /// The order `n`; `None` when it is above [`Order::MAX`].
    pub const fn new(n: u8) -> Option<Self> {
        if (n as usize) < ORDERS { Some(Order(n)) } else { None }
    }

    /// The order of exactly `pages` pages; `None` when there is none.
    pub(crate) const fn from_pages(pages: u32) -> Option<Self> {
        if pages.is_power_of_two() { Self::new(pages.trailing_zeros() as u8) } else { None }
    }

    /// `2^order`.
    pub const fn pages(self) -> u32 {
        1 << self.0
    }

    /// The number, for indexing and shifting.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// All orders, smallest first.
    pub fn all() -> impl DoubleEndedIterator<Item = Order> {
        (0..ORDERS as u8).map(Order)
    }
}

/// Number of a folio. The core never looks behind it; `u32::MAX` is its own, for slots that wait
/// for a move.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FolioId(pub u32);
show!(FolioId, "folio ");

/// The entry that stays in the table when a folio left: refault information, 32 bits chosen by the
/// caller (the eviction clock).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Shadow(pub u32);
show!(Shadow, "shadow ");

/// Group (memcg) a slot is charged to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct GroupId(pub u16);
show!(GroupId, "group ");

/// Number of the CPU that allocates. A hint: it decides only which current
/// cluster is used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CpuId(pub u16);
show!(CpuId, "cpu ");

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn entry_packs_and_refuses_all_ones() {
        for (ty, offset) in [(0, 0), (3, MAX_SLOTS - 1), (2, 513)] {
            let entry = SwapEntry::new(SwapType::new(ty).unwrap(), SwapOffset(offset));
            assert_eq!((entry.ty().index(), entry.offset().0), (ty as usize, offset));
            assert_eq!(SwapEntry::from_raw(entry.raw()), Some(entry));
        }
        assert_eq!(SwapEntry::from_raw((1 << 30) - 1), None);
        assert_eq!(SwapEntry::from_raw(1 << 30), None);
        assert_eq!(SwapType::new(4), None);
    }

    #[test]
    fn orders_and_pages() {
        assert_eq!(Order::MAX.pages() as usize, SLOTS_PER_CLUSTER);
        assert_eq!(Order::from_pages(16).map(Order::index), Some(4));
        assert_eq!(Order::from_pages(3), None);
        assert_eq!(Order::from_pages(1024), None);
        assert_eq!(SwapOffset(1027).cluster(), ClusterIndex(2));
        assert_eq!(SwapOffset(1027).in_cluster(), 3);
    }
}
