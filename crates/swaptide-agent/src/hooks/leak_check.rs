//! The hook of LeakSanitizer, also within AddressSanitizer: before it looks for leaks it asks the
//! program whether it shall, by a function that may be missing. Then it stops all threads of the
//! process, swaptide's too, and reads memory, also what is out.
//!
//! Owns: nothing. Locks: none.

use std::ffi::c_int;

use swaptide_sys::thread::tell;

use crate::process;

/// Has everything brought in, and this process let go. A program's own function of this name comes
/// first.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn __lsan_is_turned_off() -> c_int {
    if process::detach() {
        return 0;
    }
    tell(b"swaptide: a thread's fork does not come to its end: no search for leaks\n");
    1
}
