//! Turns a page into what a device stores, and back.
//!
//! Owns the choice of representation: a page of zeros and a page of one repeated word need no bytes
//! at all, a page that hardly shrinks is kept as it is (loading it is then a copy), everything else
//! is an lz4 block, a zstd frame or a snappy block ([`Codec`]). A *unit* is up to
//! [`MAX_UNIT_PAGES`] neighbouring pages compressed as one lz4 block: better ratio, but it comes
//! back whole.
//!
//! Packed bytes tell by themselves which codec they are of: a frame begins with a byte of 0, a
//! block of lz4 never does (its first byte would call for a match, and there is nothing yet to
//! match), and before one of snappy stands what in a frame would mean a window of terabytes. So
//! pages of all lie side by side in every device and go from one to another as they are, and no
//! record of theirs is larger for it.
//!
//! Many pages end in a run of one word, mostly zeros. Of such a page only what comes before the
//! run, and the word once, is compressed: bytes that unpack to less than a page continue with their
//! last word to its end. That spares both codecs what they are slow at.
//!
//! lz4 costs 2 to 10 microseconds a page and 1 to 4 back, zstd 8 to 30 and 2 to 13; on heaps zstd
//! takes 0.4 to 0.7 of the bytes. snappy is of the class of lzo-rle, which has no library that
//! could be used here: as fast as lz4 on the way out and slower back, at about the same ratio.
//!
//! A [`Compressor`] holds the codecs' tables and the output buffer, an [`Unpacker`] the memory zstd
//! needs to decompress, so neither work allocates. Each belongs to one thread at a time and is
//! meant to be used outside all locks.

mod library;

use self::library::{Lz4, ZstdCompressor, ZstdDecompressor};
use crate::{PAGE_SIZE, Page};

/// The codec of a page's bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Codec {
    /// An lz4 block.
    Lz4,
    /// A zstd frame without magic number, content size, checksum and dictionary.
    Zstd,
    /// A snappy block behind two bytes that no frame of zstd begins with.
    Snappy,
}

/// The prefix of snappy's blocks: no frame of zstd begins so.
const SNAPPY_MARK: [u8; 2] = [0, 0xff];

impl Codec {
    /// The codec of packed bytes.
    #[must_use]
    pub fn of(packed: &[u8]) -> Codec {
        match packed {
            [0, ..] if packed.starts_with(&SNAPPY_MARK) => Codec::Snappy,
            [0, ..] => Codec::Zstd,
            _ => Codec::Lz4,
        }
    }
}

/// The choice of a codec for pages.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Default)]
pub enum Choice {
    /// lz4 at first; what stays long is compressed again with zstd.
    #[default]
    Both,
    /// lz4 alone, never recompressed.
    Lz4,
    /// zstd at once, without lz4 before.
    Zstd,
    /// snappy alone, never recompressed.
    Snappy,
}

impl Choice {
    /// Every choice.
    pub const ALL: [Choice; 4] = [Choice::Both, Choice::Lz4, Choice::Zstd, Choice::Snappy];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Choice::Both => "lz4+zstd",
            Choice::Lz4 => "lz4",
            Choice::Zstd => "zstd",
            Choice::Snappy => "snappy",
        }
    }

    /// True when some pages get zstd.
    #[must_use]
    pub const fn has_zstd(self) -> bool {
        matches!(self, Choice::Both | Choice::Zstd)
    }
}

/// A level of zstd: the higher, the longer it looks for what repeats. Usually the first: on heaps
/// the next two cost a tenth to a half more time and take 0.99 to 1.04 times the bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Level(u8);

impl Level {
    /// The last one. Higher ones take several times as long for a hundredth of the bytes of a page.
    pub const MAX: Level = Level(9);

    /// The level of a number from 1 to [`Level::MAX`]; `None` for others.
    #[must_use]
    pub fn new(level: u8) -> Option<Level> {
        (1..=Level::MAX.0).contains(&level).then_some(Level(level))
    }

    /// From 1 to 9, as zstd has it.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl Default for Level {
    fn default() -> Self {
        Level(1)
    }
}

