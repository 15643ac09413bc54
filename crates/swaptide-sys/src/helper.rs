//! Operations that need privileges, done by another process on behalf of this one.
//!
//! A program may give up its privileges, or see another root, while its memory is managed. A child
//! that it forks then can neither make a userfaultfd nor open the files of /proc that the engine
//! needs. The supervisor still can: the agent registers here how to ask it.
//!
//! Owns: the helper, set once. Locks: none.

use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, Ordering};

use rustix::fd::{BorrowedFd, OwnedFd};

/// The requests that a helper answers.
#[derive(Debug)]
pub struct PrivilegedHelper {
    /// An open `/dev/userfaultfd`: with it a process needs no privilege to make a userfaultfd for
    /// its own memory.
    pub device: fn() -> Option<OwnedFd>,
    /// Enables these features on a new userfaultfd (`UFFDIO_API`) where this process may not. True
    /// on success.
    pub handshake: fn(BorrowedFd<'_>, u64) -> bool,
    /// A file of this process's directory in /proc.
    pub proc_file: fn(&CStr) -> Option<OwnedFd>,
}

static HELPER: AtomicPtr<PrivilegedHelper> = AtomicPtr::new(core::ptr::null_mut());

/// Sets the helper of this process.
pub fn set_helper(helper: &'static PrivilegedHelper) {
    HELPER.store(core::ptr::from_ref(helper).cast_mut(), Ordering::Release);
}

/// The helper, if there is one.
pub(crate) fn helper() -> Option<&'static PrivilegedHelper> {
    // SAFETY: null, or what `set_helper` was given, which lives as long as the process.
    unsafe { HELPER.load(Ordering::Acquire).as_ref() }
}
