//! The swap areas of a run: devices beyond compressed memory, added and taken away while programs
//! use them.
//!
//! Owns what is open behind each area of the segment's table, what people call it, and the way of
//! taking one away: it is closed, every process that holds something there moves it to other areas,
//! and only when none holds anything is it removed; or nothing has changed.
//!
//! Invariants
//! 1. An area of the segment that is not `None` has its device open here.
//! 2. A device is closed only after its area is `None`.
//! 3. A mirror comes and goes with its area.
//! 4. An extent that no process holds and that is in doubt ([`Segment::doubt_extent`]) stays
//!    unused: for the rest of the run, or until a quarter of its area is so and it has been for
//!    an hour. docs/design/areas-and-nbd.md says why.
//!
//! Locks: `held`, for a look or a change of the list; not while waiting for processes.

mod in_doubt;
mod trim;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;
use serde::{Deserialize, Serialize};
use swaptide_ipc::{
    AreaId, AreaState, EXTENT_BYTES, ExportFacts, ExtentId, NewArea, Segment, Transport,
};
use swaptide_store::nbd::Export;
use swaptide_sys::Errno;
use thiserror::Error;

use self::in_doubt::InDoubt;
use crate::swap::spec::CIPHER;
use crate::swap::spec::{BackingDevice, BackingKind, DeviceError, Medium};
use crate::units::{comma_list, human};

/// An area takes no more pages after this many failed transfers.
const MAX_FAILED_TRANSFERS: u32 = 8;
/// The interval between checks of processes that have to move their pages.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The interval between attempts to reach a server that is away.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(3);
/// When nothing has moved for so long, nothing will.
const NO_PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);

/// An area as people see it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct AreaView {
    /// Its name when it was added.
    pub name: String,
    /// `file`, `block` or `nbd`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Absolute path of the file or device, or URL of the export.
    pub place: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// The bytes of it that are leased.
    pub used_bytes: u64,
    /// Most of it so far.
    pub peak_used_bytes: u64,
    /// The bytes of it that stay unused, for its server has not answered a request for them.
    #[serde(default)]
    pub in_doubt_bytes: u64,
    /// The higher one is used first.
    pub priority: i32,
    /// `open`; `leaving`: it is being taken away; `retired`: it failed too often, and what lies
    /// there is being moved; `away`: its server does not answer.
    pub state: String,
    /// Transfers that failed since it was added.
    pub errors: u32,
    /// True if it bypasses the page cache.
    pub direct_io: bool,
    /// The cipher of its data: `aes-256-gcm`, or `none`.
    pub cipher: String,
    /// The place of a second copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<MirrorView>,
}

/// The second copy of an area as people see it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct MirrorView {
    /// Path of the file or directory.
    pub place: String,
    /// Transfers that failed, and pages that were not what had been written.
    pub errors: u32,
}

/// Why an area was not added or not taken away. Nothing has changed then.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AreaError {
    /// The device cannot be had.
    #[error("{0}")]
    Device(DeviceError),
    /// The table is full.
    #[error("no more swap areas: at most 16, 128G together; remove one with swapoff")]
    TooMany,
    /// Nothing is called that.
    #[error("{0:?}{missing}", missing = no_such_area(.1))]
    Unknown(String, Vec<String>),
    /// Several are called that.
    #[error(
        "several swap areas are called {0:?}; name one by its number, as swaptide \
        ctl devices shows it"
    )]
    Ambiguous(String),
    /// It is already being removed.
    #[error("{0:?} is already being removed; swaptide ctl devices shows how far it is")]
    Leaving(String),
    /// Its pages find no room on other areas.
    #[error(
        "{name:?} stays: {size} of it do not fit on the other swap areas; add one with \
        swapon, or end programs",
        size = human(*.left)
    )]
    NoRoom {
        /// The area to remove.
        name: String,
        /// Bytes that are still there.
        left: u64,
    },
    /// Processes do not move what is theirs.
    #[error(
        "{name:?} stays: {size} of it are held by processes that do not move them ({list}): \
        stopped ones, or pages that cannot be read; continue or end them",
        size = human(*.left),
        list = comma_list(.holders)
    )]
    Stuck {
        /// What was to be taken away.
        name: String,
        /// Bytes that are still there.
        left: u64,
        /// Process ids of the holders.
        holders: Vec<u32>,
    },
}

