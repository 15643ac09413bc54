//! One run of a real program.
//!
//! Owns the program's memory cgroup: every side has one, so that all that a program has started can
//! be ended with it; it has a limit on the kernel's side alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::peers::cgroup::{Cgroup, Hierarchy};
use crate::peers::kernel::{Folios, KernelPeer, Setup};
use crate::peers::restore::{Machine, Undo};
use crate::run::Runner;

/// How often is looked what a program has, where that is to be known.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// What a program runs under.
#[derive(Clone, Copy)]
pub(crate) enum Under {
    /// No limit.
    Nothing,
    /// The kernel's swap, which has room for this many bytes, in a cgroup with that limit.
    Kernel { peer: KernelPeer, folios: Folios, limit: u64, room: u64 },
    /// swaptide with this budget, and more options of `swaptide run`.
    Swaptide { ram: u64, options: &'static [&'static str] },
}

/// How a run ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// The program came to its end.
    Whole,
    /// It failed, or was killed: how.
    Failed(String),
    /// It was ended when its time was over.
    Late,
}

/// What a run gave.
#[derive(Clone, Debug)]
pub(crate) struct RealRun {
    pub(crate) end: End,
    /// From start to end.
    pub(crate) wall_s: f64,
    /// CPU time of all that took part: the program, swaptide, the kernel's reclaim threads.
    pub(crate) cpu_s: f64,
    /// The most memory: anonymous and shared without a limit, all that counts under swaptide.
    pub(crate) peak: u64,
    /// The most that the kernel's pool took, which is not charged to its limit.
    pub(crate) pool: u64,
    /// What it printed.
    pub(crate) output: Vec<u8>,
    /// What it has measured itself.
    pub(crate) figures: BTreeMap<String, f64>,
}

/// CPU seconds of this process's children that have ended, and of the kernel's reclaim threads.
fn cpu_used(machine: &Machine) -> f64 {
    let own = machine.read("/proc/self/stat").unwrap_or_default();
    let reclaimers = std::fs::read_dir(machine.path("/proc")).into_iter().flatten().flatten();
    let reclaimers: u64 = reclaimers
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter_map(|pid| machine.read(format!("/proc/{pid}/stat")).ok())
        .filter(|stat| stat.contains("(kswapd"))
        .map(|stat| ticks_of(&stat, 13))
        .sum();
    (ticks_of(&own, 15) + reclaimers) as f64 / rustix::param::clock_ticks_per_second() as f64
}

/// The sum of two fields of a `stat` that follow each other (user and system time), the first of
/// them the `at`-th (counted from 0).
fn ticks_of(stat: &str, at: usize) -> u64 {
    // The name may hold anything, also blanks and brackets: fields are counted from its end.
    let Some((_, rest)) = stat.rsplit_once(')') else { return 0 };
    let fields = rest.split_whitespace().skip(at - 2).take(2);
    fields.filter_map(|field| field.parse::<u64>().ok()).sum()
}

