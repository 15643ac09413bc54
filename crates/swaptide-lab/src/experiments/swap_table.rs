//! `lab swap-table`: a page's whole way through the swap layer, by 1 to 32 threads.
//! (docs/linux-swap.md, "Swap table")
//!
//! usemem reduced to the swap layer: each thread takes slots for all its pages (allocate, enter the
//! cache), looks each up, lets the folios go (shadows stay), looks each up again, frees all. Three
//! layers take turns in every run, so that a machine that grows slower does so for all. The BGSAVE
//! case: after a fork every slot has a count of 2; parent and child fault on each page in turn.

use crate::context::Lab;
use crate::designs::forest::{Cached, Forest, Shape};
use crate::designs::layers::{Before, Layer, SwapTable};
use crate::experiments::allocator::only;
use crate::measure::{cpu_seconds, median};
use crate::random::Random;
use crate::report::{Curve, LabReport, Plot, Row};
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;
use swaptide_core::{FolioId, Shadow};

const GIB: u32 = 1 << 18;

/// Seconds of one thread's phases.
#[derive(Clone, Copy, Default)]
struct Phases {
    out: f64,
    lookup: f64,
    leave: f64,
    free: f64,
}

fn timed(total: &mut f64, f: impl FnOnce()) {
    let start = cpu_seconds();
    f();
    *total += cpu_seconds() - start;
}

/// Cycles of one run: long enough that starting the threads does not show.
fn rounds(order: usize) -> u32 {
    if order == 0 { 4 } else { 16 }
}

/// One thread's share: `pages` pages in folios of `order`, again and again.
fn work<L: Layer + ?Sized>(layer: &L, cpu: usize, pages: u32, order: usize) -> Phases {
    let mut phases = Phases::default();
    (0..rounds(order)).for_each(|_| round(layer, cpu, pages, order, &mut phases));
    phases
}

fn round<L: Layer + ?Sized>(layer: &L, cpu: usize, pages: u32, order: usize, phases: &mut Phases) {
    let n = 1u32 << order;
    let mut offs = Vec::with_capacity((pages / n) as usize);
    let folio = |i: usize| FolioId((cpu << 24 | i) as u32);
    timed(&mut phases.out, || {
        (0..pages / n).for_each(|i| {
            offs.push(layer.swap_out(cpu, order, folio(i as usize)).expect("the device has room"))
        });
    });
    let look = |found: bool| {
        for (i, &off) in offs.iter().enumerate() {
            for slot in off..off + n {
                assert_eq!(layer.lookup(slot), found.then(|| folio(i)), "slot {slot}");
            }
        }
    };
    timed(&mut phases.lookup, || look(true));
    timed(&mut phases.leave, || {
        offs.iter().enumerate().for_each(|(i, &off)| layer.leave(off, n, folio(i), Shadow(7)))
    });
    timed(&mut phases.lookup, || look(false));
    timed(&mut phases.free, || offs.iter().for_each(|&off| layer.free(cpu, off, n)));
}

/// One run of all threads: pages a second, and ns a page of each phase (mean of the threads' own
/// times).
fn run<L: Layer + ?Sized>(layer: &L, threads: usize, pages: u32, order: usize) -> (f64, Phases) {
    let share = (pages / threads as u32) & !511;
    let barrier = Barrier::new(threads + 1);
    let mut start = Instant::now();
    let phases: Vec<Phases> = std::thread::scope(|s| {
        let spawn = |cpu| {
            let barrier = &barrier;
            s.spawn(move || {
                barrier.wait();
                work(layer, cpu, share, order)
            })
        };
        let handles: Vec<_> = (0..threads).map(spawn).collect();
        start = Instant::now();
        barrier.wait();
        handles.into_iter().map(|handle| handle.join().expect("a thread of the run")).collect()
    });
    let wall = start.elapsed().as_secs_f64();
    let done = f64::from(share * threads as u32 * rounds(order));
    let ns = |f: fn(&Phases) -> f64| phases.iter().map(f).sum::<f64>() * 1e9 / done;
    let per_page = Phases {
        out: ns(|p| p.out),
        lookup: ns(|p| p.lookup) / 2.0,
        leave: ns(|p| p.leave),
        free: ns(|p| p.free),
    };
    (done / wall, per_page)
}

