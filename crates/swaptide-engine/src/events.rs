//! What the program did to its mappings, as the userfaultfd tells it.
//!
//! Rules
//! 1. Events are applied in the order in which they were read, before any fault read with them.
//! 2. After `Remove` (`MADV_DONTNEED`) the words of the range are empty although the kernel may not yet have dropped the pages: a page
//!    whose word is not `Present` is never taken out, so that old contents cannot survive in a slot.
//! 3. `Unmap` and `Remap` tell of what is done; the addresses may already be something else's, which is not managed before its adoption.

use swaptide_sys::page::{VirtAddr, VirtRange};

use crate::devices::Devices;
use crate::engine::{Engine, Mm};
use crate::ids::{PageNo, pages_of};
use crate::pagetable::PageState;
use swaptide_core::Slot as TableSlot;

/// Gives up every page of a range.
pub fn drop_pages(mm: &mut Mm, devices: &Devices, range: VirtRange) {
    let pages = pages_of(range);
    let end = PageNo(pages.end);
    let mut at = PageNo(pages.start);
    while let Some(page) = mm.table.next_used(at, end) {
        if page >= end {
            break;
        }
        if let PageState::Swapped(entry) = mm.table.set(page, PageState::Empty) {
            mm.release(devices, entry);
        }
        at = page.plus(1);
    }
}

impl Engine {
    /// `Remove`: the program gave up the contents of a range.
    pub fn removed(&self, range: VirtRange) {
        let mut mm = self.mm.lock();
        drop_pages(&mut mm, &self.devices, range);
        self.settle(&mm);
    }

    /// `Unmap`: the range is no longer mapped.
    pub fn unmapped(&self, range: VirtRange) {
        let mut mm = self.mm.lock();
        drop_pages(&mut mm, &self.devices, range);
        mm.regions.remove(range);
        self.settle(&mm);
    }

    /// `Remap`: the pages of `len` bytes at `from` are now at `to`.
    pub fn remapped(&self, from: VirtAddr, to: VirtAddr, len: usize) {
        let source = VirtRange { start: from, end: from.offset(len) };
        let target = VirtRange { start: to, end: to.offset(len) };
        let mut guard = self.mm.lock();
        let mm = &mut *guard;
        let managed = mm.regions.find(from).is_some();
        drop_pages(mm, &self.devices, target);
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
        self.settle(mm);
    }
}
