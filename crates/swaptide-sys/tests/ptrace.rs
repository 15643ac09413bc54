//! What following a thread through its fork relies on, tried on the running kernel (the facts of
//! `swaptide_sys::ptrace`).
//!
//! Each test follows a child of its own, so that no thread of the test program is ever stopped.
//! Where the machine forbids it, the test says so and ends.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use swaptide_sys::ptrace::{Tracee, TraceeStop, seize};

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(code: i32) -> !;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn kill(pid: i32, signal: i32) -> i32;
    fn pipe(ends: *mut i32) -> i32;
    fn read(fd: i32, to: *mut u8, count: usize) -> isize;
    fn write(fd: i32, from: *const u8, count: usize) -> isize;
    fn prctl(option: i32, value: u64) -> i32;
    fn execv(path: *const u8, arguments: *const *const u8) -> i32;
}

const WALL: i32 = 0x4000_0000;
const PR_SET_PDEATHSIG: i32 = 1;
const SIGKILL: i32 = 9;

/// Waits for a change of one process.
fn change(tracee: Tracee) -> TraceeStop {
    let mut status = 0;
    // SAFETY: the status is a local number.
    assert_eq!(unsafe { waitpid(tracee.tid() as i32, &mut status, WALL) }, tracee.tid() as i32);
    TraceeStop::of(status as u32)
}

fn status_of(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: the status is a local number.
    assert_eq!(unsafe { waitpid(pid, &mut status, WALL) }, pid);
    status
}

