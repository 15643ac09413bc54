//! Abstract `AF_UNIX` sockets of packets: how an agent, its forked children and a host talk.
//!
//! Abstract names need no file system and vanish with the last descriptor; the kernel
//! reports the peer's identity ([`PeerCred`]), so the name need not be secret. Packets keep their
//! boundaries and may carry descriptors.

use core::mem::MaybeUninit;
use core::time::Duration;

use linux_raw_sys::general as k;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::high_fds;
use crate::procfs::retry;
use crate::raw::{check, syscall, syscall6};

/// Descriptors one packet can carry.
const MAX_FDS: usize = 24;
/// Room for the longest abstract name.
const MAX_NAME: usize = 107;

/// An abstract name, without its leading zero byte.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Name {
    bytes: [u8; MAX_NAME],
    len: usize,
}

impl Name {
    /// A name that was passed on; `None` if it is too long.
    pub fn new(bytes: &[u8]) -> Option<Name> {
        let mut name = Name { bytes: [0; MAX_NAME], len: bytes.len() };
        name.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(name)
    }

    /// The name's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The peer, as the kernel noted when the connection was made.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct PeerCred {
    /// Process id, in the reader's pid namespace; 0 for a process that is not visible there.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
}

/// The sender of one packet, as the kernel noted when it was sent.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Sender {
    /// Process id, in the reader's pid namespace; 0 for a process that is not visible there.
    pub pid: u32,
    /// Real user id.
    pub uid: u32,
}

/// The credentials of a connected socket's peer. Unlike rustix's call, this one allows for process
/// id 0: a peer in a pid namespace that is not below the reader's.
pub fn peer_of(socket: BorrowedFd<'_>) -> Result<PeerCred, Errno> {
    let mut cred = [0u32; 3];
    let mut len = size_of_val(&cred) as u32;
    let words = [
        socket.as_raw_fd() as usize,
        so::SOL_SOCKET,
        so::SO_PEERCRED,
        &raw mut cred as usize,
        &raw mut len as usize,
        0,
    ];
    // SAFETY: the kernel writes at most `len` bytes to `cred`, and `len`; both are live and
    // exclusively borrowed here.
    check(unsafe { syscall6(k::__NR_getsockopt, words) })?;
    Ok(PeerCred { pid: cred[0], uid: cred[1] })
}

/// Numbers of the socket interface that `linux-raw-sys` has in a module of its own.
mod so {
    pub const SOL_SOCKET: usize = 1;
    pub const SO_PEERCRED: usize = 17;
    pub const SO_PEERPIDFD: usize = 77;
    pub const SO_PASSRIGHTS: usize = 83;
    pub const SCM_RIGHTS: i32 = 1;
    pub const SCM_CREDENTIALS: i32 = 2;
    pub const MSG_TRUNC: u32 = 0x20;
    pub const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;
}

/// The kernel's `msghdr` and `cmsghdr` of 64-bit machines.
#[repr(C)]
struct MessageHeader {
    name: usize,
    name_len: usize,
    vectors: usize,
    vector_count: usize,
    control: usize,
    control_len: usize,
    flags: u32,
}

const CONTROL_HEADER: usize = 16;

/// The other end of a Unix socket, or those that connect to it, can send no descriptors (`EPERM`
/// there). The thread that receives drops what came along, and that may be a socket that lingers
/// for hours. `ENOPROTOOPT` before Linux 6.16.
pub fn deny_descriptors(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    set_pass_rights(socket, false)
}

/// Whether the other end may send descriptors.
fn set_pass_rights(socket: BorrowedFd<'_>, on: bool) -> Result<(), Errno> {
    let on = u32::from(on);
    let words = [
        socket.as_raw_fd() as usize,
        so::SOL_SOCKET,
        so::SO_PASSRIGHTS,
        &raw const on as usize,
        size_of_val(&on),
        0,
    ];
    // SAFETY: the kernel reads a word, which is live.
    check(unsafe { syscall6(k::__NR_setsockopt, words) }).map(drop)
}

