//! `swaptide bench`: swaptide compared with the kernel's own swap, in one call.
//!
//! | module | owns |
//! |--------|------|
//! | command, args | the command line: which benchmark, which peers, where the result goes |
//! | session | the runs of both sides in turns, with equal memory |
//! | benchmarks | one function per benchmark |
//! | output | where a result goes |
//! | progress | which step of how many, and what is left, on a terminal |
//! | run | one run of the workload: plain, under the kernel's swap, under swaptide |
//! | workload | the measured program, started as `swaptide bench-work` |
//! | real | real programs: what they are, what they need, one run of one |
//! | peers | zram, zswap and swap files of the kernel; restoring the machine |
//! | report | medians and ratios, as table, JSON and SVG |
//!
//! `swaptide-lab` uses the workload's page contents, the reader of a workload's output, progress,
//! and what puts the machine back.

mod args;
mod benchmarks;
mod command;
mod output;
mod peers;
mod progress;
mod real;
mod report;
mod run;
mod session;
mod workload;

pub use args::{BenchArgs, Benchmark, PeerArg};
pub use command::main;
pub use output::{is_stdout, print_titled};
pub use peers::restore::{Restorer, RunningChild, Undo, UndoScope};
pub use progress::StepProgress;
pub use run::{Lines, Next};
pub use workload::phases::{PAGE, PageContent, Phase, scatter};
pub use workload::program::{BenchWorkArgs, main as work};
