//! What an experiment hands back: rows, curves and notes; the table made of them.

use serde::Serialize;

/// One measured comparison.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// What was done: mode, device size, number of threads.
    pub case: String,
    /// What was measured.
    pub metric: String,
    /// Its unit.
    pub unit: String,
    /// The design that came before, measured here.
    pub before: Option<f64>,
    /// swaptide's core (or what the row's case names), measured here.
    pub after: Option<f64>,
    /// Sample standard deviation of `before`, where it is a mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before_sd: Option<f64>,
    /// The same of `after`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_sd: Option<f64>,
    /// `after` against `before`, in per cent.
    pub delta_pct: Option<f64>,
    /// The published number without the change.
    pub seed_before: Option<f64>,
    /// The published number with the change.
    pub seed_after: Option<f64>,
    /// Is the published number the same quantity, or one that only should have the same shape?
    pub same_quantity: bool,
}

impl Row {
    /// A row with both sides measured.
    pub fn new(case: impl Into<String>, metric: &str, unit: &str, before: f64, after: f64) -> Row {
        let delta_pct = (before != 0.0).then(|| (after - before) / before * 100.0);
        let (case, metric, unit) = (case.into(), metric.into(), unit.into());
        Row {
            case,
            metric,
            unit,
            before: Some(before),
            after: Some(after),
            delta_pct,
            ..Row::default()
        }
    }

    /// With standard deviations of both sides.
    pub(crate) fn with_deviations(self, before: f64, after: f64) -> Row {
        Row { before_sd: Some(before), after_sd: Some(after), ..self }
    }

    /// With published numbers that measure the same quantity.
    pub(crate) fn same_as(self, before: f64, after: f64) -> Row {
        Row { seed_before: Some(before), seed_after: Some(after), same_quantity: true, ..self }
    }

    /// With published numbers that measure something else, which should move the same way.
    pub(crate) fn shaped_like(self, before: f64, after: f64) -> Row {
        Row { seed_before: Some(before), seed_after: Some(after), same_quantity: false, ..self }
    }

    fn compared(&self) -> &'static str {
        match (self.seed_before, self.same_quantity) {
            (None, _) => "",
            (_, true) => "same quantity",
            (_, false) => "same shape only",
        }
    }
}

/// Curves over one quantity.
#[derive(Clone, Debug)]
pub struct Plot {
    /// What lies on the x axis.
    pub x: String,
    /// What lies on the y axis.
    pub y: String,
    /// Does x grow by factors?
    pub log_x: bool,
    /// What is drawn.
    pub curves: Vec<Curve>,
}

/// One curve of a plot.
#[derive(Clone, Debug)]
pub struct Curve {
    /// What it shows.
    pub name: String,
    /// Is it swaptide's?
    pub ours: bool,
    /// x and y.
    pub points: Vec<(f64, f64)>,
}

/// The outcome of one experiment.
#[derive(Clone, Debug)]
pub struct LabReport {
    /// The experiment's name on the command line.
    pub name: &'static str,
    /// One line saying what was compared.
    pub title: String,
    /// The comparisons.
    pub rows: Vec<Row>,
    /// The curves of the plot.
    pub plot: Plot,
    /// What a reader must know to judge the numbers.
    pub notes: Vec<String>,
}

/// A number with as many digits as it deserves.
fn shown(value: Option<f64>) -> String {
    match value {
        None => String::from("-"),
        Some(v) if v == 0.0 || v.abs() >= 1e5 => format!("{v:.0}"),
        Some(v) if v.abs() >= 100.0 => format!("{v:.1}"),
        Some(v) => format!("{v:.2}"),
    }
}

/// A mean with its deviation, where there is one.
fn deviating(value: Option<f64>, deviation: Option<f64>) -> String {
    match (value, deviation) {
        (Some(value), Some(deviation)) => format!("{value:.3}+-{deviation:.3}"),
        _ => shown(value),
    }
}

impl LabReport {
    /// The table as text, with the notes below.
    pub fn text(&self) -> String {
        let head = [
            "case",
            "metric",
            "unit",
            "before",
            "after",
            "change",
            "published before",
            "published after",
            "published is the",
        ];
        let rows = self.rows.iter().map(|row| {
            let change = row.delta_pct.map_or(String::from("-"), |pct| format!("{pct:+.1}%"));
            let seed = |value: Option<f64>| value.map_or(String::new(), |v| shown(Some(v)));
            [
                row.case.clone(),
                row.metric.clone(),
                row.unit.clone(),
                deviating(row.before, row.before_sd),
                deviating(row.after, row.after_sd),
                change,
                seed(row.seed_before),
                seed(row.seed_after),
                row.compared().into(),
            ]
        });
        let lines: Vec<[String; 9]> = std::iter::once(head.map(String::from)).chain(rows).collect();
        let mut widths = [0; 9];
        for line in &lines {
            widths
                .iter_mut()
                .zip(line)
                .for_each(|(width, cell)| *width = (*width).max(cell.chars().count()));
        }
        let mut text = format!("swaptide lab {}: {}\n\n", self.name, self.title);
        for line in &lines {
            let cells = line.iter().zip(widths).enumerate().map(|(i, (cell, width))| match i {
                0..=2 | 8 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
        text.push('\n');
        self.notes.iter().for_each(|note| text.push_str(&format!("- {note}\n")));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_aligned_columns_and_says_what_is_comparable() {
        let report = LabReport {
            name: "test",
            title: "a against b".into(),
            rows: vec![
                Row::new("one", "speed", "Mpages/s", 2.0, 3.0).shaped_like(4775.18, 6381.43),
                Row::new("another case", "fallback", "%", 0.0, 0.0).same_as(100.0, 0.0),
                Row::new("third", "time", "ns", 1234.5, 12.0),
            ],
            plot: Plot { x: String::new(), y: String::new(), log_x: false, curves: vec![] },
            notes: vec!["noisy".into()],
        };
        let text = report.text();
        for part in ["+50.0%", "same shape only", "same quantity", "4775.2", "- noisy", "1234.5"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        let at = |line: usize, word: &str| text.lines().nth(line).unwrap().find(word).unwrap();
        assert_eq!((at(2, "metric"), at(2, "metric")), (at(3, "speed"), at(4, "fallback")));
        assert_eq!(report.rows[1].delta_pct, None, "no per cent of nothing");
    }
}
