//! What the daemon tells the service manager, by the datagrams that sd_notify(3) documents: to the
//! socket that `NOTIFY_SOCKET` names. Without one, or if it takes nothing, nothing is told.
//!
//! Locks: none.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use swaptide_sys::time::now;

/// How long a service manager may take to make room for a datagram.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// The daemon answers, with what it was told last; a line for people.
pub(super) fn ready(status: &str) {
    send(&format!("READY=1\nSTATUS={}", one_line(status)), &[]);
}

/// The configuration is being read again; [`ready`] follows.
pub(super) fn reloading() {
    send(&format!("RELOADING=1\nMONOTONIC_USEC={}", now().0 / 1000), &[]);
}

/// The daemon is about to end, within `at_most`; a line for people.
pub(super) fn stopping(status: &str, at_most: Duration) {
    let more = match at_most.as_micros() {
        0 => String::new(),
        time => format!("\nEXTEND_TIMEOUT_USEC={time}"),
    };
    send(&format!("STOPPING=1\nSTATUS={}{more}", one_line(status)), &[]);
}

/// A line for people.
pub(super) fn status(status: &str) {
    send(&format!("STATUS={}", one_line(status)), &[]);
}

/// Sends assignments, one a line, and descriptors with them.
pub(super) fn send(text: &str, fds: &[BorrowedFd<'_>]) {
    let Some(place) = std::env::var_os("NOTIFY_SOCKET").filter(|place| !place.is_empty()) else {
        return;
    };
    let address = match place.as_bytes().split_first() {
        Some((b'@', name)) => SocketAddrUnix::new_abstract_name(name),
        _ => SocketAddrUnix::new(AsRef::<OsStr>::as_ref(&place)),
    };
    let Ok(address) = address else { return };
    let Ok(socket) = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    ) else {
        return;
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return;
    }
    let bytes = [IoSlice::new(text.as_bytes())];
    // A word that is lost while the manager is busy could have it end the daemon.
    let _ = sockopt::set_socket_timeout(&socket, Timeout::Send, Some(SEND_TIMEOUT));
    let flags = SendFlags::NOSIGNAL;
    let _ = rustix::net::sendmsg_addr(&socket, &address, &bytes, &mut control, flags);
}

fn one_line(text: &str) -> String {
    text.replace(char::is_control, " ")
}
