//! Other processes and this one, from outside: resident size, parents and children, signals by
//! descriptor.
//!
//! The sizes are read without allocating, so the engine may ask at any time. Walking the process
//! tree allocates and is for supervisors.

use alloc::vec::Vec;
use core::ffi::CStr;
use core::mem::MaybeUninit;
use core::time::Duration;

use linux_raw_sys::general as k;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::fs::RawDir;
use rustix::io::Errno;

use crate::page::PAGE_SIZE;
use crate::procfs::{self, ProcPath, parse_u64};
use crate::raw::syscall;

/// What follows the command name in a `stat` file. The name is in parentheses and may itself
/// contain any byte, so the last parenthesis counts.
pub(crate) fn after_name(stat: &[u8]) -> Option<&[u8]> {
    Some(&stat[stat.iter().rposition(|&b| b == b')')? + 1..])
}

/// Resident private anonymous memory of a process in bytes (resident less file-backed and shared);
/// `None` when it is gone. The kernel's own counters, which run a few pages late per CPU.
pub fn anon_rss(pid: u32) -> Option<u64> {
    let mut buf = [0; 160];
    parse_statm(procfs::read_file(ProcPath::proc(pid, "statm").as_c_str(), &mut buf).ok()?)
}

/// Bytes of private anonymous memory out of a `statm` file: `size resident shared ...`, in pages.
pub fn parse_statm(text: &[u8]) -> Option<u64> {
    let mut words = procfs::words(text).skip(1);
    let (resident, shared) = (parse_u64(words.next()?)?, parse_u64(words.next()?)?);
    Some(resident.saturating_sub(shared).saturating_mul(PAGE_SIZE as u64))
}

/// An open `statm`, for repeated reads. It belongs to the process it was opened for: a forked child
/// opens its own.
#[derive(Debug)]
pub struct StatmFd(OwnedFd);

impl StatmFd {
    /// This process's.
    pub fn open_self() -> Result<StatmFd, Errno> {
        procfs::open_own(c"/proc/thread-self/statm", c"statm").map(StatmFd)
    }

    /// Another process's.
    pub fn open(pid: u32) -> Result<StatmFd, Errno> {
        procfs::open_read(ProcPath::proc(pid, "statm").as_c_str()).map(StatmFd)
    }

    /// As [`anon_rss`]; `None` when the process is gone.
    pub fn anon_rss(&self) -> Option<u64> {
        let mut buf = [0; 160];
        let n = procfs::retry(|| rustix::io::pread(self.0.as_fd(), &mut buf, 0)).ok()?;
        parse_statm(&buf[..n])
    }
}

/// Proportional share of a process's anonymous memory in bytes: pages shared after a fork are
/// divided among their users. Walks the page tables; not for every tick.
pub fn pss_anon(pid: u32) -> Option<u64> {
    let mut buf = [0; 2048];
    let text = procfs::read_file(ProcPath::proc(pid, "smaps_rollup").as_c_str(), &mut buf).ok()?;
    procfs::kib_field(text, "Pss_Anon")
}

/// The same of shared memory (tmpfs, memory files, anonymous shared mappings) that a process has
/// mapped.
pub fn pss_shmem(pid: u32) -> Option<u64> {
    let mut buf = [0; 2048];
    let text = procfs::read_file(ProcPath::proc(pid, "smaps_rollup").as_c_str(), &mut buf).ok()?;
    procfs::kib_field(text, "Pss_Shmem")
}

/// Shared memory that a process has mapped, resident, in bytes: pages that others have mapped too
/// count in full.
pub fn rss_shmem(pid: u32) -> Option<u64> {
    let mut buf = [0; 4096];
    let text = procfs::read_file(ProcPath::proc(pid, "status").as_c_str(), &mut buf).ok()?;
    procfs::kib_field(text, "RssShmem")
}

/// Major and minor number of the running kernel; `None` if its name has none.
pub fn kernel_version() -> Option<(u32, u32)> {
    version_of(rustix::system::uname().release().to_bytes())
}

fn version_of(release: &[u8]) -> Option<(u32, u32)> {
    let number = |digits: &[u8]| procfs::parse_u64(digits)?.try_into().ok();
    let mut numbers = release.split(|byte| !byte.is_ascii_digit()).map(number);
    Some((numbers.next()??, numbers.next()??))
}

