//! The policy without processes: cases, and random trees.

use super::testing::{MIB, process};
use super::*;
use proptest::prelude::*;

const TICK: Duration = Duration::from_millis(5);

fn limits(shares: &[Bounds], group: &[Process], elapsed: Duration) -> Vec<u64> {
    let least = floors(shares, group);
    approach(shares, group, &least, &targets(shares, group, &least), elapsed)
}

/// A share of engaged processes without groups.
fn whole(share: u64) -> [Bounds; 1] {
    [Bounds::budget(share)]
}

#[test]
fn a_tree_within_its_budget_is_left_alone() {
    let tree = [process(Standing::Watching, 200, 0, 0), process(Standing::Unmanaged, 150, 0, 0)];
    assert_eq!(decide(&whole(512 * MIB), &tree, TICK), Decision::default());
}

#[test]
fn a_process_that_asks_is_engaged_whatever_is_free() {
    let tree = [process(Standing::Asking, 0, 0, 0), process(Standing::Watching, 8, 0, 0)];
    let decision = decide(&whole(512 * MIB), &tree, TICK);
    assert_eq!(decision.engage, [0]);
    assert!(decision.limits[0].1 > 400 * MIB, "{:?}", decision.limits);
}

#[test]
fn the_biggest_is_engaged_and_gets_what_the_others_leave() {
    let tree = [
        process(Standing::Watching, 2, 0, 0),
        process(Standing::Watching, 440, 0, 0),
        process(Standing::Unmanaged, 10, 0, 0),
    ];
    let decision = decide(&whole(512 * MIB), &tree, TICK);
    assert_eq!(decision.engage, [1]);
    let share = 512 * MIB - 512 * MIB / 100 - 12 * MIB;
    assert_eq!(decision.limits.len(), 1);
    assert_eq!(decision.limits[0].0, 1);
    assert!(decision.limits[0].1.abs_diff(share) <= 16, "{} of {share}", decision.limits[0].1);
}

#[test]
fn as_many_are_engaged_as_cover_four_fifths() {
    let tree = [
        process(Standing::Watching, 100, 0, 0),
        process(Standing::Watching, 130, 0, 0),
        process(Standing::Watching, 120, 0, 0),
        process(Standing::Watching, 20, 0, 0),
    ];
    assert_eq!(decide(&whole(400 * MIB), &tree, TICK).engage, [1, 2, 0]);
}

#[test]
fn a_process_bigger_than_engaged_ones_does_not_stay_unmanaged() {
    let mut tree = vec![process(Standing::Engaged, 6, 50, 0); 60];
    tree.push(process(Standing::Watching, 5, 0, 0));
    assert!(decide(&whole(384 * MIB), &tree, TICK).engage.is_empty(), "it has no more than they");
    tree[60].used = 12 * MIB;
    assert_eq!(decide(&whole(384 * MIB), &tree, TICK).engage, [60]);
}

#[test]
fn a_small_process_is_engaged_before_it_outgrows_the_budget() {
    let mut tree = [process(Standing::Engaged, 100, 0, 120), process(Standing::Watching, 2, 0, 0)];
    assert!(decide(&whole(128 * MIB), &tree, TICK).engage.is_empty(), "it does not grow");
    tree[1].growth = 500 * MIB;
    assert!(decide(&whole(128 * MIB), &tree, TICK).engage.is_empty(), "there is room for it");
    tree[0].used = 120 * MIB;
    assert_eq!(decide(&whole(128 * MIB), &tree, TICK).engage, [1]);
    assert_eq!(interval(&whole(128 * MIB), &tree), Duration::from_millis(1));
}

#[test]
fn a_process_is_engaged_under_the_trigger_where_it_would_be_past_the_budget_by_then() {
    let mut tree = [process(Standing::Watching, 60, 0, 0)];
    tree[0].growth = 2000 * MIB;
    assert!(decide(&whole(128 * MIB), &tree, TICK).engage.is_empty(), "40M in the time it takes");
    tree[0].growth = 4000 * MIB;
    assert_eq!(decide(&whole(128 * MIB), &tree, TICK).engage, [0]);
    assert!(!is_near(&whole(128 * MIB), &tree));
    assert!(decide(&whole(u64::MAX), &tree, TICK).engage.is_empty(), "without a budget");
}

