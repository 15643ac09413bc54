//! The program that `lab zswapin` measures: `swaptide lab-work`.
//!
//! Owns the workloads' shape: fill a target, push it out, then touch it in an order. Before and
//! after the touching it says a line and waits for one, so that the measuring process can look at
//! the counters in between. In several rounds the target, once filled, is pushed out and touched
//! again and again.
//!
//! A page's contents follow from its number alone, and are checked as it is touched.

use std::io::{BufRead, Write};
use std::ops::Range;
use std::time::Instant;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use swaptide_host::units::parse_bytes;

use swaptide_bench::{PAGE, PageContent, scatter};

const WORDS: usize = PAGE / 8;
/// Pages of 64 KiB.
const RANGE: usize = 16;
/// The target begins at a multiple of 2 MiB.
const ALIGN: usize = 512;

/// Arguments of the hidden subcommand.
#[derive(Debug, Clone, Args)]
pub struct LabWorkArgs {
    /// Bytes to be touched
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub target: u64,
    /// Bytes that are filled and freed in between; without, the target is paged out by a hint
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub pressure: Option<u64>,
    /// What the pages of the pressure hold [default: as the target's]
    #[arg(long, value_enum)]
    pub pressure_data: Option<PageData>,
    /// The target is shared memory
    #[arg(long)]
    pub shared: bool,
    /// Free the pressure only at the end
    #[arg(long)]
    pub hold: bool,
    /// What pages hold
    #[arg(long, value_enum)]
    pub data: PageData,
    /// The order of touches
    #[arg(long, value_enum)]
    pub order: TouchOrder,
    /// What is said of that order
    #[arg(long, value_enum)]
    pub hint: AccessHint,
    /// Times that the target is pushed out and touched
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub rounds: u32,
}

/// What pages hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PageData {
    /// The first half is one byte, which follows from the page's number; the rest is zeros
    Pattern,
    /// A quarter is noise
    Quarter,
    /// One page in six as before, the others hardly compress
    Sixth,
    /// The same with one in three
    Third,
    /// Zeros
    Zeros,
}

/// Orders of touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TouchOrder {
    /// Every page, upwards
    Seq,
    /// The first page of each 64 KiB, upwards
    Stride,
    /// The first page of each 64 KiB, in any order
    Sparse,
    /// Every page, in any order
    Full,
    /// Every page of the first quarter, from there on every eighth, upwards
    Thin,
}

/// Hints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AccessHint {
    /// Nothing is said
    None,
    /// MADV_SEQUENTIAL
    Seq,
    /// MADV_RANDOM
    Rand,
}

impl PageData {
    fn fill(self, page: &mut [u64], index: usize) {
        match self {
            PageData::Pattern => page[..WORDS / 2].fill(Self::pattern(index)),
            PageData::Quarter => PageContent::Four.fill_page(page, index),
            PageData::Sixth => Self::of_mixed(6, index).fill_page(page, index),
            PageData::Third => Self::of_mixed(3, index).fill_page(page, index),
            // Written, so that the pages are there: by way of something else, or the compiler would
            // know them zero already.
            PageData::Zeros => page.fill(std::hint::black_box(0)),
        }
    }

    fn check(self, page: &[u64], index: usize) -> bool {
        match self {
            // The published workload compares the whole page.
            PageData::Pattern => {
                let (data, rest) = page.split_at(WORDS / 2);
                data.iter().all(|word| *word == Self::pattern(index))
                    && rest.iter().all(|word| *word == 0)
            }
            PageData::Quarter => PageContent::Four.check_page(page, index),
            PageData::Sixth => Self::of_mixed(6, index).check_page(page, index),
            PageData::Third => Self::of_mixed(3, index).check_page(page, index),
            PageData::Zeros => page.iter().all(|word| *word == 0),
        }
    }

    fn pattern(index: usize) -> u64 {
        u64::from_ne_bytes([(index % 256) as u8; 8])
    }

    fn of_mixed(one_in: u64, index: usize) -> PageContent {
        // By a hash of the number: every sixth would never be the first page of its 64 KiB but in
        // every third of them.
        if (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 0xffff < 0x1_0000 / one_in {
            PageContent::Four
        } else {
            PageContent::One
        }
    }
}

impl TouchOrder {
    /// The pages of `n`, in order.
    fn pages(self, n: usize) -> Box<dyn Iterator<Item = usize>> {
        let ranges = n / RANGE;
        match self {
            TouchOrder::Seq => Box::new(0..n),
            TouchOrder::Stride => Box::new((0..ranges).map(|i| i * RANGE)),
            TouchOrder::Sparse => Box::new((0..ranges).map(move |i| scatter(i, ranges) * RANGE)),
            TouchOrder::Full => Box::new((0..n).map(move |i| scatter(i, n))),
            TouchOrder::Thin => Box::new((0..n / 4).chain((n / 4..n).step_by(8))),
        }
    }
}

/// What is said when all is touched, in each round.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Touched {
    /// Filling (in the first round), pushing out and touching.
    pub elapsed_s: f64,
    /// Touching alone.
    pub refault_s: f64,
    /// Pages touched.
    pub pages: u64,
}

/// What is said when the target is out.
pub(crate) const READY: &str = "ready";

/// Memory that nothing has touched yet, some of it with data.
struct TargetMemory {
    words: &'static mut [u64],
    first: usize,
    pages: usize,
}

