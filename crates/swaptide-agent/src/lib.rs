//! The preloaded library: it waits until the supervisor asks, then puts the program's memory under
//! management.
//!
//! | module | owns |
//! |---|---|
//! | [`constructor`] | the first code that runs in a program that has loaded it |
//! | [`injected`] | the same where the supervisor has put it into the program; threads' words |
//! | [`lifecycle`], [`threads`] | the thread that waits and becomes the handler; the other threads |
//! | [`withdrawal`] | the end of it all in a program that lives on |
//! | [`process`] | the engine, the segment, the slot, and requests to the supervisor |
//! | [`fork`], [`forking`] | libc's fork handlers, and the start of a child; which thread forks |
//! | [`hooks`] | the functions that stand in front of libc's |
//! | [`pages`] | pages that must stay, and ranges that are not managed |
//! | [`shmem`] | hooks of shared memory |
//! | [`real`] | the functions of libc itself |
//! | [`libc_names`] | functions under names of libc's that only this library sees |
//! | [`allocator`] | the allocator of everything swaptide does inside a program |
//!
//! Invariants
//! 1. While the program fits, there is one sleeping thread and nothing else: nothing is registered,
//!    read or counted.
//! 2. The program's threads take one lock of swaptide's ([`process::FORK_LOCK`], around forks
//!    and where a hook detaches the program) and allocate nothing of it: a fork finds every other
//!    lock free.
//! 3. The thread has a descriptor table of its own, so that a program that closes every descriptor
//!    closes none of swaptide's, and swaptide keeps none of the program's open.

// Everything here is private: its documentation is for its developers.
#![allow(rustdoc::private_intra_doc_links)]
// A test build exports nothing to a program, so most of it has no caller.
#![cfg_attr(test, allow(dead_code, unused_imports))]

mod allocator;
mod constructor;
mod engage_gate;
mod environment;
mod exit_watch;
mod fork;
mod forking;
mod hooks;
mod injected;
mod libc_names;
mod lifecycle;
mod log;
mod marks;
mod own_pid;
mod pages;
mod past_libc;
mod probe;
mod process;
mod real;
mod seccomp;
#[cfg(feature = "serial-part")]
mod serial_part;
mod shmem;
mod starting;
mod threads;
mod withdrawal;
