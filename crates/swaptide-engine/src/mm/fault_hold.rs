//! Pages that a thread must get to use.
//!
//! An instruction completes only while all pages that it accesses are in memory. Where the memory
//! that cannot go out reaches the limit, reclaim looks for pages all the time, and what a fault
//! brought in is all that it finds: without this module it went out before the thread had run, and
//! the thread faulted for ever.
//!
//! Owns: for each of the last [`MAX_THREADS`] threads that faulted, the last
//! [`MAX_PAGES_PER_THREAD`] different pages it faulted on, and when. Reclaim passes these pages by
//! for [`FAULT_HOLD_TIME`], whatever the limit is.
//!
//! Invariants
//! 1. A page is noted under the memory lock before it is filled, so no batch sees it unnoted.
//! 2. A thread's pages are displaced by its own later faults, or when [`MAX_THREADS`] other threads
//!    have faulted since its last fault.
//! 3. What is spared is bounded: [`MAX_PAGES_PER_THREAD`] pages (64 KiB) for each thread, 4 MiB in
//!    all.
//!
//! An x86-64 instruction accesses at most 8 pages of data and code in 4 operands that cross pages;
//! a gather or scatter of 16 elements more, but it keeps what it has done when it faults.
//!
//! The time bound keeps idle programs from holding pages: a thread that had no CPU for that long is
//! stopped, or faults again.
//!
//! Locks: none; inside the engine's memory lock.

use std::time::Duration;

use swaptide_sys::thread::Nanos;

use crate::mm::types::{ChunkNo, PageNo};

/// Threads whose pages are known.
const MAX_THREADS: usize = 64;
/// Pages of a thread.
const MAX_PAGES_PER_THREAD: usize = 16;
/// The time for which a page is spared after its fault.
const FAULT_HOLD_TIME: Duration = Duration::from_secs(1);
/// Counters of noted pages, by a hash of the chunk.
const BUCKETS: usize = 256;

/// The faults of a thread.
#[derive(Clone, Copy)]
struct Faults {
    /// The next place in `pages`, which is the oldest.
    next: u8,
    /// The number of entries of `pages` in use.
    used: u8,
    pages: [PageNo; MAX_PAGES_PER_THREAD],
    since: [Nanos; MAX_PAGES_PER_THREAD],
}

impl Faults {
    const NONE: Faults = Faults {
        next: 0,
        used: 0,
        pages: [PageNo(0); MAX_PAGES_PER_THREAD],
        since: [Nanos(0); MAX_PAGES_PER_THREAD],
    };

    fn pages(&self) -> &[PageNo] {
        &self.pages[..usize::from(self.used)]
    }

    fn position(&self, page: PageNo) -> Option<usize> {
        self.pages().iter().position(|p| *p == page)
    }
}

/// The pages that threads faulted on last, which stay until they could be used.
pub struct FaultHold {
    tids: [u32; MAX_THREADS],
    /// When each thread faulted last.
    last: [Nanos; MAX_THREADS],
    faults: Box<[Faults; MAX_THREADS]>,
    /// The thread that faulted last.
    current: usize,
    /// The number of noted pages in the chunks of each bucket. Most chunks need no further check.
    buckets: [u16; BUCKETS],
}

impl Default for FaultHold {
    fn default() -> FaultHold {
        FaultHold {
            tids: [0; MAX_THREADS],
            last: [Nanos(0); MAX_THREADS],
            faults: Box::new([Faults::NONE; MAX_THREADS]),
            current: 0,
            buckets: [0; BUCKETS],
        }
    }
}

fn bucket(chunk: ChunkNo) -> usize {
    (chunk.0 ^ chunk.0 >> 8) % BUCKETS
}

impl FaultHold {
    /// The thread faulted on the page.
    pub fn note(&mut self, tid: u32, page: PageNo, at: Nanos) {
        if self.tids[self.current] != tid {
            self.current = self.find(tid);
        }
        self.last[self.current] = at;
        let faults = &mut self.faults[self.current];
        if let Some(place) = faults.position(page) {
            faults.since[place] = at;
            return;
        }
        let place = usize::from(faults.next);
        if place < usize::from(faults.used) {
            self.buckets[bucket(faults.pages[place].chunk())] -= 1;
        } else {
            faults.used += 1;
        }
        faults.pages[place] = page;
        faults.since[place] = at;
        faults.next = ((place + 1) % MAX_PAGES_PER_THREAD) as u8;
        self.buckets[bucket(page.chunk())] += 1;
    }

