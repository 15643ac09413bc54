//! When a program makes no progress within its limit.
//!
//! What is locked or pinned, or could not be adopted, stays resident and counts. Where that alone
//! reaches the limit, whatever else comes in goes out at once, before the instruction that asked
//! for it has its second operand: the program makes no progress though it runs. It is seen by how
//! soon pages come back: after fewer others than any program needs at hand. Then it gets a little
//! more than its limit ([`crate::memcg::charge::Charge::grant_grace`]), step by step until that
//! ends, and gives it back as time goes by.
//!
//! Owns: how many of the last refaults were such ones. Locks: none; the memory lock guards it.

/// A page that comes back when no more pages than these went out since was not to be spared.
const MAX_REFAULT_DISTANCE_PAGES: u64 = 128;
/// The number of refaults of this kind in 1024 (smoothed) from which on a program makes no
/// progress.
const THRASHING_SCORE: u32 = 896;
/// The score after a step, so that the next step waits for the effect of this one.
const SCORE_AFTER_STEP_1024: u32 = 768;

/// Finds from refaults that the program makes no progress within its limit.
#[derive(Default, Debug)]
pub struct ThrashDetector {
    soon: u32,
}

impl ThrashDetector {
    /// A page came back after `distance` others went out; `None` if it was still on its way. True
    /// when a step is due.
    pub(crate) fn came_back(&mut self, distance: Option<u64>) -> bool {
        let now = if distance.is_none_or(|distance| distance < MAX_REFAULT_DISTANCE_PAGES) {
            1024
        } else {
            0
        };
        self.soon = (self.soon * 63 + now) / 64;
        if self.soon < THRASHING_SCORE {
            return false;
        }
        self.soon = SCORE_AFTER_STEP_1024;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thrashing_needs_immediate_refaults_of_everything() {
        let mut detector = ThrashDetector::default();
        // Three of four at once, and one later: hot pages that a scan pushes out.
        assert!(
            !(0..10_000u64).any(|k| detector.came_back((k % 4 != 0).then_some(20).or(Some(5000))))
        );
        let steps = (0..1000).filter(|_| detector.came_back(Some(20))).count();
        assert!((5..40).contains(&steps), "{steps} steps");
        assert!((0..1000).any(|_| detector.came_back(None)));
    }
}
