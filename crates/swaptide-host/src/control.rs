//! The door of a run: a socket on which its owner asks what goes on inside.
//!
//! Owns the directory of the sockets, their names, and both sides of the conversation: one line of JSON in, one line of JSON out, both hang up.
//! The directory is the user's own (mode 0700), the sockets have mode 0600, and who connects must be of the run's user or root.
//!
//! A run whose door cannot be opened goes on without one: nothing of it depends on being asked.
//!
//! Locks: none; the threads ask the keeper through its channel.

use std::fmt;
use std::fs::{DirBuilder, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rustix::net::sockopt::socket_peercred;
use serde::{Deserialize, Serialize};
use swaptide_core::Tiers;

use crate::areas::{AreaError, AreaView, Areas};
use crate::device;
use crate::groups::{GroupError, GroupPath, GroupView};
use crate::keeper::{self, Keeper, Squeezed};
use crate::report::View;

/// Who connects sends its line at once, and who is asked answers at once; nobody is waited for longer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest request in bytes.
const LONGEST: u64 = 8192;
/// Clients at one time; others are hung up on.
const MOST_CLIENTS: usize = 16;

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
    /// Take one away, by its name or number. Answered with [`Answer::Left`] any number of times, then with [`Answer::Done`].
    Swapoff(String),
    /// The tiers; with a text, change them first.
    Tiers(Option<String>),
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
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Stats(Box<View>),
    Devices(Vec<(u8, AreaView)>),
    /// Bytes that are still on what is taken away.
    Left(u64),
    Done,
    Tiers(TiersView),
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
#[derive(Debug)]
#[non_exhaustive]
pub enum ControlError {
    /// No run of this user is there.
    NoRun,
    /// None with this process.
    NotFound(u32),
    /// More than one, and none was named.
    Several(Vec<u32>),
    /// The directory of the sockets cannot be used.
    Directory(PathBuf, io::Error),
    /// The run will not do it, and says why.
    Refused(String),
    /// The run does not answer as it should.
    Run(u32, String),
}

impl fmt::Display for ControlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ControlError::NoRun => write!(f, "no swaptide run of yours is there; start one with swaptide run -- PROGRAM"),
            ControlError::NotFound(pid) => {
                write!(f, "--pid {pid}: neither a swaptide run of yours nor a process in one; swaptide ctl list shows them")
            }
            ControlError::Several(pids) => {
                let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
                write!(f, "several runs are there ({}); choose one with --pid", pids.join(", "))
            }
            ControlError::Directory(path, error) => write!(f, "{}: {error}", path.display()),
            ControlError::Refused(why) => write!(f, "{why}"),
            ControlError::Run(pid, why) => write!(f, "the run {pid} does not answer: {why}"),
        }
    }
}

impl std::error::Error for ControlError {}

/// Where the sockets of a user's runs are: `/run/swaptide` for root, `$XDG_RUNTIME_DIR/swaptide`, or a directory of its own beside other
/// temporary files.
fn directory() -> PathBuf {
    let uid = rustix::process::geteuid();
    if uid.is_root() {
        return "/run/swaptide".into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| Path::new(dir).is_absolute()) {
        Some(dir) => Path::new(&dir).join("swaptide"),
        None => std::env::temp_dir().join(format!("swaptide-{}", uid.as_raw())),
    }
}

/// Makes sure that the directory is this user's and nobody else's. Anybody may make a directory where temporary files are.
fn own(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = std::fs::symlink_metadata(directory)?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o077 != 0 {
        return Err(io::Error::other("is not a directory of this user alone (mode 0700)"));
    }
    Ok(())
}

fn path_of(pid: u32) -> PathBuf {
    directory().join(format!("{pid}.sock"))
}

/// An open door; its name goes when this is dropped.
pub struct Door {
    path: PathBuf,
}

