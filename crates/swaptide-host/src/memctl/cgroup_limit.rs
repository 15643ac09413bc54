//! The memory cgroups around a run, as a bound of its budget.
//!
//! A container's hard limit kills the process that asks for memory at a moment when nothing there
//! can be given up. Pages of files usually can, but not while they are being read: readahead fills
//! what is left of a cgroup, and a device's windows (of some MiB for each file) are locked until
//! they are there. So a budget near the limit is not the whole truth. What the tree may have is the
//! limit, less what is in the cgroup that is neither the tree's nor to be given up (kernel memory,
//! tmpfs, other programs), less a *reserve*. The reserve is small while the limit is not met, and
//! grows step by step while it is: then pages of files, or others, press.
//!
//! Owns the descriptors of the cgroups' files. They stay open, as whatever is read at each look
//! does: opening a file takes memory that is charged to the very cgroup.
//!
//! Invariants
//! 1. A cgroup bounds, and never raises: a budget that leaves the reserve is what it was.
//! 2. A bound is never below [`MIN_BUDGET_BYTES`].
//!
//! Locks: none; the controller's thread alone.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use swaptide_ipc::MIN_BUDGET_BYTES;

use crate::units::limiting_cgroups;

/// The interval between checks.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The reserve while the limit is not met: this part of the limit, within these bounds.
const RESERVE_DIVISOR: u64 = 64;
const MIN_RESERVE_BYTES: u64 = 1 << 20;
const USUAL_MAX_RESERVE_BYTES: u64 = 8 << 20;
/// The largest reserve, and this part of the limit at most.
const MAX_RESERVE_BYTES: u64 = 24 << 20;
const MAX_RESERVE_DIVISOR: u64 = 4;
/// The steps in which it grows to that.
const RESERVE_STEPS: u64 = 8;
/// So long it stays when the limit is met no more; then it goes back by a step each time.
const RESERVE_HOLD: Duration = Duration::from_secs(5);
/// Bounds are rounded down to this, so that they do not change with every page of the kernel's.
const BOUND_GRAIN_BYTES: u64 = 1 << 20;

/// One cgroup that has a limit.
struct LimitedCgroup {
    limit: File,
    stat: File,
    /// What the kernel has for itself, in version 1; version 2 has it in `stat`.
    kernel: Option<File>,
    /// Where is counted how often the limit was met.
    hits: File,
    reserve: Reserve,
}

/// The memory that is left free, and the reason.
#[derive(Default)]
struct Reserve {
    hits: Option<u64>,
    steps: u64,
    changed: Option<Instant>,
}

impl Reserve {
    /// The limit was met so often until now. Gives the bytes that are to be left free.
    fn follow(&mut self, limit: u64, hits: u64, now: Instant) -> u64 {
        let met = self.hits.replace(hits).is_some_and(|before| hits > before);
        let rests = |since: Instant| now.saturating_duration_since(since) >= RESERVE_HOLD;
        if met {
            self.steps = (self.steps + 1).min(RESERVE_STEPS);
            self.changed = Some(now);
        } else if self.changed.is_some_and(rests) {
            self.steps = self.steps.saturating_sub(1);
            self.changed = (self.steps > 0).then_some(now);
        }
        let (least, most) = (
            (limit / RESERVE_DIVISOR).clamp(MIN_RESERVE_BYTES, USUAL_MAX_RESERVE_BYTES),
            MAX_RESERVE_BYTES.min(limit / MAX_RESERVE_DIVISOR),
        );
        least + most.saturating_sub(least) / RESERVE_STEPS * self.steps
    }
}

/// The memory cgroups around the run, and what they leave of its budget.
#[derive(Default)]
pub struct CgroupLimit {
    levels: Vec<LimitedCgroup>,
    looked: Option<Instant>,
    bound: Option<u64>,
    text: Vec<u8>,
}

impl CgroupLimit {
    /// That of the cgroups that this process is in; of a version or a container that hides its
    /// files, none.
    pub(crate) fn of_own_cgroups() -> CgroupLimit {
        let levels = limiting_cgroups()
            .into_iter()
            .filter_map(|(directory, _)| LimitedCgroup::open(&directory))
            .collect();
        CgroupLimit { levels, text: vec![0; 8 << 10], ..CgroupLimit::default() }
    }

    /// The most that the tree may have, of which `ours` bytes are resident. `None` where nothing
    /// bounds it.
    pub fn look(&mut self, ours: u64) -> Option<u64> {
        let now = Instant::now();
        if self.levels.is_empty()
            || self
                .looked
                .is_some_and(|looked| now.saturating_duration_since(looked) < POLL_INTERVAL)
        {
            return self.bound;
        }
        self.looked = Some(now);
        let text = &mut self.text;
        self.bound = self.levels.iter_mut().filter_map(|level| level.bound(ours, now, text)).min();
        self.bound
    }
}

impl LimitedCgroup {
    fn open(directory: &Path) -> Option<LimitedCgroup> {
        let open = |name: &str| File::open(PathBuf::from(directory).join(name)).ok();
        Some(LimitedCgroup {
            limit: open("memory.limit_in_bytes").or_else(|| open("memory.max"))?,
            stat: open("memory.stat")?,
            kernel: open("memory.kmem.usage_in_bytes"),
            hits: open("memory.failcnt").or_else(|| open("memory.events"))?,
            reserve: Reserve::default(),
        })
    }

