//! One radix tree in the manner of the XArray: nodes of 64 slots, six bits of the index a level, as
//! many levels as the largest index stored needs. (docs/linux-swap.md, "Earlier
//! designs")
//!
//! Writers hold the tree's one lock. Readers take none: they walk atomic pointers. In the kernel
//! RCU keeps a node alive for late readers; here nodes are type-stable (freed with the tree,
//! recycled before) and a reader that meets a recycled node sees it by `recycled` and walks again.
//! That costs a reader one load of the line it has loaded already for the root.
//!
//! Invariants:
//! 1. A node other than one being filled by the lock's holder has at least one slot in use; a tree
//!    without entries has no node.
//! 2. The root's slots 1 to 63 are not all empty, unless the root is a leaf: the tree is as low as
//!    it can be.
//! 3. A node's memory stays a node's until the tree is dropped.
//!
//! What is left out is what would only slow it down: marks, multi-index entries, an entry kept in
//! the root pointer itself. A tree's root, its count and its lock share a cache line, nodes lie
//! side by side in slabs as the kernel's do, and a look-up is inlined where it is used.

#![allow(unsafe_code)]

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use swaptide_core::SpinLock;

const BITS: u64 = 6;
const SLOTS: usize = 1 << BITS;
const MASK: u64 = SLOTS as u64 - 1;
/// An index of 64 bits has no more levels.
const LEVELS: usize = 11;
/// Low bits that tell a pointer to a node from an entry.
const TAG_MASK: u64 = 0b11;
const TAG_NODE: u64 = 0b10;

/// What a tree stores: any word but 0 whose two low bits are not `10`. 0 stands for nothing.
pub type TreeEntry = u64;

#[repr(C, align(64))]
struct TreeNode {
    /// Bits of the index below this level.
    shift: AtomicU64,
    /// Which slot of its parent this is, and how many of its slots are in use; lock.
    place: AtomicU64,
    used: AtomicU64,
    parent: AtomicPtr<TreeNode>,
    /// What the kernel's node has besides (list linkage, marks), so that the bytes counted are the
    /// same: 576.
    _rest: [u64; 4],
    slots: [AtomicU64; SLOTS],
}

const _: () = assert!(size_of::<TreeNode>() == 576);

impl TreeNode {
    #[allow(clippy::declare_interior_mutable_const)] // copied into slabs, never read
    const EMPTY: TreeNode = TreeNode {
        shift: AtomicU64::new(0),
        place: AtomicU64::new(0),
        used: AtomicU64::new(0),
        parent: AtomicPtr::new(ptr::null_mut()),
        _rest: [0; 4],
        slots: [const { AtomicU64::new(0) }; SLOTS],
    };
}

/// Nodes made together: as many as a slab of four pages holds.
const SLAB: usize = 28;

#[derive(Default)]
struct NodePool {
    /// Every node ever made, freed when the tree is.
    slabs: Vec<NonNull<[TreeNode; SLAB]>>,
    free: Vec<NonNull<TreeNode>>,
}

// SAFETY: the pool owns its nodes; they hold atomics only.
unsafe impl Send for NodePool {}

/// A radix tree in one cache line; its nodes come from a pool of its own.
#[repr(align(64))]
pub struct Tree {
    root: AtomicPtr<TreeNode>,
    recycled: AtomicU64,
    /// Boxed: all that a look-up needs of a tree is in one line.
    pool: SpinLock<Option<Box<NodePool>>>,
}

const _: () = assert!(size_of::<Tree>() == 64);

