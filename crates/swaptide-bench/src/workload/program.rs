//! The benchmark's program: `swaptide bench-work`.
//!
//! Owns the data pattern and the phases. The process is small on purpose: one allocation, no other
//! table, so that what is measured is the swapping of that allocation and nothing else.
//!
//! Invariants:
//! 1. Every word of the data follows from the page's index and the word's place alone, so any page
//!    can be checked at any time and no two pages are alike.
//! 2. How far a page compresses with lz4 is chosen ([`PageContent`]); the contents differ in
//!    nothing else.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use swaptide_host::units::parse_bytes;

use crate::workload::phases::{PAGE, PageContent, Phase, PhaseResult, WORDS, scatter};
use crate::workload::redis::Server;
use crate::workload::serial::SerialPart;

/// Pages between two looks at the clock, in a phase with a time limit.
const PAGES_PER_LOOK: usize = 256;
/// Forks of one phase.
const FORKS_PER_PHASE: u64 = 10;

/// Arguments of the hidden subcommand.
#[derive(Debug, Clone, Args)]
pub struct BenchWorkArgs {
    /// Bytes of data
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub data: u64,
    /// What to do, in order
    #[arg(long, value_enum, value_delimiter = ',', required = true)]
    pub phase: Vec<Phase>,
    /// How far the data compresses
    #[arg(long, value_enum, default_value_t = PageContent::Four)]
    pub ratio: PageContent,
    /// Do the list of phases this many times
    #[arg(long, default_value_t = 1)]
    pub repeat: u32,
    /// Touches in a random phase
    #[arg(long, default_value_t = 60_000)]
    pub touches: usize,
    /// End a phase early after this many seconds
    #[arg(long, default_value_t = 600)]
    pub seconds_cap: u64,
    /// Threads, each with its part of the data
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: u16,
    /// Also measure how long each touch of a random phase takes
    #[arg(long)]
    pub latency: bool,
    /// Join this cgroup first (its cgroup.procs)
    #[arg(long)]
    pub join: Option<PathBuf>,
    /// A directory for the workload's files, which the caller removes
    #[arg(long, value_name = "DIR")]
    pub scratch: Option<PathBuf>,
    /// After the last phase wait until standard input ends
    #[arg(long)]
    pub hold: bool,
    /// Write the results here instead of to standard output
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Page-aligned anonymous memory. A zeroed allocation this large is a fresh mapping that nothing
/// has touched yet.
struct WorkData {
    content: PageContent,
    words: Vec<u64>,
    start: usize,
    pages: usize,
}

impl WorkData {
    fn new(bytes: u64, content: PageContent) -> Result<Self, String> {
        let pages = usize::try_from(bytes).map_err(|_| "--data: too large".to_owned())? / PAGE;
        if pages == 0 {
            return Err("--data: less than a page".into());
        }
        let words = vec![0u64; (pages + 1) * WORDS];
        let start = words.as_ptr().align_offset(PAGE);
        Ok(WorkData { content, words, start, pages })
    }

    /// Takes as long as the hint; what remains afterwards has a second.
    fn push_out(&mut self) -> Result<PhaseResult, String> {
        let begin = Instant::now();
        let data = &mut self.words[self.start..][..self.pages * WORDS];
        // SAFETY: the range is this slice's; the hint changes no byte of it.
        if unsafe { libc::madvise(data.as_mut_ptr().cast(), size_of_val(data), libc::MADV_PAGEOUT) }
            != 0
        {
            return Err(format!("madvise(MADV_PAGEOUT): {}", std::io::Error::last_os_error()));
        }
        let seconds = begin.elapsed().as_secs_f64();
        std::thread::sleep(Duration::from_secs(1));
        let pages = self.pages as u64;
        Ok(PhaseResult::new(Phase::Out, pages, seconds))
    }

