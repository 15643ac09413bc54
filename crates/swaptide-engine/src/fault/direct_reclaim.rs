//! Room within the limit, before a page is filled: by the handler or a fault server.
//!
//! The workers keep some ([`crate::reclaim::worker`]); where they have not kept up, the thread that
//! serves the fault makes it, and the thread that waits for the page pays. Where there are areas of
//! a server it is left to the workers, as long as they have anything to do: a write there may wait
//! for seconds, and every other fault with it.
//!
//! No event is read here, and no fork attended to: where that must come first, the fault is put off
//! ([`Stop::Again`]), and is served again when the event loop has read.
//!
//! Owns nothing. Locks: the memory lock, for a check or a batch.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use swaptide_ipc::Counter;
use swaptide_sys::AsFd;
use swaptide_sys::page::PAGE_SIZE;
use swaptide_sys::sock::poll_readable;
use swaptide_sys::thread::yield_now;
use swaptide_sys::time::sleep;

use crate::engine::Engine;
use crate::events::reader::UffdReader;
use crate::fault::install::Stop;
use crate::memcg::psi::Stall;
use crate::reclaim::worker::{MIN_POOL_DIVISOR, Step, Worker};

/// Turns in which room is left to be made by the workers, where they write to a server.
const MAX_WAITS_FOR_WORKERS: usize = 16;
/// The length of one of these turns.
const WORKERS_WAIT: Duration = Duration::from_micros(200);
/// Turns in which room is made for one fill.
const MAX_TURNS: usize = 256;
/// Tries of a fault after which it is no longer put off: a program that changes its mappings
/// without pause may keep reclaim from taking anything. It goes past its limit then, page by page.
pub(crate) const MAX_PUT_OFF: u32 = 32;
/// A write to a server that has taken so long may take long.
const STALLED_WRITE_TIME: Duration = Duration::from_millis(100);
/// Until it is over, or while nothing can be taken because of changes of mappings, the program goes
/// past its limit by this part of it, and then slowly.
const STALLED_OVERSHOOT_DIVISOR: i64 = 32;
const SLOW_TIME: Duration = Duration::from_millis(1);

/// Makes room for `n` pages, with the serving thread's own `worker`. `tries`: how often the fault
/// was put off.
///
/// # Errors
/// [`Stop::Again`] when events must be read first: reclaim is refused until then, or there is time
/// for it while workers make room.
pub(crate) fn make_room(
    reader: &UffdReader,
    worker: &mut Worker,
    stall: &mut Stall,
    n: usize,
    tries: u32,
) -> Result<(), Stop> {
    let engine = reader.engine;
    let bytes = (n * PAGE_SIZE) as i64;
    let overshoot = engine.charge.limit() as i64 / STALLED_OVERSHOOT_DIVISOR;
    for turn in 0..MAX_TURNS {
        if engine.charge.room() >= bytes || engine.workers.quiesce.load(Relaxed) != 0 {
            return Ok(());
        }
        stall.stalls(engine.slot());
        if engine.devices.areas.has_remote() && !reader.fork.populating {
            let stuck = engine.devices.areas.device.is_writing_for(STALLED_WRITE_TIME);
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
                } else if has_message_within(reader, WORKERS_WAIT) {
                    if tries < MAX_PUT_OFF {
                        return Err(Stop::Again);
                    }
                    sleep(WORKERS_WAIT);
                }
                continue;
            }
        }
        // Compressed memory that is past its share takes from the program what swap-out gives: the
        // areas must take some first.
        if engine.charge.pool_overflows() && write_back(engine, worker) {
            continue;
        }
        match worker.step(engine) {
            Step::Took(pages) => engine.count(Counter::PgstealDirect, pages),
            // What is read then may be a fork that must have the page first.
            Step::Again if reader.fork.populating => return Ok(()),
            Step::Again if tries < MAX_PUT_OFF => return Err(Stop::Again),
            Step::Again => {
                if engine.charge.room() + overshoot < bytes {
                    sleep(SLOW_TIME);
                }
                return Ok(());
            }
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
                    && write_back(engine, worker)
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

/// Moves compressed pages to a swap area, which may take long. False when there was nothing to move
/// or nowhere to put it.
fn write_back(engine: &Engine, worker: &mut Worker) -> bool {
    if engine.devices.is_backed() && !engine.area_rests() {
        engine.note_disk();
    }
    worker.write_back(engine)
}

/// True if there is something to read, or to take over from a server, or comes before `time` is
/// over. Others can see that the handler waits, and does not starve.
fn has_message_within(reader: &UffdReader, time: Duration) -> bool {
    let serving = &reader.engine.serving;
    if serving.servers.is_told() {
        return true;
    }
    serving.handler.turns.fetch_add(1, Relaxed);
    let ready = poll_readable(&[reader.uffd.as_fd()], Some(time));
    serving.handler.turns.fetch_add(1, Relaxed);
    matches!(ready, Ok(ready) if ready != 0)
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
        || engine.charge.pool_overflows() && !engine.area_rests()
}

/// True when `n` pages can be filled within the limit. Where nothing can be taken out (what two
/// processes share since a fork, say), what is brought in beyond the page asked for is the next to
/// go, before it is touched.
pub(crate) fn has_room(engine: &Engine, n: usize) -> bool {
    engine.charge.room() >= (n * PAGE_SIZE) as i64
}
