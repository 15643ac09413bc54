//! Hooks of libc's functions that map, move and advise memory.

use std::ffi::{c_int, c_void};

use linux_raw_sys::general::{
    __NR_mmap, __NR_process_madvise, __NR_remap_file_pages, MADV_COLD, MADV_COLLAPSE,
    MADV_DONTNEED, MADV_HUGEPAGE, MADV_NORMAL, MADV_PAGEOUT, MADV_RANDOM, MADV_REMOVE,
    MADV_SEQUENTIAL, MADV_WILLNEED, MAP_ANONYMOUS, MAP_GROWSDOWN, MAP_HUGETLB, MAP_NORESERVE,
    MAP_POPULATE, MAP_PRIVATE, MAP_TYPE, PROT_WRITE,
};
use swaptide_engine::Engine;
use swaptide_engine::requests::Hint;
use swaptide_sys::Errno;
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::raw::syscall6;

use crate::engage_gate;
use crate::hooks::{mappings, mremap};
use crate::probe;
use crate::process;
use crate::real;
use crate::seccomp;
use crate::shmem;

fn hint_of(advice: c_int) -> Option<Hint> {
    Some(match advice as u32 {
        MADV_NORMAL => Hint::Normal,
        MADV_RANDOM => Hint::Random,
        MADV_SEQUENTIAL => Hint::Sequential,
        MADV_WILLNEED => Hint::WillNeed,
        MADV_COLD => Hint::Cold,
        MADV_PAGEOUT => Hint::PageOut,
        _ => return None,
    })
}

/// Gives the advice: to the pager of shared memory, or to the kernel. Returns the raw result of the
/// system call.
fn advise_kernel(addr: usize, len: usize, advice: c_int) -> isize {
    let shared = match advice as u32 {
        MADV_REMOVE => shmem::remove(addr, len),
        _ => shmem::refuse_huge_pages(addr, len, advice),
    };
    shared.unwrap_or_else(|| mappings::advise(addr, len, advice))
}

/// Gives the advice, and tells the engine of it as a hint. Returns 0 or an error number.
pub(crate) fn advise(addr: usize, len: usize, advice: c_int) -> c_int {
    let result = advise_kernel(addr, len, advice);
    if seccomp::is() {
        return -result as c_int;
    }
    if result == 0 {
        shmem::hint(addr, len, advice);
    }
    if result == 0
        && let Some(hint) = hint_of(advice)
        && let Some(engine) = process::engine()
        && let Some(range) = mappings::pages(addr, len)
    {
        engine.handler_requests.hint(hint, range);
    }
    -result as c_int
}

/// Stands in front of libc's `madvise`.
///
/// # Safety
/// As for madvise(2): what the advice does to the range is the caller's wish.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    match advise(addr as usize, len, advice) {
        0 => 0,
        errno => {
            real::set_errno(Errno::from_raw_os_error(errno));
            -1
        }
    }
}

/// Stands in front of libc's `posix_madvise`, whose `MADV_DONTNEED` does nothing.
///
/// # Safety
/// As for posix_madvise(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    if advice as u32 == MADV_DONTNEED { 0 } else { advise(addr as usize, len, advice) }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct IoVec {
    start: usize,
    len: usize,
}

// SAFETY: two integers of one size.
unsafe impl probe::Word for IoVec {}

