//! How far a fork has come, and what was read of others meanwhile.
//!
//! Owns: what is noted while nothing may be applied: changes of mappings, pages that came in, and
//! the userfaultfds of children.
//!
//! Invariants
//! 1. From [`ForkPhase::Prepared`] to the fork event nothing is allocated: the forking thread
//!    copies the allocator's memory too. What is noted then has its memory from the beginning;
//!    where that is too small, the copy counts as torn, and the child does not use it.
//! 2. What is noted is applied in its order, before a worker continues and before a fault is
//!    answered.
//! 3. A thread that gives pages up (`MADV_DONTNEED`) says so first, and the kernel drops them only
//!    after that was read; a fork is read after the kernel has made its copy. So the child of a
//!    fork that was read before it still has the pages ([`ForkState::noted_for`]).
//!
//! Locks: none; it is the handler's.

use swaptide_sys::Errno;
use swaptide_sys::uffd::{Event, Uffd};

use crate::events::brought::BroughtPages;
use crate::mm::vma_change::VmaChange;

/// Events of other threads for which there is room during a fork without allocating.
const NOTED_EVENTS_CAPACITY: usize = 16 << 10;

/// The progress of a fork that was made through libc.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum ForkPhase {
    /// No fork is under way.
    #[default]
    None,
    /// The workers are being quiesced. Events are applied as they come.
    Quiescing,
    /// The thread may be in fork(2): events are noted and not applied, faults of others are held.
    Prepared,
    /// The kernel has made its copy; the child does not serve itself yet. As before, but memory may
    /// be allocated again.
    Forked,
}

impl ForkPhase {
    /// True from the moment at which the forking thread has asked.
    pub(crate) fn is_under_way(self) -> bool {
        self != ForkPhase::None
    }

    /// True while events are noted and not applied.
    pub(crate) fn is_deferring(self) -> bool {
        matches!(self, ForkPhase::Prepared | ForkPhase::Forked)
    }
}

/// A child whose fork was just read.
pub(crate) struct NewChild {
    pub(crate) uffd: Uffd,
    /// The number of its fork among those that were read.
    pub(crate) fork: ForkNumber,
}

/// Forks in the order in which they were read; the first is 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(crate) struct ForkNumber(u64);

/// A change of mappings that was read and not applied.
pub(crate) struct Noted {
    pub(crate) change: VmaChange,
    /// The last fork that was read before it.
    after: ForkNumber,
}

/// The fork that is under way, and forks of other threads read meanwhile.
pub(crate) struct ForkState {
    pub(crate) phase: ForkPhase,
    /// The forking thread has returned from fork(2).
    pub(crate) is_done: bool,
    /// The forked child's userfaultfd.
    pub(crate) child: Option<NewChild>,
    /// Children of forks that came through no hook, and were not given anything yet.
    pub(crate) untracked: Vec<NewChild>,
    /// The last fork that was read.
    last: ForkNumber,
    /// Such children are given their pages: events are noted and not applied.
    pub(crate) populating: bool,
    /// Changes of mappings that were read and not applied.
    pub(crate) noted: Vec<Noted>,
    /// Pages that came in during a fork that is followed: its child may lack them.
    pub(crate) brought: BroughtPages,
    /// The forking thread was seen waiting after the engine's memory was changed for another
    /// thread.
    pub(crate) seen_waiting: bool,
    /// The engine's memory may have changed while it was copied: more was noted than there was room
    /// for, or another thread's child was attended to.
    pub(crate) is_torn: bool,
    /// The noted changes were applied since the handler was prepared.
    pub(crate) has_applied: bool,
    /// Changes were applied although the copy may have been made before them: nothing tells what
    /// the child would lack.
    pub(crate) is_lost: bool,
}

impl ForkState {
    /// No fork is under way. `followed`: the kernel does not tell of forks.
    ///
    /// # Errors
    /// When memory is refused.
    pub(crate) fn new(followed: bool) -> Result<ForkState, Errno> {
        Ok(ForkState {
            phase: ForkPhase::None,
            is_done: false,
            child: None,
            untracked: Vec::with_capacity(4),
            last: ForkNumber::default(),
            populating: false,
            noted: Vec::with_capacity(NOTED_EVENTS_CAPACITY),
            brought: BroughtPages::new(followed)?,
            seen_waiting: false,
            is_torn: false,
            has_applied: false,
            is_lost: false,
        })
    }

