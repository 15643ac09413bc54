//! What is told of a run in words and figures.

use swaptide_host::report::series::coarser;
use swaptide_host::units::{human, human_count};

use crate::panels::{PANELS, PanelSample, samples};
use crate::saved::{SavedReport, shortened};
use crate::scale::{duration, moment};

/// Rows of the table of values over time, at most.
const MAX_ROWS: u64 = 24;
/// Letters of a text in the table: enough for command lines that were typed.
const MAX_TEXT: usize = 8192;

/// A report, and the name of its file.
pub(crate) struct NamedRun<'a> {
    pub(crate) file: &'a str,
    pub(crate) run: &'a SavedReport,
}

/// What a row says.
pub(crate) enum Fact {
    /// In words.
    Words(String),
    /// A text that a computer reads.
    Code(String),
}

/// The rows of the table of runs: their names, and what each says of a run.
pub(crate) fn facts(named: &NamedRun<'_>) -> Vec<(&'static str, Fact)> {
    let NamedRun { file, run } = *named;
    let stat = |name: &str| human_count(run.stats.get(name).copied().unwrap_or(0));
    let (mut pages_in, mut pages_out, mut stall_us, mut processes) = (0u64, 0u64, 0u64, 0);
    for point in run.points() {
        pages_in = pages_in.saturating_add(point.traffic.pages_in);
        pages_out = pages_out.saturating_add(point.traffic.pages_out);
        stall_us = stall_us.saturating_add(point.stall_us);
        processes = processes.max(point.levels.processes);
    }
    let stalled_s = stall_us as f64 / 1e6;
    let share = 100.0 * stalled_s / run.wall_s.max(stalled_s).max(1e-6);
    let of_budget = 100.0 * run.peaks.resident as f64 / run.budget_bytes.max(1) as f64;
    let times = &run.fault_us;
    let mut rows = vec![
        ("Command line", Fact::Code(shortened(&run.command(), MAX_TEXT))),
        ("Report", Fact::Code(file.to_owned())),
    ];
    let mut words = |name, text: String| rows.push((name, Fact::Words(shortened(&text, MAX_TEXT))));
    words("Started", moment(run.run.started_s));
    words("Duration", duration(run.wall_s));
    words("Exit status", run.exit_status.to_string());
    words("Budget", human(run.budget_bytes));
    words("Most in use", format!("{}, {of_budget:.0} % of the budget", human(run.peaks.resident)));
    words(
        "Most memory of the programs",
        format!("{}, resident and swapped", human(run.peaks.footprint)),
    );
    words("Most compressed memory", human(run.peaks.pool));
    words("Pages out, in", format!("{}, {}", human_count(pages_out), human_count(pages_in)));
    words("Faults", stat("pgmajfault"));
    words(
        "Time of a fault",
        format!(
            "half within {:.0} us, 99 % within {:.0} us, longest {:.0} us",
            times.p50, times.p99, times.max
        ),
    );
    words("Stalled", format!("{}, {share:.0} % of the time", duration(stalled_s)));
    words("Most processes", processes.to_string());
    words("Swap areas", areas(run));
    words("Errors", errors(run));
    let advice = run.advice.as_ref().map(|advice| {
        format!("--ram {}: about {}", human(advice.ram_bytes), duration(advice.seconds))
    });
    words("Advice", advice.unwrap_or_else(|| "none".into()));
    rows
}

fn areas(run: &SavedReport) -> String {
    let used = |device: &crate::saved::SavedDevice| {
        let place = device.place.as_ref()?;
        let used = match device.peak_used_bytes {
            0 => "unused".into(),
            bytes => format!("at most {}", human(bytes)),
        };
        Some(format!("{} {place}, {used}", device.kind))
    };
    let all: Vec<String> = run.devices.iter().filter_map(used).collect();
    if all.is_empty() { "none".into() } else { all.join("; ") }
}

fn errors(run: &SavedReport) -> String {
    let mut all: Vec<String> = run
        .errors
        .iter()
        .filter(|(_, count)| **count > 0)
        .map(|(name, count)| match name.strip_suffix("_bytes") {
            Some(name) => format!("{}: {}", name.replace('_', " "), human(*count)),
            None => format!("{}: {count}", name.replace('_', " ")),
        })
        .collect();
    if run.stalls.count > 0 {
        all.push(format!("processes that made almost no progress: {}", run.stalls.count));
    }
    if all.is_empty() { "none".into() } else { all.join("; ") }
}

/// The columns of the table of values over time.
pub(crate) const COLUMNS: [&str; 12] = [
    "until",
    "budget",
    "in use",
    "compressed",
    "swapped to compressed",
    "swapped to areas",
    "files",
    "network",
    "faults/s",
    "pages out/s",
    "pages in/s",
    "stalled",
];

/// Its rows: a run over time, in few steps.
pub(crate) fn over_time(run: &SavedReport) -> Vec<[String; 12]> {
    let end = run.points().last().map_or(0, |point| point.end_us);
    let interval = (end.saturating_sub(run.begin_us()) / MAX_ROWS).max(1);
    let points = coarser(run.points(), run.begin_us(), interval);
    let rate =
        |value: fn(&PanelSample) -> f64, sample: &PanelSample| PANELS[3].unit.tick(value(sample));
    let row = |(point, (_, end, sample)): (
        &swaptide_host::report::series::SeriesPoint,
        (f64, f64, PanelSample),
    )| {
        let levels = &point.levels;
        [
            duration(end),
            human(levels.budget),
            human(levels.resident),
            human(levels.pool),
            human(levels.swapped_pool),
            human(levels.swapped_file),
            human(levels.file),
            human(levels.network),
            rate(PanelSample::faults, &sample),
            rate(PanelSample::pages_out, &sample),
            rate(PanelSample::pages_in, &sample),
            format!("{:.0} %", sample.stalled()),
        ]
    };
    points.iter().zip(samples(&points, run.begin_us())).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::tests::{parse, sample};

    fn of(rows: &[(&str, Fact)], name: &str) -> String {
        match rows.iter().find(|(row, _)| *row == name).expect(name) {
            (_, Fact::Words(text) | Fact::Code(text)) => text.clone(),
        }
    }

    #[test]
    fn the_table_has_what_the_report_says() {
        let run = parse(&sample(20)).expect("a report");
        let rows = facts(&NamedRun { file: "r.json", run: &run });
        for (name, text) in [
            ("Started", "2026-11-29 00:00:00 UTC"),
            ("Duration", "2.0 s"),
            ("Exit status", "3"),
            ("Most in use", "65M, 102 % of the budget"),
            ("Pages out, in", "6.3k, 4.2k"),
            ("Faults", "1.2k"),
            ("Stalled", "0.2 s, 10 % of the time"),
            ("Swap areas", "file /var/tmp, at most 8.0M"),
            ("Errors", "write errors: 2; processes that made almost no progress: 1"),
            ("Advice", "--ram 273M: about 2.5 s"),
        ] {
            assert_eq!(of(&rows, name), text, "{name}");
        }
    }

    #[test]
    fn values_over_time_are_few_and_keep_the_maximum() {
        for points in [1, 5, 24, 25, 600] {
            let run = parse(&sample(points)).expect("a report");
            let rows = over_time(&run);
            assert!(rows.len() <= 25 && rows.len() >= points.min(12), "{points}: {}", rows.len());
            let most = human(run.points().iter().map(|p| p.levels.resident).max().unwrap_or(0));
            assert!(rows.iter().any(|row| row[2] == most), "{points}");
        }
    }
}
