//! The supervisor of a run: one program, the processes it starts, and the memory they share.
//!
//! Owns everything about `swaptide run` that is not the command line: what a budget and a device
//! are, which programs can be run, which processes belong to the tree, how much each gets, what is
//! told at the end. The processes themselves swap; the supervisor only counts, sets limits, and
//! hands out the segment and the swap file. When it is killed, they continue with the limits they
//! have.
//!
//! | module | owns |
//! |---|---|
//! | [`units`] | sizes as people write them |
//! | [`target`](crate::run::target) | the program, and why some cannot be run |
//! | [`spec`](crate::swap::spec) | `--swap`, and the files and block devices behind it |
//! | [`areas`](crate::swap::areas) | the swap areas of a run, added and taken away |
//! | `circular` | areas that a process of the run serves itself |
//! | `claims` | exports that a process of this machine swaps to |
//! | [`nbd`] | exports of NBD servers: URLs, negotiation, TLS |
//! | [`policy`](crate::memctl::policy) | the policy: which processes to manage, how much each gets (pure) |
//! | [`tree`](crate::cgroup::tree) | tiers, groups, their settings and what they have |
//! | [`config`] | the configuration file |
//! | `container_labels` | the names of the container that a run is in |
//! | [`hierarchy`](crate::memctl::hierarchy) | a budget over a hierarchy of groups (pure) |
//! | [`processes`](crate::memctl::processes) | the living processes and what they use |
//! | [`controller`](crate::memctl::controller) | the thread that carries the policy out |
//! | [`agent_api`](crate::control::agent_api) | where processes ask for the segment |
//! | [`peer`](crate::control::peer) | the peer there, as the kernel reports it |
//! | `shared_pager` | the pager of shared memory |
//! | `capability` | acting without a right that this process has |
//! | [`signals`] | signals and children as descriptors |
//! | [`control`] | where the run's owner asks for its state |
//! | [`daemon`] | one supervisor for the runs of a host |
//! | [`oci`] | containers that run under a budget by an annotation |
//! | [`supervise`](crate::run::supervise) | the two processes of a supervisor, and the order of things |
//! | `inject` | programs that load no library: the agent is put into them |
//! | [`report`] | totals, JSON, summary |
//! | [`doctor`](crate::run::doctor) | what this machine allows |
//!
//! Locks: none; threads talk through channels, processes through the segment's atomics and a
//! socket.

mod capability;
pub mod cgroup;
mod client_conn;
pub mod config;
mod container_labels;
pub mod control;
pub mod daemon;
mod inject;
pub mod memctl;
pub mod nbd;
pub mod oci;
pub mod report;
pub mod run;
pub mod signals;
pub mod swap;
#[cfg(test)]
mod testing;
pub mod units;
