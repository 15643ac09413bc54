//! Descriptors: what the program inherits and the supervisor lets go of, and how many there may be.
//! Of the directory the same.
//!
//! Locks: none.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors beyond the standard streams that were given to this process and pass through exec.
pub(super) fn inherited_descriptors() -> Vec<RawFd> {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return Vec::new() };
    let numbers =
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    let passes_exec = |fd: &RawFd| {
        // SAFETY: F_GETFD changes nothing; a number that is no descriptor answers with an error.
        let flags = unsafe { libc::fcntl(*fd, libc::F_GETFD) };
        flags >= 0 && flags & libc::FD_CLOEXEC == 0
    };
    numbers.filter(|fd| *fd > 2).filter(passes_exec).collect()
}

/// Lets go of what was inherited: a reader at the other end of a pipe must see its end when the
/// program closes it.
pub(super) fn release_streams(inherited: &[RawFd], standard: &[RawFd]) {
    for fd in inherited {
        // SAFETY: the number was open before this program opened anything, and nothing in it ever
        // owned or used it.
        unsafe { libc::close(*fd) };
    }
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        for fd in standard {
            // SAFETY: the standard streams are addressed by their numbers only; these refer to
            // /dev/null from here on.
            unsafe { libc::dup2(null.as_raw_fd(), *fd) };
        }
    }
}

/// Lets go of the directory: the program may leave and unmount it. Paths are absolute from here on.
pub(super) fn leave_directory() {
    let _ = std::env::set_current_dir("/");
}

/// True if this process may write files of `bytes` bytes, or may allow itself to
/// ([`raise_file_size_limit`]).
pub(super) fn may_write_files_of(bytes: u64) -> bool {
    let limit = getrlimit(Resource::Fsize);
    if limit.maximum.is_none_or(|maximum| maximum >= bytes) {
        return true;
    }
    // Only the attempt tells: a user namespace, or a filter, may take the privilege away.
    let may_raise = setrlimit(Resource::Fsize, Rlimit { maximum: None, ..limit }).is_ok();
    let is_as_before = !may_raise || setrlimit(Resource::Fsize, limit).is_ok();
    may_raise && is_as_before
}

/// The pager of shared memory writes to memory files of any size: a limit that is meant for the
/// program's files would keep pages from coming back.
pub(super) fn raise_file_size_limit() {
    let maximum = getrlimit(Resource::Fsize).maximum;
    if setrlimit(Resource::Fsize, Rlimit { current: None, maximum: None }).is_err() {
        let _ = setrlimit(Resource::Fsize, Rlimit { current: maximum, maximum });
    }
}

/// The controller has two descriptors open for every process of the tree.
pub(crate) fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    // Where it stays as it is, processes beyond it are not charged and get no limit.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
