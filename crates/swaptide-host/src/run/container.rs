//! What a container engine has to be told so that runs work in its containers.
//!
//! Owns nothing. Locks: none.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use serde::Serialize;
use swaptide_sys::Errno;
use swaptide_sys::uffd::OpenError;

const DEVICE: &str = "/dev/userfaultfd";
/// Files by which Docker and podman mark a container's root.
const MARKS: [&str; 2] = ["/.dockerenv", "/run/.containerenv"];
/// Variables by which Kubernetes, podman and systemd tell a process that it is in a container.
const VARIABLES: [&str; 2] = ["KUBERNETES_SERVICE_HOST", "container"];

/// What is to be said to one container engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EngineLine {
    /// The engine, or the kind of file.
    pub engine: &'static str,
    /// The words, or the lines of the file.
    pub line: String,
}

/// What keeps this process from a userfaultfd in a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// The device is not there, or may not be used.
    Device,
    /// It is there, and this user may not open it; its group may, if there is one here.
    Access(Option<u32>),
    /// The same in a container of an ordinary user's, where its group has no number: this user's
    /// number on the host.
    RootlessAccess(u32),
}

/// The number that a user of this user namespace has outside, by the lines of
/// `/proc/self/uid_map`; `None` in the first namespace.
fn uid_outside(uid: u32, map: &str) -> Option<u32> {
    map.lines().find_map(|line| {
        let numbers: Vec<u32> =
            line.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let &[inside, outside, count] = numbers.as_slice() else { return None };
        let step = uid.checked_sub(inside).filter(|step| *step < count)?;
        outside.checked_add(step).filter(|_| (inside, outside, count) != (0, 0, u32::MAX))
    })
}

/// True for the number that stands for groups that a user namespace does not have.
fn is_no_group(gid: u32) -> bool {
    let text = std::fs::read_to_string("/proc/sys/kernel/overflowgid").unwrap_or_default();
    text.trim().parse() == Ok(gid)
}

/// True if this process is in a container, as far as that can be told.
pub(super) fn is_container() -> bool {
    MARKS.iter().any(|mark| Path::new(mark).exists())
        || VARIABLES.iter().any(|name| std::env::var_os(name).is_some())
}

impl Lack {
    /// `None` where it is something else that a container engine decides.
    pub(super) fn of(error: &OpenError) -> Option<Lack> {
        match error {
            OpenError::Denied { device: Some(Errno::ACCESS), .. } => {
                let may_group = |mode: u32| mode & 0o060 == 0o060;
                let node = std::fs::metadata(DEVICE).ok();
                let is_foreign = node.as_ref().is_some_and(|node| is_no_group(node.gid()));
                let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
                let outside = uid_outside(rustix::process::geteuid().as_raw(), &map);
                if let (true, Some(uid)) = (is_foreign, outside) {
                    return Some(Lack::RootlessAccess(uid));
                }
                let group = node.filter(|node| may_group(node.permissions().mode()));
                Some(Lack::Access(group.map(|node| node.gid())))
            }
            OpenError::Denied { device: Some(_), .. } => Some(Lack::Device),
            _ => None,
        }
    }

    /// What repairs it, in a few words.
    pub(super) fn fix(self) -> String {
        match self {
            Lack::Device => format!("start the container with --device {DEVICE}"),
            Lack::Access(Some(group)) => format!("start the container with --group-add {group}"),
            Lack::Access(None) => format!(
                "on the host: sudo groupadd -f swaptide; sudo chgrp swaptide {DEVICE}; sudo chmod \
                660 {DEVICE}; then start the container with --group-add and that group's number"
            ),
            Lack::RootlessAccess(uid) => {
                format!("on the host: sudo setfacl -m u:{uid}:rw {DEVICE}")
            }
        }
    }

    /// The same for each engine.
    pub(super) fn lines(self) -> Vec<EngineLine> {
        let (words, compose, pod) = match self {
            Lack::Device => (
                format!("--device {DEVICE}"),
                format!("devices: [\"{DEVICE}\"]"),
                "resources: {limits: {squat.ai/userfaultfd: 1}}".to_owned(),
            ),
            Lack::Access(group) => {
                let group = group.map_or("GID".to_owned(), |group| group.to_string());
                (
                    format!("--group-add {group}"),
                    format!("group_add: [\"{group}\"]"),
                    format!("securityContext: {{supplementalGroups: [{group}]}}"),
                )
            }
            // With runc nothing that the engine is told gives it; crun can keep the host's groups.
            Lack::RootlessAccess(_) => {
                let line = "podman --runtime crun run --group-add keep-groups ..., if its user is \
                            in the device's group";
                return vec![EngineLine { engine: "podman", line: line.to_owned() }];
            }
        };
        let of = |engine, line| EngineLine { engine, line };
        vec![
            of("docker", format!("docker run {words} ...")),
            of("podman", format!("podman run {words} ...")),
            of("compose", compose),
            of("kubernetes", format!("{pod} (docs/containers.md)")),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_denied_decides_what_is_to_be_said() {
        let denied = |device| OpenError::Denied { syscall: Errno::PERM, device };
        for errno in [Errno::NOENT, Errno::PERM, Errno::NXIO] {
            assert_eq!(Lack::of(&denied(Some(errno))), Some(Lack::Device));
        }
        assert!(matches!(Lack::of(&denied(Some(Errno::ACCESS))), Some(Lack::Access(_))));
        assert_eq!(Lack::of(&denied(None)), None);
    }

    #[test]
    fn each_engine_gets_one_line() {
        for lack in [Lack::Device, Lack::Access(None), Lack::Access(Some(107))] {
            let lines = lack.lines();
            assert_eq!(lines.len(), 4);
            assert!(lines.iter().all(|line| !line.line.contains('\n')), "{lines:?}");
            assert!(!lack.fix().contains('\n'));
        }
        let lines = Lack::Access(Some(107)).lines();
        assert!(lines.iter().all(|line| line.line.contains("107")), "{lines:?}");
        let rootless = Lack::RootlessAccess(100_999);
        assert!(rootless.fix().contains("u:100999:rw") && rootless.lines().len() == 1);
    }

    #[test]
    fn users_of_a_namespace_have_numbers_outside() {
        let map = "         0       1001          1\n         1     100000      65536\n";
        assert_eq!(uid_outside(0, map), Some(1001));
        assert_eq!(uid_outside(1000, map), Some(100_999));
        assert_eq!(uid_outside(65_536, map), Some(165_535));
        assert_eq!(uid_outside(65_537, map), None);
        assert_eq!(uid_outside(7, "         0          0 4294967295\n"), None);
        assert_eq!(uid_outside(7, "0 x 5\n\n0 4294967290 4294967295\n"), None);
    }
}
