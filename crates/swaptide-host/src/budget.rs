//! How the tree's budget is shared among its processes. Pure arithmetic: what the processes use goes in, what to do comes out.
//!
//! Owns the policy and nothing else. The concepts:
//! - the *use* of a process is its resident anonymous memory, the engine's own included;
//! - the *share* is what the budget leaves for the engaged processes when all others have theirs;
//! - the *pressure* of a process is how many bytes a second it swaps out or faults back: what it would use if it could.
//!
//! Invariants
//! 1. Nothing is engaged while the tree's use is under [`trigger`].
//! 2. The limits together exceed the share only where the floors do ([`FLOOR`]), or where limits that were given before are
//!    still being lowered and the use is not over the share.
//! 3. A limit is raised only into room that no other process has: neither as limit nor as use.
//!
//! Locks: none.

use std::time::Duration;

/// What an engaged process keeps whatever happens, if it uses as much: with less, faults alone would fill its time.
pub const FLOOR: u64 = 8 << 20;
/// The same where so many processes share the budget that each of them could not have that.
const CROWDED_FLOOR: u64 = 2 << 20;
/// A process smaller than this is not worth managing.
pub const WORTH: u64 = 4 << 20;
/// The same once the budget is exceeded.
const WORTH_IN_NEED: u64 = 1 << 20;
/// The time that a process may take from being engaged until faults hold it.
const ENGAGING: Duration = Duration::from_millis(20);
/// The smallest budget: a floor for the program, staging frames, tables and a compressed pool.
pub const SMALLEST_BUDGET: u64 = 16 << 20;
/// The time in which a limit sinks by an eighth at most, while the budget is kept.
pub const YIELD_TIME: Duration = Duration::from_millis(50);
/// How fast a program may grow at most, by which the time of the next look is set.
const GROWTH_BYTES_PER_S: u64 = 6_000_000_000;

/// How a process stands to the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It can be managed and is not.
    Watching,
    /// It is managed, or was asked to be.
    Engaged,
    /// It cannot be managed; it counts all the same.
    Beyond,
}

/// One process, as the budget sees it.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// How it stands.
    pub standing: Standing,
    /// Resident anonymous memory in bytes.
    pub used: u64,
    /// Bytes a second swapped out and refaulted, smoothed.
    pub pressure: u64,
    /// Its limit so far; 0 where it has none.
    pub limit: u64,
    /// Bytes a second by which it has grown since the last look, while it is not managed.
    pub growth: u64,
}

/// What to do now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Numbers of the processes to engage.
    pub engage: Vec<usize>,
    /// Limits of the engaged processes, those in `engage` among them.
    pub limits: Vec<(usize, u64)>,
}

/// The use of the tree at which managing begins: late, for a program within its budget pays nothing; early enough that the
/// engine is at work before the budget is full.
pub fn trigger(budget: u64) -> u64 {
    (budget / 100 * 85).saturating_sub(8 << 20).max(budget / 2)
}

/// Whom to engage and how much everybody gets; `elapsed` is the time since the last decision.
pub fn decide(budget: u64, processes: &[Process], elapsed: Duration) -> Decision {
    let total: u64 = processes.iter().map(|p| p.used).sum();
    let engage = if total > trigger(budget) { choose(budget, total, processes) } else { Vec::new() };
    let managed: Vec<usize> =
        (0..processes.len()).filter(|at| processes[*at].standing == Standing::Engaged || engage.contains(at)).collect();
    let others: u64 = total - managed.iter().map(|at| processes[*at].used).sum::<u64>();
    // A hundredth stays back: what a process takes between two looks of its reclaim.
    let share = (budget - budget / 100).saturating_sub(others);
    let group: Vec<Process> = managed.iter().map(|at| processes[*at]).collect();
    let limits = managed.into_iter().zip(limits(share, &group, elapsed)).collect();
    Decision { engage, limits }
}

/// True for a process that would have grown past the budget by the time it is managed.
fn is_urgent(budget: u64, total: u64, p: &Process) -> bool {
    let ahead = part(p.growth, ENGAGING.as_micros() as u64, 1_000_000);
    p.standing == Standing::Watching && p.used >= WORTH_IN_NEED && ahead > 0 && total + ahead > budget
}

