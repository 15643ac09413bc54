//! A fault server: a thread that answers faults next to the handler.
//!
//! It reads one message at a time, under the memory lock. A fault is served as the handler serves
//! it ([`crate::fault::path`]); everything else, and faults that need more than that (memory that
//! is not managed yet, remote pages, a change of mappings that is unread), it hands over
//! ([`crate::sched::handed`]).
//!
//! Owns: a fault path of its own: buffers, a compressor, an unpacker. What faults foretell is
//! shared ([`crate::readahead::Readahead`]).
//!
//! Invariants
//! 1. A fault that was read is answered, or handed over before the next one is read.
//! 2. A server changes nothing of the program's pages but under the memory lock, and only while
//!    [`crate::sched::handed::Handed::may_fill`] says so.
//! 3. At its quiescent point it has no frame, and its buffers have no memory.
//!
//! Locks: those of the fault path.

use std::sync::atomic::Ordering::Relaxed;

use swaptide_ipc::Counter;
use swaptide_sys::thread::{gettid, now};
use swaptide_sys::uffd::{Event, Message};
use swaptide_sys::wait_set::WaitSet;

use crate::EngineError;
use crate::engine::Engine;
use crate::fault::path::{FaultPath, Served};
use crate::mm::types::{FillerNo, PageNo, range_of};
use crate::sched::handed::Fault;

/// After this number of faults for which it has not slept, one more server is wanted.
const BUSY_FAULTS: u32 = 256;

/// The result of a check for a message.
enum NextMessage {
    Fault(Fault),
    /// There is none.
    Nothing,
    /// Servers do not read now.
    NotAllowed,
}

struct FaultServer {
    engine: &'static Engine,
    path: FaultPath,
    set: WaitSet,
    /// Faults since it slept last.
    row: u32,
}

/// Runs the thread of a fault server, until the program is detached.
pub fn serve_faults(engine: &'static Engine) {
    // The handler, which made it, may be bound to one CPU.
    engine.remote_reads.run_anywhere();
    let filler = engine.serving.servers.enlist(gettid());
    match FaultServer::new(engine, filler) {
        // Not freed: when the program is let go it may set a filter for all threads at once.
        Ok(server) => Box::leak(Box::new(server)).run(),
        Err(error) => {
            (engine.start.log)(&format!("a fault server did not start: {error}"));
            engine.serving.servers.give_up();
            // It counts among the threads that are quiesced.
            while engine.quiescent_point() {
                engine.serving.servers.rest(engine.serving.servers.turn());
            }
        }
    }
}

impl FaultServer {
    fn new(engine: &'static Engine, filler: FillerNo) -> Result<FaultServer, EngineError> {
        let path = FaultPath::of_server(engine, filler)?;
        let set = engine
            .serving
            .servers
            .open_own(path.reader.uffd)
            .map_err(|e| EngineError::Memory("a set of descriptors to wait for", e))?;
        Ok(FaultServer { engine, path, set, row: 0 })
    }

    fn run(&mut self) {
        let engine = self.engine;
        loop {
            if engine.is_quiescing() {
                self.path.give_buffers_up();
                if !engine.quiescent_point() {
                    return;
                }
            }
            let turn = engine.serving.servers.turn();
            match self.next() {
                NextMessage::Fault(fault) => {
                    self.row += 1;
                    if self.row.is_multiple_of(BUSY_FAULTS) {
                        engine.serving.servers.want_another();
                    }
                    self.answer(fault);
                    self.path.worker.balance(engine);
                }
                NextMessage::Nothing if self.path.reader.wait_awake() => {}
                NextMessage::Nothing => {
                    self.row = 0;
                    if self.set.wait(None).is_err() {
                        // Refused by a filter, say: the handler serves alone.
                        engine.serving.servers.rest(turn);
                    }
                }
                NextMessage::NotAllowed => {
                    self.row = 0;
                    if !engine.mm.lock().handed.is_crowd() {
                        self.path.give_buffers_up();
                    }
                    engine.serving.servers.rest(turn);
                }
            }
        }
    }

    /// Reads the next message, while no thread puts pages in place. What is no fault of the program
    /// is handed over.
    fn next(&mut self) -> NextMessage {
        let engine = self.engine;
        let mut messages = Message::buffer::<1>();
        let _closed = engine.serving.gate.close();
        let mut mm = engine.mm.lock();
        if !mm.handed.may_servers_read() || engine.is_quiescing() {
            return NextMessage::NotAllowed;
        }
        // An error other than EAGAIN ends the process when the handler meets it.
        let Ok(1..) = self.path.reader.uffd.read(&mut messages) else {
            return NextMessage::Nothing;
        };
        match messages[0].decode() {
            Event::Fault { addr, tid, .. }
                if !engine.handler_requests.request_pages().contains(addr) =>
            {
                let fault = Fault { addr, tid, tries: 0 };
                if !self.path.reader.is_of_worker(fault) {
                    mm.handed.crowd.note(tid);
                }
                NextMessage::Fault(fault)
            }
            event => {
                mm.handed.leave_event(event);
                engine.serving.servers.tell(&mm.handed);
                NextMessage::NotAllowed
            }
        }
    }

    /// Answers a fault, or hands it over.
    fn answer(&mut self, fault: Fault) {
        let (engine, path) = (self.engine, &mut self.path);
        // Where growth is slowed down, the handler knows for how long.
        if engine.slot().control.throttle_us.load(Relaxed) != 0 {
            return self.hand_over(fault);
        }
        let started = now();
        let page = PageNo::of(fault.addr);
        path.installer.asked = Some(page);
        path.stall.answers_since(Some(started));
        let served = path.serve(page, fault, started);
        path.stall.answers_since(None);
        path.installer.asked = None;
        let answered = now();
        path.stalls_until(answered);
        match served {
            Served::Filled => {
                engine.slot().faults.record(answered.since(started).as_nanos() as u64);
                engine.count(Counter::Pgmajfault, 1);
                engine.count(Counter::FaultsByServers, 1);
                let _ = path.reader.uffd.wake(range_of(page, 1));
            }
            Served::Spurious => {
                let _ = path.reader.uffd.wake(range_of(page, 1));
            }
            Served::Taken => {}
            Served::Again | Served::Unmanaged | Served::InFlight | Served::NoBuffer => {
                self.hand_over(fault)
            }
        }
    }

    fn hand_over(&self, fault: Fault) {
        let mut mm = self.engine.mm.lock();
        mm.handed.leave_fault(fault);
        self.engine.serving.servers.tell(&mm.handed);
    }
}
