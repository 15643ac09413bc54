//! Tables without a program: fallbacks of the allocator, the size of the search space, the whole
//! cycle of a page, and how far several threads get in the engine's data structures.

#![deny(unsafe_code)]

pub(crate) mod allocator;
pub(crate) mod scaling;
pub(crate) mod search_space;
pub(crate) mod swap_table;
