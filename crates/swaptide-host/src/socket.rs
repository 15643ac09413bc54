//! The socket on which the processes of a run ask for what they share.
//!
//! Owns the listener and the answers to [`Request`]s: a byte in, the same byte and a descriptor out, both hang up. Whoever is
//! neither of the supervisor's user nor of its tree gets nothing. What concerns one process is given for the asking process alone.
//!
//! Locks: none.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use swaptide_ipc::shared::SHARED_FEATURES;
use swaptide_ipc::{AreaId, Request};
use swaptide_sys::Errno;
use swaptide_sys::affinity::go_normally;
use swaptide_sys::sock::{Conn, Listener, poll_readable};
use swaptide_sys::uffd::{Features, Uffd};

use crate::areas::Open;
use crate::doctor::REQUIRED;
use crate::followed::Followed;
use crate::holds::Holds;
use crate::shared::Shared;
use crate::tree::descends;

/// A client sends its byte right after it connects; one that does not is not waited for. Long enough for one that lost its turn on
/// a busy machine in between.
const PATIENCE: Duration = Duration::from_secs(1);

/// The socket.
pub struct Counter {
    listener: Listener,
    name: String,
    supervisor: u32,
    holds: Holds,
}

impl Counter {
    /// Opens the socket under a name that nobody can guess.
    ///
    /// # Errors
    /// What the kernel answers.
    pub fn open() -> Result<Counter, Errno> {
        let mut random = [0u8; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let name = format!("swaptide-{:032x}", u128::from_le_bytes(random));
        let listener = Listener::bind_abstract(name.as_bytes())?;
        listener.set_nonblocking(true)?;
        Ok(Counter { listener, name, supervisor: std::process::id(), holds: Holds::default() })
    }

    /// The name for the environment of the tree.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Serves everybody who waits; answers with the processes that asked for the segment.
    pub fn serve(&self, segment: &OwnedFd, areas: &Arc<dyn Open>, shared: Option<&Shared>, followed: &mut Followed) -> Vec<u32> {
        let mut joined = Vec::new();
        while let Ok((client, peer)) = self.listener.accept() {
            let ours = peer.uid == rustix::process::geteuid().as_raw() || descends(peer.pid, self.supervisor);
            // A client that is not ours is hung up on, as is one that hung up or asks for nothing that there is.
            if ours && let Some(Request::Segment) = answer(client, peer.pid, segment, areas, shared, followed, &self.holds) {
                joined.push(peer.pid);
            }
        }
        joined
    }
}

impl AsFd for Counter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

fn answer(
    client: Conn,
    pid: u32,
    segment: &OwnedFd,
    areas: &Arc<dyn Open>,
    shared: Option<&Shared>,
    followed: &mut Followed,
    holds: &Holds,
) -> Option<Request> {
    if poll_readable(&[client.as_fd()], Some(PATIENCE)).ok()? == 0 {
        return None;
    }
    let mut message = [0u8; 32];
    let mut fds = [None];
    let (length, _) = client.recv(&mut message, &mut fds).ok()?;
    let request = Request::from_byte(message[0])?;
    let [fd] = fds;
    let may_have_fd = matches!(request, Request::Handshake | Request::Attach | Request::Hold);
    if length != 1 + request.body()
        || fd.is_some() && !may_have_fd
        || fd.is_none() && matches!(request, Request::Handshake | Request::Hold)
    {
        return None;
    }
    if request == Request::Fork {
        followed.begin(client, pid, &message[1..length])?;
        return Some(request);
    }
    if request == Request::Hold {
        holds.add(pid, client, fd.filter(is_userfaultfd)?);
        return Some(request);
    }
    if request.is_shared() {
        shared?.serve(request, &message[1..length], fd, client, pid);
        return Some(request);
    }
    let opened;
    let descriptor = match request {
        Request::Segment => segment.as_fd(),
        Request::Area if areas.is_far(AreaId(message[1])) => {
            let areas = Arc::clone(areas);
            let open = move || {
                // What it starts (the pumps of a connection with TLS) is work, and no look.
                go_normally();
                if let Some(fd) = areas.open(AreaId(message[1])) {
                    // Who asked may have gone.
                    let _ = client.send(&message[..1], &[fd.as_fd()]);
                }
            };
            std::thread::Builder::new().name("dial".into()).spawn(open).ok()?;
            return Some(request);
        }
        Request::Area => {
            opened = areas.open(AreaId(message[1]))?;
            opened.as_fd()
        }
        Request::Device => {
            opened = OwnedFd::from(File::options().read(true).write(true).open("/dev/userfaultfd").ok()?);
            opened.as_fd()
        }
        Request::Pagemap | Request::Maps | Request::Statm => {
            opened = of_process(pid, request)?;
            opened.as_fd()
        }
        Request::Identity => {
            let mut reply = [message[0], 0, 0, 0, 0];
            reply[1..].copy_from_slice(&pid.to_le_bytes());
            client.send(&reply, &[]).ok()?;
            return Some(request);
        }
        Request::Handshake => {
            vouch(fd?, u64::from_le_bytes(message[1..9].try_into().ok()?))?;
            client.send(&message[..1], &[]).ok()?;
            return Some(request);
        }
        Request::Fork | Request::Region | Request::Attach | Request::Guard | Request::Advise | Request::Hold => return None,
    };
    client.send(&message[..1], &[descriptor]).ok()?;
    Some(request)
}

/// A file of a client's directory in /proc, for the client.
fn of_process(pid: u32, request: Request) -> Option<OwnedFd> {
    let name = match request {
        Request::Pagemap => "pagemap",
        Request::Maps => "maps",
        _ => "statm",
    };
    without_physical_numbers(|| File::open(format!("/proc/{pid}/{name}")).ok().map(OwnedFd::from))
}

/// Who opens a page map decides whether it shows physical page numbers, which are not for everybody.
fn without_physical_numbers<T>(open: impl FnOnce() -> T) -> T {
    let before = capabilities(None);
    if let Ok(sets) = before {
        // Refused, it has not the capability in the first place.
        let _ = set_capabilities(None, CapabilitySets { effective: sets.effective - CapabilitySet::SYS_ADMIN, ..sets });
    }
    let opened = open();
    if let Ok(sets) = before {
        let _ = set_capabilities(None, sets);
    }
    opened
}

fn is_userfaultfd(fd: &OwnedFd) -> bool {
    let what = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    what.is_ok_and(|what| what.as_os_str() == "anon_inode:[userfaultfd]")
}

/// Asks the kernel for what every engine needs, on a userfaultfd of a client's that has no right to it itself. Nothing else is asked for, and
/// of nothing else.
fn vouch(fd: OwnedFd, features: u64) -> Option<()> {
    let known = is_userfaultfd(&fd) && (REQUIRED.contains(Features(features)) || SHARED_FEATURES.contains(Features(features)));
    known.then(|| Uffd::from_fd(fd).vouch(Features(features)).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::areas::Areas;

    fn ask(counter: &Counter, request: &[u8], segment: &OwnedFd, areas: &Arc<dyn Open>) -> (Vec<u32>, Option<OwnedFd>) {
        let client = Conn::connect_abstract(counter.name().as_bytes()).expect("connect");
        client.send(request, &[]).expect("send");
        let joined = counter.serve(segment, areas, None, &mut Followed::default());
        let (mut reply, mut fds) = ([0u8; 1], [None]);
        match client.recv(&mut reply, &mut fds) {
            Ok((1, 1)) if reply == request[..1] => (joined, fds[0].take()),
            _ => (joined, None),
        }
    }

    #[test]
    fn the_segment_and_the_file_are_handed_out_and_nothing_else() {
        let counter = Counter::open().expect("socket");
        let segment = swaptide_sys::mem::memfd_create(c"test", 12288).expect("memfd");
        let none: Arc<dyn Open> = Arc::new(Areas::new(crate::testing::segment()));
        let areas = Arc::new(Areas::new(crate::testing::segment()));
        let file = crate::device::parse("file:/tmp:16M").expect("a device");
        areas.add(crate::device::open_beyond(&file, 1 << 30).expect("a file")).expect("an area");
        let areas: Arc<dyn Open> = areas;
        let (joined, fd) = ask(&counter, b"S", &segment, &areas);
        assert_eq!(joined, [std::process::id()]);
        let received = File::from(fd.expect("the segment"));
        assert_eq!(received.metadata().expect("metadata").len(), 12288);
        assert_ne!(received.as_raw_fd(), segment.as_raw_fd());
        let (joined, fd) = ask(&counter, b"A\0", &segment, &areas);
        assert!(joined.is_empty() && fd.is_some());
        assert!(ask(&counter, b"A\0", &segment, &none).1.is_none(), "there is no area");
        for bad in [&b"A\x01"[..], b"A\xff", b"A", b"?"] {
            assert!(ask(&counter, bad, &segment, &areas).1.is_none(), "no such area, or no request");
        }
    }

    #[test]
    fn what_concerns_a_process_is_given_for_the_one_that_asks() {
        let counter = Counter::open().expect("socket");
        let segment = swaptide_sys::mem::memfd_create(c"test", 4096).expect("memfd");
        let client = Conn::connect_abstract(counter.name().as_bytes()).expect("connect");
        client.send(b"I", &[]).expect("send");
        let areas: Arc<dyn Open> = Arc::new(Areas::new(crate::testing::segment()));
        counter.serve(&segment, &areas, None, &mut Followed::default());
        let mut reply = [0u8; 8];
        assert_eq!(client.recv(&mut reply, &mut []).expect("reply"), (5, 0));
        assert_eq!(reply[1..5], std::process::id().to_le_bytes());
        for (byte, name) in [(b"P", "pagemap"), (b"M", "maps"), (b"T", "statm")] {
            let fd = ask(&counter, byte, &segment, &areas).1.expect("a file of this process");
            let path = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("link");
            assert_eq!(path, std::path::PathBuf::from(format!("/proc/{}/{name}", std::process::id())));
        }
        // The rights of this thread are what they were.
        let sets = capabilities(None).expect("capabilities");
        assert!(!sets.permitted.contains(CapabilitySet::SYS_ADMIN) || sets.effective.contains(CapabilitySet::SYS_ADMIN));
    }

    #[test]
    fn the_supervisor_vouches_for_userfaultfds_and_for_what_is_needed_only() {
        let file = OwnedFd::from(tempfile());
        assert!(vouch(file, 0).is_none(), "a file");
        // SAFETY: the call only makes a descriptor.
        let fresh = || unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
            assert!(fd >= 0, "userfaultfd is needed for this test");
            std::os::fd::FromRawFd::from_raw_fd(fd as i32)
        };
        assert!(vouch(fresh(), Features::SIGBUS.0).is_none(), "a feature that no engine needs");
        assert!(vouch(fresh(), REQUIRED.0).is_some());
    }

    #[test]
    fn a_client_that_says_nothing_does_not_stop_the_others() {
        let counter = Counter::open().expect("socket");
        let segment = swaptide_sys::mem::memfd_create(c"test", 4096).expect("memfd");
        let _silent = Conn::connect_abstract(counter.name().as_bytes()).expect("connect");
        let areas: Arc<dyn Open> = Arc::new(Areas::new(crate::testing::segment()));
        assert!(ask(&counter, b"S", &segment, &areas).1.is_some());
    }

    fn tempfile() -> File {
        let scratch = crate::testing::Scratch::new("socket");
        let path = scratch.path("file");
        File::options().read(true).write(true).create_new(true).open(path).expect("file")
    }
}
