//! The control socket of a run: a socket on which its owner asks for its state.
//!
//! Owns the directory of the sockets, their names, and what is said: one line of JSON in, one line
//! of JSON out, both hang up. Here are the questions, the answers and the server; `client.rs`
//! asks. The directory is the user's own (mode 0700), the sockets have mode 0600, and a client
//! must be of the run's user or root.
//!
//! A run whose socket cannot be opened continues without one: nothing of it depends on being asked.
//!
//! Locks: none; the threads ask the controller through its channel.

use std::fs::Permissions;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use swaptide_core::Tiers;
use swaptide_sys::sock::{Conn, peer_of};
use thiserror::Error;

use crate::cgroup::tree::GroupView;
use crate::client_conn::clients;
use crate::container_labels::ContainerLabels;
use crate::control::agent_api::Users;
use crate::control::filter_offers::{
    FilterList, FilterOffer, FilterOffers, FilterRequest, KEPT_FILTERS, LEASE_TIMEOUT, TAKEN,
};
use crate::memctl::controller::{self, MemoryController};
use crate::memctl::stall::StallPolicy;
use crate::report::totals::{Totals, View};
use crate::swap::areas::{AreaError, AreaView, Areas};
use crate::swap::circular;
use crate::swap::mirror;
use crate::swap::spec;
use crate::units::comma_list;

mod requests;

pub(crate) use self::requests::ending;
use self::requests::{
    answer_reclaim, change_readahead, detach, group, owned, preload, set_budget, tiers,
};

/// A client sends its line at once, and the server answers at once; neither is waited for
/// longer.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest request in bytes.
pub(crate) const MAX_REQUEST_BYTES: usize = 8192;
/// Clients at one time; others are hung up on.
pub(crate) const MAX_CLIENTS: usize = 16;
/// Names the directory of the sockets, instead of the usual one.
const ENV_DIRECTORY: &str = "SWAPTIDE_DIRECTORY";

/// A question to a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Question {
    /// Its resources, their use, and its totals so far.
    Stats,
    /// The run's swap areas.
    Devices,
    /// Add a swap area: a device as `--swap` takes it, with an absolute path.
    Swapon(String),
    /// Take one away, by its name or number. Answered with how many bytes are left, any number of
    /// times, then with that it is done.
    Swapoff(String),
    /// The tiers; with a text, change them first.
    Tiers(Option<String>),
    /// How much comes in for a fault, by keys of `READAHEAD`; with keys and values, all or none,
    /// change it first.
    Readahead(Vec<(String, String)>),
    /// A group and those below it; with settings, make it if there is none, and change it first.
    Group {
        /// The group's path: `/NAME/NAME`.
        path: String,
        /// Keys and values, all or none. The key `processes` moves a process there.
        #[serde(default)]
        set: Vec<(String, String)>,
    },
    /// Remove a group without processes.
    Remove(String),
    /// Take this many bytes of memory from a group.
    Reclaim {
        /// The group's path: `/NAME/NAME`.
        path: String,
        /// The number of bytes to reclaim.
        bytes: u64,
    },
    /// Have a group go out as far as it can, on to the swap areas, and stay there.
    Freeze(String),
    /// Have it come back, at once and in one go.
    Preload(String),
    /// The run's budget in bytes.
    Budget,
    /// Of a run of its own: another budget in bytes from here on.
    SetBudget(u64),
    /// Bring everything of a process back and detach it for good; all of a run, if it is the one
    /// that the user started.
    Detach(u32),
    /// Of a daemon: the runs that it keeps.
    Runs,
    /// Of a daemon: what each run has that it keeps.
    Views,
    /// Of a daemon: what a run has that it keeps, by the process that the user started or any in
    /// it.
    StatsOf(u32),
    /// Of a daemon: its configuration file is read again.
    Reload,
    /// Of a daemon: whether it takes runs, and what it has.
    Ready,
    /// Of a daemon: take no run any more, or take them again; answered as [`Question::Ready`].
    Drain(bool),
    /// Of a daemon: what a run finds that would join it, and the shared segment as a descriptor.
    /// Nothing changes.
    Look(Join),
    /// Of a daemon: keep the processes that descend from the one that asks; answered as
    /// [`Question::Look`].
    Join(Join),
    /// Of a daemon: a descriptor of a swap area.
    Area(u8),
    /// Of a daemon: what the run did so far whose processes descend from the one that asks.
    Totals,
    /// Of a supervisor that has let its processes go: the filters of their forks, of which this
    /// process may be under one.
    Filters(u32),
}

