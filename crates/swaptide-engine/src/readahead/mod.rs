//! How much comes in for one fault: what the faults so far say of the next ones.

pub(crate) mod hints;
pub(crate) mod history;
pub mod locality;
pub mod policy;
mod sampling;

use crate::readahead::hints::ReadingHints;
use crate::readahead::history::TemporalPrefetcher;
use crate::readahead::locality::Locality;

/// The predictions that all threads that serve faults share. Its lock comes before the memory lock
/// and is held for a question or an answer.
pub(crate) struct Readahead {
    pub(crate) locality: Locality,
    pub(crate) prefetcher: TemporalPrefetcher,
    pub(crate) hints: ReadingHints,
}

impl Readahead {
    /// Nothing is known.
    pub(crate) fn new() -> Readahead {
        Readahead {
            locality: Locality::new(),
            prefetcher: TemporalPrefetcher::new(),
            hints: ReadingHints::default(),
        }
    }
}
