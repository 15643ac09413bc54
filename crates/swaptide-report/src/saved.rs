//! Reading a report; what is none is refused.
//!
//! Invariants
//! 1. The points of a report that was read follow each other in time, and there is at least one.
//! 2. The program's name, which a picture has many times, is short.

use std::collections::BTreeMap;

use serde::Deserialize;
use swaptide_host::report::series::{RunSeries, SeriesPoint};
use swaptide_host::report::totals::{FaultTimes, PeakBytes, ReportSubject};
use thiserror::Error;

/// No report has more bytes: its lists are bounded, and a command line is at most 2 MiB.
pub(crate) const MAX_REPORT_BYTES: u64 = 16 << 20;
/// Seconds beyond which nothing is a time: a thousand years.
const MAX_SECONDS: f64 = 3e10;
/// Letters of a program's name. Names of files have 255 bytes at most.
const MAX_NAME: usize = 256;
/// Letters of a damage that is told.
const MAX_DAMAGE: usize = 256;

/// Why a text is no report that can be drawn.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NotAReport {
    /// Damaged, or something else.
    #[error("not JSON ({0}); name a file that swaptide run --report has written")]
    Json(serde_json::Error),
    /// Of another program.
    #[error("not a report of swaptide; name a file that swaptide run --report has written")]
    Other,
    /// From before reports had one.
    #[error("has no time series: an older swaptide has written it; run the program again")]
    Old,
    /// The daemon was gone at the end of the run.
    #[error("has no time series: no daemon told of it at the end of the run; run it again")]
    Untold,
    /// Something is missing, or cannot be.
    #[error("a damaged report: {0}; run the program again")]
    Damaged(String),
}

/// A swap area, or compressed memory.
#[derive(Debug, Deserialize)]
pub(crate) struct SavedDevice {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(default)]
    pub(crate) place: Option<String>,
    pub(crate) peak_used_bytes: u64,
}

/// Processes that made almost no progress.
#[derive(Debug, Deserialize)]
pub(crate) struct SavedStalls {
    pub(crate) count: u64,
}

/// The budget that would have done.
#[derive(Debug, Deserialize)]
pub(crate) struct SavedAdvice {
    pub(crate) ram_bytes: u64,
    pub(crate) seconds: f64,
}

/// A report, as far as it is shown.
#[derive(Debug, Deserialize)]
pub(crate) struct SavedReport {
    pub(crate) run: ReportSubject,
    pub(crate) exit_status: u8,
    pub(crate) wall_s: f64,
    pub(crate) budget_bytes: u64,
    #[serde(flatten)]
    pub(crate) peaks: PeakBytes,
    pub(crate) stats: BTreeMap<String, u64>,
    pub(crate) fault_us: FaultTimes,
    pub(crate) devices: Vec<SavedDevice>,
    pub(crate) errors: BTreeMap<String, u64>,
    pub(crate) stalls: SavedStalls,
    pub(crate) advice: Option<SavedAdvice>,
    series: RunSeries,
    #[serde(skip)]
    begin_us: u64,
    #[serde(skip)]
    points: Vec<SeriesPoint>,
}

impl SavedReport {
    /// Of the text of a file.
    ///
    /// # Errors
    /// See [`NotAReport`].
    pub(crate) fn parse(text: &[u8]) -> Result<SavedReport, NotAReport> {
        let value: serde_json::Value = serde_json::from_slice(text).map_err(NotAReport::Json)?;
        let is_report = |key| value.get(key).is_some_and(serde_json::Value::is_u64);
        if !["budget_bytes", "peak_resident_bytes", "exit_status"].into_iter().all(is_report) {
            return Err(NotAReport::Other);
        }
        match value.get("series") {
            None => return Err(NotAReport::Old),
            Some(serde_json::Value::Null) => return Err(NotAReport::Untold),
            Some(_) => {}
        }
        let damaged = |error: serde_json::Error| {
            NotAReport::Damaged(shortened(&error.to_string(), MAX_DAMAGE))
        };
        let mut report: SavedReport = serde_json::from_value(value).map_err(damaged)?;
        if !(0.0..MAX_SECONDS).contains(&report.wall_s) {
            return Err(NotAReport::Damaged("wall_s is no time".into()));
        }
        report.run.program = shortened(&report.run.program, MAX_NAME);
        (report.begin_us, report.points) = report.series.points().map_err(NotAReport::Damaged)?;
        Ok(report)
    }

    /// When the first point begins, in microseconds since the start of the run.
    pub(crate) fn begin_us(&self) -> u64 {
        self.begin_us
    }

    /// The run over time.
    pub(crate) fn points(&self) -> &[SeriesPoint] {
        &self.points
    }

    /// The command line in one line.
    pub(crate) fn command(&self) -> String {
        let quoted = |word: &String| {
            let is_plain = |c: char| c.is_alphanumeric() || "-_./=:,+@%^".contains(c);
            if !word.is_empty() && word.chars().all(is_plain) {
                word.clone()
            } else {
                format!("'{}'", word.replace('\'', r"'\''"))
            }
        };
        self.run.command.iter().map(quoted).collect::<Vec<_>>().join(" ")
    }
}

