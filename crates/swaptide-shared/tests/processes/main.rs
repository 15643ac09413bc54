//! Several processes on shared regions, with contents that tell what they are: no write may be
//! lost, no page may be another's.
//!
//! Each case is a process of its own with a pager, under a watchdog, and starts workers by
//! executing this file again. A *worker* has a word of its own in every page: it knows what it
//! wrote last. The rest of a page follows from its number.
//!
//!     cargo test -p swaptide-shared --test processes [BEGINNING OF A NAME]
//!     SWAPTIDE_STRESS_SECONDS=60 cargo test -p swaptide-shared --test processes

mod direct;
mod endings;
mod unprivileged;

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use swaptide_ipc::Counter;
use swaptide_ipc::shared::{ADVICE_HOLD, ADVICE_REMOVE, AdviceOutcome, advise};
use swaptide_shared::handle::{HostView, Reach, Say, forked};
use swaptide_shared::{Host, SharedRegion};
use swaptide_sys::sock::Name;

use self::direct::{
    direct_io_holds, direct_io_holds_no_other_region, direct_io_without_a_first_thread_holds,
    open_direct,
};
use self::endings::{
    a_killed_pager, a_raw_clone, a_raw_clone_gives_up, a_raw_clone_reads_no_zeros,
    a_refused_process, a_stopped_process, more_is_wanted_than_the_limit, raw_clone, refused,
};
use self::unprivileged::{ordinary, without_any_right, without_capabilities};

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
const WORKERS: usize = 8;
const MIB: u64 = 1 << 20;
const CASE_TIMEOUT: Duration = Duration::from_secs(300);

const CASES: &[(&str, fn())] = &[
    ("one_process", one_process),
    ("hammer", hammer),
    ("fork_chains", fork_chains),
    ("forks_all_the_time", forks_all_the_time),
    ("random_kills", random_kills),
    ("mappings_change", mappings_change),
    ("to_the_file", to_the_file),
    ("advice", advice),
    ("the_last_one_frees", the_last_one_frees),
    ("regions_end_while_their_pages_leave", regions_end_while_their_pages_leave),
    ("direct_io_holds", direct_io_holds),
    ("direct_io_holds_no_other_region", direct_io_holds_no_other_region),
    ("direct_io_without_a_first_thread_holds", direct_io_without_a_first_thread_holds),
    ("a_killed_pager", a_killed_pager),
    ("a_raw_clone", a_raw_clone),
    ("a_raw_clone_gives_up", a_raw_clone_gives_up),
    ("a_raw_clone_reads_no_zeros", a_raw_clone_reads_no_zeros),
    ("a_stopped_process", a_stopped_process),
    ("a_refused_process", a_refused_process),
    ("more_is_wanted_than_the_limit", more_is_wanted_than_the_limit),
    ("without_capabilities", without_capabilities),
    ("without_any_right", without_any_right),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("case") => {
            let (_, body) = CASES.iter().find(|(name, _)| *name == arguments[1]).expect("a case");
            body();
            return ExitCode::SUCCESS;
        }
        Some("ordinary") => {
            ordinary();
            return ExitCode::SUCCESS;
        }
        Some("refused") => refused(&arguments[1]),
        Some("worker") => {
            worker(&arguments[1..]);
            return ExitCode::SUCCESS;
        }
        Some("host") => host(arguments[1].parse().expect("a limit"), arguments.get(2)),
        _ => {}
    }
    if arguments.iter().any(|argument| argument == "--list") {
        CASES.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let chosen: Vec<&String> =
        arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let mut failed = 0;
    for (name, _) in CASES.iter().filter(|(name, _)| {
        chosen.is_empty() || chosen.iter().any(|c| name.starts_with(c.as_str()))
    }) {
        let begin = Instant::now();
        let mut case = again(&["case", name]).process_group(0).spawn().expect("a process");
        let ended = wait(&mut case, CASE_TIMEOUT);
        // Whatever it started is in its group.
        // SAFETY: signals to a group that this process made.
        unsafe { libc::kill(-(case.id() as i32), libc::SIGKILL) };
        let ok = ended.is_some_and(|status| status.success());
        if ended.is_none() {
            let _ = case.wait();
        }
        println!(
            "test {name} ... {} ({:.1} s)",
            if ok { "ok" } else { "FAILED" },
            begin.elapsed().as_secs_f64()
        );
        if !ok {
            println!(
                "  {}",
                ended.map_or("it hung, and was killed".into(), |status| status.to_string())
            );
            failed += 1;
        }
    }
    ExitCode::from(u8::from(failed > 0))
}

