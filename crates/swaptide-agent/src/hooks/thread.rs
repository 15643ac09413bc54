//! Hooks of libc's functions that start threads: the kernel writes to a thread's control block
//! without a fault, so the new thread pins it before anything else.
//!
//! Owns: nothing. Locks: none.

use std::ffi::{c_int, c_void};

use swaptide_sys::Errno;

use crate::pages::kernel_words;
use crate::real::{self, C11Routine, Routine};
use crate::starting;

/// In the new thread: frees the entry and pins the thread's control block. Returns the routine and
/// its argument.
fn begin(place: *mut c_void) -> (usize, *mut c_void) {
    let taken = starting::take(place as usize);
    kernel_words::pin_own_block();
    taken
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
    let Some(place) = starting::place_for(routine as usize, argument) else {
        // This one is not pinned.
        // SAFETY: the caller's own arguments.
        return unsafe { real(thread, attr, routine, argument) };
    };
    // SAFETY: the caller's own thread and attributes; `run_thread` calls the caller's routine with
    // the caller's argument.
    let result = unsafe { real(thread, attr, run_thread, place as *mut c_void) };
    if result != 0 {
        starting::take(place);
    } else {
        starting::started(place);
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
    let Some(place) = starting::place_for(routine as usize, argument) else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(thread, routine, argument) };
    };
    // SAFETY: the caller's own thread; `run_c11_thread` calls the caller's routine with the
    // caller's argument.
    let result = unsafe { real(thread, run_c11_thread, place as *mut c_void) };
    if result != 0 {
        starting::take(place);
    } else {
        starting::started(place);
    }
    result
}
