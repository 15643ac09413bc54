//! `swaptide ctl`: questions to a run that is under way.
//!
//! Owns what is printed. Where a run is found and how it is asked is [`swaptide_host::control`]'s.

use std::io::Write;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use swaptide_host::areas::AreaView;
use swaptide_host::control;
use swaptide_host::report::View;
use swaptide_host::size::human;

use crate::refuse;

/// The arguments.
#[derive(Args)]
pub struct CtlArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// What a run has, uses and did so far, the counters under the kernel's names
    Stats(StatsArgs),
    /// Your runs
    List,
    /// A run's swap areas, in the order in which they are used
    Devices(StatsArgs),
    /// Give a run that is under way another swap area
    Swapon(SwaponArgs),
    /// Take a swap area away from a run, after what lies there has been moved to others
    Swapoff(SwapoffArgs),
}

#[derive(Args)]
struct SwaponArgs {
    /// The device, as swaptide run --swap takes it: file:PATH[:SIZE] or /dev/BLOCK, with ,prio=N
    #[arg(value_name = "DEV")]
    device: String,
    /// The run, by the process you started or any in it [default: the only one]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

#[derive(Args)]
struct SwapoffArgs {
    /// Its name or number, as swaptide ctl devices shows it
    #[arg(value_name = "NAME")]
    name: String,
    /// The run, by the process you started or any in it [default: the only one]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

#[derive(Args)]
struct StatsArgs {
    /// The run, by the process you started or any in it [default: the only one]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Asks and prints.
pub fn main(args: &CtlArgs) -> ExitCode {
    let text = match &args.what {
        What::List => list(),
        What::Stats(args) => control::stats(args.pid).map(|view| if args.json { json(&view) } else { table(&view) }),
        What::Devices(args) => control::devices(args.pid).map(|devices| {
            if args.json { json(&devices.iter().map(|(_, view)| view).collect::<Vec<_>>()) } else { areas(&devices) }
        }),
        What::Swapon(args) => control::add_device(args.pid, &args.device).map(|()| String::new()),
        What::Swapoff(args) => swapoff(args).map(|()| String::new()),
    };
    match text {
        Ok(text) => {
            // A reader that went away has seen enough.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => refuse("ctl", &error.to_string()),
    }
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(value).map_or_else(|error| error.to_string(), |text| text + "\n")
}

/// Progress goes to a terminal only.
fn swapoff(args: &SwapoffArgs) -> Result<(), control::ControlError> {
    let mut terminal = Some(std::io::stderr()).filter(std::io::IsTerminal::is_terminal);
    let result = control::remove_device(args.pid, &args.name, |left| {
        if let Some(terminal) = &mut terminal {
            let _ = write!(terminal, "\r{} left  ", human(left));
        }
    });
    if let Some(terminal) = &mut terminal {
        let _ = write!(terminal, "\r{:20}\r", "");
    }
    result
}

/// As /proc/swaps, with the number of each.
fn areas(devices: &[(u8, AreaView)]) -> String {
    let mut text =
        format!("{:<40} {:<6} {:>10} {:>10} {:>8} {:<8} {:>3}\n", "Filename", "Type", "Size", "Used", "Priority", "State", "Nr");
    for (number, view) in devices {
        text += &format!(
            "{:<40} {:<6} {:>10} {:>10} {:>8} {:<8} {:>3}\n",
            view.name,
            view.kind,
            view.size_bytes / 1024,
            view.used_bytes / 1024,
            view.priority,
            view.state,
            number
        );
    }
    text
}

/// A line for each run.
fn list() -> Result<String, control::ControlError> {
    let mut text = String::new();
    for run in control::runs()? {
        // One that ends just now is no run any more.
        if let Ok(view) = control::stats(Some(run)) {
            text += &format!("{:>8}  {}\n", view.pid, line(&view));
        }
    }
    Ok(text)
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
    text += &format!(
        "{:>8} {:<10} {:>9} {:>9} {:>10} {:>9} {:>9}\n",
        "pid", "state", "limit", "resident", "compressed", "in pool", "in file"
    );
    for process in &view.processes {
        let limit = if process.limit_bytes == 0 { "-".to_owned() } else { human(process.limit_bytes) };
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