#[test]
fn what_grows_and_is_not_managed_is_looked_at_often() {
    let mut tree = [process(Standing::Engaged, 120, 0, 120), process(Standing::Unmanaged, 1, 0, 0)];
    assert_eq!(interval(&whole(128 * MIB), &tree), Duration::from_millis(5));
    tree[1].growth = MIB;
    assert_eq!(interval(&whole(128 * MIB), &tree), Duration::from_millis(5), "it grows slowly");
    tree[1].growth = 500 * MIB;
    assert_eq!(interval(&whole(128 * MIB), &tree), Duration::from_millis(1));
    assert!(is_near(&whole(128 * MIB), &tree));
}

#[test]
fn small_processes_are_engaged_only_in_need() {
    let mut tree = vec![process(Standing::Watching, 2, 0, 0); 60];
    assert!(
        decide(&whole(128 * MIB), &tree, TICK).engage.is_empty(),
        "120M of 128M in pieces of 2M"
    );
    tree.extend([process(Standing::Watching, 2, 0, 0); 10]);
    assert!(decide(&whole(128 * MIB), &tree, TICK).engage.len() >= 50, "over the budget");
}

/// Processes that only differ in how fast they run come to like shares: none has more demand than
/// what is swapped out of it.
#[test]
fn a_fast_process_gets_no_more() {
    let mut group: Vec<Process> =
        (0..8).map(|at| process(Standing::Engaged, 4 + at, 100 << at, 4 + at)).collect();
    let whole_of = 24 * MIB;
    for _ in 0..400 {
        for p in &mut group {
            p.swapped = whole_of - p.used;
        }
        let given = limits(&whole(80 * MIB), &group, TICK);
        for (p, limit) in group.iter_mut().zip(given) {
            (p.limit, p.used) = (limit, limit);
        }
    }
    let (least, most) = (
        group.iter().map(|p| p.limit).min().unwrap(),
        group.iter().map(|p| p.limit).max().unwrap(),
    );
    assert!(least > 9 * MIB && most < 11 * MIB, "{group:?}");
}

/// In a crowd each process keeps what cannot be swapped out of it, and something to work with; also
/// one that has come to nothing so far, and has little swapped out for it.
#[test]
fn among_many_processes_none_gets_less_than_it_can_use() {
    let mut group = vec![Process { fixed: 3 * MIB, ..process(Standing::Engaged, 10, 500, 10) }; 32];
    let stuck = Process { fixed: 3 * MIB, swapped: MIB, ..process(Standing::Engaged, 3, 1, 3) };
    group.extend(vec![stuck; 32]);
    for _ in 0..400 {
        let given = limits(&whole(380 * MIB), &group, TICK);
        for (p, limit) in group.iter_mut().zip(given) {
            // An engine keeps some room.
            (p.limit, p.used) = (limit, limit - ENGINE_ROOM_BYTES);
        }
    }
    assert!(group.iter().all(|p| p.limit >= 3 * MIB + CROWDED_FLOOR_BYTES), "{group:?}");
    // Where that is more than there is, they have less: the budget is held.
    let given = limits(&whole(240 * MIB), &group, YIELD_TIME);
    assert!(
        given.iter().sum::<u64>() <= 241 * MIB && given.iter().all(|limit| *limit > 3 * MIB),
        "{given:?}"
    );
    // And also where what cannot be swapped out is more than there is.
    let given = limits(&whole(160 * MIB), &group, YIELD_TIME);
    assert!(
        given.iter().sum::<u64>() <= 161 * MIB && given.iter().all(|limit| *limit > 2 * MIB),
        "{given:?}"
    );
}

