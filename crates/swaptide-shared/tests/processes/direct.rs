//! Processes that may write past their page tables.

use super::*;

/// A file that is open for direct I/O. Where there is no direct I/O, none can harm.
pub(super) fn open_direct() -> Option<File> {
    let path = std::env::temp_dir().join(format!("swaptide-direct-io-{}", std::process::id()));
    std::fs::write(&path, [0; 4096]).expect("file");
    let direct =
        std::os::unix::fs::OpenOptionsExt::custom_flags(File::options().read(true), libc::O_DIRECT)
            .open(&path);
    std::fs::remove_file(&path).expect("removed");
    direct.ok()
}

pub(super) fn direct_io_holds() {
    let Some(direct) = open_direct() else { return };
    let (host, region) = start(16 * MIB, 32 * MIB);
    let words = Words::of(&region);
    words.fill();
    assert_eq!(host.out(), 0, "nothing goes out");
    drop(direct);
    until("it goes out now", || host.out() > 0);
    words.check_all();
}

pub(super) fn direct_io_without_a_first_thread_holds() {
    if open_direct().is_none() {
        return;
    }
    for number in 0..2 {
        let (host, region) = start(16 * MIB, 32 * MIB);
        let mut worker = spawn(&host, &region, "leaderless", number);
        let ended = || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", worker.id()));
            status.is_ok_and(|status| status.contains("State:\tZ"))
        };
        until("the first thread ends", ended);
        let words = Words::of(&region);
        words.fill();
        if number == 0 {
            std::thread::sleep(Duration::from_millis(500));
            assert_eq!(host.out(), 0, "nothing goes out");
            worker.kill().and_then(|()| worker.wait()).expect("killed");
        }
        until("it goes out", || host.out() > 0);
        words.check_all();
        // It may have ended already.
        let _ = worker.kill();
        worker.wait().expect("it ends");
    }
}

pub(super) fn direct_io_holds_no_other_region() {
    let Some(_direct) = open_direct() else { return };
    let (host, held) = start(40 * MIB, 32 * MIB);
    let other = SharedRegion::create(host.name, held.len()).expect("a region");
    let mut worker = spawn(&host, &other, "sleep", 0);
    let (held_words, other_words) = (Words::of(&held), Words::of(&other));
    // So that their chunks take turns.
    for page in 0..held_words.pages {
        for words in [&held_words, &other_words] {
            words.word(page, WORKERS).store(constant(page, WORKERS), SeqCst);
        }
    }
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(host.out(), 0, "this process may write to both");
    // Of the worker alone from here on, which has no such file.
    drop(other);
    until("the region of a process without direct I/O goes out", || host.out() > 1000);
    let held_pages = held_words.pages as u64;
    assert!(host.out() <= held_pages, "{} of {held_pages} pages", host.out());
    for page in 0..held_words.pages {
        assert_eq!(held_words.word(page, WORKERS).load(SeqCst), constant(page, WORKERS));
    }
    assert_eq!(host.counter(Counter::Pgmajfault), 0, "all of it is there");
    worker.kill().and_then(|()| worker.wait()).expect("killed");
}
