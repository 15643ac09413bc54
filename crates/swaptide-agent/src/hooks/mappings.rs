//! System calls that change what memory is, and of which the kernel does not tell a userfaultfd, or
//! not what is needed.
//!
//! | call | what the kernel leaves out | what is done here |
//! |---|---|---|
//! | `madvise(MADV_GUARD_INSTALL)` | no event | the contents are given up with `MADV_DONTNEED`, which sends one |
//! | `madvise(MADV_FREE)` | the event does not say that the pages stay | the pages are freed at once |
//! | `madvise(MADV_WIPEONFORK)`, `MADV_DONTFORK` | no event | brought in, and managed no more |
//! | `MADV_DOFORK` where forks are followed | a child that is not followed would get managed memory | brought in, and let go first |
//! | `MADV_NORMAL`, `RANDOM`, `SEQUENTIAL` where forks are followed | they are swaptide's mark | given for files alone |
//! | `shmat(SHM_REMAP)` | no event | attached elsewhere and moved there with `mremap`, which sends one |
//! | `mlockall` | swaptide's memory is locked as well | that is unlocked |
//! | `ioctl(UFFDIO_REGISTER)` | `EBUSY`: swaptide has the range | brought in, and let go first |
//! | `ioctl(UFFDIO_MOVE)` | the source may be out | brought in, and let go first |
//!
//! The bare instruction goes past this module; `docs/semantics.md` says what happens then.
//!
//! Owns: nothing. Locks: none. Nothing is allocated: all of this may run in a signal handler.

use std::ffi::{c_int, c_ulong, c_void};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use linux_raw_sys::general as k;
use swaptide_engine::mm::types::MANAGED_END;
use swaptide_engine::requests::FaultRequest;
use swaptide_engine::requests::fork_control::NO_FORK;
use swaptide_sys::Errno;
use swaptide_sys::maps::MapsFile;
use swaptide_sys::mem::unlock_own_ranges;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::raw::syscall6;
use swaptide_sys::thread::sleep;
use swaptide_sys::uffd::{UFFDIO_MOVE, UFFDIO_REGISTER};

use crate::forking::{ForkWait, Turn};
use crate::pages::excluded;
use crate::probe;
use crate::process;
use crate::real;
use crate::seccomp;

const SYS_IOCTL: u32 = k::__NR_ioctl;
const SYS_MADVISE: u32 = k::__NR_madvise;
const SYS_SHMAT: u32 = k::__NR_shmat;
const SYS_SHMCTL: u32 = k::__NR_shmctl;
const SYS_SHMDT: u32 = k::__NR_shmdt;
const SYS_MREMAP: u32 = k::__NR_mremap;
const SYS_MMAP: u32 = k::__NR_mmap;
const SYS_MLOCKALL: u32 = k::__NR_mlockall;

const MADV_DONTNEED: usize = k::MADV_DONTNEED as usize;
const MADV_FREE: c_int = k::MADV_FREE as c_int;
const MADV_GUARD_INSTALL: c_int = k::MADV_GUARD_INSTALL as c_int;
/// `MADV_WIPEONFORK`: a forked child has another idea of the range's contents than its parent. Such
/// memory is not managed.
const MADV_WIPEONFORK: c_int = k::MADV_WIPEONFORK as c_int;
/// `MADV_DONTFORK`: a child does not get it. Where forks are followed, that is how managed memory
/// is kept out of others (`engine/src/mm/dontfork.rs`), so what the program keeps out itself is not
/// managed.
const MADV_DONTFORK: c_int = k::MADV_DONTFORK as c_int;
const MADV_DOFORK: c_int = k::MADV_DOFORK as c_int;
const EAGAIN: isize = linux_raw_sys::errno::EAGAIN as isize;

/// The pages of a range that can be managed; `None` where there are none.
pub(crate) fn pages(addr: usize, len: usize) -> Option<VirtRange> {
    let end = addr.checked_add(len)?.min(MANAGED_END.0);
    (addr < end)
        .then(|| VirtRange { start: VirtAddr(addr).page_down(), end: VirtAddr(end).page_up() })
}

