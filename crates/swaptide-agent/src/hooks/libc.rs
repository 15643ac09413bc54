//! The functions of libc that the program calls through us.
//!
//! They must work at any moment of a program's life, in a signal handler or a vforked child too:
//! they allocate nothing and take no lock.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{
    AtomicU32, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use swaptide_engine::requests::Hint;
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::raw::syscall6;

use crate::hooks::exec::with_environment;
use crate::hooks::mappings;
use crate::hooks::mremap;
use crate::pages::kernel_words;
use crate::process;
use crate::real;
use crate::seccomp;
use crate::shmem;

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

/// Does what was asked and lets the engine hear it. Returns 0 or an error number.
pub fn advise(addr: usize, len: usize, advice: c_int) -> c_int {
    let result = mappings::advise(addr, len, advice);
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
        engine.bells.hint(hint, range);
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
            real::set_errno(errno);
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
    const DONTNEED: c_int = 4;
    if advice == DONTNEED { 0 } else { advise(addr as usize, len, advice) }
}

/// Stands in front of libc's `prctl`: after a filter of system calls, some of swaptide's own are
/// not made any more.
///
/// # Safety
/// As for prctl(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    const SYS_PRCTL: u32 = linux_raw_sys::general::__NR_prctl;
    // SAFETY: the program's own arguments.
    let call = || unsafe { syscall6(SYS_PRCTL, [option as usize, a, b, c, d, 0]) } as isize;
    real::libc_result(if option == seccomp::PR_SET_SECCOMP { seccomp::set(call) } else { call() })
        as c_int
}

type Routine = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(*mut c_void, *const c_void, Routine, *mut c_void) -> c_int;

/// What a new thread shall run, on its way from its creator to itself.
struct Waiting {
    taken: AtomicU32,
    routine: AtomicUsize,
    argument: AtomicUsize,
}

static WAITING: [Waiting; 256] = [const {
    Waiting {
        taken: AtomicU32::new(0),
        routine: AtomicUsize::new(0),
        argument: AtomicUsize::new(0),
    }
}; 256];

/// A place for what a thread about to be made shall run; `None` when more than 256 are being born
/// at once.
fn waiting_place(routine: usize, argument: *mut c_void) -> Option<usize> {
    let free = |w: &Waiting| {
        w.taken.load(Relaxed) == 0 && w.taken.compare_exchange(0, 1, Acquire, Relaxed).is_ok()
    };
    let place = WAITING.iter().position(free)?;
    WAITING[place].routine.store(routine, Release);
    WAITING[place].argument.store(argument as usize, Release);
    Some(place)
}

/// In the new thread: frees the place, pins the thread's control block, and tells what to run with
/// what.
fn begin(place: *mut c_void) -> (usize, *mut c_void) {
    let waiting = &WAITING[place as usize];
    let (routine, argument) = (waiting.routine.load(Acquire), waiting.argument.load(Acquire));
    waiting.taken.store(0, Release);
    kernel_words::pin_own_block();
    (routine, argument as *mut c_void)
}

extern "C" fn run_thread(place: *mut c_void) -> *mut c_void {
    let (routine, argument) = begin(place);
    // SAFETY: the word was made from such a function by `pthread_create` below.
    let routine: Routine = unsafe { std::mem::transmute(routine) };
    routine(argument)
}

extern "C" fn run_c11_thread(place: *mut c_void) -> c_int {
    let (routine, argument) = begin(place);
    // SAFETY: the word was made from such a function by `thrd_create` below.
    let routine: C11Routine = unsafe { std::mem::transmute(routine) };
    routine(argument)
}

