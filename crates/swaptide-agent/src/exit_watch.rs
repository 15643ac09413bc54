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
//! Owns: the ids of the engine's threads, and the last status. Locks: none; nothing is allocated.

use std::mem::MaybeUninit;
use std::sync::atomic::{
    AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, RawDir};
use swaptide_ipc::ProcSlot;
use swaptide_sys::lock::futex;
use swaptide_sys::process::{is_kernel_worker, leader_end};
use swaptide_sys::procfs::{ProcPath, parse_u64, read_file};
use swaptide_sys::thread::{Tid, end_by_signal, exit_group, getpid, set_name, sleep};

/// The engine's threads of this process.
static ENGINE_THREADS: [AtomicU32; 16] = [const { AtomicU32::new(0) }; 16];
/// What a thread of the program ended with last: its status, and a bit that says there was one.
static LAST_STATUS: AtomicU64 = AtomicU64::new(0);
const STATUS_KNOWN: u64 = 1 << 32;

/// Notes a thread of the engine.
pub(crate) fn note(tid: Tid) {
    // More than there are places for would keep the process alive after its end, as if no
    // thread looked.
    let _ = ENGINE_THREADS
        .iter()
        .any(|place| place.compare_exchange(0, tid.0, Release, Relaxed).is_ok());
}

/// True for a thread of the engine.
pub(crate) fn is_ours(tid: Tid) -> bool {
    ENGINE_THREADS.iter().any(|place| place.load(Acquire) == tid.0)
}

/// A thread of the engine is about to end: its number may come to be one of the program's.
pub(crate) fn forget(tid: Tid) {
    for place in &ENGINE_THREADS {
        let _ = place.compare_exchange(tid.0, 0, Release, Relaxed);
    }
}

/// In a forked child: the threads are its parent's.
pub(crate) fn forked() {
    ENGINE_THREADS.iter().for_each(|place| place.store(0, Relaxed));
    LAST_STATUS.store(0, Relaxed);
}

/// A thread of the program is about to end by itself.
pub(crate) fn ending(status: usize) {
    LAST_STATUS.store(STATUS_KNOWN | (status as u64 & 0xff), Release);
}

/// True for a worker of io_uring, say, which the kernel lists among the threads of its user. Not by
/// its name, which a thread of the program may have as well.
fn is_kernels(tid: u32) -> bool {
    let mut stat = [0u8; 1024];
    read_file(ProcPath::task(tid, "stat").as_c_str(), &mut stat).is_ok_and(is_kernel_worker)
}

/// True when only the engine's threads are left, besides the first one, which has ended.
fn alone() -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(dir) = rustix::fs::open(c"/proc/self/task", flags, Mode::empty()) else { return false };
    let mut buf = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(dir, &mut buf);
    while let Some(entry) = entries.next() {
        let Ok(entry) = entry else { return false };
        let Some(tid) = parse_u64(entry.file_name().to_bytes()) else { continue };
        if tid as u32 != getpid().0
            && !ENGINE_THREADS.iter().any(|place| place.load(Acquire) == tid as u32)
            && !is_kernels(tid as u32)
        {
            return false;
        }
    }
    true
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
/// then, to see whether they are there.
pub(crate) fn watch(slot: &ProcSlot, look: impl Fn()) -> ! {
    set_name(c"swaptide-end");
    loop {
        look();
        let told = slot.control.leader_exited.load(Acquire);
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
