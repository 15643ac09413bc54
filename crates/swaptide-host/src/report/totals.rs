//! What is told at the end of a run: totals, the JSON report, the line of summary.
//!
//! Owns the names of the report's keys (scripts rely on them).
//!
//! Locks: none.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use swaptide_ipc::{Counter, FaultHistogram, HISTOGRAM_BUCKETS, ProcSlot};
use swaptide_store::codec::Scheme;
use swaptide_sys::PAGE_SIZE;

use crate::cgroup::tree::GroupView;
use crate::report::series::{PageTraffic, RunSeries};
use crate::report::stalls::{BudgetAdvice, MemoryWaits, StallReport};
use crate::swap::areas::AreaView;
use crate::swap::spec::PoolAcceptance;
use crate::units::{human, human_count};

/// Everything that is counted in a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Totals {
    /// Sums, in the order of [`Counter::ALL`].
    counters: Vec<u64>,
    /// The number of faults in each bucket of the histogram of times.
    faults: Vec<u64>,
    longest_fault_ns: u64,
    /// Most resident anonymous memory of the tree at one time, in bytes.
    pub peak_resident: u64,
    /// Most memory of the tree's programs at one time, resident and swapped, in bytes.
    pub peak_footprint: u64,
    /// Most compressed memory at one time, in bytes.
    pub peak_pool: u64,
    /// The least that the memory cgroups around the run left of its budget, in bytes; none if they
    /// left all of it.
    pub cgroup_left: Option<u64>,
    /// The swap areas, in the order of their numbers.
    pub areas: Vec<AreaView>,
    /// The groups of the run.
    pub groups: Vec<GroupView>,
    /// Processes that could not be managed though they were asked to be.
    pub refused: u64,
    /// The tree was killed under `--strict`.
    pub strict_kill: bool,
    /// What it had then, where that was because it was above its budget for long, and not because
    /// swap space was out.
    #[serde(default)]
    pub strict_used: Option<u64>,
    /// Processes that waited for memory.
    #[serde(default)]
    pub waits: MemoryWaits,
    /// The run over time, if it was recorded and is at its end.
    #[serde(default)]
    pub series: Option<RunSeries>,
}

impl Default for Totals {
    fn default() -> Totals {
        Totals {
            counters: vec![0; Counter::ALL.len()],
            faults: vec![0; HISTOGRAM_BUCKETS],
            longest_fault_ns: 0,
            peak_resident: 0,
            peak_footprint: 0,
            peak_pool: 0,
            cgroup_left: None,
            areas: Vec::new(),
            groups: Vec::new(),
            refused: 0,
            strict_kill: false,
            strict_used: None,
            waits: MemoryWaits::default(),
            series: None,
        }
    }
}

impl Totals {
    /// Adds what one process counted.
    pub fn add(&mut self, slot: &ProcSlot) {
        for (sum, counter) in self.counters.iter_mut().zip(&slot.counters) {
            *sum = sum.saturating_add(counter.load(Relaxed));
        }
        for (sum, bucket) in self.faults.iter_mut().zip(&slot.faults.buckets) {
            *sum = sum.saturating_add(bucket.load(Relaxed));
        }
        self.longest_fault_ns = self.longest_fault_ns.max(slot.faults.max_ns.load(Relaxed));
        self.waits.add(slot);
    }

    /// The sum of a counter over all processes, those that have ended included.
    pub fn get(&self, counter: Counter) -> u64 {
        // One that came from another process may have fewer.
        self.counters.get(counter as usize).copied().unwrap_or(0)
    }

    /// Pages that left memory: compressed, to the file, or as zeros that needed no store. One that
    /// was compressed and continued to the file later left it once.
    pub fn pages_out(&self) -> u64 {
        PageTraffic::of(|counter| self.get(counter)).pages_out
    }

    /// Pages that came back.
    pub fn pages_in(&self) -> u64 {
        PageTraffic::of(|counter| self.get(counter)).pages_in
    }

