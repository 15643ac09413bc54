//! What outlives a daemon, in its state directory.
//!
//! `lock` is held by the daemon that runs; `state.json` says what there is, and is replaced whole
//! at every change. All of it is worth nothing after the machine was started again, and is thrown
//! away then. The shared segment has no name (see `kept`).
//!
//! Invariants
//! 1. Nothing that is written down is secret.
//! 2. A swap file is opened again only if it is the one that was written down: others may make
//!    files and links where it lies.

use std::fs::{DirBuilder, File, Metadata};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};
use swaptide_ipc::{AreaId, AreaState, EXTENT_BYTES, ExportFacts, GroupIndex, Segment};
use swaptide_store::nbd::{Export, Flags};
use swaptide_sys::process::start_time;

use crate::cgroup::tree::{GroupPath, GroupTree, KEYS};
use crate::daemon::error::DaemonError;
use crate::daemon::segment::{self, SegmentId};
use crate::memctl::controller::{ManagedRun, MemoryController};
use crate::memctl::processes::{Life, life};
use crate::nbd::Connector;
use crate::swap::areas::{AreaOpener, Areas};
use crate::swap::spec::{self, BackingDevice, BackingKind, Medium};

/// A state directory that this process has for itself.
pub struct Directory {
    path: PathBuf,
    _lock: File,
}

/// The saved state.
#[derive(Serialize, Deserialize)]
pub struct SavedState {
    boot: String,
    /// The identity of the segment's memory file.
    #[serde(default)]
    pub segment: Option<SegmentId>,
    /// Of the configuration file that counted last.
    pub config: u64,
    /// Cap of the compressed pool.
    pub pool_cap: u64,
    /// Number of the choice of codecs.
    pub codec: u32,
    /// The kernel does not report forks to engines. Not read from the segment, where a program
    /// could have written it.
    #[serde(default)]
    pub follows_forks: bool,
    /// The swap areas, by which they are opened again.
    pub areas: Vec<SavedArea>,
    /// The devices that the configuration file listed.
    #[serde(default)]
    pub swap: Vec<String>,
    tiers: String,
    groups: Vec<SavedGroup>,
    frozen: Vec<u32>,
    runs: Vec<SavedRun>,
}

/// A swap area that can be opened again.
#[derive(Serialize, Deserialize)]
pub struct SavedArea {
    id: u8,
    name: String,
    kind: SavedKind,
    place: PathBuf,
    /// Its own name; of a file, made for this; of an export, its URL with all options.
    path: PathBuf,
    extents: u32,
    base_bytes: u64,
    priority: i32,
    direct_io: bool,
    plain: bool,
    /// Of a file, its device and inode; of a block device, its number.
    #[serde(default)]
    identity: Option<(u64, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SavedKind {
    File,
    Block,
    Nbd,
}

#[derive(Serialize, Deserialize)]
struct SavedGroup {
    index: u32,
    path: String,
    owner: u32,
    set: Vec<(String, String)>,
}

#[derive(Serialize, Deserialize)]
struct SavedRun {
    run: ManagedRun,
    group: String,
    /// When its supervisor started: the number alone may have come to mean another process.
    start_time: u64,
}

fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

impl Directory {
    /// Takes a state directory; it is made if it is not there.
    ///
    /// # Errors
    /// [`DaemonError::Running`], [`DaemonError::State`].
    pub fn open(path: &Path) -> Result<Directory, DaemonError> {
        let failed = |error| DaemonError::State(path.to_owned(), error);
        DirBuilder::new().mode(0o700).recursive(true).create(path).map_err(failed)?;
        let found = std::fs::symlink_metadata(path).map_err(failed)?;
        if !found.is_dir()
            || found.uid() != rustix::process::geteuid().as_raw()
            || found.mode() & 0o077 != 0
        {
            return Err(failed(io::Error::other(
                "must be a directory of this user with mode 0700",
            )));
        }
        let path = std::fs::canonicalize(path).map_err(failed)?;
        let lock = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join("lock"))
            .map_err(failed)?;
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Directory { path, _lock: lock }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(DaemonError::Running(path)),
            Err(error) => Err(failed(error.into())),
        }
    }

