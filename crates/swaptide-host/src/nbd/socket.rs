//! A socket whose every use has one deadline.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags};
use swaptide_sys::Errno;

/// A non-blocking use of a socket that fails with [`io::ErrorKind::TimedOut`] after a deadline.
pub struct DeadlineSocket {
    fd: OwnedFd,
    deadline: Instant,
}

impl DeadlineSocket {
    /// Whatever is done with it fails after `deadline`.
    #[must_use]
    pub fn new(fd: OwnedFd, deadline: Instant) -> DeadlineSocket {
        DeadlineSocket { fd, deadline }
    }

    /// The socket, of which nothing too much was read.
    #[must_use]
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.fd
    }

    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = Timespec {
            tv_sec: left.as_secs().min(1 << 30) as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::from_borrowed_fd(self.fd.as_fd(), flags)], Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Read for DeadlineSocket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::net::recv(&self.fd, &mut *buf, RecvFlags::DONTWAIT) {
                Ok((n, _)) => return Ok(n),
                Err(Errno::AGAIN | Errno::INTR) => self.wait(PollFlags::IN)?,
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl Write for DeadlineSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::net::send(&self.fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(n) => return Ok(n),
                Err(Errno::AGAIN | Errno::INTR) => self.wait(PollFlags::OUT)?,
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
