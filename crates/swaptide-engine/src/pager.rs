//! Answering a fault: the fault path, and adoption where the address is not managed yet.
//!
//! Owns: those two parts. Locks: theirs.
//!
//! Invariants
//! 1. A fault is answered by filling its page and waking, or by waking alone, in which case the
//!    thread faults again. None is forgotten: what cannot be answered now goes back to the queue.
//! 2. No fault is answered while a fork through no hook waits to be attended to.

use std::sync::atomic::Ordering::Relaxed;

use swaptide_ipc::Counter;
use swaptide_sys::thread::now;

use crate::EngineError;
use crate::engine::Engine;
use crate::events::reader::Interrupted;
use crate::fault::path::{FaultPath, Served};
use crate::mm::types::{PageNo, range_of};
use crate::requests::HandlerRequest;
use crate::sched::handed::Fault;
use crate::vma::adopt::Adopter;

/// Tries after which a thread is woken to fault afresh, so that other messages get their turn.
const MAX_TRIES: u32 = 64;
/// The same for an address that is not managed.
const MAX_ADOPT_TRIES: u32 = 8;
/// A thread that changes mappings without pause leaves moments only between the reading of its
/// event and its next one: one try in this many is made without reading first.
const TRY_WITHOUT_READING: u32 = 8;

/// Answers faults: brings pages in, and adopts memory that is not managed yet.
pub(crate) struct Pager {
    pub(crate) path: FaultPath,
    pub(crate) adopter: Adopter,
}

impl Pager {
    /// The pager of an engine's handler.
    ///
    /// # Errors
    /// When memory or a file of /proc is refused.
    pub(crate) fn new(engine: &'static Engine) -> Result<Pager, EngineError> {
        Ok(Pager { path: FaultPath::new(engine)?, adopter: Adopter::new() })
    }

    /// Answers one fault, or queues it again.
    pub(crate) fn answer(&mut self, mut fault: Fault) {
        let Pager { path, adopter } = self;
        let engine = path.engine;
        let started = now();
        let page = PageNo::of(fault.addr);
        path.installer.asked = Some(page);
        path.stall.answers_since(Some(started));
        if !path.reader.fork.is_busy() {
            // In the idle class it could keep a fork waiting.
            path.reader.cpu.follow(fault.tid, started, &engine.workers.tids);
        }
        engine.serving.handler.cpu.store(path.reader.cpu.own_cpu(), Relaxed);
        let served = path.serve(page, fault, started);
        path.stall.answers_since(None);
        path.installer.asked = None;
        let wake = |path: &mut FaultPath| {
            path.reader.is_about_to_wake();
            // Last: the thread may have this CPU at once.
            let _ = path.reader.uffd.wake(range_of(page, 1));
        };
        match served {
            Served::Filled => {
                let answered = now();
                engine.slot().faults.record(answered.since(started).as_nanos() as u64);
                engine.count(Counter::Pgmajfault, 1);
                path.reader.cpu.answered(answered);
                let is_busy = path.reader.fork.is_busy();
                if !path.reader.is_of_worker(fault)
                    && path.throttle.hold_fault(engine.slot(), page, is_busy)
                {
                    path.stall.stalls_from(engine.slot(), answered);
                    return;
                }
                path.stalls_until(answered);
                wake(path);
            }
            Served::Spurious => wake(path),
            Served::InFlight | Served::Taken => {}
            Served::NoBuffer => path.remote.wait(fault),
            Served::Again => {
                fault.tries += 1;
                if !fault.tries.is_multiple_of(TRY_WITHOUT_READING) {
                    // An interruption is attended to before the fault's next turn.
                    let _ = path.reader.drain();
                }
                if fault.tries > MAX_TRIES {
                    let _ = path.reader.uffd.wake(range_of(page, 1));
                } else {
                    path.reader.pending.push_front(fault);
                }
            }
            Served::Unmanaged => {
                path.reader.begin_alone();
                let interrupted = path.reader.drain().is_err();
                if interrupted
                    || fault.tries <= MAX_ADOPT_TRIES && adopter.adopt_at(path, fault.addr)
                {
                    fault.tries += u32::from(!interrupted);
                    path.reader.pending.push_front(fault);
                } else {
                    // Managed memory may have been moved there by what was just read, or by what
                    // is noted and not applied: the thread faults again then, as it does where the
                    // kernel refuses because a change is unread.
                    let is_unmanaged = !path.reader.fork.notes_events() && {
                        let mm = engine.mm.lock();
                        mm.changes.late.is_empty() && !mm.regions.overlaps(range_of(page, 1))
                    };
                    if is_unmanaged && adopter.has_fork_advice(engine, fault.addr) {
                        let _ = path.reader.uffd.zero_pages(range_of(page, 1), true);
                    }
                    let _ = path.reader.uffd.wake(range_of(page, 1));
                }
            }
        }
    }

    /// Looks for memory to adopt. False when an interruption left some undone, which is due again
    /// then.
    pub(crate) fn adopt(&mut self) -> bool {
        let adopted = self.adopter.adopt(&mut self.path);
        if let Err(Interrupted) = adopted {
            self.path.reader.note_request(HandlerRequest::Adopt);
        }
        adopted.is_ok()
    }

    /// Lets the threads continue that wait at a fence; what an interruption leaves undone is due
    /// again.
    pub(crate) fn answer_fences(&mut self) {
        if let Err(Interrupted) = self.adopter.answer_fences(&mut self.path) {
            self.path.reader.note_request(HandlerRequest::Fence);
        }
    }
}