    /// What was written down since the machine was started; what is older goes.
    pub fn load(&self) -> Option<SavedState> {
        let text = std::fs::read(self.path.join("state.json")).ok()?;
        let state: SavedState = serde_json::from_slice(&text).ok()?;
        if state.boot == boot_id() {
            return Some(state);
        }
        state.remove_files();
        None
    }

    /// The segment: that of before where `known` says which it is and a process still has it, else
    /// a fresh one. Tells which.
    pub fn segment(
        &self,
        known: Option<SegmentId>,
    ) -> io::Result<(&'static Segment, OwnedFd, bool)> {
        if let Some(file) = known.and_then(SegmentId::find)
            && let Ok(map) = segment::map(&file)
            && let Ok(segment) = Segment::open(map)
        {
            return Ok((segment, file, false));
        }
        let (segment, file) = segment::make()?;
        Ok((segment, file, true))
    }

    /// Writes it down, whole or not at all.
    pub fn save(&mut self, state: &SavedState) -> io::Result<()> {
        let new = self.path.join("state.new");
        let mut file =
            File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec(state)?)?;
        std::fs::rename(new, self.path.join("state.json"))
    }

    /// Nothing is worth keeping.
    pub fn clear(&self) {
        let _ = std::fs::remove_file(self.path.join("state.json"));
        segment::forget();
    }
}

/// The areas as they can be opened again. A file without a name gets one; where that cannot be, the
/// area is not among them.
pub fn areas(areas: &Areas, segment: &Segment) -> Vec<SavedArea> {
    let mut kept = Vec::new();
    areas.each(|id, backing| {
        let generation = segment.area(id).generation();
        let (kind, path) = match (backing.kind, &backing.medium) {
            (BackingKind::File, Medium::File(file)) => {
                (SavedKind::File, named(backing, file, id, generation))
            }
            (BackingKind::Block, _) => (SavedKind::Block, Some(backing.place.clone())),
            (_, Medium::Nbd(connector, _)) => {
                (SavedKind::Nbd, Some(connector.url().whole().into()))
            }
            (BackingKind::Nbd, Medium::File(_)) => (SavedKind::Nbd, None),
        };
        let identity = match &backing.medium {
            Medium::File(file) => file.metadata().ok().map(|found| identity_of(&found)),
            Medium::Nbd(..) => None,
        };
        kept.extend(path.map(|path| SavedArea {
            identity,
            id: id.0,
            name: backing.name.clone(),
            kind,
            place: backing.place.clone(),
            path,
            extents: backing.extents,
            base_bytes: backing.base_bytes,
            priority: backing.priority,
            direct_io: backing.direct_io,
            plain: backing.plain,
        }));
    });
    kept
}

/// Returns the identity of a file or a block device.
fn identity_of(found: &Metadata) -> (u64, u64) {
    if found.file_type().is_block_device() { (found.rdev(), 0) } else { (found.dev(), found.ino()) }
}

/// Gives a file without a name one in its directory.
fn named(backing: &BackingDevice, file: &File, id: AreaId, generation: u32) -> Option<PathBuf> {
    use std::os::fd::AsRawFd;
    let own = file.metadata().ok()?;
    let path = backing.place.join(format!(
        ".swaptide-{:x}-{:x}-{}-{generation}",
        own.dev(),
        own.ino(),
        id.0
    ));
    if std::fs::symlink_metadata(&path)
        .is_ok_and(|found| (found.dev(), found.ino()) == (own.dev(), own.ino()))
    {
        return Some(path);
    }
    let open = format!("/proc/self/fd/{}", file.as_raw_fd());
    let (here, follow) = (rustix::fs::CWD, rustix::fs::AtFlags::SYMLINK_FOLLOW);
    rustix::fs::linkat(here, open.as_str(), here, &path, follow).ok()?;
    Some(path)
}