/// Many runs of one layer.
#[derive(Default)]
struct PhaseTimes {
    speed: Vec<f64>,
    out: Vec<f64>,
    lookup: Vec<f64>,
    leave: Vec<f64>,
    free: Vec<f64>,
    waits: Vec<f64>,
}

/// The three layers with room for `slots` slots on `cpus` CPUs.
fn layers(slots: u32, cpus: usize) -> [Box<dyn Layer>; 3] {
    crate::measure::use_yield();
    [
        Box::new(Before::scanning(slots, cpus)),
        Box::new(Before::clusters(slots, cpus)),
        Box::new(SwapTable::new(slots, slots, cpus)),
    ]
}

const NAMES: [&str; 3] = ["scanning + trees", "cluster lists + trees", "swap table"];
const SCANNING: usize = 0;
const CLUSTERS: usize = 1;
const TABLE: usize = 2;

fn sweep(threads: usize, pages: u32, order: usize, runs: usize) -> [PhaseTimes; 3] {
    // Room for what lies in CPUs' current clusters and slot caches.
    let layers = layers(pages * 2 + threads as u32 * 8192, threads);
    let mut all: [PhaseTimes; 3] = Default::default();
    for i in 0..=runs {
        for (layer, to) in layers.iter().zip(&mut all) {
            let before = layer.waits();
            let (speed, phases) = run(&**layer, threads, pages, order);
            // The first run makes tables and nodes.
            if i > 0 {
                to.speed.push(speed / 1e6);
                to.out.push(phases.out);
                to.lookup.push(phases.lookup);
                to.leave.push(phases.leave);
                to.free.push(phases.free);
                to.waits.push((layer.waits() - before) as f64);
            }
        }
    }
    all
}

/// The fork case: ns a page of everything, and of look-ups alone.
fn bgsave<L: Layer + ?Sized>(layer: &L, pages: u32) -> (f64, f64) {
    let folio = |i: usize| FolioId(i as u32);
    let mut offs: Vec<u32> =
        (0..pages).map(|i| layer.swap_out(0, 0, folio(i as usize)).expect("room")).collect();
    offs.iter().enumerate().for_each(|(i, &off)| layer.leave(off, 1, folio(i), Shadow(7)));
    // Faults come in no order.
    let mut random = Random::new(23);
    (1..offs.len()).rev().for_each(|i| offs.swap(i, random.below(i as u32 + 1) as usize));
    let (mut all, mut lookups) = (0.0, 0.0);
    timed(&mut all, || offs.iter().for_each(|&off| layer.dup(off, 1)));
    let look = || offs.iter().for_each(|&off| _ = black_box(layer.lookup(off)));
    // The parent faults: not cached, comes in, and the entry's count falls to 1: the folio stays
    // for the child.
    timed(&mut lookups, look);
    timed(&mut all, || offs.iter().enumerate().for_each(|(i, &off)| layer.enter(off, 1, folio(i))));
    timed(&mut all, || offs.iter().for_each(|&off| layer.put(off, 1)));
    // The child faults: cached. Then the last user is gone.
    timed(&mut lookups, look);
    timed(&mut all, || offs.iter().for_each(|&off| layer.free(0, off, 1)));
    let per_page = |seconds: f64| seconds * 1e9 / f64::from(pages);
    (per_page(all + lookups), per_page(lookups))
}

/// Bytes per used slot, static (before the first slot) and dynamic, with `pages` slots of a device
/// of that size used.
fn metadata(which: usize, pages: u32, order: usize) -> (f64, f64) {
    let layer = layers(pages, 1).into_iter().nth(which).expect("three layers");
    let fixed = layer.bytes() as f64;
    let mut used = 0u32;
    while let Some(off) = layer.swap_out(0, order, FolioId(used)) {
        layer.leave(off, 1 << order, FolioId(used), Shadow(1));
        used += 1 << order;
    }
    assert!(used >= pages - 512, "{used} of {pages} slots used");
    (fixed / f64::from(pages), (layer.bytes() as f64 - fixed) / f64::from(used))
}

