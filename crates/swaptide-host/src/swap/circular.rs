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
use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};

use crate::nbd::Endpoint;
use crate::swap::mirror::Mirror;
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

/// What a server of the device has open, as the links in `/proc/PID/fd` name it.
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

/// Whether a file is on a FUSE file system, or would be. Symbolic links are not followed.
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

/// The listening sockets with this name: a server that forked after it listened has another id.
fn unix_listeners(path: &Path) -> Vec<u64> {
    let table = fs::read("/proc/net/unix").unwrap_or_default();
    unix_rows(&String::from_utf8_lossy(&table), &path.to_string_lossy())
}

/// The inodes of the listening sockets with this name in a table as `/proc/net/unix`.
fn unix_rows(table: &str, path: &str) -> Vec<u64> {
    const LISTENS: u32 = 1 << 16;
    let row = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let flags = u32::from_str_radix(words.nth(3)?, 16).ok()?;
        let inode = words.nth(2)?.parse().ok()?;
        let (_, name) = line.split_once('/')?;
        (flags & LISTENS != 0 && format!("/{name}") == path).then_some(inode)
    };
    table.lines().skip(1).filter_map(row).collect()
}

fn tcp_listeners(host: &str, port: u16) -> Vec<u64> {
    let addresses = (host, port).to_socket_addrs().map_or_else(|_| Vec::new(), Iterator::collect);
    let local: Vec<IpAddr> =
        addresses.iter().map(|address| address.ip()).filter(|ip| is_local(*ip)).collect();
    if local.is_empty() {
        return Vec::new();
    }
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"]
        .map(|table| fs::read_to_string(table).unwrap_or_default());
    tables.iter().flat_map(|table| tcp_rows(table, &local, port)).collect()
}

/// Whether an address is one of this host. Nothing is sent.
fn is_local(ip: IpAddr) -> bool {
    let any: IpAddr =
        if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let source = || {
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect((ip, 9)).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    ip.is_loopback() || source() == Some(ip)
}

/// The inodes of the listening sockets of a port and these addresses in a table as `/proc/net/tcp`.
fn tcp_rows(table: &str, local: &[IpAddr], port: u16) -> Vec<u64> {
    const LISTENS: &str = "0A";
    let wanted: Vec<String> =
        local.iter().copied().flat_map(|ip| [Some(ip), mapped(ip)]).flatten().map(hex).collect();
    let row = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (address, at) = words.nth(1)?.split_once(':')?;
        let state = words.nth(1)?;
        let inode = words.nth(5)?.parse().ok()?;
        let is_port = u16::from_str_radix(at, 16).ok()? == port;
        let is_address =
            address.bytes().all(|digit| digit == b'0') || wanted.iter().any(|ip| ip == address);
        (state == LISTENS && is_port && is_address).then_some(inode)
    };
    table.lines().skip(1).filter_map(row).collect()
}

fn mapped(ip: IpAddr) -> Option<IpAddr> {
    match ip {
        IpAddr::V4(ip) => Some(ip.to_ipv6_mapped().into()),
        IpAddr::V6(_) => None,
    }
}

/// An address as these tables have it: words in the order of the machine.
fn hex(ip: IpAddr) -> String {
    let (four, sixteen);
    let bytes: &[u8] = match ip {
        IpAddr::V4(ip) => {
            four = ip.octets();
            &four
        }
        IpAddr::V6(ip) => {
            sixteen = ip.octets();
            &sixteen
        }
    };
    bytes.chunks_exact(4).fold(String::new(), |mut text, word| {
        let _ = write!(text, "{:08X}", u32::from_ne_bytes(word.try_into().expect("four bytes")));
        text
    })
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

    #[test]
    fn rows_of_both_families_are_read() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   \
            uid  timeout inode\n\
             0: 0100007F:2A39 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        \
             0 4711 1 0\n\
             1: 0100007F:2A39 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        \
             0 4712 1 0\n";
        assert_eq!(tcp_rows(table, &[Ipv4Addr::LOCALHOST.into()], 10809), [4711]);
        assert_eq!(tcp_rows(table, &[Ipv6Addr::LOCALHOST.into()], 10809), [0u64; 0]);
        assert_eq!(hex(Ipv6Addr::LOCALHOST.into()), "00000000000000000000000001000000");
    }
}
