//! A change of the program's mappings, as the userfaultfd reports it and as the table remembers it.
//!
//! Owns nothing. Locks: none.

use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::uffd::Event;

/// A change of mappings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VmaChange {
    /// `len` bytes at `from` are at `to`.
    Moved {
        /// The start of the memory before the move.
        from: VirtAddr,
        /// The start of the memory after the move.
        to: VirtAddr,
        /// Bytes that moved.
        len: usize,
    },
    /// The range was unmapped.
    Gone(VirtRange),
    /// Its contents were dropped; it is still mapped.
    Dropped(VirtRange),
    /// Armed by the handler: something new is there. The table's alone; it is not reported, and no
    /// child is told of it.
    Armed(VirtRange),
}

impl VmaChange {
    /// The change that an event tells of.
    pub fn of(event: &Event) -> Option<VmaChange> {
        match event {
            Event::Remap { from, to, len } => {
                Some(VmaChange::Moved { from: *from, to: *to, len: *len })
            }
            Event::Unmap(range) => Some(VmaChange::Gone(*range)),
            Event::Remove(range) => Some(VmaChange::Dropped(*range)),
            Event::Fault { .. } | Event::Fork { .. } | Event::Unknown(_) => None,
        }
    }

    /// The event that tells of it, if one does.
    pub fn event(self) -> Option<Event> {
        match self {
            VmaChange::Moved { from, to, len } => Some(Event::Remap { from, to, len }),
            VmaChange::Gone(range) => Some(Event::Unmap(range)),
            VmaChange::Dropped(range) => Some(Event::Remove(range)),
            VmaChange::Armed(_) => None,
        }
    }

    /// The range whose old contents are no longer there.
    pub(crate) fn source(self) -> Option<VirtRange> {
        match self {
            VmaChange::Moved { from, len, .. } => {
                Some(VirtRange { start: from, end: from.offset(len) })
            }
            VmaChange::Gone(range) | VmaChange::Dropped(range) => Some(range),
            VmaChange::Armed(_) => None,
        }
    }

    /// The range that has new contents.
    pub(crate) fn target(self) -> Option<VirtRange> {
        match self {
            VmaChange::Moved { to, len, .. } => Some(VirtRange { start: to, end: to.offset(len) }),
            VmaChange::Armed(range) => Some(range),
            VmaChange::Gone(_) | VmaChange::Dropped(_) => None,
        }
    }

    /// True if a part of a range was free afterwards.
    fn frees(self, range: VirtRange) -> bool {
        !matches!(self, VmaChange::Dropped(_)) && self.takes(range)
    }

    /// `Some` if the change shows whether a range was mapped before it.
    pub(crate) fn tells_of(self, range: VirtRange) -> Option<bool> {
        match self {
            _ if self.frees(range) => Some(true),
            _ if self.reaches(range) => Some(false),
            _ => None,
        }
    }

    /// True if it changes a part of a range.
    pub(crate) fn concerns(self, range: VirtRange) -> bool {
        self.takes(range) || self.reaches(range)
    }

    pub(crate) fn takes(self, range: VirtRange) -> bool {
        self.source().is_some_and(|source| overlap(source, range))
    }

    pub(crate) fn reaches(self, range: VirtRange) -> bool {
        self.target().is_some_and(|target| overlap(target, range))
    }
}

/// True if two ranges have a byte in common.
pub(crate) fn overlap(a: VirtRange, b: VirtRange) -> bool {
    a.start < b.end && b.start < a.end
}
