//! Why a daemon does not start, and what it says while it runs.

use std::path::PathBuf;
use std::{fmt, io};

use crate::cgroup::tree::GroupError;
use crate::config::ConfigError;
use crate::memctl::policy::MIN_BUDGET_BYTES;
use crate::swap::areas::AreaError;
use crate::swap::spec::DeviceError;
use crate::units::human;

/// Why a daemon does not start, or does not take a file.
#[derive(Debug)]
#[non_exhaustive]
pub enum DaemonError {
    /// The file.
    Config(ConfigError),
    /// The budget is less than the engine needs.
    SmallBudget(u64),
    /// A swap device.
    Device(DeviceError),
    /// There are too many.
    Area(AreaError),
    /// A process of a run that it keeps serves one.
    Circular(String),
    /// Groups or tiers.
    Groups(GroupError),
    /// Another one is there.
    Running(PathBuf),
    /// A file or a directory of its own.
    State(PathBuf, io::Error),
    /// A system call.
    System(&'static str, io::Error),
}

impl fmt::Display for DaemonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DaemonError::Config(error) => write!(f, "{error}"),
            DaemonError::SmallBudget(bytes) => {
                write!(
                    f,
                    "ram: {} is too small; the minimum is {}",
                    human(*bytes),
                    human(MIN_BUDGET_BYTES)
                )
            }
            DaemonError::Device(error) => write!(f, "swap: {error}"),
            DaemonError::Area(error) => write!(f, "swap: {error}"),
            DaemonError::Circular(why) => write!(f, "swap: {why}"),
            DaemonError::Groups(error) => write!(f, "{error}"),
            DaemonError::Running(path) => {
                write!(f, "{}: a daemon is already running; see swaptide ctl list", path.display())
            }
            DaemonError::State(path, error) => write!(f, "{}: {error}", path.display()),
            DaemonError::System(what, error) => write!(f, "{what}: {error}"),
        }
    }
}

impl std::error::Error for DaemonError {}

/// One line on standard error; if nobody reads there, so be it.
pub(super) fn log_line(line: &str) {
    use std::io::Write;
    let _ = writeln!(io::stderr(), "swaptide daemon: {line}");
}