/// Stands in front of libc's `pthread_create`: the new thread pins its control block before it does
/// anything else.
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
    let real = real::CREATE.address();
    if real.is_null() {
        const EAGAIN: c_int = 11;
        return EAGAIN;
    }
    // SAFETY: the pointer is that of libc's function of this type.
    let real: Create = unsafe { std::mem::transmute(real) };
    let Some(place) = waiting_place(routine as usize, argument) else {
        // This one is not pinned.
        // SAFETY: the caller's own arguments.
        return unsafe { real(thread, attr, routine, argument) };
    };
    // SAFETY: the caller's own thread and attributes; `run_thread` calls the caller's routine with
    // the caller's argument.
    let result = unsafe { real(thread, attr, run_thread, place as *mut c_void) };
    if result != 0 {
        WAITING[place].taken.store(0, Release);
    }
    result
}

type C11Routine = extern "C" fn(*mut c_void) -> c_int;
type C11Create = unsafe extern "C" fn(*mut c_void, C11Routine, *mut c_void) -> c_int;

/// Stands in front of libc's `thrd_create`, as `pthread_create` does: libc's own way from the one
/// to the other does not lead past here.
///
/// # Safety
/// As for thrd_create(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn thrd_create(
    thread: *mut c_void,
    routine: C11Routine,
    argument: *mut c_void,
) -> c_int {
    const THRD_ERROR: c_int = 2;
    let real = real::THRD_CREATE.address();
    if real.is_null() {
        return THRD_ERROR;
    }
    // SAFETY: the pointer is that of libc's function of this type.
    let real: C11Create = unsafe { std::mem::transmute(real) };
    let Some(place) = waiting_place(routine as usize, argument) else {
        // SAFETY: the caller's own arguments.
        return unsafe { real(thread, routine, argument) };
    };
    // SAFETY: the caller's own thread; `run_c11_thread` calls the caller's routine with the
    // caller's argument.
    let result = unsafe { real(thread, run_c11_thread, place as *mut c_void) };
    if result != 0 {
        WAITING[place].taken.store(0, Release);
    }
    result
}

