//! Whether there is time for what no thread waits for.
//!
//! A process is *idle* when for a while no page of it has come in or gone out. Then a worker may
//! use CPU time that no other thread wants: as soon as it waits for a CPU longer than a quarter of
//! the time that it runs, another thread does, and it rests. Only its waiting while it works
//! counts: a thread that hardly runs waits as long as it runs, for its CPU to wake up.
//!
//! Owns: what was seen last. Locks: none; it is worker 0's.

use std::time::Duration;

use swaptide_sys::affinity::{CpuTimes, ThreadTimes};
use swaptide_sys::thread::Nanos;

/// A process is idle when nothing happened for so long.
const IDLE_AFTER: Duration = Duration::from_millis(200);
/// The interval between two samples of the worker's own waiting.
const WAIT_SAMPLE_INTERVAL: Duration = Duration::from_millis(10);
/// It rests so long when others want the CPU.
const BACKOFF: Duration = Duration::from_secs(1);
/// Its waiting may be this part of its running.
const MAX_WAIT_DIVISOR: u64 = 4;

/// Sees that the process is idle, and whether the CPU is wanted.
pub struct IdleDetector {
    happened: u64,
    since: Nanos,
    times: Option<ThreadTimes>,
    /// The worker's times by then; `None` while it is not at work.
    seen: Option<(CpuTimes, Nanos)>,
    rests_until: Nanos,
}

impl IdleDetector {
    /// For the calling thread.
    pub fn new(now: Nanos) -> IdleDetector {
        IdleDetector {
            happened: 0,
            since: now,
            times: ThreadTimes::open(swaptide_sys::thread::gettid().0),
            seen: None,
            rests_until: now,
        }
    }

    /// True when there is time. `happened` is any number that changes whenever something happens.
    pub(crate) fn is_idle(&mut self, happened: u64, now: Nanos) -> bool {
        self.has_time(happened, now, |detector| detector.times.as_ref().and_then(ThreadTimes::read))
    }

    fn has_time(
        &mut self,
        happened: u64,
        now: Nanos,
        times: impl FnOnce(&IdleDetector) -> Option<CpuTimes>,
    ) -> bool {
        if std::mem::replace(&mut self.happened, happened) != happened {
            self.since = now;
        }
        if now.since(self.since) < IDLE_AFTER || now < self.rests_until {
            self.seen = None;
            return false;
        }
        if self.seen.is_some_and(|(_, looked)| now.since(looked) < WAIT_SAMPLE_INTERVAL) {
            return true;
        }
        let times = times(self);
        self.is_unwanted(times, now)
    }

    /// The worker found nothing to do.
    pub fn stopped(&mut self) {
        self.seen = None;
    }

    /// False, for a while, when another thread wants the CPU on which the worker runs, and always
    /// where that cannot be told.
    fn is_unwanted(&mut self, times: Option<CpuTimes>, now: Nanos) -> bool {
        let Some(times) = times else { return false };
        let Some((then, _)) = self.seen.replace((times, now)) else { return true };
        let (ran, waited) =
            (times.ran.saturating_sub(then.ran), times.waited.saturating_sub(then.waited));
        if waited > ran / MAX_WAIT_DIVISOR && waited > WAIT_SAMPLE_INTERVAL.as_nanos() as u64 / 10 {
            self.rests_until = Nanos(now.0 + BACKOFF.as_nanos() as u64);
            self.seen = None;
            return false;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_idle_after_a_while_without_swapping() {
        let ms = |n: u64| Nanos(n * 1_000_000);
        let mut detector = IdleDetector::new(ms(0));
        let mut has_time = |happened: u64, at: Nanos| {
            detector.has_time(happened, at, |_| Some(CpuTimes::default()))
        };
        assert!(!has_time(7, ms(1)) && !has_time(7, ms(200)));
        assert!(has_time(7, ms(202)));
        assert!(!has_time(8, ms(203)) && !has_time(8, ms(402)));
        assert!(has_time(8, ms(404)));
    }

    #[test]
    fn a_worker_that_waits_for_a_cpu_pauses() {
        let ms = |n: u64| Nanos(n * 1_000_000);
        let mut detector = IdleDetector::new(ms(0));
        let times = |ran: u64, waited: u64| {
            Some(CpuTimes { ran: ran * 1_000_000, waited: waited * 1_000_000 })
        };
        assert!(detector.is_unwanted(times(0, 0), ms(0)));
        assert!(detector.is_unwanted(times(9, 1), ms(10)));
        assert!(!detector.is_unwanted(times(15, 5), ms(20)), "4 of 6");
        assert!(!detector.is_idle(0, ms(1000)), "it rests");
        assert!(!detector.is_unwanted(None, ms(1040)));
    }

    #[test]
    fn waiting_before_the_work_does_not_count() {
        let ms = |n: u64| Nanos(n * 1_000_000);
        let mut detector = IdleDetector::new(ms(0));
        let times = |ran: u64, waited: u64| {
            Some(CpuTimes { ran: ran * 1_000_000, waited: waited * 1_000_000 })
        };
        assert!(detector.is_unwanted(times(0, 0), ms(0)));
        assert!(!detector.is_unwanted(times(6, 4), ms(10)));
        assert!(detector.is_unwanted(times(7, 9), ms(1020)), "it rested meanwhile");
        assert!(detector.is_unwanted(times(17, 9), ms(1030)));
        detector.stopped();
        assert!(detector.is_unwanted(times(18, 20), ms(5000)), "it had nothing to do meanwhile");
        assert!(!detector.is_unwanted(times(20, 29), ms(5010)));
    }
}
