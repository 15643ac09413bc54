//! A run that was told to end, ends.
//!
//! A signal that ends a program does nothing while the program's threads stand inside swaptide's
//! own code with all signals blocked: around a fork, say. Where something there waits for good, the
//! signal stays pending. So after the supervisor has passed one on, it looks whether it is taken,
//! and follows with `SIGKILL` where it cannot be.
//!
//! Owns: what was seen of each process since the run was told to end.
//!
//! Invariants
//! 1. A process is killed only while it has a signal pending that was meant to end the run, and
//!    each of its own threads was inside swaptide at `STUCK_POLLS` looks in a row. A
//!    thread is inside when it has every signal blocked (libc itself never blocks its own two for
//!    the program), or waits for a page in the kernel, for the same one at all these looks: a long
//!    system call may fault on many, and a handler of the program runs after it. So is one that is
//!    stopped by a tracer of the run which is inside itself: that has stopped the threads that
//!    bring its page. A program that handles or ignores the signal has none pending.
//! 2. Nothing but a descendant of this process is killed.
//!
//! Locks: none.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use swaptide_sys::process::{pidfd_open, pidfd_send_signal, processes};

use crate::memctl::processes::descends;

/// Between two looks at the processes that were told to end.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Looks in a row at which a process must be stuck.
const STUCK_POLLS: u32 = 5;
/// Every signal that can be blocked.
const ALL: u64 = !(1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1));

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// True if a signal is meant to end a run.
pub(super) fn ends(signal: i32) -> bool {
    matches!(signal, libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT)
}

/// The kernel's status of a thread.
#[derive(Debug, Default, PartialEq, Eq)]
struct Thread {
    /// Signals that wait for it, or for its process.
    pending: u64,
    blocked: u64,
    is_engine: bool,
    /// In a system call, where signals do not interrupt it.
    waits_for_page: bool,
    /// There, or in its own code.
    faults: bool,
    makes_process: bool,
    /// The number of its waits. If two samples are equal, it still waits for the same thing.
    waits: u64,
    /// Stopped, by a signal or a tracer: it does nothing about what it stands in.
    is_stopped: bool,
    /// The thread whose tracing stop it is in.
    tracer: Option<u32>,
    /// That is inside, and has waited so often.
    tracer_waits: Option<u64>,
}

impl Thread {
    /// Out of its files `status`, `wchan` and `syscall`. The last two may not be readable.
    fn parse(status: &str, wchan: &str, syscall: &str) -> Thread {
        let field = |name: &str| {
            status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim()
        };
        let mask = |name: &str| u64::from_str_radix(field(name), 16).unwrap_or(0);
        let blocked = mask("SigBlk:");
        let makers =
            [libc::SYS_clone, libc::SYS_clone3, libc::SYS_vfork].map(|number| number.to_string());
        let call = syscall.split_whitespace().next().unwrap_or("");
        let tracer = field("TracerPid:").parse().ok();
        Thread {
            pending: mask("SigPnd:") | mask("ShdPnd:"),
            blocked,
            is_engine: blocked == ALL && field("Name:").starts_with("swaptide"),
            waits_for_page: field("State:").starts_with('D')
                && wchan.starts_with("handle_userfault"),
            faults: wchan.starts_with("handle_userfault"),
            makes_process: makers.iter().any(|maker| maker == call) && !wchan.contains("userfault"),
            waits: field("voluntary_ctxt_switches:").parse().unwrap_or(0),
            is_stopped: field("State:").starts_with(['T', 't']),
            tracer: tracer.filter(|_| field("State:").starts_with('t')),
            tracer_waits: None,
        }
    }

    fn read(pid: u32, tid: &str) -> Option<Thread> {
        let file = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/{name}"));
        Some(Thread::parse(
            &file("status").ok()?,
            &file("wchan").unwrap_or_default(),
            &file("syscall").unwrap_or_default(),
        ))
    }

    fn is_inside(&self) -> bool {
        self.tracer_waits.is_some()
            || !self.is_stopped
                && (self.blocked == ALL && !self.makes_process || self.waits_for_page)
    }

    /// How often it has waited, or the tracer that stops it, where a wait for a page counts.
    fn waits_for_pages(&self) -> u64 {
        self.tracer_waits.unwrap_or(if self.waits_for_page { self.waits } else { 0 })
    }
}

/// The state of a process's ending signals.
#[derive(Debug, PartialEq, Eq)]
enum SignalResponse {
    /// It has taken them all: none is pending.
    Taken,
    /// One is, and a thread of the program may still take it.
    Pending,
    /// One is, and all threads of the program are inside swaptide.
    Stuck,
}