impl Drop for Door {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// What the keeper does not know of a run.
#[derive(Clone, Debug)]
pub struct Run {
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
pub fn open(run: Run, areas: Arc<Areas>, keeper: mpsc::Sender<keeper::Request>) -> io::Result<Door> {
    own(&directory())?;
    let path = path_of(run.pid);
    // One that has this name belongs to a run that was killed: the number is this run's now.
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    let door = Door { path };
    std::fs::set_permissions(&door.path, Permissions::from_mode(0o600))?;
    std::thread::Builder::new().name("door".into()).spawn(move || {
        let talking = Arc::new(());
        for client in listener.incoming().flatten() {
            let at = Arc::clone(&talking);
            if Arc::strong_count(&at) > MOST_CLIENTS + 1 {
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

fn converse(client: UnixStream, run: &Run, areas: &Areas, keeper: &mpsc::Sender<keeper::Request>) -> io::Result<()> {
    let uid = socket_peercred(&client)?.uid;
    if !uid.is_root() && uid != rustix::process::geteuid() {
        return Ok(());
    }
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new((&client).take(LONGEST)).read_line(&mut line)?;
    let answer = match serde_json::from_str(&line) {
        Ok(Question::Stats) => {
            let root = run.root;
            match keeper::ask(keeper, move |keeper| keeper.view(root)) {
                Some(view) => {
                    let (program, wall_s) = (run.program.clone(), run.started.elapsed().as_secs_f64());
                    Answer::Stats(Box::new(View { pid: run.pid, program, wall_s, ..view }))
                }
                None => ending(),
            }
        }
        Ok(Question::Tiers(text)) => keeper::ask(keeper, move |keeper| tiers(keeper, text.as_deref())).unwrap_or_else(ending),
        Ok(Question::Group { path, set }) => {
            keeper::ask(keeper, move |keeper| group(keeper, &path, &set, uid.as_raw())).unwrap_or_else(ending)
        }
        Ok(Question::Remove(path)) => keeper::ask(keeper, move |keeper| {
            let removed = GroupPath::parse(&path).map_err(GroupError::Path).and_then(|path| keeper.groups().remove(&path));
            removed.map_or_else(|error| Answer::Error(error.to_string()), |()| Answer::Done)
        })
        .unwrap_or_else(ending),
        Ok(Question::Reclaim { path, bytes }) => reclaim(keeper, path, bytes),
        Ok(Question::Devices) => Answer::Devices(areas.view().into_iter().map(|(id, view)| (id.0, view)).collect()),
        Ok(Question::Swapon(text)) => done(swapon(areas, &text, run.budget)),
        Ok(Question::Swapoff(name)) => {
            let mut told = u64::MAX;
            done(areas.remove(&name, |left| {
                // Who asked may have gone; it goes on all the same.
                if std::mem::replace(&mut told, left) != left {
                    let _ = tell(&client, &Answer::Left(left));
                }
            }))
        }
        Err(error) => Answer::Error(format!("not a question: {error}")),
    };
    tell(&client, &answer)
}

fn ending() -> Answer {
    Answer::Error("it is ending".into())
}

fn tiers(keeper: &mut Keeper, text: Option<&str>) -> Answer {
    match text.map_or(Ok(()), |text| keeper.groups().set_tiers(text)) {
        Ok(()) => Answer::Tiers(TiersView::of(keeper.groups().tiers())),
        Err(error) => Answer::Error(error.to_string()),
    }
}

fn group(keeper: &mut Keeper, path: &str, set: &[(String, String)], uid: u32) -> Answer {
    match set_group(keeper, path, set, uid).and_then(|path| keeper.group_views(&path).map_err(|error| error.to_string())) {
        Ok(views) => Answer::Groups(views),
        Err(error) => Answer::Error(error),
    }
}

/// Carries out settings, all or none; a group that was made for one that is refused goes again.
fn set_group(keeper: &mut Keeper, path: &str, set: &[(String, String)], uid: u32) -> Result<GroupPath, String> {
    let path = GroupPath::parse(path).map_err(|error| error.to_string())?;
    if set.is_empty() {
        return Ok(path);
    }
    let (moves, settings): (Vec<_>, Vec<_>) = set.iter().partition(|(key, _)| key == "processes");
    let number = |text: &str| text.parse::<u32>().map_err(|_| format!("{path}: processes: {text:?} is no process number"));
    let pids = moves.iter().map(|(_, value)| number(value)).collect::<Result<Vec<u32>, String>>()?;
    if let Some(stranger) = pids.iter().find(|pid| !keeper.keeps(**pid)) {
        return Err(format!("{path}: processes: {stranger} is no process of this run; swaptide ctl stats shows them"));
    }
    let before: Vec<GroupPath> = keeper.groups().iter().map(|(_, group)| group.path.clone()).collect();
    let index = keeper.groups().ensure(&path, uid).map_err(|error| error.to_string())?;
    let pairs = settings.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    if let Err(error) = keeper.groups().set(index, pairs) {
        let mut made: Vec<GroupPath> = keeper.groups().iter().map(|(_, group)| group.path.clone()).collect();
        made.retain(|path| !before.contains(path));
        // The deepest first; nobody is in them yet.
        made.sort_by_key(|path| std::cmp::Reverse(path.depth()));
        made.iter().for_each(|path| drop(keeper.groups().remove(path)));
        return Err(error.to_string());
    }
    pids.into_iter().for_each(|pid| keeper.move_process(pid, index));
    Ok(path)
}

/// Waits until it is done: the keeper tells when nothing more goes out.
fn reclaim(keeper: &mpsc::Sender<keeper::Request>, path: String, bytes: u64) -> Answer {
    let (done, result) = mpsc::channel();
    let begun = keeper::ask(keeper, move |keeper| {
        let path = GroupPath::parse(&path).map_err(GroupError::Path)?;
        let index = keeper.groups().find(&path)?;
        keeper.squeeze(index, bytes, done);
        Ok::<(), GroupError>(())
    });
    match begun {
        None => ending(),
        Some(Err(error)) => Answer::Error(error.to_string()),
        Some(Ok(())) => match result.recv() {
            Ok(Squeezed { bytes, enough }) => Answer::Reclaimed { bytes, enough },
            Err(_) => ending(),
        },
    }
}

fn tell(mut client: &UnixStream, answer: &Answer) -> io::Result<()> {
    let mut text = serde_json::to_vec(answer)?;
    text.push(b'\n');
    client.write_all(&text)
}

fn done(result: Result<(), AreaError>) -> Answer {
    result.map_or_else(|error| Answer::Error(error.to_string()), |()| Answer::Done)
}

fn swapon(areas: &Areas, text: &str, budget: u64) -> Result<(), AreaError> {
    areas.add(device::open_beyond(&device::parse(text)?, budget)?).map(drop)
}

/// The runs of this user, by the process that the user started, in ascending order. Doors that were left behind are removed.
///
/// # Errors
/// [`ControlError::Directory`].
pub fn runs() -> Result<Vec<u32>, ControlError> {
    let directory = directory();
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(ControlError::Directory(directory, error)),
    };
    let mut runs = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        let pid = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok());
        let (Some(pid), true) = (pid, path.extension().is_some_and(|end| end == "sock")) else { continue };
        match UnixStream::connect(&path) {
            Ok(_) => runs.push(pid),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => drop(std::fs::remove_file(&path)),
            Err(_) => {}
        }
    }
    runs.sort_unstable();
    Ok(runs)
}

/// Asks a run how it is: the one that `pid` started or is in, or, where none is named, the only one there is.
///
/// # Errors
/// See [`ControlError`].
pub fn stats(pid: Option<u32>) -> Result<View, ControlError> {
    stats_of(find(pid)?)
}

fn stats_of(run: u32) -> Result<View, ControlError> {
    match ask(run, &Question::Stats, |_| ())? {
        Answer::Stats(view) => Ok(*view),
        _ => Err(ControlError::Run(run, "it answers another question".into())),
    }
}

/// The run of a process that it started or that is in it, or, where none is named, the only one there is.
fn find(pid: Option<u32>) -> Result<u32, ControlError> {
    let runs = runs()?;
    match (pid, runs.as_slice()) {
        (Some(pid), runs) if runs.contains(&pid) => Ok(pid),
        (Some(pid), runs) => {
            let inside = |run: &&u32| stats_of(**run).is_ok_and(|view| view.processes.iter().any(|process| process.pid == pid));
            runs.iter().find(inside).copied().ok_or(ControlError::NotFound(pid))
        }
        (None, []) => Err(ControlError::NoRun),
        (None, [run]) => Ok(*run),
        (None, runs) => Err(ControlError::Several(runs.to_vec())),
    }
}

/// The swap areas of a run, with their numbers, in the order in which they are used.
///
/// # Errors
/// See [`ControlError`].
pub fn devices(pid: Option<u32>) -> Result<Vec<(u8, AreaView)>, ControlError> {
    let run = find(pid)?;
    match ask(run, &Question::Devices, |_| ())? {
        Answer::Devices(devices) => Ok(devices),
        _ => Err(ControlError::Run(run, "it answers another question".into())),
    }
}

/// Adds a swap area to a run: a device as `swaptide run --swap` takes it.
///
/// # Errors
/// See [`ControlError`]; nothing has changed then.
pub fn add_device(pid: Option<u32>, text: &str) -> Result<(), ControlError> {
    // The run is in another directory.
    let text = device::absolute(text).map_err(|error| ControlError::Refused(error.to_string()))?;
    ask(find(pid)?, &Question::Swapon(text), |_| ()).map(drop)
}

/// Takes a swap area away from a run, by its name or number; `progress` is told how many bytes are still there.
///
/// # Errors
/// See [`ControlError`]; the area is as it was then.
pub fn remove_device(pid: Option<u32>, name: &str, progress: impl FnMut(u64)) -> Result<(), ControlError> {
    ask(find(pid)?, &Question::Swapoff(name.to_owned()), progress).map(drop)
}

/// The tiers of a run; with a text, after they were changed by it.
///
/// # Errors
/// See [`ControlError`]; nothing has changed then.
pub fn run_tiers(pid: Option<u32>, text: Option<&str>) -> Result<TiersView, ControlError> {
    let run = find(pid)?;
    match ask(run, &Question::Tiers(text.map(str::to_owned)), |_| ())? {
        Answer::Tiers(view) => Ok(view),
        _ => Err(ControlError::Run(run, "it answers another question".into())),
    }
}

/// A group of a run and those below it; with settings, after these were made.
///
/// # Errors
/// See [`ControlError`]; nothing has changed then.
pub fn run_group(pid: Option<u32>, path: &str, set: &[(String, String)]) -> Result<Vec<GroupView>, ControlError> {
    let run = find(pid)?;
    match ask(run, &Question::Group { path: path.to_owned(), set: set.to_vec() }, |_| ())? {
        Answer::Groups(views) => Ok(views),
        _ => Err(ControlError::Run(run, "it answers another question".into())),
    }
}

/// Removes a group of a run.
///
/// # Errors
/// See [`ControlError`]; nothing has changed then.
pub fn remove_group(pid: Option<u32>, path: &str) -> Result<(), ControlError> {
    ask(find(pid)?, &Question::Remove(path.to_owned()), |_| ()).map(drop)
}

/// Takes memory from a group of a run; answers with how much went out, and whether that is what was asked for.
///
/// # Errors
/// See [`ControlError`].
pub fn reclaim_group(pid: Option<u32>, path: &str, bytes: u64) -> Result<(u64, bool), ControlError> {
    let run = find(pid)?;
    match ask(run, &Question::Reclaim { path: path.to_owned(), bytes }, |_| ())? {
        Answer::Reclaimed { bytes, enough } => Ok((bytes, enough)),
        _ => Err(ControlError::Run(run, "it answers another question".into())),
    }
}

/// Asks a run; answers that something is still left go to `progress`.
fn ask(run: u32, question: &Question, mut progress: impl FnMut(u64)) -> Result<Answer, ControlError> {
    let failed = |error: io::Error| ControlError::Run(run, error.to_string());
    let stream = UnixStream::connect(path_of(run)).map_err(failed)?;
    // What is taken away may not get any less for a while.
    let patience = match question {
        Question::Swapoff(_) | Question::Reclaim { .. } => 15 * PATIENCE,
        _ => 2 * PATIENCE,
    };
    stream.set_read_timeout(Some(patience)).map_err(failed)?;
    let mut question = serde_json::to_vec(question).map_err(|error| failed(error.into()))?;
    question.push(b'\n');
    (&stream).write_all(&question).map_err(failed)?;
    let mut reader = BufReader::new(&stream);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).map_err(failed)?;
        match serde_json::from_str(&line) {
            Ok(Answer::Left(bytes)) => progress(bytes),
            Ok(Answer::Error(why)) => return Err(ControlError::Refused(why)),
            Ok(answer) => return Ok(answer),
            Err(error) => return Err(failed(error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_a_line_of_json() {
        assert_eq!(serde_json::to_string(&Question::Stats).expect("JSON"), "\"stats\"");
        assert_eq!(serde_json::to_string(&Question::Swapoff("file:/tmp".into())).expect("JSON"), "{\"swapoff\":\"file:/tmp\"}");
        assert!(serde_json::from_str::<Question>("\"swapoff everything\"").is_err());
    }

    #[test]
    fn a_directory_that_others_may_enter_is_refused() {
        let scratch = crate::testing::Scratch::new("control");
        let open = scratch.path("open");
        std::fs::create_dir(&open).expect("directory");
        std::fs::set_permissions(&open, Permissions::from_mode(0o755)).expect("mode");
        assert!(own(&open).is_err());
        let mine = scratch.path("mine");
        own(&mine).expect("made");
        own(&mine).expect("found");
        let link = scratch.path("link");
        std::os::unix::fs::symlink(&mine, &link).expect("link");
        assert!(own(&link).is_err(), "who made the link may change where it leads");
    }
}
