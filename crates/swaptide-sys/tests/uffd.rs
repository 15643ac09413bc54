//! What the engine relies on, tried on the running kernel: moving pages out and in, how the calls
//! fail, how a range's coverage shows, which events come. Needs a kernel with UFFDIO_MOVE (6.8) and
//! the permission to use userfaultfd; without them these tests fail rather than pass unseen.

mod common;

use std::time::Duration;

use common::in_child;
use rustix::fd::AsFd;
use swaptide_sys::mem::{self, Advice, Mapping};
use swaptide_sys::sock::poll_readable;
use swaptide_sys::uffd::{Coverage, Event, Features, Message, MoveFlags, Progress, Uffd};
use swaptide_sys::{Errno, PAGE_SIZE, VirtAddr, VirtRange};

const HOLES: MoveFlags = MoveFlags { dont_wake: false, allow_src_holes: true };
const PLAIN: MoveFlags = MoveFlags { dont_wake: false, allow_src_holes: false };

fn all_done(bytes: usize) -> Progress {
    Progress { done: bytes, error: None }
}

/// `pages` pages of ordinary memory, each filled with its number plus one.
fn filled(pages: usize) -> Mapping {
    let map = Mapping::reserve(pages * PAGE_SIZE).unwrap();
    for page in 0..pages {
        // SAFETY: the mapping is this test's own, and no other slice of it lives.
        unsafe { map.slice_mut(page * PAGE_SIZE, PAGE_SIZE).fill(page as u8 + 1) };
    }
    map
}

fn page(map: &Mapping, n: usize) -> VirtRange {
    pages(map, n, 1)
}

fn pages(map: &Mapping, first: usize, count: usize) -> VirtRange {
    VirtRange::from_len(map.range().start.offset(first * PAGE_SIZE), count * PAGE_SIZE)
}

fn byte(addr: VirtAddr) -> u8 {
    // SAFETY: every address passed here lies in memory the test has mapped.
    unsafe { addr.as_ptr::<u8>().read_volatile() }
}

/// The application's descriptor (with events) and the staging one (without), as the engine has
/// them. To be declared after the memory it serves, and so closed before: unmapping registered
/// memory waits for the reader of events, which a test that ends, or fails, does not have.
fn two() -> (Uffd, Uffd) {
    let events = Features::EVENT_FORK
        | Features::EVENT_REMAP
        | Features::EVENT_REMOVE
        | Features::EVENT_UNMAP;
    (
        Uffd::open(events | Features::MOVE | Features::THREAD_ID, true).unwrap(),
        Uffd::open(Features::MOVE, true).unwrap(),
    )
}

/// Waits for the next message.
fn next_event(uffd: &Uffd) -> Event {
    let ready = poll_readable(&[uffd.as_fd()], Some(Duration::from_secs(90))).unwrap();
    assert_eq!(ready, 1, "no event came");
    let mut buf = Message::buffer::<1>();
    assert_eq!(uffd.read(&mut buf).unwrap(), 1);
    buf[0].decode()
}

#[test]
fn probe_reports_what_the_engine_needs() {
    in_child("probe_reports_what_the_engine_needs", || {
        let have = Uffd::probe().unwrap();
        let need = Features::MOVE | Features::POISON | Features::EVENT_FORK | Features::EVENT_REMAP;
        assert!(have.contains(need), "{have:?}");
        assert_eq!(Uffd::probe_user_mode_only().unwrap(), have);
        let error = Uffd::open(Features::from_bits_retain(1 << 60), true).unwrap_err();
        assert!(error.to_string().contains("bit60"), "{error}");
        let (app, _) = two();
        assert_eq!(app.read(&mut Message::buffer::<2>()), Err(Errno::AGAIN));
    });
}

