//! The threads of a program that is given the agent, but for the first one, and all threads of one
//! that has it, fills memory fast, and is about to be managed: those that run are stopped
//! meanwhile, for what they write in that time nothing holds within the budget.
//!
//! Owns these threads, from when they are traced until they are let go, and the thread that traces
//! them. It is one of its own, for to trace a thread waits while another one of the process
//! executes a program. That waits until the threads that it has ended were waited for, which the
//! supervisor's first thread does meanwhile.
//!
//! Invariants
//! 1. Only a thread that runs is stopped. Where it has begun to wait by then, that begins again
//!    ([`Seized::release`]); a write to a pipe may have written a part.
//! 2. Those of one process are stopped at a time. Each is let go when its program is, and at the
//!    latest after the time that was named, or as soon as it stops; later only where another
//!    thread of such a process executes a program, which takes long; by the kernel, if the
//!    supervisor ends.
//! 3. One that executes a program is let go before that runs, under the number of its process.
//! 4. A thread is let go only at a stop that was reported and is no signal's: no signal is lost.
//! 5. All of it is done without `CAP_SYS_PTRACE`.
//! 6. The supervisor's first thread begins to trace no process of which one is traced here
//!    ([`Stopper::is_busy`]): it would wait for itself.
//! 7. Whose a stop is that the wait has reported, the kernel says to who traces: no file of /proc,
//!    which may hide a process, or for which there may be no descriptor. Numbers are noted before
//!    they are traced, and what comes of them is asked for here. If it is none of a thread that is
//!    traced, the first thread has it back ([`Stopper::take_untold`]).
//!
//! Locks: `busy`, for a moment; threads talk through channels.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::thread::CapabilitySet;
use swaptide_sys::eventfd::EventFd;
use swaptide_sys::process::{is_running, proc_info};
use swaptide_sys::ptrace::TraceeStop;
use swaptide_sys::remote::{Seized, is_stopped_here, stop_of};

use crate::capability::without;

/// How long a thread is stopped at most, while its program is given the agent.
pub(super) const INJECTION_TIMEOUT: Duration = Duration::from_millis(300);
/// The same while it begins to be managed: a thread that was stopped may hold what the engine waits
/// for.
pub(super) const ENGAGED_TIMEOUT: Duration = Duration::from_millis(100);
/// Between two looks at those that are to be let go and have not stopped yet.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// The most threads that are stopped at a time: more do not run.
const MAX_THREADS: usize = 1024;
/// What the names of an engine's threads begin with.
const ENGINE_NAME: &[u8] = b"swaptide";

/// What the thread is told.
enum StopperWord {
    /// Stop those of a process that run; `with_first`: also the first one.
    Stop { pid: u32, with_first: bool, timeout: Duration },
    /// Let those of a process go.
    LetGo(u32),
    /// A wait has reported a change of one of them.
    Changed(u32, TraceeStop),
}

/// What is traced by the thread, or will be.
#[derive(Default)]
struct BusyProcesses {
    /// How often each is to be stopped still.
    ordered: BTreeMap<u32, u32>,
    traced: BTreeSet<u32>,
    /// The numbers of the threads that are traced, or are about to be.
    threads: BTreeSet<u32>,
    /// Stops of processes that are not traced, and the signal.
    untold: Vec<(u32, u32)>,
}

/// Stops threads that run.
pub(super) struct Stopper {
    words: Sender<StopperWord>,
    busy: Arc<Mutex<BusyProcesses>>,
    /// Signalled when one was let go that is stopped with its process: then its parent is told; and
    /// for what is [untold](Stopper::take_untold).
    wake: Arc<EventFd>,
    /// Until the thread is started.
    received: Option<Receiver<StopperWord>>,
    /// Processes whose threads it was told to stop, and not yet to let go; and since when.
    asked: BTreeMap<u32, Instant>,
}

