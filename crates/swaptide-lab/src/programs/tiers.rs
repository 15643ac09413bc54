//! `swaptide lab tiers`: what tiers and masks cost.
//!
//! Owns the cases and their runs. Both sides have the same three swap files with the same
//! priorities; *before* has no tier, *after* has three, and a group whose mask keeps off the last.
//! Where runs are whole, the sides take turns; in the row `mask on and off` it is one run whose
//! group has the mask in every other round, so that nothing differs but the mask.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::context::Lab;
use crate::report::{Curve, LabReport, Plot, Row};
use swaptide_host::control::client;

use crate::programs::job::Took;
use crate::programs::pairs::{Pairs, ScratchDir, ratio_row};
use swaptide_bench::{Lines, Next, RunningChild};

const TIERS: &str = "+SSD:100 +HDD:50 +NET:-1";
const GROUP: &str = "/lab";
/// Nothing here takes longer, even on a machine with much else to do.
const RUN_TIMEOUT: Duration = Duration::from_secs(900);
/// What was published: a kernel build's system time in s, usemem's in s, and usemem's
/// throughput in MB/s.
const SEED_BUILD: (f64, f64) = (1584.20, 1590.74);
const SEED_SYSTEM: (f64, f64) = (588.48, 592.15);
const SEED_THROUGHPUT: (f64, f64) = (16.65, 15.95);

/// The parameters of the experiment.
pub struct TiersPlan {
    /// Whole runs of each side.
    pub runs: u32,
    /// Rounds of each side in the one run.
    pub rounds: u32,
    /// Part of the sizes.
    pub scale: f64,
    /// Beginnings of the names of cases; empty: all.
    pub only: Vec<String>,
}

/// How many rounds of the one run take as long as a turn of the others.
const USEMEM_UNITS: u64 = 16;
const COMPILE_UNITS: u64 = 12;
const ONE_RUN: &str = "mask on and off";
const USEMEM: &str = "usemem";
const COMPILE: &str = "compile job";

impl TiersPlan {
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|begin| name.starts_with(begin.as_str()))
    }
}

impl TiersPlan {
    /// Says how many steps there will be, and how long they take, in rounds.
    fn announce(&self, lab: &Lab, compiler: bool) {
        let (runs, rounds) = (u64::from(self.runs), u64::from(self.rounds));
        let steps = [
            (self.wants(ONE_RUN), rounds, 2),
            (self.wants(USEMEM), runs, USEMEM_UNITS),
            (self.wants(COMPILE) && compiler, runs, COMPILE_UNITS),
        ];
        let (steps, units) = steps
            .into_iter()
            .filter(|(wanted, ..)| *wanted)
            .fold((0, 0), |(all, units), (_, steps, each)| (all + steps, units + steps * each));
        lab.progress.expect(steps, units);
    }
}

/// A run of `swaptide` with three swap files in `place`.
fn command(place: &Path, ram: f64, with_tiers: bool) -> Result<Command, String> {
    let exe = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(&exe);
    command.args([
        "run",
        "--quiet",
        "--no-daemon",
        "--ram",
        &format!("{}", (ram as u64).max(24 << 20)),
        "--group",
        GROUP,
    ]);
    // Small compressed memory, so that the areas are used; the first two are enough.
    command.args(["--swap", "zram:4M"]);
    for (name, size, priority) in [("ssd", "64M", 120), ("hdd", "4G", 60), ("net", "4G", 5)] {
        command
            .args(["--swap", &format!("file:{}/{name}:{size},prio={priority}", place.display())]);
    }
    if with_tiers {
        let config = place.join("tiers.toml");
        std::fs::write(
            &config,
            format!("tiers = \"{TIERS}\"\n[groups.\"{GROUP}\"]\nswap.tiers = \"-NET\"\n"),
        )
        .map_err(|error| format!("{}: {error}", config.display()))?;
        command.arg("--config").arg(config);
    }
    command.arg("--").arg(&exe).arg("lab-job");
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    Ok(command)
}

/// A program of the lab's under way, which answers a line with what a round took.
struct LabJob {
    running: RunningChild,
    stdin: Option<std::process::ChildStdin>,
    lines: Lines,
}

impl LabJob {
    fn start(lab: &Lab, mut command: Command) -> Result<LabJob, String> {
        let mut running = lab.restorer.spawn(&mut command)?;
        let (stdin, stdout) = (running.child.stdin.take(), running.child.stdout.take());
        let lines = Lines::new(stdout.ok_or("no pipes")?, Instant::now() + RUN_TIMEOUT);
        Ok(LabJob { running, stdin, lines })
    }

    fn go_on(&mut self) -> Result<(), String> {
        self.stdin
            .as_mut()
            .map_or(Ok(()), |stdin| writeln!(stdin).map_err(|error| error.to_string()))
    }

