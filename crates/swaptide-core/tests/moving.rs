//! Slots that move: compaction, swapoff, and what only the swap cache holds.
#![cfg(not(loom))]

mod common;

use common::{CPU, G, order, ty};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use swaptide_core::*;

/// The user of each entry: pages by number, and what each slot should hold.
#[derive(Default)]
struct Users {
    pages: BTreeMap<u32, (SwapEntry, SlotInfo)>,
    at: BTreeMap<u32, u32>,
    refuse: BTreeSet<u32>,
    copied: u32,
    copies: bool,
}

impl Users {
    fn add(&mut self, page: u32, entry: SwapEntry, info: SlotInfo) {
        self.pages.insert(page, (entry, info));
        assert_eq!(self.at.insert(entry.raw(), page), None);
    }

    fn check(&self, space: &SwapSpace) {
        for (page, (entry, info)) in &self.pages {
            let found = space.info(*entry).unwrap();
            let count = space.device(entry.ty()).unwrap().count(entry.offset());
            assert_eq!(SlotInfo { count, ..found }, *info, "page {page} at {entry}");
        }
        assert_eq!(space.used_of_capacity(TypeMask::ALL).0, self.pages.len() as u64);
    }
}

impl Mover for Users {
    fn copy(&mut self, slots: &Move<'_>) -> bool {
        self.copied += slots.each().count() as u32;
        self.copies
    }

    fn switch(&mut self, slots: &Move<'_>) -> bool {
        if slots.each().any(|(from, ..)| self.refuse.contains(&self.at[&from.raw()])) {
            return false;
        }
        assert!(
            slots.slots.len().is_power_of_two()
                && slots.to.offset().0.is_multiple_of(slots.slots.len() as u32)
        );
        for (from, to, info) in slots.each() {
            let page = self.at.remove(&from.raw()).unwrap();
            assert_eq!(self.pages[&page], (from, info));
            self.pages.insert(page, (to, info));
            assert_eq!(self.at.insert(to.raw(), page), None, "{to} had a user");
        }
        true
    }
}

fn space(devices: &[(u8, u32, i32)]) -> SwapSpace {
    let space = SwapSpace::new();
    for &(n, slots, priority) in devices {
        space.add(SwapDevice::new(ty(n), slots, 1, Kind::Solid), priority).unwrap();
    }
    space
}

/// A run that went out: its slots hold shadows.
fn out(space: &SwapSpace, users: &mut Users, page: u32, o: u8) -> SwapEntry {
    let entry = space.alloc_folio(TypeMask::ALL, CPU, order(o), FolioId(page), G).unwrap();
    let device = space.device(entry.ty()).unwrap();
    device
        .folio_to_shadow(entry.offset(), 1 << o, FolioId(page), Shadow(page), ZeroMask::None)
        .unwrap();
    for i in 0..1 << o {
        let info = device.info(entry.offset().plus(i));
        users.add(page + i, entry.plus(i), info);
    }
    entry
}

fn gone(space: &SwapSpace, users: &mut Users, page: u32) {
    let (entry, _) = users.pages.remove(&page).unwrap();
    users.at.remove(&entry.raw());
    space.device(entry.ty()).unwrap().free(entry.offset(), 1, Expect::Shadow).unwrap();
}

#[test]
fn compaction_empties_sparse_clusters() {
    let (space, mut users) = (space(&[(0, 16 * 512, 0)]), Users::default());
    let device = space.device(ty(0)).unwrap();
    (0..4 * 512).for_each(|page| _ = out(&space, &mut users, page, 0));
    // Three quarters of each cluster go: all that is left fits one.
    (0..4 * 512).filter(|page| page % 4 != 0).for_each(|page| gone(&space, &mut users, page));
    assert!(
        device.usage().tables == 4 && device.worth_compacting(3) && !device.worth_compacting(4)
    );
    let done = device.compact(u32::MAX, false, &mut users);
    assert_eq!((done, device.usage().tables), (Compacted { moved: 3 * 128, emptied: 3 }, 1));
    users.check(&space);
    assert!(!device.worth_compacting(1));
    assert_eq!(device.compact(u32::MAX, true, &mut users), Compacted::default());
}

