//! What goes over the socket between a parent's handler and a forked child's.
//!
//! | from | message |
//! |---|---|
//! | child | hello: its process slot, or a [`Decline`]; its process id; the fork's token |
//! | parent | the length of what follows, with the userfaultfd and a descriptor for each swap area; or [`NO_ENGINE`] or [`NO_ENGINE_INCOMPLETE`] |
//! | parent | in parts of [`MESSAGE_BYTES`]: how many swap areas, their numbers and generations; how many pages were copied, their numbers; the changes of
//! mappings that the child has |
//! | child | [`MSG_SERVING`], or [`DECLINED`] and then waits for [`NO_ENGINE`] |
//!
//! Locks: none.

use swaptide_sys::page::{VirtAddr, VirtRange};

use crate::mm::vma_change::VmaChange;

/// Instead of a length: the child shall continue without an engine; all its memory is there.
pub(super) const NO_ENGINE: u64 = u64::MAX;
/// The same, and the child's copy of the engine's memory may be torn: nothing may be allocated from
/// it any more.
pub(super) const NO_ENGINE_INCOMPLETE: u64 = u64::MAX - 1;
/// The child's word at the end: it serves itself.
pub(super) const MSG_SERVING: u8 = b'T';
/// The child's word at the end: it cannot serve itself.
pub(super) const DECLINED: u8 = b'D';
/// In a child's hello instead of its slot: a [`Decline`] less than this.
pub(super) const DECLINED_SLOT: u32 = u32::MAX;
/// Bytes of one message of the hand-over.
pub(super) const MESSAGE_BYTES: usize = 32 << 10;

/// Why a forked child continues without an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Decline {
    /// The supervisor's table of processes is full.
    TableFull = 0,
    /// It has a process-id namespace of its own.
    Namespace = 1,
    /// It got no thread.
    NoThread = 2,
}

impl Decline {
    pub(super) fn why(self) -> &'static str {
        match self {
            Decline::TableFull => "the supervisor's table of processes is full",
            Decline::Namespace => "it has a separate pid namespace",
            Decline::NoThread => "it cannot start a thread (check the limits on processes)",
        }
    }

    pub(super) fn of(word: u32) -> Option<Decline> {
        [Decline::TableFull, Decline::Namespace, Decline::NoThread]
            .into_iter()
            .find(|d| DECLINED_SLOT - *d as u32 == word)
    }
}

/// A change of mappings as it goes over the socket; nothing for one that is the table's alone.
pub(super) fn encode(change: &VmaChange) -> Option<[u64; 4]> {
    match change {
        VmaChange::Gone(r) => Some([1, r.start.0 as u64, r.end.0 as u64, 0]),
        VmaChange::Moved { from, to, len } => Some([2, from.0 as u64, to.0 as u64, *len as u64]),
        VmaChange::Dropped(r) => Some([3, r.start.0 as u64, r.end.0 as u64, 0]),
        VmaChange::Armed(_) => None,
    }
}

/// The change that was encoded so; `None`: these are not the words of one.
pub(super) fn decode(words: &[usize]) -> Option<VmaChange> {
    let &[kind, a, b, len] = words else { return None };
    let range = VirtRange { start: VirtAddr(a), end: VirtAddr(b) };
    match kind {
        1 => Some(VmaChange::Gone(range)),
        2 => Some(VmaChange::Moved { from: VirtAddr(a), to: VirtAddr(b), len }),
        3 => Some(VmaChange::Dropped(range)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_come_over_as_they_were() {
        let range = VirtRange { start: VirtAddr(0x7000), end: VirtAddr(0x9000) };
        for change in [
            VmaChange::Gone(range),
            VmaChange::Dropped(range),
            VmaChange::Moved { from: range.start, to: range.end, len: 0x2000 },
        ] {
            assert_eq!(
                encode(&change).and_then(|words| decode(&words.map(|word| word as usize))),
                Some(change)
            );
        }
        assert_eq!(decode(&[0; 4]), None);
    }
}
