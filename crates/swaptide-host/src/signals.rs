//! Signals as descriptors: the supervisor takes none by a handler.
//!
//! Owns the blocking of signals and the reading of the signalfd. Both processes of a supervisor
//! block everything that can be blocked; the program gets the mask and the dispositions that the
//! supervisor itself was started with.
//!
//! Locks: none.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use swaptide_sys::ptrace::TraceeStop;

/// A signal that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Number of the signal.
    pub signal: i32,
    /// The process that sent it; `None` when the kernel did (the terminal, a timer, a fault).
    pub sender: Option<u32>,
}

/// The mask and dispositions that were there before, for the program to inherit.
#[derive(Clone, Copy)]
pub struct Inherited {
    mask: libc::sigset_t,
    children_ignored: bool,
}

/// Blocks every signal and opens a descriptor on all of them. For a process with one thread;
/// threads started later inherit it.
///
/// # Errors
/// What the kernel answers.
pub fn take() -> io::Result<(Signals, Inherited)> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is a local that sigfillset writes whole.
    let all = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        all.assume_init()
    };
    // SAFETY: both sets are locals; sigprocmask writes the second whole when it succeeds, which is
    // checked before it is read.
    let mask = unsafe {
        if libc::sigprocmask(libc::SIG_SETMASK, &all, before.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        before.assume_init()
    };
    // SAFETY: no handler is installed: the disposition becomes the default, so that children leave
    // a status to be waited for.
    let before = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    let signals = Signals::open(&all)?;
    Ok((signals, Inherited { mask, children_ignored: before == libc::SIG_IGN }))
}

impl Inherited {
    /// Puts back what was there. Between fork and exec of the program.
    pub fn restore(&self) -> io::Result<()> {
        // SAFETY: the mask was filled by the kernel, and SIG_IGN installs no handler. Both calls
        // may be made between fork and exec.
        unsafe {
            if self.children_ignored {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            }
            if libc::sigprocmask(libc::SIG_SETMASK, &self.mask, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }
}

/// The descriptor. It tells of the signals of whichever process reads it.
pub struct Signals(OwnedFd);

impl Signals {
    fn open(set: &libc::sigset_t) -> io::Result<Signals> {
        // SAFETY: the set lives over the call, and -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor, which nothing else owns.
        Ok(Signals(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The next signal that waits, if any.
    pub fn next(&self) -> Option<Arrived> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the buffer is as long as said; what is read back is plain numbers, and only after
        // all of it was written.
        let info = unsafe {
            if libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), size) != size as isize {
                return None;
            }
            info.assume_init()
        };
        // Codes above zero are the kernel's own; SI_USER, SI_QUEUE and SI_TKILL are not.
        let sender = (info.ssi_code <= 0).then_some(info.ssi_pid);
        Some(Arrived { signal: info.ssi_signo as i32, sender })
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sends a signal to a process that this one is the parent or the child of. One that is gone is no
/// error.
pub fn send(pid: u32, signal: i32) {
    // SAFETY: kill takes two numbers.
    unsafe { libc::kill(pid as i32, signal) };
}

/// True if two processes are in one process group.
pub(crate) fn same_group(one: u32, other: u32) -> bool {
    // SAFETY: getpgid takes a number and answers with one.
    let group = |pid: u32| unsafe { libc::getpgid(pid as i32) };
    group(one) == group(other)
}

/// What became of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChildStatus {
    /// It ended; the status is as a shell gives it: its own, or 128 + the signal.
    Ended {
        /// Process id of the child.
        pid: u32,
        /// 128 + n on signal n.
        status: u8,
    },
    /// It was stopped, by this signal.
    Stopped(u32, u32),
    /// It is followed (`control/fork_tracer.rs`), or is a child of one that is; the status as the
    /// wait gave it.
    Followed(u32, u32),
    /// It was continued (`SIGCONT`).
    Continued(u32),
    /// There are children, and none has changed.
    Nothing,
    /// There is no child any more.
    NoChild,
}

impl ChildStatus {
    /// The state of a thread that this process traces, if this is of one that it traces.
    pub(crate) fn of_tracee(self) -> Option<(u32, TraceeStop)> {
        match self {
            ChildStatus::Ended { pid, .. } => Some((pid, TraceeStop::Gone)),
            ChildStatus::Followed(pid, status) => Some((pid, TraceeStop::of(status))),
            ChildStatus::Stopped(pid, signal) => Some((pid, TraceeStop::Signal(signal))),
            _ => None,
        }
    }
}

/// The next change of a child that was not told yet; does not wait.
pub(crate) fn child_change() -> ChildStatus {
    let mut status = 0;
    // SAFETY: the status is a local number.
    let pid = unsafe {
        libc::waitpid(-1, &mut status, libc::WNOHANG | libc::WUNTRACED | libc::WCONTINUED)
    };
    let Ok(pid) = u32::try_from(pid) else { return ChildStatus::NoChild };
    match pid {
        0 => ChildStatus::Nothing,
        _ if libc::WIFSTOPPED(status) && status >> 16 != 0 => {
            ChildStatus::Followed(pid, status as u32)
        }
        _ if libc::WIFSTOPPED(status) => ChildStatus::Stopped(pid, libc::WSTOPSIG(status) as u32),
        _ if libc::WIFCONTINUED(status) => ChildStatus::Continued(pid),
        _ if libc::WIFSIGNALED(status) => {
            ChildStatus::Ended { pid, status: 128 + libc::WTERMSIG(status) as u8 }
        }
        _ => ChildStatus::Ended { pid, status: libc::WEXITSTATUS(status) as u8 },
    }
}
