//! The frame of `swaptide top` with everything: memory, flow, areas, groups, processes.

use clap::builder::styling::{AnsiColor, Style as TextStyle};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::{Buffer, Cell};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Row, StatefulWidget, Table, TableState, Widget};
use swaptide_host::control::watch::{Rates, Scene};
use swaptide_host::report::totals::ProcessView;
use swaptide_host::units::{human, human_count};

use crate::terminal::styled;
use crate::top::history::{Sample, spark};
use crate::top::look::{Frame, ProcessRow, ordered};
use crate::top::process;

/// Columns of a frame that is text.
const TEXT_WIDTH: u16 = 110;
/// From this width on, tables have sparklines.
const SPARK_WIDTH: u16 = 116;
/// Columns of a sparkline in a table.
const SPARK: u16 = 10;
/// The keys, in the last row.
const HELP: &str = "arrows choose, Enter shows one, s size r resident i in o out f faults w waits \
    p pid, q ends";

fn processes(scene: &Scene) -> impl Iterator<Item = &ProcessView> {
    scene.runs.iter().flat_map(|run| &run.processes)
}

fn title(scene: &Scene) -> String {
    let processes = processes(scene).count();
    match (scene.daemon, scene.runs.as_slice()) {
        (false, [run]) => format!(
            "swaptide: {} ({}), {processes} processes, {:.0} s",
            run.program, run.pid, run.wall_s
        ),
        _ => format!("swaptide daemon: {} runs, {processes} processes", scene.runs.len()),
    }
}

/// A bar of `width` columns: how much of a whole is used.
fn bar(part: u64, whole: u64, width: usize) -> String {
    let share = part as f64 / whole.max(1) as f64;
    let full = ((share * width as f64).round() as usize).min(width);
    format!("[{}{}]", "|".repeat(full), " ".repeat(width - full))
}

fn ram(scene: &Scene, is_plain: bool) -> Line<'static> {
    let share = scene.resident_bytes as f64 / scene.budget_bytes.max(1) as f64;
    let color = match share {
        _ if is_plain => Color::Reset,
        0.97.. => Color::Red,
        _ => Color::Green,
    };
    Line::from(vec![
        Span::raw("RAM  "),
        Span::styled(bar(scene.resident_bytes, scene.budget_bytes, 40), color),
        Span::raw(format!(
            " {} of {}, {:.0} %",
            human(scene.resident_bytes),
            human(scene.budget_bytes),
            share * 100.0
        )),
    ])
}

fn flow(scene: &Scene, rates: Rates) -> Vec<Line<'static>> {
    let count = |rate: f64| human_count(rate as u64);
    let swapped = |f: fn(&ProcessView) -> u64| human(processes(scene).map(f).sum());
    let longest = scene.runs.iter().map(|run| run.fault_us.p99).fold(0.0, f64::max);
    let usual = scene.runs.iter().map(|run| run.fault_us.p50).fold(0.0, f64::max);
    vec![
        Line::from(format!(
            "SWAP {} in compressed memory, which takes {}; {} on swap areas",
            swapped(|process| process.swapped_pool_bytes),
            swapped(|process| process.pool_bytes),
            swapped(|process| process.swapped_file_bytes),
        )),
        Line::from(format!(
            "IN   {} pages/s from compressed memory, {} from areas; {} refaults/s; {} faults/s, \
            p50 {usual:.0} us, p99 {longest:.0} us",
            count(rates.zswpin),
            count(rates.pswpin),
            count(rates.refaults),
            count(rates.faults),
        )),
        Line::from(format!(
            "OUT  {} pages/s to compressed memory, {} to areas",
            count(rates.zswpout),
            count(rates.pswpout)
        )),
    ]
}

/// A table of texts; of the columns that `right` names the texts end below each other.
fn table(
    head: &[&str],
    rows: Vec<Vec<String>>,
    widths: &[u16],
    right: &[usize],
) -> (u16, Table<'static>) {
    let height = rows.len() as u16 + 1;
    let cell = |(column, text): (usize, String)| {
        let line = Line::from(text);
        if right.contains(&column) { line.right_aligned() } else { line }
    };
    let row =
        |texts: Vec<String>| Row::new(texts.into_iter().enumerate().map(cell).collect::<Vec<_>>());
    let bold = Style::new().add_modifier(Modifier::REVERSED);
    let head = row(head.iter().map(|text| (*text).to_owned()).collect()).style(bold);
    let widths = widths
        .iter()
        .map(|width| if *width == 0 { Constraint::Fill(1) } else { Constraint::Length(*width) });
    (height, Table::new(rows.into_iter().map(row), widths).header(head).column_spacing(1))
}

