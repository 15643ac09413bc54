//! Why a container is not created, in one line each, with what helps.

use std::io;
use std::path::PathBuf;

use swaptide_ipc::MIN_BUDGET_BYTES;
use thiserror::Error;

use crate::oci::quantity::QuantityError;
use crate::units::human;

/// Why a container is not created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OciError {
    /// An annotation that begins as swaptide's do, and is none.
    #[error("{0}: no such annotation; there are swaptide.ram, swaptide.swap and swaptide.group")]
    Unknown(String),
    /// The value of an annotation is no text.
    #[error("{0}: not a text")]
    NoText(String),
    /// A size that cannot be read.
    #[error("{0}: {1}")]
    Quantity(String, QuantityError),
    /// A budget that is less than the engine needs.
    #[error("{0}: {1:?} is too small; the minimum is {min}", min = human(MIN_BUDGET_BYTES))]
    Small(String, String),
    /// A budget that the kernel would not let it reach.
    #[error(
        "{0}: {1:?} is more than the container's memory limit ({limit}), at which the kernel kills \
        it; ask for less, or raise the limit",
        limit = human(*.2)
    )]
    AboveLimit(String, String, u64),
    /// A swap area or a group that cannot be read.
    #[error("{0}: {1}")]
    Value(String, String),
    /// Other annotations, and no budget.
    #[error("{0}: without swaptide.ram; name a size, as swaptide.ram=256Mi")]
    NoBudget(String),
    /// A container of another kind, or a damaged file.
    #[error("config.json: {0}")]
    Config(String),
    /// A group of a daemon that cannot tell the container's processes.
    #[error("swaptide.group: {0}; leave it out to give the container a budget of its own")]
    Group(String),
    /// Something that the host has to have is not there.
    #[error("{0}")]
    Host(String),
    /// A file cannot be read or written.
    #[error("{path}: {1}", path = .0.display())]
    File(PathBuf, io::Error),
    /// The runtime cannot be executed.
    #[error("{path}: cannot be executed: {1}; see --runtime", path = .0.display())]
    Runtime(PathBuf, io::Error),
}
