//! The control socket of a run: a socket on which its owner asks for its state.
//!
//! Owns the directory of the sockets, their names, and what is said: one line of JSON in, one line
//! of JSON out, both hang up. Here are the questions, the answers and the server; `client.rs`
//! asks. The directory is the user's own (mode 0700), the sockets have mode 0600, and a client
//! must be of the run's user or root.
//!
//! A run whose door cannot be opened continues without one: nothing of it depends on being asked.
//!
//! Locks: none; the threads ask the keeper through its channel.

use std::fs::Permissions;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use swaptide_core::Tiers;
use swaptide_ipc::Header;
use swaptide_sys::sock::peer_of;
use thiserror::Error;

use crate::cgroup::tree::{GroupPath, GroupView};
use crate::control::agent_api::Users;
use crate::memctl::controller::{self, MemoryController, ReclaimOutcome};
use crate::report::totals::{Totals, View};
use crate::swap::areas::{AreaError, AreaView, Areas};
use crate::swap::circular;
use crate::swap::mirror;
use crate::swap::spec;
use crate::units::comma_list;

/// A client sends its line at once, and the server answers at once; neither is waited for
/// longer.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest request in bytes.
pub(crate) const MAX_REQUEST_BYTES: usize = 8192;
/// Clients at one time; others are hung up on.
pub(crate) const MAX_CLIENTS: usize = 16;
/// Names the directory of the sockets, instead of the usual one.
const ENV_DIRECTORY: &str = "SWAPTIDE_DIRECTORY";

/// What a run can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Question {
    /// What it has, uses and did so far.
    Stats,
    /// Its swap areas.
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
        /// Its path.
        path: String,
        /// Keys and values, all or none. The key `processes` moves a process there.
        #[serde(default)]
        set: Vec<(String, String)>,
    },
    /// Remove a group that nobody is in.
    Remove(String),
    /// Take so many bytes of memory from a group.
    Reclaim {
        /// Its path.
        path: String,
        /// How many.
        bytes: u64,
    },
    /// Have a group go out as far as it can, on to the swap areas, and stay there.
    Freeze(String),
    /// Have it come back, at once and in one go.
    Preload(String),
    /// The budget.
    Budget,
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
}

/// A run that would be kept by a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Join {
    /// The process that the user started.
    pub front: u32,
    /// The program's name.
    pub program: String,
    /// The group of its processes; where there is none, that of the cgroup of the one that asks.
    pub group: Option<String>,
    /// The most that its processes may have together.
    pub max: Option<u64>,
    /// They are killed when they have more than they may for long, or swap space is out.
    pub strict: bool,
}

/// What a run has that a daemon keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    /// The most that its processes can have.
    pub budget: u64,
    /// Cap of the compressed pool.
    pub pool_cap: u64,
    /// Number of the choice of codecs.
    pub codec: u32,
    /// Its group.
    pub group: String,
    /// Whose processes are helped to a userfaultfd.
    #[serde(default)]
    pub userfaultfd: Users,
    /// Its supervisor follows forks: the kernel does not report them to the daemon's engines.
    #[serde(default)]
    pub follows_forks: bool,
}

/// What the answers to questions are.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Answer {
    Stats(Box<View>),
    Runs(Vec<(u32, u32)>),
    Joined(Joined),
    Totals(Box<Totals>),
    Devices(Vec<(u8, AreaView)>),
    /// Bytes that are still on what is taken away.
    Left(u64),
    Budget(u64),
    Views(Vec<View>),
    Done,
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
    /// Each, highest first.
    pub tiers: Vec<TierRow>,
}

/// One tier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierRow {
    /// Its name.
    pub name: String,
    /// Its place in masks.
    pub index: u32,
    /// Its lowest priority.
    pub start: i32,
    /// Its highest priority.
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
    #[error("{path}: {1}", path = .0.display())]
    Directory(PathBuf, io::Error),
    /// The run will not do it, and says why.
    #[error("{0}")]
    Refused(String),
    /// The run does not answer as it should.
    #[error("the run {0} does not answer: {1}")]
    Run(u32, String),
    /// The daemon does not.
    #[error("no daemon answers at {path}: {0}", path = daemon_path().display())]
    Daemon(String),
}

/// Where the daemon of this user listens, or would.
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
        None => std::env::temp_dir().join(format!("swaptide-{}", uid.as_raw())),
    }
}

pub(super) fn path_of(pid: u32) -> PathBuf {
    directory().join(format!("{pid}.sock"))
}

