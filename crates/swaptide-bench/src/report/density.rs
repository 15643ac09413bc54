//! How many processes share a budget, as JSON and as a table.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::report::side::{digits, human, round};

/// A process that is woken is to answer within this time, 99 times of 100.
pub(crate) const MAX_WAKE_MS: f64 = 2000.0;

/// A number of processes that share a budget, each woken in turn.
#[derive(Debug, Clone, PartialEq)]
pub struct DensityRow {
    /// The program.
    pub program: String,
    /// How many processes there were.
    pub processes: usize,
    /// Bytes that one of them has at rest.
    pub each: u64,
    /// Bytes that all of them may have together; 0: no limit.
    pub budget: u64,
    /// The most that was seen of the budget's use.
    pub used: u64,
    /// Milliseconds from a request to its answer, of each wake.
    pub wakes_ms: Vec<f64>,
    /// What went wrong, if anything did.
    pub failure: Option<String>,
}

impl DensityRow {
    /// The time within which that part of the wakes lies (0 to 1); `None` before the first.
    pub(crate) fn quantile(&self, part: f64) -> Option<f64> {
        let mut sorted = self.wakes_ms.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() as f64 * part).ceil() as usize;
        sorted.get(rank.max(1) - 1).copied()
    }

    /// True if all of them fit: each has answered right, and nearly all soon enough.
    pub(crate) fn fits(&self) -> bool {
        self.failure.is_none() && self.quantile(0.99).is_some_and(|ms| ms < MAX_WAKE_MS)
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "program": self.program,
            "processes": self.processes,
            "each_bytes": self.each,
            "budget_bytes": self.budget,
            "used_bytes": self.used,
            "wakes": self.wakes_ms.len(),
            "wake_p50_ms": self.quantile(0.5).map(round),
            "wake_p99_ms": self.quantile(0.99).map(round),
            "wake_max_ms": self.quantile(1.0).map(round),
            "fits": self.fits(),
            "failure": self.failure,
        })
    }
}

/// The programs there are rows of, in their order.
pub(crate) fn programs(rows: &[DensityRow]) -> Vec<&str> {
    let mut programs: Vec<&str> = rows.iter().map(|row| row.program.as_str()).collect();
    programs.dedup();
    programs
}

/// Appends the table.
pub(super) fn table(rows: &[DensityRow], out: &mut String) {
    let _ = writeln!(
        out,
        "{:9} {:>9} {:>7} {:>7} {:>7} {:>8} {:>8} {:>8}  result",
        "program", "processes", "each", "budget", "used", "p50 ms", "p99 ms", "max ms"
    );
    for row in rows {
        let ms = |part: f64| row.quantile(part).map_or("-".into(), digits);
        let size = |bytes: u64| if bytes == 0 { "-".into() } else { human(bytes) };
        let result = match &row.failure {
            Some(failure) => failure.as_str(),
            None if row.fits() => "fits",
            None => "late",
        };
        let _ = writeln!(
            out,
            "{:9} {:>9} {:>7} {:>7} {:>7} {:>8} {:>8} {:>8}  {result}",
            row.program,
            row.processes,
            human(row.each),
            size(row.budget),
            size(row.used),
            ms(0.5),
            ms(0.99),
            ms(1.0),
        );
    }
    for program in programs(rows) {
        let limited = rows.iter().filter(|row| row.program == program && row.budget > 0);
        let most = limited.clone().filter(|row| row.fits()).map(|row| row.processes).max();
        let Some(row) = limited.clone().next() else { continue };
        let _ = writeln!(
            out,
            "{program}: {} processes fit in a budget that holds {} without swaptide (p99 of a \
            wake below {} s)",
            most.unwrap_or(0),
            row.budget / row.each.max(1),
            MAX_WAKE_MS / 1000.0,
        );
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn row(processes: usize, wakes_ms: &[f64]) -> DensityRow {
        DensityRow {
            program: "pandas".into(),
            processes,
            each: 375 << 20,
            budget: 3000 << 20,
            used: 2990 << 20,
            wakes_ms: wakes_ms.to_vec(),
            failure: None,
        }
    }

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let of_hundred = row(8, &hundred);
        assert_eq!(of_hundred.quantile(0.5), Some(50.0));
        assert_eq!(of_hundred.quantile(0.99), Some(99.0));
        assert_eq!(of_hundred.quantile(1.0), Some(100.0));
        assert_eq!((row(8, &[7.0]).quantile(0.01), row(8, &[]).quantile(0.5)), (Some(7.0), None));
    }

    #[test]
    fn late_or_wrong_run_does_not_fit() {
        let late = row(32, &[100.0, 2500.0]);
        let wrong = DensityRow { failure: Some("a wrong answer".into()), ..row(16, &[1.0]) };
        let alone = DensityRow { budget: 0, ..row(1, &[90.0]) };
        let rows = [alone, row(8, &[100.0]), row(12, &[100.0, 1999.0]), wrong, late];
        assert_eq!(rows.clone().map(|row| row.fits()), [true, true, true, false, false]);
        let mut text = String::new();
        table(&rows, &mut text);
        let last = "pandas: 12 processes fit in a budget that holds 8 without swaptide (p99 of a \
            wake below 2 s)\n";
        assert!(text.ends_with(last), "{text}");
        assert!(text.contains("  a wrong answer\n") && text.contains("  late\n"), "{text}");
    }
}
