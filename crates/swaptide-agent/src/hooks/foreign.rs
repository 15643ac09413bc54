//! Programs that load no library: before one is executed, the supervisor is told, which puts the
//! agent into it (`swaptide_sys::elf`).
//!
//! Owns nothing. Locks: none; nothing is allocated, for this also runs in the child of a vfork. A
//! thread under a filter of system calls tells nothing.

use std::ffi::{CStr, c_char};

use linux_raw_sys::general::{__NR_openat, O_CLOEXEC, O_NOCTTY, O_NONBLOCK, O_PATH, O_RDONLY};
use rustix::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::fs::FileType;
use swaptide_sys::elf::{ProgramKind, kind_of};
use swaptide_sys::raw::syscall6;

use crate::environment;
use crate::process;
use crate::real::{self, CStrArray, CStrPtr};
use crate::seccomp;

/// Longest path of a program that is looked at, and of a script's interpreter.
const MAX_PATH_BYTES: usize = 1024;
const MAX_INTERPRETER_BYTES: usize = 256;
const AT_FDCWD: usize = -100isize as usize;

/// A program at a path is about to be executed by this process or its child. `directory`: what a
/// relative path means, `None` the current one.
pub(crate) fn announce(directory: Option<i32>, path: CStrPtr) {
    if !is_told() {
        return;
    }
    let errno = real::errno();
    if open(directory, path).is_some_and(|file| is_foreign(file.as_fd())) {
        process::announce_exec();
    }
    real::restore_errno(errno);
}

/// The same by a name that is looked for as execvp(3) does.
pub(crate) fn announce_found(name: CStrPtr, envp: CStrArray) {
    if !is_told() || name.is_null() {
        return;
    }
    // SAFETY: the caller's argument is a NUL-terminated string, as for execvp(3).
    let name = unsafe { CStr::from_ptr(name) };
    if name.to_bytes().contains(&b'/') {
        return announce(None, name.as_ptr());
    }
    let errno = real::errno();
    // SAFETY: the caller's argument is a null-terminated array of such strings, or null.
    let search = unsafe { search_path(envp) };
    let found = search.split(|byte| *byte == b':').find_map(|directory| {
        let mut path = [0u8; MAX_PATH_BYTES];
        let parts = [if directory.is_empty() { b"." } else { directory }, b"/", name.to_bytes()];
        let mut end = 0;
        for part in parts {
            // A byte stays zero.
            path[..MAX_PATH_BYTES - 1].get_mut(end..end + part.len())?.copy_from_slice(part);
            end += part.len();
        }
        open(None, path.as_ptr().cast())
    });
    if found.is_some_and(|file| is_foreign(file.as_fd())) {
        process::announce_exec();
    }
    real::restore_errno(errno);
}

/// True in a process of a run whose calls are free.
fn is_told() -> bool {
    environment::socket().is_some() && !seccomp::is()
}

/// The value of `PATH`; what libc takes where it is not set.
///
/// # Safety
/// `envp` is null or a null-terminated array of NUL-terminated strings.
unsafe fn search_path(envp: CStrArray) -> &'static [u8] {
    let mut at = envp;
    // SAFETY: the caller's promise.
    while let Some(entry) = unsafe { at.as_ref() }.filter(|entry| !entry.is_null()) {
        // SAFETY: as above.
        let entry = unsafe { CStr::from_ptr(*entry) }.to_bytes();
        if let Some(value) = entry.strip_prefix(b"PATH=") {
            return value;
        }
        // SAFETY: the array goes on to its null.
        at = unsafe { at.add(1) };
    }
    b"/bin:/usr/bin"
}

/// Opens a regular file. Others have effects when they are opened, and cannot be executed.
fn open(directory: Option<i32>, path: *const c_char) -> Option<OwnedFd> {
    let directory = directory.map_or(AT_FDCWD, |fd| fd as usize);
    let opened = |flags: u32| {
        let words = [directory, path as usize, (flags | O_CLOEXEC) as usize, 0, 0, 0];
        // SAFETY: the kernel reads the path, or says that it cannot.
        let fd = unsafe { syscall6(__NR_openat, words) };
        // SAFETY: a new descriptor.
        (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as i32) })
    };
    let is_regular = |file: &OwnedFd| {
        let told = rustix::fs::fstat(file);
        told.is_ok_and(|told| FileType::from_raw_mode(told.st_mode) == FileType::RegularFile)
    };
    opened(O_PATH).filter(is_regular)?;
    opened(O_RDONLY | O_NONBLOCK | O_NOCTTY).filter(is_regular)
}

/// True for a program that loads no library, or a script of one.
fn is_foreign(file: BorrowedFd<'_>) -> bool {
    if let Some(kind) = kind_of(file) {
        return kind.is_injected();
    }
    let mut head = [0u8; MAX_INTERPRETER_BYTES];
    let Ok(len) = rustix::io::pread(file, &mut head[..MAX_INTERPRETER_BYTES - 1], 0) else {
        return false;
    };
    let Some(line) = head[..len].strip_prefix(b"#!") else { return false };
    let start = 2 + line.iter().take_while(|byte| b" \t".contains(byte)).count();
    let is_end = |byte: &u8| byte.is_ascii_whitespace() || *byte == 0;
    let end = head[start..].iter().position(is_end).map_or(len, |at| start + at);
    head[end] = 0;
    let interpreter = open(None, head[start..].as_ptr().cast());
    interpreter.and_then(|file| kind_of(file.as_fd())).is_some_and(ProgramKind::is_injected)
}
