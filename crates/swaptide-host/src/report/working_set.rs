//! What a process works on, and the memory that would do for it.
//!
//! Each page that came back tells how many resident pages would have kept it
//! ([`swaptide_ipc::RefaultHistogram`]). Where most of them would have stayed, the process has what
//! it works on; the rest of its memory lies in compressed memory then, as now.
//!
//! Owns nothing. All of it is estimated from what the process itself says: it is advice, and
//! nothing else is decided by it.

use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};
use swaptide_ipc::{NO_LIMIT, ProcSlot, REFAULT_BUCKETS, RefaultHistogram};
use swaptide_sys::PAGE_SIZE;

use crate::units::ram_total;

/// What a fault costs a thread before the handler looks at it, and after it was woken, in
/// microseconds: a message, and two wake-ups. Nothing else tells of that time.
pub(crate) const ROUND_TRIP_US: u64 = 4;

/// Of the pages that came back, this many of a hundred would have stayed.
const COVERED_PERCENT: u64 = 90;
/// With fewer pages that came back nothing is said.
const MIN_REFAULTS: u64 = 1000;
/// Compressed memory shrinks pages so far where nothing was measured, in tenths.
const USUAL_RATIO_X10: u64 = 25;
/// A process that may have less than this many tenths of the budget shares it with others.
const MIN_PART_OF_BUDGET_X10: u64 = 7;
/// The advice exceeds the estimate by this many percent.
const MARGIN_PERCENT: u64 = 5;

/// Counts of a [`RefaultHistogram`].
pub(crate) type RefaultCounts = [u64; REFAULT_BUCKETS];

/// The memory that a process would need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkingSet {
    /// Bytes that it works on.
    pub bytes: u64,
    /// Bytes that it has to have, compressed memory included, to keep them.
    pub needed: u64,
    /// Bytes that it may have now.
    pub limit: u64,
}

impl WorkingSet {
    /// The budget with which the process would have what it needs, of a run that has `budget`.
    /// `None` where it is not the budget that it lacks: it has what it needs, or other processes,
    /// or a cgroup, have a part of the budget; or where the machine has not as much.
    pub(crate) fn budget(&self, budget: u64) -> Option<u64> {
        let more = self.needed.checked_sub(self.limit).filter(|more| *more > 0)?;
        if self.limit < budget / 10 * MIN_PART_OF_BUDGET_X10 {
            return None;
        }
        let wanted = budget.saturating_add(more);
        let advised = (wanted / 100)
            .saturating_mul(100 + MARGIN_PERCENT)
            .checked_next_multiple_of(1 << 20)?;
        (advised <= ram_total()).then_some(advised)
    }

    /// From the pages that came back and what the process has.
    pub(crate) fn estimate(refaults: &RefaultCounts, memory: &ProcMemory) -> Option<WorkingSet> {
        let all: u64 = refaults.iter().fold(0, |sum, pages| sum.saturating_add(*pages));
        if all < MIN_REFAULTS {
            return None;
        }
        let wanted = (u128::from(all) * u128::from(COVERED_PERCENT) / 100) as u64;
        let mut seen = 0u64;
        let bucket = refaults.iter().position(|pages| {
            seen = seen.saturating_add(*pages);
            seen >= wanted
        })?;
        let bytes = RefaultHistogram::bound(bucket).saturating_mul(PAGE_SIZE as u64);
        let bytes = bytes.min(memory.footprint);
        let rest = memory.footprint - bytes;
        let needed = bytes + (rest as f64 / memory.ratio) as u64;
        Some(WorkingSet { bytes, needed, limit: memory.limit })
    }
}

/// The samples of a process's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ProcMemory {
    /// Bytes that it had at most, resident and swapped.
    pub(crate) footprint: u64,
    /// How far swapped pages shrink: what lies on areas takes no memory.
    pub(crate) ratio: f64,
    /// Bytes that it may have.
    pub(crate) limit: u64,
}

