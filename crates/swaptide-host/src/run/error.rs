//! Why a run does not start, in one line each, with what helps.

use std::path::PathBuf;
use std::{fmt, io};

use swaptide_sys::uffd::OpenError;

use crate::cgroup::tree::GroupError;
use crate::config::ConfigError;
use crate::memctl::policy::MIN_BUDGET_BYTES;
use crate::run::target::TargetError;
use crate::swap::areas::AreaError;
use crate::swap::spec::DeviceError;
use crate::units::{SizeError, human};

/// Names the agent's library, for an installation that is spread out.
pub(crate) const ENV_AGENT: &str = "SWAPTIDE_AGENT";
/// The agent's file name.
pub(crate) const AGENT_NAME: &str = "libswaptide_agent.so";

/// Why a run did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum RunError {
    /// `--ram` is no size.
    Ram(SizeError),
    /// `--ram` is less than the engine needs.
    SmallBudget(u64),
    /// A device.
    Swap(DeviceError),
    /// There are too many of them.
    Area(AreaError),
    /// `--config`.
    Config(ConfigError),
    /// `--tiers`, or what `--config` says of groups.
    Groups(&'static str, GroupError),
    /// The daemon does not keep it.
    Daemon(String),
    /// What is asked for is the daemon's to have.
    WithDaemon(&'static str),
    /// The report cannot be written there.
    Report(PathBuf, io::Error),
    /// No program was named.
    NoCommand,
    /// The program.
    Target(TargetError),
    /// The preloaded library is not where it should be.
    NoAgent(Vec<PathBuf>),
    /// The library's path cannot stand in `LD_PRELOAD`.
    AgentPath(PathBuf),
    /// `--shared` where the kernel does not tell of forks.
    SharedNeedsEvents,
    /// The kernel or its settings do not allow it.
    Userfaultfd(OpenError),
    /// A system call.
    System(&'static str, io::Error),
    /// The program could not be started after all.
    Start(String),
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::Ram(error) => write!(f, "--ram: {error}"),
            RunError::SmallBudget(bytes) => {
                write!(
                    f,
                    "--ram: {} is too small; the minimum is {}",
                    human(*bytes),
                    human(MIN_BUDGET_BYTES)
                )
            }
            RunError::Swap(error) => write!(f, "--swap: {error}"),
            RunError::Area(error) => write!(f, "--swap: {error}"),
            RunError::Config(error) => write!(f, "--config: {error}"),
            RunError::Groups(flag, error) => write!(f, "{flag}: {error}"),
            RunError::Daemon(why) => write!(
                f,
                "the daemon: {why}; use --no-daemon to run without \
                it"
            ),
            RunError::WithDaemon(flag) => {
                write!(f, "{flag}: set by the daemon; drop it, or use --no-daemon")
            }
            RunError::Report(path, error) => {
                write!(f, "--report: {}: cannot be written: {error}", path.display())
            }
            RunError::NoCommand => write!(f, "no program to run; name it after --"),
            RunError::Target(error) => write!(f, "{error}"),
            RunError::NoAgent(places) => {
                let places: Vec<String> =
                    places.iter().map(|place| place.display().to_string()).collect();
                write!(
                    f,
                    "{AGENT_NAME} not found ({}); build it with cargo build, or set {ENV_AGENT}",
                    places.join(", ")
                )
            }
            RunError::AgentPath(path) => {
                write!(
                    f,
                    "{}: a path with a space or a colon cannot be preloaded; move it or set \
                    {ENV_AGENT}",
                    path.display()
                )
            }
            RunError::SharedNeedsEvents => write!(
                f,
                "--shared: forks of programs with shared memory need CAP_SYS_PTRACE; leave it out \
                (shared memory then stays in memory), or run as root"
            ),
            RunError::Userfaultfd(error) => {
                write!(f, "{error}; swaptide doctor shows how to fix it")
            }
            RunError::System(what, error) => write!(f, "{what}: {error}"),
            RunError::Start(message) => write!(f, "{message}"),
        }
    }
}

impl std::error::Error for RunError {}
