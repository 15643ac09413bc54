//! What the forking thread, the handler and the child share of a fork.
//!
//! Owns: the phase, the name of the fork, and the numbers of its pair of sockets.
//!
//! Locks: none; the forking thread waits on a futex word.

use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::time::Duration;

use swaptide_sys::lock::futex;
use swaptide_sys::process::{pidfd_getfd, pidfd_open, pidfd_open_thread};
use swaptide_sys::sock::Conn;
use swaptide_sys::thread::getpid;
use swaptide_sys::{AsFd, FromRawFd, IntoRawFd, OwnedFd};

/// No fork is under way.
pub const NONE: u32 = 0;
/// The handler stands still for the forking thread.
pub const PREPARED: u32 = 1;
/// No descriptor.
const NONE_FD: i32 = -1;

/// See the module's description.
pub struct ForkControl {
    /// [`NONE`] or [`PREPARED`]; a futex word.
    pub phase: AtomicU32,
    /// The forking thread.
    pub forker: AtomicU32,
    /// It has seen that the handler stands still, and goes on: where it waits for a lock from now on, that is not this one's.
    goes_on: AtomicBool,
    pub(super) token: AtomicU64,
    pub(super) parent: AtomicU32,
    /// The pair of sockets in the forking thread's own table of descriptors: the handler's end and the child's. A socket with a name
    /// could not be reached from another network namespace. Without them (the table is full) there is one with a name.
    ends: [AtomicI32; 2],
}

impl Default for ForkControl {
    fn default() -> Self {
        Self::new()
    }
}

impl ForkControl {
    /// No fork is under way.
    pub const fn new() -> ForkControl {
        ForkControl {
            phase: AtomicU32::new(NONE),
            forker: AtomicU32::new(0),
            goes_on: AtomicBool::new(false),
            token: AtomicU64::new(0),
            parent: AtomicU32::new(0),
            ends: [const { AtomicI32::new(NONE_FD) }; 2],
        }
    }

    /// In the forking thread, before it rings: makes the sockets.
    pub fn open_ends(&self) {
        let numbers = Conn::pair().map_or([NONE_FD; 2], |(a, b)| [a.into_fd().into_raw_fd(), b.into_fd().into_raw_fd()]);
        self.ends.iter().zip(numbers).for_each(|(end, number)| end.store(number, Release));
    }

    /// In the forking thread or the child: closes the handler's end, or the child's.
    pub fn close_end(&self, child_end: bool) {
        let number = self.ends[usize::from(child_end)].swap(NONE_FD, AcqRel);
        if number != NONE_FD {
            // SAFETY: opened by `open_ends` in this thread's table, or its parent's, and owned by nobody else.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }

    /// The number of the child's end, to be kept open.
    pub fn child_end(&self) -> Option<i32> {
        Some(self.ends[1].load(Acquire)).filter(|number| *number != NONE_FD)
    }

    /// In the child's handler, which has a copy of the child's end in a table of its own.
    ///
    /// # Safety
    /// The calling thread has a table of its own, in which the number is the child's end, and calls this once.
    pub unsafe fn own_child_end(&self) -> Option<Conn> {
        // SAFETY: the caller's promise.
        self.child_end().map(|number| Conn::from_fd(unsafe { OwnedFd::from_raw_fd(number) }))
    }

    /// In the forking thread of the child: takes the child's end out of the program's table.
    pub fn take_child_end(&self) -> Option<Conn> {
        let number = Some(self.ends[1].swap(NONE_FD, AcqRel)).filter(|number| *number != NONE_FD)?;
        // SAFETY: opened by `open_ends`, and owned by nobody else.
        Some(Conn::from_fd(unsafe { OwnedFd::from_raw_fd(number) }))
    }

    /// In the handler, which has a table of its own: the handler's end.
    pub(super) fn take_end(&self) -> Option<Conn> {
        let number = Some(self.ends[0].load(Acquire)).filter(|number| *number != NONE_FD)?;
        // The thread's own table where the kernel can name a thread; else the first thread's, which is the same one but in odd programs.
        let task = pidfd_open_thread(self.forker.load(Acquire)).or_else(|_| pidfd_open(getpid().0)).ok()?;
        pidfd_getfd(task.as_fd(), number).ok().map(Conn::from_fd)
    }

    /// Waits until the phase is `phase`.
    pub fn wait(&self, phase: u32) {
        loop {
            let now = self.phase.load(Acquire);
            if now == phase {
                return;
            }
            futex::wait(&self.phase, now, Some(Duration::from_millis(100)), futex::Scope::Private);
        }
    }

    /// In the forking thread, before its fork: returns when the handler stands still for it.
    pub fn wait_until_prepared(&self) {
        self.wait(PREPARED);
        self.goes_on.store(true, Release);
    }

    /// In the handler: whether the forking thread goes on.
    pub(super) fn goes_on(&self) -> bool {
        self.goes_on.load(Acquire)
    }

    pub(super) fn set(&self, phase: u32) {
        self.goes_on.store(false, Release);
        self.phase.store(phase, Release);
        futex::wake(&self.phase, u32::MAX >> 1, futex::Scope::Private);
    }

    /// The name of the parent's socket, made without allocating.
    pub(super) fn socket_name(&self) -> ([u8; 64], usize) {
        use std::io::Write;
        let mut name = [0u8; 64];
        let mut rest = &mut name[..];
        let _ = write!(rest, "swaptide-fork-{}-{:016x}", self.parent.load(Relaxed), self.token.load(Relaxed));
        let len = 64 - rest.len();
        (name, len)
    }
}
