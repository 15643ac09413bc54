//! What the forking thread, the handler and the child share of a fork.
//!
//! Owns: the phase, the token of the fork, and the numbers of its pair of sockets.
//!
//! The handler takes its end out of the forking thread's table. Where the kernel does not permit
//! that (a filter of system calls), the forking thread brings it ([`ForkControl::fetch_end`]).
//! Where neither works there is no way to the child, and the handler gives it all its memory
//! unasked.
//!
//! Locks: none; the forking thread waits on a futex word.

use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Acquire,
    Ordering::Relaxed, Ordering::Release,
};
use std::time::Duration;

use swaptide_sys::high_fds::SocketNumber;
use swaptide_sys::lock::{Lock, futex};
use swaptide_sys::process::{pidfd_getfd, pidfd_open, pidfd_open_thread};
use swaptide_sys::sock::{Conn, Listener, poll_readable};
use swaptide_sys::thread::{getpid, random_name, sleep};
use swaptide_sys::{AsFd, BorrowedFd, Errno, FromRawFd, OwnedFd};

use crate::readahead::history::SharedMissHistory;
use crate::sched::deadline::{Deadline, WAIT_SLICE, Waited};

/// No fork is under way.
pub const NO_FORK: u32 = 0;
/// The handler is prepared for the fork, and waits for the forking thread.
pub(crate) const PREPARED: u32 = 1;
/// The forking thread shall bring the handler its end.
const END_SOCKET: u32 = 2;
/// It has brought it.
const END_SENT: u32 = 3;
/// The handler cannot learn of a fork.
pub(crate) const REFUSED: u32 = 4;
/// A fork past libc is held for ([`crate::fork_hold`]).
pub(crate) const HELD: u32 = 5;
/// The state that a forking thread and the handler share.
pub struct ForkControl {
    /// The kernel does not report forks: they are followed ([`crate::mm::dontfork`]).
    pub followed: bool,
    /// The history in which this process's children write their misses
    /// ([`crate::readahead::history`]).
    pub(crate) childrens_history: Lock<Option<SharedMissHistory>>,
    /// [`NO_FORK`], [`PREPARED`], or a step between them, or [`HELD`]; a futex word.
    pub phase: AtomicU32,
    /// Thread id of the forking thread.
    pub forker: AtomicU32,
    /// It has seen that the handler is prepared, and continues: where it waits for a lock from now
    /// on, that is not this one's.
    goes_on: AtomicBool,
    pub(crate) token: AtomicU64,
    /// The name of the listener to which the handler's end is brought.
    name: [AtomicU64; 2],
    /// There is no way to the child.
    shut: AtomicBool,
    /// The child did not take over and was killed.
    killed: AtomicBool,
    /// The pair of sockets in the forking thread's own table of descriptors: the handler's end and
    /// the child's. Without them (the table is full) there is no way to the child.
    ends: [SocketNumber; 2],
}

impl Default for ForkControl {
    fn default() -> Self {
        Self::new(false)
    }
}

impl ForkControl {
    /// No fork is under way. `followed`: see the field.
    pub const fn new(followed: bool) -> ForkControl {
        ForkControl {
            followed,
            childrens_history: Lock::new(None),
            phase: AtomicU32::new(NO_FORK),
            forker: AtomicU32::new(0),
            goes_on: AtomicBool::new(false),
            token: AtomicU64::new(0),
            name: [const { AtomicU64::new(0) }; 2],
            shut: AtomicBool::new(false),
            killed: AtomicBool::new(false),
            ends: [const { SocketNumber::none() }; 2],
        }
    }

    /// In the forking thread, before its request: makes the sockets.
    pub fn open_ends(&self) {
        if let Ok((a, b)) = Conn::pair_high() {
            self.ends[0].set(a.into_fd());
            self.ends[1].set(b.into_fd());
        }
    }

    /// In the forking thread or the child: closes the handler's end, or the child's.
    pub fn close_end(&self, child_end: bool) {
        drop(self.ends[usize::from(child_end)].take());
    }

    /// The number of the child's end, to be kept open.
    pub fn child_end(&self) -> Option<i32> {
        self.ends[1].number()
    }