impl Default for Tree {
    fn default() -> Self {
        Tree {
            root: AtomicPtr::new(ptr::null_mut()),
            recycled: AtomicU64::new(0),
            pool: SpinLock::new(None),
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        for slab in self.pool.lock().take().into_iter().flat_map(|pool| pool.slabs) {
            // SAFETY: made by `Box::leak` in `take`, once in `slabs`; `&mut self` says that no
            // reader is left.
            drop(unsafe { Box::from_raw(slab.as_ptr()) });
        }
    }
}

fn to_node(entry: TreeEntry) -> *mut TreeNode {
    (entry & !TAG_MASK) as *mut TreeNode
}

fn is_node(entry: TreeEntry) -> bool {
    entry & TAG_MASK == TAG_NODE
}

/// A reference to a node of the tree.
///
/// # Safety
/// `node` is null or was made by `Tree::take` of a tree that lives as long as `'a`.
unsafe fn get<'a>(node: *mut TreeNode) -> Option<&'a TreeNode> {
    // SAFETY: the caller's promise and invariant 3.
    unsafe { node.as_ref() }
}

impl Tree {
    /// Bytes of one node.
    pub(crate) const NODE_BYTES: usize = size_of::<TreeNode>();

    /// The entry at `index`; 0 when there is none. Takes no lock.
    #[inline(always)]
    pub fn load(&self, index: u64) -> TreeEntry {
        loop {
            let before = self.recycled.load(Ordering::Acquire);
            let entry = self.walk(index);
            // A slot written by a later owner of its node was released after `recycled` was raised,
            // so the raise is seen here.
            if self.recycled.load(Ordering::Acquire) == before {
                return entry;
            }
        }
    }

    #[inline(always)]
    fn walk(&self, index: u64) -> TreeEntry {
        // SAFETY: the root is null or a node of this tree.
        let Some(mut node) = (unsafe { get(self.root.load(Ordering::Acquire)) }) else { return 0 };
        let mut shift = node.shift.load(Ordering::Relaxed);
        if index >> shift > MASK {
            return 0;
        }
        for _ in 0..LEVELS {
            let entry = node.slots[((index >> shift) & MASK) as usize].load(Ordering::Acquire);
            if !is_node(entry) {
                return entry;
            }
            // SAFETY: a slot with the node tag holds a node of this tree.
            let Some(below) = (unsafe { get(to_node(entry)) }) else { return 0 };
            node = below;
            shift = node.shift.load(Ordering::Relaxed);
        }
        0
    }

    /// The same under the tree's lock.
    #[inline(always)]
    pub(crate) fn load_locked(&self, index: u64) -> TreeEntry {
        let _pool = self.pool.lock();
        self.walk(index)
    }

    /// Replaces the `n` entries from `first` by what `new` makes of each, in one critical section.
    /// Asks `check` of all of them first; when it refuses one, nothing is changed and `false`
    /// returned.
    pub(crate) fn update(
        &self,
        first: u64,
        n: u64,
        check: impl Fn(TreeEntry) -> bool,
        mut new: impl FnMut(TreeEntry) -> TreeEntry,
    ) -> bool {
        let mut guard = self.pool.lock();
        let pool = guard.get_or_insert_default();
        let mut leaf = None;
        for index in first..first + n {
            if leaf.is_none() || index & MASK == 0 {
                leaf = self.leaf(index);
            }
            if !check(
                leaf.map_or(0, |leaf| leaf.slots[(index & MASK) as usize].load(Ordering::Relaxed)),
            ) {
                return false;
            }
        }
        // One leaf needs no second walk.
        let one = first >> BITS == (first + n - 1) >> BITS;
        let mut index = first;
        while index < first + n {
            let end = ((index | MASK) + 1).min(first + n);
            let leaf = leaf.filter(|_| one).or_else(|| self.leaf(index));
            self.update_leaf(pool, leaf, index..end, &mut new);
            index = end;
        }
        true
    }

    fn update_leaf<'a>(
        &'a self,
        pool: &mut NodePool,
        mut leaf: Option<&'a TreeNode>,
        range: std::ops::Range<u64>,
        new: &mut impl FnMut(TreeEntry) -> TreeEntry,
    ) {
        for index in range {
            let i = (index & MASK) as usize;
            let old = leaf.map_or(0, |leaf| leaf.slots[i].load(Ordering::Relaxed));
            let entry = new(old);
            debug_assert!(!is_node(entry));
            if entry == 0 && old == 0 {
                continue;
            }
            let node = *leaf.get_or_insert_with(|| self.make_leaf(pool, index));
            node.slots[i].store(entry, Ordering::Release);
            let used =
                node.used.load(Ordering::Relaxed) + u64::from(entry != 0) - u64::from(old != 0);
            node.used.store(used, Ordering::Relaxed);
            if used == 0 {
                self.remove(pool, node);
                leaf = None;
            }
        }
    }

