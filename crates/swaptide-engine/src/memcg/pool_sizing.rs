//! How a process's limit is divided between resident and compressed memory.
//!
//! A larger pool keeps more pages from the swap areas; a smaller one leaves more of them in the
//! program. Which is better shows in when pages come back: the shadow of a page tells how many
//! others were taken out since it went (its *distance*).
//! - A refault of small distance would not have happened had the resident part been a step larger.
//!   Of the smallest distances that is half the truth: a page in constant use goes out when its
//!   turn comes, whatever the size, and comes back at once; only its turn comes later in a larger
//!   part. So those count in the ratio of the step to the whole, or, if that is more, what came
//!   back at the distance of the second step counts.
//! - A refault from compressed memory of a distance near the age of its oldest page would come from
//!   a swap area had the pool been a step smaller.
//! - A refault from a swap area of a distance a little beyond that age would have come from
//!   compressed memory had it been a step larger.
//!
//! Each is weighed with what it costs in time (a page that has been in compressed memory for long
//! may be compressed with zstd, which costs more to load); the heavier side gets a step. A step
//! away from compressed memory has its pages written, whether they are ever wanted or not: so it is
//! made only when what it would have saved has come to what that costs (a program that grows, and
//! now and then touches what it had, loses more by it than it gains). What the resident part would
//! lose is not seen (hits leave no trace), and is taken to be what it would gain.
//!
//! Owns: the counts since the last decisions, the costs, the marks between the kinds. Lies inside
//! the memory lock; the share it decides on is kept in [`crate::memcg::charge::Charge`].

/// Smallest share of compressed memory, in 1/1024 of what there is to divide.
const MIN_SHARE_1024: u32 = 48;
/// Largest share of compressed memory, in 1/1024 likewise.
pub(crate) const MAX_SHARE_1024: u32 = 700;
/// By how much a decision changes the share, in 1/1024.
const SHARE_STEP_1024: u32 = 16;
/// Refaults that say something.
const MIN_REFAULTS: u64 = 48;
/// Refaults from swap areas that are remembered.
const MAX_GHOST_REFAULTS: u64 = 4096;
/// The cost of delivering a fault, without bringing pages in, in nanoseconds.
pub(crate) const FAULT_NS: u64 = 8_000;
/// The cost of bringing one page in from compressed memory and taking another one out.
pub(crate) const POOL_NS: u64 = 6_000;
/// What a page costs that goes to a swap area and comes back, besides the reading.
const WRITE_NS: u64 = 8_000;
/// Pages that compressed memory keeps in one, as a rule.
const PAGES_FOR_ONE: u64 = 3;

/// Refaults since the last decisions, by what would have spared them.
#[derive(Default)]
struct Refaults {
    /// All refaults, whatever would have spared them.
    seen: u64,
    /// A resident part larger by a step.
    near: u64,
    /// A resident part larger by two steps, and not by one.
    next: u64,
    /// Compressed memory smaller by a step would have made them refaults from a swap area.
    tail: u64,
    /// Compressed memory larger by a step.
    missed: u64,
}

/// The smoothed costs of swap-in.
struct SwapInCosts {
    /// Nanoseconds for a page from a swap area.
    area_ns: u64,
    /// Nanoseconds for a page that is compressed with zstd.
    zstd_ns: u64,
    /// Of all loads from compressed memory, how many are such, in 1/1024.
    zstd_part: u64,
    /// Pages that a swap-in fault brings, in 1/16.
    pages_16: u64,
}

/// The distances that tell the kinds of refaults apart.
struct Distances {
    near_below: u64,
    tail_from: u64,
    missed_below: u64,
    /// That of the oldest page of compressed memory.
    age: u64,
}

/// Decides which share of a process's limit compressed memory has. Distances and ages are in pages
/// taken out.
pub struct PoolSizer {
    refaults: Refaults,
    costs: SwapInCosts,
    distances: Distances,
    /// Refaults from swap areas of distances below twice the age of compressed memory's oldest
    /// page, and of larger ones; smoothed.
    soon: u64,
    late: u64,
    /// The time that a larger resident part would have saved so far, in nanoseconds.
    regret: u64,
}

