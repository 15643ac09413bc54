//! A run from its first check to its exit status.
//!
//! Owns the order of things and the two processes of a run:
//! - the *launcher* is what the user started. It waits, passes signals on, stops and continues
//!   with the program, prints the summary, and exits with the program's status;
//! - the *supervisor* is its child and the program's parent. It is the subreaper of the tree,
//!   serves the socket, runs the controller's thread and writes the report. When the program ends
//!   and others of its tree live on, the launcher ends and the supervisor stays for them.
//!
//! All checks come before the fork: bad input never starts anything.
//!
//! Signals. Neither process has a handler; both block everything and read descriptors. What the
//! terminal sends goes to the whole process group, so the program has it already, and what is
//! sent to the group by `kill` arrives at the supervisor as well, which tells it from a signal for
//! the launcher alone; only the latter is passed on.
//!
//! Invariants
//! 1. The program inherits the standard streams, other descriptors, mask, dispositions, timers and
//!    environment exactly as the launcher was started with; neither of the two keeps the streams
//!    open but the launcher its standard error.
//! 2. A killed supervisor kills no process: the processes hold their own descriptors of the segment
//!    and the file, and keep their limits.
//!
//! Locks: none.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use swaptide_core::Tiers;
use swaptide_ipc::{GroupIndex, MIN_BUDGET_BYTES, Segment};
use swaptide_shared::MAX_REGION_BYTES;
use swaptide_store::codec::Scheme;
use swaptide_sys::mem::{SharedMap, memfd_create};
use swaptide_sys::process::set_child_subreaper;

use crate::cgroup::tree::{GroupError, GroupPath, GroupTree};
use crate::config::Config;
use crate::container_labels::ContainerLabels;
use crate::control::Users;
use crate::control::daemon_client::{self as client, RemoteAreas};
use crate::control::server::{Join, Joined};
use crate::inject::AgentFile;
use crate::memctl::stall::StallPolicy;
use crate::report::sink::Sink;
use crate::report::totals::{ReportFile, ReportSubject, program_name};
use crate::run::agent::find_agent;
use crate::run::channel::Channel;
use crate::run::descriptors::{
    inherited_descriptors, leave_directory, may_write_files_of, release_streams,
};
use crate::run::doctor::{self, Forks};
use crate::run::inheritance::Inheritance;
pub use crate::run::inject_option::Inject;
use crate::run::launcher::Launcher;
use crate::run::segment::{is_in_namespace_of, set_up_header, wanted_failure};
use crate::run::supervisor::{Prepared, RunMode, RunPlace, Subject, Supervisor};
use crate::run::{attach, background, target};
use crate::signals;
use crate::swap::areas::Areas;
use crate::swap::mirror;
use crate::swap::spec::{self, PoolAcceptance, RunSwapSpace};
use crate::units::{parse_share, ram_total};

pub use super::error::RunError;

/// Not empty: no daemon is joined. For measurements, which want to be alone.
const ENV_NO_DAEMON: &str = "SWAPTIDE_NO_DAEMON";

/// The budget where none is given: a margin stays for what is not the program's.
const DEFAULT_RAM: &str = "80%";

/// What is managed beyond the private memory of programs that load the agent.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunReach {
    /// `--inject`: programs that load no library.
    pub inject: Inject,
    /// `--shared`: large anonymous shared mappings.
    pub shared: bool,
}

/// A run as it was asked for.
#[derive(Clone, Debug, Default)]
pub struct RunConfig {
    /// `--ram`.
    pub ram: Option<String>,
    /// Each `--swap`.
    pub swap: Vec<String>,
    /// `--report`.
    pub report: Option<PathBuf>,
    /// `--quiet`.
    pub quiet: bool,
    /// `--strict`.
    pub strict: bool,
    /// `--on-stall` and `--max-stall`.
    pub stall: StallPolicy,
    /// `--userfaultfd`.
    pub userfaultfd: Option<Users>,
    /// `--inject` and `--shared`.
    pub reach: RunReach,
    /// `--page-cluster`: how far the swap file is read ahead, as a power of two of pages.
    pub page_cluster: Option<u8>,
    /// Largest order of a swap-in, for comparisons.
    pub largest_order: Option<u8>,
    /// `--group`: where its processes are, whatever their cgroup.
    pub group: Option<String>,
    /// `--tiers`: a text that makes tiers.
    pub tiers: Option<String>,
    /// `--config`.
    pub config: Option<PathBuf>,
    /// Whether a daemon is joined.
    pub daemon: DaemonUse,
    /// Whose memory is limited.
    pub subject: RunSubject,
}

