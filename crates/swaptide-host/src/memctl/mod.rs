//! The memory controller: what processes use, what each may have, and how that is made so.

pub(crate) mod cgroup_limit;
pub mod controller;
pub mod hierarchy;
mod membership;
pub mod policy;
pub(crate) mod proactive;
pub mod processes;
mod reclaim_requests;
pub(crate) mod shared_pager;
pub mod stall;
pub(crate) mod strict;
