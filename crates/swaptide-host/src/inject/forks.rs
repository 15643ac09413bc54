//! Forks of programs that load no library: held until everything of the process is in.
//!
//! Owns the filters by which the supervisor is told of forks of such programs
//! (`swaptide_sys::fork_filter`), the connections that show which of their agents live, and the
//! forks under way.
//!
//! | stage | until |
//! |---|---|
//! | `Held` | the process says that everything is in ([`swaptide_ipc::AgentWords::fork_held`]); then the call is made |
//! | `Made` | its child is there, or the thread is seen outside of the call, or [`LOST_TIMEOUT`] is over |
//!
//! Invariants
//! 1. A call is made only while its process holds everything, or manages nothing. If that does not
//!    come about in [`HOLD_TIMEOUT`], or what is out does not fit into memory, the call fails.
//! 2. A process holds everything until none of its threads is in such a call, as far as that can be
//!    seen.
//! 3. What a process has said counts while its agent's connection is open: the kernel closes it
//!    when the process executes another program or ends.
//! 4. Nothing that a process sends is waited for: it may read its filter itself.
//!
//! Locks: none.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed};
use std::time::{Duration, Instant};

use swaptide_ipc::{ProcSlot, ProcState, Segment, SlotIndex};
use swaptide_sys::Errno;
use swaptide_sys::fork_filter::{FilterState, ForkFilter, WaitingFork};
use swaptide_sys::process::{
    CallOfThread, call_of, proc_info, process_of, processes, same_memory, ticks_since_boot,
};
use swaptide_sys::sock::poll_readable;
use swaptide_sys::wait_set::{WaitSet, Wakes};

use crate::client_conn::{ClientConn, bounded};
use crate::control::agent_api::NewFilter;
use crate::control::filter_offers::{FilteredProcess, OfferedFilters};
use crate::memctl::controller::detach::fits_for_fork;

/// The time in which everything of a process comes in.
const HOLD_TIMEOUT: Duration = Duration::from_secs(60);
/// Of a fork that neither made a child nor was seen to fail.
const LOST_TIMEOUT: Duration = Duration::from_secs(5);
/// A process that is stopped for longer brings nothing in: that time does not count.
const STOP_CHECK_TIME: Duration = Duration::from_secs(1);
/// Between two looks at forks under way, and at those that have just begun.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
const QUICK_INTERVAL: Duration = Duration::from_micros(100);
const QUICK_TIME: Duration = Duration::from_millis(5);
/// Filters that are read; a program that comes with one more is not managed.
const MAX_FILTERS: usize = 4096;
/// A filter from which was read in vain so often has another reader.
const MAX_READS_IN_VAIN: u32 = 3;
/// Ancestors of a process that are looked at.
const MAX_GENERATIONS: usize = 64;

/// An agent that has a filter, or is under one.
struct FilteredAgent {
    /// Open while it lives.
    client: ClientConn,
    /// The number of the agent.
    serial: u64,
    /// What its process was ordered to hold for.
    order: Option<u32>,
}

impl FilteredAgent {
    fn lives(&self) -> bool {
        // One that could not be looked at is not known to have ended.
        !matches!(poll_readable(&[self.client.as_fd()], Some(Duration::ZERO)), Ok(1..))
    }
}

struct ReadFilter {
    filter: Arc<ForkFilter>,
    in_vain: u32,
}

enum HoldStage {
    Held,
    /// The children that the thread had before.
    Made(Vec<u32>),
}

struct HeldFork {
    filter: Arc<ForkFilter>,
    waiting: WaitingFork,
    /// The process that the thread is of, and the one whose memory that is.
    pid: u32,
    host: u32,
    serial: u64,
    slot: SlotIndex,
    stage: HoldStage,
    since: Instant,
    is_over: bool,
}

impl HeldFork {
    /// Looks whether the next stage is reached. `agent`: the one that it waits for, if that lives.
    fn look(&mut self, words: &ProcSlot, agent: Option<&FilteredAgent>) {
        match &self.stage {
            _ if self.is_over => {}
            HoldStage::Held => self.look_held(words, agent),
            HoldStage::Made(before) => {
                let is_seen = match call_of(self.waiting.tid) {
                    CallOfThread::Gone | CallOfThread::Other => true,
                    CallOfThread::Fork => false,
                    CallOfThread::Unknown => {
                        self.children().iter().any(|child| !before.contains(child))
                    }
                };
                self.is_over = is_seen || self.since.elapsed() > LOST_TIMEOUT;
            }
        }
    }

