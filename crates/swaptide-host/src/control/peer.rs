//! The peer at the run's socket, as the kernel reports it.
//!
//! Owns the identity of one client: its pid, its user, and a descriptor or a start time that tells
//! whether the pid still means the process that connected. All services of the socket that
//! concern one process (its files, its forks) go through here.
//!
//! A pid alone is not enough: a process can connect, give the connection to a child and execute a
//! set-uid program, and then its pid means that program. So:
//!
//! Invariants
//! 1. A peer descends from the supervisor, or is one that the supervisor has put the agent into.
//!    One in a pid namespace that is not below the supervisor's has pid 0, and is refused; so is
//!    one that merely has the same user.
//! 2. A request comes from the process that connected, by the credentials of its packet.
//! 3. What is done for a process is done for the one that asked (`Peer::is_unchanged`): it is the
//!    one that connected, all of its user ids are ids that the sender had (or sender and supervisor
//!    are root's), and it does not execute a set-uid, set-gid or file-capability program
//!    (`AT_SECURE`). That is looked at after a file was opened: the file is of the memory that the
//!    process had then, so a later exec shows nothing. A fork is followed only as long as it holds
//!    (see [`fork_tracer`](crate::control::fork_tracer)).
//!
//! Locks: none.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::thread::CapabilitySet;
use swaptide_sys::process::{pidfd_open, start_time};
use swaptide_sys::sock::{Conn, Sender, poll_readable};

use crate::capability::without;
use crate::memctl::processes::descends;

/// In the auxiliary vector: not 0 where the program has other rights than the process that executed
/// it.
const AT_SECURE: u64 = 23;

/// The process at the other end of a connection, held by a pidfd.
pub struct Peer {
    /// Its process id.
    pub pid: u32,
    /// Its effective user id when it connected.
    pub uid: u32,
    pidfd: OwnedFd,
    start: u64,
}

impl Peer {
    /// The peer, if it is `supervisor` itself or descends from it, or is one of those that were
    /// `admitted`, with the times at which they began. It may have ended, until it is reaped.
    pub fn of(conn: &Conn, supervisor: u32, admitted: &[(u32, u64)]) -> Option<Peer> {
        let cred = conn.peer().ok()?;
        // Before Linux 6.5 the pid may have passed to another process since it connected; the
        // packet's sender is compared.
        let pidfd = conn.peer_pidfd().or_else(|_| pidfd_open(cred.pid)).ok()?;
        let pid = cred.pid;
        let start = start_time(pid)?;
        let is_ours =
            || pid == supervisor || admitted.contains(&(pid, start)) || descends(pid, supervisor);
        (pid != 0 && is_ours()).then(|| Peer { pid, uid: cred.uid, pidfd, start })
    }

    /// True if it has sent this packet itself.
    pub(crate) fn has_sent(&self, sender: Option<Sender>) -> bool {
        sender.is_some_and(|sender| sender.pid == self.pid)
    }

    /// True if it has not ended.
    pub(crate) fn lives(&self) -> bool {
        poll_readable(&[self.pidfd.as_fd()], Some(Duration::ZERO)) == Ok(0)
    }

    /// True if it and `sender` are of this user, whatever else they may be.
    pub(crate) fn is_of(&self, user: u32, sender: Option<Sender>) -> bool {
        self.uid == user && sender.is_some_and(|sender| sender.uid == user)
    }

    /// A file of its directory in /proc, opened with the supervisor's rights (invariant 3).
    pub fn open(&self, name: &str, sender: Sender) -> Option<OwnedFd> {
        let pid = self.pid;
        // The process that opens a page map decides whether it shows physical page numbers, which
        // are not for all users.
        let open = || File::open(format!("/proc/{pid}/{name}")).ok();
        let file = without(CapabilitySet::SYS_ADMIN, open)??;
        // Anyone may read statm, so AT_SECURE does not matter.
        let ordinary = name == "statm" || self.is_ordinary(pid);
        (ordinary && self.is_same(pid, sender)).then(|| file.into())
    }

    /// True if the process is still what `sender` asked for (invariant 3); `tid` is the thread of
    /// it that this is about.
    pub(crate) fn is_unchanged(&self, tid: u32, sender: Sender) -> bool {
        self.is_ordinary(tid) && self.is_same(tid, sender)
    }

    /// True if the program of its thread `tid` has no rights but those of the user that executed
    /// it. False where that cannot be read.
    fn is_ordinary(&self, tid: u32) -> bool {
        let auxv = std::fs::read(format!("/proc/{}/task/{tid}/auxv", self.pid));
        auxv.is_ok_and(|auxv| !is_secure(&auxv))
    }

