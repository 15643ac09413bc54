//! Progress of long work on a terminal: which step of how many, the time so far, and an estimate of
//! what is left.
//!
//! Goes to standard error, and nowhere unless that is a terminal. The estimate is a proportion:
//! what is left takes as long for its size as what is done.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use swaptide_host::units::human;

/// How often the time is shown again while nothing else changes.
const TICK: Duration = Duration::from_secs(1);

/// The line about work under way.
pub struct StepProgress {
    line: ProgressBar,
    /// Steps that were begun.
    begun: AtomicU64,
    /// Steps that there are; 0 if that is not known.
    steps: AtomicU64,
    /// What the step under way counts when it is done.
    under_way: AtomicU64,
}

impl Default for StepProgress {
    fn default() -> StepProgress {
        StepProgress::on(ProgressDrawTarget::stderr())
    }
}

impl StepProgress {
    /// Progress that is never shown.
    pub fn hidden() -> StepProgress {
        StepProgress::on(ProgressDrawTarget::hidden())
    }

    fn on(target: ProgressDrawTarget) -> StepProgress {
        let style = ProgressStyle::with_template("{msg}{times}");
        // The template is right; without it there is no line, which is no reason to fail.
        let style = style.unwrap_or_else(|_| ProgressStyle::default_spinner());
        let style = style.with_key("times", |state: &ProgressState, text: &mut dyn Write| {
            let _ = text.write_str(&times(state.elapsed(), state.pos(), state.len()));
        });
        let line = ProgressBar::with_draw_target(None, target).with_style(style);
        StepProgress {
            line,
            begun: AtomicU64::new(0),
            steps: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
        }
    }

    /// There are `steps` steps, which take `units` units of time together.
    pub fn expect(&self, steps: u64, units: u64) {
        self.steps.store(steps, Relaxed);
        self.line.set_length(units);
    }

    /// A step of one unit begins; the one before is done.
    pub fn begin(&self, what: &str) {
        self.begin_units(what, 1);
    }

    /// A step of `units` units begins; the one before is done.
    pub fn begin_units(&self, what: &str, units: u64) {
        self.line.inc(self.under_way.swap(units, Relaxed));
        let (begun, steps) = (self.begun.fetch_add(1, Relaxed) + 1, self.steps.load(Relaxed));
        let of = if begun <= steps { format!("step {begun} of {steps}: ") } else { String::new() };
        self.say(&format!("{of}{what}"));
    }

    /// This number of bytes is left of what is done without steps; what was left at first is the
    /// whole.
    pub fn left(&self, what: &str, bytes: u64) {
        let whole = self.line.length().unwrap_or(0).max(bytes);
        self.line.set_length(whole);
        self.line.set_position(whole - bytes);
        self.say(&format!("{what}: {} of {} left", human(bytes), human(whole)));
    }

    fn say(&self, what: &str) {
        self.line.enable_steady_tick(TICK);
        self.line.set_message(what.to_owned());
    }

    /// Has `print` write whole lines to the terminal.
    pub(crate) fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        self.line.suspend(print)
    }

    /// Takes the line away.
    pub fn end(&self) {
        self.line.finish_and_clear();
    }

    /// The same, for another thread to do.
    pub fn ender(&self) -> impl FnOnce() + Send + 'static {
        let line = self.line.clone();
        move || line.finish_and_clear()
    }
}

impl Drop for StepProgress {
    fn drop(&mut self) {
        self.end();
    }
}

/// The time so far, and what is left by it, when `done` units of `all` are done.
fn times(elapsed: Duration, done: u64, all: Option<u64>) -> String {
    let so_far = format!(", {} so far", short(elapsed));
    match all {
        Some(all) if done > 0 && done < all => {
            let left = elapsed.as_secs_f64() * (all - done) as f64 / done as f64;
            format!("{so_far}, about {} left", short(Duration::from_secs_f64(left)))
        }
        _ => so_far,
    }
}

fn short(time: Duration) -> String {
    format!("{:#}", HumanDuration(time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_a_proportion_and_unknown_at_first() {
        let minute = Duration::from_secs(60);
        assert_eq!(times(minute, 0, Some(4)), ", 60s so far");
        assert_eq!(times(minute, 1, Some(4)), ", 60s so far, about 3m left");
        assert_eq!(times(minute, 4, Some(4)), ", 60s so far");
        assert_eq!(times(minute, 3, None), ", 60s so far");
    }

    #[test]
    fn a_step_is_done_when_the_next_begins() {
        let progress = StepProgress::on(ProgressDrawTarget::hidden());
        progress.expect(3, 12);
        progress.begin_units("first", 10);
        assert_eq!((progress.line.position(), progress.line.message()), {
            (0, "step 1 of 3: first".to_owned())
        });
        progress.begin("second");
        assert_eq!(progress.line.position(), 10);
        progress.begin("third");
        // One more than was expected has no number.
        progress.begin("fourth");
        assert_eq!(progress.line.message(), "fourth");
    }

    #[test]
    fn the_first_bytes_left_are_the_whole() {
        let progress = StepProgress::on(ProgressDrawTarget::hidden());
        for (left, position, whole) in [(100 << 20, 0, 100), (40 << 20, 60, 100), (0, 100, 100)] {
            progress.left("area", left);
            assert_eq!(progress.line.position(), position << 20);
            assert_eq!(progress.line.length(), Some(whole << 20));
        }
        assert_eq!(progress.line.message(), "area: 0B of 100M left");
    }
}