/// An open door; its name goes when this is dropped.
pub struct ControlSocket {
    path: PathBuf,
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// What the keeper does not know of a run.
#[derive(Clone, Debug)]
pub struct ServedRun {
    /// The process that the user started.
    pub pid: u32,
    /// Whose descendants its processes are.
    pub root: u32,
    /// The program's name.
    pub program: String,
    /// When it began.
    pub started: Instant,
    /// The tree's budget in bytes.
    pub budget: u64,
}

/// Opens the door of a run and starts the thread that answers there.
///
/// # Errors
/// Why there is none.
pub fn open(
    run: ServedRun,
    areas: Arc<Areas>,
    keeper: mpsc::Sender<controller::ControllerRequest>,
) -> io::Result<ControlSocket> {
    crate::control::trust::own(&directory())?;
    let path = path_of(run.pid);
    // One that has this name belongs to a run that was killed: the number is this run's now.
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    let door = ControlSocket { path };
    std::fs::set_permissions(&door.path, Permissions::from_mode(0o600))?;
    std::thread::Builder::new().name("door".into()).spawn(move || {
        let talking = Arc::new(());
        for client in listener.incoming().flatten() {
            let at = Arc::clone(&talking);
            if Arc::strong_count(&at) > MAX_CLIENTS + 1 {
                continue;
            }
            let (run, areas, keeper) = (run.clone(), Arc::clone(&areas), keeper.clone());
            let talk = move || {
                // A client that misbehaves or went away is its own trouble.
                let _ = converse(client, &run, &areas, &keeper);
                drop(at);
            };
            // Without a thread it is hung up on.
            let _ = std::thread::Builder::new().name("client".into()).spawn(talk);
        }
    })?;
    Ok(door)
}

fn converse(
    client: UnixStream,
    run: &ServedRun,
    areas: &Areas,
    keeper: &mpsc::Sender<controller::ControllerRequest>,
) -> io::Result<()> {
    let uid = peer_of(client.as_fd())?.uid;
    if uid != 0 && uid != rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    let counter = RequestHandler { areas, keeper, budget: run.budget, uid, all: true };
    client.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let line = read_line(&client)?;
    let answer = match serde_json::from_slice(&line) {
        Ok(Question::Stats) => {
            let root = run.root;
            match controller::ask(keeper, move |keeper| keeper.view(root)) {
                Some(view) => {
                    let (program, wall_s) =
                        (run.program.clone(), run.started.elapsed().as_secs_f64());
                    Answer::Stats(Box::new(View { pid: run.pid, program, wall_s, ..view }))
                }
                None => ending(),
            }
        }
        Ok(question) => counter.answer(question, &client),
        Err(error) => Answer::Error(format!("malformed request: {error}")),
    };
    send_answer(&client, &answer)
}

/// What is asked of runs and of daemons alike.
pub(crate) struct RequestHandler<'a> {
    /// The swap areas.
    pub areas: &'a Areas,
    /// The thread that keeps everything.
    pub keeper: &'a mpsc::Sender<controller::ControllerRequest>,
    /// The budget, by which a file without a size gets one.
    pub budget: u64,
    /// The client.
    pub uid: u32,
    /// Whether that is root, or the user whose run or daemon it is. Others see and steer their own
    /// groups.
    pub all: bool,
}

impl RequestHandler<'_> {
    /// Answers; what is told on the way goes to the client.
    pub(crate) fn answer(&self, question: Question, client: &UnixStream) -> Answer {
        let (uid, all, keeper) = (self.uid, self.all, self.keeper);
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
                controller::ask(keeper, move |keeper| tiers(keeper, text.as_deref()))
                    .unwrap_or_else(ending)
            }
            Question::Group { path, set } => {
                controller::ask(keeper, move |keeper| group(keeper, &path, &set, uid, all))
                    .unwrap_or_else(ending)
            }
            Question::Remove(path) => {
                let remove = move |keeper: &mut MemoryController| {
                    let path = owned(keeper, &path, uid, all)?;
                    keeper.groups().remove(&path).map_err(|error| error.to_string())
                };
                let removed = controller::ask(keeper, remove);
                removed.map_or_else(ending, |removed| {
                    removed.map_or_else(Answer::Error, |()| Answer::Done)
                })
            }
            Question::Budget => controller::ask(keeper, |keeper| keeper.budget())
                .map_or_else(ending, Answer::Budget),
            Question::Reclaim { path, bytes } => {
                answer_reclaim(keeper, path, bytes, false, uid, all)
            }
            Question::Freeze(path) => answer_reclaim(keeper, path, u64::MAX, true, uid, all),
            Question::Preload(path) => preload(keeper, path, uid, all),
            Question::Detach(pid) => detach(keeper, pid, uid, all, client),
            _ => Answer::Error("only a daemon does this; start one with swaptide daemon".into()),
        }
    }
}

