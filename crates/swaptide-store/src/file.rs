//! The file device: pages encrypted in extents of a swap file that several processes share.
//!
//! Owns where each of its slots' pages lies (extent and page in it), the tag that proves the page is the one written, and the
//! state of the extents leased from an [`ExtentSource`]. Writing is log-structured: a batch goes to the next pages of the open
//! extent, so pages written together lie together and go out in few large writes.
//!
//! Every page is sealed with AES-256-GCM-SIV. The tag stays in RAM: what the disk returns is either exactly what was written
//! to this place for this slot last, or an error. There is no key on disk and nothing there outlives the processes.
//!
//! Across a fork, parent and child both refer to the extents leased so far. [`FileDevice::freeze_all`], called before, makes
//! those read-only for both: neither writes into them again or punches them, and the source gets each back when the last of
//! the processes that share it has let it go. [`FileDevice::rekey_salt`], called in the child, changes the child's key, so that
//! no two processes ever use one key with the same nonce.
//!
//! Invariants:
//! 1. A write that fails records nothing: every slot still has the page it had.
//! 2. A pair of key and nonce is used for one write only: the counter grows with each page, and a copy of it in another
//!    process is used with another key.
//! 3. A page's location is written to only while no slot's record names it, and only in an extent that is exclusively ours.
//! 4. An extent is punched only when no page of it is live and it is exclusively ours; then, and only then, the source is told
//!    that it is punched.
//!
//! Locks: `bounce`, then `state`. `bounce` is held across I/O, `state` is not (but across calls to the source).

mod cipher;
mod extents;
mod io;
mod places;

use std::io::IoSliceMut;
use std::sync::Arc;

use swaptide_sys::lock::{Guard, Lock};
use swaptide_sys::mem::Mapping;
use swaptide_sys::{Errno, OwnedFd};

use self::cipher::Cipher;
use self::extents::{Extents, Location, Taken, Vacated};
use self::io::{BlockIo, Run, SwapFile};
use self::places::{Place, Places};
use crate::{PAGE_SIZE, Page, Slot};

/// Pages in an extent.
pub const EXTENT_PAGES: usize = 512;
/// Bytes in an extent.
pub const EXTENT_BYTES: u64 = (EXTENT_PAGES * PAGE_SIZE) as u64;

/// Pages the bounce buffer holds: enough for writes of a size disks like.
const BOUNCE_PAGES: usize = 64;

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

    /// Gives an extent back. `exclusive_hole_punch` tells that it was exclusively this device's and its space has been given
    /// back to the file system already; otherwise another process may still read it (see [`FileDevice::freeze_all`]) or the
    /// file system refused.
    fn release(&self, extent: Extent, exclusive_hole_punch: bool);
}

/// A batch was not written; every slot has the page it had before.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("swap file: writing slot {slot}: {}", swaptide_sys::Why(*errno))]
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
    #[error("{0}")]
    Io(Errno),
    /// What was read is not what was written.
    #[error("the page is not what was written there: the file was changed, or the disk is failing")]
    Authentication,
    /// The slot holds no page.
    #[error("the slot holds no page")]
    NoSuchSlot,
}

/// A page of a batch could not be brought back; the contents of the batch's other pages are undefined.
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
pub struct Stats {
    /// Slots that hold a page.
    pub pages: usize,
    /// Extents leased, those shared with other processes among them.
    pub extents: usize,
    /// Of those, extents shared with other processes.
    pub shared_extents: usize,
    /// Bytes of records in RAM.
    pub metadata_bytes: usize,
}

/// The file device.
pub struct FileDevice {
    io: Box<dyn BlockIo>,
    source: Box<dyn ExtentSource + Send + Sync>,
    key: [u8; 32],
    state: Lock<State>,
    /// For sealed pages on their way out, and for pages that cannot be read straight to where they belong. Made when first
    /// needed. Taken before `state`.
    bounce: Lock<Option<Mapping>>,
}

struct State {
    places: Places,
    extents: Extents,
}

