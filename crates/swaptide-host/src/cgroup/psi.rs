//! How long programs wait for memory: the part of the time in which at least one thread of a
//! process or a group stalled.
//!
//! What each process counts is exact ([`swaptide_ipc::ProcSlot::stalled_us`]). Of several processes
//! together only the parts are known, not when within a look each one waited: they are taken as
//! independent of each other, which lies between all at once and one after the other.
//!
//! Owns the averages, in the form of the kernel's memory.pressure: over 10, 60 and 300 seconds, and
//! the sum since the group was made. Locks: none.

use std::fmt;
use std::time::Duration;

/// Windows of the averages, in seconds.
const WINDOWS: [f64; 3] = [10.0, 60.0, 300.0];
/// A process's own pressure is averaged over this time: one look is too short to tell a busy
/// program from one that waits.
const OWN_WINDOW: Duration = Duration::from_secs(1);

/// A part of the time, 0 to 1, in which a thread waited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TimeShare(f64);

impl TimeShare {
    /// `stalled_us` of `elapsed`; never more than all of it.
    pub fn of(stalled_us: u64, elapsed: Duration) -> TimeShare {
        let elapsed_us = elapsed.as_secs_f64() * 1e6;
        TimeShare(if elapsed_us > 0.0 { (stalled_us as f64 / elapsed_us).min(1.0) } else { 0.0 })
    }

    /// That one of two waited, which wait independently of each other.
    pub fn or(self, other: TimeShare) -> TimeShare {
        TimeShare(self.0 + other.0 - self.0 * other.0)
    }

    /// What of `bytes` corresponds to it.
    pub fn of_bytes(self, bytes: u64) -> u64 {
        (bytes as f64 * self.0) as u64
    }

    /// The microseconds of `elapsed` that it is.
    pub(crate) fn of_time(self, elapsed: Duration) -> u64 {
        (elapsed.as_secs_f64() * 1e6 * self.0) as u64
    }

    /// The average of about a second, after `elapsed` more in which it was `now`.
    pub(crate) fn averaged(self, now: TimeShare, elapsed: Duration) -> TimeShare {
        self.over(now, elapsed, OWN_WINDOW.as_secs_f64())
    }

    fn over(self, now: TimeShare, elapsed: Duration, window_s: f64) -> TimeShare {
        let kept = (-elapsed.as_secs_f64() / window_s).exp();
        TimeShare(self.0 * kept + now.0 * (1.0 - kept))
    }
}

/// The pressure of a group over time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    averages: [TimeShare; 3],
    total_s: f64,
}

impl Pressure {
    /// Takes in `elapsed` more, in which a thread waited for `part` of the time.
    pub(crate) fn follow(&mut self, part: TimeShare, elapsed: Duration) {
        for (average, window) in self.averages.iter_mut().zip(WINDOWS) {
            *average = average.over(part, elapsed, window);
        }
        self.total_s += part.0 * elapsed.as_secs_f64();
    }

    /// Seconds in which a thread waited, since the group was made.
    pub(crate) fn total_s(&self) -> f64 {
        self.total_s
    }
}

/// As the kernel writes it: averages in percent, the sum in microseconds.
impl fmt::Display for Pressure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [ten, sixty, three_hundred] = self.averages.map(|average| average.0 * 100.0);
        write!(
            f,
            "some avg10={ten:.2} avg60={sixty:.2} avg300={three_hundred:.2} total={:.0}",
            self.total_s * 1e6
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn parts_of_several_are_between_the_largest_and_the_sum() {
        let (a, b) = (TimeShare::of(300, MS), TimeShare::of(500, MS));
        let both = a.or(b).0;
        assert!((both - 0.65).abs() < 1e-9, "{both}");
        assert_eq!(TimeShare::of(5000, MS).0, 1.0, "what went on for longer than the look");
        assert_eq!(TimeShare::of(5, Duration::ZERO).0, 0.0);
        assert_eq!(TimeShare::of(1000, MS).or(b).0, 1.0);
        assert_eq!(a.of_bytes(1000), 300);
    }

    #[test]
    fn averages_follow_at_their_pace_whatever_the_looks_are() {
        let run = |look: Duration, looks: u32| {
            let mut pressure = Pressure::default();
            (0..looks).for_each(|_| pressure.follow(TimeShare(0.5), look));
            pressure
        };
        let (fine, coarse) = (run(MS, 10_000), run(Duration::from_secs(2), 5));
        for (fine, coarse) in fine.averages.iter().zip(coarse.averages) {
            assert!((fine.0 - coarse.0).abs() < 1e-6, "{fine:?} {coarse:?}");
        }
        // After one window, 1 - 1/e of it.
        assert_eq!(coarse.to_string(), "some avg10=31.61 avg60=7.68 avg300=1.64 total=5000000");
        let quiet = TimeShare(0.5).averaged(TimeShare(0.0), OWN_WINDOW * 10);
        assert!(quiet.0 < 1e-4);
    }
}
