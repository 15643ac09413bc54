//! The fault servers of a process: how many there are, and how they are called and stopped.
//!
//! A server waits in a [`WaitSet`] of its own. The userfaultfd is in it, and in the handler's, as
//! [`Wakes::One`], the handler's first: a fault wakes the handler if it waits, else a server that
//! does. So one thread that faults is served by the handler as if there were no servers, and a
//! server wakes only for what comes while those before it are busy.
//!
//! That alone is not enough where one thread faults: the handler then stays runnable, in the idle
//! class, and does not wait ([`crate::sched::handler_cpu`]). So servers read only while several
//! threads fault in turns ([`crate::sched::handed::Concurrency`]). While they may not, they wait
//! on a futex word.
//!
//! Nor is it enough where CPUs are few: a server needs one, as the handler does, and the program
//! and reclaim need as much again. On fewer than [`MIN_CPUS`] they *pay*, and read, only while
//! faults wait for a disk now and then ([`FaultServers::pay`]).
//!
//! Owns: the descriptors and words by which handler and servers wake each other.
//!
//! Invariants
//! 1. A server that may not read waits on `turn` with the value that it had before it checked;
//!    the word is raised after whatever it waits for has changed. None is left waiting.
//! 2. Servers are quiesced as workers are: they count among the running ones, and stop at
//!    [`Engine::quiescent_point`](crate::engine::Engine::quiescent_point) between two faults.
//!
//! Locks: none.

use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release, Ordering::SeqCst,
};
use std::time::Duration;

use swaptide_sys::affinity::own_affinity;
use swaptide_sys::eventfd::EventFd;
use swaptide_sys::lock::futex;
use swaptide_sys::thread::{Tid, lives};
use swaptide_sys::uffd::Uffd;
use swaptide_sys::wait_set::{WaitSet, Wakes};
use swaptide_sys::{AsFd, Errno};

use crate::fault_injection::Injection;
use crate::mm::types::{FillerNo, MAX_FILLERS};
use crate::sched::handed::Handed;
use crate::sched::handler_cpu;

/// Servers of a process at most.
const MAX_SERVERS: u32 = MAX_FILLERS as u32 - 1;
/// Bytes of the limit for each server but the first.
const MIN_LIMIT_PER_SERVER: u64 = 64 << 20;
/// On fewer CPUs the handler serves faults from compressed memory alone: on two, it and a server
/// together served fewer than it did alone (docs/bench.md, "Threads").
const MIN_CPUS: u32 = 4;
/// Reads of the handler for which servers read as well after a thread that serves faults went to a
/// disk.
const DISK_READS: u32 = 32;
/// As many as a test wants, whatever the CPUs.
const FORCED_SERVERS: u32 = 3;

/// The sources of a wait set: bit numbers of its answer.
const UFFD: u32 = 0;
const SIGNAL: u32 = 1;
const REMOTE: u32 = 2;

struct ServerSignals {
    /// Wakes all servers.
    call: EventFd,
    /// Wakes the handler: something was handed over.
    handed: EventFd,
}

/// The fault servers of a process: their number, their thread ids, and the words and descriptors
/// that wake and stop them.
pub struct FaultServers {
    most: u32,
    /// There are CPUs for them, by the affinity of the process when its engine began.
    has_cpus: bool,
    /// The number of reads to come for which they pay although there are not. Each thread that
    /// serves faults raises it, the handler lowers it. One that raises it from 0 lets servers read
    /// under the memory lock, which orders the two ([`crate::engine::Engine::note_disk`]).
    disk_reads: AtomicU32,
    /// They serve however few threads fault.
    pub(crate) is_forced: bool,
    started: AtomicU32,
    /// One could not be started: no other is tried.
    refused: AtomicBool,
    /// One more is wanted: those that are there do not sleep.
    wanted: AtomicBool,
    tids: [AtomicU32; MAX_SERVERS as usize],
    /// On this word servers wait that may not read. Raised when they may. Together with `resting`
    /// SeqCst: a server counts itself before it compares the word, and [`FaultServers::admit`]
    /// raises the word before it looks at the count, so that one of the two sees the other.
    turn: AtomicU32,
    resting: AtomicU32,
    /// Something was handed over that the handler has not taken. Changed under the memory lock;
    /// the handler looks at it without, and then takes the lock.
    handed: AtomicBool,
    /// Made with the first server, and never freed; null before. Released by [`FaultServers::open`]
    /// and acquired by [`FaultServers::signals`].
    signals: AtomicPtr<ServerSignals>,
}

