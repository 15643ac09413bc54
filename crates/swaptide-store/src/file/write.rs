//! Writing: from packed pages to the file.
//!
//! Owns the lock of the writers, with the blocks on their way out, since when a write is under way,
//! and the buffer of the movers. Rules and locks are those of the device ([`super`]).

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::time::Duration;
use std::sync::Arc;

use swaptide_sys::Errno;
use swaptide_sys::lock::{Guard, Lock};
use swaptide_sys::thread::{Nanos, now};

use super::buffer::Buffer;
use super::cipher::Cipher;
use super::extent_store::{ExtentStore, Unwritten};
use super::extents::{Full, Purpose, Taken, WriteCursor};
use super::places::SlotPlace;
use super::reading::Wanted;
use super::relocate::{self, Leaving};
use super::{WRITE_BLOCKS, WriteError};
use crate::codec::{self, MAX_COMPRESSED_BYTES, Packed};
use crate::{PAGE_SIZE, Slot};

/// Bytes that stand for a page of one repeated word: no packed page is so short.
const WORD: usize = codec::MIN_PACKED_BYTES;
/// Times a write cleans before it gives up.
const MAX_CLEANINGS_PER_WRITE: usize = 8;
/// Times a write is tried: what one place does not take another may.
const MAX_WRITE_TRIES: usize = 4;

/// The buffers that blocks are written from; one write at a time.
pub(super) struct PageWriter {
    /// Blocks on their way out; the lock of the writers.
    bounce: Lock<Buffer>,
    /// Blocks that are read to be written elsewhere, without the lock of the writers; before it.
    moving: Lock<Buffer>,
    /// When the write began that is under way, in nanoseconds of the monotonic clock; 0: none is.
    since: AtomicU64,
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

/// Why a try to write failed.
enum Unplaced {
    /// There is no place, or no memory.
    NoPlace(WriteError),
    /// The device did not take it; whether there is another one.
    Refused(WriteError, bool),
}

impl PageWriter {
    pub(super) fn new() -> PageWriter {
        PageWriter {
            bounce: Lock::new(Buffer::reserve(WRITE_BLOCKS + relocate::MOVE_BLOCKS)),
            moving: Lock::default(),
            since: AtomicU64::new(0),
        }
    }

