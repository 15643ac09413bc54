//! Why a device is none, or cannot be had, in one line each.

use std::io;
use std::path::PathBuf;

use swaptide_ipc::MAX_AREAS;
use swaptide_store::codec::{Choice, Level};

use swaptide_ipc::{EXTENT_BYTES, MAX_EXTENTS};
use thiserror::Error;

use crate::nbd::NbdError;
use crate::nbd::url::UrlError;
use crate::units::{SizeError, human};

/// The smallest swap file: a few extents for each of a few processes.
pub const MIN_FILE_BYTES: u64 = 16 << 20;
/// The largest swap file: all extents of the segment.
pub const MAX_FILE_BYTES: u64 = MAX_EXTENTS as u64 * EXTENT_BYTES;
/// The name of the cipher that areas have unless `cipher=none` is said.
pub const CIPHER: &str = "aes-256-gcm";

/// Why devices cannot be had.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The text is none of the forms of `--swap`.
    #[error(
        "{0:?} is not a device; write zram:SIZE, file:PATH[:SIZE], /dev/BLOCK or \
        nbd://HOST/EXPORT"
    )]
    Syntax(String),
    /// The size in it is none.
    #[error("{0:?}: {1}")]
    Size(String, SizeError),
    /// The priority in it is none.
    #[error("{0:?}: expected prio=N after the comma, N from -1 to 32767")]
    Priority(String),
    /// The codec in it is none.
    #[error(
        "{0:?}: there is no codec {1:?}; use {list}",
        list = Choice::ALL.map(Choice::name).join(", ")
    )]
    Codec(String, String),
    /// The level of zstd in it is none.
    #[error("{0:?}: there is no level {1:?} of zstd; use 1 to {most}", most = Level::MAX.get())]
    Level(String, String),
    /// A level, and no zstd.
    #[error("{0:?}: level= needs a codec with zstd")]
    LevelOfNone(String),
    /// No option of compressed memory, or no value of it.
    #[error(
        "{0:?}: {1:?} is no option of zram; those are codec=NAME, level=N, \
        max_pool_percent=N, accept_threshold_percent=N (N from 1 \
        to 100) and, last, prio=N"
    )]
    Option(String, String),
    /// The cipher in it is none.
    #[error("{0:?}: there is no cipher {1:?}; use {CIPHER} or none")]
    Cipher(String, String),
    /// Compressed memory has no cipher.
    #[error("{0:?}: cipher= is for swap areas; compressed memory is not encrypted: leave it out")]
    CipherOfZram(String),
    /// A disk turns or does not; servers and compressed memory have no say.
    #[error(
        "{0:?}: expected rotational=yes or rotational=no, for a file or a \
        block device"
    )]
    Rotational(String),
    /// A file in the URL of a server, for a process in another directory.
    #[error("{0:?}: write absolute paths in the URL; the run is in another directory")]
    RelativeUrl(String),
    /// Only compressed memory has a codec.
    #[error("{0:?}: codec= is for zram; pages go to a file as zram packs them")]
    CodecOfFile(String),
    /// The mirror that is asked for.
    #[error("{0:?}: no mirror: {1}")]
    Mirror(String, String),
    /// The URL of an export is none.
    #[error("{0}")]
    Url(UrlError),
    /// The export cannot be used.
    #[error("{0}")]
    Nbd(NbdError),
    /// An export that a process of this machine swaps to, and the process.
    #[error(
        "{0}: {holder} swaps to it already, and both would lose pages; give each an export of its \
        own",
        holder = holder(*.1)
    )]
    Claimed(String, Option<u32>),
    /// An export of which each connection shows another content.
    #[error(
        "{0}: what one connection writes another does not read: each has a content of its own, or \
        another client writes there; configure one shared content and no other client"
    )]
    ManyContents(String),
    /// An export that is not empty.
    #[error(
        "{0}: the export does not begin with zeros, so it may hold data; give an \
        empty one"
    )]
    NotEmpty(String),
    /// Smaller than is of use.
    #[error("{0:?} is too small; the minimum is {size}", size = human(*.1))]
    TooSmall(String, u64),
    /// Larger than can be addressed.
    #[error("{0:?} is too large; the maximum is {size}", size = human(MAX_FILE_BYTES))]
    TooLarge(String),
    /// A device whose settings are others than those it has.
    #[error(
        "{0} is in use, so its settings cannot change; remove it from the list, \
        reload, and add it again (zram: only at the start)"
    )]
    Unchangeable(String),
    /// Two of a kind.
    #[error("more than one {0} device; give one")]
    Twice(&'static str),
    /// More than can be had.
    #[error("more than {MAX_AREAS} files and block devices; give fewer")]
    TooMany,
    /// Something is asked to come before compressed memory.
    #[error("{0:?} has a higher priority than zram, which always comes first; lower its prio=")]
    Order(String),
    /// A block device that cannot be used.
    #[error("{}: {}", .0.display(), unusable_block(.1))]
    Block(PathBuf, io::Error),
    /// A block device without the mark of swap space.
    #[error(
        "{path}: is not marked as swap space; if nothing on it is needed: mkswap {path}",
        path = .0.display()
    )]
    NoMark(PathBuf),
    /// The path named is no block device.
    #[error("{}: is not a block device; write file:PATH[:SIZE] for a swap file", .0.display())]
    NotBlock(PathBuf),
    /// The file exists already.
    #[error(
        "file:{}: exists already; name a directory, or a file that does not exist",
        .0.display()
    )]
    Exists(PathBuf),
    /// The file cannot be made.
    #[error("file:{path}: cannot create a swap file there: {1}", path = .0.display())]
    Create(PathBuf, io::Error),
    /// The file system has less room than that.
    #[error(
        "file:{}: too small: {} free, {} needed",
        .place.display(),
        human(*.free),
        human(*.asked)
    )]
    NoRoom {
        /// The directory that has too little.
        place: PathBuf,
        /// Bytes that are free there.
        free: u64,
        /// Bytes that were asked for.
        asked: u64,
    },
}

/// The holder of an export, as a message says it.
fn holder(pid: Option<u32>) -> String {
    match pid {
        Some(pid) if pid == std::process::id() => "this run".to_owned(),
        Some(pid) => format!("process {pid}"),
        None => "another run".to_owned(),
    }
}

fn unusable_block(error: &io::Error) -> String {
    if error.raw_os_error() == Some(libc::EBUSY) {
        "in use: mounted, or swap space of the kernel's or of another run".to_owned()
    } else {
        format!("cannot be used: {error}")
    }
}
