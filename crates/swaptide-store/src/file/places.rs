//! From a slot to where its packed page lies: 28 bytes per slot, in arrays that exist while one of
//! their slots is in use.

use super::cipher::Tag;
use super::extents::Span;
use crate::{CLUSTER_SLOTS, Slot};

/// The place of a slot's page, and the data needed to decrypt it.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct SlotPlace {
    pub(super) span: Span,
    /// The page's counter, from the base its extent keeps.
    pub(super) count: u32,
    pub(super) tag: Tag,
}

const _: () = assert!(size_of::<SlotPlace>() == 28);

impl SlotPlace {
    const NOWHERE: SlotPlace = SlotPlace { span: Span::NOWHERE, count: 0, tag: [0; 16] };
}

#[cfg_attr(test, derive(Clone))]
struct PlaceCluster {
    places: [SlotPlace; CLUSTER_SLOTS],
    used: usize,
}

#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct SlotPlaces {
    clusters: Vec<Option<Box<PlaceCluster>>>,
    allocated: usize,
    used: usize,
}

impl SlotPlaces {
    pub(super) fn get(&self, slot: Slot) -> Option<SlotPlace> {
        let (cluster, index) = slot.split();
        let place = self.clusters.get(cluster)?.as_ref()?.places[index];
        (place.span != Span::NOWHERE).then_some(place)
    }

    /// Records a place and returns the one before.
    pub(super) fn set(&mut self, slot: Slot, place: SlotPlace) -> Option<SlotPlace> {
        let (at, index) = slot.split();
        if at >= self.clusters.len() {
            self.clusters.resize_with(at + 1, || None);
        }
        let allocated = &mut self.allocated;
        let cluster = self.clusters[at].get_or_insert_with(|| {
            *allocated += 1;
            Box::new(PlaceCluster { places: [SlotPlace::NOWHERE; CLUSTER_SLOTS], used: 0 })
        });
        let before = core::mem::replace(&mut cluster.places[index], place);
        if before.span == Span::NOWHERE {
            cluster.used += 1;
            self.used += 1;
            return None;
        }
        Some(before)
    }

    pub(super) fn remove(&mut self, slot: Slot) -> Option<SlotPlace> {
        let before = self.get(slot)?;
        let (at, index) = slot.split();
        let cluster = self.clusters[at].as_mut()?;
        cluster.places[index] = SlotPlace::NOWHERE;
        cluster.used -= 1;
        self.used -= 1;
        if cluster.used == 0 {
            self.clusters[at] = None;
            self.allocated -= 1;
        }
        Some(before)
    }

    /// Calls `f` for every slot of a cluster that is in use; `false` when there are no further
    /// clusters.
    pub(super) fn of_cluster(&self, cluster: usize, mut f: impl FnMut(Slot, &SlotPlace)) -> bool {
        let Some(found) = self.clusters.get(cluster) else { return false };
        if let Some(found) = found {
            for (i, place) in
                found.places.iter().enumerate().filter(|(_, place)| place.span != Span::NOWHERE)
            {
                f(Slot((cluster * CLUSTER_SLOTS + i) as u32), place);
            }
        }
        true
    }

    /// Returns the number of slots with data on an area.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        self.clusters.capacity() * size_of::<Option<Box<PlaceCluster>>>()
            + self.allocated * size_of::<PlaceCluster>()
    }
}
