//! The threads of a program that is given the agent, but for the first one, and all threads of one
//! that has it and is about to be managed: those that run are stopped meanwhile, for what they
//! write in that time nothing holds within the budget.
//!
//! Owns these threads, from when they are traced until they are let go.
//!
//! Invariants
//! 1. Only a thread that runs is stopped: a system call in which one waits could end with `EINTR`.
//!    One that begins to wait just then may meet that, as when a process is stopped and continued.
//! 2. Each is let go when its program is, and at the latest after [`STOP_TIMEOUT`]; by the kernel,
//!    if the supervisor ends.
//! 3. One that has executed a program meanwhile has another number, under which it is let go.
//!
//! Locks: none; all calls come from the thread that traces.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::time::{Duration, Instant};

use swaptide_sys::process::is_running;
use swaptide_sys::ptrace::TraceeStop;
use swaptide_sys::remote::{Seized, is_traced_here};

/// How long a thread is stopped at most.
const STOP_TIMEOUT: Duration = Duration::from_millis(300);
/// Between two looks at those that are to be let go and have not stopped yet.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// The most threads that are stopped at a time: more do not run.
const MAX_THREADS: usize = 1024;

/// What the names of an engine's threads begin with.
const ENGINE_NAME: &[u8] = b"swaptide";

/// A thread that is stopped, or about to.
struct RunningThread {
    pid: u32,
    seized: Seized,
    since: Instant,
    /// It is to be let go as soon as it has stopped.
    is_over: bool,
}

/// Threads that are stopped while their programs are given the agent.
#[derive(Default)]
pub(super) struct RunningThreads(HashMap<u32, RunningThread>);

impl RunningThreads {
    /// Stops those of a process that run, but for those of its engine. `with_first`: also the
    /// first one.
    pub(super) fn stop(&mut self, pid: u32, with_first: bool) {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let tids = tasks.filter_map(|task| task.file_name().to_str()?.parse::<u32>().ok());
        for tid in tids.filter(|tid| with_first || *tid != pid) {
            if self.0.len() >= MAX_THREADS {
                return;
            }
            if self.0.contains_key(&tid) || !is_running(tid, ENGINE_NAME) {
                continue;
            }
            // One that has another tracer, or is gone, goes on.
            let Ok(seized) = Seized::seize(tid) else { continue };
            // One that is gone is told of by the wait.
            let _ = seized.interrupt();
            let since = Instant::now();
            self.0.insert(tid, RunningThread { pid, seized, since, is_over: false });
        }
    }

    /// Lets those of a process go.
    pub(super) fn let_go(&mut self, pid: u32) {
        for thread in self.0.values_mut().filter(|thread| thread.pid == pid) {
            thread.is_over = true;
            // Those that have stopped; the others when they do.
            thread.seized.release();
        }
        self.forget();
    }

    /// The processes of those that are not to be let go yet.
    pub(super) fn pids(&self) -> BTreeSet<u32> {
        self.0.values().filter(|thread| !thread.is_over).map(|thread| thread.pid).collect()
    }

    /// True for a thread that is traced here.
    pub(super) fn has(&self, tid: u32) -> bool {
        self.0.contains_key(&tid)
    }

    /// The longest time until the next [`RunningThreads::attend`].
    pub(super) fn timeout(&self) -> Option<Duration> {
        if self.0.values().any(|thread| thread.is_over) {
            return Some(LOOK_INTERVAL);
        }
        let oldest = self.0.values().map(|thread| thread.since).min()?;
        Some(STOP_TIMEOUT.saturating_sub(oldest.elapsed()))
    }

    /// Lets those go whose time is up, and forgets those that are gone.
    pub(super) fn attend(&mut self) {
        for thread in self.0.values_mut() {
            thread.is_over |= thread.since.elapsed() >= STOP_TIMEOUT;
            if thread.is_over {
                thread.seized.release();
            }
        }
        self.forget();
    }

    /// The wait has reported a change of one of them.
    pub(super) fn changed(&mut self, tid: u32, stop: TraceeStop) {
        let Some(thread) = self.0.get(&tid) else { return };
        match stop {
            TraceeStop::Gone => drop(self.0.remove(&tid)),
            TraceeStop::Still if !thread.is_over => {}
            // With its process, and it stays so.
            TraceeStop::Still | TraceeStop::Stopped => {
                thread.seized.release();
                self.0.remove(&tid);
            }
            TraceeStop::Signal(_) | TraceeStop::Forked | TraceeStop::Executed => {
                let signal = if let TraceeStop::Signal(signal) = stop { signal } else { 0 };
                // One that is gone is told of by the wait.
                let _ = thread.seized.go_on(signal);
            }
        }
    }

