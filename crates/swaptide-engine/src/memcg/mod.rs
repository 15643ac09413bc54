//! What a process may cost and what it costs: its charge against its limit, the share of compressed
//! memory, `swap.high`, stall time, and groups of processes that share pages since a fork.

pub mod acceptance;
pub mod charge;
mod cow_group;
pub(crate) mod pool_sizing;
pub(crate) mod psi;
pub mod small;
pub(crate) mod swap_high;
pub(crate) mod thrash;
