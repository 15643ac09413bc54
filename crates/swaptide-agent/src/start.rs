//! From the constructor to the fault handler.
//!
//! | state | means |
//! |---|---|
//! | `ASLEEP` | the thread waits for the supervisor; nothing is managed |
//! | `ENGAGED` | [`ENGINE`] is set |
//! | `OFF` | there is no supervisor, or management was refused: the program runs as it would without swaptide |
//!
//! Locks: [`FORK_LOCK`] keeps a fork and the change to `ENGAGED` apart. A forking thread holds it from its prepare handler to its parent or
//! child handler.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use swaptide_engine::bell::Ring;
use swaptide_engine::fork::{NONE, PREPARED};
use swaptide_engine::handler::Handler;
use swaptide_engine::reclaim::Worker;
use swaptide_engine::{Engine, Start};
use swaptide_ipc::{Counter, ENV_AGENT_LOG, ENV_SOCKET, ProcState, Request, Segment, SlotIndex};
use swaptide_sys::affinity::cpus_online;
use swaptide_sys::lock::{Lock, futex};
use swaptide_sys::mem::{SharedMap, after_fork_in_child};
use swaptide_sys::sock::Conn;
use swaptide_sys::thread::{
    abort_with, block_all_signals, exit_thread, getpid, gettid, now, restore_signals, set_name, spawn_engine_thread,
    unshare_files_and_close_all,
};
use swaptide_sys::{AsFd, OwnedFd};

use crate::{exec, log, pins, real};

/// See the module's description.
pub static FORK_LOCK: Lock<()> = Lock::new(());
static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(std::ptr::null_mut());
static SEGMENT: AtomicPtr<Segment> = AtomicPtr::new(std::ptr::null_mut());
/// The supervisor's socket name.
static SOCKET: Lock<([u8; 108], usize)> = Lock::new(([0; 108], 0));
/// Length of the program's path, and the path.
static MAIN_OBJECT: Lock<([u8; 512], usize)> = Lock::new(([0; 512], 0));
/// Raised by a forked child's handler when it serves; a futex word.
static TAKEN_OVER: AtomicU32 = AtomicU32::new(0);
/// Process id of the forking parent, for its child.
static PARENT: AtomicU32 = AtomicU32::new(0);
/// The process whose memory [`ENGINE`] manages: a child of a raw clone has the pointer and not the engine.
static ENGINE_PID: AtomicU32 = AtomicU32::new(0);
/// The signal mask of the forking thread, from its prepare handler to the other end.
static FORK_MASK: AtomicU64 = AtomicU64::new(0);

const STACK: usize = 512 << 10;

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = constructor;

unsafe extern "C" {
    fn pthread_atfork(prepare: extern "C" fn(), parent: extern "C" fn(), child: extern "C" fn()) -> c_int;
}

/// The engine, if the program's memory is managed.
pub fn engine() -> Option<&'static Engine> {
    // SAFETY: the pointer is null or that of an engine that is never freed.
    let engine = unsafe { ENGINE.load(Acquire).as_ref() }?;
    (ENGINE_PID.load(Acquire) == getpid().0).then_some(engine)
}

/// Numbers 0 to 2 are taken by nothing: what writes to standard error by mistake must not write to the swap file.
fn empty_table() -> Result<(), swaptide_sys::Errno> {
    unshare_files_and_close_all(&[])?;
    for _ in 0..3 {
        std::mem::forget(rustix::fs::open(
            c"/dev/null",
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        ));
    }
    Ok(())
}

/// True in the process-id namespace of the supervisor: in another one, process ids mean other processes.
fn same_pid_namespace(segment: &Segment) -> bool {
    let ours = rustix::fs::stat(c"/proc/self/ns/pid").map_or(0, |stat| stat.st_ino);
    let theirs = segment.header.pid_namespace.load(Relaxed);
    theirs == 0 || ours == theirs
}

/// Runs before the program's own constructors.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn constructor(_argc: c_int, _argv: *const *const c_char, envp: *const *const c_char) {
    let Some(socket) = variable(envp, ENV_SOCKET) else { return };
    {
        let mut name = SOCKET.lock();
        let len = socket.len().min(108);
        name.0[..len].copy_from_slice(&socket[..len]);
        name.1 = len;
    }
    if let Some(path) = variable(envp, ENV_AGENT_LOG) {
        log::set_path(path);
    }
    real::find();
    if let Some(path) = own_path() {
        exec::remember(path, socket, variable(envp, ENV_AGENT_LOG));
    }
    let _ = now();
    // SAFETY: the handlers are functions of this library, which is never unloaded.
    unsafe { pthread_atfork(prepare, parent, child) };
    let _ = spawn(sleeper);
}

