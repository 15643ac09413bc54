//! The command line of swaptide.
//!
//! Owns the grammar of the commands and their exit statuses: 2 and one line on standard error for
//! everything that is wrong before anything was started. A subcommand is a variant of [`Command`],
//! a line in [`Cli::execute`], and a module.

mod ctl;
mod manual;
mod terminal;
mod top;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use swaptide_host::control::agent_api::Users;
use swaptide_host::daemon::server::{self, DaemonConfig};
use swaptide_host::memctl::stall::{OnStall, StallPolicy};
use swaptide_host::oci;
use swaptide_host::oci::runtime::OciPermissions;
use swaptide_host::run::doctor::{self, Diagnosis};
use swaptide_host::run::supervise::{self, DaemonUse, Inject, RunConfig, RunReach, RunSubject};

use crate::terminal::{BAD, Color, GOOD, styled};

/// Exit status of bad input, and of whatever keeps a command from starting.
const BAD_INPUT: u8 = 2;

/// Run unmodified programs in less RAM than they need: Linux swap in user space.
#[derive(Parser)]
#[command(name = "swaptide", version, max_term_width = 100)]
struct Cli {
    /// Colors in what is printed for people; NO_COLOR in the environment turns them off for auto
    #[arg(long, value_name = "WHEN", value_enum, default_value_t, global = true)]
    color: Color,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program within a memory budget; what does not fit is swapped out
    Run(RunArgs),
    /// Put a running process and what it starts under a memory budget; Ctrl-C lets them go
    Attach(AttachArgs),
    /// Manage all runs of a host: one budget, one set of swap areas, groups
    Daemon(DaemonArgs),
    /// Check kernel and system requirements, with the fix for anything missing
    Doctor(DoctorArgs),
    /// Inspect and control a run or the daemon
    Ctl(ctl::CtlArgs),
    /// Show live statistics of a run or the daemon
    Top(top::TopArgs),
    /// Draw the reports of runs as an HTML page or an SVG picture
    Report(swaptide_report::ReportArgs),
    /// Benchmark swaptide against the kernel's swap
    Bench(swaptide_bench::BenchArgs),
    /// Compare the swap layer with earlier kernel designs and published results
    Lab(swaptide_lab::LabArgs),
    /// Print the version
    Version(VersionArgs),
    /// Print completions for a shell
    Completions(manual::CompletionsArgs),
    /// Write the manual, one page for each command
    Man(manual::ManArgs),
    /// Run containers with the annotation swaptide.ram=SIZE within that budget: an OCI runtime in
    /// front of another one
    OciRuntime(OciRuntimeArgs),
    /// The same as a hook (precreate) of podman: reads a config.json, and prints what to start
    OciHook(OciHookArgs),
    /// Workload of `bench`
    #[command(hide = true)]
    BenchWork(swaptide_bench::BenchWorkArgs),
    /// Workload of `lab zswapin`
    #[command(hide = true)]
    LabWork(swaptide_lab::LabWorkArgs),
    /// Workloads of `lab tiers`
    #[command(hide = true)]
    LabJob(swaptide_lab::JobArgs),
}

#[derive(Args)]
struct ReachArgs {
    /// Which programs that load no library (static, Go's, musl's) are managed: those that have some
    /// memory, all from their start, or none. A fork of theirs brings all of the process into
    /// memory [default: large; without a value: always]
    #[arg(
        long,
        value_name = "large|always|never",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "always"
    )]
    inject: Option<Inject>,
    /// Also swap large anonymous shared mappings, and charge them to the budget [default: neither]
    #[arg(long)]
    shared: bool,
}

