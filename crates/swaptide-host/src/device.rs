//! What `--swap` names, and the files and block devices behind it.
//!
//! Owns the grammar of a device, the choice of the default place, and the opening: of a swap file, unlinked before anything is
//! written to it, so that no crash leaves it behind, and sparse; of a block device, which must carry the mark of swap space (mkswap(8)) so that
//! nobody's data is overwritten by a slip, and keeps it. With direct I/O where it can be had.
//!
//! Locks: none.

use std::fmt;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::fs::{Mode, OFlags};
use serde::Serialize;
use swaptide_ipc::{EXTENT_BYTES, MAX_AREAS, MAX_EXTENTS, Segment};
use swaptide_store::codec::{Choice, Level, Scheme};
use swaptide_store::nbd::{Export, Nbd, Options};

use crate::mirror::Mirror;
use crate::nbd::url::{Url, UrlError};
use crate::nbd::{Connector, LocalDialer, NbdError};
use crate::size::{SizeError, human, parse_bytes};

/// The smallest swap file: a few extents for each of a few processes.
pub const SMALLEST_FILE: u64 = 16 << 20;
/// The smallest cap of the compressed pool.
pub const SMALLEST_POOL: u64 = 1 << 20;
/// The largest.
pub const LARGEST_FILE: u64 = MAX_EXTENTS as u64 * EXTENT_BYTES;
/// The name of the cipher that areas have unless `cipher=none` is said.
pub const CIPHER: &str = "aes-256-gcm";
/// The priority of a device for which none is given.
pub const DEFAULT_PRIORITY: i32 = -1;
/// The mark that mkswap(8) leaves at the end of a device's first page, with pages of 4096 bytes.
const SWAP_MARK: &[u8; 10] = b"SWAPSPACE2";
const SWAP_MARK_AT: u64 = 4086;

/// One `--swap`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// What it is.
    pub kind: DeviceKind,
    /// Its priority: the higher one is used first.
    pub priority: Option<i32>,
    /// Where a second copy of what it has is kept.
    pub mirror: Option<Mirror>,
    /// What lies there is not encrypted.
    pub plain: bool,
}

/// Kinds of devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Compressed memory.
    Zram {
        /// The most it may take, compressed.
        bytes: u64,
        /// How it is compressed.
        codec: Scheme,
        /// When it refuses pages.
        acceptance: Acceptance,
    },
    /// A file.
    File {
        /// A directory (the file has no name there) or the file's own path, which is made and unlinked.
        path: PathBuf,
        /// Its size, where one was given.
        bytes: Option<u64>,
    },
    /// A block device.
    Block {
        /// Its path.
        path: PathBuf,
    },
    /// An export of a network block device server.
    Nbd(Url),
}

/// When compressed memory refuses pages, which then go to what is behind it, if there is anything: zswap's parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Acceptance {
    /// `max_pool_percent`: it takes at most so many percent of the budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_pool_percent: Option<u32>,
    /// `accept_threshold_percent`: once at its bound, it takes pages again when it has fallen to so many percent of it. Where only the other one is
    /// given 90; where none is, it always takes pages and writes old ones back for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accept_threshold_percent: Option<u32>,
}

impl Acceptance {
    /// As it stands in a segment.
    pub fn of(segment: &Segment) -> Acceptance {
        let said = |word: &AtomicU32| Some(word.load(Relaxed)).filter(|percent| *percent != 0);
        Acceptance {
            max_pool_percent: said(&segment.header.pool_max_percent),
            accept_threshold_percent: said(&segment.header.pool_accept_percent),
        }
    }

