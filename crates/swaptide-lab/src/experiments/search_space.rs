//! `lab search-space`: how deep, how large and how fast the swap cache is on devices of 1G to 1T.
//! (docs/linux-swap.md: "Earlier designs"; series swap-cache-search-space)
//!
//! 1 GiB of each device is in use: sixteen regions of 64 MiB spread over it for the trees, the
//! first clusters for the swap table (its allocator chooses, and where a slot lies makes no
//! difference to it). Look-ups are random and each waits for the one before, as a fault does; a
//! swap-in is an insertion over a shadow.

use crate::context::Lab;
use crate::designs::forest::{Cached, Forest, Shape};
use crate::designs::layers::{Layer, SwapTable};
use crate::experiments::allocator::only;
use crate::measure::{cpu_seconds, median};
use crate::random::Random;
use crate::report::{Curve, LabReport, Plot, Row};
use std::hint::black_box;
use swaptide_core::{FolioId, Shadow};

const REGION: u32 = 1 << 14;
const REGIONS: u32 = 16;
const CLUSTER: u32 = 512;

/// What is measured of a structure.
struct Structure {
    name: &'static str,
    levels: f64,
    nodes: f64,
    bytes_per_slot: f64,
    times: CacheTimes,
    cache: Box<dyn SwapCache>,
}

/// Nanoseconds, of each run.
#[derive(Default)]
struct CacheTimes {
    /// A look-up that waits for the one before.
    chained: Vec<f64>,
    /// One of many that do not wait for each other.
    together: Vec<f64>,
    insert: Vec<f64>,
}

/// What the trees and the table have in common here.
trait SwapCache {
    fn folio(&self, off: u32) -> u32;
    fn enter(&self, off: u32, folio: FolioId);
    fn leave(&self, off: u32, folio: FolioId);

    /// Nanoseconds for one look-up: each offset depends on the answer before. Here, so that each
    /// structure's own look-up is inlined.
    fn lookup_ns(&self, offs: &[u32]) -> f64 {
        let nothing = black_box(0);
        let start = cpu_seconds();
        let mut last = 0;
        for &off in offs {
            last = self.folio(off | (last & nothing));
        }
        black_box(last);
        (cpu_seconds() - start) * 1e9 / offs.len() as f64
    }

    /// The same when no look-up waits for another one: what a walk over a page table does, and
    /// several faults at a time.
    fn lookups_ns(&self, offs: &[u32]) -> f64 {
        let start = cpu_seconds();
        let sum = offs.iter().fold(0u32, |sum, &off| sum.wrapping_add(self.folio(off)));
        black_box(sum);
        (cpu_seconds() - start) * 1e9 / offs.len() as f64
    }
}

impl SwapCache for Forest {
    #[inline]
    fn folio(&self, off: u32) -> u32 {
        match self.lookup(off) {
            Cached::Folio(folio) => folio.0,
            _ => 0,
        }
    }
    fn enter(&self, off: u32, folio: FolioId) {
        assert!(self.insert(off, 1, folio));
    }
    fn leave(&self, off: u32, folio: FolioId) {
        assert!(self.remove(off, 1, folio, Shadow(1)));
    }
}

/// A forest whose look-ups take the tree's lock.
struct LockedForest(Forest);

impl SwapCache for LockedForest {
    #[inline]
    fn folio(&self, off: u32) -> u32 {
        match self.0.lookup_locked(off) {
            Cached::Folio(folio) => folio.0,
            _ => 0,
        }
    }
    fn enter(&self, off: u32, folio: FolioId) {
        self.0.enter(off, folio);
    }
    fn leave(&self, off: u32, folio: FolioId) {
        self.0.leave(off, folio);
    }
}

/// What measuring costs: the loops over the offsets without a look-up.
struct NoLookup;

impl SwapCache for NoLookup {
    #[inline]
    fn folio(&self, off: u32) -> u32 {
        off
    }
    fn enter(&self, _off: u32, _folio: FolioId) {}
    fn leave(&self, _off: u32, _folio: FolioId) {}
}

