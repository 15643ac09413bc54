//! Room within the limit, before the handler fills a page.
//!
//! The workers keep some ([`crate::reclaim::worker`]); where they have not kept up, the handler
//! makes it, and the thread that waits for the page pays. Where there are areas of a server the
//! handler leaves it to the workers, as long as they have anything to do: a write there may wait
//! for seconds, and every other fault with it.
//!
//! Owns nothing. Locks: the memory lock, for a look or a batch.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use swaptide_ipc::Counter;
use swaptide_sys::page::PAGE_SIZE;
use swaptide_sys::thread::yield_now;

use crate::engine::Engine;
use crate::events::reader::{Interrupted, UffdReader};
use crate::memcg::psi::Stall;
use crate::reclaim::worker::{Step, Worker};

/// Turns in which room is left to be made by the workers, where they write to a server.
const MAX_WAITS_FOR_WORKERS: usize = 16;
/// Turns in which room is made for one fill.
const MAX_TURNS: usize = 256;
/// A write to a server that has taken so long may take long. Until it is over the program goes past
/// its limit by this part of it at most, and then slowly.
const STALLED_WRITE_TIME: Duration = Duration::from_millis(100);
const STALLED_OVERSHOOT_DIVISOR: i64 = 32;
/// Compressed memory larger than this part of the limit is written back when nothing can be taken.
const MIN_POOL_DIVISOR: u64 = 16;

/// Makes room for `n` pages, with the handler's own `worker`.
///
/// # Errors
/// [`Interrupted`] when a fork through no hook was read meanwhile: no page may go before its child
/// has it.
pub(crate) fn make_room(
    reader: &mut UffdReader,
    worker: &mut Worker,
    stall: &mut Stall,
    n: usize,
) -> Result<(), Interrupted> {
    let engine = reader.engine;
    let bytes = (n * PAGE_SIZE) as i64;
    for turn in 0..MAX_TURNS {
        if engine.charge.room() >= bytes || engine.workers.quiesce.load(Relaxed) != 0 {
            return Ok(());
        }
        stall.stalls(engine.slot());
        if engine.devices.areas.has_remote() && !reader.fork.populating {
            let stuck = engine.devices.areas.device.is_writing_for(STALLED_WRITE_TIME);
            let overshoot = engine.charge.limit() as i64 / STALLED_OVERSHOOT_DIVISOR;
            if stuck && engine.charge.room() + overshoot >= bytes {
                return Ok(());
            }
            // A write to a server may wait for it: that is for the workers, rather than for every
            // thread whose fault comes next.
            worker.balance(engine);
            if stuck || turn < MAX_WAITS_FOR_WORKERS && workers_are_busy(engine) {
                engine.call_workers();
                if reader.is_server {
                    yield_now();
                } else {
                    reader.drain()?;
                }
                continue;
            }
        }
        // Compressed memory that is past its share takes from the program what swap-out gives: the
        // areas must take some first.
        if engine.charge.pool_overflows() && worker.write_back(engine) {
            continue;
        }
        match worker.step(engine) {
            Step::Took(pages) => engine.count(Counter::PgstealDirect, pages),
            // What is read then may be a fork that must have the page first.
            Step::Again if reader.fork.populating => return Ok(()),
            Step::Again => reader.drain()?,
            // What another process has, too, workers make its own first. Until they have, it is a
            // little past its limit; what lies in compressed memory they may share as well, so that
            // writing it away would free nothing.
            Step::Nothing if has_little_but_shared(engine) => {
                engine.call_workers();
                trim_staging(engine, n);
                return Ok(());
            }
            Step::Nothing => {
                if engine.charge.pool() > engine.charge.limit() / MIN_POOL_DIVISOR
                    && worker.write_back(engine)
                {
                    continue;
                }
                trim_staging(engine, n);
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Gives free frames back but for `n` pages' worth.
fn trim_staging(engine: &Engine, n: usize) {
    let mut mm = engine.mm.lock();
    mm.staging.trim(n);
    engine.publish_usage(&mm);
}

/// True in a group of processes that share pages since a fork, when most of what the program has is
/// another's, too.
fn has_little_but_shared(engine: &Engine) -> bool {
    if !engine.charge.cow_group.is_active() {
        return false;
    }
    let mm = engine.mm.lock();
    mm.table.shared() > mm.table.present() / 2
}

/// True when the workers have something to store, or to move out of compressed memory.
fn workers_are_busy(engine: &Engine) -> bool {
    engine.mm.lock().jobs.in_flight > 0
        || engine.devices.areas.device.is_writing_for(Duration::ZERO)
        || engine.charge.pool_overflows() && !engine.file_rests()
}

/// True when `n` pages can be filled within the limit. Where nothing can be taken out (what two
/// processes share since a fork, say), what is brought in beyond the page asked for is the next to
/// go, before it is touched.
pub(crate) fn has_room(engine: &Engine, n: usize) -> bool {
    engine.charge.room() >= (n * PAGE_SIZE) as i64
}
