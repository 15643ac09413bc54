//! Whether a page of the program may be read from outside through a reference that is no pin.
//!
//! `vmsplice`, `MSG_ZEROCOPY` and io_uring's `SEND_ZC` take ordinary references to pages. The
//! kernel moves such a page to a staging frame all the same, and the pipe or the socket continues
//! reading the physical page there. So a frame whose page came from the program must not be written
//! to again. It can be given back to the kernel, which keeps the page until its last reader is
//! done.
//!
//! Giving back every frame costs a program that sends nothing up to a tenth of its speed. So the
//! rule holds from the moment the process makes its first call of that kind ([`References::note`]).
//!
//! Owns: one word, shared by the hooks, which set it, and the engine, which reads it.
//!
//! Invariants
//! 1. The word is set before the kernel takes the first reference, and is never cleared. A forked
//!    child has a copy of it. A new program (exec) has new memory, to which nothing has a
//!    reference.
//! 2. A page that has a reference was taken out after the word was set, or has never left. A thread
//!    that looks for a frame to write to holds the memory lock, under which the page was moved
//!    there, so it sees the word set. Frames lent out before hold pages without references.
//!
//! Locks: none.

use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed, Ordering::SeqCst};

/// A flag that pages of the program may have readers outside; never cleared.
#[derive(Debug, Default)]
pub struct References(AtomicBool);

impl References {
    /// No such call was made yet.
    pub const fn new() -> References {
        References(AtomicBool::new(false))
    }

    /// The program is about to have the kernel take references to its pages. Async-signal-safe.
    pub fn note(&self) {
        if !self.0.load(Relaxed) {
            self.0.store(true, SeqCst);
        }
    }

    /// True when a page that was taken out may have readers outside.
    pub fn are_possible(&self) -> bool {
        self.0.load(Acquire)
    }
}
