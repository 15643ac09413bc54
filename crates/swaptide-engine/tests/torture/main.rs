//! The engine as a library of this process, under a program that does to its memory what programs
//! do, by several threads at once: for tools that see into a process and that a preloaded library
//! keeps out, the address and thread sanitizers above all (`tests/sanitize`). The program is
//! `tests/e2e/c/torture.c`, loaded here; what the preloaded library does for it in the end-to-end
//! cases (hints, fences, forks) this test does by itself.
//!
//! Everything else of this process is as it would be without the engine: its threads are ordinary
//! ones, and nothing is managed but the program's mappings, in a stretch of addresses that is kept
//! for them. So what belongs to a sanitizer (its shadow, its allocator) is never taken out. What
//! else the process takes is not known before: a thread that stands for the supervisor sets the
//! limit to that and a little more, again and again.
//!
//! `SWAPTIDE_STRESS_SECONDS`: how long (3).

#[path = "../../../swaptide-sys/tests/common/mod.rs"]
mod common;
mod program;

use std::fs::File;
use std::os::fd::AsFd;
use std::ptr;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};
use std::sync::{OnceLock, RwLock};
use std::time::{Duration, Instant};

use swaptide_engine::event_loop::Handler;
use swaptide_engine::fork::Decline;
use swaptide_engine::reclaim::worker::Worker;
use swaptide_engine::requests::fork_control::NO_FORK;
use swaptide_engine::requests::{HandlerRequest, Hint};
use swaptide_engine::{Engine, Start};
use swaptide_ipc::{AreaId, Counter, NO_LIMIT, NewArea, ProcState, Segment};
use swaptide_sys::lock::{Lock, futex};
use swaptide_sys::maps::MapsFile;
use swaptide_sys::mem::{SharedMap, after_fork_in_child, memfd_create};
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::process::anon_rss;
use swaptide_sys::raw::{check, syscall6};
use swaptide_sys::sock::Conn;
use swaptide_sys::thread::{exit_group, getpid, gettid, now};
use swaptide_sys::{Errno, OwnedFd};

use program::{Program, is_outside, mix};

/// Threads of the program, and pages of all their areas, of which each has three.
const THREADS: usize = 3;
const PAGES: usize = THREADS * 3 * 256;
/// What of the areas may be in memory: less than half.
const LEAST_ROOM: u64 = 1 << 20;
const MOST_ROOM: u64 = 5 << 20;
/// Compressed memory takes no more, so that there is always something to write back.
const POOL_CAP: u64 = 512 << 10;
/// The swap file, in extents of 2 MiB.
const EXTENTS: u32 = 128;
/// What is waited for that has not happened in the time given.
const LONGER: Duration = Duration::from_secs(60);
/// A child that lives longer hangs.
const LATEST_END: Duration = Duration::from_secs(30);

static SEGMENT: OnceLock<&'static Segment> = OnceLock::new();
static SWAP_FILE: OnceLock<File> = OnceLock::new();
static ENGINE: AtomicPtr<Engine> = AtomicPtr::new(ptr::null_mut());
static FORK_LOCK: Lock<()> = Lock::new(());
static TAKEN_OVER: AtomicU32 = AtomicU32::new(0);
/// The program has ended.
static OVER: AtomicBool = AtomicBool::new(false);
static FORKS: AtomicU64 = AtomicU64::new(0);
static DECLINED: AtomicU64 = AtomicU64::new(0);

/// Held by the supervisor while it does something; for writing by a fork while nothing else is
/// done.
static WORLD: RwLock<()> = RwLock::new(());

unsafe extern "C" {
    // Libc's: the address sanitizer has its part in it.
    #[cfg(not(tsan))]
    fn fork() -> i32;
    // The thread sanitizer's fork keeps all locks of its own until the kernel has made the child,
    // which it has when the handler has read that it does; and the handler, whose code asks for
    // those locks too, would never come to that. So it is not to know of the fork. What its locks
    // are in the child is how they were left by those that are not there any more: all other
    // threads are at rest then, and a child that finds one held is let down (see `fork_once`).
    #[cfg(tsan)]
    #[link_name = "_Fork"]
    fn fork() -> i32;
    // The thread sanitizer's: what the calling thread reads and writes from now on is not looked
    // at.
    #[cfg(tsan)]
    fn AnnotateIgnoreReadsBegin(file: *const std::ffi::c_char, line: i32);
    #[cfg(tsan)]
    fn AnnotateIgnoreWritesBegin(file: *const std::ffi::c_char, line: i32);
}

