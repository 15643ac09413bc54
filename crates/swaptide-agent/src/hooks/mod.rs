//! The functions that stand in front of libc's, and the ways past them.
//!
//! They must work at any moment of a program's life, in a signal handler and in a vforked child
//! too: they allocate nothing and take no lock.

pub(crate) mod environment;
pub(crate) mod exec;
pub(crate) mod mappings;
pub(crate) mod memory;
pub(crate) mod mremap;
pub(crate) mod sends;
pub(crate) mod syscall;
pub(crate) mod thread;
