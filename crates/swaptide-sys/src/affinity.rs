//! CPUs: where a thread runs, where it may run, and scheduling it behind everything else.

use core::time::Duration;

use linux_raw_sys::general as k;
use rustix::io::Errno;

use crate::procfs::{self, ProcPath, parse_u64};
use crate::raw::syscall;

/// CPUs a [`CpuSet`] can name.
const MAX_CPUS: usize = 1024;

/// A set of CPUs.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct CpuSet([u64; MAX_CPUS / 64]);

impl CpuSet {
    /// No CPU at all.
    pub const EMPTY: CpuSet = CpuSet([0; MAX_CPUS / 64]);

    /// Just this one.
    pub fn single(cpu: u32) -> CpuSet {
        let mut set = CpuSet::EMPTY;
        set.insert(cpu);
        set
    }

    /// Adds a CPU; numbers of `MAX_CPUS` and above are ignored.
    pub fn insert(&mut self, cpu: u32) {
        if let Some(word) = self.0.get_mut(cpu as usize / 64) {
            *word |= 1 << (cpu % 64);
        }
    }

    /// Takes a CPU out.
    pub fn remove(&mut self, cpu: u32) {
        if let Some(word) = self.0.get_mut(cpu as usize / 64) {
            *word &= !(1 << (cpu % 64));
        }
    }

    /// True if the CPU is in it.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.get(cpu as usize / 64).is_some_and(|word| word >> (cpu % 64) & 1 == 1)
    }

    /// Returns the number of CPUs in it.
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// The CPUs in it, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0..MAX_CPUS as u32).filter(|&cpu| self.contains(cpu))
    }
}

/// The CPU this thread runs on, or ran on a moment ago.
pub fn current_cpu() -> u32 {
    rustix::thread::sched_getcpu() as u32
}

/// Pins the calling thread to one CPU.
pub fn set_own_affinity(cpu: u32) -> Result<(), Errno> {
    clear_own_affinity(&CpuSet::single(cpu))
}

/// Lets the calling thread run on all of `mask` (again).
pub fn clear_own_affinity(mask: &CpuSet) -> Result<(), Errno> {
    set_affinity(0, mask)
}

/// Lets a thread of this process run on all of `mask` and nowhere else. `ESRCH` when there is none
/// of that id.
pub fn set_affinity(tid: u32, mask: &CpuSet) -> Result<(), Errno> {
    // SAFETY: the kernel reads the set; 0 names the calling thread.
    unsafe {
        syscall!(
            k::__NR_sched_setaffinity,
            tid as usize,
            size_of::<CpuSet>(),
            mask.0.as_ptr() as usize
        )
    }
    .map(drop)
}

/// Returns the CPUs that the calling thread may run on.
pub fn own_affinity() -> Result<CpuSet, Errno> {
    let mut set = CpuSet::EMPTY;
    // SAFETY: the kernel writes at most the size it is told; the rest stays zero.
    unsafe {
        syscall!(
            k::__NR_sched_getaffinity,
            0usize,
            size_of::<CpuSet>(),
            set.0.as_mut_ptr() as usize
        )
    }?;
    Ok(set)
}

/// With `on`, the calling thread runs only when a CPU has nothing else to do; without, normally.
/// Coming back needs no privilege since 2.6.39 if the thread's nice value allows it.
pub fn sched_idle(on: bool) -> Result<(), Errno> {
    set_class(0, if on { SCHED_IDLE } else { SCHED_OTHER })
}

/// A thread of this process runs normally from now on. `ESRCH` when there is none of that id.
pub fn sched_normal(tid: u32) -> Result<(), Errno> {
    set_class(tid, SCHED_OTHER)
}

const SCHED_OTHER: u32 = 0;
const SCHED_IDLE: u32 = 5;

fn set_class(tid: u32, policy: u32) -> Result<(), Errno> {
    let param: i32 = 0;
    // SAFETY: the kernel reads one int, the priority, which is 0 for both policies; a thread of 0
    // is the calling one.
    unsafe {
        syscall!(k::__NR_sched_setscheduler, tid as usize, policy, (&raw const param) as usize)
    }
    .map(drop)
}

/// A thread of this process, to be asked again and again where it runs.
pub struct ThreadStat(crate::OwnedFd);

impl ThreadStat {
    /// A thread by its id; `None` when there is no such thread.
    pub fn open(tid: u32) -> Option<ThreadStat> {
        procfs::open_read(ProcPath::task(tid, "stat").as_c_str()).ok().map(ThreadStat)
    }