fn areas(scene: &Scene) -> (u16, Table<'static>) {
    let rows = scene.areas.iter().map(|(number, area)| {
        vec![
            area.name.clone(),
            number.to_string(),
            area.kind.clone(),
            scene.tier_of(area.priority).to_owned(),
            area.priority.to_string(),
            human(area.used_bytes),
            human(area.size_bytes),
            area.state.clone(),
            area.errors.to_string(),
            area.mirror.as_ref().map_or_else(|| "-".to_owned(), |mirror| mirror.place.clone()),
        ]
    });
    let head = ["AREA", "NR", "TYPE", "TIER", "PRIO", "USED", "SIZE", "STATE", "ERRORS", "MIRROR"];
    table(&head, rows.collect(), &[0, 3, 5, 8, 6, 9, 9, 8, 6, 12], &[1, 4, 5, 6, 8])
}

/// Columns of sparklines: resident memory, pages in, pages out.
const SPARKS: [&str; 3] = ["RESIDENT", "PAGES IN", "PAGES OUT"];

fn sparks(width: u16, values: impl Fn(fn(&Sample) -> u64) -> Vec<u64>) -> Vec<String> {
    let lines: [fn(&Sample) -> u64; 3] = [|s| s.resident, |s| s.pages_in, |s| s.pages_out];
    if width < SPARK_WIDTH { vec![] } else { lines.map(|of| spark(&values(of), SPARK)).into() }
}

/// A table with the columns of sparklines behind its own, where there is room for them.
fn sparked(
    width: u16,
    head: &[&str],
    rows: Vec<Vec<String>>,
    widths: &[u16],
    right: &[usize],
) -> (u16, Table<'static>) {
    let (mut head, mut widths) = (head.to_vec(), widths.to_vec());
    if width >= SPARK_WIDTH {
        head.extend(SPARKS);
        widths.extend([SPARK; 3]);
    }
    table(&head, rows, &widths, right)
}

fn groups(frame: &Frame<'_>, width: u16) -> (u16, Table<'static>) {
    let rows = frame.scene.groups.iter().map(|group| {
        let value = |key: &str| group.values.get(key).map_or("-", String::as_str);
        let bytes = |key: &str| value(key).parse().map_or_else(|_| value(key).to_owned(), human);
        let mut row = vec![
            group.path.clone(),
            value("processes").to_owned(),
            bytes("ram.current"),
            bytes("ram.max"),
            bytes("ram.low"),
            bytes("zswap.current"),
            bytes("swap.current"),
            bytes("swap.max"),
            bytes("swapped.current"),
            value("swap.tiers.effective").to_owned(),
        ];
        row.extend(sparks(width, |of| frame.history.group(&group.path, of)));
        row
    });
    let head = ["GROUP", "PROCS", "RAM", "MAX", "LOW", "ZSWAP", "SWAP", "MAX", "SWAPPED", "TIERS"];
    let widths = [0, 5, 7, 7, 7, 7, 7, 7, 7, 12];
    sparked(width, &head, rows.collect(), &widths, &[1, 2, 3, 4, 5, 6, 7, 8])
}

fn programs(frame: &Frame<'_>, width: u16) -> (u16, Table<'static>) {
    let all = ordered(frame.scene, frame.history, frame.look.sort);
    let rows = all.into_iter().map(|ProcessRow { program, process, .. }| {
        let limit =
            if process.limit_bytes == 0 { "-".to_owned() } else { human(process.limit_bytes) };
        let mut row = vec![
            process.pid.to_string(),
            program.to_owned(),
            process.group.clone(),
            process.state.clone(),
            limit,
            human(process.resident_bytes),
            human(process.pool_bytes),
            human(process.swapped_pool_bytes),
            human(process.swapped_file_bytes),
        ];
        row.extend(sparks(width, |of| frame.history.process(process.pid, of)));
        row
    });
    let head =
        ["PID", "RUN", "GROUP", "STATE", "LIMIT", "RESIDENT", "COMPRESSED", "IN POOL", "ON AREAS"];
    let widths = [8, 14, 0, 9, 7, 8, 10, 8, 8];
    sparked(width, &head, rows.collect(), &widths, &[0, 4, 5, 6, 7, 8])
}

