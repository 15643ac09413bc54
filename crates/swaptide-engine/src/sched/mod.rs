//! Where the handler runs, and how long it waits for another thread or process.

pub mod deadline;
pub(crate) mod handler_cpu;
