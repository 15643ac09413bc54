//! Room within the limit, before the handler fills a page.
//!
//! The workers keep some ([`crate::reclaim::worker`]); where they have not kept up, the handler
//! makes it, and the thread that waits for the page pays. Where there are areas of a server the
//! handler leaves it to the workers, as long as they have anything to do: who writes there may wait
//! for seconds, and everybody's faults with him.
//!
//! Owns nothing. Locks: the memory lock, for a look or a batch.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use swaptide_ipc::Counter;
use swaptide_sys::page::PAGE_SIZE;

use crate::event_loop::Handler;
use crate::reclaim::worker::Step;

/// Turns in which room is left to be made by the workers, where they write to a server.
const MAX_WAITS_FOR_WORKERS: usize = 16;
/// A write to a server that has taken so long may take long. Until it is over the program goes past
/// its limit by this part of it at most, and then slowly.
const STALLED_WRITE: Duration = Duration::from_millis(100);
const STALLED_OVERSHOOT_DIVISOR: i64 = 32;

impl Handler {
    /// Makes room for `n` pages.
    pub(crate) fn make_room(&mut self, n: usize) {
        let engine = self.engine;
        let bytes = (n * PAGE_SIZE) as i64;
        for turn in 0..256 {
            if engine.charge.room() >= bytes {
                return;
            }
            if engine.park.load(Relaxed) != 0 {
                return;
            }
            self.stalls();
            if engine.devices.file.has_remote() && !self.giving {
                let stuck = engine.devices.file.device.is_writing_for(STALLED_WRITE);
                if stuck
                    && engine.charge.room()
                        + engine.charge.limit() as i64 / STALLED_OVERSHOOT_DIVISOR
                        >= bytes
                {
                    return;
                }
                // Who writes to a server may wait for it: the workers, rather than everybody whose
                // fault comes next.
                self.worker.balance(engine);
                if stuck || turn < MAX_WAITS_FOR_WORKERS && self.workers_are_busy() {
                    engine.call_workers();
                    self.drain_events();
                    continue;
                }
            }
            // Compressed memory that is past its share takes from the program what swap-out gives:
            // the file must take some first.
            if engine.charge.pool_overflows() && self.worker.write_back(engine) {
                continue;
            }
            match self.worker.step(engine) {
                Step::Took(pages) => engine.count(Counter::PgstealDirect, pages),
                // What is read then may be a fork that must have the page first.
                Step::Again if self.giving => return,
                Step::Again => self.drain_events(),
                // What another process has, too, workers make its own first. Until they have, it is
                // a little past its limit; what lies in compressed memory they may share as well,
                // so that writing it away would free nothing.
                Step::Nothing if self.has_little_but_shared() => {
                    engine.call_workers();
                    let mut mm = engine.mm.lock();
                    mm.staging.trim(n);
                    engine.publish_usage(&mm);
                    return;
                }
                Step::Nothing => {
                    if engine.charge.pool() > engine.charge.limit() / 16
                        && self.worker.write_back(engine)
                    {
                        continue;
                    }
                    let mut mm = engine.mm.lock();
                    mm.staging.trim(n);
                    engine.publish_usage(&mm);
                    return;
                }
            }
        }
    }

    /// True in a family when most of what the program has is another's, too.
    fn has_little_but_shared(&self) -> bool {
        let engine = self.engine;
        if !engine.charge.family.is_active() {
            return false;
        }
        let mm = engine.mm.lock();
        mm.table.shared() > mm.table.present() / 2
    }

    /// True when the workers have something to store, or to move out of compressed memory.
    fn workers_are_busy(&self) -> bool {
        let (engine, file) = (self.engine, &self.engine.devices.file.device);
        engine.mm.lock().jobs.in_flight > 0
            || file.is_writing_for(Duration::ZERO)
            || engine.charge.pool_overflows() && !engine.file_rests()
    }

    /// True when `n` pages can be filled within the limit. Where nothing can be taken out (what two
    /// processes share since a fork, say), what is brought in beyond the page asked for is the next
    /// to go, before it is touched.
    pub(crate) fn has_room(&self, n: usize) -> bool {
        self.engine.charge.room() >= (n * PAGE_SIZE) as i64
    }
}
