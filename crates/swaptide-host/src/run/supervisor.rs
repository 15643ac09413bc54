//! The supervisor: the parent of the program and the subreaper of its tree. See
//! [`supervise`](crate::run::supervise).
//!
//! Owns what was prepared before the fork, the thread that keeps a run that is alone, the sockets,
//! and what is known of signals. Locks: none.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, send};
use swaptide_ipc::{ENV_AGENT_LOG, ENV_SOCKET, GroupIndex, Segment};
use swaptide_sys::process::{proc_info, set_child_subreaper};
use swaptide_sys::ptrace;
use swaptide_sys::remote::is_stopped_here;
use swaptide_sys::sock::{MAX_POLL, poll_readable};

use crate::cgroup::tree::GroupTree;
use crate::control::agent_api::{AgentServer, Users};
use crate::control::daemon_client::{self as client, RemoteAreas};
use crate::control::filter_offers::FilterOffers;
use crate::control::fork_tracer::{self, TracedForks};
use crate::control::server::{self, ControlSocket, Join, ServedRun};
use crate::inject::{AgentFile, Takes, Tracer};
use crate::memctl::controller::{self, MemoryController, SayToRun};
use crate::memctl::shared_pager::SharedPager;
use crate::memctl::stall::{OnStall, StallPolicy};
use crate::report::sink::Sink;
use crate::report::totals::{Report, ReportFile, summary};
use crate::run::attach::AttachTarget;
use crate::run::channel::{Channel, LauncherMessage, PassOn};
use crate::run::descriptors::{
    leave_directory, raise_descriptor_limit, raise_file_size_limit, release_streams,
};
use crate::run::ending::{Ending, signal_descendants};
use crate::run::inheritance::Inheritance;
use crate::run::inject_option::Inject;
use crate::run::target::Target;
use crate::signals::{self, ChildStatus, Inherited, Signals};
use crate::swap::areas::{AreaOpener, Areas};
use crate::units::human;

mod attached;

use self::attached::AttachedRun;

/// Two signals from one sender within this time, one here and one at the launcher, are one sent to
/// the group. The launcher may have to wait for its turn on a busy machine before it passes its own
/// on.
const SAME_SIGNAL_TIME: Duration = Duration::from_secs(2);
/// The interval between checks of clients when there are more than can be waited for.
const CROWDED_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The exit status of a run that was killed because it made almost no progress.
const STALL_STATUS: u8 = 124;

/// The controller of a run.
pub(super) enum RunMode {
    /// The run's own supervisor.
    Alone { areas: Arc<Areas>, groups: Box<GroupTree>, group: Option<GroupIndex> },
    /// The daemon that the run has joined.
    Daemon { join: Join, areas: Arc<RemoteAreas> },
}

impl RunMode {
    pub(super) fn areas(&self) -> Arc<dyn AreaOpener> {
        match self {
            RunMode::Alone { areas, .. } => areas.clone(),
            RunMode::Daemon { areas, .. } => areas.clone(),
        }
    }
}

/// The place in which a run is accounted.
pub(super) struct RunPlace {
    pub(super) segment: &'static Segment,
    pub(super) segment_fd: OwnedFd,
    pub(super) mode: RunMode,
    pub(super) frame: ReportFile,
}

/// Whose memory is limited.
pub(super) enum Subject {
    /// A program that is started.
    Program { target: Target, arguments: Vec<OsString>, preload: OsString },
    /// A running process, and what it has started.
    Process(AttachTarget),
}

/// Everything that is checked and opened before the fork.
pub(super) struct Prepared {
    pub(super) subject: Subject,
    /// What is put into programs that load no library, where that is wanted.
    pub(super) agent: Option<AgentFile>,
    pub(super) inject: Inject,
    pub(super) place: RunPlace,
    pub(super) report: Option<(PathBuf, Sink)>,
    pub(super) quiet: bool,
    pub(super) strict: bool,
    pub(super) stall: StallPolicy,
    pub(super) users: Users,
    pub(super) shared: bool,
    /// The failures that a test injects. As for `follows_forks`, what the segment says does not
    /// count.
    pub(super) fail: u32,
    /// This run follows forks, for the kernel does not report them. Decided before the program
    /// begins; what the segment says later does not count.
    pub(super) follows_forks: bool,
    pub(super) started: Instant,
    pub(super) inherited_fds: Vec<RawFd>,
}

