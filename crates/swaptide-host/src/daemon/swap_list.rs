//! The file's list of swap areas, followed while the daemon runs.
//!
//! What the list says counts by its changes: what is new in it is added, what is no longer in it is
//! taken away, and what `ctl swapon` added stays. A device whose size or priority is another one
//! cannot be followed: it is to be taken off the list first.
//!
//! Locks: none.

use swaptide_core::Tiers;
use swaptide_ipc::{MAX_AREAS, Segment};

use crate::daemon::error::{DaemonError, log_line};
use crate::swap::areas::{AreaError, Areas};
use crate::swap::circular;
use crate::swap::mirror;
use crate::swap::spec::{self, BackingDevice, Device, DeviceError, DeviceKind};

/// The changes that lead to another list.
#[derive(Debug, Default)]
pub(super) struct Changes {
    add: Vec<Device>,
    /// Names of the devices to take away.
    remove: Vec<String>,
}

/// What is in one list and not in another, each as often as it is more.
fn missing_from<'a>(list: &'a [String], other: &[String]) -> Vec<&'a String> {
    let mut left: Vec<&String> = other.iter().collect();
    let known = |text: &&String| match left.iter().position(|old| old == text) {
        Some(at) => {
            left.swap_remove(at);
            false
        }
        None => true,
    };
    list.iter().filter(known).collect()
}

/// Compares two lists, both checked before.
///
/// # Errors
/// [`DeviceError::Unchangeable`].
pub(super) fn compare(before: &[String], after: &[String]) -> Result<Changes, DeviceError> {
    let parse = |texts: Vec<&String>| {
        texts.into_iter().map(|text| spec::parse(text)).collect::<Result<Vec<_>, _>>()
    };
    let (add, gone) = (parse(missing_from(after, before))?, parse(missing_from(before, after))?);
    let remove: Vec<String> = gone.iter().map(Device::name).collect();
    let is_memory = |device: &Device| matches!(device.kind, DeviceKind::Zram { .. });
    let wrong = add
        .iter()
        .find(|device| is_memory(device) || remove.contains(&device.name()))
        .or(gone.iter().find(|d| is_memory(d)));
    match wrong {
        Some(device) => Err(DeviceError::Unchangeable(device.name())),
        None => Ok(Changes { add, remove }),
    }
}

impl Changes {
    /// Opens what is new, unless a process that is kept serves it: `members` selects those among
    /// all.
    ///
    /// # Errors
    /// Why it cannot be had; nothing has changed then.
    pub(super) fn open(
        &mut self,
        tiers: &Tiers,
        areas: &Areas,
        segment: &Segment,
        budget: u64,
        members: impl Fn(Vec<u32>) -> Vec<u32>,
    ) -> Result<Vec<BackingDevice>, DaemonError> {
        // Before anything is asked of a server: it may be one that waits for this process.
        if let Some(why) = self.add.iter().find_map(|device| circular::refusal(device, &members)) {
            return Err(DaemonError::Circular(why));
        }
        let views = areas.view().into_iter().filter(|(_, view)| view.kind == "file");
        let mut files: Vec<_> = views.map(|(_, view)| (view.priority, view.place.into())).collect();
        files.extend(mirror::files(&self.add));
        for device in &mut self.add {
            mirror::resolve(device, tiers, &files).map_err(DaemonError::Device)?;
        }
        let numbers: usize =
            self.add.iter().map(|device| 1 + usize::from(device.mirror.is_some())).sum();
        if segment.areas().count() + numbers > MAX_AREAS {
            return Err(DaemonError::Area(AreaError::TooMany));
        }
        let opened = self
            .add
            .iter()
            .map(|device| spec::open_backing(device, budget))
            .collect::<Result<_, _>>();
        opened.map_err(DaemonError::Device)
    }

    /// Takes away what is not listed any more: what lies there moves first, which takes its time.
    pub(super) fn take_away(self, areas: &Areas) {
        for name in self.remove {
            if let Err(error) = areas.remove(&name, |_| ()) {
                log_line(&format!("the configuration no longer lists it, but {error}"));
            }
        }
    }

    /// True if anything is to be taken away.
    pub(super) fn removes(&self) -> bool {
        !self.remove.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn changed_list_adds_and_removes_areas() {
        let before = list(&["zram:1G", "file:/a:64M,prio=3", "nbd://h/x", "nbd://h/x"]);
        let after = list(&["nbd://h/x", "zram:1G", "/dev/sdz", "file:/b"]);
        let changes = compare(&before, &after).expect("changes");
        assert_eq!(
            changes.add.iter().map(Device::name).collect::<Vec<_>>(),
            ["/dev/sdz", "file:/b"]
        );
        assert_eq!(changes.remove, ["file:/a", "nbd://h:10809/x"]);
        let none = compare(&before, &before).expect("none");
        assert!(none.add.is_empty() && !none.removes());
    }

    #[test]
    fn kept_area_cannot_change_settings() {
        let before = list(&["zram:1G", "file:/a:64M,prio=3"]);
        for (after, name) in [
            (list(&["zram:1G", "file:/a:64M,prio=4"]), "file:/a"),
            (list(&["zram:1G", "file:/a:32M,prio=3"]), "file:/a"),
            (list(&["zram:2G", "file:/a:64M,prio=3"]), "zram"),
            (list(&["file:/a:64M,prio=3"]), "zram"),
        ] {
            let error = compare(&before, &after).expect_err(name).to_string();
            assert!(
                error.starts_with(name) && error.contains("remove it from the list"),
                "{error}"
            );
        }
    }
}
