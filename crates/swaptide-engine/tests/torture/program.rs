//! The program: threads that write, read, advise, protect, move and resize areas of their own,
//! fork, and know what every page must hold.

use super::*;

pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

pub fn mix(value: u64) -> u64 {
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
pub enum State {
    Held,
    /// After `MADV_FREE`: the old content or zeros, until it is written again.
    Lazy,
}

#[derive(Clone, Copy)]
pub struct Page {
    key: u64,
    word: u64,
    /// [`WORDS`]: no word was changed.
    at: usize,
    state: State,
}

pub const EMPTY: Page = Page { key: 0, word: 0, at: WORDS, state: State::Held };

impl Page {
    fn expected(&self, at: usize) -> u64 {
        if at == self.at { self.word } else { word_of(self.key, at) }
    }
}

pub struct Area {
    pub base: VirtAddr,
    pub pages: Vec<Page>,
    pub place: usize,
    /// Readable and writable.
    pub open: bool,
}

pub struct Thread {
    pub areas: Vec<Area>,
    /// Where the places begin; `None`: somebody else may have something there by now.
    pub places: Vec<Option<VirtAddr>>,
    pub random: Random,
    pub number: u64,
    pub serial: u64,
    pub file: File,
    /// What was done last, to be told when something is wrong.
    pub acts: Vec<String>,
}

pub const MMAP: u32 = linux::MMAP;
pub const PROT_NONE: usize = 0;
const PROT_READ: usize = 1;
const READ_WRITE: usize = 3;
const PRIVATE: usize = 0x4022;
pub const SHARED: usize = 0x4021;
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
pub fn call(number: u32, a: [usize; 5]) -> Result<VirtAddr, Errno> {
    // SAFETY: every range passed lies in addresses that nobody has but the program.
    check(unsafe { syscall6(number, [a[0], a[1], a[2], a[3], a[4], 0]) }).map(VirtAddr)
}

fn must(number: u32, a: [usize; 5]) {
    if let Err(errno) = call(number, a) {
        die(&format!("system call {number} of {a:x?}: {}", swaptide_sys::ErrnoName(errno)));
    }
}

/// Keeps addresses for the program without being memory of its. False when somebody else was
/// faster.
fn keep(at: VirtAddr, pages: usize) -> bool {
    pages == 0
        || call(MMAP, [at.0, pages * PAGE_SIZE, PROT_NONE, SHARED | NO_REPLACE, usize::MAX]).is_ok()
}

pub fn map_anew(at: VirtAddr, pages: usize) {
    must(MMAP, [at.0, pages * PAGE_SIZE, READ_WRITE, PRIVATE | FIXED, usize::MAX]);
}

/// Moves an area, mapping by mapping: what was mapped over a part of it may be one of its own, and
/// a call that moves several of which one is managed fails halfway (the preloaded library has the
/// same, in `hooks/mremap.rs`).
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
            Err(errno) => die(&format!("mremap: {}", swaptide_sys::ErrnoName(errno))),
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
        // SAFETY: pages of an area, which are the calling thread's own, and mapped while it uses
        // this.
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
        self.acts.push(format!(
            "area {area} at {:x}: {what}, {count} pages from {from}",
            self.areas[area].base.0
        ));
    }

    fn wrong(&self, area: usize, page: usize, at: usize, found: u64, what: &str) -> ! {
        let expected = self.areas[area].pages[page].expected(at);
        let again = self.areas[area].read(page, at);
        die(&format!(
            "{what}: thread {}, area {area}, page {page}, word {at}: expected {expected:016x}, \
            found {found:016x} and then {again:016x}\n{}",
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

    /// One word of a page. After `MADV_FREE` the page is written as a whole: a write keeps what is
    /// there.
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
        let advise =
            |advice| call(linux::MADVISE, [range.start.0, range.len(), advice, 0, 0]).is_ok();
        match self.random.below(16) {
            0..4 => {
                self.note(area, "MADV_DONTNEED", from, count);
                assert!(advise(DONTNEED));
                self.areas[area].emptied(from, count);
            }
            4..7 => {
                self.note(area, "MADV_FREE", from, count);
                assert!(advise(FREE));
                self.areas[area].pages[from..from + count]
                    .iter_mut()
                    .for_each(|page| page.state = State::Lazy);
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
        let Some((place, to)) =
            (0..PLACES).filter(is_free).find_map(|place| Some((place, self.places[place]?)))
        else {
            return;
        };
        if self.random.below(2) == 0 {
            map_anew(to, pages);
            // SAFETY: pages that were mapped just now.
            (0..pages).step_by(7).for_each(|page| unsafe {
                to.offset(page * PAGE_SIZE).as_ptr::<u8>().write_volatile(0xee)
            });
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
        let (base, old, place) =
            (self.areas[area].base, self.areas[area].pages.len(), self.areas[area].place);
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
        must(
            linux::MPROTECT,
            [range.start.0, range.len(), if none { PROT_NONE } else { PROT_READ }, 0, 0],
        );
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
        let (source, target) =
            (self.areas[area].bytes(from, count), self.areas[other].bytes(to, count));
        if self.random.below(2) == 0 {
            assert_eq!(rustix::io::pwrite(&self.file, source, 0), Ok(source.len()));
            assert_eq!(rustix::io::pread(&self.file, &mut *target, 0), Ok(target.len()));
        } else {
            let (out, into) = rustix::pipe::pipe().expect("a pipe");
            for (source, target) in source.chunks(PAGE_SIZE).zip(target.chunks_mut(PAGE_SIZE)) {
                assert_eq!(rustix::io::writev(&into, &[IoSlice::new(source)]), Ok(PAGE_SIZE));
                let (first, second) = target.split_at_mut(1000);
                assert_eq!(
                    rustix::io::readv(&out, &mut [IoSliceMut::new(first), IoSliceMut::new(second)]),
                    Ok(PAGE_SIZE)
                );
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
        engine.bells.submit(HandlerRequest::ForkPrepare);
        assert!(engine.fork.wait_until_prepared(u64::MAX), "the handler stands still");
        // SAFETY: the child continues with the engine's locks as the preloaded library's does;
        // libc's and the sanitizers' are seen to by fork itself.
        let pid = unsafe { fork() };
        if pid == 0 {
            std::mem::forget((guard, alone, among));
            self.child(engine, this, declines);
        }
        engine.fork.close_end(false);
        engine.fork.close_end(true);
        engine.bells.submit(HandlerRequest::ForkDone);
        engine.fork.wait(NONE, u64::MAX);
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
                rustix::process::waitpid(Some(child), rustix::process::WaitOptions::NOHANG)
                    .expect("a child")
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
        let slot = segment()
            .claimed()
            .find(|(_, slot)| slot.pid.load(Relaxed) == pid as u32)
            .map(|(index, _)| index);
        if let Some(index) = slot {
            segment().release(index, |_| {});
        }
    }

    fn child(&mut self, engine: &'static Engine, parent: u32, declines: bool) -> ! {
        IS_CHILD.store(true, Relaxed);
        begin_in_child();
        // The parent's end of the pair of sockets is open here, too: unlike in a preloaded library,
        // threads share their descriptors. Nobody would hear of its end.
        let _ =
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
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
        } else {
            std::thread::spawn(move || heir(engine, end, parent));
            while TAKEN_OVER.load(Acquire) == 0 {
                futex::wait(
                    &TAKEN_OVER,
                    0,
                    Some(Duration::from_millis(100)),
                    futex::Scope::Private,
                );
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

    pub fn verify_all(&mut self, what: &str) {
        for area in 0..AREAS {
            self.open(area);
            self.verify(area, 0, self.areas[area].pages.len(), what);
        }
    }

    /// The life of a thread; how many steps it made.
    pub fn run(&mut self, end: Instant) -> u64 {
        let mut steps = 0;
        for area in 0..AREAS {
            self.is_live(area);
            (0..self.areas[area].pages.len()).for_each(|page| self.write_page(area, page));
        }
        // Where a sanitizer or others on the machine make everything slow, for longer: all is to
        // have happened once.
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
