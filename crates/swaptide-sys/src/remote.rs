//! A stopped thread of another process that is made to make system calls: what puts the agent into
//! a program that loads no library.
//!
//! Owns nothing that outlives a [`Remote`]. The tracer is the thread that has called
//! [`Seized::seize`]: all calls come from it. What other threads of the program do meanwhile is the
//! caller's affair.
//!
//! The wait of any thread of the tracer's process may report a stop, if the program is a child of
//! that process: its threads must not wait for children meanwhile.
//!
//! Facts this relies on, checked by `tests/remote.rs` on the running kernel:
//! 1. A stop that [`PTRACE_INTERRUPT`](linux_raw_sys::ptrace::PTRACE_INTERRUPT) asked for comes
//!    before the kernel decides whether an interrupted system call begins again. So with the
//!    registers put back at such a stop, a call that was under way begins again. One that would end
//!    with `EINTR` does so too (`begin_again`), unless a handler runs.
//! 2. Where the word for "no system call" stands in the place of the call's number, nothing begins
//!    again: the instruction that the registers point to runs.
//! 3. With signals blocked no handler runs between the two.
//! 4. A thread that the stopped one makes is not traced.
//!
//! Invariants
//! 1. The program's registers and signal mask are put back before it is let go, or it ends: if the
//!    tracer ends in between, the kernel kills it.
//! 2. No instruction of the program is changed: calls are made by an instruction of the vdso, or of
//!    what was mapped before.
//! 3. No wait is without a bound: a thread is no longer traced when another one of its process
//!    executes a program, which no wait tells, and a call may take long ([`Remote::is_late`]).
//!
//! Locks: none.

use core::cell::Cell;
use core::time::Duration;

use linux_raw_sys::general as k;
use linux_raw_sys::ptrace as p;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::procfs::{ProcPath, number_field, read_file, retry};
use crate::ptrace::{ORIG_RAX, RIP, Registers, SIGTRAP, TraceeStop};
use crate::raw::{check, syscall};
use crate::thread::{gettid, now, sleep, yield_now};

const R8: usize = 9;
const R9: usize = 8;
const R10: usize = 7;
const RAX: usize = 10;
const RDX: usize = 12;
const RSI: usize = 13;
const RDI: usize = 14;
const EFLAGS: usize = 18;
const CS: usize = 17;
/// The kernel's selectors for code of 64 bits; the second one under Xen.
const CS_OF_64_BITS: [u64; 2] = [0x33, 0xe033];
/// In the flags: single steps.
const TRAP_FLAG: u64 = 1 << 8;

const PTRACE_GETSIGMASK: u32 = 0x420a;
const PTRACE_SETSIGMASK: u32 = 0x420b;
const PTRACE_GET_RSEQ_CONFIGURATION: u32 = 0x420f;
/// Once it is stopped. While it runs, threads that it makes are its own affair.
const OPTIONS: u32 = p::PTRACE_O_TRACESYSGOOD | p::PTRACE_O_EXITKILL;
/// In the place of a system call's number: there is none.
const NO_CALL: u64 = u64::MAX;
/// A stop at the entry or the exit of a system call, as a wait reports it.
const CALL_STOP: u32 = (SIGTRAP | 0x80) << 8 | 0x7f;
const AT_SYSINFO_EHDR: u64 = 33;
/// Options of waits.
const WNOHANG: usize = 1;
const WSTOPPED: usize = 2;
const WEXITED: usize = 4;
const WNOWAIT: usize = 0x0100_0000;
const WALL: usize = 0x4000_0000;
/// Pages of the vdso that are searched for an instruction.
const VDSO_BYTES: usize = 8192;
const SYSCALL_INSTRUCTION: [u8; 2] = [0x0f, 0x05];
/// The longest that one stop is waited for.
const STOP_TIMEOUT: Duration = Duration::from_millis(500);
/// A stop that comes at once is waited for without sleeping, for this long.
const SPIN_TIME: Duration = Duration::from_micros(100);
/// Between two looks for a stop that does not come at once.
const WAIT_INTERVAL: Duration = Duration::from_micros(50);
/// From then on the wait asks whether the thread is traced still.
const DOUBT_TIME: Duration = Duration::from_millis(1);
/// Results by which the kernel says that a call is to begin again (`ERESTARTSYS` to
/// `ERESTART_RESTARTBLOCK`); programs do not see them.
const BEGIN_AGAIN: core::ops::RangeInclusive<isize> = -516..=-512;
const MAX_REPEATS: u32 = 100;
/// Result by which the kernel makes a call again, unless a signal's handler runs: then it ends with
/// `EINTR` (`ERESTARTNOHAND`).
const AGAIN_WITHOUT_HANDLER: i64 = -514;
const INTERRUPTED: i64 = -4;
/// Waits that end with `EINTR` whatever has interrupted them, and have done nothing then: of
/// sockets those that have a timeout.
const WAITS: [u32; 19] = [
    k::__NR_epoll_wait,
    k::__NR_epoll_pwait,
    k::__NR_epoll_pwait2,
    k::__NR_rt_sigtimedwait,
    k::__NR_semop,
    k::__NR_semtimedop,
    k::__NR_io_getevents,
    k::__NR_io_pgetevents,
    k::__NR_io_uring_enter,
    k::__NR_accept,
    k::__NR_accept4,
    k::__NR_recvfrom,
    k::__NR_recvmsg,
    k::__NR_recvmmsg,
    k::__NR_sendto,
    k::__NR_sendmsg,
    k::__NR_sendmmsg,
    k::__NR_read,
    k::__NR_write,
];

