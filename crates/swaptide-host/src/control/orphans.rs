//! Memory whose process has ended while another process still runs on it: the child of a vfork
//! whose parent was killed, or one that was made with `CLONE_VM` past libc.
//!
//! What is out of such memory cannot be brought back: the engine has gone with its process. If its
//! userfaultfd were closed, the kernel would fill missing pages with zeros. So it is kept open, and
//! each missing page that is touched is poisoned: the thread gets SIGBUS, a system call `EFAULT`.
//!
//! Owns: the userfaultfds of such memory, and threads that read them; the first thread starts with
//! the first userfaultfd. Work on an address space waits for its lock, which its program can keep
//! (by a read of its own FUSE page). So each thread works on one at a time, and where none is free
//! to look for the next, one more is made, up to [`MAX_THREADS`].
//!
//! Invariants
//! 1. A userfaultfd is closed only when its memory is gone (the kernel answers `ESRCH`), or when
//!    there are more than the limit of [`Orphans::add`].
//! 2. It is read without waiting, whatever another holder of the descriptor set.
//! 3. It is read only after [`Uffd::take_over`]: no living process serves it, and one that is about
//!    to learns that it is too late.
//!
//! Locks: the turn to look for work; below it the list, the queue and the notes, of which no two
//! are held at once, and none while a thread waits. A thread that works on an orphan has its state
//! locked, and nothing above it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{
    AtomicBool, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use swaptide_sys::eventfd::EventFd;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::sock::Conn;
use swaptide_sys::uffd::{Event, Message, Uffd};

/// The interval between checks that the memory is gone.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How often one that is worked on is looked for among those that may be waited for again, where no
/// descriptor could be had that tells it.
const BUSY_INTERVAL: Duration = Duration::from_millis(2);
/// Messages read at a time.
const MAX_MESSAGES_PER_READ: usize = 16;
/// Faults that wait for a change of the address space to end. Threads beyond that wait for good;
/// SIGKILL ends them.
const MAX_FAULTS: usize = 1024;
/// With as many address spaces that keep a thread waiting, the others wait, too.
const MAX_THREADS: usize = 64;
/// The most processes reported to have lost memory. SIGBUS tells of the others.
const MAX_NOTES: usize = 8;

/// The identity of a userfaultfd, whichever process has a descriptor of it.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct Inode(u64);

impl Inode {
    /// That of a descriptor.
    pub(super) fn of(fd: &impl AsFd) -> Option<Inode> {
        rustix::fs::fstat(fd).ok().map(|stat| Inode(stat.st_ino))
    }
}

struct Orphan {
    /// The process that had it held and has ended.
    pid: u32,
    inode: Inode,
    uffd: Uffd,
    /// A thread works on it, or is about to.
    is_busy: AtomicBool,
    /// A process serves it again. A thread that has it in the queue, or works on it, leaves nothing
    /// of it unanswered: what it has read and not answered is woken with the last reference.
    is_removed: AtomicBool,
    state: Mutex<OrphanState>,
}

#[derive(Default)]
struct OrphanState {
    /// It is known that no process serves it.
    is_ours: bool,
    /// Pages that were touched and are not poisoned yet.
    faults: Vec<VirtRange>,
    /// It was said that pages are lost.
    is_said: bool,
}

/// The orphans, and the threads that poison what is touched of them.
#[derive(Default)]
pub(super) struct Orphans {
    shared: Arc<Shared>,
    /// Wakes a thread; `None` where there can be none.
    wake: OnceLock<Option<Conn>>,
}

#[derive(Default)]
struct Shared {
    list: Mutex<Vec<Arc<Orphan>>>,
    /// Those that are to be worked on.
    queue: Mutex<VecDeque<Arc<Orphan>>>,
    notes: Mutex<Notes>,
    /// Held by the thread that looks for work.
    turn: Mutex<()>,
    threads: AtomicUsize,
    /// Threads that look for work, or wait for their turn to.
    idle: AtomicUsize,
    /// Tells the thread that looks for work that another one has ended some, and may have found
    /// children. `None` where no descriptor could be had.
    finished: OnceLock<Option<EventFd>>,
}

