//! What one page costs on its way into compressed memory and back, and through the cipher of the
//! file device.
//!
//! Data as in the refault benchmarks: a quarter of the page is random, the rest one repeated word;
//! and text, which is harder. Pages are visited at random in a set much larger than the caches, as
//! faults do.

use std::fs::File;
use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use swaptide_store::codec::{Choice, Compressor, Packed, PackedUnit, Unpacker};
use swaptide_store::file::{Extent, ExtentSource, FileDevice};
use swaptide_store::zram::Zram;
use swaptide_store::{PAGE_SIZE, Page, Slot};

const PAGES: u32 = 1 << 15;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 ^ (self.0 >> 29)
    }
}

fn quarter_random(seed: u64) -> Page {
    let mut numbers = Random(seed);
    let mut page = [seed as u8; PAGE_SIZE];
    for word in page[..PAGE_SIZE / 4].as_chunks_mut::<8>().0 {
        *word = numbers.next().to_ne_bytes();
    }
    page
}

fn text(seed: u64) -> Page {
    const WORDS: [&[u8]; 16] = [
        b"slot ",
        b"cluster ",
        b"page",
        b" of the ",
        b"swap ",
        b"entry ",
        b"table",
        b" and ",
        b"fault",
        b" in ",
        b"memory",
        b", ",
        b"folio ",
        b"is ",
        b"shadow ",
        b"0x7f",
    ];
    let mut numbers = Random(seed);
    let mut bytes = Vec::new();
    while bytes.len() < PAGE_SIZE {
        bytes.extend_from_slice(WORDS[(numbers.next() >> 20) as usize % 16]);
    }
    bytes[..PAGE_SIZE].try_into().unwrap()
}

fn pages(c: &mut Criterion) {
    let mut group = c.benchmark_group("zram");
    group.throughput(Throughput::Bytes(PAGE_SIZE as u64));
    for (name, make) in [("quarter-random", quarter_random as fn(u64) -> Page), ("text", text)] {
        let zram = Zram::new(PAGES).unwrap();
        let mut codec = Compressor::default();
        for slot in 0..PAGES {
            zram.insert(Slot(slot), &codec.compress(&make(slot.into()))).unwrap();
        }
        let samples: Vec<Page> = (0..256).map(make).collect();
        let mut numbers = Random(3);
        group.bench_function(BenchmarkId::new("compress", name), |b| {
            b.iter(|| {
                matches!(codec.compress(&samples[numbers.next() as usize % 256]), Packed::Bytes(_))
            });
        });
        group.bench_function(BenchmarkId::new("compress-zstd", name), |b| {
            b.iter(|| {
                codec.compress_tightly(&samples[numbers.next() as usize % 256], PAGE_SIZE).is_some()
            });
        });
        let mut out = [0; PAGE_SIZE];
        let mut unpacker = Unpacker::new();
        group.bench_function(BenchmarkId::new("load", name), |b| {
            b.iter(|| {
                zram.load(
                    Slot((numbers.next() >> 20) as u32 % PAGES),
                    black_box(&mut out),
                    &mut unpacker,
                )
                .unwrap()
            });
        });
        let mut zstd = Compressor::new(Choice::Zstd);
        let tight = Zram::new(PAGES).unwrap();
        for slot in 0..PAGES {
            tight.insert(Slot(slot), &zstd.compress(&make(slot.into()))).unwrap();
        }
        group.bench_function(BenchmarkId::new("load-zstd", name), |b| {
            b.iter(|| {
                tight
                    .load(
                        Slot((numbers.next() >> 20) as u32 % PAGES),
                        black_box(&mut out),
                        &mut unpacker,
                    )
                    .unwrap()
            });
        });
        // What `insert` and `load` each do once for the packed bytes, of pages at random too.
        let packed: Vec<Vec<u8>> = (0..PAGES / 4)
            .filter_map(|slot| match codec.compress(&make(slot.into())) {
                Packed::Bytes(bytes) => Some(bytes.to_vec()),
                _ => None,
            })
            .collect();
        group.bench_function(BenchmarkId::new("checksum", name), |b| {
            b.iter(|| {
                crc32fast::hash(black_box(&packed[(numbers.next() >> 20) as usize % packed.len()]))
            });
        });
        let packed = codec.compress(&samples[0]);
        group.bench_function(BenchmarkId::new("insert", name), |b| {
            b.iter(|| zram.insert(Slot((numbers.next() >> 20) as u32 % PAGES), &packed).unwrap());
        });
    }
    group.finish();
}