fn judge(threads: &[Thread], told: u64) -> SignalResponse {
    let mut own = threads.iter().filter(|thread| !thread.is_engine).peekable();
    if own.peek().is_none() || own.clone().all(|thread| thread.pending & told == 0) {
        SignalResponse::Taken
    } else if own.all(Thread::is_inside) {
        SignalResponse::Stuck
    } else {
        SignalResponse::Pending
    }
}

/// How often a tracer of the tree below `root` has waited, if it is inside. Here that is also one
/// that waits for a page in its own code: no signal has taken it out of there.
fn stuck_tracer(tid: u32, root: u32) -> Option<u64> {
    let thread = Thread::read(tid, &tid.to_string())?;
    if !thread.is_inside() && !thread.faults {
        return None;
    }
    // The supervisor itself traces forks, and is never inside for good.
    (tid != root && descends(tid, root)).then_some(thread.waits)
}

/// The state of a process of the tree below `root`, and how often those of its threads have waited
/// that wait for a page.
fn state_of(pid: u32, told: u64, root: u32) -> (SignalResponse, u64) {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return (SignalResponse::Taken, 0);
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut threads: Vec<Thread> = names.filter_map(|tid| Thread::read(pid, &tid)).collect();
    for thread in &mut threads {
        thread.tracer_waits = thread.tracer.and_then(|tracer| stuck_tracer(tracer, root));
    }
    (judge(&threads, told), threads.iter().map(Thread::waits_for_pages).sum())
}

/// Since when the run is to end, and which processes do not take the signal.
#[derive(Default)]
pub struct Ending {
    /// The signals that were passed on and may still be pending somewhere.
    told: u64,
    next: Option<Instant>,
    /// At how many looks in a row a process was stuck, and how often its threads had waited then.
    stuck: HashMap<u32, (u32, u64)>,
}

impl Ending {
    /// A signal has gone to the program.
    pub fn begin(&mut self, signal: i32) {
        if ends(signal) {
            self.told |= bit(signal);
            self.next.get_or_insert_with(|| Instant::now() + POLL_INTERVAL);
        }
    }

    /// When the next look is due.
    pub fn timeout(&self) -> Option<Duration> {
        Some(self.next?.saturating_duration_since(Instant::now()))
    }

    /// Looks, if it is time. Kills the processes that cannot end, and names them.
    pub fn look(&mut self) -> Vec<u32> {
        if self.next.is_none_or(|next| Instant::now() < next) {
            return Vec::new();
        }
        self.next = Some(Instant::now() + POLL_INTERVAL);
        let root = std::process::id();
        let mut before = std::mem::take(&mut self.stuck);
        let mut is_pending = false;
        let mut killed = Vec::new();
        for process in processes().unwrap_or_default() {
            if process.zombie || !descends(process.pid, root) {
                continue;
            }
            match state_of(process.pid, self.told, root) {
                (SignalResponse::Taken, _) => {}
                (SignalResponse::Pending, _) => is_pending = true,
                (SignalResponse::Stuck, waits) => {
                    is_pending = true;
                    let looks = next_look(before.remove(&process.pid), waits);
                    if looks >= STUCK_POLLS && kill(process.pid, root) {
                        killed.push(process.pid);
                    } else {
                        self.stuck.insert(process.pid, (looks, waits));
                    }
                }
            }
        }
        if !is_pending {
            *self = Ending::default();
        }
        killed
    }
}

/// Looks in a row at which a process is stuck, this one included. `before`: as of the last look.
fn next_look(before: Option<(u32, u64)>, waits: u64) -> u32 {
    match before {
        Some((looks, then)) if then == waits => looks + 1,
        _ => 1,
    }
}

/// Kills a descendant of `root`.
fn kill(pid: u32, root: u32) -> bool {
    signal_descendant(pid, root, libc::SIGKILL)
}

/// Sends a signal to `pid`, if it descends from `root`.
fn signal_descendant(pid: u32, root: u32, signal: i32) -> bool {
    let Ok(process) = pidfd_open(pid) else { return false };
    // The number cannot come to mean another process any more.
    descends(pid, root) && pidfd_send_signal(process.as_fd(), signal).is_ok()
}

