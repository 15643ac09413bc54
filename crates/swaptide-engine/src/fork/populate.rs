//! Pages for a process that has no engine: copied to it through its userfaultfd.
//!
//! Owns: the userfaultfd of such a process, and what is known of its mappings.
//!
//! Invariants
//! 1. A process's userfaultfd is closed only when all that was swapped at its fork is there, and
//!    what it has forked until then has all of it too.
//! 2. A page goes where the process has it at that moment: the kernel refuses the copy while a
//!    change of its mappings is unread, and the place is looked up again when that was read.
//!
//! Locks: the memory lock, for one page at a time; not while the process is waited for.

use std::collections::VecDeque;
use std::time::Duration;

use swaptide_core::{SlotContent as TableSlot, SwapEntry};
use swaptide_ipc::Counter;
use swaptide_store::file::{FileDevice, READ_RETRY_DELAYS, ReadError, Stamp};
use swaptide_store::{Page, Slot};
use swaptide_sys::mem::Mapping;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::sock::{Conn, poll_readable};
use swaptide_sys::thread::{Nanos, now, sleep, yield_now};
use swaptide_sys::uffd::{Coverage, Event, Message, Uffd};
use swaptide_sys::{AsFd, Errno};

use crate::backing::devices::{POOL, filler_of};
use crate::engine::{Engine, Mm};
use crate::events::brought::Brought;
use crate::events::fork_state::{ForkNumber, NewChild};
use crate::events::late_look::LATE_EVENT_TIMEOUT;
use crate::fault::path::FaultPath;
use crate::fork::layout::{Layout, is_armed};
use crate::mm::page_table::PageState;
use crate::mm::types::{PageNo, pages_of, range_of};
use crate::mm::vma_change::VmaChange;
use crate::pager::Pager;
use crate::sched::handed::Fault;

/// The time to wait for a moment in which no thread changes mappings, before it is enough that the
/// child has everything where it is expected.
const QUIET_TIMEOUT: Duration = Duration::from_millis(20);
/// Number of pages of an untracked child's that come between two checks of this process's own
/// faults, of which this many are answered at a time.
const FAULT_CHECK_INTERVAL_PAGES: usize = 256;
const MAX_FAULTS_PER_CHECK: usize = 16;
/// Untracked children that are taken in before what was noted is applied, and those can continue
/// whom that concerns.
const MAX_NEW_CHILDREN: usize = 4;
/// Between two checks of the child.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// The timeout for the other holder of a child's userfaultfd to close it. Until it does, a thread
/// of the child that touches new memory waits.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(200);

/// Pages of swap areas that are read at a time for a child that gets everything.
const READ_BATCH_PAGES: usize = 64;

/// Pages that were read from swap areas before their turn: one at a time, each would take as long
/// as its device takes to answer.
struct ReadBatch {
    buffer: Option<Mapping>,
    /// Whose the pages in the buffer are, and what their slots held.
    read: Vec<(SwapEntry, Option<Stamp>)>,
    /// What comes before was in it, as far as it could be.
    next: PageNo,
}

impl ReadBatch {
    fn new() -> ReadBatch {
        ReadBatch { buffer: None, read: Vec::new(), next: PageNo(0) }
    }

    /// A page's contents, if they were read and nothing else is there by now.
    fn find(&self, entry: SwapEntry, device: &FileDevice) -> Option<&Page> {
        let at = self.read.iter().position(|(of, _)| *of == entry)?;
        let stamp = device.stamp(Slot(entry.offset().0));
        let buffer =
            self.buffer.as_ref().filter(|_| stamp.is_some() && stamp == self.read[at].1)?;
        // SAFETY: as many pages as `read` is long lie in the buffer, and it is written to with
        // `self` borrowed for that alone.
        Some(unsafe { &*buffer.as_ptr().add(at * PAGE_SIZE).cast::<Page>() })
    }
}