/// Maps memory as asked; what is private and anonymous and large (where small mappings are managed
/// and room is short, whatever its size: [`swaptide_engine::vma::small`]) is under management
/// before the program has it. Filling it at once would make all of it memory before anybody could
/// manage it, so that is left out: it is only a wish.
fn map(addr: usize, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: usize) -> isize {
    const SYS_MMAP: u32 = linux_raw_sys::general::__NR_mmap;
    const PRIVATE: c_int = 0x02;
    const KIND: c_int = 0x0f;
    const ANONYMOUS: c_int = 0x20;
    const POPULATE: c_int = 0x8000;
    const HUGETLB: c_int = 0x4_0000;
    const GROWSDOWN: c_int = 0x100;
    const NORESERVE: c_int = 0x4000;
    const WRITE: c_int = 0x2;
    if seccomp::is() {
        // SAFETY: the arguments are the program's own.
        return unsafe {
            syscall6(SYS_MMAP, [addr, len, prot as usize, flags as usize, fd as usize, offset])
        } as isize;
    }
    if let Some(at) = shmem::map(addr, len, prot, flags) {
        return at;
    }
    let plain =
        flags & KIND == PRIVATE && flags & ANONYMOUS != 0 && flags & (HUGETLB | GROWSDOWN) == 0;
    if plain && prot & WRITE != 0 && process::engine().is_none() {
        process::begin_before(len, flags & NORESERVE != 0);
    }
    let engine = process::engine().filter(|engine| plain && engine.small.reports(len));
    let flags = if engine.is_some() { flags & !POPULATE } else { flags };
    // SAFETY: the arguments are the program's own; whatever the call does is what the program asked
    // for.
    let at = unsafe {
        syscall6(SYS_MMAP, [addr, len, prot as usize, flags as usize, fd as usize, offset])
    } as isize;
    if let Some(engine) = engine
        && !(-4095..0).contains(&at)
    {
        let start = VirtAddr(at as usize);
        if engine.small.is_small(len) {
            // Threads that make many wait for one another here; a hint that meets another one would
            // be dropped.
            engine.bells.fence(start);
        } else {
            engine.bells.hint(Hint::Mapped, VirtRange { start, end: start.offset(len).page_up() });
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
const OWN_MAPPING: usize = 128 << 10;

type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
type UsableSize = unsafe extern "C" fn(*mut c_void) -> usize;

/// The page behind the last one of a block; 0 where the allocator does not tell.
fn end_of(block: *mut c_void) -> usize {
    let size = real::usable_size();
    if size.is_null() || block.is_null() {
        return 0;
    }
    // SAFETY: the pointer is that of the allocator's function of this type.
    let size: UsableSize = unsafe { std::mem::transmute(size) };
    // SAFETY: a block of this allocator, which lives.
    VirtAddr(block as usize + unsafe { size(block) }).page_up().0
}

/// Stands in front of libc's `realloc`.
///
/// # Safety
/// As for realloc(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn realloc(block: *mut c_void, len: usize) -> *mut c_void {
    // SAFETY: the pointer is that of the allocator's function of this type; there is no program
    // without one.
    let real: Realloc = unsafe { std::mem::transmute(real::REALLOC.address()) };
    let matters = len >= OWN_MAPPING && !block.is_null() && mremap::matter();
    let end = if matters { end_of(block) } else { 0 };
    // SAFETY: the caller's own arguments.
    let moved = unsafe { real(block, len) };
    // Where it was it may have grown.
    if matters && !moved.is_null() && (moved != block || end == 0 || end_of(moved) != end) {
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
    const ENOMEM: c_int = 12;
    let Some(len) = count.checked_mul(len) else {
        real::set_errno(ENOMEM);
        return std::ptr::null_mut();
    };
    // SAFETY: as for realloc.
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

type Text = *const c_char;
type Texts = *const *const c_char;

unsafe extern "C" {
    static environ: Texts;
}

/// Stands in front of libc's `execve`: see [`crate::hooks::exec`].
///
/// # Safety
/// As for execve(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execve(path: Text, argv: Texts, envp: Texts) -> c_int {
    const SYS_EXECVE: u32 = linux_raw_sys::general::__NR_execve;
    // SAFETY: the program's own arguments; the address, if there is one, is that of libc's function
    // of this type.
    unsafe {
        with_environment(envp, |envp| match real::EXECVE.address() {
            none if none.is_null() => real::libc_result(syscall6(
                SYS_EXECVE,
                [path as usize, argv as usize, envp as usize, 0, 0, 0],
            )) as c_int,
            // SAFETY: as above.
            real => std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(Text, Texts, Texts) -> c_int,
            >(real)(path, argv, envp),
        })
    }
}

/// Stands in front of libc's `execv`.
///
/// # Safety
/// As for exec(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execv(path: Text, argv: Texts) -> c_int {
    // SAFETY: the program's own arguments and environment.
    unsafe { execve(path, argv, environ) }
}

/// Stands in front of libc's `execvpe`.
///
/// # Safety
/// As for exec(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execvpe(file: Text, argv: Texts, envp: Texts) -> c_int {
    let real = real::EXECVPE.address();
    if real.is_null() {
        real::set_errno(ENOSYS);
        return -1;
    }
    // SAFETY: the address is that of libc's function of this type.
    let real: unsafe extern "C" fn(Text, Texts, Texts) -> c_int =
        unsafe { std::mem::transmute(real) };
    // SAFETY: the program's own arguments.
    unsafe { with_environment(envp, |envp| real(file, argv, envp)) }
}

/// Stands in front of libc's `execvp`.
///
/// # Safety
/// As for exec(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execvp(file: Text, argv: Texts) -> c_int {
    // SAFETY: the program's own arguments and environment.
    unsafe { execvpe(file, argv, environ) }
}

