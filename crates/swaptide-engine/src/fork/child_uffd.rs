//! Without fork events: how the parent's handler comes by the child's userfaultfd.
//!
//! | supervisor | forking thread | child | parent's handler |
//! |---|---|---|---|
//! | follows the thread | asks for that, requests `ForkPrepare`, waits | | lifts the `MADV_DONTFORK` advice: **prepared** |
//! | | fork(2) | is stopped | |
//! | has the child begin here | is stopped | says that it runs | reads until no change is under way; says what is in doubt |
//! | | | makes a userfaultfd, arms what the table lists, sends it | takes it as from a fork event |
//! | lets the thread continue | continues | continues where fork(2) returns | is handing over |
//!
//! *In doubt* is every place that a change concerns that was read since the thread stood ready: the
//! child may have it from before that change or from after it, and what it has there may be managed
//! memory or something that another thread has mapped since. There the child arms what bears the
//! mark put on before the `MADV_DONTFORK` advice was lifted ([`crate::mm::dontfork`]); from there
//! on its userfaultfd tells what it has, as one from the kernel would ([`crate::fork::layout`]).
//!
//! Invariants
//! 1. The child touches no memory of the program before it is armed, and takes no lock that it has
//!    not opened itself: this is the only thread, and it may have been anywhere.
//! 2. It allocates nothing.
//! 3. No thread continues if this fails: the child ends with a message.
//!
//! Locks: the memory lock of the child's copy, which no thread holds there.

use std::mem::ManuallyDrop;
use std::time::Duration;

use swaptide_sys::maps::{for_each_advised_vma, for_each_vma};
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::sock::{Conn, poll_readable};
use swaptide_sys::thread::now;
use swaptide_sys::uffd::{Coverage, Uffd};
use swaptide_sys::{AsFd, Errno, FromRawFd, OwnedFd};

use crate::engine::{Engine, FEATURES};
use crate::events::fork_state::ForkPhase;
use crate::events::reader::{Interrupted, UffdReader};
use crate::fault_injection::StopPoint;
use crate::mm::vma_change::VmaChange;

/// The child's first word: it is there.
const MSG_STARTED: u8 = b'B';
/// Its second: its userfaultfd comes with it.
const MSG_REGISTERED: u8 = b'A';
/// The handler's answer to the first: the child cannot have its memory, and ends.
const MSG_REFUSED: u8 = b'R';
/// The handler's: it has it.
const MSG_RECEIVED: u8 = b'G';
/// All is in doubt: the child arms what bears the mark, whatever its table lists.
const EVERYTHING: VirtRange = VirtRange { start: VirtAddr(0), end: VirtAddr(usize::MAX) };
/// Doubts that are told one by one.
const MAX_DOUBTFUL_RANGES: usize = 64;
const DOUBT_BYTES: usize = 16;
/// Working space for lists of mappings, on a stack of [`STACK_BYTES`] bytes.
const CHILD_MAPS_BUFFER_BYTES: usize = 16 << 10;
/// Bytes of stack that [`child_init`] is to find.
pub const STACK_BYTES: usize = 96 << 10;
/// The time to wait for a moment in which no thread changes mappings.
const QUIET_TIMEOUT: Duration = Duration::from_millis(20);
/// Between two checks of what the kernel says.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// The ranges that a change may have altered.
fn ranges_of(change: VmaChange) -> impl Iterator<Item = VirtRange> {
    let (one, other) = match change {
        VmaChange::Moved { from, to, len } => (
            Some(VirtRange { start: from, end: from.offset(len) }),
            Some(VirtRange { start: to, end: to.offset(len) }),
        ),
        VmaChange::Gone(range) => (Some(range), None),
        // Given up and still there is no doubt; what the table armed it knows.
        VmaChange::Dropped(_) | VmaChange::Armed(_) => (None, None),
    };
    one.into_iter().chain(other)
}

