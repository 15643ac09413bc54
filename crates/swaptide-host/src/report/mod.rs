//! What a run tells at its end, and what it shows while it goes on.

pub mod totals;
