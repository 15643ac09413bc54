//! What the pages say that come to a process and go from it: how hard it presses, and how much it
//! works on.
//!
//! Owns nothing; the state of each process is its watch's ([`super::sample`]). Locks: none.

use std::time::Duration;

use swaptide_sys::PAGE_SIZE;

/// The time that is judged at once.
const WINDOW: Duration = Duration::from_secs(1);
/// Of the pages that go out in a window, one in this many must come back in it, or the process
/// works on less than was held to be its working set.
const MIN_BACK: u64 = 8;
/// Pages that each page stands for which came back.
const PAGES_PER_REFAULT: u64 = 4;
/// An estimate shrinks by 1/2^this in a second while it holds, and at most.
const SLOWEST_SHIFT: u32 = 10;
const FASTEST_SHIFT: u32 = 2;

/// Pages of a process that came and went by its engine.
#[derive(Clone, Copy, Default)]
pub(super) struct PageFlow {
    /// Those that came back soon, so far.
    pub(super) refaults: u64,
    /// Those that went out, so far.
    pub(super) steals: u64,
    /// Those that came at all, so far: what is there, and what went out.
    pub(super) came: u64,
}

impl PageFlow {
    /// Takes over what is seen now, and gives what has happened since.
    pub(super) fn follow(&mut self, seen: PageFlow, elapsed: Duration) -> PageMoves {
        let back = seen.refaults.saturating_sub(self.refaults);
        let out = seen.steals.saturating_sub(self.steals);
        let came = seen.came.saturating_sub(self.came);
        // What the program has freed may come again; that is forgotten within a second.
        let freed = self.came.saturating_sub(seen.came) as f64;
        let forgotten = (freed * elapsed.as_secs_f64().min(1.0)) as u64;
        *self = PageFlow { came: seen.came.max(self.came - forgotten), ..seen };
        PageMoves { back, out, for_others: out.min(came) }
    }
}

/// Pages that came and went between two looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageMoves {
    /// Those that came back soon.
    pub(super) back: u64,
    /// Those that went out.
    pub(super) out: u64,
    /// Of these, as many as others came for.
    pub(super) for_others: u64,
}

impl PageMoves {
    /// The pages by which a process shows that it wants more than it has: those that came back, and
    /// those that went out because others came. What goes out of one that rests, because its limit
    /// is lowered or on request, says nothing.
    pub(super) fn pressing(self, in_cow_group: bool) -> u64 {
        // What goes out of a process that has the same as another says only that it is to have
        // less.
        self.back + if in_cow_group { self.back } else { self.for_others }
    }
}

/// The memory that a process works on, as far as that has shown: pages that come back soon after
/// they went out show that it is missing.
///
/// It shrinks all the time, and so a process is asked again and again whether it still needs what
/// it has. One that does gets the few pages back that it lost; one that rests loses more and more
/// of them, up to a quarter a second.
pub(super) struct WorkingsetEstimate {
    bytes: u64,
    shift: u32,
    time: Duration,
    window: PageMoves,
}

impl Default for WorkingsetEstimate {
    fn default() -> WorkingsetEstimate {
        WorkingsetEstimate {
            bytes: 0,
            shift: SLOWEST_SHIFT,
            time: Duration::ZERO,
            window: PageMoves::default(),
        }
    }
}

