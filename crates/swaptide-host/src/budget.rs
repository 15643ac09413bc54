//! How a budget is shared among the processes of groups. Pure arithmetic: what the processes use goes in, what to do comes out.
//!
//! Owns the policy and nothing else. The concepts:
//! - the *use* of a process is its resident anonymous memory, the engine's own included;
//! - the *share* of a group is what its maximum leaves for the engaged processes in it when all others have theirs; the root's maximum is
//!   the budget;
//! - the *pressure* of a process is how many bytes a second it swaps out or faults back, or the part of what is swapped out that corresponds to the part of
//!   the time in which its threads wait for it, whichever is more; as far as that much is swapped out, it is what it would use if it could.
//!
//! Invariants
//! 1. Nothing of a group is engaged while its use, and that of all above it, is under [`trigger`].
//! 2. The limits in a group together exceed its share only where the floors do ([`FLOOR`]), or where limits that were given before are
//!    still being lowered and the use is not over the share.
//! 3. A limit is raised only into room that no other process has, in any group above: neither as limit nor as use.
//! 4. `high` lowers limits by and by and never at once; no more is given than it permits.
//! 5. What is lent ([`lend`]) is no more than what a process shares: what it may use by that together with its limit is still its limit.
//! 6. A process of a *family* (processes that share compressed memory since a fork) keeps its part of that, as far as an eighth of what there is remains: what it
//!    gave up of it, the others still had.
//!
//! Locks: none.

use std::time::Duration;

use crate::division::{Claim, Node, divide};

/// What an engaged process keeps whatever happens, if it uses as much, beside what cannot be swapped out ([`Process::fixed`], so far as it is no more than
/// this): with less, faults alone would fill its time.
pub const FLOOR: u64 = 8 << 20;
/// The same where so many processes share the budget that each of them could not have that.
const CROWDED_FLOOR: u64 = 2 << 20;
/// A process smaller than this is not worth managing.
pub const WORTH: u64 = 4 << 20;
/// The same once the budget is exceeded.
const WORTH_IN_NEED: u64 = 1 << 20;
/// The time that a process may take from being engaged until faults hold it.
const ENGAGING: Duration = Duration::from_millis(20);
/// Pages that were shared for so long will be so a while longer: a program that copies what a fork left it shared does it sooner.
pub const SETTLES: Duration = Duration::from_millis(100);
/// The time in which engines take out what a program copies of what a fork left it shared.
pub const COPIED_AHEAD: Duration = Duration::from_millis(50);
/// The time over which the pressure of processes of one family is averaged: each has moments at which it wants much.
const AVERAGED: Duration = Duration::from_millis(250);
/// The smallest budget: a floor for the program, staging frames, tables and a compressed pool.
pub const SMALLEST_BUDGET: u64 = 16 << 20;
/// The time in which a limit sinks by an eighth at most, while the budget is kept.
pub const YIELD_TIME: Duration = Duration::from_millis(50);
/// Families keep so many eighths of what a group has.
const KEPT_EIGHTHS: u64 = 7;
/// How fast a program may grow at most, by which the time of the next look is set.
const GROWTH_BYTES_PER_S: u64 = 6_000_000_000;

/// What a group may have. The first of a list is the root; a parent stands before its children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// The number of its parent; of the root, its own.
    pub parent: usize,
    /// Most memory; of the root, the budget.
    pub max: u64,
    /// Memory from which on limits sink.
    pub high: u64,
    /// Memory that is kept for it.
    pub low: u64,
}

impl Bounds {
    /// A budget without groups.
    pub fn budget(bytes: u64) -> Bounds {
        Bounds { parent: 0, max: bytes, high: u64::MAX, low: 0 }
    }

    fn most(&self) -> u64 {
        self.max.min(self.high)
    }
}

/// A process's pages that others have too, since a fork.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// What it holds resident beyond what it uses: the parts of shared pages that count for others. Outside of families, what [`Lasting`] makes of it.
    pub bytes: u64,
    /// What it was lent so far.
    pub lent: u64,
    /// It is of a family.
    pub of_family: bool,
    /// Bytes of shared pages that were copied for it [`Lately`].
    pub copied: u64,
}

/// Follows [`Sharing::bytes`] of a process: what lasts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lasting {
    before: u64,
    least: u64,
    age: Duration,
}

impl Lasting {
    /// A process shares `bytes` now, `elapsed` after the last time; gives what it shared all the time for one to two [`SETTLES`].
    pub fn follow(&mut self, bytes: u64, elapsed: Duration) -> u64 {
        self.least = self.least.min(bytes);
        self.age += elapsed;
        if self.age >= SETTLES {
            *self = Lasting { before: self.least, least: bytes, age: Duration::ZERO };
        }
        self.before.min(self.least)
    }
}

