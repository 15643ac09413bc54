//! The processes of one run or several, and the memory they use.
//!
//! Owns the set of living members: every descendant of a run's supervisor (the *root*), which is
//! their subreaper, so that no process leaves the tree by losing a parent; and, should that be
//! killed, all descendants of members. A member is known by its pidfd; its number alone
//! never stands for it.
//!
//! What a member uses is its resident anonymous memory. That is one small read (`statm`) except for
//! processes that were forked and did not exec: they share pages, which would count once for each
//! of them. Such processes have the same start of stack, for fork copies it and exec draws a new
//! one; of them the proportional size is read (`proportional`).
//!
//! A process that runs on another's memory, as between vfork and exec, uses nothing itself.
//!
//! Invariants
//! 1. A member is reported dead once, after all its threads are gone, and then it is no member any
//!    more.
//! 2. A process is a member because it descends from a root or a member, or because the caller
//!    learned so from the kernel (`ProcessTree::admit_known`); never because a program said so.
//! 3. Looking for new members costs at most a thirtieth of one processor, however many processes
//!    the machine has, and a few files a look ([`NewProcesses`]).
//!
//! Locks: none.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, getrlimit, test_kill_process};
use swaptide_sys::Errno;
use swaptide_sys::new_processes::NewProcesses;
use swaptide_sys::page::PAGE_SIZE;
use swaptide_sys::process::{
    StatFd, StatmFd, anon_rss, pidfd_open, pidfd_send_signal, proc_info, same_memory,
};
use swaptide_sys::sock::poll_readable;

use self::proportional::Pss;

mod proportional;

/// Less than this needs no exact count.
const MIN_EXACT_BYTES: u64 = 1 << 20;
/// How long a process that was found to be of no tree is not looked at again.
const OUTSIDER_CACHE_AGE: Duration = Duration::from_millis(250);

/// Most descriptors that are left for others than members; an eighth of all where that is less.
const MAX_RESERVED_FDS: u64 = 32;

pub(super) struct Member {
    /// Whose tree it is in; 0 where that is not known.
    root: u32,
    statm: StatmFd,
    /// Opened when it first shares pages.
    stat: Option<StatFd>,
    pidfd: OwnedFd,
    /// Start of the stack: the same in processes that were forked from each other and did not exec.
    stack_start: u64,
    resident: u64,
    /// By which that has grown since the sample before.
    gained: u64,
    used: u64,
    pss: Option<Pss>,
    /// Its minor faults, while it is one of several that share pages; and bytes of those that
    /// copied nothing.
    faults: u64,
    discounted: u64,
    /// It runs on another member's memory, which counts there (vfork).
    guest: bool,
    /// Its first thread has ended, others live.
    leaderless: bool,
}

/// The processes of all runs, as the last scan of /proc found them.
#[derive(Default)]
pub struct ProcessTree {
    roots: BTreeSet<u32>,
    /// Parents of roots, which take the tree over when the root is killed, with that root.
    launchers: BTreeMap<u32, u32>,
    /// Processes that were found not to be of any tree, and when.
    outsiders: HashMap<u32, Instant>,
    members: BTreeMap<u32, Member>,
    new: NewProcesses,
    /// When the newest member was found.
    found: Option<Instant>,
    /// No proportional size that is known is read again before.
    read_from: Option<Instant>,
}

impl ProcessTree {
    /// The tree of all descendants of process `root`, which is not one itself.
    pub fn new(root: u32) -> ProcessTree {
        let mut tree = ProcessTree::default();
        tree.add_root(root);
        tree
    }

    /// The descendants of one more process are members.
    pub(crate) fn add_root(&mut self, root: u32) {
        self.roots.insert(root);
        self.new.list_all();
    }

    /// The parent of a root, if it is that: when the root is killed, the tree is its own.
    pub(crate) fn add_launcher(&mut self, launcher: u32, root: u32) {
        if parent_of(root) == Some(launcher) && !self.roots.contains(&launcher) {
            self.launchers.insert(launcher, root);
        }
    }