impl FileDevice {
    /// A device on a swap file that is open for reading and writing.
    ///
    /// `key` is common to the processes that share the file; `salt` must differ between any two of them. Sets `O_DIRECT` on
    /// the descriptor where the file system takes it.
    #[must_use]
    pub fn new(fd: OwnedFd, key: [u8; 32], salt: u64, extents: Box<dyn ExtentSource + Send + Sync>) -> FileDevice {
        Self::on(Box::new(SwapFile::new(fd)), key, salt, extents)
    }

    fn on(io: Box<dyn BlockIo>, key: [u8; 32], salt: u64, source: Box<dyn ExtentSource + Send + Sync>) -> FileDevice {
        let extents = Extents::new(Arc::new(Cipher::new(&key, salt)));
        let state = State { places: Places::default(), extents };
        FileDevice { io, source, key, state: Lock::new(state), bounce: Lock::new(None) }
    }

    /// Writes a batch of pages; what their slots held before is freed. On failure nothing is recorded.
    pub fn write(&self, pages: &[(Slot, &Page)]) -> Result<(), WriteError> {
        let Some(&(first, _)) = pages.first() else { return Ok(()) };
        let mut bounce = self.bounce.lock();
        let bounce = bounce_pages(&mut bounce).map_err(|errno| WriteError { slot: first, errno })?;
        let mut taken = Vec::with_capacity(pages.len());
        let cipher = {
            let mut state = self.state.lock();
            for &(slot, _) in pages {
                match state.extents.take_page(&*self.source) {
                    Some(page) => taken.push(page),
                    None => {
                        drop(state);
                        self.give_up(&taken, None);
                        return Err(WriteError { slot, errno: Errno::NOSPC });
                    }
                }
            }
            Arc::clone(state.extents.cipher())
        };
        let mut tags = Vec::with_capacity(pages.len());
        for start in (0..pages.len()).step_by(BOUNCE_PAGES) {
            let end = pages.len().min(start + BOUNCE_PAGES);
            for (i, sealed) in (start..end).zip(bounce.iter_mut()) {
                let Taken { location, count, base } = taken[i];
                tags.push(cipher.seal(base + u64::from(count), location.0, pages[i].1, sealed));
            }
            // Neighbouring pages go out as one.
            let mut from = start;
            while from < end {
                let at = taken[from].location;
                let mut to = from + 1;
                while to < end && taken[to].location.0 == at.0 + (to - from) as u32 {
                    to += 1;
                }
                let bytes = bounce[from - start..to - start].as_flattened();
                if let Err(errno) = io::write_all(&*self.io, at.byte(), bytes) {
                    // A full file system is no fault of this place; anything else may be.
                    self.give_up(&taken, (errno != Errno::NOSPC).then(|| at.extent()));
                    return Err(WriteError { slot: pages[from].0, errno });
                }
                from = to;
            }
        }
        let mut vacated = Vec::new();
        {
            let mut state = self.state.lock();
            for ((&(slot, _), &Taken { location, count, .. }), tag) in pages.iter().zip(&taken).zip(tags) {
                if let Some(before) = state.places.set(slot, Place { location, count, tag }) {
                    vacated.extend(state.extents.free_page(before.location));
                }
            }
        }
        self.let_go(&vacated);
        Ok(())
    }

