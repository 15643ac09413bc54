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
use swaptide_sys::{AsFd, Errno};

use crate::log;
use crate::process::exchange;

/// Between two looks whether the process was detached.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

static IS_PROGRAM: AtomicBool = AtomicBool::new(false);

/// This is one.
pub(crate) fn set_program() {
    IS_PROGRAM.store(true, Relaxed);
}

/// True in such a program.
pub(crate) fn is_program() -> bool {
    IS_PROGRAM.load(Relaxed)
}

/// Has the supervisor be told of forks. False if it cannot and must: this process is not to be
/// managed then.
pub(crate) fn prepare(are_followed: bool) -> bool {
    if !is_program() {
        return true;
    }
    let asked = match fork_filter::set() {
        Ok(filter) => {
            let is_known = ask(Some(&filter));
            if !is_known {
                // Without a reader its forks would fail.
                serve(&filter);
            }
            Ok(is_known)
        }
        // What this process descends from has set it.
        Err(Errno::BUSY) => Ok(ask(None)),
        Err(errno) => Err(errno),
    };
    match asked {
        Ok(true) => true,
        _ if !are_followed => {
            log::line("forks are not held: a child whose parent ends at once may lose pages");
            true
        }
        Ok(false) => {
            log::line("another filter of system calls is in the way: this process is not managed");
            false
        }
        Err(errno) => {
            log::line(&format!(
                "forks cannot be held ({}): this process is not managed",
                swaptide_sys::ErrnoName(errno)
            ));
            false
        }
    }
}

fn ask(filter: Option<&ForkFilter>) -> bool {
    let request = [AgentRequest::Filter as u8];
    let answer = |fds: &[_]| exchange(&request, fds, &mut [0u8; 8]);
    let answer = filter.map_or_else(|| answer(&[]), |filter| answer(&[filter.as_fd()]));
    answer.is_some_and(|(length, _)| length == 1)
}

/// Lets all forks be made, for ever.
fn serve(filter: &ForkFilter) {
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
    slot.past_libc.store(u32::from(is_program()), Release);
}

/// True while a thread forks; says that nothing is out. For the thread that begins management.
pub(crate) fn is_held(slot: &ProcSlot) -> bool {
    let number = slot.control.fork_hold.load(Acquire);
    slot.fork_held.store(number, Release);
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