/// process_madvise(2) as `madvise` for each vector. Returns the raw result of the system call.
pub(crate) fn advise_process(
    pidfd: usize,
    iov: usize,
    count: usize,
    advice: c_int,
    flags: usize,
) -> isize {
    // SAFETY: the arguments are the program's own.
    let call_for = |advice: u32, count: usize| unsafe {
        syscall6(__NR_process_madvise, [pidfd, iov, count, advice as usize, flags, 0]) as isize
    };
    let call = |count: usize| call_for(advice as u32, count);
    const MAX_VECTORS: usize = 1024;
    let matters = mappings::matters(advice);
    let is_shared =
        matches!(advice as u32, MADV_REMOVE | MADV_HUGEPAGE | MADV_COLLAPSE) && shmem::is_any();
    if seccomp::is() && matters {
        process::detach_without_calls();
        return call(count);
    }
    if seccomp::is() && is_shared && advice as u32 == MADV_REMOVE {
        // As `madvise`: the pager cannot be asked.
        return -(Errno::AGAIN.raw_os_error() as isize);
    }
    // Of another process the kernel refuses such advice, of none of its ranges too; but for
    // MADV_COLLAPSE, of which it is told apart by another that is refused.
    let is_refused = || match advice as u32 {
        MADV_COLLAPSE => call_for(MADV_REMOVE, 0) != 0,
        _ => call(0) != 0,
    };
    let is_done_here = matters || is_shared || mappings::is_mark(advice);
    if !is_done_here || iov == 0 || count > MAX_VECTORS || is_refused() {
        return call(count);
    }
    // All of it is read before anything is done, as the kernel does it.
    let mut done = 0;
    let mut failed = 0;
    let nothing = |_: IoVec| true;
    let advise_each = |IoVec { start, len }: IoVec| {
        failed = advise_kernel(start, len, advice);
        done += if failed == 0 { len } else { 0 };
        failed == 0
    };
    if !for_each_vector(iov, count, nothing) || !for_each_vector(iov, count, advise_each) {
        return if failed == 0 {
            call(count)
        } else if done > 0 {
            done as isize
        } else {
            failed
        };
    }
    done as isize
}

/// Calls `f` for each vector of an array until it answers with false, as this function does then;
/// so it does where the array cannot be read. Some at a time, for they stand on the program's
/// stack, and in a function of its own, for other advice needs no room at all.
#[inline(never)]
fn for_each_vector(iov: usize, count: usize, mut f: impl FnMut(IoVec) -> bool) -> bool {
    let mut some = [IoVec { start: 0, len: 0 }; 32];
    let mut left = count;
    let mut at = iov;
    while left > 0 {
        let some = &mut some[..left.min(32)];
        if !probe::read(at, probe::bytes_of(some)) {
            return false;
        }
        if !some.iter().all(|vector| f(*vector)) {
            return false;
        }
        left -= some.len();
        at += size_of_val(some);
    }
    true
}

/// Stands in front of libc's `process_madvise`.
///
/// # Safety
/// As for process_madvise(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn process_madvise(
    pidfd: c_int,
    iov: *const c_void,
    count: usize,
    advice: c_int,
    flags: u32,
) -> isize {
    real::libc_result(advise_process(pidfd as usize, iov as usize, count, advice, flags as usize))
        as isize
}

/// remap_file_pages(2) of what may be managed shared memory is refused: the kernel maps other pages
/// there without an event, which would read as zeros where they are out. Returns the raw result.
pub(crate) fn remap_pages(a: [usize; 6]) -> isize {
    if shmem::concerns(a[0], a[1]) && (seccomp::is() || shmem::may_be_region(a[0])) {
        return -(Errno::INVAL.raw_os_error() as isize);
    }
    // SAFETY: the arguments are the program's own.
    unsafe { syscall6(__NR_remap_file_pages, a) as isize }
}

/// Stands in front of libc's `remap_file_pages`.
///
/// # Safety
/// As for remap_file_pages(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn remap_file_pages(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    offset: usize,
    flags: c_int,
) -> c_int {
    let (prot, flags) = (prot as usize, flags as usize);
    real::libc_result(remap_pages([addr as usize, len, prot, offset, flags, 0])) as c_int
}