    /// Brings a batch of pages back. The slots keep them. No page is handed out that is not exactly what was written.
    pub fn read(&self, reqs: &mut [(Slot, &mut Page)]) -> Result<(), ReadError> {
        let mut found = Vec::with_capacity(reqs.len());
        {
            let state = self.state.lock();
            for (slot, _) in reqs.iter() {
                let place = state.places.get(*slot).ok_or(ReadError { slot: *slot, kind: ReadErrorKind::NoSuchSlot })?;
                let (cipher, base) = state.extents.sealed_with(place.location);
                found.push((place, base, Arc::clone(cipher)));
            }
        }
        // In the order of the file, so that neighbours become one read.
        let mut order: Vec<_> = reqs.iter_mut().zip(&found).collect();
        order.sort_unstable_by_key(|(_, (place, ..))| place.location);
        let straight =
            !self.io.wants_aligned() || order.iter().all(|((_, page), _)| page.as_ptr().addr().is_multiple_of(PAGE_SIZE));
        let read = if straight { self.read_straight(&mut order) } else { self.read_bounced(&mut order) };
        if let Err((at, errno)) = read {
            return Err(ReadError { slot: order[at].0.0, kind: ReadErrorKind::Io(errno) });
        }
        let mut bad = None;
        for ((slot, page), (place, base, cipher)) in order {
            if !cipher.open(*base + u64::from(place.count), place.location.0, &place.tag, page) {
                page.fill(0);
                bad = bad.or(Some(ReadError { slot: *slot, kind: ReadErrorKind::Authentication }));
            }
        }
        bad.map_or(Ok(()), Err)
    }

    /// Reads every page to where it belongs. On failure, tells which one failed.
    fn read_straight(&self, order: &mut [Wanted<'_, '_>]) -> Result<(), (usize, Errno)> {
        let locations: Vec<_> = order.iter().map(|(_, (place, ..))| place.location).collect();
        self.read_pages(0, &locations, order.iter_mut().map(|((_, page), _)| &mut **page))
    }

    /// Reads every page through the aligned buffer.
    fn read_bounced(&self, order: &mut [Wanted<'_, '_>]) -> Result<(), (usize, Errno)> {
        let mut bounce = self.bounce.lock();
        let bounce = bounce_pages(&mut bounce).map_err(|errno| (0, errno))?;
        for (part, order) in order.chunks_mut(BOUNCE_PAGES).enumerate() {
            let locations: Vec<_> = order.iter().map(|(_, (place, ..))| place.location).collect();
            self.read_pages(part * BOUNCE_PAGES, &locations, bounce[..order.len()].iter_mut())?;
            for (((_, page), _), read) in order.iter_mut().zip(bounce.iter()) {
                page.copy_from_slice(read);
            }
        }
        Ok(())
    }

