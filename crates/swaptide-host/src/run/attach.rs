//! A running process, and what it has started, under a budget: what is looked at before anything is
//! changed.
//!
//! Owns the rules of what cannot be taken. What only the attempt tells (a security module, a
//! process that may not be dumped) is the tracer's answer, and changes nothing either.
//!
//! Locks: none.

use std::fs::File;
use std::path::PathBuf;

use swaptide_sys::AsFd;
use swaptide_sys::elf::kind_of;
use swaptide_sys::process::{ProcInfo, proc_info, processes};
use thiserror::Error;

use crate::control::filter_client::{FilterLender, FoundFilters, find};
use crate::control::filter_offers::OfferedFilters;
use crate::inject::{
    Credentials, Tracer, is_confined, is_numbered_here, is_of_swaptide, shares_memory,
};
use crate::memctl::processes::descends;

/// Why a process cannot be attached to.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// No process has this number.
    #[error("no process {0}; see ps")]
    Missing(u32),
    /// It has ended, or is about to.
    #[error("process {0} has ended; its parent has not looked yet")]
    Ended(u32),
    /// It has started this command, or is it.
    #[error("process {0} has started this command; attach from outside of its tree")]
    Ancestor(u32),
    /// One of the kernel's, or its program cannot be seen.
    #[error(
        "process {0}: its program cannot be read: it is the kernel's, or another user's; only root \
        attaches to those of others"
    )]
    Unreadable(u32),
    /// Another user's.
    #[error("process {0} is another user's (user id {1}); only root attaches to those of others")]
    OtherUser(u32, u32),
    /// For another machine.
    #[error("process {0} does not run a program for 64-bit x86")]
    Machine(u32),
    /// It has an agent.
    #[error("process {0} is under swaptide already, or was started by it; see swaptide ctl list")]
    Managed(u32),
    /// A debugger has it.
    #[error("process {0} is traced by process {1}; end that first")]
    Traced(u32, u32),
    /// By a signal.
    #[error("process {0} is stopped; continue it first (kill -CONT {0})")]
    Stopped(u32),
    /// Of a container.
    #[error("process {0} is in another pid namespace; attach from within it")]
    Namespace(u32),
    /// Only its first thread has.
    #[error("process {0} goes on without its first thread, which has ended: it cannot be taken")]
    Leaderless(u32),
    /// It runs on another process's memory.
    #[error("process {0} has no memory of its own; attach to the process whose memory it is")]
    SharesMemory(u32),
    /// Its forks are another run's business.
    #[error(
        "process {0}: another swaptide attach has its forks ({path}); let that go first",
        path = .1.display()
    )]
    HasFilters(u32, PathBuf),
    /// It is under filters of its own.
    #[error(
        "process {0} is under seccomp filters that this command is not under, and that no swaptide \
        of this user answers: they could end it for what the agent does"
    )]
    Confined(u32),
}

/// A process that is attached to.
pub(crate) struct AttachTarget {
    pub(super) pid: u32,
    start: u64,
    rights: Credentials,
    /// What earlier supervisors have left.
    filters: Vec<(FilterLender, OfferedFilters)>,
}

impl AttachTarget {
    /// The program's name, for lists.
    pub(super) fn name(&self) -> String {
        let name = std::fs::read_to_string(format!("/proc/{}/comm", self.pid));
        name.map_or_else(|_| self.pid.to_string(), |name| name.trim_end().to_owned())
    }

    /// Its command line.
    pub(super) fn command(&self) -> Vec<String> {
        let text = std::fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
        let text = String::from_utf8_lossy(text.strip_suffix(b"\0").unwrap_or(&text)).into_owned();
        text.split('\0').map(str::to_owned).collect()
    }

    /// Has the process given the agent, and then what it has started.
    ///
    /// # Errors
    /// Why its forks cannot be had; nothing was changed then.
    pub(super) fn begin(&mut self, tracer: &mut Tracer) -> Result<(), String> {
        let mut is_first = true;
        for (lender, offered) in std::mem::take(&mut self.filters) {
            match lender.release() {
                Ok(()) => {
                    let taken = tracer.forks.take_over(offered);
                    taken.map_err(|errno| format!("its forks: {errno}"))?;
                }
                Err(error) if is_first => return Err(format!("its forks: {error}")),
                // What is under these filters stays unmanaged.
                Err(_) => {}
            }
            is_first = false;
        }
        tracer.attach(self.pid, self.start, &self.rights);
        Ok(())
    }
}

fn word_of_status(status: &str, key: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// The user ids of a process that are not `user`.
fn other_user(status: &str, user: u32) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let mut ids = line.split_ascii_whitespace().filter_map(|id| id.parse().ok());
    ids.find(|id| *id != user)
}

