//! Swap areas that a process of the run serves itself.
//!
//! Such a server waits for a page of its own that only it can deliver. An area is refused when a
//! process of the run listens where an NBD URL leads, or has `/dev/fuse` open while the area's file
//! is on a FUSE file system.
//!
//! Invariants
//! 1. No process is waited for: no server is asked, and no file on its file system is touched.
//!    Nothing is connected to either: some servers end when a connection does.
//! 2. What cannot be read (another user's process, another namespace) is not found: the check finds
//!    mistakes, and does not prevent an attack.
//!
//! Locks: none.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::nbd::Endpoint;
use crate::swap::listeners::{tcp_listeners, unix_listeners};
use crate::swap::mirror_option::Mirror;
use crate::swap::spec::{Device, DeviceKind};

/// Descriptors of one process that are looked at.
const MAX_DESCRIPTORS: usize = 1 << 16;

/// Finds a process that serves a device. `members` selects the processes of the run among all.
///
/// Returns one line that says why the device is refused.
pub(crate) fn refusal(
    device: &Device,
    members: impl FnOnce(Vec<u32>) -> Vec<u32>,
) -> Option<String> {
    let targets = targets(device);
    if targets.is_empty() {
        return None;
    }
    let all = swaptide_sys::process::processes().unwrap_or_default();
    let members = members(all.iter().map(|process| process.pid).collect());
    let server = members.into_iter().find(|pid| has_open(*pid, &targets))?;
    Some(format!(
        "{}: process {server} of this run serves it, and would wait for its own pages; run the \
        server outside",
        device.name()
    ))
}

/// Returns the paths that a server of the device has open, as the links in `/proc/PID/fd` name
/// them.
fn targets(device: &Device) -> HashSet<PathBuf> {
    let mut paths: Vec<&Path> = Vec::new();
    let mut targets = HashSet::new();
    match &device.kind {
        DeviceKind::Nbd(url) => {
            let inodes = match &url.place {
                Endpoint::Unix(path) => unix_listeners(path),
                Endpoint::Tcp { host, port } => tcp_listeners(host, *port),
            };
            targets
                .extend(inodes.into_iter().map(|inode| PathBuf::from(format!("socket:[{inode}]"))));
        }
        DeviceKind::File { path, .. } => paths.push(path),
        DeviceKind::Zram { .. } | DeviceKind::Block { .. } => {}
    }
    if let Some(Mirror::Place { path, .. }) = &device.mirror {
        paths.push(path);
    }
    if paths.into_iter().any(is_on_fuse) {
        targets.insert("/dev/fuse".into());
    }
    targets
}

/// True if a file is on a FUSE file system, or would be. Symbolic links are not followed.
fn is_on_fuse(path: &Path) -> bool {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    std::path::absolute(path).is_ok_and(|path| fuse_row(&String::from_utf8_lossy(&table), &path))
}

/// The same in a table as `/proc/PID/mountinfo`. The last mount at a place is the one that is seen.
fn fuse_row(table: &str, path: &Path) -> bool {
    let row = |line: &str| {
        let place = PathBuf::from(unescape(line.split(' ').nth(4)?));
        let kind = line.split_once(" - ")?.1.split(' ').next()?;
        path.starts_with(&place).then(|| (place.as_os_str().len(), kind.starts_with("fuse")))
    };
    table.lines().filter_map(row).max_by_key(|(len, _)| *len).is_some_and(|(_, is_fuse)| is_fuse)
}

/// A path of that table without its escapes: `\040` and the like.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut path = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                path.push(code.into());
                path.push_str(&part[3..]);
            }
            None => path.push_str(part),
        }
    }
    path
}

fn has_open(pid: u32, targets: &HashSet<PathBuf>) -> bool {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let mut links =
        entries.take(MAX_DESCRIPTORS).filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    links.any(|link| targets.contains(&link))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    fn refused(device: &str) -> Option<String> {
        let device = crate::swap::spec::parse(device).expect("a device");
        refusal(&device, |all| all.into_iter().filter(|pid| *pid == std::process::id()).collect())
    }

    #[test]
    fn a_member_that_listens_is_found() {
        let this = format!("process {} of this run", std::process::id());
        for address in ["127.0.0.1:0", "0.0.0.0:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                assert_eq!(address, "[::]:0", "there is IPv4");
                continue;
            };
            let port = listener.local_addr().expect("an address").port();
            let url = format!("nbd://127.0.0.1:{port}");
            assert!(refused(&url).is_some_and(|why| why.contains(&this)), "{address}");
            drop(listener);
            assert_eq!(refused(&url), None, "{address}");
        }
        let path = std::env::temp_dir().join(format!("swaptide circular {}", std::process::id()));
        let listener = UnixListener::bind(&path).expect("a socket");
        let found = unix_listeners(&path);
        let url = format!("nbd+unix:///?socket={}", path.display()).replace(' ', "%20");
        let why = refused(&url);
        drop(listener);
        std::fs::remove_file(&path).expect("the socket has its name");
        assert_eq!(found.len(), 1);
        assert!(why.is_some_and(|why| why.contains(&this)));
    }

    #[test]
    fn others_that_listen_are_not_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let device =
            crate::swap::spec::parse(&format!("nbd://127.0.0.1:{port}")).expect("a device");
        assert_eq!(refusal(&device, |_| Vec::new()), None);
        assert_eq!(refused(&format!("nbd://127.0.0.2:{port}")), None, "another address");
    }

    #[test]
    fn the_innermost_mount_tells_of_fuse() {
        let table = "21 1 0:20 / / rw - ext4 /dev/vda rw\n\
            40 21 0:50 / /mnt/a\\040b rw,nosuid - fuse.sshfs host: rw,user_id=0\n\
            41 40 0:51 / /mnt/a\\040b/c rw - tmpfs none rw\n";
        assert!(fuse_row(table, Path::new("/mnt/a b/swap")));
        assert!(!fuse_row(table, Path::new("/mnt/a b/c/swap")));
        assert!(!fuse_row(table, Path::new("/mnt/swap")));
        assert!(fuse_row(
            &format!("{table}42 41 0:52 / /mnt/a\\040b/c rw - fuseblk /dev/x rw\n"),
            Path::new("/mnt/a b/c/d")
        ));
    }
}