    fn is_same(&self, tid: u32, sender: Sender) -> bool {
        let pid = self.pid;
        // A thread of another process is not there.
        let status = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/status"));
        let status = status.unwrap_or_default();
        let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
        // A thread that keeps root's rights while its process has dropped them, as an engine's
        // does, has all rights itself. A user's thread has not the capabilities of its supervisor.
        let as_supervisor = rustix::process::geteuid().is_root() && self.is_of(0, Some(sender));
        let is_known = |uid: &str| uid.parse() == Ok(self.uid) || uid.parse() == Ok(sender.uid);
        let same_user =
            uids.is_some_and(|uids| as_supervisor || uids.split_ascii_whitespace().all(is_known));
        same_user && start_time(pid) == Some(self.start) && self.lives()
    }
}

/// True if an auxiliary vector says that its program has rights of its own; so does one that says
/// nothing.
fn is_secure(auxv: &[u8]) -> bool {
    let words = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
    let mut pairs = auxv.chunks_exact(16).map(|pair| (words(&pair[..8]), words(&pair[8..])));
    pairs.find(|(key, _)| *key == AT_SECURE).is_none_or(|(_, value)| value != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::capabilities;
    use swaptide_sys::sock::Listener;

    fn peer() -> (Peer, Sender, Conn) {
        let (listener, name) = Listener::bind_autogenerated().expect("a socket");
        let client = Conn::connect_abstract(name.as_bytes()).expect("connect");
        let (server, _) = listener.accept().expect("accept");
        let peer = Peer::of(&server, std::process::id(), &[]).expect("this process");
        let me = Sender { pid: std::process::id(), uid: rustix::process::getuid().as_raw() };
        (peer, me, client)
    }

    #[test]
    fn files_are_opened_for_the_peer_and_rights_are_unchanged() {
        let (peer, me, _client) = peer();
        assert!(peer.has_sent(Some(me)) && !peer.has_sent(None));
        for name in ["maps", "pagemap", "statm"] {
            assert!(peer.open(name, me).is_some(), "{name}");
        }
        let sets = capabilities(None).expect("capabilities");
        assert!(
            !sets.permitted.contains(CapabilitySet::SYS_ADMIN)
                || sets.effective.contains(CapabilitySet::SYS_ADMIN)
        );
    }

    #[test]
    fn another_users_process_and_another_start_are_refused() {
        let (mut peer, me, _client) = peer();
        peer.start += 1;
        assert!(peer.open("statm", me).is_none(), "the pid has passed to another process");
        peer.start -= 1;
        peer.uid = 12345;
        let other = Sender { uid: 12345, ..me };
        assert!(
            peer.open("maps", other).is_none(),
            "the process has rights that the sender has not"
        );
    }

    /// Of a supervisor that is not root's, and may more than its user.
    #[test]
    fn a_process_that_has_become_another_users_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let (mut peer, me, _client) = peer();
        let user = 12345u32;
        peer.uid = user;
        // A thread's own rights: the process, and so what the peer is now, stays root's.
        let open = move || {
            // SAFETY: the call changes the user of this thread alone, which ends below.
            let done = unsafe { libc::syscall(libc::SYS_setresuid, user, user, 0) };
            assert_eq!(done, 0, "setresuid");
            peer.open("statm", Sender { uid: user, ..me }).is_some()
        };
        let opened = std::thread::spawn(open).join().expect("a thread");
        assert!(!opened, "what the supervisor's user has become is not its user's");
    }

    #[test]
    fn a_process_is_what_asked_for_its_own_threads_alone() {
        let (mut peer, me, _client) = peer();
        let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        assert!(peer.is_unchanged(tid, me) && peer.is_unchanged(me.pid, me));
        assert!(!peer.is_unchanged(1, me), "a thread of another process");
        peer.start += 1;
        assert!(!peer.is_unchanged(tid, me), "the pid has passed to another process");
    }

    #[test]
    fn processes_outside_of_the_supervisors_tree_are_refused() {
        let (listener, name) = Listener::bind_autogenerated().expect("a socket");
        let _client = Conn::connect_abstract(name.as_bytes()).expect("connect");
        let (server, _) = listener.accept().expect("accept");
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("sleep");
        assert!(Peer::of(&server, child.id(), &[]).is_none());
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn a_set_uid_program_is_known_by_its_auxiliary_vector() {
        let pair = |key: u64, value: u64| [key.to_ne_bytes(), value.to_ne_bytes()].concat();
        assert!(is_secure(&[]) && is_secure(&pair(3, 0)), "it says nothing");
        assert!(is_secure(&[pair(3, 0), pair(AT_SECURE, 1)].concat()));
        assert!(!is_secure(&[pair(3, 9), pair(AT_SECURE, 0)].concat()));
        assert!(!is_secure(&std::fs::read("/proc/self/auxv").expect("auxv")));
    }
}
