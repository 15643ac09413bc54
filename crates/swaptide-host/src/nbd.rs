//! The network tier: how an export of an NBD server becomes a socket that a process can use for its
//! swap.
//!
//! Owns what a URL means ([`url`]), the connection, the negotiation of the protocol ([`handshake`])
//! and TLS ([`tls`]). What comes out of [`Connector::connect`] is a connected socket in the
//! transmission phase and what was agreed on; from there on `swaptide_store::nbd` continues, in
//! whichever process has the socket. With TLS, that socket is one end of a pair, and a thread here
//! pumps between the other end and the session, so that no process of the tree has keys or needs to
//! know of TLS.
//!
//! Servers are not trusted: every length they send has a bound that is checked before anything is
//! allocated, the whole of connecting and negotiating has one time limit, and what they say is
//! shown with control characters taken out.
//!
//! TLS is used where the URL asks for it (`nbds:`) and then nothing else will do; with `nbd:` it is
//! used when the server insists on it. Pages are sealed before they come here in any case: TLS adds
//! that no host in between can tell which blocks are used, or disturb them.
//!
//! Locks: none.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use swaptide_store::nbd::{Dialer, Export, Flags, MAX_CONNECTIONS};
use swaptide_sys::Errno;

pub mod handshake;
pub mod socket;
pub mod tls;
pub mod url;

use handshake::Agreed;
use socket::DeadlineSocket;
use thiserror::Error;
pub use url::{Endpoint, Url, UrlError};

/// How long connecting and negotiating may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections of one process to an export that can have several, if the URL does not say.
const DEFAULT_CONNECTIONS: u32 = 4;

/// Why an export cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NbdError {
    /// The host has no address.
    #[error("{0}: no address: {1}; check the name, or write an address")]
    Resolve(String, io::Error),
    /// There is no answer.
    #[error(
        "{0}: cannot connect: {1}; check that the server runs and the port is \
        open"
    )]
    Connect(String, io::Error),
    /// The connection failed while the two sides negotiated.
    #[error("{0}: {reason}", reason = talk_failure(.1))]
    Talk(String, io::Error),
    /// It is no NBD server.
    #[error("{0}: not an NBD server; check host and port")]
    NotNbd(String),
    /// What it sent is not the protocol.
    #[error("{0}: the server breaks the protocol: {1}; report it to its authors, or use nbdkit")]
    Protocol(String, &'static str),
    /// A server of the old kind, that has no names and no options.
    #[error(
        "{0}: the server speaks only the oldstyle protocol; start it in \
        newstyle mode"
    )]
    Oldstyle(String),
    /// The server refuses the export.
    #[error("{url}: {why}{said}", said = said_by_server(.text))]
    Refused {
        /// The URL of the export.
        url: String,
        /// What the answer means.
        why: &'static str,
        /// What the server said.
        text: String,
    },
    /// The export cannot be written.
    #[error("{0}: the export is read-only; give a writable one")]
    ReadOnly(String),
    /// The export wants transfers that are not of whole pages.
    #[error(
        "{0}: the export takes transfers of {1} to {2} bytes; let its \
        server take single pages of 4096"
    )]
    BlockSize(String, u32, u32),
    /// It is smaller than a page.
    #[error("{0}: the export is smaller than a page; give a larger one")]
    Empty(String),
    /// The URL asks for TLS, and the server has none.
    #[error("{0}: the server has no TLS; set it up there, or write nbd: instead of nbds:")]
    NoTls(String),
    /// A file of certificates or keys is of no use.
    #[error("{path}: {1}", path = .0.display())]
    Certificates(PathBuf, String),
    /// This machine trusts no authority.
    #[error(
        "no trusted certificates on this machine; install ca-certificates, or name the \
        authority: ca=PATH"
    )]
    NoRoots,
    /// The name cannot be one in a certificate.
    #[error(
        "{0:?} cannot be a name in a certificate; give the one that it has: \
        tls-hostname=NAME"
    )]
    ServerName(String),
    /// The session could not be made: the certificate is wrong, or the two sides have no method in
    /// common.
    #[error("{0}: no TLS session: {1}; check the certificates, ca= and tls-hostname=")]
    Tls(String, rustls::Error),
    /// The thread that pumps could not be made.
    #[error("TLS: cannot start a session's thread: {0}; raise the limit on threads (ulimit -u)")]
    Pump(io::Error),
    /// It is not the export that it was.
    #[error("{0}: the export shrank or lost a feature; remove it with swapoff, and add it again")]
    Changed(String),
}