#[test]
fn compaction_keeps_runs_together_unless_told() {
    let (space, mut users) = (space(&[(0, 16 * 512, 0)]), Users::default());
    let device = space.device(ty(0)).unwrap();
    (0..64).for_each(|run| _ = out(&space, &mut users, run * 16, 4));
    assert_eq!(device.usage().tables, 2);
    // The second cluster keeps four whole runs, and single pages of the others. The first loses
    // whole runs and single pages.
    (36..64)
        .flat_map(|run| (1..16).map(move |i| run * 16 + i))
        .for_each(|page| gone(&space, &mut users, page));
    (0..2)
        .flat_map(|run| (0..16).map(move |i| run * 16 + i))
        .for_each(|page| gone(&space, &mut users, page));
    (2..20)
        .flat_map(|run| (0..8).map(move |i| run * 16 + i * 2))
        .for_each(|page| gone(&space, &mut users, page));
    let done = device.compact(u32::MAX, false, &mut users);
    assert_eq!((done.emptied, device.usage().tables), (0, 2), "there are two runs for four");
    let together = |users: &Users, run: u32| {
        let first = users.pages[&(run * 16)].0;
        first.offset().0.is_multiple_of(16)
            && (0..16).all(|i| users.pages[&(run * 16 + i)].0 == first.plus(i))
    };
    assert!((32..36).all(|run| together(&users, run)));
    users.check(&space);
    let done = device.compact(u32::MAX, true, &mut users);
    assert_eq!((done.emptied, device.usage().tables), (1, 1));
    assert_eq!(
        (32..36).filter(|run| together(&users, *run)).count(),
        2,
        "only those without a run are torn"
    );
    users.check(&space);
}

#[test]
fn compaction_keeps_slots_and_refusals() {
    let (space, mut users) = (space(&[(0, 8 * 512, 0)]), Users::default());
    let device = space.device(ty(0)).unwrap();
    (0..1024).for_each(|page| _ = out(&space, &mut users, page, 0));
    (0..1024)
        .filter(|page| *page >= 600 || page % 4 == 0)
        .for_each(|page| gone(&space, &mut users, page));
    let off = |users: &Users, page: u32| users.pages[&page].0.offset();
    // One page with a large count, one all zeros, one in the swap cache, in the cluster that will
    // be emptied.
    (0..700).for_each(|_| device.dup(off(&users, 599), 1).unwrap());
    device.set_zero(off(&users, 598), 1, ZeroMask::All).unwrap();
    device.shadow_to_folio(off(&users, 597), 1, FolioId(9), None).unwrap();
    for page in [597, 598, 599] {
        let at = off(&users, page);
        users.pages.get_mut(&page).unwrap().1 =
            SlotInfo { count: device.count(at), ..device.info(at) };
    }
    users.refuse = BTreeSet::from([590, 591]);
    let bytes = device.metadata_bytes();
    let done = device.compact(u32::MAX, false, &mut users);
    assert_eq!((done.emptied, done.moved), (0, users.at.len() as u32 - 384 - 2), "two stay");
    users.check(&space);
    assert_eq!(device.count(off(&users, 599)), 701);
    users.refuse.clear();
    assert_eq!(device.compact(u32::MAX, false, &mut users), Compacted { moved: 2, emptied: 1 });
    users.check(&space);
    (0..700).for_each(|_| assert_eq!(device.put(off(&users, 599), 1), Ok(0)));
    assert!(device.metadata_bytes() < bytes, "the overflow table went along and is gone");
}

#[test]
fn compaction_works_in_small_steps_on_a_full_device() {
    let (space, mut users) = (SwapSpace::new(), Users::default());
    space.add(SwapDevice::new(ty(0), 4096, 1, Kind::Solid).with_limit(1024), 0).unwrap();
    let device = space.device(ty(0)).unwrap();
    (0..64).for_each(|run| _ = out(&space, &mut users, run * 16, 4));
    (0..1024).filter(|page| page % 2 == 0).for_each(|page| gone(&space, &mut users, page));
    (2000..2512).for_each(|page| _ = out(&space, &mut users, page, 0));
    assert_eq!((device.used(), device.capacity(), device.usage().tables), (1024, 1024, 3));
    let mut steps = 0;
    while device.worth_compacting(1) {
        let done = device.compact(50, true, &mut users);
        assert!(done.moved > 0 && done.moved <= 50);
        users.check(&space);
        steps += 1;
    }
    assert_eq!((device.usage().tables, steps > 3), (2, true));
}

