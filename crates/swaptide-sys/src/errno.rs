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

/// The text of an [`ErrnoName`], made without allocating: for threads and processes that must not.
pub struct ErrnoText {
    bytes: [u8; ErrnoText::MAX_BYTES],
    len: usize,
}

impl ErrnoText {
    /// Longer than any name with its number.
    const MAX_BYTES: usize = 40;

    /// The text for one error number.
    pub fn new(errno: Errno) -> ErrnoText {
        let mut text = ErrnoText { bytes: [0; ErrnoText::MAX_BYTES], len: 0 };
        // A text that did not fit would be cut; none is so long.
        let _ = fmt::write(&mut text, format_args!("{}", ErrnoName(errno)));
        text
    }

    /// The text, in ASCII.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl fmt::Write for ErrnoText {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let room = &mut self.bytes[self.len..];
        let len = part.len().min(room.len());
        room[..len].copy_from_slice(&part.as_bytes()[..len]);
        self.len += len;
        if len == part.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_that_of_the_name() {
        for number in 1..200 {
            let errno = Errno::from_raw_os_error(number);
            let name = std::format!("{}", ErrnoName(errno));
            assert_eq!(ErrnoText::new(errno).as_bytes(), name.as_bytes());
        }
    }

    #[test]
    fn a_known_number_has_its_name_and_an_unknown_one_its_number() {
        assert_eq!(std::format!("{}", ErrnoName(Errno::NOMEM)), "ENOMEM (error 12)");
        assert_eq!(std::format!("{}", ErrnoName(Errno::XFULL)), "error 54");
    }
}
