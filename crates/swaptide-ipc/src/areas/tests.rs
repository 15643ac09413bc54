use super::*;
use crate::layout::test_segment;

fn area(extents: u32, priority: i32) -> NewArea {
    NewArea::of_file(priority, extents)
}

fn all(segment: &Segment, index: SlotIndex, mask: AreaMask) -> Vec<AreaId> {
    let leased = std::iter::from_fn(|| segment.lease_extent(index, mask));
    leased.map(|extent| segment.place_of(extent).expect("a place").area).collect()
}

#[test]
fn the_higher_priority_goes_first_and_equals_take_turns() {
    let segment = test_segment();
    let holder = segment.claim(10, 0).expect("slot");
    let low = segment.add_area(area(2, -1)).expect("area");
    let one = segment.add_area(area(3, 5)).expect("area");
    let other = segment.add_area(area(3, 5)).expect("area");
    let high = segment.add_area(area(1, 100)).expect("area");
    assert_eq!(segment.extents(), 9);
    let order = all(segment, holder, AreaMask::ALL);
    assert_eq!(order[0], high);
    assert!(
        order[1..7].chunks(2).all(|pair| pair.contains(&one) && pair.contains(&other)),
        "{order:?}"
    );
    assert_eq!(order[7..], [low, low]);
    assert_eq!(segment.extents_used(), 9);
}

#[test]
fn areas_outside_mask_are_not_used() {
    let segment = test_segment();
    let holder = segment.claim(10, 0).expect("slot");
    let first = segment.add_area(area(2, 5)).expect("area");
    let second = segment.add_area(area(2, 1)).expect("area");
    assert_eq!(all(segment, holder, AreaMask(1 << second.0)), [second, second]);
    assert_eq!(segment.area(first).used(), 0);
    assert_eq!(segment.lease_extent(holder, AreaMask(0)), None);
}

#[test]
fn extents_lie_in_their_area_and_never_next_to_another_areas() {
    let segment = test_segment();
    let holder = segment.claim(10, 0).expect("slot");
    let first = segment.add_area(area(2, 5)).expect("area");
    let second =
        segment.add_area(NewArea { base_bytes: EXTENT_BYTES, ..area(2, 1) }).expect("area");
    let leased: Vec<_> =
        std::iter::from_fn(|| segment.lease_extent(holder, AreaMask::ALL)).collect();
    assert_eq!(leased, [0, 1, 3, 4].map(ExtentId));
    let places: Vec<_> =
        leased.iter().map(|extent| segment.place_of(*extent).expect("place")).collect();
    assert_eq!(
        places.iter().map(|place| place.area).collect::<Vec<_>>(),
        [first, first, second, second]
    );
    assert_eq!(
        places.iter().map(|place| place.offset).collect::<Vec<_>>(),
        [0, 1, 1, 2].map(|n| n * EXTENT_BYTES)
    );
    assert_eq!(segment.place_of(ExtentId(2)), None);
}

#[test]
fn removed_area_number_gets_new_generation() {
    let segment = test_segment();
    let holder = segment.claim(10, 0).expect("slot");
    let id = segment.add_area(area(4, 5)).expect("area");
    let (generation, epoch) = (segment.area(id).generation(), segment.areas_epoch());
    let extent = segment.lease_extent(holder, AreaMask::ALL).expect("extent");
    assert!(!segment.remove_area(id), "it is open");
    segment.close_area(id);
    assert_ne!(segment.areas_epoch(), epoch);
    assert!(!segment.has_area());
    assert_eq!(segment.lease_extent(holder, AreaMask::ALL), None);
    assert!(segment.place_of(extent).is_some(), "what is held can still be read");
    assert!(!segment.remove_area(id), "it is held");
    assert!(segment.release_extent(holder, extent));
    assert!(segment.remove_area(id));
    assert_eq!(segment.place_of(extent), None);
    assert_eq!(segment.add_area(area(9, 1)), Some(id));
    assert_eq!(segment.area(id).generation(), generation + 1);
}

