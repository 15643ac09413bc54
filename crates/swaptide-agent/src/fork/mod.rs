//! Forks: libc's handlers in the parent, the handler of the child, and the start of a child for
//! which the kernel sends no event.

pub(crate) mod atfork;
pub(crate) mod child;
mod trampoline;