    /// See [`super::FileDevice::write`].
    pub(super) fn write(
        &self,
        store: &ExtentStore,
        pages: &[(Slot, Packed<'_>)],
    ) -> Result<(), WriteError> {
        if pages.is_empty() {
            return Ok(());
        }
        let mut bounce = self.bounce.lock();
        let _under_way = UnderWay::begin(&self.since);
        let mut first = None;
        for _ in 0..MAX_WRITE_TRIES {
            let (error, tries_again) = match try_to_write(store, pages, &mut bounce) {
                Err(Unplaced::Refused(error, elsewhere)) => {
                    (error, elsewhere || !matches!(error.errno, Errno::NOSPC | Errno::TIMEDOUT))
                }
                Err(Unplaced::NoPlace(error)) => (error, false),
                Ok(()) => return Ok(()),
            };
            first.get_or_insert(error);
            if !tries_again {
                break;
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// Waits for a write that is under way, and keeps further ones out.
    pub(super) fn pause(&self) -> Guard<'_, Buffer> {
        self.bounce.lock()
    }

    /// See [`super::FileDevice::leave`].
    pub(super) fn leave(&self, store: &ExtentStore) -> Leaving {
        let mut moving = self.moving.lock();
        let mut write = |pages: &[&Wanted], purpose, blocks: &[u8]| {
            let mut bounce = self.bounce.lock();
            let _under_way = UnderWay::begin(&self.since);
            let out = bounce.blocks(WRITE_BLOCKS).ok()?;
            relocate::move_together(store, pages, purpose, blocks, out)
        };
        relocate::leave(store, &mut moving, &mut write)
    }

    /// See [`super::FileDevice::is_writing_for`].
    pub(super) fn is_writing_for(&self, long: Duration) -> bool {
        let since = self.since.load(Relaxed);
        since != 0 && now().since(Nanos(since)) > long
    }

    /// Unlocks it in a forked child.
    ///
    /// # Safety
    /// As of [`super::FileDevice::force_unlock`].
    pub(super) unsafe fn force_unlock(&self) {
        // SAFETY: the holder of the lock does not exist in this process, and had left the data
        // consistent (caller).
        unsafe {
            self.bounce.force_unlock();
            self.moving.force_unlock();
        }
        self.since.store(0, Relaxed);
    }
}

fn try_to_write(
    store: &ExtentStore,
    pages: &[(Slot, Packed<'_>)],
    bounce: &mut Buffer,
) -> Result<(), Unplaced> {
    let (taken, cipher) = reserve(store, pages, bounce).map_err(Unplaced::NoPlace)?;
    // One block more than a write has, for the page that crosses its end.
    let out = bounce.blocks(WRITE_BLOCKS + 1).map_err(|errno| {
        store.give_up(&taken, None);
        Unplaced::NoPlace(WriteError { slot: pages[0].0, errno })
    })?;
    let mut tags = Vec::with_capacity(pages.len());
    let sealed = store.put(out, &taken, |i, at, out| {
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
            store.source.bar(extent);
            store.give_up(&taken, Some(extent));
            return Err(Unplaced::Refused(
                WriteError { slot: pages[object].0, errno: Errno::NOSPC },
                true,
            ));
        }
        let elsewhere = store.source.back_off(extent);
        // A full file system is no fault of this place, and what lies there may be written
        // over; anything else may be its fault.
        store.give_up(&taken, (errno != Errno::NOSPC || elsewhere).then_some(extent));
        return Err(Unplaced::Refused(WriteError { slot: pages[object].0, errno }, elsewhere));
    }
    let mut vacated = Vec::new();
    {
        let mut state = store.state.lock();
        for ((&(slot, _), &Taken { span, count, .. }), tag) in pages.iter().zip(&taken).zip(tags) {
            state.digests.remove(slot);
            if let Some(before) = state.places.set(slot, SlotPlace { span, count, tag }) {
                vacated.extend(state.extents.free(before.span));
            }
        }
    }
    store.release(&vacated);
    Ok(())
}

/// Takes a place for each page of a batch, and cleans for it if that helps.
fn reserve(
    store: &ExtentStore,
    pages: &[(Slot, Packed<'_>)],
    bounce: &mut Buffer,
) -> Result<(Vec<Taken>, Arc<Cipher>), WriteError> {
    let mut taken = Vec::with_capacity(pages.len());
    let mut cleanings = 0;
    loop {
        let mut state = store.state.lock();
        let mut cursor = WriteCursor::default();
        let purpose =
            if cleanings < MAX_CLEANINGS_PER_WRITE { Purpose::Write } else { Purpose::WriteAnyway };
        let mut full = None;
        for (_, page) in &pages[taken.len()..] {
            match state.extents.take(packed_len(page), &mut cursor, &*store.source, purpose) {
                Ok(place) => taken.push(place),
                Err(why) => {
                    full = Some(why);
                    break;
                }
            }
        }
        let Some(full) = full else { return Ok((taken, Arc::clone(state.extents.cipher()))) };
        drop(state);
        if store.release_one_or_wait() {
            continue;
        }
        if full == Full::Entirely && !store.emptied.lock().is_empty() {
            // There is room that no server was told of yet.
            store.trim_remote();
            continue;
        }
        if full == Full::Entirely {
            store.give_up(&taken, None);
            return Err(WriteError { slot: pages[taken.len()].0, errno: Errno::NOSPC });
        }
        cleanings =
            if relocate::clean(store, bounce) { cleanings + 1 } else { MAX_CLEANINGS_PER_WRITE };
    }
}

/// Bytes a packed page takes in the file.
pub(super) fn packed_len(page: &Packed<'_>) -> usize {
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
