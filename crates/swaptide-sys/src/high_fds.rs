//! Descriptors in a program's table, out of its way.
//!
//! A program that has closed its standard streams may write to them in vain, and one that uses a
//! number as its own puts there what it likes. The kernel gives a new descriptor the lowest free
//! number. So what this library opens in a program's table does not stay there: it moves to a high
//! number, and is never at one of the first three.
//!
//! For a moment it is at the lowest free number from 3 on. Calls by which a program puts something
//! at a number of its choice wait until that moment is over ([`while_naming`]). A program that
//! makes such a call past libc is the limit of this.
//!
//! Owns: the two counts of threads by which these calls and openings exclude each other. Locks:
//! none; both wait with a bound.

use core::sync::atomic::{
    AtomicI32, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Release,
    Ordering::SeqCst,
};
use core::time::Duration;

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use rustix::fs::{FileType, Mode, OFlags, fstat};
use rustix::io::{Errno, fcntl_dupfd_cloexec, fcntl_getfd};
use rustix::process::{Resource, getrlimit};

use crate::time::now;

/// The kernel's table is as large as its highest number, and every fork copies it: no higher
/// numbers are looked for, as long as there are free ones below.
const MAX_FD: u64 = 4096;
/// Numbers that are tried below the limit.
const MAX_FDS_BELOW_LIMIT: u64 = 64;
/// The first number behind the standard streams.
const STANDARD: RawFd = 3;
/// The number of times that a descriptor which another thread has replaced at once is opened again.
const MAX_OPEN_TRIES: u32 = 3;

/// Opens something at a high number, or, where there is none, at any from 3 on. `is_right` tells
/// whether a descriptor is of the kind that is opened: another thread of the program may have put
/// something else at its number. `EMFILE` where no number is free.
pub fn open(
    mut open: impl FnMut() -> Result<OwnedFd, Errno>,
    is_right: fn(BorrowedFd<'_>) -> bool,
) -> Result<OwnedFd, Errno> {
    let _opening = GATE.open();
    let _fillers = Fillers::new();
    for _ in 0..MAX_OPEN_TRIES {
        if let Some(fd) = move_up(open()?, is_right)? {
            return Ok(fd);
        }
    }
    Err(Errno::BADF)
}

/// As [`open`], for two at a time.
pub(crate) fn open_two(
    mut open: impl FnMut() -> Result<(OwnedFd, OwnedFd), Errno>,
    is_right: fn(BorrowedFd<'_>) -> bool,
) -> Result<(OwnedFd, OwnedFd), Errno> {
    let _opening = GATE.open();
    let _fillers = Fillers::new();
    for _ in 0..MAX_OPEN_TRIES {
        let (a, b) = open()?;
        let (a, b) = (move_up(a, is_right), move_up(b, is_right));
        if let (Some(a), Some(b)) = (a?, b?) {
            return Ok((a, b));
        }
    }
    Err(Errno::BADF)
}

/// How long a call that names a number waits for openings, which take microseconds: a thread that
/// was killed in the middle, or that is interrupted there by a handler which does the other, has
/// this long.
const MAX_NAMING_WAIT: Duration = Duration::from_secs(1);
/// The same of openings. A call that names a number has it at once; what it may take long for is to
/// close what was there.
const MAX_OPENING_WAIT: Duration = Duration::from_millis(20);

/// Threads that open something, and threads that put something at a number of their choice. Never
/// both kinds at once: each raises its own count and then looks at the other's, both in the one
/// order of `SeqCst`, so that of two that come at once one sees the other.
struct Gate {
    opening: AtomicU32,
    naming: AtomicU32,
}

static GATE: Gate = Gate { opening: AtomicU32::new(0), naming: AtomicU32::new(0) };

impl Gate {
    /// No thread of the program puts anything at a number of its choice until the answer goes.
    fn open(&self) -> Opening<'_> {
        self.opening.fetch_add(1, SeqCst);
        await_none(&self.naming, MAX_OPENING_WAIT);
        Opening(self)
    }

    fn while_naming<T>(&self, call: impl FnOnce() -> T) -> T {
        let mut since = None;
        loop {
            self.naming.fetch_add(1, SeqCst);
            if self.opening.load(SeqCst) == 0 {
                break;
            }
            if now().since(*since.get_or_insert_with(now)) > MAX_NAMING_WAIT {
                break;
            }
            leave(&self.naming);
            await_none(&self.opening, MAX_NAMING_WAIT);
        }
        let result = call();
        leave(&self.naming);
        result
    }
}

struct Opening<'a>(&'a Gate);

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        leave(&self.0.opening);
    }
}

