//! Compressed RAM: pages kept packed in this process's own memory.
//!
//! Owns the handle of every slot (four bytes), the pool the packed bytes live in, and the words of
//! same-filled pages, which need no bytes. Packing happens outside, in a
//! [`Compressor`](crate::codec::Compressor): a store is a copy into the pool, a load a copy out of
//! it and, after the lock is dropped, a decompression.
//!
//! A page that stays long may be compressed again: [`Zram::not_recompressed`] gives what is worth
//! it, [`Zram::replace_recompressed`] puts the outcome in its place and notes that it was tried, so
//! that no page is tried twice. Pages of both codecs lie side by side.
//!
//! A unit (several neighbouring pages packed as one) belongs to all its slots; each is freed on its
//! own, and the last one frees the unit. Loading one page of a unit decompresses all of it, into a
//! scratch buffer that the unit's next pages are then copied from.
//!
//! Invariants:
//! 1. An object's head names the slot (of a unit: the first slot and the live ones) whose handle
//!    points at it, and holds a checksum of its bytes. A reader of the bytes checks both, and
//!    answers [`Damaged`] rather than hand out another slot's page, or one that is not what was
//!    stored: memory that flips a bit, or a stray write. A checksum does not prove anything against
//!    deliberate writes; a writer that can do that has the whole process.
//! 2. A store that fails changes nothing.
//!
//! 3. `figures` is what `state` holds, as of the last time it was unlocked after a change.
//!
//! Locks: `scratch` (only for units), then `state`. Neither is held while the other device or the
//! codec's compressing side runs. `figures` is read without.

mod classes;
mod pool;
mod table;

use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use swaptide_sys::lock::Lock;

use self::pool::{ObjectHead, ObjectId, ObjectPool};
use self::table::{Handle, Handles, SameTable};
use crate::codec::{
    self, Codec, MAX_COMPRESSED_BYTES, MAX_UNIT_PAGES, Packed, PackedKind, PackedUnit, Unpacker,
};
use crate::{PAGE_SIZE, Page, Slot};

/// Why a compressed-RAM device could not be made.
#[derive(Copy, Clone, Debug, thiserror::Error)]
pub enum Error {
    /// No address space for the pool.
    #[error("cannot reserve address space for {slots} slots of compressed memory ({}): raise the \
        limit of `ulimit -v`", swaptide_sys::ErrnoName(*errno))]
    Reserve {
        /// Slots that were asked for.
        slots: u32,
        /// The error of the kernel.
        errno: swaptide_sys::Errno,
    },
}

/// The pool is at its limit (or at the end of its address space): make room and try again, or use
/// another device.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("compressed memory is full; write pages back, or use a swap area")]
pub struct PoolFull;

/// The stored data is not a page of that slot.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot {slot} of compressed memory: {what}")]
pub struct Damaged {
    /// The slot asked for.
    pub slot: Slot,
    /// The fault found.
    pub what: &'static str,
}

/// Usage and costs of a device.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct ZramStats {
    /// Slots that hold a page.
    pub pages: usize,
    /// Of those, pages that need no bytes: one repeated word, zero included.
    pub same_filled: usize,
    /// Objects in the pool: pages and units.
    pub objects: usize,
    /// Bytes of those objects.
    pub stored_bytes: usize,
    /// Bytes of memory the pool holds for them.
    pub pool_bytes: usize,
    /// Bytes of handles, heads and tables.
    pub metadata_bytes: usize,
}

/// The compressed-RAM device.
pub struct Zram {
    state: Lock<ZramState>,
    /// Taken before `state`.
    scratch: Lock<Scratch>,
    figures: Figures,
    /// Address space for fewer pages than this is scarce.
    scarce_below: usize,
}

/// Values that are read often, without a lock.
#[derive(Default)]
struct Figures {
    populated: AtomicU64,
    pool_bytes: AtomicUsize,
    stored_bytes: AtomicUsize,
    room_pages: AtomicUsize,
}

