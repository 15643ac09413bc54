//! Groups of processes: a hierarchy like that of cgroups, what each group may have, and what it
//! has.
//!
//! Owns the tiers, the tree of groups, and what is known of each. A group's number is its place in
//! the segment's table ([`swaptide_ipc::groups`]), which this module keeps up to date. What a group
//! may have of memory is carried out by the keeper.
//!
//! Invariants
//! 1. A group's parent exists. The root is number 0 and never goes.
//! 2. Effective masks, and the masks over areas that follow from them, are computed when tiers,
//!    areas or groups change; nobody computes them to allocate.
//! 3. A change of several settings is made whole or not at all.
//! 4. Usage and events of a group are those of the processes in it and in all groups below it.
//!
//! Locks: none.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use swaptide_core::{Priority, TierError, TierMask, Tiers};
use swaptide_ipc::{EXTENT_BYTES, GroupIndex, MAX_GROUPS, Segment};
use thiserror::Error;

use crate::cgroup::psi::{Pressure, TimeShare};

pub(crate) use crate::cgroup::path::cgroup_of;
pub use crate::cgroup::path::{GroupPath, PathError, memory_cgroup};
pub(crate) use crate::cgroup::settings::READ_ONLY;
pub use crate::cgroup::settings::{KEYS, SettingError, SettingErrorKind, Settings};

/// What processes have.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupUsage {
    /// Resident memory in bytes.
    pub ram: u64,
    /// Of it, compressed memory.
    pub zswap: u64,
    /// What is swapped, in bytes as it was before.
    pub swapped: u64,
    /// Pages that they faulted back, those that live, since they began.
    pub refaults: u64,
    /// How many they are.
    pub processes: u32,
    /// The part of the time since the last look in which one of their threads waited for memory.
    pub stalled: TimeShare,
}

impl GroupUsage {
    fn add(&mut self, other: GroupUsage) {
        self.ram += other.ram;
        self.zswap += other.zswap;
        self.swapped += other.swapped;
        self.refaults += other.refaults;
        self.processes += other.processes;
        self.stalled = self.stalled.or(other.stalled);
    }
}

/// What happened in a group, how often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Its memory went past `ram.high`.
    pub ram_high: u64,
    /// Its memory reached `ram.max`.
    pub ram_max: u64,
    /// It had to give memory below `ram.low`.
    pub ram_low: u64,
    /// What it has of swap areas went past `swap.high`.
    pub swap_high: u64,
    /// A lease was refused for its `swap.max`.
    pub swap_max: u64,
    /// A lease was refused, whatever for.
    pub swap_fail: u64,
}

impl Events {
    fn add(&mut self, other: Events) {
        self.ram_high += other.ram_high;
        self.ram_max += other.ram_max;
        self.ram_low += other.ram_low;
        self.swap_high += other.swap_high;
        self.swap_max += other.swap_max;
        self.swap_fail += other.swap_fail;
    }
}

/// Bounds that are reached or passed at a look; an event is the step from not to yes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Passed {
    ram_high: bool,
    ram_max: bool,
    ram_low: bool,
    swap_high: bool,
}

/// A group.
#[derive(Clone, Debug)]
pub struct Group {
    /// Its path.
    pub path: GroupPath,
    /// Its parent; the root has none.
    pub parent: Option<GroupIndex>,
    /// What it may have.
    pub settings: Settings,
    /// The user that made it, who may change it; so may root.
    pub owner: u32,
    effective: TierMask,
    usage: GroupUsage,
    /// Without those below it.
    own_events: Events,
    passed: Passed,
    pressure: Pressure,
}

/// Why something cannot be done with a group.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GroupError {
    /// No path.
    #[error("{0}")]
    Path(PathError),
    /// There is none of this path.
    #[error("there is no group {0}; setting one of its keys creates it")]
    NotFound(GroupPath),
    /// There are [`MAX_GROUPS`].
    #[error("{0}: there are {MAX_GROUPS} groups already; remove one first")]
    Full(GroupPath),
    /// One that cannot go now, and why.
    #[error("{0}: cannot be removed: {1}")]
    Busy(GroupPath, &'static str),
    /// A key or its value.
    #[error("{0}: {1}")]
    Setting(GroupPath, SettingError),
    /// The tiers cannot be changed so.
    #[error("{0}")]
    Tiers(TierError),
}

