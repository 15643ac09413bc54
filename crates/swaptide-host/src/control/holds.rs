//! Userfaultfds that are held for processes which are ending.
//!
//! The threads of an engine end as soon as their process is told to end. Another thread may still
//! be in a system call that copies from memory. If the userfaultfd were closed then, the kernel
//! would fill missing pages with zeros, and they would leave the process. So the supervisor has a
//! second descriptor of it ([`swaptide_ipc::AgentRequest::Hold`]). A fault on a missing page waits,
//! sees the fatal signal, and the call ends short.
//!
//! The engine's connection tells what happens:
//!
//! | on the connection | meaning | what is done |
//! |---|---|---|
//! | a byte | the process is detached | the userfaultfd is closed, then the connection |
//! | its end | the engine's threads are gone | it is released when no thread has SIGKILL pending |
//!
//! A process ends, or executes another program, by a SIGKILL pending for each of its threads. A
//! thread that is in a system call keeps it pending until it has left that. So no thread copies
//! when no thread has it pending. The check is also what lets execve continue: its thread may meet
//! a missing page of the old memory (the list of robust mutexes) when no other thread exists.
//!
//! Another process may run on the same memory, as the child of a vfork does. So a userfaultfd that
//! is released is not closed but goes to [`Orphans`], until the memory is gone.
//!
//! From a fork until the child serves itself, or has all its memory, the parent's engine has the
//! child's userfaultfd held as well: killed meanwhile, it would leave zeros where the child had
//! nothing yet. The child's own request takes the place of that.
//!
//! Owns: the descriptors, and a thread that waits for the connections. It starts with the first.
//!
//! Invariants
//! 1. A held userfaultfd is never read while a living process has an engine that serves it: that
//!    process has set a mark on it before it asked ([`Uffd::serve`]), so that it does not matter
//!    when its request is read. One that is held again is on no other list, and is known by its
//!    inode, of which each has its own.
//! 2. Holds use at most a quarter of the descriptors that the supervisor may have, and a process
//!    has at most [`MAX_HOLDS_PER_PROCESS`]. A process beyond that is not held for: at its end it
//!    is as without.
//!
//! Locks: the list of holds; below it, that of orphans. Neither is held while a thread waits, nor
//! while the last descriptor of a userfaultfd is closed, which waits for the address space.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use swaptide_sys::Errno;
use swaptide_sys::sock::{Conn, poll_readable};
use swaptide_sys::uffd::Uffd;

use crate::client_conn::ClientConn;
use crate::control::orphans::{Inode, Orphans};

/// Holds of one process: of its engine, of one before it whose end is being looked at, of children
/// that it is giving their memory.
const MAX_HOLDS_PER_PROCESS: usize = 16;
/// The interval between checks of the threads of a process without an engine.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Fields are dropped in this order: a peer that sees the connection end must find the userfaultfd
/// closed.
struct Hold {
    pid: u32,
    inode: Inode,
    uffd: OwnedFd,
    conn: ClientConn,
    /// The connection has ended.
    is_ending: bool,
}

/// The supervisor's descriptors of engines' userfaultfds.
#[derive(Default)]
pub struct Holds {
    list: Arc<HoldList>,
    /// Wakes the thread; `None` where there can be none.
    wake: OnceLock<Option<Conn>>,
}

#[derive(Default)]
struct HoldList {
    holds: Mutex<Vec<Hold>>,
    orphans: Orphans,
}

impl HoldList {
    fn holds(&self) -> MutexGuard<'_, Vec<Hold>> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Holds {
    /// Holds a userfaultfd for a process until the process is gone, or says otherwise on `conn`.
    pub(crate) fn add(&self, pid: u32, conn: ClientConn, uffd: OwnedFd) {
        let wake = self.wake.get_or_init(|| {
            let (wake, woken) = Conn::pair().ok()?;
            let list = Arc::clone(&self.list);
            std::thread::Builder::new()
                .name("holds".into())
                .spawn(move || look_after(&list, &woken))
                .ok()?;
            Some(wake)
        });
        let (Some(wake), Some(inode)) = (wake, Inode::of(&uffd)) else { return };
        let mut holds = self.list.holds();
        holds.retain(|hold| hold.inode != inode);
        self.list.orphans.remove(inode);
        let of_one = holds.iter().filter(|hold| hold.pid == pid).count();
        if holds.len() + self.list.orphans.count() < most() && of_one < MAX_HOLDS_PER_PROCESS {
            holds.push(Hold { pid, inode, uffd, conn, is_ending: false });
        }
        drop(holds);
        // Where it has many of these to read, it is about to look, or waits for a process that
        // keeps it: the caller must not.
        let _ = wake.send_nowait(b"+");
    }

    /// Returns the messages, since the last call, on memory whose process has ended.
    pub(crate) fn take_notes(&self) -> Vec<String> {
        self.list.orphans.take_notes()
    }
}

/// Holds that the process's limit on descriptors allows: each takes two.
fn most() -> usize {
    let files =
        rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1024);
    (files / 8) as usize
}

