//! The pager: it keeps a program's memory within a limit, moving cold pages out of it and bringing
//! them back when they are touched.
//!
//! One engine lives in each managed process. Its threads are made with raw clones and touch nothing
//! of the program's own memory, which they might find swapped out:
//! - the **handler** ([`event_loop`]) reads the program's userfaultfd: faults
//!   ([`fault`]), changes of mappings ([`events`](crate::events::apply)), forks ([`fork`]) and the
//!   requests of other threads ([`requests`]). It alone adopts memory
//!   ([`adopt`](crate::vma::adopt)).
//! - **fault servers** ([`fault_server`]) answer faults next to it while several threads fault,
//!   if that pays.
//! - one or more **workers** ([`reclaim`]) move cold chunks to staging frames, compress them and
//!   hand out the frames; worker 0 also looks after the accounts and moves the oldest compressed
//!   pages to a swap area ([`writeback`](crate::reclaim::writeback)).
//!
//! # A fault, in a minute
//! [`event_loop::Handler::run`] reads the message, [`fault`] finds the page's word
//! ([`page_table`](crate::mm::page_table)): empty pages are grown, swapped ones are
//! loaded from their slot ([`devices`](crate::backing::devices)) into a buffer or into staging
//! frames ([`staging`](crate::mm::staging)), moved or copied in, and the thread is woken last.
//!
//! # Invariants
//! 1. A page's data is in one of three places: the program (word `Present`), a worker's staging
//!    frame (swap entry whose slot holds a folio) or a device (swap entry whose slot holds a
//!    shadow). It leaves a place only after it is in the next one.
//! 2. Only the handler and fault servers fill pages; only workers, and those in their stead, take
//!    pages out.
//! 3. Engine threads never touch the program's memory, never allocate from its heap and hold no
//!    lock while they wait for an event.
//! 4. Whatever cannot be brought back is poisoned and counted, or the process ends with a message.
//!    Nothing becomes zeros.
//!
//! # Locks
//! `Engine::mm` guards the page table, regions, staging frames and queues. A worker compresses and
//! writes without any lock. `ARCHITECTURE.md` has the order of all locks.

// The module docs lead a reader into the code, private parts too.
#![allow(rustdoc::private_intra_doc_links)]

pub mod backing;
mod detach;
mod engine;
pub mod event_loop;
pub mod events;
mod fault;
pub mod fault_injection;
mod fault_server;
pub mod fork;
mod fork_hold;
pub mod memcg;
pub mod mm;
mod pager;
pub mod readahead;
pub mod reclaim;
pub mod requests;
pub mod scaling;
pub mod sched;
#[cfg(feature = "serial-part")]
mod serial_part;
mod swap_in_all;
pub mod vma;

pub use engine::{Engine, Mm, Start};
pub use fault_server::serve_faults;
pub use mm::references::References;
#[cfg(feature = "serial-part")]
pub use serial_part::serial_part;

use swaptide_sys::Errno;
use swaptide_sys::uffd::OpenError;

/// Why memory cannot be managed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A userfaultfd was refused.
    #[error("{0}; `swaptide doctor` shows what is missing")]
    Open(OpenError),
    /// A mapping or a registration was refused.
    #[error(
        "{0}: {errno}; raise the limit on address space or vm.max_map_count",
        errno = swaptide_sys::ErrnoName(*.1)
    )]
    Memory(&'static str, Errno),
    /// A device could not be made.
    #[error("{0}; raise the limit on address space")]
    Devices(&'static str),
}

/// Ends the process with a message: a check failed, and going on could hand out a wrong page.
fn fatal(message: &str) -> ! {
    swaptide_sys::thread::abort_with(&[
        b"swaptide: ",
        message.as_bytes(),
        b"; the process is stopped rather than given wrong data",
    ])
}
