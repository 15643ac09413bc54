use std::collections::HashMap;

use proptest::prelude::*;

use swaptide_sys::pagemap::Pagemap;

use super::*;
use crate::codec::{Choice, Compressor};

/// Numbers from a seed, the same on every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 ^ (self.0 >> 29)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 16) as usize % n
    }
}

/// A page with about `random` bytes that do not compress; 0 and 1 give zero and same-filled pages.
fn page_of(random: usize, seed: u64) -> Box<Page> {
    let mut page = Box::new([0; PAGE_SIZE]);
    match random {
        0 => {}
        1 => codec::fill(&mut page[..], seed | 1),
        _ => {
            let mut numbers = Random(seed);
            for (i, byte) in page.iter_mut().enumerate() {
                *byte = if i < random { (numbers.next() >> 24) as u8 } else { (seed >> 3) as u8 };
            }
        }
    }
    page
}

#[derive(Clone, Debug)]
enum Op {
    Insert { slot: u32, random: usize, seed: u64, zstd: bool },
    InsertUnit { slot: u32, n: usize, random: usize, seed: u64 },
    Load { slot: u32 },
    LoadRange { slot: u32, n: usize },
    Packed { slot: u32 },
    Recompress { slot: u32, most: usize },
    Free { slot: u32 },
    FreeRange { slot: u32, n: usize },
    Compact { budget: usize },
    Limit { bytes: usize },
}

const SLOTS: u32 = 96;
/// Slots used: on both sides of a cluster's end.
const FIRST: u32 = CLUSTER - 40;
const CLUSTER: u32 = crate::CLUSTER_SLOTS as u32;

