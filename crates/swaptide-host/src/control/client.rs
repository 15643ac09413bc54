//! Clients of a run or the daemon.
//!
//! Owns: which of them is asked about a process, and how long an answer is waited for. Which
//! sockets are trusted, `trust.rs` says.
//!
//! Locks: none.

use std::io::{self, BufRead, BufReader, Write};
use std::path::PathBuf;

use crate::cgroup::tree::GroupView;
use crate::control::server::{
    Answer, ControlError, DaemonView, Question, REQUEST_TIMEOUT, TiersView, daemon_path, directory,
    path_of,
};
use crate::control::trust::{self, PeerPurpose};
use crate::memctl::controller;
use crate::report::totals::View;
use crate::swap::areas::AreaView;
use crate::swap::spec;

/// The runs of this user, by the process that the user started, in ascending order. Sockets that
/// were left behind are removed.
///
/// # Errors
/// [`ControlError::Directory`].
pub fn runs() -> Result<Vec<u32>, ControlError> {
    let directory = directory();
    let found = trust::look(&directory, PeerPurpose::Ask);
    let entries = match found.and_then(|_| std::fs::read_dir(&directory)) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(ControlError::Directory(directory, error)),
    };
    let mut runs = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        let pid = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok());
        let (Some(pid), true) = (pid, path.extension().is_some_and(|end| end == "sock")) else {
            continue;
        };
        match trust::connect(&path, PeerPurpose::Ask) {
            Ok(_) => runs.push(pid),
            Err(error)
                if error.kind() == io::ErrorKind::ConnectionRefused
                    && trust::is_own(&directory) =>
            {
                drop(std::fs::remove_file(&path))
            }
            Err(_) => {}
        }
    }
    runs.sort_unstable();
    Ok(runs)
}

/// The server that is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServerAddress {
    /// A run, by the process that the user started.
    Run(u32),
    /// The daemon; one of its runs by any process, where that matters.
    Daemon(Option<u32>),
}

/// Asks a run how it is: the one that `pid` started or is in, or, where none is named, the only one
/// there is.
///
/// # Errors
/// See [`ControlError`].
pub fn stats(pid: Option<u32>) -> Result<View, ControlError> {
    let target = find(pid)?;
    match (target, target == ServerAddress::Daemon(None)) {
        (_, true) => match daemon_runs().as_slice() {
            [] => Err(ControlError::NoRun),
            [run] => stats_of(ServerAddress::Daemon(Some(*run))),
            runs => Err(ControlError::Several(runs.to_vec())),
        },
        (target, _) => stats_of(target),
    }
}

fn stats_of(target: ServerAddress) -> Result<View, ControlError> {
    let question = match target {
        ServerAddress::Daemon(Some(pid)) => Question::StatsOf(pid),
        _ => Question::Stats,
    };
    match ask(target, &question, |_| ())? {
        Answer::Stats(view) => Ok(*view),
        _ => Err(other(target)),
    }
}

fn other(target: ServerAddress) -> ControlError {
    target.failed("unexpected reply".into())
}

impl ServerAddress {
    fn failed(self, why: String) -> ControlError {
        match self {
            ServerAddress::Run(run) => ControlError::Run(run, why),
            ServerAddress::Daemon(_) => ControlError::Daemon(why),
        }
    }

    fn path(self) -> PathBuf {
        match self {
            ServerAddress::Run(run) => path_of(run),
            ServerAddress::Daemon(_) => daemon_path(),
        }
    }
}

/// True if a daemon answers there.
pub(crate) fn daemon_is_there() -> bool {
    trust::connect(&daemon_path(), PeerPurpose::Ask).is_ok()
}

/// The runs that the daemon keeps, by the processes that the users started.
pub fn daemon_runs() -> Vec<u32> {
    match ask(ServerAddress::Daemon(None), &Question::Runs, |_| ()) {
        Ok(Answer::Runs(runs)) => runs.into_iter().map(|(launcher, _)| launcher).collect(),
        _ => Vec::new(),
    }
}

/// The budget of the daemon.
///
/// # Errors
/// See [`ControlError`].
pub fn budget() -> Result<u64, ControlError> {
    let target = ServerAddress::Daemon(None);
    match ask(target, &Question::Budget, |_| ())? {
        Answer::Budget(bytes) => Ok(bytes),
        _ => Err(other(target)),
    }
}

