//! The daemon of a host: one budget, one set of swap areas and one tree of groups for many runs.

mod drain;
pub(crate) mod error;
pub(crate) mod metrics;
mod notify;
pub mod segment;
pub mod server;
pub mod state;
mod swap_list;
