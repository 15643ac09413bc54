//! A run over time: how it is recorded, and the shape in which `--report` writes it.
//!
//! The memory controller tells a recorder what it sees at each look. A point holds what was seen
//! within an interval of time; when there are too many, the interval doubles, and neighbours are
//! merged.
//!
//! Invariants
//! 1. There are never more than `MAX_POINTS` points.
//! 2. A point begins where the one before ends, and the first where recording began: what all
//!    points count adds up to what was counted.
//! 3. Merging loses no maximum, and of the budget no minimum.
//!
//! Locks: none; the controller's thread alone.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::to_raw_value;
use swaptide_ipc::Counter;

/// Most points of a run.
const MAX_POINTS: usize = 600;
/// The interval of a point at first: the controller looks every 1 to 50 ms.
const FIRST_INTERVAL: Duration = Duration::from_millis(10);

/// What a run has at a moment; of an interval, the most that it had, and the smallest budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    /// Bytes that it may have, compressed memory included.
    pub budget: u64,
    /// Bytes that it has: those that the budget is for.
    pub resident: u64,
    /// Of these, compressed memory.
    pub pool: u64,
    /// Bytes of the programs in compressed memory, as they were before.
    pub swapped_pool: u64,
    /// Bytes of the programs on swap areas.
    pub swapped_file: u64,
    /// Bytes that are leased of swap files and block devices, by all runs of the supervisor.
    pub file: u64,
    /// Bytes that are leased of NBD exports.
    pub network: u64,
    /// The number of processes.
    pub processes: u64,
}

impl Levels {
    fn and(self, other: Levels) -> Levels {
        Levels {
            budget: self.budget.min(other.budget),
            resident: self.resident.max(other.resident),
            pool: self.pool.max(other.pool),
            swapped_pool: self.swapped_pool.max(other.swapped_pool),
            swapped_file: self.swapped_file.max(other.swapped_file),
            file: self.file.max(other.file),
            network: self.network.max(other.network),
            processes: self.processes.max(other.processes),
        }
    }
}

/// What was counted: since the start of a run, or within an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageTraffic {
    /// Faults on pages that were out, or on their way.
    pub faults: u64,
    /// Pages that came back, those that were brought in ahead among them.
    pub pages_in: u64,
    /// Pages that went out of memory.
    pub pages_out: u64,
}

impl PageTraffic {
    /// By the sums of the counters.
    pub(crate) fn of(get: impl Fn(Counter) -> u64) -> PageTraffic {
        let sum = |counters: [Counter; 3]| {
            counters.into_iter().fold(0u64, |sum, counter| sum.saturating_add(get(counter)))
        };
        let out = sum([Counter::Pswpout, Counter::Zswpout, Counter::SwpoutZero]);
        PageTraffic {
            faults: get(Counter::Pgmajfault),
            pages_in: sum([Counter::Pswpin, Counter::Zswpin, Counter::SwpinZero]),
            pages_out: out.saturating_sub(get(Counter::Zswpwb)),
        }
    }

    fn with(self, other: PageTraffic, join: impl Fn(u64, u64) -> u64) -> PageTraffic {
        PageTraffic {
            faults: join(self.faults, other.faults),
            pages_in: join(self.pages_in, other.pages_in),
            pages_out: join(self.pages_out, other.pages_out),
        }
    }
}

/// A run within an interval of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeriesPoint {
    /// Its end, in microseconds since the start of the run.
    pub end_us: u64,
    /// The most that the run had.
    pub levels: Levels,
    /// What it counted.
    pub traffic: PageTraffic,
    /// Microseconds in which at least one thread waited for memory.
    pub stall_us: u64,
}

impl SeriesPoint {
    /// This point, and the one that follows it, as one.
    fn merged(self, next: SeriesPoint) -> SeriesPoint {
        SeriesPoint {
            end_us: next.end_us,
            levels: self.levels.and(next.levels),
            traffic: self.traffic.with(next.traffic, u64::saturating_add),
            stall_us: self.stall_us.saturating_add(next.stall_us),
        }
    }
}

