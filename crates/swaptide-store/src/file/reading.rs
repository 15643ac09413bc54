//! Reading: from slots to pages.
//!
//! Owns the buffers that blocks are read into; each reader has one of them. What was read is
//! remembered by its digest. Rules and locks are those of the device ([`super`]).

use std::sync::Arc;
use std::time::Duration;

use swaptide_sys::lock::{Guard, Lock};
use swaptide_sys::thread::sleep;

use super::buffer::Buffer;
use super::cipher::{Cipher, Form};
use super::digests::Digester;
use super::extent_store::{ExtentStore, FileState};
use super::io::BlockIo;
use super::places::SlotPlace;
use super::{PAGE_BLOCKS, ReadError, ReadErrorKind};
use crate::block::{BlockRun, is_own_shortage};
use crate::codec::{self, Unpacker};
use crate::{PAGE_SIZE, Page, Slot};

/// Readers that may wait for servers at a time, each for as long as a server is given.
pub const MAX_REMOTE_READERS: usize = 5;
/// Readers that can be inside at a time; more wait for one of them. One more than those, for
/// readers of what is on this machine: they must not wait for a server that they ask nothing.
const READ_BUFFERS: usize = MAX_REMOTE_READERS + 1;
/// Between two looks for a free one; a read from a local disk takes as long.
const BUFFER_PAUSE: Duration = Duration::from_micros(100);
/// Blocks that are read before they are unpacked.
const READ_BLOCKS: usize = 128;

/// A buffer for one reader, and what unpacks its blocks.
struct ReadBuffer {
    buffer: Buffer,
    unpacker: Unpacker,
}

/// The buffers that blocks are read into, one for each reader.
pub(super) struct PageReader {
    /// Blocks on their way in.
    buffers: [Lock<ReadBuffer>; READ_BUFFERS],
    digester: Digester,
}

impl PageReader {
    pub(super) fn new(digester: Digester) -> PageReader {
        let buffers = core::array::from_fn(|_| {
            Lock::new(ReadBuffer {
                buffer: Buffer::reserve(PAGE_BLOCKS + READ_BLOCKS),
                unpacker: Unpacker::new(),
            })
        });
        PageReader { buffers, digester }
    }

