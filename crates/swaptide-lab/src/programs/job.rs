//! The programs that `lab tiers` measures: `swaptide lab-job`.
//!
//! Owns two shapes of work: processes that each walk memory of their own, as usemem does, round
//! after round, when a line says so; and a command that is run to its end. Both tell what it took:
//! seconds, and seconds of CPU of the processes that worked, swaptide's threads in them included.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use clap::Args;
use serde::{Deserialize, Serialize};
use swaptide_host::units::parse_bytes;

use swaptide_bench::{PAGE, PageContent};

const WORDS: usize = PAGE / 8;

/// Arguments of the hidden subcommand.
#[derive(Debug, Clone, Args)]
pub struct JobArgs {
    /// How many processes
    #[arg(long, default_value_t = 1)]
    pub processes: u32,
    /// Bytes of each
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "32M")]
    pub size: u64,
    /// One of them
    #[arg(long)]
    pub worker: bool,
    /// Run this instead
    #[arg(value_name = "CMD", trailing_var_arg = true)]
    pub command: Vec<String>,
}

/// What some work took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Took {
    /// Seconds.
    pub wall_s: f64,
    /// Seconds of CPU.
    pub cpu_s: f64,
    /// Bytes that were walked.
    pub bytes: u64,
}

/// Does the work. Exit status: 0, or 2 with a line on standard error.
pub fn main(args: &JobArgs) -> u8 {
    let done = match args {
        JobArgs { worker: true, .. } => worker(args.size),
        JobArgs { command, .. } if command.is_empty() => workers(args),
        JobArgs { command, .. } => whole(command),
    };
    match done {
        Ok(()) => 0,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "swaptide lab-job: {}", error.replace('\n', " "));
            2
        }
    }
}

/// Seconds of CPU of this process, or of those it has waited for.
fn cpu(who: libc::c_int) -> f64 {
    // SAFETY: a plain structure of numbers, for which zeros are values; the call fills it.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(who, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

fn say(took: &Took) -> Result<(), String> {
    let text = serde_json::to_string(took).map_err(|error| error.to_string())?;
    match writeln!(std::io::stdout(), "{text}") {
        // The lab was ended; the end of the input follows.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        said => said.map_err(|error| error.to_string()),
    }
}

/// A command to its end.
fn whole(command: &[String]) -> Result<(), String> {
    let began = Instant::now();
    let status = Command::new(&command[0])
        .args(&command[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status();
    let status = status.map_err(|error| format!("{}: {error}", command[0]))?;
    if !status.success() {
        return Err(format!("{}: {status}", command.join(" ")));
    }
    say(&Took {
        wall_s: began.elapsed().as_secs_f64(),
        cpu_s: cpu(libc::RUSAGE_CHILDREN),
        bytes: 0,
    })
}

/// Memory, a walk for each line: every page is checked and rewritten.
fn worker(size: u64) -> Result<(), String> {
    let pages = (size as usize / PAGE).max(1);
    let mut memory = vec![0u64; pages * WORDS];
    let mut expected = vec![0u64; WORDS];
    for (round, line) in std::io::stdin().lock().lines().enumerate() {
        line.map_err(|error| error.to_string())?;
        let (began, cpu_before) = (Instant::now(), cpu(libc::RUSAGE_SELF));
        for (number, page) in memory.chunks_exact_mut(WORDS).enumerate() {
            if round > 0 {
                PageContent::Four.fill_page(&mut expected, number + (round - 1) * pages);
                if page != expected {
                    return Err(format!("page {number} is not what it was in round {round}"));
                }
            }
            PageContent::Four.fill_page(page, number + round * pages);
        }
        let cpu_s = cpu(libc::RUSAGE_SELF) - cpu_before;
        say(&Took { wall_s: began.elapsed().as_secs_f64(), cpu_s, bytes: size })?;
    }
    Ok(())
}

struct WorkerProcess {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

/// The processes: a line starts a round of all of them, and is answered when the last one is
/// through.
fn workers(args: &JobArgs) -> Result<(), String> {
    let exe = std::env::current_exe().map_err(|error| error.to_string())?;
    let start = || {
        let mut command = Command::new(&exe);
        command.args(["lab-job", "--worker", "--size", &args.size.to_string()]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| error.to_string())?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("no pipes".into());
        };
        Ok(WorkerProcess { child, stdin, stdout: BufReader::new(stdout) })
    };
    let mut all: Vec<WorkerProcess> =
        (0..args.processes).map(|_| start()).collect::<Result<_, String>>()?;
    let mut lines = std::io::stdin().lock().lines();
    while let Some(Ok(_)) = lines.next() {
        let began = Instant::now();
        for worker in &mut all {
            writeln!(worker.stdin).map_err(|error| error.to_string())?;
        }
        let mut sum = Took::default();
        for worker in &mut all {
            let mut line = String::new();
            worker.stdout.read_line(&mut line).map_err(|error| error.to_string())?;
            let took: Took = serde_json::from_str(&line)
                .map_err(|_| "a process ended before it was through".to_owned())?;
            sum.cpu_s += took.cpu_s;
            sum.bytes += took.bytes;
        }
        say(&Took { wall_s: began.elapsed().as_secs_f64(), ..sum })?;
    }
    for WorkerProcess { mut child, stdin, .. } in all {
        drop(stdin);
        let status = child.wait().map_err(|error| error.to_string())?;
        if !status.success() {
            return Err(format!("a process ended with {status}"));
        }
    }
    Ok(())
}
