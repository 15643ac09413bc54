//! Why pages could not be written or brought back.

use swaptide_sys::Errno;

use crate::Slot;
use crate::block::is_own_shortage;

/// A batch was not written; every slot has the page it had before.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("swap file: writing slot {slot}: {}", swaptide_sys::ErrnoName(*errno))]
pub struct WriteError {
    /// The first slot that could not be written.
    pub slot: Slot,
    /// Why; `NOSPC` also when no extent is to be had.
    pub errno: Errno,
}

/// Why a page could not be brought back.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadErrorKind {
    /// The file could not be read.
    #[error("{}", swaptide_sys::ErrnoName(*.0))]
    Io(Errno),
    /// The page read differs from the page written.
    #[error(
        "the page is not what was written there: another program changed the file, or the disk is \
        failing; check the disk (smartctl), or use another swap area"
    )]
    Authentication,
    /// The slot holds no page.
    #[error("the slot holds no page; report this as a bug")]
    NoSuchSlot,
    /// The data written was no packed page: it was damaged in memory before.
    #[error(
        "the data does not unpack: memory was damaged before it was written; \
        test the memory (memtester)"
    )]
    Unpacking,
}

/// A page of a batch could not be brought back; the contents of the batch's other pages are
/// undefined.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("swap file: reading slot {slot}: {kind}")]
pub struct ReadError {
    /// The first slot that failed.
    pub slot: Slot,
    /// The kind of failure.
    pub kind: ReadErrorKind,
}

impl ReadError {
    /// True if this process or the machine was short of memory or descriptors. That says nothing of
    /// the device, which still has the page.
    #[must_use]
    pub fn is_own_shortage(&self) -> bool {
        matches!(self.kind, ReadErrorKind::Io(errno) if is_own_shortage(errno))
    }
}
