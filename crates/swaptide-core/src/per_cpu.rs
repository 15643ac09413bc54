//! What each CPU has of a device for itself: where its last allocation ended, and slots counted in
//! advance.
//!
//! One counter of the slots in use, written for every slot that comes and goes, is a cache line
//! that all CPUs fight for: two of them were no faster together than one. So a CPU's state counts
//! [`BATCH`] slots at a time as taken and keeps those that it does not use yet as *credit*; what is
//! freed becomes credit of the CPU that allocated from that cluster last. Slots in use are those
//! taken without the credits.
//!
//! Invariants:
//! 1. `taken` never exceeds the capacity it was raised under, and never falls below the sum of all
//!    credits.
//! 2. [`PerCpu::take`] fails only when taken slots without credits, and with those of calls under
//!    way, leave no room: before it fails, all credits are gathered.
//! 3. `moves` says when slots move between `taken` and a credit: [`PerCpu::used`] never counts any
//!    of them twice or not at all. What is taken in vain goes back to `taken`, never to a credit,
//!    so that on a device closed for allocation, too, what is in use is never overlooked.
//! 4. No credit is used while more is taken than the capacity allows (it was lowered).
//!
//! Under `cfg(loom)` a device counts every slot at once, or its models would have no end; this
//! module has a model of its own.

use crate::ids::ORDERS;
use crate::sync::{AtomicU32, AtomicU64, Ordering, relax};
use crossbeam_utils::CachePadded;

/// Slots that a CPU's state counts at a time, and half of what it keeps of those that were freed.
#[cfg(not(loom))]
pub(crate) const BATCH: u32 = 256;
#[cfg(loom)]
pub(crate) const BATCH: u32 = 0;

/// A move under way, in the low half of `moves`; a move done is one more in the high half.
const BEGUN: u64 = 1;
const DONE: u64 = (1 << 32) - BEGUN;

struct CpuState {
    /// Per order: where the last allocation ended, `cluster << 32 | slot in cluster`. Hints: the
    /// cluster lock decides.
    current: [AtomicU64; ORDERS],
    credit: AtomicU32,
}

struct SlotCount {
    slots: AtomicU32,
    moves: AtomicU64,
}

/// Number of a CPU's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CpuIndex(usize);

/// A counter's value. (Under loom a write that changes nothing: it forgets reads, and then misses
/// the race with the write that follows.)
#[inline]
fn seen(counter: &AtomicU32) -> u32 {
    #[cfg(loom)]
    return counter.fetch_add(0, Ordering::SeqCst);
    #[cfg(not(loom))]
    counter.load(Ordering::SeqCst)
}

/// The states of all CPUs of one device. `N`: [`BATCH`].
pub(crate) struct PerCpu<const N: u32> {
    cpus: Box<[CachePadded<CpuState>]>,
    /// Written once for many slots; on a line of its own, as the rest is read by every look-up.
    taken: CachePadded<SlotCount>,
}

impl<const N: u32> PerCpu<N> {
    /// States of `cpus` CPUs without credit; nothing is taken.
    pub fn new(cpus: usize) -> Self {
        let state = || CpuState {
            current: core::array::from_fn(|_| AtomicU64::new(u64::MAX)),
            credit: AtomicU32::new(0),
        };
        let taken = SlotCount { slots: AtomicU32::new(0), moves: AtomicU64::new(0) };
        PerCpu {
            cpus: (0..cpus.max(1)).map(|_| CachePadded::new(state())).collect(),
            taken: CachePadded::new(taken),
        }
    }

    /// The state of a CPU; larger numbers wrap around.
    #[inline]
    pub fn of(&self, cpu: usize) -> CpuIndex {
        let cpus = self.cpus.len();
        // A remainder costs as much as the rest of a short allocation.
        CpuIndex(if cpu < cpus { cpu } else { cpu % cpus })
    }

