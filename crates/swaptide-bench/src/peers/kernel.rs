//! The kernel's own swap, set up for one run of the workload and taken away after it.
//!
//! Owns the recipes: compressed RAM (zram), the compressed cache before a swap file (zswap), a
//! plain swap file, and the size of folio the kernel may swap as one (4K or 64K). Everything goes
//! through the [`Restorer`], which takes it back.
//!
//! What zram stores is not charged to the memory cgroup, nor is zswap's pool in version 1; so each
//! set-up can say how many bytes it holds.

use std::path::PathBuf;

use rustix::fs::{FallocateFlags, Mode, OFlags};

use crate::peers::cgroup::Hierarchy;
use crate::peers::restore::{Machine, Restorer, Undo, UndoScope};

/// What a compressed pool holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Bytes of RAM that it takes.
    pub ram: u64,
    /// Bytes of the pages in it, as they were.
    pub pages: u64,
    /// Of swaptide, bytes of the pages that continued to a swap area.
    pub on_areas: u64,
}

/// Swap priority above whatever the machine has.
const PRIORITY: &str = "32767";
const ZSWAP: &str = "/sys/module/zswap/parameters";
const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// What swaptide is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelPeer {
    /// Compressed RAM as the swap device
    Zram,
    /// A plain swap file
    File,
    /// A compressed cache in front of a swap file
    Zswap,
}

impl KernelPeer {
    /// Every peer. zswap is last: switching it on once ends the kernel's 64K swap-in, for zram too,
    /// until a reboot.
    pub(crate) const ALL: [KernelPeer; 3] = [KernelPeer::Zram, KernelPeer::File, KernelPeer::Zswap];

    /// The name on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            KernelPeer::Zram => "kernel-zram",
            KernelPeer::File => "kernel-file",
            KernelPeer::Zswap => "kernel-zswap",
        }
    }

    /// True if the pool counts against the cgroup's limit: zswap's does, in cgroup version 2.
    pub(crate) fn pool_is_charged(self, cgroups: &Hierarchy) -> bool {
        self == KernelPeer::Zswap && cgroups.version() == 2
    }

    /// What is missing for this peer, if anything.
    pub fn check(self, machine: &Machine) -> Result<Hierarchy, String> {
        if !rustix::process::geteuid().is_root() {
            return Err(
                "needs root, to set the kernel's swap up and take it down again; run it with sudo"
                    .into(),
            );
        }
        let needs = match self {
            KernelPeer::Zram => ("/sys/class/zram-control/hot_add", "zram; load it: modprobe zram"),
            KernelPeer::Zswap => {
                ("/sys/module/zswap/parameters/enabled", "a kernel with CONFIG_ZSWAP")
            }
            KernelPeer::File => ("/proc/swaps", "a kernel with CONFIG_SWAP"),
        };
        if !machine.path(needs.0).exists() {
            return Err(format!("needs {} ({} is not there)", needs.1, needs.0));
        }
        Hierarchy::find(machine)
    }
}

/// The folio size the kernel may use for anonymous memory in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Folios {
    /// 4K pages only, as without mTHP.
    Small,
    /// 64K folios wherever they fit (mTHP).
    Large,
}

impl Folios {
    /// How tables name it.
    pub fn name(self) -> &'static str {
        match self {
            Folios::Small => "4K",
            Folios::Large => "64K",
        }
    }

    /// The choices this kernel has.
    pub(crate) fn choices(machine: &Machine) -> Vec<Folios> {
        let large = machine.path(format!("{THP}/hugepages-64kB/enabled")).exists();
        if large { vec![Folios::Small, Folios::Large] } else { vec![Folios::Small] }
    }

    fn apply(self, restorer: &Restorer) -> Result<(), String> {
        let sizes = std::fs::read_dir(restorer.machine().path(THP)).into_iter().flatten().flatten();
        let mut names: Vec<_> = sizes.filter_map(|e| e.file_name().into_string().ok()).collect();
        // The smallest sizes exist for shared memory only and have no such setting.
        names.retain(|n| {
            n.starts_with("hugepages-")
                && restorer.machine().path(format!("{THP}/{n}/enabled")).exists()
        });
        for name in names {
            let value =
                if self == Folios::Large && name == "hugepages-64kB" { "always" } else { "never" };
            restorer.set(&format!("{THP}/{name}/enabled"), value)?;
        }
        Ok(())
    }
}

