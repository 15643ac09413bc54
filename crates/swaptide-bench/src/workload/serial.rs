//! The serial part: how long locks were held that keep every other fault server waiting.
//!
//! The agent counts it in a build with its feature `serial-part` (docs/testing.md), and has a
//! function for this program then. Without it there is nothing to be found here.

use std::ffi::CStr;

use serde::{Deserialize, Serialize};

/// The function of the agent: writes nanoseconds, holds and faults since the process was engaged.
const SYMBOL: &CStr = c"swaptide_serial_part";

/// Counts since the process was engaged, or of one phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialPart {
    /// Nanoseconds for which such a lock was held, by any thread.
    pub ns: u64,
    /// How often one was taken.
    pub holds: u64,
    /// Faults that were answered.
    pub faults: u64,
}

impl SerialPart {
    /// What the agent has counted; `None` where it does not count, or is not there.
    pub(crate) fn so_far() -> Option<SerialPart> {
        // SAFETY: a look for a name.
        let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, SYMBOL.as_ptr()) };
        if function.is_null() {
            return None;
        }
        // SAFETY: the agent's function of that name, which is declared so.
        let function =
            unsafe { std::mem::transmute::<*mut _, extern "C" fn(&mut [u64; 3])>(function) };
        let mut counts = [0; 3];
        function(&mut counts);
        let [ns, holds, faults] = counts;
        Some(SerialPart { ns, holds, faults })
    }

    /// What was counted since `then`.
    pub(crate) fn since(self, then: SerialPart) -> SerialPart {
        SerialPart {
            ns: self.ns.saturating_sub(then.ns),
            holds: self.holds.saturating_sub(then.holds),
            faults: self.faults.saturating_sub(then.faults),
        }
    }

    /// Nanoseconds for each of `n`.
    pub(crate) fn ns_for_each(&self, n: u64) -> f64 {
        self.ns as f64 / n.max(1) as f64
    }

    /// Faults a second that any number of CPUs could serve at most.
    pub(crate) fn most_faults_per_s(&self) -> f64 {
        1e9 / self.ns_for_each(self.faults).max(1e-3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_has_what_came_since_the_one_before() {
        let then = SerialPart { ns: 1000, holds: 10, faults: 2 };
        let now = SerialPart { ns: 6000, holds: 40, faults: 12 };
        let phase = now.since(then);
        assert_eq!(phase, SerialPart { ns: 5000, holds: 30, faults: 10 });
        assert_eq!((phase.ns_for_each(phase.faults), phase.most_faults_per_s()), (500.0, 2e6));
        assert_eq!(SerialPart::default().ns_for_each(0), 0.0);
    }

    #[test]
    fn a_program_without_the_agent_counts_nothing() {
        assert_eq!(SerialPart::so_far(), None);
    }
}
