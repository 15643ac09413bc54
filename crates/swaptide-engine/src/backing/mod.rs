//! Where pages are that are out: the devices of a process, and what a check of a range of them
//! found.

pub mod devices;
pub(crate) mod remote_queue;
pub(crate) mod shortage;
pub mod snapshot;