/// The text, or its beginning if it has more letters.
pub(crate) fn shortened(text: &str, letters: usize) -> String {
    if text.chars().nth(letters).is_none() {
        return text.to_owned();
    }
    text.chars().take(letters.saturating_sub(3)).collect::<String>() + "..."
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    /// A report with this number of points.
    pub(crate) fn sample(points: usize) -> Value {
        let list = |of: fn(u64) -> u64| (1..=points as u64).map(of).collect::<Vec<_>>();
        json!({
            "run": {
                "program": "sort",
                "command": ["sort", "-k 2", "it's", "<b>&"],
                "started_s": 1795910400.5,
            },
            "exit_status": 3,
            "wall_s": points as f64 / 10.0,
            "budget_bytes": 64 << 20,
            "peak_resident_bytes": 65 << 20,
            "peak_footprint_bytes": 256 << 20,
            "peak_pool_bytes": 20 << 20,
            "cgroup_left_bytes": null,
            "stats": { "pswpin": 1, "pgmajfault": 1200 },
            "fault_us": { "p50": 8.0, "p99": 120.5, "max": 3000.0 },
            "devices": [
                { "type": "zram", "peak_used_bytes": 20 << 20 },
                { "type": "file", "place": "/var/tmp", "peak_used_bytes": 8 << 20 },
            ],
            "errors": { "swap_full": 0, "write_errors": 2 },
            "stalls": { "count": 1, "last": null },
            "advice": { "ram_bytes": 273 << 20, "seconds": 2.5, "waited_s": 1.0 },
            "series": {
                "begin_s": 0.0,
                "end_s": (1..=points).map(|at| at as f64 / 10.0).collect::<Vec<_>>(),
                "budget_bytes": list(|_| 64 << 20),
                "resident_bytes": list(|at| (at << 20).min(65 << 20)),
                "pool_bytes": list(|at| (at << 18).min(20 << 20)),
                "swapped_pool_bytes": list(|at| at << 20),
                "swapped_file_bytes": list(|at| at << 19),
                "file_bytes": list(|at| at << 19),
                "network_bytes": list(|_| 0),
                "processes": list(|at| at.min(3)),
                "faults": list(|at| at * 10),
                "pages_in": list(|at| at * 20),
                "pages_out": list(|at| at * 30),
                "stall_us": list(|at| at.min(100) * 1000),
            },
        })
    }

    pub(crate) fn parse(value: &Value) -> Result<SavedReport, NotAReport> {
        SavedReport::parse(value.to_string().as_bytes())
    }

    #[test]
    fn a_report_is_read_with_its_points() {
        let report = parse(&sample(20)).expect("a report");
        assert_eq!((report.begin_us(), report.points().len()), (0, 20));
        let last = report.points()[19];
        assert_eq!(
            (last.end_us, last.levels.resident, last.traffic.faults),
            (2_000_000, 20 << 20, 200)
        );
        assert_eq!(report.command(), r"sort '-k 2' 'it'\''s' '<b>&'");
    }

    #[test]
    fn what_cannot_be_drawn_is_told_apart() {
        let text = sample(3).to_string();
        let cut = SavedReport::parse(&text.as_bytes()[..text.len() / 2]);
        assert!(matches!(cut, Err(NotAReport::Json(_))), "{cut:?}");
        for other in [json!([1, 2]), json!({}), json!(7), json!({ "budget_bytes": 1 })] {
            assert!(matches!(parse(&other), Err(NotAReport::Other)), "{other}");
        }
        let with = |change: fn(&mut Value)| {
            let mut value = sample(3);
            change(&mut value);
            parse(&value).expect_err("refused")
        };
        let old = with(|value| drop(value.as_object_mut().map(|map| map.remove("series"))));
        assert!(matches!(old, NotAReport::Old), "{old}");
        let untold = with(|value| value["series"] = Value::Null);
        assert!(matches!(untold, NotAReport::Untold), "{untold}");
        type Damage = (fn(&mut Value), &'static str);
        let damages: [Damage; 7] = [
            (|value| value["wall_s"] = json!(-1), "wall_s"),
            (|value| value["series"]["faults"] = json!([1, 2]), "length"),
            (|value| value["series"]["end_s"] = json!([1.0, 1.0, 2.0]), "go up"),
            (|value| value["series"]["begin_s"] = json!(1e300), "begin_s"),
            (|value| value["series"]["faults"][1] = json!(-4), "invalid value"),
            (|value| value["run"] = json!("x"), "invalid type"),
            (|value| *value = sample(601), "601"),
        ];
        for (change, part) in damages {
            let error = with(change);
            let line = error.to_string();
            assert!(matches!(error, NotAReport::Damaged(_)), "{line}");
            assert!(line.contains(part) && !line.contains('\n'), "{line}");
        }
    }

    #[test]
    fn names_and_damages_are_short() {
        let mut value = sample(3);
        let named = |value: &Value| parse(value).expect("a report").run.program;
        value["run"]["program"] = "ä".repeat(256).into();
        assert_eq!(named(&value), "ä".repeat(256));
        value["run"]["program"] = "ä".repeat(257).into();
        assert_eq!(named(&value), "ä".repeat(253) + "...");
        value["run"] = "x".repeat(1 << 20).into();
        let line = parse(&value).expect_err("damaged").to_string();
        assert!(line.len() < 512 && line.contains("invalid type"), "{line}");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "[\\[\\]{}\":,a-z0-9. -]{0,80}") {
            prop_assert!(SavedReport::parse(text.as_bytes()).is_err());
        }

        #[test]
        fn a_damaged_byte_is_an_error_or_another_report(at in 0usize..4000, byte in any::<u8>()) {
            let mut text = sample(5).to_string().into_bytes();
            let at = at % text.len();
            text[at] = byte;
            if let Err(error) = SavedReport::parse(&text) {
                prop_assert!(!error.to_string().contains('\n'));
            }
        }
    }
}
