//! What a benchmark found, as JSON and as a table.
//!
//! Owns medians, ratios and the shape of the JSON that scripts read. A ratio is above 1 where
//! swaptide is better, whether more or less of the unit is better.

use std::fmt::Write;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::report::density::{self, DensityRow};
use crate::report::points::{self, Point};
use crate::report::real::{self, RealRow};
pub(crate) use crate::report::side::SWAPTIDE;
pub use crate::report::side::{Side, Spread, human};
use crate::report::side::{digits, round};
use crate::report::threads::{self, ThreadsRow};

/// A peer, and swaptide in the runs that alternated with it.
#[derive(Debug, Clone, PartialEq)]
pub struct Pairing {
    /// As tables name the peer: `kernel-zram`, say.
    pub name: String,
    /// The peer at its best.
    pub peer: Side,
    /// The same peer with the other folio size.
    pub other: Option<Side>,
    /// What is to be said of a folio size that never came to its end.
    pub absent: Option<String>,
    /// swaptide in those runs.
    pub swaptide: Side,
}

/// swaptide in runs that alternated with no peer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Unpaired {
    /// With the budget asked for, where there is no peer (and at the smallest budget of a sweep).
    pub usual: Option<Side>,
    /// With the bare budget, where it was asked for.
    pub bare: Option<Side>,
}

/// Which way is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// A throughput: more is better.
    Higher,
    /// A time: less is better.
    Lower,
}

impl Better {
    /// True if `a` is better than `b`.
    fn prefers(self, a: f64, b: f64) -> bool {
        if self == Better::Higher { a > b } else { a < b }
    }

    /// How many times better `ours` is than `theirs`.
    pub fn ratio(self, ours: f64, theirs: f64) -> f64 {
        if self == Better::Higher { ours / theirs } else { theirs / ours }
    }
}

/// Rows of the benchmarks that have their own kind of them. At most one kind is not empty.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rows {
    /// The budgets of a sweep.
    pub points: Vec<Point>,
    /// Each phase with each number of threads.
    pub threads: Vec<ThreadsRow>,
    /// Each real program in each part of its memory.
    pub real: Vec<RealRow>,
    /// Each number of processes that share a budget.
    pub density: Vec<DensityRow>,
}

/// Everything one call found.
#[derive(Debug, Clone, PartialEq)]
pub struct BenchReport {
    /// Of the benchmark, as on the command line: `seq`, say.
    pub name: String,
    /// What it is about, in a few words.
    pub title: String,
    /// Unit of all values: `MB/s`, `ms`.
    pub unit: String,
    /// Which way is better.
    pub better: Better,
    /// The budget asked for.
    pub budget: u64,
    /// Bytes of data that the program has.
    pub data: u64,
    /// Runs of each side.
    pub runs: u32,
    /// swaptide without a peer.
    pub unpaired: Unpaired,
    /// A row for each peer that was measured.
    pub pairs: Vec<Pairing>,
    /// What some benchmarks have in place of pairs.
    pub rows: Rows,
    /// CPUs, memory and kernel of the machine, as JSON.
    pub machine: Value,
    /// What a reader must know.
    pub notes: Vec<String>,
    /// What went wrong on our own side, where the rest could still be measured.
    pub failed: Vec<String>,
}

impl BenchReport {
    /// The pairing with the best peer.
    pub(crate) fn best(&self) -> Option<&Pairing> {
        let better = |a: &Pairing, b: &Pairing| {
            self.better.prefers(a.peer.stats.median, b.peer.stats.median)
        };
        self.pairs.iter().reduce(|a, b| if better(b, a) { b } else { a })
    }

    fn ratio(&self, pair: &Pairing) -> f64 {
        self.better.ratio(pair.swaptide.stats.median, pair.peer.stats.median)
    }

