//! Putting the machine back as it was.
//!
//! Owns the list of things a benchmark changed outside its own process: settings written, swap
//! devices switched on, compressed-RAM devices made, files and cgroups created, and the child
//! processes that use them.
//!
//! Invariants:
//! 1. A change is recorded before it is made, and made under the same lock, so no thread that
//!    undoes can miss it.
//! 2. Changes are undone in the reverse of the order they were made in.
//! 3. Every undo step may run when its change never took effect, and does no harm then.
//! 4. Children are dead before anything is undone: `swapoff` under a living 1 GiB program would
//!    pull it all back.
//!
//! Locks: `RestorerState::undos` is held across a change and across undoing;
//! `RestorerState::children` and `RestorerState::at_interrupt` are taken alone or inside it.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// What is still to be done when a signal ends the benchmark.
type AtInterrupt = dyn FnOnce() + Send;

/// Runs one of the system's tools (`mkswap`, `swapon`, `swapoff`) with its arguments.
type Tool = dyn Fn(&str, &[&OsStr]) -> Result<(), String> + Send + Sync;

/// The machine a benchmark sets up: a file tree (the real one, or a copy in a test) and its tools.
#[derive(Clone)]
pub struct Machine {
    root: PathBuf,
    tool: Arc<Tool>,
    /// How long undoing waits for a device or a cgroup that is still busy.
    retry_time: Duration,
}

impl Machine {
    /// This machine.
    pub(crate) fn real() -> Self {
        Machine {
            root: PathBuf::from("/"),
            tool: Arc::new(run_tool),
            retry_time: Duration::from_secs(5),
        }
    }

    /// A machine whose files lie under `root` and whose tools are `tool`.
    #[cfg(test)]
    pub fn fake(root: &Path, tool: Arc<Tool>) -> Self {
        Machine { root: root.to_owned(), tool, retry_time: Duration::from_millis(50) }
    }

    /// Where the file that is `path` on a real machine lies.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file, without its last newline.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<String, String> {
        let path = self.path(path);
        std::fs::read_to_string(&path)
            .map(|s| s.trim_end().to_owned())
            .map_err(|e| format!("reading {}: {e}", path.display()))
    }

    /// Writes a setting.
    pub fn write(&self, path: impl AsRef<Path>, value: &str) -> Result<(), String> {
        let path = self.path(path);
        std::fs::write(&path, value)
            .map_err(|e| format!("writing {value:?} to {}: {e}", path.display()))
    }

    /// Runs a tool.
    pub(crate) fn tool(&self, name: &str, args: &[&OsStr]) -> Result<(), String> {
        (self.tool)(name, args)
    }

    /// True if swap is on for `device` now.
    pub(crate) fn swap_is_on(&self, device: &Path) -> bool {
        let list = self.read("/proc/swaps").unwrap_or_default();
        list.lines()
            .skip(1)
            .filter_map(|l| l.split_whitespace().next())
            .any(|d| Path::new(d) == device)
    }

    /// Tries `step` again while it fails, until its time is over.
    fn keep_trying(&self, mut step: impl FnMut() -> Result<(), String>) -> Result<(), String> {
        let end = Instant::now() + self.retry_time;
        loop {
            match step() {
                Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
                done => return done,
            }
        }
    }
}

/// Runs a tool from the usual places, also where `PATH` leaves out the administrator's directories.
fn run_tool(name: &str, args: &[&OsStr]) -> Result<(), String> {
    let path =
        format!("{}:/usr/sbin:/sbin:/usr/bin:/bin", std::env::var("PATH").unwrap_or_default());
    let found = path.split(':').map(|d| Path::new(d).join(name)).find(|p| p.is_file());
    let Some(found) = found else {
        return Err(format!("{name} is not installed; install util-linux"));
    };
    let out = Command::new(found)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("{name}: {e}"))?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!(
        "{name} failed ({}): {}",
        out.status,
        String::from_utf8_lossy(&out.stderr).trim().replace('\n', "; ")
    ))
}

/// One thing to undo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undo {
    /// Write a setting's old value back.
    Write {
        /// The file of the setting.
        path: PathBuf,
        /// The value that is written back.
        value: String,
    },
    /// Switch swap off on a device or file.
    SwapOff(PathBuf),
    /// Empty the compressed-RAM device of this number and take it away.
    RemoveZram(u32),
    /// Delete a file that the benchmark made.
    RemoveFile(PathBuf),
    /// Delete a directory with all that is in it.
    RemoveTree(PathBuf),
    /// Delete an empty cgroup.
    RemoveCgroup(PathBuf),
}

