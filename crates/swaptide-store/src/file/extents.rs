//! The extents leased: which of their blocks are live, and where the next object goes.
//!
//! Objects (packed pages, 1 to 4096 bytes) are laid one after the other into a *run* of free blocks
//! of one open extent; a [`WriteCursor`] is the place in the run that has been reached. When the
//! open extent has no further run, the next one is an extent of ours that has become sparse, else a
//! new lease, else (the file may not grow) whichever has room. An extent whose last object is freed
//! is handed to the caller to be released.
//!
//! A few free blocks are always kept for cleaning, which moves the objects of extents whose blocks
//! are in use but mostly garbage; a lease is asked for before they are touched.
//!
//! Invariants:
//! 1. `counts` of a block is the number of live objects that overlap it, `live_blocks` that of
//!    blocks where it is not zero, `live_bytes` the sum of the objects' lengths; an object reserved
//!    for a write under way counts.
//! 2. Extents that are shared, distrusted or to be left are never open, so nothing is laid into
//!    them.
//! 3. All objects of an extent are sealed with the extent's cipher, in the extent's form.
//! 4. An object is laid only into blocks of a run that were all free when the run was begun, under
//!    one hold of the lock.
//! 5. `free` is the number of free blocks of all extents that objects may be laid into.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::cipher::{Cipher, Form};
use super::{EXTENT_PAGES, Extent, ExtentSource};
use crate::PAGE_SIZE;

/// An extent of ours with fewer live blocks than this is written to again.
const MIN_DENSE_BLOCKS: u16 = (EXTENT_PAGES / 4) as u16;
/// Shortest run worth using in a sparse extent. One below [`MIN_DENSE_BLOCKS`] always has such a
/// run.
const MIN_RUN_BLOCKS: usize = 3;
/// When the file may not grow, an extent with this many free blocks is used as it is, before any
/// extent is cleaned.
const ROOMY_FREE_BLOCKS: usize = EXTENT_PAGES / 8;
/// Free blocks that only cleaning may use.
pub(super) const RESERVE_BLOCKS: usize = 16;
/// Extents cleaned at a time.
const MAX_VICTIMS: usize = 4;
/// An extent is worth cleaning when the blocks this gains are at least one in this many of those it
/// moves.
const MIN_GAIN_DIVISOR: usize = 6;
const BLOCK_BITS: u32 = EXTENT_PAGES.trailing_zeros();

/// The place of an object: its first block, its first byte in it, its length. Never beyond the
/// extent's end.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Span {
    block: u32,
    byte: u16,
    len: u16,
}

impl Span {
    pub(super) const NOWHERE: Span = Span { block: u32::MAX, byte: 0, len: 0 };

    pub(super) fn extent(self) -> Extent {
        Extent(self.block >> BLOCK_BITS)
    }

    /// Number of its first block in the file.
    pub(super) fn block(self) -> u32 {
        self.block
    }

    /// Number of the block after its last one.
    pub(super) fn end_block(self) -> u32 {
        self.block + (usize::from(self.byte) + usize::from(self.len)).div_ceil(PAGE_SIZE) as u32
    }

    /// Its first byte in the first block.
    pub(super) fn byte(self) -> usize {
        self.byte.into()
    }

    pub(super) fn len(self) -> usize {
        self.len.into()
    }

    /// Its first byte in the file.
    pub(super) fn start(self) -> u64 {
        u64::from(self.block) * PAGE_SIZE as u64 + u64::from(self.byte)
    }

    /// Returns the additional data that is authenticated with the object.
    pub(super) fn name(self) -> [u8; 8] {
        (u64::from(self.block) | u64::from(self.byte) << 32 | u64::from(self.len) << 48)
            .to_le_bytes()
    }

    /// Its blocks, counted in the extent.
    fn blocks(self) -> core::ops::Range<usize> {
        let first = self.block as usize % EXTENT_PAGES;
        first..first + (self.end_block() - self.block) as usize
    }
}

/// The next byte to lay an object at, and the end of the run it is in. Worthless once the lock is
/// dropped.
#[derive(Default)]
pub(super) struct WriteCursor {
    block: u32,
    byte: usize,
    end: u32,
}

/// Why no object can be laid.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Full {
    /// Cleaning would make room.
    OfGarbage,
    /// There is nothing to be done.
    Entirely,
}

