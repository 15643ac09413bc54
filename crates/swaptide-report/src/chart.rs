//! One panel of one run.
//!
//! A value holds for a whole interval of time, so lines are steps.

use std::fmt::Write;

use crate::panels::{Panel, PanelLine, describe, samples};
use crate::saved::SavedReport;
use crate::scale::{Axis, TimeAxis};
use crate::xml::Xml;

/// The size of a chart.
pub(crate) const WIDTH: f64 = 440.0;
pub(crate) const HEIGHT: f64 = 190.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 24.0;

/// The axes of a chart.
#[derive(Clone, Copy)]
pub(crate) struct Axes {
    pub(crate) time: TimeAxis,
    pub(crate) values: Axis,
}

impl Axes {
    fn x(&self, seconds: f64) -> String {
        let share = (seconds / self.time.end).clamp(0.0, 1.0);
        coordinate(LEFT + share * (WIDTH - LEFT - RIGHT))
    }

    fn y(&self, value: f64) -> String {
        let share = (value / self.values.end).clamp(0.0, 1.0);
        coordinate(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM))
    }
}

/// A tenth of a unit is less than a pixel.
pub(crate) fn coordinate(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// Draws the ground, the axes and the lines. What they show is told by the title and the
/// description that come first. `id`: unique within the document.
pub(crate) fn draw(xml: &mut Xml, id: &str, panel: &Panel, run: &SavedReport, axes: Axes) {
    xml.text("title", &[("id", id)], &format!("{}: {}", run.run.program, panel.title));
    xml.text("desc", &[("id", &format!("{id}-d"))], &describe(panel, run));
    let (left, right) = (coordinate(LEFT), coordinate(WIDTH - RIGHT));
    let (top, bottom) = (coordinate(TOP), coordinate(HEIGHT - BOTTOM));
    let mut grid = String::new();
    for value in axes.values.ticks() {
        let y = axes.y(value);
        let _ = write!(grid, "M{left} {y}H{right}");
    }
    for (seconds, _) in axes.time.ticks() {
        let x = axes.x(seconds);
        let _ = write!(grid, "M{x} {top}V{bottom}");
    }
    xml.empty("path", &[("class", "grid"), ("d", &grid)]);
    for value in axes.values.ticks() {
        let place = [
            ("class", "faint"),
            ("x", &*coordinate(LEFT - 6.0)),
            ("y", &*axes.y(value)),
            ("dy", "3.8"),
            ("text-anchor", "end"),
        ];
        xml.text("text", &place, &panel.unit.tick(value));
    }
    for (seconds, text) in axes.time.ticks() {
        let place = [
            ("class", "faint"),
            ("x", &*axes.x(seconds)),
            ("y", &*coordinate(HEIGHT - 8.0)),
            ("text-anchor", "middle"),
        ];
        xml.text("text", &place, &text);
    }
    for (number, line) in panel.lines.iter().enumerate() {
        let steps = steps(run, line, axes);
        if number == 0 {
            let area = format!("{}V{bottom}H{}Z", steps.path, steps.begin);
            xml.empty("path", &[("class", &format!("area {}", line.class)), ("d", &area)]);
        }
        xml.empty("path", &[("class", &format!("line {}", line.class)), ("d", &steps.path)]);
    }
}

/// A line as a path.
struct Steps {
    /// Where it begins.
    begin: String,
    path: String,
}

fn steps(run: &SavedReport, line: &PanelLine, axes: Axes) -> Steps {
    let mut path = String::new();
    let begin = axes.x(run.begin_us() as f64 / 1e6);
    // Where the line is, and how far it goes there.
    let mut at: Option<(String, String)> = None;
    for (_, end, sample) in samples(run.points(), run.begin_us()) {
        let (x, y) = (axes.x(end), axes.y((line.value)(&sample)));
        at = match at {
            None => {
                let _ = write!(path, "M{begin} {y}");
                Some((x, y))
            }
            Some((_, height)) if height == y => Some((x, y)),
            Some((until, _)) => {
                let _ = write!(path, "H{until}V{y}");
                Some((x, y))
            }
        };
    }
    if let Some((until, _)) = at {
        let _ = write!(path, "H{until}");
    }
    Steps { begin, path }
}

/// A piece of a line, for its name in a legend: it takes 28 by 10.
pub(crate) fn swatch(xml: &mut Xml, line: &PanelLine, x: f64, y: f64) {
    let (x, y) = (coordinate(x), coordinate(y + 5.0));
    let path = format!("M{x} {y}h28");
    xml.empty("path", &[("class", &format!("line {}", line.class)), ("d", &path)]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panels::{PANELS, axis, time_axis};
    use crate::saved::tests::{parse, sample};

    fn path_of(points: usize, panel: usize, line: usize) -> String {
        let run = parse(&sample(points)).expect("a report");
        let panel = &PANELS[panel];
        let axes = Axes { time: time_axis(&[&run]), values: axis(panel, &[&run]) };
        steps(&run, &panel.lines[line], axes).path
    }

    #[test]
    fn a_line_goes_in_steps_over_the_whole_run() {
        // The budget, which stays, is one stroke; what is used goes up four times.
        assert_eq!(path_of(4, 0, 2), "M46 10H424");
        let path = path_of(4, 0, 0);
        assert!(path.starts_with("M46 ") && path.ends_with("H424"), "{path}");
        assert_eq!((path.matches('V').count(), path.matches('H').count()), (3, 4), "{path}");
        assert!(path.contains("H140.5V"), "a quarter of the width: {path}");
        // At nothing it lies on the axis.
        assert_eq!(path_of(4, 2, 1), "M46 166H424");
    }
}
