//! Which group each process is in.
//!
//! A process that was moved stays where it was put, and so do the processes that it starts. Others
//! are in the group of their run; or, where their run has none, in that of their cgroup, which is
//! looked up again from time to time, for processes are moved between cgroups.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use swaptide_ipc::GroupIndex;
use swaptide_sys::process::proc_info;

use crate::cgroup::tree::{GroupTree, cgroup_of};

/// How old the look at a process's cgroup may be.
const CGROUP_AGE: Duration = Duration::from_secs(1);

struct Membership {
    group: GroupIndex,
    /// It was put there, or its parent was.
    fixed: bool,
    looked: Instant,
}

/// The group of each process, by process id.
#[derive(Default)]
pub struct Memberships(HashMap<u32, Membership>);

impl Memberships {
    /// The group of a process, which is found when it is seen for the first time.
    pub fn look(&mut self, pid: u32, of_run: Option<GroupIndex>, groups: &GroupTree) -> GroupIndex {
        let known = self.0.get(&pid).filter(|place| groups.get(place.group).is_some());
        if let Some(place) = known
            && (place.fixed || place.looked.elapsed() < CGROUP_AGE)
        {
            return place.group;
        }
        let parent = if known.is_none() {
            proc_info(pid).and_then(|info| self.0.get(&info.ppid))
        } else {
            None
        };
        let (group, fixed) = match (parent.filter(|parent| parent.fixed), of_run) {
            (Some(parent), _) => (parent.group, true),
            (None, Some(group)) => (group, false),
            // With the root alone there is nothing to look for.
            (None, None) if groups.iter().nth(1).is_none() => (GroupIndex::ROOT, false),
            (None, None) => {
                (cgroup_of(pid).map_or(GroupIndex::ROOT, |cgroup| groups.of_cgroup(&cgroup)), false)
            }
        };
        self.0.insert(pid, Membership { group, fixed, looked: Instant::now() });
        group
    }

    /// Puts a process into a group.
    pub(crate) fn fix(&mut self, pid: u32, group: GroupIndex) {
        self.0.insert(pid, Membership { group, fixed: true, looked: Instant::now() });
    }

    /// The group of a process that was seen.
    pub fn of(&self, pid: u32) -> GroupIndex {
        self.0.get(&pid).map_or(GroupIndex::ROOT, |place| place.group)
    }

    /// These processes are gone.
    pub fn forget(&mut self, pids: &[u32]) {
        self.0.retain(|pid, _| !pids.contains(pid));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::tree::GroupPath;
    use crate::testing::segment;
    use std::process::Command;

    #[test]
    fn children_follow_a_moved_process_and_others_their_run() {
        let mut groups = GroupTree::new(segment(), 1 << 30);
        let mut make =
            |path: &str| groups.ensure(&GroupPath::parse(path).expect("path"), 0).expect("group");
        let (run, other) = (make("/run"), make("/other"));
        let mut child = Command::new("sleep").arg("600").spawn().expect("sleep");
        let mut places = Memberships::default();
        assert_eq!(places.look(child.id(), Some(run), &groups), run);
        places.forget(&[child.id()]);
        assert_eq!(places.look(std::process::id(), Some(run), &groups), run);
        places.fix(std::process::id(), other);
        assert_eq!(places.look(std::process::id(), Some(run), &groups), other);
        assert_eq!(places.look(child.id(), Some(run), &groups), other);
        assert_eq!(places.of(child.id()), other);
        let by_cgroup = places.look(u32::MAX, None, &groups);
        assert_eq!(by_cgroup, GroupIndex::ROOT, "one that has no cgroup");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }
}