/// Memory the kernel could still give out, in bytes.
pub fn mem_available() -> Option<u64> {
    let mut buf = [0; 2048];
    procfs::kib_field(procfs::read_file(c"/proc/meminfo", &mut buf).ok()?, "MemAvailable")
}

/// All memory of the machine, in bytes.
pub fn mem_total() -> Option<u64> {
    let mut buf = [0; 2048];
    procfs::kib_field(procfs::read_file(c"/proc/meminfo", &mut buf).ok()?, "MemTotal")
}

/// A process as a supervisor sees it. Pid and start time together name it for ever; the pid alone
/// may come to mean another.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ProcInfo {
    /// Number of the process, in this process's pid namespace.
    pub pid: u32,
    /// Number of its parent.
    pub ppid: u32,
    /// Clock ticks between boot and its start.
    pub start_time: u64,
    /// Dead, and waiting for its parent to look.
    pub zombie: bool,
    /// Stopped, by a signal or a debugger.
    pub stopped: bool,
    /// It has executed a program since it was forked.
    pub has_executed: bool,
    /// Start of its stack: the same in processes that were forked from each other and did not
    /// execute a program, another one after that. 0 where this process may not know it.
    pub stack_start: u64,
}

/// Looks one process up; `None` when it is gone.
pub fn proc_info(pid: u32) -> Option<ProcInfo> {
    let mut buf = [0; 1024];
    parse_stat(pid, procfs::read_file(ProcPath::proc(pid, "stat").as_c_str(), &mut buf).ok()?)
}

/// True for a thread, of any process, that runs, waits for a CPU, or waits within the kernel for
/// what no signal ends, as in a fault; but not for one whose name begins with `except`.
pub fn is_running(tid: u32, except: &[u8]) -> bool {
    let mut buf = [0; 1024];
    let stat = procfs::read_file(ProcPath::proc(tid, "stat").as_c_str(), &mut buf);
    stat.is_ok_and(|stat| {
        let name = stat.iter().position(|byte| *byte == b'(').map_or(&[][..], |at| &stat[at + 1..]);
        let state = after_name(stat).and_then(|rest| procfs::words(rest).next());
        matches!(state, Some(b"R" | b"D")) && !name.starts_with(except)
    })
}

/// The number of the newest process by the text of `/proc/loadavg`: while it stays, none was
/// started.
pub(crate) fn newest_in(loadavg: &[u8]) -> Option<u32> {
    procfs::words(loadavg).last().and_then(parse_u64)?.try_into().ok()
}

/// Parses the `stat` file of process `pid`.
pub fn parse_stat(pid: u32, stat: &[u8]) -> Option<ProcInfo> {
    let mut words = procfs::words(after_name(stat)?);
    /// `PF_FORKNOEXEC` of the kernel.
    const NOT_EXECUTED: u64 = 0x40;
    // Fields counted from 1: 3 is the state, 4 the parent, 9 the flags, 22 the start time, 28 the
    // start of the stack.
    let state = words.next()?;
    let (zombie, stopped) = (matches!(state, b"Z" | b"X"), matches!(state, b"T" | b"t"));
    let ppid = parse_u64(words.next()?)? as u32;
    let flags = parse_u64(words.nth(9 - 5)?)?;
    let start_time = parse_u64(words.nth(22 - 10)?)?;
    let stack_start = words.nth(28 - 23).and_then(parse_u64).unwrap_or(0);
    let has_executed = flags & NOT_EXECUTED == 0;
    Some(ProcInfo { pid, ppid, start_time, zombie, stopped, has_executed, stack_start })
}

/// True where a thread's `stat` file says that the kernel made it to work for the process: it runs
/// none of the program's code. False where the text does not tell.
pub(crate) fn is_kernel_worker(stat: &[u8]) -> bool {
    /// `PF_IO_WORKER` (Linux 5.12) and `PF_USER_WORKER` (6.4) of the kernel.
    const WORKERS: u64 = 0x10 | 0x4000;
    // Fields counted from 1: 3 is the first one after the name, 9 the flags.
    let flags = after_name(stat).and_then(|rest| procfs::words(rest).nth(9 - 3));
    flags.and_then(parse_u64).is_some_and(|flags| flags & WORKERS != 0)
}

