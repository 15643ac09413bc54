//! The program to run: found as the shell would find it, and checked for everything that would keep
//! the agent out of it.
//!
//! Owns the rules of what cannot work: a program for another machine, or one that the kernel runs
//! in secure mode, would run outside of the budget without a word. Where no loader preloads the
//! agent, the supervisor puts it in (`inject`).
//!
//! Locks: none.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use swaptide_sys::AsFd;
use swaptide_sys::elf::{ProgramKind, kind_of};
use thiserror::Error;

/// A program that can be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Path of the file that is executed.
    pub path: PathBuf,
    /// Its name as it was typed, which becomes its `argv[0]`.
    pub name: OsString,
    /// How the agent gets into it.
    pub kind: ProgramKind,
}

/// Why a program cannot be run under a budget.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TargetError {
    /// No such file, or nowhere in `PATH`.
    #[error("{}: {}", .0.display(), missing(.0))]
    Missing(PathBuf),
    /// A directory or something else that is no file.
    #[error("{}: not a program but a directory or a device; name a program", .0.display())]
    NotAFile(PathBuf),
    /// Without the right to execute it.
    #[error("{}: not executable; chmod +x it, or name its interpreter", .0.display())]
    NotExecutable(PathBuf),
    /// It cannot be read.
    #[error("{path}: cannot be read: {1}; check its permissions", path = .0.display())]
    Read(PathBuf, io::Error),
    /// A program that loads no library.
    #[error(
        "{path}: {1}, so no library can be loaded into it; leave --inject=never out to have the \
        agent put into it, or use a dynamically linked glibc build",
        path = .0.display()
    )]
    LoadsNothing(PathBuf, &'static str),
    /// A set-user-id or set-group-id file, or one with capabilities.
    #[error(
        "{path}: {1}, so the loader ignores preloaded libraries; run it without that \
        privilege",
        path = .0.display()
    )]
    Secure(PathBuf, &'static str),
    /// An ELF file for something else.
    #[error(
        "{path}: built for {1}; this swaptide needs a program for 64-bit {arch}",
        path = .0.display(),
        arch = std::env::consts::ARCH
    )]
    Machine(PathBuf, String),
    /// An ELF file that ends too early or contradicts itself.
    #[error("{}: damaged: its ELF headers end too early; install it again", .0.display())]
    Damaged(PathBuf),
    /// A script whose interpreter is the trouble.
    #[error("{path}: a script whose interpreter cannot work: {1}", path = .0.display())]
    Interpreter(PathBuf, Box<TargetError>),
}

/// Finds `name` as a shell would (`search` is the value of `PATH`) and checks it.
///
/// # Errors
/// See [`TargetError`].
pub fn find(name: &OsStr, search: Option<&OsStr>) -> Result<Target, TargetError> {
    let path = locate(name, search)?;
    let kind = check(&path, 0)?;
    Ok(Target { path, name: name.to_owned(), kind })
}

impl Target {
    /// Checks that its loader preloads the agent.
    ///
    /// # Errors
    /// [`TargetError::LoadsNothing`].
    pub(crate) fn check_loads(&self) -> Result<(), TargetError> {
        let what = match self.kind {
            ProgramKind::Static => "statically linked",
            ProgramKind::Musl => "a program of musl's",
            ProgramKind::Loads | ProgramKind::Library => return Ok(()),
        };
        Err(TargetError::LoadsNothing(self.path.clone(), what))
    }
}

fn locate(name: &OsStr, search: Option<&OsStr>) -> Result<PathBuf, TargetError> {
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return if path.exists() { Ok(path) } else { Err(TargetError::Missing(path)) };
    }
    let mut found = None;
    for directory in
        std::env::split_paths(search.unwrap_or(OsStr::new("/usr/local/bin:/usr/bin:/bin")))
    {
        // An empty entry of PATH means the current directory.
        let path = if directory.as_os_str().is_empty() {
            Path::new(".").join(name)
        } else {
            directory.join(name)
        };
        if !name.is_empty() && path.is_file() {
            if executable(&path) {
                return Ok(path);
            }
            found.get_or_insert(path);
        }
    }
    Err(match found {
        Some(path) => TargetError::NotExecutable(path),
        None => TargetError::Missing(PathBuf::from(name)),
    })
}