#[test]
fn pressure_wins_memory_from_idle_processes_and_no_byte_twice() {
    let mut group =
        [process(Standing::Engaged, 400, 0, 400), process(Standing::Engaged, 100, 0, 100)];
    let share = 500 * MIB;
    for tick in 0..2000 {
        group[1].pressure = 800 * MIB;
        let given = limits(&whole(share), &group, TICK);
        for (p, limit) in group.iter_mut().zip(given) {
            p.limit = limit;
            // A process that may use more, and has pressure, does; one over its limit shrinks at
            // once.
            p.used = if p.pressure > 0 { limit } else { p.used.min(limit) };
        }
        assert!(group.iter().map(|p| p.used).sum::<u64>() <= share);
        assert!(
            tick > 10 || group[0].limit > 300 * MIB,
            "a process that rests for 50 ms keeps its memory"
        );
    }
    assert!(group[1].limit > 480 * MIB, "{}", group[1].limit / MIB);
    assert!(group[0].limit >= FLOOR_BYTES, "{}", group[0].limit);
}

#[test]
fn a_process_that_fits_keeps_what_it_works_on_next_to_one_that_does_not() {
    let thrashes = process(Standing::Engaged, 40, 400, 40);
    let mut group = [
        Process { workingset: 4096 * MIB, ..thrashes },
        Process { swapped: 6 * MIB, workingset: 20 * MIB, ..process(Standing::Engaged, 14, 6, 14) },
    ];
    for _ in 0..40 {
        let given = limits(&whole(64 * MIB), &group, YIELD_TIME);
        for (p, limit) in group.iter_mut().zip(given) {
            (p.limit, p.used) = (limit, limit);
        }
        group[1].used = group[1].used.min(20 * MIB);
        (group[1].swapped, group[1].pressure) = (20 * MIB - group[1].used, 0);
    }
    assert!(group[1].used >= 19 * MIB, "{}", group[1].used / MIB);
    assert!(group[0].limit >= 42 * MIB, "{}", group[0].limit / MIB);
}

#[test]
fn a_smaller_share_lowers_limits_at_once_when_exceeded() {
    let group = [process(Standing::Engaged, 300, 0, 300), process(Standing::Engaged, 100, 0, 100)];
    let given = limits(&whole(200 * MIB), &group, TICK);
    assert!(given.iter().sum::<u64>() <= 200 * MIB);
    assert!(given[0] > 2 * given[1]);
}

/// The root, two groups in it, and one in the first of them.
fn hierarchy(budget: u64, bounds: [(u64, u64, u64); 3]) -> Vec<Bounds> {
    let group = |parent, (max, high, low): (u64, u64, u64)| {
        let size = |mib: u64| if mib == 0 { u64::MAX } else { mib * MIB };
        Bounds { parent, max: size(max), high: size(high), low: low * MIB }
    };
    vec![
        Bounds::budget(budget * MIB),
        group(0, bounds[0]),
        group(0, bounds[1]),
        group(1, bounds[2]),
    ]
}

fn member(group: usize, p: Process) -> Process {
    Process { group, ..p }
}

#[test]
fn a_group_at_its_maximum_is_engaged_while_the_budget_is_free() {
    let groups = hierarchy(1000, [(100, 0, 0), (0, 0, 0), (0, 0, 0)]);
    let tree = [
        member(3, process(Standing::Watching, 90, 0, 0)),
        member(2, process(Standing::Watching, 300, 0, 0)),
        member(1, process(Standing::Unmanaged, 5, 0, 0)),
    ];
    let decision = decide(&groups, &tree, TICK);
    assert_eq!(decision.engage, [0]);
    assert!(decision.limits[0].1.abs_diff(94 * MIB) <= 16, "{}", decision.limits[0].1);
    assert!(decide(&groups, &tree[1..], TICK).engage.is_empty());
}

#[test]
fn past_a_maximum_limits_sink_at_once_and_past_high_by_and_by() {
    let engaged = |group, used| member(group, process(Standing::Engaged, used, 0, used));
    let tree = [engaged(1, 200), engaged(2, 300)];
    let at_once = decide(&hierarchy(1000, [(100, 0, 0), (0, 0, 0), (0, 0, 0)]), &tree, TICK).limits;
    assert_eq!((at_once[0].1 / MIB, at_once[1].1 / MIB > 290), (99, true));
    let groups = hierarchy(1000, [(0, 100, 0), (0, 0, 0), (0, 0, 0)]);
    let first = decide(&groups, &tree, TICK).limits[0].1;
    assert!(first < 200 * MIB && first > 190 * MIB, "{}", first / MIB);
    let mut tree = tree;
    for _ in 0..200 {
        let limits = decide(&groups, &tree, TICK).limits;
        for (at, limit) in limits {
            tree[at].limit = limit;
            tree[at].used = tree[at].used.min(limit);
        }
    }
    assert!(tree[0].limit <= 100 * MIB && tree[0].limit > 95 * MIB, "{}", tree[0].limit / MIB);
}