/// A process that is given pages.
pub(crate) struct UnmanagedChild {
    pub(super) uffd: Uffd,
    /// The fork of this process that it is of, or the last before it that was read.
    fork: ForkNumber,
    /// The places in the child, at its fork, of the pages in the parent's table.
    layout: Layout,
    /// The changes of mappings that it has made since.
    own: Vec<VmaChange>,
    /// The same, to follow a page.
    since: Layout,
    /// The userfaultfds of its own children, and how many of its changes were read before each.
    forked: Vec<(Uffd, usize)>,
    /// Its faults that were read and not answered. Where its userfaultfd is closed before they are,
    /// the kernel answers them.
    faults: VecDeque<PageNo>,
    /// Ends the other hold on its userfaultfd, which outlives this process.
    hold: Option<Conn>,
}

impl UnmanagedChild {
    fn new(engine: &Engine, uffd: Uffd, fork: ForkNumber) -> UnmanagedChild {
        UnmanagedChild {
            hold: (engine.start.hold_child)(uffd.as_fd()),
            uffd,
            fork,
            layout: Layout::default(),
            own: Vec::new(),
            since: Layout::default(),
            forked: Vec::new(),
            faults: VecDeque::new(),
        }
    }

    /// How it differed from the table at its fork.
    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The changes of mappings that it has made since its fork.
    pub(super) fn own(&self) -> &[VmaChange] {
        &self.own
    }

    /// It has moved a mapping since. What was given to it before is not where it was given to.
    pub(super) fn has_moved(&self) -> bool {
        self.own.iter().any(|change| matches!(change, VmaChange::Moved { .. }))
    }

    /// A fault that was not answered yet.
    pub(super) fn take_fault(&mut self) -> Option<PageNo> {
        self.faults.pop_front()
    }

    /// It has ended or executed another program.
    pub(super) fn is_gone(&self) -> bool {
        self.uffd.coverage(range_of(PageNo(1), 1)) == Coverage::Gone
    }

    /// Returns the present place in the child of a page of the table.
    fn place(&self, page: PageNo) -> Option<PageNo> {
        self.since.place(self.layout.place(page)?)
    }

    /// Takes in what it tells.
    pub(super) fn note(&mut self, event: Event) {
        match event {
            Event::Fork { uffd } => return self.forked.push((uffd, self.own.len())),
            Event::Fault { addr, .. } => return self.faults.push_back(PageNo::of(addr)),
            _ => {}
        }
        let Some(change) = VmaChange::of(&event) else { return };
        let ends_a_move = |c: &VmaChange| match (c, change) {
            (VmaChange::Moved { from, .. }, VmaChange::Gone(range)) => *from == range.start,
            _ => false,
        };
        if !self.own.iter().any(ends_a_move) {
            self.own.push(change);
            self.since.changed(change);
        }
    }

    /// Reads what it tells.
    fn read(&mut self) {
        let mut messages = Message::buffer::<8>();
        while let Ok(n @ 1..) = self.uffd.read(&mut messages) {
            for message in &mut messages[..n] {
                self.note(message.decode());
            }
        }
    }

    /// True if it has children of its own that were told of and have not been given their pages.
    pub(super) fn has_forked(&self) -> bool {
        !self.forked.is_empty()
    }

    /// True if it had an armed mapping at a page at its fork.
    fn record_page(&mut self, page: PageNo) -> bool {
        loop {
            let at = range_of(page, 1);
            match is_armed(&self.uffd, page) {
                Some(has) => {
                    return self.own.iter().find_map(|c| c.tells_of(at)).unwrap_or(has);
                }
                None => {
                    self.read();
                    yield_now();
                }
            }
        }
    }
}

/// It has all its memory, or serves itself: the kernel shall fill what it never touched.
impl Drop for UnmanagedChild {
    fn drop(&mut self) {
        let Some(conn) = self.hold.take() else { return };
        if conn.send(b"-", &[]).is_err() {
            // It was closed when the child had it held itself.
            return;
        }
        let began = now();
        while now().since(began) < RELEASE_TIMEOUT
            && poll_readable(&[conn.as_fd()], Some(RELEASE_TIMEOUT)) != Ok(0)
            // What comes first is the answer to the request.
            && conn.recv(&mut [0u8; 8], &mut []).is_ok_and(|(length, _)| length > 0)
        {}
    }
}

