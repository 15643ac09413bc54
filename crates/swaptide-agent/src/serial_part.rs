//! What the engine counts in a build with the feature `serial-part`, for a benchmark's program.

use swaptide_engine::serial_part;

use crate::process::engine;

/// Writes how many nanoseconds locks were held that keep every other fault server waiting, how
/// often they were taken, and how many faults were answered: zeros while nothing is managed.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn swaptide_serial_part(counts: &mut [u64; 3]) {
    *counts = engine().map_or([0; 3], serial_part);
}