/// Set in a forked child.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// Called by every thread of a forked child. The parent's threads are not there, and what the
/// thread sanitizer remembers of them was ordered before the fork by nothing that it has seen: the
/// handler may have held the memory lock at that moment, and never gives it back there.
fn begin_in_child() {
    #[cfg(tsan)]
    if IS_CHILD.load(Relaxed) {
        // SAFETY: the strings only help to find forgotten calls, and these threads
        // end with the process.
        unsafe {
            AnnotateIgnoreReadsBegin(c"".as_ptr(), 0);
            AnnotateIgnoreWritesBegin(c"".as_ptr(), 0);
        }
    }
}

fn die(what: &str) -> ! {
    eprintln!("FAILED pid {}: {what}", getpid().0);
    exit_group(3)
}

fn engine() -> &'static Engine {
    // SAFETY: set before the first thread of the program starts, to an engine that is never freed.
    unsafe { &*ENGINE.load(Acquire) }
}

fn segment() -> &'static Segment {
    SEGMENT.get().expect("the segment")
}

fn open_area(_: AreaId) -> Result<OwnedFd, Errno> {
    let file = SWAP_FILE.get().ok_or(Errno::NODEV)?;
    file.try_clone().map(OwnedFd::from).map_err(|_| Errno::MFILE)
}

fn salt() -> u64 {
    u64::from(getpid().0) << 32 | now().0 & 0xffff_ffff
}

// The engine's threads.

fn start_workers(engine: &'static Engine) {
    const WORKERS: u32 = 2;
    for index in 0..WORKERS {
        std::thread::spawn(move || {
            begin_in_child();
            Worker::new(engine.devices.scheme).run(engine, index as usize);
        });
    }
    engine.workers.running.store(WORKERS, Release);
    engine.slot().engine_threads.store(WORKERS + 1, Relaxed);
}

/// As the preloaded library does it.
fn serve(engine: &Engine, handler: &mut Handler) {
    loop {
        handler.run();
        let Some(_quiet) = FORK_LOCK.try_lock() else { continue };
        if handler.detach() {
            engine.slot().set_state(ProcState::Detached);
            return;
        }
    }
}

