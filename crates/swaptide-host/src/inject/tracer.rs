//! The tracer: gives the agent to the programs that the finder names.
//!
//! Owns the programs that are about to stop, and those that are held. All of it happens in the
//! supervisor's first thread, for it is the parent of the run's first program and of orphans: its
//! waits report their stops, whichever thread of the process traces them.
//!
//! | stage | until |
//! |---|---|
//! | named by the finder | traced and interrupted ([`Tracer::begin_named`]) |
//! | about to stop | the wait reports the stop ([`Tracer::changed`]); then it is given the agent at once |
//! | late | a call that it was made to make returns: it is let go without the agent |
//! | held | its agent is there ([`Tracer::attend`]); one with memory, until the controller has looked at it, and where it is to be managed until it is |
//!
//! Else a program could be past the budget by then. It is held for [`HOLD_TIMEOUT`] at most, and
//! for [`ENGAGE_TIMEOUT`] where it is about to be managed; its [other threads](super::running) too,
//! if they run. One that was attached to is held until its agent is there, and only its first
//! thread is.
//!
//! Invariants
//! 1. A program is traced and changed without `CAP_SYS_PTRACE`, so the kernel gives no rights by
//!    it that its user has not. Where a process was attached to, that capability is used, and only
//!    programs with the same rights as that process are given the agent.
//! 2. What a process is was looked at after it had stopped: until then it may execute another
//!    program.
//! 3. A process that runs on another's memory is left alone ([`shares_memory`]; where the kernel
//!    does not compare them, what is mapped in it is looked for in all others).
//! 4. A process in another pid namespace is left alone, and so is one under filters of its own:
//!    they could end it for what it is made to call.
//!
//! Locks: none; threads talk through channels.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::thread::CapabilitySet;
use swaptide_ipc::{ProcSlot, ProcState, Segment};
use swaptide_sys::Errno;
use swaptide_sys::eventfd::EventFd;
use swaptide_sys::process::{anon_rss, proc_info, processes, same_memory};
use swaptide_sys::ptrace::TraceeStop;
use swaptide_sys::remote::{Remote, Seized, is_traced_here};

use super::finder::{self, Candidate, FinderRequest, ProgramIdentity, Takes, TracerWord};
use super::forks::HeldForks;
use super::image::AgentFile;
use super::put_in::{AgentTexts, put_in};
use super::running::{ENGAGED_TIMEOUT, INJECTION_TIMEOUT, Stopper};
use crate::capability::without;

/// How long a program is held until its agent is there, and the controller has looked at it. It
/// takes a millisecond or two.
const HOLD_TIMEOUT: Duration = Duration::from_millis(20);
/// How long it is held while it is about to be managed: a few milliseconds, where a CPU is free.
const ENGAGE_TIMEOUT: Duration = Duration::from_millis(200);
/// One with less memory is held only until its agent is there.
const LOOKED_AT_BYTES: u64 = 1 << 20;
/// Between two looks at it.
const HOLD_INTERVAL: Duration = Duration::from_micros(200);

/// Between two looks whether a program that is about to stop is traced still: a thread of it may
/// have executed another one, which no wait tells.
const TRACED_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A program that has the agent, and is stopped.
struct HeldProgram {
    remote: Remote,
    since: Instant,
    /// It has memory: the controller shall look at it before it goes on.
    is_large: bool,
}

/// For what a program is held whose agent is there.
enum HoldWish {
    /// For nothing any more.
    None,
    /// The controller has not looked at it.
    UntilLooked,
    /// It is to be managed, and is not yet.
    UntilManaged,
}

impl HoldWish {
    fn of(slot: &ProcSlot) -> HoldWish {
        if slot.state() != ProcState::Watching {
            return HoldWish::None;
        }
        // With the store of the controller: then its order is seen as well.
        match slot.control.looked.load(Acquire) != 0 {
            false => HoldWish::UntilLooked,
            true if slot.control.engage.load(Relaxed) != 0 => HoldWish::UntilManaged,
            true => HoldWish::None,
        }
    }
}

/// A program that is about to stop.
struct Stopping {
    seized: Seized,
    program: ProgramIdentity,
    checked: Instant,
}

/// Puts the agent into programs that load no library.
pub(crate) struct Tracer {
    agent: AgentFile,
    texts: AgentTexts,
    /// The rights of the process that was attached to.
    attached: Option<Credentials>,
    takes: Takes,
    /// Programs that wait, while none is given the agent.
    postponed: Option<Vec<Candidate>>,
    finder: Sender<FinderRequest>,
    mailbox: Mailbox,
    stopping: HashMap<u32, Stopping>,
    held: HashMap<u32, HeldProgram>,
    late: HashMap<u32, Remote>,
    /// Stops other threads of these.
    stopper: Stopper,
    /// Forks of programs that have the agent.
    pub(crate) forks: HeldForks,
    /// What came of programs since the last call of [`Tracer::take_outcomes`].
    outcomes: Vec<(u32, Result<(), Errno>)>,
    note: FirstNote,
}