/// Whether a run joins the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DaemonUse {
    /// If one answers.
    #[default]
    IfThere,
    /// `--no-daemon`: not even then.
    Never,
    /// A run that is to be kept by it fails without one.
    Always,
}

/// Of a run that is to be kept by a daemon.
const NEEDED: &str = "none answers, and this run is to be kept by one; start swaptide daemon";

impl DaemonUse {
    /// True for a run that asks no daemon.
    fn is_alone(self, subject: &Subject) -> bool {
        match self {
            DaemonUse::Never => true,
            DaemonUse::Always => false,
            DaemonUse::IfThere => {
                matches!(subject, Subject::Process(_))
                    || std::env::var_os(ENV_NO_DAEMON).is_some_and(|set| !set.is_empty())
            }
        }
    }
}

/// Whose memory a run limits.
#[derive(Clone, Debug)]
pub enum RunSubject {
    /// A program that is started, with its arguments.
    Command(Vec<OsString>),
    /// A running process, and what it has started and starts. No daemon is joined.
    Process {
        /// Its number.
        pid: u32,
        /// `--background`: the command ends when the process is under the budget.
        background: bool,
    },
}

impl Default for RunSubject {
    fn default() -> RunSubject {
        RunSubject::Command(Vec::new())
    }
}

/// Runs a program under a budget; answers with the exit status.
///
/// # Errors
/// See [`RunError`]; nothing was started then.
pub fn run(config: &RunConfig) -> Result<u8, RunError> {
    match config.subject {
        RunSubject::Process { background: true, .. } => {
            background::begin(|waiting| supervise(config, waiting))
        }
        _ => supervise(config, &mut None),
    }
}

/// The same, where a command may be waiting for it to begin.
fn supervise(config: &RunConfig, waiting: &mut Option<Channel>) -> Result<u8, RunError> {
    let prepared = prepare(config)?;
    let system = |what| move |error: io::Error| RunError::System(what, error);
    let (launcher_end, supervisor_end) = UnixStream::pair().map_err(system("socketpair"))?;
    // Before signals are blocked: what a timer sends until then, this process takes as any does.
    let inheritance = Inheritance::take();
    let (signals, inherited) = signals::take().map_err(system("signals"))?;
    let subreaper =
        |error: swaptide_sys::Errno| RunError::System("PR_SET_CHILD_SUBREAPER", error.into());
    // If the supervisor is killed, the program comes to the launcher, which then waits for it
    // itself.
    set_child_subreaper(true).map_err(subreaper)?;
    let launcher = std::process::id();
    // SAFETY: this process has one thread, so the child's copy of all locks and of the heap is
    // consistent.
    match unsafe { libc::fork() } {
        -1 => Err(RunError::System("fork", io::Error::last_os_error())),
        0 => {
            drop(launcher_end);
            drop(waiting.take());
            Supervisor::run(
                prepared,
                Channel::new(supervisor_end),
                signals,
                inherited,
                inheritance,
                launcher,
            )
        }
        supervisor => {
            drop(supervisor_end);
            release_streams(&prepared.inherited_fds, &[0, 1]);
            // A daemon that is started again finds its segment by the processes that have it open;
            // this process has it should the supervisor be killed.
            let kept = matches!(prepared.place.mode, RunMode::Daemon { .. })
                .then(|| prepared.place.segment_fd.try_clone());
            std::mem::forget(kept);
            drop(prepared);
            leave_directory();
            Launcher {
                supervisor: supervisor as u32,
                channel: Channel::new(launcher_end),
                signals,
                program: None,
                is_attached: matches!(config.subject, RunSubject::Process { .. }),
                waiting,
            }
            .run()
        }
    }
}

