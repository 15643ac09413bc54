//! What the userfaultfd reports: reading it, and applying what the program did to its mappings.

pub mod apply;
pub(crate) mod brought;
pub(crate) mod fork_state;
pub(crate) mod late_look;
pub mod reader;
