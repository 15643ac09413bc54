//! What processes that share pages since a fork get beyond their limits. Pure arithmetic.
//!
//! Owns how long what is shared, and what was copied, counts ([`StableMin`], [`RecentSum`]), and
//! the rule of lending ([`cow_credit`]).
//!
//! Invariants
//! 1. What is lent is no more than what a process shares: what it may use by that together with its
//!    limit is still its limit.
//!
//! Locks: none.

use std::time::Duration;

use crate::memctl::policy::{Bounds, Process, Standing, is_in, sums};

/// Pages that were shared for so long will be so a while longer: a program that copies what a fork
/// left it shared does it sooner.
const STABLE_AFTER: Duration = Duration::from_millis(100);
/// The time in which engines take out what a program copies of what a fork left it shared.
const COPY_AHEAD_TIME: Duration = Duration::from_millis(50);

/// A process's pages that others have too, since a fork.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sharing {
    /// What it holds resident beyond what it uses: the parts of shared pages that count for others.
    /// Outside of copy-on-write groups, what [`StableMin`] makes of it.
    pub bytes: u64,
    /// What it was lent so far.
    pub lent: u64,
    /// It is in a copy-on-write group.
    pub in_cow_group: bool,
    /// Bytes of shared pages that were copied for it [`RecentSum`].
    pub copied: u64,
}

/// Follows [`Sharing::bytes`] of a process: what lasts.
#[derive(Clone, Copy, Debug, Default)]
pub struct StableMin {
    before: u64,
    least: u64,
    age: Duration,
}

impl StableMin {
    /// A process shares `bytes` now, `elapsed` after the last time; gives what it shared all the
    /// time for one to two `STABLE_AFTER`.
    pub(crate) fn follow(&mut self, bytes: u64, elapsed: Duration) -> u64 {
        self.least = self.least.min(bytes);
        self.age += elapsed;
        if self.age >= STABLE_AFTER {
            *self = StableMin { before: self.least, least: bytes, age: Duration::ZERO };
        }
        self.before.min(self.least)
    }
}

/// Follows what was copied for a process: that of the last one to two `COPY_AHEAD_TIME`.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecentSum {
    before: u64,
    now: u64,
    age: Duration,
}

impl RecentSum {
    /// `bytes` were copied in the time `elapsed`; gives what was lately, these among it.
    pub fn add(&mut self, bytes: u64, elapsed: Duration) -> u64 {
        self.age += elapsed;
        if self.age >= COPY_AHEAD_TIME {
            *self = RecentSum {
                before: if self.age < 2 * COPY_AHEAD_TIME { self.now } else { 0 },
                now: 0,
                age: Duration::ZERO,
            };
        }
        self.now += bytes;
        self.before + self.now
    }
}

