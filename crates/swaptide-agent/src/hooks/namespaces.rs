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

use crate::process;
use crate::real;

pub(super) const SYS_UNSHARE: usize = k::__NR_unshare as usize;
pub(super) const SYS_SETNS: usize = k::__NR_setns as usize;

/// The time in which threads end that were told to.
const END_TIMEOUT: Duration = Duration::from_secs(2);
const END_INTERVAL: Duration = Duration::from_micros(100);

/// True for the error of a call that is for processes of one thread.
fn is_for_one_thread(result: isize) -> bool {
    const EINVAL: isize = linux_raw_sys::errno::EINVAL as isize;
    const EUSERS: isize = linux_raw_sys::errno::EUSERS as isize;
    result == -EINVAL || result == -EUSERS
}

/// Makes a call, without the engine's threads if they are in its way.
fn as_one_thread(call: impl Fn() -> isize) -> isize {
    let result = call();
    let has_others = || !matches!(engine_threads::find_program_thread(Some), Ok(None));
    if !is_for_one_thread(result) || !engine_threads::are_any() || has_others() || !process::leave()
    {
        return result;
    }
    let began = now();
    // One that has ended counts until the kernel has forgotten it.
    while (engine_threads::are_any() || has_others()) && now().since(began) < END_TIMEOUT {
        sleep(END_INTERVAL);
    }
    call()
}

/// `unshare(2)`. An unknown flag is refused for all processes alike.
pub(super) fn unshare_from(flags: usize) -> isize {
    const FOR_ONE_THREAD: usize =
        (k::CLONE_NEWUSER | k::CLONE_THREAD | k::CLONE_SIGHAND | k::CLONE_VM) as usize;
    // SAFETY: the program's own call.
    let call = || unsafe { syscall6(SYS_UNSHARE as u32, [flags, 0, 0, 0, 0, 0]) } as isize;
    if flags & FOR_ONE_THREAD != 0 { as_one_thread(call) } else { call() }
}

/// `setns(2)`.
pub(super) fn enter(fd: usize, kind: usize) -> isize {
    // SAFETY: the program's own call.
    as_one_thread(|| unsafe { syscall6(SYS_SETNS as u32, [fd, kind, 0, 0, 0, 0]) } as isize)
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
