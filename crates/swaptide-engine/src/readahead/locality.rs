//! What the faults so far say of the next ones.
//!
//! Owns: a few streams (places where faults go upwards) for growth and for swap-in, and the chunks
//! under observation.
//!
//! Rules
//! 1. A fault where a stream is expected continues with it: what it brought ahead was run through
//!    (a *hit*), and its window doubles, up to the caller's bound. A fault inside the window that
//!    the stream brought last is a miss: its page went out again before it was wanted, and the
//!    window halves. Elsewhere a fault starts a stream of one page.
//! 2. What surrounds a fault without a stream is worth bringing in if it is touched soon. That
//!    cannot be seen of pages that are brought in; so some chunks are put under observation: of
//!    them single pages are brought in, and their faults during the next [`OBSERVATION_FAULTS`] are
//!    counted. The mean of the last counts decides for the others. Each region has its own mean; a
//!    new one begins with that of all.
//! 3. Of a window a page is left out now and then ([`crate::readahead::sampling`]). Where less than
//!    a third of those is asked for, windows are halved until they close and the stream ends; one
//!    that is asked for lets them grow again. A page that came for nothing costs a third of a
//!    fault.
//! 4. A hint replaces the guess: sequential starts with a window of a chunk, random never brings in
//!    more than the page.

use crate::mm::types::{ChunkNo, PAGES_PER_CHUNK, PageNo};
use crate::readahead::sampling::{MIN_WINDOW_PAGES, Samples, StreamId, Trust};

const STREAMS: usize = 8;
/// Regions of which the mean is kept.
const TRACKED_REGIONS: usize = 16;
/// Score of a stream of which all is wanted; and, negative, of one that is to be made smaller.
const MAX_SCORE: i8 = 4;
/// Chunks under observation at a time.
const OBSERVED_CHUNKS: usize = 16;
/// Faults during which a chunk is observed.
const OBSERVATION_FAULTS: u32 = 128;
/// While chunks are brought in whole, every Nth is put under observation.
const OBSERVE_EVERY: u32 = 16;
/// Further faults of a chunk, in the mean and in 1/16, from which on the whole chunk is cheaper. A
/// page that is brought in for nothing costs its loading, another page's going out, and that one's
/// coming back: about as much as a fault. So at least half of a chunk must be wanted.
const MIN_DENSITY_X16: u32 = 7 * 16;

/// The same for pages on a swap area: one reading brings them all, and a page that was not written
/// goes out again for next to nothing.
const MIN_AREA_DENSITY_X16: u32 = 16 + 8;

#[derive(Clone, Copy)]
struct Stream {
    /// The page expected next.
    next: usize,
    window: usize,
    /// Pages of the last window that came ahead of their fault.
    ahead: usize,
    used: u32,
    id: StreamId,
    /// What its windows may be at most, as far as pages that were left out tell.
    most: usize,
    /// What of the pages that were left out was asked for: 2 up for each that was, 1 down for each
    /// that was not.
    score: i8,
}

impl Stream {
    const NONE: Stream = Stream {
        next: usize::MAX,
        window: 0,
        ahead: 0,
        used: 0,
        id: StreamId(0),
        most: usize::MAX,
        score: 0,
    };

    /// A page that was left out was asked for.
    fn wants(&mut self) {
        self.score = (self.score + 2).min(MAX_SCORE);
        self.most = self.most.saturating_mul(4);
    }

    /// A page that was left out was not asked for.
    fn wants_not(&mut self) {
        self.score -= 1;
        if self.score <= -MAX_SCORE {
            // From here on each one more makes them smaller.
            self.score = 1 - MAX_SCORE;
            self.most = self.most.min(self.window) / 2;
        }
    }
}

/// Places where one thing followed another.
struct Streams {
    streams: [Stream; STREAMS],
    /// The stream found or started last.
    current: usize,
    clock: u32,
    started: u32,
}

impl Streams {
    fn new() -> Streams {
        Streams { streams: [Stream::NONE; STREAMS], current: 0, clock: 0, started: 0 }
    }

    /// The stream that expects `at`, or, with `slack`, something before it by no more than half its
    /// own window.
    fn find(&mut self, at: usize, slack: bool) -> Option<&mut Stream> {
        self.clock = self.clock.wrapping_add(1);
        let clock = self.clock;
        let expects =
            |s: &Stream| s.next <= at && at - s.next <= if slack { s.window / 2 } else { 0 };
        self.current = self.streams.iter().position(expects)?;
        let stream = &mut self.streams[self.current];
        stream.used = clock;
        Some(stream)
    }

