//! Pagers and processes that end, stop, or are made past libc.

use super::*;

pub(super) fn a_killed_pager() {
    for (limit, swapped) in [(512 * MIB, false), (16 * MIB, true)] {
        let pager = Pager::start(limit, None);
        let name = pager.name;
        // SAFETY: this process has one thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let region = SharedRegion::create(name, 32 << 20).expect("a region");
            let words = Words::of(&region);
            words.fill();
            // SAFETY: its grandchild shares the region.
            let grandchild = unsafe { libc::fork() };
            if grandchild == 0 {
                forked(name).expect("a guard");
                words.word(0, 7).store(1, SeqCst);
            }
            until("the grandchild is guarded", || words.word(0, 7).load(SeqCst) == 1);
            // SAFETY: the pager is a process that this test started.
            unsafe { libc::kill(pager.process.id() as i32, libc::SIGKILL) };
            std::thread::sleep(Duration::from_millis(100));
            words.check_all();
            if grandchild != 0 && !swapped {
                assert_eq!(wait_for(grandchild), 0, "nothing was lost for the child either");
            }
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) }
        }
        let status = std::process::ExitStatus::from_raw(wait_for(child));
        if swapped {
            assert_eq!(
                status.signal(),
                Some(libc::SIGABRT),
                "stopped rather than given zeros: {status}"
            );
        } else {
            assert!(
                status.success(),
                "nothing was out: the memory is the kernel's again; {status}"
            );
        }
    }
}

pub(super) fn a_raw_clone() {
    let (host, region) = start(16 * MIB, 24 * MIB);
    let words = Words::of(&region);
    words.fill();
    join(vec![spawn(&host, &region, "raw", 0), spawn(&host, &region, "hammer", 1)]);
    words.check_all();
}

/// A child without a guard is not known by its number, and gives up what is out.
pub(super) fn a_raw_clone_gives_up() {
    let (host, region) = start(512 * MIB, 24 * MIB);
    let words = Words::of(&region);
    words.fill();
    let pages = words.pages as u64;
    assert!(region.say(0, region.len(), Say::PageOut));
    until("all goes out", || host.out() == pages);
    // SAFETY: the child uses no lock that the guard's thread could hold.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
    if child == 0 {
        let at = region.as_ptr().as_ptr() as usize;
        let done = advise(host.name.as_bytes(), at, 8 * PAGE, ADVICE_REMOVE);
        let zeros = (0..8 * WORDS).all(|at| words.word(at / WORDS, at % WORDS).load(SeqCst) == 0);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(done != Some(AdviceOutcome::Taken) || !zeros)) }
    }
    assert_eq!(wait_for(child), 0);
    assert_eq!(words.word(7, 100).load(SeqCst), 0, "for its parent as well");
    (8..words.pages).for_each(|page| words.check(page));
}

/// A child without a guard, and whose mappings have changed, touches what is lost.
pub(super) fn a_raw_clone_reads_no_zeros() {
    let path = std::env::temp_dir().join(format!("swaptide-lost-{}", std::process::id()));
    let host = Pager::start(16 * MIB, Some(&path));
    let region = SharedRegion::create(host.name, 96 << 20).expect("a region");
    let words = Words::of(&region);
    words.fill();
    until("much is in the file", || host.view.bytes().2 > 32 * MIB);
    // SAFETY: the child uses no lock that the guard's thread could hold.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
    if child == 0 {
        // All that can be brought back is, by then.
        std::thread::sleep(Duration::from_millis(2500));
        let end = region.as_ptr().as_ptr() as usize + region.len() - PAGE;
        // SAFETY: the last page, which is not used here.
        unsafe { libc::munmap(end as *mut libc::c_void, PAGE) };
        let zeros = (0..words.pages - 1).any(|page| words.word(page, WORKERS).load(SeqCst) == 0);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(zeros)) }
    }
    damage(host.process.id(), &path);
    let status = wait_for(child);
    assert!(host.counter(Counter::PagesPoisoned) > 0, "pages are lost");
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS, "{status:#x}");
}

/// Overwrites the swap file that a pager has open and that has no name any more.
fn damage(pager: u32, path: &std::path::Path) {
    let is_it = |fd: &std::path::PathBuf| {
        std::fs::read_link(fd)
            .is_ok_and(|to| to.to_string_lossy().starts_with(&*path.to_string_lossy()))
    };
    let fds = std::fs::read_dir(format!("/proc/{pager}/fd")).expect("its descriptors");
    let found = fds.map(|fd| fd.expect("a name").path()).find(is_it).expect("the swap file");
    let mut file = File::options().write(true).open(found).expect("the file");
    for _ in 0..256 {
        file.write_all(&[0x5a; 1 << 20]).expect("written");
    }
}

