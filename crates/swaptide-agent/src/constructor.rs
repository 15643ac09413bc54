//! The first thing that runs in a program: the library's constructor.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;

use swaptide_ipc::{ENV_AGENT_LOG, ENV_SOCKET};
use swaptide_sys::helper;
use swaptide_sys::thread::{getpid, now};

use crate::fork::atfork::{child, parent, prepare};
use crate::lifecycle::{report_panics, start_sleeper};
use crate::marks::mark_memory;
use crate::own_pid::OWN_PID;
use crate::pages::kernel_words;
use crate::process::{HELPER, set_socket};
use crate::{environment, libc_names, log, real, seccomp};

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = constructor;

/// Runs before the program's own constructors.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn constructor(_argc: c_int, _argv: *const *const c_char, envp: *const *const c_char) {
    // Another libc passes nothing to constructors, and the supervisor puts a library of its own
    // into this program ([`crate::injected`]).
    if real::GNU_VERSION.get().is_none() {
        return;
    }
    // Valgrind has no vDSO for the program that it runs, and knows no userfaultfd: such a program
    // stays as it is.
    if variable(envp, "LD_PRELOAD").is_some_and(is_valgrinds) {
        return;
    }
    let Some(socket) = variable(envp, ENV_SOCKET) else { return };
    set_socket(socket);
    if let Some(path) = variable(envp, ENV_AGENT_LOG) {
        log::set_path(path);
    }
    OWN_PID.store(getpid().0, Relaxed);
    libc_names::find();
    real::find();
    // The first thread's: libc's loader made it, anywhere among the mappings.
    seccomp::find();
    kernel_words::pin_own_block();
    helper::set_helper(&HELPER);
    if let Some(path) = own_path() {
        environment::remember(path, socket, variable(envp, ENV_AGENT_LOG));
    }
    let _ = now();
    mark_memory();
    report_panics();
    if let Some(register) = real::REGISTER_ATFORK.get() {
        // SAFETY: the handlers are functions of this library, which is never unloaded.
        unsafe { register(prepare, parent, child, std::ptr::null_mut()) };
    }
    start_sleeper();
}

/// The path of this library, as the loader found it.
fn own_path() -> Option<&'static [u8]> {
    let path = real::object_of(own_path as *const c_void)?.path;
    // SAFETY: the loader's name of a library that is never unloaded.
    (!path.is_null()).then(|| unsafe { CStr::from_ptr(path) }.to_bytes())
}

/// A variable of the environment the program started with.
fn variable(mut envp: *const *const c_char, name: &str) -> Option<&'static [u8]> {
    if envp.is_null() {
        return None;
    }
    loop {
        // SAFETY: the loader passes a null-terminated array of NUL-terminated strings that live as
        // long as the process.
        let entry = unsafe { *envp };
        if entry.is_null() {
            return None;
        }
        // SAFETY: an entry that is not null is a NUL-terminated string that lives as long as the
        // process.
        let entry = unsafe { CStr::from_ptr(entry) }.to_bytes();
        if let Some(value) =
            entry.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="))
        {
            return Some(value);
        }
        // SAFETY: the array continues until its null.
        envp = unsafe { envp.add(1) };
    }
}

/// True for the value of `LD_PRELOAD` of a program that runs under Valgrind: it puts libraries of
/// its own there.
fn is_valgrinds(preloaded: &[u8]) -> bool {
    const LIBRARIES: &[u8] = b"/vgpreload_";
    preloaded.windows(LIBRARIES.len()).any(|part| part == LIBRARIES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valgrind_is_told_by_its_libraries() {
        let list = b"/usr/libexec/valgrind/vgpreload_core-amd64-linux.so:/lib/libswaptide_agent.so";
        assert!(is_valgrinds(list));
        assert!(!is_valgrinds(b"/lib/libswaptide_agent.so"));
        assert!(!is_valgrinds(b""));
    }
}
