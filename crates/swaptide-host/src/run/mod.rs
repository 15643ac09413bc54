//! A run from its first check to its exit status.

pub mod agent;
pub mod attach;
mod background;
mod channel;
mod container;
pub(crate) mod descriptors;
pub mod doctor;
pub(crate) mod ending;
pub(crate) mod error;
mod inheritance;
mod inject_option;
mod launcher;
pub(crate) mod segment;
pub mod supervise;
mod supervisor;
pub mod target;
