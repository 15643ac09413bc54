//! The file device: packed pages encrypted in extents of a swap file that several processes share.
//!
//! Owns where each of its slots' pages lies (block, byte and length), the tag that proves the page
//! is the one written, and the state of the extents leased from an [`ExtentSource`]. Writing is
//! log-structured: the packed pages of a batch go byte after byte to the next blocks of the open
//! extent, so pages written together lie together and go out in few large writes. A batch begins
//! with a new block: no block is ever written to that holds something live.
//!
//! Every page is sealed with AES-256-GCM, but on areas that are to have no cipher: there it lies as
//! it is, with a keyed hash. The tag stays in RAM: what the disk returns is either exactly what was
//! written to this place for this slot last, or an error. There is no key on disk and nothing there
//! outlives the processes.
//!
//! When the file may not grow and the free space is scattered in blocks that also hold live pages,
//! a write *cleans* first: it moves the live pages of the extents where that gains most together.
//!
//! Across a fork, parent and child both refer to the extents leased so far.
//! [`FileDevice::freeze_all`], called before, makes those read-only for both: neither writes into
//! them again or punches them, and the source gets each back when the last of the processes that
//! share it has release it. [`FileDevice::rekey_salt`], called in the child, changes the child's
//! key, so that no two processes ever use one key with the same nonce.
//!
//! Invariants:
//! 1. A write that fails records nothing: every slot still has the page it had.
//! 2. A pair of key and nonce is used for one write only: the counter grows with each page, and a
//!    copy of it in another process is used with another key.
//! 3. A block is written to only while no slot's record names a byte of it, and only in an extent
//!    that is exclusively ours.
//! 4. An extent in doubt ([`ExtentSource::is_in_doubt`]) is neither written to nor punched.
//! 5. An extent is punched only when no page of it is live and it is exclusively ours; then, and
//!    only then, the source is told that it is punched. One that was shared is the source's word
//!    away from being ours again ([`ExtentSource::release_shared`]).
//! 6. A page is moved under the writers' lock only, if its place is still the one it was read from.
//!    A reader that finds something else than was written looks whether the page was moved before
//!    it calls it damaged.
//!
//! Locks: a read buffer, or the movers' buffer and then the writers' (`bounce`), then `letting_go`,
//! then `state`, or `emptied` or `waiting` alone. Those of readers, movers and writers and
//! `letting_go` are held across I/O, `state` is not (but across calls to the source). Readers do
//! not wait for writers, nor for each other while a read buffer is free. Under the writers' lock
//! nothing is read from a server that did not answer lately.

mod ahead;
mod buffer;
mod cipher;
mod digests;
mod error;
mod extent_store;
mod extents;
pub(crate) mod io;
mod opened;
mod places;
mod reading;
mod relocate;
mod router;
mod source;
mod write;

use core::time::Duration;
use std::sync::Arc;

use swaptide_sys::{Errno, OwnedFd};

pub use self::ahead::{Ahead, MAX_BLOCK_PAGES, ReadAhead};
use self::cipher::Cipher;
use self::digests::Digester;
pub use self::error::{ReadError, ReadErrorKind, WriteError};
use self::extent_store::ExtentStore;
pub use self::io::own_ring_mappings;
use self::io::{BlockIo, SwapFile};
pub use self::opened::{HandedOver, Opened};
use self::places::SlotPlace;
pub use self::reading::MAX_REMOTE_READERS;
use self::reading::PageReader;
pub use self::relocate::Leaving;
use self::router::Router;
pub use self::router::{AreaDirectory, FilePlace, InjectedFault, Location, MAX_AREAS};
pub use self::source::{Extent, ExtentSource, ServerId};
use self::write::PageWriter;
use crate::codec::Packed;
use crate::nbd::Nbd;
use crate::{PAGE_SIZE, Page, Slot};

/// The delays between the attempts to read a page before it is given up, but for the first two,
/// which follow each other.
pub const READ_RETRY_DELAYS: [Duration; 3] =
    [Duration::from_millis(1), Duration::from_millis(10), Duration::from_millis(100)];

/// Blocks (of a page's size) in an extent.
const EXTENT_PAGES: usize = 512;
/// Bytes in an extent.
pub const EXTENT_BYTES: u64 = (EXTENT_PAGES * PAGE_SIZE) as u64;

/// Blocks one write has: enough for a size disks like.
const WRITE_BLOCKS: usize = 64;
/// Blocks that a packed page may lie in.
const PAGE_BLOCKS: usize = 2;

/// The content of a slot at one moment. Two stamps of a slot that are equal mean that it held the
/// same page all the time.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Stamp(SlotPlace);