/// What the finder and the memory controller tell the tracer.
struct Mailbox {
    sender: Sender<TracerWord>,
    words: Receiver<TracerWord>,
    /// Signalled for each.
    wake: Arc<EventFd>,
}

/// What is to be told, once.
#[derive(Default)]
struct FirstNote {
    text: Option<String>,
    has_told: bool,
}

/// The rights of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Credentials(Vec<String>);

impl Credentials {
    /// Those of a process; `None` when it is gone.
    pub(crate) fn of(pid: u32) -> Option<Credentials> {
        const KEYS: [&str; 5] = ["Uid:", "Gid:", "Groups:", "CapPrm:", "CapEff:"];
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let is_one = |line: &&str| KEYS.iter().any(|key| line.starts_with(key));
        let mut rights: Vec<String> = status.lines().filter(is_one).map(str::to_owned).collect();
        let namespace = std::fs::read_link(format!("/proc/{pid}/ns/user")).ok()?;
        rights.push(namespace.to_string_lossy().into_owned());
        Some(Credentials(rights))
    }
}

impl Tracer {
    /// Starts the finder's thread. `socket`: what agents connect to; `log`: path of their log.
    ///
    /// # Errors
    /// Without a descriptor.
    pub(crate) fn start(
        agent: AgentFile,
        socket: &str,
        log: Option<Vec<u8>>,
        takes: Takes,
    ) -> Result<Tracer, Errno> {
        let wake = Arc::new(EventFd::new()?);
        let (finder, requests) = channel();
        let (sender, words) = channel();
        finder::start(requests, sender.clone(), Arc::clone(&wake), takes);
        let stopper = Stopper::new(Arc::clone(&wake));
        Ok(Tracer {
            agent,
            texts: AgentTexts { socket: socket.into(), log: log.unwrap_or_default() },
            attached: None,
            takes,
            postponed: None,
            finder,
            mailbox: Mailbox { sender, words, wake },
            stopping: HashMap::new(),
            held: HashMap::new(),
            late: HashMap::new(),
            stopper,
            forks: HeldForks::default(),
            outcomes: Vec::new(),
            note: FirstNote::default(),
        })
    }

    /// A running process that began at `start` is to be given the agent, and what it starts. Only
    /// programs with the same rights are.
    pub(crate) fn attach(&mut self, pid: u32, start: u64, rights: &Credentials) {
        self.attached.get_or_insert_with(|| rights.clone());
        let _ = self.finder.send(FinderRequest::Attach(pid, start));
    }

    /// No program is given the agent, until [`Tracer::resume`].
    pub(crate) fn pause(&mut self) {
        self.postponed.get_or_insert_default();
    }

    /// No program is given the agent any more: the finder ends.
    pub(crate) fn end(&mut self) {
        self.pause();
        self.finder = channel().0;
    }

    /// Programs are given the agent again.
    pub(crate) fn resume(&mut self) {
        let postponed = self.postponed.take();
        postponed.into_iter().flatten().for_each(|candidate| self.begin_one(candidate));
    }

    /// What came of programs since the last call, in order.
    pub(crate) fn take_outcomes(&mut self) -> Vec<(u32, Result<(), Errno>)> {
        std::mem::take(&mut self.outcomes)
    }

    /// True for a process with the rights that invariant 1 wants.
    fn is_permitted(&self, pid: u32) -> bool {
        self.attached.is_none() || Credentials::of(pid) == self.attached
    }

    /// Does something to a process that [is permitted](Tracer::is_permitted).
    fn act<T>(&self, act: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
        if self.attached.is_some() {
            return act();
        }
        without(CapabilitySet::SYS_PTRACE, act).unwrap_or(Err(Errno::PERM))
    }

    /// A process runs such a program, or it or one that it starts is about to.
    pub(crate) fn watch(&self, pid: u32) {
        let _ = self.finder.send(FinderRequest::Watch(pid));
    }

    /// What tells that a process has some memory.
    pub(crate) fn reporter(&self) -> Box<dyn Fn(u32) + Send> {
        let finder = self.finder.clone();
        Box::new(move |pid| drop(finder.send(FinderRequest::Large(pid))))
    }

