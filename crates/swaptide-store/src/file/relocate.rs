//! Moving live pages to other extents: cleaning, and extents that are to be left.
//!
//! Owns nothing. Cleaning runs under the writers' lock, in their buffer: a write waits for it. What
//! is to be left is read in the movers' buffer, which may take as long as a server is given to
//! answer, and only written under the writers' lock. Rules and locks are those of the device
//! ([`super`]).

use std::sync::Arc;

use swaptide_sys::Errno;

use super::buffer::Buffer;
use super::extent_store::{ExtentStore, Unwritten};
use super::extents::{Purpose, RESERVE_BLOCKS, Taken, WriteCursor};
use super::places::SlotPlace;
use super::reading::{Wanted, lay_out};
use super::{Extent, PAGE_BLOCKS, WRITE_BLOCKS};
use crate::PAGE_SIZE;

/// The progress of leaving extents.
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
        /// True if room is what is missing.
        full: bool,
    },
}

/// The result of moving pages.
struct Relocated {
    /// True if blocks became free.
    gained: bool,
    /// There was no room for more.
    full: bool,
}

/// Writes opened pages, which lie in the blocks, to new places: [`move_together`] with a buffer.
pub(super) type WritePages<'w> = dyn FnMut(&[&Wanted], Purpose, &[u8]) -> Option<bool> + 'w;

/// Blocks of the buffer that pages are read into.
pub(super) const MOVE_BLOCKS: usize = WRITE_BLOCKS + PAGE_BLOCKS;

/// Moves the live pages of the extents that gain most by it together. `false` if no block
/// became free.
pub(super) fn clean(store: &ExtentStore, bounce: &mut Buffer) -> bool {
    let victims = store.state.lock().extents.extents_to_clean(|extent| store.can_move(extent));
    let Ok(buffer) = bounce.blocks(WRITE_BLOCKS + MOVE_BLOCKS) else { return false };
    let (out, buffer) = buffer.split_at_mut(WRITE_BLOCKS * PAGE_SIZE);
    let mut write = |pages: &[&Wanted], purpose, blocks: &[u8]| {
        move_together(store, pages, purpose, blocks, &mut *out)
    };
    relocate(store, &victims, Purpose::Clean, buffer, &mut write).gained
}

/// See [`super::FileDevice::leave`]. `moving`: the movers' buffer.
pub(super) fn leave(
    store: &ExtentStore,
    moving: &mut Buffer,
    write: &mut WritePages<'_>,
) -> Leaving {
    let (some, before) = {
        let state = store.state.lock();
        (state.extents.leaving(|extent| store.can_move(extent)), state.extents.leaving_count())
    };
    if before == 0 {
        return Leaving::Done;
    }
    let Ok(buffer) = moving.blocks(MOVE_BLOCKS) else {
        return Leaving::Stuck { left: before, full: false };
    };
    let moved = relocate(store, &some, Purpose::WriteAnyway, buffer, write);
    match store.state.lock().extents.leaving_count() {
        0 => Leaving::Done,
        left if left < before => Leaving::Left(left),
        left => Leaving::Stuck { left, full: moved.full },
    }
}

