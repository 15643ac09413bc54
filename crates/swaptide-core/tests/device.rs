//! One device and several, call by call.
#![cfg(not(loom))]

mod common;

use common::{CPU, G, order, ty};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use swaptide_core::*;

fn device(slots: u32) -> SwapDevice {
    SwapDevice::new(ty(0), slots, 2, Kind::Solid)
}

#[test]
fn one_folio_out_and_in_again() {
    let d = device(4096);
    let off = d.alloc_folio(CPU, order(4), FolioId(7), G).unwrap();
    assert_eq!(off.0 % 16, 0);
    for i in 0..16 {
        assert_eq!(d.lookup(off.plus(i)), SlotContent::Folio(FolioId(7)));
        assert_eq!(
            d.info(off.plus(i)),
            SlotInfo { slot: SlotContent::Folio(FolioId(7)), count: 1, zero: false, group: G }
        );
    }
    assert_eq!(d.folio_to_shadow(off, 16, FolioId(7), Shadow(99), ZeroMask::Bits(&[0b101])), Ok(0));
    assert_eq!(d.lookup(off.plus(2)), SlotContent::Shadow { shadow: Shadow(99), zero: true });
    assert_eq!(d.lookup(off.plus(3)), SlotContent::Shadow { shadow: Shadow(99), zero: false });
    assert_eq!(d.swap_in_range(off, 16), None, "zero flags differ");
    assert_eq!(d.swap_in_range(off.plus(4), 4), Some((false, G)));
    let mut shadows = [Shadow(0); 16];
    assert_eq!(d.shadow_to_folio(off, 16, FolioId(8), Some(&mut shadows)), Ok(()));
    assert_eq!(shadows, [Shadow(99); 16]);
    assert!(d.info(off).zero && !d.info(off.plus(1)).zero, "the zero flag survives");
    assert_eq!(d.replace_folio(off, 16, FolioId(8), FolioId(9)), Ok(()));
    assert_eq!(d.put(off, 16), Ok(0), "cached slots stay");
    assert_eq!(d.used(), 16);
    assert_eq!(d.folio_release(off, 16, FolioId(9)), Ok(16));
    assert_eq!((d.used(), d.usage().tables), (0, 0));
    assert_eq!(d.lookup(off), SlotContent::Free);
}

