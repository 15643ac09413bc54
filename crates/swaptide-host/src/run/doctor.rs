//! Checks what a run needs of the kernel and the machine, and names the command that fixes each
//! failure.
//!
//! Owns the list of what a run needs of the kernel and the machine (`REQUIRED` among it).
//!
//! Locks: none.

use std::path::Path;

use serde::Serialize;
use swaptide_sys::uffd::{OpenError, Uffd};

use crate::control::{REQUIRED, WITHOUT_FORK, fork_tracer};
use crate::run::agent::find_agent;
use crate::run::container::{EngineLine, Lack, is_container};
use crate::swap::spec::{default_places, free_space};
use crate::units::human;

/// The way in which the processes of a run learn of forks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forks {
    /// The kernel tells of them.
    Told,
    /// The supervisor follows forking threads.
    Followed,
}

/// Not empty: forks are followed, though the kernel would tell of them. For tests.
const ENV_FOLLOWED: &str = "SWAPTIDE_TEST_FOLLOWED_FORKS";

/// Returns the way in which forks are learned of here.
///
/// # Errors
/// When no userfaultfd is to be had.
pub fn forks() -> Result<Forks, OpenError> {
    let told = Uffd::open(REQUIRED, true);
    match told {
        Ok(_) if std::env::var_os(ENV_FOLLOWED).is_some_and(|set| !set.is_empty()) => {
            Ok(Forks::Followed)
        }
        Ok(_) => Ok(Forks::Told),
        Err(OpenError::Refused { .. }) => Uffd::open(WITHOUT_FORK, true).map(|_| Forks::Followed),
        Err(error) => Err(error),
    }
}

/// Less free space than this for the swap file is not enough for a default run.
const MIN_SWAP_BYTES: u64 = 256 << 20;
const MIN_MAP_COUNT: u64 = 65_530;
const MIN_DESCRIPTORS: u64 = 256;

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The subject of the check.
    pub name: &'static str,
    /// True if a run works with it.
    pub ok: bool,
    /// The finding, in a few words.
    pub found: String,
    /// The command that fixes it; `None` where it is ok.
    pub fix: Option<String>,
    /// The name that `fix` had in 0.1; 0.2 writes both.
    mend: Option<String>,
}

impl Finding {
    fn new(name: &'static str, ok: bool, found: impl Into<String>, fix: &str) -> Finding {
        let fix = (!ok).then(|| fix.to_owned());
        Finding { name, ok, found: found.into(), mend: fix.clone(), fix }
    }
}

/// All findings as JSON.
#[derive(Debug, Serialize)]
pub struct Diagnosis {
    /// True if `swaptide run` will work.
    pub ok: bool,
    /// The checks, in the order in which they are shown.
    pub findings: Vec<Finding>,
    /// In a container that lacks something: what its engine has to be told.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub engines: Vec<EngineLine>,
}

/// Runs all checks; changes nothing on the machine.
pub fn examine() -> Diagnosis {
    let findings = vec![
        kernel(),
        userfaultfd(),
        fork(),
        seccomp(),
        number(
            "max_map_count",
            "/proc/sys/vm/max_map_count",
            MIN_MAP_COUNT,
            "sudo sysctl -w vm.max_map_count=262144",
        ),
        overcommit(),
        descriptors(),
        swap_space(),
        agent(),
    ];
    let engines = lack_in_container().map_or(Vec::new(), Lack::lines);
    Diagnosis { ok: findings.iter().all(|finding| finding.ok), findings, engines }
}

impl std::fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for finding in &self.findings {
            let Finding { name, ok, found, fix, .. } = finding;
            write!(f, "{}  {name}: {found}", if *ok { "ok" } else { "NO" })?;
            match fix {
                Some(command) => writeln!(f, " : {command}")?,
                None => writeln!(f)?,
            }
        }
        self.engines
            .iter()
            .try_for_each(|EngineLine { engine, line }| writeln!(f, "    {engine}: {line}"))
    }
}

fn kernel() -> Finding {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy().into_owned();
    let machine = name.machine().to_string_lossy();
    let right_machine = machine == std::env::consts::ARCH;
    let ok = version(&release).is_some_and(|version| version >= (6, 8)) && right_machine;
    Finding::new(
        "kernel",
        ok,
        format!("Linux {release} on {machine}, 6.8 or newer is needed"),
        "install a newer kernel and reboot",
    )
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// What this process lacks for a userfaultfd, if it is in a container.
fn lack_in_container() -> Option<Lack> {
    let refused = Uffd::open(WITHOUT_FORK, true).err()?;
    Lack::of(&refused).filter(|_| is_container())
}

/// The command that gives a user, or a container, access to userfaultfd.
fn permission() -> String {
    match lack_in_container() {
        Some(lack) => lack.fix(),
        None if seccomp_mode() == Some(2) => {
            "start the program with access to /dev/userfaultfd, or under a filter that allows \
            userfaultfd"
                .to_owned()
        }
        None => "sudo sysctl -w vm.unprivileged_userfaultfd=1".to_owned(),
    }
}

fn userfaultfd() -> Finding {
    match Uffd::open(WITHOUT_FORK, true) {
        Ok(_) => Finding::new("userfaultfd", true, "allowed, with MOVE and events", ""),
        Err(error @ OpenError::Unsupported { .. }) => Finding::new(
            "userfaultfd",
            false,
            error.to_string(),
            "install a newer kernel and reboot",
        ),
        Err(error) => Finding::new("userfaultfd", false, error.to_string(), &permission()),
    }
}

fn fork() -> Finding {
    let name = "fork";
    match forks() {
        Ok(Forks::Told) => Finding::new(
            name,
            true,
            "fork events are available: programs may fork while they are swapped",
            "",
        ),
        Ok(Forks::Followed) => match fork_tracer::is_permitted() {
            Ok(()) if !std::arch::is_x86_feature_detected!("xsave") => Finding::new(
                name,
                false,
                "without CAP_SYS_PTRACE a CPU with XSAVE is needed",
                "sudo -E swaptide run ...",
            ),
            Ok(()) => Finding::new(
                name,
                true,
                "no CAP_SYS_PTRACE: forks are followed with ptrace, --shared is refused",
                "",
            ),
            Err(errno) => Finding::new(
                name,
                false,
                format!(
                    "no CAP_SYS_PTRACE, and ptrace of own children is refused ({})",
                    swaptide_sys::ErrnoName(errno)
                ),
                "sudo sysctl -w kernel.yama.ptrace_scope=1 (or, in a container, start it with \
                --cap-add SYS_PTRACE)",
            ),
        },
        Err(_) => Finding::new(name, false, "nothing tells without a userfaultfd", &permission()),
    }
}

fn seccomp_mode() -> Option<u32> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix("Seccomp:"))?.trim().parse().ok()
}

