//! What the tests of the budget share.

use crate::memctl::policy::{Process, Standing};

pub const MIB: u64 = 1 << 20;

/// A process of the root group; all sizes in MiB, the pressure in MiB a second.
pub fn process(standing: Standing, used: u64, pressure: u64, limit: u64) -> Process {
    Process {
        group: 0,
        standing,
        used: used * MIB,
        pressure: pressure * MIB,
        fixed: 0,
        swapped: 4096 * MIB,
        limit: limit * MIB,
        growth: 0,
        engine_goes_first: true,
        kept: 0,
        workingset: 0,
    }
}