    /// The stream of the last look-up but one, if `at` lies in the window it brought then.
    fn missed(&mut self, at: usize) -> Option<&mut Stream> {
        let clock = self.clock;
        let stream = &mut self.streams[self.current];
        let was_last = clock.wrapping_sub(stream.used) <= 1;
        let is_inside = stream.window > 1 && at < stream.next && stream.next - at <= stream.window;
        if !was_last || !is_inside {
            return None;
        }
        stream.used = clock;
        Some(stream)
    }

    fn start(&mut self, next: usize, window: usize) {
        let clock = self.clock;
        if let Some((at, oldest)) =
            self.streams.iter_mut().enumerate().max_by_key(|(_, s)| clock.wrapping_sub(s.used))
        {
            self.started = self.started.wrapping_add(1);
            *oldest =
                Stream { next, window, used: clock, id: StreamId(self.started), ..Stream::NONE };
            self.current = at;
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
    /// In no order by address.
    Random,
}

/// The pages to bring in for a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SwapIn {
    /// The page that was asked for alone.
    Page,
    /// The chunk that holds it.
    Chunk,
    /// This many pages from it on.
    Onward(usize),
}

/// A region, and what is known of its chunks.
#[derive(Clone, Copy)]
struct RegionStats {
    first: usize,
    /// Mean of the further faults in an observed chunk, in 1/16.
    mean_16: u32,
    until_observation: u32,
    used: u32,
}

#[derive(Clone, Copy)]
struct Observed {
    chunk: usize,
    home: usize,
    since: u32,
    faults: u32,
}

/// Streams of faults, and chunks under observation.
pub struct Locality {
    growth: Streams,
    reads: Streams,
    observed: [Observed; OBSERVED_CHUNKS],
    next_observed: usize,
    /// Swap-in faults so far.
    faults: u32,
    /// The same mean over all regions.
    mean_16: u32,
    homes: [RegionStats; TRACKED_REGIONS],
    /// The region that was asked about last.
    home: usize,
    samples: Samples,
    /// Pages that came ahead and were run through, since they were asked for.
    hits: usize,
}

impl Default for Locality {
    fn default() -> Self {
        Self::new()
    }
}

impl Locality {
    /// Before the first fault: no stream, no chunk under observation.
    pub fn new() -> Locality {
        Locality {
            growth: Streams::new(),
            reads: Streams::new(),
            observed: [Observed { chunk: usize::MAX, home: 0, since: 0, faults: 0 };
                OBSERVED_CHUNKS],
            next_observed: 0,
            faults: 0,
            // Nothing is brought in for nothing before there is a reason to.
            mean_16: MIN_AREA_DENSITY_X16 - 8,
            homes: [RegionStats {
                first: usize::MAX,
                mean_16: MIN_AREA_DENSITY_X16 - 8,
                until_observation: 0,
                used: 0,
            }; TRACKED_REGIONS],
            home: 0,
            samples: Samples::default(),
            hits: 0,
        }
    }

    /// Pages to fill upwards for a first touch at `page`, at most `bound`. The caller tells what it
    /// did with [`Locality::grew`].
    pub fn growth_window(&mut self, page: PageNo, bound: usize) -> usize {
        match self.growth.find(page.0, false) {
            Some(stream) => (stream.window * 2).min(bound),
            None => {
                self.growth.start(page.0, 1);
                1
            }
        }
    }

    /// `n` pages from `page` on were filled.
    pub fn grew(&mut self, page: PageNo, n: usize) {
        self.grew_as(page, n, n);
    }

    /// The same where the stream continues as after `window` pages.
    pub(crate) fn grew_as(&mut self, page: PageNo, n: usize, window: usize) {
        if let Some(stream) = self.growth.find(page.0, false) {
            stream.next = page.0 + n;
            stream.window = window;
        }
    }

