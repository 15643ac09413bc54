//! Forks that the kernel does not report: the supervisor follows the forking thread through them,
//! and has the child begin where its engine does.
//!
//! Without `CAP_SYS_PTRACE` the kernel gives no userfaultfd to a forked child, which would read
//! zeros where its parent is swapped. A thread that is about to fork asks to be followed
//! ([`swaptide_ipc::AgentRequest::Fork`]). Its child is stopped at its birth, and is made to begin
//! at a function of the agent's, which arms the child's memory before anything else runs there.
//! That needs no privilege, for all of the tree are descendants of the supervisor's. So none is
//! used: a supervisor that may trace any process would otherwise lend that right to its programs.
//!
//! Owns: the forks under way. All of it happens in the supervisor's first thread, which is the
//! parent of the program and of orphans: if another thread of the process followed them, that
//! thread's wait would be told.
//!
//! | stage | until |
//! |---|---|
//! | `Ahead` | the thread has forked, or says that it has not (it hangs up) |
//! | `ChildStopped` | the child is stopped at its birth, which may be told of before the fork is |
//! | `PendingChild` | the child says that its memory is armed, or is gone |
//! | `Leaving` | the thread, which has not forked, is stopped and can be detached |
//!
//! A thread that executes a program is detached at that moment, at any stage.
//!
//! Invariants
//! 1. A child that cannot be made to begin there is killed before it runs.
//! 2. The forking thread is stopped until its child's memory is armed, or the child is gone.
//! 3. If the supervisor is killed meanwhile, both are: neither continues with zeros.
//! 4. A child that has not armed its memory after `REGISTER_TIMEOUT` is killed, and its parent
//!    continues. Time in which it is stopped does not count, nor time in which it was not looked
//!    at.
//! 5. No thread is traced in a run whose supervisor did not decide to follow forks before its
//!    program began ([`TracedForks::new`]). A word of the shared segment does not count.
//! 6. A thread is traced only if this user may trace it without `CAP_SYS_PTRACE`: the capability is
//!    not effective at that moment, so the kernel decides. For the same reason the kernel gives no
//!    rights to a set-uid program that a traced thread executes.
//! 7. A child is changed only while its parent is the process that asked, with the same user ids
//!    and a program without rights of its own (`Peer::is_unchanged`).
//!
//! Locks: none.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::thread::CapabilitySet;
use swaptide_ipc::AgentRequest;
use swaptide_sys::Errno;
use swaptide_sys::process::{pidfd_open, pidfd_send_signal, proc_info};
use swaptide_sys::ptrace::{Tracee, TraceeStop, seize};
use swaptide_sys::sock::{Sender, poll_readable};

use crate::capability::without;
use crate::client_conn::ClientConn;
use crate::control::peer::Peer;

/// Forks that can be waited for at a time; of more, the others are looked at whenever something
/// happens.
const MAX_AWAITED_FORKS: usize = 24;
/// Forks of one process that are followed at a time. It has one under way, and others that came to
/// nothing and are being detached; one that asks for more wants to block the supervisor.
const MAX_FORKS_PER_PROCESS: usize = 8;

/// The time that a child may take to arm its memory. It takes milliseconds.
pub(crate) const REGISTER_TIMEOUT: Duration = Duration::from_secs(30);
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
    /// True if it has taken longer than `bound`.
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
    ChildStopped(Tracee),
    Arming(PendingChild),
    Leaving,
}

struct Fork {
    peer: Peer,
    sender: Sender,
    parent: Tracee,
    client: ClientConn,
    entry: u64,
    frame: u64,
    stage: Stage,
}

impl Fork {
    /// True if it is still what asked to be followed.
    fn is_unchanged(&self) -> bool {
        self.peer.is_unchanged(self.parent.tid(), self.sender)
    }
}

