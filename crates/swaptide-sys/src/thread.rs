//! Threads that libc does not know, and the few calls such a thread makes about itself.
//!
//! An engine thread runs together with the program's own threads while the memory under those may
//! be missing. It must never touch the program's stacks, thread-locals or heap. So it is made by a
//! bare `clone`, with a stack and a thread-local block of its own.
//!
//! Memory of a thread, low to high (one mapping, listed in [`crate::mem::own_ranges`]):
//!
//! ```text
//!   guard page | stack | 64 KiB of zeroed thread-locals | thread control page
//!              |       ^ first stack frame              ^ thread pointer (x86-64)
//! ```
//!
//! Compiled code finds `errno` and the like below the thread pointer (x86-64), the stack guard in
//! the control page: both are there, so code that uses them works and stays off the program's.
//! Thread-locals start as zeros, not with their initial values, and libc's own thread functions
//! must not be called.
//!
//! Invariants:
//! 1. An engine thread has every signal blocked from its first instruction on: no handler of the
//!    program ever runs on it.
//! 2. Its root and working directory are its own, as the thread that started it had them: the
//!    program may go elsewhere.
//! 3. Its memory is never given back. A thread cannot unmap the stack it ends on, and engine
//!    threads live as long as the process.

use core::ffi::CStr;
use core::sync::atomic::AtomicU32;
use core::time::Duration;

use linux_raw_sys::general as k;
use rustix::io::Errno;

use crate::engine_threads;
pub use crate::ids::{Pid, Tid};
use crate::mem::{self, Mapping};
use crate::page::{PAGE_SIZE, VirtRange};
use crate::raw::syscall;
pub use crate::time::{Nanos, now, sleep};

/// Bytes of thread-locals below the thread pointer of an engine thread.
pub const TLS_BYTES: usize = 64 << 10;

/// Starts a thread that runs `entry(arg)` on its own stack of `stack` bytes (at least 16 KiB), with
/// all signals blocked and its own thread-local block; it ends when `entry` returns.
///
/// # Safety
/// `entry` keeps to what an engine thread may do: no libc function with hidden state, no thread of
/// libc's, no panic that unwinds out of it; and `arg` means to it what the caller thinks. The
/// calling thread is one of libc's (its guards are copied), or an engine thread.
pub unsafe fn spawn_engine_thread(
    stack: usize,
    entry: extern "C" fn(usize),
    arg: usize,
) -> Result<Tid, Errno> {
    let stack = stack.max(16 << 10).checked_next_multiple_of(PAGE_SIZE).ok_or(Errno::NOMEM)?;
    let len = stack.checked_add(PAGE_SIZE + TLS_BYTES + PAGE_SIZE).ok_or(Errno::NOMEM)?;
    let memory = Mapping::reserve(len)?;
    // SAFETY: the lowest page of a mapping that is not used yet.
    unsafe { mem::protect(VirtRange::from_len(memory.range().start, PAGE_SIZE), false)? };
    let stack_top = memory.range().start.offset(PAGE_SIZE + stack);
    // SAFETY: the area above the stack is mapped, zeroed and not used yet.
    let thread_pointer = unsafe { arch::prepare_tls(stack_top.offset(TLS_BYTES).as_ptr()) };

    let place = engine_threads::take_place();
    let mut flags = k::CLONE_VM
        | k::CLONE_FILES
        | k::CLONE_SIGHAND
        | k::CLONE_THREAD
        | k::CLONE_SYSVSEM
        | k::CLONE_SETTLS;
    if place.is_some() {
        flags |= k::CLONE_PARENT_SETTID | k::CLONE_CHILD_CLEARTID;
    }
    let id = place.map_or(core::ptr::null_mut(), AtomicU32::as_ptr);
    let old_mask = block_all_signals();
    let made = old_mask.and_then(|old_mask| {
        // SAFETY: stack and thread pointer lie in memory that is leaked below; the caller
        // guarantees that `entry` may run with `arg`; the word for the id is a static.
        let ret = unsafe {
            arch::clone_thread(flags as usize, stack_top.0, thread_pointer, id, entry, arg)
        };
        restore_signals(old_mask);
        crate::raw::check(ret)
    });
    if made.is_err() {
        place.into_iter().for_each(engine_threads::free_place);
    }
    let tid = made?;
    // The thread stands on this memory for as long as it lives (invariant 3).
    let _ = memory.into_raw();
    Ok(Tid(tid as u32))
}

