//! The supervisor of a run: one program, the processes it starts, and the memory they share.
//!
//! Owns everything about `swaptide run` that is not the command line: what a budget and a device
//! are, which programs can be run, who belongs to the tree, who gets how much, what is told at the
//! end. The processes themselves swap; the supervisor only counts, sets limits, and hands out the
//! segment and the swap file. When it is killed, they go on with the limits they have.
//!
//! | module | owns |
//! |---|---|
//! | [`size`] | sizes as people write them |
//! | [`target`] | the program, and why some cannot be run |
//! | [`device`] | `--swap`, and the files and block devices behind it |
//! | [`areas`] | the swap areas of a run, added and taken away |
//! | [`circular`] | areas that a process of the run serves itself |
//! | [`nbd`] | exports of NBD servers: URLs, negotiation, TLS |
//! | [`budget`] | the policy: whom to manage, who gets how much (pure) |
//! | [`groups`] | tiers, groups, their settings and what they have |
//! | [`config`] | the configuration file |
//! | [`division`] | a budget over a hierarchy of groups (pure) |
//! | [`tree`] | the living processes and what they use |
//! | [`keeper`] | the thread that carries the policy out |
//! | [`socket`] | where processes ask for the segment |
//! | [`peer`] | who asks there, by the kernel's word |
//! | [`shared`] | the pager of shared memory |
//! | [`signals`] | signals and children as descriptors |
//! | [`control`] | where the run's owner asks what goes on |
//! | [`daemon`] | one supervisor for the runs of a host |
//! | [`supervise`] | the two processes of a supervisor, and the order of things |
//! | [`report`] | totals, JSON, summary |
//! | [`doctor`] | what this machine allows |
//!
//! Locks: none; threads talk through channels, processes through the segment's atomics and a
//! socket.

pub mod areas;
pub mod budget;
pub mod circular;
pub mod config;
pub mod control;
pub mod daemon;
pub mod device;
pub mod division;
pub mod doctor;
pub mod ending;
pub mod followed;
pub mod groups;
mod holds;
pub mod keeper;
pub mod mirror;
pub mod nbd;
pub mod peer;
pub mod pressure;
pub mod report;
mod rotational;
pub mod shared;
pub mod signals;
pub mod size;
pub mod socket;
pub mod supervise;
pub mod target;
#[cfg(test)]
mod testing;
pub mod tree;
pub mod watch;