/// Has a range brought in and let go. False when some of it could not be brought in. While a thread
/// forks nothing may be let go: that is waited for, with a bound ([`ForkWait`]).
pub(crate) fn release_range(range: VirtRange) -> bool {
    const MAX_TRIES: usize = 200;
    if seccomp::is() {
        const MAX_FAULT_REQUESTS: usize = 10_000;
        return (0..MAX_FAULT_REQUESTS).any(|_| {
            process::engine_without_calls().is_none_or(|engine| {
                engine.handler_requests.submit_by_fault(FaultRequest::Release, range)
            })
        });
    }
    let mut wait = ForkWait::new();
    let mut tries = 0;
    while process::engine().is_some_and(|engine| !engine.handler_requests.release(range)) {
        match wait.turn() {
            Turn::Waits => {}
            Turn::NoFork if tries < MAX_TRIES => tries += 1,
            Turn::NoFork | Turn::Over => return false,
        }
        sleep(Duration::from_millis(1));
    }
    true
}

/// True for advice that does more here than the call. All of it is for one's own process alone.
pub(crate) fn matters(advice: c_int) -> bool {
    matches!(advice, MADV_FREE | MADV_GUARD_INSTALL | MADV_WIPEONFORK)
        || matches!(advice, MADV_DONTFORK | MADV_DOFORK) && process::may_follow_forks()
}

/// True for advice that the engine marks managed memory with, or would take that mark away, where
/// forks are followed ([`swaptide_engine::mm`]): to memory without a file it means nothing.
pub(crate) fn is_mark(advice: c_int) -> bool {
    matches!(advice as u32, k::MADV_NORMAL | k::MADV_RANDOM | k::MADV_SEQUENTIAL)
        && !seccomp::is()
        && process::engine().is_some_and(|engine| engine.fork.followed)
}

/// Forwards advice that doubles as swaptide's fork mark, for file mappings only. Returns the raw
/// result of the system call.
fn advise_files(addr: usize, len: usize, call: impl Fn(usize, usize) -> isize) -> isize {
    let Some(end) = addr.checked_add(len).map(|end| VirtAddr(end).page_up().0) else {
        return call(addr, len);
    };
    let Ok(maps) = MapsFile::open_high() else { return call(addr, len) };
    if !addr.is_multiple_of(PAGE_SIZE) || end <= addr {
        return call(addr, len);
    }
    let (mut at, mut word) = (addr, 0);
    while at < end {
        let Ok(next) = maps.vma_at_or_next(VirtAddr(at)) else { return call(addr, len) };
        let Some(vma) = next.as_ref().map(|info| info.vma()).filter(|vma| vma.range.start.0 < end)
        else {
            return -ENOMEM;
        };
        if vma.range.start.0 > at {
            word = -ENOMEM;
        }
        let (from, to) = (vma.range.start.0.max(at), vma.range.end.0.min(end));
        if !vma.is_private_anon() {
            match call(from, to - from) {
                0 => {}
                failed if failed == -ENOMEM => word = failed,
                failed => return failed,
            }
        }
        at = to;
    }
    word
}

/// Makes `call`, which lets children inherit a range, after the range is no longer managed. Returns
/// the raw result of the system call, or `-EAGAIN`.
fn let_fork(range: VirtRange, call: impl Fn() -> isize) -> isize {
    let _kept = excluded::exclude_for_now(range);
    // During a fork that is followed it is open, and closed afterwards.
    let is_forking = || {
        process::engine_without_calls()
            .is_some_and(|engine| engine.fork.phase.load(Relaxed) != NO_FORK)
    };
    if release_range(range) || is_forking() { call() } else { -EAGAIN }
}

