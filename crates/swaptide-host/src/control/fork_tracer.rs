//! Forks that the kernel does not report: the supervisor follows the forking thread through them,
//! and has the child begin where its engine does.
//!
//! Without `CAP_SYS_PTRACE` the kernel gives no userfaultfd to a forked child, which would read
//! zeros where its parent is swapped. A thread that is about to fork asks to be followed
//! ([`swaptide_ipc::Request::Fork`]). Its child stands still at its birth, and is made to begin at
//! a function of the agent's, which arms the child's memory before anything else runs there. That
//! needs no privilege, for all of the tree are descendants of the supervisor's.
//!
//! Owns: the forks under way. All of it happens in the supervisor's first thread, which is the
//! parent of the program and of orphans: if another thread of the process followed them, that
//! thread's wait would be told.
//!
//! | stage | until |
//! |---|---|
//! | `Ahead` | the thread has forked, or says that it has not (it hangs up) |
//! | `Birth` | the child stands still at its birth, which may be told of before the fork is |
//! | `PendingChild` | the child says that its memory is armed, or is gone |
//! | `Leaving` | the thread, which has not forked, stands still and can be detached |
//!
//! Invariants
//! 1. A child that cannot be made to begin there is killed before it runs.
//! 2. The forking thread stands still until its child's memory is armed, or the child is gone.
//! 3. If the supervisor is killed meanwhile, both are: neither continues with zeros.
//! 4. A child that has not armed its memory after [`REGISTER_TIMEOUT`] is killed, and its parent
//!    continues. Time in which it is stopped does not count, nor time in which nobody looked.
//!
//! Locks: none.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use swaptide_ipc::Request;
use swaptide_sys::Errno;
use swaptide_sys::process::{pidfd_open, pidfd_send_signal, proc_info};
use swaptide_sys::ptrace::{Tracee, TraceeStop, seize};
use swaptide_sys::sock::{Conn, poll_readable};

/// Forks that can be waited for at a time; of more, the others are looked at whenever something
/// happens.
const FORK_TIMEOUT: usize = 24;
/// Forks of one process that are followed at a time. It has one under way, and others that came to
/// nothing and are being detached; one that asks for more wants to block the supervisor.
const MAX_FORKS_PER_PROCESS: usize = 8;

/// How long a child may take to arm its memory. It takes milliseconds.
pub const REGISTER_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two looks at the children that arm theirs; one look adds at most twice this to the time
/// that counts.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A child that arms its memory.
struct PendingChild {
    life: OwnedFd,
    pid: u32,
    looked: Instant,
    spent: Duration,
}

impl PendingChild {
    /// Whether it has taken longer than `bound`.
    fn is_late(&mut self, bound: Duration) -> bool {
        let now = Instant::now();
        let passed = now - self.looked;
        if passed >= POLL_INTERVAL {
            self.looked = now;
            self.spent += passed.min(2 * POLL_INTERVAL);
            if proc_info(self.pid).is_some_and(|process| process.stopped) {
                self.spent = Duration::ZERO;
            }
        }
        self.spent >= bound
    }
}

enum Stage {
    Ahead,
    Birth(Tracee),
    Arming(PendingChild),
    Leaving,
}

struct Fork {
    pid: u32,
    parent: Tracee,
    client: Conn,
    entry: u64,
    frame: u64,
    stage: Stage,
}

/// The forks under way.
#[derive(Default)]
pub struct TracedForks {
    forks: Vec<Fork>,
    /// Children whose parent's fork was not reported yet.
    born: Vec<u32>,
}

/// Whether this process may follow another one of its user: tried with a child of its own.
///
/// # Errors
/// What the kernel answers where it may not.
pub fn is_permitted() -> Result<(), Errno> {
    // SAFETY: the child makes one system call and no other; it does not return here.
    let child = match unsafe { libc::fork() } {
        -1 => return Err(Errno::AGAIN),
        0 => loop {
            // SAFETY: as above.
            unsafe { libc::pause() };
        },
        child => child as u32,
    };
    let followed = seize(child);
    crate::signals::send(child, libc::SIGKILL);
    // SAFETY: the child of this function is waited for by nobody else; no status is wanted.
    unsafe { libc::waitpid(child as i32, std::ptr::null_mut(), libc::__WALL) };
    followed.map(drop)
}

