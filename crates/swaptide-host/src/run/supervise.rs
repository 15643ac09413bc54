//! A run from its first check to its exit status.
//!
//! Owns the order of things and the two processes of a supervisor:
//! - the *front* is what the user started. It waits, passes signals on, stops and continues with
//!   the program, prints the summary, and exits with the program's status;
//! - the *back* is its child and the program's parent. It is the subreaper of the tree, serves the
//!   socket, runs the keeper's thread and writes the report. When the program ends and others of
//!   its tree live on, the front ends and the back stays for them.
//!
//! All checks come before the fork: bad input never starts anything.
//!
//! Signals. Neither process has a handler; both block everything and read descriptors. What the
//! terminal sends goes to the whole process group, so the program has it already, and what somebody
//! sends to the group by `kill` arrives at the back as well, which tells it from a signal for the
//! front alone; only the latter is passed on.
//!
//! Invariants
//! 1. The program inherits the standard streams, other descriptors, mask and dispositions exactly
//!    as the front was started with; neither process of the supervisor keeps the streams open but
//!    the front its standard error.
//! 2. A killed supervisor kills nobody: the processes hold their own descriptors of the segment and
//!    the file, and keep their limits.
//!
//! Locks: none.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use swaptide_core::Tiers;
use swaptide_ipc::{ENV_SOCKET, GroupIndex, MAGIC, Segment, VERSION};
use swaptide_store::codec::Scheme;
use swaptide_sys::mem::{SharedMap, memfd_create};
use swaptide_sys::process::set_child_subreaper;
use swaptide_sys::ptrace;
use swaptide_sys::sock::{MAX_POLL, poll_readable};

use crate::cgroup::tree::{GroupError, GroupPath, GroupTree};
use crate::config::Config;
use crate::control::agent_api::{AgentServer, Users};
use crate::control::daemon_client::{self as client, RemoteAreas};
use crate::control::fork_tracer::{self, TracedForks};
use crate::control::server::{self, ControlSocket, Join, Joined, ServedRun};
use crate::memctl::controller::{self, MemoryController};
use crate::memctl::policy::MIN_BUDGET_BYTES;
use crate::memctl::shared_pager::SharedPager;
use crate::report::totals::{Report, ReportFile, Sink, program_name, summary};
use crate::run::agent::find_agent;
use crate::run::doctor::{self, Forks};
use crate::run::ending::Ending;
use crate::run::target::{self, Target};
use crate::signals::{self, ChildStatus, Inherited, Signals};
use crate::swap::areas::{AreaOpener, Areas};
use crate::swap::mirror;
use crate::swap::spec::{self, PoolAcceptance, RunSwapSpace};
use crate::units::{human, parse_share, ram_total};

pub use super::error::RunError;

/// How many processes are managed at a time: for tests of what the others do.
const ENV_SLOTS: &str = "SWAPTIDE_TEST_SLOTS";
/// Test hook: treats every Nth large swap-in as stale.
const ENV_STALE: &str = "SWAPTIDE_TEST_STALE";
/// Test hook: ends every Nth large fill half way.
const ENV_PART: &str = "SWAPTIDE_TEST_PART";
/// Test hook: every Nth transfer of the first swap area fails.
const ENV_MISHAPS: &str = "SWAPTIDE_TEST_MISHAPS";
/// How engines end, for tests.
const ENV_FAIL: &str = "SWAPTIDE_TEST_FAIL";
/// Not empty: no daemon is joined. For measurements, which want to be alone.
const ENV_NO_DAEMON: &str = "SWAPTIDE_NO_DAEMON";