    /// The state's number for a cluster's record, and back.
    #[inline]
    pub fn short(index: CpuIndex) -> u8 {
        index.0 as u8
    }

    /// See [`PerCpu::short`]. Of more than 256 CPUs it is another one, which is as good.
    #[inline]
    pub(crate) fn of_short(&self, short: u8) -> CpuIndex {
        self.of(short.into())
    }

    /// Returns the end of the CPU's last allocation of that order.
    #[inline]
    pub fn current(&self, index: CpuIndex, order: usize) -> &AtomicU64 {
        &self.cpus[index.0].current[order]
    }

    /// Counts `n` slots as used. `false`: there is no room for them in `capacity`.
    #[inline]
    pub fn take(&self, index: CpuIndex, n: u32, capacity: u32) -> bool {
        if N > 0 && seen(&self.taken.slots) <= capacity {
            let rest = |credit: u32| credit.checked_sub(n);
            if self.cpus[index.0]
                .credit
                .fetch_update(Ordering::SeqCst, Ordering::Relaxed, rest)
                .is_ok()
            {
                return true;
            }
        }
        self.take_more(index, n, capacity)
    }

    #[cold]
    fn take_more(&self, index: CpuIndex, n: u32, capacity: u32) -> bool {
        let within =
            |taken: u32, more: u32| taken.checked_add(more).filter(|&taken| taken <= capacity);
        loop {
            if N > 0 && within(seen(&self.taken.slots), n + N).is_some() {
                let ahead = self.moving(|| {
                    let done = self.taken.slots.fetch_update(
                        Ordering::SeqCst,
                        Ordering::Relaxed,
                        |taken| within(taken, n + N),
                    );
                    if done.is_ok() {
                        self.cpus[index.0].credit.fetch_add(N, Ordering::SeqCst);
                    }
                    done
                });
                if ahead.is_ok() {
                    return true;
                }
            }
            if self
                .taken
                .slots
                .fetch_update(Ordering::SeqCst, Ordering::Relaxed, |taken| within(taken, n))
                .is_ok()
            {
                return true;
            }
            if !self.gather() {
                return false;
            }
        }
    }

    /// `n` slots of a cluster from which that CPU allocated are free.
    #[inline]
    pub fn give(&self, index: CpuIndex, n: u32) {
        if N == 0 {
            let before = self.taken.slots.fetch_sub(n, Ordering::SeqCst);
            debug_assert!(before >= n);
            return;
        }
        let credit = &self.cpus[index.0].credit;
        if credit.fetch_add(n, Ordering::SeqCst) + n > 2 * N {
            self.give_back(credit);
        }
    }

    #[cold]
    fn give_back(&self, credit: &AtomicU32) {
        self.moving(|| {
            let keep = |credit: u32| (credit > 2 * N).then_some(N);
            if let Ok(before) = credit.fetch_update(Ordering::SeqCst, Ordering::Relaxed, keep) {
                self.taken.slots.fetch_sub(before - N, Ordering::SeqCst);
            }
        });
    }

    /// `n` slots that [`PerCpu::take`] counted were not found, or must not be used. Not as credit:
    /// a reader of `taken` before and the credits after this call would miss as many that are in
    /// use.
    #[cold]
    pub fn undo(&self, n: u32) {
        self.taken.slots.fetch_sub(n, Ordering::SeqCst);
    }

    /// Takes every CPU's credit back; `false` when there was none. (Looks first: a caller that
    /// asks a full device again and again must not keep [`PerCpu::used`] waiting.)
    #[cold]
    fn gather(&self) -> bool {
        N > 0
            && self.cpus.iter().any(|state| seen(&state.credit) > 0)
            && self.moving(|| {
                let all: u32 =
                    self.cpus.iter().map(|state| state.credit.swap(0, Ordering::SeqCst)).sum();
                self.taken.slots.fetch_sub(all, Ordering::SeqCst);
                all > 0
            })
    }

