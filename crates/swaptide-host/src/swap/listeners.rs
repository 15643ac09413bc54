//! The sockets of this machine that listen, by name and by address, as `/proc/net` has them.
//!
//! Locks: none.

use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, ToSocketAddrs, UdpSocket};
use std::path::Path;

/// The listening sockets with this name: a server that forked after it listened has another id.
pub(super) fn unix_listeners(path: &Path) -> Vec<u64> {
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

/// The inodes of the sockets that listen on a port at addresses of this host.
pub(super) fn tcp_listeners(host: &str, port: u16) -> Vec<u64> {
    let addresses = (host, port).to_socket_addrs().map_or_else(|_| Vec::new(), Iterator::collect);
    let local: Vec<IpAddr> =
        addresses.iter().map(|address| address.ip()).filter(|ip| is_local(*ip)).collect();
    if local.is_empty() {
        return Vec::new();
    }
    tcp_tables().iter().flat_map(|table| tcp_rows(table, &local, port)).map(|row| row.1).collect()
}

/// Returns the addresses to which the sockets that listen at a port and `local` are bound, as
/// written in the tables.
pub(super) fn tcp_listeners_at(local: &[IpAddr], port: u16) -> Vec<String> {
    if local.is_empty() {
        return Vec::new();
    }
    tcp_tables().iter().flat_map(|table| tcp_rows(table, local, port)).map(|row| row.0).collect()
}

fn tcp_tables() -> [String; 2] {
    ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| fs::read_to_string(table).unwrap_or_default())
}

/// True if an address is one of this host. Nothing is sent.
pub(super) fn is_local(ip: IpAddr) -> bool {
    let any: IpAddr =
        if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let source = || {
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect((ip, 9)).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    ip.is_loopback() || source() == Some(ip)
}

/// The listening sockets of a port and these addresses in a table as `/proc/net/tcp`: what they are
/// bound to, and their inodes.
fn tcp_rows(table: &str, local: &[IpAddr], port: u16) -> Vec<(String, u64)> {
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
        (state == LISTENS && is_port && is_address).then(|| (address.to_owned(), inode))
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

    #[test]
    fn rows_of_both_families_are_read() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   \
            uid  timeout inode\n\
             0: 0100007F:2A39 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        \
             0 4711 1 0\n\
             1: 0100007F:2A39 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        \
             0 4712 1 0\n";
        assert_eq!(
            tcp_rows(table, &[Ipv4Addr::LOCALHOST.into()], 10809),
            [("0100007F".to_owned(), 4711)]
        );
        assert_eq!(tcp_rows(table, &[Ipv6Addr::LOCALHOST.into()], 10809), []);
        assert_eq!(hex(Ipv6Addr::LOCALHOST.into()), "00000000000000000000000001000000");
    }
}