/// ns for one allocation of a slot when `percent` of the device are in use, freed and taken at
/// random.
fn churn<L: Layer + ?Sized>(layer: &L, slots: u32, percent: u32, rounds: usize) -> f64 {
    const BATCH: usize = 256;
    let wanted = (u64::from(slots) * u64::from(percent) / 100) as usize;
    let mut offs: Vec<u32> =
        (0..wanted).map(|_| layer.swap_out(0, 0, FolioId(1)).expect("room")).collect();
    let mut random = Random::new(31);
    let mut ns = Vec::new();
    // Until the holes are spread as they will stay.
    let warm = wanted / BATCH;
    for round in 0..warm + rounds {
        for _ in 0..BATCH {
            let off = offs.swap_remove(random.below(offs.len() as u32) as usize);
            layer.free(0, off, 1);
        }
        let mut seconds = 0.0;
        timed(&mut seconds, || {
            (0..BATCH).for_each(|_| {
                offs.push(layer.swap_out(0, 0, FolioId(1)).expect("as many as freed"))
            })
        });
        if round >= warm {
            ns.push(seconds * 1e9 / BATCH as f64);
        }
    }
    offs.into_iter().for_each(|off| layer.free(0, off, 1));
    median(ns)
}

/// Look-ups a second, in millions, of `threads` threads that each look up all slots of one device
/// in random order, `rounds` times.
fn lookups<C: Sync>(
    cache: &C,
    threads: usize,
    rounds: usize,
    offs: &[u32],
    folio: impl Fn(&C, u32) -> u32 + Sync,
) -> f64 {
    let barrier = Barrier::new(threads + 1);
    let mut start = Instant::now();
    std::thread::scope(|s| {
        let spawn = |t: usize| {
            let (barrier, folio) = (&barrier, &folio);
            s.spawn(move || {
                barrier.wait();
                // Each begins somewhere else.
                let (a, b) = offs.split_at(offs.len() / threads * t);
                for part in std::iter::repeat_n([b, a], rounds).flatten() {
                    black_box(
                        part.iter().fold(0u32, |sum, &off| sum.wrapping_add(folio(cache, off))),
                    );
                }
            })
        };
        let handles: Vec<_> = (0..threads).map(spawn).collect();
        start = Instant::now();
        barrier.wait();
        handles.into_iter().for_each(|handle| handle.join().expect("a thread of the run"));
    });
    (threads * rounds * offs.len()) as f64 / start.elapsed().as_secs_f64() / 1e6
}

/// Look-ups alone, by 1 to 32 threads: trees, trees whose look-ups take the lock, the table. About
/// `all` look-ups in a run, by all threads together: enough for the start of the threads not to
/// show.
fn lookup_rows(rows: &mut Vec<Row>, threads: &[usize], pages: u32, all: usize, runs: usize) {
    let forest = Forest::new(Shape::Small, pages);
    let table = SwapTable::new(pages, pages, 1);
    let mut offs: Vec<u32> = Vec::new();
    while let Some(off) = table.swap_out(0, 9, FolioId(7)) {
        assert!(forest.insert(off, 512, FolioId(7)));
        offs.extend(off..off + 512);
    }
    let mut random = Random::new(41);
    (1..offs.len()).rev().for_each(|i| offs.swap(i, random.below(i as u32 + 1) as usize));
    let folio = |cached| if let Cached::Folio(folio) = cached { folio.0 } else { 0 };
    for &t in threads {
        let mut speed: [Vec<f64>; 3] = Default::default();
        let n = (all / (t * offs.len())).max(1);
        for run in 0..=runs {
            let found = [
                lookups(&forest, t, n, &offs, |f, off| folio(f.lookup(off))),
                lookups(&forest, t, n, &offs, |f, off| folio(f.lookup_locked(off))),
                lookups(&table, t, n, &offs, |d, off| {
                    Layer::lookup(d, off).map_or(0, |folio| folio.0)
                }),
            ];
            if run > 0 {
                speed.iter_mut().zip(found).for_each(|(to, value)| to.push(value));
            }
        }
        let [free, locked, ours] = speed.map(median);
        let s = if t == 1 { "" } else { "s" };
        let row = |from, before| {
            Row::new(format!("{t} thread{s}: {from}"), "random look-ups", "M/s", before, ours)
        };
        rows.push(row("64M trees, look-up without lock", free));
        rows.push(row("64M trees, look-up takes the tree's lock", locked));
    }
}

