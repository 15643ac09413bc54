//! The program: `tests/e2e/c/torture.c`, compiled and loaded into this process, and the calls that
//! it makes through this module. They do what the preloaded library does around such calls.
//!
//! The program's mappings lie in *places* of a stretch of addresses. Addresses of a place that are
//! not the program's are kept for it by a mapping without access, which nothing is managed of.

use std::ffi::{CString, c_char, c_int, c_long, c_void};
use std::path::PathBuf;
use std::process::Command;

use super::*;

pub const MAP: u32 = linux_raw_sys::general::__NR_mmap;
const PROTECT: u32 = linux_raw_sys::general::__NR_mprotect;
const UNMAP: u32 = linux_raw_sys::general::__NR_munmap;
const REMAP: u32 = linux_raw_sys::general::__NR_mremap;
const ADVISE: u32 = linux_raw_sys::general::__NR_madvise;

const PROT_NONE: usize = 0;
const READ_WRITE: usize = 3;
const SHARED: usize = 0x4021;
const PRIVATE: usize = 0x4022;
const FIXED: usize = 0x10;
const NO_REPLACE: usize = 0x10_0000;

/// Areas, buffers, targets of moves, and some for those that are lost.
const PLACES: usize = 32;
/// Bytes of a place, and the largest mapping of the program.
const PLACE_BYTES: usize = 1024 * PAGE_SIZE;

pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A call that changes mappings of the program, past libc: the sanitizers need not know of it.
fn call(number: u32, a: [usize; 5]) -> Result<VirtAddr, Errno> {
    // SAFETY: every range passed lies in addresses that only the program has.
    check(unsafe { syscall6(number, [a[0], a[1], a[2], a[3], a[4], 0]) }).map(VirtAddr)
}

/// What the C program is answered.
fn answer(result: Result<VirtAddr, Errno>) -> c_long {
    match result {
        Ok(at) => at.0 as c_long,
        Err(errno) => -c_long::from(errno.raw_os_error()),
    }
}

// The places.

static STRETCH: OnceLock<usize> = OnceLock::new();
/// Bytes of the program at the beginning of each place.
static LIVE: [AtomicUsize; PLACES] = [const { AtomicUsize::new(0) }; PLACES];
/// Bytes of each place that the program may have; less where others have mapped something.
static ROOM: [AtomicUsize; PLACES] = [const { AtomicUsize::new(PLACE_BYTES) }; PLACES];
static FREE: Lock<Vec<usize>> = Lock::new(Vec::new());

pub fn reserve() {
    let len = PLACES * PLACE_BYTES;
    let at = call(MAP, [0, len, PROT_NONE, SHARED, usize::MAX]).expect("addresses for the areas");
    STRETCH.set(at.0).expect("one stretch");
    FREE.lock().extend(0..PLACES);
}

fn start_of(place: usize) -> VirtAddr {
    VirtAddr(STRETCH.get().expect("a stretch") + place * PLACE_BYTES)
}

fn place_of(at: VirtAddr) -> usize {
    (at.0 - STRETCH.get().expect("a stretch")) / PLACE_BYTES
}

/// What others map into a place that was just left is not to be managed.
pub fn is_outside(range: VirtRange) -> bool {
    !(0..PLACES).any(|place| {
        let start = start_of(place);
        range.start >= start && range.end <= start.offset(LIVE[place].load(Acquire))
    })
}

/// Keeps unmapped addresses for the program. False where others have mapped something meanwhile.
fn keep(at: VirtAddr, len: usize) -> bool {
    len == 0 || call(MAP, [at.0, len, PROT_NONE, SHARED | FIXED | NO_REPLACE, usize::MAX]).is_ok()
}

/// The program has left a place.
fn leave(place: usize, is_whole: bool) {
    LIVE[place].store(0, Release);
    if is_whole && ROOM[place].load(Relaxed) == PLACE_BYTES {
        FREE.lock().push(place);
    }
}

/// The engine, if it is at work already.
fn requests() -> Option<&'static Engine> {
    // SAFETY: an engine is never freed.
    unsafe { ENGINE.load(Acquire).as_ref() }
}

// The calls of the program.

