//! Which processes may write to memory past its page tables.
//!
//! Write protection stops a program's instructions and the kernel's copies. It does not stop a
//! device that was given the page itself: direct I/O into the memory, buffers registered with an
//! io_uring, RDMA, VFIO. While one of that kind may be at work nothing goes out, for what it writes
//! to a page after that was read would be lost.
//!
//! The kernel does not tell which pages are held so. It tells of a process whether it has pinned
//! memory for long (`VmPin`), and of each descriptor whether it was opened for direct I/O. Both are
//! asked after the pages were write-protected and before anything is read: one that takes a page
//! after that waits for it, and one that has taken a page before has the descriptor open or is done
//! within the time that the questions take.
//!
//! Locks: none.

use std::fs;

use swaptide_ipc::shared::REGION_PATH;

const O_DIRECT: u32 = 0o40000;

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
/// not.
pub(crate) fn pinned(pid: u32) -> Option<PinnedBy> {
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { return None };
    if figure(&status, "VmPin:") > 0 {
        return Some(PinnedBy::LongTermPin);
    }
    if figure(&status, "VmLck:") > 0 && locks_region(pid) {
        return Some(PinnedBy::Locked);
    }
    match fs::read_dir(format!("/proc/{pid}/fdinfo")) {
        Ok(entries) => {
            let direct = |text: String| {
                text.lines().any(|line| line.strip_prefix("flags:").is_some_and(is_direct))
            };
            let mut infos = entries.filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok());
            infos.any(direct).then_some(PinnedBy::Direct)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(_) => Some(PinnedBy::Unknown),
    }
}

fn is_direct(flags: &str) -> bool {
    u32::from_str_radix(flags.trim(), 8).is_ok_and(|flags| flags & O_DIRECT != 0)
}

fn figure(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

fn locks_region(pid: u32) -> bool {
    let path = std::str::from_utf8(REGION_PATH).unwrap_or_default();
    let Ok(text) = fs::read_to_string(format!("/proc/{pid}/smaps")) else { return true };
    let mut in_region = false;
    text.lines().any(|line| {
        match line.strip_prefix("VmFlags:") {
            Some(flags) => return in_region && flags.split_whitespace().any(|flag| flag == "lo"),
            // Only the first line of a mapping begins with its addresses.
            None if line
                .split('-')
                .next()
                .is_some_and(|start| u64::from_str_radix(start, 16).is_ok()) =>
            {
                in_region = line.contains(path);
            }
            None => {}
        }
        false
    })
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
        assert_eq!(pinned(u32::MAX / 2), None, "nobody");
    }
}