    /// In the child's handler, which has a copy of the child's end in a table of its own.
    ///
    /// # Safety
    /// The calling thread has a table of its own, in which the number is the child's end, and calls
    /// this once.
    pub unsafe fn own_child_end(&self) -> Option<Conn> {
        // SAFETY: the caller's promise.
        self.child_end().map(|number| Conn::from_fd(unsafe { OwnedFd::from_raw_fd(number) }))
    }

    /// In the forking thread of the child: takes the child's end out of the program's table.
    pub fn take_child_end(&self) -> Option<Conn> {
        self.ends[1].take().map(Conn::from_fd)
    }

    /// In the handler, which has a table of its own: the handler's end, if the kernel lets it take
    /// that out of the forking thread's table.
    pub(crate) fn take_end(&self) -> Option<Conn> {
        let number = self.ends[0].last_number()?;
        // The thread's own table where the kernel can name a thread; else the first thread's, which
        // is the same one but in odd programs.
        let task = pidfd_open_thread(self.forker.load(Acquire))
            .or_else(|_| pidfd_open(getpid().0))
            .ok()?;
        let end = pidfd_getfd(task.as_fd(), number).ok()?;
        self.ends[0].is(end.as_fd()).then(|| Conn::from_fd(end))
    }

    /// In the handler: the handler's end, which the forking thread brings. `None` if it cannot.
    ///
    /// The way is a listener whose name is made of 128 random bits and lives until the end is here.
    /// The kernel tells the process that connects. Only this one is listened to, and nothing is
    /// ever sent. Other processes cannot leave descriptors there. Where they can, before Linux
    /// 6.16, they are hung up on and their connections stay open: to close one would drop what its
    /// maker has sent, and a socket among that lasts as long as its maker likes (`SO_LINGER`).
    pub(crate) fn fetch_end(&self) -> Option<Conn> {
        self.fetch_end_by(|listener| listener.deny_descriptors().is_ok())
    }

    fn fetch_end_by(&self, denies: impl FnOnce(&Listener) -> bool) -> Option<Conn> {
        self.ends[0].last_number()?;
        if FOREIGN_CONNECTIONS.load(Relaxed) >= MAX_FOREIGN_CONNECTIONS {
            return None;
        }
        let random = random_name().ok()?;
        let (name, len) = end_socket_name(random);
        let listener = Listener::bind_abstract(&name[..len]).ok()?;
        listener.set_nonblocking(true).ok()?;
        let denies = denies(&listener);
        self.name[0].store(random as u64, Relaxed);
        self.name[1].store((random >> 64) as u64, Relaxed);
        self.set(END_SOCKET);
        let mut deadline = Deadline::new(END_TIMEOUT);
        let mut end = None;
        while end.is_none()
            && FOREIGN_CONNECTIONS.load(Relaxed) < MAX_FOREIGN_CONNECTIONS
            && self.phase.load(Acquire) != NO_FORK
            && !deadline.is_over(|| false)
        {
            let _ = poll_readable(&[listener.as_fd()], Some(Duration::from_millis(10)));
            end = accept_own(&listener, denies).and_then(|conn| receive_end(&conn));
        }
        // No connection comes from here on, so that none is dropped with the listener.
        let _ = listener.shut();
        while accept_own(&listener, denies).is_some() {}
        end
    }

    /// In the forking thread, which was asked to: brings the handler's end.
    fn send_end(&self) {
        let random =
            u128::from(self.name[1].load(Relaxed)) << 64 | u128::from(self.name[0].load(Relaxed));
        let (name, len) = end_socket_name(random);
        let brought = || {
            let number = self.ends[0].number()?;
            // SAFETY: opened by `open_ends` in this thread's table, and not closed before the fork
            // is over.
            let end = unsafe { BorrowedFd::borrow_raw(number) };
            let conn = Conn::try_connect_abstract(&name[..len]).ok()?;
            // The name is the handler's as long as it listens, and perhaps another process's after
            // that.
            let is_own = conn.peer().is_ok_and(|peer| peer.pid == getpid().0);
            let mut deadline = Deadline::new(END_TIMEOUT);
            let mut sent = || loop {
                match conn.send(&[END], &[end]) {
                    // The handler has not seen yet whose the connection is.
                    Err(Errno::PERM) if !deadline.is_over(|| false) => {
                        sleep(Duration::from_micros(100));
                    }
                    sent => return sent.is_ok(),
                }
            };
            (is_own && sent()).then_some(())
        };
        let failed = if brought().is_some() { END_SENT } else { NO_FORK };
        // Not if the handler has gone on meanwhile.
        let _ = self.phase.compare_exchange(END_SOCKET, failed, AcqRel, Acquire);
    }