/// Merges neighbours until each point, but for the last, has `interval_us` at least.
pub fn coarser(points: &[SeriesPoint], begin_us: u64, interval_us: u64) -> Vec<SeriesPoint> {
    let mut merged: Vec<SeriesPoint> = Vec::new();
    // Where the last of these begins.
    let mut begin = begin_us;
    for point in points {
        match merged.last_mut() {
            Some(last) if last.end_us.saturating_sub(begin) < interval_us => {
                *last = last.merged(*point);
            }
            last => {
                begin = last.map_or(begin_us, |last| last.end_us);
                merged.push(*point);
            }
        }
    }
    merged
}

/// Records a run.
#[derive(Debug)]
pub(crate) struct SeriesRecorder {
    clock: Instant,
    /// What the clock showed when recording began, in microseconds since the start of the run.
    begin_us: u64,
    interval_us: u64,
    points: Vec<SeriesPoint>,
    /// Looks that make no point yet.
    open: Option<SeriesPoint>,
    /// What was counted before that.
    counted: PageTraffic,
}

impl SeriesRecorder {
    /// Of a run that began so long ago.
    pub(crate) fn new(age: Duration) -> SeriesRecorder {
        SeriesRecorder {
            clock: Instant::now(),
            begin_us: age.as_micros() as u64,
            interval_us: FIRST_INTERVAL.as_micros() as u64,
            points: Vec::new(),
            open: None,
            counted: PageTraffic::default(),
        }
    }

    /// Microseconds since the start of the run.
    pub(crate) fn at(&self, now: Instant) -> u64 {
        let passed = now.saturating_duration_since(self.clock).as_micros() as u64;
        self.begin_us.saturating_add(passed)
    }

    /// Where the open point begins.
    fn end_us(&self) -> u64 {
        self.points.last().map_or(self.begin_us, |last| last.end_us)
    }

    /// True if a look at this time makes a point, and what was counted is to be told with it.
    pub(crate) fn is_due(&self, at_us: u64) -> bool {
        at_us.saturating_sub(self.end_us()) >= self.interval_us
    }

    /// Takes in a look: what the run has, and how long threads waited since the last one.
    /// `counted`: since the start of the run, where a point is due.
    pub(crate) fn look(
        &mut self,
        at_us: u64,
        levels: Levels,
        stall_us: u64,
        counted: Option<PageTraffic>,
    ) {
        let end_us = at_us.max(self.end_us());
        let seen = SeriesPoint { end_us, levels, traffic: PageTraffic::default(), stall_us };
        self.open = Some(self.open.map_or(seen, |open| open.merged(seen)));
        let Some(counted) = counted else { return };
        self.points.extend(self.closed(counted));
        self.open = None;
        // A process that is gone and not yet counted as that is missing for a moment.
        self.counted = self.counted.with(counted, u64::max);
        while self.points.len() >= MAX_POINTS {
            self.interval_us *= 2;
            self.points = coarser(&self.points, self.begin_us, self.interval_us);
        }
    }

    /// The open point with what has been counted since the one before.
    fn closed(&self, counted: PageTraffic) -> Option<SeriesPoint> {
        let traffic = counted.with(self.counted, u64::saturating_sub);
        let open = self.open?;
        // No more than there was, whatever the looks added up to.
        let stall_us = open.stall_us.min(open.end_us - self.end_us());
        Some(SeriesPoint { traffic, stall_us, ..open })
    }

    /// Everything so far; what has been counted is as given.
    pub(crate) fn series(&self, counted: PageTraffic) -> RunSeries {
        let mut points = self.points.clone();
        if let Some(open) = self.closed(counted) {
            // A rate over a moment says nothing.
            let is_short = open.end_us - self.end_us() < self.interval_us / 2;
            match points.last_mut().filter(|_| is_short) {
                Some(last) => *last = last.merged(open),
                None => points.push(open),
            }
        }
        RunSeries::of(&points, self.begin_us)
    }
}

