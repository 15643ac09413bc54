//! The arguments of `swaptide bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use swaptide_host::units::parse_bytes;

use crate::workload::phases::PageContent;

/// Arguments of `swaptide bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// What to measure
    #[arg(value_enum)]
    pub name: Benchmark,
    /// Kernel swap to compare with; may be repeated [default, for root: kernel-zram; kernel-zswap
    /// in pressure and pool; none in sweep]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub peer: Vec<PeerArg>,
    /// Runs of each side [default: 3; 1 for sweep]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: Option<u32>,
    /// Memory budget [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub ram: Option<u64>,
    /// Budgets of a sweep, separated by commas [default:
    /// 64M,96M,128M,192M,256M,384M,512M,768M,1G]
    #[arg(long, value_name = "SIZES", value_parser = parse_bytes, value_delimiter = ',')]
    pub budgets: Vec<u64>,
    /// Compression ratio of the data with lz4: 4 to 1, 2 to 1 like a heap, or almost none; several
    /// for a sweep [default: 4; all for sweep]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub ratio: Vec<PageContent>,
    /// Data size of the workload [default: 1G; 2G for sweep, half of --ram for within]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub data: Option<u64>,
    /// Touches in a random phase [default: 60000; 20000 for sweep; all pages for again]
    #[arg(long)]
    pub touches: Option<usize>,
    /// Numbers of threads, separated by commas [default: 1,2,4,8]
    #[arg(long, value_name = "NUMBERS", value_parser = clap::value_parser!(u16).range(1..=1024),
        value_delimiter = ',')]
    pub threads: Vec<u16>,
    /// End a phase after this many seconds [default: 300; 60 for sweep]
    #[arg(long)]
    pub seconds_cap: Option<u64>,
    /// Also measure swaptide with the budget that the kernel peer has for resident pages, so that
    /// swaptide's compressed memory has to fit into it
    #[arg(long)]
    pub strict_budget: bool,
    /// Those of real.
    #[command(flatten)]
    pub real: RealArgs,
    /// Directory for the swap file of a kernel peer
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub swap_dir: PathBuf,
    /// Write the result to this file as JSON; without a file, or with -, print it instead of the
    /// table
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,
    /// Draw the result to this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Arguments of `swaptide bench real` alone.
#[derive(Debug, Clone, Args)]
pub struct RealArgs {
    /// Programs of real or density, separated by commas [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub program: Vec<String>,
    /// Directory for what real programs need; it is made once, and kept
    #[arg(long, value_name = "DIR", default_value = "/var/tmp/swaptide-real")]
    pub work_dir: PathBuf,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Benchmark {
    /// Writing new memory while older memory is swapped out
    Fill,
    /// Sequential refault
    Seq,
    /// Random refault of single pages
    Random,
    /// Random refault that repeats the order of an earlier pass
    Again,
    /// A program that fits its budget, with and without swaptide
    Within,
    /// The start of `true`, with and without swaptide
    Startup,
    /// fill, seq, random and a mixed phase with several numbers of threads
    Threads,
    /// More data than compressed memory holds: fill, seq and random during write-back to a file
    Pressure,
    /// Pages in compressed memory per page of RAM, after 10 s without a touch
    Pool,
    /// Throughput of one job at different budgets
    Sweep,
    /// A swap file alone, encrypted and with `cipher=none`
    Cipher,
    /// fork(2) with all data swapped out, and without swaptide
    Fork,
    /// Duration of a Redis background save with half of its data swapped out
    Bgsave,
    /// Real programs in a half, a third and a quarter of their memory
    Real,
    /// A build of Linux in a half and a third of its memory
    KernelBuild,
    /// How many processes that rest share a budget, and how soon each answers when it is woken
    Density,
}

/// Which kernel swap to compare with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PeerArg {
    /// Compressed RAM as the swap device
    KernelZram,
    /// A compressed cache in front of a swap file
    KernelZswap,
    /// A plain swap file
    KernelFile,
    /// swaptide alone
    None,
    /// Every kernel peer
    All,
}
