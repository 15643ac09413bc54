//! Takes over the filters of forks of processes from the supervisors that have let them go
//! ([`filter_offers`](super::filter_offers)).
//!
//! Locks: none.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use swaptide_sys::sock::{Conn, poll_readable};

use crate::control::filter_offers::{FilterList, KEPT_FILTERS, OfferedFilters, TAKEN};
use crate::control::server::{Answer, Question, directory};
use crate::control::trust::{self, PeerPurpose};

/// The time in which a supervisor answers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_LIST_BYTES: usize = 1 << 20;

/// A supervisor that has lent its filters, for as long as this is there.
pub(crate) struct FilterLender(Conn);

impl FilterLender {
    /// They have a new reader from now on.
    ///
    /// # Errors
    /// That the supervisor has them again.
    pub(crate) fn release(self) -> io::Result<()> {
        self.0.send(TAKEN, &[])?;
        let (mut answer, mut got) = ([0u8; 64], 0);
        while got < TAKEN.len() {
            if poll_readable(&[self.0.as_fd()], Some(ANSWER_TIMEOUT))? == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match self.0.recv(&mut answer[got..], &mut [])? {
                (0, _) => return Err(io::ErrorKind::UnexpectedEof.into()),
                (length, _) => got += length,
            }
        }
        if answer.starts_with(TAKEN) { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }
}

/// What was found of the filters of a process.
pub(crate) enum FoundFilters {
    /// No supervisor of this user's has them.
    None,
    /// The run of this process's has them, and goes on.
    InUse(PathBuf),
    Lent(FilterLender, OfferedFilters),
}

/// Asks the supervisor at a socket.
fn ask(socket: &Path, pid: u32) -> io::Result<FoundFilters> {
    let mut stream = trust::connect(socket, PeerPurpose::Join)?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    let mut text = serde_json::to_vec(&Question::Filters(pid))?;
    text.push(b'\n');
    stream.write_all(&text)?;
    let conn = Conn::from_fd(OwnedFd::from(stream));
    let (mut line, mut filters) = (Vec::new(), Vec::new());
    let mut list: Option<FilterList> = None;
    while list.as_ref().is_none_or(|list| filters.len() < list.count) {
        if poll_readable(&[conn.as_fd()], Some(ANSWER_TIMEOUT))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let (mut buffer, mut fds) = ([0u8; 8192], [None]);
        let (length, _) = conn.recv(&mut buffer, &mut fds)?;
        if length == 0 || line.len() > MAX_LIST_BYTES {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        filters.extend(fds[0].take());
        line.extend_from_slice(&buffer[..length]);
        if let Some(end) = line.iter().position(|byte| *byte == b'\n').filter(|_| list.is_none()) {
            match serde_json::from_slice(&line[..end])? {
                Answer::Filters(found) => list = Some(found),
                Answer::FiltersInUse => return Ok(FoundFilters::InUse(socket.to_owned())),
                _ => return Ok(FoundFilters::None),
            }
        }
    }
    let processes = list.map(|list| list.processes).unwrap_or_default();
    Ok(FoundFilters::Lent(FilterLender(conn), OfferedFilters { filters, processes }))
}

/// The filters of a process that a supervisor of this user has.
pub(crate) fn find(pid: u32) -> FoundFilters {
    let directory = directory();
    let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
    let sockets: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    for ending in [KEPT_FILTERS, "sock"] {
        let has_ending = |path: &&PathBuf| path.extension().is_some_and(|end| end == ending);
        for socket in sockets.iter().filter(has_ending) {
            match ask(socket, pid) {
                Ok(FoundFilters::None) => {}
                Ok(found) => return found,
                Err(error)
                    if error.kind() == io::ErrorKind::ConnectionRefused
                        && trust::is_own(&directory) =>
                {
                    // Its supervisor was killed.
                    drop(std::fs::remove_file(socket));
                }
                Err(_) => {}
            }
        }
    }
    FoundFilters::None
}