/// All groups of a run or a host, and the tiers.
pub struct GroupTree {
    segment: &'static Segment,
    tiers: Tiers,
    groups: Vec<Option<Group>>,
    /// What percentages are of.
    ram: u64,
}

impl GroupTree {
    /// The root alone, and no tiers. `ram` is what percentages are of.
    pub fn new(segment: &'static Segment, ram: u64) -> GroupTree {
        let root = Group {
            path: GroupPath::root(),
            parent: None,
            settings: Settings::default(),
            owner: rustix::process::geteuid().as_raw(),
            effective: TierMask::ALL,
            usage: GroupUsage::default(),
            own_events: Events::default(),
            passed: Passed::default(),
            pressure: Pressure::default(),
        };
        GroupTree { segment, tiers: Tiers::new(), groups: vec![Some(root)], ram }
    }

    /// The tiers.
    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// A group.
    pub fn get(&self, index: GroupIndex) -> Option<&Group> {
        self.groups.get(index.0 as usize)?.as_ref()
    }

    /// All groups, by their paths.
    pub fn iter(&self) -> impl Iterator<Item = (GroupIndex, &Group)> {
        let mut all: Vec<(GroupIndex, &Group)> = (0..)
            .map(GroupIndex)
            .zip(&self.groups)
            .filter_map(|(index, group)| Some((index, group.as_ref()?)))
            .collect();
        all.sort_by(|(_, a), (_, b)| a.path.cmp(&b.path));
        all.into_iter()
    }

    /// All groups, each after its parent.
    pub(crate) fn downwards(&self) -> Vec<GroupIndex> {
        let mut all: Vec<(usize, GroupIndex)> =
            self.iter().map(|(index, group)| (group.path.depth(), index)).collect();
        all.sort();
        all.into_iter().map(|(_, index)| index).collect()
    }

    /// The group of a path.
    ///
    /// # Errors
    /// [`GroupError::NotFound`].
    pub fn find(&self, path: &GroupPath) -> Result<GroupIndex, GroupError> {
        let found = self.iter().find(|(_, group)| group.path == *path).map(|(index, _)| index);
        found.ok_or_else(|| GroupError::NotFound(path.clone()))
    }

    /// The group of a path; it and those above it are made if there are none, and are `owner`'s
    /// then.
    ///
    /// # Errors
    /// [`GroupError::Full`]; nothing was made then.
    pub fn ensure(&mut self, path: &GroupPath, owner: u32) -> Result<GroupIndex, GroupError> {
        if let Ok(index) = self.find(path) {
            return Ok(index);
        }
        let above: Vec<GroupPath> =
            std::iter::successors(Some(path.clone()), GroupPath::parent).collect();
        let missing = above.iter().filter(|path| self.find(path).is_err()).count();
        if self.iter().count() + missing > MAX_GROUPS {
            return Err(GroupError::Full(path.clone()));
        }
        above
            .iter()
            .rev()
            .map(|path| self.find(path).unwrap_or_else(|_| self.make(path, owner)))
            .last()
            .ok_or_else(|| {
                // A path has itself above it.
                GroupError::NotFound(path.clone())
            })
    }

    /// Makes a group whose parent exists and for which there is room.
    fn make(&mut self, path: &GroupPath, owner: u32) -> GroupIndex {
        let at = self.groups.iter().position(Option::is_none).unwrap_or(self.groups.len());
        let index = GroupIndex(at as u32);
        let parent = self.insert(index, path, owner);
        self.segment.make_group(index, parent);
        self.publish();
        index
    }

    /// Takes over a group that the segment has already. What it is called and whose it is only a
    /// supervisor knows.
    pub fn restore(&mut self, index: GroupIndex, path: &GroupPath, owner: u32) {
        if index == GroupIndex::ROOT {
            if let Some(root) = self.groups[0].as_mut() {
                root.owner = owner;
            }
        } else if (index.0 as usize) < MAX_GROUPS {
            self.insert(index, path, owner);
        }
    }