    /// The first buffer that is free: which one will be is not known, and a reader that waits for a
    /// server has its own for a minute.
    fn free_buffer(&self) -> Guard<'_, ReadBuffer> {
        loop {
            if let Some(buffer) = self.buffers.iter().find_map(Lock::try_lock) {
                return buffer;
            }
            sleep(BUFFER_PAUSE);
        }
    }

    /// See [`super::FileDevice::read`].
    pub(super) fn read(
        &self,
        store: &ExtentStore,
        reqs: &mut [(Slot, &mut Page)],
    ) -> Result<(), ReadError> {
        let mut order = Vec::with_capacity(reqs.len());
        {
            let state = store.state.lock();
            for (i, &(slot, _)) in reqs.iter().enumerate() {
                let place = state
                    .places
                    .get(slot)
                    .ok_or(ReadError { slot, kind: ReadErrorKind::NoSuchSlot })?;
                order.push(Wanted::new(&state, slot, place, i));
            }
        }
        let Some(first) = order.first() else { return Ok(()) };
        let slot = first.slot;
        let mut blocks = self.free_buffer();
        let ReadBuffer { buffer, unpacker } = &mut *blocks;
        let blocks = buffer
            .blocks(PAGE_BLOCKS + READ_BLOCKS)
            .map_err(|errno| ReadError { slot, kind: ReadErrorKind::Io(errno) })?;
        let (spare, blocks) = blocks.split_at_mut(PAGE_BLOCKS * PAGE_SIZE);
        // In the order of the file, so that neighbours become one read.
        order.sort_unstable_by_key(|w| w.place.span);
        let mut rest = &mut order[..];
        while !rest.is_empty() {
            match read_some(store, rest, blocks, unpacker, reqs) {
                Ok(n) => rest = &mut rest[n..],
                Err((at, kind)) => {
                    let slot = rest[at].slot;
                    // Cleaning may have moved it, and something else may lie there now.
                    let before = rest[at].place;
                    look_again(store, rest)?;
                    if rest[at].place == before {
                        let page = &mut *reqs[rest[at].number].1;
                        let is_short =
                            matches!(kind, ReadErrorKind::Io(errno) if is_own_shortage(errno));
                        let copy =
                            if is_short { None } else { rest[at].read_copy(&*store.io, spare) };
                        if copy.is_none_or(|bytes| rest[at].unpack(bytes, page, unpacker).is_err())
                        {
                            page.fill(0);
                            return Err(ReadError { slot, kind });
                        }
                        rest[..=at].rotate_right(1);
                        rest = &mut rest[1..];
                    }
                    rest.sort_unstable_by_key(|w| w.place.span);
                }
            }
        }
        let digests: Vec<_> = order.iter().map(|w| self.digester.of(reqs[w.number].1)).collect();
        let mut state = store.state.lock();
        for (w, digest) in order.iter().zip(digests) {
            // Not if it was freed meanwhile; one that was moved is left out too.
            if let Some(digest) = digest.filter(|_| state.places.get(w.slot) == Some(w.place)) {
                state.digests.set(w.slot, digest);
            }
        }
        Ok(())
    }

    /// See [`super::FileDevice::unchanged`].
    pub(super) fn unchanged(&self, store: &ExtentStore, slot: Slot, page: &Page) -> bool {
        let Some(then) = store.state.lock().digests.get(slot) else { return false };
        self.digester.of(page) == Some(then)
    }

    /// Unlocks it in a forked child.
    ///
    /// # Safety
    /// As of [`super::FileDevice::force_unlock`].
    pub(super) unsafe fn force_unlock(&self) {
        // SAFETY: the holders of the locks do not exist in this process, and had left the data
        // consistent (caller).
        self.buffers.iter().for_each(|buffer| unsafe { buffer.force_unlock() });
    }
}

/// Reads and unpacks as many pages as fit the buffer. On failure, tells which one of `wanted`
/// failed.
fn read_some(
    store: &ExtentStore,
    wanted: &mut [Wanted],
    blocks: &mut [u8],
    unpacker: &mut Unpacker,
    reqs: &mut [(Slot, &mut Page)],
) -> Result<usize, (usize, ReadErrorKind)> {
    let (n, mut runs) = lay_out(wanted, blocks);
    if let Err((block, errno)) = store.io.read_runs(&mut runs) {
        let at = wanted[..n]
            .iter()
            .position(|w| w.uses(block))
            .expect("every block that is read is some page's");
        return Err((at, ReadErrorKind::Io(errno)));
    }
    for i in 0..n {
        let w = &wanted[i];
        if let Some(same) =
            i.checked_sub(1).map(|i| &wanted[i]).filter(|same| same.place.span == w.place.span)
        {
            // Asked for twice. Its bytes have been opened already.
            if let Ok([(_, from), (_, to)]) = reqs.get_disjoint_mut([same.number, w.number]) {
                to.copy_from_slice(&from[..]);
            }
            continue;
        }
        let page = &mut *reqs[w.number].1;
        w.unpack(&mut blocks[w.at..w.at + w.place.span.len()], page, unpacker)
            .map_err(|kind| (i, kind))?;
    }
    Ok(n)
}

/// Looks up where pages lie now.
fn look_again(store: &ExtentStore, wanted: &mut [Wanted]) -> Result<(), ReadError> {
    let state = store.state.lock();
    for w in wanted {
        let place = state
            .places
            .get(w.slot)
            .ok_or(ReadError { slot: w.slot, kind: ReadErrorKind::NoSuchSlot })?;
        *w = Wanted::new(&state, w.slot, place, w.number);
    }
    Ok(())
}

/// A page to read, and what it takes to open it.
pub(super) struct Wanted {
    pub(super) slot: Slot,
    pub(super) place: SlotPlace,
    pub(super) counter: u64,
    pub(super) cipher: Arc<Cipher>,
    pub(super) form: Form,
    /// The caller's number of it.
    pub(super) number: usize,
    /// The offset of its bytes in the buffer.
    pub(super) at: usize,
}