/// Where a set-up's compressed bytes are counted.
#[derive(Debug)]
enum PeerPool {
    None,
    Zram(u32),
    /// And what zswap held before, on behalf of others.
    Zswap(PoolUsage),
}

/// The kernel's swap, on; switched off and removed when dropped.
pub struct Setup {
    /// The codec in use, as the kernel names it; none for a plain file.
    pub codec: Option<String>,
    pool: PeerPool,
    machine: Machine,
    _scope: UndoScope,
}

impl Setup {
    /// Sets `peer` up with room for `bytes` of swapped data. A swap file is made in `dir`; zswap
    /// may take `zswap_percent` of the machine's memory.
    pub fn new(
        restorer: &Restorer,
        peer: KernelPeer,
        folios: Folios,
        bytes: u64,
        dir: &std::path::Path,
        zswap_percent: u32,
    ) -> Result<Self, String> {
        // Made first: what a set-up that fails half-way did is undone too.
        let scope = restorer.scope();
        folios.apply(restorer)?;
        let (codec, pool) = match peer {
            KernelPeer::Zram => zram(restorer, bytes)?,
            KernelPeer::File => {
                swap_file(restorer, bytes, dir)?;
                (None, PeerPool::None)
            }
            KernelPeer::Zswap => {
                let codec = zswap(restorer, zswap_percent)?;
                let before = zswap_held(&restorer.machine().read("/proc/meminfo")?);
                swap_file(restorer, bytes, dir)?;
                (Some(codec), PeerPool::Zswap(before))
            }
        };
        Ok(Setup { codec, pool, machine: restorer.machine().clone(), _scope: scope })
    }

    /// The most RAM that a pool of its own has taken so far; 0 where the kernel does not say.
    pub(crate) fn most_ram(&self) -> u64 {
        let PeerPool::Zram(id) = self.pool else { return 0 };
        let stat = self.machine.read(format!("/sys/block/zram{id}/mm_stat")).unwrap_or_default();
        MmStat::parse(&stat).map_or(0, |stat| stat.most_used)
    }

    /// What the compressed pool holds now.
    pub fn held(&self) -> PoolUsage {
        match self.pool {
            PeerPool::None => PoolUsage::default(),
            PeerPool::Zram(id) => {
                let stat =
                    self.machine.read(format!("/sys/block/zram{id}/mm_stat")).unwrap_or_default();
                MmStat::parse(&stat).map_or(PoolUsage::default(), |s| PoolUsage {
                    ram: s.used,
                    pages: s.original,
                    ..PoolUsage::default()
                })
            }
            PeerPool::Zswap(before) => {
                let now = zswap_held(&self.machine.read("/proc/meminfo").unwrap_or_default());
                PoolUsage {
                    ram: now.ram.saturating_sub(before.ram),
                    pages: now.pages.saturating_sub(before.pages),
                    ..PoolUsage::default()
                }
            }
        }
    }
}

fn zram(restorer: &Restorer, bytes: u64) -> Result<(Option<String>, PeerPool), String> {
    let id: u32 = restorer.change_then(
        |m| {
            let id = m.read("/sys/class/zram-control/hot_add")?;
            id.parse().map_err(|_| {
                format!("/sys/class/zram-control/hot_add answered {id:?}, not a device number")
            })
        },
        |&id| Undo::RemoveZram(id),
    )?;
    let machine = restorer.machine();
    let block = format!("/sys/block/zram{id}");
    // A kernel without lz4 in zram keeps its own choice, and the report names it.
    let _ = machine.write(format!("{block}/comp_algorithm"), "lz4");
    let codec = machine.read(format!("{block}/comp_algorithm"))?;
    let codec = codec
        .split(' ')
        .find_map(|w| w.strip_prefix('[')?.strip_suffix(']'))
        .unwrap_or(&codec)
        .to_owned();
    machine.write(format!("{block}/disksize"), &bytes.to_string())?;
    swap_on(restorer, PathBuf::from(format!("/dev/zram{id}")))?;
    Ok((Some(codec), PeerPool::Zram(id)))
}

