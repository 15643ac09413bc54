//! The memory controller: what processes use, what each may have, and how that is made so.

pub(crate) mod cgroup_limit;
pub mod controller;
pub mod hierarchy;
pub(crate) mod membership;
pub mod policy;
pub mod proactive;
pub mod processes;
pub(crate) mod reclaim_requests;
pub mod shared_pager;
pub(crate) mod strict;