/// What processes get beyond their limits, for a while.
///
/// A process cannot tell which of its pages others have too, and holds all of them against its
/// limit; here they count once. So where processes share much since a fork, all of them may be at
/// their limits while half of the budget is free. To those that press against their limits is lent
/// what they share. What is shared may become two pages without a fault: so only what lasted
/// counts, it is computed again at each look, and nothing is lent in a group that has more than it
/// may.
///
/// In a copy-on-write group that would cost too much: it would have taken out half of what it has,
/// copied for that, and written compressed memory to the swap areas, before it is lent anything.
/// There all that is shared is lent at once, but for as much as was copied lately (by what the
/// kernel counts of faults): so much may be copied again before engines have taken anything out. A
/// group that has more than it may gets four times as much less.
pub(crate) fn cow_credit(
    groups: &[Bounds],
    processes: &[Process],
    sharing: &[Sharing],
) -> Vec<u64> {
    let totals = sums(groups, processes.iter().map(|p| (p.group, p.used)));
    let over = |p: &Process| {
        let over = (0..groups.len())
            .filter(|at| is_in(groups, p.group, *at))
            .map(|at| totals[at].saturating_sub(groups[at].most()));
        over.max().unwrap_or(0)
    };
    let soon: u64 =
        sharing.iter().filter(|sharing| sharing.in_cow_group).map(|sharing| sharing.copied).sum();
    let lent = |(p, sharing): (&Process, &Sharing)| {
        let full = p.used + sharing.bytes >= p.limit / 4 * 3;
        // With what it was lent the pressure goes: that is no reason to take it back.
        let presses = p.pressure > 0 || sharing.lent > 0;
        match (p.standing == Standing::Engaged && full, sharing.in_cow_group) {
            (true, true) => {
                sharing.bytes.saturating_sub(soon).saturating_sub(over(p).saturating_mul(4))
            }
            (true, false) if presses && over(p) == 0 => sharing.bytes,
            _ => 0,
        }
    };
    processes.iter().zip(sharing).map(lent).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memctl::policy::testing::{MIB, process};

    #[test]
    fn what_is_shared_is_lent_to_those_that_press() {
        let groups = [Bounds::budget(48 * MIB)];
        let forked = |used, pressure, limit| process(Standing::Engaged, used, pressure, limit);
        let sharing = |bytes: u64, lent: u64| Sharing {
            bytes: bytes * MIB,
            lent: lent * MIB,
            ..Sharing::default()
        };
        let processes = [
            forked(16, 10, 8),
            forked(4, 10, 8),
            forked(4, 0, 8),
            forked(4, 0, 8),
            forked(2, 10, 20),
        ];
        let shared = [sharing(0, 0), sharing(6, 0), sharing(4, 0), sharing(4, 3), sharing(4, 0)];
        // A process without pressure needs it only if it is what keeps the pressure away; nor does
        // one that is far below its limit.
        assert_eq!(cow_credit(&groups, &processes, &shared), [0, 6 * MIB, 0, 4 * MIB, 0]);
        assert_eq!(
            cow_credit(&groups, &[forked(40, 10, 40), forked(9, 10, 8)], &[sharing(4, 4); 2]),
            [0, 0],
            "more than there is"
        );
    }

    #[test]
    fn a_group_that_is_over_its_bound_is_lent_nothing() {
        let groups = [
            Bounds::budget(100 * MIB),
            Bounds { parent: 0, max: 20 * MIB, high: u64::MAX, low: 0 },
        ];
        let inside = Process { group: 1, ..process(Standing::Engaged, 21, 10, 18) };
        let outside = process(Standing::Engaged, 18, 10, 18);
        assert_eq!(
            cow_credit(
                &groups,
                &[inside, outside],
                &[Sharing { bytes: 8 * MIB, ..Sharing::default() }; 2]
            ),
            [0, 8 * MIB]
        );
    }

    #[test]
    fn what_is_shared_counts_when_it_has_lasted_and_goes_at_once() {
        let mut stable = StableMin::default();
        let mut counted = [0; 60];
        for (at, counts) in counted.iter_mut().enumerate() {
            let bytes = if at < 50 { 100 + at as u64 } else { 20 };
            *counts = stable.follow(bytes, STABLE_AFTER / 10);
        }
        assert_eq!((counted[0], counted[9], counted[19]), (0, 0, 109), "{counted:?}");
        assert!(counted[30..50].iter().all(|counts| *counts >= 110), "{counted:?}");
        assert_eq!(counted[50..], [20; 10]);
    }

    #[test]
    fn in_a_cow_group_shared_memory_is_lent_at_once() {
        let groups = [Bounds::budget(48 * MIB)];
        let forked = |used, limit| process(Standing::Engaged, used, 0, limit);
        let sharing = |bytes: u64, copied: u64| Sharing {
            bytes: bytes * MIB,
            copied: copied * MIB,
            lent: 0,
            in_cow_group: bytes > 0,
        };
        let processes = [forked(16, 8), forked(4, 8), forked(2, 20)];
        assert_eq!(
            cow_credit(&groups, &processes, &[sharing(0, 0), sharing(6, 0), sharing(4, 0)]),
            [0, 6 * MIB, 0]
        );
        // What is copied is not lent, also where another does it.
        assert_eq!(
            cow_credit(&groups, &processes, &[sharing(0, 9), sharing(6, 2), sharing(4, 1)]),
            [0, 3 * MIB, 0]
        );
        assert_eq!(
            cow_credit(&groups, &processes, &[sharing(0, 0), sharing(6, 0), sharing(4, 10)]),
            [0; 3]
        );
        assert_eq!(
            cow_credit(&groups, &[forked(40, 40), forked(9, 8)], &[sharing(4, 0); 2]),
            [0, 0],
            "more than there is"
        );
        let (total, bound) = (48 * MIB + 256 * 1024, &groups);
        let over = cow_credit(
            bound,
            &[Process { used: total - 9 * MIB, ..forked(0, 40) }, forked(9, 8)],
            &[sharing(4, 0); 2],
        );
        assert_eq!(over, [3 * MIB; 2], "a little more than there is");
    }

    #[test]
    fn what_came_lately_is_forgotten_in_time() {
        let mut lately = RecentSum::default();
        let step = COPY_AHEAD_TIME / 5;
        let seen: Vec<u64> =
            (0..20).map(|at| lately.add(if at < 5 { 10 } else { 0 }, step)).collect();
        assert_eq!((seen[3], seen[4], seen[19]), (40, 50, 0), "{seen:?}");
        assert!(seen[5..9].iter().all(|bytes| *bytes >= 10), "{seen:?}");
        assert_eq!(lately.add(7, 3 * COPY_AHEAD_TIME), 7);
    }

    #[test]
    fn in_a_group_over_its_bound_a_cow_group_is_lent_less() {
        let groups = [
            Bounds::budget(100 * MIB),
            Bounds { parent: 0, max: 20 * MIB, high: u64::MAX, low: 0 },
        ];
        let inside = Process { group: 1, ..process(Standing::Engaged, 21, 10, 18) };
        let outside = process(Standing::Engaged, 18, 10, 18);
        assert_eq!(
            cow_credit(
                &groups,
                &[inside, outside],
                &[Sharing { bytes: 8 * MIB, in_cow_group: true, ..Sharing::default() }; 2]
            ),
            [4 * MIB, 8 * MIB]
        );
    }
}