impl RequestHandler<'_> {
    fn swapon(&self, text: &str) -> Answer {
        let Some(tiers) = controller::ask(self.keeper, |keeper| *keeper.groups().tiers()) else {
            return ending();
        };
        let views = self.areas.view().into_iter().filter(|(_, view)| view.kind == "file");
        let files: Vec<_> = views.map(|(_, view)| (view.priority, view.place.into())).collect();
        let asked = match spec::parse(text) {
            Ok(device) => device,
            Err(error) => return Answer::Error(error.to_string()),
        };
        if let Some(why) = circular::refusal(&asked, |all| controller::kept(self.keeper, all)) {
            return Answer::Error(why);
        }
        let add = || {
            let mut device = asked;
            mirror::resolve(&mut device, &tiers, &files)?;
            self.areas.add(spec::open_beyond(&device, self.budget)?).map(drop)
        };
        done(add())
    }
}

/// What [`Question::Readahead`] knows: `page-cluster` as `swaptide run --page-cluster` takes it,
/// and the largest order of a swap-in, each a power of two of pages from 0 to 9, or `default`.
const READAHEAD: [&str; 2] = ["page-cluster", "largest-order"];

fn change_readahead(
    header: &Header,
    set: &[(String, String)],
) -> Result<Vec<(String, String)>, String> {
    let words = [&header.page_cluster_plus, &header.largest_order_plus];
    let mut changes = Vec::new();
    for (key, value) in set {
        let at = READAHEAD.iter().position(|known| known == key);
        let word = words
            [at.ok_or_else(|| format!("there is no {key:?}; there are {}", READAHEAD.join(", ")))?];
        let plus = match (value.as_str(), value.parse::<u32>()) {
            ("default", _) => 0,
            (_, Ok(order @ 0..=9)) => order + 1,
            _ => {
                return Err(format!(
                    "{key}: {value:?} is neither a number from 0 to 9 nor \"default\""
                ));
            }
        };
        changes.push((word, plus));
    }
    changes.into_iter().for_each(|(word, plus)| word.store(plus, Relaxed));
    let shown = |word: &AtomicU32| {
        word.load(Relaxed)
            .checked_sub(1)
            .map_or_else(|| "default".to_owned(), |order| order.to_string())
    };
    Ok(READAHEAD.iter().zip(words).map(|(key, word)| ((*key).to_owned(), shown(word))).collect())
}

/// A group, for a client that may see and change it.
fn owned(
    keeper: &mut MemoryController,
    path: &str,
    uid: u32,
    all: bool,
) -> Result<GroupPath, String> {
    let path = GroupPath::parse(path).map_err(|error| error.to_string())?;
    if all || keeper.groups().is_owned(&path, uid) {
        return Ok(path);
    }
    Err(format!("{path}: not a group of this user"))
}

pub(crate) fn ending() -> Answer {
    Answer::Error("the supervisor is shutting down".into())
}

fn tiers(keeper: &mut MemoryController, text: Option<&str>) -> Answer {
    match text.map_or(Ok(()), |text| keeper.groups().set_tiers(text)) {
        Ok(()) => Answer::Tiers(TiersView::of(keeper.groups().tiers())),
        Err(error) => Answer::Error(error.to_string()),
    }
}

fn group(
    keeper: &mut MemoryController,
    path: &str,
    set: &[(String, String)],
    uid: u32,
    all: bool,
) -> Answer {
    // Without rights over all, the root is where one's own groups are.
    if !all && path == "/" && set.is_empty() {
        let views = keeper.group_views(&GroupPath::root()).unwrap_or_default();
        let own = |view: &GroupView| {
            GroupPath::parse(&view.path).is_ok_and(|path| keeper.groups().is_owned(&path, uid))
        };
        return Answer::Groups(views.into_iter().filter(own).collect());
    }
    let set = owned(keeper, path, uid, all).and_then(|path| set_group(keeper, path, set, uid, all));
    match set.and_then(|path| keeper.group_views(&path).map_err(|error| error.to_string())) {
        Ok(views) => Answer::Groups(views),
        Err(error) => Answer::Error(error),
    }
}

