//! libc's ways past its own fork handlers, `syscall`, `clone` and `_Fork`. The first two pass
//! through untouched but for the few calls that concern swaptide.
//!
//! Both continue by a jump with every register and the stack as they were, because what they start
//! may return twice, or on another stack.
//!
//! A process made with `CLONE_VM` and without `CLONE_VFORK` shares this one's memory and may live
//! longer. The engine ends with its process, and what is swapped then would read as zeros in the
//! other: so everything is brought back first, and stays unmanaged. If forks are followed
//! (`fork/trampoline.rs`), the same is done before a fork of this kind, which is not followed.
//!
//! A filter of system calls for all threads binds the engine's, and may end them. With the last of
//! them the userfaultfd would be closed, and what is swapped read as zeros: so before one is set
//! the process is detached ([`process::detach`]).
//!
//! Where everything cannot be brought back because another thread's fork does not come to its end,
//! the call is not made: a fork fails with `EAGAIN`, a filter with the number of the thread that
//! forks.

use std::ffi::{c_char, c_int, c_long, c_void};
use std::sync::atomic::Ordering::Relaxed;

use linux_raw_sys::general as k;
use swaptide_engine::vma::adopt::program_parts;
use swaptide_sys::Errno;
use swaptide_sys::maps::MapsFile;
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::raw::syscall6;

use crate::exit_watch;
use crate::fork::atfork::{wait_for_begin, with_handlers};
use crate::forking::FORKING;
use crate::hooks::environment;
use crate::hooks::mappings;
use crate::hooks::memory;
use crate::hooks::mremap;
use crate::hooks::namespaces;
use crate::hooks::past_writes;
use crate::hooks::sends;
use crate::pages::excluded;
use crate::pages::kernel_words;
use crate::probe;
use crate::process;
use crate::real;
use crate::seccomp;

const SYS_EXECVE: usize = k::__NR_execve as usize;
const SYS_EXECVEAT: usize = k::__NR_execveat as usize;
const SYS_CLONE: usize = k::__NR_clone as usize;
const SYS_FORK: usize = k::__NR_fork as usize;
const SYS_CLONE3: usize = k::__NR_clone3 as usize;
const SYS_EXIT: usize = k::__NR_exit as usize;
const SYS_PRCTL: usize = k::__NR_prctl as usize;
const SYS_SECCOMP: usize = k::__NR_seccomp as usize;

const SYS_SET_TID_ADDRESS: usize = k::__NR_set_tid_address as usize;
const SYS_SET_ROBUST_LIST: usize = k::__NR_set_robust_list as usize;
const SYS_RSEQ: usize = k::__NR_rseq as usize;

const SYS_MADVISE: usize = k::__NR_madvise as usize;
const SYS_MREMAP: usize = mremap::SYS_MREMAP as usize;
const SYS_IOCTL: usize = k::__NR_ioctl as usize;
const SYS_SHMAT: usize = k::__NR_shmat as usize;
const SYS_MLOCKALL: usize = k::__NR_mlockall as usize;
const SYS_PROCESS_MADVISE: usize = k::__NR_process_madvise as usize;
const SYS_REMAP_FILE_PAGES: usize = k::__NR_remap_file_pages as usize;

/// System calls that [`KINDS`] covers; higher numbers pass through.
const MAX_CALL_NUMBERS: usize = 512;
/// [`hooked`] makes the call in the place of libc's function.
const HOOK_REPLACES: u8 = 1;
/// [`syscall_next`] is told, and libc's function makes the call.
const HOOK_BEFORE: u8 = 2;

