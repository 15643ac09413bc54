//! Where the handler runs, which threads serve faults next to it, and how long another thread or
//! process is waited for.

pub mod deadline;
pub(crate) mod fault_servers;
pub(crate) mod handed;
pub(crate) mod handler_cpu;
