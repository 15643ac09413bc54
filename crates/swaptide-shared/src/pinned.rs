//! Which processes may write to memory past its page tables.
//!
//! Write protection stops a program's instructions and the kernel's copies. It does not stop a
//! device that was given the page itself: direct I/O into the memory, buffers registered with an
//! io_uring, RDMA, VFIO. While one of that kind may be at work nothing goes out, for what it writes
//! to a page after that was read would be lost.
//!
//! The kernel does not tell which pages are held so. It tells of a process whether it has pinned
//! memory for long (`VmPin`), and of each descriptor whether it was opened for direct I/O, and on
//! which mount: some file systems read into a program's pages without being asked to. Both are
//! asked after the pages were write-protected and before anything is read: one that takes a page
//! after that waits for it, and one that has taken a page before has the descriptor open or is done
//! within the time that the questions take. Not seen is a file that was closed while such a read of
//! it is under way (docs/semantics.md).
//!
//! Locks: none.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;

use swaptide_ipc::shared::REGION_PATH;

const O_DIRECT: u32 = 0o40000;
/// File systems that can be mounted without a cache for files.
const CACHELESS: [&str; 5] = ["virtiofs", "9p", "cifs", "smb3", "orangefs"];
/// The name of an io_uring's descriptor.
const RING: &str = "anon_inode:[io_uring]";
/// Lines that the kernel has for every descriptor: `pos`, `flags`, `mnt_id`, `ino`.
const USUAL_LINES: usize = 4;

/// Why memory of a process is left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PinnedBy {
    /// It has long-term pins (`VmPin`).
    LongTermPin,
    /// A region is locked in memory.
    Locked,
    /// It has something open for direct I/O.
    Direct,
    /// It cannot be asked.
    Unknown,
}

/// Whether a process may write past its page tables, or has locked a region. One that is gone may
/// not. A question that fails for another reason, for lack of descriptors for instance, says
/// nothing.
pub(crate) fn pinned(pid: u32) -> Option<PinnedBy> {
    let status = match fs::read_to_string(format!("/proc/{pid}/status")) {
        Ok(status) => status,
        Err(error) if is_gone(&error) => return None,
        Err(_) => return Some(PinnedBy::Unknown),
    };
    if figure(&status, "VmPin:") > 0 {
        return Some(PinnedBy::LongTermPin);
    }
    let locked = figure(&status, "VmLck:");
    if locked > 0 && locks_region(pid, locked) {
        return Some(PinnedBy::Locked);
    }
    let entries = match fs::read_dir(format!("/proc/{pid}/fdinfo")) {
        Ok(entries) => entries,
        Err(error) if is_gone(&error) => return None,
        Err(_) => return Some(PinnedBy::Unknown),
    };
    let mounts = match fs::read_to_string(format!("/proc/{pid}/mountinfo")) {
        Ok(text) => direct_mounts(&text),
        Err(error) if is_gone(&error) => return None,
        Err(_) => return Some(PinnedBy::Unknown),
    };
    let is_on_one = |text: &str| !mounts.is_empty() && mounts.contains(&figure(text, "mnt_id:"));
    for entry in entries {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) if is_gone(&error) => continue,
            Err(_) => return Some(PinnedBy::Unknown),
        };
        match fs::read_to_string(entry.path()) {
            Ok(text) if text.lines().any(is_direct) || is_on_one(&text) => {
                return Some(PinnedBy::Direct);
            }
            Ok(text) => {
                let of_ring = || {
                    let name = PathBuf::from(format!("/proc/{pid}/fd")).join(entry.file_name());
                    fs::read_link(name).is_ok_and(|name| name.as_os_str() == RING)
                };
                if has_files(&text, of_ring) {
                    return Some(PinnedBy::Direct);
                }
            }
            // The process has closed it.
            Err(error) if is_gone(&error) => {}
            Err(_) => return Some(PinnedBy::Unknown),
        }
    }
    None
}

/// The numbers of mounts, out of a list of them, whose file systems may read straight into a
/// program's pages though a file is not open for direct I/O: by the word of a server (FUSE), or
/// without a cache.
fn direct_mounts(mountinfo: &str) -> HashSet<u64> {
    let number = |line: &str| {
        let (mount, kind) = line.split_once(" - ")?;
        let kind = kind.split(' ').next()?;
        let is_direct = kind.starts_with("fuse") || CACHELESS.contains(&kind);
        is_direct.then(|| mount.split(' ').next()?.parse().ok())?
    };
    mountinfo.lines().filter_map(number).collect()
}

/// True if an error says that what was asked about is not there any more.
fn is_gone(error: &std::io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    matches!(errno, Some(rustix::io::Errno::NOENT | rustix::io::Errno::SRCH))
}

