//! What processes and groups did in the last minutes.
//!
//! Owns the samples: one for each look, [`KEPT`] at most, of those that were there at the last one.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::widgets::{Sparkline, Widget};
use swaptide_host::control::watch::Scene;
use swaptide_host::report::totals::ProcessView;

/// OwnSamples that are kept: four minutes of one a second.
const KEPT: usize = 240;

/// What happened between two looks, a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sample {
    /// Bytes at the second look.
    pub(crate) resident: u64,
    /// Pages that came back.
    pub(crate) pages_in: u64,
    /// Pages that went out.
    pub(crate) pages_out: u64,
    /// Faults that were answered.
    pub(crate) faults: u64,
    /// Of a hundred, the part of the time in which a thread waited for memory.
    pub(crate) waits: u64,
}

/// Of one process or group, the newest last.
type OwnSamples = VecDeque<Sample>;

/// Samples of all.
#[derive(Default)]
pub(crate) struct TopHistory {
    processes: BTreeMap<u32, OwnSamples>,
    groups: BTreeMap<String, OwnSamples>,
    /// The last look: when, and what each process had counted.
    last: Option<(Instant, BTreeMap<u32, ProcessView>)>,
}

impl TopHistory {
    /// Takes a look in; what has ended is forgotten.
    pub(crate) fn add(&mut self, scene: &Scene) {
        let now: BTreeMap<u32, ProcessView> = scene
            .runs
            .iter()
            .flat_map(|run| &run.processes)
            .map(|process| (process.pid, process.clone()))
            .collect();
        let at = scene.at.unwrap_or_else(Instant::now);
        let then = self.last.as_ref();
        let seconds =
            then.map_or(0.0, |(before, _)| at.saturating_duration_since(*before).as_secs_f64());
        let of = |process: &ProcessView| {
            let before = then.and_then(|(_, all)| all.get(&process.pid));
            sample(process, before, seconds)
        };
        let samples: BTreeMap<u32, Sample> =
            now.iter().map(|(pid, process)| (*pid, of(process))).collect();
        self.processes.retain(|pid, _| samples.contains_key(pid));
        for (pid, sample) in &samples {
            push(self.processes.entry(*pid).or_default(), *sample);
        }
        self.groups.retain(|path, _| scene.groups.iter().any(|group| group.path == *path));
        for group in &scene.groups {
            let inside = now.values().filter(|process| is_in(&process.group, &group.path));
            let sum = inside.map(|process| samples[&process.pid]).fold(Sample::default(), add);
            push(self.groups.entry(group.path.clone()).or_default(), sum);
        }
        self.last = Some((at, now));
    }

    /// The newest sample of a process.
    pub(crate) fn newest(&self, pid: u32) -> Sample {
        self.processes.get(&pid).and_then(|all| all.back()).copied().unwrap_or_default()
    }

    /// The samples of a process, oldest first.
    pub(crate) fn process(&self, pid: u32, value: fn(&Sample) -> u64) -> Vec<u64> {
        self.processes.get(&pid).map_or_else(Vec::new, |all| all.iter().map(value).collect())
    }

    /// The samples of a group and those below it, oldest first.
    pub(crate) fn group(&self, path: &str, value: fn(&Sample) -> u64) -> Vec<u64> {
        self.groups.get(path).map_or_else(Vec::new, |all| all.iter().map(value).collect())
    }
}

fn sample(process: &ProcessView, before: Option<&ProcessView>, seconds: f64) -> Sample {
    let rate = |value: fn(&ProcessView) -> u64| match before {
        Some(before) if seconds > 0.0 => {
            value(process).saturating_sub(value(before)) as f64 / seconds
        }
        _ => 0.0,
    };
    Sample {
        resident: process.resident_bytes,
        pages_in: rate(|p| p.pages_in) as u64,
        pages_out: rate(|p| p.pages_out) as u64,
        faults: rate(|p| p.faults) as u64,
        waits: (rate(|p| p.stall_us) / 1e4).min(100.0) as u64,
    }
}

fn add(one: Sample, other: Sample) -> Sample {
    Sample {
        resident: one.resident + other.resident,
        pages_in: one.pages_in + other.pages_in,
        pages_out: one.pages_out + other.pages_out,
        faults: one.faults + other.faults,
        // Of several processes, that of the one that waits most.
        waits: one.waits.max(other.waits),
    }
}

fn push(samples: &mut OwnSamples, sample: Sample) {
    if samples.len() == KEPT {
        samples.pop_front();
    }
    samples.push_back(sample);
}

/// True if a process of `group` is in `path`.
fn is_in(group: &str, path: &str) -> bool {
    path == "/"
        || group.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Values in `width` columns, the newest last: of those that share a column the largest; fewer
/// stand at the right.
pub(crate) fn columns(values: &[u64], width: usize) -> Vec<u64> {
    let each = values.len().div_ceil(width.max(1)).max(1);
    let mut parts: Vec<u64> =
        values.rchunks(each).map(|part| part.iter().copied().max().unwrap_or(0)).collect();
    parts.resize(width, 0);
    parts.reverse();
    parts
}

/// A sparkline of one row as text.
pub(crate) fn spark(values: &[u64], width: u16) -> String {
    let area = Rect::new(0, 0, width, 1);
    let mut buffer = Buffer::empty(area);
    Sparkline::default().data(columns(values, usize::from(width))).render(area, &mut buffer);
    buffer.content().iter().map(|cell| cell.symbol()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::look::tests::scene;
    use std::time::Duration;

    #[test]
    fn rates_are_of_a_process_and_summed_in_its_groups() {
        let (mut history, mut scene) = (TopHistory::default(), scene());
        let begin = Instant::now();
        scene.at = Some(begin);
        history.add(&scene);
        assert_eq!(history.newest(41), Sample { resident: 10 << 20, ..Sample::default() });
        scene.at = Some(begin + Duration::from_secs(2));
        for (process, pages) in scene.runs[0].processes.iter_mut().zip([100, 7]) {
            process.pages_in += pages;
            process.stall_us += 500_000;
        }
        history.add(&scene);
        assert_eq!((history.newest(41).pages_in, history.newest(41).waits), (50, 25));
        assert_eq!(history.group("/web", |s| s.pages_in), [0, 53]);
        assert_eq!(history.group("/web", |s| s.waits), [0, 25]);
        scene.runs[0].processes.remove(0);
        history.add(&scene);
        assert_eq!(
            (history.process(41, |s| s.resident).len(), history.newest(41).resident),
            (0, 0)
        );
        for _ in 0..KEPT {
            history.add(&scene);
        }
        assert_eq!(history.process(42, |s| s.resident).len(), KEPT);
    }

    #[test]
    fn a_group_has_what_is_below_it_and_no_other() {
        for (group, path, inside) in [
            ("/web/a", "/web", true),
            ("/web", "/web", true),
            ("/website", "/web", false),
            ("/x", "/", true),
        ] {
            assert_eq!(is_in(group, path), inside, "{group} in {path}");
        }
    }

    #[test]
    fn a_sparkline_has_the_newest_at_the_right_and_the_largest_of_a_column() {
        assert_eq!(columns(&[1, 2, 3], 5), [0, 0, 1, 2, 3]);
        assert_eq!(columns(&[9, 1, 2, 3, 8, 4], 3), [9, 3, 8]);
        assert_eq!(columns(&[], 2), [0, 0]);
        assert_eq!(spark(&[0, 4, 8], 4), "  ▄█");
        assert_eq!(spark(&[], 3), "   ");
    }
}