#[test]
fn a_refused_exchange_changes_nothing_and_says_what_it_found() {
    let d = device(4096);
    let off = d.alloc_folio(CPU, order(2), FolioId(7), G).unwrap();
    d.folio_to_shadow(off, 2, FolioId(7), Shadow(1), ZeroMask::None).unwrap();
    let lost = d.shadow_to_folio(off, 4, FolioId(8), None).unwrap_err();
    assert!(lost.exists() && !lost.gone());
    assert_eq!((lost.entry.offset(), lost.cluster), (off.plus(2), off.cluster()));
    assert_eq!(d.lookup(off), SlotContent::Shadow { shadow: Shadow(1), zero: false });
    let text = d.replace_folio(off.plus(2), 2, FolioId(1), FolioId(2)).unwrap_err().to_string();
    for part in ["0:0x2", "cluster 0", "folio 1", "folio 7", "count 1"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(d.put(off.plus(3), 2).unwrap_err().gone(), "one slot beyond the folio is free");
    assert_eq!(d.info(off.plus(3)).count, 1);
    assert!(d.folio_release(off.plus(2), 2, FolioId(7)).is_err(), "still mapped");
    assert!(d.free(off, 4, Expect::Shadow).is_err());
    d.dup(off, 1).unwrap();
    assert_eq!(d.free(off, 4, Expect::Any).unwrap_err().expected, Expected::LastUser);
    d.put(off, 1).unwrap();
    assert_eq!(d.free(off, 4, Expect::Any), Ok(4));
    for (off, n) in [(0, 0), (511, 2), (4095, 2), (4096, 1), (u32::MAX, 1), (0, 513)] {
        assert_eq!(d.dup(SwapOffset(off), n).unwrap_err().expected, Expected::Range);
    }
    assert_eq!(d.lookup(SwapOffset(4096)), SlotContent::Bad);
}

#[test]
fn counts_grow_past_the_word_and_come_back() {
    let d = device(512);
    let off = d.alloc_folio(CPU, order(1), FolioId(1), G).unwrap();
    let empty = d.metadata_bytes();
    for _ in 0..999 {
        d.dup(off, 2).unwrap();
    }
    assert_eq!((d.count(off), d.count(off.plus(1)), d.info(off).count), (1000, 1000, 255));
    assert!(d.metadata_bytes() > empty);
    d.folio_to_shadow(off, 2, FolioId(1), Shadow(3), ZeroMask::All).unwrap();
    assert_eq!(d.count(off), 1000);
    for _ in 0..999 {
        assert_eq!(d.put(off, 2), Ok(0));
    }
    assert_eq!(d.metadata_bytes(), empty);
    assert_eq!(d.put(off, 2), Ok(2));
    assert_eq!(d.count(off), 0);
}

#[test]
fn every_slot_of_a_device_can_be_used_and_not_one_more() {
    for slots in [512u32, 2048, 1000, 513, 1] {
        let d = device(slots);
        let mut seen = vec![false; slots as usize];
        for i in 0..slots {
            let off = d.alloc_folio(CpuId(i as u16), order(0), FolioId(i), G).unwrap();
            assert!(!std::mem::replace(&mut seen[off.0 as usize], true));
        }
        assert_eq!(d.alloc_folio(CPU, order(0), FolioId(0), G), Err(AllocError::Full));
        assert_eq!((d.usage().used, d.usage().clusters_free), (slots, 0));
        let off = SwapOffset(slots / 2);
        d.free(off, 1, Expect::Any).unwrap();
        assert_eq!(d.alloc_folio(CPU, order(0), FolioId(0), G), Ok(off));
    }
}

#[test]
fn order_0_steals_from_large_orders_last() {
    let d = device(2048);
    let large = d.alloc_folio(CPU, order(4), FolioId(1), G).unwrap();
    for i in 0..3 * 512 {
        let off = d.alloc_folio(CPU, order(0), FolioId(2), G).unwrap();
        assert_ne!(off.cluster(), large.cluster(), "slot {i} stolen early");
    }
    let stolen = d.alloc_folio(CPU, order(0), FolioId(2), G).unwrap();
    assert_eq!(stolen.cluster(), large.cluster());
    // The large order continues in its cluster, around what was stolen.
    let next = d.alloc_folio(CpuId(1), order(4), FolioId(1), G).unwrap();
    assert_eq!(next.cluster(), large.cluster());
    while d.alloc_folio(CPU, order(4), FolioId(1), G).is_ok() {}
    assert_eq!(d.capacity() - d.used(), 15);
    assert_eq!(d.alloc_folio(CPU, order(4), FolioId(1), G), Err(AllocError::Full));
    d.free(large, 1, Expect::Any).unwrap();
    assert_eq!(d.alloc_folio(CPU, order(4), FolioId(1), G), Err(AllocError::NoRun));
}

#[test]
fn freed_runs_are_found_again() {
    let d = device(2048);
    let runs: Vec<_> =
        (0..128).map(|i| d.alloc_folio(CPU, order(4), FolioId(i), G).unwrap()).collect();
    assert_eq!(d.alloc_folio(CPU, order(4), FolioId(0), G), Err(AllocError::Full));
    for round in 0..50 {
        let some: Vec<_> = runs
            .iter()
            .enumerate()
            .filter(|(i, _)| (i * 7 + round) % 5 == 0)
            .map(|(_, off)| *off)
            .collect();
        for off in &some {
            assert_eq!(d.free(*off, 16, Expect::Any), Ok(16));
        }
        let mut again: Vec<_> =
            some.iter().map(|_| d.alloc_folio(CPU, order(4), FolioId(1), G).unwrap()).collect();
        again.sort();
        let mut expected = some.clone();
        expected.sort();
        assert_eq!(again, expected);
    }
}

#[test]
fn cpus_fill_different_clusters_and_rotational_devices_one() {
    let solid = device(4096);
    let a = solid.alloc_folio(CpuId(0), order(0), FolioId(0), G).unwrap();
    let b = solid.alloc_folio(CpuId(1), order(0), FolioId(0), G).unwrap();
    assert_ne!(a.cluster(), b.cluster());
    let rotational = SwapDevice::new(ty(1), 4096, 2, Kind::Rotational);
    let offs: Vec<_> = (0..600)
        .map(|i| rotational.alloc_folio(CpuId(i % 4), order(0), FolioId(0), G).unwrap().0)
        .collect();
    assert!(offs.windows(2).all(|w| w[1] == w[0] + 1), "one cursor");
}

#[test]
fn bad_slots_are_never_given_out() {
    let d = device(1024);
    d.mark_bad(SwapOffset(0), 1).unwrap();
    d.mark_bad(SwapOffset(700), 10).unwrap();
    assert_eq!((d.usage().bad, d.capacity()), (11, 1013));
    let used: Vec<_> =
        (0..1013).map(|_| d.alloc_folio(CPU, order(0), FolioId(0), G).unwrap().0).collect();
    assert!(used.iter().all(|&off| off != 0 && !(700..710).contains(&off)));
    assert_eq!(d.lookup(SwapOffset(705)), SlotContent::Bad);
    assert!(d.mark_bad(SwapOffset(5), 1).is_err(), "in use");
    assert!(d.put(SwapOffset(705), 1).is_err());
    let mut listed = 0;
    d.for_each_used(ClusterIndex(0), |_, _| listed += 1);
    d.for_each_used(ClusterIndex(1), |_, _| listed += 1);
    assert_eq!(listed, 1013);
}

#[test]
fn emptied_clusters_are_discarded_before_reuse() {
    let d = device(2048).with_discard(true);
    let offs: Vec<_> =
        (0..2).map(|_| d.alloc_folio(CPU, order(9), FolioId(1), G).unwrap()).collect();
    for off in &offs {
        d.free(*off, 512, Expect::Folio(FolioId(1))).unwrap();
    }
    assert_eq!((d.usage().clusters_free, d.usage().clusters_discard), (2, 2));
    let batch = d.take_emptied(8);
    assert_eq!(batch, offs.iter().map(|off| off.cluster()).collect::<Vec<_>>());
    // While they are away the other two serve, and order 0 cannot have what is being discarded.
    d.alloc_folio(CPU, order(9), FolioId(2), G).unwrap();
    d.alloc_folio(CPU, order(9), FolioId(2), G).unwrap();
    assert_eq!(d.alloc_folio(CPU, order(9), FolioId(2), G), Err(AllocError::NoRun));
    assert_eq!(d.alloc_folio(CPU, order(0), FolioId(2), G), Err(AllocError::NoRun));
    batch.into_iter().for_each(|index| d.discard_done(index));
    let off = d.alloc_folio(CPU, order(9), FolioId(2), G).unwrap();
    d.free(off, 512, Expect::Any).unwrap();
    d.alloc_folio(CPU, order(9), FolioId(2), G).unwrap();
    assert!(
        d.alloc_folio(CPU, order(9), FolioId(2), G).is_ok(),
        "a waiting cluster is better than none"
    );
}

#[test]
#[should_panic(expected = "is not being discarded")]
fn discard_done_of_a_cluster_in_use_stops() {
    let d = device(1024).with_discard(true);
    let off = d.alloc_folio(CPU, order(0), FolioId(1), G).unwrap();
    d.discard_done(off.cluster());
}

#[test]
fn the_owner_of_the_data_hears_of_every_freed_slot_first() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let to = heard.clone();
    let d =
        device(4096).with_free_notify(Box::new(move |off, n| to.lock().unwrap().push((off.0, n))));
    let off = d.alloc_folio(CPU, order(3), FolioId(1), G).unwrap();
    d.dup(off.plus(3), 1).unwrap();
    d.folio_to_shadow(off, 8, FolioId(1), Shadow(0), ZeroMask::None).unwrap();
    assert_eq!(d.put(off, 8), Ok(7));
    assert_eq!(*heard.lock().unwrap(), [(off.0, 3), (off.0 + 4, 4)]);
    assert_eq!(d.put(off.plus(3), 1), Ok(1));
    assert_eq!(heard.lock().unwrap().last(), Some(&(off.0 + 3, 1)));
    // A cache-only slot becomes free when its folio leaves.
    let off = d.alloc_folio(CPU, order(0), FolioId(2), G).unwrap();
    assert_eq!(d.put(off, 1), Ok(0));
    assert_eq!(d.folio_to_shadow(off, 1, FolioId(2), Shadow(0), ZeroMask::None), Ok(1));
    assert_eq!(heard.lock().unwrap().len(), 4);
}

