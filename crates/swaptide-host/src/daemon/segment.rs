//! The daemon's shared segment: a sealed memory file, and how a daemon that is started again finds
//! the one of before.
//!
//! A program of a run has the segment open for writing. In a file of a file system it could cut it,
//! and end all its processes by SIGBUS; a memory file whose size is sealed cannot be cut. It has no
//! name, though, so it is found again by the processes that have it:
//! 1. systemd, which keeps descriptors for a service over its restart (`FileDescriptorStoreMax=` in
//!    the unit);
//! 2. a process that has it open: both processes of each run's supervisor do;
//! 3. a process that has it mapped, by `/proc/PID/map_files`: every program of a run has. That
//!    takes the rights of root.
//!
//! If no process has it, none needs it.
//!
//! Invariants
//! 1. The segment is in memory only: it holds the key of all that is swapped.
//! 2. A descriptor is taken up only if it is the memory file that was written down (device and
//!    inode, since this boot), is of this user, has a segment's size, and cannot be cut: the
//!    process that handed it over may have lied.
//!
//! Locks: none.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use swaptide_ipc::Segment;
use swaptide_sys::mem::{SharedMap, memfd_create};

use crate::control::trust::is_sound_segment;
use crate::daemon::notify;

/// The name of a segment's descriptor in systemd's store.
const NAME: &str = "swaptide-segment";

/// The identity of a segment's memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentId {
    device: u64,
    inode: u64,
}

impl SegmentId {
    /// Of an open segment.
    pub fn of(file: impl AsFd) -> io::Result<SegmentId> {
        let found = rustix::fs::fstat(file)?;
        Ok(SegmentId { device: found.st_dev, inode: found.st_ino })
    }

    fn is(self, found: &Metadata) -> bool {
        (found.dev(), found.ino()) == (self.device, self.inode) && found.is_file()
    }

    /// Whether a process has mapped the segment: a number alone may have come to mean another
    /// process. `None` where its mappings cannot be read (it is not dumpable, for example).
    pub(crate) fn is_mapped_by(self, pid: u32) -> Option<bool> {
        self.mappings(pid).ok().map(|mappings| !mappings.is_empty())
    }

    /// The ranges of a process's mappings of it, as `/proc` writes them.
    fn mappings(self, pid: u32) -> io::Result<Vec<String>> {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let mut maps = std::fs::read(process.join("maps"))?;
        if maps.is_empty() {
            // Its first thread has ended; others may have the memory.
            for tid in numbers(&process.join("task")).filter(|tid| *tid != pid) {
                maps.extend(std::fs::read(process.join(format!("task/{tid}/maps")))?);
            }
        }
        let (major, minor) = (rustix::fs::major(self.device), rustix::fs::minor(self.device));
        let device = format!("{major:02x}:{minor:02x}");
        let range = |line: &[u8]| {
            let line = String::from_utf8_lossy(line);
            let mut words = line.split_ascii_whitespace();
            let range = words.next()?.to_owned();
            let same = words.nth(2) == Some(&device) && words.next()?.parse() == Ok(self.inode);
            same.then_some(range)
        };
        Ok(maps.split(|byte| *byte == b'\n').filter_map(range).collect())
    }

    /// Opens what a link of `/proc` stands for, if it is the segment. Nothing else is opened for
    /// more than its identity.
    fn open(self, link: &Path) -> Option<OwnedFd> {
        let look = File::options().read(true).custom_flags(libc::O_PATH).open(link).ok()?;
        if !self.is(&look.metadata().ok()?) {
            return None;
        }
        let file = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/self/fd/{}", look.as_raw_fd()))
            .ok()?;
        self.is_sound(&file).then(|| file.into())
    }

    fn is_sound(self, file: &File) -> bool {
        is_sound_segment(file, &[rustix::process::geteuid().as_raw()])
            && file.metadata().is_ok_and(|found| self.is(&found))
    }

