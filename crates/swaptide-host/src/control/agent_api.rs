//! The socket on which the processes of a run ask for what they share.
//!
//! Owns the listener, the clients that have not asked yet, and the answers to [`AgentRequest`]s: a
//! byte in, the same byte and a descriptor out, both hang up. A process that does not descend from
//! the supervisor gets nothing (see [`crate::control::peer`]). What concerns one process is given
//! for the asking process alone. A client that says nothing keeps no other waiting.
//!
//! Locks: the list of connections that are being made, for a look or a change.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use swaptide_ipc::shared::SHARED_FEATURES;
use swaptide_ipc::{AgentRequest, AreaId, INJECTING_SOCKET};
use swaptide_sys::Errno;
use swaptide_sys::affinity::go_normally;
use swaptide_sys::process::start_time;
use swaptide_sys::sock::{Listener, poll_readable};
use swaptide_sys::uffd::{Features, Uffd};

use crate::client_conn::{ClientConn, bounded, close_apart};
use crate::control::REQUIRED;
pub use crate::control::Users;
use crate::control::fork_tracer::TracedForks;
use crate::control::holds::Holds;
use crate::control::peer::Peer;
use crate::memctl::shared_pager::SharedPager;
use crate::swap::areas::AreaOpener;

/// A client sends its byte right after it connects; one that does not is not waited for. Long
/// enough for one that lost its turn on a busy machine in between.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// Clients whose request has not come yet that are kept. More are hung up on, those first that wait
/// longest.
const MAX_WAITING_CLIENTS: usize = 24;

/// The time without accepting clients after descriptors have run out.
const CROWDED_BACKOFF: Duration = Duration::from_millis(5);

/// Connections to servers that are being made at a time for one process (as many as its engine
/// uses), and for all. Each takes a thread and descriptors of the supervisor until the server
/// answers. A request for more is hung up on; the process may ask again.
const MAX_DIALS_PER_PROCESS: usize = 16;
const MAX_DIALS: usize = 32;

/// For which processes connections are being made.
#[derive(Clone, Default)]
struct Dials(Arc<Mutex<Vec<u32>>>);

/// One of them, until it is dropped.
struct Dial {
    pid: u32,
    all: Dials,
}

impl Dials {
    fn pids(&self) -> MutexGuard<'_, Vec<u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, pid: u32) -> Option<Dial> {
        let mut pids = self.pids();
        let of_one = pids.iter().filter(|other| **other == pid).count();
        if of_one >= MAX_DIALS_PER_PROCESS || pids.len() >= MAX_DIALS {
            return None;
        }
        pids.push(pid);
        Some(Dial { pid, all: self.clone() })
    }
}

impl Drop for Dial {
    fn drop(&mut self) {
        let mut pids = self.all.pids();
        if let Some(at) = pids.iter().position(|pid| *pid == self.pid) {
            pids.swap_remove(at);
        }
    }
}

/// The socket.
pub struct AgentServer {
    listener: Listener,
    name: String,
    supervisor: u32,
    /// Processes that were attached to, and when they began.
    admitted: Vec<(u32, u64)>,
    holds: Holds,
    users: Users,
    waiting: Vec<Waiting>,
    dials: Dials,
    /// Processes that are about to execute a program, or start one that does.
    announced: Vec<u32>,
    /// Filters of forks, and the words that there is one: not answered yet.
    filters: RefCell<Vec<NewFilter>>,
    injects: bool,
}

/// A process has set a filter of forks, or found that there is one.
pub struct NewFilter {
    pub(crate) pid: u32,
    pub(crate) filter: Option<OwnedFd>,
    /// The answer to it says that the supervisor reads it: the process may be managed.
    pub(crate) client: ClientConn,
}

/// A client that has connected and said nothing yet.
struct Waiting {
    client: ClientConn,
    peer: Peer,
    since: Instant,
}

