//! Reading ahead on a rotational device: a page brings what was written next to it.
//!
//! Where every read begins with a seek, the page asked for costs as much as all that lies around
//! it, and what went out together is often wanted together, wherever it belongs. So a page that is
//! read alone brings an aligned block of slots along, as many as the last ones proved worth it.
//! They are held here, in the order they came; none is given out before it is asked for, so each
//! one that is asked for is a *hit*, and known. (docs/linux-swap.md, "Readahead", has the rule.
//! Where an address's neighbours are wanted is another matter, and the engine's.)
//!
//! Invariants
//! 1. A page is handed out only where its slot has the very stamp that it had before it was read:
//!    no other page ever has that, so it was the slot's all the time. A slot that was written or
//!    freed meanwhile, or moved by cleaning, is read again.
//! 2. A page is held once and handed out once. What is held already and lies in the middle of a
//!    larger block is read with it, for one sweep is what a rotational disk is good at; its older
//!    copy is forgotten.
//! 3. What is read ahead causes no error: when a read fails, the pages asked for are read
//!    alone.
//! 4. One read is one sweep: what lies further away on the device than the block would be long is
//!    left where it is.
//! 5. Two blocks of the largest size asked for are held at most, or 64 pages.
//!
//! Locks: none of its own; it belongs to one reader.

use super::buffer::Buffer;
use super::{FileDevice, ReadError, Stamp};
use crate::{CLUSTER_SLOTS, PAGE_SIZE, Page, Slot};

/// Pages around one that are read at most.
pub const MAX_BLOCK_PAGES: usize = 128;
/// Pages that are held at most: two of the largest blocks.
const MAX_HELD_PAGES: usize = 2 * MAX_BLOCK_PAGES;
/// Pages there is always room for: of several small blocks.
const MIN_HELD_PAGES: usize = 64;
/// Hits that the first window counts on, and the most that count.
const INITIAL_HITS: u32 = 4;
const MAX_HITS: u32 = 63;

/// The result of [`ReadAhead::read`].
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Ahead {
    /// Pages that had been read ahead, and were asked for now.
    pub hits: usize,
    /// Pages that were read and not asked for.
    pub ahead: usize,
}

/// The number of pages around one that are worth reading.
struct Window {
    /// Pages read ahead that were asked for since the last block.
    hits: u32,
    /// Pages of the last block.
    last: usize,
    /// The slot it was for.
    at: Slot,
}

impl Window {
    const fn new() -> Window {
        Window { hits: INITIAL_HITS, last: 0, at: Slot(u32::MAX) }
    }

    /// Pages of the block for a slot that was not held: a power of two, at most `most`.
    fn next(&mut self, slot: Slot, most: usize) -> usize {
        let is_adjacent = slot.0.abs_diff(self.at.0) == 1;
        let pages = match self.hits {
            0 => 1 + usize::from(is_adjacent),
            hits => (hits as usize + 2).next_power_of_two().max(4),
        };
        let most = 1 << most.clamp(1, MAX_BLOCK_PAGES).ilog2();
        let pages = pages.max(self.last / 2).min(most);
        *self = Window { hits: 0, last: pages, at: slot };
        pages
    }
}

/// Pages that came along with others and wait to be asked for.
pub struct ReadAhead {
    buffer: Buffer,
    /// The content of each page of the buffer.
    held: [Option<(Slot, Stamp)>; MAX_HELD_PAGES],
    /// The page of the buffer that is used next.
    next: usize,
    window: Window,
}

impl Default for ReadAhead {
    fn default() -> Self {
        ReadAhead {
            buffer: Buffer::default(),
            held: [None; MAX_HELD_PAGES],
            next: 0,
            window: Window::new(),
        }
    }
}

