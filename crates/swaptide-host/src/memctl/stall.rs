//! Programs that make almost no progress for lack of memory, and what is done about them.
//!
//! A process *stalls* where over ten seconds nearly all of its time went to waiting for memory.
//! What the engine counts is not enough for that: it does not see how long a thread waits before
//! the handler looks at its fault. So of a process that waits much by that count, the threads are
//! looked at again and again (those of the engine apart): a thread that runs, or stands in a
//! fault, has something to do. Of this time only what the kernel counts as CPU time in user mode
//! gets the program on; and a good part of it must be time in faults, or it is CPU time that it
//! lacks. Where others want the CPUs, too, a thread waits for one after each fault and is seldom
//! met in a fault: there it is enough that its refaults, with what each takes on a quiet machine,
//! add up to nearly all of them and its own CPU time, that in the kernel included.
//!
//! Owns what was seen of each process that waits much.
//!
//! Locks: none; the controller's thread alone.

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use swaptide_ipc::{Counter, ProcSlot};
use swaptide_sys::thread::now;

use crate::report::stalls::StallVerdict;
use crate::report::working_set::{
    ProcMemory, ROUND_TRIP_US, RefaultCounts, WorkingSet, refaults_since,
};

/// The time that is judged.
const STALL_WINDOW: Duration = Duration::from_secs(10);
/// The interval between checks of a process.
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// A process that continues to stall is reported again after this time.
const SAY_INTERVAL: Duration = Duration::from_secs(60);
/// A process that waits for less of its time than this is not looked at any closer, in percent.
const SUSPECT_PERCENT: u64 = 20;
/// How often the threads of the others are looked at: a hundred looks are a window. At 40 ms, with
/// the engine's threads read as well, the looks cost a program on two CPUs about 2 % of its speed.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
/// Of the time in which threads have something to do, so much must be spent in faults, in percent.
const MIN_FAULTING_PERCENT: u64 = 30;
/// The time that a refault takes on a quiet machine, in microseconds.
const QUIET_FAULT_US: u64 = 15;
/// No more than this many times as fast is foretold.
const MAX_SPEEDUP: u64 = 100;
/// After so long without a look the time before does not count: nothing may have run.
const MAX_GAP: Duration = Duration::from_secs(3);
/// Processes with more threads are not looked at closer: each would be read.
const MAX_THREADS: usize = 256;
/// How the names of the engine's threads begin, and the signals that they block: all. (The file
/// tells of 31 alone, among them SIGKILL and SIGSTOP, which no thread blocks.)
const ENGINE_THREAD: &str = "swaptide";
const ENGINE_BLOCKS: &str = "2147221247";

/// The action on a run in which a process stalls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnStall {
    /// It is reported, and nothing else.
    #[default]
    Continue,
    /// All its processes are stopped.
    Stop,
    /// All its processes are killed.
    Kill,
}

impl OnStall {
    /// Returns the text for the action, at the end of a line.
    pub(crate) fn what_is_done(self) -> &'static str {
        match self {
            OnStall::Continue => "",
            OnStall::Stop => "; stopped: kill -CONT lets it continue",
            OnStall::Kill => "; killed",
        }
    }
}

impl FromStr for OnStall {
    type Err = String;

    fn from_str(text: &str) -> Result<OnStall, String> {
        match text {
            "continue" => Ok(OnStall::Continue),
            "stop" => Ok(OnStall::Stop),
            "kill" => Ok(OnStall::Kill),
            _ => Err("give continue, stop or kill".into()),
        }
    }
}

/// When a process stalls, and what is done then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StallPolicy {
    /// The action.
    pub then: OnStall,
    /// Of a hundred, the part of its time that goes to waiting.
    pub percent: u8,
}

impl Default for StallPolicy {
    fn default() -> StallPolicy {
        StallPolicy { then: OnStall::default(), percent: 90 }
    }
}

/// The samples of a process between two checks.
#[derive(Clone, Copy, Default)]
struct Slice {
    time: Duration,
    /// CPU time of the program's threads in user mode, and in the kernel.
    own_us: u64,
    kernel_us: u64,
    /// Faults, of whatever thread, for pages that were out.
    refaults: u64,
    /// Looks at the threads, and those at which one had something to do.
    samples: u64,
    busy: u64,
    /// How many threads had something to do, added up over the looks, and how many of these stood
    /// in a fault.
    active: u64,
    faulting: u64,
}