/// The share of a process's limit that compressed memory may take where a file stands behind it, in
/// percent.
const POOL_PERCENT: u32 = 60;
/// The same where there is nothing behind it.
const POOL_PERCENT_ALONE: u32 = 75;
/// Two signals from one sender within this time, one here and one at the front, are one sent to the
/// group. The front may have to wait for its turn on a busy machine before it passes its own on.
const SAME_SIGNAL_TIME: Duration = Duration::from_secs(2);
/// How often clients are looked at when there are more than can be waited for.
const CROWDED_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The budget where none is given: a margin stays for what is not the program's.
const DEFAULT_RAM: &str = "80%";

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
    /// `--userfaultfd`.
    pub userfaultfd: Option<Users>,
    /// `--shared`: large anonymous shared mappings are swapped, too.
    pub shared: bool,
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
    /// `--no-daemon`: no daemon is joined, should one be there.
    pub no_daemon: bool,
    /// The program and its arguments.
    pub command: Vec<OsString>,
}

/// What the back tells the front.
#[derive(Serialize, Deserialize)]
enum LauncherMessage {
    Failed(String),
    Started(u32),
    Stopped,
    /// To be said on standard error.
    Said(String),
    Ended {
        status: u8,
        lines: Vec<String>,
        stays: bool,
    },
}

/// A signal that the front got.
#[derive(Serialize, Deserialize)]
struct PassOn {
    signal: i32,
    sender: u32,
}

/// The keeper of a run.
enum RunMode {
    /// Its own supervisor.
    Alone { areas: Arc<Areas>, groups: Box<GroupTree>, group: Option<GroupIndex> },
    /// The daemon.
    Daemon { join: Join, areas: Arc<RemoteAreas> },
}

impl RunMode {
    fn areas(&self) -> Arc<dyn AreaOpener> {
        match self {
            RunMode::Alone { areas, .. } => areas.clone(),
            RunMode::Daemon { areas, .. } => areas.clone(),
        }
    }
}

/// Everything that is checked and opened before the fork.
struct Prepared {
    target: Target,
    arguments: Vec<OsString>,
    preload: OsString,
    frame: ReportFile,
    segment: &'static Segment,
    segment_fd: OwnedFd,
    place: RunMode,
    report: Option<(PathBuf, Sink)>,
    quiet: bool,
    strict: bool,
    users: Users,
    shared: bool,
    /// This run follows forks, for the kernel does not report them. Decided before the program
    /// begins; what the segment says later does not count.
    follows_forks: bool,
    started: Instant,
    inherited_fds: Vec<RawFd>,
}

