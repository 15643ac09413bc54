//! Counters under the kernel's names, and the histogram of fault times.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $variant:ident = $name:literal),+ $(,)?) => {
        /// One counter of a process; its number is its place in the process slot.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Counter { $($(#[$doc])* $variant),+ }
        impl Counter {
            /// Every counter, in the order of their places.
            pub const ALL: &'static [Counter] = &[$(Counter::$variant),+];
            /// The name in reports: the kernel's own where the kernel counts the same thing.
            pub fn name(self) -> &'static str { match self { $(Counter::$variant => $name),+ } }
        }
    };
}

counters! {
    /// Pages read back from any swap device.
    Pswpin = "pswpin",
    /// Pages written to any swap device.
    Pswpout = "pswpout",
    /// Pages stored in compressed memory.
    Zswpout = "zswpout",
    /// Pages loaded from compressed memory.
    Zswpin = "zswpin",
    /// Pages written back from compressed memory to the file.
    Zswpwb = "zswpwb",
    /// Pages that were compressed again because they stayed long in compressed memory, and got smaller by it.
    Zswprecomp = "zswprecomp",
    /// Pages that this was tried with.
    ZswprecompTried = "zswprecomp_tried",
    /// Bytes that it saved.
    ZswprecompSaved = "zswprecomp_saved_bytes",
    /// Zero pages that needed no store.
    SwpoutZero = "swpout_zero",
    /// Pages that went out unwritten since they were brought in, and needed no second compression.
    SwpoutClean = "swpout_clean",
    /// Zero pages that needed no load.
    SwpinZero = "swpin_zero",
    /// Folios that found no run of slots and went out page by page.
    SwpoutFallback = "swpout_fallback",
    /// Missing-page faults served.
    Pgmajfault = "pgmajfault",
    /// Faults answered with fresh zero pages.
    Pgminfault = "pgminfault",
    /// Faults that found their folio in the swap cache (second chance).
    SwapCacheHit = "swap_cache_hit",
    /// Pages refaulted after they had been swapped out.
    WorkingsetRefault = "workingset_refault_anon",
    /// Refaulted pages that were activated for their short distance.
    WorkingsetActivate = "workingset_activate_anon",
    /// Pages looked at by reclaim.
    Pgscan = "pgscan_anon",
    /// Pages taken by reclaim.
    Pgsteal = "pgsteal_anon",
    /// Pages taken by the fault handler itself because reclaim had not kept up.
    PgstealDirect = "pgsteal_direct",
    /// Pages brought in ahead of their fault.
    SwapRa = "swap_ra",
    /// 64K folios swapped out whole.
    Swpout64k = "swpout_64kB",
    /// 64K folios swapped in whole.
    Swpin64k = "swpin_64kB",
    /// Pages that could not be moved because something held them (EBUSY).
    PagesBusy = "pages_busy",
    /// Forks of a process with managed memory.
    Forks = "forks",
    /// Pages copied to a child on its parent's behalf before the child served itself.
    ForkServed = "fork_served",
    /// Pages that could not be brought back and were poisoned.
    PagesPoisoned = "pages_poisoned",
    /// Pages kept in memory because no swap space was left.
    SwapFull = "swap_full",
    /// Writes to the file that failed; their pages stayed in memory.
    WriteErrors = "write_errors",
    /// Times a process was put under management.
    Engaged = "engaged",
    /// Regions of memory adopted.
    RegionsAdopted = "regions_adopted",
}

/// Number of buckets of [`FaultHistogram`]: four to each power of two from 1 us to 16 s.
pub const HISTOGRAM_BUCKETS: usize = 96;

/// Times of faults, from the message's reading to the waking, in logarithmic buckets.
#[repr(C)]
pub struct FaultHistogram {
    /// Faults in each bucket.
    pub buckets: [AtomicU64; HISTOGRAM_BUCKETS],
    /// The longest, in nanoseconds.
    pub max_ns: AtomicU64,
}

impl FaultHistogram {
    /// The bucket of a time in nanoseconds.
    pub fn bucket(ns: u64) -> usize {
        let ns = ns.max(1024);
        let exponent = 63 - ns.leading_zeros() as usize;
        let quarter = ((ns >> (exponent - 2)) & 3) as usize;
        ((exponent - 10) * 4 + quarter).min(HISTOGRAM_BUCKETS - 1)
    }

    /// The upper bound of a bucket, in nanoseconds.
    pub fn bound(bucket: usize) -> u64 {
        let exponent = bucket / 4 + 10;
        let quarter = (bucket % 4) as u64;
        (1u64 << exponent) + (quarter + 1) * (1u64 << (exponent - 2))
    }

    /// Counts one fault of `ns` nanoseconds. Only one thread writes it at a time.
    pub fn record(&self, ns: u64) {
        self.buckets[Self::bucket(ns)].fetch_add(1, Relaxed);
        if ns > self.max_ns.load(Relaxed) {
            self.max_ns.store(ns, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_lies_under_the_bound_of_its_bucket_and_over_that_of_the_one_before() {
        for ns in [1, 1024, 1500, 5_000, 77_777, 1_000_000, 900_000_000] {
            let bucket = FaultHistogram::bucket(ns);
            assert!(ns <= FaultHistogram::bound(bucket), "{ns}");
            assert!(bucket == 0 || ns >= FaultHistogram::bound(bucket - 1), "{ns}");
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = Counter::ALL.iter().map(|c| c.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Counter::ALL.len());
    }
}