impl AgentServer {
    /// Opens the socket under a name that cannot be guessed. `injects`: the agent is put into
    /// programs that load no library. `is_told`: processes say when they execute a program.
    ///
    /// # Errors
    /// What the kernel answers.
    pub fn open(users: Users, injects: bool, is_told: bool) -> Result<AgentServer, Errno> {
        let mut random = [0u8; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let prefix = if is_told { INJECTING_SOCKET } else { "swaptide-" };
        let name = format!("{prefix}{:032x}", u128::from_le_bytes(random));
        let listener = Listener::bind_abstract(name.as_bytes())?;
        listener.set_nonblocking(true)?;
        listener.want_senders()?;
        Ok(AgentServer {
            listener,
            name,
            supervisor: std::process::id(),
            admitted: Vec::new(),
            users,
            waiting: Vec::new(),
            dials: Dials::default(),
            holds: Holds::default(),
            announced: Vec::new(),
            filters: RefCell::default(),
            injects,
        })
    }

    /// A process that the agent was put into is served, whatever it descends from.
    pub(crate) fn admit(&mut self, pid: u32) {
        self.admitted.retain(|(pid, start)| start_time(*pid) == Some(*start));
        self.admitted.extend(start_time(pid).map(|start| (pid, start)));
    }

    /// The filters of forks since the last call, each to be answered.
    pub fn take_filters(&self) -> Vec<NewFilter> {
        self.filters.take()
    }

    /// The processes that have said since the last call that they are about to execute a program,
    /// or start one that does.
    pub(crate) fn take_announced(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.announced)
    }

    /// Returns the messages since the last call.
    pub(crate) fn take_notes(&self) -> Vec<String> {
        self.holds.take_notes()
    }

    /// The name for the environment of the tree.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the descriptors that become readable when a client waits to be served.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.waiting.iter().map(|waiting| waiting.client.as_fd())
    }

    /// Returns the time until a client has waited too long.
    pub fn timeout(&self) -> Option<Duration> {
        self.waiting
            .iter()
            .map(|waiting| REQUEST_TIMEOUT.saturating_sub(waiting.since.elapsed()))
            .min()
    }

    /// Serves all requests; returns the processes that asked for the segment. Waits
    /// for none.
    pub fn serve(
        &mut self,
        segment: &OwnedFd,
        areas: &Arc<dyn AreaOpener>,
        shared: Option<&SharedPager>,
        followed: &mut TracedForks,
    ) -> Vec<u32> {
        // No more at a time, so that a client that connects again and again does not keep the
        // supervisor from everything else.
        for _ in 0..MAX_WAITING_CLIENTS {
            let client = match self.listener.accept() {
                Ok((client, _)) => client,
                Err(errno) => {
                    if errno != Errno::AGAIN {
                        // There is no descriptor for it, and a client that waits would wake this
                        // thread again at once.
                        std::thread::sleep(CROWDED_BACKOFF);
                    }
                    break;
                }
            };
            let client = ClientConn::new(client);
            // One that is not ours is hung up on.
            let Some(peer) = Peer::of(&client, self.supervisor, &self.admitted) else { continue };
            if self.waiting.len() == MAX_WAITING_CLIENTS {
                self.waiting.remove(0);
            }
            self.waiting.push(Waiting { client, peer, since: Instant::now() });
        }
        let mut joined = Vec::new();
        for waiting in std::mem::take(&mut self.waiting) {
            match poll_readable(&[waiting.client.as_fd()], Some(Duration::ZERO)) {
                Ok(0) if waiting.since.elapsed() < REQUEST_TIMEOUT => self.waiting.push(waiting),
                Ok(0) | Err(_) => {}
                // So is one that hung up or asks for nothing that there is.
                Ok(_) => {
                    let pid = waiting.peer.pid;
                    let request =
                        self.answer(waiting.client, waiting.peer, segment, areas, shared, followed);
                    match request {
                        Some(AgentRequest::Segment) => joined.push(pid),
                        Some(AgentRequest::Exec) => self.announced.push(pid),
                        _ => {}
                    }
                }
            }
        }
        joined
    }
}

impl AsFd for AgentServer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl AgentServer {
    /// Keeps the descriptor that came with a request.
    fn keep(
        &self,
        request: AgentRequest,
        client: ClientConn,
        pid: u32,
        fd: ReceivedFd,
    ) -> Option<AgentRequest> {
        if request == AgentRequest::Hold {
            let uffd = fd.userfaultfd()?;
            // It waits for this; by the time it continues, the descriptor is on the list.
            let _ = client.send(&[request as u8], &[]);
            self.holds.add(pid, client, uffd);
        } else if self.injects {
            let filter = if fd.0.is_some() { Some(fd.fork_filter()?) } else { None };
            self.filters.borrow_mut().push(NewFilter { pid, filter, client });
        }
        Some(request)
    }

