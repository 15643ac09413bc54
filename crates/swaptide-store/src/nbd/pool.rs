//! The connections that no call uses at the moment, and how many there may be.
//!
//! A connection is a descriptor; an idle one lies in an atomic word. A [`Seat`] is leave to have
//! one connection: it is counted as long as it lives, in a call or with its descriptor in the pool.
//!
//! Order of memory: a descriptor goes through the word with release and acquire; what else belongs
//! to the connection is the kernel's.

use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use core::time::Duration;

use swaptide_sys::lock::futex::{self, Scope};
use swaptide_sys::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

pub(super) const MAX_POOLED_CONNECTIONS: usize = 16;
const NONE: i32 = -1;

pub(super) struct Pool {
    most: u32,
    /// Connections that exist, idle or in a call.
    open: AtomicU32,
    idle: [AtomicI32; MAX_POOLED_CONNECTIONS],
    /// Changes whenever a connection comes back or ends.
    changes: AtomicU32,
}

/// Leave to have one connection.
pub(super) struct Seat<'p>(&'p Pool);

/// A connection in a call.
pub(super) struct Link<'p> {
    fd: OwnedFd,
    seat: Seat<'p>,
}

impl Pool {
    /// For at most `most` connections.
    pub(super) fn new(most: u32) -> Pool {
        Pool {
            most: most.clamp(1, MAX_POOLED_CONNECTIONS as u32),
            open: AtomicU32::new(0),
            idle: [const { AtomicI32::new(NONE) }; MAX_POOLED_CONNECTIONS],
            changes: AtomicU32::new(0),
        }
    }

    pub(super) fn most(&self) -> u32 {
        self.most
    }

    /// Takes a connection that no call uses; `None`: none is idle.
    pub(super) fn take(&self) -> Option<Link<'_>> {
        self.idle.iter().find_map(|place| {
            let fd = place.swap(NONE, Ordering::Acquire);
            // SAFETY: the word owned the descriptor, and the swap made this the only owner.
            (fd != NONE).then(|| Link { fd: unsafe { OwnedFd::from_raw_fd(fd) }, seat: Seat(self) })
        })
    }

    /// Leave for one connection more.
    pub(super) fn seat(&self) -> Option<Seat<'_>> {
        let more = |open| (open < self.most).then_some(open + 1);
        self.open
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .is_ok()
            .then(|| Seat(self))
    }

    /// Returns the value to compare with before sleeping in [`Self::wait`]; read it before looking
    /// for a connection.
    pub(super) fn changes(&self) -> u32 {
        self.changes.load(Ordering::Acquire)
    }

    /// Sleeps until a connection comes back or ends after `seen`, or the time is over.
    pub(super) fn wait(&self, seen: u32, time: Duration) {
        futex::wait(&self.changes, seen, Some(time), Scope::Private);
    }

    /// Forgets all connections without closing them.
    pub(super) fn forget(&self) {
        for place in &self.idle {
            place.store(NONE, Ordering::Relaxed);
        }
        self.open.store(0, Ordering::Relaxed);
    }

    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        futex::wake(&self.changes, u32::MAX, Scope::Private);
    }
}

impl<'p> Seat<'p> {
    /// Fills the seat with a connection that is idle.
    pub(super) fn fill(self, fd: OwnedFd) {
        self.link(fd).put_back();
    }

    /// Fills the seat with a connection for a call.
    pub(super) fn link(self, fd: OwnedFd) -> Link<'p> {
        Link { fd, seat: self }
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
        self.0.changed();
    }
}

impl Link<'_> {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Back among the idle ones.
    pub(super) fn put_back(self) {
        let Link { fd, seat } = self;
        let pool = seat.0;
        let fd = fd.into_raw_fd();
        // There are as many places as there can be connections: one is free.
        let placed = pool.idle.iter().any(|place| {
            place.compare_exchange(NONE, fd, Ordering::Release, Ordering::Relaxed).is_ok()
        });
        if placed {
            core::mem::forget(seat);
            pool.changed();
        } else {
            // SAFETY: it was taken out of its owner above, and no place took it.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
}
