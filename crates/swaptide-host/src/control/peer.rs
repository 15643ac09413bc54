//! The peer at the run's socket, as the kernel reports it.
//!
//! Owns the identity of one client: its number, its user, and a descriptor or a start time that
//! tells whether the number still means the process that connected. All services of the socket that
//! open something of a process go through here.
//!
//! A number alone is not enough: a process can connect, give the connection to a child and execute
//! a set-uid program, and then its number means that program. So:
//!
//! Invariants
//! 1. A peer descends from the supervisor. One in a pid namespace that is not below the
//!    supervisor's has number 0, and is refused; so is one that merely has the same user.
//! 2. A request comes from the process that connected, by the credentials of its packet.
//! 3. A file of a process is handed out only if, after it was opened, the process is the one that
//!    connected, all of its user ids are ids that the sender had (or the sender is of the
//!    supervisor's user), and it does not execute a set-uid, set-gid or file-capability program
//!    (`AT_SECURE`). The file is of the memory that the process had when it was opened, so a later
//!    exec shows nothing.
//!
//! Locks: none.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use swaptide_sys::process::{pidfd_open, start_time};
use swaptide_sys::sock::{Conn, Sender, poll_readable};

use crate::memctl::processes::descends;

/// In the auxiliary vector: not 0 where the program has other rights than the process that executed
/// it.
const AT_SECURE: u64 = 23;

/// A client.
pub struct Peer {
    /// Its process id.
    pub pid: u32,
    /// Its effective user id when it connected.
    pub uid: u32,
    pidfd: OwnedFd,
    start: u64,
}

impl Peer {
    /// The peer, if it is `supervisor` itself or descends from it, and lives.
    pub fn of(conn: &Conn, supervisor: u32) -> Option<Peer> {
        let cred = conn.peer().ok()?;
        // Before Linux 6.5 the number may have passed to another process since it connected; the
        // packet's sender is compared.
        let pidfd = conn.peer_pidfd().or_else(|_| pidfd_open(cred.pid)).ok()?;
        if cred.pid == 0 || (cred.pid != supervisor && !descends(cred.pid, supervisor)) {
            return None;
        }
        let peer = Peer { pid: cred.pid, uid: cred.uid, pidfd, start: start_time(cred.pid)? };
        peer.lives().then_some(peer)
    }

    /// Whether it has sent this packet itself.
    pub fn has_sent(&self, sender: Option<Sender>) -> bool {
        sender.is_some_and(|sender| sender.pid == self.pid)
    }

    fn lives(&self) -> bool {
        poll_readable(&[self.pidfd.as_fd()], Some(Duration::ZERO)) == Ok(0)
    }

    /// Whether it and `sender` are of this user, whatever else they may be.
    pub fn is_of(&self, user: u32, sender: Option<Sender>) -> bool {
        self.uid == user && sender.is_some_and(|sender| sender.uid == user)
    }

    /// A file of its directory in /proc, opened with the supervisor's rights (invariant 3).
    pub fn open(&self, name: &str, sender: Sender) -> Option<OwnedFd> {
        let pid = self.pid;
        let file = without_physical_numbers(|| File::open(format!("/proc/{pid}/{name}")).ok())?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let mut uids =
            status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_ascii_whitespace();
        // A thread that keeps the supervisor's user while its process has dropped it (as an
        // engine's does) has all rights itself.
        let as_supervisor = self.is_of(rustix::process::geteuid().as_raw(), Some(sender));
        let same_user = as_supervisor
            || uids.all(|uid| uid.parse() == Ok(self.uid) || uid.parse() == Ok(sender.uid));
        // What everybody may read is told of everybody.
        let ordinary = name == "statm"
            || std::fs::read(format!("/proc/{pid}/auxv")).is_ok_and(|auxv| !is_secure(&auxv));
        let same_process = start_time(pid) == Some(self.start) && self.lives();
        (same_user && ordinary && same_process).then(|| file.into())
    }
}

/// Whether an auxiliary vector says that its program has rights of its own; so does one that says
/// nothing.
fn is_secure(auxv: &[u8]) -> bool {
    let words = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
    let mut pairs = auxv.chunks_exact(16).map(|pair| (words(&pair[..8]), words(&pair[8..])));
    pairs.find(|(key, _)| *key == AT_SECURE).is_none_or(|(_, value)| value != 0)
}

/// The process that opens a page map decides whether it shows physical page numbers, which are not
/// for everybody.
fn without_physical_numbers<T>(open: impl FnOnce() -> T) -> T {
    let before = capabilities(None);
    if let Ok(sets) = before {
        // Refused, it has not the capability in the first place.
        let _ = set_capabilities(
            None,
            CapabilitySets { effective: sets.effective - CapabilitySet::SYS_ADMIN, ..sets },
        );
    }
    let opened = open();
    if let Ok(sets) = before {
        let _ = set_capabilities(None, sets);
    }
    opened
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_sys::sock::Listener;

    fn peer() -> (Peer, Sender, Conn) {
        let (listener, name) = Listener::bind_autogenerated().expect("a socket");
        let client = Conn::connect_abstract(name.as_bytes()).expect("connect");
        let (server, _) = listener.accept().expect("accept");
        let peer = Peer::of(&server, std::process::id()).expect("this process");
        let me = Sender { pid: std::process::id(), uid: rustix::process::getuid().as_raw() };
        (peer, me, client)
    }

    #[test]
    fn files_are_opened_for_the_process_that_connected_and_rights_stay_as_they_were() {
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
        assert!(peer.open("statm", me).is_none(), "the number has passed to another process");
        peer.start -= 1;
        peer.uid = 12345;
        let other = Sender { uid: 12345, ..me };
        assert!(
            peer.open("maps", other).is_none(),
            "the process has rights that the sender has not"
        );
    }

    #[test]
    fn who_does_not_descend_from_the_supervisor_is_refused() {
        let (listener, name) = Listener::bind_autogenerated().expect("a socket");
        let _client = Conn::connect_abstract(name.as_bytes()).expect("connect");
        let (server, _) = listener.accept().expect("accept");
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("sleep");
        assert!(Peer::of(&server, child.id()).is_none());
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
