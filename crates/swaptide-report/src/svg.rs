//! All of it in one picture.

use crate::chart::{self, Axes, HEIGHT, WIDTH, coordinate};
use crate::figures::{Fact, NamedRun, facts};
use crate::panels::{PANELS, Panel, axis, time_axis};
use crate::saved::{SavedReport, shortened};
use crate::style;
use crate::xml::Xml;

const MARGIN: f64 = 16.0;
const GAP: f64 = 24.0;
/// Above a chart: its title and its legend.
const HEAD: f64 = 40.0;
/// Letters of a line of text that fit a column.
const LETTERS: usize = 72;

/// Draws reports, each with the name of its file, side by side.
pub(crate) fn picture(runs: &[(String, SavedReport)]) -> String {
    let named: Vec<NamedRun<'_>> = runs.iter().map(|(file, run)| NamedRun { file, run }).collect();
    let texts: Vec<Vec<String>> = named.iter().map(lines).collect();
    let reports: Vec<&SavedReport> = named.iter().map(|named| named.run).collect();
    // The panels of one run are in two columns, those of several below each other.
    let columns = runs.len().max(2);
    let rows = if runs.len() > 1 { PANELS.len() } else { PANELS.len().div_ceil(columns) };
    let text_height = 18.0 * texts.iter().map(Vec::len).max().unwrap_or(0) as f64;
    let begin = MARGIN + 30.0 + text_height + GAP;
    let width = 2.0 * MARGIN + columns as f64 * (WIDTH + GAP) - GAP;
    let height = begin + rows as f64 * (HEAD + HEIGHT + GAP);
    let (width_text, height_text) = (coordinate(width), coordinate(height));
    let mut xml = Xml::new("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let root = [
        ("xmlns", "http://www.w3.org/2000/svg"),
        ("width", &*width_text),
        ("height", &*height_text),
        ("viewBox", &*format!("0 0 {width_text} {height_text}")),
        ("role", "img"),
        ("aria-labelledby", "title"),
        ("aria-describedby", "about"),
    ];
    let names: Vec<&str> = reports.iter().map(|run| run.run.program.as_str()).collect();
    let title = format!("swaptide: {}", names.join(", "));
    xml.within("svg", &root, |xml| {
        xml.text("title", &[("id", "title")], &title);
        xml.text("desc", &[("id", "about")], &texts.concat().join(". "));
        xml.style(&style::charts());
        let all = [("class", "paper"), ("width", "100%"), ("height", "100%")];
        xml.empty("rect", &all);
        let head = [("class", "head"), ("x", "16"), ("y", "32")];
        xml.text("text", &head, &shortened(&title, columns * LETTERS / 2));
        for (column, lines) in texts.iter().enumerate() {
            let letters = if runs.len() == 1 { 2 * LETTERS } else { LETTERS };
            let x = coordinate(MARGIN + column as f64 * (WIDTH + GAP));
            for (row, line) in lines.iter().enumerate() {
                let y = coordinate(MARGIN + 30.0 + 18.0 * (row + 1) as f64);
                xml.text("text", &[("x", &x), ("y", &y)], &shortened(line, letters));
            }
        }
        for (number, panel) in PANELS.iter().enumerate() {
            for (column, run) in reports.iter().enumerate() {
                let (column, row) = match runs.len() {
                    1 => (number % columns, number / columns),
                    _ => (column, number),
                };
                let x = MARGIN + column as f64 * (WIDTH + GAP);
                let y = begin + row as f64 * (HEAD + HEIGHT + GAP);
                let axes = Axes { time: time_axis(&reports), values: axis(panel, &reports) };
                cell(xml, panel, run, axes, (x, y), &format!("p{number}-{column}"));
            }
        }
    });
    xml.finish()
}

