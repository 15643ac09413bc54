//! Memory whose process has ended while another process still runs on it: the child of a vfork
//! whose parent was killed, or one that was made with `CLONE_VM` past libc.
//!
//! What is out of such memory cannot be brought back: the engine has gone with its process. If its
//! userfaultfd were closed, the kernel would fill missing pages with zeros. So it is kept open, and
//! each missing page that is touched is poisoned: the thread gets SIGBUS, a system call `EFAULT`.
//!
//! Owns: the userfaultfds of such memory, and a thread that reads them. It starts with the first,
//! and has nothing else to do: a process that keeps it from its work hinders only processes that
//! have lost their engine.
//!
//! Invariants
//! 1. A userfaultfd is closed only when its memory is gone (the kernel answers `ESRCH`), or when
//!    there are more than the limit of [`Orphans::add`].
//! 2. It is read without waiting, whatever another holder of the descriptor set.
//!
//! Locks: the list, and that of notes below it. Neither is held while the thread waits.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::sock::Conn;
use swaptide_sys::uffd::{Event, Message, Uffd};

/// How often it is asked whether the memory is gone.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Messages read at a time.
const MAX_MESSAGES_PER_READ: usize = 16;
/// Faults that wait for a change of the address space to end. Threads beyond that wait for good;
/// SIGKILL ends them.
const MAX_FAULTS: usize = 1024;
/// How many processes are reported to have lost memory. SIGBUS tells of the others.
const MAX_NOTES: usize = 8;

/// What tells a userfaultfd from others, whichever process has a descriptor of it.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct Inode(u64);

impl Inode {
    /// That of a descriptor.
    pub(super) fn of(fd: &impl AsFd) -> Option<Inode> {
        rustix::fs::fstat(fd).ok().map(|stat| Inode(stat.st_ino))
    }
}

struct Orphan {
    /// Its process that has ended.
    pid: u32,
    inode: Inode,
    uffd: Uffd,
    /// Pages that were touched and are not poisoned yet.
    faults: Vec<VirtRange>,
    /// It was said that pages are lost.
    is_said: bool,
}

/// See the module's description.
#[derive(Default)]
pub(super) struct Orphans {
    shared: Arc<Shared>,
    /// Wakes the thread; `None` where there can be none.
    wake: OnceLock<Option<Conn>>,
}

#[derive(Default)]
struct Shared {
    list: Mutex<Vec<Orphan>>,
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    unsaid: Vec<String>,
    count: usize,
}

impl Orphans {
    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.shared.list().len()
    }

    /// Keeps the memory of process `pid`, which has ended, from being filled with zeros, as long as
    /// a process runs on it. Where there are `limit`, or no thread can be had, the userfaultfd
    /// is closed.
    pub(super) fn add(&self, pid: u32, uffd: Uffd, limit: usize) {
        let wake = self.wake.get_or_init(|| {
            let (wake, woken) = Conn::pair().ok()?;
            let shared = Arc::clone(&self.shared);
            std::thread::Builder::new()
                .name("orphans".into())
                .spawn(move || serve(&shared, &woken, limit))
                .ok()?;
            Some(wake)
        });
        let Some(wake) = wake else { return };
        let mut list = self.shared.list();
        if list.len() < limit {
            list.extend(Orphan::new(pid, uffd, false));
            drop(list);
            let _ = wake.send(b"+", &[]);
        }
    }

    /// An engine serves this userfaultfd: no other thread may read it from here on.
    pub(super) fn remove(&self, inode: Inode) {
        self.shared.list().retain(|orphan| orphan.inode != inode);
    }

    /// What is to be said since this was asked last.
    pub(super) fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.notes().unsaid)
    }
}

impl Shared {
    fn list(&self) -> MutexGuard<'_, Vec<Orphan>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, what: String) {
        let mut notes = self.notes();
        notes.count += 1;
        if notes.count <= MAX_NOTES {
            notes.unsaid.push(what);
        }
    }
}