/// The time that a listener may take to have room for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The number of users that have none in this namespace.
const OVERFLOW_UID: u32 = 65534;

/// True if every user has a number here. True where that cannot be told.
fn is_initial_user_namespace() -> bool {
    use rustix::fs::{Mode, OFlags, open};
    let map = open(c"/proc/self/uid_map", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let mut text = [0u8; 128];
    let read = map.and_then(|map| retry(|| rustix::io::read(&map, &mut text[..])));
    let Ok(length) = read else { return true };
    // The last of three numbers: how many users have one.
    let count = text[..length].trim_ascii_end().rsplit(u8::is_ascii_whitespace).next();
    count == Some(b"4294967295")
}

fn socket() -> Result<OwnedFd, Errno> {
    net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// True if a descriptor is a socket as [`socket`] makes them.
fn is_packet_socket(fd: BorrowedFd<'_>) -> bool {
    net::sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
        && net::sockopt::socket_type(fd) == Ok(SocketType::SEQPACKET)
}

/// A socket that waits for connections.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens under `name`; `EADDRINUSE` when another socket does.
    pub fn bind_abstract(name: &[u8]) -> Result<Listener, Errno> {
        Listener::bind(&SocketAddrUnix::new_abstract_name(name)?)
    }

    /// Listens under a name of the kernel's choice, and tells it.
    pub fn bind_autogenerated() -> Result<(Listener, Name), Errno> {
        let listener = Listener::bind(&SocketAddrUnix::new_unnamed())?;
        let addr = SocketAddrUnix::try_from(net::getsockname(&listener.0)?)?;
        let given = addr.abstract_name().ok_or(Errno::INVAL)?;
        let mut name = Name { bytes: [0; MAX_NAME], len: given.len() };
        name.bytes[..given.len()].copy_from_slice(given);
        Ok((listener, name))
    }

    fn bind(addr: &SocketAddrUnix) -> Result<Listener, Errno> {
        let fd = socket()?;
        net::bind(&fd, addr)?;
        net::listen(&fd, 64)?;
        Ok(Listener(fd))
    }

    /// Takes a connection, waiting for one unless the listener does not block (`EAGAIN`).
    pub fn accept(&self) -> Result<(Conn, PeerCred), Errno> {
        let conn = Conn(retry(|| net::accept_with(&self.0, SocketFlags::CLOEXEC))?);
        let peer = conn.peer()?;
        Ok((conn, peer))
    }

    /// With `on`, calls that would wait fail with `EAGAIN`.
    pub fn set_nonblocking(&self, on: bool) -> Result<(), Errno> {
        rustix::io::ioctl_fionbio(&self.0, on)
    }

    /// Descriptors cannot be sent on connections that are made from here on (`EPERM`), unless
    /// [`Conn::permit_descriptors`]. `ENOPROTOOPT` before Linux 6.16.
    pub fn deny_descriptors(&self) -> Result<(), Errno> {
        deny_descriptors(self.0.as_fd())
    }

    /// No process can connect any more. Connections that were made can be accepted.
    pub fn shut(&self) -> Result<(), Errno> {
        net::shutdown(&self.0, net::Shutdown::Both)
    }

    /// Has every packet on connections that are accepted from here on carry its sender (see
    /// [`Conn::recv_from`]).
    pub fn want_senders(&self) -> Result<(), Errno> {
        net::sockopt::set_socket_passcred(&self.0, true)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A connection.
#[derive(Debug)]
pub struct Conn(OwnedFd);

impl Conn {
    /// Connects to the listener of that name; `ECONNREFUSED` when there is none.
    pub fn connect_abstract(name: &[u8]) -> Result<Conn, Errno> {
        let fd = socket()?;
        let addr = SocketAddrUnix::new_abstract_name(name)?;
        retry(|| net::connect(&fd, &addr))?;
        Ok(Conn(fd))
    }

    /// As [`Conn::connect_abstract`], to a listener that root has made or this thread's user
    /// ([`Conn::of_trusted`]), and waits no longer than `CONNECT_TIMEOUT` (`EAGAIN`).
    pub fn connect_trusted(name: &[u8]) -> Result<Conn, Errno> {
        Conn::connect_trusted_by(socket()?, name)
    }

    fn connect_trusted_by(fd: OwnedFd, name: &[u8]) -> Result<Conn, Errno> {
        net::sockopt::set_socket_timeout(&fd, net::sockopt::Timeout::Send, Some(CONNECT_TIMEOUT))?;
        let addr = SocketAddrUnix::new_abstract_name(name)?;
        retry(|| net::connect(&fd, &addr))?;
        net::sockopt::set_socket_timeout(&fd, net::sockopt::Timeout::Send, None)?;
        Conn(fd).of_trusted()
    }

    /// The connection, if the other end is root's or of this thread's user; `EPERM` otherwise. A
    /// name is free for all users when the process that listened there has ended.
    ///
    /// In a user namespace in which the other end's user has no number, that user cannot be told
    /// from others, and is believed.
    pub fn of_trusted(self) -> Result<Conn, Errno> {
        let uid = self.peer()?.uid;
        let own = [rustix::process::getuid(), rustix::process::geteuid()];
        let is_trusted = uid == 0
            || own.iter().any(|own| own.as_raw() == uid)
            || uid == OVERFLOW_UID && !is_initial_user_namespace();
        if is_trusted { Ok(self) } else { Err(Errno::PERM) }
    }

    /// As [`Conn::connect_abstract`], and never waits: `EAGAIN` when the listener's queue is full.
    pub fn try_connect_abstract(name: &[u8]) -> Result<Conn, Errno> {
        let fd = socket()?;
        rustix::io::ioctl_fionbio(&fd, true)?;
        net::connect(&fd, &SocketAddrUnix::new_abstract_name(name)?)?;
        rustix::io::ioctl_fionbio(&fd, false)?;
        Ok(Conn(fd))
    }

    /// Two ends of one connection.
    pub fn pair() -> Result<(Conn, Conn), Errno> {
        let (a, b) = net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Conn(a), Conn(b)))
    }

    /// The same, out of a program's way ([`crate::high_fds`]); nothing has been sent on them.
    pub fn pair_high() -> Result<(Conn, Conn), Errno> {
        let pair = || Conn::pair().map(|(a, b)| (a.0, b.0));
        let (a, b) = high_fds::open_two(pair, is_packet_socket)?;
        for end in [&a, &b] {
            // What a program has written to their first numbers.
            while net::recv(end, &mut [0u8; 1], RecvFlags::DONTWAIT).is_ok_and(|got| got.0 > 0) {}
        }
        Ok((Conn(a), Conn(b)))
    }

    /// As [`Conn::connect_trusted`], out of a program's way.
    pub fn connect_trusted_high(name: &[u8]) -> Result<Conn, Errno> {
        Conn::connect_trusted_by(high_fds::open(socket, is_packet_socket)?, name)
    }

    /// Wraps a descriptor that was inherited or received.
    pub fn from_fd(fd: OwnedFd) -> Conn {
        Conn(fd)
    }

    /// The descriptor itself.
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// The peer.
    pub fn peer(&self) -> Result<PeerCred, Errno> {
        peer_of(self.0.as_fd())
    }

    /// A descriptor that stands for the process which made the connection, even if its number is in
    /// use again. `ENOPROTOOPT` or `EINVAL` before Linux 6.5.
    pub fn peer_pidfd(&self) -> Result<OwnedFd, Errno> {
        let mut fd = -1i32;
        let mut len = size_of_val(&fd) as u32;
        let words = [
            self.0.as_raw_fd() as usize,
            so::SOL_SOCKET,
            so::SO_PEERPIDFD,
            &raw mut fd as usize,
            &raw mut len as usize,
            0,
        ];
        // SAFETY: the kernel writes at most `len` bytes to `fd`, and `len`; both are live and
        // exclusively borrowed here.
        check(unsafe { syscall6(k::__NR_getsockopt, words) })?;
        // SAFETY: the kernel has just made this descriptor for this process (close-on-exec).
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// With `on`, calls that would wait fail with `EAGAIN`.
    pub fn set_nonblocking(&self, on: bool) -> Result<(), Errno> {
        rustix::io::ioctl_fionbio(&self.0, on)
    }

    /// Descriptors can be sent on this connection, whatever its listener said.
    pub fn permit_descriptors(&self) -> Result<(), Errno> {
        set_pass_rights(self.0.as_fd(), true)
    }

    /// Hangs up, and keeps what has not been received.
    pub fn shut(&self) -> Result<(), Errno> {
        net::shutdown(&self.0, net::Shutdown::Both)
    }

    /// Sends one packet, with up to `MAX_FDS` descriptors; `EPIPE` (and no signal) when the other
    /// end is gone. An empty packet cannot be told from the end of the connection: refused.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        if bytes.is_empty() || fds.len() > MAX_FDS {
            return Err(Errno::INVAL);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::INVAL);
        }
        retry(|| net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL))
            .map(drop)
    }

    /// Sends one packet, and never waits: `EAGAIN` when the other end has many to read.
    pub fn send_nowait(&self, bytes: &[u8]) -> Result<(), Errno> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        retry(|| net::send(&self.0, bytes, flags)).map(drop)
    }

    /// Receives one packet: its length (0 when the other end is gone) and how many descriptors came
    /// with it. `EMSGSIZE` when it does not fit; descriptors that do not fit in `fds_out` are
    /// closed.
    pub fn recv(
        &self,
        buf: &mut [u8],
        fds_out: &mut [Option<OwnedFd>],
    ) -> Result<(usize, usize), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = retry(|| {
            net::recvmsg(
                &self.0,
                &mut [IoSliceMut::new(buf)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            )
        })?;
        let mut count = 0;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                for fd in fds {
                    if let Some(place) = fds_out.get_mut(count) {
                        *place = Some(fd);
                        count += 1;
                    }
                }
            }
        }
        if got.flags.contains(ReturnFlags::TRUNC) {
            Err(Errno::MSGSIZE)
        } else {
            Ok((got.bytes, count))
        }
    }

    /// Waits for a packet, or the end of the connection. The packet stays, with what came with it.
    pub fn wait(&self) -> Result<(), Errno> {
        retry(|| net::recv(&self.0, &mut [0u8; 1], RecvFlags::PEEK)).map(drop)
    }

    /// Whether a packet waits to be received: 1 if so, 0 at the end of the connection, `EAGAIN`
    /// where there is neither. It stays to be received, with what came with it.
    pub fn peek(&self) -> Result<usize, Errno> {
        let mut byte = [0u8; 1];
        retry(|| net::recv(&self.0, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT))
            .map(|(length, _)| length)
    }

    /// As [`Conn::recv`], with the sender of the packet, as the kernel reports it, where the
    /// listener [`Listener::want_senders`]; else `None`.
    pub fn recv_from(
        &self,
        buf: &mut [u8],
        fds_out: &mut [Option<OwnedFd>],
    ) -> Result<(usize, usize, Option<Sender>), Errno> {
        // Aligned as the kernel's headers are; room for credentials and for all descriptors that
        // one packet can carry.
        let mut control = [0u64; 32];
        let vector = [buf.as_mut_ptr() as usize, buf.len()];
        let mut header = MessageHeader {
            name: 0,
            name_len: 0,
            vectors: &raw const vector as usize,
            vector_count: 1,
            control: control.as_mut_ptr() as usize,
            control_len: size_of_val(&control),
            flags: 0,
        };
        let words =
            [self.0.as_raw_fd() as usize, &raw mut header as usize, so::MSG_CMSG_CLOEXEC, 0, 0, 0];
        // SAFETY: the header names `buf` and `control` with their lengths; all of them live over
        // the call, and nothing else refers to them.
        let bytes = retry(|| check(unsafe { syscall6(k::__NR_recvmsg, words) }))?;
        let bytes_of_control =
            |at: usize| (control.get(at / 8).copied().unwrap_or(0) >> (at % 8 * 8)) as u32;
        let (mut at, mut count, mut sender) = (0, 0, None);
        while at + CONTROL_HEADER <= header.control_len.min(size_of_val(&control)) {
            let len = control[at / 8] as usize;
            if len < CONTROL_HEADER || at + len > size_of_val(&control) {
                break;
            }
            let (level, kind) = (bytes_of_control(at + 8), bytes_of_control(at + 12) as i32);
            let data = at + CONTROL_HEADER;
            match (level as usize, kind) {
                (so::SOL_SOCKET, so::SCM_CREDENTIALS) if len >= CONTROL_HEADER + 12 => {
                    sender = Some(Sender {
                        pid: bytes_of_control(data),
                        uid: bytes_of_control(data + 4),
                    });
                }
                (so::SOL_SOCKET, so::SCM_RIGHTS) => {
                    for number in (data..at + len).step_by(4) {
                        // SAFETY: the kernel has just made this descriptor for this process; one
                        // without a place is closed.
                        let fd = unsafe { OwnedFd::from_raw_fd(bytes_of_control(number) as i32) };
                        if let Some(place) = fds_out.get_mut(count) {
                            *place = Some(fd);
                            count += 1;
                        }
                    }
                }
                _ => {}
            }
            at += len.next_multiple_of(8);
        }
        if header.flags & so::MSG_TRUNC != 0 {
            Err(Errno::MSGSIZE)
        } else {
            Ok((bytes, count, sender))
        }
    }
}

