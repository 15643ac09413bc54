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
    /// Pages read from swap areas.
    Pswpin = "pswpin",
    /// Pages written to swap areas, those written back from compressed memory among them.
    Pswpout = "pswpout",
    /// Pages stored in compressed memory.
    Zswpout = "zswpout",
    /// Pages loaded from compressed memory.
    Zswpin = "zswpin",
    /// Pages written back from compressed memory to the swap area.
    Zswpwb = "zswpwb",
    /// Pages that were compressed again because they stayed long in compressed memory, and got
    /// smaller by it.
    Zswprecomp = "zswprecomp",
    /// Pages that this was tried with.
    ZswprecompTried = "zswprecomp_tried",
    /// Bytes that it saved.
    ZswprecompSaved = "zswprecomp_saved_bytes",
    /// Times compressed memory was found at its limit when something was to be stored (with an
    /// acceptance threshold).
    PoolLimitHit = "pool_limit_hit",
    /// Pages that went to the swap areas because compressed memory takes nothing until it has
    /// fallen below its acceptance threshold.
    RejectPoolFull = "reject_pool_full",
    /// Pages that went to the swap areas because they do not compress.
    RejectCompressPoor = "reject_compress_poor",
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
    /// Refaulted pages that stay for some rounds of reclaim, by their record of short distances.
    WorkingsetActivate = "workingset_activate_anon",
    /// Pages looked at by reclaim.
    Pgscan = "pgscan_anon",
    /// Pages taken by reclaim.
    Pgsteal = "pgsteal_anon",
    /// Pages taken by the fault handler itself because reclaim had not kept up.
    PgstealDirect = "pgsteal_direct",
    /// Pages brought in ahead of their fault.
    SwapRa = "swap_ra",
    /// Of those, pages of windows that the program ran through: its next fault came where the
    /// window ended.
    SwapRaHit = "swap_ra_hit",
    /// Loads of several pages that were dropped because the range was another one at the second
    /// look.
    SwpinStale = "swpin_stale",
    /// Faults on a page that another thread was bringing in, which were left to that one.
    SwpinExists = "swpin_exists",
    /// Pages that could not be moved because something held them (EBUSY).
    PagesBusy = "pages_busy",
    /// Pages that another process had, too, since a fork, and that were copied so that they could
    /// be moved.
    PagesUnshared = "pages_unshared",
    /// Pages that the engine had the kernel fault in and that copied nothing: fresh ones of
    /// compressed memory, and those that a fork had shared and no longer did.
    EngineFaults = "engine_faults",
    /// Forks of a process with managed memory.
    Forks = "forks",
    /// Pages copied to a child on its parent's behalf before the child served itself.
    ForkServed = "fork_served",
    /// Pages that could not be brought back and were poisoned.
    PagesPoisoned = "pages_poisoned",
    /// Times that a thread waited for fresh pages because its group had more than `swap.high` on
    /// swap areas.
    SwapHighWaits = "swap_high_waits",
    /// Faults that were answered by fault servers, next to the handler.
    FaultsByServers = "faults_by_servers",
    /// Microseconds in which at least one thread waited for memory that was swapped out, or for
    /// room: the kernel's `some` of memory.pressure.
    StallUs = "stall_us",
    /// The most pages of read-only private memory that a process past its limit had: they cannot go
    /// out.
    UnmovableReadOnly = "unmovable_readonly",
    /// The same of executable memory that is no file's.
    UnmovableExecutable = "unmovable_executable",
    /// The same of memory that the program has locked (mlock, MAP_LOCKED).
    UnmovableLocked = "unmovable_locked",
    /// The same of files that are mapped privately, as far as they were written to.
    UnmovableFile = "unmovable_file",
    /// The same of memory that the program keeps apart from its children (MADV_DONTFORK,
    /// MADV_WIPEONFORK): it is not managed.
    UnmovableUnforked = "unmovable_unforked",
    /// Pages kept in memory because no swap space was left.
    SwapFull = "swap_full",
    /// Writes to the file that failed; their pages stayed in memory.
    WriteErrors = "write_errors",
    /// Times a process was put under management.
    Engaged = "engaged",
    /// Regions of memory adopted.
    RegionsAdopted = "regions_adopted",
    /// Aligned blocks of this size that came in whole for one fault.
    Swpin64k = "hugepages-64kB/swpin",
    /// Such blocks that were asked for and came in smaller, or not at all.
    SwpinFallback64k = "hugepages-64kB/swpin_fallback",
    /// Folios of this size that went to a swap area whole.
    Swpout64k = "hugepages-64kB/swpout",
    /// Folios of this size that found no run of slots and went out in halves.
    SwpoutFallback64k = "hugepages-64kB/swpout_fallback",
    /// Folios of this size that went to compressed memory whole.
    Zswpout64k = "hugepages-64kB/zswpout",
    /// Aligned blocks of this size that came in whole for one fault.
    Swpin128k = "hugepages-128kB/swpin",
    /// Such blocks that were asked for and came in smaller, or not at all.
    SwpinFallback128k = "hugepages-128kB/swpin_fallback",
    /// Folios of this size that went to a swap area whole.
    Swpout128k = "hugepages-128kB/swpout",
    /// Folios of this size that found no run of slots and went out in halves.
    SwpoutFallback128k = "hugepages-128kB/swpout_fallback",
    /// Folios of this size that went to compressed memory whole.
    Zswpout128k = "hugepages-128kB/zswpout",
    /// Aligned blocks of this size that came in whole for one fault.
    Swpin256k = "hugepages-256kB/swpin",
    /// Such blocks that were asked for and came in smaller, or not at all.
    SwpinFallback256k = "hugepages-256kB/swpin_fallback",
    /// Folios of this size that went to a swap area whole.
    Swpout256k = "hugepages-256kB/swpout",
    /// Folios of this size that found no run of slots and went out in halves.
    SwpoutFallback256k = "hugepages-256kB/swpout_fallback",
    /// Folios of this size that went to compressed memory whole.
    Zswpout256k = "hugepages-256kB/zswpout",
    /// Aligned blocks of this size that came in whole for one fault.
    Swpin512k = "hugepages-512kB/swpin",
    /// Such blocks that were asked for and came in smaller, or not at all.
    SwpinFallback512k = "hugepages-512kB/swpin_fallback",
    /// Folios of this size that went to a swap area whole.
    Swpout512k = "hugepages-512kB/swpout",
    /// Folios of this size that found no run of slots and went out in halves.
    SwpoutFallback512k = "hugepages-512kB/swpout_fallback",
    /// Folios of this size that went to compressed memory whole.
    Zswpout512k = "hugepages-512kB/zswpout",
    /// Aligned blocks of this size that came in whole for one fault.
    Swpin1024k = "hugepages-1024kB/swpin",
    /// Such blocks that were asked for and came in smaller, or not at all.
    SwpinFallback1024k = "hugepages-1024kB/swpin_fallback",
    /// Folios of this size that went to a swap area whole.
    Swpout1024k = "hugepages-1024kB/swpout",
    /// Folios of this size that found no run of slots and went out in halves.
    SwpoutFallback1024k = "hugepages-1024kB/swpout_fallback",
    /// Folios of this size that went to compressed memory whole.
    Zswpout1024k = "hugepages-1024kB/zswpout",
    /// Aligned blocks of this size that came in whole for one fault.
    Swpin2048k = "hugepages-2048kB/swpin",
    /// Such blocks that were asked for and came in smaller, or not at all.
    SwpinFallback2048k = "hugepages-2048kB/swpin_fallback",
    /// Folios of this size that went to a swap area whole.
    Swpout2048k = "hugepages-2048kB/swpout",
    /// Folios of this size that found no run of slots and went out in halves.
    SwpoutFallback2048k = "hugepages-2048kB/swpout_fallback",
    /// Folios of this size that went to compressed memory whole.
    Zswpout2048k = "hugepages-2048kB/zswpout",
}