#[test]
fn swapoff_moves_everything_by_priority() {
    let (mut space, mut users) = (
        space(&[(0, 2048, 9), (1, 1024, 5), (2, 4096, 1)]),
        Users { copies: true, ..Users::default() },
    );
    for run in 0..32 {
        out(&space, &mut users, run * 16, 4);
    }
    (1000..1900).for_each(|page| _ = out(&space, &mut users, page, 0));
    let first = space.device(ty(0)).unwrap();
    // A folio of 16 pages, of which two were freed, in the swap cache, and a count too large for
    // its word.
    let folio = space.alloc_folio(TypeMask::ALL, CPU, order(4), FolioId(7), GroupId(2)).unwrap();
    first.free(folio.offset().plus(3), 2, Expect::Folio(FolioId(7))).unwrap();
    (0..300).for_each(|_| first.dup(folio.offset(), 1).unwrap());
    for i in (0..16).filter(|i| !(3..5).contains(i)) {
        let at = folio.offset().plus(i);
        users.add(5000 + i, folio.plus(i), SlotInfo { count: first.count(at), ..first.info(at) });
    }
    let used = first.used();
    assert_eq!(used, 512 + 900 + 14);
    assert_eq!(space.swapoff(ty(0), TypeMask::ALL, &mut users), Ok(used));
    users.check(&space);
    assert_eq!(users.copied, used);
    let (second, third) =
        (space.device(ty(1)).unwrap().used(), space.device(ty(2)).unwrap().used());
    assert!(second > 1000 && second + third == used, "{second} and {third}: the better one first");
    let now = users.pages[&5000].0;
    assert!(
        (0..16).filter(|i| !(3..5).contains(i)).all(|i| users.pages[&(5000 + i)].0 == now.plus(i)),
        "a folio stays together"
    );
    assert!((0..32).all(|run| {
        (0..16).all(|i| users.pages[&(run * 16 + i)].0 == users.pages[&(run * 16)].0.plus(i))
    }));
    let device = space.take(ty(0)).unwrap();
    assert_eq!((device.used(), device.usage().tables), (0, 0));
    assert_eq!(space.swapoff(ty(0), TypeMask::ALL, &mut users), Err(SpaceError::NoDevice(ty(0))));
}

#[test]
fn swapoff_fails_cleanly() {
    let (space, mut users) =
        (space(&[(0, 2048, 9), (1, 1024, 5)]), Users { copies: true, ..Users::default() });
    (0..1100).for_each(|page| _ = out(&space, &mut users, page, 0));
    let device = space.device(ty(0)).unwrap();
    assert_eq!(
        space.swapoff(ty(0), TypeMask::ALL, &mut users),
        Err(SpaceError::NoRoom(ty(0), 1100))
    );
    assert!(users.copied == 0 && device.allocation_enabled(), "nothing was touched");
    assert_eq!(
        space.swapoff(ty(0), TypeMask::only(ty(0)), &mut users),
        Err(SpaceError::NoRoom(ty(0), 1100))
    );
    (0..500).for_each(|page| gone(&space, &mut users, page));
    // An owner that cannot change one page: the rest is moved, the device is open again, and says
    // what is left.
    users.refuse.insert(777);
    let refused = space.swapoff(ty(0), TypeMask::ALL, &mut users).unwrap_err();
    assert_eq!(refused, SpaceError::Refused(ty(0), 1));
    assert!(refused.to_string().contains("try again") && device.allocation_enabled());
    users.check(&space);
    users.copies = false;
    users.refuse.clear();
    assert_eq!(
        space.swapoff(ty(0), TypeMask::ALL, &mut users),
        Err(SpaceError::Refused(ty(0), 1)),
        "not copied"
    );
    users.check(&space);
    // Room enough, but torn: a cached folio must not be.
    let other = space.device(ty(1)).unwrap();
    let entry = space.alloc_folio(TypeMask::only(ty(0)), CPU, order(5), FolioId(4), G).unwrap();
    (0..32).for_each(|i| users.add(9000 + i, entry.plus(i), device.info(entry.offset().plus(i))));
    while other.capacity() - other.used() > 33 {
        let page = 10_000 + other.used();
        let entry =
            space.alloc_folio(TypeMask::only(ty(1)), CPU, order(0), FolioId(page), G).unwrap();
        users.add(page, entry, other.info(entry.offset()));
    }
    let scattered: Vec<u32> = users
        .pages
        .iter()
        .filter(|(_, (e, i))| e.ty() == ty(1) && matches!(i.slot, SlotContent::Shadow { .. }))
        .map(|(p, _)| *p)
        .collect();
    scattered.iter().step_by(20).take(10).for_each(|page| gone(&space, &mut users, *page));
    (0..10).for_each(|i| {
        let page = 20_000 + i;
        let entry =
            space.alloc_folio(TypeMask::only(ty(1)), CPU, order(0), FolioId(page), G).unwrap();
        users.add(page, entry, other.info(entry.offset()));
    });
    users.copies = true;
    let outcome = space.swapoff(ty(0), TypeMask::ALL, &mut users);
    users.check(&space);
    match outcome {
        Err(SpaceError::NoRoom(_, left)) => assert!(left >= 32 && device.allocation_enabled()),
        Ok(moved) => assert_eq!(moved, 33),
        other => panic!("{other:?}"),
    }
}