/// Runs a program under a budget; answers with the exit status.
///
/// # Errors
/// See [`RunError`]; nothing was started then.
pub fn run(config: &RunConfig) -> Result<u8, RunError> {
    let prepared = prepare(config)?;
    let system = |what| move |error: io::Error| RunError::System(what, error);
    let (front_end, back_end) = UnixStream::pair().map_err(system("socketpair"))?;
    let (signals, inherited) = signals::take().map_err(system("signals"))?;
    let subreaper =
        |error: swaptide_sys::Errno| RunError::System("PR_SET_CHILD_SUBREAPER", error.into());
    // If the back is killed, the program comes to the front, which then waits for it itself.
    set_child_subreaper(true).map_err(subreaper)?;
    let front = std::process::id();
    // SAFETY: this process has one thread, so the child's copy of all locks and of the heap is
    // consistent.
    match unsafe { libc::fork() } {
        -1 => Err(RunError::System("fork", io::Error::last_os_error())),
        0 => {
            drop(front_end);
            Supervisor::run(prepared, Channel::new(back_end), signals, inherited, front)
        }
        back => {
            drop(back_end);
            release_streams(&prepared.inherited_fds, &[0, 1]);
            // A daemon that is started again finds its segment by the processes that have it open;
            // this process has it should the back be killed.
            let kept = matches!(prepared.place, RunMode::Daemon { .. })
                .then(|| prepared.segment_fd.try_clone());
            std::mem::forget(kept);
            drop(prepared);
            Launcher { back: back as u32, channel: Channel::new(front_end), signals, program: None }
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
    let (name, arguments) = config.command.split_first().ok_or(RunError::NoCommand)?;
    let target =
        target::find(name, std::env::var_os("PATH").as_deref()).map_err(RunError::Target)?;
    let preload = preload(&find_agent()?)?;
    let report = match &config.report {
        Some(path) => Some((
            path.clone(),
            Sink::open(path).map_err(|error| RunError::Report(path.clone(), error))?,
        )),
        None => None,
    };
    let forks = doctor::forks().map_err(RunError::Userfaultfd)?;
    if forks == Forks::Followed && config.shared {
        return Err(RunError::SharedNeedsEvents);
    }
    let program = program_name(name);
    let alone =
        config.no_daemon || std::env::var_os(ENV_NO_DAEMON).is_some_and(|set| !set.is_empty());
    let joined = if alone { None } else { look_for_daemon(config, ram.map(|_| budget), &program)? };
    let mut users = config.userfaultfd.or(file.userfaultfd).unwrap_or_default();
    let mut follows_forks = forks == Forks::Followed;
    let (segment, segment_fd, place, frame) = match joined {
        Some((joined, segment_fd, join)) => {
            if joined.userfaultfd == Users::SameUser {
                users = Users::SameUser;
            }
            // As its engines do, which go by the daemon's segment.
            follows_forks = joined.follows_forks;
            let system = |error| RunError::System("the daemon's segment", error);
            let map = SharedMap::map(segment_fd.as_fd(), Segment::BYTES)
                .map_err(|errno| system(errno.into()))?;
            let segment = Segment::open(map).map_err(|error| system(io::Error::other(error)))?;
            let codec = Scheme::from_number(joined.codec);
            let acceptance = PoolAcceptance::of(segment);
            let frame = ReportFile {
                budget: joined.budget,
                pool_cap: joined.pool_cap,
                codec,
                acceptance,
                program,
            };
            (
                segment,
                segment_fd,
                RunMode::Daemon { join, areas: Arc::new(RemoteAreas::new(segment)) },
                frame,
            )
        }
        None => {
            mirror::resolve_all(&mut devices, &tiers_of(config, &file)).map_err(RunError::Swap)?;
            let space = spec::open(&devices, budget).map_err(RunError::Swap)?;
            let (segment, segment_fd) = set_up_segment(config, budget, &space)
                .map_err(|error| RunError::System("shared segment", error))?;
            let areas = Arc::new(Areas::new(segment));
            let RunSwapSpace { pool_cap, codec, acceptance, .. } = space;
            let frame = ReportFile { budget, pool_cap, codec, acceptance, program };
            for backing in space.beyond {
                areas.add(backing).map_err(RunError::Area)?;
            }
            let mut groups = Box::new(GroupTree::new(segment, budget));
            let group = set_up_groups(config, &file, &mut groups)?;
            (segment, segment_fd, RunMode::Alone { areas, groups, group }, frame)
        }
    };
    Ok(Prepared {
        target,
        arguments: arguments.to_vec(),
        preload,
        frame,
        segment,
        segment_fd,
        place,
        report,
        quiet: config.quiet,
        strict: config.strict,
        users,
        shared: config.shared,
        follows_forks,
        started,
        inherited_fds,
    })
}

/// What a daemon would give this run, if one is there.
fn look_for_daemon(
    config: &RunConfig,
    max: Option<u64>,
    program: &str,
) -> Result<Option<(Joined, OwnedFd, Join)>, RunError> {
    let join = Join {
        front: std::process::id(),
        program: program.to_owned(),
        group: config.group.clone(),
        max,
        strict: config.strict,
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
    header.page_cluster_plus.store(config.page_cluster.map_or(0, |n| u32::from(n) + 1), Relaxed);
    header.largest_order_plus.store(config.largest_order.map_or(0, |n| u32::from(n) + 1), Relaxed);
    set_up_header(segment, budget, space)?;
    Ok((segment, fd))
}

/// Writes what stands fixed into a fresh segment, which is one from then on.
pub(crate) fn set_up_header(
    segment: &Segment,
    budget: u64,
    space: &RunSwapSpace,
) -> io::Result<()> {
    let header = &segment.header;
    header.version.store(VERSION, Relaxed);
    header.budget_bytes.store(budget, Relaxed);
    header.pool_cap_bytes.store(space.pool_cap, Relaxed);
    header.pool_codec.store(space.codec.number(), Relaxed);
    space.acceptance.store(segment);
    let namespace = rustix::fs::stat(c"/proc/self/ns/pid").map_or(0, |stat| stat.st_ino);
    header.pid_namespace.store(namespace, Relaxed);
    let test_setting = |name| std::env::var(name).ok().and_then(|text| text.parse().ok());
    header.slots_max.store(test_setting(ENV_SLOTS).unwrap_or(0), Relaxed);
    header.stale_every.store(test_setting(ENV_STALE).unwrap_or(0), Relaxed);
    header.part_every.store(test_setting(ENV_PART).unwrap_or(0), Relaxed);
    header.io_fault_every.store(test_setting(ENV_MISHAPS).unwrap_or(0), Relaxed);
    header.fail.store(test_setting(ENV_FAIL).unwrap_or(0), Relaxed);
    let followed = doctor::forks().map_err(io::Error::other)? == Forks::Followed;
    header.followed_forks.store(followed.into(), Relaxed);
    header
        .pool_percent
        .store(if !space.beyond.is_empty() { POOL_PERCENT } else { POOL_PERCENT_ALONE }, Relaxed);
    let mut key = [0u8; 32];
    rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
    for (word, bytes) in header.key.iter().zip(key.chunks_exact(8)) {
        word.store(bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)), Relaxed);
    }
    // Pairs with the acquire of Segment::open: a reader of the magic word sees all that is before
    // it.
    header.magic.store(MAGIC, Release);
    Ok(())
}

/// Descriptors beyond the standard streams that were given to this process and pass through exec.
fn inherited_descriptors() -> Vec<RawFd> {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return Vec::new() };
    let numbers =
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    let passes_exec = |fd: &RawFd| {
        // SAFETY: F_GETFD changes nothing; a number that is no descriptor answers with an error.
        let flags = unsafe { libc::fcntl(*fd, libc::F_GETFD) };
        flags >= 0 && flags & libc::FD_CLOEXEC == 0
    };
    numbers.filter(|fd| *fd > 2).filter(passes_exec).collect()
}

