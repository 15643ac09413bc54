//! Ranges that a program wants treated apart at a fork: they are not managed.
//!
//! Owns: a list of ranges, only added to. Locks: none.

use std::sync::atomic::{AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use swaptide_sys::page::VirtRange;

const RANGES: usize = 64;
static APART: [(AtomicUsize, AtomicUsize); RANGES] = [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; RANGES];
static APART_USED: AtomicUsize = AtomicUsize::new(0);

/// Keeps a range out of management from now on. After 64 of them nothing new is managed any more: safe rather than large.
pub fn exclude(range: VirtRange) {
    let place = APART_USED.fetch_add(1, AcqRel);
    if let Some((start, end)) = APART.get(place) {
        start.store(range.start.0, Relaxed);
        end.store(range.end.0, Release);
    }
}

/// True for a range that touches an excluded one.
pub fn is_excluded(range: VirtRange) -> bool {
    let used = APART_USED.load(Acquire);
    used > RANGES
        || APART[..used].iter().any(|(start, end)| end.load(Acquire) > range.start.0 && start.load(Relaxed) < range.end.0)
}
