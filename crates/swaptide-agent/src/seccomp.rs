//! Programs that put themselves under a filter of system calls (seccomp).
//!
//! A filter may end the thread, the process, or fail a call, for any system call that the program
//! itself does not make. So from the moment at which one is set, hooks make no system call but the
//! program's own:
//!
//! | elsewhere | here |
//! |---|---|
//! | hints, and management of large mappings before they fill | left out: such mappings are found later |
//! | waiting until a moved mapping is known; memory that must not be managed any more | by a fault request ([`swaptide_engine::requests::FaultRequest`]), which is a page fault |
//! | `process_madvise`, `shmat` over managed memory, a file that is opened with `O_DIRECT` | the process is detached first |
//! | a fork, a raw clone that shares memory or forks | the process is detached first, also by a fault request; its child is not managed |
//! | `mremap` over several mappings that would be one without swaptide | by more calls of it, and one of `mmap`, if they grow; `EFAULT` for a fixed place |
//!
//! Owns: the word that tells of it. It is the process's: a thread that makes another one passes its
//! filter on, and which threads have one is not known. A filter that is set by a bare instruction
//! is looked for when management begins, and not seen later.
//!
//! Locks: none.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::fs::{Mode, OFlags, RawDir};
use swaptide_sys::procfs::{ProcPath, parse_u64, read_file};
use swaptide_sys::thread::{Tid, gettid};

use crate::marks::is_guest;
use crate::real;

/// The number of threads that are about to set a filter, and the flag [`CONFINED`]. While one of
/// them tries, another thread may be under a filter already; so only the thread that tried takes
/// its attempt back, and none the flag.
static FILTERS: AtomicU32 = AtomicU32::new(0);
/// A filter was set. It stays.
const CONFINED: u32 = 1 << 31;
/// Offset of the thread id in a control block of this libc; 0: not known.
static TID_AT: AtomicU32 = AtomicU32::new(0);

/// True if a filter was set in this process, or a thread is about to set one.
#[inline]
pub(crate) fn is() -> bool {
    FILTERS.load(Relaxed) != 0
}

/// Makes a system call that sets a filter. If it fails, nothing has changed by it. A child that is
/// forked meanwhile takes itself to be under one.
pub(crate) fn set(call: impl FnOnce() -> isize) -> isize {
    // The child of a vfork has its parent's memory: what it does to itself does not concern the
    // parent.
    if FILTERS.load(Relaxed) & CONFINED != 0 || is_guest() {
        return call();
    }
    FILTERS.fetch_add(1, Relaxed);
    let word = call();
    if !(-4095..0).contains(&word) {
        FILTERS.fetch_or(CONFINED, Relaxed);
    }
    FILTERS.fetch_sub(1, Relaxed);
    word
}

/// True for the arguments (operation and filter) of a `seccomp` that may set one. Without a filter
/// the call only asks whether the kernel knows it.
pub(crate) fn sets(operation: usize, filter: usize) -> bool {
    operation == SECCOMP_SET_MODE_STRICT || operation == SECCOMP_SET_MODE_FILTER && filter != 0
}

/// The same for the arguments of `prctl`: option, mode and filter.
pub(crate) fn sets_by_prctl(option: usize, mode: usize, filter: usize) -> bool {
    // The modes are numbered otherwise than the operations.
    option == PR_SET_SECCOMP && (mode != SECCOMP_MODE_FILTER || filter != 0)
}

/// Finds the place where libc keeps a thread's id. Called by the constructor.
pub(crate) fn find() {
    const GLIBC: usize = 0x2d0;
    let block = real::thread_pointer();
    // SAFETY: within the first thread's control block.
    if unsafe { ((block + GLIBC) as *const u32).read_volatile() } == gettid().0 {
        TID_AT.store(GLIBC as u32, Relaxed);
    }
}

/// The calling thread's id, from libc's record of it where no call may be made.
pub(crate) fn own_tid() -> Tid {
    match TID_AT.load(Relaxed) {
        at if at != 0 && is() => {
            // SAFETY: within this thread's control block.
            Tid(unsafe { ((real::thread_pointer() + at as usize) as *const u32).read_volatile() })
        }
        _ => gettid(),
    }
}

/// The number in the line of a status file that begins with `name`.
fn number_of(text: &[u8], name: &[u8]) -> Option<u64> {
    let line = text.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name))?;
    parse_u64(line.trim_ascii())
}

/// Looks for a thread that is under more filters than the calling one, which is swaptide's own.
pub(crate) fn look() {
    let filters = |tid: u32| {
        let mut text = [0u8; 4096];
        let text = read_file(ProcPath::task(tid, "status").as_c_str(), &mut text).ok()?;
        // A kernel before 5.9 does not give the number.
        Some((number_of(text, b"Seccomp:")?, number_of(text, b"Seccomp_filters:")))
    };
    let own = filters(gettid().0);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(dir) = rustix::fs::open(c"/proc/self/task", flags, Mode::empty()) else { return };
    let mut buf = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(dir, &mut buf);
    while let Some(Ok(entry)) = entries.next() {
        let Some(tid) = parse_u64(entry.file_name().to_bytes()) else { continue };
        if filters(tid as u32).is_some_and(|theirs| Some(theirs) != own) {
            FILTERS.fetch_or(CONFINED, Relaxed);
        }
    }
}

/// Option of `prctl` that sets a filter.
const PR_SET_SECCOMP: usize = linux_raw_sys::prctl::PR_SET_SECCOMP as usize;
const SECCOMP_MODE_FILTER: usize = linux_raw_sys::ptrace::SECCOMP_MODE_FILTER as usize;
/// Operations of `seccomp` that set one.
const SECCOMP_SET_MODE_STRICT: usize = linux_raw_sys::ptrace::SECCOMP_SET_MODE_STRICT as usize;
pub(crate) const SECCOMP_SET_MODE_FILTER: usize =
    linux_raw_sys::ptrace::SECCOMP_SET_MODE_FILTER as usize;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_by_name() {
        let old = b"NoNewPrivs:\t0\nSeccomp:\t2\n\
            Speculation_Store_Bypass:\tvulnerable\nCpus_allowed:\t3\n";
        assert_eq!(
            (number_of(old, b"Seccomp:"), number_of(old, b"Seccomp_filters:")),
            (Some(2), None)
        );
        let new = b"Seccomp:\t0\nSeccomp_filters:\t12\nCpus_allowed:\t3\n";
        assert_eq!(
            (number_of(new, b"Seccomp:"), number_of(new, b"Seccomp_filters:")),
            (Some(0), Some(12))
        );
    }
}
