//! One run of the workload: plain, under the kernel's swap, or under swaptide.
//!
//! Owns starting the workload's process, collecting what it prints, and looking at the pools at the
//! moment all phases are over and all memory is still held.

use std::io::Read;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use swaptide_host::report::totals::ProcessView;

use crate::peers::cgroup::{Cgroup, Hierarchy};
use crate::peers::kernel::{Folios, KernelPeer, PoolUsage, Setup};
use crate::peers::restore::{Machine, Restorer, Undo};
use crate::progress::StepProgress;
use crate::workload::phases::{PAGE, PageContent, Phase, PhaseResult};
use crate::workload::program::DONE;
use crate::workload::serial::SerialPart;

/// The work of one run.
#[derive(Debug, Clone)]
pub struct Workload {
    /// Bytes of data that the program fills and touches.
    pub data: u64,
    /// What the data is.
    pub content: PageContent,
    /// What the program does with the data, in this order.
    pub phases: Vec<Phase>,
    /// How many times the phases are done in one run.
    pub repeat: u32,
    /// Touches in a random phase.
    pub touches: usize,
    /// Limit of time of one phase.
    pub seconds_cap: u64,
    /// Threads of the program, each with its part of the data.
    pub threads: u16,
    /// True if each touch of a random phase is timed.
    pub latency: bool,
    /// What the kernel's zswap may take of the machine's memory, in percent.
    pub zswap_percent: u32,
    /// How long nothing is touched before the pool is looked at.
    pub settle: Duration,
    /// True if swaptide is asked at the end what its pool holds: that costs a little of the time
    /// that is measured.
    pub look: bool,
}

/// What the processes of the run `pid` have in compressed memory; `None` when it cannot be asked.
fn held_by(pid: u32) -> Option<PoolUsage> {
    let view = swaptide_host::control::client::stats(Some(pid)).ok()?;
    let sum = |f: fn(&ProcessView) -> u64| view.processes.iter().map(f).sum();
    Some(PoolUsage {
        ram: sum(|process| process.pool_bytes),
        pages: sum(|process| process.swapped_pool_bytes),
        on_areas: sum(|process| process.swapped_file_bytes),
    })
}

/// Pages that the kernel has written to swap devices since it started.
fn written(machine: &Machine) -> u64 {
    let text = machine.read("/proc/vmstat").unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("pswpout ")?.trim().parse().ok()).unwrap_or(0)
}

impl Workload {
    /// When a run is ended from outside: no phase looks at the clock while it waits for one page.
    fn timeout(&self) -> Duration {
        const STARTING_AND_ENDING: u64 = 30;
        let phases = self.phases.len() as u64 * u64::from(self.repeat);
        Duration::from_secs(
            phases.saturating_mul(self.seconds_cap).saturating_add(STARTING_AND_ENDING),
        )
    }
}

/// What one run gave.
#[derive(Debug, Clone, Default)]
pub struct RunOutcome {
    /// Each phase, in order.
    pub phases: Vec<PhaseResult>,
    /// From start to exit of the process, set-up not included.
    pub wall_s: f64,
    /// Bytes of compressed data in RAM at the end (of swaptide the most so far), where there is a
    /// pool.
    pub pool_bytes: u64,
    /// The pool at the end; of swaptide's nothing where the job does not look.
    pub held: PoolUsage,
    /// The most resident memory, as the cgroup or swaptide counts it; swaptide's includes its pool.
    pub peak_resident: Option<u64>,
    /// Pages that went to a device.
    pub written_pages: u64,
    /// The codec, where the kernel names one.
    pub codec: Option<String>,
    /// True if the pool counted against the limit.
    pub pool_inside: bool,
    /// The run had to be ended from outside, with the phases above done.
    pub ended: bool,
}

impl RunOutcome {
    /// Throughput of a phase in MB/s.
    pub(crate) fn phase_mb_per_s(&self, phase: Phase) -> Option<f64> {
        self.phases.iter().find(|p| p.phase == phase).map(PhaseResult::mb_per_s)
    }

