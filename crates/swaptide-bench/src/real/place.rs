//! The directory of the real programs: their texts, inputs and Python modules.
//!
//! It is made at the first call and kept: what is there is not made again. What is missing is
//! installed, each with a line that says so.

use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::real::programs::RealProgram;

/// The directory in which the real programs and their inputs are installed.
pub(crate) struct Place {
    dir: PathBuf,
}

/// Runs a command that prepares something; its output is shown when it fails.
fn prepare(words: &[&str]) -> Result<(), String> {
    let output = Command::new(words[0])
        .args(&words[1..])
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("{}: {e}", words[0]))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    Err(format!("{} ended with {}: {last}", words.join(" "), output.status))
}

/// Makes a directory for this user alone, or takes one that is: what lies there is run.
fn own_directory(dir: &Path) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{}: {e}", dir.display());
    if let Some(parent) = dir.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed(e)),
        _ => {}
    }
    let found = std::fs::symlink_metadata(dir).map_err(failed)?;
    let is_own = found.uid() == rustix::process::geteuid().as_raw();
    if !found.is_dir() || !is_own || found.mode() & 0o022 != 0 {
        return Err(format!(
            "{}: not a directory of this user alone; give another one: --work-dir DIR",
            dir.display()
        ));
    }
    Ok(())
}

/// True if a program is found by its name, or a file by its path.
fn is_installed(program: &str) -> bool {
    if program.starts_with('/') {
        return Path::new(program).exists();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

impl Place {
    /// The directory, with all that `programs` need.
    ///
    /// # Errors
    /// When something is missing and cannot be installed.
    pub(crate) fn prepare(dir: &Path, programs: &[RealProgram]) -> Result<Place, String> {
        let failed = |what: &Path, e: std::io::Error| format!("{}: {e}", what.display());
        own_directory(dir)?;
        let place = Place { dir: dir.to_owned() };
        place.install_packages(programs)?;
        place.install_modules(programs)?;
        for program in programs {
            if let Some((name, text)) = program.text {
                let file = dir.join(name);
                std::fs::write(&file, text).map_err(|e| failed(&file, e))?;
            }
            if let Some((name, write)) = program.input {
                let (file, part) = (dir.join(name), dir.join(format!("{name}.part")));
                if !file.exists() {
                    eprintln!("swaptide bench: writing {}", file.display());
                    // One that was interrupted leaves no file that looks whole.
                    write(&part).map_err(|e| failed(&part, e))?;
                    std::fs::rename(&part, &file).map_err(|e| failed(&file, e))?;
                }
            }
            if !program.prepare.is_empty() {
                let words = place.filled_in(program.prepare);
                prepare(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
            }
        }
        Ok(place)
    }

    fn install_packages(&self, programs: &[RealProgram]) -> Result<(), String> {
        let needed = programs.iter().flat_map(|program| program.packages);
        let mut missing: Vec<&str> =
            needed.filter(|(name, _)| !is_installed(name)).map(|(_, package)| *package).collect();
        missing.sort_unstable();
        missing.dedup();
        if missing.is_empty() {
            return Ok(());
        }
        eprintln!("swaptide bench: installing {} (apt)", missing.join(" "));
        let install = ["apt-get", "install", "-y", "-q", "--no-install-recommends"];
        let words = [&install[..], &missing].concat();
        prepare(&words).or_else(|_| {
            // The lists of packages may be missing, or old.
            prepare(&["apt-get", "update", "-q"])?;
            prepare(&words)
        })
    }

    fn install_modules(&self, programs: &[RealProgram]) -> Result<(), String> {
        let is_python = |program: &RealProgram| program.words.contains(&"{python}");
        if !programs.iter().any(is_python) {
            return Ok(());
        }
        let mut modules: Vec<&str> =
            programs.iter().flat_map(|program| program.modules).copied().collect();
        modules.sort_unstable();
        modules.dedup();
        let python = self.python();
        // One that was interrupted has no pip.
        if prepare(&[&python, "-m", "pip", "--version"]).is_err() {
            let venv = self.dir.join("venv");
            eprintln!("swaptide bench: making {}", venv.display());
            prepare(&["python3", "-m", "venv", "--clear", &venv.to_string_lossy()])
                .map_err(|e| format!("{e}; install python3-venv"))?;
        }
        let is_missing =
            |module: &&&str| prepare(&[&python, "-m", "pip", "show", "-q", module]).is_err();
        let missing: Vec<&str> = modules.iter().filter(is_missing).copied().collect();
        if missing.is_empty() {
            return Ok(());
        }
        eprintln!("swaptide bench: installing {} (PyPI)", missing.join(" "));
        prepare(&[&[python.as_str(), "-m", "pip", "install", "-q"][..], &missing].concat())
    }

    fn python(&self) -> String {
        self.dir.join("venv/bin/python3").to_string_lossy().into_owned()
    }

    /// The words of a command with the names in them filled in.
    pub(crate) fn filled_in(&self, words: &[&str]) -> Vec<String> {
        let dir = self.dir.to_string_lossy();
        words
            .iter()
            .map(|word| word.replace("{dir}", &dir).replace("{python}", &self.python()))
            .collect()
    }

    /// The directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn names_are_filled_in_and_what_fails_is_told() {
        let place = Place { dir: "/some/where".into() };
        assert_eq!(
            place.filled_in(&["{python}", "{dir}/a.py", "7"]),
            ["/some/where/venv/bin/python3", "/some/where/a.py", "7"]
        );
        let dir = std::env::temp_dir().join(format!("swaptide-real-test-{}", std::process::id()));
        assert_eq!(own_directory(&dir), Ok(()));
        assert_eq!(own_directory(&dir), Ok(()), "it is there already");
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).expect("chmod");
        assert!(own_directory(&dir).unwrap_err().contains("of this user alone"));
        std::fs::remove_dir(&dir).expect("an empty directory");
        assert_eq!(prepare(&["true"]), Ok(()));
        let error = prepare(&["sh", "-c", "echo first >&2; echo the reason >&2; exit 3"]);
        let error = error.unwrap_err();
        assert!(error.ends_with("exit status: 3: the reason"), "{error}");
        assert!(is_installed("sh") && !is_installed("no-such-program-here"));
        assert!(is_installed("/proc/self") && !is_installed("/proc/none"));
    }
}