/// A thread of another process, stopped.
pub struct Remote {
    tid: u32,
    saved: Registers,
    mask: u64,
    /// Address of a `syscall` instruction.
    call_at: u64,
    /// The thread is inside a call, and was waited for in vain.
    is_late: Cell<bool>,
    /// How its system calls are handed to the program instead of the kernel, where they are.
    dispatch: Option<DispatchConfig>,
}

/// `struct ptrace_sud_config`: mode, selector, offset, length.
type DispatchConfig = [u64; 4];
const PTRACE_SET_SYSCALL_USER_DISPATCH_CONFIG: u32 = 0x4210;
const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: u32 = 0x4211;
const DISPATCH_IS_ON: u64 = 1;
/// Calls from a range are dispatched, not those from elsewhere (Linux 6.17). What is told of it is
/// the rest of all addresses, as if that were set with [`DISPATCH_IS_ON`], which is refused.
const DISPATCH_IS_INCLUSIVE: u64 = 2;

/// Has the calls of a thread reach the kernel; gives what was set before, if they did not. Kernels
/// before 6.4 cannot tell.
fn end_dispatch(tid: u32) -> Option<DispatchConfig> {
    let mut config: DispatchConfig = [0; 4];
    let (at, len) = ((&raw mut config) as usize, size_of::<DispatchConfig>());
    // SAFETY: the kernel writes as many bytes.
    unsafe { ptrace(PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, tid, len, at) }.ok()?;
    if config[0] != DISPATCH_IS_ON {
        return None;
    }
    set_dispatch(tid, &[0; 4]).ok().map(|()| config)
}

fn set_dispatch(tid: u32, config: &DispatchConfig) -> Result<(), Errno> {
    let (at, len) = (core::ptr::from_ref(config) as usize, size_of::<DispatchConfig>());
    // SAFETY: the kernel reads as many bytes.
    unsafe { ptrace(PTRACE_SET_SYSCALL_USER_DISPATCH_CONFIG, tid, len, at) }.map(drop)
}

/// Sets it as it was told.
fn put_dispatch_back(tid: u32, config: &DispatchConfig) {
    let [_, selector, offset, len] = *config;
    let inclusive = [DISPATCH_IS_INCLUSIVE, selector, offset.wrapping_add(len), len.wrapping_neg()];
    // Where the kernel takes neither, the thread is to go on all the same.
    let _ = set_dispatch(tid, config).or_else(|_| set_dispatch(tid, &inclusive));
}

/// `struct ptrace_rseq_configuration`.
#[repr(C)]
#[derive(Default)]
struct RseqConfiguration {
    area: u64,
    size: u32,
    signature: u32,
    flags: u32,
    padding: u32,
}
const _: () = assert!(size_of::<RseqConfiguration>() == 24);

/// # Safety
/// What the request writes to, `data` points to.
unsafe fn ptrace(request: u32, tid: u32, addr: usize, data: usize) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    unsafe { syscall!(k::__NR_ptrace, request as usize, tid as usize, addr, data) }
}

