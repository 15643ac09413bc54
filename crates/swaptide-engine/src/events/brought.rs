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
//! 3. A page whose mapping changed after it came in, and perhaps before the kernel copied it, is
//!    [`Brought::Changed`]: what the child should find there is unknown.
//!
//! Locks: none; it is the handler's.

use swaptide_store::Page;
use swaptide_sys::Errno;
use swaptide_sys::mem::Mapping;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr};

use crate::mm::types::{PageNo, range_of};
use crate::mm::vma_change::VmaChange;

/// Most pages that come in for other threads during a fork that is followed.
pub(crate) const MAX_HELPED_PAGES: usize = 1024;
/// More pages than come in with one fault.
pub(crate) const MAX_PAGES_PER_FAULT: usize = 512;
/// Pages of all other threads, and of a fault of the forking thread, which are forgotten at once.
const CAPACITY: usize = MAX_HELPED_PAGES + MAX_PAGES_PER_FAULT;

/// What is known of a page on record.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Brought<'a> {
    /// It held this when it came in.
    Held(&'a Page),
    /// Its mapping has changed since (invariant 3).
    Changed,
}

/// The record; empty but during such a fork.
pub(crate) struct BroughtPages {
    /// Each with whether its mapping has changed since.
    pages: Vec<(PageNo, bool)>,
    /// A page for each of [`BroughtPages::pages`]. None where forks are told of.
    copies: Option<Mapping>,
    /// Pages of the copies that were written since they were given back.
    most: usize,
}

impl BroughtPages {
    /// Room for what comes in during one fork, if forks are `followed`: nothing may be allocated
    /// later.
    pub(crate) fn new(followed: bool) -> Result<BroughtPages, Errno> {
        if !followed {
            return Ok(BroughtPages { pages: Vec::new(), copies: None, most: 0 });
        }
        let copies = Mapping::reserve(CAPACITY * PAGE_SIZE)?;
        copies.unlock();
        Ok(BroughtPages { pages: Vec::with_capacity(CAPACITY), copies: Some(copies), most: 0 })
    }

    /// Pages on record.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Fills up to `n` pages from `first` on with what lies at `from`, by `fill`, which gives how
    /// many were filled; those are in the `record` then, if there is one (invariant 1).
    ///
    /// # Safety
    /// `n` whole pages lie at `from`, and nobody writes to them meanwhile.
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
            crate::fatal("a page came in during a fork that nobody follows")
        };
        for (k, content) in contents.iter().enumerate() {
            if self.pages.len() == CAPACITY {
                crate::fatal("more pages came in during a fork than can be recorded");
            }
            // SAFETY: the mapping is this record's own, and the reference ends with the statement.
            unsafe { copies.slice_mut(self.pages.len() * PAGE_SIZE, PAGE_SIZE) }
                .copy_from_slice(content);
            self.pages.push((first.plus(k), false));
        }
        self.most = self.most.max(self.pages.len());
    }

    /// The page of the record `at`.
    pub(crate) fn page(&self, at: usize) -> PageNo {
        self.pages[at].0
    }

    /// What is known of `page`, if it is on record.
    pub(crate) fn find(&self, page: PageNo) -> Option<Brought<'_>> {
        let at = self.pages.iter().position(|(brought, _)| *brought == page)?;
        if self.pages[at].1 {
            return Some(Brought::Changed);
        }
        // SAFETY: only `record` writes to the mapping, and it borrows this exclusively.
        let copy = unsafe { self.copies.as_ref()?.slice_mut(at * PAGE_SIZE, PAGE_SIZE) };
        Some(Brought::Held((&*copy).try_into().expect("a page's bytes")))
    }

    /// Mappings have changed before the kernel copied them, or may have.
    pub(crate) fn note_change(&mut self, change: VmaChange) {
        for (page, is_changed) in &mut self.pages {
            *is_changed |= change.concerns(range_of(*page, 1));
        }
    }

    /// Forgets all but the first `len` pages.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.pages.truncate(len);
    }

    /// Forgets all, and gives the memory back.
    pub(crate) fn clear(&mut self) {
        if let (1.., Some(copies)) = (self.most, &self.copies) {
            let _ = copies.discard(0, self.most * PAGE_SIZE);
        }
        self.most = 0;
        self.pages.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_page_held_is_found_until_it_is_forgotten() {
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
    fn where_forks_are_told_of_it_takes_no_memory() {
        let brought = BroughtPages::new(false).expect("memory");
        assert!(brought.copies.is_none() && brought.find(PageNo(0)).is_none());
    }
}
