//! The daemon of a host: one budget, one set of swap areas and one tree of groups for many runs.

pub(crate) mod error;
pub(crate) mod metrics;
pub(crate) mod segment;
pub mod server;
pub(crate) mod state;
mod swap_list;