impl Undo {
    fn run(&self, machine: &Machine) -> Result<(), String> {
        match self {
            Undo::Write { path, value } => machine.write(path, value),
            Undo::SwapOff(device) if machine.swap_is_on(device) => {
                machine.tool("swapoff", &[device.as_os_str()])
            }
            Undo::SwapOff(_) => Ok(()),
            Undo::RemoveZram(id) => {
                let reset = format!("/sys/block/zram{id}/reset");
                if !machine.path(&reset).exists() {
                    return Ok(());
                }
                machine.keep_trying(|| machine.write(&reset, "1"))?;
                machine.keep_trying(|| {
                    machine.write("/sys/class/zram-control/hot_remove", &id.to_string())
                })
            }
            Undo::RemoveFile(path) => gone(path, std::fs::remove_file(machine.path(path))),
            Undo::RemoveTree(path) => gone(path, std::fs::remove_dir_all(machine.path(path))),
            Undo::RemoveCgroup(path) => {
                machine.keep_trying(|| gone(path, std::fs::remove_dir(machine.path(path))))
            }
        }
    }
}

/// What is not there need not be removed.
fn gone(path: &Path, result: io::Result<()>) -> Result<(), String> {
    match result {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(format!("removing {}: {e}", path.display()))
        }
        _ => Ok(()),
    }
}

#[derive(Default)]
struct RestorerState {
    undos: Mutex<Vec<Undo>>,
    children: Mutex<Vec<(u64, OwnedFd)>>,
    next_child: AtomicU64,
    interrupted: AtomicBool,
    at_interrupt: Mutex<Option<Box<AtInterrupt>>>,
}

/// Takes a lock whatever happened to the thread that held it: undoing must continue.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// The list of what to undo, shared with the signal thread and the panic hook.
#[derive(Clone)]
pub struct Restorer {
    machine: Machine,
    shared: Arc<RestorerState>,
}

impl Restorer {
    /// An empty list for `machine`.
    pub fn new(machine: Machine) -> Self {
        Restorer { machine, shared: Arc::default() }
    }

    /// An empty list for this machine.
    pub fn here() -> Self {
        Restorer::new(Machine::real())
    }

    /// The machine this list is about.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Undoes everything when this process is told to end (SIGINT, SIGTERM, SIGHUP) or panics, then
    /// lets it end.
    pub fn watch_signals(&self) -> Result<(), String> {
        let mut signals = signal_hook::iterator::Signals::new([2, 15, 1])
            .map_err(|e| format!("cannot watch for signals: {e}"))?;
        let restorer = self.clone();
        let watch = move || {
            if let Some(signal) = signals.forever().next() {
                restorer.shared.interrupted.store(true, Ordering::SeqCst);
                restorer.kill_children();
                // The lock stays held until the process is gone, so the main thread changes nothing
                // more.
                let mut undos = lock(&restorer.shared.undos);
                complain(&undo_down_to(&restorer.machine, &mut undos, 0));
                restorer.run_at_interrupt();
                std::process::exit(128 + signal);
            }
        };
        std::thread::Builder::new()
            .name("restore".into())
            .spawn(watch)
            .map_err(|e| format!("cannot start a thread: {e}"))?;
        let restorer = self.clone();
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            before(info);
            restorer.kill_children();
            // Not `lock`: the thread that panics may be the one that holds it.
            for _ in 0..100 {
                if let Ok(mut undos) = restorer.shared.undos.try_lock() {
                    complain(&undo_down_to(&restorer.machine, &mut undos, 0));
                    return;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }));
        Ok(())
    }

    /// Makes a change that `undo` takes back.
    pub fn change<T>(
        &self,
        undo: Undo,
        change: impl FnOnce(&Machine) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut undos = lock(&self.shared.undos);
        undos.push(undo);
        change(&self.machine)
    }

    /// Makes a change that is known only afterwards (a device whose number the kernel picks).
    pub(crate) fn change_then<T>(
        &self,
        change: impl FnOnce(&Machine) -> Result<T, String>,
        undo: impl FnOnce(&T) -> Undo,
    ) -> Result<T, String> {
        let mut undos = lock(&self.shared.undos);
        let made = change(&self.machine)?;
        undos.push(undo(&made));
        Ok(made)
    }

    /// Changes a setting, to be set back later. A setting of several words in which the chosen one
    /// stands in brackets (`always [madvise] never`) is set back to the chosen word.
    pub fn set(&self, path: &str, value: &str) -> Result<(), String> {
        let old = chosen(&self.machine.read(path)?).to_owned();
        self.change(Undo::Write { path: path.into(), value: old }, |m| m.write(path, value))
    }

    /// Everything changed from here on is undone when the scope is dropped.
    pub fn scope(&self) -> UndoScope {
        UndoScope { restorer: self.clone(), depth: lock(&self.shared.undos).len() }
    }

    /// Starts a child that is killed before anything is undone.
    pub fn spawn(&self, command: &mut Command) -> Result<RunningChild, String> {
        let mut children = lock(&self.shared.children);
        let child = command.spawn().map_err(|e| {
            format!("cannot start {}: {e}", command.get_program().to_string_lossy())
        })?;
        let id = self.shared.next_child.fetch_add(1, Ordering::Relaxed);
        // A pidfd, taken while the child cannot yet have been waited for, can never mean another
        // process.
        if let Some(Ok(fd)) =
            Pid::from_raw(child.id() as i32).map(|pid| pidfd_open(pid, PidfdFlags::empty()))
        {
            children.push((id, fd));
        }
        Ok(RunningChild { child, id, restorer: self.clone() })
    }

    /// Has `last` done when a signal ends this process, after everything was undone. What was given
    /// before is forgotten.
    pub fn at_interrupt(&self, last: impl FnOnce() + Send + 'static) {
        *lock(&self.shared.at_interrupt) = Some(Box::new(last));
    }

    fn run_at_interrupt(&self) {
        // Not within the lock.
        let last = lock(&self.shared.at_interrupt).take();
        if let Some(last) = last {
            last();
        }
    }

    /// Never returns once a signal has come: the signal thread is undoing and ends the process.
    pub fn stop_if_interrupted(&self) {
        while self.shared.interrupted.load(Ordering::SeqCst) {
            std::thread::park();
        }
    }

    fn kill_children(&self) {
        let children = lock(&self.shared.children);
        for (_, fd) in children.iter() {
            // A run under swaptide passes SIGTERM on to its program.
            let _ = pidfd_send_signal(fd.as_fd(), Signal::TERM);
        }
        for (_, fd) in children.iter() {
            for (seconds, then) in [(3, Some(Signal::KILL)), (10, None)] {
                let mut fds = [PollFd::new(fd, PollFlags::IN)];
                let ended = poll(&mut fds, Some(&Timespec { tv_sec: seconds, tv_nsec: 0 }))
                    .is_ok_and(|n| n > 0);
                match then {
                    Some(signal) if !ended => drop(pidfd_send_signal(fd.as_fd(), signal)),
                    _ => break,
                }
            }
        }
    }
}

