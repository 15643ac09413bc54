//! The plots: bars for a comparison, curves for a sweep.
//!
//! Owns nothing but drawing. Text is kept large and dark enough to read in a README.

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::report::comparison::{BenchReport, SWAPTIDE, Side, human};
use crate::report::density::{self, DensityRow, MAX_WAKE_MS};
use crate::report::points::{self, Point};
use crate::report::real::{RealRow, RealSide};
use crate::report::threads::{self, ThreadsRow, ThreadsSide};

const INK: RGBColor = RGBColor(40, 44, 52);
const OURS: RGBColor = RGBColor(18, 110, 170);
const THEIRS: [RGBColor; 3] =
    [RGBColor(190, 140, 60), RGBColor(120, 130, 140), RGBColor(170, 90, 110)];

type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// The plot of a report, as the text of an SVG file.
pub fn draw(report: &BenchReport) -> Result<String, String> {
    let mut text = String::new();
    {
        let panels = points::contents(&report.rows.points).len()
            + threads::phases(&report.rows.threads).len()
            + density::programs(&report.rows.density).len();
        let width = if panels == 0 { 820 } else { 410 * (panels as u32).max(2) };
        let (width, height) = match report.rows.real.len() as u32 {
            0 => (width, 430),
            rows => (1100, 130 + 46 * rows.div_ceil(divisors(&report.rows.real).len() as u32)),
        };
        let area = SVGBackend::with_string(&mut text, (width, height)).into_drawing_area();
        let drawn = area.fill(&WHITE).map_err(Into::into).and_then(|()| {
            if !report.rows.points.is_empty() {
                curves(&area, report)
            } else if !report.rows.threads.is_empty() {
                by_threads(&area, report)
            } else if !report.rows.real.is_empty() {
                by_program(&area, report)
            } else if !report.rows.density.is_empty() {
                by_processes(&area, report)
            } else {
                bars(&area, report)
            }
        });
        drawn
            .and_then(|()| area.present().map_err(Into::into))
            .map_err(|e| format!("drawing the plot: {e}"))?;
    }
    Ok(text)
}

fn caption(report: &BenchReport) -> String {
    let better = serde_json::to_value(report.better)
        .ok()
        .and_then(|v| v.as_str().map(str::to_owned))
        .unwrap_or_default();
    format!("swaptide bench {} ({}, {better} is better)", report.name, report.unit)
}

fn bars(area: &Canvas<'_>, report: &BenchReport) -> Drawn {
    let mut rows: Vec<(String, &Side, RGBColor)> = Vec::new();
    for (i, pair) in report.pairs.iter().enumerate() {
        let theirs = THEIRS[i % THEIRS.len()];
        rows.push((format!("{} {}", pair.name, pair.peer.detail), &pair.peer, theirs));
        rows.extend(
            pair.other
                .as_ref()
                .map(|side| (format!("{} {}", pair.name, side.detail), side, theirs)),
        );
        rows.push((ours(&pair.swaptide), &pair.swaptide, OURS));
    }
    rows.extend(report.unpaired.usual.as_ref().map(|side| (ours(side), side, OURS)));
    rows.extend(
        report.unpaired.bare.as_ref().map(|side| (format!("{}, bare", ours(side)), side, OURS)),
    );
    let most = rows.iter().map(|r| r.1.stats.max).fold(f64::MIN_POSITIVE, f64::max) * 1.12;
    let count = rows.len();
    let mut chart = ChartBuilder::on(area)
        .caption(caption(report), ("sans-serif", 20, &INK))
        .margin(14)
        .x_label_area_size(40)
        .y_label_area_size(230)
        .build_cartesian_2d(0f64..most, 0f64..count as f64)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .x_desc(&report.unit)
        .x_label_formatter(&tick)
        .label_style(("sans-serif", 14, &INK))
        .light_line_style(WHITE)
        .draw()?;
    for (i, (label, side, colour)) in rows.iter().enumerate() {
        let y = (count - 1 - i) as f64;
        let s = side.stats;
        chart.draw_series([Rectangle::new(
            [(0.0, y + 0.18), (s.median, y + 0.82)],
            colour.filled(),
        )])?;
        // The spread of the runs, as a line with ends.
        let spread = [
            [(s.min, y + 0.5), (s.max, y + 0.5)],
            [(s.min, y + 0.4), (s.min, y + 0.6)],
            [(s.max, y + 0.4), (s.max, y + 0.6)],
        ];
        chart.draw_series(spread.map(|line| PathElement::new(line, INK.stroke_width(2))))?;
        let (left, middle) = chart.backend_coord(&(0.0, y + 0.5));
        let style = ("sans-serif", 14, &INK).into_text_style(area).pos(right_middle());
        area.draw_text(label.trim(), &style, (left - 10, middle))?;
        let (end, _) = chart.backend_coord(&(s.max, y + 0.5));
        let style = ("sans-serif", 14, &INK).into_text_style(area).pos(left_middle());
        let shown =
            if s.median >= 100.0 { format!("{:.0}", s.median) } else { format!("{:.2}", s.median) };
        area.draw_text(&shown, &style, (end + 8, middle))?;
    }
    Ok(())
}