    /// The descendants of a process that is gone: those that live on stay members.
    pub(crate) fn forget_root(&mut self, root: u32) {
        self.roots.remove(&root);
        self.launchers.retain(|_, of| *of != root);
    }

    /// Makes a process a member if it descends from a root or from a member, and lives. False when
    /// it does not: its name may be a lie.
    pub(crate) fn admit(&mut self, pid: u32) -> bool {
        if self.members.contains_key(&pid) {
            return true;
        }
        if self.outsiders.get(&pid).is_some_and(|seen| seen.elapsed() < OUTSIDER_CACHE_AGE) {
            return false;
        }
        let admitted = self.root_above(pid).is_some_and(|root| self.insert(pid, root));
        if !admitted {
            self.outsiders.retain(|_, seen| seen.elapsed() < OUTSIDER_CACHE_AGE);
            self.outsiders.insert(pid, Instant::now());
        }
        admitted
    }

    /// Adds a process as a member whose ancestors need not be known: the caller has learned from
    /// the kernel that it belongs to a run. Returns false if the process is gone.
    pub(crate) fn admit_known(&mut self, pid: u32) -> bool {
        self.members.contains_key(&pid) || self.insert(pid, self.root_above(pid).unwrap_or(0))
    }

    /// Adds a running process that was attached to, as one of the tree below `root`. Returns false
    /// if it is gone.
    pub(crate) fn attach(&mut self, pid: u32, root: u32) -> bool {
        self.new.list_all();
        self.outsiders.remove(&pid);
        self.insert(pid, root)
    }

    fn insert(&mut self, pid: u32, root: u32) -> bool {
        if let std::collections::btree_map::Entry::Vacant(vacant) = self.members.entry(pid) {
            let Some(member) = Member::open(pid, root) else { return false };
            vacant.insert(member);
            self.found = Some(Instant::now());
            // Its parent may have been seen first between its own fork and exec: it has another
            // stack since.
            if let Some(parent) = parent_of(pid)
                && let Some(member) = self.members.get_mut(&parent)
            {
                member.stack_start = stack_start(parent);
            }
        }
        true
    }

    /// The root of a process, by its ancestors; `None` for one that is of no tree.
    fn root_above(&self, pid: u32) -> Option<u32> {
        if self.roots.contains(&pid) {
            // The pager of its run's shared memory.
            return Some(pid);
        }
        let known = |at: u32| {
            let root = self.roots.contains(&at).then_some(at);
            root.or_else(|| self.launchers.get(&at).copied())
                .or_else(|| self.members.get(&at).map(|member| member.root))
        };
        above(pid, known)
    }

    /// The root in whose tree a member is; 0 where that is not known.
    pub(crate) fn root_of(&self, pid: u32) -> u32 {
        self.members.get(&pid).map_or(0, |member| member.root)
    }

    /// True if a member was found within this time.
    pub(crate) fn found_within(&self, age: Duration) -> bool {
        self.found.is_some_and(|found| found.elapsed() < age)
    }

    /// True if any process, of the tree or not, was started since the last look.
    pub(crate) fn may_have_grown(&mut self) -> bool {
        self.new.has_any()
    }

    /// Looks for new members, if any process was started since the last look.
    pub fn look(&mut self) {
        let started = self.new.look().processes;
        if started.is_empty() {
            return;
        }
        let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
        for process in started.into_iter().filter(|process| !process.zombie) {
            children.entry(process.ppid).or_default().push(process.pid);
        }
        let mut open: Vec<(u32, u32)> = self.roots.iter().map(|root| (*root, *root)).collect();
        open.extend(self.launchers.iter().map(|(launcher, root)| (*launcher, *root)));
        open.extend(self.members.iter().map(|(pid, member)| (*pid, member.root)));
        while let Some((parent, root)) = open.pop() {
            for child in children.remove(&parent).unwrap_or_default() {
                if !self.roots.contains(&child) {
                    self.insert(child, root);
                    open.push((child, root));
                }
            }
        }
    }

