//! Hooks of the calls that put a process into other namespaces: some are allowed to processes of
//! one thread only, and the engine's threads count.
//!
//! Where such a call fails for that reason, and the program has one thread, the process is detached
//! and the engine's threads end. Then the call is made again. The process stays unmanaged until it
//! executes a program, which is what those that make such calls do next.
//!
//! Owns: nothing. Locks: [`crate::process::FORK_LOCK`], as for any detaching.

use std::ffi::c_int;
use std::time::Duration;

use linux_raw_sys::general as k;
use swaptide_sys::engine_threads;
use swaptide_sys::raw::syscall6;
use swaptide_sys::thread::{now, sleep};

use crate::lifecycle;
use crate::process;
use crate::real;
use crate::shmem;

pub(super) const SYS_UNSHARE: usize = k::__NR_unshare as usize;
pub(super) const SYS_SETNS: usize = k::__NR_setns as usize;
/// `_IO(0xb7, 3)`.
const NS_GET_NSTYPE: usize = 0xb703;

/// The time in which threads end that were told to.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// The same where they end by themselves.
const ENDING_TIME: Duration = Duration::from_millis(50);
const END_INTERVAL: Duration = Duration::from_micros(100);

/// True for the error of a call that is for processes of one thread.
fn is_for_one_thread(result: isize) -> bool {
    const EINVAL: isize = linux_raw_sys::errno::EINVAL as isize;
    const EUSERS: isize = linux_raw_sys::errno::EUSERS as isize;
    result == -EINVAL || result == -EUSERS
}

/// True if the program has other threads than the first one, as far as can be told from engine
/// threads that have ended a moment ago.
fn has_others() -> bool {
    !matches!(engine_threads::find_program_thread(Some), Ok(None))
}

/// Waits until the program's first thread is the only one of the process.
fn wait_to_be_alone(most: Duration) {
    let began = now();
    // One that has ended counts until the kernel has forgotten it.
    while (engine_threads::are_any() || has_others()) && now().since(began) < most {
        sleep(END_INTERVAL);
    }
}

/// Makes a call that is for processes of one thread, without the engine's if they are in its way.
fn as_one_thread(call: impl Fn() -> isize) -> isize {
    let had_threads = engine_threads::are_any();
    let result = call();
    if !is_for_one_thread(result) || !had_threads || shmem::is_guarded() {
        return result;
    }
    let is_foreign = process::known_segment().is_some_and(|of| !lifecycle::same_pid_namespace(of));
    if is_foreign || has_others() {
        // Nothing is managed, and a thread may be about to end.
        wait_to_be_alone(ENDING_TIME);
    } else if process::leave() {
        wait_to_be_alone(END_TIMEOUT);
    } else {
        return result;
    }
    call()
}

/// `unshare(2)`. An unknown flag is refused for all processes alike.
pub(super) fn unshare_from(flags: usize) -> isize {
    const FOR_ONE_THREAD: u32 = k::CLONE_NEWUSER | k::CLONE_THREAD | k::CLONE_SIGHAND | k::CLONE_VM;
    const KNOWN: u32 = FOR_ONE_THREAD
        | k::CLONE_FS
        | k::CLONE_FILES
        | k::CLONE_SYSVSEM
        | k::CLONE_NEWNS
        | k::CLONE_NEWUTS
        | k::CLONE_NEWIPC
        | k::CLONE_NEWNET
        | k::CLONE_NEWPID
        | k::CLONE_NEWCGROUP
        | k::CLONE_NEWTIME;
    // SAFETY: the program's own call.
    let call = || unsafe { syscall6(SYS_UNSHARE as u32, [flags, 0, 0, 0, 0, 0]) } as isize;
    let is_one_of_them = flags & FOR_ONE_THREAD as usize != 0 && flags & !(KNOWN as usize) == 0;
    if is_one_of_them { as_one_thread(call) } else { call() }
}

/// `setns(2)`.
pub(super) fn enter(fd: usize, kind: usize) -> isize {
    const FOR_ONE_THREAD: usize = (k::CLONE_NEWUSER | k::CLONE_NEWTIME) as usize;
    // SAFETY: the program's own call.
    let call = || unsafe { syscall6(SYS_SETNS as u32, [fd, kind, 0, 0, 0, 0]) } as isize;
    // SAFETY: it tells the kind of a namespace, and fails for all else.
    let is_of = unsafe { syscall6(k::__NR_ioctl, [fd, NS_GET_NSTYPE, 0, 0, 0, 0]) } as isize;
    let kind = if is_of > 0 { is_of as usize } else { kind };
    if kind & FOR_ONE_THREAD != 0 { as_one_thread(call) } else { call() }
}

/// Stands in front of libc's `unshare`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn unshare(flags: c_int) -> c_int {
    real::libc_result(unshare_from(flags as usize)) as c_int
}

/// Stands in front of libc's `setns`.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn setns(fd: c_int, kind: c_int) -> c_int {
    real::libc_result(enter(fd as usize, kind as usize)) as c_int
}
