//! What a process's memory is: the page table, the managed ranges, the order in which chunks go
//! out, and the frames between the program and the devices. Nothing here reads a userfaultfd.

pub mod batch;
pub(crate) mod busy;
pub(crate) mod change_order;
pub(crate) mod dontfork;
pub(crate) mod fault_hold;
pub mod heat;
pub(crate) mod lru;
pub(crate) mod page_table;
pub(crate) mod references;
pub(crate) mod staging;
pub mod types;
pub(crate) mod vma_change;
pub(crate) mod vma_set;
