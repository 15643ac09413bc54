//! A descriptor that one thread signals and another polls together with others (`eventfd`, Linux
//! 2.6.27).

use rustix::event::{EventfdFlags, eventfd};

use crate::{AsFd, BorrowedFd, Errno, OwnedFd};

/// A non-blocking eventfd, used as a flag: readable from the first signal until it is cleared.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A descriptor that is not signalled.
    ///
    /// # Errors
    /// When the limit on descriptors is reached.
    pub fn new() -> Result<EventFd, Errno> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(EventFd)
    }

    /// Makes the descriptor readable until [`EventFd::clear`].
    pub fn signal(&self) {
        // Fails only when the counter is at its maximum: it is readable already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until the next [`EventFd::signal`].
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for EventFd {
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
    fn a_signal_is_readable_until_it_is_cleared() {
        let event = EventFd::new().unwrap();
        let readable = || poll_readable(&[event.as_fd()], Some(Duration::ZERO)).unwrap() != 0;
        assert!(!readable());
        event.signal();
        event.signal();
        assert!(readable() && readable());
        event.clear();
        assert!(!readable());
        event.clear();
    }
}
