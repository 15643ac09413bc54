//! Limits that may be left out.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// A limit in a word that begins as zero: one more than the limit (0: there is none).
#[repr(transparent)]
pub struct OptionalLimit<W>(W);

macro_rules! optional_limit {
    ($word:ty, $value:ty) => {
        impl OptionalLimit<$word> {
            /// The limit.
            pub fn get(&self) -> Option<$value> {
                self.0.load(Relaxed).checked_sub(1)
            }

            /// Sets it. The highest number counts as the one below it.
            pub fn set(&self, limit: Option<$value>) {
                self.0.store(limit.map_or(0, |limit| limit.saturating_add(1)), Relaxed);
            }
        }
    };
}

optional_limit!(AtomicU32, u32);
optional_limit!(AtomicU64, u64);