    /// Changes `taken` and credits together. What is added to `moves` before and after is what
    /// [`PerCpu::used`] compares; all of it is sequentially consistent, so a thread that saw the
    /// same number twice, with nothing begun, saw none of the changes by half.
    fn moving<T>(&self, change: impl FnOnce() -> T) -> T {
        self.taken.moves.fetch_add(BEGUN, Ordering::SeqCst);
        let done = change();
        self.taken.moves.fetch_add(DONE, Ordering::SeqCst);
        done
    }

    /// As [`seen`].
    fn moves(&self) -> u64 {
        #[cfg(loom)]
        return self.taken.moves.fetch_add(0, Ordering::SeqCst);
        #[cfg(not(loom))]
        self.taken.moves.load(Ordering::SeqCst)
    }

    /// Slots counted as used. While others take and give, each of those may be counted or not; with
    /// no thread that takes, it is never too low.
    pub fn used(&self) -> u32 {
        if N == 0 {
            return seen(&self.taken.slots);
        }
        let mut spins = 0;
        loop {
            let before = self.moves();
            let taken = seen(&self.taken.slots);
            let credits: u32 = self.cpus.iter().map(|state| seen(&state.credit)).sum();
            if before as u32 == 0 && self.moves() == before {
                return taken.saturating_sub(credits);
            }
            relax(&mut spins);
        }
    }

    /// Bytes of the states.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.cpus)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicUsize;
    use proptest::prelude::*;

    #[test]
    fn the_last_slot_is_found_in_the_credit_of_any_cpu() {
        let per_cpu = PerCpu::<8>::new(3);
        let at = |cpu| per_cpu.of(cpu);
        assert!((0..30).all(|i| per_cpu.take(at(i), 1, 30)), "all of them");
        assert_eq!(per_cpu.used(), 30);
        assert!(!per_cpu.take(at(0), 1, 30) && !per_cpu.take(at(1), 2, 31));
        per_cpu.give(at(2), 1);
        assert_eq!(per_cpu.used(), 29);
        assert!(per_cpu.take(at(1), 1, 30) && !per_cpu.take(at(2), 1, 30));
        // A lowered capacity: nothing is taken until enough was given back.
        per_cpu.give(at(0), 20);
        assert_eq!(per_cpu.used(), 10);
        assert!(
            !per_cpu.take(at(0), 1, 10)
                && per_cpu.take(at(0), 1, 11)
                && !per_cpu.take(at(1), 1, 11)
        );
    }

    proptest! {
        #[test]
        fn slots_are_counted_one_by_one(
            capacity in 1u32..200,
            ops in prop::collection::vec((any::<bool>(), 0usize..4, 1u32..40), 1..200),
        ) {
            let per_cpu = PerCpu::<16>::new(4);
            let (mut used, mut capacity) = (0, capacity);
            for (takes, cpu, n) in ops {
                if takes {
                    let taken = per_cpu.take(per_cpu.of(cpu), n, capacity);
                    prop_assert_eq!(taken, used + n <= capacity);
                    used += if used + n <= capacity { n } else { 0 };
                } else if n <= used {
                    per_cpu.give(per_cpu.of(cpu), n);
                    used -= n;
                } else {
                    capacity = 1 + (capacity + n) % 200;
                }
                prop_assert_eq!(per_cpu.used(), used);
            }
        }
    }

