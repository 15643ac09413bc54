//! What the program did to its mappings, as the userfaultfd tells it.
//!
//! Rules
//! 1. Events are read and applied under the memory lock, in their order, before any fault read with
//!    them. The kernel refuses moves and copies on the program's userfaultfd while an event is
//!    unread. So a thread that holds the lock and moves a page moves the one that the table means,
//!    never one of another mapping that has taken the address meanwhile.
//! 2. After `Remove` (`MADV_DONTNEED`) the words of the range are empty although the kernel may not
//!    yet have dropped the pages: a page whose word is not `Present` is never taken out, so that
//!    old contents cannot survive in a slot.
//! 3. `Unmap` and `Remap` tell of what is done; the addresses may already be something else's,
//!    which is not managed before its adoption or another `Remap` to that place.
//! 4. Of two threads' changes the second may be told of first: one gives an address up and is
//!    interrupted before it says so, the other moves a mapping there. So a `Remap` to where the
//!    table still knows something is *late*: it waits until the event that takes that away was
//!    read. The kernel refuses moves and copies meanwhile, for that event is on its way; the
//!    handler reads on before it does anything else
//!    ([`crate::events::reader::UffdReader::read_late`]).
//! 5. A thread that moves a mapping says so first, and then that it has left the old place: the
//!    latter is *owed*. Another thread may have moved something there in between, and the `Unmap`
//!    that is read after that does not mean it. So a `Remap` to a place that is owed is late until
//!    the `Unmap` was read, or until no event is on its way: then none is owed. The move left its
//!    old place mapped (`MREMAP_DONTUNMAP`), which stands in `Mm::armed` from then on. While the
//!    move itself is late, its `Unmap` waits with it.
//! 6. Two changes of one thread, read before an older one of another thread, could not be told from
//!    that one's. So in a program with several threads one that moves a mapping continues only when
//!    its change was applied ([`crate::requests::HandlerRequests::fence`]). One that grows a
//!    mapping in place waits as well, until the new part is listed: nothing can be moved to where
//!    it was before it is known that it was there. What is armed, or about to be, and not yet
//!    listed counts as being there, too.

use std::sync::atomic::Ordering::Relaxed;

use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::uffd::Event;

use crate::backing::devices::filler_of;
use crate::engine::{Engine, Mm};
use crate::mm::dontfork;
use crate::mm::page_table::PageState;
use crate::mm::types::{MANAGED_END, PageNo, pages_of};
use crate::mm::vma_change::{VmaChange, overlap};
use crate::requests::fork_control::NO_FORK;
use swaptide_core::SlotContent as TableSlot;

/// Changes that are remembered for the child of a fork that is read later. More are applied only
/// while threads change mappings without pause.
const MAX_RECENT_CHANGES: usize = 4096;

/// Moves whose old place no event has said to be left. More only pile up where moves leave their
/// old places mapped.
const MAX_PENDING_UNMAPS: usize = 256;

/// Gives up every page of a range.
pub(crate) fn drop_pages(mm: &mut Mm, engine: &Engine, range: VirtRange) {
    let pages = pages_of(range);
    let end = PageNo(pages.end);
    let mut at = PageNo(pages.start);
    while let Some(page) = mm.table.next_used(at, end) {
        if page >= end {
            break;
        }
        match mm.table.set(page, PageState::Empty) {
            PageState::Swapped(entry) => engine.release(mm, entry),
            PageState::PresentClean(entry) => engine.devices.drop_swapped(entry),
            _ => {}
        }
        at = page.plus(1);
    }
}

fn remap_target(event: &Event) -> Option<VirtRange> {
    match event {
        Event::Remap { to, len, .. } => Some(VirtRange { start: *to, end: to.offset(*len) }),
        _ => None,
    }
}

fn hull(a: VirtRange, b: VirtRange) -> VirtRange {
    VirtRange { start: a.start.min(b.start), end: a.end.max(b.end) }
}

/// Keeps a change of the table for the child of a fork that is read later and may be older.
pub fn remember(mm: &mut Mm, change: VmaChange) {
    if mm.changes.recent.len() < MAX_RECENT_CHANGES {
        mm.changes.recent.push(change);
    }
}

/// True when something of a range is managed or has a word.
fn in_use(mm: &Mm, range: VirtRange) -> bool {
    if mm.regions.overlaps(range) || mm.armed.overlaps(range) {
        return true;
    }
    let pages = pages_of(range);
    let (mut at, end) = (PageNo(pages.start), PageNo(pages.end));
    while let Some(page) = mm.table.next_used(at, end).filter(|page| *page < end) {
        if mm.table.get(page) != PageState::Empty {
            return true;
        }
        at = page.plus(1);
    }
    false
}

/// True when an event must wait for another that is late, or for one that was not read yet. `late`:
/// what waits already.
fn must_wait(mm: &Mm, event: &Event, late: &[Event]) -> bool {
    if remap_target(event).is_some_and(|target| {
        in_use(mm, target) || mm.changes.owed.iter().any(|owed| overlap(*owed, target))
    }) {
        return true;
    }
    if pending_unmap_of(mm, event).is_some() {
        return false;
    }
    if let Event::Unmap(range) = event {
        let begins = |e: &&Event| match e {
            Event::Remap { from, len, .. } => {
                *from == range.start && from.offset(*len) == range.end
            }
            _ => false,
        };
        let ends = |e: &&Event| matches!(e, Event::Unmap(other) if other == range);
        if late.iter().filter(begins).count() > late.iter().filter(ends).count() {
            return true;
        }
    }
    let from = match event {
        Event::Remove(range) | Event::Unmap(range) => *range,
        Event::Remap { from, len, .. } => VirtRange { start: *from, end: from.offset(*len) },
        _ => return false,
    };
    late.iter().filter_map(remap_target).any(|target| match event {
        Event::Remove(_) => overlap(from, target),
        // What is given up there is what was there before, unless that lies elsewhere.
        _ => from.start == target.start && mm.regions.find(target.start).is_none(),
    })
}