    /// Returns the pages to bring in for a fault on a swapped page of the region that begins with
    /// page `home`, at most `bound` pages. What came of it is told with
    /// [`Locality::record_swapped_in`].
    pub fn swap_in(
        &mut self,
        home: PageNo,
        page: PageNo,
        reading: Reading,
        bound: usize,
    ) -> SwapIn {
        self.faults = self.faults.wrapping_add(1);
        if reading == Reading::Random || bound < 2 {
            return SwapIn::Page;
        }
        if let Some(id) = self.samples.asked(page) {
            if let Some(stream) = self.reads.streams.iter_mut().find(|stream| stream.id == id) {
                stream.wants();
            }
            return SwapIn::Page;
        }
        self.enter(home);
        let observed = self.count(page.chunk());
        if let Some(stream) = self.reads.find(page.0, true) {
            for _ in 0..self.samples.went_on(stream.id) {
                stream.wants_not();
            }
            self.hits += std::mem::take(&mut stream.ahead);
            if stream.most < MIN_WINDOW_PAGES {
                // Too little of it is wanted.
                self.samples.ended(stream.id);
                *stream = Stream::NONE;
                return SwapIn::Page;
            }
            let bound = bound.min(stream.most);
            stream.window = (stream.window * 2).clamp(2, bound);
            // Windows end at multiples of their size, so that the next ones are aligned blocks. One
            // that still grows may wait for that.
            let end = page.0 + stream.window;
            let aligned = end >> stream.window.ilog2() << stream.window.ilog2();
            let least = if stream.window < bound { stream.window / 2 } else { 0 };
            stream.next = if aligned > page.0 + least { aligned } else { end };
            return SwapIn::Onward(stream.next - page.0);
        }
        if let Some(stream) = self.reads.missed(page.0) {
            stream.window = (stream.window / 2).clamp(1, bound);
            stream.next = page.0 + stream.window;
            stream.ahead = 0;
            return if stream.window > 1 { SwapIn::Onward(stream.window) } else { SwapIn::Page };
        }
        if reading == Reading::Sequential {
            let window = PAGES_PER_CHUNK.min(bound);
            self.reads.start(page.0 + window, window);
            return SwapIn::Onward(window);
        }
        self.reads.start(page.0 + 1, 1);
        if observed || self.observe(page.chunk()) || self.homes[self.home].mean_16 < MIN_DENSITY_X16
        {
            return SwapIn::Page;
        }
        // A thread that touches the page after the chunk continues from there.
        self.reads.start(page.chunk().plus(1).first().0, PAGES_PER_CHUNK);
        SwapIn::Chunk
    }

    /// A page to be left out of the window of `pages` pages from `page` on that was foretold just
    /// now, if one shall be. That it was is told with [`Locality::left_out`].
    pub fn leave_out(&mut self, page: PageNo, pages: usize) -> Option<PageNo> {
        let stream = &self.reads.streams[self.reads.current];
        let trust = match stream.score {
            MAX_SCORE.. => Trust::Sure,
            ..0 => Trust::Doubt,
            _ => Trust::Unknown,
        };
        self.samples.choose(page, pages, trust)
    }

    /// The page was left out of the last window.
    pub fn left_out(&mut self, page: PageNo) {
        self.samples.left_out(page, self.reads.streams[self.reads.current].id);
    }

    /// `pages` came in for the fault that was asked about last.
    pub fn record_swapped_in(&mut self, pages: usize) {
        let current = self.reads.current;
        self.reads.streams[current].ahead = pages.saturating_sub(1);
    }

    /// Pages that came ahead of their fault and were run through since the last call: the next
    /// fault came where their window ended.
    pub fn take_hits(&mut self) -> usize {
        std::mem::take(&mut self.hits)
    }

    /// Pages of a chunk that are wanted, the one asked for among them, in 1/16.
    pub(crate) fn density_x16(&self) -> u32 {
        self.homes[self.home].mean_16 + 16
    }

    /// True when a page that is read from a swap area shall bring its neighbours in the chunk from
    /// there with it.
    pub(crate) fn reads_around(&self) -> bool {
        self.homes[self.home].mean_16 >= MIN_AREA_DENSITY_X16
    }

    /// Looks up what is known of a region.
    fn enter(&mut self, first: PageNo) {
        let clock = self.faults;
        self.home = match self.homes.iter().position(|home| home.first == first.0) {
            Some(at) => at,
            None => {
                let oldest = self
                    .homes
                    .iter()
                    .enumerate()
                    .max_by_key(|(_, home)| clock.wrapping_sub(home.used));
                let at = oldest.map_or(0, |(at, _)| at);
                self.homes[at] = RegionStats {
                    first: first.0,
                    mean_16: self.mean_16,
                    until_observation: 0,
                    used: clock,
                };
                at
            }
        };
        self.homes[self.home].used = clock;
    }

    /// Counts a fault in a chunk, if that is under observation: then it is true.
    fn count(&mut self, chunk: ChunkNo) -> bool {
        let faults = self.faults;
        match self
            .observed
            .iter_mut()
            .find(|o| o.chunk == chunk.0 && faults.wrapping_sub(o.since) <= OBSERVATION_FAULTS)
        {
            Some(observed) => {
                observed.faults += 1;
                true
            }
            None => false,
        }
    }