    /// Finds the segment, wherever it is had.
    pub fn find(self) -> Option<OwnedFd> {
        if let Some(stored) = from_store() {
            let file = File::from(stored);
            if self.is_sound(&file) {
                return Some(file.into());
            }
        }
        let pids = || numbers(Path::new("/proc")).filter(|pid| *pid != std::process::id());
        let opened = |pid: u32| {
            let place = PathBuf::from(format!("/proc/{pid}/fd"));
            let is_memory = |link: &PathBuf| {
                std::fs::read_link(link)
                    .is_ok_and(|to| to.as_os_str().as_bytes().starts_with(b"/memfd:"))
            };
            let links: Vec<PathBuf> =
                numbers(&place).map(|fd| place.join(fd.to_string())).filter(is_memory).collect();
            links.iter().find_map(|link| self.open(link))
        };
        let mapped = |pid: u32| {
            let ranges = self.mappings(pid).unwrap_or_default();
            ranges
                .iter()
                .find_map(|range| self.open(Path::new(&format!("/proc/{pid}/map_files/{range}"))))
        };
        pids().find_map(opened).or_else(|| pids().find_map(mapped))
    }
}

/// The entries of a directory that are numbers.
fn numbers(directory: &Path) -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Maps a daemon's segment for reading and writing.
pub fn map(file: &OwnedFd) -> io::Result<SharedMap> {
    Ok(SharedMap::map(file.as_fd(), Segment::BYTES)?)
}

/// A fresh segment, and its memory file.
pub(crate) fn make() -> io::Result<(&'static Segment, OwnedFd)> {
    let file = memfd_create(c"swaptide", Segment::BYTES as u64)?;
    let segment = Segment::raw(map(&file)?).map_err(io::Error::other)?;
    Ok((segment, file))
}

/// The segment among the descriptors that systemd has kept, if this process has any.
fn from_store() -> Option<OwnedFd> {
    let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
    if number("LISTEN_PID") != Some(std::process::id()) {
        return None;
    }
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut found = None;
    for (fd, name) in (3..).zip(names.split(':')).take(number("LISTEN_FDS")?.min(64) as usize) {
        // SAFETY: the service manager says that the number is open and this process's; nothing here
        // has used it, and it is asked for once, before any thread is started. One that is not the
        // segment is closed.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if name == NAME
            && found.is_none()
            && rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).is_ok()
        {
            found = Some(fd);
        }
    }
    found
}

/// Tells systemd to keep the segment, in place of any before; no matter whether there is a systemd.
/// Without it, the segment is found by the processes that have it open.
pub fn keep(segment: &OwnedFd) {
    forget();
    notify::send(&format!("FDSTORE=1\nFDNAME={NAME}"), &[segment.as_fd()]);
}

/// Tells systemd to keep it no more.
pub fn forget() {
    notify::send(&format!("FDSTOREREMOVE=1\nFDNAME={NAME}"), &[]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_cannot_be_cut_and_is_known_by_its_identity() {
        let (_, file) = make().expect("segment");
        let id = SegmentId::of(&file).expect("identity");
        assert!(
            rustix::fs::ftruncate(&file, 0).is_err()
                && rustix::fs::ftruncate(&file, 1 << 40).is_err()
        );
        let file = File::from(file);
        assert!(id.is_sound(&file));
        assert_eq!(id.is_mapped_by(std::process::id()), Some(true));
        assert_eq!(id.is_mapped_by(u32::MAX), None, "there is nothing to be read");
        let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        assert!(id.open(&link).is_some());
        let other = SegmentId { inode: id.inode + 1, ..id };
        assert!(
            !other.is_sound(&file)
                && other.open(&link).is_none()
                && other.is_mapped_by(std::process::id()) == Some(false)
        );
    }

    #[test]
    fn what_can_be_cut_or_is_of_another_size_is_not_taken_up() {
        // SAFETY: the call only makes a descriptor.
        let open = File::from(unsafe {
            OwnedFd::from_raw_fd(libc::memfd_create(c"x".as_ptr(), libc::MFD_ALLOW_SEALING))
        });
        open.set_len(Segment::BYTES as u64).expect("length");
        assert!(!SegmentId::of(&open).expect("identity").is_sound(&open), "it has no seals");
        let short = File::from(memfd_create(c"x", 4096).expect("memfd"));
        assert!(!SegmentId::of(&short).expect("identity").is_sound(&short));
    }

    #[test]
    fn a_segment_is_found_by_a_process_that_has_it() {
        let (_, file) = make().expect("segment");
        let id = SegmentId::of(&file).expect("identity");
        let mut child = std::process::Command::new("sleep")
            .arg("600")
            .stdin(file.try_clone().expect("clone"))
            .spawn()
            .expect("sleep");
        let found = id.find();
        child.kill().expect("kill");
        child.wait().expect("wait");
        assert_eq!(SegmentId::of(found.expect("the child has it")).expect("identity"), id);
        assert!(id.find().is_none(), "this process does not count");
    }
}
