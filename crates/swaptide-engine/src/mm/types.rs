//! Page and chunk numbers.

use swaptide_sys::page::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};

/// Pages of one chunk: 64 KiB, the folio that swap-out and swap-in work with.
pub const PAGES_PER_CHUNK: usize = 16;
/// log2 of [`PAGES_PER_CHUNK`].
pub const CHUNK_ORDER: u8 = 4;
/// Bytes of a chunk.
pub(crate) const CHUNK_BYTES: usize = PAGES_PER_CHUNK * PAGE_SIZE;
/// Pages of one leaf of the page table and of one slab of staging frames: 2 MiB, a cluster's worth.
pub(crate) const PAGES_PER_LEAF: usize = 512;
/// Chunks of one leaf.
pub(crate) const CHUNKS_PER_LEAF: usize = PAGES_PER_LEAF / PAGES_PER_CHUNK;

/// Smallest mapping worth managing, in bytes.
pub(crate) const MIN_BYTES: usize = 64 << 10;

/// Behind every page of a program; as the page asked for: no thread asked for one.
pub(crate) const LAST_PAGE: PageNo = PageNo(1 << 36);

/// The end of the addresses that can be managed: those of a program that asks for none above.
pub const MANAGED_END: VirtAddr = VirtAddr(1 << 47);

/// A page of the program: its address divided by the page size.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct PageNo(pub usize);

/// A thread that puts pages in place: 0 is the handler, fault servers follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FillerNo(pub(crate) u8);

/// Threads that put pages in place, at most.
pub(crate) const MAX_FILLERS: usize = 64;

/// An aligned 64 KiB of the program: its address divided by 64 KiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct ChunkNo(pub usize);

impl PageNo {
    /// The page that holds an address.
    pub fn of(addr: VirtAddr) -> PageNo {
        PageNo(addr.0 >> PAGE_SHIFT)
    }

    /// The first address of the page.
    pub fn addr(self) -> VirtAddr {
        VirtAddr(self.0 << PAGE_SHIFT)
    }

    /// The chunk that holds the page.
    pub fn chunk(self) -> ChunkNo {
        ChunkNo(self.0 / PAGES_PER_CHUNK)
    }

    /// The page's place in its chunk.
    pub fn in_chunk(self) -> usize {
        self.0 % PAGES_PER_CHUNK
    }

    /// Its bit in a mask of the chunk's pages.
    pub(crate) fn bit(self) -> u16 {
        1 << self.in_chunk()
    }

    /// The page `n` pages further.
    pub(crate) fn plus(self, n: usize) -> PageNo {
        PageNo(self.0 + n)
    }
}

impl ChunkNo {
    /// The chunk's first page.
    pub fn first(self) -> PageNo {
        PageNo(self.0 * PAGES_PER_CHUNK)
    }

    /// The chunk `n` chunks further.
    pub(crate) fn plus(self, n: usize) -> ChunkNo {
        ChunkNo(self.0 + n)
    }
}

/// The pages that lie whole in a range.
pub fn pages_of(range: VirtRange) -> std::ops::Range<usize> {
    range.start.page_up().0 >> PAGE_SHIFT..range.end.page_down().0 >> PAGE_SHIFT
}

/// The address range of `n` pages from `page` on.
pub(crate) fn range_of(page: PageNo, n: usize) -> VirtRange {
    VirtRange { start: page.addr(), end: page.plus(n).addr() }
}

/// Splits a mask of pages of one chunk into runs of set bits, `(first, length)`, in ascending
/// order.
pub fn runs(mask: u16) -> impl Iterator<Item = (usize, usize)> {
    let mut rest = u32::from(mask);
    std::iter::from_fn(move || {
        if rest == 0 {
            return None;
        }
        let first = rest.trailing_zeros() as usize;
        let len = (rest >> first).trailing_ones() as usize;
        rest &= !(((1u32 << len) - 1) << first);
        Some((first, len))
    })
}

/// Splits a mask of pages of one chunk into aligned runs of a power of two, largest first in place:
/// the folios it can be swapped out as. Yields `(first, order)`.
pub fn folios(mask: u16) -> impl Iterator<Item = (usize, u8)> {
    runs(mask).flat_map(|(first, len)| {
        let (mut at, end) = (first, first + len);
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let mut order =
                if at == 0 { CHUNK_ORDER } else { (at.trailing_zeros() as u8).min(CHUNK_ORDER) };
            while at + (1 << order) > end {
                order -= 1;
            }
            let item = (at, order);
            at += 1 << order;
            Some(item)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folios_cover_a_mask_exactly_once_and_are_aligned() {
        for mask in 0..=u16::MAX {
            let mut seen = 0u16;
            for (first, order) in folios(mask) {
                assert_eq!(first % (1 << order), 0);
                let bits = (((1u32 << (1 << order)) - 1) << first) as u16;
                assert_eq!(seen & bits, 0);
                seen |= bits;
            }
            assert_eq!(seen, mask);
            assert_eq!(runs(mask).map(|(_, n)| n).sum::<usize>(), mask.count_ones() as usize);
        }
    }
}
