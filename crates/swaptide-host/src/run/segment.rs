//! The header of a fresh segment, of a run or of the daemon.
//!
//! Owns what stands in it from the start, the settings of tests among it. Locks: none.

use std::io;
use std::sync::atomic::Ordering::{Relaxed, Release};

use swaptide_ipc::{MAGIC, POOL_PERCENT_ALONE, Segment, VERSION};

use crate::run::doctor::{self, Forks};
use crate::swap::spec::RunSwapSpace;

/// The most processes managed at a time: for tests of what the others do.
const ENV_SLOTS: &str = "SWAPTIDE_TEST_SLOTS";
/// Test hook: treats every Nth large swap-in as stale.
const ENV_STALE: &str = "SWAPTIDE_TEST_STALE";
/// Test hook: ends every Nth large fill half way.
const ENV_PART: &str = "SWAPTIDE_TEST_PART";
/// Test hook: every Nth transfer of the first swap area fails.
const ENV_IO_FAULTS: &str = "SWAPTIDE_TEST_IO_FAULTS";
/// The failure to inject, for tests: in engines, and in the supervisor.
const ENV_FAIL: &str = "SWAPTIDE_TEST_FAIL";
/// The share of a process's limit that compressed memory may take where a file stands behind it, in
/// percent.
const POOL_PERCENT: u32 = 60;

fn test_setting(name: &str) -> Option<u32> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Returns the failure that a test injects by the environment; 0 for none. The supervisor goes by
/// this alone: the segment's word is for engines, and any process of the run can write it.
pub(crate) fn wanted_failure() -> u32 {
    test_setting(ENV_FAIL).unwrap_or(0)
}

/// This process's pid namespace; 0 where it is not known.
fn own_namespace() -> u64 {
    rustix::fs::stat(c"/proc/self/ns/pid").map_or(0, |stat| stat.st_ino)
}

/// True if processes of this namespace are who their numbers in the segment say; also where that is
/// not known.
pub(crate) fn is_in_namespace_of(segment: &Segment) -> bool {
    let (theirs, ours) = (segment.header.pid_namespace.load(Relaxed), own_namespace());
    theirs == ours || theirs == 0 || ours == 0
}

/// Writes what stands fixed into a fresh segment, which is one from then on.
pub(crate) fn set_up_header(
    segment: &Segment,
    budget: u64,
    space: &RunSwapSpace,
) -> io::Result<()> {
    let header = &segment.header;
    header.version.store(VERSION, Relaxed);
    header.budget_bytes.store(budget, Relaxed);
    header.pool.cap_bytes.store(space.pool_cap, Relaxed);
    header.pool.codec.store(space.codec.number(), Relaxed);
    space.acceptance.store(segment);
    header.pid_namespace.store(own_namespace(), Relaxed);
    header.injection.slots_max.store(test_setting(ENV_SLOTS).unwrap_or(0), Relaxed);
    header.injection.stale_every.store(test_setting(ENV_STALE).unwrap_or(0), Relaxed);
    header.injection.part_every.store(test_setting(ENV_PART).unwrap_or(0), Relaxed);
    header.injection.io_fault_every.store(test_setting(ENV_IO_FAULTS).unwrap_or(0), Relaxed);
    header.injection.fail.store(wanted_failure(), Relaxed);
    let followed = doctor::forks().map_err(io::Error::other)? == Forks::Followed;
    header.followed_forks.store(followed.into(), Relaxed);
    header
        .pool
        .percent
        .store(if !space.devices.is_empty() { POOL_PERCENT } else { POOL_PERCENT_ALONE }, Relaxed);
    let mut key = [0u8; 32];
    rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
    for (word, bytes) in header.key.iter().zip(key.chunks_exact(8)) {
        word.store(bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)), Relaxed);
    }
    // Pairs with the acquire of Segment::open: a reader of the magic word sees all that is before
    // it.
    header.magic.store(MAGIC, Release);
    Ok(())
}