/// Follows what was copied for a process: that of the last one to two [`COPIED_AHEAD`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Lately {
    before: u64,
    now: u64,
    age: Duration,
}

impl Lately {
    /// `bytes` were copied in the time `elapsed`; gives what was lately, these among it.
    pub fn add(&mut self, bytes: u64, elapsed: Duration) -> u64 {
        self.age += elapsed;
        if self.age >= COPIED_AHEAD {
            *self = Lately { before: if self.age < 2 * COPIED_AHEAD { self.now } else { 0 }, now: 0, age: Duration::ZERO };
        }
        self.now += bytes;
        self.before + self.now
    }
}

/// How a process stands to the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It can be managed and is not.
    Watching,
    /// The same, and it waits to be managed: it is about to write more than the budget.
    Asking,
    /// It is managed, or was asked to be.
    Engaged,
    /// It cannot be managed; it counts all the same.
    Beyond,
}

/// One process, as the budget sees it.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// The number of its group.
    pub group: usize,
    /// How it stands.
    pub standing: Standing,
    /// Resident anonymous memory in bytes.
    pub used: u64,
    /// Bytes a second swapped out and refaulted, smoothed; or what is swapped out times the part of the time in which its threads wait.
    pub pressure: u64,
    /// Bytes of its use that cannot be swapped out: the engine's own, and what is not under management.
    pub fixed: u64,
    /// Bytes of it that are swapped out: no pressure can make it use more than these besides.
    pub swapped: u64,
    /// Its limit so far; 0 where it has none.
    pub limit: u64,
    /// Bytes a second by which it has grown since the last look, while it is not managed.
    pub growth: u64,
    /// Bytes that it keeps whoever presses, for its family's sake.
    pub kept: u64,
}

/// What to do now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Numbers of the processes to engage.
    pub engage: Vec<usize>,
    /// Limits of the engaged processes, those in `engage` among them.
    pub limits: Vec<(usize, u64)>,
    /// What each of these would have if everything were divided by demand at once, in the same order.
    pub fair: Vec<u64>,
    /// Groups that get less than is kept for them.
    pub starved: Vec<usize>,
}

/// The use of the tree at which managing begins: late, for a program within its budget pays nothing; early enough that the
/// engine is at work before the budget is full.
pub fn trigger(budget: u64) -> u64 {
    if budget == u64::MAX {
        return budget;
    }
    (budget / 100 * 85).saturating_sub(8 << 20).max(budget / 2)
}

/// For each group, the sum over the processes in it and below it.
fn sums(groups: &[Bounds], of: impl Iterator<Item = (usize, u64)>) -> Vec<u64> {
    let mut sums = vec![0u64; groups.len()];
    for (group, value) in of {
        sums[group] = sums[group].saturating_add(value);
    }
    for at in (1..groups.len()).rev() {
        let parent = groups[at].parent;
        sums[parent] = sums[parent].saturating_add(sums[at]);
    }
    sums
}

/// Whether `group` is `ancestor` or below it.
fn is_in(groups: &[Bounds], mut group: usize, ancestor: usize) -> bool {
    while group > ancestor {
        group = groups[group].parent;
    }
    group == ancestor
}

/// Whom to engage and how much everybody gets; `elapsed` is the time since the last decision.
pub fn decide(groups: &[Bounds], processes: &[Process], elapsed: Duration) -> Decision {
    let totals = sums(groups, processes.iter().map(|p| (p.group, p.used)));
    let mut engage: Vec<usize> = (0..processes.len()).filter(|at| processes[*at].standing == Standing::Asking).collect();
    for (at, (group, total)) in groups.iter().zip(&totals).enumerate() {
        if *total > trigger(group.most()) {
            let within: Vec<usize> = (0..processes.len()).filter(|p| is_in(groups, processes[*p].group, at)).collect();
            let chosen = choose(group.most(), *total, processes, &within);
            engage.extend(chosen.into_iter().filter(|p| !engage.contains(p)).collect::<Vec<_>>());
        }
    }
    let is_managed = |at: &usize| processes[*at].standing == Standing::Engaged || engage.contains(at);
    let managed: Vec<usize> = (0..processes.len()).filter(is_managed).collect();
    let others =
        sums(groups, (0..processes.len()).filter(|at| !is_managed(at)).map(|at| (processes[at].group, processes[at].used)));
    let shares: Vec<Bounds> = groups.iter().zip(&others).map(|(group, others)| share(group, *others)).collect();
    let group: Vec<Process> = managed.iter().map(|at| processes[*at]).collect();
    let least = floors(&shares, &group);
    let fair = targets(&shares, &group, &least);
    let limits = approach(&shares, &group, &least, &fair, elapsed);
    let given = sums(groups, group.iter().zip(&limits).map(|(p, limit)| (p.group, *limit)));
    let used = sums(groups, group.iter().map(|p| (p.group, p.used)));
    let starves = |at: &usize| given[*at] < shares[*at].low.min(used[*at]);
    Decision {
        starved: (0..groups.len()).filter(starves).collect(),
        limits: managed.into_iter().zip(limits).collect(),
        fair,
        engage,
    }
}