impl ProcMemory {
    /// As a slot has it.
    pub(crate) fn of(slot: &ProcSlot) -> ProcMemory {
        let usage = &slot.usage;
        let [managed, pool, pooled, on_areas] = [
            &usage.managed_bytes,
            &usage.pool_bytes,
            &usage.swapped_pool_bytes,
            &usage.swapped_file_bytes,
        ]
        .map(ProcSlot::bytes);
        let ratio = match (pooled + on_areas, pool) {
            (swapped @ 1.., pool @ 1..) => (swapped as f64 / pool as f64).max(1.0),
            _ => USUAL_RATIO_X10 as f64 / 10.0,
        };
        let limit = slot.control.limit_bytes.load(Relaxed);
        let has_limit = limit != 0 && limit != NO_LIMIT;
        let limit = if has_limit { limit } else { managed + pool };
        ProcMemory { footprint: ProcSlot::bytes(&usage.peak_footprint_bytes), ratio, limit }
    }
}

/// The pages of a slot that came back, since `before`.
pub(crate) fn refaults_since(slot: &ProcSlot, before: Option<&RefaultCounts>) -> RefaultCounts {
    let now: RefaultCounts =
        std::array::from_fn(|bucket| slot.refaults.pages[bucket].load(Relaxed).min(1 << 47));
    match before {
        Some(before) => std::array::from_fn(|at| now[at].saturating_sub(before[at])),
        None => now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn memory(footprint: u64, limit: u64) -> ProcMemory {
        ProcMemory { footprint, ratio: 4.0, limit }
    }

    #[test]
    fn working_set_would_keep_most_pages() {
        let mut refaults = [0; REFAULT_BUCKETS];
        // 9500 of 10000 pages would have stayed with 100 MiB, the others with 400 MiB alone.
        refaults[RefaultHistogram::bucket(100 * MIB / 4096)] = 9500;
        refaults[RefaultHistogram::bucket(400 * MIB / 4096)] = 500;
        let found = WorkingSet::estimate(&refaults, &memory(500 * MIB, 120 * MIB)).expect("enough");
        assert!((100 * MIB..125 * MIB).contains(&found.bytes), "{found:?}");
        assert_eq!(found.needed, found.bytes + (500 * MIB - found.bytes) / 4);
        // It has 120 MiB of a budget of 128, and needs some 200.
        let budget = found.budget(128 * MIB).expect("a larger one");
        assert!((205 * MIB..245 * MIB).contains(&budget), "{}", budget / MIB);
    }

    #[test]
    fn no_process_works_on_more_than_there_is() {
        let mut refaults = [0; REFAULT_BUCKETS];
        refaults[RefaultHistogram::bucket(1 << 28)] = 5000;
        let found = WorkingSet::estimate(&refaults, &memory(300 * MIB, 100 * MIB)).expect("enough");
        assert_eq!((found.bytes, found.needed), (300 * MIB, 300 * MIB));
    }

    #[test]
    fn a_few_pages_tell_nothing() {
        let mut refaults = [0; REFAULT_BUCKETS];
        refaults[20] = MIN_REFAULTS - 1;
        assert_eq!(WorkingSet::estimate(&refaults, &memory(300 * MIB, 100 * MIB)), None);
        // Damaged words are no panic.
        let refaults = [u64::MAX; REFAULT_BUCKETS];
        assert!(WorkingSet::estimate(&refaults, &memory(u64::MAX / 2, 100)).is_some());
    }

    #[test]
    fn no_budget_is_advised_where_it_is_not_what_lacks() {
        let set = |needed, limit| WorkingSet { bytes: 10 * MIB, needed, limit };
        assert_eq!(set(20 * MIB, 100 * MIB).budget(100 * MIB), None, "it has what it needs");
        assert_eq!(set(80 * MIB, 50 * MIB).budget(100 * MIB), None, "others have the rest");
        assert_eq!(set(80 * MIB, 50 * MIB).budget(60 * MIB), Some(95 * MIB));
        assert_eq!(set(u64::MAX, 50 * MIB).budget(60 * MIB), None, "no machine has as much");
    }
}