    /// Reads what each member uses; answers with the members that are gone since the last time.
    pub(crate) fn sample(&mut self) -> Vec<u32> {
        let mut dead = Vec::new();
        let mut by_stack: HashMap<u64, u32> = HashMap::new();
        let mut changed: HashSet<u64> = HashSet::new();
        for (pid, member) in &mut self.members {
            let before = member.resident;
            (member.resident, member.leaderless) = member.read_resident(*pid);
            member.gained = member.resident.saturating_sub(before);
            member.used = member.resident;
            if member.resident == 0 && member.is_dead() {
                dead.push(*pid);
            } else if member.stack_start != 0 && member.resident >= MIN_EXACT_BYTES {
                *by_stack.entry(member.stack_start).or_default() += 1;
            }
        }
        for pid in &dead {
            if let Some(member) = self.members.remove(pid) {
                changed.insert(member.stack_start);
            }
        }
        self.find_guests(&by_stack);
        let shares = |member: &Member| {
            member.resident >= MIN_EXACT_BYTES
                && by_stack.get(&member.stack_start).is_some_and(|count| *count > 1)
        };
        // A process that comes or goes changes what all others of its group have for themselves:
        // old numbers would count pages twice, or not at all. One that has lost most of its memory
        // has executed a program.
        changed.extend(
            self.members
                .values()
                .filter(|m| !m.guest && (shares(m) && m.pss.is_none() || m.has_lost_most()))
                .map(|m| m.stack_start),
        );
        self.count_proportionally(&changed, shares);
        dead
    }

    /// Bytes of a process's minor faults so far that copied nothing.
    pub(crate) fn discount_engine_faults(&mut self, pid: u32, bytes: u64) {
        if let Some(member) = self.members.get_mut(&pid) {
            member.discounted = bytes;
        }
    }

    /// Marks those that run on another's memory. Only one that was not read yet, or was a guest,
    /// can be one.
    fn find_guests(&mut self, by_stack: &HashMap<u64, u32>) {
        let mut hosts: Vec<(u32, u64)> = Vec::new();
        for (pid, member) in &mut self.members {
            if member.resident < MIN_EXACT_BYTES
                || by_stack.get(&member.stack_start).is_none_or(|count| *count < 2)
            {
                member.guest = false;
                continue;
            }
            if member.guest || member.pss.is_none() {
                let was = member.guest;
                member.guest = hosts.iter().any(|(host, stack_start)| {
                    *stack_start == member.stack_start && same_memory(*host, *pid)
                });
                if was && !member.guest {
                    // It has executed a program, perhaps after its size was read: that was its
                    // host's.
                    member.stack_start = stack_start(*pid);
                    (member.resident, member.leaderless) = member.read_resident(*pid);
                    (member.used, member.gained) = (member.resident, member.resident);
                }
            }
            if !member.guest {
                hosts.push((*pid, member.stack_start));
            }
        }
    }

    /// Returns the memory that a member used at the last sample.
    pub fn used(&self, pid: u32) -> u64 {
        self.members.get(&pid).map_or(0, |member| member.used)
    }

    /// Bytes that came to a member's memory between the last two samples.
    pub(crate) fn gained(&self, pid: u32) -> u64 {
        self.members.get(&pid).map_or(0, |member| member.gained)
    }

    /// What it held then beyond that: the parts of pages shared since a fork that count for others.
    pub fn shared(&self, pid: u32) -> u64 {
        let shared_part = |member: &Member| {
            member.pss.as_ref().map_or(0, |_| member.resident.saturating_sub(member.used))
        };
        self.members.get(&pid).map_or(0, shared_part)
    }

