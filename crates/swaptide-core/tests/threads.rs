//! Many threads on one small device: every slot belongs to one owner at a time, look-ups never see
//! what was never there.
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
    let owner: &'static [AtomicU32] =
        (0..SLOTS).map(|_| AtomicU32::new(0)).collect::<Vec<_>>().leak();
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
                            assert_eq!(
                                owner[slot as usize].swap(t + 1, Ordering::Relaxed),
                                0,
                                "slot {slot} has an owner"
                            );
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
                (SlotContent::Folio(folio), true) => assert_eq!(folio, o.folio),
                (SlotContent::Shadow { shadow, zero }, false) => {
                    assert_eq!((shadow.0, zero), (o.folio.0, true))
                }
                (other, _) => panic!("{page} of {:?} (cached {}): {other:?}", o.folio, o.cached),
            }
            match next(6) {
                0 if o.cached => {
                    device
                        .folio_to_shadow(o.off, o.n, o.folio, Shadow(o.folio.0), ZeroMask::All)
                        .unwrap();
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
                            assert_eq!(
                                (freed, device.folio_release(o.off, o.n, o.folio)),
                                (0, Ok(o.n))
                            );
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
        // A reader that knows nothing: what it sees was put there by a thread.
        s.spawn(|| {
            let mut slot = 0;
            while !stop.load(Ordering::Relaxed) {
                slot = (slot + 1543) % SLOTS;
                let info = device.info(SwapOffset(slot));
                let by = match info.slot {
                    SlotContent::Folio(folio) => folio.0 >> 24,
                    SlotContent::Shadow { shadow, .. } => shadow.0 >> 24,
                    SlotContent::Free => continue,
                    SlotContent::Bad => panic!("slot {slot} is bad"),
                };
                assert!(
                    (1..=THREADS).contains(&by) && u32::from(info.group.0) == by - 1,
                    "{info:?}"
                );
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
        // On a busy machine it continues until it has pressed.
        let pressed = || done.load(Ordering::Relaxed) > 10_000 && full.load(Ordering::Relaxed) > 0;
        while start.elapsed() < duration || !pressed() && start.elapsed() < Duration::from_secs(120)
        {
            assert!(device.used() <= device.capacity());
            thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let usage = device.usage();
    assert_eq!(
        (usage.used, usage.tables, usage.clusters_free + usage.clusters_discard),
        (0, 0, SLOTS / 512)
    );
    assert!(owner.iter().all(|o| o.load(Ordering::Relaxed) == 0));
    let (done, full) = (done.into_inner(), full.into_inner());
    assert!(done > 10_000 && full > 0, "{done} steps, {full} times full: the test did not press");
    println!("{done} steps, {full} times full, {} times no run", no_run.into_inner());
}

/// A folio or what is left of it on the devices: its slots may be moved by the thread that locks
/// it.
#[derive(Default)]
struct Record {
    slots: Vec<SwapEntry>,
    folio: u32,
    cached: bool,
}

struct Records {
    all: Vec<std::sync::Mutex<Record>>,
    /// For each device and slot: whose it is, plus 1.
    user: Vec<Vec<AtomicU32>>,
    moved: AtomicU64,
    refused: AtomicU64,
}

impl Records {
    fn user(&self, entry: SwapEntry) -> &AtomicU32 {
        &self.user[entry.ty().index()][entry.offset().0 as usize]
    }
}

impl Mover for &Records {
    fn switch(&mut self, slots: &Move<'_>) -> bool {
        let mut users: Vec<u32> =
            slots.each().map(|(from, ..)| self.user(from).load(Ordering::Relaxed)).collect();
        users.dedup();
        users.sort_unstable();
        users.dedup();
        let mut locked = std::collections::BTreeMap::new();
        for user in users {
            // 0: allocated, and not yet noted by the thread that has it locked.
            let Some(Ok(record)) =
                user.checked_sub(1).map(|user| self.all[user as usize].try_lock())
            else {
                self.refused.fetch_add(1, Ordering::Relaxed);
                return false;
            };
            locked.insert(user, record);
        }
        for (from, to, info) in slots.each() {
            let user = self.user(from).swap(0, Ordering::Relaxed);
            let record =
                locked.get_mut(&user).expect("no other thread changes a locked record's slots");
            let expected = if record.cached {
                SlotContent::Folio(FolioId(record.folio))
            } else {
                SlotContent::Shadow { shadow: Shadow(record.folio), zero: false }
            };
            assert_eq!((info.slot, info.count), (expected, 1), "{from}");
            let slot = record
                .slots
                .iter_mut()
                .find(|slot| **slot == from)
                .expect("the slot is its user's");
            *slot = to;
            assert_eq!(self.user(to).swap(user, Ordering::Relaxed), 0, "{to} has a user");
            self.moved.fetch_add(1, Ordering::Relaxed);
        }
        true
    }
}

#[test]
fn slots_move_under_load() {
    stress_moves(duration(2));
}

/// The same for a minute: `./check --full` runs it.
#[test]
#[ignore = "takes a minute"]
fn slots_move_under_load_in_a_minute() {
    stress_moves(duration(60));
}

/// Folios go out, come in and are freed by four threads on two devices, while clusters are
/// compacted and the devices are taken away in turn.
fn stress_moves(duration: Duration) {
    let records = Records {
        all: (0..3000).map(|_| std::sync::Mutex::default()).collect(),
        user: (0..2).map(|_| (0..16384).map(|_| AtomicU32::new(0)).collect()).collect(),
        moved: AtomicU64::new(0),
        refused: AtomicU64::new(0),
    };
    let space = SwapSpace::new();
    for n in 0..2 {
        let device =
            SwapDevice::new(SwapType::new(n).unwrap(), 16384, THREADS as usize, Kind::Solid)
                .with_limit(10_000);
        space.add(device, 0).unwrap();
    }
    let (stop, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    let work = |t: u32| {
        let mut random = 0x1234_5678_9abc_u64 + u64::from(t) * 104_729;
        let mut next = move |below: u32| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 20) as u32 % below
        };
        while !stop.load(Ordering::Relaxed) {
            steps.fetch_add(1, Ordering::Relaxed);
            let number = next(3000);
            let mut record = records.all[number as usize].lock().unwrap();
            let Record { slots, folio, cached } = &mut *record;
            if slots.is_empty() {
                let order = [0, 0, 2][next(3) as usize];
                *folio = number << 12 | next(1 << 12);
                let Ok(entry) = space.alloc_folio(
                    TypeMask::ALL,
                    CpuId(t as u16),
                    Order::new(order).unwrap(),
                    FolioId(*folio),
                    GroupId(0),
                ) else {
                    continue;
                };
                slots.extend((0..1 << order).map(|i| entry.plus(i)));
                slots.iter().for_each(|slot| {
                    assert_eq!(records.user(*slot).swap(number + 1, Ordering::Relaxed), 0)
                });
                *cached = true;
                continue;
            }
            for slot in slots.iter() {
                let expected = if *cached {
                    SlotContent::Folio(FolioId(*folio))
                } else {
                    SlotContent::Shadow { shadow: Shadow(*folio), zero: false }
                };
                assert_eq!(space.lookup(*slot), expected, "{slot}");
            }
            let (first, n) = (slots[0], slots.len() as u32);
            let device = space.device(first.ty()).unwrap();
            let together = first.offset().0.is_multiple_of(n)
                && slots.iter().zip(0..).all(|(slot, i)| *slot == first.plus(i));
            assert!(together || !*cached, "a folio's slots stay together");
            match next(3) {
                0 if *cached => {
                    device
                        .folio_to_shadow(
                            first.offset(),
                            n,
                            FolioId(*folio),
                            Shadow(*folio),
                            ZeroMask::None,
                        )
                        .unwrap();
                    *cached = false;
                }
                1 if !*cached && together => {
                    device.shadow_to_folio(first.offset(), n, FolioId(*folio), None).unwrap();
                    *cached = true;
                }
                2 => {
                    for slot in slots.drain(..) {
                        records.user(slot).store(0, Ordering::Relaxed);
                        assert_eq!(
                            space.device(slot.ty()).unwrap().free(slot.offset(), 1, Expect::Any),
                            Ok(1)
                        );
                    }
                }
                _ => {}
            }
        }
    };
    let (mut emptied, mut swapoffs) = (0, [0u32; 2]);
    static YIELD: fn() = thread::yield_now;
    set_yield(&YIELD);
    thread::scope(|s| {
        for t in 0..THREADS {
            let work = &work;
            s.spawn(move || work(t));
        }
        // Also when a check here fails: no thread waits in vain then.
        struct Ending<'a>(&'a AtomicBool);
        impl Drop for Ending<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _ending = Ending(&stop);
        let start = Instant::now();
        let mut round = 0;
        while start.elapsed() < duration
            || swapoffs[0] == 0 && start.elapsed() < Duration::from_secs(120)
        {
            round += 1;
            for device in space.devices() {
                emptied += device.compact(2000, round % 2 == 0, &mut &records).emptied;
            }
            if round % 8 == 0 {
                let ty = SwapType::new((round / 8 % 2) as u8).unwrap();
                match space.swapoff(ty, TypeMask::ALL, &mut &records) {
                    Ok(_) => {
                        let device = space.device(ty).unwrap();
                        assert_eq!((device.used(), device.usage().tables), (0, 0));
                        device.set_allocation_enabled(true);
                        swapoffs[0] += 1;
                    }
                    Err(SpaceError::NoRoom(..) | SpaceError::Refused(..)) => swapoffs[1] += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            thread::yield_now();
        }
    });
    let mut used = 0;
    for (number, record) in records.all.iter().enumerate() {
        for slot in &record.lock().unwrap().slots {
            assert_eq!(records.user(*slot).load(Ordering::Relaxed), number as u32 + 1);
            used += 1;
        }
    }
    assert_eq!(space.used_of_capacity(TypeMask::ALL).0, used);
    let moved = records.moved.into_inner();
    println!(
        "{} steps, {moved} slots moved, {emptied} clusters emptied, swapoff {swapoffs:?}",
        steps.into_inner()
    );
    assert!(
        moved > 1000 && emptied > 0 && swapoffs[0] > 0,
        "{moved} moved, {emptied} emptied, swapoff {swapoffs:?}: it did not press"
    );
}
