//! `--strict`: when a run is ended for its memory.
//!
//! Owns since when a run is above its budget, and the last look at the shared memory that its
//! processes have mapped. The memory of a run is all that its processes have resident and
//! anonymous, managed or not (locked, read-only, of raw clones, of processes that were detached),
//! and shared memory: what the run's pager has, or what its processes have mapped, whichever is
//! more.
//!
//! A run is ended where
//! - its memory is above the budget and [`margin`] at every look of [`MAX_EXCESS_TIME`]; or
//! - swap space ran out for it since it was last within its budget, and its memory is more than a
//!   twentieth above.
//!
//! Invariant: a shorter peak ends nothing, whatever its height.
//!
//! Locks: none; the controller's thread alone.

use std::time::{Duration, Instant};

use swaptide_sys::process::{pss_shmem, rss_shmem};

/// The time that a run may be above its budget.
const MAX_EXCESS_TIME: Duration = Duration::from_secs(5);
/// How old the look at shared memory may be; it walks page tables.
const SHARED_AGE: Duration = Duration::from_millis(500);

/// Returns the excess over its budget that a run may keep: engines count in steps.
fn margin(budget: u64) -> u64 {
    budget / 20 + (4 << 20)
}

/// Why a run is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// Swap space is out.
    NoSpace,
    /// It was above its budget for too long.
    OverBudget,
}

/// The state of one run.
#[derive(Default)]
pub(super) struct Excess {
    since: Option<Instant>,
    shared: Option<(Instant, u64)>,
}

impl Excess {
    /// Whether the run is to be ended, which has `used` bytes of `most` at `now`; `no_space`: swap
    /// space ran out.
    pub(super) fn look(
        &mut self,
        used: u64,
        most: u64,
        no_space: bool,
        now: Instant,
    ) -> Option<Reason> {
        if no_space && used > most.saturating_add(most / 20) {
            return Some(Reason::NoSpace);
        }
        if used <= most.saturating_add(margin(most)) {
            self.since = None;
            return None;
        }
        let since = *self.since.get_or_insert(now);
        (now.duration_since(since) >= MAX_EXCESS_TIME).then_some(Reason::OverBudget)
    }

    /// Bytes of shared memory that the processes have mapped, each page once. Read only where it
    /// could make a difference: the processes have mapped more than `enough` bytes, what they have
    /// in common counted for each of them.
    pub(super) fn mapped_shared(
        &mut self,
        pids: impl Iterator<Item = u32> + Clone,
        enough: u64,
        now: Instant,
    ) -> u64 {
        if let Some((at, bytes)) =
            self.shared.filter(|(at, _)| now.duration_since(*at) < SHARED_AGE)
        {
            let _ = at;
            return bytes;
        }
        let most: u64 = pids.clone().filter_map(rss_shmem).fold(0, u64::saturating_add);
        let bytes =
            if most > enough { pids.filter_map(pss_shmem).fold(0, u64::saturating_add) } else { 0 };
        self.shared = Some((now, bytes));
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_peak_ends_nothing_and_what_lasts_does() {
        let (mut excess, start) = (Excess::default(), Instant::now());
        let mut at = |used: u64, seconds: f32| {
            excess.look(used * MIB, 64 * MIB, false, start + Duration::from_secs_f32(seconds))
        };
        assert_eq!(at(200, 0.0), None);
        assert_eq!(at(200, 4.9), None);
        assert_eq!(at(71, 4.95), None, "within the margin");
        assert_eq!(at(200, 5.1), None, "it begins again");
        assert_eq!(at(72, 10.0), None);
        assert_eq!(at(72, 10.2), Some(Reason::OverBudget));
    }

    #[test]
    fn where_swap_space_is_out_it_ends_at_once_beyond_a_twentieth() {
        let (mut excess, now) = (Excess::default(), Instant::now());
        assert_eq!(excess.look(67 * MIB, 64 * MIB, true, now), None);
        assert_eq!(excess.look(68 * MIB, 64 * MIB, true, now), Some(Reason::NoSpace));
    }

    #[test]
    fn shared_memory_counts_once_however_many_have_mapped_it() {
        let me = || std::iter::once(std::process::id());
        let memory = swaptide_sys::mem::memfd_create(c"test", 8 * MIB).expect("memfd");
        let map = swaptide_sys::mem::SharedMap::map(std::os::fd::AsFd::as_fd(&memory), 8 << 20)
            .expect("map");
        let start = map.leak();
        // SAFETY: the mapping is so long and writable, and nothing else refers to it.
        unsafe { std::ptr::write_bytes(start.as_ptr().cast::<u8>(), 1, 8 << 20) };
        let now = Instant::now();
        let bytes = Excess::default().mapped_shared(me(), 0, now);
        assert!((8 * MIB..512 * MIB).contains(&bytes), "{bytes}");
        assert_eq!(
            Excess::default().mapped_shared(me(), 1 << 40, now),
            0,
            "it makes no difference"
        );
    }
}