/// Copying everything to children that have no engine.
#[derive(Default)]
pub(crate) struct Populator {
    /// Children of forks that came through no hook, but for the one that is given its pages now.
    waiting: Vec<UnmanagedChild>,
    /// The number of them since the noted changes were last applied.
    taken_in: usize,
    /// What children have forked is given its pages: children of those may wait unseen.
    is_at_grandchildren: bool,
}

impl Populator {
    /// Forks that came through no hook: the children get everything. Nothing else is done before.
    pub(crate) fn populate_untracked(&mut self, pager: &mut Pager) {
        if pager.path.reader.fork.untracked.is_empty() {
            return;
        }
        pager.path.reader.fork.populating = true;
        self.taken_in = 0;
        self.take_in_untracked(&mut pager.path);
        while !self.waiting.is_empty() {
            let mut child = self.waiting.remove(0);
            self.populate(pager, &mut child);
            self.take_in_untracked(&mut pager.path);
        }
        pager.path.reader.fork.populating = false;
        if !pager.path.reader.fork.phase.is_deferring() {
            pager.path.reader.apply_noted();
        }
    }

    /// Finds out where the children have their pages that were told of.
    fn take_in_untracked(&mut self, path: &mut FaultPath) {
        while !path.reader.fork.untracked.is_empty() {
            let child = path.reader.fork.untracked.remove(0);
            (path.engine.start.log)(
                "a fork bypassed libc: the child gets all its memory at once and is \
                not managed",
            );
            path.engine.record_new_sharing();
            path.engine.count(Counter::Forks, 1);
            let child = recipient(path, child, false);
            self.waiting.push(child);
            self.taken_in += 1;
        }
    }

    /// Between two pages for such a child: threads of this process that wait for a page get it,
    /// after all such children. Where threads fork without pause their turn would never come
    /// otherwise. None does while one of the children has a child of its own: that is given what
    /// the table has, and so nothing may leave it.
    fn attend(&mut self, pager: &mut Pager, child: &mut UnmanagedChild) {
        if pager.path.reader.fork.phase.is_deferring() || self.is_at_grandchildren {
            return;
        }
        for _ in 0..MAX_FAULTS_PER_CHECK {
            if self.taken_in < MAX_NEW_CHILDREN {
                pager.path.reader.read_noting();
            }
            // Nothing leaves the table before all know of it.
            self.take_in_untracked(&mut pager.path);
            let path = &mut pager.path;
            let answerable = |fault: &Fault| can_answer(path, PageNo::of(fault.addr));
            let Some(at) = path.reader.pending.iter().position(answerable) else { return };
            let Some(fault) = path.reader.pending.remove(at) else { return };
            let page = PageNo::of(fault.addr);
            let mut has_forked = false;
            for child in std::iter::once(&mut *child).chain(&mut self.waiting) {
                copy_page(path, child, page);
                // A fork under way refuses the copy until it was read; one that begins from here
                // on has the page.
                has_forked |= child.has_forked();
            }
            if has_forked {
                path.reader.pending.push_front(fault);
                return;
            }
            pager.answer(fault);
        }
    }

