use proptest::prelude::*;

use super::*;

const CODECS: [(Choice, Codec); 3] =
    [(Choice::Lz4, Codec::Lz4), (Choice::Zstd, Codec::Zstd), (Choice::Snappy, Codec::Snappy)];

fn text_page() -> Page {
    let mut page = [0; PAGE_SIZE];
    for (i, byte) in page.iter_mut().enumerate() {
        *byte = b"the quick brown fox "[(i * i / 7) % 20];
    }
    page
}

fn random_page(mut state: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    for byte in &mut page {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *byte = (state >> 56) as u8;
    }
    page
}

/// Decompresses in the middle of a guarded buffer.
fn guarded(unpacker: &mut Unpacker, packed: &[u8], len: usize) -> Option<Vec<u8>> {
    const GUARD: usize = 64;
    let mut buffer = vec![0xa5; len + 2 * GUARD];
    let answer = unpacker.unpack(packed, &mut buffer[GUARD..GUARD + len]);
    assert!(
        buffer[..GUARD].iter().chain(&buffer[GUARD + len..]).all(|&byte| byte == 0xa5),
        "written outside"
    );
    answer.ok().map(|()| buffer[GUARD..GUARD + len].to_vec())
}

/// Pages of runs of every period, words that resemble each other, noise, and some of it again far
/// away.
fn pages() -> impl Strategy<Value = Page> {
    let run = (prop::collection::vec(any::<u8>(), 1..40), 1usize..600)
        .prop_map(|(period, len)| period.into_iter().cycle().take(len).collect::<Vec<u8>>());
    let noise = prop::collection::vec(any::<u8>(), 0..300);
    let words = (any::<u32>(), 1usize..200).prop_map(|(base, n)| {
        (0..n as u64).flat_map(|i| (u64::from(base) + i * 48).to_le_bytes()).collect::<Vec<u8>>()
    });
    prop::collection::vec(prop_oneof![3 => run, 1 => noise, 2 => words], 1..30).prop_map(|parts| {
        let data = parts.concat();
        let mut page = [0; PAGE_SIZE];
        for (byte, from) in page
            .iter_mut()
            .zip(data.iter().chain(&data[..data.len() / 2]).chain(core::iter::repeat(&0)))
        {
            *byte = *from;
        }
        page
    })
}

#[test]
fn classify_sees_one_odd_byte_anywhere() {
    assert_eq!(classify(&[0; PAGE_SIZE]), Content::Zero);
    assert_eq!(classify(&[7; PAGE_SIZE]), Content::Same(0x0707_0707_0707_0707));
    for at in [0, 1, 7, 8, 2047, 4088, 4095] {
        let mut page = [7; PAGE_SIZE];
        page[at] = 8;
        assert_eq!(classify(&page), Content::Data, "odd byte at {at}");
    }
}

#[test]
fn pages_and_units_round_trip() {
    let (mut c, mut u) = (Compressor::new(Choice::Lz4), Unpacker::new());
    let page = text_page();
    let Packed::Bytes(block) = c.compress(&page) else { panic!("text must compress") };
    let mut out = [1; PAGE_SIZE];
    u.unpack(block, &mut out).unwrap();
    assert!(out == page);
    assert_eq!(u.unpack(&block[..block.len() - 1], &mut out), Err(BadBlock));
    assert_eq!(u.unpack(&[], &mut out), Err(BadBlock));
    for n in [2, 15, 16] {
        let pages: Vec<u8> = page.iter().copied().cycle().take(n * PAGE_SIZE).collect();
        let PackedUnit::Bytes(block) = c.compress_unit(&pages) else {
            panic!("text must compress")
        };
        let mut out = vec![0; pages.len()];
        u.unpack(block, &mut out).unwrap();
        assert!(out == pages);
    }
    assert_eq!(c.compress_unit(&[3; 3 * PAGE_SIZE]), PackedUnit::Same(0x0303_0303_0303_0303));
    assert_eq!(c.compress_unit(&[0; PAGE_SIZE]), PackedUnit::Zero);
}

#[test]
fn random_pages_stay_raw_with_every_codec() {
    let page = random_page(1);
    for choice in Choice::ALL {
        let mut compressor = Compressor::new(choice);
        for _ in 0..100 {
            assert_eq!(compressor.compress(&page), Packed::Raw(&page));
        }
    }
    assert_eq!(Compressor::new(Choice::Lz4).compress_tightly(&page, PAGE_SIZE), None);
}