    #[test]
    fn threads_never_take_more_than_there_is_and_nothing_is_lost() {
        const CAPACITY: u32 = 300;
        let per_cpu = PerCpu::<16>::new(3);
        let taken = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for cpu in 0..4 {
                let (per_cpu, taken) = (&per_cpu, &taken);
                s.spawn(move || {
                    let mut own = Vec::new();
                    for i in 0..30_000u32 {
                        let n = 1 + i.wrapping_mul(0x9e37_79b9) % 16;
                        if i % 7 < 4 && per_cpu.take(per_cpu.of(cpu), n, CAPACITY) {
                            let now = taken.fetch_add(n as usize, Ordering::SeqCst) + n as usize;
                            assert!(now <= CAPACITY as usize, "{now} taken");
                            own.push(n);
                        } else if let Some(n) = own.pop() {
                            taken.fetch_sub(n as usize, Ordering::SeqCst);
                            // Not always by the CPU that took them.
                            per_cpu.give(per_cpu.of(cpu + i as usize), n);
                        }
                        assert!(per_cpu.used() <= CAPACITY);
                    }
                    for n in own {
                        taken.fetch_sub(n as usize, Ordering::SeqCst);
                        per_cpu.give(per_cpu.of(cpu), n);
                    }
                });
            }
        });
        assert_eq!(per_cpu.used(), 0);
        assert!(per_cpu.take(per_cpu.of(0), CAPACITY, CAPACITY));
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::Arc;

    /// Two CPUs, `used` slots of `capacity` in use, and all ways in which two threads can go about
    /// them. `last` is told what both said.
    fn model(
        used: u32,
        capacity: u32,
        own: fn(&PerCpu<1>) -> u32,
        other: fn(&PerCpu<1>) -> u32,
        last: fn(&PerCpu<1>, u32, u32),
    ) {
        let count: &'static _ = Box::leak(Box::new(std::sync::atomic::AtomicU32::new(0)));
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let per_cpu = Arc::new(PerCpu::new(2));
            assert!(per_cpu.take(per_cpu.of(0), used, capacity));
            let theirs = per_cpu.clone();
            let theirs = loom::thread::spawn(move || other(&theirs));
            let own = own(&per_cpu);
            last(&per_cpu, own, theirs.join().unwrap());
        });
        let runs = count.load(std::sync::atomic::Ordering::Relaxed);
        println!("{runs} interleavings");
        assert!(runs > 20, "{runs} interleavings: the model has no race");
    }

    /// No thread gets a fourth slot of three, and the sum is exact.
    #[test]
    fn credits_are_exact() {
        let other = |per_cpu: &PerCpu<1>| {
            let got = per_cpu.take(per_cpu.of(1), 2, 3);
            if got {
                per_cpu.give(per_cpu.of(1), 1);
            }
            u32::from(got)
        };
        model(
            1,
            3,
            |per_cpu| u32::from(per_cpu.take(per_cpu.of(0), 1, 3)),
            other,
            |per_cpu, own, theirs| {
                assert!(own + theirs >= 1, "there was room for one of them");
                assert_eq!(per_cpu.used(), 1 + own + theirs);
            },
        );
    }

    fn try_twice<const CAPACITY: u32>(per_cpu: &PerCpu<1>) -> u32 {
        for cpu in [1, 0] {
            if per_cpu.take(per_cpu.of(cpu), 1, CAPACITY) {
                per_cpu.undo(1);
            }
        }
        0
    }

    /// A device that is closed: one is in use, others try twice and give up, slot by slot or with
    /// credit where there is room for that. Each try may be counted.
    #[test]
    fn failed_take_hides_no_pages() {
        let last = |per_cpu: &PerCpu<1>, seen, _| {
            assert!((1..=3).contains(&seen), "{seen}");
            assert_eq!(per_cpu.used(), 1);
        };
        model(1, 3, PerCpu::used, try_twice::<3>, last);
        model(1, 5, PerCpu::used, try_twice::<5>, last);
    }

    /// While others free all but one.
    #[test]
    fn used_count_never_too_low() {
        let other = |per_cpu: &PerCpu<1>| {
            per_cpu.give(per_cpu.of(1), 2);
            per_cpu.give(per_cpu.of(1), 3);
            0
        };
        model(6, 9, PerCpu::used, other, |per_cpu, seen, _| {
            assert!((1..=6).contains(&seen), "{seen}");
            assert_eq!(per_cpu.used(), 1);
        });
    }
}
