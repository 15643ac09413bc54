//! From the constructor to the fault handler.
//!
//! | state | means |
//! |---|---|
//! | `ASLEEP` | the thread waits for the supervisor; nothing is managed |
//! | `ENGAGED` | [`ENGINE`] is set |
//! | `DETACHED` | the program was let go: there is no engine any more, and this process gets none |
//! | `OFF` | there is no supervisor, or management was refused: the program runs as it would without swaptide |
//!
//! Locks: [`FORK_LOCK`] keeps a fork and the change to `ENGAGED` apart. A forking thread holds it
//! from its prepare handler to its parent or child handler.

use std::ffi::c_int;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::time::Duration;

use swaptide_engine::event_loop::Handler;
use swaptide_engine::fork::{Decline, NONE};
use swaptide_engine::reclaim::worker::Worker;
use swaptide_engine::requests::HandlerRequest;
use swaptide_engine::sched::deadline::{WAIT_SLICE, Waited};
use swaptide_engine::{Engine, Start};
use swaptide_ipc::{Counter, ProcState, Request, Segment, SlotIndex};
use swaptide_sys::affinity::{cpus_online, go_first, go_normally};
use swaptide_sys::lock::{Lock, futex};
use swaptide_sys::mem::after_fork_in_child;
use swaptide_sys::thread::{
    abort_with, block_all_signals, exit_thread, getpid, gettid, now, restore_signals, set_name,
    sleep, tell,
};

use crate::exit_watch;
use crate::fork::trampoline;
use crate::log;
use crate::own_pid::OWN_PID;
use crate::pages::excluded;
use crate::pages::kernel_words;
use crate::pages::pinned;
use crate::pages::references;
use crate::process::{
    ENGINE, ENGINE_PID, FORK_LOCK, NO_SLOT, PLACE, SLOT_PENDING, STACK, STAYS_UNMANAGED, detach,
    detach_without_calls, empty_table, engine, engine_without_calls, exchange, known_segment,
    open_area, release_hold, request_hold, segment, spawn, spawn_with,
};
use crate::seccomp;
use crate::shmem;

/// Length of the program's path, and the path.
static MAIN_OBJECT: Lock<([u8; 512], usize)> = Lock::new(([0; 512], 0));
/// Raised by a forked child's handler when it serves; a futex word.
static TAKEN_OVER: AtomicU32 = AtomicU32::new(0);
/// Process id of the forking parent, for its child.
static PARENT: AtomicU32 = AtomicU32::new(0);
/// The process that forked last, or forks now: the child of a raw clone has a copy of a lock that
/// nobody will free.
static FORKER_PID: AtomicU32 = AtomicU32::new(0);
/// The signal mask of the forking thread, from its prepare handler to the other end.
static FORK_MASK: AtomicU64 = AtomicU64::new(0);

/// The engine's threads have descriptors of their own, but the limit is the process's: with less, a
/// fork could not be told of.
const MIN_OPEN_FILES: u64 = 32;

/// True in the process-id namespace of the supervisor: in another one, process ids mean other
/// processes.
fn same_pid_namespace(segment: &Segment) -> bool {
    let theirs = segment.header.pid_namespace.load(Relaxed);
    match rustix::fs::stat(c"/proc/self/ns/pid") {
        Ok(ours) => theirs == 0 || ours.st_ino == theirs,
        // Under another root there may be no /proc: what counts is whether both mean the same
        // process.
        Err(_) => {
            let mut reply = [0u8; 8];
            exchange(&[Request::Identity as u8], &[], &mut reply)
                .is_some_and(|(length, _)| length == 5)
                && reply[1..5] == getpid().0.to_le_bytes()
        }
    }
}

/// The thread that waits.
extern "C" fn sleeper(_: usize) {
    if empty_table(None).is_ok() {
        set_name(c"swaptide");
        // A program that grows does not wait for its engine to start.
        go_first();
        match segment() {
            None => log::line(
                "the supervisor does not answer (another network namespace?): this process is not \
                managed",
            ),
            Some(segment) if !same_pid_namespace(segment) => {
                log::line("a process-id namespace of its own: this process is not managed");
            }
            Some(segment) => wait_for_supervisor(segment),
        }
    }
    PLACE.store(NO_SLOT, Release);
}

pub(crate) fn start_sleeper() {
    PLACE.store(SLOT_PENDING, Release);
    if !spawn(sleeper) {
        PLACE.store(NO_SLOT, Release);
    }
}