/// Those that grow too fast to wait; and the biggest processes, until those that are engaged cover four fifths of the use.
fn choose(budget: u64, total: u64, processes: &[Process]) -> Vec<usize> {
    let worth = if total > budget { WORTH_IN_NEED } else { WORTH };
    let mut covered: u64 = processes.iter().filter(|p| p.standing == Standing::Engaged).map(|p| p.used).sum();
    let mut candidates: Vec<usize> =
        (0..processes.len()).filter(|at| processes[*at].standing == Standing::Watching && processes[*at].used >= worth).collect();
    candidates.sort_by_key(|at| std::cmp::Reverse(processes[*at].used));
    let enough = total / 5 * 4;
    let mut engage: Vec<usize> = (0..processes.len()).filter(|at| is_urgent(budget, total, &processes[*at])).collect();
    covered += engage.iter().map(|at| processes[*at].used).sum::<u64>();
    candidates.retain(|at| !engage.contains(at));
    engage.extend(candidates.into_iter().take_while(|at| {
        let wanted = covered < enough;
        covered += processes[*at].used;
        wanted
    }));
    engage
}

/// Limits of the engaged processes, which have `share` bytes together.
///
/// Everybody's demand is what it uses, its pressure, and an equal part of what is free; the share goes by demand. A process
/// without pressure thus keeps what it has until one with pressure needs it, and then yields by and by: no more than an eighth in
/// [`YIELD_TIME`], so that a process which only rested is not empty when it wakes.
pub fn limits(share: u64, group: &[Process], elapsed: Duration) -> Vec<u64> {
    let least = floor_of(share, group.len());
    let targets = targets(share, group);
    let used: u64 = group.iter().map(|p| p.used).sum();
    // Two parts in a hundred are the play of counters and of reclaim, not a breach.
    if used > share + share / 50 {
        return group
            .iter()
            .zip(targets)
            .map(|(p, target)| if p.limit == 0 { target } else { target.min(p.limit).max(floor(p, least)) })
            .collect();
    }
    let lowered: Vec<u64> = group
        .iter()
        .zip(&targets)
        .map(|(p, target)| {
            let old = if p.limit == 0 { p.used } else { p.limit };
            let step = part(old / 8, elapsed.min(YIELD_TIME).as_micros() as u64, YIELD_TIME.as_micros() as u64);
            (*target).max(old - step).min(old).max(floor(p, least))
        })
        .collect();
    let base: Vec<u64> = group.iter().zip(&lowered).map(|(p, limit)| p.used.max(*limit)).collect();
    let room = share.saturating_sub(base.iter().sum());
    let wishes: Vec<u64> = targets.iter().zip(&base).map(|(target, base)| target.saturating_sub(*base)).collect();
    let wished: u64 = wishes.iter().sum();
    let given = room.min(wished);
    (0..group.len())
        .map(|at| match part(given, wishes[at], wished) {
            0 => lowered[at],
            raise => base[at] + raise,
        })
        .collect()
}

/// What each of `count` processes keeps that have `share` bytes together: half of the share is divided by demand.
fn floor_of(share: u64, count: usize) -> u64 {
    (share / 2 / count.max(1) as u64).clamp(CROWDED_FLOOR, FLOOR)
}

fn floor(p: &Process, least: u64) -> u64 {
    p.used.min(least)
}

fn targets(share: u64, group: &[Process]) -> Vec<u64> {
    let least = floor_of(share, group.len());
    let floor = |p: &Process| floor(p, least);
    let floors: u64 = group.iter().map(floor).sum();
    if share <= floors || group.is_empty() {
        return group.iter().map(floor).collect();
    }
    let used: u64 = group.iter().map(|p| p.used).sum();
    let slack = share.saturating_sub(used) / group.len() as u64;
    // Pressure counts for at most the whole share, so that one who reads without end does not starve all others.
    let demand: Vec<u64> = group.iter().map(|p| p.used - floor(p) + p.pressure.min(share) + slack).collect();
    let demanded: u64 = demand.iter().sum();
    group.iter().zip(demand).map(|(p, demand)| floor(p) + part(share - floors, demand, demanded)).collect()
}