impl From<DeviceError> for AreaError {
    fn from(error: DeviceError) -> Self {
        AreaError::Device(error)
    }
}

pub(super) struct Held {
    pub(super) backing: BackingDevice,
    peak_extents: u32,
    /// It failed too often.
    retired: bool,
    /// A thread is taking it away.
    leaves: bool,
    /// Errors that do not count any more.
    errors_before: u32,
    /// When its server was last tried.
    tried: Instant,
    in_doubt: InDoubt,
}

impl Held {
    fn new(backing: BackingDevice, errors_before: u32) -> Held {
        Held {
            backing,
            peak_extents: 0,
            retired: false,
            leaves: false,
            errors_before,
            tried: Instant::now(),
            in_doubt: InDoubt::default(),
        }
    }
}

/// The source of areas' descriptors for processes.
pub trait AreaOpener: Send + Sync {
    /// True if opening an area may take long: there is a server to be asked.
    fn may_block(&self, id: AreaId) -> bool;

    /// A descriptor for a process.
    ///
    /// # Errors
    /// The error of a resource that this process lacks (descriptors, say), or `NODEV`.
    fn open(&self, id: AreaId) -> Result<OwnedFd, Errno>;
}

/// The open swap areas of a run or daemon, by number.
pub struct Areas {
    segment: &'static Segment,
    held: Mutex<BTreeMap<AreaId, Held>>,
    trims: trim::Trims,
}

impl Areas {
    /// An empty list of areas in a segment.
    pub fn new(segment: &'static Segment) -> Areas {
        Areas { segment, held: Mutex::default(), trims: trim::Trims::default() }
    }