/// A process that waits much.
struct Suspect {
    slices: VecDeque<Slice>,
    /// What comes next.
    slice: Slice,
    /// The number of looks at which each thread had something to do, by slice; the one under way is
    /// the last.
    looks: VecDeque<HashMap<PathBuf, u64>>,
    /// CPU time of the program's threads at the last look, and the engine's threads.
    own: OwnTime,
    sampled: Instant,
    /// The pages that had come back when it was first looked at.
    refaults: RefaultCounts,
}

/// What the engine had counted when a process was checked.
#[derive(Clone, Copy)]
struct Check {
    at: Instant,
    waited_us: u64,
    /// Faults that were answered, first touches among them.
    faults: u64,
    /// Pages that came back, also those that no thread had asked for.
    back: u64,
}

impl Check {
    fn of(slot: &ProcSlot, at: Instant) -> Check {
        let faults = slot.counted(Counter::Pgmajfault);
        let waited_us = slot.stalled_us(now()).saturating_add(faults.saturating_mul(ROUND_TRIP_US));
        // What came back before it was stored has no distance.
        let unstored = slot.counted(Counter::SwapCacheHit);
        let back =
            refaults_since(slot, None).iter().fold(unstored, |sum, n| sum.saturating_add(*n));
        Check { at, waited_us, faults, back }
    }

    /// Faults since then for pages that were out, at most.
    fn refaults_since(&self, before: &Check) -> u64 {
        self.faults.saturating_sub(before.faults).min(self.back.saturating_sub(before.back))
    }
}

/// The processes of a run.
#[derive(Default)]
pub(super) struct StallWatch {
    /// The last check of each.
    checked: HashMap<u32, Check>,
    suspects: HashMap<u32, Suspect>,
    said: HashMap<u32, Instant>,
    /// The time that each process has lost by waiting so far, in microseconds.
    lost: HashMap<u32, u64>,
}

/// A thread, as its file `stat` has it.
#[derive(Debug, PartialEq, Eq)]
struct WatchedThread {
    user_ticks: u64,
    kernel_ticks: u64,
    runs: bool,
    is_engine: bool,
}

impl WatchedThread {
    /// Of the text of that file; also of a process's, whose time is that of all its threads.
    fn parse(stat: &str) -> Option<WatchedThread> {
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
        let mut fields = rest.split_whitespace();
        let runs = fields.next()? == "R";
        let user_ticks = fields.by_ref().nth(10)?.parse().ok()?;
        let kernel_ticks = fields.next()?.parse().ok()?;
        let is_engine = name.starts_with(ENGINE_THREAD) && fields.nth(16) == Some(ENGINE_BLOCKS);
        Some(WatchedThread { user_ticks, kernel_ticks, runs, is_engine })
    }

    fn read(path: &Path) -> Option<WatchedThread> {
        WatchedThread::parse(&std::fs::read_to_string(path.join("stat")).ok()?)
    }
}

/// The directories of a process's threads; `None` when it is gone, or has too many.
fn tasks(pid: u32) -> Option<Vec<PathBuf>> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let tasks: Vec<_> = tasks.filter_map(|entry| Some(entry.ok()?.path())).collect();
    (tasks.len() <= MAX_THREADS).then_some(tasks)
}

/// CPU time of a process's own threads.
struct OwnTime {
    /// In user mode, and in the kernel, in microseconds.
    us: u64,
    kernel_us: u64,
    /// The directories of the threads that are not its own.
    engine: HashSet<PathBuf>,
}

impl OwnTime {
    fn of(pid: u32) -> Option<OwnTime> {
        let all = WatchedThread::read(Path::new(&format!("/proc/{pid}")))?;
        // Threads that have ended are in the process's time alone; those of the engine do not end.
        let mut engine = HashSet::new();
        let (mut user_ticks, mut kernel_ticks) = (all.user_ticks, all.kernel_ticks);
        for task in tasks(pid)? {
            if let Some(thread) = WatchedThread::read(&task).filter(|thread| thread.is_engine) {
                user_ticks = user_ticks.saturating_sub(thread.user_ticks);
                kernel_ticks = kernel_ticks.saturating_sub(thread.kernel_ticks);
                engine.insert(task);
            }
        }
        let tick_us = 1_000_000 / rustix::param::clock_ticks_per_second().max(1);
        Some(OwnTime { us: user_ticks * tick_us, kernel_us: kernel_ticks * tick_us, engine })
    }
}