#[test]
fn what_is_kept_for_a_group_stays_with_it_and_its_lack_is_told() {
    let groups = hierarchy(400, [(0, 0, 200), (0, 0, 0), (0, 0, 0)]);
    let mut tree = [
        member(3, process(Standing::Engaged, 200, 0, 200)),
        member(2, process(Standing::Engaged, 195, 0, 195)),
    ];
    for _ in 0..400 {
        tree[1].pressure = 2000 * MIB;
        let decision = decide(&groups, &tree, TICK);
        assert!(decision.starved.is_empty());
        for (at, limit) in decision.limits {
            tree[at].limit = limit;
            tree[at].used = if at == 1 { limit } else { tree[at].used.min(limit) };
        }
    }
    assert!(tree[0].limit >= 199 * MIB, "{}", tree[0].limit / MIB);
    let groups = hierarchy(100, [(0, 0, 200), (0, 0, 0), (0, 0, 0)]);
    assert_eq!(decide(&groups, &tree, TICK).starved, [1]);
}

#[test]
fn when_nothing_is_left_each_process_keeps_its_floor() {
    let group = [process(Standing::Engaged, 300, 0, 300), process(Standing::Engaged, 3, 0, 100)];
    assert_eq!(limits(&whole(0), &group, TICK), [CROWDED_FLOOR_BYTES, CROWDED_FLOOR_BYTES]);
    assert_eq!(
        limits(&whole(16 * MIB), &group, TICK).iter().min(),
        Some(&(4 * MIB)),
        "a process that uses less than its floor keeps that, and the room that its engine needs"
    );
}

#[test]
fn the_next_look_comes_sooner_the_fuller_the_budget() {
    let free = interval(&whole(512 * MIB), &[process(Standing::Watching, 10, 0, 0)]);
    let tight = interval(&whole(512 * MIB), &[process(Standing::Watching, 430, 0, 0)]);
    let full = interval(&whole(512 * MIB), &[process(Standing::Watching, 520, 0, 0)]);
    assert!(free > tight && tight > full);
    assert_eq!(full, Duration::from_millis(1));
    let engaged = |limit| interval(&whole(512 * MIB), &[process(Standing::Engaged, 510, 0, limit)]);
    assert_eq!([510, 0, 400].map(engaged), [10, 5, 5].map(Duration::from_millis));
}

#[test]
fn pressure_that_can_have_nothing_of_what_is_free_takes_nothing() {
    let bounds =
        [Bounds::budget(8192 * MIB), Bounds { parent: 0, max: 100 * MIB, high: u64::MAX, low: 0 }];
    let thrashes = Process { group: 1, ..process(Standing::Engaged, 99, 50, 100) };
    let rests = process(Standing::Engaged, 10, 0, 0);
    let targets = |tree: &[Process]| targets(&bounds, tree, &floors(&bounds, tree));
    assert!(targets(&[thrashes, rests, rests])[1] > 2000 * MIB);
    let elsewhere = Process { group: 0, ..thrashes };
    assert!(targets(&[elsewhere, rests, rests])[1] < 1000 * MIB);
}

#[test]
fn what_is_free_goes_where_memory_is_wanted_back() {
    let pager = process(Standing::Engaged, 70, 40, 70);
    // Each small one has asked for a page of a second ago.
    let small = Process {
        pressure: 2048,
        swapped: MIB,
        fixed: 2 * MIB,
        ..process(Standing::Engaged, 3, 0, 11)
    };
    let resting = Process { pressure: 0, ..small };
    for small in [small, resting] {
        let tree = [pager, small, small, small, small, small];
        let targets = targets(&whole(128 * MIB), &tree, &floors(&whole(128 * MIB), &tree));
        assert!(targets[0] >= 90 * MIB, "{targets:?}");
        assert!(targets[1..].iter().all(|given| (4 * MIB..8 * MIB).contains(given)), "{targets:?}");
    }
    // Where nothing is wanted, each may grow by an equal part.
    let tree = [Process { pressure: 0, ..pager }, resting];
    let targets = targets(&whole(128 * MIB), &tree, &floors(&whole(128 * MIB), &tree));
    assert!(targets[1] >= 25 * MIB, "{targets:?}");
}