impl Frame<'_> {
    /// Rows that all of it takes.
    fn height(&self, width: u16) -> u16 {
        if self.look.one.is_some() {
            return process::HEIGHT;
        }
        let tables = [areas(self.scene).0, groups(self, width).0, programs(self, width).0];
        1 + 1 + 3 + tables.iter().map(|height| height + 1).sum::<u16>()
    }

    fn everything(&self, area: Rect, buffer: &mut Buffer) {
        let (areas, groups) = (areas(self.scene), groups(self, area.width));
        let (_, programs) = programs(self, area.width);
        let heights = [1, 1, 3, 1, areas.0, 1, groups.0, 1].map(Constraint::Length);
        let places = Layout::vertical(heights.into_iter().chain([Constraint::Min(0)])).split(area);
        Line::styled(title(self.scene), Modifier::BOLD).render(places[0], buffer);
        ram(self.scene, self.look.is_plain).render(places[1], buffer);
        for (line, row) in flow(self.scene, self.rates).into_iter().zip(places[2].rows()) {
            line.render(row, buffer);
        }
        Widget::render(areas.1, places[4], buffer);
        Widget::render(groups.1, places[6], buffer);
        // The table scrolls so far that the chosen row is shown.
        let mut state = TableState::default().with_selected(self.look.cursor);
        let programs = programs.row_highlight_style(Modifier::BOLD | Modifier::UNDERLINED);
        StatefulWidget::render(programs, places[8], buffer, &mut state);
    }
}

impl Widget for Frame<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        // The last row is that of the keys, where there is room.
        let keys = u16::from(self.look.is_live && area.height > 12);
        let [main, last] =
            Layout::vertical([Constraint::Min(0), Constraint::Length(keys)]).areas(area);
        match self.look.one {
            Some(pid) => process::draw(&self, pid, main, buffer),
            None => self.everything(main, buffer),
        }
        if keys > 0 {
            Line::from(HELP).render(last, buffer);
        }
    }
}

/// The frame without a terminal, as high as it needs.
pub(crate) fn as_text(frame: &Frame<'_>, is_colored: bool) -> String {
    let Frame { scene, rates, history, look } = *frame;
    let mut terminal = match Terminal::new(TestBackend::new(TEXT_WIDTH, frame.height(TEXT_WIDTH))) {
        Ok(terminal) => terminal,
        Err(error) => match error {},
    };
    let drawn = terminal
        .draw(|screen| screen.render_widget(Frame { scene, rates, history, look }, screen.area()));
    if let Err(error) = drawn {
        match error {}
    }
    let buffer = terminal.backend().buffer();
    let rows = buffer.content().chunks(usize::from(TEXT_WIDTH));
    rows.map(|row| text_of(row, is_colored) + "\n").collect()
}

