//! The shared memory segment between a supervisor and the processes of its tree, and the words they
//! exchange on its socket.
//!
//! Owns: the layout of the segment ([`Segment`]), the life of a process slot ([`ProcSlot`]), the
//! reference counts of the swap areas' extents and the table of the areas, the charges of groups,
//! and the names of the counters. It owns no memory: the supervisor creates the memfd, all
//! processes map it.
//!
//! Invariants
//! 1. A process slot is written only by the process that claimed it (counters, state) and by the
//!    supervisor (limit, wake-up, release). Every field is an atomic; no field needs another one to
//!    be read at the same moment.
//! 2. `extent_refs[x]` is the number of process slots whose `extents` bitmap has bit `x` set, plus
//!    one while a lease or a hand-over is between the two writes. A count is raised before its bit
//!    is set and the bit is cleared before the count is lowered, so that a process that dies in
//!    between leaks an extent and never frees another's.
//! 3. A slot is released only by the supervisor, after the process is known to be gone.
//!
//! Locks: none.

mod area;
pub mod areas;
mod counters;
mod group;
pub mod groups;
mod ids;
pub mod injected;
mod layout;
mod optional_limit;
mod past_writes;
pub mod shared;
mod wire;

pub use area::{
    Area, AreaId, AreaMask, AreaState, ExportFacts, ExtentPlace, MAX_AREAS, NewArea, Spot,
    Transport,
};
pub use counters::{
    Counter, FIRST_ORDER, FaultHistogram, HISTOGRAM_BUCKETS, LAST_ORDER, OfOrder, REFAULT_BUCKETS,
    RefaultHistogram,
};
pub use group::{GroupIndex, GroupSlot, MAX_GROUPS};
pub use ids::{EXTENT_BYTES, ExtentId, MAX_EXTENTS, SlotIndex};
pub use layout::{
    AgentWords, Header, InjectionConfig, MAGIC, MAX_GROWTH_BYTES_PER_S, MAX_PROCS,
    MIN_BUDGET_BYTES, NO_LIMIT, POOL_PERCENT_ALONE, PoolConfig, ProcControl, ProcSlot, ProcState,
    ProcUsage, Segment, SegmentError, SwapInConfig, THROTTLE_PAGES, VERSION, WITHDRAW,
};
pub use optional_limit::OptionalLimit;
pub use wire::{AgentRequest, ENV_AGENT_LOG, ENV_SOCKET, INJECTING_SOCKET};