impl Figures {
    /// Called by the holder of the state's lock, so stores do not race. Nothing else is
    /// concluded from them: relaxed.
    fn note(&self, state: &ZramState) {
        self.pool_bytes.store(state.pool.resident_bytes(), Ordering::Relaxed);
        self.populated.store(state.pool.populated(), Ordering::Relaxed);
        self.stored_bytes.store(state.pool.stored_bytes(), Ordering::Relaxed);
        self.room_pages.store(state.pool.room_pages(), Ordering::Relaxed);
    }
}

struct ZramState {
    handles: Handles,
    same: SameTable,
    pool: ObjectPool,
    /// Grows whenever a unit is freed or moved, so that a scratch buffer knows it is out of date.
    unit_epoch: u64,
    /// Class that compaction continues with.
    cursor: usize,
}

/// The unit decompressed last.
#[derive(Default)]
struct Scratch {
    unit: Option<(ObjectId, u64)>,
    packed: Vec<u8>,
    pages: Vec<u8>,
}

/// Slots a device may have: more bits a head does not have for them.
const MAX_SLOTS: u32 = ObjectHead::RECOMPRESSED;

/// Objects of fewer bytes are not compressed again: the smallest size classes are not much smaller.
const MIN_RECOMPRESS_BYTES: usize = 192;

impl Zram {
    /// A device of `max_slots` slots. Costs address space, no memory to speak of.
    ///
    /// # Panics
    /// For more than 2^30 slots.
    pub fn new(max_slots: u32) -> Result<Zram, Error> {
        Zram::with_room(max_slots, max_slots as usize * PAGE_SIZE)
    }

    /// The same with address space for `bytes` of objects.
    ///
    /// # Panics
    /// For more than 2^30 slots.
    pub fn with_room(max_slots: u32, bytes: usize) -> Result<Zram, Error> {
        assert!(max_slots <= MAX_SLOTS, "a device of {max_slots} slots");
        let pool =
            ObjectPool::new(bytes).map_err(|errno| Error::Reserve { slots: max_slots, errno })?;
        let handles = Handles::new(max_slots);
        let figures = Figures::default();
        figures.room_pages.store(pool.room_pages(), Ordering::Relaxed);
        let scarce_below = pool.scarce_below();
        Ok(Zram {
            scarce_below,
            state: Lock::new(ZramState {
                handles,
                same: SameTable::default(),
                pool,
                unit_epoch: 0,
                cursor: 0,
            }),
            scratch: Lock::new(Scratch::default()),
            figures,
        })
    }

    /// Stores a page; what the slot held before is freed. On failure nothing changes.
    ///
    /// # Panics
    /// If the slot is beyond the device's end.
    pub fn insert(&self, slot: Slot, page: &Packed<'_>) -> Result<(), PoolFull> {
        // Before the lock is taken.
        let sum = match page {
            Packed::Zero | Packed::Same(_) => 0,
            Packed::Bytes(bytes) => sum_of(bytes),
            Packed::Raw(page) => sum_of(&page[..]),
        };
        self.change(|state| {
            let handle = match *page {
                Packed::Zero => Handle::Same(state.same.add(0)),
                Packed::Same(word) => Handle::Same(state.same.add(word)),
                Packed::Bytes(bytes) => state.store(slot, 0, &[], bytes, sum)?,
                Packed::Raw(page) => state.store(slot, 0, &[], page, sum)?,
            };
            state.replace(slot, handle);
            Ok(())
        })
    }

    /// Does `f` under the lock, then notes the figures.
    fn change<T>(&self, f: impl FnOnce(&mut ZramState) -> T) -> T {
        let mut state = self.state.lock();
        let answer = f(&mut state);
        self.figures.note(&state);
        answer
    }

