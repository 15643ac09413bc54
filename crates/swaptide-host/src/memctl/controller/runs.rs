//! The runs that the controller keeps, and what each did so far.
//!
//! Locks: none; the controller's thread alone.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use swaptide_ipc::{GroupIndex, ProcSlot, Segment, SlotIndex};
use swaptide_sys::process::pidfd_open;
use swaptide_sys::sock::poll_readable;

use super::TickMember;
use crate::cgroup::psi::TimeShare;
use crate::container_labels::ContainerLabels;
use crate::memctl::policy::Process;
use crate::memctl::processes::ProcessTree;
use crate::memctl::stall::{StallPolicy, StallWatch};
use crate::memctl::strict::Excess;
use crate::report::series::{Levels, SeriesRecorder};
use crate::report::totals::Totals;

/// How often is looked for runs that are over.
const RUN_RECORD_MAX_AGE: Duration = Duration::from_millis(500);

/// A run: the processes under one supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ManagedRun {
    /// Whose descendants its processes are.
    pub root: u32,
    /// The process that the user started.
    #[serde(rename = "front", alias = "launcher")]
    pub launcher: u32,
    /// User id of the run's user.
    pub uid: u32,
    /// The program's name, for lists.
    pub program: String,
    /// When it began, in seconds since 1970.
    pub started: f64,
    /// The group that they are in, unless they were moved; where there is none, that of their
    /// cgroup.
    #[serde(skip)]
    pub group: Option<GroupIndex>,
    /// The most that they may have together, where that is not its group's matter.
    pub max: Option<u64>,
    /// They are killed when they have more than they may for long, or swap space is out.
    pub strict: bool,
    /// What is done when one of them makes almost no progress for lack of memory.
    #[serde(default)]
    pub stall: StallPolicy,
    /// Its processes ran before: nothing of swaptide's stays in those that are let go.
    #[serde(default)]
    pub attached: bool,
    /// The container that it is in.
    #[serde(default)]
    pub container: Option<ContainerLabels>,
    /// It is recorded over time, for its report.
    #[serde(default)]
    pub recorded: bool,
}

impl ManagedRun {
    /// How long ago it began.
    fn age(&self) -> Duration {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // It began a moment ago where the clock was set back since.
        Duration::try_from_secs_f64(now.as_secs_f64() - self.started).unwrap_or_default()
    }
}

/// A run, and what it did so far.
pub(super) struct RunRecord {
    pub(super) run: ManagedRun,
    /// Stands for the root; none where it was gone already.
    pidfd: Option<OwnedFd>,
    /// What its dead have counted, and the most that there was at a time.
    pub(super) totals: Totals,
    /// Of times that swap space was out, those before it was last within its budget.
    pub(super) swap_full: u64,
    pub(super) excess: Excess,
    pub(super) stalls: StallWatch,
    peaks: PeakNotes,
    /// Where a report is wanted.
    pub(super) recorder: Option<SeriesRecorder>,
}

/// What the processes of a run have together, at a look.
#[derive(Clone, Copy, Default)]
pub(super) struct RunUsage {
    resident: u64,
    footprint: u64,
    pool: u64,
    swapped_pool: u64,
    swapped_file: u64,
    processes: u64,
    /// What part of the time a thread of theirs waited for memory.
    pub(super) stalled: TimeShare,
}

impl RunUsage {
    /// With what is not the processes' own.
    pub(super) fn levels(&self, budget: u64, file: u64, network: u64) -> Levels {
        let RunUsage { resident, pool, swapped_pool, swapped_file, processes, .. } = *self;
        Levels { budget, resident, pool, swapped_pool, swapped_file, file, network, processes }
    }
}

/// Which peaks are a run's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeakNotes {
    /// Its processes were above its budget before it began, and still are: what they had by then
    /// counts as long as they have not come down.
    ComingDown,
    Within,
    /// Its processes are let go.
    Over,
}

/// The runs, by the process whose descendants theirs are.
pub(super) struct Runs {
    records: BTreeMap<u32, RunRecord>,
    /// When was looked for those that are over.
    looked: Instant,
}

impl Runs {
    pub(super) fn new() -> Runs {
        Runs { records: BTreeMap::new(), looked: Instant::now() }
    }

    pub(super) fn add(&mut self, run: ManagedRun) {
        let pidfd = pidfd_open(run.root).ok();
        let record = RunRecord {
            pidfd,
            totals: Totals::default(),
            swap_full: 0,
            excess: Excess::default(),
            stalls: StallWatch::default(),
            peaks: if run.attached { PeakNotes::ComingDown } else { PeakNotes::Within },
            recorder: run.recorded.then(|| SeriesRecorder::new(run.age())),
            run,
        };
        self.records.insert(record.run.root, record);
    }