    /// Reads pages at locations in ascending order, neighbours at once. `first` is the caller's number of the first one.
    fn read_pages<'p>(
        &self,
        first: usize,
        locations: &[Location],
        pages: impl Iterator<Item = &'p mut Page>,
    ) -> Result<(), (usize, Errno)> {
        let mut bufs: Vec<_> = pages.map(|page| IoSliceMut::new(&mut page[..])).collect();
        let mut rest = &mut bufs[..];
        let mut runs = Vec::new();
        let mut from = 0;
        for to in 1..=locations.len() {
            if to == locations.len() || locations[to].0 != locations[to - 1].0.wrapping_add(1) {
                let (bufs, later) = rest.split_at_mut(to - from);
                runs.push(Run { offset: locations[from].byte(), first: first + from, bufs });
                rest = later;
                from = to;
            }
        }
        self.io.read_runs(&mut runs)
    }

    /// Forgets what a slot holds; `false` if it held nothing.
    pub fn free(&self, slot: Slot) -> bool {
        let vacated = {
            let mut state = self.state.lock();
            let Some(place) = state.places.remove(slot) else { return false };
            state.extents.free_page(place.location)
        };
        self.let_go(vacated.as_slice());
        true
    }

    /// Whether a slot holds a page.
    #[must_use]
    pub fn contains(&self, slot: Slot) -> bool {
        self.state.lock().places.get(slot).is_some()
    }

    /// Before a fork: everything leased so far becomes shared and is neither written to nor punched from now on.
    ///
    /// Waits for a write that is under way; one that begins later goes to an extent of its own.
    pub fn freeze_all(&self) {
        let _writes = self.bounce.lock();
        let vacated = self.state.lock().extents.freeze();
        self.let_go(&vacated);
    }

    /// Calls `f` for every extent leased, shared ones included. `f` must not call back into the device.
    pub fn leased(&self, f: impl FnMut(Extent)) {
        self.state.lock().extents.leased(f);
    }

    /// In a forked child, before its first write: seals with another key from now on. `new_salt` must be one that no process
    /// sharing the file has used.
    pub fn rekey_salt(&self, new_salt: u64) {
        let cipher = Arc::new(Cipher::new(&self.key, new_salt));
        let vacated = self.state.lock().extents.seal_with(cipher);
        self.let_go(&vacated);
    }

    /// In a forked child, before its first I/O: abandons the io_uring of the parent without touching it. The next large batch
    /// makes a new one.
    pub fn forget_ring(&self) {
        self.io.forget_ring();
    }

    /// In a forked child whose descriptors are not the parent's: uses `fd` for the swap file. The old number is forgotten, not
    /// closed: in this process it may be another file.
    pub fn replace_fd(&self, fd: OwnedFd) {
        self.io.replace_fd(fd);
    }

    /// Gives every extent back that no other process shares, as the last act of a process. All slots are forgotten.
    pub fn clear(&self) {
        let vacated = {
            let mut state = self.state.lock();
            state.places = Places::default();
            state.extents.clear()
        };
        self.let_go(&vacated);
    }

    /// Waits until nobody is inside the device and keeps everybody out until the answer is dropped: for a fork, after
    /// [`Self::freeze_all`], so that the child's copy is complete and consistent.
    #[must_use]
    pub fn quiesce(&self) -> Quiesced<'_> {
        let bounce = self.bounce.lock();
        Quiesced { _state: self.state.lock(), _bounce: bounce }
    }

    /// Unlocks the device in a forked child that has no [`Quiesced`] to drop.
    ///
    /// # Safety
    /// The fork was made while one existed, the child has only this thread, and it holds no lock of the device.
    pub unsafe fn force_unlock(&self) {
        // SAFETY: whoever held the locks does not exist in this process, and had left the data consistent (caller).
        unsafe {
            self.state.force_unlock();
            self.bounce.force_unlock();
        }
    }

    /// All counters at one moment.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let state = self.state.lock();
        let (extents, shared_extents) = state.extents.count();
        Stats {
            pages: state.places.used(),
            extents,
            shared_extents,
            metadata_bytes: state.places.metadata_bytes() + state.extents.metadata_bytes(),
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
                vacated.extend(state.extents.free_page(page.location));
            }
        }
        self.let_go(&vacated);
    }

    /// Gives extents without live pages back to the file system and to the source. Without the lock: punching takes time, and
    /// nobody can lease them before the source has them back.
    fn let_go(&self, vacated: &[Vacated]) {
        for &Vacated { extent, shared } in vacated {
            let punched = !shared && self.io.punch(u64::from(extent.0) * EXTENT_BYTES, EXTENT_BYTES).is_ok();
            self.source.release(extent, punched);
        }
    }
}

/// Keeps everybody out of a device; see [`FileDevice::quiesce`].
pub struct Quiesced<'a> {
    _state: Guard<'a, State>,
    _bounce: Guard<'a, Option<Mapping>>,
}

/// A page to read: where to, and where from, with the base of its counter and its cipher.
type Wanted<'a, 'p> = (&'a mut (Slot, &'p mut Page), &'a (Place, u64, Arc<Cipher>));

/// The bounce buffer's pages; made at the first call.
fn bounce_pages(bounce: &mut Option<Mapping>) -> Result<&mut [Page], Errno> {
    let mapping = match bounce {
        Some(mapping) => mapping,
        None => bounce.insert(Mapping::reserve(BOUNCE_PAGES * PAGE_SIZE)?),
    };
    // SAFETY: the mapping is as long as this and page-aligned, its memory is initialized (anonymous), and the exclusive borrow
    // of its owner keeps others off.
    Ok(unsafe { core::slice::from_raw_parts_mut(mapping.as_ptr().cast::<Page>(), BOUNCE_PAGES) })
}

#[cfg(test)]
mod tests;