    /// The place of a thread. A new one takes that of the thread whose last fault is oldest.
    fn find(&mut self, tid: u32) -> usize {
        if let Some(place) = self.tids.iter().position(|known| *known == tid) {
            return place;
        }
        let place = (0..MAX_THREADS).min_by_key(|place| self.last[*place].0).unwrap_or(0);
        for page in self.faults[place].pages() {
            self.buckets[bucket(page.chunk())] -= 1;
        }
        self.tids[place] = tid;
        self.faults[place] = Faults::NONE;
        place
    }

    /// A remote page that threads have waited for arrives: their time begins now.
    pub(crate) fn lands(&mut self, page: PageNo, at: Nanos) {
        if self.buckets[bucket(page.chunk())] == 0 {
            return;
        }
        for (faults, last) in self.faults.iter_mut().zip(&mut self.last) {
            if let Some(place) = faults.position(page) {
                faults.since[place] = at;
                *last = at;
            }
        }
    }

    /// Pages of the chunk that reclaim must pass by at `now`.
    pub(crate) fn spared(&self, chunk: ChunkNo, now: Nanos) -> u16 {
        if self.buckets[bucket(chunk)] == 0 {
            return 0;
        }
        let mut spared = 0;
        for (faults, last) in self.faults.iter().zip(&self.last) {
            if now.since(*last) >= FAULT_HOLD_TIME {
                continue;
            }
            for (page, since) in faults.pages().iter().zip(&faults.since) {
                if page.chunk() == chunk && now.since(*since) < FAULT_HOLD_TIME {
                    spared |= 1 << page.in_chunk();
                }
            }
        }
        spared
    }

    /// The program asked that these pages go out: they are not spared.
    pub fn give_up(&mut self, from: PageNo, to: PageNo) {
        for faults in self.faults.iter_mut() {
            for (page, since) in faults.pages.iter().zip(&mut faults.since) {
                if (from..to).contains(page) {
                    *since = Nanos(0);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: Nanos = Nanos(1 << 40);

    fn spares(fault_hold: &FaultHold, page: PageNo, now: Nanos) -> bool {
        fault_hold.spared(page.chunk(), now) >> page.in_chunk() & 1 == 1
    }

    #[test]
    fn the_last_pages_of_each_thread_are_spared_and_no_others() {
        let mut fault_hold = FaultHold::default();
        for round in 0..40 {
            for tid in 1..=MAX_THREADS as u32 {
                fault_hold.note(tid, PageNo(tid as usize * 1000 + round), BEGIN);
            }
        }
        for tid in 1..=MAX_THREADS {
            for round in 0..40 {
                let page = PageNo(tid * 1000 + round);
                assert_eq!(
                    spares(&fault_hold, page, BEGIN),
                    round >= 40 - MAX_PAGES_PER_THREAD,
                    "thread {tid}, fault {round}"
                );
            }
        }
        let noted: usize = fault_hold.buckets.iter().map(|n| usize::from(*n)).sum();
        assert_eq!(noted, MAX_THREADS * MAX_PAGES_PER_THREAD);
    }

    #[test]
    fn a_page_that_faults_again_displaces_none() {
        let mut fault_hold = FaultHold::default();
        (0..MAX_PAGES_PER_THREAD).for_each(|page| fault_hold.note(1, PageNo(page), BEGIN));
        (0..100).for_each(|_| fault_hold.note(1, PageNo(3), BEGIN));
        assert!((0..MAX_PAGES_PER_THREAD).all(|page| spares(&fault_hold, PageNo(page), BEGIN)));
    }

    #[test]
    fn the_thread_that_faulted_longest_ago_is_forgotten_first() {
        let mut fault_hold = FaultHold::default();
        for tid in 1..=MAX_THREADS as u32 + 1 {
            fault_hold.note(tid, PageNo(tid as usize * 100), Nanos(BEGIN.0 + u64::from(tid)));
        }
        assert!(!spares(&fault_hold, PageNo(100), BEGIN));
        assert!((2..=MAX_THREADS + 1).all(|tid| spares(&fault_hold, PageNo(tid * 100), BEGIN)));
        assert_eq!(fault_hold.buckets[bucket(PageNo(100).chunk())], 0);
    }

    #[test]
    fn pages_spared_for_limited_time_only() {
        let mut fault_hold = FaultHold::default();
        fault_hold.note(1, PageNo(7), BEGIN);
        let later = Nanos(BEGIN.0 + FAULT_HOLD_TIME.as_nanos() as u64);
        assert!(
            spares(&fault_hold, PageNo(7), Nanos(later.0 - 1))
                && !spares(&fault_hold, PageNo(7), later)
        );
        fault_hold.note(2, PageNo(500), later);
        assert!(!spares(&fault_hold, PageNo(7), later) && spares(&fault_hold, PageNo(500), later));
        fault_hold.give_up(PageNo(500), PageNo(501));
        assert!(!spares(&fault_hold, PageNo(500), later));
    }
}