#[test]
fn pages_go_out_and_come_back() {
    in_child("pages_go_out_and_come_back", || {
        let (a, s) = (filled(64), Mapping::reserve(64 * PAGE_SIZE).unwrap());
        let (app, staging) = two();
        app.register_missing(a.range()).unwrap();
        staging.register_missing(s.range()).unwrap();
        for _ in 0..3 {
            // SAFETY: both mappings are this test's own; nothing reads `a` while its pages are
            // away.
            let out =
                unsafe { staging.move_pages(s.range().start, a.range().start, a.len(), PLAIN) };
            assert_eq!(out, all_done(a.len()));
            assert_eq!(byte(page(&s, 9).start), 10);
            // SAFETY: both mappings are this test's own, and nothing reads pages that are away.
            let back = unsafe { app.move_pages(a.range().start, s.range().start, a.len(), PLAIN) };
            assert_eq!(back, all_done(a.len()));
            (0..64).for_each(|n| assert_eq!(byte(page(&a, n).start), n as u8 + 1));
        }
    });
}

#[test]
fn a_touch_waits_until_it_is_answered() {
    in_child("a_touch_waits_until_it_is_answered", || {
        let (a, s) = (filled(4), Mapping::reserve(4 * PAGE_SIZE).unwrap());
        let (app, staging) = two();
        app.register_missing(a.range()).unwrap();
        staging.register_missing(s.range()).unwrap();
        // SAFETY: both mappings are this test's own.
        let out = unsafe { staging.move_pages(s.range().start, a.range().start, a.len(), PLAIN) };
        assert_eq!(out, all_done(a.len()));
        std::thread::scope(|scope| {
            let want = page(&a, 2);
            let toucher = scope.spawn(move || {
                let tid = swaptide_sys::thread::gettid().0;
                // SAFETY: mapped memory; the write waits for the page.
                unsafe { want.start.offset(5).as_ptr::<u8>().write_volatile(99) };
                tid
            });
            let Event::Fault { addr, tid, write, wp } = next_event(&app) else {
                panic!("not a fault")
            };
            assert_eq!((addr, write, wp), (want.start, true, false));
            let flags = MoveFlags { dont_wake: true, ..PLAIN };
            // SAFETY: the waiting thread is the only user of the page.
            let back = unsafe { app.move_pages(want.start, page(&s, 2).start, PAGE_SIZE, flags) };
            assert_eq!(back, all_done(PAGE_SIZE));
            app.wake(want).unwrap();
            assert_eq!(toucher.join().unwrap(), tid);
            assert_eq!((byte(want.start), byte(want.start.offset(5))), (3, 99));
        });
    });
}

#[test]
fn holes_and_existing_pages_stop_a_move() {
    in_child("holes_and_existing_pages_stop_a_move", || {
        let (a, s) = (filled(8), Mapping::reserve(8 * PAGE_SIZE).unwrap());
        let (app, staging) = two();
        a.discard(3 * PAGE_SIZE, PAGE_SIZE).unwrap();
        app.register_missing(a.range()).unwrap();
        staging.register_missing(s.range()).unwrap();
        // SAFETY: both mappings are this test's own; so for all moves of this test.
        let out = unsafe { staging.move_pages(s.range().start, a.range().start, a.len(), PLAIN) };
        assert_eq!(
            out,
            Progress { done: 3 * PAGE_SIZE, error: Some(Errno::AGAIN) },
            "it stops at the hole"
        );
        // SAFETY: both mappings are this test's own, and nothing reads pages that are away.
        let out = unsafe {
            staging.move_pages(page(&s, 3).start, page(&a, 3).start, 5 * PAGE_SIZE, PLAIN)
        };
        assert_eq!(
            out,
            Progress { done: 0, error: Some(Errno::NOENT) },
            "and says why when asked again"
        );
        // SAFETY: both mappings are this test's own, and nothing reads pages that are away.
        let out = unsafe {
            staging.move_pages(page(&s, 3).start, page(&a, 3).start, 5 * PAGE_SIZE, HOLES)
        };
        assert_eq!(out, all_done(5 * PAGE_SIZE));

        // Page 2 exists at the destination when the eight come back.
        assert_eq!(app.zero_pages(page(&a, 2), false), all_done(PAGE_SIZE));
        // SAFETY: both mappings are this test's own, and nothing reads pages that are away.
        let back = unsafe { app.move_pages(a.range().start, s.range().start, a.len(), HOLES) };
        assert_eq!(back, Progress { done: 2 * PAGE_SIZE, error: Some(Errno::AGAIN) });
        // SAFETY: both mappings are this test's own, and nothing reads pages that are away.
        let back =
            unsafe { app.move_pages(page(&a, 2).start, page(&s, 2).start, PAGE_SIZE, HOLES) };
        assert_eq!(back, Progress { done: 0, error: Some(Errno::EXIST) });
        assert_eq!(
            (byte(page(&a, 1).start), byte(page(&a, 2).start), byte(page(&s, 2).start)),
            (2, 0, 3)
        );
    });
}