/// madvise(2), with the userfaultfd event that the kernel does not send for some advice. Returns
/// the raw result of the system call.
pub(crate) fn advise(addr: usize, len: usize, advice: c_int) -> isize {
    // SAFETY: the arguments are the program's own; whatever the call does is what the program asked
    // for.
    let call =
        |advice: usize| unsafe { syscall6(SYS_MADVISE, [addr, len, advice, 0, 0, 0]) as isize };
    match advice {
        _ if is_mark(advice) => advise_files(addr, len, |addr, len| {
            // SAFETY: the arguments are the program's own; the call does only what the program
            // asked for.
            unsafe { syscall6(SYS_MADVISE, [addr, len, advice as usize, 0, 0, 0]) as isize }
        }),
        _ if !matters(advice) => call(advice as usize),
        MADV_DOFORK => match pages(addr, len) {
            Some(range) => let_fork(range, || call(advice as usize)),
            None => call(advice as usize),
        },
        // Under a filter no other advice may be given.
        _ if advice == MADV_WIPEONFORK
            || advice == MADV_DONTFORK
            || seccomp::is() && process::engine_without_calls().is_some() =>
        {
            if let Some(range) = pages(addr, len) {
                if matches!(advice, MADV_WIPEONFORK | MADV_DONTFORK) {
                    excluded::keep_apart(range);
                } else {
                    excluded::exclude(range);
                }
                if !release_range(range) {
                    return -EAGAIN;
                }
            }
            call(advice as usize)
        }
        _ => {
            let engine = process::engine();
            if let Some(engine) = engine.filter(|_| advice == MADV_GUARD_INSTALL) {
                engine.known.guarded.store(true, Relaxed);
            }
            let result = call(advice as usize);
            if result == 0 && engine.is_some() {
                // Both have said that the contents may go at once: so nothing else is lost by this.
                call(MADV_DONTNEED);
                if advice == MADV_GUARD_INSTALL {
                    // A page that was on its way may have come over the guard, and went again.
                    return call(advice as usize);
                }
            } else if engine.is_some() && advice == MADV_GUARD_INSTALL {
                forget_guarded(addr, len);
            }
            result
        }
    }
}

/// Has the engine forget what guards were put over by a call that failed: the kernel leaves out
/// what is not mapped, and stops at the first mapping that may have none. Each mapping up to there
/// is guarded again, alone, so that nothing is given up but what that says of. They are looked up
/// at once: what another thread maps in a hole from then on is not meant.
fn forget_guarded(addr: usize, len: usize) {
    const MAX_PIECES: usize = 64;
    // Where the arguments are none the kernel has done nothing.
    if !addr.is_multiple_of(PAGE_SIZE) {
        return;
    }
    let end = len.checked_next_multiple_of(PAGE_SIZE).and_then(|len| addr.checked_add(len));
    let (Some(end), Ok(maps)) = (end, MapsFile::open_high()) else { return };
    let mut pieces = [(0, 0); MAX_PIECES];
    let (mut at, mut count) = (addr, 0);
    while at < end
        && count < MAX_PIECES
        && let Ok(Some(info)) = maps.vma_at_or_next(VirtAddr(at))
    {
        let range = info.vma().range;
        let (from, to) = (range.start.0.max(at), range.end.0.min(end));
        if from >= to {
            break;
        }
        pieces[count] = (from, to - from);
        (at, count) = (to, count + 1);
    }
    drop(maps);
    for (from, len) in &pieces[..count] {
        // SAFETY: the program itself has said that these contents may go, and asked for the guards.
        let call = |advice: c_int| unsafe {
            syscall6(SYS_MADVISE, [*from, *len, advice as usize, 0, 0, 0]) as isize
        };
        if call(MADV_GUARD_INSTALL) != 0 {
            return;
        }
        // As where the whole call succeeds.
        call(MADV_DONTNEED as c_int);
        call(MADV_GUARD_INSTALL);
    }
}

/// mlockall(2): what is there is locked as it is touched, and not filled at once. Filled at once,
/// all the address space that swaptide has reserved and not used would become memory. Swaptide's
/// own memory is not locked.
pub(crate) fn lock_all(flags: usize) -> isize {
    // SAFETY: locking memory changes no data.
    let result = unsafe {
        syscall6(SYS_MLOCKALL, [flags | k::MCL_ONFAULT as usize, 0, 0, 0, 0, 0]) as isize
    };
    if result == 0 && !seccomp::is() {
        unlock_own_ranges();
    }
    result
}

