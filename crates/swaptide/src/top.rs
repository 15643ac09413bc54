//! `swaptide top`: live statistics of a run or a daemon in a terminal, or one frame as text.
//!
//! Owns the terminal while it runs: raw mode and the alternate screen are left again however it
//! ends, but for SIGKILL.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::terminal;
use clap::Args;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Row, Table, Widget};
use swaptide_host::control::server::ControlError;
use swaptide_host::control::watch::{self, Rates, Scene};
use swaptide_host::report::totals::ProcessView;
use swaptide_host::units::{human, human_count};

/// Columns of a frame that is text.
const TEXT_WIDTH: u16 = 110;
/// Time between the two samples that the rates of a single frame come from.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
/// How often keys and signals are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The keys, for the manual.
pub(crate) const KEYS: [(&str, &str); 4] = [
    ("Up, Down, k, j", "One process up or down."),
    ("Page Up, Page Down, Space", "Ten processes up or down."),
    ("Home", "To the first process."),
    ("q, Escape, Ctrl-C", "End."),
];

/// Show live statistics of a run, or of the daemon and all its runs
#[derive(Args)]
pub struct TopArgs {
    /// The run, by the process you started or any other in it [default: the only run, or the
    /// daemon]
    #[arg(long)]
    pid: Option<u32>,
    /// Seconds between updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    interval: f64,
    /// Print one frame as text and exit
    #[arg(long, alias = "batch")]
    once: bool,
    /// Print one frame as JSON and exit
    #[arg(long)]
    json: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.1..=3600.0).contains(&number) => Ok(number),
        _ => Err("from 0.1 to 3600".into()),
    }
}

/// Runs the command. Exit status: 0, or 2 when there is no run to show.
pub fn main(args: &TopArgs) -> ExitCode {
    let refuse = |message: &str| crate::refuse("top", message);
    let first = match watch::look(args.pid) {
        Ok(scene) => scene,
        Err(error) => return refuse(&error.to_string()),
    };
    if args.once || args.json {
        std::thread::sleep(SAMPLE_INTERVAL);
        // One that ended meanwhile is shown as it was.
        let scene = watch::look(args.pid).unwrap_or_else(|_| first.clone());
        let rates = scene.rates_since(&first);
        terminal::print(&if args.json {
            terminal::json(&serde_json::json!({ "scene": scene, "rates": rates }))
        } else {
            as_text(&Frame { scene: &scene, rates, from: 0 })
        });
        return ExitCode::SUCCESS;
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return refuse(
            "standard input and output are no terminal; --once prints one frame as text",
        );
    }
    match live(args, first) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(ended)) => {
            let _ = writeln!(io::stderr(), "swaptide top: {ended}");
            ExitCode::SUCCESS
        }
        Err(error) => refuse(&format!("the terminal cannot be used: {error}")),
    }
}

/// Draws until the user quits or the run ends.
fn live(args: &TopArgs, first: Scene) -> io::Result<Option<ControlError>> {
    let over = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        signal_hook::flag::register(signal, Arc::clone(&over))?;
    }
    let mut terminal = ratatui::try_init()?;
    let shown = show(&mut terminal, args, first, &over);
    ratatui::try_restore()?;
    shown
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    args: &TopArgs,
    first: Scene,
    over: &AtomicBool,
) -> io::Result<Option<ControlError>> {
    let interval = Duration::from_secs_f64(args.interval);
    let (mut scene, mut rates, mut from) = (first, Rates::default(), 0usize);
    let mut looked = Instant::now();
    loop {
        terminal.draw(|frame| {
            frame.render_widget(Frame { scene: &scene, rates, from }, frame.area())
        })?;
        loop {
            if over.load(Relaxed) {
                return Ok(None);
            }
            let left = interval.saturating_sub(looked.elapsed());
            if event::poll(left.min(POLL_INTERVAL))? {
                match event::read()? {
                    Event::Key(key) if key.kind == KeyEventKind::Press => match key.code {
                        KeyCode::Char('q') | KeyCode::Esc => return Ok(None),
                        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                            return Ok(None);
                        }
                        KeyCode::Down | KeyCode::Char('j') => from = from.saturating_add(1),
                        KeyCode::Up | KeyCode::Char('k') => from = from.saturating_sub(1),
                        KeyCode::PageDown | KeyCode::Char(' ') => from = from.saturating_add(10),
                        KeyCode::PageUp => from = from.saturating_sub(10),
                        KeyCode::Home => from = 0,
                        _ => continue,
                    },
                    Event::Resize(..) => {}
                    _ => continue,
                }
                from = from.min(processes(&scene).count().saturating_sub(1));
                break;
            }
            if looked.elapsed() >= interval {
                match watch::look(args.pid) {
                    Ok(now) => {
                        rates = now.rates_since(&scene);
                        scene = now;
                    }
                    Err(error) => return Ok(Some(error)),
                }
                looked = Instant::now();
                break;
            }
        }
    }
}

fn processes(scene: &Scene) -> impl Iterator<Item = &ProcessView> {
    scene.runs.iter().flat_map(|run| &run.processes)
}

/// What is drawn.
struct Frame<'a> {
    scene: &'a Scene,
    rates: Rates,
    /// The first process that is shown.
    from: usize,
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

fn ram(scene: &Scene) -> Line<'static> {
    let share = scene.resident_bytes as f64 / scene.budget_bytes.max(1) as f64;
    let color = if share > 0.97 { Color::Red } else { Color::Green };
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

