//! The benchmarks: each a function from a session to a report.

pub(crate) mod costs;
pub(crate) mod density;
pub(crate) mod overhead;
pub(crate) mod real;
pub(crate) mod sweep;
pub(crate) mod threads;
pub(crate) mod throughput;
