//! The end of an agent that was put into a running program (`swaptide attach`): its threads end,
//! and the memory of swaptide's goes.
//!
//! Owns: where the library is. Locks: none.

use std::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Relaxed};
use std::time::Duration;

use swaptide_ipc::{ProcSlot, ProcState, WITHDRAW};
use swaptide_sys::engine_threads::is_any_but;
use swaptide_sys::lock::futex;
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::thread::{gettid, now, sleep};
use swaptide_sys::withdraw::unmap_all_and_exit;

use crate::log;
use crate::past_libc;
use crate::process::end_threads;

/// The time in which the engine's threads end. One may be at an NBD server.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const END_INTERVAL: Duration = Duration::from_micros(500);

static IMAGE_START: AtomicUsize = AtomicUsize::new(0);
static IMAGE_END: AtomicUsize = AtomicUsize::new(0);

/// Remembers where the library was put.
pub(crate) fn set_image(image: VirtRange) {
    IMAGE_START.store(image.start.0, Relaxed);
    IMAGE_END.store(image.end.0, Relaxed);
}

/// True if nothing of swaptide's shall stay in this process, and nothing of it is managed.
pub(crate) fn is_due(slot: &ProcSlot) -> bool {
    past_libc::is_program()
        && slot.control.detach.load(Acquire) == WITHDRAW
        && matches!(slot.state(), ProcState::Detached | ProcState::Refused)
}

/// Leaves the process, by the thread that waits for the supervisor. Returns if another thread does
/// not end: then the memory stays mapped.
pub(crate) fn withdraw(slot: &ProcSlot) {
    end_threads();
    // Those that wait for the first thread's end, and for forks.
    slot.signal_leader_exit();
    futex::wake(&slot.control.fork_hold, i32::MAX as u32, futex::Scope::Shared);
    let began = now();
    while is_any_but(gettid()) {
        if now().since(began) > END_TIMEOUT {
            return log::line("a thread of swaptide's does not end: it stays, and its memory");
        }
        sleep(END_INTERVAL);
    }
    let image = VirtRange {
        start: VirtAddr(IMAGE_START.load(Relaxed)),
        end: VirtAddr(IMAGE_END.load(Relaxed)),
    };
    log::line("withdrawn: nothing of swaptide's is in this process any more");
    // SAFETY: the program has no reference to the library, and this is the only thread of
    // swaptide's.
    if unsafe { unmap_all_and_exit(image) }.is_err() {
        log::line("no memory to leave this process with: swaptide's stays in it");
    }
}
