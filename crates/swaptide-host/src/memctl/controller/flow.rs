//! Memory pressure and working set of a process, derived from its page counters.
//!
//! Owns nothing: the state of each process is in its watch ([`super::sample`]). Locks: none.

use std::time::Duration;

use swaptide_sys::PAGE_SIZE;

use crate::memctl::policy;

/// The period after which refaults and reclaim are compared.
const WINDOW: Duration = Duration::from_secs(1);
/// Looks of such a period at least: one alone may meet a process at a bad moment.
const MIN_LOOKS: u32 = 4;
/// If fewer than one in this many of the pages that went out in a window came back, the working set
/// is smaller than its estimate.
const MIN_BACK: u64 = 8;
/// If fewer than one in this many of the pages that come back would have stayed with the whole
/// budget, no share of it helps the process, and its estimate does not grow.
const MAX_BACK_PER_NEAR: u64 = 2;
/// Pages by which each page that comes back raises the estimate.
const PAGES_PER_REFAULT: u64 = 4;
/// An estimate exceeds what a process has by this part of it at most, or by the pages of one look.
/// It must be more than the hundredth below which a change of a limit is not carried out.
const RISE_DIVISOR: u64 = 8;
/// An estimate shrinks by 1/2^this in a second while it holds, and at most.
const SLOWEST_SHIFT: u32 = 10;
const FASTEST_SHIFT: u32 = 2;

/// Pages of a process as its engine counts them.
#[derive(Clone, Copy, Default)]
pub(super) struct PageCounts {
    /// Those that came back, so far.
    pub(super) refaults: u64,
    /// Of these, the ones that would have stayed if the process had had the whole budget.
    pub(super) near: u64,
    /// Those that went out, so far.
    pub(super) steals: u64,
    /// Those that are there.
    pub(super) resident: u64,
}

impl PageCounts {
    /// Those that came at all, so far: what is there, and what went out.
    fn came(&self) -> f64 {
        (self.resident + self.steals) as f64
    }
}

/// Pages that came and went between two looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageMoves {
    /// Those that came back.
    pub(super) back: u64,
    /// Of these, the ones that would have stayed if the process had had the whole budget.
    pub(super) near: u64,
    /// Those that went out.
    pub(super) out: u64,
    /// Of these, as many as others came for.
    pub(super) for_others: u64,
}

impl PageMoves {
    fn plus(self, other: PageMoves) -> PageMoves {
        PageMoves {
            back: self.back.saturating_add(other.back),
            near: self.near.saturating_add(other.near),
            out: self.out.saturating_add(other.out),
            for_others: self.for_others.saturating_add(other.for_others),
        }
    }

    /// The pages by which a process shows that it wants more than it has: those that came back, and
    /// those that went out because others came. What goes out of one that rests, because its limit
    /// is lowered or on request, says nothing.
    pub(super) fn pressing(self, in_cow_group: bool) -> u64 {
        // What goes out of a process that has the same as another says only that it is to have
        // less.
        self.back + if in_cow_group { self.back } else { self.for_others }
    }
}

/// Follows the pages of a process from look to look.
#[derive(Default)]
pub(super) struct PageFlow {
    counts: PageCounts,
    /// The most pages that had come. What the program has freed may come again: the mark sinks to
    /// what is there, with a time constant of a second.
    mark: f64,
    /// Pages that came lately, and that none has gone out for yet; fades as fast.
    credit: f64,
}

impl PageFlow {
    pub(super) fn new(counts: PageCounts) -> PageFlow {
        PageFlow { counts, mark: counts.came(), credit: 0.0 }
    }

    /// Pages that had come back at the last look.
    pub(super) fn refaults(&self) -> u64 {
        self.counts.refaults
    }

    /// Of these, the ones that would have stayed.
    pub(super) fn near(&self) -> u64 {
        self.counts.near
    }

