//! Which values are drawn, and on which scales: those of all runs are the same.

use swaptide_host::report::series::SeriesPoint;

use crate::saved::SavedReport;
use crate::scale::{Axis, AxisUnit, TimeAxis};

/// A value of a run within an interval of time.
pub(crate) struct PanelSample {
    point: SeriesPoint,
    /// The length of the interval.
    seconds: f64,
}

impl PanelSample {
    fn rate(&self, count: u64) -> f64 {
        count as f64 / self.seconds
    }

    /// Faults in a second.
    pub(crate) fn faults(&self) -> f64 {
        self.rate(self.point.traffic.faults)
    }

    /// Pages that came back in a second.
    pub(crate) fn pages_in(&self) -> f64 {
        self.rate(self.point.traffic.pages_in)
    }

    /// Pages that went out in a second.
    pub(crate) fn pages_out(&self) -> f64 {
        self.rate(self.point.traffic.pages_out)
    }

    /// Of a hundred, the part of the time in which a thread waited.
    pub(crate) fn stalled(&self) -> f64 {
        (self.rate(self.point.stall_us) / 1e4).min(100.0)
    }
}

/// One line of a panel.
pub(crate) struct PanelLine {
    pub(crate) name: &'static str,
    /// Its class of style, which is its colour.
    pub(crate) class: &'static str,
    pub(crate) value: fn(&PanelSample) -> f64,
}

/// Values that are drawn on one pair of axes.
pub(crate) struct Panel {
    pub(crate) title: &'static str,
    pub(crate) unit: AxisUnit,
    pub(crate) lines: &'static [PanelLine],
}

/// All panels, in the order in which they are drawn.
pub(crate) const PANELS: [Panel; 6] = [
    Panel {
        title: "Memory in use",
        unit: AxisUnit::Bytes,
        lines: &[
            PanelLine { name: "in use", class: "a", value: |s| s.point.levels.resident as f64 },
            PanelLine {
                name: "of it compressed memory",
                class: "b",
                value: |s| s.point.levels.pool as f64,
            },
            PanelLine { name: "budget", class: "limit", value: |s| s.point.levels.budget as f64 },
        ],
    },
    Panel {
        title: "Swapped out",
        unit: AxisUnit::Bytes,
        lines: &[
            PanelLine {
                name: "to compressed memory, as it was before",
                class: "b",
                value: |s| s.point.levels.swapped_pool as f64,
            },
            PanelLine {
                name: "to swap areas",
                class: "c",
                value: |s| s.point.levels.swapped_file as f64,
            },
        ],
    },
    Panel {
        title: "Swap areas in use",
        unit: AxisUnit::Bytes,
        lines: &[
            PanelLine {
                name: "files and block devices",
                class: "c",
                value: |s| s.point.levels.file as f64,
            },
            PanelLine { name: "network", class: "d", value: |s| s.point.levels.network as f64 },
        ],
    },
    Panel {
        title: "Faults",
        unit: AxisUnit::PerSecond,
        lines: &[PanelLine { name: "faults a second", class: "a", value: PanelSample::faults }],
    },
    Panel {
        title: "Pages moved",
        unit: AxisUnit::PerSecond,
        lines: &[
            PanelLine { name: "out, pages a second", class: "b", value: PanelSample::pages_out },
            PanelLine { name: "in, pages a second", class: "a", value: PanelSample::pages_in },
        ],
    },
    Panel {
        title: "Stalled",
        unit: AxisUnit::Percent,
        lines: &[PanelLine {
            name: "of the time, a thread waited for memory",
            class: "e",
            value: PanelSample::stalled,
        }],
    },
];

/// Each point of a run: where it begins and ends, in seconds, and what is read of it.
pub(crate) fn samples(
    points: &[SeriesPoint],
    begin_us: u64,
) -> impl Iterator<Item = (f64, f64, PanelSample)> {
    let begins = std::iter::once(begin_us).chain(points.iter().map(|point| point.end_us));
    begins.zip(points).map(|(begin, point)| {
        let (begin, end) = (begin as f64 / 1e6, point.end_us as f64 / 1e6);
        (begin, end, PanelSample { point: *point, seconds: (end - begin).max(1e-6) })
    })
}

/// The values of a line over a run.
pub(crate) fn values(run: &SavedReport, line: &PanelLine) -> Vec<f64> {
    samples(run.points(), run.begin_us()).map(|(_, _, sample)| (line.value)(&sample)).collect()
}

/// The axis of values of a panel, for all runs.
pub(crate) fn axis(panel: &Panel, runs: &[&SavedReport]) -> Axis {
    let all = runs.iter().flat_map(|run| panel.lines.iter().flat_map(|line| values(run, line)));
    Axis::of(panel.unit, all.fold(0.0, f64::max))
}

/// The axis of time, for all runs.
pub(crate) fn time_axis(runs: &[&SavedReport]) -> TimeAxis {
    let ends = runs.iter().filter_map(|run| run.points().last()).map(|point| point.end_us);
    TimeAxis::of(ends.max().unwrap_or(0) as f64 / 1e6)
}

/// What a panel shows of a run, in words.
pub(crate) fn describe(panel: &Panel, run: &SavedReport) -> String {
    let mut text = String::new();
    for line in panel.lines {
        let values = values(run, line);
        let most = values.iter().copied().fold(0.0, f64::max);
        let last = values.last().copied().unwrap_or(0.0);
        let write = |value| panel.unit.write(value);
        text += line.name;
        text += &match panel.unit {
            _ if most == 0.0 => ": none. ".into(),
            AxisUnit::Bytes => format!(": at most {}, {} at the end. ", write(most), write(last)),
            AxisUnit::PerSecond | AxisUnit::Percent => {
                format!(": {} on average, at most {}. ", write(mean(run, line)), write(most))
            }
        };
    }
    text.trim_end().to_owned()
}

/// The average over time.
fn mean(run: &SavedReport, line: &PanelLine) -> f64 {
    let (mut sum, mut time) = (0.0, 0.0);
    for (begin, end, sample) in samples(run.points(), run.begin_us()) {
        sum += (line.value)(&sample) * (end - begin);
        time += end - begin;
    }
    if time > 0.0 { sum / time } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::tests::{parse, sample};

    #[test]
    fn runs_share_their_scales() {
        let runs = [3, 80].map(|points| parse(&sample(points)).expect("a report"));
        let runs = [&runs[0], &runs[1]];
        for panel in &PANELS {
            let (both, long) = (axis(panel, &runs), axis(panel, &runs[1..]));
            assert_eq!(both, long, "{}", panel.title);
        }
        assert_eq!(time_axis(&runs).end, 8.0);
    }

    #[test]
    fn rates_are_of_seconds_and_stalls_of_a_hundred() {
        let run = parse(&sample(20)).expect("a report");
        let line = |panel: usize, line: usize| values(&run, &PANELS[panel].lines[line]);
        // 0.1 s each.
        let last = |panel, at| line(panel, at).last().copied().expect("a value").round();
        assert_eq!((last(3, 0), last(4, 0), last(4, 1)), (2000.0, 6000.0, 4000.0));
        assert_eq!(last(5, 0), 20.0);
        let text = describe(&PANELS[0], &run);
        assert!(text.contains("in use: at most 20M, 20M at the end."), "{text}");
        assert!(describe(&PANELS[2], &run).ends_with("network: none."));
        assert!(describe(&PANELS[3], &run).contains("1.1k/s on average, at most 2.0k/s"));
    }
}
