//! What a process's memory is: the page table, the managed ranges, the order in which chunks go
//! out, and the frames between the program and the devices. Nothing here reads a userfaultfd.

pub mod batch;
pub mod dontfork;
pub mod grace;
pub mod lru;
pub mod page_table;
pub(crate) mod references;
pub mod staging;
pub mod types;
pub mod vma_change;
pub mod vma_set;
