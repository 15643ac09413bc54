//! The functions of libc that the program calls through us.
//!
//! They must work at any moment of a program's life, in a signal handler or a vforked child too: they allocate nothing and take no lock.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use swaptide_engine::bell::Hint;
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::raw::syscall6;

use crate::pins;
use crate::start;

const SYS_MADVISE: u32 = 28;

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
    fn dlsym(handle: *mut c_void, name: *const std::ffi::c_char) -> *mut c_void;
}

/// `RTLD_NEXT`.
const NEXT: *mut c_void = -1isize as *mut c_void;

fn hint_of(advice: c_int) -> Option<Hint> {
    Some(match advice {
        0 => Hint::Normal,
        1 => Hint::Random,
        2 => Hint::Sequential,
        3 => Hint::WillNeed,
        20 => Hint::Cold,
        21 => Hint::PageOut,
        _ => return None,
    })
}

/// `MADV_DONTFORK` and `MADV_WIPEONFORK`: a forked child has another idea of the range than its parent. Such memory is not managed.
const APART: [c_int; 2] = [10, 18];

/// Does what was asked and lets the engine hear it. Returns 0 or an error number.
fn advise(addr: usize, len: usize, advice: c_int) -> c_int {
    if APART.contains(&advice)
        && let Some(end) = addr.checked_add(len)
    {
        let range = VirtRange { start: VirtAddr(addr), end: VirtAddr(end).page_up() };
        pins::exclude(range);
        if let Some(engine) = start::engine() {
            engine.bells.hint(Hint::Release, range);
        }
    }
    // SAFETY: the arguments are the program's own; whatever the call does is what the program asked for.
    let result = unsafe { syscall6(SYS_MADVISE, [addr, len, advice as usize, 0, 0, 0]) } as isize;
    if result == 0
        && let Some(hint) = hint_of(advice)
        && let Some(engine) = start::engine()
        && let Some(end) = addr.checked_add(len)
    {
        engine.bells.hint(hint, VirtRange { start: VirtAddr(addr), end: VirtAddr(end).page_up() });
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
            // SAFETY: libc's own location for this thread.
            unsafe { *__errno_location() = errno };
            -1
        }
    }
}

/// Stands in front of libc's `posix_madvise`, whose `DONTNEED` does nothing.
///
/// # Safety
/// As for posix_madvise(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    const DONTNEED: c_int = 4;
    if advice == DONTNEED { 0 } else { advise(addr as usize, len, advice) }
}

/// Stands in front of libc's `mlockall`: what is there is locked as it is touched, and not filled at once. Filled at once, all the address space that
/// swaptide has reserved and not used would become memory.
///
/// # Safety
/// As for mlockall(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    const SYS_MLOCKALL: u32 = 151;
    const ONFAULT: usize = 4;
    // SAFETY: locking memory changes no data.
    match unsafe { syscall6(SYS_MLOCKALL, [flags as usize | ONFAULT, 0, 0, 0, 0, 0]) } {
        0 => 0,
        error => {
            // SAFETY: libc's own location for this thread.
            unsafe { *__errno_location() = -error as c_int };
            -1
        }
    }
}

type Routine = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(*mut c_void, *const c_void, Routine, *mut c_void) -> c_int;

static REAL_CREATE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// What a new thread shall run, on its way from its creator to itself.
struct Waiting {
    taken: AtomicU32,
    routine: AtomicUsize,
    argument: AtomicUsize,
}

static WAITING: [Waiting; 256] =
    [const { Waiting { taken: AtomicU32::new(0), routine: AtomicUsize::new(0), argument: AtomicUsize::new(0) } }; 256];

/// Finds the functions we stand in front of. Called by the constructor.
pub fn find_real() {
    // SAFETY: the name is NUL-terminated; dlsym may be called from a constructor.
    let real = unsafe { dlsym(NEXT, c"pthread_create".as_ptr()) };
    REAL_CREATE.store(real, Release);
}

extern "C" fn run_thread(place: *mut c_void) -> *mut c_void {
    let waiting = &WAITING[place as usize];
    let routine = waiting.routine.load(Acquire);
    let argument = waiting.argument.load(Acquire);
    waiting.taken.store(0, Release);
    pin_own_block();
    // SAFETY: the word was made from such a function by `pthread_create` below.
    let routine: Routine = unsafe { std::mem::transmute(routine) };
    routine(argument as *mut c_void)
}

/// Pins the control block of the calling thread: it starts at the thread pointer.
fn pin_own_block() {
    let block: usize;
    // SAFETY: on x86-64 the first word of the control block is its own address.
    unsafe { std::arch::asm!("mov {}, fs:[0]", out(reg) block, options(nostack, preserves_flags, readonly)) };
    pins::pin(block);
    pins::pin(block + 0x900);
}

/// Stands in front of libc's `pthread_create`: the new thread pins its control block before it does anything else.
///
/// # Safety
/// As for pthread_create(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pthread_create(
    thread: *mut c_void,
    attr: *const c_void,
    routine: Routine,
    argument: *mut c_void,
) -> c_int {
    let mut real = REAL_CREATE.load(Acquire);
    if real.is_null() {
        find_real();
        real = REAL_CREATE.load(Acquire);
        if real.is_null() {
            const EAGAIN: c_int = 11;
            return EAGAIN;
        }
    }
    // SAFETY: the pointer is that of libc's function of this type.
    let real: Create = unsafe { std::mem::transmute(real) };
    let free = |w: &Waiting| w.taken.load(Relaxed) == 0 && w.taken.compare_exchange(0, 1, Acquire, Relaxed).is_ok();
    let Some(place) = WAITING.iter().position(free) else {
        // More than 256 threads being born at once: this one is not pinned.
        // SAFETY: the caller's own arguments.
        return unsafe { real(thread, attr, routine, argument) };
    };
    WAITING[place].routine.store(routine as usize, Release);
    WAITING[place].argument.store(argument as usize, Release);
    // SAFETY: the caller's own thread and attributes; `run_thread` calls the caller's routine with the caller's argument.
    let result = unsafe { real(thread, attr, run_thread, place as *mut c_void) };
    if result != 0 {
        WAITING[place].taken.store(0, Release);
    }
    result
}