    /// The CPU on which the thread last ran; `None` when it is gone.
    pub fn cpu(&self) -> Option<u32> {
        let mut buf = [0; 1024];
        let n = procfs::retry(|| rustix::io::pread(&self.0, &mut buf, 0)).ok()?;
        // Field 39, counted from 1; the words behind the name start with field 3.
        let cpu = procfs::words(crate::process::after_name(&buf[..n])?).nth(39 - 3)?;
        Some(parse_u64(cpu)? as u32)
    }
}

/// The CPU times of a thread, in nanoseconds since it began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuTimes {
    /// Time in which it ran.
    pub ran: u64,
    /// It could have run and waited for a CPU.
    pub waited: u64,
}

/// A thread of this process, to be asked again and again how long it ran and waited.
pub struct ThreadTimes(crate::OwnedFd);

impl ThreadTimes {
    /// A thread by its id; `None` when there is no such thread, or the kernel does not count this
    /// (`CONFIG_SCHED_INFO`).
    pub fn open(tid: u32) -> Option<ThreadTimes> {
        procfs::open_read(ProcPath::task(tid, "schedstat").as_c_str()).ok().map(ThreadTimes)
    }

    /// Its times; those of a thread that runs at this moment may lag behind. `None` when it is
    /// gone, or the kernel does not count.
    pub fn read(&self) -> Option<CpuTimes> {
        let mut buf = [0; 96];
        let n = procfs::retry(|| rustix::io::pread(&self.0, &mut buf, 0)).ok()?;
        let mut words = procfs::words(&buf[..n]);
        let times = CpuTimes { ran: parse_u64(words.next()?)?, waited: parse_u64(words.next()?)? };
        (times.ran > 0).then_some(times)
    }
}

/// For threads that look or answer for a moment, and must do it in time: the calling one, which
/// runs normally, runs before others that share its CPU (nice -10, where that is permitted) and
/// begins as soon as it wakes (a short slice, where the kernel has those, since 6.12). Without
/// either it is a thread like others. True if the first was permitted.
pub fn go_first() -> bool {
    let is_permitted = set_own_nice(-10).is_ok();
    let _ = set_own_slice(Duration::from_micros(100));
    is_permitted
}

/// The opposite of [`go_first`]: for a thread that inherited it.
pub fn go_normally() {
    let _ = set_own_nice(0);
    // The kernel's own choice.
    let _ = set_own_slice(Duration::ZERO);
}

/// For threads that work for long while others ask and answer: a thread that wakes on the caller's
/// CPU begins at once (the caller has a long slice, where the kernel has those). Otherwise, since
/// 6.12, it waits until the caller has had the CPU for a millisecond or so.
pub fn take_long_slice() {
    let _ = set_own_slice(LONG_SLICE);
}

/// Longer than what the kernel chooses for any number of CPUs (2.8 ms).
const LONG_SLICE: Duration = Duration::from_millis(5);

/// Lets the calling thread run before others of its process and user (a lower `nice` value). Needs
/// a privilege; without it nothing changes, and that is an error the caller may ignore.
fn set_own_nice(nice: i32) -> Result<(), Errno> {
    rustix::process::setpriority_process(None, nice)
}

/// The first fields of `struct sched_attr` (include/uapi/linux/sched/types.h, as of version 0).
#[repr(C)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}
const _: () = assert!(size_of::<SchedAttr>() == 48);

/// Lets the calling thread, if it runs normally (and not as a real-time thread, say, like the one
/// that made it), begin soon after it wakes, and run for a short while at a time (100 us to 100
/// ms): it does not wait until others have used their share. 0: as all threads. Since 6.12; before,
/// nothing changes. Needs no privilege.
fn set_own_slice(slice: Duration) -> Result<(), Errno> {
    // SAFETY: no memory is involved.
    if unsafe { syscall!(k::__NR_sched_getscheduler, 0usize) }? != SCHED_OTHER as usize {
        return Ok(());
    }
    let attr = SchedAttr {
        size: size_of::<SchedAttr>() as u32,
        policy: SCHED_OTHER,
        flags: 0,
        nice: own_nice(),
        priority: 0,
        runtime: slice.as_nanos() as u64,
        deadline: 0,
        period: 0,
    };
    // SAFETY: the kernel reads as many bytes as the first field says, which is the size of the
    // struct.
    unsafe { syscall!(k::__NR_sched_setattr, 0usize, (&raw const attr) as usize, 0usize) }.map(drop)
}

/// The calling thread's nice value; 0 when it cannot be read.
pub fn own_nice() -> i32 {
    rustix::process::getpriority_process(None).unwrap_or(0)
}

