//! Winning back slots that only the swap cache holds: count 0, the folio is in memory and no
//! page table maps its swap entry. (docs/linux-swap.md, "Reclaim of cached slots")
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

/// See [`SwapDevice::reclaim_cached`].
pub(crate) fn cached(device: &SwapDevice, clusters: u32) -> u32 {
    until(device, clusters, u32::MAX)
}

/// The device is full: frees `wanted` slots if a few clusters have them.
pub(crate) fn when_full(device: &SwapDevice, wanted: u32) -> bool {
    until(device, CLUSTERS_WHEN_FULL, wanted) > 0
}

/// Asks in up to `clusters` clusters, until `wanted` slots became free. Returns how many did.
fn until(device: &SwapDevice, clusters: u32, wanted: u32) -> u32 {
    if device.reclaim.is_none() {
        return 0;
    }
    let others = (0..ORDERS as u8).flat_map(|order| [ListId::Frag(order), ListId::Nonfull(order)]);
    let (mut left, mut freed) = (clusters, 0);
    for list in core::iter::once(ListId::Full).chain(others) {
        let mut on_list = device.lists.lock().len(list).min(left);
        while on_list > 0 && freed < wanted {
            let Some(index) = device.turn(list) else { break };
            freed += in_cluster(device, index, 0..SLOTS_PER_CLUSTER);
            (on_list, left) = (on_list - 1, left - 1);
        }
    }
    freed
}

/// Asks for the slots of a part of a cluster. Takes no lock: the hook finds out what is still true.
pub(crate) fn in_cluster(device: &SwapDevice, index: ClusterIndex, slots: Range<usize>) -> u32 {
    let (Some(hook), Some(table)) = (&device.reclaim, device.tables.get(index)) else { return 0 };
    let mut freed = 0;
    for i in slots {
        let word = table.get(i);
        if let (true, SlotContent::Folio(folio)) = (word.is_cache_only(), word.slot()) {
            freed += hook(device, index.slot(i), folio);
        }
    }
    freed
}
