//! The serial part of the work, in a build with the feature `serial-part`: how long locks are held
//! that keep every other thread waiting which serves faults. One over its time for each fault is
//! how many faults a second any number of CPUs can serve.
//!
//! Each hold counts with the time that a reading of the clock takes, some 25 ns.

use swaptide_ipc::Counter;

use crate::engine::Engine;

/// Nanoseconds for which such a lock was held so far, by any thread; how often one was taken; and
/// the faults that were answered.
pub fn serial_part(engine: &Engine) -> [u64; 3] {
    let locks = [engine.mm.held(), engine.serving.readahead.held()];
    let [ns, holds] = locks.iter().fold([0; 2], |[ns, holds], held| [ns + held.0, holds + held.1]);
    let faults = engine.slot().counted(Counter::Pgmajfault);
    [ns, holds, faults]
}
