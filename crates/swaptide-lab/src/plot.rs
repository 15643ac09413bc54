//! The plot of an experiment: one curve for each side.

use plotters::prelude::*;

use crate::report::{Curve, Plot};

const INK: RGBColor = RGBColor(40, 44, 52);
const OURS: RGBColor = RGBColor(18, 110, 170);
const THEIRS: [RGBColor; 4] = [
    RGBColor(190, 140, 60),
    RGBColor(120, 130, 140),
    RGBColor(170, 90, 110),
    RGBColor(100, 140, 90),
];

/// The plot as the text of an SVG file.
pub(crate) fn draw(plot: &Plot, name: &str) -> Result<String, String> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (820, 520)).into_drawing_area();
        let drawn = area.fill(&WHITE).map_err(Into::into).and_then(|()| {
            if plot.log_x {
                curves::<true>(&area, plot, name)
            } else {
                curves::<false>(&area, plot, name)
            }
        });
        drawn
            .and_then(|()| area.present().map_err(Into::into))
            .map_err(|e| format!("drawing the plot: {e}"))?;
    }
    Ok(text)
}

type PlotResult = Result<(), Box<dyn std::error::Error>>;

/// Curves over x, or over its base-2 logarithm.
fn curves<const LOG: bool>(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    plot: &Plot,
    name: &str,
) -> PlotResult {
    let x_of = |x: f64| if LOG { x.log2() } else { x };
    let points = || plot.curves.iter().flat_map(|curve| curve.points.iter().copied());
    let (low, high) = points()
        .fold((f64::MAX, f64::MIN), |(low, high), (x, _)| (low.min(x_of(x)), high.max(x_of(x))));
    let most = points().map(|(_, y)| y).fold(f64::MIN_POSITIVE, f64::max) * 1.25;
    let pad = ((high - low) * 0.02).max(0.05);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("swaptide lab {name}"), ("sans-serif", 20, &INK))
        .margin(14)
        .x_label_area_size(46)
        .y_label_area_size(64)
        .build_cartesian_2d(low - pad..high + pad, -most * 0.01..most)?;
    chart
        .configure_mesh()
        .x_desc(&plot.x)
        .y_desc(&plot.y)
        .x_label_formatter(&|x| format!("{:.0}", if LOG { x.exp2() } else { *x }))
        .y_label_formatter(&|y| format!("{}", (y * 100.0).round() / 100.0))
        .label_style(("sans-serif", 14, &INK))
        .light_line_style(WHITE)
        .draw()?;
    let mut theirs = THEIRS.iter().cycle();
    for Curve { name: label, ours, points } in &plot.curves {
        let (colour, width) = if *ours { (OURS, 3) } else { (*theirs.next().unwrap_or(&INK), 2) };
        let line: Vec<_> = points.iter().map(|(x, y)| (x_of(*x), *y)).collect();
        chart
            .draw_series(LineSeries::new(line.iter().copied(), colour.stroke_width(width)))?
            .label(label)
            .legend(move |(x, y)| {
                PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(width))
            });
        if points.len() < 20 {
            chart.draw_series(line.iter().map(|&at| Circle::new(at, 4, colour.filled())))?;
        }
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::MiddleRight)
        .label_font(("sans-serif", 13, &INK))
        .border_style(INK.mix(0.3))
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_names_its_curves_and_axes() {
        let curve = |name: &str, ours, last| Curve {
            name: name.into(),
            ours,
            points: vec![(1.0, 20.0), (1024.0, last)],
        };
        let plot = Plot {
            x: "device, GiB".into(),
            y: "look-up, ns".into(),
            log_x: true,
            curves: vec![curve("trees", false, 60.0), curve("swap table", true, 20.0)],
        };
        for log_x in [true, false] {
            let svg = draw(&Plot { log_x, ..plot.clone() }, "search-space").unwrap();
            for text in ["<svg", "swap table", "trees", "device, GiB", "look-up, ns"] {
                assert!(svg.contains(text), "{text} is not in the plot");
            }
            assert_eq!(svg.matches("<circle").count(), 4);
        }
    }
}
