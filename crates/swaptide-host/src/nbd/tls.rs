//! TLS for exports: the trusted authorities, the session, and the thread that pumps between it and
//! a process's socket.
//!
//! The pump belongs to one connection. It ends when the server hangs up or fails, or when the
//! process's end is closed and what it sent is out. Its buffers are bounded: it takes no more from
//! one side than the other side takes from it.

use std::io::{self, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socketpair,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use swaptide_sys::Errno;

use crate::nbd::socket::DeadlineSocket;
use crate::nbd::{NbdError, Url};

/// The most of a file of certificates or keys that is read.
const MAX_PEM_BYTES: u64 = 4 << 20;
/// Bytes on their way, in each direction.
const BUFFER_BYTES: usize = 64 << 10;

/// Trusted authorities and own certificate, as the URL says.
///
/// # Errors
/// If a file is missing or has nothing of use, or no authority is trusted.
pub(crate) fn client_config(url: &Url) -> Result<Arc<ClientConfig>, NbdError> {
    let mut roots = RootCertStore::empty();
    match &url.ca {
        Some(path) => {
            for certificate in certificates(path)? {
                roots
                    .add(certificate)
                    .map_err(|error| NbdError::Certificates(path.clone(), error.to_string()))?;
            }
        }
        None => {
            // Some of a machine's certificates may be of a kind that is not known here: the others
            // are enough.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                return Err(NbdError::NoRoots);
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has a cipher for each version of TLS")
        .with_root_certificates(roots);
    let config = match &url.identity {
        None => config.with_no_client_auth(),
        Some((certificate, key)) => {
            let broken = |why: String| NbdError::Certificates(key.clone(), why);
            let secret = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|_| {
                broken("holds no private key in PEM; give a PEM file as key=".to_owned())
            })?;
            config
                .with_client_auth_cert(certificates(certificate)?, secret)
                .map_err(|error| broken(error.to_string()))?
        }
    };
    Ok(Arc::new(config))
}

fn read(path: &Path) -> Result<Vec<u8>, NbdError> {
    let failed = |error: io::Error| {
        NbdError::Certificates(
            path.to_owned(),
            format!("cannot be read: {error}; check the path and its permissions"),
        )
    };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    BufReader::new(file.take(MAX_PEM_BYTES)).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, NbdError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(NbdError::Certificates(
            path.to_owned(),
            "holds no certificates in PEM; give a PEM file".to_owned(),
        )),
    }
}

/// Why there is no session.
pub(super) enum SessionError {
    Name(NbdError),
    Io(io::Error),
}

/// A session with the server of `url`, whose certificate has been checked.
pub(super) fn session(
    url: &Url,
    config: Arc<ClientConfig>,
    wire: &mut DeadlineSocket,
) -> Result<ClientConnection, SessionError> {
    let name = url.server_name().to_owned();
    let name = ServerName::try_from(name.clone())
        .map_err(|_| SessionError::Name(NbdError::ServerName(name)))?;
    let mut session = ClientConnection::new(config, name)
        .map_err(|error| SessionError::Io(io::Error::new(io::ErrorKind::InvalidData, error)))?;
    while session.is_handshaking() {
        session.complete_io(wire).map_err(SessionError::Io)?;
    }
    Ok(session)
}

/// Starts the pump of a session over `wire`. Returns the other end.
///
/// # Errors
/// If there are no descriptors or threads to be had.
pub(crate) fn pump(session: ClientConnection, wire: OwnedFd) -> io::Result<OwnedFd> {
    let (local, remote) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let mut pump = Pump {
        session,
        wire,
        local,
        outgoing: Vec::new(),
        incoming: Vec::new(),
        from_local: true,
        from_wire: true,
        hung_up: false,
    };
    pump.session.set_buffer_limit(Some(2 * BUFFER_BYTES));
    std::thread::Builder::new()
        .name("swaptide-tls".to_owned())
        .stack_size(256 << 10)
        .spawn(move || pump.run())?;
    Ok(remote)
}

struct Pump {
    session: ClientConnection,
    wire: OwnedFd,
    local: OwnedFd,
    /// From the process, not yet in the session.
    outgoing: Vec<u8>,
    /// From the session, not yet with the process.
    incoming: Vec<u8>,
    /// True if more can come from there.
    from_local: bool,
    from_wire: bool,
    /// The process has closed its end.
    hung_up: bool,
}

/// A socket that does not wait.
struct Socket<'s>(&'s OwnedFd);

