//! Where a library ends in memory. Its zero-initialised data is an anonymous mapping, which cannot
//! be told apart from one that the program has made right behind it.
//!
//! Owns: nothing. It is asked while mappings are listed, when the library may just be going: its
//! header is read through `/proc`, where a page that has gone is an error.

use swaptide_sys::maps::read_own;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr};

/// Bytes of an ELF header, and of one of its program headers.
const HEADER: usize = 64;
const SEGMENT: usize = 56;
/// A segment that is loaded.
const PT_LOAD: u32 = 1;

/// The end of the library whose file's first page is mapped at `head`; nothing where that is not to
/// be read, or is no library.
pub fn end(head: VirtAddr) -> Option<VirtAddr> {
    let mut bytes = [0; 2048];
    let n = read_own(head, &mut bytes).ok()?;
    end_in(&bytes[..n], head)
}

/// The same, of the header's bytes.
fn end_in(bytes: &[u8], head: VirtAddr) -> Option<VirtAddr> {
    let half =
        |at: usize| Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?) as usize);
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| {
        usize::try_from(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?)).ok()
    };
    // 64 bits, little-endian.
    if bytes.len() < HEADER || !bytes.starts_with(b"\x7fELF\x02\x01") || half(54)? != SEGMENT {
        return None;
    }
    let (first, count) = (long(32)?, half(56)?);
    let (mut bias, mut last) = (None, 0);
    for index in 0..count {
        let at = first.checked_add(index * SEGMENT)?;
        // All of it is read at once: a header that was read in part is not used.
        bytes.get(at..at.checked_add(SEGMENT)?)?;
        if word(at)? != PT_LOAD {
            continue;
        }
        let (offset, addr, size) = (long(at + 8)?, long(at + 16)?, long(at + 40)?);
        if offset == 0 && bias.is_none() {
            bias = Some(head.0.checked_sub(addr / PAGE_SIZE * PAGE_SIZE)?);
        }
        last = last.max(addr.checked_add(size)?);
    }
    Some(VirtAddr(bias?.checked_add(last)?.checked_next_multiple_of(PAGE_SIZE)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header with these segments: kind, offset in the file, address, size in memory.
    fn header(segments: &[(u32, u64, u64, u64)]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[32..40].copy_from_slice(&(HEADER as u64).to_le_bytes());
        bytes[54..56].copy_from_slice(&(SEGMENT as u16).to_le_bytes());
        bytes[56..58].copy_from_slice(&(segments.len() as u16).to_le_bytes());
        for (kind, offset, addr, size) in segments {
            let mut segment = [0; SEGMENT];
            segment[..4].copy_from_slice(&kind.to_le_bytes());
            for (at, value) in [(8, offset), (16, addr), (40, size)] {
                segment[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            bytes.extend(segment);
        }
        bytes
    }

    const HEAD: VirtAddr = VirtAddr(0x7f00_0000_0000);

    #[test]
    fn the_last_segment_counts_with_its_zeros() {
        let bytes = header(&[
            (PT_LOAD, 0, 0, 0x900),
            (PT_LOAD, 0x1000, 0x1000, 0x2345),
            (PT_LOAD, 0x4000, 0x5000, 0x2_0001),
            (7, 0, 0, 1 << 40),
        ]);
        assert_eq!(end_in(&bytes, HEAD), Some(VirtAddr(HEAD.0 + 0x2_6000)));
    }

    #[test]
    fn a_prelinked_library_is_found_by_its_first_page() {
        let bytes = header(&[(PT_LOAD, 0, 0x40_0123, 0x900), (PT_LOAD, 0x1000, 0x40_2000, 0x1000)]);
        assert_eq!(end_in(&bytes, HEAD), Some(VirtAddr(HEAD.0 + 0x3000)));
    }

    #[test]
    fn incomplete_elf_header_is_ignored() {
        let good = header(&[(PT_LOAD, 0, 0, 0x900), (PT_LOAD, 0x1000, 0x1000, 0x1000)]);
        for cut in 0..good.len() {
            assert_eq!(end_in(&good[..cut], HEAD), None, "{cut} bytes");
        }
        assert_eq!(
            end_in(&header(&[(PT_LOAD, 0x1000, 0x1000, 0x1000)]), HEAD),
            None,
            "no segment has the first page"
        );
        for (addr, size) in [(u64::MAX, 1), (1, u64::MAX), (u64::MAX - 0xfff, 0xffe)] {
            assert_eq!(
                end_in(&header(&[(PT_LOAD, 0, 0, 1), (PT_LOAD, 1, addr, size)]), HEAD),
                None,
                "{addr:x}, {size:x}"
            );
        }
        assert_eq!(
            end_in(&header(&[(PT_LOAD, 0, 1 << 62, 1)]), HEAD),
            None,
            "it would begin before address 0"
        );
    }

    #[test]
    fn libc_is_where_the_list_of_mappings_has_it() {
        use swaptide_sys::maps::for_each_vma;
        let (mut head, mut last) = (None, VirtAddr(0));
        for_each_vma(&mut [0; 4096], |vma| {
            if vma.name.ends_with(b"/libc.so.6") {
                head = head.or(Some(vma.range.start));
                last = vma.range.end;
            }
            true
        })
        .unwrap();
        let end = end(head.expect("this test has a libc")).expect("libc is a library");
        assert!(
            end >= last && end.0 - last.0 < 1 << 20,
            "libc's file ends at {last:?}, libc at {end:?}"
        );
        assert_eq!(super::end(VirtAddr(PAGE_SIZE)), None, "nothing is mapped there");
    }
}
