//! Failures that tests ask for, by words of the segment's header.
//!
//! Owns: the counts after which a failure is due. Nothing here does anything in a run that no test
//! has set up: each hook is a check of a word that is 0. An engine reads the header's words once,
//! at its start ([`Injection`]): what a process of the run writes there later fails nothing.
//!
//! Locks: none.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
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

/// Three fault servers, which read however few threads fault.
const FAULT_SERVERS: u32 = 18;

/// The failures that tests inject, as read from the header at one time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Injection {
    /// As [`swaptide_ipc::InjectionConfig`] says of the words of these names.
    pub(crate) fail: u32,
    pub(crate) stale_every: u32,
    pub(crate) part_every: u32,
    pub(crate) io_fault_every: u32,
}

impl Injection {
    /// Reads the words of the header.
    pub(crate) fn of(header: &Header) -> Injection {
        let words = &header.injection;
        Injection {
            fail: words.fail.load(Relaxed),
            stale_every: words.stale_every.load(Relaxed),
            part_every: words.part_every.load(Relaxed),
            io_fault_every: words.io_fault_every.load(Relaxed),
        }
    }

    /// True if the failure of this number is wanted.
    pub fn wants(self, fail: u32) -> bool {
        self.fail == fail
    }

    /// True when a test looks at what happens after a timeout: it does not want to wait long for
    /// it.
    pub(crate) fn shortens_timeouts(self) -> bool {
        self.fail != 0 && !self.forces_servers()
    }

    /// Bytes that compressed memory has address space for, if a test wants to see its end.
    pub(crate) fn pool_room(self) -> Option<usize> {
        self.wants(SMALL_POOL).then_some(SMALL_POOL_BYTES)
    }

    /// True when workers shall map and unmap memory without pause.
    pub(crate) fn churns_own_mappings(self) -> bool {
        self.wants(OWN_MAPPINGS)
    }

    /// True when fault servers shall serve also where one thread faults.
    pub(crate) fn forces_servers(self) -> bool {
        self.wants(FAULT_SERVERS)
    }

    /// Ends the calling thread, which reads from servers, if a test wants that.
    pub(crate) fn end_remote_reader(self) {
        if self.wants(REMOTE_READER_EXITS) {
            exit_thread();
        }
    }

    /// Stops for good if a test wants it here.
    pub(crate) fn stop_at(self, at: StopPoint) {
        while self.wants(at as u32) {
            sleep(Duration::from_millis(100));
        }
    }
}

/// True if a read of a swap area shall fail as for want of memory, where a test wants the failure
/// of this number. `reads`: those of the process so far.
pub fn is_read_short(fail: u32, reads: &AtomicU32) -> bool {
    match fail {
        SHORT_FOR_A_WHILE => reads.fetch_add(1, Relaxed) < SHORT_READS,
        SHORT_FOR_GOOD => true,
        _ => false,
    }
}

/// A place at which a test may stop a thread for good.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum StopPoint {
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

/// Fails in a worker, if a test wants that. `fails`: set by [`HandlerFaults::after_answer`].
///
/// # Panics
/// When a test wants it.
pub(crate) fn fail_worker(fails: &AtomicBool) {
    assert!(!fails.load(Relaxed), "a check failed in a worker, as a test wants it");
}

/// The failures that tests inject into the handler's faults.
pub(crate) struct HandlerFaults {
    wanted: Injection,
    /// Faults until this engine ends (0: never).
    fails_in: u32,
    /// Loads of several pages so far; one in `stale_every` counts as out of date (0: none).
    large_loads: u32,
    /// The same of fills that end half way.
    large_fills: u32,
}

impl HandlerFaults {
    pub(crate) fn new(wanted: Injection) -> HandlerFaults {
        let ends = (HANDLER_PANICS..=HANDLER_OUT_OF_MEMORY).contains(&wanted.fail);
        let fails_in = if ends { FAULTS_BEFORE_FAILURE } else { 0 };
        HandlerFaults { wanted, fails_in, large_loads: 0, large_fills: 0 }
    }

    /// True when this load of several pages is to be taken as out of date.
    pub(crate) fn is_stale(&mut self) -> bool {
        self.large_loads = self.large_loads.wrapping_add(1);
        self.wanted.stale_every != 0 && self.large_loads.is_multiple_of(self.wanted.stale_every)
    }

    /// The number of pages, of `len` (more than 1), that are filled: half of them, as if an event
    /// were unread by then, or all.
    pub(crate) fn part_of(&mut self, len: usize) -> usize {
        if len < 2 || self.wanted.part_every == 0 {
            return len;
        }
        self.large_fills = self.large_fills.wrapping_add(1);
        len / (1 + usize::from(self.large_fills.is_multiple_of(self.wanted.part_every)))
    }

    /// A fault was answered. `worker_fails` is what [`fail_worker`] looks at.
    pub(crate) fn after_answer(&mut self, worker_fails: &AtomicBool) {
        if self.fails_in > 0 {
            self.count_down(worker_fails);
        }
    }

    #[cold]
    fn count_down(&mut self, worker_fails: &AtomicBool) {
        self.fails_in -= 1;
        match self.wanted.fail {
            _ if self.fails_in > 0 => {}
            HANDLER_PANICS => panic!("a check failed (injected)"),
            WORKER_PANICS => worker_fails.store(true, Relaxed),
            HANDLER_EXITS => exit_thread(),
            _ => std::alloc::handle_alloc_error(std::alloc::Layout::new::<u64>()),
        }
    }
}
