//! What `--swap` names, and the files and block devices behind it.
//!
//! Owns the grammar of a device, the choice of the default place, and the opening: of a swap file,
//! unlinked before anything is written to it, so that no crash leaves it behind, and sparse; of a
//! block device, which must carry the mark of swap space (mkswap(8)) so that no other data is
//! overwritten by mistake, and keeps it. With direct I/O where it can be had.
//!
//! Locks: none.

use std::fmt;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use serde::Serialize;
use swaptide_ipc::{EXTENT_BYTES, MAX_AREAS, MAX_EXTENTS, Segment};
use swaptide_store::PAGE_SIZE;
use swaptide_store::codec::{Choice, Level, Scheme};
use swaptide_store::nbd::{Certainty, Export, Nbd, Options};
use swaptide_sys::Errno;

pub use super::error::{CIPHER, DeviceError, MAX_FILE_BYTES, MIN_FILE_BYTES};
use crate::nbd::url::Url;
use crate::nbd::{Connector, LocalDialer};
use crate::swap::claims::ExportClaim;
use crate::swap::mirror_option::Mirror;
use crate::swap::rotational;
use crate::units::parse_bytes;

/// The smallest cap of the compressed pool.
pub const MIN_POOL_BYTES: u64 = 1 << 20;
/// The priority of a device for which none is given.
pub(crate) const DEFAULT_PRIORITY: i32 = -1;
/// The mark that mkswap(8) leaves at the end of a device's first page, with pages of 4096 bytes.
const SWAP_MARK: &[u8; 10] = b"SWAPSPACE2";
const SWAP_MARK_AT: u64 = 4086;

/// One `--swap` option, or one entry of `swap` in a configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The kind of device: compressed memory, file, block device, export.
    pub kind: DeviceKind,
    /// Its priority: the higher one is used first.
    pub priority: Option<i32>,
    /// The place of a second copy of its data.
    pub mirror: Option<Mirror>,
    /// Its data is not encrypted.
    pub plain: bool,
    /// Whether a read begins with a seek; without it, what the kernel says of the disk.
    pub rotational: Option<bool>,
}

impl Device {
    /// Makes its paths absolute, for a process that leaves the directory that it was started in.
    ///
    /// # Errors
    /// Why that directory is not known.
    pub(crate) fn leave_directory(&mut self) -> io::Result<()> {
        let mut paths: Vec<&mut PathBuf> = match &mut self.kind {
            DeviceKind::File { path, .. } | DeviceKind::Block { path } => vec![path],
            DeviceKind::Nbd(url) => url.paths(),
            DeviceKind::Zram { .. } => Vec::new(),
        };
        if let Some(Mirror::Place { path, .. }) = &mut self.mirror {
            paths.push(path);
        }
        for path in paths {
            *path = std::path::absolute(&path)?;
        }
        Ok(())
    }
}

/// The kind of a device, with the settings that only this kind has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Compressed memory (`zram:SIZE`).
    Zram {
        /// The most it may take, compressed.
        bytes: u64,
        /// Its compression.
        codec: Scheme,
        /// When it refuses pages.
        acceptance: PoolAcceptance,
    },
    /// A swap file (`file:PATH`).
    File {
        /// A directory (the file has no name there) or the file's own path, which is made and
        /// unlinked.
        path: PathBuf,
        /// Its size, where one was given.
        bytes: Option<u64>,
    },
    /// A block device that mkswap has marked.
    Block {
        /// Path of its device node.
        path: PathBuf,
    },
    /// An export of a network block device server.
    Nbd(Url),
}

/// When compressed memory refuses pages, which then go to what is behind it, if there is anything:
/// zswap's parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolAcceptance {
    /// `max_pool_percent`: it takes at most this percentage of the budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_pool_percent: Option<u32>,
    /// `accept_threshold_percent`: once at its bound, it takes pages again when it has fallen to
    /// this percentage of it. Where only the other one is given 90; where none is, it always takes
    /// pages and writes old ones back for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accept_threshold_percent: Option<u32>,
}

impl PoolAcceptance {
    /// As it stands in a segment.
    pub fn of(segment: &Segment) -> PoolAcceptance {
        let said = |word: &AtomicU32| Some(word.load(Relaxed)).filter(|percent| *percent != 0);
        PoolAcceptance {
            max_pool_percent: said(&segment.header.pool.max_percent),
            accept_threshold_percent: said(&segment.header.pool.accept_percent),
        }
    }

