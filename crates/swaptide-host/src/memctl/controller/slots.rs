//! Which process slot is whose.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;

use swaptide_ipc::{Segment, SlotIndex};

/// The slot of each process. A process keeps the first one that it was seen with, whatever others
/// say.
#[derive(Default)]
pub(super) struct SlotOwners(HashMap<u32, SlotIndex>);

impl SlotOwners {
    /// Reads whose slot is which. Another slot in which the number of a process stands belongs to
    /// no process.
    pub(super) fn look(&mut self, segment: &Segment) -> HashMap<u32, SlotIndex> {
        let mut slots = HashMap::new();
        for (index, slot) in segment.claimed() {
            let pid = slot.pid.load(Relaxed);
            let own = self.0.get(&pid);
            if own.is_none_or(|own| *own == index || segment.slot(*own).pid.load(Relaxed) != pid) {
                slots.insert(pid, index);
                self.0.insert(pid, index);
            }
        }
        self.0.retain(|pid, _| slots.contains_key(pid));
        slots
    }

    /// Each process with its slot, as of the last look.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, SlotIndex)> {
        self.0.iter().map(|(pid, index)| (*pid, *index))
    }
}
