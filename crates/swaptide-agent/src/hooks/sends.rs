//! Calls by which the kernel takes references to the program's pages that are no pins, or writes
//! through such references.
//!
//! References for reading (`vmsplice`, `MSG_ZEROCOPY`, io_uring's `SEND_ZC`) are noted for the
//! engine before the call is made ([`REFERENCES`]): it writes to no frame from then on that came
//! from the program. The note is per process and outlives forks, not exec.
//!
//! References for writing exist where a file system or a protocol takes the pages of a read without
//! pinning them. What arrives on a page after that was taken out is lost. So the process is
//! detached before it can read so ([`process::detach`]): by a direct file on NFS or Ceph, or by
//! kernel TLS.
//!
//! docs/kernel-references.md lists the holders of each kind, and what goes past these hooks.
//!
//! Owns: the note. Locks: none. The hooks are async-signal-safe and allocate nothing. They call
//! libc's function, which is a cancellation point where ours would not be.

use std::ffi::{c_int, c_uint};

use linux_raw_sys::net;
use swaptide_sys::Errno;
use swaptide_sys::engine_threads::is_of_engine;
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::raw::syscall6;
use swaptide_sys::thread::gettid;

use crate::pages::excluded;
use crate::pages::references::{O_DIRECT, REFERENCES, is_unpinned};
use crate::process;
use crate::real::{self, Bytes, CStrPtr};
use crate::seccomp;

const MSG_ZEROCOPY: c_int = 0x400_0000;
const SOL_SOCKET: c_int = net::SOL_SOCKET as c_int;
const SO_ZEROCOPY: c_int = net::SO_ZEROCOPY as c_int;
const SOL_TLS: c_int = net::SOL_TLS as c_int;
const TLS_TX: c_int = 1;
const TLS_RX: c_int = 2;

const EAGAIN: c_int = linux_raw_sys::errno::EAGAIN as c_int;
const SYS_CLOSE: u32 = linux_raw_sys::general::__NR_close;
const F_SETFL: c_int = linux_raw_sys::general::F_SETFL as c_int;
pub(crate) const SYS_OPEN: usize = linux_raw_sys::general::__NR_open as usize;
pub(crate) const SYS_FCNTL: usize = linux_raw_sys::general::__NR_fcntl as usize;
pub(crate) const SYS_OPENAT: usize = linux_raw_sys::general::__NR_openat as usize;
pub(crate) const SYS_OPENAT2: usize = linux_raw_sys::general::__NR_openat2 as usize;
pub(crate) const SYS_SENDTO: usize = linux_raw_sys::general::__NR_sendto as usize;
pub(crate) const SYS_SENDMSG: usize = linux_raw_sys::general::__NR_sendmsg as usize;
pub(crate) const SYS_SETSOCKOPT: usize = linux_raw_sys::general::__NR_setsockopt as usize;
pub(crate) const SYS_VMSPLICE: usize = linux_raw_sys::general::__NR_vmsplice as usize;
pub(crate) const SYS_SENDMMSG: usize = linux_raw_sys::general::__NR_sendmmsg as usize;
pub(crate) const SYS_IO_URING_SETUP: usize = linux_raw_sys::general::__NR_io_uring_setup as usize;
pub(crate) const SYS_IO_URING_ENTER: usize = linux_raw_sys::general::__NR_io_uring_enter as usize;

/// Called before a system call that the program makes through libc's `syscall`. False if it may not
/// be made at the moment.
pub(crate) fn before(number: usize, second: usize, third: usize, fourth: usize) -> bool {
    match number {
        SYS_VMSPLICE => note(),
        // The engine reads swap areas by a ring of its own, whose calls come through here as well.
        SYS_IO_URING_SETUP | SYS_IO_URING_ENTER
            if REFERENCES.are_possible() || is_of_engine(gettid()) =>
        {
            true
        }
        SYS_IO_URING_SETUP | SYS_IO_URING_ENTER => note(),
        SYS_SENDTO | SYS_SENDMMSG => with_flags(fourth as c_int),
        SYS_SENDMSG => with_flags(third as c_int),
        SYS_SETSOCKOPT => option(second as c_int, third as c_int),
        _ => true,
    }
}

/// Notes that a reference for reading is about to be taken, which may be done.
fn note() -> bool {
    REFERENCES.note();
    true
}

#[inline]
fn with_flags(flags: c_int) -> bool {
    flags & MSG_ZEROCOPY == 0 || note()
}

#[inline]
fn option(level: c_int, name: c_int) -> bool {
    match (level, name) {
        // Records are encrypted from the sender's pages.
        (SOL_SOCKET, SO_ZEROCOPY) | (SOL_TLS, TLS_TX) => note(),
        // Records are decrypted into the reader's pages, which are not pinned.
        (SOL_TLS, TLS_RX) => keep_all(),
        _ => true,
    }
}

/// Pages may be written to through references from now on: nothing is taken out of this process.
/// False if that cannot be had at the moment ([`process::detach`]).
fn keep_all() -> bool {
    // A process that is not engaged yet will find nothing to manage.
    excluded::exclude(VirtRange { start: VirtAddr(0), end: VirtAddr(usize::MAX) });
    process::detach()
}

/// A descriptor has these flags now, and no thread has read by it yet. False if none may.
#[inline]
fn may_read(fd: c_int, flags: c_int) -> bool {
    // Under a filter no hook may ask.
    flags & O_DIRECT == 0 || !(seccomp::is() || is_unpinned(fd)) || keep_all()
}

/// A descriptor that was opened, or a negative word: what the open call answers.
#[inline]
fn opened(fd: c_int, flags: c_int) -> c_int {
    if fd < 0 || may_read(fd, flags) {
        return fd;
    }
    // SAFETY: opened a moment ago; no other code knows the number.
    unsafe { syscall6(SYS_CLOSE, [fd as usize, 0, 0, 0, 0, 0]) };
    -EAGAIN
}

