//! The handler of a forked child: it takes over from the parent's.

use std::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use swaptide_engine::Engine;
use swaptide_engine::event_loop::Handler;
use swaptide_engine::fork::Decline;
use swaptide_ipc::{ProcState, Segment, SlotIndex};
use swaptide_sys::Errno;
use swaptide_sys::affinity::go_first;
use swaptide_sys::errno::ErrnoText;
use swaptide_sys::lock::futex;
use swaptide_sys::thread::{abort_with, getpid, set_name, sleep};

use crate::lifecycle::{
    PARENT, salt, same_pid_namespace, serve, wait_for_supervisor, wait_for_wake,
};
use crate::log;
use crate::process::{self, ENGINE, empty_table, inherited_engine, request_hold, segment};
use crate::threads::start_workers;

/// Set to 1 by a forked child's handler when it serves faults; a futex word.
pub(crate) static TAKEN_OVER: AtomicU32 = AtomicU32::new(0);

/// Ends a forked child whose swapped memory is lost.
pub(crate) fn stop(errno: swaptide_sys::Errno) -> ! {
    abort_with(&[
        b"swaptide: a forked child could not take over its memory, and its parent does not answer \
        (",
        ErrnoText::new(errno).as_bytes(),
        b"); it is stopped rather than given wrong data",
    ])
}

/// Lets the forking thread of a child continue.
fn child_is_served() {
    TAKEN_OVER.store(1, Release);
    futex::wake(&TAKEN_OVER, 1, futex::Scope::Private);
}

/// All memory of this child is there, and its copy of the engine is never used again.
fn disown() {
    ENGINE.store(std::ptr::null_mut(), Release);
    child_is_served();
}

/// A slot, if there is one within a moment: the supervisor may not have cleared those of the dead
/// yet.
fn claim_soon(segment: &Segment) -> Option<SlotIndex> {
    for _ in 0..10 {
        if let Some(index) = segment.claim(getpid().0, PARENT.load(Relaxed)) {
            return Some(index);
        }
        sleep(Duration::from_millis(5));
    }
    None
}

/// Values of the segment's `fail` word: the child stops for some seconds before it takes over,
/// or for ever.
const SILENT_CHILD: u32 = 7;
const STUCK_CHILD: u32 = 8;

/// Stops where a test asks for it at this stage.
fn inject_stop(engine: &Engine, stage: u32) {
    let seconds = if stage == SILENT_CHILD { 4 } else { u64::MAX };
    if engine.injection().wants(stage) {
        sleep(Duration::from_secs(seconds));
    }
}

/// The handler of a forked child. Nothing is allocated before the parent has answered.
pub(crate) extern "C" fn child_handler_main(_: usize) {
    let Some(engine) = inherited_engine() else { return disown() };
    // Without a table of its own it would answer through the program's, which it must not close: it
    // says so and ends.
    let end = match empty_table(engine.fork.child_end()) {
        // SAFETY: the table is this thread's own.
        Ok(()) => unsafe { engine.fork.own_child_end() },
        Err(_) => {
            if let Err(errno) = engine.decline(engine.fork.take_child_end(), Decline::NoThread) {
                stop(errno);
            }
            return disown();
        }
    };
    set_name(c"swaptide");
    // A fault is a thread that waits.
    let goes_first = go_first();
    inject_stop(engine, SILENT_CHILD);
    let decline = |end, why| match engine.decline(end, why) {
        Ok(whole) => {
            disown();
            whole
        }
        Err(errno) => stop(errno),
    };
    // The parent has it mapped, and so has this process.
    let Some(segment) = segment() else {
        decline(end, Decline::TableFull);
        return;
    };
    if !same_pid_namespace(segment) {
        decline(end, Decline::Namespace);
        return;
    }
    let Some(index) = claim_soon(segment) else {
        if decline(end, Decline::TableFull) {
            // As any process that is not managed yet.
            wait_for_supervisor(segment, goes_first);
        }
        return;
    };
    let slot = segment.slot(index);
    slot.control.limit_bytes.store(engine.charge.limit(), Relaxed);
    slot.control.engage.store(1, Relaxed);
    let refused = || {
        slot.control.engage.store(0, Relaxed);
        slot.set_state(ProcState::Refused);
        disown();
    };
    let mut left = match engine.inherit(end, index) {
        Ok(Some(left)) => left,
        Ok(None) => return refused(),
        Err(errno) => stop(errno),
    };
    inject_stop(engine, STUCK_CHILD);
    let handler = match Handler::inherited(engine, index, salt(), &mut left) {
        Ok(handler) => Box::leak(Box::new(handler)),
        Err(error) => {
            log::line(&format!("a forked child gets all its memory and is not managed: {error}"));
            if let Err(errno) = left.declined() {
                stop(errno);
            }
            return refused();
        }
    };
    if !request_hold(engine) {
        // The parent has ended, and what happened since then is not known here.
        stop(Errno::SRCH);
    }
    // A parent that is gone by now has left everything that there was to leave.
    let _ = left.taken();
    drop(left);
    start_workers(engine);
    slot.set_state(ProcState::Engaged);
    child_is_served();
    serve(handler);
    loop {
        let seen = slot.control.wake_seq.load(Acquire);
        if process::leaves() {
            return;
        }
        wait_for_wake(slot, seen);
    }
}