fn encode(doubts: &[VirtRange]) -> ([u8; MAX_DOUBTFUL_RANGES * DOUBT_BYTES], usize) {
    let mut bytes = [0; MAX_DOUBTFUL_RANGES * DOUBT_BYTES];
    let doubts = if doubts.len() > MAX_DOUBTFUL_RANGES { &[EVERYTHING] } else { doubts };
    for (place, range) in bytes.chunks_exact_mut(DOUBT_BYTES).zip(doubts) {
        place[..8].copy_from_slice(&(range.start.0 as u64).to_le_bytes());
        place[8..].copy_from_slice(&(range.end.0 as u64).to_le_bytes());
    }
    (bytes, doubts.len() * DOUBT_BYTES)
}

fn decode(bytes: &[u8]) -> impl Iterator<Item = VirtRange> + Clone + '_ {
    let word = |bytes: &[u8]| {
        VirtAddr(u64::from_le_bytes(bytes.try_into().expect("eight bytes")) as usize)
    };
    bytes
        .chunks_exact(DOUBT_BYTES)
        .map(move |both| VirtRange { start: word(&both[..8]), end: word(&both[8..]) })
}

/// The parts of a range that are in no doubt, and those that are.
fn split(
    range: VirtRange,
    doubts: impl Iterator<Item = VirtRange> + Clone,
    mut f: impl FnMut(VirtRange, bool),
) {
    let mut at = range.start;
    while at < range.end {
        let within = doubts.clone().filter(|d| d.start <= at && at < d.end).map(|d| d.end).max();
        let end = match within {
            Some(end) => end,
            None => doubts
                .clone()
                .map(|d| d.start)
                .filter(|start| *start > at)
                .min()
                .unwrap_or(range.end),
        };
        let end = end.min(range.end);
        f(VirtRange { start: at, end }, within.is_some());
        at = end;
    }
}

/// Waits a moment for the child of a followed fork, or for any message, and reads that.
/// `is_list_whole`: the child's copy of the list of regions is.
///
/// # Errors
/// [`Interrupted`] when a fork through no hook was read.
pub(super) fn receive_child_uffd(
    reader: &mut UffdReader,
    conn: &Conn,
    timeout: Duration,
    is_list_whole: bool,
) -> Result<(), Interrupted> {
    let ready = poll_readable(&[reader.uffd.as_fd(), conn.as_fd()], Some(timeout)).unwrap_or(0);
    if ready & 1 != 0 {
        reader.read_within(Some(Duration::ZERO))?;
    }
    if ready & 2 == 0 {
        return Ok(());
    }
    let (mut word, mut fds) = ([0u8; 16], [None]);
    let answered = match conn.recv(&mut word, &mut fds) {
        // There is no child: the forking thread has closed its end, and requests `ForkDone` in a
        // moment.
        Ok((0, _)) => return reader.read_within(Some(timeout)),
        Ok((1, _)) if word[0] == MSG_STARTED && reader.fork.is_lost => {
            (reader.engine.start.log)(
                "a fork took longer than the engine could keep what its child needs: the child is \
                stopped rather than given wrong data",
            );
            conn.send(&[MSG_REFUSED], &[])
        }
        Ok((1, _)) if word[0] == MSG_STARTED => {
            // The copy was made: memory may be allocated again.
            reader.fork.phase = ForkPhase::Forked;
            send_doubtful_ranges(reader, conn, is_list_whole)
        }
        Ok((1, 1)) if word[0] == MSG_REGISTERED => {
            let [fd] = fds;
            reader.fork.child = fd.map(|fd| reader.fork.new_child(Uffd::from_fd(fd)));
            conn.send(&[MSG_RECEIVED], &[])
        }
        _ => Err(Errno::PROTO),
    };
    if let Err(errno) = answered {
        // The child ends, for it gets no answer.
        (reader.engine.start.log)(&format!(
            "a child was not taken in: {}",
            swaptide_sys::ErrnoName(errno)
        ));
    }
    Ok(())
}