/// The budget of a run in bytes, or of the daemon that keeps it; with a size, of a run of its own,
/// after it was changed.
///
/// # Errors
/// See [`ControlError`]; nothing has changed then.
pub fn run_budget(pid: Option<u32>, set: Option<u64>) -> Result<u64, ControlError> {
    let target = find(pid)?;
    match ask(target, &set.map_or(Question::Budget, Question::SetBudget), |_| ())? {
        Answer::Budget(bytes) => Ok(bytes),
        _ => Err(other(target)),
    }
}

/// The runs that the daemon keeps.
///
/// # Errors
/// See [`ControlError`].
pub fn views() -> Result<Vec<View>, ControlError> {
    let target = ServerAddress::Daemon(None);
    match ask(target, &Question::Views, |_| ())? {
        Answer::Views(views) => Ok(views),
        _ => Err(other(target)),
    }
}

/// The server to ask about a process, or, where none is named, the only one there is.
fn find(pid: Option<u32>) -> Result<ServerAddress, ControlError> {
    let runs = runs()?;
    match (pid, runs.as_slice()) {
        (Some(pid), runs) if runs.contains(&pid) => Ok(ServerAddress::Run(pid)),
        (Some(pid), runs) => {
            let inside = |run: &&u32| {
                stats_of(ServerAddress::Run(**run))
                    .is_ok_and(|view| view.processes.iter().any(|process| process.pid == pid))
            };
            if let Some(run) = runs.iter().find(inside) {
                return Ok(ServerAddress::Run(*run));
            }
            let kept = ServerAddress::Daemon(Some(pid));
            if daemon_is_there() && stats_of(kept).is_ok() {
                Ok(kept)
            } else {
                Err(ControlError::NotFound(pid))
            }
        }
        (None, []) if daemon_is_there() => Ok(ServerAddress::Daemon(None)),
        (None, []) => Err(ControlError::NoRun),
        (None, [run]) if !daemon_is_there() => Ok(ServerAddress::Run(*run)),
        (None, runs) => Err(ControlError::Several(runs.to_vec())),
    }
}

/// Has the daemon read its configuration file again.
///
/// # Errors
/// See [`ControlError`]; nothing has changed then.
pub fn reload() -> Result<(), ControlError> {
    ask(ServerAddress::Daemon(None), &Question::Reload, |_| ()).map(drop)
}

/// Whether the daemon takes runs, and what it has.
///
/// # Errors
/// See [`ControlError`].
pub fn ready() -> Result<DaemonView, ControlError> {
    daemon_view(&Question::Ready)
}

/// Has the daemon take no run any more, or take them again; answers with what it has.
///
/// # Errors
/// See [`ControlError`]; nothing has changed then.
pub fn drain(on: bool) -> Result<DaemonView, ControlError> {
    daemon_view(&Question::Drain(on))
}

fn daemon_view(question: &Question) -> Result<DaemonView, ControlError> {
    let target = ServerAddress::Daemon(None);
    match ask(target, question, |_| ())? {
        Answer::Ready(view) => Ok(view),
        _ => Err(other(target)),
    }
}

/// The swap areas of a run, with their numbers, in the order in which they are used.
///
/// # Errors
/// See [`ControlError`].
pub fn devices(pid: Option<u32>) -> Result<Vec<(u8, AreaView)>, ControlError> {
    let target = find(pid)?;
    match ask(target, &Question::Devices, |_| ())? {
        Answer::Devices(devices) => Ok(devices),
        _ => Err(other(target)),
    }
}

/// Adds a swap area to a run: a device as `swaptide run --swap` takes it.
///
/// # Errors
/// See [`ControlError`]; nothing has changed then.
pub fn add_device(pid: Option<u32>, text: &str) -> Result<(), ControlError> {
    // The run is in another directory.
    let text = spec::absolute(text).map_err(|error| ControlError::Refused(error.to_string()))?;
    ask(find(pid)?, &Question::Swapon(text), |_| ()).map(drop)
}

/// Takes a swap area away from a run, by its name or number; `progress` is told how many bytes are
/// still there.
///
/// # Errors
/// See [`ControlError`]; the area is as it was then.
pub fn remove_device(
    pid: Option<u32>,
    name: &str,
    progress: impl FnMut(u64),
) -> Result<(), ControlError> {
    // Areas have absolute names; what is no device's text is a number, or will be refused.
    let name = spec::absolute(name).unwrap_or_else(|_| name.to_owned());
    ask(find(pid)?, &Question::Swapoff(name), progress).map(drop)
}

/// The tiers of a run; with a text, after they were changed by it.
///
/// # Errors
/// See [`ControlError`]; nothing has changed then.
pub fn run_tiers(pid: Option<u32>, text: Option<&str>) -> Result<TiersView, ControlError> {
    let target = find(pid)?;
    match ask(target, &Question::Tiers(text.map(str::to_owned)), |_| ())? {
        Answer::Tiers(view) => Ok(view),
        _ => Err(other(target)),
    }
}

