//! Processes that were started since the last look, at little cost: their numbers are those that
//! follow the newest one at that look.
//!
//! Owns what was seen so far.
//!
//! Invariants
//! 1. A process is looked for at two looks in a row, for its number is given out a moment before it
//!    is there.
//! 2. What that may have missed is found by a listing of all processes, at the latest
//!    `LATEST_LISTING` after the newest number has changed, if a listing is not too dear; and
//!    `QUIET_LISTING` after the one before. Where something else than the kernel tells that number
//!    (lxcfs), it may never change: all are listed every `DOUBTED_LISTING`.
//! 3. Listings of each [`NewProcesses`] take at most a thirtieth of one CPU, and a two hundredth
//!    where no number changes; a look without one asks for at most `MAX_NUMBERS` numbers.
//!
//! Locks: none.

use alloc::vec::Vec;
use core::time::Duration;

use rustix::fd::OwnedFd;
use rustix::fs::{PROC_SUPER_MAGIC, fstatfs};
use rustix::io::Errno;

use crate::process::{ProcInfo, after_name, newest_in, parse_stat, processes};
use crate::procfs::{ProcPath, open_read, read_file, retry, words};
use crate::thread::{Nanos, now, thread_cpu_time};

/// Numbers that are looked up one by one. Threads have such numbers, too.
const MAX_NUMBERS: u32 = 64;
/// How long processes are found by their numbers alone.
const LATEST_LISTING: Duration = Duration::from_millis(50);
/// Between two listings, at least.
const LISTING_INTERVAL: Duration = Duration::from_millis(10);
/// How long nothing is listed while the newest number is the same.
const QUIET_LISTING: Duration = Duration::from_secs(5);
/// The same where that is not the kernel's number.
const DOUBTED_LISTING: Duration = Duration::from_millis(500);
/// Part of one CPU that listings take.
const COST_DIVISOR: u32 = 30;
/// The same while the newest number is the same.
const QUIET_COST_DIVISOR: u32 = 200;

/// Finds new processes.
///
/// The first look finds all processes.
#[derive(Default)]
pub struct NewProcesses {
    /// Where the newest number is told. Kept open: to open a file takes memory, which may be short
    /// in the cgroup just when it matters.
    loadavg: Option<OwnedFd>,
    /// It is a file of /proc, and not one that something else has put there.
    is_of_kernel: bool,
    /// The newest number at the last look, and at the one before.
    newest: Option<u32>,
    before: Option<u32>,
    /// Since when a listing is owed, or will be.
    changed: Option<Nanos>,
    is_owed: bool,
    listed: Option<Nanos>,
    cost: Duration,
}

impl NewProcesses {
    /// The next look is one at all processes, as soon as that is not too dear.
    pub fn list_all(&mut self) {
        self.is_owed = true;
    }

    /// Processes that were started since the last look, some of them again; or all there are.
    pub fn look(&mut self) -> NewLook {
        let at = now();
        let newest = self.read_newest();
        let before = core::mem::replace(&mut self.before, self.newest);
        self.newest = newest;
        self.before = self.before.or(newest);
        let is_same = newest.is_some() && newest == before && newest == self.before;
        if !is_same {
            self.changed.get_or_insert(at);
        }
        let is_late = self.changed.is_some_and(|since| at.since(since) >= LATEST_LISTING)
            || self.is_quiet_for_long(at);
        let numbers = match (before, newest) {
            (Some(before), Some(newest)) if newest.wrapping_sub(before) <= MAX_NUMBERS => {
                before + 1..newest + 1
            }
            // They have begun again, or too many were given out.
            _ => {
                self.is_owed = true;
                0..0
            }
        };
        let pause = LISTING_INTERVAL.max(self.cost * COST_DIVISOR);
        let may_list = self.listed.is_none_or(|listed| at.since(listed) >= pause);
        if (self.is_owed || is_late) && may_list {
            let began = thread_cpu_time();
            self.listed = Some(at);
            // Without a descriptor it is tried again.
            if let Ok(all) = processes() {
                self.cost = thread_cpu_time().since(began);
                (self.is_owed, self.changed) = (false, None);
                return NewLook { processes: all, listing: Some(self.cost) };
            }
        }
        NewLook { processes: numbers.filter_map(process).collect(), listing: None }
    }

    /// True if a process or a thread was started since the last look, that cannot be known, or all
    /// are to be listed.
    pub fn has_any(&mut self) -> bool {
        let newest = self.read_newest();
        newest.is_none() || newest != self.newest || self.is_quiet_for_long(now())
    }

