//! The life of an engine: the thread that waits for the supervisor becomes the fault handler.
//!
//! | state | means |
//! |---|---|
//! | `ASLEEP` | the thread waits for the supervisor; nothing is managed |
//! | `ENGAGED` | [`ENGINE`] is set |
//! | `DETACHED` | there is no engine any more, and this process gets none |
//! | `OFF` | there is no supervisor, or management was refused: as without swaptide |
//!
//! Locks: [`FORK_LOCK`] keeps a fork and the change to `ENGAGED` apart. A forking thread holds it
//! from its prepare handler to its parent or child handler.

use std::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use swaptide_engine::event_loop::Handler;
use swaptide_engine::{Engine, Start};
use swaptide_ipc::{AgentRequest, Counter, ProcSlot, ProcState, Segment, SlotIndex};
use swaptide_sys::affinity::go_first;
use swaptide_sys::lock::{Lock, futex};
use swaptide_sys::thread::{abort_with, getpid, now, set_name, sleep};

use crate::allocator;
use crate::engage_gate::EngineStart;
use crate::exit_watch;
use crate::log;
use crate::marks::set_own_mark;
use crate::pages::{excluded, references, thread_words};
use crate::past_libc;
use crate::process::{
    self, ENGINE, ENGINE_PID, FORK_LOCK, PLACE, SLOT_PENDING, SLOT_UNCLAIMED, STAYS_UNMANAGED,
    empty_table, engine, exchange, hold_child, may_follow_forks, open_area, release_hold,
    request_hold, segment, spawn,
};
use crate::seccomp;
use crate::threads::{spawn_reader, spawn_server, start_workers};
use crate::withdrawal;

/// The path of the program, and its length.
static MAIN_OBJECT: Lock<([u8; 512], usize)> = Lock::new(([0; 512], 0));
/// Process id of the forking parent, for its child.
pub(crate) static PARENT: AtomicU32 = AtomicU32::new(0);

/// The engine's threads have descriptors of their own, but the limit is the process's: with less, a
/// fork could not be told of.
const MIN_OPEN_FILES: u64 = 32;

/// True in the process-id namespace of the supervisor: in another one, process ids mean other
/// processes.
pub(crate) fn same_pid_namespace(segment: &Segment) -> bool {
    let theirs = segment.header.pid_namespace.load(Relaxed);
    match rustix::fs::stat(c"/proc/self/ns/pid") {
        Ok(ours) => theirs == 0 || ours.st_ino == theirs,
        // Under another root there may be no /proc: what counts is whether both mean the same
        // process.
        Err(_) => {
            let mut reply = [0u8; 8];
            exchange(&[AgentRequest::Identity as u8], &[], &mut reply)
                .is_some_and(|(length, _)| length == 5)
                && reply[1..5] == getpid().0.to_le_bytes()
        }
    }
}

/// Waits for the supervisor, then serves as the handler.
extern "C" fn sleeper(_: usize) {
    if empty_table(None).is_ok() {
        set_name(c"swaptide");
        // A program that grows does not wait for its engine to start.
        let goes_first = go_first();
        match segment() {
            None => log::line(
                "the supervisor does not answer (another network namespace?): this process is not \
                managed",
            ),
            Some(segment) if !same_pid_namespace(segment) => {
                log::line("separate pid namespace: this process is not managed");
            }
            Some(segment) => wait_for_supervisor(segment, goes_first),
        }
    }
    PLACE.store(SLOT_UNCLAIMED, Release);
}

pub(crate) fn start_sleeper() {
    PLACE.store(SLOT_PENDING, Release);
    if !spawn(sleeper) {
        PLACE.store(SLOT_UNCLAIMED, Release);
    }
}

