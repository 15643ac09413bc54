//! The door of a run: a socket on which its owner asks what goes on inside.
//!
//! Owns the directory of the sockets, their names, and both sides of the conversation: one line of JSON in, one line of JSON out, both hang up.
//! The directory is the user's own (mode 0700), the sockets have mode 0600, and who connects must be of the run's user or root.
//!
//! A run whose door cannot be opened goes on without one: nothing of it depends on being asked.
//!
//! Locks: none; the thread asks the keeper through its channel.

use std::fmt;
use std::fs::{DirBuilder, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::net::sockopt::socket_peercred;
use serde::{Deserialize, Serialize};

use crate::keeper;
use crate::report::View;

/// Who connects sends its line at once, and who is asked answers at once; nobody is waited for longer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest request in bytes.
const LONGEST: u64 = 4096;

/// What a run can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Question {
    /// What it has, uses and did so far.
    Stats,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Stats(Box<View>),
    Error(String),
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
    /// The program's name.
    pub program: String,
    /// When it began.
    pub started: Instant,
}

/// Opens the door of a run and starts the thread that answers there.
///
/// # Errors
/// Why there is none.
pub fn open(run: Run, keeper: mpsc::Sender<keeper::Request>) -> io::Result<Door> {
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
        for client in listener.incoming().flatten() {
            // A client that misbehaves or went away is its own trouble.
            let _ = converse(client, &run, &keeper);
        }
    })?;
    Ok(door)
}

fn converse(client: UnixStream, run: &Run, keeper: &mpsc::Sender<keeper::Request>) -> io::Result<()> {
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
            let (answer, view) = mpsc::channel();
            let _ = keeper.send(keeper::Request::View(answer));
            match view.recv_timeout(PATIENCE) {
                Ok(view) => {
                    let (program, wall_s) = (run.program.clone(), run.started.elapsed().as_secs_f64());
                    Answer::Stats(Box::new(View { pid: run.pid, program, wall_s, ..view }))
                }
                Err(_) => Answer::Error("it is ending".into()),
            }
        }
        Err(error) => Answer::Error(format!("not a question: {error}")),
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    (&client).write_all(&text)
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
    let runs = runs()?;
    match (pid, runs.as_slice()) {
        (Some(pid), runs) if runs.contains(&pid) => ask(pid),
        (Some(pid), runs) => {
            let inside = |view: &View| view.processes.iter().any(|process| process.pid == pid);
            runs.iter().filter_map(|run| ask(*run).ok()).find(inside).ok_or(ControlError::NotFound(pid))
        }
        (None, []) => Err(ControlError::NoRun),
        (None, [run]) => ask(*run),
        (None, runs) => Err(ControlError::Several(runs.to_vec())),
    }
}

fn ask(run: u32) -> Result<View, ControlError> {
    let failed = |error: io::Error| ControlError::Run(run, error.to_string());
    let stream = UnixStream::connect(path_of(run)).map_err(failed)?;
    stream.set_read_timeout(Some(2 * PATIENCE)).map_err(failed)?;
    let mut question = serde_json::to_vec(&Question::Stats).map_err(|error| failed(error.into()))?;
    question.push(b'\n');
    (&stream).write_all(&question).map_err(failed)?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).map_err(failed)?;
    match serde_json::from_str(&line) {
        Ok(Answer::Stats(view)) => Ok(*view),
        Ok(Answer::Error(why)) => Err(ControlError::Run(run, why)),
        Err(error) => Err(failed(error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_one_word_of_json() {
        assert_eq!(serde_json::to_string(&Question::Stats).expect("JSON"), "\"stats\"");
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
