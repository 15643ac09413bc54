//! The filter of forks on the running kernel (the facts of `swaptide_sys::fork_filter`), each test
//! in a process of its own: a filter stays.

mod common;

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use common::in_child;
use swaptide_sys::Errno;
use swaptide_sys::fork_filter::{FilterState, ForkFilter, set};

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(code: i32) -> !;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
}

/// The status of a child, or the error of the fork.
fn fork_a_child() -> Result<i32, Errno> {
    // SAFETY: the child makes one system call.
    let pid = match unsafe { fork() } {
        // SAFETY: it ends.
        0 => unsafe { _exit(7) },
        -1 => return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap()),
        pid => pid,
    };
    let mut status = 0;
    // SAFETY: the status is a local number.
    assert_eq!(unsafe { waitpid(pid, &mut status, 0) }, pid);
    Ok(status >> 8)
}

fn state(filter: &ForkFilter) -> FilterState {
    ForkFilter::look(std::iter::once(filter))[0]
}

fn answer(filter: &ForkFilter, answers: &[Option<Errno>]) {
    for answer in answers {
        let waiting = filter.next().unwrap();
        assert_ne!(waiting.tid, 0);
        match answer {
            Some(errno) => filter.refuse(waiting, *errno).unwrap(),
            None => filter.let_go(waiting).unwrap(),
        }
    }
}

#[test]
fn a_fork_waits_and_all_else_passes() {
    in_child("a_fork_waits_and_all_else_passes", || {
        let filter = set().unwrap();
        assert_eq!(set().unwrap_err(), Errno::BUSY);
        // A thread, and a program by what has its parent's memory.
        std::thread::spawn(|| ()).join().unwrap();
        assert!(Command::new("true").status().unwrap().success());
        static IS_READY: AtomicBool = AtomicBool::new(false);
        let served = std::thread::spawn(move || {
            // A forking thread holds libc's locks: from here on this one allocates nothing.
            IS_READY.store(true, Ordering::Release);
            answer(&filter, &[Some(Errno::NOMEM), None]);
            filter
        });
        while !IS_READY.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        assert_eq!(fork_a_child(), Err(Errno::NOMEM));
        assert_eq!(fork_a_child(), Ok(7));
        let filter = served.join().unwrap();
        assert_eq!(state(&filter), FilterState::Quiet);
        drop(filter);
        assert_eq!(fork_a_child(), Err(Errno::NOSYS), "it has no reader");
    });
}

#[test]
fn it_reaches_all_threads_and_what_is_executed() {
    in_child("it_reaches_all_threads_and_what_is_executed", || {
        let (go, told) = std::sync::mpsc::channel::<()>();
        let earlier = std::thread::spawn(move || {
            told.recv().unwrap();
            fork_a_child()
        });
        let filter = set().unwrap();
        go.send(()).unwrap();
        answer(&filter, &[None]);
        assert_eq!(earlier.join().unwrap(), Ok(7));
        // A shell forks for what is in parentheses.
        let shell = Command::new("sh").args(["-c", "(exit 5); exit $?"]).spawn();
        while state(&filter) != FilterState::Waiting {}
        answer(&filter, &[None]);
        assert_eq!(shell.unwrap().wait().unwrap().code(), Some(5));
    });
}