#[test]
fn extents_in_doubt_are_not_leased_until_cleared() {
    let segment = test_segment();
    let holder = segment.claim(10, 0).expect("slot");
    let id = segment.add_area(area(2, 5)).expect("area");
    let lease = |index| segment.lease_extent(index, AreaMask::ALL);
    let (one, two) = (lease(holder).expect("extent"), lease(holder).expect("extent"));
    // Answered while it is held.
    assert!(segment.doubt_extent(one) && segment.is_in_doubt(one) && segment.sole_holder(one));
    segment.clear_doubt(one);
    assert!(!segment.is_in_doubt(one) && segment.sole_holder(one));
    // Given back before the answer; it comes later.
    assert!(segment.doubt_extent(one));
    assert!(!segment.doubt_extent(one), "the answer to a second write does not settle the first");
    assert!(segment.release_extent(holder, one));
    assert_eq!((lease(holder), segment.area(id).used()), (None, 1));
    assert!(!segment.while_unheld(one, || panic!("it is not to be trimmed")));
    assert!(!segment.retake_extent(holder, one));
    assert_eq!(segment.extents_in_doubt(id).collect::<Vec<_>>(), [one]);
    segment.clear_doubt(one);
    assert_eq!(lease(holder), Some(one));
    // Killed in the middle of a write.
    assert!(segment.doubt_extent(two));
    let mut freed = Vec::new();
    segment.release(holder, |extent| freed.push(extent));
    assert_eq!(freed, [one, two]);
    let other = segment.claim(11, 0).expect("slot");
    assert_eq!((lease(other), lease(other)), (Some(one), None));
    // Shared since a fork, and the one that wrote is gone.
    let child = segment.claim(12, 11).expect("slot");
    segment.doubt_extent(one);
    segment.share_extent(child, one);
    assert!(!segment.release_extent(other, one) && segment.sole_holder(one));
    assert!(segment.release_extent(child, one));
    assert_eq!(segment.extents_in_doubt(id).collect::<Vec<_>>(), [one, two]);
    segment.clear_stale_doubt(two);
    assert_eq!((lease(other), lease(other)), (Some(two), None));
    segment.release_extent(other, two);
    // Another device has no doubts.
    segment.close_area(id);
    assert!(segment.remove_area(id));
    let id = segment.add_area(area(2, 5)).expect("area");
    assert_eq!((segment.extents_in_doubt(id).count(), segment.area(id).free()), (0, 2));
    assert!(lease(other).is_some() && lease(other).is_some());
}

#[test]
fn a_count_of_holders_leaves_doubts_as_they_are() {
    let segment = test_segment();
    let holder = segment.claim(10, 0).expect("slot");
    let id = segment.add_area(area(2, 5)).expect("area");
    let extent = segment.lease_charged(holder).expect("extent");
    segment.doubt_extent(extent);
    assert!(segment.audit(|_| panic!("nothing is missing")));
    assert!(segment.is_in_doubt(extent) && segment.sole_holder(extent));
    // A process died that was about to hold it too.
    segment.extent_refs[extent.0 as usize].fetch_add(1, SeqCst);
    assert!(segment.audit(|_| panic!("it is held")));
    assert!(segment.is_in_doubt(extent) && segment.sole_holder(extent));
    segment.release_charged(holder, holder, extent);
    segment.extent_refs[extent.0 as usize].fetch_add(1, SeqCst);
    let mut freed = Vec::new();
    assert!(segment.audit(|extent| freed.push(extent)));
    assert_eq!(
        (freed, segment.extents_in_doubt(id).collect::<Vec<_>>()),
        (vec![extent], vec![extent])
    );
}

#[test]
fn a_mirror_adds_no_extents_and_is_removed_with_its_area() {
    let segment = test_segment();
    let holder = segment.claim(10, 0).expect("slot");
    let mirror = segment.add_mirror(5, EXTENT_BYTES).expect("a mirror");
    let id = segment.add_area(NewArea { mirror: Some(mirror), ..area(2, 5) }).expect("area");
    let other = segment.add_area(area(2, 1)).expect("area");
    assert_eq!((segment.extents(), segment.area(mirror).state()), (4, AreaState::Mirror));
    let leased: Vec<_> =
        std::iter::from_fn(|| segment.lease_extent(holder, AreaMask::ALL)).collect();
    let places: Vec<_> =
        leased.iter().map(|extent| segment.place_of(*extent).expect("place")).collect();
    assert_eq!(places.iter().map(|place| place.area).collect::<Vec<_>>(), [id, id, other, other]);
    let copies: Vec<_> =
        places.iter().map(|place| place.mirror.map(|spot| (spot.area, spot.offset))).collect();
    assert_eq!(
        copies,
        [Some((mirror, EXTENT_BYTES)), Some((mirror, 2 * EXTENT_BYTES)), None, None]
    );
    segment.close_area(id);
    for extent in leased {
        segment.release_extent(holder, extent);
    }
    assert!(segment.remove_area(id));
    assert_eq!(segment.area(mirror).state(), AreaState::None);
}

#[test]
fn a_closed_area_can_be_opened_again() {
    let segment = test_segment();
    let holder = segment.claim(10, 0).expect("slot");
    let id = segment.add_area(area(4, 5)).expect("area");
    segment.close_area(id);
    segment.reopen_area(id);
    assert_eq!(all(segment, holder, AreaMask::ALL).len(), 4);
}

