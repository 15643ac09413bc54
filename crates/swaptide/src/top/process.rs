//! The view of one process in `swaptide top`: limits, tiers, faults, times, stall, and what it did
//! in the last minutes.

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Sparkline, Widget};
use swaptide_host::control::watch::Scene;
use swaptide_host::report::totals::ProcessView;
use swaptide_host::units::{human, human_count};

use crate::top::history::{Sample, columns};
use crate::top::look::{Frame, ProcessRow, ordered};

/// Rows of text.
const LINES: u16 = 8;
/// Rows of a sparkline, its title among them.
const SPARK: u16 = 4;
/// Rows that all of it takes.
pub(crate) const HEIGHT: u16 = LINES + 4 * SPARK;

type Shown = (&'static str, fn(&Sample) -> u64, fn(u64) -> String);

/// What is shown as a sparkline: title, value, and how the value is written.
const SHOWN: [Shown; 4] = [
    ("RESIDENT", |sample| sample.resident, human),
    ("PAGES IN, a second", |sample| sample.pages_in, human_count),
    ("PAGES OUT, a second", |sample| sample.pages_out, human_count),
    ("WAITS, % of the time", |sample| sample.waits, |value| value.to_string()),
];

/// Draws it; of a process that has ended, that it has.
pub(crate) fn draw(frame: &Frame<'_>, pid: u32, area: Rect, buffer: &mut Buffer) {
    let all = ordered(frame.scene, frame.history, frame.look.sort);
    let Some(row) = all.iter().find(|row| row.process.pid == pid) else {
        Line::from(format!("process {pid} has ended; Escape goes back")).render(area, buffer);
        return;
    };
    let heights = [LINES, SPARK, SPARK, SPARK, SPARK].map(Constraint::Length);
    let places = Layout::vertical(heights).split(area);
    Paragraph::new(lines(frame.scene, row)).render(places[0], buffer);
    let color = if frame.look.is_plain { Color::Reset } else { Color::Green };
    for ((title, value, written), place) in SHOWN.into_iter().zip(&places[1..]) {
        let values = frame.history.process(pid, value);
        let (now, most) = (values.last().copied(), values.iter().copied().max());
        let title = format!(
            "{title}: {}, at most {}",
            written(now.unwrap_or(0)),
            written(most.unwrap_or(0))
        );
        let [head, graph] =
            Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(*place);
        Line::styled(title, Modifier::BOLD).render(head, buffer);
        Sparkline::default()
            .data(columns(&values, usize::from(graph.width)))
            .style(Style::new().fg(color))
            .render(graph, buffer);
    }
}

fn lines(scene: &Scene, row: &ProcessRow<'_>) -> Vec<Line<'static>> {
    let ProcessRow { program, process, sample } = row;
    let ProcessView { pid, group, state, fault_us, .. } = process;
    let size = |bytes: u64| if bytes == 0 { "none".to_owned() } else { human(bytes) };
    let views = scene.groups.iter().find(|view| view.path == *group);
    let value = |key: &str| views.and_then(|view| view.values.get(key)).map_or("-", String::as_str);
    let bytes = |key: &str| value(key).parse().map_or_else(|_| value(key).to_owned(), human);
    let swapped = process.swapped_pool_bytes + process.swapped_file_bytes;
    vec![
        Line::styled(format!("process {pid} of {program}, {state}"), Modifier::BOLD),
        Line::from(format!(
            "LIMIT  {}, going to {}; in use {}, of that compressed memory {}",
            size(process.limit_bytes),
            size(process.fair_bytes),
            human(process.resident_bytes),
            human(process.pool_bytes)
        )),
        Line::from(format!(
            "GROUP  {group}: ram.max {}, ram.low {}, swap.max {}, zswap.max {}",
            bytes("ram.max"),
            bytes("ram.low"),
            bytes("swap.max"),
            bytes("zswap.max")
        )),
        Line::from(format!("TIERS  {}", value("swap.tiers.effective"))),
        Line::from(format!(
            "OUT    {}: {} in compressed memory, {} on swap areas",
            human(swapped),
            human(process.swapped_pool_bytes),
            human(process.swapped_file_bytes)
        )),
        Line::from(format!(
            "FAULTS {}, {}/s; p50 {:.0} us, p99 {:.0} us, slowest {:.0} us",
            human_count(process.faults),
            human_count(sample.faults),
            fault_us.p50,
            fault_us.p99,
            fault_us.max
        )),
        Line::from(format!(
            "STALL  waited {:.1} s for memory so far, {} % of the time now",
            process.stall_us as f64 / 1e6,
            sample.waits
        )),
    ]
}
