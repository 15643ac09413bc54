//! The client of the daemon in a run. Each request has a connection of its own, so that a restarted
//! daemon is found like the one before.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use swaptide_ipc::{AreaId, Segment, Transport};
use swaptide_sys::Errno;
use swaptide_sys::sock::{Conn, poll_readable};

use crate::control::server::{Answer, Join, Joined, Question, REQUEST_TIMEOUT, daemon_path};
use crate::control::trust::{self, PeerPurpose};
use crate::memctl::controller;
use crate::report::totals::Totals;
use crate::swap::areas::AreaOpener;

/// The delay between two attempts to reach a daemon that is being restarted.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Longest line that comes from the daemon.
const MAX_ANSWER_BYTES: usize = 1 << 20;

/// The timeout for an answer that the daemon has ready.
const ANSWER_TIMEOUT: Duration = REQUEST_TIMEOUT.saturating_mul(2);

/// How long it may take for the answer to a question: as long as it waits for its memory
/// controller, which on a crowded machine comes to its turn late, and some more. A run that joins
/// asks that twice.
fn timeout(question: &Question) -> Duration {
    match question {
        Question::Look(_) | Question::Totals => controller::REQUEST_TIMEOUT + REQUEST_TIMEOUT,
        Question::Join(_) => 2 * controller::REQUEST_TIMEOUT + REQUEST_TIMEOUT,
        _ => ANSWER_TIMEOUT,
    }
}

/// Asks the daemon; answers with its line and the descriptor that came with it.
fn ask(question: &Question) -> io::Result<(Answer, Option<OwnedFd>)> {
    let timeout = timeout(question);
    let mut stream = trust::connect(&daemon_path(), PeerPurpose::Join)?;
    stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let mut text = serde_json::to_vec(question)?;
    text.push(b'\n');
    stream.write_all(&text)?;
    let conn = Conn::from_fd(stream.into());
    let (mut line, mut descriptor) = (Vec::new(), None);
    while line.last() != Some(&b'\n') && line.len() < MAX_ANSWER_BYTES {
        if poll_readable(&[conn.as_fd()], Some(timeout))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut buffer = [0u8; 8192];
        let mut fds = [None];
        let (length, _) = conn.recv(&mut buffer, &mut fds)?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.extend_from_slice(&buffer[..length]);
        descriptor = descriptor.or(fds[0].take());
    }
    Ok((serde_json::from_slice(&line)?, descriptor))
}

/// Asks the daemon for what a run would get: `None` if none answers.
///
/// # Errors
/// Why it would not keep the run.
pub fn look(join: &Join) -> Result<Option<(Joined, OwnedFd)>, String> {
    joined(until_answered(REQUEST_TIMEOUT, is_cut_short, || ask(&Question::Look(join.clone()))))
}

/// Has the daemon keep the descendants of this process. It was there a moment ago: should it be
/// gone, it is being started again, and waited for.
///
/// # Errors
/// Why it does not.
pub fn join(join: &Join) -> Result<Option<(Joined, OwnedFd)>, String> {
    joined(until_answered(
        REQUEST_TIMEOUT,
        |error| is_cut_short(error) || is_not_running(error),
        || ask(&Question::Join(join.clone())),
    ))
}

/// The daemon ended while it was asked.
fn is_cut_short(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
    )
}

