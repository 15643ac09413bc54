//! The extents leased: which of their pages are live, and where the next page goes.
//!
//! Pages are taken in order from one open extent. When it is full, the next one is an extent of ours that has become sparse,
//! else a new lease, else (the file may not grow) whichever has room. An extent whose last page is freed is handed to the
//! caller to be let go.
//!
//! Invariants:
//! 1. `live` is the number of bits set in `used`; a page reserved for a write under way counts.
//! 2. Shared and distrusted extents are never open, so no page of them is taken.
//! 3. All pages of an extent are sealed with the extent's cipher.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::cipher::Cipher;
use super::{EXTENT_PAGES, Extent, ExtentSource};
use crate::PAGE_SIZE;

/// An extent of ours with fewer live pages than this is written to again.
const SPARSE_BELOW: u16 = (EXTENT_PAGES / 4) as u16;
const PAGE_BITS: u32 = EXTENT_PAGES.trailing_zeros();

/// A page of the swap file.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Location(pub(super) u32);

impl Location {
    pub(super) const NOWHERE: Location = Location(u32::MAX);

    fn new(extent: u32, page: usize) -> Location {
        Location(extent << PAGE_BITS | page as u32)
    }

    pub(super) fn extent(self) -> Extent {
        Extent(self.0 >> PAGE_BITS)
    }

    fn page(self) -> usize {
        self.0 as usize % EXTENT_PAGES
    }

    /// Its place in the file.
    pub(super) fn byte(self) -> u64 {
        u64::from(self.0) * PAGE_SIZE as u64
    }
}

/// An extent without live pages, to be let go by the caller.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct Vacated {
    pub(super) extent: Extent,
    /// Others may still read it.
    pub(super) shared: bool,
}

#[cfg_attr(test, derive(Clone))]
struct Leased {
    used: [u64; EXTENT_PAGES / 64],
    live: u16,
    /// Other processes refer to it.
    shared: bool,
    /// A write to it failed.
    distrusted: bool,
    /// It is on the list of sparse extents.
    listed: bool,
    cipher: Arc<Cipher>,
    /// Counters of its pages are kept relative to this.
    base: u64,
}

impl Leased {
    fn first_free(&self) -> Option<usize> {
        let word = self.used.iter().position(|&word| word != u64::MAX)?;
        Some(word * 64 + self.used[word].trailing_ones() as usize)
    }

    /// Whether pages may be taken from it, given the next counter.
    fn writable(&self, counter: u64) -> bool {
        !self.shared && !self.distrusted && counter - self.base < u64::from(u32::MAX)
    }
}

#[cfg_attr(test, derive(Clone))]
pub(super) struct Extents {
    leased: BTreeMap<u32, Leased>,
    open: Option<u32>,
    /// Extents that fell below [`SPARSE_BELOW`]; checked again when taken from here.
    sparse: Vec<u32>,
    /// What new extents are sealed with.
    cipher: Arc<Cipher>,
    /// Pages sealed so far.
    counter: u64,
}

/// A page taken for a write, and its counter: `base + count`.
#[derive(Copy, Clone, Debug)]
pub(super) struct Taken {
    pub(super) location: Location,
    pub(super) count: u32,
    pub(super) base: u64,
}

impl Extents {
    pub(super) fn new(cipher: Arc<Cipher>) -> Extents {
        Extents { leased: BTreeMap::new(), open: None, sparse: Vec::new(), cipher, counter: 0 }
    }

    /// What pages taken now are to be sealed with.
    pub(super) fn cipher(&self) -> &Arc<Cipher> {
        &self.cipher
    }

    /// What a page was sealed with, and the base of its counter.
    pub(super) fn sealed_with(&self, location: Location) -> (&Arc<Cipher>, u64) {
        let leased = self.leased.get(&location.extent().0).expect("swap file: a slot's page is in an extent that was let go");
        (&leased.cipher, leased.base)
    }

    /// The next page to write to; `None` when there is none.
    pub(super) fn take_page(&mut self, source: &dyn ExtentSource) -> Option<Taken> {
        loop {
            let open = match self.open {
                Some(open) => open,
                None => self.open_next(source)?,
            };
            let counter = self.counter;
            if let Some(leased) = self.leased.get_mut(&open)
                && leased.writable(counter)
                && let Some(page) = leased.first_free()
            {
                leased.used[page / 64] |= 1 << (page % 64);
                leased.live += 1;
                self.counter += 1;
                let count = u32::try_from(counter - leased.base).expect("a writable extent's counters fit");
                return Some(Taken { location: Location::new(open, page), count, base: leased.base });
            }
            self.open = None;
        }
    }

