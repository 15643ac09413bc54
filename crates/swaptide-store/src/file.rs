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
//! 6. Cleaning moves a page under the writers' lock only. A reader that finds something else than
//!    was written looks whether the page was moved before it calls it damaged.
//!
//! Locks: one of `read_buffers` or `bounce` (all of them only to keep everybody out, in this
//! order), then `state`, or `emptied` alone. An inbox and `bounce` are held across I/O, `state` is
//! not (but across calls to the source). Readers do not wait for writers, nor for each other while
//! an inbox is free.

mod ahead;
mod cipher;
mod digests;
mod extents;
pub(crate) mod io;
mod places;
mod reading;
mod router;

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::time::Duration;
use std::sync::Arc;

use swaptide_sys::lock::Lock;
use swaptide_sys::mem::Mapping;
use swaptide_sys::thread::{Nanos, now};
use swaptide_sys::{Errno, OwnedFd};

pub use self::ahead::{Ahead, MAX_BLOCK_PAGES, ReadAhead};
use self::cipher::Cipher;
use self::digests::{Digester, Digests};
use self::extents::{Extents, FreedExtent, Full, Purpose, Taken, WriteCursor};
pub use self::io::own_ring_mappings;
use self::io::{BlockIo, SwapFile};
use self::places::{SlotExtent, SlotExtents};
use self::reading::{READ_BLOCKS, READ_BUFFERS, ReadBuffer, Wanted, lay_out};
use self::router::Router;
pub use self::router::{
    AreaDirectory, FilePlace, HandedOver, InjectedFault, Location, MAX_AREAS, Opened,
};
use crate::codec::{self, MAX_COMPRESSED_BYTES, Packed, Unpacker};
use crate::nbd::Nbd;
use crate::{PAGE_SIZE, Slot};

/// Blocks (of a page's size) in an extent.
const EXTENT_PAGES: usize = 512;
/// Bytes in an extent.
pub const EXTENT_BYTES: u64 = (EXTENT_PAGES * PAGE_SIZE) as u64;

/// Blocks one write has: enough for a size disks like.
const WRITE_BLOCKS: usize = 64;
/// Blocks that a packed page may lie in.
const PAGE_BLOCKS: usize = 2;
/// Bytes that stand for a page of one repeated word: no packed page is so short.
const WORD: usize = codec::MIN_PACKED_BYTES;
/// A server that has not taken note of an empty extent for so long does not answer; then none is
/// told for a while.
const TRIM_TIMEOUT: Duration = Duration::from_secs(1);
const TRIM_BACKOFF: Duration = Duration::from_secs(60);
/// Times a write cleans before it gives up.
const MAX_CLEANINGS_PER_WRITE: usize = 8;
/// Times a write is tried: what one place does not take another may.
const MAX_WRITE_TRIES: usize = 4;

/// A piece of the swap file: the bytes from `EXTENT_BYTES` times this number on.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct Extent(pub u32);

/// Where a device gets its pieces of the swap file from.
///
/// Called with the device's lock held: must not call back into the device.
pub trait ExtentSource: Sync {
    /// An extent that nobody else has, or `None` when the file may not grow.
    fn lease(&self) -> Option<Extent>;

    /// Gives an extent back. `exclusive_hole_punch` tells that it was exclusively this device's and
    /// its space has been given back to the file system already; otherwise another process may
    /// still read it (see [`FileDevice::freeze_all`]) or the file system refused.
    fn release(&self, extent: Extent, exclusive_hole_punch: bool);

    /// Gives an extent back that others may refer to. True when nobody does: then it is the
    /// caller's alone once more, to be punched and given back.
    fn release_shared(&self, extent: Extent) -> bool {
        self.release(extent, false);
        false
    }

    /// Whether what lies in a leased extent is not to be encrypted.
    fn is_plain(&self, _extent: Extent) -> bool {
        false
    }

