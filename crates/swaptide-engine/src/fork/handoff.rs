//! The parent's handler from the fork event until the child serves itself.
//!
//! Owns: the child's userfaultfd until it is handed over, and what the child was given meanwhile.
//!
//! Invariants
//! 1. The engine's memory is not changed but for faults of the forking thread, and of others where
//!    the hand-over stalls; the children get those pages first.
//! 2. A child that was sent its userfaultfd has everything or says that it has not; only then the
//!    parent continues.
//! 3. Until then every fault of the child is answered, whatever the child has changed of its
//!    mappings.
//! 4. A child that says nothing for [`HELLO_TIMEOUT`] is given all its memory and continues without
//!    an engine; one that is not the forking thread's, for its fork has failed, at once. One that
//!    was sent its userfaultfd and says nothing for [`TAKEOVER_TIMEOUT`] is killed before what it
//!    shares is given up.
//! 5. What a child says is looked at before it is used: a process slot is one that the child has
//!    claimed.
//!
//! Locks: the memory lock, for one page at a time.

use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed};
use std::time::Duration;

use swaptide_ipc::{Counter, ExtentId, MAX_PROCS, SlotIndex};
use swaptide_sys::process::{
    has_young_child, pidfd_open, pidfd_send_signal, proc_info, processes, waits_outside_fork,
};
use swaptide_sys::sock::{Conn, poll_readable};
use swaptide_sys::thread::{getpid, now, sleep};
use swaptide_sys::uffd::Message;
use swaptide_sys::{AsFd, BorrowedFd, Errno};

use crate::engine::Engine;
use crate::events::fork_state::NewChild;
use crate::fault::path::FaultPath;
use crate::fault_injection::StopPoint;
use crate::fork::help::attend_hints;
use crate::fork::populate::{UnmanagedChild, can_answer, copy_at, copy_page, lay_out, recipient};
use crate::fork::prepare::ForkServer;
use crate::fork::protocol::{
    Decline, MESSAGE_BYTES, MSG_SERVING, NO_ENGINE, NO_ENGINE_INCOMPLETE, encode,
};
use crate::mm::types::{PageNo, range_of};
use crate::pager::Pager;
use crate::sched::deadline::Deadline;
use crate::sched::handed::Fault;

/// The time that a child may run before it says hello: libc and other libraries do their part
/// first.
const HELLO_TIMEOUT: Duration = Duration::from_secs(15);
/// The time that it may take to take over when it has everything.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(30);
/// The time to wait for the child of a fork that counts as torn, after its parent has returned.
const TORN_HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// The time that other threads' faults wait for a silent child, before one is answered. A child
/// that says nothing for so long after the forking thread is back may be another thread's.
const SILENT_CHILD_TIMEOUT: Duration = Duration::from_millis(200);
/// The timeouts where a test wants to see what happens then.
const TEST_TIMEOUT: Duration = Duration::from_secs(2);
const SIGKILL: i32 = 9;

/// Of the children of this process the newest is stopped.
fn is_new_child_stopped() -> bool {
    let this = getpid().0;
    let all = processes().unwrap_or_default();
    all.iter()
        .filter(|process| process.ppid == this)
        .max_by_key(|process| process.start_time)
        .is_some_and(|process| process.stopped)
}

/// True if a process is a child of this one, and stopped.
fn is_stopped(pid: u32) -> bool {
    proc_info(pid).is_some_and(|process| process.stopped)
}

/// Kills a child of this process. Nothing else is: the number came over a socket.
fn kill_child(pid: u32) -> Result<(), Errno> {
    let child = pidfd_open(pid)?;
    // After the descriptor is there: the number cannot come to mean another process any more.
    if proc_info(pid).is_none_or(|process| process.ppid != getpid().0) {
        return Err(Errno::SRCH);
    }
    pidfd_send_signal(child.as_fd(), SIGKILL)
}

