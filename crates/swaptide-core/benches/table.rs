//! The core alone: look-up, allocation in an empty and an almost full device, exchanges, a page's
//! whole cycle.
//!
//! `cargo bench -p swaptide-core`. Against what came before: `cargo bench -p swaptide-lab`,
//! `swaptide lab swap-table`.
#![allow(missing_docs)]

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use swaptide_core::*;

const SLOTS: u32 = 1 << 18;
const BATCH: usize = 256;
const CPU: CpuId = CpuId(0);
const G: GroupId = GroupId(1);
const F: FolioId = FolioId(1);

fn device() -> SwapDevice {
    SwapDevice::new(SwapType::new(0).unwrap(), SLOTS, 1, Kind::Solid)
}

fn out(d: &SwapDevice, order: Order) -> SwapOffset {
    d.alloc_folio(CPU, order, F, G).unwrap()
}

struct Random(u64);

impl Random {
    fn below(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as usize % below
    }
}

fn lookup(c: &mut Criterion) {
    let d = device();
    for _ in 0..SLOTS / 512 {
        out(&d, Order::MAX);
    }
    let mut random = Random(1);
    let offs: Vec<SwapOffset> =
        (0..1 << 16).map(|_| SwapOffset(random.below(SLOTS as usize) as u32)).collect();
    let mut group = c.benchmark_group("look-up");
    let mut i = 0;
    group.bench_function("random in 1 GiB", |b| {
        b.iter(|| {
            i = (i + 1) % offs.len();
            d.lookup(black_box(offs[i]))
        });
    });
    group.bench_function("one slot", |b| b.iter(|| d.lookup(black_box(offs[0]))));
    group.finish();
}

/// Slots freed at random, then as many allocated, with the given percentage of the device in use.
fn alloc(c: &mut Criterion) {
    let mut group = c.benchmark_group("allocate a slot");
    group.throughput(Throughput::Elements(BATCH as u64));
    for percent in [5, 50, 95] {
        let d = device();
        let mut used: Vec<SwapOffset> =
            (0..SLOTS / 100 * percent).map(|_| out(&d, Order::ZERO)).collect();
        let mut random = Random(3);
        let mut free = |used: &mut Vec<SwapOffset>| {
            for _ in 0..BATCH {
                let off = used.swap_remove(random.below(used.len()));
                d.free(off, 1, Expect::Any).unwrap();
            }
        };
        for _ in 0..used.len() / BATCH {
            free(&mut used);
            used.extend((0..BATCH).map(|_| out(&d, Order::ZERO)));
        }
        let used = std::cell::RefCell::new(used);
        group.bench_function(format!("{percent}% used"), |b| {
            b.iter_batched(
                || free(&mut used.borrow_mut()),
                |()| used.borrow_mut().extend((0..BATCH).map(|_| out(&d, Order::ZERO))),
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

fn cycle(c: &mut Criterion) {
    let mut group = c.benchmark_group("allocate, look up, drop, look up, free");
    for (name, order) in [("4K", 0), ("64K", 4), ("2M", 9)] {
        let (d, order) = (device(), Order::new(order).unwrap());
        let n = order.pages();
        group.throughput(Throughput::Elements(n.into()));
        group.bench_function(name, |b| {
            b.iter(|| {
                let off = out(&d, order);
                assert_eq!(d.lookup(off), SlotContent::Folio(F));
                d.folio_to_shadow(off, n, F, Shadow(7), ZeroMask::None).unwrap();
                assert_ne!(d.lookup(off), SlotContent::Free);
                d.free(off, n, Expect::Shadow).unwrap();
            });
        });
    }
    group.finish();
}

struct Anyone;

impl Mover for Anyone {
    fn switch(&mut self, slots: &Move<'_>) -> bool {
        black_box(slots.each().count()) > 0
    }
}

/// Slots moved out of clusters of which every second slot was freed.
fn compact(c: &mut Criterion) {
    const USED: u32 = 64 * 512;
    let torn = || {
        let d = SwapDevice::new(SwapType::new(0).unwrap(), USED, 1, Kind::Solid);
        for i in 0..USED {
            let off = out(&d, Order::ZERO);
            d.folio_to_shadow(off, 1, F, Shadow(i), ZeroMask::None).unwrap();
        }
        (0..USED)
            .step_by(2)
            .for_each(|off| _ = d.free(SwapOffset(off), 1, Expect::Shadow).unwrap());
        d
    };
    let mut group = c.benchmark_group("compact");
    group.throughput(Throughput::Elements(u64::from(USED / 4)));
    group.bench_function("every second slot of 64 clusters free", |b| {
        b.iter_batched(
            torn,
            |d| assert_eq!(d.compact(u32::MAX, false, &mut Anyone).moved, USED / 4),
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

criterion_group!(benches, lookup, alloc, cycle, compact);
criterion_main!(benches);