impl SwapCache for SwapTable {
    #[inline]
    fn folio(&self, off: u32) -> u32 {
        Layer::lookup(self, off).map_or(0, |folio| folio.0)
    }
    fn enter(&self, off: u32, folio: FolioId) {
        Layer::enter(self, off, 1, folio);
    }
    fn leave(&self, off: u32, folio: FolioId) {
        Layer::leave(self, off, 1, folio, Shadow(1));
    }
}

fn insert_ns(cache: &dyn SwapCache, offs: &[u32]) -> f64 {
    offs.iter().for_each(|&off| cache.leave(off, FolioId(off)));
    let start = cpu_seconds();
    offs.iter().for_each(|&off| cache.enter(off, FolioId(off)));
    (cpu_seconds() - start) * 1e9 / offs.len() as f64
}

/// The used slots of the trees: whole regions, evenly spread, the last one at the end.
fn regions(slots: u32, regions: u32) -> Vec<u32> {
    let all = slots / REGION;
    let used = regions.min(all);
    (0..used)
        .flat_map(|i| (0..REGION).map(move |slot| ((i + 1) * (all / used) - 1) * REGION + slot))
        .collect()
}

fn forest(shape: Shape, slots: u32, used: &[u32]) -> Forest {
    let forest = Forest::new(shape, slots);
    for &off in used {
        assert!(forest.insert(off, 1, FolioId(off)));
    }
    forest
}

fn tree(name: &'static str, forest: Forest, used: &[u32], locked: bool) -> Structure {
    let (levels, nodes) = (forest.height().into(), forest.nodes() as f64);
    let bytes_per_slot =
        (forest.dynamic_bytes() + forest.static_bytes()) as f64 / used.len() as f64;
    let cache: Box<dyn SwapCache> =
        if locked { Box::new(LockedForest(forest)) } else { Box::new(forest) };
    Structure { name, levels, nodes, bytes_per_slot, times: CacheTimes::default(), cache }
}

fn table(slots: u32, used: u32) -> (Structure, Vec<u32>) {
    let table = SwapTable::new(slots, slots, 1);
    let offs: Vec<u32> = (0..used / CLUSTER)
        .flat_map(|_| {
            let first = table.swap_out(0, 9, FolioId(0)).expect("an empty cluster");
            (first..first + CLUSTER).collect::<Vec<_>>()
        })
        .collect();
    for &off in &offs {
        SwapCache::leave(&table, off, FolioId(0));
        SwapCache::enter(&table, off, FolioId(off));
    }
    let bytes_per_slot = table.bytes() as f64 / f64::from(used);
    let nodes = table.device().usage().tables.into();
    let s = Structure {
        name: "swap table",
        levels: 1.0,
        nodes,
        bytes_per_slot,
        times: CacheTimes::default(),
        cache: Box::new(table),
    };
    (s, offs)
}

fn shuffled(mut offs: Vec<u32>) -> Vec<u32> {
    let mut random = Random::new(11);
    for i in (1..offs.len()).rev() {
        offs.swap(i, random.below(i as u32 + 1) as usize);
    }
    offs
}

const UNDER_LOCK: &str = "64M trees, own offsets, look-up takes the tree's lock";

const WHOLE: usize = 0;
const SPLIT: usize = 1;
const SMALL: usize = 2;
const LOCKED: usize = 3;
const TABLE: usize = 4;

/// Look-ups of one run.
const LOOKUPS: usize = 1 << 18;

/// Measures all structures on a device of `slots` slots with `used` regions in use; runs
/// alternate. What the loops cost by themselves is taken off every time of a look-up.
fn device(slots: u32, used: u32, runs: usize) -> Vec<Structure> {
    let used = regions(slots, used);
    let (table, table_offs) = table(slots, used.len() as u32);
    let mut all = vec![
        tree("one tree", forest(Shape::Whole, slots, &used), &used, false),
        tree("64M trees, device offsets", forest(Shape::Split, slots, &used), &used, false),
        tree("64M trees, own offsets", forest(Shape::Small, slots, &used), &used, false),
        tree(UNDER_LOCK, forest(Shape::Small, slots, &used), &used, true),
        table,
    ];
    let (tree_offs, table_offs) = (shuffled(used), shuffled(table_offs));
    for run in 0..=runs {
        let offs = &table_offs[..table_offs.len().min(LOOKUPS)];
        let alone = [NoLookup.lookup_ns(offs), NoLookup.lookups_ns(offs)];
        for (i, s) in all.iter_mut().enumerate() {
            let offs = if i == TABLE { &table_offs } else { &tree_offs };
            let offs = &offs[..offs.len().min(LOOKUPS)];
            let insert = insert_ns(&*s.cache, offs);
            // The insertion has brought the structure to the caches that can hold it.
            let (chained, together) = (s.cache.lookup_ns(offs), s.cache.lookups_ns(offs));
            // The first run warms up.
            if run > 0 {
                s.times.chained.push(chained - alone[0]);
                s.times.together.push(together - alone[1]);
                s.times.insert.push(insert);
            }
        }
    }
    all
}