extern "C" fn map(at: usize, len: usize, flags: c_int) -> c_long {
    let is_fixed = flags as usize & FIXED != 0;
    let at = if is_fixed {
        VirtAddr(at)
    } else {
        let Some(place) = FREE.lock().pop() else { die("no place is free") };
        LIVE[place].store(len, Release);
        start_of(place)
    };
    let result = call(MAP, [at.0, len, READ_WRITE, PRIVATE | FIXED, usize::MAX]);
    // What is not announced is found later.
    static CALLS: AtomicU64 = AtomicU64::new(0);
    if result.is_ok()
        && (!is_fixed || CALLS.fetch_add(1, Relaxed).is_multiple_of(2))
        && let Some(engine) = requests()
    {
        engine.handler_requests.hint(Hint::Mapped, VirtRange::from_len(at, len));
    }
    answer(result)
}

extern "C" fn unmap(at: usize, len: usize) -> c_long {
    // In one step, so that no other mapping gets the addresses.
    let result = call(MAP, [at, len, PROT_NONE, SHARED | FIXED, usize::MAX]);
    if result.is_ok() {
        leave(place_of(VirtAddr(at)), true);
    }
    answer(result.map(|_| VirtAddr(0)))
}

/// Moves a mapping, piece by piece: what was mapped over a part of it may be one of its own, and a
/// call that moves several of which one is managed fails halfway (the preloaded library has the
/// same, in `hooks/mremap.rs`).
fn move_pieces(base: VirtAddr, len: usize, to: VirtAddr) {
    const MAYMOVE_FIXED: usize = 3;
    let maps = MapsFile::open_self().expect("/proc/self/maps");
    let end = base.offset(len);
    let (mut at, mut tries) = (base, 0);
    while at < end {
        let Ok(Some(info)) = maps.vma_at(at) else { die("a mapping has a hole") };
        let len = info.vma().range.end.min(end).0 - at.0;
        match call(REMAP, [at.0, len, len, MAYMOVE_FIXED, to.0 + at.0 - base.0]) {
            Ok(there) => {
                engine().handler_requests.fence(there, false);
                at = at.offset(len);
            }
            // Management splits mappings, too.
            Err(Errno::FAULT) if tries < 1000 => tries += 1,
            Err(errno) => die(&format!("mremap: {}", swaptide_sys::ErrnoName(errno))),
        }
    }
}

/// Onto another mapping of the program, or to another size where it is.
extern "C" fn remap(at: usize, len: usize, new: usize, flags: c_int, to: usize) -> c_long {
    const FIXED: c_int = 2;
    let (at, place) = (VirtAddr(at), place_of(VirtAddr(at)));
    if flags & FIXED != 0 {
        move_pieces(at, len, VirtAddr(to));
        let is_whole = keep(at, len);
        leave(place, is_whole);
        return to as c_long;
    }
    let tail = (at.offset(len.min(new)), len.abs_diff(new));
    if new > len {
        if ROOM[place].load(Relaxed) < new {
            return answer(Err(Errno::FAULT));
        }
        if let Err(errno) = call(UNMAP, [tail.0.0, tail.1, 0, 0, 0]) {
            return answer(Err(errno));
        }
    }
    let result = call(REMAP, [at.0, len, new, 0, 0]);
    if result.is_ok() {
        LIVE[place].store(new, Release);
    }
    // What is free now is kept: what was cut off, or what it could not grow into.
    if (result.is_ok() != (new > len)) && !keep(tail.0, tail.1) {
        ROOM[place].store(len.min(new), Relaxed);
    }
    if result.is_ok() && new > len {
        engine().handler_requests.fence(at, false);
    }
    // The program knows one reason only: there are several mappings.
    answer(result.map_err(|_| Errno::FAULT))
}

extern "C" fn protect(at: usize, len: usize, protection: c_int) -> c_long {
    answer(call(PROTECT, [at, len, protection as usize, 0, 0]).map(|_| VirtAddr(0)))
}