/// The path of this library, as the loader found it.
fn own_path() -> Option<&'static [u8]> {
    #[repr(C)]
    struct Found {
        path: *const c_char,
        base: usize,
        symbol: *const c_char,
        address: usize,
    }
    unsafe extern "C" {
        fn dladdr(address: *const c_void, found: *mut Found) -> c_int;
    }
    let mut found = Found { path: std::ptr::null(), base: 0, symbol: std::ptr::null(), address: 0 };
    // SAFETY: the struct is the one that dladdr fills.
    let known = unsafe { dladdr(own_path as *const c_void, &mut found) };
    // SAFETY: the loader's name of a library that is never unloaded.
    (known != 0 && !found.path.is_null()).then(|| unsafe { CStr::from_ptr(found.path) }.to_bytes())
}

/// A variable of the environment the program started with.
fn variable(mut envp: *const *const c_char, name: &str) -> Option<&'static [u8]> {
    if envp.is_null() {
        return None;
    }
    loop {
        // SAFETY: the loader passes a null-terminated array of NUL-terminated strings that live as long as the process.
        let entry = unsafe { *envp };
        if entry.is_null() {
            return None;
        }
        // SAFETY: as above.
        let entry = unsafe { CStr::from_ptr(entry) }.to_bytes();
        if let Some(value) = entry.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"=")) {
            return Some(value);
        }
        // SAFETY: the array goes on until its null.
        envp = unsafe { envp.add(1) };
    }
}

fn spawn(entry: extern "C" fn(usize)) -> bool {
    // SAFETY: the entry runs on engine rules: no thread-locals of the program, no stdio, its own allocator.
    unsafe { spawn_engine_thread(STACK, entry, 0) }.is_ok()
}

fn ask(request: Request) -> Option<OwnedFd> {
    let (name, len) = *SOCKET.lock();
    let conn = Conn::connect_abstract(&name[..len]).ok()?;
    conn.send(&[request as u8], &[]).ok()?;
    let mut fds = [None];
    let mut reply = [0u8; 8];
    conn.recv(&mut reply, &mut fds).ok()?;
    let [fd] = fds;
    fd
}

fn segment() -> Option<&'static Segment> {
    // SAFETY: null, or a segment that stays mapped.
    if let Some(segment) = unsafe { SEGMENT.load(Acquire).as_ref() } {
        return Some(segment);
    }
    let fd = ask(Request::Segment)?;
    let map = SharedMap::map(fd.as_fd(), Segment::BYTES).ok()?;
    match Segment::open(map) {
        Ok(segment) => {
            SEGMENT.store(std::ptr::from_ref(segment).cast_mut(), Release);
            Some(segment)
        }
        Err(error) => {
            log::line(&error.to_string());
            None
        }
    }
}

/// Handlers run before what they serve: a fault is a thread that waits, and a program that grows does not wait for its engine to start.
fn go_first() {
    // Without the privilege the handler is a thread like others.
    let _ = swaptide_sys::affinity::set_own_nice(-10);
}

/// The thread that waits.
extern "C" fn sleeper(_: usize) {
    if empty_table().is_err() {
        return;
    }
    set_name(c"swaptide");
    go_first();
    let Some(segment) = segment() else { return };
    if !same_pid_namespace(segment) {
        log::line("a process-id namespace of its own: this process is not managed");
        return;
    }
    let forked_from = PARENT.load(Relaxed);
    let Some(index) = segment.claim(getpid().0, forked_from) else {
        log::line("the supervisor's table of processes is full: this process is not managed");
        return;
    };
    let slot = segment.slot(index);
    loop {
        let bell = slot.bell.load(Acquire);
        if slot.wanted.load(Acquire) != 0 {
            engage(segment, index);
        }
        futex::wait(&slot.bell, bell, None, futex::Scope::Shared);
    }
}

/// Takes the program's memory under management; returns only if that was refused.
fn engage(segment: &'static Segment, index: SlotIndex) {
    let slot = segment.slot(index);
    if !crate::arena::ready() {
        // Nothing can be allocated, not even for a line in the log.
        slot.set_state(ProcState::Refused);
        slot.wanted.store(0, Release);
        return;
    }
    let guard = FORK_LOCK.lock();
    let handler = match prepare_engine(segment, index) {
        Ok(handler) => handler,
        Err(why) => {
            drop(guard);
            log::line(&why);
            slot.set_state(ProcState::Refused);
            slot.wanted.store(0, Release);
            return;
        }
    };
    drop(guard);
    handler.run()
}

