//! Where the handler runs, and how long it waits for somebody.

pub mod deadline;
pub(crate) mod handler_cpu;
