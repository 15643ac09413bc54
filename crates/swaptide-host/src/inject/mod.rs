//! Programs that load no library (`swaptide_sys::elf`): the supervisor puts the agent into them.
//!
//! | module | owns |
//! |---|---|
//! | [`finder`] | the thread that finds them |
//! | [`tracer`] | the programs that are about to stop, to be given the agent |
//! | [`running`] | their other threads, stopped meanwhile |
//! | [`put_in`] | what a stopped program is made to do |
//! | [`image`] | the agent's library, relocated |
//! | [`forks`] | the forks of such programs, until everything is in |
//!
//! Locks: none.

mod finder;
mod forks;
mod image;
mod put_in;
mod running;
mod tracer;

pub(crate) use finder::{Takes, has_agent, is_of_swaptide};
pub(crate) use image::AgentFile;
pub use image::ImageError;
pub(crate) use tracer::{Credentials, Tracer, is_confined, is_numbered_here, shares_memory};