fn lookup_rows(case: &str, a: &Structure, b: &Structure) -> [Row; 4] {
    let rows = |metric: &str, of: fn(&CacheTimes) -> &Vec<f64>| {
        let (before, after) = (median(of(&a.times).clone()), median(of(&b.times).clone()));
        let times = Row {
            after: Some(before / after),
            ..only(case, &format!("{metric}: times faster"), "times")
        };
        [Row::new(case, metric, "ns", before, after), times]
    };
    let [[a, b], [c, d]] = [
        rows("look-up, each waits for the one before", |t| &t.chained),
        rows("look-up, none waits", |t| &t.together),
    ];
    [a, b, c, d]
}

fn name_of(gib: u32) -> String {
    if gib < 1024 { format!("{gib}G") } else { format!("{}T", gib / 1024) }
}

/// Slots of a device of `gib` GiB. A device of 1 TiB has one slot less than the numbers allow.
fn slots_of(gib: u32) -> u32 {
    (gib << 18).min(swaptide_core::MAX_SLOTS)
}

/// KiB of nodes when every slot of 128 GiB is cached, with either key: the published slab numbers.
fn full_device(gib: u32) -> [f64; 2] {
    [Shape::Split, Shape::Small].map(|shape| {
        let slots = slots_of(gib);
        let forest = Forest::new(shape, slots);
        (0..slots).step_by(512).for_each(|off| assert!(forest.insert(off, 512, FolioId(1))));
        forest.dynamic_bytes() as f64 / 1024.0
    })
}