/// There is no daemon.
fn is_not_running(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Asks again, for so long, where it fails in a way that passes.
fn until_answered<T>(
    timeout: Duration,
    passes: impl Fn(&io::Error) -> bool,
    mut ask: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let end = Instant::now() + timeout;
    loop {
        match ask() {
            Err(error) if passes(&error) && Instant::now() < end => {
                std::thread::sleep(RETRY_INTERVAL)
            }
            answer => return answer,
        }
    }
}

fn joined(
    answer: io::Result<(Answer, Option<OwnedFd>)>,
) -> Result<Option<(Joined, OwnedFd)>, String> {
    match answer {
        Ok((Answer::Joined(joined), Some(segment))) => {
            let segment = File::from(segment);
            if !trust::is_sound_for_joining(&segment) {
                return Err("its segment could be cut, or is another user's".into());
            }
            Ok(Some((joined, segment.into())))
        }
        Ok((Answer::Error(why), _)) => Err(why),
        Ok(_) => Err("the daemon is another build; install all of swaptide from one".into()),
        Err(error) if is_not_running(&error) => Ok(None),
        // Not for this user.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        // Running alone would let another user decide whether the daemon is found.
        Err(error) if trust::is_refusal(&error) => {
            Err(format!("{}: {error}", daemon_path().display()))
        }
        Err(error) => {
            Err(format!("the daemon at {} does not answer: {error}", daemon_path().display()))
        }
    }
}

/// Returns the totals of the run whose processes descend from this one; `None` if no daemon
/// answers.
pub fn totals() -> Option<Totals> {
    match ask(&Question::Totals) {
        Ok((Answer::Totals(totals), _)) => Some(*totals),
        _ => None,
    }
}

/// Descriptors of the daemon's swap areas, kept: while no daemon is there, a program that starts
/// gets those that are known.
///
/// Locks: the list, not held while the daemon is asked.
pub struct RemoteAreas {
    segment: &'static Segment,
    held: Mutex<BTreeMap<(u8, u32), OwnedFd>>,
}

impl RemoteAreas {
    /// Asks for all that there are.
    pub fn new(segment: &'static Segment) -> RemoteAreas {
        let areas = RemoteAreas { segment, held: Mutex::default() };
        for (id, _) in segment.areas().filter(|(_, area)| area.transport() == Transport::File) {
            drop(areas.open(id));
        }
        areas
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<(u8, u32), OwnedFd>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AreaOpener for RemoteAreas {
    /// A daemon that is to be asked may be stopped, or slow.
    fn may_block(&self, id: AreaId) -> bool {
        let area = self.segment.area(id);
        area.transport() == Transport::Nbd || !self.held().contains_key(&(id.0, area.generation()))
    }

    fn open(&self, id: AreaId) -> Result<OwnedFd, Errno> {
        let area = self.segment.areas().find(|(known, _)| *known == id).ok_or(Errno::NODEV)?.1;
        let fresh = || ask(&Question::Area(id.0)).ok().and_then(|(_, fd)| fd).ok_or(Errno::NODEV);
        if area.transport() == Transport::Nbd {
            // Another connection for each process.
            return fresh();
        }
        let key = (id.0, area.generation());
        if let Some(known) = self.held().get(&key) {
            return rustix::io::fcntl_dupfd_cloexec(known, 0);
        }
        let fd = fresh()?;
        let mut held = self.held();
        held.retain(|(number, generation), _| *number != key.0 || *generation == key.1);
        rustix::io::fcntl_dupfd_cloexec(held.entry(key).or_insert(fd), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_ipc::NewArea;

    #[test]
    fn only_what_is_held_is_opened_without_the_daemon() {
        let segment = crate::testing::segment();
        let id = segment.add_area(NewArea::of_file(0, 9)).expect("area");
        let areas = RemoteAreas { segment, held: Mutex::default() };
        assert!(areas.may_block(id), "its first thread would wait for a daemon that is stopped");
        let null = std::fs::File::open("/dev/null").expect("open");
        let generation = segment.area(id).generation();
        areas.held().insert((id.0, generation), null.into());
        assert!(!areas.may_block(id) && areas.open(id).is_ok());
        // Another area of that number is another one.
        let old = areas.held().pop_first().expect("one").1;
        areas.held().insert((id.0, generation.wrapping_add(1)), old);
        assert!(areas.may_block(id));
    }

    #[test]
    fn daemon_answer_timeout_covers_controller() {
        let run = || Join {
            launcher: 1,
            group: None,
            program: String::new(),
            max: None,
            strict: false,
            stall: Default::default(),
            container: None,
            recorded: false,
        };
        for (question, asks) in
            [(Question::Look(run()), 1), (Question::Join(run()), 2), (Question::Totals, 1)]
        {
            let waits = asks * controller::REQUEST_TIMEOUT;
            assert!(timeout(&question) > waits, "{question:?} may take {waits:?}");
        }
    }

    #[test]
    fn a_daemon_that_ends_while_it_is_asked_is_asked_again() {
        let second = Duration::from_secs(1);
        let mut answers = vec![
            Ok(7),
            Err(io::ErrorKind::ConnectionRefused),
            Err(io::ErrorKind::BrokenPipe),
            Err(io::ErrorKind::UnexpectedEof),
        ];
        let mut ask =
            || answers.pop().expect("no more is asked than needed").map_err(io::Error::from);
        assert_eq!(
            until_answered(second, |error| is_cut_short(error) || is_not_running(error), &mut ask)
                .ok(),
            Some(7)
        );
        // One that has not been there yet is not waited for, and none for ever.
        let kind = |result: io::Result<u8>| result.map_err(|error| error.kind());
        let refused = || Err(io::ErrorKind::ConnectionRefused.into());
        assert_eq!(
            kind(until_answered(second, is_cut_short, refused)),
            Err(io::ErrorKind::ConnectionRefused)
        );
        let cut = || Err(io::ErrorKind::UnexpectedEof.into());
        assert_eq!(
            kind(until_answered(3 * RETRY_INTERVAL, is_cut_short, cut)),
            Err(io::ErrorKind::UnexpectedEof)
        );
        assert_eq!(
            kind(until_answered(second, is_cut_short, || Err(io::ErrorKind::InvalidData.into()))),
            Err(io::ErrorKind::InvalidData)
        );
    }
}
