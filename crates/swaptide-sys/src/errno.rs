//! Error numbers as text, without libc.
//!
//! `Errno`'s own `Display` may end in `strerror`, which reads libc's locale from thread-local
//! memory. Engine threads have none of it.

use core::fmt;

use rustix::io::Errno;

/// An error number that can be shown on any thread: `ENOMEM (error 12)`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ErrnoName(pub Errno);

impl fmt::Display for ErrnoName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            Errno::PERM => "EPERM",
            Errno::NOENT => "ENOENT",
            Errno::SRCH => "ESRCH",
            Errno::INTR => "EINTR",
            Errno::IO => "EIO",
            Errno::BADF => "EBADF",
            Errno::AGAIN => "EAGAIN",
            Errno::NOMEM => "ENOMEM",
            Errno::ACCESS => "EACCES",
            Errno::FAULT => "EFAULT",
            Errno::BUSY => "EBUSY",
            Errno::EXIST => "EEXIST",
            Errno::INVAL => "EINVAL",
            Errno::NFILE => "ENFILE",
            Errno::MFILE => "EMFILE",
            Errno::NOSPC => "ENOSPC",
            Errno::DQUOT => "EDQUOT",
            Errno::PIPE => "EPIPE",
            Errno::NOSYS => "ENOSYS",
            Errno::PROTO => "EPROTO",
            Errno::CONNREFUSED => "ECONNREFUSED",
            Errno::CONNRESET => "ECONNRESET",
            Errno::TIMEDOUT => "ETIMEDOUT",
            _ => return write!(f, "error {}", self.0.raw_os_error()),
        };
        write!(f, "{name} (error {})", self.0.raw_os_error())
    }
}

impl fmt::Debug for ErrnoName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_number_has_its_name_and_an_unknown_one_its_number() {
        assert_eq!(std::format!("{}", ErrnoName(Errno::NOMEM)), "ENOMEM (error 12)");
        assert_eq!(std::format!("{}", ErrnoName(Errno::XFULL)), "error 54");
    }
}
