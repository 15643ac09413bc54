//! What processes and users ask of a supervisor: the socket of a run's processes, the socket of its
//! owner, and the forks that the supervisor follows.

pub mod agent_api;
pub(crate) mod client;
pub mod fork_tracer;
pub(crate) mod holds;
pub mod peer;
pub mod server;