/// An open `stat`, for repeated reads; of the process it was opened for.
#[derive(Debug)]
pub struct StatFd(OwnedFd);

impl StatFd {
    /// Opens that of a process.
    ///
    /// # Errors
    /// When it is gone or may not be read.
    pub fn open(pid: u32) -> Result<StatFd, Errno> {
        Ok(StatFd(procfs::open_read(ProcPath::proc(pid, "stat").as_c_str())?))
    }

    /// Faults that took no reading: pages of zeros, copies of pages that a fork left shared, and
    /// some of those that a userfaultfd answered (a thread's own, where the kernel locks mappings
    /// one by one; not those of its system calls). `None` when the process is gone.
    pub fn minor_faults(&self) -> Option<u64> {
        let mut buf = [0; 1024];
        let n = procfs::retry(|| rustix::io::pread(self.0.as_fd(), &mut buf, 0)).ok()?;
        parse_minor_faults(&buf[..n])
    }
}

/// The same out of a `stat` file.
fn parse_minor_faults(stat: &[u8]) -> Option<u64> {
    // Field 10, counted from 1; the one after the name is 3.
    parse_u64(procfs::words(after_name(stat)?).nth(10 - 3)?)
}

/// What the first thread of this process ended with, as `wait` would give it; `None` while it
/// lives.
pub fn leader_end() -> Option<u32> {
    let mut buf = [0; 1024];
    let stat = procfs::read_file(c"/proc/self/stat", &mut buf).ok()?;
    let mut words = procfs::words(after_name(stat)?);
    // Fields counted from 1: 3 is the state, 52 the exit code.
    if words.next()? != b"Z" {
        return None;
    }
    Some(parse_u64(words.nth(52 - 4)?)? as u32)
}

/// When a process started, in clock ticks since boot.
pub fn start_time(pid: u32) -> Option<u64> {
    proc_info(pid).map(|info| info.start_time)
}

/// All processes that this one can see, in the order of the listing.
pub fn processes() -> Result<Vec<ProcInfo>, Errno> {
    let mut all = Vec::new();
    for_each_number(c"/proc", |pid| all.extend(proc_info(pid)))?;
    Ok(all)
}

/// Calls `f` for the processes in a directory of /proc, or for the threads in one of a process.
fn for_each_number(directory: &CStr, mut f: impl FnMut(u32)) -> Result<(), Errno> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(directory, flags, Mode::empty())?;
    let mut buf = [MaybeUninit::uninit(); 4096];
    let mut entries = RawDir::new(dir, &mut buf);
    while let Some(entry) = entries.next() {
        if let Some(pid) = parse_u64(entry?.file_name().to_bytes()) {
            f(pid as u32);
        }
    }
    Ok(())
}

/// Bytes that this process has locked in memory; `None` where `/proc` does not tell.
pub fn locked_bytes() -> Option<u64> {
    let mut buf = [0u8; 4096];
    procfs::kib_field(procfs::read_file(c"/proc/self/status", &mut buf).ok()?, "VmLck")
}