    /// Takes over what is seen now, and gives what has happened since.
    pub(super) fn follow(&mut self, seen: PageCounts, elapsed: Duration) -> PageMoves {
        let before = std::mem::replace(&mut self.counts, seen);
        let back = seen.refaults.saturating_sub(before.refaults);
        let near = seen.near.saturating_sub(before.near).min(back);
        let out = seen.steals.saturating_sub(before.steals);
        let kept = (-elapsed.as_secs_f64() / WINDOW.as_secs_f64()).exp();
        let came = seen.came();
        self.credit = self.credit * kept + (came - self.mark).max(0.0);
        self.mark = came.max(came + (self.mark - came) * kept);
        let for_others = (out as f64).min(self.credit);
        self.credit -= for_others;
        PageMoves { back, near, out, for_others: for_others as u64 }
    }
}

/// The limits by which a process can have what it has in, and all that it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryExtent {
    /// Bytes: of what it has in.
    pub(super) has: u64,
    /// Bytes, at least `has`: of what it has in and out.
    pub(super) whole: u64,
}

impl MemoryExtent {
    /// Of a process that uses `used` bytes, its compressed memory of `pool` among them, and has
    /// `swapped` bytes out.
    pub(super) fn new(used: u64, pool: u64, swapped: u64) -> MemoryExtent {
        let has = policy::with_engine_room(used);
        let whole = used.saturating_sub(pool).saturating_add(swapped);
        MemoryExtent { has, whole: policy::with_engine_room(whole).max(has) }
    }

    fn max(self, other: MemoryExtent) -> MemoryExtent {
        MemoryExtent { has: self.has.max(other.has), whole: self.whole.max(other.whole) }
    }
}

/// The memory that a process works on, as far as that has shown: pages that come back, and would
/// have stayed with more memory, show that it is missing.
///
/// It shrinks all the time, and so a process is asked again and again whether it still needs what
/// it has. One that does gets the few pages back that it lost; one that rests loses more and more
/// of them, up to a quarter a second.
pub(super) struct WorkingsetEstimate {
    bytes: u64,
    shift: u32,
    time: Duration,
    /// Looks in this window.
    looks: u32,
    /// What moved in this window, and the most that there was.
    window: PageMoves,
    largest: MemoryExtent,
    /// False while most of what comes back would not have stayed with the whole budget either.
    may_grow: bool,
}

impl Default for WorkingsetEstimate {
    fn default() -> WorkingsetEstimate {
        WorkingsetEstimate {
            bytes: 0,
            shift: SLOWEST_SHIFT,
            time: Duration::ZERO,
            looks: 0,
            window: PageMoves::default(),
            largest: MemoryExtent::default(),
            may_grow: true,
        }
    }
}

impl WorkingsetEstimate {
    /// Takes in what happened in `elapsed` to a process that has `extent`, of it `swapped` bytes
    /// out (0: the estimate is not to grow). Gives the estimate in bytes.
    pub(super) fn follow(
        &mut self,
        moves: PageMoves,
        extent: MemoryExtent,
        swapped: u64,
        elapsed: Duration,
    ) -> u64 {
        let part = elapsed.min(WINDOW).as_secs_f64() / f64::from(1 << self.shift);
        let kept = self.bytes - (self.bytes as f64 * part) as u64;
        let near = if self.may_grow { moves.near } else { 0 };
        let shown = near.saturating_mul(PAGES_PER_REFAULT * PAGE_SIZE as u64).min(swapped);
        self.largest = self.largest.max(extent);
        let MemoryExtent { has, whole } = self.largest;
        // It may have got less than it has shown so far; and what it has shown says that it lacks
        // something, not that it would use a limit that it does not use now.
        let next = has.saturating_add(shown.max(has / RISE_DIVISOR)).min(whole);
        self.bytes = kept.saturating_add(shown).min(next.max(kept));
        self.window = self.window.plus(moves);
        self.time += elapsed;
        self.looks += 1;
        if self.time >= WINDOW && self.looks >= MIN_LOOKS {
            self.end_window();
        }
        self.bytes
    }