/// The forks under way.
#[derive(Default)]
pub struct TracedForks {
    are_followed: bool,
    forks: Vec<Fork>,
    /// Children whose parent's fork was not reported yet.
    stopped_children: Vec<u32>,
}

/// Whether this process may follow another one of its user: tried with a child of its own.
///
/// # Errors
/// The error of the kernel if it may not.
pub(crate) fn is_permitted() -> Result<(), Errno> {
    // SAFETY: the child makes one system call and no other; it does not return here.
    let child = match unsafe { libc::fork() } {
        -1 => return Err(Errno::AGAIN),
        0 => loop {
            // SAFETY: pause(2) uses no memory; the child does not return.
            unsafe { libc::pause() };
        },
        child => child as u32,
    };
    let followed = seize(child);
    crate::signals::send(child, libc::SIGKILL);
    // SAFETY: the child of this function is waited for here alone; no status is wanted.
    unsafe { libc::waitpid(child as i32, std::ptr::null_mut(), libc::__WALL) };
    followed.map(drop)
}

/// Forks that the supervisor's limit on descriptors allows: a quarter of them, three each.
fn max_forks() -> usize {
    let files =
        rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files / 12).unwrap_or(usize::MAX)
}

fn has_word(fd: BorrowedFd<'_>) -> bool {
    poll_readable(&[fd], Some(Duration::ZERO)).is_ok_and(|ready| ready != 0)
}

impl TracedForks {
    /// None yet. `are_followed`: the kernel reports no forks to engines here (`doctor::forks`), as
    /// the supervisor found before the run.
    pub fn new(are_followed: bool) -> TracedForks {
        TracedForks { are_followed, ..TracedForks::default() }
    }

    /// Serves a request to be followed, of a process; `body` is what came with it. `None`: it is
    /// hung up on.
    pub(crate) fn begin(
        &mut self,
        client: ClientConn,
        peer: Peer,
        sender: Sender,
        body: &[u8],
    ) -> Option<()> {
        if !self.are_followed {
            return None;
        }
        let word = |at: usize| Some(u64::from_le_bytes(body.get(at..at + 8)?.try_into().ok()?));
        let tid = u32::from_le_bytes(body.get(..4)?.try_into().ok()?);
        let (entry, frame) = (word(4)?, word(12)?);
        // Of its own threads a process may ask that, and of no others.
        if !peer.is_unchanged(tid, sender) {
            return None;
        }
        let of_one = self.forks.iter().filter(|fork| fork.peer.pid == peer.pid).count();
        if of_one >= MAX_FORKS_PER_PROCESS || self.forks.len() >= max_forks() {
            return None;
        }
        let parent = without(CapabilitySet::SYS_PTRACE, || seize(tid))?.ok()?;
        // The wait reports one that has gone. What it has become meanwhile is checked when it
        // forks.
        let _ = client.send(&[AgentRequest::Fork as u8], &[]);
        self.forks.push(Fork { peer, sender, parent, client, entry, frame, stage: Stage::Ahead });
        Some(())
    }