#[test]
fn cold_pages_of_a_process_that_rests_are_wanted_once_others_swap_much() {
    let swaps = Process { swapped: 20 * MIB, ..process(Standing::Engaged, 170, 10, 180) };
    let rests = process(Standing::Watching, 30, 0, 0);
    let engaged = |tree: [Process; 2]| decide(&whole(210 * MIB), &tree, TICK).engage;
    assert_eq!(engaged([swaps, rests]), [1]);
    assert_eq!(engaged([Process { swapped: 10 * MIB, ..swaps }, rests]), [0; 0], "not yet");
    let small = process(Standing::Watching, 15, 0, 0);
    assert_eq!(engaged([Process { used: 185 * MIB, ..swaps }, small]), [0; 0], "nothing to gain");
}

#[test]
fn a_rate_rises_at_once_and_falls_within_a_second() {
    assert_eq!(smooth(10, 500, Duration::from_millis(1)), 500);
    assert_eq!(smooth(1000, 0, Duration::from_millis(500)), 500);
    assert_eq!(smooth(1000, 7, Duration::from_secs(3)), 7);
}

fn any_group() -> impl Strategy<Value = Vec<Process>> {
    let limit = prop_oneof![Just(0u64), 1u64..2048 * MIB];
    let workingset = prop_oneof![Just(0u64), 0..4096 * MIB];
    let one = (0u64..2048 * MIB, 0u64..4096 * MIB, limit, workingset).prop_map(
        |(used, pressure, limit, workingset)| Process {
            group: 0,
            standing: Standing::Engaged,
            used,
            pressure,
            fixed: 0,
            swapped: 1 << 40,
            limit,
            growth: 0,
            engine_goes_first: true,
            kept: 0,
            workingset,
        },
    );
    proptest::collection::vec(one, 1..12)
}

fn any_hierarchy() -> impl Strategy<Value = (Vec<Bounds>, Vec<Process>)> {
    let bound = || prop_oneof![2 => Just(u64::MAX), 2 => 40 * MIB..4096 * MIB];
    let group = (
        any::<prop::sample::Index>(),
        bound(),
        bound(),
        prop_oneof![2 => Just(0), 1 => 0..1024 * MIB],
    );
    let groups = (16 * MIB..8192 * MIB, proptest::collection::vec(group, 0..6)).prop_map(
        |(budget, list)| {
            let mut groups = vec![Bounds::budget(budget)];
            for (parent, max, high, low) in list {
                let parent = parent.index(groups.len());
                groups.push(Bounds { parent, max, high, low });
            }
            groups
        },
    );
    (groups, proptest::collection::vec(any::<prop::sample::Index>(), 12), any_group()).prop_map(
        |(groups, at, mut tree)| {
            tree.iter_mut().zip(at).for_each(|(p, at)| p.group = at.index(groups.len()));
            (groups, tree)
        },
    )
}

#[test]
fn a_cow_group_keeps_its_part_up_to_a_bound() {
    let shares = |mib: u64, kept: u64| {
        let forked = |pressure| Process {
            kept: kept * MIB,
            swapped: 200 * MIB,
            ..process(Standing::Engaged, 95, pressure, 98)
        };
        let mut group = [forked(0), forked(400)];
        for _ in 0..200 {
            let given = limits(&whole(mib * MIB), &group, YIELD_TIME);
            for (p, limit) in group.iter_mut().zip(given) {
                (p.limit, p.used) = (limit, limit);
            }
        }
        [group[0].limit / MIB, group[1].limit / MIB]
    };
    assert_eq!(shares(200, 40)[0], 40);
    let [idle, busy] = shares(200, 90);
    assert!(idle.abs_diff(87) <= 1 && busy >= 110, "{idle} {busy}");
    let [idle, busy] = shares(200, 0);
    assert!(idle <= 9 && busy >= 190, "{idle} {busy}");
}