impl NbdError {
    /// The nearest error number, for callers that can be told no more.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            NbdError::Resolve(..) => Errno::HOSTUNREACH,
            NbdError::Connect(_, error) | NbdError::Talk(_, error) | NbdError::Pump(error) => {
                match error.kind() {
                    io::ErrorKind::TimedOut => Errno::TIMEDOUT,
                    io::ErrorKind::UnexpectedEof => Errno::CONNRESET,
                    _ => Errno::from_io_error(error).unwrap_or(Errno::IO),
                }
            }
            NbdError::Refused { .. }
            | NbdError::ReadOnly(_)
            | NbdError::NoTls(_)
            | NbdError::Tls(..) => Errno::ACCESS,
            NbdError::Changed(_) => Errno::STALE,
            _ => Errno::PROTO,
        }
    }
}

/// Makes connections to one export.
pub struct Connector {
    url: Url,
    /// Where TLS may be needed.
    tls: Result<Arc<rustls::ClientConfig>, NbdError>,
    limit: Duration,
}

impl Connector {
    /// For the export that `url` names. Reads the certificates once.
    ///
    /// # Errors
    /// If the URL asks for TLS and there are no certificates that can be used.
    pub fn new(url: Url) -> Result<Connector, NbdError> {
        Connector::with_limit(url, CONNECT_TIMEOUT)
    }

