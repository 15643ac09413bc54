//! `swaptide ctl`: queries and commands for a live run or the daemon.
//!
//! Owns the output. [`swaptide_host::control`] finds the run and speaks the protocol.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use swaptide_bench::StepProgress;
use swaptide_host::control::{client, server};
use swaptide_host::report::totals::View;
use swaptide_host::swap::areas::AreaView;
use swaptide_host::units::{comma_list, human, parse_share, ram_total};

use crate::refuse;
use crate::terminal::{self, DOUBTFUL, HEAD, styled};

/// Arguments of `swaptide ctl`.
#[derive(Args)]
pub struct CtlArgs {
    #[command(subcommand)]
    what: What,
    /// Print JSON (docs/json.md has the keys)
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum What {
    /// Show memory, swap and counters of a run, under the kernel's names
    Stats(StatsArgs),
    /// List your runs
    List,
    /// Show the budget of a run in bytes, or change it
    Budget(BudgetArgs),
    /// List swap areas in order of use
    Devices(StatsArgs),
    /// Add a swap area to a run
    Swapon(SwaponArgs),
    /// Remove a swap area, migrating its pages first
    Swapoff(SwapoffArgs),
    /// Show or change tiers: '+SSD:100 +HDD:50 +NET:-1', '-HDD', 'SSD:80'
    Tiers(TiersArgs),
    /// Show groups, or change one
    Group(GroupArgs),
    /// Show or set the readahead limits
    Readahead(ReadaheadArgs),
    /// Reclaim an amount of memory from a group
    Reclaim(ReclaimArgs),
    /// Swap a group out and keep it out
    Freeze(OfGroupArgs),
    /// Swap a group in; unfreezes it
    Preload(OfGroupArgs),
    /// Swap all memory of a process in and stop managing it
    Detach(DetachArgs),
    /// Make the daemon reload its configuration file
    Reload,
    /// Tell whether the daemon takes runs: status 0; 1 while it is drained, 2 if none answers
    Ready(ReadyArgs),
    /// Have the daemon take no run any more, and wait until those that it has are over. Status 1 if
    /// some are left
    Drain(DrainArgs),
}

#[derive(Args)]
struct ReadyArgs {
    /// Status 0 also while it is drained: it answers
    #[arg(long)]
    live: bool,
}

#[derive(Args)]
struct DrainArgs {
    /// Wait so long at most; 0 does not wait [default: without a bound]
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u32>,
    /// Then bring the memory of those that are left in, and let them continue without swaptide.
    /// Status 1 if one could not be let go
    #[arg(long)]
    detach: bool,
    /// Take runs again
    #[arg(long, conflicts_with_all = ["timeout", "detach"])]
    cancel: bool,
}

#[derive(Args)]
struct BudgetArgs {
    /// The new budget: 512M, 1.5G, or 50% of the machine's or container's memory
    #[arg(value_name = "SIZE", allow_hyphen_values = true)]
    size: Option<String>,
    /// The run, by the process you started or any other in it [default: the only run]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

#[derive(Args)]
struct DetachArgs {
    /// Process; the process you started means the whole run [default: the only run]
    #[arg(value_name = "PID")]
    pid: Option<u32>,
}

#[derive(Args)]
struct TiersArgs {
    /// Changes separated by spaces or commas: +NAME:PRIO adds a tier, -NAME removes one, NAME:PRIO
    /// moves its start. Applied all or not at all
    #[arg(value_name = "TEXT", allow_hyphen_values = true)]
    text: Option<String>,
    /// The run, by the process you started or any other in it [default: the only run]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

#[derive(Args)]
struct ReadaheadArgs {
    /// page-cluster=N: at most 2^N pages at a time from a swap file and the compressed memory in
    /// front of it; largest-order=N: from anywhere. 0 to 9, or default. Applied all or not at all
    #[arg(value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The run, by the process you started or any other in it [default: the only run]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

#[derive(Args)]
struct GroupArgs {
    /// The group: /NAME, /NAME/NAME, or / for all
    #[arg(value_name = "PATH", default_value = "/")]
    path: String,
    /// KEY shows a setting, KEY=VALUE sets it, all or not at all: ram.max, ram.high, ram.low,
    /// swap.max, swap.high, swap.tiers, zswap.max, zswap.writeback; processes=PID moves a process
    #[arg(value_name = "KEY[=VALUE]")]
    keys: Vec<String>,
    /// Remove the group, which must be empty
    #[arg(long, conflicts_with = "keys")]
    remove: bool,
    /// The run, by the process you started or any other in it [default: the only run]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

#[derive(Args)]
struct OfGroupArgs {
    /// The group
    #[arg(value_name = "PATH")]
    path: String,
    /// The run, by the process you started or any other in it [default: the only run]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

#[derive(Args)]
struct ReclaimArgs {
    /// The group
    #[arg(value_name = "PATH")]
    path: String,
    /// Amount, such as 512M
    #[arg(value_name = "SIZE")]
    size: String,
    /// The run, by the process you started or any other in it [default: the only run]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

#[derive(Args)]
struct SwaponArgs {
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(
        value_name = "DEV",
        help = "The device, as for swaptide run --swap: file:PATH[:SIZE], /dev/BLOCK or \
            nbd://HOST/EXPORT, with ,prio=N; exports also with ,mirror=DIRECTORY, a copy on a \
            local disk"
    )]
    device: String,
    /// The run, by the process you started or any other in it [default: the only run]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

#[derive(Args)]
struct SwapoffArgs {
    /// Its name or number (see swaptide ctl devices)
    #[arg(value_name = "NAME")]
    name: String,
    /// The run, by the process you started or any other in it [default: the only run]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

#[derive(Args)]
struct StatsArgs {
    /// The run, by the process you started or any other in it [default: the only run]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

/// What a command prints: one of both.
struct Printed {
    text: String,
    json: Value,
}

impl Printed {
    fn new(text: String, value: &impl serde::Serialize) -> Printed {
        let json = serde_json::to_value(value);
        Printed { text, json: json.unwrap_or_else(|error| error.to_string().into()) }
    }