#[test]
fn a_closed_device_is_drained() {
    let d = device(8192);
    let mut expected = Vec::new();
    for i in 0..700 {
        let o = order((i % 5) as u8);
        let off = d.alloc_folio(CpuId((i % 2) as u16), o, FolioId(i), G).unwrap();
        expected.extend((0..o.pages()).map(|p| off.0 + p));
    }
    expected.sort_unstable();
    d.set_allocation_enabled(false);
    assert_eq!(d.alloc_folio(CPU, order(0), FolioId(0), G), Err(AllocError::Disabled));
    assert_eq!(d.drain().map(|(off, _)| off.0).collect::<Vec<_>>(), expected);
    for (off, info) in d.drain() {
        let SlotContent::Folio(folio) = info.slot else { panic!("{info:?}") };
        d.free(off, 1, Expect::Folio(folio)).unwrap();
    }
    assert_eq!((d.used(), d.drain().count(), d.usage().tables), (0, 0, 0));
}

#[test]
fn memory_follows_use() {
    let tib = SwapDevice::new(ty(0), MAX_SLOTS, 64, Kind::Solid);
    assert!(
        tib.metadata_bytes() <= 1 << 20,
        "{} bytes before the first slot",
        tib.metadata_bytes()
    );
    let last = SwapOffset(MAX_SLOTS - 1);
    assert_eq!((tib.lookup(last), tib.usage().clusters_free), (SlotContent::Free, (1 << 19) - 1));

    static DISCARDED: AtomicU32 = AtomicU32::new(0);
    fn discard(page: *const u8, len: usize) {
        assert!(len.is_multiple_of(4096) && page.addr().is_multiple_of(4096));
        DISCARDED.fetch_add(len as u32 / 4096, Ordering::Relaxed);
    }
    let d = device(1 << 18).with_table_discard(discard);
    let before = d.metadata_bytes();
    let offs: Vec<_> =
        (0..1 << 14).map(|i| d.alloc_folio(CPU, order(4), FolioId(i), G).unwrap()).collect();
    let per_slot = (d.metadata_bytes() - before) as f64 / f64::from(1 << 18);
    assert!(per_slot < 8.2, "{per_slot} bytes per used slot");
    assert_eq!(d.usage().tables, 512);
    offs.iter().for_each(|off| _ = d.free(*off, 16, Expect::Any).unwrap());
    // All when the hook was set, and most of them again when their clusters emptied.
    let discarded = DISCARDED.load(Ordering::Relaxed);
    assert!(d.usage().tables == 0 && (1000..=1024).contains(&discarded), "{discarded}");
    assert!(
        d.metadata_bytes() - before < 16 * 4096 + 512 * 48 + 4096,
        "{}",
        d.metadata_bytes() - before
    );
    // The last cluster of this one is not whole: its table is in use from the start.
    let odd = device(1000).with_table_discard(discard);
    let fixed = odd.metadata_bytes();
    assert_eq!(DISCARDED.load(Ordering::Relaxed) - discarded, 1);
    odd.alloc_folio(CPU, order(9), FolioId(1), G).unwrap();
    assert_eq!(odd.metadata_bytes() - fixed, 4096);
}

