//! URLs of exports.
//!
//! ```text
//! nbd://HOST[:PORT][/EXPORT]            nbd+unix:///[EXPORT]?socket=PATH
//! nbds://...  nbds+unix://...           with TLS or not at all
//! ?ca=PATH            the authority that the server's certificate must be from (default: the
//!                     machine's)
//! &cert=PATH&key=PATH our own certificate, where the server wants one
//! &tls-hostname=NAME  the name in the server's certificate, instead of HOST
//! &connections=N      connections of one process
//! ```
//!
//! `%41` stands for a byte anywhere. Without an export, it is the server's default one.

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::str::FromStr;

use swaptide_store::nbd::MAX_CONNECTIONS;
use thiserror::Error;

/// The port of NBD servers.
const PORT: u16 = 10809;
/// The longest name the protocol allows.
const MAX_NAME_BYTES: usize = 4096;

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A server on the network (`nbd://`, `nbds://`).
    Tcp {
        /// Name or address of the server.
        host: String,
        /// TCP port, 10809 if none was given.
        port: u16,
    },
    /// A server of this machine, by its socket's path.
    Unix(PathBuf),
}

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    /// The address of the server.
    pub place: Endpoint,
    /// The export's name; the empty name is the default export.
    pub export: String,
    /// True if the connection uses TLS, and no other way.
    pub tls: bool,
    /// The authority to trust instead of those of the machine.
    pub ca: Option<PathBuf>,
    /// Our certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name in the server's certificate, where it is not the host's.
    pub tls_hostname: Option<String>,
    /// Connections of one process.
    pub connections: Option<u32>,
}

impl Url {
    /// The files that it names.
    pub(crate) fn paths(&mut self) -> Vec<&mut PathBuf> {
        let socket = match &mut self.place {
            Endpoint::Unix(path) => Some(path),
            Endpoint::Tcp { .. } => None,
        };
        let identity = self.identity.iter_mut().flat_map(|(cert, key)| [cert, key]);
        socket.into_iter().chain(&mut self.ca).chain(identity).collect()
    }
}

/// Why a text names no export.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum UrlError {
    /// None of the schemes.
    #[error(
        "{0:?} is not an NBD URL; write nbd://HOST[:PORT]/EXPORT or \
        nbd+unix:///EXPORT?socket=PATH (nbds for TLS)"
    )]
    Scheme(String),
    /// The URL names no host.
    #[error("{0:?}: no host; write nbd://HOST[:PORT]/EXPORT")]
    Host(String),
    /// No port number.
    #[error(
        "{0:?}: {1:?} is not a port; write a number from 1 to 65535, or none for \
        {PORT}"
    )]
    Port(String, String),
    /// What is not of use here: a user, a fragment.
    #[error("{0:?}: {1}; leave it out, or write the character as %XX")]
    Part(String, &'static str),
    /// Not two hexadecimal digits after a `%`, or not text.
    #[error(
        "{0:?}: % needs two hexadecimal digits after it, and the result must \
        be UTF-8"
    )]
    Escape(String),
    /// An option that there is not.
    #[error(
        "{0:?}: there is no option {1:?}; use socket, ca, cert, key, \
        tls-hostname, connections"
    )]
    Option(String, String),
    /// An option with a value that it cannot have.
    #[error("{0:?}: {1} needs {2}; write it, or leave {1} out")]
    Value(String, String, &'static str),
    /// The same twice.
    #[error("{0:?}: {1} is given twice; give it once")]
    Twice(String, String),
    /// A URL of a Unix socket needs one.
    #[error("{0:?}: socket=PATH is valid only with nbd+unix:///EXPORT")]
    Socket(String),
    /// The name is too long; how the URL begins.
    #[error("{0:?}...: the export's name has more than {MAX_NAME_BYTES} bytes; shorten it there")]
    Name(String),
}

impl Url {
    /// True if a text is meant to be such a URL.
    #[must_use]
    pub fn is_meant(text: &str) -> bool {
        text.split_once("://").is_some_and(|(scheme, _)| scheme.starts_with("nbd"))
    }

    /// The URL with its options, in a form that is read as the same again.
    #[must_use]
    pub fn whole(&self) -> String {
        let s = if self.tls { "s" } else { "" };
        let export = encode(self.export.as_bytes());
        let path = |path: &PathBuf| encode(path.as_os_str().as_bytes());
        let (start, socket) = match &self.place {
            Endpoint::Tcp { host, port } if host.contains(':') => {
                (format!("nbd{s}://[{}]:{port}/{export}", encode(host.as_bytes())), None)
            }
            Endpoint::Tcp { host, port } => {
                (format!("nbd{s}://{}:{port}/{export}", encode(host.as_bytes())), None)
            }
            Endpoint::Unix(socket) => (format!("nbd{s}+unix:///{export}"), Some(path(socket))),
        };
        let options = [
            ("socket", socket),
            ("ca", self.ca.as_ref().map(path)),
            ("cert", self.identity.as_ref().map(|(cert, _)| path(cert))),
            ("key", self.identity.as_ref().map(|(_, key)| path(key))),
            ("tls-hostname", self.tls_hostname.as_ref().map(|name| encode(name.as_bytes()))),
            ("connections", self.connections.map(|n| n.to_string())),
        ];
        let options: Vec<String> = options
            .into_iter()
            .filter_map(|(key, value)| Some(format!("{key}={}", value?)))
            .collect();
        if options.is_empty() { start } else { format!("{start}?{}", options.join("&")) }
    }

