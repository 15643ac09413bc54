//! Letting processes go: their limit is lifted, everything comes back, and they continue without an
//! engine.
//!
//! It is refused where what is out does not fit into the machine, or into the cgroup, and stopped
//! when memory runs short on the way; then the processes are managed as before.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;

use swaptide_ipc::{NO_LIMIT, ProcSlot, ProcState, WITHDRAW};
use swaptide_sys::process::mem_available;

use crate::memctl::controller::MemoryController;
use crate::units::{cgroup_room, human};

/// Memory that must be left when all is back.
const MIN_FREE_BYTES: u64 = 64 << 20;
/// The same for the time of a fork, with a sixteenth of what comes back.
const FORK_FREE_BYTES: u64 = 4 << 20;
/// With less than this, it is stopped on the way.
const ABORT_BELOW_BYTES: u64 = 24 << 20;

/// How far it has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Detaching {
    /// Processes that are not let go yet.
    pub processes: usize,
    /// Bytes of them that are still out.
    pub out: u64,
    /// There is too little memory to continue.
    pub short: bool,
}

/// The processes of a run that was attached to.
#[derive(Default)]
pub(crate) struct AttachState {
    /// All that live.
    pub pids: BTreeSet<u32>,
    /// Those that are managed or will be, or were before they executed another program.
    pub managed: BTreeSet<u32>,
    /// Those that are not any more, or never were.
    pub released: BTreeSet<u32>,
}

/// In `ProcControl::detach`: the agent stays.
const RELEASE: u32 = 1;

/// Bytes of a process that are out.
fn out(slot: &ProcSlot) -> u64 {
    ProcSlot::bytes(&slot.usage.swapped_pool_bytes)
        + ProcSlot::bytes(&slot.usage.swapped_file_bytes)
}

/// True if all that is out of a process fits into memory for the time of a fork.
pub(crate) fn fits_for_fork(slot: &ProcSlot) -> bool {
    fits_into(out(slot), room())
}

/// In a small container all of its memory is less than what a detach leaves free.
fn fits_into(out: u64, room: u64) -> bool {
    out == 0 || out + out / 16 + FORK_FREE_BYTES <= room
}

/// Memory that can be had.
fn room() -> u64 {
    mem_available().unwrap_or(0).min(cgroup_room().unwrap_or(u64::MAX))
}

impl MemoryController {
    /// Begins to let processes go: one, or all of a run. Answers with those it is about.
    ///
    /// # Errors
    /// Why not, in one line; nothing has changed then.
    pub(crate) fn detach(&mut self, pids: &BTreeSet<u32>) -> Result<(), String> {
        let slots: Vec<&ProcSlot> = self.slots_of(pids).collect();
        if slots.is_empty() {
            return Err("detach: none of these processes is managed; see swaptide ctl stats".into());
        }
        let out: u64 = slots.iter().map(|slot| out(slot)).sum();
        let room = room();
        if out + MIN_FREE_BYTES > room {
            return Err(format!(
                "detach: {} would come back, and {} are free: free memory, or detach fewer \
                processes",
                human(out),
                human(room)
            ));
        }
        if let Some(run) = slots
            .iter()
            .filter_map(|slot| self.run_of(slot.pid.load(Relaxed)))
            .find(|run| run.strict)
        {
            return Err(format!("detach: {} runs with --strict, which would end it", run.program));
        }
        for slot in slots {
            let is_attached = self.run_of(slot.pid.load(Relaxed)).is_some_and(|run| run.attached);
            let order = if is_attached { WITHDRAW } else { RELEASE };
            slot.control.detach.store(order, Relaxed);
            slot.control.limit_bytes.store(NO_LIMIT, Relaxed);
            slot.wake();
        }
        Ok(())
    }

    /// How the processes of a run are that was attached to.
    pub(crate) fn attach_state(&self, root: u32) -> AttachState {
        let pids = self.tree.pids().filter(|pid| self.tree.root_of(*pid) == root).collect();
        let mut state = AttachState { pids, ..AttachState::default() };
        let slots = self.segment.claimed().map(|(_, slot)| slot);
        for slot in slots {
            let pid = slot.pid.load(Relaxed);
            match slot.state() {
                _ if !state.pids.contains(&pid) => {}
                ProcState::Watching | ProcState::Engaged => drop(state.managed.insert(pid)),
                ProcState::Refused | ProcState::Detached => drop(state.released.insert(pid)),
                ProcState::Free => {}
            }
        }
        state
    }

    /// Lets all processes of a run that was attached to go, also those that have just got an agent,
    /// or were refused. For as long as that takes, for a process may execute another program.
    pub(crate) fn withdraw(&mut self, root: u32) {
        self.runs.note_letting_go(root, true);
        for (_, slot) in self.segment.claimed() {
            if self.tree.root_of(slot.pid.load(Relaxed)) == root
                && slot.control.detach.swap(WITHDRAW, Relaxed) != WITHDRAW
            {
                slot.control.limit_bytes.store(NO_LIMIT, Relaxed);
                slot.wake();
            }
        }
    }

    /// Those of a run that are not let go yet are managed as before.
    pub(crate) fn keep_all(&mut self, root: u32) {
        let pids = self.attach_state(root).pids;
        self.runs.note_letting_go(root, false);
        self.keep_after_all(&pids);
    }

    /// How far it has got.
    pub(crate) fn detaching(&self, pids: &BTreeSet<u32>) -> Detaching {
        let busy: Vec<&ProcSlot> = self.slots_of(pids).collect();
        let out = busy.iter().map(|slot| out(slot)).sum();
        Detaching { processes: busy.len(), out, short: room() < ABORT_BELOW_BYTES }
    }

    /// Those that are not let go yet are managed as before.
    pub(crate) fn keep_after_all(&mut self, pids: &BTreeSet<u32>) {
        for slot in self.slots_of(pids) {
            slot.control.detach.store(0, Relaxed);
            slot.wake();
        }
    }

    /// The processes of a run that can be detached, or one of them.
    pub(crate) fn detachable(&self, pid: u32) -> BTreeSet<u32> {
        let is_run = self.runs().any(|run| run.launcher == pid || run.root == pid);
        let root = self.run_of(pid).map(|run| run.root);
        let in_run =
            |one: &u32| if is_run { Some(self.tree.root_of(*one)) == root } else { *one == pid };
        self.tree.pids().filter(in_run).collect()
    }

    fn slots_of(&self, pids: &BTreeSet<u32>) -> impl Iterator<Item = &'static ProcSlot> {
        let managed =
            |slot: &ProcSlot| matches!(slot.state(), ProcState::Engaged | ProcState::Watching);
        self.segment
            .claimed()
            .map(|(_, slot)| slot)
            .filter(move |slot| managed(slot) && pids.contains(&slot.pid.load(Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::fits_into;

    #[test]
    fn a_fork_in_a_small_container_needs_room_for_what_is_out_and_little_more() {
        assert!(fits_into(0, 0), "nothing comes back");
        assert!(fits_into(40 << 20, 48 << 20));
        assert!(!fits_into(40 << 20, 46 << 20));
        assert!(fits_into(1 << 20, 6 << 20));
        assert!(!fits_into(1 << 20, 4 << 20));
    }
}