/// The action of [`syscall`] for each call: one byte per number, 0 for those that pass through.
static KINDS: [u8; MAX_CALL_NUMBERS] = {
    let mut kinds = [0; MAX_CALL_NUMBERS];
    let instead = [
        SYS_MADVISE,
        SYS_MREMAP,
        SYS_EXECVE,
        SYS_EXECVEAT,
        SYS_IOCTL,
        SYS_SHMAT,
        SYS_MLOCKALL,
        SYS_PROCESS_MADVISE,
        SYS_REMAP_FILE_PAGES,
        SYS_PRCTL,
        SYS_SECCOMP,
        namespaces::SYS_UNSHARE,
        namespaces::SYS_SETNS,
        kernel_words::SYS_FUTEX,
        past_writes::SYS_PROCESS_VM_WRITEV,
    ];
    let before = [
        SYS_CLONE,
        SYS_FORK,
        SYS_CLONE3,
        SYS_EXIT,
        SYS_SET_TID_ADDRESS,
        SYS_SET_ROBUST_LIST,
        SYS_RSEQ,
    ];
    let sends = [
        sends::SYS_VMSPLICE,
        sends::SYS_SENDTO,
        sends::SYS_SENDMSG,
        sends::SYS_SENDMMSG,
        sends::SYS_SETSOCKOPT,
        sends::SYS_IO_URING_SETUP,
        sends::SYS_IO_URING_ENTER,
    ];
    let mut i = 0;
    while i < sends.len() {
        kinds[sends[i]] = HOOK_BEFORE;
        i += 1;
    }
    let opens = [sends::SYS_OPEN, sends::SYS_OPENAT, sends::SYS_OPENAT2, sends::SYS_FCNTL];
    let mut i = 0;
    while i < opens.len() {
        kinds[opens[i]] = HOOK_REPLACES;
        i += 1;
    }
    let mut i = 0;
    while i < instead.len() {
        kinds[instead[i]] = HOOK_REPLACES;
        i += 1;
    }
    let mut i = 0;
    while i < before.len() {
        kinds[before[i]] = HOOK_BEFORE;
        i += 1;
    }
    kinds
};

const CLONE_VM: u64 = k::CLONE_VM as u64;
const CLONE_VFORK: u64 = k::CLONE_VFORK as u64;
const CLONE_THREAD: u64 = k::CLONE_THREAD as u64;

/// Before a new task: if it will share the memory and not end with this process, nothing may be
/// swapped any more. False where that cannot be had: no task may be made.
fn before_clone(flags: u64) -> bool {
    if flags & CLONE_VM != 0 {
        process::will_have_threads();
    }
    if seccomp::is() {
        // Only threads share all that there is.
        if flags & (CLONE_VFORK | CLONE_THREAD) == 0 {
            process::detach_without_calls();
        }
        return true;
    }
    if flags & CLONE_VM == 0 && process::engine().is_some_and(|engine| engine.fork.followed) {
        // Nothing tells of this fork, and nothing follows it: its child must find nothing missing.
        return process::detach();
    }
    if flags & (CLONE_VM | CLONE_VFORK | CLONE_THREAD) != CLONE_VM {
        return true;
    }
    excluded::exclude(VirtRange { start: VirtAddr(0), end: VirtAddr(usize::MAX) });
    // Management that begins at this moment may have looked before.
    wait_for_begin();
    if process::engine().is_none() {
        return true;
    }
    let Ok(maps) = MapsFile::open_high() else {
        swaptide_sys::thread::abort_with(&[
            b"swaptide: a process that shares this one's memory needs all of it in RAM, and \
            /proc/self/maps cannot be read; stopped \
              rather than given wrong data",
        ])
    };
    let mut at = VirtAddr(0);
    let mut is_all_here = true;
    while let Ok(Some(info)) = maps.vma_at_or_next(at) {
        let vma = info.vma();
        if vma.is_private_anon() {
            program_parts(vma.range, |part| {
                is_all_here = is_all_here && mappings::release_range(part);
            });
        }
        if vma.range.end <= at || !is_all_here {
            break;
        }
        at = vma.range.end;
    }
    is_all_here
}

/// The word that the kernel clears when a new thread ends, or writes when it begins.
fn before_thread(flags: u64, child_tid: usize) {
    const CLONE_CHILD_CLEARTID: u64 = k::CLONE_CHILD_CLEARTID as u64;
    const CLONE_CHILD_SETTID: u64 = k::CLONE_CHILD_SETTID as u64;
    if flags & CLONE_VM != 0 && flags & (CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID) != 0 {
        kernel_words::named(child_tid, 4);
    }
}

