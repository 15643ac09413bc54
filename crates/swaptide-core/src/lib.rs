//! The swap layer itself: swap entries, clusters, the swap table, the swap cache, the slot
//! allocator.
//!
//! A device's slots are grouped in clusters of 512. Each cluster in use has a table of 512 atomic
//! words; a word says all about its slot: free, in the swap cache (which folio), swapped out (which
//! shadow), bad, and count, zero flag and group. That table is the swap cache, the swap map and the
//! zero map in one. All tables of a device have their places in one range of addresses, so looking
//! up an entry takes no lock and one load, at the slot's number. Changing words takes the cluster's
//! lock and tells what is expected; what is found instead comes back as [`Mismatch`].
//!
//! The crate does no I/O, no system call, starts no thread and knows no clock: the engine above it
//! does, and the crate can be model-checked, fuzzed and measured alone. All unsafe code is in one
//! module, `sync`.
//!
//! No fallback, and full tables. A run of slots is hard to find only where slots are places. Here a
//! slot is a name: every store of swaptide maps slots to places itself. So a device gets more names
//! than places ([`SwapDevice::with_limit`]), and aligned runs stay easy to find however the small
//! folios lie. What that costs is tables that are not full, 12 bytes a used slot where single pages
//! tear 64K folios; [`SwapDevice::compact`] wins it back in the background by giving pages of
//! sparse clusters other names, about 8.3 bytes. It was chosen over moving slots to make room for a
//! run because no allocation ever waits for it, over a table of places next to the names because
//! the stores have that table anyway (it is where a slot's data lies), and because renaming copies
//! nothing.
//!
//! The rules are those of Linux as docs/linux-swap.md states them; each module names the sections
//! that it follows.
//!
//! | module   | what it owns |
//! |----------|--------------|
//! | ids      | the identifiers |
//! | entry    | the word: its layout and its states |
//! | table    | tables: their places and their memory |
//! | cluster  | a cluster's record, overflowing counts |
//! | lists    | free, nonfull, frag, full and discard lists |
//! | per_cpu  | what each CPU has for itself: its place, slots counted in advance |
//! | alloc    | the search for free slots |
//! | exchange | every change of a slot in use |
//! | reclaim  | winning back slots that only the swap cache holds |
//! | moving   | compaction, swapoff |
//! | device   | one device: counters, look-up, discard |
//! | space    | several devices: priority, rotation, masks |
//! | tiers    | ranges of priorities by name, masks of them |
//! | gate     | many threads inside at a time, or one that has it closed |
//! | sync     | spin lock, lazily published memory, the tables' range of addresses |

#![deny(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod alloc;
mod cluster;
mod device;
mod entry;
mod error;
mod exchange;
mod gate;
mod ids;
mod lists;
mod moving;
mod per_cpu;
mod reclaim;
mod space;
mod sync;
mod table;
mod tiers;

pub use device::{FreeNotify, Kind, SearchOrder, SwapDevice, Usage};
pub use entry::{SlotContent, SlotInfo};
pub use error::{AllocError, Expect, Expected, Mismatch};
pub use exchange::ZeroMask;
pub use gate::{Closed, Inside, SharedGate};
pub use ids::{
    CLUSTER_SHIFT, ClusterIndex, CpuId, FolioId, GroupId, MAX_SLOTS, ORDERS, Order,
    SLOTS_PER_CLUSTER, SWAP_TYPES, Shadow, SwapEntry, SwapOffset, SwapType,
};
pub use moving::{Compacted, Move, Mover};
pub use reclaim::CacheReclaim;
pub use space::{SpaceError, SwapSpace, TypeMask};
#[cfg(not(loom))]
pub use sync::{SpinGuard, SpinLock, TableMemory, lock_waits, set_yield};
pub use table::TableDiscard;
pub use tiers::{
    Applied, MAX_TIER_NAME, MAX_TIERS, Priority, Rule, TierError, TierIndex, TierMask, TierView,
    Tiers,
};
