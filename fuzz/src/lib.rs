//! What the targets share: numbers out of the fuzzer's bytes, and a segment.

use std::sync::OnceLock;

use rustix::fs::FallocateFlags;
use swaptide_ipc::Segment;
use swaptide_sys::mem::{SharedMap, memfd_create};
use swaptide_sys::{AsFd, OwnedFd};

/// Numbers out of the fuzzer's bytes; `None` when none are left.
pub struct Bytes<'a>(pub &'a [u8]);

impl<'a> Bytes<'a> {
    pub fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    pub fn short(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes([self.byte()?, self.byte()?]))
    }

    pub fn word(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes([self.byte()?, self.byte()?, self.byte()?, self.byte()?]))
    }

    /// `n` bytes, or what is left.
    pub fn some(&mut self, n: usize) -> &'a [u8] {
        let (some, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        some
    }
}

/// The one segment of this process and its memory file. Segments are never unmapped, so every input
/// gets the same one, emptied.
pub fn empty_segment() -> (&'static Segment, &'static OwnedFd) {
    static ONLY: OnceLock<(&'static Segment, OwnedFd)> = OnceLock::new();
    let (segment, fd) = ONLY.get_or_init(|| {
        let fd = memfd_create(c"fuzz", Segment::BYTES as u64).expect("memfd");
        let map = SharedMap::map(fd.as_fd(), Segment::BYTES).expect("map");
        (Segment::raw(map).expect("a segment"), fd)
    });
    // Holes read as zeros, and all zeros is an empty segment.
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, flags, 0, Segment::BYTES as u64).expect("emptied");
    (segment, fd)
}

/// A page made of a number: zeros, one word, text-like, or noise.
pub fn page_of(seed: u32) -> Box<swaptide_store::Page> {
    let mut page = Box::new([0; swaptide_store::PAGE_SIZE]);
    let random = match seed % 8 {
        0 => return page,
        1 => {
            swaptide_store::codec::fill(&mut page[..], u64::from(seed));
            return page;
        }
        2 => 16,
        3 | 4 => 300 + seed as usize % 1000,
        5 | 6 => 1000 + seed as usize % 2500,
        _ => page.len(),
    };
    let mut state = u64::from(seed) << 20 | 1;
    for byte in &mut page[..random] {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *byte = (state >> 56) as u8;
    }
    let end = page.len() - 4;
    page[end..].copy_from_slice(&seed.to_be_bytes());
    page
}
