//! The file, the extents leased of it, and what lies in them.
//!
//! Owns the state of the slots and of the extents. Writes sealed objects to the file, and gives
//! extents without live pages back. Rules and locks are those of the device ([`super`]).

use core::ops::Range;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::Arc;

use swaptide_sys::Errno;
use swaptide_sys::lock::Lock;
use swaptide_sys::thread::now;

use super::cipher::Cipher;
use super::digests::Digests;
use super::extents::{Extents, FreedExtent, Taken};
use super::io::{self, BlockIo};
use super::places::SlotPlaces;
use super::{EXTENT_BYTES, Extent, ExtentSource, MAX_AREAS, WRITE_BLOCKS};
use crate::{PAGE_SIZE, Slot};

/// A server that has not taken note of an empty extent for so long does not answer; then none is
/// told for a while.
const TRIM_TIMEOUT: Duration = Duration::from_secs(1);
const TRIM_BACKOFF: Duration = Duration::from_secs(60);
/// The time without moves off a server that has not answered a read.
const MOVE_BACKOFF: Duration = Duration::from_secs(10);

/// The leased extents, and which slot has which place in them.
pub(super) struct ExtentStore {
    pub(super) io: Box<dyn BlockIo>,
    pub(super) source: Box<dyn ExtentSource + Send + Sync>,
    pub(super) state: Lock<FileState>,
    /// Before this moment no server is told of extents that emptied: one has just not answered. In
    /// nanoseconds of the monotonic clock.
    trims_rest: AtomicU64,
    /// For each server: before this moment nothing is moved off it: it has just not answered a
    /// read. In nanoseconds of the monotonic clock.
    moves_rest: [AtomicU64; MAX_AREAS],
    /// Extents of servers without live pages: a server is not told of them by the thread that
    /// emptied them.
    pub(super) emptied: Lock<Vec<FreedExtent>>,
    /// The same of extents on this machine, the oldest first. At most as many as were leased, of
    /// some bytes each.
    pub(super) to_release: Lock<VecDeque<FreedExtent>>,
    /// The number of those not released yet.
    to_release_count: AtomicUsize,
    /// Held by the thread that gives one of them back.
    release_lock: Lock<()>,
}

pub(super) struct FileState {
    pub(super) places: SlotPlaces,
    /// Of pages that were read and neither freed nor written again since.
    pub(super) digests: Digests,
    pub(super) extents: Extents,
}

/// The pages that could not be written.
pub(super) struct Unwritten {
    /// The first object of the write that failed.
    pub(super) object: usize,
    pub(super) extent: Extent,
    pub(super) errno: Errno,
}

impl ExtentStore {
    pub(super) fn new(
        io: Box<dyn BlockIo>,
        source: Box<dyn ExtentSource + Send + Sync>,
        cipher: Cipher,
    ) -> ExtentStore {
        let extents = Extents::new(Arc::new(cipher));
        let state =
            FileState { places: SlotPlaces::default(), digests: Digests::default(), extents };
        ExtentStore {
            io,
            source,
            state: Lock::new(state),
            trims_rest: AtomicU64::new(0),
            moves_rest: [const { AtomicU64::new(0) }; MAX_AREAS],
            emptied: Lock::default(),
            to_release: Lock::default(),
            to_release_count: AtomicUsize::new(0),
            release_lock: Lock::default(),
        }
    }