/// The number at a tick of the axis of values.
fn tick(value: &f64) -> String {
    format!("{}", (value * 100.0).round() / 100.0)
}

fn right_middle() -> plotters::style::text_anchor::Pos {
    use plotters::style::text_anchor::{HPos, Pos, VPos};
    Pos::new(HPos::Right, VPos::Center)
}

fn left_middle() -> plotters::style::text_anchor::Pos {
    use plotters::style::text_anchor::{HPos, Pos, VPos};
    Pos::new(HPos::Left, VPos::Center)
}

fn ours(side: &Side) -> String {
    if side.limit == 0 {
        SWAPTIDE.into()
    } else {
        format!("{SWAPTIDE} --ram {}", human(side.limit))
    }
}

/// Where a point stands: the memory that was allowed, the kernel's pool counted.
fn memory_of(point: &Point) -> f64 {
    point.side.allowed() as f64 / f64::from(1 << 20)
}

/// Names the lines of a panel.
fn legend<'a, X: CoordTranslate>(chart: &mut ChartContext<'a, SVGBackend<'a>, X>) -> Drawn {
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .label_font(("sans-serif", 14, &INK))
        .border_style(INK.mix(0.3))
        .background_style(WHITE)
        .draw()
        .map_err(Into::into)
}

/// One line with a dot at each of its points, and its name in the legend.
fn draw_line<'a, X, Y>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
    name: &str,
    colour: RGBColor,
    line: &[(f64, f64)],
) -> Drawn
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    chart
        .draw_series(LineSeries::new(line.iter().copied(), colour.stroke_width(3)))?
        .label(name)
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], colour.stroke_width(3)));
    chart.draw_series(line.iter().map(|at| Circle::new(*at, 4, colour.filled())))?;
    Ok(())
}

/// A panel for each kind of data, all on the same axes.
fn curves(area: &Canvas<'_>, report: &BenchReport) -> Drawn {
    let size = human(report.data);
    let title = format!(
        "One job over {size} of data: throughput against the memory it may use, the kernel's pool \
        counted"
    );
    let area = area.titled(&title, ("sans-serif", 20))?;
    let xs = || report.rows.points.iter().map(memory_of);
    let ys = || report.rows.points.iter().flat_map(|p| [p.side.stats.min, p.side.stats.max]);
    let x = xs().fold(f64::MAX, f64::min) * 0.85..xs().fold(1.0, f64::max) * 1.15;
    // From one line of the logarithmic axis to the next.
    let y = 10f64.powf(ys().fold(f64::MAX, f64::min).max(0.01).log10().floor())
        ..ys().fold(1.0, f64::max) * 1.5;
    let contents = points::contents(&report.rows.points);
    let mut names: Vec<&str> =
        report.rows.points.iter().map(|p| p.name.as_str()).filter(|n| *n != SWAPTIDE).collect();
    names.sort_unstable();
    names.dedup();
    for (panel, content) in area.split_evenly((1, contents.len())).iter().zip(contents) {
        let mut chart = ChartBuilder::on(panel)
            .caption(format!("data {}", content.describe()), ("sans-serif", 16, &INK))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(58)
            .build_cartesian_2d(x.clone().log_scale().base(2.0), y.clone().log_scale())?;
        chart
            .configure_mesh()
            .x_desc("memory allowed")
            .y_desc("MB/s, whole job")
            .x_labels(6)
            .y_label_formatter(&tick)
            .x_label_formatter(&|mib| human((mib.round() as u64) << 20))
            .label_style(("sans-serif", 14, &INK))
            .light_line_style(WHITE)
            .draw()?;
        for (at, name) in [SWAPTIDE].iter().chain(&names).enumerate() {
            let colour = if at == 0 { OURS } else { THEIRS[(at - 1) % THEIRS.len()] };
            let line: Vec<&Point> = points::sorted(&report.rows.points, content)
                .into_iter()
                .filter(|p| p.name == *name)
                .collect();
            let median = |p: &&Point| (memory_of(p), p.side.stats.median.max(y.start));
            chart
                .draw_series(LineSeries::new(line.iter().map(median), colour.stroke_width(3)))?
                .label(*name)
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 22, y)], colour.stroke_width(3))
                });
            // A cell that was cut short is a ring.
            chart.draw_series(line.iter().map(|p| {
                let style = if p.capped { colour.stroke_width(2) } else { colour.filled() };
                Circle::new(median(p), 4, style)
            }))?;
        }
        legend(&mut chart)?;
    }
    Ok(())
}

