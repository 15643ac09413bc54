//! Whether a file lies on a rotational disk, as the kernel knows it.
//!
//! Owns nothing. Locks: none.

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{major, minor};

/// True if reads of this file or block device begin with a seek. False where that is unknown (a
/// file system of many disks, in memory or on a server).
pub(crate) fn is_rotational(file: &File) -> bool {
    let Ok(found) = file.metadata() else { return false };
    let disk = if found.file_type().is_block_device() { found.rdev() } else { found.dev() };
    says_so(Path::new("/sys/dev/block"), disk)
}

fn says_so(disks: &Path, disk: u64) -> bool {
    let disk = disks.join(format!("{}:{}", major(disk), minor(disk)));
    // A partition has no queue: its disk, one directory up, has.
    let says = ["queue/rotational", "../queue/rotational"]
        .iter()
        .find_map(|name| std::fs::read_to_string(disk.join(name)).ok());
    says.is_some_and(|says| says.trim() == "1")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::makedev;

    use super::*;
    use crate::testing::Scratch;

    /// As in /sys: links by number to disks, and to partitions within them.
    #[test]
    fn the_kernel_is_asked() {
        let scratch = Scratch::new("rotational");
        let root = scratch.root();
        for (disk, number, says) in [("turns", 8, "1\n"), ("solid", 9, "0\n")] {
            std::fs::create_dir_all(root.join(disk).join("queue")).expect("a disk");
            std::fs::create_dir(root.join(disk).join("part")).expect("a partition");
            std::fs::write(root.join(disk).join("queue/rotational"), says).expect("what it says");
            symlink(disk, root.join(format!("{number}:0"))).expect("a link");
            symlink(format!("{disk}/part"), root.join(format!("{number}:1"))).expect("a link");
        }
        let turns = |disk, partition| says_so(root, makedev(disk, partition));
        assert!(turns(8, 0) && turns(8, 1) && !turns(9, 0) && !turns(9, 1) && !turns(10, 0));
        let memory = rustix::fs::memfd_create("rotational", rustix::fs::MemfdFlags::CLOEXEC)
            .expect("a file in memory");
        assert!(!super::is_rotational(&File::from(memory)));
    }
}