    /// Writes it into a segment.
    pub fn store(&self, segment: &Segment) {
        segment.header.pool_max_percent.store(self.max_pool_percent.unwrap_or(0), Relaxed);
        segment.header.pool_accept_percent.store(self.accept_threshold_percent.unwrap_or(0), Relaxed);
    }
}

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
                write!(f, "{text:?} is not a device; write zram:SIZE, file:PATH[:SIZE], /dev/BLOCK or nbd://HOST/EXPORT")
            }
            DeviceError::Size(text, error) => write!(f, "{text:?}: {error}"),
            DeviceError::Priority(text) => write!(f, "{text:?}: after the comma comes prio=N, N from -1 to 32767"),
            DeviceError::Codec(text, name) => {
                write!(f, "{text:?}: there is no codec {name:?}; use {}", Choice::ALL.map(Choice::name).join(", "))
            }
            DeviceError::Level(text, level) => {
                write!(f, "{text:?}: there is no level {level:?} of zstd; use 1 to {}", Level::LAST.get())
            }
            DeviceError::LevelOfNone(text) => write!(f, "{text:?}: a level is for zstd, and no page gets that here"),
            DeviceError::Cipher(text, name) => write!(f, "{text:?}: there is no cipher {name:?}; use {CIPHER} or none"),
            DeviceError::CipherOfZram(text) => {
                write!(f, "{text:?}: a cipher is for what leaves memory; compressed memory has none")
            }
            DeviceError::Option(text, option) => {
                write!(
                    f,
                    "{text:?}: {option:?} is no option of zram; those are codec=NAME, level=N, max_pool_percent=N, accept_threshold_percent=N (N from 1 \
                     to 100) and, last, prio=N"
                )
            }
            DeviceError::CodecOfFile(text) => {
                write!(f, "{text:?}: a codec is chosen for zram; pages go to a file as they are there")
            }
            DeviceError::Mirror(text, why) => write!(f, "{text:?}: no mirror: {why}"),
            DeviceError::Url(error) => write!(f, "{error}"),
            DeviceError::Nbd(error) => write!(f, "{error}"),
            DeviceError::NotEmpty(url) => {
                write!(f, "{url}: the export does not begin with zeros, so somebody's data may be there; give an empty one")
            }
            DeviceError::TooSmall(text, least) => write!(f, "{text:?} is too small a device; give it at least {}", human(*least)),
            DeviceError::TooLarge(text) => write!(f, "{text:?} is too large; the most is {}", human(LARGEST_FILE)),
            DeviceError::Unchangeable(name) => write!(
                f,
                "{name} is in use, and its settings cannot change meanwhile; take it off the list first, and list it anew afterwards \
                 (zram: at the start alone)"
            ),
            DeviceError::Twice(kind) => write!(f, "more than one {kind} device; give one"),
            DeviceError::TooMany => write!(f, "more than {MAX_AREAS} files and block devices; give fewer"),
            DeviceError::Order(name) => {
                write!(f, "{name:?} has a higher priority than zram; compressed memory always comes first")
            }
            DeviceError::Block(path, error) if error.raw_os_error() == Some(libc::EBUSY) => {
                write!(f, "{}: in use: mounted, or swap space of the kernel's or of another run", path.display())
            }
            DeviceError::Block(path, error) => write!(f, "{}: cannot be used: {error}", path.display()),
            DeviceError::NoMark(path) => {
                write!(f, "{0}: is not marked as swap space; if nothing on it is needed any more: mkswap {0}", path.display())
            }
            DeviceError::NotBlock(path) => {
                write!(f, "{}: is no block device; a swap file is named as file:PATH[:SIZE]", path.display())
            }
            DeviceError::Exists(path) => {
                write!(f, "file:{}: exists already; name a directory, or a file that can be made", path.display())
            }
            DeviceError::Create(path, error) => write!(f, "file:{}: no swap file can be made there: {error}", path.display()),
            DeviceError::NoRoom { place, free, asked } => {
                write!(f, "file:{}: too small: {} free, {} needed", place.display(), human(*free), human(*asked))
            }
        }
    }
}

impl std::error::Error for DeviceError {}