/// Usage and costs of a device.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct FileStats {
    /// Slots that hold a page.
    pub pages: usize,
    /// Extents leased, those shared with other processes among them.
    pub extents: usize,
    /// Of those, extents shared with other processes.
    pub shared_extents: usize,
    /// Bytes of packed pages.
    pub stored_bytes: u64,
    /// Bytes of the blocks they lie in.
    pub block_bytes: u64,
    /// Bytes of blocks that may be written to without another lease.
    pub free_bytes: u64,
    /// Bytes of records in RAM.
    pub metadata_bytes: usize,
}

/// The file device.
pub struct FileDevice {
    key: [u8; 32],
    store: ExtentStore,
    reader: PageReader,
    writer: PageWriter,
}

impl FileDevice {
    /// A device on a swap file that is open for reading and writing.
    ///
    /// `key` is common to the processes that share the file; `salt` must differ between any two of
    /// them. Sets `O_DIRECT` on the descriptor where the file system takes it.
    #[must_use]
    pub fn new(
        fd: OwnedFd,
        key: [u8; 32],
        salt: u64,
        extents: Box<dyn ExtentSource + Send + Sync>,
    ) -> FileDevice {
        Self::on(Box::new(SwapFile::new(fd)), key, salt, extents)
    }

    /// A device whose extents lie on several areas.
    #[must_use]
    pub fn over(
        areas: Box<dyn AreaDirectory>,
        key: [u8; 32],
        salt: u64,
        extents: Box<dyn ExtentSource + Send + Sync>,
    ) -> FileDevice {
        Self::on(Box::new(Router::new(areas)), key, salt, extents)
    }

    /// A device whose extents lie on an export of an NBD server.
    ///
    /// `key` and `salt` as for [`Self::new`].
    #[must_use]
    pub fn on_export(
        export: Nbd,
        key: [u8; 32],
        salt: u64,
        extents: Box<dyn ExtentSource + Send + Sync>,
    ) -> FileDevice {
        Self::on(Box::new(export), key, salt, extents)
    }

    fn on(
        io: Box<dyn BlockIo>,
        key: [u8; 32],
        salt: u64,
        source: Box<dyn ExtentSource + Send + Sync>,
    ) -> FileDevice {
        let cipher = Cipher::new(&key, salt);
        // Kept in forked children, for the digests they inherit.
        let digester = Digester::new(cipher.digest_key());
        FileDevice {
            key,
            store: ExtentStore::new(io, source, cipher),
            reader: PageReader::new(digester),
            writer: PageWriter::new(),
        }
    }