/// Moves the live pages of some extents to others, by way of `buffer`.
fn relocate(
    store: &ExtentStore,
    from: &[Extent],
    purpose: Purpose,
    buffer: &mut [u8],
    write: &mut WritePages<'_>,
) -> Relocated {
    let mut wanted = pages_of(store, from);
    wanted.sort_unstable_by_key(|w| w.place.span);
    let mut result = Relocated { gained: false, full: false };
    let (spare, blocks) = buffer.split_at_mut(PAGE_BLOCKS * PAGE_SIZE);
    let mut rest = &mut wanted[..];
    while !rest.is_empty() {
        // Few enough for the blocks kept for this.
        let mut sum = 0;
        let few = rest.iter().position(|w| {
            sum += w.place.span.len();
            sum > (RESERVE_BLOCKS - 1) * PAGE_SIZE
        });
        let few = few.unwrap_or(rest.len());
        let (n, mut runs) = lay_out(&mut rest[..few], blocks);
        let (some, later) = rest.split_at_mut(n);
        rest = later;
        // A page that cannot be read is left where it is: its reader will be told.
        if let Err((block, errno)) = store.io.read_runs_briefly(&mut runs) {
            let bad = some.iter().find(|w| w.uses(block)).map(|w| w.place.span.extent());
            if let Some(extent) = bad {
                store.state.lock().extents.distrust(extent);
                if errno == Errno::TIMEDOUT {
                    // What else lies there takes as long.
                    store.rest_moves(extent);
                    let is_there = |w: &Wanted| {
                        w.place.span.extent() == extent || !store.can_move(w.place.span.extent())
                    };
                    let skipped = rest.iter().take_while(|w| is_there(w)).count();
                    rest = &mut rest[skipped..];
                }
            }
            continue;
        }
        let mut opened = Vec::with_capacity(n);
        for w in &*some {
            let SlotPlace { span, tag, .. } = w.place;
            let bytes = &mut blocks[w.at..w.at + span.len()];
            let mut opens = w.cipher.open(w.form, w.counter, span.name(), &tag, bytes);
            // What was freed meanwhile says nothing of the copy that it was read from.
            let is_current = || store.state.lock().places.get(w.slot) == Some(w.place);
            if !opens
                && is_current()
                && let Some(copy) = w.read_copy(&*store.io, spare)
                && w.cipher.open(w.form, w.counter, span.name(), &tag, copy)
            {
                bytes.copy_from_slice(copy);
                opens = true;
            }
            if opens {
                opened.push(w);
            } else if store.state.lock().places.get(w.slot) == Some(w.place) {
                store.state.lock().extents.distrust(span.extent());
            }
        }
        match write(&opened, purpose, blocks) {
            Some(freed) => result.gained |= freed,
            None => {
                result.full = true;
                break;
            }
        }
    }
    result
}

/// Returns the pages in some extents.
fn pages_of(store: &ExtentStore, victims: &[Extent]) -> Vec<Wanted> {
    let mut found = Vec::new();
    for cluster in 0.. {
        // The lock is dropped after every cluster, so that faults get in between.
        let state = store.state.lock();
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

/// Writes opened pages to new places; those that were not freed meanwhile are there then. Tells
/// whether blocks became free, or nothing if there is no room or the file does not take them.
pub(super) fn move_together(
    store: &ExtentStore,
    pages: &[&Wanted],
    purpose: Purpose,
    blocks: &[u8],
    out: &mut [u8],
) -> Option<bool> {
    let mut taken = Vec::with_capacity(pages.len());
    let (cipher, before) = {
        let mut state = store.state.lock();
        let mut cursor = WriteCursor::default();
        let before = state.extents.free_blocks();
        for w in pages {
            match state.extents.take(w.place.span.len(), &mut cursor, &*store.source, purpose) {
                Ok(place) => taken.push(place),
                Err(_) => {
                    drop(state);
                    store.give_up(&taken, None);
                    return None;
                }
            }
        }
        (Arc::clone(state.extents.cipher()), before)
    };
    let mut tags = Vec::with_capacity(pages.len());
    let put = store.put(out, &taken, |i, at, out| {
        let bytes = &blocks[pages[i].at..][..out.len()];
        tags.push(cipher.seal(at.form, at.base + u64::from(at.count), at.span.name(), bytes, out));
    });
    if let Err(Unwritten { extent, errno, .. }) = put {
        store.give_up(&taken, (errno != Errno::NOSPC).then_some(extent));
        return None;
    }
    let mut vacated = Vec::new();
    let gained = {
        let mut state = store.state.lock();
        for ((w, &Taken { span, count, .. }), tag) in pages.iter().zip(&taken).zip(tags) {
            let unused = if state.places.get(w.slot) == Some(w.place) {
                state.places.set(w.slot, SlotPlace { span, count, tag });
                w.place.span
            } else {
                span
            };
            vacated.extend(state.extents.free(unused));
        }
        !vacated.is_empty() || state.extents.free_blocks() > before
    };
    store.release(&vacated);
    Some(gained)
}