fn again(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this file"));
    command.args(arguments);
    command
}

fn wait(child: &mut Child, timeout: Duration) -> Option<std::process::ExitStatus> {
    let begin = Instant::now();
    while begin.elapsed() < timeout {
        if let Some(status) = child.try_wait().expect("wait") {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

fn seconds() -> Duration {
    let text = std::env::var("SWAPTIDE_STRESS_SECONDS").ok();
    Duration::from_secs(text.and_then(|text| text.parse().ok()).unwrap_or(3))
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// What word `word` of page `page` holds, where it is no worker's.
fn constant(page: usize, word: usize) -> u64 {
    match page % 4 {
        // Hardly compresses.
        0 => Random((page * WORDS + word) as u64).next(),
        // To a half.
        1 | 2 => Random((page * WORDS + word / 2) as u64).next(),
        _ => (page as u64) << 32 | (word / 16) as u64,
    }
}

fn own(page: usize, worker: usize, seq: u64) -> u64 {
    (page as u64) << 40 | (worker as u64) << 36 | seq
}

/// Words of a region.
struct Words {
    at: *const AtomicU64,
    pages: usize,
}

impl Words {
    fn of(region: &SharedRegion) -> Words {
        Words { at: region.as_ptr().as_ptr().cast(), pages: region.len() / PAGE }
    }

    fn word(&self, page: usize, word: usize) -> &AtomicU64 {
        assert!(page < self.pages && word < WORDS);
        // SAFETY: within the mapping, which outlives every use in these tests, and all uses are
        // atomic.
        unsafe { &*self.at.add(page * WORDS + word) }
    }

    fn fill(&self) {
        for page in 0..self.pages {
            for word in WORKERS..WORDS {
                self.word(page, word).store(constant(page, word), SeqCst);
            }
            for worker in 0..WORKERS {
                self.word(page, worker).store(own(page, worker, 0), SeqCst);
            }
        }
    }

    /// All of a page but the workers' words.
    fn check(&self, page: usize) {
        for word in WORKERS..WORDS {
            let found = self.word(page, word).load(SeqCst);
            assert_eq!(found, constant(page, word), "page {page} word {word}: {found:#x}");
        }
    }

    fn check_all(&self) {
        (0..self.pages).for_each(|page| self.check(page));
    }
}

/// A worker's knowledge of its words.
struct Mine {
    worker: usize,
    seq: Vec<u64>,
    random: Random,
}

impl Mine {
    fn new(worker: usize, pages: usize, seed: u64) -> Mine {
        Mine { worker, seq: vec![0; pages], random: Random(seed) }
    }

    /// One random touch.
    fn step(&mut self, words: &Words) {
        let page = self.random.below(words.pages);
        let word = words.word(page, self.worker);
        let found = word.load(SeqCst);
        assert_eq!(
            found,
            own(page, self.worker, self.seq[page]),
            "worker {}: page {page} lost a write: {found:#x}",
            self.worker
        );
        match self.random.below(8) {
            0 => words.check(page),
            1 | 2 => {}
            _ => {
                self.seq[page] += 1;
                word.store(own(page, self.worker, self.seq[page]), SeqCst);
            }
        }
    }

    fn check_all(&self, words: &Words) {
        for page in 0..words.pages {
            let found = words.word(page, self.worker).load(SeqCst);
            assert_eq!(
                found,
                own(page, self.worker, self.seq[page]),
                "worker {}: page {page} in the end",
                self.worker
            );
        }
    }
}

fn start(limit: u64, bytes: u64) -> (Pager, SharedRegion) {
    let host = Pager::start(limit, None);
    let region = SharedRegion::create(host.name, bytes as usize).expect("a region");
    (host, region)
}

/// Starts a worker that does `what` as worker `number`.
fn spawn(host: &Pager, region: &SharedRegion, what: &str, number: usize) -> Child {
    let name = String::from_utf8(host.name.as_bytes().to_vec()).expect("a name in hexadecimal");
    let length = region.len().to_string();
    let memory = region.memory().as_raw_fd();
    let mut command = again(&["worker", what, &number.to_string(), &name, &length]);
    // SAFETY: the descriptor is this process's own; dup2 may be called between fork and exec, and
    // clears the flag that would close it.
    unsafe {
        command.pre_exec(move || {
            if libc::dup2(memory, 99) == 99 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        })
    };
    command.stdin(Stdio::null()).spawn().expect("a worker")
}

fn join(mut children: Vec<Child>) {
    for child in &mut children {
        let status = wait(child, CASE_TIMEOUT).expect("a worker that ends");
        assert!(status.success(), "a worker failed: {status}");
    }
}

fn worker(arguments: &[String]) {
    let number: usize = arguments[1].parse().expect("a number");
    let name = name_of(&arguments[2]);
    let length: usize = arguments[3].parse().expect("a length");
    // SAFETY: number 99 was put there for this process by its parent.
    let memory = unsafe { OwnedFd::from_raw_fd(99) };
    let region = SharedRegion::attach(name, memory, length).expect("a region");
    let words = Words::of(&region);
    let mut mine = Mine::new(number, words.pages, 77 + number as u64);
    let end = Instant::now() + seconds();
    match arguments[0].as_str() {
        "hammer" => {
            while Instant::now() < end {
                (0..64).for_each(|_| mine.step(&words));
            }
            mine.check_all(&words);
        }
        "chain" => {
            while Instant::now() < end {
                chain(name, &words, &mut mine, 5);
            }
            mine.check_all(&words);
        }
        "forks" => {
            while Instant::now() < end {
                // SAFETY: the child does nothing but exit.
                match unsafe { libc::fork() } {
                    // SAFETY: ends the child.
                    0 => unsafe { libc::_exit(0) },
                    child => assert!(child > 0 && wait_for(child) == 0),
                }
                (0..32).for_each(|_| mine.step(&words));
            }
            mine.check_all(&words);
        }
        "for_ever" => {
            // A process may have been killed as this worker before: what is there is what was
            // written last.
            for page in 0..words.pages {
                let found = words.word(page, number).load(SeqCst);
                assert_eq!(found >> 36, own(page, number, 0) >> 36, "page {page}: {found:#x}");
                mine.seq[page] = found & ((1 << 36) - 1);
            }
            loop {
                mine.step(&words);
            }
        }
        "changes" => changes(&region, &words, &mut mine, end),
        "raw" => raw_clone(&words, &mut mine),
        "hold" => {
            // As the hook in front of mremap, of which it does not come to the end.
            let quarter = length / 4;
            let start = region.as_ptr().as_ptr() as usize + length - quarter;
            let held = advise(name.as_bytes(), start, quarter, ADVICE_HOLD);
            assert_eq!(held, Some(AdviceOutcome::Taken));
            // SAFETY: stops this process alone.
            unsafe { libc::raise(libc::SIGSTOP) };
        }
        "sleep" => rest(),
        // Its first thread ends, others live, and number 0 has a file open for direct I/O.
        "leaderless" => {
            let direct = if number == 0 { open_direct() } else { None };
            std::thread::spawn(move || {
                let (_direct, _region) = (direct, region);
                rest()
            });
            // SAFETY: ends this thread alone, and nothing that it has is used by others.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        }
        other => panic!("no such worker: {other}"),
    }
}

fn rest() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn name_of(text: &str) -> Name {
    Name::new(text.as_bytes()).expect("a name")
}

fn wait_for(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: waits for a child of this process.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    status
}

/// The child continues with the parent's word, and its child with that, while the parents wait.
fn chain(name: Name, words: &Words, mine: &mut Mine, depth: usize) {
    (0..200).for_each(|_| mine.step(words));
    if depth == 0 {
        return;
    }
    // SAFETY: this process has one thread that runs and a guard that holds nothing.
    match unsafe { libc::fork() } {
        0 => {
            forked(name).expect("a guard");
            chain(name, words, mine, depth - 1);
            mine.check_all(words);
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) }
        }
        child => {
            assert!(child > 0);
            let status = wait_for(child);
            assert_eq!(status, 0, "a forked child failed");
            // What it wrote is there: the word's own number tells.
            for page in 0..words.pages {
                let found = words.word(page, mine.worker).load(SeqCst);
                assert_eq!(found >> 36, own(page, mine.worker, 0) >> 36, "page {page}: {found:#x}");
                let seq = found & ((1 << 36) - 1);
                assert!(
                    seq >= mine.seq[page],
                    "page {page}: a write of a child's ancestor is lost"
                );
                mine.seq[page] = seq;
            }
        }
    }
}

/// Changes of the mapping in all ways, while the others hammer.
fn changes(region: &SharedRegion, words: &Words, mine: &mut Mine, end: Instant) {
    let start = region.as_ptr().as_ptr();
    let memory = region.memory().as_raw_fd();
    let pages = words.pages;
    let at = |page: usize| start.wrapping_add(page * PAGE).cast();
    while Instant::now() < end {
        let first = mine.random.below(pages - 64);
        let len = (1 + mine.random.below(63)) * PAGE;
        // SAFETY: all calls concern this process's mapping of the region, which nothing else in it
        // uses; what is unmapped is mapped again, at the same place and of the same memory.
        unsafe {
            match mine.random.below(5) {
                0 => assert_eq!(
                    libc::madvise(at(first), len, libc::MADV_DONTNEED),
                    0,
                    "the data stays"
                ),
                1 => {
                    assert_eq!(libc::mprotect(at(first), len, libc::PROT_READ), 0);
                    let _ = words.word(first, 0).load(SeqCst);
                    assert_eq!(
                        libc::mprotect(at(first), len, libc::PROT_READ | libc::PROT_WRITE),
                        0
                    );
                }
                2 => {
                    // Moved away and back.
                    let place = libc::mmap(
                        std::ptr::null_mut(),
                        len,
                        libc::PROT_NONE,
                        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                        -1,
                        0,
                    );
                    assert_ne!(place, libc::MAP_FAILED);
                    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                    if libc::mremap(at(first), len, len, flags, place) != place {
                        // Two mappings, which the kernel does not move in one call.
                        assert_eq!(
                            std::io::Error::last_os_error().raw_os_error(),
                            Some(libc::EFAULT)
                        );
                        assert_eq!(libc::munmap(place, len), 0);
                        continue;
                    }
                    let there: &AtomicU64 = &*place.cast::<AtomicU64>().add(mine.worker);
                    assert_eq!(there.load(SeqCst), own(first, mine.worker, mine.seq[first]));
                    mine.seq[first] += 1;
                    there.store(own(first, mine.worker, mine.seq[first]), SeqCst);
                    assert_eq!(libc::mremap(place, len, len, flags, at(first)), at(first));
                }
                3 => {
                    // Unmapped, and mapped again: only by attaching is it managed again.
                    assert_eq!(libc::munmap(at(first), len), 0);
                    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
                    let prot = libc::PROT_READ | libc::PROT_WRITE;
                    assert_eq!(
                        libc::mmap(at(first), len, prot, flags, memory, (first * PAGE) as i64),
                        at(first)
                    );
                    let name = std::env::args().nth(4).expect("the name");
                    swaptide_ipc::shared::attach(name.as_bytes(), Reach::Whole)
                        .expect("attached again");
                }
                _ => {}
            }
        }
        (0..50).for_each(|_| mine.step(words));
    }
    mine.check_all(words);
}

// ---------------------------------------------------------------------------------------------
// Cases
// ---------------------------------------------------------------------------------------------

fn one_process() {
    let (host, region) = start(32 * MIB, 48 * MIB);
    let words = Words::of(&region);
    words.fill();
    let mut mine = Mine::new(3, words.pages, 5);
    for _ in 0..30_000 {
        mine.step(&words);
    }
    mine.check_all(&words);
    words.check_all();
    assert!(host.out() > 3000, "{}", host.out());
    assert!(host.view.bytes().0 < 32 * MIB, "{:?}", host.view.bytes());
    assert!(host.counter(Counter::Zswpout) > 4000 && host.counter(Counter::Zswpin) > 4000);
    assert_eq!(host.counter(Counter::PagesPoisoned), 0);
}

fn hammer() {
    let (host, region) = start(16 * MIB, 24 * MIB);
    let words = Words::of(&region);
    words.fill();
    let workers = (0..4).map(|number| spawn(&host, &region, "hammer", number)).collect();
    // A process that maps it and does nothing.
    let mut idle = spawn(&host, &region, "sleep", 7);
    // And this one.
    let mut mine = Mine::new(6, words.pages, 1);
    let end = Instant::now() + seconds();
    while Instant::now() < end {
        (0..64).for_each(|_| mine.step(&words));
    }
    join(workers);
    mine.check_all(&words);
    words.check_all();
    idle.kill().and_then(|()| idle.wait()).expect("killed");
    assert!(host.counter(Counter::Pgsteal) > 3000, "{}", host.counter(Counter::Pgsteal));
}

fn fork_chains() {
    let (host, region) = start(16 * MIB, 24 * MIB);
    let words = Words::of(&region);
    words.fill();
    let workers = (0..3).map(|number| spawn(&host, &region, "chain", number)).collect();
    join(workers);
    words.check_all();
    assert!(host.counter(Counter::Forks) > 10 && host.counter(Counter::Pgsteal) > 1000);
}

fn forks_all_the_time() {
    let (host, region) = start(16 * MIB, 24 * MIB);
    let words = Words::of(&region);
    words.fill();
    let mut workers: Vec<Child> =
        (0..2).map(|number| spawn(&host, &region, "forks", number)).collect();
    workers.push(spawn(&host, &region, "hammer", 2));
    join(workers);
    words.check_all();
    assert!(host.counter(Counter::Forks) > 100 && host.counter(Counter::Pgsteal) > 100);
}

fn random_kills() {
    let (host, region) = start(16 * MIB, 24 * MIB);
    let words = Words::of(&region);
    words.fill();
    let mut random = Random(9);
    let mut workers: Vec<Child> =
        (0..4).map(|number| spawn(&host, &region, "for_ever", number)).collect();
    let end = Instant::now() + seconds();
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20 + random.next() % 100));
        let at = random.below(workers.len());
        assert!(workers[at].try_wait().expect("wait").is_none(), "a worker has ended by itself");
        workers[at].kill().and_then(|()| workers[at].wait()).expect("killed");
        workers[at] = spawn(&host, &region, "for_ever", at);
    }
    for mut worker in workers {
        worker.kill().and_then(|()| worker.wait()).expect("killed");
    }
    words.check_all();
    assert!(host.counter(Counter::Pgsteal) > 1000);
}