    fn is_quiet_for_long(&self, at: Nanos) -> bool {
        let longest = if self.is_of_kernel { QUIET_LISTING } else { DOUBTED_LISTING };
        let pause = longest.max(self.cost * QUIET_COST_DIVISOR);
        self.listed.is_none_or(|listed| at.since(listed) >= pause)
    }

    fn read_newest(&mut self) -> Option<u32> {
        if self.loadavg.is_none() {
            self.loadavg = open_read(c"/proc/loadavg").ok();
            let kind = self.loadavg.as_ref().and_then(|file| fstatfs(file).ok());
            self.is_of_kernel = kind.is_some_and(|kind| kind.f_type == PROC_SUPER_MAGIC);
        }
        let mut text = [0; 128];
        let read: Result<usize, Errno> =
            retry(|| rustix::io::pread(self.loadavg.as_ref().ok_or(Errno::BADF)?, &mut text, 0));
        newest_in(&text[..read.ok()?])
    }
}

/// What a look has found.
pub struct NewLook {
    /// The processes.
    pub processes: Vec<ProcInfo>,
    /// CPU time of the listing, if these are all there are.
    pub listing: Option<Duration>,
}

/// The process with a number. `None` for a number of a thread, and where none has it.
fn process(number: u32) -> Option<ProcInfo> {
    let mut text = [0; 1024];
    let text = read_file(ProcPath::proc(number, "stat").as_c_str(), &mut text).ok()?;
    // Fields counted from 1: 3 is the first one after the name, 38 the signal that the parent is
    // sent at the end: -1 for a thread.
    let signal = words(after_name(text)?).nth(38 - 3)?;
    if signal == b"-1" { None } else { parse_stat(number, text) }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::process::Command;

    #[test]
    fn a_child_is_found_twice_and_a_thread_never() {
        let mut new = NewProcesses::default();
        let has = |infos: &[ProcInfo], pid| infos.iter().any(|info| info.pid == pid);
        let first = new.look();
        assert!(first.listing.is_some() && has(&first.processes, std::process::id()));
        new.look();
        let mut child = Command::new("sleep").arg("600").spawn().expect("sleep");
        assert!(new.has_any());
        let (tids, tid) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            tids.send(crate::thread::gettid().0).expect("it is received");
            let _ = ended.recv();
        });
        let tid = tid.recv().expect("a number");
        assert!(process(tid).is_none() && process(child.id()).is_some());
        let mut found = 0;
        let mut listed = false;
        for _ in 0..2 {
            let look = new.look();
            assert!(!has(&look.processes, tid), "a thread is no process");
            found += u32::from(has(&look.processes, child.id()));
            listed |= look.listing.is_some();
        }
        // Other tests start processes, too: then it may have been found by a listing.
        assert!(found == 2 || listed && found > 0, "found {found} times");
        drop(end);
        thread.join().expect("the thread ends");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn all_are_listed_when_that_is_asked_for_and_some_time_after_a_change() {
        let mut new = NewProcesses::default();
        assert!(new.look().listing.is_some());
        new.list_all();
        let until_listed = |new: &mut NewProcesses| {
            let began = std::time::Instant::now();
            while new.look().listing.is_none() {
                assert!(began.elapsed() < Duration::from_secs(60), "none was listed");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        until_listed(&mut new);
        Command::new("true").status().expect("true");
        until_listed(&mut new);
    }

    #[test]
    fn a_number_that_is_not_the_kernels_is_not_relied_on() {
        let path = std::env::temp_dir().join(std::format!("loadavg-{}", std::process::id()));
        std::fs::write(&path, "0.10 0.10 0.10 1/100 777\n").expect("write");
        let file = std::fs::File::open(&path).expect("open");
        std::fs::remove_file(path).expect("remove");
        let mut new = NewProcesses { loadavg: Some(file.into()), ..NewProcesses::default() };
        let began = std::time::Instant::now();
        assert!(new.look().listing.is_some() && !new.has_any());
        while new.look().listing.is_none() {
            assert!(began.elapsed() < Duration::from_secs(60), "nothing is listed any more");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(began.elapsed() >= DOUBTED_LISTING);
        // The kernel's own is.
        let mut kernels = NewProcesses::default();
        kernels.look();
        assert!(kernels.is_of_kernel);
    }
}