#[derive(Default)]
struct Notes {
    unsaid: Vec<String>,
    count: usize,
}

impl Orphans {
    /// Returns their number.
    pub(super) fn count(&self) -> usize {
        self.shared.list().len()
    }

    /// Keeps the memory of process `pid`, which has ended, from being filled with zeros, as long as
    /// a process runs on it. Where there are `limit`, or no thread can be had, the userfaultfd
    /// is given back, to be closed.
    pub(super) fn add(&self, pid: u32, uffd: Uffd, limit: usize) -> Option<Uffd> {
        let wake = self.wake.get_or_init(|| {
            let (wake, woken) = Conn::pair().ok()?;
            self.shared.finished.get_or_init(|| EventFd::new().ok());
            start_thread(&self.shared, &Arc::new(woken), limit).then_some(wake)
        });
        let (Some(wake), Some(inode)) = (wake, Inode::of(&uffd)) else { return Some(uffd) };
        let mut list = self.shared.list();
        if list.len() >= limit {
            return Some(uffd);
        }
        list.push(Arc::new(Orphan::new(pid, inode, uffd, false)));
        drop(list);
        // As for holds: the caller must not wait.
        let _ = wake.send_nowait(b"+");
        None
    }

    /// A process that serves this userfaultfd has it held itself. It does not wait for a thread
    /// that works on it: by invariant 3 none does.
    pub(super) fn remove(&self, inode: Inode) {
        let mut list = self.shared.list();
        let removed: Vec<_> = list.extract_if(.., |orphan| orphan.inode == inode).collect();
        removed.iter().for_each(|orphan| orphan.is_removed.store(true, Release));
        drop(list);
        drop(removed);
    }

    /// Returns the messages since the last call.
    pub(super) fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.notes().unsaid)
    }
}

impl Shared {
    fn list(&self) -> MutexGuard<'_, Vec<Arc<Orphan>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<Arc<Orphan>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finished(&self) -> Option<&EventFd> {
        self.finished.get().and_then(Option::as_ref)
    }

    fn note(&self, what: String) {
        let mut notes = self.notes();
        notes.count += 1;
        if notes.count <= MAX_NOTES {
            notes.unsaid.push(what);
        }
    }
}

/// One thread more. False where there are enough, or none can be had.
fn start_thread(shared: &Arc<Shared>, woken: &Arc<Conn>, limit: usize) -> bool {
    if shared.threads.fetch_add(1, Relaxed) >= MAX_THREADS {
        shared.threads.fetch_sub(1, Relaxed);
        return false;
    }
    shared.idle.fetch_add(1, Relaxed);
    let (theirs, woken) = (Arc::clone(shared), Arc::clone(woken));
    let started = std::thread::Builder::new()
        .name("orphans".into())
        .spawn(move || serve(&theirs, &woken, limit))
        .is_ok();
    if !started {
        shared.threads.fetch_sub(1, Relaxed);
        shared.idle.fetch_sub(1, Relaxed);
    }
    started
}

/// A thread: looks for an orphan to work on, and works on it.
fn serve(shared: &Arc<Shared>, woken: &Arc<Conn>, limit: usize) {
    loop {
        let next = shared.queue().pop_front();
        let Some(orphan) = next else {
            if !look_for_work(shared, woken) {
                return;
            }
            continue;
        };
        if shared.idle.fetch_sub(1, Relaxed) == 1 {
            // Where there can be no other thread, the others wait with this one.
            start_thread(shared, woken, limit);
        }
        work_on(shared, &orphan, limit);
        orphan.is_busy.store(false, Release);
        shared.idle.fetch_add(1, Relaxed);
        shared.finished().into_iter().for_each(EventFd::signal);
    }
}

