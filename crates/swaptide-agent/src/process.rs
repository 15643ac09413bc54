//! What this process is to its supervisor: the engine, the segment, the slot, and what is asked
//! through the socket.
//!
//! Locks: [`FORK_LOCK`] keeps a fork and the beginning of management apart.

use std::os::fd::{FromRawFd, IntoRawFd};
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering::AcqRel, Ordering::Acquire,
    Ordering::Relaxed, Ordering::Release,
};
use std::time::Duration;

use swaptide_engine::Engine;
use swaptide_engine::requests::{FaultRequest, HandlerRequest};
use swaptide_ipc::{
    AgentRequest, AreaId, ENV_SOCKET, INJECTING_SOCKET, MIN_BUDGET_BYTES, NO_LIMIT, ProcSlot,
    ProcState, Segment, SlotIndex,
};
use swaptide_sys::helper::PrivilegedHelper;
use swaptide_sys::lock::Lock;
use swaptide_sys::mem::SharedMap;
use swaptide_sys::page::{VirtAddr, VirtRange};
use swaptide_sys::sock::{Conn, poll_readable};
use swaptide_sys::thread::{getpid, now, sleep, spawn_engine_thread, unshare_files_and_close_all};
use swaptide_sys::{AsFd, BorrowedFd, Errno, OwnedFd};

use crate::engage_gate::ENGAGE_TIMEOUT;
use crate::environment::Variable;
use crate::forking::{ForkWait, Turn};
use crate::log;
use crate::marks::{self, bears_mark};
use crate::own_pid::is_own_process;
use crate::real;
use crate::seccomp;

/// Held around a fork, and while the process is engaged or detached.
pub(crate) static FORK_LOCK: Lock<()> = Lock::new(());
pub(crate) static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(std::ptr::null_mut());
static SEGMENT: AtomicPtr<Segment> = AtomicPtr::new(std::ptr::null_mut());
/// The supervisor's socket name.
static SOCKET: Variable = Variable::new();

/// Remembers it. Called by the constructor.
pub(crate) fn set_socket(name: &[u8]) {
    SOCKET.set(ENV_SOCKET, name);
}

pub(crate) fn socket() -> &'static [u8] {
    SOCKET.value(ENV_SOCKET)
}

/// The process whose memory [`ENGINE`] manages: a child of a raw clone has the pointer and not the
/// engine.
pub(crate) static ENGINE_PID: AtomicU32 = AtomicU32::new(0);
pub(crate) const THREAD_STACK_BYTES: usize = 512 << 10;

/// The engine, if the program's memory is managed.
pub(crate) fn engine() -> Option<&'static Engine> {
    // SAFETY: the pointer is null or that of an engine that is never freed.
    let engine = unsafe { ENGINE.load(Acquire).as_ref() }?;
    // A process id may come again.
    (bears_mark() && ENGINE_PID.load(Acquire) == getpid().0).then_some(engine)
}

/// As [`engine`], without a system call: where none may be made ([`seccomp`]).
pub(crate) fn engine_without_calls() -> Option<&'static Engine> {
    // SAFETY: the pointer is null or that of an engine that is never freed.
    unsafe { ENGINE.load(Acquire).as_ref() }.filter(|_| bears_mark())
}

/// From now on locks are held by threads that run on this memory: before one takes [`FORK_LOCK`].
/// Where the memory is a copy, the lock is freed, whichever thread of another process had it, and
/// there is no engine, unless this is libc's child (`is_libcs`), which has one to take over. Makes
/// no system call.
pub(crate) fn own_memory(is_libcs: bool) {
    marks::claim(is_libcs, || {
        if FORK_LOCK.is_locked() {
            // SAFETY: until now no thread of this process takes it, so its holder is another's.
            unsafe { FORK_LOCK.force_unlock() };
        }
        if !is_libcs {
            ENGINE.store(std::ptr::null_mut(), Release);
        }
    });
}