#[derive(Args)]
struct RunArgs {
    /// Memory for the program and its children: 512M, 1.5G, or 50% of the machine's or container's
    /// memory [default: 80%]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    ram: Option<String>,
    // Not a doc comment: rustdoc would take the brackets for links.
    #[arg(
        long,
        value_name = "DEV",
        allow_hyphen_values = true,
        help = "A swap area; repeat for more, each with ,prio=N [default: compressed memory, \
            then an unlinked file in $TMPDIR or /var/tmp]:\n\
            zram:SIZE[,codec=lz4+zstd|lz4|zstd|snappy][,level=1..9]\
            [,max_pool_percent=N][,accept_threshold_percent=N]\n\
            file:DIRECTORY[:SIZE] or file:NEWFILE[:SIZE]\n\
            /dev/BLOCK, formatted by mkswap\n\
            nbd://HOST[:PORT]/EXPORT, nbd+unix:///EXPORT?socket=PATH, nbds://... (TLS)\n\
            Files and block devices: ,rotational=yes|no [default: as the kernel reports]. Exports: \
            ,mirror=DIRECTORY or TIER, a copy on a local disk. All of these: ,cipher=none"
    )]
    swap: Vec<String>,
    /// Write a JSON report to this file when the run ends; swaptide report draws it
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Print no summary and no advice
    #[arg(long)]
    quiet: bool,
    /// Kill the run (status 137) when its memory stays more than 5% and 4M above the budget for 5
    /// seconds, or is more than 5% above it when swap space is full
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    stall: StallArgs,
    /// Which processes get a userfaultfd that also serves faults in system calls: those of all
    /// users in the run, or of this user only; the others are then not managed [default: all]
    #[arg(long, value_name = "all|same-user")]
    userfaultfd: Option<Users>,
    #[command(flatten)]
    reach: ReachArgs,
    /// Read at most 2^N pages at a time from a swap file and the compressed memory in front of it;
    /// 0 disables readahead [default: adaptive, up to 2M]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=9))]
    page_cluster: Option<u8>,
    /// Names for priority ranges of --swap, by which groups exclude devices: '+SSD:100 +HDD:50
    /// +NET:-1'
    #[arg(long, value_name = "SPEC", allow_hyphen_values = true)]
    tiers: Option<String>,
    /// Group of the program and its children, regardless of their cgroup: /NAME or /NAME/NAME
    #[arg(long, value_name = "PATH")]
    group: Option<String>,
    #[command(flatten)]
    daemon: JoinArgs,
    /// Read memory, devices, tiers and groups from a TOML file; options given here override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Largest order of a swap-in (the baseline of `lab zswapin` has 0)
    #[arg(
        long,
        value_name = "ORDER",
        hide = true,
        value_parser = clap::value_parser!(u8).range(0..=9),
    )]
    largest_order: Option<u8>,
    /// Program and arguments
    #[arg(value_name = "CMD", trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

#[derive(Args)]
struct AttachArgs {
    /// Memory for the process and its descendants: 512M, 1.5G, or 50% of the machine's or
    /// container's memory [default: 80%]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    ram: Option<String>,
    /// A swap area, as for swaptide run; repeat for more, each with ,prio=N [default: compressed
    /// memory, then an unlinked file in $TMPDIR or /var/tmp]
    #[arg(long, value_name = "DEV", allow_hyphen_values = true)]
    swap: Vec<String>,
    /// Write a JSON report to this file at the end
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Print no summary
    #[arg(long)]
    quiet: bool,
    /// End when the process is under the budget; swaptide ctl detach lets it go. A process can have
    /// itself attached to so
    #[arg(long)]
    background: bool,
    #[command(flatten)]
    stall: StallArgs,
    /// Names for priority ranges of --swap, as for swaptide run
    #[arg(long, value_name = "SPEC", allow_hyphen_values = true)]
    tiers: Option<String>,
    /// Read memory, devices, tiers and groups from a TOML file; options given here override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The process
    #[arg(value_name = "PID")]
    pid: u32,
}

/// Whether a daemon is joined.
#[derive(Args)]
struct JoinArgs {
    /// Do not join a running daemon (see swaptide daemon)
    #[arg(long)]
    no_daemon: bool,
    /// Fail where no daemon answers: a container with swaptide.group
    #[arg(long, hide = true, conflicts_with = "no_daemon")]
    need_daemon: bool,
}

impl JoinArgs {
    fn joins(&self) -> DaemonUse {
        match (self.no_daemon, self.need_daemon) {
            (true, _) => DaemonUse::Never,
            (false, true) => DaemonUse::Always,
            (false, false) => DaemonUse::IfThere,
        }
    }
}

/// What is done about a process that makes almost no progress.
#[derive(Args)]
struct StallArgs {
    /// What to do when a process spends nearly all of its time waiting for memory: only say so,
    /// stop the run, or kill it (status 124) [default: continue]
    #[arg(long, value_name = "continue|stop|kill")]
    on_stall: Option<OnStall>,
    /// How much of 10 seconds, in percent, it has to wait for that [default: 90]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(10..=99))]
    max_stall: Option<u8>,
}