/// True if an io_uring has files registered, which may be open for direct I/O and in no table of
/// descriptors. `is_ring` tells whether a descriptor of which nothing in particular is told is one:
/// of a ring that is busy the kernel tells nothing.
fn has_files(fdinfo: &str, is_ring: impl FnOnce() -> bool) -> bool {
    let mut lines = fdinfo.lines().skip_while(|line| !line.starts_with("UserFiles:"));
    match lines.next() {
        // A number and a path; what is no file of a file system does no direct I/O.
        Some(_) => lines.take_while(|line| !line.starts_with("UserBufs:")).any(|line| {
            line.split_once(": ").is_some_and(|(_, path)| path.trim_start().starts_with('/'))
        }),
        None => fdinfo.lines().count() <= USUAL_LINES && is_ring(),
    }
}

fn is_direct(line: &str) -> bool {
    let Some(flags) = line.strip_prefix("flags:") else { return false };
    u32::from_str_radix(flags.trim(), 8).is_ok_and(|flags| flags & O_DIRECT != 0)
}

fn figure(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// True if a process that has `locked` KiB locked has locked a region, or has locked more than its
/// mappings say: so VFIO counts what a device may write to.
fn locks_region(pid: u32, locked: u64) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/smaps")) {
        Ok(text) => {
            let (of_mappings, has_region) = locked_mappings(&text);
            has_region || of_mappings < locked
        }
        Err(_) => true,
    }
}

/// KiB of locked mappings, and whether a region is among them.
fn locked_mappings(smaps: &str) -> (u64, bool) {
    let path = std::str::from_utf8(REGION_PATH).unwrap_or_default();
    let (mut of_mappings, mut has_region) = (0, false);
    let (mut size, mut in_region) = (0, false);
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if flags.split_whitespace().any(|flag| flag == "lo") {
                of_mappings += size;
                has_region |= in_region;
            }
        } else if line.starts_with("Size:") {
            size = figure(line, "Size:");
        } else if line.split('-').next().is_some_and(|start| u64::from_str_radix(start, 16).is_ok())
        {
            // Only the first line of a mapping begins with its addresses.
            in_region = line.contains(path);
        }
    }
    (of_mappings, has_region)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn a_process_with_direct_io_is_told_from_one_without() {
        let path = std::env::temp_dir().join(format!("swaptide-direct-{}", std::process::id()));
        fs::write(&path, [0; 4096]).expect("file");
        assert_eq!(pinned(std::process::id()), None);
        match fs::OpenOptions::new().read(true).custom_flags(O_DIRECT as i32).open(&path) {
            Ok(_direct) => assert_eq!(pinned(std::process::id()), Some(PinnedBy::Direct)),
            // A file system without direct I/O: what cannot be opened needs no answer.
            Err(error) => assert_eq!(error.raw_os_error(), Some(22), "{error}"),
        }
        fs::remove_file(path).expect("remove");
        assert_eq!(pinned(std::process::id()), None);
        assert_eq!(pinned(u32::MAX / 2), None, "no such process");
    }

    #[test]
    fn a_question_that_fails_is_no_answer() {
        let error = std::io::Error::from_raw_os_error;
        assert!(is_gone(&error(2)) && is_gone(&error(3)));
        // No descriptor, no memory, no permission.
        assert!([24, 23, 12, 13, 1].into_iter().all(|errno| !is_gone(&error(errno))));
    }

    #[test]
    fn mounts_are_told_apart_by_their_file_systems() {
        let mounts = direct_mounts(
            "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
             40 22 0:35 / /mnt/a\\040b rw - fuse.sshfs host: rw,user_id=0\n\
             41 22 0:36 / /mnt/c rw shared:9 master:2 - 9p share rw\n\
             42 22 0:37 / /run rw - tmpfs fuse rw\nnonsense\n",
        );
        assert_eq!(mounts, HashSet::from([40, 41]));
    }

    #[test]
    fn files_that_a_ring_has_registered_count() {
        let usual = "pos:\t0\nflags:\t02000002\nmnt_id:\t15\nino:\t7\n";
        let ring = |files: &str| {
            format!("{usual}SqMask:\t0x7\nUserFiles:\t8\n{files}UserBufs:\t0\nPollList:\n")
        };
        let of_none = || -> bool { unreachable!("it is known to be a ring") };
        assert!(has_files(&ring("    0: /tmp/file\n"), of_none));
        assert!(has_files(&ring("    0: socket:[7]\n    3: /dev/sda\n"), of_none));
        assert!(!has_files(&ring(""), of_none) && !has_files(&ring("    0: <none>\n"), of_none));
        assert!(has_files(usual, || true), "a busy ring tells nothing");
        assert!(!has_files(usual, || false));
    }

    #[test]
    fn more_locked_than_mappings_say_is_a_devices() {
        let smaps = "7f0000000000-7f0000100000 rw-s 00000000 00:01 9  /memfd:swaptide-region\n\
                     Size:               1024 kB\nVmFlags: rd wr sh\n\
                     7f0000200000-7f0000201000 rw-p 00000000 00:00 0\n\
                     Size:                  4 kB\nVmFlags: rd wr lo\n";
        assert_eq!(locked_mappings(smaps), (4, false));
        assert_eq!(locked_mappings(&smaps.replace("wr sh", "wr sh lo")), (1028, true));
    }
}
