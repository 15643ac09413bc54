//! Shared memory of the program: what it asks for becomes a region of the run's pager.
//!
//! Large mappings that are `MAP_SHARED|MAP_ANONYMOUS` are made of a memory file that comes from the
//! supervisor and that the program has no descriptor of. This process registers them, and keeps a
//! guard: a thread that holds the userfaultfd open, so that what is out is waited for, and that
//! stops the process when the supervisor ends with some of it ([`swaptide_ipc::shared`]).
//!
//! Owns: the ranges that were ever mapped so, and the guard. What fails here fails quietly: the
//! memory is then the program's as without swaptide.
//!
//! Locks: none; nothing is allocated. Descriptors are open in the program's table for moments only,
//! and closed when it executes another program.

use std::ffi::c_int;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::time::Duration;

use linux_raw_sys::general as k;
use swaptide_ipc::shared::{
    self, ADVICE_HOLD, ADVICE_KEEP, ADVICE_RELEASE, ADVICE_REMOVE, AdviceOutcome, MIN_REGION_BYTES,
    NoGuard, NoRegion, REGION_PATH, Reach,
};
use swaptide_ipc::{ProcState, SlotIndex};
use swaptide_sys::lock::futex;
use swaptide_sys::maps::MapsFile;
use swaptide_sys::mem::{Advice, advise};
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::raw::syscall6;
use swaptide_sys::sock::poll_readable;
use swaptide_sys::thread::{
    abort_with, block_all_signals, exit_thread, getpid, restore_signals, set_name,
};
use swaptide_sys::{AsFd, AsRawFd, OwnedFd};

use crate::environment;
use crate::own_pid;
use crate::process;
use crate::seccomp;

const MAP_SHARED: c_int = k::MAP_SHARED as c_int;
const MAP_TYPE: c_int = k::MAP_TYPE as c_int;
const MAP_ANONYMOUS: c_int = k::MAP_ANONYMOUS as c_int;
const MAP_GROWSDOWN: c_int = k::MAP_GROWSDOWN as c_int;
const MAP_LOCKED: c_int = k::MAP_LOCKED as c_int;
const MAP_POPULATE: c_int = k::MAP_POPULATE as c_int;
const MAP_HUGETLB: c_int = k::MAP_HUGETLB as c_int;
const PROT_EXEC: c_int = k::PROT_EXEC as c_int;

const SYS_MMAP: u32 = k::__NR_mmap;

const EAGAIN: isize = linux_raw_sys::errno::EAGAIN as isize;
const ENOMEM: isize = linux_raw_sys::errno::ENOMEM as isize;

const MAX_KNOWN_RANGES: usize = 128;
/// The time of one wait for the guard's word, and the number of waits where nothing is lost without
/// it.
const GUARD_WAIT_SLICE: Duration = Duration::from_millis(100);
const GUARD_WAITS: u32 = 20;

/// A range that has regions mapped, or had.
struct KnownRange {
    start: AtomicUsize,
    end: AtomicUsize,
}

static KNOWN_RANGES: [KnownRange; MAX_KNOWN_RANGES] =
    [const { KnownRange { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } };
        MAX_KNOWN_RANGES];
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// Pages of regions that were asked to stay: each at the place of its number.
static KEPT_PAGES: [AtomicUsize; MAX_KEPT_PAGES] = [const { AtomicUsize::new(0) }; MAX_KEPT_PAGES];
const MAX_KEPT_PAGES: usize = 256;
/// The process that the guard stands for; 0 while there is none.
static GUARDED: AtomicU32 = AtomicU32::new(0);
/// Futex word: what became of the guard.
static GUARD: AtomicU32 = AtomicU32::new(NONE);
const NONE: u32 = 0;
const GUARD_RUNNING: u32 = 1;
const GUARD_FAILED: u32 = 2;
/// There was nothing to guard.
const GUARD_NOT_NEEDED: u32 = 3;
/// Threads that are making a mapping of a region. A child reads its copy: one that has the mapping
/// finds the thread counted, for the kernel's lock of the address space orders `mmap` and
/// fork.
static MAPPING: AtomicU32 = AtomicU32::new(0);
/// One more than the pager's slot, once that is known.
static PAGER: AtomicU32 = AtomicU32::new(0);
/// The run does not swap shared memory, or cannot: the pager is not asked again.
static REFUSED: AtomicBool = AtomicBool::new(false);