/// The thread that waits for the connections.
fn look_after(list: &HoldList, woken: &Conn) {
    loop {
        let holds = list.holds();
        let mut polls: Vec<libc::pollfd> = std::iter::once(woken.as_fd())
            // A closed connection would be readable for ever.
            .chain(holds.iter().filter(|hold| !hold.is_ending).map(|hold| hold.conn.as_fd()))
            .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 })
            .collect();
        let timeout = if holds.iter().any(|hold| hold.is_ending) {
            POLL_INTERVAL.as_millis() as i32
        } else {
            -1
        };
        drop(holds);
        // SAFETY: the array is this thread's own and as long as said.
        unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout) };
        if polls[0].revents != 0
            && !woken.recv(&mut [0u8; 8], &mut []).is_ok_and(|(length, _)| length > 0)
        {
            return;
        }
        let is_ready = |conn: &Conn| {
            let fd = conn.as_fd();
            // The number may be that of a connection which was closed meanwhile.
            polls.iter().any(|poll| poll.fd == fd.as_raw_fd() && poll.revents != 0)
                && poll_readable(&[fd], Some(Duration::ZERO)) != Ok(0)
        };
        let mut holds = list.holds();
        let detached = holds.extract_if(.., |hold| {
            if hold.is_ending || !is_ready(&hold.conn) {
                return false;
            }
            // Nothing is received: what came with it is dropped with the connection.
            match hold.conn.peek() {
                Ok(length) if length > 0 => return true,
                Err(Errno::AGAIN) => {}
                _ => hold.is_ending = true,
            }
            false
        });
        let detached: Vec<Hold> = detached.collect();
        let mut ending: Vec<u32> =
            holds.iter().filter(|hold| hold.is_ending).map(|hold| hold.pid).collect();
        drop(holds);
        drop(detached);
        ending.retain(|pid| !is_killed(*pid));
        let released = |hold: &mut Hold| hold.is_ending && ending.contains(&hold.pid);
        let mut holds = list.holds();
        let released: Vec<Hold> = holds.extract_if(.., released).collect();
        let mut rest = Vec::new();
        for Hold { pid, uffd, conn, .. } in released {
            // On that list before it is missing on this one: `Holds::add` looks at both.
            rest.push((list.orphans.add(pid, Uffd::from_fd(uffd), most()), conn));
        }
        drop(holds);
        drop(rest);
    }
}

/// True while a thread of the process has SIGKILL pending: it may be in a system call.
///
/// The kernel's list of threads ends early where one of them ends while it is read. No thread is
/// made meanwhile, for all are killed: so a list is whole if it is as long as the number of threads
/// that was read before.
fn is_killed(pid: u32) -> bool {
    let status = match std::fs::read_to_string(format!("/proc/{pid}/status")) {
        Ok(status) => status,
        // Where there is no descriptor or memory left, it is asked again.
        Err(error) => {
            return matches!(
                error.raw_os_error(),
                Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EINTR)
            );
        }
    };
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    let tasks: Vec<_> = tasks.filter_map(Result::ok).collect();
    let threads = value(&status, "Threads:").and_then(|threads| threads.parse::<usize>().ok());
    threads != Some(tasks.len())
        || tasks
            .iter()
            .filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok())
            .any(|status| is_pending(&status))
}

fn value<'s>(status: &'s str, name: &str) -> Option<&'s str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// The same of the thread's status. One that has ended may have it pending for good.
fn is_pending(status: &str) -> bool {
    let has_ended = value(status, "State:").is_some_and(|state| state.starts_with(['Z', 'X']));
    let signals = value(status, "SigPnd:")
        .and_then(|signals| u64::from_str_radix(signals, 16).ok())
        .unwrap_or(0);
    !has_ended && signals >> (libc::SIGKILL - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{PipeReader, Read};

    /// A descriptor of which it can be told whether it is still held.
    pub(super) fn held() -> (PipeReader, OwnedFd) {
        let (reader, writer) = std::io::pipe().expect("pipe");
        (reader, writer.into())
    }

    #[test]
    fn holds_close_on_request_or_when_no_thread_is_being_killed() {
        let holds = Holds::default();
        for says_so in [true, false] {
            let (mut reader, writer) = held();
            let (ours, theirs) = Conn::pair().expect("pair");
            holds.add(std::process::id(), ClientConn::new(theirs), writer);
            if says_so {
                ours.send(b"-", &[]).expect("send");
                // It hangs up when the descriptor is closed. What was said is not received.
                assert_eq!(ours.recv(&mut [0u8; 8], &mut []), Err(Errno::CONNRESET));
            } else {
                drop(ours);
            }
            assert_eq!(reader.read(&mut [0u8; 1]).expect("read"), 0, "it is closed");
        }
    }

    #[test]
    fn holds_per_process_are_bounded() {
        let holds = Holds::default();
        let all: Vec<_> = (0..MAX_HOLDS_PER_PROCESS + 1)
            .map(|_| {
                let (reader, writer) = held();
                let (ours, theirs) = Conn::pair().expect("pair");
                holds.add(1, ClientConn::new(theirs), writer);
                (reader, ours)
            })
            .collect();
        // The last one is closed at once, the others when their connections end.
        let mut last = all.last().expect("one").0.try_clone().expect("clone");
        assert_eq!(last.read(&mut [0u8; 1]).expect("read"), 0);
    }

    #[test]
    fn a_killed_thread_is_known_until_it_has_ended() {
        let status = |state: &str, signals: &str| {
            format!("Name:\tx\nState:\t{state}\nSigPnd:\t{signals}\nShdPnd:\t0\n")
        };
        assert!(is_pending(&status("R (running)", "0000000000000100")));
        assert!(is_pending(&status("D (disk sleep)", "0000000000000180")));
        assert!(!is_pending(&status("R (running)", "0000000000000080")));
        assert!(!is_pending(&status("Z (zombie)", "0000000000000100")));
        assert!(!is_pending(""));
    }
}