/// The supervisor, as far as there is one: the limit follows what the process takes besides its
/// managed memory.
fn supervise(engine: &Engine, world: &RwLock<()>) {
    begin_in_child();
    let mut random = now().0;
    let mut room = MOST_ROOM;
    while !OVER.load(Acquire) {
        let among = world.read();
        let slot = engine.slot();
        let kept = [&slot.usage.managed_bytes, &slot.usage.staging_bytes, &slot.usage.pool_bytes]
            .iter()
            .map(|bytes| bytes.load(Relaxed))
            .sum();
        random = mix(random + 1);
        if random.is_multiple_of(20) {
            room = LEAST_ROOM + random / 20 % (MOST_ROOM - LEAST_ROOM);
        }
        if let Some(anon) = anon_rss(getpid().0) {
            slot.control.limit_bytes.store(anon.saturating_sub(kept) + room, Relaxed);
        }
        engine.look_after_threads();
        drop(among);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Lets the forking thread of a child continue.
fn is_served() {
    TAKEN_OVER.store(1, Release);
    futex::wake(&TAKEN_OVER, 1, futex::Scope::Private);
}

/// The handler of a forked child.
fn child_handler(engine: &'static Engine, end: Option<Conn>, parent: u32) {
    begin_in_child();
    let index = segment().claim(getpid().0, parent).unwrap_or_else(|| die("no slot is free"));
    let slot = segment().slot(index);
    slot.control.limit_bytes.store(engine.charge.limit(), Relaxed);
    slot.control.engage.store(1, Relaxed);
    let mut left = match engine.inherit(end, index) {
        Ok(Some(left)) => left,
        // Its copy of the engine is torn, or was not to be had: all memory is there.
        Ok(None) => return is_served(),
        Err(errno) => die(&format!("nothing was handed over: {}", swaptide_sys::ErrnoName(errno))),
    };
    let handler = Handler::inherited(engine, index, salt(), &mut left);
    let mut handler = handler.unwrap_or_else(|e| die(&format!("a child is not managed: {e}")));
    let _ = left.taken();
    drop(left);
    start_workers(engine);
    std::thread::spawn(move || supervise(engine, &RwLock::new(())));
    slot.set_state(ProcState::Engaged);
    is_served();
    serve(engine, &mut handler);
}

/// Pages out, in from memory, written back, in from the file; forks, and those whose child got all
/// its memory at once.
fn counts() -> [u64; 6] {
    let count = |counter: Counter| engine().slot().counters[counter as usize].load(Relaxed);
    let [out, pool, back, file, forks] =
        [Counter::Pgsteal, Counter::Zswpin, Counter::Zswpwb, Counter::Pswpin, Counter::Forks]
            .map(count);
    [out, pool, back, file, forks, DECLINED.load(Relaxed)]
}

fn seconds() -> f64 {
    std::env::var("SWAPTIDE_STRESS_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3.0)
}

fn temporary_file() -> File {
    use rustix::fs::{Mode, OFlags, open};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    File::from(
        open(std::env::temp_dir(), flags, Mode::RUSR | Mode::WUSR).expect("a temporary file"),
    )
}

/// The supervisor's part of a run: a segment with one swap file; and a program that has mapped its
/// areas. Noted when half of the time is over: both ways are gone, and the change.
static REFERENCES: swaptide_engine::References = swaptide_engine::References::new();

/// What a test wants: three fault servers, which read however few threads fault.
const FAULT_SERVERS: u32 = 18;

fn set_up(wanted: u32) -> (Start, Program) {
    let fd = memfd_create(c"torture", Segment::BYTES as u64).expect("memfd");
    let segment =
        Segment::raw(SharedMap::map(fd.as_fd(), Segment::BYTES).expect("map")).expect("segment");
    segment.header.injection.fail.store(wanted, Relaxed);
    segment.header.pool.percent.store(75, Relaxed);
    segment.header.pool.cap_bytes.store(POOL_CAP, Relaxed);
    segment
        .header
        .key
        .iter()
        .enumerate()
        .for_each(|(i, word)| word.store(mix(now().0 + i as u64), Relaxed));
    let file = temporary_file();
    file.set_len(u64::from(EXTENTS) << 21).expect("room for the swap file");
    SWAP_FILE.set(file).expect("one run");
    segment.add_area(NewArea::of_file(0, EXTENTS)).expect("an area");
    assert!(SEGMENT.set(segment).is_ok());
    let index = segment.claim(getpid().0, 0).expect("a slot");
    segment
        .slot(index)
        .control
        .limit_bytes
        .store(anon_rss(getpid().0).expect("statm") + MOST_ROOM, Relaxed);

    let program = Program::load(THREADS, PAGES);
    let start = Start {
        segment,
        index,
        open_area,
        salt: salt(),
        log: |line| eprintln!("{line}"),
        main_object: |_| false,
        excluded: is_outside,
        waits_at_fences: || true,
        gives_fork_advice: || false,
        pinned: |_| 0,
        spawn_reader: || false,
        spawn_server: || {
            std::thread::spawn(|| {
                begin_in_child();
                swaptide_engine::serve_faults(engine());
            });
            true
        },
        release_hold: || true,
        hold_child: |_| None,
        references: &REFERENCES,
    };
    (start, program)
}

#[test]
fn torture_reads_what_it_wrote() {
    torture("torture_reads_what_it_wrote", 0);
}

#[test]
fn torture_reads_what_it_wrote_with_fault_servers() {
    torture("torture_reads_what_it_wrote_with_fault_servers", FAULT_SERVERS);
}

fn torture(name: &str, wanted: u32) {
    common::in_child(name, || {
        let (start, program) = set_up(wanted);
        let engine: &'static Engine = Box::leak(Box::new(Engine::new(start).expect("an engine")));
        ENGINE.store(ptr::from_ref(engine).cast_mut(), Release);
        let mut handler = Handler::new(engine).expect("a handler");
        handler.adopt();
        let slot = engine.slot();
        slot.set_state(ProcState::Engaged);
        start_workers(engine);
        let handler = std::thread::spawn(move || serve(engine, &mut handler));
        let supervisor = std::thread::spawn(move || supervise(engine, &WORLD));

        let time = Duration::from_secs_f64(seconds());
        let steps: usize = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(time / 2);
                REFERENCES.note();
            });
            let program = &program;
            let running: Vec<_> =
                (0..THREADS).map(|number| scope.spawn(move || program.run(number, time))).collect();
            running
                .into_iter()
                .map(|thread| {
                    thread.join().unwrap_or_else(|_| die("a thread of the program panicked"))
                })
                .sum()
        });

        OVER.store(true, Release);
        supervisor.join().expect("the supervisor ends");
        slot.control.limit_bytes.store(NO_LIMIT, Relaxed);
        slot.control.detach.store(1, Release);
        handler.join().expect("the program is let go");
        program.verify();
        println!(
            "{steps} steps; out, in from memory, written back, in from the file, forks, declined: \
            {:?}",
            counts()
        );
        assert!(!counts().contains(&0), "{:?}", counts());
        let by_servers = slot.counters[Counter::FaultsByServers as usize].load(Relaxed);
        assert!(by_servers > 0 || wanted != FAULT_SERVERS, "no fault was served by a server");
    });
}