    fn look_held(&mut self, words: &ProcSlot, agent: Option<&FilteredAgent>) {
        let held = Some(words.agent.fork_held.load(Acquire));
        if agent.is_none_or(|agent| agent.order == held || !is_managed(words, self.host)) {
            let before = self.children();
            (self.stage, self.since) = (HoldStage::Made(before), Instant::now());
            // One that is gone has no child.
            self.is_over = self.filter.let_go(self.waiting).is_err();
        } else if self.since.elapsed() > STOP_CHECK_TIME
            && proc_info(self.host).is_some_and(|info| info.stopped)
        {
            self.since = Instant::now();
        } else if self.since.elapsed() > HOLD_TIMEOUT {
            let _ = self.filter.refuse(self.waiting, Errno::AGAIN);
            self.is_over = true;
        }
    }

    fn children(&self) -> Vec<u32> {
        let path = format!("/proc/{}/task/{}/children", self.pid, self.waiting.tid);
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
    }
}

/// The forks under way.
#[derive(Default)]
pub(crate) struct HeldForks {
    /// All filters.
    set: Option<WaitSet>,
    filters: Vec<ReadFilter>,
    forks: Vec<HeldFork>,
    agents: HashMap<u32, FilteredAgent>,
    /// Processes that are under a filter: so is what they have started since.
    filtered: HashMap<u32, FilteredProcess>,
    last_serial: u64,
    last_order: u32,
    /// Another supervisor is about to read the filters.
    is_lent: bool,
}

impl HeldForks {
    /// An agent's filter, or its word that it is under one. It is answered if that is right, and
    /// read.
    pub(crate) fn add(&mut self, new: NewFilter) {
        let NewFilter { pid, filter, client } = new;
        match filter.map(ForkFilter::from_fd) {
            None if self.is_filtered(pid) => {}
            Some(filter) if self.filters.len() < MAX_FILTERS && self.wait_for(&filter) => {
                self.filters.push(ReadFilter { filter: Arc::new(filter), in_vain: 0 });
            }
            _ => return,
        }
        // One more: it was set a moment ago.
        self.note_filtered(pid, Some(ticks_since_boot() + 1));
        // One that is gone needs no answer.
        if client.send(&[swaptide_ipc::AgentRequest::Filter as u8], &[]).is_ok() {
            self.agents.retain(|_, agent| agent.lives());
            self.last_serial += 1;
            let agent = FilteredAgent { client, serial: self.last_serial, order: None };
            self.agents.insert(pid, agent);
        }
    }

    /// Reads filters that another supervisor has had.
    ///
    /// # Errors
    /// Without a descriptor to wait for them.
    pub(crate) fn take_over(&mut self, offered: OfferedFilters) -> Result<(), Errno> {
        for filter in offered.filters.into_iter().map(ForkFilter::from_fd) {
            if !self.wait_for(&filter) {
                return Err(Errno::MFILE);
            }
            self.filters.push(ReadFilter { filter: Arc::new(filter), in_vain: 0 });
        }
        self.filtered.extend(offered.processes.into_iter().map(|known| (known.pid, known)));
        Ok(())
    }

    /// The filters, for another supervisor. They are not read any more.
    ///
    /// # Errors
    /// Without descriptors for them: they are read as before.
    pub(crate) fn lend(&mut self) -> Result<OfferedFilters, Errno> {
        let copy = |read: &ReadFilter| rustix::io::fcntl_dupfd_cloexec(&*read.filter, 3);
        let filters = self.filters.iter().map(copy).collect::<Result<_, Errno>>()?;
        let processes = self.filtered.values().copied().collect();
        self.is_lent = true;
        Ok(OfferedFilters { filters, processes })
    }

    /// True while another supervisor has them and has not confirmed that it reads them.
    pub(crate) fn is_lent(&self) -> bool {
        self.is_lent
    }

    /// The other supervisor has not taken them.
    pub(crate) fn take_back(&mut self) {
        self.is_lent = false;
    }

    /// They are another supervisor's. What was read of them is answered.
    pub(crate) fn give_up(&mut self) {
        (self.set, self.is_lent) = (None, false);
        self.filters.clear();
        self.filtered.clear();
    }

