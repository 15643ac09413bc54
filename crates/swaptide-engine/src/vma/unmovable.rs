//! Memory that cannot go out because of what its mappings permit: told in the report and the
//! summary, so that a run that went past its budget says why.
//!
//! The kernel moves pages only between mappings that are both writable and permit the same. So what
//! is read-only or executable stays, whatever made it so and when. Locked memory stays because
//! the program asked for that. Modified pages of private file mappings stay because the kernel
//! registers only memory without a file. What is kept apart from children is not managed
//! ([`crate::vma::fork_advice`]). It is measured while mappings are listed
//! (`adopt`), where the process is near its limit, and at most once per [`SCAN_INTERVAL`]. What is
//! locked and read-only counts for both.
//!
//! Owns: the most that was found of each kind, and the time of the last scan.
//!
//! Invariant: the counters of a process hold the most that one scan found of each kind.
//!
//! Locks: none; it is the handler's.

use std::time::Duration;

use swaptide_ipc::Counter;
use swaptide_sys::maps::{Vma, for_each_advised_vma};
use swaptide_sys::page::{PAGE_SIZE, VirtRange};
use swaptide_sys::pagemap::Pagemap;
use swaptide_sys::process::locked_bytes;
use swaptide_sys::thread::{Nanos, now};

use crate::engine::Engine;
use crate::memcg::charge::Charge;
use crate::mm::types::pages_of;
use crate::mm::vma_set::VmaSet;

/// How old a scan may become while the process is past its limit.
const SCAN_INTERVAL: Duration = Duration::from_millis(250);
/// The same while it is near its limit, and within.
const NEAR_SCAN_INTERVAL: Duration = Duration::from_secs(1);
/// Less locked memory than this part of the limit is not looked for.
const MIN_LOCKED_DIVISOR: u64 = 32;
/// Looking for it may take one part of this many of the handler's time: the kernel walks all page
/// tables.
const LOCKED_TIME_DIVISOR: u32 = 64;
/// The kinds of memory that cannot go out, each with its counter.
const KINDS: [Counter; 5] = [
    Counter::UnmovableReadOnly,
    Counter::UnmovableExecutable,
    Counter::UnmovableLocked,
    Counter::UnmovableFile,
    Counter::UnmovableUnforked,
];
const READ_ONLY: usize = 0;
const EXECUTABLE: usize = 1;
const LOCKED: usize = 2;
const FILE: usize = 3;
/// What [`crate::vma::fork_advice`] found.
pub(crate) const UNFORKED: usize = 4;

/// Memory that cannot go out, by kind, at the last scan.
#[derive(Default)]
pub struct Unmovable {
    looked_at: Option<Nanos>,
    /// Pages of the scan under way, and the most of one scan so far.
    pages: [usize; KINDS.len()],
    /// Those of them that are of managed memory, and their mappings.
    managed: usize,
    counted: VmaSet,
    /// Pages of managed memory that are locked, when they were last looked for, and the time that
    /// took.
    locked: usize,
    locked_ranges: VmaSet,
    locked_at: Option<Nanos>,
    locked_took: Duration,
    /// Pages that were locked then, wherever and whether touched.
    locked_then: usize,
    most: [usize; KINDS.len()],
}

impl Unmovable {
    /// Begins a scan. False where none is due.
    pub fn begin(&mut self, charge: &Charge) -> bool {
        let interval = if charge.is_past_limit() { SCAN_INTERVAL } else { NEAR_SCAN_INTERVAL };
        let is_early = self.looked_at.is_some_and(|then| now().since(then) < interval);
        if !charge.is_near_limit() || is_early {
            return false;
        }
        self.looked_at = Some(now());
        self.pages = [0; KINDS.len()];
        self.managed = 0;
        self.counted = VmaSet::default();
        true
    }

    /// Counts pages of a kind.
    pub fn add(&mut self, kind: usize, pages: usize) {
        self.pages[kind] += pages;
    }

