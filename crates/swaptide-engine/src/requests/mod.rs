//! Requests from threads of the process to the handler.
//!
//! The handler sleeps in a read of the program's userfaultfd. Giving up a page of a registered area
//! (`MADV_DONTNEED`) is an event there, and the caller waits until it is read: so an area of a few
//! pages is registered for that alone, and which page is given up says what is wanted. Nothing is
//! ever stored in it.
//!
//! Owns: the area, the mailbox of the one request that carries data, and the reply words.
//!
//! Rules
//! 1. The mailbox belongs to the thread whose id is in `busy`; one that is dead has lost it.
//! 2. Its owner takes no signal meanwhile: a handler of the program's could ask for something
//!    itself, or never come back.
//! 3. When the program was detached no thread serves requests any more, and no thread waits.
//! 4. A request has a number, and is done when that number was answered: what a dead thread has
//!    left there cannot be taken for it.
//!
//! A thread under a filter of system calls may not be allowed to make one. It makes a *fault
//! request*: it touches a page of a second registered area, a *request page*. The fault tells the
//! handler, which fills the page when it has done what was asked, and empties it again before it is
//! used again. Nothing of that is a system call of the thread's.
//!
//! 5. A request page is `FREE` only while it is missing. The handler alone makes it so.
//!
//! Locks: none. A thread that asks waits on futex words of the engine's memory only.

pub mod fork_control;

use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Acquire,
    Ordering::Relaxed, Ordering::Release,
};
use swaptide_sys::lock::futex;
use swaptide_sys::mem::{Advice, Mapping, advise};
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::thread::{Tid, block_all_signals, gettid, lives, restore_signals, yield_now};
use swaptide_sys::uffd::Uffd;

use crate::EngineError;
use crate::sched::deadline::{WAIT_SLICE, Waited};

/// A request of a thread to the handler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum HandlerRequest {
    /// Look for memory to adopt.
    Adopt = 0,
    /// Prepare for a fork: the asking thread is about to call it.
    ForkPrepare = 1,
    /// The mailbox holds a hint.
    Hint = 2,
    /// The fork is over for its parent: the thread continues when the child serves itself.
    ForkDone = 3,
    /// A mapping was moved or has grown: the thread continues when the table knows.
    Fence = 4,
    /// Bring in what is swapped, while no thread faults.
    Preload = 5,
    /// Bring in everything and let the program go.
    Detach = 6,
    /// The supervisor has changed [`swaptide_ipc::ProcControl::fork_hold`].
    ForkHold = 7,
    /// A thread waits at a request page. No address of the area means it.
    RequestPage = 8,
}

/// A request that is made by a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum FaultRequest {
    /// As [`HandlerRequests::fence`].
    Fence = 0,
    /// As [`Hint::Release`].
    Release = 1,
    /// As [`HandlerRequest::Detach`], answered when the program was detached.
    Detach = 2,
}

/// Threads that can wait at request pages at a time; more wait for one.
const REQUEST_PAGES: usize = 64;

/// The request at a request page, and its progress.
struct RequestPage {
    state: AtomicU32,
    request: AtomicU32,
    start: AtomicUsize,
    end: AtomicUsize,
}

/// Its thread has gone on: the page is to be emptied.
const ABANDONED: u32 = 4;
/// In the place of what is wanted: it could not be done.
const REFUSED: u32 = u32::MAX;

/// Pages of the area.
const MAX_REQUESTS: usize = 8;
/// Threads that can wait at fences at a time; more wait for a place.
const FENCES: usize = 64;

/// A thread that waits until the table knows of its change: 0 no thread, 1 being written, 2
/// waiting, 3 answered.
struct Fence {
    state: AtomicU32,
    at: AtomicUsize,
}

/// In the address of a fence: the mapping is new.
const IS_NEW: usize = 1;

const FREE: u32 = 0;
const WRITTEN: u32 = 1;
const WAITING: u32 = 2;
const ANSWERED: u32 = 3;

/// A hint from the program, as it came with `madvise`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Hint {
    /// The range will be needed soon.
    WillNeed = 1,
    /// The range is the first to take.
    Cold = 2,
    /// Take the range now.
    PageOut = 3,
    /// The range is read from start to end.
    Sequential = 4,
    /// The range is read without order.
    Random = 5,
    /// Takes `Sequential` and `Random` back.
    Normal = 6,
    /// Bring the range in and manage it no more. Never dropped.
    Release = 7,
    /// The range was mapped a moment ago: manage it before it fills.
    Mapped = 8,
}

