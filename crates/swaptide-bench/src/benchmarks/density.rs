//! `swaptide bench density`: how many processes that mostly rest share a budget which holds eight
//! of them without swaptide.
//!
//! A daemon has the budget. Processes join it one after the other; each loads its data, and rests.
//! At some numbers of them, each is woken in turn: it is asked something that needs a good part of
//! its data, and its answer is timed and compared with the one that it gave while it loaded. The
//! next number follows while nearly all wakes are short.

use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process::{ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use crate::peers::cgroup::{Cgroup, Hierarchy};
use crate::peers::restore::{Restorer, RunningChild, Undo};
use crate::real::place::Place;
use crate::real::programs::{RESTING_PROGRAMS, RealProgram};
use crate::report::comparison::{BenchReport, Better, human};
use crate::report::density::DensityRow;
use crate::run::{Lines, Next};
use crate::session::{Failed, Session};

/// Processes that fill the budget without swaptide.
const HELD: u64 = 8;
/// Numbers of processes that are tried, while they fit.
const STEPS: [usize; 7] = [8, 16, 24, 32, 40, 48, 64];
/// How long a process may take to load its data, and to answer.
const MAX_LOADING: Duration = Duration::from_secs(300);
const MAX_ANSWERING: Duration = Duration::from_secs(60);
/// How long all of them rest before the first is woken.
const REST: Duration = Duration::from_secs(3);

/// A process that rests between requests.
struct Resting {
    running: RunningChild,
    requests: ChildStdin,
    lines: Lines,
    answer: String,
}

impl Resting {
    /// Starts it, and waits until it has its data.
    fn start(restorer: &Restorer, command: &mut Command) -> Result<Resting, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut running = restorer.spawn(command)?;
        let pipes = (running.child.stdin.take(), running.child.stdout.take());
        let (Some(requests), Some(out)) = pipes else { return Err("a child without pipes".into()) };
        let mut lines = Lines::new(out, Instant::now() + MAX_LOADING);
        let answer = match next(&mut lines, restorer)?.strip_prefix("ready ") {
            Some(answer) => answer.to_owned(),
            None => return Err("it says something else than that it is ready".into()),
        };
        Ok(Resting { running, requests, lines, answer })
    }

    /// Asks it. Milliseconds until it has answered.
    fn wake(&mut self, restorer: &Restorer) -> Result<f64, String> {
        self.lines.wait_until(Instant::now() + MAX_ANSWERING);
        let begin = Instant::now();
        self.requests.write_all(b"next\n").map_err(|_| "it has ended".to_owned())?;
        let answer = next(&mut self.lines, restorer)?;
        let took = begin.elapsed().as_secs_f64() * 1000.0;
        if answer != self.answer {
            return Err(format!("a wrong answer: {answer} for {}", self.answer));
        }
        Ok(took)
    }
}

fn next(lines: &mut Lines, restorer: &Restorer) -> Result<String, String> {
    let next = lines.next_line().map_err(|e| format!("reading its answer: {e}"));
    // What was interrupted was killed by that.
    restorer.stop_if_interrupted();
    match next? {
        Next::Line(line) => Ok(line),
        Next::End => Err("it has ended".into()),
        Next::Late => Err("it does not answer".into()),
    }
}

/// A daemon of its own, with a directory that is gone at the end.
struct BudgetDaemon {
    exe: PathBuf,
    dir: PathBuf,
    running: RunningChild,
}

impl BudgetDaemon {
    /// How long it may take to answer for the first time.
    const MAX_STARTING: Duration = Duration::from_secs(20);