    fn bound(&mut self, ours: u64, now: Instant, text: &mut [u8]) -> Option<u64> {
        let limit: u64 = read(&self.limit, text)?.trim().parse().ok()?;
        let counted = read(&self.hits, text)?;
        let hits = counted.trim().parse().ok().or_else(|| field(counted, "max"))?;
        let kernel = self.kernel.as_ref().and_then(|file| read(file, text)?.trim().parse().ok());
        let others = stays(read(&self.stat, text)?, kernel)?.saturating_sub(ours);
        let left =
            limit.saturating_sub(others).saturating_sub(self.reserve.follow(limit, hits, now));
        Some((left / BOUND_GRAIN_BYTES * BOUND_GRAIN_BYTES).max(MIN_BUDGET_BYTES))
    }
}

/// The text of a small file that is kept open.
fn read<'t>(file: &File, text: &'t mut [u8]) -> Option<&'t str> {
    let n = file.read_at(text, 0).ok()?;
    std::str::from_utf8(&text[..n]).ok()
}

/// A number of a file of lines `NAME NUMBER`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Bytes of a cgroup that the kernel cannot give up without swap, out of its `memory.stat`;
/// `kernel`: what is told elsewhere of the kernel's own.
fn stays(stat: &str, kernel: Option<u64>) -> Option<u64> {
    let of = |names: &[&str]| names.iter().find_map(|name| field(stat, name));
    let anon = of(&["total_rss", "anon"])?;
    let shmem = of(&["total_shmem", "shmem"]).unwrap_or(0);
    let in_stat =
        || of(&["kernel"]).map(|all| all.saturating_sub(of(&["slab_reclaimable"]).unwrap_or(0)));
    Some(anon + shmem + kernel.or_else(in_stat).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn rest_is_read_from_both_versions() {
        let old =
            "cache 99\nrss 1\ntotal_cache 500\ntotal_rss 100\ntotal_rss_huge 7\ntotal_shmem 20\n";
        assert_eq!(stays(old, Some(3)), Some(123));
        let new = "anon 100\nfile 500\nkernel 50\nkernel_stack 4\nshmem 20\nslab_reclaimable 30\n";
        assert_eq!(stays(new, None), Some(140));
        assert_eq!(stays("", None), None);
        assert_eq!(field("low 0\nhigh 1\nmax 17\noom 2\n", "max"), Some(17));
    }

    #[test]
    fn the_reserve_grows_at_the_limit_and_shrinks_below_it() {
        let (mut reserve, began) = (Reserve::default(), Instant::now());
        let mut at = |hits, ms| reserve.follow(128 * MIB, hits, began + Duration::from_millis(ms));
        assert_eq!((at(50, 0), at(50, 50)), (2 * MIB, 2 * MIB), "what came before says nothing");
        let grown: Vec<u64> = (1..=10).map(|n| at(50 + n, 50 + 50 * n) / MIB).collect();
        assert_eq!(grown, [4, 7, 10, 13, 15, 18, 21, 24, 24, 24]);
        assert_eq!(at(60, 5000) / MIB, 24);
        assert_eq!(at(60, 5600) / MIB, 21);
        assert_eq!((at(60, 5700) / MIB, at(60, 10_700) / MIB), (21, 18));
        assert_eq!(at(61, 10_800) / MIB, 21);
        for n in 0..12 {
            at(61, 20_000 + 6000 * n);
        }
        assert_eq!(at(61, 100_000), 2 * MIB);
        assert!(Reserve::default().follow(40 * MIB, 0, began) >= MIB);
    }

    /// The files of a cgroup, made up.
    #[test]
    fn a_cgroup_bounds_the_tree_and_its_files_are_read_again() {
        let directory =
            std::env::temp_dir().join(format!("swaptide-ceiling-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let write =
            |name: &str, text: &str| std::fs::write(directory.join(name), text).expect("a file");
        write("memory.max", "max\n");
        write("memory.events", "low 0\nmax 0\n");
        write("memory.stat", &format!("anon {}\nshmem 0\nkernel {}\n", 90 * MIB, 3 * MIB));
        let mut level = LimitedCgroup::open(&directory).expect("a cgroup");
        let (now, mut text) = (Instant::now(), vec![0; 4096]);
        assert_eq!(level.bound(80 * MIB, now, &mut text), None, "no limit");
        write("memory.max", &(128 * MIB).to_string());
        assert_eq!(level.bound(80 * MIB, now, &mut text), Some((128 - 13 - 2) * MIB));
        write("memory.events", "low 0\nmax 5\n");
        assert_eq!(level.bound(80 * MIB, now, &mut text), Some((128 - 13 - 5) * MIB));
        write("memory.stat", &format!("anon {}\n", 127 * MIB));
        assert_eq!(level.bound(0, now, &mut text), Some(MIN_BUDGET_BYTES), "all is others'");
        std::fs::remove_dir_all(&directory).expect("removal");
    }
}