/// The compression of pages.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Default)]
pub struct Scheme {
    /// The codecs, and the rule that chooses one.
    pub choice: Choice,
    /// By which level of zstd, where pages get it.
    pub level: Level,
}

impl From<Choice> for Scheme {
    fn from(choice: Choice) -> Self {
        Scheme { choice, level: Level::default() }
    }
}

impl Scheme {
    /// The number that stands for it where processes share memory; 0 for the usual one.
    #[must_use]
    pub fn number(self) -> u32 {
        self.choice as u32 | u32::from(self.level.0 - 1) << 8
    }

    /// The scheme of such a number; what is usual in place of what has no meaning.
    #[must_use]
    pub fn from_number(number: u32) -> Scheme {
        let choice = Choice::ALL
            .into_iter()
            .find(|choice| *choice as u32 == number & 0xff)
            .unwrap_or_default();
        let level = u8::try_from(number >> 8)
            .ok()
            .and_then(|level| Level::new(level.saturating_add(1)))
            .unwrap_or_default();
        Scheme { choice, level }
    }
}

/// Most pages one unit may hold.
pub const MAX_UNIT_PAGES: usize = 16;

/// A page that compresses to more than this is kept as it is: the rest of the saving is not worth a
/// decompression.
pub const MAX_COMPRESSED_BYTES: usize = PAGE_SIZE * 7 / 8;

/// Packed bytes are more than this, so that what is shorter can mean something else.
pub const MIN_PACKED_BYTES: usize = size_of::<u64>();

/// The kind of data that a page holds.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Content {
    /// Only zero bytes.
    Zero,
    /// The same 8-byte word throughout, not zero.
    Same(u64),
    /// Anything else.
    Data,
}

/// A page in the form a device stores it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Packed<'a> {
    /// A page of zeros.
    Zero,
    /// A page of one repeated word.
    Same(u64),
    /// An lz4 block, a zstd frame or a snappy block ([`Codec::of`]).
    Bytes(&'a [u8]),
    /// The page itself, which does not compress well.
    Raw(&'a Page),
}

/// The kind of a [`Packed`] page, without its bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum PackedKind {
    /// A page of zeros.
    Zero,
    /// A page of one repeated word.
    Same(u64),
    /// An lz4 block, a zstd frame or a snappy block of that many bytes.
    Bytes(usize),
    /// The page as it is: it does not shrink enough.
    Raw,
}

impl PackedKind {
    /// Bytes that it takes on a device.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a size, not a collection")]
    pub const fn len(self) -> usize {
        match self {
            PackedKind::Zero | PackedKind::Same(_) => 0,
            PackedKind::Bytes(len) => len,
            PackedKind::Raw => PAGE_SIZE,
        }
    }

    /// The packed page, given its bytes; `None` if those are not [`Self::len`].
    #[must_use]
    pub fn with(self, bytes: &[u8]) -> Option<Packed<'_>> {
        Some(match self {
            PackedKind::Zero => Packed::Zero,
            PackedKind::Same(word) => Packed::Same(word),
            PackedKind::Bytes(len) if bytes.len() == len => Packed::Bytes(bytes),
            PackedKind::Bytes(_) => return None,
            PackedKind::Raw => Packed::Raw(bytes.try_into().ok()?),
        })
    }
}

/// Neighbouring pages in the form a device stores them.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum PackedUnit<'a> {
    /// Every page is zero.
    Zero,
    /// Every page holds the same repeated word.
    Same(u64),
    /// One lz4 block of all pages.
    Bytes(&'a [u8]),
    /// The pages themselves, which do not compress well.
    Raw(&'a [u8]),
}

/// The data is of no codec, or not of the expected size.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "compressed data does not decompress to the expected size: it was damaged; test the memory"
)]
pub struct BadBlock;

/// Finds out whether a page needs storing at all.
///
/// Looks at the first and the last word first: most pages with data differ there.
#[must_use]
fn classify(page: &Page) -> Content {
    same_word(page)
        .map_or(Content::Data, |word| if word == 0 { Content::Zero } else { Content::Same(word) })
}

