//! ptrace, as far as a fork needs it that the kernel does not report: a thread is followed from
//! before its fork on, and the child is made to run a function of its own memory before anything
//! else.
//!
//! Owns nothing: a [`Tracee`] is a number. The tracer is a thread, not a process: every call comes
//! from the thread that has seized. The state of the tracee is told by a wait, of any thread of
//! the process where it is their child as well.
//!
//! Facts the callers rely on, checked by `tests/ptrace.rs` on the running kernel:
//! 1. A child of a followed thread is followed too, from its first instruction on, and stops before
//!    it has run a single instruction of its own.
//! 2. The parent is stopped, in its fork, from the child's birth until it is detached.
//! 3. With [`seize`], both are killed if the tracer ends: neither continues alone half way.
//! 4. A followed thread that executes a program stops before that runs, under the number of its
//!    process.

use linux_raw_sys::general as k;
use linux_raw_sys::ptrace as p;
use rustix::io::Errno;

use crate::raw::syscall;

/// The registers of x86-64, in the order of the kernel's `user_regs_struct`.
pub(crate) type Registers = [u64; 27];
pub(crate) const RIP: usize = 16;
const RSP: usize = 19;
pub(crate) const ORIG_RAX: usize = 15;

const _: () = assert!(size_of::<Registers>() == size_of::<k::__kernel_ulong_t>() * 27);

/// The event of a stop of a followed thread that no signal has caused (`PTRACE_EVENT_STOP`).
const EVENT_STOP: u32 = 128;
pub(crate) const SIGTRAP: u32 = 5;

/// The state of a followed thread.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum TraceeStop {
    /// It has forked, and is stopped.
    Forked,
    /// It has executed a program, of which nothing has run, and is stopped.
    Executed,
    /// It is stopped because it was told to, or because it has just been made.
    Still,
    /// It is stopped with its process, as by `SIGSTOP`.
    Stopped,
    /// A signal is about to reach it.
    Signal(u32),
    /// It has ended.
    Gone,
}

impl TraceeStop {
    /// Returns the state of a followed thread by the status of a wait.
    pub fn of(status: u32) -> TraceeStop {
        let signal = status >> 8 & 0xff;
        match status >> 16 {
            _ if status & 0xff != 0x7f => TraceeStop::Gone,
            p::PTRACE_EVENT_FORK => TraceeStop::Forked,
            p::PTRACE_EVENT_EXEC => TraceeStop::Executed,
            EVENT_STOP if signal == SIGTRAP => TraceeStop::Still,
            EVENT_STOP => TraceeStop::Stopped,
            _ => TraceeStop::Signal(signal),
        }
    }
}

/// A followed thread.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Tracee(u32);

/// Follows a thread, and what it forks, until it executes a program: then it stops, to be let go.
/// If the calling thread ends without letting them go, they are killed.
///
/// # Errors
/// `EPERM` where that is not permitted, or it has another tracer.
pub fn seize(tid: u32) -> Result<Tracee, Errno> {
    let tracee = Tracee(tid);
    let options = p::PTRACE_O_TRACEFORK | p::PTRACE_O_TRACEEXEC | p::PTRACE_O_EXITKILL;
    // SAFETY: the request changes nothing in memory, here or there.
    unsafe { tracee.call(p::PTRACE_SEIZE, 0, options as usize) }?;
    Ok(tracee)
}

impl Tracee {
    /// # Safety
    /// What the request writes to, `data` points to.
    unsafe fn call(self, request: u32, addr: usize, data: usize) -> Result<usize, Errno> {
        // SAFETY: the caller's promise.
        unsafe { syscall!(k::__NR_ptrace, request as usize, self.0 as usize, addr, data) }
    }

    /// The thread's number.
    pub fn tid(self) -> u32 {
        self.0
    }

    /// A thread that is followed because its parent is followed.
    pub fn of(tid: u32) -> Tracee {
        Tracee(tid)
    }

    /// The child of a thread that has [`TraceeStop::Forked`]. It is followed.
    ///
    /// # Errors
    /// When the thread is gone.
    pub fn child(self) -> Result<Tracee, Errno> {
        let mut pid = 0u64;
        // SAFETY: the kernel writes one word.
        unsafe { self.call(p::PTRACE_GETEVENTMSG, 0, (&raw mut pid) as usize) }?;
        Ok(Tracee(pid as u32))
    }

    /// Lets it continue; with a signal that was about to reach it.
    ///
    /// # Errors
    /// When it is gone.
    pub fn go_on(self, signal: u32) -> Result<(), Errno> {
        // SAFETY: nothing is written.
        unsafe { self.call(p::PTRACE_CONT, 0, signal as usize) }.map(drop)
    }

    /// Leaves it stopped with its process, until that continues.
    ///
    /// # Errors
    /// When it is gone.
    pub fn stay(self) -> Result<(), Errno> {
        // SAFETY: nothing is written.
        unsafe { self.call(p::PTRACE_LISTEN, 0, 0) }.map(drop)
    }

    /// Has it stop soon.
    ///
    /// # Errors
    /// When it is gone.
    pub fn interrupt(self) -> Result<(), Errno> {
        // SAFETY: nothing is written.
        unsafe { self.call(p::PTRACE_INTERRUPT, 0, 0) }.map(drop)
    }

    /// Follows it no more; it is stopped now, and continues, with a signal that was about to
    /// reach it.
    ///
    /// # Errors
    /// When it is gone.
    pub fn release(self, signal: u32) -> Result<(), Errno> {
        // SAFETY: nothing is written.
        unsafe { self.call(p::PTRACE_DETACH, 0, signal as usize) }.map(drop)
    }

    /// Has a thread that was just made begin at `entry`, with its stack at `frame`, where two words
    /// tell it where it would have begun and with which stack.
    ///
    /// # Safety
    /// The thread is at its first stop, and what is at `entry` in its memory can be begun so.
    ///
    /// # Errors
    /// When it is gone, or has no memory at `frame`.
    pub unsafe fn begin_at(self, entry: u64, frame: u64) -> Result<(), Errno> {
        let mut registers: Registers = [0; 27];
        // SAFETY: the kernel writes as many words as there are.
        unsafe { self.call(p::PTRACE_GETREGS, 0, registers.as_mut_ptr() as usize) }?;
        for (place, word) in [registers[RIP], registers[RSP]].into_iter().enumerate() {
            // SAFETY: the caller's promise: these words are the thread's for that.
            unsafe { self.call(p::PTRACE_POKEDATA, frame as usize + 8 * place, word as usize) }?;
        }
        registers[RIP] = entry;
        registers[RSP] = frame;
        // A fork is not a call to restart.
        registers[ORIG_RAX] = u64::MAX;
        // SAFETY: the kernel reads as many words as there are; what they do is the caller's
        // promise.
        unsafe { self.call(p::PTRACE_SETREGS, 0, registers.as_ptr() as usize) }.map(drop)
    }
}