    /// What was done, for scripts alone.
    fn silent(value: Value) -> Printed {
        Printed { text: String::new(), json: value }
    }
}

type Asked = Result<Printed, server::ControlError>;

/// Asks and prints.
pub fn main(args: &CtlArgs) -> ExitCode {
    match answer(&args.what) {
        Ok((printed, status)) => {
            let Printed { text, json } = printed;
            terminal::print(&if args.json { terminal::json(&json) } else { text });
            status
        }
        Err(error) => refuse("ctl", &error.to_string()),
    }
}

fn answer(what: &What) -> Result<(Printed, ExitCode), server::ControlError> {
    let printed = match what {
        What::List => list(),
        What::Stats(args) => client::stats(args.pid).map(|view| Printed::new(table(&view), &view)),
        What::Budget(args) => budget(args),
        What::Devices(args) => client::devices(args.pid).map(|devices| {
            let all: Vec<Numbered> =
                devices.iter().map(|(number, area)| Numbered { number: *number, area }).collect();
            Printed::new(areas(&devices), &all)
        }),
        What::Swapon(args) => client::add_device(args.pid, &args.device)
            .map(|()| Printed::silent(json!({ "added": args.device }))),
        What::Swapoff(args) => {
            swapoff(args).map(|()| Printed::silent(json!({ "removed": args.name })))
        }
        What::Tiers(args) => client::run_tiers(args.pid, args.text.as_deref())
            .map(|view| Printed::new(view.table, &view.tiers)),
        What::Group(args) => group(args),
        What::Readahead(args) => readahead(args),
        What::Reclaim(args) => return reclaim(args),
        What::Ready(args) => return ready(args),
        What::Drain(args) if args.cancel => {
            client::drain(false).map(|view| Printed::new(String::new(), &view))
        }
        What::Drain(args) => return drain(args),
        What::Freeze(args) => client::freeze_group(args.pid, &args.path).map(|bytes| {
            Printed::new(format!("{} went out\n", human(bytes)), &json!({ "bytes": bytes }))
        }),
        What::Preload(args) => with_progress(&args.path, |progress| {
            client::preload_group(args.pid, &args.path, progress)
        })
        .map(|(bytes, whole)| {
            let more = if whole { "" } else { ", there is no room for more" };
            Printed::new(
                format!("{} came back{more}\n", human(bytes)),
                &json!({ "bytes": bytes, "complete": whole }),
            )
        }),
        What::Detach(args) => {
            with_progress("processes", |progress| client::detach_process(args.pid, progress))
                .map(|()| Printed::silent(json!({ "detached": true })))
        }
        What::Reload => client::reload().map(|()| Printed::silent(json!({ "reloaded": true }))),
    };
    printed.map(|printed| (printed, ExitCode::SUCCESS))
}

/// An area with the number by which it can be named.
#[derive(serde::Serialize)]
struct Numbered<'a> {
    number: u8,
    #[serde(flatten)]
    area: &'a AreaView,
}

/// In bytes, so that scripts can give it back.
fn budget(args: &BudgetArgs) -> Asked {
    let size = args.size.as_deref().map(|text| parse_share(text, ram_total())).transpose();
    let size = size.map_err(|error| server::ControlError::Refused(error.to_string()))?;
    let bytes = client::run_budget(args.pid, size)?;
    let text = if size.is_some() { String::new() } else { format!("{bytes}\n") };
    Ok(Printed::new(text, &json!({ "budget_bytes": bytes })))
}

fn swapoff(args: &SwapoffArgs) -> Result<(), server::ControlError> {
    with_progress(&args.name, |progress| client::remove_device(args.pid, &args.name, progress))
}

/// Does what takes a while; how many bytes are left, of what, is shown on a terminal only.
fn with_progress<T>(what: &str, work: impl FnOnce(&mut dyn FnMut(u64)) -> T) -> T {
    let progress = StepProgress::default();
    work(&mut |left| progress.left(what, left))
}

/// As /proc/swaps, with the number of each.
fn areas(devices: &[(u8, AreaView)]) -> String {
    let head = format!(
        "{:<40} {:<6} {:>10} {:>10} {:>8} {:<8} {:>3}",
        "Filename", "Type", "Size", "Used", "Priority", "State", "Nr"
    );
    let mut text = styled(HEAD, &head) + "\n";
    for (number, view) in devices {
        // Filled up before it is styled: what colors take is no width.
        let state = format!("{:<8}", view.state);
        text += &format!(
            "{:<40} {:<6} {:>10} {:>10} {:>8} {} {:>3}{}{}\n",
            view.name,
            view.kind,
            view.size_bytes / 1024,
            view.used_bytes / 1024,
            view.priority,
            if view.state == "open" { state } else { styled(DOUBTFUL, &state) },
            number,
            view.mirror
                .as_ref()
                .map_or_else(String::new, |mirror| format!(" mirror={}", mirror.place)),
            match view.in_doubt_bytes {
                0 => String::new(),
                bytes => format!(" in-doubt={}", bytes / 1024),
            }
        );
    }
    text
}

/// Reads or sets keys of a group; without keys, everything of it and of those below it.
fn group(args: &GroupArgs) -> Asked {
    let refused = |why: String| Err(server::ControlError::Refused(why));
    if args.remove {
        return client::remove_group(args.pid, &args.path)
            .map(|()| Printed::silent(json!({ "removed": args.path })));
    }
    let (set, read): (Vec<&String>, Vec<&String>) =
        args.keys.iter().partition(|key| key.contains('='));
    if !set.is_empty() && !read.is_empty() {
        return refused(format!(
            "{}: either keys to read or KEY=VALUE to set; {:?} has no value",
            args.path, read[0]
        ));
    }
    let pairs: Vec<(String, String)> = set
        .iter()
        .filter_map(|text| text.split_once('='))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    let views = client::run_group(args.pid, &args.path, &pairs)?;
    if !pairs.is_empty() {
        return Ok(Printed::new(String::new(), &views));
    }
    let Some(own) = views.first() else { return Ok(Printed::new(String::new(), &views)) };
    if !read.is_empty() {
        let (mut text, mut values) = (String::new(), serde_json::Map::new());
        for key in read {
            match own.values.get(key) {
                Some(value) => {
                    text += &format!("{value}\n");
                    values.insert(key.clone(), value.clone().into());
                }
                None => {
                    let keys: Vec<&str> = own.values.keys().map(String::as_str).collect();
                    return refused(format!(
                        "{}: there is no {key:?}; a group has {}",
                        args.path,
                        keys.join(", ")
                    ));
                }
            }
        }
        return Ok(Printed::new(text, &values));
    }
    let one = |view: &swaptide_host::cgroup::tree::GroupView| {
        let lines: String =
            view.values.iter().map(|(key, value)| format!("  {key} {value}\n")).collect();
        format!("{}\n{lines}", view.path)
    };
    Ok(Printed::new(views.iter().map(one).collect(), &views))
}

/// Shows what there is, or sets all that is given.
fn readahead(args: &ReadaheadArgs) -> Asked {
    let mut set = Vec::new();
    for text in &args.set {
        match text.split_once('=') {
            Some((key, value)) => set.push((key.to_owned(), value.to_owned())),
            None => {
                return Err(server::ControlError::Refused(format!("{text:?} is not KEY=VALUE")));
            }
        }
    }
    let values = client::readahead(args.pid, &set)?;
    let lines = || values.iter().map(|(key, value)| format!("{key} {value}\n")).collect();
    let text = if set.is_empty() { lines() } else { String::new() };
    Ok(Printed::new(text, &values.iter().cloned().collect::<BTreeMap<_, _>>()))
}

/// Like the write to a cgroup's memory.reclaim: a failure when less went out than was asked for.
fn reclaim(args: &ReclaimArgs) -> Result<(Printed, ExitCode), server::ControlError> {
    let bytes = swaptide_host::units::parse_bytes(&args.size)
        .map_err(|error| server::ControlError::Refused(error.to_string()))?;
    let (bytes, enough) = client::reclaim_group(args.pid, &args.path, bytes)?;
    let printed = Printed::new(
        format!("{} went out\n", human(bytes)),
        &json!({ "bytes": bytes, "enough": enough }),
    );
    Ok((printed, if enough { ExitCode::SUCCESS } else { ExitCode::FAILURE }))
}

/// For probes: the status says whether the daemon takes runs.
fn ready(args: &ReadyArgs) -> Result<(Printed, ExitCode), server::ControlError> {
    let view = client::ready()?;
    let state = if view.draining { "draining" } else { "ready" };
    let text = format!("{state}, {} runs, {} processes\n", view.runs.len(), view.processes);
    let is_refused = view.draining && !args.live;
    let status = if is_refused { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    Ok((Printed::new(text, &view), status))
}

/// How often it is asked what is left.
const DRAIN_INTERVAL: Duration = Duration::from_millis(100);
/// How long a run that has ended may still be listed.
const RUN_END_TIMEOUT: Duration = Duration::from_secs(3);

/// No run is taken from now on; waits until none is left, or detaches those that are.
fn drain(args: &DrainArgs) -> Result<(Printed, ExitCode), server::ControlError> {
    let end = args.timeout.map(|seconds| Instant::now() + Duration::from_secs(seconds.into()));
    let mut left = client::drain(true).and_then(|view| drained(view, end))?;
    let mut status = ExitCode::SUCCESS;
    if args.detach {
        for run in std::mem::take(&mut left.runs) {
            let detach =
                |progress: &mut dyn FnMut(u64)| client::detach_process(Some(run), progress);
            if let Err(error) = with_progress(&run.to_string(), detach) {
                if is_over_soon(run) {
                    continue;
                }
                terminal::complain(&format!("swaptide ctl: run {run}: {error}"));
                status = ExitCode::FAILURE;
            }
        }
        left = client::ready()?;
    } else if !left.runs.is_empty() || left.processes > 0 {
        terminal::complain(&format!(
            "swaptide ctl: {} runs and {} processes are left: {}",
            left.runs.len(),
            left.processes,
            comma_list(&left.runs)
        ));
        status = ExitCode::FAILURE;
    }
    Ok((Printed::new(String::new(), &left), status))
}

/// True if a run is no more, or is not within a moment: the daemon knows of one for a little longer
/// than it lasts.
fn is_over_soon(run: u32) -> bool {
    let end = Instant::now() + RUN_END_TIMEOUT;
    while client::ready().is_ok_and(|view| view.runs.contains(&run)) {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(DRAIN_INTERVAL);
    }
    true
}

/// What is left when nothing is, or the time is over.
fn drained(
    mut view: server::DaemonView,
    end: Option<Instant>,
) -> Result<server::DaemonView, server::ControlError> {
    while (!view.runs.is_empty() || view.processes > 0)
        && end.is_none_or(|end| Instant::now() < end)
    {
        std::thread::sleep(DRAIN_INTERVAL);
        view = client::ready()?;
        if !view.draining {
            let why = "another daemon answers, or the drain was cancelled: runs are taken";
            return Err(server::ControlError::Refused(why.into()));
        }
    }
    Ok(view)
}

/// A line for each run.
fn list() -> Asked {
    // One that ends just now is no run any more.
    let views: Vec<View> = client::runs()?
        .into_iter()
        .chain(client::daemon_runs())
        .filter_map(|run| client::stats(Some(run)).ok())
        .collect();
    let text = views.iter().map(|view| format!("{:>8}  {}\n", view.pid, line(view))).collect();
    Ok(Printed::new(text, &views))
}

fn line(view: &View) -> String {
    format!(
        "{}: {} of {} resident (peak {}), {} processes, {:.0} s",
        view.program,
        human(view.resident_bytes),
        human(view.budget_bytes),
        human(view.peak_resident_bytes),
        view.processes.len(),
        view.wall_s
    )
}

/// For people, and for `grep` and `awk`: the counters as in /proc/vmstat.
fn table(view: &View) -> String {
    let mut text = line(view) + "\n\n";
    let head = format!(
        "{:>8} {:<10} {:>9} {:>9} {:>10} {:>9} {:>9}",
        "pid", "state", "limit", "resident", "compressed", "in pool", "in file"
    );
    text += &(styled(HEAD, &head) + "\n");
    for process in &view.processes {
        let limit =
            if process.limit_bytes == 0 { "-".to_owned() } else { human(process.limit_bytes) };
        text += &format!(
            "{:>8} {:<10} {:>9} {:>9} {:>10} {:>9} {:>9}\n",
            process.pid,
            process.state,
            limit,
            human(process.resident_bytes),
            human(process.pool_bytes),
            human(process.swapped_pool_bytes),
            human(process.swapped_file_bytes)
        );
    }
    text.push('\n');
    for (name, value) in &view.stats {
        text += &format!("{name} {value}\n");
    }
    let times = &view.fault_us;
    text += &format!("fault_us p50 {} p99 {} max {}\n", times.p50, times.p99, times.max);
    text
}