/// Runs everything.
pub(crate) fn measure(lab: &Lab, quick: bool) -> LabReport {
    crate::measure::use_yield();
    let (pages, runs) = if quick { (GIB / 16, 3) } else { (GIB / 2, 9) };
    let threads: &[usize] = if quick { &[1, 2, 8] } else { &[1, 2, 4, 8, 16, 32] };
    let mut rows = Vec::new();
    let mut curves: Vec<Curve> = NAMES
        .iter()
        .enumerate()
        .map(|(i, &name)| Curve { name: name.into(), ours: i == TABLE, points: vec![] })
        .collect();
    lab.progress.expect(2 * threads.len() as u64, 2 * threads.len() as u64);
    for &t in threads {
        for order in [0, 4] {
            lab.progress.begin(&format!("{t} threads, order {order}"));
            let all = sweep(t, pages, order, runs);
            let folios = if order == 0 { "4K" } else { "64K" };
            let s = if t == 1 { "" } else { "s" };
            let mid =
                |f: fn(&PhaseTimes) -> &Vec<f64>, which: usize| median(f(&all[which]).clone());
            for from in [CLUSTERS, SCANNING] {
                let case = format!("{t} thread{s}, {folios}: {}", NAMES[from]);
                let row = Row::new(
                    &case,
                    "whole cycle",
                    "Mpages/s",
                    mid(|r| &r.speed, from),
                    mid(|r| &r.speed, TABLE),
                );
                rows.push(if t == 32 && from == CLUSTERS && order == 0 {
                    row.shaped_like(4775.18, 6381.43)
                } else {
                    row
                });
                if from == SCANNING {
                    continue;
                }
                rows.push(Row::new(
                    &case,
                    "allocate and cache",
                    "ns/page",
                    mid(|r| &r.out, from),
                    mid(|r| &r.out, TABLE),
                ));
                rows.push(Row::new(
                    &case,
                    "look up",
                    "ns/page",
                    mid(|r| &r.lookup, from),
                    mid(|r| &r.lookup, TABLE),
                ));
                rows.push(Row::new(
                    &case,
                    "folio to shadow",
                    "ns/page",
                    mid(|r| &r.leave, from),
                    mid(|r| &r.leave, TABLE),
                ));
                let row = Row::new(
                    &case,
                    "free",
                    "ns/page",
                    mid(|r| &r.free, from),
                    mid(|r| &r.free, TABLE),
                );
                rows.push(if t == 32 && order == 0 {
                    row.shaped_like(174_492.0, 132_122.0)
                } else {
                    row
                });
                rows.push(Row::new(
                    &case,
                    "lock waits",
                    "a run",
                    mid(|r| &r.waits, from),
                    mid(|r| &r.waits, TABLE),
                ));
            }
            if order == 0 {
                (0..3).for_each(|i| curves[i].points.push((t as f64, mid(|r| &r.speed, i))));
            }
        }
    }
    lookup_rows(&mut rows, threads, pages, 1 << 23, runs);
    bgsave_rows(&mut rows, pages, runs);
    memory_rows(&mut rows, pages);
    churn_rows(&mut rows, pages, if quick { 50 } else { 400 });
    LabReport {
        name: "swap-table",
        title: "a page's way through the swap layer: allocate, cache, look up, drop, look up, \
            free"
            .into(),
        rows,
        plot: Plot {
            x: "threads".into(),
            y: "whole cycle, million pages a second (4K)".into(),
            log_x: true,
            curves,
        },
        notes: vec![
            "before: 'cluster lists + trees' is what the series started from (cluster allocator, \
            static map and groups, a tree with its \
             own offsets for each 64 MiB); 'scanning + trees' is the layer before all three \
             series. after: swaptide's core."
                .into(),
            "Same shape only: the published MB/s is usemem on 31 processes with the whole kernel \
            around it (faults, reclaim, writes), and its \
             free latency is an munmap of 1 GiB in us; here the swap layer is alone, so ratios are \
             larger. BGSAVE: Redis requests/s."
                .into(),
            "A run's phases, BGSAVE and single allocations are in CPU time of their threads, the \
            whole cycle in elapsed time. \
             Look-ups of a tree take no lock unless the row says so; all locks are the same spin \
             lock."
                .into(),
            "Same quantity: metadata bytes per slot (Linux 6.17: 3 static, 8 to 9 dynamic before; \
            8 dynamic at the end of the series)."
                .into(),
        ],
    }
}

