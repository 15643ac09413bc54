//! Without fork events: managed memory is not copied by a fork that nobody follows.
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
//!    moves takes its shield along; what moved while it was open is closed when its event is read.
//! 2. What is open is marked; what cannot be marked stays closed.
//! 3. A mapping that grows takes its shield along, and nobody tells: what is armed behind a region
//!    is listed before a fork, and so opened with it.
//!
//! Locks: none of its own. Advice that sends no event may be given with the memory lock held.

use swaptide_sys::Errno;
use swaptide_sys::mem::{Advice, advise};
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::thread::now;
use swaptide_sys::uffd::Coverage;

use crate::engine::Mm;
use crate::event_loop::{Handler, LATE_EVENT_TIMEOUT};

fn advise_fork(range: VirtRange, advice: Advice) -> Result<(), Errno> {
    // SAFETY: none of these changes what is in memory.
    unsafe { advise(range, advice) }
}

/// Keeps a range out of forks.
///
/// # Errors
/// When a mapping would have to be split and there are too many.
pub(crate) fn deny(range: VirtRange) -> Result<(), Errno> {
    advise_fork(range, Advice::DontFork)
}

fn allow(range: VirtRange) -> Result<(), Errno> {
    advise_fork(range, Advice::Random)?;
    advise_fork(range, Advice::DoFork)
}

/// What of a range is managed, and is about to be managed no more, comes along at forks as it would
/// without.
pub(crate) fn restore(mm: &Mm, range: VirtRange) {
    for region in
        mm.regions.iter().filter(|region| region.start < range.end && range.start < region.end)
    {
        let part =
            VirtRange { start: region.start.max(range.start), end: region.end.min(range.end) };
        // Where something was unmapped a moment ago the rest is done all the same.
        let _ = advise_fork(part, Advice::DoFork);
    }
}

impl Handler {
    /// Before a fork that is followed; the workers stand still.
    ///
    /// A mapping that another thread has just moved is not where the table has it, and would stay
    /// closed. So it is repeated until no change was under way from before it to after it. Who
    /// moves mappings through libc waits for the handler, and so for the fork; past libc threads
    /// could continue for ever.
    pub(crate) fn allow_fork(&mut self) {
        let engine = self.engine;
        let began = now();
        let is_quiet =
            |handler: &Handler| handler.uffd.coverage(engine.bells.range()) != Coverage::Changing;
        loop {
            if is_quiet(self) {
                self.list_grown();
                self.allow_fork_of_regions();
                if is_quiet(self) {
                    return;
                }
            }
            if now().since(began) > LATE_EVENT_TIMEOUT {
                (engine.start.log)(
                    "mappings change without pause: a forked child may lack some of them",
                );
                return self.allow_fork_of_regions();
            }
            self.drain_events();
        }
    }

    /// Lists what mappings have grown by. Growing sends no event, and what came so has the shield
    /// of the rest: it would be missing in the child.
    ///
    /// What is armed behind a region may be the program's own as well, which has a userfaultfd of
    /// its own there: the kernel refuses to arm that for another.
    fn list_grown(&mut self) {
        self.each_region(|handler, region| {
            let Ok(Some(info)) = handler.maps.vma_at(region.end) else { return };
            let vma = info.vma();
            if !vma.is_private_anon() || handler.engine.mm.lock().regions.find(region.end).is_some()
            {
                return;
            }
            let tail = VirtRange { start: region.end, end: vma.range.end };
            // In this order: arming what is ours already changes nothing, and what is nobody's is
            // not to be armed.
            if handler.uffd.coverage(tail) == Coverage::Whole && handler.arm(tail) {
                let _ = handler.adopt_at(region.end);
            }
        });
    }

    pub(crate) fn allow_fork_of_regions(&mut self) {
        self.each_region(|handler, region| {
            if allow(region).is_ok() {
                return;
            }
            // Something of it was unmapped a moment ago: what is left is opened piece by piece.
            let mut at = region.start;
            while let Ok(Some(info)) = handler.maps.vma_at_or_next(at) {
                let vma = info.vma().range;
                if vma.start >= region.end {
                    return;
                }
                let part =
                    VirtRange { start: vma.start.max(region.start), end: vma.end.min(region.end) };
                let _ = allow(part);
                at = vma.end;
            }
        });
    }

    /// After it, in the parent and in the child.
    pub(crate) fn deny_fork(&mut self) {
        self.each_region(|handler, region| {
            let _ = advise_fork(region, Advice::Normal);
            match deny(region) {
                // The hole in it is told of by an event that is still to be read.
                Ok(()) | Err(Errno::NOMEM) => {}
                Err(errno) => (handler.engine.start.log)(&format!(
                    "memory at {:x} would read as zeros in a child of a raw fork ({})",
                    region.start.0,
                    swaptide_sys::ErrnoName(errno)
                )),
            }
        });
    }

    fn each_region(&mut self, mut f: impl FnMut(&mut Handler, VirtRange)) {
        let mut at = VirtAddr(0);
        loop {
            let next = self.engine.mm.lock().regions.at_or_after(at);
            let Some(region) = next else { return };
            f(self, region);
            at = region.end;
        }
    }
}
