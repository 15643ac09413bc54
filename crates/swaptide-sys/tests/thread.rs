//! Engine threads on the running kernel, each test in a process of its own.

mod common;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use common::{child_status, in_child};
use swaptide_sys::engine_threads::is_of_engine;
use swaptide_sys::lock::futex;
use swaptide_sys::{Errno, VirtAddr, mem, thread};

const STACK: usize = 64 << 10;

/// What the thread found, and the word it sets when done.
static RESULTS: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
static DONE: AtomicU32 = AtomicU32::new(0);

fn wait_done() {
    while DONE.load(Ordering::Acquire) == 0 {
        futex::wait(&DONE, 0, Some(Duration::from_secs(10)), futex::Scope::Private);
    }
}

fn done() {
    DONE.store(1, Ordering::Release);
    futex::wake(&DONE, 1, futex::Scope::Private);
}

unsafe extern "C" {
    fn __errno_location() -> *mut i32;
    fn close(fd: i32) -> i32;
}

fn signal_mask(tid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with("SigBlk:")).unwrap();
    u64::from_str_radix(line[7..].trim(), 16).unwrap()
}

#[test]
fn runs_on_its_own_stack_and_thread_locals() {
    extern "C" fn entry(arg: usize) {
        thread::set_name(c"tide-test");
        RESULTS[0].store(arg as u64, Ordering::Relaxed);
        RESULTS[1].store((&raw const arg) as u64, Ordering::Relaxed);
        // SAFETY: a failing libc call writes errno, which must be this thread's own.
        unsafe {
            assert_eq!(close(-1), -1);
            RESULTS[2].store(__errno_location() as u64, Ordering::Relaxed);
            RESULTS[3].store(*__errno_location() as u64, Ordering::Relaxed);
        }
        done();
        thread::sleep(Duration::from_secs(600));
    }
    in_child("runs_on_its_own_stack_and_thread_locals", || {
        // SAFETY: errno of this thread.
        unsafe { *__errno_location() = 12345 };
        let before = signal_mask(thread::gettid().0);
        // SAFETY: the entry touches its own stack, statics and errno only.
        let tid = unsafe { thread::spawn_engine_thread(STACK, entry, 4242) }.unwrap();
        wait_done();
        let [arg, stack, errno_at, errno] = RESULTS.each_ref().map(|r| r.load(Ordering::Relaxed));
        assert_eq!((arg, errno), (4242, Errno::BADF.raw_os_error() as u64));
        // SAFETY: errno of this thread.
        assert_eq!(unsafe { *__errno_location() }, 12345, "the creator's errno is untouched");
        let mut owned = 0;
        mem::own_ranges(|r| {
            owned +=
                [stack, errno_at].iter().filter(|&&at| r.contains(VirtAddr(at as usize))).count();
        });
        assert_eq!(owned, 2, "stack and thread-locals lie in memory known as the engine's");
        assert!(is_of_engine(tid) && !is_of_engine(thread::gettid()));
        // Kill and stop cannot be blocked: bits 8 and 18.
        assert_eq!(signal_mask(tid.0), !(1 << 8 | 1 << 18), "every signal is blocked there");
        assert_eq!(signal_mask(thread::gettid().0), before, "and none more here");
        let comm = std::fs::read_to_string(format!("/proc/self/task/{tid}/comm")).unwrap();
        assert_eq!(comm.trim(), "tide-test");
    });
}

#[test]
fn ends_when_its_entry_returns() {
    extern "C" fn entry(arg: usize) {
        if arg == 1 {
            thread::exit_thread();
        }
    }
    in_child("ends_when_its_entry_returns", || {
        for number in 0..40 {
            // SAFETY: the entry does nothing.
            let tid = unsafe { thread::spawn_engine_thread(STACK, entry, number % 2) }.unwrap();
            let task = format!("/proc/self/task/{tid}");
            while std::path::Path::new(&task).exists() {
                thread::yield_now();
            }
            assert!(!is_of_engine(tid), "its id may be a program's from now on, in round {number}");
        }
    });
}

#[test]
fn a_descriptor_table_of_its_own() {
    extern "C" fn entry(keep: usize) {
        let result = thread::unshare_files_and_close_all(&[keep as i32]);
        RESULTS[0].store(result.is_ok() as u64, Ordering::Relaxed);
        let open = (0..1024).filter(|&fd| {
            // SAFETY: borrowed for one call; a closed number only gives an error.
            let fd = unsafe { rustix::fd::BorrowedFd::borrow_raw(fd) };
            rustix::io::fcntl_getfd(fd).is_ok()
        });
        RESULTS[1].store(open.fold(0, |sum, fd| sum * 1024 + fd as u64), Ordering::Relaxed);
        done();
    }
    in_child("a_descriptor_table_of_its_own", || {
        let (_low, keep, _high) = (
            std::io::pipe().unwrap(),
            std::fs::File::open("/dev/null").unwrap(),
            std::io::pipe().unwrap(),
        );
        let keep = std::os::fd::AsRawFd::as_raw_fd(&keep);
        let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = count();
        // SAFETY: the entry works on descriptors of its own table.
        unsafe { thread::spawn_engine_thread(STACK, entry, keep as usize) }.unwrap();
        wait_done();
        assert_eq!(RESULTS[0].load(Ordering::Relaxed), 1);
        assert_eq!(
            RESULTS[1].load(Ordering::Relaxed),
            keep as u64,
            "only the kept one is open there"
        );
        assert_eq!(count(), before, "nothing was closed here");
    });
}

#[test]
fn abort_says_why_and_dies_past_handlers() {
    let ended = child_status("abort_says_why_and_dies_past_handlers", || {
        extern "C" fn entry(_: usize) {
            thread::abort_with(&[b"swaptide: ", b"test reason ", &[b'x'; 2000]]);
        }
        // SAFETY: the entry ends the process.
        unsafe { thread::spawn_engine_thread(STACK, entry, 0) }.unwrap();
        thread::sleep(Duration::from_secs(600));
    });
    if let Some((status, output)) = ended {
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(status.signal(), Some(6), "{status}");
        assert!(output.contains("swaptide: test reason xxx"), "{output}");
    }
}

#[test]
fn clocks_go_forward() {
    let start = thread::now();
    thread::sleep(Duration::from_millis(10));
    assert!(thread::now().since(start) >= Duration::from_millis(10));
    assert_eq!(start.since(thread::now()), Duration::ZERO);
    let cpu = thread::thread_cpu_time();
    while thread::thread_cpu_time() == cpu {}
    assert_eq!(thread::getpid().0, std::process::id());
    assert_eq!(thread::kill(thread::Pid(u32::MAX >> 1), 0), Err(Errno::SRCH));
}
