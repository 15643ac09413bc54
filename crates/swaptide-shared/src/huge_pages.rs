//! Whether the kernel gives memory files huge pages that were not asked for.
//!
//! A part of a huge page cannot go out. Where the kernel fails to split one, it clears the part
//! instead of punching it, and another process could read the zeros before they are overwritten. So
//! where the kernel makes huge pages by itself nothing of a region goes out.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The directory of the kernel's settings.
const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";
/// The time for which a value once read is used before it is read again.
const SETTINGS_TIMEOUT: Duration = Duration::from_millis(100);

/// The settings, and when they were read last.
pub(crate) struct HugePages {
    settings: PathBuf,
    read: Option<Instant>,
}

impl HugePages {
    /// Of this machine.
    pub fn new() -> HugePages {
        HugePages { settings: SETTINGS.into(), read: None }
    }

    /// True when the kernel gives memory files huge pages without advice, by the setting for all
    /// sizes or by that of one (Linux 6.11). It is read again after [`SETTINGS_TIMEOUT`].
    pub(crate) fn come_unasked(&mut self) -> bool {
        if self.read.is_some_and(|read| read.elapsed() < SETTINGS_TIMEOUT) {
            return false;
        }
        let unasked = is_unasked(&self.settings.join("shmem_enabled"))
            || std::fs::read_dir(&self.settings).is_ok_and(|sizes| {
                sizes.flatten().any(|size| is_unasked(&size.path().join("shmem_enabled")))
            });
        self.read = (!unasked).then(Instant::now);
        unasked
    }
}

/// `deny`, `never`, `advise` and `inherit` (as the setting for all sizes) do no harm, nor does a
/// kernel without huge pages.
fn is_unasked(setting: &Path) -> bool {
    let text = std::fs::read_to_string(setting).unwrap_or_default();
    ["[always]", "[within_size]", "[force]"].iter().any(|word| text.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_of_any_size_counts() {
        let settings = std::env::temp_dir().join(format!("swaptide-thp-{}", std::process::id()));
        let size = settings.join("hugepages-64kB");
        std::fs::create_dir_all(&size).expect("a directory");
        let come = |all: &str, one: &str| {
            std::fs::write(settings.join("shmem_enabled"), all).expect("written");
            std::fs::write(size.join("shmem_enabled"), one).expect("written");
            HugePages { settings: settings.clone(), read: None }.come_unasked()
        };
        let (never, inherit) = (
            "always within_size advise [never] deny force\n",
            "always [inherit] within_size advise never\n",
        );
        assert!(!come(never, inherit));
        assert!(!come("always within_size [advise] never deny force\n", inherit));
        assert!(come("[always] within_size advise never deny force\n", inherit));
        assert!(come("always [within_size] advise never deny force\n", inherit));
        assert!(come("always within_size advise never deny [force]\n", inherit));
        assert!(come(never, "[always] inherit within_size advise never\n"));
        std::fs::remove_dir_all(&settings).expect("removed");
        let mut none = HugePages { settings, read: None };
        assert!(!none.come_unasked() && none.read.is_some());
    }
}
