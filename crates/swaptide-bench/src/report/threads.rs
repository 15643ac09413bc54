//! Phases with several numbers of threads, as JSON and as a table.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::report::side::{Spread, digits, round};
use crate::workload::phases::Phase;

/// One side of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct ThreadsSide {
    /// The side; of a peer, its codec and its size of folio too.
    pub name: String,
    /// MB/s of all threads together.
    pub stats: Spread,
    /// The time that 99 of 100 touches stay within, in microseconds: the median of the runs.
    pub p99_us: Option<f64>,
    /// The serial part, where it is counted.
    pub serial: Option<SerialFigures>,
}

/// How long locks were held that keep every other fault server waiting: medians of the runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SerialFigures {
    /// Nanoseconds for each fault.
    pub ns_per_fault: f64,
    /// Nanoseconds for each page that was touched.
    pub ns_per_page: f64,
    /// How often such a lock was taken for each fault.
    pub holds_per_fault: f64,
    /// Faults a second that any number of CPUs could serve at most.
    pub most_faults_per_s: f64,
}

impl SerialFigures {
    fn json(&self) -> Value {
        json!({
            "ns_per_fault": round(self.ns_per_fault),
            "ns_per_page": round(self.ns_per_page),
            "holds_per_fault": round(self.holds_per_fault),
            "most_faults_per_s": round(self.most_faults_per_s),
        })
    }
}

impl ThreadsSide {
    fn json(&self) -> Value {
        json!({
            "name": self.name,
            "median": round(self.stats.median),
            "min": round(self.stats.min),
            "max": round(self.stats.max),
            "p99_us": self.p99_us.map(round),
            "serial": self.serial.as_ref().map(SerialFigures::json),
        })
    }
}

/// One phase with one number of threads.
#[derive(Debug, Clone, PartialEq)]
pub struct ThreadsRow {
    /// How many.
    pub threads: u16,
    /// Which.
    pub phase: Phase,
    /// swaptide.
    pub ours: ThreadsSide,
    /// The peer with its better size of folio, where there is a peer.
    pub theirs: Option<ThreadsSide>,
}

impl ThreadsRow {
    /// How many times the peer's throughput swaptide's is.
    pub(crate) fn ratio(&self) -> Option<f64> {
        self.theirs.as_ref().map(|theirs| self.ours.stats.median / theirs.stats.median)
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "threads": self.threads,
            "phase": self.phase,
            "swaptide": self.ours.json(),
            "peer": self.theirs.as_ref().map(ThreadsSide::json),
            "ratio": self.ratio().map(round),
        })
    }
}

/// The phases there are rows of, in the order they were measured in.
pub(crate) fn phases(rows: &[ThreadsRow]) -> Vec<Phase> {
    let mut phases: Vec<Phase> = Vec::new();
    for row in rows {
        if !phases.contains(&row.phase) {
            phases.push(row.phase);
        }
    }
    phases
}

/// Appends the table.
pub(super) fn table(rows: &[ThreadsRow], out: &mut String) {
    let or_none = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    let names = rows.iter().filter_map(|row| Some(row.theirs.as_ref()?.name.len()));
    let width = names.max().unwrap_or(0).max(4);
    let _ = writeln!(
        out,
        "{:7} {:>7} {:>9} {:>9}  {:width$} {:>7} {:>9} {:>9}",
        "phase", "threads", "swaptide", "peer", "", "ratio", "p99 us", "peer's"
    );
    for phase in phases(rows) {
        for row in rows.iter().filter(|row| row.phase == phase) {
            let theirs = row.theirs.as_ref();
            let _ = writeln!(
                out,
                "{:7} {:>7} {:>9} {:>9}  {:width$} {:>7} {:>9} {:>9}",
                phase.name(),
                row.threads,
                digits(row.ours.stats.median),
                or_none(theirs.map(|side| digits(side.stats.median))),
                theirs.map_or("", |side| &side.name),
                or_none(row.ratio().map(|ratio| format!("{ratio:.2}"))),
                or_none(row.ours.p99_us.map(digits)),
                or_none(theirs.and_then(|side| side.p99_us).map(digits)),
            );
        }
    }
    serial_table(rows, out);
}

/// Appends the serial part of each row that has it counted.
fn serial_table(rows: &[ThreadsRow], out: &mut String) {
    let counted = || rows.iter().filter_map(|row| Some((row, row.ours.serial?)));
    if counted().next().is_none() {
        return;
    }
    let _ = writeln!(out, "serial part: locks that keep every other fault server waiting");
    let _ = writeln!(
        out,
        "{:7} {:>7} {:>9} {:>9} {:>9} {:>12}",
        "phase", "threads", "ns/fault", "ns/page", "holds", "faults/s <="
    );
    for phase in phases(rows) {
        for (row, serial) in counted().filter(|(row, _)| row.phase == phase) {
            let _ = writeln!(
                out,
                "{:7} {:>7} {:>9.0} {:>9.0} {:>9.1} {:>12.0}",
                phase.name(),
                row.threads,
                serial.ns_per_fault,
                serial.ns_per_page,
                serial.holds_per_fault,
                serial.most_faults_per_s,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(name: &str, median: f64, p99_us: Option<f64>) -> ThreadsSide {
        let stats = Spread { median, min: median, max: median };
        ThreadsSide { name: name.into(), stats, p99_us, serial: None }
    }

    #[test]
    fn a_table_has_a_line_for_each_phase_and_number_of_threads() {
        let row = |threads, phase, theirs| ThreadsRow {
            threads,
            phase,
            ours: side("swaptide", 300.0, Some(12.5)),
            theirs,
        };
        let peer = side("kernel-zram lz4 4K", 200.0, Some(20.0));
        let rows = [
            row(1, Phase::Seq, Some(peer.clone())),
            row(1, Phase::Random, None),
            row(2, Phase::Seq, Some(peer)),
        ];
        let mut text = String::new();
        table(&rows, &mut text);
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines.len(), 4);
        let seq = ["300", "200", "kernel-zram", "lz4", "4K", "1.50", "12.5", "20.0"];
        assert_eq!(lines[1], [&["seq", "1"], &seq[..]].concat());
        assert_eq!(lines[2], [&["seq", "2"], &seq[..]].concat());
        assert_eq!(lines[3], ["random", "1", "300", "-", "-", "12.5", "-"]);
        assert_eq!(rows[0].json()["ratio"], 1.5);
        assert_eq!(rows[1].json()["peer"], Value::Null);
    }

    #[test]
    fn the_serial_part_is_shown_where_it_is_counted() {
        let mut ours = side("swaptide", 300.0, None);
        let mut rows =
            [ThreadsRow { threads: 4, phase: Phase::Random, ours: ours.clone(), theirs: None }];
        let lines = |rows: &[ThreadsRow]| {
            let mut text = String::new();
            table(rows, &mut text);
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
        };
        let shown: Vec<String> = lines(&rows);
        assert_eq!(shown.len(), 2);
        assert_eq!(rows[0].ours.json()["serial"], Value::Null);
        ours.serial = Some(SerialFigures {
            ns_per_fault: 250.0,
            ns_per_page: 125.4,
            holds_per_fault: 3.0,
            most_faults_per_s: 4e6,
        });
        rows[0].ours = ours;
        let shown: Vec<String> = lines(&rows);
        assert_eq!(shown[4], "random 4 250 125 3.0 4000000");
        assert_eq!(rows[0].ours.json()["serial"]["ns_per_fault"], 250.0);
    }
}
