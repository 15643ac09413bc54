//! System calls that change mappings, in which threads of this process are blocked.
//!
//! A thread whose change a userfaultfd reports is blocked in the call that made it until the report
//! was read. `/proc` shows the call's arguments.
//!
//! Owns nothing. Locks: none; nothing is allocated.

use linux_raw_sys::general as k;
use rustix::io::Errno;

use crate::engine_threads::{find_program_thread, first_thread};
use crate::ids::Tid;
use crate::page::{VirtAddr, VirtRange};
use crate::process::leader_end;
use crate::procfs::{ProcPath, parse_hex, parse_u64, read_file, words};

/// What a call that gives up everything from an address on is taken to reach.
const REACH: usize = 1 << 40;
/// Above all addresses of programs.
const TOP: usize = 1 << 57;
const EMPTY: VirtRange = VirtRange { start: VirtAddr(0), end: VirtAddr(0) };

/// A call that takes mappings away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MappingCall {
    /// What is given up or moved from there; the end may be too high.
    pub source: VirtRange,
    /// What is replaced.
    pub target: VirtRange,
    /// It moves the source.
    pub is_move: bool,
}

/// What a thread is seen in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SeenThread {
    /// It runs.
    Runs,
    /// It may not be looked at, or there is no descriptor to do so.
    Unseen,
    /// It is blocked in such a call.
    Blocked(MappingCall),
    /// It is blocked elsewhere, or has ended.
    Elsewhere,
}

/// Looks at each thread of the program.
///
/// # Errors
/// When they cannot be listed.
pub fn for_each_thread(mut f: impl FnMut(Tid, SeenThread)) -> Result<(), Errno> {
    find_program_thread(|tid| {
        f(tid, look_at(tid));
        None::<()>
    })?;
    if leader_end().is_none() {
        f(first_thread(), look_at(first_thread()));
    }
    Ok(())
}

fn look_at(tid: Tid) -> SeenThread {
    let mut buf = [0; 256];
    match read_file(ProcPath::task(tid.0, "syscall").as_c_str(), &mut buf) {
        Ok(text) => parse(text),
        Err(Errno::NOENT | Errno::SRCH) => SeenThread::Elsewhere,
        Err(_) => SeenThread::Unseen,
    }
}

/// The kernel's line: the call's number in decimal, its six arguments in hexadecimal.
fn parse(text: &[u8]) -> SeenThread {
    let mut words = words(text);
    let Some(first) = words.next().filter(|word| *word != b"running") else {
        return SeenThread::Runs;
    };
    let Some(number) = parse_u64(first) else { return SeenThread::Elsewhere };
    let mut arguments = [0usize; 6];
    for (argument, word) in arguments.iter_mut().zip(words) {
        let digits = word.strip_prefix(b"0x").unwrap_or(word);
        *argument = parse_hex(digits).unwrap_or(0) as usize;
    }
    call(number as u32, arguments).map_or(SeenThread::Elsewhere, SeenThread::Blocked)
}

fn call(number: u32, [a, b, c, d, e, _]: [usize; 6]) -> Option<MappingCall> {
    let range = |start: usize, len: usize| {
        let start = VirtAddr(start).page_down();
        VirtRange::new(start, VirtAddr(start.0.saturating_add(len).min(TOP)).page_up())
    };
    let taken = |source| Some(MappingCall { source, target: EMPTY, is_move: false });
    match number {
        k::__NR_munmap => taken(range(a, b)),
        k::__NR_mmap if d & k::MAP_FIXED as usize != 0 => taken(range(a, b)),
        k::__NR_brk | k::__NR_shmdt => taken(range(a, REACH)),
        k::__NR_mremap => Some(MappingCall {
            source: range(a, b),
            target: if d & k::MREMAP_FIXED as usize != 0 { range(e, c) } else { EMPTY },
            is_move: true,
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernel_names_call_and_ranges() {
        let at = |start, end| VirtRange { start: VirtAddr(start), end: VirtAddr(end) };
        let blocked =
            |source, target, is_move| SeenThread::Blocked(MappingCall { source, target, is_move });
        assert_eq!(parse(b"running\n"), SeenThread::Runs);
        assert_eq!(parse(b"-1 0x7ffd 0x7f00\n"), SeenThread::Elsewhere, "a fault");
        assert_eq!(parse(b"0 0x3 0x7f00 0x10 0x0 0x0 0x0 0x7ffd 0x7f00\n"), SeenThread::Elsewhere);
        let munmap = format!("{} 0x10000 0x1800 0x0 0x0 0x0 0x0 0x7ffd 0x7f00\n", k::__NR_munmap);
        assert_eq!(parse(munmap.as_bytes()), blocked(at(0x10000, 0x12000), EMPTY, false));
        let moved =
            format!("{} 0x10000 0x2000 0x4000 0x3 0x50000 0x0 0x7ffd 0x7f00\n", k::__NR_mremap);
        assert_eq!(
            parse(moved.as_bytes()),
            blocked(at(0x10000, 0x12000), at(0x50000, 0x54000), true)
        );
        let hint = format!("{} 0x10000 0x2000 0x3 0x22 0x0 0x0 0x7ffd 0x7f00\n", k::__NR_mmap);
        assert_eq!(parse(hint.as_bytes()), SeenThread::Elsewhere, "a hint replaces nothing");
        let fixed = format!("{} 0x10000 0x2000 0x3 0x32 0x0 0x0 0x7ffd 0x7f00\n", k::__NR_mmap);
        assert_eq!(parse(fixed.as_bytes()), blocked(at(0x10000, 0x12000), EMPTY, false));
    }

    #[test]
    fn a_thread_that_sleeps_is_elsewhere() {
        use std::sync::atomic::{AtomicU32, Ordering};
        let tid = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                tid.store(crate::thread::gettid().0, Ordering::Release);
                crate::thread::sleep(core::time::Duration::from_secs(1));
            });
            let deadline = std::time::Instant::now() + core::time::Duration::from_secs(30);
            let mut seen = None;
            while seen != Some(SeenThread::Elsewhere) && std::time::Instant::now() < deadline {
                for_each_thread(|of, thread| {
                    if of.0 == tid.load(Ordering::Acquire) {
                        seen = Some(thread);
                    }
                })
                .unwrap();
                std::thread::yield_now();
            }
            assert_eq!(seen, Some(SeenThread::Elsewhere));
        });
    }
}
