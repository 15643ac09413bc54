//! What the two processes of a supervisor say to each other.
//!
//! Owns the messages and the connection. Locks: none.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};

/// A message from the back to the front.
#[derive(Serialize, Deserialize)]
pub(super) enum LauncherMessage {
    Failed(String),
    Started(u32),
    Stopped,
    /// The first process has the agent; what is to be said of that.
    Attached(Option<String>),
    /// To be said on standard error.
    Said(String),
    Ended {
        status: u8,
        lines: Vec<String>,
        stays: bool,
    },
}

/// A signal that the launcher got.
#[derive(Serialize, Deserialize)]
pub(super) struct PassOn {
    pub(super) signal: i32,
    pub(super) sender: u32,
}

/// Messages between launcher and supervisor: one JSON text to a line.
pub(super) struct Channel {
    pub(super) stream: UnixStream,
    received: Vec<u8>,
}

impl Channel {
    pub(super) fn new(stream: UnixStream) -> Channel {
        Channel { stream, received: Vec::new() }
    }

    /// Sends; that the other side is gone is seen at the next receiving.
    pub(super) fn send(&mut self, message: &impl Serialize) {
        if let Ok(mut line) = serde_json::to_vec(message) {
            line.push(b'\n');
            let _ = self.stream.write_all(&line);
        }
    }

    /// All messages that came; `None` when the other side is gone and all of its messages were
    /// read.
    pub(super) fn receive<T: for<'a> Deserialize<'a>>(&mut self) -> Option<Vec<T>> {
        let mut buffer = [0u8; 4096];
        match self.stream.read(&mut buffer) {
            Ok(0) => return None,
            Ok(length) => self.received.extend_from_slice(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
        let end = self.received.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let lines: Vec<u8> = self.received.drain(..end).collect();
        Some(
            lines
                .split(|byte| *byte == b'\n')
                .filter_map(|line| serde_json::from_slice(line).ok())
                .collect(),
        )
    }
}
