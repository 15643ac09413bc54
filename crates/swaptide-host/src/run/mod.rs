//! A run from its first check to its exit status.

pub mod agent;
pub mod doctor;
pub(crate) mod ending;
pub(crate) mod error;
pub mod supervise;
pub mod target;
