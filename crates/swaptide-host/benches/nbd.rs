//! What comes through from and to an export, by the number of requests in flight.
//!
//! The server is nbdkit on this machine, keeping the data in its memory, once as fast as it can and
//! once with a delay of 1 ms for each request, as a network has it. `depth` is the number of pages
//! that a call asks for, each at a place of its own; `run` is 512 KiB in one piece. With several
//! connections the same requests are spread over them.

#[allow(dead_code)] // The tests use more of it.
#[path = "../tests/nbd/servers.rs"]
mod servers;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use servers::{Scratch, Server, have};
use swaptide_host::nbd::{Connector, LocalDialer};
use swaptide_store::PAGE_SIZE;
use swaptide_store::nbd::{Nbd, Options};

const BLOCKS: u64 = (64 << 20) / PAGE_SIZE as u64;
const RUN: usize = 512 << 10;

fn connect(url: &str) -> Nbd {
    let connector = || Connector::new(url.parse().expect("a URL")).expect("a connector");
    let (first, export) = connector().connect().unwrap_or_else(|error| panic!("{error}"));
    Nbd::new(
        export,
        Options::default(),
        Box::new(LocalDialer::new(connector(), export)),
        vec![first],
    )
}

fn transfers(c: &mut Criterion) {
    if !have("nbdkit") {
        return;
    }
    let scratch = Scratch::new("bench");
    let slow = Scratch::new("bench-slow");
    let fast = Server::nbdkit(&scratch, &["-t", "64", "memory", "64M"]);
    let slow = Server::nbdkit(
        &slow,
        &["-t", "64", "--filter=delay", "memory", "64M", "rdelay=1ms", "wdelay=1ms"],
    );
    for (name, server) in [("at-once", &fast), ("after-1ms", &slow)] {
        let mut group = c.benchmark_group(name);
        group.sample_size(20);
        for connections in [1, 4] {
            let nbd = connect(&server.url("nbd", "", &format!("&connections={connections}")));
            let filled = vec![7; (BLOCKS as usize) * PAGE_SIZE];
            nbd.write_at(0, &filled).expect("filling the export");
            let mut at = 1u64;
            let mut offset = move || {
                at = at.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (at >> 33) % BLOCKS * PAGE_SIZE as u64
            };
            for depth in [1, 64] {
                group.throughput(Throughput::Bytes((depth * PAGE_SIZE) as u64));
                let mut pages = vec![0; depth * PAGE_SIZE];
                group.bench_function(
                    BenchmarkId::new(format!("read-depth-{depth}"), format!("{connections}-conn")),
                    |b| {
                        b.iter(|| {
                            let mut places: Vec<_> =
                                pages.chunks_mut(PAGE_SIZE).map(|page| (offset(), page)).collect();
                            nbd.read_many(&mut places).expect("read");
                        });
                    },
                );
                group.bench_function(
                    BenchmarkId::new(format!("write-depth-{depth}"), format!("{connections}-conn")),
                    |b| {
                        b.iter(|| {
                            let places: Vec<_> =
                                pages.chunks(PAGE_SIZE).map(|page| (offset(), page)).collect();
                            nbd.write_many(&places).expect("write");
                        });
                    },
                );
            }
            let mut run = vec![0; RUN];
            group.throughput(Throughput::Bytes(RUN as u64));
            group.bench_function(
                BenchmarkId::new("read-run", format!("{connections}-conn")),
                |b| {
                    b.iter(|| nbd.read_at(0, &mut run).expect("read"));
                },
            );
            group.bench_function(
                BenchmarkId::new("write-run", format!("{connections}-conn")),
                |b| {
                    b.iter(|| nbd.write_at(0, &run).expect("write"));
                },
            );
        }
        group.finish();
    }
}

criterion_group!(benches, transfers);
criterion_main!(benches);
