//! Memory that stays: chunks that hold the control block of a thread, and ranges that a program wants treated apart at a fork.
//!
//! When a thread ends, the kernel clears a word in its control block and wakes whoever joins it. It does so while the thread is exiting, and a
//! fault then is not waited for: the word would never be cleared and the joiner would wait for ever. So these chunks are never taken out.
//!
//! Owns: a table of chunk numbers, open addressing, entries only added. Locks: none. Stacks are reused by libc, so that it fills slowly;
//! when it is full further control blocks are not pinned.

use std::sync::atomic::{AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use swaptide_engine::ids::ChunkNo;
use swaptide_sys::page::VirtRange;

const PLACES: usize = 4096;
const PROBES: usize = 16;

static TABLE: [AtomicUsize; PLACES] = [const { AtomicUsize::new(0) }; PLACES];

fn places(chunk: usize) -> impl Iterator<Item = &'static AtomicUsize> {
    let start = chunk.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 52;
    (0..PROBES).map(move |i| &TABLE[(start + i) % PLACES])
}

/// Pins the chunk of an address.
pub fn pin(addr: usize) {
    let chunk = addr >> 16;
    for place in places(chunk) {
        let found = place.load(Relaxed);
        if found == chunk || found == 0 && place.compare_exchange(0, chunk, Relaxed, Relaxed).is_ok() {
            return;
        }
    }
}

/// True for a pinned chunk.
pub fn is_pinned(chunk: ChunkNo) -> bool {
    places(chunk.0).any(|place| place.load(Relaxed) == chunk.0)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_pinned_is_pinned_and_its_neighbour_is_not() {
        for i in 1..500usize {
            pin(i * 0x20_0000 + 0x1234);
        }
        assert!((1..500).all(|i| is_pinned(ChunkNo(i * 0x20))));
        assert!(!is_pinned(ChunkNo(3 * 0x20 + 1)));
    }
}