/// Claims a slot, and waits until the supervisor engages this process.
/// `goes_first`: the calling thread runs before those of the program.
pub(crate) fn wait_for_supervisor(segment: &'static Segment, goes_first: bool) {
    let forked_from = PARENT.load(Relaxed);
    let index = match segment.claim(getpid().0, forked_from) {
        Some(index) => index,
        None => {
            PLACE.store(SLOT_UNCLAIMED, Release);
            log::line(
                "the supervisor's process table is full: this process is not managed until \
                    another one ends",
            );
            loop {
                sleep(Duration::from_secs(1));
                if process::leaves() {
                    return;
                }
                if let Some(index) = segment.claim(getpid().0, forked_from) {
                    break index;
                }
            }
        }
    };
    let slot = segment.slot(index);
    slot.agent.goes_first.store(u32::from(goes_first), Relaxed);
    past_libc::tell(slot);
    PLACE.store(index.0 + 1, Release);
    loop {
        let seen = slot.control.wake_seq.load(Acquire);
        if process::leaves() && slot.state() != ProcState::Engaged {
            slot.set_state(ProcState::Detached);
            return;
        }
        if withdrawal::is_due(slot) {
            withdrawal::withdraw(slot);
        } else if past_libc::is_held(slot) {
            // Nothing is out, and nothing will be while a thread forks.
            wait_for_wake(slot, seen);
            continue;
        }
        if slot.control.detach.load(Acquire) != 0 && slot.state() != ProcState::Detached {
            slot.set_state(ProcState::Detached);
            continue;
        }
        if slot.control.engage.load(Acquire) != 0 && slot.state() != ProcState::Detached {
            engage(segment, index);
        }
        wait_for_wake(slot, seen);
    }
}

/// Waits until the supervisor increments the slot's `wake_seq` from `seen`; ends the process where
/// this thread is its last.
pub(crate) fn wait_for_wake(slot: &ProcSlot, seen: u32) {
    futex::wait(&slot.control.wake_seq, seen, None, futex::Scope::Shared);
    exit_watch::end_if_alone();
}

/// Runs the handler until the process ends; returns when the process is detached.
pub(crate) fn serve(handler: &mut Handler) {
    loop {
        handler.run();
        // A forking thread holds the lock and waits for the handler, or takes it later and finds no
        // engine.
        let Some(_quiet) = FORK_LOCK.try_lock() else { continue };
        let Some(engine) = engine() else { return };
        if handler.detach() {
            ENGINE.store(std::ptr::null_mut(), Release);
            engine.slot().set_state(ProcState::Detached);
            log::line("detached: all pages are swapped in");
            return;
        }
    }
}

/// Takes the program's memory under management and serves it; returns when that was refused, or the
/// process is detached.
fn engage(segment: &'static Segment, index: SlotIndex) {
    let slot = segment.slot(index);
    let refuse = || {
        slot.set_state(ProcState::Refused);
        slot.control.engage.store(0, Release);
    };
    // Before anything is allocated, and until all is: a fork copies the allocator's lock as it is.
    let guard = FORK_LOCK.lock();
    if !allocator::ready() {
        // Nothing can be allocated, not even for a line in the log.
        drop(guard);
        return refuse();
    }
    if STAYS_UNMANAGED.load(Acquire) {
        drop(guard);
        slot.set_state(ProcState::Detached);
        return;
    }
    let handler = match prepare_engine(segment, index) {
        Ok(handler) => handler,
        Err(why) => {
            log::line(&why);
            drop(why);
            drop(guard);
            return refuse();
        }
    };
    drop(guard);
    serve(handler);
}

/// A failed check in the engine ends the process with a message on the program's standard error:
/// the engine's own leads nowhere.
/// Called by the constructor: a child past libc could have a copy of the lock that this takes.
pub(crate) fn report_panics() {
    std::panic::set_hook(Box::new(|info| {
        let payload = info.payload();
        let what = payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let what = what.unwrap_or("a check failed");
        let place =
            info.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        abort_with(&[
            b"swaptide: ",
            what.as_bytes(),
            place.as_bytes(),
            b"; the process is stopped rather than given wrong data",
        ])
    }));
}

