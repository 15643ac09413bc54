//! The thread that finds programs which load no library, and names them to the tracer.
//!
//! Owns the processes that are watched: those that were named (`FinderRequest::Watch`; by the
//! memory controller when they have some memory, `Large`) and what they start, for nothing else
//! tells when such a program executes another one. In a run without them the thread sleeps.
//! Orphans are looked at as well: a program that started one may have ended between two looks.
//! Where running processes were attached to, they and all that they start are named, whatever
//! they load ([`Takes::All`]).
//!
//! A program that may stay small is let be until it is not: most that load no library do little.
//!
//! Invariants
//! 1. A program is given the agent once: it is known by its process's start, its stack and its
//!    file.
//! 2. A process that was forked and has executed nothing is left alone for a while: most execute
//!    something. The tracer looks whether it has memory of its own.
//! 3. Looks cost at most a thirtieth of one CPU, but for those that the memory controller asks for.
//!
//! Locks: none; threads talk through channels.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread::Builder;
use std::time::{Duration, Instant};

use swaptide_ipc::ENV_SOCKET;
use swaptide_sys::AsFd;
use swaptide_sys::elf::{ProgramKind, kind_of};
use swaptide_sys::eventfd::EventFd;
use swaptide_sys::new_processes::{NewLook, NewProcesses};
use swaptide_sys::process::{ProcInfo, anon_rss, proc_info, same_memory};
use swaptide_sys::thread::thread_cpu_time;

/// Between two looks at processes that are watched, at least.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// The same while one of them was seen for less than [`YOUNG_AGE`].
const YOUNG_INTERVAL: Duration = Duration::from_micros(500);
const YOUNG_AGE: Duration = Duration::from_millis(20);
/// How long a process is watched that has hooks and said that it is about to execute a program
/// without.
const HOOKED_AGE: Duration = Duration::from_secs(2);
/// A forked child that executes nothing for so long is taken for one that goes on so.
const FORKED_AGE: Duration = Duration::from_millis(200);
/// Between two looks where all that is watched is small, or has the agent, at most.
const QUIET_INTERVAL: Duration = Duration::from_millis(20);
/// The most that a program fills in a nanosecond.
const FILL_BYTES_PER_NS: u64 = 4;
/// Part of one CPU that looks take.
const COST_DIVISOR: u32 = 30;
/// How often a process is named that cannot be traced: it has another tracer, or stops by a signal.
const MAX_TRIES: u32 = 1000;

/// Which programs are given the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    /// Those that load no library, once they have this number of bytes in memory; or fewer, where
    /// the memory controller says so.
    LoadingNone(u64),
    /// All that are not swaptide's and have no agent.
    All,
}

impl Takes {
    /// True if the program that a process runs is one of them, and has no agent: another
    /// supervisor's, that was attached to it, or one that is about to leave it.
    pub(super) fn has(self, pid: u32) -> bool {
        match (self, kind_of_process(pid)) {
            (_, None) => false,
            (Takes::LoadingNone(_), Some(kind)) => kind.is_injected() && !has_agent(pid),
            (Takes::All, Some(_)) => !is_of_swaptide(pid),
        }
    }
}

/// True for a process with an agent, one that will load it, and one of a supervisor's.
pub(crate) fn is_of_swaptide(pid: u32) -> bool {
    let file = |pid: &str| {
        let found = std::fs::metadata(format!("/proc/{pid}/exe")).ok()?;
        Some((found.dev(), found.ino()))
    };
    let is_command = file(&pid.to_string()).is_some_and(|theirs| file("self") == Some(theirs));
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let is_socket = |variable: &[u8]| {
        variable.strip_prefix(ENV_SOCKET.as_bytes()).is_some_and(|rest| rest.starts_with(b"="))
    };
    is_command || environment.split(|byte| *byte == 0).any(is_socket) || has_agent(pid)
}

