//! Ranges that a program wants treated apart at a fork: they are not managed.
//!
//! Owns: a table of ranges. Locks: none.
//!
//! Invariant: what was excluded stays covered by some place of the table while it is mapped, so
//! that a reader finds it. A place only grows. It is freed only if nothing was mapped in its
//! range and no thread has named it since that look: its count tells.

use std::sync::atomic::{
    AtomicBool, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};

use swaptide_engine::mm::types::MANAGED_END;
use swaptide_sys::maps::{MapsFile, VmaInfo};
use swaptide_sys::page::{VirtAddr, VirtRange};

/// Ranges that are kept out at a time. More of them are joined with their neighbours.
const MAX_RANGES: usize = 256;
/// Ranges that are kept out for the time of one call.
const MAX_TEMPORARY: usize = 16;

/// A range that is kept out. It only grows, until it is free again.
struct ExcludedRange {
    start: AtomicUsize,
    /// The end, with a count of the calls that named the range in the bits below a page; 0: free.
    end: AtomicUsize,
}

const COUNT_MASK: usize = 0xfff;
/// The end of a place that was taken a moment ago and covers nothing yet.
const TAKEN: usize = usize::MAX & !COUNT_MASK;

impl ExcludedRange {
    const fn free() -> ExcludedRange {
        ExcludedRange { start: AtomicUsize::new(usize::MAX), end: AtomicUsize::new(0) }
    }

    /// Returns the range that it covers; `None` while it is free, or about to be taken.
    fn range(&self) -> Option<VirtRange> {
        let end = self.end.load(Acquire) & !COUNT_MASK;
        let start = self.start.load(Acquire);
        (start < end && end != TAKEN)
            .then_some(VirtRange { start: VirtAddr(start), end: VirtAddr(end) })
    }

    /// Takes it for a range, if it is free.
    fn claim(&self, range: VirtRange) -> bool {
        if self.end.compare_exchange(0, TAKEN, AcqRel, Relaxed).is_err() {
            return false;
        }
        self.start.store(range.start.0, Release);
        self.end.store(range.end.0, Release);
        true
    }

    /// Makes it cover a range as well. False if it was freed meanwhile.
    fn grow(&self, range: VirtRange) -> bool {
        self.start.fetch_min(range.start.0, AcqRel);
        let grown = |word: usize| {
            let end = (word & !COUNT_MASK).max(range.end.0);
            (word != 0 && word != TAKEN).then_some(end | word.wrapping_add(1) & COUNT_MASK)
        };
        // It may have been freed and taken for another range in between.
        self.end.fetch_update(AcqRel, Acquire, grown).is_ok()
            && self.start.load(Acquire) <= range.start.0
    }

    /// Frees it if nothing is mapped there, and no thread has named it since that was looked at.
    fn free_if_unmapped(&self, maps: &MapsFile) {
        let word = self.end.load(Acquire);
        let Some(range) = self.range() else { return };
        let next = maps.vma_at_or_next(range.start);
        let is_behind = |info: &VmaInfo| info.vma().range.start >= range.end;
        let is_unmapped = next.as_ref().is_ok_and(|next| next.as_ref().is_none_or(is_behind));
        if is_unmapped {
            let _ = self.end.compare_exchange(word, 0, AcqRel, Relaxed);
        }
    }
}

/// Advice was given for some memory that a child is not to have, or to find empty.
static ARE_KEPT_APART: AtomicBool = AtomicBool::new(false);

/// Keeps a range out as [`exclude`] does, because a child is not to have it or to find it empty.
/// That is the mapping's, wherever it moves: from now on the engine looks for it there
/// ([`swaptide_engine::vma`]).
pub(crate) fn keep_apart(range: VirtRange) {
    ARE_KEPT_APART.store(true, Release);
    exclude(range);
}

/// True if [`keep_apart`] was called.
pub(crate) fn is_fork_advice_given() -> bool {
    ARE_KEPT_APART.load(Acquire)
}

/// A range was kept out at some time: most programs never have one, and each scan asks for each of
/// their mappings.
static ANY: AtomicBool = AtomicBool::new(false);
static EXCLUDED: [ExcludedRange; MAX_RANGES] = [const { ExcludedRange::free() }; MAX_RANGES];
static TEMPORARY: [ExcludedRange; MAX_TEMPORARY] = [const { ExcludedRange::free() }; MAX_TEMPORARY];

fn overlap(a: VirtRange, b: VirtRange) -> bool {
    a.start < b.end && b.start < a.end
}

/// The distance in bytes between two ranges: 0 if they touch.
fn distance(a: VirtRange, b: VirtRange) -> usize {
    a.start.0.saturating_sub(b.end.0).max(b.start.0.saturating_sub(a.end.0))
}

/// Keeps a range out of management from now on. A range that is known, or touches a known one,
/// takes no place. Where all places are taken those go whose memory is unmapped; then the nearest
/// range grows to hold this one as well, and what lies between them is kept out, too.
pub(crate) fn exclude(range: VirtRange) {
    ANY.store(true, Release);
    exclude_in(&EXCLUDED, range);
}

