//! Hooks of libc's functions that start threads: the kernel writes to a thread's control block
//! without a fault, so the new thread pins it before anything else.
//!
//! Owns: [`WAITING`], by which a creator passes the routine to the new thread. Locks: none.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{
    AtomicU32, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use swaptide_sys::Errno;

use crate::pages::kernel_words;
use crate::real::{self, C11Routine, Routine};

/// What a new thread runs, on the way from its creator.
struct PendingRoutine {
    taken: AtomicU32,
    routine: AtomicUsize,
    argument: AtomicUsize,
}

static WAITING: [PendingRoutine; 256] = [const {
    PendingRoutine {
        taken: AtomicU32::new(0),
        routine: AtomicUsize::new(0),
        argument: AtomicUsize::new(0),
    }
}; 256];

/// The index of an entry for a new thread's routine; `None` when 256 threads start at the same
/// moment.
fn waiting_place(routine: usize, argument: *mut c_void) -> Option<usize> {
    let free = |w: &PendingRoutine| {
        w.taken.load(Relaxed) == 0 && w.taken.compare_exchange(0, 1, Acquire, Relaxed).is_ok()
    };
    let place = WAITING.iter().position(free)?;
    WAITING[place].routine.store(routine, Release);
    WAITING[place].argument.store(argument as usize, Release);
    Some(place)
}

/// In the new thread: frees the entry and pins the thread's control block. Returns the routine and
/// its argument.
fn begin(place: *mut c_void) -> (usize, *mut c_void) {
    let waiting = &WAITING[place as usize];
    let (routine, argument) = (waiting.routine.load(Acquire), waiting.argument.load(Acquire));
    waiting.taken.store(0, Release);
    kernel_words::pin_own_block();
    (routine, argument as *mut c_void)
}

extern "C" fn run_thread(place: *mut c_void) -> *mut c_void {
    let (routine, argument) = begin(place);
    // SAFETY: the word was made from such a function by `pthread_create` below.
    let routine: Routine = unsafe { std::mem::transmute(routine) };
    routine(argument)
}

extern "C" fn run_c11_thread(place: *mut c_void) -> c_int {
    let (routine, argument) = begin(place);
    // SAFETY: the word was made from such a function by `thrd_create` below.
    let routine: C11Routine = unsafe { std::mem::transmute(routine) };
    routine(argument)
}

/// Stands in front of libc's `pthread_create`: the new thread pins its control block before it does
/// anything else.
///
/// # Safety
/// As for pthread_create(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attr: *const c_void,
    routine: Routine,
    argument: *mut c_void,
) -> c_int {
    let Some(real) = real::CREATE.get() else { return Errno::AGAIN.raw_os_error() };
    let Some(place) = waiting_place(routine as usize, argument) else {
        // This one is not pinned.
        // SAFETY: the caller's own arguments.
        return unsafe { real(thread, attr, routine, argument) };
    };
    // SAFETY: the caller's own thread and attributes; `run_thread` calls the caller's routine with
    // the caller's argument.
    let result = unsafe { real(thread, attr, run_thread, place as *mut c_void) };
    if result != 0 {
        WAITING[place].taken.store(0, Release);
    }
    result
}

/// Stands in front of libc's `thrd_create`, as `pthread_create` does: in libc the one
/// calls the other directly, not through this hook.
///
/// # Safety
/// As for thrd_create(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn thrd_create(
    thread: *mut c_void,
    routine: C11Routine,
    argument: *mut c_void,
) -> c_int {
    const THRD_ERROR: c_int = 2;
    let Some(real) = real::THRD_CREATE.get() else { return THRD_ERROR };
    let Some(place) = waiting_place(routine as usize, argument) else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(thread, routine, argument) };
    };
    // SAFETY: the caller's own thread; `run_c11_thread` calls the caller's routine with the
    // caller's argument.
    let result = unsafe { real(thread, run_c11_thread, place as *mut c_void) };
    if result != 0 {
        WAITING[place].taken.store(0, Release);
    }
    result
}
