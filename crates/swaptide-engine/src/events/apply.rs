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
//!    read, if one is on its way. [`crate::mm::change_order`] has the rules,
//!    [`crate::events::late_look`] finds out. The handler does so before it does anything else
//!    ([`crate::events::reader::UffdReader::read_late`]).
//! 5. A thread that moves a mapping says so first, and then that it has left the old place: the
//!    latter is *owed*. Another thread may have moved something there in between, and the `Unmap`
//!    that is read after that does not mean it. So a `Remap` to a place that is owed is late until
//!    the `Unmap` was read, or until no event is on its way: then none is owed. The move left its
//!    old place mapped (`MREMAP_DONTUNMAP`), which stands in `Mm::armed` from then on. While the
//!    move itself is late, its `Unmap` waits with it.
//! 6. Of a program that moves mappings through libc a thread continues only when its change was
//!    applied, if there are several ([`crate::requests::HandlerRequests::fence`]). One that grows a
//!    mapping in place waits as well, until the new part is listed: nothing can be moved to where
//!    it was before it is known that it was there. What is armed, or about to be, and not yet
//!    listed counts as being there, too. Past libc nothing waits so: what grew in place is known
//!    when it is touched.

use std::sync::atomic::Ordering::Relaxed;

use swaptide_sys::mapping_calls::MappingCall;
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::uffd::Event;

use crate::backing::devices::filler_of;
use crate::engine::{Engine, Mm};
use crate::mm::change_order::{KnownMappings, LateChanges, LateStep};
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

fn common(a: VirtRange, b: VirtRange) -> Option<VirtRange> {
    let both = VirtRange { start: a.start.max(b.start), end: a.end.min(b.end) };
    overlap(a, b).then_some(both)
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

/// The table and the lists of what is managed, to which changes are applied.
struct TableChanges<'a> {
    engine: &'a Engine,
    mm: &'a mut Mm,
}

impl KnownMappings for TableChanges<'_> {
    fn has(&self, range: VirtRange) -> bool {
        in_use(self.mm, range)
    }

    fn is_listed(&self, range: VirtRange) -> bool {
        self.mm.regions.overlaps(range)
    }

    fn is_owed(&self, range: VirtRange) -> bool {
        self.mm.changes.owed.iter().any(|owed| overlap(*owed, range))
    }

    fn fulfils(&self, event: &Event) -> bool {
        pending_unmap_of(self.mm, event).is_some()
    }

    fn is_fenced(&self) -> bool {
        (self.engine.start.waits_at_fences)()
    }

    fn apply_now(&mut self, event: Event) {
        apply_now(self.engine, self.mm, event);
    }
}

/// Applies by `f`, which has what is late.
fn with_late(
    engine: &Engine,
    mm: &mut Mm,
    f: impl FnOnce(&mut LateChanges, &mut TableChanges<'_>),
) {
    let mut late = std::mem::take(&mut mm.changes.late);
    f(&mut late, &mut TableChanges { engine, mm });
    mm.changes.late = late;
}

/// Applies a change of mappings, or keeps it until what happened before it was read (rule 4).
pub(crate) fn apply(engine: &Engine, mm: &mut Mm, event: Event) {
    with_late(engine, mm, |late, applied| late.take(applied, event));
}

/// No place that was moved away from is still to be told of: those that were not are still mapped
/// (`MREMAP_DONTUNMAP`), and armed.
fn none_is_owed(mm: &mut Mm) {
    for at in 0..mm.changes.owed.len() {
        mm.armed.insert(mm.changes.owed[at]);
    }
    mm.changes.owed.clear();
}

/// Applies what is late: no event is on its way, or it would have been read by now.
pub(crate) fn apply_late(engine: &Engine, mm: &mut Mm) {
    none_is_owed(mm);
    with_late(engine, mm, |late, applied| late.apply_all(applied));
}

/// What is to be done about the first change that is late, by what the program's threads are in.
pub(crate) fn next_late_step(
    engine: &Engine,
    mm: &mut Mm,
    calls: &[MappingCall],
    may_come: bool,
) -> LateStep {
    let mut step = LateStep::Apply;
    with_late(engine, mm, |late, applied| step = late.next_step(applied, calls, may_come));
    step
}

/// Applies the first change that is late: nothing was in its way.
pub(crate) fn apply_first_late(engine: &Engine, mm: &mut Mm) {
    with_late(engine, mm, |late, applied| late.apply_first(applied));
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
    // What was armed since something moved away from there is something else.
    let mut newer = Vec::new();
    while let Some(at) = pending_unmap_of(mm, &event) {
        let owed = mm.changes.owed.swap_remove(at);
        newer.extend(mm.armed.iter().filter_map(|armed| common(armed, owed)));
    }
    match event {
        Event::Remove(range) => drop_pages(mm, engine, range),
        Event::Unmap(range) => {
            drop_pages(mm, engine, range);
            mm.regions.remove(range);
            mm.armed.remove(range);
            mm.changes.left.remove(range);
            newer.into_iter().for_each(|armed| mm.armed.insert(armed));
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
    mm.changes.left.remove(target);
    mm.changes.owed.retain(|owed| !overlap(*owed, target));
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
    if managed && engine.fork.followed {
        mm.changes.left.insert(source);
    }
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