impl AsFd for Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Descriptors [`poll_readable`] can watch at once.
pub const MAX_POLL: usize = 64;

/// Waits until one of `fds` (at most [`MAX_POLL`]) can be read, has ended or is in error; bit `i`
/// of the answer stands for `fds[i]`. 0 when the time is over or a signal came; `None` waits for
/// ever.
pub fn poll_readable(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Result<u64, Errno> {
    if fds.len() > MAX_POLL {
        return Err(Errno::INVAL);
    }
    let Some(first) = fds.first() else { return Err(Errno::INVAL) };
    let mut polls: [PollFd<'_>; MAX_POLL] = core::array::from_fn(|i| {
        PollFd::from_borrowed_fd(*fds.get(i).unwrap_or(first), PollFlags::IN)
    });
    let time = timeout.map(|t| Timespec {
        tv_sec: t.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: t.subsec_nanos().into(),
    });
    match rustix::event::poll(&mut polls[..fds.len()], time.as_ref()) {
        Ok(_) => Ok((0..fds.len())
            .filter(|&i| !polls[i].revents().is_empty())
            .fold(0, |mask, i| mask | 1 << i)),
        Err(Errno::INTR) => Ok(0),
        Err(Errno::INVAL) => select_readable(fds, timeout),
        Err(errno) => Err(errno),
    }
}