/// The word `bytes` consists of, if it is one repeated word. The length must be a multiple of 64.
fn same_word(bytes: &[u8]) -> Option<u64> {
    let (words, rest) = bytes.as_chunks::<8>();
    debug_assert!(rest.is_empty() && words.len().is_multiple_of(8));
    let first = words.first()?;
    if words.last() != Some(first) {
        return None;
    }
    let first = u64::from_ne_bytes(*first);
    // Eight words at a time, so that the comparison becomes vector code and still stops early.
    let (lines, _) = words.as_chunks::<8>();
    for line in lines {
        if line.iter().fold(0, |diff, word| diff | (u64::from_ne_bytes(*word) ^ first)) != 0 {
            return None;
        }
    }
    Some(first)
}

/// Bytes of a page that are compressed: all but the run of one word it ends in, if that is long.
fn head_len(page: &Page) -> usize {
    const MIN_RUN_BYTES: usize = 32;
    let (words, _) = page.as_chunks::<8>();
    let (lines, _) = words.as_chunks::<8>();
    let last = words[words.len() - 1];
    let word = u64::from_ne_bytes(last);
    let equal = lines
        .iter()
        .rev()
        .take_while(|line| {
            line.iter().fold(0, |diff, other| diff | (u64::from_ne_bytes(*other) ^ word)) == 0
        })
        .count();
    let mut start = (lines.len() - equal) * 8;
    while start > 0 && words[start - 1] == last {
        start -= 1;
    }
    if words.len() - start < MIN_RUN_BYTES { PAGE_SIZE } else { (start + 1) * 8 }
}

/// Fills `out` with one repeated word.
pub fn fill(out: &mut [u8], word: u64) {
    if word == 0 {
        out.fill(0);
    } else {
        let (words, _) = out.as_chunks_mut::<8>();
        words.fill(word.to_ne_bytes());
    }
}

/// Decompresses without allocating.
pub struct Unpacker {
    zstd: ZstdDecompressor,
}

impl Unpacker {
    /// An unpacker with its memory (about 100 KiB, of which a part is touched, when zstd is first
    /// met).
    #[must_use]
    pub fn new() -> Unpacker {
        Unpacker { zstd: ZstdDecompressor::new() }
    }

    /// Decompresses packed bytes into exactly `out`.
    pub fn unpack(&mut self, packed: &[u8], out: &mut [u8]) -> Result<(), BadBlock> {
        let len = match Codec::of(packed) {
            Codec::Lz4 => library::lz4_decompress(packed, out),
            Codec::Zstd => self.zstd.decompress(packed, out),
            Codec::Snappy => {
                snap::raw::Decoder::new().decompress(&packed[SNAPPY_MARK.len()..], out).ok()
            }
        };
        match len {
            Some(len) if len == out.len() => Ok(()),
            // The head of a page.
            Some(len) if out.len() == PAGE_SIZE && len % 8 == 0 => {
                let (head, rest) = out.split_at_mut(len);
                fill(rest, u64::from_ne_bytes(*head.last_chunk().ok_or(BadBlock)?));
                Ok(())
            }
            _ => Err(BadBlock),
        }
    }
}

impl Default for Unpacker {
    fn default() -> Self {
        Self::new()
    }
}

/// Compresses pages without allocating.
pub struct Compressor {
    lz4: Lz4,
    zstd: ZstdCompressor,
    /// Where it was chosen.
    snappy: Option<Box<snap::raw::Encoder>>,
    choice: Choice,
    /// Pages in a row that zstd could not shrink either.
    in_vain: u32,
    out: Vec<u8>,
}

impl Compressor {
    /// A compressor with its tables and buffer (about 160 KiB, half of it not touched before zstd
    /// is used).
    #[must_use]
    pub fn new(scheme: impl Into<Scheme>) -> Compressor {
        let Scheme { choice, level } = scheme.into();
        let out = vec![0; Lz4::bound(MAX_UNIT_PAGES * PAGE_SIZE)];
        let snappy = (choice == Choice::Snappy).then(|| Box::new(snap::raw::Encoder::new()));
        let mut compressor = Compressor {
            lz4: Lz4::new(),
            zstd: ZstdCompressor::new(level),
            snappy,
            choice,
            in_vain: 0,
            out,
        };
        // The first page is what snappy makes its table for.
        compressor.snappy(&[0; PAGE_SIZE]);
        compressor
    }