    /// Gives a process everything that is swapped, and those that it forks meanwhile: they have
    /// what it had at that moment.
    pub(super) fn populate(&mut self, pager: &mut Pager, child: &mut UnmanagedChild) {
        let regions: Vec<VirtRange> = pager.path.engine.mm.lock().regions.iter().collect();
        let mut copied = 0;
        let mut ahead = ReadBatch::new();
        let has_overflowed = pager.path.reader.fork.brought.has_overflowed();
        if has_overflowed {
            (pager.path.engine.start.log)(
                "more pages came in during a fork than there is room to record: the child gets a \
                bus error where it lacks one",
            );
        }
        // What is in memory here is there in the child, too, but for what came in meanwhile.
        let is_due = |state: PageState| match state {
            PageState::Swapped(_) | PageState::Poisoned => true,
            PageState::Present | PageState::PresentClean(_) => has_overflowed,
            PageState::Empty => false,
        };
        for region in regions {
            let pages = pages_of(region);
            let end = PageNo(pages.end);
            let mut at = PageNo(pages.start);
            loop {
                let next = pager.path.engine.mm.lock().table.next_used(at, end);
                let Some(page) = next.filter(|p| *p < end) else { break };
                let state = pager.path.engine.mm.lock().table.get(page);
                if let PageState::Swapped(entry) = state
                    && entry.ty() != POOL
                    && page >= ahead.next
                {
                    read_ahead(&pager.path, &mut ahead, page, end);
                }
                if is_due(state) {
                    copy_read(&mut pager.path, child, page, &ahead);
                    copied += 1;
                    if pager.path.reader.fork.populating && copied % FAULT_CHECK_INTERVAL_PAGES == 0
                    {
                        self.attend(pager, child);
                    }
                }
                at = page.plus(1);
            }
        }
        for at in 0..pager.path.reader.fork.brought.len() {
            let page = pager.path.reader.fork.brought.page(at);
            copy_read(&mut pager.path, child, page, &ahead);
        }
        self.populate_its_children(pager, child);
    }

    /// Gives everything to what a process has forked. A fork that began before the last page was
    /// there is told of only after it; while one is under way the kernel says so.
    pub(super) fn populate_its_children(&mut self, pager: &mut Pager, child: &mut UnmanagedChild) {
        let was_at_grandchildren = self.is_at_grandchildren;
        loop {
            child.read();
            match child.uffd.coverage(pager.path.engine.handler_requests.range()) {
                Coverage::Changing => yield_now(),
                _ if child.forked.is_empty() => {
                    self.is_at_grandchildren = was_at_grandchildren;
                    return;
                }
                _ => {
                    self.is_at_grandchildren = true;
                    let (uffd, before) = child.forked.remove(0);
                    let mut grandchild = UnmanagedChild::new(pager.path.engine, uffd, child.fork);
                    let regions: Vec<VirtRange> =
                        pager.path.engine.mm.lock().regions.iter().collect();
                    let known = |range| first_known(&child.layout, &regions, range);
                    let noted = may_have(&child.own, before);
                    // The child of a fork has one thread, unless it makes others.
                    let noted = (&noted[..], before);
                    let own = Layout::judge(&[], noted, |page| grandchild.record_page(page), known);
                    grandchild.layout = child.layout.clone();
                    own.done().iter().for_each(|change| grandchild.layout.changed(*change));
                    self.populate(pager, &mut grandchild);
                }
            }
        }
    }
}

/// The child of a fork event that was just read, when all is known of where it has its pages.
/// `hooked`: what the table has happened before the fork, for the forking thread waited until
/// it was read.
pub(super) fn recipient(path: &mut FaultPath, new: NewChild, hooked: bool) -> UnmanagedChild {
    let mut child = UnmanagedChild::new(path.engine, new.uffd, new.fork);
    let began = now();
    // The forking thread itself counts as a change until it has run again.
    while path.reader.uffd.coverage(path.engine.handler_requests.range()) == Coverage::Changing {
        let waited = now().since(began);
        if waited > QUIET_TIMEOUT {
            lay_out(path, &mut child, hooked);
            let is_whole = accounts_for(path, &mut child);
            if !is_whole && waited > LATE_EVENT_TIMEOUT {
                (path.engine.start.log)(
                    "a forked child has no memory where something swapped is expected, while \
                    mappings change without pause: it may lack some",
                );
            }
            if is_whole || waited > LATE_EVENT_TIMEOUT {
                return child;
            }
        }
        let _ = poll_readable(&[path.reader.uffd.as_fd()], Some(POLL_INTERVAL));
        path.reader.read_noting();
    }
    lay_out(path, &mut child, hooked);
    child
}