/// The threads of a process, but for those of the engine, that have something to do, and how many
/// of these stand in a fault.
fn threads_at_work(pid: u32, engine: &HashSet<PathBuf>) -> Option<(Vec<PathBuf>, u64)> {
    let (mut active, mut faulting) = (Vec::new(), 0);
    for task in tasks(pid)?.into_iter().filter(|task| !engine.contains(task)) {
        match WatchedThread::read(&task) {
            Some(thread) if thread.is_engine => {}
            Some(thread) if thread.runs => active.push(task),
            _ => {
                let waits_in = std::fs::read_to_string(task.join("wchan")).unwrap_or_default();
                let is_in_fault = waits_in.starts_with("handle_userfault");
                faulting += u64::from(is_in_fault);
                // 0: it runs by now. (Where that may not be read, no thread is seen to fault.)
                if is_in_fault || waits_in == "0" {
                    active.push(task);
                }
            }
        }
    }
    Some((active, faulting))
}

/// Of a hundred, what `part` is of the time.
fn percent(part_us: u64, time: Duration) -> u64 {
    (u128::from(part_us) * 100 / time.as_micros().max(1)).min(100) as u64
}

impl StallWatch {
    /// Looks at a process, if it is time. `Some` when it stalls and that was not reported a short
    /// time ago.
    pub(super) fn look(
        &mut self,
        pid: u32,
        slot: &ProcSlot,
        policy: StallPolicy,
        at: Instant,
    ) -> Option<StallVerdict> {
        if let Some(suspect) = self.suspects.get_mut(&pid) {
            suspect.sample(pid, at);
        }
        let check = Check::of(slot, at);
        let before = *self.checked.entry(pid).or_insert(check);
        let time = at.duration_since(before.at);
        if time < STALL_CHECK_INTERVAL {
            return None;
        }
        self.checked.insert(pid, check);
        // One that is held back for `swap.high` waits for its group, not for memory.
        if time > MAX_GAP || slot.control.throttle_us.load(Relaxed) != 0 {
            self.suspects.remove(&pid);
            return None;
        }
        if percent(check.waited_us.saturating_sub(before.waited_us), time) < SUSPECT_PERCENT {
            self.suspects.remove(&pid);
            return None;
        }
        let Some(own) = OwnTime::of(pid) else {
            self.suspects.remove(&pid);
            return None;
        };
        let Some(suspect) = self.suspects.get_mut(&pid) else {
            let refaults = refaults_since(slot, None);
            self.suspects.insert(pid, Suspect::new(own, refaults, at));
            return None;
        };
        *self.lost.entry(pid).or_default() +=
            suspect.end_slice(own, check.refaults_since(&before), time);
        let found = suspect.judge(policy)?;
        let refaults = refaults_since(slot, Some(&suspect.refaults));
        // What comes next is judged afresh.
        self.suspects.remove(&pid);
        let was_said = self.said.get(&pid).is_some_and(|said| {
            at.duration_since(*said) < SAY_INTERVAL && policy.then != OnStall::Kill
        });
        if was_said {
            return None;
        }
        self.said.insert(pid, at);
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        Some(StallVerdict {
            pid,
            name: name.trim_end().replace(char::is_control, "?"),
            waiting_percent: found.waits,
            speedup: found.speedup,
            working_set: WorkingSet::estimate(&refaults, &ProcMemory::of(slot)),
        })
    }

    /// The most that a process has lost by waiting so far, in microseconds.
    pub(super) fn most_lost_us(&self) -> u64 {
        self.lost.values().copied().max().unwrap_or(0)
    }

    /// When the next look is due at the latest.
    pub(super) fn interval(&self) -> Option<Duration> {
        (!self.suspects.is_empty()).then_some(SAMPLE_INTERVAL)
    }

    /// Forgets the processes that are gone.
    pub(super) fn keep_only(&mut self, lives: impl Fn(u32) -> bool) {
        self.checked.retain(|pid, _| lives(*pid));
        self.suspects.retain(|pid, _| lives(*pid));
        self.said.retain(|pid, _| lives(*pid));
        self.lost.retain(|pid, _| lives(*pid));
    }
}

/// The result of a window.
#[derive(Debug, PartialEq, Eq)]
struct StallWindow {
    waits: u64,
    speedup: u64,
}

impl Suspect {
    fn new(own: OwnTime, refaults: RefaultCounts, at: Instant) -> Suspect {
        let (slices, slice) = (VecDeque::new(), Slice::default());
        let looks = VecDeque::from([HashMap::new()]);
        Suspect { slices, slice, looks, own, sampled: at, refaults }
    }