impl ForkServer {
    /// Serves the child until it serves itself, and gives it what it needs for that. Without a
    /// channel to it it gets all its memory.
    ///
    /// Another thread may fork past the hook at the same time. Then it is unknown whose child is
    /// whose: all are served, and when the one that came through the hook says hello, all get
    /// everything.
    pub(super) fn hand_over(
        &mut self,
        pager: &mut Pager,
        child: NewChild,
        mut channel: Option<Conn>,
    ) {
        let engine = pager.path.engine;
        let mut children = vec![recipient(&mut pager.path, child, !self.torn)];
        let mut served: Vec<u64> = Vec::new();
        let began = now();
        let mut done_at = None;
        let mut has_child = false;
        let mut deadline = Deadline::new(bound(engine, HELLO_TIMEOUT));
        engine.injection().stop_at(StopPoint::HandingOver);
        if channel.is_none() {
            (engine.start.log)(
                "no channel to a forked child: it gets all its memory at once and is not \
                managed",
            );
            return self.abandon(pager, &mut children, None);
        }
        loop {
            wait_for_child(&pager.path, &children, channel.as_ref());
            self.drain(pager);
            attend_hints(pager);
            self.serve_untracked(pager);
            // Before a page leaves the table, all know of it.
            if let Some(another) = pager.path.reader.fork.child.take() {
                children.push(recipient(&mut pager.path, another, false));
                self.torn = true;
            }
            let forker = engine.fork.forker.load(Acquire);
            serve_fault(pager, &mut children, &mut served, |fault| fault.tid == forker);
            self.serve_untracked(pager);
            // The child may be another thread's, and the forking thread not in fork(2) yet: it may
            // wait for a lock whose holder waits for a page.
            if now().since(began) > SILENT_CHILD_TIMEOUT
                && !pager.path.reader.fork.is_done
                && waits_outside_fork(forker)
            {
                self.torn |= serve_fault(pager, &mut children, &mut served, |_| true);
                self.serve_untracked(pager);
            }
            for child in &mut children {
                self.read_child(pager, child, &mut served);
            }
            if let Some(conn) = channel.take_if(|conn| has_message(conn)) {
                match self.send(pager, &conn, &mut children, &served) {
                    Ok(()) => return,
                    Err(errno) => (engine.start.log)(&format!(
                        "hand-over to a child failed: {}",
                        swaptide_sys::ErrnoName(errno)
                    )),
                }
                // No other child has this channel: whatever is left is another thread's child.
                self.torn = true;
                children.retain(|child| !child.is_gone());
                return self.abandon(pager, &mut children, None);
            }
            children.retain(|child| !child.is_gone());
            if children.is_empty() {
                if pager.path.reader.fork.is_done {
                    return;
                }
                // It was another thread's; this one's fork is yet to come, and the engine's memory
                // has changed meanwhile.
                self.torn = true;
                deadline = Deadline::new(bound(engine, HELLO_TIMEOUT));
            }
            if pager.path.reader.fork.is_done {
                let silent = now().since(*done_at.get_or_insert_with(now));
                if silent > SILENT_CHILD_TIMEOUT && !has_child {
                    let age = now().since(self.prepared_at);
                    has_child = has_young_child(forker, age).unwrap_or(true);
                    if !has_child {
                        (engine.start.log)(
                            "a fork failed while another bypassed libc: the child gets all its \
                            memory at once and is not managed",
                        );
                        self.torn = true;
                        return self.abandon(pager, &mut children, channel);
                    }
                }
                // The child that came through the hook gets all its memory in any case, and may be
                // gone.
                if self.torn && silent > TORN_HELLO_TIMEOUT {
                    return self.abandon(pager, &mut children, channel);
                }
            }
            if deadline.is_over(is_new_child_stopped) {
                (engine.start.log)(
                    "a forked child does not respond: it gets all its memory and is \
                    not managed",
                );
                return self.abandon(pager, &mut children, channel);
            }
        }
    }

    /// Gives all children everything, and leaves word of that for the one that uses the channel
    /// later.
    fn abandon(
        &mut self,
        pager: &mut Pager,
        children: &mut [UnmanagedChild],
        channel: Option<Conn>,
    ) {
        let hooked = !self.torn && children.len() == 1;
        for child in children {
            lay_out(&pager.path, child, hooked);
            self.populator.populate(pager, child);
        }
        if let Some(conn) = channel {
            // It lies there when this end is closed.
            let _ = conn
                .set_nonblocking(true)
                .and_then(|()| conn.send(&NO_ENGINE_INCOMPLETE.to_le_bytes(), &[]));
        }
    }

    /// Answers the child's faults, and notes what else it tells.
    fn read_child(&mut self, pager: &mut Pager, child: &mut UnmanagedChild, served: &mut Vec<u64>) {
        let mut messages = Message::buffer::<8>();
        if let Ok(n) = child.uffd.read(&mut messages) {
            for message in &mut messages[..n] {
                child.note(message.decode());
            }
        }
        // One at a time: more may be read while one is answered.
        while let Some(place) = child.take_fault() {
            if let Some(place) = copy_at(&mut pager.path, child, place) {
                served.push(place.0 as u64);
                pager.path.engine.count(Counter::ForkServed, 1);
            }
            let _ = child.uffd.wake(range_of(place, 1));
        }
        self.populator.populate_its_children(pager, child);
    }

