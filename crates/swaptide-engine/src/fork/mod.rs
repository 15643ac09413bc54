//! fork: a child that serves itself from its own copy of everything.
//!
//! The engine's memory is private, so that a forked child has a copy of the page table, the swap
//! table, the compressed pool. What it lacks are threads, descriptors and its own userfaultfd,
//! which the kernel hands to the parent's handler. The hand-over:
//!
//! | forking thread (parent) | parent's handler | child |
//! |---|---|---|
//! | makes a pair of sockets, requests `ForkPrepare`, waits | takes one of them (or has it brought), parks the workers, gives free frames back: **prepared** | |
//! | runs fork(2); its own faults are served | holds the faults and notes the events of all other threads | |
//! | | reads the fork event: **handing over**; holds every fault of the parent | may fault in libc's own code: the parent's handler copies the page in |
//! | requests `ForkDone`, waits | waits | starts its handler, which says its process slot through the other socket |
//! | | makes the slot a holder of every extent, sends userfaultfd and swap areas, the pages copied, the events noted | takes over, says so, continues |
//! | continues | applies the events, answers the faults: **none** | |
//!
//! A child that cannot take over (no slot is free, it has no thread, its process-id namespace is
//! another, ...) says that instead, before or after it was sent what it needs. Then the parent's
//! handler copies every swapped page to it, and it continues without an engine.
//!
//! No process waits for another one without a bound: a child that says nothing for a while gets its
//! pages in the same way ([`handoff`]), and where neither can be had the child is ended.
//!
//! Where the kernel does not report forks (that takes `CAP_SYS_PTRACE`), the supervisor follows the
//! forking thread instead (ptrace), and the child's first steps are the engine's: it makes its own
//! userfaultfd and sends it to the parent's handler, which continues as if the kernel had. Until
//! that is done the forking thread is stopped in its fork. [`dontfork`](crate::mm::dontfork) and
//! [`child_uffd`] have the details.
//!
//! The modules:
//!
//! | module | what |
//! |---|---|
//! | [`dontfork`](crate::mm::dontfork) | without fork events: no fork but one that is followed copies managed memory |
//! | [`child_uffd`] | without fork events: how the parent's handler comes by the child's userfaultfd |
//! | [`fork_control`](crate::requests::fork_control) | what the forking thread, the handler and the child share: phase and sockets |
//! | [`prepare`] | the parent's handler from the request to the fork event, and from the hand-over on |
//! | [`help`] | what other threads get from it meanwhile |
//! | [`handoff`] | the parent's handler while the child does not serve itself |
//! | [`brought`](crate::events::brought) | pages that came in meanwhile, where forks are followed |
//! | [`child`] | the child |
//! | [`populate`] | copying pages to a process that has none of its own: all of them, or those it asks for |
//! | [`layout`] | where the child has what the parent's table knows, when other threads changed mappings at the moment of the fork |
//! | [`protocol`] | what goes over the socket |
//!
//! Invariants
//! 1. From *prepared* to the hand-over nothing in the engine's memory changes but by the forking
//!    thread's own faults, while it waits for them and so cannot be inside fork(2): the child's
//!    copy is of one moment, and equals the parent's until the hand-over.
//! 2. No staging frame is full and no folio is in the swap cache at that moment: frames need not be
//!    shared.
//! 3. Extents of the swap areas are frozen before the fork: neither process writes or frees a byte
//!    of them until one holder is left.
//! 4. A child that does not come through the hook (a raw clone) gets every swapped page copied in
//!    and its userfaultfd closed, and so does what it forks before that is done.
//! 5. After a fork event nothing is applied to the table, and no page goes to the child, before
//!    every change of mappings that the child may have was read; and what goes to the child goes
//!    where the child has it ([`layout`]).
//!
//! 6. Without fork events no child has managed memory but one whose first steps were the engine's.
//!
//! Locks: the memory lock, for one check or one page at a time. None is held while a child or the
//! kernel is waited for.

mod allow_fork;
pub mod child;
pub mod child_uffd;
mod handoff;
mod help;
pub mod layout;
mod populate;
mod prepare;
mod protocol;

pub use child::ForkHandoff;
pub(crate) use child::inherited;
pub(crate) use prepare::{ForkServer, resume_workers};
pub use protocol::Decline;