/// The thread.
fn serve(shared: &Shared, woken: &Conn, limit: usize) {
    loop {
        let list = shared.list();
        let mut polls: Vec<libc::pollfd> = std::iter::once(woken.as_fd())
            .chain(list.iter().map(|orphan| orphan.uffd.as_fd()))
            .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 })
            .collect();
        let patience = if list.is_empty() { -1 } else { POLL_INTERVAL.as_millis() as libc::c_int };
        drop(list);
        // SAFETY: the array is this thread's own and as long as said.
        unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, patience) };
        if polls[0].revents != 0
            && !woken.recv(&mut [0u8; 8], &mut []).is_ok_and(|(length, _)| length > 0)
        {
            return;
        }
        let mut list = shared.list();
        let mut children = Vec::new();
        list.retain_mut(|orphan| {
            orphan.read(&mut children);
            let is_alive = !orphan.uffd.is_gone();
            if is_alive && orphan.poison() && !std::mem::replace(&mut orphan.is_said, true) {
                shared.note(format!(
                    "process {} ended while another process still needed its memory or had not \
                     got its own (vfork, CLONE_VM, fork): what was swapped out is lost, and that \
                     process gets SIGBUS where it touches it",
                    orphan.pid
                ));
            }
            is_alive
        });
        let room = limit.saturating_sub(list.len());
        list.extend(children.into_iter().take(room));
    }
}

impl Orphan {
    fn new(pid: u32, uffd: Uffd, is_said: bool) -> Option<Orphan> {
        let inode = Inode::of(&uffd)?;
        Some(Orphan { pid, inode, uffd, faults: Vec::new(), is_said })
    }

    /// Reads what has happened. Changes of mappings need no answer; a forked child lacks the same
    /// pages.
    fn read(&mut self, children: &mut Vec<Orphan>) {
        let mut messages = Message::buffer::<MAX_MESSAGES_PER_READ>();
        let Ok(count) = self.uffd.read_nowait(&mut messages) else { return };
        for message in &mut messages[..count] {
            match message.decode() {
                Event::Fault { addr, wp: true, .. } => {
                    let _ = self.uffd.write_protect(page_of(addr), false);
                }
                Event::Fault { addr, .. } if self.faults.len() < MAX_FAULTS => {
                    self.faults.push(page_of(addr));
                }
                Event::Fork { uffd } => {
                    children.extend(Orphan::new(self.pid, uffd, self.is_said));
                }
                _ => {}
            }
        }
    }

    /// Poisons the pages that are waited for. True if there was one.
    fn poison(&mut self) -> bool {
        let mut any = false;
        self.faults.retain(|page| {
            let done = self.uffd.poison(*page).complete();
            // An event is unread: it is tried again after that.
            if done == Err(rustix::io::Errno::AGAIN) {
                return true;
            }
            any |= done.is_ok();
            // The page is there by now, or no longer mapped: the thread finds out by itself.
            if done.is_err() {
                let _ = self.uffd.wake(*page);
            }
            false
        });
        any
    }
}

fn page_of(addr: VirtAddr) -> VirtRange {
    let start = addr.align_down(PAGE_SIZE);
    VirtRange::new(start, VirtAddr(start.0 + PAGE_SIZE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_sys::uffd::Features;

    #[test]
    fn what_is_missing_is_poisoned_and_memory_that_is_gone_is_given_up() {
        let (ours, theirs) = Conn::pair().expect("pair");
        // SAFETY: the child makes system calls only, and ends by a signal or by _exit.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let page = swaptide_sys::mem::Mapping::reserve(PAGE_SIZE).expect("mmap");
            let uffd = Uffd::open(Features::empty(), true).expect("userfaultfd");
            uffd.register_missing(page.range()).expect("register");
            theirs.send(b"u", &[uffd.as_fd()]).expect("send");
            // SAFETY: the page is mapped; the touch waits, and is then a SIGBUS.
            let byte = unsafe { page.range().start.as_ptr::<u8>().read_volatile() };
            // SAFETY: ends the child.
            unsafe { libc::_exit(byte.into()) };
        }
        let mut fds = [None];
        ours.recv(&mut [0u8; 8], &mut fds).expect("receive");
        let [uffd] = fds;
        let orphans = Orphans::default();
        orphans.add(child as u32, Uffd::from_fd(uffd.expect("a userfaultfd")), 1);
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS, "{status}");
        let began = std::time::Instant::now();
        while orphans.count() > 0 {
            assert!(began.elapsed() < Duration::from_secs(10), "it is still kept");
            std::thread::sleep(POLL_INTERVAL);
        }
        let notes = orphans.take_notes();
        assert!(matches!(&notes[..], [note] if note.contains("SIGBUS")), "{notes:?}");
    }
}