/// Waits until a count is 0, which it is made after the longest wait.
fn await_none(count: &AtomicU32, max_wait: Duration) {
    if count.load(SeqCst) == 0 {
        return;
    }
    let since = now();
    while count.load(SeqCst) != 0 {
        if now().since(since) > max_wait {
            count.store(0, SeqCst);
        }
        rustix::thread::sched_yield();
    }
}

/// A count may have been made 0 meanwhile.
fn leave(count: &AtomicU32) {
    let _ = count.fetch_update(SeqCst, SeqCst, |threads| threads.checked_sub(1));
}

/// Makes a call of the program that puts something at a number of its choice, at a moment in which
/// nothing of this library is at a number that may be the program's.
pub fn while_naming<T>(call: impl FnOnce() -> T) -> T {
    GATE.while_naming(call)
}

/// In the child of a fork, before it has a second thread: the other threads that were in the middle
/// of something are not here.
pub fn forked() {
    GATE.opening.store(0, SeqCst);
    GATE.naming.store(0, SeqCst);
}

/// `None` where something else is at the number.
fn move_up(fd: OwnedFd, is_right: fn(BorrowedFd<'_>) -> bool) -> Result<Option<OwnedFd>, Errno> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let top = limit.min(MAX_FD);
    let moved = [top.saturating_sub(MAX_FDS_BELOW_LIMIT), top / 2, STANDARD as u64]
        .into_iter()
        .map(|from| from.max(STANDARD as u64) as RawFd)
        .filter(|from| *from > fd.as_raw_fd())
        .find_map(|from| fcntl_dupfd_cloexec(&fd, from).ok());
    let Some(moved) = moved else {
        if !is_right(fd.as_fd()) {
            core::mem::forget(fd);
            return Ok(None);
        }
        let is_standard = fd.as_raw_fd() < STANDARD;
        return if is_standard { Err(Errno::MFILE) } else { Ok(Some(fd)) };
    };
    if !is_right(moved.as_fd()) {
        // The number is the program's.
        core::mem::forget(fd);
        return Ok(None);
    }
    let same = match (fstat(&fd), fstat(&moved)) {
        (Ok(a), Ok(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
        _ => false,
    };
    if !same {
        core::mem::forget(fd);
    }
    Ok(Some(moved))
}

/// While it lives, no number below 3 is free. What a program does with these numbers fails as if
/// nothing were there: they can be closed, and not be read or written (`O_PATH`).
struct Fillers([bool; STANDARD as usize]);

impl Fillers {
    fn new() -> Fillers {
        let mut fillers = Fillers([false; STANDARD as usize]);
        while (0..STANDARD).any(|number| fcntl_getfd(borrow(number)) == Err(Errno::BADF)) {
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let Ok(fd) = rustix::fs::open(c"/", flags, Mode::empty()) else { break };
            match fillers.0.get_mut(fd.as_raw_fd() as usize) {
                Some(is_filled) if !*is_filled => *is_filled = true,
                // Others close them, or have opened something meanwhile.
                _ => break,
            }
            core::mem::forget(fd);
        }
        fillers
    }
}

impl Drop for Fillers {
    fn drop(&mut self) {
        for number in (0..STANDARD).filter(|number| self.0[*number as usize]) {
            let flags = rustix::fs::fcntl_getfl(borrow(number));
            if flags.is_ok_and(|flags| flags.contains(OFlags::PATH)) {
                // SAFETY: `new` opened it, and it still is one of that kind.
                drop(unsafe { OwnedFd::from_raw_fd(number) });
            }
        }
    }
}

/// A number of the calling thread's table, whatever is there.
fn borrow(number: RawFd) -> BorrowedFd<'static> {
    // SAFETY: only asked about; where nothing is there, the kernel says so.
    unsafe { BorrowedFd::borrow_raw(number) }
}

/// In place of a number: there is no descriptor.
const NONE: RawFd = -1;

/// The inode of a socket; `None` for any other descriptor, and for none. Those of sockets are
/// numbered apart from files.
fn socket_inode(number: RawFd) -> Option<u64> {
    let stat = fstat(borrow(number)).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::Socket).then_some(stat.st_ino)
}

/// A socket in a program's table, kept by number. The program may close it, and have something else
/// at that number: then there is nothing here.
#[derive(Debug)]
pub struct SocketNumber {
    number: AtomicI32,
    inode: AtomicU64,
}

impl SocketNumber {
    /// Without a socket.
    pub const fn none() -> SocketNumber {
        SocketNumber { number: AtomicI32::new(NONE), inode: AtomicU64::new(0) }
    }

    /// Keeps the socket open, and notes its number and inode.
    pub fn set(&self, socket: OwnedFd) {
        let number = socket.into_raw_fd();
        self.inode.store(socket_inode(number).unwrap_or(0), Release);
        self.number.store(number, Release);
    }

    /// True if a descriptor is that socket, in whichever table.
    pub fn is(&self, fd: BorrowedFd<'_>) -> bool {
        socket_inode(fd.as_raw_fd()) == Some(self.inode.load(Acquire))
    }

    /// The number that was kept, whatever is there.
    pub fn last_number(&self) -> Option<RawFd> {
        Some(self.number.load(Acquire)).filter(|number| *number != NONE)
    }

    /// The number, if it is that socket in the calling thread's table: the one it was kept from, or
    /// a copy.
    pub fn number(&self) -> Option<RawFd> {
        self.last_number().filter(|number| self.is(borrow(*number)))
    }

    /// The socket, out of that table. It is not kept any more.
    pub fn take(&self) -> Option<OwnedFd> {
        let number = self.number();
        self.number.swap(NONE, AcqRel);
        // SAFETY: `set` took it over from its owner, and it still is that socket.
        number.map(|number| unsafe { OwnedFd::from_raw_fd(number) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opened_descriptor_has_high_number() {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let fd = open(
            || rustix::fs::open(c"/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()),
            |_| true,
        )
        .expect("a descriptor");
        assert!(fd.as_raw_fd() as u64 >= limit.min(MAX_FD) - MAX_FDS_BELOW_LIMIT, "{fd:?}");
    }

    #[test]
    fn openings_and_calls_that_name_a_number_exclude_each_other() {
        let gate = Gate { opening: AtomicU32::new(0), naming: AtomicU32::new(0) };
        let (opened, named) = (AtomicU32::new(0), AtomicU32::new(0));
        let others = |own: &AtomicU32, other: &AtomicU32| {
            own.fetch_add(1, SeqCst);
            std::thread::yield_now();
            assert_eq!(other.load(SeqCst), 0);
            own.fetch_sub(1, SeqCst);
        };
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let _opening = gate.open();
                        others(&opened, &named);
                    }
                });
                scope.spawn(|| {
                    for _ in 0..500 {
                        gate.while_naming(|| others(&named, &opened));
                    }
                });
            }
        });
    }

    #[test]
    fn a_thread_that_was_killed_in_the_middle_is_waited_for_once() {
        let gate = Gate { opening: AtomicU32::new(1), naming: AtomicU32::new(0) };
        let since = now();
        gate.while_naming(|| ());
        assert!(now().since(since) >= MAX_NAMING_WAIT);
        gate.while_naming(|| ());
        assert_eq!(gate.opening.load(SeqCst), 0);
    }

    #[test]
    fn a_number_that_is_another_files_is_left_alone() {
        let kept = SocketNumber::none();
        assert!(kept.number().is_none() && kept.take().is_none());
        let (a, _b) = crate::sock::Conn::pair_high().expect("a pair");
        let a = a.into_fd();
        let number = a.as_raw_fd();
        kept.set(a);
        assert_eq!(kept.number(), Some(number));
        let null = rustix::fs::open(c"/dev/null", OFlags::RDWR, Mode::empty()).expect("a file");
        // SAFETY: the number is that of the socket, which is kept by its number alone.
        let mut place = unsafe { OwnedFd::from_raw_fd(number) };
        rustix::io::dup2(&null, &mut place).expect("dup2");
        assert!(kept.number().is_none() && kept.take().is_none());
        assert!(fcntl_getfd(&place).is_ok(), "it is still open");
    }
}