    fn took(&mut self) -> Result<Took, String> {
        match self.lines.next_line().map_err(|error| error.to_string())? {
            Next::Line(line) => {
                serde_json::from_str(&line).map_err(|error| format!("{line}: {error}"))
            }
            Next::End => Err("the program ended before it was through".into()),
            Next::Late => Err("the program says nothing any more".into()),
        }
    }

    fn end(mut self) -> Result<(), String> {
        self.stdin = None;
        let status = self.running.child.wait().map_err(|error| error.to_string())?;
        if status.success() { Ok(()) } else { Err(format!("the program ended with {status}")) }
    }
}

fn usemem(plan: &TiersPlan, place: &Path, with_tiers: bool) -> Result<Command, String> {
    let mut command = command(place, 64.0 * plan.scale * 1048576.0, with_tiers)?;
    command.args([
        "--processes",
        "4",
        "--size",
        &format!("{}", (48.0 * plan.scale) as u64 * (1 << 20)),
    ]);
    Ok(command)
}

fn one_run(lab: &Lab, plan: &TiersPlan, place: &Path) -> Result<Pairs, String> {
    let mut job = LabJob::start(lab, usemem(plan, place, true)?)?;
    let pid = job.running.child.id();
    // The first rounds fill memory, and what is behind it.
    for _ in 0..3 {
        job.go_on()?;
        job.took()?;
    }
    let mut pairs = Pairs::default();
    for round in 0..plan.rounds {
        let round_of = format!("mask on and off, round {} of {}", round + 1, plan.rounds);
        lab.progress.begin_units(&round_of, 2);
        for before in [round % 2 == 0, round % 2 != 0] {
            let mask = if before { "" } else { "-NET" };
            client::run_group(Some(pid), GROUP, &[("swap.tiers".into(), mask.into())])
                .map_err(|error| error.to_string())?;
            job.go_on()?;
            pairs.push(before, job.took()?);
        }
    }
    job.end()?;
    Ok(pairs)
}

fn whole_usemem(
    lab: &Lab,
    plan: &TiersPlan,
    place: &Path,
    with_tiers: bool,
) -> Result<Took, String> {
    let mut job = LabJob::start(lab, usemem(plan, place, with_tiers)?)?;
    let mut sum = Took::default();
    for _ in 0..6 {
        job.go_on()?;
        let took = job.took()?;
        sum = Took {
            wall_s: sum.wall_s + took.wall_s,
            cpu_s: sum.cpu_s + took.cpu_s,
            bytes: sum.bytes + took.bytes,
        };
    }
    job.end()?;
    Ok(sum)
}

fn build(
    lab: &Lab,
    plan: &TiersPlan,
    place: &Path,
    source: &Path,
    with_tiers: bool,
) -> Result<Took, String> {
    let mut command = command(place, 48.0 * plan.scale * 1048576.0, with_tiers)?;
    command.args(["--", "cc", "-O1", "-g", "-c", "-o"]).arg(place.join("lab.o")).arg(source);
    let mut job = LabJob::start(lab, command)?;
    let took = job.took()?;
    job.end()?;
    Ok(took)
}

/// A C program of `functions` functions.
fn source(functions: u32) -> String {
    let mut text = String::from("#include <stdint.h>\n");
    for i in 0..functions {
        text += &format!(
            "struct s{i} {{ uint32_t a, b[8]; double d; }};
uint64_t f{i}(struct s{i} *p, uint32_t n) {{
    uint64_t sum = {i}u; double d = p->d;
    for (uint32_t k = 0; k < n; k++) {{
        switch ((p->b[k % 8] + k) % 7) {{
        case 0: sum += p->a * k; break;
        case 1: sum ^= sum << 13; break;
        case 2: d = d * 1.5 + k; break;
        case 3: p->b[k % 8] = (uint32_t)sum; break;
        case 4: sum -= (uint64_t)d; break;
        default: sum = sum * 31 + p->b[(k + {}) % 8];
        }}
    }}
    p->d = d;
    return sum;
}}\n",
            i % 8
        );
    }
    text
}

fn is_there(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|place| place.join(program).is_file()))
}

