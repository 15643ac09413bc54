//! One line to the log file of a bug report, if the user asked for one with `SWAPTIDE_AGENT_LOG`.

use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags};
use swaptide_sys::thread::getpid;

/// Path of the log, NUL-terminated; set once by the constructor.
static PATH: OnceLock<Vec<u8>> = OnceLock::new();

/// Remembers where the log is.
pub fn set_path(path: &[u8]) {
    let mut path = path.to_vec();
    path.push(0);
    let _ = PATH.set(path);
}

/// Appends a line. For the engine's threads.
pub fn line(text: &str) {
    let Some(path) = PATH.get().and_then(|p| std::ffi::CStr::from_bytes_with_nul(p).ok()) else { return };
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)) {
        let _ = rustix::io::write(&file, format!("swaptide[{}]: {text}\n", getpid().0).as_bytes());
    }
}
