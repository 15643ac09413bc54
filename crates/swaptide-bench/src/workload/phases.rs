//! What the programs of a benchmark do: contents and phases.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::workload::serial::SerialPart;

/// Bytes of a page.
pub const PAGE: usize = 4096;
pub const WORDS: usize = PAGE / 8;

/// What the pages hold, named by how far lz4 shrinks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PageContent {
    /// About 4:1: a quarter noise, the rest one word repeated
    #[value(name = "4")]
    Four,
    /// About 2:1, as slow for the codec as a heap is: small numbers, pointers, hashes, short texts
    #[value(name = "2")]
    Two,
    /// Hardly at all: noise but for an eighth
    #[value(name = "1")]
    One,
}

impl PageContent {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            PageContent::Four => "4",
            PageContent::Two => "2",
            PageContent::One => "1",
        }
    }

    /// In words, for a heading.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            PageContent::Four => "that lz4 shrinks 4:1",
            PageContent::Two => "like a heap's, 2:1",
            PageContent::One => "that hardly shrinks",
        }
    }

    /// Words of noise at the front of a page that is noise and one repeated word.
    fn noise_words(self) -> Option<usize> {
        match self {
            PageContent::Four => Some(WORDS / 4),
            PageContent::Two => None,
            PageContent::One => Some(WORDS / 8 * 7),
        }
    }

    /// The word at `place` of page `index`.
    pub fn word(self, index: usize, place: usize) -> u64 {
        match self.noise_words() {
            Some(noise) if place >= noise => index as u64 + 1,
            Some(_) => mix((index * WORDS + place) as u64),
            None => heap_word(index, place),
        }
    }

    /// Fills a page.
    pub fn fill_page(self, page: &mut [u64], index: usize) {
        // In two parts, without a choice per word: making the data must cost little compared with
        // what is measured.
        let (noise, tail) = page.split_at_mut(self.noise_words().unwrap_or(0));
        for (place, slot) in noise.iter_mut().enumerate() {
            *slot = mix((index * WORDS + place) as u64);
        }
        if self == PageContent::Two {
            for (place, slot) in tail.iter_mut().enumerate() {
                *slot = heap_word(index, place);
            }
        } else {
            tail.fill(index as u64 + 1);
        }
    }

    /// Checks four words: the ends of the page, the last of the noise where there is noise alone,
    /// and one that depends on the page.
    pub fn check_page(self, page: &[u64], index: usize) -> bool {
        let any = index.wrapping_mul(7) % WORDS;
        let border = self.noise_words().unwrap_or(WORDS / 2) - 1;
        [0, border, any, WORDS - 1].iter().all(|&place| page[place] == self.word(index, place))
    }

    /// Checks every word.
    pub(crate) fn check_whole_page(self, page: &[u64], index: usize) -> bool {
        page.iter().enumerate().all(|(place, &found)| found == self.word(index, place))
    }
}

/// A word of a heap in which objects of eight words lie side by side: count of references, type,
/// hash, three pointers or texts, a null, a length.
fn heap_word(index: usize, place: usize) -> u64 {
    const ARENA: u64 = 0x7f3a_0000_0000;
    let noise = mix((index * WORDS + place) as u64);
    match place % 8 {
        0 => 1 + (noise & 3),
        1 => 0x5581_c0de_a000 + ((noise >> 8) & 3) * 0x1a0,
        // Every other object has a full hash; the rest, a small number.
        2 if place & 8 != 0 => noise,
        2 => noise & 0xffff_ffff,
        3 => ARENA + (((index as u64) << 12) + (noise & 0xfff0)) % (1 << 32),
        // "name" and four digits.
        4 => (0..4).fold(0x656d_616e, |text, at| {
            text | (0x30 + (noise >> (8 * at + 1)) % 10) << (32 + 8 * at)
        }),
        5 => ARENA + ((noise >> 7) & 0x3ff_fff0),
        6 => 0,
        _ => noise & 0xff,
    }
}

/// One phase of the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Write every page, in order.
    Fill,
    /// Read every page, in order; check four words of each.
    Seq,
    /// Read pages in an order without locality; check four words of each.
    Random,
    /// The same pages in the same order once more; check four words of each.
    Again,
    /// As random, and every second page is written again.
    Mixed,
    /// Read every page, in order; check every word.
    Verify,
    /// Push every page out, by a hint.
    Out,
    /// Fork, wait for the child, which ends at once, and again; each time counts as a page.
    Fork,
    /// Start a Redis server and fill it; everything later is asked of it.
    Redis,
    /// Have that server write its dump.
    Bgsave,
}

impl Phase {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Fill => "fill",
            Phase::Seq => "seq",
            Phase::Random => "random",
            Phase::Again => "again",
            Phase::Mixed => "mixed",
            Phase::Verify => "verify",
            Phase::Out => "out",
            Phase::Fork => "fork",
            Phase::Redis => "redis",
            Phase::Bgsave => "bgsave",
        }
    }
}

/// What one phase did. One line of JSON each.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseResult {
    /// The phase that was measured.
    pub phase: Phase,
    /// Pages touched.
    pub pages: u64,
    /// How long it took.
    pub seconds: f64,
    /// True if it ended early, at the limit of time.
    pub capped: bool,
    /// The time that 99 of 100 touches stay within, in microseconds, where it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
    /// How long locks were held meanwhile that keep every fault server waiting, where the agent
    /// counts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<SerialPart>,
}

impl PhaseResult {
    /// A phase that went to its end.
    pub(crate) fn new(phase: Phase, pages: u64, seconds: f64) -> PhaseResult {
        PhaseResult { phase, pages, seconds, capped: false, p99_us: None, serial: None }
    }

    /// Throughput in MB/s (10^6 bytes).
    pub(crate) fn mb_per_s(&self) -> f64 {
        self.pages as f64 * PAGE as f64 / 1e6 / self.seconds.max(1e-9)
    }
}

/// The splitmix64 finalizer: a well-mixed word from a number.
pub fn mix(x: u64) -> u64 {
    let x = (x.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Where `i` stands in a permutation of `0..n` without locality: a four-round Feistel network over
/// the next even power of two, walked until it lands inside. It needs no table.
pub fn scatter(i: usize, n: usize) -> usize {
    let bits = usize::BITS - n.saturating_sub(1).leading_zeros();
    let half = bits.div_ceil(2).max(1);
    let mask = (1usize << half) - 1;
    let mut x = i;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..4u64 {
            (left, right) = (right, left ^ (mix(right as u64 ^ (round << 56)) as usize & mask));
        }
        x = (left << half) | right;
        if x < n {
            return x;
        }
    }
}