    /// Writes a batch of packed pages; what their slots held before is freed. On failure nothing is
    /// recorded.
    ///
    /// A failed write is retried in another place, on another device if there is one: a thread that
    /// waits for room must not wait for a device to be given up. Not so where a device is full or
    /// does not answer and there is no other.
    ///
    /// A zero or same-filled page takes a few bytes of the file, too.
    ///
    /// # Panics
    /// If packed bytes are not the length of a packed page.
    pub fn write(&self, pages: &[(Slot, Packed<'_>)]) -> Result<(), WriteError> {
        self.writer.write(&self.store, pages)
    }

    /// Brings a batch of pages back. The slots keep them. No page is handed out that is not exactly
    /// what was written.
    ///
    /// The digest of what was read is kept, for [`Self::unchanged`].
    pub fn read(&self, reqs: &mut [(Slot, &mut Page)]) -> Result<(), ReadError> {
        self.reader.read(&self.store, reqs)
    }

    /// True if `page` is certainly what the slot holds: it was read since it was last written, and
    /// had these contents. Does no I/O; `false` proves nothing.
    #[must_use]
    pub fn unchanged(&self, slot: Slot, page: &Page) -> bool {
        self.reader.unchanged(&self.store, slot, page)
    }

    /// Forgets what a slot holds; `false` if it held nothing. Does not wait for a server (see
    /// [`Self::trim_remote`]), nor for a file system where the source wants it so (see
    /// [`Self::release_one_extent`]).
    pub fn free(&self, slot: Slot) -> bool {
        self.store.free(slot)
    }

    /// Gives the extents of servers back that [`Self::free`] has emptied. Waits for the servers,
    /// but not again and again for one that does not answer: the space is its own to keep then,
    /// until something else is written there.
    pub fn trim_remote(&self) {
        self.store.trim_remote();
    }

    /// Gives one of the extents back that [`Self::free`] has emptied and whose source wants it so
    /// ([`ExtentSource::defers_release`]). False when none waits, or another thread does it.
    pub fn release_one_extent(&self) -> bool {
        self.store.release_one_extent()
    }

    /// Says which extents shall be left ([`FileDevice::leave`] does it): nothing is written there
    /// any more. What is not named may be written again. Gives the number of extents of ours that
    /// are.
    pub fn set_leaving(&self, leaving: impl Fn(Extent) -> bool) -> usize {
        let _writes = self.writer.pause();
        let (vacated, left) = self.store.state.lock().extents.set_leaving(leaving);
        self.store.release(&vacated);
        left
    }

    /// Moves the pages of a few of the extents that shall be left to others, those that forked
    /// processes share as well.
    ///
    /// Pages that cannot be read stay where they are: their readers will be told.
    pub fn leave(&self) -> Leaving {
        self.writer.leave(&self.store)
    }

    /// True if a write has been under way for so long.
    #[must_use]
    pub fn is_writing_for(&self, long: Duration) -> bool {
        self.writer.is_writing_for(long)
    }

    /// True if a slot's page lies on a rotational device: where every read begins with a seek.
    #[must_use]
    pub fn is_rotational(&self, slot: Slot) -> bool {
        let place = self.store.state.lock().places.get(slot);
        place.is_some_and(|place| self.store.source.is_rotational(place.span.extent()))
    }

    /// Returns a stamp of the slot's present content, to compare with a later one; `None` if it is
    /// empty.
    #[must_use]
    pub fn stamp(&self, slot: Slot) -> Option<Stamp> {
        self.store.state.lock().places.get(slot).map(Stamp)
    }

    /// The server that alone has a slot's page, if that is so.
    #[must_use]
    pub fn server_of(&self, slot: Slot) -> Option<ServerId> {
        let place = self.store.state.lock().places.get(slot)?;
        self.store.source.server_of(place.span.extent())
    }

    /// True if a read that has failed may succeed after a pause ([`READ_RETRY_DELAYS`]). What is
    /// wrong on a disk stays so, and a server that does not answer was waited for. What could not
    /// be read may be read a little later, and what is wrong on its way here may be right then.
    #[must_use]
    pub fn may_succeed_later(&self, error: &ReadError) -> bool {
        match error.kind {
            _ if error.is_own_shortage() => false,
            ReadErrorKind::Io(errno) => errno != Errno::TIMEDOUT,
            ReadErrorKind::Authentication => self.server_of(error.slot).is_some(),
            _ => false,
        }
    }

    /// True if a slot holds a page.
    #[must_use]
    pub fn contains(&self, slot: Slot) -> bool {
        self.store.state.lock().places.get(slot).is_some()
    }

    /// Before a fork: everything leased so far becomes shared and is neither written to nor punched
    /// from now on.
    ///
    /// Waits for a write that is under way; one that begins later goes to an extent of its own.
    pub fn freeze_all(&self) {
        let _writes = self.writer.pause();
        let vacated = self.store.state.lock().extents.freeze();
        self.store.release(&vacated);
    }

    /// Calls `f` for every extent leased, shared ones included. `f` must not call back into the
    /// device.
    pub fn leased(&self, f: impl FnMut(Extent)) {
        self.store.state.lock().extents.leased(f);
    }

    /// In a forked child, before its first write: seals with another key from now on. `new_salt`
    /// must be one that no process sharing the file has used.
    pub fn rekey_salt(&self, new_salt: u64) {
        let cipher = Arc::new(Cipher::new(&self.key, new_salt));
        let vacated = self.store.state.lock().extents.seal_with(cipher);
        self.store.release(&vacated);
    }

    /// Descriptors of all areas that are open and may be used by a forked child as well.
    #[must_use]
    pub fn shared(&self) -> Vec<HandedOver> {
        self.store.io.shared()
    }

    /// In a forked child, before its first transfer: the parent's descriptors and its io_uring are
    /// forgotten, not closed, for their numbers may be other files here; `handed` is used instead,
    /// and what is not in it is opened when it is needed.
    pub fn abandon(&self, handed: Vec<HandedOver>) {
        // They are the parent's to give back: it held them alone.
        self.store.forget_emptied();
        self.store.io.abandon(handed);
    }

    /// Gives every extent back that no other process shares, as the last act of a process. All
    /// slots are forgotten.
    pub fn clear(&self) {
        self.store.clear();
    }

    /// Closes the areas, and with them what was mapped to read them. They are opened again when
    /// they are needed.
    pub fn close(&self) {
        self.store.io.close();
    }

    /// Unlocks the device in a forked child.
    ///
    /// # Safety
    /// No thread of the parent was inside the device when it forked. The child has only this
    /// thread, and it holds no lock of the device.
    pub unsafe fn force_unlock(&self) {
        // SAFETY: this thread is the only one of the child and holds none of these locks (caller).
        unsafe {
            self.store.force_unlock();
            self.writer.force_unlock();
            self.reader.force_unlock();
        }
    }

    /// All counters at one moment.
    #[must_use]
    pub fn stats(&self) -> FileStats {
        let state = self.store.state.lock();
        let (extents, shared_extents) = state.extents.count();
        let (stored_bytes, block_bytes) = state.extents.bytes();
        FileStats {
            pages: state.places.used(),
            extents,
            shared_extents,
            stored_bytes,
            block_bytes,
            free_bytes: (state.extents.free_blocks() * PAGE_SIZE) as u64,
            metadata_bytes: state.places.metadata_bytes()
                + state.digests.metadata_bytes()
                + state.extents.metadata_bytes(),
        }
    }
}

#[cfg(test)]
mod tests;
