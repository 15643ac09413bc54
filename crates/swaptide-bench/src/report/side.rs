//! One side of a comparison: its figures, and how they are written.

use serde::Serialize;
use serde_json::{Map, Value, json};

/// Median, least and most of some runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The middle one, or the mean of the two in the middle.
    pub median: f64,
    /// The least of the runs' values.
    pub min: f64,
    /// The largest of the runs' values.
    pub max: f64,
}

impl Spread {
    /// Of at least one value.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut v = values.to_vec();
        v.sort_by(f64::total_cmp);
        let (&min, &max) = (v.first()?, v.last()?);
        let middle = v.len() / 2;
        let median = if v.len() % 2 == 1 { v[middle] } else { (v[middle - 1] + v[middle]) / 2.0 };
        Some(Spread { median, min, max })
    }
}

/// One side of a comparison, over all its runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Side {
    /// What it measured.
    pub stats: Spread,
    /// The limit it ran under: the cgroup's, or swaptide's `--ram`. Zero for none.
    pub limit: u64,
    /// Bytes of the compressed pool.
    pub pool: u64,
    /// The most resident memory seen.
    pub resident: Option<u64>,
    /// True if the pool counts against the limit: always for swaptide, for zswap in cgroup version
    /// 2.
    pub pool_inside: bool,
    /// Codec and folio size of a kernel peer.
    pub detail: String,
    /// Bytes that went to a device in a run.
    pub written: u64,
    /// Runs that failed and were done again.
    pub failed: u32,
}

impl Side {
    /// Memory that was allowed in all.
    pub(crate) fn allowed(&self) -> u64 {
        self.limit + if self.pool_inside { 0 } else { self.pool }
    }

    /// Memory in use in all: measured for swaptide, all that was allowed for a kernel that had to
    /// swap.
    pub fn total(&self, is_swaptide: bool) -> Option<u64> {
        let kernels = (self.limit > 0).then_some(self.allowed());
        if is_swaptide { self.resident } else { kernels }
    }

    pub(super) fn json(&self, is_swaptide: bool) -> Map<String, Value> {
        let mut map = Map::new();
        for (key, value) in [
            ("median", json!(round(self.stats.median))),
            ("min", json!(round(self.stats.min))),
            ("max", json!(round(self.stats.max))),
            ("limit_bytes", json!(self.limit)),
            ("pool_bytes", json!(self.pool)),
            ("total_bytes", json!(self.total(is_swaptide))),
            ("peak_resident_bytes", json!(self.resident)),
        ] {
            map.insert(key.into(), value);
        }
        if !self.detail.is_empty() {
            map.insert("detail".into(), json!(self.detail));
        }
        map
    }
}

/// Four digits after the point are more than any run repeats.
pub(super) fn round(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}

/// The name of our own side.
pub(crate) const SWAPTIDE: &str = "swaptide";

/// A value with as many digits as say something.
pub(super) fn digits(x: f64) -> String {
    match x {
        x if x >= 100.0 => format!("{x:.0}"),
        x if x >= 10.0 => format!("{x:.1}"),
        x => format!("{x:.3}"),
    }
}

/// Bytes, short: 463M, 1.5G.
pub fn human(bytes: u64) -> String {
    let units = [("G", 1u64 << 30), ("M", 1 << 20), ("K", 1 << 10)];
    match units.iter().find(|(_, size)| bytes >= *size) {
        None => format!("{bytes}"),
        Some((unit, size)) if bytes.is_multiple_of(*size) => format!("{}{unit}", bytes / size),
        Some((unit, size)) => {
            let x = bytes as f64 / *size as f64;
            if x >= 10.0 { format!("{x:.0}{unit}") } else { format!("{x:.2}{unit}") }
        }
    }
}