    /// Returns the descriptors to wait for besides children's changes.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.forks.iter().take(MAX_AWAITED_FORKS).flat_map(|fork| {
            let life = match &fork.stage {
                Stage::Arming(arming) => Some(arming.life.as_fd()),
                _ => None,
            };
            // A leaving thread has hung up, and would be readable for ever.
            let word = (!matches!(fork.stage, Stage::Leaving)).then(|| fork.client.as_fd());
            word.into_iter().chain(life)
        })
    }

    /// Returns the longest time to wait: some changes must be polled, or a child has a timeout.
    pub fn timeout(&self) -> Option<Duration> {
        let arms = |fork: &Fork| matches!(fork.stage, Stage::Arming(_));
        (self.forks.len() > MAX_AWAITED_FORKS)
            .then_some(Duration::from_millis(1))
            .or_else(|| self.forks.iter().any(arms).then_some(POLL_INTERVAL))
    }

    /// Looks for children that have sent a word, or are gone. Kills children that take longer than
    /// `bound` to arm their memory; answers which.
    pub(crate) fn attend(&mut self, bound: Duration) -> Vec<u32> {
        let mut killed = Vec::new();
        self.forks.retain_mut(|fork| match &mut fork.stage {
            Stage::Ahead if has_word(fork.client.as_fd()) => {
                // It has not forked. It is detached when it is stopped.
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

    /// True if a thread is followed.
    pub(crate) fn has(&self, tid: u32) -> bool {
        let is_its_child =
            |fork: &Fork| matches!(fork.stage, Stage::ChildStopped(child) if child.tid() == tid);
        self.forks.iter().any(|fork| fork.parent.tid() == tid || is_its_child(fork))
    }

    /// A wait has told of a thread that is followed, or is a child of one.
    pub fn changed(&mut self, tid: u32, change: TraceeStop) {
        if change == TraceeStop::Executed {
            return self.executed(tid);
        }
        let Some(at) = self.forks.iter().position(|fork| fork.parent.tid() == tid) else {
            return self.child_changed(tid, change);
        };
        let fork = &mut self.forks[at];
        let parent = fork.parent;
        // What fails here is that the thread is gone, which the wait tells of as well.
        let _ = match (change, &fork.stage) {
            (TraceeStop::Gone, _) => {
                let fork = self.forks.swap_remove(at);
                self.kill_stopped_children(Some(&fork));
                Ok(())
            }
            (TraceeStop::Forked, _) => match parent.child() {
                Ok(child) => {
                    fork.stage = Stage::ChildStopped(child);
                    if let Some(known) =
                        self.stopped_children.iter().position(|other| *other == child.tid())
                    {
                        self.stopped_children.swap_remove(known);
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
            (TraceeStop::Still | TraceeStop::Executed, _) => parent.go_on(0),
        };
    }

    /// A process has executed a program: of its threads only the one that did so is left, and that
    /// has the number of the process.
    fn executed(&mut self, pid: u32) {
        let (over, forks): (Vec<Fork>, Vec<Fork>) =
            std::mem::take(&mut self.forks).into_iter().partition(|fork| fork.peer.pid == pid);
        self.forks = forks;
        over.iter().for_each(|fork| self.kill_stopped_children(Some(fork)));
        // The wait reports one that has gone.
        let _ = Tracee::of(pid).release(0);
    }

    /// Kills children whose parent thread is gone, and the child of a `fork` that is over: nothing
    /// would ever detach them.
    fn kill_stopped_children(&mut self, fork: Option<&Fork>) {
        if let Some(Fork { stage: Stage::ChildStopped(child), .. }) = fork {
            crate::signals::send(child.tid(), libc::SIGKILL);
        }
        let forks = &self.forks;
        self.stopped_children.retain(|other| {
            let Some(child) = proc_info(*other) else { return false };
            let is_awaited = forks.iter().any(|fork| {
                fork.peer.pid == child.ppid && matches!(fork.stage, Stage::Ahead | Stage::Leaving)
            });
            if !is_awaited {
                crate::signals::send(*other, libc::SIGKILL);
            }
            is_awaited
        });
    }

    fn child_changed(&mut self, tid: u32, change: TraceeStop) {
        let is_parent =
            |fork: &Fork| matches!(fork.stage, Stage::ChildStopped(child) if child.tid() == tid);
        let Some(at) = self.forks.iter().position(is_parent) else {
            match change {
                // Killed before its parent's fork was told of.
                TraceeStop::Gone => self.stopped_children.retain(|other| *other != tid),
                _ => {
                    self.stopped_children.push(tid);
                    self.kill_stopped_children(None);
                }
            }
            return;
        };
        let fork = &mut self.forks[at];
        let child = Tracee::of(tid);
        let life = match change {
            TraceeStop::Gone => None,
            _ if !fork.is_unchanged() => {
                crate::signals::send(tid, libc::SIGKILL);
                None
            }
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
    // SAFETY: it is stopped at its birth, and has a copy of the memory of the thread that asked
    // for this.
    unsafe { child.begin_at(entry, frame) }?;
    child.release(0)?;
    Ok(life)
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_sys::sock::{Conn, Listener};

    /// This process as a client, and what it asks: to follow thread `tid`.
    fn request(tid: u32) -> (ClientConn, Peer, Sender, [u8; 20]) {
        let (listener, name) = Listener::bind_autogenerated().expect("a socket");
        let client = Conn::connect_abstract(name.as_bytes()).expect("connect");
        let (server, _) = listener.accept().expect("accept");
        let pid = std::process::id();
        let peer = Peer::of(&server, pid, &[]).expect("this process");
        let mut body = [0; 20];
        body[..4].copy_from_slice(&tid.to_le_bytes());
        let me = Sender { pid, uid: rustix::process::getuid().as_raw() };
        (ClientConn::new(client), peer, me, body)
    }

    #[test]
    fn a_process_cannot_have_foreign_threads_followed() {
        let mut followed = TracedForks::new(true);
        for length in [20, 19, 0] {
            let (client, peer, sender, body) = request(1);
            assert!(followed.begin(client, peer, sender, &body[..length]).is_none());
        }
        assert!(followed.awaited().next().is_none() && !followed.has(1));
    }

    /// A thread that could be followed, in a run that follows none.
    #[test]
    fn no_thread_is_followed_unless_the_supervisor_decided_so() {
        let (told, tid) = std::sync::mpsc::channel();
        let (_alive, ends) = std::sync::mpsc::channel::<()>();
        std::thread::spawn(move || {
            told.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).expect("told");
            ends.recv()
        });
        let (client, peer, sender, body) = request(tid.recv().expect("a thread"));
        let mut followed = TracedForks::new(false);
        assert!(followed.begin(client, peer, sender, &body).is_none());
        assert!(followed.awaited().next().is_none());
    }

    #[test]
    fn a_child_reported_before_its_fork_waits_for_that_fork() {
        use std::os::unix::process::ExitStatusExt;
        // A number that no thread has, for none of this process is to be touched.
        let parent = Tracee::of(4_100_000);
        let (client, peer, sender, _) = request(parent.tid());
        let mut followed = TracedForks::new(true);
        let ahead = |followed: &mut TracedForks, client, peer| {
            let (stage, entry, frame) = (Stage::Ahead, 0, 0);
            followed.forks.push(Fork { peer, sender, parent, client, entry, frame, stage });
        };
        ahead(&mut followed, client, peer);
        let start = || std::process::Command::new("sleep").arg("600").spawn().expect("sleep");
        let is_killed = |mut child: std::process::Child| {
            child.wait().expect("wait").signal() == Some(libc::SIGKILL)
        };
        let child = start();
        followed.changed(child.id(), TraceeStop::Still);
        assert_eq!(followed.stopped_children, [child.id()]);
        // A stopped child that is awaited by nothing would stay so.
        followed.changed(parent.tid(), TraceeStop::Gone);
        assert!(followed.stopped_children.is_empty() && is_killed(child));
        let child = start();
        followed.changed(child.id(), TraceeStop::Still);
        assert!(
            followed.stopped_children.is_empty() && is_killed(child),
            "its parent is gone before"
        );
        let (client, peer, ..) = request(parent.tid());
        ahead(&mut followed, client, peer);
        let child = start();
        followed.forks[0].stage = Stage::ChildStopped(Tracee::of(child.id()));
        // The process of all of them has executed a program.
        followed.changed(std::process::id(), TraceeStop::Executed);
        assert!(followed.forks.is_empty() && is_killed(child));
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
        // SAFETY: the status is a local word. There is no child, so none is taken.
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