/// Maps memory as asked; what is private and anonymous and large (where small mappings are managed
/// and room is short, whatever its size: [`swaptide_engine::memcg::small`]) is under management
/// before the program has it. Filling it at once would make all of it memory before it could be
/// managed, so that is left out: it is only a wish.
fn map(addr: usize, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: usize) -> isize {
    // SAFETY: the arguments are the program's own; whatever the call does is what the program asked
    // for.
    let call = |flags: u32| unsafe {
        syscall6(__NR_mmap, [addr, len, prot as usize, flags as usize, fd as usize, offset])
    };
    let kept = flags as u32;
    if seccomp::is() {
        return call(kept);
    }
    if let Some(at) = shmem::map(addr, len, prot, flags) {
        return at;
    }
    let plain = kept & (MAP_TYPE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_GROWSDOWN)
        == MAP_PRIVATE | MAP_ANONYMOUS;
    if plain && prot as u32 & PROT_WRITE != 0 {
        let has_waited = engage_gate::wait_for_start();
        if seccomp::is() {
            return call(kept);
        }
        if !has_waited && !engage_gate::is_starting() && process::engine().is_none() {
            process::begin_before(len, kept & MAP_NORESERVE != 0);
        }
    }
    // A small one is not worth waiting until the handler serves requests: the next scan finds it.
    let is_reported = |engine: &&Engine| {
        engine.small.reports(len) && !(engine.small.is_small(len) && engage_gate::is_starting())
    };
    let engine = process::engine().filter(|_| plain).filter(is_reported);
    let at = call(if engine.is_some() { kept & !MAP_POPULATE } else { kept });
    if let Some(engine) = engine
        && !(-4095..0).contains(&at)
    {
        let start = VirtAddr(at as usize);
        if engine.small.is_small(len) {
            // Threads that make many wait for one another here; a hint that meets another one would
            // be dropped.
            engine.handler_requests.fence(start, true);
        } else {
            engine
                .handler_requests
                .hint(Hint::Mapped, VirtRange { start, end: start.offset(len).page_up() });
        }
    }
    at
}

/// Stands in front of libc's `mmap`.
///
/// # Safety
/// As for mmap(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    real::libc_result(map(addr as usize, len, prot, flags, fd, offset as usize)) as *mut c_void
}

/// Stands in front of libc's `mmap64`, which is the same here.
///
/// # Safety
/// As for mmap(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mmap64(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    real::libc_result(map(addr as usize, len, prot, flags, fd, offset as usize)) as *mut c_void
}

/// From this size on libc may keep a block in a mapping of its own, and move it by a system call
/// that does not come through `mremap`.
const MIN_OWN_MAPPING_BYTES: usize = 128 << 10;

/// The page behind the last one of a block; 0 where the allocator does not tell.
///
/// # Safety
/// `block` is null or a live block of this allocator.
unsafe fn end_of(block: *mut c_void) -> usize {
    if block.is_null() {
        return 0;
    }
    // SAFETY: the caller's promise.
    let size = unsafe { real::usable_size(block) };
    size.map_or(0, |size| VirtAddr(block as usize + size).page_up().0)
}

/// Stands in front of libc's `realloc`.
///
/// # Safety
/// As for realloc(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn realloc(block: *mut c_void, len: usize) -> *mut c_void {
    let Some(real) = real::REALLOC.get() else {
        real::set_errno(Errno::NOSYS);
        return std::ptr::null_mut();
    };
    let matters = len >= MIN_OWN_MAPPING_BYTES && !block.is_null() && mremap::matter();
    // SAFETY: the caller's block, which realloc has not freed yet.
    let end = if matters { unsafe { end_of(block) } } else { 0 };
    // SAFETY: the caller's own arguments.
    let moved = unsafe { real(block, len) };
    // A block that stayed may have grown.
    // SAFETY: the block that realloc has returned.
    let has_moved = || moved != block || end == 0 || unsafe { end_of(moved) } != end;
    if matters && !moved.is_null() && has_moved() {
        mremap::wait_for_events(moved as usize);
    }
    moved
}

/// Stands in front of libc's `reallocarray`.
///
/// # Safety
/// As for reallocarray(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn reallocarray(block: *mut c_void, count: usize, len: usize) -> *mut c_void {
    let Some(len) = count.checked_mul(len) else {
        real::set_errno(Errno::NOMEM);
        return std::ptr::null_mut();
    };
    // SAFETY: `block` is null or a block of this allocator (caller).
    unsafe { realloc(block, len) }
}

/// Stands in front of libc's `mremap`.
///
/// # Safety
/// As for mremap(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    real::libc_result(mremap::remap(old as usize, old_len, new_len, flags, to as usize))
        as *mut c_void
}