    /// Stores `n` pages from `slot` on, packed as one. On failure nothing changes.
    ///
    /// # Panics
    /// If `n` is not between 1 and [`MAX_UNIT_PAGES`], or a slot is beyond the device's end.
    pub fn insert_unit(&self, slot: Slot, n: usize, unit: &PackedUnit<'_>) -> Result<(), PoolFull> {
        assert!((1..=MAX_UNIT_PAGES).contains(&n), "a unit of {n} pages");
        self.change(|state| state.insert_unit(slot, n, unit))
    }

    /// Brings a page back. The slot keeps it. Tells the codec of bytes that had to be decompressed.
    pub fn load(
        &self,
        slot: Slot,
        out: &mut Page,
        unpacker: &mut Unpacker,
    ) -> Result<Option<Codec>, Damaged> {
        let state = self.state.lock();
        let id = match state.handles.get(slot) {
            Handle::Empty => return Err(Damaged { slot, what: "nothing is stored here" }),
            Handle::Same(id) => {
                let word = state.same.get(id);
                drop(state);
                codec::fill(out, word);
                return Ok(None);
            }
            Handle::Object(id) => id,
        };
        let head = state.pool.head(id);
        if head.live != 0 {
            drop(state);
            return self.load_of_unit(slot, 1, out, unpacker).map(|_| Some(Codec::Lz4));
        }
        if head.owner() != slot.0 {
            return Err(Damaged { slot, what: "the page found belongs to another slot" });
        }
        let bytes = state.pool.bytes(id);
        if bytes.len() == PAGE_SIZE {
            out.copy_from_slice(bytes);
            drop(state);
            return if sum_of(&out[..]) == head.sum {
                Ok(None)
            } else {
                Err(Damaged { slot, what: CHANGED })
            };
        }
        // Copy out and decompress without the lock: the copy costs a twentieth of the decompression
        // and warms the cache.
        let mut copy = [MaybeUninit::<u8>::uninit(); MAX_COMPRESSED_BYTES];
        let block = copy_into(&mut copy, bytes)
            .ok_or(Damaged { slot, what: "an object of impossible length" })?;
        drop(state);
        if sum_of(block) != head.sum {
            return Err(Damaged { slot, what: CHANGED });
        }
        unpacker
            .unpack(block, out)
            .map_err(|_| Damaged { slot, what: "the page does not decompress" })?;
        Ok(Some(Codec::of(block)))
    }

    /// Prefetches the handle of a slot that will be loaded soon. [`Zram::prefetch`], a little
    /// later, does not wait for it then.
    pub fn prefetch_handle(&self, slot: Slot) {
        self.state.lock().handles.prefetch(slot);
    }

    /// Prefetches what a slot holds that will be loaded soon.
    pub fn prefetch(&self, slot: Slot) {
        let state = self.state.lock();
        if let Handle::Object(id) = state.handles.get(slot) {
            state.pool.prefetch(id);
        }
    }

    /// Appends what a slot holds to `out` as it is, without decompressing, and says what it is: for
    /// another device.
    ///
    /// A zero or same-filled page appends nothing. Of a unit, the slot's page is decompressed and
    /// appended raw. Where `out` has room for a page it is not reallocated. On failure `out` is as
    /// it was.
    pub fn packed(
        &self,
        slot: Slot,
        out: &mut Vec<u8>,
        unpacker: &mut Unpacker,
    ) -> Result<PackedKind, Damaged> {
        // Before the lock is taken: growing takes time.
        out.reserve(PAGE_SIZE);
        let state = self.state.lock();
        let id = match state.handles.get(slot) {
            Handle::Empty => return Err(Damaged { slot, what: "nothing is stored here" }),
            Handle::Same(id) => {
                return Ok(match state.same.get(id) {
                    0 => PackedKind::Zero,
                    word => PackedKind::Same(word),
                });
            }
            Handle::Object(id) => id,
        };
        let head = state.pool.head(id);
        if head.live != 0 {
            drop(state);
            let start = out.len();
            out.resize(start + PAGE_SIZE, 0);
            return match self.load_of_unit(slot, 1, &mut out[start..], unpacker) {
                Ok(_) => Ok(PackedKind::Raw),
                Err(damaged) => {
                    out.truncate(start);
                    Err(damaged)
                }
            };
        }
        if head.owner() != slot.0 {
            return Err(Damaged { slot, what: "the page found belongs to another slot" });
        }
        let bytes = state.pool.bytes(id);
        let kind = match bytes.len() {
            PAGE_SIZE => PackedKind::Raw,
            len @ 1..=MAX_COMPRESSED_BYTES => PackedKind::Bytes(len),
            _ => return Err(Damaged { slot, what: "an object of impossible length" }),
        };
        let start = out.len();
        out.extend_from_slice(bytes);
        drop(state);
        // What is damaged must not go to another device, where it would be sealed as what it
        // never was.
        if sum_of(&out[start..]) != head.sum {
            out.truncate(start);
            return Err(Damaged { slot, what: CHANGED });
        }
        Ok(kind)
    }