fn exclude_in(places: &[ExcludedRange], range: VirtRange) {
    let range = VirtRange {
        start: range.start.page_down(),
        end: VirtAddr(range.end.0.min(MANAGED_END.0)).page_up(),
    };
    if range.start >= range.end {
        return;
    }
    let touches =
        |place: &&ExcludedRange| place.range().is_some_and(|known| distance(known, range) == 0);
    for is_tidy in [false, true] {
        if places.iter().filter(touches).any(|place| place.grow(range))
            || places.iter().any(|place| place.claim(range))
        {
            return;
        }
        if !is_tidy
            && !crate::seccomp::is()
            && let Ok(maps) = MapsFile::open_high()
        {
            places.iter().for_each(|place| place.free_if_unmapped(&maps));
        }
    }
    let known =
        |place: &ExcludedRange| place.range().map_or(usize::MAX, |known| distance(known, range));
    while !places.iter().min_by_key(|place| known(place)).is_some_and(|place| place.grow(range)) {
        if places.iter().any(|place| place.claim(range)) {
            return;
        }
    }
}

/// A range that is kept out until this is dropped.
pub(crate) struct TemporaryExclusion(Option<&'static ExcludedRange>);

impl Drop for TemporaryExclusion {
    fn drop(&mut self) {
        if let Some(place) = self.0 {
            place.end.store(0, Release);
        }
    }
}

/// Keeps a range out of management for the time of a call; for good where more than
/// [`MAX_TEMPORARY`] threads make one.
pub(crate) fn exclude_for_now(range: VirtRange) -> TemporaryExclusion {
    ANY.store(true, Release);
    let place = TEMPORARY.iter().find(|place| place.claim(range));
    if place.is_none() {
        exclude(range);
    }
    TemporaryExclusion(place)
}

/// True for a range that touches an excluded one.
pub(crate) fn is_excluded(range: VirtRange) -> bool {
    ANY.load(Acquire)
        && EXCLUDED
            .iter()
            .chain(&TEMPORARY)
            .any(|place| place.range().is_some_and(|apart| overlap(apart, range)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: usize, len: usize) -> VirtRange {
        VirtRange { start: VirtAddr(start), end: VirtAddr(start + len) }
    }

    fn is_excluded_range(places: &[ExcludedRange], range: VirtRange) -> bool {
        places.iter().any(|place| place.range().is_some_and(|apart| overlap(apart, range)))
    }

    #[test]
    fn a_range_named_again_takes_no_place() {
        let places = [const { ExcludedRange::free() }; 4];
        for _ in 0..10_000 {
            exclude_in(&places, range(0x7000, 0x1000));
        }
        exclude_in(&places, range(0x8000, 0x2000));
        exclude_in(&places, range(0x6000, 0x1000));
        assert_eq!(
            places.iter().filter_map(ExcludedRange::range).collect::<Vec<_>>(),
            [range(0x6000, 0x4000)]
        );
        assert!(
            !is_excluded_range(&places, range(0x5000, 0x1000))
                && !is_excluded_range(&places, range(0xa000, 0x1000))
        );
    }

    #[test]
    fn full_places_are_freed_of_what_is_unmapped_and_then_joined() {
        let places = [const { ExcludedRange::free() }; 4];
        // Page 16 and so on: no program has anything there.
        for n in 0..64 {
            exclude_in(&places, range(0x1_0000 + n * 0x2000, 0x1000));
        }
        assert!(is_excluded_range(&places, range(0x1_0000 + 63 * 0x2000, 0x1000)));
        assert!(
            !is_excluded_range(&places, range(0x1_0000, 0x1000)),
            "it is not mapped, and another one needed the place"
        );
        let map = swaptide_sys::mem::Mapping::reserve(64 * 0x1000).expect("memory");
        let base = map.range().start.0;
        for n in 0..32 {
            exclude_in(&places, range(base + n * 0x2000, 0x1000));
        }
        assert!(
            (0..32).all(|n| is_excluded_range(&places, range(base + n * 0x2000, 0x1000))),
            "what is mapped is never dropped"
        );
        assert!(
            !is_excluded_range(&places, range(base + 64 * 0x1000, 0x1000))
                && !is_excluded_range(&places, range(base - 0x1000, 0x1000))
        );
    }

    #[test]
    fn a_range_out_of_management_for_a_call_is_back_afterwards() {
        let distant = range(0x5000_0000_0000, 0x1000);
        let held = exclude_for_now(distant);
        assert!(is_excluded(distant));
        drop(held);
        assert!(!is_excluded(distant));
    }

    #[test]
    fn ranges_are_bounded_by_what_can_be_managed() {
        let places = [const { ExcludedRange::free() }; 2];
        exclude_in(&places, VirtRange { start: VirtAddr(1 << 50), end: VirtAddr(1 << 51) });
        assert!(places.iter().all(|place| place.range().is_none()));
        exclude_in(&places, VirtRange { start: VirtAddr(0), end: VirtAddr(usize::MAX) });
        assert_eq!(places[0].range(), Some(VirtRange { start: VirtAddr(0), end: MANAGED_END }));
    }
}
