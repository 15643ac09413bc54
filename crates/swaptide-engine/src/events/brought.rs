//! Pages that came in during a fork that is followed, and what was in them then.
//!
//! Nothing tells when the kernel copies a mapping for such a child. A page that came in meanwhile
//! is missing in the child if its mapping was copied before. The child has to get what the page
//! held when it came in: until then it was out, so that is what a fork had found there. What the
//! parent's memory holds later may have been written after the fork, or be gone.
//!
//! Invariants
//! 1. A page is recorded before the kernel is asked to fill it.
//! 2. While a fork is under way nothing goes out, so a page comes in once.
//! 3. A page that was given up or unmapped after it came in, and perhaps before the kernel copied
//!    it, is [`Brought::Changed`]: what the child should find there is unknown. One that was moved
//!    is not: a child that lacks it has it where it was.
//! 4. The record is by what the table says: while it is kept, no change is applied to the table.
//! 5. Where more comes in than there is room for, the record says so
//!    ([`BroughtPages::has_overflowed`]): a page that the child lacks may be one of those.
//!
//! Locks: none; it is the handler's.

use swaptide_store::Page;
use swaptide_sys::Errno;
use swaptide_sys::mem::Mapping;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr};

use crate::mm::types::{PageNo, range_of};
use crate::mm::vma_change::VmaChange;

/// Pages for which there is room that come in for other threads during a fork that is followed.
const MAX_HELPED_PAGES: usize = 1024;
/// More pages than come in with one fault.
const MAX_PAGES_PER_FAULT: usize = 512;
/// Pages of all other threads, and of a fault of the forking thread, which are forgotten at once.
const CAPACITY: usize = MAX_HELPED_PAGES + MAX_PAGES_PER_FAULT;

/// The record of a page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Brought<'a> {
    /// It held this when it came in.
    Held(&'a Page),
    /// Its mapping has changed since (invariant 3).
    Changed,
}

/// The record; empty but during such a fork.
pub(crate) struct BroughtPages {
    pages: Vec<BroughtPage>,
    /// A page for each of [`BroughtPages::pages`]. None where forks are told of.
    copies: Option<Mapping>,
    /// Pages of the copies that were written since they were given back.
    most: usize,
    has_overflowed: bool,
}

/// A page on record.
struct BroughtPage {
    /// Its page number in the table.
    page: PageNo,
    /// Its page number after the changes noted since.
    now: PageNo,
    /// It was given up since, or unmapped.
    is_changed: bool,
}

impl BroughtPages {
    /// Room for what comes in during one fork, if forks are `followed`: nothing may be allocated
    /// later.
    pub(crate) fn new(followed: bool) -> Result<BroughtPages, Errno> {
        if !followed {
            return Ok(BroughtPages::unused());
        }
        let copies = Mapping::reserve(CAPACITY * PAGE_SIZE)?;
        copies.unlock();
        Ok(BroughtPages {
            pages: Vec::with_capacity(CAPACITY),
            copies: Some(copies),
            most: 0,
            has_overflowed: false,
        })
    }

    /// No room: nothing is recorded.
    pub(crate) fn unused() -> BroughtPages {
        BroughtPages { pages: Vec::new(), copies: None, most: 0, has_overflowed: false }
    }

    /// Pages on record.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// True when there may not be room for what comes in with another fault.
    pub(crate) fn is_full(&self) -> bool {
        self.pages.len() > MAX_HELPED_PAGES - MAX_PAGES_PER_FAULT
    }

    /// True when pages came in that are not on record.
    pub(crate) fn has_overflowed(&self) -> bool {
        self.has_overflowed
    }

    /// Fills up to `n` pages from `first` on with what lies at `from`, by `fill`, which gives how
    /// many were filled; those are in the `record` then, if there is one (invariant 1).
    ///
    /// # Safety
    /// `n` whole pages lie at `from`, and nothing writes to them meanwhile.
    pub(crate) unsafe fn filling<E>(
        record: Option<&mut BroughtPages>,
        first: PageNo,
        from: VirtAddr,
        n: usize,
        fill: impl FnOnce() -> Result<usize, E>,
    ) -> Result<usize, E> {
        let Some(record) = record else { return fill() };
        let recorded = record.len();
        // SAFETY: the caller's.
        let contents = unsafe { std::slice::from_raw_parts(from.as_ptr::<Page>(), n) };
        record.record(first, contents);
        let filled = fill();
        record.truncate(recorded + filled.as_ref().map_or(0, |filled| *filled));
        filled
    }

    /// Records that `first` and the pages behind it are about to be filled with `contents`.
    #[cold]
    pub(crate) fn record(&mut self, first: PageNo, contents: &[Page]) {
        let Some(copies) = self.copies.as_ref() else {
            crate::fatal("a page came in during a fork that is not followed")
        };
        for (k, content) in contents.iter().enumerate() {
            if self.pages.len() == CAPACITY {
                self.has_overflowed = true;
                break;
            }
            // SAFETY: the mapping is this record's own, and the reference ends with the statement.
            unsafe { copies.slice_mut(self.pages.len() * PAGE_SIZE, PAGE_SIZE) }
                .copy_from_slice(content);
            let page = first.plus(k);
            self.pages.push(BroughtPage { page, now: page, is_changed: false });
        }
        self.most = self.most.max(self.pages.len());
    }