/// The points of a run, as JSON has them: a list for each value, all of the same length.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunSeries {
    /// Seconds since the start of the run, when the first interval begins.
    pub begin_s: f64,
    /// The same, when each interval ends. It begins where the one before ends.
    #[serde(serialize_with = "in_one_line")]
    pub end_s: Vec<f64>,
    /// The smallest budget within the interval.
    #[serde(serialize_with = "in_one_line")]
    pub budget_bytes: Vec<u64>,
    /// The most memory in use, compressed memory included.
    #[serde(serialize_with = "in_one_line")]
    pub resident_bytes: Vec<u64>,
    /// The most compressed memory.
    #[serde(serialize_with = "in_one_line")]
    pub pool_bytes: Vec<u64>,
    /// The most memory of the programs in compressed memory, as it was before.
    #[serde(serialize_with = "in_one_line")]
    pub swapped_pool_bytes: Vec<u64>,
    /// The most memory of the programs on swap areas.
    #[serde(serialize_with = "in_one_line")]
    pub swapped_file_bytes: Vec<u64>,
    /// The most that was leased of swap files and block devices.
    #[serde(serialize_with = "in_one_line")]
    pub file_bytes: Vec<u64>,
    /// The most that was leased of NBD exports.
    #[serde(serialize_with = "in_one_line")]
    pub network_bytes: Vec<u64>,
    /// The most processes.
    #[serde(serialize_with = "in_one_line")]
    pub processes: Vec<u64>,
    /// Faults within the interval.
    #[serde(serialize_with = "in_one_line")]
    pub faults: Vec<u64>,
    /// Pages that came back within it.
    #[serde(serialize_with = "in_one_line")]
    pub pages_in: Vec<u64>,
    /// Pages that went out within it.
    #[serde(serialize_with = "in_one_line")]
    pub pages_out: Vec<u64>,
    /// Microseconds of it in which at least one thread waited for memory.
    #[serde(serialize_with = "in_one_line")]
    pub stall_us: Vec<u64>,
}

/// A list that stays in one line where JSON is indented.
fn in_one_line<T: Serialize, S: Serializer>(list: &[T], to: S) -> Result<S::Ok, S::Error> {
    match to_raw_value(list) {
        Ok(line) => line.serialize(to),
        Err(_) => list.serialize(to),
    }
}

impl RunSeries {
    fn of(points: &[SeriesPoint], begin_us: u64) -> RunSeries {
        let column = |of: fn(&SeriesPoint) -> u64| points.iter().map(of).collect();
        RunSeries {
            begin_s: begin_us as f64 / 1e6,
            end_s: points.iter().map(|point| point.end_us as f64 / 1e6).collect(),
            budget_bytes: column(|point| point.levels.budget),
            resident_bytes: column(|point| point.levels.resident),
            pool_bytes: column(|point| point.levels.pool),
            swapped_pool_bytes: column(|point| point.levels.swapped_pool),
            swapped_file_bytes: column(|point| point.levels.swapped_file),
            file_bytes: column(|point| point.levels.file),
            network_bytes: column(|point| point.levels.network),
            processes: column(|point| point.levels.processes),
            faults: column(|point| point.traffic.faults),
            pages_in: column(|point| point.traffic.pages_in),
            pages_out: column(|point| point.traffic.pages_out),
            stall_us: column(|point| point.stall_us),
        }
    }

