//! `swaptide bench real`: real programs in a half, a third and a quarter of the memory that they
//! have without a limit. `swaptide bench kernel-build` is one of them, in a half and a third.
//!
//! The kernel's side runs in a memory cgroup of that size, with zram for swap; swaptide gets the
//! same and what zram's pool took at most.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::peers::cgroup::Hierarchy;
use crate::peers::kernel::{Folios, KernelPeer};
use crate::real::place::Place;
use crate::real::programs::{PROGRAMS, RealProgram};
use crate::real::run::{End, RealRun, Under, run};
use crate::report::comparison::{BenchReport, Better, SWAPTIDE, Spread};
use crate::report::real::{RealRow, RealSide};
use crate::report::svg::MAX_SLOWDOWN;
use crate::session::{Failed, Session};

/// A program has a half, a third and a quarter of its memory.
const DIVISORS: [u64; 3] = [2, 3, 4];
/// The program of `kernel-build`, and the parts of its memory.
const KERNEL_BUILD: &str = "linux";
const KERNEL_BUILD_DIVISORS: [u64; 2] = [2, 3];
/// What a run may take besides [`MAX_SLOWDOWN`].
const STARTING: Duration = Duration::from_secs(5);
/// The same where there is no limit and no time to compare with.
const ALONE_TIMEOUT: Duration = Duration::from_secs(600);

/// One side's runs, as they come in.
struct RealRuns {
    side: RealSide,
    allowed: Vec<f64>,
    last_end: End,
}

impl RealRuns {
    fn new(name: String) -> RealRuns {
        let side = RealSide {
            name,
            wall_s: vec![],
            cpu_s: vec![],
            allowed: 0,
            peak: 0,
            ending: None,
            figures: BTreeMap::new(),
        };
        RealRuns { side, allowed: vec![], last_end: End::Whole }
    }

    /// No run follows one that did not come to its end.
    fn is_over(&self) -> bool {
        self.side.ending.is_some()
    }

    /// Adds a run that was allowed `allowed` bytes. False when it printed something else than
    /// `expected`.
    fn add(&mut self, run: RealRun, allowed: u64, expected: Option<&[u8]>) -> bool {
        let is_right = expected.is_none_or(|expected| run.output == expected);
        self.allowed.push(allowed as f64);
        self.side.allowed = Spread::of(&self.allowed).map_or(0, |spread| spread.median as u64);
        self.side.peak = self.side.peak.max(run.peak);
        self.side.ending = match run.end {
            End::Whole if is_right => None,
            End::Whole => Some("wrong output".into()),
            End::Late => Some(format!("over {:.0} s", run.wall_s)),
            End::Failed(ref how) if how.starts_with("signal: 9") => Some("killed".into()),
            End::Failed(_) => Some("failed".into()),
        };
        self.last_end = run.end.clone();
        if self.is_over() {
            return is_right || run.end != End::Whole;
        }
        self.side.wall_s.push(run.wall_s);
        self.side.cpu_s.push(run.cpu_s);
        for (name, value) in run.figures {
            self.side.figures.entry(name).or_default().push(value);
        }
        true
    }
}

/// A program, and what it does without a limit.
struct Measured<'a> {
    program: &'a RealProgram,
    words: Vec<String>,
    alone: RealSide,
    output: Vec<u8>,
    timeout: Duration,
}

/// The programs asked for, all of them by default.
fn chosen(names: &[String]) -> Result<Vec<RealProgram>, Failed> {
    let known = || PROGRAMS.map(|program| program.name).join(", ");
    for name in names {
        if PROGRAMS.iter().all(|program| program.name != name) {
            return Err(Failed(2, format!("--program {name}: unknown; there are {}", known())));
        }
    }
    let is_chosen =
        |program: &&RealProgram| names.is_empty() || names.iter().any(|n| n == program.name);
    Ok(PROGRAMS.iter().filter(is_chosen).copied().collect())
}

/// All rows of `real`, against zram unless there is no peer.
pub(crate) fn real(session: &Session<'_>) -> Result<BenchReport, Failed> {
    let programs = chosen(&session.args.real.program)?;
    rows(session, "real", "real programs in a part of their memory", &programs, &DIVISORS)
}

