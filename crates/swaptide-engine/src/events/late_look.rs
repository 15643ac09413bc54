//! What to do about a change of mappings that is late: whether a thread is on its way to tell of
//! what was there before.
//!
//! Such a thread is blocked in its call, where `/proc` shows it, or runs. One that was seen blocked
//! elsewhere since, or has had the CPU for longer than it needs from its change to the wait, is on
//! no such way.
//!
//! Owns: the threads that run and have done neither. Locks: none.

use std::time::Duration;

use swaptide_sys::mapping_calls::{MappingCall, SeenThread, for_each_thread};
use swaptide_sys::thread::{Tid, cpu_time_of};
use swaptide_sys::time::Nanos;

/// The CPU time after which a thread that runs is not on its way from a change to the wait for it.
const WAY: Duration = Duration::from_millis(4);
/// The time to wait for an event that another one shows to be on its way: its thread only has to be
/// scheduled.
pub(crate) const LATE_EVENT_TIMEOUT: Duration = Duration::from_secs(1);

/// More threads are not looked at.
const MAX_THREADS: usize = 512;

/// Looks at the threads of the program since a move was found to be late.
#[derive(Default)]
pub(crate) struct LateLook {
    /// Threads that ran, with the CPU time that they had had by then.
    running: Vec<(Tid, Nanos)>,
    /// Threads of which it is known.
    settled: Vec<Tid>,
    calls: Vec<MappingCall>,
}

impl LateLook {
    /// Looks for another one from here on.
    pub(crate) fn begin_again(&mut self) {
        self.running.clear();
        self.settled.clear();
    }

    /// The calls in which threads are blocked now, and whether one runs that may come to be. `None`
    /// where that cannot be seen: a process that is not dumpable, or has too many threads, or no
    /// descriptor is free.
    pub(crate) fn look(&mut self) -> Option<(&[MappingCall], bool)> {
        let LateLook { running, settled, calls } = self;
        calls.clear();
        let (mut may_come, mut is_seen, mut threads) = (false, true, 0);
        for_each_thread(|tid, thread| {
            threads += 1;
            match thread {
                _ if threads > MAX_THREADS => is_seen = false,
                SeenThread::Unseen => is_seen = false,
                SeenThread::Blocked(call) => {
                    settle(settled, tid);
                    calls.push(call);
                }
                SeenThread::Elsewhere => settle(settled, tid),
                SeenThread::Runs if settled.contains(&tid) => {}
                SeenThread::Runs => {
                    // One that has ended tells of nothing.
                    let Some(had) = cpu_time_of(tid) else { return };
                    match running.iter().find(|(of, _)| *of == tid) {
                        None => {
                            running.push((tid, had));
                            may_come = true;
                        }
                        Some((_, then)) if had.since(*then) > WAY => settle(settled, tid),
                        Some(_) => may_come = true,
                    }
                }
            }
        })
        .ok()?;
        (is_seen && threads > 0).then_some((calls, may_come))
    }
}

fn settle(settled: &mut Vec<Tid>, tid: Tid) {
    if !settled.contains(&tid) {
        settled.push(tid);
    }
}