fn prepare(config: &RunConfig) -> Result<Prepared, RunError> {
    let started = Instant::now();
    let inherited_fds = inherited_descriptors();
    let file = match &config.config {
        Some(path) => Config::load(path, ram_total()).map_err(RunError::Config)?,
        None => Config::default(),
    };
    let ram = config.ram.as_deref().or(file.ram.as_deref());
    let budget = parse_share(ram.unwrap_or(DEFAULT_RAM), ram_total()).map_err(RunError::Ram)?;
    if budget < MIN_BUDGET_BYTES {
        return Err(RunError::SmallBudget(budget));
    }
    let swap = if config.swap.is_empty() { &file.swap } else { &config.swap };
    let mut devices: Vec<_> = swap
        .iter()
        .map(|text| spec::parse(text))
        .collect::<Result<_, _>>()
        .map_err(RunError::Swap)?;
    for device in &mut devices {
        device.leave_directory().map_err(|e| RunError::System("the current directory", e))?;
    }
    let agent = find_agent()?;
    let subject = subject(&config.subject, &agent)?;
    let report = match &config.report {
        Some(path) => Some((
            path.clone(),
            Sink::open(path).map_err(|error| RunError::Report(path.clone(), error))?,
        )),
        None => None,
    };
    let forks = doctor::forks().map_err(RunError::Userfaultfd)?;
    let (program, command, injects, is_needed) = match &subject {
        Subject::Program { target, arguments, .. } => {
            let injects = config.reach.inject != Inject::Never;
            if !injects {
                target.check_loads().map_err(RunError::Target)?;
            }
            let command = [&target.name].into_iter().chain(arguments);
            let command = command.map(|word| word.to_string_lossy().into_owned()).collect();
            (program_name(&target.name), command, injects, target.kind.is_injected())
        }
        Subject::Process(target) => (target.name(), target.command(), true, true),
    };
    let named = ReportSubject::new(program, command);
    if config.reach.shared && !may_write_files_of(MAX_REGION_BYTES) {
        return Err(RunError::SharedFileSize);
    }
    let joined = if config.daemon.is_alone(&subject) {
        None
    } else {
        look_for_daemon(config, ram.map(|_| budget), &named.program)?
    };
    let mut users = config.userfaultfd.or(file.userfaultfd).unwrap_or_default();
    let mut follows_forks = forks == Forks::Followed;
    let place = match joined {
        Some((joined, segment_fd, join)) => {
            if joined.userfaultfd == Users::SameUser {
                users = Users::SameUser;
            }
            if forks == Forks::Followed && !joined.follows_forks {
                return Err(RunError::Daemon(
                    "its programs have the kernel report forks, for which this run lacks \
                    CAP_SYS_PTRACE (follow_forks = true in the daemon's file does without)"
                        .into(),
                ));
            }
            // As its engines do, which go by the daemon's segment.
            follows_forks = joined.follows_forks;
            place_under_daemon(&joined, segment_fd, join, named)?
        }
        None if config.daemon == DaemonUse::Always => return Err(RunError::Daemon(NEEDED.into())),
        None => place_of_its_own(config, &file, budget, &mut devices, named)?,
    };
    if follows_forks && config.reach.shared {
        return Err(RunError::SharedNeedsEvents);
    }
    let agent = injects.then(|| AgentFile::new(agent, is_needed));
    let agent = agent.transpose().map_err(RunError::Agent)?;
    Ok(Prepared {
        subject,
        agent,
        inject: config.reach.inject,
        place,
        report,
        quiet: config.quiet,
        strict: config.strict,
        stall: config.stall,
        users,
        shared: config.reach.shared,
        fail: wanted_failure(),
        follows_forks,
        started,
        inherited_fds,
    })
}

/// Looks at whose memory is to be limited, and changes nothing.
fn subject(wanted: &RunSubject, agent: &Path) -> Result<Subject, RunError> {
    let command = match wanted {
        RunSubject::Command(command) => command,
        RunSubject::Process { pid, .. } => {
            return attach::look(*pid).map(Subject::Process).map_err(RunError::Attach);
        }
    };
    let (name, arguments) = command.split_first().ok_or(RunError::NoCommand)?;
    let target =
        target::find(name, std::env::var_os("PATH").as_deref()).map_err(RunError::Target)?;
    let preload = preload(agent)?;
    Ok(Subject::Program { target, arguments: arguments.to_vec(), preload })
}

/// The daemon's segment and areas.
fn place_under_daemon(
    joined: &Joined,
    segment_fd: OwnedFd,
    join: Join,
    subject: ReportSubject,
) -> Result<RunPlace, RunError> {
    let system = |error| RunError::System("the daemon's segment", error);
    let map =
        SharedMap::map(segment_fd.as_fd(), Segment::BYTES).map_err(|errno| system(errno.into()))?;
    let segment = Segment::open(map).map_err(|error| system(io::Error::other(error)))?;
    if !is_in_namespace_of(segment) {
        return Err(RunError::Daemon(
            "it is in another pid namespace, where numbers of processes mean other ones (a \
            container can have the host's: --pid=host)"
                .into(),
        ));
    }
    let frame = ReportFile {
        budget: joined.budget,
        pool_cap: joined.pool_cap,
        codec: Scheme::from_number(joined.codec),
        acceptance: PoolAcceptance::of(segment),
        subject,
    };
    let mode = RunMode::Daemon { join, areas: Arc::new(RemoteAreas::new(segment)) };
    Ok(RunPlace { segment, segment_fd, mode, frame })
}