/// The supervisor's other threads.
#[derive(Default)]
struct SideServices {
    controller: Option<mpsc::Sender<controller::ControllerRequest>>,
    thread: Option<std::thread::JoinHandle<()>>,
    socket: Option<ControlSocket>,
    shared: Option<&'static SharedPager>,
}

impl Prepared {
    /// Has the daemon keep the descendants of this process.
    fn join(&self) -> io::Result<()> {
        let RunMode::Daemon { join, .. } = &self.place.mode else { return Ok(()) };
        match client::join(join) {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err(io::Error::other("the daemon is gone")),
            Err(why) => Err(io::Error::other(why)),
        }
    }

    /// What puts the agent into programs that load no library.
    fn tracer(&mut self, socket: &str) -> Option<Tracer> {
        let agent = self.agent.take()?;
        let log = std::env::var_os(ENV_AGENT_LOG).filter(|path| !path.is_empty());
        let log = log.and_then(|path| std::path::absolute(path).ok());
        let log = log.map(|path| path.into_os_string().into_encoded_bytes());
        let takes = match self.subject {
            Subject::Program { .. } => {
                Takes::LoadingNone(self.inject.least_bytes(self.place.frame.budget))
            }
            Subject::Process(_) => Takes::All,
        };
        Tracer::start(agent, socket, log, takes).ok()
    }

    /// Starts the controller of a run that is alone, and opens its control socket; and what a pager
    /// of shared memory needs.
    fn keep(
        &mut self,
        launcher: u32,
        channel: &Channel,
        filters: Option<FilterOffers>,
        tracer: Option<&Tracer>,
    ) -> SideServices {
        raise_descriptor_limit();
        if self.shared {
            raise_file_size_limit();
        }
        let shared =
            SharedPager::new(self.place.segment, self.place.mode.areas(), self.shared, self.fail);
        let RunMode::Alone { areas, groups, group } = &mut self.place.mode else {
            return SideServices { shared: Some(shared), ..SideServices::default() };
        };
        let (root, program) = (std::process::id(), self.place.frame.subject.program.clone());
        self.place.segment.header.supervisor.store(root, Relaxed);
        let (controller, requests) = mpsc::channel();
        let groups = std::mem::replace(&mut **groups, GroupTree::new(self.place.segment, 0));
        let mut thread = MemoryController::new(
            self.place.segment,
            areas.clone(),
            groups,
            self.place.frame.budget,
        )
        .with_shared(shared)
        .within_cgroups()
        .saying(say_to_launcher(channel, self.quiet));
        if let (Some(tracer), Subject::Program { .. }) = (tracer, &self.subject) {
            let least = self.inject.least_bytes(self.place.frame.budget);
            let (large, engaged) = (tracer.reporter(), tracer.engagement_reporter());
            thread = thread.reporting(least.max(1), large, engaged);
        }
        let uid = rustix::process::geteuid().as_raw();
        let run = controller::ManagedRun {
            root,
            launcher,
            uid,
            program: program.clone(),
            started: self.place.frame.subject.started_s,
            group: *group,
            max: None,
            strict: self.strict,
            stall: self.stall,
            attached: matches!(self.subject, Subject::Process(_)),
            container: None,
            recorded: self.report.is_some(),
        };
        thread.add_run(run);
        let thread = std::thread::Builder::new()
            .name("controller".into())
            .spawn(move || thread.run(requests))
            .ok();
        let run = ServedRun {
            pid: launcher,
            root,
            program,
            started: self.started,
            budget: self.place.frame.budget,
            filters,
        };
        // Without a control socket no client can ask, and that is all.
        let socket = server::open(run, areas.clone(), controller.clone()).ok();
        SideServices { controller: Some(controller), thread, socket, shared: Some(shared) }
    }
}