/// Switches zswap on and returns the codec it uses.
fn zswap(restorer: &Restorer, percent: u32) -> Result<String, String> {
    let compressor = format!("{ZSWAP}/compressor");
    // A kernel without lz4 for zswap refuses it, or falls back when zswap is switched on: what it
    // says then counts.
    let old = restorer.machine().read(&compressor)?;
    let _ = restorer.change(Undo::Write { path: compressor.clone().into(), value: old }, |m| {
        m.write(&compressor, "lz4")
    });
    restorer.set(&format!("{ZSWAP}/max_pool_percent"), &percent.to_string())?;
    restorer.set(&format!("{ZSWAP}/enabled"), "Y")?;
    restorer.machine().read(&compressor)
}

fn swap_file(restorer: &Restorer, bytes: u64, dir: &std::path::Path) -> Result<(), String> {
    let path = dir.join(format!("swaptide-bench-{}.swap", std::process::id()));
    let failed = |e: rustix::io::Errno| {
        format!("making a swap file of {bytes} bytes at {}: {e}", path.display())
    };
    restorer.change(Undo::RemoveFile(path.clone()), |m| {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file =
            rustix::fs::open(m.path(&path), flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes).map_err(failed)
    })?;
    swap_on(restorer, path.clone())
        .map_err(|e| format!("{e}; name a directory that can hold a swap file: --swap-dir DIR"))
}

fn swap_on(restorer: &Restorer, device: PathBuf) -> Result<(), String> {
    restorer.machine().tool("mkswap", &[device.as_os_str()])?;
    restorer.change(Undo::SwapOff(device.clone()), |m| {
        m.tool("swapon", &["-p".as_ref(), PRIORITY.as_ref(), device.as_os_str()])
    })
}

/// True if zswap was ever used in this boot, in which case the kernel swaps nothing in as 64K any
/// more.
pub(crate) fn zswap_was_on(machine: &Machine) -> bool {
    let used = |line: &str| line.strip_prefix("zswpout ").is_some_and(|n| n.trim() != "0");
    machine.read("/proc/vmstat").unwrap_or_default().lines().any(used)
        || machine.read(format!("{ZSWAP}/enabled")).is_ok_and(|v| v == "Y")
}

/// The numbers of a zram device's `mm_stat` that matter here.
#[derive(Debug, PartialEq, Eq)]
pub struct MmStat {
    /// Bytes stored, before compression.
    pub original: u64,
    /// Bytes after compression.
    pub compressed: u64,
    /// Bytes of RAM the device takes.
    pub used: u64,
    /// The most that it has taken.
    pub most_used: u64,
}

impl MmStat {
    /// Reads the first three columns and the fifth; later kernels append more.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split_whitespace().map(|n| n.parse().ok());
        let mut next = || numbers.next().flatten();
        let (original, compressed, used) = (next()?, next()?, next()?);
        let (_limit, most_used) = (next()?, next()?);
        Some(MmStat { original, compressed, used, most_used })
    }
}

/// What zswap holds, from the text of /proc/meminfo.
fn zswap_held(meminfo: &str) -> PoolUsage {
    let of = |name: &str| {
        let kib = |line: &str| {
            line.strip_prefix(name)?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
        };
        meminfo.lines().find_map(kib).unwrap_or(0) * 1024
    };
    PoolUsage { ram: of("Zswap:"), pages: of("Zswapped:"), ..PoolUsage::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mm_stat_is_read_by_column_and_junk_is_refused() {
        let text = "  808730624 212493564 216604672        0 216604672      512        0        0  \
                  0";
        assert_eq!(
            MmStat::parse(text),
            Some(MmStat {
                original: 808730624,
                compressed: 212493564,
                used: 216604672,
                most_used: 216604672
            })
        );
        let least = MmStat { original: 1, compressed: 2, used: 3, most_used: 5 };
        assert_eq!(MmStat::parse("1 2 3 4 5"), Some(least));
        for bad in ["", "1 2", "1 two 3 4 5", "-1 2 3 4 5", "1 2 3 4"] {
            assert_eq!(MmStat::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn zswaps_pool_and_pages_are_their_own_lines_of_meminfo() {
        let text = "MemTotal:       24681936 kB\nZswap:            251904 kB\nZswapped:         \
            790528 kB\n";
        assert_eq!(
            zswap_held(text),
            PoolUsage { ram: 251904 * 1024, pages: 790528 * 1024, ..PoolUsage::default() }
        );
        assert_eq!(zswap_held("MemTotal: 1 kB\n"), PoolUsage::default());
        assert_eq!(
            zswap_held("Zswapped: 7 kB\n"),
            PoolUsage { ram: 0, pages: 7 << 10, ..PoolUsage::default() }
        );
    }
}
