//! The negotiation before the transmission phase: fixed newstyle, with options.
//!
//! Nothing is read beyond what the server must have sent for the step at hand, so no byte of the
//! transmission phase is lost here, and nothing that came before a TLS session can be taken for a
//! part of it.

use std::io::{self, Read, Write};
use std::sync::Arc;

use rustls::{ClientConfig, ClientConnection};

use crate::nbd::socket::DeadlineSocket;
use crate::nbd::tls;
use crate::nbd::{NbdError, Url};

const HELLO: &[u8; 8] = b"NBDMAGIC";
const OPTIONS: &[u8; 8] = b"IHAVEOPT";
const OLDSTYLE: &[u8; 8] = &[0x00, 0x00, 0x42, 0x02, 0x81, 0x86, 0x12, 0x53];
const REPLY: u64 = 0x0003_e889_0455_65a9;

/// In the server's flags and in ours.
const FIXED_NEWSTYLE: u16 = 1 << 0;
const NO_ZEROES: u16 = 1 << 1;

const EXPORT_NAME: u32 = 1;
const STARTTLS: u32 = 5;
const GO: u32 = 7;
const STRUCTURED_REPLY: u32 = 8;

const ACK: u32 = 1;
const INFO: u32 = 3;
const ERROR: u32 = 1 << 31;
const UNSUPPORTED: u32 = ERROR + 1;
const POLICY: u32 = ERROR + 2;
const PLATFORM: u32 = ERROR + 4;
const TLS_REQUIRED: u32 = ERROR + 5;
const UNKNOWN: u32 = ERROR + 6;
const SHUTDOWN: u32 = ERROR + 7;
const BLOCK_SIZE_REQUIRED: u32 = ERROR + 8;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// The longest answer to an option that is read: a message or a description, both of at most 4096
/// bytes, and their numbers.
const MAX_REPLY_BYTES: u32 = 8 << 10;
/// Answers to one option.
const MAX_REPLIES: usize = 64;
/// Bytes of a server's message that are shown.
const MAX_SHOWN_BYTES: usize = 200;

/// The result of the negotiation.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Bytes of the export.
    pub size: u64,
    /// Transmission flags of the protocol.
    pub flags: u16,
    /// Replies may be structured.
    pub structured: bool,
    /// The shortest and the longest transfer the server takes, if it said.
    pub transfers: Option<(u32, u32)>,
}

/// The wire, or the session over it.
struct Line<'w> {
    wire: &'w mut DeadlineSocket,
    session: Option<ClientConnection>,
}

impl Line<'_> {
    fn receive<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        match &mut self.session {
            None => self.wire.read_exact(bytes),
            Some(session) => rustls::Stream::new(session, self.wire).read_exact(bytes),
        }
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.session {
            None => self.wire.write_all(bytes),
            Some(session) => {
                let mut stream = rustls::Stream::new(session, self.wire);
                stream.write_all(bytes)?;
                stream.flush()
            }
        }
    }
}

/// The answer to an option.
struct OptionReply {
    kind: u32,
    data: Vec<u8>,
}

/// A connection during its negotiation.
pub struct Talk<'t> {
    /// The export that is negotiated.
    pub url: &'t Url,
    /// For when it comes to TLS.
    pub tls: &'t Result<Arc<ClientConfig>, NbdError>,
}

