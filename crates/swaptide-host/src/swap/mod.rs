//! Swap areas: what `--swap` names, how areas are opened, joined, mirrored and taken away.

pub mod areas;
pub(crate) mod circular;
pub(crate) mod error;
pub mod mirror;
mod mirror_option;
pub(crate) mod rotational;
pub mod spec;
