//! What all experiments are given: how progress is shown, and how everything is put back.

use swaptide_bench::{Restorer, StepProgress};

/// One call of `swaptide lab`.
pub(crate) struct Lab {
    /// Ends what was started and removes what was made, at a signal too.
    pub restorer: Restorer,
    /// Which step it is, and the time that is left.
    pub progress: StepProgress,
}

impl Lab {
    /// Nothing is shown, and signals are not watched.
    #[cfg(test)]
    pub(crate) fn quiet() -> Lab {
        Lab { restorer: Restorer::here(), progress: StepProgress::hidden() }
    }
}