    pub(crate) fn segment(&self) -> &'static Segment {
        self.segment
    }

    pub(super) fn held(&self) -> MutexGuard<'_, BTreeMap<AreaId, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a device and opens its area.
    ///
    /// # Errors
    /// [`AreaError::TooMany`].
    pub fn add(&self, mut backing: BackingDevice) -> Result<AreaId, AreaError> {
        let (transport, export) = match &backing.medium {
            Medium::File(_) => (Transport::File, ExportFacts::default()),
            Medium::Nbd(_, export) => {
                let Export { size: bytes, flags, structured, longest, connections } = *export;
                (
                    Transport::Nbd,
                    ExportFacts { bytes, flags: flags.bits(), structured, longest, connections },
                )
            }
        };
        let BackingDevice { priority, extents, base_bytes, plain, rotational, .. } = backing;
        let mut held = self.held();
        let copy = match backing.mirror.take() {
            Some(copy) => {
                let id =
                    self.segment.add_mirror(priority, copy.base_bytes).ok_or(AreaError::TooMany)?;
                Some((id, copy))
            }
            None => None,
        };
        let mirror = copy.as_ref().map(|(id, _)| *id);
        let new =
            NewArea { transport, priority, extents, base_bytes, export, mirror, plain, rotational };
        let Some(id) = self.segment.add_area(new) else {
            mirror.inspect(|id| self.segment.drop_mirror(*id));
            return Err(AreaError::TooMany);
        };
        held.extend(copy.map(|(id, copy)| (id, Held::new(*copy, 0))));
        held.insert(id, Held::new(backing, 0));
        Ok(id)
    }

    /// Takes over a device that an area had before: the segment's table says everything else of it.
    /// An area that is not there stays so.
    pub fn restore(&self, id: AreaId, backing: BackingDevice) {
        let mut held = self.held();
        if self.segment.areas().any(|(known, _)| known == id) {
            let area = self.segment.area(id);
            let mut restored = Held::new(backing, area.errors());
            // The thread that was removing it ended with the supervisor before this one. It takes
            // no more pages, and can be removed again. One that was away is looked after.
            restored.retired = matches!(area.state(), AreaState::Closed | AreaState::Paused);
            held.insert(id, restored);
        }
    }

    /// Takes over an export that an area had before, and whose server does not answer now: it is
    /// looked after until it does.
    pub(crate) fn restore_away(&self, id: AreaId, backing: BackingDevice) {
        self.restore(id, backing);
        if let Some(held) = self.held().get_mut(&id)
            && self.segment.area(id).state() == AreaState::Open
        {
            held.retired = true;
            self.segment.pause_area(id);
        }
    }

    /// True if it is another area's second copy.
    fn is_mirror(&self, id: AreaId) -> bool {
        self.segment.area(id).state() == AreaState::Mirror
    }

    /// Shows every device, mirrors among them.
    pub fn each(&self, mut f: impl FnMut(AreaId, &BackingDevice)) {
        self.held().iter().for_each(|(id, held)| f(*id, &held.backing));
    }

    /// Gives the space of an extent back, if no process holds it. Nothing waits for a server here:
    /// an export's extent is trimmed later, if no process has it then.
    pub fn give_back(self: &Arc<Self>, extent: ExtentId) {
        let is_free = self.segment.while_unheld(extent, || self.punch(extent));
        // Not before: trimming keeps it from all others, too.
        if is_free && self.segment.place_of(extent).is_some_and(|place| self.may_block(place.area))
        {
            self.trim_later(extent);
        }
    }

    /// Gives the space back that an extent has in files. The caller keeps it from all
    /// processes meanwhile.
    fn punch(&self, extent: ExtentId) {
        let Some(place) = self.segment.place_of(extent) else { return };
        let file = |id: AreaId| match &self.held().get(&id)?.backing.medium {
            Medium::File(file) => file.try_clone().ok(),
            Medium::Nbd(..) => None,
        };
        let copy = place.mirror.map(|spot| (spot.area, spot.offset));
        for (id, offset) in [(place.area, place.offset)].into_iter().chain(copy) {
            if let Some(file) = file(id) {
                punch(&file, offset);
            }
        }
    }

    /// Notes how full the areas are, and lets no more be written to those that failed too often.
    /// What lies on one that is here is moved to others; one whose server is away is looked after
    /// until the server is back. So is what has a mirror that fails: while the server is there, it
    /// can be moved.
    pub fn measure(self: &Arc<Self>) {
        for (id, held) in self.held().iter_mut() {
            let area = self.segment.area(*id);
            if area.state() == AreaState::Mirror {
                continue;
            }
            held.peak_extents = held.peak_extents.max(area.used());
            if matches!(held.backing.medium, Medium::Nbd(..)) {
                held.in_doubt.look(self.segment, *id, Instant::now());
            }
            if !held.retired
                && area.mirror().is_some_and(|mirror| {
                    self.segment.area(mirror).errors() >= MAX_FAILED_TRANSFERS
                })
            {
                held.retired = true;
                self.segment.close_area(*id);
                continue;
            }
            let is_remote = matches!(held.backing.medium, Medium::Nbd(..));
            if area.errors() >= held.errors_before.saturating_add(MAX_FAILED_TRANSFERS)
                && !held.retired
            {
                held.retired = true;
                held.tried = Instant::now();
                // One that is being removed stays closed: its pages continue to move.
                let is_leaving = area.state() == AreaState::Closed;
                if is_remote && !is_leaving {
                    self.segment.pause_area(*id)
                } else {
                    self.segment.close_area(*id)
                }
            }
            if is_remote
                && area.state() == AreaState::Paused
                && held.tried.elapsed() > RECONNECT_INTERVAL
            {
                held.tried = Instant::now();
                let (areas, id) = (Arc::clone(self), *id);
                let again = move || {
                    // What it starts (the pumps of a connection with TLS) is work, and no look, as
                    // the controller's is.
                    swaptide_sys::affinity::go_normally();
                    areas.try_again(id);
                };
                // Without a thread it is tried at the next time.
                let _ = std::thread::Builder::new().name("redial".into()).spawn(again);
            }
        }
    }

    /// Opens an area again whose server answers.
    fn try_again(&self, id: AreaId) {
        if self.open(id).is_err() {
            return;
        }
        let mut held = self.held();
        if let Some(held) = held.get_mut(&id).filter(|held| held.retired)
            && self.segment.area(id).state() == AreaState::Paused
        {
            held.retired = false;
            held.errors_before = self.segment.area(id).errors();
            self.segment.reopen_area(id);
        }
    }

    /// All areas as they are, those with the highest priority first, with their numbers.
    pub fn view(&self) -> Vec<(AreaId, AreaView)> {
        let held = self.held();
        let all = &*held;
        let bytes = |extents: u32| u64::from(extents) * EXTENT_BYTES;
        let mut views: Vec<_> = held
            .iter()
            .filter(|(id, _)| !self.is_mirror(**id))
            .map(|(id, held)| {
                let area = self.segment.area(*id);
                let state = match area.state() {
                    AreaState::Open => "open",
                    AreaState::Paused => "away",
                    _ if held.retired => "retired",
                    _ => "leaving",
                };
                let view = AreaView {
                    name: held.backing.name.clone(),
                    kind: match held.backing.kind {
                        BackingKind::File => "file".into(),
                        BackingKind::Block => "block".into(),
                        BackingKind::Nbd => "nbd".into(),
                    },
                    place: held.backing.place.display().to_string(),
                    size_bytes: bytes(held.backing.extents),
                    used_bytes: bytes(area.used()),
                    peak_used_bytes: bytes(held.peak_extents.max(area.used())),
                    in_doubt_bytes: bytes(area.in_doubt()),
                    priority: held.backing.priority,
                    state: state.into(),
                    errors: area.errors(),
                    direct_io: held.backing.direct_io,
                    mirror: area.mirror().map(|mirror| MirrorView {
                        place: all.get(&mirror).map_or_else(String::new, |held| {
                            held.backing.place.display().to_string()
                        }),
                        errors: self.segment.area(mirror).errors(),
                    }),
                    cipher: if area.is_unencrypted() { "none".into() } else { CIPHER.into() },
                };
                (*id, view)
            })
            .collect();
        views.sort_by_key(|(id, view)| (std::cmp::Reverse(view.priority), *id));
        views
    }

    /// The area of a name or a number.
    fn find(&self, name: &str) -> Result<AreaId, AreaError> {
        let held = self.held();
        let held: BTreeMap<_, _> = held.iter().filter(|(id, _)| !self.is_mirror(**id)).collect();
        if let Some(id) = name.parse().ok().map(AreaId).filter(|id| held.contains_key(id)) {
            return Ok(id);
        }
        let mut called =
            held.iter().filter(|(_, held)| held.backing.name == name).map(|(id, _)| **id);
        match (called.next(), called.next()) {
            (Some(id), None) => Ok(id),
            (Some(_), Some(_)) => Err(AreaError::Ambiguous(name.to_owned())),
            _ => {
                let names = held.values().map(|held| held.backing.name.clone()).collect();
                Err(AreaError::Unknown(name.to_owned(), names))
            }
        }
    }

    /// Takes an area away: everything there is moved to others first. `progress` is told how many
    /// bytes are still there, every moment.
    ///
    /// # Errors
    /// See [`AreaError`]; the area is as it was then.
    pub fn remove(&self, name: &str, mut progress: impl FnMut(u64)) -> Result<(), AreaError> {
        let id = self.find(name)?;
        let area = self.segment.area(id);
        let bytes = |extents: u32| u64::from(extents) * EXTENT_BYTES;
        if self.held().get(&id).is_none_or(|held| held.leaves) {
            return Err(AreaError::Leaving(name.to_owned()));
        }
        // Repacked pages take no more room than they did: what has no room for all of them now
        // need not be begun with.
        let free: u32 = self
            .segment
            .areas()
            .filter(|(other, area)| *other != id && area.state() == AreaState::Open)
            .map(|(_, area)| area.free())
            .sum();
        if area.used() > 0 && free == 0 {
            return Err(AreaError::NoRoom { name: name.to_owned(), left: bytes(area.used()) });
        }
        let before = {
            let mut held = self.held();
            let Some(held) = held.get_mut(&id).filter(|held| !held.leaves) else {
                return Err(AreaError::Leaving(name.to_owned()));
            };
            held.leaves = true;
            let before = area.state();
            self.segment.close_area(id);
            before
        };
        let (mut least, mut since) = (u32::MAX, Instant::now());
        loop {
            let used = area.used();
            progress(bytes(used));
            let mirror = area.mirror();
            // Under the lock: from then on the number is free for another device.
            let mut held = self.held();
            if self.segment.remove_area(id) {
                held.remove(&id);
                mirror.and_then(|mirror| held.remove(&mirror));
                return Ok(());
            }
            drop(held);
            if used < least {
                (least, since) = (used, Instant::now());
            } else if since.elapsed() > NO_PROGRESS_TIMEOUT {
                break;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        if let Some(held) = self.held().get_mut(&id) {
            held.leaves = false;
            match before {
                // Its server is tried again.
                AreaState::Paused => self.segment.pause_area(id),
                // Not one that has failed meanwhile.
                _ if !held.retired => self.segment.reopen_area(id),
                _ => {}
            }
        }
        let left = bytes(area.used());
        let others_full = self
            .segment
            .areas()
            .filter(|(other, area)| *other != id && area.state() == AreaState::Open)
            .all(|(_, area)| !area.has_room());
        if others_full {
            return Err(AreaError::NoRoom { name: name.to_owned(), left });
        }
        Err(AreaError::Stuck { name: name.to_owned(), left, holders: self.segment.holders(id) })
    }
}

impl AreaOpener for Areas {
    fn may_block(&self, id: AreaId) -> bool {
        self.held().get(&id).is_some_and(|held| matches!(held.backing.medium, Medium::Nbd(..)))
    }

    fn open(&self, id: AreaId) -> Result<OwnedFd, Errno> {
        let (connector, export) = match &self.held().get(&id).ok_or(Errno::NODEV)?.backing.medium {
            Medium::File(file) => return rustix::io::fcntl_dupfd_cloexec(file, 0),
            Medium::Nbd(connector, export) => (Arc::clone(connector), *export),
        };
        connector.connect_again(&export).map_err(|_| Errno::NODEV)
    }
}

fn punch(file: &File, offset: u64) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if rustix::fs::fallocate(file, flags, offset, EXTENT_BYTES).is_err() {
        // A block device that cannot write zeros without being sent them may know how to discard.
        // One that knows neither keeps the space until the run ends; nothing else depends on it.
        const BLKDISCARD: libc::Ioctl = 0x1277;
        let range = [offset, EXTENT_BYTES];
        // SAFETY: the call reads the two numbers, and does nothing to what is no block device.
        let _ = unsafe {
            libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(file), BLKDISCARD, range.as_ptr())
        };
    }
}