/// Waits until there is something to do, and puts it into the queue. False at the end.
fn look_for_work(shared: &Shared, woken: &Conn) -> bool {
    let _turn = shared.turn.lock().unwrap_or_else(PoisonError::into_inner);
    if !shared.queue().is_empty() {
        return true;
    }
    let list = shared.list();
    let free: Vec<_> =
        list.iter().filter(|orphan| !orphan.is_busy.load(Acquire)).map(Arc::clone).collect();
    // A thread that works may find children.
    let is_quiet = shared.idle.load(Relaxed) == shared.threads.load(Relaxed);
    let finished = shared.finished();
    let timeout = match list.len() {
        0 if is_quiet || finished.is_some() => -1,
        0 => BUSY_INTERVAL.as_millis() as libc::c_int,
        all if all > free.len() && finished.is_none() => BUSY_INTERVAL.as_millis() as libc::c_int,
        _ => POLL_INTERVAL.as_millis() as libc::c_int,
    };
    drop(list);
    // One that is not read would be readable for ever.
    let ours = free.iter().filter(|orphan| orphan.state().is_ours);
    let mut polls: Vec<libc::pollfd> = std::iter::once(woken.as_fd())
        .chain(finished.map(AsFd::as_fd))
        .chain(ours.map(|orphan| orphan.uffd.as_fd()))
        .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 })
        .collect();
    // SAFETY: the array is this thread's own and as long as said.
    let ready = unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout) };
    if polls[0].revents != 0
        && !woken.recv(&mut [0u8; 8], &mut []).is_ok_and(|(length, _)| length > 0)
    {
        return false;
    }
    if let Some(finished) = finished.filter(|_| polls[1].revents != 0) {
        finished.clear();
        if ready == 1 {
            // What was worked on is waited for with the others from here on.
            return true;
        }
    }
    free.iter().for_each(|orphan| orphan.is_busy.store(true, Relaxed));
    shared.queue().extend(free);
    true
}

fn work_on(shared: &Shared, orphan: &Arc<Orphan>, limit: usize) {
    let mut state = orphan.state();
    if orphan.is_removed.load(Acquire) {
        return;
    }
    state.is_ours = state.is_ours || orphan.uffd.take_over(orphan.pid);
    let mut children = Vec::new();
    if state.is_ours {
        orphan.read(&mut state, &mut children);
    }
    let is_alive = !orphan.uffd.is_gone();
    if is_alive && orphan.poison(&mut state) && !std::mem::replace(&mut state.is_said, true) {
        shared.note(format!(
            "process {} ended while another process still needed its memory or had not got its \
             own (vfork, CLONE_VM, fork): what was swapped out is lost, and that process gets \
             SIGBUS where it touches it",
            orphan.pid
        ));
    }
    drop(state);
    let mut list = shared.list();
    if !is_alive {
        list.retain(|other| !Arc::ptr_eq(other, orphan));
    }
    let room = limit.saturating_sub(list.len());
    let rest = children.split_off(room.min(children.len()));
    list.extend(children.into_iter().map(Arc::new));
    drop(list);
    drop(rest);
}

impl Orphan {
    fn new(pid: u32, inode: Inode, uffd: Uffd, is_said: bool) -> Orphan {
        let state = Mutex::new(OrphanState { is_said, ..OrphanState::default() });
        let (is_busy, is_removed) = (AtomicBool::new(false), AtomicBool::new(false));
        Orphan { pid, inode, uffd, is_busy, is_removed, state }
    }

    fn state(&self) -> MutexGuard<'_, OrphanState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what has happened. Changes of mappings need no answer; a forked child lacks the same
    /// pages.
    fn read(&self, state: &mut OrphanState, children: &mut Vec<Orphan>) {
        let mut messages = Message::buffer::<MAX_MESSAGES_PER_READ>();
        let Ok(count) = self.uffd.read_nowait(&mut messages) else { return };
        for message in &mut messages[..count] {
            match message.decode() {
                Event::Fault { addr, wp: true, .. } => {
                    let _ = self.uffd.write_protect(page_of(addr), false);
                }
                Event::Fault { addr, .. } if state.faults.len() < MAX_FAULTS => {
                    state.faults.push(page_of(addr));
                }
                Event::Fork { uffd } => {
                    if let Some(inode) = Inode::of(&uffd) {
                        children.push(Orphan::new(self.pid, inode, uffd, state.is_said));
                    }
                }
                _ => {}
            }
        }
    }

