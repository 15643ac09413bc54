//! Pages of the program that are treated apart: those that stay in memory, and those that are not
//! managed.

pub(crate) mod excluded;
pub(crate) mod kernel_words;
pub(crate) mod pinned;
pub(crate) mod references;
pub(crate) mod thread_words;