impl Default for PoolSizer {
    fn default() -> Self {
        Self::new()
    }
}

/// The sums of loads from compressed memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Loads {
    /// Pages that were decompressed.
    pub pages: u32,
    /// Of those, pages compressed with zstd.
    pub zstd: u32,
    /// There were some, lately: they are timed.
    pub any_zstd: bool,
    /// Nanoseconds that those took which were timed, and how many they are.
    pub zstd_ns: u64,
    /// The number of loads measured in `zstd_ns`.
    pub timed: u32,
}

/// The input of one decision on the division.
#[derive(Clone, Copy, Debug)]
pub struct PoolSample {
    /// The share of compressed memory, in 1/1024 of the limit.
    pub share: u32,
    /// The bytes to divide: the limit less the memory that is not managed.
    pub limit: u64,
    /// Pages that the program has under management.
    pub resident: u64,
    /// Bytes of compressed memory.
    pub pool: u64,
    /// The distance of the page that went to compressed memory longest ago.
    pub oldest: u64,
    /// True when the oldest pages were compressed again with zstd.
    pub recompressed: bool,
}

impl PoolSizer {
    /// Without any refault seen; costs are those of a typical disk.
    pub fn new() -> PoolSizer {
        PoolSizer {
            refaults: Refaults::default(),
            costs: SwapInCosts { area_ns: 60_000, zstd_ns: 10_000, zstd_part: 0, pages_16: 16 },
            distances: Distances { near_below: 0, tail_from: u64::MAX, missed_below: 0, age: 0 },
            soon: 0,
            late: 0,
            regret: 0,
        }
    }

    /// Forgets what came back since the last decision, and what a larger resident part would have
    /// saved.
    pub fn forget(&mut self) {
        self.refaults = Refaults::default();
        self.regret = 0;
    }

    /// A page came back after `distance` pages were taken out, from a swap area or from compressed
    /// memory.
    pub fn refault(&mut self, distance: u64, from_area: bool) {
        self.refaults.seen += 1;
        if distance < self.distances.near_below {
            self.refaults.near += 1;
        } else if distance < 2 * self.distances.near_below {
            self.refaults.next += 1;
        }
        if from_area && distance >= self.distances.age {
            *(if distance < 2 * self.distances.age { &mut self.soon } else { &mut self.late }) += 1;
            if self.soon + self.late > MAX_GHOST_REFAULTS {
                (self.soon, self.late) = (self.soon / 2, self.late / 2);
            }
        }
        match from_area {
            true if (self.distances.age..self.distances.missed_below).contains(&distance) => {
                self.refaults.missed += 1
            }
            false if distance >= self.distances.tail_from => self.refaults.tail += 1,
            _ => {}
        }
    }

    /// True for a page that comes back from a swap area later than compressed memory would have
    /// kept it: should it go out again unchanged, it goes where it came from. One that comes back
    /// sooner is wanted often, and belongs into compressed memory.
    pub(crate) fn belongs_on_areas(&self, distance: u64) -> bool {
        distance >= self.distances.age
    }

    /// False when the pages that come back from swap areas had been out for much longer than
    /// compressed memory could have kept them, however tightly it packs them.
    pub(crate) fn tighter_helps(&self) -> bool {
        self.soon * 8 >= self.late || self.soon + self.late < MIN_REFAULTS
    }

    /// A fault brought in `pages`.
    pub fn fault(&mut self, pages: usize) {
        self.costs.pages_16 = (self.costs.pages_16 * 63 + 16 * pages as u64) / 64;
    }

    /// `pages` were read from swap areas in `ns` nanoseconds.
    pub fn read(&mut self, pages: usize, ns: u64) {
        self.costs.area_ns = (self.costs.area_ns * 31 + ns / pages.max(1) as u64) / 32;
    }

