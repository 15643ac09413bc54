//! Without fork events: managed memory is not copied by a fork that is not followed.
//!
//! What is swapped would be zeros in a child whose memory has no userfaultfd. With fork events the
//! kernel gives every child one, whatever made it. Without, a child past libc's fork would run on
//! zeros. So managed mappings do not come along at a fork (`MADV_DONTFORK`): such a child finds
//! nothing there, and is ended by the kernel when it touches it. For a fork that is followed they
//! are opened, and closed again after it.
//!
//! While they are open they bear a mark that a child's mappings have too (`MADV_RANDOM`): where
//! other threads have changed mappings at the moment of the fork, it tells the child what it has
//! from before from what is new ([`crate::fork::child_uffd`]).
//!
//! Invariants
//! 1. Nothing is listed as managed that would come along at a fork, but while one is followed. What
//!    moves takes its advice along; what moved without it gets it when its event is read.
//! 2. What is open is marked; what cannot be marked stays closed.
//! 3. A mapping that grows takes its advice along, and so does what a move leaves mapped
//!    (`MREMAP_DONTUNMAP`); no event tells. What is armed behind a region, and what was left, is
//!    listed before a fork, and so opened with it.
//!
//! Locks: none of its own. Advice that sends no event may be given with the memory lock held.

use swaptide_sys::Errno;
use swaptide_sys::advise_each::advise_each;
use swaptide_sys::mem::{Advice, advise};
use swaptide_sys::page::VirtRange;

pub(crate) fn advise_fork(range: VirtRange, advice: Advice) -> Result<(), Errno> {
    // SAFETY: none of these changes what is in memory.
    unsafe { advise(range, advice) }
}

/// The same for each of some ranges; `failed` is told the number of each for which it was refused.
pub(crate) fn advise_fork_each(
    ranges: &[VirtRange],
    advice: Advice,
    failed: impl FnMut(usize, Errno),
) {
    // SAFETY: none of these changes what is in memory.
    unsafe { advise_each(ranges, advice, failed) }
}

/// Keeps a range out of forks.
///
/// # Errors
/// When a mapping would have to be split and there are too many.
pub(crate) fn deny(range: VirtRange) -> Result<(), Errno> {
    advise_fork(range, Advice::DontFork)
}

/// Opens a range for a fork that is followed, and marks it.
///
/// # Errors
/// As for [`deny`].
pub(crate) fn allow(range: VirtRange) -> Result<(), Errno> {
    advise_fork(range, Advice::Random)?;
    advise_fork(range, Advice::DoFork)
}

/// Makes the armed parts of a range, which will no longer be managed, come along at forks as they
/// would without. `armed`: all that may have the advice.
pub(crate) fn restore(armed: impl Iterator<Item = VirtRange>, range: VirtRange) {
    for armed in armed.filter(|armed| armed.start < range.end && range.start < armed.end) {
        let part = VirtRange { start: armed.start.max(range.start), end: armed.end.min(range.end) };
        // Where something was unmapped a moment ago the rest is done all the same.
        let _ = advise_fork(part, Advice::DoFork);
    }
}