/// The process in the background.
pub(super) struct Supervisor {
    prepared: Prepared,
    launcher: u32,
    /// Its name goes with the last process of the tree.
    socket: Option<ControlSocket>,
    /// The launcher, while it is there.
    channel: Option<Channel>,
    signals: Signals,
    counter: AgentServer,
    /// Threads that fork, where the kernel does not report it.
    followed: TracedForks,
    /// Programs that load no library, with `--inject`.
    tracer: Option<Tracer>,
    /// Pager of shared memory; `None` without `--shared`.
    shared: Option<&'static SharedPager>,
    /// Where there is no daemon that does it.
    controller: Option<mpsc::Sender<controller::ControllerRequest>>,
    /// The program; `None` once it has ended, and where none was started.
    program: Option<u32>,
    /// The state of a run of processes that were attached to.
    attached: Option<AttachedRun>,
    /// The sender of each signal to this process, and when: what is sent to the group arrives
    /// here as well.
    seen: HashMap<i32, (u32, Instant)>,
    /// The state of the signals that were to end the run.
    ending: Ending,
}

impl Supervisor {
    pub(super) fn run(
        mut prepared: Prepared,
        mut channel: Channel,
        signals: Signals,
        inherited: Inherited,
        inheritance: Inheritance,
        launcher: u32,
    ) -> ! {
        let subreaper = set_child_subreaper(true).map_err(io::Error::from);
        let started = subreaper
            .and_then(|()| prepared.join())
            .and_then(|()| start(&prepared, inherited, inheritance, &channel));
        let (counter, program) = match started {
            Ok(started) => started,
            Err(error) => {
                channel.send(&LauncherMessage::Failed(format!(
                    "{}: cannot be started: {error}",
                    prepared.place.frame.subject.program
                )));
                std::process::exit(0);
            }
        };
        release_streams(&prepared.inherited_fds, &[0, 1, 2]);
        leave_directory();
        let attached = match &mut prepared.subject {
            Subject::Process(target) => AttachedRun::new(target).ok(),
            Subject::Program { .. } => None,
        };
        let offers = attached.as_ref().map(AttachedRun::offers);
        let mut tracer = prepared.tracer(counter.name());
        let kept = prepared.keep(launcher, &channel, offers, tracer.as_ref());
        match (&mut prepared.subject, &mut tracer) {
            (Subject::Program { target, .. }, Some(tracer)) if target.kind.is_injected() => {
                program.into_iter().for_each(|pid| tracer.watch(pid));
            }
            (Subject::Process(target), Some(tracer)) => {
                if let Err(why) = target.begin(tracer) {
                    channel
                        .send(&LauncherMessage::Failed(format!("process {}: {why}", target.pid)));
                    drop(kept);
                    std::process::exit(0);
                }
            }
            _ => {}
        }
        let followed = TracedForks::new(prepared.follows_forks);
        let supervisor = Supervisor {
            prepared,
            launcher,
            socket: kept.socket,
            channel: Some(channel),
            signals,
            counter,
            followed,
            tracer,
            shared: kept.shared,
            controller: kept.controller,
            program,
            attached,
            seen: HashMap::new(),
            ending: Ending::default(),
        };
        supervisor.serve();
        if let Some(thread) = kept.thread {
            let _ = thread.join();
        }
        std::process::exit(0)
    }

