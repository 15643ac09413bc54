//! The parent's handler from the fork event until the child serves itself.
//!
//! Owns: the child's userfaultfd until it is handed over, and what the child was given meanwhile.
//!
//! Invariants
//! 1. The engine's memory is not changed but for faults of the forking thread, whose pages the child gets first.
//! 2. A child that was sent its userfaultfd has everything or says that it has not; only then the parent goes on.
//!
//! Locks: the memory lock, for one page at a time.

use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed};
use std::time::Duration;

use swaptide_ipc::{Counter, ExtentId, SlotIndex};
use swaptide_sys::AsFd;
use swaptide_sys::Errno;
use swaptide_sys::sock::{Conn, Listener, poll_readable};
use swaptide_sys::uffd::{Event, Message, Uffd};

use super::gift::Recipient;
use super::wire::{Decline, MESSAGE_BYTES, OFF, OFF_TORN, TAKEN, encode};
use crate::handler::Handler;
use crate::ids::{PageNo, range_of};

/// Where the child will answer.
pub(super) enum Door {
    Pair(Conn),
    Named(Listener),
    Shut,
}

impl Handler {
    /// Serves the child until it serves itself, and gives it what it needs for that.
    ///
    /// Another thread may fork past the hook at the same time. Then nobody can tell whose child is whose: all are served, and when the one
    /// that came through the hook says hello, all get everything.
    pub(super) fn hand_over(&mut self, child: Uffd, mut door: Door) {
        let mut children = vec![self.recipient(child, true)];
        let mut served: Vec<u64> = Vec::new();
        loop {
            self.wait_for_child(&children, &door);
            self.drain_events();
            self.serve_forker(&mut children, &mut served);
            if let Some(another) = self.child.take() {
                children.push(self.recipient(another, false));
                self.torn = true;
            }
            for child in &mut children {
                self.read_child(child, &mut served);
            }
            let knocks = |fd| matches!(poll_readable(&[fd], Some(Duration::ZERO)), Ok(ready) if ready != 0);
            let conn = match std::mem::replace(&mut door, Door::Shut) {
                Door::Pair(conn) if knocks(conn.as_fd()) => Some(conn),
                Door::Named(listener) if knocks(listener.as_fd()) => {
                    let conn = listener.accept().map(|(conn, _)| conn).ok();
                    door = Door::Named(listener);
                    conn
                }
                closed => {
                    door = closed;
                    None
                }
            };
            if let Some(conn) = conn {
                match self.send(&conn, &mut children, &served) {
                    Ok(()) => return,
                    Err(errno) => {
                        (self.engine.start.log)(&format!("handing over to a child failed: {}", swaptide_sys::Why(errno)))
                    }
                }
            }
            children.retain(|child| !child.is_gone());
            if children.is_empty() {
                if self.fork_done {
                    return;
                }
                // It was another thread's; this one's fork is yet to come, and the engine's memory has changed meanwhile.
                self.torn = true;
            }
        }
    }

    /// Waits a moment for whoever may have something to say.
    fn wait_for_child(&self, children: &[Recipient], door: &Door) {
        let mut fds = vec![self.uffd.as_fd()];
        match door {
            Door::Pair(conn) => fds.push(conn.as_fd()),
            Door::Named(listener) => fds.push(listener.as_fd()),
            Door::Shut => {}
        }
        fds.extend(children.iter().take(4).map(|child| child.uffd.as_fd()));
        // What cannot be waited for is looked at again.
        let _ = poll_readable(&fds, Some(Duration::from_millis(2)));
    }

    /// Answers a fault of the forking thread: it may be back from fork(2), or, if another thread forked past the hook and this is that one's
    /// child, not yet in it, and then it must go on. The children get the page first.
    fn serve_forker(&mut self, children: &mut [Recipient], served: &mut Vec<u64>) {
        let forker = self.engine.fork.forker.load(Acquire);
        let Some(at) = self.pending.iter().position(|fault| fault.tid == forker) else { return };
        let page = PageNo::of(self.pending[at].addr);
        if !self.can_answer(page) {
            return;
        }
        let Some(fault) = self.pending.remove(at) else { return };
        for child in children {
            served.extend(self.give(child, page).map(|place| place.0 as u64));
        }
        self.answer(fault);
    }

