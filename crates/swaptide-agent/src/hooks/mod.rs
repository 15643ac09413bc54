//! The functions that stand in front of libc's, and the ways past them.
//!
//! They must work at any moment of a program's life, in a signal handler and in a vforked child
//! too: they allocate nothing, and take no lock but [`crate::process::FORK_LOCK`] around a fork and
//! where they detach a program.

mod descriptors;
pub(crate) mod environment;
mod exec;
mod leak_check;
mod mappings;
pub(crate) mod memory;
mod mremap;
mod namespaces;
mod past_writes;
mod sends;
mod syscall;
pub(crate) mod thread;