/// Looks where a child has its pages. See [`recipient`].
pub(super) fn lay_out(path: &FaultPath, child: &mut UnmanagedChild, hooked: bool) {
    let (regions, applied, mut noted): (Vec<VirtRange>, Vec<VmaChange>, Vec<VmaChange>) = {
        let mm = path.engine.mm.lock();
        (
            mm.regions.iter().collect(),
            if hooked { Vec::new() } else { mm.changes.recent.clone() },
            mm.changes.late.iter().filter_map(VmaChange::of).collect(),
        )
    };
    noted.extend(path.reader.fork.noted_for(child.fork));
    // Of a process without other threads these are the forking thread's own, which is in fork(2)
    // when a fork is told of.
    let engine = path.engine;
    let is_alone = hooked && !engine.fork.followed && !(engine.start.waits_at_fences)();
    let certain = if is_alone { noted.len() - path.reader.fork.noted_since(child.fork) } else { 0 };
    if applied.is_empty() && noted.is_empty() {
        child.layout = Layout::default();
        return;
    }
    child.layout = Layout::judge(
        &applied,
        (&noted, certain),
        |page| child.record_page(page),
        |range| first_known(&Layout::default(), &regions, range),
    );
}

/// The first address of a range at which a child has something of the regions of its parent, as far
/// as they begin there.
fn first_known(layout: &Layout, regions: &[VirtRange], range: VirtRange) -> Option<VirtAddr> {
    let origin = layout.origin(PageNo::of(range.start));
    if origin.is_some_and(|page| is_in(regions, page.addr())) {
        return Some(range.start);
    }
    let place = |region: &VirtRange| layout.place(PageNo::of(region.start)).map(PageNo::addr);
    regions.iter().filter_map(place).filter(|addr| range.contains(*addr)).min()
}

/// Of the changes of a process those that the child of a fork may have: what it gave up after the
/// fork was read it still had then, as for [`crate::events::fork_state::ForkState::noted_for`].
/// `before`: how many were read before the fork.
fn may_have(changes: &[VmaChange], before: usize) -> Vec<VmaChange> {
    let (before, after) = changes.split_at(before);
    let is_kept = |change: &&VmaChange| !matches!(change, VmaChange::Dropped(_));
    before.iter().chain(after.iter().filter(is_kept)).copied().collect()
}

/// True when the child has an armed mapping wherever something swapped is expected.
fn accounts_for(path: &FaultPath, child: &mut UnmanagedChild) -> bool {
    let mut at = PageNo(0);
    loop {
        let next = {
            let mm = path.engine.mm.lock();
            let next = mm.table.next_used(at, PageNo(usize::MAX / PAGE_SIZE));
            next.map(|page| (page, matches!(mm.table.get(page), PageState::Swapped(_))))
        };
        let Some((page, is_swapped)) = next else { return true };
        // Mappings move as a whole: one page in a chunk tells of the others.
        if is_swapped && child.layout.place(page).is_some_and(|place| !child.record_page(place)) {
            return false;
        }
        at = if is_swapped { page.chunk().plus(1).first() } else { page.plus(1) };
    }
}

/// True when nothing that was noted concerns a managed page, so that the table knows what it
/// is.
pub(super) fn can_answer(path: &FaultPath, page: PageNo) -> bool {
    !path.reader.fork.noted.iter().any(|noted| noted.change.concerns(range_of(page, 1)))
        && path.engine.mm.lock().regions.find(page.addr()).is_some()
}