/// True for a process with threads of an agent.
pub(crate) fn has_agent(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.into_iter().any(|thread| {
        let name = std::fs::read(thread.path().join("comm")).unwrap_or_default();
        name == b"swaptide\n"
    })
}

/// What names a program that a process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProgramIdentity {
    start: u64,
    stack: u64,
    inode: u64,
}

impl ProgramIdentity {
    /// True for the process that has run it, whatever it runs now.
    pub(super) fn is_of(&self, info: &ProcInfo) -> bool {
        self.start == info.start_time
    }

    pub(super) fn of(info: &ProcInfo) -> Option<ProgramIdentity> {
        let inode = std::fs::metadata(format!("/proc/{}/exe", info.pid)).ok()?.ino();
        Some(ProgramIdentity { start: info.start_time, stack: info.stack_start, inode })
    }
}

/// A process that is watched.
struct Watched {
    since: Instant,
    /// The program that was dealt with.
    done: Option<ProgramIdentity>,
    /// It has hooks, and is watched for a moment only.
    is_hooked: bool,
    /// A process without hooks has started it.
    is_of_injected: bool,
    /// It was attached to, as the process that began then.
    attached: Option<u64>,
    /// A thread is about to put the agent into it.
    is_traced: bool,
    /// A program that is to have the agent when it is large.
    small: Option<ProgramIdentity>,
    /// The program that was named last, and how often.
    named: Option<ProgramIdentity>,
    tries: u32,
}

/// What a look at a watched process has shown.
enum WatchedLook {
    /// It is not watched any more.
    Gone,
    Nothing,
    /// It may be large after this time, and not before.
    Small(Duration),
    /// It is to be given the agent.
    Candidate(ProgramIdentity),
}

impl Watched {
    /// True for one whose program was not looked at.
    fn is_unknown(&self) -> bool {
        self.is_hooked && self.done.is_none()
    }

    fn look(&mut self, pid: u32, takes: Takes) -> WatchedLook {
        let Some(info) = proc_info(pid).filter(|info| !info.zombie) else {
            return WatchedLook::Gone;
        };
        // One that is stopped by a signal is let be until it continues.
        if self.is_traced || info.stopped {
            return WatchedLook::Nothing;
        }
        let kept = |is_kept: bool| if is_kept { WatchedLook::Nothing } else { WatchedLook::Gone };
        // The child of one with hooks says by itself what it executes.
        let age = self.since.elapsed();
        if self.attached.is_some_and(|start| start != info.start_time) {
            return WatchedLook::Gone;
        }
        let is_settled = self.attached.is_some() || self.is_of_injected && age > FORKED_AGE;
        if !info.has_executed && (!is_settled || same_memory(info.ppid, pid)) {
            return kept(self.is_of_injected || age < HOOKED_AGE);
        }
        let Some(program) = ProgramIdentity::of(&info) else { return WatchedLook::Nothing };
        if self.done == Some(program) {
            return kept(!self.is_hooked || age < HOOKED_AGE);
        }
        if self.small != Some(program) && !takes.has(pid) {
            // What loads the agent says by itself when it executes something else.
            self.is_hooked = takes != Takes::All;
            self.done = Some(program);
            return WatchedLook::Nothing;
        }
        self.is_hooked = false;
        if let Takes::LoadingNone(least) = takes {
            let bytes = anon_rss(pid).unwrap_or(0);
            if bytes < least {
                self.small = Some(program);
                return WatchedLook::Small(Duration::from_nanos(
                    (least - bytes) / FILL_BYTES_PER_NS,
                ));
            }
        }
        self.is_traced = true;
        self.named = Some(program);
        WatchedLook::Candidate(program)
    }
}

/// A request to the thread.
pub(super) enum FinderRequest {
    /// A process runs such a program, or it or one that it starts is about to.
    Watch(u32),
    /// A process has some memory.
    Large(u32),
    /// A running process that began then is to be given the agent.
    Attach(u32, u64),
    /// The tracer has done with this one. `None`: it is to be named again.
    Done(u32, Option<ProgramIdentity>),
}