    /// Bytes of pages that came to a member without reading so far, copies of shared ones among
    /// them; none for one that shares nothing.
    pub(crate) fn grown(&self, pid: u32) -> Option<u64> {
        self.members
            .get(&pid)
            .filter(|member| member.pss.is_some())
            .map(|member| member.faults * PAGE_SIZE as u64)
    }

    /// Members whose first thread has ended and that live on, or seem to.
    pub(crate) fn leaderless(&self) -> impl Iterator<Item = u32> {
        self.members.iter().filter(|(_, member)| member.leaderless).map(|(pid, _)| *pid)
    }

    /// True if the process is a member.
    pub fn contains(&self, pid: u32) -> bool {
        self.members.contains_key(&pid)
    }

    /// All members, in the order of their numbers.
    pub(crate) fn pids(&self) -> impl Iterator<Item = u32> {
        self.members.keys().copied()
    }

    /// Kills every member of a root's tree.
    pub(crate) fn kill_all(&self, root: u32) {
        self.signal_all(root, libc::SIGKILL);
    }

    /// Sends a signal to every member of a root's tree.
    pub(crate) fn signal_all(&self, root: u32, signal: i32) {
        // The root itself is a member where it is the pager of shared memory.
        for (_, member) in
            self.members.iter().filter(|(pid, member)| member.root == root && **pid != root)
        {
            // One that is gone already is no error.
            let _ = pidfd_send_signal(member.pidfd.as_fd(), signal);
        }
    }
}

impl Member {
    fn open(pid: u32, root: u32) -> Option<Member> {
        let pidfd = pidfd_open(pid).ok()?;
        let statm = StatmFd::open(pid).ok()?;
        if is_one_of_the_last(&pidfd) {
            return None;
        }
        let member = Member {
            root,
            statm,
            stat: None,
            pidfd,
            stack_start: stack_start(pid),
            resident: 0,
            gained: 0,
            used: 0,
            pss: None,
            faults: 0,
            discounted: 0,
            guest: false,
            leaderless: false,
        };
        // The number may have passed to another process before the pidfd was open; then it lived at
        // that moment, and is the member.
        if member.is_dead() { None } else { Some(member) }
    }

    fn is_dead(&self) -> bool {
        poll_readable(&[self.pidfd.as_fd()], Some(Duration::ZERO)).is_ok_and(|ready| ready != 0)
    }

    fn read_resident(&self, pid: u32) -> (u64, bool) {
        match self.statm.anon_rss() {
            Some(0) => {
                let bytes = resident_by_threads(pid);
                (bytes, bytes > 0)
            }
            Some(bytes) => (bytes, false),
            None => (0, false),
        }
    }
}

/// The first thread of a process may have ended before the others; then only they show the memory.
fn resident_by_threads(pid: u32) -> u64 {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    threads
        .filter_map(|thread| thread.ok()?.file_name().to_str()?.parse().ok())
        .filter(|thread| *thread != pid)
        .filter_map(anon_rss)
        .find(|bytes| *bytes > 0)
        .unwrap_or(0)
}

/// Returns the start of a process's stack; 0 if unknown.
fn stack_start(pid: u32) -> u64 {
    proc_info(pid).map_or(0, |info| info.stack_start)
}

fn parent_of(pid: u32) -> Option<u32> {
    proc_info(pid).map(|info| info.ppid)
}

/// True if `pid` descends from `ancestor`.
pub(crate) fn descends(pid: u32, ancestor: u32) -> bool {
    above(pid, |at| (at == ancestor).then_some(())).is_some()
}

/// The kernel's answer on the number of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// A process of this number lives, or one of its threads does. It may be another than before.
    Lives,
    /// No process has it, or none of its threads lives.
    Gone,
    /// The kernel cannot be asked: there is no descriptor or memory left, or it is not permitted.
    Unknown,
}