/// A run that would be kept by a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Join {
    /// The process that the user started.
    #[serde(rename = "front", alias = "launcher")]
    pub launcher: u32,
    /// The program's name, for lists.
    pub program: String,
    /// The group of its processes; where there is none, that of the cgroup of the one that asks.
    pub group: Option<String>,
    /// The most that its processes may have together.
    pub max: Option<u64>,
    /// They are killed when they have more than they may for long, or swap space is out.
    pub strict: bool,
    /// The action when one of them makes almost no progress for lack of memory.
    #[serde(default)]
    pub stall: StallPolicy,
    /// The container that it is in; left out elsewhere, for daemons of older builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<ContainerLabels>,
    /// It is recorded over time, for its report. A daemon of an older build does not know of this:
    /// it is sent where it is wanted only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recorded: bool,
}

/// The state of a run that a daemon keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    /// The most that its processes can have.
    pub budget: u64,
    /// Cap of the compressed pool.
    pub pool_cap: u64,
    /// Number of the choice of codecs.
    pub codec: u32,
    /// Path of the group that its processes are in.
    pub group: String,
    /// Whose processes are helped to a userfaultfd.
    #[serde(default)]
    pub userfaultfd: Users,
    /// Its supervisor follows forks: the kernel does not report them to the daemon's engines.
    #[serde(default)]
    pub follows_forks: bool,
}

/// A daemon at a moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonView {
    /// It takes no run.
    pub draining: bool,
    /// The runs that it keeps, by the processes that the users started.
    pub runs: Vec<u32>,
    /// How many processes have memory that it knows of.
    pub processes: usize,
}

/// The answers to questions.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Answer {
    Stats(Box<View>),
    Runs(Vec<(u32, u32)>),
    Joined(Joined),
    Totals(Box<Totals>),
    Devices(Vec<(u8, AreaView)>),
    /// Bytes that are still on what is taken away, or still out of what is brought back.
    Left(u64),
    Budget(u64),
    Views(Vec<View>),
    Ready(DaemonView),
    Done,
    Filters(FilterList),
    FiltersInUse,
    Tiers(TiersView),
    Readahead(Vec<(String, String)>),
    Groups(Vec<GroupView>),
    Reclaimed {
        bytes: u64,
        enough: bool,
    },
    Error(String),
}

/// The tiers at a moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TiersView {
    /// As a table for people.
    pub table: String,
    /// The tiers, that of the highest priorities first.
    pub tiers: Vec<TierRow>,
}

/// A tier and the priorities that belong to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierRow {
    /// As it was defined: `SSD`, say.
    pub name: String,
    /// Its place in masks.
    pub index: u32,
    /// The lowest priority that belongs to it.
    pub start: i32,
    /// The highest priority that belongs to it.
    pub end: i32,
}

impl TiersView {
    fn of(tiers: &Tiers) -> TiersView {
        let row = |tier: swaptide_core::TierView<'_>| TierRow {
            name: tier.name.to_owned(),
            index: tier.index.get(),
            start: tier.start.get(),
            end: tier.end.get(),
        };
        TiersView { table: tiers.to_string(), tiers: tiers.iter().map(row).collect() }
    }
}

/// Why nothing could be learned.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ControlError {
    /// No run of this user is there.
    #[error("no swaptide run of this user; start one with swaptide run -- PROGRAM")]
    NoRun,
    /// None with this process.
    #[error(
        "--pid {0}: neither a run of this user nor a process in one; see swaptide \
        ctl list"
    )]
    NotFound(u32),
    /// More than one, and none was named.
    #[error("there are several runs ({}); choose one with --pid", comma_list(.0))]
    Several(Vec<u32>),
    /// The directory of the sockets cannot be used.
    #[error("{path}: {1}; remove it, or set SWAPTIDE_DIRECTORY", path = .0.display())]
    Directory(PathBuf, io::Error),
    /// The run will not do it, and says why.
    #[error("{0}")]
    Refused(String),
    /// The run does not answer as it should.
    #[error("the run {0} does not answer: {1}; is it stopped? see swaptide ctl list")]
    Run(u32, String),
    /// The daemon does not.
    #[error(
        "no daemon answers at {path}: {0}; start one with swaptide daemon",
        path = daemon_path().display()
    )]
    Daemon(String),
}

