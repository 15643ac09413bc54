//! What a process of the tree asks the supervisor for, and where it finds it.
//!
//! The supervisor listens on an abstract sequenced-packet socket whose name is in the environment variable [`ENV_SOCKET`].
//! A client sends one [`Request`] byte and receives one byte (the same) with the descriptor that was asked for; then both hang up.

/// Name of the environment variable that holds the supervisor's abstract socket name (without the leading NUL byte).
pub const ENV_SOCKET: &str = "SWAPTIDE_SOCKET";
/// When set to a file's path, the agents append one line there for each thing worth knowing. Meant for a bug report.
pub const ENV_AGENT_LOG: &str = "SWAPTIDE_AGENT_LOG";

/// One request: the byte that goes over the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Request {
    /// The segment's memfd.
    Segment = b'S',
    /// The swap file, opened for reading and writing.
    SwapFile = b'F',
}

impl Request {
    /// The request of a byte, if it is one.
    pub fn from_byte(byte: u8) -> Option<Request> {
        match byte {
            b'S' => Some(Request::Segment),
            b'F' => Some(Request::SwapFile),
            _ => None,
        }
    }
}
