//! A page's whole cycle, and a look-up, on the core and on the layers that came before.
//!
//! `cargo bench -p swaptide-lab`. Threads, memory and the printed table: `swaptide lab swap-table`.
#![allow(missing_docs)]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use swaptide_core::{FolioId, Shadow};
use swaptide_lab::designs::layers::{Before, Layer, SwapTable};

const SLOTS: u32 = 1 << 18;
const BATCH: u32 = 512;
const F: FolioId = FolioId(1);

fn layers() -> [(&'static str, Box<dyn Layer>); 3] {
    [
        ("scanning + trees", Box::new(Before::scanning(SLOTS, 1))),
        ("cluster lists + trees", Box::new(Before::clusters(SLOTS, 1))),
        ("swap table", Box::new(SwapTable::new(SLOTS, SLOTS, 1))),
    ]
}

fn cycle(c: &mut Criterion) {
    for (name, order) in [("4K", 0), ("64K", 4)] {
        let n = 1 << order;
        let mut group =
            c.benchmark_group(format!("allocate, look up, drop, look up, free: {name}"));
        group.throughput(Throughput::Elements(BATCH.into()));
        for (layer_name, layer) in layers() {
            let mut offs = Vec::new();
            group.bench_function(layer_name, |b| {
                b.iter(|| {
                    offs.extend((0..BATCH / n).map(|_| layer.swap_out(0, order, F).unwrap()));
                    offs.iter().for_each(|&off| assert_eq!(layer.lookup(off), Some(F)));
                    offs.iter().for_each(|&off| layer.leave(off, n, F, Shadow(7)));
                    offs.iter().for_each(|&off| assert_eq!(layer.lookup(off), None));
                    offs.drain(..).for_each(|off| layer.free(0, off, n));
                });
            });
        }
        group.finish();
    }
}

fn lookup(c: &mut Criterion) {
    let mut group = c.benchmark_group("look-up in 1 GiB");
    for (name, layer) in layers() {
        let offs: Vec<u32> =
            std::iter::from_fn(|| layer.swap_out(0, 0, F)).take(SLOTS as usize - 4096).collect();
        let mut i = 0;
        group.bench_function(name, |b| {
            b.iter(|| {
                i = (i + 7919) % offs.len();
                layer.lookup(black_box(offs[i]))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, cycle, lookup);
criterion_main!(benches);
