//! Measurements of the whole of swaptide: each starts `swaptide run` with a program of this folder.

pub mod job;
mod pairs;
pub(crate) mod preload;
pub(crate) mod tiers;
pub mod work;
pub(crate) mod zswapin;
