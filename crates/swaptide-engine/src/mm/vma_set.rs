//! The ranges of the program's memory that are managed.
//!
//! Owns: a sorted list of disjoint ranges, neighbours joined, each registered with the program's
//! userfaultfd.
//!
//! Invariant: an address lies in the list only if its mapping was seen to be armed with the
//! program's userfaultfd after every earlier change of mappings had been read from it (see
//! `adopt`).
//!
//! Locks: none; inside the engine's memory lock.

use swaptide_sys::page::{VirtAddr, VirtRange};

/// A set of ranges of addresses that do not overlap.
#[derive(Default)]
pub struct VmaSet {
    ranges: Vec<VirtRange>,
    /// The number of changes of the list.
    changes: u64,
}

impl VmaSet {
    /// The managed range that holds an address.
    pub fn find(&self, addr: VirtAddr) -> Option<VirtRange> {
        let at = self.ranges.partition_point(|r| r.end <= addr);
        self.ranges.get(at).copied().filter(|r| r.contains(addr))
    }

    /// The first managed range that ends above an address.
    pub(crate) fn at_or_after(&self, addr: VirtAddr) -> Option<VirtRange> {
        self.ranges.get(self.ranges.partition_point(|r| r.end <= addr)).copied()
    }

    /// Adds a range; what was managed of it already stays.
    pub fn insert(&mut self, range: VirtRange) {
        if range.is_empty() {
            return;
        }
        let first = self.ranges.partition_point(|r| r.end < range.start);
        let last = self.ranges.partition_point(|r| r.start <= range.end);
        let mut joined = range;
        for old in &self.ranges[first..last] {
            joined.start = joined.start.min(old.start);
            joined.end = joined.end.max(old.end);
        }
        self.changes += 1;
        self.ranges.splice(first..last, [joined]);
    }

    /// Takes a range out.
    pub fn remove(&mut self, range: VirtRange) {
        let first = self.ranges.partition_point(|r| r.end <= range.start);
        let last = self.ranges.partition_point(|r| r.start < range.end);
        if first >= last {
            return;
        }
        let left = VirtRange { start: self.ranges[first].start, end: range.start };
        let right = VirtRange { start: range.end, end: self.ranges[last - 1].end };
        let rest = [left, right].into_iter().filter(|r| r.start < r.end);
        self.changes += 1;
        self.ranges.splice(first..last, rest);
    }

    /// A number that is another one after each change of the list.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// True when a part of `range` is managed.
    pub fn overlaps(&self, range: VirtRange) -> bool {
        let at = self.ranges.partition_point(|r| r.end <= range.start);
        self.ranges.get(at).is_some_and(|r| r.start < range.end)
    }

    /// From the first to the last byte of `range` that is managed; `None` if none is.
    pub fn extent(&self, range: VirtRange) -> Option<VirtRange> {
        let first = self.ranges.get(self.ranges.partition_point(|r| r.end <= range.start))?;
        let last = self.ranges[..self.ranges.partition_point(|r| r.start < range.end)].last()?;
        let part = VirtRange { start: first.start.max(range.start), end: last.end.min(range.end) };
        (part.start < part.end).then_some(part)
    }

    /// Calls `f` with each part of `range` that is not managed.
    pub(crate) fn gaps(&self, range: VirtRange, mut f: impl FnMut(VirtRange)) {
        let mut at = range.start;
        for managed in &self.ranges[self.ranges.partition_point(|r| r.end <= range.start)..] {
            if managed.start >= range.end {
                break;
            }
            if at < managed.start {
                f(VirtRange { start: at, end: managed.start });
            }
            at = managed.end;
        }
        if at < range.end {
            f(VirtRange { start: at, end: range.end });
        }
    }

    /// The ranges, in ascending order of addresses.
    pub fn iter(&self) -> impl Iterator<Item = VirtRange> + '_ {
        self.ranges.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_list_is_a_set_of_pages(
            ops in prop::collection::vec((any::<bool>(), 0usize..60, 1usize..20), 1..60),
        ) {
            let mut regions = VmaSet::default();
            let mut model = [false; 80];
            for (insert, start, len) in ops {
                let range = VirtRange {
                    start: VirtAddr(start * 4096),
                    end: VirtAddr((start + len) * 4096),
                };
                if insert {
                    regions.insert(range)
                } else {
                    regions.remove(range)
                }
                model[start..start + len].fill(insert);
            }
            for (page, inside) in model.iter().enumerate() {
                prop_assert_eq!(regions.find(VirtAddr(page * 4096 + 17)).is_some(), *inside);
            }
            let all: Vec<_> = regions.iter().collect();
            prop_assert!(all.windows(2).all(|w| w[0].end < w[1].start), "disjoint, sorted, joined");
            let managed = |from: usize, to: usize| VirtRange {
                start: VirtAddr(from * 4096),
                end: VirtAddr(to * 4096),
            };
            for from in 0..80 {
                let within = from..(from + 13).min(80);
                let first = within.clone().find(|page| model[*page]);
                let extent = first.map(|first| {
                    managed(first, 1 + within.clone().rfind(|page| model[*page]).unwrap_or(first))
                });
                prop_assert_eq!(regions.extent(managed(within.start, within.end)), extent);
            }
            let mut outside = 0;
            regions.gaps(VirtRange { start: VirtAddr(0), end: VirtAddr(80 * 4096) }, |gap| {
                outside += gap.len() / 4096
            });
            prop_assert_eq!(outside, model.iter().filter(|inside| !**inside).count());
        }
    }
}
