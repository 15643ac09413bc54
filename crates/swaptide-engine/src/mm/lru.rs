//! The order in which chunks are looked at.
//!
//! Owns seven queues of chunks. Oldest first: `resident`; `pool`, chunks that went to compressed
//! memory; `recompressed`, chunks that have stayed there long; `kept`, chunks that came back while
//! their compressed copy was kept; `kept_on_areas`, the same of copies on swap areas; `shared`,
//! chunks with pages that another process has, too. In no order: `own`, chunks with pages that
//! became this process's own after that. A chunk stands in each at most once, which its flags say
//! (so one of which nothing is known is not put there: it has none); an entry whose chunk has
//! nothing left in that place is dropped when met.
//!
//! Locks: none; inside the engine's memory lock.

use std::collections::VecDeque;

use swaptide_core::SwapType;

use crate::mm::heat::RecordWatch;
use crate::mm::page_table::{
    AREA_CLEAN_LOGGED, CLEAN_LOGGED, OWN_LOGGED, POOL_LOGGED, PageTable, QUEUED,
    RECOMPRESSED_LOGGED, SHARED_LOGGED,
};
use crate::mm::types::ChunkNo;

/// Queues of chunks: in memory, in compressed memory, and with kept copies.
#[derive(Default)]
pub struct Queues {
    resident: VecDeque<ChunkNo>,
    pool: VecDeque<ChunkNo>,
    recompressed: VecDeque<ChunkNo>,
    kept: VecDeque<ChunkNo>,
    kept_on_areas: VecDeque<ChunkNo>,
    shared: VecDeque<ChunkNo>,
    own: Vec<ChunkNo>,
    /// Whether pages with a record are to stay when their chunks go.
    pub(crate) records: RecordWatch,
}

impl Queues {
    /// A page of the chunk became present.
    pub fn arrived(&mut self, table: &mut PageTable, chunk: ChunkNo) {
        if table.is_used(chunk) && table.chunk(chunk).flags & QUEUED == 0 {
            table.update(chunk, |c| c.flags |= QUEUED);
            self.resident.push_back(chunk);
        }
    }

    /// Pages of the chunk went to compressed memory.
    pub(crate) fn pooled(&mut self, table: &mut PageTable, chunk: ChunkNo) {
        if table.is_used(chunk) && table.chunk(chunk).flags & POOL_LOGGED == 0 {
            table.update(chunk, |c| c.flags |= POOL_LOGGED);
            self.pool.push_back(chunk);
        }
    }

    /// Copies of pages of the chunk are kept.
    pub(crate) fn log_clean(&mut self, table: &mut PageTable, chunk: ChunkNo) {
        if table.is_used(chunk) && table.chunk(chunk).flags & CLEAN_LOGGED == 0 {
            table.update(chunk, |c| c.flags |= CLEAN_LOGGED);
            self.kept.push_back(chunk);
        }
    }

    /// Takes the chunk of which copies have been kept longest.
    pub(crate) fn next_clean(&mut self, table: &mut PageTable) -> Option<ChunkNo> {
        let chunk = self.kept.pop_front()?;
        table.update(chunk, |c| c.flags &= !CLEAN_LOGGED);
        Some(chunk)
    }

    /// Copies of pages of the chunk are kept on swap areas, whose slots are of type `areas`.
    pub(crate) fn log_clean_on_areas(
        &mut self,
        table: &mut PageTable,
        chunk: ChunkNo,
        areas: SwapType,
    ) {
        if !table.is_used(chunk) || table.chunk(chunk).flags & AREA_CLEAN_LOGGED != 0 {
            return;
        }
        table.update(chunk, |c| c.flags |= AREA_CLEAN_LOGGED);
        if self.kept_on_areas.len() == self.kept_on_areas.capacity() {
            // Before it grows, those go of which none is kept any more: while there is room on the
            // areas nothing is taken from here.
            self.kept_on_areas.retain(|chunk| {
                let keeps = table.has_copy_on(*chunk, areas);
                if !keeps {
                    table.update(*chunk, |c| c.flags &= !AREA_CLEAN_LOGGED);
                }
                keeps
            });
            // At least half is free afterwards, or the next ones would look at all of them again.
            self.kept_on_areas.reserve(self.kept_on_areas.len());
        }
        self.kept_on_areas.push_back(chunk);
    }