fn bgsave_rows(rows: &mut Vec<Row>, pages: u32, runs: usize) {
    let layers = layers(pages * 2, 1);
    let mut all: [(Vec<f64>, Vec<f64>); 3] = Default::default();
    for i in 0..=runs {
        for (layer, to) in layers.iter().zip(&mut all) {
            let (total, lookups) = bgsave(&**layer, pages);
            if i > 0 {
                to.0.push(total);
                to.1.push(lookups);
            }
        }
    }
    let [_, before, after] = all.map(|(total, lookups)| (median(total), median(lookups)));
    let case = "BGSAVE, counts of 2: cluster lists + trees";
    let speed = |ns: f64| 1e3 / ns;
    rows.push(
        Row::new(case, "both faults", "Mpages/s", speed(before.0), speed(after.0))
            .shaped_like(271_421.15, 290_441.79),
    );
    rows.push(Row::new(case, "look-ups", "ns/page", before.1, after.1));
    rows.push(Row::new(
        case,
        "share of look-ups",
        "%",
        before.1 / before.0 * 100.0,
        after.1 / after.0 * 100.0,
    ));
}

fn memory_rows(rows: &mut Vec<Row>, pages: u32) {
    for (from, order, seed) in
        [(CLUSTERS, 0, Some((3.0, 8.0))), (SCANNING, 0, None), (CLUSTERS, 4, None)]
    {
        let (before, after) = (metadata(from, pages, order), metadata(TABLE, pages, order));
        let case =
            format!("all slots used, {}: {}", if order == 0 { "4K" } else { "64K" }, NAMES[from]);
        let row = |metric, a, b| Row::new(&case, metric, "B/slot", a, b);
        let (fixed, used, sum) = (
            row("metadata, static", before.0, after.0),
            row("metadata, dynamic", before.1, after.1),
            row("metadata, all", before.0 + before.1, after.0 + after.1),
        );
        match seed {
            Some((s, d)) => {
                rows.extend([fixed.same_as(s, 0.0), used.same_as(d, 8.0), sum.same_as(s + d, 8.0)])
            }
            None => rows.extend([fixed, used, sum]),
        }
    }
}

fn churn_rows(rows: &mut Vec<Row>, slots: u32, rounds: usize) {
    let slots = slots.max(GIB / 4);
    let layers = layers(slots, 1);
    let ns = |which: usize, percent| churn(&*layers[which], slots, percent, rounds);
    let [empty, full] = [5, 95].map(|percent| {
        let case = format!("{percent}% of the slots used, freed and taken at random");
        let (before, after) = (ns(CLUSTERS, percent), ns(TABLE, percent));
        rows.push(Row::new(case, "allocate one slot", "ns", before, after));
        (before, after)
    });
    rows.push(Row {
        after: Some(full.1 / empty.1),
        before: Some(full.0 / empty.0),
        ..only("95% against 5%", "allocate one slot", "times")
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_ends_as_empty_as_it_began() {
        for (i, layer) in layers(1 << 16, 4).iter().enumerate() {
            for order in [0, 4] {
                let (speed, phases) = run(&**layer, 4, 1 << 14, order);
                assert!(speed > 0.0 && phases.out > 0.0 && phases.free > 0.0, "{}", NAMES[i]);
            }
            let (total, lookups) = bgsave(&**layer, 1 << 12);
            assert!(total > lookups && lookups > 0.0);
            assert!(churn(&**layer, 1 << 14, 90, 3) > 0.0);
            // All of it was freed: the device can be filled whole.
            let n = (0..).map_while(|f| layer.swap_out(0, 0, FolioId(f))).count();
            assert!(n >= (1 << 16) - 1024, "{}: {n}", NAMES[i]);
        }
    }

    #[test]
    fn look_ups_of_many_threads_are_all_counted() {
        let mut rows = Vec::new();
        lookup_rows(&mut rows, &[1, 3], 1 << 16, 1 << 18, 1);
        assert_eq!(rows.len(), 4);
        assert!(
            rows.iter().all(
                |row| row.before.is_some_and(|b| b > 0.0) && row.after.is_some_and(|a| a > 0.0)
            )
        );
    }

    #[test]
    fn metadata_size_matches_designs() {
        let pages = 1 << 17;
        for (which, fixed, used) in [
            (SCANNING, 3.0..3.4, 9.0..9.2),
            (CLUSTERS, 3.0..3.2, 9.0..9.2),
            (TABLE, 0.0..0.1, 8.0..8.2),
        ] {
            let found = metadata(which, pages, 0);
            assert!(
                fixed.contains(&found.0) && used.contains(&found.1),
                "{}: {found:?}",
                NAMES[which]
            );
        }
    }
}