    /// What a process has goes up and down within a window (it frees and allocates, it forks): the
    /// most of it counts.
    fn end_window(&mut self) {
        let PageMoves { back, near, out, .. } = std::mem::take(&mut self.window);
        let MemoryExtent { has, whole } = std::mem::take(&mut self.largest);
        (self.time, self.looks) = (Duration::ZERO, 0);
        self.may_grow = near >= back / MAX_BACK_PER_NEAR;
        if !self.may_grow {
            self.shift = FASTEST_SHIFT;
        } else if near.saturating_mul(MIN_BACK) < out {
            self.shift = (self.shift - 1).max(FASTEST_SHIFT);
        } else if out > 0 {
            self.shift = (self.shift + 1).min(SLOWEST_SHIFT);
        }
        // What it has is enough, if nothing comes back. A limit that it does not use is nothing
        // that it has.
        self.bytes = self.bytes.min(if near == 0 { has } else { whole });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memctl::policy::{Bounds, Process, Standing, decide};

    const MIB: u64 = 1 << 20;
    const TICK: Duration = Duration::from_millis(5);
    const TICKS_PER_S: u32 = 200;

    /// The pages that show pressure in a second of looks; `step` changes what is there, and how
    /// many pages went out and came back.
    fn pressing(mut step: impl FnMut(u32, &mut PageCounts)) -> u64 {
        let mut seen = PageCounts { resident: 25_000, ..PageCounts::default() };
        let mut flow = PageFlow::new(seen);
        (0..TICKS_PER_S)
            .map(|tick| {
                step(tick, &mut seen);
                flow.follow(seen, TICK).pressing(false)
            })
            .sum()
    }

    #[test]
    fn what_is_taken_from_a_process_that_rests_is_no_pressure() {
        let pages = pressing(|tick, seen| match tick % 4 {
            // It is gone before it is counted.
            0 => seen.resident -= 64,
            2 => seen.steals += 64,
            _ => {}
        });
        assert!(pages <= 64, "{pages}");
    }

    #[test]
    fn what_goes_out_for_what_comes_is_pressure() {
        let fills = pressing(|tick, seen| {
            seen.resident += 16;
            if tick % 4 == 3 {
                seen.resident -= 64;
                seen.steals += 64;
            }
        });
        assert!(fills >= 200 * 16 - 128, "{fills}");
        // It comes in one look, and goes out in the next.
        let bursts = pressing(|tick, seen| match tick % 4 {
            0 => seen.resident += 64,
            1 => (seen.resident, seen.steals) = (seen.resident - 64, seen.steals + 64),
            _ => {}
        });
        assert!(bursts >= 200 / 4 * 60, "{bursts}");
        let returns = pressing(|_, seen| {
            seen.refaults += 16;
            seen.steals += 16;
        });
        assert!(returns >= 200 * 31, "{returns}");
    }

    #[test]
    fn what_was_freed_counts_again_after_a_while() {
        let mut flow = PageFlow::new(PageCounts { resident: 25_000, ..PageCounts::default() });
        let small = PageCounts { resident: 5_000, ..PageCounts::default() };
        (0..2000).for_each(|_| assert_eq!(flow.follow(small, TICK).pressing(false), 0));
        let grown = PageCounts { resident: 6_000, steals: 3_000, ..PageCounts::default() };
        let moves = flow.follow(grown, TICK);
        assert!(moves.pressing(false) > 2_900, "{moves:?}");
    }

    /// A process in a simulation: touches `working` bytes of its `whole` at random.
    struct Simulated {
        whole: u64,
        working: u64,
        touches_per_s: f64,
        /// What of `working` is there; of the rest, what is there.
        hot: f64,
        cold: f64,
        limit: u64,
        seen: PageCounts,
        flow: PageFlow,
        estimate: WorkingsetEstimate,
        /// Faults that are less than one yet.
        fraction: f64,
        pressure: u64,
    }

    impl Simulated {
        fn new(
            whole_mib: u64,
            working_mib: u64,
            resident_mib: u64,
            touches_per_s: f64,
        ) -> Simulated {
            let (whole, working) = (whole_mib * MIB, working_mib * MIB);
            let hot = (resident_mib * MIB).min(working) as f64;
            let seen = PageCounts { resident: resident_mib * MIB / 4096, ..PageCounts::default() };
            Simulated {
                whole,
                working,
                touches_per_s,
                hot,
                cold: (resident_mib * MIB) as f64 - hot,
                limit: resident_mib * MIB,
                seen,
                flow: PageFlow::new(seen),
                estimate: WorkingsetEstimate::default(),
                fraction: 0.0,
                pressure: 0,
            }
        }

        fn used(&self) -> u64 {
            (self.hot + self.cold) as u64
        }

        /// Touches and reclaim of one look, within a budget; gives what the controller sees.
        fn step(&mut self, budget: u64) -> Process {
            let touches =
                if self.working > 0 { self.touches_per_s * TICK.as_secs_f64() } else { 0.0 };
            let missing = 1.0 - self.hot / (self.working as f64).max(1.0);
            let faults = touches * missing + self.fraction;
            let back = (faults as u64).min((self.working as f64 - self.hot) as u64 / 4096);
            self.fraction = faults - faults.floor();
            self.hot += back as f64 * 4096.0;
            self.seen.refaults += back;
            // With random touches each page comes back after all that is worked on.
            self.seen.near += if self.working <= budget { back } else { back / 16 };
            // The engine keeps 1 MiB free; what is cold goes first.
            let over = (self.used() as f64 - self.limit as f64 + MIB as f64).max(0.0);
            let of_cold = over.min(self.cold);
            (self.cold, self.hot) = (self.cold - of_cold, self.hot - (over - of_cold));
            let out = over as u64 / 4096;
            self.seen.steals += out;
            self.seen.resident = self.used() / 4096;
            let moves = self.flow.follow(self.seen, TICK);
            let swapped = self.whole - self.used();
            let rate = moves.pressing(false) * 4096 * u64::from(TICKS_PER_S);
            self.pressure = (self.pressure / 200 * 199).max(rate.min(swapped));
            let extent = MemoryExtent::new(self.used(), 0, swapped);
            Process {
                group: 0,
                standing: Standing::Engaged,
                used: self.used(),
                pressure: self.pressure,
                fixed: 0,
                swapped,
                limit: self.limit,
                growth: 0,
                engine_goes_first: true,
                kept: 0,
                workingset: self.estimate.follow(moves, extent, swapped, TICK),
            }
        }
    }

    /// Lets processes share a budget for some seconds; gives what each uses then, in MiB.
    fn share<const N: usize>(budget_mib: u64, all: &mut [Simulated; N], seconds: u32) -> [u64; N] {
        let budget = budget_mib * MIB;
        for _ in 0..seconds * TICKS_PER_S {
            let processes: Vec<Process> = all.iter_mut().map(|one| one.step(budget)).collect();
            for (at, limit) in decide(&[Bounds::budget(budget)], &processes, TICK).limits {
                let old = all[at].limit;
                // As the controller carries it out.
                if old.abs_diff(limit) > old / 100 {
                    all[at].limit = limit;
                }
            }
        }
        std::array::from_fn(|at| all[at].used() / MIB)
    }

    /// One for which no share would do.
    fn thrashes(resident_mib: u64) -> Simulated {
        Simulated::new(512, 512, resident_mib, 60_000.0)
    }

    #[test]
    fn a_process_that_fits_gets_what_it_works_on_however_slowly_it_faults() {
        for touches_per_s in [300.0, 2_000.0, 20_000.0] {
            let mut all = [thrashes(60), Simulated::new(100, 40, 98, touches_per_s)];
            let [_, fits] = share(160, &mut all, 120);
            assert!((36..60).contains(&fits), "{fits}M with {touches_per_s} touches a second");
        }
    }

    #[test]
    fn a_process_that_rests_after_work_yields_within_a_minute() {
        let mut all =
            [Simulated::new(120, 100, 100, 20_000.0), Simulated::new(140, 140, 60, 20_000.0)];
        let [before, _] = share(160, &mut all, 20);
        assert!(before > 60, "{before}");
        all[0].working = 0;
        (all[0].cold, all[0].hot) = (all[0].hot + all[0].cold, 0.0);
        let [rests, works] = share(160, &mut all, 60);
        assert!(rests < 30 && works > 125, "{rests} {works}");
    }

    #[test]
    fn a_page_now_and_then_holds_nothing() {
        let mut all = [Simulated::new(140, 140, 60, 20_000.0), Simulated::new(100, 100, 98, 2.0)];
        let [works, rests] = share(160, &mut all, 60);
        assert!(rests < 40 && works > 115, "{works} {rests}");
    }

    #[test]
    fn no_process_sinks_below_its_floor() {
        let mut all = [thrashes(60), Simulated::new(100, 0, 98, 0.0)];
        let [_, rests] = share(160, &mut all, 60);
        assert!(rests >= 6, "{rests}");
    }

    #[test]
    fn of_two_that_lack_memory_none_starves() {
        let mut all = [thrashes(80), Simulated::new(120, 120, 78, 20_000.0)];
        let [one, other] = share(160, &mut all, 60);
        assert!(one >= 30 && other >= 110, "{one} {other}");
        let mut all =
            [Simulated::new(140, 140, 80, 60_000.0), Simulated::new(120, 120, 78, 2_000.0)];
        let [one, other] = share(160, &mut all, 60);
        // What goes by demand goes to the one that asks thirty times as often.
        assert!(one.abs_diff(other) < 32, "{one} {other}");
    }

    /// An estimate of a process of 100M after seconds in which it thrashed with 60M.
    fn after_thrashing() -> (WorkingsetEstimate, u64) {
        let mut estimate = WorkingsetEstimate::default();
        let moves = PageMoves { back: 1000, near: 1000, out: 1000, for_others: 0 };
        let extent = MemoryExtent::new(60 * MIB, 0, 40 * MIB);
        let mut bytes = 0;
        for _ in 0..3 * TICKS_PER_S {
            bytes = estimate.follow(moves, extent, 40 * MIB, TICK);
        }
        (estimate, bytes)
    }

    #[test]
    fn an_estimate_is_no_more_than_what_there_is() {
        let (mut estimate, bytes) = after_thrashing();
        assert!((75 * MIB..90 * MIB).contains(&bytes), "{bytes}: a step above what it has");
        // Nothing comes back, and half is out.
        let extent = MemoryExtent::new(50 * MIB, 0, 50 * MIB);
        let rests = |_| estimate.follow(PageMoves::default(), extent, 50 * MIB, TICK);
        let bytes = (0..2 * TICKS_PER_S).map(rests).last();
        assert!(bytes.is_some_and(|bytes| bytes < 55 * MIB), "{bytes:?}");
    }

    #[test]
    fn a_look_at_which_little_is_there_takes_nothing_from_an_estimate() {
        let (mut estimate, before) = after_thrashing();
        let moves = PageMoves { back: 10, near: 10, out: 10, for_others: 0 };
        let mut after = before;
        for tick in 0..2 * TICKS_PER_S {
            // A fork: half of it counts for the child.
            let used = if tick % 50 == 0 { 30 * MIB } else { 60 * MIB };
            let extent = MemoryExtent::new(used, 0, 40 * MIB);
            after = estimate.follow(moves, extent, 40 * MIB, TICK);
        }
        assert!(after.abs_diff(before) < before / 50, "{before} {after}");
    }
}