    fn insert(&mut self, index: GroupIndex, path: &GroupPath, owner: u32) -> GroupIndex {
        let parent =
            path.parent().and_then(|parent| self.find(&parent).ok()).unwrap_or(GroupIndex::ROOT);
        let at = index.0 as usize;
        if self.groups.len() <= at {
            self.groups.resize_with(at + 1, || None);
        }
        let group = Group {
            path: path.clone(),
            parent: Some(parent),
            settings: Settings::default(),
            owner,
            effective: TierMask::ALL,
            usage: GroupUsage::default(),
            own_events: Events::default(),
            passed: Passed::default(),
            pressure: Pressure::default(),
        };
        self.groups[at] = Some(group);
        parent
    }

    /// Removes a group that nobody is in; its events stay with its parent.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::Busy`].
    pub fn remove(&mut self, path: &GroupPath) -> Result<(), GroupError> {
        let index = self.find(path)?;
        let busy = |why| Err(GroupError::Busy(path.clone(), why));
        let Some(parent) = self.get(index).and_then(|group| group.parent) else {
            return busy("it is the root");
        };
        if self.iter().any(|(_, group)| group.parent == Some(index)) {
            return busy("there are groups below it");
        }
        let belongs = |slot: &swaptide_ipc::ProcSlot| {
            [&slot.group, &slot.group_wanted]
                .iter()
                .any(|word| word.load(std::sync::atomic::Ordering::SeqCst) == index.0)
        };
        if self.segment.claimed().any(|(_, slot)| belongs(slot))
            || self.segment.group(index).swap_used() > 0
        {
            return busy("processes are in it");
        }
        let events = self.own_events(index);
        if let Some(parent) = self.groups[parent.0 as usize].as_mut() {
            parent.own_events.add(events);
        }
        self.groups[index.0 as usize] = None;
        Ok(())
    }

    /// Sets keys of a group, all or none.
    ///
    /// # Errors
    /// [`GroupError::Setting`] for the first that cannot be set so.
    pub fn set<'a>(
        &mut self,
        index: GroupIndex,
        values: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<(), GroupError> {
        let (tiers, ram) = (self.tiers, self.ram);
        let Some(group) = self.groups.get_mut(index.0 as usize).and_then(Option::as_mut) else {
            return Ok(());
        };
        let mut next = group.settings;
        for (key, value) in values {
            next.set(key, value, &tiers, ram)
                .map_err(|error| GroupError::Setting(group.path.clone(), error))?;
        }
        group.settings = next;
        self.publish();
        Ok(())
    }

    /// Gives a group other settings as a whole, and another owner where one is named.
    pub fn replace(&mut self, index: GroupIndex, settings: Settings, owner: Option<u32>) {
        if let Some(group) = self.groups.get_mut(index.0 as usize).and_then(Option::as_mut) {
            group.settings = settings;
            group.owner = owner.unwrap_or(group.owner);
            self.publish();
        }
    }

    /// Whether a user made this group or one above it, or would make it below one of theirs.
    pub(crate) fn is_owned(&self, path: &GroupPath, uid: u32) -> bool {
        let above = std::iter::successors(Some(path.clone()), GroupPath::parent);
        let groups =
            above.filter_map(|path| self.find(&path).ok()).filter_map(|index| self.get(index));
        groups.into_iter().any(|group| group.owner == uid)
    }