/// Highest descriptor that [`select_readable`] can watch.
const MAX_SELECT: usize = 4095;

/// [`poll_readable`] by `pselect6`. `ppoll` fails with `EINVAL` if it is given more descriptors
/// than RLIMIT_NOFILE, which a program may set to 0. `pselect6` does not look at that limit. Its
/// set of readable descriptors includes those with a hangup or an error.
#[cold]
fn select_readable(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Result<u64, Errno> {
    const WORD: usize = usize::BITS as usize;
    let mut set = [0usize; (MAX_SELECT + 1) / WORD];
    let mut count = 0;
    for fd in fds {
        let fd = usize::try_from(fd.as_raw_fd())
            .ok()
            .filter(|fd| *fd <= MAX_SELECT)
            .ok_or(Errno::INVAL)?;
        set[fd / WORD] |= 1 << (fd % WORD);
        count = count.max(fd + 1);
    }
    let time = timeout.map(|t| k::__kernel_timespec {
        tv_sec: t.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: t.subsec_nanos().into(),
    });
    let time_ptr = time.as_ref().map_or(0, |t| (&raw const *t) as usize);
    // SAFETY: the set has a bit for each of the `count` descriptors and outlives the call, as does
    // the time.
    match unsafe {
        syscall!(
            k::__NR_pselect6,
            count,
            set.as_mut_ptr() as usize,
            0usize,
            0usize,
            time_ptr,
            0usize
        )
    } {
        Ok(0) | Err(Errno::INTR) => Ok(0),
        Ok(_) => {
            let is_set = |fd: usize| set[fd / WORD] >> (fd % WORD) & 1 == 1;
            Ok((0..fds.len())
                .filter(|&i| is_set(fds[i].as_raw_fd() as usize))
                .fold(0, |mask, i| mask | 1 << i))
        }
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn packets_and_descriptors_cross() {
        let (listener, name) = Listener::bind_autogenerated().unwrap();
        let client = Conn::connect_abstract(name.as_bytes()).unwrap();
        assert_eq!(poll_readable(&[listener.as_fd()], None).unwrap(), 1);
        let (server, cred) = listener.accept().unwrap();
        assert_eq!(cred.pid, std::process::id());
        assert_eq!(cred.uid, rustix::process::getuid().as_raw());

        let file = crate::mem::memfd_create(c"swaptide-test", 4096).unwrap();
        client.send(b"hello", &[file.as_fd(), file.as_fd()]).unwrap();
        client.send(b"again", &[]).unwrap();
        let mut buf = [0; 16];
        let mut fds = [None, None, None];
        assert_eq!(server.recv(&mut buf, &mut fds), Ok((5, 2)));
        assert_eq!(&buf[..5], b"hello");
        assert_eq!(rustix::fs::fstat(fds[1].as_ref().unwrap()).unwrap().st_size, 4096);
        assert_eq!(server.recv(&mut buf, &mut []), Ok((5, 0)));
        drop(client);
        assert_eq!(server.recv(&mut buf, &mut []), Ok((0, 0)));
        assert_eq!(server.send(b"late", &[]), Err(Errno::PIPE));
    }

    #[test]
    fn a_name_is_taken_once_and_freed_on_drop() {
        let (first, name) = Listener::bind_autogenerated().unwrap();
        let name = [name.as_bytes(), b"-mine"].concat();
        drop(first);
        let listener = Listener::bind_abstract(&name).unwrap();
        assert_eq!(Listener::bind_abstract(&name).err(), Some(Errno::ADDRINUSE));
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().err(), Some(Errno::AGAIN));
        drop(listener);
        assert_eq!(Conn::connect_abstract(&name).err(), Some(Errno::CONNREFUSED));
    }

    #[test]
    fn the_listener_is_checked_before_anything_is_sent() {
        let (own, name) = Listener::bind_autogenerated().unwrap();
        Conn::connect_trusted(name.as_bytes()).unwrap();
        drop(own);
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // The listener of another user, made by a thread that becomes that user and ends.
        let bind = || {
            let user = 12345usize;
            // SAFETY: the call changes the rights of this thread alone.
            unsafe { syscall!(k::__NR_setresuid, user, user, user) }.unwrap();
            Listener::bind_autogenerated().unwrap()
        };
        let (_others_socket, name) = std::thread::spawn(bind).join().unwrap();
        Conn::connect_abstract(name.as_bytes()).unwrap();
        assert_eq!(Conn::connect_trusted(name.as_bytes()).err(), Some(Errno::PERM));
    }

    #[test]
    fn a_shut_listener_accepts_earlier_connections_only() {
        let (listener, name) = Listener::bind_autogenerated().unwrap();
        listener.set_nonblocking(true).unwrap();
        let early = Conn::connect_abstract(name.as_bytes()).unwrap();
        early.send(b"early", &[]).unwrap();
        listener.shut().unwrap();
        assert_eq!(Conn::try_connect_abstract(name.as_bytes()).err(), Some(Errno::CONNREFUSED));
        let (server, _) = listener.accept().unwrap();
        assert!(listener.accept().is_err());
        assert_eq!(server.peek(), Ok(1), "of five bytes the first is looked at");
        assert_eq!(server.recv(&mut [0; 8], &mut []), Ok((5, 0)));
        assert_eq!(server.peek(), Err(Errno::AGAIN));
        drop(early);
        assert_eq!(server.peek(), Ok(0));
    }

    #[test]
    fn packets_and_connections_carry_credentials() {
        let (listener, name) = Listener::bind_autogenerated().unwrap();
        listener.want_senders().unwrap();
        let client = Conn::connect_abstract(name.as_bytes()).unwrap();
        let file = crate::mem::memfd_create(c"swaptide-test", 4096).unwrap();
        client.send(b"before", &[file.as_fd(), file.as_fd(), file.as_fd()]).unwrap();
        let (server, peer) = listener.accept().unwrap();
        client.send(b"after", &[]).unwrap();
        let (mut buf, mut fds) = ([0; 16], [None, None]);
        let me = Sender { pid: std::process::id(), uid: rustix::process::getuid().as_raw() };
        assert_eq!(
            server.recv_from(&mut buf, &mut fds),
            Ok((6, 2, Some(me))),
            "sent before the connection was accepted"
        );
        assert_eq!(rustix::fs::fstat(fds[1].as_ref().unwrap()).unwrap().st_size, 4096);
        assert_eq!(server.recv_from(&mut buf[..4], &mut []), Err(Errno::MSGSIZE));
        client.send(b"x", &[]).unwrap();
        assert_eq!(server.recv_from(&mut buf, &mut []), Ok((1, 0, Some(me))));
        assert_eq!(peer, server.peer().unwrap());
        if let Ok(pidfd) = server.peer_pidfd() {
            assert_eq!(
                poll_readable(&[pidfd.as_fd()], Some(Duration::ZERO)),
                Ok(0),
                "this process lives"
            );
        }
        drop(client);
        assert_eq!(server.recv_from(&mut buf, &mut []).map(|(n, fds, _)| (n, fds)), Ok((0, 0)));
    }

    #[test]
    fn oversized_packet_fails_without_leak() {
        let (a, b) = Conn::pair().unwrap();
        a.send(&[1; 100], &[a.as_fd()]).unwrap();
        assert_eq!(b.recv(&mut [0; 10], &mut []), Err(Errno::MSGSIZE));
        assert_eq!(a.send(&[], &[]), Err(Errno::INVAL));
        assert_eq!(a.send(b"x", &[a.as_fd(); MAX_FDS + 1]), Err(Errno::INVAL));
        assert_eq!(poll_readable(&[b.as_fd()], Some(Duration::from_millis(1))), Ok(0));
        // The descriptor that had no place was closed: after `a`, the connection has no other
        // holder.
        drop(a);
        assert_eq!(b.recv(&mut [0; 10], &mut []), Ok((0, 0)));
        // The same without poll(2), which refuses with a limit of 0 on descriptors.
        let (c, d) = Conn::pair().unwrap();
        assert_eq!(select_readable(&[d.as_fd(), c.as_fd()], Some(Duration::from_millis(1))), Ok(0));
        c.send(b"x", &[]).unwrap();
        assert_eq!(
            select_readable(&[c.as_fd(), b.as_fd(), d.as_fd()], None),
            Ok(0b110),
            "hung up, and a message"
        );
        let many: Vec<_> = (0..MAX_POLL + 1).map(|_| b.as_fd()).collect();
        assert_eq!(poll_readable(&many, None), Err(Errno::INVAL));
        assert_eq!(poll_readable(&many[..MAX_POLL], None), Ok(u64::MAX));
    }
}
