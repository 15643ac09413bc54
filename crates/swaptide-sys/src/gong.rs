//! A descriptor that one thread strikes and another can wait for together with others (`eventfd`,
//! Linux 2.6.27).

use rustix::event::{EventfdFlags, eventfd};

use crate::{AsFd, BorrowedFd, Errno, OwnedFd};

/// See the module's description.
#[derive(Debug)]
pub struct Gong(OwnedFd);

impl Gong {
    /// One that nobody has struck.
    ///
    /// # Errors
    /// When the limit on descriptors is reached.
    pub fn new() -> Result<Gong, Errno> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Gong)
    }

    /// It can be read from now on, until it is stilled.
    pub fn strike(&self) {
        // It fails when it was struck 2^64 times: then it can be read already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// It cannot be read until it is struck again.
    pub fn still(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Gong {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sock::poll_readable;
    use core::time::Duration;

    #[test]
    fn it_is_heard_until_it_is_stilled() {
        let gong = Gong::new().unwrap();
        let heard = || poll_readable(&[gong.as_fd()], Some(Duration::ZERO)).unwrap() != 0;
        assert!(!heard());
        gong.strike();
        gong.strike();
        assert!(heard() && heard());
        gong.still();
        assert!(!heard());
        gong.still();
    }
}