/// Whether a process lives. What a process holds is taken back only if it is gone: a failed
/// question is no answer.
pub(crate) fn life(pid: u32) -> Life {
    match pidfd_open(pid) {
        Ok(pidfd) => match poll_readable(&[pidfd.as_fd()], Some(Duration::ZERO)) {
            Ok(0) => Life::Lives,
            Ok(_) => Life::Gone,
            Err(_) => Life::Unknown,
        },
        // The last two: the number is no process's, though it may be a thread's.
        Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => Life::Gone,
        // This takes no descriptor. A process that has ended is found until its parent has waited.
        Err(_) => match i32::try_from(pid).ok().and_then(Pid::from_raw).map(test_kill_process) {
            Some(Err(Errno::SRCH)) | None => Life::Gone,
            Some(_) => Life::Unknown,
        },
    }
}

/// Descriptors that members leave for everything else: requests, files of /proc.
fn reserve(limit: u64) -> u64 {
    (limit / 8).min(MAX_RESERVED_FDS)
}

/// True if a new descriptor is one of the last that are left: it has the lowest free number.
fn is_one_of_the_last(fd: &OwnedFd) -> bool {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    fd.as_raw_fd() as u64 >= limit - reserve(limit)
}

/// What `known` says of the nearest ancestor of which it says anything.
fn above<T>(pid: u32, known: impl Fn(u32) -> Option<T>) -> Option<T> {
    // An ancestor that ends between two steps breaks the chain: its children have another parent by
    // then.
    'walk: for _ in 0..8 {
        let mut at = pid;
        for _ in 0..1024 {
            match parent_of(at) {
                Some(parent) => match known(parent) {
                    Some(found) => return Some(found),
                    None if parent > 1 => at = parent,
                    None => return None,
                },
                None if at == pid => return None,
                None => continue 'walk,
            }
        }
        return None;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Killed;
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};

    fn python(program: &str) -> Killed {
        let mut child = Command::new("python3")
            .args(["-c", program])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 is needed for this test");
        let mut byte = [0u8; 1];
        child.stdout.as_mut().expect("stdout").read_exact(&mut byte).expect("the program is ready");
        Killed(child)
    }

    #[test]
    fn descendants_are_found_and_their_death_is_seen_once() {
        let mut shell =
            Killed(Command::new("sh").args(["-c", "sleep 600 & wait"]).spawn().expect("sh"));
        let mut tree = ProcessTree::new(std::process::id());
        let deadline = Instant::now() + Duration::from_secs(90);
        let inner = loop {
            tree.look();
            tree.sample();
            if let Some(inner) = tree.pids().find(|pid| parent_of(*pid) == Some(shell.0.id())) {
                break inner;
            }
            assert!(Instant::now() < deadline, "the shell's child was not found");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(tree.contains(shell.0.id()));
        assert!(descends(inner, std::process::id()) && !descends(std::process::id(), inner));
        pidfd_send_signal(tree.members[&inner].pidfd.as_fd(), libc::SIGKILL).expect("kill");
        shell.0.wait().expect("the shell ends with its child");
        let mut dead = Vec::new();
        while dead.len() < 2 {
            dead.extend(
                tree.sample().into_iter().filter(|pid| *pid == inner || *pid == shell.0.id()),
            );
            assert!(Instant::now() < deadline, "deaths were not seen");
            std::thread::sleep(Duration::from_millis(2));
        }
        dead.sort_unstable();
        dead.dedup();
        assert_eq!(dead.len(), 2);
        assert!(!tree.contains(inner));
    }

    #[test]
    fn memory_is_counted_and_a_fork_counts_shared_pages_once() {
        let size = 64 << 20;
        let program = format!(
            "import os,sys\nx=bytearray(b'x'*{size})\npid=os.fork()\nif pid: \
            sys.stdout.write('r'); sys.stdout.flush()\nsys.stdin.read()"
        );
        let mut parent = python(&program);
        let mut tree = ProcessTree::new(std::process::id());
        tree.admit(parent.0.id());
        tree.look();
        tree.sample();
        let child = tree
            .pids()
            .find(|pid| parent_of(*pid) == Some(parent.0.id()))
            .expect("the forked child");
        let resident = tree.members[&parent.0.id()].resident + tree.members[&child].resident;
        let used = tree.used(parent.0.id()) + tree.used(child);
        assert!(resident >= 2 * size, "{resident}");
        assert!(used >= size && used < size + size / 2, "{used}");
        parent.0.stdin.as_mut().expect("stdin").flush().expect("flush");
    }

    /// Between fork and exec a process looks like its parent; what it forks later does not.
    #[test]
    fn a_process_seen_before_its_exec_shares_with_later_forks() {
        let program = "import os,sys\nx=bytearray(b'x'*(32<<20))\npid=os.fork()\nif pid: \
            sys.stdout.write('r'); sys.stdout.flush()\nsys.stdin.read()";
        let parent = python(program);
        let mut tree = ProcessTree::new(std::process::id());
        tree.admit(parent.0.id());
        tree.members.get_mut(&parent.0.id()).expect("it was admitted").stack_start =
            stack_start(std::process::id());
        tree.look();
        tree.sample();
        let child = tree
            .pids()
            .find(|pid| parent_of(*pid) == Some(parent.0.id()))
            .expect("the forked child");
        let used = tree.used(parent.0.id()) + tree.used(child);
        assert!(used < 48 << 20 && tree.shared(child) > 12 << 20, "{used}");
    }

    #[test]
    fn members_know_their_root_and_outlive_it() {
        let shell =
            |command: &str| Killed(Command::new("sh").args(["-c", command]).spawn().expect("sh"));
        let (one, other) = (shell("sleep 600 & wait"), shell("sleep 600 & wait"));
        let mut tree = ProcessTree::default();
        tree.add_root(one.0.id());
        tree.add_root(other.0.id());
        let deadline = Instant::now() + Duration::from_secs(90);
        while tree.members.len() < 2 {
            tree.look();
            assert!(Instant::now() < deadline, "both shells' children are found");
            std::thread::sleep(Duration::from_millis(5));
        }
        for pid in tree.pids() {
            assert_eq!(Some(tree.root_of(pid)), parent_of(pid));
        }
        let orphan = tree.pids().find(|pid| tree.root_of(*pid) == other.0.id()).expect("a child");
        drop(other);
        tree.forget_root(parent_of(orphan).unwrap_or(0));
        tree.sample();
        assert!(tree.contains(orphan));
        tree.kill_all(tree.root_of(orphan));
        while tree.contains(orphan) {
            tree.sample();
            assert!(Instant::now() < deadline, "it is killed");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(tree.members.len(), 1, "the other one lives");
        tree.kill_all(one.0.id());
    }

    #[test]
    fn a_process_below_no_root_is_not_admitted() {
        let (mine, other) = (
            python("print('r', end='', flush=True); input()"),
            python("print('r', end='', flush=True); input()"),
        );
        let mut tree = ProcessTree::new(mine.0.id());
        assert!(!tree.admit(other.0.id()) && !tree.admit(1) && !tree.admit(std::process::id()));
        tree.sample();
        assert_eq!(tree.pids().count(), 0);
        tree.kill_all(mine.0.id());
        tree.kill_all(0);
        assert_eq!([other.0.id(), mine.0.id()].map(life), [Life::Lives; 2]);
        assert!(tree.admit_known(other.0.id()), "for which the kernel vouches");
        assert_eq!(tree.root_of(other.0.id()), 0, "in no run");
    }

    #[test]
    fn a_process_that_is_gone_is_not_admitted() {
        let mut child = Command::new("true").spawn().expect("true");
        let pid = child.id();
        child.wait().expect("wait");
        assert!(!ProcessTree::new(std::process::id()).admit(pid));
    }
}
