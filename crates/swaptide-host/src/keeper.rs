//! The thread that keeps a tree within its budget.
//!
//! Owns the members ([`Tree`]), the supervisor's side of every process slot, the totals of processes that are gone, and the swap
//! file's holes. Each tick it reads what everybody uses, lets [`budget::decide`] judge, and carries out the decision through the
//! segment: `limit_bytes`, `wanted`, and the bell.
//!
//! Invariants
//! 1. A slot is released after its process is gone; its counters go into the totals first.
//! 2. The file's bytes are freed only while their extent is kept from everybody ([`Segment::while_unheld`]).
//!
//! Locks: none; the rest of the supervisor talks to the thread through a channel.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use swaptide_ipc::{Counter, EXTENT_BYTES, ProcSlot, ProcState, Segment, SlotIndex};
use swaptide_sys::PAGE_SIZE;

use crate::areas::Areas;
use crate::budget::{self, Process, Standing};
use crate::report::{ProcessView, Totals, View};
use crate::tree::Tree;

/// What the keeper is asked.
pub enum Request {
    /// A process joined: look at it now.
    Joined(u32),
    /// Look once more and tell the totals so far.
    Totals(Sender<Totals>),
    /// Look once more and tell how everything is.
    View(Sender<View>),
    /// End.
    Stop,
}

/// What the keeper knows of a slot between two ticks.
struct Watch {
    pid: u32,
    moved_pages: u64,
    pressure: u64,
    used: u64,
}

/// The keeper.
pub struct Keeper {
    segment: &'static Segment,
    areas: Arc<Areas>,
    budget: u64,
    strict: bool,
    tree: Tree,
    watches: HashMap<SlotIndex, Watch>,
    refused: std::collections::HashSet<u32>,
    gone: Totals,
    last_tick: Instant,
    swap_full: u64,
}

impl Keeper {
    /// A keeper of the tree under process `root`.
    pub fn new(root: u32, segment: &'static Segment, areas: Arc<Areas>, budget: u64, strict: bool) -> Keeper {
        Keeper {
            segment,
            areas,
            budget,
            strict,
            tree: Tree::new(root),
            watches: HashMap::new(),
            refused: Default::default(),
            gone: Totals::default(),
            last_tick: Instant::now(),
            swap_full: 0,
        }
    }

