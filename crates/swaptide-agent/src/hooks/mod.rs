//! The functions that stand in front of libc's, and the ways past them.

pub(crate) mod exec;
pub(crate) mod libc;
pub(crate) mod mappings;
pub(crate) mod mremap;
pub(crate) mod sends;
pub(crate) mod syscall;
