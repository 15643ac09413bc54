//! The library in a program that has not loaded it: a static one, or one of another libc.
//!
//! The supervisor maps the library, relocates it, and starts a thread in it ([`start`]); neither
//! constructors nor hooks run. An engine thread needs no libc: what the library imports from one is
//! bound to the stand-ins here.
//!
//! | imported | bound to |
//! |---|---|
//! | `__errno_location` | one word for all threads; nothing reads it |
//! | `environ`, `getenv` | an empty environment |
//! | `mmap`, `fcntl`, `syscall` | the bare system call, in place of this library's own hooks |
//! | `dlsym`, `dladdr` | nothing is found |
//! | what may be absent (weak) | null |
//! | all else | [`missing`]: a message, and the end of the process |
//!
//! Owns: the stand-ins' words. Locks: none.

use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::Relaxed};

use linux_raw_sys::general::{__NR_fcntl, __NR_mmap};
use swaptide_ipc::injected::{InjectedArgs, InjectedRange};
use swaptide_sys::helper;
use swaptide_sys::mem::note_own;
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::raw::syscall6;
use swaptide_sys::thread::{abort_with, exit_thread_and_unmap, getpid, now};

use crate::libc_names;
use crate::lifecycle::{report_panics, start_sleeper};
use crate::log;
use crate::marks::mark_memory;
use crate::own_pid::OWN_PID;
use crate::pages::thread_words;
use crate::past_libc;
use crate::process::{HELPER, set_socket};
use crate::withdrawal;

fn range(range: InjectedRange) -> VirtRange {
    VirtRange::from_len(VirtAddr(range.start as usize), range.len as usize)
}

/// # Safety
/// The range is memory of this process that does not change.
unsafe fn bytes(range: InjectedRange) -> &'static [u8] {
    if range.len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(range.start as *const u8, range.len as usize) }
}

/// The first thread's code, and the call that makes it: a thread of the program is made to begin
/// here, and stops as the call returns. In the new one flags and floating point are as at the start
/// of a program, not as the program's thread had them.
///
/// # Safety
/// Run by the supervisor's order alone (`swaptide_ipc::injected`).
#[cfg_attr(not(test), unsafe(export_name = "swaptide_injected_start"))]
#[unsafe(naked)]
pub unsafe extern "C" fn start() -> ! {
    core::arch::naked_asm!(
        "syscall",
        "test rax, rax",
        "jnz 2f",
        "xor ebp, ebp",
        "pop rdi",
        "push {flags}",
        "popfq",
        "fninit",
        "push {mxcsr}",
        "ldmxcsr [rsp]",
        "add rsp, 8",
        "call {begin}",
        "2:",
        "ud2",
        // Interrupts, and the bit that is always set.
        flags = const 0x202,
        // All exceptions masked.
        mxcsr = const 0x1f80,
        begin = sym begin,
    )
}

/// Starts the thread that waits for the supervisor, and ends.
///
/// # Safety
/// Run once, by the thread that the supervisor has made for it, with arguments that describe this
/// process.
unsafe extern "C" fn begin(args: *const InjectedArgs) -> ! {
    // SAFETY: the caller's promise.
    let args = unsafe { *args };
    libc_names::use_own_blocks();
    thread_words::look_for();
    // Before anything is managed, and all of it is: the library is never the program's.
    if note_own(range(args.image)).is_ok() {
        // SAFETY: the arguments' texts lie behind them and stay until the thread ends.
        let (socket, path) = unsafe { (bytes(args.socket), bytes(args.log)) };
        set_socket(socket);
        if !path.is_empty() {
            log::set_path(path);
        }
        OWN_PID.store(getpid().0, Relaxed);
        helper::set_helper(&HELPER);
        let _ = now();
        mark_memory();
        past_libc::set_program();
        withdrawal::set_image(range(args.image));
        report_panics();
        start_sleeper();
    }
    // SAFETY: what was in it was copied.
    unsafe { exit_thread_and_unmap(range(args.memory)) }
}

/// What is called where there is no libc to call.
#[cfg_attr(not(test), unsafe(export_name = "swaptide_injected_missing"))]
pub extern "C" fn missing() -> ! {
    abort_with(&[
        b"swaptide: a function of libc was called in a program that swaptide has no libc in; ",
        b"please report this",
    ])
}

fn as_libc(word: isize) -> isize {
    if (-4095..0).contains(&word) {
        ERRNO.store(-word as i32, Relaxed);
        return -1;
    }
    word
}

/// In place of libc's `syscall`.
///
/// # Safety
/// As for the system call.
#[cfg_attr(not(test), unsafe(export_name = "swaptide_injected_syscall"))]
pub unsafe extern "C" fn system_call(
    number: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> isize {
    // SAFETY: the caller's promise.
    as_libc(unsafe { syscall6(number as u32, [a, b, c, d, e, f]) })
}

/// In place of libc's `mmap`.
///
/// # Safety
/// As for mmap(2).
#[cfg_attr(not(test), unsafe(export_name = "swaptide_injected_mmap"))]
pub unsafe extern "C" fn map(
    at: usize,
    len: usize,
    protection: usize,
    flags: usize,
    fd: usize,
    offset: usize,
) -> isize {
    // SAFETY: the caller's promise.
    as_libc(unsafe { syscall6(__NR_mmap, [at, len, protection, flags, fd, offset]) })
}

/// In place of libc's `fcntl`.
///
/// # Safety
/// As for fcntl(2).
#[cfg_attr(not(test), unsafe(export_name = "swaptide_injected_fcntl"))]
pub unsafe extern "C" fn control(fd: usize, command: usize, argument: usize) -> i32 {
    // SAFETY: the caller's promise.
    as_libc(unsafe { syscall6(__NR_fcntl, [fd, command, argument, 0, 0, 0]) }) as i32
}

/// In place of `dlsym`, `dladdr` and `getenv`.
#[cfg_attr(not(test), unsafe(export_name = "swaptide_injected_dlsym"))]
pub extern "C" fn nothing() -> usize {
    0
}

static ERRNO: AtomicI32 = AtomicI32::new(0);

/// In place of libc's.
#[cfg_attr(not(test), unsafe(export_name = "swaptide_injected___errno_location"))]
pub extern "C" fn errno_location() -> *mut i32 {
    ERRNO.as_ptr()
}

/// In place of libc's `environ`.
#[cfg_attr(not(test), unsafe(export_name = "swaptide_injected_environ"))]
static ENVIRON: AtomicUsize = AtomicUsize::new(0);