/// Gives the calling thread a table of descriptors of its own, with nothing but `keep`. Numbers 0
/// to 2 are taken by nothing: what writes to standard error by mistake must not write to
/// the swap file.
pub(crate) fn empty_table(keep: Option<i32>) -> Result<(), swaptide_sys::Errno> {
    // The program may leave the directory and unmount what it is on. Without a root that can be
    // entered all stays as it is.
    let _ = rustix::process::chdir(c"/");
    unshare_files_and_close_all(keep.as_slice())?;
    for _ in 0..3 {
        std::mem::forget(rustix::fs::open(
            c"/dev/null",
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        ));
    }
    Ok(())
}

pub(crate) fn spawn(entry: extern "C" fn(usize)) -> bool {
    spawn_with(THREAD_STACK_BYTES, entry, 0)
}

pub(crate) fn spawn_with(stack: usize, entry: extern "C" fn(usize), argument: usize) -> bool {
    // SAFETY: the entry runs on engine rules: no thread-locals of the program, no stdio, its own
    // allocator.
    unsafe { spawn_engine_thread(stack, entry, argument) }.is_ok()
}

/// Starts the thread that watches over shared memory.
pub(crate) fn spawn_guard(entry: extern "C" fn(usize)) -> bool {
    spawn_with(64 << 10, entry, 0)
}

/// Gives the calling thread a table of descriptors of its own.
pub(crate) fn own_table() -> Option<()> {
    empty_table(None).ok()
}

static CLONED: AtomicBool = AtomicBool::new(false);

/// A task that shares this memory is about to begin, of which libc may know nothing.
pub(crate) fn will_have_threads() {
    CLONED.store(true, Relaxed);
}

/// True if there may be several. Libc makes threads through other functions than `pthread_create`
/// too, so it is asked.
pub(crate) fn has_threads() -> bool {
    CLONED.load(Relaxed) || crate::real::has_threads()
}

/// The segment, if it is mapped.
pub(crate) fn known_segment() -> Option<&'static Segment> {
    // SAFETY: null, or a segment that stays mapped.
    unsafe { SEGMENT.load(Acquire).as_ref() }
}

/// False where the kernel tells of forks. True where it is not known yet.
pub(crate) fn may_follow_forks() -> bool {
    known_segment().is_none_or(|segment| segment.header.followed_forks.load(Relaxed) != 0)
}

fn ask(request: AgentRequest) -> Option<OwnedFd> {
    exchange(&[request as u8], &[], &mut [0u8; 8])?.1
}

/// Tells a supervisor that injects the agent that this process, or one that it is about to start,
/// executes a program. No answer comes. Also called in the child of a vfork; a thread under a
/// filter tells nothing.
pub(crate) fn announce_exec() {
    if !socket().starts_with(INJECTING_SOCKET.as_bytes()) || seccomp::is() {
        return;
    }
    let errno = real::errno();
    if let Ok(conn) = Conn::connect_trusted_high(socket()) {
        let _ = conn.send(&[AgentRequest::Exec as u8], &[]);
    }
    real::restore_errno(errno);
}

/// Asks the supervisor to follow a thread of this process through its fork; the connection on which
/// it waits for the end of that.
pub(crate) fn ask_to_follow(tid: u32, entry: u64, frame: u64) -> Option<Conn> {
    let mut request = [AgentRequest::Fork as u8; 21];
    request[1..5].copy_from_slice(&tid.to_le_bytes());
    request[5..13].copy_from_slice(&entry.to_le_bytes());
    request[13..].copy_from_slice(&frame.to_le_bytes());
    let conn = Conn::connect_trusted_high(socket()).ok()?;
    conn.send(&request, &[]).ok()?;
    let mut reply = [0u8; 8];
    let (length, _) = conn.recv(&mut reply, &mut []).ok()?;
    (length == 1 && reply[0] == AgentRequest::Fork as u8).then_some(conn)
}