/// A build of Linux in a half and a third of the memory that it has without a limit.
pub(crate) fn kernel_build(session: &Session<'_>) -> Result<BenchReport, Failed> {
    let programs = chosen(&[KERNEL_BUILD.into()])?;
    let title = "a build of Linux (make -j2) in a part of its memory";
    rows(session, "kernel-build", title, &programs, &KERNEL_BUILD_DIVISORS)
}

fn rows(
    session: &Session<'_>,
    name: &str,
    title: &str,
    programs: &[RealProgram],
    divisors: &[u64],
) -> Result<BenchReport, Failed> {
    let args = session.args;
    if session.peers.iter().any(|peer| *peer != KernelPeer::Zram) {
        return Err(Failed(2, format!("--peer: {name} compares with kernel-zram alone")));
    }
    if !rustix::process::geteuid().is_root() {
        let why = format!("{name} needs root, for memory cgroups; run it with sudo");
        return Err(Failed(2, why));
    }
    let machine = session.runner.restorer.machine();
    let cgroups = Hierarchy::find(machine).map_err(|e| Failed(2, e))?;
    let place = Place::prepare(&args.real.work_dir, programs).map_err(|e| Failed(2, e))?;
    let title =
        format!("{title}, seconds, {} runs; files in {}", session.runs, place.dir().display());
    let mut report = session.report(name, &title, "s", Better::Lower, 0);
    // In each part of its memory the kernel with each size of folio, and swaptide.
    let sides = divisors.len() * (Folios::choices(machine).len() + 1);
    session.expect(programs.len() as u64 * u64::from(session.runs) * (1 + sides as u64));
    for program in programs {
        let measured = match alone(session, &cgroups, &place, program)? {
            Ok(measured) => measured,
            Err(why) => {
                report.notes.push(format!("{}: left out: {why}", program.name));
                continue;
            }
        };
        for &divisor in divisors {
            let row = compare(session, &cgroups, &measured, divisor, &mut report.failed)?;
            session.runner.progress.aside(|| {
                eprintln!(
                    "swaptide bench: {} in 1/{divisor}: {}",
                    program.name,
                    row.ratio().map_or("no ratio".into(), |ratio| format!("{ratio:.2}"))
                )
            });
            report.rows.real.push(row);
            session.publish_at_interrupt(&report);
        }
    }
    // The caller publishes it.
    session.runner.restorer.at_interrupt(|| ());
    report.notes.push(
        "memory: what swaptide was given, and the kernel with its pool; of the kernel the better \
        of its folio sizes"
            .into(),
    );
    Ok(report)
}

/// The program without a limit; the inner error says why it cannot be measured.
fn alone<'a>(
    session: &Session<'_>,
    cgroups: &Hierarchy,
    place: &Place,
    program: &'a RealProgram,
) -> Result<Result<Measured<'a>, String>, Failed> {
    let words = place.filled_in(program.words);
    let mut runs = RealRuns::new("without a limit".into());
    let mut output: Option<Vec<u8>> = None;
    for n in 1..=session.runs {
        session.runner.say(&format!("{} alone: run {n} of {}", program.name, session.runs));
        let run = run(&session.runner, cgroups, &words, Under::Nothing, ALONE_TIMEOUT)?;
        if let End::Failed(how) = &run.end {
            return Ok(Err(format!("it fails without a limit ({how})")));
        }
        if run.end == End::Late {
            return Ok(Err(format!("without a limit it takes over {} s", run.wall_s as u64)));
        }
        let printed = run.output.clone();
        if !runs.add(run, 0, output.as_deref()) {
            return Ok(Err("it prints something else in every run".into()));
        }
        output.get_or_insert(printed);
    }
    let Some(seconds) = runs.side.seconds() else {
        return Ok(Err("it was not measured".into()));
    };
    let timeout = STARTING + Duration::from_secs_f64(seconds * MAX_SLOWDOWN);
    let output = output.unwrap_or_default();
    Ok(Ok(Measured { program, words, alone: runs.side, output, timeout }))
}

