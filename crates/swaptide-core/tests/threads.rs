//! Many threads on one small device: every slot belongs to one owner at a time, look-ups never see what was never there.
#![cfg(not(loom))]

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use swaptide_core::*;

const THREADS: u32 = 4;
const SLOTS: u32 = 8192;

struct Owned {
    off: SwapOffset,
    n: u32,
    folio: FolioId,
    cached: bool,
    count: u32,
}

/// SWAPTIDE_STRESS_SECONDS makes the run longer.
fn duration(unless_told: u64) -> Duration {
    let seconds = std::env::var("SWAPTIDE_STRESS_SECONDS").ok().and_then(|s| s.parse().ok());
    Duration::from_secs(seconds.unwrap_or(unless_told))
}

#[test]
fn owners_never_meet() {
    stress(duration(2));
}

/// The same for a minute: `./check --full` runs it.
#[test]
#[ignore = "takes a minute"]
fn owners_never_meet_in_a_minute() {
    stress(duration(60));
}

fn stress(duration: Duration) {
    let owner: &'static [AtomicU32] = (0..SLOTS).map(|_| AtomicU32::new(0)).collect::<Vec<_>>().leak();
    let device = SwapDevice::new(SwapType::new(0).unwrap(), SLOTS, THREADS as usize, Kind::Solid)
        .with_discard(true)
        .with_free_notify(Box::new(move |off, n| {
            (off.0..off.0 + n).for_each(|slot| owner[slot as usize].store(0, Ordering::Relaxed));
        }));
    let stop = AtomicBool::new(false);
    let (done, full, no_run) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let work = |t: u32| {
        let mut owned: Vec<Owned> = Vec::new();
        let mut random = 0x9e37_79b9_u64 + u64::from(t) * 7919;
        let mut next = move |below: u32| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 20) as u32 % below
        };
        let mut serial = 0;
        while !stop.load(Ordering::Relaxed) {
            done.fetch_add(1, Ordering::Relaxed);
            if next(100) < 52 {
                let order = Order::new([0, 0, 0, 2, 4, 4, 9][next(7) as usize]).unwrap();
                serial += 1;
                let folio = FolioId((t + 1) << 24 | (serial & 0xff_ffff));
                match device.alloc_folio(CpuId(t as u16), order, folio, GroupId(t as u16)) {
                    Ok(off) => {
                        for slot in off.0..off.0 + order.pages() {
                            assert_eq!(owner[slot as usize].swap(t + 1, Ordering::Relaxed), 0, "slot {slot} has an owner");
                        }
                        owned.push(Owned { off, n: order.pages(), folio, cached: true, count: 1 });
                    }
                    Err(AllocError::Full) => _ = full.fetch_add(1, Ordering::Relaxed),
                    Err(AllocError::NoRun) => _ = no_run.fetch_add(1, Ordering::Relaxed),
                    Err(other) => panic!("{other}"),
                }
            }
            if owned.is_empty() {
                continue;
            }
            let at = next(owned.len() as u32) as usize;
            let o = &mut owned[at];
            let page = o.off.plus(next(o.n));
            match (device.lookup(page), o.cached) {
                (Slot::Folio(folio), true) => assert_eq!(folio, o.folio),
                (Slot::Shadow { shadow, zero }, false) => assert_eq!((shadow.0, zero), (o.folio.0, true)),
                (other, _) => panic!("{page} of {:?} (cached {}): {other:?}", o.folio, o.cached),
            }
            match next(6) {
                0 if o.cached => {
                    device.folio_to_shadow(o.off, o.n, o.folio, Shadow(o.folio.0), ZeroMask::All).unwrap();
                    o.cached = false;
                }
                1 if !o.cached => {
                    device.shadow_to_folio(o.off, o.n, o.folio, None).unwrap();
                    o.cached = true;
                }
                2 if o.count < 400 => {
                    device.dup(o.off, o.n).unwrap();
                    o.count += 1;
                }
                _ => {
                    let freed = device.put(o.off, o.n).unwrap();
                    o.count -= 1;
                    if o.count == 0 {
                        if o.cached {
                            assert_eq!((freed, device.folio_release(o.off, o.n, o.folio)), (0, Ok(o.n)));
                        }
                        owned.swap_remove(at);
                    }
                }
            }
        }
        for o in owned {
            (1..o.count).for_each(|_| assert_eq!(device.put(o.off, o.n), Ok(0)));
            assert_eq!(device.free(o.off, o.n, Expect::Any), Ok(o.n));
        }
    };
    thread::scope(|s| {
        for t in 0..THREADS {
            let work = &work;
            s.spawn(move || work(t));
        }
        // A reader that knows nothing: what it sees was put there by somebody.
        s.spawn(|| {
            let mut slot = 0;
            while !stop.load(Ordering::Relaxed) {
                slot = (slot + 1543) % SLOTS;
                let info = device.info(SwapOffset(slot));
                let by = match info.slot {
                    Slot::Folio(folio) => folio.0 >> 24,
                    Slot::Shadow { shadow, .. } => shadow.0 >> 24,
                    Slot::Free => continue,
                    Slot::Bad => panic!("slot {slot} is bad"),
                };
                assert!((1..=THREADS).contains(&by) && u32::from(info.group.0) == by - 1, "{info:?}");
            }
        });
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                device.take_emptied(4).into_iter().for_each(|index| device.discard_done(index));
                device.drain().take(100).for_each(drop);
                thread::yield_now();
            }
        });
        let start = Instant::now();
        // On a busy machine it goes on until it has pressed.
        let pressed = || done.load(Ordering::Relaxed) > 10_000 && full.load(Ordering::Relaxed) > 0;
        while start.elapsed() < duration || !pressed() && start.elapsed() < Duration::from_secs(120) {
            assert!(device.used() <= device.capacity());
            thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let usage = device.usage();
    assert_eq!((usage.used, usage.tables, usage.clusters_free + usage.clusters_discard), (0, 0, SLOTS / 512));
    assert!(owner.iter().all(|o| o.load(Ordering::Relaxed) == 0));
    let (done, full) = (done.into_inner(), full.into_inner());
    assert!(done > 10_000 && full > 0, "{done} steps, {full} times full: the test did not press");
    println!("{done} steps, {full} times full, {} times no run", no_run.into_inner());
}