/// Reads pages of swap areas from `page` on, before `end`. What cannot be read so is read again
/// when it is its turn.
fn read_ahead(path: &FaultPath, ahead: &mut ReadBatch, page: PageNo, end: PageNo) {
    let devices = &path.engine.devices;
    ahead.read.clear();
    if ahead.buffer.is_none() {
        ahead.buffer = Mapping::reserve(READ_BATCH_PAGES * PAGE_SIZE).ok();
    }
    let Some(buffer) = &mut ahead.buffer else { return };
    {
        let mm = path.engine.mm.lock();
        let mut at = page;
        while let Some(page) = mm
            .table
            .next_used(at, end)
            .filter(|page| *page < end && ahead.read.len() < READ_BATCH_PAGES)
        {
            if let PageState::Swapped(entry) = mm.table.get(page)
                && entry.ty() != POOL
                && matches!(devices.areas.slots.lookup(entry.offset()), TableSlot::Shadow { .. })
            {
                ahead.read.push((entry, devices.areas.device.stamp(Slot(entry.offset().0))));
            }
            at = page.plus(1);
        }
        ahead.next = at;
    }
    // SAFETY: the buffer is this call's alone while it is borrowed.
    let pages = unsafe { buffer.slice_mut(0, ahead.read.len() * PAGE_SIZE) };
    let pages =
        pages.chunks_exact_mut(PAGE_SIZE).map(|page| page.try_into().expect("a page's bytes"));
    let mut wanted: Vec<(Slot, &mut Page)> =
        ahead.read.iter().map(|(entry, _)| Slot(entry.offset().0)).zip(pages).collect();
    if devices.areas.device.read(&mut wanted).is_err() {
        ahead.read.clear();
    }
}

/// Answers a child's own fault. The page's place, if it is there now and was not before.
pub(super) fn copy_at(
    path: &mut FaultPath,
    child: &mut UnmanagedChild,
    place: PageNo,
) -> Option<PageNo> {
    // Where it was at the fork, and where the table has that.
    match child.since.origin(place).and_then(|at| child.layout.origin(at)) {
        Some(page) => copy_to(path, child, page),
        // What it has given up, or has from elsewhere, is empty.
        None => child.uffd.zero_pages(range_of(place, 1), true).complete().is_ok().then_some(place),
    }
}

/// Gives another process a page as it was at its fork, before a thread of this one gets it: what
/// that writes may be out again before the other process has all. So an empty page is given,
/// too. Its place there, if it is there now and was not before. What is in memory here is
/// there as well.
pub(super) fn copy_page(
    path: &mut FaultPath,
    child: &mut UnmanagedChild,
    page: PageNo,
) -> Option<PageNo> {
    let state = path.engine.mm.lock().table.get(page);
    matches!(state, PageState::Empty | PageState::Swapped(_) | PageState::Poisoned)
        .then(|| copy_to(path, child, page))?
}

/// Copies what this process has for a page to another one. Its place there, if it is there now
/// and was not before.
fn copy_to(path: &mut FaultPath, child: &mut UnmanagedChild, page: PageNo) -> Option<PageNo> {
    copy_read(path, child, page, &ReadBatch::new())
}

/// The result of loading a swapped page into the handler's copy buffer.
enum LoadedCopy {
    Filled,
    Lost,
    /// This process was short of something; since then.
    OutOfMeans(ReadError, Nanos),
    RetryAfter(Duration),
}

/// Loads a swapped page into the handler's copy buffer. `pauses`: those left before reads that fail
/// are given up.
fn load_for_copy(
    path: &mut FaultPath,
    mm: &Mm,
    entry: SwapEntry,
    ahead: &ReadBatch,
    pauses: &mut impl Iterator<Item = Duration>,
) -> LoadedCopy {
    let devices = &path.engine.devices;
    // SAFETY: the buffer is the handler's own.
    let buffer = unsafe { path.copy.slice_mut(0, PAGE_SIZE) };
    let out: &mut Page = buffer.try_into().expect("a page's bytes");
    if let TableSlot::Folio(folio) = devices.slots(entry.ty()).lookup(entry.offset())
        && filler_of(folio).is_none()
    {
        let frame = mm.frame_of(entry, folio);
        // SAFETY: the frame is full while the memory lock is held.
        out.copy_from_slice(unsafe { &*mm.staging.addr(frame).as_ptr::<Page>() });
        return LoadedCopy::Filled;
    }
    let slot = Slot(entry.offset().0);
    if entry.ty() == POOL {
        return match devices.pool.load(slot, out, &mut path.loader.unpacker) {
            Ok(_) => LoadedCopy::Filled,
            Err(_) => LoadedCopy::Lost,
        };
    }
    let device = &devices.areas.device;
    if let Some(page) = ahead.find(entry, device) {
        out.copy_from_slice(page);
        return LoadedCopy::Filled;
    }
    let began = now();
    match device.read(&mut [(slot, out)]) {
        Ok(()) => {
            path.loader.shortage.end();
            LoadedCopy::Filled
        }
        Err(error) if error.is_own_shortage() => LoadedCopy::OutOfMeans(error, began),
        Err(error) if device.may_succeed_later(&error) => {
            pauses.next().map_or(LoadedCopy::Lost, LoadedCopy::RetryAfter)
        }
        Err(_) => LoadedCopy::Lost,
    }
}