fn executable(path: &Path) -> bool {
    rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

fn check(path: &Path, depth: u32) -> Result<ProgramKind, TargetError> {
    let owned = || path.to_owned();
    let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => TargetError::Missing(owned()),
        _ => TargetError::Read(owned(), error),
    })?;
    if !metadata.is_file() {
        return Err(TargetError::NotAFile(owned()));
    }
    if !executable(path) {
        return Err(TargetError::NotExecutable(owned()));
    }
    let file = match File::open(path) {
        Ok(file) => file,
        // A program may be executable and not readable: the kernel alone can tell what it is.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Ok(ProgramKind::Loads);
        }
        Err(error) => return Err(TargetError::Read(owned(), error)),
    };
    let mut head = [0u8; 256];
    let length =
        read_some(&file, &mut head, 0).map_err(|error| TargetError::Read(owned(), error))?;
    let head = &head[..length];
    if head.starts_with(b"\x7fELF") {
        return check_elf(path, &file, head, &metadata);
    }
    // What is neither ELF nor names an interpreter is given to sh, as execvp(3) does.
    let interpreter = match head.strip_prefix(b"#!") {
        Some(rest) => script_interpreter(rest).ok_or_else(|| TargetError::Damaged(owned()))?,
        None => PathBuf::from("/bin/sh"),
    };
    if depth >= 4 {
        return Err(TargetError::Damaged(owned()));
    }
    check(&interpreter, depth + 1)
        .map_err(|error| TargetError::Interpreter(owned(), Box::new(error)))
}

fn script_interpreter(rest: &[u8]) -> Option<PathBuf> {
    let line = rest.split(|b| *b == b'\n').next()?;
    let word = line.split(|b| b" \t\r".contains(b)).find(|word| !word.is_empty())?;
    Some(PathBuf::from(OsStr::from_bytes(word)))
}

const EM_386: u16 = 3;
const EM_ARM: u16 = 40;
const EM_X86_64: u16 = 62;
const EM_AARCH64: u16 = 183;
#[cfg(target_arch = "x86_64")]
const EM_NATIVE: u16 = EM_X86_64;
#[cfg(target_arch = "aarch64")]
const EM_NATIVE: u16 = EM_AARCH64;

fn check_elf(
    path: &Path,
    file: &File,
    head: &[u8],
    metadata: &std::fs::Metadata,
) -> Result<ProgramKind, TargetError> {
    let damaged = || TargetError::Damaged(path.to_owned());
    let (Some(class), Some(order), Some(machine)) = (head.get(4), head.get(5), u16_at(head, 18))
    else {
        return Err(damaged());
    };
    if *class != 2 || *order != 1 || machine != EM_NATIVE {
        let machine = match machine {
            EM_X86_64 => "x86_64".to_owned(),
            EM_AARCH64 => "aarch64".to_owned(),
            EM_386 => "x86".to_owned(),
            EM_ARM => "arm".to_owned(),
            other => format!("machine number {other}"),
        };
        let bits = if *class == 2 { "64" } else { "32" };
        let order = if *order == 1 { "" } else { " big-endian" };
        return Err(TargetError::Machine(path.to_owned(), format!("{bits}-bit{order} {machine}")));
    }
    let mode = metadata.permissions().mode();
    if mode & 0o4000 != 0 {
        return Err(TargetError::Secure(path.to_owned(), "set-user-id"));
    }
    if mode & 0o2010 == 0o2010 {
        return Err(TargetError::Secure(path.to_owned(), "set-group-id"));
    }
    if !rustix::process::geteuid().is_root() && metadata.size() > 0 && has_capabilities(path) {
        return Err(TargetError::Secure(path.to_owned(), "has file capabilities"));
    }
    kind_of(file.as_fd()).ok_or_else(damaged)
}

