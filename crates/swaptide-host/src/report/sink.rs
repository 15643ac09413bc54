//! Where a report or a picture goes.
//!
//! Owns the writing of a file: whole or not at all.
//!
//! Locks: none.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use crate::report::totals::Report;

/// The destination of a report, found to be writable before the run starts.
#[derive(Debug)]
pub enum Sink {
    /// A file, replaced at the end.
    File(PathBuf),
    /// A terminal, a pipe, a device or a descriptor of this process, open already.
    Stream(File),
}

impl Sink {
    /// Checks that `path` can be written.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn open(path: &Path) -> io::Result<Sink> {
        // What the run leaves behind must not depend on a later change of directory.
        let path = std::path::absolute(path)?;
        if is_own_descriptor(&path) {
            return Ok(Sink::Stream(File::options().append(true).open(&path)?));
        }
        match std::fs::metadata(&path) {
            Ok(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(found) if found.file_type().is_fifo() || !found.is_file() => {
                return Ok(Sink::Stream(File::options().write(true).open(&path)?));
            }
            Ok(_) => drop(File::options().write(true).open(&path)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let (_, hidden) = hidden_file(&path)?;
        std::fs::remove_file(hidden)?;
        Ok(Sink::File(path))
    }

    /// Writes the report.
    ///
    /// # Errors
    /// Why it could not be written; a report that was there before is then still there.
    pub fn write(&mut self, report: &Report) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(report)?;
        text.push(b'\n');
        self.write_text(&text)
    }

    /// Writes something else.
    ///
    /// # Errors
    /// As [`Sink::write`].
    pub fn write_text(&mut self, text: &[u8]) -> io::Result<()> {
        match self {
            Sink::Stream(file) => file.write_all(text),
            Sink::File(path) => {
                let (mut file, hidden) = hidden_file(path)?;
                let written = file.write_all(text).and_then(|()| std::fs::rename(&hidden, path));
                if written.is_err() {
                    let _ = std::fs::remove_file(hidden);
                }
                written
            }
        }
    }
}

/// Most links that lead from one to the next; the kernel follows as many.
const MAX_LINKS: u32 = 40;

/// True for a descriptor of this process: `/dev/stdout`, `/proc/self/fd/3`, and what leads there.
/// Replacing it would take the link away, from all programs that use it. Other links are not
/// followed: in a directory that others may write to, others may have made them.
pub fn is_own_descriptor(path: &Path) -> bool {
    let own = PathBuf::from(format!("/proc/{}/fd", std::process::id()));
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return false };
        // A name alone is one of the directory that is current.
        let parent = if parent == Path::new("") { Path::new(".") } else { parent };
        let Ok(parent) = parent.canonicalize() else { return false };
        if parent == own {
            return true;
        }
        let Ok(target) = std::fs::read_link(parent.join(name)) else { return false };
        path = parent.join(target);
    }
    false
}

/// Names that are tried for a hidden file.
const HIDDEN_NAMES: u32 = 100;

/// A new file next to `path`. What is there under its name, a link too, is not this process's, and
/// is left.
fn hidden_file(path: &Path) -> io::Result<(File, PathBuf)> {
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
    let mut tried = 0;
    loop {
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}", std::process::id()));
        if tried > 0 {
            hidden.push(format!(".{tried}"));
        }
        let hidden = path.with_file_name(hidden);
        match File::options().write(true).create_new(true).open(&hidden) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tried < HIDDEN_NAMES => {
                tried += 1;
            }
            opened => return opened.map(|file| (file, hidden)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn a_report_replaces_the_one_before_whole() {
        let scratch = Scratch::new("report");
        let path = scratch.path("out.json");
        for status in [1, 2] {
            let mut sink = Sink::open(&path).expect("writable");
            sink.write_text(&[status; 5]).expect("written");
            assert_eq!(std::fs::read(&path).expect("read"), [status; 5]);
        }
        assert_eq!(
            std::fs::read_dir(scratch.root()).expect("list").count(),
            1,
            "nothing else is left"
        );
    }

    #[test]
    fn links_under_the_hidden_name_are_not_followed() {
        let scratch = Scratch::new("hidden-link");
        let (path, other) = (scratch.path("out.json"), scratch.path("other"));
        std::fs::write(&other, "kept").expect("write");
        let planted = scratch.path(&format!(".out.json.{}", std::process::id()));
        let missing = scratch.path(&format!(".out.json.{}.1", std::process::id()));
        std::os::unix::fs::symlink(&other, &planted).expect("link");
        std::os::unix::fs::symlink(scratch.path("new"), &missing).expect("link");
        let mut sink = Sink::open(&path).expect("writable");
        sink.write_text(b"text").expect("written");
        let read = |path: &Path| std::fs::read_to_string(path).expect("read");
        assert_eq!((read(&path), read(&other)), ("text".into(), "kept".into()));
        assert!(std::fs::symlink_metadata(&path).expect("out").is_file());
        let list = std::fs::read_dir(scratch.root()).expect("list").count();
        assert_eq!(list, 4, "the two links stay, nothing is made where they lead");
    }

    #[test]
    fn a_place_that_cannot_be_written_is_known_before_the_run() {
        let scratch = Scratch::new("unwritable");
        assert!(Sink::open(scratch.root()).is_err());
        assert!(Sink::open(&scratch.path("no/such/dir/out.json")).is_err());
        assert!(Sink::open(Path::new("/proc/report.json")).is_err());
        assert!(matches!(Sink::open(Path::new("/dev/null")), Ok(Sink::Stream(_))));
    }

    #[test]
    fn what_leads_to_an_own_descriptor_is_written_to_and_stays() {
        let scratch = Scratch::new("descriptor");
        let held = File::create(scratch.path("held")).expect("create");
        let number = std::os::fd::AsRawFd::as_raw_fd(&held);
        let link = scratch.path("link");
        std::os::unix::fs::symlink(format!("/dev/fd/{number}"), &link).expect("link");
        (&held).write_all(b"before ").expect("write");
        let mut sink = Sink::open(&link).expect("writable");
        sink.write_text(b"text").expect("written");
        assert_eq!(std::fs::read(scratch.path("held")).expect("read"), b"before text");
        assert!(std::fs::symlink_metadata(&link).expect("link").is_symlink());
        assert!(is_own_descriptor(Path::new("/dev/stdout")));
        // Another link, one that leads to itself, a file.
        let (other, turn) = (scratch.path("other"), scratch.path("turn"));
        std::os::unix::fs::symlink("held", &other).expect("link");
        std::os::unix::fs::symlink("turn", &turn).expect("link");
        for path in [other, turn, scratch.path("held"), scratch.path("none"), "/".into()] {
            assert!(!is_own_descriptor(&path), "{path:?}");
        }
    }
}