/// A device whose owner gives up folios; what was asked is noted.
fn reclaiming(slots: u32, kind: Kind) -> (SwapDevice, Arc<Mutex<Vec<u32>>>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let to = asked.clone();
    let hook: CacheReclaim = Box::new(move |device, off, folio| {
        to.lock().unwrap().push(folio.0);
        device.folio_release(off, 1, folio).unwrap_or(0)
    });
    (SwapDevice::new(ty(0), slots, 1, kind).with_cache_reclaim(hook), asked)
}

#[test]
fn cache_only_slots_reclaimed_when_full() {
    let (d, asked) = reclaiming(2048, Kind::Solid);
    let alloc = |o: u8, folio| d.alloc_folio(CPU, order(o), FolioId(folio), G);
    let runs: Vec<_> = (0..60).map(|i| alloc(4, i * 16).unwrap()).collect();
    for (off, folio) in runs.iter().zip((0..).step_by(16)) {
        // Each page a folio of its own, not mapped.
        (0..16).for_each(|i| {
            d.replace_folio(off.plus(i), 1, FolioId(folio), FolioId(folio + i)).unwrap()
        });
        d.put(*off, 16).unwrap();
    }
    (0..1024).for_each(|i| _ = alloc(0, 10_000 + i).unwrap());
    assert_eq!(
        (d.used(), asked.lock().unwrap().len()),
        (60 * 16 + 1024, 0),
        "the hook is not called while there is room"
    );
    // A full cluster is asked for when there is no empty one and more than half is used.
    (0..4).for_each(|i| _ = alloc(4, 20_000 + i).unwrap());
    let off = alloc(4, 20_100).unwrap();
    let n = asked.lock().unwrap().len();
    assert!(n > 0 && n <= 1024, "{n} asked");
    assert_eq!(d.lookup(off), SlotContent::Folio(FolioId(20_100)));
    // The rest in the background, cluster by cluster.
    let before = d.used();
    let freed = d.reclaim_cached(u32::MAX);
    assert_eq!(before - d.used(), freed);
    assert_eq!((d.reclaim_cached(u32::MAX), d.used()), (0, 1024 + 5 * 16));
}

#[test]
fn a_scan_takes_a_run_that_only_the_cache_holds() {
    let (d, asked) = reclaiming(512, Kind::Solid);
    let runs: Vec<_> =
        (0..31).map(|i| d.alloc_folio(CPU, order(4), FolioId(i), G).unwrap()).collect();
    // One run is half free and half cache; every other run has users.
    let run = runs[7];
    d.free(run, 8, Expect::Any).unwrap();
    for i in 8..16 {
        d.replace_folio(run.plus(i), 1, FolioId(7), FolioId(100 + i)).unwrap();
        d.put(run.plus(i), 1).unwrap();
    }
    d.alloc_folio(CPU, order(4), FolioId(200), G).unwrap();
    d.free(runs[9], 8, Expect::Any).unwrap();
    let n = asked.lock().unwrap().len();
    assert_eq!(d.alloc_folio(CPU, order(4), FolioId(202), G), Ok(run), "asked {n}");
    assert!((8..16).all(|i| asked.lock().unwrap().contains(&(100 + i))));
}

#[test]
fn a_cluster_that_empties_by_reclaim_serves_at_once() {
    let (d, _) = reclaiming(1024, Kind::Solid);
    // Two clusters: one full of cached pages that are not mapped, one three quarters full of
    // others.
    let cached: Vec<_> =
        (0..512).map(|i| d.alloc_folio(CPU, order(0), FolioId(i), G).unwrap()).collect();
    let others: Vec<_> =
        (0..384).map(|i| d.alloc_folio(CPU, order(0), FolioId(1000 + i), G).unwrap()).collect();
    cached.iter().for_each(|off| _ = d.put(*off, 1).unwrap());
    others[..64].iter().for_each(|off| _ = d.free(*off, 1, Expect::Any).unwrap());
    let off = d.alloc_folio(CPU, order(7), FolioId(5000), G).unwrap();
    assert_eq!(
        (off.cluster(), d.used()),
        (cached[0].cluster(), 320 + 128),
        "the whole cluster was won"
    );
}

