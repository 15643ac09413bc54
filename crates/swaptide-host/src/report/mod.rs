//! What a run tells at its end, and what it shows while it runs.

pub mod series;
pub mod sink;
pub(crate) mod stalls;
pub mod totals;
pub(crate) mod working_set;