fn note(range: VirtRange) {
    // What is mapped there now is kept by none of them.
    KEPT_PAGES.iter().for_each(|page| page.store(0, Relaxed));
    let known = &KNOWN_RANGES[..COUNT.load(Acquire).min(MAX_KNOWN_RANGES)];
    let holds = |known: &KnownRange| {
        let start = known.start.load(Acquire);
        start != 0 && start <= range.start.0 && range.end.0 <= known.end.load(Relaxed)
    };
    if known.iter().any(holds) {
        return;
    }
    let at = COUNT.fetch_add(1, Relaxed);
    // When the table is full, the last range grows: more is asked about than need be.
    let known = &KNOWN_RANGES[at.min(MAX_KNOWN_RANGES - 1)];
    if at < MAX_KNOWN_RANGES {
        known.end.store(range.end.0, Relaxed);
        known.start.store(range.start.0, Release);
    } else {
        known.start.fetch_min(range.start.0, Relaxed);
        known.end.fetch_max(range.end.0, Relaxed);
    }
}

/// True if there may be regions.
pub(crate) fn is_any() -> bool {
    COUNT.load(Acquire) > 0
}

/// True where a range may be of a region.
pub(crate) fn concerns(start: usize, len: usize) -> bool {
    let end = start.saturating_add(len.max(1));
    let known = &KNOWN_RANGES[..COUNT.load(Acquire).min(MAX_KNOWN_RANGES)];
    known.iter().any(|known| known.start.load(Acquire) < end && start < known.end.load(Relaxed))
}

/// Maps shared memory as the program asks, if it is of the kind that is managed. `None`: the kernel
/// shall do it.
pub(crate) fn map(addr: usize, len: usize, prot: c_int, flags: c_int) -> Option<isize> {
    let kind = flags & MAP_TYPE == MAP_SHARED
        && flags & MAP_ANONYMOUS != 0
        && flags & (MAP_HUGETLB | MAP_GROWSDOWN | MAP_LOCKED) == 0;
    // The child of a vfork has its parent's memory, and is not the process that the supervisor
    // would see.
    let ours = own_pid::is_own_process() && !seccomp::is() && !REFUSED.load(Relaxed);
    if !kind || (len as u64) < MIN_REGION_BYTES || prot & PROT_EXEC != 0 || !ours {
        return None;
    }
    let socket = environment::socket()?;
    let memory = match shared::region(socket, len as u64) {
        Ok(memory) => memory,
        Err(NoRegion::NotNow) => return None,
        Err(NoRegion::NoPager) => {
            REFUSED.store(true, Relaxed);
            return None;
        }
    };
    // A handler that forks here would have its child go on in the middle.
    let mask = block_all_signals().ok()?;
    MAPPING.fetch_add(1, Relaxed);
    let at = map_region(socket, memory, [addr, len, prot as usize], flags);
    MAPPING.fetch_sub(1, Relaxed);
    restore_signals(mask);
    at
}