/// A program to be given the agent.
pub(super) struct Candidate {
    pub pid: u32,
    pub program: ProgramIdentity,
}

/// What the tracer is told.
pub(super) enum TracerWord {
    /// By the finder.
    Named(Candidate),
    /// By the memory controller: a process that has the agent is to be managed, and grows.
    Engaged(u32),
}

/// Starts the thread. What it finds goes to `words`, and `wake` is signalled.
pub(super) fn start(
    requests: Receiver<FinderRequest>,
    words: Sender<TracerWord>,
    wake: Arc<EventFd>,
    takes: Takes,
) {
    let (watched, new, pause) = (HashMap::new(), NewProcesses::default(), LOOK_INTERVAL);
    let finder = Finder { words, wake, takes, watched, new, has_named: false, pause };
    // Without the thread such programs stay unmanaged, which the summary tells.
    let _ = Builder::new().name("injector".into()).spawn(move || finder.run(requests));
}

struct Finder {
    words: Sender<TracerWord>,
    wake: Arc<EventFd>,
    takes: Takes,
    watched: HashMap<u32, Watched>,
    new: NewProcesses,
    /// A program was named: an orphan may be of such a one.
    has_named: bool,
    /// Until the next look, at most.
    pause: Duration,
}

impl Finder {
    fn run(mut self, requests: Receiver<FinderRequest>) {
        swaptide_sys::affinity::go_first();
        let mut next_look = Instant::now();
        // By what the last look cost.
        let mut earliest_look = next_look;
        loop {
            let request = if self.watched.is_empty() {
                requests.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                requests.recv_timeout(next_look.saturating_duration_since(Instant::now()))
            };
            match request {
                Ok(FinderRequest::Watch(pid)) => {
                    self.begin(pid);
                    next_look = next_look.min(earliest_look);
                }
                Ok(FinderRequest::Large(pid)) => {
                    if !self.watched.get(&pid).is_some_and(|watched| watched.is_of_injected) {
                        let has = self.takes.has(pid);
                        if !self.watched.contains_key(&pid) {
                            if !has {
                                continue;
                            }
                            self.begin(pid);
                        }
                        // A child may have been found before its parent was looked at.
                        if let Some(watched) = self.watched.get_mut(&pid) {
                            watched.is_of_injected = has;
                        }
                    }
                    self.look_at(pid);
                    next_look = next_look.min(earliest_look);
                }
                Ok(FinderRequest::Attach(pid, start)) => {
                    self.begin(pid);
                    if let Some(watched) = self.watched.get_mut(&pid) {
                        (watched.attached, watched.is_of_injected) = (Some(start), true);
                        watched.is_hooked = false;
                    }
                    next_look = next_look.min(earliest_look);
                }
                Ok(FinderRequest::Done(pid, program)) => self.note(pid, program),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if Instant::now() < next_look {
                continue;
            }
            // Not the time in which the thread waited for a CPU.
            let began = thread_cpu_time();
            let listing = self.look();
            let cost = thread_cpu_time().since(began).saturating_sub(listing);
            let young = self.watched.values().any(|watched| watched.since.elapsed() < YOUNG_AGE);
            let is_urgent = young && matches!(self.takes, Takes::LoadingNone(0) | Takes::All);
            let interval = if is_urgent { YOUNG_INTERVAL } else { self.pause };
            let ended = Instant::now();
            earliest_look = ended + cost * COST_DIVISOR;
            next_look = earliest_look.max(ended + interval);
        }
    }

    /// Watches a process that may have children by now.
    fn begin(&mut self, pid: u32) {
        self.watch(pid);
        self.new.list_all();
    }

    fn watch(&mut self, pid: u32) {
        let new = || Watched {
            since: Instant::now(),
            done: None,
            is_hooked: true,
            is_of_injected: false,
            attached: None,
            is_traced: false,
            small: None,
            named: None,
            tries: 0,
        };
        self.watched.entry(pid).or_insert_with(new).since = Instant::now();
    }

    fn note(&mut self, pid: u32, program: Option<ProgramIdentity>) {
        let Some(watched) = self.watched.get_mut(&pid) else { return };
        watched.is_traced = false;
        watched.tries += 1;
        self.new.list_all();
        if program.is_some() || watched.tries >= MAX_TRIES {
            watched.done = program.or(watched.named);
            watched.tries = 0;
        }
    }

    /// Looks at all that is watched; CPU time that a listing of all processes took, which has a
    /// bound of its own.
    fn look(&mut self) -> Duration {
        let listing = self.find_children();
        let is_open = |watched: &Watched| {
            watched.is_hooked || watched.done.is_none() && watched.small.is_none()
        };
        let mut pause = match self.watched.values().any(is_open) {
            true => LOOK_INTERVAL,
            false => QUIET_INTERVAL,
        };
        let mut found = Vec::new();
        let takes = self.takes;
        self.watched.retain(|pid, watched| {
            match watched.look(*pid, takes) {
                WatchedLook::Gone => return false,
                WatchedLook::Nothing => {}
                WatchedLook::Small(until) => pause = pause.min(until.max(LOOK_INTERVAL)),
                WatchedLook::Candidate(program) => found.push(Candidate { pid: *pid, program }),
            }
            true
        });
        self.pause = pause;
        self.name(found);
        listing
    }

    /// Looks at one that is large, as the memory controller says.
    fn look_at(&mut self, pid: u32) {
        let takes = match self.takes {
            Takes::LoadingNone(_) => Takes::LoadingNone(0),
            Takes::All => Takes::All,
        };
        match self.watched.get_mut(&pid).map(|watched| watched.look(pid, takes)) {
            Some(WatchedLook::Candidate(program)) => self.name(vec![Candidate { pid, program }]),
            Some(WatchedLook::Gone) => drop(self.watched.remove(&pid)),
            Some(WatchedLook::Nothing | WatchedLook::Small(_)) | None => {}
        }
    }

    fn name(&mut self, found: Vec<Candidate>) {
        if !found.is_empty() {
            self.has_named = true;
            // The tracer ends with the run.
            found.into_iter().for_each(|one| drop(self.words.send(TracerWord::Named(one))));
            self.wake.signal();
        }
    }

    /// Watches what the watched processes have started since the last look.
    fn find_children(&mut self) -> Duration {
        let NewLook { processes: started, listing } = self.new.look();
        let own = std::process::id();
        let mut found = true;
        while found {
            found = false;
            for info in started.iter().filter(|info| !info.zombie) {
                if self.watched.contains_key(&info.pid) {
                    continue;
                }
                let (is_of_injected, is_hooked) = match self.watched.get(&info.ppid) {
                    // If it cannot be taken, nothing of it is.
                    Some(parent) if parent.attached.is_some() && parent.done.is_none() => continue,
                    // It forked before it was looked at.
                    Some(parent) if parent.is_unknown() && self.takes.has(info.ppid) => {
                        (true, false)
                    }
                    Some(parent) => (!parent.is_hooked, parent.is_hooked),
                    // Its parent may have ended between two looks.
                    None if info.ppid == own && self.has_named && self.may_take(info) => {
                        (true, true)
                    }
                    None => continue,
                };
                self.watch(info.pid);
                found = true;
                if let Some(watched) = self.watched.get_mut(&info.pid) {
                    watched.is_of_injected = is_of_injected;
                    watched.is_hooked = is_hooked;
                }
            }
        }
        listing.unwrap_or_default()
    }
}

impl Finder {
    /// False for a process that runs a program with hooks.
    fn may_take(&self, info: &ProcInfo) -> bool {
        !info.has_executed || self.takes.has(info.pid)
    }
}

fn kind_of_process(pid: u32) -> Option<ProgramKind> {
    kind_of(File::open(format!("/proc/{pid}/exe")).ok()?.as_fd())
}
