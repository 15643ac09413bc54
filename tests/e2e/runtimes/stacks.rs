//! Panics that unwind deep stacks which are out, in several threads, while they press on the
//! memory; and channels between them.
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;

fn mix(v: u64) -> u64 {
    let v = v.wrapping_add(0x9e3779b97f4a7c15);
    let v = (v ^ (v >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
    v ^ (v >> 27)
}

struct Frame<'a> {
    words: [u64; 120],
    key: u64,
    unwound: &'a std::cell::Cell<u64>,
}

impl Drop for Frame<'_> {
    fn drop(&mut self) {
        let words = std::hint::black_box(&self.words);
        if (0..120).any(|i| words[i] != mix(self.key.wrapping_add(i as u64))) {
            println!("FAILED: a word of frame {}", self.key);
            std::process::exit(3);
        }
        self.unwound.set(self.unwound.get() + 1);
    }
}

fn descend(key: u64, depth: u32, garbage: u64, unwound: &std::cell::Cell<u64>) -> u64 {
    let words = std::array::from_fn(|i| mix(key.wrapping_add(i as u64)));
    let frame = Frame { words, key, unwound };
    if depth == 0 {
        let piece = |i| (mix(key.wrapping_add(i)), "x".repeat(200));
        let pressure: BTreeMap<u64, String> = (0..garbage).map(piece).collect();
        panic!("{}", pressure.keys().nth(pressure.len() / 2).unwrap());
    }
    let below = descend(mix(key), depth - 1, garbage, unwound);
    below.wrapping_add(std::hint::black_box(&frame.words)[7])
}

fn main() {
    let garbage: u64 = std::env::args().nth(1).unwrap().parse().unwrap();
    std::panic::set_hook(Box::new(|_| {}));
    let (tell, said) = mpsc::channel();
    for worker in 0..4u64 {
        let tell = tell.clone();
        std::thread::Builder::new()
            .stack_size(16 << 20)
            .spawn(move || {
                let unwound = std::cell::Cell::new(0);
                let mut all = Vec::new();
                for turn in 0..3 {
                    let start = || descend(worker * 1000 + turn, 4000, garbage, &unwound);
                    let result = catch_unwind(AssertUnwindSafe(start));
                    all.push(result.unwrap_err().downcast::<String>().unwrap());
                }
                tell.send((worker, all, unwound.get())).unwrap();
            })
            .unwrap();
    }
    drop(tell);
    let mut lines: Vec<_> = said.iter().collect();
    lines.sort();
    println!("{lines:?}");
}
