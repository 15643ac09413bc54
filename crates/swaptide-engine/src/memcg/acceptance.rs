//! Whether compressed memory takes a page: zswap's `max_pool_percent` and
//! `accept_threshold_percent`.
//!
//! Without a threshold compressed memory always takes what comes, and its oldest pages are written
//! back for it: the order of age is kept. With one it takes nothing more once it has reached its
//! bound, until it has fallen below the threshold: what is refused goes to the swap areas as it is
//! packed, the oldest pages are written back meanwhile, and no thread waits for that. What it costs
//! is that for a while the areas get what was used last.
//!
//! Owns: the two figures, and whether the bound was reached.
//!
//! Locks: none. Several threads may ask at once; each answer is one that was right a moment ago.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The threshold where only a percentage of the limit was given.
const USUAL_THRESHOLD: u32 = 90;

/// zswap's two bounds, and whether compressed memory takes a page under them.
pub struct Acceptance {
    /// 0: no bound by percentage.
    max_percent: u32,
    /// 0: everything is taken.
    threshold_percent: u32,
    full: AtomicBool,
}

/// The answer of compressed memory to a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Compressed memory takes the page.
    Takes,
    /// Compressed memory is at its bound.
    AtLimit,
    /// It was, and is not below its threshold yet.
    NotYet,
}

impl Acceptance {
    /// From the words of a segment's header, 0 where nothing was said.
    pub const fn new(max_percent: u32, threshold_percent: u32) -> Acceptance {
        let threshold_percent = if max_percent != 0 && threshold_percent == 0 {
            USUAL_THRESHOLD
        } else {
            threshold_percent
        };
        Acceptance { max_percent, threshold_percent, full: AtomicBool::new(false) }
    }

    /// The bound that the percentage sets for a limit; `u64::MAX` where there is none.
    pub fn bound(&self, limit: u64) -> u64 {
        match self.max_percent {
            0 => u64::MAX,
            percent => percent_of(limit, percent),
        }
    }

    /// Returns the answer to a page when compressed memory has `pool` bytes and may have `bound`.
    pub fn ask(&self, pool: u64, bound: u64) -> Verdict {
        if self.threshold_percent == 0 || bound == u64::MAX {
            return Verdict::Takes;
        }
        if pool >= bound {
            self.full.store(true, Relaxed);
            return Verdict::AtLimit;
        }
        if !self.is_full() {
            return Verdict::Takes;
        }
        if pool <= self.threshold(bound) {
            self.full.store(false, Relaxed);
            return Verdict::Takes;
        }
        Verdict::NotYet
    }

    /// The bound was reached, and no page has been taken since.
    pub fn is_full(&self) -> bool {
        self.full.load(Relaxed)
    }

    /// Bytes at which pages are taken again.
    pub fn threshold(&self, bound: u64) -> u64 {
        match self.threshold_percent {
            0 => bound,
            percent => percent_of(bound, percent),
        }
    }
}

fn percent_of(bytes: u64, percent: u32) -> u64 {
    (u128::from(bytes) * u128::from(percent.min(100)) / 100) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_pool_accepts_nothing_above_the_threshold() {
        let acceptance = Acceptance::new(20, 50);
        let bound = acceptance.bound(1000);
        assert_eq!(bound, 200);
        let answers = [0, 199, 200, 199, 150, 101, 100, 150, 199, 230, 101, 99]
            .map(|pool| acceptance.ask(pool, bound));
        use Verdict::{AtLimit, NotYet, Takes};
        let expected = [
            Takes, Takes, AtLimit, NotYet, NotYet, NotYet, Takes, Takes, Takes, AtLimit, NotYet,
            Takes,
        ];
        assert_eq!(answers, expected);
    }

    #[test]
    fn without_a_threshold_or_a_bound_everything_is_taken() {
        let always = Acceptance::new(0, 0);
        assert_eq!(
            (always.ask(1 << 40, 1 << 20), always.is_full(), always.bound(1 << 30)),
            (Verdict::Takes, false, u64::MAX)
        );
        let unbounded = Acceptance::new(0, 80);
        assert_eq!(unbounded.ask(1 << 40, u64::MAX), Verdict::Takes);
        // A bound of bytes, as `zram:SIZE` sets it, does with a threshold alone.
        assert_eq!(
            (unbounded.ask(100, 100), unbounded.ask(81, 100), unbounded.ask(80, 100)),
            (Verdict::AtLimit, Verdict::NotYet, Verdict::Takes)
        );
    }

    #[test]
    fn a_percentage_alone_has_the_usual_threshold() {
        let acceptance = Acceptance::new(50, 0);
        assert_eq!(acceptance.threshold(1000), 900);
        assert_eq!(Acceptance::new(200, 200).bound(1000), 1000, "no more than everything");
    }
}
