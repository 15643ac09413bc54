//! What a process of the tree asks the supervisor for, and where it finds it.
//!
//! The supervisor listens on an abstract sequenced-packet socket whose name is in the environment
//! variable [`ENV_SOCKET`]. A client sends one [`AgentRequest`] byte and receives one byte (the
//! same) with the descriptor that was asked for; then both hang up. Some requests have more behind
//! the byte, as their descriptions say, and some answers.

/// Name of the environment variable that holds the supervisor's abstract socket name (without the
/// leading NUL byte).
pub const ENV_SOCKET: &str = "SWAPTIDE_SOCKET";
/// When set to a file's path, the agents append one line there for each thing worth knowing. Meant
/// for a bug report.
pub const ENV_AGENT_LOG: &str = "SWAPTIDE_AGENT_LOG";
/// Begins the name of the socket of a supervisor that injects the agent: it wants to be told of
/// what is executed ([`AgentRequest::Exec`]).
pub const INJECTING_SOCKET: &str = "swaptide-inject-";

/// One request: the byte that goes over the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AgentRequest {
    /// The segment's memory file, as a descriptor.
    Segment = b'S',
    /// The transport of a swap area (see [`crate::Transport`]): its number follows.
    Area = b'A',
    /// `/dev/userfaultfd`, for a process that may no longer open it.
    Device = b'U',
    /// Features for the userfaultfd that comes with the request, for a process that may not ask for
    /// them any more: the features' word follows.
    Handshake = b'H',
    /// The client's page map.
    Pagemap = b'P',
    /// The client's list of mappings.
    Maps = b'M',
    /// The client's sizes: its `/proc/PID/statm`.
    Statm = b'T',
    /// The client's process id as the supervisor sees it: four bytes in the answer, little end
    /// first.
    Identity = b'I',
    /// Follow the thread that asks through its fork: its number (4), and where its child is to
    /// begin (8) and with which stack (8). The answer has nothing more; the connection stays open
    /// until the fork is over, and the child says a word on it when it has begun.
    Fork = b'F',
    /// A new region of shared memory; its length in bytes follows (8). The answer has the memory
    /// file.
    Region = b'R',
    /// Look at the client's mappings of shared regions again; a userfaultfd for them comes with the
    /// request if the previous answer asked for one. The answer has one of
    /// [`crate::shared::Attached`] behind the byte.
    Attach = b'J',
    /// The client's guard; a landmark's address follows (8). The answer has the number of the
    /// pager's slot (4) and the userfaultfd; the connection stays open.
    Guard = b'G',
    /// Advice on a range of shared memory: address (8), length (8), advice (4). In the answer a 1
    /// if the range is of a shared region.
    Advise = b'V',
    /// The client, or a process that it is about to start, executes a program. It may be one that
    /// loads no library. There is no answer.
    Exec = b'X',
    /// Hold the userfaultfd that comes with the request until the client's threads are gone. There
    /// is no answer; the connection stays open for as long as the client has an engine. A byte on
    /// it asks the supervisor to let go; it answers by closing the connection.
    Hold = b'K',
    /// The filter of forks of a program that loads no library comes with the request
    /// (`swaptide_sys::fork_filter`), or nothing does where one is there already: of the process
    /// that this one descends from. The answer has nothing more; without it the process is not
    /// managed.
    Filter = b'L',
}

impl AgentRequest {
    /// The request of a byte, if it is one.
    pub fn from_byte(byte: u8) -> Option<AgentRequest> {
        use AgentRequest::{
            Advise, Area, Attach, Device, Exec, Filter, Fork, Guard, Handshake, Hold, Identity,
            Maps, Pagemap, Region, Segment, Statm,
        };
        [
            Segment, Area, Device, Handshake, Pagemap, Maps, Statm, Identity, Fork, Region, Attach,
            Guard, Advise, Exec, Hold, Filter,
        ]
        .into_iter()
        .find(|request| *request as u8 == byte)
    }

    /// Bytes that follow the request's.
    pub fn body(self) -> usize {
        match self {
            AgentRequest::Area => 1,
            AgentRequest::Handshake | AgentRequest::Region | AgentRequest::Guard => 8,
            AgentRequest::Advise | AgentRequest::Fork => 20,
            _ => 0,
        }
    }

    /// True for what a descriptor may come with.
    pub fn may_have_descriptor(self) -> bool {
        use AgentRequest::{Attach, Filter, Handshake, Hold};
        matches!(self, Handshake | Attach | Hold | Filter)
    }

    /// True for what the pager of shared regions answers.
    pub fn is_shared(self) -> bool {
        matches!(
            self,
            AgentRequest::Region
                | AgentRequest::Attach
                | AgentRequest::Guard
                | AgentRequest::Advise
        )
    }
}