    /// Takes the chunk of which copies have been kept on swap areas longest.
    pub(crate) fn next_clean_on_areas(&mut self, table: &mut PageTable) -> Option<ChunkNo> {
        let chunk = self.kept_on_areas.pop_front()?;
        table.update(chunk, |c| c.flags &= !AREA_CLEAN_LOGGED);
        Some(chunk)
    }

    /// Pages of the chunk are shared.
    pub fn shared(&mut self, table: &mut PageTable, chunk: ChunkNo) {
        if table.is_used(chunk) && table.chunk(chunk).flags & SHARED_LOGGED == 0 {
            table.update(chunk, |c| c.flags |= SHARED_LOGGED);
            self.shared.push_back(chunk);
        }
    }

    /// Takes the chunk of which pages have been known to be shared longest.
    pub(crate) fn next_shared(&mut self, table: &mut PageTable) -> Option<ChunkNo> {
        let chunk = self.shared.pop_front()?;
        table.update(chunk, |c| c.flags &= !SHARED_LOGGED);
        Some(chunk)
    }

    /// Chunks of which pages are known to be shared, or were.
    pub(crate) fn shared_len(&self) -> usize {
        self.shared.len()
    }

    /// Pages of the chunk were faulted for writing: what keeps one of them from going is no sharing
    /// ([`PageTable::make_own`]). It is the next to be looked at.
    pub(crate) fn made_own(&mut self, table: &mut PageTable, chunk: ChunkNo, pages: u16) {
        if !table.is_used(chunk) {
            return;
        }
        table.make_own(chunk, pages);
        if table.chunk(chunk).flags & OWN_LOGGED == 0 {
            table.update(chunk, |c| c.flags |= OWN_LOGGED);
            if self.own.len() == self.own.capacity() {
                // Before it grows, those go that have none of these pages any more.
                self.own.retain(|chunk| {
                    let keeps = table.chunk(*chunk).own != 0;
                    if !keeps {
                        table.update(*chunk, |c| c.flags &= !OWN_LOGGED);
                    }
                    keeps
                });
            }
            self.own.push(chunk);
        }
        self.first_to_go(table, chunk);
    }

    /// A fork shares all that was made own.
    pub(crate) fn forget_own(&mut self, table: &mut PageTable) {
        for chunk in std::mem::take(&mut self.own) {
            table.forget_own(chunk);
            table.update(chunk, |c| c.flags &= !OWN_LOGGED);
        }
    }

    /// The chunk is the next to be looked at.
    pub(crate) fn first_to_go(&mut self, table: &mut PageTable, chunk: ChunkNo) {
        let info = table.chunk(chunk);
        if info.present == 0 {
            return;
        }
        table.update(chunk, |c| {
            c.flags |= QUEUED;
            c.heat.end_rounds(u16::MAX);
        });
        if self.resident.len() == self.resident.capacity() {
            self.drop_repeated(table);
        }
        self.resident.push_front(chunk);
    }

    /// Leaves each resident chunk in its queue once, where it stands first.
    fn drop_repeated(&mut self, table: &mut PageTable) {
        self.resident.retain(|chunk| {
            let is_first = table.chunk(*chunk).flags & QUEUED != 0;
            if is_first {
                table.update(*chunk, |c| c.flags &= !QUEUED);
            }
            // One with nothing left is gone with its flag, and may come again at the end.
            is_first && table.is_used(*chunk)
        });
        for chunk in &self.resident {
            table.update(*chunk, |c| c.flags |= QUEUED);
        }
        // At least half is free afterwards, or the next ones would look at all of them again.
        self.resident.reserve(self.resident.len());
    }