    /// The leaf of `index`, if there is one; lock held.
    fn leaf(&self, index: u64) -> Option<&TreeNode> {
        // SAFETY: the root is null or a node of this tree.
        let mut node = unsafe { get(self.root.load(Ordering::Relaxed)) }?;
        let mut shift = node.shift.load(Ordering::Relaxed);
        if index >> shift > MASK {
            return None;
        }
        while shift > 0 {
            let entry = node.slots[((index >> shift) & MASK) as usize].load(Ordering::Relaxed);
            // SAFETY: above the leaves a slot is 0 or holds a node of this tree.
            node = unsafe { get(to_node(entry)) }?;
            shift -= BITS;
        }
        Some(node)
    }

    /// The leaf of `index`, made with all that is missing above it.
    fn make_leaf(&self, pool: &mut NodePool, index: u64) -> &TreeNode {
        // SAFETY: the root is null or a node of this tree.
        let mut node = unsafe { get(self.root.load(Ordering::Relaxed)) }.unwrap_or_else(|| {
            let mut shift = 0;
            while index >> shift > MASK {
                shift += BITS;
            }
            self.new_root(pool, shift)
        });
        while index >> node.shift.load(Ordering::Relaxed) > MASK {
            let top =
                self.take(pool, node.shift.load(Ordering::Relaxed) + BITS, ptr::null_mut(), 0);
            top.slots[0].store(ptr::from_ref(node) as u64 | TAG_NODE, Ordering::Relaxed);
            top.used.store(1, Ordering::Relaxed);
            node.parent.store(ptr::from_ref(top).cast_mut(), Ordering::Relaxed);
            node.place.store(0, Ordering::Relaxed);
            self.root.store(ptr::from_ref(top).cast_mut(), Ordering::Release);
            node = top;
        }
        let mut shift = node.shift.load(Ordering::Relaxed);
        while shift > 0 {
            let i = (index >> shift) & MASK;
            let entry = node.slots[i as usize].load(Ordering::Relaxed);
            shift -= BITS;
            // SAFETY: above the leaves a slot is 0 or holds a node of this tree.
            node = match unsafe { get(to_node(entry)) } {
                Some(below) => below,
                None => {
                    let below = self.take(pool, shift, ptr::from_ref(node).cast_mut(), i);
                    node.slots[i as usize]
                        .store(ptr::from_ref(below) as u64 | TAG_NODE, Ordering::Release);
                    node.used.store(node.used.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                    below
                }
            };
        }
        node
    }

    fn new_root(&self, pool: &mut NodePool, shift: u64) -> &TreeNode {
        let root = self.take(pool, shift, ptr::null_mut(), 0);
        self.root.store(ptr::from_ref(root).cast_mut(), Ordering::Release);
        root
    }

    /// Takes an empty node out of the tree, then what became empty above it, then levels the tree
    /// no longer needs.
    fn remove(&self, pool: &mut NodePool, mut node: &TreeNode) {
        loop {
            let parent = node.parent.load(Ordering::Relaxed);
            let place = node.place.load(Ordering::Relaxed) as usize;
            // SAFETY: a node's parent is null or a node of this tree.
            let above = unsafe { get(parent) };
            match above {
                None => self.root.store(ptr::null_mut(), Ordering::Release),
                Some(above) => {
                    above.slots[place].store(0, Ordering::Release);
                    above.used.store(above.used.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
                }
            }
            self.give(pool, node);
            match above {
                None => return,
                Some(above) if above.used.load(Ordering::Relaxed) == 0 => node = above,
                Some(_) => break,
            }
        }
        // SAFETY: the root is null or a node of this tree.
        while let Some(root) = unsafe { get(self.root.load(Ordering::Relaxed)) } {
            let only = root.slots[0].load(Ordering::Relaxed);
            if root.used.load(Ordering::Relaxed) != 1 || !is_node(only) {
                return;
            }
            let below = to_node(only);
            // SAFETY: a slot with the node tag holds a node of this tree.
            if let Some(below) = unsafe { get(below) } {
                below.parent.store(ptr::null_mut(), Ordering::Relaxed);
            }
            self.root.store(below, Ordering::Release);
            // Before the slot is emptied, not after: a late reader of the old root must not take
            // that for an answer.
            self.recycled.fetch_add(1, Ordering::AcqRel);
            root.slots[0].store(0, Ordering::Release);
            self.give(pool, root);
        }
    }

    fn take(
        &self,
        pool: &mut NodePool,
        shift: u64,
        parent: *mut TreeNode,
        place: u64,
    ) -> &TreeNode {
        if pool.free.is_empty() {
            let slab = NonNull::from(Box::leak(Box::new([const { TreeNode::EMPTY }; SLAB])));
            pool.slabs.push(slab);
            // Taken from the back: in the order in which they lie.
            // SAFETY: each is one of the slab's nodes.
            pool.free.extend((0..SLAB).rev().map(|i| unsafe { slab.cast::<TreeNode>().add(i) }));
        }
        let node = pool.free.pop().expect("a slab was made when there was none");
        // SAFETY: a node of a slab, and those are freed only with the tree.
        let node: &TreeNode = unsafe { node.as_ref() };
        node.shift.store(shift, Ordering::Relaxed);
        node.place.store(place, Ordering::Relaxed);
        node.used.store(0, Ordering::Relaxed);
        node.parent.store(parent, Ordering::Relaxed);
        node
    }

    /// Back to the pool; every slot is 0.
    fn give(&self, pool: &mut NodePool, node: &TreeNode) {
        self.recycled.fetch_add(1, Ordering::AcqRel);
        pool.free.push(NonNull::from(node));
    }

    /// Levels a look-up passes: 0 for a tree without entries.
    pub fn height(&self) -> u32 {
        let _pool = self.pool.lock();
        // SAFETY: the root is null or a node of this tree.
        unsafe { get(self.root.load(Ordering::Relaxed)) }
            .map_or(0, |root| (root.shift.load(Ordering::Relaxed) / BITS) as u32 + 1)
    }

    /// Nodes in the tree.
    pub(crate) fn nodes(&self) -> usize {
        self.pool.lock().as_ref().map_or(0, |pool| pool.slabs.len() * SLAB - pool.free.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::sync::atomic::AtomicBool;

    fn set(tree: &Tree, index: u64, entry: TreeEntry) {
        assert!(tree.update(index, 1, |_| true, |_| entry));
    }

    /// Nodes a tree of these indices must have: one for each distinct prefix, from the leaves up to
    /// the level that holds all.
    fn nodes_needed(indices: impl Iterator<Item = u64> + Clone) -> (u32, usize) {
        let Some(largest) = indices.clone().max() else { return (0, 0) };
        let mut height = 1;
        while largest >> (BITS * height) != 0 {
            height += 1;
        }
        let level = |l: u64| {
            indices
                .clone()
                .map(|i| i >> (BITS * (l + 1)))
                .collect::<std::collections::BTreeSet<_>>()
                .len()
        };
        (height as u32, (0..height).map(level).sum())
    }

    #[test]
    fn height_follows_the_largest_index() {
        for (index, height) in [
            (0, 1),
            (63, 1),
            (64, 2),
            (4095, 2),
            (4096, 3),
            (262_143, 3),
            (262_144, 4),
            (1 << 24, 5),
        ] {
            let tree = Tree::default();
            set(&tree, index, 8);
            assert_eq!((tree.height(), tree.nodes()), (height, height as usize), "index {index}");
            set(&tree, index, 0);
            assert_eq!((tree.height(), tree.nodes(), tree.load(index)), (0, 0, 0));
        }
        let tree = Tree::default();
        set(&tree, 0, 8);
        set(&tree, 1 << 24, 16);
        assert_eq!((tree.height(), tree.nodes()), (5, 9));
        set(&tree, 1 << 24, 0);
        assert_eq!(
            (tree.height(), tree.nodes(), tree.load(0)),
            (1, 1, 8),
            "the tree shrinks again"
        );
    }

    #[test]
    fn a_full_64_mib_takes_261_nodes() {
        let (small, whole) = (Tree::default(), Tree::default());
        let base = 1 << 24;
        for at in (0..16384).step_by(512) {
            assert!(small.update(at, 512, |old| old == 0, |_| 8));
            assert!(whole.update(base + at, 512, |old| old == 0, |_| 8));
        }
        assert_eq!((small.height(), small.nodes()), (3, 256 + 4 + 1));
        assert_eq!(
            (whole.height(), whole.nodes()),
            (5, 256 + 4 + 1 + 2),
            "two more levels, one node each"
        );
    }

    #[test]
    fn a_refused_update_changes_nothing() {
        let tree = Tree::default();
        set(&tree, 70, 8);
        assert!(!tree.update(60, 20, |old| old == 0, |_| 16));
        assert_eq!((0..200).filter(|&i| tree.load(i) != 0).collect::<Vec<_>>(), [70]);
    }

    proptest! {
        #[test]
        fn a_tree_is_a_map(
            ops in prop::collection::vec(
                (prop_oneof![0..300u64, 0..1u64 << 30], 1..130u64, 0..3u64),
                1..200,
            ),
        ) {
            let tree = Tree::default();
            let mut map = BTreeMap::new();
            for (first, n, value) in ops {
                prop_assert!(tree.update(first, n, |_| true, |_| value * 8));
                for index in first..first + n {
                    if value == 0 {
                        map.remove(&index)
                    } else {
                        map.insert(index, value * 8)
                    };
                }
                for index in [first, first + n - 1, first + n, first.saturating_sub(1), first ^ 64]
                {
                    prop_assert_eq!(tree.load(index), map.get(&index).copied().unwrap_or(0));
                    prop_assert_eq!(tree.load_locked(index), tree.load(index));
                }
                let (height, nodes) = nodes_needed(map.keys().copied());
                prop_assert_eq!((tree.height(), tree.nodes()), (height, nodes));
            }
            prop_assert!(map.iter().all(|(&index, &value)| tree.load(index) == value));
        }
    }

    /// Nodes are recycled under the readers' feet all the time, and the tree grows and shrinks;
    /// each index has its own value or none, and the one that stays has its own always.
    #[test]
    fn readers_never_see_another_index_s_entry() {
        let tree = Tree::default();
        let stop = AtomicBool::new(false);
        let (seen, missed) = (AtomicU64::new(0), AtomicU64::new(0));
        let indices: Vec<u64> = (0..8).map(|i| i * 70_000 + i).collect();
        const STAYS: u64 = 7;
        set(&tree, STAYS, 8);
        std::thread::scope(|s| {
            let reader = s.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for &index in &indices {
                        let entry = tree.load(index);
                        assert!(entry == 0 || entry == (index + 1) * 4, "index {index}: {entry}");
                        assert_eq!(tree.load(STAYS), 8);
                        if entry == 0 { &missed } else { &seen }.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
            let enough = |met: &AtomicU64| met.load(Ordering::Relaxed) > 1000;
            let mut round = 0;
            // As long as the reader needs to meet both: on a busy machine it may start late.
            while (round < 60_000 || !enough(&seen) || !enough(&missed)) && !reader.is_finished() {
                let index = indices[round * 5 % 8];
                set(&tree, index, if tree.load(index) == 0 { (index + 1) * 4 } else { 0 });
                round += 1;
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(tree.recycled.load(Ordering::Relaxed) > 1000);
    }
}