/// What of a group's bounds is left for the engaged processes. A hundredth stays back: what a process takes between two looks of its reclaim.
fn share(group: &Bounds, others: u64) -> Bounds {
    let left = |bound: u64| match bound {
        u64::MAX => u64::MAX,
        bound => (bound - bound / 100).saturating_sub(others),
    };
    Bounds { parent: group.parent, max: left(group.max), high: left(group.high), low: group.low.saturating_sub(others) }
}

/// True for a process that would have grown past the budget by the time it is managed.
fn is_urgent(budget: u64, total: u64, p: &Process) -> bool {
    let ahead = part(p.growth, ENGAGING.as_micros() as u64, 1_000_000);
    p.standing == Standing::Watching && p.used >= WORTH_IN_NEED && ahead > 0 && total + ahead > budget
}

/// Of the processes `within` a group that may have `budget` and uses `total`: those that grow too fast to wait; and the biggest, until those that
/// are engaged cover four fifths of the use.
fn choose(budget: u64, total: u64, processes: &[Process], within: &[usize]) -> Vec<usize> {
    let worth = if total > budget { WORTH_IN_NEED } else { WORTH };
    let used = |standing: Standing| {
        let those = within.iter().filter(move |at| processes[**at].standing == standing);
        those.map(|at| (*at, processes[*at].used))
    };
    let mut covered: u64 = used(Standing::Engaged).map(|(_, used)| used).sum();
    let mut candidates: Vec<usize> = used(Standing::Watching).filter(|(_, used)| *used >= worth).map(|(at, _)| at).collect();
    candidates.sort_by_key(|at| std::cmp::Reverse(processes[*at].used));
    let enough = total / 5 * 4;
    let mut engage: Vec<usize> = within.iter().copied().filter(|at| is_urgent(budget, total, &processes[*at])).collect();
    covered += engage.iter().map(|at| processes[*at].used).sum::<u64>();
    candidates.retain(|at| !engage.contains(at));
    engage.extend(candidates.into_iter().take_while(|at| {
        let wanted = covered < enough;
        covered += processes[*at].used;
        wanted
    }));
    engage
}

/// Limits of the engaged processes on their way to `targets`; `shares` are what these may have in each group, `least` is what nobody goes below.
///
/// Everybody's demand is what it uses, what its pressure wants back, and an equal part of what is free; memory goes by demand ([`divide`]). A process
/// without pressure thus keeps what it has until one with pressure needs it, and then yields by and by: no more than an eighth in
/// [`YIELD_TIME`], so that a process which only rested is not empty when it wakes.
fn approach(shares: &[Bounds], group: &[Process], least: &[u64], targets: &[u64], elapsed: Duration) -> Vec<u64> {
    let used = sums(shares, group.iter().map(|p| (p.group, p.used)));
    // Two parts in a hundred are the play of counters and of reclaim, not a breach.
    let over: Vec<bool> =
        shares.iter().zip(&used).map(|(share, used)| *used > share.max.saturating_add(share.max / 50)).collect();
    let in_breach = |p: &Process| (0..shares.len()).any(|at| over[at] && is_in(shares, p.group, at));
    let breaches: Vec<bool> = group.iter().map(in_breach).collect();
    let lowered: Vec<u64> = (0..group.len())
        .map(|at| {
            let (p, target) = (&group[at], targets[at]);
            if breaches[at] {
                return if p.limit == 0 { target } else { target.min(p.limit).max(floor(p, least[at])) };
            }
            let old = if p.limit == 0 { p.used } else { p.limit };
            let step = part(old / 8, elapsed.min(YIELD_TIME).as_micros() as u64, YIELD_TIME.as_micros() as u64);
            target.max(old - step).min(old).max(floor(p, least[at]))
        })
        .collect();
    let base: Vec<u64> = group.iter().zip(&lowered).map(|(p, limit)| p.used.max(*limit)).collect();
    let mut raises: Vec<u64> =
        (0..group.len()).map(|at| if breaches[at] { 0 } else { targets[at].saturating_sub(base[at]) }).collect();
    let has = sums(shares, group.iter().zip(&base).map(|(p, base)| (p.group, *base)));
    for at in (0..shares.len()).rev() {
        let room = shares[at].most().saturating_sub(has[at]);
        let within: Vec<usize> = (0..group.len()).filter(|p| is_in(shares, group[*p].group, at)).collect();
        let wished: u64 = within.iter().map(|p| raises[*p]).sum();
        if wished > room {
            within.into_iter().for_each(|p| raises[p] = part(room, raises[p], wished));
        }
    }
    (0..group.len()).map(|at| if raises[at] == 0 { lowered[at] } else { base[at] + raises[at] }).collect()
}

