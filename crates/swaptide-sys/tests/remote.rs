//! What putting calls into a stopped thread relies on, tried on the running kernel (the facts of
//! `swaptide_sys::remote`). Each test stops a child of its own.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

use linux_raw_sys::general::{__NR_getpid, __NR_getppid, __NR_mmap, __NR_munmap, __NR_poll};
use swaptide_sys::Errno;
use swaptide_sys::ptrace::TraceeStop;
use swaptide_sys::remote::{Remote, Seized, is_stopped_here, is_traced_here, stop_of};

unsafe extern "C" {
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
}
const WALL: i32 = 0x4000_0000;

/// A program that says a word when it has begun.
fn program(code: &str) -> (Child, BufReader<ChildStdout>) {
    program_with(code, "")
}

fn program_with(code: &str, argument: &str) -> (Child, BufReader<ChildStdout>) {
    let mut command = Command::new("python3");
    let mut child =
        command.args(["-c", code, argument]).stdout(Stdio::piped()).spawn().expect("python3");
    let mut lines = BufReader::new(child.stdout.take().expect("its output"));
    assert_eq!(line(&mut lines), "begun");
    (child, lines)
}

fn line(lines: &mut BufReader<ChildStdout>) -> String {
    let mut text = String::new();
    lines.read_line(&mut text).expect("a line");
    text.trim().to_owned()
}

fn stop(pid: u32) -> Remote {
    let seized = Seized::seize(pid).expect("it is this test's child");
    until_still(&seized, pid).stopped().expect("a state")
}