impl Talk<'_> {
    /// Negotiates; the TLS session over the wire comes with what was agreed on.
    ///
    /// # Errors
    /// See [`NbdError`].
    pub fn negotiate(
        &self,
        wire: &mut DeadlineSocket,
    ) -> Result<(Agreed, Option<ClientConnection>), NbdError> {
        let mut line = Line { wire, session: None };
        let hello: [u8; 8] = line.receive().map_err(|error| self.talk(error))?;
        if &hello != HELLO {
            return Err(NbdError::NotNbd(self.url.to_string()));
        }
        let magic: [u8; 8] = line.receive().map_err(|error| self.talk(error))?;
        if &magic == OLDSTYLE {
            return Err(NbdError::Oldstyle(self.url.to_string()));
        }
        if &magic != OPTIONS {
            return Err(NbdError::NotNbd(self.url.to_string()));
        }
        let server = u16::from_be_bytes(line.receive().map_err(|error| self.talk(error))?);
        let ours = server & (FIXED_NEWSTYLE | NO_ZEROES);
        line.send(&u32::from(ours).to_be_bytes()).map_err(|error| self.talk(error))?;
        let zeroes = ours & NO_ZEROES == 0;
        if ours & FIXED_NEWSTYLE == 0 {
            // Such a server hangs up at any option but this one.
            if self.url.tls {
                return Err(NbdError::NoTls(self.url.to_string()));
            }
            return Ok((self.export_name(&mut line, false, zeroes)?, None));
        }
        if self.url.tls {
            self.start_tls(&mut line)?;
        }
        let mut answer = self.option(&mut line, STRUCTURED_REPLY, &[])?;
        if answer.kind == TLS_REQUIRED && line.session.is_none() {
            self.start_tls(&mut line)?;
            answer = self.option(&mut line, STRUCTURED_REPLY, &[])?;
        }
        let structured = match answer.kind {
            ACK => true,
            kind if kind & ERROR != 0 => false,
            _ => return Err(self.broken("a malformed reply to the option STRUCTURED_REPLY")),
        };
        let agreed = match self.go(&mut line, structured) {
            Ok(Some(agreed)) => agreed,
            Ok(None) => self.export_name(&mut line, structured, zeroes)?,
            Err(NeedsTls::Yes) if line.session.is_none() => {
                // It let us ask for structured replies without; they are asked for again under TLS.
                self.start_tls(&mut line)?;
                let structured = self.option(&mut line, STRUCTURED_REPLY, &[])?.kind == ACK;
                match self.go(&mut line, structured) {
                    Ok(Some(agreed)) => agreed,
                    Ok(None) => self.export_name(&mut line, structured, zeroes)?,
                    Err(NeedsTls::Yes) => return Err(self.broken("it asks for TLS within TLS")),
                    Err(NeedsTls::No(error)) => return Err(error),
                }
            }
            Err(NeedsTls::Yes) => return Err(self.broken("it asks for TLS within TLS")),
            Err(NeedsTls::No(error)) => return Err(error),
        };
        Ok((agreed, line.session))
    }

    fn talk(&self, error: io::Error) -> NbdError {
        // What rustls has to say comes wrapped.
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(inner) => NbdError::Tls(self.url.to_string(), inner.clone()),
            None => NbdError::Talk(self.url.to_string(), error),
        }
    }

    fn broken(&self, what: &'static str) -> NbdError {
        NbdError::Protocol(self.url.to_string(), what)
    }

    fn refused(&self, answer: &OptionReply) -> NbdError {
        let why = match answer.kind {
            UNSUPPORTED => "the server does not know an option that is needed",
            POLICY => "the server does not allow it",
            PLATFORM => "the server cannot do it on its machine",
            TLS_REQUIRED => "the server requires TLS",
            UNKNOWN => "the server has no export of that name",
            SHUTDOWN => "the server is shutting down",
            BLOCK_SIZE_REQUIRED => "the server requires a block size that it does not announce",
            _ => "the server refuses",
        };
        let text = String::from_utf8_lossy(&answer.data);
        let text = text
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .take(MAX_SHOWN_BYTES)
            .collect::<String>();
        NbdError::Refused { url: self.url.to_string(), why, text: text.trim().to_owned() }
    }

    fn request(&self, line: &mut Line<'_>, option: u32, data: &[u8]) -> Result<(), NbdError> {
        let mut bytes = Vec::with_capacity(16 + data.len());
        bytes.extend_from_slice(OPTIONS);
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        line.send(&bytes).map_err(|error| self.talk(error))
    }

    fn answer(&self, line: &mut Line<'_>, option: u32) -> Result<OptionReply, NbdError> {
        let head: [u8; 20] = line.receive().map_err(|error| self.talk(error))?;
        let number =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if head[..8] != REPLY.to_be_bytes() {
            return Err(self.broken("an invalid reply"));
        }
        if number(8) != option {
            return Err(self.broken("a reply to an option that was not sent"));
        }
        let (kind, len) = (number(12), number(16));
        if len > MAX_REPLY_BYTES {
            return Err(self.broken("a reply that is too long"));
        }
        let mut data = vec![0; len as usize];
        line.fill(&mut data).map_err(|error| self.talk(error))?;
        Ok(OptionReply { kind, data })
    }

    fn option(
        &self,
        line: &mut Line<'_>,
        option: u32,
        data: &[u8],
    ) -> Result<OptionReply, NbdError> {
        self.request(line, option, data)?;
        self.answer(line, option)
    }

    fn start_tls(&self, line: &mut Line<'_>) -> Result<(), NbdError> {
        let answer = self.option(line, STARTTLS, &[])?;
        match answer.kind {
            ACK if answer.data.is_empty() => {}
            UNSUPPORTED | POLICY | PLATFORM => return Err(NbdError::NoTls(self.url.to_string())),
            kind if kind & ERROR != 0 => return Err(self.refused(&answer)),
            _ => return Err(self.broken("a malformed reply to the option STARTTLS")),
        }
        let config = match self.tls {
            Ok(config) => Arc::clone(config),
            // It was not fatal when it was found; here is the code that needs it.
            Err(_) => tls::client_config(self.url)?,
        };
        line.session =
            Some(tls::session(self.url, config, line.wire).map_err(|error| match error {
                tls::SessionError::Name(error) => error,
                tls::SessionError::Io(error) => self.talk(error),
            })?);
        Ok(())
    }

    /// Asks for the export; `None` if the server does not know how to be asked.
    fn go(&self, line: &mut Line<'_>, structured: bool) -> Result<Option<Agreed>, NeedsTls> {
        let name = self.url.export.as_bytes();
        let mut data = Vec::with_capacity(name.len() + 8);
        data.extend_from_slice(&(name.len() as u32).to_be_bytes());
        data.extend_from_slice(name);
        data.extend_from_slice(&1u16.to_be_bytes());
        data.extend_from_slice(&INFO_BLOCK_SIZE.to_be_bytes());
        self.request(line, GO, &data)?;
        let (mut export, mut transfers) = (None, None);
        for _ in 0..MAX_REPLIES {
            let answer = self.answer(line, GO)?;
            match answer.kind {
                INFO => match answer.data.split_first_chunk() {
                    Some((kind, rest)) => match (u16::from_be_bytes(*kind), rest.len()) {
                        (INFO_EXPORT, 10) => {
                            let (size, flags) = rest.split_at(8);
                            export = Some((
                                u64::from_be_bytes(size.try_into().expect("8 bytes")),
                                u16::from_be_bytes(flags.try_into().expect("2 bytes")),
                            ));
                        }
                        (INFO_BLOCK_SIZE, 12) => {
                            let number = |at: usize| {
                                u32::from_be_bytes(rest[at..at + 4].try_into().expect("4 bytes"))
                            };
                            transfers = Some((number(0), number(8)));
                        }
                        (INFO_EXPORT | INFO_BLOCK_SIZE, _) => {
                            return Err(self.broken("information of a wrong length").into());
                        }
                        _ => {}
                    },
                    None => return Err(self.broken("information without a kind").into()),
                },
                ACK => {
                    let (size, flags) =
                        export.ok_or_else(|| self.broken("an export without a size"))?;
                    return Ok(Some(Agreed { size, flags, structured, transfers }));
                }
                UNSUPPORTED => return Ok(None),
                TLS_REQUIRED => return Err(NeedsTls::Yes),
                kind if kind & ERROR != 0 => return Err(self.refused(&answer).into()),
                _ => return Err(self.broken("a malformed reply to the option GO").into()),
            }
        }
        Err(self.broken("too many replies").into())
    }

    /// Asks for the export in the old way: a server that does not have it hangs up.
    fn export_name(
        &self,
        line: &mut Line<'_>,
        structured: bool,
        zeroes: bool,
    ) -> Result<Agreed, NbdError> {
        self.request(line, EXPORT_NAME, self.url.export.as_bytes())?;
        let hung_up = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => NbdError::Refused {
                url: self.url.to_string(),
                why: "the server has no export of that name, or requires what this option cannot \
                    negotiate",
                text: String::new(),
            },
            _ => self.talk(error),
        };
        let size = u64::from_be_bytes(line.receive().map_err(hung_up)?);
        let flags = u16::from_be_bytes(line.receive().map_err(|error| self.talk(error))?);
        if zeroes {
            line.receive::<124>().map_err(|error| self.talk(error))?;
        }
        Ok(Agreed { size, flags, structured, transfers: None })
    }
}

/// Why an export was not to be had.
enum NeedsTls {
    Yes,
    No(NbdError),
}

impl From<NbdError> for NeedsTls {
    fn from(error: NbdError) -> NeedsTls {
        NeedsTls::No(error)
    }
}