impl TargetMemory {
    fn new(bytes: u64, shared: bool) -> Result<TargetMemory, String> {
        let pages = bytes as usize / PAGE;
        let len = (pages + ALIGN) * PAGE;
        let flags = libc::MAP_ANONYMOUS
            | libc::MAP_NORESERVE
            | if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        // By way of the C library, as a program would: there the run learns of it.
        // SAFETY: a new mapping where the kernel has room.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(format!("mmap of {len} bytes: {}", std::io::Error::last_os_error()));
        }
        // SAFETY: the mapping is readable and writable, zeros to begin with, of that length, and
        // unmapped only when this value is gone.
        let words =
            unsafe { std::slice::from_raw_parts_mut(start.cast::<u64>(), len / size_of::<u64>()) };
        let first = words.as_ptr().align_offset(ALIGN * PAGE);
        Ok(TargetMemory { words, first, pages })
    }

    fn of(&self, index: usize) -> Range<usize> {
        let start = self.first + index * WORDS;
        start..start + WORDS
    }

    fn fill(&mut self, data: PageData) {
        for index in 0..self.pages {
            let page = self.of(index);
            data.fill(&mut self.words[page], index);
        }
    }

    fn advise(&mut self, advice: i32) -> Result<(), String> {
        let start = self.words[self.first..].as_mut_ptr();
        // SAFETY: the range is this value's own; none of the pieces of advice used here changes
        // what it holds.
        match unsafe { libc::madvise(start.cast(), self.pages * PAGE, advice) } {
            0 => Ok(()),
            _ => Err(format!("madvise({advice}): {}", std::io::Error::last_os_error())),
        }
    }
}

impl Drop for TargetMemory {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, to which there is no reference any more.
        unsafe { libc::munmap(self.words.as_mut_ptr().cast(), size_of_val(self.words)) };
    }
}

/// Runs it. Exit status: 0, or 3 where something is wrong.
pub fn main(args: &LabWorkArgs) -> u8 {
    match work(args) {
        Ok(()) => 0,
        Err(message) => {
            eprintln!("swaptide lab-work: {message}");
            3
        }
    }
}

fn work(args: &LabWorkArgs) -> Result<(), String> {
    let mut begin = Instant::now();
    let mut target = TargetMemory::new(args.target, args.shared)?;
    target.fill(args.data);
    for round in 0..args.rounds {
        let mut held = None;
        if let Some(bytes) = args.pressure {
            let mut pressure = TargetMemory::new(bytes, false)?;
            pressure.fill(args.pressure_data.unwrap_or(args.data));
            held = args.hold.then_some(pressure);
        }
        match args.hint {
            _ if round > 0 => {}
            AccessHint::None => {}
            AccessHint::Seq => target.advise(libc::MADV_SEQUENTIAL)?,
            AccessHint::Rand => target.advise(libc::MADV_RANDOM)?,
        }
        if args.pressure.is_none() {
            target.advise(libc::MADV_PAGEOUT)?;
        }
        let prepared = begin.elapsed();
        say(READY)?;
        begin = Instant::now();
        let mut pages = 0;
        for index in args.order.pages(target.pages) {
            if !args.data.check(&target.words[target.of(index)], index) {
                return Err(format!(
                    "page {index} of {} does not hold what was written to it",
                    target.pages
                ));
            }
            pages += 1;
        }
        let refault = begin.elapsed();
        let touched = Touched {
            elapsed_s: (prepared + refault).as_secs_f64(),
            refault_s: refault.as_secs_f64(),
            pages,
        };
        say(&serde_json::to_string(&touched).map_err(|e| e.to_string())?)?;
        begin = Instant::now();
        drop(held);
    }
    Ok(())
}

/// Says a line and waits for the answer.
fn say(line: &str) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .map_err(|e| format!("no reader on standard output: {e}"))?;
    std::io::stdin()
        .lock()
        .read_line(&mut String::new())
        .map(drop)
        .map_err(|e| format!("no answer on standard input: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_touch_what_their_names_say() {
        let n = 4096;
        let sorted = |order: TouchOrder| {
            let mut pages: Vec<usize> = order.pages(n).collect();
            pages.sort_unstable();
            pages
        };
        let each: Vec<usize> = (0..n).collect();
        let first: Vec<usize> = (0..n / RANGE).map(|i| i * RANGE).collect();
        assert_eq!((sorted(TouchOrder::Seq), sorted(TouchOrder::Full)), (each.clone(), each));
        assert_eq!(
            (sorted(TouchOrder::Stride), sorted(TouchOrder::Sparse)),
            (first.clone(), first.clone())
        );
        assert!(TouchOrder::Sparse.pages(n).zip(&first).filter(|(a, b)| a == *b).count() < 10);
    }

    #[test]
    fn every_page_of_every_data_is_told_from_the_next() {
        for data in [PageData::Pattern, PageData::Quarter, PageData::Sixth, PageData::Third] {
            let mut memory =
                TargetMemory::new(64 * PAGE as u64, data == PageData::Quarter).unwrap();
            memory.fill(data);
            for index in 0..64 {
                let page = &memory.words[memory.of(index)];
                assert!(data.check(page, index), "{data:?} {index}");
                assert!(!data.check(page, index + 1), "{data:?} {index}");
            }
            assert_eq!(memory.words[memory.first..].as_ptr() as usize % (ALIGN * PAGE), 0);
        }
    }

    #[test]
    fn one_page_in_six_of_mixed_data_compresses() {
        for step in [1, RANGE] {
            let n = (0..65_536)
                .step_by(step)
                .filter(|index| PageData::of_mixed(6, *index) == PageContent::Four)
                .count()
                * step;
            assert!((65_536 / 8..65_536 / 4).contains(&n), "{n} with a step of {step}");
        }
    }
}