    /// The thread: ticks until it is told to stop or nobody is left to tell it.
    pub fn run(mut self, requests: Receiver<Request>) {
        // It only looks, but it must look in time. Without the privilege it is a thread like others.
        let _ = swaptide_sys::affinity::set_own_nice(-10);
        let mut interval = Duration::ZERO;
        loop {
            match requests.recv_timeout(interval) {
                Ok(Request::Joined(pid)) => drop(self.tree.admit(pid)),
                Ok(Request::Totals(answer)) => {
                    self.tick();
                    // Who asked may have stopped waiting.
                    let _ = answer.send(self.totals());
                    continue;
                }
                Ok(Request::View(answer)) => {
                    self.tick();
                    let _ = answer.send(self.view());
                    continue;
                }
                Ok(Request::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
            interval = self.tick();
        }
    }

    /// One look at everything; answers with the time until the next.
    fn tick(&mut self) -> Duration {
        let elapsed = self.last_tick.elapsed();
        self.last_tick = Instant::now();
        let slots: HashMap<u32, SlotIndex> =
            self.segment.claimed().map(|(index, slot)| (slot.pid.load(Relaxed), index)).collect();
        self.tree.look();
        for pid in slots.keys() {
            self.tree.admit(*pid);
        }
        self.tree.sample();
        for pid in self.tree.leaderless() {
            // If nobody else is left but who hears this, it ends the process.
            if let Some(slot) = slots.get(&pid) {
                self.segment.slot(*slot).tell_leaderless();
            }
        }
        let members: Vec<(u32, Option<SlotIndex>)> = self.tree.pids().map(|pid| (pid, slots.get(&pid).copied())).collect();
        let processes: Vec<Process> = members.iter().map(|(pid, slot)| self.judge(*pid, *slot, elapsed)).collect();
        for (pid, slot) in &slots {
            if !self.tree.contains(*pid) {
                self.release(*slot);
            }
        }
        self.measure(&processes, &members);
        let decision = budget::decide(self.budget, &processes, elapsed);
        for (at, limit) in decision.limits {
            if let Some(slot) = members[at].1.map(|index| self.segment.slot(index)) {
                command(slot, limit, decision.engage.contains(&at));
            }
        }
        if self.strict {
            self.enforce(&processes);
        }
        budget::interval(self.budget, &processes)
    }

    fn judge(&mut self, pid: u32, slot: Option<SlotIndex>, elapsed: Duration) -> Process {
        let used = self.tree.used(pid);
        let Some(index) = slot else { return Process { standing: Standing::Beyond, used, pressure: 0, limit: 0, growth: 0 } };
        let slot = self.segment.slot(index);
        let standing = match (slot.state(), slot.wanted.load(Relaxed)) {
            (ProcState::Engaged, _) => Standing::Engaged,
            (ProcState::Watching, 0) => Standing::Watching,
            (ProcState::Watching, _) => Standing::Engaged,
            (ProcState::Refused | ProcState::Free, _) => Standing::Beyond,
        };
        if slot.state() == ProcState::Refused && self.refused.insert(pid) {
            self.gone.refused += 1;
        }
        let moved: u64 =
            [Counter::WorkingsetRefault, Counter::Pgsteal].iter().map(|c| slot.counters[*c as usize].load(Relaxed)).sum();
        let watch = self.watches.entry(index).or_insert(Watch { pid, moved_pages: moved, pressure: 0, used });
        if watch.pid != pid {
            *watch = Watch { pid, moved_pages: moved, pressure: 0, used };
        }
        let bytes = moved.saturating_sub(watch.moved_pages) * PAGE_SIZE as u64;
        watch.moved_pages = moved;
        let rate = bytes as f64 / elapsed.as_secs_f64().max(1e-4);
        watch.pressure = budget::smooth(watch.pressure, rate as u64, elapsed);
        let grown = used.saturating_sub(std::mem::replace(&mut watch.used, used));
        let growth = if standing == Standing::Watching { grown as f64 / elapsed.as_secs_f64().max(1e-4) } else { 0.0 };
        Process { standing, used, pressure: watch.pressure, limit: slot.limit_bytes.load(Relaxed), growth: growth as u64 }
    }

    fn measure(&mut self, processes: &[Process], members: &[(u32, Option<SlotIndex>)]) {
        let resident: u64 = processes.iter().map(|p| p.used).sum();
        let (mut footprint, mut pool) = (0, 0);
        for (process, (_, slot)) in processes.iter().zip(members) {
            let Some(slot) = slot.map(|index| self.segment.slot(index)) else {
                footprint += process.used;
                continue;
            };
            let own = [&slot.pool_bytes, &slot.staging_bytes, &slot.overhead_bytes].map(|word| word.load(Relaxed));
            let swapped = slot.swapped_pool_bytes.load(Relaxed) + slot.swapped_file_bytes.load(Relaxed);
            footprint += process.used.saturating_sub(own.iter().sum()) + swapped;
            pool += own[0];
        }
        self.areas.measure();
        self.gone.peak_resident = self.gone.peak_resident.max(resident);
        self.gone.peak_footprint = self.gone.peak_footprint.max(footprint);
        self.gone.peak_pool = self.gone.peak_pool.max(pool);
    }

    /// `--strict`: swap space is out and the budget is exceeded.
    fn enforce(&mut self, processes: &[Process]) {
        let used: u64 = processes.iter().map(|p| p.used).sum();
        let full = self.totals().get(Counter::SwapFull);
        if full > self.swap_full && used > self.budget + self.budget / 20 {
            self.gone.strict_kill = true;
            self.tree.kill_all();
        }
        if used <= self.budget {
            self.swap_full = full;
        }
    }

    /// All but what the keeper does not know: the run's number, name and age.
    fn view(&self) -> View {
        let totals = self.totals();
        let slots: HashMap<u32, &ProcSlot> = self.segment.claimed().map(|(_, slot)| (slot.pid.load(Relaxed), slot)).collect();
        let process = |pid: u32| {
            let resident_bytes = self.tree.used(pid);
            let Some(slot) = slots.get(&pid) else {
                return ProcessView { pid, state: "unmanaged".into(), resident_bytes, ..ProcessView::default() };
            };
            let state = match slot.state() {
                ProcState::Engaged => "engaged",
                ProcState::Watching => "watching",
                ProcState::Refused | ProcState::Free => "unmanaged",
            };
            ProcessView {
                pid,
                state: state.into(),
                limit_bytes: slot.limit_bytes.load(Relaxed),
                resident_bytes,
                pool_bytes: slot.pool_bytes.load(Relaxed),
                swapped_pool_bytes: slot.swapped_pool_bytes.load(Relaxed),
                swapped_file_bytes: slot.swapped_file_bytes.load(Relaxed),
            }
        };
        let processes: Vec<ProcessView> = self.tree.pids().map(process).collect();
        View {
            budget_bytes: self.budget,
            resident_bytes: processes.iter().map(|process| process.resident_bytes).sum(),
            peak_resident_bytes: totals.peak_resident,
            peak_footprint_bytes: totals.peak_footprint,
            file_bytes: u64::from(self.segment.extents_used()) * EXTENT_BYTES,
            processes,
            stats: Counter::ALL.iter().map(|counter| (counter.name().to_owned(), totals.get(*counter))).collect(),
            fault_us: totals.fault_times(),
            ..View::default()
        }
    }

    fn totals(&self) -> Totals {
        let mut totals = self.gone.clone();
        totals.areas = self.areas.view().into_iter().map(|(_, view)| view).collect();
        for (_, slot) in self.segment.claimed() {
            totals.add(slot);
        }
        totals
    }

    fn release(&mut self, index: SlotIndex) {
        self.gone.add(self.segment.slot(index));
        self.watches.remove(&index);
        let mut freed = Vec::new();
        self.segment.release(index, |extent| freed.push(extent));
        for extent in freed {
            self.segment.while_unheld(extent, || self.areas.punch(extent));
        }
    }
}

/// Carries a limit over to a process, if it is news, and asks it to be managed, if it was not yet.
fn command(slot: &ProcSlot, limit: u64, engage: bool) {
    let old = slot.limit_bytes.load(Relaxed);
    if engage || old.abs_diff(limit) > old / 100 {
        slot.limit_bytes.store(limit, Relaxed);
        if engage {
            slot.wanted.store(1, Relaxed);
        }
        // The bell's release makes both stores visible to who wakes.
        slot.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::segment;
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::process::{Child, Command, Stdio};
    use swaptide_ipc::{AreaId, AreaMask};

    fn no_areas(segment: &'static Segment) -> Arc<Areas> {
        Arc::new(Areas::new(segment))
    }

    fn sleeper() -> Child {
        Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().expect("sleep")
    }

    fn end(mut child: Child) {
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn a_process_that_dies_leaves_its_counters_and_no_extent() {
        let segment = segment();
        let areas = no_areas(segment);
        let device = crate::device::parse("file:/var/tmp:16M").expect("a device");
        areas.add(crate::device::open_beyond(&device, 1 << 30).expect("a file")).expect("an area");
        let file = File::from(areas.open(AreaId(0)).expect("open"));
        let child = sleeper();
        let index = segment.claim(child.id(), 0).expect("slot");
        segment.lease_extent(index, AreaMask::ALL).expect("extent");
        let page = swaptide_sys::mem::Mapping::reserve(65536).expect("pages");
        // SAFETY: the mapping is so long and readable, and nothing else refers to it.
        file.write_all_at(unsafe { std::slice::from_raw_parts(page.as_ptr(), 65536) }, 0).expect("write");
        file.sync_all().expect("sync");
        assert!(file.metadata().expect("metadata").blocks() > 0);
        segment.slot(index).count(Counter::Pswpout, 16);
        let mut keeper = Keeper::new(child.id(), segment, areas, 64 << 20, false);
        keeper.tick();
        assert_eq!(keeper.totals().get(Counter::Pswpout), 16);
        assert_eq!(segment.extents_used(), 1);
        end(child);
        keeper.tick();
        assert_eq!(keeper.totals().get(Counter::Pswpout), 16, "the dead are counted once");
        assert_eq!(segment.extents_used(), 0);
        assert_eq!(file.metadata().expect("metadata").blocks(), 0, "the space is free again");
        assert_eq!(segment.claimed().count(), 0);
    }

    #[test]
    fn a_process_that_fills_the_budget_is_asked_to_be_managed_and_gets_a_limit() {
        let mut child = Command::new("python3")
            .args(["-c", "import sys; x=b'x'*(60<<20); print(flush=True); sys.stdin.read()"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 is needed for this test");
        std::io::Read::read_exact(child.stdout.as_mut().expect("stdout"), &mut [0]).expect("ready");
        let segment = segment();
        let index = segment.claim(child.id(), 0).expect("slot");
        let slot = segment.slot(index);
        let mut roomy = Keeper::new(child.id(), segment, no_areas(segment), 512 << 20, false);
        roomy.tick();
        assert_eq!(slot.wanted.load(Relaxed), 0, "it fits");
        let mut keeper = Keeper::new(child.id(), segment, no_areas(segment), 64 << 20, false);
        keeper.tick();
        assert_eq!((slot.wanted.load(Relaxed), slot.bell.load(Relaxed)), (1, 1));
        let limit = slot.limit_bytes.load(Relaxed);
        assert!(limit > 55 << 20 && limit < 64 << 20, "{limit}");
        keeper.tick();
        assert_eq!(slot.bell.load(Relaxed), 1, "no bell without news");
        assert!(keeper.totals().peak_resident > 60 << 20);
        end(child);
    }

    #[test]
    fn strict_kills_only_when_swap_is_full_and_the_budget_exceeded() {
        let segment = segment();
        let child = sleeper();
        let slot = segment.slot(segment.claim(child.id(), 0).expect("slot"));
        slot.count(Counter::SwapFull, 1);
        let mut keeper = Keeper::new(child.id(), segment, no_areas(segment), 64 << 20, true);
        keeper.tick();
        assert!(!keeper.totals().strict_kill, "within the budget");
        slot.count(Counter::SwapFull, 1);
        keeper.enforce(&[Process { standing: Standing::Engaged, used: 80 << 20, pressure: 0, limit: 0, growth: 0 }]);
        assert!(keeper.totals().strict_kill);
        let mut child = child;
        let status = child.wait().expect("wait");
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL));
    }
}