    /// Appends the bytes of a page that is worth compressing again: one of lz4 that was not
    /// [replaced](Self::replace_recompressed) before. What belongs to no slot, or to another slot,
    /// is not. Where `out` has room for a page it is not reallocated.
    pub fn not_recompressed(&self, slot: Slot, out: &mut Vec<u8>) -> bool {
        out.reserve(PAGE_SIZE);
        let state = self.state.lock();
        let Handle::Object(id) = state.handles.get(slot) else { return false };
        let head = state.pool.head(id);
        // Units have live pages, recompressed pages another slot's number.
        if head.live != 0
            || head.slot != slot.0
            || usize::from(head.len) < MIN_RECOMPRESS_BYTES
            || usize::from(head.len) > MAX_COMPRESSED_BYTES
        {
            return false;
        }
        let bytes = state.pool.bytes(id);
        if Codec::of(bytes) != Codec::Lz4 {
            return false;
        }
        let start = out.len();
        out.extend_from_slice(bytes);
        drop(state);
        let whole = sum_of(&out[start..]) == head.sum;
        if !whole {
            out.truncate(start);
        }
        whole
    }

    /// Puts other bytes of the same page in the place of a slot's, or none if there are no better
    /// ones, and notes that this was tried. Gives the bytes saved. The caller vouches that the slot
    /// holds the page they are of. On failure nothing changes.
    pub fn replace_recompressed(
        &self,
        slot: Slot,
        bytes: Option<&[u8]>,
    ) -> Result<usize, PoolFull> {
        self.change(|state| {
            let Handle::Object(old) = state.handles.get(slot) else { return Ok(0) };
            let head = state.pool.head(old);
            if head.live != 0 || head.owner() != slot.0 {
                return Ok(0);
            }
            let Some(bytes) = bytes else {
                state.pool.mark_recompressed(old);
                return Ok(0);
            };
            let len = bytes.len() as u16;
            let id = state.pool.alloc_for_less(ObjectHead {
                slot: slot.0,
                len,
                live: 0,
                sum: sum_of(bytes),
            })?;
            state.pool.bytes_mut(id).copy_from_slice(bytes);
            state.pool.mark_recompressed(id);
            state.replace(slot, Handle::Object(id));
            Ok(usize::from(head.len).saturating_sub(bytes.len()))
        })
    }

    /// Brings `n` pages from `slot` on back. Units that lie in the range are decompressed straight
    /// into `out`.
    ///
    /// # Panics
    /// If `out` is not `n` pages long.
    pub fn load_range(
        &self,
        slot: Slot,
        n: usize,
        out: &mut [u8],
        unpacker: &mut Unpacker,
    ) -> Result<(), Damaged> {
        assert_eq!(out.len(), n * PAGE_SIZE, "a buffer for {n} pages");
        let mut done = 0;
        while done < n {
            let at = slot.offset(done as u32);
            let rest = &mut out[done * PAGE_SIZE..];
            let in_unit = {
                let state = self.state.lock();
                matches!(state.handles.get(at), Handle::Object(id) if state.pool.head(id).live != 0)
            };
            if in_unit {
                done += self.load_of_unit(at, n - done, rest, unpacker)?;
            } else {
                let (page, _) = rest.as_chunks_mut::<PAGE_SIZE>();
                self.load(at, &mut page[0], unpacker)?;
                done += 1;
            }
        }
        Ok(())
    }