    /// Poisons the pages that are waited for. True if there was one.
    fn poison(&self, state: &mut OrphanState) -> bool {
        let mut any = false;
        state.faults.retain(|page| {
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

/// Threads of which a fault was read, and not answered, fault again, for the next reader: a process
/// that serves it again may have had it removed at any moment.
impl Drop for Orphan {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for page in state.faults.drain(..) {
            // Memory that is gone has no threads.
            let _ = self.uffd.wake(page);
        }
    }
}

fn page_of(addr: VirtAddr) -> VirtRange {
    let start = addr.align_down(PAGE_SIZE);
    VirtRange::new(start, VirtAddr(start.0 + PAGE_SIZE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use swaptide_sys::sock::poll_readable;
    use swaptide_sys::uffd::Features;

    /// A process that touches a page of which it has the userfaultfd sent here first.
    fn process_that_touches() -> (libc::pid_t, Uffd) {
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
        (child, Uffd::from_fd(uffd.expect("a userfaultfd")))
    }

    fn assert_sigbus(child: libc::pid_t) {
        let mut status = 0;
        // SAFETY: waits for a child of this process.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS, "{status}");
    }

    #[test]
    fn missing_pages_are_poisoned_and_unmapped_memory_is_dropped() {
        let (child, uffd) = process_that_touches();
        let orphans = Orphans::default();
        assert!(orphans.add(child as u32, uffd, 1).is_none());
        assert_sigbus(child);
        let began = std::time::Instant::now();
        while orphans.count() > 0 {
            assert!(began.elapsed() < Duration::from_secs(10), "it is still kept");
            std::thread::sleep(POLL_INTERVAL);
        }
        let notes = orphans.take_notes();
        assert!(matches!(&notes[..], [note] if note.contains("SIGBUS")), "{notes:?}");
    }

    #[test]
    fn a_blocked_orphan_delays_no_other_and_no_caller() {
        let orphans = Orphans::default();
        let (first, uffd) = process_that_touches();
        let inode = Inode::of(&uffd).expect("stat");
        let orphan = Arc::new(Orphan::new(first as u32, inode, uffd, false));
        // As if the kernel made the thread wait that works on it.
        let waits = orphan.state();
        orphan.is_busy.store(true, Relaxed);
        orphans.shared.queue().push_back(Arc::clone(&orphan));
        orphans.shared.list().push(Arc::clone(&orphan));
        let (second, uffd) = process_that_touches();
        assert!(orphans.add(second as u32, uffd, 9).is_none());
        assert_sigbus(second);
        // Its process can end before the thread that let it go on has noted it.
        let began = std::time::Instant::now();
        let mut notes = orphans.take_notes();
        while notes.is_empty() {
            assert!(began.elapsed() < Duration::from_secs(10), "nothing is noted");
            std::thread::sleep(POLL_INTERVAL);
            notes.extend(orphans.take_notes());
        }
        assert_eq!(notes.len(), 1, "{notes:?}");
        orphans.remove(Inode(0));
        drop(waits);
        assert_sigbus(first);
    }

    #[test]
    fn an_orphan_that_is_served_is_not_served_twice() {
        let (child, uffd) = process_that_touches();
        let inode = Inode::of(&uffd).expect("stat");
        let orphans = Orphans::default();
        let orphan = Arc::new(Orphan::new(child as u32, inode, uffd, false));
        orphans.shared.list().push(Arc::clone(&orphan));
        orphans.remove(inode);
        assert_eq!(orphans.count(), 0);
        poll_readable(&[orphan.uffd.as_fd()], None).expect("the fault");
        work_on(&orphans.shared, &orphan, 9);
        let mut messages = Message::buffer::<1>();
        assert_eq!(orphan.uffd.read_nowait(&mut messages), Ok(1), "it was read");
        let Event::Fault { addr, .. } = messages[0].decode() else { panic!("no fault") };
        orphan.uffd.poison(page_of(addr)).complete().expect("poison");
        assert_sigbus(child);
    }

    #[test]
    fn unanswered_faults_repeat_for_next_reader() {
        let (child, uffd) = process_that_touches();
        let next = Uffd::from_fd(uffd.as_fd().try_clone_to_owned().expect("dup"));
        let inode = Inode::of(&uffd).expect("stat");
        let orphans = Orphans::default();
        let orphan = Arc::new(Orphan::new(child as u32, inode, uffd, false));
        orphans.shared.list().push(Arc::clone(&orphan));
        poll_readable(&[next.as_fd()], None).expect("the fault");
        // As if it could not be poisoned, and were removed just after the last look at that.
        orphan.read(&mut orphan.state(), &mut Vec::new());
        assert_eq!(orphan.state().faults.len(), 1);
        orphans.remove(inode);
        drop(orphan);
        let is_there = poll_readable(&[next.as_fd()], Some(Duration::from_secs(5)));
        if is_there == Ok(0) {
            // SAFETY: a child of this process, which waits for ever.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        let mut messages = Message::buffer::<1>();
        assert_eq!(next.read_nowait(&mut messages), Ok(1), "no reader has the fault");
        let Event::Fault { addr, .. } = messages[0].decode() else { panic!("no fault") };
        next.poison(page_of(addr)).complete().expect("poison");
        assert_sigbus(child);
    }

    #[test]
    fn waiting_thread_causes_no_repeated_polls() {
        let shared = Arc::new(Shared::default());
        shared.finished.get_or_init(|| EventFd::new().ok());
        let (wake, woken) = Conn::pair().expect("pair");
        // One of two threads works on what is in the list no more.
        shared.threads.store(2, Relaxed);
        shared.idle.store(1, Relaxed);
        let (said, heard) = std::sync::mpsc::channel();
        let looks = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while look_for_work(&looks, &woken) {
                let _ = said.send(());
            }
        });
        let looked = heard.recv_timeout(20 * BUSY_INTERVAL);
        assert!(looked.is_err(), "it looks all the time");
        // It ends its work, and may have found children.
        shared.finished().expect("a descriptor").signal();
        assert!(heard.recv_timeout(Duration::from_secs(10)).is_ok(), "it does not look");
        drop(wake);
        thread.join().expect("it ends");
    }

    #[test]
    fn a_living_process_is_not_read_before_its_request_comes() {
        let memory = swaptide_sys::mem::Mapping::reserve(PAGE_SIZE).expect("mmap");
        let uffd = Uffd::open(Features::empty(), true).expect("userfaultfd");
        uffd.register_missing(memory.range()).expect("register");
        let copy = || Uffd::from_fd(uffd.as_fd().try_clone_to_owned().expect("dup"));
        assert_eq!(uffd.serve(std::process::id()), Ok(true));
        let orphans = Orphans::default();
        // Held by the parent, which has ended.
        assert!(orphans.add(1, copy(), 1).is_none());
        let start = memory.range().start;
        std::thread::scope(|scope| {
            // SAFETY: the page is mapped; the touch waits until it is filled below.
            let touch = scope.spawn(move || unsafe { start.as_ptr::<u8>().read_volatile() });
            std::thread::sleep(10 * POLL_INTERVAL);
            let mut messages = Message::buffer::<1>();
            assert_eq!(uffd.read_nowait(&mut messages), Ok(1), "the fault was read by another");
            uffd.zero_pages(memory.range(), false).complete().expect("fill");
            assert_eq!(touch.join().expect("no panic"), 0);
        });
        assert_eq!(orphans.count(), 1);
        // Its process ends: it is the one that is left. One that comes later is told so.
        orphans.remove(Inode::of(&uffd).expect("stat"));
        assert!(copy().take_over(std::process::id()) && uffd.serve(1) == Ok(false));
    }
}
