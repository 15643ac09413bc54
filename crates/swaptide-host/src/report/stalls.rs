//! How long processes waited for memory, and those that made almost no progress.
//!
//! Owns the shapes in which that is reported, and the advice at the end of a run.

use serde::{Deserialize, Serialize};
use swaptide_ipc::{Counter, ProcSlot};

use crate::report::working_set::{ProcMemory, ROUND_TRIP_US, WorkingSet, refaults_since};
use crate::units::human;

/// Nothing is advised where less was waited, in seconds and as a part of the run.
const MIN_ADVISED_WAIT_S: f64 = 0.5;
const MIN_ADVISED_SHARE: f64 = 0.2;
/// Of what was waited, the part that the advised budget saves: as many pages would have stayed.
const SAVED_SHARE: f64 = 0.9;

/// The findings on a process that stalls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StallVerdict {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// Of a hundred, the part of its time that went to waiting for memory.
    pub waiting_percent: u64,
    /// The greatest factor by which it would be faster without that.
    pub speedup: u64,
    /// Its working set, if known.
    pub working_set: Option<WorkingSet>,
}

impl StallVerdict {
    /// In one line, for a run that has `budget` bytes of its own.
    pub(crate) fn describe(&self, budget: Option<u64>) -> String {
        let StallVerdict { pid, name, waiting_percent, speedup, .. } = self;
        let mut line = format!(
            "process {pid} ({name}) makes almost no progress: it waits for memory \
            {waiting_percent} % of the time"
        );
        if let Some(set) = &self.working_set {
            line += &format!("; its working set is about {}", human(set.bytes));
        }
        if let Some(ram) = self.working_set.and_then(|set| set.budget(budget?)) {
            line +=
                &format!("; with --ram {} it could run up to {speedup} times as fast", human(ram));
        }
        line
    }
}

/// Processes that made almost no progress.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StallReport {
    /// The number of times that one was found.
    pub count: u64,
    /// The last of them.
    pub last: Option<StallVerdict>,
}

/// The time that a process waited for memory, and the memory it would have needed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryWait {
    /// Microseconds.
    pub us: u64,
    /// Its working set, if known.
    pub working_set: Option<WorkingSet>,
}

impl MemoryWait {
    /// Of the process of a slot.
    fn of(slot: &ProcSlot) -> MemoryWait {
        let round_trips = slot.counted(Counter::Pgmajfault).saturating_mul(ROUND_TRIP_US);
        MemoryWait {
            us: slot.counted(Counter::StallUs).saturating_add(round_trips),
            working_set: WorkingSet::estimate(&refaults_since(slot, None), &ProcMemory::of(slot)),
        }
    }
}

/// The waits of the processes of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryWaits {
    /// Those that made almost no progress.
    pub stalls: StallReport,
    /// The tree was killed for that.
    pub is_killed: bool,
    /// The process that waited longest.
    pub longest: Option<MemoryWait>,
    /// The most that one has lost by that, as its threads were seen, in microseconds; less than a
    /// second is not seen.
    pub lost_us: u64,
}

impl MemoryWaits {
    /// Adds what one process waited.
    pub(crate) fn add(&mut self, slot: &ProcSlot) {
        let wait = MemoryWait::of(slot);
        if self.longest.is_none_or(|longest| wait.us > longest.us) {
            self.longest = Some(wait);
        }
    }

    /// With which budget a run would have waited little, and how long it would have taken: not less
    /// than `least_s`. `None` where it did not wait much, or that cannot be said.
    pub(crate) fn advice(&self, budget: u64, wall_s: f64, least_s: f64) -> Option<BudgetAdvice> {
        let wait = self.longest?;
        let waited_s = (wait.us.max(self.lost_us) as f64 / 1e6).min(wall_s);
        if waited_s < MIN_ADVISED_WAIT_S || waited_s < wall_s * MIN_ADVISED_SHARE {
            return None;
        }
        let ram_bytes = wait.working_set?.budget(budget)?;
        let seconds = (wall_s - waited_s * SAVED_SHARE).max(least_s);
        (seconds < wall_s).then_some(BudgetAdvice { ram_bytes, seconds, waited_s })
    }
}

/// The estimate for a run with more memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BudgetAdvice {
    /// The budget that would do.
    pub ram_bytes: u64,
    /// The estimated length of the run with that memory.
    pub seconds: f64,
    /// The time that one of its processes waited for memory.
    pub waited_s: f64,
}

impl BudgetAdvice {
    /// In one line.
    pub(crate) fn describe(&self, program: &str) -> String {
        let BudgetAdvice { ram_bytes, seconds, waited_s } = *self;
        format!(
            "{program}: {waited_s:.1} s were spent waiting for memory; with --ram {} this would \
            have taken about {seconds:.1} s",
            human(ram_bytes)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_one_line() {
        let mut verdict = StallVerdict {
            pid: 7,
            name: "python3".into(),
            waiting_percent: 97,
            speedup: 30,
            working_set: None,
        };
        let text =
            "process 7 (python3) makes almost no progress: it waits for memory 97 % of the time";
        assert_eq!(verdict.describe(Some(64 << 20)), text);
        verdict.working_set =
            Some(WorkingSet { bytes: 200 << 20, needed: 250 << 20, limit: 90 << 20 });
        let line = verdict.describe(Some(100 << 20));
        assert!(line.starts_with(text), "{line}");
        assert!(
            line.ends_with("is about 200M; with --ram 273M it could run up to 30 times as fast")
        );
    }

    #[test]
    fn advice_is_given_where_much_was_waited() {
        let working_set = WorkingSet { bytes: 200 << 20, needed: 250 << 20, limit: 90 << 20 };
        let waits = |us: u64, working_set| MemoryWaits {
            longest: Some(MemoryWait { us, working_set }),
            ..MemoryWaits::default()
        };
        let seen = MemoryWaits { lost_us: 9_000_000, ..waits(5_000_000, Some(working_set)) };
        let advice = seen.advice(100 << 20, 10.0, 0.1).expect("much was waited");
        assert_eq!(advice.waited_s, 9.0);
        let budget = 100 << 20;
        let much = waits(8_000_000, Some(working_set));
        let advice = much.advice(budget, 10.0, 0.1).expect("much was waited");
        assert_eq!((advice.ram_bytes >> 20, advice.waited_s), (273, 8.0));
        assert!((advice.seconds - 2.8).abs() < 1e-9, "{advice:?}");
        let line = advice.describe("sort");
        assert!(line.ends_with("with --ram 273M this would have taken about 2.8 s"), "{line}");
        assert_eq!(much.advice(budget, 100.0, 0.1), None, "a small part of the time");
        assert_eq!(waits(400_000, Some(working_set)).advice(budget, 1.0, 0.1), None);
        assert_eq!(waits(8_000_000, None).advice(budget, 10.0, 0.1), None);
        assert_eq!(MemoryWaits::default().advice(budget, 10.0, 0.1), None);
        // More waits than time: several threads, which compute as well.
        let advice = waits(80_000_000, Some(working_set)).advice(budget, 10.0, 6.0);
        assert_eq!(advice.map(|advice| advice.seconds), Some(6.0));
        assert_eq!(much.advice(budget, 10.0, 11.0), None, "nothing would be gained");
    }
}
