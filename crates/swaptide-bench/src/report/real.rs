//! Real programs in less memory than they have, as JSON and as a table.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use crate::report::side::{Spread, digits, human, round};

/// One side of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct RealSide {
    /// The side; of the kernel, its codec and its size of folio too.
    pub name: String,
    /// Seconds of the runs that came to their end.
    pub wall_s: Vec<f64>,
    /// CPU seconds of these, with those of the kernel's reclaim threads.
    pub cpu_s: Vec<f64>,
    /// The memory that it was allowed, with the kernel's pool: the median.
    pub allowed: u64,
    /// The most that it used, where it was measured.
    pub peak: u64,
    /// How the run ended that was the last because it did not come to its end.
    pub ending: Option<String>,
    /// What the program has measured itself: a value for each run.
    pub figures: BTreeMap<String, Vec<f64>>,
}

impl RealSide {
    /// The median time; `None` where a run did not come to its end.
    pub(crate) fn seconds(&self) -> Option<f64> {
        match self.ending {
            None => Spread::of(&self.wall_s).map(|spread| spread.median),
            Some(_) => None,
        }
    }

    fn cpu(&self) -> Option<f64> {
        self.seconds().and(Spread::of(&self.cpu_s)).map(|spread| spread.median)
    }

    fn json(&self) -> Value {
        let figures: BTreeMap<&str, f64> = self
            .figures
            .iter()
            .filter_map(|(name, values)| Some((name.as_str(), round(Spread::of(values)?.median))))
            .collect();
        json!({
            "name": self.name,
            "seconds": Spread::of(&self.wall_s),
            "cpu_seconds": Spread::of(&self.cpu_s),
            "allowed_bytes": self.allowed,
            "peak_bytes": self.peak,
            "ending": self.ending,
            "figures": figures,
        })
    }
}

/// A program in a part of its memory.
#[derive(Debug, Clone, PartialEq)]
pub struct RealRow {
    /// The program.
    pub program: String,
    /// What it does.
    pub what: String,
    /// Its memory is divided by this.
    pub divisor: u64,
    /// Without a limit.
    pub alone: RealSide,
    /// swaptide.
    pub ours: RealSide,
    /// The kernel with its better size of folio, where it is compared with.
    pub theirs: Option<RealSide>,
}

impl RealRow {
    /// How many times faster than the kernel swaptide is; `None` where one did not come to its end.
    pub(crate) fn ratio(&self) -> Option<f64> {
        Some(self.theirs.as_ref()?.seconds()? / self.ours.seconds()?)
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "program": self.program,
            "what": self.what,
            "divisor": self.divisor,
            "alone": self.alone.json(),
            "swaptide": self.ours.json(),
            "peer": self.theirs.as_ref().map(RealSide::json),
            "ratio": self.ratio().map(round),
        })
    }
}

/// The geometric mean of the ratios, the least of them, and how many there are.
pub(crate) fn mean_and_worst(rows: &[RealRow]) -> Option<(f64, f64, usize)> {
    let ratios: Vec<f64> = rows.iter().filter_map(RealRow::ratio).collect();
    let least = ratios.iter().copied().reduce(f64::min)?;
    let logs: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
    Some(((logs / ratios.len() as f64).exp(), least, ratios.len()))
}

/// Seconds, or how it ended instead.
fn time_or_ending(side: &RealSide) -> String {
    match (side.seconds(), &side.ending) {
        (Some(seconds), _) => format!("{seconds:.2}"),
        (None, Some(ending)) => ending.clone(),
        (None, None) => "-".into(),
    }
}