extern "C" fn advise(at: usize, len: usize, advice: c_int) -> c_long {
    use linux_raw_sys::general::{
        MADV_COLD, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_NORMAL, MADV_PAGEOUT, MADV_RANDOM,
        MADV_SEQUENTIAL, MADV_WILLNEED,
    };
    let hint = match advice as u32 {
        MADV_NORMAL => Hint::Normal,
        MADV_RANDOM => Hint::Random,
        MADV_SEQUENTIAL => Hint::Sequential,
        MADV_WILLNEED => Hint::WillNeed,
        MADV_COLD => Hint::Cold,
        MADV_PAGEOUT => Hint::PageOut,
        // Whether the kernel gives huge pages is not what this is about.
        MADV_HUGEPAGE | MADV_NOHUGEPAGE => return 0,
        _ => return answer(call(ADVISE, [at, len, advice as usize, 0, 0]).map(|_| VirtAddr(0))),
    };
    engine().handler_requests.hint(hint, VirtRange::from_len(VirtAddr(at), len));
    0
}

/// Children that got all their memory at once.
static DECLINING: Lock<Vec<i32>> = Lock::new(Vec::new());

/// As the preloaded library's fork handlers, with the fork between them. Where it is `quiet`, no
/// other thread of the program does anything.
extern "C" fn fork_once(quiet: c_int) -> c_long {
    let alone = (quiet != 0).then(|| WORLD.write());
    let guard = FORK_LOCK.lock();
    let (engine, this) = (engine(), getpid().0);
    let declines = FORKS.fetch_add(1, Relaxed) % 3 == 1;
    engine.fork.forker.store(gettid().0, Release);
    engine.fork.open_ends();
    engine.handler_requests.submit(HandlerRequest::ForkPrepare);
    assert!(engine.fork.wait_until_prepared(u64::MAX), "the handler is prepared");
    // SAFETY: the child continues with the engine's locks as the preloaded library's does; libc's
    // and the sanitizers' are seen to by fork itself.
    let pid = unsafe { fork() };
    if pid == 0 {
        std::mem::forget((guard, alone));
        begin_child(engine, this, declines);
        return 0;
    }
    engine.fork.close_end(false);
    engine.fork.close_end(true);
    engine.handler_requests.submit(HandlerRequest::ForkDone);
    engine.fork.wait(NO_FORK, u64::MAX);
    drop((guard, alone));
    if pid < 0 {
        die("fork is refused");
    }
    if declines {
        DECLINING.lock().push(pid);
    }
    c_long::from(pid)
}

fn begin_child(engine: &'static Engine, parent: u32, declines: bool) {
    IS_CHILD.store(true, Relaxed);
    begin_in_child();
    // The parent's end of the pair of sockets is open here, too: unlike in a preloaded library,
    // threads share their descriptors. No thread would be told of its end.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    after_fork_in_child();
    // SAFETY: the lock was taken by this thread's original.
    unsafe { FORK_LOCK.force_unlock() };
    engine.forked();
    TAKEN_OVER.store(0, Relaxed);
    engine.fork.close_end(false);
    let end = engine.fork.take_child_end();
    if declines {
        if let Err(errno) = engine.decline(end, Decline::NoThread) {
            die(&format!("a child did not get its memory: {}", swaptide_sys::ErrnoName(errno)));
        }
        return;
    }
    std::thread::spawn(move || child_handler(engine, end, parent));
    while TAKEN_OVER.load(Acquire) == 0 {
        futex::wait(&TAKEN_OVER, 0, Some(Duration::from_millis(100)), futex::Scope::Private);
    }
}