/// The purpose of the room.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    /// A write that has not tried cleaning yet.
    Write,
    /// A write for which cleaning did nothing.
    WriteAnyway,
    /// Cleaning, which alone may use the last free blocks.
    Clean,
}

/// An extent without live objects, to be released by the caller.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct FreedExtent {
    pub(super) extent: Extent,
    /// Others may still read it.
    pub(super) shared: bool,
}

#[cfg_attr(test, derive(Clone))]
struct Leased {
    counts: Box<[u8; EXTENT_PAGES]>,
    live_blocks: u16,
    live_bytes: u32,
    /// Other processes refer to it.
    shared: bool,
    /// A write to it failed, or a read while cleaning, or its cipher is not ours any more.
    distrusted: bool,
    /// Its objects shall be moved elsewhere.
    leaving: bool,
    /// It is on the list of sparse extents.
    listed: bool,
    cipher: Arc<Cipher>,
    form: Form,
    /// Counters of its objects are kept relative to this.
    base: u64,
}

impl Leased {
    fn writable(&self) -> bool {
        !self.shared && !self.distrusted && !self.leaving
    }

    fn free_blocks(&self) -> usize {
        EXTENT_PAGES - usize::from(self.live_blocks)
    }

    /// Blocks that moving its objects together would make free.
    fn gain(&self) -> usize {
        usize::from(self.live_blocks).saturating_sub((self.live_bytes as usize).div_ceil(PAGE_SIZE))
    }

    /// The first run of at least `least` free blocks from block `from` on.
    fn run(&self, mut from: usize, least: usize) -> Option<core::ops::Range<usize>> {
        loop {
            let start = from + self.counts[from..].iter().position(|&count| count == 0)?;
            let len = self.counts[start..]
                .iter()
                .position(|&count| count != 0)
                .unwrap_or(EXTENT_PAGES - start);
            if len >= least {
                return Some(start..start + len);
            }
            from = start + len;
        }
    }
}

/// The extent that is written to.
#[derive(Copy, Clone)]
struct Open {
    extent: u32,
    /// Free blocks before this one have been passed by.
    scan: usize,
    /// Shorter runs are passed by.
    least: usize,
}

#[cfg_attr(test, derive(Clone))]
pub(super) struct Extents {
    leased: BTreeMap<u32, Leased>,
    open: Option<Open>,
    /// Extents that fell below [`MIN_DENSE_BLOCKS`]; checked again when taken from here.
    sparse: Vec<u32>,
    free: usize,
    /// The cipher of new extents.
    cipher: Arc<Cipher>,
    /// Objects sealed so far.
    counter: u64,
}

/// A place taken for a write, and its counter: `base + count`.
#[derive(Copy, Clone, Debug)]
pub(super) struct Taken {
    pub(super) span: Span,
    pub(super) count: u32,
    pub(super) base: u64,
    pub(super) form: Form,
}

impl Extents {
    pub(super) fn new(cipher: Arc<Cipher>) -> Extents {
        Extents {
            leased: BTreeMap::new(),
            open: None,
            sparse: Vec::new(),
            free: 0,
            cipher,
            counter: 0,
        }
    }

    /// Returns the cipher for objects that get a place now.
    pub(super) fn cipher(&self) -> &Arc<Cipher> {
        &self.cipher
    }

    /// Returns the cipher of an object, its form, and the base of its counter.
    pub(super) fn sealed_with(&self, span: Span) -> (&Arc<Cipher>, Form, u64) {
        let leased = self
            .leased
            .get(&span.extent().0)
            .expect("swap file: a slot's page is in an extent that was let go");
        (&leased.cipher, leased.form, leased.base)
    }

    /// A place for an object of `len` bytes, next to the one before if it fits there.
    pub(super) fn take(
        &mut self,
        len: usize,
        pen: &mut WriteCursor,
        source: &dyn ExtentSource,
        purpose: Purpose,
    ) -> Result<Taken, Full> {
        assert!((1..=PAGE_SIZE).contains(&len), "swap file: an object of {len} bytes");
        loop {
            if let Some(taken) = self.lay(len, pen) {
                return Ok(taken);
            }
            self.next_run(pen, source, purpose)?;
        }
    }

