//! Processes that have some memory: one that has no agent may be given one. Whether it has is not
//! asked here: a place in the segment may be that of the program before.
//!
//! Owns those that were reported. Locks: none; the controller's thread alone.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How often a process is reported that stays large: it may run another program by then.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// What is large where memory is short, at most.
const LARGE_BYTES_NEAR_BUDGET: u64 = 2 << 20;

/// What fills memory faster than this would be far past its limit before its engine is at work.
const FAST_BYTES_PER_S: u64 = 256 << 20;

/// Reports large processes.
#[derive(Default)]
pub(super) struct LargeProcesses {
    least: u64,
    report: Option<Box<dyn Fn(u32) + Send>>,
    report_engaged: Option<Box<dyn Fn(u32) + Send>>,
    reported: BTreeSet<u32>,
    since: Option<Instant>,
}

impl LargeProcesses {
    /// `report` is told of those that have `least` bytes, `report_engaged` of those that are to be
    /// managed and grow fast.
    pub(super) fn new(
        least: u64,
        report: Box<dyn Fn(u32) + Send>,
        report_engaged: Box<dyn Fn(u32) + Send>,
    ) -> LargeProcesses {
        LargeProcesses {
            least,
            report: Some(report),
            report_engaged: Some(report_engaged),
            ..LargeProcesses::default()
        }
    }

    /// A process with the agent is to be managed; `growth` in bytes a second.
    pub(super) fn note_engaged(&self, pid: u32, growth: u64) {
        let is_fast = growth >= FAST_BYTES_PER_S;
        if let Some(report) = self.report_engaged.as_ref().filter(|_| is_fast) {
            report(pid);
        }
    }

    /// Looks at all processes: their numbers, and bytes. `is_near`: a budget is nearly used.
    pub(super) fn look(
        &mut self,
        processes: impl Iterator<Item = (u32, u64)>,
        is_near: bool,
        now: Instant,
    ) {
        let Some(report) = &self.report else { return };
        if now >= *self.since.get_or_insert(now) + REPORT_INTERVAL {
            self.reported.clear();
            self.since = Some(now);
        }
        let least_of_all = self.least.min(LARGE_BYTES_NEAR_BUDGET);
        let least = if is_near { least_of_all } else { self.least };
        let mut reported = BTreeSet::new();
        for (pid, used) in processes {
            let is_new = used >= least && !self.reported.contains(&pid);
            if is_new {
                report(pid);
            }
            // One that has become smaller than any that is reported runs another program.
            if is_new || used >= least_of_all && self.reported.contains(&pid) {
                reported.insert(pid);
            }
        }
        self.reported = reported;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn each_is_reported_when_it_has_become_large_and_now_and_then() {
        let (report, reported) = channel();
        let report = Box::new(move |pid| report.send(pid).expect("it is received"));
        let mut large = LargeProcesses::new(100, report, Box::new(|_| ()));
        let began = Instant::now();
        let mut look = |all: &[(u32, u64)], ms: u64| -> Vec<u32> {
            large.look(all.iter().copied(), false, began + Duration::from_millis(ms));
            reported.try_iter().collect()
        };
        assert_eq!(look(&[(1, 99), (2, 100)], 0), [2]);
        assert_eq!(look(&[(1, 100), (2, 200)], 1), [1]);
        assert!(look(&[(1, 100), (2, 5)], 2).is_empty());
        assert_eq!(look(&[(1, 100), (2, 100)], 3), [2], "another program");
        assert_eq!(look(&[(1, 100), (2, 100)], 1000), [1, 2]);
        assert!(look(&[(1, 100), (2, 100)], 1999).is_empty());
    }

    #[test]
    fn less_is_large_where_memory_is_short() {
        let (report, reported) = channel();
        let report = Box::new(move |pid| report.send(pid).expect("it is received"));
        let mut large = LargeProcesses::new(8 << 20, report, Box::new(|_| ()));
        let now = Instant::now();
        let mut look = |is_near| -> Vec<u32> {
            large.look([(1, 1 << 20), (2, 3 << 20), (3, 9 << 20)].into_iter(), is_near, now);
            reported.try_iter().collect()
        };
        assert_eq!(look(false), [3]);
        assert_eq!(look(true), [2]);
        assert!(look(false).is_empty() && look(true).is_empty(), "they were reported");
    }
}
