//! What threads do to pages without the memory lock, while several serve faults.
//!
//! Owns: for each thread the pages that it puts in place, whether its folio stands in the swap
//! cache, and whether another thread's fault waits for one of these pages.
//!
//! A thread that meets a fault on such a page forgets it: the kernel keeps the thread of the
//! program waiting at the address, and the one that works on the page wakes it
//! ([`Busy::end_filling`], [`Busy::end_loading`]).
//!
//! Locks: none; it lies inside the engine's memory lock.

use std::ops::Range;

use crate::mm::types::{FillerNo, MAX_FILLERS, PageNo};

/// The page ranges that each thread fills or loads without the memory lock.
pub(crate) struct Busy {
    /// Page numbers, of the threads whose bits are set in `is_filling`.
    filling: [Range<usize>; MAX_FILLERS],
    /// The same for `loading`: where the pages were when the load began.
    loads: [Range<usize>; MAX_FILLERS],
    /// A bit for each thread.
    is_filling: u64,
    loading: u64,
    wanted: u64,
}

const _: () = assert!(MAX_FILLERS <= u64::BITS as usize);

impl Default for Busy {
    fn default() -> Self {
        const NONE: [Range<usize>; MAX_FILLERS] = [const { 0..0 }; MAX_FILLERS];
        Busy { filling: NONE, loads: NONE, is_filling: 0, loading: 0, wanted: 0 }
    }
}

impl Busy {
    /// The thread that is putting a page in place.
    pub(crate) fn filler_of(&self, page: PageNo) -> Option<FillerNo> {
        let mut left = self.is_filling;
        while left != 0 {
            let at = left.trailing_zeros() as usize;
            if self.filling[at].contains(&page.0) {
                return Some(FillerNo(at as u8));
            }
            left &= left - 1;
        }
        None
    }

    /// A thread puts `n` pages from `first` on in place.
    pub(crate) fn begin_filling(&mut self, filler: FillerNo, first: PageNo, n: usize) {
        debug_assert!((first.0..first.0 + n).all(|page| self.filler_of(PageNo(page)).is_none()));
        self.filling[usize::from(filler.0)] = first.0..first.0 + n;
        self.is_filling |= 1 << filler.0;
    }

    /// It has done so, or could not. True when threads wait for some of them, which it is to wake.
    pub(crate) fn end_filling(&mut self, filler: FillerNo) -> bool {
        self.is_filling &= !(1 << filler.0);
        self.take_wanted(filler)
    }

    /// A thread's folio stands in the swap cache for pages that it brings in.
    pub(crate) fn begin_loading(&mut self, filler: FillerNo, first: PageNo, n: usize) {
        self.loads[usize::from(filler.0)] = first.0..first.0 + n;
        self.loading |= 1 << filler.0;
    }

    /// It does no longer. As [`Busy::end_filling`].
    pub(crate) fn end_loading(&mut self, filler: FillerNo) -> bool {
        self.loading &= !(1 << filler.0);
        self.take_wanted(filler)
    }

    /// True while the folio of a thread stands there.
    pub(crate) fn is_any_loading(&self) -> bool {
        self.loading != 0
    }

    /// A thread of the program waits for a page that this thread works on, and is to be woken by
    /// it. False where it would not be: the page was moved since its load began.
    pub(crate) fn want(&mut self, filler: FillerNo, page: PageNo) -> bool {
        let is_of = |bits: u64, pages: &[Range<usize>; MAX_FILLERS]| {
            bits >> filler.0 & 1 == 1 && pages[usize::from(filler.0)].contains(&page.0)
        };
        let is_its = is_of(self.is_filling, &self.filling) || is_of(self.loading, &self.loads);
        self.wanted |= u64::from(is_its) << filler.0;
        is_its
    }

    fn take_wanted(&mut self, filler: FillerNo) -> bool {
        let was = self.wanted >> filler.0 & 1 == 1;
        self.wanted &= !(1 << filler.0);
        was
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_has_one_thread_and_reports_waiters() {
        let mut busy = Busy::default();
        let (handler, server) = (FillerNo(0), FillerNo(3));
        busy.begin_filling(server, PageNo(100), 16);
        let fillers = [99, 100, 115, 116].map(|page| busy.filler_of(PageNo(page)));
        assert_eq!(fillers, [None, Some(server), Some(server), None]);
        busy.begin_filling(handler, PageNo(116), 1);
        assert_eq!(busy.filler_of(PageNo(116)), Some(handler));
        assert!(busy.want(server, PageNo(107)) && !busy.want(server, PageNo(116)));
        assert!(!busy.end_filling(handler), "another thread is waited for");
        assert!(busy.end_filling(server));
        assert_eq!(busy.filler_of(PageNo(100)), None);
        busy.begin_filling(server, PageNo(100), 1);
        assert!(!busy.end_filling(server), "told once");
    }

    #[test]
    fn loads_are_seen_until_the_last_has_ended() {
        let mut busy = Busy::default();
        assert!(!busy.is_any_loading());
        busy.begin_loading(FillerNo(0), PageNo(7), 1);
        busy.begin_loading(FillerNo(63), PageNo(50), 4);
        assert!(!busy.want(FillerNo(63), PageNo(7)) && busy.want(FillerNo(63), PageNo(53)));
        assert!(!busy.end_loading(FillerNo(0)) && busy.is_any_loading());
        assert!(busy.end_loading(FillerNo(63)) && !busy.is_any_loading());
    }
}