/// Returns the number of CPUs online, at least 1.
pub fn cpus_online() -> u32 {
    let mut buf = [0; 1024];
    procfs::read_file(c"/sys/devices/system/cpu/online", &mut buf)
        .ok()
        .and_then(|list| parse_cpu_list(list.trim_ascii_end()))
        .or_else(|| own_affinity().ok())
        .map_or(1, |set| set.count().max(1))
}

/// `0-3,8,10-11`
fn parse_cpu_list(list: &[u8]) -> Option<CpuSet> {
    let mut set = CpuSet::EMPTY;
    for part in list.split(|&b| b == b',') {
        let mut ends = part.splitn(2, |&b| b == b'-');
        let first = parse_u64(ends.next()?)?;
        let last = ends.next().map_or(Some(first), parse_u64)?;
        (first..=last.min(MAX_CPUS as u64 - 1)).for_each(|cpu| set.insert(cpu as u32));
    }
    Some(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        let set = parse_cpu_list(b"0-3,8,10-11").unwrap();
        assert_eq!(set.iter().collect::<std::vec::Vec<_>>(), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(set.count(), 7);
        assert!(parse_cpu_list(b"x").is_none() && parse_cpu_list(b"").is_none());
        assert!(!CpuSet::single(5000).contains(5000), "what does not fit is ignored");
    }

    #[test]
    fn a_thread_can_be_pinned_and_set_free() {
        std::thread::spawn(|| {
            let all = own_affinity().unwrap();
            let cpu = all.iter().last().unwrap();
            set_own_affinity(cpu).unwrap();
            assert_eq!(own_affinity().unwrap(), CpuSet::single(cpu));
            assert_eq!(current_cpu(), cpu);
            assert_eq!(
                ThreadStat::open(crate::thread::gettid().0).and_then(|stat| stat.cpu()),
                Some(cpu)
            );
            clear_own_affinity(&all).unwrap();
            assert_eq!(own_affinity().unwrap(), all);
            sched_idle(true).unwrap();
        })
        .join()
        .unwrap();
        assert!(cpus_online() >= 1);
        assert!(ThreadStat::open(u32::MAX).is_none());
    }

    /// The slice of the calling thread in nanoseconds; 0 where the kernel has none to tell.
    fn own_slice() -> u64 {
        let mut attr = SchedAttr {
            size: 0,
            policy: 0,
            flags: 0,
            nice: 0,
            priority: 0,
            runtime: 0,
            deadline: 0,
            period: 0,
        };
        let size = size_of::<SchedAttr>();
        // SAFETY: the kernel writes at most `size` bytes, which is the size of the struct.
        unsafe { syscall!(k::__NR_sched_getattr, 0usize, (&raw mut attr) as usize, size, 0usize) }
            .unwrap();
        attr.runtime
    }

    #[test]
    fn a_boosted_thread_has_a_short_slice_that_children_can_reset() {
        std::thread::spawn(|| {
            let usual = own_slice();
            go_first();
            if usual == 0 {
                // Before 6.12 there are no slices.
                assert_eq!(own_slice(), 0);
                return;
            }
            assert_eq!(own_slice(), 100_000);
            std::thread::spawn(move || {
                assert_eq!(own_slice(), 100_000, "it is inherited");
                go_normally();
                assert_eq!((own_slice(), own_nice()), (usual, 0));
            })
            .join()
            .unwrap();
            // A thread of another class stays there.
            sched_idle(true).unwrap();
            go_first();
            // SAFETY: no memory is involved.
            let class = unsafe { syscall!(k::__NR_sched_getscheduler, 0usize) }.unwrap();
            assert_eq!(class, SCHED_IDLE as usize);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn two_threads_of_one_cpu_wait_for_each_other() {
        let cpu = own_affinity().unwrap().iter().next().unwrap();
        let busy = move || {
            set_own_affinity(cpu).unwrap();
            let own = ThreadTimes::open(crate::thread::gettid().0)?;
            let begin = std::time::Instant::now();
            while begin.elapsed() < std::time::Duration::from_millis(150) {}
            own.read()
        };
        let threads = [std::thread::spawn(busy), std::thread::spawn(busy)];
        for times in threads.map(|thread| thread.join().unwrap()) {
            // Without CONFIG_SCHED_INFO there is nothing to read.
            let Some(times) = times else {
                assert!(!std::path::Path::new("/proc/self/schedstat").exists());
                return;
            };
            assert!(times.ran > 10_000_000 && times.waited > 10_000_000, "{times:?}");
        }
        assert!(ThreadTimes::open(u32::MAX).is_none());
    }
}