    /// Pages were loaded from compressed memory.
    pub fn loaded(&mut self, loads: Loads) {
        if loads.pages > 0 {
            let part = u64::from(loads.zstd) * 1024 / u64::from(loads.pages);
            self.costs.zstd_part = (self.costs.zstd_part * 15 + part) / 16;
        }
        if loads.timed > 0 {
            self.costs.zstd_ns =
                (self.costs.zstd_ns * 31 + loads.zstd_ns / u64::from(loads.timed)) / 32;
        }
    }

    /// The share from now on. Called every some ten milliseconds.
    pub fn decide(&mut self, at: PoolSample) -> u32 {
        let step_bytes = at.limit / 1024 * u64::from(SHARE_STEP_1024);
        let share = if self.refaults.seen < MIN_REFAULTS { at.share } else { self.choose(&at) };
        if self.refaults.seen >= MIN_REFAULTS {
            let seen = &mut self.refaults;
            for count in
                [&mut seen.near, &mut seen.next, &mut seen.tail, &mut seen.missed, &mut seen.seen]
            {
                *count /= 2;
            }
        }
        self.distances.near_below = step_bytes / 4096;
        // A step's worth of the pool, as a part of its age.
        let part = (at.oldest as u128 * u128::from(step_bytes)
            / u128::from(at.pool.max(step_bytes))) as u64;
        self.distances.tail_from = at.oldest - part.min(at.oldest);
        self.distances.missed_below = at.oldest + part;
        self.distances.age = at.oldest;
        share
    }