/// A descriptor that stands for a process and polls readable when it ends.
pub fn pidfd_open(pid: u32) -> Result<OwnedFd, Errno> {
    // SAFETY: the call only makes a descriptor.
    let fd = unsafe { syscall!(k::__NR_pidfd_open, pid, 0usize) }?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A descriptor that stands for one thread and polls readable when it ends; `EINVAL` before Linux
/// 6.9.
pub fn pidfd_open_thread(tid: u32) -> Result<OwnedFd, Errno> {
    // SAFETY: the call only makes a descriptor.
    let fd = unsafe { syscall!(k::__NR_pidfd_open, tid, k::O_EXCL) }?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A copy of descriptor number `fd` of the task behind a descriptor, for this thread's table. Needs
/// no privilege within one process.
pub fn pidfd_getfd(pidfd: BorrowedFd<'_>, fd: i32) -> Result<OwnedFd, Errno> {
    // SAFETY: the call only makes a descriptor.
    let fd = unsafe { syscall!(k::__NR_pidfd_getfd, pidfd.as_raw_fd(), fd, 0usize) }?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Sends a signal to the process behind a descriptor; signal 0 only asks whether it lives.
pub fn pidfd_send_signal(pidfd: BorrowedFd<'_>, signal: i32) -> Result<(), Errno> {
    // SAFETY: no memory is passed.
    unsafe { syscall!(k::__NR_pidfd_send_signal, pidfd.as_raw_fd(), signal, 0usize, 0usize) }
        .map(drop)
}

/// The number of this process's parent; 0 where it is in another namespace.
pub fn parent() -> u32 {
    rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get() as u32)
}

/// Makes this process the new parent of descendants whose own parent ends.
pub fn set_child_subreaper(on: bool) -> Result<(), Errno> {
    // SAFETY: no memory is passed.
    unsafe { syscall!(k::__NR_prctl, linux_raw_sys::prctl::PR_SET_CHILD_SUBREAPER, on) }.map(drop)
}

/// The number of the system call in which a thread is blocked; `None` while it runs (in user or
/// kernel mode), is gone, or may not be looked at.
fn blocked_in(path: ProcPath) -> Option<u64> {
    let mut buf = [0; 256];
    let text = crate::procfs::read_file(path.as_c_str(), &mut buf).ok()?;
    crate::procfs::parse_u64(crate::procfs::words(text).next()?)
}

/// What a thread is seen in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallOfThread {
    /// A system call that makes a process.
    Fork,
    /// Another one, or a wait outside of a system call.
    Other,
    /// It runs, or may not be looked at.
    Unknown,
    /// It has ended.
    Gone,
}

/// Looks what a thread of any process is in.
pub fn call_of(tid: u32) -> CallOfThread {
    let mut buf = [0; 256];
    let path = ProcPath::proc(tid, "syscall");
    let text = match procfs::read_file(path.as_c_str(), &mut buf) {
        Ok(text) => text,
        Err(Errno::NOENT | Errno::SRCH) => return CallOfThread::Gone,
        Err(_) => return CallOfThread::Unknown,
    };
    match procfs::words(text).next() {
        None | Some(b"running") => CallOfThread::Unknown,
        Some(word) => match parse_u64(word) {
            Some(call) if makes_a_process(call) => CallOfThread::Fork,
            _ => CallOfThread::Other,
        },
    }
}

/// The process of a thread.
pub fn process_of(tid: u32) -> Option<u32> {
    let mut buf = [0; 4096];
    let text = procfs::read_file(ProcPath::proc(tid, "status").as_c_str(), &mut buf).ok()?;
    procfs::number_field(text, "Tgid").map(|pid| pid as u32)
}

/// True while a thread of this process is blocked in a system call that makes no process: it is not
/// inside fork(2). False while it runs, or waits for a page outside of a system call.
pub fn waits_outside_fork(tid: u32) -> bool {
    blocked_in(ProcPath::task(tid, "syscall")).is_some_and(|call| !makes_a_process(call))
}

fn makes_a_process(call: u64) -> bool {
    const MAKERS: [u32; 4] = [k::__NR_fork, k::__NR_vfork, k::__NR_clone, k::__NR_clone3];
    MAKERS.iter().any(|maker| u64::from(*maker) == call)
}

/// The time unit of /proc.
const TICK: Duration = Duration::from_millis(10);

fn since_boot() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.max(0) as u32)
}

/// Clock ticks since boot, as [`ProcInfo::start_time`] has them.
pub fn ticks_since_boot() -> u64 {
    (since_boot().as_nanos() / TICK.as_nanos()) as u64
}

/// Whether a thread of this process has a child that began within the last `age`, whatever that is
/// now; `None` where the kernel does not tell of threads' children, or there are too many.
pub fn has_young_child(tid: u32, age: Duration) -> Option<bool> {
    /// Both times are rounded.
    const MARGIN: u64 = 2;
    let mut buf = [0; 4096];
    let text = procfs::read_file(ProcPath::task(tid, "children").as_c_str(), &mut buf).ok()?;
    if text.len() == 4096 {
        return None;
    }
    let ticks = since_boot().saturating_sub(age).as_nanos() / TICK.as_nanos();
    let oldest = (ticks as u64).saturating_sub(MARGIN);
    let start_of = |pid: &[u8]| Some(proc_info(parse_u64(pid)? as u32)?.start_time);
    Some(procfs::words(text).filter_map(start_of).any(|started| started >= oldest))
}