/// Maps a new region, and has the pager know of it. `None`: the kernel does not map it.
fn map_region(
    socket: &[u8],
    memory: OwnedFd,
    [addr, len, prot]: [usize; 3],
    flags: c_int,
) -> Option<isize> {
    // Filled at once it would be there before it could be managed.
    let kept = flags & !(MAP_ANONYMOUS | MAP_POPULATE);
    // SAFETY: the arguments are the program's own but for the file, which holds nothing yet.
    let at = unsafe {
        syscall6(SYS_MMAP, [addr, len, prot, kept as usize, memory.as_fd().as_raw_fd() as usize, 0])
            as isize
    };
    if (-4095..0).contains(&at) {
        return None;
    }
    let start = VirtAddr(at as usize);
    let range = VirtRange { start, end: start.offset(len).page_up() };
    // The child of a fork that comes before the pager knows of it would have it without its
    // userfaultfd. To that child it was mapped after the fork.
    // SAFETY: the advice changes no data.
    let is_kept = unsafe { advise(range, Advice::DontFork) }.is_ok();
    // A part of a huge page could not go out.
    // SAFETY: the advice changes no data.
    let _ = unsafe { advise(range, Advice::NoHugePage) };
    // The pager knows a forked child by its guard. Before that it would take this for a process
    // that has two userfaultfds, of which one knows nothing of what is out.
    wait_for_guard();
    if shared::attach(socket, Reach::Whole).is_none() {
        // Refused, it is memory like any other, of which the pager shall know nothing later.
        const MAP_FIXED: c_int = k::MAP_FIXED as c_int;
        const MAP_FIXED_NOREPLACE: c_int = k::MAP_FIXED_NOREPLACE as c_int;
        let flags = (flags & !MAP_FIXED_NOREPLACE | MAP_FIXED) as usize;
        // SAFETY: the mapping made above, in which nothing is and which no other thread knows.
        let again = unsafe { syscall6(SYS_MMAP, [at as usize, len, prot, flags, usize::MAX, 0]) };
        if again as isize == at {
            return Some(at);
        }
    } else {
        let pid = getpid().0;
        let is_over = |word| GUARD.compare_exchange(word, NONE, Relaxed, Relaxed).is_ok();
        if GUARDED.swap(pid, Relaxed) != pid || is_over(GUARD_FAILED) || is_over(GUARD_NOT_NEEDED) {
            GUARD.store(NONE, Relaxed);
            if !process::spawn_guard(guard) {
                GUARD.store(GUARD_FAILED, Relaxed);
            }
        }
    }
    note(range);
    if is_kept {
        // SAFETY: as above.
        let _ = unsafe { advise(range, Advice::DoFork) };
    }
    Some(at)
}

/// True if this process has a guard, or one is on its way: a thread that stays.
pub(crate) fn is_guarded() -> bool {
    GUARDED.load(Relaxed) == getpid().0 && GUARD.load(Acquire) != GUARD_NOT_NEEDED
}

/// Waits for the guard of this process that is on its way, if there is one, a while.
fn wait_for_guard() {
    if !is_guarded() {
        return;
    }
    for _ in 0..GUARD_WAITS {
        if GUARD.load(Acquire) != NONE {
            return;
        }
        futex::wait(&GUARD, NONE, Some(GUARD_WAIT_SLICE), futex::Scope::Private);
    }
}

/// The kernel will write to a word of a range when a thread ends, and does not wait for a pager
/// then: if it is of a region it stays in memory.
pub(crate) fn keep(addr: usize, len: usize) {
    if !concerns(addr, len) || !is_guarded() || seccomp::is() {
        return;
    }
    let pages = addr / PAGE_SIZE..=(addr + len.max(1) - 1) / PAGE_SIZE;
    let place = |page: usize| &KEPT_PAGES[page % MAX_KEPT_PAGES];
    if pages.clone().all(|page| place(page).load(Relaxed) == page) || !may_be_region(addr) {
        return;
    }
    if let Some(socket) = environment::socket() {
        // Before that the pager does not know this process by its number.
        wait_for_guard();
        if shared::advise(socket, addr, len, ADVICE_KEEP) == Some(AdviceOutcome::Taken) {
            pages.for_each(|page| place(page).store(page, Relaxed));
        }
    }
}

/// True unless the mapping of an address is known to be of no region.
pub(crate) fn may_be_region(addr: usize) -> bool {
    match MapsFile::open_high().map(|maps| maps.vma_at(VirtAddr(addr))) {
        Ok(Ok(Some(info))) => info.vma().name.starts_with(REGION_PATH),
        Ok(Ok(None)) => false,
        _ => true,
    }
}

/// Says what the program says of a range that may be of a region.
pub(crate) fn hint(addr: usize, len: usize, advice: c_int) {
    if matches!(advice, 0..=3 | 20 | 21)
        && concerns(addr, len)
        && !seccomp::is()
        && let Some(socket) = environment::socket()
    {
        let _ = shared::advise(socket, addr, len, advice);
    }
}