fn has_word(fd: BorrowedFd<'_>) -> bool {
    poll_readable(&[fd], Some(Duration::ZERO)).is_ok_and(|ready| ready != 0)
}

impl TracedForks {
    /// Serves a request to be followed, of a process; `body` is what came with it. `None`: it is
    /// hung up on.
    pub fn begin(&mut self, client: Conn, pid: u32, body: &[u8]) -> Option<()> {
        let word = |at: usize| Some(u64::from_le_bytes(body.get(at..at + 8)?.try_into().ok()?));
        let tid = u32::from_le_bytes(body.get(..4)?.try_into().ok()?);
        let (entry, frame) = (word(4)?, word(12)?);
        // Of its own threads a process may ask that, and of no others.
        std::fs::metadata(format!("/proc/{pid}/task/{tid}")).ok()?;
        if self.forks.iter().filter(|fork| fork.pid == pid).count() >= MAX_FORKS_PER_PROCESS {
            return None;
        }
        let parent = seize(tid).ok()?;
        // The wait reports one that has gone.
        let _ = client.send(&[Request::Fork as u8], &[]);
        self.forks.push(Fork { pid, parent, client, entry, frame, stage: Stage::Ahead });
        Some(())
    }

    /// What is to be waited for besides children's changes.
    pub fn awaited(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.forks.iter().take(FORK_TIMEOUT).flat_map(|fork| {
            let life = match &fork.stage {
                Stage::Arming(arming) => Some(arming.life.as_fd()),
                _ => None,
            };
            // A leaving thread has hung up, and would be readable for ever.
            let word = (!matches!(fork.stage, Stage::Leaving)).then(|| fork.client.as_fd());
            word.into_iter().chain(life)
        })
    }

    /// How long to wait at most: not all can be waited for, or a child has its time.
    pub fn patience(&self) -> Option<Duration> {
        let arms = |fork: &Fork| matches!(fork.stage, Stage::Arming(_));
        (self.forks.len() > FORK_TIMEOUT)
            .then_some(Duration::from_millis(1))
            .or_else(|| self.forks.iter().any(arms).then_some(POLL_INTERVAL))
    }

    /// Looks for children that have sent a word, or are gone. Kills children that take longer than
    /// `bound` to arm their memory; answers which.
    pub fn attend(&mut self, bound: Duration) -> Vec<u32> {
        let mut killed = Vec::new();
        self.forks.retain_mut(|fork| match &mut fork.stage {
            Stage::Ahead if has_word(fork.client.as_fd()) => {
                // It has not forked. It is detached when it stands still.
                fork.stage = Stage::Leaving;
                fork.parent.interrupt().is_ok()
            }
            Stage::Arming(arming)
                if has_word(fork.client.as_fd()) || has_word(arming.life.as_fd()) =>
            {
                let _ = fork.parent.release(0);
                false
            }
            Stage::Arming(arming) => {
                if arming.is_late(bound) {
                    if pidfd_send_signal(arming.life.as_fd(), libc::SIGKILL).is_ok() {
                        killed.push(arming.pid);
                    }
                    // Its end is told of by its descriptor.
                    arming.spent = Duration::ZERO;
                }
                true
            }
            _ => true,
        });
        killed
    }

    /// Whether a thread is followed.
    pub fn has(&self, tid: u32) -> bool {
        let is_born = |fork: &Fork| matches!(fork.stage, Stage::Birth(child) if child.tid() == tid);
        self.forks.iter().any(|fork| fork.parent.tid() == tid || is_born(fork))
    }