    /// The time that 99 of 100 touches of a phase stay within, in microseconds.
    pub(crate) fn phase_p99_us(&self, phase: Phase) -> Option<f64> {
        self.phases.iter().find(|p| p.phase == phase)?.p99_us
    }

    /// The serial part of a phase, and the pages that it touched; `None` where it is not counted.
    pub(crate) fn phase_serial(&self, phase: Phase) -> Option<(SerialPart, u64)> {
        let result = self.phases.iter().find(|p| p.phase == phase)?;
        Some((result.serial?, result.pages))
    }

    /// Throughput of all phases together in MB/s.
    pub(crate) fn total_mb_per_s(&self) -> f64 {
        let pages: u64 = self.phases.iter().map(|p| p.pages).sum();
        let seconds: f64 = self.phases.iter().map(|p| p.seconds).sum();
        pages as f64 * PAGE as f64 / 1e6 / seconds.max(1e-9)
    }

    /// True if a limit of time cut something short.
    pub(crate) fn capped(&self) -> bool {
        self.ended || self.phases.iter().any(|p| p.capped)
    }

    /// Bytes of which every word was found right at the end.
    pub(crate) fn verified_bytes(&self) -> u64 {
        let pages =
            self.phases.iter().rev().find(|p| p.phase == Phase::Verify).map_or(0, |p| p.pages);
        pages * PAGE as u64
    }
}

/// Starts runs.
pub struct Runner {
    /// Puts the machine back.
    pub restorer: Restorer,
    /// Where swap files and reports go.
    pub dir: PathBuf,
    /// Which run it is, and the time that is left.
    pub(crate) progress: StepProgress,
    exe: PathBuf,
}

impl Runner {
    /// A runner whose swap files and reports go to `dir`.
    pub fn new(restorer: Restorer, dir: &Path) -> Result<Self, String> {
        let exe = std::env::current_exe()
            .map_err(|e| format!("cannot find this program's own file: {e}"))?;
        Ok(Runner { restorer, dir: dir.to_owned(), progress: StepProgress::default(), exe })
    }

    /// Says what runs now, on a terminal only.
    pub(crate) fn say(&self, what: &str) {
        self.progress.begin(what);
    }

    /// A command that runs this program's `args` with `swaptide run` and `ram` bytes before it, or
    /// without.
    fn command(&self, ram: Option<(u64, &Path, Option<&str>)>) -> Command {
        let mut command = Command::new(&self.exe);
        if let Some((ram, report, area)) = ram {
            command
                .args(["run", "--no-daemon", "--quiet", "--ram", &ram.to_string(), "--report"])
                .arg(report);
            if let Some(area) = area {
                command.args(["--swap", area]);
            }
            command.arg("--").arg(&self.exe);
        }
        command
    }

    /// Without any swap.
    pub(crate) fn plain(&self, job: &Workload) -> Result<RunOutcome, String> {
        self.work(self.command(None), job, None, |_| PoolUsage::default())
    }

    /// Under the kernel's swap, in a cgroup of `limit` bytes.
    pub(crate) fn kernel(
        &self,
        job: &Workload,
        cgroups: &Hierarchy,
        peer: KernelPeer,
        folios: Folios,
        limit: u64,
    ) -> Result<RunOutcome, String> {
        // Room for twice the data: large folios want whole clusters.
        let setup = Setup::new(
            &self.restorer,
            peer,
            folios,
            job.data * 2 + (64 << 20),
            &self.dir,
            job.zswap_percent,
        )?;
        let before = written(self.restorer.machine());
        let scope = self.restorer.scope();
        let group = Cgroup::create(&self.restorer, cgroups, Some(limit))?;
        let mut outcome =
            self.work(self.command(None), job, Some(&group.procs()), |_| setup.held())?;
        outcome.pool_bytes = outcome.held.ram;
        outcome.written_pages = written(self.restorer.machine()).saturating_sub(before);
        outcome.peak_resident = group.peak(self.restorer.machine());
        outcome.codec.clone_from(&setup.codec);
        outcome.pool_inside = peer.pool_is_charged(cgroups);
        // Scopes end newest first: the group goes before the swap it used.
        drop(scope);
        Ok(outcome)
    }