    /// Times of all faults.
    pub fn fault_times(&self) -> FaultTimes {
        FaultTimes {
            p50: self.fault_us(0.5),
            p99: self.fault_us(0.99),
            max: self.longest_fault_ns as f64 / 1e3,
        }
    }

    /// An upper bound of the time that a share of all faults took at most, in microseconds.
    pub fn fault_us(&self, share: f64) -> f64 {
        let all = self.faults.iter().fold(0u64, |sum, count| sum.saturating_add(*count));
        let rank = (all as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in self.faults.iter().enumerate() {
            seen = count.saturating_add(seen);
            if *count > 0 && seen >= rank {
                return FaultHistogram::bound(bucket).min(self.longest_fault_ns) as f64 / 1e3;
            }
        }
        0.0
    }
}

/// What a report is of.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReportSubject {
    /// The program's name, for the summary.
    pub program: String,
    /// Its command line; what is no UTF-8 is replaced.
    pub command: Vec<String>,
    /// When the run began, in seconds since 1970.
    pub started_s: f64,
}

impl ReportSubject {
    /// Of a run that begins now.
    pub(crate) fn new(program: String, command: Vec<String>) -> ReportSubject {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        ReportSubject { program, command, started_s: now.as_millis() as f64 / 1e3 }
    }
}

/// The most that a run had at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PeakBytes {
    /// Resident anonymous memory of the tree.
    #[serde(rename = "peak_resident_bytes")]
    pub resident: u64,
    /// Memory of the programs, resident and swapped.
    #[serde(rename = "peak_footprint_bytes")]
    pub footprint: u64,
    /// Compressed memory.
    #[serde(rename = "peak_pool_bytes")]
    pub pool: u64,
}

/// The content of `--report` as JSON; fields are its keys.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The program, and when it began.
    pub run: ReportSubject,
    /// The exit status of `swaptide run`.
    pub exit_status: u8,
    /// Seconds from start to end.
    pub wall_s: f64,
    /// The run's budget in bytes; the largest, where it was changed.
    pub budget_bytes: u64,
    /// `peak_resident_bytes`, `peak_footprint_bytes`, `peak_pool_bytes`.
    #[serde(flatten)]
    pub peaks: PeakBytes,
    /// The least that the memory cgroups around the run left of the budget; `null` if they left all
    /// of it.
    pub cgroup_left_bytes: Option<u64>,
    /// Counters under the kernel's names.
    pub stats: BTreeMap<&'static str, u64>,
    /// The times that threads waited for faults.
    pub fault_us: FaultTimes,
    /// Compressed memory, and each swap area.
    pub devices: Vec<DeviceReport>,
    /// The groups, as they were at the end.
    pub groups: Vec<GroupView>,
    /// The counts of errors.
    pub errors: BTreeMap<&'static str, u64>,
    /// Processes that made almost no progress for lack of memory.
    pub stalls: StallReport,
    /// The estimate for the run with more memory; `null` if it waited little for memory.
    pub advice: Option<BudgetAdvice>,
    /// The run over time; `null` where no daemon told of it.
    pub series: Option<RunSeries>,
}

/// A run as it is at a moment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct View {
    /// The process that the user started.
    pub pid: u32,
    /// The program's name, for lists.
    pub program: String,
    /// Seconds since the start.
    pub wall_s: f64,
    /// The run's budget in bytes.
    pub budget_bytes: u64,
    /// Resident anonymous memory of the tree.
    pub resident_bytes: u64,
    /// Most of it so far.
    pub peak_resident_bytes: u64,
    /// Most memory of the programs so far, resident and swapped.
    pub peak_footprint_bytes: u64,
    /// Bytes of the swap areas that are leased.
    pub file_bytes: u64,
    /// The processes that live.
    pub processes: Vec<ProcessView>,
    /// Counters under the kernel's names, those of processes that are gone among them.
    pub stats: BTreeMap<String, u64>,
    /// How long threads waited for faults.
    pub fault_us: FaultTimes,
    /// Processes that made almost no progress for lack of memory.
    #[serde(default)]
    pub stalls: StallReport,
}