    /// Answers a child's hello: `[process slot, process id, token]`.
    fn send(
        &mut self,
        pager: &mut Pager,
        conn: &Conn,
        children: &mut [UnmanagedChild],
        served: &[u64],
    ) -> Result<(), Errno> {
        let engine = pager.path.engine;
        let mut hello = [0u8; 16];
        receive(engine, conn, children, 0, &mut hello)?;
        let word =
            |at: usize| u32::from_le_bytes(hello[at..at + 4].try_into().expect("four bytes"));
        let token = u64::from_le_bytes(hello[8..16].try_into().expect("eight bytes"));
        if token != engine.fork.token.load(Relaxed) {
            return Err(Errno::PROTO);
        }
        let pid = word(4);
        let declined = Decline::of(word(0));
        let has_claimed = || {
            let index = SlotIndex(word(0));
            ((index.0 as usize) < MAX_PROCS
                && engine.start.segment.slot(index).pid.load(Relaxed) == pid)
                .then_some(index)
        };
        let why = match declined {
            Some(decline) => Some(decline.why()),
            None if has_claimed().is_none() => {
                Some("it names a process slot that it has not claimed")
            }
            None if children.iter().any(UnmanagedChild::has_moved) => {
                Some("other libraries have moved its memory")
            }
            None => None,
        };
        if let Some(why) = why {
            (engine.start.log)(&format!(
                "forked child {pid} gets all its memory and is not managed: {why}"
            ));
        }
        let [child] = children else {
            for child in children.iter_mut() {
                lay_out(&pager.path, child, false);
                self.populator.populate(pager, child);
            }
            return send_message(engine, conn, pid, &NO_ENGINE_INCOMPLETE.to_le_bytes(), &[]);
        };
        let Some(index) = has_claimed().filter(|_| why.is_none() && !self.torn) else {
            // It may be another thread's after all.
            lay_out(&pager.path, child, !self.torn);
            self.populator.populate(pager, child);
            return send_message(
                engine,
                conn,
                pid,
                &if self.torn { NO_ENGINE_INCOMPLETE } else { NO_ENGINE }.to_le_bytes(),
                &[],
            );
        };
        share_limit(engine, index);
        let own = engine.slot_index();
        let areas = &engine.devices.areas;
        areas
            .device
            .leased(|extent| engine.start.segment.share_charged(own, index, ExtentId(extent.0)));
        let taken = pass_on(engine, conn, child, pid, served);
        match taken {
            Ok(true) => return Ok(()),
            Err(Errno::TIMEDOUT) => {
                (engine.start.log)(&format!(
                    "forked child {pid} does not take over its memory: killed"
                ));
                if kill_child(pid).is_err() {
                    crate::fatal(
                        "a forked child does not take over its memory and cannot be killed",
                    );
                }
                engine.fork.tell_of_kill();
                while !child.is_gone() {
                    sleep(Duration::from_millis(1));
                }
            }
            Err(errno) => return Err(errno),
            Ok(false) => self.populator.populate(pager, child),
        }
        // Giving everything takes its time. The slot of a child that has died meanwhile may be
        // another process's, with holds of its own.
        let segment = &engine.start.segment;
        areas.device.leased(|extent| {
            if segment.slot(index).pid.load(Acquire) == pid {
                segment.release_charged(own, index, ExtentId(extent.0));
            }
        });
        match taken {
            Ok(_) => send_message(engine, conn, pid, &NO_ENGINE.to_le_bytes(), &[]),
            Err(_) => Ok(()),
        }
    }
}

fn bound(engine: &Engine, usual: Duration) -> Duration {
    if engine.injection().shortens_timeouts() { TEST_TIMEOUT } else { usual }
}

fn has_message(conn: &Conn) -> bool {
    poll_readable(&[conn.as_fd()], Some(Duration::ZERO)).is_ok_and(|ready| ready != 0)
}

/// Waits a moment for a message of this process or a child.
fn wait_for_child(path: &FaultPath, children: &[UnmanagedChild], channel: Option<&Conn>) {
    let mut fds = vec![path.reader.uffd.as_fd()];
    fds.extend(channel.map(|conn| conn.as_fd()));
    fds.extend(children.iter().take(4).map(|child| child.uffd.as_fd()));
    // What cannot be waited for is looked at again.
    let _ = poll_readable(&fds, Some(Duration::from_millis(2)));
}