/// Carries out settings, all or none; a group that was made for one that is refused goes again.
fn set_group(
    keeper: &mut MemoryController,
    path: GroupPath,
    set: &[(String, String)],
    uid: u32,
    all: bool,
) -> Result<GroupPath, String> {
    if set.is_empty() {
        return Ok(path);
    }
    let (moves, settings): (Vec<_>, Vec<_>) = set.iter().partition(|(key, _)| key == "processes");
    let number = |text: &str| {
        text.parse::<u32>().map_err(|_| format!("{path}: processes: {text:?} is not a process id"))
    };
    let pids =
        moves.iter().map(|(_, value)| number(value)).collect::<Result<Vec<u32>, String>>()?;
    if let Some(stranger) =
        pids.iter().find(|pid| !keeper.keeps(**pid) || !all && keeper.owner_of(**pid) != Some(uid))
    {
        return Err(format!(
            "{path}: processes: {stranger} is not a process of this run; see swaptide ctl stats"
        ));
    }
    let before: Vec<GroupPath> =
        keeper.groups().iter().map(|(_, group)| group.path.clone()).collect();
    let index = keeper.groups().ensure(&path, uid).map_err(|error| error.to_string())?;
    let pairs = settings.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    if let Err(error) = keeper.groups().set(index, pairs) {
        let mut made: Vec<GroupPath> =
            keeper.groups().iter().map(|(_, group)| group.path.clone()).collect();
        made.retain(|path| !before.contains(path));
        // The deepest first; nobody is in them yet.
        made.sort_by_key(|path| std::cmp::Reverse(path.depth()));
        made.iter().for_each(|path| drop(keeper.groups().remove(path)));
        return Err(error.to_string());
    }
    pids.into_iter().for_each(|pid| keeper.move_process(pid, index));
    Ok(path)
}

/// Takes memory from a group, for now or for good. Waits until it is done: the keeper tells when
/// nothing more goes out.
fn answer_reclaim(
    keeper: &mpsc::Sender<controller::ControllerRequest>,
    path: String,
    bytes: u64,
    freeze: bool,
    uid: u32,
    all: bool,
) -> Answer {
    let (done, result) = mpsc::channel();
    let begun = controller::ask(keeper, move |keeper| {
        let path = owned(keeper, &path, uid, all)?;
        let index = keeper.groups().find(&path).map_err(|error| error.to_string())?;
        if freeze {
            keeper.freeze(index, true);
        }
        keeper.reclaim(index, bytes, done);
        Ok::<(), String>(())
    });
    match begun {
        None => ending(),
        Some(Err(error)) => Answer::Error(error),
        Some(Ok(())) => match result.recv() {
            Ok(ReclaimOutcome { bytes, enough }) => {
                Answer::Reclaimed { bytes, enough: enough || freeze }
            }
            Err(_) => ending(),
        },
    }
}