    /// Waits until the phase is `phase`. `mask`: the calling thread's own signal mask, while it has
    /// all signals blocked.
    pub fn wait(&self, phase: u32, mask: u64) {
        let mut waited = Waited::default();
        loop {
            let now = self.phase.load(Acquire);
            if now == phase {
                return;
            }
            waited
                .turn(futex::wait(&self.phase, now, Some(WAIT_SLICE), futex::Scope::Private), mask);
        }
    }

    /// Called by the forking thread after it has requested the fork: returns when the handler is
    /// prepared for it. False if the handler cannot be: then there must be no engine at the fork.
    /// `mask`: as for [`ForkControl::wait`].
    pub fn wait_until_prepared(&self, mask: u64) -> bool {
        let mut waited = Waited::default();
        loop {
            match self.phase.load(Acquire) {
                PREPARED => {
                    self.goes_on.store(true, Release);
                    return true;
                }
                REFUSED => {
                    self.set(NO_FORK);
                    return false;
                }
                END_SOCKET => self.send_end(),
                now => waited.turn(
                    futex::wait(&self.phase, now, Some(WAIT_SLICE), futex::Scope::Private),
                    mask,
                ),
            }
        }
    }

    /// In the handler: the child was killed, and the forking thread is to say so.
    pub(crate) fn tell_of_kill(&self) {
        self.killed.store(true, Release);
    }

    /// In the forking thread, after its fork: true if the child was killed because it did not take
    /// over.
    pub fn was_child_killed(&self) -> bool {
        self.killed.swap(false, AcqRel)
    }

    /// In the child: true when the parent's handler has no way to it. It gives the child all its
    /// memory unasked, and the child's copy of the engine is of no use.
    pub fn is_shut(&self) -> bool {
        self.shut.load(Acquire)
    }

    pub(crate) fn shut(&self, shut: bool) {
        self.shut.store(shut, Release);
    }

    /// In the handler: whether the forking thread continues.
    pub(crate) fn goes_on(&self) -> bool {
        self.goes_on.load(Acquire)
    }

    /// True while a fork past libc is held for.
    pub(crate) fn is_held(&self) -> bool {
        self.phase.load(Acquire) == HELD
    }

    pub(crate) fn set(&self, phase: u32) {
        self.goes_on.store(false, Release);
        self.phase.store(phase, Release);
        futex::wake(&self.phase, u32::MAX >> 1, futex::Scope::Private);
    }
}

/// The message with which the forking thread sends the handler's end.
const END: u8 = b'E';
/// The time to wait for the forking thread, which was asked to bring the handler's end.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Connections of other processes that stay open. They have found names that exist for a moment;
/// after this many, no further name is made.
const MAX_FOREIGN_CONNECTIONS: usize = 64;
/// The number of those connections.
static FOREIGN_CONNECTIONS: AtomicUsize = AtomicUsize::new(0);

/// The next connection that this process has made, if there is one. `denies`: other processes
/// cannot have sent descriptors.
fn accept_own(listener: &Listener, denies: bool) -> Option<Conn> {
    loop {
        match listener.accept() {
            Ok((conn, peer)) if peer.pid == getpid().0 => {
                let _ = conn.permit_descriptors();
                return Some(conn);
            }
            Ok(_) if denies => {}
            Ok((conn, _)) => {
                FOREIGN_CONNECTIONS.fetch_add(1, Relaxed);
                let _ = conn.shut();
                core::mem::forget(conn);
            }
            Err(_) => return None,
        }
    }
}