    /// Looks at the threads, if it is time.
    fn sample(&mut self, pid: u32, at: Instant) {
        if at.duration_since(self.sampled) < SAMPLE_INTERVAL / 2 {
            return;
        }
        self.sampled = at;
        if let Some((active, faulting)) = threads_at_work(pid, &self.own.engine) {
            self.slice.samples += 1;
            self.slice.busy += u64::from(!active.is_empty());
            self.slice.active += active.len() as u64;
            self.slice.faulting += faulting;
            if let Some(looks) = self.looks.back_mut() {
                active.into_iter().for_each(|task| *looks.entry(task).or_default() += 1);
            }
        }
    }

    /// The time since the last call is over. Gives what the process has lost in it: the time in
    /// which a thread had something to do, but for its CPU time, in microseconds.
    fn end_slice(&mut self, own: OwnTime, refaults: u64, time: Duration) -> u64 {
        let slice = std::mem::take(&mut self.slice);
        self.looks.push_back(HashMap::new());
        let before = std::mem::replace(&mut self.own, own);
        let used_us = self.own.us.saturating_sub(before.us);
        let kernel_us = self.own.kernel_us.saturating_sub(before.kernel_us);
        let slice = Slice { time, own_us: used_us, kernel_us, refaults, ..slice };
        self.slices.push_back(slice);
        let is_faulting = slice.faulting * 100 >= slice.active * MIN_FAULTING_PERCENT;
        let busy = (slice.active as f64 / slice.samples.max(1) as f64).min(1.0);
        let busy_us = (time.as_micros() as f64 * busy) as u64;
        if is_faulting { busy_us.saturating_sub(used_us) } else { 0 }
    }

    /// The number of looks at which the thread had something to do that had most often.
    fn most_looks(&self) -> u64 {
        let mut sums = HashMap::<&PathBuf, u64>::new();
        for (task, looks) in self.looks.iter().flatten() {
            *sums.entry(task).or_default() += looks;
        }
        sums.into_values().max().unwrap_or(0)
    }