/// In the place of a call that may not be made at the moment.
extern "C" fn refuse() -> c_long {
    real::set_errno(Errno::AGAIN);
    -1
}

/// Called by [`clone`]; answers with the function that it jumps to.
extern "C" fn clone_next(flags: u64, child_tid: usize) -> *mut c_void {
    if !before_clone(flags & 0xffff_ffff) {
        return refuse as *const () as *mut c_void;
    }
    before_thread(flags, child_tid);
    real::CLONE.address()
}

/// Called by [`syscall`] for the calls that make a task or end one, or confine it; answers with
/// the function that it jumps to.
extern "C" fn syscall_next(
    number: usize,
    first: usize,
    second: usize,
    third: usize,
    fourth: usize,
) -> *mut c_void {
    let may_be_made = match number {
        SYS_CLONE => {
            let may_be_made = before_clone(first as u64 & 0xffff_ffff);
            before_thread(first as u64, fourth);
            may_be_made
        }
        SYS_FORK => before_clone(0),
        SYS_CLONE3 => match probe::read_words(first) {
            // Flags, a pid descriptor, and the word that is cleared.
            Some([flags, _, child_tid]) => {
                let may_be_made = before_clone(flags as u64);
                before_thread(flags as u64, child_tid);
                may_be_made
            }
            // A bad address is the kernel's to refuse.
            None => true,
        },
        SYS_EXIT => {
            exit_watch::ending(first);
            kernel_words::ending();
            true
        }
        SYS_SET_TID_ADDRESS => {
            kernel_words::named(first, 4);
            true
        }
        SYS_SET_ROBUST_LIST => {
            kernel_words::named_list(first);
            true
        }
        SYS_RSEQ => {
            kernel_words::named(first, second.clamp(32, 4096));
            true
        }
        _ => sends::before(number, second, third, fourth),
    };
    if may_be_made { real::SYSCALL.address() } else { refuse as *const () as *mut c_void }
}

/// Called by [`syscall`] for the calls that have a hook of their own ([`HOOK_REPLACES`]), which
/// goes there by a jump: the seventh parameter is the call's sixth argument.
unsafe extern "C" fn hooked(
    number: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    real::libc_result(match number {
        SYS_PRCTL | SYS_SECCOMP => {
            // SAFETY: the program's own arguments.
            let call = || unsafe { syscall6(number as u32, [a, b, c, d, e, f]) } as isize;
            const SECCOMP_FILTER_FLAG_TSYNC: usize =
                linux_raw_sys::ptrace::SECCOMP_FILTER_FLAG_TSYNC as usize;
            const SECCOMP_FILTER_FLAG_TSYNC_ESRCH: usize =
                linux_raw_sys::ptrace::SECCOMP_FILTER_FLAG_TSYNC_ESRCH as usize;
            const ESRCH: isize = linux_raw_sys::errno::ESRCH as isize;
            // Without a filter the call only asks whether the kernel knows it.
            let is_for_all = number == SYS_SECCOMP
                && a == seccomp::SECCOMP_SET_MODE_FILTER
                && b & SECCOMP_FILTER_FLAG_TSYNC != 0
                && c != 0;
            while is_for_all && !process::detach() {
                // As where a thread cannot be put under the filter.
                match FORKING.load(Relaxed) as isize {
                    0 => {}
                    _ if b & SECCOMP_FILTER_FLAG_TSYNC_ESRCH != 0 => {
                        return real::libc_result(-ESRCH);
                    }
                    forking => return real::libc_result(forking),
                }
            }
            let sets = if number == SYS_PRCTL {
                seccomp::sets_by_prctl(a, b, c)
            } else {
                seccomp::sets(a, c)
            };
            if sets { seccomp::set(call) } else { call() }
        }
        kernel_words::SYS_FUTEX => kernel_words::futex([a, b, c, d, e, f]),
        SYS_MADVISE => -(memory::advise(a, b, c as c_int) as isize),
        SYS_MREMAP => mremap::remap(a, b, c, d as c_int, e),
        sends::SYS_OPEN | sends::SYS_OPENAT | sends::SYS_OPENAT2 | sends::SYS_FCNTL => {
            sends::instead(number, [a, b, c, d, e, 0])
        }
        SYS_IOCTL => mappings::control_raw(a, b, c),
        SYS_SHMAT => mappings::attach(a, b, c),
        SYS_MLOCKALL => mappings::lock_all(a),
        namespaces::SYS_UNSHARE => namespaces::unshare_from(a),
        namespaces::SYS_SETNS => namespaces::enter(a, b),
        SYS_PROCESS_MADVISE => memory::advise_process(a, b, c, d as c_int, e),
        SYS_REMAP_FILE_PAGES => memory::remap_pages([a, b, c, d, e, f]),
        past_writes::SYS_PROCESS_VM_WRITEV => past_writes::write([a, b, c, d, e, f]),
        // SAFETY: the program's own arguments; the environment is as execve(2) takes it.
        SYS_EXECVE => unsafe {
            process::announce_exec();
            environment::with_environment(c as *const *const c_char, |envp| {
                syscall6(SYS_EXECVE as u32, [a, b, envp as usize, 0, 0, 0]) as c_int
            }) as isize
        },
        // SAFETY: the program's own arguments; the environment is as execveat(2) takes it.
        _ => unsafe {
            process::announce_exec();
            environment::with_environment(d as *const *const c_char, |envp| {
                syscall6(SYS_EXECVEAT as u32, [a, b, c, envp as usize, e, 0]) as c_int
            }) as isize
        },
    })
}