    fn forget(&mut self) {
        let mut renamed = Vec::new();
        self.0.retain(|tid, thread| {
            if !thread.is_over || is_traced_here(*tid) {
                return true;
            }
            // It has executed a program: it is the first thread of its process.
            if *tid != thread.pid && is_traced_here(thread.pid) {
                renamed.push(thread.pid);
            }
            false
        });
        for pid in renamed {
            let seized = Seized::of(pid);
            let since = Instant::now();
            self.0.entry(pid).or_insert(RunningThread { pid, seized, since, is_over: true });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    const SPINS: &str = "SWAPTIDE_TEST_SPINS";
    const THREADS: usize = 3;

    /// The program of the test below.
    #[test]
    fn program_whose_threads_run() {
        if std::env::var_os(SPINS).is_none() {
            return;
        }
        let spin = || {
            let began = Instant::now();
            while began.elapsed() < Duration::from_secs(60) {
                std::hint::spin_loop();
            }
        };
        let waits = || std::thread::sleep(Duration::from_secs(60));
        let mut threads: Vec<_> = (0..THREADS).map(|_| std::thread::spawn(spin)).collect();
        threads.push(std::thread::spawn(waits));
        println!("begun");
        threads.into_iter().for_each(|thread| thread.join().expect("it ends"));
    }

    /// What the supervisor does.
    fn wait(running: &mut RunningThreads) {
        for tid in running.0.keys().copied().collect::<Vec<_>>() {
            let mut status = 0;
            let options = libc::WNOHANG | libc::__WALL;
            // SAFETY: the status is a local number.
            let got = unsafe { libc::waitpid(tid as libc::pid_t, &mut status, options) };
            if got > 0 {
                running.changed(tid, TraceeStop::of(status as u32));
            }
        }
        running.attend();
    }

    struct Program(Child);

    impl Program {
        fn start() -> Program {
            let mut child = Command::new(std::env::current_exe().expect("this program"))
                .args(["--exact", "inject::running::tests::program_whose_threads_run"])
                .arg("--nocapture")
                .env(SPINS, "1")
                .stdout(Stdio::piped())
                .spawn()
                .expect("it starts");
            let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
            assert!(lines.map_while(Result::ok).any(|line| line.contains("begun")));
            Program(child)
        }

        /// How many of its threads have a state.
        fn count(&self, states: &[&str]) -> usize {
            let tasks = fs::read_dir(format!("/proc/{}/task", self.0.id())).expect("it lives");
            let status = |task: fs::DirEntry| fs::read_to_string(task.path().join("status"));
            let is_one = |status: &String| {
                let state = status.lines().find_map(|line| line.strip_prefix("State:\t"));
                state.is_some_and(|state| states.iter().any(|one| state.starts_with(one)))
            };
            tasks.flatten().filter_map(|task| status(task).ok()).filter(is_one).count()
        }

        fn until(&self, running: &mut RunningThreads, states: &[&str], count: usize) {
            let began = Instant::now();
            while self.count(states) != count {
                assert!(began.elapsed() < Duration::from_secs(30), "{states:?}: not {count}");
                wait(running);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    impl Drop for Program {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn those_that_run_are_stopped_until_they_are_let_go() {
        let program = Program::start();
        let pid = program.0.id();
        let mut running = RunningThreads::default();
        // Its first thread waits, and so does that of the test before it starts another one.
        program.until(&mut running, &["R"], THREADS);
        running.stop(pid, false);
        program.until(&mut running, &["t"], THREADS);
        assert!(running.timeout().is_some() && program.count(&["R"]) == 0);
        running.let_go(pid);
        program.until(&mut running, &["R"], THREADS);
        assert!(running.timeout().is_none(), "none is traced any more");
        // And by themselves, in the end.
        running.stop(pid, false);
        program.until(&mut running, &["t"], THREADS);
        program.until(&mut running, &["R"], THREADS);
        assert!(running.timeout().is_none());
    }

    #[test]
    fn those_that_end_meanwhile_are_forgotten() {
        let mut program = Program::start();
        let mut running = RunningThreads::default();
        program.until(&mut running, &["R"], THREADS);
        running.stop(program.0.id(), false);
        assert_eq!(running.0.len(), THREADS);
        program.0.kill().expect("it is killed");
        let began = Instant::now();
        while running.timeout().is_some() {
            assert!(began.elapsed() < Duration::from_secs(30), "{} are left", running.0.len());
            wait(&mut running);
        }
    }
}
