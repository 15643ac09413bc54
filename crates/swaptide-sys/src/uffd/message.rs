//! What is read from a userfaultfd.

use core::fmt;

use rustix::fd::{FromRawFd, OwnedFd};

use super::Uffd;
use super::abi::{
    EVENT_FORK, EVENT_PAGEFAULT, EVENT_REMAP, EVENT_REMOVE, EVENT_UNMAP, FAULT_WP, FAULT_WRITE,
};
use crate::page::{VirtAddr, VirtRange};

/// A message as the kernel writes it. It owns the descriptor of a fork event until
/// [`decode`](Message::decode) hands that over; dropped undecoded, it closes it. So it cannot be
/// copied, and decoding needs `&mut`.
#[repr(C)]
#[derive(Default)]
pub struct Message {
    event: u8,
    reserved: [u8; 7],
    arg: [u64; 3],
}

/// A decoded message.
#[derive(Debug)]
pub enum Event {
    /// A thread waits for a page.
    Fault {
        /// Where; the page's start unless [`super::Features::EXACT_ADDRESS`] was asked for.
        addr: VirtAddr,
        /// The waiting thread with [`super::Features::THREAD_ID`], else 0.
        tid: u32,
        /// It wants to write.
        write: bool,
        /// The page exists and is write-protected.
        wp: bool,
    },
    /// The process forked; the child's registered memory belongs to this new descriptor.
    Fork {
        /// A new descriptor, which the receiver owns.
        uffd: Uffd,
    },
    /// Memory moved from one address to another. An [`Event::Unmap`] of the old place follows.
    Remap {
        /// The start of the memory before the move.
        from: VirtAddr,
        /// The start of the memory after the move.
        to: VirtAddr,
        /// Bytes that moved: the old length, also when the mapping grew.
        len: usize,
    },
    /// The pages of the range were dropped; it stays mapped.
    Remove(VirtRange),
    /// The range was unmapped.
    Unmap(VirtRange),
    /// A message this code does not know, or one that was decoded before (number 0).
    Unknown(u8),
}

impl Message {
    /// An empty message, to fill buffers with.
    pub const EMPTY: Message = Message { event: 0, reserved: [0; 7], arg: [0; 3] };

    /// A buffer for [`Uffd::read`].
    pub const fn buffer<const N: usize>() -> [Message; N] {
        [const { Message::EMPTY }; N]
    }

    /// Takes the message's content out; what stays behind decodes as `Unknown(0)`.
    pub fn decode(&mut self) -> Event {
        let [a, b, c] = self.arg;
        match core::mem::replace(&mut self.event, 0) {
            EVENT_PAGEFAULT => Event::Fault {
                addr: VirtAddr(b as usize),
                tid: c as u32,
                write: a & FAULT_WRITE != 0,
                wp: a & FAULT_WP != 0,
            },
            EVENT_FORK => {
                // SAFETY: the kernel opened this descriptor for the reader of the message; clearing
                // `event` above makes this the only time it is taken.
                let uffd = unsafe { OwnedFd::from_raw_fd(a as u32 as i32) };
                Event::Fork { uffd: Uffd::from_fd(uffd) }
            }
            EVENT_REMAP => Event::Remap {
                from: VirtAddr(a as usize),
                to: VirtAddr(b as usize),
                len: c as usize,
            },
            EVENT_REMOVE => {
                Event::Remove(VirtRange::new(VirtAddr(a as usize), VirtAddr(b as usize)))
            }
            EVENT_UNMAP => Event::Unmap(VirtRange::new(VirtAddr(a as usize), VirtAddr(b as usize))),
            other => Event::Unknown(other),
        }
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        if self.event == EVENT_FORK {
            drop(self.decode());
        }
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Message(event {:#x}, {:x?})", self.event, self.arg)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_takes_a_message_once() {
        let mut m = Message { event: EVENT_REMOVE, reserved: [0; 7], arg: [0x1000, 0x3000, 0] };
        assert!(matches!(m.decode(), Event::Remove(r) if r.pages() == 2));
        assert!(matches!(m.decode(), Event::Unknown(0)));
        let mut m = Message { event: EVENT_PAGEFAULT, reserved: [0; 7], arg: [3, 0x5000, 77] };
        assert!(matches!(
            m.decode(),
            Event::Fault { addr: VirtAddr(0x5000), tid: 77, write: true, wp: true }
        ));
    }
}