fn until_still(seized: &Seized, pid: u32) -> &Seized {
    seized.interrupt().expect("it runs");
    loop {
        let mut status = 0;
        // SAFETY: the status is a local number.
        assert_eq!(unsafe { waitpid(pid as i32, &mut status, WALL) }, pid as i32);
        assert_eq!(stop_of(pid), Some(TraceeStop::of(status as u32)), "as the kernel says");
        match TraceeStop::of(status as u32) {
            TraceeStop::Still => return seized,
            TraceeStop::Signal(signal) => seized.go_on(signal).expect("it goes on"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_stopped_thread_makes_calls_and_continues_its_own() {
    // A sleep, a read that waits, and a wait for a child: each goes on as if nothing had been.
    for (code, wanted) in [
        ("import time; print('begun', flush=True); time.sleep(0.7); print('slept')", "slept"),
        (
            "import os,threading,time; r,w=os.pipe(); \
             threading.Timer(0.7, lambda: os.write(w, b'x')).start(); \
             print('begun', flush=True); print(os.read(r, 1))",
            "b'x'",
        ),
        (
            "import os,select,time; print('begun', flush=True); t=time.time(); \
             select.poll().poll(700); print(0.69 < time.time()-t < 5)",
            "True",
        ),
    ] {
        let (mut child, mut lines) = program(code);
        std::thread::sleep(std::time::Duration::from_millis(200));
        let remote = stop(child.id());
        // SAFETY: these calls change nothing of the program's.
        unsafe {
            assert_eq!(remote.call(__NR_getpid, [0; 6]), Ok(u64::from(child.id())));
            let parent = u64::from(std::process::id());
            assert_eq!(remote.call(__NR_getppid, [0; 6]), Ok(parent));
            let at = remote.call(__NR_mmap, [0, 8192, 3, 0x22, u64::MAX, 0]).expect("a mapping");
            remote.write(at + 100, b"swaptide").expect("memory");
            let mut text = [0; 8];
            remote.read(at + 100, &mut text).expect("memory");
            assert_eq!(&text, b"swaptide");
            assert_eq!(remote.call(__NR_munmap, [at, 8192, 0, 0, 0, 0]), Ok(0));
            assert_eq!(remote.write(at, b"x"), Err(Errno::FAULT));
            assert_eq!(remote.call(__NR_munmap, [1, 1, 0, 0, 0, 0]), Err(Errno::INVAL));
        }
        remote.release().expect("it lives");
        assert_eq!(line(&mut lines), wanted);
        assert!(child.wait().expect("it ends").success(), "{code}");
    }
}

/// A program whose wait is a call of its own: libc's functions and Python's begin again.
const WAITS: &str = "
import ctypes, os, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
if sys.argv[1:] == ['handled']:
    libc.signal(signal.SIGUSR1, ctypes.cast(libc.abs, ctypes.c_void_p))
    libc.siginterrupt(signal.SIGUSR1, 1)
room = ctypes.create_string_buffer(64)
epoll = libc.syscall(291, 0)
pair = socket.socketpair()
pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('ll', 0, 700000))
mask = ctypes.byref(ctypes.c_ulonglong(1 << signal.SIGUSR2 - 1))
time = (ctypes.c_long * 2)(0, 700000000)
libc.pthread_sigmask(0, mask, None)
print('begun', flush=True)
for call in ((232, epoll, room, 1, 700), (128, mask, None, time, 8),
             (45, pair[0].fileno(), room, 8, 0, None, None), (0, pair[0].fileno(), room, 8)):
    ctypes.set_errno(0)
    result = libc.syscall(*call)
    print(result, ctypes.get_errno(), flush=True)
";

#[test]
fn waits_that_would_be_interrupted_begin_again() {
    const AGAIN: &str = "-1 11";
    for with_remote in [true, false] {
        let (mut child, mut lines) = program(WAITS);
        for wanted in ["0 0", AGAIN, AGAIN, AGAIN] {
            std::thread::sleep(std::time::Duration::from_millis(200));
            if with_remote {
                let remote = stop(child.id());
                // SAFETY: the call changes nothing.
                let pid = unsafe { remote.call(__NR_getpid, [0; 6]) };
                assert_eq!(pid, Ok(u64::from(child.id())));
                remote.release().expect("it lives");
            } else {
                until_still(&Seized::seize(child.id()).expect("a child"), child.id()).release();
            }
            assert_eq!(line(&mut lines), wanted);
        }
        assert!(child.wait().expect("it ends").success());
    }
}

#[test]
fn the_tracer_alone_is_told_what_a_thread_has_stopped_for() {
    let mut child = Command::new("sleep").arg("600").spawn().expect("sleep");
    let pid = child.id();
    let stopped = || {
        let mut status = 0;
        // SAFETY: the status is a local number.
        assert_eq!(unsafe { waitpid(pid as i32, &mut status, WALL) }, pid as i32);
        let elsewhere = std::thread::spawn(move || (is_stopped_here(pid), stop_of(pid)));
        assert_eq!(elsewhere.join().expect("it ends"), (false, None), "another thread traces it");
        assert!(is_stopped_here(pid));
        assert_eq!(stop_of(pid), Some(TraceeStop::of(status as u32)));
        TraceeStop::of(status as u32)
    };
    assert_eq!((is_stopped_here(pid), stop_of(pid)), (false, None));
    let seized = Seized::seize_until_exec(pid).expect("a child");
    assert_eq!((is_stopped_here(pid), stop_of(pid)), (false, None), "it runs");
    let killed = Command::new("kill").args(["-STOP", &pid.to_string()]).status();
    assert!(killed.expect("kill").success());
    let mut stop = stopped();
    if stop == TraceeStop::Executed {
        // It was not yet sleep.
        seized.go_on(0).expect("it lives");
        stop = stopped();
    }
    let TraceeStop::Signal(signal) = stop else { panic!("{stop:?}") };
    seized.go_on(signal).expect("it lives");
    assert_eq!(stopped(), TraceeStop::Stopped);
    seized.release();
    assert_eq!((is_stopped_here(pid), stop_of(pid)), (false, None), "it is traced no more");
    child.kill().expect("kill");
    child.wait().expect("wait");
}

#[test]
fn a_signal_that_is_ignored_interrupts_none() {
    let (mut child, mut lines) = program(WAITS);
    for wanted in ["0 0", "-1 11", "-1 11", "-1 11"] {
        std::thread::sleep(std::time::Duration::from_millis(200));
        let seized = Seized::seize(child.id()).expect("a child");
        let killed = Command::new("kill").args(["-URG", &child.id().to_string()]).status();
        assert!(killed.expect("kill").success());
        until_still(&seized, child.id()).release();
        assert_eq!(line(&mut lines), wanted);
    }
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn a_handler_interrupts_them_all_the_same() {
    let (mut child, mut lines) = program_with(WAITS, "handled");
    for wanted in ["-1 4", "-1 4", "-1 4", "-1 4"] {
        std::thread::sleep(std::time::Duration::from_millis(200));
        let seized = Seized::seize(child.id()).expect("a child");
        let still = until_still(&seized, child.id());
        let killed = Command::new("kill").args(["-USR1", &child.id().to_string()]).status();
        assert!(killed.expect("kill").success());
        still.release();
        assert_eq!(line(&mut lines), wanted);
    }
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn signals_that_arrive_meanwhile_come_afterwards() {
    let (mut child, mut lines) = program(
        "import signal,time\n\
         signal.signal(signal.SIGUSR1, lambda *_: print('signal', flush=True))\n\
         print('begun', flush=True)\n\
         time.sleep(1)\n\
         print('slept')",
    );
    let remote = stop(child.id());
    let killed = Command::new("kill").args(["-USR1", &child.id().to_string()]).status();
    assert!(killed.expect("kill").success());
    // SAFETY: the call changes nothing.
    assert_eq!(unsafe { remote.call(__NR_getpid, [0; 6]) }, Ok(u64::from(child.id())));
    remote.release().expect("it lives");
    assert_eq!((line(&mut lines), line(&mut lines)), ("signal".into(), "slept".into()));
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn a_call_that_takes_long_is_not_waited_for() {
    let (mut child, mut lines) =
        program("import time; print('begun', flush=True); time.sleep(1.5); print('slept')");
    let remote = stop(child.id());
    let wait_of = |millis| [0, 0, millis, 0, 0, 0];
    // SAFETY: the calls change nothing.
    unsafe {
        assert_eq!(remote.call(__NR_poll, wait_of(60_000)), Err(Errno::TIMEDOUT));
        assert!(remote.is_late());
        assert_eq!(
            remote.call(__NR_getpid, [0; 6]),
            Err(Errno::TIMEDOUT),
            "it is inside the other"
        );
    }
    // It is told to stop; once that is reported, it is let go.
    assert_eq!(remote.release(), Err(Errno::TIMEDOUT));
    assert!(remote.is_late());
    let mut status = 0;
    // SAFETY: the status is a local number.
    assert_eq!(unsafe { waitpid(child.id() as i32, &mut status, WALL) }, child.id() as i32);
    remote.release().expect("it lives");
    assert!(!remote.is_late());
    assert_eq!(line(&mut lines), "slept");
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn a_program_that_a_second_thread_has_executed_is_not_traced() {
    let (mut child, mut lines) = program(
        "import os,threading,time\n\
         def other():\n\
         \x20   time.sleep(0.5)\n\
         \x20   os.execvp('sh', ['sh', '-c', 'echo executed; sleep 1; echo done'])\n\
         threading.Thread(target=other).start()\n\
         print('begun', flush=True)\n\
         time.sleep(60)",
    );
    let remote = stop(child.id());
    assert!(is_traced_here(child.id()));
    // The first thread is stopped meanwhile; the kernel ends it.
    assert_eq!(line(&mut lines), "executed");
    assert!(!is_traced_here(child.id()));
    // SAFETY: nothing is called: the thread is gone.
    assert_eq!(unsafe { remote.call(__NR_getpid, [0; 6]) }, Err(Errno::SRCH));
    assert_eq!(remote.release(), Err(Errno::SRCH));
    assert_eq!(line(&mut lines), "done");
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn the_end_of_a_process_is_left_for_its_parent() {
    let (mut child, _lines) = program("import time; print('begun', flush=True); time.sleep(60)");
    let remote = stop(child.id());
    child.kill().expect("kill");
    // SAFETY: the call changes nothing.
    assert_eq!(unsafe { remote.call(__NR_getpid, [0; 6]) }, Err(Errno::SRCH));
    assert_eq!(remote.release(), Err(Errno::SRCH));
    let status = child.wait().expect("its status");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
}