    /// Whether what lies in a leased extent lies on a rotational device: a read costs a seek, and
    /// its neighbours cost nothing more.
    fn is_rotational(&self, _extent: Extent) -> bool {
        false
    }

    /// A write into a leased extent failed: for a while, what is leased shall lie elsewhere. Gives
    /// whether there is anywhere else.
    fn back_off(&self, _extent: Extent) -> bool {
        false
    }

    /// This process may not write where a leased extent lies, as its own limit on the size of files
    /// says: for a while, it leases nothing there, even if there is nothing elsewhere.
    fn bar(&self, _extent: Extent) {}

    /// Whether a server may still carry out an earlier write or trim there: nothing more is written
    /// to it then, and nothing trimmed, and the source lets nobody lease it.
    fn is_in_doubt(&self, _extent: Extent) -> bool {
        false
    }

    /// The server that alone has what lies in a leased extent, if that is so: reading it takes
    /// an unknown time.
    fn server_of(&self, _extent: Extent) -> Option<ServerId> {
        None
    }
}

/// Tells the servers apart that have pages: what one does says nothing of another.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct ServerId(pub u8);

/// What a slot held at a moment. Two stamps of a slot that are equal mean that it held the same
/// page all the time.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Stamp(SlotExtent);

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
    /// What was read is not what was written.
    #[error("the page is not what was written there: the file was changed, or the disk is failing")]
    Authentication,
    /// The slot holds no page.
    #[error("the slot holds no page")]
    NoSuchSlot,
    /// What was written is not a packed page: it was damaged in memory before.
    #[error("the data does not unpack: memory was damaged before it was written")]
    Unpacking,
}

/// A page of a batch could not be brought back; the contents of the batch's other pages are
/// undefined.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("swap file: reading slot {slot}: {kind}")]
pub struct ReadError {
    /// The first slot that failed.
    pub slot: Slot,
    /// Why.
    pub kind: ReadErrorKind,
}

/// How full a device is and what it costs.
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
    /// Bytes of records in RAM.
    pub metadata_bytes: usize,
}

/// The file device.
pub struct FileDevice {
    io: Box<dyn BlockIo>,
    source: Box<dyn ExtentSource + Send + Sync>,
    key: [u8; 32],
    digester: Digester,
    state: Lock<FileState>,
    /// Blocks on their way in.
    read_buffers: [Lock<ReadBuffer>; READ_BUFFERS],
    /// Blocks on their way out; the lock of the writers.
    bounce: Lock<Buffer>,
    /// When the write began that is under way, in nanoseconds of the monotonic clock; 0: none is.
    writing_since: AtomicU64,
    /// Before this moment no server is told of extents that emptied: one has just not answered. In
    /// nanoseconds of the monotonic clock.
    trims_rest: AtomicU64,
    /// Far extents without live pages: the server is not told of them by the thread that freed the
    /// last one.
    emptied: Lock<Vec<FreedExtent>>,
}

/// Notes when a write begins and ends.
struct UnderWay<'a>(&'a AtomicU64);

impl UnderWay<'_> {
    fn begin(since: &AtomicU64) -> UnderWay<'_> {
        since.store(now().0, Relaxed);
        UnderWay(since)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.store(0, Relaxed);
    }
}

/// Block-aligned memory. Its addresses are reserved with the device: a program may limit its
/// address space later (`RLIMIT_AS`, `RLIMIT_DATA`), and must get its pages back all the same.
/// Where they cannot be had then they are asked for again when they are needed.
#[derive(Default)]
struct Buffer(Option<Mapping>);

impl Buffer {
    fn reserve(blocks: usize) -> Buffer {
        Buffer(Mapping::reserve(blocks * PAGE_SIZE).ok())
    }

    fn is_none(&self) -> bool {
        self.0.is_none()
    }

