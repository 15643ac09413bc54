//! A run from its first check to its exit status.

pub mod ending;
pub(crate) mod error;
pub mod signals;
pub mod supervise;
pub mod target;