    /// Seals objects into `out` and writes them to their places, what lies together at once. `seal`
    /// is given an object's number, its place and where to.
    pub(super) fn put(
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

    /// See [`super::FileDevice::free`].
    pub(super) fn free(&self, slot: Slot) -> bool {
        let vacated = {
            let mut state = self.state.lock();
            let Some(place) = state.places.remove(slot) else { return false };
            state.digests.remove(slot);
            state.extents.free(place.span)
        };
        self.release(vacated.as_slice());
        true
    }

    /// Forgets all slots, and gives every extent back.
    pub(super) fn clear(&self) {
        let vacated = {
            let mut state = self.state.lock();
            state.places = SlotPlaces::default();
            state.digests = Digests::default();
            state.extents.clear()
        };
        self.release(&vacated);
        while self.release_one_or_wait() {}
        self.trim_remote();
    }

    /// Undoes the reservations of a write that failed.
    pub(super) fn give_up(&self, taken: &[Taken], suspect: Option<Extent>) {
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
        self.release(&vacated);
    }

    /// Gives extents without live pages back to the file system and to the source. Without the
    /// state's lock: punching takes time, and no process can lease them before the source has them
    /// back. Those of servers are kept for [`Self::trim_remote`], and what the source wants so
    /// for [`Self::release_one_extent`]: the caller may be the thread that serves faults.
    pub(super) fn release(&self, vacated: &[FreedExtent]) {
        for &freed in vacated {
            if self.source.is_on_server(freed.extent) {
                self.emptied.lock().push(freed);
            } else if self.source.defers_release(freed.extent) {
                self.to_release_count.fetch_add(1, Relaxed);
                self.to_release.lock().push_back(freed);
            } else {
                self.release_extent(freed);
            }
        }
    }

    fn release_extent(&self, FreedExtent { extent, shared }: FreedExtent) {
        // Of those that are shared, the last process that had it.
        if !shared || self.source.release_shared(extent) {
            self.source.release(extent, self.punch(extent));
        }
    }

    /// See [`super::FileDevice::release_one_extent`].
    pub(super) fn release_one_extent(&self) -> bool {
        if self.to_release_count.load(Relaxed) == 0 {
            return false;
        }
        let Some(_only) = self.release_lock.try_lock() else { return false };
        self.release_oldest()
    }

    /// Gives one of the extents back that wait for it, or waits for a thread that does. False when
    /// none waits.
    pub(super) fn release_one_or_wait(&self) -> bool {
        if self.to_release_count.load(Relaxed) == 0 {
            return false;
        }
        let _only = self.release_lock.lock();
        // Where none is left, the last one has just been given back.
        self.release_oldest();
        true
    }

    fn release_oldest(&self) -> bool {
        let Some(oldest) = self.to_release.lock().pop_front() else { return false };
        self.release_extent(oldest);
        self.to_release_count.fetch_sub(1, Relaxed);
        true
    }

    /// Forgets, in a forked child, what its parent is to give back.
    pub(super) fn forget_emptied(&self) {
        self.emptied.lock().clear();
        self.to_release.lock().clear();
        self.to_release_count.store(0, Relaxed);
    }

    fn punch(&self, extent: Extent) -> bool {
        !self.source.is_in_doubt(extent)
            && self.io.punch(u64::from(extent.0) * EXTENT_BYTES, EXTENT_BYTES).is_ok()
    }

    /// See [`super::FileDevice::trim_remote`].
    pub(super) fn trim_remote(&self) {
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

    /// False for what lies on a server that has not answered lately.
    pub(super) fn can_move(&self, extent: Extent) -> bool {
        let rest =
            self.source.server_of(extent).and_then(|id| self.moves_rest.get(usize::from(id.0)));
        rest.is_none_or(|until| now().0 >= until.load(Relaxed))
    }

    /// Notes that the server of an extent has not answered a read.
    pub(super) fn rest_moves(&self, extent: Extent) {
        let until = now().0.saturating_add(MOVE_BACKOFF.as_nanos() as u64);
        let server = self.source.server_of(extent);
        if let Some(rest) = server.and_then(|id| self.moves_rest.get(usize::from(id.0))) {
            rest.store(until, Relaxed);
        }
    }

    /// Unlocks it in a forked child.
    ///
    /// # Safety
    /// As of [`super::FileDevice::force_unlock`].
    pub(super) unsafe fn force_unlock(&self) {
        // SAFETY: the holder of the locks does not exist in this process, and had left the data
        // consistent (caller).
        unsafe {
            self.state.force_unlock();
            self.emptied.force_unlock();
            self.to_release.force_unlock();
            self.release_lock.force_unlock();
            self.io.force_unlock();
        }
    }
}