impl WorkingsetEstimate {
    /// Takes in what happened in `elapsed` to a process that may have `given` bytes and has
    /// `swapped` out. Gives the estimate in bytes.
    pub(super) fn follow(
        &mut self,
        moves: PageMoves,
        given: u64,
        swapped: u64,
        elapsed: Duration,
    ) -> u64 {
        let part = elapsed.min(WINDOW).as_secs_f64() / f64::from(1 << self.shift);
        let kept = self.bytes - (self.bytes as f64 * part) as u64;
        let shown = moves.back.saturating_mul(PAGES_PER_REFAULT * PAGE_SIZE as u64).min(swapped);
        // It may have got less than it has shown so far.
        let lacks = given.saturating_add(shown).saturating_sub(kept);
        self.bytes = (kept + shown.min(lacks)).min(given.saturating_add(swapped));
        self.window.back = self.window.back.saturating_add(moves.back);
        self.window.out = self.window.out.saturating_add(moves.out);
        self.time += elapsed;
        if self.time >= WINDOW {
            if self.window.back.saturating_mul(MIN_BACK) < self.window.out {
                self.shift = (self.shift - 1).max(FASTEST_SHIFT);
            } else if self.window.out > 0 {
                self.shift = (self.shift + 1).min(SLOWEST_SHIFT);
            }
            (self.time, self.window) = (Duration::ZERO, PageMoves::default());
        }
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(5);

    /// The pages that show pressure in a second of looks; `step` changes what is there, and how
    /// many pages went out and came back.
    fn pressing(mut step: impl FnMut(u32, &mut u64, &mut PageFlow)) -> u64 {
        let (mut resident, mut seen) = (25_000, PageFlow { came: 25_000, ..PageFlow::default() });
        let mut flow = seen;
        (0..200)
            .map(|tick| {
                step(tick, &mut resident, &mut seen);
                seen.came = resident + seen.steals;
                flow.follow(seen, TICK).pressing(false)
            })
            .sum()
    }

    #[test]
    fn what_is_taken_from_a_process_that_rests_is_no_pressure() {
        let batch = |tick: u32, resident: &mut u64, seen: &mut PageFlow| match tick % 4 {
            // It is gone before it is counted.
            0 => *resident -= 64,
            2 => seen.steals += 64,
            _ => {}
        };
        assert!(pressing(batch) <= 64, "{}", pressing(batch));
    }

    #[test]
    fn what_goes_out_for_what_comes_is_pressure() {
        let fills = pressing(|tick, resident, seen| {
            *resident += 16;
            if tick % 4 == 3 {
                *resident -= 64;
                seen.steals += 64;
            }
        });
        assert!(fills >= 200 / 4 * 16, "{fills}");
        let returns = pressing(|_, _, seen| {
            seen.refaults += 16;
            seen.steals += 16;
        });
        assert_eq!(returns, 200 * 32);
    }

    #[test]
    fn what_was_freed_counts_again_after_a_while() {
        let mut flow = PageFlow { came: 25_000, ..PageFlow::default() };
        let small = PageFlow { came: 5_000, ..PageFlow::default() };
        (0..2000).for_each(|_| assert_eq!(flow.follow(small, TICK).pressing(false), 0));
        let grown = PageFlow { came: 9_000, steals: 3_000, refaults: 0 };
        let moves = flow.follow(grown, TICK);
        assert!(moves.pressing(false) > 2_500, "{moves:?}");
    }

    /// What a process has that works on `working` pages and has `limit`, second by second; `most`
    /// is what it has altogether. Of what it lacks it faults a tenth in each look.
    fn estimates(seconds: usize, working: impl Fn(usize) -> u64) -> Vec<u64> {
        let mut estimate = WorkingsetEstimate::default();
        let (mut has, mut out, most) = (10_000, 0, 20_000);
        (0..seconds * 200)
            .map(|tick| {
                let back = working(tick / 200).saturating_sub(has).div_ceil(10);
                has += back;
                let moves = PageMoves { back, out, ..PageMoves::default() };
                let [given, swapped] = [has, most - has].map(|pages| pages * PAGE_SIZE as u64);
                let kept = estimate.follow(moves, given, swapped, TICK) / PAGE_SIZE as u64;
                out = has.saturating_sub(kept);
                has -= out;
                kept
            })
            .skip(199)
            .step_by(200)
            .collect()
    }

    #[test]
    fn what_is_worked_on_is_found_and_stays() {
        let found = estimates(60, |_| 8_000);
        assert!(found[1..].iter().all(|pages| (7_900..9_000).contains(pages)), "{found:?}");
    }

    #[test]
    fn one_that_comes_to_rest_yields_within_half_a_minute() {
        let found = estimates(60, |second| if second < 20 { 8_000 } else { 0 });
        assert!(found[19] >= 7_900 && found[23] >= 7_000 && found[45] < 800, "{found:?}");
    }

    #[test]
    fn a_page_now_and_then_holds_nothing() {
        let found = estimates(60, |second| match second {
            0..20 => 8_000,
            _ if second % 5 == 0 => 600,
            _ => 500,
        });
        assert!(found[50] < 1_500, "{found:?}");
    }
}
