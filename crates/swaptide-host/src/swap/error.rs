//! Why a device is none, or cannot be had, in one line each.

use std::fmt;
use std::io;
use std::path::PathBuf;

use swaptide_ipc::MAX_AREAS;
use swaptide_store::codec::{Choice, Level};

use swaptide_ipc::{EXTENT_BYTES, MAX_EXTENTS};

use crate::nbd::NbdError;
use crate::nbd::url::UrlError;
use crate::units::{SizeError, human};

/// The smallest swap file: a few extents for each of a few processes.
pub const MIN_FILE_BYTES: u64 = 16 << 20;
/// The largest.
pub const MAX_FILE_BYTES: u64 = MAX_EXTENTS as u64 * EXTENT_BYTES;
/// The name of the cipher that areas have unless `cipher=none` is said.
pub const CIPHER: &str = "aes-256-gcm";

/// Why devices cannot be had.
#[derive(Debug)]
#[non_exhaustive]
pub enum DeviceError {
    /// Not the grammar.
    Syntax(String),
    /// The size in it is none.
    Size(String, SizeError),
    /// The priority in it is none.
    Priority(String),
    /// The codec in it is none.
    Codec(String, String),
    /// The level of zstd in it is none.
    Level(String, String),
    /// A level, and no zstd.
    LevelOfNone(String),
    /// No option of compressed memory, or no value of it.
    Option(String, String),
    /// The cipher in it is none.
    Cipher(String, String),
    /// Compressed memory has no cipher.
    CipherOfZram(String),
    /// A disk turns or does not; servers and compressed memory have no say.
    Rotational(String),
    /// Only compressed memory has a codec.
    CodecOfFile(String),
    /// The mirror that is asked for.
    Mirror(String, String),
    /// The URL of an export is none.
    Url(UrlError),
    /// The export cannot be used.
    Nbd(NbdError),
    /// An export that is not empty.
    NotEmpty(String),
    /// Smaller than is of use.
    TooSmall(String, u64),
    /// Larger than can be addressed.
    TooLarge(String),
    /// A device whose settings are others than those it has.
    Unchangeable(String),
    /// Two of a kind.
    Twice(&'static str),
    /// More than can be had.
    TooMany,
    /// Something is asked to come before compressed memory.
    Order(String),
    /// A block device that cannot be used.
    Block(PathBuf, io::Error),
    /// A block device without the mark of swap space.
    NoMark(PathBuf),
    /// What was named is no block device.
    NotBlock(PathBuf),
    /// The file exists already.
    Exists(PathBuf),
    /// The file cannot be made.
    Create(PathBuf, io::Error),
    /// The file system has less room than that.
    NoRoom {
        /// Where.
        place: PathBuf,
        /// What it has.
        free: u64,
        /// What was asked.
        asked: u64,
    },
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceError::Syntax(text) => {
                write!(
                    f,
                    "{text:?} is not a device; write zram:SIZE, file:PATH[:SIZE], /dev/BLOCK or \
                    nbd://HOST/EXPORT"
                )
            }
            DeviceError::Size(text, error) => write!(f, "{text:?}: {error}"),
            DeviceError::Priority(text) => {
                write!(f, "{text:?}: expected prio=N after the comma, N from -1 to 32767")
            }
            DeviceError::Codec(text, name) => {
                write!(
                    f,
                    "{text:?}: there is no codec {name:?}; use {}",
                    Choice::ALL.map(Choice::name).join(", ")
                )
            }
            DeviceError::Level(text, level) => {
                write!(
                    f,
                    "{text:?}: there is no level {level:?} of zstd; use 1 to {}",
                    Level::MAX.get()
                )
            }
            DeviceError::LevelOfNone(text) => {
                write!(f, "{text:?}: level= needs a codec with zstd")
            }
            DeviceError::Cipher(text, name) => {
                write!(f, "{text:?}: there is no cipher {name:?}; use {CIPHER} or none")
            }
            DeviceError::CipherOfZram(text) => {
                write!(f, "{text:?}: cipher= is for swap areas; compressed memory is not encrypted")
            }
            DeviceError::Rotational(text) => {
                write!(
                    f,
                    "{text:?}: expected rotational=yes or rotational=no, for a file or a \
                    block device"
                )
            }
            DeviceError::Option(text, option) => {
                write!(
                    f,
                    "{text:?}: {option:?} is no option of zram; those are codec=NAME, level=N, \
                    max_pool_percent=N, accept_threshold_percent=N (N from 1 \
                     to 100) and, last, prio=N"
                )
            }
            DeviceError::CodecOfFile(text) => {
                write!(f, "{text:?}: codec= is for zram; pages go to a file as zram packs them")
            }
            DeviceError::Mirror(text, why) => write!(f, "{text:?}: no mirror: {why}"),
            DeviceError::Url(error) => write!(f, "{error}"),
            DeviceError::Nbd(error) => write!(f, "{error}"),
            DeviceError::NotEmpty(url) => {
                write!(
                    f,
                    "{url}: the export does not begin with zeros, so it may hold data; give an \
                        empty one"
                )
            }
            DeviceError::TooSmall(text, least) => {
                write!(f, "{text:?} is too small; the minimum is {}", human(*least))
            }
            DeviceError::TooLarge(text) => {
                write!(f, "{text:?} is too large; the maximum is {}", human(MAX_FILE_BYTES))
            }
            DeviceError::Unchangeable(name) => write!(
                f,
                "{name} is in use, so its settings cannot change; remove it from the list, \
                    reload, and add it again (zram: only at the start)"
            ),
            DeviceError::Twice(kind) => write!(f, "more than one {kind} device; give one"),
            DeviceError::TooMany => {
                write!(f, "more than {MAX_AREAS} files and block devices; give fewer")
            }
            DeviceError::Order(name) => {
                write!(
                    f,
                    "{name:?} has a higher priority than zram; compressed memory always comes first"
                )
            }
            DeviceError::Block(path, error) if error.raw_os_error() == Some(libc::EBUSY) => {
                write!(
                    f,
                    "{}: in use: mounted, or swap space of the kernel's or of another run",
                    path.display()
                )
            }
            DeviceError::Block(path, error) => {
                write!(f, "{}: cannot be used: {error}", path.display())
            }
            DeviceError::NoMark(path) => {
                write!(
                    f,
                    "{0}: is not marked as swap space; if nothing on it is needed: mkswap \
                    {0}",
                    path.display()
                )
            }
            DeviceError::NotBlock(path) => {
                write!(
                    f,
                    "{}: is not a block device; write file:PATH[:SIZE] for a swap file",
                    path.display()
                )
            }
            DeviceError::Exists(path) => {
                write!(
                    f,
                    "file:{}: exists already; name a directory, or a file that does not exist",
                    path.display()
                )
            }
            DeviceError::Create(path, error) => {
                write!(f, "file:{}: cannot create a swap file there: {error}", path.display())
            }
            DeviceError::NoRoom { place, free, asked } => {
                write!(
                    f,
                    "file:{}: too small: {} free, {} needed",
                    place.display(),
                    human(*free),
                    human(*asked)
                )
            }
        }
    }
}

impl std::error::Error for DeviceError {}
