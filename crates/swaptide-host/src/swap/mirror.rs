//! Where a network area keeps a second copy of what it has.
//!
//! `,mirror=PATH[:SIZE]` names a directory or a file that is made, as `file:` does; `,mirror=TIER`
//! is short for the directory of the swap file of the highest priority in that tier, the first of
//! equal ones. The mirror is a file of its own, without a name and sparse: what the network area
//! holds takes as much room there again. Its size bounds the area, so that there is always room for
//! both copies, or for none.
//!
//! Locks: none.

use std::path::{Path, PathBuf};

use swaptide_core::{Priority, Tiers};

pub use crate::swap::mirror_option::Mirror;
use crate::swap::spec::{DEFAULT_PRIORITY, Device, DeviceError, DeviceKind};

/// The directory of a swap file at a path, whether it exists or not.
fn directory(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.to_owned()
    } else {
        path.parent().map_or_else(|| "/".into(), Path::to_owned)
    }
}

/// Replaces a mirror that is given as a tier by a directory of that tier; `files` are the swap
/// files, with their priorities.
///
/// # Errors
/// [`DeviceError::Mirror`].
pub(crate) fn resolve(
    device: &mut Device,
    tiers: &Tiers,
    files: &[(i32, PathBuf)],
) -> Result<(), DeviceError> {
    let Some(Mirror::Tier(name)) = &device.mirror else { return Ok(()) };
    let fail = |why: String| DeviceError::Mirror(device.name(), why);
    let tier = tiers.find(name).ok_or_else(|| {
        fail(format!("there is no tier {name:?}; write a path with a slash, as ./{name}"))
    })?;
    let inside = files.iter().filter(|(number, _)| {
        Priority::new(*number).and_then(|own| tiers.tier_of(own)) == Some(tier)
    });
    // The first of equal ones: `max_by_key` gives the last.
    let (_, path) = inside.rev().max_by_key(|(number, _)| *number).ok_or_else(|| {
        fail(format!("tier {name:?} has no swap file, so no directory for a mirror; name one"))
    })?;
    device.mirror = Some(Mirror::Place { path: directory(path), bytes: None });
    Ok(())
}

/// The swap files among devices, with their priorities.
pub(crate) fn files(devices: &[Device]) -> impl Iterator<Item = (i32, PathBuf)> {
    devices.iter().filter_map(|device| match &device.kind {
        DeviceKind::File { path, .. } => {
            Some((device.priority.unwrap_or(DEFAULT_PRIORITY), path.clone()))
        }
        _ => None,
    })
}

/// The same for all devices of a list, among themselves.
///
/// # Errors
/// [`DeviceError::Mirror`].
pub(crate) fn resolve_all(devices: &mut [Device], tiers: &Tiers) -> Result<(), DeviceError> {
    let files: Vec<_> = files(devices).collect();
    devices.iter_mut().try_for_each(|device| resolve(device, tiers, &files))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swap::spec;
    use crate::testing::Scratch;

    fn devices(texts: &[&str]) -> Vec<Device> {
        texts.iter().map(|text| spec::parse(text).expect(text)).collect()
    }

    #[test]
    fn mirrors_are_read_as_documented() {
        let of = |text: &str| spec::parse(text).map(|device| (device.priority, device.mirror));
        let place = |path: &str, bytes| Some(Mirror::Place { path: path.into(), bytes });
        assert_eq!(of("nbd://h/x,mirror=/ssd").expect("place"), (None, place("/ssd", None)));
        assert_eq!(
            of("nbd://h/x,mirror=./s:64M,prio=3").expect("size"),
            (Some(3), place("./s", Some(64 << 20)))
        );
        assert_eq!(
            of("nbd://h/x,prio=3,mirror=/a:b/c").expect("colon"),
            (Some(3), place("/a:b/c", None))
        );
        assert_eq!(
            of("nbd://h/x,mirror=SSD").expect("tier"),
            (None, Some(Mirror::Tier("SSD".into())))
        );
        for (text, part) in [
            ("nbd://h/x,mirror=", "expected a directory"),
            ("nbd://h/x,mirror=/a:1M", "too small"),
            ("nbd://h/x,mirror=/a:1Q", "not a size"),
            ("file:/tmp,mirror=/a", "only NBD exports"),
            ("zram:1G,mirror=/a", "only NBD exports"),
        ] {
            let error = of(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn tier_names_its_highest_priority_directory() {
        let scratch = Scratch::new("mirror-tier");
        let there = scratch.root().display().to_string();
        let mut tiers = Tiers::new();
        tiers.apply("+SSD:100 +HDD:10 +NET:-1", &[]).expect("tiers");
        let (low, high) = (format!("file:{there}/a,prio=110"), format!("file:{there},prio=120"));
        let equal = "file:/tmp,prio=120";
        let mut all = devices(&[&low, &high, equal, "nbd://h/x,mirror=SSD,prio=5"]);
        resolve_all(&mut all, &tiers).expect("settled");
        assert_eq!(
            all[3].mirror,
            Some(Mirror::Place { path: scratch.root().to_owned(), bytes: None })
        );
        for (name, part) in [("NET", "no swap file"), ("ssd", "no tier")] {
            let mut all = devices(&["file:/tmp,prio=20", &format!("nbd://h/x,mirror={name}")]);
            let error = resolve_all(&mut all, &tiers).expect_err(name).to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
