//! The memory compressed objects live in: a size-class allocator over one reserved mapping.
//!
//! The mapping is cut into blocks of [`BLOCK_BYTES`] of address space. A block in use belongs to
//! one size class, of which it holds as many objects as fit its first 8 to 16 pages (each class has
//! its own page count, the one that wastes least); the rest of its address space is never touched.
//! A block's pages are populated in one go when it is started, and given back when it empties; a
//! few emptied blocks are kept warm, because the next swap-out wants pages again.
//!
//! Each object has a [`ObjectHead`] next to its block, not in it: which slot it belongs to, how
//! long it is, the checksum of its bytes. The head is what makes a mix-up or damage visible, and
//! what lets compaction find the handle to change.
//!
//! Invariants:
//! 1. `resident_pages` is the sum of the blocks' `resident`, and at least what the kernel has given
//!    us for the mapping.
//! 2. A block in use that is not full is on exactly one list: that of its class and fullness group.
//!    No other block is.
//! 3. A class whose bit in `loose` is not set has no block that compaction could free, unless one
//!    was started since.
//! 4. An object's block is of the smallest class that fits it or one of the next four; compaction
//!    moves objects only into blocks that are there already, so it never needs memory.
//!
//! No lock in here: the device's lock guards it.

use swaptide_sys::mem::{Mapping, prefetch};

use super::PoolFull;
use super::classes::{
    BLOCK_BYTES, CLASS, CLASSES, Class, MAX_OBJECTS, MIN_PAGES_PER_BLOCK, class_of,
};
use crate::PAGE_SIZE;

/// An object id has 20 bits for its block.
const MAX_BLOCKS: usize = 1 << 20;
/// Bits of an object id for the place in the block.
const INDEX_BITS: u32 = 11;
const _: () = assert!(MAX_OBJECTS <= 1 << INDEX_BITS);
/// Emptied blocks that keep their pages for the next use.
const WARM_BLOCKS: usize = 16;
/// The excess over the limit that the pool may have while objects are replaced by smaller ones: a
/// new block for each class among them.
const REPLACE_SLACK_BYTES: usize = 16 * BLOCK_BYTES;
/// The address space is scarce when it has room for fewer pages than these and a sixteenth of its
/// blocks: more than all that can be on their way out of a program at a time. Of a small one, half.
const SCARCE_PAGES: usize = 32 << 10;
const SCARCE_DIVISOR: usize = 16;
/// The number of cache lines to prefetch of an object that will be read: the CPU prefetches the
/// rest.
const PREFETCH_LINES: usize = 8;
const LINE_BYTES: usize = 64;
/// Fullness groups of blocks that are not full, by quarters.
const FULLNESS_GROUPS: usize = 4;
const NONE: u32 = u32::MAX;

/// The address of an object: its block and its place in it. 31 bits.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct ObjectId(u32);

impl ObjectId {
    fn new(block: u32, index: u16) -> ObjectId {
        ObjectId(block << INDEX_BITS | u32::from(index))
    }

    /// From the 31 bits [`Self::bits`] gave.
    pub(super) fn from_bits(bits: u32) -> ObjectId {
        ObjectId(bits)
    }

    pub(super) fn bits(self) -> u32 {
        self.0
    }

    fn block(self) -> usize {
        (self.0 >> INDEX_BITS) as usize
    }

    fn index(self) -> usize {
        (self.0 & ((1 << INDEX_BITS) - 1)) as usize
    }
}

/// Whose an object is.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct ObjectHead {
    /// The slot, of a unit the first one, and [`ObjectHead::RECOMPRESSED`];
    /// [`ObjectHead::FREE`] when there is no object.
    pub(super) slot: u32,
    /// Bytes stored; of a free place, the next free one.
    pub(super) len: u16,
    /// Of a unit, which of its pages still have a slot. Zero: not a unit.
    pub(super) live: u16,
    /// Checksum of the bytes.
    pub(super) sum: u32,
}

impl ObjectHead {
    const FREE: u32 = u32::MAX;
    /// Flag of a slot whose page needs no second look: it was compressed as well as it
    /// can be. Not used for units.
    pub(super) const RECOMPRESSED: u32 = 1 << 30;
    /// End of a block's free list.
    const END: u16 = u16::MAX;

