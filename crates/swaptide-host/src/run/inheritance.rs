//! What a program has from the process that executes it, and would not have from a child of that
//! process that is itself a Rust program: a disposition and streams that the standard library
//! changes at its start, timers, and the environment as it stands there, byte by byte.
//!
//! Owns: what was so before `main`. Locks: none.

use std::ffi::{CStr, CString, OsStr, c_char};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

/// `SIGPIPE` was ignored.
static PIPE_IGNORED: AtomicBool = AtomicBool::new(false);
/// A bit for each standard stream that was closed.
static CLOSED_STREAMS: AtomicU32 = AtomicU32::new(0);

/// Before `main`: the standard library ignores `SIGPIPE` and opens /dev/null for closed streams.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: an action of zeros is one.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the action is a local, which sigaction writes.
    let known = unsafe { libc::sigaction(libc::SIGPIPE, std::ptr::null(), &mut action) } == 0;
    PIPE_IGNORED.store(known && action.sa_sigaction == libc::SIG_IGN, Relaxed);
    for fd in 0..3 {
        // SAFETY: F_GETFD changes nothing.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            CLOSED_STREAMS.fetch_or(1 << fd, Relaxed);
        }
    }
}

const TIMERS: [libc::c_int; 3] = [libc::ITIMER_REAL, libc::ITIMER_VIRTUAL, libc::ITIMER_PROF];

/// The timers and the variables to pass on to the program.
pub(super) struct Inheritance {
    timers: [libc::itimerval; 3],
    /// The process that the user started. Some variables name it.
    launcher: u32,
}

impl Inheritance {
    /// Of this process, which the user has started. Its timers stop: their signals are the
    /// program's.
    pub(super) fn take() -> Inheritance {
        // SAFETY: a timer of zeros is one that is switched off.
        let off: libc::itimerval = unsafe { std::mem::zeroed() };
        let timers = TIMERS.map(|which| {
            let mut left = off;
            // SAFETY: both are locals.
            unsafe { libc::setitimer(which, &off, &mut left) };
            left
        });
        Inheritance { timers, launcher: std::process::id() }
    }

    /// Between fork and exec of the program: `variables` are those that it gets, whatever else the
    /// environment has.
    ///
    /// # Errors
    /// A variable with a NUL in it.
    pub(super) fn restore(&self, variables: &[(&str, &OsStr)]) -> io::Result<()> {
        let old = own_environment();
        let new = environment(&old, variables, self.launcher, std::process::id())?;
        let mut array: Vec<*const c_char> = new.iter().map(|entry| entry.as_ptr()).collect();
        array.push(std::ptr::null());
        // SAFETY: this process has one thread, and is about to execute the program: the array and
        // its strings stay until then.
        unsafe { environ = array.leak().as_ptr() };
        std::mem::forget(new);
        // SAFETY: no handler is installed; the streams are those that the standard library opened;
        // the timers were filled by the kernel.
        unsafe {
            if PIPE_IGNORED.load(Relaxed) {
                libc::signal(libc::SIGPIPE, libc::SIG_IGN);
            }
            for fd in (0..3).filter(|fd| CLOSED_STREAMS.load(Relaxed) & 1 << fd != 0) {
                libc::close(fd);
            }
            for (which, left) in TIMERS.into_iter().zip(&self.timers) {
                libc::setitimer(which, left, std::ptr::null_mut());
            }
        }
        Ok(())
    }
}

unsafe extern "C" {
    static mut environ: *const *const c_char;
}

fn own_environment() -> Vec<&'static CStr> {
    let mut entries = Vec::new();
    // SAFETY: libc's array, null-terminated, of strings; nothing in this program changes it.
    unsafe {
        let mut at = environ;
        while !at.is_null() && !(*at).is_null() {
            entries.push(CStr::from_ptr(*at));
            at = at.add(1);
        }
    }
    entries
}

/// The variables of a service manager that name the process that it started, which is the launcher.
const NAME_THE_PROCESS: [&str; 3] = ["LISTEN_PID", "WATCHDOG_PID", "SYSTEMD_EXEC_PID"];
/// Names it by its pidfd's inode, which no other process has. Without it the number counts.
const NAMES_IT_BY_INODE: &str = "LISTEN_PIDFDID";

/// An environment in the order of the old one, with all that stands there, as getenv and other
/// programs read it; but with `variables`, and with the number of the program's process where
/// that of the launcher is meant.
fn environment(
    old: &[&CStr],
    variables: &[(&str, &OsStr)],
    launcher: u32,
    program: u32,
) -> io::Result<Vec<CString>> {
    let mut new = Vec::new();
    let mut placed = vec![false; variables.len()];
    let entry = |name: &str, value: &[u8]| CString::new([name.as_bytes(), b"=", value].concat());
    for text in old {
        let bytes = text.to_bytes();
        let end = bytes.iter().position(|byte| *byte == b'=');
        let (name, value) = end.map_or((bytes, None), |at| (&bytes[..at], Some(&bytes[at + 1..])));
        let given = variables.iter().position(|(given, _)| given.as_bytes() == name);
        let names = NAME_THE_PROCESS.iter().find(|names| names.as_bytes() == name);
        match (given, names) {
            _ if value.is_none() => new.push((*text).to_owned()),
            // The first one counts for getenv, the last one for the loader.
            (Some(at), _) if placed[at] => {}
            (Some(at), _) => {
                placed[at] = true;
                new.push(entry(variables[at].0, variables[at].1.as_bytes())?);
            }
            (_, Some(names)) if value == Some(launcher.to_string().as_bytes()) => {
                new.push(entry(names, program.to_string().as_bytes())?);
            }
            _ if name == NAMES_IT_BY_INODE.as_bytes() => {}
            _ => new.push((*text).to_owned()),
        }
    }
    for ((name, value), _) in variables.iter().zip(&placed).filter(|(_, placed)| !**placed) {
        new.push(entry(name, value.as_bytes())?);
    }
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_stays_as_it_stands_but_for_what_is_given() {
        let old = [
            c"Z=1",
            c"A=first",
            c"LD_PRELOAD=x.so",
            c"A=second",
            c"NO_EQUALS",
            c"LISTEN_PID=70",
            c"LISTEN_PIDFDID=9",
            c"WATCHDOG_PID=71",
            c"LD_PRELOAD=y.so",
            c"B=",
        ];
        let given = [("LD_PRELOAD", OsStr::new("agent.so:x.so")), ("SOCKET", OsStr::new("s"))];
        let new = environment(&old, &given, 70, 5).expect("no NUL in it");
        let new: Vec<&str> = new.iter().map(|entry| entry.to_str().expect("text")).collect();
        assert_eq!(
            new,
            [
                "Z=1",
                "A=first",
                "LD_PRELOAD=agent.so:x.so",
                "A=second",
                "NO_EQUALS",
                "LISTEN_PID=5",
                "WATCHDOG_PID=71",
                "B=",
                "SOCKET=s",
            ]
        );
    }
}
