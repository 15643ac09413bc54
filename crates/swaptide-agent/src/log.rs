//! One line to the log file of a bug report, if the user asked for one with `SWAPTIDE_AGENT_LOG`.

use rustix::fs::{Mode, OFlags};
use swaptide_sys::lock::Lock;
use swaptide_sys::thread::getpid;

/// Path of the log, NUL-terminated, and its length; empty without one. Set by the constructor,
/// which must not allocate.
static PATH: Lock<([u8; 512], usize)> = Lock::new(([0; 512], 0));

/// Remembers where the log is. A path of 512 bytes and more is not taken.
pub(crate) fn set_path(path: &[u8]) {
    let mut place = PATH.lock();
    if path.len() < place.0.len() {
        place.0[..path.len()].copy_from_slice(path);
        place.1 = path.len();
    }
}

/// Appends a line. For the engine's threads.
pub(crate) fn line(text: &str) {
    let (path, len) = *PATH.lock();
    let Ok(path) = std::ffi::CStr::from_bytes_with_nul(&path[..len + 1]) else { return };
    if len == 0 {
        return;
    }
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)) {
        let _ = rustix::io::write(&file, format!("swaptide[{}]: {text}\n", getpid().0).as_bytes());
    }
}
