//! Managed ranges whose mapping was replaced without an event.
//!
//! `shmat(SHM_REMAP)` puts its segment over what is mapped and tells no userfaultfd (Linux 6.18 has
//! no other call that does so to private memory). Libc's `shmat` is hooked; as a bare instruction
//! the call is not seen. The table then knows pages that are gone, and a mapping that is made there
//! later is not armed: a page taken out of it would read as zeros. So nothing is taken out of a
//! mapping that was not seen to be armed in the same batch.
//!
//! Owns: what was seen in this batch.
//!
//! Invariants
//! 1. [`Seen::ask`] answers `Armed` only for a range that lies in one armed mapping.
//! 2. A range is forgotten only while no change of mappings is unread or late: a mapping that is
//!    moved or unmapped in the usual way is not armed either until its event is applied.
//! 3. What is forgotten is in no list and has no word. Its slots are released: the mapping that
//!    they belonged to is gone. The next scan for memory finds what is mapped there.
//!
//! Locks: none of its own; the memory lock is held throughout a batch.

use swaptide_ipc::Counter;
use swaptide_sys::maps::vma_at;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::uffd::Coverage;

use crate::engine::{Engine, Mm};
use crate::events::apply::drop_pages;
use crate::mm::types::PAGES_PER_LEAF;

const LEAF_BYTES: usize = PAGES_PER_LEAF * PAGE_SIZE;

/// The kind of a range of the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lookup {
    /// One mapping, registered with the userfaultfd.
    Armed,
    /// A change of mappings is unread.
    Unread,
    /// Several mappings, or one that is not armed.
    NotOne,
}

/// The mappings found for the pages of one batch.
#[derive(Default)]
pub(crate) struct Seen {
    /// Armed, in one mapping.
    armed: VirtRange,
    /// A region of several mappings.
    several_mappings: VirtRange,
}

fn contains(outer: VirtRange, inner: VirtRange) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

impl Seen {
    /// Forgets what was seen: a new batch begins.
    pub fn clear(&mut self) {
        *self = Seen::default();
    }

    /// Whether `range` lies in one armed mapping. Mostly the region that it lies in does, or its 2
    /// MiB.
    pub fn ask(&mut self, engine: &Engine, mm: &Mm, range: VirtRange) -> Lookup {
        if contains(self.armed, range) {
            return Lookup::Armed;
        }
        let Some(region) = mm.regions.find(range.start) else { return Lookup::NotOne };
        let start = VirtAddr(range.start.0 / LEAF_BYTES * LEAF_BYTES);
        let leaf = VirtRange {
            start: start.max(region.start),
            end: start.offset(LEAF_BYTES).min(region.end),
        };
        for candidate in [region, leaf, range] {
            if candidate == self.several_mappings || !contains(candidate, range) {
                continue;
            }
            match engine.uffd().coverage(candidate) {
                Coverage::Whole => {
                    self.armed = candidate;
                    return Lookup::Armed;
                }
                Coverage::Changing => return Lookup::Unread,
                Coverage::NotWhole | Coverage::Gone if candidate == region => {
                    self.several_mappings = region
                }
                Coverage::NotWhole | Coverage::Gone => {}
            }
        }
        Lookup::NotOne
    }
}

/// Forgets the mapping of a page that was found not to be armed (invariant 3). False while a change
/// of mappings is unread or late (invariant 2).
pub(crate) fn forget(engine: &Engine, mm: &mut Mm, page: VirtRange) -> bool {
    if !mm.changes.late.is_empty()
        || engine.uffd().coverage(engine.handler_requests.range()) == Coverage::Changing
    {
        return false;
    }
    let mut range = page;
    if let (Ok(Some(info)), Some(region)) = (vma_at(page.start), mm.regions.find(page.start)) {
        let vma = info.vma().range;
        let whole = VirtRange { start: vma.start.max(region.start), end: vma.end.min(region.end) };
        if contains(whole, page) && engine.uffd().coverage(whole) == Coverage::NotWhole {
            range = whole;
        }
    }
    drop_pages(mm, engine, range);
    mm.regions.remove(range);
    mm.armed.remove(range);
    engine.count(Counter::PagesBusy, 1);
    (engine.start.log)("a mapping was replaced without an event: its old contents are dropped");
    true
}