fn read_some(file: &File, buffer: &mut [u8], mut at: u64) -> io::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match file.read_at(&mut buffer[length..], at) {
            Ok(0) => break,
            Ok(n) => {
                length += n;
                at += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn has_capabilities(path: &Path) -> bool {
    let mut value = [0u8; 64];
    rustix::fs::getxattr(path, "security.capability", &mut value).is_ok_and(|length| length > 0)
}

fn missing(path: &Path) -> &'static str {
    if path.components().count() > 1 {
        "no such file; check the name"
    } else {
        "not found in PATH; give a path"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    fn find_path(path: &Path) -> Result<Target, TargetError> {
        find(path.as_os_str(), None)
    }

    fn message(path: &Path) -> String {
        find_path(path).expect_err("refused").to_string()
    }

    /// The shell's own file, changed at one place.
    fn altered_shell(scratch: &Scratch, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> PathBuf {
        let mut bytes = std::fs::read("/bin/sh").expect("sh");
        change(&mut bytes);
        scratch.program(name, &bytes)
    }

    #[test]
    fn a_program_is_found_as_the_shell_finds_it() {
        let found = find(OsStr::new("sh"), Some(OsStr::new("/nowhere:/bin"))).expect("sh");
        let (path, name) = (PathBuf::from("/bin/sh"), OsString::from("sh"));
        assert_eq!(found, Target { path, name, kind: ProgramKind::Loads });
        assert!(found.check_loads().is_ok());
        assert_eq!(find(OsStr::new("/bin/sh"), None).expect("sh").path, Path::new("/bin/sh"));
        assert!(matches!(
            find(OsStr::new("no-such-program"), Some(OsStr::new("/bin"))),
            Err(TargetError::Missing(_))
        ));
        assert!(matches!(
            find(OsStr::new(""), Some(OsStr::new("/bin"))),
            Err(TargetError::Missing(_))
        ));
        assert!(matches!(
            find(OsStr::new("/bin/no-such-program"), None),
            Err(TargetError::Missing(_))
        ));
        assert!(matches!(find(OsStr::new("/bin/"), None), Err(TargetError::NotAFile(_))));
    }

    #[test]
    fn non_executable_and_missing_programs_are_distinguished() {
        let scratch = Scratch::new("path");
        std::fs::write(scratch.path("tool"), "text").expect("write");
        assert!(matches!(
            find(OsStr::new("tool"), Some(scratch.root().as_os_str())),
            Err(TargetError::NotExecutable(_))
        ));
    }

    #[test]
    fn foreign_damaged_and_privileged_programs_are_refused() {
        let scratch = Scratch::new("elf");
        assert!(message(&altered_shell(&scratch, "old", |bytes| bytes[4] = 1)).contains("32-bit"));
        assert!(
            message(&altered_shell(&scratch, "foreign", |bytes| bytes[18] = 243))
                .contains("machine number 243")
        );
        assert!(
            message(&altered_shell(&scratch, "short", |bytes| bytes.truncate(60)))
                .contains("damaged")
        );
        assert!(
            message(&altered_shell(&scratch, "tiny", |bytes| bytes.truncate(9)))
                .contains("damaged")
        );
        let privileged = altered_shell(&scratch, "suid", |_| {});
        std::fs::set_permissions(&privileged, std::fs::Permissions::from_mode(0o4755))
            .expect("chmod");
        assert!(message(&privileged).contains("set-user-id"));
        std::fs::set_permissions(&privileged, std::fs::Permissions::from_mode(0o2755))
            .expect("chmod");
        assert!(message(&privileged).contains("set-group-id"));
    }

    #[test]
    fn programs_without_the_agents_loader_are_known() {
        let scratch = Scratch::new("musl");
        let path = altered_shell(&scratch, "musl", |bytes| {
            let at = bytes.windows(8).position(|w| w == b"ld-linux").expect("the loader's name");
            bytes[at..at + 8].copy_from_slice(b"ld-musl-");
        });
        let found = find_path(&path).expect("a program");
        assert_eq!(found.kind, ProgramKind::Musl);
        let refused = found.check_loads().expect_err("musl's loader cannot load the agent");
        assert!(refused.to_string().contains("a program of musl's, so no library"));
    }

    #[test]
    fn scripts_are_judged_by_their_interpreter() {
        let scratch = Scratch::new("script");
        find_path(&scratch.program("good", b"#! /bin/sh -e\necho\n")).expect("a script");
        find_path(&scratch.program("plain", b"echo\n")).expect("a script for sh");
        let broken = scratch.program("broken", b"#!/no/such/interpreter\n");
        assert!(
            message(&broken).contains("/no/such/interpreter: no such file"),
            "{}",
            message(&broken)
        );
        let endless = scratch.path("endless");
        scratch.program("endless", format!("#!{}\n", endless.display()).as_bytes());
        find_path(&endless).expect_err("a script that interprets itself");
    }
}