/// The handler's end, out of the connection that brings it.
fn receive_end(conn: &Conn) -> Option<Conn> {
    let mut deadline = Deadline::new(END_TIMEOUT);
    while poll_readable(&[conn.as_fd()], Some(Duration::from_millis(10))).ok()? == 0 {
        if deadline.is_over(|| false) {
            return None;
        }
    }
    let (mut word, mut fds) = ([0u8; 2], [None]);
    match conn.recv(&mut word, &mut fds) {
        Ok((1, 1)) if word[0] == END => fds[0].take().map(Conn::from_fd),
        _ => None,
    }
}

/// The name of the listener to which the handler's end is brought, made without allocating.
fn end_socket_name(random: u128) -> ([u8; 64], usize) {
    use std::io::Write;
    let mut name = [0u8; 64];
    let mut rest = &mut name[..];
    let _ = write!(rest, "swaptide-end-{random:032x}");
    let len = 64 - rest.len();
    (name, len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_sys::thread::gettid;

    /// Runs `bring` as the forking thread while the handler fetches its end.
    fn fetched(control: &ForkControl, bring: impl FnOnce() + Send) -> Option<Conn> {
        fetched_by(control, true, bring)
    }

    /// The same; `may_deny`: as on a kernel that can keep other processes from sending descriptors.
    fn fetched_by(
        control: &ForkControl,
        may_deny: bool,
        bring: impl FnOnce() + Send,
    ) -> Option<Conn> {
        std::thread::scope(|scope| {
            let handler = scope.spawn(|| {
                let denies = |listener: &Listener| may_deny && listener.deny_descriptors().is_ok();
                let end = control.fetch_end_by(denies);
                control.set(if end.is_some() { PREPARED } else { REFUSED });
                end
            });
            bring();
            handler.join().expect("the handler")
        })
    }

    fn serve_end_socket(control: &ForkControl) -> ([u8; 64], usize) {
        while control.phase.load(Acquire) != END_SOCKET {
            std::thread::yield_now();
        }
        end_socket_name(
            u128::from(control.name[1].load(Relaxed)) << 64
                | u128::from(control.name[0].load(Relaxed)),
        )
    }

    #[test]
    fn the_handlers_end_is_brought() {
        let control = ForkControl::new(false);
        control.forker.store(gettid().0, Relaxed);
        control.open_ends();
        let end = fetched(&control, || assert!(control.wait_until_prepared(0))).expect("the end");
        let child = control.take_child_end().expect("the child's end");
        end.send(b"!", &[]).expect("send");
        assert_eq!(child.recv(&mut [0u8; 2], &mut []), Ok((1, 0)));
        control.close_end(false);
    }

    #[test]
    fn another_process_that_connects_gets_nothing() {
        check_foreign_connection(true);
        check_foreign_connection(false);
        assert!(FOREIGN_CONNECTIONS.load(Relaxed) > 0, "the second connection is not dropped");
    }

    fn check_foreign_connection(may_deny: bool) {
        let control = ForkControl::new(false);
        control.open_ends();
        let end = fetched_by(&control, may_deny, || {
            let (name, len) = serve_end_socket(&control);
            // SAFETY: the child makes system calls only, and ends.
            let child = unsafe { fork() };
            if child == 0 {
                let mut byte = [0u8; 1];
                let got = Conn::try_connect_abstract(&name[..len]).and_then(|conn| {
                    let _ = conn.send(&[END], &[conn.as_fd()]);
                    conn.recv(&mut byte, &mut [None, None])
                });
                // SAFETY: ends the child at once.
                unsafe { _exit(i32::from(!matches!(got, Ok((0, 0)) | Err(Errno::CONNRESET)))) };
            }
            let mut status = 0;
            // SAFETY: the child of this test.
            unsafe { waitpid(child, &mut status, 0) };
            assert_eq!(status, 0, "it was hung up on");
            assert!(
                control.wait_until_prepared(0),
                "the way is free for the forking thread all the same"
            );
        });
        assert!(end.is_some());
        control.close_end(false);
        control.close_end(true);
    }

    #[test]
    fn without_sockets_there_is_no_channel() {
        let control = ForkControl::new(false);
        assert!(fetched(&control, || assert!(!control.wait_until_prepared(0))).is_none());
    }

    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(status: i32) -> !;
    }
}