/// True if two processes run on the same memory, as between vfork and exec. Where the kernel does
/// not compare them, as in most containers, that is known of the child of a vfork alone (`b`).
pub fn same_memory(a: u32, b: u32) -> bool {
    const KCMP_VM: usize = 1;
    // SAFETY: the call only compares.
    match unsafe { syscall!(k::__NR_kcmp, a, b, KCMP_VM, 0usize, 0usize) } {
        Ok(order) => order == 0,
        Err(Errno::SRCH) => false,
        Err(_) => waits_for_vfork(a, b),
    }
}

/// True if the kernel compares processes for this one.
pub fn can_compare() -> bool {
    const KCMP_VM: usize = 1;
    let own = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: the call only compares.
    unsafe { syscall!(k::__NR_kcmp, own, own, KCMP_VM, 0usize, 0usize) }.is_ok()
}

/// True if a process waits for its child to execute a program or to end.
fn waits_for_vfork(parent: u32, child: u32) -> bool {
    let may_be = |info: ProcInfo| info.ppid == parent && !info.has_executed && !info.zombie;
    if !proc_info(child).is_some_and(may_be) {
        return false;
    }
    let mut waits = false;
    // A fork that is no vfork blocks, where it does, before its child is there.
    let _ = for_each_number(ProcPath::proc(parent, "task").as_c_str(), |thread| {
        waits |= blocked_in(ProcPath::proc(thread, "syscall")).is_some_and(makes_a_process);
    });
    waits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Mapping;
    use std::process::{Command, Stdio};

    #[test]
    fn versions_are_compared_by_their_numbers() {
        for new in ["6.17", "6.17.0-rc1", "6.18.44-fc", "7.0.1", "10.2"] {
            assert!(version_of(new.as_bytes()) >= Some((6, 17)), "{new}");
        }
        for old in ["6.8.0", "6.16.12-arch1", "5.19", "6", ""] {
            assert!(version_of(old.as_bytes()) < Some((6, 17)), "{old}");
        }
        assert!(kernel_version() > Some((2, 6)));
    }

    #[test]
    fn resident_size_follows_what_is_touched() {
        let me = std::process::id();
        let statm = StatmFd::open_self().unwrap();
        let before = statm.anon_rss().unwrap();
        let map = Mapping::reserve(64 << 20).unwrap();
        map.populate_write(0, 64 << 20).unwrap();
        let after = statm.anon_rss().unwrap();
        // Other tests run at the same time, in the same process; 16 MiB is more than they hold.
        assert!(after > before + (48 << 20), "{before} {after}");
        assert!(anon_rss(me).unwrap() > before + (32 << 20));
        assert!(pss_anon(me).unwrap() > 48 << 20);
        assert_eq!(anon_rss(u32::MAX), None);
        assert!(mem_available().unwrap() <= mem_total().unwrap());
    }

    #[test]
    fn the_kernels_workers_are_told_by_their_flags() {
        // As Linux 6.18 gives them: a worker of io_uring, and a thread of the name of one.
        let of_ring = b"9 (iou-wrk-8) S 1 8 8 0 -1 4210704 0 0 0 0 0 0 0 0 20 0 4 0 98765";
        let of_program = b"9 (iou-wrk-8) S 1 8 8 0 -1 4194368 0 0 0 0 0 0 0 0 20 0 4 0 98765";
        assert!(is_kernel_worker(of_ring));
        assert!(!is_kernel_worker(of_program));
        assert!(!is_kernel_worker(b"9 (iou"));
    }

    #[test]
    fn names_with_parentheses_do_not_mislead() {
        let info = parse_stat(
            7,
            b"7 (a) b) (c) S 3 7 7 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 98765 1000 10 5 6 7 8888",
        )
        .unwrap();
        assert_eq!(
            info,
            ProcInfo {
                pid: 7,
                ppid: 3,
                start_time: 98765,
                zombie: false,
                stopped: false,
                has_executed: true,
                stack_start: 8888,
            }
        );
        let forked = parse_stat(7, b"7 (a) S 3 7 7 0 -1 4194624 1 0 0 0 1 2 3 4 20 0 1 0 98765 9");
        assert!(forked.is_some_and(|info| !info.has_executed && info.stack_start == 0));
        assert_eq!(parse_stat(7, b"7 (short) S 3"), None);
    }

    #[test]
    fn a_process_that_waits_for_its_vforked_child_is_known_without_kcmp() {
        use std::sync::atomic::{AtomicU32, Ordering};
        static CHILD: AtomicU32 = AtomicU32::new(0);
        extern "C" fn wait_for_a_while(_: usize) {
            CHILD.store(crate::thread::getpid().0, Ordering::Release);
            crate::thread::sleep(core::time::Duration::from_secs(1));
        }
        std::thread::scope(|scope| {
            // SAFETY: two system calls.
            scope.spawn(|| unsafe { crate::thread::vfork_child(wait_for_a_while, 0) }.unwrap());
            let child = loop {
                match CHILD.load(Ordering::Acquire) {
                    0 => std::thread::yield_now(),
                    child => break child,
                }
            };
            let me = std::process::id();
            assert!(waits_for_vfork(me, child) && same_memory(me, child));
            assert!(!waits_for_vfork(me, me) && !waits_for_vfork(child, me));
        });
        let mut other = Command::new("sleep").arg("9").spawn().unwrap();
        assert!(!waits_for_vfork(std::process::id(), other.id()), "it has executed a program");
        other.kill().unwrap();
        other.wait().unwrap();
    }

    #[test]
    fn a_thread_that_sleeps_waits_outside_of_a_fork() {
        use std::sync::atomic::{AtomicU32, Ordering};
        let tid = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                tid.store(crate::thread::gettid().0, Ordering::Release);
                crate::thread::sleep(core::time::Duration::from_secs(1));
            });
            let seen = || waits_outside_fork(tid.load(Ordering::Acquire));
            let deadline = std::time::Instant::now() + core::time::Duration::from_secs(30);
            while !seen() && std::time::Instant::now() < deadline {
                std::thread::yield_now();
            }
            assert!(seen(), "it sleeps");
        });
        let (spins, over) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                spins.store(crate::thread::gettid().0, Ordering::Release);
                while over.load(Ordering::Acquire) == 0 {
                    core::hint::spin_loop();
                }
            });
            while spins.load(Ordering::Acquire) == 0 {
                std::thread::yield_now();
            }
            let waits = waits_outside_fork(spins.load(Ordering::Acquire));
            over.store(1, Ordering::Release);
            assert!(!waits, "it runs");
        });
        assert!(!waits_outside_fork(tid.load(Ordering::Acquire)), "it has ended");
    }

    #[test]
    fn a_young_child_is_known_by_the_thread_that_made_it() {
        let this = crate::thread::gettid().0;
        let start = || Command::new("sleep").arg("600").spawn().unwrap();
        assert_eq!(has_young_child(this, Duration::from_secs(60)), Some(false));
        let mut child = start();
        assert_eq!(has_young_child(this, Duration::from_secs(60)), Some(true));
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(has_young_child(this, Duration::from_millis(20)), Some(false));
        let other = std::thread::scope(|scope| scope.spawn(start).join().unwrap());
        assert_eq!(has_young_child(this, Duration::from_millis(20)), Some(false), "another's");
        for child in [&mut child, &mut { other }] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(has_young_child(u32::MAX >> 1, Duration::MAX), None, "no such thread");
    }

    #[test]
    fn a_child_is_listed_until_it_ends() {
        let me = std::process::id();
        let mut child =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let all = processes().unwrap();
        assert_eq!(all.iter().find(|p| p.pid == me).unwrap().start_time, start_time(me).unwrap());
        let found = all.iter().find(|p| p.pid == child.id()).unwrap();
        assert_eq!(found.ppid, me);
        let pidfd = pidfd_open(child.id()).unwrap();
        pidfd_send_signal(pidfd.as_fd(), 0).unwrap();
        pidfd_send_signal(pidfd.as_fd(), 9).unwrap();
        assert!(
            crate::sock::poll_readable(&[pidfd.as_fd()], Some(core::time::Duration::from_secs(90)))
                .unwrap()
                == 1
        );
        child.wait().unwrap();
        assert_eq!(pidfd_send_signal(pidfd.as_fd(), 0), Err(Errno::SRCH));
        assert!(!processes().unwrap().iter().any(|p| p.pid == child.id()));
    }
}