/// Runs `entry(arg)` in a child that has this process's memory, and returns when that has ended, as
/// after vfork(2).
///
/// # Safety
/// `entry` makes system calls only, and needs no thread-locals.
#[cfg(test)]
pub(crate) unsafe fn vfork_child(entry: extern "C" fn(usize), arg: usize) -> Result<(), Errno> {
    let stack = Mapping::reserve(64 << 10)?;
    let flags = k::CLONE_VM | k::CLONE_VFORK | k::SIGCHLD;
    let none = core::ptr::null_mut();
    // SAFETY: the stack is there until the child has ended; the rest is the caller's promise.
    let made =
        unsafe { arch::clone_thread(flags as usize, stack.range().end.0, 0, none, entry, arg) };
    crate::raw::check(made).map(drop)
}

/// 16 random bytes.
pub fn random_name() -> Result<u128, Errno> {
    let mut random = [0u8; 16];
    match rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())? {
        16 => Ok(u128::from_le_bytes(random)),
        _ => Err(Errno::INTR),
    }
}

/// Blocks every signal there is for the calling thread (also those libc keeps for itself) and gives
/// the mask as it was.
pub fn block_all_signals() -> Result<u64, Errno> {
    let (all, mut old) = (u64::MAX, 0u64);
    let (new, old_ptr) = ((&raw const all) as usize, (&raw mut old) as usize);
    // SAFETY: both masks are the 8 bytes the kernel takes.
    unsafe { syscall!(k::__NR_rt_sigprocmask, k::SIG_SETMASK, new, old_ptr, 8usize) }?;
    Ok(old)
}

/// Sets the calling thread's signal mask, as [`block_all_signals`] gave it.
pub fn restore_signals(mask: u64) {
    // SAFETY: the mask is the 8 bytes the kernel reads; nothing is written.
    let _ = unsafe {
        syscall!(k::__NR_rt_sigprocmask, k::SIG_SETMASK, (&raw const mask) as usize, 0usize, 8usize)
    };
}

mod arch {
    use core::arch::asm;

    /// Fills the thread control page; gives the thread pointer. Thread-locals lie below it.
    ///
    /// # Safety
    /// `tls..control` and one page from `control` are zeroed memory that is not used.
    pub unsafe fn prepare_tls(control: *mut u8) -> usize {
        let words = control.cast::<usize>();
        let at = control.expose_provenance();
        let (dtv, stack_guard, pointer_guard): (usize, usize, usize);
        // SAFETY: on a thread of libc's or the engine's these three words of its control block are
        // readable.
        unsafe {
            asm!(
                "mov {}, fs:[0x08]",
                out(reg) dtv,
                options(nostack, readonly, preserves_flags)
            );
            asm!(
                "mov {}, fs:[0x28]",
                out(reg) stack_guard,
                options(nostack, readonly, preserves_flags)
            );
            asm!(
                "mov {}, fs:[0x30]",
                out(reg) pointer_guard,
                options(nostack, readonly, preserves_flags)
            );
        }
        // SAFETY: the control page is ours to fill; all offsets lie in its first words.
        unsafe {
            words.write(at); // +0x00 itself: compiled code reads its thread pointer here
            words.add(1).write(dtv); // +0x08
            words.add(2).write(at); // +0x10 the "self" libc reads
            words.add(3).write(1); // +0x18 libc's "there are several threads"
            words.add(5).write(stack_guard); // +0x28
            words.add(6).write(pointer_guard); // +0x30
        }
        at
    }