/// Reads one `DEV[,OPTION=VALUE]...[,prio=N][,mirror=WHERE][,cipher=NAME]`; the last three in any order.
///
/// # Errors
/// See [`DeviceError`].
pub fn parse(text: &str) -> Result<Device, DeviceError> {
    let (mut device, mut priority, mut mirror, mut cipher) = (text, None, None, None);
    // In any order, each once; the last one first.
    let keys = [",prio=", ",mirror=", ",cipher="];
    while let Some((place, key)) = keys.into_iter().filter_map(|key| Some((device.rfind(key)?, key))).max() {
        let value = &device[place + key.len()..];
        match key {
            ",prio=" => match value.parse::<i16>() {
                Ok(number) if number >= -1 && priority.is_none() => priority = Some(number.into()),
                _ => return Err(DeviceError::Priority(text.to_owned())),
            },
            ",mirror=" if mirror.is_none() => mirror = Some(Mirror::parse(text, value)?),
            ",mirror=" => return Err(DeviceError::Mirror(text.to_owned(), "it is named twice".into())),
            _ if cipher.is_none() && matches!(value, CIPHER | "none") => cipher = Some(value),
            _ => return Err(DeviceError::Cipher(text.to_owned(), value.to_owned())),
        }
        device = &device[..place];
    }
    if cipher.is_some() && device.starts_with("zram:") {
        return Err(DeviceError::CipherOfZram(text.to_owned()));
    }
    let size = |size: &str| parse_bytes(size).map_err(|error| DeviceError::Size(text.to_owned(), error));
    let kind = if let Some(rest) = device.strip_prefix("zram:") {
        let mut parts = rest.split(',');
        let bytes = at_least(text, size(parts.next().unwrap_or_default())?, SMALLEST_POOL)?;
        let (mut choice, mut level, mut acceptance) = (Choice::default(), None, Acceptance::default());
        for part in parts {
            let wrong = || DeviceError::Option(text.to_owned(), part.to_owned());
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let percent = || value.parse().ok().filter(|percent| (1..=100).contains(percent)).ok_or_else(wrong);
            match name {
                "codec" => {
                    let found = Choice::ALL.into_iter().find(|choice| choice.name() == value);
                    choice = found.ok_or_else(|| DeviceError::Codec(text.to_owned(), value.to_owned()))?;
                }
                "level" => {
                    let found = value.parse().ok().and_then(Level::new);
                    level = Some(found.ok_or_else(|| DeviceError::Level(text.to_owned(), value.to_owned()))?);
                }
                "max_pool_percent" => acceptance.max_pool_percent = Some(percent()?),
                "accept_threshold_percent" => acceptance.accept_threshold_percent = Some(percent()?),
                _ => return Err(wrong()),
            }
        }
        if level.is_some() && !choice.has_zstd() {
            return Err(DeviceError::LevelOfNone(text.to_owned()));
        }
        DeviceKind::Zram { bytes, codec: Scheme { choice, level: level.unwrap_or_default() }, acceptance }
    } else if device
        .strip_prefix("file:")
        .and_then(|rest| rest.rsplit_once(",codec="))
        .is_some_and(|(_, tail)| !tail.contains('/'))
    {
        return Err(DeviceError::CodecOfFile(text.to_owned()));
    } else if let Some(rest) = device.strip_prefix("file:") {
        match rest.rsplit_once(':') {
            _ if rest.is_empty() => return Err(DeviceError::Syntax(text.to_owned())),
            // Colons may be in a path: what follows the last one is a size unless a path goes on there.
            Some(("", tail)) if !tail.contains('/') => return Err(DeviceError::Syntax(text.to_owned())),
            Some((path, tail)) if !tail.contains('/') => {
                let bytes = at_least(text, size(tail)?, SMALLEST_FILE)?;
                if bytes > LARGEST_FILE {
                    return Err(DeviceError::TooLarge(text.to_owned()));
                }
                DeviceKind::File { path: PathBuf::from(path), bytes: Some(bytes) }
            }
            _ => DeviceKind::File { path: PathBuf::from(rest), bytes: None },
        }
    } else if Url::is_meant(device) {
        DeviceKind::Nbd(device.parse().map_err(DeviceError::Url)?)
    } else if device.starts_with('/') {
        DeviceKind::Block { path: PathBuf::from(device) }
    } else {
        return Err(DeviceError::Syntax(text.to_owned()));
    };
    if mirror.is_some() && !matches!(kind, DeviceKind::Nbd(_)) {
        return Err(DeviceError::Mirror(text.to_owned(), "only what lies on a server needs one".into()));
    }
    Ok(Device { kind, priority, mirror, plain: cipher == Some("none") })
}

/// A device with an absolute path, for somebody in another directory.
///
/// # Errors
/// Those of [`parse`], and why the current directory is not known.
pub fn absolute(text: &str) -> Result<String, DeviceError> {
    parse(text)?;
    let here = |rest: &str| match std::env::current_dir() {
        Ok(here) => Ok(here.display().to_string()),
        Err(error) => Err(DeviceError::Create(rest.into(), error)),
    };
    match text.strip_prefix("file:") {
        Some(rest) if !rest.starts_with('/') => Ok(format!("file:{}/{rest}", here(rest)?)),
        _ => match text.split_once(",mirror=") {
            Some((device, place)) if place.contains('/') && !place.starts_with('/') => {
                Ok(format!("{device},mirror={}/{place}", here(place)?))
            }
            _ => Ok(text.to_owned()),
        },
    }
}

fn at_least(text: &str, bytes: u64, least: u64) -> Result<u64, DeviceError> {
    if bytes < least { Err(DeviceError::TooSmall(text.to_owned(), least)) } else { Ok(bytes) }
}