#[test]
fn a_full_device_asks_before_it_fails() {
    for kind in [Kind::Solid, Kind::Rotational] {
        let (d, asked) = reclaiming(1024, kind);
        let offs: Vec<_> =
            (0..1024).map(|i| d.alloc_folio(CPU, order(0), FolioId(i), G).unwrap()).collect();
        assert_eq!(d.alloc_folio(CPU, order(0), FolioId(5000), G), Err(AllocError::Full));
        d.put(offs[600], 1).unwrap();
        assert_eq!(d.alloc_folio(CPU, order(0), FolioId(5000), G), Ok(offs[600]));
        assert_eq!((*asked.lock().unwrap()).as_slice(), [600]);
    }
}

#[test]
fn a_rotational_device_is_written_in_one_direction() {
    let d = SwapDevice::new(ty(1), 8192, 4, Kind::Rotational);
    let mut random = 1u32;
    let mut alloc = |d: &SwapDevice, i: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let o = [0, 0, 4, 2][(random >> 20) as usize % 4];
        (d.alloc_folio(CpuId(i as u16 % 4), order(o), FolioId(i), G).unwrap(), 1u32 << o)
    };
    let first: Vec<_> = (0..1000).map(|i| alloc(&d, i)).collect();
    assert!(
        first.windows(2).all(|w| w[1].0.0 >= w[0].0.0 + w[0].1),
        "all orders and CPUs follow one cursor"
    );
    assert!(
        first.windows(2).all(|w| w[1].0.0 - w[0].0.0 - w[0].1 < 16),
        "and leave no more than alignment asks for"
    );
    // Holes behind the cursor are left until it comes round.
    first.iter().step_by(2).for_each(|&(off, n)| _ = d.free(off, n, Expect::Any).unwrap());
    let end = first.last().unwrap().0;
    let mut last = end;
    while let (off, _) = alloc(&d, 1)
        && off > last
    {
        last = off;
    }
    assert!(last.0 > 8192 - 32, "to the end of the device, {last}, before it turns");
    // To the last slot, wherever it is.
    while d.alloc_folio(CPU, order(0), FolioId(1), G).is_ok() {}
    assert_eq!(d.used(), d.capacity());
}

#[test]
fn emptied_neighbours_are_discarded_in_one_go() {
    let d = SwapDevice::new(ty(0), 5000, 1, Kind::Solid).with_discard(true);
    let mut offs: Vec<_> =
        (0..9).map(|i| d.alloc_folio(CPU, order(9), FolioId(i), G).unwrap()).collect();
    offs.sort_unstable();
    for i in [4, 1, 8, 2, 0] {
        d.free(offs[i], 512, Expect::Any).unwrap();
    }
    assert_eq!(d.discards_waiting(), 5);
    let mut calls = Vec::new();
    assert_eq!(d.discard_batch(4, |off, n| calls.push((off.0, n))), 4);
    assert_eq!(calls, [(512, 1024), (2048, 512), (4096, 512)]);
    calls.clear();
    assert_eq!((d.discard_batch(9, |off, n| calls.push((off.0, n))), d.discards_waiting()), (1, 0));
    assert_eq!((calls.as_slice(), d.usage().clusters_free), ([(0, 512)].as_slice(), 5));
}

#[test]
fn the_seed_s_order_takes_empty_clusters_first() {
    for (search, same) in [(SearchOrder::NonfullFirst, true), (SearchOrder::FreeFirst, false)] {
        let d = SwapDevice::new(ty(0), 4096, 2, Kind::Solid).with_search_order(search);
        let off = d.alloc_folio(CPU, order(4), FolioId(1), G).unwrap();
        let last =
            (0..31).map(|_| d.alloc_folio(CPU, order(4), FolioId(1), G).unwrap()).last().unwrap();
        assert_eq!(off.cluster(), last.cluster());
        d.free(off, 16, Expect::Any).unwrap();
        let next = d.alloc_folio(CpuId(1), order(4), FolioId(2), G).unwrap();
        assert_eq!(next.cluster() == off.cluster(), same, "{search:?}");
    }
}