    /// Loads up to `max` pages of the unit `slot` is in; returns how many.
    fn load_of_unit(
        &self,
        slot: Slot,
        max: usize,
        out: &mut [u8],
        unpacker: &mut Unpacker,
    ) -> Result<usize, Damaged> {
        let damaged = |what| Damaged { slot, what };
        let mut scratch = self.scratch.lock();
        let scratch = &mut *scratch;
        let state = self.state.lock();
        let Handle::Object(id) = state.handles.get(slot) else {
            return Err(damaged("nothing is stored here"));
        };
        let head = state.pool.head(id);
        let page = slot.0.wrapping_sub(head.slot) as usize;
        if page >= MAX_UNIT_PAGES || head.live & (1 << page) == 0 {
            return Err(damaged("the unit found belongs to other slots"));
        }
        // Pages of the unit from here on without a gap.
        let run = ((head.live >> page).trailing_ones() as usize).min(max);
        let unit = (id, state.unit_epoch);
        if scratch.unit != Some(unit) {
            let (&pages, block) = state
                .pool
                .bytes(id)
                .split_first()
                .ok_or(damaged("an object of impossible length"))?;
            if pages == 0 || usize::from(pages) > MAX_UNIT_PAGES {
                return Err(damaged("a unit of an impossible number of pages"));
            }
            scratch.unit = None;
            scratch.packed.clear();
            scratch.packed.extend_from_slice(block);
            drop(state);
            if sum_of_unit(pages, &scratch.packed) != head.sum {
                return Err(damaged(CHANGED));
            }
            let pages = usize::from(pages);
            if run == pages {
                unpacker
                    .unpack(&scratch.packed, &mut out[..run * PAGE_SIZE])
                    .map_err(|_| damaged("the unit does not decompress"))?;
                return Ok(run);
            }
            scratch.pages.resize(pages * PAGE_SIZE, 0);
            unpacker
                .unpack(&scratch.packed, &mut scratch.pages)
                .map_err(|_| damaged("the unit does not decompress"))?;
            scratch.unit = Some(unit);
        }
        let found = scratch.pages.get(page * PAGE_SIZE..(page + run) * PAGE_SIZE);
        out[..run * PAGE_SIZE]
            .copy_from_slice(found.ok_or(damaged("the unit ends before this page"))?);
        Ok(run)
    }

    /// Forgets what a slot holds; `false` if it held nothing.
    pub fn free(&self, slot: Slot) -> bool {
        self.change(|state| {
            let held = state.handles.get(slot) != Handle::Empty;
            if held {
                state.replace(slot, Handle::Empty);
            }
            held
        })
    }

    /// True if a slot holds a page.
    #[must_use]
    pub fn contains(&self, slot: Slot) -> bool {
        self.state.lock().handles.get(slot) != Handle::Empty
    }

    /// Moves objects out of sparse blocks, so that those become free and their memory goes back to
    /// the kernel, until no block can be freed so, or about `budget` bytes were copied. Returns the
    /// bytes by which the pool shrank.
    ///
    /// Cheap to call often: only size classes in which something was freed since they were last
    /// found dense are looked at, and without any the answer is immediate. The lock is held for a
    /// block at a time.
    pub fn compact(&self, budget: usize) -> usize {
        let mut shrunk = 0;
        let mut copied = 0;
        while copied < budget {
            // The lock is dropped after every block, so that faults get in between.
            let moved = self.change(|state| {
                let before = state.pool.resident_bytes();
                let moved = state.compact_one();
                shrunk += before - state.pool.resident_bytes();
                moved
            });
            match moved {
                // Even a block of few bytes costs a system call.
                Some(bytes) => copied += bytes.max(256),
                None => break,
            }
        }
        shrunk
    }

