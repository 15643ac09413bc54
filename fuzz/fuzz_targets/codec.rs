//! Compressed pages: every page comes back; what was damaged is noticed, or unpacks to something,
//! but touches nothing else.
#![no_main]

use libfuzzer_sys::fuzz_target;
use swaptide_fuzz::Bytes;
use swaptide_store::codec::{
    Choice, Compressor, MAX_COMPRESSED_BYTES, MAX_UNIT_PAGES, MIN_PACKED_BYTES, Packed, PackedKind,
    PackedUnit, Unpacker,
};
use swaptide_store::zram::Zram;
use swaptide_store::{PAGE_SIZE, Slot};

/// Unpacks between two guards.
fn unpack(unpacker: &mut Unpacker, packed: &[u8], pages: usize) -> Option<Vec<u8>> {
    let mut out = vec![0xA5; 128 + pages * PAGE_SIZE];
    let end = 64 + pages * PAGE_SIZE;
    let done = unpacker.unpack(packed, &mut out[64..end]);
    assert!(
        out[..64].iter().chain(&out[end..]).all(|byte| *byte == 0xA5),
        "written outside of the page"
    );
    done.ok().map(|()| out[64..end].to_vec())
}

/// Pages of short pieces of the input, repeated, so that there is something to compress.
fn pages(bytes: &mut Bytes<'_>, n: usize) -> Vec<u8> {
    let mut page = Vec::with_capacity(n * PAGE_SIZE);
    while page.len() < n * PAGE_SIZE {
        let (len, times) = (
            1 + usize::from(bytes.byte().unwrap_or(63)),
            1 + usize::from(bytes.byte().unwrap_or(255)),
        );
        let piece = bytes.some(len);
        let piece = if piece.is_empty() { &[0][..] } else { piece };
        (0..times).for_each(|_| page.extend_from_slice(piece));
    }
    page.truncate(n * PAGE_SIZE);
    page
}

fuzz_target!(|data: &[u8]| {
    let mut bytes = Bytes(data);
    let Some(kind) = bytes.byte() else { return };
    let mut unpacker = Unpacker::new();
    if kind & 1 == 0 {
        // Whatever bytes.
        let _ = unpack(&mut unpacker, bytes.0, 1);
        let _ = unpack(&mut unpacker, bytes.0, 1 + usize::from(kind >> 1) % MAX_UNIT_PAGES);
        if (MIN_PACKED_BYTES + 1..=MAX_COMPRESSED_BYTES).contains(&bytes.0.len()) {
            let zram = Zram::new(64).expect("address space");
            zram.insert(Slot(3), &Packed::Bytes(bytes.0)).expect("room");
            let mut page = [0; PAGE_SIZE];
            let loaded = zram.load(Slot(3), &mut page, &mut unpacker).is_ok();
            assert_eq!(
                loaded.then(|| page.to_vec()),
                unpack(&mut unpacker, bytes.0, 1),
                "as without the device"
            );
            let mut packed = Vec::new();
            assert_eq!(
                zram.packed(Slot(3), &mut packed, &mut unpacker),
                Ok(PackedKind::Bytes(bytes.0.len()))
            );
            assert_eq!(packed, bytes.0, "what is written to another device is what was stored");
        }
        return;
    }
    let mut compressor = Compressor::new(Choice::ALL[usize::from(kind >> 1) % Choice::ALL.len()]);
    let flips: Vec<[u8; 3]> = bytes.some(3 * usize::from(kind >> 5)).as_chunks().0.to_vec();
    if kind & 8 != 0 {
        let n = 1 + usize::from(kind >> 4 & 3);
        let whole = pages(&mut bytes, n);
        if let PackedUnit::Bytes(packed) = compressor.compress_unit(&whole) {
            assert_eq!(unpack(&mut unpacker, packed, n).as_deref(), Some(&whole[..]));
        }
        return;
    }
    let whole = pages(&mut bytes, 1);
    let page: &[u8; PAGE_SIZE] = whole.as_slice().try_into().expect("a page");
    let zram = Zram::new(64).expect("address space");
    let packed = compressor.compress(page);
    zram.insert(Slot(1), &packed).expect("room");
    let mut back = [0; PAGE_SIZE];
    zram.load(Slot(1), &mut back, &mut unpacker).expect("it was just stored");
    assert!(back == *page, "another page came back");
    if let Packed::Bytes(packed) = packed {
        assert!(packed.len() > MIN_PACKED_BYTES && packed.len() <= MAX_COMPRESSED_BYTES);
        assert_eq!(unpack(&mut unpacker, packed, 1).as_deref(), Some(&page[..]));
        let mut damaged = packed.to_vec();
        for [low, high, bits] in flips {
            let at = usize::from(u16::from_le_bytes([low, high])) % damaged.len();
            damaged[at] ^= bits;
        }
        let _ = unpack(&mut unpacker, &damaged, 1);
        damaged.truncate(damaged.len() / 2);
        let _ = unpack(&mut unpacker, &damaged, 1);
    }
    if let Some(tight) = compressor.compress_tightly(page, MAX_COMPRESSED_BYTES) {
        assert_eq!(unpack(&mut unpacker, tight, 1).as_deref(), Some(&page[..]));
    }
});