    /// Writes it into a segment.
    pub fn store(&self, segment: &Segment) {
        segment.header.pool.max_percent.store(self.max_pool_percent.unwrap_or(0), Relaxed);
        segment
            .header
            .pool
            .accept_percent
            .store(self.accept_threshold_percent.unwrap_or(0), Relaxed);
    }
}

/// Reads one `DEV[,OPTION=VALUE]...[,prio=N][,mirror=WHERE][,cipher=NAME][,rotational=yes|no]`; the
/// last four in any order.
///
/// # Errors
/// See [`DeviceError`].
pub fn parse(text: &str) -> Result<Device, DeviceError> {
    let (mut device, mut priority, mut mirror, mut cipher, mut rotational) =
        (text, None, None, None, None);
    // In any order, each once; the last one first.
    let keys = [",prio=", ",mirror=", ",cipher=", ",rotational="];
    while let Some((place, key)) =
        keys.into_iter().filter_map(|key| Some((device.rfind(key)?, key))).max()
    {
        let value = &device[place + key.len()..];
        match key {
            ",prio=" => match value.parse::<i16>() {
                Ok(number) if number >= -1 && priority.is_none() => priority = Some(number.into()),
                _ => return Err(DeviceError::Priority(text.to_owned())),
            },
            ",mirror=" if mirror.is_none() => mirror = Some(Mirror::parse(text, value)?),
            ",mirror=" => {
                return Err(DeviceError::Mirror(text.to_owned(), "it is named twice".into()));
            }
            ",rotational=" if rotational.is_none() && matches!(value, "yes" | "no") => {
                rotational = Some(value == "yes")
            }
            ",rotational=" => return Err(DeviceError::Rotational(text.to_owned())),
            _ if cipher.is_none() && matches!(value, CIPHER | "none") => cipher = Some(value),
            _ => return Err(DeviceError::Cipher(text.to_owned(), value.to_owned())),
        }
        device = &device[..place];
    }
    if cipher.is_some() && device.starts_with("zram:") {
        return Err(DeviceError::CipherOfZram(text.to_owned()));
    }
    let kind = parse_kind(text, device)?;
    if mirror.is_some() && !matches!(kind, DeviceKind::Nbd(_)) {
        return Err(DeviceError::Mirror(text.to_owned(), "only NBD exports have one".into()));
    }
    if rotational.is_some() && !matches!(kind, DeviceKind::File { .. } | DeviceKind::Block { .. }) {
        return Err(DeviceError::Rotational(text.to_owned()));
    }
    Ok(Device { kind, priority, mirror, plain: cipher == Some("none"), rotational })
}

/// The device without what any device may have.
fn parse_kind(text: &str, device: &str) -> Result<DeviceKind, DeviceError> {
    if let Some(rest) = device.strip_prefix("zram:") {
        return parse_zram(text, rest);
    }
    if let Some(rest) = device.strip_prefix("file:") {
        return parse_file(text, rest);
    }
    if Url::is_meant(device) {
        return device.parse().map(DeviceKind::Nbd).map_err(DeviceError::Url);
    }
    if device.starts_with('/') {
        return Ok(DeviceKind::Block { path: PathBuf::from(device) });
    }
    Err(DeviceError::Syntax(text.to_owned()))
}

fn parse_zram(text: &str, rest: &str) -> Result<DeviceKind, DeviceError> {
    let mut parts = rest.split(',');
    let bytes =
        at_least(text, parse_size(text, parts.next().unwrap_or_default())?, MIN_POOL_BYTES)?;
    let (mut choice, mut level, mut acceptance) =
        (Choice::default(), None, PoolAcceptance::default());
    for part in parts {
        let wrong = || DeviceError::Option(text.to_owned(), part.to_owned());
        let (name, value) = part.split_once('=').ok_or_else(wrong)?;
        let percent =
            || value.parse().ok().filter(|percent| (1..=100).contains(percent)).ok_or_else(wrong);
        match name {
            "codec" => {
                let found = Choice::ALL.into_iter().find(|choice| choice.name() == value);
                choice =
                    found.ok_or_else(|| DeviceError::Codec(text.to_owned(), value.to_owned()))?;
            }
            "level" => {
                let found = value.parse().ok().and_then(Level::new);
                level = Some(
                    found.ok_or_else(|| DeviceError::Level(text.to_owned(), value.to_owned()))?,
                );
            }
            "max_pool_percent" => acceptance.max_pool_percent = Some(percent()?),
            "accept_threshold_percent" => acceptance.accept_threshold_percent = Some(percent()?),
            _ => return Err(wrong()),
        }
    }
    if level.is_some() && !choice.has_zstd() {
        return Err(DeviceError::LevelOfNone(text.to_owned()));
    }
    Ok(DeviceKind::Zram {
        bytes,
        codec: Scheme { choice, level: level.unwrap_or_default() },
        acceptance,
    })
}