    /// Entries in the queue of resident chunks.
    pub(crate) fn resident_len(&self) -> usize {
        self.resident.len()
    }

    /// Takes the chunk that has been resident longest.
    pub(crate) fn next_resident(&mut self, table: &mut PageTable) -> Option<ChunkNo> {
        loop {
            let chunk = self.resident.pop_front()?;
            // A chunk that was called to the front stands in the queue a second time, without its
            // flag.
            if table.chunk(chunk).flags & QUEUED != 0 {
                table.update(chunk, |c| c.flags &= !QUEUED);
                return Some(chunk);
            }
        }
    }

    /// Pages of the chunk have been in compressed memory for long, and were looked at for it.
    pub(crate) fn log_recompressed(&mut self, table: &mut PageTable, chunk: ChunkNo) {
        if table.is_used(chunk) && table.chunk(chunk).flags & RECOMPRESSED_LOGGED == 0 {
            table.update(chunk, |c| c.flags |= RECOMPRESSED_LOGGED);
            self.recompressed.push_back(chunk);
        }
    }

    /// The first few chunks of those that went to compressed memory longest ago.
    pub(crate) fn oldest_pooled(&self) -> impl Iterator<Item = ChunkNo> + '_ {
        self.recompressed.iter().take(8).chain(self.pool.iter().take(8)).copied()
    }

    /// True when there are chunks that have been in compressed memory for long and were looked at
    /// for it.
    pub(crate) fn any_recompressed(&self) -> bool {
        !self.recompressed.is_empty()
    }

    /// The first few chunks of those that went to compressed memory longest ago and have not been
    /// looked at.
    pub(crate) fn oldest_not_recompressed(&self) -> impl Iterator<Item = ChunkNo> + '_ {
        self.pool.iter().take(4).copied()
    }

    /// A few of the chunks that have not been looked at, from all over their log.
    pub(crate) fn not_recompressed_further_back(&self) -> impl Iterator<Item = ChunkNo> + '_ {
        (1..8).filter_map(|eighth| self.pool.get(self.pool.len() * eighth / 8).copied())
    }

    /// Puts the first chunk of those that have not been looked at behind the others.
    pub(crate) fn put_back_first(&mut self) {
        self.pool.rotate_left(usize::from(!self.pool.is_empty()));
    }

    /// Takes the chunk that is the next to go to a swap area.
    pub(crate) fn next_to_areas(&mut self, table: &mut PageTable) -> Option<ChunkNo> {
        let Some(chunk) = self.recompressed.pop_front() else { return self.next_pooled(table) };
        table.update(chunk, |c| c.flags &= !RECOMPRESSED_LOGGED);
        Some(chunk)
    }

    /// Takes the chunk that went to compressed memory longest ago and has not been looked at.
    pub(crate) fn next_pooled(&mut self, table: &mut PageTable) -> Option<ChunkNo> {
        let chunk = self.pool.pop_front()?;
        table.update(chunk, |c| c.flags &= !POOL_LOGGED);
        Some(chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::page_table::PageState;
    use crate::mm::types::{PAGES_PER_CHUNK, PageNo};
    use swaptide_core::{SwapEntry, SwapOffset};

    #[test]
    fn unknown_chunks_are_not_logged_and_none_is_logged_twice() {
        let (mut table, mut queues) = (PageTable::new(), Queues::default());
        let page = PageNo(1600);
        queues.pooled(&mut table, page.chunk());
        table.set(page, PageState::Present);
        queues.pooled(&mut table, page.chunk());
        queues.pooled(&mut table, page.chunk());
        assert_eq!(queues.next_pooled(&mut table), Some(page.chunk()));
        assert_eq!(queues.next_pooled(&mut table), None);
    }

    #[test]
    fn a_chunk_that_is_called_to_the_front_again_and_again_takes_no_more_place() {
        let (mut table, mut queues) = (PageTable::new(), Queues::default());
        let chunks: Vec<ChunkNo> = (1..=100).map(|n| PageNo(n * 1600).chunk()).collect();
        for chunk in &chunks {
            table.set(chunk.first(), PageState::Present);
            queues.arrived(&mut table, *chunk);
        }
        for _ in 0..100 {
            for chunk in &chunks {
                queues.first_to_go(&mut table, *chunk);
            }
            assert!(queues.resident_len() <= 5 * chunks.len(), "{}", queues.resident_len());
        }
        let order: Vec<_> = std::iter::from_fn(|| queues.next_resident(&mut table)).collect();
        assert!(order.iter().eq(chunks.iter().rev()), "the last one comes first: {order:?}");
    }

    #[test]
    fn a_chunk_is_put_behind_the_others() {
        let (mut table, mut queues) = (PageTable::new(), Queues::default());
        queues.put_back_first();
        assert_eq!(queues.not_recompressed_further_back().count(), 0);
        let chunks = [1600, 3200, 4800].map(|page| PageNo(page).chunk());
        for chunk in chunks {
            table.set(chunk.first(), PageState::Present);
            queues.pooled(&mut table, chunk);
        }
        assert!(queues.not_recompressed_further_back().any(|chunk| chunk == chunks[2]));
        queues.put_back_first();
        let order: Vec<_> = std::iter::from_fn(|| queues.next_pooled(&mut table)).collect();
        assert_eq!(order, [chunks[1], chunks[2], chunks[0]]);
    }

    #[test]
    fn recompressed_chunks_go_to_areas_first_and_are_logged_once() {
        let (mut table, mut queues) = (PageTable::new(), Queues::default());
        let (one, two) = (PageNo(1600), PageNo(3200));
        for page in [one, two] {
            table.set(page, PageState::Present);
            queues.pooled(&mut table, page.chunk());
        }
        assert!(!queues.any_recompressed());
        // The younger one alone, and then the older one again, as when some of its pages went out
        // again.
        queues.log_recompressed(&mut table, two.chunk());
        queues.log_recompressed(&mut table, two.chunk());
        assert!(queues.any_recompressed());
        assert_eq!(queues.oldest_pooled().next(), Some(two.chunk()));
        assert_eq!(queues.oldest_not_recompressed().next(), Some(one.chunk()));
        let order: Vec<_> = std::iter::from_fn(|| queues.next_to_areas(&mut table)).collect();
        assert_eq!(order, [two.chunk(), one.chunk(), two.chunk()]);
        assert_eq!(table.chunk(two.chunk()).flags, 0);
    }

    #[test]
    fn chunks_without_a_clean_copy_leave_their_log_before_it_grows() {
        let (pool, areas) = (SwapType::new(0).unwrap(), SwapType::new(1).unwrap());
        let entry = |ty| SwapEntry::new(ty, SwapOffset(3));
        let (mut table, mut queues) = (PageTable::new(), Queues::default());
        let page = |n: usize| PageNo(1600 + n * PAGES_PER_CHUNK);
        for n in 0..1000 {
            table.set(page(n), PageState::PresentClean(entry(areas)));
            queues.log_clean_on_areas(&mut table, page(n).chunk(), areas);
            queues.log_clean_on_areas(&mut table, page(n).chunk(), areas);
            // All but the last few are given up, or have their copy elsewhere.
            if n >= 4 {
                let state = if n % 2 == 0 {
                    PageState::Empty
                } else {
                    PageState::PresentClean(entry(pool))
                };
                table.set(page(n - 4), state);
            }
        }
        assert!(queues.kept_on_areas.capacity() < 32, "{}", queues.kept_on_areas.capacity());
        let left: Vec<_> = std::iter::from_fn(|| queues.next_clean_on_areas(&mut table)).collect();
        assert!(left.ends_with(&[996, 997, 998, 999].map(|n| page(n).chunk())), "{left:?}");
        assert_eq!(table.chunk(page(999).chunk()).flags, 0);
        assert!(!table.is_used(page(0).chunk()), "its cell is kept for the log alone");
    }
}