    /// Whether all of these groups can be had at a time.
    ///
    /// # Errors
    /// [`GroupError::Full`].
    pub(crate) fn check_room<'a>(
        &self,
        paths: impl IntoIterator<Item = &'a GroupPath>,
    ) -> Result<(), GroupError> {
        let mut all: std::collections::BTreeSet<GroupPath> =
            self.iter().map(|(_, group)| group.path.clone()).collect();
        for path in paths {
            all.extend(std::iter::successors(Some(path.clone()), GroupPath::parent));
            if all.len() > MAX_GROUPS {
                return Err(GroupError::Full(path.clone()));
            }
        }
        Ok(())
    }

    /// Changes the tiers. Exclusions of those that went are forgotten everywhere.
    ///
    /// # Errors
    /// [`GroupError::Tiers`].
    pub fn set_tiers(&mut self, text: &str) -> Result<(), GroupError> {
        let devices: Vec<Priority> =
            self.areas().into_iter().map(|(_, priority)| priority).collect();
        let applied = self.tiers.apply(text, &devices).map_err(GroupError::Tiers)?;
        for group in self.groups.iter_mut().flatten() {
            group.settings.tiers.forget(applied.freed);
        }
        self.publish();
        Ok(())
    }

    /// Has other tiers instead of these.
    ///
    /// # Errors
    /// [`GroupError::Tiers`].
    pub(crate) fn replace_tiers(&mut self, text: &str) -> Result<(), GroupError> {
        let devices: Vec<Priority> =
            self.areas().into_iter().map(|(_, priority)| priority).collect();
        let applied = self.tiers.replace(text, &devices).map_err(GroupError::Tiers)?;
        for group in self.groups.iter_mut().flatten() {
            group.settings.tiers.forget(applied.freed);
        }
        self.publish();
        Ok(())
    }

    /// The swap areas, by number and priority.
    fn areas(&self) -> Vec<(u8, Priority)> {
        let priority = |number: i32| {
            Priority::new(number).unwrap_or(if number < 0 { Priority::MIN } else { Priority::MAX })
        };
        self.segment.areas().map(|(id, area)| (id.0, priority(area.priority()))).collect()
    }

    /// Brings the segment's table up to date. To be called when areas changed; whatever changes
    /// groups or tiers here calls it itself.
    pub fn publish(&mut self) {
        let areas = self.areas();
        // Numbers that are no area's: one that is added may be of an excluded tier, so who has
        // exclusions waits for the next time.
        let nobodys = !areas.iter().fold(0, |mask, (area, _)| mask | 1u32 << area);
        for index in self.downwards() {
            let above =
                self.get(index).and_then(|group| group.parent).and_then(|parent| self.get(parent));
            let above = above.map_or(TierMask::ALL, |parent| parent.effective);
            let tiers = self.tiers;
            let Some(group) = self.groups[index.0 as usize].as_mut() else { continue };
            group.effective = group.settings.tiers.within(above);
            let excluded = areas
                .iter()
                .filter(|(_, priority)| !group.effective.permits_priority(&tiers, *priority));
            let mask = excluded.fold(0, |mask, (area, _)| mask | 1 << area);
            let slot = self.segment.group(index);
            slot.exclude_areas(if group.effective == TierMask::ALL {
                mask
            } else {
                mask | nobodys
            });
            slot.set_swap_max(
                group
                    .settings
                    .swap_max
                    .map(|bytes| (bytes / EXTENT_BYTES).min(u32::MAX as u64 - 1) as u32),
            );
        }
    }

    /// The group that a cgroup means: the one whose path is the longest part of the cgroup's.
    pub(crate) fn of_cgroup(&self, cgroup: &str) -> GroupIndex {
        let holding = self.iter().filter(|(_, group)| group.path.holds(cgroup));
        holding
            .max_by_key(|(_, group)| group.path.depth())
            .map_or(GroupIndex::ROOT, |(index, _)| index)
    }

    /// A group and those above it, the root last.
    pub fn ancestry(&self, index: GroupIndex) -> impl Iterator<Item = GroupIndex> {
        std::iter::successors(Some(index), |index| self.get(*index)?.parent)
    }

    /// The least of a bound over a group and all above it.
    pub fn least(
        &self,
        index: GroupIndex,
        bound: impl Fn(&Settings) -> Option<u64>,
    ) -> Option<u64> {
        self.ancestry(index).filter_map(|index| bound(&self.get(index)?.settings)).min()
    }

    /// Whether what the group's processes have may go to the swap areas.
    pub(crate) fn writes_back(&self, index: GroupIndex) -> bool {
        self.ancestry(index)
            .filter_map(|index| self.get(index))
            .all(|group| group.settings.zswap_writeback)
    }

    /// Takes over what the processes of each group have, and counts what that passes for the first
    /// time. `starved` says of which groups the processes got less than is kept for them; `elapsed`
    /// is the time since the last look.
    pub fn account(
        &mut self,
        own: &BTreeMap<GroupIndex, GroupUsage>,
        elapsed: Duration,
        starved: impl Fn(GroupIndex) -> bool,
    ) {
        let order = self.downwards();
        for group in self.groups.iter_mut().flatten() {
            group.usage = GroupUsage::default();
        }
        for index in order.into_iter().rev() {
            let swap = self.swap_bytes(index);
            let Some(group) = self.groups[index.0 as usize].as_mut() else { continue };
            group.usage.add(own.get(&index).copied().unwrap_or_default());
            let (usage, settings) = (group.usage, group.settings);
            group.pressure.follow(usage.stalled, elapsed);
            let over = |value: u64, bound: Option<u64>| bound.is_some_and(|bound| value > bound);
            // Limits end below the maximum by what a process may take between two looks.
            let reached = settings.ram_max.map(|max| max - max / 50);
            let passed = Passed {
                ram_high: over(usage.ram, settings.ram_high),
                ram_max: over(usage.ram, reached),
                ram_low: settings.ram_low > 0 && starved(index),
                swap_high: over(swap, settings.swap_high),
            };
            let before = std::mem::replace(&mut group.passed, passed);
            let events = &mut group.own_events;
            events.ram_high += u64::from(passed.ram_high && !before.ram_high);
            events.ram_max += u64::from(passed.ram_max && !before.ram_max);
            events.ram_low += u64::from(passed.ram_low && !before.ram_low);
            events.swap_high += u64::from(passed.swap_high && !before.swap_high);
            if let Some(parent) =
                group.parent.and_then(|parent| self.groups[parent.0 as usize].as_mut())
            {
                parent.usage.add(usage);
            }
        }
    }

    /// What a group and those below it have.
    pub fn usage(&self, index: GroupIndex) -> GroupUsage {
        self.get(index).map_or_else(GroupUsage::default, |group| group.usage)
    }

    /// How long threads of a group and those below it waited for memory.
    pub fn pressure(&self, index: GroupIndex) -> Pressure {
        self.get(index).map_or_else(Pressure::default, |group| group.pressure)
    }

    /// Bytes of swap areas that a group and those below it have.
    pub fn swap_bytes(&self, index: GroupIndex) -> u64 {
        u64::from(self.segment.group(index).swap_used()) * EXTENT_BYTES
    }

    /// What 64 fresh pages of a process in a group cost it in microseconds of waiting: nothing
    /// within `swap.high` of the group and all above it, beyond it the square of how far, 6.4 ms
    /// where it is a hundredth.
    pub(crate) fn price_of_growth(&self, index: GroupIndex) -> u32 {
        let price = |index: GroupIndex| {
            let high = self.get(index)?.settings.swap_high?;
            let over =
                self.swap_bytes(index).saturating_sub(high) as f64 / high.max(EXTENT_BYTES) as f64;
            // It saturates: a process caps each wait anyway.
            Some((over * over * 64e6) as u32)
        };
        self.ancestry(index).filter_map(price).max().unwrap_or(0)
    }

    fn own_events(&self, index: GroupIndex) -> Events {
        let slot = self.segment.group(index);
        let mut events = self.get(index).map_or_else(Events::default, |group| group.own_events);
        events.swap_max += slot.max_events();
        events.swap_fail += slot.fail_events();
        events
    }

    /// Events of a group and those below it.
    pub(crate) fn events(&self, index: GroupIndex) -> Events {
        let mut events = Events::default();
        for (below, _) in self.iter() {
            if self.ancestry(below).any(|above| above == index) {
                events.add(self.own_events(below));
            }
        }
        events
    }

    /// Everything that can be read of a group, by key.
    pub fn view(&self, index: GroupIndex) -> GroupView {
        let Some(group) = self.get(index) else { return GroupView::default() };
        let (usage, events) = (group.usage, self.events(index));
        let mut values: BTreeMap<String, String> = KEYS
            .iter()
            .filter_map(|key| Some(((*key).to_owned(), group.settings.get(key, &self.tiers)?)))
            .collect();
        let swap = self.swap_bytes(index);
        let read = |key: &str| match key {
            "swap.tiers.effective" => group.effective.names(&self.tiers),
            "ram.current" => usage.ram.to_string(),
            "swap.current" => swap.to_string(),
            "zswap.current" => usage.zswap.to_string(),
            "swapped.current" => usage.swapped.to_string(),
            "processes" => usage.processes.to_string(),
            "ram.pressure" => group.pressure.to_string(),
            "ram.events" => {
                format!("low {} high {} max {}", events.ram_low, events.ram_high, events.ram_max)
            }
            _ => format!(
                "high {} max {} fail {}",
                events.swap_high, events.swap_max, events.swap_fail
            ),
        };
        values.extend(READ_ONLY.iter().map(|key| ((*key).to_owned(), read(key))));
        GroupView { path: group.path.to_string(), values }
    }
}