/// True for a thread that the calling one traces, and where that cannot be known: /proc may hide
/// it, or there is no descriptor.
pub fn is_traced_here(tid: u32) -> bool {
    match number_of_status(tid, "TracerPid") {
        Ok(found) => found.is_none_or(|found| found == u64::from(gettid().0)),
        Err(_) => is_there(tid),
    }
}

/// True for a thread that the calling one traces, and that is stopped: the kernel says so, without
/// a file.
pub fn is_stopped_here(tid: u32) -> bool {
    let mut word = 0usize;
    // SAFETY: the kernel writes one word.
    let asked = unsafe { ptrace(p::PTRACE_GETEVENTMSG, tid, 0, (&raw mut word) as usize) };
    asked != Err(Errno::SRCH)
}

/// For what a thread has stopped that the calling one traces. `None` where it is not stopped, or
/// not traced by this one.
pub fn stop_of(tid: u32) -> Option<TraceeStop> {
    /// Words of a `siginfo`: the signal, and its code, which has the event.
    const SIGNAL: usize = 0;
    const CODE: usize = 2;
    let mut info = [0i32; 32];
    // SAFETY: the kernel writes a siginfo of 128 bytes.
    unsafe { ptrace(p::PTRACE_GETSIGINFO, tid, 0, info.as_mut_ptr() as usize) }.ok()?;
    let event = if info[CODE] > 0 { info[CODE] as u32 >> 8 } else { 0 };
    Some(TraceeStop::of(event << 16 | (info[SIGNAL] as u32) << 8 | 0x7f))
}

/// True for a thread that has not ended, or was not waited for.
fn is_there(tid: u32) -> bool {
    // SAFETY: no signal is sent.
    unsafe { syscall!(k::__NR_tkill, tid as usize, 0usize) != Err(Errno::SRCH) }
}

fn number_of_status(tid: u32, key: &str) -> Result<Option<u64>, Errno> {
    let mut text = [0u8; 4096];
    let status = read_file(ProcPath::proc(tid, "status").as_c_str(), &mut text)?;
    Ok(number_field(status, key))
}

/// Waits for the next stop of a thread that the calling one traces; its status as wait(2) gives it.
/// The end of a process is left for its parent's wait.
///
/// # Errors
/// `SRCH` when it has ended or is traced no more, `TIMEDOUT` when it does not stop.
fn wait(tid: u32) -> Result<u32, Errno> {
    /// `CLD_EXITED`, `CLD_KILLED` and `CLD_DUMPED`.
    const ENDS: core::ops::RangeInclusive<i32> = 1..=3;
    const P_PID: usize = 1;
    /// Words of a `siginfo`: its code, the process and the status.
    const CODE: usize = 2;
    const PROCESS: usize = 4;
    const STATUS: usize = 6;
    let change = |options: usize| {
        let (mut info, options) = ([0i32; 32], options | WNOHANG | WALL);
        let to = info.as_mut_ptr() as usize;
        // SAFETY: the kernel writes a siginfo of 128 bytes.
        match unsafe { syscall!(k::__NR_waitid, P_PID, tid as usize, to, options, 0usize) } {
            // Neither a child nor traced.
            Err(Errno::CHILD) => Err(Errno::SRCH),
            Err(Errno::INTR) => Ok(None),
            other => other.map(|_| Some(info).filter(|info| info[PROCESS] != 0)),
        }
    };
    let began = now();
    loop {
        match change(WEXITED | WSTOPPED | WNOWAIT)? {
            Some(info) if ENDS.contains(&info[CODE]) => return Err(Errno::SRCH),
            // A thread that another one traces has executed a program, and has this number now: its
            // stop is for that one. Only the calling one asks for stops at calls.
            Some(info) if info[STATUS] as u32 != CALL_STOP >> 8 && !is_stopped_here(tid) => {
                return Err(Errno::SRCH);
            }
            // It may have been killed in between: then there is no stop.
            Some(_) => {
                if let Some(info) = change(WSTOPPED)? {
                    return Ok((info[STATUS] as u32) << 8 | 0x7f);
                }
                continue;
            }
            None => {}
        }
        let waited = now().since(began);
        // A first thread that has ended is told of when all others have, which may wait for this.
        let is_gone = || crate::process::proc_info(tid).is_none_or(|info| info.zombie);
        if waited > DOUBT_TIME && (!is_traced_here(tid) || is_gone()) {
            return Err(Errno::SRCH);
        }
        if waited > STOP_TIMEOUT {
            return Err(Errno::TIMEDOUT);
        }
        if waited < SPIN_TIME {
            yield_now();
        } else {
            sleep(WAIT_INTERVAL);
        }
    }
}