    /// The same, with another time limit for a connection.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_limit(url: Url, limit: Duration) -> Result<Connector, NbdError> {
        // For a client that does not ask for it, not having any is an error only when the server
        // does.
        match tls::client_config(&url) {
            Err(error) if url.tls || url.ca.is_some() || url.identity.is_some() => Err(error),
            tls => Ok(Connector { url, tls, limit }),
        }
    }

    /// What it connects to.
    #[must_use]
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// Connects and negotiates.
    ///
    /// # Errors
    /// See [`NbdError`].
    pub fn connect(&self) -> Result<(OwnedFd, Export), NbdError> {
        let deadline = Instant::now() + self.limit;
        let mut wire = DeadlineSocket::new(self.dial(deadline)?, deadline);
        let talk = handshake::Talk { url: &self.url, tls: &self.tls };
        let (agreed, session) = talk.negotiate(&mut wire)?;
        let export = self.export(&agreed)?;
        let fd = wire.into_fd();
        let fd = match session {
            None => fd,
            Some(session) => tls::pump(session, fd).map_err(NbdError::Pump)?,
        };
        Ok((fd, export))
    }

    /// Connects again to an export that is in use.
    ///
    /// # Errors
    /// As [`Self::connect`]; and if the export is not what it was.
    pub(crate) fn connect_again(&self, before: &Export) -> Result<OwnedFd, NbdError> {
        let (fd, export) = self.connect()?;
        let same = export.size >= before.size
            && export.flags.contains(before.flags)
            && export.structured == before.structured
            && export.longest >= before.longest;
        if same { Ok(fd) } else { Err(NbdError::Changed(self.url.to_string())) }
    }

    fn dial(&self, deadline: Instant) -> Result<OwnedFd, NbdError> {
        let failed = |error: io::Error| NbdError::Connect(self.url.to_string(), error);
        let left =
            || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match &self.url.place {
            Endpoint::Tcp { host, port } => {
                let addresses = (host.as_str(), *port)
                    .to_socket_addrs()
                    .map_err(|error| NbdError::Resolve(host.clone(), error))?;
                let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
                for address in addresses {
                    match TcpStream::connect_timeout(&address, left()) {
                        Ok(stream) => {
                            // Small requests must not wait for each other.
                            stream.set_nodelay(true).map_err(failed)?;
                            return Ok(stream.into());
                        }
                        Err(error) => last = error,
                    }
                }
                Err(failed(last))
            }
            Endpoint::Unix(path) => {
                let failed = |errno: Errno| failed(errno.into());
                let fd = rustix::net::socket_with(
                    AddressFamily::UNIX,
                    SocketType::STREAM,
                    SocketFlags::CLOEXEC,
                    None,
                )
                .map_err(failed)?;
                let address = SocketAddrUnix::new(path.as_path()).map_err(failed)?;
                // Where that cannot be had a server can keep a reader.
                let _ = swaptide_sys::sock::deny_descriptors(fd.as_fd());
                // A server that does not accept must not hold us for ever.
                set_socket_timeout(&fd, Timeout::Send, Some(left())).map_err(failed)?;
                rustix::net::connect(&fd, &address).map_err(failed)?;
                set_socket_timeout(&fd, Timeout::Send, None).map_err(failed)?;
                Ok(fd)
            }
        }
    }

    /// Whether what was agreed on can be swapped to.
    ///
    /// # Errors
    /// Why not.
    pub fn export(&self, agreed: &Agreed) -> Result<Export, NbdError> {
        const PAGE: u64 = swaptide_store::PAGE_SIZE as u64;
        const MAX_REQUEST_BYTES: u32 = 32 << 20;
        let url = || self.url.to_string();
        let flags = Flags::from_bits_retain(agreed.flags);
        if !flags.contains(Flags::HAS_FLAGS) {
            return Err(NbdError::Protocol(url(), "an export without flags"));
        }
        if flags.contains(Flags::READ_ONLY) {
            return Err(NbdError::ReadOnly(url()));
        }
        let (least, most) = agreed.transfers.unwrap_or((1, MAX_REQUEST_BYTES));
        if !least.is_power_of_two() {
            return Err(NbdError::Protocol(url(), "a block size that is no power of two"));
        }
        if u64::from(least) > PAGE || u64::from(most) < PAGE {
            return Err(NbdError::BlockSize(url(), least, most));
        }
        if agreed.size < PAGE {
            return Err(NbdError::Empty(url()));
        }
        let connections = if flags.contains(Flags::CAN_MULTI_CONN) {
            self.url.connections.unwrap_or(DEFAULT_CONNECTIONS)
        } else {
            1
        };
        Ok(Export {
            size: agreed.size - agreed.size % PAGE,
            flags,
            structured: agreed.structured,
            longest: most.min(MAX_REQUEST_BYTES),
            connections: connections.clamp(1, MAX_CONNECTIONS),
        })
    }
}

/// A [`Dialer`] that does it all in this process.
pub struct LocalDialer {
    connector: Connector,
    export: Export,
}

impl LocalDialer {
    /// For an export that is in use.
    #[must_use]
    pub fn new(connector: Connector, export: Export) -> LocalDialer {
        LocalDialer { connector, export }
    }
}

impl Dialer for LocalDialer {
    fn dial(&self) -> Result<OwnedFd, Errno> {
        self.connector.connect_again(&self.export).map_err(|error| error.errno())
    }
}

/// What a failed transfer of the negotiation most likely means.
fn talk_failure(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            "the server closed the connection; it may have no free one (see its log)".to_owned()
        }
        io::ErrorKind::TimedOut => {
            "the server did not answer in time; it may be busy with another client (see its log)"
                .to_owned()
        }
        _ => format!("the connection failed: {error}; see the server's log"),
    }
}

fn said_by_server(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("; the server says: {text}") }
}

#[cfg(test)]
mod tests;