/// What processes get beyond their limits, for a while.
///
/// A process cannot tell which of its pages others have too, and holds all of them against its limit; here they count once. So where processes
/// share much since a fork, all of them may be at their limits while half of the budget is free. To those that press against their limits is lent
/// what they share. What is shared may become two pages without a fault: so only what lasted counts, it is reckoned anew at each look, and nothing
/// is lent in a group that has more than it may.
///
/// In a family that would cost too much: it would have taken out half of what it has, copied for that, and written compressed memory to the swap areas, before
/// it is lent anything. There all that is shared is lent at once, but for as much as was copied lately (by what the kernel counts of faults): so much may be copied again
/// before engines have taken anything out. A group that has more than it may gets four times as much less.
pub fn lend(groups: &[Bounds], processes: &[Process], sharing: &[Sharing]) -> Vec<u64> {
    let totals = sums(groups, processes.iter().map(|p| (p.group, p.used)));
    let over = |p: &Process| {
        let over =
            (0..groups.len()).filter(|at| is_in(groups, p.group, *at)).map(|at| totals[at].saturating_sub(groups[at].most()));
        over.max().unwrap_or(0)
    };
    let soon: u64 = sharing.iter().filter(|sharing| sharing.of_family).map(|sharing| sharing.copied).sum();
    let lent = |(p, sharing): (&Process, &Sharing)| {
        let full = p.used + sharing.bytes >= p.limit / 4 * 3;
        // With what it was lent the pressure goes: that is no reason to take it back.
        let presses = p.pressure > 0 || sharing.lent > 0;
        match (p.standing == Standing::Engaged && full, sharing.of_family) {
            (true, true) => sharing.bytes.saturating_sub(soon).saturating_sub(over(p).saturating_mul(4)),
            (true, false) if presses && over(p) == 0 => sharing.bytes,
            _ => 0,
        }
    };
    processes.iter().zip(sharing).map(lent).collect()
}

/// What each of `count` processes keeps that have `share` bytes together: half of the share is divided by demand.
fn floor_of(share: u64, count: usize) -> u64 {
    (share / 2 / count.max(1) as u64).clamp(CROWDED_FLOOR, FLOOR)
}

/// The same for each process, where groups within groups have shares. What cannot be swapped out comes on top: a process that is left with less than
/// that and a little does not come on, however long it runs, and would not show by what it has swapped out that it wants to.
fn floors(shares: &[Bounds], group: &[Process]) -> Vec<u64> {
    let fixed = |p: &Process| p.fixed.min(FLOOR);
    let counts = sums(shares, group.iter().map(|p| (p.group, 1)));
    let fixed_sums = sums(shares, group.iter().map(|p| (p.group, fixed(p))));
    let least_in = |p: &Process, at: usize| {
        // All of them together no more than there is.
        let left = shares[at].most().saturating_sub(fixed_sums[at]);
        let beside = floor_of(left, counts[at] as usize).min(left / counts[at].max(1));
        part(fixed_sums[at].min(shares[at].most()), fixed(p), fixed_sums[at]) + beside
    };
    let least = |p: &Process| (0..shares.len()).filter(|at| is_in(shares, p.group, *at)).map(|at| least_in(p, at)).min();
    let least: Vec<u64> = group.iter().map(|p| least(p).unwrap_or(FLOOR).max(CROWDED_FLOOR)).collect();
    // What a family gives up one by one frees nothing. But not so much is kept that others would not have their least.
    let kept_sums = sums(shares, group.iter().map(|p| (p.group, p.kept)));
    let others = sums(shares, group.iter().zip(&least).filter(|(p, _)| p.kept == 0).map(|(p, least)| (p.group, *least)));
    let kept_in = |p: &Process, at: usize| {
        let most = (shares[at].most() / 8 * KEPT_EIGHTHS).min(shares[at].most().saturating_sub(others[at]));
        if kept_sums[at] > most { part(most, p.kept, kept_sums[at]) } else { p.kept }
    };
    let kept = |p: &Process| (0..shares.len()).filter(|at| is_in(shares, p.group, *at)).map(|at| kept_in(p, at)).min();
    group.iter().zip(&least).map(|(p, least)| (*least).max(kept(p).unwrap_or(0))).collect()
}

fn floor(p: &Process, least: u64) -> u64 {
    p.used.min(least)
}