    /// Gives the memory of empty blocks back that is kept for the next pages (1 MiB at most).
    /// Returns how many bytes it was.
    pub fn trim(&self) -> usize {
        self.change(|state| {
            let before = state.pool.resident_bytes();
            state.pool.discard_warm();
            before - state.pool.resident_bytes()
        })
    }

    /// Sets how many bytes the pool may hold; [`PoolFull`] beyond. Does not shrink a pool that is
    /// larger.
    pub fn set_limit(&self, bytes: usize) {
        self.state.lock().pool.set_limit(bytes);
    }

    /// The limit in force (`usize::MAX` at first).
    #[must_use]
    pub fn limit(&self) -> usize {
        self.state.lock().pool.limit()
    }

    /// Bytes of memory the pool holds. Takes no lock.
    #[must_use]
    pub fn pool_bytes(&self) -> usize {
        self.figures.pool_bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of further pages, of any size, that certainly find room in the address
    /// space. Takes no lock.
    #[must_use]
    pub fn room_pages(&self) -> usize {
        self.figures.room_pages.load(Ordering::Relaxed)
    }

    /// True if the address space is near its end. Takes no lock.
    #[must_use]
    pub fn is_scarce(&self) -> bool {
        self.room_pages() < self.scarce_below
    }

    /// Pages that the pool had the kernel populate so far. Takes no lock.
    #[must_use]
    pub fn populated(&self) -> u64 {
        self.figures.populated.load(Ordering::Relaxed)
    }

    /// Bytes of packed data. Takes no lock.
    #[must_use]
    pub fn stored_bytes(&self) -> usize {
        self.figures.stored_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of handles, heads and tables.
    #[must_use]
    pub fn metadata_bytes(&self) -> usize {
        self.stats().metadata_bytes
    }

    /// All of it at one moment.
    #[must_use]
    pub fn stats(&self) -> ZramStats {
        let state = self.state.lock();
        ZramStats {
            pages: state.handles.used(),
            same_filled: state.same.pages(),
            objects: state.pool.objects(),
            stored_bytes: state.pool.stored_bytes(),
            pool_bytes: state.pool.resident_bytes(),
            metadata_bytes: state.handles.metadata_bytes()
                + state.same.metadata_bytes()
                + state.pool.metadata_bytes(),
        }
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
            self.scratch.force_unlock();
        }
    }

    /// Flips a bit of what a slot holds (tests).
    #[cfg(test)]
    fn flip(&self, slot: Slot, bit: usize) {
        let mut state = self.state.lock();
        let Handle::Object(id) = state.handles.get(slot) else { panic!("nothing to flip") };
        let bytes = state.pool.bytes_mut(id);
        let at = bit % (bytes.len() * 8);
        bytes[at / 8] ^= 1 << (at % 8);
    }

    /// Recounts everything (tests).
    #[cfg(test)]
    fn check(&self) {
        let state = self.state.lock();
        state.pool.check();
        assert_eq!(
            (self.pool_bytes(), self.stored_bytes()),
            (state.pool.resident_bytes(), state.pool.stored_bytes())
        );
    }
}

impl ZramState {
    /// Puts bytes into the pool as an object of `slot`.
    fn store(
        &mut self,
        slot: Slot,
        live: u16,
        prefix: &[u8],
        bytes: &[u8],
        sum: u32,
    ) -> Result<Handle, PoolFull> {
        let len =
            u16::try_from(prefix.len() + bytes.len()).expect("packed data is shorter than 64 KiB");
        let id = self.pool.alloc(ObjectHead { slot: slot.0, len, live, sum })?;
        let (start, rest) = self.pool.bytes_mut(id).split_at_mut(prefix.len());
        start.copy_from_slice(prefix);
        rest.copy_from_slice(bytes);
        Ok(Handle::Object(id))
    }

