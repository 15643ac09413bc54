//! Turns a page into what a device stores, and back.
//!
//! Owns the choice of representation: a page of zeros and a page of one repeated word need no bytes at all, a page that
//! lz4 hardly shrinks is kept as it is (loading it is then a copy), everything else is one lz4 block. A *unit* is up to
//! [`MAX_UNIT_PAGES`] neighbouring pages compressed as one block: better ratio, but it comes back whole.
//!
//! A [`Compressor`] holds the hash table and the output buffer, so compressing allocates nothing. It belongs to one thread at
//! a time and is meant to be used outside all locks.

use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};

use crate::{PAGE_SIZE, Page, lz4};

/// Most pages one unit may hold.
pub const MAX_UNIT_PAGES: usize = 16;

/// A page that compresses to more than this is kept as it is: the rest of the saving is not worth a decompression.
pub const RAW_ABOVE: usize = PAGE_SIZE * 7 / 8;

/// What kind of data a page holds.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Content {
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
    /// An lz4 block.
    Bytes(&'a [u8]),
    /// The page itself, which does not compress well.
    Raw(&'a Page),
}

/// What a [`Packed`] page is, without its bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum PackedKind {
    /// A page of zeros.
    Zero,
    /// A page of one repeated word.
    Same(u64),
    /// An lz4 block of that many bytes.
    Bytes(usize),
    /// The page itself.
    Raw,
}

impl PackedKind {
    /// Bytes it takes.
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

/// The data is not an lz4 block of the expected size.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("compressed data does not decompress to the expected size")]
pub struct BadBlock;

/// Finds out whether a page needs storing at all.
///
/// Looks at the first and the last word first: most pages with data differ there.
#[must_use]
pub fn classify(page: &Page) -> Content {
    same_word(page).map_or(Content::Data, |word| if word == 0 { Content::Zero } else { Content::Same(word) })
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

/// Fills `out` with one repeated word.
pub fn fill(out: &mut [u8], word: u64) {
    if word == 0 {
        out.fill(0);
    } else {
        let (words, _) = out.as_chunks_mut::<8>();
        words.fill(word.to_ne_bytes());
    }
}

/// Decompresses one block into exactly `out`.
pub fn decompress(block: &[u8], out: &mut [u8]) -> Result<(), BadBlock> {
    lz4::decompress(block, out)
}

/// Compresses pages without allocating.
pub struct Compressor {
    tables: Box<Tables>,
    out: Vec<u8>,
}

struct Tables {
    /// For pages and units below 64 KiB.
    small: CompressTable,
    /// For units of 64 KiB, whose positions do not fit 16 bits.
    large: CompressTable,
}

impl Compressor {
    /// A compressor with its table and buffer (about 90 KiB).
    #[must_use]
    pub fn new() -> Compressor {
        Compressor {
            tables: Box::new(Tables { small: CompressTable::small(), large: CompressTable::large() }),
            out: vec![0; get_maximum_output_size(MAX_UNIT_PAGES * PAGE_SIZE)],
        }
    }

    /// Packs one page.
    pub fn compress<'a>(&'a mut self, page: &'a Page) -> Packed<'a> {
        match classify(page) {
            Content::Zero => Packed::Zero,
            Content::Same(word) => Packed::Same(word),
            Content::Data => match self.block(page) {
                Some(len) if len <= RAW_ABOVE => Packed::Bytes(&self.out[..len]),
                _ => Packed::Raw(page),
            },
        }
    }

    /// Packs 1 to [`MAX_UNIT_PAGES`] neighbouring pages as one.
    ///
    /// # Panics
    /// If the length of `pages` is not that many whole pages.
    pub fn compress_unit<'a>(&'a mut self, pages: &'a [u8]) -> PackedUnit<'a> {
        let n = pages.len() / PAGE_SIZE;
        assert!(pages.len().is_multiple_of(PAGE_SIZE) && (1..=MAX_UNIT_PAGES).contains(&n), "a unit of {} bytes", pages.len());
        match same_word(pages) {
            Some(0) => PackedUnit::Zero,
            Some(word) => PackedUnit::Same(word),
            None => match self.block(pages) {
                Some(len) if len <= n * RAW_ABOVE => PackedUnit::Bytes(&self.out[..len]),
                _ => PackedUnit::Raw(pages),
            },
        }
    }

    /// Compresses `input` into the buffer; `None` only if the codec refuses, which a full-sized buffer rules out.
    fn block(&mut self, input: &[u8]) -> Option<usize> {
        let table = if input.len() < usize::from(u16::MAX) { &mut self.tables.small } else { &mut self.tables.large };
        compress_into_with_table(input, &mut self.out, table).ok()
    }
}

impl Default for Compressor {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_page() -> Page {
        let mut page = [0; PAGE_SIZE];
        for (i, byte) in page.iter_mut().enumerate() {
            *byte = b"the quick brown fox "[(i * i / 7) % 20];
        }
        page
    }

    #[test]
    fn classify_sees_one_odd_byte_anywhere() {
        assert_eq!(classify(&[0; PAGE_SIZE]), Content::Zero);
        assert_eq!(classify(&[7; PAGE_SIZE]), Content::Same(0x0707_0707_0707_0707));
        for at in [0, 1, 7, 8, 2047, 4088, 4095] {
            let mut page = [7; PAGE_SIZE];
            page[at] = 8;
            assert_eq!(classify(&page), Content::Data, "odd byte at {at}");
        }
    }

    #[test]
    fn pages_and_units_round_trip() {
        let mut c = Compressor::new();
        let page = text_page();
        let Packed::Bytes(block) = c.compress(&page) else { panic!("text must compress") };
        let mut out = [1; PAGE_SIZE];
        decompress(block, &mut out).unwrap();
        assert!(out == page);
        assert_eq!(decompress(&block[..block.len() - 1], &mut out), Err(BadBlock));
        for n in [2, 15, 16] {
            let pages: Vec<u8> = page.iter().copied().cycle().take(n * PAGE_SIZE).collect();
            let PackedUnit::Bytes(block) = c.compress_unit(&pages) else { panic!("text must compress") };
            let mut out = vec![0; pages.len()];
            decompress(block, &mut out).unwrap();
            assert!(out == pages);
        }
        assert_eq!(c.compress_unit(&[3; 3 * PAGE_SIZE]), PackedUnit::Same(0x0303_0303_0303_0303));
        assert_eq!(c.compress_unit(&[0; PAGE_SIZE]), PackedUnit::Zero);
    }

    #[test]
    fn random_pages_stay_raw() {
        let mut state = 1u64;
        let mut page = [0; PAGE_SIZE];
        for byte in &mut page {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *byte = (state >> 56) as u8;
        }
        assert_eq!(Compressor::new().compress(&page), Packed::Raw(&page));
    }
}