fn units(c: &mut Criterion) {
    const UNIT: usize = 16;
    let mut group = c.benchmark_group("zram-unit-64K");
    group.throughput(Throughput::Bytes((UNIT * PAGE_SIZE) as u64));
    let zram = Zram::new(PAGES).unwrap();
    let mut codec = Compressor::default();
    let unit = |n: u32| {
        (0..UNIT as u64).flat_map(|i| quarter_random(u64::from(n) * 16 + i)).collect::<Vec<u8>>()
    };
    for n in 0..PAGES / UNIT as u32 {
        zram.insert_unit(Slot(n * UNIT as u32), UNIT, &codec.compress_unit(&unit(n))).unwrap();
    }
    let sample = unit(1);
    group.bench_function("compress", |b| {
        b.iter(|| matches!(codec.compress_unit(black_box(&sample)), PackedUnit::Bytes(_)))
    });
    let mut numbers = Random(4);
    let mut unpacker = Unpacker::new();
    let mut out = vec![0; UNIT * PAGE_SIZE];
    group.bench_function("load", |b| {
        b.iter(|| {
            let slot = Slot((numbers.next() >> 20) as u32 % (PAGES / UNIT as u32) * UNIT as u32);
            zram.load_range(slot, UNIT, black_box(&mut out), &mut unpacker).unwrap();
        });
    });
    group.finish();
}

/// Extents 0, 1, 2, ..., encrypted or not.
struct Endless {
    next: std::sync::atomic::AtomicU32,
    plain: bool,
}

impl ExtentSource for Endless {
    fn lease(&self) -> Option<Extent> {
        Some(Extent(self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)))
    }

    fn release(&self, _: Extent, _: bool) {}

    fn is_plain(&self, _: Extent) -> bool {
        self.plain
    }
}

fn file(c: &mut Criterion) {
    for plain in [false, true] {
        file_in_form(c, plain);
    }
}

/// What checksums of compressed memory cost: a block's is made when it is stored and looked at when
/// it is loaded.
fn checksum(c: &mut Criterion) {
    let mut group = c.benchmark_group("checksum");
    let mut codec = Compressor::default();
    for (name, page) in [("quarter-random", quarter_random(1)), ("text", text(1))] {
        if let Packed::Bytes(block) = codec.compress(&page) {
            let block = block.to_vec();
            group.bench_function(name, |b| b.iter(|| crc32fast::hash(black_box(&block))));
        }
    }
    group.finish();
}

fn file_in_form(c: &mut Criterion, plain: bool) {
    const BATCH: u32 = 64;
    let path = std::env::temp_dir().join(format!("swaptide-bench-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let device =
        FileDevice::new(file.into(), [1; 32], 1, Box::new(Endless { next: 0.into(), plain }));
    let pages: Vec<Page> = (0..u64::from(BATCH)).map(quarter_random).collect();
    let mut group = c.benchmark_group(if plain { "file-cipher-none" } else { "file" });
    group.throughput(Throughput::Bytes(u64::from(BATCH) * PAGE_SIZE as u64));
    let mut numbers = Random(5);
    let mut at = || (numbers.next() >> 20) as u32 % 64 * BATCH;
    let slots = |first: u32| (first..first + BATCH).map(Slot);
    let mut codec = Compressor::default();
    let packed: Vec<Vec<u8>> = pages
        .iter()
        .map(|page| {
            if let Packed::Bytes(bytes) = codec.compress(page) {
                bytes.to_vec()
            } else {
                page.to_vec()
            }
        })
        .collect();
    for (name, data) in [
        ("raw", pages.iter().map(Packed::Raw).collect::<Vec<_>>()),
        ("packed", packed.iter().map(|bytes| Packed::Bytes(bytes)).collect()),
    ] {
        for first in 0..64 {
            device
                .write(&slots(first * BATCH).zip(data.iter().copied()).collect::<Vec<_>>())
                .unwrap();
        }
        group.bench_function(BenchmarkId::new("write-64", name), |b| {
            b.iter(|| {
                device.write(&slots(at()).zip(data.iter().copied()).collect::<Vec<_>>()).unwrap()
            });
        });
        let mut out = pages.clone();
        group.bench_function(BenchmarkId::new("read-64", name), |b| {
            b.iter(|| device.read(&mut slots(at()).zip(&mut out).collect::<Vec<_>>()).unwrap());
        });
        group.bench_function(BenchmarkId::new("unchanged", name), |b| {
            let first = at();
            device.read(&mut slots(first).zip(&mut out).collect::<Vec<_>>()).unwrap();
            let mut i = 0;
            b.iter(|| {
                i = (i + 1) % BATCH;
                assert!(device.unchanged(Slot(first + i), &out[i as usize]));
            });
        });
        for n in [2, 4, 8, 32] {
            // Scattered over the file.
            group.bench_function(BenchmarkId::new(format!("read-{n}-scattered"), name), |b| {
                b.iter(|| {
                    device
                        .read(&mut (0..n).map(|_| Slot(at())).zip(&mut out).collect::<Vec<_>>())
                        .unwrap()
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, pages, units, checksum, file);
criterion_main!(benches);
