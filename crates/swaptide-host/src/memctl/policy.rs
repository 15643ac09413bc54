//! How a budget is shared among the processes of groups. Pure arithmetic: what the processes use
//! goes in, what to do comes out.
//!
//! Owns the policy and nothing else. The concepts:
//! - the *working set* of a process is what it has shown to work on: pages came back that would
//!   have stayed with more memory;
//! - the *use* of a process is its resident anonymous memory, the engine's own included;
//! - the *share* of a group is what its maximum leaves for the engaged processes in it when all
//!   others have theirs; the root's maximum is the budget;
//! - the *pressure* of a process is how many bytes a second it faults back, or swaps out because
//!   others come (not because its limit is lowered), or the part of what is swapped out that
//!   corresponds to the part of the time in which its threads wait for it, whichever is more; as
//!   far as that much is swapped out, it is what it would use if it could.
//!
//! Invariants
//! 1. Nothing of a group is engaged while its use, and that of all above it, is under `trigger`,
//!    but for a process that grows so fast that it would be past the budget by then.
//! 2. The limits in a group together exceed its share only where the floors do (`FLOOR_BYTES`),
//!    or where limits that were given before are still being lowered and the use is not over the
//!    share.
//! 3. Above the floor a limit is raised only into room that no other process has, in any group
//!    above: neither as limit nor as use.
//! 4. `high` lowers limits gradually and never at once; no more is given than it permits.
//! 5. A process of a *copy-on-write group* (processes that share compressed memory since a fork)
//!    keeps its part of that, as far as an eighth of what there is remains: what it gave up of it,
//!    the others still had.
//!
//! Locks: none.

use std::time::Duration;

use swaptide_ipc::MAX_GROWTH_BYTES_PER_S;

use crate::memctl::hierarchy::{Claim, Node, divide};

mod cow_credit;

pub(crate) use cow_credit::{RecentSum, Sharing, StableMin, cow_credit};

/// What an engaged process keeps whatever happens, if it uses as much, on top of what cannot be
/// swapped out ([`Process::fixed`], so far as it is no more than this): with less, faults alone
/// would fill its time.
pub(crate) const FLOOR_BYTES: u64 = 8 << 20;
/// The same where too many processes share the budget for each of them to have that.
const CROWDED_FLOOR_BYTES: u64 = 2 << 20;
/// A process smaller than this is not worth managing.
const MIN_MANAGED_BYTES: u64 = 4 << 20;
/// The same once the budget is exceeded.
const MIN_MANAGED_BYTES_OVER_BUDGET: u64 = 1 << 20;
/// A process with this part of a budget, and these bytes, is worth managing while others want as
/// much back. (An engine has two or three megabytes.)
const MUCH_DIVISOR: u64 = 16;
const MUCH_BYTES: u64 = 16 << 20;
/// The time that a process may take from being engaged until faults hold it; and where its engine
/// has to share the CPUs with the threads that fill its memory.
const ENGAGE_TIME: Duration = Duration::from_millis(20);
const SLOW_ENGAGE_TIME: Duration = Duration::from_millis(50);
/// Between two looks, for a rate by which a process is managed early.
const MIN_RATE_TIME: Duration = Duration::from_millis(1);
/// What cannot be managed and grows no faster than this is looked at no more often for it.
const STEADY_GROWTH_BYTES_PER_S: u64 = 16 << 20;
/// The time over which the pressure of processes of one copy-on-write group is averaged: each has
/// moments at which it wants much.
const PRESSURE_WINDOW: Duration = Duration::from_millis(250);
/// The room that an engine keeps within a small limit.
const ENGINE_ROOM_BYTES: u64 = 1 << 20;
/// And this part of a larger one.
const ENGINE_ROOM_DIVISOR: u64 = 32;
/// This part of its use a process may grow by, and by what its pressure is, while one wants memory
/// back.
const GROWTH_DIVISOR: u64 = 4;
/// One does whose pressure is more than this part of its use.
const WANT_DIVISOR: u64 = 1024;
/// The time in which a limit sinks by an eighth at most, while the budget is kept.
const YIELD_TIME: Duration = Duration::from_millis(50);
/// Eighths of a group's memory that copy-on-write groups keep.
const COW_GROUP_KEEPS_EIGHTHS: u64 = 7;

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
    Unmanaged,
}