/// A process of a run at a moment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ProcessView {
    /// Process id, as the supervisor sees it.
    pub pid: u32,
    /// Path of its group.
    pub group: String,
    /// `engaged`: its memory is managed; `watching`: it fits; `unmanaged`: it cannot be managed.
    pub state: String,
    /// Its limit; 0 when it has none.
    pub limit_bytes: u64,
    /// What its limit would be if the budget were divided at once; 0 when it has none.
    /// Limits follow it gradually.
    #[serde(default)]
    pub fair_bytes: u64,
    /// The bytes of it that count against the budget.
    pub resident_bytes: u64,
    /// Of that, compressed memory.
    pub pool_bytes: u64,
    /// Memory of the program in compressed memory, as it was before.
    pub swapped_pool_bytes: u64,
    /// The same on swap areas.
    pub swapped_file_bytes: u64,
    /// Pages that came back so far.
    #[serde(default)]
    pub pages_in: u64,
    /// Pages that left memory so far.
    #[serde(default)]
    pub pages_out: u64,
    /// Faults that were answered so far.
    #[serde(default)]
    pub faults: u64,
    /// Microseconds in which at least one of its threads waited for memory.
    #[serde(default)]
    pub stall_us: u64,
    /// How long its threads waited for faults.
    #[serde(default)]
    pub fault_us: FaultTimes,
}

/// Times of faults in microseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FaultTimes {
    /// Half of them took at most this.
    pub p50: f64,
    /// All but a hundredth.
    pub p99: f64,
    /// The slowest fault.
    pub max: f64,
}

/// The destination of pages: compressed memory, or a swap area.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum DeviceReport {
    /// Compressed memory of all processes.
    Zram {
        /// Its cap; 0: a share of each process's limit.
        size_bytes: u64,
        /// Its compression.
        codec: &'static str,
        /// The level of zstd, where pages get it.
        #[serde(skip_serializing_if = "Option::is_none")]
        zstd_level: Option<u8>,
        /// When it refuses pages.
        #[serde(flatten)]
        acceptance: PoolAcceptance,
        /// Most in use at one time.
        peak_used_bytes: u64,
    },
    /// A swap area, with a `type` of its own.
    #[serde(untagged)]
    Area(AreaView),
}

/// The part of a report that is fixed from the start of a run.
#[derive(Clone, Debug)]
pub struct ReportFile {
    /// The budget in bytes.
    pub budget: u64,
    /// Cap of the pool.
    pub pool_cap: u64,
    /// The codec of the pool.
    pub codec: Scheme,
    /// When the pool refuses pages.
    pub acceptance: PoolAcceptance,
    /// The program, and when it began.
    pub subject: ReportSubject,
}

impl Report {
    /// The report of a run that ends now.
    pub fn new(
        frame: &ReportFile,
        totals: &Totals,
        exit_status: u8,
        wall_s: f64,
        advice: Option<BudgetAdvice>,
    ) -> Report {
        let ReportFile { pool_cap: size_bytes, acceptance, .. } = *frame;
        let Scheme { choice, level } = frame.codec;
        let zstd_level = choice.has_zstd().then_some(level.get());
        let mut devices = vec![DeviceReport::Zram {
            size_bytes,
            codec: choice.name(),
            zstd_level,
            acceptance,
            peak_used_bytes: totals.peak_pool,
        }];
        devices.extend(totals.areas.iter().cloned().map(DeviceReport::Area));
        Report {
            run: frame.subject.clone(),
            exit_status,
            wall_s: (wall_s * 1e6).round() / 1e6,
            budget_bytes: frame.budget,
            peaks: PeakBytes {
                resident: totals.peak_resident,
                footprint: totals.peak_footprint,
                pool: totals.peak_pool,
            },
            cgroup_left_bytes: totals.cgroup_left,
            stats: Counter::ALL
                .iter()
                .map(|counter| (counter.name(), totals.get(*counter)))
                .collect(),
            fault_us: totals.fault_times(),
            devices,
            groups: totals.groups.clone(),
            errors: BTreeMap::from([
                ("pages_poisoned", totals.get(Counter::PagesPoisoned)),
                ("write_errors", totals.get(Counter::WriteErrors)),
                ("swap_full", totals.get(Counter::SwapFull)),
                ("processes_refused", totals.refused),
                ("past_budget_bytes", past_budget(frame, totals)),
            ]),
            stalls: totals.waits.stalls.clone(),
            advice,
            series: totals.series.clone(),
        }
    }
}

