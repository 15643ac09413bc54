//! One export, one user: within a machine.
//!
//! NBD knows no lock. A run that swaps to an export binds abstract sockets whose names are made of
//! where the export is, and keeps them bound: the kernel takes them back when the process ends, and
//! no file stays behind. Another run that wants the same export, or another area of the same run,
//! finds a name taken.
//!
//! An export has several names, so that different spellings meet: a Unix socket is named by its
//! directory's inode and its name there, and by its own inode; a TCP address of this machine by
//! what the server is bound to, another one by each of the host's addresses.
//!
//! Not found: a user on another machine or in another network namespace; a server that is reached
//! by way of a forwarder; two names of one export on a server that takes any name. And a run's
//! programs continue when its supervisor is killed, but its names are free then.
//!
//! Invariants
//! 1. No claim is refused for any other reason than that a name is taken.
//!
//! Locks: none.

use std::fs;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use swaptide_sys::sock::peer_of;
use swaptide_sys::{AsFd, Errno};

use crate::nbd::{Endpoint, Url};
use crate::swap::listeners;

/// Connections of refused claims that may wait: they are not accepted, they only ask whose it is.
const BACKLOG: i32 = 128;

/// Keeps others on this machine from using an export, until it is dropped.
#[derive(Debug)]
pub struct ExportClaim(#[expect(dead_code, reason = "it is held, not used")] Vec<OwnedFd>);

/// The holder of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The process, where it is known.
    pub pid: Option<u32>,
}

impl ExportClaim {
    /// Claims the export of a URL.
    ///
    /// # Errors
    /// Its holder, if there is one.
    pub fn of(url: &Url) -> Result<ExportClaim, Holder> {
        let names = names(url);
        names
            .iter()
            .filter_map(|name| bind(name).transpose())
            .collect::<Result<_, _>>()
            .map(ExportClaim)
    }
}

/// Binds a name; `None` where that fails for a reason other than a claim.
fn bind(name: &str) -> Result<Option<OwnedFd>, Holder> {
    let text = format!("swaptide-export-{:016x}{:016x}", hash(name, 0), hash(name, 1));
    let socket = || {
        let kind = SocketType::STREAM;
        rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
    };
    let (Ok(socket), Ok(address), Ok(other)) =
        (socket(), SocketAddrUnix::new_abstract_name(text.as_bytes()), socket())
    else {
        return Ok(None);
    };
    match rustix::net::bind(&socket, &address) {
        Ok(()) => {
            // Without it others do not learn whose it is; it is taken all the same.
            let _ = rustix::net::listen(&socket, BACKLOG);
            Ok(Some(socket))
        }
        Err(Errno::ADDRINUSE) => {
            let _ = rustix::fs::fcntl_setfl(&other, rustix::fs::OFlags::NONBLOCK);
            let pid = rustix::net::connect(&other, &address)
                .and_then(|()| peer_of(other.as_fd()))
                .ok()
                // 0: one in a pid namespace that is not seen from here.
                .map(|peer| peer.pid)
                .filter(|pid| *pid != 0);
            Err(Holder { pid })
        }
        Err(_) => Ok(None),
    }
}