/// One process, as the budget sees it.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// The number of its group.
    pub group: usize,
    /// Whether it can be managed, and is.
    pub standing: Standing,
    /// Resident anonymous memory in bytes.
    pub used: u64,
    /// Bytes a second swapped out and refaulted, smoothed; or what is swapped out times the part of
    /// the time in which its threads wait.
    pub pressure: u64,
    /// Bytes of its use that cannot be swapped out: the engine's own, and what is not under
    /// management.
    pub fixed: u64,
    /// Bytes of it that are swapped out: no pressure can make it use more than these besides.
    pub swapped: u64,
    /// Its limit so far; 0 where it has none.
    pub limit: u64,
    /// Bytes a second by which it has grown since the last look, while it is not managed.
    pub growth: u64,
    /// Its engine runs before its other threads.
    pub engine_goes_first: bool,
    /// Bytes that it keeps under any pressure, for its copy-on-write group.
    pub kept: u64,
    /// Bytes that it has shown to work on, at most.
    pub workingset: u64,
}

/// What to do now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Decision {
    /// Numbers of the processes to engage.
    pub engage: Vec<usize>,
    /// Limits of the engaged processes, those in `engage` among them.
    pub limits: Vec<(usize, u64)>,
    /// What each of these would have if everything were divided at once, in the same
    /// order.
    pub fair: Vec<u64>,
    /// Groups that get less than is kept for them.
    pub starved: Vec<usize>,
}

/// The use of the tree at which managing begins: late, for a program within its budget pays
/// nothing; early enough that the engine is at work before the budget is full.
fn trigger(budget: u64) -> u64 {
    if budget == u64::MAX {
        return budget;
    }
    (budget / 100 * 85).saturating_sub(8 << 20).max(budget / 2)
}

