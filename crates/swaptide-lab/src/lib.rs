//! The designs that came before swaptide's core, and the experiments that set both side by side.
//!
//! Nothing but the command line imports this crate. A baseline that is slow for a wrong reason is a
//! lie, so where a baseline could be built in two ways, the faster one was taken: look-ups in the
//! trees take no lock, tree nodes come from a pool and not from the general allocator, every
//! baseline has the same spin lock as the core. Each has its own tests.
//!
//! | module      | what it owns |
//! |-------------|--------------|
//! | command     | `swaptide lab`: arguments and output |
//! | context     | progress, and putting everything back |
//! | designs     | the swap layers that are compared, and the core behind the same interface |
//! | experiments | tables of the designs alone; they run no program |
//! | programs    | measurements of the whole of swaptide, and the programs that they run |
//! | report, plot | rows, the printed table, the SVG plot |
//! | random, measure | what experiments share: random numbers, CPU time, medians |

mod command;
mod context;
pub mod designs;
mod experiments;
mod measure;
mod plot;
mod programs;
mod random;
mod report;

pub use command::{LabArgs, main};
pub use programs::job::{JobArgs, main as job};
pub use programs::work::{LabWorkArgs, main as work};
pub use random::Random;
