//! One line to the log file of a bug report, if the user asked for one with `SWAPTIDE_AGENT_LOG`.

use rustix::fs::{Mode, OFlags};
use swaptide_ipc::ENV_AGENT_LOG;
use swaptide_sys::thread::getpid;

use crate::environment::Variable;

/// Path of the log; empty without one. No lock: a fork would copy it.
static PATH: Variable = Variable::new();

/// Remembers where the log is. Called by the constructor. A path of more than 4 KiB is not taken.
pub(crate) fn set_path(path: &[u8]) {
    PATH.set(ENV_AGENT_LOG, path);
}

/// Appends a line. For the engine's threads.
pub(crate) fn line(text: &str) {
    let Some(path) = PATH.c_value(ENV_AGENT_LOG).filter(|path| !path.is_empty()) else { return };
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)) {
        let _ = rustix::io::write(&file, format!("swaptide[{}]: {text}\n", getpid().0).as_bytes());
    }
}
