//! What a run tells at its end, and what it shows while it runs.

pub mod totals;
