//! The measured program: its data, its phases, and the Redis server of `bgsave`.

pub(crate) mod phases;
pub mod program;
mod redis;
pub(crate) mod serial;