    /// Puts a chunk under observation, if its turn has come. True when it is.
    fn observe(&mut self, chunk: ChunkNo) -> bool {
        let place = &mut self.observed[self.next_observed];
        if place.chunk != usize::MAX {
            if self.faults.wrapping_sub(place.since) <= OBSERVATION_FAULTS {
                return false;
            }
            let follow = |mean: &mut u32| *mean = (*mean * 15 + 16 * place.faults) / 16;
            follow(&mut self.mean_16);
            if let Some(home) = self.homes.iter_mut().find(|home| home.first == place.home) {
                follow(&mut home.mean_16);
            }
            place.chunk = usize::MAX;
        }
        let home = &mut self.homes[self.home];
        if home.mean_16 >= MIN_DENSITY_X16 {
            home.until_observation += 1;
            if !home.until_observation.is_multiple_of(OBSERVE_EVERY) {
                return false;
            }
        }
        *place = Observed { chunk: chunk.0, home: home.first, since: self.faults, faults: 0 };
        self.next_observed = (self.next_observed + 1) % OBSERVED_CHUNKS;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOME: PageNo = PageNo(0);

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

    /// Touches pages in an order; gives the pages brought in and the faults, when each page stays
    /// once it is in.
    fn touch(locality: &mut Locality, order: impl Iterator<Item = usize>) -> (usize, usize) {
        let mut there = std::collections::HashSet::new();
        let mut faults = 0;
        for page in order {
            if there.contains(&page) {
                continue;
            }
            faults += 1;
            match locality.swap_in(HOME, PageNo(page), Reading::Unknown, 256) {
                SwapIn::Page => drop(there.insert(page)),
                SwapIn::Chunk => there
                    .extend(PageNo(page).chunk().first().0..PageNo(page).chunk().plus(1).first().0),
                SwapIn::Onward(n) => {
                    there.extend(page..page + n);
                    locality.record_swapped_in(n);
                    if let Some(out) = locality.leave_out(PageNo(page), n) {
                        there.remove(&out.0);
                        locality.left_out(out);
                    }
                }
            }
            assert!(there.contains(&page));
        }
        (there.len(), faults)
    }

    fn random(state: &mut u64) -> usize {
        *state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) as usize
    }

    #[test]
    fn a_walk_from_start_to_end_brings_large_windows() {
        let (brought, faults) = touch(&mut Locality::new(), 160..16_000);
        assert!(faults < 90, "{faults}");
        assert!(brought < 16_000 - 160 + 512, "{brought}");
    }

    #[test]
    fn a_walk_that_finds_every_third_page_there_is_a_stream_still() {
        let (_, faults) = touch(&mut Locality::new(), (160..16_000).filter(|page| page % 3 != 0));
        assert!(faults < 200, "{faults}");
    }

    #[test]
    fn a_sparser_stream_is_dropped_and_a_denser_one_returns() {
        let mut locality = Locality::new();
        let (_, _) = touch(&mut locality, 0..8_192);
        // From here on every eighth page is touched; windows of 256 pages find a touch behind each
        // of them.
        let (brought, faults) = touch(&mut locality, (8_192..200_000).step_by(8));
        let touched = (200_000 - 8_192) / 8;
        assert!(
            brought < touched + 8192 && faults > touched / 2,
            "{brought} pages for {touched}, {faults} faults"
        );
        let (_, faults) = touch(&mut locality, 200_000..208_000);
        assert!(faults < 120, "{faults}");
    }

    #[test]
    fn a_stream_of_which_half_is_wanted_keeps_its_windows() {
        let (_, faults) =
            touch(&mut Locality::new(), (0..200_000).filter(|page| *page < 64 || page % 2 == 0));
        assert!(faults < 200_000 / 64, "{faults}");
    }

    #[test]
    fn pages_left_out_cost_little_where_all_are_wanted() {
        let pages = 400_000;
        let (_, faults) = touch(&mut Locality::new(), 0..pages);
        assert!(faults < pages / 256 + pages / 1024 + 32, "{faults}");
    }