impl SavedArea {
    /// The name that was made for it goes.
    pub fn remove_file(&self) {
        let is_own = |found: Metadata| self.identity == Some(identity_of(&found));
        if self.kind == SavedKind::File && std::fs::symlink_metadata(&self.path).is_ok_and(is_own) {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Opens the file or the block device, if it is the one that was written down.
    fn open_again(&self) -> io::Result<File> {
        let direct = if self.direct_io { libc::O_DIRECT } else { 0 };
        let open = |flags: i32| {
            File::options().read(true).write(true).custom_flags(direct | flags).open(&self.path)
        };
        let other = || {
            io::Error::other(format!(
                "{}: is not the one that was used before; ignored",
                self.path.display()
            ))
        };
        if self.kind == SavedKind::File {
            // Others may make links where it lies.
            let file = open(libc::O_NOFOLLOW | libc::O_NONBLOCK).map_err(|error| {
                match error.raw_os_error() {
                    Some(libc::ELOOP | libc::ENXIO) => other(),
                    _ => error,
                }
            })?;
            let found = file.metadata()?;
            if !found.is_file() || self.identity != Some(identity_of(&found)) {
                return Err(other());
            }
            if found.len() < u64::from(self.extents) * EXTENT_BYTES {
                return Err(io::Error::other(format!(
                    "{}: is smaller than before; ignored",
                    self.path.display()
                )));
            }
            return Ok(file);
        }
        // Programs that have pages there keep it claimed by descriptors of the daemon before;
        // another user of it would have taken the mark away.
        let file = open(libc::O_EXCL).or_else(|error| match error.raw_os_error() {
            Some(libc::EBUSY) => open(0),
            _ => Err(error),
        })?;
        let is_same =
            self.identity == Some(identity_of(&file.metadata()?)) && spec::has_mark(&self.path)?;
        if is_same { Ok(file) } else { Err(other()) }
    }

    /// The device as it was saved, but for its mirror. Whether it is rotational the segment says.
    fn over(&self, kind: BackingKind, medium: Medium) -> BackingDevice {
        let (name, place) = (self.name.clone(), self.place.clone());
        BackingDevice {
            base_bytes: self.base_bytes,
            priority: self.priority,
            direct_io: self.direct_io,
            plain: self.plain,
            ..BackingDevice::new(kind, name, place, medium, self.extents)
        }
    }

    fn open(&self) -> io::Result<BackingDevice> {
        let mut backing = match self.kind {
            SavedKind::Nbd => {
                let url = self.path.to_str().unwrap_or_default();
                let found = spec::parse(url).and_then(|device| spec::open_in_use(&device));
                let found = found.map_err(|error| io::Error::other(error.to_string()))?;
                if found.extents < self.extents {
                    return Err(io::Error::other("is smaller than it was"));
                }
                found
            }
            SavedKind::File | SavedKind::Block => {
                let kind = if self.kind == SavedKind::Block {
                    BackingKind::Block
                } else {
                    BackingKind::File
                };
                self.over(kind, Medium::File(self.open_again()?))
            }
        };
        (backing.extents, backing.base_bytes, backing.priority) =
            (self.extents, self.base_bytes, self.priority);
        backing.plain = self.plain;
        Ok(backing)
    }
}

impl SavedArea {
    /// An export whose server is away: what was agreed on with it stands in the segment.
    fn reopen_away(&self, segment: &Segment) -> Option<BackingDevice> {
        let spec::DeviceKind::Nbd(url) = spec::parse(self.path.to_str()?).ok()?.kind else {
            return None;
        };
        let ExportFacts { bytes, flags, structured, longest, connections } =
            segment.area(AreaId(self.id)).export();
        let export = Export {
            size: bytes,
            flags: Flags::from_bits_retain(flags),
            structured,
            longest,
            connections,
        };
        let connector = Arc::new(Connector::new(url).ok()?);
        Some(self.over(BackingKind::Nbd, Medium::Nbd(connector, export)))
    }
}

impl SavedState {
    /// Everything but the areas.
    pub fn of(controller: &mut MemoryController, pool_cap: u64, codec: u32) -> SavedState {
        let path_of = |groups: &GroupTree, index: Option<GroupIndex>| {
            index
                .and_then(|index| groups.get(index))
                .map_or_else(|| "/".to_owned(), |group| group.path.to_string())
        };
        let runs: Vec<ManagedRun> = controller.runs().cloned().collect();
        let frozen = controller.frozen().map(|index| index.0).collect();
        let groups = controller.groups();
        let tiers = groups.tiers();
        let kept = groups.iter().map(|(index, group)| SavedGroup {
            index: index.0,
            path: group.path.to_string(),
            owner: group.owner,
            set: KEYS
                .iter()
                .filter_map(|key| Some(((*key).to_owned(), group.settings.as_set(key, tiers)?)))
                .collect(),
        });
        SavedState {
            boot: boot_id(),
            segment: None,
            config: 0,
            pool_cap,
            codec,
            follows_forks: false,
            areas: Vec::new(),
            swap: Vec::new(),
            tiers: tiers.spec(),
            groups: kept.collect(),
            frozen,
            runs: runs
                .into_iter()
                .map(|run| SavedRun {
                    group: path_of(groups, run.group),
                    start_time: start_time(run.root).unwrap_or(0),
                    run,
                })
                .collect(),
        }
    }

    /// Removes those names that another state does not have.
    pub(crate) fn remove_files_but(&self, other: &SavedState) {
        self.areas
            .iter()
            .filter(|area| other.areas.iter().all(|kept| kept.path != area.path))
            .for_each(SavedArea::remove_file);
    }

    /// Removes the names that were made for files.
    pub(crate) fn remove_files(&self) {
        self.areas.iter().for_each(SavedArea::remove_file);
    }

    /// Areas, tiers and groups as they were. An area that cannot be opened again takes no more
    /// pages; its users have their own descriptors.
    pub fn restore(&self, areas: &Areas, groups: &mut GroupTree, segment: &Segment) {
        for kept in &self.areas {
            match kept.open() {
                Ok(backing) => areas.restore(AreaId(kept.id), backing),
                Err(error) => match kept.reopen_away(segment) {
                    Some(backing) => areas.restore_away(AreaId(kept.id), backing),
                    None => crate::daemon::error::log_line(&format!(
                        "swap area {}: takes no more pages: {error}",
                        kept.name
                    )),
                },
            }
        }
        let lost: Vec<AreaId> = segment
            .areas()
            .map(|(id, _)| id)
            .filter(|id| segment.area(*id).state() != AreaState::Paused && areas.open(*id).is_err())
            .collect();
        for id in lost {
            match segment.area(id).state() {
                // A process with pages there has a descriptor, and moves them.
                AreaState::Mirror => {
                    let of: Vec<_> = segment
                        .areas()
                        .filter(|(_, area)| area.mirror() == Some(id))
                        .map(|(of, _)| of)
                        .collect();
                    of.into_iter().for_each(|of| segment.close_area(of));
                }
                _ => segment.close_area(id),
            }
        }
        let mut sorted: Vec<(&SavedGroup, GroupPath)> = self
            .groups
            .iter()
            .filter_map(|group| Some((group, GroupPath::parse(&group.path).ok()?)))
            .collect();
        sorted.sort_by_key(|(_, path)| path.depth());
        for (group, path) in &sorted {
            groups.restore(GroupIndex(group.index), path, group.owner);
        }
        // What was written down was sound when it was set.
        let _ = groups.replace_tiers(&self.tiers);
        for (group, _) in &sorted {
            let values = group.set.iter().map(|(key, value)| (key.as_str(), value.as_str()));
            let _ = groups.set(GroupIndex(group.index), values);
        }
    }

    /// The processes that live, and the runs they belong to. What dead processes had is taken back.
    /// A process whose mappings cannot be read keeps what it has.
    pub fn restore_runs(
        &self,
        controller: &mut MemoryController,
        segment: &Segment,
        id: SegmentId,
    ) {
        self.frozen.iter().for_each(|index| controller.freeze(GroupIndex(*index), true));
        for kept in &self.runs {
            let same = start_time(kept.run.root) == Some(kept.start_time);
            let group = GroupPath::parse(&kept.group)
                .ok()
                .and_then(|path| controller.groups().find(&path).ok());
            if same {
                controller.add_run(ManagedRun { group, ..kept.run.clone() });
            }
        }
        let slots: Vec<_> =
            segment.claimed().map(|(index, slot)| (index, slot.pid.load(Relaxed))).collect();
        for (index, pid) in slots {
            let group = GroupIndex(segment.slot(index).control.group_wanted.load(Relaxed));
            match (id.is_mapped_by(pid), life(pid)) {
                (_, Life::Gone) | (Some(false), _) => controller.release_slot(index),
                (Some(true), _) => controller.adopt(pid, group),
                (None, _) => controller.adopt_descendant(pid, group),
            }
        }
        // The one before may have been killed while it took something back.
        segment.forget_trims();
        segment.demand_audit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memctl::stall::{OnStall, StallPolicy};
    use crate::testing::Scratch;

    #[test]
    fn a_state_directory_has_one_daemon_and_its_segment_is_reopened() {
        let scratch = Scratch::new("state");
        let place = scratch.path("daemon");
        let directory = Directory::open(&place).expect("directory");
        assert!(matches!(Directory::open(&place), Err(DaemonError::Running(_))));
        let (segment, file, fresh) = directory.segment(None).expect("segment");
        assert!(fresh && directory.load().is_none());
        let id = SegmentId::of(&file).expect("identity");
        segment.header.version.store(swaptide_ipc::VERSION, Relaxed);
        segment.header.magic.store(swaptide_ipc::MAGIC, Relaxed);
        segment.header.budget_bytes.store(77, Relaxed);
        drop(directory);
        let again = Directory::open(&place).expect("directory");
        let mut holder =
            std::process::Command::new("sleep").arg("600").stdin(file).spawn().expect("sleep");
        let (segment, _, fresh) = again.segment(Some(id)).expect("segment");
        holder.kill().expect("kill");
        holder.wait().expect("wait");
        assert_eq!((fresh, segment.header.budget_bytes.load(Relaxed)), (false, 77));
        let (segment, _, fresh) = again.segment(None).expect("segment");
        assert_eq!((fresh, segment.header.budget_bytes.load(Relaxed)), (true, 0));
        assert_eq!(std::fs::metadata(&place).expect("metadata").mode() & 0o777, 0o700);
        let open = scratch.path("open");
        std::fs::create_dir(&open).expect("directory");
        std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .expect("mode");
        assert!(Directory::open(&open).is_err(), "others may enter it");
        again.clear();
        assert!(!place.join("state.json").exists());
    }

    #[test]
    fn swap_file_name_reopens_same_file() {
        use std::os::unix::fs::FileExt;
        let scratch = Scratch::new("state-area");
        let segment = crate::testing::segment();
        let before = Areas::new(segment);
        let device =
            crate::swap::spec::parse(&format!("file:{}:16M,prio=7", scratch.root().display()))
                .expect("device");
        before
            .add(crate::swap::spec::open_backing(&device, 1 << 30).expect("a file"))
            .expect("an area");
        let kept = areas(&before, segment);
        assert_eq!(
            (kept.len(), areas(&before, segment)[0].path == kept[0].path),
            (1, true),
            "a name is made once"
        );
        let ino = |areas: &Areas| {
            File::from(areas.open(AreaId(0)).expect("open")).metadata().expect("metadata").ino()
        };
        let after = Areas::new(segment);
        after.restore(AreaId(0), kept[0].open().expect("opened again"));
        assert_eq!(ino(&before), ino(&after));
        assert_eq!(after.view()[0].1.priority, 7);
        // Another user's link to the very file, and to another one.
        let moved = scratch.path("moved");
        std::fs::rename(&kept[0].path, &moved).expect("rename");
        for target in [&moved, Path::new("/etc/passwd")] {
            std::os::unix::fs::symlink(target, &kept[0].path).expect("link");
            let error = kept[0].open().map(drop).expect_err("a link");
            assert!(error.to_string().contains("is not the one that was used before"), "{error}");
            kept[0].remove_file();
            assert!(std::fs::symlink_metadata(&kept[0].path).is_ok(), "nor is it removed");
            std::fs::remove_file(&kept[0].path).expect("remove");
        }
        let twin = File::options().write(true).create_new(true).open(&kept[0].path).expect("file");
        twin.set_len(16 << 20).expect("length");
        assert!(kept[0].open().is_err(), "another file of this name and size");
        std::fs::rename(&moved, &kept[0].path).expect("rename");
        assert!(kept[0].open().is_ok());
        kept[0].remove_file();
        assert_eq!(std::fs::read_dir(scratch.root()).expect("list").count(), 0);
        let short = File::options().write(true).create_new(true).open(&kept[0].path).expect("file");
        short.write_all_at(b"x", 0).expect("write");
        assert!(kept[0].open().is_err(), "another file of this name");
    }

    #[test]
    fn groups_tiers_and_runs_are_as_they_were() {
        let segment = crate::testing::segment();
        let place = Areas::new(segment);
        let mut controller = MemoryController::new(
            segment,
            std::sync::Arc::new(Areas::new(segment)),
            GroupTree::new(segment, 1 << 30),
            1 << 30,
        );
        let path = GroupPath::parse("/a/b").expect("path");
        let index = controller.groups().ensure(&path, 1000).expect("group");
        controller
            .groups()
            .remove(&GroupPath::parse("/gone").expect("path"))
            .expect_err("there is none");
        controller.groups().set_tiers("+SSD:100 +HDD:-1").expect("tiers");
        controller
            .groups()
            .set(index, [("ram.max", "64M"), ("swap.tiers", "-HDD"), ("zswap.writeback", "0")])
            .expect("set");
        let me = std::process::id();
        let run = ManagedRun {
            root: me,
            launcher: 7,
            uid: 1000,
            program: "x".into(),
            started: 1.5,
            group: Some(index),
            max: Some(5),
            strict: true,
            stall: StallPolicy { then: OnStall::Kill, percent: 70 },
            attached: false,
            container: None,
            recorded: true,
        };
        controller.add_run(run);
        let text = serde_json::to_vec(&SavedState::of(&mut controller, 9, 1)).expect("JSON");
        let state: SavedState = serde_json::from_slice(&text).expect("state");
        let before = controller.groups().view(index);
        let mut groups = GroupTree::new(segment, 1 << 30);
        state.restore(&place, &mut groups, segment);
        assert_eq!((groups.find(&path), groups.view(index)), (Ok(index), before));
        assert_eq!(groups.get(index).expect("group").owner, 1000);
        let foreign = segment.claim(me, 0).expect("slot");
        let mut again = MemoryController::new(segment, std::sync::Arc::new(place), groups, 1 << 30);
        let other = swaptide_sys::mem::memfd_create(c"test", 4096).expect("memfd");
        state.restore_runs(&mut again, segment, SegmentId::of(other).expect("identity"));
        let run = again.runs().next().expect("the run").clone();
        assert_eq!(
            (run.root, run.launcher, run.group, run.max, run.strict, run.stall.percent),
            (me, 7, Some(index), Some(5), true, 70)
        );
        assert_eq!(
            segment.slot(foreign).pid.load(Relaxed),
            0,
            "a process that has not mapped the segment is another one"
        );
    }
}
