//! Which process this library was loaded into, or libc's fork made.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use swaptide_sys::thread::getpid;

/// See [`is_own_process`].
pub(crate) static OWN_PID: AtomicU32 = AtomicU32::new(0);

/// True in the process that the constructor or libc's fork made, and not in one that runs on its
/// memory.
pub(crate) fn is_own_process() -> bool {
    OWN_PID.load(Relaxed) == getpid().0
}
