//! Failures that tests ask for, by words of the segment's header.
//!
//! Owns: the counts after which a failure is due. Nothing here does anything in a run that no test
//! has set up: each hook is a look at a word that is 0.
//!
//! Locks: none.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Acquire, Ordering::Relaxed};
use std::time::Duration;

use swaptide_ipc::Header;
use swaptide_sys::thread::{exit_thread, sleep};

/// The handler finds a check failed.
const HANDLER_PANICS: u32 = 1;
/// A worker finds a check failed.
const WORKER_PANICS: u32 = 2;
/// The handler's thread ends.
const HANDLER_EXITS: u32 = 3;
/// The handler cannot allocate.
const HANDLER_OUT_OF_MEMORY: u32 = 4;
/// A thread that reads from servers ends with an order in its hand.
const REMOTE_READER_EXITS: u32 = 5;
/// Workers map and unmap memory of the engine's without pause, so that it comes to lie where the
/// program's was.
const OWN_MAPPINGS: u32 = 6;

/// The first reads of swap areas in a process ([`SHORT_READS`]) fail as for want of memory, or all.
const SHORT_FOR_A_WHILE: u32 = 14;
const SHORT_FOR_GOOD: u32 = 15;
const SHORT_READS: u32 = 60;

/// Compressed memory has address space for little.
const SMALL_POOL: u32 = 16;
const SMALL_POOL_BYTES: usize = 1 << 20;

/// Bytes that compressed memory has address space for, if a test wants to see its end.
pub(crate) fn pool_room(header: &Header) -> Option<usize> {
    (header.injection.fail.load(Relaxed) == SMALL_POOL).then_some(SMALL_POOL_BYTES)
}

/// Whether a read of a swap area shall fail as for want of memory. `reads`: those of the process so
/// far.
pub fn is_read_short(header: &Header, reads: &AtomicU32) -> bool {
    match header.injection.fail.load(Relaxed) {
        SHORT_FOR_A_WHILE => reads.fetch_add(1, Relaxed) < SHORT_READS,
        SHORT_FOR_GOOD => true,
        _ => false,
    }
}

/// A place at which a test may have a thread stand still for good.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum Standstill {
    /// The handler, before it is prepared for a fork.
    BeforeFork = 10,
    /// The handler, when it is prepared.
    Prepared = 11,
    /// The handler, while a child is served.
    HandingOver = 12,
    /// The child of a fork that is followed, before it says that it is there.
    ChildStarts = 13,
}

/// Faults before an engine ends that a test wants to end.
const FAULTS_BEFORE_FAILURE: u32 = 500;

/// Stands still while the test wants it.
pub(crate) fn stand_still(header: &Header, at: Standstill) {
    while header.injection.fail.load(Acquire) == at as u32 {
        sleep(Duration::from_millis(100));
    }
}

/// True when a test looks at what happens after a timeout: it does not want to wait long for it.
pub(crate) fn shortens_timeouts(header: &Header) -> bool {
    header.injection.fail.load(Relaxed) != 0
}

/// Ends the calling thread, which reads from servers, if a test wants that. `fail`: the header's
/// word.
pub(crate) fn end_remote_reader(fail: &AtomicU32) {
    if fail.load(Relaxed) == REMOTE_READER_EXITS {
        exit_thread();
    }
}

/// True when workers shall map and unmap memory without pause.
pub(crate) fn churns_own_mappings(header: &Header) -> bool {
    header.injection.fail.load(Relaxed) == OWN_MAPPINGS
}

/// Fails in a worker, if a test wants that. `fails`: set by [`HandlerFaults::after_answer`].
///
/// # Panics
/// When a test wants it.
pub(crate) fn fail_worker(fails: &AtomicBool) {
    assert!(!fails.load(Relaxed), "a check failed in a worker, as a test wants it");
}

/// What tests want of the handler's faults.
pub(crate) struct HandlerFaults {
    /// Faults until this engine ends (0: never).
    fails_in: u32,
    /// Loads of several pages so far; one in `stale_every` counts as out of date (0: none).
    large_loads: u32,
    stale_every: u32,
    /// The same of fills that end half way.
    large_fills: u32,
    part_every: u32,
}

impl HandlerFaults {
    /// What the header's words ask for.
    pub(crate) fn new(header: &Header) -> HandlerFaults {
        let ends =
            (HANDLER_PANICS..=HANDLER_OUT_OF_MEMORY).contains(&header.injection.fail.load(Relaxed));
        HandlerFaults {
            fails_in: if ends { FAULTS_BEFORE_FAILURE } else { 0 },
            large_loads: 0,
            stale_every: header.injection.stale_every.load(Relaxed),
            large_fills: 0,
            part_every: header.injection.part_every.load(Relaxed),
        }
    }

    /// True when this load of several pages is to be taken as out of date.
    pub(crate) fn is_stale(&mut self) -> bool {
        self.large_loads = self.large_loads.wrapping_add(1);
        self.stale_every != 0 && self.large_loads.is_multiple_of(self.stale_every)
    }

    /// How many of `len` pages (more than 1) are filled: half of them, as if an event were unread
    /// by then, or all.
    pub(crate) fn part_of(&mut self, len: usize) -> usize {
        if len < 2 || self.part_every == 0 {
            return len;
        }
        self.large_fills = self.large_fills.wrapping_add(1);
        len / (1 + usize::from(self.large_fills.is_multiple_of(self.part_every)))
    }

    /// A fault was answered. `worker_fails` is what [`fail_worker`] looks at.
    pub(crate) fn after_answer(&mut self, header: &Header, worker_fails: &AtomicBool) {
        if self.fails_in > 0 {
            self.count_down(header, worker_fails);
        }
    }

    #[cold]
    fn count_down(&mut self, header: &Header, worker_fails: &AtomicBool) {
        self.fails_in -= 1;
        match header.injection.fail.load(Relaxed) {
            _ if self.fails_in > 0 => {}
            HANDLER_PANICS => panic!("a check failed (injected)"),
            WORKER_PANICS => worker_fails.store(true, Relaxed),
            HANDLER_EXITS => exit_thread(),
            _ => std::alloc::handle_alloc_error(std::alloc::Layout::new::<u64>()),
        }
    }
}
