//! How much comes in for one fault.
//!
//! Owns the decision, as functions of what is known: no lock, no device, no clock.
//! [`crate::readahead::locality`] says what the faults so far foretell,
//! [`crate::backing::snapshot`] what backs the pages, and [`admit`] which range is loaded.
//!
//! Rules
//! 1. Candidates are the aligned ranges of orders 1 to 4 around the fault where its chunk is
//!    foretold, and the window, up to order 9, where a stream is. A hint of random order leaves
//!    order 0 alone, and so does a bound of one page.
//! 2. A candidate that lies in one place is taken. One that lies in compressed memory *and* on a
//!    swap area is taken where the whole is cheaper than its wanted pages one by one: its
//!    compressed part is loaded at once and the rest read in one go. Along a stream every page is
//!    wanted, so that it always is. Elsewhere the next smaller order is asked.
//! 3. The bound is the window's (a part of the limit), page-cluster's where a swap area stands
//!    behind, and the largest order's.
//! 4. A candidate that was refused is counted as a fallback of its order, by the caller.

use std::ops::Range;

use crate::backing::snapshot::{Backing, Snapshot};
use crate::mm::types::{CHUNK_ORDER, ChunkNo, PAGES_PER_CHUNK, PageNo};
use crate::readahead::locality::SwapIn;

/// The bounds of readahead that a run was given.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct ReadaheadLimits {
    /// `--page-cluster N`: at most `2^N` pages, where a swap area is behind.
    pub page_cluster: Option<u8>,
    /// At most `2^N` pages, in any case.
    pub largest_order: Option<u8>,
}

impl ReadaheadLimits {
    /// From the words of a segment's header.
    pub fn new(page_cluster: Option<u32>, largest_order: Option<u32>) -> ReadaheadLimits {
        let value = |limit: Option<u32>| limit.map(|n| n.min(9) as u8);
        ReadaheadLimits { page_cluster: value(page_cluster), largest_order: value(largest_order) }
    }

    /// Most pages of one fault, where `window` is what the limit allows. Without a swap area
    /// page-cluster means nothing: compressed memory alone answers at once.
    pub fn most(self, window: usize, has_area: bool) -> usize {
        let by = |order: Option<u8>| order.map_or(usize::MAX, |order| 1 << order);
        window.min(by(self.page_cluster.filter(|_| has_area))).min(by(self.largest_order))
    }
}

/// The costs of operations, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// Delivering a fault to the handler and waking the thread.
    pub fault: u64,
    /// Loading a page from compressed memory, and taking another one out for it.
    pub pool: u64,
    /// Reading a page from a swap area.
    pub area: u64,
}

/// A fault, and what is known.
#[derive(Clone, Copy)]
pub struct SwapInRequest<'a> {
    /// The page that was touched.
    pub page: PageNo,
    /// The managed region around it, in pages.
    pub region: &'a Range<usize>,
    /// The prediction from earlier faults.
    pub evidence: SwapIn,
    /// Pages of the chunk that are wanted, as far as that is foretold, in 1/16.
    pub density_x16: u64,
    /// The most pages that may come in, that one included.
    pub most: usize,
    /// By which a mixed range is judged.
    pub costs: Costs,
}

/// The pages that are brought in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SwapInPlan {
    /// The page that was touched alone.
    Page,
    /// An aligned range around the page.
    Around {
        /// The first page of the range.
        first: PageNo,
        /// The range has `2^order` pages; from 1 to [`CHUNK_ORDER`].
        order: u8,
    },
    /// This many pages from it on.
    Onward(usize),
}

/// Chooses. `probe` gives a snapshot of the page's chunk, if one is needed. The orders that were
/// refused are told to `refused`.
pub fn admit(
    request: &SwapInRequest<'_>,
    probe: impl FnOnce(ChunkNo) -> Snapshot,
    mut refused: impl FnMut(u8),
) -> SwapInPlan {
    match request.evidence {
        _ if request.most < 2 => SwapInPlan::Page,
        SwapIn::Page => SwapInPlan::Page,
        SwapIn::Onward(pages) => {
            match pages.min(request.most).min(request.region.end.saturating_sub(request.page.0)) {
                0 | 1 => SwapInPlan::Page,
                pages => SwapInPlan::Onward(pages),
            }
        }
        SwapIn::Chunk => {
            let snapshot = probe(request.page.chunk());
            for order in (1..=CHUNK_ORDER.min(request.most.ilog2() as u8)).rev() {
                let first = PageNo(request.page.0 >> order << order);
                // A chunk at the region's edge comes in as far as it is managed: its other pages
                // are not swapped.
                match snapshot.backing(first.in_chunk(), 1 << order) {
                    Backing::Mixed { pool, area }
                        if !is_cheaper_whole(request, order, pool, area) =>
                    {
                        refused(order)
                    }
                    Backing::Nothing => {}
                    _ => return SwapInPlan::Around { first, order },
                }
            }
            SwapInPlan::Page
        }
    }
}

