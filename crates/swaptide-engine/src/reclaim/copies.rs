//! Copies that swap areas keep of pages that the program has again.
//!
//! While there is room they cost nothing and spare a write when the page goes out unchanged. They
//! are the first to go when room is short: worker 0 drops some when the last quarter of the areas
//! begins, and a write that finds no room drops some and is done again.
//!
//! Owns nothing. Locks: the memory lock, for a piece of work.

use swaptide_core::{FolioId, SwapEntry, SwapType};
use swaptide_store::Slot;
use swaptide_store::codec::Packed;
use swaptide_store::file::WriteError;
use swaptide_sys::Errno;

use crate::backing::devices::AREA;
use crate::engine::{Engine, Mm};
use crate::mm::page_table::PageState;
use crate::mm::types::{ChunkNo, PAGES_PER_CHUNK};

/// Copies dropped under one hold of the memory lock, and chunks looked at for them.
const COPIES_PER_HOLD: usize = 256;
/// The number of times that a write without room is retried after copies are dropped: what they
/// free may be room for no write, as where a fork shares their extents.
const MAX_TRIES: usize = 4;
/// Copies dropped for a write that finds no room: what is free is free in pieces, so more than it
/// needs.
const COPIES_PER_WRITE: usize = 2048;

/// Drops the copies of a chunk's pages that slots of a type hold. Gives how many.
pub(super) fn drop_of_chunk(engine: &Engine, mm: &mut Mm, chunk: ChunkNo, ty: SwapType) -> usize {
    let mut dropped = 0;
    for page in (0..PAGES_PER_CHUNK).map(|k| chunk.first().plus(k)) {
        if let PageState::PresentClean(entry) = mm.table.get(page)
            && entry.ty() == ty
        {
            mm.table.set(page, PageState::Present);
            engine.devices.drop_swapped(entry);
            dropped += 1;
        }
    }
    dropped
}

/// Drops the oldest copies, about `want` pages. Gives how many. The memory lock must be free.
fn drop_oldest(engine: &Engine, want: usize) -> usize {
    let mut dropped = 0;
    while dropped < want
        && let Some(some) = drop_some(engine, (want - dropped).min(COPIES_PER_HOLD))
    {
        dropped += some;
    }
    dropped
}

/// Drops up to about `want` copies. `None` when there are none.
fn drop_some(engine: &Engine, want: usize) -> Option<usize> {
    let mut guard = engine.mm.lock();
    let mm = &mut *guard;
    let mut dropped = 0;
    for _ in 0..COPIES_PER_HOLD {
        let Some(chunk) = mm.queues.next_clean_on_areas(&mut mm.table) else {
            return (dropped > 0).then_some(dropped);
        };
        dropped += drop_of_chunk(engine, mm, chunk, AREA);
        if dropped >= want {
            break;
        }
    }
    Some(dropped)
}

/// Drops a few copies if the areas are nearly full. Called at intervals.
pub(crate) fn drop_where_scarce(engine: &Engine) {
    if engine.devices.area_is_scarce() {
        drop_some(engine, COPIES_PER_HOLD);
    }
}

/// Writes pages to the swap areas; where those have no room, in place of copies. The memory lock
/// must be free.
pub(crate) fn write(engine: &Engine, pages: &[(Slot, Packed<'_>)]) -> Result<(), WriteError> {
    in_place_of_copies(
        || engine.devices.areas.device.write(pages),
        || drop_oldest(engine, COPIES_PER_WRITE),
    )
}

/// A write that is done again while it finds no room and copies are dropped for it.
fn in_place_of_copies(
    write: impl Fn() -> Result<(), WriteError>,
    drop_copies: impl Fn() -> usize,
) -> Result<(), WriteError> {
    for _ in 1..MAX_TRIES {
        match write() {
            Err(error) if error.errno == Errno::NOSPC && drop_copies() > 0 => {}
            result => return result,
        }
    }
    write()
}

/// A slot for one page on a swap area, in place of copies if there is none else. The memory lock
/// must be free.
pub(crate) fn alloc_slot(engine: &Engine, folio: FolioId) -> Option<SwapEntry> {
    loop {
        let entry = engine.devices.alloc_area(folio);
        if entry.is_some() || drop_oldest(engine, COPIES_PER_WRITE) == 0 {
            return entry;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A write that fails with `errno` before its try `room_at`. Gives whether it went well, the
    /// tries, and the copies dropped.
    fn tries(errno: Errno, room_at: u32, copies: usize) -> (bool, u32, usize) {
        let (tried, dropped) = (Cell::new(0), Cell::new(0));
        let write = || {
            tried.set(tried.get() + 1);
            assert!(tried.get() < 100, "it never ends");
            let slot = Slot(7);
            if tried.get() < room_at { Err(WriteError { slot, errno }) } else { Ok(()) }
        };
        let drop_copies = || {
            let some = (copies - dropped.get()).min(COPIES_PER_WRITE);
            dropped.set(dropped.get() + some);
            some
        };
        let result = in_place_of_copies(write, drop_copies);
        (result.is_ok(), tried.get(), dropped.get())
    }

    #[test]
    fn a_write_without_room_drops_copies_a_few_times() {
        assert_eq!(tries(Errno::NOSPC, 1, 1 << 20), (true, 1, 0), "there is room");
        assert_eq!(tries(Errno::NOSPC, 3, 1 << 20), (true, 3, 2 * COPIES_PER_WRITE));
        assert_eq!(tries(Errno::NOSPC, 3, 10), (false, 2, 10), "there are no more copies");
        assert_eq!(tries(Errno::IO, 3, 1 << 20), (false, 1, 0), "copies do not help");
        // What they free is room for no write.
        assert_eq!(tries(Errno::NOSPC, u32::MAX, 1 << 20), (false, 4, 3 * COPIES_PER_WRITE));
    }
}