/// Answers a fault of a thread that `serves` names, if the table knows what its page is. Of the
/// forking thread: it may be back from fork(2), or, if another thread forked past the hook and this
/// is that one's child, not yet in it, and then it must continue. The children get the page first.
/// False when there is none.
fn serve_fault(
    pager: &mut Pager,
    children: &mut [UnmanagedChild],
    served: &mut Vec<u64>,
    serves: impl Fn(&Fault) -> bool,
) -> bool {
    let path = &mut pager.path;
    let is_due = |fault: &Fault| serves(fault) && can_answer(path, PageNo::of(fault.addr));
    let at = path.reader.pending.iter().position(is_due);
    let Some(fault) = at.and_then(|at| path.reader.pending.remove(at)) else { return false };
    let mut has_forked = false;
    for child in children {
        let copied = copy_page(path, child, PageNo::of(fault.addr));
        served.extend(copied.map(|place| place.0 as u64));
        has_forked |= child.has_forked();
    }
    if has_forked {
        // What it has forked gets everything first, from what the table has.
        path.reader.pending.push_front(fault);
        return false;
    }
    pager.answer(fault);
    true
}

/// The child's next message, if it lives to send one. `ETIMEDOUT` when it does not for too
/// long.
fn receive(
    engine: &Engine,
    conn: &Conn,
    children: &[UnmanagedChild],
    pid: u32,
    message: &mut [u8],
) -> Result<(), Errno> {
    let mut deadline = Deadline::new(bound(engine, TAKEOVER_TIMEOUT));
    while poll_readable(&[conn.as_fd()], Some(Duration::from_millis(10)))? == 0 {
        if children.iter().all(UnmanagedChild::is_gone) {
            return Err(Errno::SRCH);
        }
        if deadline.is_over(|| is_stopped(pid)) {
            return Err(Errno::TIMEDOUT);
        }
    }
    let (n, _) = conn.recv(message, &mut [])?;
    if n == message.len() { Ok(()) } else { Err(Errno::PROTO) }
}

/// Says something to the child. `ETIMEDOUT` when it does not read for too long.
fn send_message(
    engine: &Engine,
    conn: &Conn,
    pid: u32,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    conn.set_nonblocking(true)?;
    let mut deadline = Deadline::new(bound(engine, TAKEOVER_TIMEOUT));
    loop {
        match conn.send(bytes, fds) {
            Err(Errno::AGAIN) if deadline.is_over(|| is_stopped(pid)) => {
                return Err(Errno::TIMEDOUT);
            }
            Err(Errno::AGAIN) => sleep(Duration::from_millis(1)),
            said => return said,
        }
    }
}

/// Parent and child have together what the parent had, until the supervisor has seen the child:
/// what they share now is two pages as soon as one of them writes to it, and no fault tells of
/// that. Where there is much to keep they take it over a little later
/// ([`crate::memcg::charge::Charge::split_limit`]).
fn share_limit(engine: &Engine, child: SlotIndex) {
    let half = engine.charge.split_limit();
    for slot in [engine.slot(), engine.start.segment.slot(child)] {
        slot.control.limit_bytes.store(half, Relaxed);
    }
    engine.charge.take_limit(engine.slot());
}

/// Sends a child all it needs; false if it cannot take over.
fn pass_on(
    engine: &Engine,
    conn: &Conn,
    child: &UnmanagedChild,
    pid: u32,
    served: &[u64],
) -> Result<bool, Errno> {
    let areas = engine.devices.areas.device.shared();
    let mut words: Vec<u64> = vec![areas.len() as u64];
    words.extend(
        areas.iter().map(|handed| u64::from(handed.area) << 32 | u64::from(handed.generation)),
    );
    words.push(served.len() as u64);
    words.extend_from_slice(served);
    words.extend(child.layout().done().iter().chain(child.own()).filter_map(encode).flatten());
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let total = (bytes.len() as u64).to_le_bytes();
    let descriptors: Vec<_> = [child.uffd.as_fd()]
        .into_iter()
        .chain(areas.iter().filter_map(|handed| handed.opened.shareable()))
        .collect();
    send_message(engine, conn, pid, &total, &descriptors)?;
    drop(descriptors);
    for part in bytes.chunks(MESSAGE_BYTES) {
        send_message(engine, conn, pid, part, &[])?;
    }
    let mut answer = [0u8];
    receive(engine, conn, std::slice::from_ref(child), pid, &mut answer)?;
    Ok(answer == [MSG_SERVING])
}