    /// Until the last process of the tree is gone.
    fn serve(mut self) {
        // An engine that starts asks for its swap areas, while its program grows.
        swaptide_sys::affinity::go_first();
        loop {
            let mut fds = vec![self.signals.as_fd(), self.counter.as_fd()];
            fds.push(
                self.channel
                    .as_ref()
                    .map_or(self.signals.as_fd(), |channel| channel.stream.as_fd()),
            );
            fds.push(self.tracer.as_ref().map_or(self.signals.as_fd(), Tracer::awaited));
            fds.extend(self.counter.awaited());
            fds.extend(self.followed.awaited());
            fds.extend(self.tracer.iter().flat_map(|tracer| tracer.forks.awaited()));
            fds.extend(self.attached.iter().map(AttachedRun::awaited));
            let held = self.tracer.as_ref().and_then(Tracer::timeout);
            let forking = self.tracer.as_ref().and_then(|tracer| tracer.forks.timeout());
            let attached = self.attached.as_ref().and_then(AttachedRun::timeout);
            let timeout = [self.counter.timeout(), self.followed.timeout(), self.ending.timeout()]
                .into_iter()
                .chain([held, forking, attached])
                .flatten()
                .min();
            // Those for which there is no place are looked at all the same, a little later.
            let timeout = if fds.len() > MAX_POLL {
                Some(timeout.unwrap_or(CROWDED_POLL_INTERVAL).min(CROWDED_POLL_INTERVAL))
            } else {
                timeout
            };
            fds.truncate(MAX_POLL);
            let ready = poll_readable(&fds, timeout).unwrap_or(0);
            // Signals first: they tell whether one that the launcher passes on was meant for it
            // alone.
            self.note_signals();
            if ready & 2 != 0 || self.counter.timeout().is_some() {
                let areas = self.prepared.place.mode.areas();
                let joined = self.counter.serve(
                    &self.prepared.place.segment_fd,
                    &areas,
                    self.shared,
                    &mut self.followed,
                );
                for (pid, controller) in joined.into_iter().zip(std::iter::repeat(&self.controller))
                {
                    // A daemon finds them in the segment.
                    let _ = controller.as_ref().map(|controller| {
                        controller.send(controller::ControllerRequest::Joined(pid))
                    });
                }
            }
            if ready & 4 != 0 && self.channel.is_some() {
                self.listen_to_launcher();
            }
            self.attend_programs(ready & 8 != 0);
            self.attend_forks();
            self.follow_signals();
            for note in self.counter.take_notes() {
                self.say(note);
            }
            let has_children = self.look_at_children();
            let lives = if self.attached.is_some() { self.attend_attached() } else { has_children };
            if !lives {
                // The controller ends with its channel.
                let _ = self
                    .controller
                    .as_ref()
                    .map(|controller| controller.send(controller::ControllerRequest::Stop));
                return;
            }
        }
    }

    /// Has programs that load no library given the agent.
    fn attend_programs(&mut self, are_named: bool) {
        let announced = self.counter.take_announced();
        let Some(tracer) = &mut self.tracer else { return };
        announced.into_iter().for_each(|pid| tracer.watch(pid));
        self.counter.take_filters().into_iter().for_each(|new| tracer.forks.add(new));
        tracer.forks.attend(self.prepared.place.segment);
        if are_named {
            tracer.begin_named();
        }
        tracer.attend(self.prepared.place.segment);
        let note = tracer.take_note().filter(|_| !self.prepared.quiet);
        let untold = tracer.take_untold();
        note.into_iter().for_each(|note| self.say(note));
        // It may continue by now. /proc may hide it: as long as it was not waited for it is there.
        let is_stopped = |pid: u32| proc_info(pid).is_none_or(|info| info.stopped);
        untold.into_iter().filter(|(pid, _)| is_stopped(*pid)).for_each(|(pid, _)| {
            self.program_stopped(pid);
        });
    }

    /// A process has stopped by a signal: if it is the program, its launcher stops, too.
    fn program_stopped(&mut self, pid: u32) {
        if Some(pid) == self.program
            && let Some(channel) = &mut self.channel
        {
            channel.send(&LauncherMessage::Stopped);
        }
    }

    fn attend_forks(&mut self) {
        // A test that has something fail wants to see what comes of it.
        for pid in self.followed.attend(if self.prepared.fail != 0 {
            fork_tracer::REGISTER_TIMEOUT / 15
        } else {
            fork_tracer::REGISTER_TIMEOUT
        }) {
            self.say(format!("forked child {pid} does not register its memory: killed"));
        }
    }

    fn say(&mut self, what: String) {
        let line = format!("{}: {what}", self.prepared.place.frame.subject.program);
        if let Some(channel) = &mut self.channel {
            channel.send(&LauncherMessage::Said(line));
        }
    }

    /// Ends processes that cannot take the signal that was to end the run.
    fn follow_signals(&mut self) {
        for pid in self.ending.look() {
            self.say(format!(
                "process {pid} was told to end and cannot: its threads wait inside swaptide; killed"
            ));
        }
    }

    /// A program is told by the signal itself; processes that were attached to are let go.
    fn told_to_end(&mut self, signal: i32) {
        match &mut self.attached {
            Some(attached) => attached.note_signal(signal),
            None => self.ending.begin(signal),
        }
    }

    fn note_signals(&mut self) {
        while let Some(arrived) = self.signals.next() {
            self.told_to_end(arrived.signal);
            if let Some(sender) = arrived.sender {
                self.seen.insert(arrived.signal, (sender, Instant::now()));
            }
        }
    }

