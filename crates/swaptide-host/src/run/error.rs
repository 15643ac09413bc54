//! Why a run does not start, in one line each, with what helps.

use std::io;
use std::path::PathBuf;

use swaptide_ipc::MIN_BUDGET_BYTES;
use swaptide_sys::uffd::OpenError;
use thiserror::Error;

use crate::cgroup::tree::GroupError;
use crate::config::ConfigError;
use crate::inject::ImageError;
use crate::run::attach::AttachError;
use crate::run::target::TargetError;
use crate::swap::areas::AreaError;
use crate::swap::spec::DeviceError;
use crate::units::{SizeError, comma_list, human};

/// Names the agent's library, for an installation that is spread out.
pub(crate) const ENV_AGENT: &str = "SWAPTIDE_AGENT";
/// The agent's file name.
pub(crate) const AGENT_NAME: &str = "libswaptide_agent.so";

/// Why a run did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RunError {
    /// `--ram` is no size.
    #[error("--ram: {0}")]
    Ram(SizeError),
    /// `--ram` is less than the engine needs.
    #[error("--ram: {} is too small; the minimum is {}", human(*.0), human(MIN_BUDGET_BYTES))]
    SmallBudget(u64),
    /// A device of `--swap` cannot be used.
    #[error("--swap: {0}")]
    Swap(DeviceError),
    /// There are too many of them.
    #[error("--swap: {0}")]
    Area(AreaError),
    /// The file of `--config` cannot be read, or is not one.
    #[error("--config: {0}")]
    Config(ConfigError),
    /// `--tiers`, or what `--config` says of groups.
    #[error("{0}: {1}")]
    Groups(&'static str, GroupError),
    /// The daemon does not keep it.
    #[error(
        "the daemon: {0}; use --no-daemon to run without \
        it"
    )]
    Daemon(String),
    /// The option is set by the daemon.
    #[error("{0}: set by the daemon; drop it, or use --no-daemon")]
    WithDaemon(&'static str),
    /// The report cannot be written there.
    #[error("--report: {path}: cannot be written: {1}; name another file", path = .0.display())]
    Report(PathBuf, io::Error),
    /// No program was named.
    #[error("no program to run; name it after --")]
    NoCommand,
    /// The program cannot be run managed.
    #[error("{0}")]
    Target(TargetError),
    /// The process cannot be attached to.
    #[error("{0}")]
    Attach(AttachError),
    /// The preloaded library is not where it should be.
    #[error(
        "{AGENT_NAME} not found ({list}); build it with cargo build, or set {ENV_AGENT}",
        list = path_list(.0)
    )]
    NoAgent(Vec<PathBuf>),
    /// The library cannot be put into a program.
    #[error("{0}")]
    Agent(ImageError),
    /// The library's path cannot stand in `LD_PRELOAD`.
    #[error(
        "{}: a path with a space or a colon cannot be preloaded; move it or set \
        {ENV_AGENT}",
        .0.display()
    )]
    AgentPath(PathBuf),
    /// `--shared` where the kernel does not tell of forks.
    #[error(
        "--shared: forks of programs with shared memory need CAP_SYS_PTRACE; leave it out \
        (shared memory then stays in memory), or run as root"
    )]
    SharedNeedsEvents,
    /// `--shared` under a limit on file size that cannot be raised.
    #[error(
        "--shared: shared memory is kept in files, and the hard limit on file size (ulimit -Hf) is \
        too small for them; raise it, or leave --shared out"
    )]
    SharedFileSize,
    /// The kernel or its settings do not allow it.
    #[error("{0}; swaptide doctor shows how to fix it")]
    Userfaultfd(OpenError),
    /// A system call failed, for what is named.
    #[error("{0}: {1}; see the limits of this user (ulimit -a)")]
    System(&'static str, io::Error),
    /// The program could not be started after all.
    #[error("{0}")]
    Start(String),
}

fn path_list(paths: &[PathBuf]) -> String {
    comma_list(&paths.iter().map(|path| path.display()).collect::<Vec<_>>())
}