/// Looks whether a process can be attached to. Nothing is changed.
///
/// # Errors
/// See [`AttachError`].
pub(super) fn look(pid: u32) -> Result<AttachTarget, AttachError> {
    let info = proc_info(pid).filter(|info| info.pid == pid && pid != 0);
    let info = info.ok_or(AttachError::Missing(pid))?;
    let own = std::process::id();
    if pid == own || descends(own, pid) {
        return Err(AttachError::Ancestor(pid));
    }
    if info.zombie {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
        let is_alive = threads.is_ok_and(|threads| threads.count() > 1);
        let error = if is_alive { AttachError::Leaderless } else { AttachError::Ended };
        return Err(error(pid));
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
    let status = status.map_err(|_| AttachError::Missing(pid))?;
    let user = rustix::process::geteuid();
    if let Some(other) = other_user(&status, user.as_raw()).filter(|_| !user.is_root()) {
        return Err(AttachError::OtherUser(pid, other));
    }
    let program = File::open(format!("/proc/{pid}/exe"));
    let has_ended = || proc_info(pid).is_none_or(|info| info.zombie);
    let unreadable = |_| match has_ended() {
        true => AttachError::Ended(pid),
        false => AttachError::Unreadable(pid),
    };
    let program = program.map_err(unreadable)?;
    if kind_of(program.as_fd()).is_none() {
        return Err(AttachError::Machine(pid));
    }
    if is_of_swaptide(pid) {
        return Err(AttachError::Managed(pid));
    }
    if let Some(tracer) = word_of_status(&status, "TracerPid:").filter(|tracer| *tracer != 0) {
        return Err(AttachError::Traced(pid, tracer));
    }
    if info.stopped {
        return Err(AttachError::Stopped(pid));
    }
    if !is_numbered_here(pid) {
        return Err(AttachError::Namespace(pid));
    }
    if !info.has_executed && shares_memory(pid) {
        return Err(AttachError::SharesMemory(pid));
    }
    let rights = Credentials::of(pid).ok_or(AttachError::Unreadable(pid))?;
    let mut filters: Vec<(FilterLender, OfferedFilters)> = Vec::new();
    let below = tree_below(pid);
    for one in std::iter::once(pid).chain(below.iter().map(|info| info.pid)) {
        let is_known = |(_, offered): &(FilterLender, OfferedFilters)| {
            offered.processes.iter().any(|known| known.pid == one)
        };
        if !is_confined(one, false) || filters.iter().any(is_known) {
            continue;
        }
        match find(one) {
            FoundFilters::Lent(lender, offered) => filters.push((lender, offered)),
            FoundFilters::InUse(socket) => return Err(AttachError::HasFilters(one, socket)),
            FoundFilters::None if one == pid => return Err(AttachError::Confined(pid)),
            // That one stays unmanaged.
            FoundFilters::None => {}
        }
    }
    if is_confined(pid, !filters.is_empty()) {
        return Err(AttachError::Confined(pid));
    }
    Ok(AttachTarget { pid, start: info.start_time, rights, filters })
}

/// The processes below one that can have the agent, parents before their children.
fn tree_below(root: u32) -> Vec<ProcInfo> {
    let all = processes().unwrap_or_default();
    let (mut parents, mut below) = (vec![root], Vec::new());
    while let Some(parent) = parents.pop() {
        let children = all.iter().filter(|info| info.ppid == parent && !info.zombie);
        let children: Vec<ProcInfo> = children.copied().collect();
        parents.extend(children.iter().map(|info| info.pid));
        below.extend(children);
    }
    below.retain(|info| !is_of_swaptide(info.pid));
    below
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Killed;
    use std::process::Command;

    #[test]
    fn what_cannot_be_taken_is_refused() {
        let refused = |pid: u32| look(pid).map(drop).expect_err("it is refused");
        assert!(matches!(refused(0), AttachError::Missing(0)));
        assert!(matches!(refused(u32::MAX), AttachError::Missing(_)));
        assert!(matches!(refused(std::process::id()), AttachError::Ancestor(_)));
        assert!(matches!(refused(std::os::unix::process::parent_id()), AttachError::Ancestor(_)));
    }

    #[test]
    fn a_tree_is_taken_whole() {
        let parent = Killed(Command::new("sh").args(["-c", "sleep 60 & wait"]).spawn().unwrap());
        let pid = parent.0.id();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        loop {
            let found = look(pid).expect("it can be attached to");
            assert!(found.pid == pid && found.filters.is_empty());
            let below = tree_below(pid);
            if let [child] = below[..] {
                assert!(child.ppid == pid, "{child:?}");
                let _ = Command::new("kill").arg(child.pid.to_string()).status();
                break;
            }
            assert!(std::time::Instant::now() < deadline, "{below:?}");
        }
    }

    #[test]
    fn one_of_another_user_is_known_by_any_of_its_ids() {
        assert_eq!(other_user("Name:\tx\nUid:\t5\t5\t5\t5\n", 5), None);
        assert_eq!(other_user("Uid:\t5\t5\t0\t5\n", 5), Some(0));
        assert_eq!(word_of_status("TracerPid:\t17\n", "TracerPid:"), Some(17));
    }
}