    fn run(&mut self, phase: Phase, pace: &Pace) -> Result<PhaseResult, String> {
        match phase {
            Phase::Out => return self.push_out(),
            Phase::Fork => return forks(),
            _ => {}
        }
        let content = self.content;
        let words = &mut self.words[self.start..][..self.pages * WORDS];
        let per_thread = self.pages.div_ceil(pace.threads);
        let begin = Instant::now();
        let parts: Vec<_> = std::thread::scope(|scope| {
            let work = |(at, words)| {
                let part = DataPart { content, first: at * per_thread, words };
                move || part.run(phase, pace, begin)
            };
            let mut parts = words.chunks_mut(per_thread * WORDS).enumerate().map(work);
            // The first part is this thread's: one thread starts no other.
            let own = parts.next();
            let others: Vec<_> = parts.map(|part| scope.spawn(part)).collect();
            let own = own.map(|part| part());
            let join = |other: std::thread::ScopedJoinHandle<'_, _>| {
                other.join().unwrap_or_else(|_| Err("a thread of the workload panicked".into()))
            };
            own.into_iter().chain(others.into_iter().map(join)).collect()
        });
        let seconds = begin.elapsed().as_secs_f64();
        let mut all = TouchResult::default();
        for part in parts {
            let part = part?;
            all.pages += part.pages;
            all.capped |= part.capped;
            all.touch_ns.extend(part.touch_ns);
        }
        let TouchResult { pages, capped, touch_ns } = all;
        let p99_us = p99_us(touch_ns);
        Ok(PhaseResult { capped, p99_us, ..PhaseResult::new(phase, pages, seconds) })
    }
}

/// How a phase is done.
struct Pace {
    /// In a random phase, of all threads together.
    touches: usize,
    cap: Duration,
    threads: usize,
    latency: bool,
}

/// One thread's part of the data, and what it does with it.
struct DataPart<'a> {
    content: PageContent,
    /// Index of its first page in all of the data.
    first: usize,
    words: &'a mut [u64],
}

#[derive(Default)]
struct TouchResult {
    pages: u64,
    capped: bool,
    /// Of each touch, where it was asked for.
    touch_ns: Vec<u32>,
}

impl DataPart<'_> {
    fn run(mut self, phase: Phase, pace: &Pace, begin: Instant) -> Result<TouchResult, String> {
        let n = self.words.len() / WORDS;
        let is_random = matches!(phase, Phase::Random | Phase::Again | Phase::Mixed);
        let touches = if is_random { (pace.touches / pace.threads).clamp(1, n) } else { n };
        let is_timed = is_random && pace.latency;
        let mut touch_ns = Vec::with_capacity(if is_timed { touches } else { 0 });
        let mut done = 0;
        while done < touches {
            if done % PAGES_PER_LOOK == 0 && begin.elapsed() >= pace.cap {
                break;
            }
            let place = if is_random { scatter(done, n) } else { done };
            let touched = is_timed.then(Instant::now);
            let right = self.touch(phase, place, done)?;
            touch_ns.extend(
                touched.map(|at| u32::try_from(at.elapsed().as_nanos()).unwrap_or(u32::MAX)),
            );
            if !right {
                return Err(format!(
                    "page {} does not hold what was written to it (phase {phase:?}, page {place} \
                    of {n} of its thread)",
                    self.first + place
                ));
            }
            done += 1;
        }
        Ok(TouchResult { pages: done as u64, capped: done < touches, touch_ns })
    }

    /// Touches a page, the `done`th of the phase. Whether it held what it should.
    fn touch(&mut self, phase: Phase, place: usize, done: usize) -> Result<bool, String> {
        let (content, index) = (self.content, self.first + place);
        let page = &mut self.words[place * WORDS..][..WORDS];
        Ok(match phase {
            Phase::Fill => {
                content.fill_page(page, index);
                true
            }
            Phase::Seq | Phase::Random | Phase::Again => content.check_page(page, index),
            Phase::Mixed => {
                let right = content.check_page(page, index);
                if done % 2 == 1 {
                    content.fill_page(page, index);
                }
                right
            }
            Phase::Verify => content.check_whole_page(page, index),
            Phase::Out | Phase::Fork | Phase::Redis | Phase::Bgsave => {
                return Err(format!("{phase:?} touches no pages"));
            }
        })
    }
}

/// The time that 99 of 100 stay within, in microseconds; `None` of none.
fn p99_us(mut ns: Vec<u32>) -> Option<f64> {
    let at = (ns.len() * 99 / 100).min(ns.len().checked_sub(1)?);
    let (_, value, _) = ns.select_nth_unstable(at);
    Some(f64::from(*value) / 1e3)
}