fn parse_file(text: &str, rest: &str) -> Result<DeviceKind, DeviceError> {
    if rest.rsplit_once(",codec=").is_some_and(|(_, tail)| !tail.contains('/')) {
        return Err(DeviceError::CodecOfFile(text.to_owned()));
    }
    match rest.rsplit_once(':') {
        _ if rest.is_empty() => Err(DeviceError::Syntax(text.to_owned())),
        // Colons may be in a path: what follows the last one is a size unless a path continues
        // there.
        Some(("", tail)) if !tail.contains('/') => Err(DeviceError::Syntax(text.to_owned())),
        Some((path, tail)) if !tail.contains('/') => {
            let bytes = at_least(text, parse_size(text, tail)?, MIN_FILE_BYTES)?;
            if bytes > MAX_FILE_BYTES {
                return Err(DeviceError::TooLarge(text.to_owned()));
            }
            Ok(DeviceKind::File { path: PathBuf::from(path), bytes: Some(bytes) })
        }
        _ => Ok(DeviceKind::File { path: PathBuf::from(rest), bytes: None }),
    }
}

fn parse_size(text: &str, size: &str) -> Result<u64, DeviceError> {
    parse_bytes(size).map_err(|error| DeviceError::Size(text.to_owned(), error))
}

/// A device with an absolute path, for a process in another directory.
///
/// # Errors
/// Those of [`parse`], a relative path within a URL, and why the current directory is not known.
pub fn absolute(text: &str) -> Result<String, DeviceError> {
    let mut device = parse(text)?;
    if let DeviceKind::Nbd(url) = &mut device.kind
        && url.paths().iter().any(|path| path.is_relative())
    {
        return Err(DeviceError::RelativeUrl(text.to_owned()));
    }
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
pub struct RunSwapSpace {
    /// The devices below compressed memory.
    pub devices: Vec<BackingDevice>,
    /// Upper bound of the compressed pool in bytes; 0: a share of each process's limit.
    pub pool_cap: u64,
    /// The codec of compressed memory.
    pub codec: Scheme,
    /// When it refuses pages.
    pub acceptance: PoolAcceptance,
}

/// The kind of a [`BackingDevice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackingKind {
    /// A file without a name.
    File,
    /// A block device.
    Block,
    /// An export of an NBD server.
    Nbd,
}

/// The access to a [`BackingDevice`].
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

/// A device beyond compressed memory: open, and used by this process alone.
#[derive(Debug)]
pub struct BackingDevice {
    /// Its name for users.
    pub name: String,
    /// File, block device or export.
    pub kind: BackingKind,
    /// Absolute path, or URL, for lists.
    pub place: PathBuf,
    /// The access to it.
    pub medium: Medium,
    /// The number of its extents of 2 MiB.
    pub extents: u32,
    /// The offset of the first of them, in bytes.
    pub base_bytes: u64,
    /// The higher one is used first.
    pub priority: i32,
    /// True if it bypasses the page cache.
    pub direct_io: bool,
    /// A file for a second copy of all that is there, as large.
    pub mirror: Option<Box<BackingDevice>>,
    /// What lies there is not encrypted.
    pub plain: bool,
    /// It lies on a rotational disk: a read begins with a seek.
    pub rotational: bool,
    /// Keeps others on this machine from using it, where the kernel does not.
    pub claim: Option<ExportClaim>,
}

impl BackingDevice {
    /// A device of `extents` extents from its first byte on, with the usual settings.
    pub(crate) fn new(
        kind: BackingKind,
        name: String,
        place: PathBuf,
        medium: Medium,
        extents: u32,
    ) -> BackingDevice {
        BackingDevice {
            name,
            kind,
            place,
            medium,
            extents,
            base_bytes: 0,
            priority: DEFAULT_PRIORITY,
            direct_io: false,
            mirror: None,
            plain: false,
            rotational: false,
            claim: None,
        }
    }
}