/// True if a group uses so much that its processes are managed.
pub(crate) fn is_near(groups: &[Bounds], processes: &[Process]) -> bool {
    let totals = sums(groups, processes.iter().map(|p| (p.group, p.used)));
    groups.iter().zip(totals).any(|(group, total)| total > trigger(group.most()))
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

/// Which processes to engage, and the share of each; `elapsed` is the time since the last decision.
pub(crate) fn decide(groups: &[Bounds], processes: &[Process], elapsed: Duration) -> Decision {
    let totals = sums(groups, processes.iter().map(|p| (p.group, p.used)));
    let mut engage: Vec<usize> =
        (0..processes.len()).filter(|at| processes[*at].standing == Standing::Asking).collect();
    for (at, (group, total)) in groups.iter().zip(&totals).enumerate() {
        let is_within = |p: &usize| is_in(groups, processes[*p].group, at);
        let chosen = if *total > trigger(group.most()) {
            let within: Vec<usize> = (0..processes.len()).filter(is_within).collect();
            choose(group.most(), *total, processes, &within)
        } else {
            // What it has grown by in less is no rate.
            let is_urgent = |p: &usize| {
                elapsed >= MIN_RATE_TIME && is_urgent(group.most(), *total, &processes[*p])
            };
            (0..processes.len()).filter(is_urgent).filter(is_within).collect()
        };
        engage.extend(chosen.into_iter().filter(|p| !engage.contains(p)).collect::<Vec<_>>());
    }
    let is_managed =
        |at: &usize| processes[*at].standing == Standing::Engaged || engage.contains(at);
    let managed: Vec<usize> = (0..processes.len()).filter(is_managed).collect();
    let others = sums(
        groups,
        (0..processes.len())
            .filter(|at| !is_managed(at))
            .map(|at| (processes[at].group, processes[at].used)),
    );
    let shares: Vec<Bounds> =
        groups.iter().zip(&others).map(|(group, others)| share(group, *others)).collect();
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

/// What of a group's bounds is left for the engaged processes. A hundredth stays back: what a
/// process takes between two looks of its reclaim.
fn share(group: &Bounds, others: u64) -> Bounds {
    let left = |bound: u64| match bound {
        u64::MAX => u64::MAX,
        bound => (bound - bound / 100).saturating_sub(others),
    };
    Bounds {
        parent: group.parent,
        max: left(group.max),
        high: left(group.high),
        low: group.low.saturating_sub(others),
    }
}

/// True for a process that would have grown past the budget by the time it is managed.
fn is_urgent(budget: u64, total: u64, p: &Process) -> bool {
    let time = if p.engine_goes_first { ENGAGE_TIME } else { SLOW_ENGAGE_TIME };
    let ahead = || part(p.growth, time.as_micros() as u64, 1_000_000);
    p.standing == Standing::Watching
        && p.used >= MIN_MANAGED_BYTES_OVER_BUDGET
        && p.growth > 0
        && total.saturating_add(ahead()) > budget
}

/// Of the processes `within` a group that may have `budget` and uses `total`: those that grow too
/// fast to wait; those bigger by a quarter than the engaged ones are on average, for these would
/// pay for them; those whose cold pages would be worth something to engaged ones that want memory
/// back and have much swapped out; and the biggest, until those that are engaged cover four fifths
/// of the use.
fn choose(budget: u64, total: u64, processes: &[Process], within: &[usize]) -> Vec<usize> {
    let worth = if total > budget { MIN_MANAGED_BYTES_OVER_BUDGET } else { MIN_MANAGED_BYTES };
    let used = |standing: Standing| {
        let those = within.iter().filter(move |at| processes[**at].standing == standing);
        those.map(|at| (*at, processes[*at].used))
    };
    let mut covered: u64 = used(Standing::Engaged).map(|(_, used)| used).sum();
    let average = covered.checked_div(used(Standing::Engaged).count() as u64).unwrap_or(u64::MAX);
    let mut candidates: Vec<usize> =
        used(Standing::Watching).filter(|(_, used)| *used >= worth).map(|(at, _)| at).collect();
    candidates.sort_by_key(|at| std::cmp::Reverse(processes[*at].used));
    let enough = total / 5 * 4;
    let mut engage: Vec<usize> =
        within.iter().copied().filter(|at| is_urgent(budget, total, &processes[*at])).collect();
    covered += engage.iter().map(|at| processes[*at].used).sum::<u64>();
    candidates.retain(|at| !engage.contains(at));
    let wanting = used(Standing::Engaged).filter(|(at, _)| wants(&processes[*at]));
    let wanted: u64 = wanting.map(|(at, _)| processes[at].swapped).sum();
    let much = (budget / MUCH_DIVISOR).max(MUCH_BYTES);
    let most = match wanted >= much {
        true => much.min(average.saturating_add(average / 4)),
        false => average.saturating_add(average / 4),
    };
    engage.extend(candidates.into_iter().take_while(|at| {
        let wanted = covered < enough || processes[*at].used > most;
        covered += processes[*at].used;
        wanted
    }));
    engage
}

/// Limits of the engaged processes on their way to `targets`; `shares` are what these may have in
/// each group, `least` is what no process goes below.
///
/// The demand of a process is what it uses, what its pressure wants back, and an equal part of what
/// is free (where one wants memory back, no more than a quarter of its use and its pressure).
/// Memory goes by working set and demand ([`divide`]). A process without either keeps what it has
/// until another one needs it, and then yields gradually: no more than an eighth in [`YIELD_TIME`],
/// so that a process which only rested is not empty when it wakes.
fn approach(
    shares: &[Bounds],
    group: &[Process],
    least: &[u64],
    targets: &[u64],
    elapsed: Duration,
) -> Vec<u64> {
    let used = sums(shares, group.iter().map(|p| (p.group, p.used)));
    // Two parts in a hundred are the play of counters and of reclaim, not a breach.
    let over: Vec<bool> = shares
        .iter()
        .zip(&used)
        .map(|(share, used)| *used > share.max.saturating_add(share.max / 50))
        .collect();
    let in_breach =
        |p: &Process| (0..shares.len()).any(|at| over[at] && is_in(shares, p.group, at));
    let breaches: Vec<bool> = group.iter().map(in_breach).collect();
    let lowered: Vec<u64> = (0..group.len())
        .map(|at| {
            let (p, target) = (&group[at], targets[at]);
            if breaches[at] {
                return if p.limit == 0 {
                    target
                } else {
                    target.min(p.limit).max(floor(p, least[at]))
                };
            }
            let old = if p.limit == 0 { p.used } else { p.limit };
            let step = part(
                old / 8,
                elapsed.min(YIELD_TIME).as_micros() as u64,
                YIELD_TIME.as_micros() as u64,
            );
            target.max(old - step).min(old).max(floor(p, least[at]))
        })
        .collect();
    let base: Vec<u64> = group.iter().zip(&lowered).map(|(p, limit)| p.used.max(*limit)).collect();
    let mut raises: Vec<u64> = (0..group.len())
        .map(|at| if breaches[at] { 0 } else { targets[at].saturating_sub(base[at]) })
        .collect();
    let has = sums(shares, group.iter().zip(&base).map(|(p, base)| (p.group, *base)));
    for at in (0..shares.len()).rev() {
        let room = shares[at].most().saturating_sub(has[at]);
        let within: Vec<usize> =
            (0..group.len()).filter(|p| is_in(shares, group[*p].group, at)).collect();
        let wished: u64 = within.iter().map(|p| raises[*p]).sum();
        if wished > room {
            within.into_iter().for_each(|p| raises[p] = part(room, raises[p], wished));
        }
    }
    (0..group.len())
        .map(|at| if raises[at] == 0 { lowered[at] } else { base[at] + raises[at] })
        .collect()
}

/// What each of `count` processes keeps that have `share` bytes together: half of the share is
/// divided by demand.
fn floor_of(share: u64, count: usize) -> u64 {
    (share / 2 / count.max(1) as u64).clamp(CROWDED_FLOOR_BYTES, FLOOR_BYTES)
}

/// The same for each process, where groups within groups have shares. What cannot be swapped out
/// comes on top: a process that is left with less than that and a little does not come on, however
/// long it runs, and would not show by what it has swapped out that it wants to.
fn floors(shares: &[Bounds], group: &[Process]) -> Vec<u64> {
    let fixed = |p: &Process| p.fixed.min(FLOOR_BYTES);
    let counts = sums(shares, group.iter().map(|p| (p.group, 1)));
    let fixed_sums = sums(shares, group.iter().map(|p| (p.group, fixed(p))));
    let least_in = |p: &Process, at: usize| {
        // All of them together no more than there is.
        let left = shares[at].most().saturating_sub(fixed_sums[at]);
        let spare = floor_of(left, counts[at] as usize).min(left / counts[at].max(1));
        part(fixed_sums[at].min(shares[at].most()), fixed(p), fixed_sums[at]) + spare
    };
    let least = |p: &Process| {
        (0..shares.len()).filter(|at| is_in(shares, p.group, *at)).map(|at| least_in(p, at)).min()
    };
    let least: Vec<u64> =
        group.iter().map(|p| least(p).unwrap_or(FLOOR_BYTES).max(CROWDED_FLOOR_BYTES)).collect();
    // What a copy-on-write group gives up one by one frees nothing. But not so much is kept that
    // others would not have their least.
    let kept_sums = sums(shares, group.iter().map(|p| (p.group, p.kept)));
    let others = sums(
        shares,
        group.iter().zip(&least).filter(|(p, _)| p.kept == 0).map(|(p, least)| (p.group, *least)),
    );
    let kept_in = |p: &Process, at: usize| {
        let most = (shares[at].most() / 8 * COW_GROUP_KEEPS_EIGHTHS)
            .min(shares[at].most().saturating_sub(others[at]));
        if kept_sums[at] > most { part(most, p.kept, kept_sums[at]) } else { p.kept }
    };
    let kept = |p: &Process| {
        (0..shares.len()).filter(|at| is_in(shares, p.group, *at)).map(|at| kept_in(p, at)).min()
    };
    group.iter().zip(&least).map(|(p, least)| (*least).max(kept(p).unwrap_or(0))).collect()
}

/// The limit by which a process can use `bytes`.
pub(crate) fn with_engine_room(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / ENGINE_ROOM_DIVISOR).saturating_add(ENGINE_ROOM_BYTES)
}

/// What a process without pressure keeps, of the least: what it uses, and the room that its engine
/// keeps free, or its limit would sink with its use, and its use with its limit.
fn floor(p: &Process, least: u64) -> u64 {
    p.used.saturating_add(ENGINE_ROOM_BYTES.min(p.used)).min(least)
}

/// True for a process that wants memory back, and not just a page now and then.
fn wants(p: &Process) -> bool {
    p.pressure > p.used / WANT_DIVISOR
}

fn targets(shares: &[Bounds], group: &[Process], least: &[u64]) -> Vec<u64> {
    let Some(root) = shares.first().map(Bounds::most) else { return Vec::new() };
    let used: u64 = group.iter().map(|p| p.used).sum();
    let slack = root.saturating_sub(used) / group.len().max(1) as u64;
    // What is free is for those that want memory back, where one does that could have it; the
    // others have room to grow until it is seen that they do.
    let in_groups = sums(shares, group.iter().map(|p| (p.group, p.used)));
    let has_room = |p: &Process| {
        let full =
            |at: usize| in_groups[at].saturating_add(in_groups[at] / 16) >= shares[at].most();
        !(1..shares.len()).any(|at| is_in(shares, p.group, at) && full(at))
    };
    let is_wanted = group.iter().any(|p| wants(p) && has_room(p));
    let slack = |p: &Process| match is_wanted {
        true => slack.min((p.used / GROWTH_DIVISOR).saturating_add(p.pressure)),
        false => slack,
    };
    let claim = |(p, least): (&Process, &u64)| {
        // A process with pressure is to have the least there is, also where it has less so far;
        // but no more than it could use, and a step: it may lack what it has not had yet.
        let back = if p.pressure > 0 { p.swapped.max(ENGINE_ROOM_BYTES) } else { 0 };
        let floor = floor(p, *least).saturating_add(back).min(*least);
        Claim {
            node: p.group,
            floor,
            used: p.used,
            // Pressure counts for no more than what could come back, however fast one runs: two
            // that are alike have like shares. And for at most the whole share, so that one that
            // reads without end does not starve all others.
            demand: p.used.saturating_sub(floor) + p.pressure.min(p.swapped).min(root) + slack(p),
            workingset: p.workingset.saturating_sub(floor),
        }
    };
    let claims: Vec<Claim> = group.iter().zip(least).map(claim).collect();
    let nodes: Vec<Node> = shares
        .iter()
        .map(|share| Node { parent: share.parent, cap: share.most(), low: share.low })
        .collect();
    let given = divide(root, &nodes, &claims);
    // Where not even the floors fit, they are kept all the same.
    given
        .into_iter()
        .zip(group.iter().zip(least))
        .map(|(given, (p, least))| given.max(floor(p, *least)))
        .collect()
}

/// `whole * piece / pieces` without overflow; 0 when there are no pieces.
fn part(whole: u64, piece: u64, pieces: u64) -> u64 {
    if pieces == 0 { 0 } else { (whole as u128 * piece as u128 / pieces as u128) as u64 }
}

/// When to look again: before a group can have grown through half of what is free. Where the
/// engaged processes hold their own limits and all others are small and stay so, a slower pulse is
/// enough; a still slower one where there are no others and all keep to their limits.
pub fn interval(groups: &[Bounds], processes: &[Process]) -> Duration {
    let of = |p: &Process| (p.group, p.used);
    let totals = sums(groups, processes.iter().map(of));
    let others = sums(groups, processes.iter().filter(|p| p.standing != Standing::Engaged).map(of));
    let grows = processes.iter().any(|p| {
        let unmanaged = p.standing == Standing::Unmanaged && p.growth > STEADY_GROWTH_BYTES_PER_S;
        unmanaged || p.standing == Standing::Watching && p.growth > 0
    });
    let keeps = |p: &Process| p.limit > 0 && p.used <= p.limit.saturating_add(p.limit / 16);
    let is_kept = processes.iter().all(|p| p.used == 0 || keeps(p));
    let wait = |((group, total), others): ((&Bounds, &u64), &u64)| {
        let steady = total > others && *others < group.max / 16 && !grows;
        let shortest = match (steady, *others == 0 && is_kept) {
            (true, true) => 10_000,
            (true, false) => 5_000,
            (false, _) => 1_000,
        };
        let micros = group.max.saturating_sub(*total) as u128 / 2 * 1_000_000
            / MAX_GROWTH_BYTES_PER_S as u128;
        Duration::from_micros((micros.min(50_000) as u64).max(shortest))
    };
    let populated = groups.iter().zip(&totals).zip(&others).filter(|((_, total), _)| **total > 0);
    populated.map(wait).min().unwrap_or(Duration::from_millis(50))
}

/// Follows a rate by its average over a quarter of a second.
pub(crate) fn average(previous: u64, rate: u64, elapsed: Duration) -> u64 {
    let kept = (-elapsed.as_secs_f64() / PRESSURE_WINDOW.as_secs_f64()).exp();
    (previous as f64 * kept + rate as f64 * (1.0 - kept)) as u64
}

/// Follows a rate: up at once, down over a second.
pub(crate) fn smooth(previous: u64, rate: u64, elapsed: Duration) -> u64 {
    if rate >= previous {
        return rate;
    }
    let kept = (1.0 - elapsed.as_secs_f64()).max(0.0);
    rate + ((previous - rate) as f64 * kept) as u64
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