    #[test]
    fn each_region_has_evidence_of_its_own() {
        let mut state = 1;
        let mut locality = Locality::new();
        let mut brought = [0, 0];
        // One region is used chunk by chunk in any order, the other page by page.
        for _ in 0..4000 {
            let chunk = random(&mut state) % 65_536;
            let mut there = 0u32;
            for k in 0..PAGES_PER_CHUNK {
                let at = (random(&mut state) + 7 * k) % PAGES_PER_CHUNK;
                if there >> at & 1 == 0 {
                    there |= match locality.swap_in(
                        HOME,
                        PageNo(chunk * PAGES_PER_CHUNK + at),
                        Reading::Unknown,
                        64,
                    ) {
                        SwapIn::Chunk => 0xffff,
                        _ => 1 << at,
                    };
                    brought[0] += 1;
                }
            }
            let page = (1 << 24) + random(&mut state) % (1 << 20);
            if locality.swap_in(PageNo(1 << 24), PageNo(page), Reading::Unknown, 64) != SwapIn::Page
            {
                brought[1] += 1;
            }
        }
        assert!(brought[0] < 4000 * 5, "faults of the first: {}", brought[0]);
        assert!(brought[1] < 400, "more than a page for faults of the second: {}", brought[1]);
    }

    #[test]
    fn scattered_touches_bring_single_pages() {
        let mut state = 1;
        let order: Vec<usize> = (0..4000).map(|_| random(&mut state) % 65_536).collect();
        let (brought, faults) = touch(&mut Locality::new(), order.into_iter());
        assert!(brought < faults + faults / 10, "{brought} pages for {faults} faults");
    }

    #[test]
    fn chunks_that_are_used_whole_in_any_order_are_brought_in_whole() {
        let mut state = 1;
        let mut order = Vec::new();
        for _ in 0..2000 {
            let chunk = random(&mut state) % 65_536;
            let start = random(&mut state);
            order.extend(
                (0..PAGES_PER_CHUNK)
                    .map(|k| chunk * PAGES_PER_CHUNK + (start + 7 * k) % PAGES_PER_CHUNK),
            );
        }
        let (brought, faults) = touch(&mut Locality::new(), order.into_iter());
        assert!(faults < brought / 5, "{brought} pages for {faults} faults");
    }

    #[test]
    fn touched_pages_are_hits_and_untouched_ones_shrink_the_window() {
        let mut locality = Locality::new();
        let mut at = 160;
        for _ in 0..11 {
            match locality.swap_in(HOME, PageNo(at), Reading::Unknown, 64) {
                SwapIn::Onward(n) => {
                    locality.record_swapped_in(n);
                    at += n;
                }
                _ => at += 1,
            }
        }
        let hits = locality.take_hits();
        assert!(hits > 100 && hits < at - 160, "{hits} of {}", at - 160);
        assert_eq!(locality.take_hits(), 0);
        // Half of the last window is gone again; and once more.
        let mut windows = Vec::new();
        for _ in 0..6 {
            let inside = PageNo(at - 1);
            match locality.swap_in(HOME, inside, Reading::Unknown, 64) {
                SwapIn::Onward(n) => windows.push(n),
                _ => windows.push(1),
            }
            at = inside.0 + windows.last().expect("a window");
        }
        assert_eq!(windows[..5], [32, 16, 8, 4, 2]);
        assert_eq!(locality.take_hits(), 0);
    }

    #[test]
    fn a_bound_keeps_windows_small_and_one_page_keeps_them_away() {
        for bound in [1, 2, 8, 16] {
            let mut locality = Locality::new();
            let mut at = 160;
            let mut largest = 1;
            while at < 2000 {
                let n = match locality.swap_in(HOME, PageNo(at), Reading::Sequential, bound) {
                    SwapIn::Onward(n) => n,
                    _ => 1,
                };
                largest = largest.max(n);
                at += n;
            }
            assert_eq!(largest, bound);
        }
    }

    #[test]
    fn windows_come_to_be_aligned_blocks_wherever_a_walk_begins() {
        for bound in [16, 64, 300, 512] {
            for start in 160..200 {
                let mut locality = Locality::new();
                let mut at = start;
                for _ in 0..20 {
                    match locality.swap_in(HOME, PageNo(at), Reading::Unknown, bound) {
                        SwapIn::Onward(n) => at += n,
                        _ => at += 1,
                    }
                }
                let SwapIn::Onward(n) = locality.swap_in(HOME, PageNo(at), Reading::Unknown, bound)
                else {
                    panic!("a stream")
                };
                assert_eq!((n, at % n), (1 << bound.ilog2(), 0), "from {start}, at most {bound}");
            }
        }
    }

    #[test]
    fn advice_sets_pages_per_read() {
        let mut locality = Locality::new();
        for page in 0..100 {
            assert_eq!(locality.swap_in(HOME, PageNo(page), Reading::Random, 256), SwapIn::Page);
        }
        assert_eq!(
            locality.swap_in(HOME, PageNo(5000), Reading::Sequential, 256),
            SwapIn::Onward(PAGES_PER_CHUNK)
        );
    }
}