    /// The JSON that scripts read.
    pub fn json(&self) -> Value {
        let mut peers = Map::new();
        for pair in &self.pairs {
            let mut peer = pair.peer.json(false);
            if let Some(other) = &pair.other {
                peer.insert("other".into(), other.json(false).into());
            }
            peer.insert("swaptide".into(), pair.swaptide.json(true).into());
            peer.insert("ratio".into(), json!(round(self.ratio(pair))));
            peers.insert(pair.name.clone(), peer.into());
        }
        let ours = self.best().map(|p| &p.swaptide).or(self.unpaired.usual.as_ref());
        let mut all = json!({
            "name": self.name,
            "unit": self.unit,
            "better": self.better,
            "budget_bytes": self.budget,
            "data_bytes": self.data,
            "runs": self.runs,
            "swaptide": ours.map(|s| s.json(true)),
            "peers": peers,
            "ratio_to_best_peer": self.best().map(|p| round(self.ratio(p))),
            "best_peer": self.best().map(|p| p.name.clone()),
            "machine": self.machine,
            "notes": self.notes,
            "failed": self.failed,
        });
        if let Some(strict) = &self.unpaired.bare {
            all["swaptide_strict"] = strict.json(true).into();
        }
        if !self.rows.points.is_empty() {
            all["points"] = self.rows.points.iter().map(Point::json).collect();
        }
        if !self.rows.threads.is_empty() {
            all["threads"] = self.rows.threads.iter().map(ThreadsRow::json).collect();
        }
        if !self.rows.real.is_empty() {
            all["real"] = self.rows.real.iter().map(RealRow::json).collect();
            let mean = real::mean_and_worst(&self.rows.real);
            all["geometric_mean"] = json!(mean.map(|(mean, ..)| round(mean)));
            all["least_ratio"] = json!(mean.map(|(_, least, _)| round(least)));
        }
        if !self.rows.density.is_empty() {
            all["density"] = self.rows.density.iter().map(DensityRow::json).collect();
        }
        all
    }

    /// The table a person reads.
    pub fn text(&self) -> String {
        let mut out = format!("swaptide bench {}: {}\n", self.name, self.title);
        if !self.rows.points.is_empty() {
            points::table(&self.rows.points, &mut out);
        } else if !self.rows.threads.is_empty() {
            threads::table(&self.rows.threads, &mut out);
        } else if !self.rows.real.is_empty() {
            real::table(&self.rows.real, &mut out);
        } else if !self.rows.density.is_empty() {
            density::table(&self.rows.density, &mut out);
        } else {
            self.sides(&mut out);
        }
        for note in &self.notes {
            let _ = writeln!(out, "note: {note}");
        }
        out
    }

    fn sides(&self, out: &mut String) {
        let mut rows: Vec<(String, &Side, bool)> = Vec::new();
        for pair in &self.pairs {
            rows.push((
                peer_label(&pair.name, &pair.peer, pair.other.is_some()),
                &pair.peer,
                false,
            ));
            rows.extend(
                pair.other.as_ref().map(|side| (peer_label(&pair.name, side, false), side, false)),
            );
            rows.push((swaptide_label(&pair.swaptide), &pair.swaptide, true));
        }
        rows.extend(self.unpaired.usual.as_ref().map(|side| (swaptide_label(side), side, true)));
        rows.extend(
            self.unpaired
                .bare
                .as_ref()
                .map(|side| (format!("{} (bare budget)", swaptide_label(side)), side, true)),
        );
        let width = rows.iter().map(|r| r.0.chars().count()).max().unwrap_or(0);
        let per_page = if self.unit == "MB/s" { "us/4K" } else { "" };
        let _ = writeln!(
            out,
            "{:width$} {:>9} {:>9} {:>9} {per_page:>7} {:>9} {:>7} {:>7}",
            "", self.unit, "min", "max", "resident", "pool", "total"
        );
        for (label, side, ours) in &rows {
            let s = side.stats;
            let us = if self.unit == "MB/s" {
                format!("{:.2}", 4096.0 / s.median)
            } else {
                String::new()
            };
            let total = side.total(*ours).unwrap_or(0);
            let show = |bytes: u64| if bytes == 0 { "-".into() } else { human(bytes) };
            let resident = total.saturating_sub(side.pool);
            let _ = writeln!(
                out,
                "{label:width$} {:>9} {:>9} {:>9} {us:>7} {:>9} {:>7} {:>7}",
                digits(s.median),
                digits(s.min),
                digits(s.max),
                show(resident),
                show(side.pool),
                show(total)
            );
        }
        for pair in &self.pairs {
            let _ = writeln!(
                out,
                "ratio to {}: {:.3} (above 1: swaptide is better)",
                pair.name,
                self.ratio(pair)
            );
        }
    }
}

fn peer_label(name: &str, side: &Side, counts: bool) -> String {
    let gap = if side.detail.is_empty() { "" } else { " " };
    format!("{name}{gap}{}{}", side.detail, if counts { " (the better)" } else { "" })
}

fn swaptide_label(side: &Side) -> String {
    if side.limit == 0 {
        SWAPTIDE.into()
    } else {
        format!("{SWAPTIDE} --ram {}", human(side.limit))
    }
}

#[cfg(test)]
#[path = "comparison_tests.rs"]
mod tests;