impl Hint {
    fn of(word: u32) -> Option<Hint> {
        [
            Hint::WillNeed,
            Hint::Cold,
            Hint::PageOut,
            Hint::Sequential,
            Hint::Random,
            Hint::Normal,
            Hint::Release,
            Hint::Mapped,
        ]
        .into_iter()
        .find(|h| *h as u32 == word)
    }
}

/// The request pages, and what waits for the answers.
pub struct HandlerRequests {
    area: Mapping,
    busy: AtomicU32,
    /// The request: its number above 8 bits of [`Hint`]; 0: none.
    hint: AtomicU64,
    /// Number of the last request.
    asked: AtomicU32,
    /// Number of the request that the handler has taken.
    taken: AtomicU32,
    hint_start: AtomicUsize,
    hint_end: AtomicUsize,
    /// Number of the last request that the handler has done.
    pub answered: AtomicU32,
    /// A range could not be released. Written by the handler before it answers.
    pub(crate) refused: AtomicBool,
    fences: [Fence; FENCES],
    fault_area: Mapping,
    pages: [RequestPage; REQUEST_PAGES],
    /// The program was detached.
    closed: AtomicBool,
}

impl HandlerRequests {
    /// Makes the area; the handler registers it.
    ///
    /// # Errors
    /// When memory is refused.
    pub fn new() -> Result<HandlerRequests, EngineError> {
        let area = Mapping::reserve(MAX_REQUESTS * PAGE_SIZE)
            .map_err(|e| EngineError::Memory("the request pages", e))?;
        let fault_area = Mapping::reserve(REQUEST_PAGES * PAGE_SIZE)
            .map_err(|e| EngineError::Memory("the fault request pages", e))?;
        let free = || RequestPage {
            state: AtomicU32::new(FREE),
            request: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
        };
        Ok(HandlerRequests {
            fault_area,
            pages: std::array::from_fn(|_| free()),
            area,
            busy: AtomicU32::new(0),
            hint: AtomicU64::new(0),
            asked: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            hint_start: AtomicUsize::new(0),
            hint_end: AtomicUsize::new(0),
            answered: AtomicU32::new(0),
            refused: AtomicBool::new(false),
            fences: [const { Fence { state: AtomicU32::new(FREE), at: AtomicUsize::new(0) } };
                FENCES],
            closed: AtomicBool::new(false),
        })
    }

    /// The range to register.
    pub fn range(&self) -> VirtRange {
        self.area.range()
    }

    /// The request pages, to register as well.
    pub(crate) fn request_pages(&self) -> VirtRange {
        self.fault_area.range()
    }

    /// One of the request pages.
    fn request_page(&self, index: usize) -> VirtRange {
        VirtRange::from_len(self.request_pages().start.offset(index * PAGE_SIZE), PAGE_SIZE)
    }

    /// Asks for something without a system call; returns when it is done, or the program was let
    /// go. False if a release was refused: the range stays managed.
    pub fn submit_by_fault(&self, request: FaultRequest, range: VirtRange) -> bool {
        let claim = |entry: &RequestPage| {
            entry.state.compare_exchange(FREE, WRITTEN, AcqRel, Relaxed).is_ok()
        };
        let index = loop {
            match self.pages.iter().position(claim) {
                Some(index) => break index,
                None if self.closed.load(Acquire) => return true,
                None => std::hint::spin_loop(),
            }
        };
        let entry = &self.pages[index];
        entry.request.store(request as u32, Relaxed);
        entry.start.store(range.start.0, Relaxed);
        entry.end.store(range.end.0, Relaxed);
        entry.state.store(WAITING, Release);
        let page = self.request_page(index).start;
        while entry.state.load(Acquire) == WAITING && !self.closed.load(Acquire) {
            // SAFETY: a page of the engine's own mapping; the kernel holds this thread until the
            // handler has filled it.
            unsafe { page.as_ptr::<u8>().read_volatile() };
        }
        let was_done = entry.request.load(Relaxed) != REFUSED;
        let _ = entry.state.compare_exchange(ANSWERED, ABANDONED, AcqRel, Relaxed);
        was_done
    }

    /// The next request page at which a thread waits, from `index` on: what for, and where.
    pub(crate) fn waiting_at(&self, index: usize) -> Option<(usize, FaultRequest, VirtRange)> {
        let index =
            (index..REQUEST_PAGES).find(|&at| self.pages[at].state.load(Acquire) == WAITING)?;
        let entry = &self.pages[index];
        let request = match entry.request.load(Relaxed) {
            0 => FaultRequest::Fence,
            1 => FaultRequest::Release,
            _ => FaultRequest::Detach,
        };
        Some((
            index,
            request,
            VirtRange {
                start: VirtAddr(entry.start.load(Relaxed)),
                end: VirtAddr(entry.end.load(Relaxed)),
            },
        ))
    }