    /// Lays an object at the pen, if it fits into the run.
    fn lay(&mut self, len: usize, pen: &mut WriteCursor) -> Option<Taken> {
        if pen.block >= pen.end {
            return None;
        }
        let Extent(extent) = Span { block: pen.block, byte: 0, len: 0 }.extent();
        let leased = self.leased.get_mut(&extent)?;
        if leased.counts[pen.block as usize % EXTENT_PAGES] == u8::MAX {
            (pen.block, pen.byte) = (pen.block + 1, 0);
        }
        if (pen.end.saturating_sub(pen.block)) as usize * PAGE_SIZE < pen.byte + len {
            return None;
        }
        let Ok(count) = u32::try_from(self.counter - leased.base) else {
            // Its counters are used up.
            *pen = WriteCursor::default();
            self.distrust(Extent(extent));
            return None;
        };
        let span = Span { block: pen.block, byte: pen.byte as u16, len: len as u16 };
        for count in &mut leased.counts[span.blocks()] {
            if *count == 0 {
                leased.live_blocks += 1;
                self.free -= 1;
            }
            *count += 1;
        }
        leased.live_bytes += len as u32;
        self.counter += 1;
        let end = pen.byte + len;
        (pen.block, pen.byte) = (pen.block + (end / PAGE_SIZE) as u32, end % PAGE_SIZE);
        Some(Taken { span, count, base: leased.base, form: leased.form })
    }

    /// Sets the pen to the start of a run of free blocks.
    fn next_run(
        &mut self,
        pen: &mut WriteCursor,
        source: &dyn ExtentSource,
        purpose: Purpose,
    ) -> Result<(), Full> {
        let reserve = if purpose == Purpose::Clean { 0 } else { RESERVE_BLOCKS };
        if self.free <= reserve && !self.lease(source) {
            return Err(self.full(purpose));
        }
        loop {
            let open = match self.open {
                Some(open) => open,
                None => self.open_next(source, purpose)?,
            };
            if let Some(leased) = self.leased.get(&open.extent).filter(|leased| leased.writable()) {
                let from = if leased.live_blocks == 0 { 0 } else { open.scan };
                if let Some(run) = leased.run(from, open.least) {
                    let start = open.extent << BLOCK_BITS | run.start as u32;
                    let end = start + run.len().min(self.free - reserve) as u32;
                    // Whatever is used of it is not free next time.
                    self.open = Some(Open { scan: run.start, ..open });
                    *pen = WriteCursor { block: start, byte: 0, end };
                    return Ok(());
                }
            }
            self.open = None;
            self.list_if_sparse(open.extent);
        }
    }

    /// Opens an extent that has room.
    fn open_next(&mut self, source: &dyn ExtentSource, purpose: Purpose) -> Result<Open, Full> {
        loop {
            while let Some(extent) = self.sparse.pop() {
                if let Some(leased) = self.leased.get_mut(&extent) {
                    leased.listed = false;
                    if leased.live_blocks < MIN_DENSE_BLOCKS && leased.writable() {
                        return Ok(self.open(extent, MIN_RUN_BLOCKS));
                    }
                }
            }
            if !self.lease(source) {
                break;
            }
        }
        // The file may not grow.
        let roomy =
            self.leased.iter().filter(|(_, l)| l.writable()).min_by_key(|(_, l)| l.live_blocks);
        match roomy.map(|(&extent, l)| (extent, l.free_blocks())) {
            Some((extent, free)) if free > 0 => {
                if free < ROOMY_FREE_BLOCKS
                    && purpose == Purpose::Write
                    && !self.extents_to_clean(|_| true).is_empty()
                {
                    return Err(Full::OfGarbage);
                }
                Ok(self.open(extent, 1))
            }
            _ => Err(self.full(purpose)),
        }
    }

    fn open(&mut self, extent: u32, least: usize) -> Open {
        *self.open.insert(Open { extent, scan: 0, least })
    }

    fn full(&self, purpose: Purpose) -> Full {
        if purpose == Purpose::Write && !self.extents_to_clean(|_| true).is_empty() {
            Full::OfGarbage
        } else {
            Full::Entirely
        }
    }

    /// Leases a further extent, which is then the first of the sparse ones.
    fn lease(&mut self, source: &dyn ExtentSource) -> bool {
        let Some(Extent(extent)) = source.lease() else { return false };
        assert!(
            extent < Span::NOWHERE.extent().0,
            "swap file: extent {extent} is beyond the largest file"
        );
        let leased = Leased {
            counts: Box::new([0; EXTENT_PAGES]),
            live_blocks: 0,
            live_bytes: 0,
            shared: false,
            distrusted: false,
            leaving: false,
            listed: true,
            cipher: Arc::clone(&self.cipher),
            form: if source.is_plain(Extent(extent)) { Form::Plain } else { Form::Sealed },
            base: self.counter,
        };
        assert!(
            self.leased.insert(extent, leased).is_none(),
            "swap file: extent {extent} is leased twice"
        );
        self.free += EXTENT_PAGES;
        self.sparse.push(extent);
        true
    }