    /// The bare clone. Returns in the parent only.
    ///
    /// # Safety
    /// `stack_top` is 16-byte aligned with free stack below, `tls` a thread pointer; both stay for
    /// ever, as does the word `id` where the flags have the kernel write the thread's id there.
    pub unsafe fn clone_thread(
        flags: usize,
        stack_top: usize,
        tls: usize,
        id: *mut u32,
        entry: extern "C" fn(usize),
        arg: usize,
    ) -> isize {
        let ret: isize;
        // SAFETY: the child leaves this block only by ending; the parent sees an ordinary system
        // call. The child has a zero frame pointer, so that stack walks stop, and a 16-byte aligned
        // stack at the call.
        unsafe {
            asm!(
                "syscall",
                "test rax, rax",
                "jnz 2f",
                "xor ebp, ebp",
                "mov rdi, r13",
                "call r12",
                "xor edi, edi",
                "mov eax, 60",
                "syscall",
                "ud2",
                "2:",
                inlateout("rax") linux_raw_sys::general::__NR_clone as usize as isize => ret,
                in("rdi") flags, in("rsi") stack_top, in("rdx") id,
                in("r10") id, in("r8") tls,
                in("r12") entry, in("r13") arg,
                lateout("rcx") _, lateout("r11") _,
                options(nostack),
            );
        }
        ret
    }
}

/// The calling thread's id.
pub fn gettid() -> Tid {
    // SAFETY: no memory is passed.
    Tid(unsafe { syscall!(k::__NR_gettid) }.map_or(0, |tid| tid as u32))
}

/// This process's id.
pub fn getpid() -> Pid {
    // SAFETY: no memory is passed.
    Pid(unsafe { syscall!(k::__NR_getpid) }.map_or(0, |pid| pid as u32))
}

/// True if this process has a thread of that id.
pub fn lives(tid: Tid) -> bool {
    // SAFETY: signal 0 is none; no memory is passed.
    let asked = unsafe { syscall!(k::__NR_tgkill, getpid().0, tid.0, 0usize) };
    asked != Err(Errno::SRCH)
}

/// Gives the calling thread a name (15 bytes count) for `ps`, `top` and debuggers.
pub fn set_name(name: &CStr) {
    // SAFETY: the kernel copies the string.
    let _ = unsafe {
        syscall!(k::__NR_prctl, linux_raw_sys::prctl::PR_SET_NAME, name.as_ptr() as usize)
    };
}

/// Gives the calling thread a descriptor table of its own and closes in it all but `keep` (at most
/// 64). So the program can neither close nor reuse a number this thread works with.
pub fn unshare_files_and_close_all(keep: &[i32]) -> Result<(), Errno> {
    const CLOSE_RANGE_UNSHARE: u32 = 2;
    let mut sorted = [0u32; 64];
    let kept = sorted.get_mut(..keep.len()).ok_or(Errno::INVAL)?;
    for (place, &fd) in kept.iter_mut().zip(keep) {
        *place = u32::try_from(fd).map_err(|_| Errno::BADF)?;
    }
    kept.sort_unstable();
    let close = |first: u32, last: u32, flags: u32| {
        // SAFETY: close_range(2) writes to no memory. The caller's contract is that no thread of
        // this table uses one of these descriptors any more.
        unsafe { syscall!(k::__NR_close_range, first, last, flags) }.map(drop)
    };
    // The upper part first: the kernel then copies only what lies below it into the new table.
    close(kept.last().map_or(0, |&fd| fd + 1), u32::MAX, CLOSE_RANGE_UNSHARE)?;
    let mut first = 0;
    for &fd in kept.iter() {
        if first < fd {
            close(first, fd - 1, 0)?;
        }
        first = fd + 1;
    }
    Ok(())
}