    /// The child's next message, if it lives to send one.
    fn hear(&self, conn: &Conn, children: &[Recipient], message: &mut [u8]) -> Result<(), Errno> {
        while poll_readable(&[conn.as_fd()], Some(Duration::from_millis(10)))? == 0 {
            if children.iter().all(Recipient::is_gone) {
                return Err(Errno::SRCH);
            }
        }
        let (n, _) = conn.recv(message, &mut [])?;
        if n == message.len() { Ok(()) } else { Err(Errno::PROTO) }
    }

    fn read_child(&mut self, child: &mut Recipient, served: &mut Vec<u64>) {
        let mut messages = Message::buffer::<8>();
        let Ok(n) = child.uffd.read(&mut messages) else { return };
        for message in &mut messages[..n] {
            match message.decode() {
                Event::Fault { addr, .. } => {
                    let page = PageNo::of(addr);
                    if let Some(place) = self.copy_at(child, page) {
                        served.push(place.0 as u64);
                        self.engine.count(Counter::ForkServed, 1);
                    }
                    let _ = child.uffd.wake(range_of(page, 1));
                }
                // The child waits in its hook; libc's own code changes no mapping there.
                event => child.note(event),
            }
        }
        self.give_to_its_children(child);
    }

    /// Parent and child have together what the parent had, until the supervisor has seen the child: what they share now is two pages as soon as
    /// one of them writes to it, and no fault tells of that. Where there is much to keep they take it over a little later ([`crate::charge::Charge::part_with`]).
    fn share_limit(&self, child: SlotIndex) {
        let engine = self.engine;
        let half = engine.charge.part_with();
        for slot in [engine.slot(), engine.start.segment.slot(child)] {
            slot.limit_bytes.store(half, Relaxed);
        }
        engine.charge.take_limit(engine.slot());
    }

    /// Answers a child's hello: `[process slot, process id, token]`.
    fn send(&mut self, conn: &Conn, children: &mut [Recipient], served: &[u64]) -> Result<(), Errno> {
        let engine = self.engine;
        let mut hello = [0u8; 16];
        self.hear(conn, children, &mut hello)?;
        let word = |at: usize| u32::from_le_bytes(hello[at..at + 4].try_into().expect("four bytes"));
        let token = u64::from_le_bytes(hello[8..16].try_into().expect("eight bytes"));
        if token != engine.fork.token.load(Relaxed) {
            return Err(Errno::PROTO);
        }
        let declined = Decline::of(word(0));
        if let Some(decline) = declined {
            (engine.start.log)(&format!("forked child {} gets all its memory and is not managed: {}", word(4), decline.why()));
        }
        let [child] = children else {
            for child in children.iter_mut() {
                self.lay_out(child, false);
                self.give_all(child);
            }
            return conn.send(&OFF_TORN.to_le_bytes(), &[]);
        };
        if declined.is_some() || self.torn {
            // It may be another thread's after all.
            self.lay_out(child, !self.torn);
            self.give_all(child);
            return conn.send(&if self.torn { OFF_TORN } else { OFF }.to_le_bytes(), &[]);
        }
        let index = SlotIndex(word(0));
        self.share_limit(index);
        let own = engine.slot_index();
        let file = &engine.devices.file;
        file.device.leased(|extent| engine.start.segment.share_charged(own, index, ExtentId(extent.0)));
        let areas = file.device.shared();
        let mut words: Vec<u64> = vec![areas.len() as u64];
        words.extend(areas.iter().map(|handed| u64::from(handed.area) << 32 | u64::from(handed.generation)));
        words.push(served.len() as u64);
        words.extend_from_slice(served);
        words.extend(child.layout().done().iter().filter_map(encode).flatten());
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let total = (bytes.len() as u64).to_le_bytes();
        let descriptors: Vec<_> =
            [child.uffd.as_fd()].into_iter().chain(areas.iter().filter_map(|handed| handed.opened.shareable())).collect();
        conn.send(&total, &descriptors)?;
        drop(descriptors);
        for part in bytes.chunks(MESSAGE_BYTES) {
            conn.send(part, &[])?;
        }
        let mut answer = [0u8];
        self.hear(conn, std::slice::from_ref(child), &mut answer)?;
        if answer == [TAKEN] {
            return Ok(());
        }
        self.give_all(child);
        file.device.leased(|extent| {
            engine.start.segment.release_charged(own, index, ExtentId(extent.0));
        });
        conn.send(&OFF.to_le_bytes(), &[])
    }
}
