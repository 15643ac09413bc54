//! Memory that several processes map shared, swapped by a pager outside of them.
//!
//! A *region* is a memory file. Every process that maps it registers its mappings with a
//! userfaultfd of its own, which it hands to the pager. The pager takes pages out by punching holes
//! into the file and serves touches of a hole. `swaptide run` has one pager, in its supervisor; a
//! virtual machine monitor can have its own ([`SharedRegion`], [`Host`]).
//!
//! | module | owns |
//! |---|---|
//! | [`region`] | where each page of a region is |
//! | [`space`] | an address space: its userfaultfd, its mappings, its guard |
//! | [`store`] | compressed memory and the swap file |
//! | `state` | all of them together |
//! | [`pager`] | its threads; requests |
//! | `fault` | answers to faults and events |
//! | `loading` | loads that are under way |
//! | `swap_in` | bringing pages back |
//! | `advice` | what programs ask for by advice |
//! | `shortage` | reads and writes that fail for want of memory or descriptors |
//! | [`reclaim`] | making room; why no write is lost |
//! | `pinned` | writers past page tables |
//! | [`handle`] | the interface for programs that know what they do |
//!
//! Invariants
//! 1. A page of a region is in the memory file or in the store, and leaves one only when it is in
//!    the other.
//! 2. A page goes out only while all mappings of its region are known and write-protected since
//!    before it was read.
//! 3. Nothing is out that a process maps which has no guard.
//! 4. The last mapping's end frees everything.
//!
//! The pager's threads touch no region by address.

mod advice;
mod fault;
pub mod handle;
mod huge_pages;
mod living;
mod loading;
pub mod pager;
mod pinned;
pub mod reclaim;
pub mod region;
mod shortage;
pub mod space;
mod state;
pub mod store;
mod swap_in;

pub use handle::{Host, SharedRegion};
pub use pager::{PagerSettings, PagerStats, SharedMemoryPager};
pub use state::MAX_REGION_BYTES;