/// The place in the list of what is owed that an event fulfils.
fn pending_unmap_of(mm: &Mm, event: &Event) -> Option<usize> {
    match event {
        Event::Unmap(range) => mm
            .changes
            .owed
            .iter()
            .position(|owed| range.start <= owed.start && owed.end <= range.end),
        _ => None,
    }
}

/// Applies a change of mappings, or keeps it until what happened before it was read (rule 4).
pub(crate) fn apply(engine: &Engine, mm: &mut Mm, event: Event) {
    if must_wait(mm, &event, &mm.changes.late) {
        mm.changes.late.push(event);
        return;
    }
    apply_now(engine, mm, event);
    let mut at = 0;
    while at < mm.changes.late.len() {
        if must_wait(mm, &mm.changes.late[at], &mm.changes.late[..at]) {
            at += 1;
        } else {
            let event = mm.changes.late.remove(at);
            apply_now(engine, mm, event);
            at = 0;
        }
    }
}

/// No place that was moved away from is still to be told of: those that were not are still mapped
/// (`MREMAP_DONTUNMAP`), and armed.
fn none_is_owed(mm: &mut Mm) {
    for at in 0..mm.changes.owed.len() {
        mm.armed.insert(mm.changes.owed[at]);
    }
    mm.changes.owed.clear();
}

/// Applies what is late: the kernel has said that no event is on its way.
pub(crate) fn apply_late(engine: &Engine, mm: &mut Mm) {
    none_is_owed(mm);
    while !mm.changes.late.is_empty() {
        let event = mm.changes.late.remove(0);
        apply_now(engine, mm, event);
    }
}

/// Applies a change of mappings that is known to be the next.
pub(crate) fn apply_now(engine: &Engine, mm: &mut Mm, event: Event) {
    match VmaChange::of(&event) {
        Some(change @ VmaChange::Moved { .. }) => remember(mm, change),
        Some(change) if pending_unmap_of(mm, &event).is_some() => remember(mm, change),
        // Of what the table knew of it: a child of a fork is looked at there.
        Some(VmaChange::Gone(range)) => {
            let known = [mm.regions.extent(range), mm.armed.extent(range)]
                .into_iter()
                .flatten()
                .reduce(hull);
            if let Some(known) = known {
                remember(mm, VmaChange::Gone(known));
            }
        }
        _ => {}
    }
    while let Some(at) = pending_unmap_of(mm, &event) {
        mm.changes.owed.swap_remove(at);
    }
    match event {
        Event::Remove(range) => drop_pages(mm, engine, range),
        Event::Unmap(range) => {
            drop_pages(mm, engine, range);
            mm.regions.remove(range);
            mm.armed.remove(range);
        }
        Event::Remap { from, to, len } => remapped(engine, mm, from, to, len),
        Event::Fault { .. } | Event::Fork { .. } => {}
        Event::Unknown(kind) => {
            crate::fatal(&format!("the userfaultfd sent a message of the unknown kind {kind}"))
        }
    }
}

/// `Remap`: the pages of `len` bytes at `from` are now at `to`.
fn remapped(engine: &Engine, mm: &mut Mm, from: VirtAddr, to: VirtAddr, len: usize) {
    let source = VirtRange { start: from, end: from.offset(len) };
    let target = VirtRange { start: to, end: to.offset(len) };
    let managed = mm.regions.find(from).is_some();
    if target.end > MANAGED_END {
        crate::fatal("managed memory was moved to addresses above 2^47, where nothing is managed");
    }
    drop_pages(mm, engine, target);
    mm.armed.remove(target);
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
                match engine.devices.slots(entry.ty()).lookup(entry.offset()) {
                    TableSlot::Folio(folio) if filler_of(folio).is_none() => {
                        let frame = mm.frame_of(entry, folio);
                        mm.frames.owner[frame.0 as usize] = moved;
                    }
                    _ => mm.queues.pooled(&mut mm.table, moved.chunk()),
                }
            }
            PageState::PresentClean(entry) => {
                mm.mark_clean(moved, entry);
            }
            state => {
                mm.table.set(moved, state);
            }
        }
        at = page.plus(1);
    }
    mm.regions.remove(source);
    mm.armed.remove(source);
    if mm.changes.owed.len() == MAX_PENDING_UNMAPS {
        let left = mm.changes.owed.remove(0);
        mm.armed.insert(left);
    }
    mm.changes.owed.push(source);
    if managed {
        mm.armed.remove(target);
        mm.regions.insert(target);
        if engine.fork.followed && engine.fork.phase.load(Relaxed) == NO_FORK {
            // It may have been open while it moved.
            let _ = dontfork::deny(target);
        }
    } else {
        // Or the kernel had not told.
        mm.armed.insert(target);
    }
}