    /// The points, and where the first begins, in microseconds.
    ///
    /// # Errors
    /// What is wrong with them: a file may hold anything.
    pub fn points(&self) -> Result<(u64, Vec<SeriesPoint>), String> {
        let columns = [
            &self.budget_bytes,
            &self.resident_bytes,
            &self.pool_bytes,
            &self.swapped_pool_bytes,
            &self.swapped_file_bytes,
            &self.file_bytes,
            &self.network_bytes,
            &self.processes,
            &self.faults,
            &self.pages_in,
            &self.pages_out,
            &self.stall_us,
        ];
        let count = self.end_s.len();
        if columns.iter().any(|column| column.len() != count) {
            return Err("its lists are not of the same length".into());
        }
        if count == 0 {
            return Err("it has no points".into());
        }
        if count > MAX_POINTS {
            return Err(format!("it has {count} points, more than {MAX_POINTS}"));
        }
        // A thousand years: what lies beyond is no time.
        let us = |s: f64| (0.0..3e10).contains(&s).then(|| (s * 1e6).round() as u64);
        let begin = us(self.begin_s).ok_or("begin_s is no time")?;
        let mut before = begin;
        let point = |at: usize| {
            let end_us = us(self.end_s[at]).filter(|end| *end > before);
            before = end_us.ok_or("end_s does not go up")?;
            let [
                budget,
                resident,
                pool,
                swapped_pool,
                swapped_file,
                file,
                network,
                processes,
                faults,
                pages_in,
                pages_out,
                stall_us,
            ] = columns.map(|column| column[at]);
            Ok(SeriesPoint {
                end_us: before,
                levels: Levels {
                    budget,
                    resident,
                    pool,
                    swapped_pool,
                    swapped_file,
                    file,
                    network,
                    processes,
                },
                traffic: PageTraffic { faults, pages_in, pages_out },
                stall_us,
            })
        };
        let points = (0..count).map(point).collect::<Result<_, &str>>()?;
        Ok((begin, points))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn levels(budget: u64, most: u64) -> Levels {
        Levels {
            budget,
            resident: most,
            pool: most / 2,
            swapped_pool: most / 3,
            swapped_file: most / 4,
            file: most / 5,
            network: most / 6,
            processes: most % 7,
        }
    }

    fn traffic(count: u64) -> PageTraffic {
        PageTraffic { faults: count, pages_in: 2 * count, pages_out: 3 * count }
    }

    /// Looks every `step_us` until `end_us`, each with one fault more.
    fn record(begin_us: u64, step_us: u64, end_us: u64) -> (SeriesRecorder, u64) {
        let mut recorder = SeriesRecorder::new(Duration::from_micros(begin_us));
        let (mut at, mut count) = (begin_us, 0);
        while at < end_us {
            (at, count) = (at + step_us, count + 1);
            let counted = recorder.is_due(at).then(|| traffic(count));
            recorder.look(at, levels(9, at), 0, counted);
        }
        (recorder, count)
    }

    #[test]
    fn a_run_of_a_second_and_one_of_a_week_have_points_enough() {
        const WEEK_S: u64 = 7 * 24 * 3600;
        for (step_us, end_us, least) in [
            (5_000, 1_000_000, 90),
            (50_000, 1_000_000, 20),
            (5_000, 60_000_000, MAX_POINTS / 3),
            (50_000, 3_600_000_000, MAX_POINTS / 3),
            (1_000_000, WEEK_S * 1_000_000, MAX_POINTS / 3),
        ] {
            let (recorder, count) = record(0, step_us, end_us);
            let series = recorder.series(traffic(count));
            let points = series.end_s.len();
            assert!((least..=MAX_POINTS).contains(&points), "{step_us} {end_us}: {points}");
            assert_eq!(series.faults.iter().sum::<u64>(), count);
            assert_eq!(series.resident_bytes.iter().max(), Some(&end_us), "the peak is kept");
        }
    }

    #[test]
    fn recording_that_begins_late_says_so() {
        let (recorder, count) = record(5_000_000, 10_000, 6_000_000);
        let series = recorder.series(traffic(count));
        assert_eq!((series.begin_s, series.end_s[0]), (5.0, 5.01));
        let (begin, points) = series.points().expect("points");
        assert_eq!((begin, points.len()), (5_000_000, 100));
        let fewer = coarser(&points, begin, 100_000);
        assert_eq!((fewer.len(), fewer[0].end_us, fewer[0].traffic.faults), (10, 5_100_000, 10));
    }

    #[test]
    fn a_process_that_is_missing_for_a_moment_is_not_counted_twice() {
        let mut recorder = SeriesRecorder::new(Duration::ZERO);
        for (at, counted) in [(1, 100), (2, 40), (3, 130)] {
            recorder.look(at * 20_000, levels(1, 1), 0, Some(traffic(counted)));
        }
        let series = recorder.series(traffic(130));
        assert_eq!(series.faults, [100, 0, 30]);
    }

    #[test]
    fn json_has_a_line_for_each_list() {
        let (recorder, count) = record(0, 10_000, 1_000_000);
        let series = recorder.series(traffic(count));
        let text = serde_json::to_string_pretty(&series).expect("JSON");
        assert_eq!(text.lines().count(), 16, "{text}");
        assert_eq!(serde_json::from_str::<RunSeries>(&text).expect("a series"), series);
        let value = serde_json::to_value(&series).expect("a value");
        assert_eq!(value["faults"][0], 1);
    }

    #[test]
    fn lists_that_make_no_points_are_refused() {
        let (recorder, count) = record(0, 10_000, 100_000);
        let series = recorder.series(traffic(count));
        let refused = |change: fn(&mut RunSeries)| {
            let mut series = series.clone();
            change(&mut series);
            series.points().expect_err("refused")
        };
        refused(|series| series.faults.truncate(3));
        refused(|series| *series = RunSeries::default());
        refused(|series| series.end_s[1] = series.end_s[0]);
        refused(|series| series.end_s[1] = f64::NAN);
        refused(|series| series.begin_s = -1.0);
        refused(|series| series.end_s[0] = f64::INFINITY);
    }

    proptest! {
        /// Against a list of all looks.
        #[test]
        fn points_are_what_was_seen_within_them(
            begin_us in 0u64..1_000_000,
            scale in 0u32..24,
            looks in prop::collection::vec(
                (1u64..40, 0u64..1000, 0u64..1000, 0u64..50, 0u64..9),
                1..1200,
            ),
        ) {
            let mut recorder = SeriesRecorder::new(Duration::from_micros(begin_us));
            let (mut at, mut count) = (begin_us, 0);
            let mut seen = Vec::new();
            for (step, budget, most, faults, stall_us) in looks {
                at += step << scale;
                count += faults;
                let counted = recorder.is_due(at).then(|| traffic(count));
                recorder.look(at, levels(budget, most), stall_us, counted);
                prop_assert!(recorder.points.len() < MAX_POINTS);
                seen.push((at, budget, most, stall_us));
            }
            let (begin, points) = recorder.series(traffic(count)).points().expect("points");
            prop_assert!(begin == begin_us && points.len() <= MAX_POINTS);
            prop_assert_eq!(points.last().map(|point| point.end_us), Some(at));
            let sum = |of: fn(&SeriesPoint) -> u64| points.iter().map(of).sum::<u64>();
            prop_assert_eq!(sum(|point| point.traffic.faults), count);
            prop_assert_eq!(sum(|point| point.traffic.pages_out), 3 * count);
            let (mut begin, mut short) = (begin, 0);
            for point in &points {
                let (from, end) = (begin, point.end_us);
                let own = || seen.iter().filter(move |look| look.0 > from && look.0 <= end);
                let most = own().map(|look| look.2).max().expect("a look");
                let budget = own().map(|look| look.1).min().expect("a look");
                let wanted = levels(budget, most);
                prop_assert_eq!(
                    (point.levels.resident, point.levels.pool, point.levels.budget),
                    (wanted.resident, wanted.pool, budget)
                );
                let length = point.end_us - begin;
                prop_assert!(point.stall_us <= own().map(|look| look.3).sum::<u64>());
                prop_assert!(point.stall_us <= length);
                short += u32::from(length < recorder.interval_us);
                begin = point.end_us;
            }
            // The last one, and the last one when points were merged.
            prop_assert!(short <= 2, "{short} of {}", points.len());
        }
    }
}