    pub(super) fn get(&self, root: u32) -> Option<&RunRecord> {
        self.records.get(&root)
    }

    pub(super) fn get_mut(&mut self, root: u32) -> Option<&mut RunRecord> {
        self.records.get_mut(&root)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &ManagedRun> {
        self.records.values().map(|record| &record.run)
    }

    /// When processes that wait much are to be looked at again at the latest.
    pub(super) fn stall_interval(&self) -> Option<Duration> {
        self.records.values().filter_map(|record| record.stalls.interval()).min()
    }

    /// The root of the run, where there is only one.
    pub(super) fn only(&self) -> Option<u32> {
        self.records.keys().next().copied().filter(|_| self.records.len() == 1)
    }

    /// The processes of a run are let go; or they are managed after all.
    pub(super) fn note_letting_go(&mut self, root: u32, is_over: bool) {
        if let Some(record) = self.records.get_mut(&root) {
            record.peaks = if is_over { PeakNotes::Over } else { PeakNotes::ComingDown };
        }
    }

    /// The memory cgroups leave less than the budget: `left` bytes.
    pub(super) fn note_cgroup_left(&mut self, left: u64) {
        for record in self.records.values_mut() {
            let least = &mut record.totals.cgroup_left;
            *least = Some(least.map_or(left, |least| least.min(left)));
        }
    }

    /// The runs that are recorded.
    pub(super) fn recorded(&self) -> Vec<u32> {
        let recorded = self.records.iter().filter(|(_, record)| record.recorder.is_some());
        recorded.map(|(root, _)| *root).collect()
    }

    /// Notes the most that each run has at a time; answers with what each has now. `stalled`: the
    /// part of the time in which a thread of a process waited.
    pub(super) fn note_peaks(
        &mut self,
        segment: &Segment,
        stalled: impl Fn(SlotIndex) -> TimeShare,
        members: &[TickMember],
        processes: &[Process],
        budget: u64,
    ) -> BTreeMap<u32, RunUsage> {
        let mut sums: BTreeMap<u32, RunUsage> = BTreeMap::new();
        for (process, member) in processes.iter().zip(members) {
            let sum = sums.entry(member.run).or_default();
            sum.resident += process.used;
            sum.processes += 1;
            let Some(index) = member.slot else {
                sum.footprint += process.used;
                continue;
            };
            let slot = segment.slot(index);
            let own =
                [&slot.usage.pool_bytes, &slot.usage.staging_bytes, &slot.usage.overhead_bytes]
                    .map(ProcSlot::bytes);
            let [in_pool, on_areas] =
                [&slot.usage.swapped_pool_bytes, &slot.usage.swapped_file_bytes]
                    .map(ProcSlot::bytes);
            sum.footprint += process.used.saturating_sub(own.iter().sum()) + in_pool + on_areas;
            sum.pool += own[0];
            sum.swapped_pool += in_pool;
            sum.swapped_file += on_areas;
            sum.stalled = sum.stalled.or(stalled(index));
        }
        for (run, sum) in &sums {
            if let Some(RunRecord { totals, peaks, .. }) = self.records.get_mut(run) {
                match peaks {
                    PeakNotes::ComingDown if sum.resident <= budget => {
                        (*peaks, totals.peak_resident) = (PeakNotes::Within, 0);
                    }
                    PeakNotes::Over => continue,
                    _ => {}
                }
                totals.peak_resident = totals.peak_resident.max(sum.resident);
                totals.peak_footprint = totals.peak_footprint.max(sum.footprint);
                totals.peak_pool = totals.peak_pool.max(sum.pool);
            }
        }
        sums
    }

    /// Forgets runs whose supervisor is gone and that have no process left, if it is time to look.
    pub(super) fn forget_ended(&mut self, tree: &mut ProcessTree) {
        if self.looked.elapsed() <= RUN_RECORD_MAX_AGE {
            return;
        }
        self.looked = Instant::now();
        let gone = |kept: &RunRecord| {
            let ended = |pidfd: &OwnedFd| {
                poll_readable(&[pidfd.as_fd()], Some(Duration::ZERO)).is_ok_and(|ready| ready != 0)
            };
            kept.pidfd.as_ref().is_none_or(ended)
        };
        let gone: Vec<u32> =
            self.records.iter().filter(|(_, kept)| gone(kept)).map(|(root, _)| *root).collect();
        for root in gone {
            if !tree.pids().any(|pid| tree.root_of(pid) == root) {
                tree.forget_root(root);
                self.records.remove(&root);
            }
        }
    }
}