    /// Judges the last [`STALL_WINDOW`], if there was such a long time.
    fn judge(&mut self, policy: StallPolicy) -> Option<StallWindow> {
        let time = |slices: &VecDeque<Slice>| slices.iter().map(|slice| slice.time).sum();
        let mut all: Duration = time(&self.slices);
        while let Some(first) = self.slices.front().map(|slice| slice.time)
            && all >= STALL_WINDOW + first
        {
            self.slices.pop_front();
            self.looks.pop_front();
            all = time(&self.slices);
        }
        if all < STALL_WINDOW {
            return None;
        }
        let sum = |of: fn(&Slice) -> u64| {
            self.slices.iter().fold(0, |sum: u64, slice| sum.saturating_add(of(slice)))
        };
        let (samples, active, faulting) =
            (sum(|slice| slice.samples), sum(|slice| slice.active), sum(|slice| slice.faulting));
        let (own_us, bound) = (sum(|slice| slice.own_us), u64::from(policy.percent));
        // The time in which its threads had something to do, all added up.
        let busy_us = (all.as_micros() as u64).saturating_mul(active) / samples.max(1);
        let waits = 100 - (own_us.saturating_mul(100) / busy_us.max(1)).min(100);
        // Many threads that sleep most of the time are not one that never does. (Of two that take
        // turns neither is such a one.)
        let has_work = samples > 0
            && sum(|slice| slice.busy) * 100 >= samples * bound
            && self.most_looks() * 150 >= samples * bound;
        let faults_us = sum(|slice| slice.refaults).saturating_mul(QUIET_FAULT_US);
        // What a fault itself takes in the kernel is among its time.
        let kernel_us = sum(|slice| slice.kernel_us).saturating_sub(faults_us);
        let all_us = faults_us.saturating_add(own_us).saturating_add(kernel_us);
        let are_nearly_all = percent(faults_us, Duration::from_micros(all_us)) >= bound;
        let faults =
            faulting * 100 >= active * MIN_FAULTING_PERCENT || faulting > 0 && are_nearly_all;
        if !has_work || !faults || waits < bound {
            return None;
        }
        Some(StallWindow { waits, speedup: (busy_us / own_us.max(1)).clamp(1, MAX_SPEEDUP) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_ipc::REFAULT_BUCKETS;

    /// Judges seconds, each with milliseconds of CPU time, and of ten looks how many threads had
    /// something to do and how many stood in a fault. `refaults` come in each.
    fn judged_with(
        policy: StallPolicy,
        refaults: u64,
        seconds: &[(u64, u64, u64)],
    ) -> Vec<Option<StallWindow>> {
        let own = |us| OwnTime { us, kernel_us: 0, engine: HashSet::new() };
        let mut suspect = Suspect::new(own(0), [0; REFAULT_BUCKETS], Instant::now());
        let mut own_us = 0;
        let mut second = |(own_ms, active, faulting): &(u64, u64, u64)| {
            own_us += own_ms * 1000;
            suspect.slice = Slice {
                samples: 10,
                busy: (*active).min(10),
                active: *active,
                faulting: *faulting,
                ..Slice::default()
            };
            suspect.looks.back_mut().expect("one").insert("one".into(), (*active).min(10));
            suspect.end_slice(own(own_us), refaults, Duration::from_secs(1));
            suspect.judge(policy)
        };
        seconds.iter().map(&mut second).collect()
    }

    fn judged(policy: StallPolicy, seconds: &[(u64, u64, u64)]) -> Vec<Option<StallWindow>> {
        judged_with(policy, 0, seconds)
    }

    fn usual(seconds: &[(u64, u64, u64)]) -> Vec<Option<StallWindow>> {
        judged(StallPolicy::default(), seconds)
    }

    #[test]
    fn ten_seconds_of_waiting_are_a_verdict_and_nine_are_none() {
        let verdicts = usual(&[(20, 10, 7); 12]);
        assert!(verdicts[..9].iter().all(Option::is_none), "{verdicts:?}");
        assert_eq!(verdicts[9], Some(StallWindow { waits: 98, speedup: 50 }));
        assert!(verdicts[11].is_some());
        // Eight threads that all wait.
        assert_eq!(usual(&[(100, 80, 60); 10])[9].as_ref().map(|found| found.waits), Some(99));
    }

    #[test]
    fn a_program_that_gets_on_has_no_verdict() {
        let is_left = |seconds: &[(u64, u64, u64)]| usual(seconds).iter().all(Option::is_none);
        assert!(is_left(&[(1500, 80, 20); 30]), "several threads, and two CPUs have work");
        assert!(is_left(&[(300, 10, 6); 30]), "it waits for two thirds of its time");
        assert!(is_left(&[(10, 5, 5); 30]), "it sleeps half of its time");
        assert!(is_left(&[(20, 10, 1); 30]), "it is CPU time that it lacks");
        assert!(is_left(&[(0, 0, 0); 30]), "it sleeps");
        let mut seconds = [(10, 10, 8); 40];
        seconds.iter_mut().step_by(5).for_each(|second| *second = (900, 10, 1));
        assert!(is_left(&seconds), "it works for a second of each five");
    }

    #[test]
    fn a_program_that_waits_for_a_cpu_after_each_fault_is_judged_by_their_number() {
        let usual =
            |refaults, second| judged_with(StallPolicy::default(), refaults, &[second; 10]).pop();
        let verdict = usual(50_000, (20, 10, 1)).flatten();
        assert_eq!(verdict, Some(StallWindow { waits: 98, speedup: 50 }));
        for (refaults, second, why) in [
            (500, (20, 10, 1), "it gets on for 40 us with each, and lacks CPU time"),
            (10_000, (20, 10, 1), "it gets on for 2 us with each"),
            (50_000, (20, 10, 0), "none was seen in a fault: perhaps that may not be read"),
            (50_000, (20, 5, 1), "it sleeps half of its time"),
            (50_000, (150, 10, 1), "it works"),
        ] {
            assert_eq!(usual(refaults, second), Some(None), "{why}");
        }
    }

    /// Judges ten seconds that are all alike, in which one thread had something to do at `most` of
    /// the looks.
    fn judged_slice(slice: Slice, most: u64) -> Option<StallWindow> {
        let own = OwnTime { us: 0, kernel_us: 0, engine: HashSet::new() };
        let mut suspect = Suspect::new(own, [0; REFAULT_BUCKETS], Instant::now());
        suspect.slices.extend([slice; 10]);
        suspect.looks[0].extend([("one".into(), most), ("another".into(), 5)]);
        suspect.judge(StallPolicy::default())
    }

    #[test]
    fn work_in_the_kernel_and_threads_that_sleep_are_no_waiting() {
        let time = Duration::from_secs(1);
        let seen = Slice { time, own_us: 20_000, samples: 10, busy: 10, ..Slice::default() };
        let waits = Slice { active: 10, faulting: 1, refaults: 40_000, ..seen };
        // The faults themselves take a part of that.
        assert!(judged_slice(Slice { kernel_us: 400_000, ..waits }, 100).is_some());
        assert_eq!(judged_slice(Slice { kernel_us: 800_000, ..waits }, 100), None);
        // Thirty threads, each of which sleeps between its faults.
        let many = Slice { active: 12, faulting: 9, ..seen };
        assert!(judged_slice(many, 95).is_some(), "one of them always waits");
        assert_eq!(judged_slice(Slice { busy: 7, ..many }, 70), None);
        assert_eq!(judged_slice(many, 59), None, "another one each time");
        assert_eq!(judged_slice(Slice { samples: 0, busy: 0, ..many }, 0), None, "not looked at");
    }

    #[test]
    fn neither_first_touches_nor_pages_that_came_unasked_are_refaults() {
        let check = |faults, back| Check { at: Instant::now(), waited_us: 0, faults, back };
        let before = check(100, 1000);
        assert_eq!(check(150, 1030).refaults_since(&before), 30, "20 were first touches");
        assert_eq!(check(110, 1640).refaults_since(&before), 10, "windows came");
        assert_eq!(check(0, 0).refaults_since(&before), 0, "another process of that number");
    }

    #[test]
    fn the_bound_may_be_another() {
        let policy = StallPolicy { then: OnStall::Kill, percent: 50 };
        let seconds = [(400, 10, 6); 10];
        assert_eq!(judged(policy, &seconds)[9], Some(StallWindow { waits: 60, speedup: 2 }));
        assert_eq!(usual(&seconds)[9], None);
    }

    #[test]
    fn the_engines_threads_do_not_count() {
        let stat = |name: &str, blocks: &str| {
            format!(
                "7 ({name}) S 1 7 7 0 -1 4194560 10 20 30 40 500 60 7000 800 20 0 1 0 99 1000 10 \
                18446744073709551615 1 2 3 0 0 0 {blocks} 4096 0 1 0 0 17 1 0 0 0"
            )
        };
        let parsed = |name: &str, blocks: &str| {
            let thread = WatchedThread::parse(&stat(name, blocks)).expect("a thread");
            (thread.user_ticks, thread.kernel_ticks, thread.runs, thread.is_engine)
        };
        assert_eq!(parsed("python3", "0"), (500, 60, false, false));
        assert_eq!(parsed("a) b (c", ENGINE_BLOCKS), (500, 60, false, false));
        assert_eq!(parsed("swaptide", "0"), (500, 60, false, false), "a program of that name");
        assert_eq!(parsed("swaptide-work", ENGINE_BLOCKS), (500, 60, false, true));
        assert_eq!(WatchedThread::parse("damaged"), None);
        let none = HashSet::new();
        let (active, faulting) = threads_at_work(std::process::id(), &none).expect("this process");
        assert!(!active.is_empty() && faulting == 0, "this thread runs: {active:?}, {faulting}");
        // The program of these tests has a name that begins so, and a thread blocks all signals
        // while it makes another one.
        let me = || OwnTime::of(std::process::id()).expect("this process lives");
        assert!((0..1000).any(|_| me().engine.is_empty()), "a thread is taken for the engine's");
        assert!(me().us < 3_600_000_000, "{}", me().us);
        assert!(OwnTime::of(u32::MAX).is_none());
        // Other tests make threads: until none began between the two looks.
        let all_are_left_out = || {
            let all = tasks(std::process::id()).expect("this process").into_iter().collect();
            threads_at_work(std::process::id(), &all) == Some((Vec::new(), 0))
        };
        assert!((0..1000).any(|_| all_are_left_out()), "some are looked at");
    }

    #[test]
    fn the_time_of_threads_that_have_ended_counts() {
        let own_us = || OwnTime::of(std::process::id()).expect("this process lives").us;
        let before = own_us();
        let burn = || {
            let end = Instant::now() + Duration::from_millis(400);
            while Instant::now() < end {
                std::hint::black_box(());
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(burn);
            }
        });
        let after = own_us();
        assert!(after > before + 50_000, "{before} us, then {after}");
    }

    #[test]
    fn stall_actions_have_three_names() {
        assert_eq!("kill".parse(), Ok(OnStall::Kill));
        assert_eq!("stop".parse(), Ok(OnStall::Stop));
        assert_eq!("continue".parse(), Ok(OnStall::Continue));
        assert!("Kill".parse::<OnStall>().is_err());
    }
}