/// Returns the path of the socket of this user's daemon.
pub(crate) fn daemon_path() -> PathBuf {
    directory().join("daemon.sock")
}

/// Where the sockets of a user's runs are: `/run/swaptide` for root, `$XDG_RUNTIME_DIR/swaptide`,
/// or a directory of its own among other temporary files.
pub(crate) fn directory() -> PathBuf {
    if let Some(dir) = std::env::var_os(ENV_DIRECTORY).filter(|dir| Path::new(dir).is_absolute()) {
        return dir.into();
    }
    let uid = rustix::process::geteuid();
    if uid.is_root() {
        return "/run/swaptide".into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| Path::new(dir).is_absolute()) {
        Some(dir) => Path::new(&dir).join("swaptide"),
        None => {
            let named = std::env::temp_dir();
            let place = if named.is_absolute() { named } else { "/tmp".into() };
            place.join(format!("swaptide-{}", uid.as_raw()))
        }
    }
}

pub(super) fn path_of(pid: u32) -> PathBuf {
    directory().join(format!("{pid}.sock"))
}

/// An open control socket; its name goes when this is dropped.
pub struct ControlSocket {
    path: PathBuf,
}

impl ControlSocket {
    /// No client finds it any more but one that takes filters over.
    pub(crate) fn keep_filters(&mut self) {
        // Of a process that lives as long as the name.
        let name = std::process::id().to_string();
        let path = self.path.with_file_name(name).with_extension(KEPT_FILTERS);
        if std::fs::rename(&self.path, &path).is_ok() {
            self.path = path;
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The facts of a run that the controller lacks.
#[derive(Clone, Debug)]
pub struct ServedRun {
    /// The process that the user started.
    pub pid: u32,
    /// Whose descendants its processes are.
    pub root: u32,
    /// The program's name, for lists.
    pub program: String,
    /// When the program was started.
    pub started: Instant,
    /// The tree's budget in bytes.
    pub budget: u64,
    /// Where processes were attached to: what hands their filters over.
    pub filters: Option<FilterOffers>,
}

/// Opens the control socket of a run and starts the thread that answers there.
///
/// # Errors
/// Why there is none.
pub fn open(
    run: ServedRun,
    areas: Arc<Areas>,
    controller: mpsc::Sender<controller::ControllerRequest>,
) -> io::Result<ControlSocket> {
    crate::control::trust::own(&directory())?;
    let path = path_of(run.pid);
    // One that has this name belongs to a run that was killed: the number is this run's now.
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // No client finds it before it listens: what refuses a connection is taken for one left behind,
    // and removed.
    let unready = path.with_extension("new");
    match std::fs::remove_file(&unready) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&unready)?;
    let mut socket = ControlSocket { path: unready };
    std::fs::set_permissions(&socket.path, Permissions::from_mode(0o600))?;
    std::fs::rename(&socket.path, &path)?;
    socket.path = path;
    std::thread::Builder::new().name("control".into()).spawn(move || {
        let talking = Arc::new(());
        for (client, _) in clients(|| listener.accept()) {
            let at = Arc::clone(&talking);
            if Arc::strong_count(&at) > MAX_CLIENTS + 1 {
                continue;
            }
            let (run, areas, controller) = (run.clone(), Arc::clone(&areas), controller.clone());
            let talk = move || {
                // A client that misbehaves or went away is its own trouble.
                let _ = converse(client, &run, &areas, &controller);
                drop(at);
            };
            // Without a thread it is hung up on.
            let _ = std::thread::Builder::new().name("client".into()).spawn(talk);
        }
    })?;
    Ok(socket)
}

fn converse(
    client: UnixStream,
    run: &ServedRun,
    areas: &Areas,
    controller: &mpsc::Sender<controller::ControllerRequest>,
) -> io::Result<()> {
    let uid = peer_of(client.as_fd())?.uid;
    if uid != 0 && uid != rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    let counter = RequestHandler { areas, controller, budget: run.budget, uid, all: true };
    client.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let line = read_line(&client)?;
    let answer = match serde_json::from_slice(&line) {
        Ok(Question::Stats) => {
            let root = run.root;
            match controller::ask(controller, move |controller| controller.view(root)) {
                Some(view) => {
                    let (program, wall_s) =
                        (run.program.clone(), run.started.elapsed().as_secs_f64());
                    Answer::Stats(Box::new(View { pid: run.pid, program, wall_s, ..view }))
                }
                None => ending(),
            }
        }
        Ok(Question::Filters(pid)) => {
            return lend_filters(&client, run.filters.as_ref(), pid);
        }
        Ok(Question::SetBudget(bytes)) => set_budget(controller, bytes),
        Ok(question) => counter.answer(question, &client),
        Err(error) => Answer::Error(format!("malformed request: {error}")),
    };
    send_answer(&client, &answer)
}

/// Lends filters of forks to a client, until it says that they are its, or goes.
fn lend_filters(client: &UnixStream, offers: Option<&FilterOffers>, pid: u32) -> io::Result<()> {
    let offer = offers.map(|offers| (offers, offers.lend(pid)));
    let (offers, lent) = match offer {
        Some((offers, FilterOffer::Lent(lent))) => (offers, lent),
        Some((_, FilterOffer::InUse)) => return send_answer(client, &Answer::FiltersInUse),
        _ => return send_answer(client, &Answer::Error("not a filter of this run's".into())),
    };
    let lend = || {
        let list = FilterList { count: lent.filters.len(), processes: lent.processes };
        send_answer(client, &Answer::Filters(list))?;
        let conn = Conn::from_fd(client.try_clone()?.into());
        for filter in &lent.filters {
            conn.send(b" ", &[filter.as_fd()])?;
        }
        client.set_read_timeout(Some(LEASE_TIMEOUT))?;
        let mut said = [0u8; TAKEN.len()];
        (&mut &*client).read_exact(&mut said)?;
        if said != TAKEN {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // Before this process may end.
        (&mut &*client).write_all(TAKEN)
    };
    match lend() {
        Ok(()) => {
            offers.send(FilterRequest::Taken);
            Ok(())
        }
        Err(error) => {
            // The client is not to read them any more: it sees that this end is closed.
            let _ = client.shutdown(Shutdown::Both);
            offers.send(FilterRequest::Returned);
            Err(error)
        }
    }
}

/// Handles the questions that runs and daemons share.
pub(crate) struct RequestHandler<'a> {
    /// The swap areas of the run or daemon.
    pub areas: &'a Areas,
    /// The thread that keeps everything.
    pub controller: &'a mpsc::Sender<controller::ControllerRequest>,
    /// The budget, by which a file without a size gets one.
    pub budget: u64,
    /// User id of the client, as the kernel says.
    pub uid: u32,
    /// True if that is root, or the user whose run or daemon it is. Others see and steer their own
    /// groups.
    pub all: bool,
}

impl RequestHandler<'_> {
    /// Answers; what is told on the way goes to the client.
    pub(crate) fn answer(&self, question: Question, client: &UnixStream) -> Answer {
        let (uid, all, controller) = (self.uid, self.all, self.controller);
        match question {
            Question::Swapon(_) | Question::Swapoff(_) | Question::Tiers(Some(_)) if !all => {
                Answer::Error(
                    "only root and the daemon's user may change swap areas and tiers".into(),
                )
            }
            Question::Readahead(set) if !all && !set.is_empty() => {
                Answer::Error("only root and the daemon's user may change readahead".into())
            }
            Question::Readahead(set) => change_readahead(&self.areas.segment().header, &set)
                .map_or_else(Answer::Error, Answer::Readahead),
            Question::Devices => Answer::Devices(
                self.areas.view().into_iter().map(|(id, view)| (id.0, view)).collect(),
            ),
            Question::Swapon(text) => self.swapon(&text),
            Question::Swapoff(name) => {
                let mut told = u64::MAX;
                done(self.areas.remove(&name, |left| {
                    // The client may have gone; the work continues all the same.
                    if std::mem::replace(&mut told, left) != left {
                        let _ = send_answer(client, &Answer::Left(left));
                    }
                }))
            }
            Question::Tiers(text) => {
                controller::ask(controller, move |controller| tiers(controller, text.as_deref()))
                    .unwrap_or_else(ending)
            }
            Question::Group { path, set } => controller::ask(controller, move |controller| {
                group(controller, &path, &set, uid, all)
            })
            .unwrap_or_else(ending),
            Question::Remove(path) => {
                let remove = move |controller: &mut MemoryController| {
                    let path = owned(controller, &path, uid, all)?;
                    controller.remove_group(&path).map_err(|error| error.to_string())
                };
                let removed = controller::ask(controller, remove);
                removed.map_or_else(ending, |removed| {
                    removed.map_or_else(Answer::Error, |()| Answer::Done)
                })
            }
            Question::Budget => controller::ask(controller, |controller| controller.budget())
                .map_or_else(ending, Answer::Budget),
            Question::Reclaim { path, bytes } => {
                answer_reclaim(controller, path, bytes, false, uid, all)
            }
            Question::Freeze(path) => answer_reclaim(controller, path, u64::MAX, true, uid, all),
            Question::Preload(path) => preload(controller, path, uid, all, client),
            Question::Detach(pid) => detach(controller, pid, uid, all, client),
            _ => Answer::Error("only a daemon does this; start one with swaptide daemon".into()),
        }
    }
}

impl RequestHandler<'_> {
    fn swapon(&self, text: &str) -> Answer {
        let Some(tiers) =
            controller::ask(self.controller, |controller| *controller.groups().tiers())
        else {
            return ending();
        };
        let views = self.areas.view().into_iter().filter(|(_, view)| view.kind == "file");
        let files: Vec<_> = views.map(|(_, view)| (view.priority, view.place.into())).collect();
        let asked = match spec::parse(text) {
            Ok(device) => device,
            Err(error) => return Answer::Error(error.to_string()),
        };
        if let Some(why) = circular::refusal(&asked, |all| controller::kept(self.controller, all)) {
            return Answer::Error(why);
        }
        let add = || {
            let mut device = asked;
            mirror::resolve(&mut device, &tiers, &files)?;
            self.areas.add(spec::open_backing(&device, self.budget)?).map(drop)
        };
        done(add())
    }
}

