//! Pages, addresses and ranges of addresses.
//!
//! The crate is built for 4 KiB pages; a kernel with others is refused by the callers that probe
//! the machine, not here. An address is a number, never a reference: the memory belongs to the
//! program and may change or vanish at any time.

use core::fmt;

/// Bytes in a base page.
pub const PAGE_SIZE: usize = 4096;
/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

/// A virtual address in this process. Nothing is promised about what is mapped there.
#[repr(transparent)]
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct VirtAddr(pub usize);

impl VirtAddr {
    /// The address of what `ptr` points at.
    #[inline]
    pub fn from_ptr<T>(ptr: *const T) -> VirtAddr {
        VirtAddr(ptr.expose_provenance())
    }

    /// The start of the page that holds this address.
    #[inline]
    pub const fn page_down(self) -> VirtAddr {
        VirtAddr(self.0 & !(PAGE_SIZE - 1))
    }

    /// The first page boundary at or above this address.
    #[inline]
    pub const fn page_up(self) -> VirtAddr {
        VirtAddr((self.0 + (PAGE_SIZE - 1)) & !(PAGE_SIZE - 1))
    }

    /// The multiple of `align` (a power of two) at or below this address.
    #[inline]
    pub const fn align_down(self, align: usize) -> VirtAddr {
        VirtAddr(self.0 & !(align - 1))
    }

    /// The first multiple of `align` (a power of two) at or above this address.
    #[inline]
    pub(crate) const fn align_up(self, align: usize) -> VirtAddr {
        VirtAddr((self.0 + (align - 1)) & !(align - 1))
    }

    /// True if this is the start of a page.
    #[inline]
    pub const fn is_page_aligned(self) -> bool {
        self.0 & (PAGE_SIZE - 1) == 0
    }

    /// The number of the page that holds this address.
    #[inline]
    pub(crate) const fn page_number(self) -> usize {
        self.0 >> PAGE_SHIFT
    }

    /// This address plus `bytes`.
    #[inline]
    pub const fn offset(self, bytes: usize) -> VirtAddr {
        VirtAddr(self.0 + bytes)
    }

    /// As a pointer; whether it may be used is the caller's to know.
    #[inline]
    pub fn as_ptr<T>(self) -> *mut T {
        core::ptr::with_exposed_provenance_mut(self.0)
    }
}

impl fmt::Debug for VirtAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for VirtAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A half-open range of addresses: `start` is in it, `end` is not. `start <= end` always.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Default)]
pub struct VirtRange {
    /// First address.
    pub start: VirtAddr,
    /// One past the last address.
    pub end: VirtAddr,
}

impl VirtRange {
    /// The range from `start` up to, not including, `end`; empty when `end` is not above `start`.
    #[inline]
    pub const fn new(start: VirtAddr, end: VirtAddr) -> VirtRange {
        VirtRange { start, end: if end.0 < start.0 { start } else { end } }
    }

    /// `len` bytes from `start`.
    #[inline]
    pub const fn from_len(start: VirtAddr, len: usize) -> VirtRange {
        VirtRange { start, end: VirtAddr(start.0 + len) }
    }

    /// Bytes in the range.
    #[inline]
    pub const fn len(&self) -> usize {
        self.end.0 - self.start.0
    }

    /// Whole pages in the range.
    #[inline]
    pub const fn pages(&self) -> usize {
        self.len() >> PAGE_SHIFT
    }

    /// True if it holds no byte.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.end.0 <= self.start.0
    }

    /// True if both ends are page boundaries.
    #[inline]
    pub const fn is_page_aligned(&self) -> bool {
        self.start.is_page_aligned() && self.end.is_page_aligned()
    }

    /// True if `addr` lies in it.
    #[inline]
    pub const fn contains(&self, addr: VirtAddr) -> bool {
        self.start.0 <= addr.0 && addr.0 < self.end.0
    }

    /// True if all of `other` lies in it.
    #[inline]
    pub const fn covers(&self, other: &VirtRange) -> bool {
        self.start.0 <= other.start.0 && other.end.0 <= self.end.0
    }
}

impl fmt::Debug for VirtRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.start.0, self.end.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding() {
        let a = VirtAddr(0x12345);
        assert_eq!((a.page_down(), a.page_up()), (VirtAddr(0x12000), VirtAddr(0x13000)));
        assert_eq!(VirtAddr(0x12000).page_up(), VirtAddr(0x12000));
        assert_eq!((a.align_down(1 << 21), a.align_up(1 << 21)), (VirtAddr(0), VirtAddr(1 << 21)));
        assert_eq!(a.page_number(), 0x12);
        assert_eq!(std::format!("{a:?} {a}"), "0x12345 0x12345");
    }

    #[test]
    fn ranges() {
        let r = |a, b| VirtRange::new(VirtAddr(a), VirtAddr(b));
        assert_eq!(r(0x1000, 0x3000).pages(), 2);
        assert!(r(0x3000, 0x1000).is_empty());
        assert!(r(0, 10).contains(VirtAddr(9)) && !r(0, 10).contains(VirtAddr(10)));
        assert!(r(0, 10).covers(&r(0, 10)) && !r(0, 10).covers(&r(0, 11)));
    }
}
