//! The engine as a library of this process, under a program that does to its memory what programs do, by several threads at once: for whoever wants to
//! see into it with tools that a preloaded library keeps out, the address and thread sanitizers above all (`tests/sanitize`). The program is
//! `tests/programs/c/torture.c` over again; what the preloaded library does for it there (hints, fences, forks) it does here by itself.
//!
//! Everything else of this process is as it would be without the engine: its threads are ordinary ones, and nothing is managed but the program's areas, in a stretch of
//! addresses that is kept for them. So what belongs to a sanitizer (its shadow, its allocator) is never taken out. What the process takes beside
//! them is not known before: a thread that stands for the supervisor sets the limit to that and a little more, again and again.
//!
//! A page holds what its key says, but for one word that may have been written since. A key is never used twice.
//!
//! `SWAPTIDE_STRESS_SECONDS`: how long (3).

#[path = "../../swaptide-sys/tests/common/mod.rs"]
mod common;

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::AsFd;
use std::ptr;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{OnceLock, RwLock};
use std::time::{Duration, Instant};

use swaptide_engine::bell::{Hint, Ring};
use swaptide_engine::fork::{Decline, NONE, PREPARED};
use swaptide_engine::handler::Handler;
use swaptide_engine::reclaim::Worker;
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

/// Threads of the program, the areas of each, and the places that those may lie in.
const THREADS: usize = 3;
const AREAS: usize = 2;
const PLACES: usize = 4;
/// Pages of an area at most, and of a place: places are further apart than areas are long.
const MOST: usize = 512;
const PLACE_PAGES: usize = 1024;
/// What of the areas may be in memory: less than half.
const LEAST_ROOM: u64 = 1 << 20;
const MOST_ROOM: u64 = 5 << 20;
/// Compressed memory takes no more, so that there is always something to write back.
const POOL_CAP: u64 = 512 << 10;
/// The swap file, in extents of 2 MiB.
const EXTENTS: u32 = 128;
const WORDS: usize = PAGE_SIZE / 8;
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

/// Held by whoever does something; for writing by who forks while nobody else does anything.
static WORLD: RwLock<()> = RwLock::new(());

unsafe extern "C" {
    // Libc's: the address sanitizer has its part in it.
    #[cfg(not(tsan))]
    fn fork() -> i32;
    // The thread sanitizer's fork keeps all locks of its own until the kernel has made the child, which it has when the handler has read that it does; and
    // the handler, whose code asks for those locks too, would never come to that. So it is not to know of the fork. What its locks are in the child
    // is how they were left by those that are not there any more: everybody else is at rest then, and a child that finds one held is let down (see `fork_once`).
    #[cfg(tsan)]
    #[link_name = "_Fork"]
    fn fork() -> i32;
    // The thread sanitizer's: what the calling thread reads and writes from now on is not looked at.
    #[cfg(tsan)]
    fn AnnotateIgnoreReadsBegin(file: *const std::ffi::c_char, line: i32);
    #[cfg(tsan)]
    fn AnnotateIgnoreWritesBegin(file: *const std::ffi::c_char, line: i32);
}

/// Set in a forked child.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// Called by every thread of a forked child. The parent's threads are not there, and what the thread sanitizer remembers of them was ordered before the fork by
/// nothing that it has seen: the handler may have held the memory lock at that moment, and never gives it back there.
fn begin_in_child() {
    #[cfg(tsan)]
    if IS_CHILD.load(Relaxed) {
        // SAFETY: the strings are only for those who look for forgotten calls, and these threads end with the process.
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

fn open_area(_: AreaId) -> Option<OwnedFd> {
    SWAP_FILE.get()?.try_clone().ok().map(OwnedFd::from)
}

/// Where the areas are: what somebody else maps into a place that one has just left is not to be managed.
static LIVE: [(AtomicUsize, AtomicUsize); THREADS * AREAS] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; THREADS * AREAS];

fn is_outside(range: VirtRange) -> bool {
    !LIVE.iter().any(|(start, end)| range.start.0 >= start.load(Acquire) && range.end.0 <= end.load(Acquire))
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
            Worker::new(engine.scheme).run(engine, index as usize);
        });
    }
    engine.workers.store(WORKERS, Release);
    engine.slot().engine_threads.store(WORKERS + 1, Relaxed);
}