/// `whole * piece / pieces` without overflow; 0 when there are no pieces.
fn part(whole: u64, piece: u64, pieces: u64) -> u64 {
    if pieces == 0 { 0 } else { (whole as u128 * piece as u128 / pieces as u128) as u64 }
}

/// When to look again: before the tree can have grown through half of what is free. Where the engaged processes hold their own
/// limits and all others are small and stay so, a slower pulse is enough.
pub fn interval(budget: u64, processes: &[Process]) -> Duration {
    let total: u64 = processes.iter().map(|p| p.used).sum();
    let others: u64 = processes.iter().filter(|p| p.standing != Standing::Engaged).map(|p| p.used).sum();
    let grows = processes.iter().any(|p| p.standing == Standing::Watching && p.growth > 0);
    let calm = total > others && others < budget / 16 && !grows;
    let shortest = if calm { 5_000 } else { 1_000 };
    let micros = budget.saturating_sub(total) as u128 / 2 * 1_000_000 / GROWTH_BYTES_PER_S as u128;
    Duration::from_micros((micros as u64).clamp(shortest, 50_000))
}

/// Follows a rate: up at once, down over a second.
pub fn smooth(previous: u64, rate: u64, elapsed: Duration) -> u64 {
    if rate >= previous {
        return rate;
    }
    let kept = (1.0 - elapsed.as_secs_f64()).max(0.0);
    rate + ((previous - rate) as f64 * kept) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const TICK: Duration = Duration::from_millis(5);

    fn process(standing: Standing, used: u64, pressure: u64, limit: u64) -> Process {
        Process { standing, used: used * MIB, pressure: pressure * MIB, limit: limit * MIB, growth: 0 }
    }

    #[test]
    fn a_tree_within_its_budget_is_left_alone() {
        let tree = [process(Standing::Watching, 200, 0, 0), process(Standing::Beyond, 150, 0, 0)];
        assert_eq!(decide(512 * MIB, &tree, TICK), Decision::default());
    }

    #[test]
    fn the_biggest_is_engaged_and_gets_what_the_others_leave() {
        let tree =
            [process(Standing::Watching, 2, 0, 0), process(Standing::Watching, 440, 0, 0), process(Standing::Beyond, 10, 0, 0)];
        let decision = decide(512 * MIB, &tree, TICK);
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
        assert_eq!(decide(400 * MIB, &tree, TICK).engage, [1, 2, 0]);
    }

    #[test]
    fn a_small_process_that_grows_past_the_budget_is_engaged_before_it_has() {
        let mut tree = [process(Standing::Engaged, 100, 0, 120), process(Standing::Watching, 2, 0, 0)];
        assert!(decide(128 * MIB, &tree, TICK).engage.is_empty(), "it does not grow");
        tree[1].growth = 500 * MIB;
        assert!(decide(128 * MIB, &tree, TICK).engage.is_empty(), "there is room for it");
        tree[0].used = 120 * MIB;
        assert_eq!(decide(128 * MIB, &tree, TICK).engage, [1]);
        assert_eq!(interval(128 * MIB, &tree), Duration::from_millis(1));
    }

    #[test]
    fn small_processes_are_engaged_only_in_need() {
        let mut tree = vec![process(Standing::Watching, 2, 0, 0); 60];
        assert!(decide(128 * MIB, &tree, TICK).engage.is_empty(), "120M of 128M in pieces of 2M");
        tree.extend([process(Standing::Watching, 2, 0, 0); 10]);
        assert!(decide(128 * MIB, &tree, TICK).engage.len() >= 50, "over the budget");
    }

    #[test]
    fn a_process_with_pressure_wins_memory_from_an_idle_one_and_no_byte_is_given_twice() {
        let mut group = [process(Standing::Engaged, 400, 0, 400), process(Standing::Engaged, 100, 0, 100)];
        let share = 500 * MIB;
        for tick in 0..2000 {
            group[1].pressure = 800 * MIB;
            let given = limits(share, &group, TICK);
            for (p, limit) in group.iter_mut().zip(given) {
                p.limit = limit;
                // Who may use more, and has pressure, does; who is over its limit shrinks at once.
                p.used = if p.pressure > 0 { limit } else { p.used.min(limit) };
            }
            assert!(group.iter().map(|p| p.used).sum::<u64>() <= share);
            assert!(tick > 10 || group[0].limit > 300 * MIB, "a process that rests for 50 ms keeps its memory");
        }
        assert!(group[1].limit > 480 * MIB, "{}", group[1].limit / MIB);
        assert!(group[0].limit >= FLOOR, "{}", group[0].limit);
    }

    #[test]
    fn a_share_that_shrinks_lowers_limits_at_once_when_the_use_is_over_it() {
        let group = [process(Standing::Engaged, 300, 0, 300), process(Standing::Engaged, 100, 0, 100)];
        let given = limits(200 * MIB, &group, TICK);
        assert!(given.iter().sum::<u64>() <= 200 * MIB);
        assert!(given[0] > 2 * given[1]);
    }

    #[test]
    fn when_nothing_is_left_everybody_keeps_its_floor() {
        let group = [process(Standing::Engaged, 300, 0, 300), process(Standing::Engaged, 3, 0, 100)];
        assert_eq!(limits(0, &group, TICK), [CROWDED_FLOOR, CROWDED_FLOOR]);
        assert_eq!(limits(16 * MIB, &group, TICK).iter().min(), Some(&(3 * MIB)), "who uses less than its floor keeps that");
    }

    #[test]
    fn the_next_look_comes_sooner_the_fuller_the_budget() {
        let free = interval(512 * MIB, &[process(Standing::Watching, 10, 0, 0)]);
        let tight = interval(512 * MIB, &[process(Standing::Watching, 430, 0, 0)]);
        let full = interval(512 * MIB, &[process(Standing::Watching, 520, 0, 0)]);
        assert!(free > tight && tight > full);
        assert_eq!(full, Duration::from_millis(1));
        assert_eq!(interval(512 * MIB, &[process(Standing::Engaged, 510, 0, 0)]), Duration::from_millis(5));
    }

    #[test]
    fn a_rate_rises_at_once_and_falls_within_a_second() {
        assert_eq!(smooth(10, 500, Duration::from_millis(1)), 500);
        assert_eq!(smooth(1000, 0, Duration::from_millis(500)), 500);
        assert_eq!(smooth(1000, 7, Duration::from_secs(3)), 7);
    }

    fn any_group() -> impl Strategy<Value = Vec<Process>> {
        let one = (0u64..2048 * MIB, 0u64..4096 * MIB, prop_oneof![Just(0u64), 1u64..2048 * MIB])
            .prop_map(|(used, pressure, limit)| Process { standing: Standing::Engaged, used, pressure, limit, growth: 0 });
        proptest::collection::vec(one, 1..12)
    }

    proptest! {
        #[test]
        fn limits_exceed_the_share_only_where_floors_or_older_limits_force_it(share in 0u64..8192 * MIB, group in any_group()) {
            let given = limits(share, &group, YIELD_TIME);
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
                prop_assert!(*limit >= floor(p, least), "nobody is pushed under its floor");
            }
        }

        #[test]
        fn repeated_looks_settle_under_the_share(share in 200 * MIB..8192 * MIB, group in any_group()) {
            let mut group = group;
            for _ in 0..120 {
                let given = limits(share, &group, YIELD_TIME);
                for (p, limit) in group.iter_mut().zip(given) {
                    p.limit = limit;
                    p.used = p.used.min(limit);
                }
            }
            let sum: u64 = group.iter().map(|p| p.limit).sum();
            prop_assert!(sum <= share + 1, "{sum} of {share}");
        }

        #[test]
        fn deciding_never_panics_and_engages_only_over_the_trigger(budget in 16 * MIB..1 << 45, uses in proptest::collection::vec((0u64..1 << 44, 0u8..3), 0..40)) {
            let tree: Vec<Process> = uses.iter().map(|(used, kind)| Process {
                standing: [Standing::Watching, Standing::Engaged, Standing::Beyond][*kind as usize], used: *used, pressure: 0, limit: 0, growth: 0,
            }).collect();
            let decision = decide(budget, &tree, TICK);
            let total: u64 = tree.iter().map(|p| p.used).sum();
            prop_assert!(decision.engage.is_empty() || total > trigger(budget));
            prop_assert!(decision.engage.iter().all(|at| tree[*at].standing == Standing::Watching));
            let _ = interval(budget, &tree);
        }
    }
}