/// Appends the table.
pub(super) fn table(rows: &[RealRow], out: &mut String) {
    let header = ["program", "part", "memory", "alone", "kernel", "swaptide", "ratio"];
    let [program, part, memory, alone, kernel, swaptide, ratio] = header;
    let _ = writeln!(
        out,
        "{program:9} {part:>4} {memory:>7} {alone:>7} {kernel:>9} {swaptide:>9} {ratio:>6} \
        {:>16}",
        "CPU s"
    );
    for row in rows {
        let or_none = |value: Option<f64>| value.map_or("-".into(), digits);
        let theirs = row.theirs.as_ref();
        let _ = writeln!(
            out,
            "{:9} {:>4} {:>7} {:>7} {:>9} {:>9} {:>6} {:>7} {:>8}",
            row.program,
            format!("1/{}", row.divisor),
            human(row.ours.allowed),
            time_or_ending(&row.alone),
            theirs.map_or("-".into(), time_or_ending),
            time_or_ending(&row.ours),
            row.ratio().map_or("-".into(), |ratio| format!("{ratio:.2}")),
            or_none(theirs.and_then(RealSide::cpu)),
            or_none(row.ours.cpu()),
        );
    }
    figures_table(rows, out);
    if let Some((mean, worst, n)) = mean_and_worst(rows) {
        let _ = writeln!(
            out,
            "ratio to the kernel: geometric mean {mean:.2}, least {worst:.2}, of the {n} of {} \
            rows in which both came to their end (above 1: swaptide is faster)",
            rows.len()
        );
    }
}

/// Appends what programs have measured themselves.
fn figures_table(rows: &[RealRow], out: &mut String) {
    let median = |side: &RealSide, name: &str| {
        Spread::of(side.figures.get(name)?).map(|spread| digits(spread.median))
    };
    for row in rows {
        for name in row.ours.figures.keys() {
            let theirs = row.theirs.as_ref().and_then(|side| median(side, name));
            let _ = writeln!(
                out,
                "{:9} {:>4} {name:22} alone {:>8}, kernel {:>8}, swaptide {:>8}",
                row.program,
                format!("1/{}", row.divisor),
                median(&row.alone, name).unwrap_or("-".into()),
                theirs.unwrap_or("-".into()),
                median(&row.ours, name).unwrap_or("-".into()),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(name: &str, wall_s: &[f64], ending: Option<&str>) -> RealSide {
        RealSide {
            name: name.into(),
            wall_s: wall_s.to_vec(),
            cpu_s: wall_s.iter().map(|s| s * 2.0).collect(),
            allowed: 128 << 20,
            peak: 0,
            ending: ending.map(str::to_owned),
            figures: BTreeMap::new(),
        }
    }

    fn row(ours: RealSide, theirs: Option<RealSide>) -> RealRow {
        RealRow {
            program: "sort".into(),
            what: "lines".into(),
            divisor: 2,
            alone: side("alone", &[1.0], None),
            ours,
            theirs,
        }
    }

    #[test]
    fn a_side_that_did_not_come_to_its_end_has_no_ratio() {
        let killed = side("kernel", &[3.0], Some("killed"));
        let whole = row(side("swaptide", &[2.0, 1.0, 4.0], None), Some(side("k", &[3.0], None)));
        let other = row(side("swaptide", &[2.0], None), Some(killed));
        assert_eq!((whole.ratio(), other.ratio()), (Some(1.5), None));
        let late = row(side("swaptide", &[], Some("late")), Some(side("k", &[3.0], None)));
        assert_eq!(late.ratio(), None);
        let rows = [whole, other, late];
        assert_eq!(mean_and_worst(&rows).map(|(.., n)| n), Some(1));
        let mut text = String::new();
        table(&rows, &mut text);
        let words: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[1][..7], ["sort", "1/2", "128M", "1.00", "3.00", "2.00", "1.50"]);
        assert_eq!(words[2][4..7], ["killed", "2.00", "-"]);
        assert_eq!(words[3][5..7], ["late", "-"]);
    }

    #[test]
    fn the_mean_is_geometric() {
        let rows = [4.0, 1.0].map(|s| row(side("s", &[1.0], None), Some(side("k", &[s], None))));
        let (mean, worst, n) = mean_and_worst(&rows).expect("two rows");
        assert!((mean - 2.0).abs() < 1e-9 && worst == 1.0 && n == 2, "{mean} {worst} {n}");
        assert_eq!(mean_and_worst(&[]), None);
    }
}