/// True when loading a mixed range costs less than a fault for each of its pages that are wanted.
fn is_cheaper_whole(request: &SwapInRequest<'_>, order: u8, pool: usize, area: usize) -> bool {
    let Costs { fault, pool: from_pool, area: from_area } = request.costs;
    let pages = (pool + area) as u64;
    if pages < 2 {
        return false;
    }
    let whole = fault + pool as u64 * from_pool + area as u64 * from_area;
    // The wanted pages lie in both parts alike.
    let density_x16 =
        (request.density_x16 * (1 << order) / PAGES_PER_CHUNK as u64).min(16 << order);
    let each =
        density_x16 * (fault + (pool as u64 * from_pool + area as u64 * from_area) / pages) / 16;
    whole < each
}

/// The pages that came in for one fault.
pub struct SwappedIn {
    base: usize,
    chunks: [u16; SwappedIn::CHUNKS],
    pages: usize,
}

impl SwappedIn {
    /// A window of 2 MiB may begin anywhere.
    const CHUNKS: usize = 64;

    /// Nothing yet; `first` is the first page that may come.
    pub fn new(first: PageNo) -> SwappedIn {
        SwappedIn { base: first.chunk().0 / 32 * 32, chunks: [0; SwappedIn::CHUNKS], pages: 0 }
    }

    /// `n` pages from `first` on came in.
    pub fn add(&mut self, first: PageNo, n: usize) {
        self.pages += n;
        for page in (first.0..first.0 + n).map(PageNo) {
            if let Some(chunk) =
                page.chunk().0.checked_sub(self.base).and_then(|at| self.chunks.get_mut(at))
            {
                *chunk |= 1 << page.in_chunk();
            }
        }
    }

