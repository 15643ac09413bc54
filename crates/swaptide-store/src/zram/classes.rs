//! The size classes of objects in compressed memory, made at compile time.
//!
//! Owns the tables. Locks: none.

use crate::PAGE_SIZE;

/// Address space of one block.
pub(super) const BLOCK_BYTES: usize = 64 << 10;
const BLOCK_PAGES: usize = BLOCK_BYTES / PAGE_SIZE;
/// Fewest pages a class may choose for its blocks: fewer leave too much of the address space
/// unused.
const MIN_PAGES: usize = 8;

/// Size of objects in a class and the geometry of its blocks.
#[derive(Copy, Clone)]
pub(super) struct Class {
    pub size: u32,
    pub pages: u8,
    pub objects: u16,
}

/// As many as the pool's word of classes that can be compacted has bits.
const MAX_CLASSES: usize = 128;

const CLASS_TABLE: ([Class; MAX_CLASSES], usize) = build_classes();
pub(super) const CLASSES: usize = CLASS_TABLE.1;
pub(super) static CLASS: [Class; MAX_CLASSES] = CLASS_TABLE.0;

/// Lengths up to a page are looked up in steps of this.
const FINE_STEP_BYTES: usize = 32;
/// Longer ones (units) in steps of this.
const COARSE_STEP_BYTES: usize = 512;
static FINE_CLASS: [u8; PAGE_SIZE / FINE_STEP_BYTES + 1] =
    build_lookup::<{ PAGE_SIZE / FINE_STEP_BYTES + 1 }>(FINE_STEP_BYTES);
static COARSE_CLASS: [u8; BLOCK_BYTES / COARSE_STEP_BYTES + 1] =
    build_lookup::<{ BLOCK_BYTES / COARSE_STEP_BYTES + 1 }>(COARSE_STEP_BYTES);

const fn build_classes() -> ([Class; MAX_CLASSES], usize) {
    let mut table = [Class { size: 0, pages: 0, objects: 0 }; MAX_CLASSES];
    let mut count = 0;
    let mut covered = 0;
    let mut want = FINE_STEP_BYTES;
    while want <= BLOCK_BYTES {
        if want > covered {
            // The page count that leaves the smallest share of a block over; of equals, the
            // largest.
            let mut pages = 0;
            let mut least = 0;
            let mut m = MIN_PAGES;
            while m <= BLOCK_PAGES {
                if m * PAGE_SIZE >= want {
                    let waste = (m * PAGE_SIZE) % want;
                    if pages == 0 || waste * pages <= least * m {
                        pages = m;
                        least = waste;
                    }
                }
                m += 1;
            }
            let objects = pages * PAGE_SIZE / want;
            // What is left over is shared out, so that neighbouring sizes often become one class.
            covered = pages * PAGE_SIZE / objects;
            table[count] =
                Class { size: covered as u32, pages: pages as u8, objects: objects as u16 };
            count += 1;
        }
        want += match want {
            0..1024 => FINE_STEP_BYTES,
            1024..4096 => 64,
            4096..8192 => 512,
            8192..16384 => 1024,
            16384..32768 => 2048,
            _ => 4096,
        };
    }
    (table, count)
}

const fn build_lookup<const N: usize>(step: usize) -> [u8; N] {
    let mut lookup = [0; N];
    let mut i = 0;
    let mut class = 0;
    while i < N {
        while (CLASS_TABLE.0[class].size as usize) < i * step {
            class += 1;
        }
        lookup[i] = class as u8;
        i += 1;
    }
    lookup
}

const _: () = assert!(CLASS_TABLE.0[CLASSES - 1].size as usize == BLOCK_BYTES);
/// Most objects of a block.
pub(super) const MAX_OBJECTS: usize = BLOCK_BYTES / FINE_STEP_BYTES;

/// A block has room for at least this many pages, packed or not.
pub(super) const MIN_PAGES_PER_BLOCK: usize = min_pages_per_block();

const fn min_pages_per_block() -> usize {
    let (mut least, mut class) = (usize::MAX, 0);
    while class < CLASSES && CLASS_TABLE.0[class].size as usize <= PAGE_SIZE {
        if (CLASS_TABLE.0[class].objects as usize) < least {
            least = CLASS_TABLE.0[class].objects as usize;
        }
        class += 1;
    }
    least
}

const _: () = assert!(MIN_PAGES_PER_BLOCK >= MIN_PAGES);

pub(super) fn class_of(len: usize) -> usize {
    if len <= PAGE_SIZE {
        FINE_CLASS[len.div_ceil(FINE_STEP_BYTES)].into()
    } else {
        COARSE_CLASS[len.div_ceil(COARSE_STEP_BYTES)].into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_fit_every_length_with_little_waste() {
        for len in 1..=BLOCK_BYTES {
            let class = CLASS[class_of(len)];
            let size = class.size as usize;
            assert!(size >= len);
            assert!(usize::from(class.objects) * size <= usize::from(class.pages) * PAGE_SIZE);
            // What an object really costs, its share of the block's pages.
            let cost = usize::from(class.pages) * PAGE_SIZE / usize::from(class.objects);
            if len >= 512 {
                assert!(cost * 100 <= len * 115, "an object of {len} bytes costs {cost}");
            }
        }
        assert_eq!(CLASS[class_of(PAGE_SIZE)].size as usize, PAGE_SIZE);
    }
}
