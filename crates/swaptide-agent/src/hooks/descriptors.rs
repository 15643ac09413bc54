//! Calls by which the program puts something at a number of its choice (`dup2`, `dup3`).
//!
//! What this library opens in the program's table is at the lowest free number for a moment
//! ([`swaptide_sys::high_fds`]). If the program chose that number then, it would get `EBUSY`, or
//! find its descriptor closed.
//!
//! Locks: none. A call waits two seconds at most.

use std::ffi::c_int;

use swaptide_sys::Errno;
use swaptide_sys::high_fds::while_naming;

use crate::real::{self, Symbol};
use crate::seccomp;

/// Calls libc's function; -1 and `ENOSYS` where there is none.
fn named<T: Copy>(symbol: &Symbol<T>, call: impl FnOnce(T) -> c_int) -> c_int {
    let Some(function) = symbol.get() else {
        real::set_errno(Errno::NOSYS);
        return -1;
    };
    // Under a filter nothing is opened, and waiting takes system calls.
    if seccomp::is() { call(function) } else { while_naming(|| call(function)) }
}

/// dup2(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    // SAFETY: the arguments are the program's own.
    named(&real::DUP2, |dup2| unsafe { dup2(old, new) })
}

/// dup3(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    // SAFETY: the arguments are the program's own.
    named(&real::DUP3, |dup3| unsafe { dup3(old, new, flags) })
}
