//! Small mappings: those below [`MIN_BYTES`], which are managed only where they matter.
//!
//! Managing a mapping costs a registration, an entry in the list of regions, and an event that its
//! unmapping thread waits for: about as much as filling some ten pages. So mappings below
//! [`MIN_BYTES`] stay unmanaged while all of them together are a small part of what a process may
//! have. Where they are more, they are managed like large ones, for the rest of the process's life:
//! those that exist at this scan and the next ones, the largest first and at most
//! [`MAX_MAPPINGS_PER_LOOK`] at a time, and new ones when they are made, while little room is left
//! ([`Small::reports`]).
//!
//! Owns: that decision, the candidates of one scan ([`Candidates`]), and the interval of scans.
//!
//! Invariants
//! 1. Once small mappings are managed they stay so: a mapping that was adopted is never too small
//!    afterwards.
//! 2. A mapping without access is no candidate, whatever its size: guard pages of stacks stay as
//!    they are.
//! 3. A scan adopts at most [`MAX_MAPPINGS_PER_LOOK`] of them, so that faults do not wait longer
//!    than for any other look.
//!
//! Locks: none; atomics, each read on its own.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use swaptide_sys::page::{PAGE_SIZE, VirtRange};
use swaptide_sys::thread::{Nanos, now};

use crate::memcg::charge::Charge;
use crate::mm::types::MIN_BYTES;

/// New mappings from this size on are always reported by the thread that makes them.
const LARGE_MAPPING_BYTES: usize = 1 << 20;
/// Small mappings matter from this part of the limit and from `MIN_SMALL_MAPPINGS_BYTES` on, where
/// what is not managed is an `UNMANAGED_DIVISOR`th of it.
const SMALL_MAPPINGS_DIVISOR: u64 = 32;
const UNMANAGED_DIVISOR: u64 = 8;
const MIN_SMALL_MAPPINGS_BYTES: u64 = 2 << 20;
/// New mappings are reported while less than this many times [`Charge::high`] is left.
const NEAR_LIMIT_HIGHS: i64 = 4;
/// Small mappings that one scan adopts at most.
const MAX_MAPPINGS_PER_LOOK: usize = 1024;
/// Classes of candidates by size: one page, up to 3, up to 7, and more.
const SIZE_CLASSES: usize = 4;

/// The memory of small mappings, and a flag that they are managed.
pub struct Small {
    managed: AtomicBool,
    are_more: AtomicBool,
    reported_from: AtomicUsize,
    /// When the last scan ended, and how long it took, in nanoseconds.
    looked_at: AtomicU64,
    look_took: AtomicU64,
}

impl Default for Small {
    fn default() -> Small {
        Small {
            managed: AtomicBool::new(false),
            are_more: AtomicBool::new(false),
            reported_from: AtomicUsize::new(LARGE_MAPPING_BYTES),
            looked_at: AtomicU64::new(0),
            look_took: AtomicU64::new(0),
        }
    }
}

impl Small {
    /// The smallest mapping that is managed now.
    pub fn least(&self) -> usize {
        if self.are_managed() { PAGE_SIZE } else { MIN_BYTES }
    }

    /// True when small mappings are managed.
    pub(crate) fn are_managed(&self) -> bool {
        self.managed.load(Relaxed)
    }

    /// A scan has found `bytes` in small mappings that are not managed.
    pub fn found(&self, bytes: u64, charge: &Charge) {
        let limit = charge.limit();
        if bytes > MIN_SMALL_MAPPINGS_BYTES.max(limit / SMALL_MAPPINGS_DIVISOR)
            && charge.rest().max(0) as u64 > limit / UNMANAGED_DIVISOR
        {
            self.managed.store(true, Relaxed);
        }
    }

    /// The last scan has left some for the next one, or not.
    pub(crate) fn look_again(&self, are_more: bool) {
        self.are_more.store(are_more, Relaxed);
    }

    /// A scan that began at `began` has ended.
    pub(crate) fn looked(&self, began: Nanos) {
        let ended = now();
        self.look_took.store(ended.since(began).as_nanos() as u64, Relaxed);
        self.looked_at.store(ended.0, Relaxed);
    }

    /// True when the next scan may begin, if scans are to take one part of `parts` of the time: a
    /// process may have tens of thousands of mappings, and faults wait while they are listed.
    pub(crate) fn may_look(&self, parts: u64) -> bool {
        let since = now().0.saturating_sub(self.looked_at.load(Relaxed));
        since >= self.look_took.load(Relaxed).saturating_mul(parts - 1)
    }

    /// True when the last scan has left some, once.
    pub(crate) fn is_look_due(&self) -> bool {
        self.are_more.swap(false, Relaxed)
    }