/// The same where some was read ahead.
fn copy_read(
    path: &mut FaultPath,
    child: &mut UnmanagedChild,
    page: PageNo,
    ahead: &ReadBatch,
) -> Option<PageNo> {
    let engine = path.engine;
    let mut pauses = READ_RETRY_DELAYS.into_iter();
    loop {
        let place = child.place(page)?;
        let mm = engine.mm.lock();
        let range = range_of(place, 1);
        let state = mm.table.get(page);
        let is_out = matches!(state, PageState::Swapped(_) | PageState::Poisoned);
        let brought = path.reader.fork.brought.find(page).filter(|_| !is_out);
        let progress = match (brought, state) {
            (Some(Brought::Held(content)), _) => {
                // SAFETY: the record is the handler's own; the destination is another process's
                // missing page.
                unsafe {
                    child.uffd.copy_pages(place.addr(), content.as_ptr(), PAGE_SIZE, true, false)
                }
            }
            (Some(Brought::Changed), _) => {
                let poisoned = child.uffd.poison(range);
                if poisoned.error.is_none() {
                    engine.count(Counter::PagesPoisoned, 1);
                    (engine.start.log)(
                        "memory was discarded during a fork, at a page that was just swapped \
                        in: the child gets SIGBUS there",
                    );
                }
                poisoned
            }
            (None, PageState::Swapped(entry)) => {
                match load_for_copy(path, &mm, entry, ahead, &mut pauses) {
                    // SAFETY: the buffer is the handler's own, and full; the destination is another
                    // process's missing page.
                    LoadedCopy::Filled => unsafe {
                        let from = path.copy.as_ptr();
                        child.uffd.copy_pages(place.addr(), from, PAGE_SIZE, true, false)
                    },
                    LoadedCopy::Lost => {
                        engine.count(Counter::PagesPoisoned, 1);
                        child.uffd.poison(range)
                    }
                    LoadedCopy::OutOfMeans(error, began) => {
                        drop(mm);
                        path.loader.wait_for_means(&error, began);
                        continue;
                    }
                    LoadedCopy::RetryAfter(pause) => {
                        drop(mm);
                        sleep(pause);
                        continue;
                    }
                }
            }
            (None, PageState::Poisoned) => child.uffd.poison(range),
            (None, PageState::Present | PageState::PresentClean(_))
                if path.reader.fork.brought.has_overflowed() =>
            {
                let poisoned = child.uffd.poison(range);
                engine.count(Counter::PagesPoisoned, usize::from(poisoned.error.is_none()));
                poisoned
            }
            (None, PageState::Empty | PageState::Present | PageState::PresentClean(_)) => {
                child.uffd.zero_pages(range, true)
            }
        };
        match progress.error {
            None => return Some(place),
            Some(Errno::AGAIN | Errno::NOMEM) => {
                // The child changes its mappings: its events must be read before anything can
                // be copied.
                drop(mm);
                child.read();
                swaptide_sys::thread::yield_now();
            }
            // There already, its mapping gone, or the child gone.
            Some(_) => return None,
        }
    }
}

fn is_in(regions: &[VirtRange], addr: VirtAddr) -> bool {
    regions.iter().any(|region| region.contains(addr))
}