impl ReadAhead {
    /// Brings a batch of pages back, as [`FileDevice::read`] does. A page that is alone in it and
    /// lies on a rotational device may bring up to `most` pages (1: none) that lie next to it
    /// there.
    ///
    /// # Errors
    /// As of [`FileDevice::read`].
    pub fn read(
        &mut self,
        device: &FileDevice,
        reqs: &mut [(Slot, &mut Page)],
        most: usize,
    ) -> Result<Ahead, ReadError> {
        let mut came = Ahead::default();
        let is_alone = reqs.len() == 1;
        if self.buffer.is_none() && (!is_alone || most <= 1) {
            return device.read(reqs).map(|()| came);
        }
        let mut rest: Vec<(Slot, &mut Page)> = Vec::with_capacity(reqs.len());
        for (slot, page) in reqs.iter_mut() {
            if self.take(device, *slot, page) {
                came.hits += 1;
                self.window.hits = (self.window.hits + 1).min(MAX_HITS);
            } else {
                rest.push((*slot, page));
            }
        }
        let [(slot, page)] = &mut rest[..] else {
            return if rest.is_empty() { Ok(came) } else { device.read(&mut rest).map(|()| came) };
        };
        if is_alone && most > 1 && device.is_rotational(*slot) {
            let pages = self.window.next(*slot, most);
            let others = neighbours(device, *slot, pages);
            if !others.is_empty()
                && self.read_with(device, (*slot, page), &others, (2 * most).max(MIN_HELD_PAGES))
            {
                came.ahead = others.len();
                return Ok(came);
            }
        }
        device.read(&mut rest).map(|()| came)
    }

    /// Forgets what is held, and gives its memory back.
    pub fn clear(&mut self) {
        if !self.buffer.is_none() {
            self.buffer = Buffer::default();
            self.held = [None; MAX_HELD_PAGES];
            self.next = 0;
        }
    }

    /// Hands a page out, if it is held.
    fn take(&mut self, device: &FileDevice, slot: Slot, page: &mut Page) -> bool {
        let Some(stamp) = device.stamp(slot) else { return false };
        let Some(at) = self.held.iter().position(|held| *held == Some((slot, stamp))) else {
            return false;
        };
        self.held[at] = None;
        let Ok(buffer) = self.buffer.blocks(MAX_HELD_PAGES) else { return false };
        page.copy_from_slice(&buffer[at * PAGE_SIZE..][..PAGE_SIZE]);
        true
    }

    /// Reads a page, and others with it that are held from then on, among at most `room`. False
    /// when that failed.
    fn read_with(
        &mut self,
        device: &FileDevice,
        asked: (Slot, &mut Page),
        others: &[(Slot, Stamp)],
        room: usize,
    ) -> bool {
        if self.next + others.len() > room.min(MAX_HELD_PAGES) {
            self.next = 0;
        }
        let places = self.next..self.next + others.len();
        self.held[places.clone()].fill(None);
        let Ok(buffer) = self.buffer.blocks(MAX_HELD_PAGES) else { return false };
        let (pages, _) = buffer[places.start * PAGE_SIZE..].as_chunks_mut::<PAGE_SIZE>();
        let mut reqs = vec![asked];
        reqs.extend(others.iter().zip(pages).map(|((slot, _), page)| (*slot, page)));
        if device.read(&mut reqs).is_err() {
            return false;
        }
        for held in &mut self.held {
            *held = held.filter(|held| !others.contains(held));
        }
        for (at, read) in places.clone().zip(others) {
            self.held[at] = Some(*read);
        }
        self.next = places.end;
        true
    }
}

/// The slots of the aligned block of `pages` around a slot, without itself, that lie next to it on
/// the device; with what they hold now.
fn neighbours(device: &FileDevice, slot: Slot, pages: usize) -> Vec<(Slot, Stamp)> {
    let pages = pages.min(CLUSTER_SLOTS) as u32;
    let state = device.store.state.lock();
    let Some(place) = state.places.get(slot) else { return Vec::new() };
    let first = slot.0 / pages * pages;
    (first..first + pages)
        .map(Slot)
        .filter(|other| *other != slot)
        .filter_map(|other| Some((other, state.places.get(other)?)))
        .filter(|(_, other)| {
            let is_near = other.span.block().abs_diff(place.span.block()) < pages;
            is_near && other.span.extent() == place.span.extent()
        })
        .map(|(other, place)| (other, Stamp(place)))
        .collect()
}