    /// Packs one page.
    pub fn compress<'a>(&'a mut self, page: &'a Page) -> Packed<'a> {
        match classify(page) {
            Content::Zero => Packed::Zero,
            Content::Same(word) => Packed::Same(word),
            Content::Data => match self.bytes(page) {
                Some(len) => Packed::Bytes(&self.out[..len]),
                None => Packed::Raw(page),
            },
        }
    }

    /// Packs 1 to [`MAX_UNIT_PAGES`] neighbouring pages as one.
    ///
    /// # Panics
    /// If the length of `pages` is not that many whole pages.
    pub fn compress_unit<'a>(&'a mut self, pages: &'a [u8]) -> PackedUnit<'a> {
        let n = pages.len() / PAGE_SIZE;
        assert!(
            pages.len().is_multiple_of(PAGE_SIZE) && (1..=MAX_UNIT_PAGES).contains(&n),
            "a unit of {} bytes",
            pages.len()
        );
        match same_word(pages) {
            Some(0) => PackedUnit::Zero,
            Some(word) => PackedUnit::Same(word),
            None => match self.block(pages) {
                Some(len) if len <= n * MAX_COMPRESSED_BYTES => PackedUnit::Bytes(&self.out[..len]),
                _ => PackedUnit::Raw(pages),
            },
        }
    }

    /// Packs a page that is data with zstd; `None` unless that takes at most `most` bytes.
    pub fn compress_tightly(&mut self, page: &Page, most: usize) -> Option<&[u8]> {
        let room = most.min(MAX_COMPRESSED_BYTES);
        let len = self.zstd.compress(&page[..head_len(page)], &mut self.out[..room])?;
        (Codec::of(&self.out[..len]) == Codec::Zstd && len > MIN_PACKED_BYTES)
            .then(|| &self.out[..len])
    }

    /// Compresses a page into the buffer as was chosen; `None` when it does not get small enough.
    fn bytes(&mut self, page: &Page) -> Option<usize> {
        let small_enough = |len: &usize| *len <= MAX_COMPRESSED_BYTES;
        match self.choice {
            Choice::Lz4 => self.block(&page[..head_len(page)]).filter(small_enough),
            Choice::Zstd => self.compress_tightly(page, MAX_COMPRESSED_BYTES).map(<[u8]>::len),
            Choice::Snappy => self.snappy(&page[..head_len(page)]).filter(small_enough),
            Choice::Both => {
                self.block(&page[..head_len(page)]).filter(small_enough).or_else(|| {
                    // Text without repetitions, digits, say. Where that fails it mostly fails
                    // again, and is tried now and then.
                    if self.in_vain > 8 && !self.in_vain.is_multiple_of(32) {
                        self.in_vain += 1;
                        return None;
                    }
                    let len = self.compress_tightly(page, MAX_COMPRESSED_BYTES).map(<[u8]>::len);
                    self.in_vain = if len.is_some() { 0 } else { self.in_vain.wrapping_add(1) };
                    len
                })
            }
        }
    }

    /// Compresses at most a page into the buffer with snappy; `None` where it was not chosen.
    fn snappy(&mut self, input: &[u8]) -> Option<usize> {
        let (mark, out) = self.out.split_at_mut(SNAPPY_MARK.len());
        let len = SNAPPY_MARK.len() + self.snappy.as_mut()?.compress(input, out).ok()?;
        mark.copy_from_slice(&SNAPPY_MARK);
        (len > MIN_PACKED_BYTES).then_some(len)
    }

    /// Compresses `input` into the buffer with lz4; `None` only if the library refuses, which a
    /// full-sized buffer rules out.
    fn block(&mut self, input: &[u8]) -> Option<usize> {
        // The first byte is looked at, so that no change of the library's can make a block pass for
        // a frame.
        self.lz4.compress(input, &mut self.out).filter(|_| self.out[0] != 0)
    }
}

impl Default for Compressor {
    fn default() -> Self {
        Self::new(Scheme::default())
    }
}

#[cfg(test)]
mod tests;