/// Sends a signal to all that descends from `root`.
pub(super) fn signal_descendants(root: u32, signal: i32) {
    for process in processes().unwrap_or_default() {
        if !process.zombie && descends(process.pid, root) {
            signal_descendant(process.pid, root, signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERM: u64 = 1 << (libc::SIGTERM - 1);

    fn thread(
        name: &str,
        state: &str,
        shared: u64,
        blocked: u64,
        wchan: &str,
        call: &str,
    ) -> Thread {
        let status = format!(
            "Name:\t{name}\nState:\t{state}\nSigPnd:\t{:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t{blocked:016x}\n",
            0
        );
        Thread::parse(&status, wchan, call)
    }

    #[test]
    fn a_thread_inside_with_the_signal_pending_is_stuck() {
        let engine = thread("swaptide", "S (sleeping)", TERM, ALL, "poll", "271 0x1");
        let forks = thread("perl", "S (sleeping)", TERM, ALL, "futex_wait_queue", "202 0x1");
        assert_eq!(judge(&[engine, forks], TERM), SignalResponse::Stuck);
        let reads = thread("sort", "D (disk sleep)", TERM, 0, "handle_userfault", "1 0x1");
        assert_eq!(judge(&[reads], TERM), SignalResponse::Stuck);
    }

    #[test]
    fn a_thread_that_may_take_the_signal_or_has_is_not_stuck() {
        let engine = || thread("swaptide", "S (sleeping)", TERM, ALL, "poll", "271 0x1");
        let inside = || thread("perl", "S (sleeping)", TERM, ALL, "futex_wait_queue", "202 0x1");
        let waits = thread("perl", "S (sleeping)", TERM, TERM, "do_sigtimedwait", "128 0x1");
        assert_eq!(judge(&[engine(), inside(), waits], TERM), SignalResponse::Pending);
        // posix_spawn blocks all signals until its child executes.
        let spawns = thread("make", "S (sleeping)", TERM, ALL, "kernel_clone", "56 0x4111");
        assert_eq!(judge(&[spawns], TERM), SignalResponse::Pending);
        let forks = thread(
            "make",
            "S (sleeping)",
            TERM,
            ALL,
            "userfaultfd_event_wait_completion",
            "56 0x1200011",
        );
        assert_eq!(judge(&[forks], TERM), SignalResponse::Stuck);
        let handled = thread("bash", "S (sleeping)", 0, ALL, "futex_wait_queue", "202 0x1");
        assert_eq!(judge(&[engine(), handled], TERM), SignalResponse::Taken);
        assert_eq!(
            judge(&[engine()], TERM),
            SignalResponse::Taken,
            "no process of the program is left"
        );
        assert_eq!(
            judge(&[inside()], 1 << (libc::SIGHUP - 1)),
            SignalResponse::Taken,
            "another signal than the one passed on"
        );
    }

    #[test]
    fn a_stopped_thread_is_inside_only_where_its_tracer_is() {
        let engine = || thread("swaptide", "t (tracing stop)", TERM, ALL, "ptrace_stop", "");
        let stopped = |state: &str, blocked| Thread {
            tracer: Some(77).filter(|_| state.starts_with('t')),
            ..thread("lsan", state, TERM, blocked, "", "")
        };
        for blocked in [0, ALL] {
            for state in ["t (tracing stop)", "T (stopped)"] {
                let threads = [engine(), stopped(state, blocked)];
                assert_eq!(judge(&threads, TERM), SignalResponse::Pending, "{state}");
            }
            let mut held = stopped("t (tracing stop)", blocked);
            held.tracer_waits = Some(42);
            assert_eq!(held.waits_for_pages(), 42);
            assert_eq!(judge(&[engine(), held], TERM), SignalResponse::Stuck);
        }
        let status = "Name:\tlsan\nState:\tt (tracing stop)\nTracerPid:\t77\n";
        assert_eq!(Thread::parse(status, "", "").tracer, Some(77));
        let status = "Name:\tlsan\nState:\tS (sleeping)\nTracerPid:\t77\n";
        assert_eq!(Thread::parse(status, "", "").tracer, None, "it is not stopped");
    }

    #[test]
    fn a_call_that_gets_one_page_after_the_other_is_not_stuck() {
        let mut seen = None;
        for look in 1..=9 {
            seen = Some((next_look(seen, 100 + look), 100 + look));
        }
        assert_eq!(seen, Some((1, 109)));
        assert_eq!(next_look(seen, 109), 2);
        let status = "Name:\tsort\nState:\tD (disk \
            sleep)\nvoluntary_ctxt_switches:\t42\nnonvoluntary_ctxt_switches:\t7\n";
        assert_eq!(Thread::parse(status, "handle_userfault", "0 0x1").waits, 42);
    }

    #[test]
    fn the_mask_of_the_agent_is_every_signal() {
        assert_eq!(format!("{ALL:x}"), "fffffffffffbfeff");
    }

    #[test]
    fn only_signals_that_end_are_followed() {
        let mut ending = Ending::default();
        ending.begin(libc::SIGUSR1);
        assert_eq!(ending.timeout(), None);
        ending.begin(libc::SIGTERM);
        assert!(ending.timeout().is_some_and(|timeout| timeout <= POLL_INTERVAL));
        assert!(ending.look().is_empty(), "it is not time");
    }
}