    /// Notes all processes that descend from one under a filter: their parents may end.
    pub(crate) fn note_descendants(&mut self) {
        if self.filters.is_empty() {
            return;
        }
        for info in processes().unwrap_or_default() {
            if !self.filtered.contains_key(&info.pid) && self.is_filtered(info.pid) {
                self.note_filtered(info.pid, None);
            }
        }
    }

    /// True while a process may fork under a filter that this supervisor reads.
    pub(crate) fn has_filters(&self) -> bool {
        !self.filters.is_empty()
    }

    /// True while a thread waits for the answer to what was read.
    pub(crate) fn has_forks(&self) -> bool {
        !self.forks.is_empty()
    }

    fn wait_for(&mut self, filter: &ForkFilter) -> bool {
        if self.set.is_none() {
            self.set = WaitSet::new().ok();
        }
        self.set.as_ref().is_some_and(|set| set.add(filter.as_fd(), 0, Wakes::All).is_ok())
    }

    /// A process is under a filter, since the tick `since`; without, as long as it is there.
    fn note_filtered(&mut self, pid: u32, since: Option<u64>) {
        if self.filtered.len() > MAX_FILTERS {
            let lives = |pid: &u32, known: &mut FilteredProcess| {
                proc_info(*pid).is_some_and(|info| info.start_time == known.began)
            };
            self.filtered.retain(lives);
        }
        if let Some(info) = proc_info(pid) {
            let began = info.start_time;
            let new = FilteredProcess { pid, began, since: since.unwrap_or(began) };
            let known = self.filtered.entry(pid).or_insert(new);
            if known.began != began {
                *known = new;
            }
        }
    }

    /// True for a process that is under one of the filters, as far as is known: it, or one that it
    /// descends from, has set it or has forked under it.
    pub(crate) fn is_filtered(&self, pid: u32) -> bool {
        let (mut at, mut began) = (pid, u64::MAX);
        for _ in 0..MAX_GENERATIONS {
            let Some(info) = proc_info(at) else { return false };
            let known = self.filtered.get(&at).filter(|known| known.began == info.start_time);
            if let Some(known) = known {
                return began >= known.since;
            }
            (at, began) = (info.ppid, info.start_time);
        }
        false
    }