    /// The slot, or first slot.
    pub(super) fn owner(self) -> u32 {
        self.slot & !ObjectHead::RECOMPRESSED
    }
}

struct Block {
    heads: Box<[ObjectHead]>,
    prev: u32,
    next: u32,
    used: u16,
    /// Start of the list of places that were used and freed.
    free: u16,
    /// Places from here on were never used.
    fresh: u16,
    class: u8,
    /// Pages the kernel has given us.
    resident: u8,
}

impl Block {
    fn group(&self) -> Option<usize> {
        let objects = usize::from(CLASS[usize::from(self.class)].objects);
        let used = usize::from(self.used);
        (used < objects).then(|| used * FULLNESS_GROUPS / objects)
    }
}

#[derive(Copy, Clone)]
struct ClassState {
    /// Heads of the lists of blocks that are not full, by group.
    lists: [u32; FULLNESS_GROUPS],
    blocks: u32,
    used: u32,
}

pub(super) struct ObjectPool {
    memory: Mapping,
    blocks: Vec<Block>,
    /// Blocks without pages (unless the program locked its memory).
    cold: Vec<u32>,
    /// Empty blocks with pages.
    warm: Vec<u32>,
    classes: [ClassState; CLASSES],
    resident_pages: usize,
    /// Pages that were populated so far.
    populated: u64,
    stored: usize,
    objects: usize,
    head_bytes: usize,
    /// Most bytes `resident_pages` may come to.
    limit: usize,
    /// Bytes that may be had beyond it for now.
    slack: usize,
    /// Classes in which, or above which, objects were freed since compaction last found nothing
    /// there.
    loose: u128,
}

impl ObjectPool {
    /// A pool with room for `bytes` of objects, as far as the address space allows.
    pub(super) fn new(bytes: usize) -> Result<ObjectPool, swaptide_sys::Errno> {
        // A block uses at least half of its address space; an eighth more for blocks that are not
        // full.
        let want = (bytes * 2 + bytes / 4).div_ceil(BLOCK_BYTES) + 2 * CLASSES;
        let mut blocks = want.min(MAX_BLOCKS);
        let memory = loop {
            match Mapping::reserve(blocks * BLOCK_BYTES) {
                Ok(memory) => break memory,
                // An address space limit (RLIMIT_AS, strict overcommit): a smaller pool is better
                // than none.
                Err(_) if blocks > 4 * CLASSES => blocks /= 2,
                Err(errno) => return Err(errno),
            }
        };
        Ok(ObjectPool {
            memory,
            blocks: Vec::new(),
            cold: Vec::new(),
            warm: Vec::with_capacity(WARM_BLOCKS),
            classes: [ClassState { lists: [NONE; FULLNESS_GROUPS], blocks: 0, used: 0 }; CLASSES],
            resident_pages: 0,
            populated: 0,
            stored: 0,
            objects: 0,
            head_bytes: 0,
            limit: usize::MAX,
            slack: 0,
            loose: 0,
        })
    }

    /// Blocks of the address space.
    fn all_blocks(&self) -> usize {
        self.memory.len() / BLOCK_BYTES
    }

    /// Returns the number of pages of any size that certainly find room, limit aside: as many as
    /// fit the blocks that are not in use, if each class begins a block.
    pub(super) fn room_pages(&self) -> usize {
        let unused = self.all_blocks() - self.blocks.len() + self.cold.len() + self.warm.len();
        unused.saturating_sub(CLASSES) * MIN_PAGES_PER_BLOCK
    }

    /// See [`SCARCE_PAGES`]: there is room for fewer pages than this.
    pub(super) fn scarce_below(&self) -> usize {
        let all = self.all_blocks() * MIN_PAGES_PER_BLOCK;
        (SCARCE_PAGES + all / SCARCE_DIVISOR).min(all / 2)
    }