    /// See [`Zram::insert_unit`].
    fn insert_unit(&mut self, slot: Slot, n: usize, unit: &PackedUnit<'_>) -> Result<(), PoolFull> {
        let slots = (0..n as u32).map(|i| slot.offset(i));
        match *unit {
            PackedUnit::Zero | PackedUnit::Same(_) => {
                let word = if let PackedUnit::Same(word) = *unit { word } else { 0 };
                for slot in slots {
                    let handle = Handle::Same(self.same.add(word));
                    self.replace(slot, handle);
                }
            }
            PackedUnit::Bytes(bytes) => {
                let live = u16::MAX >> (MAX_UNIT_PAGES - n);
                let handle =
                    self.store(slot, live, &[n as u8], bytes, sum_of_unit(n as u8, bytes))?;
                for slot in slots {
                    self.replace(slot, handle);
                }
            }
            PackedUnit::Raw(bytes) => {
                assert_eq!(bytes.len(), n * PAGE_SIZE, "a raw unit of {n} pages");
                let mut stored = [Handle::Empty; MAX_UNIT_PAGES];
                for (i, (slot, page)) in
                    slots.clone().zip(bytes.chunks_exact(PAGE_SIZE)).enumerate()
                {
                    match self.store(slot, 0, &[], page, sum_of(page)) {
                        Ok(handle) => stored[i] = handle,
                        Err(full) => {
                            for handle in stored {
                                self.release(slot, handle);
                            }
                            return Err(full);
                        }
                    }
                }
                for (slot, handle) in slots.zip(stored) {
                    self.replace(slot, handle);
                }
            }
        }
        Ok(())
    }

    /// Gives a slot another handle and releases the one before.
    fn replace(&mut self, slot: Slot, handle: Handle) {
        let before = self.handles.set(slot, handle);
        self.release(slot, before);
    }

    /// Empties one sparse block; the bytes copied, or `None` when there is none to gain.
    fn compact_one(&mut self) -> Option<usize> {
        let ZramState { handles, pool, unit_epoch, cursor, .. } = self;
        pool.compact_one(cursor, |head, to| {
            if head.live == 0 {
                handles.set(Slot(head.owner()), Handle::Object(to));
                return;
            }
            *unit_epoch += 1;
            for page in (0..MAX_UNIT_PAGES as u32).filter(|page| head.live & (1 << page) != 0) {
                handles.set(Slot(head.slot + page), Handle::Object(to));
            }
        })
    }

    /// Releases a handle that `slot` held.
    fn release(&mut self, slot: Slot, handle: Handle) {
        match handle {
            Handle::Empty => {}
            Handle::Same(id) => self.same.remove(id),
            Handle::Object(id) => {
                let head = self.pool.head(id);
                let live =
                    head.live & !1u16.checked_shl(slot.0.wrapping_sub(head.slot)).unwrap_or(0);
                if live != 0 {
                    self.pool.set_live(id, live);
                } else {
                    self.unit_epoch += u64::from(head.live != 0);
                    self.pool.free(id);
                }
            }
        }
    }
}

/// The text for bytes whose checksum differs.
const CHANGED: &str =
    "the page is not what was stored: memory is failing, or was written to by mistake";

/// The checksum of an object's bytes.
fn sum_of(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// That of a unit: the number of its pages, and its bytes.
fn sum_of_unit(pages: u8, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&[pages]);
    hasher.update(bytes);
    hasher.finalize()
}

/// Copies `bytes` to the start of `buffer`, if they fit.
fn copy_into<'a>(buffer: &'a mut [MaybeUninit<u8>], bytes: &[u8]) -> Option<&'a [u8]> {
    let target = buffer.get_mut(..bytes.len())?;
    // SAFETY: `target` has exactly the length of `bytes`, is exclusively borrowed, and is
    // initialized by the copy.
    unsafe {
        core::ptr::copy_nonoverlapping(bytes.as_ptr(), target.as_mut_ptr().cast(), bytes.len());
        Some(core::slice::from_raw_parts(target.as_ptr().cast(), bytes.len()))
    }
}

#[cfg(test)]
mod tests;