/// What of the peak lies over the budget and the twentieth that is granted to it.
fn past_budget(frame: &ReportFile, totals: &Totals) -> u64 {
    if totals.peak_resident > frame.budget + frame.budget / 20 {
        totals.peak_resident - frame.budget
    } else {
        0
    }
}

/// Says which memory could not go out, where it is at least half of what the run was past its
/// budget.
fn unmovable(frame: &ReportFile, totals: &Totals) -> Option<String> {
    let kinds = [
        (Counter::UnmovableReadOnly, "read-only"),
        (Counter::UnmovableExecutable, "executable"),
        (Counter::UnmovableLocked, "locked"),
        (Counter::UnmovableFile, "privately mapped file"),
        (Counter::UnmovableUnforked, "unforked (MADV_DONTFORK, MADV_WIPEONFORK)"),
    ];
    let bytes = kinds.map(|(counter, _)| totals.get(counter) * PAGE_SIZE as u64);
    let (most, (_, kind)) = bytes.into_iter().zip(kinds).max_by_key(|(bytes, _)| *bytes)?;
    // The counters of processes add up that did not run at the same time: more than the peak tells
    // nothing.
    (most > 0 && most >= past_budget(frame, totals) / 2 && most <= totals.peak_resident)
        .then(|| format!("{} of {kind} memory cannot be swapped", human(most)))
}

/// The line of summary, without the program's own name in front.
pub(crate) fn summary(frame: &ReportFile, totals: &Totals, wall_s: f64) -> String {
    let (peak, budget) = (human(totals.peak_resident), human(frame.budget));
    let mut line = if totals.get(Counter::Engaged) == 0 && totals.pages_out() == 0 {
        format!(
            "{}: {peak} of memory, within its {budget} budget, nothing swapped, {wall_s:.1} s",
            frame.subject.program
        )
    } else {
        format!(
            "{}: {} of memory in a {budget} budget (peak {peak} resident), {} pages out, {} in, \
            {wall_s:.1} s",
            frame.subject.program,
            human(totals.peak_footprint.max(totals.peak_resident)),
            human_count(totals.pages_out()),
            human_count(totals.pages_in()),
        )
    };
    if let Some(left) = totals.cgroup_left {
        line += &format!("; its cgroup left {} of the budget", human(left));
    }
    if totals.get(Counter::PagesPoisoned) > 0 {
        line += &format!(
            "; {} PAGES LOST, their reader got SIGBUS",
            totals.get(Counter::PagesPoisoned)
        );
    }
    if past_budget(frame, totals) > 0 {
        let why = match (totals.get(Counter::SwapFull), totals.refused) {
            (0, 0) => unmovable(frame, totals)
                .unwrap_or_else(|| "it grew faster than it could be swapped".into()),
            (0, _) => "a process could not be managed, see swaptide doctor".into(),
            _ => "swap space ran out, give it more with --swap".into(),
        };
        line = line.replace(", within its ", ", past its ");
        line += &format!("; WENT PAST THE BUDGET: {why}");
    }
    line
}