/// Brings a group back. Waits until its processes have all that there is room for, or bring in
/// nothing more.
fn preload(
    keeper: &mpsc::Sender<controller::ControllerRequest>,
    path: String,
    uid: u32,
    all: bool,
) -> Answer {
    let thaw = move |keeper: &mut MemoryController| {
        let path = owned(keeper, &path, uid, all)?;
        let index = keeper.groups().find(&path).map_err(|error| error.to_string())?;
        keeper.freeze(index, false);
        keeper.preload(index);
        Ok::<_, String>((index, keeper.groups().usage(index)))
    };
    let (index, before) = match controller::ask(keeper, thaw) {
        None => return ending(),
        Some(Err(error)) => return Answer::Error(error),
        Some(Ok(begun)) => begun,
    };
    let (mut least, mut since) = (u64::MAX, Instant::now());
    loop {
        let give_up = since.elapsed() > REQUEST_TIMEOUT;
        let look = controller::ask(keeper, move |keeper| {
            (keeper.preloading(index, give_up), keeper.groups().usage(index))
        });
        let Some((busy, usage)) = look else { return ending() };
        if busy == 0 || give_up {
            let bytes = before.swapped.saturating_sub(usage.swapped);
            return Answer::Reclaimed { bytes, enough: busy == 0 };
        }
        if usage.swapped < least {
            (least, since) = (usage.swapped, Instant::now());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Lets processes go. Waits until it is done, tells how much is still out, and gives it up where
/// nothing comes back any more.
fn detach(
    keeper: &mpsc::Sender<controller::ControllerRequest>,
    pid: u32,
    uid: u32,
    all: bool,
    client: &UnixStream,
) -> Answer {
    let begin = move |keeper: &mut MemoryController| {
        if !keeper.keeps(pid) && keeper.run_of(pid).is_none()
            || !all && keeper.owner_of(pid) != Some(uid)
        {
            return Err(format!(
                "detach: {pid} is not a process of this run; see swaptide ctl stats"
            ));
        }
        let pids = keeper.detachable(pid);
        keeper.detach(&pids).map(|()| pids)
    };
    let pids = match controller::ask(keeper, begin) {
        None => return ending(),
        Some(Err(why)) => return Answer::Error(why),
        Some(Ok(pids)) => Arc::new(pids),
    };
    let (mut least, mut since) = ((usize::MAX, u64::MAX), Instant::now());
    loop {
        let asked = Arc::clone(&pids);
        let Some(now) = controller::ask(keeper, move |keeper| keeper.detaching(&asked)) else {
            return ending();
        };
        if now.processes == 0 {
            return Answer::Done;
        }
        if (now.processes, now.out) < least {
            (least, since) = ((now.processes, now.out), Instant::now());
        }
        if now.short || since.elapsed() > 5 * REQUEST_TIMEOUT {
            let asked = Arc::clone(&pids);
            let _ = controller::ask(keeper, move |keeper| keeper.keep_after_all(&asked));
            let why = if now.short { "memory ran short" } else { "no more pages came in" };
            return Answer::Error(format!(
                "detach: {why} with {} still out: {} go on as before",
                crate::units::human(now.out),
                if now.processes == 1 {
                    "the process".into()
                } else {
                    format!("{} processes", now.processes)
                }
            ));
        }
        // The client may have gone; the work continues all the same.
        let _ = send_answer(client, &Answer::Left(now.out));
        std::thread::sleep(Duration::from_millis(20));
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
/// [`REQUEST_TIMEOUT`], so that a byte now and then delays nobody for longer.
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

fn done(result: Result<(), AreaError>) -> Answer {
    result.map_or_else(|error| Answer::Error(error.to_string()), |()| Answer::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_a_line_of_json() {
        assert_eq!(serde_json::to_string(&Question::Stats).expect("JSON"), "\"stats\"");
        assert_eq!(
            serde_json::to_string(&Question::Swapoff("file:/tmp".into())).expect("JSON"),
            "{\"swapoff\":\"file:/tmp\"}"
        );
        assert!(serde_json::from_str::<Question>("\"swapoff everything\"").is_err());
    }

    #[test]
    fn a_client_that_sends_a_byte_now_and_then_is_not_waited_for() {
        let (slow, client) = UnixStream::pair().expect("a pair");
        let sender = std::thread::spawn(move || {
            while (&slow).write_all(b"x").is_ok() {
                std::thread::sleep(REQUEST_TIMEOUT / 8);
            }
        });
        let began = Instant::now();
        let error = read_line(&client).expect_err("no end");
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock));
        assert!(began.elapsed() < 3 * REQUEST_TIMEOUT, "{:?}", began.elapsed());
        drop(client);
        sender.join().expect("it sends no more");
        let (client, other) = UnixStream::pair().expect("a pair");
        (&client).write_all(b"a line\nand more").expect("write");
        assert_eq!(read_line(&other).expect("whole"), b"a line");
    }

    #[test]
    fn readahead_is_changed_whole_or_not_at_all() {
        let segment = crate::testing::segment();
        let pairs = |set: &[(&str, &str)]| -> Vec<(String, String)> {
            set.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect()
        };
        let change = |set: &[(&str, &str)]| change_readahead(&segment.header, &pairs(set));
        assert_eq!(
            change(&[]),
            Ok(pairs(&[("page-cluster", "default"), ("largest-order", "default")]))
        );
        assert_eq!(
            change(&[("largest-order", "0"), ("page-cluster", "9")]),
            Ok(pairs(&[("page-cluster", "9"), ("largest-order", "0")]))
        );
        for wrong in
            [("page-cluster", "10"), ("page-cluster", ""), ("window", "3"), ("largest-order", "-1")]
        {
            assert!(change(&[("largest-order", "4"), wrong]).is_err(), "{wrong:?}");
        }
        assert_eq!(
            change(&[("page-cluster", "default")]),
            Ok(pairs(&[("page-cluster", "default"), ("largest-order", "0")]))
        );
    }
}
