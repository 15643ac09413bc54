//! A memory cgroup for the kernel's side of a comparison, version 1 or 2.
//!
//! Owns finding the hierarchy, making one group with a limit, and reading how much it used. The
//! group is removed through the [`Restorer`], so also after a signal.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::peers::restore::{Machine, Restorer, Undo};

/// Where memory cgroups live on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hierarchy {
    /// The memory controller's own hierarchy of cgroup version 1.
    V1(PathBuf),
    /// The unified hierarchy of cgroup version 2.
    V2(PathBuf),
}

impl Hierarchy {
    /// Looks through the mounts. A version 1 memory hierarchy goes first: the controller is in only
    /// one of the two.
    pub fn find(machine: &Machine) -> Result<Self, String> {
        let mounts = machine.read("/proc/mounts")?;
        let of_type = |kind: &'static str| {
            mounts.lines().filter_map(move |line| {
                let mut words = line.split(' ').skip(1);
                let (dir, fs, options) = (words.next()?, words.next()?, words.next()?);
                (fs == kind).then_some((dir, options))
            })
        };
        if let Some((dir, _)) =
            of_type("cgroup").find(|(_, options)| options.split(',').any(|o| o == "memory"))
        {
            return Ok(Hierarchy::V1(dir.into()));
        }
        for (dir, _) in of_type("cgroup2") {
            let controllers = machine.read(format!("{dir}/cgroup.controllers")).unwrap_or_default();
            if controllers.split(' ').any(|c| c == "memory") {
                return Ok(Hierarchy::V2(dir.into()));
            }
        }
        Err("no memory cgroup hierarchy is mounted; mount one: mount -t cgroup2 none \
            /sys/fs/cgroup"
            .into())
    }

    /// The version's number, for reports.
    pub fn version(&self) -> u32 {
        match self {
            Hierarchy::V1(_) => 1,
            Hierarchy::V2(_) => 2,
        }
    }
}

/// A memory cgroup made for one run.
pub struct Cgroup {
    dir: PathBuf,
}

impl Cgroup {
    /// Makes a group that may hold `limit` bytes of resident memory, if there is a limit.
    pub fn create(
        restorer: &Restorer,
        hierarchy: &Hierarchy,
        limit: Option<u64>,
    ) -> Result<Self, String> {
        let name = format!("swaptide-bench-{}", std::process::id());
        let (parent, limit_file) = match hierarchy {
            Hierarchy::V1(dir) => (dir, "memory.limit_in_bytes"),
            Hierarchy::V2(dir) => {
                let control = dir.join("cgroup.subtree_control");
                if !restorer.machine().read(&control)?.split(' ').any(|c| c == "memory") {
                    let undo = Undo::Write { path: control.clone(), value: "-memory".into() };
                    restorer.change(undo, |m| m.write(&control, "+memory"))?;
                }
                (dir, "memory.max")
            }
        };
        let dir = parent.join(name);
        restorer.change(Undo::RemoveCgroup(dir.clone()), |m| {
            std::fs::create_dir(m.path(&dir))
                .map_err(|e| format!("making the cgroup {}: {e}", dir.display()))
        })?;
        if let Some(limit) = limit {
            restorer.machine().write(dir.join(limit_file), &limit.to_string())?;
        }
        Ok(Cgroup { dir })
    }

    /// The file a process writes `0` to in order to join.
    pub(crate) fn procs(&self) -> PathBuf {
        self.dir.join("cgroup.procs")
    }

    /// Bytes of memory that the group has now and that can be swapped: anonymous, and shared.
    pub(crate) fn swappable(&self, machine: &Machine) -> u64 {
        let stat = machine.read(self.dir.join("memory.stat")).unwrap_or_default();
        let of = |name: &str| {
            stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
        };
        // Version 1 names the first `rss`, and has no line `anon`.
        of("anon ").or_else(|| of("rss ")).unwrap_or(0) + of("shmem ").unwrap_or(0)
    }

    /// Kills the processes of the group: each was started by this benchmark.
    pub(crate) fn kill_all(&self, machine: &Machine) {
        for _ in 0..100 {
            let procs = machine.read(self.procs()).unwrap_or_default();
            let pids = || procs.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?));
            if pids().next().is_none() {
                return;
            }
            for pid in pids() {
                // One that has just ended is no failure.
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The most memory the group held, in bytes, where the kernel says.
    pub fn peak(&self, machine: &Machine) -> Option<u64> {
        let read = |file: &str| machine.read(Path::new(&self.dir).join(file)).ok()?.parse().ok();
        read("memory.max_usage_in_bytes").or_else(|| read("memory.peak"))
    }
}