/// Forks one after the other.
fn forks() -> Result<PhaseResult, String> {
    let mut seconds = 0.0;
    for _ in 0..FORKS_PER_PHASE {
        let begin = Instant::now();
        // SAFETY: the child calls nothing but _exit.
        let child = unsafe { libc::fork() };
        match child {
            0 => {
                // SAFETY: ends this process; nothing of the parent's is run or freed.
                unsafe { libc::_exit(0) }
            }
            -1 => return Err(format!("fork: {}", std::io::Error::last_os_error())),
            _ => {}
        }
        let mut status = 0;
        // SAFETY: the child is this process's own, and `status` is writable.
        if unsafe { libc::waitpid(child, &raw mut status, 0) } != child || status != 0 {
            return Err(format!("a child that only had to end has status {status}"));
        }
        seconds += begin.elapsed().as_secs_f64();
        // What a fork leaves to be done afterwards is not the next one's.
        std::thread::sleep(Duration::from_millis(200));
    }
    let pages = FORKS_PER_PHASE;
    Ok(PhaseResult::new(Phase::Fork, pages, seconds))
}

/// Runs the phases. Exit status: 0, 2 for arguments that make no sense, 3 where a page was wrong.
pub fn main(args: &BenchWorkArgs) -> u8 {
    let status = |code: u8, message: String| {
        eprintln!("swaptide bench-work: {message}");
        code
    };
    if let Some(procs) = &args.join
        && let Err(e) = std::fs::write(procs, "0")
    {
        return status(2, format!("joining {}: {e}", procs.display()));
    }
    let mut out: Box<dyn Write> = match &args.out {
        None => Box::new(std::io::stdout()),
        Some(file) => match std::fs::File::create(file) {
            Ok(file) => Box::new(file),
            Err(e) => return status(2, format!("--out {}: {e}", file.display())),
        },
    };
    let mut data = match WorkData::new(args.data, args.ratio) {
        Ok(data) => data,
        Err(e) => return status(2, e),
    };
    let cap = Duration::from_secs(args.seconds_cap);
    let pace = Pace {
        touches: args.touches,
        cap,
        threads: usize::from(args.threads),
        latency: args.latency,
    };
    let mut server = None;
    // A capped fill leaves pages that later phases would rightly find wrong: they end with it.
    let mut unfilled = false;
    for _ in 0..args.repeat {
        for &phase in &args.phase {
            if unfilled && phase != Phase::Fill {
                continue;
            }
            let before = SerialPart::so_far();
            let done = match (phase, &mut server) {
                (Phase::Redis, None) => {
                    Server::start(args.data, args.ratio, args.scratch.as_deref()).map(
                        |(started, result)| {
                            server = Some(started);
                            result
                        },
                    )
                }
                (Phase::Bgsave, Some(server)) => server.save(cap),
                (Phase::Redis | Phase::Bgsave, _) => {
                    Err("there is one server, and it is started first".into())
                }
                _ => data.run(phase, &pace),
            };
            match done {
                Ok(mut result) => {
                    let now = SerialPart::so_far();
                    result.serial = now.zip(before).map(|(now, then)| now.since(then));
                    unfilled = phase == Phase::Fill && result.capped;
                    let line = serde_json::to_string(&result).unwrap_or_default();
                    if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
                        return status(2, "the results cannot be written".into());
                    }
                }
                Err(e) => return status(3, e),
            }
        }
    }
    if args.hold {
        let _ = writeln!(out, "{DONE}").and_then(|()| out.flush());
        let mut rest = String::new();
        while std::io::stdin().lock().read_line(&mut rest).is_ok_and(|n| n > 0) {
            rest.clear();
        }
    }
    0
}

