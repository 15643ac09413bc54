//! Where the handler runs, and how long it waits for somebody.

pub mod deadline;
pub mod handler_cpu;
