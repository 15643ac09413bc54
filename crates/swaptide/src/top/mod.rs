//! `swaptide top`: live statistics of a run or a daemon in a terminal, or one frame as text.
//!
//! Owns the terminal while it runs: raw mode and the alternate screen are left again however it
//! ends, but for SIGKILL. `frame.rs` draws everything, `process.rs` one process, `look.rs` has what
//! they are given, and `history.rs` what happened in the last minutes.

mod frame;
mod history;
mod look;
mod process;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use swaptide_host::control::server::ControlError;
use swaptide_host::control::watch::{self, Rates, Scene};

use crate::terminal;
use crate::top::frame::as_text;
use crate::top::history::TopHistory;
use crate::top::look::{Frame, Look, SortKey, ordered};

/// Time between the two samples that the rates of a single frame come from.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
/// How often keys and signals are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The keys, for the manual.
pub(crate) const KEYS: [(&str, &str); 6] = [
    ("Up, Down, k, j, Page Up, Page Down, Space, Home", "Choose a process."),
    ("Enter, Right", "Show the chosen process: limits, tiers, faults, times, stall."),
    ("Escape, Left", "Back to all processes; Escape there: end."),
    (
        "s, r, i, o, f, w, p",
        "Sort by size, resident memory, pages in, pages out, faults, waits, pid.",
    ),
    ("S", "The next key to sort by."),
    ("q, Ctrl-C", "End."),
];

/// Show live statistics of a run, or of the daemon and all its runs
#[derive(Args)]
pub struct TopArgs {
    /// The run, by the process you started or any other in it [default: the only run, or the
    /// daemon]
    #[arg(long)]
    pid: Option<u32>,
    /// Begin with the view of this process alone
    #[arg(long, value_name = "PID")]
    process: Option<u32>,
    /// What processes are sorted by
    #[arg(long, value_name = "KEY", value_enum, default_value_t)]
    sort: SortKey,
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
    let first = match watch::look(args.pid.or(args.process)) {
        Ok(scene) => scene,
        Err(error) => return refuse(&error.to_string()),
    };
    if let Some(pid) = args.process.filter(|pid| !ordered_has(&first, *pid)) {
        return refuse(&format!(
            "--process {pid}: not a process of this run; see swaptide ctl stats"
        ));
    }
    if args.once || args.json {
        return once(args, first);
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return refuse(
            "standard input and output are no terminal; --once prints one frame as text",
        );
    }
    match live(args, first) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(ended)) => {
            terminal::complain(&format!("swaptide top: {ended}"));
            ExitCode::SUCCESS
        }
        Err(error) => refuse(&format!("the terminal cannot be used: {error}")),
    }
}

fn ordered_has(scene: &Scene, pid: u32) -> bool {
    scene.runs.iter().flat_map(|run| &run.processes).any(|process| process.pid == pid)
}

/// Whom to ask after the first look: the run itself, which goes on when the process that it was
/// named by ends.
fn asked(args: &TopArgs, first: &Scene) -> Option<u32> {
    let named = args.pid.or(args.process)?;
    Some(first.runs.first().map_or(named, |run| run.pid))
}

/// One frame, of two looks.
fn once(args: &TopArgs, first: Scene) -> ExitCode {
    let mut history = TopHistory::default();
    history.add(&first);
    std::thread::sleep(SAMPLE_INTERVAL);
    // One that ended meanwhile is shown as it was.
    let scene = watch::look(asked(args, &first)).unwrap_or_else(|_| first.clone());
    history.add(&scene);
    let rates = scene.rates_since(&first);
    terminal::print(&if args.json {
        terminal::json(&serde_json::json!({ "scene": scene, "rates": rates }))
    } else {
        let look = Look { sort: args.sort, one: args.process, ..Look::default() };
        as_text(&Frame { scene: &scene, rates, history: &history, look }, terminal::is_colored())
    });
    ExitCode::SUCCESS
}

/// Draws until the user quits or the run ends.
fn live(args: &TopArgs, first: Scene) -> io::Result<Option<ControlError>> {
    let over = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        signal_hook::flag::register(signal, Arc::clone(&over))?;
    }
    // What failed may have left the terminal in raw mode.
    let mut terminal = ratatui::try_init().inspect_err(|_| {
        let _ = ratatui::try_restore();
    })?;
    let shown = show(&mut terminal, args, first, &over);
    ratatui::try_restore()?;
    shown
}

/// What a key leads to.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    Nothing,
    Changed,
    End,
}

