//! What a process may not do itself any more, and somebody else does for it.
//!
//! A program may give up its privileges, or see another root, while its memory is managed. A child
//! that it forks then can neither make a userfaultfd nor open the files of /proc that the engine
//! needs. The one who may is the supervisor: the agent says here how it is asked.
//!
//! Owns: the patron, named once. Locks: none.

use core::ffi::CStr;
use core::sync::atomic::{AtomicPtr, Ordering};

use rustix::fd::{BorrowedFd, OwnedFd};

/// The ways to ask.
#[derive(Debug)]
pub struct Patron {
    /// `/dev/userfaultfd`, open: who has it needs no privilege to make a userfaultfd of its own
    /// memory.
    pub device: fn() -> Option<OwnedFd>,
    /// Asks the kernel for these features of a fresh userfaultfd, on behalf of who may not have
    /// them. True when it has them now.
    pub handshake: fn(BorrowedFd<'_>, u64) -> bool,
    /// A file of this process's directory in /proc.
    pub proc_file: fn(&CStr) -> Option<OwnedFd>,
}

static PATRON: AtomicPtr<Patron> = AtomicPtr::new(core::ptr::null_mut());

/// Names the patron of this process.
pub fn name(patron: &'static Patron) {
    PATRON.store(core::ptr::from_ref(patron).cast_mut(), Ordering::Release);
}

/// The patron, if there is one.
pub(crate) fn patron() -> Option<&'static Patron> {
    // SAFETY: null, or what `name` was given, which lives as long as the process.
    unsafe { PATRON.load(Ordering::Acquire).as_ref() }
}
