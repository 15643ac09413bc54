//! `attach --background`: the run goes on when the command has ended.
//!
//! Owns the processes by which the run leaves the tree that it attaches to, and what the command
//! waits for. The command starts a process that starts the run and ends at once, so the run's
//! parent is neither of them. Only then is anything looked at: a process can have itself attached
//! to. The command ends when the first process has the agent, or cannot be given it.
//!
//! Locks: none.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use crate::run::channel::{Channel, LauncherMessage};
use crate::run::error::RunError;

/// The exit status of bad input.
const BAD_INPUT: u8 = 2;

/// Has `run` go on in the background. It is given the command that waits, and takes that when it
/// has told it.
///
/// # Errors
/// Those of `run`, until it has told the command.
pub(super) fn begin(
    run: impl FnOnce(&mut Option<Channel>) -> Result<u8, RunError>,
) -> Result<u8, RunError> {
    let system = |what| move |error: io::Error| RunError::System(what, error);
    let (command_end, run_end) = UnixStream::pair().map_err(system("socketpair"))?;
    // SAFETY: this process has one thread, so the child's copy of all locks and of the heap is
    // consistent.
    match unsafe { libc::fork() } {
        -1 => Err(RunError::System("fork", io::Error::last_os_error())),
        0 => {
            drop(command_end);
            leave_parent(&run_end);
            let mut waiting = Some(Channel::new(run_end));
            match (run(&mut waiting), waiting) {
                (Err(error), Some(mut waiting)) => {
                    waiting.send(&LauncherMessage::Failed(error.to_string()));
                    Ok(BAD_INPUT)
                }
                (result, _) => result,
            }
        }
        between => {
            drop(run_end);
            // SAFETY: the child of this process, which waits for no other; no status is written.
            while unsafe { libc::waitpid(between, std::ptr::null_mut(), 0) } == -1
                && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
            {}
            (&command_end).write_all(b"\n").map_err(system("socketpair"))?;
            wait(Channel::new(command_end))
        }
    }
}

/// Goes on as a process that the one before has left alone, in a session of its own.
fn leave_parent(command: &UnixStream) {
    // SAFETY: as above.
    if unsafe { libc::fork() } != 0 {
        // SAFETY: ends this process; what it has is its copy of what the others have.
        unsafe { libc::_exit(0) }
    }
    let _ = rustix::process::setsid();
    // The command has seen that process end. Without the command nothing is begun.
    if (&mut &*command).read_exact(&mut [0]).is_err() {
        // SAFETY: as above.
        unsafe { libc::_exit(0) }
    }
}

/// The command's side.
fn wait(mut run: Channel) -> Result<u8, RunError> {
    loop {
        let Some(messages) = run.receive() else {
            return Err(RunError::Start("the run in the background has ended".into()));
        };
        for message in messages {
            match message {
                LauncherMessage::Attached(_) => return Ok(0),
                LauncherMessage::Failed(why) => return Err(RunError::Start(why)),
                _ => {}
            }
        }
    }
}