#[test]
fn copies_zeros_and_poison() {
    in_child("copies_zeros_and_poison", || {
        let app = Uffd::open(Features::POISON, true).unwrap();
        let (a, source) = (Mapping::reserve(8 * PAGE_SIZE).unwrap(), filled(8));
        app.register_missing_wp(a.range()).unwrap();
        // SAFETY: the source is present memory of this test, the destination its own.
        let copied = unsafe {
            app.copy_pages(page(&a, 0).start, source.as_ptr(), 4 * PAGE_SIZE, false, false)
        };
        assert_eq!(copied, all_done(4 * PAGE_SIZE));
        // SAFETY: the source is present memory of this test, the destination its own.
        let copied =
            unsafe { app.copy_pages(page(&a, 3).start, source.as_ptr(), PAGE_SIZE, false, false) };
        assert_eq!(copied, Progress { done: 0, error: Some(Errno::EXIST) });
        assert_eq!(app.zero_pages(pages(&a, 4, 2), true), all_done(2 * PAGE_SIZE));
        assert_eq!(app.poison(page(&a, 6)), all_done(PAGE_SIZE));
        assert_eq!((byte(page(&a, 3).start), byte(page(&a, 5).start)), (4, 0));

        app.write_protect(page(&a, 1), true).unwrap();
        std::thread::scope(|scope| {
            let addr = page(&a, 1).start;
            // SAFETY: mapped memory of this test; the write waits for the protection to go.
            scope.spawn(move || unsafe { addr.as_ptr::<u8>().write_volatile(77) });
            let Event::Fault { wp: true, write: true, addr: at, .. } = next_event(&app) else {
                panic!("no fault on a write-protected page");
            };
            assert_eq!(at, addr);
            assert_eq!(byte(addr), 2);
            app.write_protect(page(&a, 1), false).unwrap();
        });
        assert_eq!(byte(page(&a, 1).start), 77);
    });
}

#[test]
fn touching_a_poisoned_page_kills_the_process() {
    let ended = common::child_status("touching_a_poisoned_page_kills_the_process", || {
        let app = Uffd::open(Features::POISON, true).unwrap();
        let a = Mapping::reserve(PAGE_SIZE).unwrap();
        app.register_missing(a.range()).unwrap();
        assert_eq!(app.poison(a.range()), all_done(PAGE_SIZE));
        byte(a.range().start);
    });
    if let Some((status, output)) = ended {
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(status.signal(), Some(7), "SIGBUS, not {status}\n{output}");
    }
}