/// The line that says all phases are over and the memory is still held.
pub(crate) const DONE: &str = "done";

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn scatter_is_a_permutation_without_locality() {
        for n in [1, 2, 3, 5, 64, 1000, 4096, 10_007] {
            let mut seen = vec![false; n];
            let mut near = 0;
            for i in 0..n {
                let at = scatter(i, n);
                assert!(!std::mem::replace(&mut seen[at], true), "{at} twice for n = {n}");
                near += usize::from(i > 0 && at.abs_diff(scatter(i - 1, n)) < 16);
            }
            assert!(n < 1000 || near * 20 < n, "{near} of {n} neighbours stayed close");
        }
    }

    fn pace(threads: usize) -> Pace {
        Pace { touches: 100, cap: Duration::from_secs(60), threads, latency: threads > 1 }
    }

    fn page(data: &mut WorkData, index: usize) -> &mut [u64] {
        &mut data.words[data.start + index * WORDS..][..WORDS]
    }

    #[test]
    fn phases_pass_on_right_data_and_find_a_wrong_page() {
        for content in PageContent::value_variants() {
            for threads in [1, 2, 3, 8, 299, 301] {
                passes_and_finds(*content, threads);
            }
        }
    }

    fn passes_and_finds(content: PageContent, threads: usize) {
        let mut data = WorkData::new(300 * PAGE as u64, content).unwrap();
        assert_eq!(data.words.as_ptr().wrapping_add(data.start) as usize % PAGE, 0);
        // Each of many threads touches one page at least, and each of a few its share.
        let parts = 300_usize.div_ceil(300_usize.div_ceil(threads));
        let touches = ((100 / threads).max(1) * parts) as u64;
        for (phase, pages) in [
            (Phase::Fill, 300),
            (Phase::Seq, 300),
            (Phase::Random, touches),
            (Phase::Mixed, touches),
            (Phase::Verify, 300),
        ] {
            let result = data.run(phase, &pace(threads)).unwrap();
            assert_eq!((result.pages, result.capped), (pages, false), "{threads} threads");
            let is_timed = threads > 1 && matches!(phase, Phase::Random | Phase::Mixed);
            assert_eq!(result.p99_us.is_some(), is_timed, "{phase:?}");
        }
        // A page that holds another page's content, and one that reads as zeros: what swapping
        // wrongly would do.
        let other = page(&mut data, 5).to_vec();
        page(&mut data, 77).copy_from_slice(&other);
        assert!(data.run(Phase::Seq, &pace(threads)).unwrap_err().starts_with("page 77 does not"));
        page(&mut data, 77).fill(0);
        assert!(data.run(Phase::Seq, &pace(threads)).unwrap_err().starts_with("page 77 does not"));
        content.fill_page(page(&mut data, 77), 77);
        page(&mut data, 0).fill(0);
        let error = data.run(Phase::Verify, &pace(threads)).unwrap_err();
        assert!(error.starts_with("page 0 does not"), "{error}");
    }

    #[test]
    fn a_time_limit_ends_a_phase() {
        let mut data = WorkData::new(64 * PAGE as u64, PageContent::Four).unwrap();
        let result = data.run(Phase::Fill, &Pace { cap: Duration::ZERO, ..pace(1) }).unwrap();
        assert_eq!((result.pages, result.capped), (0, true));
    }

    #[test]
    fn the_p99_is_what_99_of_100_stay_within() {
        assert_eq!(p99_us(vec![]), None);
        assert_eq!(p99_us(vec![7000]), Some(7.0));
        let mut ns: Vec<u32> = (1..=1000).map(|n| n * 1000).rev().collect();
        assert_eq!(p99_us(ns.clone()), Some(991.0));
        ns.truncate(50);
        assert_eq!(p99_us(ns), Some(1000.0));
    }

    #[test]
    fn contents_compress_as_they_say_and_all_pages_differ() {
        use swaptide_store::codec::{Choice, Compressor, Packed};
        const PAGES: usize = 256;
        let mut compressor = Compressor::new(Choice::Lz4);
        for (content, least, most) in [
            (PageContent::Four, 3.5, 4.0),
            (PageContent::Two, 1.8, 2.2),
            (PageContent::One, 1.0, 1.2),
        ] {
            let mut seen = std::collections::HashSet::new();
            let mut packed = 0;
            for index in 0..PAGES {
                let mut words = vec![0u64; WORDS];
                content.fill_page(&mut words, index);
                assert!(
                    content.check_page(&words, index) && content.check_whole_page(&words, index)
                );
                let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
                packed += match compressor.compress(bytes.as_slice().try_into().unwrap()) {
                    Packed::Bytes(block) => block.len(),
                    _ => PAGE,
                };
                assert!(seen.insert(words), "page {index} of {content:?} twice");
            }
            let ratio = (PAGES * PAGE) as f64 / packed as f64;
            assert!((least..=most).contains(&ratio), "{content:?}: {ratio}");
        }
    }
}