/// Runs the comparison for every size.
pub(crate) fn measure(lab: &Lab, quick: bool) -> LabReport {
    let sizes: &[u32] = if quick { &[1, 128] } else { &[1, 4, 16, 64, 128, 256, 1024] };
    let runs = if quick { 3 } else { 9 };
    let mut rows = Vec::new();
    let mut curves: Vec<Curve> = Vec::new();
    // What decides is how much is in use, not how large the device is.
    let used: &[(u32, &str)] =
        if quick { &[(1, "64M")] } else { &[(1, "64M"), (4, "256M"), (64, "4G"), (256, "16G")] };
    let steps = (sizes.len() + used.len() + 1) as u64;
    lab.progress.expect(steps, steps);
    for &gib in sizes {
        lab.progress.begin(&format!("a device of {}", name_of(gib)));
        let slots = slots_of(gib) & !(REGION - 1);
        let all = device(slots, REGIONS, runs);
        let size = name_of(gib);
        for (from, to) in [(SPLIT, SMALL), (WHOLE, TABLE), (SMALL, TABLE), (LOCKED, TABLE)] {
            let (a, b) = (&all[from], &all[to]);
            let case = format!("{size}: {} -> {}", a.name, b.name);
            if from != LOCKED {
                rows.push(Row::new(&case, "levels", "", a.levels, b.levels));
                rows.push(Row::new(&case, "nodes or tables for 1G used", "", a.nodes, b.nodes));
                rows.push(Row::new(
                    &case,
                    "bytes per used slot, all",
                    "B",
                    a.bytes_per_slot,
                    b.bytes_per_slot,
                ));
            }
            rows.extend(lookup_rows(&case, a, b));
            if from != LOCKED {
                let row = Row::new(
                    &case,
                    "swap-in insertion",
                    "ns",
                    median(a.times.insert.clone()),
                    median(b.times.insert.clone()),
                );
                rows.push(if from == SPLIT && gib == 128 {
                    row.shaped_like(250.74, 246.09)
                } else {
                    row
                });
            }
        }
        for (i, s) in all.iter().enumerate() {
            if curves.len() <= i {
                curves.push(Curve { name: s.name.into(), ours: i == TABLE, points: vec![] });
            }
            curves[i].points.push((f64::from(gib), median(s.times.chained.clone())));
        }
    }
    for &(regions, name) in used {
        lab.progress.begin(&format!("128G, {name} used"));
        let all = device(slots_of(128), regions, runs);
        for from in [SMALL, LOCKED] {
            let case = format!("128G, {name} used: {} -> {}", all[from].name, all[TABLE].name);
            rows.extend(lookup_rows(&case, &all[from], &all[TABLE]));
        }
    }
    let gib = if quick { 8 } else { 128 };
    lab.progress.begin(&format!("{}, every slot cached", name_of(gib)));
    let [split, small] = full_device(gib);
    let case = format!("{}, every slot cached", name_of(gib));
    let row = Row::new(&case, "tree nodes: device -> own offsets", "KiB", split, small);
    rows.push(if gib == 128 { row.same_as(303_952.0, 302_224.0) } else { row });
    rows.push(Row {
        before: Some(0.0),
        after: Some(split - small),
        seed_before: Some(0.0),
        seed_after: (gib == 128).then_some(1728.0),
        same_quantity: gib == 128,
        ..only(&case, "tree nodes saved", "KiB")
    });
    let empty = SwapTable::new(slots_of(1024), slots_of(1024), 2).bytes();
    rows.push(Row {
        after: Some(empty as f64 / 1024.0),
        ..only("1T, nothing used: swap table", "all metadata", "KiB")
    });
    LabReport {
        name: "search-space",
        title: "the swap cache as one tree, as a tree for each 64 MiB, and as the swap table; 1 \
            GiB used"
            .into(),
        rows,
        plot: Plot { x: "device, GiB".into(), y: "look-up, ns".into(), log_x: true, curves },
        notes: vec![
            "A tree's look-up takes no lock, as in the kernel; the rows that say so show a tree \
            whose one lock guards look-ups too. Offsets \
             are in random order; what they are read from is the same for all. 'each waits': the \
             next offset depends on the answer, as a \
             chain of faults does; 'none waits': as a walk over a page table does. Times are this \
             thread's CPU time, medians, less what the loop takes without a look-up. Neither side \
             takes a reference on the folio."
                .into(),
            "Same quantity as published: KiB of nodes with all of 128G cached. The published are a \
            whole machine's radix tree slab, so the \
             saving is what compares: counted here, up to two nodes for each 64 MiB tree."
                .into(),
            "Same shape only: the published 250.74 -> 246.09 s is the system time of memhog \
            filling 128G; insertion is a small part of it."
                .into(),
            "Bytes per used slot include what is there before the first slot is used (tree roots, \
            the table's directories)."
                .into(),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_deepen_with_the_device_unless_offsets_are_local() {
        for (gib, deep) in [(1, 3.0), (4, 4.0), (128, 5.0)] {
            let all = device(slots_of(gib), REGIONS, 1);
            assert_eq!(
                [WHOLE, SPLIT, SMALL, TABLE].map(|i| all[i].levels),
                [deep, deep, 3.0, 1.0],
                "{gib}G"
            );
            // Directories for all of the device, though 1 GiB of it is used.
            let most = if gib <= 4 { 8.15 } else { 8.4 };
            assert!(
                all[TABLE].bytes_per_slot < most,
                "{gib}G: {} bytes",
                all[TABLE].bytes_per_slot
            );
            assert!(all.iter().all(|s| s.times.chained[0] > 0.0
                && s.times.together[0] > 0.0
                && s.times.insert[0] > 0.0));
        }
    }

    #[test]
    fn a_tree_per_64_mib_of_a_large_device_has_two_extra_nodes() {
        let [split, small] = full_device(8);
        let trees = f64::from(slots_of(8) / REGION);
        assert_eq!(small, trees * 261.0 * 576.0 / 1024.0);
        // Those in the first GiB have one level less than the rest, or none more than needed.
        assert_eq!(split - small, (trees - 16.0) * 576.0 / 1024.0);
    }
}
