//! Taking memory from groups on demand.
//!
//! While a group has a reclaim request, its limits sink towards a goal, whatever is kept for it. It
//! ends when so much went out as was asked for, or when nothing more goes out.

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use swaptide_ipc::GroupIndex;

use crate::cgroup::tree::GroupTree;

/// When nothing has gone out for so long, nothing will.
const NO_PROGRESS_TIMEOUT: Duration = Duration::from_secs(3);
/// The interval between checks while something is under way.
const PROGRESS_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How often is looked at the most, in any case.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReclaimOutcome {
    /// Bytes that went out.
    pub bytes: u64,
    /// True if that is what was asked for.
    pub enough: bool,
}

struct ReclaimRequest {
    from: u64,
    goal: u64,
    least: u64,
    since: Instant,
    done: Sender<ReclaimOutcome>,
}

/// The reclaims that `ctl` has asked for, by group.
#[derive(Default)]
pub struct ReclaimRequests(BTreeMap<GroupIndex, ReclaimRequest>);

impl ReclaimRequests {
    /// Begins; one that is under way in the same group ends with what it has.
    pub fn begin(
        &mut self,
        group: GroupIndex,
        bytes: u64,
        done: Sender<ReclaimOutcome>,
        groups: &GroupTree,
    ) {
        let used = groups.usage(group).ram;
        let request = ReclaimRequest {
            from: used,
            goal: used.saturating_sub(bytes),
            least: used,
            since: Instant::now(),
            done,
        };
        if let Some(old) = self.0.insert(group, request) {
            old.end(used);
        }
    }

    /// The most that a group may have for now.
    pub(crate) fn bound(&self, group: GroupIndex) -> Option<u64> {
        // Limits end a little above what is used: the goal is reached from a little below.
        self.0.get(&group).map(|request| request.goal - request.goal / 64)
    }

    /// Ends what is done or does not get on; answers with the time until the next look.
    pub fn step(&mut self, groups: &GroupTree) -> Duration {
        self.0.retain(|group, request| {
            let used = groups.usage(*group).ram;
            if used < request.least {
                (request.least, request.since) = (used, Instant::now());
            }
            let over = used <= request.goal || request.since.elapsed() > NO_PROGRESS_TIMEOUT;
            if over {
                request.end(used);
            }
            !over
        });
        if self.0.is_empty() { IDLE_POLL_INTERVAL } else { PROGRESS_POLL_INTERVAL }
    }
}

impl ReclaimRequest {
    fn end(&self, used: u64) {
        // The client may have gone.
        let _ = self.done.send(ReclaimOutcome {
            bytes: self.from.saturating_sub(used),
            enough: used <= self.goal,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::tree::GroupUsage;
    use crate::testing::segment;
    use std::sync::mpsc::channel;

    fn use_of(groups: &mut GroupTree, ram: u64) {
        groups.account(
            &BTreeMap::from([(GroupIndex::ROOT, GroupUsage { ram, ..GroupUsage::default() })]),
            Duration::from_secs(1),
            |_| false,
        );
    }

    #[test]
    fn a_request_bounds_its_group_until_enough_went_out() {
        let mut groups = GroupTree::new(segment(), 1 << 30);
        let mut requests = ReclaimRequests::default();
        let (done, told) = channel();
        use_of(&mut groups, 1000);
        requests.begin(GroupIndex::ROOT, 300, done, &groups);
        assert!(requests.bound(GroupIndex::ROOT).is_some_and(|bound| bound <= 700 && bound > 680));
        assert_eq!(requests.bound(GroupIndex(1)), None);
        use_of(&mut groups, 800);
        assert_eq!(requests.step(&groups), PROGRESS_POLL_INTERVAL);
        assert!(told.try_recv().is_err());
        use_of(&mut groups, 690);
        assert_eq!(requests.step(&groups), IDLE_POLL_INTERVAL);
        assert_eq!(told.recv(), Ok(ReclaimOutcome { bytes: 310, enough: true }));
        assert_eq!(requests.bound(GroupIndex::ROOT), None);
    }

    #[test]
    fn one_that_does_not_get_on_ends_and_tells_so() {
        let mut groups = GroupTree::new(segment(), 1 << 30);
        let mut requests = ReclaimRequests::default();
        use_of(&mut groups, 1000);
        let (done, told) = channel();
        requests.begin(GroupIndex::ROOT, 5000, done, &groups);
        use_of(&mut groups, 900);
        requests.step(&groups);
        if let Some(request) = requests.0.get_mut(&GroupIndex::ROOT) {
            request.since = Instant::now()
                .checked_sub(NO_PROGRESS_TIMEOUT * 2)
                .expect("the machine is up for long enough");
        }
        requests.step(&groups);
        assert_eq!(told.recv(), Ok(ReclaimOutcome { bytes: 100, enough: false }));
        let (first, told) = channel();
        requests.begin(GroupIndex::ROOT, 100, first, &groups);
        requests.begin(GroupIndex::ROOT, 100, channel().0, &groups);
        assert_eq!(
            told.recv(),
            Ok(ReclaimOutcome { bytes: 0, enough: false }),
            "another one took its place"
        );
    }
}