    /// The name that the server's certificate must have.
    #[must_use]
    pub(crate) fn server_name(&self) -> &str {
        match (&self.tls_hostname, &self.place) {
            (Some(name), _) => name,
            (None, Endpoint::Tcp { host, .. }) => host,
            (None, Endpoint::Unix(_)) => "localhost",
        }
    }
}

impl FromStr for Url {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Url, UrlError> {
        let whole = || text.to_owned();
        let (scheme, rest) = text.split_once("://").ok_or_else(|| UrlError::Scheme(whole()))?;
        let (tls, unix) = match scheme {
            "nbd" => (false, false),
            "nbds" => (true, false),
            "nbd+unix" => (false, true),
            "nbds+unix" => (true, true),
            _ => return Err(UrlError::Scheme(whole())),
        };
        if rest.contains('#') {
            return Err(UrlError::Part(whole(), "a # is not allowed here"));
        }
        let decoded = |part: &str| decode(part).ok_or_else(|| UrlError::Escape(whole()));
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decoded(export)?;
        if export.len() > MAX_NAME_BYTES {
            return Err(UrlError::Name(text.chars().take(60).collect()));
        }
        let mut url = Url {
            place: Endpoint::Unix(PathBuf::new()),
            export,
            tls,
            ca: None,
            identity: None,
            tls_hostname: None,
            connections: None,
        };
        let (mut socket, mut cert, mut key) = (None, None, None);
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let value = decoded(value)?;
            let file = || match value.as_str() {
                "" => Err(UrlError::Value(whole(), name.to_owned(), "the path of a file")),
                path => Ok(PathBuf::from(path)),
            };
            let twice = match name {
                "socket" => socket.replace(file()?).is_some(),
                "ca" => url.ca.replace(file()?).is_some(),
                "cert" => cert.replace(file()?).is_some(),
                "key" => key.replace(file()?).is_some(),
                "tls-hostname" if value.is_empty() => {
                    return Err(UrlError::Value(
                        whole(),
                        name.to_owned(),
                        "the name in the server's certificate",
                    ));
                }
                "tls-hostname" => url.tls_hostname.replace(value).is_some(),
                "connections" => match value.parse() {
                    Ok(number @ 1..=MAX_CONNECTIONS) => url.connections.replace(number).is_some(),
                    _ => {
                        return Err(UrlError::Value(
                            whole(),
                            name.to_owned(),
                            "a number from 1 to 16",
                        ));
                    }
                },
                _ => return Err(UrlError::Option(whole(), name.to_owned())),
            };
            if twice {
                return Err(UrlError::Twice(whole(), name.to_owned()));
            }
        }
        url.identity = match (cert, key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => {
                return Err(UrlError::Value(
                    whole(),
                    "cert".to_owned(),
                    "its key as well: cert=PATH&key=PATH",
                ));
            }
        };
        url.place = match (unix, socket) {
            (true, Some(path)) if authority.is_empty() => Endpoint::Unix(path),
            (true, Some(_)) => return Err(UrlError::Part(whole(), "a Unix socket has no host")),
            (false, None) => tcp(text, authority)?,
            _ => return Err(UrlError::Socket(whole())),
        };
        Ok(url)
    }
}

/// `HOST`, `HOST:PORT`, `[ADDRESS]`, `[ADDRESS]:PORT`.
fn tcp(text: &str, authority: &str) -> Result<Endpoint, UrlError> {
    if authority.contains('@') {
        return Err(UrlError::Part(text.to_owned(), "a user is not allowed here"));
    }
    let no_host = || UrlError::Host(text.to_owned());
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']').ok_or_else(no_host)?;
            match after.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if after.is_empty() => (host, None),
                None => return Err(no_host()),
            }
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let host = decode(host).ok_or_else(|| UrlError::Escape(text.to_owned()))?;
    if host.is_empty() {
        return Err(no_host());
    }
    let port = match port {
        None | Some("") => PORT,
        Some(number) => match number.parse() {
            Ok(port @ 1..) => port,
            _ => return Err(UrlError::Port(text.to_owned(), number.to_owned())),
        },
    };
    Ok(Endpoint::Tcp { host, port })
}

fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digit = |byte: u8| char::from(byte).to_digit(16);
            bytes.push((digit(rest.next()?)? * 16 + digit(rest.next()?)?) as u8);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
}

fn encode(bytes: &[u8]) -> String {
    let plain =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b':');
    bytes
        .iter()
        .map(
            |byte| {
                if plain(*byte) { char::from(*byte).to_string() } else { format!("%{byte:02X}") }
            },
        )
        .collect()
}