impl Stopper {
    pub(super) fn new(wake: Arc<EventFd>) -> Stopper {
        let (words, received) = channel();
        let (busy, asked) = (Arc::default(), BTreeMap::new());
        Stopper { words, busy, wake, received: Some(received), asked }
    }

    /// Stops the threads of a process that run, but for its engine's and, unless `with_first`, the
    /// first one. They go on after `timeout` at the latest.
    pub(super) fn stop(&mut self, pid: u32, with_first: bool, timeout: Duration) {
        self.asked.entry(pid).or_insert_with(Instant::now);
        if let Some(received) = self.received.take() {
            let (busy, wake) = (Arc::clone(&self.busy), Arc::clone(&self.wake));
            let run = move || {
                let orders = Arc::clone(&busy);
                let threads = RunningThreads { threads: HashMap::new(), busy, wake };
                // Without that none is stopped.
                let _ = without(CapabilitySet::SYS_PTRACE, || threads.run(&received));
                drop(received);
                lock(&orders).ordered.clear();
            };
            let _ = Builder::new().name("stopper".into()).spawn(run);
        }
        let mut busy = lock(&self.busy);
        *busy.ordered.entry(pid).or_default() += 1;
        if self.words.send(StopperWord::Stop { pid, with_first, timeout }).is_err() {
            busy.ordered.clear();
        }
    }

    /// True while a thread of a process is traced, or will be.
    pub(super) fn is_busy(&self, pid: u32) -> bool {
        let busy = lock(&self.busy);
        busy.ordered.contains_key(&pid) || busy.traced.contains(&pid)
    }

    /// Lets those of a process go.
    pub(super) fn let_go(&mut self, pid: u32) {
        if self.asked.remove(&pid).is_some() {
            let _ = self.words.send(StopperWord::LetGo(pid));
        }
    }

    /// True for a process whose first thread may be one of those that are traced.
    pub(super) fn may_trace(&self, pid: u32) -> bool {
        self.asked.contains_key(&pid) || lock(&self.busy).threads.contains(&pid)
    }

    /// The processes whose threads are to be let go, and whether their time is up.
    pub(super) fn asked(&self) -> impl Iterator<Item = (u32, bool)> + '_ {
        self.asked.iter().map(|(pid, since)| (*pid, since.elapsed() > INJECTION_TIMEOUT))
    }

    /// The wait of the supervisor's first thread has reported a change. True if that was a stop of
    /// one of these threads, which is dealt with.
    pub(super) fn changed(&self, tid: u32, stop: TraceeStop) -> bool {
        if stop != TraceeStop::Gone && is_stopped_here(tid) {
            // What the first thread traces.
            return false;
        }
        let busy = lock(&self.busy);
        // Who has executed a program has another number then.
        let has_executed = stop == TraceeStop::Executed
            && (busy.traced.contains(&tid) || busy.ordered.contains_key(&tid));
        if !busy.threads.contains(&tid) && !has_executed {
            return false;
        }
        drop(busy);
        let sent = self.words.send(StopperWord::Changed(tid, stop));
        sent.is_ok() && stop != TraceeStop::Gone
    }

    /// Processes that have stopped by a signal, which [`Stopper::changed`] took for threads that
    /// are traced.
    pub(super) fn take_untold(&self) -> Vec<(u32, u32)> {
        std::mem::take(&mut lock(&self.busy).untold)
    }
}

fn lock(busy: &Mutex<BusyProcesses>) -> MutexGuard<'_, BusyProcesses> {
    busy.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits a moment until a process that was let go is stopped by its signal again.
