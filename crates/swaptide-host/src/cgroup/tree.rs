//! Groups of processes: a hierarchy like that of cgroups, what each group may have, and what it
//! has.
//!
//! Owns the tiers, the tree of groups, and what is known of each. A group's number is its place in
//! the segment's table ([`swaptide_ipc::groups`]), which this module keeps up to date. What a group
//! may have of memory is carried out by the controller.
//!
//! Invariants
//! 1. A group's parent exists. The root is number 0 and never goes.
//! 2. Effective masks, and the masks over areas that follow from them, are computed when tiers,
//!    areas or groups change, not to allocate.
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
pub use crate::cgroup::settings::{KEYS, SettingError, Settings};

/// Sums over processes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupUsage {
    /// Resident memory in bytes.
    pub ram: u64,
    /// Of it, compressed memory.
    pub zswap: u64,
    /// The swapped memory, in bytes before compression.
    pub swapped: u64,
    /// Pages that they faulted back, those that live, since they began.
    pub refaults: u64,
    /// The number of processes.
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

/// The counts of events in a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Its memory went past `ram.high`.
    pub ram_high: u64,
    /// Its memory reached `ram.max`.
    pub ram_max: u64,
    /// It had to give memory below `ram.low`.
    pub ram_low: u64,
    /// Its use of swap areas went past `swap.high`.
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

/// A node of the tree, with its settings and what its processes have.
#[derive(Clone, Debug)]
pub struct Group {
    /// From the root on: `/NAME/NAME`.
    pub path: GroupPath,
    /// Its parent; the root has none.
    pub parent: Option<GroupIndex>,
    /// Its settings.
    pub settings: Settings,
    /// The user that made it and may change it; so may root.
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
    /// The text is no path of a group.
    #[error("{0}")]
    Path(PathError),
    /// There is none of this path.
    #[error("there is no group {0}; setting one of its keys creates it")]
    NotFound(GroupPath),
    /// There are [`MAX_GROUPS`] groups already.
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
    /// The memory that percentages refer to, in bytes.
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

    /// The tiers, which all groups of the tree share.
    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// The group with this index; `None`: there is none.
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

    /// Removes a group without processes; its events stay with its parent.
    ///
    /// # Errors
    /// [`GroupError::NotFound`], [`GroupError::Busy`].
    pub fn remove(&mut self, path: &GroupPath) -> Result<(), GroupError> {
        let index = self.find(path)?;
        let busy = |why| Err(GroupError::Busy(path.clone(), why));
        let Some(parent) = self.get(index).and_then(|group| group.parent) else {
            return busy("it is the root; only groups below it can be removed");
        };
        if self.iter().any(|(_, group)| group.parent == Some(index)) {
            return busy("there are groups below it; remove those first");
        }
        let belongs = |slot: &swaptide_ipc::ProcSlot| {
            [&slot.group, &slot.control.group_wanted]
                .iter()
                .any(|word| word.load(std::sync::atomic::Ordering::SeqCst) == index.0)
        };
        if self.segment.claimed().any(|(_, slot)| belongs(slot))
            || self.segment.group(index).swap_used() > 0
        {
            return busy("processes are in it; end them, or move them to another group");
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

    /// True if a user made this group or one above it, or would make it below one of theirs.
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
        // Numbers that are no area's: one that is added may be of an excluded tier, so a group that
        // has exclusions waits for the next time.
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

    /// True if what the group's processes have may go to the swap areas.
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

    /// Returns the usage of a group and those below it.
    pub fn usage(&self, index: GroupIndex) -> GroupUsage {
        self.get(index).map_or_else(GroupUsage::default, |group| group.usage)
    }

    /// Returns the times that threads of a group and those below it waited for memory.
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
    /// The group's path: `/NAME/NAME`.
    pub path: String,
    /// What can be read of it, by key: what was set, what it has, and what happened.
    pub values: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests;