impl FaultServers {
    /// None is there yet. There may be as many as there are CPUs besides the one of the handler.
    pub(crate) fn new(injection: Injection) -> FaultServers {
        let cpus = own_affinity().map_or(1, |cpus| cpus.count());
        let most = cpus.saturating_sub(1).min(MAX_SERVERS);
        FaultServers {
            most: if injection.forces_servers() { FORCED_SERVERS } else { most },
            has_cpus: cpus >= MIN_CPUS,
            disk_reads: AtomicU32::new(0),
            is_forced: injection.forces_servers(),
            started: AtomicU32::new(0),
            refused: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            tids: [const { AtomicU32::new(0) }; MAX_SERVERS as usize],
            turn: AtomicU32::new(0),
            resting: AtomicU32::new(0),
            handed: AtomicBool::new(false),
            signals: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// In a forked child: it has none.
    pub(crate) fn forked(&self) {
        self.started.store(0, Relaxed);
        self.refused.store(false, Relaxed);
        self.wanted.store(false, Relaxed);
        self.tids.iter().for_each(|tid| tid.store(0, Relaxed));
        self.resting.store(0, Relaxed);
        self.disk_reads.store(0, Relaxed);
        self.handed.store(false, Relaxed);
        // Not freed: the numbers in it are the parent's.
        self.signals.store(std::ptr::null_mut(), Relaxed);
    }

    /// A thread that serves faults is about to wait for a disk. True if servers did not pay just
    /// before, and do now.
    pub(crate) fn note_disk(&self) -> bool {
        !self.has_cpus && self.disk_reads.swap(DISK_READS, Relaxed) == 0
    }

    /// The handler has read, whatever it found: true if servers pay. Called by the handler alone.
    pub(crate) fn pay(&self) -> bool {
        let left = self.disk_reads.load(Relaxed);
        if left > 0 {
            // What a server notes at this moment may be lost: then it is as if it had come sooner.
            self.disk_reads.store(left - 1, Relaxed);
        }
        self.has_cpus || left > 0
    }

    /// The number of servers started.
    pub(crate) fn started(&self) -> u32 {
        self.started.load(Relaxed)
    }

    /// True if another one is to be started, in a process with a limit of `limit` bytes: each has
    /// buffers.
    pub(crate) fn is_one_wanted(&self, limit: u64) -> bool {
        let started = self.started();
        let most = self.most.min((limit / MIN_LIMIT_PER_SERVER).max(1) as u32);
        started < if self.is_forced { self.most } else { most }
            && (started == 0 || self.is_forced || self.wanted.load(Relaxed))
            && !self.refused.load(Relaxed)
    }

    /// Those that are there find a fault whenever they look.
    pub(crate) fn want_another(&self) {
        self.wanted.store(true, Relaxed);
    }

    /// One is about to be started.
    pub(crate) fn count_started(&self) {
        self.wanted.store(false, Relaxed);
        self.started.fetch_add(1, Relaxed);
    }

    /// The one that was counted did not start.
    pub(crate) fn count_refused(&self) {
        self.started.fetch_sub(1, Relaxed);
        self.give_up();
    }

    /// No more can be started.
    pub(crate) fn give_up(&self) {
        self.refused.store(true, Relaxed);
    }

    /// A server runs as this thread. Gives its number among those that put pages in place.
    ///
    /// # Panics
    /// When there are more servers than are ever started.
    pub(crate) fn enlist(&self, tid: Tid) -> FillerNo {
        let is_taken =
            |place: &AtomicU32| place.compare_exchange(0, tid.0, Relaxed, Relaxed).is_ok();
        let at = self.tids.iter().position(is_taken).expect("a place for each server");
        FillerNo(at as u8 + 1)
    }

    /// False when one of them is gone.
    pub(crate) fn are_all_there(&self) -> bool {
        let tids = self.tids.iter().map(|tid| tid.load(Relaxed));
        tids.filter(|tid| *tid != 0).all(|tid| lives(Tid(tid)))
    }

    fn signals(&self) -> Option<&ServerSignals> {
        // SAFETY: null, or from a box that is never freed.
        unsafe { self.signals.load(Acquire).as_ref() }
    }

    /// Makes what they are called with, if it is not there; the handler's own sets.
    ///
    /// # Errors
    /// When a descriptor is refused.
    pub(crate) fn open(&self, uffd: &Uffd, remote: &EventFd) -> Result<HandlerSets, Errno> {
        if self.signals().is_none() {
            let signals = ServerSignals { call: EventFd::new()?, handed: EventFd::new()? };
            self.signals.store(Box::into_raw(Box::new(signals)), Release);
        }
        let signal = self.signals().map(|signals| signals.handed.as_fd());
        let signal = signal.ok_or(Errno::BADF)?;
        let sets = HandlerSets { messages: WaitSet::new()?, all: WaitSet::new()? };
        for set in [&sets.messages, &sets.all] {
            set.add(uffd.as_fd(), UFFD, Wakes::One)?;
            set.add(signal, SIGNAL, Wakes::All)?;
        }
        sets.all.add(remote.as_fd(), REMOTE, Wakes::All)?;
        Ok(sets)
    }

    /// Returns the wait set of a server.
    ///
    /// # Errors
    /// When a descriptor is refused.
    pub(crate) fn open_own(&self, uffd: &Uffd) -> Result<WaitSet, Errno> {
        let set = WaitSet::new()?;
        set.add(uffd.as_fd(), UFFD, Wakes::One)?;
        set.add(self.signals().ok_or(Errno::BADF)?.call.as_fd(), SIGNAL, Wakes::All)?;
        Ok(set)
    }

    /// Returns the value to give to [`FaultServers::rest`] if no work is found after this call.
    pub(crate) fn turn(&self) -> u32 {
        self.turn.load(Acquire)
    }

    /// A server waits until `turn` is past.
    pub(crate) fn rest(&self, turn: u32) {
        self.resting.fetch_add(1, SeqCst);
        futex::wait(&self.turn, turn, None, futex::Scope::Private);
        self.resting.fetch_sub(1, SeqCst);
    }

    /// Wakes resting servers: their condition has changed.
    pub(crate) fn admit(&self) {
        self.turn.fetch_add(1, SeqCst);
        if self.resting.load(SeqCst) != 0 {
            futex::wake(&self.turn, u32::MAX >> 1, futex::Scope::Private);
        }
    }

    /// Has all servers come to their quiescent point. To be called again until they are there.
    pub(crate) fn call(&self) {
        if let Some(signals) = self.signals() {
            signals.call.signal();
            self.admit();
        }
    }

    /// Ends [`FaultServers::call`]: all servers have reached their quiescent point.
    pub(crate) fn end_call(&self) {
        if let Some(signals) = self.signals() {
            signals.call.clear();
        }
    }

    /// Tells the handler that something was handed over, under the same hold of the memory lock:
    /// the handler takes it under one, and so takes what it was told of.
    pub(crate) fn tell(&self, _: &Handed) {
        if !self.handed.swap(true, AcqRel)
            && let Some(signals) = self.signals()
        {
            signals.handed.signal();
        }
        handler_cpu::leave_sched_idle();
    }

    /// True if something was handed over since the last call.
    pub(crate) fn is_told(&self) -> bool {
        self.handed.load(Acquire)
    }

    /// The handler takes what was handed over, under the same hold of the memory lock.
    pub(crate) fn end_telling(&self, _: &Handed) {
        if self.handed.swap(false, AcqRel)
            && let Some(signals) = self.signals()
        {
            signals.handed.clear();
        }
    }
}

/// The wait sets of the handler when there are servers.
pub(crate) struct HandlerSets {
    messages: WaitSet,
    /// Remote pages as well.
    all: WaitSet,
}

impl HandlerSets {
    /// Waits for a message, for what is handed over, and if `with_remote` for a remote page. True
    /// when there is something to read or to take.
    pub(crate) fn wait(&self, with_remote: bool, timeout: Option<Duration>) -> bool {
        let set = if with_remote { &self.all } else { &self.messages };
        // A wait that is refused must not keep the handler from reading.
        set.wait(timeout).map_or(true, |ready| ready & !(1 << REMOTE) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_as_many_as_busy_cpus_and_the_limit_allow() {
        let servers = FaultServers { most: 3, ..FaultServers::new(Injection::default()) };
        let large = 10 * MIN_LIMIT_PER_SERVER;
        assert!(servers.is_one_wanted(1), "the first needs no more than a crowd");
        servers.count_started();
        assert!(!servers.is_one_wanted(large), "it sleeps now and then");
        servers.want_another();
        assert!(servers.is_one_wanted(large) && !servers.is_one_wanted(MIN_LIMIT_PER_SERVER));
        servers.count_started();
        assert!(!servers.is_one_wanted(large), "that was one");
        servers.want_another();
        servers.count_started();
        servers.want_another();
        assert!(!servers.is_one_wanted(large), "no more CPUs");
        servers.forked();
        assert!(servers.is_one_wanted(large));
        servers.count_started();
        servers.count_refused();
        assert_eq!((servers.started(), servers.is_one_wanted(large)), (0, false));
    }

    #[test]
    fn on_few_cpus_servers_pay_while_faults_wait_for_a_disk() {
        let few = FaultServers { has_cpus: false, ..FaultServers::new(Injection::default()) };
        assert!(!few.pay());
        assert!(few.note_disk() && !few.note_disk(), "told once");
        assert!((0..DISK_READS).all(|_| few.pay()));
        assert!(!few.pay() && few.note_disk());
        few.forked();
        assert!(!few.pay());
        let many = FaultServers { has_cpus: true, ..FaultServers::new(Injection::default()) };
        assert!(many.pay() && !many.note_disk(), "they pay all the time");
    }

    #[test]
    fn resting_server_woken_by_later_request() {
        let servers = FaultServers::new(Injection::default());
        let (looks, goes) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while goes.load(Acquire) < 10_000 {
                    let turn = servers.turn();
                    let seen = goes.load(Acquire);
                    looks.store(seen + 1, Release);
                    if goes.load(Acquire) == seen {
                        servers.rest(turn);
                    }
                }
            });
            // Each is raised when the server has looked at the one before, and so may rest: one
            // wake-up that is lost ends the test by its time.
            for go in 1..=10_000 {
                while looks.load(Acquire) < go {
                    std::hint::spin_loop();
                }
                goes.store(go, Release);
                servers.admit();
            }
        });
    }
}
