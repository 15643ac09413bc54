//! One line to the log file of a bug report, if the user asked for one with `SWAPTIDE_AGENT_LOG`.

use std::io::{IoSlice, Write};

use rustix::fs::{Mode, OFlags};
use swaptide_ipc::ENV_AGENT_LOG;
use swaptide_sys::raw::syscall6;
use swaptide_sys::thread::getpid;

use crate::environment::Variable;

const SYS_GETCWD: u32 = linux_raw_sys::general::__NR_getcwd;

/// Path of the log; empty without one. No lock: a fork would copy it.
static PATH: Variable = Variable::new();

/// Remembers where the log is, for threads that are in another directory than the program. Called
/// by the constructor. A path of more than 4 KiB is not taken.
pub(crate) fn set_path(path: &[u8]) {
    let mut absolute = [0u8; 4200];
    let mut len = 0;
    if path.first().is_some_and(|first| *first != b'/') {
        let at = absolute.as_mut_ptr() as usize;
        // SAFETY: the buffer is as long as said.
        let got = unsafe { syscall6(SYS_GETCWD, [at, absolute.len(), 0, 0, 0, 0]) } as isize;
        // The length counts the NUL, in the place of which the slash comes.
        if got > 1 && absolute[0] == b'/' {
            len = got as usize;
            absolute[len - 1] = b'/';
        }
    }
    if let Some(rest) = absolute.get_mut(len..len + path.len()) {
        rest.copy_from_slice(path);
        PATH.set(ENV_AGENT_LOG, &absolute[..len + path.len()]);
    }
}

/// Appends a line. Allocates nothing: threads of the program write here, too, and while one had the
/// arena another could fork.
pub(crate) fn line(text: &str) {
    let Some(path) = PATH.c_value(ENV_AGENT_LOG).filter(|path| !path.is_empty()) else { return };
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)) {
        let mut head = [0u8; 32];
        let mut rest = &mut head[..];
        let _ = write!(rest, "swaptide[{}]: ", getpid().0);
        let left = rest.len();
        let head = &head[..head.len() - left];
        let _ = rustix::io::writev(
            &file,
            &[IoSlice::new(head), IoSlice::new(text.as_bytes()), IoSlice::new(b"\n")],
        );
    }
}