/// The swap space of a run.
#[derive(Debug)]
pub struct SwapSpace {
    /// What is beyond compressed memory.
    pub beyond: Vec<Backing>,
    /// Upper bound of the compressed pool in bytes; 0: a share of each process's limit.
    pub pool_cap: u64,
    /// How compressed memory is compressed.
    pub codec: Scheme,
    /// When it refuses pages.
    pub acceptance: Acceptance,
}

/// What a [`Backing`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackingKind {
    /// A file without a name.
    File,
    /// A block device.
    Block,
    /// An export of an NBD server.
    Nbd,
}

/// How a [`Backing`] is reached.
pub enum Medium {
    /// Open for reading and writing.
    File(File),
    /// Connections are made to it, one or more for each process.
    Nbd(Arc<Connector>, Export),
}

impl fmt::Debug for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Medium::File(file) => write!(f, "{file:?}"),
            Medium::Nbd(connector, _) => write!(f, "{}", connector.url()),
        }
    }
}

/// A device beyond compressed memory: open, and nobody else's.
#[derive(Debug)]
pub struct Backing {
    /// What people call it.
    pub name: String,
    /// What it is.
    pub kind: BackingKind,
    /// Where it is.
    pub place: PathBuf,
    /// How it is reached.
    pub medium: Medium,
    /// Its extents.
    pub extents: u32,
    /// Where the first of them begins, in bytes.
    pub base_bytes: u64,
    /// The higher one is used first.
    pub priority: i32,
    /// Whether it bypasses the page cache.
    pub direct_io: bool,
    /// A file for a second copy of all that is there, as large.
    pub mirror: Option<Box<Backing>>,
    /// What lies there is not encrypted.
    pub plain: bool,
}

/// Opens what was asked for, or the default.
///
/// # Errors
/// See [`DeviceError`].
pub fn open(devices: &[Device], budget: u64) -> Result<SwapSpace, DeviceError> {
    let mut pool: Option<(u64, Option<i32>)> = None;
    let (mut chosen, mut refuses) = (Scheme::default(), Acceptance::default());
    for device in devices {
        if let DeviceKind::Zram { bytes, codec, acceptance } = &device.kind {
            if pool.is_some() {
                return Err(DeviceError::Twice("zram"));
            }
            pool = Some((*bytes, device.priority));
            (chosen, refuses) = (*codec, *acceptance);
        }
    }
    let beyond: Vec<&Device> = devices.iter().filter(|device| !matches!(device.kind, DeviceKind::Zram { .. })).collect();
    if beyond.iter().map(|device| 1 + usize::from(device.mirror.is_some())).sum::<usize>() > MAX_AREAS {
        return Err(DeviceError::TooMany);
    }
    if let Some((_, Some(zram))) = pool
        && let Some(first) = beyond.iter().find(|device| device.priority.is_some_and(|priority| priority > zram))
    {
        return Err(DeviceError::Order(first.name()));
    }
    let pool_cap = pool.map_or(0, |(bytes, _)| bytes);
    let beyond = match (beyond.is_empty(), pool) {
        (false, _) => beyond.into_iter().map(|device| open_beyond(device, budget)).collect::<Result<_, _>>()?,
        (true, Some(_)) => Vec::new(),
        (true, None) => vec![open_default(budget)?],
    };
    Ok(SwapSpace { beyond, pool_cap, codec: chosen, acceptance: refuses })
}

impl Device {
    /// What people call it: as it was given, without size and priority.
    pub fn name(&self) -> String {
        match &self.kind {
            DeviceKind::Zram { .. } => "zram".into(),
            DeviceKind::File { path, .. } => format!("file:{}", path.display()),
            DeviceKind::Block { path } => path.display().to_string(),
            DeviceKind::Nbd(url) => url.to_string(),
        }
    }
}

/// Opens a device beyond compressed memory. A file for which no size is given may grow to 16 times `budget`.
///
/// # Errors
/// See [`DeviceError`]; compressed memory is none that can be added ([`DeviceError::Twice`]).
pub fn open_beyond(device: &Device, budget: u64) -> Result<Backing, DeviceError> {
    let mut backing = match &device.kind {
        DeviceKind::Zram { .. } => return Err(DeviceError::Twice("zram")),
        DeviceKind::File { path, bytes } => open_file(path, *bytes, budget)?,
        DeviceKind::Block { path } => open_block(path)?,
        DeviceKind::Nbd(url) => open_nbd(url)?,
    };
    backing.name = device.name();
    backing.priority = device.priority.unwrap_or(DEFAULT_PRIORITY);
    backing.plain = device.plain;
    match &device.mirror {
        Some(Mirror::Place { path, bytes }) => add_mirror(&mut backing, path, *bytes)?,
        Some(Mirror::Tier(name)) => {
            return Err(DeviceError::Mirror(backing.name, format!("nobody knows where tier {name} is; name a directory")));
        }
        None => {}
    }
    Ok(backing)
}

