//! How much comes in for one fault: what the faults so far say of the next ones.

pub(crate) mod hints;
pub(crate) mod history;
pub mod locality;
pub mod policy;
mod sampling;