fn send_doubtful_ranges(
    reader: &mut UffdReader,
    conn: &Conn,
    is_list_whole: bool,
) -> Result<(), Errno> {
    let began = now();
    let mut quiet = false;
    while !quiet && now().since(began) < QUIET_TIMEOUT {
        quiet = reader.uffd.coverage(reader.engine.handler_requests.range()) != Coverage::Changing;
        let _ = poll_readable(
            &[reader.uffd.as_fd()],
            Some(if quiet { Duration::ZERO } else { POLL_INTERVAL }),
        );
        reader.read_noting();
    }
    let late: Vec<VmaChange> =
        reader.engine.mm.lock().changes.late.iter().filter_map(VmaChange::of).collect();
    let doubts: Vec<VirtRange> = reader
        .fork
        .noted
        .iter()
        .map(|noted| &noted.change)
        .chain(&late)
        .copied()
        .flat_map(ranges_of)
        .collect();
    let (bytes, length) = encode(if quiet && is_list_whole { &doubts } else { &[EVERYTHING] });
    // A message of nothing would look like the end.
    let mut message = [0u8; 1 + MAX_DOUBTFUL_RANGES * DOUBT_BYTES];
    message[0] = MSG_STARTED;
    message[1..=length].copy_from_slice(&bytes[..length]);
    conn.send(&message[..=length], &[])
}

/// In a child of a followed fork, before it runs anything of its own: arms what is managed with
/// a userfaultfd of its own, which the parent's handler has when this returns. On a stack of
/// [`STACK_BYTES`] bytes that is no memory of the program.
///
/// # Errors
/// The error of the kernel, or `EPROTO` if the parent does not answer: the process must be ended.
pub fn child_init(engine: &Engine) -> Result<(), Errno> {
    // The parent's end of the pair is of no use here: its number may be needed.
    engine.fork.close_end(false);
    let number = engine.fork.child_end().ok_or(Errno::PROTO)?;
    // SAFETY: the number is the child's end in this process's table; it stays open for the thread
    // that takes over, and is not closed here.
    let conn = ManuallyDrop::new(Conn::from_fd(unsafe { OwnedFd::from_raw_fd(number) }));
    engine.injection().stop_at(StopPoint::ChildStarts);
    conn.send(&[MSG_STARTED], &[])?;
    let mut message = [0u8; 1 + MAX_DOUBTFUL_RANGES * DOUBT_BYTES];
    let (length, _) = conn.recv(&mut message, &mut [])?;
    if length == 0 || message[0] != MSG_STARTED {
        return Err(Errno::PROTO);
    }
    let uffd = Uffd::open(FEATURES, true).map_err(|error| error.errno())?;
    uffd.register_missing(engine.handler_requests.range())?;
    uffd.register_missing(engine.handler_requests.request_pages())?;
    // SAFETY: this is the only thread of the process; the parent's, one of which may have had
    // the lock, are not here.
    unsafe { engine.mm.force_unlock() };
    let mm = engine.mm.lock();
    uffd.register_missing(mm.staging.range())?;
    let doubts = decode(&message[1..length]);
    // Where all is in doubt, the list of regions may be half written.
    if !doubts.clone().any(|doubt| doubt == EVERYTHING) {
        for region in mm.regions.iter() {
            let mut armed = Ok(());
            split(region, doubts.clone(), |part, doubtful| {
                if !doubtful && armed.is_ok() {
                    armed = arm(&uffd, part);
                }
            });
            armed?;
        }
    }
    drop(mm);
    if length > 1 {
        register_marked(&uffd, doubts)?;
    }
    conn.send(&[MSG_REGISTERED], &[uffd.as_fd()])?;
    let mut answer = [0u8];
    match conn.recv(&mut answer, &mut [])? {
        (1, _) if answer == [MSG_RECEIVED] => Ok(()),
        _ => Err(Errno::PROTO),
    }
}