#[test]
fn numbers_are_found_between_others_and_end() {
    let segment = test_segment();
    let ids: Vec<_> = (0..3).map(|_| segment.add_area(area(10, 0)).expect("area")).collect();
    segment.close_area(ids[1]);
    assert!(segment.remove_area(ids[1]));
    assert_eq!(
        segment.add_area(area(11, 0)).map(|id| segment.area(id).range().start),
        Some(33),
        "too large for the gap"
    );
    segment.close_area(ids[1]);
    assert!(segment.remove_area(ids[1]));
    assert_eq!(segment.add_area(area(10, 0)).map(|id| segment.area(id).range().start), Some(11));
    assert_eq!(segment.add_area(area(MAX_EXTENTS as u32, 0)), None);
    for _ in 3..MAX_AREAS {
        segment.add_area(area(1, 0)).expect("area");
    }
    assert_eq!(segment.add_area(area(1, 0)), None);
}

#[test]
fn leasing_races_with_closing_and_no_extent_is_left_behind() {
    let segment = test_segment();
    let id = segment.add_area(area(64, 0)).expect("area");
    for round in 0..200 {
        segment.reopen_area(id);
        std::thread::scope(|scope| {
            for pid in 0..3 {
                scope.spawn(move || {
                    let index = segment.claim(100 + pid, 0).expect("slot");
                    while let Some(extent) = segment.lease_extent(index, AreaMask::ALL) {
                        segment.release_extent(index, extent);
                    }
                });
            }
            if round % 2 == 0 {
                std::thread::yield_now();
            }
            segment.close_area(id);
        });
        assert_eq!(segment.area(id).used(), 0);
    }
}

#[test]
fn leasing_races_with_an_area_that_goes_and_comes_elsewhere() {
    let segment = test_segment();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for pid in 0..2 {
            let stop = &stop;
            scope.spawn(move || {
                let index = segment.claim(100 + pid, 0).expect("slot");
                while !stop.load(Relaxed) {
                    if let Some(extent) = segment.lease_extent(index, AreaMask::ALL) {
                        assert!(
                            segment.place_of(extent).is_some(),
                            "extent {} is no area's",
                            extent.0
                        );
                        segment.release_extent(index, extent);
                    }
                }
            });
        }
        for round in 0..2000u32 {
            // Places of different length, so that the same area's number stands for other extents
            // each time.
            let id = segment.add_area(area(1 + round % 7, 0)).expect("area");
            let second = segment.add_area(area(3, 0)).expect("area");
            for id in [id, second] {
                segment.close_area(id);
                while !segment.remove_area(id) {
                    std::thread::yield_now();
                }
            }
        }
        stop.store(true, Relaxed);
    });
    let used: Vec<_> = segment.header.areas.slots.iter().map(Area::used).collect();
    assert_eq!(used, [0; MAX_AREAS]);
    assert!(segment.extent_refs.iter().all(|refs| refs.load(Relaxed) == 0));
}

#[test]
fn an_extent_is_free_only_when_its_last_holder_let_go() {
    let segment = test_segment();
    segment.add_area(area(100, 0)).expect("area");
    let parent = segment.claim(10, 0).expect("slot");
    let child = segment.claim(11, 10).expect("slot");
    let extent = segment.lease_extent(parent, AreaMask::ALL).expect("extent");
    segment.share_extent(child, extent);
    assert!(!segment.sole_holder(extent));
    assert!(!segment.release_extent(parent, extent));
    assert!(!segment.release_extent(parent, extent), "a second release does nothing");
    assert!(segment.sole_holder(extent));
    let mut freed = Vec::new();
    segment.release(child, |x| freed.push(x));
    assert_eq!(freed, [extent]);
    assert_eq!(segment.extents_used(), 0);
}

#[test]
fn full_area_leases_only_released_extents() {
    let segment = test_segment();
    segment.add_area(area(100, 0)).expect("area");
    let holder = segment.claim(10, 0).expect("slot");
    let mut all: Vec<_> =
        std::iter::from_fn(|| segment.lease_extent(holder, AreaMask::ALL)).collect();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 100);
    assert!(segment.release_extent(holder, all[42]));
    assert_eq!(segment.lease_extent(holder, AreaMask::ALL), Some(all[42]));
}

#[test]
fn only_extents_without_holders_are_punched() {
    let segment = test_segment();
    segment.add_area(area(100, 0)).expect("area");
    let holder = segment.claim(10, 0).expect("slot");
    let extent = segment.lease_extent(holder, AreaMask::ALL).expect("extent");
    assert!(!segment.while_unheld(extent, || panic!("it is held")));
    assert!(segment.release_extent(holder, extent));
    let mut others = Vec::new();
    assert!(segment.while_unheld(extent, || {
        others.extend(std::iter::from_fn(|| segment.lease_extent(holder, AreaMask::ALL)))
    }));
    assert_eq!(others.len(), 99);
    assert!(!others.contains(&extent));
    assert_eq!(segment.lease_extent(holder, AreaMask::ALL), Some(extent));
}