fn no_such_area(names: &[String]) -> String {
    if names.is_empty() {
        ": the run has no swap area".to_owned()
    } else {
        format!(" is not a swap area of this run; it has {}", names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Scratch, segment};
    use swaptide_ipc::{AreaMask, SlotIndex};

    fn backing(scratch: &Scratch, name: &str, priority: i32, extents: u32) -> BackingDevice {
        let path = scratch.path(name);
        let file =
            File::options().read(true).write(true).create_new(true).open(&path).expect("file");
        file.set_len(u64::from(extents) * EXTENT_BYTES).expect("length");
        let (name, medium) = (format!("file:{name}"), Medium::File(file));
        BackingDevice {
            priority,
            ..BackingDevice::new(BackingKind::File, name, path, medium, extents)
        }
    }

    fn areas(scratch: &Scratch, sizes: &[(&str, i32, u32)]) -> (Arc<Areas>, &'static Segment) {
        let segment = segment();
        let areas = Arc::new(Areas::new(segment));
        for (name, priority, extents) in sizes {
            areas.add(backing(scratch, name, *priority, *extents)).expect("an area");
        }
        (areas, segment)
    }

    fn lease(segment: &Segment, index: SlotIndex, n: usize) -> Vec<ExtentId> {
        (0..n).map(|_| segment.lease_extent(index, AreaMask::ALL).expect("an extent")).collect()
    }

    #[test]
    fn areas_are_listed_by_priority_with_what_is_used() {
        let scratch = Scratch::new("areas-list");
        let (areas, segment) = areas(&scratch, &[("slow", -1, 4), ("fast", 10, 2)]);
        let index = segment.claim(7, 0).expect("slot");
        lease(segment, index, 3);
        let views: Vec<_> = areas
            .view()
            .into_iter()
            .map(|(_, v)| (v.name, v.used_bytes / EXTENT_BYTES, v.state))
            .collect();
        assert_eq!(
            views,
            [("file:fast".into(), 2, "open".into()), ("file:slow".into(), 1, "open".into())]
        );
    }

    #[test]
    fn an_area_goes_when_its_holders_have_left_it() {
        let scratch = Scratch::new("areas-off");
        let (areas, segment) = areas(&scratch, &[("a", 5, 4), ("b", 1, 8)]);
        let index = segment.claim(7, 0).expect("slot");
        let held = lease(segment, index, 3);
        let mut told = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for extent in held {
                    std::thread::sleep(Duration::from_millis(60));
                    segment.release_extent(index, extent);
                }
            });
            areas.remove("file:a", |left| told.push(left / EXTENT_BYTES)).expect("gone");
        });
        assert_eq!((told.first(), told.last()), (Some(&3), Some(&0)));
        assert!(told.is_sorted_by(|a, b| a >= b), "{told:?}");
        assert_eq!(areas.view().len(), 1);
        assert!(matches!(areas.remove("file:a", |_| ()), Err(AreaError::Unknown(..))));
    }

    #[test]
    fn without_room_elsewhere_nothing_is_begun() {
        let scratch = Scratch::new("areas-full");
        let (areas, segment) = areas(&scratch, &[("only", 5, 4)]);
        let index = segment.claim(7, 0).expect("slot");
        lease(segment, index, 1);
        assert!(matches!(areas.remove("file:only", |_| ()), Err(AreaError::NoRoom { .. })));
        lease(segment, index, 3);
        assert_eq!(areas.view()[0].1.state, "open");
    }

    #[test]
    fn one_that_fails_too_often_is_retired() {
        let scratch = Scratch::new("areas-retired");
        let (areas, segment) = areas(&scratch, &[("bad", 5, 4), ("good", 1, 4)]);
        let index = segment.claim(7, 0).expect("slot");
        let (bad, good) =
            (areas.find("file:bad").expect("bad"), areas.find("file:good").expect("good"));
        (0..MAX_FAILED_TRANSFERS).for_each(|_| segment.area(bad).count_error());
        areas.measure();
        assert_eq!(areas.view()[0].1.state, "retired");
        let extent = lease(segment, index, 1)[0];
        assert_eq!(segment.place_of(extent).expect("a place").area, good);
        areas.remove("file:bad", |_| ()).expect("it can be taken away");
    }

    #[test]
    fn a_mirror_is_shown_with_its_area_and_goes_with_it() {
        let scratch = Scratch::new("areas-mirror");
        let (areas, segment) = areas(&scratch, &[("plain", 1, 4)]);
        let mut main = backing(&scratch, "main", 5, 4);
        main.mirror = Some(Box::new(backing(&scratch, "copy", 5, 4)));
        let id = areas.add(main).expect("an area");
        let copy = segment.area(id).mirror().expect("a mirror");
        let views = areas.view();
        assert_eq!(
            views.iter().map(|(_, view)| view.name.as_str()).collect::<Vec<_>>(),
            ["file:main", "file:plain"]
        );
        let shown = |views: &[(AreaId, AreaView)]| {
            views[0].1.mirror.as_ref().map(|m| (m.place.ends_with("copy"), m.errors))
        };
        assert_eq!(shown(&views), Some((true, 0)));
        assert!(matches!(areas.remove("file:copy", |_| ()), Err(AreaError::Unknown(..))));
        assert!(matches!(areas.remove(&copy.0.to_string(), |_| ()), Err(AreaError::Unknown(..))));
        let index = segment.claim(7, 0).expect("slot");
        let extent = lease(segment, index, 1)[0];
        let [main, file] = [id, copy].map(|id| File::from(areas.open(id).expect("open")));
        {
            use std::os::unix::fs::{FileExt, MetadataExt};
            for file in [&main, &file] {
                file.write_all_at(&[7; 1 << 20], 0).expect("write");
                file.sync_all().expect("sync");
            }
            areas.punch(extent);
            assert_eq!(
                [&main, &file].map(|file| file.metadata().expect("metadata").blocks()),
                [0, 0]
            );
        }
        segment.release_extent(index, extent);
        (0..MAX_FAILED_TRANSFERS).for_each(|_| segment.area(copy).count_error());
        areas.measure();
        assert_eq!(
            (areas.view()[0].1.state.as_str(), shown(&areas.view())),
            ("retired", Some((true, MAX_FAILED_TRANSFERS)))
        );
        areas.remove("file:main", |_| ()).expect("gone");
        assert_eq!(
            (segment.area(copy).state(), areas.open(copy).is_err()),
            (AreaState::None, true)
        );
    }

    #[test]
    fn names_that_several_have_need_their_number() {
        let scratch = Scratch::new("areas-names");
        let (areas, _) = areas(&scratch, &[("x", 5, 4)]);
        let mut twin = backing(&scratch, "y", 5, 4);
        twin.name = "file:x".into();
        let id = areas.add(twin).expect("an area");
        assert!(matches!(areas.find("file:x"), Err(AreaError::Ambiguous(_))));
        assert_eq!(areas.find(&id.0.to_string()).expect("by number"), id);
    }

    #[test]
    fn punching_frees_the_extents_own_bytes_only() {
        use std::os::unix::fs::{FileExt, MetadataExt};
        let scratch = Scratch::new("areas-punch");
        let (areas, segment) = areas(&scratch, &[("p", 5, 3)]);
        let index = segment.claim(7, 0).expect("slot");
        let held = lease(segment, index, 2);
        let file = File::from(areas.open(AreaId(0)).expect("open"));
        for extent in &held {
            file.write_all_at(&[7; 65536], segment.place_of(*extent).expect("place").offset)
                .expect("write");
        }
        file.sync_all().expect("sync");
        let before = file.metadata().expect("metadata").blocks();
        areas.punch(held[0]);
        let after = file.metadata().expect("metadata").blocks();
        assert!(after > 0 && after <= before / 2 + 16, "{before} then {after}");
    }

    #[test]
    fn area_failing_at_removal_not_reopened() {
        let scratch = Scratch::new("areas-failing");
        let (areas, segment) = areas(&scratch, &[("bad", 5, 8), ("good", 1, 8)]);
        let holder = segment.claim(1, 0).expect("slot");
        let area_of = |extent| segment.place_of(extent).expect("its place").area;
        assert_eq!(area_of(lease(segment, holder, 1)[0]), AreaId(0));
        let leaving = Arc::clone(&areas);
        let remover = std::thread::spawn(move || leaving.remove("file:bad", |_| ()));
        while segment.area(AreaId(0)).state() == AreaState::Open {
            std::thread::sleep(POLL_INTERVAL);
        }
        // It cannot be read, so that its pages do not move.
        for _ in 0..MAX_FAILED_TRANSFERS {
            segment.area(AreaId(0)).count_error();
        }
        areas.measure();
        remover.join().expect("thread").expect_err("something is left there");
        areas.measure();
        assert_eq!(areas.view()[0].1.state, "retired");
        assert_eq!(area_of(lease(segment, holder, 1)[0]), AreaId(1));
    }

    #[test]
    fn one_that_is_away_stays_so_until_its_server_is_back() {
        let scratch = Scratch::new("areas-away");
        let (before, segment) = areas(&scratch, &[("away", 5, 8), ("other", 1, 8)]);
        let (away, holder) = (AreaId(0), segment.claim(1, 0).expect("slot"));
        lease(segment, holder, 1);
        segment.pause_area(away);
        let after = Areas::new(segment);
        for (id, held) in std::mem::take(&mut *before.held()) {
            after.restore(id, held.backing);
        }
        // What lies there does not move.
        std::thread::scope(|scope| {
            let remover = scope.spawn(|| after.remove("file:away", |_| ()));
            while segment.area(away).state() == AreaState::Paused {
                std::thread::sleep(POLL_INTERVAL);
            }
            assert!(matches!(after.remove("file:away", |_| ()), Err(AreaError::Leaving(_))));
            let left = remover.join().expect("thread");
            assert!(matches!(left, Err(AreaError::Stuck { .. })), "{left:?}");
        });
        assert_eq!(after.view()[0].1.state, "away");
        after.try_again(away);
        assert_eq!(after.view()[0].1.state, "open");
    }

    #[test]
    fn area_removal_can_be_restarted() {
        let scratch = Scratch::new("areas-begun");
        let (before, segment) = areas(&scratch, &[("leaving", 5, 8), ("other", 1, 8)]);
        segment.close_area(AreaId(0));
        let after = Areas::new(segment);
        for (id, held) in std::mem::take(&mut *before.held()) {
            after.restore(id, held.backing);
        }
        assert_eq!(after.view()[0].1.state, "retired");
        after.remove("file:leaving", |_| ()).expect("nothing is left there");
        assert_eq!(after.view().len(), 1);
    }
}