fn until_stopped(pid: u32) {
    for _ in 0..20 {
        if proc_info(pid).is_none_or(|info| info.stopped) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A thread that is stopped, or about to.
struct RunningThread {
    pid: u32,
    seized: Seized,
    until: Instant,
    is_stopped: bool,
    /// It is to be let go as soon as it has stopped.
    is_over: bool,
}

/// The threads that are stopped, of the thread that traces them.
struct RunningThreads {
    threads: HashMap<u32, RunningThread>,
    busy: Arc<Mutex<BusyProcesses>>,
    wake: Arc<EventFd>,
}

impl RunningThreads {
    fn run(mut self, words: &Receiver<StopperWord>) {
        swaptide_sys::affinity::go_first();
        let mut looked = Instant::now();
        loop {
            let word = match self.timeout() {
                Some(timeout) => words.recv_timeout(timeout),
                None => words.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            let mut done = None;
            match word {
                Ok(StopperWord::Stop { pid, with_first, timeout }) => {
                    self.stop(pid, with_first, Instant::now() + timeout);
                    done = Some(pid);
                }
                Ok(StopperWord::LetGo(pid)) => self.let_go(|thread| thread.pid == pid),
                Ok(StopperWord::Changed(tid, stop)) => self.changed(tid, stop),
                Err(RecvTimeoutError::Timeout) => {}
                // The kernel lets go what is traced.
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let now = Instant::now();
            self.let_go(|thread| thread.until <= now);
            // However many words there are.
            if now.duration_since(looked) >= LOOK_INTERVAL {
                looked = now;
                self.forget();
            }
            self.publish(done);
        }
    }

    /// Says what is traced now; `done`: a process that was stopped as it was ordered.
    fn publish(&self, done: Option<u32>) {
        let mut busy = lock(&self.busy);
        busy.traced = self.threads.values().map(|thread| thread.pid).collect();
        if let Some(pid) = done
            && let Some(count) = busy.ordered.get_mut(&pid)
        {
            *count -= 1;
            if *count == 0 {
                busy.ordered.remove(&pid);
            }
        }
    }

    fn timeout(&self) -> Option<Duration> {
        let until = |thread: &RunningThread| match thread.is_over {
            true => LOOK_INTERVAL,
            false => thread.until.saturating_duration_since(Instant::now()).min(LOOK_INTERVAL),
        };
        self.threads.values().map(until).min()
    }

    fn stop(&mut self, pid: u32, with_first: bool, until: Instant) {
        self.let_go(|thread| thread.pid != pid);
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let tids = tasks.filter_map(|task| task.file_name().to_str()?.parse::<u32>().ok());
        for tid in tids.filter(|tid| with_first || *tid != pid) {
            if self.threads.len() >= MAX_THREADS {
                return;
            }
            if let Some(thread) = self.threads.get_mut(&tid) {
                thread.until = thread.until.max(until);
                thread.is_over = false;
                continue;
            }
            if !is_running(tid, ENGINE_NAME) {
                continue;
            }
            // Its first stop may be reported before anything else is done here, also under the
            // number of its process.
            lock(&self.busy).threads.extend([tid, pid]);
            if let Some((number, thread)) = self.begin(pid, tid, until) {
                self.threads.insert(number, thread);
            }
            for number in [tid, pid].into_iter().filter(|one| !self.threads.contains_key(one)) {
                self.unmark(number);
            }
        }
    }

    /// Traces a thread and has it stop; it, and its number by then. `None` for one that has another
    /// tracer, or is gone: it goes on.
    fn begin(&self, pid: u32, tid: u32, until: Instant) -> Option<(u32, RunningThread)> {
        let seized = Seized::seize_until_exec(tid).ok()?;
        let thread = RunningThread { pid, seized, until, is_stopped: false, is_over: false };
        if thread.seized.interrupt().is_ok() {
            return Some((tid, thread));
        }
        // It has ended, or executed a program before it was traced.
        let seized = Seized::of(pid);
        if tid == pid || seized.interrupt().is_err() {
            return None;
        }
        Some((pid, RunningThread { seized, is_over: true, ..thread }))
    }

    /// A thread is about to be let go, and stopped until then; or it is gone.
    fn unmark(&self, tid: u32) {
        lock(&self.busy).threads.remove(&tid);
    }

    /// Lets some go, or notes that for when they stop.
    fn let_go(&mut self, which: impl Fn(&RunningThread) -> bool) {
        let is_free = |_: &u32, thread: &mut RunningThread| {
            thread.is_over |= which(thread);
            thread.is_over && thread.is_stopped
        };
        for (tid, thread) in self.threads.extract_if(is_free).collect::<Vec<_>>() {
            self.unmark(tid);
            thread.seized.release();
        }
    }

    fn changed(&mut self, tid: u32, told: TraceeStop) {
        if told == TraceeStop::Gone {
            self.unmark(tid);
            self.threads.remove(&tid);
            return;
        }
        // What was told may be over by now.
        let Some(stop) = stop_of(tid) else { return self.not_stopped(tid, told) };
        let signal = if let TraceeStop::Signal(signal) = stop { signal } else { 0 };
        match (stop, self.threads.get_mut(&tid)) {
            (TraceeStop::Still, Some(thread)) if !thread.is_over => thread.is_stopped = true,
            (TraceeStop::Signal(_) | TraceeStop::Forked, Some(thread)) => {
                // One that is gone is told of by the wait.
                let _ = thread.seized.go_on(signal);
            }
            // A thread without an entry has executed a program, and had another number before: all
            // others of its process are gone.
            _ => {
                self.unmark(tid);
                Seized::of(tid).release_with(signal);
                self.threads.remove(&tid);
                if stop == TraceeStop::Executed {
                    let of_program = |_: &u32, thread: &mut RunningThread| thread.pid == tid;
                    for (gone, _) in self.threads.extract_if(of_program).collect::<Vec<_>>() {
                        self.unmark(gone);
                    }
                }
                match (stop, told) {
                    // It was told of before the thread was traced: the wait does not report it
                    // again.
                    (TraceeStop::Stopped, TraceeStop::Signal(signal)) => {
                        until_stopped(tid);
                        self.give_back(tid, signal);
                    }
                    // Now its parent is told that it is stopped with its process.
                    (TraceeStop::Stopped, _) => self.wake.signal(),
                    _ => {}
                }
            }
        }
    }

    fn give_back(&self, pid: u32, signal: u32) {
        lock(&self.busy).untold.push((pid, signal));
        self.wake.signal();
    }

    /// A stop was told of a thread that is not stopped, or not traced here.
    fn not_stopped(&mut self, tid: u32, told: TraceeStop) {
        // Of one that is traced the next stop, or its end, is told.
        if self.threads.get(&tid).is_some_and(|thread| thread.seized.interrupt().is_ok()) {
            return;
        }
        self.threads.remove(&tid);
        self.unmark(tid);
        if let TraceeStop::Signal(signal) = told {
            self.give_back(tid, signal);
        }
    }

    /// Forgets those that are gone, or whose number is another thread's, and tells those again to
    /// stop that have not: a first thread that has executed a program was told as the one before.
    fn forget(&mut self) {
        let is_gone = |tid: &u32, thread: &mut RunningThread| match thread.is_stopped {
            true => stop_of(*tid).is_none(),
            false => thread.seized.interrupt().is_err(),
        };
        for (tid, _) in self.threads.extract_if(is_gone).collect::<Vec<_>>() {
            self.unmark(tid);
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
    const SPINNING: &str = "spins";

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
        let begin = |_| Builder::new().name(SPINNING.into()).spawn(spin).expect("a thread");
        let mut threads: Vec<_> = (0..THREADS).map(begin).collect();
        threads.push(std::thread::spawn(waits));
        println!("begun");
        threads.into_iter().for_each(|thread| thread.join().expect("it ends"));
    }

    fn running_threads() -> RunningThreads {
        let wake = Arc::new(EventFd::new().expect("a descriptor"));
        RunningThreads { threads: HashMap::new(), busy: Arc::default(), wake }
    }

    /// What the supervisor does.
    fn wait(running: &mut RunningThreads) {
        for tid in running.threads.keys().copied().collect::<Vec<_>>() {
            let mut status = 0;
            let options = libc::WNOHANG | libc::__WALL;
            // SAFETY: the status is a local number.
            let got = unsafe { libc::waitpid(tid as libc::pid_t, &mut status, options) };
            if got > 0 {
                running.changed(tid, TraceeStop::of(status as u32));
            }
        }
        running.forget();
        let now = Instant::now();
        running.let_go(|thread| thread.until <= now);
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

        /// How many of its threads that spin have a state. (Others run for a moment.)
        fn count(&self, states: &[&str]) -> usize {
            let tasks = fs::read_dir(format!("/proc/{}/task", self.0.id())).expect("it lives");
            let status = |task: fs::DirEntry| fs::read_to_string(task.path().join("status"));
            let is_one = |status: &String| {
                let value = |of| status.lines().find_map(|line| line.strip_prefix(of));
                value("Name:\t") == Some(SPINNING)
                    && value("State:\t")
                        .is_some_and(|state| states.iter().any(|one| state.starts_with(one)))
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
            // A thread that is traced and was forgotten before it was seen to end is waited for
            // here: without that its process never ends.
            while matches!(self.0.try_wait(), Ok(None)) {
                let tasks = fs::read_dir(format!("/proc/{}/task", self.0.id()));
                let tids = tasks.into_iter().flatten().flatten();
                for tid in tids.filter_map(|task| task.file_name().to_str()?.parse().ok()) {
                    if tid != self.0.id() as libc::pid_t {
                        let options = libc::WNOHANG | libc::__WALL;
                        // SAFETY: nothing is written to.
                        unsafe { libc::waitpid(tid, std::ptr::null_mut(), options) };
                    }
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn those_that_run_are_stopped_until_they_are_let_go() {
        let program = Program::start();
        let pid = program.0.id();
        let mut running = running_threads();
        // Its first thread waits, and so does that of the test before it starts another one.
        program.until(&mut running, &["R"], THREADS);
        running.stop(pid, false, Instant::now() + INJECTION_TIMEOUT);
        program.until(&mut running, &["t"], THREADS);
        assert!(running.timeout().is_some() && program.count(&["R"]) == 0);
        running.let_go(|thread| thread.pid == pid);
        program.until(&mut running, &["R"], THREADS);
        assert!(running.timeout().is_none(), "none is traced any more");
        // And by themselves, in the end.
        running.stop(pid, false, Instant::now() + INJECTION_TIMEOUT);
        program.until(&mut running, &["t"], THREADS);
        program.until(&mut running, &["R"], THREADS);
        assert!(running.timeout().is_none());
    }

    #[test]
    fn a_stop_of_what_is_not_traced_is_given_back() {
        let program = Program::start();
        let pid = program.0.id();
        let mut running = running_threads();
        let signal = libc::SIGSTOP as u32;
        running.changed(pid, TraceeStop::Signal(signal));
        // A stop that only a traced thread can have is over.
        running.changed(pid, TraceeStop::Still);
        assert_eq!(lock(&running.busy).untold, [(pid, signal)]);
    }

    #[test]
    fn those_that_end_meanwhile_are_forgotten() {
        let mut program = Program::start();
        let mut running = running_threads();
        program.until(&mut running, &["R"], THREADS);
        running.stop(program.0.id(), false, Instant::now() + INJECTION_TIMEOUT);
        assert!(running.threads.len() >= THREADS, "others may run for a moment");
        program.0.kill().expect("it is killed");
        let began = Instant::now();
        while running.timeout().is_some() {
            assert!(
                began.elapsed() < Duration::from_secs(30),
                "{} are left",
                running.threads.len()
            );
            wait(&mut running);
        }
    }
}