/// Without its options: for messages.
impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.tls { "s" } else { "" };
        let export = self.export.escape_debug();
        match &self.place {
            Endpoint::Tcp { host, port } if host.contains(':') => {
                write!(f, "nbd{s}://[{}]:{port}/{export}", host.escape_debug())
            }
            Endpoint::Tcp { host, port } => {
                write!(f, "nbd{s}://{}:{port}/{export}", host.escape_debug())
            }
            Endpoint::Unix(path) => write!(
                f,
                "nbd{s}+unix:///{export}?socket={}",
                path.display().to_string().escape_debug()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Url {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    fn refused(text: &str) -> String {
        text.parse::<Url>().expect_err("refused").to_string()
    }

    #[test]
    fn a_whole_url_is_read_as_the_same_and_a_name_is_one_line() {
        for text in [
            "nbd://host",
            "nbds://[2001:db8::1]:7000/a%2Fb%20c%25?ca=/c,prio=3&cert=/d&key=/e&tls-hostname=n&connections=4",
            "nbd+unix:///x%0Ay?socket=/run/a%26b%0A",
            "nbd://a%2Fb%0A/%3F",
        ] {
            let url = parsed(text);
            assert_eq!(parsed(&url.whole()), url, "{}", url.whole());
            assert!(!url.to_string().contains('\n'));
        }
    }

    #[test]
    fn hosts_ports_exports_and_options_are_told_apart() {
        let url = parsed("nbd://store.example/swap");
        assert_eq!(url.place, Endpoint::Tcp { host: "store.example".into(), port: 10809 });
        assert_eq!((url.export.as_str(), url.tls), ("swap", false));
        assert_eq!(url.to_string(), "nbd://store.example:10809/swap");

        let url = parsed(
            "nbds://[2001:db8::1]:7000/a/b%20c?ca=/etc/ca.pem&tls-hostname=store&connections=8",
        );
        assert_eq!(url.place, Endpoint::Tcp { host: "2001:db8::1".into(), port: 7000 });
        assert_eq!((url.export.as_str(), url.tls, url.connections), ("a/b c", true, Some(8)));
        assert_eq!(url.ca, Some(PathBuf::from("/etc/ca.pem")));
        assert_eq!(url.server_name(), "store");
        assert_eq!(url.to_string(), "nbds://[2001:db8::1]:7000/a/b c");

        let url = parsed("nbd+unix:///disk?socket=/run/nbd%2b1.sock");
        assert_eq!(url.place, Endpoint::Unix(PathBuf::from("/run/nbd+1.sock")));
        assert_eq!((url.export.as_str(), url.server_name()), ("disk", "localhost"));

        for text in ["nbd://store", "nbd://store/", "nbd://store:/"] {
            assert_eq!(
                (parsed(text).export.as_str(), &parsed(text).place),
                ("", &parsed("nbd://store:10809").place),
                "{text}"
            );
        }
        assert_eq!(parsed("nbds://h/?cert=c&key=k").identity, Some(("c".into(), "k".into())));
    }

    #[test]
    fn wrong_url_error_says_what_is_right() {
        for (text, part) in [
            ("file:/x", "is not an NBD URL"),
            ("http://store/x", "is not an NBD URL"),
            ("nbd:/store/x", "is not an NBD URL"),
            ("nbd:///x", "no host"),
            ("nbd://:10809/x", "no host"),
            ("nbd://[::1/x", "no host"),
            ("nbd://[::1]x/x", "no host"),
            ("nbd://store:0/x", "\"0\" is not a port"),
            ("nbd://store:65536/x", "is not a port"),
            ("nbd://store:ssh/x", "\"ssh\" is not a port"),
            ("nbd://me@store/x", "a user is not allowed"),
            ("nbd://store/x#y", "a # is not allowed"),
            ("nbd://store/%4", "two hexadecimal digits"),
            ("nbd://store/%+1", "two hexadecimal digits"),
            ("nbd://store/%ff", "the result must be UTF-8"),
            ("nbd://store/%00", "the result must be UTF-8"),
            ("nbd://store/x?cs=y", "no option \"cs\""),
            ("nbd://store/x?ca=", "ca needs the path of a file; write it, or leave ca out"),
            ("nbd://store/x?ca=a&ca=b", "ca is given twice"),
            ("nbd://store/x?cert=a", "cert=PATH&key=PATH"),
            ("nbd://store/x?connections=0", "a number from 1 to 16"),
            ("nbd://store/x?connections=17", "a number from 1 to 16"),
            ("nbd://store/x?socket=/y", "is valid only with"),
            ("nbd+unix:///x", "socket=PATH is valid only with"),
            ("nbd+unix://host/x?socket=/y", "a Unix socket has no host"),
        ] {
            let message = refused(text);
            assert!(message.contains(part), "{text}: {message}");
            assert!(message.contains(text) || part == "is not an NBD URL", "{text}: {message}");
        }
        let long = format!("nbd://store/{}", "x".repeat(4097));
        assert!(refused(&long).len() < 200);
        assert!(
            Url::is_meant("nbds:///") && Url::is_meant("nbd+ssh://x") && !Url::is_meant("file:nbd")
        );
    }
}
