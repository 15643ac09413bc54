//! Forks of a program that loads no library: no hook is called, so the supervisor is told, and has
//! everything brought in before ([`swaptide_engine`]'s `fork_hold`).
//!
//! Owns: whether this is such a program. Locks: none.

use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use swaptide_engine::Engine;
use swaptide_engine::requests::HandlerRequest;
use swaptide_ipc::{AgentRequest, ProcSlot};
use swaptide_sys::fork_filter::{self, ForkFilter};
use swaptide_sys::lock::futex;
use swaptide_sys::mem::keep_from_children;
use swaptide_sys::sock::Conn;
use swaptide_sys::{AsFd, Errno, FromRawFd, IntoRawFd, OwnedFd};

use crate::log;
use crate::process::{socket, spawn_with};

/// Between two looks whether the process was detached.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

static IS_PROGRAM: AtomicBool = AtomicBool::new(false);
/// The supervisor is told of its forks.
static IS_PREPARED: AtomicBool = AtomicBool::new(false);

/// This is one.
pub(crate) fn set_program() {
    IS_PROGRAM.store(true, Relaxed);
}

/// True in such a program.
pub(crate) fn is_program() -> bool {
    IS_PROGRAM.load(Relaxed)
}

/// Has the supervisor be told of forks, before anything is managed.
///
/// # Errors
/// Why that cannot be, where nothing may be managed without it.
pub(crate) fn prepare(are_followed: bool) -> Result<(), String> {
    if !is_program() || IS_PREPARED.load(Relaxed) {
        return Ok(());
    }
    if !are_followed {
        // Elsewhere that advice is what managed memory bears.
        keep_from_children();
    }
    let asked = match fork_filter::set() {
        Ok(filter) => {
            let is_read = ask(Some(&filter));
            if !is_read {
                let number = filter.into_fd().into_raw_fd() as usize;
                if !spawn_with(64 << 10, let_all_go, number) {
                    log::line("no thread to let forks go: they fail from here on");
                }
            }
            Ok(is_read)
        }
        // What this process descends from has set it.
        Err(Errno::BUSY) => Ok(ask(None)),
        Err(errno) => Err(errno),
    };
    let why = match asked {
        Ok(true) => {
            IS_PREPARED.store(true, Relaxed);
            return Ok(());
        }
        Ok(false) => "the supervisor does not read that filter".to_owned(),
        Err(errno) => swaptide_sys::ErrnoName(errno).to_string(),
    };
    if are_followed {
        return Err(format!("forks cannot be held ({why}): this process is not managed"));
    }
    log::line(&format!("forks are not held ({why}): a child may lose pages if its parent ends"));
    Ok(())
}

/// The connection stays open for as long as this process has engine threads: the supervisor takes
/// it for their life.
fn ask(filter: Option<&ForkFilter>) -> bool {
    let answered = || -> Result<Conn, Errno> {
        let conn = Conn::connect_trusted(socket())?;
        let fd = filter.map(ForkFilter::as_fd);
        conn.send(&[AgentRequest::Filter as u8], fd.as_slice())?;
        match conn.recv(&mut [0u8; 8], &mut [])? {
            (1, _) => Ok(conn),
            _ => Err(Errno::PROTO),
        }
    };
    answered().map(|conn| std::mem::forget(conn.into_fd())).is_ok()
}

/// Lets all forks be made, as long as this process lives: without a reader they would fail.
extern "C" fn let_all_go(number: usize) {
    // SAFETY: the descriptor was given up for this thread, whose table it is in.
    let filter = ForkFilter::from_fd(unsafe { OwnedFd::from_raw_fd(number as i32) });
    loop {
        match filter.next() {
            Ok(fork) => drop(filter.let_go(fork)),
            Err(Errno::NOENT | Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// Says in this process's slot that its forks are to be held.
pub(crate) fn tell(slot: &ProcSlot) {
    slot.agent.past_libc.store(u32::from(is_program()), Release);
}

/// True while a thread forks; says that nothing is out. For the thread that begins management.
pub(crate) fn is_held(slot: &ProcSlot) -> bool {
    let number = slot.control.fork_hold.load(Acquire);
    slot.agent.fork_held.store(number, Release);
    number != 0
}

/// Has the handler follow the supervisor's orders, until the process is detached.
pub(crate) fn follow_orders(engine: &'static Engine) {
    let word = &engine.slot().control.fork_hold;
    let mut seen = 0;
    while !engine.retired.load(Acquire) {
        let number = word.load(Acquire);
        if number != seen {
            seen = number;
            engine.handler_requests.submit(HandlerRequest::ForkHold);
        }
        futex::wait(word, number, Some(LOOK_INTERVAL), futex::Scope::Shared);
    }
}