/// Arms a range of which nothing is in doubt: what is mapped there is managed memory. Where the
/// advice could not be lifted nothing is.
fn arm(uffd: &Uffd, range: VirtRange) -> Result<(), Errno> {
    if uffd.register_missing(range).is_ok() {
        return Ok(());
    }
    let mut armed = Ok(());
    for_each_vma(&mut [0; CHILD_MAPS_BUFFER_BYTES], |vma| {
        let part = VirtRange {
            start: vma.range.start.max(range.start),
            end: vma.range.end.min(range.end),
        };
        if part.start < part.end && armed.is_ok() {
            armed = uffd.register_missing(part);
        }
        vma.range.end < range.end
    })?;
    armed
}

/// Arms what of the doubtful ranges bears the mark.
fn register_marked(
    uffd: &Uffd,
    doubts: impl Iterator<Item = VirtRange> + Clone,
) -> Result<(), Errno> {
    let mut armed = Ok(());
    for_each_advised_vma(&mut [0; CHILD_MAPS_BUFFER_BYTES], |vma, advised| {
        for doubt in doubts.clone().filter(|_| advised.random) {
            let part = VirtRange { start: vma.start.max(doubt.start), end: vma.end.min(doubt.end) };
            if part.start < part.end && armed.is_ok() {
                armed = match uffd.register_missing(part) {
                    // A file's mapping, which the program has given this advice for: nothing that
                    // was managed is refused so.
                    Err(Errno::INVAL) => Ok(()),
                    answer => answer,
                };
            }
        }
        armed.is_ok()
    })?;
    armed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: usize, end: usize) -> VirtRange {
        VirtRange { start: VirtAddr(start << 12), end: VirtAddr(end << 12) }
    }

    #[test]
    fn doubtful_cases_are_reported_separately() {
        let noted = [
            VmaChange::Gone(range(4, 6)),
            VmaChange::Moved { from: VirtAddr(20 << 12), to: VirtAddr(30 << 12), len: 2 << 12 },
            VmaChange::Dropped(range(8, 9)),
            VmaChange::Armed(range(10, 11)),
        ];
        let (bytes, length) =
            encode(&noted.iter().copied().flat_map(ranges_of).collect::<Vec<_>>());
        let doubts: Vec<VirtRange> = decode(&bytes[..length]).collect();
        assert_eq!(doubts, [range(4, 6), range(20, 22), range(30, 32)]);
        let mut parts = Vec::new();
        split(range(0, 31), doubts.iter().copied(), |part, doubtful| parts.push((part, doubtful)));
        let expected = [
            (range(0, 4), false),
            (range(4, 6), true),
            (range(6, 20), false),
            (range(20, 22), true),
            (range(22, 30), false),
            (range(30, 31), true),
        ];
        assert_eq!(parts, expected);
    }

    #[test]
    fn doubts_that_overlap_leave_nothing_out() {
        let doubts = [range(2, 8), range(4, 6), range(7, 12)];
        let mut parts = Vec::new();
        split(range(3, 20), doubts.iter().copied(), |part, doubtful| parts.push((part, doubtful)));
        assert_eq!(parts, [(range(3, 8), true), (range(8, 12), true), (range(12, 20), false)]);
    }

    #[test]
    fn of_too_many_doubts_everything_is_one() {
        let doubts: Vec<VirtRange> =
            (0..=MAX_DOUBTFUL_RANGES).map(|at| range(at * 4, at * 4 + 1)).collect();
        let (bytes, length) = encode(&doubts);
        assert_eq!(decode(&bytes[..length]).collect::<Vec<_>>(), [EVERYTHING]);
        let (bytes, length) = encode(&doubts[1..]);
        assert_eq!(decode(&bytes[..length]).collect::<Vec<_>>(), doubts[1..]);
    }
}
