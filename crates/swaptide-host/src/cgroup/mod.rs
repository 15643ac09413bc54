//! Groups of processes: a hierarchy like that of cgroups, and what each group may have.

pub(crate) mod path;
pub mod psi;
pub(crate) mod settings;
pub mod tree;