/// How much comes in for a fault of a run, by the keys of `READAHEAD` of the server;
/// with keys and values, after these were changed.
///
/// # Errors
/// See [`ControlError`]; nothing has changed then.
pub fn readahead(
    pid: Option<u32>,
    set: &[(String, String)],
) -> Result<Vec<(String, String)>, ControlError> {
    let target = find(pid)?;
    match ask(target, &Question::Readahead(set.to_vec()), |_| ())? {
        Answer::Readahead(values) => Ok(values),
        _ => Err(other(target)),
    }
}

/// A group of a run and those below it; with settings, after these were made.
///
/// # Errors
/// See [`ControlError`]; nothing has changed then.
pub fn run_group(
    pid: Option<u32>,
    path: &str,
    set: &[(String, String)],
) -> Result<Vec<GroupView>, ControlError> {
    let target = find(pid)?;
    match ask(target, &Question::Group { path: path.to_owned(), set: set.to_vec() }, |_| ())? {
        Answer::Groups(views) => Ok(views),
        _ => Err(other(target)),
    }
}

/// Removes a group of a run.
///
/// # Errors
/// See [`ControlError`]; nothing has changed then.
pub fn remove_group(pid: Option<u32>, path: &str) -> Result<(), ControlError> {
    ask(find(pid)?, &Question::Remove(path.to_owned()), |_| ()).map(drop)
}

/// Takes memory from a group of a run; answers with how much went out, and whether that is what was
/// asked for.
///
/// # Errors
/// See [`ControlError`].
pub fn reclaim_group(
    pid: Option<u32>,
    path: &str,
    bytes: u64,
) -> Result<(u64, bool), ControlError> {
    let target = find(pid)?;
    match ask(target, &Question::Reclaim { path: path.to_owned(), bytes }, |_| ())? {
        Answer::Reclaimed { bytes, enough } => Ok((bytes, enough)),
        _ => Err(other(target)),
    }
}

/// Has a group go out and stay there; answers with how much went out.
///
/// # Errors
/// See [`ControlError`].
pub fn freeze_group(pid: Option<u32>, path: &str) -> Result<u64, ControlError> {
    let target = find(pid)?;
    match ask(target, &Question::Freeze(path.to_owned()), |_| ())? {
        Answer::Reclaimed { bytes, .. } => Ok(bytes),
        _ => Err(other(target)),
    }
}

/// Brings everything of a process back and detaches it for good; of all processes of the run, where
/// none is named or it is the one that the user started. `progress` is told how many bytes are
/// still out.
///
/// # Errors
/// See [`ControlError`]; what was not let go is managed as before.
pub fn detach_process(pid: Option<u32>, progress: impl FnMut(u64)) -> Result<(), ControlError> {
    let target = find(pid)?;
    let pid = match (pid, target) {
        (Some(pid), _) => pid,
        (None, ServerAddress::Run(run)) => run,
        (None, ServerAddress::Daemon(_)) => return Err(ControlError::Several(daemon_runs())),
    };
    ask(target, &Question::Detach(pid), progress).map(drop)
}

/// Has a group come back; answers with how much came, and whether that is everything. `progress` is
/// told how many bytes are still out.
///
/// # Errors
/// See [`ControlError`].
pub fn preload_group(
    pid: Option<u32>,
    path: &str,
    progress: impl FnMut(u64),
) -> Result<(u64, bool), ControlError> {
    let target = find(pid)?;
    match ask(target, &Question::Preload(path.to_owned()), progress)? {
        Answer::Reclaimed { bytes, enough } => Ok((bytes, enough)),
        _ => Err(other(target)),
    }
}

/// Asks a run or a daemon; answers that something is still left go to `progress`.
fn ask(
    target: ServerAddress,
    question: &Question,
    mut progress: impl FnMut(u64),
) -> Result<Answer, ControlError> {
    let failed = |error: io::Error| target.failed(error.to_string());
    let stream = trust::connect(&target.path(), PeerPurpose::Ask).map_err(failed)?;
    // What is taken away may not get any less for a while.
    let timeout = match question {
        Question::Swapoff(_)
        | Question::Reclaim { .. }
        | Question::Freeze(_)
        | Question::Preload(_)
        | Question::Detach(_) => 150 * REQUEST_TIMEOUT,
        _ => controller::REQUEST_TIMEOUT + REQUEST_TIMEOUT,
    };
    stream.set_read_timeout(Some(timeout)).map_err(failed)?;
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