fn prepare_engine(segment: &'static Segment, index: SlotIndex) -> Result<&'static mut Handler, String> {
    let began = now();
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
    let file = if segment.header.extents.load(Relaxed) > 0 { ask(Request::SwapFile) } else { None };
    let start = Start {
        segment,
        index,
        file,
        salt: salt(),
        log: log::line,
        main_object: is_main_object,
        excluded: pins::is_excluded,
        pinned: pins::is_pinned,
    };
    let engine: &'static Engine = Box::leak(Box::new(Engine::new(start).map_err(|e| e.to_string())?));
    let handler = Box::leak(Box::new(Handler::new(engine).map_err(|e| e.to_string())?));
    ENGINE_PID.store(getpid().0, Release);
    ENGINE.store(std::ptr::from_ref(engine).cast_mut(), Release);
    start_workers(engine);
    handler.adopt();
    log::line(&format!("managed after {:?}, {} pages present", now().since(began), engine.mm.lock().table.present()));
    engine.count(Counter::Engaged, 1);
    engine.slot().set_state(ProcState::Engaged);
    Ok(handler)
}

/// A number that no other process of this run has: the cipher's nonces must never repeat.
fn salt() -> u64 {
    let mut bytes = [0u8; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_le_bytes(bytes),
        _ => abort_with(&[b"swaptide: the kernel gives no random numbers, which the swap file's cipher needs"]),
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
        // SAFETY: the entry runs on engine rules.
        if unsafe { spawn_engine_thread(STACK, worker, index as usize) }.is_ok() {
            running += 1;
        }
    }
    engine.workers.store(running, Release);
    engine.slot().engine_threads.store(running + 1, Relaxed);
}

extern "C" fn worker(index: usize) {
    set_name(c"swaptide-work");
    // Made by the handler, whose place in the queue it inherits and does not need.
    let _ = swaptide_sys::affinity::set_own_nice(0);
    let Some(engine) = engine() else { exit_thread() };
    Box::leak(Box::new(Worker::new())).run(engine, index)
}

/// Before a fork, in the forking thread. Signals wait until it is over: a handler that forks would wait for this thread's own lock.
extern "C" fn prepare() {
    let mask = block_all_signals().unwrap_or(0);
    std::mem::forget(FORK_LOCK.lock());
    FORK_MASK.store(mask, Relaxed);
    PARENT.store(getpid().0, Relaxed);
    if let Some(engine) = engine() {
        engine.fork.forker.store(gettid().0, Release);
        engine.bells.ring(Ring::ForkPrepare);
        engine.fork.wait(PREPARED);
    }
}

/// After a fork, in the parent.
extern "C" fn parent() {
    if let Some(engine) = engine() {
        engine.bells.ring(Ring::ForkDone);
        engine.fork.wait(NONE);
    }
    let mask = FORK_MASK.load(Relaxed);
    // SAFETY: this thread took the lock in `prepare` and forgot its guard.
    unsafe { FORK_LOCK.unlock() };
    restore_signals(mask);
}

/// After a fork, in the child, whose only thread this is.
extern "C" fn child() {
    after_fork_in_child();
    let mask = FORK_MASK.load(Relaxed);
    // SAFETY: the thread that took the lock in `prepare` is this one's original, and no other thread exists here.
    unsafe { FORK_LOCK.force_unlock() };
    // SAFETY: null, or the engine this process has a copy of.
    let inherited = unsafe { ENGINE.load(Acquire).as_ref() }.filter(|_| ENGINE_PID.load(Acquire) == PARENT.load(Relaxed));
    match inherited {
        None => {
            let _ = spawn(sleeper);
        }
        Some(engine) => {
            engine.forked();
            ENGINE_PID.store(getpid().0, Release);
            TAKEN_OVER.store(0, Relaxed);
            if !spawn(heir) {
                abort_with(&[b"swaptide: a forked child got no thread (see the limits on processes); it is stopped rather than given wrong data"]);
            }
            while TAKEN_OVER.load(Acquire) == 0 {
                futex::wait(&TAKEN_OVER, 0, Some(Duration::from_millis(100)), futex::Scope::Private);
            }
        }
    }
    restore_signals(mask);
}

/// The handler of a forked child.
extern "C" fn heir(_: usize) {
    let stop = |why: &str| -> ! {
        abort_with(&[
            b"swaptide: a forked child could not take its memory over: ",
            why.as_bytes(),
            b"; it is stopped rather than given wrong data",
        ])
    };
    let serve = |taken_over: u32| {
        TAKEN_OVER.store(taken_over, Release);
        futex::wake(&TAKEN_OVER, 1, futex::Scope::Private);
    };
    if let Err(errno) = empty_table() {
        stop(&swaptide_sys::Why(errno).to_string());
    }
    set_name(c"swaptide");
    go_first();
    let (Some(engine), Some(segment)) = (engine(), segment()) else { stop("its engine is gone") };
    if !same_pid_namespace(segment) {
        stop("it is in a process-id namespace of its own");
    }
    let Some(index) = segment.claim(getpid().0, PARENT.load(Relaxed)) else { stop("the table of processes is full") };
    let slot = segment.slot(index);
    slot.limit_bytes.store(engine.charge.limit(), Relaxed);
    slot.wanted.store(1, Relaxed);
    let left = match engine.inherit(index) {
        Ok(Some(left)) => left,
        Ok(None) => {
            // All its memory is there, and its copy of the engine is never used again.
            ENGINE.store(std::ptr::null_mut(), Release);
            slot.wanted.store(0, Relaxed);
            slot.set_state(ProcState::Refused);
            serve(1);
            exit_thread();
        }
        Err(errno) => stop(&format!("its parent does not answer: {}", swaptide_sys::Why(errno))),
    };
    let handler = match Handler::inherited(engine, index, salt(), left) {
        Ok(handler) => Box::leak(Box::new(handler)),
        Err(error) => stop(&error.to_string()),
    };
    start_workers(engine);
    slot.set_state(ProcState::Engaged);
    serve(1);
    handler.run()
}
