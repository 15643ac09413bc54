//! Winning back slots that only the swap cache holds: count 0, the folio is in memory and nobody
//! maps its swap entry. (docs/linux-swap.md, "Reclaim of cached slots")
//!
//! Only the folio's owner can lock it and see whether it may lose its slots, so the device asks a
//! hook for each folio. It is asked
//! - while a scan for a run meets such slots, once more than half of the device is used;
//! - for one full cluster a search, once more than half of the device is used;
//! - for a few clusters when the device is full, before an allocation fails;
//! - for as many clusters as the owner likes, in the background ([`SwapDevice::reclaim_cached`]).
//!
//! No lock of the core is held while the hook runs.

use crate::cluster::ListId;
use crate::device::SwapDevice;
use crate::entry::SlotContent;
use crate::ids::{ClusterIndex, FolioId, ORDERS, SLOTS_PER_CLUSTER, SwapOffset};
use core::ops::Range;

/// Clusters looked at when the device is full, before an allocation fails.
const CLUSTERS_WHEN_FULL: u32 = 4;

/// Asked to give up the slots of a folio that only the swap cache holds. It tries to lock the
/// folio, sees whether the folio still has the slot, no user and no write under way, and calls
/// [`SwapDevice::folio_release`]; it returns how many slots became free. It is called from
/// allocations: it must not wait for a lock that an allocating thread may hold.
pub type CacheReclaim = Box<dyn Fn(&SwapDevice, SwapOffset, FolioId) -> u32 + Send + Sync>;

impl SwapDevice {
    /// Slots that only the swap cache holds are won back through `hook` as the device fills.
    pub fn with_cache_reclaim(mut self, hook: CacheReclaim) -> Self {
        self.reclaim = Some(hook);
        self
    }

    /// Is more than half of the device used, and is there somebody to ask?
    pub(crate) fn crowded(&self) -> bool {
        self.reclaim.is_some() && u64::from(self.used()) * 2 > u64::from(self.capacity())
    }

    /// Asks for the slots that only the swap cache holds in up to `clusters` clusters, full ones
    /// first, those looked at least recently first. Returns how many slots became free.
    pub fn reclaim_cached(&self, clusters: u32) -> u32 {
        self.reclaim_until(clusters, u32::MAX)
    }

    /// The device is full: frees `wanted` slots if a few clusters have them.
    pub(crate) fn reclaim_when_full(&self, wanted: u32) -> bool {
        self.reclaim_until(CLUSTERS_WHEN_FULL, wanted) > 0
    }

    fn reclaim_until(&self, clusters: u32, wanted: u32) -> u32 {
        if self.reclaim.is_none() {
            return 0;
        }
        let others =
            (0..ORDERS as u8).flat_map(|order| [ListId::Frag(order), ListId::Nonfull(order)]);
        let (mut left, mut freed) = (clusters, 0);
        for list in core::iter::once(ListId::Full).chain(others) {
            let mut on_list = self.lists.lock().len(list).min(left);
            while on_list > 0 && freed < wanted {
                let Some(index) = self.turn(list) else { break };
                freed += self.reclaim_in(index, 0..SLOTS_PER_CLUSTER);
                (on_list, left) = (on_list - 1, left - 1);
            }
        }
        freed
    }

    /// The first cluster of a list, which goes to its end.
    pub(crate) fn turn(&self, list: ListId) -> Option<ClusterIndex> {
        let (index, mut state) = self.lists.lock().pop(&self.headers, list)?;
        self.move_to(index, &mut state, list);
        Some(index)
    }

    /// Asks for the slots of a part of a cluster. Takes no lock: the hook finds out what is still
    /// true.
    pub(crate) fn reclaim_in(&self, index: ClusterIndex, slots: Range<usize>) -> u32 {
        let (Some(hook), Some(table)) = (&self.reclaim, self.tables.get(index)) else { return 0 };
        let mut freed = 0;
        for i in slots {
            let word = table.get(i);
            if let (true, SlotContent::Folio(folio)) = (word.is_cache_only(), word.slot()) {
                freed += hook(self, index.slot(i), folio);
            }
        }
        freed
    }
}