/// A filter is no fault by itself: whether it lets userfaultfd pass is seen in the line above.
fn seccomp() -> Finding {
    let found = match seccomp_mode() {
        Some(0) | None => "no filter".to_owned(),
        Some(2) => "a filter is active; what it allows is in the lines above".to_owned(),
        Some(mode) => format!("mode {mode}"),
    };
    Finding::new(
        "seccomp",
        seccomp_mode() != Some(1),
        found,
        "start the shell without strict seccomp",
    )
}

fn number(name: &'static str, path: &str, least: u64, fix: &str) -> Finding {
    match std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok()) {
        Some(value) => {
            Finding::new(name, value >= least, format!("{value}, at least {least} is needed"), fix)
        }
        None => {
            Finding::new(name, true, format!("{path} cannot be read; assuming the default"), fix)
        }
    }
}

fn overcommit() -> Finding {
    let mode = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    let strict = mode.trim() == "2";
    let found = if strict { "never (2): reservations are refused" } else { "allowed" };
    Finding::new("overcommit", !strict, found, "sudo sysctl -w vm.overcommit_memory=0")
}

fn descriptors() -> Finding {
    let limit =
        rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let found = if limit == u64::MAX {
        "unlimited".to_owned()
    } else {
        format!("{limit}, at least {MIN_DESCRIPTORS} is needed")
    };
    Finding::new("open files", limit >= MIN_DESCRIPTORS, found, "ulimit -n 1024")
}

fn swap_space() -> Finding {
    let name = "swap file";
    let fix = "export TMPDIR=/a/directory/on/a/disk/with/space";
    let mut refused = String::from("no directory");
    for place in default_places() {
        match crate::swap::spec::open(
            &[crate::swap::spec::Device {
                kind: file_in(&place),
                priority: None,
                mirror: None,
                plain: false,
                rotational: None,
            }],
            1 << 30,
        ) {
            Ok(space) => {
                let free = free_space(&place).unwrap_or(0);
                let direct = space.devices.iter().all(|file| file.direct_io);
                let how = if direct {
                    "direct I/O"
                } else {
                    "through the page cache: the file system has no direct I/O"
                };
                return Finding::new(
                    name,
                    free >= MIN_SWAP_BYTES,
                    format!("{}: {} free, {how}", place.display(), human(free)),
                    fix,
                );
            }
            Err(error) => refused = error.to_string(),
        }
    }
    Finding::new(name, false, refused, fix)
}

fn file_in(place: &Path) -> crate::swap::spec::DeviceKind {
    crate::swap::spec::DeviceKind::File { path: place.to_owned(), bytes: None }
}

fn agent() -> Finding {
    match find_agent() {
        Ok(path) => Finding::new("library", true, path.display().to_string(), ""),
        Err(error) => {
            Finding::new("library", false, error.to_string(), "cargo build --release --workspace")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        for (release, expected) in [
            ("6.18.44-generic", Some((6, 18))),
            ("6.8.0", Some((6, 8))),
            ("5.15.0-1053", Some((5, 15))),
            ("6", None),
            ("", None),
        ] {
            assert_eq!(version(release), expected, "{release}");
        }
        assert!(version("6.18.0") > version("6.8.0"));
    }

    #[test]
    fn every_line_says_ok_or_what_fixes_it() {
        let diagnosis = examine();
        assert_eq!(diagnosis.ok, diagnosis.findings.iter().all(|finding| finding.ok));
        for finding in &diagnosis.findings {
            assert_eq!(finding.fix.is_none(), finding.ok, "{finding:?}");
        }
        let text = diagnosis.to_string();
        assert_eq!(text.lines().count(), diagnosis.findings.len() + diagnosis.engines.len());
        assert!(
            text.lines().take(diagnosis.findings.len()).all(|line| line.starts_with("ok  ")
                || (line.starts_with("NO  ") && line.contains(" : "))),
            "{text}"
        );
    }

    #[test]
    fn a_missing_permission_names_one_command() {
        let finding = Finding::new("userfaultfd", false, "refused", &permission());
        assert!(!finding.fix.expect("a command").contains('\n'));
    }
}