#[test]
fn candidates_for_emptying_and_for_cache_reclaim() {
    let d = device(4096);
    assert_eq!((d.fragmented_candidate(order(0)), d.full_candidate()), (None, None));
    let offs: Vec<_> =
        (0..1024).map(|_| d.alloc_folio(CPU, order(0), FolioId(1), G).unwrap()).collect();
    let (a, b) = (offs[0].cluster(), offs[1023].cluster());
    assert_eq!(
        (d.full_candidate(), d.full_candidate(), d.full_candidate()),
        (Some(a), Some(b), Some(a))
    );
    offs.iter()
        .filter(|off| off.cluster() == b && off.0 % 2 == 0)
        .for_each(|off| _ = d.free(*off, 1, Expect::Any).unwrap());
    d.free(offs[0], 1, Expect::Any).unwrap();
    assert_eq!(d.fragmented_candidate(order(0)), Some(b));
    assert_eq!(d.fragmented_candidate(order(0)), Some(b));
}

#[test]
fn priorities_masks_and_turns() {
    let mut space = SwapSpace::new();
    for (n, priority, slots) in [(0, 10, 1024), (1, 5, 2048), (2, 5, 2048)] {
        assert_eq!(space.add(SwapDevice::new(ty(n), slots, 1, Kind::Solid), priority), Ok(ty(n)));
    }
    assert_eq!(space.add(device(512), 3), Err(SpaceError::Exists(ty(0))));
    let alloc = |space: &SwapSpace, mask, n| space.alloc_folio(mask, CPU, order(n), FolioId(1), G);
    for _ in 0..64 {
        assert_eq!(alloc(&space, TypeMask::ALL, 4).unwrap().ty(), ty(0));
    }
    // The first is full: the two equals take turns, a cluster's worth each.
    let types: Vec<_> =
        (0..128).map(|_| alloc(&space, TypeMask::ALL, 4).unwrap().ty().index()).collect();
    assert_eq!(types, [[1; 32], [2; 32], [1; 32], [2; 32]].concat());
    assert_eq!(alloc(&space, TypeMask::only(ty(2)), 0).unwrap().ty(), ty(2));
    assert_eq!(alloc(&space, TypeMask::only(ty(0)), 0), Err(AllocError::Full));
    assert_eq!(alloc(&space, TypeMask::NONE, 0), Err(AllocError::Disabled));
    assert_eq!(alloc(&space, TypeMask::ALL.without(ty(1)), 0).unwrap().ty(), ty(2));
    assert_eq!(
        space.used_of_capacity(TypeMask::only(ty(0)).with(ty(1))),
        (1024 + 1024, 1024 + 2048)
    );
    let entry = alloc(&space, TypeMask::only(ty(1)), 0).unwrap();
    assert_eq!(space.lookup(entry), SlotContent::Folio(FolioId(1)));
    assert_eq!(space.lookup(SwapEntry::new(ty(3), SwapOffset(0))), SlotContent::Bad);
    assert!(space.metadata_bytes() > 3 * 4096);

    assert!(matches!(space.take(ty(0)), Err(SpaceError::InUse(_, 1024))));
    let first = space.device(ty(0)).unwrap();
    first.set_allocation_enabled(false);
    first.drain().for_each(|(off, _)| _ = first.free(off, 1, Expect::Any).unwrap());
    assert_eq!(space.take(ty(0)).map(|d| d.used()).unwrap(), 0);
    assert!(matches!(space.take(ty(0)), Err(SpaceError::NoDevice(_))));
    assert_eq!(space.add(device(512), 3), Ok(ty(0)));
}

#[test]
fn a_fragmented_device_sends_the_folio_to_its_peer_not_down() {
    let space = SwapSpace::new();
    for (n, priority) in [(0, 5), (1, 5), (2, 1)] {
        space.add(SwapDevice::new(ty(n), 512, 1, Kind::Solid), priority).unwrap();
    }
    space.alloc_folio(TypeMask::only(ty(0)), CPU, order(0), FolioId(1), G).unwrap();
    let half = || space.alloc_folio(TypeMask::ALL, CPU, order(8), FolioId(1), G);
    assert_eq!((half().unwrap().ty(), half().unwrap().ty()), (ty(1), ty(1)));
    assert_eq!(
        half(),
        Err(AllocError::NoRun),
        "the first has 511 free slots, but not in a cluster of that order"
    );
    assert_eq!(space.device(ty(2)).unwrap().used(), 0);
    space.device(ty(0)).unwrap().set_limit(1);
    assert_eq!(half().unwrap().ty(), ty(2), "all of the higher priority are full");
}