    fn answer(
        &self,
        client: ClientConn,
        peer: Peer,
        segment: &OwnedFd,
        areas: &Arc<dyn AreaOpener>,
        shared: Option<&SharedPager>,
        followed: &mut TracedForks,
    ) -> Option<AgentRequest> {
        let mut message = [0u8; 32];
        let mut fds = [None];
        let (length, _, sender) = bounded(|| client.recv_from(&mut message, &mut fds)).ok()?;
        let [fd] = fds;
        let fd = ReceivedFd(fd);
        if !peer.has_sent(sender) {
            return None;
        }
        let pid = peer.pid;
        let own_user = peer.is_of(rustix::process::geteuid().as_raw(), sender);
        let request = AgentRequest::from_byte(message[0])?;
        // A process that has ended may only ask that what it has sent is held for it.
        if request != AgentRequest::Hold && !peer.lives() {
            return None;
        }
        if matches!(request, AgentRequest::Device | AgentRequest::Handshake)
            && self.users == Users::SameUser
            && !own_user
        {
            return None;
        }
        if length != 1 + request.body()
            || fd.0.is_some() && !request.may_have_descriptor()
            || fd.0.is_none() && matches!(request, AgentRequest::Handshake | AgentRequest::Hold)
        {
            return None;
        }
        if request == AgentRequest::Fork {
            followed.begin(client, peer, sender?, &message[1..length])?;
            return Some(request);
        }
        if matches!(request, AgentRequest::Hold | AgentRequest::Filter) {
            return self.keep(request, client, pid, fd);
        }
        if request.is_shared() {
            let fd = if fd.0.is_some() { Some(fd.userfaultfd()?) } else { None };
            shared?.serve(request, &message[1..length], fd, client.into_inner(), pid);
            return Some(request);
        }
        match request {
            AgentRequest::Segment => {
                client.send(&message[..1], &[segment.as_fd()]).ok()?;
            }
            AgentRequest::Area if areas.may_block(AreaId(message[1])) => {
                let dial = self.dials.begin(pid)?;
                open_in_thread(client, Arc::clone(areas), AreaId(message[1]), dial)?;
            }
            AgentRequest::Area => {
                let opened = areas.open(AreaId(message[1])).ok()?;
                client.send(&message[..1], &[opened.as_fd()]).ok()?;
            }
            AgentRequest::Device => {
                let opened =
                    File::options().read(true).write(true).open("/dev/userfaultfd").ok()?;
                client.send(&message[..1], &[opened.as_fd()]).ok()?;
            }
            AgentRequest::Pagemap | AgentRequest::Maps | AgentRequest::Statm => {
                let name = match request {
                    AgentRequest::Pagemap => "pagemap",
                    AgentRequest::Maps => "maps",
                    _ => "statm",
                };
                let opened = peer.open(name, sender?)?;
                client.send(&message[..1], &[opened.as_fd()]).ok()?;
            }
            AgentRequest::Identity => {
                let mut reply = [message[0], 0, 0, 0, 0];
                reply[1..].copy_from_slice(&pid.to_le_bytes());
                client.send(&reply, &[]).ok()?;
            }
            AgentRequest::Handshake => {
                let features = u64::from_le_bytes(message[1..9].try_into().ok()?);
                complete_api(fd.userfaultfd()?, features)?;
                client.send(&message[..1], &[]).ok()?;
            }
            AgentRequest::Exec => {}
            AgentRequest::Fork
            | AgentRequest::Region
            | AgentRequest::Attach
            | AgentRequest::Guard
            | AgentRequest::Advise
            | AgentRequest::Filter
            | AgentRequest::Hold => return None,
        }
        Some(request)
    }
}

/// Opens an area that may take its time, and sends it when it is open.
fn open_in_thread(
    client: ClientConn,
    areas: Arc<dyn AreaOpener>,
    id: AreaId,
    dial: Dial,
) -> Option<()> {
    let open = move || {
        let _dial = dial;
        // What it starts (the pumps of a connection with TLS) is work, and no look.
        go_normally();
        if let Ok(fd) = areas.open(id) {
            // The client may have gone.
            let _ = client.send(&[AgentRequest::Area as u8], &[fd.as_fd()]);
        }
    };
    std::thread::Builder::new().name("dial".into()).spawn(open).ok().map(drop)
}

/// What came with a request. Only userfaultfds and filters of forks are of use: anything else is
/// closed by a thread that no other waits for.
struct ReceivedFd(Option<OwnedFd>);

