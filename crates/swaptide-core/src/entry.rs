//! One word of the swap table: everything that is known about one slot, in 8 bytes.
//! (docs/linux-swap.md, "Swap table")
//!
//! | bits   | field   | meaning |
//! |--------|---------|---------|
//! | 0..2   | kind    | 0 free, 1 folio, 2 shadow, 3 bad |
//! | 2      | zero    | the page is all zeros; the device holds nothing for it |
//! | 3..8   | -       | always 0 |
//! | 8..16  | count   | swap count 0..=254; 255: at least 255, the rest is in the cluster's overflow table |
//! | 16..32 | group   | the group the slot is charged to |
//! | 32..64 | payload | folio number, or shadow |
//!
//! Invariants:
//! 1. A free slot is the word 0, so zeroed memory is a table of free slots.
//! 2. Count, zero flag and group survive every exchange between folio and shadow.
//! 3. A shadow has a count of at least 1: a slot that no page table maps and no folio holds is
//!    free.

use crate::ids::{FolioId, GroupId, Shadow};

const KIND_MASK: u64 = 0b11;
const FREE: u64 = 0;
const FOLIO: u64 = 1;
const SHADOW: u64 = 2;
const BAD: u64 = 3;
const ZERO: u64 = 1 << 2;
const COUNT_SHIFT: u32 = 8;
const COUNT_MASK: u64 = 0xff << COUNT_SHIFT;
const GROUP_SHIFT: u32 = 16;
const PAYLOAD_SHIFT: u32 = 32;

const _: () = assert!(KIND_MASK & ZERO == 0 && ZERO < 1 << COUNT_SHIFT);
const _: () = assert!(COUNT_SHIFT + 8 == GROUP_SHIFT && GROUP_SHIFT + u16::BITS == PAYLOAD_SHIFT);

/// Inline counts end below this value; this value says: look into the overflow table.
pub(crate) const COUNT_OVERFLOW: u32 = 255;

/// The content of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotContent {
    /// Nothing; the allocator may hand it out.
    Free,
    /// The page is in the swap cache, in this folio.
    Folio(FolioId),
    /// The page is on the device alone.
    Shadow {
        /// Refault information left behind by the folio.
        shadow: Shadow,
        /// The page is all zeros and the device holds nothing for it.
        zero: bool,
    },
    /// Not usable, for ever.
    Bad,
}

/// All that the table knows about a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotInfo {
    /// Free, a folio, a shadow, or bad.
    pub slot: SlotContent,
    /// Swap count. From a look-up without lock it saturates at 255.
    pub count: u32,
    /// The page is all zeros on the device (in the cache: it was when it was read).
    pub zero: bool,
    /// The group to which the slot is charged.
    pub group: GroupId,
}

/// The 64-bit word of a slot in its swap table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry(pub u64);

impl Entry {
    pub const FREE: Entry = Entry(FREE);
    pub const BAD: Entry = Entry(BAD);

    pub(crate) const fn new_folio(folio: FolioId, group: GroupId) -> Entry {
        Entry(
            (folio.0 as u64) << PAYLOAD_SHIFT
                | (group.0 as u64) << GROUP_SHIFT
                | 1 << COUNT_SHIFT
                | FOLIO,
        )
    }

    pub const fn is_free(self) -> bool {
        self.0 == FREE
    }

    /// Holds a page: neither free nor bad.
    pub const fn is_used(self) -> bool {
        matches!(self.0 & KIND_MASK, FOLIO | SHADOW)
    }

    pub(crate) const fn is_shadow(self) -> bool {
        self.0 & KIND_MASK == SHADOW
    }

    pub const fn holds(self, folio: FolioId) -> bool {
        self.0 & KIND_MASK == FOLIO && (self.0 >> PAYLOAD_SHIFT) as u32 == folio.0
    }

    /// In the swap cache, and mapped by no page table.
    pub(crate) const fn is_cache_only(self) -> bool {
        self.0 & (KIND_MASK | COUNT_MASK) == FOLIO
    }

    pub const fn shadow(self) -> Shadow {
        Shadow((self.0 >> PAYLOAD_SHIFT) as u32)
    }

    /// Inline count; [`COUNT_OVERFLOW`] means "or more".
    pub const fn count(self) -> u32 {
        ((self.0 & COUNT_MASK) >> COUNT_SHIFT) as u32
    }

    pub const fn group(self) -> GroupId {
        GroupId((self.0 >> GROUP_SHIFT) as u16)
    }

    pub const fn zero(self) -> bool {
        self.0 & ZERO != 0
    }

    pub(crate) const fn with_folio(self, folio: FolioId) -> Entry {
        Entry(self.flags() | (folio.0 as u64) << PAYLOAD_SHIFT | FOLIO)
    }

    pub(crate) const fn with_shadow(self, shadow: Shadow) -> Entry {
        Entry(self.flags() | (shadow.0 as u64) << PAYLOAD_SHIFT | SHADOW)
    }

    pub(crate) const fn with_zero(self, zero: bool) -> Entry {
        Entry(if zero { self.0 | ZERO } else { self.0 & !ZERO })
    }

    pub(crate) const fn with_count(self, count: u32) -> Entry {
        debug_assert!(count <= COUNT_OVERFLOW);
        Entry(self.0 & !COUNT_MASK | (count as u64) << COUNT_SHIFT)
    }

    const fn flags(self) -> u64 {
        self.0 & ((1 << PAYLOAD_SHIFT) - 1) & !KIND_MASK
    }

    #[inline]
    pub fn slot(self) -> SlotContent {
        match self.0 & KIND_MASK {
            FREE => SlotContent::Free,
            FOLIO => SlotContent::Folio(FolioId((self.0 >> PAYLOAD_SHIFT) as u32)),
            SHADOW => SlotContent::Shadow { shadow: self.shadow(), zero: self.zero() },
            _ => SlotContent::Bad,
        }
    }

    #[inline]
    pub fn info(self) -> SlotInfo {
        SlotInfo { slot: self.slot(), count: self.count(), zero: self.zero(), group: self.group() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn flags_survive_every_exchange() {
        let e =
            Entry::new_folio(FolioId(u32::MAX), GroupId(0xabcd)).with_zero(true).with_count(254);
        let s = e.with_shadow(Shadow(0x8000_0001));
        assert_eq!(s.slot(), SlotContent::Shadow { shadow: Shadow(0x8000_0001), zero: true });
        assert_eq!((s.count(), s.group(), s.zero()), (254, GroupId(0xabcd), true));
        let f = s.with_folio(FolioId(7)).with_zero(false);
        assert!(f.holds(FolioId(7)) && !f.holds(FolioId(8)) && !f.zero());
        assert_eq!((f.count(), f.group()), (254, GroupId(0xabcd)));
        assert!(f.with_count(0).is_cache_only() && !f.is_cache_only());
    }

    #[test]
    fn free_is_the_zero_word() {
        assert_eq!(Entry::FREE.0, 0);
        assert_eq!(Entry(0).slot(), SlotContent::Free);
        assert_eq!(Entry::BAD.slot(), SlotContent::Bad);
        assert!(!Entry::BAD.is_free() && !Entry::new_folio(FolioId(0), GroupId(0)).is_free());
    }
}
