//! Taking memory from groups that do not need it, before another one does.
//!
//! A group is idle when for a given time it has faulted back fewer pages a second than a bound, and
//! its threads have waited for memory less than a bound: few faults from a slow device cost more
//! than many from compressed memory. Then its bound sinks slowly under what it uses, until it does
//! fault back more: that is its pressure, and with it the bound is gone and the waiting begins
//! again. So a group ends up with what it works with, and what it has only once touched goes out.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use swaptide_ipc::GroupIndex;

use crate::cgroup::tree::GroupTree;

/// When groups are thought to be idle and lose memory gradually.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleReclaim {
    /// A group that faults less often than this for so long is idle.
    pub after_s: u32,
    /// Pages a second that a group may have refaulted.
    pub refaults: u32,
    /// Milliseconds of a second in which a group's threads may have waited for memory.
    pub stall_ms: u32,
}

/// How often groups are looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Of what an idle group uses, this part goes at each look.
const STEP_DIVISOR: u64 = 32;
/// No group is made smaller than this.
const MIN_GROUP_BYTES: u64 = 8 << 20;

struct IdleGroup {
    refaults: u64,
    stalled_s: f64,
    quiet_since: Instant,
    bound: Option<u64>,
}

/// Groups whose bound sinks while they refault little.
#[derive(Default)]
pub struct IdleGroups {
    rule: Option<IdleReclaim>,
    looked: Option<Instant>,
    groups: BTreeMap<GroupIndex, IdleGroup>,
}

impl IdleGroups {
    /// Sets from when on memory is taken out that is not used; `None`: never.
    pub(crate) fn set_rule(&mut self, rule: Option<IdleReclaim>) {
        if self.rule != rule {
            (self.rule, self.looked) = (rule, None);
            self.groups.clear();
        }
    }

    /// The most that a group may have for now.
    pub(crate) fn bound(&self, group: GroupIndex) -> Option<u64> {
        self.groups.get(&group)?.bound
    }

    /// A group is no more.
    pub(crate) fn forget(&mut self, group: GroupIndex) {
        self.groups.remove(&group);
    }

    /// A look at all groups, if it is time.
    pub fn look(&mut self, groups: &GroupTree) {
        let Some(rule) = self.rule else { return };
        let elapsed = match self.looked {
            Some(looked) if looked.elapsed() < LOOK_INTERVAL => return,
            Some(looked) => looked.elapsed(),
            None => LOOK_INTERVAL,
        };
        self.looked = Some(Instant::now());
        self.groups.retain(|index, _| groups.get(*index).is_some());
        // The root is all groups: what it uses is the budget's matter.
        for (index, _) in groups.iter().filter(|(index, _)| *index != GroupIndex::ROOT) {
            let usage = groups.usage(index);
            let stalled_s = groups.pressure(index).total_s();
            let new = IdleGroup {
                refaults: usage.refaults,
                stalled_s,
                quiet_since: Instant::now(),
                bound: None,
            };
            let idler = self.groups.entry(index).or_insert(new);
            // Of those that ended, what they had faulted back is gone from the sum.
            let faulted = usage
                .refaults
                .saturating_sub(std::mem::replace(&mut idler.refaults, usage.refaults));
            let waited_s = stalled_s - std::mem::replace(&mut idler.stalled_s, stalled_s);
            let presses = faulted as f64 > f64::from(rule.refaults) * elapsed.as_secs_f64()
                || waited_s > f64::from(rule.stall_ms) / 1000.0 * elapsed.as_secs_f64();
            if presses {
                (idler.quiet_since, idler.bound) = (Instant::now(), None);
            } else if usage.ram > MIN_GROUP_BYTES
                && idler.quiet_since.elapsed() >= Duration::from_secs(rule.after_s.into())
            {
                let used = idler.bound.map_or(usage.ram, |bound| bound.min(usage.ram));
                idler.bound = Some((used - used / STEP_DIVISOR).max(MIN_GROUP_BYTES));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::psi::TimeShare;
    use crate::cgroup::tree::{GroupPath, GroupUsage};
    use crate::testing::segment;

    #[test]
    fn an_idle_group_shrinks_until_it_faults_back() {
        let mut groups = GroupTree::new(segment(), 1 << 30);
        let index = groups.ensure(&GroupPath::parse("/idle").expect("path"), 0).expect("group");
        let mut idlers = IdleGroups::default();
        let stall_ms = 10;
        let stalled = std::cell::Cell::new(TimeShare::default());
        let mut look = |ram: u64, refaults: u64, idlers: &mut IdleGroups| {
            let usage =
                GroupUsage { ram, refaults, stalled: stalled.get(), ..GroupUsage::default() };
            groups.account(&BTreeMap::from([(index, usage)]), LOOK_INTERVAL, |_| false);
            idlers.looked = Instant::now().checked_sub(LOOK_INTERVAL);
            idlers.look(&groups);
            idlers.bound(index)
        };
        let mib = 1 << 20;
        assert_eq!(look(64 * mib, 0, &mut idlers), None, "without a rule");
        idlers.set_rule(Some(IdleReclaim { after_s: 0, refaults: 10, stall_ms }));
        assert_eq!(look(64 * mib, 0, &mut idlers), Some(62 * mib));
        assert!(look(62 * mib, 5, &mut idlers).is_some_and(|bound| bound < 61 * mib));
        assert_eq!(look(60 * mib, 500, &mut idlers), None, "it wants its pages back");
        assert!(look(60 * mib, 505, &mut idlers).is_some());
        stalled.set(TimeShare::of(20, Duration::from_millis(1)));
        assert_eq!(look(60 * mib, 505, &mut idlers), None, "few pages, and long waits for them");
        stalled.set(TimeShare::default());
        for _ in 0..200 {
            look(9 * mib, 500, &mut idlers);
        }
        assert_eq!(look(9 * mib, 500, &mut idlers), Some(MIN_GROUP_BYTES));
        assert_eq!(idlers.bound(GroupIndex::ROOT), None);
        idlers.set_rule(Some(IdleReclaim { after_s: 3600, refaults: 10, stall_ms }));
        assert_eq!(look(64 * mib, 500, &mut idlers), None, "not for long enough");
    }
}