impl StallArgs {
    fn policy(&self) -> StallPolicy {
        let usual = StallPolicy::default();
        StallPolicy {
            then: self.on_stall.unwrap_or(usual.then),
            percent: self.max_stall.unwrap_or(usual.percent),
        }
    }
}

#[derive(Args)]
struct DaemonArgs {
    /// TOML file with memory, devices, tiers and groups; reloaded on SIGHUP and by ctl reload
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Directory for state that outlives the daemon; preferably tmpfs [default: daemon, next to the
    /// socket]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

#[derive(Args)]
struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct VersionArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct OciHookArgs {
    /// Permit swaptide.group: the container can then do what root can with swaptide ctl
    #[arg(long)]
    groups: bool,
}

#[derive(Args)]
struct OciRuntimeArgs {
    /// The runtime that does all else
    #[arg(long, value_name = "PROGRAM", default_value = "runc")]
    runtime: OsString,
    /// Take the container's variables SWAPTIDE_RAM and _SWAP for annotations, for engines that pass
    /// none on; an image may set them, too
    #[arg(long)]
    environment: bool,
    /// Permit swaptide.group: the container can then do what root can with swaptide ctl
    #[arg(long)]
    groups: bool,
    /// What the engine calls the runtime with
    #[arg(value_name = "ARG", trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

impl Cli {
    fn execute(self) -> ExitCode {
        terminal::choose(self.color);
        match self.command {
            Command::Run(args) => run(args),
            Command::Attach(args) => attach(args),
            Command::Daemon(DaemonArgs { config, state }) => {
                match server::run(&DaemonConfig { config, state }) {
                    Ok(status) => ExitCode::from(status),
                    Err(error) => refuse("daemon", &error.to_string()),
                }
            }
            Command::Doctor(args) => examine(&args),
            Command::Ctl(args) => ctl::main(&args),
            Command::Top(args) => top::main(&args),
            Command::Report(args) => match swaptide_report::main(&args) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => refuse("report", &error.to_string()),
            },
            Command::Bench(args) => ExitCode::from(swaptide_bench::main(&args)),
            Command::Lab(args) => ExitCode::from(swaptide_lab::main(&args)),
            Command::Version(args) => {
                version(&args);
                ExitCode::SUCCESS
            }
            Command::Completions(args) => manual::completions(&args, &Cli::command()),
            Command::Man(args) => manual::pages(&args, &Cli::command()),
            Command::OciRuntime(OciRuntimeArgs { runtime, environment, groups, words }) => {
                let permissions = OciPermissions { environment, groups };
                let error = oci::runtime::run(&runtime, &words, permissions);
                refuse("oci-runtime", &error.to_string())
            }
            Command::OciHook(OciHookArgs { groups }) => {
                let permissions = OciPermissions { environment: false, groups };
                match oci::runtime::hook(std::io::stdin(), std::io::stdout(), permissions) {
                    Ok(()) => ExitCode::SUCCESS,
                    Err(error) => refuse("oci-hook", &error.to_string()),
                }
            }
            Command::BenchWork(args) => ExitCode::from(swaptide_bench::work(&args)),
            Command::LabWork(args) => ExitCode::from(swaptide_lab::work(&args)),
            Command::LabJob(args) => ExitCode::from(swaptide_lab::job(&args)),
        }
    }
}

fn main() -> ExitCode {
    match Cli::try_parse() {
        Ok(cli) => cli.execute(),
        Err(error) => refuse_usage(&error),
    }
}

fn run(args: RunArgs) -> ExitCode {
    let RunArgs {
        ram,
        swap,
        report,
        quiet,
        strict,
        stall,
        userfaultfd,
        reach,
        page_cluster,
        tiers,
        group,
        daemon,
        config,
        largest_order,
        command,
    } = args;
    match supervise::run(&RunConfig {
        ram,
        swap,
        report,
        quiet,
        strict,
        stall: stall.policy(),
        userfaultfd,
        reach: RunReach { inject: reach.inject.unwrap_or_default(), shared: reach.shared },
        page_cluster,
        largest_order,
        group,
        tiers,
        config,
        daemon: daemon.joins(),
        subject: RunSubject::Command(command),
    }) {
        Ok(status) => ExitCode::from(status),
        Err(error) => refuse("run", &error.to_string()),
    }
}

fn attach(args: AttachArgs) -> ExitCode {
    let AttachArgs { ram, swap, report, quiet, background, stall, tiers, config, pid } = args;
    match supervise::run(&RunConfig {
        ram,
        swap,
        report,
        quiet,
        stall: stall.policy(),
        tiers,
        config,
        subject: RunSubject::Process { pid, background },
        ..RunConfig::default()
    }) {
        Ok(status) => ExitCode::from(status),
        Err(error) => refuse("attach", &error.to_string()),
    }
}

fn examine(args: &DoctorArgs) -> ExitCode {
    let diagnosis = doctor::examine();
    let text = if args.json { terminal::json(&diagnosis) } else { shown(&diagnosis) };
    terminal::print(&text);
    if diagnosis.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn version(args: &VersionArgs) {
    let number = env!("CARGO_PKG_VERSION");
    terminal::print(&if args.json {
        terminal::json(&serde_json::json!({ "name": "swaptide", "version": number }))
    } else {
        format!("swaptide {number}\n")
    });
}

/// What was found, each check's first word in its color.
fn shown(diagnosis: &Diagnosis) -> String {
    let line = |line: &str| match line.split_at_checked(2) {
        Some(("ok", rest)) => styled(GOOD, "ok") + rest,
        Some(("NO", rest)) => styled(BAD, "NO") + rest,
        _ => line.to_owned(),
    };
    diagnosis.to_string().split_inclusive('\n').map(line).collect()
}

/// One line on standard error, and the status of bad input.
fn refuse(command: &str, message: &str) -> ExitCode {
    let prefix = styled(BAD, &format!("swaptide {command}:"));
    terminal::complain(&format!("{prefix} {}", message.replace('\n', " ")));
    ExitCode::from(BAD_INPUT)
}

/// The words behind the command's name, as far as they are text.
fn words_given() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}

/// Prints help and version as clap formats them, errors as one line.
fn refuse_usage(error: &clap::Error) -> ExitCode {
    terminal::choose(terminal::asked(words_given()));
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            terminal::print(&error.render().ansi().to_string());
            return ExitCode::SUCCESS;
        }
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let names: Vec<String> = Cli::command()
                .get_subcommands()
                .filter(|command| !command.is_hide_set())
                .map(|command| command.get_name().to_owned())
                .collect();
            let names = names.join(", ");
            let prefix = styled(BAD, "swaptide:");
            terminal::complain(&format!("{prefix} no command given; one of {names}, or --help"));
            return ExitCode::from(BAD_INPUT);
        }
        _ => {}
    }
    let message = one_line(&error.render().to_string());
    match words_given().next().filter(|first| Cli::command().find_subcommand(first).is_some()) {
        Some(command) => refuse(&command, &message),
        None => {
            terminal::complain(&format!("{} {message}", styled(BAD, "swaptide:")));
            ExitCode::from(BAD_INPUT)
        }
    }
}