/// The chosen word of a setting that lists its choices.
fn chosen(text: &str) -> &str {
    match (text.find('['), text.find(']')) {
        (Some(a), Some(b)) if a < b => &text[a + 1..b],
        _ => text,
    }
}

/// Undoes the newest changes until `depth` are left; continues past a failure and returns what
/// failed.
fn undo_down_to(machine: &Machine, undos: &mut Vec<Undo>, depth: usize) -> Vec<String> {
    let mut failed = Vec::new();
    while undos.len() > depth {
        if let Some(Err(e)) = undos.pop().map(|undo| undo.run(machine)) {
            failed.push(e);
        }
    }
    failed
}

fn complain(failures: &[String]) {
    for failure in failures {
        eprintln!("swaptide: could not put the machine back: {failure}");
    }
}

/// Undoes what was changed since it was made, when dropped.
pub struct UndoScope {
    restorer: Restorer,
    depth: usize,
}

impl Drop for UndoScope {
    fn drop(&mut self) {
        let mut undos = lock(&self.restorer.shared.undos);
        complain(&undo_down_to(&self.restorer.machine, &mut undos, self.depth));
    }
}

/// A child process; killed if it is dropped while it runs.
pub struct RunningChild {
    /// The process.
    pub child: Child,
    id: u64,
    restorer: Restorer,
}

impl RunningChild {
    /// Ends the process: asks it, so that one under swaptide takes its program with it, and kills
    /// it when it does not listen.
    pub fn end(mut self) {
        if let Some((_, fd)) =
            lock(&self.restorer.shared.children).iter().find(|(id, _)| *id == self.id)
        {
            let _ = pidfd_send_signal(fd.as_fd(), Signal::TERM);
            let _ = poll(
                &mut [PollFd::new(fd, PollFlags::IN)],
                Some(&Timespec { tv_sec: 5, tv_nsec: 0 }),
            );
        }
        // What is left is killed and waited for when it is dropped.
        let _ = self.child.try_wait();
    }
}

impl Drop for RunningChild {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        lock(&self.restorer.shared.children).retain(|(id, _)| *id != self.id);
    }
}

#[cfg(test)]
#[path = "restore_tests.rs"]
mod tests;