fn mappings_change() {
    let (host, region) = start(16 * MIB, 24 * MIB);
    let words = Words::of(&region);
    words.fill();
    let mut workers: Vec<Child> =
        (0..2).map(|number| spawn(&host, &region, "changes", number)).collect();
    workers.push(spawn(&host, &region, "hammer", 2));
    join(workers);
    words.check_all();
    assert!(host.counter(Counter::Pgsteal) > 100);
}

fn to_the_file() {
    let path = std::env::temp_dir().join(format!("swaptide-shared-{}", std::process::id()));
    let host = Pager::start(24 * MIB, Some(&path));
    let region = SharedRegion::create(host.name, 96 << 20).expect("a region");
    let words = Words::of(&region);
    words.fill();
    let workers = (0..2).map(|number| spawn(&host, &region, "hammer", number)).collect();
    join(workers);
    words.check_all();
    let (_, _, file) = host.view.bytes();
    assert!(file > 4 * MIB, "{file}");
    assert!(host.counter(Counter::Zswpwb) > 0, "compressed memory is written back");
    assert!(host.counter(Counter::Pswpin) > 1000);
    assert_eq!((host.counter(Counter::PagesPoisoned), host.counter(Counter::WriteErrors)), (0, 0));
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn advice() {
    let (host, region) = start(512 * MIB, 64 * MIB);
    let words = Words::of(&region);
    words.fill();
    let all = region.len();
    let pages = words.pages as u64;
    assert!(region.say(0, all, Say::PageOut));
    until("all goes out that was said to", || host.out() == pages);
    assert!(region.say(0, all / 2, Say::Random) && region.say(all / 2, all / 2, Say::Sequential));
    let before = host.counter(Counter::Pgmajfault);
    (0..words.pages / 2).for_each(|page| words.check(page));
    let random = host.counter(Counter::Pgmajfault) - before;
    (words.pages / 2..words.pages).for_each(|page| words.check(page));
    let sequential = host.counter(Counter::Pgmajfault) - before - random;
    assert_eq!(random, pages / 2, "each page alone");
    assert!(sequential < random / 16, "{sequential} faults in order");
    assert!(region.say(0, all, Say::PageOut));
    until("all goes out again", || host.out() == pages);
    assert!(region.say(0, all / 4, Say::Discard));
    assert!(region.say(all / 4, all / 4, Say::WillNeed));
    until("the second quarter comes in", || host.out() == pages / 2);
    assert_eq!(words.word(5, 100).load(SeqCst), 0, "given up");
    let before = host.counter(Counter::Pgmajfault);
    (words.pages / 4..words.pages / 2).for_each(|page| words.check(page));
    assert_eq!(host.counter(Counter::Pgmajfault), before, "brought in ahead");
    (words.pages / 2..words.pages).for_each(|page| words.check(page));
    assert!(!region.say(all, 1, Say::Normal), "beyond its end");
}

fn the_last_one_frees() {
    let (host, region) = start(20 * MIB, 64 * MIB);
    Words::of(&region).fill();
    let mut worker = spawn(&host, &region, "sleep", 1);
    std::thread::sleep(Duration::from_millis(500));
    drop(region);
    std::thread::sleep(Duration::from_millis(100));
    assert!(host.out() > 0, "the worker still has it");
    worker.kill().and_then(|()| worker.wait()).expect("killed");
    until("no process has it", || host.out() == 0);
    until("nothing of it is left", || host.view.bytes().0 == 0 && host.view.pool_bytes() == 0);
}

fn regions_end_while_their_pages_leave() {
    let host = Pager::start(8 * MIB, None);
    for turn in 0..40 {
        let region = SharedRegion::create(host.name, 24 << 20).expect("a region");
        Words::of(&region).fill();
        // It ends at another moment of a batch each time.
        std::thread::sleep(Duration::from_micros(turn * 137));
        drop(region);
        // The next one would have the same slots, and put its pages in the place of what was left
        // in them.
        until("nothing of it is left", || {
            host.out() == 0 && host.view.bytes().0 == 0 && host.view.pool_bytes() == 0
        });
    }
}

/// The process of a pager: tells its name and serves until it is killed.
fn host(limit: u64, file: Option<&String>) -> ! {
    let file = file.map(|path| {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .expect("a swap file");
        std::fs::remove_file(path).expect("removed");
        file.set_len(256 * MIB).expect("length");
        file
    });
    let host = Host::start(limit, file).expect("a pager");
    println!("{}", std::str::from_utf8(host.name().as_bytes()).expect("a name"));
    std::io::stdout().flush().expect("told");
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// A pager in a process of its own.
struct Pager {
    process: Child,
    name: Name,
    view: HostView,
}

impl Pager {
    fn start(limit: u64, file: Option<&std::path::Path>) -> Pager {
        let limit = limit.to_string();
        let mut arguments = vec!["host", &limit];
        arguments.extend(file.map(|path| path.to_str().expect("a path of letters")));
        let mut process = again(&arguments).stdout(Stdio::piped()).spawn().expect("a pager");
        let mut name = String::new();
        std::io::BufRead::read_line(
            &mut std::io::BufReader::new(process.stdout.take().expect("stdout")),
            &mut name,
        )
        .expect("its name");
        let name = name_of(name.trim());
        Pager { process, name, view: HostView::of(name).expect("a look at it") }
    }

    fn counter(&self, counter: Counter) -> u64 {
        self.view.counter(counter)
    }

    /// Pages that are out.
    fn out(&self) -> u64 {
        let (_, pool, file) = self.view.bytes();
        (pool + file) / PAGE as u64
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        // A process that still maps part of it is stopped by that.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