/// Lets a thread continue until it stops by the interruption that was asked for. Signals that
/// arrive before are passed on.
fn wait_for_stop(tid: u32) -> Result<TraceeStop, Errno> {
    loop {
        let stop = TraceeStop::of(wait(tid)?);
        let signal = match stop {
            TraceeStop::Still | TraceeStop::Stopped => return Ok(stop),
            TraceeStop::Signal(signal) => signal,
            _ => 0,
        };
        // SAFETY: nothing is written.
        unsafe { ptrace(p::PTRACE_CONT, tid, 0, signal as usize) }?;
    }
}

fn registers_of(tid: u32) -> Result<Registers, Errno> {
    let mut registers: Registers = [0; 27];
    // SAFETY: the kernel writes as many words as there are.
    unsafe { ptrace(p::PTRACE_GETREGS, tid, 0, registers.as_mut_ptr() as usize) }?;
    Ok(registers)
}

/// Registers of a stop that interrupted a call: one of [`WAITS`] begins again. True if that changed
/// them.
fn begin_again(registers: &mut Registers) -> bool {
    let is_wait = WAITS.iter().any(|number| u64::from(*number) == registers[ORIG_RAX]);
    let is_over = registers[RAX] as i64 != INTERRUPTED;
    if !is_wait || is_over {
        return false;
    }
    registers[RAX] = AGAIN_WITHOUT_HANDLER as u64;
    true
}

fn set_registers(tid: u32, registers: &Registers) -> Result<(), Errno> {
    // SAFETY: the kernel reads as many words as there are.
    unsafe { ptrace(p::PTRACE_SETREGS, tid, 0, registers.as_ptr() as usize) }.map(drop)
}

fn set_mask(tid: u32, mask: u64) -> Result<(), Errno> {
    // SAFETY: the kernel reads the eight bytes of a signal mask.
    unsafe { ptrace(PTRACE_SETSIGMASK, tid, 8, (&raw const mask) as usize) }.map(drop)
}

/// Reads memory of another process.
///
/// # Errors
/// `FAULT` where it has none there, `PERM` where that is not permitted.
fn read_memory(pid: u32, at: u64, to: &mut [u8]) -> Result<(), Errno> {
    let local = [to.as_mut_ptr() as usize, to.len()];
    let remote = [at as usize, to.len()];
    let (local, remote) = ((&raw const local) as usize, (&raw const remote) as usize);
    // SAFETY: the kernel writes to `to` alone.
    let done = unsafe {
        syscall!(k::__NR_process_vm_readv, pid as usize, local, 1usize, remote, 1usize, 0usize)
    };
    let done = match done {
        Err(errno) if MAY_BE_FILTERED.contains(&errno) => {
            let memory = memory_of(pid, OFlags::RDONLY)?;
            retry(|| rustix::io::pread(&memory, &mut *to, at)).map_err(as_the_call)
        }
        done => done,
    };
    if done? == to.len() { Ok(()) } else { Err(Errno::FAULT) }
}

/// Filters of system calls refuse with these: Docker's until version 23 does so for the calls that
/// read and write another process's memory, and does not for the file.
const MAY_BE_FILTERED: [Errno; 2] = [Errno::PERM, Errno::NOSYS];

/// The memory of a process as a file.
fn memory_of(pid: u32, access: OFlags) -> Result<OwnedFd, Errno> {
    let path = ProcPath::proc(pid, "mem");
    retry(|| rustix::fs::open(path.as_c_str(), access | OFlags::CLOEXEC, Mode::empty()))
        .map_err(as_the_call)
}

/// An error of that file as the calls in whose stead it is used have it.
fn as_the_call(errno: Errno) -> Errno {
    match errno {
        Errno::IO => Errno::FAULT,
        Errno::ACCESS => Errno::PERM,
        other => other,
    }
}

