//! The end of a program that ends thread by thread.
//!
//! A process ends with its last thread, and the engine's threads are threads. A program whose
//! threads all end by themselves (`SYS_exit`, which libc does not see) would leave a process behind
//! in which only swaptide lives. So a thread looks whether the program's threads are gone: as long
//! as nothing is managed the thread that waits, and from then on a thread of its own, when the
//! supervisor sees that the first thread has ended.
//!
//! The status is the one that the last thread ended with, as far as it is known: by the hook of
//! `syscall`, or, if that was never used, from the first thread.
//!
//! Owns: the last status. Locks: none; nothing is allocated.

use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use swaptide_ipc::ProcSlot;
use swaptide_sys::engine_threads;
use swaptide_sys::lock::futex;
use swaptide_sys::process::leader_end;
use swaptide_sys::thread::{end_by_signal, exit_group, set_name, sleep};

use crate::process;

/// The exit status of the thread that ended last, and a bit that says there was one.
static LAST_STATUS: AtomicU64 = AtomicU64::new(0);
const STATUS_KNOWN: u64 = 1 << 32;

/// In a forked child: the threads are its parent's.
pub(crate) fn forked() {
    engine_threads::forget_all();
    process::forked_after_leaving();
    LAST_STATUS.store(0, Relaxed);
}

/// A thread of the program is about to end by itself.
pub(crate) fn ending(status: usize) {
    LAST_STATUS.store(STATUS_KNOWN | (status as u64 & 0xff), Release);
}

/// True when only the engine's threads are left, besides the first one, which has ended.
fn alone() -> bool {
    matches!(engine_threads::find_program_thread(Some), Ok(None))
}

/// Ends the process if only the engine is left in it.
pub(crate) fn end_if_alone() {
    if let Some(status) = leader_end()
        && alone()
    {
        let last = LAST_STATUS.load(Acquire);
        match status & 0x7f {
            _ if last & STATUS_KNOWN != 0 => exit_group((last & 0xff) as i32),
            0 => exit_group((status >> 8 & 0xff) as i32),
            // A filter of system calls ends a thread so, and the process with its last one.
            signal => end_by_signal(signal),
        }
    }
}

/// The thread that waits for the end of the first one. `PIDFD_THREAD` does not tell of it: newer
/// kernels keep that to themselves until all threads have ended. So the supervisor tells; if it is
/// gone, this thread looks for itself, now and then.
///
/// It is also the one thread of the engine that never waits for another: `look` is called now and
/// then, to see whether they are there. It ends when a retired engine's threads are to end.
pub(crate) fn watch(slot: &ProcSlot, look: impl Fn(), is_retired: impl Fn() -> bool) {
    set_name(c"swaptide-end");
    loop {
        let told = slot.control.leader_exited.load(Acquire);
        if process::leaves() && is_retired() {
            return;
        }
        look();
        if leader_end().is_some() {
            sleep(Duration::from_millis(10));
        } else {
            futex::wait(
                &slot.control.leader_exited,
                told,
                Some(Duration::from_secs(5)),
                futex::Scope::Shared,
            );
        }
        end_if_alone();
    }
}