/// True if threads that move mappings wait for the handler.
fn waits_at_fences() -> bool {
    !past_libc::is_program() && process::has_threads()
}

fn prepare_engine(
    segment: &'static Segment,
    index: SlotIndex,
) -> Result<&'static mut Handler, String> {
    let began = now();
    seccomp::look();
    // Threads under a filter are known from here on.
    let _start = EngineStart::begin();
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    if files.is_some_and(|files| files < MIN_OPEN_FILES) {
        return Err(format!(
            "the limit on open files is below {MIN_OPEN_FILES}: this process is not managed \
            (ulimit -n)"
        ));
    }
    if let Some((what, option)) = allocator::address_limit() {
        return Err(format!(
            "the limit on {what} is below {} GiB: this process is not managed (ulimit {option})",
            allocator::MIN_ADDRESS_LIMIT_BYTES >> 30
        ));
    }
    if !references::look_at_inherited() {
        return Err(
            "a file on NFS or Ceph is open for direct I/O, which does not pin its buffers there: \
                this process is not \
                    managed (close it, or open it without O_DIRECT)"
                .into(),
        );
    }
    {
        let mut path = MAIN_OBJECT.lock();
        let (bytes, len) = &mut *path;
        *len = rustix::fs::readlink("/proc/self/exe", Vec::new()).map_or(0, |target| {
            let target = target.as_bytes();
            let n = target.len().min(bytes.len());
            bytes[..n].copy_from_slice(&target[..n]);
            n
        });
    }
    past_libc::prepare(may_follow_forks())?;
    let start = Start {
        segment,
        index,
        open_area,
        salt: salt(),
        log: log::line,
        main_object: is_main_object,
        excluded: excluded::is_excluded,
        waits_at_fences,
        gives_fork_advice: excluded::is_fork_advice_given,
        pinned: thread_words::pages_that_stay,
        spawn_reader,
        spawn_server,
        release_hold,
        hold_child,
        references: &references::REFERENCES,
    };
    let engine: &'static Engine =
        Box::leak(Box::new(Engine::new(start).map_err(|e| e.to_string())?));
    let handler = match Handler::new(engine) {
        Ok(handler) => Box::leak(Box::new(handler)),
        Err(error) => {
            close_unused(engine);
            return Err(error.to_string());
        }
    };
    // Made here: no process that has ended had it.
    let _ = request_hold(engine);
    ENGINE_PID.store(getpid().0, Release);
    set_own_mark();
    ENGINE.store(std::ptr::from_ref(engine).cast_mut(), Release);
    // Workers start after adoption: one that is descheduled with a lock held would delay it.
    handler.adopt();
    start_workers(engine);
    log::line(&format!(
        "managed after {:?}, {} pages present",
        now().since(began),
        engine.mm.lock().table.present()
    ));
    engine.count(Counter::Engaged, 1);
    engine.slot().set_state(ProcState::Engaged);
    Ok(handler)
}

/// In a child that libc has forked, whose parent may be one past libc: that has copies of the locks
/// of its own parent, as they were.
pub(crate) fn forked() {
    // SAFETY: no other thread exists here; a path that is torn is written again before it is used.
    unsafe { MAIN_OBJECT.force_unlock() };
}

/// Closes the userfaultfd of an engine that did not start: a fork would wait for ever for its event
/// to be read.
fn close_unused(engine: &Engine) {
    // SAFETY: no other thread has seen this engine, and it is not used again.
    unsafe { engine.close_uffd() };
}

/// A number that no other process of this run has: the cipher's nonces must never repeat.
pub(crate) fn salt() -> u64 {
    let mut bytes = [0u8; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_le_bytes(bytes),
        _ => abort_with(&[b"swaptide: cannot read random numbers for the swap file's cipher"]),
    }
}

fn is_main_object(name: &[u8]) -> bool {
    let path = MAIN_OBJECT.lock();
    path.1 > 0 && name == &path.0[..path.1]
}