/// `MADV_REMOVE` of a range that may be of a region: the pager frees the pages in memory and those
/// swapped out at the same time. If the kernel freed some and the pager the rest later, what other
/// processes write in between would be lost. Returns the result for the program, as the system call
/// would, or `None` if the caller must make the call itself.
pub(crate) fn remove(addr: usize, len: usize) -> Option<isize> {
    let end = addr.checked_add(len)?;
    if len == 0 || !VirtAddr(addr).is_page_aligned() || !concerns(addr, len) {
        return None;
    }
    let socket = environment::socket()?;
    if seccomp::is() {
        // The pager cannot be asked, and what is out would come back.
        return Some(-EAGAIN);
    }
    let range = VirtRange { start: VirtAddr(addr), end: VirtAddr(end).page_up() };
    let Ok(maps) = MapsFile::open_high() else { return Some(-EAGAIN) };
    // The kernel continues behind what is not mapped, and stops where it refuses.
    let mut gap = false;
    let mut at = range.start;
    while at < range.end {
        let info = match maps.vma_at_or_next(at) {
            Ok(Some(info)) if info.vma().range.start < range.end => info,
            Ok(_) => {
                gap = true;
                break;
            }
            Err(_) => return Some(-EAGAIN),
        };
        let vma = info.vma();
        gap |= vma.range.start > at;
        let part = VirtRange { start: vma.range.start.max(at), end: vma.range.end.min(range.end) };
        let is_region = !vma.private && vma.name.starts_with(REGION_PATH);
        let word = if is_region { remove_part(socket, part) } else { kernel_removes(part) };
        if word < 0 {
            return Some(word);
        }
        at = part.end;
    }
    Some(if gap { -ENOMEM } else { 0 })
}

/// Refuses advice that makes huge pages of a range that may be of a region: a part of a huge page
/// could not be swapped out. Returns the result for the program, or `None` if the caller must make
/// the system call itself.
pub(crate) fn refuse_huge_pages(addr: usize, len: usize, advice: c_int) -> Option<isize> {
    const MADV_HUGEPAGE: u32 = k::MADV_HUGEPAGE;
    const MADV_COLLAPSE: u32 = k::MADV_COLLAPSE;
    match advice as u32 {
        MADV_HUGEPAGE if concerns(addr, len) => Some(0),
        // As the kernel answers where it has no huge page to give.
        MADV_COLLAPSE if concerns(addr, len) => Some(-EAGAIN),
        _ => None,
    }
}

fn kernel_removes(part: VirtRange) -> isize {
    const SYS_MADVISE: u32 = k::__NR_madvise;
    const MADV_REMOVE: usize = k::MADV_REMOVE as usize;
    // SAFETY: the program has asked for it.
    unsafe { syscall6(SYS_MADVISE, [part.start.0, part.len(), MADV_REMOVE, 0, 0, 0]) }
}

/// A part that one mapping of a region has.
fn remove_part(socket: &[u8], part: VirtRange) -> isize {
    // The kernel refuses locked memory; it does so for this advice as well.
    // SAFETY: the advice changes no data.
    if let Err(errno) = unsafe { advise(part, Advice::Cold) } {
        return -(errno.raw_os_error() as isize);
    }
    match shared::advise(socket, part.start.0, part.len(), ADVICE_REMOVE) {
        Some(AdviceOutcome::Taken) => 0,
        // It was never attached: the kernel has all of it.
        Some(AdviceOutcome::Elsewhere) => kernel_removes(part),
        Some(AdviceOutcome::Failed) | None => -EAGAIN,
    }
}

/// The range to be held over a call of `mremap`: what the call may map at further addresses.
fn range_to_hold(
    addr: usize,
    old_len: usize,
    new_len: usize,
    flags: c_int,
) -> Option<(usize, usize)> {
    const MREMAP_DONTUNMAP: c_int = k::MREMAP_DONTUNMAP as c_int;
    let up = |len: usize| VirtAddr(len.min(usize::MAX / 2)).page_up().0;
    let (old_len, new_len) = (up(old_len), up(new_len));
    if old_len == 0 || flags & MREMAP_DONTUNMAP != 0 {
        // What is mapped is mapped once more, or without the entries that it had.
        Some((addr, old_len.max(new_len)))
    } else if new_len > old_len {
        Some((addr.checked_add(old_len)?, new_len - old_len))
    } else {
        // What is moved takes its entries along, and the pager gets its event.
        None
    }
}