    fn listen_to_launcher(&mut self) {
        let Some(messages) = self.channel.as_mut().and_then(|channel| channel.receive::<PassOn>())
        else {
            // The launcher was killed. The tree continues.
            self.channel = None;
            return;
        };
        for message in messages {
            self.told_to_end(message.signal);
            let whole_group = self.seen.remove(&message.signal).is_some_and(|(sender, when)| {
                sender == message.sender && when.elapsed() < SAME_SIGNAL_TIME
            });
            if let Some(program) = self.program
                && !(whole_group && signals::same_group(program, std::process::id()))
            {
                signals::send(program, message.signal);
            }
        }
    }

    /// False when no process of the tree is left.
    fn look_at_children(&mut self) -> bool {
        let mut ended = None;
        let left = loop {
            let change = signals::child_change();
            if let ChildStatus::Ended { pid, .. } = change {
                self.followed.changed(pid, ptrace::TraceeStop::Gone);
            }
            if let Some((tid, stop)) = change.of_tracee()
                && let Some(tracer) = &mut self.tracer
                && tracer.stopper_changed(tid, stop)
            {
                continue;
            }
            if let Some((pid, stop)) = change.of_tracee()
                && let Some(tracer) = self.tracer.as_mut().filter(|tracer| tracer.has(pid))
            {
                let is_done = tracer.changed(pid, stop, self.prepared.place.segment);
                if is_done && stop != ptrace::TraceeStop::Gone {
                    continue;
                }
            }
            match change {
                ChildStatus::Ended { pid, status } if Some(pid) == self.program => {
                    self.program = None;
                    ended = Some(status);
                }
                // Of one that was killed meanwhile the end is told.
                ChildStatus::Followed(pid, status) if is_stopped_here(pid) => {
                    self.followed.changed(pid, ptrace::TraceeStop::of(status))
                }
                ChildStatus::Stopped(pid, signal) if self.followed.has(pid) => {
                    self.followed.changed(pid, ptrace::TraceeStop::Signal(signal));
                }
                ChildStatus::Stopped(pid, _) => self.program_stopped(pid),
                ChildStatus::Continued(pid) if Some(pid) == self.program => {
                    if self.channel.is_some() {
                        signals::send(self.launcher, libc::SIGCONT);
                    }
                    if self.prepared.stall.then == OnStall::Stop {
                        // The whole tree was stopped.
                        signal_descendants(std::process::id(), libc::SIGCONT);
                    }
                }
                ChildStatus::Nothing => break true,
                ChildStatus::NoChild => break false,
                _ => {}
            }
        };
        if let Some(status) = ended {
            self.finish(status, left);
        }
        left
    }

    /// The program has ended: the report, and the launcher's release.
    fn finish(&mut self, status: u8, stays: bool) {
        let root = std::process::id();
        let totals = match &self.controller {
            Some(controller) => {
                controller::ask(controller, move |controller| controller.final_totals(root))
            }
            None => client::totals(),
        };
        let told = totals.is_some();
        // Peaks are from the whole run.
        let most = |controller: &mpsc::Sender<_>| {
            controller::ask(controller, |controller| controller.most_budget())
        };
        if let Some(most) = self.controller.as_ref().and_then(most) {
            self.prepared.place.frame.budget = most;
        }
        let totals = totals.unwrap_or_default();
        let wall_s = self.prepared.started.elapsed().as_secs_f64();
        let status = match status {
            _ if totals.strict_kill => 137,
            // A program that came to its end just before keeps its status.
            137 if totals.waits.is_killed => STALL_STATUS,
            _ if totals.waits.is_killed && self.attached.is_some() => STALL_STATUS,
            _ => status,
        };
        let frame = &self.prepared.place.frame;
        let mut lines = Vec::new();
        if totals.strict_kill {
            let (program, budget) = (&frame.subject.program, human(frame.budget));
            lines.push(match totals.strict_used {
                None => format!(
                    "{program}: killed by --strict: swap space ran out and its memory went past \
                    the {budget} budget; give it more with --swap"
                ),
                Some(used) => format!(
                    "{program}: killed by --strict: its memory stayed above the {budget} budget \
                    for 5 s ({} at the end), in parts that \
                     cannot be swapped; give it more with --ram",
                    human(used)
                ),
            });
        }
        let then = self.prepared.stall.then;
        if let (RunMode::Daemon { .. }, Some(last)) =
            (&self.prepared.place.mode, &totals.waits.stalls.last)
            && (!self.prepared.quiet || then != OnStall::Continue)
        {
            // So far it stands in the daemon's log alone.
            let line = last.describe(None) + then.what_is_done();
            lines.push(format!("{}: {line}", frame.subject.program));
        }
        let is_killed = totals.strict_kill || totals.waits.is_killed || status >= 128;
        let is_alone = matches!(self.prepared.place.mode, RunMode::Alone { .. })
            // The time before is not known.
            && self.attached.is_none();
        let advice = (is_alone && !is_killed)
            .then(|| totals.waits.advice(frame.budget, wall_s, least_seconds()))
            .flatten();
        if !told {
            lines.push(format!("{}: no daemon to ask what was swapped", frame.subject.program));
        } else if !self.prepared.quiet {
            lines.push(summary(frame, &totals, wall_s));
            lines.extend(advice.map(|advice| advice.describe(&frame.subject.program)));
        }
        if let Some((path, sink)) = &mut self.prepared.report
            && let Err(error) = sink.write(&Report::new(frame, &totals, status, wall_s, advice))
        {
            lines.push(format!("--report: {}: not written: {error}", path.display()));
        }
        if let Some(mut channel) = self.channel.take() {
            channel.send(&LauncherMessage::Ended { status, lines, stays });
        }
    }
}