/// The flags of a descriptor were changed: 0, or the negative word that the call answers, and they
/// are changed back.
#[inline]
fn changed(fd: c_int, flags: c_int, set: impl FnOnce(c_int)) -> c_int {
    if may_read(fd, flags) {
        return 0;
    }
    set(flags & !O_DIRECT);
    -EAGAIN
}

/// As libc's functions answer a word that is not the kernel's.
fn as_libc(word: c_int) -> c_int {
    if word == -EAGAIN {
        real::set_errno(Errno::AGAIN);
        return -1;
    }
    word
}

/// The calls that open a descriptor, or change its flags, through `syscall`; returns the kernel's
/// word.
pub(crate) fn instead(number: usize, words: [usize; 6]) -> isize {
    // SAFETY: the program's own call.
    let result = unsafe { syscall6(number as u32, words) } as isize;
    let (fd, flags) = match number {
        SYS_OPEN => (result, words[1]),
        SYS_OPENAT => (result, words[2]),
        // SAFETY: the kernel has just read the structure, whose first word holds the flags.
        SYS_OPENAT2 if result >= 0 => (result, unsafe { *(words[2] as *const usize) }),
        SYS_FCNTL if words[1] == F_SETFL as usize && result == 0 => {
            return changed(words[0] as c_int, words[2] as c_int, |flags| {
                // SAFETY: the program's own descriptor.
                unsafe { syscall6(number as u32, [words[0], words[1], flags as usize, 0, 0, 0]) };
            }) as isize;
        }
        _ => return result,
    };
    if fd < 0 { result } else { opened(fd as c_int, flags as c_int) as isize }
}

/// Defines a function in front of libc's of the same name and type: `$before` runs first, and says
/// whether the call may be made.
macro_rules! in_front {
    ($name:ident, $real:ident, ($($arg:ident: $type:ty),*) -> $result:ty, $before:expr) => {
        #[doc = concat!("Stands in front of libc's `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// As for the function of libc.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
            if !$before {
                real::set_errno(Errno::AGAIN);
                return -1;
            }
            let Some(real) = real::$real.get() else {
                real::set_errno(Errno::NOSYS);
                return -1;
            };
            // SAFETY: the program's own arguments.
            unsafe { real($($arg),*) }
        }
    };
}

/// The same for a function that opens a descriptor. The variable part of libc's type is one word.
macro_rules! opens {
    ($name:ident, $real:ident, ($($arg:ident: $type:ty),*), $flags:ident) => {
        #[doc = concat!("Stands in front of libc's `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// As for the function of libc.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            let Some(real) = real::$real.get() else {
                real::set_errno(Errno::NOSYS);
                return -1;
            };
            // SAFETY: the program's own arguments.
            as_libc(opened(unsafe { real($($arg),*) }, $flags))
        }
    };
}

opens!(open, OPEN, (path: CStrPtr, flags: c_int, mode: c_uint), flags);
opens!(open64, OPEN64, (path: CStrPtr, flags: c_int, mode: c_uint), flags);
opens!(openat, OPENAT, (at: c_int, path: CStrPtr, flags: c_int, mode: c_uint), flags);
opens!(openat64, OPENAT64, (at: c_int, path: CStrPtr, flags: c_int, mode: c_uint), flags);
opens!(__open_2, OPEN_2, (path: CStrPtr, flags: c_int), flags);
opens!(__open64_2, OPEN64_2, (path: CStrPtr, flags: c_int), flags);
opens!(__openat_2, OPENAT_2, (at: c_int, path: CStrPtr, flags: c_int), flags);
opens!(__openat64_2, OPENAT64_2, (at: c_int, path: CStrPtr, flags: c_int), flags);

/// Defines a function in front of libc's `fcntl` or its 64-bit name. Its variable part is one word.
macro_rules! changes_flags {
    ($name:ident, $real:ident) => {
        #[doc = concat!("Stands in front of libc's `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// As for fcntl(2).
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name(fd: c_int, command: c_int, argument: usize) -> c_int {
            let Some(real) = real::$real.get() else {
                real::set_errno(Errno::NOSYS);
                return -1;
            };
            // SAFETY: the program's own arguments.
            let result = unsafe { real(fd, command, argument) };
            if command != F_SETFL || result != 0 {
                return result;
            }
            as_libc(changed(fd, argument as c_int, |flags| {
                // SAFETY: the program's own descriptor.
                unsafe { real(fd, command, flags as usize) };
            }))
        }
    };
}

changes_flags!(fcntl, FCNTL);
changes_flags!(fcntl64, FCNTL64);

in_front!(
    vmsplice,
    VMSPLICE,
    (fd: c_int, parts: Bytes, count: usize, flags: c_uint) -> isize,
    note()
);
in_front!(
    send,
    SEND,
    (fd: c_int, bytes: Bytes, len: usize, flags: c_int) -> isize,
    with_flags(flags)
);
in_front!(
    sendto,
    SENDTO,
    (fd: c_int, bytes: Bytes, len: usize, flags: c_int, to: Bytes, to_len: c_uint) -> isize,
    with_flags(flags)
);
in_front!(sendmsg, SENDMSG, (fd: c_int, message: Bytes, flags: c_int) -> isize, with_flags(flags));
in_front!(
    sendmmsg,
    SENDMMSG,
    (fd: c_int, messages: Bytes, count: c_uint, flags: c_int) -> c_int,
    with_flags(flags)
);
in_front!(
    setsockopt,
    SETSOCKOPT,
    (fd: c_int, level: c_int, name: c_int, value: Bytes, len: c_uint) -> c_int,
    option(level, name)
);