pub(super) fn a_stopped_process() {
    // The words do not compress: in compressed memory alone they would not fit, and what cannot go
    // out lets the rest come in.
    let path = std::env::temp_dir().join(format!("swaptide-stopped-{}", std::process::id()));
    let host = Pager::start(16 * MIB, Some(&path));
    let region = SharedRegion::create(host.name, 24 << 20).expect("a region");
    let words = Words::of(&region);
    words.fill();
    let mut holder = spawn(&host, &region, "hold", 7);
    let mut status = 0;
    // SAFETY: waits for a child of this process to stop.
    unsafe { libc::waitpid(holder.id() as i32, &mut status, libc::WUNTRACED) };
    assert!(libc::WIFSTOPPED(status), "{status:#x}");
    let mut mine = Mine::new(0, words.pages, 3);
    // What was filled before the pager had the mapping is counted a little later, and then taken
    // out.
    until("it is within its limit", || {
        let (resident, pool, file) = host.view.bytes();
        resident < 18 * MIB && pool + file > 0
    });
    let end = Instant::now() + Duration::from_secs(20);
    for _ in 0..3 {
        words.check_all();
        (0..words.pages).for_each(|_| mine.step(&words));
        assert!(Instant::now() < end, "it continues, and slowly");
        assert!(host.view.bytes().0 < 18 * MIB, "{:?}", host.view.bytes());
    }
    mine.check_all(&words);
    holder.kill().and_then(|()| holder.wait()).expect("killed");
}

pub(super) fn more_is_wanted_than_the_limit() {
    let path = std::env::temp_dir().join(format!("swaptide-wanted-{}", std::process::id()));
    let host = Pager::start(32 * MIB, Some(&path));
    let region = SharedRegion::create(host.name, 96 << 20).expect("a region");
    let words = Words::of(&region);
    words.fill();
    until("it keeps to the limit", || host.view.bytes().0 < 32 * MIB);
    let came = || host.counter(Counter::Zswpin) + host.counter(Counter::Pswpin);
    let before = came();
    assert!(region.say(0, region.len(), Say::WillNeed));
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        assert!(host.view.bytes().0 < 33 * MIB, "{:?}", host.view.bytes());
        std::thread::sleep(Duration::from_micros(200));
    }
    let came = came() - before;
    assert!((64..=16 * MIB / PAGE as u64).contains(&came), "{came} pages of its beginning");
    words.check_all();
}

/// Forks past every hook: the child has no guard, and gets everything.
pub(super) fn raw_clone(words: &Words, mine: &mut Mine) {
    (0..5000).for_each(|_| mine.step(words));
    // SAFETY: the child uses no lock that the guard's thread could hold.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
    if child == 0 {
        std::thread::sleep(Duration::from_millis(1500));
        (0..20_000).for_each(|_| mine.step(words));
        mine.check_all(words);
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) }
    }
    assert_eq!(wait_for(child), 0);
}

/// A process whose userfaultfd is of no use is refused, and hinders no other for as long as it
/// lives.
pub(super) fn a_refused_process() {
    use std::io::Read;
    let (host, region) = start(16 * MIB, 48 * MIB);
    let words = Words::of(&region);
    let name = String::from_utf8(host.name.as_bytes().to_vec()).expect("a name in hexadecimal");
    let mut command = again(&["refused", &name]);
    let mut other = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("spawn");
    other.stdout.take().expect("a pipe").read_exact(&mut [0]).expect("it was refused");
    // What has no guard for a second would be brought back.
    std::thread::sleep(Duration::from_millis(1500));
    words.fill();
    until("it goes out", || host.out() > 0);
    words.check_all();
    other.kill().and_then(|()| other.wait()).expect("killed");
}

/// The process that is refused.
pub(super) fn refused(name: &str) -> ! {
    use swaptide_ipc::AgentRequest;
    use swaptide_ipc::shared::Attached;
    use swaptide_sys::AsFd;
    use swaptide_sys::sock::Conn;
    const USER_MODE_ONLY: libc::c_int = 1;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
    // SAFETY: the call makes a descriptor. Nothing was negotiated for it, so it can do nothing.
    let uffd = unsafe {
        let number = libc::syscall(libc::SYS_userfaultfd, flags);
        assert!(number >= 0, "userfaultfd");
        OwnedFd::from_raw_fd(number as i32)
    };
    let memory = swaptide_ipc::shared::region(name.as_bytes(), MIB).expect("a region");
    let _map = swaptide_sys::mem::SharedMap::map(memory.as_fd(), MIB as usize).expect("mapped");
    let conn = Conn::connect_abstract(name.as_bytes()).expect("connect");
    conn.send(&[AgentRequest::Attach as u8], &[uffd.as_fd()]).expect("send");
    let mut reply = [0; 2];
    conn.recv(&mut reply, &mut []).expect("an answer");
    assert_eq!(reply, [AgentRequest::Attach as u8, Attached::Refused as u8]);
    print!("r");
    std::io::stdout().flush().expect("a pipe");
    let _ = std::io::stdin().read_line(&mut String::new());
    std::process::exit(0)
}
