//! Which threads of this process are the engine's, and so which are the program's: whose end is
//! the end of the process, and whose descriptors are the program's.
//!
//! Owns: the ids of the engine's threads. The kernel writes an id before its thread runs, and
//! clears it when the thread ends, however it does. Locks: none; nothing is allocated.

use core::ffi::CStr;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, RawDir};
use rustix::io::Errno;

use crate::ids::Tid;
use crate::process::{is_kernel_worker, leader_end};
use crate::procfs::{ProcPath, parse_u64, read_file};

/// The engine's threads of this process.
static IDS: [AtomicU32; 32] = [const { AtomicU32::new(0) }; 32];
/// In the place of an id: that of a thread which is being made.
const PENDING: u32 = u32::MAX;

/// A word for the kernel to write a new thread's id to. `None` where there are more threads than
/// places: they keep a process alive whose other threads have ended, as if no thread looked.
pub(crate) fn take_place() -> Option<&'static AtomicU32> {
    IDS.iter().find(|place| place.compare_exchange(0, PENDING, Acquire, Relaxed).is_ok())
}

/// The thread was not made.
pub(crate) fn free_place(place: &AtomicU32) {
    place.store(0, Release);
}

/// True while there is one, or one is being made.
pub fn are_any() -> bool {
    IDS.iter().any(|place| place.load(Acquire) != 0)
}

/// True while there is another one than this, or one is being made.
pub fn is_any_but(tid: Tid) -> bool {
    IDS.iter().map(|place| place.load(Acquire)).any(|id| id != 0 && id != tid.0)
}

/// True for a thread of the engine.
pub fn is_of_engine(tid: Tid) -> bool {
    IDS.iter().any(|place| place.load(Acquire) == tid.0)
}

/// In a forked child: the threads are its parent's.
pub fn forget_all() {
    IDS.iter().for_each(|place| place.store(0, Relaxed));
}

/// The thread that began the program.
pub(crate) fn first_thread() -> Tid {
    Tid(rustix::process::getpid().as_raw_nonzero().get() as u32)
}

/// The first answer of `f` for a thread of the program other than the first one.
///
/// # Errors
/// When the threads cannot be listed.
pub fn find_program_thread<T>(mut f: impl FnMut(Tid) -> Option<T>) -> Result<Option<T>, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(c"/proc/self/task", flags, Mode::empty())?;
    let first = first_thread();
    let mut buf = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(dir, &mut buf);
    while let Some(entry) = entries.next() {
        let Some(tid) = parse_u64(entry?.file_name().to_bytes()) else { continue };
        let tid = Tid(tid as u32);
        if tid != first
            && !is_of_engine(tid)
            && !is_kernels(tid)
            && let Some(found) = f(tid)
        {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// True for a worker of io_uring, say, which the kernel lists among the threads of its user. Not by
/// its name, which a thread of the program may have as well.
fn is_kernels(tid: Tid) -> bool {
    let mut stat = [0u8; 1024];
    read_file(ProcPath::task(tid.0, "stat").as_c_str(), &mut stat).is_ok_and(is_kernel_worker)
}

/// A thread of the program that has its descriptors, where the first one has ended: that has none
/// then, and `/proc/self` is about it. `None` as long as it lives.
pub fn table_holder() -> Option<Tid> {
    leader_end().and_then(|_| find_program_thread(Some).ok().flatten())
}

/// Opens the program's standard error, from a thread that may have other descriptors. It does not
/// wait for a reader.
pub(crate) fn open_stderr() -> Option<OwnedFd> {
    let flags =
        OFlags::WRONLY | OFlags::APPEND | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let open = |path: &CStr| rustix::fs::open(path, flags, Mode::empty()).ok();
    if leader_end().is_none() {
        return open(c"/proc/self/fd/2");
    }
    find_program_thread(|tid| open(ProcPath::task(tid.0, "fd/2").as_c_str())).ok().flatten()
}