/// FNV-1a: builds of different compilers must agree.
fn hash(text: &str, which: u8) -> u64 {
    text.bytes().chain([which]).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// What an export is called here. The same export has one name at least in common with itself,
/// however it is spelled.
fn names(url: &Url) -> Vec<String> {
    let mut places = match &url.place {
        Endpoint::Unix(path) => unix_names(path),
        Endpoint::Tcp { host, port } => tcp_names(host, *port),
    };
    places.sort();
    places.dedup();
    places.into_iter().map(|place| format!("{place} {}", url.export)).collect()
}

fn unix_names(path: &Path) -> Vec<String> {
    let own = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    // Symbolic links are followed.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let socket = own(&path).map(|(dev, ino)| format!("unix {dev} {ino}"));
    // Stays the same when the server is started again.
    let place = path
        .parent()
        .and_then(own)
        .zip(path.file_name())
        .map(|((dev, ino), name)| format!("unix {dev} {ino} {}", name.to_string_lossy()));
    socket.into_iter().chain(place).collect()
}

fn tcp_names(host: &str, port: u16) -> Vec<String> {
    let addresses = (host, port).to_socket_addrs().map_or_else(|_| Vec::new(), Iterator::collect);
    let (local, remote): (Vec<IpAddr>, Vec<IpAddr>) =
        addresses.iter().map(SocketAddr::ip).partition(|ip| listeners::is_local(*ip));
    // What a server on this machine is bound to has many addresses, and stays the same.
    let mut names: Vec<String> = listeners::tcp_listeners_at(&local, port)
        .into_iter()
        .map(|bound| format!("bound {bound} {port}"))
        .collect();
    if names.is_empty() {
        names.extend(local.into_iter().map(|ip| format!("tcp {} {port}", ip.to_canonical())));
    }
    names.extend(remote.into_iter().map(|ip| format!("tcp {} {port}", ip.to_canonical())));
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use crate::testing::Scratch;

    fn claim(url: &str) -> Result<ExportClaim, Holder> {
        ExportClaim::of(&url.parse().expect("a URL"))
    }

    fn own() -> Holder {
        Holder { pid: Some(std::process::id()) }
    }

    #[test]
    fn one_export_is_claimed_once_however_it_is_spelled() {
        let scratch = Scratch::new("claims");
        let (path, link) = (scratch.path("a.sock"), scratch.path("link.sock"));
        let server = UnixListener::bind(&path).expect("a socket");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        let url =
            |path: &Path, export: &str| format!("nbd+unix:///{export}?socket={}", path.display());
        let held = claim(&url(&path, "x")).expect("it is free");
        assert_eq!(claim(&url(&path, "x")).unwrap_err(), own());
        assert_eq!(claim(&url(&link, "x")).unwrap_err(), own());
        let dotted = path.parent().expect("a directory").join(".").join("a.sock");
        assert_eq!(claim(&url(&dotted, "x")).unwrap_err(), own());
        let other = claim(&url(&path, "y")).expect("another export");
        // Another socket of the same name: the server was started again.
        drop(server);
        std::fs::remove_file(&path).expect("the socket");
        let server = UnixListener::bind(&path).expect("a socket");
        assert_eq!(claim(&url(&link, "x")).unwrap_err(), own());
        drop(held);
        assert!(claim(&url(&path, "x")).is_ok(), "it is free again");
        drop((server, other));
    }

    #[test]
    fn a_server_of_this_machine_is_known_by_what_it_is_bound_to() {
        let everywhere = TcpListener::bind("0.0.0.0:0").expect("a port");
        let port = everywhere.local_addr().expect("an address").port();
        let held = claim(&format!("nbd://127.0.0.1:{port}/x")).expect("it is free");
        for host in ["127.0.0.1", "localhost", "127.0.0.2"] {
            let again = claim(&format!("nbd://{host}:{port}/x"));
            assert_eq!(again.unwrap_err(), own(), "{host}");
        }
        drop(held);
        let one = TcpListener::bind("127.0.0.3:0").expect("a port");
        let port = one.local_addr().expect("an address").port();
        let other = TcpListener::bind(("127.0.0.4", port)).expect("the same port");
        let held = claim(&format!("nbd://127.0.0.3:{port}/x")).expect("it is free");
        assert!(claim(&format!("nbd://127.0.0.4:{port}/x")).is_ok(), "another server");
        drop((held, one, other));
    }

    #[test]
    fn an_unknown_host_has_no_name_and_is_not_refused() {
        assert!(tcp_names("no-such-host.invalid", 10809).is_empty());
        let one = claim("nbd://192.0.2.1/x").expect("a remote one");
        assert!(claim("nbd://192.0.2.1/x").is_err() && claim("nbd://192.0.2.2/x").is_ok());
        drop(one);
    }
}
