//! Processes that have some memory: one that has no agent may be given one. Whether it has is not
//! asked here: a place in the segment may be that of the program before.
//!
//! Owns those that were reported. Locks: none; the controller's thread alone.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How often a process is reported that stays large: it may run another program by then.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Reports large processes.
#[derive(Default)]
pub(super) struct LargeProcesses {
    least: u64,
    report: Option<Box<dyn Fn(u32) + Send>>,
    reported: BTreeSet<u32>,
    since: Option<Instant>,
}

impl LargeProcesses {
    /// `report` is told of those that have `least` bytes.
    pub(super) fn new(least: u64, report: Box<dyn Fn(u32) + Send>) -> LargeProcesses {
        LargeProcesses { least, report: Some(report), ..LargeProcesses::default() }
    }

    /// Looks at all processes: their numbers, and bytes.
    pub(super) fn look(&mut self, processes: impl Iterator<Item = (u32, u64)>, now: Instant) {
        let Some(report) = &self.report else { return };
        if now >= *self.since.get_or_insert(now) + REPORT_INTERVAL {
            self.reported.clear();
            self.since = Some(now);
        }
        let large: BTreeSet<u32> =
            processes.filter(|(_, used)| *used >= self.least).map(|(pid, _)| pid).collect();
        large.difference(&self.reported).for_each(|pid| report(*pid));
        self.reported = large;
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
        let mut large = LargeProcesses::new(100, report);
        let began = Instant::now();
        let mut look = |all: &[(u32, u64)], ms: u64| -> Vec<u32> {
            large.look(all.iter().copied(), began + Duration::from_millis(ms));
            reported.try_iter().collect()
        };
        assert_eq!(look(&[(1, 99), (2, 100)], 0), [2]);
        assert_eq!(look(&[(1, 100), (2, 200)], 1), [1]);
        assert!(look(&[(1, 100), (2, 5)], 2).is_empty());
        assert_eq!(look(&[(1, 100), (2, 100)], 3), [2], "another program");
        assert_eq!(look(&[(1, 100), (2, 100)], 1000), [1, 2]);
        assert!(look(&[(1, 100), (2, 100)], 1999).is_empty());
    }
}