    /// Of a thread that reads nothing: no fork is ever under way.
    pub(crate) fn unused() -> ForkState {
        ForkState {
            phase: ForkPhase::None,
            is_done: false,
            child: None,
            untracked: Vec::new(),
            last: ForkNumber::default(),
            populating: false,
            noted: Vec::new(),
            brought: BroughtPages::unused(),
            seen_waiting: false,
            is_torn: false,
            has_applied: false,
            is_lost: false,
        }
    }

    /// True while events are noted and not applied: of what surrounds a page nothing is known for
    /// sure, only the page asked for is what the table says.
    pub(crate) fn notes_events(&self) -> bool {
        self.phase.is_deferring() || self.populating
    }

    /// True while a fork of any kind is attended to.
    pub(crate) fn is_busy(&self) -> bool {
        self.phase.is_under_way() || self.populating
    }

    /// True when what is noted should be applied soon, before there is no more room for it.
    pub(crate) fn is_noted_half_full(&self) -> bool {
        self.noted.len() >= NOTED_EVENTS_CAPACITY / 2
    }

    /// Notes an event for when the fork is over.
    pub(crate) fn note(&mut self, event: &Event) {
        let Some(change) = VmaChange::of(event) else {
            crate::fatal(&format!("the userfaultfd sent {event:?} during a fork"));
        };
        if self.phase == ForkPhase::Prepared && self.noted.len() == self.noted.capacity() {
            // The child must not use its copy of the allocator.
            self.is_torn = true;
        }
        if self.child.is_none() {
            self.brought.note_change(change);
        }
        self.noted.push(Noted { change, after: self.last });
    }

    /// Takes in a fork that was read: its child.
    pub(crate) fn new_child(&mut self, uffd: Uffd) -> NewChild {
        self.last.0 += 1;
        NewChild { uffd, fork: self.last }
    }

    /// The noted changes that the child of a fork may have (invariant 3).
    pub(crate) fn noted_for(&self, fork: ForkNumber) -> impl Iterator<Item = VmaChange> {
        let is_later = move |noted: &&Noted| {
            noted.after >= fork && matches!(noted.change, VmaChange::Dropped(_))
        };
        self.noted.iter().filter(move |noted| !is_later(noted)).map(|noted| noted.change)
    }

    /// The number of those that were read after the fork.
    pub(crate) fn noted_since(&self, fork: ForkNumber) -> usize {
        let is_kept = |noted: &Noted| !matches!(noted.change, VmaChange::Dropped(_));
        self.noted.iter().filter(|noted| noted.after >= fork && is_kept(noted)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_sys::page::{VirtAddr, VirtRange};

    fn range(page: usize) -> VirtRange {
        VirtRange { start: VirtAddr(page << 12), end: VirtAddr((page + 1) << 12) }
    }

    fn some_uffd() -> Uffd {
        Uffd::from_fd(std::fs::File::open("/dev/null").expect("/dev/null").into())
    }

    #[test]
    fn child_still_has_what_was_given_up_after_its_fork_was_read() {
        let mut fork = ForkState::new(false).expect("memory");
        fork.populating = true;
        fork.note(&Event::Remove(range(1)));
        let first = fork.new_child(some_uffd());
        fork.note(&Event::Remove(range(2)));
        fork.note(&Event::Unmap(range(3)));
        let second = fork.new_child(some_uffd());
        fork.note(&Event::Remove(range(4)));
        let of = |child: &NewChild| fork.noted_for(child.fork).collect::<Vec<_>>();
        let (dropped, gone) = (|page| VmaChange::Dropped(range(page)), VmaChange::Gone(range(3)));
        assert_eq!(of(&first), [dropped(1), gone], "an unmap may be older than it is read");
        assert_eq!(of(&second), [dropped(1), dropped(2), gone]);
    }
}