/// A group at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupView {
    /// Its path.
    pub path: String,
    /// What can be read of it, by key: what was set, what it has, and what happened.
    pub values: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::segment;

    fn path(text: &str) -> GroupPath {
        GroupPath::parse(text).expect("path")
    }

    fn groups(paths: &[&str]) -> GroupTree {
        let mut groups = GroupTree::new(segment(), 1 << 30);
        for text in paths {
            groups.ensure(&path(text), 1000).expect("group");
        }
        groups
    }

    fn value(groups: &GroupTree, group: &str, key: &str) -> String {
        groups.view(groups.find(&path(group)).expect("group")).values[key].clone()
    }

    #[test]
    fn groups_are_made_with_all_above_them_and_found_by_cgroup() {
        let groups = groups(&["/web/front", "/batch"]);
        let paths: Vec<String> = groups.iter().map(|(_, group)| group.path.to_string()).collect();
        assert_eq!(paths, ["/", "/batch", "/web", "/web/front"]);
        let of =
            |cgroup: &str| groups.get(groups.of_cgroup(cgroup)).expect("group").path.to_string();
        assert_eq!(
            ["/", "/web", "/web/front/x/y", "/web/back", "/webmail", "/batch/1"].map(of),
            ["/", "/web", "/web/front", "/web", "/", "/batch"]
        );
        assert_eq!(
            groups.get(groups.find(&path("/web")).expect("group")).expect("group").owner,
            1000
        );
    }

    #[test]
    fn there_are_only_so_many_and_a_refusal_makes_none() {
        let mut groups = groups(&[]);
        for number in 1..MAX_GROUPS - 1 {
            groups.ensure(&path(&format!("/g{number}")), 0).expect("group");
        }
        assert!(matches!(groups.ensure(&path("/a/b"), 0), Err(GroupError::Full(_))));
        assert!(groups.find(&path("/a")).is_err());
        groups.ensure(&path("/a"), 0).expect("the last one");
        groups.remove(&path("/g7")).expect("empty");
        let index = groups.ensure(&path("/a/b"), 0).expect("its place is free");
        assert_eq!(index, GroupIndex(7));
        assert_eq!(groups.segment.ancestry(index).count(), 3);
    }

    #[test]
    fn only_an_empty_group_goes_and_what_happened_in_it_stays_counted() {
        let mut groups = groups(&["/web/front"]);
        let refused = |groups: &mut GroupTree, text: &str| {
            groups.remove(&path(text)).expect_err("refused").to_string()
        };
        assert!(refused(&mut groups, "/").contains("root"));
        assert!(refused(&mut groups, "/web").contains("below"));
        let front = groups.find(&path("/web/front")).expect("group");
        let process = groups.segment.claim(10, 0).expect("slot");
        groups
            .segment
            .slot(process)
            .group_wanted
            .store(front.0, std::sync::atomic::Ordering::Relaxed);
        assert!(refused(&mut groups, "/web/front").contains("processes"));
        groups.segment.regroup(process);
        groups.set(front, [("swap.max", "0")]).expect("set");
        assert_eq!(groups.segment.lease_charged(process), None);
        groups.segment.release(process, |_| {});
        assert_eq!(value(&groups, "/web", "swap.events"), "high 0 max 1 fail 1");
        groups.remove(&path("/web/front")).expect("empty");
        assert_eq!(value(&groups, "/web", "swap.events"), "high 0 max 1 fail 1");
        assert_eq!(value(&groups, "/", "swap.events"), "high 0 max 1 fail 1");
    }

    #[test]
    fn several_settings_are_made_whole_or_not_at_all() {
        let mut groups = groups(&["/web"]);
        let web = groups.find(&path("/web")).expect("group");
        let error =
            groups.set(web, [("ram.max", "1G"), ("ram.high", "much")]).expect_err("refused");
        assert!(error.to_string().starts_with("/web: ram.high: "), "{error}");
        assert_eq!(value(&groups, "/web", "ram.max"), "max");
        groups
            .set(web, [("ram.max", "50%"), ("ram.high", "400M"), ("swap.max", "5M")])
            .expect("set");
        assert_eq!(value(&groups, "/web", "ram.max"), "536870912");
        assert_eq!(groups.segment.group(web).swap_max(), Some(2), "whole extents");
        assert_eq!(groups.least(web, |s| s.ram_high), Some(400 << 20));
    }

    #[test]
    fn effective_tiers_follow_the_parents_at_every_write() {
        let mut groups = groups(&["/a/b"]);
        groups.set_tiers("+SSD:100 +HDD:50 +NET:-1").expect("tiers");
        let (a, b) = (groups.find(&path("/a")).expect("a"), groups.find(&path("/a/b")).expect("b"));
        groups.set(b, [("swap.tiers", "-SSD")]).expect("child");
        groups.set(a, [("swap.tiers", "-HDD")]).expect("parent");
        assert_eq!(value(&groups, "/a", "swap.tiers.effective"), "SSD NET");
        assert_eq!(value(&groups, "/a/b", "swap.tiers"), "HDD NET");
        assert_eq!(value(&groups, "/a/b", "swap.tiers.effective"), "NET");
        groups.set(b, [("swap.tiers", "+SSD")]).expect("child");
        assert_eq!(
            value(&groups, "/a/b", "swap.tiers.effective"),
            "SSD NET",
            "HDD is excluded above"
        );
        groups.set_tiers("-HDD").expect("tiers");
        groups.set_tiers("+TAPE:10").expect("tiers");
        assert_eq!(
            value(&groups, "/a/b", "swap.tiers.effective"),
            "SSD TAPE NET",
            "the exclusion went with the tier"
        );
        let late = groups.ensure(&path("/a/b/c"), 0).expect("group");
        groups.set(a, [("swap.tiers", "-NET")]).expect("parent");
        assert_eq!(groups.view(late).values["swap.tiers.effective"], "SSD TAPE");
    }

    #[test]
    fn areas_of_excluded_tiers_are_leased_from_by_nobody_in_the_group() {
        use swaptide_ipc::NewArea;
        let mut groups = groups(&["/a"]);
        let segment = groups.segment;
        let add = |priority| segment.add_area(NewArea::of_file(priority, 9));
        let (slow, fast) = (add(5).expect("area"), add(200).expect("area"));
        groups.set_tiers("+SSD:100 +HDD:-1").expect("tiers");
        let a = groups.find(&path("/a")).expect("a");
        groups.set(a, [("swap.tiers", "-SSD")]).expect("set");
        let process = segment.claim(10, 0).expect("slot");
        segment.slot(process).group_wanted.store(a.0, std::sync::atomic::Ordering::Relaxed);
        segment.regroup(process);
        let area = || {
            segment.place_of(segment.lease_charged(process).expect("extent")).expect("place").area
        };
        assert_eq!(area(), slow);
        let late = add(300).expect("area");
        assert_eq!(area(), slow, "an area that was added a moment ago");
        groups.publish();
        assert_eq!(area(), slow);
        groups.set(a, [("swap.tiers", "+SSD")]).expect("set");
        assert_eq!((area(), segment.group(a).areas_excluded()), (late, 0));
        assert!(segment.area(fast).used() == 0);
        let error = groups.set_tiers("-SSD").expect_err("a device is in it").to_string();
        assert!(error.contains("\"-SSD\"") && error.contains("in use"), "{error}");
    }

    #[test]
    fn usage_and_events_are_summed_up_the_tree_and_an_event_is_a_step() {
        let mut groups = groups(&["/a/b"]);
        let (a, b) = (groups.find(&path("/a")).expect("a"), groups.find(&path("/a/b")).expect("b"));
        groups
            .set(b, [("ram.high", "100M"), ("ram.max", "200M"), ("ram.low", "50M")])
            .expect("set");
        let stalled = TimeShare::of(500, Duration::from_millis(1));
        let usage = |mib: u64| GroupUsage {
            ram: mib << 20,
            zswap: 1,
            swapped: 5,
            refaults: 0,
            processes: 1,
            stalled,
        };
        let mut look = |in_a: u64, in_b: u64, starved: bool| {
            groups.account(
                &BTreeMap::from([(a, usage(in_a)), (b, usage(in_b))]),
                Duration::from_secs(2),
                |_| starved,
            );
            (groups.usage(GroupIndex::ROOT).ram >> 20, groups.events(GroupIndex::ROOT))
        };
        assert_eq!(look(10, 90, false), (100, Events::default()));
        assert_eq!(look(500, 101, false).1, Events { ram_high: 1, ..Events::default() });
        assert_eq!(look(500, 110, true).1, Events { ram_high: 1, ram_low: 1, ..Events::default() });
        assert_eq!(look(500, 90, true).1.ram_high, 1);
        assert_eq!(
            look(500, 199, false),
            (699, Events { ram_high: 2, ram_max: 1, ram_low: 1, ..Events::default() })
        );
        assert_eq!(value(&groups, "/a", "ram.events"), "low 1 high 2 max 1");
        // Five looks of two seconds: half of the time in one, three quarters in both.
        assert_eq!(
            value(&groups, "/a/b", "ram.pressure"),
            "some avg10=31.61 avg60=7.68 avg300=1.64 total=5000000"
        );
        assert_eq!(value(&groups, "/a", "ram.pressure"), value(&groups, "/", "ram.pressure"));
        assert!(value(&groups, "/", "ram.pressure").ends_with("total=7500000"));
        assert_eq!(
            (value(&groups, "/a", "processes"), value(&groups, "/", "zswap.current")),
            ("2".into(), "2".into())
        );
    }

    #[test]
    fn growth_costs_what_swap_high_was_passed_by_here_or_above() {
        let mut groups = groups(&["/a/b"]);
        let (a, b) = (groups.find(&path("/a")).expect("a"), groups.find(&path("/a/b")).expect("b"));
        let segment = groups.segment;
        segment.add_area(swaptide_ipc::NewArea::of_file(0, 100)).expect("area");
        let process = segment.claim(10, 0).expect("slot");
        segment.slot(process).group_wanted.store(b.0, std::sync::atomic::Ordering::Relaxed);
        segment.regroup(process);
        for _ in 0..11 {
            segment.lease_charged(process).expect("extent");
        }
        let price = |groups: &GroupTree| groups.price_of_growth(b);
        assert_eq!(price(&groups), 0, "no bound");
        groups.set(a, [("swap.high", "22M")]).expect("set");
        assert_eq!(price(&groups), 0, "at the bound");
        groups.set(a, [("swap.high", "20M")]).expect("set");
        assert_eq!(price(&groups), 640_000, "a tenth past it");
        groups.set(b, [("swap.high", "11M")]).expect("set");
        assert_eq!((price(&groups), groups.price_of_growth(a)), (64_000_000, 640_000));
        groups.set(b, [("swap.high", "0")]).expect("set");
        assert!(price(&groups) >= 64_000_000);
    }

    #[test]
    fn every_key_that_is_documented_can_be_read() {
        let groups = groups(&[]);
        let view = groups.view(GroupIndex::ROOT);
        for key in KEYS.iter().chain(&READ_ONLY) {
            assert!(view.values.contains_key(*key), "{key}");
        }
        assert_eq!(view.values.len(), KEYS.len() + READ_ONLY.len());
    }
}