/// Stands in front of libc's `mlockall`.
///
/// # Safety
/// As for mlockall(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    real::libc_result(lock_all(flags as usize)) as c_int
}

const ENOMEM: isize = linux_raw_sys::errno::ENOMEM as isize;
const SHM_RND: usize = 0o20000;
const SHM_REMAP: usize = 0o40000;

/// Bytes of a segment of System V shared memory, as the caller may read them.
fn segment_len(id: usize) -> Option<usize> {
    const IPC_STAT: usize = 2;
    /// `shm_segsz` in `struct shmid64_ds`, in words.
    const SIZE_AT: usize = 6;
    let mut about = [0usize; 32];
    // SAFETY: the kernel writes 112 bytes.
    let result = unsafe {
        syscall6(SYS_SHMCTL, [id, IPC_STAT, about.as_mut_ptr() as usize, 0, 0, 0]) as isize
    };
    (result == 0 && about[SIZE_AT] > 0).then_some(about[SIZE_AT])
}

/// shmat(2), with the event that the kernel leaves out where a segment is put over managed memory.
/// Returns the raw result of the system call.
pub(crate) fn attach(id: usize, addr: usize, flags: usize) -> isize {
    // SAFETY: the arguments are the program's own; whatever the call does is what the program asked
    // for.
    let call = |addr: usize, flags: usize| unsafe {
        syscall6(SYS_SHMAT, [id, addr, flags, 0, 0, 0]) as isize
    };
    let at = if flags & SHM_RND != 0 { VirtAddr(addr).page_down().0 } else { addr };
    if seccomp::is() {
        if flags & SHM_REMAP != 0 {
            process::detach_without_calls();
        }
        return call(addr, flags);
    }
    let is_over = flags & SHM_REMAP != 0
        && at != 0
        && at.is_multiple_of(PAGE_SIZE)
        && process::engine().is_some();
    let Some(range) = is_over.then(|| segment_len(id)).flatten().and_then(|len| pages(at, len))
    else {
        return call(addr, flags);
    };
    // Elsewhere first: refused, it leaves what is mapped here as it is.
    let elsewhere = call(0, flags & !(SHM_REMAP | SHM_RND));
    if elsewhere == -ENOMEM {
        // A limit on address space, which the call itself may keep to: its pages go, and no more.
        let _kept = excluded::exclude_for_now(range);
        return if release_range(range) { call(addr, flags) } else { elsewhere };
    }
    if (-4095..0).contains(&elsewhere) {
        return elsewhere;
    }
    const MAYMOVE_FIXED: usize = (k::MREMAP_MAYMOVE | k::MREMAP_FIXED) as usize;
    let (from, len) = (elsewhere as usize, range.len());
    // SAFETY: the segment that was just attached moves to where the program wants it.
    let moved = unsafe { syscall6(SYS_MREMAP, [from, len, len, MAYMOVE_FIXED, at, 0]) as isize };
    if moved == at as isize {
        return moved;
    }
    // SAFETY: that attachment is not in use.
    unsafe { syscall6(SYS_SHMDT, [from, 0, 0, 0, 0, 0]) };
    // The two overlap. What is there goes first, with an event; the segment can be attached, as was
    // seen.
    const PRIVATE_ANON_FIXED: usize =
        (k::MAP_PRIVATE | k::MAP_ANONYMOUS | k::MAP_FIXED | k::MAP_NORESERVE) as usize;
    // SAFETY: the program has asked for this range to be replaced.
    unsafe { syscall6(SYS_MMAP, [at, len, 0, PRIVATE_ANON_FIXED, usize::MAX, 0]) };
    call(addr, flags)
}

/// Stands in front of libc's `shmat`.
///
/// # Safety
/// As for shmat(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn shmat(id: c_int, addr: *const c_void, flags: c_int) -> *mut c_void {
    real::libc_result(attach(id as usize, addr as usize, flags as usize)) as *mut c_void
}