/// As the preloaded library does it.
fn serve(engine: &Engine, handler: &mut Handler) {
    loop {
        handler.run();
        let Some(_quiet) = FORK_LOCK.try_lock() else { continue };
        if handler.let_go() {
            engine.slot().set_state(ProcState::Detached);
            return;
        }
    }
}

/// The supervisor, as far as there is one: the limit follows what the process takes beside its managed memory.
fn supervise(engine: &Engine, world: &RwLock<()>) {
    begin_in_child();
    let mut random = Random(now().0);
    let mut room = MOST_ROOM;
    while !OVER.load(Acquire) {
        let among = world.read();
        let slot = engine.slot();
        let kept = [&slot.managed_bytes, &slot.staging_bytes, &slot.pool_bytes].iter().map(|bytes| bytes.load(Relaxed)).sum();
        if random.below(20) == 0 {
            room = LEAST_ROOM + random.below((MOST_ROOM - LEAST_ROOM) as usize) as u64;
        }
        if let Some(anon) = anon_rss(getpid().0) {
            slot.limit_bytes.store(anon.saturating_sub(kept) + room, Relaxed);
        }
        engine.look_after_threads();
        drop(among);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Lets the forking thread of a child go on.
fn is_served() {
    TAKEN_OVER.store(1, Release);
    futex::wake(&TAKEN_OVER, 1, futex::Scope::Private);
}

/// The handler of a forked child.
fn heir(engine: &'static Engine, end: Option<Conn>, parent: u32) {
    begin_in_child();
    let index = segment().claim(getpid().0, parent).unwrap_or_else(|| die("no slot is free"));
    let slot = segment().slot(index);
    slot.limit_bytes.store(engine.charge.limit(), Relaxed);
    slot.wanted.store(1, Relaxed);
    let mut left = match engine.inherit(end, index) {
        Ok(Some(left)) => left,
        // Its copy of the engine is torn, or was not to be had: all memory is there.
        Ok(None) => return is_served(),
        Err(errno) => die(&format!("nothing was handed over: {}", swaptide_sys::Why(errno))),
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

// The program.

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// What a page of a key holds: zeros, one word repeated, noise, something that compresses.
fn word_of(key: u64, at: usize) -> u64 {
    match key % 4 {
        _ if key == 0 => 0,
        0 => key,
        1 => mix(key.wrapping_add(at as u64)),
        _ => key ^ (at as u64 / 16),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Held,
    /// After `MADV_FREE`: the old content or zeros, until it is written again.
    Lazy,
}

#[derive(Clone, Copy)]
struct Page {
    key: u64,
    word: u64,
    /// [`WORDS`]: no word was changed.
    at: usize,
    state: State,
}

const EMPTY: Page = Page { key: 0, word: 0, at: WORDS, state: State::Held };

impl Page {
    fn expected(&self, at: usize) -> u64 {
        if at == self.at { self.word } else { word_of(self.key, at) }
    }
}

struct Area {
    base: VirtAddr,
    pages: Vec<Page>,
    place: usize,
    /// Readable and writable.
    open: bool,
}

struct Thread {
    areas: Vec<Area>,
    /// Where the places begin; `None`: somebody else may have something there by now.
    places: Vec<Option<VirtAddr>>,
    random: Random,
    number: u64,
    serial: u64,
    file: File,
    /// What was done last, to be told when something is wrong.
    acts: Vec<String>,
}

const MMAP: u32 = linux::MMAP;
const PROT_NONE: usize = 0;
const PROT_READ: usize = 1;
const READ_WRITE: usize = 3;
const PRIVATE: usize = 0x4022;
const SHARED: usize = 0x4021;
const FIXED: usize = 0x10;
const NO_REPLACE: usize = 0x10_0000;

/// The numbers of system calls.
#[cfg(target_arch = "x86_64")]
mod linux {
    pub const MMAP: u32 = 9;
    pub const MPROTECT: u32 = 10;
    pub const MUNMAP: u32 = 11;
    pub const MREMAP: u32 = 25;
    pub const MADVISE: u32 = 28;
}
#[cfg(target_arch = "aarch64")]
mod linux {
    pub const MMAP: u32 = 222;
    pub const MPROTECT: u32 = 226;
    pub const MUNMAP: u32 = 215;
    pub const MREMAP: u32 = 216;
    pub const MADVISE: u32 = 233;
}

/// A call that changes mappings of the areas, past libc: the sanitizers need not know of it.
fn call(number: u32, a: [usize; 5]) -> Result<VirtAddr, Errno> {
    // SAFETY: every range passed lies in addresses that nobody has but the program.
    check(unsafe { syscall6(number, [a[0], a[1], a[2], a[3], a[4], 0]) }).map(VirtAddr)
}

fn must(number: u32, a: [usize; 5]) {
    if let Err(errno) = call(number, a) {
        die(&format!("system call {number} of {a:x?}: {}", swaptide_sys::Why(errno)));
    }
}

/// Keeps addresses for the program without being memory of its. False when somebody else was faster.
fn keep(at: VirtAddr, pages: usize) -> bool {
    pages == 0 || call(MMAP, [at.0, pages * PAGE_SIZE, PROT_NONE, SHARED | NO_REPLACE, usize::MAX]).is_ok()
}

fn map_anew(at: VirtAddr, pages: usize) {
    must(MMAP, [at.0, pages * PAGE_SIZE, READ_WRITE, PRIVATE | FIXED, usize::MAX]);
}

/// Moves an area, mapping by mapping: what was mapped over a part of it may be one of its own, and a call that moves several of which one is managed fails
/// halfway (the preloaded library has the same, in `moves.rs`).
fn move_pieces(base: VirtAddr, pages: usize, to: VirtAddr) {
    const MAYMOVE_FIXED: usize = 3;
    let maps = MapsFile::open_self().expect("/proc/self/maps");
    let end = base.offset(pages * PAGE_SIZE);
    let (mut at, mut tries) = (base, 0);
    while at < end {
        let Ok(Some(info)) = maps.vma_at(at) else { die("an area has a hole") };
        let len = info.vma().range.end.min(end).0 - at.0;
        match call(linux::MREMAP, [at.0, len, len, MAYMOVE_FIXED, to.0 + at.0 - base.0]) {
            Ok(there) => {
                engine().bells.fence(there);
                at = at.offset(len);
            }
            // Management splits mappings, too.
            Err(Errno::FAULT) if tries < 1000 => tries += 1,
            Err(errno) => die(&format!("mremap: {}", swaptide_sys::Why(errno))),
        }
    }
}

impl Area {
    fn at(&self, page: usize) -> VirtAddr {
        self.base.offset(page * PAGE_SIZE)
    }

    fn range(&self, from: usize, count: usize) -> VirtRange {
        VirtRange::from_len(self.at(from), count * PAGE_SIZE)
    }

    fn bytes(&self, from: usize, count: usize) -> &'static mut [u8] {
        // SAFETY: pages of an area, which are the calling thread's own, and mapped while it uses this.
        unsafe { std::slice::from_raw_parts_mut(self.at(from).as_ptr(), count * PAGE_SIZE) }
    }

    fn read(&self, page: usize, at: usize) -> u64 {
        // SAFETY: a word of a page of the area.
        unsafe { self.at(page).as_ptr::<u64>().add(at).read_volatile() }
    }

    fn write(&self, page: usize, at: usize, word: u64) {
        // SAFETY: a word of a page of the area, which belongs to the calling thread.
        unsafe { self.at(page).as_ptr::<u64>().add(at).write_volatile(word) }
    }

    fn emptied(&mut self, from: usize, count: usize) {
        self.pages[from..from + count].fill(EMPTY);
    }
}

impl Thread {
    /// Says where an area is, or will be in a moment.
    fn is_live(&self, area: usize) {
        let range = self.areas[area].range(0, self.areas[area].pages.len());
        let (start, end) = &LIVE[(self.number as usize - 1) * AREAS + area];
        // Never one half of the old and one of the new.
        end.store(0, Release);
        start.store(range.start.0, Release);
        end.store(range.end.0, Release);
    }

    fn note(&mut self, area: usize, what: &str, from: usize, count: usize) {
        if self.acts.len() == 64 {
            self.acts.remove(0);
        }
        self.acts.push(format!("area {area} at {:x}: {what}, {count} pages from {from}", self.areas[area].base.0));
    }

    fn wrong(&self, area: usize, page: usize, at: usize, found: u64, what: &str) -> ! {
        let expected = self.areas[area].pages[page].expected(at);
        let again = self.areas[area].read(page, at);
        die(&format!(
            "{what}: thread {}, area {area}, page {page}, word {at}: expected {expected:016x}, found {found:016x} and then {again:016x}\n{}",
            self.number,
            self.acts.join("\n")
        ))
    }

    fn verify(&self, area: usize, from: usize, count: usize, what: &str) {
        let it = &self.areas[area];
        for number in from..from + count {
            let page = &it.pages[number];
            for at in 0..WORDS {
                let found = it.read(number, at);
                // What MADV_FREE was said of may become empty at any moment, and stays so.
                let lazy = page.state == State::Lazy && found == 0;
                if !lazy && found != page.expected(at) {
                    self.wrong(area, number, at, found, what);
                }
                if lazy && page.expected(at) != 0 {
                    if let Some(at) = (0..WORDS).find(|at| it.read(number, *at) != 0) {
                        self.wrong(area, number, at, it.read(number, at), "page after MADV_FREE");
                    }
                    break;
                }
            }
        }
    }

    fn key(&mut self) -> u64 {
        self.serial += 1;
        mix(self.number << 48 | self.serial)
    }

    fn write_page(&mut self, area: usize, page: usize) {
        let key = if self.random.below(16) == 0 { 0 } else { self.key() };
        let it = &mut self.areas[area];
        it.pages[page] = Page { key, ..EMPTY };
        (0..WORDS).for_each(|at| it.write(page, at, word_of(key, at)));
    }

    /// One word of a page. After `MADV_FREE` the page is written as a whole: a write keeps what is there.
    fn write_word(&mut self, area: usize, page: usize) {
        let is = self.areas[area].pages[page];
        if is.state == State::Lazy || is.at != WORDS {
            return self.write_page(area, page);
        }
        let (at, word) = (self.random.below(WORDS), self.key());
        let it = &mut self.areas[area];
        (it.pages[page].at, it.pages[page].word) = (at, word);
        it.write(page, at, word);
    }

    /// A run of pages: most are short, some are all of the area.
    fn some_run(&mut self, area: usize, most: usize) -> (usize, usize) {
        let pages = self.areas[area].pages.len();
        let longest = 1 << self.random.below(10);
        let count = (1 + self.random.below(longest)).min(most).min(pages);
        let from = self.random.below(pages - count + 1);
        (if self.random.below(3) == 0 && count >= 16 { from & !15 } else { from }, count)
    }

    fn open(&mut self, area: usize) {
        let it = &mut self.areas[area];
        if !std::mem::replace(&mut it.open, true) {
            must(linux::MPROTECT, [it.base.0, it.pages.len() * PAGE_SIZE, READ_WRITE, 0, 0]);
        }
    }

    fn advise(&mut self, area: usize) {
        const DONTNEED: usize = 4;
        const FREE: usize = 8;
        const POPULATE_READ: usize = 22;
        const POPULATE_WRITE: usize = 23;
        let (from, count) = self.some_run(area, MOST);
        let range = self.areas[area].range(from, count);
        let hint = |hint| engine().bells.hint(hint, range);
        let advise = |advice| call(linux::MADVISE, [range.start.0, range.len(), advice, 0, 0]).is_ok();
        match self.random.below(16) {
            0..4 => {
                self.note(area, "MADV_DONTNEED", from, count);
                assert!(advise(DONTNEED));
                self.areas[area].emptied(from, count);
            }
            4..7 => {
                self.note(area, "MADV_FREE", from, count);
                assert!(advise(FREE));
                self.areas[area].pages[from..from + count].iter_mut().for_each(|page| page.state = State::Lazy);
            }
            7 => hint(Hint::WillNeed),
            8 => hint(Hint::Cold),
            9..11 => hint(Hint::PageOut),
            11 => hint(Hint::Sequential),
            12 => hint(Hint::Random),
            13 => hint(Hint::Normal),
            // Refused where the kernel finds no memory: it changes nothing.
            14 => _ = advise(POPULATE_READ),
            _ => _ = advise(POPULATE_WRITE),
        }
    }

    /// To another place, over a mapping that has something in it.
    fn go_elsewhere(&mut self, area: usize) {
        let (base, pages) = (self.areas[area].base, self.areas[area].pages.len());
        let is_free = |place: &usize| self.areas.iter().all(|area| area.place != *place);
        let Some((place, to)) = (0..PLACES).filter(is_free).find_map(|place| Some((place, self.places[place]?))) else { return };
        if self.random.below(2) == 0 {
            map_anew(to, pages);
            // SAFETY: pages that were mapped just now.
            (0..pages).step_by(7).for_each(|page| unsafe { to.offset(page * PAGE_SIZE).as_ptr::<u8>().write_volatile(0xee) });
        }
        self.note(area, "mremap elsewhere", 0, pages);
        let from = std::mem::replace(&mut self.areas[area].place, place);
        self.areas[area].base = to;
        self.is_live(area);
        move_pieces(base, pages, to);
        if !keep(base, pages) {
            self.places[from] = None;
        }
    }

    /// To another size.
    fn resize(&mut self, area: usize) {
        let (base, old, place) = (self.areas[area].base, self.areas[area].pages.len(), self.areas[area].place);
        let new = MOST / 4 + self.random.below(MOST - MOST / 4);
        let grows = new > old;
        if grows && self.places[place].is_none() {
            return;
        }
        self.note(area, "mremap to another size", 0, new);
        let tail = (base.offset(old.min(new) * PAGE_SIZE), old.abs_diff(new));
        if grows {
            must(linux::MUNMAP, [tail.0.0, tail.1 * PAGE_SIZE, 0, 0, 0]);
        }
        let is_done = call(linux::MREMAP, [base.0, old * PAGE_SIZE, new * PAGE_SIZE, 0, 0]).is_ok();
        if is_done {
            self.areas[area].pages.resize(new, EMPTY);
            self.is_live(area);
        }
        // What is free now is kept: what was cut off, or what it could not grow into.
        if is_done != grows && !keep(tail.0, tail.1) {
            self.places[place] = None;
        }
        if is_done && grows {
            engine().bells.fence(base);
        }
    }

    fn protect(&mut self, area: usize) {
        let (from, count) = self.some_run(area, MOST);
        let range = self.areas[area].range(from, count);
        let none = self.random.below(2) == 0;
        self.note(area, if none { "PROT_NONE" } else { "PROT_READ" }, from, count);
        must(linux::MPROTECT, [range.start.0, range.len(), if none { PROT_NONE } else { PROT_READ }, 0, 0]);
        if !none {
            self.verify(area, from, count.min(16), "page that is read only");
        }
        self.areas[area].open = false;
        // Sometimes only after other things have happened.
        if self.random.below(2) == 0 {
            self.open(area);
        }
    }

    /// The kernel reads pages and writes them.
    fn by_calls(&mut self, area: usize) {
        let other = self.random.below(AREAS);
        self.open(other);
        let (from, count) = self.some_run(area, 32);
        let to = self.random.below(self.areas[other].pages.len() - count + 1);
        if area == other && from < to + count && to < from + count {
            return;
        }
        for page in from..from + count {
            if self.areas[area].pages[page].state == State::Lazy {
                self.write_page(area, page);
            }
        }
        let (source, target) = (self.areas[area].bytes(from, count), self.areas[other].bytes(to, count));
        if self.random.below(2) == 0 {
            assert_eq!(rustix::io::pwrite(&self.file, source, 0), Ok(source.len()));
            assert_eq!(rustix::io::pread(&self.file, &mut *target, 0), Ok(target.len()));
        } else {
            let (out, into) = rustix::pipe::pipe().expect("a pipe");
            for (source, target) in source.chunks(PAGE_SIZE).zip(target.chunks_mut(PAGE_SIZE)) {
                assert_eq!(rustix::io::writev(&into, &[IoSlice::new(source)]), Ok(PAGE_SIZE));
                let (first, second) = target.split_at_mut(1000);
                assert_eq!(rustix::io::readv(&out, &mut [IoSliceMut::new(first), IoSliceMut::new(second)]), Ok(PAGE_SIZE));
            }
        }
        self.note(area, "copied from", from, count);
        self.note(other, "copied to", to, count);
        let copied = self.areas[area].pages[from..from + count].to_vec();
        self.areas[other].pages[to..to + count].copy_from_slice(&copied);
        self.verify(other, to, count, "page copied by the kernel");
    }

    /// As the preloaded library's fork handlers, with the fork between them.
    fn fork_once(&mut self) {
        let is_alone = cfg!(tsan) || self.random.below(2) == 0;
        let alone = is_alone.then(|| WORLD.write());
        let among = (!is_alone).then(|| WORLD.read());
        let guard = FORK_LOCK.lock();
        let (engine, this) = (engine(), getpid().0);
        (0..AREAS).for_each(|area| self.note(area, "fork", 0, self.areas[area].pages.len()));
        let declines = FORKS.fetch_add(1, Relaxed) % 3 == 1;
        engine.fork.forker.store(gettid().0, Release);
        engine.fork.open_ends();
        engine.bells.ring(Ring::ForkPrepare);
        engine.fork.wait(PREPARED);
        // SAFETY: the child goes on with the engine's locks as the preloaded library's does; libc's and the sanitizers' are seen to by fork itself.
        let pid = unsafe { fork() };
        if pid == 0 {
            std::mem::forget((guard, alone, among));
            self.child(engine, this, declines);
        }
        engine.fork.close_end(false);
        engine.fork.close_end(true);
        engine.bells.ring(Ring::ForkDone);
        engine.fork.wait(NONE);
        drop((guard, alone));
        let Some(child) = rustix::process::Pid::from_raw(pid) else { die("fork is refused") };
        // The child writes to its copies, this thread to its own.
        self.open(0);
        for _ in 0..32 {
            let page = self.random.below(self.areas[0].pages.len());
            self.write_word(0, page);
        }
        drop(among);
        let began = Instant::now();
        let ended = loop {
            if let Some((_, ended)) =
                rustix::process::waitpid(Some(child), rustix::process::WaitOptions::NOHANG).expect("a child")
            {
                break ended;
            }
            if began.elapsed() > LATEST_END {
                let _ = rustix::process::kill_process(child, rustix::process::Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let is_let_down = cfg!(tsan) && began.elapsed() > LATEST_END;
        if ended.exit_status() != Some(0) && !is_let_down {
            die(&format!("a child ended with {ended:?}"));
        }
        DECLINED.fetch_add(declines.into(), Relaxed);
        // As the supervisor does.
        let slot = segment().claimed().find(|(_, slot)| slot.pid.load(Relaxed) == pid as u32).map(|(index, _)| index);
        if let Some(index) = slot {
            segment().release(index, |_| {});
        }
    }

    fn child(&mut self, engine: &'static Engine, parent: u32, declines: bool) -> ! {
        IS_CHILD.store(true, Relaxed);
        begin_in_child();
        // The parent's end of the pair of sockets is open here, too: unlike in a preloaded library, threads share their descriptors. Nobody would hear of its end.
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
                die(&format!("a child did not get its memory: {}", swaptide_sys::Why(errno)));
            }
        } else {
            std::thread::spawn(move || heir(engine, end, parent));
            while TAKEN_OVER.load(Acquire) == 0 {
                futex::wait(&TAKEN_OVER, 0, Some(Duration::from_millis(100)), futex::Scope::Private);
            }
        }
        for area in 0..AREAS {
            self.open(area);
            let pages = self.areas[area].pages.len();
            let half = self.random.below(pages);
            self.verify(area, half, pages - half, "page in a forked child");
            for _ in 0..32 {
                let (from, count) = self.some_run(area, 8);
                (from..from + count).for_each(|page| self.write_page(area, page));
            }
            self.verify(area, 0, pages, "page in a forked child, later");
        }
        exit_group(0)
    }

    fn step(&mut self) {
        let area = self.random.below(AREAS);
        self.open(area);
        let pages = self.areas[area].pages.len();
        match self.random.below(1000) {
            0..200 => {
                let (from, count) = self.some_run(area, MOST);
                self.note(area, "written", from, count);
                (from..from + count).for_each(|page| self.write_page(area, page));
            }
            200..350 => {
                self.note(area, "words written", 0, pages);
                for _ in 0..32 {
                    let page = self.random.below(pages);
                    self.write_word(area, page);
                }
            }
            350..500 => {
                for _ in 0..32 {
                    let page = self.random.below(pages);
                    self.verify(area, page, 1, "page touched at random");
                }
            }
            500..650 => {
                let (from, count) = self.some_run(area, MOST);
                self.verify(area, from, count, "page of a scan");
            }
            650..780 => self.advise(area),
            780..805 => self.go_elsewhere(area),
            805..830 => self.resize(area),
            830..860 => {
                let (from, count) = self.some_run(area, MOST);
                self.note(area, "mmap over it", from, count);
                map_anew(self.areas[area].at(from), count);
                self.areas[area].emptied(from, count);
                if self.random.below(2) == 0 {
                    engine().bells.hint(Hint::Mapped, self.areas[area].range(from, count));
                }
            }
            860..900 => self.protect(area),
            900..960 => self.by_calls(area),
            _ => {
                self.note(area, "every fourth page written", 0, pages);
                let first = self.random.below(4);
                (first..pages).step_by(4).for_each(|page| self.write_word(area, page));
            }
        }
    }

    fn verify_all(&mut self, what: &str) {
        for area in 0..AREAS {
            self.open(area);
            self.verify(area, 0, self.areas[area].pages.len(), what);
        }
    }

    /// The life of a thread; how many steps it made.
    fn run(&mut self, end: Instant) -> u64 {
        let mut steps = 0;
        for area in 0..AREAS {
            self.is_live(area);
            (0..self.areas[area].pages.len()).for_each(|page| self.write_page(area, page));
        }
        // Where a sanitizer or others on the machine make everything slow, for longer: all is to have happened once.
        while Instant::now() < end || counts().contains(&0) && Instant::now() < end + LONGER {
            if self.random.below(50) == 0 {
                self.fork_once();
            } else {
                let _among = WORLD.read();
                self.step();
            }
            steps += 1;
        }
        self.verify_all("page at the end");
        steps
    }
}

/// Pages out, in from memory, written back, in from the file; forks, and those whose child got all its memory at once.
fn counts() -> [u64; 6] {
    let count = |counter: Counter| engine().slot().counters[counter as usize].load(Relaxed);
    let [out, pool, back, file, forks] =
        [Counter::Pgsteal, Counter::Zswpin, Counter::Zswpwb, Counter::Pswpin, Counter::Forks].map(count);
    [out, pool, back, file, forks, DECLINED.load(Relaxed)]
}

fn seconds() -> f64 {
    std::env::var("SWAPTIDE_STRESS_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3.0)
}

fn temporary_file() -> File {
    use rustix::fs::{Mode, OFlags, open};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    File::from(open(std::env::temp_dir(), flags, Mode::RUSR | Mode::WUSR).expect("a temporary file"))
}

/// The supervisor's part of a run: a segment with one swap file; and a program that has mapped its areas.
fn set_up() -> (Start, Vec<Thread>) {
    let fd = memfd_create(c"torture", Segment::BYTES as u64).expect("memfd");
    let segment = Segment::raw(SharedMap::map(fd.as_fd(), Segment::BYTES).expect("map")).expect("segment");
    segment.header.pool_percent.store(75, Relaxed);
    segment.header.pool_cap_bytes.store(POOL_CAP, Relaxed);
    segment.header.key.iter().enumerate().for_each(|(i, word)| word.store(mix(now().0 + i as u64), Relaxed));
    let file = temporary_file();
    file.set_len(u64::from(EXTENTS) << 21).expect("room for the swap file");
    SWAP_FILE.set(file).expect("one run");
    segment.add_area(NewArea::of_file(0, EXTENTS)).expect("an area");
    assert!(SEGMENT.set(segment).is_ok());
    let index = segment.claim(getpid().0, 0).expect("a slot");
    segment.slot(index).limit_bytes.store(anon_rss(getpid().0).expect("statm") + MOST_ROOM, Relaxed);

    let pages = THREADS * PLACES * PLACE_PAGES;
    let at = call(MMAP, [0, pages * PAGE_SIZE, PROT_NONE, SHARED, usize::MAX]).expect("addresses for the areas");
    let thread = |number: usize| {
        let first = at.offset(number * PLACES * PLACE_PAGES * PAGE_SIZE);
        let places: Vec<_> = (0..PLACES).map(|place| first.offset(place * PLACE_PAGES * PAGE_SIZE)).collect();
        let area = |place: usize| {
            map_anew(places[place], MOST * 3 / 4);
            Area { base: places[place], pages: vec![EMPTY; MOST * 3 / 4], place, open: true }
        };
        Thread {
            areas: (0..AREAS).map(area).collect(),
            places: places.iter().copied().map(Some).collect(),
            random: Random(mix(now().0 + number as u64)),
            number: number as u64 + 1,
            serial: 0,
            file: temporary_file(),
            acts: Vec::new(),
        }
    };
    let threads = (0..THREADS).map(thread).collect();
    let start = Start {
        segment,
        index,
        open_area,
        salt: salt(),
        log: |line| eprintln!("{line}"),
        main_object: |_| false,
        excluded: is_outside,
        pinned: |_| false,
        spawn_reader: || false,
    };
    (start, threads)
}

#[test]
fn torture_reads_what_it_wrote() {
    common::in_child("torture_reads_what_it_wrote", || {
        let (start, mut threads) = set_up();
        let engine: &'static Engine = Box::leak(Box::new(Engine::new(start).expect("an engine")));
        ENGINE.store(ptr::from_ref(engine).cast_mut(), Release);
        let mut handler = Handler::new(engine).expect("a handler");
        handler.adopt();
        let slot = engine.slot();
        slot.set_state(ProcState::Engaged);
        let handler = std::thread::spawn(move || serve(engine, &mut handler));
        start_workers(engine);
        let supervisor = std::thread::spawn(move || supervise(engine, &WORLD));

        let end = Instant::now() + Duration::from_secs_f64(seconds());
        let steps: u64 = std::thread::scope(|scope| {
            let running: Vec<_> = threads.iter_mut().map(|thread| scope.spawn(move || thread.run(end))).collect();
            running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| die("a thread of the program panicked"))).sum()
        });

        OVER.store(true, Release);
        supervisor.join().expect("the supervisor ends");
        slot.limit_bytes.store(NO_LIMIT, Relaxed);
        slot.detach.store(1, Release);
        handler.join().expect("the program is let go");
        threads.iter_mut().for_each(|thread| thread.verify_all("page of a program that was let go"));
        println!("{steps} steps; out, in from memory, written back, in from the file, forks, declined: {:?}", counts());
        assert!(!counts().contains(&0), "{:?}", counts());
    });
}