    /// Blocks that may be written to.
    pub(super) fn free_blocks(&self) -> usize {
        self.free
    }

    /// The extents that cleaning gains most of, if it gains enough, of those that `can_read`.
    pub(super) fn extents_to_clean(&self, can_read: impl Fn(Extent) -> bool) -> Vec<Extent> {
        let mut victims: Vec<(usize, u32)> = Vec::with_capacity(MAX_VICTIMS + 1);
        let writable = self.leased.iter().filter(|(_, leased)| leased.writable());
        for (&extent, leased) in writable.filter(|(extent, _)| can_read(Extent(**extent))) {
            let gain = leased.gain();
            if gain * MIN_GAIN_DIVISOR
                >= usize::from(leased.live_blocks).max(RESERVE_BLOCKS * MIN_GAIN_DIVISOR)
            {
                let at = victims.partition_point(|&(more, _)| more >= gain);
                victims.insert(at, (gain, extent));
                victims.truncate(MAX_VICTIMS);
            }
        }
        victims.into_iter().map(|(_, extent)| Extent(extent)).collect()
    }

    /// An object is no longer live.
    pub(super) fn free(&mut self, span: Span) -> Option<FreedExtent> {
        let Extent(extent) = span.extent();
        let leased = self
            .leased
            .get_mut(&extent)
            .expect("swap file: a page is freed in an extent that was let go");
        let mut emptied = 0;
        for count in &mut leased.counts[span.blocks()] {
            *count = count.checked_sub(1).expect("swap file: a page is freed twice");
            emptied += usize::from(*count == 0);
        }
        leased.live_blocks -= emptied as u16;
        leased.live_bytes -= span.len() as u32;
        if leased.writable() {
            self.free += emptied;
        }
        if self.open.is_some_and(|open| open.extent == extent) {
            return None;
        }
        if leased.live_blocks == 0 {
            return Some(self.remove(extent));
        }
        self.list_if_sparse(extent);
        None
    }

    fn remove(&mut self, extent: u32) -> FreedExtent {
        let leased = self.leased.remove(&extent).expect("swap file: an extent is let go twice");
        if leased.writable() {
            self.free -= leased.free_blocks();
        }
        FreedExtent { extent: Extent(extent), shared: leased.shared }
    }

    fn list_if_sparse(&mut self, extent: u32) {
        if let Some(leased) = self.leased.get_mut(&extent)
            && leased.live_blocks < MIN_DENSE_BLOCKS
            && !leased.listed
            && leased.writable()
        {
            leased.listed = true;
            self.sparse.push(extent);
        }
    }

    /// Lays nothing into an extent any more.
    pub(super) fn distrust(&mut self, extent: Extent) {
        if let Some(leased) = self.leased.get_mut(&extent.0) {
            if leased.writable() {
                self.free -= leased.free_blocks();
            }
            leased.distrusted = true;
        }
        if self.open.is_some_and(|open| open.extent == extent.0) {
            self.open = None;
        }
    }

    /// Lays nothing into the extents that `leaving` names, until they are not named any more. Gives
    /// those of them that are empty, and the number of the others.
    pub(super) fn set_leaving(
        &mut self,
        leaving: impl Fn(Extent) -> bool,
    ) -> (Vec<FreedExtent>, usize) {
        let mut empty = Vec::new();
        for (&extent, leased) in &mut self.leased {
            let before = leased.writable();
            leased.leaving = leaving(Extent(extent));
            match (before, leased.writable()) {
                (true, false) => self.free -= leased.free_blocks(),
                (false, true) => {
                    self.free += leased.free_blocks();
                    leased.listed = true;
                    self.sparse.push(extent);
                }
                _ => {}
            }
            if leased.leaving && leased.live_blocks == 0 {
                empty.push(extent);
            }
        }
        if self
            .open
            .is_some_and(|open| self.leased.get(&open.extent).is_none_or(|leased| leased.leaving))
        {
            self.open = None;
        }
        (empty.into_iter().map(|extent| self.remove(extent)).collect(), self.leaving_count())
    }