    fn choose(&mut self, at: &PoolSample) -> u32 {
        let step_pages = at.limit / 1024 * u64::from(SHARE_STEP_1024) / 4096;
        let delivery = FAULT_NS * 16 / self.costs.pages_16.max(16);
        let from_pool = delivery + POOL_NS + self.costs.zstd_ns * self.costs.zstd_part / 1024;
        let from_old = POOL_NS / 2 + if at.recompressed { self.costs.zstd_ns } else { 0 };
        let more_from_area = (self.costs.area_ns + WRITE_NS).saturating_sub(from_old).max(1000);
        let near = self.refaults.next.max(
            self.refaults.near * self.distances.near_below
                / (at.resident + self.distances.near_below).max(1),
        );
        let resident = near * from_pool;
        let shrinking_costs = self.refaults.tail * more_from_area;
        let growing_gains = self.refaults.missed * more_from_area;
        // A quarter more is worth a move; less is chance.
        // What was decided last is not done yet: write-back takes its time.
        let behind = at.pool > at.limit / 1024 * u64::from(at.share + 2 * SHARE_STEP_1024);
        if !behind
            && resident > shrinking_costs + shrinking_costs / 4
            && near * 64 > self.refaults.seen
            && resident > growing_gains
        {
            // Half of what is counted was counted before.
            self.regret += resident / 2;
            if self.regret < step_pages * PAGES_FOR_ONE * WRITE_NS {
                return at.share;
            }
            self.regret = 0;
            // The share may lie above what the pool holds: what counts is to be below that.
            let holds = (u128::from(at.pool) * 1024 / u128::from(at.limit.max(1))) as u32;
            return at
                .share
                .min(holds.max(MIN_SHARE_1024))
                .saturating_sub(SHARE_STEP_1024)
                .max(MIN_SHARE_1024);
        }
        self.regret -= self.regret / 8;
        if growing_gains > resident + resident / 4 && self.refaults.missed * 64 > self.refaults.seen
        {
            return (at.share + SHARE_STEP_1024).min(MAX_SHARE_1024);
        }
        at.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: PoolSample = PoolSample {
        share: 512,
        limit: 64 << 20,
        resident: 8192,
        pool: 32 << 20,
        oldest: 20_000,
        recompressed: false,
    };

    fn ready() -> PoolSizer {
        let mut sizer = PoolSizer::new();
        assert_eq!(sizer.decide(AT), 512, "nothing is known yet");
        sizer
    }

    /// Returns the decision after a hundred refaults of one kind.
    fn decided(sizer: &mut PoolSizer, at: PoolSample, distance: u64, from_area: bool) -> u32 {
        (0..100).for_each(|_| sizer.refault(distance, from_area));
        sizer.decide(at)
    }

    #[test]
    fn pages_that_come_back_at_once_make_the_pool_smaller() {
        let mut sizer = ready();
        assert!(
            decided(&mut sizer, AT, 300, false) == 512,
            "what it saved is not yet what it costs"
        );
        let steps = (0..100)
            .find(|_| decided(&mut sizer, AT, 300, false) == 512 - SHARE_STEP_1024)
            .expect("a step in the end");
        assert!(steps < 20, "{steps}");
        assert_eq!(decided(&mut sizer, AT, 300, false), 512, "the next one has its own price");
    }

    #[test]
    fn old_savings_do_not_count() {
        let mut sizer = ready();
        while sizer.regret == 0 {
            assert_eq!(decided(&mut sizer, AT, 300, false), 512);
        }
        let before = sizer.regret;
        // Refaults at no distance that says anything.
        for _ in 0..20 {
            decided(&mut sizer, AT, 10_000, false);
        }
        assert!(sizer.regret < before / 4, "{} of {before}", sizer.regret);
    }

    #[test]
    fn early_refaults_from_areas_grow_the_pool() {
        let mut sizer = ready();
        for _ in 0..100 {
            sizer.refault(20_100, true);
        }
        assert_eq!(sizer.decide(AT), 512 + SHARE_STEP_1024);
    }

    #[test]
    fn zstd_cost_favours_resident_pages() {
        // Refaults of small distance, and some that a smaller pool would have turned into readings:
        // as many as just keep it as it is.
        let share = |slow: bool| {
            let mut sizer = ready();
            let at = PoolSample { recompressed: slow, ..AT };
            for _ in 0..64 {
                let zstd_ns = if slow { 64 * 40_000 } else { 0 };
                sizer.loaded(Loads {
                    pages: 64,
                    zstd: if slow { 64 } else { 0 },
                    any_zstd: slow,
                    zstd_ns,
                    timed: 64,
                });
            }
            (0..40)
                .map(|_| {
                    (0..18).for_each(|_| sizer.refault(19_990, false));
                    decided(&mut sizer, at, 300, false)
                })
                .min()
        };
        assert_eq!((share(false), share(true)), (Some(512), Some(512 - SHARE_STEP_1024)));
    }

    #[test]
    fn random_refaults_do_not_resize_the_pool_while_areas_are_slow() {
        let mut sizer = ready();
        for i in 0..20_000u64 {
            sizer.refault(i, false);
        }
        assert_eq!(sizer.decide(AT), 512);
    }

    #[test]
    fn recompression_helps_unless_area_refaults_are_very_late() {
        let mut sizer = ready();
        assert!(sizer.tighter_helps(), "nothing is known yet");
        (0..100).for_each(|_| sizer.refault(90_000, true));
        assert!(!sizer.tighter_helps());
        (0..20).for_each(|_| sizer.refault(30_000, true));
        assert!(sizer.tighter_helps());
        (0..10_000).for_each(|_| sizer.refault(90_000, true));
        assert!(!sizer.tighter_helps(), "what was long ago is forgotten");
    }

    #[test]
    fn the_share_stays_within_its_bounds() {
        let mut sizer = ready();
        let mut share = 512;
        for _ in 0..2000 {
            share = decided(
                &mut sizer,
                PoolSample { share, pool: u64::from(share) << 16, ..AT },
                300,
                false,
            );
        }
        assert_eq!(share, MIN_SHARE_1024);
        for _ in 0..200 {
            share = decided(
                &mut sizer,
                PoolSample { share, pool: u64::from(share) << 16, ..AT },
                20_001,
                true,
            );
        }
        assert_eq!(share, MAX_SHARE_1024);
    }
}
