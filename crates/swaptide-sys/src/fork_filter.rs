//! A filter of system calls by which a supervisor is told of forks before they are made.
//!
//! The process that sets it has all its threads under it, and all that it forks and executes later.
//! What makes a process with memory of its own waits in the call until the supervisor answers; all
//! else passes:
//!
//! | call | |
//! |---|---|
//! | `fork`, `clone` without `CLONE_VM` | waits |
//! | `clone3` | fails with `ENOSYS`, for the filter does not see its flags; libcs use `clone` then |
//! | `vfork`, `clone` with `CLONE_VM`, calls of other machines | pass |
//!
//! Facts
//! 1. A call that was answered is made then, in the same thread; nothing tells when it is over.
//! 2. A thread that waits is not interrupted by signals once its notification was read
//!    (`WAIT_KILLABLE_RECV`, Linux 5.19); before that, a handler without `SA_RESTART` has it
//!    return `EINTR`.
//! 3. Without a reader, when the last descriptor is closed, calls fail with `ENOSYS`.
//! 4. A process has one such filter at most: another one is refused with `EBUSY`.
//!
//! Locks: none.

use alloc::vec::Vec;
use core::mem::size_of;

use linux_raw_sys::general as k;
use linux_raw_sys::prctl::PR_SET_NO_NEW_PRIVS;
use linux_raw_sys::ptrace as s;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;

use crate::raw::syscall;

/// `struct sock_filter`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u16,
    then: u8,
    otherwise: u8,
    word: u32,
}

/// `struct sock_fprog`.
#[repr(C)]
struct FilterProgram {
    len: u16,
    code: *const Instruction,
}

/// `struct seccomp_notif`.
#[repr(C)]
#[derive(Default)]
struct RawNotification {
    id: u64,
    pid: u32,
    flags: u32,
    number: i32,
    arch: u32,
    instruction_pointer: u64,
    args: [u64; 6],
}

/// `struct seccomp_notif_resp`.
#[repr(C)]
struct RawAnswer {
    id: u64,
    value: i64,
    error: i32,
    flags: u32,
}

const _: () = assert!(size_of::<Instruction>() == 8 && size_of::<FilterProgram>() == 16);
const _: () = assert!(size_of::<RawNotification>() == 80 && size_of::<RawAnswer>() == 24);

/// `SECCOMP_IOCTL_NOTIF_RECV` and `SECCOMP_IOCTL_NOTIF_SEND`.
const RECEIVE: u32 = 0xc050_2100;
const SEND: u32 = 0xc018_2101;

const ARCH_X86_64: u32 = 0xc000_003e;
/// In the numbers of calls of x32.
const X32: u32 = 0x4000_0000;
const LOAD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
/// Offsets in `struct seccomp_data`: the number, the machine, the low half of the first argument.
const NUMBER_AT: u32 = 0;
const ARCH_AT: u32 = 4;
const FLAGS_AT: u32 = 16;

const fn load(at: u32) -> Instruction {
    Instruction { code: LOAD, then: 0, otherwise: 0, word: at }
}

const fn and(word: u32) -> Instruction {
    Instruction { code: AND, then: 0, otherwise: 0, word }
}

const fn jump_if(word: u32, then: u8, otherwise: u8) -> Instruction {
    Instruction { code: JUMP_IF_EQUAL, then, otherwise, word }
}

const fn answer(word: u32) -> Instruction {
    Instruction { code: RETURN, then: 0, otherwise: 0, word }
}

const FILTER: [Instruction; 13] = [
    load(ARCH_AT),
    jump_if(ARCH_X86_64, 0, 8),
    load(NUMBER_AT),
    and(!X32),
    jump_if(k::__NR_fork, 6, 0),
    jump_if(k::__NR_clone3, 6, 0),
    jump_if(k::__NR_clone, 0, 3),
    load(FLAGS_AT),
    and(k::CLONE_VM),
    jump_if(0, 1, 0),
    answer(s::SECCOMP_RET_ALLOW),
    answer(s::SECCOMP_RET_USER_NOTIF),
    answer(s::SECCOMP_RET_ERRNO | linux_raw_sys::errno::ENOSYS),
];