/// Makes the file for a second copy of what will be on an area, which then has no more than fits there.
fn add_mirror(backing: &mut Backing, path: &Path, bytes: Option<u64>) -> Result<(), DeviceError> {
    let all = u64::from(backing.extents) * EXTENT_BYTES;
    let place = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    let free = free_space(place).map_err(|error| DeviceError::Create(path.to_owned(), error))?;
    let bytes = bytes.unwrap_or(free / 10 * 9).min(all);
    let mut mirror = open_file(path, Some(bytes), 0)?;
    mirror.name = format!("mirror:{}", path.display());
    mirror.priority = backing.priority;
    backing.extents = backing.extents.min(mirror.extents);
    backing.mirror = Some(Box::new(mirror));
    Ok(())
}

/// Where the default file goes: the first of `$TMPDIR` and `/var/tmp` that is no file system in memory, for memory is what is short.
pub fn default_places() -> Vec<PathBuf> {
    let named = std::env::var_os("TMPDIR").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    let mut places: Vec<PathBuf> = named.into_iter().chain(["/var/tmp".into(), "/tmp".into()]).collect();
    places.sort_by_key(|place| in_memory(place));
    places
}

/// Whether files there are in memory.
pub(crate) fn in_memory(place: &Path) -> bool {
    const TMPFS: u32 = 0x0102_1994;
    const RAMFS: u32 = 0x8584_58f6;
    rustix::fs::statfs(place).is_ok_and(|fs| matches!(fs.f_type as u32, TMPFS | RAMFS))
}

fn open_default(budget: u64) -> Result<Backing, DeviceError> {
    let mut first = None;
    for place in default_places() {
        match open_file(&place, None, budget) {
            Ok(file) => return Ok(file),
            Err(error) => drop(first.get_or_insert(error)),
        }
    }
    Err(first.unwrap_or_else(|| DeviceError::Create("/var/tmp".into(), io::ErrorKind::NotFound.into())))
}

/// Bytes that whoever writes to `place` without privilege may still take.
pub fn free_space(place: &Path) -> io::Result<u64> {
    let fs = rustix::fs::statvfs(place)?;
    Ok(fs.f_bavail.saturating_mul(fs.f_frsize))
}

fn open_file(path: &Path, asked: Option<u64>, budget: u64) -> Result<Backing, DeviceError> {
    let create = |error: io::Error| DeviceError::Create(path.to_owned(), error);
    let place = match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => path,
        Ok(_) => return Err(DeviceError::Exists(path.to_owned())),
        Err(_) => path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")),
    };
    let free = free_space(place).map_err(create)?;
    let bytes = match asked {
        Some(bytes) if bytes > free => return Err(DeviceError::NoRoom { place: path.to_owned(), free, asked: bytes }),
        Some(bytes) => bytes,
        // The file is sparse: its size is what it may grow to.
        None => budget.saturating_mul(16).clamp(4 << 30, 64 << 30).min(free / 10 * 9),
    };
    if bytes < SMALLEST_FILE {
        return Err(DeviceError::NoRoom { place: path.to_owned(), free, asked: SMALLEST_FILE });
    }
    let (file, direct_io) = if place == path { unnamed(path) } else { named(path) }.map_err(create)?;
    let extents = (bytes / EXTENT_BYTES) as u32;
    file.set_len(u64::from(extents) * EXTENT_BYTES).map_err(create)?;
    Ok(Backing {
        name: format!("file:{}", path.display()),
        kind: BackingKind::File,
        place: place.to_owned(),
        medium: Medium::File(file),
        extents,
        base_bytes: 0,
        priority: DEFAULT_PRIORITY,
        direct_io,
        mirror: None,
        plain: false,
    })
}