/// The lines `figure NAME VALUE` of a program.
fn figures(text: &str) -> BTreeMap<String, f64> {
    let figure = |line: &str| {
        let (name, value) = line.strip_prefix("figure ")?.split_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    text.lines().filter_map(figure).collect()
}

fn end_of(status: ExitStatus, stderr: &str) -> End {
    if status.success() {
        return End::Whole;
    }
    let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    End::Failed(format!("{status}: {last}"))
}

/// A file that is gone at the end of the run.
fn scratch_file(runner: &Runner, name: &str) -> Result<(PathBuf, std::fs::File), String> {
    let path = runner.dir.join(format!("swaptide-bench-{}.{name}", std::process::id()));
    runner.restorer.change(Undo::RemoveFile(path.clone()), |_| {
        let file = std::fs::File::create(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok((path.clone(), file))
    })
}

/// Runs a program, for at most `timeout`.
///
/// # Errors
/// When it cannot be run at all. A program that fails is no error.
pub(crate) fn run(
    runner: &Runner,
    cgroups: &Hierarchy,
    words: &[String],
    under: Under,
    timeout: Duration,
) -> Result<RealRun, String> {
    let (restorer, machine) = (&runner.restorer, runner.restorer.machine());
    let setup = match under {
        Under::Kernel { peer, folios, room, .. } => {
            Some(Setup::new(restorer, peer, folios, room, &runner.dir, 50)?)
        }
        _ => None,
    };
    // Ends before the set-up: the group goes before the swap that it used.
    let _scope = restorer.scope();
    let limit = match under {
        Under::Kernel { limit, .. } => Some(limit),
        _ => None,
    };
    let group = Cgroup::create(restorer, cgroups, limit)?;
    let (out_path, out) = scratch_file(runner, "out")?;
    let (err_path, err) = scratch_file(runner, "err")?;
    let report = runner.report_file()?;
    let mut command = Command::new("sh");
    command.args(["-c", "echo 0 > \"$0\" && exec \"$@\""]).arg(group.procs());
    if let Under::Swaptide { ram, options } = under {
        let run = ["run", "--no-daemon", "--quiet", "--ram", &ram.to_string(), "--report"];
        command.arg(runner.exe()).args(run).arg(&report).args(options).arg("--");
    }
    command.args(words).stdin(Stdio::null()).stdout(out).stderr(err);
    let cpu_before = cpu_used(machine);
    let begin = Instant::now();
    let mut running = restorer.spawn(&mut command)?;
    let pid = Pid::from_raw(running.child.id() as i32).ok_or("a child without an id")?;
    let pidfd =
        pidfd_open(pid, PidfdFlags::empty()).map_err(|e| format!("watching the program: {e}"))?;
    let looks = matches!(under, Under::Nothing);
    let mut peak = 0;
    let is_ended = loop {
        let left = timeout.saturating_sub(begin.elapsed());
        let wait = if looks { left.min(LOOK_INTERVAL) } else { left };
        let time = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        if matches!(poll(&mut fds, Some(&time)), Ok(1..)) {
            break true;
        }
        if left.is_zero() {
            break false;
        }
        if looks {
            peak = peak.max(group.swappable(machine));
        }
    };
    let wall_s = begin.elapsed().as_secs_f64();
    let status = if is_ended {
        Some(running.child.wait().map_err(|e| format!("waiting for the program: {e}"))?)
    } else {
        running.end();
        None
    };
    // What a program leaves behind when it fails goes with it.
    group.kill_all(machine);
    restorer.stop_if_interrupted();
    let cpu_s = cpu_used(machine) - cpu_before;
    let read = |path: &Path| std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()));
    let stderr = String::from_utf8_lossy(&read(&err_path)?).into_owned();
    if matches!(under, Under::Swaptide { .. }) {
        let text = std::fs::read_to_string(&report).unwrap_or_default();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        peak = json["peak_resident_bytes"].as_u64().unwrap_or(0);
    }
    Ok(RealRun {
        end: status.map_or(End::Late, |status| end_of(status, &stderr)),
        wall_s,
        cpu_s,
        peak,
        pool: setup.as_ref().map_or(0, Setup::most_ram),
        output: read(&out_path)?,
        figures: figures(&stderr),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn times_are_counted_from_the_end_of_the_name() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 10 20 30 40 500 60 7000 800 20 0 1 0";
        assert_eq!((ticks_of(stat, 13), ticks_of(stat, 15)), (560, 7800));
        assert_eq!(ticks_of("", 13), 0);
    }

    #[test]
    fn figures_are_lines_of_their_own() {
        let text = "some warning\nfigure get-p99-us 12.5\nfigure broken\nfigure a b\n";
        assert_eq!(figures(text), BTreeMap::from([("get-p99-us".to_owned(), 12.5)]));
    }

    #[test]
    fn an_end_is_told_with_the_last_line() {
        assert_eq!(end_of(ExitStatus::from_raw(0), "noise"), End::Whole);
        let End::Failed(text) = end_of(ExitStatus::from_raw(9), "first\nno memory\n\n") else {
            panic!("a program that was killed")
        };
        assert!(text.starts_with("signal: 9") && text.ends_with(": no memory"), "{text}");
    }
}