/// Runs all cases.
///
/// # Errors
/// What failed, of which case.
pub(crate) fn measure(lab: &Lab, plan: &TiersPlan) -> Result<LabReport, String> {
    let scratch = ScratchDir::new(&lab.restorer, "tiers")?;
    let place = scratch.path();
    let compiler = is_there("cc");
    plan.announce(lab, compiler);
    let (mut rows, mut curves) = (Vec::new(), Vec::new());
    let mut notes: Vec<String> = [
        "mean+-sample standard deviation; `ratio` is the median of the ratios of neighbours, in \
        per cent of before, with its 95% bounds as deviation",
        "CPU time is that of the measured processes, the threads that swaptide has in them \
        included",
        "mask on and off: one run with three tiers, whose group has the mask -NET in every other \
        round",
        "the published numbers are of the kernel, on another machine: system time, and throughput \
        under global pressure",
    ]
    .map(String::from)
    .into();
    if plan.wants(ONE_RUN) {
        let one = one_run(lab, plan, place)?;
        rows.extend(one.rows(ONE_RUN, None));
        curves.push(one.curve(ONE_RUN));
    }

    let mut pairs = Pairs::default();
    let runs = if plan.wants(USEMEM) { plan.runs } else { 0 };
    for turn in 0..runs {
        let run_of = format!("usemem, run {} of {}", turn + 1, plan.runs);
        lab.progress.begin_units(&run_of, USEMEM_UNITS);
        for before in [turn % 2 == 0, turn % 2 != 0] {
            pairs.push(before, whole_usemem(lab, plan, place, !before)?);
        }
    }
    if runs > 0 {
        let [throughput, cpu, ratio] = pairs.rows(USEMEM, None);
        rows.push(throughput.shaped_like(SEED_THROUGHPUT.0, SEED_THROUGHPUT.1));
        rows.push(cpu.shaped_like(SEED_SYSTEM.0, SEED_SYSTEM.1));
        rows.push(ratio);
    }

    if plan.wants(COMPILE) && compiler {
        let file: PathBuf = place.join("lab.c");
        std::fs::write(&file, source((500.0 * plan.scale).max(50.0) as u32))
            .map_err(|error| error.to_string())?;
        let mut pairs = Pairs::default();
        for turn in 0..plan.runs {
            let run_of = format!("compile job, run {} of {}", turn + 1, plan.runs);
            lab.progress.begin_units(&run_of, COMPILE_UNITS);
            for before in [turn % 2 == 0, turn % 2 != 0] {
                pairs.push(before, build(lab, plan, place, &file, !before)?);
            }
        }
        let [elapsed, cpu, ratio] = pairs.rows(COMPILE, Some("elapsed"));
        rows.push(elapsed);
        rows.push(cpu.shaped_like(SEED_BUILD.0, SEED_BUILD.1));
        rows.push(ratio);
        curves.push(pairs.curve(COMPILE));
    } else if !compiler {
        notes.push("compile job: not measured, there is no cc; apt install gcc".into());
    }
    Ok(LabReport {
        name: "tiers",
        title: format!(
            "no tiers (before), three tiers and a mask (after): {} rounds in one run, {} whole \
            runs of each side in turns",
            plan.rounds, plan.runs
        ),
        rows,
        plot: Plot {
            x: "pair".into(),
            y: "CPU time, % of without".into(),
            log_x: false,
            curves: merged(curves),
        },
        notes,
    })
}

fn merged(curves: Vec<Curve>) -> Vec<Curve> {
    curves.into_iter().enumerate().map(|(n, curve)| Curve { ours: n == 0, ..curve }).collect()
}

/// The three rows of pairs.
impl Pairs {
    /// Throughput (or what `elapsed` names: seconds), CPU time, and the ratio of CPU times.
    fn rows(&self, case: &str, elapsed: Option<&str>) -> [Row; 3] {
        let speed = |took: &Took| took.bytes as f64 / 1e6 / took.wall_s.max(1e-9);
        let first = match elapsed {
            Some(name) => self.row(case, name, "s", |took| took.wall_s),
            None => self.row(case, "throughput", "MB/s", speed),
        };
        let ratio = ratio_row(case, "CPU time, ratio", self.ratio(|took| took.cpu_s));
        [first, self.row(case, "CPU time", "s", |took| took.cpu_s), ratio]
    }

    fn curve(&self, name: &str) -> Curve {
        let points = self
            .ratios(|took| took.cpu_s)
            .into_iter()
            .enumerate()
            .map(|(n, ratio)| (n as f64 + 1.0, ratio * 100.0));
        Curve { name: name.into(), ours: true, points: points.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sides_differ_in_the_configuration_alone() {
        let scratch = ScratchDir::new(&Lab::quiet().restorer, "tiers-test").expect("a directory");
        let plan = TiersPlan { runs: 2, rounds: 2, scale: 1.0, only: Vec::new() };
        let words = |with| {
            let command = usemem(&plan, scratch.path(), with).expect("a command");
            command.get_args().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        let (before, mut after) = (words(false), words(true));
        let at = after.iter().position(|word| word == "--config").expect("tiers");
        after.drain(at..at + 2);
        assert_eq!(before, after);
        assert!(before.iter().filter(|word| *word == "--swap").count() == 4);
    }

    #[test]
    fn the_source_has_every_function_once() {
        let text = source(3);
        assert_eq!((text.matches("uint64_t f").count(), text.matches("f2(").count()), (3, 1));
    }
}
