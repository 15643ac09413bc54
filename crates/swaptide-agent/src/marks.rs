//! What this memory is to the process that runs on it: its own, another's (the child of a vfork),
//! or a copy that a fork past libc has made, of which no handler was told.
//!
//! Owns: a page that every child finds empty (`MADV_WIPEONFORK`), made by the constructor.
//!
//! Invariants
//! 1. Before a thread takes a lock that it shares with others, it has claimed the memory: whatever
//!    lock was held in a copy is held by no thread of this process.
//! 2. Nothing here makes a system call once the page is there.
//!
//! Locks: none; a thread that claims the memory holds up others that do. Signals are blocked then,
//! but not under a filter: there a signal handler that forks within those few instructions, in the
//! first fork of a child past libc, waits for its own thread.

use std::sync::atomic::{
    AtomicPtr, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use swaptide_sys::mem::{Advice, Mapping, advise};
use swaptide_sys::page::PAGE_SIZE;

use crate::own_pid::is_own_process;

/// The marks of this memory. Children have zeros in it (`MADV_WIPEONFORK`), whatever makes them.
struct Marks {
    /// Tells whether the engine that the pointer is to manages this memory.
    managed: AtomicU32,
    /// Whose the memory is, and with it the copies of locks there: one of the next four.
    owner: AtomicU32,
}

/// A copy, in a child past libc or in libc's before [`claim`]: its locks may be held by threads of
/// the parent.
const COPIED: u32 = 0;
/// That of a process that the constructor or libc's fork made.
const OWNED: u32 = 1;
/// A thread frees the copies of locks.
const CLAIMED: u32 = 2;
/// That of a child past libc, after [`claim`].
const OWNED_PAST_LIBC: u32 = 3;

/// Null where there was no memory for it.
static MARKS: AtomicPtr<Marks> = AtomicPtr::new(std::ptr::null_mut());

fn marks() -> Option<&'static Marks> {
    // SAFETY: null, or a page of this library's own that stays mapped.
    unsafe { MARKS.load(Acquire).as_ref() }
}

/// Marks this memory as its process's own. Called by the constructor, before any lock is taken: a
/// child past libc, made at whatever moment, is to know its copies of locks.
pub(crate) fn mark_memory() {
    let _ = make_marks();
}

/// The marks, made if there are none.
fn make_marks() -> Option<&'static Marks> {
    if marks().is_none()
        && let Ok(page) = Mapping::reserve(PAGE_SIZE)
        // SAFETY: nothing is there yet.
        && unsafe { advise(page.range(), Advice::WipeOnFork) }.is_ok()
    {
        let made = page.as_ptr().cast::<Marks>();
        // SAFETY: a page of zeros, which are marks; no other thread has its address yet.
        unsafe { &*made }.owner.store(OWNED, Relaxed);
        if MARKS.compare_exchange(std::ptr::null_mut(), made, AcqRel, Acquire).is_ok() {
            // Never unmapped.
            std::mem::forget(page);
        }
    }
    marks()
}

/// The engine is this process's own from now on: before the pointer to it is set, or in libc's
/// child.
pub(crate) fn set_own_mark() {
    if let Some(marks) = make_marks() {
        marks.managed.store(1, Release);
    }
}

/// False in a child past libc: it has the pointer and not the engine.
pub(crate) fn bears_mark() -> bool {
    marks().is_none_or(|marks| marks.managed.load(Acquire) != 0)
}

/// True in a child in which [`claim`] was not called. A process id does not tell: one made
/// with `CLONE_VM` has another and the same memory.
pub(crate) fn is_copied_memory() -> bool {
    marks().is_some_and(|marks| marks.owner.load(Acquire) == COPIED)
}

/// True in a process that runs on another's memory: the child of a vfork.
pub(crate) fn is_guest() -> bool {
    marks().is_none_or(|marks| marks.owner.load(Acquire) == OWNED) && !is_own_process()
}

/// The first call in a copied memory runs `free`, and the memory is its process's own afterwards:
/// libc's child's (`is_libcs`), or that of one past libc. Other threads wait for that.
pub(crate) fn claim(is_libcs: bool, free: impl FnOnce()) {
    let Some(marks) = marks() else { return };
    loop {
        // With the store below: a thread that finds it claimed finds the locks freed.
        match marks.owner.compare_exchange(COPIED, CLAIMED, AcqRel, Acquire) {
            Ok(_) => break,
            Err(CLAIMED) => std::hint::spin_loop(),
            Err(_) => return,
        }
    }
    free();
    marks.owner.store(if is_libcs { OWNED } else { OWNED_PAST_LIBC }, Release);
}
