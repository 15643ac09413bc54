//! What the program said of how it reads its memory (`madvise`).
//!
//! Owns: the ranges that were spoken of, the last word on each last. Locks: none; that of
//! [`crate::readahead::Readahead`] guards it.

use swaptide_sys::page::{VirtAddr, VirtRange};

use crate::readahead::locality::Reading;

/// Ranges that are remembered at most; more are ignored.
const MAX_HINTS: usize = 256;

/// The ranges for which the program gave advice, with how it reads them.
#[derive(Default)]
pub(crate) struct ReadingHints(Vec<(VirtRange, Reading)>);

impl ReadingHints {
    /// Returns the advice for an address.
    pub(crate) fn reading(&self, addr: VirtAddr) -> Reading {
        self.0
            .iter()
            .rev()
            .find(|(range, _)| range.contains(addr))
            .map_or(Reading::Unknown, |(_, reading)| *reading)
    }

    /// Remembers what was said of a range; it replaces what was said of parts of it.
    pub(crate) fn note(&mut self, range: VirtRange, reading: Reading) {
        self.0.retain(|(r, _)| !(range.start <= r.start && r.end <= range.end));
        if reading != Reading::Unknown && self.0.len() < MAX_HINTS {
            self.0.push((range, reading));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_sys::page::PAGE_SIZE;

    fn range(first: usize, end: usize) -> VirtRange {
        VirtRange { start: VirtAddr(first * PAGE_SIZE), end: VirtAddr(end * PAGE_SIZE) }
    }

    #[test]
    fn the_last_word_on_an_address_counts() {
        let mut hints = ReadingHints::default();
        let at = |hints: &ReadingHints, page| hints.reading(VirtAddr(page * PAGE_SIZE));
        hints.note(range(10, 20), Reading::Sequential);
        hints.note(range(12, 14), Reading::Random);
        assert_eq!((at(&hints, 11), at(&hints, 12)), (Reading::Sequential, Reading::Random));
        hints.note(range(0, 30), Reading::Unknown);
        assert_eq!((at(&hints, 11), at(&hints, 12)), (Reading::Unknown, Reading::Unknown));
    }
}
