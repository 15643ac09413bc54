//! Hooks of libc's functions that start another program; each passes an environment that has the
//! agent in it ([`crate::hooks::environment`]). With `--inject` the supervisor is told first: the
//! program may be one that loads no library.

use std::ffi::c_int;

use linux_raw_sys::general::{__NR_execve, __NR_execveat};
use swaptide_sys::Errno;
use swaptide_sys::raw::syscall6;

use crate::hooks::environment::with_environment;
use crate::process::announce_exec;
use crate::real::{self, Bytes, CStrArray, CStrPtr};

unsafe extern "C" {
    static environ: CStrArray;
}

/// Calls `f` with an environment that has what a program of this tree needs, and returns its
/// result; with `None` for the function, the result of a function that this libc does not have.
unsafe fn exec_with<F>(real: Option<F>, envp: CStrArray, f: impl Fn(F, CStrArray) -> c_int) -> c_int
where
    F: Copy,
{
    let Some(real) = real else {
        real::set_errno(Errno::NOSYS);
        return -1;
    };
    // SAFETY: the caller's promise is that of `with_environment`.
    unsafe { with_environment(envp, |envp| f(real, envp)) }
}

/// Stands in front of libc's `execve`.
///
/// # Safety
/// As for execve(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execve(path: CStrPtr, argv: CStrArray, envp: CStrArray) -> c_int {
    let raw = |envp: CStrArray| {
        let words = [path as usize, argv as usize, envp as usize, 0, 0, 0];
        // SAFETY: the program's own arguments.
        real::libc_result(unsafe { syscall6(__NR_execve, words) }) as c_int
    };
    let call = |envp| match real::EXECVE.get() {
        // SAFETY: the program's own arguments.
        Some(real) => unsafe { real(path, argv, envp) },
        None => raw(envp),
    };
    announce_exec();
    // SAFETY: the program's own environment.
    unsafe { with_environment(envp, call) }
}

/// Stands in front of libc's `execv`.
///
/// # Safety
/// As for exec(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execv(path: CStrPtr, argv: CStrArray) -> c_int {
    // SAFETY: the program's own arguments and environment.
    unsafe { execve(path, argv, environ) }
}

/// Stands in front of libc's `execvpe`.
///
/// # Safety
/// As for exec(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execvpe(file: CStrPtr, argv: CStrArray, envp: CStrArray) -> c_int {
    announce_exec();
    // SAFETY: the program's own arguments.
    unsafe { exec_with(real::EXECVPE.get(), envp, |real, envp| real(file, argv, envp)) }
}

/// Stands in front of libc's `execvp`.
///
/// # Safety
/// As for exec(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execvp(file: CStrPtr, argv: CStrArray) -> c_int {
    // SAFETY: the program's own arguments and environment.
    unsafe { execvpe(file, argv, environ) }
}

/// Stands in front of libc's `fexecve`.
///
/// # Safety
/// As for fexecve(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn fexecve(fd: c_int, argv: CStrArray, envp: CStrArray) -> c_int {
    // SAFETY: the program's own arguments.
    unsafe { exec_with(real::FEXECVE.get(), envp, |real, envp| real(fd, argv, envp)) }
}

/// Stands in front of libc's `execveat`.
///
/// # Safety
/// As for execveat(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn execveat(
    directory: c_int,
    path: CStrPtr,
    argv: CStrArray,
    envp: CStrArray,
    flags: c_int,
) -> c_int {
    announce_exec();
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
            real::libc_result(syscall6(__NR_execveat, words)) as c_int
        })
    }
}

/// Defines `posix_spawn` and `posix_spawnp`.
macro_rules! spawn {
    ($name:ident, $real:ident) => {
        #[doc = concat!("Stands in front of libc's `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// As for posix_spawn(3).
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name(
            pid: *mut c_int,
            path: CStrPtr,
            actions: Bytes,
            attributes: Bytes,
            argv: CStrArray,
            envp: CStrArray,
        ) -> c_int {
            let Some(real) = real::$real.get() else { return Errno::NOSYS.raw_os_error() };
            announce_exec();
            // SAFETY: the program's own arguments.
            let call = |envp| unsafe { real(pid, path, actions, attributes, argv, envp) };
            // SAFETY: the program's own environment.
            unsafe { with_environment(envp, call) }
        }
    };
}

spawn!(posix_spawn, SPAWN);
spawn!(posix_spawnp, SPAWNP);

/// The end of `execle`'s arguments: behind their null stands the environment.
unsafe extern "C" fn execle_list(path: CStrPtr, argv: CStrArray) -> c_int {
    let mut end = 0;
    // SAFETY: the arguments end with a null.
    while !unsafe { *argv.add(end) }.is_null() {
        end += 1;
    }
    // SAFETY: and behind it stands the environment.
    unsafe { execve(path, argv, *argv.add(end + 1).cast::<CStrArray>()) }
}

/// Defines a function `(path, arg0, arg1, ..., NULL)`: the arguments that came in registers are
/// pushed in front of those that are on the stack already, where the return address was; so they
/// are an array, and `$list` is called with the path and that.
macro_rules! list {
    ($name:ident, $list:path) => {
        #[doc = concat!("Stands in front of libc's `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// As for exec(3).
        #[unsafe(naked)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name() {
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
        }
    };
}

list!(execl, execv);
list!(execlp, execvp);
list!(execle, execle_list);