    /// The page of the record `at`.
    pub(crate) fn page(&self, at: usize) -> PageNo {
        self.pages[at].page
    }

    /// Returns the record of `page`, if there is one.
    pub(crate) fn find(&self, page: PageNo) -> Option<Brought<'_>> {
        let at = self.pages.iter().position(|brought| brought.page == page)?;
        if self.pages[at].is_changed {
            return Some(Brought::Changed);
        }
        // SAFETY: only `record` writes to the mapping, and it borrows this exclusively.
        let copy = unsafe { self.copies.as_ref()?.slice_mut(at * PAGE_SIZE, PAGE_SIZE) };
        Some(Brought::Held((&*copy).try_into().expect("a page's bytes")))
    }

    /// A change of mappings was noted: the kernel made its copy before it or after it.
    pub(crate) fn note_change(&mut self, change: VmaChange) {
        for brought in &mut self.pages {
            let at = range_of(brought.now, 1);
            match change {
                VmaChange::Moved { from, to, .. } if change.takes(at) => {
                    brought.now = PageNo(brought.now.0 - PageNo::of(from).0 + PageNo::of(to).0);
                }
                _ => brought.is_changed |= change.concerns(at),
            }
        }
    }

    /// Forgets all but the first `len` pages.
    fn truncate(&mut self, len: usize) {
        self.pages.truncate(len);
    }

    /// Forgets all, and gives the memory back.
    pub(crate) fn clear(&mut self) {
        if let (1.., Some(copies)) = (self.most, &self.copies) {
            let _ = copies.discard(0, self.most * PAGE_SIZE);
        }
        self.most = 0;
        self.has_overflowed = false;
        self.pages.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_content_found_until_forgotten() {
        let mut brought = BroughtPages::new(true).expect("memory");
        brought.record(PageNo(7), &[[1; PAGE_SIZE], [2; PAGE_SIZE]]);
        brought.record(PageNo(3), &[[3; PAGE_SIZE]]);
        assert_eq!(brought.find(PageNo(8)), Some(Brought::Held(&[2; PAGE_SIZE])));
        assert_eq!((brought.find(PageNo(9)), brought.page(2), brought.len()), (None, PageNo(3), 3));
        brought.truncate(2);
        assert_eq!(brought.find(PageNo(3)), None);
        brought.clear();
        assert_eq!((brought.find(PageNo(7)), brought.len()), (None, 0));
        brought.record(PageNo(9), &[[4; PAGE_SIZE]]);
        assert_eq!(brought.find(PageNo(9)), Some(Brought::Held(&[4; PAGE_SIZE])));
    }

    #[test]
    fn a_page_whose_mapping_changed_is_not_given_as_it_was() {
        let mut brought = BroughtPages::new(true).expect("memory");
        brought.record(PageNo(7), &[[1; PAGE_SIZE], [2; PAGE_SIZE]]);
        brought.note_change(VmaChange::Dropped(range_of(PageNo(8), 4)));
        assert_eq!(brought.find(PageNo(7)), Some(Brought::Held(&[1; PAGE_SIZE])));
        assert_eq!(brought.find(PageNo(8)), Some(Brought::Changed));
    }

    #[test]
    fn a_moved_page_keeps_its_record_until_it_is_discarded() {
        let mut brought = BroughtPages::new(true).expect("memory");
        brought.record(PageNo(7), &[[1; PAGE_SIZE], [2; PAGE_SIZE]]);
        brought.record(PageNo(40), &[[3; PAGE_SIZE]]);
        let (from, to) = (PageNo(7).addr(), PageNo(40).addr());
        brought.note_change(VmaChange::Moved { from, to, len: 2 * PAGE_SIZE });
        assert_eq!(brought.find(PageNo(7)), Some(Brought::Held(&[1; PAGE_SIZE])));
        assert_eq!(brought.find(PageNo(40)), Some(Brought::Changed), "something else lies there");
        brought.note_change(VmaChange::Dropped(range_of(PageNo(41), 1)));
        assert_eq!(brought.find(PageNo(7)), Some(Brought::Held(&[1; PAGE_SIZE])));
        assert_eq!(brought.find(PageNo(8)), Some(Brought::Changed));
    }

    #[test]
    fn page_without_room_recorded_as_missing() {
        let mut brought = BroughtPages::new(true).expect("memory");
        for page in 0..CAPACITY {
            brought.record(PageNo(page), &[[1; PAGE_SIZE]]);
        }
        assert!(!brought.has_overflowed());
        brought.record(PageNo(CAPACITY), &[[1; PAGE_SIZE]]);
        assert!(brought.has_overflowed() && brought.find(PageNo(CAPACITY)).is_none());
        brought.clear();
        assert!(!brought.has_overflowed());
    }

    #[test]
    fn where_forks_are_told_of_it_takes_no_memory() {
        let brought = BroughtPages::new(false).expect("memory");
        assert!(brought.copies.is_none() && brought.find(PageNo(0)).is_none());
    }
}