    /// Follows the account: while room is short, new mappings are reported whatever their size is.
    pub fn follow(&self, charge: &Charge) {
        let near = self.are_managed() && charge.headroom() < NEAR_LIMIT_HIGHS * charge.high();
        self.reported_from.store(if near { 1 } else { LARGE_MAPPING_BYTES }, Relaxed);
    }

    /// True for a length below that from which on mappings are always reported.
    pub fn is_small(&self, len: usize) -> bool {
        len < LARGE_MAPPING_BYTES
    }

    /// True when a new mapping of `len` bytes is to be managed before its maker fills it.
    pub fn reports(&self, len: usize) -> bool {
        len >= self.reported_from.load(Relaxed)
    }
}

/// Small mappings that a scan has found and that are not managed, by size.
#[derive(Default)]
pub struct Candidates {
    classes: [Vec<VirtRange>; SIZE_CLASSES],
    bytes: u64,
    are_more: bool,
}

impl Candidates {
    /// Forgets all small mappings that were seen.
    pub fn clear(&mut self) {
        self.classes.iter_mut().for_each(Vec::clear);
        (self.bytes, self.are_more) = (0, false);
    }

    /// Counts one, and keeps it: whether they matter is known when all were counted.
    pub fn add(&mut self, range: VirtRange) {
        self.bytes += range.len() as u64;
        let class = &mut self.classes
            [((range.len() / PAGE_SIZE).max(1).ilog2() as usize).min(SIZE_CLASSES - 1)];
        if class.len() < MAX_MAPPINGS_PER_LOOK {
            class.push(range);
        } else {
            self.are_more = true;
        }
    }

    /// Bytes of all that were counted.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Calls `f` with those to be adopted now, the larger ones first. True when others are left for
    /// the next scan.
    pub fn take(&mut self, mut f: impl FnMut(VirtRange)) -> bool {
        let mut left = MAX_MAPPINGS_PER_LOOK;
        for class in self.classes.iter_mut().rev() {
            let n = class.len().min(left);
            self.are_more |= n < class.len();
            left -= n;
            class.drain(..).take(n).for_each(&mut f);
        }
        self.are_more
    }
}

#[cfg(test)]
mod tests {
    use swaptide_sys::page::VirtAddr;

    use super::*;

    fn mapping(at: usize, pages: usize) -> VirtRange {
        VirtRange { start: VirtAddr(at * PAGE_SIZE), end: VirtAddr((at + pages) * PAGE_SIZE) }
    }

    #[test]
    fn small_mappings_are_managed_from_the_moment_they_matter() {
        let charge = Charge::new(64 << 20, 75, 0);
        let small = Small::default();
        small.found(1 << 30, &charge);
        assert_eq!(small.least(), MIN_BYTES, "what is not managed is little");
        charge.publish(0, 0, 0);
        charge.set_rest(20 << 20);
        small.found(1 << 20, &charge);
        assert_eq!(small.least(), MIN_BYTES, "small mappings are little of it");
        small.follow(&charge);
        assert!(!small.reports(4096) && small.reports(LARGE_MAPPING_BYTES));
        small.found(4 << 20, &charge);
        assert_eq!(small.least(), PAGE_SIZE);
        small.follow(&charge);
        assert!(!small.reports(4096), "there is room");
        charge.set_rest(62 << 20);
        small.follow(&charge);
        assert!(small.reports(4096));
        small.found(0, &charge);
        assert!(small.are_managed());
    }

    #[test]
    fn looks_that_take_long_come_seldom() {
        let small = Small::default();
        assert!(small.may_look(8));
        let long_ago = Nanos(now().0 - 3_600_000_000_000);
        small.looked(long_ago);
        assert!(!small.may_look(2) && small.may_look(1));
        small.looked(now());
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert!(small.may_look(2));
    }

    #[test]
    fn the_largest_come_first_and_the_rest_is_told_of() {
        let mut candidates = Candidates::default();
        for at in 0..2 * MAX_MAPPINGS_PER_LOOK {
            candidates.add(mapping(at * 32, 1));
        }
        candidates.add(mapping(1 << 20, 15));
        candidates.add(mapping(2 << 20, 5));
        assert_eq!(candidates.bytes(), (2 * MAX_MAPPINGS_PER_LOOK + 20) as u64 * PAGE_SIZE as u64);
        let mut taken = Vec::new();
        assert!(candidates.take(|range| taken.push(range)));
        assert_eq!((taken.len(), taken[0]), (MAX_MAPPINGS_PER_LOOK, mapping(1 << 20, 15)));
        candidates.clear();
        candidates.add(mapping(7, 2));
        assert!(!candidates.take(|range| assert_eq!(range, mapping(7, 2))));
    }
}