/// Stands in front of libc's `syscall`.
///
/// # Safety
/// As for the system call.
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn syscall() {
    core::arch::naked_asm!(
        "cmp rdi, {calls}",
        "jae 1f",
        "lea rax, [rip + {kinds}]",
        "movzx eax, byte ptr [rax + rdi]",
        "cmp eax, {instead}",
        "je 2f",
        "cmp eax, {before}",
        "je 3f",
        "1:",
        "mov rax, qword ptr [rip + {real} + {found}]",
        "test rax, rax",
        "jz 3f",
        "jmp rax",
        "2:",
        "jmp {hooked}",
        "3:",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8",
        "call {next}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        calls = const MAX_CALL_NUMBERS,
        kinds = sym KINDS,
        instead = const HOOK_REPLACES,
        before = const HOOK_BEFORE,
        real = sym real::SYSCALL,
        found = const real::ADDRESS_OFFSET,
        hooked = sym hooked,
        next = sym syscall_next,
    )
}

/// Stands in front of libc's `prctl`: after a filter of system calls, some of swaptide's own are
/// not made any more.
///
/// # Safety
/// As for prctl(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    // SAFETY: the program's own arguments.
    let call = || unsafe { syscall6(SYS_PRCTL as u32, [option as usize, a, b, c, d, 0]) } as isize;
    let sets = seccomp::sets_by_prctl(option as usize, a, b);
    real::libc_result(if sets { seccomp::set(call) } else { call() }) as c_int
}

/// Stands in front of libc's `_Fork`, which calls no handlers, and behind which a child would not
/// be managed.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[allow(non_snake_case, reason = "libc's name")]
pub extern "C" fn _Fork() -> c_int {
    let Some(fork) = real::PLAIN_FORK.get() else {
        real::set_errno(Errno::NOSYS);
        return -1;
    };
    with_handlers(|| fork())
}

/// Stands in front of libc's `clone`.
///
/// # Safety
/// As for clone(2).
#[unsafe(naked)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn clone() {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8",
        "mov rdi, rdx",
        // The seventh argument, behind the return address and what was pushed.
        "mov rsi, qword ptr [rsp + 64]",
        "call {next}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        next = sym clone_next,
    )
}