/// Stands in front of libc's `fexecve`.
///
/// # Safety
/// As for fexecve(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fexecve(fd: c_int, argv: Texts, envp: Texts) -> c_int {
    let real = real::FEXECVE.address();
    if real.is_null() {
        real::set_errno(ENOSYS);
        return -1;
    }
    // SAFETY: the address is that of libc's function of this type.
    let real: unsafe extern "C" fn(c_int, Texts, Texts) -> c_int =
        unsafe { std::mem::transmute(real) };
    // SAFETY: the program's own arguments.
    unsafe { with_environment(envp, |envp| real(fd, argv, envp)) }
}

/// Stands in front of libc's `execveat`.
///
/// # Safety
/// As for execveat(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execveat(
    directory: c_int,
    path: Text,
    argv: Texts,
    envp: Texts,
    flags: c_int,
) -> c_int {
    const SYS_EXECVEAT: u32 = linux_raw_sys::general::__NR_execveat;
    // SAFETY: the program's own arguments.
    unsafe {
        with_environment(envp, |envp| {
            let words = [
                directory as usize,
                path as usize,
                argv as usize,
                envp as usize,
                flags as usize,
                0,
            ];
            real::libc_result(syscall6(SYS_EXECVEAT, words)) as c_int
        })
    }
}

type Spawn =
    unsafe extern "C" fn(*mut c_int, Text, *const c_void, *const c_void, Texts, Texts) -> c_int;

/// Stands in front of libc's `posix_spawn`.
///
/// # Safety
/// As for posix_spawn(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawn(
    pid: *mut c_int,
    path: Text,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Texts,
    envp: Texts,
) -> c_int {
    let real = real::SPAWN.address();
    if real.is_null() {
        return ENOSYS;
    }
    // SAFETY: the address is that of libc's function of this type.
    let real: Spawn = unsafe { std::mem::transmute(real) };
    // SAFETY: the program's own arguments.
    unsafe { with_environment(envp, |envp| real(pid, path, actions, attributes, argv, envp)) }
}

/// Stands in front of libc's `posix_spawnp`.
///
/// # Safety
/// As for posix_spawn(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn posix_spawnp(
    pid: *mut c_int,
    file: Text,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Texts,
    envp: Texts,
) -> c_int {
    let real = real::SPAWNP.address();
    if real.is_null() {
        return ENOSYS;
    }
    // SAFETY: the address is that of libc's function of this type.
    let real: Spawn = unsafe { std::mem::transmute(real) };
    // SAFETY: the program's own arguments.
    unsafe { with_environment(envp, |envp| real(pid, file, actions, attributes, argv, envp)) }
}

const ENOSYS: c_int = 38;

/// The end of `execle`'s arguments: behind their null stands the environment.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
unsafe extern "C" fn execle_list(path: Text, argv: Texts) -> c_int {
    let mut end = 0;
    // SAFETY: the arguments end with a null.
    while !unsafe { *argv.add(end) }.is_null() {
        end += 1;
    }
    // SAFETY: and behind it stands the environment.
    unsafe { execve(path, argv, *argv.add(end + 1).cast::<Texts>()) }
}

/// The body of a function `(path, arg0, arg1, ..., NULL)`: the arguments that came in registers are
/// pushed in front of those that are on the stack already, where the return address was; so they
/// are an array, and `$list` is called with the path and that.
#[cfg(target_arch = "x86_64")]
macro_rules! list {
    ($list:path) => {
        core::arch::naked_asm!(
            "pop rax",
            "push r9",
            "push r8",
            "push rcx",
            "push rdx",
            "push rsi",
            "mov rsi, rsp",
            "push rax",
            "call {list}",
            "pop rcx",
            "add rsp, 40",
            "push rcx",
            "ret",
            list = sym $list,
        )
    };
}

/// Stands in front of libc's `execl`.
///
/// # Safety
/// As for exec(3).
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execl() {
    list!(execv)
}

/// Stands in front of libc's `execlp`.
///
/// # Safety
/// As for exec(3).
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execlp() {
    list!(execvp)
}

/// Stands in front of libc's `execle`.
///
/// # Safety
/// As for exec(3).
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execle() {
    list!(execle_list)
}