impl ReceivedFd {
    fn userfaultfd(mut self) -> Option<OwnedFd> {
        if self.0.as_ref().is_some_and(is_userfaultfd) { self.0.take() } else { None }
    }

    fn fork_filter(mut self) -> Option<OwnedFd> {
        let is_filter = |fd: &OwnedFd| is_anonymous(fd, "seccomp notify");
        if self.0.as_ref().is_some_and(is_filter) { self.0.take() } else { None }
    }
}

impl Drop for ReceivedFd {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(close_apart);
    }
}

fn is_userfaultfd(fd: &OwnedFd) -> bool {
    is_anonymous(fd, "[userfaultfd]")
}

/// True for a descriptor without a file, of that kind.
fn is_anonymous(fd: &OwnedFd, kind: &str) -> bool {
    let what = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok();
    let what = what.as_deref().and_then(Path::to_str);
    what.and_then(|what| what.strip_prefix("anon_inode:")) == Some(kind)
}

/// Asks the kernel for what every engine needs, on a userfaultfd of a client's that has no right to
/// it itself. Nothing else is asked for, and of nothing else.
fn complete_api(fd: OwnedFd, features: u64) -> Option<()> {
    let features = Features::from_bits_retain(features);
    let known =
        is_userfaultfd(&fd) && (REQUIRED.contains(features) || SHARED_FEATURES.contains(features));
    known.then(|| Uffd::from_fd(fd).complete_api(features).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client_conn::tests::{assert_quick, lingering};
    use crate::swap::areas::Areas;
    use swaptide_sys::sock::Conn;

    fn ask(
        counter: &mut AgentServer,
        request: &[u8],
        segment: &OwnedFd,
        areas: &Arc<dyn AreaOpener>,
    ) -> (Vec<u32>, Option<OwnedFd>) {
        let client = Conn::connect_abstract(counter.name().as_bytes()).expect("connect");
        client.send(request, &[]).expect("send");
        let joined = counter.serve(segment, areas, None, &mut TracedForks::default());
        let (mut reply, mut fds) = ([0u8; 1], [None]);
        match client.recv(&mut reply, &mut fds) {
            Ok((1, 1)) if reply == request[..1] => (joined, fds[0].take()),
            _ => (joined, None),
        }
    }

    #[test]
    fn the_segment_and_the_file_are_handed_out_and_nothing_else() {
        let mut counter = AgentServer::open(Users::All, false, false).expect("socket");
        let segment = swaptide_sys::mem::memfd_create(c"test", 12288).expect("memfd");
        let none: Arc<dyn AreaOpener> = Arc::new(Areas::new(crate::testing::segment()));
        let areas = Arc::new(Areas::new(crate::testing::segment()));
        let file = crate::swap::spec::parse("file:/tmp:16M").expect("a device");
        areas
            .add(crate::swap::spec::open_backing(&file, 1 << 30).expect("a file"))
            .expect("an area");
        let areas: Arc<dyn AreaOpener> = areas;
        let (joined, fd) = ask(&mut counter, b"S", &segment, &areas);
        assert_eq!(joined, [std::process::id()]);
        let received = File::from(fd.expect("the segment"));
        assert_eq!(received.metadata().expect("metadata").len(), 12288);
        assert_ne!(received.as_raw_fd(), segment.as_raw_fd());
        let (joined, fd) = ask(&mut counter, b"A\0", &segment, &areas);
        assert!(joined.is_empty() && fd.is_some());
        assert!(ask(&mut counter, b"A\0", &segment, &none).1.is_none(), "there is no area");
        for bad in [&b"A\x01"[..], b"A\xff", b"A", b"?", b"L"] {
            assert!(
                ask(&mut counter, bad, &segment, &areas).1.is_none(),
                "no such area, or no request"
            );
        }
        assert!(counter.take_filters().is_empty(), "nothing is kept that nothing takes");
    }

    #[test]
    fn what_concerns_a_process_is_given_for_the_one_that_asks() {
        let mut counter = AgentServer::open(Users::All, false, false).expect("socket");
        let segment = swaptide_sys::mem::memfd_create(c"test", 4096).expect("memfd");
        let client = Conn::connect_abstract(counter.name().as_bytes()).expect("connect");
        client.send(b"I", &[]).expect("send");
        let areas: Arc<dyn AreaOpener> = Arc::new(Areas::new(crate::testing::segment()));
        counter.serve(&segment, &areas, None, &mut TracedForks::default());
        let mut reply = [0u8; 8];
        assert_eq!(client.recv(&mut reply, &mut []).expect("reply"), (5, 0));
        assert_eq!(reply[1..5], std::process::id().to_le_bytes());
        for (byte, name) in [(b"P", "pagemap"), (b"M", "maps"), (b"T", "statm")] {
            let fd = ask(&mut counter, byte, &segment, &areas).1.expect("a file of this process");
            let path =
                std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("link");
            assert_eq!(
                path,
                std::path::PathBuf::from(format!("/proc/{}/{name}", std::process::id()))
            );
        }
    }

    #[test]
    fn only_fresh_userfaultfds_with_needed_features_are_completed() {
        let file = OwnedFd::from(tempfile());
        assert!(complete_api(file, 0).is_none(), "a file");
        // SAFETY: the call only makes a descriptor.
        let fresh = || unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
            assert!(fd >= 0, "userfaultfd is needed for this test");
            std::os::fd::FromRawFd::from_raw_fd(fd as i32)
        };
        assert!(
            complete_api(fresh(), Features::SIGBUS.bits()).is_none(),
            "a feature that no engine needs"
        );
        assert!(complete_api(fresh(), REQUIRED.bits()).is_some());
    }

    #[test]
    fn a_client_that_says_nothing_does_not_stop_the_others() {
        let mut counter = AgentServer::open(Users::All, false, false).expect("socket");
        let segment = swaptide_sys::mem::memfd_create(c"test", 4096).expect("memfd");
        let areas: Arc<dyn AreaOpener> = Arc::new(Areas::new(crate::testing::segment()));
        let connect = || Conn::connect_abstract(counter.name().as_bytes()).expect("connect");
        let silent: Vec<Conn> = (0..2 * MAX_WAITING_CLIENTS).map(|_| connect()).collect();
        let began = Instant::now();
        let client = connect();
        client.send(b"S", &[]).expect("send");
        // Those that are in the queue before it are taken in first.
        for _ in 0..3 {
            counter.serve(&segment, &areas, None, &mut TracedForks::default());
        }
        let mut fds = [None];
        assert_eq!(client.recv(&mut [0; 8], &mut fds), Ok((1, 1)));
        assert!(began.elapsed() < REQUEST_TIMEOUT, "{:?}", began.elapsed());
        assert!(counter.waiting.len() <= MAX_WAITING_CLIENTS && counter.timeout().is_some());
        drop(silent);
    }

    #[test]
    fn one_client_delays_the_others_for_a_bounded_time() {
        let areas: Arc<dyn AreaOpener> = Arc::new(Areas::new(crate::testing::segment()));
        let segment = swaptide_sys::mem::memfd_create(c"test", 4096).expect("memfd");
        // Of a process of the run, and of one that is none.
        for supervisor in [std::process::id(), u32::MAX] {
            let mut counter = AgentServer::open(Users::All, false, false).expect("socket");
            counter.supervisor = supervisor;
            let mut others = Vec::new();
            for request in [&b"H"[..], b"S", b"?"] {
                let client = Conn::connect_abstract(counter.name().as_bytes()).expect("connect");
                for _ in 0..2 {
                    let (socket, other) = lingering();
                    let fds = [socket.as_fd(); 20];
                    client.send(request, &fds).expect("send");
                    others.push(other);
                }
            }
            assert_quick(|| {
                counter.serve(&segment, &areas, None, &mut TracedForks::default());
            });
        }
    }

    #[test]
    fn connections_are_made_for_a_few_at_a_time() {
        let dials = Dials::default();
        let of_one: Vec<_> = std::iter::from_fn(|| dials.begin(1)).collect();
        assert_eq!(of_one.len(), MAX_DIALS_PER_PROCESS);
        let all: Vec<_> = (2..100).filter_map(|pid| dials.begin(pid)).collect();
        assert_eq!(of_one.len() + all.len(), MAX_DIALS);
        drop(of_one);
        assert!(dials.begin(1).is_some() && dials.begin(100).is_some());
    }

    fn tempfile() -> File {
        let scratch = crate::testing::Scratch::new("socket");
        let path = scratch.path("file");
        File::options().read(true).write(true).create_new(true).open(path).expect("file")
    }
}
