//! What pages read back looked like: 16 bytes per slot, in arrays that exist while one of their
//! slots has a digest.
//!
//! A digest is POLYVAL under a secret key: without the key none can make, nor can
//! chance in the life of a machine find, two pages of one digest (a page is 256 blocks of 128 bits:
//! the odds are 257 in 2^128).

use polyval::universal_hash::UniversalHash;
use polyval::{Block, Polyval};

use crate::{CLUSTER_SLOTS, Page, Slot};

/// Stands for a page's contents. Zero stands for none.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct Digest(u128);

impl Digest {
    const NONE: Digest = Digest(0);
}

/// Makes digests.
#[derive(Clone)]
pub(super) struct Digester(Polyval);

impl Digester {
    pub(super) fn new(key: [u8; 16]) -> Digester {
        let mut state = Polyval::new(&key.into());
        // Without a first block that is not zero, the digest of a page of zeros would be zero under
        // every key.
        state.update(&[Block::from([1; 16])]);
        Digester(state)
    }

    /// The digest of a page; `None` in the one case in 2^128 that it is zero.
    pub(super) fn of(&self, page: &Page) -> Option<Digest> {
        let mut state = self.0.clone();
        state.update(Block::cast_slice_from_core(page.as_chunks().0));
        let digest = Digest(u128::from_le_bytes(state.finalize().into()));
        (digest != Digest::NONE).then_some(digest)
    }
}

#[cfg_attr(test, derive(Clone))]
struct DigestCluster {
    digests: [Digest; CLUSTER_SLOTS],
    used: usize,
}

#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Digests {
    clusters: Vec<Option<Box<DigestCluster>>>,
    allocated: usize,
}

impl Digests {
    pub(super) fn get(&self, slot: Slot) -> Option<Digest> {
        let (cluster, index) = slot.split();
        let digest = self.clusters.get(cluster)?.as_ref()?.digests[index];
        (digest != Digest::NONE).then_some(digest)
    }

    pub(super) fn set(&mut self, slot: Slot, digest: Digest) {
        let (at, index) = slot.split();
        if at >= self.clusters.len() {
            self.clusters.resize_with(at + 1, || None);
        }
        let allocated = &mut self.allocated;
        let cluster = self.clusters[at].get_or_insert_with(|| {
            *allocated += 1;
            Box::new(DigestCluster { digests: [Digest::NONE; CLUSTER_SLOTS], used: 0 })
        });
        let before = core::mem::replace(&mut cluster.digests[index], digest);
        cluster.used += usize::from(before == Digest::NONE);
    }

    pub(super) fn remove(&mut self, slot: Slot) {
        if self.get(slot).is_none() {
            return;
        }
        let (at, index) = slot.split();
        let Some(cluster) = &mut self.clusters[at] else { return };
        cluster.digests[index] = Digest::NONE;
        cluster.used -= 1;
        if cluster.used == 0 {
            self.clusters[at] = None;
            self.allocated -= 1;
        }
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        self.clusters.capacity() * size_of::<Option<Box<DigestCluster>>>()
            + self.allocated * size_of::<DigestCluster>()
    }
}