/// One row. What swaptide got wrong is added to `failed`.
fn compare(
    session: &Session<'_>,
    cgroups: &Hierarchy,
    measured: &Measured<'_>,
    divisor: u64,
    failed: &mut Vec<String>,
) -> Result<RealRow, Failed> {
    let (runner, name) = (&session.runner, measured.program.name);
    let limit = (measured.alone.peak / divisor).next_multiple_of(1 << 20);
    let choices = match session.peers.first() {
        Some(_) => Folios::choices(runner.restorer.machine()),
        None => vec![],
    };
    let peer_name = |folios: &Folios| format!("{} {}", KernelPeer::Zram.name(), folios.name());
    let mut theirs: Vec<RealRuns> = choices.iter().map(|f| RealRuns::new(peer_name(f))).collect();
    let mut ours = RealRuns::new(SWAPTIDE.into());
    // Of sides that are over, what they took in their last run still holds.
    let mut pools = vec![0; choices.len()];
    for n in 1..=session.runs {
        let say = |side: &str| {
            runner.say(&format!("{name} in 1/{divisor}, {side}: run {n} of {}", session.runs));
        };
        for ((folios, runs), pool) in choices.iter().zip(&mut theirs).zip(&mut pools) {
            if runs.is_over() {
                continue;
            }
            say(&runs.side.name);
            let room = measured.alone.peak * 2 + (1 << 30);
            let under = Under::Kernel { peer: KernelPeer::Zram, folios: *folios, limit, room };
            let run = run(runner, cgroups, &measured.words, under, measured.timeout)?;
            *pool = run.pool;
            runs.add(run, limit + *pool, Some(&measured.output));
        }
        if ours.is_over() {
            continue;
        }
        say(SWAPTIDE);
        // Of those that come to their end, the smallest; of those that do not, what they had when
        // they ended.
        let ended = theirs.iter().zip(&pools).filter(|(runs, _)| !runs.is_over());
        let least = ended.map(|(_, pool)| *pool).min();
        let ram = limit + least.or(pools.iter().max().copied()).unwrap_or(0);
        let under = Under::Swaptide { ram, options: measured.program.options };
        let run = run(runner, cgroups, &measured.words, under, measured.timeout)?;
        if !ours.add(run, ram, Some(&measured.output)) {
            failed.push(format!("{name} in 1/{divisor} printed something else under swaptide"));
        }
        if let End::Failed(how) = &ours.last_end {
            failed.push(format!("{name} in 1/{divisor} failed under swaptide ({how})"));
        }
    }
    let better =
        theirs.into_iter().map(|runs| runs.side).reduce(|a, b| match (a.seconds(), b.seconds()) {
            (Some(a_s), Some(b_s)) if b_s < a_s => b,
            (None, Some(_)) => b,
            _ => a,
        });
    Ok(RealRow {
        program: name.into(),
        what: measured.program.what.into(),
        divisor,
        alone: measured.alone.clone(),
        ours: ours.side,
        theirs: better,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(end: End, output: &str) -> RealRun {
        RealRun {
            end,
            wall_s: 2.0,
            cpu_s: 3.0,
            peak: 5,
            pool: 0,
            output: output.into(),
            figures: BTreeMap::from([("p99".to_owned(), 7.0)]),
        }
    }

    #[test]
    fn a_run_that_prints_something_else_is_told_and_is_the_last() {
        let mut runs = RealRuns::new("one".into());
        assert!(runs.add(ended(End::Whole, "7"), 100, Some(b"7")));
        assert_eq!((runs.side.seconds(), runs.is_over()), (Some(2.0), false));
        assert!(!runs.add(ended(End::Whole, "8"), 100, Some(b"7")));
        assert_eq!(runs.side.ending.as_deref(), Some("wrong output"));
        assert_eq!((runs.side.seconds(), runs.side.wall_s.len()), (None, 1));
    }

    #[test]
    fn killed_or_late_run_has_no_wrong_output() {
        for end in [End::Failed("signal: 9".into()), End::Late] {
            let mut runs = RealRuns::new("one".into());
            assert!(runs.add(ended(end, ""), 100, Some(b"7")));
            assert!(runs.is_over() && runs.side.seconds().is_none());
        }
    }

    #[test]
    fn programs_are_chosen_by_name() {
        assert_eq!(chosen(&[]).map(|all| all.len()).ok(), Some(PROGRAMS.len()));
        let two = chosen(&["sort".into(), "g++".into()]).ok().expect("both are known");
        assert_eq!(two.iter().map(|program| program.name).collect::<Vec<_>>(), ["g++", "sort"]);
        let Err(Failed(2, message)) = chosen(&["emacs".into()]) else { panic!("unknown") };
        assert!(message.contains("there are objects"), "{message}");
    }
}