#[test]
fn the_run_a_page_ends_in_is_left_out_and_comes_back() {
    let noise = random_page(5);
    for (c, codec) in CODECS {
        let (mut c, mut u) = (Compressor::new(c), Unpacker::new());
        for word in [0, 0x0102_0304_0506_0708u64] {
            for at in [1usize, 7, 8, 9, 1000, 1024, 1025, 3000, 3500] {
                let mut page = noise;
                fill(&mut page[at.next_multiple_of(8)..], word);
                page[at..at.next_multiple_of(8)].fill(0);
                let Packed::Bytes(bytes) = c.compress(&page) else {
                    panic!("{at} random bytes do not compress")
                };
                assert_eq!(Codec::of(bytes), codec);
                assert!(
                    bytes.len() <= at + 48 && bytes.len() > MIN_PACKED_BYTES,
                    "{at} random bytes are {}",
                    bytes.len()
                );
                assert!(
                    guarded(&mut u, bytes, PAGE_SIZE).as_deref() == Some(&page[..]),
                    "{at} bytes and {word:#x}"
                );
            }
        }
    }
    // What unpacks to nothing has no last word.
    assert_eq!(Unpacker::new().unpack(&[0x10], &mut [0; PAGE_SIZE]), Err(BadBlock));
}

#[test]
fn zstd_takes_less_than_lz4_and_only_what_was_allowed() {
    let (mut c, page) = (Compressor::new(Choice::Lz4), text_page());
    let Packed::Bytes(block) = c.compress(&page) else { panic!("text must compress") };
    let lz4 = block.len();
    let zstd = c.compress_tightly(&page, lz4).expect("text is smaller with zstd").len();
    assert!(zstd < lz4, "{zstd} of {lz4}");
    assert_eq!(c.compress_tightly(&page, zstd - 1), None);
    assert_eq!(c.compress_tightly(&page, 0), None);
    // A refusal leaves the context in order.
    let again = c.compress_tightly(&page, lz4).expect("as before").to_vec();
    assert!(guarded(&mut Unpacker::new(), &again, PAGE_SIZE).as_deref() == Some(&page[..]));
}

/// Digits repeat nothing that lz4 finds, and are not random either.
#[test]
fn zstd_may_shrink_page_raw_in_lz4() {
    let page = random_page(2).map(|byte| b'0' + byte % 10);
    assert_eq!(Compressor::new(Choice::Lz4).compress(&page), Packed::Raw(&page));
    let mut both = Compressor::new(Choice::Both);
    // However often it was in vain before, it is found out that it no longer is.
    for round in 0..200 {
        both.compress(&random_page(round));
    }
    let frame = (0..40).find_map(|_| match both.compress(&page) {
        Packed::Bytes(bytes) => Some(bytes.to_vec()),
        _ => None,
    });
    let frame = frame.expect("tried again after some pages");
    assert_eq!(Codec::of(&frame), Codec::Zstd);
    assert!(guarded(&mut Unpacker::new(), &frame, PAGE_SIZE).as_deref() == Some(&page[..]));
    assert!(matches!(both.compress(&page), Packed::Bytes(_)), "tried at once after a success");
}

#[test]
fn schemes_have_names_and_numbers_of_their_own() {
    let mut seen = std::collections::BTreeSet::new();
    for choice in Choice::ALL {
        assert_eq!(Choice::ALL.iter().filter(|other| other.name() == choice.name()).count(), 1);
        for level in (0..=u8::MAX).filter_map(Level::new) {
            let scheme = Scheme { choice, level };
            assert_eq!(Scheme::from_number(scheme.number()), scheme);
            assert!(seen.insert(scheme.number()));
        }
    }
    assert_eq!(seen.len(), 36);
    assert_eq!(Scheme::default().number(), 0, "memory that was never written means the default");
    for senseless in [77, 9 << 8, u32::MAX] {
        assert_eq!(Scheme::from_number(senseless), Scheme::default());
    }
    assert_eq!((Level::new(0), Level::new(10)), (None, None));
}