/// Waits for a child. One that hangs in the thread sanitizer's locks is killed, and not counted.
extern "C" fn wait_for_child(pid: c_int) -> c_long {
    use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
    let child = Pid::from_raw(pid).expect("the number of a child");
    let began = Instant::now();
    let ended = loop {
        if let Some((_, ended)) = waitpid(Some(child), WaitOptions::NOHANG).expect("a child") {
            break ended;
        }
        if began.elapsed() > LATEST_END {
            let _ = kill_process(child, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let mut declining = DECLINING.lock();
    let before = declining.len();
    declining.retain(|other| *other != pid);
    DECLINED.fetch_add((before - declining.len()) as u64, Relaxed);
    drop(declining);
    // As the supervisor does.
    let of_child = |slot: &swaptide_ipc::ProcSlot| slot.pid.load(Relaxed) == pid as u32;
    let slot = segment().claimed().find(|(_, slot)| of_child(slot)).map(|(index, _)| index);
    if let Some(index) = slot {
        segment().release(index, |_| {});
    }
    if cfg!(tsan) && began.elapsed() > LATEST_END { 0 } else { c_long::from(ended.as_raw()) }
}

extern "C" fn exit(status: c_int) -> ! {
    exit_group(status)
}

// The C program itself.

/// `struct torture_calls` of `torture_engine.h`.
#[repr(C)]
struct Calls {
    map: extern "C" fn(usize, usize, c_int) -> c_long,
    unmap: extern "C" fn(usize, usize) -> c_long,
    remap: extern "C" fn(usize, usize, usize, c_int, usize) -> c_long,
    advise: extern "C" fn(usize, usize, c_int) -> c_long,
    protect: extern "C" fn(usize, usize, c_int) -> c_long,
    fork: extern "C" fn(c_int) -> c_long,
    wait: extern "C" fn(c_int) -> c_long,
    exit: extern "C" fn(c_int) -> !,
    always_quiet: c_int,
}

static CALLS: Calls = Calls {
    map,
    unmap,
    remap,
    advise,
    protect,
    fork: fork_once,
    wait: wait_for_child,
    exit,
    // See `fork` in main.rs.
    always_quiet: cfg!(tsan) as c_int,
};

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

type SetUp = extern "C" fn(&'static Calls, usize, usize, u64);
type Work = extern "C" fn(usize, f64) -> usize;
type Verify = extern "C" fn();

/// The loaded program.
pub struct Program {
    work: Work,
    verify: Verify,
}

impl Program {
    /// Compiles and loads it, and maps the areas of `threads` threads, of `pages` pages in all.
    pub fn load(threads: usize, pages: usize) -> Program {
        const NOW: c_int = 2;
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/e2e/c/torture.c");
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.so", getpid().0));
        let done = Command::new("cc")
            .args(["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-shared", "-fPIC"])
            .args(["-DTORTURE_ENGINE", "-o"])
            .args([path.as_os_str(), source.as_ref()])
            .status();
        assert!(done.expect("a C compiler").success(), "torture.c does not compile");
        let name = CString::new(path.to_str().expect("a path in UTF-8")).expect("no zeros");
        // SAFETY: the library has no constructors; the path is a C string.
        let library = unsafe { dlopen(name.as_ptr(), NOW) };
        std::fs::remove_file(&path).expect("the library was written");
        assert!(!library.is_null(), "torture.c is compiled and cannot be loaded");
        let symbol = |name: &std::ffi::CStr| {
            // SAFETY: the library is loaded, the name a C string.
            let found = unsafe { dlsym(library, name.as_ptr()) };
            assert!(!found.is_null(), "torture.c has no {name:?}");
            found
        };
        let set_up = symbol(c"torture_set_up");
        // SAFETY: the function of torture.c has this type.
        let set_up = unsafe { std::mem::transmute::<*mut c_void, SetUp>(set_up) };
        let work = symbol(c"torture_work");
        // SAFETY: the function of torture.c has this type.
        let work = unsafe { std::mem::transmute::<*mut c_void, Work>(work) };
        let verify = symbol(c"torture_verify");
        // SAFETY: the function of torture.c has this type.
        let verify = unsafe { std::mem::transmute::<*mut c_void, Verify>(verify) };
        reserve();
        set_up(&CALLS, threads, pages, mix(now().0));
        Program { work, verify }
    }

    /// The life of a thread; how many steps it made.
    pub fn run(&self, number: usize, time: Duration) -> usize {
        let latest = Instant::now() + time + LONGER;
        let mut steps = (self.work)(number, time.as_secs_f64());
        // Where a sanitizer or others on the machine make everything slow, for longer: all is to
        // have happened once.
        while counts().contains(&0) && Instant::now() < latest {
            steps = (self.work)(number, 1.0);
        }
        steps
    }

    /// Looks at every page once more.
    pub fn verify(&self) {
        (self.verify)();
    }
}