/// Claims a slot and waits on its bell.
fn wait_for_supervisor(segment: &'static Segment) {
    let forked_from = PARENT.load(Relaxed);
    let index = match segment.claim(getpid().0, forked_from) {
        Some(index) => index,
        None => {
            PLACE.store(NO_SLOT, Release);
            log::line(
                "the supervisor's table of processes is full: this process is not managed before \
                another one ends",
            );
            loop {
                sleep(Duration::from_secs(1));
                if let Some(index) = segment.claim(getpid().0, forked_from) {
                    break index;
                }
            }
        }
    };
    let slot = segment.slot(index);
    PLACE.store(index.0 + 1, Release);
    loop {
        let bell = slot.wake_seq.load(Acquire);
        if slot.detach.load(Acquire) != 0 && slot.state() != ProcState::Detached {
            slot.set_state(ProcState::Detached);
        }
        if slot.engage.load(Acquire) != 0 && slot.state() != ProcState::Detached {
            engage(segment, index);
        }
        futex::wait(&slot.wake_seq, bell, None, futex::Scope::Shared);
        exit_watch::end_if_alone();
    }
}

/// Runs the handler until the process ends; returns when the program was let go.
fn serve(handler: &mut Handler) {
    loop {
        handler.run();
        // Who forks has the lock and waits for the handler, or comes for it later and finds no
        // engine.
        let Some(_quiet) = FORK_LOCK.try_lock() else { continue };
        let Some(engine) = engine() else { return };
        if handler.detach() {
            ENGINE.store(std::ptr::null_mut(), Release);
            engine.slot().set_state(ProcState::Detached);
            log::line("all memory is back, and the process is not managed any more");
            return;
        }
    }
}

/// Takes the program's memory under management; returns when that was refused, or the program was
/// let go.
fn engage(segment: &'static Segment, index: SlotIndex) {
    let slot = segment.slot(index);
    if !crate::allocator::ready() {
        // Nothing can be allocated, not even for a line in the log.
        slot.set_state(ProcState::Refused);
        slot.engage.store(0, Release);
        return;
    }
    let guard = FORK_LOCK.lock();
    if STAYS_UNMANAGED.load(Acquire) {
        drop(guard);
        slot.set_state(ProcState::Detached);
        return;
    }
    let handler = match prepare_engine(segment, index) {
        Ok(handler) => handler,
        Err(why) => {
            drop(guard);
            log::line(&why);
            slot.set_state(ProcState::Refused);
            slot.engage.store(0, Release);
            return;
        }
    };
    drop(guard);
    serve(handler);
}

