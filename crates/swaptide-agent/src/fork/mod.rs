//! fork where the kernel sends no event for it.

pub(crate) mod trampoline;
