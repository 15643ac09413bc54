//! The way out: the workers, and how a batch of chunks goes from the program to the devices.

mod copies;
pub(crate) mod idle;
mod recompress;
pub mod swap_out;
mod unarmed;
pub mod worker;
pub mod writeback;