/// Opens a block device. Its first extent's worth stays as it is: the mark is there.
fn open_block(path: &Path) -> Result<Backing, DeviceError> {
    let failed = |error: io::Error| DeviceError::Block(path.to_owned(), error);
    if !std::fs::metadata(path).map_err(failed)?.file_type().is_block_device() {
        return Err(DeviceError::NotBlock(path.to_owned()));
    }
    // Exclusive: what is mounted, or somebody's swap space, is refused.
    let mut file = File::options().read(true).write(true).custom_flags(OFlags::EXCL.bits() as i32).open(path).map_err(failed)?;
    let mut mark = [0; SWAP_MARK.len()];
    file.read_exact_at(&mut mark, SWAP_MARK_AT).map_err(failed)?;
    if mark != *SWAP_MARK {
        return Err(DeviceError::NoMark(path.to_owned()));
    }
    let bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
    if bytes < SMALLEST_FILE {
        return Err(DeviceError::TooSmall(path.display().to_string(), SMALLEST_FILE));
    }
    let extents = (bytes / EXTENT_BYTES - 1).min(MAX_EXTENTS as u64) as u32;
    Ok(Backing {
        name: path.display().to_string(),
        kind: BackingKind::Block,
        place: path.to_owned(),
        medium: Medium::File(file),
        extents,
        base_bytes: EXTENT_BYTES,
        priority: DEFAULT_PRIORITY,
        direct_io: true,
        mirror: None,
        plain: false,
    })
}

/// Connects to an export. Its first extent's worth stays as it is: what is there tells that nobody needs the rest.
fn open_nbd(url: &Url) -> Result<Backing, DeviceError> {
    const LOOKED_AT: usize = 128 << 10;
    let connector = Arc::new(Connector::new(url.clone()).map_err(DeviceError::Nbd)?);
    let (connection, export) = connector.connect().map_err(DeviceError::Nbd)?;
    if export.size < SMALLEST_FILE {
        return Err(DeviceError::TooSmall(url.to_string(), SMALLEST_FILE));
    }
    let dialer = LocalDialer::new(Connector::new(url.clone()).map_err(DeviceError::Nbd)?, export);
    let mut start = vec![0; LOOKED_AT];
    let read = Nbd::new(export, Options::default(), Box::new(dialer), vec![connection]).read_at(0, &mut start);
    match read {
        Ok(LOOKED_AT) if start.iter().all(|byte| *byte == 0) || start[SWAP_MARK_AT as usize..].starts_with(SWAP_MARK) => {}
        Ok(LOOKED_AT) => return Err(DeviceError::NotEmpty(url.to_string())),
        Ok(_) => return Err(DeviceError::Create(url.to_string().into(), io::ErrorKind::UnexpectedEof.into())),
        Err(errno) => return Err(DeviceError::Create(url.to_string().into(), errno.into())),
    }
    Ok(Backing {
        name: url.to_string(),
        kind: BackingKind::Nbd,
        place: url.to_string().into(),
        extents: (export.size / EXTENT_BYTES - 1).min(MAX_EXTENTS as u64) as u32,
        medium: Medium::Nbd(connector, export),
        base_bytes: EXTENT_BYTES,
        priority: DEFAULT_PRIORITY,
        direct_io: true,
        mirror: None,
        plain: false,
    })
}

/// A file without a name in a directory.
fn unnamed(directory: &Path) -> io::Result<(File, bool)> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let open = |flags| rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR);
    if let Ok(fd) = open(flags | OFlags::DIRECT) {
        return Ok((File::from(fd), true));
    }
    match open(flags) {
        Ok(fd) => Ok((File::from(fd), false)),
        // Not every file system knows files without names.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR | rustix::io::Errno::INVAL) => {
            let mut random = [0u8; 8];
            rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
            named(&directory.join(format!(".swaptide-{:016x}", u64::from_le_bytes(random))))
        }
        Err(error) => Err(error.into()),
    }
}