/// Runs `change`, which is an `mremap` of `old_len` bytes at `addr` to `new_len`, with what it may
/// map at further addresses staying in meanwhile. `None`: it must not run.
pub(crate) fn around(
    addr: usize,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    change: impl FnOnce() -> isize,
) -> Option<isize> {
    if !concerns(addr, old_len.max(new_len)) {
        return Some(change());
    }
    let held = match range_to_hold(addr, old_len, new_len, flags) {
        None => None,
        Some((start, len)) => {
            let socket = environment::socket().filter(|_| !seccomp::is())?;
            match shared::advise(socket, start, len, ADVICE_HOLD)? {
                AdviceOutcome::Taken => Some((socket, start, len)),
                AdviceOutcome::Elsewhere => None,
                AdviceOutcome::Failed => return None,
            }
        }
    };
    let word = change();
    if !(-4095..0).contains(&word) {
        let start = VirtAddr(word as usize);
        note(VirtRange { start, end: start.offset(new_len.max(1)).page_up() });
    }
    if let Some((socket, start, len)) = held {
        let _ = shared::advise(socket, start, len, ADVICE_RELEASE);
    }
    Some(word)
}

/// In a forked child, before it continues: nothing that is out may be lost to it.
pub(crate) fn forked() {
    let has_none = GUARDED.load(Relaxed) == 0 || GUARD.load(Relaxed) == GUARD_NOT_NEEDED;
    // A mapping that another thread was making may have come along, of which the pager knows
    // nothing: then the guard ends the process.
    let was_mapping = MAPPING.swap(0, Relaxed) > 0;
    if has_none && !was_mapping || seccomp::is() {
        // Without regions; or all that is out is brought back to it over time, as for one that
        // comes through no hook.
        return;
    }
    GUARDED.store(getpid().0, Relaxed);
    GUARD.store(NONE, Relaxed);
    if !process::spawn_guard(guard) {
        GUARD.store(GUARD_FAILED, Relaxed);
    }
    let pager = PAGER.load(Relaxed).checked_sub(1);
    let idle = pager.zip(process::known_segment()).is_some_and(|(index, segment)| {
        segment.slot(SlotIndex(index)).state() != ProcState::Engaged
    });
    if idle && !was_mapping {
        // Nothing goes out before the guard stands.
        return;
    }
    while GUARD.load(Acquire) == NONE {
        futex::wait(&GUARD, NONE, Some(GUARD_WAIT_SLICE), futex::Scope::Private);
    }
    // While the pager lives it answers this process's faults without a guard, too.
    if GUARD.load(Acquire) == GUARD_FAILED && pager.is_some_and(|index| !is_alive(index)) {
        stop_child();
    }
}

/// Nothing answers for what a forked child has.
fn stop_child() -> ! {
    abort_with(&[
        b"swaptide: a forked child has shared memory that is swapped, and the supervisor does not \
        answer for it; it is stopped rather than given wrong data",
    ])
}

/// True if the process of a pager's slot is known to live, and to have its memory still: its
/// descriptors go after that.
fn is_alive(pager: u32) -> bool {
    const SYS_PROCESS_VM_READV: u32 = k::__NR_process_vm_readv;
    const ESRCH: isize = linux_raw_sys::errno::ESRCH as isize;
    // A descriptor may not be had.
    process::known_segment().is_some_and(|segment| {
        let pid = segment.slot(SlotIndex(pager)).pid.load(Relaxed) as usize;
        let mut byte = 0u8;
        let [own, other] = [(&raw mut byte) as usize, PAGE_SIZE].map(|at| [at, 1]);
        let (own, other) = ((&raw const own) as usize, (&raw const other) as usize);
        // SAFETY: a byte of this function is written, if there is one to be read at an address at
        // which nothing is.
        let word = unsafe { syscall6(SYS_PROCESS_VM_READV, [pid, own, 1, other, 1, 0]) } as isize;
        // In another namespace the number is another process's.
        let theirs = segment.header.pid_namespace.load(Relaxed);
        let is_same = || {
            let ours = rustix::fs::stat(c"/proc/self/ns/pid");
            ours.is_ok_and(|ours| theirs == 0 || ours.st_ino == theirs)
        };
        pid != 0 && word != -ESRCH && is_same()
    })
}