#[test]
fn coverage_tells_how_a_range_stands() {
    in_child("coverage_tells_how_a_range_stands", || {
        let a = filled(16);
        let (app, other) = two();
        assert_eq!(app.coverage(a.range()), Coverage::NotWhole, "not registered yet");
        app.register_missing(pages(&a, 0, 12)).unwrap();
        assert_eq!(app.coverage(pages(&a, 0, 12)), Coverage::Whole);
        assert_eq!(app.coverage(page(&a, 7)), Coverage::Whole, "pages that exist do not matter");
        a.discard(13 * PAGE_SIZE, PAGE_SIZE).unwrap();
        assert_eq!(app.coverage(pages(&a, 8, 8)), Coverage::NotWhole, "beyond the registered part");
        assert_eq!(app.coverage(page(&a, 13)), Coverage::NotWhole);
        assert_eq!(
            other.coverage(page(&a, 3)),
            Coverage::Whole,
            "the kernel does not look at whose it is"
        );
        assert_eq!(
            app.coverage(VirtRange::new(VirtAddr(0x1000), VirtAddr(0x1000))),
            Coverage::NotWhole
        );
        assert_eq!(
            app.coverage(VirtRange::from_len(page(&a, 0).start.offset(8), PAGE_SIZE)),
            Coverage::NotWhole
        );
        (0..12).for_each(|n| {
            assert_eq!(byte(page(&a, n).start), n as u8 + 1, "asking changed nothing")
        });

        // A hole in the middle: its event is unread at first.
        let hole = page(&a, 5);
        std::thread::scope(|scope| {
            // SAFETY: the page is this test's own and no longer used.
            let unmapper = scope.spawn(move || unsafe { mem::unmap(hole) });
            while poll_readable(&[app.as_fd()], Some(Duration::from_secs(90))).unwrap() == 0 {}
            assert_eq!(app.coverage(page(&a, 0)), Coverage::Changing);
            let copied = app.zero_pages(page(&a, 0), false);
            assert_eq!(
                copied,
                Progress { done: 0, error: Some(Errno::AGAIN) },
                "nor can anything be answered"
            );
            assert!(matches!(next_event(&app), Event::Unmap(r) if r == hole));
            unmapper.join().unwrap().unwrap();
        });
        assert_eq!(app.coverage(pages(&a, 0, 5)), Coverage::Whole);
        assert_eq!(app.coverage(pages(&a, 4, 2)), Coverage::NotWhole);
        assert_eq!(app.coverage(hole), Coverage::NotWhole);
        app.unregister(pages(&a, 0, 5)).unwrap();
        assert_eq!(app.coverage(page(&a, 0)), Coverage::NotWhole);
        // The mapping has a hole where other threads may have mapped something by now.
        let _ = a.into_raw();
    });
}

#[test]
fn remove_unmap_and_remap_are_reported() {
    in_child("remove_unmap_and_remap_are_reported", || {
        let a = filled(16);
        let (app, _) = two();
        app.register_missing(a.range()).unwrap();
        let whole = a.into_raw();
        let start = VirtAddr::from_ptr(whole.as_ptr());
        let part = |first: usize, n: usize| {
            VirtRange::from_len(start.offset(first * PAGE_SIZE), n * PAGE_SIZE)
        };
        let place = Mapping::reserve(64 * PAGE_SIZE).unwrap().into_raw();
        let new = VirtAddr::from_ptr(place.as_ptr());
        std::thread::scope(|scope| {
            let program = scope.spawn(move || {
                // SAFETY: both mappings are this test's own, and only this thread uses them.
                unsafe {
                    mem::advise(part(2, 3), Advice::DontNeed).unwrap();
                    mem::unmap(part(14, 2)).unwrap();
                    let flags = rustix::mm::MremapFlags::MAYMOVE;
                    let (old_len, new_len) = (14 * PAGE_SIZE, 64 * PAGE_SIZE);
                    rustix::mm::mremap_fixed(start.as_ptr(), old_len, new_len, flags, new.as_ptr())
                        .unwrap();
                }
            });
            assert!(matches!(next_event(&app), Event::Remove(r) if r == part(2, 3)));
            assert!(matches!(next_event(&app), Event::Unmap(r) if r == part(14, 2)));
            let Event::Remap { from, to, len } = next_event(&app) else { panic!("not a remap") };
            // The length is the old one: what was grown on has no pages to look after.
            assert_eq!((from, to, len), (start, new, 14 * PAGE_SIZE));
            assert!(matches!(next_event(&app), Event::Unmap(r) if r == part(0, 14)));
            program.join().unwrap();
            assert_eq!(
                app.coverage(VirtRange::from_len(new, 64 * PAGE_SIZE)),
                Coverage::Whole,
                "grown part included"
            );
            assert_eq!(byte(new), 1);
        });
    });
}

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(code: i32) -> !;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
}

