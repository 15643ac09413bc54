//! What a benchmark found, as a table, JSON and a plot.

pub(crate) mod comparison;
pub(crate) mod density;
pub(crate) mod points;
pub(crate) mod real;
pub(crate) mod side;
pub(crate) mod svg;
pub(crate) mod threads;
