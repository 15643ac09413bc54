//! What the program did to its mappings, as the userfaultfd tells it.
//!
//! Rules
//! 1. Events are read and applied under the memory lock, in their order, before any fault read with them. The kernel refuses moves and copies on the
//!    program's userfaultfd while an event is unread. So whoever holds the lock and moves a page moves the one that the table means, never
//!    one of another mapping that has taken the address meanwhile.
//! 2. After `Remove` (`MADV_DONTNEED`) the words of the range are empty although the kernel may not yet have dropped the pages: a page
//!    whose word is not `Present` is never taken out, so that old contents cannot survive in a slot.
//! 3. `Unmap` and `Remap` tell of what is done; the addresses may already be something else's, which is not managed before its adoption.

use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::uffd::Event;

use crate::engine::{Engine, Mm};
use crate::ids::{PageNo, pages_of};
use crate::pagetable::PageState;
use swaptide_core::Slot as TableSlot;

/// Gives up every page of a range.
pub fn drop_pages(mm: &mut Mm, engine: &Engine, range: VirtRange) {
    let pages = pages_of(range);
    let end = PageNo(pages.end);
    let mut at = PageNo(pages.start);
    while let Some(page) = mm.table.next_used(at, end) {
        if page >= end {
            break;
        }
        match mm.table.set(page, PageState::Empty) {
            PageState::Swapped(entry) => engine.release(mm, entry),
            PageState::Kept(entry) => engine.devices.drop_swapped(entry),
            _ => {}
        }
        at = page.plus(1);
    }
}

impl Engine {
    /// Applies a change of mappings.
    pub fn apply(&self, mm: &mut Mm, event: Event) {
        match event {
            Event::Remove(range) => drop_pages(mm, self, range),
            Event::Unmap(range) => {
                drop_pages(mm, self, range);
                mm.regions.remove(range);
            }
            Event::Remap { from, to, len } => self.remapped(mm, from, to, len),
            Event::Fault { .. } | Event::Fork { .. } => {}
            Event::Unknown(kind) => crate::fatal(&format!("the userfaultfd sent a message of the unknown kind {kind}")),
        }
    }

    /// `Remap`: the pages of `len` bytes at `from` are now at `to`.
    fn remapped(&self, mm: &mut Mm, from: VirtAddr, to: VirtAddr, len: usize) {
        let source = VirtRange { start: from, end: from.offset(len) };
        let target = VirtRange { start: to, end: to.offset(len) };
        let managed = mm.regions.find(from).is_some();
        drop_pages(mm, self, target);
        let pages = pages_of(source);
        let end = PageNo(pages.end);
        let mut at = PageNo(pages.start);
        while let Some(page) = mm.table.next_used(at, end) {
            if page >= end {
                break;
            }
            let moved = PageNo(page.0 - pages.start + PageNo::of(to).0);
            match mm.table.set(page, PageState::Empty) {
                PageState::Present => mm.mark_present(moved),
                PageState::Swapped(entry) => {
                    mm.table.set(moved, PageState::Swapped(entry));
                    match self.devices.slots(entry.ty()).lookup(entry.offset()) {
                        TableSlot::Folio(folio) => {
                            let frame = mm.frame_of(entry, folio);
                            mm.owner[frame.0 as usize] = moved;
                        }
                        _ => mm.queues.pooled(&mut mm.table, moved.chunk()),
                    }
                }
                PageState::Kept(entry) => {
                    mm.mark_kept(moved, entry);
                }
                state => {
                    mm.table.set(moved, state);
                }
            }
            at = page.plus(1);
        }
        mm.regions.remove(source);
        if managed {
            mm.regions.insert(target);
        }
    }
}