    /// A wait has told of a thread that is followed, or was born of one.
    pub fn changed(&mut self, tid: u32, change: TraceeStop) {
        let Some(at) = self.forks.iter().position(|fork| fork.parent.tid() == tid) else {
            return self.child_changed(tid, change);
        };
        let fork = &mut self.forks[at];
        let parent = fork.parent;
        // What fails here is that the thread is gone, which the wait tells of as well.
        let _ = match (change, &fork.stage) {
            (TraceeStop::Gone, _) => {
                self.forks.swap_remove(at);
                Ok(())
            }
            (TraceeStop::Forked, _) => match parent.child() {
                Ok(child) => {
                    fork.stage = Stage::Birth(child);
                    if let Some(known) = self.born.iter().position(|born| *born == child.tid()) {
                        self.born.swap_remove(known);
                        self.child_changed(child.tid(), TraceeStop::Still);
                    }
                    Ok(())
                }
                Err(errno) => Err(errno),
            },
            (_, Stage::Leaving) => {
                self.forks.swap_remove(at);
                parent.release(if let TraceeStop::Signal(signal) = change { signal } else { 0 })
            }
            (TraceeStop::Signal(signal), _) => parent.go_on(signal),
            (TraceeStop::Stopped, _) => parent.stay(),
            (TraceeStop::Still, _) => parent.go_on(0),
        };
    }

    fn child_changed(&mut self, tid: u32, change: TraceeStop) {
        let is_parent =
            |fork: &Fork| matches!(fork.stage, Stage::Birth(child) if child.tid() == tid);
        let Some(at) = self.forks.iter().position(is_parent) else {
            match change {
                // Killed before its parent's fork was told of.
                TraceeStop::Gone => self.born.retain(|born| *born != tid),
                _ => self.born.push(tid),
            }
            return;
        };
        let fork = &mut self.forks[at];
        let child = Tracee::of(tid);
        let life = match change {
            TraceeStop::Gone => None,
            _ => begin(child, fork.entry, fork.frame)
                .inspect_err(|_| crate::signals::send(tid, libc::SIGKILL))
                .ok(),
        };
        match life {
            Some(life) => {
                let looked = Instant::now();
                fork.stage =
                    Stage::Arming(PendingChild { life, pid: tid, looked, spent: Duration::ZERO });
            }
            None => {
                let _ = fork.parent.release(0);
                self.forks.swap_remove(at);
            }
        }
    }
}

fn begin(child: Tracee, entry: u64, frame: u64) -> Result<OwnedFd, Errno> {
    let life = pidfd_open(child.tid())?;
    // SAFETY: it stands still at its birth, and has a copy of the memory of the thread that asked
    // for this.
    unsafe { child.begin_at(entry, frame) }?;
    child.release(0)?;
    Ok(life)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_has_another_ones_threads_followed() {
        let mut followed = TracedForks::default();
        let mut body = [0; 20];
        body[..4].copy_from_slice(&1u32.to_le_bytes());
        for body in [&body[..], &body[..19], &[]] {
            let (client, _other) = Conn::pair().expect("a pair");
            assert!(followed.begin(client, std::process::id(), body).is_none());
        }
        assert!(followed.awaited().next().is_none() && !followed.has(1));
    }

    #[test]
    fn a_birth_that_is_told_of_first_is_remembered_and_a_death_forgotten() {
        let mut followed = TracedForks::default();
        followed.changed(4_000_000, TraceeStop::Still);
        assert_eq!(followed.born, [4_000_000]);
        followed.changed(4_000_000, TraceeStop::Gone);
        assert!(followed.born.is_empty());
    }

    /// In a process of its own: other tests have children, too.
    #[test]
    fn following_is_tried_and_leaves_no_child() {
        const ALONE: &str = "SWAPTIDE_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let test = concat!(module_path!(), "::following_is_tried_and_leaves_no_child");
            let (_, test) = test.split_once("::").expect("a crate and a path");
            let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
            let done =
                alone.args(["--exact", test, "--test-threads=1"]).env(ALONE, "1").output().unwrap();
            let said = String::from_utf8_lossy(&done.stdout);
            assert!(done.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let permitted = is_permitted();
        let mut status = 0;
        // SAFETY: the status is a local word. There is no child, so nobody's is taken.
        let left = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG | libc::__WALL) };
        let why = std::io::Error::last_os_error();
        assert_eq!((left, why.raw_os_error()), (-1, Some(libc::ECHILD)), "a child is left");
        // Without Yama's restriction and without a filter a process may follow its own child.
        let yama =
            std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
        let own = std::fs::read_to_string("/proc/self/status").unwrap();
        if matches!(yama.trim(), "" | "0" | "1") && own.contains("Seccomp:\t0\n") {
            assert!(permitted.is_ok(), "{permitted:?}");
        }
    }
}