    fn start(session: &Session<'_>, budget: u64, swap: u64) -> Result<BudgetDaemon, String> {
        let (restorer, runner) = (&session.runner.restorer, &session.runner);
        let dir = runner.dir.join(format!("swaptide-bench-{}.daemon", std::process::id()));
        let failed = |e: std::io::Error| format!("{}: {e}", dir.display());
        restorer.change(
            Undo::RemoveTree(dir.clone()),
            |_| // The daemon takes no directory that is open to others.
            std::fs::DirBuilder::new().mode(0o700).create(&dir).map_err(failed),
        )?;
        let config = dir.join("daemon.toml");
        let text = format!("ram = \"{budget}\"\nswap = [\"file:{}:{swap}\"]\n", dir.display());
        std::fs::write(&config, text).map_err(failed)?;
        let mut command = Command::new(runner.exe());
        command.arg("daemon").arg("--config").arg(&config).env(DIRECTORY, &dir);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let running = restorer.spawn(&mut command)?;
        let mut daemon = BudgetDaemon { exe: runner.exe().to_owned(), dir, running };
        let end = Instant::now() + Self::MAX_STARTING;
        while daemon.used().is_none() {
            restorer.stop_if_interrupted();
            let has_ended = !matches!(daemon.running.child.try_wait(), Ok(None));
            if has_ended || Instant::now() > end {
                return Err("the daemon does not answer".into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(daemon)
    }

    /// `swaptide` with these words, for this daemon.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.exe);
        command.args(words).env(DIRECTORY, &self.dir);
        command
    }

    /// Bytes of the budget in use.
    fn used(&self) -> Option<u64> {
        let mut command = self.command(&["ctl", "group", "/", "ram.current"]);
        let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()
    }
}

/// Where the sockets are.
const DIRECTORY: &str = "SWAPTIDE_DIRECTORY";

/// The programs asked for, all of them by default.
fn chosen(names: &[String]) -> Result<Vec<RealProgram>, Failed> {
    let known = RESTING_PROGRAMS.map(|program| program.name);
    if let Some(name) = names.iter().find(|name| !known.contains(&name.as_str())) {
        let known = known.join(", ");
        return Err(Failed(2, format!("--program {name}: unknown; there are {known}")));
    }
    let is_chosen = |p: &&RealProgram| names.is_empty() || names.iter().any(|n| n == p.name);
    Ok(RESTING_PROGRAMS.iter().filter(is_chosen).copied().collect())
}

/// The words of the `n`-th process: each has other data.
fn words_of(words: &[String], n: usize) -> Vec<String> {
    words.iter().map(|word| word.replace("{seed}", &n.to_string())).collect()
}

/// All rows.
pub(crate) fn density(session: &Session<'_>) -> Result<BenchReport, Failed> {
    let args = session.args;
    let programs = chosen(&args.real.program)?;
    if !rustix::process::geteuid().is_root() {
        return Err(Failed(2, "density needs root, for a memory cgroup; run it with sudo".into()));
    }
    let machine = session.runner.restorer.machine();
    let cgroups = Hierarchy::find(machine).map_err(|e| Failed(2, e))?;
    let place = Place::prepare(&args.real.work_dir, &programs).map_err(|e| Failed(2, e))?;
    let title = format!(
        "processes that rest in a budget that holds {HELD} of them; wakes of each: {}",
        session.runs
    );
    let mut report = session.report("density", &title, "ms", Better::Lower, 0);
    for program in &programs {
        let words = place.filled_in(program.words);
        let alone = alone(session, &cgroups, program, &words)?;
        let budget = (alone.each * HELD).next_multiple_of(1 << 20);
        let each = alone.each;
        report.rows.density.push(alone);
        under_swaptide(session, program, &words, (each, budget), &mut report)?;
    }
    // The caller publishes it.
    session.runner.restorer.at_interrupt(|| ());
    Ok(report)
}

/// One process without a limit.
fn alone(
    session: &Session<'_>,
    cgroups: &Hierarchy,
    program: &RealProgram,
    words: &[String],
) -> Result<DensityRow, Failed> {
    let restorer = &session.runner.restorer;
    session.runner.say(&format!("{} alone", program.name));
    let _scope = restorer.scope();
    let group = Cgroup::create(restorer, cgroups, None)?;
    let words = words_of(words, 0);
    let mut command = Command::new("sh");
    command.args(["-c", "echo 0 > \"$0\" && exec \"$@\""]).arg(group.procs()).args(words);
    let mut process = Resting::start(restorer, &mut command)
        .map_err(|e| format!("{} without a limit: {e}", program.name))?;
    let each = group.swappable(restorer.machine());
    let mut wakes_ms = Vec::new();
    for _ in 0..session.runs * HELD as u32 {
        let took = process.wake(restorer);
        wakes_ms.push(took.map_err(|e| format!("{} without a limit: {e}", program.name))?);
    }
    process.running.end();
    group.kill_all(restorer.machine());
    Ok(DensityRow {
        program: program.name.into(),
        processes: 1,
        each,
        budget: 0,
        used: each,
        wakes_ms,
        failure: None,
    })
}

/// More and more processes of a daemon, until they do not fit.
fn under_swaptide(
    session: &Session<'_>,
    program: &RealProgram,
    words: &[String],
    (each, budget): (u64, u64),
    report: &mut BenchReport,
) -> Result<(), Failed> {
    let restorer = &session.runner.restorer;
    let _scope = restorer.scope();
    let most = STEPS[STEPS.len() - 1];
    let daemon = BudgetDaemon::start(session, budget, each * most as u64)?;
    let mut processes: Vec<Resting> = Vec::new();
    for step in STEPS {
        let mut row = DensityRow {
            program: program.name.into(),
            processes: step,
            each,
            budget,
            used: 0,
            wakes_ms: vec![],
            failure: None,
        };
        if let Err(failure) = measure(session, &daemon, words, &mut processes, &mut row) {
            report.failed.push(format!("{} of {step} processes: {failure}", program.name));
            row.failure = Some(failure);
        }
        session.runner.progress.aside(|| {
            eprintln!(
                "swaptide bench: {step} processes of {} in {}: p99 of a wake {}",
                program.name,
                human(budget),
                row.quantile(0.99).map_or("-".into(), |ms| format!("{ms:.0} ms")),
            )
        });
        let fits = row.fits();
        report.rows.density.push(row);
        session.publish_at_interrupt(report);
        if !fits {
            break;
        }
    }
    for process in processes {
        process.running.end();
    }
    Ok(())
}

/// Adds processes until there are as many as the row has, and wakes each in turn.
fn measure(
    session: &Session<'_>,
    daemon: &BudgetDaemon,
    words: &[String],
    processes: &mut Vec<Resting>,
    row: &mut DensityRow,
) -> Result<(), String> {
    let restorer = &session.runner.restorer;
    while processes.len() < row.processes {
        let n = processes.len();
        session.runner.say(&format!("{}: process {} of {}", row.program, n + 1, row.processes));
        let mut command = daemon.command(&["run", "--quiet", "--"]);
        command.args(words_of(words, n));
        processes.push(Resting::start(restorer, &mut command)?);
        row.used = row.used.max(daemon.used().unwrap_or(0));
    }
    std::thread::sleep(REST);
    for _ in 0..session.runs {
        for process in processes.iter_mut() {
            let took = process.wake(restorer)?;
            row.wakes_ms.push(took);
        }
        row.used = row.used.max(daemon.used().unwrap_or(0));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::restore::Machine;

    fn shell(script: &str) -> Result<Resting, String> {
        let restorer = Restorer::new(Machine::real());
        Resting::start(&restorer, Command::new("sh").args(["-c", script]))
    }

    #[test]
    fn a_process_is_woken_and_its_answer_compared() {
        let restorer = Restorer::new(Machine::real());
        let mut right = shell("echo ready 7 3; while read line; do echo 7 3; done").expect("ready");
        assert_eq!(right.answer, "7 3");
        assert!(right.wake(&restorer).is_ok_and(|ms| ms > 0.0));
        assert!(right.wake(&restorer).is_ok());
        let mut wrong = shell("echo ready 7; read line; echo 8").expect("ready");
        assert!(wrong.wake(&restorer).unwrap_err().contains("a wrong answer: 8 for 7"));
        let ended = wrong.wake(&restorer).unwrap_err();
        assert_eq!(ended, "it has ended");
        assert!(shell("echo hello").is_err() && shell("true").is_err());
    }

    #[test]
    fn each_process_has_other_data() {
        let words = ["python3".to_owned(), "{seed}".to_owned()];
        assert_eq!(words_of(&words, 3), ["python3", "3"]);
        assert!(chosen(&["sort".into()]).is_err());
        assert_eq!(chosen(&[]).map(|all| all.len()).ok(), Some(RESTING_PROGRAMS.len()));
    }
}