/// The child reads a page that is out; the parent answers through the descriptor the fork event
/// brought. Then the child ends, and that descriptor says so.
#[test]
fn a_forked_child_is_served_through_its_own_descriptor() {
    in_child("a_forked_child_is_served_through_its_own_descriptor", || {
        let (a, s) = (filled(4), Mapping::reserve(4 * PAGE_SIZE).unwrap());
        let (app, staging) = two();
        app.register_missing(a.range()).unwrap();
        staging.register_missing(s.range()).unwrap();
        // SAFETY: both mappings are this test's own.
        let out = unsafe { staging.move_pages(s.range().start, a.range().start, a.len(), PLAIN) };
        assert_eq!(out, all_done(a.len()));
        let want = page(&a, 1);
        std::thread::scope(|scope| {
            let forker = scope.spawn(move || {
                // SAFETY: the child only reads one byte and ends.
                let pid = unsafe { fork() };
                if pid == 0 {
                    let code = byte(want.start) as i32;
                    // SAFETY: ends the child without running anything of the parent's.
                    unsafe { _exit(code) };
                }
                pid
            });
            let Event::Fork { uffd: child } = next_event(&app) else { panic!("not a fork") };
            let pid = forker.join().unwrap();
            let Event::Fault { addr, write: false, .. } = next_event(&child) else {
                panic!("no fault on a page that was read");
            };
            assert_eq!(addr, want.start);
            assert_eq!(child.coverage(want), Coverage::Whole);
            // SAFETY: the source is the staged page, present in this process.
            let copied = unsafe {
                child.copy_pages(
                    want.start,
                    page(&s, 1).start.as_ptr::<u8>(),
                    PAGE_SIZE,
                    false,
                    false,
                )
            };
            assert_eq!(copied, all_done(PAGE_SIZE));
            let mut status = 0;
            // SAFETY: `status` is a valid place.
            assert_eq!(unsafe { waitpid(pid, &mut status, 0) }, pid);
            assert_eq!(status, 2 << 8, "the child exited with the byte it read");
            assert_eq!(child.coverage(want), Coverage::Gone);
        });
    });
}

/// A fork descriptor that was not decoded is closed with its message, not leaked.
#[test]
fn an_undecoded_fork_message_closes_its_descriptor() {
    in_child("an_undecoded_fork_message_closes_its_descriptor", || {
        let app = Uffd::open(Features::EVENT_FORK, true).unwrap();
        let a = filled(1);
        app.register_missing(a.range()).unwrap();
        let open_fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = open_fds();
        std::thread::scope(|scope| {
            let forker = scope.spawn(|| {
                // SAFETY: the child ends at once.
                let pid = unsafe { fork() };
                if pid == 0 {
                    // SAFETY: ends the child without running anything of the parent's.
                    unsafe { _exit(0) };
                }
                // SAFETY: no status is asked for.
                unsafe { waitpid(pid, std::ptr::null_mut(), 0) }
            });
            poll_readable(&[app.as_fd()], Some(Duration::from_secs(90))).unwrap();
            let mut buf = Message::buffer::<4>();
            assert_eq!(app.read(&mut buf).unwrap(), 1);
            assert!(forker.join().unwrap() > 0);
            assert_eq!(open_fds(), before + 1);
        });
        assert_eq!(open_fds(), before);
    });
}

/// `EBUSY` is what keeps pages shared with a forked child where they are, and populating fixes it.
#[test]
fn shared_pages_refuse_to_move_until_they_are_private_again() {
    in_child("shared_pages_refuse_to_move_until_they_are_private_again", || {
        let staging = Uffd::open(Features::MOVE, true).unwrap();
        let (a, s) = (filled(2), Mapping::reserve(2 * PAGE_SIZE).unwrap());
        staging.register_missing(s.range()).unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        // SAFETY: the child waits for the pipe's end and ends.
        let pid = unsafe { fork() };
        if pid == 0 {
            drop(writer);
            let _ = std::io::Read::read(&mut reader, &mut [0]);
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { _exit(0) };
        }
        let out = |n: usize| {
            // SAFETY: both mappings are this test's own.
            unsafe { staging.move_pages(page(&s, n).start, page(&a, n).start, PAGE_SIZE, PLAIN) }
        };
        assert_eq!(out(0), Progress { done: 0, error: Some(Errno::BUSY) });
        drop(writer);
        // SAFETY: no status is asked for.
        unsafe { waitpid(pid, std::ptr::null_mut(), 0) };
        assert_eq!(
            out(1).error,
            Some(Errno::BUSY),
            "the child's end alone does not make a page exclusive"
        );
        a.populate_write(0, 2 * PAGE_SIZE).unwrap();
        assert_eq!((out(0), out(1)), (all_done(PAGE_SIZE), all_done(PAGE_SIZE)));
        assert_eq!(byte(page(&s, 1).start), 2);
    });
}