    /// What tells that one that has the agent is about to be managed, and grows.
    pub(crate) fn engagement_reporter(&self) -> Box<dyn Fn(u32) + Send> {
        let (sender, wake) = (self.mailbox.sender.clone(), Arc::clone(&self.mailbox.wake));
        Box::new(move |pid| {
            // The tracer ends with the run.
            let _ = sender.send(TracerWord::Engaged(pid));
            wake.signal();
        })
    }

    /// Readable when there is something for [`Tracer::begin_named`].
    pub(crate) fn awaited(&self) -> BorrowedFd<'_> {
        self.mailbox.wake.as_fd()
    }

    /// What the user is to be told, once.
    pub(crate) fn take_note(&mut self) -> Option<String> {
        self.note.text.take()
    }

    /// True if a process is about to be given the agent, or held.
    pub(crate) fn has(&self, pid: u32) -> bool {
        self.stopping.contains_key(&pid)
            || self.held.contains_key(&pid)
            || self.late.contains_key(&pid)
    }

    /// The longest time until the next [`Tracer::attend`].
    pub(crate) fn timeout(&self) -> Option<Duration> {
        if !self.held.is_empty() || self.stopper.asked().next().is_some() {
            return Some(HOLD_INTERVAL);
        }
        let is_awaited = !self.stopping.is_empty() || !self.late.is_empty();
        is_awaited.then_some(TRACED_CHECK_INTERVAL)
    }

    /// Lets programs go whose agent is there, and forgets those that are traced no more.
    pub(crate) fn attend(&mut self, segment: &Segment) {
        self.forget_untraced();
        let asked: Vec<(u32, bool)> = self.stopper.asked().collect();
        if self.held.is_empty() && asked.is_empty() {
            return;
        }
        // The place of the program before has no such word, or has it no more.
        let has_agent = |slot: &&ProcSlot| slot.agent.past_libc.load(Acquire) != 0;
        let slots = segment.claimed().map(|(_, slot)| slot).filter(has_agent);
        let places: HashMap<u32, HoldWish> =
            slots.map(|slot| (slot.pid.load(Relaxed), HoldWish::of(slot))).collect();
        let is_over = |pid: &u32, held: &mut HeldProgram| {
            let time = match places.get(pid) {
                Some(HoldWish::None) => return true,
                Some(_) if !held.is_large => return true,
                Some(HoldWish::UntilManaged) => ENGAGE_TIMEOUT,
                Some(HoldWish::UntilLooked) | None => HOLD_TIMEOUT,
            };
            held.since.elapsed() >= time
        };
        let over: Vec<_> = self.held.extract_if(is_over).collect();
        // One that is gone is told of by the wait.
        for (pid, held) in over {
            let _ = self.let_go(pid, held.remote);
        }
        for (pid, is_late) in asked {
            let is_awaited = matches!(places.get(&pid), Some(HoldWish::UntilManaged))
                || self.stopping.contains_key(&pid)
                || self.held.contains_key(&pid);
            if is_late || !is_awaited {
                self.stopper.let_go(pid);
            }
        }
    }

    fn forget_untraced(&mut self) {
        let is_over = |_: &u32, stopping: &mut Stopping| {
            if stopping.checked.elapsed() < TRACED_CHECK_INTERVAL {
                return false;
            }
            stopping.checked = Instant::now();
            // The program that its first thread has executed does not stop by what the one before
            // was told.
            stopping.seized.interrupt().is_err()
        };
        let over: Vec<_> = self.stopping.extract_if(is_over).collect();
        self.late.retain(|pid, _| is_traced_here(*pid));
        for (pid, stopping) in over {
            self.stopper.let_go(pid);
            self.done(pid, stopping.program, Err(Errno::AGAIN));
        }
    }

    fn let_go(&mut self, pid: u32, remote: Remote) -> Result<(), Errno> {
        let released = remote.release();
        self.stopper.let_go(pid);
        // It may have executed another program, which no wait tells: then it is traced no more.
        if remote.is_late() && is_traced_here(pid) {
            self.late.insert(pid, remote);
        }
        released
    }

    /// Traces and interrupts the programs that the finder has named, and the threads of those that
    /// are about to be managed.
    pub(crate) fn begin_named(&mut self) {
        self.mailbox.wake.clear();
        while let Ok(word) = self.mailbox.words.try_recv() {
            match (word, &mut self.postponed) {
                (TracerWord::Named(candidate), Some(postponed)) => postponed.push(candidate),
                (TracerWord::Named(candidate), None) => self.begin_one(candidate),
                (TracerWord::Engaged(pid), _) => self.stopper.stop(pid, true, ENGAGED_TIMEOUT),
            }
        }
    }

    fn begin_one(&mut self, Candidate { pid, program }: Candidate) {
        if let Err(errno) = self.read_image() {
            return self.done(pid, program, Err(errno));
        }
        if !self.is_permitted(pid) {
            return self.done(pid, program, Err(Errno::ACCESS));
        }
        // To trace it could wait for what only this thread does.
        if self.stopper.is_busy(pid) {
            return self.done(pid, program, Err(Errno::AGAIN));
        }
        match self.act(|| Seized::seize(pid)) {
            Ok(seized) => {
                // The program that had this number is gone, or it would have a tracer.
                self.held.remove(&pid);
                self.late.remove(&pid);
                // One that is gone is told of by the wait.
                let _ = seized.interrupt();
                self.stop_running(pid);
                let checked = Instant::now();
                self.stopping.insert(pid, Stopping { seized, program, checked });
            }
            // Not by a debugger.
            Err(Errno::PERM) if self.stopper.may_trace(pid) => {
                self.done(pid, program, Err(Errno::AGAIN));
            }
            Err(errno) => self.done(pid, program, Err(errno)),
        }
    }

    /// Processes that have stopped by a signal, which [`Tracer::stopper_changed`] took for threads
    /// that the stopper traces: the number, and the signal.
    pub(crate) fn take_untold(&self) -> Vec<(u32, u32)> {
        self.stopper.take_untold()
    }

    /// The wait has reported a change. True if it was a stop of a thread that the stopper traces.
    pub(crate) fn stopper_changed(&mut self, tid: u32, stop: TraceeStop) -> bool {
        let is_one = self.stopper.changed(tid, stop);
        // The first thread that was about to stop is gone: another one has executed a program.
        if is_one && let Some(Stopping { program, .. }) = self.stopping.remove(&tid) {
            self.done(tid, program, Err(Errno::AGAIN));
        }
        is_one
    }

    /// The wait has reported a change of a process that [`Tracer::has`]. True if it was one of a
    /// program that is traced, and dealt with.
    pub(crate) fn changed(&mut self, pid: u32, stop: TraceeStop, segment: &Segment) -> bool {
        if stop == TraceeStop::Gone {
            self.held.remove(&pid);
            self.late.remove(&pid);
            self.stopper.let_go(pid);
        }
        if let Some(remote) = self.late.remove(&pid) {
            return self.let_go(pid, remote) != Err(Errno::SRCH);
        }
        let Some(Stopping { seized, program, .. }) = self.stopping.remove(&pid) else {
            return false;
        };
        let result = match stop {
            TraceeStop::Still => self.give(pid, &seized, program, segment),
            TraceeStop::Stopped => {
                seized.release();
                Err(Errno::AGAIN)
            }
            TraceeStop::Gone => Err(Errno::SRCH),
            TraceeStop::Signal(_) | TraceeStop::Forked | TraceeStop::Executed => {
                let signal = if let TraceeStop::Signal(signal) = stop { signal } else { 0 };
                if seized.go_on(signal).is_err() {
                    // It was not traced any more: the change is one of a child.
                    self.done(pid, program, Err(Errno::AGAIN));
                    return false;
                }
                self.stopping.insert(pid, Stopping { seized, program, checked: Instant::now() });
                return true;
            }
        };
        if !self.held.contains_key(&pid) {
            self.stopper.let_go(pid);
        }
        self.done(pid, program, result);
        true
    }

    /// Stops the other threads of a program that run. One that was attached to may be held for
    /// long: its threads go on.
    fn stop_running(&mut self, pid: u32) {
        if self.takes != Takes::All {
            self.stopper.stop(pid, false, INJECTION_TIMEOUT);
        }
    }

    fn give(
        &mut self,
        pid: u32,
        seized: &Seized,
        program: ProgramIdentity,
        segment: &Segment,
    ) -> Result<(), Errno> {
        let info = proc_info(pid);
        let is_same = info.as_ref().and_then(ProgramIdentity::of) == Some(program);
        let is_forked = info.is_some_and(|info| !info.has_executed);
        let is_shared = is_forked && shares_memory(pid);
        let is_postponed = self.postponed.is_some();
        let is_wanted = !is_postponed
            && is_same
            && self.is_permitted(pid)
            && !is_shared
            && self.takes.has(pid)
            && !is_confined(pid, self.forks.is_filtered(pid))
            && is_numbered_here(pid);
        if is_wanted {
            // Those that have begun to run since.
            self.stop_running(pid);
        }
        let Some(image) = self.agent.image().filter(|_| is_wanted) else {
            seized.release();
            return Err(match is_same && !is_postponed {
                true if is_shared => Errno::BUSY,
                true => Errno::ACCESS,
                false => Errno::AGAIN,
            });
        };
        // What it reads of /proc may need the capability, before Linux 6.15.
        let remote = seized.stopped()?;
        let mut slots = segment.claimed().map(|(_, slot)| slot);
        if let Some(before) = slots.find(|slot| slot.pid.load(Relaxed) == pid) {
            before.agent.past_libc.store(0, Relaxed);
        }
        match self.act(|| put_in(&remote, image, &self.texts, is_forked)) {
            Ok(()) => {
                // One that was attached to is large for long.
                let is_large = self.takes != Takes::All
                    && anon_rss(pid).is_some_and(|bytes| bytes >= LOOKED_AT_BYTES);
                self.held.insert(pid, HeldProgram { remote, since: Instant::now(), is_large });
                Ok(())
            }
            Err(errno) => {
                let _ = self.let_go(pid, remote);
                // What it lacks it may lack for long.
                Err(if errno == Errno::AGAIN { Errno::NOMEM } else { errno })
            }
        }
    }

    fn done(&mut self, pid: u32, program: ProgramIdentity, result: Result<(), Errno>) {
        // Another thread of it has executed a program.
        let is_same = || proc_info(pid).is_some_and(|info| program.is_of(&info) && !info.zombie);
        let result =
            if result == Err(Errno::SRCH) && is_same() { Err(Errno::AGAIN) } else { result };
        // Another program by then, or it is stopped, or a debugger has it.
        let is_again = matches!(result, Err(Errno::AGAIN | Errno::PERM));
        if self.takes == Takes::All && result != Err(Errno::AGAIN) {
            self.outcomes.push((pid, result));
        }
        let _ = self.finder.send(FinderRequest::Done(pid, (!is_again).then_some(program)));
        if let Err(errno) = result
            && !matches!(errno, Errno::AGAIN | Errno::SRCH | Errno::BUSY)
            // It is tried again, and the run says so where that is in vain.
            && !(errno == Errno::PERM && self.takes == Takes::All)
            // One that ends cannot be traced, either.
            && proc_info(pid).as_ref().and_then(ProgramIdentity::of) == Some(program)
        {
            self.tell(format!(
                "process {pid} cannot be given the agent ({errno}): it is not managed"
            ));
        }
    }

    /// Reads the library, if that was not done.
    ///
    /// # Errors
    /// `AGAIN` where descriptors or memory are short; `ACCESS` where it cannot be used, which the
    /// user is told.
    fn read_image(&mut self) -> Result<(), Errno> {
        self.agent.read().map_err(|error| {
            if error.may_pass() {
                return Errno::AGAIN;
            }
            self.tell(format!("programs that load no library are not managed: {error}"));
            Errno::ACCESS
        })
    }

    fn tell(&mut self, what: String) {
        if !std::mem::replace(&mut self.note.has_told, true) {
            self.note.text = Some(what);
        }
    }
}