impl Wanted {
    pub(super) fn new(state: &FileState, slot: Slot, place: SlotPlace, number: usize) -> Wanted {
        let (cipher, form, base) = state.extents.sealed_with(place.span);
        Wanted {
            slot,
            place,
            counter: base + u64::from(place.count),
            cipher: Arc::clone(cipher),
            form,
            number,
            at: 0,
        }
    }

    /// Its bytes from the other copy that there is of it, if there is one; sealed. `spare` is room
    /// for its blocks.
    pub(super) fn read_copy<'b>(
        &self,
        io: &dyn BlockIo,
        spare: &'b mut [u8],
    ) -> Option<&'b mut [u8]> {
        let span = self.place.span;
        let blocks = &mut spare[..(span.end_block() - span.block()) as usize * PAGE_SIZE];
        io.read_copy(u64::from(span.block()) * PAGE_SIZE as u64, blocks).ok()?;
        Some(&mut blocks[span.byte()..][..span.len()])
    }

    /// True if any of its bytes are in that block of the buffer.
    pub(super) fn uses(&self, block: usize) -> bool {
        (self.at / PAGE_SIZE..(self.at + self.place.span.len()).div_ceil(PAGE_SIZE))
            .contains(&block)
    }

    /// Opens its bytes and unpacks them.
    fn unpack(
        &self,
        bytes: &mut [u8],
        page: &mut Page,
        unpacker: &mut Unpacker,
    ) -> Result<(), ReadErrorKind> {
        let SlotPlace { span, tag, .. } = &self.place;
        if bytes.len() == PAGE_SIZE {
            let opens =
                self.cipher.open_into(self.form, self.counter, span.name(), tag, bytes, page);
            return if opens { Ok(()) } else { Err(ReadErrorKind::Authentication) };
        }
        if !self.cipher.open(self.form, self.counter, span.name(), tag, bytes) {
            return Err(ReadErrorKind::Authentication);
        }
        if let Ok(word) = bytes.try_into() {
            codec::fill(page, u64::from_le_bytes(word));
            return Ok(());
        }
        unpacker.unpack(bytes, page).map_err(|_| ReadErrorKind::Unpacking)
    }
}

/// Gives every block that the first pages of `wanted` (in the order of the file) need a place in
/// the buffer, neighbours next to each other. Returns for how many pages there is room, and what to
/// read.
pub(super) fn lay_out<'b>(
    wanted: &mut [Wanted],
    mut buffer: &'b mut [u8],
) -> (usize, Vec<BlockRun<'b>>) {
    let room = (buffer.len() / PAGE_SIZE) as u32;
    let mut runs = Vec::new();
    // The run so far: its first block, the one after its last, and the blocks of the buffer before
    // it.
    let (mut start, mut end, mut before) = (0, 0, 0u32);
    let mut laid = 0;
    let mut close = |start: u32, end: u32, before: u32| {
        if start < end {
            let (buf, rest) =
                core::mem::take(&mut buffer).split_at_mut((end - start) as usize * PAGE_SIZE);
            buffer = rest;
            runs.push(BlockRun {
                offset: u64::from(start) * PAGE_SIZE as u64,
                first: before as usize,
                buf,
            });
        }
    };
    for w in wanted {
        let span = w.place.span;
        let apart = laid == 0 || span.block() > end;
        let (from, used) =
            if apart { (span.block(), before + (end - start)) } else { (start, before) };
        if used + (span.end_block().max(end) - from) > room && (apart || span.end_block() > end) {
            break;
        }
        if apart {
            close(start, end, before);
            (start, end, before) = (span.block(), span.block(), used);
        }
        end = end.max(span.end_block());
        w.at = (before + (span.block() - start)) as usize * PAGE_SIZE + span.byte();
        laid += 1;
    }
    close(start, end, before);
    (laid, runs)
}
