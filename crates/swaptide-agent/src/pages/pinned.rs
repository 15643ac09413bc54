//! Pages that stay in memory, since the kernel accesses them without waiting for us.
//!
//! For some accesses the kernel does not wait for a userfaultfd. A thread that is exiting clears a
//! word in its control block and walks its list of robust mutexes; a page that is out ends that
//! walk, or leaves the word as it was, and its waiters wait for ever. The futex
//! operations that write (`FUTEX_LOCK_PI` and others) fail with `EFAULT`. So the pages of such
//! words are never taken out:
//!
//! | page of | pinned | until |
//! |---|---|---|
//! | a thread's control block | by the thread, before it runs anything else | the thread is gone |
//! | a robust or PI mutex | by `pthread_mutex_init` | `pthread_mutex_destroy` |
//! | a word named to the kernel by a raw system call | by the hook of `syscall` | for good |
//!
//! Owns: a table of pages, in three levels of open addressing; a level is used when the window of
//! the one before it is full. An entry is a page and either a count or a thread id.
//!
//! Invariants
//! 1. A page is pinned if any level has an entry for it. A lookup reads a whole window of each
//!    level in use, so that an entry may be removed by storing 0.
//! 2. An entry with a thread id ends with its thread. Nothing removes it then: a thread that meets
//!    it and finds the thread gone does. The kernel has cleared the words of a thread before its id
//!    is gone.
//! 3. A thread that pins a page then waits until the engine chooses no pages ([`make_resident`]),
//!    and touches the page. From that moment on it is in memory.
//!
//! Locks: none. Nothing is allocated. When a page finds no place (more than 200,000 pinned pages),
//! it is not pinned.

use std::sync::atomic::{
    AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::SeqCst,
};

use swaptide_engine::mm::types::{ChunkNo, PAGES_PER_CHUNK, PageNo};
use swaptide_sys::page::{PAGE_SIZE, VirtAddr};
use swaptide_sys::thread::{Tid, lives, yield_now};

use crate::process;
use crate::seccomp;

/// Entries that a page may be at in each level.
const WINDOW_ENTRIES: usize = 16;

static FIRST: [AtomicU64; 1 << 10] = [const { AtomicU64::new(0) }; 1 << 10];
static SECOND: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];
static THIRD: [AtomicU64; 1 << 18] = [const { AtomicU64::new(0) }; 1 << 18];
static LEVELS: [&[AtomicU64]; 3] = [&FIRST, &SECOND, &THIRD];
/// The deepest level that has had an entry.
static DEEPEST_LEVEL: AtomicUsize = AtomicUsize::new(0);

/// An entry: the page above 23 bits, of which the highest says that the others are a thread's id.
/// Otherwise they are a count. Never 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PinnedEntry(u64);

const LOW_BITS: u32 = 23;
const IS_THREAD: u64 = 1 << (LOW_BITS - 1);
const VALUE_MASK: u64 = IS_THREAD - 1;
/// A count that is never reduced.
const PERMANENT: u64 = VALUE_MASK;
/// Pages above 2^47 bytes have no place, and are not managed either.
const MAX_PAGE_NUMBER: usize = 1 << 35;

impl PinnedEntry {
    fn counted(page: PageNo, count: u64) -> PinnedEntry {
        PinnedEntry((page.0 as u64) << LOW_BITS | count)
    }

    fn of_thread(page: PageNo, tid: Tid) -> PinnedEntry {
        PinnedEntry((page.0 as u64) << LOW_BITS | IS_THREAD | u64::from(tid.0) & VALUE_MASK)
    }

    fn page(self) -> PageNo {
        PageNo((self.0 >> LOW_BITS) as usize)
    }

    fn thread(self) -> Option<Tid> {
        (self.0 & IS_THREAD != 0).then_some(Tid((self.0 & VALUE_MASK) as u32))
    }

    /// The count, if the entry has one.
    fn count(self) -> Option<u64> {
        (self.0 & IS_THREAD == 0).then_some(self.0 & VALUE_MASK)
    }

    /// True if it is an entry of a thread that is gone.
    fn is_over(self) -> bool {
        self.thread().is_some_and(|tid| !lives(tid))
    }
}