/// The error without the tips and the usage that clap appends.
fn one_line(text: &str) -> String {
    let body = text.strip_prefix("error: ").unwrap_or(text);
    let paragraph = body.split("\n\n").next().unwrap_or(body);
    paragraph.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split(' '))
    }

    #[test]
    fn clap_accepts_the_grammar() {
        Cli::command().debug_assert();
    }

    #[test]
    fn arguments_after_the_program_are_its_own() {
        for line in
            ["swaptide run --ram 1G -- prog --ram 2G -x", "swaptide run --ram 1G prog --ram 2G -x"]
        {
            let Ok(Cli { command: Command::Run(args), .. }) = parse(line) else { panic!("{line}") };
            assert_eq!(args.ram.as_deref(), Some("1G"));
            assert_eq!(args.command, ["prog", "--ram", "2G", "-x"]);
        }
    }

    #[test]
    fn errors_fit_one_line_and_name_the_flag() {
        for (line, part) in [
            ("swaptide run --frobnicate -- true", "--frobnicate"),
            ("swaptide run --ram", "--ram"),
            ("swaptide run", "<CMD>"),
            ("swaptide run --ram 1G --ram 2G true", "--ram"),
            ("swaptide run --page-cluster 10 -- true", "--page-cluster"),
            ("swaptide fly", "fly"),
        ] {
            let Err(error) = parse(line) else { panic!("{line}") };
            let message = one_line(&error.render().to_string());
            assert!(message.contains(part) && !message.contains('\n'), "{line}: {message}");
        }
    }
}