    /// Under swaptide, with a budget of `ram` bytes.
    pub fn swaptide(&self, job: &Workload, ram: u64) -> Result<RunOutcome, String> {
        self.swaptide_on(None, job, ram)
    }

    /// The same, with a swap area other than the usual.
    pub(crate) fn swaptide_on(
        &self,
        area: Option<&str>,
        job: &Workload,
        ram: u64,
    ) -> Result<RunOutcome, String> {
        let _scope = self.restorer.scope();
        let report = self.report_file()?;
        let held =
            |pid| if job.look { held_by(pid).unwrap_or_default() } else { PoolUsage::default() };
        let mut outcome = self.work(self.command(Some((ram, &report, area))), job, None, held)?;
        if outcome.ended && !report.exists() {
            return Ok(outcome);
        }
        let text = std::fs::read_to_string(&report)
            .map_err(|e| format!("reading {}: {e}", report.display()))?;
        let json: serde_json::Value = serde_json::from_str(&text)
            .map_err(|e| format!("{} is not the report of a run: {e}", report.display()))?;
        outcome.peak_resident = json["peak_resident_bytes"].as_u64();
        outcome.pool_bytes = json["peak_pool_bytes"].as_u64().unwrap_or(0);
        outcome.written_pages = json["stats"]["pswpout"].as_u64().unwrap_or(0);
        outcome.pool_inside = true;
        Ok(outcome)
    }

    /// How long `program` takes from start to exit, in seconds; under swaptide when `ram` is given.
    pub(crate) fn time_program(&self, program: &Path, ram: Option<u64>) -> Result<f64, String> {
        let mut command = Command::new(if ram.is_some() { &self.exe } else { program });
        if let Some(ram) = ram {
            command
                .args(["run", "--no-daemon", "--quiet", "--ram", &ram.to_string(), "--"])
                .arg(program);
        }
        let begin = Instant::now();
        let mut running =
            self.restorer.spawn(command.stdin(Stdio::null()).stdout(Stdio::null()))?;
        let status =
            running.child.wait().map_err(|e| format!("waiting for {}: {e}", program.display()))?;
        let took = begin.elapsed().as_secs_f64();
        self.restorer.stop_if_interrupted();
        if status.success() {
            Ok(took)
        } else {
            Err(format!("{} ended with {status}", program.display()))
        }
    }

