//! Why a daemon does not start, and what it says while it runs.

use std::io;
use std::path::PathBuf;
use swaptide_ipc::MIN_BUDGET_BYTES;
use thiserror::Error;

use crate::cgroup::tree::GroupError;
use crate::config::ConfigError;
use crate::swap::areas::AreaError;
use crate::swap::spec::DeviceError;
use crate::units::human;

/// Why a daemon does not start, or does not take a file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DaemonError {
    /// The configuration file cannot be read, or is not one.
    #[error("{0}")]
    Config(ConfigError),
    /// The budget is less than the engine needs.
    #[error("ram: {} is too small; the minimum is {}", human(*.0), human(MIN_BUDGET_BYTES))]
    SmallBudget(u64),
    /// A device of `swap` cannot be used.
    #[error("swap: {0}")]
    Device(DeviceError),
    /// There are too many.
    #[error("swap: {0}")]
    Area(AreaError),
    /// A process of a run that it keeps serves one.
    #[error("swap: {0}")]
    Circular(String),
    /// A group or the tiers cannot be made.
    #[error("{0}")]
    Groups(GroupError),
    /// Another one is there.
    #[error("{}: a daemon is already running; see swaptide ctl list", .0.display())]
    Running(PathBuf),
    /// A file or a directory of its own.
    #[error("{path}: {1}; the daemon must be able to write there", path = .0.display())]
    State(PathBuf, io::Error),
    /// A system call failed, for what is named.
    #[error("{0}: {1}; see the limits of this user (ulimit -a)")]
    System(&'static str, io::Error),
}

/// One line on standard error; a failed write is ignored.
pub(super) fn log_line(line: &str) {
    use std::io::Write;
    let _ = writeln!(io::stderr(), "swaptide daemon: {line}");
}