/// A stream of which a read waits no longer than told.
pub(crate) trait ReadWithin: Read {
    /// Bounds the reads from here on.
    fn wait_at_most(&self, limit: Duration) -> io::Result<()>;
}

impl ReadWithin for &UnixStream {
    fn wait_at_most(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))
    }
}

impl ReadWithin for &TcpStream {
    fn wait_at_most(&self, limit: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(limit))
    }
}

/// What a client sends until that is whole, or the client sends no more. All of it must come within
/// [`REQUEST_TIMEOUT`], so that a slow client delays others no longer.
pub(crate) fn read_request(
    mut client: impl ReadWithin,
    is_whole: impl Fn(&[u8]) -> bool,
) -> io::Result<Vec<u8>> {
    let latest = Instant::now() + REQUEST_TIMEOUT;
    let (mut text, mut buffer) = (Vec::new(), [0u8; 1024]);
    while !is_whole(&text) && text.len() < MAX_REQUEST_BYTES {
        let left = latest.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        client.wait_at_most(left)?;
        match client.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => text.extend_from_slice(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(text)
}

/// The line in which a question is.
pub(crate) fn read_line(client: &UnixStream) -> io::Result<Vec<u8>> {
    let mut line = read_request(client, |text| text.contains(&b'\n'))?;
    line.truncate(line.iter().position(|byte| *byte == b'\n').unwrap_or(line.len()));
    Ok(line)
}

pub(crate) fn send_answer(mut client: &UnixStream, answer: &Answer) -> io::Result<()> {
    let mut text = serde_json::to_vec(answer)?;
    text.push(b'\n');
    client.write_all(&text)
}

/// A line with a descriptor.
pub(crate) fn send_with(
    client: &UnixStream,
    answer: &Answer,
    fd: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut text = serde_json::to_vec(answer)?;
    text.push(b'\n');
    Conn::from_fd(client.try_clone()?.into()).send(&text, &[fd])?;
    Ok(())
}

fn done(result: Result<(), AreaError>) -> Answer {
    result.map_or_else(|error| Answer::Error(error.to_string()), |()| Answer::Done)
}

#[cfg(test)]
mod tests;