/// The first `syscall` instruction of a process's vdso.
fn call_instruction(pid: u32) -> Result<u64, Errno> {
    let mut auxv = [0u8; 2048];
    let auxv = read_file(ProcPath::proc(pid, "auxv").as_c_str(), &mut auxv)?;
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    let vdso = auxv
        .chunks_exact(16)
        .find(|pair| word(&pair[..8]) == AT_SYSINFO_EHDR)
        .map(|pair| word(&pair[8..]))
        .ok_or(Errno::NOSYS)?;
    let mut code = [0u8; VDSO_BYTES];
    // One of a page alone is searched to its end.
    if read_memory(pid, vdso, &mut code).is_err() {
        read_memory(pid, vdso, &mut code[..VDSO_BYTES / 2])?;
    }
    let found = code.windows(2).position(|bytes| bytes == SYSCALL_INSTRUCTION);
    found.map(|at| vdso + at as u64).ok_or(Errno::NOSYS)
}

/// Where a thread continues that was stopped at `at`, within a restartable sequence: the kernel
/// would have sent it there after the next interruption.
fn abort_of_sequence(tid: u32, at: u64) -> Option<u64> {
    let mut configuration = RseqConfiguration::default();
    let (size, to) = (size_of::<RseqConfiguration>(), (&raw mut configuration) as usize);
    // SAFETY: the kernel writes one struct of that size.
    unsafe { ptrace(PTRACE_GET_RSEQ_CONFIGURATION, tid, size, to) }.ok()?;
    if configuration.area == 0 {
        return None;
    }
    let mut word = [0u8; 8];
    // `struct rseq`: two words of 32 bits, then the address of the sequence.
    read_memory(tid, configuration.area.checked_add(8)?, &mut word).ok()?;
    let sequence = u64::from_le_bytes(word);
    if sequence == 0 {
        return None;
    }
    let mut fields = [0u8; 32];
    read_memory(tid, sequence, &mut fields).ok()?;
    let field = |at: usize| fields[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
    let (start, bytes, abort) = (field(8), field(16), field(24));
    (at.wrapping_sub(start) < bytes).then_some(abort)
}

/// A thread of another process that the calling thread traces, and that runs.
pub struct Seized(u32);

impl Seized {
    /// Traces a thread. It continues, also if the calling thread ends.
    ///
    /// # Errors
    /// `PERM` where that is not permitted or it has another tracer, `SRCH` when it is gone.
    pub fn seize(tid: u32) -> Result<Seized, Errno> {
        // SAFETY: the request changes nothing in memory, here or there.
        unsafe { ptrace(p::PTRACE_SEIZE, tid, 0, 0) }?;
        Ok(Seized(tid))
    }

    /// The same until it executes a program: then it stops ([`TraceeStop::Executed`]), under the
    /// number of its process.
    ///
    /// # Errors
    /// As for [`Seized::seize`].
    pub fn seize_until_exec(tid: u32) -> Result<Seized, Errno> {
        // SAFETY: the request changes nothing in memory, here or there.
        unsafe { ptrace(p::PTRACE_SEIZE, tid, 0, p::PTRACE_O_TRACEEXEC as usize) }?;
        Ok(Seized(tid))
    }

    /// A thread that the calling one traces already.
    pub fn of(tid: u32) -> Seized {
        Seized(tid)
    }

    /// Has it stop soon, which a wait of the calling thread reports
    /// ([`TraceeStop::Still`]). Signals that are reported before
    /// are to be passed on ([`Seized::go_on`]).
    ///
    /// # Errors
    /// `SRCH` when it is gone.
    pub fn interrupt(&self) -> Result<(), Errno> {
        // SAFETY: nothing is written.
        unsafe { ptrace(p::PTRACE_INTERRUPT, self.0, 0, 0) }.map(drop)
    }

    /// Lets it continue, with a signal that was about to reach it.
    ///
    /// # Errors
    /// `SRCH` when it is gone.
    pub fn go_on(&self, signal: u32) -> Result<(), Errno> {
        // SAFETY: nothing is written.
        unsafe { ptrace(p::PTRACE_CONT, self.0, 0, signal as usize) }.map(drop)
    }

    /// It has stopped as [`Seized::interrupt`] had asked: saves its state.
    ///
    /// # Errors
    /// `SRCH` when it is gone, `NOSYS` where it has no vdso. It continues as before then, and is
    /// traced no more.
    pub fn stopped(&self) -> Result<Remote, Errno> {
        Remote::save(self.0).inspect_err(|_| self.release())
    }

    /// Traces it no more, if it is stopped now: it continues, or stays stopped with its process.
    pub fn release(&self) {
        self.release_with(0);
    }

    /// The same at a stop by a signal, which reaches it.
    pub fn release_with(&self, signal: u32) {
        self.begin_again();
        // SAFETY: nothing is written.
        let _ = unsafe { ptrace(p::PTRACE_DETACH, self.0, 0, signal as usize) };
    }

    fn begin_again(&self) {
        if let Ok(mut registers) = registers_of(self.0)
            && begin_again(&mut registers)
        {
            // One that is gone is told of by the wait.
            let _ = set_registers(self.0, &registers);
        }
    }
}

impl Remote {
    fn save(tid: u32) -> Result<Remote, Errno> {
        let mut saved = registers_of(tid)?;
        if !CS_OF_64_BITS.contains(&saved[CS]) {
            // It runs code of 32 bits or less, in which the instructions of calls are others.
            return Err(Errno::OPNOTSUPP);
        }
        begin_again(&mut saved);
        // The kernel forgets a sequence once the thread runs anything else.
        if let Some(abort) = abort_of_sequence(tid, saved[RIP]) {
            saved[RIP] = abort;
        }
        let mut mask = 0u64;
        // SAFETY: the kernel writes the eight bytes of a signal mask.
        unsafe { ptrace(PTRACE_GETSIGMASK, tid, 8, (&raw mut mask) as usize) }?;
        let call_at = call_instruction(tid)?;
        // SAFETY: nothing is written.
        unsafe { ptrace(p::PTRACE_SETOPTIONS, tid, 0, OPTIONS as usize) }?;
        set_mask(tid, u64::MAX)?;
        let dispatch = end_dispatch(tid);
        Ok(Remote { tid, saved, mask, call_at, is_late: Cell::new(false), dispatch })
    }

    /// The thread's number.
    pub fn tid(&self) -> u32 {
        self.tid
    }

    /// True once a stop of the thread was waited for in vain: it is inside a call that takes long.
    /// When a wait of the calling thread reports its next stop, it is to be
    /// [released](Remote::release).
    pub fn is_late(&self) -> bool {
        self.is_late.get()
    }

    /// Has the thread make a system call; its result.
    ///
    /// # Safety
    /// The caller answers for all that the call does to the program.
    ///
    /// # Errors
    /// The error of the call, `SRCH` when the thread is gone, or `TIMEDOUT`, also later, when it
    /// [is late](Remote::is_late).
    pub unsafe fn call(&self, number: u32, arguments: [u64; 6]) -> Result<u64, Errno> {
        // SAFETY: the caller's promise; the instruction is a system call.
        unsafe { self.call_at(self.call_at, number, arguments) }
    }

    /// The same by a `syscall` instruction at `at`.
    ///
    /// # Safety
    /// As for [`Remote::call`]; what is at `at` is such an instruction.
    unsafe fn call_at(&self, at: u64, number: u32, arguments: [u64; 6]) -> Result<u64, Errno> {
        let mut registers = self.saved;
        // A program that steps through itself does not step through this.
        registers[EFLAGS] &= !TRAP_FLAG;
        registers[RIP] = at;
        registers[RAX] = u64::from(number);
        registers[ORIG_RAX] = NO_CALL;
        for (place, word) in [RDI, RSI, RDX, R10, R8, R9].into_iter().zip(arguments) {
            registers[place] = word;
        }
        for _ in 0..MAX_REPEATS {
            if self.is_late() {
                return Err(Errno::TIMEDOUT);
            }
            set_registers(self.tid, &registers)?;
            // The entry, then the exit.
            for _ in 0..2 {
                self.until_call_stop()?;
            }
            let result = registers_of(self.tid)?[RAX] as isize;
            if !BEGIN_AGAIN.contains(&result) {
                return check(result).map(|word| word as u64);
            }
        }
        Err(Errno::INTR)
    }

    /// Lets the thread run to the next entry or exit of a system call.
    fn until_call_stop(&self) -> Result<(), Errno> {
        let mut signal = 0;
        loop {
            // SAFETY: nothing is written.
            unsafe { ptrace(p::PTRACE_SYSCALL, self.tid, 0, signal as usize) }?;
            signal = 0;
            let status = wait(self.tid).inspect_err(|errno| self.note_wait(*errno))?;
            if status == CALL_STOP {
                return Ok(());
            }
            // One that cannot be blocked: the thread stops with its process once it is let go.
            if let TraceeStop::Signal(arrived) = TraceeStop::of(status) {
                signal = arrived;
            }
        }
    }

    fn note_wait(&self, errno: Errno) {
        self.is_late.set(errno == Errno::TIMEDOUT);
    }

    /// True if the thread is the only one of its process.
    pub fn is_alone(&self) -> bool {
        number_of_status(self.tid, "Threads") == Ok(Some(1))
    }

    /// Reads memory of the program.
    ///
    /// # Errors
    /// `FAULT` where there is none.
    pub fn read(&self, at: u64, to: &mut [u8]) -> Result<(), Errno> {
        read_memory(self.tid, at, to)
    }

    /// Writes memory of the program that it may write itself.
    ///
    /// # Safety
    /// The memory is the caller's to change, and the program may write it.
    ///
    /// # Errors
    /// `FAULT` where there is none.
    pub unsafe fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        let local = [bytes.as_ptr() as usize, bytes.len()];
        let remote = [at as usize, bytes.len()];
        let (local, remote) = ((&raw const local) as usize, (&raw const remote) as usize);
        let tid = self.tid as usize;
        // SAFETY: the kernel reads `bytes`; what it writes there is the caller's promise.
        let done = unsafe {
            syscall!(k::__NR_process_vm_writev, tid, local, 1usize, remote, 1usize, 0usize)
        };
        let done = match done {
            Err(errno) if MAY_BE_FILTERED.contains(&errno) => {
                let memory = memory_of(self.tid, OFlags::WRONLY)?;
                retry(|| rustix::io::pwrite(&memory, bytes, at)).map_err(as_the_call)
            }
            done => done,
        };
        if done? == bytes.len() { Ok(()) } else { Err(Errno::FAULT) }
    }

    /// Starts a thread of the program, with its stack at `stack` and the thread pointer `tls`. It
    /// begins behind the `syscall` instruction at `code`, with 0 in RAX, as after fork(2), and
    /// other registers and flags as they were in this thread. All signals are blocked in it. Its
    /// root and working directory are its own from then on.
    ///
    /// # Safety
    /// What is behind that instruction may run so, and never returns.
    ///
    /// # Errors
    /// As for [`Remote::call`].
    pub unsafe fn start_thread(&self, code: u64, stack: u64, tls: u64) -> Result<(), Errno> {
        let flags = k::CLONE_VM
            | k::CLONE_FILES
            | k::CLONE_SIGHAND
            | k::CLONE_THREAD
            | k::CLONE_SYSVSEM
            | k::CLONE_SETTLS;
        // SAFETY: the new thread begins at what the caller vouches for; it shares all else. This
        // thread stops at the call's exit and is given other registers.
        unsafe { self.call_at(code, k::__NR_clone, [flags.into(), stack, 0, 0, tls, 0]) }.map(drop)
    }

    /// Puts the thread's state back, and lets it go.
    ///
    /// # Errors
    /// `SRCH` when it is gone; `TIMEDOUT` when it [is late](Remote::is_late): to be repeated.
    pub fn release(&self) -> Result<(), Errno> {
        let Remote { tid, mask, saved, dispatch, .. } = self;
        // Asked before it is interrupted: one that stops by that may not continue from there.
        let stopped = if self.is_late() { registers_of(*tid).map(Some) } else { Ok(None) };
        // To a stop at which a call that was interrupted begins again (fact 1).
        // SAFETY: nothing is written.
        unsafe { ptrace(p::PTRACE_INTERRUPT, *tid, 0, 0) }?;
        match stopped {
            Ok(None) => {}
            // This may be before the call, which is not to be made any more.
            Ok(Some(mut registers)) => {
                registers[ORIG_RAX] = NO_CALL;
                set_registers(*tid, &registers)?;
            }
            // It runs, and will stop.
            Err(_) => return Err(Errno::TIMEDOUT),
        }
        // SAFETY: as above.
        unsafe { ptrace(p::PTRACE_CONT, *tid, 0, 0) }?;
        wait_for_stop(*tid).inspect_err(|errno| self.note_wait(*errno))?;
        if let Some(config) = dispatch {
            put_dispatch_back(*tid, config);
        }
        set_registers(*tid, saved)?;
        set_mask(*tid, *mask)?;
        self.is_late.set(false);
        // SAFETY: nothing is written.
        unsafe { ptrace(p::PTRACE_DETACH, *tid, 0, 0) }.map(drop)
    }
}