proptest! {
    #[test]
    fn in_every_group_looks_converge_below_its_maximum_and_high((groups, tree) in any_hierarchy()) {
        let mut tree = tree;
        for _ in 0..160 {
            for (at, limit) in decide(&groups, &tree, YIELD_TIME).limits {
                tree[at].limit = limit;
                tree[at].used = tree[at].used.min(limit);
            }
        }
        for (at, group) in groups.iter().enumerate() {
            let within: Vec<&Process> =
                tree.iter().filter(|p| is_in(&groups, p.group, at)).collect();
            let sum: u64 = within.iter().map(|p| p.limit).sum();
            let floors = within.len() as u64 * CROWDED_FLOOR_BYTES;
            prop_assert!(
                sum <= group.most().max(floors).saturating_add(1),
                "group {at}: {sum} of \
                {}",
                group.most()
            );
        }
    }

    #[test]
    fn no_limit_rises_into_what_others_have((groups, tree) in any_hierarchy()) {
        let limits = decide(&groups, &tree, TICK).limits;
        for (at, group) in groups.iter().enumerate() {
            let within = limits.iter().filter(|(p, _)| is_in(&groups, tree[*p].group, at));
            // A floor is no rise: it lies within the room that an engine keeps.
            let least = |p: &Process| p.used + ENGINE_ROOM_BYTES.min(p.used);
            let rises = within.clone().any(|(p, limit)| {
                tree[*p].limit != 0 && *limit > tree[*p].limit.max(least(&tree[*p]))
            });
            let sum: u64 = within.map(|(p, limit)| (*limit).max(tree[*p].used)).sum();
            prop_assert!(!rises || sum <= group.most(), "group {at}");
        }
    }

    #[test]
    fn limits_exceed_the_share_only_for_floors_or_older_limits(
        share in 0u64..8192 * MIB,
        group in any_group(),
    ) {
        let given = limits(&whole(share), &group, YIELD_TIME);
        let sum: u64 = given.iter().sum();
        let least = floor_of(share, group.len());
        let floors: u64 = group.iter().map(|p| floor(p, least)).sum();
        let used: u64 = group.iter().map(|p| p.used).sum();
        let older: u64 = group.iter().map(|p| p.limit.max(p.used)).sum();
        if used > share + share / 50 {
            prop_assert!(sum <= share.max(floors) + floors);
        } else {
            prop_assert!(sum <= share.max(floors).max(older));
        }
        for (p, limit) in group.iter().zip(&given) {
            prop_assert!(*limit >= floor(p, least), "no process is pushed below its floor");
        }
    }

    #[test]
    fn repeated_looks_stay_below_the_share(share in 200 * MIB..8192 * MIB, group in any_group()) {
        let mut group = group;
        for _ in 0..120 {
            let given = limits(&whole(share), &group, YIELD_TIME);
            for (p, limit) in group.iter_mut().zip(given) {
                p.limit = limit;
                p.used = p.used.min(limit);
            }
        }
        let sum: u64 = group.iter().map(|p| p.limit).sum();
        prop_assert!(sum <= share + 1, "{sum} of {share}");
    }

    #[test]
    fn deciding_never_panics_and_engages_only_over_the_trigger(
        budget in 16 * MIB..1 << 45,
        uses in proptest::collection::vec((0u64..1 << 44, 0u8..3), 0..40),
    ) {
        let tree: Vec<Process> = uses
            .iter()
            .map(|(used, kind)| Process {
                group: 0,
                standing: [Standing::Watching, Standing::Engaged, Standing::Unmanaged]
                    [*kind as usize],
                used: *used,
                pressure: 0,
                fixed: 0,
                swapped: 0,
                limit: 0,
                growth: 0,
                engine_goes_first: true,
                kept: 0,
                workingset: 0,
            })
            .collect();
        let decision = decide(&whole(budget), &tree, TICK);
        let total: u64 = tree.iter().map(|p| p.used).sum();
        prop_assert!(decision.engage.is_empty() || total > trigger(budget));
        prop_assert!(decision.engage.iter().all(|at| tree[*at].standing == Standing::Watching));
        let _ = interval(&whole(budget), &tree);
    }
}
