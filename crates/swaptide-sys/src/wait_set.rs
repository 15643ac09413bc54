//! Waiting for several descriptors at a time, where one that becomes readable wakes one of several
//! threads (`epoll`, with `EPOLLEXCLUSIVE`, Linux 4.5).
//!
//! A thread that polls a descriptor is woken whenever something happens to it, and so are all
//! others that poll it. Of sets that have it as [`Wakes::One`] the kernel wakes the first in which
//! a thread waits, in the order in which the descriptor was added to them.

use core::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

use crate::sock::poll_readable;
use crate::{AsFd, BorrowedFd, Errno, OwnedFd};

/// The waiting threads that a descriptor wakes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wakes {
    /// One thread of all sets that have the descriptor so.
    One,
    /// Every thread.
    All,
}

/// A set of descriptors that a thread waits for.
#[derive(Debug)]
pub struct WaitSet(OwnedFd);

impl WaitSet {
    /// An empty set.
    ///
    /// # Errors
    /// When the limit on descriptors is reached.
    pub fn new() -> Result<WaitSet, Errno> {
        epoll::create(CreateFlags::CLOEXEC).map(WaitSet)
    }

    /// Adds a descriptor, which stands for bit `bit` (below 64) of [`WaitSet::wait`]'s answer.
    ///
    /// # Errors
    /// When the kernel has no memory for it, or the descriptor cannot be waited for.
    pub fn add(&self, fd: BorrowedFd<'_>, bit: u32, wakes: Wakes) -> Result<(), Errno> {
        let flags = match wakes {
            Wakes::One => EventFlags::IN | EventFlags::EXCLUSIVE,
            Wakes::All => EventFlags::IN,
        };
        epoll::add(&self.0, fd, EventData::new_u64(bit.into()), flags)
    }

    /// Takes a descriptor out.
    ///
    /// # Errors
    /// When it is not in the set.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        epoll::delete(&self.0, fd)
    }

    /// Waits until one of the descriptors can be read or has ended, at most for `timeout`
    /// (`None`: for ever). A set bit for each of them; 0 when the time is over or a signal came.
    ///
    /// # Errors
    /// When the kernel refuses to wait.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<u64, Errno> {
        let mut timeout = timeout;
        // `epoll_pwait` counts milliseconds; not every filter knows `epoll_pwait2`.
        if let Some(short) = timeout.filter(|t| !t.is_zero() && *t < Duration::from_millis(1)) {
            if poll_readable(&[self.0.as_fd()], Some(short))? == 0 {
                return Ok(0);
            }
            timeout = Some(Duration::ZERO);
        }
        let time = timeout.map(|t| Timespec {
            tv_sec: t.as_secs().min(i64::MAX as u64) as i64,
            tv_nsec: t.subsec_nanos().into(),
        });
        let mut events =
            [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; MAX_EVENTS];
        match epoll::wait(&self.0, &mut events, time.as_ref()) {
            Ok(n) => Ok(events[..n].iter().fold(0, |bits, event| {
                let bit = event.data.u64();
                bits | 1 << bit
            })),
            Err(Errno::INTR) => Ok(0),
            Err(errno) => Err(errno),
        }
    }
}

/// Can be read while one of the descriptors can.
impl AsFd for WaitSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Descriptors that one call tells of; the next call tells of others.
const MAX_EVENTS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eventfd::EventFd;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    #[test]
    fn the_answer_names_what_can_be_read() {
        let set = WaitSet::new().expect("a set");
        let (a, b) = (EventFd::new().expect("eventfd"), EventFd::new().expect("eventfd"));
        set.add(a.as_fd(), 0, Wakes::One).expect("add");
        set.add(b.as_fd(), 5, Wakes::All).expect("add");
        assert_eq!(set.wait(Some(Duration::ZERO)), Ok(0));
        b.signal();
        assert_eq!(set.wait(None), Ok(1 << 5));
        a.signal();
        assert_eq!(set.wait(None), Ok(1 | 1 << 5));
        a.clear();
        b.clear();
        assert_eq!(set.wait(Some(Duration::from_millis(1))), Ok(0));
        let short = Some(Duration::from_micros(100));
        assert_eq!(set.wait(short), Ok(0));
        b.signal();
        assert_eq!(set.wait(short), Ok(1 << 5));
    }

    #[test]
    fn one_thread_is_woken_and_it_is_that_of_the_first_set() {
        let event = EventFd::new().expect("eventfd");
        let end = EventFd::new().expect("eventfd");
        let sets = [WaitSet::new().expect("a set"), WaitSet::new().expect("a set")];
        for set in &sets {
            set.add(event.as_fd(), 0, Wakes::One).expect("add");
            set.add(end.as_fd(), 1, Wakes::All).expect("add");
        }
        let woken = [AtomicU32::new(0), AtomicU32::new(0)];
        let waiting = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for (set, woken) in sets.iter().zip(&woken) {
                let (event, waiting) = (&event, &waiting);
                scope.spawn(move || {
                    loop {
                        waiting.fetch_add(1, SeqCst);
                        let ready = set.wait(None).expect("wait");
                        waiting.fetch_sub(1, SeqCst);
                        if ready & 2 != 0 {
                            return;
                        }
                        woken.fetch_add(1, SeqCst);
                        event.clear();
                    }
                });
            }
            for turn in 1..=50 {
                while waiting.load(SeqCst) != 2 {
                    std::thread::yield_now();
                }
                // That they have said so does not mean that they sleep.
                std::thread::sleep(Duration::from_millis(2));
                event.signal();
                while woken[0].load(SeqCst) + woken[1].load(SeqCst) < turn {
                    std::thread::yield_now();
                }
            }
            end.signal();
        });
        assert!(woken[0].load(SeqCst) >= 45, "{woken:?}");
        assert_eq!(woken[0].load(SeqCst) + woken[1].load(SeqCst), 50);
    }
}
