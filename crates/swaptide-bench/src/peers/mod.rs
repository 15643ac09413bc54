//! The kernel's own swap as the other side, and putting the machine back afterwards.

pub(crate) mod cgroup;
pub(crate) mod kernel;
pub(crate) mod restore;