/// Changes what is shown as a key says.
fn hear(key: KeyEvent, look: &mut Look, scene: &Scene, history: &TopHistory) -> Heard {
    let rows = ordered(scene, history, look.sort);
    let at = look.cursor.unwrap_or(0);
    let to = |row: usize| Some(row.min(rows.len().saturating_sub(1)));
    match key.code {
        KeyCode::Char('q') => return Heard::End,
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Heard::End,
        KeyCode::Esc if look.one.is_none() => return Heard::End,
        KeyCode::Esc | KeyCode::Left | KeyCode::Backspace => look.one = None,
        KeyCode::Enter | KeyCode::Right => {
            look.one = look.one.or(rows.get(at).map(|row| row.process.pid));
        }
        KeyCode::Down | KeyCode::Char('j') => look.cursor = to(at + 1),
        KeyCode::Up | KeyCode::Char('k') => look.cursor = to(at.saturating_sub(1)),
        KeyCode::PageDown | KeyCode::Char(' ') => look.cursor = to(at + 10),
        KeyCode::PageUp => look.cursor = to(at.saturating_sub(10)),
        KeyCode::Home => look.cursor = to(0),
        KeyCode::Char('S') => look.sort = look.sort.next(),
        KeyCode::Char(letter) => match SortKey::of_key(letter) {
            Some(sort) => look.sort = sort,
            None => return Heard::Nothing,
        },
        _ => return Heard::Nothing,
    }
    Heard::Changed
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    args: &TopArgs,
    first: Scene,
    over: &AtomicBool,
) -> io::Result<Option<ControlError>> {
    let interval = Duration::from_secs_f64(args.interval);
    let run = asked(args, &first);
    let mut history = TopHistory::default();
    history.add(&first);
    let (mut scene, mut rates) = (first, Rates::default());
    let mut look = Look {
        sort: args.sort,
        cursor: Some(0),
        one: args.process,
        is_live: true,
        is_plain: !terminal::is_colored(),
    };
    let mut looked = Instant::now();
    loop {
        terminal.draw(|screen| {
            let frame = Frame { scene: &scene, rates, history: &history, look };
            screen.render_widget(frame, screen.area());
        })?;
        loop {
            if over.load(Relaxed) {
                return Ok(None);
            }
            let left = interval.saturating_sub(looked.elapsed());
            if event::poll(left.min(POLL_INTERVAL))? {
                match event::read()? {
                    Event::Key(key) if key.kind == KeyEventKind::Press => {
                        match hear(key, &mut look, &scene, &history) {
                            Heard::End => return Ok(None),
                            Heard::Changed => break,
                            Heard::Nothing => continue,
                        }
                    }
                    Event::Resize(..) => break,
                    _ => continue,
                }
            }
            if looked.elapsed() >= interval {
                match watch::look(run) {
                    Ok(now) => {
                        rates = now.rates_since(&scene);
                        scene = now;
                        history.add(&scene);
                    }
                    Err(error) => return Ok(Some(error)),
                }
                looked = Instant::now();
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::look::tests::scene;

    #[test]
    fn intervals_are_seconds_within_reason() {
        assert_eq!(seconds("0.5"), Ok(0.5));
        for text in ["0", "-1", "x", "1e9", "NaN"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_run_named_by_one_of_its_processes_is_asked_for_by_its_own_number() {
        let args = |pid, process| TopArgs {
            pid,
            process,
            sort: SortKey::Size,
            interval: 1.0,
            once: false,
            json: false,
        };
        let mut first = scene();
        let run = first.runs[0].pid;
        let process = first.runs[0].processes.last().expect("a process").pid;
        assert_ne!(run, process);
        for (pid, one) in [(Some(process), None), (None, Some(process)), (Some(run), Some(process))]
        {
            assert_eq!(asked(&args(pid, one), &first), Some(run));
        }
        // All that a daemon keeps.
        assert_eq!(asked(&args(None, None), &first), None);
        first.runs.clear();
        assert_eq!(asked(&args(Some(7), None), &first), Some(7));
    }

    #[test]
    fn keys_choose_sort_open_and_end() {
        let scene = scene();
        let mut history = TopHistory::default();
        history.add(&scene);
        let mut look = Look { cursor: Some(0), ..Look::default() };
        let mut press = |code| {
            let heard = hear(KeyEvent::new(code, KeyModifiers::NONE), &mut look, &scene, &history);
            (heard, look.cursor, look.one, look.sort)
        };
        let size = SortKey::Size;
        assert_eq!(press(KeyCode::Down), (Heard::Changed, Some(1), None, size));
        // There are two processes.
        assert_eq!(press(KeyCode::PageDown), (Heard::Changed, Some(1), None, size));
        assert_eq!(press(KeyCode::Enter), (Heard::Changed, Some(1), Some(41), size));
        assert_eq!(press(KeyCode::Esc), (Heard::Changed, Some(1), None, size));
        assert_eq!(press(KeyCode::Char('p')), (Heard::Changed, Some(1), None, SortKey::Pid));
        assert_eq!(press(KeyCode::Char('S')), (Heard::Changed, Some(1), None, size));
        assert_eq!(press(KeyCode::Char('x')).0, Heard::Nothing);
        assert_eq!(press(KeyCode::Esc).0, Heard::End);
        assert_eq!(press(KeyCode::Char('q')).0, Heard::End);
    }
}