/// Sets the filter for all threads of this process; gives what its supervisor reads. Where that
/// takes a privilege that this process lacks, it gives up to gain any by executing a program
/// (`no_new_privs`).
///
/// # Errors
/// `BUSY` where the process has such a filter (fact 4), `SRCH` where a thread is under a filter of
/// its own, `INVAL` before Linux 5.19.
pub fn set() -> Result<ForkFilter, Errno> {
    let program = FilterProgram { len: FILTER.len() as u16, code: FILTER.as_ptr() };
    let flags = s::SECCOMP_FILTER_FLAG_NEW_LISTENER
        | s::SECCOMP_FILTER_FLAG_TSYNC
        | s::SECCOMP_FILTER_FLAG_TSYNC_ESRCH
        | s::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    let program = (&raw const program) as usize;
    let set = || {
        // SAFETY: the kernel reads the program, which outlives the call.
        unsafe { syscall!(k::__NR_seccomp, s::SECCOMP_SET_MODE_FILTER, flags, program) }
    };
    let fd = match set() {
        Err(Errno::ACCESS) => {
            // SAFETY: no memory is passed.
            unsafe {
                syscall!(k::__NR_prctl, PR_SET_NO_NEW_PRIVS, 1usize, 0usize, 0usize, 0usize)
            }?;
            set()
        }
        other => other,
    }?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(ForkFilter(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
}

/// The supervisor's end.
#[derive(Debug)]
pub struct ForkFilter(OwnedFd);

/// What a look at a filter has seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FilterState {
    /// A thread waits.
    Waiting,
    /// None does.
    Quiet,
    /// All that were under it are gone.
    Ended,
}

/// A thread that waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitingFork {
    id: u64,
    /// The thread, by its number in the reader's pid namespace; 0 if it has none there.
    pub tid: u32,
}

impl ForkFilter {
    /// Wraps a descriptor that was received.
    pub fn from_fd(fd: OwnedFd) -> ForkFilter {
        ForkFilter(fd)
    }

    /// Gives the descriptor up.
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// Looks whether threads wait.
    pub fn look<'a>(filters: impl Iterator<Item = &'a ForkFilter>) -> Vec<FilterState> {
        let mut fds: Vec<PollFd<'a>> =
            filters.map(|filter| PollFd::new(&filter.0, PollFlags::IN)).collect();
        let is_any = poll(&mut fds, Some(&Timespec::default())).is_ok();
        let state = |events: PollFlags| match events {
            _ if !is_any || events.is_empty() => FilterState::Quiet,
            _ if events.contains(PollFlags::IN) => FilterState::Waiting,
            _ => FilterState::Ended,
        };
        fds.iter().map(|fd| state(fd.revents())).collect()
    }

    /// The thread that waits longest. Waits for one where [`ForkFilter::look`] has seen none.
    ///
    /// # Errors
    /// `NOENT` when it was killed meanwhile.
    pub fn next(&self) -> Result<WaitingFork, Errno> {
        let mut raw = RawNotification::default();
        let to = (&raw mut raw) as usize;
        // SAFETY: the kernel writes one struct of that size.
        unsafe { syscall!(k::__NR_ioctl, self.0.as_raw_fd(), RECEIVE as usize, to) }?;
        Ok(WaitingFork { id: raw.id, tid: raw.pid })
    }

    fn send(&self, answer: &RawAnswer) -> Result<(), Errno> {
        let from = (&raw const *answer) as usize;
        // SAFETY: the kernel reads one struct of that size.
        unsafe { syscall!(k::__NR_ioctl, self.0.as_raw_fd(), SEND as usize, from) }.map(drop)
    }

    /// Has the call be made.
    ///
    /// # Errors
    /// `NOENT` when the thread was killed.
    pub fn let_go(&self, fork: WaitingFork) -> Result<(), Errno> {
        let flags = s::SECCOMP_USER_NOTIF_FLAG_CONTINUE;
        self.send(&RawAnswer { id: fork.id, value: 0, error: 0, flags })
    }

    /// Has the call fail.
    ///
    /// # Errors
    /// As for [`ForkFilter::let_go`].
    pub fn refuse(&self, fork: WaitingFork, errno: Errno) -> Result<(), Errno> {
        let error = -errno.raw_os_error();
        self.send(&RawAnswer { id: fork.id, value: 0, error, flags: 0 })
    }
}

impl AsFd for ForkFilter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