/// Opens what was asked for, or the default.
///
/// # Errors
/// See [`DeviceError`].
pub fn open(devices: &[Device], budget: u64) -> Result<RunSwapSpace, DeviceError> {
    let mut pool: Option<(u64, Option<i32>)> = None;
    let (mut chosen, mut refuses) = (Scheme::default(), PoolAcceptance::default());
    for device in devices {
        if let DeviceKind::Zram { bytes, codec, acceptance } = &device.kind {
            if pool.is_some() {
                return Err(DeviceError::Twice("zram"));
            }
            pool = Some((*bytes, device.priority));
            (chosen, refuses) = (*codec, *acceptance);
        }
    }
    let on_areas: Vec<&Device> =
        devices.iter().filter(|device| !matches!(device.kind, DeviceKind::Zram { .. })).collect();
    if on_areas.iter().map(|device| 1 + usize::from(device.mirror.is_some())).sum::<usize>()
        > MAX_AREAS
    {
        return Err(DeviceError::TooMany);
    }
    if let Some((_, Some(zram))) = pool
        && let Some(first) =
            on_areas.iter().find(|device| device.priority.is_some_and(|priority| priority > zram))
    {
        return Err(DeviceError::Order(first.name()));
    }
    let pool_cap = pool.map_or(0, |(bytes, _)| bytes);
    let opened = match (on_areas.is_empty(), pool) {
        (false, _) => on_areas
            .into_iter()
            .map(|device| open_backing(device, budget))
            .collect::<Result<_, _>>()?,
        (true, Some(_)) => Vec::new(),
        (true, None) => vec![open_default(budget)?],
    };
    Ok(RunSwapSpace { devices: opened, pool_cap, codec: chosen, acceptance: refuses })
}

impl Device {
    /// Returns its name for users: as it was given, without size and priority.
    pub fn name(&self) -> String {
        match &self.kind {
            DeviceKind::Zram { .. } => "zram".into(),
            DeviceKind::File { path, .. } => format!("file:{}", path.display()),
            DeviceKind::Block { path } => path.display().to_string(),
            DeviceKind::Nbd(url) => url.to_string(),
        }
    }
}

/// Opens a device beyond compressed memory. A file for which no size is given may grow to 16 times
/// `budget`.
///
/// # Errors
/// See [`DeviceError`]; compressed memory is none that can be added ([`DeviceError::Twice`]).
pub fn open_backing(device: &Device, budget: u64) -> Result<BackingDevice, DeviceError> {
    open_device(device, budget, Contents::Nobodys)
}

/// The same of an export on which pages lie: nothing is written there.
///
/// # Errors
/// As [`open_backing`].
pub(crate) fn open_in_use(device: &Device) -> Result<BackingDevice, DeviceError> {
    open_device(device, 0, Contents::Pages)
}

/// What lies on an export behind its first extent's worth.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contents {
    Nobodys,
    Pages,
}

fn open_device(
    device: &Device,
    budget: u64,
    contents: Contents,
) -> Result<BackingDevice, DeviceError> {
    let mut backing = match &device.kind {
        DeviceKind::Zram { .. } => return Err(DeviceError::Twice("zram")),
        DeviceKind::File { path, bytes } => open_file(path, *bytes, budget)?,
        DeviceKind::Block { path } => open_block(path)?,
        DeviceKind::Nbd(url) => open_nbd(url, contents)?,
    };
    backing.name = device.name();
    backing.priority = device.priority.unwrap_or(DEFAULT_PRIORITY);
    backing.plain = device.plain;
    backing.rotational = device.rotational.unwrap_or_else(|| match &backing.medium {
        Medium::File(file) => rotational::is_rotational(file),
        Medium::Nbd(..) => false,
    });
    match &device.mirror {
        Some(Mirror::Place { path, bytes }) => add_mirror(&mut backing, path, *bytes)?,
        Some(Mirror::Tier(name)) => {
            return Err(DeviceError::Mirror(
                backing.name,
                format!("the directory of tier {name} is unknown; name one"),
            ));
        }
        None => {}
    }
    Ok(backing)
}