fn groups(scene: &Scene) -> (u16, Table<'static>) {
    let rows = scene.groups.iter().map(|group| {
        let value = |key: &str| group.values.get(key).map_or("-", String::as_str);
        let bytes = |key: &str| value(key).parse().map_or_else(|_| value(key).to_owned(), human);
        vec![
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
        ]
    });
    let head = ["GROUP", "PROCS", "RAM", "MAX", "LOW", "ZSWAP", "SWAP", "MAX", "SWAPPED", "TIERS"];
    table(&head, rows.collect(), &[0, 5, 9, 9, 9, 9, 9, 9, 9, 14], &[1, 2, 3, 4, 5, 6, 7, 8])
}

fn programs(scene: &Scene, from: usize) -> (u16, Table<'static>) {
    let mut all: Vec<(&str, &ProcessView)> = scene
        .runs
        .iter()
        .flat_map(|run| run.processes.iter().map(|process| (run.program.as_str(), process)))
        .collect();
    // The largest first, whether it is in memory or not.
    all.sort_by_key(|(_, p)| {
        (std::cmp::Reverse(p.resident_bytes + p.swapped_pool_bytes + p.swapped_file_bytes), p.pid)
    });
    let rows = all.into_iter().skip(from).map(|(program, process)| {
        let limit =
            if process.limit_bytes == 0 { "-".to_owned() } else { human(process.limit_bytes) };
        vec![
            process.pid.to_string(),
            program.to_owned(),
            process.group.clone(),
            process.state.clone(),
            limit,
            human(process.resident_bytes),
            human(process.pool_bytes),
            human(process.swapped_pool_bytes),
            human(process.swapped_file_bytes),
        ]
    });
    let head =
        ["PID", "RUN", "GROUP", "STATE", "LIMIT", "RESIDENT", "COMPRESSED", "IN POOL", "ON AREAS"];
    table(&head, rows.collect(), &[8, 14, 0, 9, 9, 9, 10, 9, 9], &[0, 4, 5, 6, 7, 8])
}

impl Frame<'_> {
    /// Rows that all of it takes.
    fn height(&self) -> u16 {
        let tables = [areas(self.scene).0, groups(self.scene).0, programs(self.scene, self.from).0];
        1 + 1 + 3 + tables.iter().map(|height| height + 1).sum::<u16>()
    }
}

impl Widget for Frame<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let Frame { scene, rates, from } = self;
        let tables = [areas(scene), groups(scene), programs(scene, from)];
        let mut heights = vec![1, 1, 3];
        heights.extend(tables.iter().take(2).flat_map(|(height, _)| [1, *height]));
        let mut parts: Vec<Constraint> = heights.into_iter().map(Constraint::Length).collect();
        parts.extend([Constraint::Length(1), Constraint::Min(0)]);
        let places = Layout::vertical(parts).split(area);
        Line::styled(title(scene), Modifier::BOLD).render(places[0], buffer);
        ram(scene).render(places[1], buffer);
        for (line, row) in flow(scene, rates).into_iter().zip(places[2].rows()) {
            line.render(row, buffer);
        }
        for ((_, table), place) in tables.into_iter().zip([places[4], places[6], places[8]]) {
            Widget::render(table, place, buffer);
        }
    }
}

/// The frame without a terminal, as high as it needs.
fn as_text(frame: &Frame<'_>) -> String {
    let Frame { scene, rates, from } = *frame;
    let mut terminal = match Terminal::new(TestBackend::new(TEXT_WIDTH, frame.height())) {
        Ok(terminal) => terminal,
        Err(error) => match error {},
    };
    let drawn =
        terminal.draw(|screen| screen.render_widget(Frame { scene, rates, from }, screen.area()));
    if let Err(error) = drawn {
        match error {}
    }
    let buffer = terminal.backend().buffer();
    let rows = buffer.content().chunks(usize::from(TEXT_WIDTH));
    rows.map(|row| {
        row.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned() + "\n"
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_host::cgroup::tree::GroupView;
    use swaptide_host::control::server::TierRow;
    use swaptide_host::report::totals::View;
    use swaptide_host::swap::areas::AreaView;

    fn scene() -> Scene {
        let process = |pid, resident_bytes| ProcessView {
            pid,
            group: "/web".into(),
            state: "engaged".into(),
            limit_bytes: 64 << 20,
            resident_bytes,
            ..ProcessView::default()
        };
        let run = View {
            pid: 40,
            program: "server".into(),
            processes: vec![process(41, 10 << 20), process(42, 50 << 20)],
            ..View::default()
        };
        let area = AreaView {
            name: "nbd://host/x".into(),
            kind: "nbd".into(),
            priority: 7,
            size_bytes: 4 << 30,
            used_bytes: 2 << 20,
            state: "away".into(),
            ..AreaView::default()
        };
        let values = [("processes", "2"), ("ram.current", "62914560"), ("ram.max", "max")];
        let group = GroupView {
            path: "/web".into(),
            values: values
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        };
        Scene {
            daemon: false,
            budget_bytes: 128 << 20,
            resident_bytes: 64 << 20,
            runs: vec![run],
            areas: vec![(3, area)],
            tiers: vec![TierRow { name: "NET".into(), index: 0, start: -1, end: 99 }],
            groups: vec![group],
            at: None,
        }
    }

    #[test]
    fn a_frame_shows_everything_and_the_largest_process_first() {
        let scene = scene();
        let text = as_text(&Frame {
            scene: &scene,
            rates: Rates { pswpin: 1234.0, ..Rates::default() },
            from: 0,
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
        let scene = scene();
        for (width, height) in [(1, 1), (20, 3), (40, 8), (300, 2)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a screen");
            let frame = || Frame { scene: &scene, rates: Rates::default(), from: 1 };
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
    fn intervals_are_seconds_within_reason() {
        assert_eq!(seconds("0.5"), Ok(0.5));
        for text in ["0", "-1", "x", "1e9", "NaN"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
