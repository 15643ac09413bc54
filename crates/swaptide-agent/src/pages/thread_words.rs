//! The words that the kernel writes as threads of the program end, where no hook tells of them: in
//! a program that has not loaded the library ([`crate::injected`]).
//!
//! glibc's threads have them next to the head of their robust list, which the kernel tells of:
//! these pages are pinned ([`crate::pages::pinned`]). Other libcs' have one word for all threads
//! in their own data, which stays in memory where it is small.
//!
//! Owns: which threads were looked at. Locks: none; a thread that looks keeps others from it.

use std::mem::MaybeUninit;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::time::Duration;

use linux_raw_sys::general::__NR_get_robust_list;
use rustix::fs::{Mode, OFlags, RawDir};
use swaptide_engine::mm::types::ChunkNo;
use swaptide_sys::engine_threads::is_of_engine;
use swaptide_sys::procfs::parse_u64;
use swaptide_sys::raw::syscall6;
use swaptide_sys::thread::{Tid, now};

use crate::pages::pinned::{pin_permanently, pinned_pages};

static ARE_SOUGHT: AtomicBool = AtomicBool::new(false);

/// From now on threads are looked at before pages go out.
pub(crate) fn look_for() {
    ARE_SOUGHT.store(true, Relaxed);
}

/// Returns a bit for each page of a chunk that must stay. Called by the engine.
pub(crate) fn pages_that_stay(chunk: ChunkNo) -> u16 {
    pin_all();
    pinned_pages(chunk)
}

/// Between two looks at the threads, at least.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// And this many times what the last look took: the memory lock is held.
const LOOK_COST_FACTOR: u32 = 50;
/// The head of the robust list within glibc's struct of a thread. Below it are the thread's number
/// and what the kernel takes as it starts.
const BELOW_HEAD_BYTES: usize = 0x2e0;
/// From the head to the end of the struct, with the rseq area of glibc 2.35 to 2.40.
const HEAD_BYTES: usize = 0xa00 - BELOW_HEAD_BYTES;

/// When threads are to be looked at again ([`Nanos`]).
static NEXT_LOOK: AtomicU64 = AtomicU64::new(0);
/// One thread looks, and keeps others from it.
static IS_LOOKING: AtomicBool = AtomicBool::new(false);
/// Threads whose words are pinned: by the lowest bits of their numbers.
static KNOWN: [AtomicU32; 1024] = [const { AtomicU32::new(0) }; 1024];

/// Pins what the kernel writes as threads of the program end, as far as it tells where that is.
/// Called before pages are chosen to go out. A thread accesses its own words as it ends, so a page
/// that was out when it was pinned is in memory then.
fn pin_all() {
    if !ARE_SOUGHT.load(Relaxed) {
        return;
    }
    let began = now();
    if began.0 < NEXT_LOOK.load(Relaxed) || IS_LOOKING.swap(true, Acquire) {
        return;
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    if let Ok(dir) = rustix::fs::open(c"/proc/self/task", flags, Mode::empty()) {
        let mut buf = [MaybeUninit::uninit(); 2048];
        let mut entries = RawDir::new(dir, &mut buf);
        while let Some(Ok(entry)) = entries.next() {
            let Some(tid) = parse_u64(entry.file_name().to_bytes()) else { continue };
            pin_words_of(Tid(tid as u32));
        }
    }
    let ended = now();
    let pause = LOOK_INTERVAL.max(ended.since(began) * LOOK_COST_FACTOR);
    NEXT_LOOK.store(ended.0 + pause.as_nanos() as u64, Relaxed);
    IS_LOOKING.store(false, Release);
}

fn pin_words_of(tid: Tid) {
    let known = &KNOWN[tid.0 as usize % KNOWN.len()];
    if known.load(Relaxed) == tid.0 || is_of_engine(tid) {
        return;
    }
    let (mut head, mut len) = (0usize, 0usize);
    let (to, len_to) = ((&raw mut head) as usize, (&raw mut len) as usize);
    // SAFETY: the kernel writes two words.
    let done = unsafe { syscall6(__NR_get_robust_list, [tid.0 as usize, to, len_to, 0, 0, 0]) };
    if done == 0 && head > BELOW_HEAD_BYTES {
        // For good: the next thread has its words at the same place.
        pin_permanently(head - BELOW_HEAD_BYTES, BELOW_HEAD_BYTES + HEAD_BYTES);
    }
    // A thread that begins has no list yet.
    if done != 0 || head != 0 {
        known.store(tid.0, Relaxed);
    }
}
