//! The cells of a sweep, as JSON and as a table.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::report::side::{SWAPTIDE, Side, digits, human, round};
use crate::workload::phases::{PageContent, Phase};

/// One side with one kind of data at one budget.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// The side.
    pub name: String,
    /// How far the data compresses.
    pub content: PageContent,
    /// The budget of the sweep that this belongs to; the memory allowed may be more
    /// ([`Side::allowed`]).
    pub budget: u64,
    /// The whole job's throughput, and the memory.
    pub side: Side,
    /// Each phase's throughput in MB/s, as far as the job came.
    pub phases: Vec<(Phase, f64)>,
    /// How long the job took.
    pub wall_s: f64,
    /// Bytes of which every word was found right at the end.
    pub verified: u64,
    /// True if a limit of time cut something short.
    pub capped: bool,
    /// The peer that had as much memory, and the ratio to it (above 1 where swaptide is better).
    pub against: Option<(String, f64)>,
}

impl Point {
    /// Peak resident memory as a part of the budget; the kernel's side is held to its limit by the
    /// kernel.
    fn peak_over_budget(&self) -> Option<f64> {
        let peak = self.side.resident.filter(|_| self.name == SWAPTIDE && self.side.limit > 0)?;
        Some(peak as f64 / self.side.limit as f64)
    }

    fn phase(&self, phase: Phase) -> Option<f64> {
        self.phases.iter().find(|(p, _)| *p == phase).map(|(_, speed)| *speed)
    }

    /// The point's part of the JSON.
    pub fn json(&self) -> Value {
        let mut map = self.side.json(self.name == SWAPTIDE);
        let phases: Map<String, Value> =
            self.phases.iter().map(|(p, x)| (p.name().into(), json!(round(*x)))).collect();
        for (key, value) in [
            ("side", json!(self.name)),
            ("data_ratio", json!(self.content.name())),
            ("budget_bytes", json!(self.budget)),
            ("allowed_bytes", json!(self.side.allowed())),
            ("phases", phases.into()),
            ("wall_s", json!(round(self.wall_s))),
            ("verified_bytes", json!(self.verified)),
            ("peak_over_budget", json!(self.peak_over_budget().map(round))),
            ("capped", json!(self.capped)),
            ("peer", json!(self.against.as_ref().map(|b| &b.0))),
            ("ratio_to_peer", json!(self.against.as_ref().map(|b| round(b.1)))),
        ] {
            map.insert(key.into(), value);
        }
        map.into()
    }

    fn label(&self) -> String {
        let detail = if self.side.detail.is_empty() {
            String::new()
        } else {
            format!(" {}", self.side.detail)
        };
        match (self.side.pool_inside, self.side.pool) {
            (false, pool @ 1..) => {
                format!("{}{detail} {} + pool {}", self.name, human(self.side.limit), human(pool))
            }
            _ => format!("{}{detail} {}", self.name, human(self.side.limit)),
        }
    }
}

/// The points of each kind of data by the memory they were allowed.
pub fn sorted(points: &[Point], content: PageContent) -> Vec<&Point> {
    let mut points: Vec<&Point> = points.iter().filter(|p| p.content == content).collect();
    points.sort_by(|a, b| (a.side.allowed(), &a.name).cmp(&(b.side.allowed(), &b.name)));
    points
}

/// The kinds of data there are points of, in the order they were measured in.
pub(crate) fn contents(points: &[Point]) -> Vec<PageContent> {
    let mut contents: Vec<PageContent> = Vec::new();
    for point in points {
        if !contents.contains(&point.content) {
            contents.push(point.content);
        }
    }
    contents
}

/// Appends the table of a sweep.
pub fn table(points: &[Point], out: &mut String) {
    let width = points.iter().map(|p| p.label().chars().count()).max().unwrap_or(0) + 2;
    for content in contents(points) {
        let _ = writeln!(out, "data {}:", content.describe());
        let heads =
            ["memory", "MB/s", "fill", "seq", "random", "verify", "seconds", "peak", "peak/budget"];
        let _ = write!(out, "{:width$}", "");
        for head in heads {
            let _ = write!(out, " {head:>8}");
        }
        out.push('\n');
        for point in sorted(points, content) {
            let speed = |phase| point.phase(phase).map_or("-".into(), digits);
            let _ = write!(
                out,
                "{:width$} {:>8} {:>8}",
                format!("  {}", point.label()),
                human(point.side.allowed()),
                digits(point.side.stats.median)
            );
            for phase in [Phase::Fill, Phase::Seq, Phase::Random, Phase::Verify] {
                let _ = write!(out, " {:>8}", speed(phase));
            }
            let peak = point.side.total(point.name == SWAPTIDE).map_or("-".into(), human);
            let over = point.peak_over_budget().map_or("-".into(), |x| format!("{x:.3}"));
            let _ = write!(out, " {:>8.1} {peak:>8} {over:>11}", point.wall_s);
            if let Some((peer, ratio)) = &point.against {
                let _ = write!(out, "  {ratio:.2} x {peer}");
            }
            if point.capped {
                let _ = write!(out, "  cut short ({} checked)", human(point.verified));
            }
            out.push('\n');
        }
    }
}