    fn blocks(&mut self, n: usize) -> Result<&mut [u8], Errno> {
        let len = n * PAGE_SIZE;
        let mapping = match self.0.take() {
            Some(mapping) if mapping.len() >= len => mapping,
            _ => Mapping::reserve(len)?,
        };
        let mapping = self.0.insert(mapping);
        // SAFETY: the mapping is at least as long as this, its memory is initialized (anonymous),
        // and the exclusive borrow of its owner keeps others off.
        Ok(unsafe { core::slice::from_raw_parts_mut(mapping.as_ptr(), len) })
    }
}

struct FileState {
    places: SlotExtents,
    /// Of pages that were read and neither freed nor written again since.
    digests: Digests,
    extents: Extents,
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
        let extents = Extents::new(Arc::new(cipher));
        let state =
            FileState { places: SlotExtents::default(), digests: Digests::default(), extents };
        let read_buffers = core::array::from_fn(|_| {
            Lock::new(ReadBuffer {
                buffer: Buffer::reserve(PAGE_BLOCKS + READ_BLOCKS),
                unpacker: Unpacker::new(),
            })
        });
        let bounce = Lock::new(Buffer::reserve(2 * WRITE_BLOCKS + PAGE_BLOCKS));
        FileDevice {
            io,
            source,
            key,
            digester,
            state: Lock::new(state),
            read_buffers,
            bounce,
            writing_since: AtomicU64::new(0),
            trims_rest: AtomicU64::new(0),
            emptied: Lock::default(),
        }
    }

    /// Writes a batch of packed pages; what their slots held before is freed. On failure nothing is
    /// recorded.
    ///
    /// What fails is tried again in another place, on another device if there is one: a thread that
    /// waits for room must not wait for a device to be given up. Not so where a device is full or
    /// does not answer and there is no other.
    ///
    /// A zero or same-filled page takes a few bytes of the file, too.
    ///
    /// # Panics
    /// If packed bytes are not the length of a packed page.
    pub fn write(&self, pages: &[(Slot, Packed<'_>)]) -> Result<(), WriteError> {
        if pages.is_empty() {
            return Ok(());
        }
        let mut bounce = self.bounce.lock();
        let _under_way = UnderWay::begin(&self.writing_since);
        let mut first = None;
        for _ in 0..MAX_WRITE_TRIES {
            let (error, goes_on) = match self.try_to_write(pages, &mut bounce) {
                Err(Unplaced::Refused(error, elsewhere)) => {
                    (error, elsewhere || !matches!(error.errno, Errno::NOSPC | Errno::TIMEDOUT))
                }
                Err(Unplaced::NoPlace(error)) => (error, false),
                Ok(()) => return Ok(()),
            };
            first.get_or_insert(error);
            if !goes_on {
                break;
            }
        }
        first.map_or(Ok(()), Err)
    }

    fn try_to_write(
        &self,
        pages: &[(Slot, Packed<'_>)],
        bounce: &mut Buffer,
    ) -> Result<(), Unplaced> {
        let (taken, cipher) = self.reserve(pages, bounce).map_err(Unplaced::NoPlace)?;
        // One block more than a write has, for the page that crosses its end.
        let out = bounce.blocks(WRITE_BLOCKS + 1).map_err(|errno| {
            self.give_up(&taken, None);
            Unplaced::NoPlace(WriteError { slot: pages[0].0, errno })
        })?;
        let mut tags = Vec::with_capacity(pages.len());
        let sealed = self.put(out, &taken, |i, at, out| {
            with_bytes(&pages[i].1, |bytes| {
                tags.push(cipher.seal(
                    at.form,
                    at.base + u64::from(at.count),
                    at.span.name(),
                    bytes,
                    out,
                ))
            });
        });
        if let Err(Unwritten { object, extent, errno }) = sealed {
            if errno == Errno::FBIG {
                // The device is sound, and other processes may write there.
                self.source.bar(extent);
                self.give_up(&taken, Some(extent));
                return Err(Unplaced::Refused(
                    WriteError { slot: pages[object].0, errno: Errno::NOSPC },
                    true,
                ));
            }
            let elsewhere = self.source.back_off(extent);
            // A full file system is no fault of this place, and what lies there may be written
            // over; anything else may be its fault.
            self.give_up(&taken, (errno != Errno::NOSPC || elsewhere).then_some(extent));
            return Err(Unplaced::Refused(WriteError { slot: pages[object].0, errno }, elsewhere));
        }
        let mut vacated = Vec::new();
        {
            let mut state = self.state.lock();
            for ((&(slot, _), &Taken { span, count, .. }), tag) in
                pages.iter().zip(&taken).zip(tags)
            {
                state.digests.remove(slot);
                if let Some(before) = state.places.set(slot, SlotExtent { span, count, tag }) {
                    vacated.extend(state.extents.free(before.span));
                }
            }
        }
        self.let_go(&vacated);
        Ok(())
    }

    /// Takes a place for each page of a batch, and cleans for it if that helps.
    fn reserve(
        &self,
        pages: &[(Slot, Packed<'_>)],
        bounce: &mut Buffer,
    ) -> Result<(Vec<Taken>, Arc<Cipher>), WriteError> {
        let mut taken = Vec::with_capacity(pages.len());
        let mut cleanings = 0;
        loop {
            let mut state = self.state.lock();
            let mut pen = WriteCursor::default();
            let purpose = if cleanings < MAX_CLEANINGS_PER_WRITE {
                Purpose::Write
            } else {
                Purpose::WriteAnyway
            };
            let mut full = None;
            for (_, page) in &pages[taken.len()..] {
                match state.extents.take(packed_len(page), &mut pen, &*self.source, purpose) {
                    Ok(place) => taken.push(place),
                    Err(why) => {
                        full = Some(why);
                        break;
                    }
                }
            }
            let Some(full) = full else { return Ok((taken, Arc::clone(state.extents.cipher()))) };
            drop(state);
            if full == Full::Entirely && !self.emptied.lock().is_empty() {
                // There is room, and nobody has said so yet.
                self.let_go_far();
                continue;
            }
            if full == Full::Entirely {
                self.give_up(&taken, None);
                return Err(WriteError { slot: pages[taken.len()].0, errno: Errno::NOSPC });
            }
            cleanings = if self.clean(bounce) { cleanings + 1 } else { MAX_CLEANINGS_PER_WRITE };
        }
    }

    /// Seals objects into `out` and writes them to their places, what lies together at once. `seal`
    /// is given an object's number, its place and where to.
    fn put(
        &self,
        out: &mut [u8],
        taken: &[Taken],
        mut seal: impl FnMut(usize, &Taken, &mut [u8]),
    ) -> Result<(), Unwritten> {
        const FULL: usize = WRITE_BLOCKS * PAGE_SIZE;
        // The bytes in `out`, the place in the file they begin at, and the first object among them.
        let (mut fill, mut base, mut first) = (0usize, 0u64, 0);
        let write = |base: u64, bytes: &[u8], first: usize| {
            let written = io::write_all(&*self.io, base, bytes);
            self.leave_doubtful(base..base + bytes.len() as u64);
            written.map_err(|(at, errno)| Unwritten {
                object: first,
                extent: Extent((at / EXTENT_BYTES) as u32),
                errno,
            })
        };
        for (i, place) in taken.iter().enumerate() {
            let start = place.span.start();
            let at = usize::try_from(start.wrapping_sub(base)).unwrap_or(usize::MAX);
            let padded = fill.next_multiple_of(PAGE_SIZE);
            if fill > 0 && at != fill && at != padded {
                out[fill..padded].fill(0);
                write(base, &out[..padded], first)?;
                fill = 0;
            }
            if fill == 0 {
                (base, first) = (start, i);
                assert_eq!(
                    place.span.byte(),
                    0,
                    "swap file: a write that does not begin with a block"
                );
            } else {
                out[fill..at].fill(0);
                fill = at;
            }
            seal(i, place, &mut out[fill..fill + place.span.len()]);
            fill += place.span.len();
            if fill >= FULL {
                write(base, &out[..FULL], first)?;
                out.copy_within(FULL..fill, 0);
                (fill, base, first) = (fill - FULL, base + FULL as u64, i);
            }
        }
        let padded = fill.next_multiple_of(PAGE_SIZE);
        out[fill..padded].fill(0);
        if fill == 0 { Ok(()) } else { write(base, &out[..padded], first) }
    }

    /// Lays nothing more into those extents of a range of the file that are in doubt: what has just
    /// been written there may be written once more at any time, over whatever lies there then.
    fn leave_doubtful(&self, range: Range<u64>) {
        for number in range.start / EXTENT_BYTES..range.end.div_ceil(EXTENT_BYTES) {
            let extent = Extent(number as u32);
            if self.source.is_in_doubt(extent) {
                self.state.lock().extents.distrust(extent);
            }
        }
    }

    /// Moves the live pages of the extents that gain most by it together. `false` if no block
    /// became free.
    fn clean(&self, bounce: &mut Buffer) -> bool {
        let victims = self.state.lock().extents.extents_to_clean();
        self.relocate(&victims, Purpose::Clean, bounce).gained
    }

    /// Says which extents shall be left ([`FileDevice::leave`] does it): nothing is written there
    /// any more. What is not named may be written again. Gives the number of extents of ours that
    /// are.
    pub fn set_leaving(&self, leaving: impl Fn(Extent) -> bool) -> usize {
        let _writes = self.bounce.lock();
        let (vacated, left) = self.state.lock().extents.set_leaving(leaving);
        self.let_go(&vacated);
        left
    }

    /// Moves the pages of a few of the extents that shall be left to others, those that forked
    /// processes share as well.
    ///
    /// Pages that cannot be read stay where they are: their readers will be told.
    pub fn leave(&self) -> Leaving {
        let mut bounce = self.bounce.lock();
        let _under_way = UnderWay::begin(&self.writing_since);
        let some = self.state.lock().extents.leaving();
        if some.is_empty() {
            return Leaving::Done;
        }
        let before = self.state.lock().extents.leaving_count();
        let moved = self.relocate(&some, Purpose::WriteAnyway, &mut bounce);
        match self.state.lock().extents.leaving_count() {
            0 => Leaving::Done,
            left if left < before => Leaving::Left(left),
            left => Leaving::Stuck { left, full: moved.full },
        }
    }

    /// Moves the live pages of some extents to others.
    fn relocate(&self, from: &[Extent], purpose: Purpose, bounce: &mut Buffer) -> Relocated {
        let mut wanted = self.pages_of(from);
        wanted.sort_unstable_by_key(|w| w.place.span);
        let mut result = Relocated { gained: false, full: false };
        let Ok(buffer) = bounce.blocks(2 * WRITE_BLOCKS + PAGE_BLOCKS) else { return result };
        let (out, buffer) = buffer.split_at_mut(WRITE_BLOCKS * PAGE_SIZE);
        let (spare, inbox) = buffer.split_at_mut(PAGE_BLOCKS * PAGE_SIZE);
        let mut rest = &mut wanted[..];
        while !rest.is_empty() {
            // Few enough for the blocks kept for this.
            let mut sum = 0;
            let few = rest.iter().position(|w| {
                sum += w.place.span.len();
                sum > (extents::RESERVE_BLOCKS - 1) * PAGE_SIZE
            });
            let few = few.unwrap_or(rest.len());
            let (n, mut runs) = lay_out(&mut rest[..few], inbox);
            let (some, later) = rest.split_at_mut(n);
            rest = later;
            // A page that cannot be read is left where it is: its reader will be told.
            if let Err((block, _)) = self.io.read_runs(&mut runs) {
                if let Some(bad) = some.iter().find(|w| w.uses(block)) {
                    self.state.lock().extents.distrust(bad.place.span.extent());
                }
                continue;
            }
            let mut opened = Vec::with_capacity(n);
            for w in &*some {
                let SlotExtent { span, tag, .. } = w.place;
                let bytes = &mut inbox[w.at..w.at + span.len()];
                let mut opens = w.cipher.open(w.form, w.counter, span.name(), &tag, bytes);
                if !opens
                    && let Some(copy) = self.copy_of(w, spare)
                    && w.cipher.open(w.form, w.counter, span.name(), &tag, copy)
                {
                    bytes.copy_from_slice(copy);
                    opens = true;
                }
                if opens {
                    opened.push(w);
                } else if self.state.lock().places.get(w.slot) == Some(w.place) {
                    self.state.lock().extents.distrust(span.extent());
                }
            }
            match self.move_together(&opened, purpose, inbox, out) {
                Some(freed) => result.gained |= freed,
                None => {
                    result.full = true;
                    break;
                }
            }
        }
        result
    }

    /// What lies in some extents.
    fn pages_of(&self, victims: &[Extent]) -> Vec<Wanted> {
        let mut found = Vec::new();
        for cluster in 0.. {
            // The lock is dropped after every cluster, so that faults get in between.
            let state = self.state.lock();
            let further = state.places.of_cluster(cluster, |slot, place| {
                if victims.contains(&place.span.extent()) {
                    found.push(Wanted::new(&state, slot, *place, found.len()));
                }
            });
            if !further {
                break;
            }
        }
        found
    }

    /// Writes opened pages to new places; those that nobody freed meanwhile are there then. Tells
    /// whether blocks became free, or nothing if there is no room or the file does not take them.
    fn move_together(
        &self,
        pages: &[&Wanted],
        purpose: Purpose,
        inbox: &[u8],
        out: &mut [u8],
    ) -> Option<bool> {
        let mut taken = Vec::with_capacity(pages.len());
        let (cipher, before) = {
            let mut state = self.state.lock();
            let mut pen = WriteCursor::default();
            let before = state.extents.free_blocks();
            for w in pages {
                match state.extents.take(w.place.span.len(), &mut pen, &*self.source, purpose) {
                    Ok(place) => taken.push(place),
                    Err(_) => {
                        drop(state);
                        self.give_up(&taken, None);
                        return None;
                    }
                }
            }
            (Arc::clone(state.extents.cipher()), before)
        };
        let mut tags = Vec::with_capacity(pages.len());
        let put = self.put(out, &taken, |i, at, out| {
            let bytes = &inbox[pages[i].at..][..out.len()];
            tags.push(cipher.seal(
                at.form,
                at.base + u64::from(at.count),
                at.span.name(),
                bytes,
                out,
            ));
        });
        if let Err(Unwritten { extent, errno, .. }) = put {
            self.give_up(&taken, (errno != Errno::NOSPC).then_some(extent));
            return None;
        }
        let mut vacated = Vec::new();
        let gained = {
            let mut state = self.state.lock();
            for ((w, &Taken { span, count, .. }), tag) in pages.iter().zip(&taken).zip(tags) {
                let unused = if state.places.get(w.slot) == Some(w.place) {
                    state.places.set(w.slot, SlotExtent { span, count, tag });
                    w.place.span
                } else {
                    span
                };
                vacated.extend(state.extents.free(unused));
            }
            !vacated.is_empty() || state.extents.free_blocks() > before
        };
        self.let_go(&vacated);
        Some(gained)
    }

    /// Forgets what a slot holds; `false` if it held nothing. Does not wait for a server (see
    /// [`Self::let_go_far`]).
    pub fn free(&self, slot: Slot) -> bool {
        let vacated = {
            let mut state = self.state.lock();
            let Some(place) = state.places.remove(slot) else { return false };
            state.digests.remove(slot);
            state.extents.free(place.span)
        };
        match vacated {
            Some(far) if self.source.server_of(far.extent).is_some() => {
                self.emptied.lock().push(far)
            }
            near => self.let_go(near.as_slice()),
        }
        true
    }

    /// Gives the far extents back that [`Self::free`] has emptied. Waits for their servers, but not
    /// again and again for one that does not answer: the space is its own to keep then, until
    /// something else is written there.
    pub fn let_go_far(&self) {
        let emptied = core::mem::take(&mut *self.emptied.lock());
        for FreedExtent { extent, shared } in emptied {
            let began = now();
            let tells = !shared && began.0 >= self.trims_rest.load(Relaxed);
            let told = tells && self.punch(extent);
            if tells && !told && now().since(began) > TRIM_TIMEOUT {
                self.trims_rest
                    .store(now().0.saturating_add(TRIM_BACKOFF.as_nanos() as u64), Relaxed);
            }
            if !shared {
                self.source.release(extent, told);
            } else if self.source.release_shared(extent) {
                self.source.release(
                    extent,
                    began.0 >= self.trims_rest.load(Relaxed) && self.punch(extent),
                );
            }
        }
    }

    /// Whether a write has been under way for so long.
    #[must_use]
    pub fn is_writing_for(&self, long: Duration) -> bool {
        let since = self.writing_since.load(Relaxed);
        since != 0 && now().since(Nanos(since)) > long
    }

    /// What a slot holds now, to be compared with what it holds later; `None` if that is nothing.
    #[must_use]
    pub fn stamp(&self, slot: Slot) -> Option<Stamp> {
        self.state.lock().places.get(slot).map(Stamp)
    }

    /// The server that alone has a slot's page, if that is so.
    #[must_use]
    pub fn server_of(&self, slot: Slot) -> Option<ServerId> {
        let place = self.state.lock().places.get(slot)?;
        self.source.server_of(place.span.extent())
    }

    /// Whether a slot holds a page.
    #[must_use]
    pub fn contains(&self, slot: Slot) -> bool {
        self.state.lock().places.get(slot).is_some()
    }

    /// Before a fork: everything leased so far becomes shared and is neither written to nor punched
    /// from now on.
    ///
    /// Waits for a write that is under way; one that begins later goes to an extent of its own.
    pub fn freeze_all(&self) {
        let _writes = self.bounce.lock();
        let vacated = self.state.lock().extents.freeze();
        self.let_go(&vacated);
    }

    /// Calls `f` for every extent leased, shared ones included. `f` must not call back into the
    /// device.
    pub fn leased(&self, f: impl FnMut(Extent)) {
        self.state.lock().extents.leased(f);
    }

    /// In a forked child, before its first write: seals with another key from now on. `new_salt`
    /// must be one that no process sharing the file has used.
    pub fn rekey_salt(&self, new_salt: u64) {
        let cipher = Arc::new(Cipher::new(&self.key, new_salt));
        let vacated = self.state.lock().extents.seal_with(cipher);
        self.let_go(&vacated);
    }

    /// Descriptors of all areas that are open and may be used by a forked child as well.
    #[must_use]
    pub fn shared(&self) -> Vec<HandedOver> {
        self.io.shared()
    }

    /// In a forked child, before its first transfer: the parent's descriptors and its io_uring are
    /// forgotten, not closed, for their numbers may be other files here; `handed` is used instead,
    /// and what is not in it is opened when it is needed.
    pub fn abandon(&self, handed: Vec<HandedOver>) {
        // They are the parent's to give back: it held them alone.
        self.emptied.lock().clear();
        self.io.abandon(handed);
    }

    /// Gives every extent back that no other process shares, as the last act of a process. All
    /// slots are forgotten.
    pub fn clear(&self) {
        let vacated = {
            let mut state = self.state.lock();
            state.places = SlotExtents::default();
            state.digests = Digests::default();
            state.extents.clear()
        };
        self.let_go(&vacated);
        self.let_go_far();
    }

    /// Unlocks the device in a forked child.
    ///
    /// # Safety
    /// No thread of the parent was inside the device when it forked. The child has only this
    /// thread, and it holds no lock of the device.
    pub unsafe fn force_unlock(&self) {
        // SAFETY: the holder of the locks does not exist in this process, and had left the data
        // consistent (caller).
        unsafe {
            self.state.force_unlock();
            self.bounce.force_unlock();
            self.read_buffers.iter().for_each(|inbox| inbox.force_unlock());
            self.emptied.force_unlock();
            self.writing_since.store(0, Relaxed);
            self.io.force_unlock();
        }
    }

    /// All counters at one moment.
    #[must_use]
    pub fn stats(&self) -> FileStats {
        let state = self.state.lock();
        let (extents, shared_extents) = state.extents.count();
        let (stored_bytes, block_bytes) = state.extents.bytes();
        FileStats {
            pages: state.places.used(),
            extents,
            shared_extents,
            stored_bytes,
            block_bytes,
            metadata_bytes: state.places.metadata_bytes()
                + state.digests.metadata_bytes()
                + state.extents.metadata_bytes(),
        }
    }

    /// Undoes the reservations of a write that failed.
    fn give_up(&self, taken: &[Taken], suspect: Option<Extent>) {
        let mut vacated = Vec::new();
        {
            let mut state = self.state.lock();
            if let Some(extent) = suspect {
                state.extents.distrust(extent);
            }
            for page in taken {
                vacated.extend(state.extents.free(page.span));
            }
        }
        self.let_go(&vacated);
    }

    /// Gives extents without live pages back to the file system and to the source. Without the
    /// lock: punching takes time, and nobody can lease them before the source has them back.
    fn let_go(&self, vacated: &[FreedExtent]) {
        for &FreedExtent { extent, shared } in vacated {
            if !shared {
                self.source.release(extent, self.punch(extent));
            } else if self.source.release_shared(extent) {
                // The last one that had it.
                self.source.release(extent, self.punch(extent));
            }
        }
    }

    fn punch(&self, extent: Extent) -> bool {
        !self.source.is_in_doubt(extent)
            && self.io.punch(u64::from(extent.0) * EXTENT_BYTES, EXTENT_BYTES).is_ok()
    }
}

/// How far the leaving of extents has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// Nothing of ours lies there any more.
    Done,
    /// This many extents are still to be left.
    Left(usize),
    /// No further extent could be left: there is no room elsewhere (`full`), or pages there cannot
    /// be read.
    Stuck {
        /// Extents that are still to be left.
        left: usize,
        /// Whether room is what is missing.
        full: bool,
    },
}

/// What moving pages came to.
struct Relocated {
    /// Blocks became free.
    gained: bool,
    /// There was no room for more.
    full: bool,
}

/// Why a try to write failed.
enum Unplaced {
    /// There is no place, or no memory.
    NoPlace(WriteError),
    /// The device did not take it; whether there is another one.
    Refused(WriteError, bool),
}

/// What could not be written.
struct Unwritten {
    /// The first object of the write that failed.
    object: usize,
    extent: Extent,
    errno: Errno,
}

/// Bytes a packed page takes in the file.
fn packed_len(page: &Packed<'_>) -> usize {
    match page {
        Packed::Zero | Packed::Same(_) => WORD,
        Packed::Bytes(bytes) => {
            assert!(
                (WORD + 1..=MAX_COMPRESSED_BYTES).contains(&bytes.len()),
                "swap file: {} bytes are no packed page",
                bytes.len()
            );
            bytes.len()
        }
        Packed::Raw(_) => PAGE_SIZE,
    }
}

/// Calls `f` with those bytes.
fn with_bytes(page: &Packed<'_>, f: impl FnOnce(&[u8])) {
    match *page {
        Packed::Zero => f(&[0; WORD]),
        Packed::Same(word) => f(&word.to_le_bytes()),
        Packed::Bytes(bytes) => f(bytes),
        Packed::Raw(page) => f(page),
    }
}

#[cfg(test)]
mod tests;
