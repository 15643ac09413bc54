//! Putting remote pages in place when they are back ([`crate::fault::remote`]).
//!
//! Owns nothing. Locks: the memory lock, for a run of pages at a time; the queue's alone.

use std::sync::atomic::{Ordering::AcqRel, Ordering::Acquire};

use swaptide_ipc::{Counter, OfOrder};
use swaptide_sys::page::PAGE_SIZE;
use swaptide_sys::thread::now;

use crate::fault::direct_reclaim::has_room;
use crate::fault::install::{LoadedPages, Stop};
use crate::fault::path::FaultPath;
use crate::fault::placing::Placing;
use crate::fault::remote::InFlightRead;
use crate::fault::swap_in::Origin;
use crate::mm::types::{PAGES_PER_CHUNK, range_of};
use crate::readahead::policy::SwappedIn;

/// Tries to put a page in its place, while events are unread.
const MAX_INSTALL_TRIES: u32 = 64;
/// With more buffers than this in use, their memory is given back when all has landed.
const KEPT_BUFFERS: u32 = 4;

/// Puts in place what is back.
pub(crate) fn complete(path: &mut FaultPath) {
    let remote = &path.engine.remote_reads;
    if path.remote.sent.is_empty() || path.reader.fork.notes_events() {
        return;
    }
    // In this order: a signal that is given when the word is free again is seen.
    if remote.signalled.load(Acquire) {
        if let Some(event) = &path.reader.remote_event {
            event.clear();
        }
        remote.signalled.swap(false, AcqRel);
    }
    // A fork through no hook goes first.
    while path.reader.fork.untracked.is_empty() {
        let back = remote.queue.lock().back.pop_front();
        let Some(request) = back else { break };
        let Some(at) = path.remote.sent.iter().position(|sent| sent.buffer == request.buffer)
        else {
            crate::fatal("something came back that was not sent for");
        };
        let sent = path.remote.sent.swap_remove(at);
        install_read(path, &sent, request.read);
        if path.reader.fork.untracked.is_empty() {
            poison_lost(path, &sent, request.lost & sent.asked);
        }
        path.remote.buffers &= !(1 << sent.buffer);
        let _ = path.reader.uffd.wake(range_of(sent.chunk.first(), PAGES_PER_CHUNK));
        if sent.asked != 0 {
            path.engine.slot().faults.record(now().since(sent.at).as_nanos() as u64);
            path.engine.count(Counter::Pgmajfault, 1);
        }
    }
    path.reader.pending.extend(path.remote.crowd.drain(..));
    if path.remote.buffers == 0 && path.remote.most > KEPT_BUFFERS {
        let _ = remote.buffers.discard(0, remote.buffers.len());
        path.remote.most = 0;
    }
}

/// Puts the pages in place that were read, in runs.
fn install_read(path: &mut FaultPath, sent: &InFlightRead, read: u16) {
    let injected = sent.wanted.count_ones() > 1 && path.tests.is_stale();
    let mut left = if injected { 0 } else { read };
    let pages = left.count_ones() as usize;
    path.tries = 0;
    while path.make_room(pages).is_err() {
        path.tries += 1;
        if path.reader.drain().is_err() {
            // What is not put in place is dropped, and the threads that wait for it fault again.
            left = 0;
            break;
        }
    }
    if !has_room(path.engine, pages) {
        left &= sent.asked;
    }
    let mut swapped_in = SwappedIn::new(sent.chunk.first());
    let mut tries = 0;
    while left != 0 && tries < MAX_INSTALL_TRIES {
        let k = left.trailing_zeros() as usize;
        let run = (left >> k).trailing_ones() as usize;
        match install_run(path, sent, k, run) {
            Ok(0) | Err(Stop::Gone) => left &= !(1 << k),
            Ok(n) => {
                swapped_in.add(sent.page(k), n);
                left &= !(u16::MAX >> (PAGES_PER_CHUNK - n) << k);
            }
            Err(_) => {
                tries += 1;
                if path.reader.drain().is_err() {
                    break;
                }
            }
        }
    }
    let (engine, pages) = (path.engine, swapped_in.pages());
    if pages < sent.wanted.count_ones() as usize {
        engine.count(Counter::SwpinStale, usize::from(injected));
        engine.count_order(OfOrder::SwpinFallback, sent.wanted.count_ones().ilog2() as u8, 1);
    }
    swapped_in.blocks(|order, n| engine.count_order(OfOrder::Swpin, order, n));
    engine.count(Counter::SwapRa, pages.saturating_sub((sent.asked != 0).into()));
    if pages > 0 {
        let mut mm = engine.mm.lock();
        mm.pool_sizer.read(pages, now().since(sent.at).as_nanos() as u64);
        mm.pool_sizer.fault(pages);
    }
}

/// Puts `n` neighbours from the `k`-th page on in place. Gives how many; 0 when the first is
/// not what it was.
fn install_run(
    path: &mut FaultPath,
    sent: &InFlightRead,
    k: usize,
    n: usize,
) -> Result<usize, Stop> {
    let engine = path.engine;
    let mut guard = engine.mm.lock();
    let mm = &mut *guard;
    let same = (k..k + n).take_while(|k| sent.still_valid(mm, &engine.devices.areas, *k)).count();
    if same == 0 {
        engine.count(Counter::SwpinStale, 1);
        return Ok(0);
    }
    let from = engine.remote_reads.buffer_addr(sent.buffer).offset(k * PAGE_SIZE);
    let (mut guard, filled) = path.installer.install(
        &Placing::locked(engine),
        guard,
        path.reader.record(),
        &mut path.tests,
        sent.page(k),
        LoadedPages { from, run: None, len: same },
    );
    let mm = &mut *guard;
    let filled = match filled {
        Err(Stop::Exists) => {
            let dropped = path.installer.resolve_mapped_twice(mm, sent.page(k), sent.entries[k]);
            engine.publish_usage(mm);
            return dropped;
        }
        filled => filled?,
    };
    let at = now();
    for k in (k..k + filled).filter(|k| (sent.asked | sent.waited) >> k & 1 == 1) {
        mm.fault_hold.lands(sent.page(k), at);
    }
    for k in k..k + filled {
        let is_asked = (sent.asked | sent.waited) >> k & 1 == 1;
        path.finish_swap_in(mm, sent.page(k), sent.entries[k], Origin::Server { is_asked });
    }
    engine.publish_usage(mm);
    engine.count(Counter::Pswpin, filled);
    Ok(filled)
}

/// Poisons the pages that a thread asked for and that cannot be read.
fn poison_lost(path: &mut FaultPath, sent: &InFlightRead, lost: u16) {
    let engine = path.engine;
    for k in (0..PAGES_PER_CHUNK).filter(|k| lost >> k & 1 != 0) {
        for _ in 0..MAX_INSTALL_TRIES {
            let mut mm = engine.mm.lock();
            if !sent.still_valid(&mm, &engine.devices.areas, k) {
                break;
            }
            match path.installer.poison(&mut mm, sent.page(k), sent.entries[k]) {
                Err(Stop::Again) => {
                    drop(mm);
                    // Its thread faults again.
                    if path.reader.drain().is_err() {
                        return;
                    }
                }
                _ => break,
            }
        }
    }
}
