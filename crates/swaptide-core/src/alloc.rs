//! Finding free slots.
//!
//! The search, for a run of order `o`:
//! 1. the lane's current cluster of that order, from where the last allocation ended;
//! 2. on a device with discard: an empty cluster;
//! 3. nonfull[o], each once: what does not serve moves to frag[o];
//! 4. an empty cluster: one that was used before rather than a fresh one, so that the device's footprint stays small;
//! 5. a few of frag[o];
//! 6. an empty cluster that still waits for its discard: the discard is a favour, the slot is needed;
//! 7. order 0 only: any other cluster with a free slot, by frag[1], nonfull[1], frag[2], ..., frag[0].
//!
//! Invariants:
//! 1. A cluster with data serves its own order, and order 0 when nothing else is left (stealing does not change its order).
//! 2. `holes` says that a part of the cluster was freed after the last scan passed it: such a cluster stays on nonfull[o]
//!    though a lane fills it, and a lane that reaches its end looks at it once more from the start. (With the kernel's rule,
//!    any scan moves it to frag[o], and the holes are forgotten.)
//! 3. Order 0 does not fail while a slot is free: the reservation says that one is, so the search is repeated for a while when
//!    it was hidden (its cluster locked by somebody else for a moment).

use crate::cluster::{SLOTS_PER_LINE, State};
use crate::device::SwapDevice;
use crate::entry::Entry;
use crate::error::AllocError;
use crate::ids::{ClusterIndex, CpuId, FolioId, GroupId, ORDERS, Order, SLOTS_PER_CLUSTER, SwapOffset};
use crate::lists::ListId;
use crate::sync::{AtomicU64, Guard, Ordering, relax};

/// Clusters of frag[o] looked at in one search.
const FRAG_SCANS: u32 = 4;

/// Searches by order 0 before it believes that the free slot it reserved is out of reach (in clusters being discarded).
#[cfg(not(loom))]
const ORDER_0_ROUNDS: u32 = 1024;
#[cfg(loom)]
const ORDER_0_ROUNDS: u32 = 3;

const NOWHERE: u64 = u64::MAX;

/// One search: what is wanted, and the lane it is for.
struct Search<'a> {
    device: &'a SwapDevice,
    order: Order,
    entry: Entry,
    lane: &'a AtomicU64,
    no_memory: bool,
}

type Locked<'a> = (ClusterIndex, Guard<'a, State>);

impl SwapDevice {
    /// Allocates `2^order` aligned slots for `folio`: each is in the swap cache and has a count of 1, the page table that is about
    /// to point to it. `cpu` chooses the lane.
    ///
    /// # Errors
    /// [`AllocError`]; nothing was changed. Order 0 gets [`AllocError::NoRun`] only while the last free slots are in clusters that
    /// are being discarded.
    pub fn alloc_folio(&self, cpu: CpuId, order: Order, folio: FolioId, group: GroupId) -> Result<SwapOffset, AllocError> {
        self.reserve(order.pages())?;
        let entry = Entry::new_folio(folio, group);
        let mut search = Search { device: self, order, entry, lane: self.lane(cpu, order), no_memory: false };
        let rounds = if order == Order::ZERO { ORDER_0_ROUNDS } else { 1 };
        let mut spins = 0;
        for _ in 0..rounds {
            if let Some(off) = search.current().or_else(|| search.lists()) {
                return Ok(off);
            }
            if search.no_memory {
                break;
            }
            relax(&mut spins);
        }
        self.unreserve(order.pages());
        Err(if search.no_memory { AllocError::NoMemory } else { AllocError::NoRun })
    }
}

impl<'a> Search<'a> {
    /// Step 1.
    #[inline]
    fn current(&self) -> Option<SwapOffset> {
        let current = self.lane.load(Ordering::Relaxed);
        if current == NOWHERE {
            return None;
        }
        let (index, next) = (ClusterIndex((current >> 32) as u32), current as u32 as usize);
        let mut state = self.device.cluster(index).lock();
        let own = usize::from(state.order) == self.order.index();
        if state.used == 0 || !(own || self.order == Order::ZERO) {
            self.lane.store(NOWHERE, Ordering::Relaxed);
            return None;
        }
        let mut found = self.take(index, &mut state, next);
        if found.is_none() && own && state.holes && next > 0 {
            state.holes = false;
            found = self.take(index, &mut state, 0);
        }
        let home = if own && !(found.is_some() && state.holes) { ListId::Frag(state.order) } else { state.list };
        self.settle(index, state, home, found)
    }

    /// Steps 2 to 7.
    fn lists(&mut self) -> Option<SwapOffset> {
        let own = self.order.index() as u8;
        let early = if self.device.discard { self.empty() } else { None };
        early
            .or_else(|| self.scan(ListId::Nonfull(own), u32::MAX, Some(ListId::Frag(own))))
            .or_else(|| self.empty())
            .or_else(|| self.scan(ListId::Frag(own), FRAG_SCANS, None))
            .or_else(|| self.waiting_for_discard())
            .or_else(|| self.steal())
    }