    pub(super) fn set_limit(&mut self, bytes: usize) {
        self.limit = bytes;
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes of memory the blocks hold.
    pub(super) fn resident_bytes(&self) -> usize {
        self.resident_pages * PAGE_SIZE
    }

    /// Returns the addresses of the objects.
    #[cfg(test)]
    pub(super) fn range(&self) -> swaptide_sys::page::VirtRange {
        swaptide_sys::page::VirtRange::from_len(
            swaptide_sys::page::VirtAddr(self.memory.as_ptr() as usize),
            self.memory.len(),
        )
    }

    pub(super) fn populated(&self) -> u64 {
        self.populated
    }

    pub(super) fn stored_bytes(&self) -> usize {
        self.stored
    }

    pub(super) fn objects(&self) -> usize {
        self.objects
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        size_of::<ObjectPool>()
            + self.blocks.capacity() * size_of::<Block>()
            + self.head_bytes
            + (self.cold.capacity() + self.warm.capacity()) * size_of::<u32>()
    }

    /// Room for an object of `head.len` bytes.
    pub(super) fn alloc(&mut self, head: ObjectHead) -> Result<ObjectId, PoolFull> {
        let class = class_of(head.len.into());
        let block = match self.block_with_room(class, 0) {
            Some(block) => block,
            // At the limit, a place that is a little too large is better than none.
            None => self
                .start_block(class)
                .or_else(|full| self.block_with_room(class, 4).ok_or(full))?,
        };
        Ok(self.place(block, head))
    }

    /// Room for what replaces a larger object. At the limit it may go a little beyond: were the new
    /// one put into a place of the old one's size, which is all there is there, nothing would be
    /// gained. Where address space is scarce it begins no block: what comes from the program needs
    /// those.
    pub(super) fn alloc_for_less(&mut self, head: ObjectHead) -> Result<ObjectId, PoolFull> {
        if self.room_pages() < self.scarce_below() {
            let block = self.block_with_room(class_of(head.len.into()), 0).ok_or(PoolFull)?;
            return Ok(self.place(block, head));
        }
        self.slack = REPLACE_SLACK_BYTES;
        let id = self.alloc(head);
        self.slack = 0;
        id
    }

    /// Gives an object's room back, and the block's pages with its last object.
    pub(super) fn free(&mut self, id: ObjectId) {
        let block = id.block() as u32;
        self.unlink(block);
        self.vacate(id);
        // Room in a class is room for the one below, too.
        let bit = 1 << self.blocks[id.block()].class;
        self.loose |= bit | bit >> 1;
        if self.blocks[id.block()].used == 0 {
            self.retire_block(block, true);
        } else {
            self.link(block);
        }
    }

    pub(super) fn head(&self, id: ObjectId) -> ObjectHead {
        let head = self.blocks[id.block()].heads[id.index()];
        assert!(head.slot != ObjectHead::FREE, "compressed pool: a handle points at a free object");
        head
    }

    /// Prefetches the head and the first bytes of an object that will be read soon.
    pub(super) fn prefetch(&self, id: ObjectId) {
        let Some(block) = self.blocks.get(id.block()) else { return };
        let Some(head) = block.heads.get(id.index()) else { return };
        prefetch(head);
        let size = CLASS[usize::from(block.class)].size as usize;
        let bytes = self.memory.as_ptr().wrapping_add(id.block() * BLOCK_BYTES + id.index() * size);
        for line in 0..PREFETCH_LINES.min(size.div_ceil(LINE_BYTES)) {
            prefetch(bytes.wrapping_add(line * LINE_BYTES));
        }
    }

    pub(super) fn mark_recompressed(&mut self, id: ObjectId) {
        self.blocks[id.block()].heads[id.index()].slot |= ObjectHead::RECOMPRESSED;
    }

    pub(super) fn set_live(&mut self, id: ObjectId, live: u16) {
        self.blocks[id.block()].heads[id.index()].live = live;
    }

    /// An object's bytes.
    pub(super) fn bytes(&self, id: ObjectId) -> &[u8] {
        let (offset, len) = self.extent(id);
        // SAFETY: `extent` keeps inside the mapping, which lives as long as `self`; anonymous
        // memory is always initialized, and only `bytes_mut`, which borrows the pool exclusively,
        // writes to it.
        unsafe { core::slice::from_raw_parts(self.memory.as_ptr().add(offset), len) }
    }

    pub(super) fn bytes_mut(&mut self, id: ObjectId) -> &mut [u8] {
        let (offset, len) = self.extent(id);
        // SAFETY: `extent` keeps inside the mapping, which lives as long as `self`; anonymous
        // memory is always initialized, and `self` is borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.memory.as_ptr().add(offset), len) }
    }

    /// Offset and length of an object; always inside the mapping.
    fn extent(&self, id: ObjectId) -> (usize, usize) {
        let size = CLASS[usize::from(self.blocks[id.block()].class)].size as usize;
        let len = usize::from(self.head(id).len);
        let offset = id.block() * BLOCK_BYTES + id.index() * size;
        assert!(
            len <= size && offset + len <= self.memory.len(),
            "compressed pool: an object outside its block"
        );
        (offset, len)
    }

    /// Moves the objects of one sparse block of some class into other blocks, so that it becomes
    /// free.
    ///
    /// `moved` is told of every object's new place. Returns the bytes copied, or `None` when no
    /// block can be freed so. `cursor` remembers the class to continue with.
    pub(super) fn compact_one(
        &mut self,
        cursor: &mut usize,
        mut moved: impl FnMut(ObjectHead, ObjectId),
    ) -> Option<usize> {
        let mut copied = 0;
        for class in (0..CLASSES).map(|i| (*cursor + i) % CLASSES) {
            if self.loose == 0 {
                break;
            }
            if self.loose & 1 << class == 0 {
                continue;
            }
            let Some(source) = self.emptiest(class) else {
                self.loose &= !(1 << class);
                continue;
            };
            let used = usize::from(self.blocks[source as usize].used);
            let here = self.pages_with_room(class) - (usize::from(CLASS[class].objects) - used);
            let above = if class + 1 < CLASSES { self.pages_with_room(class + 1) } else { 0 };
            if here + above >= used && self.empty_into_others(source, &mut copied, &mut moved) {
                *cursor = class;
                // What was moved away made room below; blocks of the class above may have filled
                // up, which frees nothing.
                self.loose |= (1 << class) >> 1;
                return Some(copied);
            }
            self.loose &= !(1 << class);
        }
        None
    }

    /// Moves a block's objects elsewhere, each into a block of its own class or the one above, as
    /// long as there is room; `true` when the block is empty and retired.
    fn empty_into_others(
        &mut self,
        source: u32,
        copied: &mut usize,
        moved: &mut impl FnMut(ObjectHead, ObjectId),
    ) -> bool {
        self.unlink(source);
        for index in 0..self.blocks[source as usize].fresh {
            let from = ObjectId::new(source, index);
            let head = self.blocks[source as usize].heads[usize::from(index)];
            if head.slot == ObjectHead::FREE {
                continue;
            }
            let Some(target) = self.block_with_room(class_of(head.len.into()), 1) else {
                self.link(source);
                return false;
            };
            let (source_at, len) = self.extent(from);
            let to = self.place(target, head);
            let (target_at, _) = self.extent(to);
            // SAFETY: both ranges are inside the mapping (`extent`) and in different blocks: the
            // source is on no list.
            unsafe {
                let base = self.memory.as_ptr();
                core::ptr::copy_nonoverlapping(
                    base.add(source_at).cast_const(),
                    base.add(target_at),
                    len,
                );
            }
            self.vacate(from);
            moved(head, to);
            *copied += len;
        }
        self.retire_block(source, false);
        true
    }

    /// Free places in a class's blocks.
    fn pages_with_room(&self, class: usize) -> usize {
        let ClassState { blocks, used, .. } = self.classes[class];
        (blocks * u32::from(CLASS[class].objects) - used) as usize
    }

    /// Gives the pages of all warm blocks back.
    pub(super) fn discard_warm(&mut self) {
        while let Some(block) = self.warm.pop() {
            self.discard(block);
        }
    }

    /// The fullest block (by group) of a class, or else of one of the next `more` classes, that
    /// still has room: filling those keeps the others emptying.
    fn block_with_room(&self, class: usize, more: usize) -> Option<u32> {
        let classes = self.classes.iter().skip(class).take(1 + more);
        classes.flat_map(|state| state.lists.iter().rev()).copied().find(|&block| block != NONE)
    }

    /// The emptiest block of a class, among the first few of its emptiest group.
    fn emptiest(&self, class: usize) -> Option<u32> {
        let mut at = self.classes[class].lists.iter().copied().find(|&block| block != NONE)?;
        let mut best = at;
        for _ in 0..16 {
            if self.blocks[at as usize].used < self.blocks[best as usize].used {
                best = at;
            }
            at = self.blocks[at as usize].next;
            if at == NONE {
                break;
            }
        }
        Some(best)
    }

    /// Puts an object into a listed block that has room.
    fn place(&mut self, block: u32, head: ObjectHead) -> ObjectId {
        self.unlink(block);
        let b = &mut self.blocks[block as usize];
        let index = if b.free == ObjectHead::END {
            b.fresh += 1;
            b.fresh - 1
        } else {
            let index = b.free;
            b.free = b.heads[usize::from(index)].len;
            index
        };
        b.heads[usize::from(index)] = head;
        b.used += 1;
        self.classes[usize::from(b.class)].used += 1;
        self.stored += usize::from(head.len);
        self.objects += 1;
        self.link(block);
        ObjectId::new(block, index)
    }

    /// Takes an object out of its block, which is on no list.
    fn vacate(&mut self, id: ObjectId) {
        let b = &mut self.blocks[id.block()];
        let head = &mut b.heads[id.index()];
        assert!(head.slot != ObjectHead::FREE, "compressed pool: an object is freed twice");
        self.stored -= usize::from(head.len);
        *head = ObjectHead { slot: ObjectHead::FREE, len: b.free, live: 0, sum: 0 };
        b.free = id.index() as u16;
        b.used -= 1;
        self.classes[usize::from(b.class)].used -= 1;
        self.objects -= 1;
    }

    fn start_block(&mut self, class: usize) -> Result<u32, PoolFull> {
        let Class { pages, objects, .. } = CLASS[class];
        let block = self.empty_block(pages)?;
        let heads =
            vec![ObjectHead { slot: ObjectHead::FREE, len: 0, live: 0, sum: 0 }; objects.into()]
                .into_boxed_slice();
        self.head_bytes += size_of_val(&*heads);
        let b = &mut self.blocks[block as usize];
        let missing = pages.saturating_sub(b.resident);
        let excess = usize::from(b.resident.saturating_sub(pages)) * PAGE_SIZE;
        // What a warm block has beyond would be held for nothing as long as the block lives. A
        // refusal is harmless: it stays counted.
        if excess > 0
            && self
                .memory
                .discard(block as usize * BLOCK_BYTES + usize::from(pages) * PAGE_SIZE, excess)
                .is_ok()
        {
            b.resident = pages;
            self.resident_pages -= excess / PAGE_SIZE;
        }
        if missing > 0 {
            let from = usize::from(b.resident) * PAGE_SIZE;
            b.resident = pages;
            self.resident_pages += usize::from(missing);
            self.populated += u64::from(missing);
            // One call instead of a fault per page. Where the kernel cannot, the faults come one by
            // one.
            let _ = self.memory.populate_write(
                block as usize * BLOCK_BYTES + from,
                usize::from(missing) * PAGE_SIZE,
            );
        }
        let b = &mut self.blocks[block as usize];
        *b = Block {
            heads,
            prev: NONE,
            next: NONE,
            used: 0,
            free: ObjectHead::END,
            fresh: 0,
            class: class as u8,
            resident: b.resident,
        };
        self.classes[class].blocks += 1;
        self.link(block);
        Ok(block)
    }

    /// A block to start, warm if possible, that will have `pages` pages within the limit.
    fn empty_block(&mut self, pages: u8) -> Result<u32, PoolFull> {
        let pages = usize::from(pages);
        if let Some(block) = self.warm.pop() {
            let more = pages.saturating_sub(self.blocks[block as usize].resident.into());
            if (self.resident_pages + more) * PAGE_SIZE <= self.limit.saturating_add(self.slack) {
                return Ok(block);
            }
            self.discard(block);
        }
        if (self.resident_pages + pages) * PAGE_SIZE > self.limit.saturating_add(self.slack) {
            self.discard_warm();
            if (self.resident_pages + pages) * PAGE_SIZE > self.limit.saturating_add(self.slack) {
                return Err(PoolFull);
            }
        }
        if let Some(block) = self.cold.pop() {
            return Ok(block);
        }
        let block = self.blocks.len();
        if block == self.memory.len() / BLOCK_BYTES {
            return Err(PoolFull);
        }
        self.blocks.push(Block {
            heads: Box::default(),
            prev: NONE,
            next: NONE,
            used: 0,
            free: ObjectHead::END,
            fresh: 0,
            class: 0,
            resident: 0,
        });
        Ok(block as u32)
    }

    /// An empty block on no list becomes warm, if that is wanted and there are few, or cold.
    fn retire_block(&mut self, block: u32, keep: bool) {
        let b = &mut self.blocks[block as usize];
        self.head_bytes -= size_of_val(&*b.heads);
        b.heads = Box::default();
        self.classes[usize::from(b.class)].blocks -= 1;
        if keep && self.warm.len() < WARM_BLOCKS {
            self.warm.push(block);
        } else {
            self.discard(block);
        }
    }

    /// Gives an empty block's pages back to the kernel.
    fn discard(&mut self, block: u32) {
        let b = &mut self.blocks[block as usize];
        let len = usize::from(b.resident) * PAGE_SIZE;
        // Refused only for memory locked by mlockall(); the pages are then still ours, and stay
        // counted.
        if self.memory.discard(block as usize * BLOCK_BYTES, len).is_ok() {
            self.resident_pages -= usize::from(b.resident);
            b.resident = 0;
        }
        self.cold.push(block);
    }

    fn link(&mut self, block: u32) {
        let b = &self.blocks[block as usize];
        let Some(group) = b.group() else { return };
        let list = &mut self.classes[usize::from(b.class)].lists[group];
        let next = core::mem::replace(list, block);
        let b = &mut self.blocks[block as usize];
        (b.prev, b.next) = (NONE, next);
        if next != NONE {
            self.blocks[next as usize].prev = block;
        }
    }

    fn unlink(&mut self, block: u32) {
        let b = &self.blocks[block as usize];
        let Some(group) = b.group() else { return };
        let (class, prev, next) = (usize::from(b.class), b.prev, b.next);
        if prev == NONE {
            self.classes[class].lists[group] = next;
        } else {
            self.blocks[prev as usize].next = next;
        }
        if next != NONE {
            self.blocks[next as usize].prev = prev;
        }
    }

    /// Classes that compaction would look at (tests).
    #[cfg(test)]
    pub(super) fn loose(&self) -> u128 {
        self.loose
    }

    /// Recounts everything and compares (tests).
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut resident = 0;
        let mut stored = 0;
        let mut objects = 0;
        let mut listed = 0;
        for (class, state) in self.classes.iter().enumerate() {
            let in_class = |b: &&Block| usize::from(b.class) == class && !b.heads.is_empty();
            assert_eq!(state.blocks as usize, self.blocks.iter().filter(in_class).count());
            assert_eq!(
                state.used,
                self.blocks.iter().filter(in_class).map(|b| u32::from(b.used)).sum::<u32>()
            );
            for (group, &first) in state.lists.iter().enumerate() {
                let (mut at, mut prev) = (first, NONE);
                while at != NONE {
                    let b = &self.blocks[at as usize];
                    assert_eq!(
                        (usize::from(b.class), b.group(), b.prev),
                        (class, Some(group), prev)
                    );
                    listed += 1;
                    (prev, at) = (at, b.next);
                }
            }
        }
        for b in &self.blocks {
            resident += usize::from(b.resident);
            let live = b.heads.iter().filter(|head| head.slot != ObjectHead::FREE);
            assert_eq!(usize::from(b.used), live.clone().count());
            stored += live.map(|head| usize::from(head.len)).sum::<usize>();
            objects += usize::from(b.used);
            listed -= usize::from(!b.heads.is_empty() && b.group().is_some());
        }
        assert_eq!(listed, 0, "listed blocks against blocks with room");
        assert_eq!((resident, stored, objects), (self.resident_pages, self.stored, self.objects));
    }
}
