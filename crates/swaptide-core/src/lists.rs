//! The lists a device's clusters are on. All are first in, first out, doubly linked through the
//! clusters' own records, so every move is O(1) and takes no memory. (docs/linux-swap.md,
//! "Clusters")
//!
//! | list       | what is on it |
//! |------------|---------------|
//! | free       | empty clusters that were used before (never-used ones are a range, not a list) |
//! | `nonfull[o]` | clusters of order `o` in which something was freed since the last scan |
//! | `frag[o]` | clusters of order `o` that were scanned since; also those a CPU is filling |
//! | full       | clusters without a free slot |
//! | discard    | empty clusters whose place on the device is to be discarded first |
//!
//! Invariant: a cluster is on the list its `state.list` names. Lock: the lists lock guards heads,
//! tails and links; it is taken with a cluster lock held, and to take a cluster from a list the
//! cluster is only try-locked (a contended one is skipped).

use crate::cluster::{Cluster, ClusterState, ListId, NO_CLUSTER};
use crate::ids::{ClusterIndex, ORDERS};
use crate::sync::{Ordering, SpinGuard, TableDirectory};

/// Headers made together.
#[cfg(not(loom))]
const HEADERS_PER_CHUNK: usize = 32;
#[cfg(loom)]
const HEADERS_PER_CHUNK: usize = 1;

pub(crate) type Headers = TableDirectory<Cluster, HEADERS_PER_CHUNK>;

impl ListId {
    const COUNT: usize = 3 + 2 * ORDERS;

    fn index(self) -> Option<usize> {
        match self {
            ListId::None => None,
            ListId::Free => Some(0),
            ListId::Full => Some(1),
            ListId::Discard => Some(2),
            ListId::Nonfull(order) => Some(3 + usize::from(order)),
            ListId::Frag(order) => Some(3 + ORDERS + usize::from(order)),
        }
    }
}

#[derive(Clone, Copy)]
struct List {
    head: u32,
    tail: u32,
    len: u32,
}

/// All lists of one device, and the range of clusters never used: `fresh..fresh_end`.
pub(crate) struct Lists {
    lists: [List; ListId::COUNT],
    pub fresh: u32,
    pub fresh_end: u32,
}

impl Lists {
    pub fn new(clusters: u32) -> Self {
        let empty = List { head: NO_CLUSTER, tail: NO_CLUSTER, len: 0 };
        Lists { lists: [empty; ListId::COUNT], fresh: 0, fresh_end: clusters }
    }

    pub fn len(&self, id: ListId) -> u32 {
        id.index().map_or(0, |i| self.lists[i].len)
    }

    /// Puts a cluster (locked by the caller, on no list) at the tail of `id`.
    pub fn push(
        &mut self,
        headers: &Headers,
        index: ClusterIndex,
        state: &mut ClusterState,
        id: ListId,
    ) {
        debug_assert_eq!(state.list, ListId::None);
        state.list = id;
        let Some(i) = id.index() else { return };
        let list = &mut self.lists[i];
        let cluster = at(headers, index.0);
        cluster.prev.store(list.tail, Ordering::Relaxed);
        cluster.next.store(NO_CLUSTER, Ordering::Relaxed);
        if list.tail == NO_CLUSTER {
            list.head = index.0;
        } else {
            at(headers, list.tail).next.store(index.0, Ordering::Relaxed);
        }
        list.tail = index.0;
        list.len += 1;
    }

    /// Takes a cluster (locked by the caller) off its list.
    pub fn unlink(&mut self, headers: &Headers, index: ClusterIndex, state: &mut ClusterState) {
        let Some(i) = state.list.index() else { return };
        state.list = ListId::None;
        let list = &mut self.lists[i];
        let cluster = at(headers, index.0);
        let (prev, next) =
            (cluster.prev.load(Ordering::Relaxed), cluster.next.load(Ordering::Relaxed));
        if prev == NO_CLUSTER {
            list.head = next;
        } else {
            at(headers, prev).next.store(next, Ordering::Relaxed);
        }
        if next == NO_CLUSTER {
            list.tail = prev;
        } else {
            at(headers, next).prev.store(prev, Ordering::Relaxed);
        }
        list.len -= 1;
    }

    /// Takes the first cluster of `id` that is not locked. All contended looks like an empty
    /// list.
    pub fn pop<'a>(
        &mut self,
        headers: &'a Headers,
        id: ListId,
    ) -> Option<(ClusterIndex, SpinGuard<'a, ClusterState>)> {
        let mut at_index = self.lists[id.index()?].head;
        while at_index != NO_CLUSTER {
            let cluster = at(headers, at_index);
            if let Some(mut state) = cluster.try_lock() {
                let index = ClusterIndex(at_index);
                self.unlink(headers, index, &mut state);
                return Some((index, state));
            }
            at_index = cluster.next.load(Ordering::Relaxed);
        }
        None
    }

    /// Shows up to `max` clusters of `id` from its head on; locked ones are skipped.
    pub fn look(
        &self,
        headers: &Headers,
        id: ListId,
        max: u32,
        mut see: impl FnMut(ClusterIndex, &ClusterState),
    ) {
        let Some(i) = id.index() else { return };
        let mut at_index = self.lists[i].head;
        for _ in 0..max {
            if at_index == NO_CLUSTER {
                return;
            }
            let cluster = at(headers, at_index);
            if let Some(state) = cluster.try_lock() {
                see(ClusterIndex(at_index), &state);
            }
            at_index = cluster.next.load(Ordering::Relaxed);
        }
    }

    /// Takes the next never-used cluster, making its record. `None` when there is none, or no
    /// memory for the record.
    pub(crate) fn pop_fresh<'a>(
        &mut self,
        headers: &'a Headers,
    ) -> Option<(ClusterIndex, SpinGuard<'a, ClusterState>)> {
        if self.fresh == self.fresh_end {
            return None;
        }
        let cluster = headers.make(self.fresh as usize)?;
        let index = ClusterIndex(self.fresh);
        self.fresh += 1;
        // No thread can hold it for long: it is on no list and has no slot in use.
        Some((index, cluster.lock()))
    }
}

fn at(headers: &Headers, index: u32) -> &Cluster {
    headers.get(index as usize).expect("a cluster on a list has a record")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn first_in_first_out_and_contended_ones_are_skipped() {
        let headers = Headers::new(8);
        let mut lists = Lists::new(8);
        while let Some((index, mut state)) = lists.pop_fresh(&headers) {
            lists.push(&headers, index, &mut state, ListId::Nonfull(3));
        }
        assert_eq!(lists.len(ListId::Nonfull(3)), 8);
        let held = headers.get(0).unwrap().lock();
        assert_eq!(lists.pop(&headers, ListId::Nonfull(3)).unwrap().0, ClusterIndex(1));
        drop(held);
        assert_eq!(lists.pop(&headers, ListId::Nonfull(3)).unwrap().0, ClusterIndex(0));
        let mut middle = headers.get(5).unwrap().lock();
        lists.unlink(&headers, ClusterIndex(5), &mut middle);
        lists.push(&headers, ClusterIndex(5), &mut middle, ListId::Full);
        drop(middle);
        let rest: Vec<u32> =
            core::iter::from_fn(|| lists.pop(&headers, ListId::Nonfull(3)).map(|(i, _)| i.0))
                .collect();
        assert_eq!(rest, [2, 3, 4, 6, 7]);
        assert_eq!((lists.len(ListId::Nonfull(3)), lists.len(ListId::Full)), (0, 1));
        assert!(lists.pop(&headers, ListId::Free).is_none());
    }
}