/// A new file, whose name is removed at once.
fn named(path: &Path) -> io::Result<(File, bool)> {
    let open = |flags: OFlags| {
        File::options().read(true).write(true).create_new(true).mode(0o600).custom_flags(flags.bits() as i32).open(path)
    };
    let (file, direct) = match open(OFlags::DIRECT) {
        Ok(file) => (file, true),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            // The refusal may come after the file was made.
            let _ = std::fs::remove_file(path);
            (open(OFlags::empty())?, false)
        }
        Err(error) => return Err(error),
    };
    std::fs::remove_file(path)?;
    Ok((file, direct))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_cipher_can_be_switched_off_for_what_leaves_memory() {
        for (text, plain, priority) in [
            ("file:/var/tmp", false, None),
            ("file:/var/tmp,cipher=none", true, None),
            ("file:/var/tmp:1G,cipher=none,prio=7", true, Some(7)),
            ("/dev/sdb2,prio=7,cipher=none", true, Some(7)),
            ("nbd://host/x?connections=2,cipher=aes-256-gcm", false, None),
        ] {
            let device = parse(text).expect(text);
            assert_eq!((device.plain, device.priority), (plain, priority), "{text}");
            assert!(!device.name().contains("cipher"), "{text}");
        }
        assert!(matches!(parse("file:/a,cipher=rot13"), Err(DeviceError::Cipher(..))));
        assert!(matches!(parse("file:/a,cipher=none,cipher=none"), Err(DeviceError::Cipher(..))));
        assert!(matches!(parse("zram:1G,cipher=none"), Err(DeviceError::CipherOfZram(_))));
        assert!(matches!(parse("file:/a,prio=1,prio=2"), Err(DeviceError::Priority(_))));
    }

    #[test]
    fn devices_are_read_as_documented() {
        let acceptance = Acceptance::default();
        let zram = DeviceKind::Zram { bytes: 1 << 30, codec: Scheme::default(), acceptance };
        assert_eq!(parse("zram:1G").expect("zram"), Device { kind: zram.clone(), priority: None, mirror: None, plain: false });
        assert_eq!(
            parse("zram:1G,prio=-1").expect("zram"),
            Device { kind: zram, priority: Some(-1), mirror: None, plain: false }
        );
        let levels = Level::new(3).map(|level| (Scheme { choice: Choice::Zstd, level }, "zstd,level=3"));
        let schemes = Choice::ALL.map(|choice| (choice.into(), choice.name())).into_iter().chain(levels);
        for (codec, name) in schemes {
            let kind = DeviceKind::Zram { bytes: 1 << 30, codec, acceptance };
            assert_eq!(
                parse(&format!("zram:1G,codec={name}")).expect("codec"),
                Device { kind: kind.clone(), priority: None, mirror: None, plain: false }
            );
            assert_eq!(
                parse(&format!("zram:1G,codec={name},prio=3")).expect("codec"),
                Device { kind, priority: Some(3), mirror: None, plain: false }
            );
        }
        let acceptance = Acceptance { max_pool_percent: Some(20), accept_threshold_percent: Some(100) };
        let refusing = DeviceKind::Zram { bytes: 1 << 30, codec: Choice::Lz4.into(), acceptance };
        for order in [
            "codec=lz4,max_pool_percent=20,accept_threshold_percent=100",
            "accept_threshold_percent=100,codec=lz4,max_pool_percent=20",
        ] {
            let device = parse(&format!("zram:1G,{order},prio=7")).expect("options");
            assert_eq!(device, Device { kind: refusing.clone(), priority: Some(7), mirror: None, plain: false });
        }
        let file = |path: &str, bytes| DeviceKind::File { path: PathBuf::from(path), bytes };
        assert_eq!(parse("file:/var/tmp").expect("file").kind, file("/var/tmp", None));
        assert_eq!(parse("file:/var/tmp:2G").expect("file").kind, file("/var/tmp", Some(2 << 30)));
        assert_eq!(parse("file:/a:b/c").expect("file").kind, file("/a:b/c", None));
        assert_eq!(parse("file:/a:b/c:64M").expect("file").kind, file("/a:b/c", Some(64 << 20)));
    }

    #[test]
    fn what_cannot_be_a_device_is_refused_with_the_reason() {
        for (text, part) in [
            ("", "not a device"),
            ("zram", "not a device"),
            ("zram:", "not a size"),
            ("zram:12Q", "not a size"),
            ("zram:50%", "share of nothing"),
            ("zram:1K", "too small"),
            ("file:", "not a device"),
            ("file:/x:1M", "too small"),
            ("file:/x:9T", "too large"),
            ("file:/x:lots", "not a size"),
            ("zram:1G,prio=high", "prio=N"),
            ("zram:1G,codec=lzo-rle", "there is no codec \"lzo-rle\"; use lz4+zstd, lz4, zstd, snappy"),
            ("zram:1G,codec=", "there is no codec"),
            ("zram:1G,codec=zstd,level=10", "there is no level \"10\" of zstd; use 1 to 9"),
            ("zram:1G,level=0", "no level"),
            ("zram:1G,level=", "no level"),
            ("zram:1G,level=3,codec=lz4", "a level is for zstd"),
            ("zram:1G,level=3,codec=snappy", "a level is for zstd"),
            ("zram:1G,levels=3", "no option of zram"),
            ("zram:1G,max_pool_percent=0", "no option of zram"),
            ("zram:1G,max_pool_percent=101", "no option of zram"),
            ("zram:1G,accept_threshold_percent", "no option of zram"),
            ("zram:1G,accept_threshold_percent=many", "no option of zram"),
            ("file:/x,codec=zstd", "chosen for zram"),
            ("file:/x:1G,codec=zstd", "chosen for zram"),
            ("zram:1G,prio=-2", "from -1 to 32767"),
            ("nb\n://host,mirror=", "no mirror"),
            ("nbd://", "host"),
            ("nbd+unix:///x", "socket=PATH"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
            assert!(!error.contains('\n'));
        }
    }

    #[test]
    fn one_compressed_memory_which_comes_first_and_any_number_of_others() {
        let devices = |texts: &[&str]| -> Vec<Device> { texts.iter().map(|t| parse(t).expect("device")).collect() };
        let refused = |texts: &[&str]| open(&devices(texts), 1 << 30).expect_err("refused").to_string();
        assert!(refused(&["zram:1G", "zram:1G"]).contains("more than one zram"));
        assert!(refused(&["zram:1G,prio=1", "file:/tmp,prio=2"]).contains("\"file:/tmp\" has a higher priority"));
        assert!(refused(&["file:/tmp:16M"; 17]).contains("more than 16"));
        let two = open(&devices(&["file:/var/tmp:16M,prio=3", "file:/tmp:32M"]), 1 << 30).expect("two files");
        let told: Vec<_> = two.beyond.iter().map(|b| (b.name.as_str(), b.priority, b.extents)).collect();
        assert_eq!(told, [("file:/var/tmp", 3, 8), ("file:/tmp", -1, 16)]);
        let only_memory = open(&devices(&["zram:1G"]), 1 << 30).expect("zram");
        assert!(only_memory.beyond.is_empty() && only_memory.pool_cap == 1 << 30);
    }

    #[test]
    fn the_file_has_no_name_takes_no_space_and_can_be_written() {
        let scratch = Scratch::new("device");
        for path in [scratch.root().to_owned(), scratch.path("swap")] {
            let space = open(
                &[Device { kind: DeviceKind::File { path, bytes: Some(64 << 20) }, priority: None, mirror: None, plain: false }],
                1 << 30,
            )
            .expect("file");
            let swap = &space.beyond[0];
            assert_eq!(swap.extents, 32);
            let Medium::File(file) = &swap.medium else { panic!("no file") };
            let metadata = file.metadata().expect("metadata");
            assert_eq!((metadata.nlink(), metadata.len(), metadata.blocks()), (0, 64 << 20, 0));
            // Direct I/O wants aligned memory: a page of this process's own.
            let page = swaptide_sys::mem::Mapping::reserve(4096).expect("page");
            // SAFETY: the mapping is 4096 bytes long and readable, and nothing else refers to it.
            let bytes = unsafe { std::slice::from_raw_parts(page.as_ptr(), 4096) };
            let Medium::File(file) = &swap.medium else { panic!("no file") };
            assert_eq!(file.write_at(bytes, 4096).expect("write"), 4096);
        }
        assert_eq!(std::fs::read_dir(scratch.root()).expect("list").count(), 0, "nothing is left behind");
    }

    #[test]
    fn what_is_no_block_device_or_not_marked_is_refused() {
        let refused = |path: &str| {
            open(&[Device { kind: DeviceKind::Block { path: path.into() }, priority: None, mirror: None, plain: false }], 1 << 30)
                .expect_err("refused")
                .to_string()
        };
        assert!(refused("/dev/null").contains("no block device"));
        assert!(refused("/no/such/device").contains("cannot be used"));
    }

    #[test]
    fn a_place_without_room_or_right_and_an_existing_file_are_refused() {
        let scratch = Scratch::new("refused");
        let taken = scratch.path("taken");
        std::fs::write(&taken, "mine").expect("write");
        let refused = |path: PathBuf, bytes| {
            open(&[Device { kind: DeviceKind::File { path, bytes }, priority: None, mirror: None, plain: false }], 1 << 30)
                .expect_err("refused")
                .to_string()
        };
        assert!(refused(taken.clone(), None).contains("exists already"));
        assert_eq!(std::fs::read_to_string(taken).expect("read"), "mine");
        assert!(refused(scratch.path("no/such/directory"), None).contains("no swap file can be made"));
        assert!(refused(PathBuf::from("/proc"), None).contains("/proc"));
        let free = free_space(scratch.root()).expect("statvfs");
        if free < LARGEST_FILE {
            assert!(refused(scratch.root().to_owned(), Some(LARGEST_FILE)).contains("too small"));
        }
    }
}
