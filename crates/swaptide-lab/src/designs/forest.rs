//! The swap cache as it was: radix trees, in three shapes. (docs/linux-swap.md,
//! "Earlier designs")
//!
//! | shape          | trees               | key                  |
//! |----------------|---------------------|----------------------|
//! | [`Shape::Whole`] | one for the device | offset in the device |
//! | [`Shape::Split`] | one for each 64 MiB | offset in the device |
//! | [`Shape::Small`] | one for each 64 MiB | offset in the 64 MiB |
//!
//! The swap cache stores the folio at each of its indices, and a shadow in its place when it
//! leaves; freeing a slot clears it.

use crate::designs::radix::{Tree, TreeEntry};
use swaptide_core::{FolioId, Shadow};

/// log2 of the slots of one tree when the device is split: 64 MiB.
const SPLIT_SHIFT: u32 = 14;

/// How a device is covered by trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One tree for the whole device.
    Whole,
    /// One tree for each 64 MiB, with offsets in the whole device as keys: "before" of
    /// the series swap-cache-search-space.
    Split,
    /// One tree for each 64 MiB, with offsets in the 64 MiB as keys: "after" of that
    /// series.
    Small,
}

/// What the cache says of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cached {
    /// Nothing is known.
    Nothing,
    /// The page is in this folio.
    Folio(FolioId),
    /// The folio left this behind.
    Shadow(Shadow),
}

fn folio_entry(folio: FolioId) -> TreeEntry {
    (u64::from(folio.0) + 1) << 3
}

fn shadow_entry(shadow: Shadow) -> TreeEntry {
    u64::from(shadow.0) << 2 | 1
}

fn is_folio(entry: TreeEntry) -> bool {
    entry != 0 && entry & 1 == 0
}

#[inline(always)]
fn cached(entry: TreeEntry) -> Cached {
    match entry {
        0 => Cached::Nothing,
        e if is_folio(e) => Cached::Folio(FolioId(((e >> 3) - 1) as u32)),
        e => Cached::Shadow(Shadow((e >> 2) as u32)),
    }
}

/// The swap cache of one device.
pub struct Forest {
    shape: Shape,
    trees: Box<[Tree]>,
}

impl Forest {
    /// A cache for a device of `slots` slots.
    pub fn new(shape: Shape, slots: u32) -> Self {
        let trees = if shape == Shape::Whole { 1 } else { slots.div_ceil(1 << SPLIT_SHIFT).max(1) };
        Forest { shape, trees: (0..trees).map(|_| Tree::default()).collect() }
    }

    #[inline(always)]
    fn place(&self, off: u32) -> (&Tree, u64) {
        match self.shape {
            Shape::Whole => (&self.trees[0], u64::from(off)),
            Shape::Split => (&self.trees[(off >> SPLIT_SHIFT) as usize], u64::from(off)),
            Shape::Small => (
                &self.trees[(off >> SPLIT_SHIFT) as usize],
                u64::from(off & ((1 << SPLIT_SHIFT) - 1)),
            ),
        }
    }

    /// What is known of slot `off`. Takes no lock.
    #[inline(always)]
    pub fn lookup(&self, off: u32) -> Cached {
        let (tree, index) = self.place(off);
        cached(tree.load(index))
    }

    /// The same under the tree's lock, for comparison: no kernel did this.
    #[inline(always)]
    pub(crate) fn lookup_locked(&self, off: u32) -> Cached {
        let (tree, index) = self.place(off);
        cached(tree.load_locked(index))
    }

    /// A folio enters the cache at slots that hold no folio. `false`: one of them does, and nothing
    /// was changed. Like all ranges here it lies in one cluster, hence in one tree.
    pub(crate) fn insert(&self, off: u32, n: u32, folio: FolioId) -> bool {
        let (tree, index) = self.place(off);
        tree.update(index, n.into(), |old| !is_folio(old), |_| folio_entry(folio))
    }

    /// A folio leaves, a shadow stays. `false`: another folio is there, and nothing was changed.
    pub fn remove(&self, off: u32, n: u32, folio: FolioId, shadow: Shadow) -> bool {
        let (tree, index) = self.place(off);
        tree.update(index, n.into(), |old| old == folio_entry(folio), |_| shadow_entry(shadow))
    }

    /// The slots are freed: nothing stays.
    pub(crate) fn clear(&self, off: u32, n: u32) {
        let (tree, index) = self.place(off);
        tree.update(index, n.into(), |_| true, |_| 0);
    }

    /// Levels of the highest tree.
    pub fn height(&self) -> u32 {
        self.trees.iter().map(Tree::height).max().unwrap_or(0)
    }

    /// Nodes of all trees.
    pub(crate) fn nodes(&self) -> usize {
        self.trees.iter().map(Tree::nodes).sum()
    }

    /// Bytes that are there before the first slot is used: the trees themselves.
    pub(crate) fn static_bytes(&self) -> usize {
        self.trees.len() * size_of::<Tree>()
    }

    /// Bytes of nodes in use. What the pools keep besides is not counted, in the baselines' favour.
    pub(crate) fn dynamic_bytes(&self) -> usize {
        self.nodes() * Tree::NODE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_s_life_in_every_shape() {
        for shape in [Shape::Whole, Shape::Split, Shape::Small] {
            let cache = Forest::new(shape, 1 << 20);
            let (off, n) = ((1 << 20) - 512, 16);
            assert_eq!(cache.lookup(off), Cached::Nothing);
            assert!(cache.insert(off, n, FolioId(0)));
            assert!(!cache.insert(off + 8, n, FolioId(1)), "{shape:?}: half of it is taken");
            assert_eq!(cache.lookup(off + 16), Cached::Nothing, "nothing was inserted half-way");
            assert_eq!(
                (cache.lookup(off + 15), cache.lookup_locked(off)),
                (Cached::Folio(FolioId(0)), Cached::Folio(FolioId(0)))
            );
            assert!(!cache.remove(off, n, FolioId(1), Shadow(7)));
            assert!(cache.remove(off, n, FolioId(0), Shadow(7)));
            assert_eq!(cache.lookup(off), Cached::Shadow(Shadow(7)));
            assert!(cache.insert(off, n, FolioId(u32::MAX)), "a shadow gives way");
            assert_eq!(cache.lookup(off), Cached::Folio(FolioId(u32::MAX)));
            cache.clear(off, n);
            assert_eq!((cache.lookup(off), cache.nodes(), cache.height()), (Cached::Nothing, 0, 0));
        }
    }

    #[test]
    fn the_shapes_differ_in_height_only_by_their_keys() {
        let heights = [Shape::Whole, Shape::Split, Shape::Small].map(|shape| {
            let cache = Forest::new(shape, 1 << 25);
            // Within one 64 MiB region at the end of 128 GiB.
            assert!(cache.insert((1 << 25) - 16, 16, FolioId(1)));
            assert_eq!(cache.dynamic_bytes(), cache.nodes() * 576);
            cache.height()
        });
        assert_eq!(heights, [5, 5, 3]);
    }
}