    /// A few of the extents that shall be left, of those that `can_read`.
    pub(super) fn leaving(&self, can_read: impl Fn(Extent) -> bool) -> Vec<Extent> {
        self.leased
            .iter()
            .filter(|(extent, leased)| leased.leaving && can_read(Extent(**extent)))
            .take(MAX_VICTIMS)
            .map(|(&extent, _)| Extent(extent))
            .collect()
    }

    pub(super) fn leaving_count(&self) -> usize {
        self.leased.values().filter(|l| l.leaving).count()
    }

    /// Everything leased becomes shared. What is empty is still exclusively ours and let go
    /// instead.
    pub(super) fn freeze(&mut self) -> Vec<FreedExtent> {
        let vacated = self.close();
        for leased in self.leased.values_mut() {
            leased.shared = true;
        }
        self.free = 0;
        vacated
    }

    /// New extents are sealed with `cipher`; those leased so far are written to no more.
    pub(super) fn seal_with(&mut self, cipher: Arc<Cipher>) -> Vec<FreedExtent> {
        let vacated = self.close();
        for leased in self.leased.values_mut() {
            leased.distrusted = true;
        }
        self.free = 0;
        self.cipher = cipher;
        vacated
    }

    /// Forgets all objects and lets every extent go.
    pub(super) fn clear(&mut self) -> Vec<FreedExtent> {
        self.open = None;
        self.sparse.clear();
        self.free = 0;
        let leased = core::mem::take(&mut self.leased);
        leased
            .into_iter()
            .map(|(extent, l)| FreedExtent { extent: Extent(extent), shared: l.shared })
            .collect()
    }

    /// Closes the open extent and takes all off the list; those that are empty are vacated.
    fn close(&mut self) -> Vec<FreedExtent> {
        self.open = None;
        self.sparse.clear();
        let mut empty = Vec::new();
        for (&extent, leased) in &mut self.leased {
            leased.listed = false;
            if leased.live_blocks == 0 {
                empty.push(extent);
            }
        }
        empty.into_iter().map(|extent| self.remove(extent)).collect()
    }

    pub(super) fn leased(&self, mut f: impl FnMut(Extent)) {
        self.leased.keys().for_each(|&extent| f(Extent(extent)));
    }

    /// Extents leased, and how many of them are shared.
    pub(super) fn count(&self) -> (usize, usize) {
        (self.leased.len(), self.leased.values().filter(|l| l.shared).count())
    }

    /// Bytes of live objects, and bytes of the blocks they lie in.
    pub(super) fn bytes(&self) -> (u64, u64) {
        self.leased.values().fold((0, 0), |(live, blocks), l| {
            (live + u64::from(l.live_bytes), blocks + u64::from(l.live_blocks) * PAGE_SIZE as u64)
        })
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        self.leased.len() * (size_of::<Leased>() + EXTENT_PAGES + size_of::<u32>())
            + self.sparse.capacity() * size_of::<u32>()
    }

    /// Recounts everything and compares with the places of all slots (tests; no write may be under
    /// way).
    #[cfg(test)]
    pub(super) fn check(&self, spans: impl Iterator<Item = Span>) {
        let mut counts: BTreeMap<u32, (Vec<u8>, u32)> = BTreeMap::new();
        let mut all: Vec<Span> = spans.collect();
        all.sort_unstable();
        for pair in all.windows(2) {
            assert!(pair[0].start() + pair[0].len() as u64 <= pair[1].start(), "objects overlap");
        }
        for span in all {
            let (counts, bytes) =
                counts.entry(span.extent().0).or_insert_with(|| (vec![0; EXTENT_PAGES], 0));
            counts[span.blocks()].iter_mut().for_each(|count| *count += 1);
            *bytes += span.len() as u32;
        }
        for (extent, leased) in &self.leased {
            let (counts, bytes) =
                counts.remove(extent).unwrap_or_else(|| (vec![0; EXTENT_PAGES], 0));
            assert_eq!(
                (&leased.counts[..], leased.live_bytes),
                (&counts[..], bytes),
                "extent {extent}"
            );
            assert_eq!(
                usize::from(leased.live_blocks),
                counts.iter().filter(|&&count| count > 0).count()
            );
        }
        assert!(counts.is_empty(), "a page in an extent that was let go");
        assert_eq!(
            self.free,
            self.leased.values().filter(|l| l.writable()).map(Leased::free_blocks).sum::<usize>()
        );
    }
}