/// In a child that has just been made by fork(2): the engine of its parent, of which it has a copy.
pub(crate) fn inherited_engine() -> Option<&'static Engine> {
    // SAFETY: null, or the engine this process has a copy of.
    unsafe { ENGINE.load(Acquire).as_ref() }
}

/// A descriptor for a swap area, of this process's own where that is needed.
///
/// # Errors
/// What this process lacks for it, or why the supervisor cannot be asked; `NODEV` where that has
/// none.
pub(crate) fn open_area(id: AreaId) -> Result<OwnedFd, Errno> {
    let conn = Conn::connect_trusted(socket())?;
    conn.send(&[AgentRequest::Area as u8, id.0], &[])?;
    let mut fds = [None];
    let (length, _) = conn.recv(&mut [0u8; 8], &mut fds)?;
    let [fd] = fds;
    // What was sent and did not arrive has found no place in this thread's table.
    fd.ok_or(if length > 0 { Errno::MFILE } else { Errno::NODEV })
}

/// Asks the supervisor; the length of its answer, and the descriptor that came with it.
pub(crate) fn exchange(
    request: &[u8],
    fds: &[BorrowedFd<'_>],
    reply: &mut [u8],
) -> Option<(usize, Option<OwnedFd>)> {
    let conn = Conn::connect_trusted(socket()).ok()?;
    conn.send(request, fds).ok()?;
    let mut fds = [None];
    let (length, _) = conn.recv(reply, &mut fds).ok()?;
    let [fd] = fds;
    Some((length, fd))
}

/// The supervisor may what this process may not, or not any more.
pub(crate) static HELPER: PrivilegedHelper = PrivilegedHelper {
    device: || ask(AgentRequest::Device),
    handshake: |fd, features| {
        let mut request = [AgentRequest::Handshake as u8; 9];
        request[1..].copy_from_slice(&features.to_le_bytes());
        exchange(&request, &[fd], &mut [0u8; 8]).is_some_and(|(length, _)| length == 1)
    },
    proc_file: |name| {
        ask(match name.to_bytes() {
            b"pagemap" => AgentRequest::Pagemap,
            b"maps" => AgentRequest::Maps,
            b"statm" => AgentRequest::Statm,
            _ => return None,
        })
    },
};

pub(crate) fn segment() -> Option<&'static Segment> {
    // SAFETY: null, or a segment that stays mapped.
    if let Some(segment) = unsafe { SEGMENT.load(Acquire).as_ref() } {
        return Some(segment);
    }
    let fd = ask(AgentRequest::Segment)?;
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

/// The connection by which the supervisor holds this process's userfaultfd, in the engine's table;
/// -1: there is none. A forked child's copy is its parent's number, and replaced before it is used.
static HOLD_CONN: AtomicI32 = AtomicI32::new(-1);
/// The timeout for the supervisor to close it.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(200);

/// The timeout for the supervisor to hold it.
const HOLD_TIMEOUT: Duration = Duration::from_secs(2);

/// Has the supervisor hold the engine's userfaultfd, so that it outlives the engine's threads when
/// the process ends. Returns when it is held: a process may be killed at once after its pages went
/// out, and a request of the dead is refused. Refused, the end is as without.
///
/// False if the supervisor had it as that of a process that has ended, and has read from it: then
/// this process may not serve it. By the mark it is this process's from here on, even if the
/// supervisor comes to the request late.
#[must_use]
pub(crate) fn request_hold(engine: &Engine) -> bool {
    if engine.uffd().serve(getpid().0) == Ok(false) {
        return false;
    }
    let sent = Conn::connect_trusted(socket()).and_then(|conn| {
        conn.send(&[AgentRequest::Hold as u8], &[engine.uffd().as_fd()])?;
        // Where a limit on files forbids to poll, the answer is waited for.
        if poll_readable(&[conn.as_fd()], Some(HOLD_TIMEOUT)) != Ok(0) {
            conn.recv(&mut [0u8; 8], &mut [])?;
        }
        Ok(conn)
    });
    HOLD_CONN.store(sent.map_or(-1, |conn| conn.into_fd().into_raw_fd()), Relaxed);
    true
}

/// Has the supervisor hold a forked child's userfaultfd, should this process end before the child
/// has what it needs. No thread waits for it: the child runs already.
pub(crate) fn hold_child(uffd: BorrowedFd<'_>) -> Option<Conn> {
    let conn = Conn::try_connect_abstract(socket()).and_then(Conn::of_trusted).ok()?;
    conn.send(&[AgentRequest::Hold as u8], &[uffd]).ok()?;
    Some(conn)
}

/// Has it closed there. What did not come about is asked for again.
pub(crate) fn release_hold() -> bool {
    let number = HOLD_CONN.load(Relaxed);
    if number < 0 {
        return true;
    }
    // SAFETY: the number is that of a descriptor of this thread's table, which `hold` left open for
    // this.
    let conn = Conn::from_fd(unsafe { OwnedFd::from_raw_fd(number) });
    let asked = conn.send(b"-", &[]);
    // Where a limit on files forbids to poll, the answer is waited for.
    let has_answer = || poll_readable(&[conn.as_fd()], Some(RELEASE_TIMEOUT)) != Ok(0);
    let is_closed = asked.is_err()
        || has_answer() && !conn.recv(&mut [0u8; 8], &mut []).is_ok_and(|(length, _)| length > 0);
    if is_closed {
        HOLD_CONN.store(-1, Relaxed);
        return true;
    }
    std::mem::forget(conn);
    false
}

/// The state of this process's connection to its supervisor: [`NO_SLOT`], [`SLOT_PENDING`], or its
/// slot's number plus one.
pub(crate) static PLACE: AtomicU32 = AtomicU32::new(SLOT_UNCLAIMED);
pub(crate) const SLOT_UNCLAIMED: u32 = 0;
pub(crate) const SLOT_PENDING: u32 = u32::MAX;

/// A mapping of `len` bytes is about to be made, to be written. One that is as large as the whole
/// budget is not made before the process is managed: filled at full speed, or by the kernel at
/// once, it would be past the budget before the supervisor looked. What is `reserved` beyond all
/// memory of the machine is address space, and not to be filled.
pub(crate) fn begin_before(len: usize, reserved: bool) {
    if (len as u64) < MIN_BUDGET_BYTES
        || !is_own_process()
        || (reserved && len as u64 > machine_bytes())
    {
        return;
    }
    let began = now();
    let pause = || {
        sleep(Duration::from_micros(100));
        now().since(began) < ENGAGE_TIMEOUT
    };
    while PLACE.load(Acquire) == SLOT_PENDING && pause() {}
    let place = PLACE.load(Acquire);
    let Some(segment) =
        known_segment().filter(|_| place != SLOT_UNCLAIMED && place != SLOT_PENDING)
    else {
        return;
    };
    let slot = segment.slot(SlotIndex(place - 1));
    let budget = segment.header.budget_bytes.load(Relaxed);
    if budget == 0 || (len as u64) < budget || slot.state() != ProcState::Watching {
        return;
    }
    slot.engage_now.store(1, Release);
    // The process that asks for the segment is examined then. It is not taken: for a moment it
    // would be at a number of the program's.
    if let Ok(conn) = Conn::connect_trusted_high(socket())
        && conn.send(&[AgentRequest::Segment as u8], &[]).is_ok()
    {
        let _ = conn.wait();
    }
    while slot.state() == ProcState::Watching && pause() {}
}

/// The segment, and the slot that this process has in it, if it has one.
pub(crate) fn own_slot() -> Option<(&'static Segment, &'static ProcSlot)> {
    let place = PLACE.load(Acquire);
    let segment = known_segment().filter(|_| is_own_process())?;
    let is_claimed = place != SLOT_UNCLAIMED && place != SLOT_PENDING;
    is_claimed.then(|| (segment, segment.slot(SlotIndex(place - 1))))
}

/// Memory of the machine.
fn machine_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

/// Has everything brought back, and this process let go for good; returns when that is done. Called
/// by the program's threads. False if another thread is in a fork that does not come to its end:
/// then this process is managed as before.
#[must_use]
pub(crate) fn detach() -> bool {
    if seccomp::is() {
        detach_without_calls();
        return true;
    }
    let this = getpid().0;
    let Some(segment) = known_segment().filter(|_| is_own_process()) else { return true };
    let Some((_, slot)) = segment.claimed().find(|(_, slot)| slot.pid.load(Relaxed) == this) else {
        return true;
    };
    let was_asked_for = slot.control.detach.swap(1, AcqRel) != 0;
    let limit = slot.control.limit_bytes.swap(NO_LIMIT, AcqRel);
    slot.wake();
    if let Some(engine) = engine() {
        engine.handler_requests.submit(HandlerRequest::Detach);
    }
    let mut wait = ForkWait::new();
    while matches!(slot.state(), ProcState::Watching | ProcState::Engaged) {
        if wait.turn() == Turn::Over {
            if !was_asked_for {
                let word = &slot.control.limit_bytes;
                let _ = word.compare_exchange(NO_LIMIT, limit, AcqRel, Relaxed);
                slot.control.detach.store(0, Release);
                slot.wake();
            }
            log::line(
                "a thread's fork does not come to its end, and another thread needs this process \
                detached: its call fails (a fork handler may wait for a lock of that thread's)",
            );
            return false;
        }
        sleep(Duration::from_millis(1));
    }
    true
}

/// The engine's threads end, or do not begin: this process is to have the program's alone.
static LEAVES: AtomicBool = AtomicBool::new(false);

/// True if the engine's threads are to end.
pub(crate) fn leaves() -> bool {
    LEAVES.load(Acquire)
}

/// Tells the engine's threads of a process that is detached to end.
pub(crate) fn end_threads() {
    LEAVES.store(true, Release);
}

/// In a forked child: it may be managed.
pub(crate) fn forked_after_leaving() {
    LEAVES.store(false, Relaxed);
}

/// Detaches this process for good, and tells the engine's threads to end. False where it cannot be.
#[must_use]
pub(crate) fn leave() -> bool {
    if !is_own_process() || seccomp::is() {
        return false;
    }
    LEAVES.store(true, Release);
    if !detach() {
        LEAVES.store(false, Release);
        return false;
    }
    let this = getpid().0;
    let slots = known_segment().into_iter().flat_map(Segment::claimed);
    for (_, slot) in slots.filter(|(_, slot)| slot.pid.load(Relaxed) == this) {
        slot.wake();
        // The thread that waits for the first one's end looks again.
        slot.signal_leader_exit();
    }
    true
}

/// The same without a system call of the program's thread: see [`seccomp`].
pub(crate) fn detach_without_calls() {
    STAYS_UNMANAGED.store(true, Release);
    own_memory(false);
    loop {
        if let Some(engine) = engine_without_calls() {
            let slot = engine.slot();
            slot.control.detach.store(1, Release);
            slot.control.limit_bytes.store(NO_LIMIT, Release);
            let nowhere = VirtRange { start: VirtAddr(0), end: VirtAddr(0) };
            engine.handler_requests.submit_by_fault(FaultRequest::Detach, nowhere);
        }
        // Management that was beginning has begun, or will find the flag.
        if let Some(guard) = FORK_LOCK.try_lock() {
            std::mem::forget(guard);
            let is_over = engine_without_calls().is_none();
            // SAFETY: this thread took the lock; a waiter looks again by itself.
            unsafe { FORK_LOCK.force_unlock() };
            if is_over {
                return;
            }
        }
        std::hint::spin_loop();
    }
}

/// The program was detached where its thread could not tell the sleeper: management must not begin.
/// Stored before, and read under, [`FORK_LOCK`].
pub(crate) static STAYS_UNMANAGED: AtomicBool = AtomicBool::new(false);