    /// The number of pages that came in for the fault so far.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// The largest aligned blocks that came in whole, from order 4 on: `f(order, how many)`.
    pub fn blocks(&self, mut f: impl FnMut(u8, usize)) {
        if self.pages < PAGES_PER_CHUNK {
            return;
        }
        let mut whole = 0u64;
        for (at, _) in self.chunks.iter().enumerate().filter(|(_, chunk)| **chunk == u16::MAX) {
            whole |= 1 << at;
        }
        for order in (0..=5u8).rev() {
            let n = 1u32 << order;
            let block = u64::MAX >> (64 - n);
            let mut found = 0;
            for at in (0..SwappedIn::CHUNKS as u32).step_by(n as usize) {
                if whole >> at & block == block {
                    whole &= !(block << at);
                    found += 1;
                }
            }
            if found > 0 {
                f(CHUNK_ORDER + order, found);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::page_table::PageTable;

    const DEFAULT_COSTS: Costs = Costs { fault: 8_000, pool: 6_000, area: 60_000 };
    const REGION: Range<usize> = 0..1 << 20;

    fn request(evidence: SwapIn, most: usize) -> SwapInRequest<'static> {
        SwapInRequest {
            page: PageNo(165),
            region: &REGION,
            evidence,
            density_x16: 8 * 16,
            most,
            costs: DEFAULT_COSTS,
        }
    }

    /// A chunk of which these pages lie on a swap area and the others in compressed memory; `None`:
    /// not swapped.
    fn chunk(is_on_area: impl Fn(usize) -> Option<bool>) -> impl Fn(ChunkNo) -> Snapshot {
        move |chunk| Snapshot::made_up(chunk.first(), &is_on_area)
    }

    fn decide(
        request: SwapInRequest<'_>,
        probe: impl FnOnce(ChunkNo) -> Snapshot,
    ) -> (SwapInPlan, Vec<u8>) {
        let mut refused = Vec::new();
        (admit(&request, probe, |order| refused.push(order)), refused)
    }

    fn unasked(_: ChunkNo) -> Snapshot {
        panic!("nothing is to be probed")
    }

    #[test]
    fn without_evidence_or_room_for_two_a_page_comes_alone() {
        assert_eq!(decide(request(SwapIn::Page, 512), unasked).0, SwapInPlan::Page);
        assert_eq!(decide(request(SwapIn::Chunk, 1), unasked).0, SwapInPlan::Page);
        assert_eq!(decide(request(SwapIn::Onward(64), 1), unasked).0, SwapInPlan::Page);
    }

    #[test]
    fn a_window_ends_at_its_bound_and_at_its_region() {
        assert_eq!(decide(request(SwapIn::Onward(512), 16), unasked).0, SwapInPlan::Onward(16));
        assert_eq!(
            decide(
                SwapInRequest { region: &(0..170), ..request(SwapIn::Onward(512), 64) },
                unasked
            )
            .0,
            SwapInPlan::Onward(5)
        );
        assert_eq!(
            decide(
                SwapInRequest { region: &(0..166), ..request(SwapIn::Onward(512), 64) },
                unasked
            )
            .0,
            SwapInPlan::Page
        );
    }

    #[test]
    fn a_chunk_in_one_location_comes_whole_up_to_page_cluster() {
        for (most, order, first) in [(512, 4, 160), (8, 3, 160), (4, 2, 164), (2, 1, 164)] {
            for on_area in [false, true] {
                let (plan, refused) =
                    decide(request(SwapIn::Chunk, most), chunk(|_| Some(on_area)));
                assert_eq!(plan, SwapInPlan::Around { first: PageNo(first), order });
                assert!(refused.is_empty());
            }
        }
    }

    #[test]
    fn mixed_chunk_reduced_unless_cheaper_whole() {
        // The second half is on a swap area; the fault is in the first.
        let half = |k| Some(k >= 8);
        let (plan, refused) = decide(request(SwapIn::Chunk, 512), chunk(half));
        assert_eq!((plan, refused), (SwapInPlan::Around { first: PageNo(160), order: 3 }, vec![4]));
        let all = SwapInRequest { density_x16: 16 * 16, ..request(SwapIn::Chunk, 512) };
        assert_eq!(decide(all, chunk(half)).0, SwapInPlan::Around { first: PageNo(160), order: 4 });
        // Every second page: no order helps where half is wanted.
        let (plan, refused) = decide(request(SwapIn::Chunk, 512), chunk(|k| Some(k % 2 == 0)));
        assert_eq!((plan, refused), (SwapInPlan::Page, vec![4, 3, 2, 1]));
    }

    #[test]
    fn limits_apply_where_a_swap_area_is_behind() {
        let limits = ReadaheadLimits::new(Some(3), None);
        assert_eq!(limits, ReadaheadLimits { page_cluster: Some(3), largest_order: None });
        assert_eq!((limits.most(512, true), limits.most(512, false)), (8, 512));
        assert_eq!(ReadaheadLimits::new(Some(0), None).most(512, true), 1, "page-cluster 0");
        assert_eq!(ReadaheadLimits::new(None, Some(0)).most(512, false), 1, "order 0");
        assert_eq!(ReadaheadLimits::new(None, None).most(300, true), 300);
        assert_eq!(ReadaheadLimits::new(Some(9), Some(4)).most(512, true), 16);
    }

    #[test]
    fn blocks_are_counted_at_the_largest_order_that_came_whole() {
        let count = |parts: &[(usize, usize)]| {
            let mut swapped_in = SwappedIn::new(PageNo(parts[0].0));
            parts.iter().for_each(|(first, n)| swapped_in.add(PageNo(*first), *n));
            let mut found = Vec::new();
            swapped_in.blocks(|order, n| found.push((order, n)));
            found
        };
        assert_eq!(count(&[(1024, 512)]), [(9, 1)]);
        assert_eq!(count(&[(1024 + 16, 512)]), [(8, 1), (7, 1), (6, 1), (5, 1), (4, 2)]);
        assert_eq!(count(&[(160, 16)]), [(4, 1)]);
        assert_eq!(count(&[(161, 16)]), [], "not aligned");
        assert_eq!(count(&[(160, 7), (168, 24)]), [(4, 1)], "one was there already");
        assert_eq!(count(&[(160, 8), (168, 24)]), [(5, 1)], "in two pieces, for one fault");
    }

    #[test]
    fn a_table_without_swapped_pages_backs_nothing() {
        let (plan, refused) = decide(request(SwapIn::Chunk, 512), |c| {
            Snapshot::note(&PageTable::new(), c.first(), 16)
        });
        assert_eq!((plan, refused.len()), (SwapInPlan::Page, 0));
    }
}
