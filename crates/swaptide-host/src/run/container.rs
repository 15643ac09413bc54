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
    }
}