#[test]
fn a_higher_level_takes_less_and_every_level_comes_back() {
    let mut u = Unpacker::new();
    // Words of one list in no order, with what numbers them.
    let mut page = [0; PAGE_SIZE];
    for (k, (word, noise)) in page.chunks_exact_mut(8).zip(random_page(3)).enumerate() {
        word.copy_from_slice(
            &[b"one ", b"two ", b"some", b"many"][usize::from(noise) % 4]
                .map(|byte| byte ^ noise >> 6)
                .repeat(2)[..8],
        );
        word[7] = k as u8 / 4;
    }
    let sizes: Vec<usize> = (1..=Level::MAX.get())
        .filter_map(Level::new)
        .map(|level| {
            let mut c = Compressor::new(Scheme { choice: Choice::Zstd, level });
            let Packed::Bytes(bytes) = c.compress(&page) else { panic!("text must compress") };
            assert!(guarded(&mut u, bytes, PAGE_SIZE).as_deref() == Some(&page[..]), "{level:?}");
            bytes.len()
        })
        .collect();
    assert!(sizes[8] < sizes[0], "{sizes:?}");
}

#[test]
fn every_period_and_every_end() {
    let (mut c, mut u) = (Compressor::new(Choice::Lz4), Unpacker::new());
    for period in 1..40usize {
        for end in [0usize, 1, 3, 4, 5, 7, 8, 11, 12, 13, 31, 100] {
            let mut page = [0; PAGE_SIZE];
            for (i, byte) in page.iter_mut().enumerate() {
                *byte = if i + end < PAGE_SIZE { (i % period) as u8 } else { 200 + (i % 7) as u8 };
            }
            if classify(&page) != Content::Data {
                continue;
            }
            let Packed::Bytes(block) = c.compress(&page) else { panic!("period {period}") };
            assert!(
                guarded(&mut u, block, PAGE_SIZE).as_deref() == Some(&page[..]),
                "period {period}, end {end}"
            );
            let frame = c.compress_tightly(&page, PAGE_SIZE).expect("compresses");
            assert!(
                guarded(&mut u, frame, PAGE_SIZE).as_deref() == Some(&page[..]),
                "period {period}, end {end}"
            );
        }
    }
}

proptest! {
    /// One unpacker for all codecs, whatever came before.
    #[test]
    fn every_codec_gives_back_what_was_compressed(
        pages in prop::collection::vec((pages(), 0..CODECS.len()), 1..6),
    ) {
        let (mut compressors, mut unpacker) =
            (CODECS.map(|(choice, _)| Compressor::new(choice)), Unpacker::new());
        for (page, which) in &pages {
            if let Packed::Bytes(bytes) = compressors[*which].compress(page) {
                prop_assert_eq!(Codec::of(bytes), CODECS[*which].1);
                prop_assert!(
                    guarded(&mut unpacker, bytes, PAGE_SIZE).as_deref() == Some(&page[..])
                );
                prop_assert!(guarded(&mut unpacker, bytes, PAGE_SIZE - 1).is_none());
                prop_assert!(
                    guarded(&mut unpacker, &bytes[..bytes.len() - 1], PAGE_SIZE).is_none()
                );
            }
        }
    }

    /// Damaged bytes unpack to something or to nothing, but touch nothing outside; and leave the
    /// unpacker in order.
    #[test]
    fn survives_any_damage(
        page in pages(),
        which in 0..CODECS.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let (mut compressor, mut unpacker) = (Compressor::new(CODECS[which].0), Unpacker::new());
        if let Packed::Bytes(bytes) = compressor.compress(&page) {
            let mut damaged = bytes.to_vec();
            for (at, byte) in changes {
                let at = at.index(damaged.len());
                damaged[at] = byte;
            }
            // In an allocation of its own size, for a sanitizer to see.
            let _ = guarded(&mut unpacker, &damaged.clone().into_boxed_slice(), PAGE_SIZE);
            damaged.truncate(cut.index(damaged.len()));
            let _ = guarded(&mut unpacker, &damaged.into_boxed_slice(), PAGE_SIZE);
            prop_assert!(guarded(&mut unpacker, bytes, PAGE_SIZE).as_deref() == Some(&page[..]));
        }
    }

    #[test]
    fn survives_arbitrary_bytes(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        mark in 0..=SNAPPY_MARK.len(),
        len in 1usize..5000,
    ) {
        let bytes = [&SNAPPY_MARK[..mark], &bytes].concat();
        let _ = guarded(&mut Unpacker::new(), &bytes, len);
    }
}