fn targets(shares: &[Bounds], group: &[Process], least: &[u64]) -> Vec<u64> {
    let Some(root) = shares.first().map(Bounds::most) else { return Vec::new() };
    let used: u64 = group.iter().map(|p| p.used).sum();
    let slack = root.saturating_sub(used) / group.len().max(1) as u64;
    let claim = |(p, least): (&Process, &u64)| {
        // Who presses is to have the least there is, also where it has less so far.
        let floor = if p.pressure > 0 { *least } else { floor(p, *least) };
        Claim {
            node: p.group,
            floor,
            used: p.used,
            // Pressure counts for no more than what could come back, however fast one runs: two who are alike have like shares. And for at most
            // the whole share, so that one who reads without end does not starve all others.
            demand: p.used.saturating_sub(floor) + p.pressure.min(p.swapped).min(root) + slack,
        }
    };
    let claims: Vec<Claim> = group.iter().zip(least).map(claim).collect();
    let nodes: Vec<Node> = shares.iter().map(|share| Node { parent: share.parent, cap: share.most(), low: share.low }).collect();
    let given = divide(root, &nodes, &claims);
    // Where not even the floors fit, they are kept all the same.
    given.into_iter().zip(group.iter().zip(least)).map(|(given, (p, least))| given.max(floor(p, *least))).collect()
}

/// `whole * piece / pieces` without overflow; 0 when there are no pieces.
fn part(whole: u64, piece: u64, pieces: u64) -> u64 {
    if pieces == 0 { 0 } else { (whole as u128 * piece as u128 / pieces as u128) as u64 }
}

/// When to look again: before a group can have grown through half of what is free. Where the engaged processes hold their own
/// limits and all others are small and stay so, a slower pulse is enough.
pub fn interval(groups: &[Bounds], processes: &[Process]) -> Duration {
    let of = |p: &Process| (p.group, p.used);
    let totals = sums(groups, processes.iter().map(of));
    let others = sums(groups, processes.iter().filter(|p| p.standing != Standing::Engaged).map(of));
    let grows = processes.iter().any(|p| p.standing == Standing::Watching && p.growth > 0);
    let wait = |((group, total), others): ((&Bounds, &u64), &u64)| {
        let calm = total > others && *others < group.max / 16 && !grows;
        let shortest = if calm { 5_000 } else { 1_000 };
        let micros = group.max.saturating_sub(*total) as u128 / 2 * 1_000_000 / GROWTH_BYTES_PER_S as u128;
        Duration::from_micros((micros.min(50_000) as u64).max(shortest))
    };
    let populated = groups.iter().zip(&totals).zip(&others).filter(|((_, total), _)| **total > 0);
    populated.map(wait).min().unwrap_or(Duration::from_millis(50))
}