    /// Counts pages of a mapping that cannot go out, of the kind that it is of.
    pub(crate) fn add_mapping(
        &mut self,
        kind: usize,
        range: VirtRange,
        pagemap: &mut Pagemap,
        is_managed: bool,
    ) {
        let pages = present(pagemap, range);
        self.add(kind, pages);
        if is_managed {
            self.managed += pages;
            self.counted.insert(range);
        }
    }

    /// Ends a scan: what is more than at any before is counted. `buf`: room for a text of /proc.
    pub(crate) fn end(&mut self, engine: &Engine, pagemap: &mut Pagemap, buf: &mut [u8]) {
        let locked = locked_bytes().unwrap_or(0) as usize / PAGE_SIZE;
        let least = engine.charge.limit() / MIN_LOCKED_DIVISOR;
        let is_much = |pages: usize| (pages * PAGE_SIZE) as u64 > least;
        let rest = self.locked_took * LOCKED_TIME_DIVISOR;
        let began = now();
        let has_changed = is_much(locked.abs_diff(self.locked_then))
            || self.locked_ranges.iter().any(|range| self.counted.overlaps(range));
        if !is_much(locked) {
            self.locked = 0;
        } else if has_changed || self.locked_at.is_none_or(|then| began.since(then) >= rest) {
            // What is locked and was never touched is no memory.
            let (counted, mut pages) = (&self.counted, 0);
            let ranges = &mut self.locked_ranges;
            *ranges = VmaSet::default();
            let _ = for_each_advised_vma(buf, |range, advised| {
                let is_new = advised.locked && !counted.overlaps(range);
                if is_new && engine.mm.lock().regions.overlaps(range) {
                    pages += present(pagemap, range);
                    ranges.insert(range);
                }
                true
            });
            self.locked = pages;
            self.locked_then = locked;
            self.locked_at = Some(now());
            self.locked_took = now().since(began);
        }
        let unmovable = self.managed + self.locked.min(locked);
        engine.charge.set_unmovable((unmovable * PAGE_SIZE) as u64);
        self.add(LOCKED, locked);
        for (kind, more) in self.more().into_iter().enumerate() {
            engine.count(KINDS[kind], more);
        }
    }

    /// By how many pages of each kind this scan has found more than any before.
    fn more(&mut self) -> [usize; KINDS.len()] {
        let mut more = [0; KINDS.len()];
        for (kind, more) in more.iter_mut().enumerate() {
            *more = self.pages[kind].saturating_sub(self.most[kind]);
            self.most[kind] += *more;
        }
        more
    }
}

/// Pages of a range that are there.
fn present(pagemap: &mut Pagemap, range: VirtRange) -> usize {
    let mut pages = 0;
    let _ = pagemap.runs(range, |run| pages += pages_of(run.range).len());
    pages
}

/// The kind of a mapping, if it is one whose pages cannot be moved.
pub fn kind(vma: &Vma<'_>) -> Option<usize> {
    if !vma.private || vma.name.starts_with(b"[v") {
        return None;
    }
    if vma.inode != 0 {
        return Some(FILE);
    }
    match (vma.exec, vma.read && !vma.write) {
        (true, _) => Some(EXECUTABLE),
        (false, true) => Some(READ_ONLY),
        (false, false) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_of_each_kind_is_counted_once() {
        let mut unmovable = Unmovable::default();
        let charge = Charge::new(64 << 20, 75, 0);
        charge.publish(60 << 8, 0, 0);
        assert!(!unmovable.begin(&charge));
        charge.publish(63 << 8, 0, 0);
        assert!(unmovable.begin(&charge));
        charge.publish(65 << 8, 0, 0);
        assert!(!unmovable.begin(&charge), "too soon");
        unmovable.add(0, 10);
        unmovable.add(0, 5);
        assert_eq!(unmovable.more(), [15, 0, 0, 0, 0]);
        unmovable.pages = [12, 3, 1, 0, 0];
        assert_eq!(unmovable.more(), [0, 3, 1, 0, 0]);
        unmovable.pages = [20, 0, 1, 2, 0];
        assert_eq!(unmovable.more(), [5, 0, 0, 2, 0]);
    }
}