    /// An empty cluster.
    fn empty(&mut self) -> Option<SwapOffset> {
        let (device, mut lists) = (self.device, self.device.lists.lock());
        let taken = match lists.pop(&device.headers, ListId::Free) {
            Some(taken) => Some(taken),
            None if lists.fresh == lists.fresh_end => None,
            None => {
                let fresh = lists.pop_fresh(&device.headers);
                self.no_memory |= fresh.is_none();
                fresh
            }
        };
        drop(lists);
        self.fill(taken?)
    }

    /// Step 6.
    fn waiting_for_discard(&mut self) -> Option<SwapOffset> {
        if !self.device.discard {
            return None;
        }
        let taken = self.device.lists.lock().pop(&self.device.headers, ListId::Discard);
        self.fill(taken?)
    }

    /// Allocates from an empty cluster taken off its list.
    fn fill(&mut self, (index, mut state): Locked<'a>) -> Option<SwapOffset> {
        if !self.device.open(self.device.cluster(index), &mut state, self.order) {
            self.no_memory = true;
            self.device.move_to(index, &mut state, ListId::Free);
            return None;
        }
        let found = self.take(index, &mut state, 0);
        assert!(found.is_some(), "{index} of {} is empty and has no free run of {}", self.device.ty, self.order);
        self.settle(index, state, ListId::Frag(self.order.index() as u8), found)
    }

    /// Scans up to `max` clusters of a list, each from its start. `to`: where a scanned cluster goes; `None` is back to its list.
    fn scan(&self, list: ListId, max: u32, to: Option<ListId>) -> Option<SwapOffset> {
        if self.order == Order::MAX && self.order != Order::ZERO {
            return None;
        }
        let rounds = max.min(self.device.lists.lock().len(list));
        for _ in 0..rounds {
            let taken = self.device.lists.lock().pop(&self.device.headers, list);
            let (index, mut state) = taken?;
            if usize::from(state.order) == self.order.index() {
                state.holes = false;
            }
            let found = self.take(index, &mut state, 0);
            let off = self.settle(index, state, to.unwrap_or(list), found);
            if off.is_some() {
                return off;
            }
        }
        None
    }

    /// Step 7.
    fn steal(&self) -> Option<SwapOffset> {
        if self.order != Order::ZERO {
            return None;
        }
        let others = (1..ORDERS as u8).flat_map(|order| [ListId::Frag(order), ListId::Nonfull(order)]);
        others.chain([ListId::Frag(0)]).find_map(|list| self.scan(list, u32::MAX, None))
    }

    /// Takes the first free run at or after slot `start` of a locked cluster.
    #[inline]
    fn take(&self, index: ClusterIndex, state: &mut State, start: usize) -> Option<usize> {
        let n = self.order.pages() as usize;
        if usize::from(state.used) + n > SLOTS_PER_CLUSTER {
            return None;
        }
        let table = self.device.pool.get(self.device.cluster(index).table()?);
        let lines = u64::MAX >> (u64::BITS as usize - n.div_ceil(SLOTS_PER_LINE));
        let mut at = start.next_multiple_of(n);
        while at + n <= SLOTS_PER_CLUSTER {
            let line = at / SLOTS_PER_LINE;
            let open = state.open >> line;
            if open & lines != lines {
                // The next line with a free slot; the run's own first line may be open and another one not.
                let skip = (open & !1).trailing_zeros() as usize;
                at = ((line + skip) * SLOTS_PER_LINE).next_multiple_of(n).max((at + 1).next_multiple_of(n));
                continue;
            }
            // From the back: a used slot near the end of the run is as good a reason as one near its start.
            if (at..at + n).rev().all(|i| table.get_locked(i).is_free()) {
                (at..at + n).for_each(|i| table.set(i, self.entry));
                state.used += n as u16;
                if n >= SLOTS_PER_LINE {
                    state.open &= !(lines << line);
                }
                return Some(at);
            }
            at += n;
            if n == 1 && at.is_multiple_of(SLOTS_PER_LINE) && start <= line * SLOTS_PER_LINE {
                state.open &= !(1 << line);
            }
        }
        None
    }

    /// After an attempt: the cluster goes to its list, the lane remembers where it was.
    #[inline]
    fn settle(&self, index: ClusterIndex, mut state: Guard<'_, State>, home: ListId, found: Option<usize>) -> Option<SwapOffset> {
        let full = usize::from(state.used) == SLOTS_PER_CLUSTER;
        self.device.move_to(index, &mut state, if full { ListId::Full } else { home });
        let next = found.map(|at| at + self.order.pages() as usize).filter(|&next| !full && next < SLOTS_PER_CLUSTER);
        // A lane is a hint: a lost update costs a search, nothing else.
        self.lane.store(next.map_or(NOWHERE, |next| u64::from(index.0) << 32 | next as u64), Ordering::Relaxed);
        found.map(|at| index.slot(at))
    }
}