/// Ends the calling thread only.
///
/// On a thread of libc's this leaves libc believing it still runs: for engine threads.
pub fn exit_thread() -> ! {
    loop {
        // SAFETY: ends the thread; its stack is never given back (invariant 3).
        let _ = unsafe { syscall!(k::__NR_exit, 0usize) };
    }
}

/// Ends the calling thread only, and gives its stack back.
///
/// # Safety
/// `memory` is a mapping with this thread's stack, which nothing uses any more.
pub unsafe fn exit_thread_and_unmap(memory: VirtRange) -> ! {
    // SAFETY: between the two calls no memory is accessed; the rest is the caller's promise.
    unsafe {
        core::arch::asm!(
            "syscall",
            "xor edi, edi",
            "mov eax, 60",
            "syscall",
            "ud2",
            in("rax") k::__NR_munmap as usize,
            in("rdi") memory.start.0,
            in("rsi") memory.len(),
            options(noreturn, nostack),
        )
    }
}

/// Ends the process at once: no exit handlers, no flushing.
pub fn exit_group(code: i32) -> ! {
    loop {
        // SAFETY: no memory is passed.
        let _ = unsafe { syscall!(k::__NR_exit_group, code) };
    }
}

/// Time that [`abort_with`] may take to write its message.
const ABORT_WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// Has the kernel send this process `SIGKILL` after `time`.
fn kill_after(time: Duration) {
    // `struct sigevent`: value, signal number, `SIGEV_SIGNAL`, padding.
    let mut event = [0u32; 16];
    event[2] = k::SIGKILL;
    let mut timer = 0i32;
    let value =
        k::__kernel_timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    let once = k::__kernel_itimerspec {
        it_interval: k::__kernel_timespec { tv_sec: 0, tv_nsec: 0 },
        it_value: value,
    };
    let (event, id, once) =
        (event.as_ptr() as usize, (&raw mut timer) as usize, (&raw const once) as usize);
    // SAFETY: the kernel reads a sigevent of 64 bytes and an itimerspec, and writes the timer's id.
    unsafe {
        if syscall!(k::__NR_timer_create, k::CLOCK_MONOTONIC, event, id).is_ok() {
            let _ = syscall!(k::__NR_timer_settime, timer, 0usize, once, 0usize);
        }
    }
}

/// Writes the parts as one line to the program's standard error, if that is open, and kills the
/// process by `SIGABRT`, past any handler of the program's. An engine thread has a descriptor table
/// of its own: the program's is found in /proc.
///
/// The write cannot keep the process from ending. On a full pipe it fails (`O_NONBLOCK`). On a file
/// it may wait for the inode lock, whose holder may wait for a page that is never brought in:
/// after `ABORT_WRITE_TIMEOUT` the kernel ends the process by `SIGKILL`, which also frees that
/// lock.
pub fn abort_with(msg: &[&[u8]]) -> ! {
    let mut line = [0u8; 1024];
    let mut len = 0;
    for part in msg {
        // The last byte is kept for the end of the line.
        let n = part.len().min(line.len() - 1 - len);
        line[len..len + n].copy_from_slice(&part[..n]);
        len += n;
    }
    line[len] = b'\n';
    kill_after(ABORT_WRITE_TIMEOUT);
    // There is no thread left that could be told of a failure.
    if let Some(stderr) = engine_threads::open_stderr() {
        let _ = rustix::io::write(&stderr, &line[..len + 1]);
    }

    // A handler of the program's would run on a doubtful address space.
    let default_action = [0usize; 4];
    let abort_only = 1u64 << (k::SIGABRT - 1);
    let (action, mask) = (default_action.as_ptr() as usize, (&raw const abort_only) as usize);
    // SAFETY: the kernel reads a zeroed sigaction (the default) and an 8-byte mask.
    unsafe {
        let _ = syscall!(k::__NR_rt_sigaction, k::SIGABRT, action, 0usize, 8usize);
        let _ = syscall!(k::__NR_rt_sigprocmask, k::SIG_UNBLOCK, mask, 0usize, 8usize);
        let _ = syscall!(k::__NR_tgkill, getpid().0, gettid().0, k::SIGABRT);
    }
    // Only a tracer that swallowed the signal lets us come here.
    exit_group(128 + k::SIGABRT as i32)
}