/// Makes the file for a second copy of what will be on an area, which then has no more than fits
/// there.
fn add_mirror(
    backing: &mut BackingDevice,
    path: &Path,
    bytes: Option<u64>,
) -> Result<(), DeviceError> {
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

/// Returns the directory of the default file: the first of `$TMPDIR` and `/var/tmp` that is no file
/// system in memory, for memory is what is short.
pub fn default_places() -> Vec<PathBuf> {
    let named = std::env::var_os("TMPDIR").filter(|dir| !dir.is_empty());
    // It is asked for its free space later on, by a process that has left the directory.
    let named = named.and_then(|dir| std::path::absolute(dir).ok());
    let mut places: Vec<PathBuf> =
        named.into_iter().chain(["/var/tmp".into(), "/tmp".into()]).collect();
    places.sort_by_key(|place| in_memory(place));
    places
}

/// True if files there are in memory.
fn in_memory(place: &Path) -> bool {
    const TMPFS: u32 = 0x0102_1994;
    const RAMFS: u32 = 0x8584_58f6;
    rustix::fs::statfs(place).is_ok_and(|fs| matches!(fs.f_type as u32, TMPFS | RAMFS))
}

fn open_default(budget: u64) -> Result<BackingDevice, DeviceError> {
    let mut first = None;
    for place in default_places() {
        match open_file(&place, None, budget) {
            Ok(file) => return Ok(file),
            Err(error) => drop(first.get_or_insert(error)),
        }
    }
    Err(first
        .unwrap_or_else(|| DeviceError::Create("/var/tmp".into(), io::ErrorKind::NotFound.into())))
}

/// Bytes that a writer without privilege may still take in `place`.
pub(crate) fn free_space(place: &Path) -> io::Result<u64> {
    let fs = rustix::fs::statvfs(place)?;
    Ok(fs.f_bavail.saturating_mul(fs.f_frsize))
}

fn open_file(path: &Path, asked: Option<u64>, budget: u64) -> Result<BackingDevice, DeviceError> {
    let create = |error: io::Error| DeviceError::Create(path.to_owned(), error);
    let place = match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => path,
        Ok(_) => return Err(DeviceError::Exists(path.to_owned())),
        Err(_) => {
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
        }
    };
    let free = free_space(place).map_err(create)?;
    let bytes = match asked {
        Some(bytes) if bytes > free => {
            return Err(DeviceError::NoRoom { place: path.to_owned(), free, asked: bytes });
        }
        Some(bytes) => bytes,
        // The file is sparse: its size is what it may grow to.
        None => budget.saturating_mul(16).clamp(4 << 30, 64 << 30).min(free / 10 * 9),
    };
    if bytes < MIN_FILE_BYTES {
        return Err(DeviceError::NoRoom { place: path.to_owned(), free, asked: MIN_FILE_BYTES });
    }
    let (file, direct_io) =
        if place == path { unnamed(path) } else { named(path) }.map_err(create)?;
    let extents = (bytes / EXTENT_BYTES) as u32;
    file.set_len(u64::from(extents) * EXTENT_BYTES).map_err(create)?;
    let (name, medium) = (format!("file:{}", path.display()), Medium::File(file));
    let device = BackingDevice::new(BackingKind::File, name, place.to_owned(), medium, extents);
    Ok(BackingDevice { direct_io, ..device })
}

/// Whether a block device has the mark of mkswap.
pub(crate) fn has_mark(path: &Path) -> io::Result<bool> {
    let mut mark = [0; SWAP_MARK.len()];
    File::open(path)?.read_exact_at(&mut mark, SWAP_MARK_AT)?;
    Ok(mark == *SWAP_MARK)
}

/// Opens a block device. Its first extent's worth stays as it is: the mark is there.
fn open_block(path: &Path) -> Result<BackingDevice, DeviceError> {
    let failed = |error: io::Error| DeviceError::Block(path.to_owned(), error);
    if !std::fs::metadata(path).map_err(failed)?.file_type().is_block_device() {
        return Err(DeviceError::NotBlock(path.to_owned()));
    }
    // Exclusive: what is mounted, or swap space in use, is refused.
    let mut file = File::options()
        .read(true)
        .write(true)
        .custom_flags(OFlags::EXCL.bits() as i32)
        .open(path)
        .map_err(failed)?;
    let mut mark = [0; SWAP_MARK.len()];
    file.read_exact_at(&mut mark, SWAP_MARK_AT).map_err(failed)?;
    if mark != *SWAP_MARK {
        return Err(DeviceError::NoMark(path.to_owned()));
    }
    let bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
    if bytes < MIN_FILE_BYTES {
        return Err(DeviceError::TooSmall(path.display().to_string(), MIN_FILE_BYTES));
    }
    let extents = (bytes / EXTENT_BYTES - 1).min(MAX_EXTENTS as u64) as u32;
    let (name, medium) = (path.display().to_string(), Medium::File(file));
    let device = BackingDevice::new(BackingKind::Block, name, path.to_owned(), medium, extents);
    Ok(BackingDevice { base_bytes: EXTENT_BYTES, direct_io: true, ..device })
}

