//! By which thread the kernel tells of a process's memory and descriptors.
//!
//! A thread that ends gives up its memory first, then its descriptors, and stays to be seen: the
//! first thread of a process until all others have ended. What the kernel says of such a one is
//! empty, and looks like a process that has nothing mapped and nothing open.
//!
//! Locks: none.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _};
use std::path::{Path, PathBuf};

/// More than most texts of /proc that are read here have.
const USUAL_BYTES: usize = 8192;

/// A thread of a process: by its own number alone it would be another process's, once that has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ProcThread {
    pub pid: u32,
    pub tid: u32,
}

impl ProcThread {
    /// A file of it in /proc.
    pub(crate) fn file(self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/task/{}/{name}", self.pid, self.tid))
    }

    /// True if it has memory. What was told of it before was told of a living thread then: its
    /// memory goes first.
    pub(crate) fn has_memory(self) -> io::Result<bool> {
        match read_text(&self.file("statm")) {
            Ok(text) => Ok(text.first().is_some_and(|digit| (b'1'..=b'9').contains(digit))),
            Err(error) if is_gone(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A thread of a process that has memory: the first, as a rule. `None` if none was found: the
/// process has ended, or one began another and ended meanwhile, or it is not to be seen.
pub(crate) fn living_thread(pid: u32) -> io::Result<Option<ProcThread>> {
    let first = ProcThread { pid, tid: pid };
    if first.has_memory()? {
        return Ok(Some(first));
    }
    let threads = match fs::read_dir(format!("/proc/{pid}/task")) {
        Ok(threads) => threads,
        Err(error) if is_gone(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    for thread in threads {
        let name = match thread {
            Ok(thread) => thread.file_name(),
            Err(error) if is_gone(&error) => continue,
            Err(error) => return Err(error),
        };
        let Some(tid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        let thread = ProcThread { pid, tid };
        if thread.has_memory()? {
            return Ok(Some(thread));
        }
    }
    Ok(None)
}

/// Reads a text of /proc, whose length no one tells: in as few calls as it takes.
///
/// # Errors
/// When it cannot be opened or read.
pub(crate) fn read_text(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let (mut bytes, mut len) = (vec![0; USUAL_BYTES], 0);
    loop {
        match file.read(&mut bytes[len..]) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if len == bytes.len() {
            bytes.resize(2 * len, 0);
        }
    }
    bytes.truncate(len);
    Ok(bytes)
}

/// True if an error says that what was asked about is not there any more.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    matches!(errno, Some(rustix::io::Errno::NOENT | rustix::io::Errno::SRCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_of_by_a_thread_that_lives() {
        let own = std::process::id();
        let first = ProcThread { pid: own, tid: own };
        assert_eq!(living_thread(own).expect("it can be asked"), Some(first));
        assert_eq!(living_thread(u32::MAX / 2).expect("no such process"), None);
        let mut ended = std::process::Command::new("true").spawn().expect("true");
        let of_ended = ProcThread { pid: ended.id(), tid: ended.id() };
        while of_ended.has_memory().expect("it can be asked") {
            std::thread::yield_now();
        }
        assert_eq!(living_thread(ended.id()).expect("it is a zombie"), None);
        ended.wait().expect("it has ended");
    }

    #[test]
    fn a_text_is_read_whole() {
        let path = std::env::temp_dir().join(format!("swaptide-text-{}", std::process::id()));
        for len in [0, 1, USUAL_BYTES - 1, USUAL_BYTES, 3 * USUAL_BYTES + 7] {
            let text: Vec<u8> = (0..len).map(|at| at as u8).collect();
            fs::write(&path, &text).expect("file");
            assert!(read_text(&path).expect("it can be read") == text, "{len} bytes");
        }
        fs::remove_file(&path).expect("remove");
        assert!(is_gone(&read_text(&path).expect_err("it is gone")));
    }

    #[test]
    fn a_question_that_fails_is_no_answer() {
        let error = io::Error::from_raw_os_error;
        assert!(is_gone(&error(2)) && is_gone(&error(3)));
        // No descriptor, no memory, no permission.
        assert!([24, 23, 12, 13, 1].into_iter().all(|errno| !is_gone(&error(errno))));
    }
}
