//! Swap areas: what `--swap` names, how areas are opened, joined, mirrored and taken away.

pub mod areas;
pub(crate) mod circular;
pub(crate) mod claims;
pub(crate) mod error;
mod listeners;
pub mod mirror;
mod mirror_option;
pub(crate) mod rotational;
pub mod spec;