    /// A directory for what the workload writes.
    fn scratch(&self) -> Result<PathBuf, String> {
        let path = self.dir.join(format!("swaptide-bench-{}", std::process::id()));
        self.restorer.change(Undo::RemoveTree(path.clone()), |_| {
            std::fs::create_dir(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            Ok(path.clone())
        })
    }

    /// This program's own file.
    pub(crate) fn exe(&self) -> &Path {
        &self.exe
    }

    /// A file for the report of a run.
    pub(crate) fn report_file(&self) -> Result<PathBuf, String> {
        let path = self.dir.join(format!("swaptide-bench-{}.json", std::process::id()));
        self.restorer.change(Undo::RemoveFile(path.clone()), |_| Ok(path))
    }

    fn work(
        &self,
        mut command: Command,
        job: &Workload,
        join: Option<&Path>,
        held: impl FnOnce(u32) -> PoolUsage,
    ) -> Result<RunOutcome, String> {
        let phases: Vec<&str> = job.phases.iter().map(|p| p.name()).collect();
        command.args([
            "bench-work",
            "--hold",
            "--data",
            &job.data.to_string(),
            "--phase",
            &phases.join(","),
        ]);
        command.args(["--repeat", &job.repeat.to_string(), "--touches", &job.touches.to_string()]);
        command.args([
            "--seconds-cap",
            &job.seconds_cap.to_string(),
            "--ratio",
            job.content.name(),
        ]);
        if job.threads > 1 {
            command.args(["--threads", &job.threads.to_string()]);
        }
        if job.latency {
            command.arg("--latency");
        }
        if let Some(procs) = join {
            command.arg("--join").arg(procs);
        }
        if job.phases.contains(&Phase::Redis) {
            command.arg("--scratch").arg(self.scratch()?);
        }
        let begin = Instant::now();
        let mut running =
            self.restorer.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let (Some(hold), Some(output)) = (running.child.stdin.take(), running.child.stdout.take())
        else {
            return Err("the workload has no pipes".into());
        };
        let mut outcome = RunOutcome::default();
        let mut finished = false;
        let mut lines = Lines::new(output, begin + job.timeout());
        loop {
            match lines.next_line().map_err(|e| format!("reading the workload's results: {e}"))? {
                Next::Line(line) if line == DONE => {
                    finished = true;
                    break;
                }
                Next::Line(line) => outcome
                    .phases
                    .push(serde_json::from_str(&line).map_err(|e| {
                        format!("the workload printed {line:?}, not a result: {e}")
                    })?),
                Next::End => break,
                Next::Late => {
                    outcome.ended = true;
                    break;
                }
            }
        }
        let settled = Instant::now() + job.settle;
        while finished && Instant::now() < settled {
            std::thread::sleep(Duration::from_millis(20).min(job.settle));
            self.restorer.stop_if_interrupted();
        }
        if finished || outcome.ended {
            outcome.held = held(running.child.id());
        }
        if outcome.ended {
            running.end();
            outcome.wall_s = begin.elapsed().as_secs_f64();
            self.restorer.stop_if_interrupted();
            return Ok(outcome);
        }
        drop(hold);
        let status = running.child.wait().map_err(|e| format!("waiting for the workload: {e}"))?;
        outcome.wall_s = begin.elapsed().as_secs_f64();
        self.restorer.stop_if_interrupted();
        if !finished || !status.success() {
            return Err(format!(
                "the workload ended with {status}{}",
                if finished { "" } else { " before its last phase" }
            ));
        }
        Ok(outcome)
    }
}

/// What a workload's output had next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// A line, without its end.
    Line(String),
    /// The program has closed its output.
    End,
    /// No line came within the limit of time.
    Late,
}

/// Lines from a process that may never write one.
pub struct Lines {
    pipe: ChildStdout,
    unread: Vec<u8>,
    end: Instant,
}

impl Lines {
    /// The lines of `pipe` that come before `end`.
    pub fn new(pipe: ChildStdout, end: Instant) -> Lines {
        Lines { pipe, unread: Vec::new(), end }
    }

    /// Lines that come before `end` count from now on.
    pub(crate) fn wait_until(&mut self, end: Instant) {
        self.end = end;
    }

    /// The next one.
    pub fn next_line(&mut self) -> std::io::Result<Next> {
        loop {
            if let Some(at) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=at).collect();
                return Ok(Next::Line(String::from_utf8_lossy(&line[..at]).into_owned()));
            }
            let left = self.end.saturating_duration_since(Instant::now());
            let timeout =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(
                &mut [PollFd::from_borrowed_fd(self.pipe.as_fd(), PollFlags::IN)],
                Some(&timeout),
            ) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
                Ok(0) => return Ok(Next::Late),
                Ok(_) => {}
            }
            let mut bytes = [0; 4096];
            match self.pipe.read(&mut bytes)? {
                0 => return Ok(Next::End),
                n => self.unread.extend_from_slice(&bytes[..n]),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_says_nothing_more_is_late_not_waited_for() {
        let script = "echo one; printf 'two\\nthr'; exec sleep 600";
        let mut child =
            Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        let mut lines = Lines::new(child.stdout.take().unwrap(), end);
        assert_eq!(lines.next_line().unwrap(), Next::Line("one".into()));
        assert_eq!(lines.next_line().unwrap(), Next::Line("two".into()));
        lines.end = Instant::now() + Duration::from_millis(50);
        assert_eq!(lines.next_line().unwrap(), Next::Late);
        child.kill().unwrap();
        child.wait().unwrap();
        lines.end = end;
        assert_eq!(lines.next_line().unwrap(), Next::End);
    }
}