/// The guard's thread.
extern "C" fn guard(_: usize) {
    let wake = || futex::wake(&GUARD, i32::MAX as u32, futex::Scope::Private);
    let tell = |what: u32| {
        GUARD.store(what, Release);
        wake();
    };
    let socket = process::own_table().and_then(|()| environment::socket());
    let guard = match socket.map_or(Err(NoGuard::Unanswered), shared::guard) {
        Ok(guard) => guard,
        Err(NoGuard::Unknown) => stop_child(),
        Err(why) => {
            let what = if why == NoGuard::NotNeeded { GUARD_NOT_NEEDED } else { GUARD_FAILED };
            // Another guard may stand by now, and a third one may from here on: it is written once.
            if GUARD.compare_exchange(NONE, what, Release, Relaxed).is_ok() {
                wake();
            }
            exit_thread();
        }
    };
    set_name(c"swaptide-guard");
    let Some(segment) = process::segment() else {
        tell(GUARD_FAILED);
        exit_thread();
    };
    PAGER.store(guard.slot.0 + 1, Relaxed);
    tell(GUARD_RUNNING);
    loop {
        match poll_readable(&[guard.conn.as_fd()], None) {
            Ok(0) => {}
            Ok(_)
                if guard.conn.recv(&mut [0u8; 8], &mut []).is_ok_and(|(length, _)| length > 0) => {}
            _ => break,
        }
    }
    if guard.has_lost(segment) {
        abort_with(&[
            b"swaptide: the supervisor was killed; shared memory that it had swapped out is lost; \
            the process is stopped rather than given wrong data",
        ]);
    }
    // Nothing was out: the memory is the kernel's again, and no request concerns it any more.
    COUNT.store(0, Release);
    drop(guard);
    exit_thread()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_is_what_a_call_maps_at_further_addresses() {
        const AT: usize = 1 << 32;
        const MAYMOVE: c_int = k::MREMAP_MAYMOVE as c_int;
        const KEEPS: c_int = MAYMOVE | k::MREMAP_DONTUNMAP as c_int;
        assert_eq!(range_to_hold(AT, 0x3001, 0x5000, 0), Some((AT + 0x4000, 0x1000)));
        assert_eq!(range_to_hold(AT, 0x4000, 0x5000, MAYMOVE), Some((AT + 0x4000, 0x1000)));
        // It is doubled, or its old addresses lose their entries.
        assert_eq!(range_to_hold(AT, 0, 0x5000, MAYMOVE), Some((AT, 0x5000)));
        assert_eq!(range_to_hold(AT, 0x5000, 0x5000, KEEPS), Some((AT, 0x5000)));
        for new_len in [0x1000, 0x3001, 0x4000] {
            assert_eq!(range_to_hold(AT, 0x4000, new_len, MAYMOVE), None);
        }
        assert_eq!(range_to_hold(usize::MAX - 0xfff, 0x1000, 0x2000, 0), None, "no address");
    }

    #[test]
    fn ranges_that_were_mapped_once_are_asked_about() {
        let range =
            |n: usize| VirtRange { start: VirtAddr(n << 32), end: VirtAddr((n << 32) + (1 << 20)) };
        assert!(!concerns(1 << 32, 4096));
        for n in 1..=MAX_KNOWN_RANGES + 10 {
            note(range(n));
        }
        for n in 1..=MAX_KNOWN_RANGES + 10 {
            assert!(concerns((n << 32) + 4096, 4096) && concerns((n << 32) - 1, 2), "{n}");
        }
        assert!(!concerns((5 << 32) + (1 << 20), 4096) && !concerns(4096, 0));
    }
}