impl Read for Socket<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        Ok(recv(self.0, buf, RecvFlags::DONTWAIT)?.0)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self.0, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the result of a transfer that does not wait.
fn moved(answer: io::Result<usize>) -> io::Result<Option<usize>> {
    match answer {
        Ok(n) => Ok(Some(n)),
        Err(error)
            if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

impl Pump {
    fn run(mut self) {
        // Whatever the error is: both sides see their connections end, and the process dials again.
        let _ = self.pump();
        let _ = shutdown(&self.local, Shutdown::Both);
        let _ = shutdown(&self.wire, Shutdown::Both);
    }

    fn pump(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            self.turn(&mut buffer)?;
            let writes = self.session.wants_write();
            if !self.from_wire && self.incoming.is_empty() {
                return Ok(());
            }
            let when =
                |wanted: bool, flag: PollFlags| if wanted { flag } else { PollFlags::empty() };
            let local = when(self.from_local && self.outgoing.is_empty() && !writes, PollFlags::IN)
                | when(!self.incoming.is_empty(), PollFlags::OUT);
            let wire = when(self.from_wire && self.incoming.is_empty(), PollFlags::IN)
                | when(writes, PollFlags::OUT);
            let mut polls = [
                PollFd::from_borrowed_fd(self.wire.as_fd(), wire),
                PollFd::from_borrowed_fd(self.local.as_fd(), local),
            ];
            // A peer that is gone stays gone: that is no event to wait for while something else has
            // to happen first.
            let polled =
                if self.hung_up && local.is_empty() { &mut polls[..1] } else { &mut polls[..] };
            match poll(polled, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            self.hung_up |= polls[1].revents().contains(PollFlags::HUP);
            // No thread waits for what the server may still say, and what was sent is out.
            if self.hung_up && !self.from_local && !writes {
                return Ok(());
            }
        }
    }

    /// Moves what can be moved without waiting.
    fn turn(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        // Out.
        loop {
            if !self.outgoing.is_empty() {
                let taken = self.session.writer().write(&self.outgoing)?;
                self.outgoing.drain(..taken);
            }
            while self.session.wants_write() {
                if moved(self.session.write_tls(&mut Socket(&self.wire)))?.is_none() {
                    break;
                }
            }
            if self.session.wants_write() || !self.from_local {
                break;
            }
            if !self.outgoing.is_empty() {
                continue;
            }
            match moved(Socket(&self.local).read(buffer))? {
                None => break,
                Some(0) => {
                    self.from_local = false;
                    self.session.send_close_notify();
                }
                Some(n) => self.outgoing.extend_from_slice(&buffer[..n]),
            }
        }
        if !self.from_local && !self.session.wants_write() {
            let _ = shutdown(&self.wire, Shutdown::Write);
        }
        // In.
        loop {
            while !self.incoming.is_empty() {
                match moved(Socket(&self.local).write(&self.incoming))? {
                    None => return Ok(()),
                    Some(n) => drop(self.incoming.drain(..n)),
                }
            }
            match moved(self.session.reader().read(buffer)) {
                Ok(Some(0)) | Err(_) => {
                    // A farewell, or an end without one. To the process both are an end.
                    self.from_wire = false;
                    return Ok(());
                }
                Ok(Some(n)) => {
                    self.incoming.extend_from_slice(&buffer[..n]);
                    continue;
                }
                Ok(None) => {}
            }
            match moved(self.session.read_tls(&mut Socket(&self.wire)))? {
                None => return Ok(()),
                Some(_) => self
                    .session
                    .process_new_packets()
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?,
            };
        }
    }
}