/// Writes a line to the program's standard error, if that is open. For threads of the program: the
/// file may be locked by one that waits for the engine.
pub fn tell(line: &[u8]) {
    if let Some(stderr) = engine_threads::open_stderr() {
        let _ = rustix::io::write(&stderr, line);
    }
}

/// Sends a signal to a process.
pub fn kill(pid: Pid, signal: i32) -> Result<(), Errno> {
    // SAFETY: no memory is passed.
    unsafe { syscall!(k::__NR_kill, pid.0, signal) }.map(drop)
}

/// CPU time the calling thread has used.
pub fn thread_cpu_time() -> Nanos {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// CPU time that a thread of this process has used; `None` when there is no such thread.
pub fn cpu_time_of(tid: Tid) -> Option<Nanos> {
    // The kernel's number for the scheduler's clock of one thread.
    let clock = !tid.0 << 3 | 6;
    let mut time = k::__kernel_timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one struct.
    unsafe { syscall!(k::__NR_clock_gettime, clock as i32 as isize, (&raw mut time) as usize) }
        .ok()?;
    Some(Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64))
}

/// Ends the process if it was told to and would end by that, were its signals not blocked: for a
/// thread that has waited long with all signals blocked. `mask` is the thread's own signal mask, as
/// [`block_all_signals`] gave it.
///
/// Only a signal whose action is the default one is let through. The process then ends as if by
/// `SIGKILL`: none of its code runs.
pub fn end_if_told(mask: u64) {
    const ENDING: [u32; 4] = [k::SIGHUP, k::SIGINT, k::SIGQUIT, k::SIGTERM];
    let mut pending = 0u64;
    // SAFETY: the kernel writes 8 bytes.
    if unsafe { syscall!(k::__NR_rt_sigpending, (&raw mut pending) as usize, 8usize) }.is_err() {
        return;
    }
    for signal in ENDING {
        let bit = 1u64 << (signal - 1);
        let mut action = [0usize; 4];
        // SAFETY: the kernel writes one sigaction, which is four words.
        let known = unsafe {
            syscall!(k::__NR_rt_sigaction, signal, 0usize, action.as_mut_ptr() as usize, 8usize)
        };
        // The first word is the handler; 0 is the default action.
        if pending & bit & !mask != 0 && known.is_ok() && action[0] == 0 {
            // SAFETY: the kernel reads an 8-byte mask.
            let _ = unsafe {
                syscall!(
                    k::__NR_rt_sigprocmask,
                    k::SIG_UNBLOCK,
                    (&raw const bit) as usize,
                    0usize,
                    8usize
                )
            };
            // Another thread has taken it.
            let _ = block_all_signals();
        }
    }
}

/// Ends the process by a signal, whatever its action is.
pub fn end_by_signal(signal: u32) -> ! {
    let (default, all) = ([0usize; 4], u64::MAX);
    // SAFETY: the kernel reads one sigaction, which is four words, and an 8-byte mask.
    unsafe {
        let _ = syscall!(k::__NR_rt_sigaction, signal, default.as_ptr() as usize, 0usize, 8usize);
        let _ = syscall!(
            k::__NR_rt_sigprocmask,
            k::SIG_UNBLOCK,
            (&raw const all) as usize,
            0usize,
            8usize
        );
        let _ = syscall!(k::__NR_kill, getpid().0, signal);
    }
    exit_group(128 + signal as i32)
}

/// Lets another thread run, if one wants to.
pub fn yield_now() {
    // SAFETY: no memory is passed.
    let _ = unsafe { syscall!(k::__NR_sched_yield) };
}