/// A failed check in the engine ends the process with a message on the program's standard error:
/// the engine's own leads nowhere.
fn report_panics() {
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

fn prepare_engine(
    segment: &'static Segment,
    index: SlotIndex,
) -> Result<&'static mut Handler, String> {
    let began = now();
    report_panics();
    seccomp::look();
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    if files.is_some_and(|files| files < MIN_OPEN_FILES) {
        return Err(format!(
            "the limit on open files is under {MIN_OPEN_FILES}: this process is not managed (ulimit \
            -n)"
        ));
    }
    if !references::look_at_inherited() {
        return Err(
            "a file is open for direct I/O on NFS or Ceph, which do not pin what they read \
            into: this process is not \
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
    let start = Start {
        segment,
        index,
        open_area,
        salt: salt(),
        log: log::line,
        main_object: is_main_object,
        excluded: excluded::is_excluded,
        pinned: pinned::pinned_pages,
        spawn_reader,
        release_hold,
        references: &references::REFERENCES,
    };
    let engine: &'static Engine =
        Box::leak(Box::new(Engine::new(start).map_err(|e| e.to_string())?));
    let handler = match Handler::new(engine) {
        Ok(handler) => Box::leak(Box::new(handler)),
        Err(error) => {
            never_began(engine);
            return Err(error.to_string());
        }
    };
    request_hold(engine);
    ENGINE_PID.store(getpid().0, Release);
    ENGINE.store(std::ptr::from_ref(engine).cast_mut(), Release);
    // Nobody who could be stopped with a lock in his hand is there before the program's growth is
    // seen.
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

/// Closes what would make a fork wait for ever for somebody to read of it.
fn never_began(engine: &Engine) {
    // SAFETY: called for an engine that was told to nobody, and is not used again.
    unsafe { engine.close_uffd() };
}

/// A number that no other process of this run has: the cipher's nonces must never repeat.
fn salt() -> u64 {
    let mut bytes = [0u8; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_le_bytes(bytes),
        _ => abort_with(&[
            b"swaptide: the kernel gives no random numbers, which the swap file's cipher needs",
        ]),
    }
}

fn is_main_object(name: &[u8]) -> bool {
    let path = MAIN_OBJECT.lock();
    path.1 > 0 && name == &path.0[..path.1]
}

fn start_workers(engine: &'static Engine) {
    let wanted = (cpus_online() / 2).clamp(1, 4);
    let mut running = 0;
    for index in 0..wanted {
        running += u32::from(spawn_with(STACK, worker, index as usize));
    }
    // Without it the process is only slow to end, in a case that hardly any program has.
    let watching = spawn_with(64 << 10, watch, 0);
    engine.workers.store(running, Release);
    engine.slot().engine_threads.store(running + 1 + u32::from(watching), Relaxed);
}

/// Starts a thread that waits for servers.
fn spawn_reader() -> bool {
    spawn_with(STACK, reader, 0)
}

extern "C" fn reader(_: usize) {
    set_name(c"swaptide-read");
    // As a worker.
    go_normally();
    let Some(engine) = engine() else { exit_thread() };
    engine.read_far();
    exit_watch::forget(gettid());
}

extern "C" fn watch(_: usize) {
    if let Some(engine) = engine() {
        exit_watch::watch(engine.slot(), || engine.look_after_threads());
    }
}

extern "C" fn worker(index: usize) {
    set_name(c"swaptide-work");
    // Made by the handler, whose place in the queue it inherits and does not need.
    go_normally();
    let Some(engine) = engine() else { exit_thread() };
    Box::leak(Box::new(Worker::new(engine.scheme))).run(engine, index);
    // The program was let go.
    exit_watch::forget(gettid());
}

/// The thread that is between its prepare handler and the other end, if one is.
static FORKING: AtomicU32 = AtomicU32::new(0);

/// Does with a fork what libc's handlers do, where libc calls none. Not where the forking thread is
/// within a fork already.
pub fn with_handlers(fork: impl FnOnce() -> c_int) -> c_int {
    if !seccomp::is() && FORKING.load(Relaxed) == gettid().0 {
        return fork();
    }
    prepare();
    let pid = fork();
    if pid == 0 {
        child()
    } else {
        parent()
    }
    pid
}

/// The fork under way is one of a program that is [`seccomp`]. Guarded by [`FORK_LOCK`].
static FORKS_CONFINED: AtomicBool = AtomicBool::new(false);

/// Before a fork, in the forking thread. Signals wait until it is over: a handler that forks would
/// wait for this thread's own lock.
pub(crate) extern "C" fn prepare() {
    if seccomp::is() {
        // Nothing may begin meanwhile, and nothing is managed: neither end has anything to do.
        let take = || loop {
            match FORK_LOCK.try_lock() {
                Some(guard) => break std::mem::forget(guard),
                None => std::hint::spin_loop(),
            }
        };
        take();
        while engine_without_calls().is_some() {
            // SAFETY: this thread took the lock and forgot its guard; who waits for it looks again
            // by itself.
            unsafe { FORK_LOCK.force_unlock() };
            detach_without_calls();
            take();
        }
        FORKS_CONFINED.store(true, Relaxed);
        return;
    }
    let mask = block_all_signals().unwrap_or(0);
    let this = getpid().0;
    let before = FORKER_PID.swap(this, Relaxed);
    if before != 0 && before != this && FORK_LOCK.is_locked() {
        // SAFETY: this is the child of a raw clone, and the holder a thread of its parent.
        unsafe { FORK_LOCK.force_unlock() };
    }
    std::mem::forget(FORK_LOCK.lock());
    FORK_MASK.store(mask, Relaxed);
    FORKING.store(gettid().0, Relaxed);
    PARENT.store(this, Relaxed);
    if engine().is_some_and(|engine| engine.followed && !trampoline::follow(engine)) {
        // Nobody would see to it that the child is served: all comes back, and stays.
        detach_before_fork(
            "a fork could not be followed (ptrace is not permitted, or the table of descriptors is \
            full): the process is let go",
        );
    }
    if let Some(engine) = engine() {
        engine.fork.forker.store(gettid().0, Release);
        if !engine.followed {
            engine.fork.open_ends();
        }
        engine.bells.submit(HandlerRequest::ForkPrepare);
        if !engine.fork.wait_until_prepared(mask) {
            trampoline::leave();
            engine.fork.close_end(false);
            engine.fork.close_end(true);
            detach_before_fork(
                "a child could not be told of, for the limit on open files is too low (ulimit -n): \
                the process is let go",
            );
        }
    }
}

/// All comes back, and there is no engine at the fork. The calling thread has the lock, and has it
/// again when this returns.
fn detach_before_fork(why: &str) {
    // SAFETY: this thread took the lock in `prepare` and forgot its guard.
    unsafe { FORK_LOCK.unlock() };
    log::line(why);
    detach();
    std::mem::forget(FORK_LOCK.lock());
}

/// After a fork, in the parent.
pub(crate) extern "C" fn parent() {
    if FORKS_CONFINED.swap(false, Relaxed) {
        // SAFETY: this thread took the lock in `prepare`; who waits for it looks again by itself.
        unsafe { FORK_LOCK.force_unlock() };
        return;
    }
    if let Some(engine) = engine() {
        trampoline::leave();
        engine.fork.close_end(false);
        engine.fork.close_end(true);
        engine.bells.submit(HandlerRequest::ForkDone);
        engine.fork.wait(NONE, FORK_MASK.load(Relaxed));
        if engine.fork.was_child_killed() {
            tell(
                b"swaptide: a forked child did not take its memory over within half a minute and \
                was killed\n",
            );
        }
    }
    let mask = FORK_MASK.load(Relaxed);
    FORKING.store(0, Relaxed);
    // SAFETY: this thread took the lock in `prepare` and forgot its guard.
    unsafe { FORK_LOCK.unlock() };
    restore_signals(mask);
}

/// After a fork, in the child, whose only thread this is.
pub(crate) extern "C" fn child() {
    if FORKS_CONFINED.swap(false, Relaxed) {
        // SAFETY: no other thread exists here. This process is not managed.
        unsafe { FORK_LOCK.force_unlock() };
        PLACE.store(NO_SLOT, Release);
        return;
    }
    after_fork_in_child();
    FORKING.store(0, Relaxed);
    OWN_PID.store(getpid().0, Relaxed);
    exit_watch::forked();
    // This thread has another id here.
    kernel_words::pin_own_block();
    let mask = FORK_MASK.load(Relaxed);
    // SAFETY: the thread that took the lock in `prepare` is this one's original, and no other
    // thread exists here.
    unsafe { FORK_LOCK.force_unlock() };
    // Whoever holds it from now on is a thread of this process: the one that begins management,
    // say. The next fork must wait for it.
    FORKER_PID.store(getpid().0, Relaxed);
    // SAFETY: null, or the engine this process has a copy of.
    let inherited = unsafe { ENGINE.load(Acquire).as_ref() }
        .filter(|_| ENGINE_PID.load(Acquire) == PARENT.load(Relaxed));
    match inherited {
        None => start_sleeper(),
        Some(engine) => {
            engine.forked();
            ENGINE_PID.store(getpid().0, Release);
            TAKEN_OVER.store(0, Relaxed);
            engine.fork.close_end(false);
            if engine.fork.is_shut() {
                // The parent's handler serves this process until it has all its memory, and waits
                // for no word.
                engine.fork.close_end(true);
                ENGINE.store(std::ptr::null_mut(), Release);
            } else if spawn(child_handler_main) {
                let mut waited = Waited::default();
                while TAKEN_OVER.load(Acquire) == 0 {
                    waited.turn(
                        futex::wait(&TAKEN_OVER, 0, Some(WAIT_SLICE), futex::Scope::Private),
                        mask,
                    );
                }
                engine.fork.close_end(true);
            } else {
                // This thread asks for everything itself; the parent's handler serves its faults
                // until then.
                let declined = engine.decline(engine.fork.take_child_end(), Decline::NoThread);
                ENGINE.store(std::ptr::null_mut(), Release);
                if let Err(errno) = declined {
                    stop(errno);
                }
            }
        }
    }
    shmem::forked();
    restore_signals(mask);
}

/// Ends a forked child whose swapped memory is lost.
fn stop(errno: swaptide_sys::Errno) -> ! {
    let mut why = [0u8; 64];
    let len = {
        use std::io::Write;
        let mut rest = &mut why[..];
        let _ = write!(rest, "{}", swaptide_sys::ErrnoName(errno));
        64 - rest.len()
    };
    abort_with(&[
        b"swaptide: a forked child could not take its memory over, and its parent does not answer \
        (",
        &why[..len],
        b"); it is stopped rather than given wrong data",
    ])
}

/// Lets the forking thread of a child go on.
fn child_is_served() {
    TAKEN_OVER.store(1, Release);
    futex::wake(&TAKEN_OVER, 1, futex::Scope::Private);
}

/// All memory of this child is there, and its copy of the engine is never used again.
fn disown() {
    ENGINE.store(std::ptr::null_mut(), Release);
    child_is_served();
}

/// A slot, if there is one within a moment: the supervisor may not have cleared those of the dead
/// yet.
fn claim_soon(segment: &Segment) -> Option<SlotIndex> {
    for _ in 0..10 {
        if let Some(index) = segment.claim(getpid().0, PARENT.load(Relaxed)) {
            return Some(index);
        }
        sleep(Duration::from_millis(5));
    }
    None
}

/// Tests want a forked child to be silent for some seconds, or never to take over.
const SILENT_CHILD: u32 = 7;
const STUCK_CHILD: u32 = 8;

/// What a test wants to fail at this stage of a child's birth.
fn inject_standstill(stage: u32) {
    let seconds = if stage == SILENT_CHILD { 4 } else { u64::MAX };
    if known_segment().is_some_and(|segment| segment.header.fail.load(Relaxed) == stage) {
        sleep(Duration::from_secs(seconds));
    }
}

/// The handler of a forked child. Nothing is allocated before the parent has answered.
extern "C" fn child_handler_main(_: usize) {
    // SAFETY: null, or the engine this process has a copy of.
    let Some(engine) = (unsafe { ENGINE.load(Acquire).as_ref() }) else { return disown() };
    // Without a table of its own it would answer through the program's, which it must not close: it
    // says so and ends.
    let end = match empty_table(engine.fork.child_end()) {
        // SAFETY: the table is this thread's own.
        Ok(()) => unsafe { engine.fork.own_child_end() },
        Err(_) => {
            if let Err(errno) = engine.decline(engine.fork.take_child_end(), Decline::NoThread) {
                stop(errno);
            }
            return disown();
        }
    };
    set_name(c"swaptide");
    // A fault is a thread that waits.
    go_first();
    inject_standstill(SILENT_CHILD);
    let decline = |end, why| match engine.decline(end, why) {
        Ok(whole) => {
            disown();
            whole
        }
        Err(errno) => stop(errno),
    };
    // The parent has it mapped, and so has this process.
    let Some(segment) = segment() else {
        decline(end, Decline::TableFull);
        return;
    };
    if !same_pid_namespace(segment) {
        decline(end, Decline::Namespace);
        return;
    }
    let Some(index) = claim_soon(segment) else {
        if decline(end, Decline::TableFull) {
            // As any process that is not managed yet.
            wait_for_supervisor(segment);
        }
        return;
    };
    let slot = segment.slot(index);
    slot.limit_bytes.store(engine.charge.limit(), Relaxed);
    slot.engage.store(1, Relaxed);
    let refused = || {
        slot.engage.store(0, Relaxed);
        slot.set_state(ProcState::Refused);
        disown();
    };
    let mut left = match engine.inherit(end, index) {
        Ok(Some(left)) => left,
        Ok(None) => return refused(),
        Err(errno) => stop(errno),
    };
    inject_standstill(STUCK_CHILD);
    let handler = match Handler::inherited(engine, index, salt(), &mut left) {
        Ok(handler) => Box::leak(Box::new(handler)),
        Err(error) => {
            log::line(&format!("a forked child gets all its memory and is not managed: {error}"));
            if let Err(errno) = left.declined() {
                stop(errno);
            }
            return refused();
        }
    };
    request_hold(engine);
    // A parent that is gone by now has left everything that there was to leave.
    let _ = left.taken();
    drop(left);
    start_workers(engine);
    slot.set_state(ProcState::Engaged);
    child_is_served();
    serve(handler);
    loop {
        let bell = slot.wake_seq.load(Acquire);
        futex::wait(&slot.wake_seq, bell, None, futex::Scope::Shared);
        exit_watch::end_if_alone();
    }
}
