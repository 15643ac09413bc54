//! What the faults so far say of the next ones.
//!
//! Owns: a few streams (places where faults went upwards page after page) for growth and for swap-in, and the chunks of the last single-page
//! swap-ins.
//!
//! Rules
//! 1. A first touch where a stream ended goes on with it: its window doubles, up to the caller's bound. Elsewhere it starts a stream of one page.
//! 2. A second swap-in in a chunk whose first is among the last 64 brings in the whole chunk, if such seconds are common: where touches are
//!    scattered they happen by chance, and the rest of the chunk would be brought in for nothing. A touch of the first page behind chunks brought in
//!    whole goes on with them; there the window doubles as in growth.
//! 3. A hint replaces the guess: sequential starts with a whole chunk and a window, random never brings in more than the page.

use crate::ids::{ChunkNo, PAGES_PER_CHUNK, PageNo};

const STREAMS: usize = 8;
const RECENT: usize = 64;
/// Seconds are common when at least this many of 1024 single-page swap-ins are. Scattered touches of data 16 times as large as what the recent
/// chunks cover give 64; touches with locality give 512.
const COMMON: u32 = 205;

#[derive(Clone, Copy)]
struct Stream {
    next: usize,
    window: usize,
    used: u32,
}

/// Places where one thing followed another.
struct Streams {
    streams: [Stream; STREAMS],
    clock: u32,
}

impl Streams {
    fn new() -> Streams {
        Streams { streams: [Stream { next: usize::MAX, window: 0, used: 0 }; STREAMS], clock: 0 }
    }

    /// The stream that expects `at` (or, with `slack`, something a little before it).
    fn find(&mut self, at: usize, slack: usize) -> Option<&mut Stream> {
        self.clock = self.clock.wrapping_add(1);
        let clock = self.clock;
        let stream = self.streams.iter_mut().find(|s| s.next <= at && at - s.next <= slack)?;
        stream.used = clock;
        Some(stream)
    }

    fn start(&mut self, next: usize, window: usize) {
        let clock = self.clock;
        if let Some(oldest) = self.streams.iter_mut().max_by_key(|s| clock.wrapping_sub(s.used)) {
            *oldest = Stream { next, window, used: clock };
        }
    }
}

/// How pages of a range are read, as the program said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reading {
    /// It did not say.
    Unknown,
    /// From start to end.
    Sequential,
    /// Without order.
    Random,
}

/// What to bring in for a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SwapIn {
    /// The page alone.
    Page,
    /// This many whole chunks from the page's own on.
    Chunks(usize),
}

/// See the module's description.
pub struct Locality {
    growth: Streams,
    reads: Streams,
    recent: [usize; RECENT],
    next_recent: usize,
    /// Share of single-page swap-ins that were a second one in their chunk, smoothed, in 1/1024.
    seconds: u32,
}

impl Default for Locality {
    fn default() -> Self {
        Self::new()
    }
}

impl Locality {
    /// Nothing known.
    pub fn new() -> Locality {
        Locality { growth: Streams::new(), reads: Streams::new(), recent: [usize::MAX; RECENT], next_recent: 0, seconds: 512 }
    }

    /// Pages to fill upwards for a first touch at `page`, at most `bound`. The caller tells what it did with [`Locality::grew`].
    pub fn growth_window(&mut self, page: PageNo, bound: usize) -> usize {
        match self.growth.find(page.0, 0) {
            Some(stream) => (stream.window * 2).min(bound),
            None => {
                self.growth.start(page.0, 1);
                1
            }
        }
    }

    /// `n` pages from `page` on were filled.
    pub fn grew(&mut self, page: PageNo, n: usize) {
        if let Some(stream) = self.growth.find(page.0, 0) {
            stream.next = page.0 + n;
            stream.window = n;
        }
    }

    /// What to bring in for a fault on a swapped page; `first` tells that it is the first swapped one of its chunk; `bound` in chunks, at least 1.
    pub fn swap_in(&mut self, page: PageNo, first: bool, reading: Reading, bound: usize) -> SwapIn {
        let chunk = page.chunk();
        if reading == Reading::Random {
            return SwapIn::Page;
        }
        if first && let Some(stream) = self.reads.find(chunk.0, 1) {
            stream.window = (stream.window * 2).clamp(1, bound);
            stream.next = chunk.0 + stream.window;
            return SwapIn::Chunks(stream.window);
        }
        let known = self.recent.contains(&chunk.0);
        self.seconds = self.seconds - self.seconds / 64 + if known { 1024 / 64 } else { 0 };
        if known && self.seconds >= COMMON || reading == Reading::Sequential {
            self.reads.start(chunk.0 + 1, 1);
            return SwapIn::Chunks(1);
        }
        self.recent[self.next_recent] = chunk.0;
        self.next_recent = (self.next_recent + 1) % RECENT;
        SwapIn::Page
    }

    /// Forgets a chunk that was brought in whole.
    pub fn whole(&mut self, chunk: ChunkNo) {
        for recent in &mut self.recent {
            if *recent == chunk.0 {
                *recent = usize::MAX;
            }
        }
    }
}

/// Pages in `n` chunks.
pub fn pages_in(n: usize) -> usize {
    n * PAGES_PER_CHUNK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_doubles_along_a_stream_and_starts_small_elsewhere() {
        let mut locality = Locality::new();
        let mut at = PageNo(1000);
        let mut seen = Vec::new();
        for _ in 0..8 {
            let n = locality.growth_window(at, 64);
            locality.grew(at, n);
            seen.push(n);
            at = at.plus(n);
        }
        assert_eq!(seen, [1, 2, 4, 8, 16, 32, 64, 64]);
        assert_eq!(locality.growth_window(PageNo(50_000), 64), 1);
        assert_eq!(locality.growth_window(at, 64), 64, "the stream is still known");
    }

    #[test]
    fn a_second_touch_in_a_chunk_brings_it_whole_and_its_neighbour_starts_a_window() {
        let mut locality = Locality::new();
        assert_eq!(locality.swap_in(PageNo(160), true, Reading::Unknown, 16), SwapIn::Page);
        assert_eq!(locality.swap_in(PageNo(161), true, Reading::Unknown, 16), SwapIn::Chunks(1));
        assert_eq!(locality.swap_in(PageNo(176), true, Reading::Unknown, 16), SwapIn::Chunks(2));
        assert_eq!(locality.swap_in(PageNo(208), true, Reading::Unknown, 16), SwapIn::Chunks(4));
        assert_eq!(locality.swap_in(PageNo(272), true, Reading::Unknown, 4), SwapIn::Chunks(4));
    }

    #[test]
    fn where_touches_are_scattered_a_second_one_by_chance_brings_no_chunk() {
        let mut locality = Locality::new();
        let mut whole = 0;
        let mut random = 1u64;
        for _ in 0..4000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let page = (random >> 33) as usize % 16_384;
            whole += usize::from(locality.swap_in(PageNo(page), false, Reading::Unknown, 16) != SwapIn::Page);
        }
        assert!(whole < 100, "{whole}");
    }

    #[test]
    fn scattered_touches_bring_single_pages_and_random_hints_always_do() {
        let mut locality = Locality::new();
        for i in 0..100 {
            assert_eq!(locality.swap_in(PageNo(i * 64), true, Reading::Unknown, 16), SwapIn::Page);
        }
        for _ in 0..3 {
            assert_eq!(locality.swap_in(PageNo(7), true, Reading::Random, 16), SwapIn::Page);
        }
    }
}