/// True for a process that runs on the memory of another one, as far as the kernel tells.
pub(crate) fn shares_memory(pid: u32) -> bool {
    let others = processes().unwrap_or_default().into_iter().filter(|info| info.pid != pid);
    others.into_iter().any(|info| same_memory(info.pid, pid))
}

/// True for a process in the pid namespace of this one: the number of a thread that it makes in
/// another one means another thread here.
pub(crate) fn is_numbered_here(pid: u32) -> bool {
    let namespace = |path: String| std::fs::read_link(path).ok();
    let theirs = namespace(format!("/proc/{pid}/ns/pid"));
    theirs.is_some() && theirs == namespace("/proc/self/ns/pid".into())
}

/// True for a process under more filters of system calls than this one: they could end it for what
/// it is made to call. The one that tells the supervisor of forks lets all pass that it is made to
/// call (`has_ours`).
pub(crate) fn is_confined(pid: u32, has_ours: bool) -> bool {
    let filters = |path: String| {
        let status = std::fs::read_to_string(path).ok()?;
        let word = |name| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().parse::<u32>().ok()
        };
        Some((word("Seccomp:")?, word("Seccomp_filters:")))
    };
    let theirs = filters(format!("/proc/{pid}/status"));
    let ours = filters("/proc/self/status".into());
    let with_one_more = ours.map(|(_, count)| (SECCOMP_MODE_FILTER, count.map(|n| n + 1)));
    // A process may be older than the filter of its ancestor.
    theirs != ours && !(has_ours && theirs == with_one_more)
}

/// In `/proc/PID/status`: a process under filters.
const SECCOMP_MODE_FILTER: u32 = 2;
