//! A group as the segment has it.
//!
//! Rules and invariants: [`crate::groups`].

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

use crate::ids::MAX_EXTENTS;
use crate::optional_limit::OptionalLimit;

/// Groups that there can be at one time, the root among them.
pub const MAX_GROUPS: usize = 64;

/// The place of a group in the segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupIndex(pub u32);

impl GroupIndex {
    /// The group that all others are below.
    pub const ROOT: GroupIndex = GroupIndex(0);
}

/// The record of a group in the segment.
#[repr(C, align(64))]
pub struct GroupSlot {
    /// One more than its parent's number (0: it has none).
    pub(crate) parent_plus: AtomicU32,
    /// Areas that it may not use, a bit each.
    pub(crate) areas_excluded: AtomicU32,
    /// Extents that it may have; without, as many as there are.
    pub(crate) swap_max: OptionalLimit<AtomicU32>,
    /// Extents that it has.
    pub(crate) swap_used: AtomicU32,
    /// Leases that its own maximum prevented.
    pub(crate) max_events: AtomicU64,
    /// Leases of its own processes that failed, for whatever reason.
    pub(crate) fail_events: AtomicU64,
}

impl GroupSlot {
    /// Areas that it may not use, a bit each.
    pub fn areas_excluded(&self) -> u32 {
        self.areas_excluded.load(Relaxed)
    }

    /// Replaces the areas that it may not use.
    pub fn exclude_areas(&self, areas: u32) {
        self.areas_excluded.store(areas, Relaxed);
    }

    /// Extents that it may have; `None`: as many as there are.
    pub fn swap_max(&self) -> Option<u32> {
        self.swap_max.get()
    }

    /// Sets them. What it has beyond them stays.
    pub fn set_swap_max(&self, extents: Option<u32>) {
        self.swap_max.set(extents);
    }

    /// Extents that it and those below it have.
    pub fn swap_used(&self) -> u32 {
        self.swap_used.load(SeqCst)
    }

    /// Leases that its own maximum prevented.
    pub fn max_events(&self) -> u64 {
        self.max_events.load(Relaxed)
    }

    /// Leases of its own processes that failed.
    pub fn fail_events(&self) -> u64 {
        self.fail_events.load(Relaxed)
    }

    pub(crate) fn reserve(&self) -> bool {
        let most = self.swap_max().unwrap_or(u32::MAX);
        self.swap_used.fetch_update(SeqCst, SeqCst, |used| (used < most).then(|| used + 1)).is_ok()
    }
}

/// All groups. Most of it is never touched and costs nothing.
#[repr(C)]
pub struct Groups {
    pub(crate) slots: [GroupSlot; MAX_GROUPS],
    /// Not 0: a process died in a change.
    pub(crate) audit_due: AtomicU32,
    /// Extents that are kept from all processes for a while by the slot of no process: how many
    /// are, and were; as a slot's `changes`.
    pub(crate) trims: AtomicU64,
    pub(crate) refs: [[AtomicU16; MAX_EXTENTS]; MAX_GROUPS],
}