/// A child that waits for a byte, forks, and ends with what `parent` says of the grandchild's
/// number; the grandchild ends with `child`'s word.
fn forking_child(parent: fn(i32) -> i32, child: fn() -> i32) -> (i32, i32) {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two numbers.
    assert_eq!(unsafe { pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: the child makes system calls only.
    match unsafe { fork() } {
        0 => {
            let mut byte = 0;
            // SAFETY: the child makes system calls only; `byte` is a local variable.
            unsafe {
                prctl(PR_SET_PDEATHSIG, SIGKILL as u64);
                read(ends[0], &mut byte, 1);
                let grandchild = fork();
                _exit(if grandchild == 0 { child() } else { parent(grandchild) })
            }
        }
        pid => (pid, ends[1]),
    }
}

/// Says that this machine permits no ptrace. Under `./check` that is a failure: the tests would
/// show nothing.
fn not_tried(why: impl std::fmt::Display) {
    assert!(
        std::env::var_os("SWAPTIDE_TEST_ALL").is_none(),
        "this machine permits no ptrace: {why}"
    );
    eprintln!("this machine permits no ptrace ({why}): nothing was tried");
}

fn follow(pid: i32, go: i32) -> Option<Tracee> {
    match seize(pid as u32) {
        Ok(tracee) => {
            // SAFETY: the byte is a static one.
            assert_eq!(unsafe { write(go, b"x".as_ptr(), 1) }, 1);
            Some(tracee)
        }
        Err(errno) => {
            not_tried(errno);
            // SAFETY: the child is this test's own.
            unsafe { kill(pid, SIGKILL) };
            status_of(pid);
            None
        }
    }
}

fn exit_of(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: the child is the caller's own.
    unsafe { waitpid(pid, &mut status, 0) };
    status >> 8
}

#[repr(C, align(64))]
struct Frame {
    stack: [u8; 4096],
    /// A function begins eight bytes off a multiple of sixteen, as behind a call.
    odd: u64,
    words: [AtomicU64; 2],
}

static FRAME: Frame = Frame { stack: [0; 4096], odd: 0, words: [const { AtomicU64::new(0) }; 2] };

/// Where a child is made to begin.
extern "C" fn elsewhere() -> ! {
    let [from, stack] = [&FRAME.words[0], &FRAME.words[1]].map(|word| word.load(SeqCst));
    // SAFETY: ends the process without running anything of its parent's.
    unsafe { _exit(if from != 0 && stack != 0 { 43 } else { 44 }) }
}

/// Fact 1 and 2, and what a child begins with.
#[test]
fn followed_child_starts_while_parent_stops() {
    let (pid, go) = forking_child(exit_of, || 42);
    let Some(parent) = follow(pid, go) else { return };
    assert_eq!(change(parent), TraceeStop::Forked);
    let child = parent.child().expect("its number");
    assert_eq!(change(child), TraceeStop::Still);
    assert!(FRAME.odd == 0 && FRAME.stack.iter().all(|byte| *byte == 0));
    let entry = elsewhere as *const () as u64;
    // SAFETY: it is at its first stop; what is at `entry` makes one system call.
    unsafe { child.begin_at(entry, FRAME.words.as_ptr() as u64) }.expect("registers");
    child.release(0).expect("the child continues");
    // The parent does not wait for its child before it is detached.
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it is there");
    assert!(
        state().rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('t')),
        "{}",
        state()
    );
    parent.release(0).expect("the parent continues");
    assert_eq!(status_of(pid), 43 << 8, "the parent ends with its child's word");
}

/// Fact 4. The program runs as without a tracer.
#[test]
fn a_followed_thread_stops_after_exec() {
    let (pid, go) = forking_child(
        |grandchild| {
            exit_of(grandchild);
            let word = |text: &'static [u8]| text.as_ptr();
            let arguments = [word(b"sh\0"), word(b"-c\0"), word(b"exit 45\0"), std::ptr::null()];
            // SAFETY: all words end with a zero, and the list with a null.
            unsafe { execv(word(b"/bin/sh\0"), arguments.as_ptr()) }
        },
        || 42,
    );
    let Some(parent) = follow(pid, go) else { return };
    assert_eq!(change(parent), TraceeStop::Forked);
    let child = parent.child().expect("its number");
    assert_eq!(change(child), TraceeStop::Still);
    child.release(0).expect("the child continues");
    parent.go_on(0).expect("the parent continues");
    let executed = loop {
        match change(parent) {
            // Of its child's end.
            TraceeStop::Signal(signal) => parent.go_on(signal).expect("the parent continues"),
            other => break other,
        }
    };
    assert_eq!(executed, TraceeStop::Executed);
    parent.release(0).expect("the program begins");
    assert_eq!(status_of(pid), 45 << 8);
}

/// A child that nothing is done to continues where fork(2) returns.
#[test]
fn a_child_that_is_let_go_knows_nothing_of_it() {
    let (pid, go) = forking_child(exit_of, || 42);
    let Some(parent) = follow(pid, go) else { return };
    assert_eq!(change(parent), TraceeStop::Forked);
    let child = parent.child().expect("its number");
    assert_eq!(change(child), TraceeStop::Still);
    child.release(0).expect("the child continues");
    parent.release(0).expect("the parent continues");
    assert_eq!(status_of(pid), 42 << 8);
}

/// Fact 3: the tracer may be killed at any moment.
#[test]
fn both_are_killed_with_the_tracer() {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two numbers.
    assert_eq!(unsafe { pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: the child makes system calls only.
    let follower = unsafe { fork() };
    if follower == 0 {
        let (pid, go) = forking_child(|_| 0, || 42);
        let mut numbers = [0u32; 2];
        if let Ok(parent) = seize(pid as u32) {
            let mut status = 0;
            // SAFETY: numbers of this process's own, and a static byte.
            unsafe {
                write(go, b"x".as_ptr(), 1);
                waitpid(pid, &mut status, WALL);
            }
            if TraceeStop::of(status as u32) == TraceeStop::Forked {
                numbers = [pid as u32, parent.child().map_or(0, Tracee::tid)];
            }
        }
        // SAFETY: the kernel reads 8 bytes of a local array.
        unsafe {
            write(ends[1], numbers.as_ptr().cast(), 8);
            _exit(0)
        }
    }
    let mut numbers = [0u32; 2];
    // SAFETY: the numbers are local ones.
    assert_eq!(unsafe { read(ends[0], numbers.as_mut_ptr().cast(), 8) }, 8);
    assert_eq!(status_of(follower), 0);
    if numbers[0] == 0 {
        not_tried("the child could not be seized");
        return;
    }
    assert_ne!(numbers[1], 0, "a child was made");
    let lives =
        |pid: u32| swaptide_sys::process::proc_info(pid).is_some_and(|process| !process.zombie);
    for _ in 0..500 {
        if !numbers.iter().any(|pid| lives(*pid)) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("{numbers:?} continue without their tracer");
}