/// Lets go of what was inherited: a reader at the other end of a pipe must see its end when the
/// program closes it.
fn release_streams(inherited: &[RawFd], standard: &[RawFd]) {
    for fd in inherited {
        // SAFETY: the number was open before this program opened anything, and nothing in it ever
        // owned or used it.
        unsafe { libc::close(*fd) };
    }
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        for fd in standard {
            // SAFETY: the standard streams are addressed by their numbers only; these refer to
            // /dev/null from here on.
            unsafe { libc::dup2(null.as_raw_fd(), *fd) };
        }
    }
}

/// Messages between front and back: one JSON text to a line.
struct Channel {
    stream: UnixStream,
    received: Vec<u8>,
}

impl Channel {
    fn new(stream: UnixStream) -> Channel {
        Channel { stream, received: Vec::new() }
    }

    /// Sends; that the other side is gone is seen at the next receiving.
    fn send(&mut self, message: &impl Serialize) {
        if let Ok(mut line) = serde_json::to_vec(message) {
            line.push(b'\n');
            let _ = self.stream.write_all(&line);
        }
    }

    /// All messages that came; `None` when the other side is gone and all of its messages were
    /// read.
    fn receive<T: for<'a> Deserialize<'a>>(&mut self) -> Option<Vec<T>> {
        let mut buffer = [0u8; 4096];
        match self.stream.read(&mut buffer) {
            Ok(0) => return None,
            Ok(length) => self.received.extend_from_slice(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
        let end = self.received.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let lines: Vec<u8> = self.received.drain(..end).collect();
        Some(
            lines
                .split(|byte| *byte == b'\n')
                .filter_map(|line| serde_json::from_slice(line).ok())
                .collect(),
        )
    }
}

/// The process that the user started.
struct Launcher {
    back: u32,
    channel: Channel,
    signals: Signals,
    program: Option<u32>,
}

impl Launcher {
    fn run(mut self) -> Result<u8, RunError> {
        loop {
            let ready = poll_readable(&[self.signals.as_fd(), self.channel.stream.as_fd()], None)
                .unwrap_or(0);
            if ready & 1 != 0 {
                self.pass_on();
            }
            if ready & 2 == 0 {
                continue;
            }
            let Some(messages) = self.channel.receive() else { return self.wait_alone() };
            for message in messages {
                match message {
                    LauncherMessage::Started(pid) => self.program = Some(pid),
                    LauncherMessage::Failed(message) => return Err(RunError::Start(message)),
                    LauncherMessage::Said(line) => report_line(&line),
                    // As the program stands still, so does this process: the shell takes the
                    // terminal back.
                    LauncherMessage::Stopped => signals::send(std::process::id(), libc::SIGSTOP),
                    LauncherMessage::Ended { status, lines, stays } => {
                        lines.iter().for_each(|line| report_line(line));
                        if !stays {
                            self.wait_for_back();
                        }
                        return Ok(status);
                    }
                }
            }
        }
    }

    fn pass_on(&mut self) {
        while let Some(arrived) = self.signals.next() {
            match arrived.sender {
                Some(sender) if arrived.signal != libc::SIGCHLD && sender != self.back => {
                    self.channel.send(&PassOn { signal: arrived.signal, sender });
                }
                _ => {}
            }
        }
    }

    /// Nothing is left in the background: a process that waited for this run sees none of it any
    /// more.
    fn wait_for_back(&self) {
        while !matches!(signals::child_change(), ChildStatus::NoChild | ChildStatus::Ended { .. }) {
            let _ = poll_readable(&[self.signals.as_fd()], Some(Duration::from_millis(5)));
            while self.signals.next().is_some() {}
        }
    }

    /// The back was killed. The program is this process's child now and keeps the limits it has.
    fn wait_alone(mut self) -> Result<u8, RunError> {
        let Some(program) = self.program else {
            return Err(RunError::Start("the supervisor was killed".into()));
        };
        report_line("the supervisor was killed: limits stay as they are, there is no report");
        loop {
            match signals::child_change() {
                ChildStatus::Ended { pid, status } if pid == program => return Ok(status),
                ChildStatus::NoChild => {
                    return Err(RunError::Start(
                        "the supervisor was killed, and the program with it".into(),
                    ));
                }
                ChildStatus::Nothing => {
                    let _ = poll_readable(&[self.signals.as_fd()], None);
                    while let Some(arrived) = self.signals.next() {
                        if arrived.sender.is_some() && arrived.signal != libc::SIGCHLD {
                            signals::send(program, arrived.signal);
                        }
                    }
                }
                _ => {}
            }
            self.program = Some(program);
        }
    }
}

/// One line on standard error; if nobody reads there, so be it.
fn report_line(line: &str) {
    let _ = writeln!(io::stderr(), "swaptide: {line}");
}

/// The supervisor's other threads.
#[derive(Default)]
struct Beside {
    keeper: Option<mpsc::Sender<controller::ControllerRequest>>,
    thread: Option<std::thread::JoinHandle<()>>,
    door: Option<ControlSocket>,
    shared: Option<&'static SharedPager>,
}

impl Prepared {
    /// Has the daemon keep the descendants of this process.
    fn join(&self) -> io::Result<()> {
        let RunMode::Daemon { join, .. } = &self.place else { return Ok(()) };
        match client::join(join) {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err(io::Error::other("the daemon is gone")),
            Err(why) => Err(io::Error::other(why)),
        }
    }

    /// Starts the keeper of a run that is alone, and opens its door; and what a pager of shared
    /// memory needs.
    fn keep(&mut self, front: u32) -> Beside {
        raise_descriptor_limit();
        let shared = SharedPager::new(self.segment, self.place.areas(), self.shared);
        let RunMode::Alone { areas, groups, group } = &mut self.place else {
            return Beside { shared: Some(shared), ..Beside::default() };
        };
        let (root, program) = (std::process::id(), self.frame.program.clone());
        self.segment.header.supervisor.store(root, Relaxed);
        let (keeper, requests) = mpsc::channel();
        let groups = std::mem::replace(&mut **groups, GroupTree::new(self.segment, 0));
        let mut thread =
            MemoryController::new(self.segment, areas.clone(), groups, self.frame.budget)
                .with_shared(shared)
                .within_cgroups();
        let uid = rustix::process::geteuid().as_raw();
        let run = controller::ManagedRun {
            root,
            front,
            uid,
            program: program.clone(),
            started: 0.0,
            group: *group,
            max: None,
            strict: self.strict,
        };
        thread.add_run(run);
        let thread = std::thread::Builder::new()
            .name("keeper".into())
            .spawn(move || thread.run(requests))
            .ok();
        let run = ServedRun {
            pid: front,
            root,
            program,
            started: self.started,
            budget: self.frame.budget,
        };
        // Without a door nobody can ask, and that is all.
        let door = server::open(run, areas.clone(), keeper.clone()).ok();
        Beside { keeper: Some(keeper), thread, door, shared: Some(shared) }
    }
}

/// The process in the background.
struct Supervisor {
    prepared: Prepared,
    front: u32,
    /// Its name goes with the last process of the tree.
    _door: Option<ControlSocket>,
    /// The front, while it is there.
    channel: Option<Channel>,
    signals: Signals,
    counter: AgentServer,
    /// Threads that fork, where the kernel does not report it.
    followed: TracedForks,
    /// Shared memory's pager.
    shared: Option<&'static SharedPager>,
    /// Where there is no daemon that does it.
    keeper: Option<mpsc::Sender<controller::ControllerRequest>>,
    /// The program; `None` once it has ended.
    program: Option<u32>,
    /// The sender of each signal to this process, and when: what is sent to the group arrives
    /// here as well.
    seen: HashMap<i32, (u32, Instant)>,
    /// What became of the signals that were to end the run.
    ending: Ending,
}

impl Supervisor {
    fn run(
        mut prepared: Prepared,
        mut channel: Channel,
        signals: Signals,
        inherited: Inherited,
        front: u32,
    ) -> ! {
        let subreaper = set_child_subreaper(true).map_err(io::Error::from);
        let started = subreaper
            .and_then(|()| prepared.join())
            .and_then(|()| start(&prepared, inherited, &channel));
        let (counter, program) = match started {
            Ok(started) => started,
            Err(error) => {
                channel.send(&LauncherMessage::Failed(format!(
                    "{}: cannot be started: {error}",
                    prepared.target.path.display()
                )));
                std::process::exit(0);
            }
        };
        release_streams(&prepared.inherited_fds, &[0, 1, 2]);
        let kept = prepared.keep(front);
        let followed = TracedForks::new(prepared.follows_forks);
        let back = Supervisor {
            prepared,
            front,
            _door: kept.door,
            channel: Some(channel),
            signals,
            counter,
            followed,
            shared: kept.shared,
            keeper: kept.keeper,
            program: Some(program),
            seen: HashMap::new(),
            ending: Ending::default(),
        };
        back.serve();
        if let Some(thread) = kept.thread {
            let _ = thread.join();
        }
        std::process::exit(0)
    }

    /// Until the last process of the tree is gone.
    fn serve(mut self) {
        // An engine that starts asks for its swap areas, while its program grows.
        swaptide_sys::affinity::go_first();
        loop {
            let mut fds = vec![self.signals.as_fd(), self.counter.as_fd()];
            fds.push(
                self.channel
                    .as_ref()
                    .map_or(self.signals.as_fd(), |channel| channel.stream.as_fd()),
            );
            fds.extend(self.counter.awaited());
            fds.extend(self.followed.awaited());
            let patience =
                [self.counter.patience(), self.followed.patience(), self.ending.patience()]
                    .into_iter()
                    .flatten()
                    .min();
            // Those for which there is no place are looked at all the same, a little later.
            let patience = if fds.len() > MAX_POLL {
                Some(patience.unwrap_or(CROWDED_POLL_INTERVAL).min(CROWDED_POLL_INTERVAL))
            } else {
                patience
            };
            fds.truncate(MAX_POLL);
            let ready = poll_readable(&fds, patience).unwrap_or(0);
            // Signals first: they tell whether one that the front passes on was meant for it alone.
            self.note_signals();
            if ready & 2 != 0 || self.counter.patience().is_some() {
                let areas = self.prepared.place.areas();
                let joined = self.counter.serve(
                    &self.prepared.segment_fd,
                    &areas,
                    self.shared,
                    &mut self.followed,
                );
                for (pid, keeper) in joined.into_iter().zip(std::iter::repeat(&self.keeper)) {
                    // A daemon finds them in the segment.
                    let _ = keeper
                        .as_ref()
                        .map(|keeper| keeper.send(controller::ControllerRequest::Joined(pid)));
                }
            }
            if ready & 4 != 0 && self.channel.is_some() {
                self.listen_to_front();
            }
            self.attend_forks();
            self.follow_signals();
            for note in self.counter.take_notes() {
                self.say(note);
            }
            if !self.look_at_children() {
                // The keeper ends with its channel.
                let _ = self
                    .keeper
                    .as_ref()
                    .map(|keeper| keeper.send(controller::ControllerRequest::Stop));
                return;
            }
        }
    }

    fn attend_forks(&mut self) {
        // A test that has something fail wants to see what comes of it.
        let is_test = self.prepared.segment.header.fail.load(Relaxed) != 0;
        for pid in self.followed.attend(if is_test {
            fork_tracer::REGISTER_TIMEOUT / 15
        } else {
            fork_tracer::REGISTER_TIMEOUT
        }) {
            self.say(format!("forked child {pid} does not register its memory: killed"));
        }
    }

    fn say(&mut self, what: String) {
        let line = format!("{}: {what}", self.prepared.frame.program);
        if let Some(channel) = &mut self.channel {
            channel.send(&LauncherMessage::Said(line));
        }
    }

    /// Ends processes that cannot take the signal that was to end the run.
    fn follow_signals(&mut self) {
        for pid in self.ending.look() {
            self.say(format!(
                "process {pid} was told to end and cannot: its threads wait inside swaptide; killed"
            ));
        }
    }

    fn note_signals(&mut self) {
        while let Some(arrived) = self.signals.next() {
            self.ending.begin(arrived.signal);
            if let Some(sender) = arrived.sender {
                self.seen.insert(arrived.signal, (sender, Instant::now()));
            }
        }
    }

    fn listen_to_front(&mut self) {
        let Some(messages) = self.channel.as_mut().and_then(|channel| channel.receive::<PassOn>())
        else {
            // The front was killed. The tree continues.
            self.channel = None;
            return;
        };
        for message in messages {
            self.ending.begin(message.signal);
            let whole_group = self.seen.remove(&message.signal).is_some_and(|(sender, when)| {
                sender == message.sender && when.elapsed() < SAME_SIGNAL_TIME
            });
            if let Some(program) = self.program
                && !(whole_group && signals::same_group(program, std::process::id()))
            {
                signals::send(program, message.signal);
            }
        }
    }

    /// False when no process of the tree is left.
    fn look_at_children(&mut self) -> bool {
        let mut ended = None;
        let left = loop {
            let change = signals::child_change();
            if let ChildStatus::Ended { pid, .. } = change {
                self.followed.changed(pid, ptrace::TraceeStop::Gone);
            }
            match change {
                ChildStatus::Ended { pid, status } if Some(pid) == self.program => {
                    self.program = None;
                    ended = Some(status);
                }
                ChildStatus::Followed(pid, status) => {
                    self.followed.changed(pid, ptrace::TraceeStop::of(status))
                }
                ChildStatus::Stopped(pid, signal) if self.followed.has(pid) => {
                    self.followed.changed(pid, ptrace::TraceeStop::Signal(signal));
                }
                ChildStatus::Stopped(pid, _) if Some(pid) == self.program => {
                    if let Some(channel) = &mut self.channel {
                        channel.send(&LauncherMessage::Stopped);
                    }
                }
                ChildStatus::Continued(pid)
                    if Some(pid) == self.program && self.channel.is_some() =>
                {
                    signals::send(self.front, libc::SIGCONT);
                }
                ChildStatus::Nothing => break true,
                ChildStatus::NoChild => break false,
                _ => {}
            }
        };
        if let Some(status) = ended {
            self.finish(status, left);
        }
        left
    }

    /// The program has ended: the report, and the front's release.
    fn finish(&mut self, status: u8, stays: bool) {
        let root = std::process::id();
        let totals = match &self.keeper {
            Some(keeper) => controller::ask(keeper, move |keeper| keeper.totals(root)),
            None => client::totals(),
        };
        let told = totals.is_some();
        let totals = totals.unwrap_or_default();
        let wall_s = self.prepared.started.elapsed().as_secs_f64();
        let status = if totals.strict_kill { 137 } else { status };
        let frame = &self.prepared.frame;
        let mut lines = Vec::new();
        if totals.strict_kill {
            let (program, budget) = (&frame.program, human(frame.budget));
            lines.push(match totals.strict_used {
                None => format!(
                    "{program}: killed by --strict: swap space ran out and its memory went past \
                    the {budget} budget; give it more with --swap"
                ),
                Some(used) => format!(
                    "{program}: killed by --strict: its memory stayed above the {budget} budget \
                    for 5 s ({} at the end), in parts that \
                     cannot be swapped; give it more with --ram",
                    human(used)
                ),
            });
        }
        if !told {
            lines.push(format!("{}: no daemon to ask what was swapped", frame.program));
        } else if !self.prepared.quiet {
            lines.push(summary(frame, &totals, wall_s));
        }
        if let Some((path, sink)) = &mut self.prepared.report
            && let Err(error) = sink.write(&Report::new(frame, &totals, status, wall_s))
        {
            lines.push(format!("--report: {}: not written: {error}", path.display()));
        }
        if let Some(mut channel) = self.channel.take() {
            channel.send(&LauncherMessage::Ended { status, lines, stays });
        }
        // The process that stays behind keeps no directory busy.
        let _ = std::env::set_current_dir("/");
    }
}

/// Starts the program, which tells the front its own number before it begins: however early this
/// process is killed, the front knows what to wait for.
fn start(
    prepared: &Prepared,
    inherited: Inherited,
    channel: &Channel,
) -> io::Result<(AgentServer, u32)> {
    let counter = AgentServer::open(prepared.users)?;
    let mut command = Command::new(&prepared.target.path);
    command.arg0(&prepared.target.name).args(&prepared.arguments);
    command.env("LD_PRELOAD", &prepared.preload).env(ENV_SOCKET, counter.name());
    let mut to_front = Channel::new(channel.stream.try_clone()?);
    let before_exec = move || {
        to_front.send(&LauncherMessage::Started(std::process::id()));
        inherited.restore()
    };
    // SAFETY: this process has one thread, so the child's copy of the heap, from which the message
    // comes, is consistent; the rest makes system calls only.
    unsafe { command.pre_exec(before_exec) };
    let child = command.spawn()?;
    Ok((counter, child.id()))
}

/// The keeper has two descriptors open for every process of the tree.
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Where it stays as it is, processes beyond it are not charged and get no limit.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
