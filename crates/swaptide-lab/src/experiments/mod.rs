//! Tables of the designs alone: fallbacks of the allocator, the size of the search space, and the
//! whole cycle of a page.

#![deny(unsafe_code)]

pub(crate) mod allocator;
pub(crate) mod search_space;
pub(crate) mod swap_table;
