//! Whether this process is in a *copy-on-write group*: whether others have much of its memory too,
//! since a fork, compressed memory among it.
//!
//! What one of a copy-on-write group gives up, the others still have: to write compressed memory to
//! the swap areas frees nothing, to copy what is shared in order to take it out takes room, and the
//! next child would have to read all of it. So in a copy-on-write group compressed memory may have
//! almost all of the limit, copies of pages that came back from it stay, it is not made smaller by
//! zstd, and what shows how a limit is best divided is not listened to. A process is in one for a
//! while after a fork, and then as long as the supervisor continues saying that they share
//! ([`ProcControl::cow_hint`](swaptide_ipc::ProcControl)).
//!
//! Owns: that state, and the limit between a fork and the supervisor's first word about it.
//!
//! Invariants
//! 1. A limit that a fork left is heeded after [`FORK_LIMIT_TIMEOUT`] at the latest.
//! 2. A process that shares nothing any more is in no copy-on-write group after
//!    [`HINT_HYSTERESIS`], and compressed memory that is past its share for so long goes to the
//!    swap areas in a copy-on-write group, too.
//!
//! Locks: none; atomics, each read on its own.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use swaptide_sys::thread::now;

/// The time that a process waits after a fork for the supervisor to set both limits.
const FORK_LIMIT_TIMEOUT: Duration = Duration::from_millis(100);
/// What the supervisor says may change and change back within so long: it carries on what it
/// measures in between.
const HINT_HYSTERESIS: Duration = Duration::from_millis(200);
/// A fork is in its parent's copy-on-write group for so long, whatever the supervisor says: until
/// then it has measured.
const CHILD_MEMBERSHIP: Duration = Duration::from_secs(1);

/// Sharing of memory with other processes since a fork.
#[derive(Default)]
pub struct CowGroup {
    active: AtomicBool,
    /// The process of which this one is a fork, while it lives; 0 otherwise.
    forked_from: AtomicU32,
    /// It is active until then, whatever else.
    until: AtomicU64,
    /// The supervisor's last hint.
    hint: AtomicU32,
    /// Since when compressed memory has been past its share; 0: it is not.
    pressed: AtomicU64,
    /// A limit that is not heeded, and until when.
    fork_limit: AtomicU64,
    fork_limit_until: AtomicU64,
}

fn after(time: Duration) -> u64 {
    now().0.saturating_add(time.as_nanos() as u64)
}

impl CowGroup {
    /// A fork that is worth it left `limit` to each of the two. What they share counts once, which
    /// the supervisor alone can tell: until it has seen the child and says how much it is, for
    /// [`FORK_LIMIT_TIMEOUT`] at most, both continue with the whole. (Were they to take half of it
    /// out at once, they would copy what they share to do so, and have to bring it back.) In both
    /// processes, before they take over another limit.
    pub(crate) fn set_fork_limit(&self, limit: u64) {
        self.fork_limit.store(limit, Relaxed);
        self.fork_limit_until.store(after(FORK_LIMIT_TIMEOUT), Relaxed);
        self.stay();
    }

    /// Returns the limit that the last fork left, while the supervisor may still set another.
    pub(crate) fn fork_limit_in_force(&self) -> Option<u64> {
        let is_on = now().0 < self.fork_limit_until.load(Relaxed);
        Some(self.fork_limit.load(Relaxed)).filter(|limit| is_on && *limit != 0)
    }

    /// False for the limit that a fork left, as long as the supervisor may still say another.
    pub(crate) fn accepts_limit(&self, limit: u64) -> bool {
        if limit == self.fork_limit.load(Relaxed) && now().0 < self.fork_limit_until.load(Relaxed) {
            return false;
        }
        self.fork_limit.store(0, Relaxed);
        true
    }

    /// The supervisor's hint: 0, or a number that is another one each time it has seen that this
    /// process is in a copy-on-write group. (If it is gone, it says nothing.)
    pub(crate) fn on_hint(&self, hint: u32) {
        if self.hint.swap(hint, Relaxed) != hint && hint != 0 {
            self.stay();
        }
    }

    /// It is active for a while.
    pub fn stay(&self) {
        self.until.fetch_max(after(HINT_HYSTERESIS), Relaxed);
        self.active.store(true, Relaxed);
    }