/// One panel of one run, with its title and its legend.
fn cell(xml: &mut Xml, panel: &Panel, run: &SavedReport, axes: Axes, (x, y): (f64, f64), id: &str) {
    let place = format!("translate({},{})", coordinate(x), coordinate(y));
    xml.within("g", &[("transform", &place)], |xml| {
        xml.text("text", &[("class", "title"), ("y", "12")], panel.title);
        let mut at = 0.0;
        for line in panel.lines {
            chart::swatch(xml, line, at, 22.0);
            let x = coordinate(at + 34.0);
            xml.text("text", &[("class", "faint"), ("x", &x), ("y", "31")], line.name);
            at += 34.0 + 6.1 * line.name.len() as f64 + 14.0;
        }
        let described = format!("{id}-d");
        let group = [
            ("transform", &*format!("translate(0,{HEAD})")),
            ("role", "img"),
            ("aria-labelledby", id),
            ("aria-describedby", &*described),
        ];
        xml.within("g", &group, |xml| chart::draw(xml, id, panel, run, axes));
    });
}

/// What is told of a run above its charts.
fn lines(named: &NamedRun<'_>) -> Vec<String> {
    let rows = facts(named);
    let of = |name: &str| {
        let found = rows.iter().find(|(row, _)| *row == name);
        found.map_or("", |(_, Fact::Words(text) | Fact::Code(text))| text.as_str())
    };
    vec![
        of("Command line").to_owned(),
        format!(
            "{}, {}, exit status {}, budget {}",
            of("Started"),
            of("Duration"),
            of("Exit status"),
            of("Budget")
        ),
        format!(
            "at most in use {}; of the programs {}",
            of("Most in use"),
            of("Most memory of the programs")
        ),
        format!(
            "pages out, in: {}; faults: {}; stalled {}",
            of("Pages out, in"),
            of("Faults"),
            of("Stalled")
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::tests::{parse, sample};
    use crate::xml::tests::parse as elements;

    fn runs(sizes: &[usize]) -> Vec<(String, SavedReport)> {
        let one =
            |points: &usize| (format!("{points}.json"), parse(&sample(*points)).expect("one"));
        sizes.iter().map(one).collect()
    }

    #[test]
    fn a_picture_has_a_chart_for_each_panel_of_each_run() {
        for sizes in [&[50][..], &[50, 20], &[1, 600, 3]] {
            let svg = picture(&runs(sizes));
            let (names, texts) = elements(&svg);
            let count = |name: &str| names.iter().filter(|found| *found == name).count();
            assert_eq!(names[..5], ["svg", "title", "desc", "style", "rect"]);
            assert_eq!(count("title"), 1 + PANELS.len() * sizes.len());
            assert_eq!(count("desc"), count("title"));
            let lines: usize = PANELS.iter().map(|panel| panel.lines.len()).sum();
            // A grid, an area, each line, and each again in the legend.
            assert_eq!(count("path"), sizes.len() * (2 * PANELS.len() + 2 * lines));
            for panel in &PANELS {
                assert!(texts.contains(panel.title), "{}", panel.title);
            }
            assert!(texts.contains("exit status 3"));
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{sizes:?}");
        }
    }

    #[test]
    fn a_hostile_report_brings_no_element() {
        let plain = elements(&picture(&runs(&[5]))).0;
        let mut value = sample(5);
        let hostile = "</text><script>alert(1)</script>\u{0}";
        value["run"]["command"] = serde_json::json!([hostile, "\" onload=\"x"]);
        value["run"]["program"] = hostile.into();
        value["devices"][1]["place"] = hostile.into();
        value["errors"][hostile] = 7.into();
        let svg = picture(&[(hostile.into(), parse(&value).expect("a report"))]);
        assert_eq!(elements(&svg).0, plain);
        assert!(!svg.contains("<script"));
    }

    #[test]
    fn values_beyond_reason_are_drawn_within_the_chart() {
        let mut value = sample(3);
        for key in ["resident_bytes", "faults", "stall_us", "file_bytes"] {
            value["series"][key] = serde_json::json!([0, u64::MAX, 7]);
        }
        value["fault_us"]["max"] = serde_json::json!(1e300);
        let svg = picture(&[("x".into(), parse(&value).expect("a report"))]);
        elements(&svg);
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