    /// Ends the request at a request page: it is done, or was refused.
    pub(crate) fn done_at(&self, index: usize, is_done: bool) {
        if !is_done {
            self.pages[index].request.store(REFUSED, Relaxed);
        }
        let _ = self.pages[index].state.compare_exchange(WAITING, ANSWERED, AcqRel, Relaxed);
    }

    /// Fills the request pages that were answered, and empties those whose threads have gone on.
    /// True while some are not empty.
    pub(crate) fn release_answered(&self, uffd: &Uffd) -> bool {
        let mut any = false;
        for (index, entry) in self.pages.iter().enumerate() {
            let page = self.request_page(index);
            match entry.state.load(Acquire) {
                ANSWERED => {
                    any = true;
                    // Where an event is unread this fails; the thread touches the page again then.
                    let _ = uffd.zero_pages(page, true);
                    let _ = uffd.wake(page);
                }
                ABANDONED => {
                    // Registered, giving it up would be an event, which only this thread could
                    // read.
                    let emptied = uffd.unregister(page).and_then(|()| {
                        // SAFETY: the page is the engine's own and holds nothing.
                        unsafe { advise(page, Advice::DontNeedLocked) }
                    });
                    if let Err(errno) = emptied.and_then(|()| uffd.register_missing(page)) {
                        crate::fatal(&format!(
                            "a fault request page cannot be emptied: {}",
                            swaptide_sys::ErrnoName(errno)
                        ));
                    }
                    entry.state.store(FREE, Release);
                }
                _ => {}
            }
        }
        any
    }

    /// Makes a request without data; returns when the handler has read it. Never from the handler
    /// itself.
    pub fn submit(&self, request: HandlerRequest) {
        crate::sched::handler_cpu::boost_once();
        let start = self.range().start.offset(request as usize * PAGE_SIZE);
        // SAFETY: the page is the engine's own, holds nothing and is never read.
        if let Err(errno) = unsafe {
            advise(VirtRange { start, end: start.offset(PAGE_SIZE) }, Advice::DontNeedLocked)
        } {
            crate::fatal(&format!("a request cannot be sent: {}", swaptide_sys::ErrnoName(errno)));
        }
    }

    /// Returns the request that an event of the area means.
    pub fn decode(&self, at: VirtAddr) -> Option<HandlerRequest> {
        match (at.0 - self.range().start.0) / PAGE_SIZE {
            0 => Some(HandlerRequest::Adopt),
            1 => Some(HandlerRequest::ForkPrepare),
            2 => Some(HandlerRequest::Hint),
            3 => Some(HandlerRequest::ForkDone),
            4 => Some(HandlerRequest::Fence),
            5 => Some(HandlerRequest::Preload),
            6 => Some(HandlerRequest::Detach),
            7 => Some(HandlerRequest::ForkHold),
            _ => None,
        }
    }

    /// Returns the request that an event means, if it is of the area.
    pub(crate) fn decode_in(&self, at: VirtAddr) -> Option<HandlerRequest> {
        self.range().contains(at).then(|| self.decode(at)).flatten()
    }

    /// Puts a hint into the mailbox, sends the request and waits until it was served. A hint that
    /// meets another one is dropped: it is only a hint.
    pub fn hint(&self, hint: Hint, range: VirtRange) {
        let Ok(mask) = block_all_signals() else { return };
        if self.own(hint == Hint::Release) {
            self.ask(hint, range, mask);
            self.busy.store(0, Release);
        }
        restore_signals(mask);
    }

    /// Has a range brought in and let go. False when some of it could not be brought in: that stays
    /// managed.
    pub fn release(&self, range: VirtRange) -> bool {
        let Ok(mask) = block_all_signals() else { return false };
        self.own(true);
        self.refused.store(false, Relaxed);
        self.ask(Hint::Release, range, mask);
        let is_whole = !self.refused.load(Acquire);
        self.busy.store(0, Release);
        restore_signals(mask);
        is_whole
    }

    /// Makes the mailbox the calling thread's. False when it is another's, and not to be waited
    /// for.
    fn own(&self, wait: bool) -> bool {
        let this = gettid();
        loop {
            let Err(owner) = self.busy.compare_exchange(0, this.0, AcqRel, Acquire) else {
                return true;
            };
            if !lives(Tid(owner))
                && self.busy.compare_exchange(owner, this.0, AcqRel, Acquire).is_ok()
            {
                return true;
            }
            if !wait {
                return false;
            }
            yield_now();
        }
    }