/// The name by which a program is called in messages.
pub(crate) fn program_name(command: &OsStr) -> String {
    Path::new(command)
        .file_name()
        .unwrap_or(command)
        .to_string_lossy()
        .replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_ipc::Segment;
    use swaptide_sys::mem::{SharedMap, memfd_create};

    fn frame() -> ReportFile {
        ReportFile {
            budget: 512 << 20,
            pool_cap: 0,
            codec: Scheme::default(),
            acceptance: PoolAcceptance::default(),
            subject: ReportSubject::new("python3".into(), vec!["python3".into(), "-c".into()]),
        }
    }

    fn swapped_totals() -> Totals {
        let fd = memfd_create(c"test", Segment::BYTES as u64).expect("memfd");
        let map = SharedMap::map(std::os::fd::AsFd::as_fd(&fd), Segment::BYTES).expect("map");
        let segment = Segment::raw(map).expect("segment");
        let mut totals = Totals {
            peak_resident: 509 << 20,
            peak_footprint: (19 << 30) / 10,
            peak_pool: 5,
            ..Totals::default()
        };
        totals.areas.push(AreaView {
            kind: "file".into(),
            place: "/var/tmp".into(),
            size_bytes: 1 << 32,
            ..AreaView::default()
        });
        for pid in [7, 8] {
            let slot = segment.slot(segment.claim(pid, 0).expect("slot"));
            slot.count(Counter::Engaged, 1);
            // 40,000 were compressed, of which 10,000 continued to the file; 15,000 went there at
            // once.
            slot.count(Counter::Zswpout, 40_000);
            slot.count(Counter::Zswpwb, 10_000);
            slot.count(Counter::Pswpout, 25_000);
            slot.count(Counter::SwpoutZero, 5_000);
            slot.count(Counter::Pswpin, 15_000);
            slot.count(Counter::Zswpin, 20_000);
            slot.count(Counter::SwpinZero, 5_000);
            for _ in 0..99 {
                slot.faults.record(5_000);
            }
            slot.faults.record(3_000_000);
            totals.add(slot);
        }
        totals
    }

    #[test]
    fn the_report_has_the_documented_keys() {
        let report = Report::new(&frame(), &swapped_totals(), 3, 1.5, None);
        let json: serde_json::Value = serde_json::to_value(&report).expect("json");
        let keys: Vec<&str> =
            json.as_object().expect("object").keys().map(String::as_str).collect();
        for key in [
            "exit_status",
            "wall_s",
            "budget_bytes",
            "peak_resident_bytes",
            "peak_footprint_bytes",
            "stats",
            "fault_us",
        ] {
            assert!(keys.contains(&key), "{key} in {keys:?}");
        }
        for key in ["devices", "groups", "errors", "peak_pool_bytes", "run", "series"] {
            assert!(keys.contains(&key), "{key} in {keys:?}");
        }
        assert_eq!(json["stats"]["pswpout"], 50_000);
        assert_eq!(json["devices"][0]["type"], "zram");
        assert_eq!(
            (&json["devices"][1]["type"], &json["devices"][1]["place"]),
            (&"file".into(), &"/var/tmp".into())
        );
        let p50 = json["fault_us"]["p50"].as_f64().expect("p50");
        assert!((5.0..8.0).contains(&p50), "{p50}");
        assert_eq!(json["fault_us"]["max"], 3000.0);
    }

    #[test]
    fn the_summary_tells_what_was_swapped_and_what_went_wrong() {
        let mut totals = swapped_totals();
        assert_eq!(
            summary(&frame(), &totals, 12.34),
            "python3: 1.9G of memory in a 512M budget (peak 509M resident), 120k pages out, 80k \
            in, 12.3 s"
        );
        totals.peak_resident = 700 << 20;
        assert!(summary(&frame(), &totals, 1.0).contains("WENT PAST THE BUDGET"));
        let idle = Totals { peak_resident: 1 << 20, ..Totals::default() };
        assert_eq!(
            summary(&frame(), &idle, 0.0),
            "python3: 1.0M of memory, within its 512M budget, nothing swapped, 0.0 s"
        );
    }
}