/// The entries of a level at which the pages of a chunk may be.
fn window(level: &'static [AtomicU64], chunk: ChunkNo) -> impl Iterator<Item = &'static AtomicU64> {
    let start = (chunk.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) % level.len();
    (0..WINDOW_ENTRIES).map(move |i| &level[(start + i) % level.len()])
}

/// Changes the first entry that `change` has another value for. False if there is none.
fn update(
    places: impl Iterator<Item = &'static AtomicU64>,
    change: impl Fn(Option<PinnedEntry>) -> Option<u64>,
) -> bool {
    for place in places {
        let mut found = place.load(Acquire);
        while let Some(new) = change((found != 0).then_some(PinnedEntry(found))) {
            match place.compare_exchange(found, new, SeqCst, Acquire) {
                Ok(_) => return true,
                Err(now) => found = now,
            }
        }
    }
    false
}

/// Puts an entry where `change` takes it, level by level.
fn insert(page: PageNo, change: impl Fn(Option<PinnedEntry>) -> Option<u64>) {
    if page.0 >= MAX_PAGE_NUMBER {
        return;
    }
    for (depth, level) in LEVELS.iter().enumerate() {
        DEEPEST_LEVEL.fetch_max(depth, SeqCst);
        // The second round takes the places of threads that are gone, which costs a system call
        // each.
        if update(window(level, page.chunk()), &change)
            || !seccomp::is()
                && update(window(level, page.chunk()), |found| {
                    found.filter(|entry| entry.is_over()).and_then(|_| change(None))
                })
        {
            return;
        }
    }
}

/// The pages that `len` bytes from `addr` on lie in.
fn pages_of(addr: usize, len: usize) -> impl Iterator<Item = PageNo> {
    (addr / PAGE_SIZE..=(addr + len.max(1) - 1) / PAGE_SIZE).map(PageNo)
}

/// Pins some bytes as long as a thread lives. `tid` is the calling thread.
pub(crate) fn pin_for_thread(addr: usize, len: usize, tid: Tid) {
    for page in pages_of(addr, len) {
        let new = PinnedEntry::of_thread(page, tid);
        // The place of a thread that is gone is the caller's now. One that lives may have a word of
        // its own in this page, and keeps its entry.
        insert(page, |found| match found {
            None => Some(new.0),
            Some(entry)
                if entry == new || entry.page() == page && !seccomp::is() && entry.is_over() =>
            {
                Some(new.0)
            }
            Some(_) => None,
        });
    }
}

/// Pins some bytes until [`unpin`] is called as many times for them.
pub(crate) fn pin(addr: usize, len: usize) {
    for page in pages_of(addr, len) {
        insert(page, |found| match found {
            None => Some(PinnedEntry::counted(page, 1).0),
            Some(entry) if entry.page() == page => {
                entry.count().map(|count| PinnedEntry::counted(page, (count + 1).min(PERMANENT)).0)
            }
            Some(_) => None,
        });
    }
}

/// Undoes one [`pin`].
pub(crate) fn unpin(addr: usize, len: usize) {
    for page in pages_of(addr, len) {
        for level in &LEVELS[..=DEEPEST_LEVEL.load(Acquire)] {
            let reduced = |found: Option<PinnedEntry>| match found
                .filter(|entry| entry.page() == page)?
                .count()?
            {
                PERMANENT => None,
                1 => Some(0),
                count => Some(PinnedEntry::counted(page, count - 1).0),
            };
            if update(window(level, page.chunk()), reduced) {
                break;
            }
        }
    }
}

/// Pins some bytes for good. True if they were not pinned so before.
pub(crate) fn pin_permanently(addr: usize, len: usize) -> bool {
    let mut any = false;
    for page in pages_of(addr, len).filter(|page| page.0 < MAX_PAGE_NUMBER) {
        let whole = PinnedEntry::counted(page, PERMANENT).0;
        let has = LEVELS[..=DEEPEST_LEVEL.load(Acquire)]
            .iter()
            .any(|level| window(level, page.chunk()).any(|place| place.load(Acquire) == whole));
        if !has {
            any = true;
            insert(page, |found| match found {
                None => Some(whole),
                Some(entry) if entry.page() == page && entry.count().is_some() => Some(whole),
                Some(_) => None,
            });
        }
    }
    any
}

/// Returns a bit for each pinned page of a chunk.
pub(crate) fn pinned_pages(chunk: ChunkNo) -> u16 {
    let first = chunk.first().0;
    let mut mask = 0;
    for level in &LEVELS[..=DEEPEST_LEVEL.load(Acquire)] {
        for place in window(level, chunk) {
            // With `await_taking`: the engine announces that it chooses and then looks here; the
            // other thread pins and then looks whether the engine chooses. One sees the other.
            let entry = PinnedEntry(place.load(SeqCst));
            let at = entry.page().0.wrapping_sub(first);
            if entry.0 == 0 || at >= PAGES_PER_CHUNK {
                continue;
            }
            if entry.is_over() {
                let _ = place.compare_exchange(entry.0, 0, AcqRel, Relaxed);
            } else {
                mask |= 1 << at;
            }
        }
    }
    mask
}

/// Waits until the engine has done with what it chose before the last pin was made.
pub(crate) fn await_taking() {
    if seccomp::is() {
        if let Some(engine) = process::engine_without_calls() {
            engine.await_taking(std::hint::spin_loop);
        }
    } else if let Some(engine) = process::engine() {
        engine.await_taking(yield_now);
    }
}

/// Has the pages of what was pinned just now in memory, and to stay there: see invariant 3.
///
/// # Safety
/// The bytes are mapped and readable.
pub(crate) unsafe fn make_resident(addr: usize, len: usize) {
    await_taking();
    for page in pages_of(addr, len) {
        let at = VirtAddr(addr.max(page.0 * PAGE_SIZE));
        // SAFETY: the caller's; a byte of the range in this page.
        unsafe { at.as_ptr::<u8>().read_volatile() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_sys::thread::gettid;

    fn is_pinned(page: usize) -> bool {
        let page = PageNo(page);
        pinned_pages(page.chunk()) >> page.in_chunk() & 1 == 1
    }

    /// Pages of this test, in chunks that no other test has.
    fn page(test: usize, n: usize) -> usize {
        (test << 24) + n * 37
    }

    #[test]
    fn page_stays_until_last_unpin() {
        let at = |n| page(1, n) * PAGE_SIZE;
        for n in 0..20_000 {
            pin(at(n) + 8, 40);
            pin(at(n) + 80, 40);
        }
        assert!((0..20_000).all(|n| is_pinned(page(1, n))));
        assert!(!is_pinned(page(1, 7) + 1), "its neighbour is not pinned");
        (0..20_000).for_each(|n| unpin(at(n) + 8, 40));
        assert!((0..20_000).all(|n| is_pinned(page(1, n))));
        (0..20_000).for_each(|n| unpin(at(n) + 80, 40));
        assert!((0..20_000).all(|n| !is_pinned(page(1, n))));
    }

    #[test]
    fn range_across_two_pages_pins_both() {
        let at = page(2, 1) * PAGE_SIZE + PAGE_SIZE - 4;
        pin(at, 8);
        assert!(is_pinned(page(2, 1)) && is_pinned(page(2, 1) + 1) && !is_pinned(page(2, 1) + 2));
        unpin(at, 8);
        assert!(!is_pinned(page(2, 1)) && !is_pinned(page(2, 1) + 1));
    }

    #[test]
    fn a_threads_pages_are_free_when_it_is_gone_and_not_before() {
        let (told, tid) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            pin_for_thread(page(3, 1) * PAGE_SIZE, 8, gettid());
            told.send(()).expect("a thread waits");
            let _ = ends.recv();
        });
        tid.recv().expect("the thread says so");
        assert!(is_pinned(page(3, 1)));
        drop(end);
        thread.join().expect("it ends");
        let began = std::time::Instant::now();
        // A joiner continues a moment before the id is gone.
        while is_pinned(page(3, 1)) {
            assert!(began.elapsed().as_secs() < 60, "its page is pinned for good");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_page_that_two_threads_pin_stays_until_both_are_gone() {
        let at = page(7, 1) * PAGE_SIZE;
        pin_for_thread(at, 8, gettid());
        let second = move || pin_for_thread(at + 64, 8, gettid());
        std::thread::spawn(second).join().expect("it ends");
        let began = std::time::Instant::now();
        while began.elapsed().as_millis() < 200 {
            assert!(is_pinned(page(7, 1)), "the first thread lives");
        }
    }

    #[test]
    fn a_word_pinned_for_good_is_not_unpinned_and_counts_once() {
        let at = page(4, 1) * PAGE_SIZE;
        assert!(pin_permanently(at, 4) && !pin_permanently(at + 8, 4));
        pin(at, 40);
        unpin(at, 40);
        unpin(at, 40);
        assert!(is_pinned(page(4, 1)));
    }

    #[test]
    fn ended_threads_do_not_fill_the_table() {
        // No thread has this id: the largest there can be is 2^22.
        let gone = Tid(VALUE_MASK as u32);
        for n in 0..400_000 {
            pin_for_thread(page(5, n) * PAGE_SIZE, 8, gone);
        }
        let this = page(6, 1);
        pin_for_thread(this * PAGE_SIZE, 8, gettid());
        assert!(is_pinned(this));
        assert!(!is_pinned(page(5, 399_999)));
    }
}