    fn ask(&self, hint: Hint, range: VirtRange, mask: u64) {
        let number = self.asked.fetch_add(1, Relaxed).wrapping_add(1);
        self.hint_start.store(range.start.0, Relaxed);
        self.hint_end.store(range.end.0, Relaxed);
        self.hint.store(u64::from(number) << 8 | hint as u64, Release);
        self.submit(HandlerRequest::Hint);
        let mut waited = Waited::default();
        loop {
            let answered = self.answered.load(Acquire);
            if answered == number || self.closed.load(Acquire) {
                return;
            }
            let woken =
                futex::wait(&self.answered, answered, Some(WAIT_SLICE), futex::Scope::Private);
            waited.turn(woken, mask);
        }
    }

    /// The hint in the mailbox.
    pub(crate) fn take_hint(&self) -> Option<(Hint, VirtRange)> {
        let word = self.hint.swap(0, AcqRel);
        let hint = Hint::of((word & 0xff) as u32)?;
        self.taken.store((word >> 8) as u32, Relaxed);
        Some((
            hint,
            VirtRange {
                start: VirtAddr(self.hint_start.load(Relaxed)),
                end: VirtAddr(self.hint_end.load(Relaxed)),
            },
        ))
    }

    /// True when the mailbox holds no hint that must be done.
    pub(crate) fn may_be_dropped(&self) -> bool {
        Hint::of((self.hint.load(Acquire) & 0xff) as u32) != Some(Hint::Release)
    }

    /// Puts back what was taken and could not be done.
    pub(crate) fn put_back(&self, hint: Hint) {
        self.hint.store(u64::from(self.taken.load(Relaxed)) << 8 | hint as u64, Release);
    }

    /// Says that what was taken is done.
    pub fn answer(&self) {
        self.answered.store(self.taken.load(Relaxed), Release);
        futex::wake(&self.answered, u32::MAX >> 1, futex::Scope::Private);
    }

    /// Called by a thread that has moved a mapping, or grown one in place, which now begins at
    /// `at`: returns when the handler has applied the change and all that happened before it (see
    /// [`crate::events::apply`], rule 6). `is_new`: it has just made it, and no other thread knows
    /// it.
    pub fn fence(&self, at: VirtAddr, is_new: bool) {
        // A signal handler of the program's might never come back, and its thread's place would be
        // gone for good.
        let Ok(mask) = block_all_signals() else { return };
        let claim = |f: &&Fence| f.state.compare_exchange(FREE, WRITTEN, AcqRel, Relaxed).is_ok();
        let fence = loop {
            match self.fences.iter().find(claim) {
                Some(fence) => break fence,
                None => yield_now(),
            }
        };
        fence.at.store(at.0 & !IS_NEW | usize::from(is_new), Relaxed);
        fence.state.store(WAITING, Release);
        self.submit(HandlerRequest::Fence);
        let mut waited = Waited::default();
        while fence.state.load(Acquire) != ANSWERED && !self.closed.load(Acquire) {
            let woken = futex::wait(&fence.state, WAITING, Some(WAIT_SLICE), futex::Scope::Private);
            waited.turn(woken, mask);
        }
        fence.state.store(FREE, Release);
        restore_signals(mask);
    }

    /// Lets the threads continue that wait at a fence, after `known` has seen where each one's
    /// mapping begins.
    ///
    /// A thread that waits came there after its change was read: the kernel holds a thread until
    /// then. So the caller, which has applied all that it has read, has applied that change.
    ///
    /// # Errors
    /// What `known` answers: that thread and those after it still wait.
    pub(crate) fn answer_fences<E>(
        &self,
        mut known: impl FnMut(VirtAddr, bool) -> Result<(), E>,
    ) -> Result<(), E> {
        for fence in self.fences.iter().filter(|f| f.state.load(Acquire) == WAITING) {
            let at = fence.at.load(Relaxed);
            known(VirtAddr(at & !IS_NEW), at & IS_NEW != 0)?;
            fence.state.store(ANSWERED, Release);
            futex::wake(&fence.state, 1, futex::Scope::Private);
        }
        Ok(())
    }

    /// Requests are no longer served: waiting threads continue.
    pub(crate) fn close(&self) {
        self.closed.store(true, Release);
        futex::wake(&self.answered, u32::MAX >> 1, futex::Scope::Private);
        for fence in &self.fences {
            futex::wake(&fence.state, u32::MAX >> 1, futex::Scope::Private);
        }
    }

    /// In a forked child: no thread has asked for anything.
    pub fn reset(&self) {
        self.fences.iter().for_each(|f| f.state.store(FREE, Relaxed));
        self.pages.iter().for_each(|entry| entry.state.store(FREE, Relaxed));
        self.busy.store(0, Relaxed);
        self.hint.store(0, Relaxed);
    }
}