/// Smallest order that is counted by itself: 64 KiB.
pub const FIRST_ORDER: u8 = 4;
/// Largest order that is counted by itself: 2 MiB.
pub const LAST_ORDER: u8 = 9;

/// The counters of each order from [`FIRST_ORDER`] to [`LAST_ORDER`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfOrder {
    /// Folios of this order that came in whole.
    Swpin,
    /// Folios of this order that should have come in whole, and did not.
    SwpinFallback,
    /// Went to a swap area whole.
    Swpout,
    /// Found no run of slots.
    SwpoutFallback,
    /// Went to compressed memory whole.
    Zswpout,
}

impl OfOrder {
    /// The counter of an order; `None` for orders that are not counted.
    pub fn counter(self, order: u8) -> Option<Counter> {
        const KINDS: usize = 5;
        if !(FIRST_ORDER..=LAST_ORDER).contains(&order) {
            return None;
        }
        Counter::ALL
            .get(
                Counter::Swpin64k as usize
                    + usize::from(order - FIRST_ORDER) * KINDS
                    + self as usize,
            )
            .copied()
    }
}

/// The bucket of a value where there are four to each power of two, from the `lowest` power on.
fn log_bucket(value: u64, lowest: usize) -> usize {
    let value = value.max(1 << lowest);
    let exponent = 63 - value.leading_zeros() as usize;
    let quarter = ((value >> (exponent - 2)) & 3) as usize;
    (exponent - lowest) * 4 + quarter
}