    /// Opens an extent that has room.
    fn open_next(&mut self, source: &dyn ExtentSource) -> Option<u32> {
        while let Some(extent) = self.sparse.pop() {
            if let Some(leased) = self.leased.get_mut(&extent) {
                leased.listed = false;
                if leased.live < SPARSE_BELOW && leased.writable(self.counter) {
                    self.open = Some(extent);
                    return self.open;
                }
            }
        }
        if let Some(Extent(extent)) = source.lease() {
            assert!(extent < Location::NOWHERE.extent().0, "swap file: extent {extent} is beyond the largest file");
            let leased = Leased {
                used: [0; EXTENT_PAGES / 64],
                live: 0,
                shared: false,
                distrusted: false,
                listed: false,
                cipher: Arc::clone(&self.cipher),
                base: self.counter,
            };
            assert!(self.leased.insert(extent, leased).is_none(), "swap file: extent {extent} is leased twice");
            self.open = Some(extent);
        } else {
            let counter = self.counter;
            let roomy = self.leased.iter().filter(|(_, l)| usize::from(l.live) < EXTENT_PAGES && l.writable(counter));
            self.open = roomy.min_by_key(|(_, l)| l.live).map(|(&extent, _)| extent);
        }
        self.open
    }

    /// A page is no longer live.
    pub(super) fn free_page(&mut self, location: Location) -> Option<Vacated> {
        let Extent(extent) = location.extent();
        let leased = self.leased.get_mut(&extent).expect("swap file: a page is freed in an extent that was let go");
        let bit = 1 << (location.page() % 64);
        let word = &mut leased.used[location.page() / 64];
        assert!(*word & bit != 0, "swap file: a page is freed twice");
        *word &= !bit;
        leased.live -= 1;
        if self.open == Some(extent) {
            return None;
        }
        if leased.live == 0 {
            let shared = leased.shared;
            self.leased.remove(&extent);
            return Some(Vacated { extent: Extent(extent), shared });
        }
        if leased.live < SPARSE_BELOW && !leased.listed && !leased.shared && !leased.distrusted {
            leased.listed = true;
            self.sparse.push(extent);
        }
        None
    }

    /// Takes no more pages from an extent.
    pub(super) fn distrust(&mut self, extent: Extent) {
        if let Some(leased) = self.leased.get_mut(&extent.0) {
            leased.distrusted = true;
        }
        if self.open == Some(extent.0) {
            self.open = None;
        }
    }

    /// Everything leased becomes shared. What is empty is still exclusively ours and let go instead.
    pub(super) fn freeze(&mut self) -> Vec<Vacated> {
        let vacated = self.close();
        for leased in self.leased.values_mut() {
            leased.shared = true;
        }
        self.sparse.clear();
        vacated
    }

    /// New extents are sealed with `cipher`; those leased so far are written to no more.
    pub(super) fn seal_with(&mut self, cipher: Arc<Cipher>) -> Vec<Vacated> {
        let vacated = self.close();
        for leased in self.leased.values_mut() {
            leased.distrusted = true;
        }
        self.sparse.clear();
        self.cipher = cipher;
        vacated
    }

    /// Forgets all pages and lets every extent go.
    pub(super) fn clear(&mut self) -> Vec<Vacated> {
        self.open = None;
        self.sparse.clear();
        let leased = core::mem::take(&mut self.leased);
        leased.into_iter().map(|(extent, l)| Vacated { extent: Extent(extent), shared: l.shared }).collect()
    }

    /// Closes the open extent; it is vacated if it is empty.
    fn close(&mut self) -> Vec<Vacated> {
        let mut vacated = Vec::new();
        if let Some(extent) = self.open.take()
            && self.leased.get(&extent).is_some_and(|l| l.live == 0)
        {
            let shared = self.leased.remove(&extent).is_some_and(|l| l.shared);
            vacated.push(Vacated { extent: Extent(extent), shared });
        }
        vacated
    }

    pub(super) fn leased(&self, mut f: impl FnMut(Extent)) {
        self.leased.keys().for_each(|&extent| f(Extent(extent)));
    }

    /// Extents leased, and how many of them are shared.
    pub(super) fn count(&self) -> (usize, usize) {
        (self.leased.len(), self.leased.values().filter(|l| l.shared).count())
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        self.leased.len() * (size_of::<Leased>() + size_of::<u32>()) + self.sparse.capacity() * size_of::<u32>()
    }
}