/// A row as text, the cells of one style together.
fn text_of(row: &[Cell], is_colored: bool) -> String {
    let end = row.iter().rposition(|cell| cell.symbol() != " ").map_or(0, |last| last + 1);
    let row = &row[..end];
    if !is_colored {
        return row.iter().map(Cell::symbol).collect();
    }
    let style = |cell: &Cell| {
        let mut style = TextStyle::new();
        if cell.modifier.intersects(Modifier::BOLD | Modifier::REVERSED) {
            style = style.bold();
        }
        match cell.fg {
            Color::Red => style.fg_color(Some(AnsiColor::Red.into())),
            Color::Green => style.fg_color(Some(AnsiColor::Green.into())),
            _ => style,
        }
    };
    row.chunk_by(|one, next| style(one) == style(next))
        .map(|cells| {
            let text: String = cells.iter().map(Cell::symbol).collect();
            if style(&cells[0]).is_plain() { text } else { styled(style(&cells[0]), &text) }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::history::TopHistory;
    use crate::top::look::Look;
    use crate::top::look::tests::scene;

    #[test]
    fn a_frame_shows_everything_and_the_largest_process_first() {
        let (scene, history) = (scene(), TopHistory::default());
        let rates = Rates { pswpin: 1234.0, ..Rates::default() };
        let frame = Frame { scene: &scene, rates, history: &history, look: Look::default() };
        let text = as_text(&frame, false);
        assert_eq!(anstream::adapter::strip_str(&as_text(&frame, true)).to_string(), {
            text.clone()
        });
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("server (40), 2 processes"), "{text}");
        assert!(
            lines[1].contains("64M of 128M, 50 %") && lines[1].matches('|').count() == 20,
            "{text}"
        );
        assert!(lines[3].contains("1.2k from areas"), "{text}");
        let row = |begin: &str| {
            lines.iter().position(|line| line.trim_start().starts_with(begin)).expect(begin)
        };
        let words = |begin: &str| lines[row(begin)].split_whitespace().collect::<Vec<_>>();
        assert_eq!(
            words("nbd://host/x")[1..9],
            ["3", "nbd", "NET", "7", "2.0M", "4.0G", "away", "0"]
        );
        assert_eq!(words("/web")[1..4], ["2", "60M", "max"]);
        assert!(row("42 ") < row("41 "), "{text}");
        assert!(lines.iter().all(|line| line.len() <= usize::from(TEXT_WIDTH)));
    }

    #[test]
    fn a_screen_that_is_too_small_shows_what_fits() {
        let (scene, history) = (scene(), TopHistory::default());
        for (width, height) in [(1, 1), (20, 3), (40, 8), (300, 2)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a screen");
            let look = Look { cursor: Some(0), ..Look::default() };
            let frame =
                || Frame { scene: &scene, rates: Rates::default(), history: &history, look };
            terminal.draw(|screen| screen.render_widget(frame(), screen.area())).expect("drawn");
            // All its lines are some of those that a large screen of this width shows.
            let lines = |terminal: &Terminal<TestBackend>, height: u16| -> Vec<String> {
                let line =
                    |y| (0..width).map(|x| terminal.backend().buffer()[(x, y)].symbol()).collect();
                (0..height).map(line).collect()
            };
            let mut large = Terminal::new(TestBackend::new(width, 60)).expect("a screen");
            large.draw(|screen| screen.render_widget(frame(), screen.area())).expect("drawn");
            let (shown, whole) = (lines(&terminal, height), lines(&large, 60));
            assert!(
                shown.iter().all(|line| whole.contains(line)),
                "{width}x{height}: {shown:?}, not of {whole:?}"
            );
            assert!(
                height < 8 || shown.iter().any(|line| !line.trim().is_empty()),
                "{width}x{height} is empty"
            );
        }
    }

    #[test]
    fn a_wide_screen_has_sparklines_and_a_narrow_one_has_none() {
        let (scene, mut history) = (scene(), TopHistory::default());
        history.add(&scene);
        for (width, expected) in [(160, true), (100, false)] {
            let mut terminal = Terminal::new(TestBackend::new(width, 30)).expect("a screen");
            let look = Look { is_live: true, ..Look::default() };
            let frame =
                || Frame { scene: &scene, rates: Rates::default(), history: &history, look };
            terminal.draw(|screen| screen.render_widget(frame(), screen.area())).expect("drawn");
            let shown: String =
                terminal.backend().buffer().content().iter().map(|cell| cell.symbol()).collect();
            assert_eq!(shown.contains('█') && shown.contains("PAGES OUT"), expected, "{shown}");
            assert!(shown.contains("q ends"), "{shown}");
        }
    }

    #[test]
    fn a_process_has_its_limits_tiers_faults_times_and_stall() {
        let (mut scene, mut history) = (scene(), TopHistory::default());
        let process = &mut scene.runs[0].processes[1];
        (process.fair_bytes, process.faults, process.stall_us) = (60 << 20, 1500, 2_500_000);
        (process.fault_us.p50, process.fault_us.p99) = (11.0, 99.0);
        scene.groups[0].values.insert("swap.tiers.effective".into(), "SSD".into());
        history.add(&scene);
        let look = Look { one: Some(42), ..Look::default() };
        let frame = Frame { scene: &scene, rates: Rates::default(), history: &history, look };
        let text = as_text(&frame, false);
        for part in [
            "process 42 of server, engaged",
            "LIMIT  64M, going to 60M; in use 50M",
            "GROUP  /web: ram.max max",
            "TIERS  SSD",
            "FAULTS 1.5k, 0/s; p50 11 us, p99 99 us",
            "STALL  waited 2.5 s",
            "RESIDENT: 50M, at most 50M",
            "█",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        let gone = Frame { look: Look { one: Some(7), ..look }, ..frame };
        assert!(as_text(&gone, false).contains("process 7 has ended"));
    }
}