/// Sends lines to the launcher, which prints them. With `--quiet`, only what was done to the run.
fn say_to_launcher(channel: &Channel, quiet: bool) -> Box<SayToRun> {
    // A message is one small write: it goes whole or not at all, and two threads' do not mix.
    let stream = channel.stream.try_clone().ok();
    Box::new(move |run, line| {
        if quiet && run.stall.then == OnStall::Continue {
            return;
        }
        let line = format!("{}: {line}", run.program);
        let Ok(mut message) = serde_json::to_vec(&LauncherMessage::Said(line)) else { return };
        message.push(b'\n');
        // A launcher that is stopped reads nothing, and limits must be kept: the line is lost then.
        let _ = stream.as_ref().map(|stream| send(stream, &message, SendFlags::DONTWAIT));
    })
}

/// The time that the processes of the run would take at least: their CPU time in user mode, on all
/// CPUs at the same time.
fn least_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Of the children that were waited for: the 16th field, the 14th behind the name.
    let ticks = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(13));
    let ticks: u64 = ticks.and_then(|ticks| ticks.parse().ok()).unwrap_or(0);
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    ticks as f64 / rustix::param::clock_ticks_per_second().max(1) as f64 / cpus as f64
}

/// Opens the socket of the agents, and starts the program if there is one. It tells the launcher
/// its own number before it begins: however early this process is killed, the launcher knows what
/// to wait for.
fn start(
    prepared: &Prepared,
    inherited: Inherited,
    inheritance: Inheritance,
    channel: &Channel,
) -> io::Result<(AgentServer, Option<u32>)> {
    let injects = prepared.agent.is_some();
    // Otherwise the controller tells.
    let is_told = injects
        && (prepared.inject == Inject::Always
            || matches!(prepared.place.mode, RunMode::Daemon { .. }));
    let counter = AgentServer::open(prepared.users, injects, is_told)?;
    let Subject::Program { target, arguments, preload } = &prepared.subject else {
        return Ok((counter, None));
    };
    let mut command = Command::new(&target.path);
    command.arg0(&target.name).args(arguments);
    let mut to_launcher = Channel::new(channel.stream.try_clone()?);
    let (preload, socket) = (preload.clone(), OsString::from(counter.name()));
    let before_exec = move || {
        to_launcher.send(&LauncherMessage::Started(std::process::id()));
        inheritance.restore(&[("LD_PRELOAD", &preload), (ENV_SOCKET, &socket)])?;
        inherited.restore()
    };
    // SAFETY: this process has one thread, so the child's copy of the heap, from which the message
    // comes, is consistent; the rest makes system calls only.
    unsafe { command.pre_exec(before_exec) };
    let child = command.spawn()?;
    Ok((counter, Some(child.id())))
}