/// Follows a rate by its average over a quarter of a second.
pub fn average(previous: u64, rate: u64, elapsed: Duration) -> u64 {
    let kept = (-elapsed.as_secs_f64() / AVERAGED.as_secs_f64()).exp();
    (previous as f64 * kept + rate as f64 * (1.0 - kept)) as u64
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
        Process {
            group: 0,
            standing,
            used: used * MIB,
            pressure: pressure * MIB,
            fixed: 0,
            swapped: 4096 * MIB,
            limit: limit * MIB,
            growth: 0,
            kept: 0,
        }
    }

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
        let tree = [process(Standing::Watching, 200, 0, 0), process(Standing::Beyond, 150, 0, 0)];
        assert_eq!(decide(&whole(512 * MIB), &tree, TICK), Decision::default());
    }

    #[test]
    fn who_asks_is_engaged_whatever_is_free() {
        let tree = [process(Standing::Asking, 0, 0, 0), process(Standing::Watching, 8, 0, 0)];
        let decision = decide(&whole(512 * MIB), &tree, TICK);
        assert_eq!(decision.engage, [0]);
        assert!(decision.limits[0].1 > 400 * MIB, "{:?}", decision.limits);
    }

    #[test]
    fn the_biggest_is_engaged_and_gets_what_the_others_leave() {
        let tree =
            [process(Standing::Watching, 2, 0, 0), process(Standing::Watching, 440, 0, 0), process(Standing::Beyond, 10, 0, 0)];
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
    fn a_small_process_that_grows_past_the_budget_is_engaged_before_it_has() {
        let mut tree = [process(Standing::Engaged, 100, 0, 120), process(Standing::Watching, 2, 0, 0)];
        assert!(decide(&whole(128 * MIB), &tree, TICK).engage.is_empty(), "it does not grow");
        tree[1].growth = 500 * MIB;
        assert!(decide(&whole(128 * MIB), &tree, TICK).engage.is_empty(), "there is room for it");
        tree[0].used = 120 * MIB;
        assert_eq!(decide(&whole(128 * MIB), &tree, TICK).engage, [1]);
        assert_eq!(interval(&whole(128 * MIB), &tree), Duration::from_millis(1));
    }

    #[test]
    fn small_processes_are_engaged_only_in_need() {
        let mut tree = vec![process(Standing::Watching, 2, 0, 0); 60];
        assert!(decide(&whole(128 * MIB), &tree, TICK).engage.is_empty(), "120M of 128M in pieces of 2M");
        tree.extend([process(Standing::Watching, 2, 0, 0); 10]);
        assert!(decide(&whole(128 * MIB), &tree, TICK).engage.len() >= 50, "over the budget");
    }

    /// Processes that only differ in how fast they run come to like shares: none has more demand than what is swapped out of it.
    #[test]
    fn who_runs_fast_has_no_more_for_it() {
        let mut group: Vec<Process> = (0..8).map(|at| process(Standing::Engaged, 4 + at, 100 << at, 4 + at)).collect();
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
        let (least, most) = (group.iter().map(|p| p.limit).min().unwrap(), group.iter().map(|p| p.limit).max().unwrap());
        assert!(least > 9 * MIB && most < 11 * MIB, "{group:?}");
    }

    /// In a crowd each process keeps what cannot be swapped out of it, and something to work with; also one that has come to nothing so far, and has
    /// little swapped out for it.
    #[test]
    fn in_a_crowd_nobody_is_left_with_what_it_cannot_use() {
        let mut group = vec![Process { fixed: 3 * MIB, ..process(Standing::Engaged, 10, 500, 10) }; 32];
        let stuck = Process { fixed: 3 * MIB, swapped: MIB, ..process(Standing::Engaged, 3, 1, 3) };
        group.extend(vec![stuck; 32]);
        for _ in 0..400 {
            let given = limits(&whole(380 * MIB), &group, TICK);
            for (p, limit) in group.iter_mut().zip(given) {
                (p.limit, p.used) = (limit, limit);
            }
        }
        assert!(group.iter().all(|p| p.limit >= 3 * MIB + CROWDED_FLOOR), "{group:?}");
        // Where that is more than there is, they have less: the budget is held.
        let given = limits(&whole(240 * MIB), &group, YIELD_TIME);
        assert!(given.iter().sum::<u64>() <= 241 * MIB && given.iter().all(|limit| *limit > 3 * MIB), "{given:?}");
        // And also where what cannot be swapped out is more than there is.
        let given = limits(&whole(160 * MIB), &group, YIELD_TIME);
        assert!(given.iter().sum::<u64>() <= 161 * MIB && given.iter().all(|limit| *limit > 2 * MIB), "{given:?}");
    }

    #[test]
    fn a_process_with_pressure_wins_memory_from_an_idle_one_and_no_byte_is_given_twice() {
        let mut group = [process(Standing::Engaged, 400, 0, 400), process(Standing::Engaged, 100, 0, 100)];
        let share = 500 * MIB;
        for tick in 0..2000 {
            group[1].pressure = 800 * MIB;
            let given = limits(&whole(share), &group, TICK);
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
        vec![Bounds::budget(budget * MIB), group(0, bounds[0]), group(0, bounds[1]), group(1, bounds[2])]
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
            member(1, process(Standing::Beyond, 5, 0, 0)),
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
        let mut tree = [member(3, process(Standing::Engaged, 200, 0, 200)), member(2, process(Standing::Engaged, 195, 0, 195))];
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
    fn when_nothing_is_left_everybody_keeps_its_floor() {
        let group = [process(Standing::Engaged, 300, 0, 300), process(Standing::Engaged, 3, 0, 100)];
        assert_eq!(limits(&whole(0), &group, TICK), [CROWDED_FLOOR, CROWDED_FLOOR]);
        assert_eq!(
            limits(&whole(16 * MIB), &group, TICK).iter().min(),
            Some(&(3 * MIB)),
            "who uses less than its floor keeps that"
        );
    }

    #[test]
    fn the_next_look_comes_sooner_the_fuller_the_budget() {
        let free = interval(&whole(512 * MIB), &[process(Standing::Watching, 10, 0, 0)]);
        let tight = interval(&whole(512 * MIB), &[process(Standing::Watching, 430, 0, 0)]);
        let full = interval(&whole(512 * MIB), &[process(Standing::Watching, 520, 0, 0)]);
        assert!(free > tight && tight > full);
        assert_eq!(full, Duration::from_millis(1));
        assert_eq!(interval(&whole(512 * MIB), &[process(Standing::Engaged, 510, 0, 0)]), Duration::from_millis(5));
    }

    #[test]
    fn a_rate_rises_at_once_and_falls_within_a_second() {
        assert_eq!(smooth(10, 500, Duration::from_millis(1)), 500);
        assert_eq!(smooth(1000, 0, Duration::from_millis(500)), 500);
        assert_eq!(smooth(1000, 7, Duration::from_secs(3)), 7);
    }

    fn any_group() -> impl Strategy<Value = Vec<Process>> {
        let one = (0u64..2048 * MIB, 0u64..4096 * MIB, prop_oneof![Just(0u64), 1u64..2048 * MIB]).prop_map(
            |(used, pressure, limit)| Process {
                group: 0,
                standing: Standing::Engaged,
                used,
                pressure,
                fixed: 0,
                swapped: 1 << 40,
                limit,
                growth: 0,
                kept: 0,
            },
        );
        proptest::collection::vec(one, 1..12)
    }

    fn any_hierarchy() -> impl Strategy<Value = (Vec<Bounds>, Vec<Process>)> {
        let bound = || prop_oneof![2 => Just(u64::MAX), 2 => 40 * MIB..4096 * MIB];
        let group = (any::<prop::sample::Index>(), bound(), bound(), prop_oneof![2 => Just(0), 1 => 0..1024 * MIB]);
        let groups = (16 * MIB..8192 * MIB, proptest::collection::vec(group, 0..6)).prop_map(|(budget, list)| {
            let mut groups = vec![Bounds::budget(budget)];
            for (parent, max, high, low) in list {
                let parent = parent.index(groups.len());
                groups.push(Bounds { parent, max, high, low });
            }
            groups
        });
        (groups, proptest::collection::vec(any::<prop::sample::Index>(), 12), any_group()).prop_map(|(groups, at, mut tree)| {
            tree.iter_mut().zip(at).for_each(|(p, at)| p.group = at.index(groups.len()));
            (groups, tree)
        })
    }

    #[test]
    fn what_is_shared_is_lent_to_those_that_press() {
        let groups = [Bounds::budget(48 * MIB)];
        let forked = |used, pressure, limit| process(Standing::Engaged, used, pressure, limit);
        let sharing = |bytes: u64, lent: u64| Sharing { bytes: bytes * MIB, lent: lent * MIB, ..Sharing::default() };
        let processes = [forked(16, 10, 8), forked(4, 10, 8), forked(4, 0, 8), forked(4, 0, 8), forked(2, 10, 20)];
        let shared = [sharing(0, 0), sharing(6, 0), sharing(4, 0), sharing(4, 3), sharing(4, 0)];
        // Who has no pressure needs it only if it is what keeps the pressure away; nor does he who is far below his limit.
        assert_eq!(lend(&groups, &processes, &shared), [0, 6 * MIB, 0, 4 * MIB, 0]);
        assert_eq!(lend(&groups, &[forked(40, 10, 40), forked(9, 10, 8)], &[sharing(4, 4); 2]), [0, 0], "more than there is");
    }

    #[test]
    fn a_group_that_is_over_its_bound_is_lent_nothing() {
        let groups = [Bounds::budget(100 * MIB), Bounds { parent: 0, max: 20 * MIB, high: u64::MAX, low: 0 }];
        let inside = Process { group: 1, ..process(Standing::Engaged, 21, 10, 18) };
        let outside = process(Standing::Engaged, 18, 10, 18);
        assert_eq!(lend(&groups, &[inside, outside], &[Sharing { bytes: 8 * MIB, ..Sharing::default() }; 2]), [0, 8 * MIB]);
    }

    #[test]
    fn what_is_shared_counts_when_it_has_lasted_and_goes_at_once() {
        let mut lasting = Lasting::default();
        let mut counted = [0; 60];
        for (at, counts) in counted.iter_mut().enumerate() {
            let bytes = if at < 50 { 100 + at as u64 } else { 20 };
            *counts = lasting.follow(bytes, SETTLES / 10);
        }
        assert_eq!((counted[0], counted[9], counted[19]), (0, 0, 109), "{counted:?}");
        assert!(counted[30..50].iter().all(|counts| *counts >= 110), "{counted:?}");
        assert_eq!(counted[50..], [20; 10]);
    }

    #[test]
    fn in_a_family_what_is_shared_is_lent_at_once() {
        let groups = [Bounds::budget(48 * MIB)];
        let forked = |used, limit| process(Standing::Engaged, used, 0, limit);
        let sharing =
            |bytes: u64, copied: u64| Sharing { bytes: bytes * MIB, copied: copied * MIB, lent: 0, of_family: bytes > 0 };
        let processes = [forked(16, 8), forked(4, 8), forked(2, 20)];
        assert_eq!(lend(&groups, &processes, &[sharing(0, 0), sharing(6, 0), sharing(4, 0)]), [0, 6 * MIB, 0]);
        // What is copied is not lent, also where another does it.
        assert_eq!(lend(&groups, &processes, &[sharing(0, 9), sharing(6, 2), sharing(4, 1)]), [0, 3 * MIB, 0]);
        assert_eq!(lend(&groups, &processes, &[sharing(0, 0), sharing(6, 0), sharing(4, 10)]), [0; 3]);
        assert_eq!(lend(&groups, &[forked(40, 40), forked(9, 8)], &[sharing(4, 0); 2]), [0, 0], "more than there is");
        let (total, bound) = (48 * MIB + 256 * 1024, &groups);
        let over = lend(bound, &[Process { used: total - 9 * MIB, ..forked(0, 40) }, forked(9, 8)], &[sharing(4, 0); 2]);
        assert_eq!(over, [3 * MIB; 2], "a little more than there is");
    }

    #[test]
    fn what_came_lately_is_forgotten_in_time() {
        let mut lately = Lately::default();
        let step = COPIED_AHEAD / 5;
        let seen: Vec<u64> = (0..20).map(|at| lately.add(if at < 5 { 10 } else { 0 }, step)).collect();
        assert_eq!((seen[3], seen[4], seen[19]), (40, 50, 0), "{seen:?}");
        assert!(seen[5..9].iter().all(|bytes| *bytes >= 10), "{seen:?}");
        assert_eq!(lately.add(7, 3 * COPIED_AHEAD), 7);
    }

    #[test]
    fn a_family_keeps_its_part_but_not_everything_is_kept_so() {
        let shares = |mib: u64, kept: u64| {
            let forked =
                |pressure| Process { kept: kept * MIB, swapped: 200 * MIB, ..process(Standing::Engaged, 95, pressure, 98) };
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

    #[test]
    fn in_a_group_that_is_over_its_bound_a_family_is_lent_less() {
        let groups = [Bounds::budget(100 * MIB), Bounds { parent: 0, max: 20 * MIB, high: u64::MAX, low: 0 }];
        let inside = Process { group: 1, ..process(Standing::Engaged, 21, 10, 18) };
        let outside = process(Standing::Engaged, 18, 10, 18);
        assert_eq!(
            lend(&groups, &[inside, outside], &[Sharing { bytes: 8 * MIB, of_family: true, ..Sharing::default() }; 2]),
            [4 * MIB, 8 * MIB]
        );
    }

    proptest! {
        #[test]
        fn in_every_group_looks_settle_under_its_maximum_and_high((groups, tree) in any_hierarchy()) {
            let mut tree = tree;
            for _ in 0..160 {
                for (at, limit) in decide(&groups, &tree, YIELD_TIME).limits {
                    tree[at].limit = limit;
                    tree[at].used = tree[at].used.min(limit);
                }
            }
            for (at, group) in groups.iter().enumerate() {
                let within: Vec<&Process> = tree.iter().filter(|p| is_in(&groups, p.group, at)).collect();
                let sum: u64 = within.iter().map(|p| p.limit).sum();
                let floors = within.len() as u64 * CROWDED_FLOOR;
                prop_assert!(sum <= group.most().max(floors).saturating_add(1), "group {at}: {sum} of {}", group.most());
            }
        }

        #[test]
        fn no_limit_rises_into_what_others_have((groups, tree) in any_hierarchy()) {
            let limits = decide(&groups, &tree, TICK).limits;
            for (at, group) in groups.iter().enumerate() {
                let within = limits.iter().filter(|(p, _)| is_in(&groups, tree[*p].group, at));
                let rises = within.clone().any(|(p, limit)| tree[*p].limit != 0 && *limit > tree[*p].limit.max(tree[*p].used));
                let sum: u64 = within.map(|(p, limit)| (*limit).max(tree[*p].used)).sum();
                prop_assert!(!rises || sum <= group.most(), "group {at}");
            }
        }

        #[test]
        fn limits_exceed_the_share_only_where_floors_or_older_limits_force_it(share in 0u64..8192 * MIB, group in any_group()) {
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
                prop_assert!(*limit >= floor(p, least), "nobody is pushed under its floor");
            }
        }

        #[test]
        fn repeated_looks_settle_under_the_share(share in 200 * MIB..8192 * MIB, group in any_group()) {
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
        fn deciding_never_panics_and_engages_only_over_the_trigger(budget in 16 * MIB..1 << 45, uses in proptest::collection::vec((0u64..1 << 44, 0u8..3), 0..40)) {
            let tree: Vec<Process> = uses.iter().map(|(used, kind)| Process {
                group: 0, standing: [Standing::Watching, Standing::Engaged, Standing::Beyond][*kind as usize], used: *used, pressure: 0, fixed: 0, swapped: 0, limit: 0, growth: 0, kept: 0,
            }).collect();
            let decision = decide(&whole(budget), &tree, TICK);
            let total: u64 = tree.iter().map(|p| p.used).sum();
            prop_assert!(decision.engage.is_empty() || total > trigger(budget));
            prop_assert!(decision.engage.iter().all(|at| tree[*at].standing == Standing::Watching));
            let _ = interval(&whole(budget), &tree);
        }
    }
}
