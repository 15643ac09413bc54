//! Names of groups, and which group a cgroup means.

use std::fmt;

/// Longest path in bytes.
const MAX_PATH_BYTES: usize = 255;

/// The path of a group: `/` for the root, `/web/front` below it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupPath(String);

/// Why a text is no path of a group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not the path of a group; write /NAME or /NAME/NAME, without blanks, . or .. as a \
    name, and at most {max} bytes",
    max = MAX_PATH_BYTES
)]
pub struct PathError(String);

impl GroupPath {
    /// The group that all others are below.
    pub fn root() -> GroupPath {
        GroupPath("/".to_owned())
    }

    /// Reads a path.
    ///
    /// # Errors
    /// [`PathError`].
    pub fn parse(text: &str) -> Result<GroupPath, PathError> {
        let error = || PathError(text.to_owned());
        let names = text.strip_prefix('/').ok_or_else(error)?;
        let sound = |name: &str| {
            !matches!(name, "" | "." | "..")
                && !name.contains(|c: char| c.is_whitespace() || c.is_control())
        };
        if text.len() <= MAX_PATH_BYTES && (names.is_empty() || names.split('/').all(sound)) {
            Ok(GroupPath(text.to_owned()))
        } else {
            Err(error())
        }
    }

    /// As `/NAME/NAME`; the root is `/`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path above; the root has none.
    pub fn parent(&self) -> Option<GroupPath> {
        match self.0.rfind('/')? {
            _ if self.0 == "/" => None,
            0 => Some(GroupPath::root()),
            at => Some(GroupPath(self.0[..at].to_owned())),
        }
    }

    /// Returns the number of its names.
    pub fn depth(&self) -> usize {
        if self.0 == "/" { 0 } else { self.0.matches('/').count() }
    }

    /// True if this is `path`, or a group above it.
    pub(crate) fn holds(&self, path: &str) -> bool {
        self.0 == "/"
            || path
                .strip_prefix(&self.0)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

impl fmt::Display for GroupPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The cgroup of a process that counts its memory, out of its `/proc/PID/cgroup`: that of the
/// version 1 memory controller where there is one, else that of version 2.
pub fn memory_cgroup(text: &str) -> Option<&str> {
    let lines = text.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        Some((fields.next()?, fields.next()?, fields.next()?))
    });
    let mut unified = None;
    for (hierarchy, controllers, path) in lines {
        if controllers.split(',').any(|controller| controller == "memory") {
            return Some(path);
        }
        if hierarchy == "0" && controllers.is_empty() {
            unified = Some(path);
        }
    }
    unified
}

/// [`memory_cgroup`] of a process.
pub(crate) fn cgroup_of(pid: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    memory_cgroup(&text).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_and_know_what_is_above_them() {
        let path = GroupPath::parse("/web/front").expect("path");
        assert_eq!((path.depth(), path.parent().map(|p| p.to_string())), (2, Some("/web".into())));
        assert_eq!(GroupPath::parse("/web").expect("path").parent(), Some(GroupPath::root()));
        assert_eq!(
            (GroupPath::parse("/").expect("root").parent(), GroupPath::root().depth()),
            (None, 0)
        );
        let long = format!("/{}", "x".repeat(255));
        for text in
            ["", "web", "//", "/web/", "/web//front", "/.", "/web/..", "/a b", "/a\nb", &long]
        {
            assert!(GroupPath::parse(text).is_err(), "{text}");
        }
        GroupPath::parse("/system.slice/run-u12\\x2d1.service").expect("what systemd writes");
    }

    #[test]
    fn a_group_contains_its_descendants_and_no_similar_names() {
        let web = GroupPath::parse("/web").expect("path");
        assert!(
            web.holds("/web")
                && web.holds("/web/front")
                && !web.holds("/webmail")
                && !web.holds("/")
        );
        assert!(GroupPath::root().holds("/") && GroupPath::root().holds("/web"));
    }

    #[test]
    fn the_memory_controller_decides_or_else_version_2() {
        assert_eq!(memory_cgroup("0::/user.slice/a\n"), Some("/user.slice/a"));
        let mixed = "12:cpu,cpuacct:/x\n4:memory:/docker/abc:1\n\
            1:name=systemd:/init.scope\n0::/init.scope\n";
        assert_eq!(memory_cgroup(mixed), Some("/docker/abc:1"));
        assert_eq!(memory_cgroup("1:name=systemd:/x\n"), None);
        assert_eq!(memory_cgroup(""), None);
        assert!(cgroup_of(std::process::id()).is_none_or(|path| path.starts_with('/')));
    }
}