/// One side of a row, if it has that.
type SideOf<'a> = &'a dyn Fn(&ThreadsRow) -> Option<ThreadsSide>;

/// A panel for each phase: throughput against the number of threads.
fn by_threads(area: &Canvas<'_>, report: &BenchReport) -> Drawn {
    let title = format!("{}, {} of data", caption(report), human(report.data));
    let area = area.titled(&title, ("sans-serif", 20))?;
    let most = f64::from(report.rows.threads.iter().map(|row| row.threads).max().unwrap_or(1));
    let phases = threads::phases(&report.rows.threads);
    for (panel, phase) in area.split_evenly((1, phases.len())).iter().zip(phases) {
        let rows = || report.rows.threads.iter().filter(move |row| row.phase == phase);
        let sides = |row: &ThreadsRow| [Some(row.ours.clone()), row.theirs.clone()];
        let top = rows().flat_map(sides).flatten().map(|side| side.stats.max).fold(1.0, f64::max);
        let mut chart = ChartBuilder::on(panel)
            .caption(phase.name(), ("sans-serif", 16, &INK))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(58)
            .build_cartesian_2d((0.9..most * 1.1).log_scale().base(2.0), 0.0..top * 1.15)?;
        chart
            .configure_mesh()
            .x_desc("threads")
            .y_desc(&report.unit)
            .y_label_formatter(&tick)
            .x_label_formatter(&tick)
            .label_style(("sans-serif", 14, &INK))
            .light_line_style(WHITE)
            .draw()?;
        let ours = |row: &ThreadsRow| Some(row.ours.clone());
        let theirs = |row: &ThreadsRow| row.theirs.clone();
        let of_side: [(SideOf<'_>, RGBColor); 2] = [(&ours, OURS), (&theirs, THEIRS[0])];
        for (side, colour) in of_side {
            let line: Vec<(f64, f64)> = rows()
                .filter_map(|row| Some((f64::from(row.threads), side(row)?.stats.median)))
                .collect();
            // The size of folio is the better of each row: a peer is named without it.
            let Some(name) = rows().find_map(side).map(|side| side.name) else { continue };
            draw_line(&mut chart, name.split(' ').next().unwrap_or_default(), colour, &line)?;
        }
        legend(&mut chart)?;
    }
    Ok(())
}

/// The parts of their memory that programs had, the largest first.
fn divisors(rows: &[RealRow]) -> Vec<u64> {
    let mut divisors: Vec<u64> = rows.iter().map(|row| row.divisor).collect();
    divisors.sort_unstable();
    divisors.dedup();
    divisors
}

/// Most times longer than without a limit that a run may take, and that a bar shows.
pub(crate) const MAX_SLOWDOWN: f64 = 10.0;

/// A panel for each part of the memory, with two bars for each program: how many times longer it
/// takes than without a limit.
fn by_program(area: &Canvas<'_>, report: &BenchReport) -> Drawn {
    let title = "Time of real programs in a part of their memory, without a limit = 1 (lower is \
        better)";
    let area = area.titled(title, ("sans-serif", 20))?;
    let divisors = divisors(&report.rows.real);
    for (panel, divisor) in area.split_evenly((1, divisors.len())).iter().zip(divisors) {
        let rows: Vec<&RealRow> =
            report.rows.real.iter().filter(|row| row.divisor == divisor).collect();
        let mut chart = ChartBuilder::on(panel)
            .caption(format!("1/{divisor} of the memory"), ("sans-serif", 16, &INK))
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(78)
            .build_cartesian_2d(0.0..MAX_SLOWDOWN * 1.1, 0.0..rows.len() as f64)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .x_desc("times the time without a limit")
            .x_label_formatter(&tick)
            .label_style(("sans-serif", 14, &INK))
            .light_line_style(WHITE)
            .draw()?;
        for (at, row) in rows.iter().enumerate() {
            let y = (rows.len() - 1 - at) as f64;
            let (left, middle) = chart.backend_coord(&(0.0, y + 0.5));
            let style = ("sans-serif", 14, &INK).into_text_style(panel).pos(right_middle());
            panel.draw_text(&row.program, &style, (left - 8, middle))?;
            let sides = [(Some(&row.ours), OURS, 0.5), (row.theirs.as_ref(), THEIRS[0], 0.1)];
            for (side, colour, foot) in sides {
                let Some(side) = side else { continue };
                let slowdown = slowdown_of(side, &row.alone);
                let end = slowdown.unwrap_or(0.0).min(MAX_SLOWDOWN);
                let corners = [(0.0, y + foot), (end, y + foot + 0.38)];
                chart.draw_series([Rectangle::new(corners, colour.filled())])?;
                let shown = match slowdown {
                    Some(slowdown) => format!("{slowdown:.1}"),
                    None => side.ending.clone().unwrap_or_default(),
                };
                let place = chart.backend_coord(&(end, y + foot + 0.19));
                let style = ("sans-serif", 12, &INK).into_text_style(panel).pos(left_middle());
                panel.draw_text(&shown, &style, (place.0 + 5, place.1))?;
            }
        }
        for (name, colour) in [(SWAPTIDE, OURS), ("the kernel's zram", THEIRS[0])] {
            let none = std::iter::empty::<Rectangle<(f64, f64)>>();
            chart.draw_series(none)?.label(name).legend(move |(x, y)| {
                Rectangle::new([(x, y - 5), (x + 22, y + 5)], colour.filled())
            });
        }
        legend(&mut chart)?;
    }
    Ok(())
}

fn slowdown_of(side: &RealSide, alone: &RealSide) -> Option<f64> {
    Some(side.seconds()? / alone.seconds()?)
}

/// A panel for each program: how soon one answers that is woken, against how many there are.
fn by_processes(area: &Canvas<'_>, report: &BenchReport) -> Drawn {
    let area = area.titled(
        "Processes that share a budget: how soon one that has rested answers",
        ("sans-serif", 20),
    )?;
    let programs = density::programs(&report.rows.density);
    for (panel, program) in area.split_evenly((1, programs.len())).iter().zip(&programs) {
        let rows: Vec<&DensityRow> = report
            .rows
            .density
            .iter()
            .filter(|row| row.program == *program && row.budget > 0)
            .collect();
        let Some(first) = rows.first() else { continue };
        let most = rows.iter().map(|row| row.processes).max().unwrap_or(1) as f64;
        let worst = rows.iter().filter_map(|row| row.quantile(1.0)).fold(MAX_WAKE_MS, f64::max);
        let caption =
            format!("{program}, {} each, {} for all", human(first.each), human(first.budget));
        let mut chart = ChartBuilder::on(panel)
            .caption(caption, ("sans-serif", 16, &INK))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..most * 1.05, (1.0..worst * 2.0).log_scale())?;
        chart
            .configure_mesh()
            .x_desc("processes")
            .y_desc("ms")
            .y_label_formatter(&tick)
            .x_label_formatter(&tick)
            .label_style(("sans-serif", 14, &INK))
            .light_line_style(WHITE)
            .draw()?;
        for (part, name, colour) in [(0.5, "half of the wakes", OURS), (0.99, "99 %", THEIRS[0])] {
            let line: Vec<(f64, f64)> = rows
                .iter()
                .filter_map(|row| Some((row.processes as f64, row.quantile(part)?)))
                .collect();
            draw_line(&mut chart, name, colour, &line)?;
        }
        legend(&mut chart)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::comparison::{Better, Pairing, Rows, Spread, Unpaired};
    use crate::workload::phases::{PageContent, Phase};

    fn side(median: f64, limit: u64) -> Side {
        let stats = Spread { median, min: median * 0.9, max: median * 1.1 };
        Side {
            stats,
            limit,
            pool: 0,
            resident: None,
            pool_inside: false,
            detail: String::new(),
            written: 0,
            failed: 0,
        }
    }

    fn report() -> BenchReport {
        BenchReport {
            name: "seq".into(),
            title: String::new(),
            unit: "MB/s".into(),
            better: Better::Higher,
            budget: 1 << 28,
            data: 1 << 30,
            runs: 1,
            unpaired: Unpaired::default(),
            pairs: vec![],
            rows: Rows::default(),
            machine: serde_json::Value::Null,
            notes: vec![],
            failed: vec![],
        }
    }

    #[test]
    fn bars_name_every_side_and_its_median() {
        let mut report = report();
        let pair = Pairing {
            name: "kernel-zram".into(),
            peer: side(485.0, 1 << 28),
            other: None,
            absent: None,
            swaptide: side(1700.0, 463 << 20),
        };
        report.pairs = vec![pair];
        let svg = draw(&report).unwrap();
        for text in
            ["<svg", "kernel-zram", "485", "swaptide --ram 463M", "1700", "higher is better"]
        {
            assert!(svg.contains(text), "{text} is not in the plot");
        }
    }

    #[test]
    fn each_phase_with_threads_has_a_panel() {
        let mut report = report();
        for phase in [Phase::Seq, Phase::Random] {
            for threads in [1, 2, 4, 8] {
                let one = |name: &str, median| ThreadsSide {
                    name: name.into(),
                    stats: Spread { median, min: median, max: median },
                    p99_us: None,
                    serial: None,
                };
                let ours = one(SWAPTIDE, 100.0 * f64::from(threads));
                let theirs = Some(one("kernel-zram lz4 64K", 200.0));
                report.rows.threads.push(ThreadsRow { threads, phase, ours, theirs });
            }
        }
        let svg = draw(&report).unwrap();
        assert_eq!(svg.matches("<circle").count(), 16);
        for text in ["kernel-zram", "swaptide", "threads", "random"] {
            assert!(svg.contains(text), "{text} is not in the plot");
        }
        assert!(!svg.contains("64K"));
    }

    #[test]
    fn each_real_program_has_its_bars() {
        let side = |name: &str, seconds: f64, ending: Option<&str>| RealSide {
            name: name.into(),
            wall_s: vec![seconds],
            cpu_s: vec![seconds],
            allowed: 1 << 28,
            peak: 0,
            ending: ending.map(str::to_owned),
            figures: Default::default(),
        };
        let mut report = report();
        for divisor in [2, 3] {
            for program in ["sort", "node"] {
                report.rows.real.push(RealRow {
                    program: program.into(),
                    what: String::new(),
                    divisor,
                    alone: side("alone", 2.0, None),
                    ours: side(SWAPTIDE, 5.0, None),
                    theirs: Some(side("kernel-zram 4K", 6.0, Some("killed"))),
                });
            }
        }
        let svg = draw(&report).unwrap();
        for text in ["sort", "node", "1/2 of", "1/3 of", "2.5", "killed", "swaptide"] {
            assert!(svg.contains(text), "{text} is not in the plot");
        }
    }

    #[test]
    fn wakes_are_drawn_against_the_number_of_processes() {
        let mut report = report();
        let wakes = [20.0, 30.0, 900.0];
        report.rows.density = [8, 16, 32].map(|n| density::tests::row(n, &wakes)).to_vec();
        let svg = draw(&report).unwrap();
        assert_eq!(svg.matches("<circle").count(), 6);
        for text in ["pandas, 375M each", "processes", "99 %"] {
            assert!(svg.contains(text), "{text} is not in the plot");
        }
    }

    #[test]
    fn a_sweep_has_a_curve_for_each_side() {
        let mut report = report();
        for (i, limit) in [64u64, 128, 256, 512].into_iter().enumerate() {
            for (name, speed) in [(SWAPTIDE, 300.0), ("kernel-zram", 200.0)] {
                for content in [PageContent::Four, PageContent::Two] {
                    let side = side(speed * (i + 1) as f64, limit << 20);
                    let (name, budget, phases) = (name.into(), limit << 20, vec![]);
                    let (wall_s, verified, capped, against) = (1.0, 0, false, None);
                    report.rows.points.push(Point {
                        name,
                        content,
                        budget,
                        side,
                        phases,
                        wall_s,
                        verified,
                        capped,
                        against,
                    });
                }
            }
        }
        let svg = draw(&report).unwrap();
        assert_eq!(svg.matches("<circle").count(), 16);
        for text in ["kernel-zram", "swaptide", "64M", "like a heap"] {
            assert!(svg.contains(text), "{text} is not in the plot");
        }
    }
}
