//! What new threads run, on the way from their creators.
//!
//! Owns: [`WAITING`]. Locks: none.

use std::ffi::c_void;
use std::sync::atomic::{
    AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use crate::real::thread_pointer;

/// The start routine of a new thread, on the way from its creator.
struct PendingRoutine {
    /// The creator's control block while it is in the call; 0: the entry is free.
    creator: AtomicUsize,
    routine: AtomicUsize,
    argument: AtomicUsize,
}

static WAITING: [PendingRoutine; 256] = [const {
    PendingRoutine {
        creator: AtomicUsize::new(0),
        routine: AtomicUsize::new(0),
        argument: AtomicUsize::new(0),
    }
}; 256];

/// The index of an entry for a new thread's routine; `None` when 256 threads start at the same
/// moment.
pub(crate) fn place_for(routine: usize, argument: *mut c_void) -> Option<usize> {
    let this = thread_pointer();
    let free = |w: &PendingRoutine| {
        w.creator.load(Relaxed) == 0
            && w.creator.compare_exchange(0, this, Acquire, Relaxed).is_ok()
    };
    let place = WAITING.iter().position(free)?;
    WAITING[place].routine.store(routine, Release);
    WAITING[place].argument.store(argument as usize, Release);
    Some(place)
}

/// In a forked child: frees the entries of threads that start in its parent. Those of this thread
/// are in use, if a handler forked that came while it starts a thread.
pub(crate) fn forked() {
    let this = thread_pointer();
    for waiting in WAITING.iter().filter(|w| w.creator.load(Relaxed) != this) {
        waiting.creator.store(0, Release);
    }
}

/// The calling thread's call has succeeded: the entry is the new thread's alone, if it has not
/// freed it yet.
pub(crate) fn started(place: usize) {
    const STARTED: usize = 1;
    let _ = WAITING[place].creator.compare_exchange(thread_pointer(), STARTED, AcqRel, Relaxed);
}

/// Frees an entry; returns the routine and its argument.
pub(crate) fn take(place: usize) -> (usize, *mut c_void) {
    let waiting = &WAITING[place];
    let (routine, argument) = (waiting.routine.load(Acquire), waiting.argument.load(Acquire));
    waiting.creator.store(0, Release);
    (routine, argument as *mut c_void)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests use all entries.
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn started_threads_entries_free_in_child() {
        let _alone = ALONE.lock();
        let place = place_for(1, std::ptr::null_mut()).expect("a free entry");
        started(place);
        assert_ne!(WAITING[place].creator.load(Relaxed), 0, "the new thread's");
        forked();
        assert_eq!(WAITING[place].creator.load(Relaxed), 0, "no thread here takes it");
        // A new thread may be faster than the call that made it; the entry may be another's then.
        let place = place_for(1, std::ptr::null_mut()).expect("a free entry");
        take(place);
        started(place);
        assert_eq!(WAITING[place].creator.load(Relaxed), 0);
        let others = || place_for(2, std::ptr::null_mut());
        let other = std::thread::scope(|scope| scope.spawn(others).join()).expect("no panic");
        assert_eq!(other, Some(place));
        let before = WAITING[place].creator.load(Relaxed);
        started(place);
        assert_eq!(WAITING[place].creator.load(Relaxed), before);
        take(place);
    }

    #[test]
    fn entries_of_other_threads_are_free_in_a_forked_child() {
        let _alone = ALONE.lock();
        let fill = || while place_for(1, std::ptr::null_mut()).is_some() {};
        let own = place_for(1, std::ptr::null_mut()).expect("a free entry");
        std::thread::scope(|scope| scope.spawn(fill).join()).expect("no panic");
        assert_eq!(place_for(1, std::ptr::null_mut()), None);
        forked();
        assert_ne!(WAITING[own].creator.load(Relaxed), 0, "this thread's own stays");
        let free = WAITING.iter().filter(|w| w.creator.load(Relaxed) == 0).count();
        assert_eq!(free, WAITING.len() - 1);
        WAITING.iter().for_each(|w| w.creator.store(0, Release));
    }
}