/// The upper bound of such a bucket.
fn log_bound(bucket: usize, lowest: usize) -> u64 {
    let exponent = bucket / 4 + lowest;
    let quarter = (bucket % 4) as u64;
    (1u64 << exponent) + (quarter + 1) * (1u64 << (exponent - 2))
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
        log_bucket(ns, 10).min(HISTOGRAM_BUCKETS - 1)
    }

    /// The upper bound of a bucket, in nanoseconds.
    pub fn bound(bucket: usize) -> u64 {
        log_bound(bucket, 10)
    }

    /// Counts one fault of `ns` nanoseconds.
    pub fn record(&self, ns: u64) {
        self.buckets[Self::bucket(ns)].fetch_add(1, Relaxed);
        // Mostly it is not longer: then nothing is written.
        if ns > self.max_ns.load(Relaxed) {
            self.max_ns.fetch_max(ns, Relaxed);
        }
    }
}

/// Number of buckets of [`RefaultHistogram`]: four to each power of two from 64 pages to 4 TiB.
pub const REFAULT_BUCKETS: usize = 96;

/// How many resident pages would have kept a page that came back, in logarithmic buckets: those
/// there were, and those that went out between its going and its coming.
#[repr(C)]
pub struct RefaultHistogram {
    /// Pages in each bucket.
    pub pages: [AtomicU64; REFAULT_BUCKETS],
}

impl RefaultHistogram {
    /// The bucket of a number of resident pages.
    pub fn bucket(resident: u64) -> usize {
        log_bucket(resident, 6).min(REFAULT_BUCKETS - 1)
    }

    /// The number of resident pages from which on none of a bucket would have gone out.
    pub fn bound(bucket: usize) -> u64 {
        log_bound(bucket, 6)
    }

    /// Counts a page that came back and would have stayed with `resident` resident pages.
    pub fn record(&self, resident: u64) {
        self.pages[Self::bucket(resident)].fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_pages_is_within_the_bounds_of_its_bucket() {
        for resident in [1, 64, 79, 80, 5_000, 77_777, 1 << 24, (1 << 29) + 7] {
            let bucket = RefaultHistogram::bucket(resident);
            assert!(resident < RefaultHistogram::bound(bucket), "{resident}");
            assert!(bucket == 0 || resident >= RefaultHistogram::bound(bucket - 1), "{resident}");
        }
        assert_eq!(RefaultHistogram::bucket(u64::MAX), REFAULT_BUCKETS - 1);
    }

    #[test]
    fn every_time_falls_into_the_bucket_of_its_bounds() {
        for ns in [1, 1024, 1500, 5_000, 77_777, 1_000_000, 900_000_000] {
            let bucket = FaultHistogram::bucket(ns);
            assert!(ns <= FaultHistogram::bound(bucket), "{ns}");
            assert!(bucket == 0 || ns >= FaultHistogram::bound(bucket - 1), "{ns}");
        }
    }

    #[test]
    fn the_counters_of_an_order_bear_its_name() {
        for order in 0..12u8 {
            for (kind, name) in [
                (OfOrder::Swpin, "swpin"),
                (OfOrder::SwpinFallback, "swpin_fallback"),
                (OfOrder::Swpout, "swpout"),
                (OfOrder::SwpoutFallback, "swpout_fallback"),
                (OfOrder::Zswpout, "zswpout"),
            ] {
                let expected = (4..=9)
                    .contains(&order)
                    .then(|| format!("hugepages-{}kB/{name}", 4u32 << order));
                assert_eq!(kind.counter(order).map(|c| c.name().to_owned()), expected);
            }
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
