//! By which thread the kernel tells of a process's memory and descriptors.
//!
//! A thread that ends gives up its memory first, then its descriptors, and stays to be seen: the
//! first thread of a process until all others have ended. What the kernel says of such a one is
//! empty, and looks like a process that has nothing mapped and nothing open.
//!
//! Locks: none.

use std::{fs, io};

/// A thread of a process that has memory: the first, as a rule. `None` if none was found: the
/// process has ended, or one began another and ended meanwhile.
pub(crate) fn living_thread(pid: u32) -> io::Result<Option<u32>> {
    if has_memory(pid)? {
        return Ok(Some(pid));
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
        if has_memory(tid)? {
            return Ok(Some(tid));
        }
    }
    Ok(None)
}

/// True if a thread has memory. What was told of it before was told of a living thread then: its
/// memory goes first.
pub(crate) fn has_memory(tid: u32) -> io::Result<bool> {
    match fs::read(format!("/proc/{tid}/statm")) {
        Ok(text) => Ok(text.first().is_some_and(|digit| (b'1'..=b'9').contains(digit))),
        Err(error) if is_gone(&error) => Ok(false),
        Err(error) => Err(error),
    }
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
        assert_eq!(living_thread(own).expect("it can be asked"), Some(own));
        assert_eq!(living_thread(u32::MAX / 2).expect("no such process"), None);
        let mut ended = std::process::Command::new("true").spawn().expect("true");
        while has_memory(ended.id()).expect("it can be asked") {
            std::thread::yield_now();
        }
        assert_eq!(living_thread(ended.id()).expect("it is a zombie"), None);
        ended.wait().expect("it has ended");
    }

    #[test]
    fn a_question_that_fails_is_no_answer() {
        let error = io::Error::from_raw_os_error;
        assert!(is_gone(&error(2)) && is_gone(&error(3)));
        // No descriptor, no memory, no permission.
        assert!([24, 23, 12, 13, 1].into_iter().all(|errno| !is_gone(&error(errno))));
    }
}