    /// This process is a fork of `parent`.
    pub fn inherit(&self, parent: u32) {
        self.forked_from.store(parent, Relaxed);
        self.stay();
        self.until.fetch_max(after(CHILD_MEMBERSHIP), Relaxed);
    }

    /// Ends what [`CowGroup::inherit`] began when the parent is another one now: the first has
    /// ended.
    pub(crate) fn look_for_parent(&self) {
        let parent = self.forked_from.load(Relaxed);
        if parent != 0 && parent != swaptide_sys::process::parent() {
            self.forked_from.store(0, Relaxed);
            self.until.store(after(HINT_HYSTERESIS), Relaxed);
        }
    }

    /// True in a fork whose parent lives.
    pub(crate) fn is_child_member(&self) -> bool {
        self.forked_from.load(Relaxed) != 0
    }

    /// True while others do, as the supervisor hint last or a fork has just made it.
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Relaxed)
    }

    /// Looks again, now and then; compressed memory is past its share or not. True when this
    /// process has just ceased to be in a copy-on-write group.
    pub fn follow(&self, overfull: bool) -> bool {
        let active = now().0 < self.until.load(Relaxed);
        if !active || !overfull {
            self.pressed.store(0, Relaxed);
        } else if self.pressed.load(Relaxed) == 0 {
            self.pressed.store(now().0, Relaxed);
        }
        self.active.swap(active, Relaxed) && !active
    }

    /// False while what is in compressed memory should stay there although it is past its share.
    pub(crate) fn may_write_back(&self) -> bool {
        if !self.is_active() {
            return true;
        }
        let since = self.pressed.load(Relaxed);
        since != 0 && now().0.saturating_sub(since) >= HINT_HYSTERESIS.as_nanos() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(time: Duration) {
        std::thread::sleep(time + Duration::from_millis(1));
    }

    #[test]
    fn fork_limit_is_ignored_until_supervisor_updates_or_times_out() {
        let group = CowGroup::default();
        assert!(group.accepts_limit(32 << 20));
        group.set_fork_limit(32 << 20);
        assert!(!group.accepts_limit(32 << 20), "the supervisor has not seen the child");
        assert!(group.accepts_limit(50 << 20), "it has seen it");
        assert!(group.accepts_limit(32 << 20));
        group.set_fork_limit(32 << 20);
        wait(FORK_LIMIT_TIMEOUT);
        assert!(group.accepts_limit(32 << 20), "it will not within the timeout");
    }

    #[test]
    fn a_cow_group_ends_some_time_after_nothing_is_shared() {
        let group = CowGroup::default();
        assert!(!group.is_active() && !group.follow(false));
        group.stay();
        assert!(group.is_active() && !group.follow(false) && group.is_active());
        wait(HINT_HYSTERESIS);
        assert!(group.is_active(), "the supervisor has not looked");
        assert!(group.follow(false) && !group.is_active());
        assert!(!group.follow(false), "it is told once");
    }

    #[test]
    fn a_child_is_a_member_for_a_while_then_by_hint() {
        let group = CowGroup::default();
        group.inherit(swaptide_sys::process::parent());
        group.look_for_parent();
        wait(HINT_HYSTERESIS);
        assert!(!group.follow(false) && group.is_active() && group.is_child_member());
        wait(CHILD_MEMBERSHIP);
        assert!(group.follow(false) && !group.is_active() && group.is_child_member());
        group.on_hint(7);
        assert!(group.is_active());
        wait(HINT_HYSTERESIS);
        group.on_hint(7);
        assert!(group.follow(false), "the supervisor says nothing new");
        group.inherit(1 << 30);
        group.look_for_parent();
        assert!(!group.is_child_member() && group.is_active());
        wait(HINT_HYSTERESIS);
        assert!(group.follow(false));
    }

    #[test]
    fn compressed_memory_that_is_past_its_share_for_long_goes_on() {
        let group = CowGroup::default();
        assert!(group.may_write_back());
        group.inherit(swaptide_sys::process::parent());
        group.follow(true);
        assert!(!group.may_write_back());
        wait(HINT_HYSTERESIS);
        group.follow(false);
        group.follow(true);
        assert!(!group.may_write_back(), "it was not all the time");
        wait(HINT_HYSTERESIS);
        assert!(group.may_write_back());
    }
}
