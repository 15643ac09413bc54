//! Which pages of a window are touched after it came in: by a sample.
//!
//! Nothing tells user space what a program touches of the pages it has. So of a window one page is
//! left out, now and then: if it is asked for while the program continues past the window, such
//! pages are wanted; if the program is two windows further and did not ask, it is evidence of pages
//! that come in for nothing. The cost is a fault for a page that was wanted.
//!
//! Owns: the pages that are left out at the moment, and how many pages came in since one was.
//!
//! Rules
//! 1. One page of 128 is left out at most, one of 1024 where the last ones of a stream were all
//!    wanted. Where the last one was not, one of 32: the next ones will cost nothing either, or
//!    else they clear the stream.
//! 2. A page is left out for one stream; when that ends, it tells nothing.
//!
//! Locks: none; [`crate::readahead::locality`] holds it.

use crate::mm::types::{PAGES_PER_CHUNK, PageNo};

/// The evidence from pages that were left out of a stream's windows so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trust {
    /// Too little was left out to tell.
    Unknown,
    /// The last ones were asked for.
    Sure,
    /// The last one was not.
    Doubt,
}

impl Trust {
    /// Pages of which one is left out.
    fn spacing(self) -> usize {
        match self {
            Trust::Unknown => 128,
            Trust::Sure => 1024,
            Trust::Doubt => 32,
        }
    }
}

/// Windows smaller than this are not sampled.
pub(crate) const MIN_WINDOW_PAGES: usize = 8;
/// The page was not wanted if the program continued for this many windows.
const MAX_WINDOWS_UNTOUCHED: u8 = 2;
const HOLES: usize = 8;

/// A stream: its number is never used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StreamId(pub u32);

#[derive(Clone, Copy)]
struct Hole {
    page: usize,
    stream: StreamId,
    windows_left: u8,
}

const NONE: Hole = Hole { page: usize::MAX, stream: StreamId(0), windows_left: 0 };

/// Pages left out of windows, and whether they were asked for.
pub struct Samples {
    holes: [Hole; HOLES],
    /// Pages that came in since one was left out.
    since: usize,
    chance: u32,
}

impl Default for Samples {
    fn default() -> Self {
        Samples { holes: [NONE; HOLES], since: 0, chance: 1 }
    }
}

impl Samples {
    /// A page that is to be left out of a window of `pages` pages from `page` on, if it is time.
    pub fn choose(&mut self, page: PageNo, pages: usize, trust: Trust) -> Option<PageNo> {
        self.since += pages;
        if pages < MIN_WINDOW_PAGES
            || self.since < trust.spacing()
            || !self.holes.iter().any(|hole| hole.page == NONE.page)
        {
            return None;
        }
        self.since = 0;
        self.chance = self.chance.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // The first chunk of a window is brought in before its thread is woken.
        let first = if pages > PAGES_PER_CHUNK { PAGES_PER_CHUNK } else { 1 };
        Some(page.plus(first + (self.chance >> 8) as usize % (pages - first)))
    }

    /// It was left out.
    pub fn left_out(&mut self, page: PageNo, stream: StreamId) {
        if let Some(hole) = self.holes.iter_mut().find(|hole| hole.page == NONE.page) {
            *hole = Hole { page: page.0, stream, windows_left: MAX_WINDOWS_UNTOUCHED };
        }
    }

    /// A page is asked for: the stream for which it was left out, if it was.
    pub fn asked(&mut self, page: PageNo) -> Option<StreamId> {
        let hole = self.holes.iter_mut().find(|hole| hole.page == page.0)?;
        Some(std::mem::replace(hole, NONE).stream)
    }

    /// A stream continued by a window: how many pages were left out for it and not asked for.
    pub(crate) fn went_on(&mut self, stream: StreamId) -> usize {
        let mut unwanted = 0;
        for hole in
            self.holes.iter_mut().filter(|hole| hole.page != NONE.page && hole.stream == stream)
        {
            hole.windows_left -= 1;
            if hole.windows_left == 0 {
                *hole = NONE;
                unwanted += 1;
            }
        }
        unwanted
    }

    /// A stream has ended.
    pub fn ended(&mut self, stream: StreamId) {
        self.holes.iter_mut().filter(|hole| hole.stream == stream).for_each(|hole| *hole = NONE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: StreamId = StreamId(7);

    #[test]
    fn sampling_never_drops_requested_page() {
        use Trust::{Doubt, Sure, Unknown};
        for (pages, trust) in
            [(8, Unknown), (8, Doubt), (16, Unknown), (64, Sure), (512, Sure), (512, Unknown)]
        {
            let mut samples = Samples::default();
            let mut left = 0;
            for window in 0..1000 {
                let first = PageNo(1 << 20).plus(window * pages);
                if let Some(page) = samples.choose(first, pages, trust) {
                    assert!(
                        page > first && page < first.plus(pages),
                        "{page:?} of {pages} from {first:?}"
                    );
                    left += 1;
                    samples.left_out(page, STREAM);
                    assert_eq!(samples.asked(page), Some(STREAM));
                }
            }
            let most = 1000 * pages / trust.spacing();
            assert!(left > 0 && left <= most.min(1000), "{left} of {most}");
        }
        assert_eq!(Samples::default().choose(PageNo(8), MIN_WINDOW_PAGES - 1, Trust::Doubt), None);
    }

    #[test]
    fn page_unused_for_two_windows_is_a_miss() {
        let mut samples = Samples::default();
        samples.left_out(PageNo(100), STREAM);
        samples.left_out(PageNo(200), StreamId(8));
        assert_eq!(samples.went_on(STREAM), 0);
        assert_eq!(samples.asked(PageNo(99)), None);
        assert_eq!(samples.went_on(STREAM), 1);
        assert_eq!(
            (samples.went_on(STREAM), samples.asked(PageNo(100))),
            (0, None),
            "it tells nothing any more"
        );
        samples.ended(StreamId(8));
        assert_eq!((samples.went_on(StreamId(8)), samples.went_on(StreamId(8))), (0, 0));
    }
}