/// Connects to an export. Its first extent's worth stays as it is: what is there tells that the
/// rest is not needed.
fn open_nbd(url: &Url, contents: Contents) -> Result<BackingDevice, DeviceError> {
    const PROBED_BYTES: usize = 128 << 10;
    let claim =
        ExportClaim::of(url).map_err(|holder| DeviceError::Claimed(url.to_string(), holder.pid))?;
    let connector = Arc::new(Connector::new(url.clone()).map_err(DeviceError::Nbd)?);
    let (connection, export) = connector.connect().map_err(DeviceError::Nbd)?;
    if export.size < MIN_FILE_BYTES {
        return Err(DeviceError::TooSmall(url.to_string(), MIN_FILE_BYTES));
    }
    let dialer = LocalDialer::new(Connector::new(url.clone()).map_err(DeviceError::Nbd)?, export);
    let mut start = vec![0; PROBED_BYTES];
    let server = Nbd::new(export, Options::default(), Box::new(dialer), vec![connection]);
    match server.read_at(0, &mut start) {
        Ok(PROBED_BYTES)
            if start.iter().all(|byte| *byte == 0)
                || start[SWAP_MARK_AT as usize..].starts_with(SWAP_MARK) => {}
        Ok(PROBED_BYTES) => return Err(DeviceError::NotEmpty(url.to_string())),
        Ok(_) => {
            return Err(DeviceError::Create(
                url.to_string().into(),
                io::ErrorKind::UnexpectedEof.into(),
            ));
        }
        Err(errno) => return Err(DeviceError::Create(url.to_string().into(), errno.into())),
    }
    if contents == Contents::Nobodys {
        shows_one_content(url, export, &server)?;
    }
    let extents = (export.size / EXTENT_BYTES - 1).min(MAX_EXTENTS as u64) as u32;
    let (name, medium) = (url.to_string(), Medium::Nbd(connector, export));
    let place = name.clone().into();
    let device = BackingDevice::new(BackingKind::Nbd, name, place, medium, extents);
    let claim = Some(claim);
    Ok(BackingDevice { base_bytes: EXTENT_BYTES, direct_io: true, claim, ..device })
}

/// Refuses an export of which each connection shows another content: a forked child, and a process
/// that connects again, would not find what was written. Where no second connection is to be had,
/// nothing is known.
fn shows_one_content(url: &Url, export: Export, server: &Nbd) -> Result<(), DeviceError> {
    /// A server that takes one client at a time lets the second wait.
    const SECOND_LIMIT: Duration = Duration::from_secs(1);
    let refused = |errno: Errno| DeviceError::Create(url.to_string().into(), errno.into());
    let mut written = [0u8; PAGE_SIZE];
    rustix::rand::getrandom(&mut written[..32], rustix::rand::GetRandomFlags::empty())
        .map_err(refused)?;
    match server.write_surely(EXTENT_BYTES, &written) {
        (Ok(PAGE_SIZE), Certainty::Answered) => {}
        (Err(errno), Certainty::Answered) => return Err(refused(errno)),
        // It may come over a page that lies there by then.
        _ => return Err(refused(Errno::TIMEDOUT)),
    }
    let second = |limit| Connector::with_limit(url.clone(), limit).map_err(DeviceError::Nbd);
    let Ok(connection) = second(SECOND_LIMIT)?.connect_again(&export) else { return Ok(()) };
    let options = Options { read_timeout: 5 * SECOND_LIMIT, ..Options::default() };
    let dialer = LocalDialer::new(second(SECOND_LIMIT)?, export);
    let other = Nbd::new(export, options, Box::new(dialer), vec![connection]);
    let mut read = [0u8; PAGE_SIZE];
    match other.read_at(EXTENT_BYTES, &mut read) {
        Ok(PAGE_SIZE) if read != written => Err(DeviceError::ManyContents(url.to_string())),
        _ => Ok(()),
    }
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
        File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(flags.bits() as i32)
            .open(path)
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
mod tests;