fn ops() -> impl Strategy<Value = Op> {
    let slot = FIRST..FIRST + SLOTS;
    let random = prop_oneof![Just(0), Just(1), 2usize..3000, Just(4096usize)];
    prop_oneof![
        4 => (slot.clone(), random.clone(), 0u64..8, any::<bool>())
            .prop_map(|(slot, random, seed, zstd)| Op::Insert { slot, random, seed, zstd }),
        3 => (slot.clone(), 1usize..=16, random, 0u64..8)
            .prop_map(|(slot, n, random, seed)| Op::InsertUnit { slot, n, random, seed }),
        4 => slot.clone().prop_map(|slot| Op::Load { slot }),
        3 => (slot.clone(), 1usize..40).prop_map(|(slot, n)| Op::LoadRange { slot, n }),
        3 => slot.clone().prop_map(|slot| Op::Packed { slot }),
        3 => (slot.clone(), 0usize..4096).prop_map(|(slot, most)| Op::Recompress { slot, most }),
        3 => slot.clone().prop_map(|slot| Op::Free { slot }),
        1 => (slot, 1usize..40).prop_map(|(slot, n)| Op::FreeRange { slot, n }),
        1 => (0usize..100_000).prop_map(|budget| Op::Compact { budget }),
        1 => prop_oneof![Just(usize::MAX), 0usize..2_000_000].prop_map(|bytes| Op::Limit { bytes }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever is done, a slot holds what was last put there.
    #[test]
    fn behaves_like_a_map(ops in prop::collection::vec(ops(), 1..120)) {
        let zram = Zram::new(FIRST + SLOTS + 40).unwrap();
        let mut model: HashMap<u32, Box<Page>> = HashMap::new();
        let mut codec = Compressor::default();
        let mut zstd_codec = Compressor::new(Choice::Zstd);
        for op in ops {
            match op {
                Op::Insert { slot, random, seed, zstd } => {
                    let page = page_of(random, seed);
                    let codec = if zstd { &mut zstd_codec } else { &mut codec };
                    match zram.insert(Slot(slot), &codec.compress(&page)) {
                        Ok(()) => {
                            model.insert(slot, page);
                        }
                        Err(PoolFull) => prop_assert!(zram.limit() < usize::MAX && random > 1),
                    }
                }
                Op::InsertUnit { slot, n, random, seed } => {
                    let pages: Vec<_> = (0..n as u64)
                        .map(|i| page_of(random, if random == 1 { seed } else { seed * 100 + i }))
                        .collect();
                    let bytes: Vec<u8> =
                        pages.iter().flat_map(|page| page.iter().copied()).collect();
                    match zram.insert_unit(Slot(slot), n, &codec.compress_unit(&bytes)) {
                        Ok(()) => model.extend((slot..).zip(pages)),
                        Err(PoolFull) => prop_assert!(zram.limit() < usize::MAX && random > 1),
                    }
                }
                Op::Load { slot } => {
                    let mut out = [9; PAGE_SIZE];
                    let answer = zram.load(Slot(slot), &mut out, &mut Unpacker::new());
                    prop_assert_eq!(answer.is_ok(), model.contains_key(&slot));
                    prop_assert!(model.get(&slot).is_none_or(|page| out == **page));
                }
                Op::LoadRange { slot, n } => {
                    let mut out = vec![9; n * PAGE_SIZE];
                    let answer = zram.load_range(Slot(slot), n, &mut out, &mut Unpacker::new());
                    prop_assert_eq!(
                        answer.is_ok(),
                        (slot..slot + n as u32).all(|slot| model.contains_key(&slot))
                    );
                    if answer.is_ok() {
                        for (slot, page) in (slot..).zip(out.chunks(PAGE_SIZE)) {
                            prop_assert!(page == &model[&slot][..]);
                        }
                    }
                }
                Op::Recompress { slot, most } => {
                    let mut bytes = Vec::new();
                    if zram.not_recompressed(Slot(slot), &mut bytes) {
                        let mut out = [9; PAGE_SIZE];
                        Unpacker::new().unpack(&bytes, &mut out).unwrap();
                        prop_assert!(out == *model[&slot]);
                        let tight = codec.compress_tightly(&out, most.min(bytes.len()));
                        let before = zram.stored_bytes();
                        match zram.replace_recompressed(Slot(slot), tight) {
                            Ok(saved) => {
                                prop_assert_eq!(saved, before - zram.stored_bytes());
                                prop_assert!(
                                    !zram.not_recompressed(Slot(slot), &mut bytes),
                                    "tried twice"
                                );
                            }
                            Err(PoolFull) => prop_assert!(zram.limit() < usize::MAX),
                        }
                    } else {
                        prop_assert_eq!(bytes.len(), 0);
                    }
                }
                Op::Packed { slot } => {
                    let mut bytes = vec![7; 3];
                    let answer = zram.packed(Slot(slot), &mut bytes, &mut Unpacker::new());
                    prop_assert_eq!(answer.is_ok(), model.contains_key(&slot));
                    prop_assert_eq!(&bytes[..3], &[7; 3]);
                    prop_assert_eq!(bytes.len() - 3, answer.map_or(0, PackedKind::len));
                    if let Ok(kind) = answer {
                        // Another device would take it, and give the page back.
                        let elsewhere = Zram::new(1).unwrap();
                        elsewhere.insert(Slot(0), &kind.with(&bytes[3..]).unwrap()).unwrap();
                        let mut out = [9; PAGE_SIZE];
                        elsewhere.load(Slot(0), &mut out, &mut Unpacker::new()).unwrap();
                        prop_assert!(out == *model[&slot]);
                        prop_assert_eq!(matches!(kind, PackedKind::Zero), out == [0; PAGE_SIZE]);
                    }
                }
                Op::Free { slot } => {
                    prop_assert_eq!(zram.free(Slot(slot)), model.remove(&slot).is_some())
                }
                Op::FreeRange { slot, n } => {
                    for slot in slot..slot + n as u32 {
                        prop_assert_eq!(zram.free(Slot(slot)), model.remove(&slot).is_some());
                    }
                }
                Op::Compact { budget } => {
                    let before = zram.pool_bytes();
                    let shrunk = zram.compact(budget);
                    prop_assert_eq!(zram.pool_bytes() + shrunk, before);
                }
                Op::Limit { bytes } => zram.set_limit(bytes),
            }
            zram.check();
            prop_assert_eq!(zram.stats().pages, model.len());
        }
        for (&slot, page) in &model {
            let mut out = [9; PAGE_SIZE];
            zram.load(Slot(slot), &mut out, &mut Unpacker::new()).unwrap();
            prop_assert!(out == **page);
            zram.free(Slot(slot));
        }
        zram.trim();
        let stats = zram.stats();
        prop_assert_eq!(
            (stats.pages, stats.objects, stats.stored_bytes, stats.pool_bytes, stats.same_filled),
            (0, 0, 0, 0, 0)
        );
    }
}

/// Packed bytes of a length that `numbers` picks: a mix of small, middling and incompressible
/// pages.
fn mixed_length(numbers: &mut Random) -> usize {
    match numbers.below(8) {
        0 => 40 + numbers.below(200),
        1..=3 => 500 + numbers.below(900),
        4..=6 => 1200 + numbers.below(2300),
        _ => PAGE_SIZE,
    }
}

fn insert_bytes(zram: &Zram, slot: u32, len: usize) {
    let bytes = [slot as u8; PAGE_SIZE];
    let packed = if len == PAGE_SIZE { Packed::Raw(&bytes) } else { Packed::Bytes(&bytes[..len]) };
    zram.insert(Slot(slot), &packed).unwrap();
}

#[test]
fn the_pool_stays_dense_through_churn() {
    const SLOTS: usize = 40_000;
    let zram = Zram::new(SLOTS as u32).unwrap();
    let mut numbers = Random(11);
    for slot in 0..SLOTS as u32 {
        insert_bytes(&zram, slot, mixed_length(&mut numbers));
    }
    let ratio = |zram: &Zram| zram.pool_bytes() as f64 / zram.stored_bytes() as f64;
    assert!(ratio(&zram) <= 1.08, "after filling: {}", ratio(&zram));
    for _ in 0..4 * SLOTS {
        insert_bytes(&zram, numbers.below(SLOTS) as u32, mixed_length(&mut numbers));
    }
    assert!(ratio(&zram) <= 1.12, "after replacing: {}", ratio(&zram));
    // The hard case: most pages go, a few stay in every block.
    for slot in 0..SLOTS as u32 {
        if numbers.below(4) != 0 {
            zram.free(Slot(slot));
        }
    }
    let sparse = ratio(&zram);
    let before = zram.pool_bytes();
    // In small steps, as an engine does it, each within its budget (and one block).
    let shrunk: usize =
        (0..).map(|_| zram.compact(256 << 10)).take_while(|&shrunk| shrunk > 0).sum();
    assert_eq!(zram.pool_bytes() + shrunk, before);
    zram.trim();
    zram.check();
    assert_eq!(
        (zram.compact(usize::MAX), zram.state.lock().pool.loose()),
        (0, 0),
        "nothing is left to look at"
    );
    assert!(
        ratio(&zram) <= 1.12,
        "after freeing three quarters: {sparse}, compacted: {}",
        ratio(&zram)
    );
    assert!(
        zram.metadata_bytes() < 40_000 * 14,
        "{} bytes of records for 40000 slots",
        zram.metadata_bytes()
    );
}

#[test]
fn smaller_object_at_limit_leaves_room() {
    const SLOTS: u32 = 20_000;
    let zram = Zram::new(SLOTS).unwrap();
    let mut numbers = Random(3);
    (0..SLOTS).for_each(|slot| insert_bytes(&zram, slot, 2000 + numbers.below(150)));
    let full = zram.pool_bytes();
    zram.set_limit(full);
    let bytes = [7; PAGE_SIZE];
    for slot in (0..SLOTS).filter(|slot| slot % 8 != 0) {
        let less = Some(&bytes[..1400 + numbers.below(200)]);
        // Of the places that are free by now some are in every block.
        let saved = zram.replace_recompressed(Slot(slot), less).or_else(|_| {
            zram.compact(256 << 10);
            zram.replace_recompressed(Slot(slot), less)
        });
        assert!(saved.unwrap() > 0);
        assert!(zram.pool_bytes() <= full + (1 << 20));
    }
    while zram.compact(256 << 10) > 0 {}
    zram.trim();
    zram.check();
    let ratio = zram.pool_bytes() as f64 / zram.stored_bytes() as f64;
    assert!(ratio <= 1.06, "{ratio}");
}

#[test]
fn pool_bytes_are_what_the_kernel_holds() {
    let zram = Zram::new(20_000).unwrap();
    let pagemap = Pagemap::open_self().unwrap();
    let is_counted = |when: &str| {
        let mut held = 0;
        pagemap.present(zram.state.lock().pool.range(), |run| held += run.len()).unwrap();
        // What is populated with a block the kernel has given; where it could not, less.
        assert!(
            held <= zram.pool_bytes() && held + (1 << 20) > zram.pool_bytes(),
            "{when}: {held}, {}",
            zram.pool_bytes()
        );
    };
    let mut numbers = Random(5);
    (0..20_000).for_each(|slot| insert_bytes(&zram, slot, mixed_length(&mut numbers)));
    is_counted("filled");
    (0..20_000).for_each(|slot| insert_bytes(&zram, slot, mixed_length(&mut numbers) / 2));
    is_counted("with less");
    zram.compact(usize::MAX);
    zram.trim();
    is_counted("compact");
}

#[test]
fn another_slots_page_is_never_handed_out() {
    let zram = Zram::new(64).unwrap();
    let mut codec = Compressor::default();
    let page = page_of(500, 3);
    zram.insert(Slot(1), &codec.compress(&page)).unwrap();
    let unit = [&page[..], &page[..]].concat();
    zram.insert_unit(Slot(10), 2, &codec.compress_unit(&unit)).unwrap();
    {
        // A handle gone wrong.
        let mut state = zram.state.lock();
        let (single, pair) = (state.handles.get(Slot(1)), state.handles.get(Slot(10)));
        state.handles.set(Slot(2), single);
        state.handles.set(Slot(12), pair);
    }
    let mut out = [0; PAGE_SIZE];
    assert_eq!(zram.load(Slot(2), &mut out, &mut Unpacker::new()).unwrap_err().slot, Slot(2));
    assert_eq!(zram.load(Slot(12), &mut out, &mut Unpacker::new()).unwrap_err().slot, Slot(12));
    let mut bytes = Vec::new();
    assert_eq!(zram.packed(Slot(2), &mut bytes, &mut Unpacker::new()).unwrap_err().slot, Slot(2));
    assert_eq!(zram.packed(Slot(12), &mut bytes, &mut Unpacker::new()).unwrap_err().slot, Slot(12));
    assert!(bytes.is_empty());
    assert!(zram.load(Slot(1), &mut out, &mut Unpacker::new()).is_ok() && out == *page);
    // Bytes gone wrong: an object cut short.
    zram.insert(Slot(3), &Packed::Bytes(&[0x1f, 1, 2])).unwrap();
    assert_eq!(zram.load(Slot(3), &mut out, &mut Unpacker::new()).unwrap_err().slot, Slot(3));
}

#[test]
fn a_full_pool_says_so_and_keeps_what_it_has() {
    let zram = Zram::new(4096).unwrap();
    zram.set_limit(1 << 20);
    let page = page_of(PAGE_SIZE, 7);
    let stored =
        (0..4096).take_while(|&slot| zram.insert(Slot(slot), &Packed::Raw(&page)).is_ok()).count();
    assert!(zram.pool_bytes() <= 1 << 20);
    assert!((240..=256).contains(&stored), "{stored} pages in 1 MiB");
    // Same-filled pages always fit; a replacement that does not fit leaves the old page.
    zram.insert(Slot(4000), &Packed::Same(5)).unwrap();
    let unit: Vec<u8> = page.iter().copied().cycle().take(4 * PAGE_SIZE).collect();
    assert_eq!(zram.insert_unit(Slot(0), 4, &PackedUnit::Raw(&unit)), Err(PoolFull));
    let mut out = [0; PAGE_SIZE];
    for slot in 0..stored as u32 {
        zram.load(Slot(slot), &mut out, &mut Unpacker::new()).unwrap();
        assert!(out == *page);
    }
    zram.check();
}

#[test]
fn threads_load_and_store_while_one_compacts() {
    use std::sync::atomic::{AtomicBool, Ordering};
    const EACH: u32 = 600;
    let zram = Zram::new(3 * EACH).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3u32)
            .map(|worker| {
                let zram = &zram;
                scope.spawn(move || {
                    let mut codec = Compressor::default();
                    let mut numbers = Random(worker.into());
                    let mut held: HashMap<u32, (usize, u64)> = HashMap::new();
                    let mut out = [0; PAGE_SIZE];
                    for round in 0..6000u64 {
                        let slot = worker * EACH + numbers.below(EACH as usize - 4) as u32;
                        match numbers.below(5) {
                            4 => {
                                // As the engine does it: out, and in again if nothing happened
                                // to the slot; here nothing does.
                                let mut bytes = Vec::new();
                                if zram.not_recompressed(Slot(slot), &mut bytes) {
                                    Unpacker::new().unpack(&bytes, &mut out).unwrap();
                                    zram.replace_recompressed(
                                        Slot(slot),
                                        codec.compress_tightly(&out, bytes.len()),
                                    )
                                    .unwrap();
                                }
                            }
                            0 => {
                                let random = numbers.below(3000);
                                zram.insert(Slot(slot), &codec.compress(&page_of(random, round)))
                                    .unwrap();
                                held.insert(slot, (random, round));
                            }
                            1 => {
                                let random = 2 + numbers.below(2000);
                                let pages: Vec<_> =
                                    (0..4).map(|i| page_of(random, round * 10 + i)).collect();
                                let bytes: Vec<u8> =
                                    pages.iter().flat_map(|page| page.iter().copied()).collect();
                                zram.insert_unit(Slot(slot), 4, &codec.compress_unit(&bytes))
                                    .unwrap();
                                held.extend(
                                    (0..4u32)
                                        .map(|i| (slot + i, (random, round * 10 + u64::from(i)))),
                                );
                            }
                            2 => {
                                assert_eq!(zram.free(Slot(slot)), held.remove(&slot).is_some())
                            }
                            _ => {
                                let answer = zram.load(Slot(slot), &mut out, &mut Unpacker::new());
                                assert_eq!(answer.is_ok(), held.contains_key(&slot));
                                assert!(held.get(&slot).is_none_or(
                                        |&(random, seed)| out == *page_of(random, seed)
                                    ));
                            }
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                zram.compact(64 << 10);
            }
        });
        let results: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(results.iter().all(Result::is_ok));
    });
    zram.check();
}

#[test]
fn locks_that_a_child_inherits_can_be_opened() {
    let zram = Zram::new(8).unwrap();
    zram.insert(Slot(1), &Packed::Same(4)).unwrap();
    let held = (zram.scratch.lock(), zram.state.lock());
    // As in a forked child: the holder of the locks is not there.
    core::mem::forget(held);
    // SAFETY: the guards are forgotten, and no other thread knows the device.
    unsafe { zram.force_unlock() };
    assert!(!zram.state.is_locked() && !zram.scratch.is_locked());
    assert!(zram.contains(Slot(1)));
}

#[test]
fn a_flipped_bit_is_never_handed_out() {
    let device = Zram::new(1 << 20).unwrap();
    let mut unpacker = Unpacker::new();
    let mut random = Random(9);
    for (kind, choice) in [(900, Choice::Lz4), (2500, Choice::Zstd), (PAGE_SIZE, Choice::Lz4)] {
        let mut codec = Compressor::new(choice);
        let page = page_of(kind, 77);
        for _ in 0..200 {
            device.insert(Slot(3), &codec.compress(&page)).unwrap();
            device.flip(Slot(3), random.next() as usize >> 1);
            let (mut out, mut bytes) = ([0; PAGE_SIZE], vec![7]);
            assert_eq!(
                device.load(Slot(3), &mut out, &mut unpacker),
                Err(Damaged { slot: Slot(3), what: CHANGED })
            );
            assert_eq!(
                device.packed(Slot(3), &mut bytes, &mut unpacker),
                Err(Damaged { slot: Slot(3), what: CHANGED })
            );
            assert!(!device.not_recompressed(Slot(3), &mut bytes));
            assert_eq!(bytes, [7]);
        }
    }
    // Of a unit, none of the pages.
    let mut codec = Compressor::new(Choice::Lz4);
    let pages: Vec<u8> = (0..4).flat_map(|i| page_of(700, i + 5).to_vec()).collect();
    device.insert_unit(Slot(8), 4, &codec.compress_unit(&pages)).unwrap();
    device.flip(Slot(8), 12345);
    for slot in 8..12 {
        assert!(device.load(Slot(slot), &mut [0; PAGE_SIZE], &mut unpacker).is_err());
    }
    assert!(device.load_range(Slot(8), 4, &mut vec![0; 4 * PAGE_SIZE], &mut unpacker).is_err());
}

#[test]
fn promised_page_count_fits_at_any_size() {
    for kind in [2, 3, 4, 5] {
        let device = Zram::with_room(1 << 20, 1 << 20).unwrap();
        assert!(!device.is_scarce());
        let mut random = Random(kind);
        let mut slots = Vec::new();
        loop {
            let promised = device.room_pages();
            let size = |random: &mut Random| match kind {
                2 => PAGE_SIZE,
                3 => 3000 + random.below(500),
                _ => 9 + random.below(MAX_COMPRESSED_BYTES - 9),
            };
            // Half of what it may take, and some of it goes again.
            for _ in 0..promised.div_ceil(2) {
                let slot = Slot(slots.len() as u32);
                let (bytes, page) = (vec![7; size(&mut random)], [7; PAGE_SIZE]);
                let packed = if kind == 2 { Packed::Raw(&page) } else { Packed::Bytes(&bytes[..]) };
                device.insert(slot, &packed).expect("there is room");
                slots.push(slot);
            }
            for _ in 0..promised / 8 {
                device.free(slots[random.below(slots.len())]);
            }
            assert!(device.room_pages() <= promised);
            if promised == 0 {
                break;
            }
        }
        assert!(device.is_scarce());
        // Something replaced by less begins no block.
        let before = device.room_pages();
        let used = slots.iter().find(|slot| device.contains(**slot)).unwrap();
        let _ = device.replace_recompressed(*used, Some(&[1; 300]));
        assert_eq!(device.room_pages(), before);
    }
}