    /// Readable when a thread waits.
    pub(crate) fn awaited(&self) -> Option<BorrowedFd<'_>> {
        self.set.as_ref().filter(|_| !self.is_lent).map(|set| set.as_fd())
    }

    /// The longest time until the next [`HeldForks::attend`].
    pub(crate) fn timeout(&self) -> Option<Duration> {
        let is_young = |fork: &HeldFork| fork.since.elapsed() < QUICK_TIME;
        let interval = if self.forks.iter().any(is_young) { QUICK_INTERVAL } else { LOOK_INTERVAL };
        (!self.forks.is_empty()).then_some(interval)
    }

    /// Takes in the threads that wait, and lets those go that may fork, and those that have.
    pub(crate) fn attend(&mut self, segment: &Segment) {
        let set = self.set.as_ref().filter(|_| !self.is_lent);
        if set.is_some_and(|set| set.wait(Some(Duration::ZERO)) != Ok(0)) {
            self.read(segment);
        }
        for fork in &mut self.forks {
            let agent = self.agents.get(&fork.host).filter(|agent| agent.serial == fork.serial);
            let agent = agent.filter(|agent| agent.lives());
            fork.look(segment.slot(fork.slot), agent);
        }
        self.forget_done(segment);
    }

    fn read(&mut self, segment: &Segment) {
        let states = ForkFilter::look(self.filters.iter().map(|read| &*read.filter));
        let mut waiting = Vec::new();
        for (read, state) in self.filters.iter_mut().zip(&states) {
            if *state == FilterState::Waiting {
                match bounded(|| read.filter.next()) {
                    Ok(fork) => {
                        read.in_vain = 0;
                        waiting.push((Arc::clone(&read.filter), fork));
                    }
                    // It was killed, or another one reads.
                    Err(_) => read.in_vain += 1,
                }
            }
        }
        let set = &self.set;
        let mut states = states.into_iter();
        self.filters.retain(|read| {
            let is_over = states.next() == Some(FilterState::Ended);
            let stays = !is_over && read.in_vain < MAX_READS_IN_VAIN;
            if !stays {
                let _ = set.as_ref().map(|set| set.remove(read.filter.as_fd()));
            }
            stays
        });
        waiting.into_iter().for_each(|(filter, fork)| self.begin(segment, filter, fork));
    }

    /// The process whose agent has the memory of process `pid`.
    fn host_of(&self, pid: u32) -> Option<u32> {
        let mut at = pid;
        for _ in 0..MAX_GENERATIONS {
            if self.agents.get(&at).is_some_and(FilteredAgent::lives) {
                return Some(at);
            }
            let parent = proc_info(at)?.ppid;
            if !same_memory(parent, at) {
                return None;
            }
            at = parent;
        }
        None
    }

    fn begin(&mut self, segment: &Segment, filter: Arc<ForkFilter>, waiting: WaitingFork) {
        let pid = process_of(waiting.tid).unwrap_or(0);
        if pid == 0 && process_of(std::process::id()).is_none() {
            // No descriptor is free to look at it.
            let _ = filter.refuse(waiting, Errno::AGAIN);
            return;
        }
        self.note_filtered(pid, None);
        for fork in &mut self.forks {
            // Its last fork is over.
            fork.is_over |= fork.waiting.tid == waiting.tid;
        }
        let host = self.host_of(pid);
        let managed = host.and_then(|host| {
            segment.claimed().find(|(_, words)| is_managed(words, host)).map(|found| (host, found))
        });
        let Some((host, (slot, words))) = managed else {
            // One that ends is gone, which is no matter.
            let _ = filter.let_go(waiting);
            return;
        };
        if !fits_for_fork(words) {
            let _ = filter.refuse(waiting, Errno::NOMEM);
            return;
        }
        let Some(agent) = self.agents.get_mut(&host) else { return };
        let order = *agent.order.get_or_insert_with(|| {
            self.last_order = self.last_order.wrapping_add(1).max(1);
            self.last_order
        });
        if words.control.fork_hold.load(Relaxed) != order {
            words.hold_for_fork(order);
        }
        let (serial, stage, since) = (agent.serial, HoldStage::Held, Instant::now());
        let is_over = false;
        let fork = HeldFork { filter, waiting, pid, host, serial, slot, stage, since, is_over };
        self.forks.push(fork);
    }

    /// Ends the orders of processes that have no fork under way.
    fn forget_done(&mut self, segment: &Segment) {
        let done: Vec<HeldFork> = self.forks.extract_if(.., |fork| fork.is_over).collect();
        for fork in done {
            if let HoldStage::Made(before) = &fork.stage {
                let children = fork.children();
                let new = children.into_iter().filter(|child| !before.contains(child));
                new.for_each(|child| self.note_filtered(child, None));
            }
            let HeldFork { host, serial, slot, .. } = fork;
            if self.forks.iter().any(|other| other.serial == serial) {
                continue;
            }
            let agent = self.agents.get_mut(&host).filter(|agent| agent.serial == serial);
            let order = agent.and_then(|agent| agent.order.take());
            let words = segment.slot(slot);
            if order.is_some() && order == Some(words.control.fork_hold.load(Relaxed)) {
                words.hold_for_fork(0);
            }
        }
    }
}

/// True for the place of a process whose agent holds forks, and may manage it.
fn is_managed(words: &ProcSlot, pid: u32) -> bool {
    words.pid.load(Relaxed) == pid
        && words.agent.past_libc.load(Acquire) != 0
        && matches!(words.state(), ProcState::Watching | ProcState::Engaged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_sys::sock::Conn;

    #[test]
    fn word_of_process_under_no_filter_is_not_believed() {
        let mut forks = HeldForks::default();
        let pid = std::process::id();
        let (client, peer) = Conn::pair().unwrap();
        forks.add(NewFilter { pid, filter: None, client: ClientConn::new(client) });
        assert_eq!(peer.recv(&mut [0u8; 8], &mut []).unwrap().0, 0, "it is hung up on");
        assert!(forks.agents.is_empty() && !forks.is_filtered(pid));
        // One whose parent is under a filter is so, too.
        let parent = std::os::unix::process::parent_id();
        forks.note_filtered(parent, None);
        let (client, peer) = Conn::pair().unwrap();
        forks.add(NewFilter { pid, filter: None, client: ClientConn::new(client) });
        assert_eq!(peer.recv(&mut [0u8; 8], &mut []).unwrap().0, 1, "it is answered");
        assert!(forks.agents[&pid].lives());
        drop(peer);
        assert!(!forks.agents[&pid].lives(), "its end closes the connection");
    }
}