/// A segment, areas and groups of the run's own.
fn place_of_its_own(
    config: &RunConfig,
    file: &Config,
    budget: u64,
    devices: &mut [spec::Device],
    subject: ReportSubject,
) -> Result<RunPlace, RunError> {
    mirror::resolve_all(devices, &tiers_of(config, file)).map_err(RunError::Swap)?;
    let space = spec::open(devices, budget).map_err(RunError::Swap)?;
    let (segment, segment_fd) = set_up_segment(config, budget, &space)
        .map_err(|error| RunError::System("shared segment", error))?;
    let areas = Arc::new(Areas::new(segment));
    let RunSwapSpace { pool_cap, codec, acceptance, .. } = space;
    let frame = ReportFile { budget, pool_cap, codec, acceptance, subject };
    for backing in space.devices {
        areas.add(backing).map_err(RunError::Area)?;
    }
    let mut groups = Box::new(GroupTree::new(segment, budget));
    let group = set_up_groups(config, file, &mut groups)?;
    let mode = RunMode::Alone { areas, groups, group };
    Ok(RunPlace { segment, segment_fd, mode, frame })
}

/// Asks a daemon, if there is one, for what it would give this run.
fn look_for_daemon(
    config: &RunConfig,
    max: Option<u64>,
    program: &str,
) -> Result<Option<(Joined, OwnedFd, Join)>, RunError> {
    let join = Join {
        launcher: std::process::id(),
        program: program.to_owned(),
        group: config.group.clone(),
        max,
        strict: config.strict,
        stall: config.stall,
        container: ContainerLabels::of_this_process(),
        recorded: config.report.is_some(),
    };
    let Some((joined, segment)) = client::look(&join).map_err(RunError::Daemon)? else {
        return Ok(None);
    };
    let own = [
        ("--swap", !config.swap.is_empty()),
        ("--tiers", config.tiers.is_some()),
        ("--config", config.config.is_some()),
        ("--page-cluster", config.page_cluster.is_some()),
    ];
    match own.into_iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(RunError::WithDaemon(flag)),
        None => Ok(Some((joined, segment, join))),
    }
}

/// The tiers of a run. What is wrong with them is told when they are made.
fn tiers_of(config: &RunConfig, file: &Config) -> Tiers {
    let mut tiers = Tiers::new();
    for text in [Some(&file.tiers), config.tiers.as_ref()].into_iter().flatten() {
        let _ = tiers.apply(text, &[]);
    }
    tiers
}

/// The groups and tiers of a run, and the group of its processes.
fn set_up_groups(
    config: &RunConfig,
    file: &Config,
    groups: &mut GroupTree,
) -> Result<Option<GroupIndex>, RunError> {
    let owner = rustix::process::geteuid().as_raw();
    file.apply(groups, owner).map_err(|error| RunError::Groups("--config", error))?;
    if let Some(text) = &config.tiers {
        groups.set_tiers(text).map_err(|error| RunError::Groups("--tiers", error))?;
    }
    let Some(text) = &config.group else {
        return Ok(None);
    };
    let path = GroupPath::parse(text)
        .map_err(|error| RunError::Groups("--group", GroupError::Path(error)))?;
    groups.ensure(&path, owner).map(Some).map_err(|error| RunError::Groups("--group", error))
}

fn preload(agent: &Path) -> Result<OsString, RunError> {
    let mut list = agent.as_os_str().to_owned();
    if list.as_bytes().iter().any(|byte| *byte == b':' || byte.is_ascii_whitespace()) {
        return Err(RunError::AgentPath(agent.to_owned()));
    }
    if let Some(before) = std::env::var_os("LD_PRELOAD").filter(|before| !before.is_empty()) {
        // A run inside a run: the library is there already and belongs to the inner run from here
        // on.
        let others = before
            .as_bytes()
            .split(|byte| b": ".contains(byte))
            .filter(|entry| *entry != agent.as_os_str().as_bytes());
        for other in others.filter(|entry| !entry.is_empty()) {
            list.push(":");
            list.push(std::ffi::OsStr::from_bytes(other));
        }
    }
    Ok(list)
}

fn set_up_segment(
    config: &RunConfig,
    budget: u64,
    space: &RunSwapSpace,
) -> io::Result<(&'static Segment, OwnedFd)> {
    let fd = memfd_create(c"swaptide", Segment::BYTES as u64)?;
    let map = SharedMap::map(fd.as_fd(), Segment::BYTES)?;
    let segment = Segment::raw(map).map_err(io::Error::other)?;
    let header = &segment.header;
    header.swap_in.page_cluster.set(config.page_cluster.map(u32::from));
    header.swap_in.largest_order.set(config.largest_order.map(u32::from));
    set_up_header(segment, budget, space)?;
    Ok((segment, fd))
}
