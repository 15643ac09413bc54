//! Thin wrappers of the system calls that swaptide uses. Most of its `unsafe` code is here; the
//! agent, the engine and the crates with shared memory have some as well.
//!
//! The crate is used inside programs that never asked for it, by threads those programs never
//! started. So everything here keeps four rules:
//!
//! 1. No call goes through libc functions that keep state: calls are made by inline assembly
//!    ([`raw`]) or by `rustix`'s own back end. Errors come back as values, `errno` is never
//!    touched.
//! 2. No thread-locals, no standard I/O, no environment, no `std` at all outside tests.
//! 3. Nothing blocks but what says so ([`lock`], [`poll`](sock::poll_readable), [`thread::sleep`]).
//! 4. Every mapping this crate makes is listed in [`mem::own_ranges`], so that the agent can tell
//!    its own memory from the program's and never adopts it.
//!
//! One module per kernel facility; each says which kernel it needs and what happens without it.
#![cfg_attr(not(test), no_std)]
#![deny(unsafe_op_in_unsafe_fn)]

extern crate alloc;

pub mod advise_each;
pub mod affinity;
pub mod elf;
pub mod engine_threads;
pub mod errno;
pub mod eventfd;
pub mod fork_filter;
pub mod helper;
pub mod high_fds;
mod ids;
pub mod lock;
pub mod mapping_calls;
pub mod maps;
pub mod mem;
pub mod new_processes;
pub mod page;
pub mod pagemap;
pub mod process;
pub mod procfs;
pub mod ptrace;
pub mod raw;
pub mod remote;
pub mod sock;
pub mod thread;
pub mod time;
pub mod uffd;
pub mod wait_set;
pub mod withdraw;

pub use errno::ErrnoName;
pub use page::{PAGE_SHIFT, PAGE_SIZE, VirtAddr, VirtRange};
pub use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
pub use rustix::io::Errno;