/// The range that a call on a userfaultfd of the program's needs for itself: where it begins in its
/// argument, and its length.
fn needed(request: u32, arg: usize) -> Option<VirtRange> {
    if !matches!(request, UFFDIO_REGISTER | UFFDIO_MOVE) {
        return None;
    }
    // What cannot be read is the kernel's to refuse.
    let words: [usize; 3] = probe::read_words(arg)?;
    if request == UFFDIO_REGISTER { pages(words[0], words[1]) } else { pages(words[1], words[2]) }
}

/// Makes an ioctl after the memory that it needs was detached.
#[inline]
fn control(request: usize, arg: usize, call: impl FnOnce() -> isize, refused: isize) -> isize {
    const UFFDIO_TYPE: u32 = linux_raw_sys::general::UFFDIO << 8;
    let request = request as u32;
    let engine = || if seccomp::is() { process::engine_without_calls() } else { process::engine() };
    if request & 0xff00 != UFFDIO_TYPE || engine().is_none() {
        return call();
    }
    let Some(range) = needed(request, arg) else { return call() };
    // Afterwards the kernel refuses to give what is the program's to swaptide.
    let _kept = excluded::exclude_for_now(range);
    if !release_range(range) {
        real::set_errno(Errno::AGAIN);
        return refused;
    }
    call()
}

/// ioctl(2). Returns the raw result of the system call.
pub(crate) fn control_raw(fd: usize, request: usize, arg: usize) -> isize {
    // SAFETY: the arguments are the program's own.
    let call = || unsafe { syscall6(SYS_IOCTL, [fd, request, arg, 0, 0, 0]) as isize };
    control(request, arg, call, -EAGAIN)
}

/// Stands in front of libc's `ioctl`: a program that pages memory itself gets it from swaptide
/// first.
///
/// # Safety
/// As for ioctl(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int {
    let Some(real) = real::IOCTL.get() else {
        return real::libc_result(control_raw(fd as usize, request as usize, arg)) as c_int;
    };
    // SAFETY: the program's own arguments.
    control(request as usize, arg, || unsafe { real(fd, request, arg) } as isize, -1) as c_int
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_end_where_management_does() {
        assert_eq!(
            pages(0x1001, 0x1000),
            Some(VirtRange { start: VirtAddr(0x1000), end: VirtAddr(0x3000) })
        );
        assert_eq!(pages(0x1000, usize::MAX), None);
        assert_eq!(pages(MANAGED_END.0, 4096), None);
        assert_eq!(pages(usize::MAX - 100, 50), None);
        assert_eq!(pages(MANAGED_END.0 - 4096, 1 << 40), pages(MANAGED_END.0 - 4096, 4096));
        assert_eq!(pages(0x1000, 0), None);
    }

    #[test]
    fn a_segment_tells_its_size() {
        const SYS_SHMGET: u32 = k::__NR_shmget;
        // SAFETY: a segment of this test's own, which nothing attaches.
        let id = unsafe { syscall6(SYS_SHMGET, [0, 3 * PAGE_SIZE + 1, 0o1600, 0, 0, 0]) } as usize;
        assert_eq!(segment_len(id), Some(3 * PAGE_SIZE + 1));
        // SAFETY: the same; 0 is IPC_RMID.
        unsafe { syscall6(SYS_SHMCTL, [id, 0, 0, 0, 0, 0]) };
        assert_eq!(segment_len(id), None);
    }

    #[test]
    fn requests_are_those_of_the_kernel() {
        let arg = [0x10_0000usize, 0x20_0000, 0x1000, 0, 0];
        let range = |start: usize, len: usize| pages(start, len);
        assert_eq!(needed(UFFDIO_REGISTER, arg.as_ptr() as usize), range(0x10_0000, 0x20_0000));
        assert_eq!(needed(UFFDIO_MOVE, arg.as_ptr() as usize), range(0x20_0000, 0x1000));
        assert_eq!(needed(UFFDIO_REGISTER, 0), None);
        assert_eq!(needed(0x5401, arg.as_ptr() as usize), None);
    }
}
