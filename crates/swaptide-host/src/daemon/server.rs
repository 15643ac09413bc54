//! The daemon of a host: one budget, one set of swap areas and one tree of groups for the processes
//! of many runs.
//!
//! Owns the state directory (mode 0700), the shared segment, and the swap files' names. A daemon
//! that is killed or stopped takes nothing along: the programs have their own descriptors of
//! everything and continue with the limits they have. One that is started again maps the same
//! segment, finds the processes that live, takes back what dead ones had, and continues.
//!
//! A run that joins has its supervisor between its processes and the daemon: they ask it for the
//! segment and for swap areas as ever, and it asks here. Each client is known by the credentials of
//! the socket's peer: the run's processes are the descendants of those that joined.
//!
//! | module | owns |
//! |---|---|
//! | `state` | what outlives the daemon: names, groups, runs |
//! | `segment` | the segment, and how it is found again |
//! | `notify` | what the service manager is told |
//! | `drain` | whether runs are taken, and the time that they get at the end |
//! | `metrics` | numbers for Prometheus |
//!
//! Invariants
//! 1. One daemon at a time has a state directory: it holds a lock in it.
//! 2. A configuration file with a mistake changes nothing, at the start as later.
//! 3. Only root and the daemon's own user see or control groups and runs that are not theirs.
//!
//! Locks: the state's directory, held while the controller is asked through its channel and while
//! files are written; below it that of the areas, then the list of areas. `users` alone.

use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use swaptide_core::Tiers;
use swaptide_ipc::{AreaId, GroupIndex, MIN_BUDGET_BYTES, Segment};
use swaptide_sys::sock::{PeerCred, peer_of, poll_readable};

use crate::cgroup::tree::{GroupError, GroupPath, GroupTree, cgroup_of};
use crate::client_conn::ACCEPT_PAUSE;
use crate::config::Config;
use crate::control::agent_api::Users;
use crate::control::server::{
    Answer, DaemonView, Join, Joined, MAX_CLIENTS, Question, REQUEST_TIMEOUT, RequestHandler,
    ending, read_line, send_answer, send_with,
};
use crate::memctl::controller::{self, MemoryController, SayToRun};
use crate::memctl::processes::{Life, life};
use crate::report::totals::View;
use crate::signals;
use crate::swap::areas::{AreaOpener, Areas};
use crate::swap::spec::{self, BackingDevice};
use crate::units::{parse_share, ram_total};

use crate::daemon::drain::{Drain, GracePeriod, LOOK_INTERVAL};
pub use crate::daemon::error::DaemonError;
use crate::daemon::error::log_line;
use crate::daemon::notify;
use crate::daemon::segment::SegmentId;
use crate::daemon::state::SavedState;

/// The budget where none is given.
const DEFAULT_RAM: &str = "80%";
/// How long a daemon takes to end when it waits for no run: a line of state, and the controller's
/// thread.
const END_TIME: Duration = Duration::from_secs(15);
/// How long the last processes of a run may take to be gone after its user was told of its end, and
/// how often they are looked for meanwhile.
const ENDS_TIMEOUT: Duration = Duration::from_secs(1);
const ENDS_PAUSE: Duration = Duration::from_millis(5);
/// What the service manager shows of a daemon that takes runs, and of one that does not.
const TAKING: &str = "Taking runs";
const DRAINING: &str = "Draining: no run is taken";

/// The parameters of a daemon.
#[derive(Clone, Debug)]
pub struct DaemonConfig {
    /// Path of the configuration file (`--config`).
    pub config: PathBuf,
    /// `--state`: instead of what the file says, or the usual place.
    pub state: Option<PathBuf>,
}

/// The state that the threads of clients share.
struct ClientShared {
    segment: &'static Segment,
    segment_fd: OwnedFd,
    areas: Arc<Areas>,
    controller: mpsc::Sender<controller::ControllerRequest>,
    config: PathBuf,
    ram: u64,
    pool_cap: u64,
    codec: u32,
    follows_forks: bool,
    budget: u64,
    /// Of the configuration file that counts.
    digest: AtomicU64,
    /// The devices that it lists.
    swap: Mutex<Vec<String>>,
    /// Whose processes are helped to a userfaultfd.
    users: Mutex<Users>,
    /// Held over a look at everything and its writing.
    state: Mutex<crate::daemon::state::Directory>,
    drain: Drain,
}

/// Runs until it is told to stop; answers with the exit status.
///
/// # Errors
/// See [`DaemonError`]; nothing was started then.
pub fn run(config: &DaemonConfig) -> Result<u8, DaemonError> {
    let ram = ram_total();
    let file = Config::load(&config.config, ram).map_err(DaemonError::Config)?;
    let budget = budget_of(&file, ram)?;
    let sockets = crate::control::server::directory();
    crate::control::trust::own(&sockets)
        .map_err(|error| DaemonError::State(sockets.clone(), error))?;
    let place =
        config.state.clone().or(file.state.clone()).unwrap_or_else(|| sockets.join("daemon"));
    let directory = crate::daemon::state::Directory::open(&place)?;
    let (signals, _) = signals::take().map_err(|error| DaemonError::System("signals", error))?;
    let mut state = directory.load();
    let owner = rustix::process::geteuid().as_raw();
    let (segment, segment_fd, fresh) = directory
        .segment(state.as_ref().and_then(|state| state.segment))
        .map_err(|e| DaemonError::State(place.clone(), e))?;
    if fresh && let Some(old) = state.take() {
        old.remove_files();
    }
    let segment_id =
        SegmentId::of(&segment_fd).map_err(|error| DaemonError::State(place.clone(), error))?;
    crate::daemon::segment::keep(&segment_fd);
    let areas = Arc::new(Areas::new(segment));
    let mut groups = GroupTree::new(segment, budget);
    let (pool_cap, codec, follows_forks) = match &state {
        Some(state) => {
            state.restore(&areas, &mut groups, segment);
            (state.pool_cap, state.codec, state.follows_forks)
        }
        None => {
            let (pool_cap, codec) = set_up(&file, budget, segment, &areas)?;
            // No program has the segment yet.
            (pool_cap, codec, segment.header.followed_forks.load(Relaxed) != 0)
        }
    };
    // What was set since the file was read last stays, unless the file is another one now.
    if state.as_ref().is_none_or(|state| state.config != file.digest) {
        file.apply(&mut groups, owner).map_err(DaemonError::Groups)?;
    }
    let mut controller =
        MemoryController::new(segment, Arc::clone(&areas), groups, budget).saying(log_of_runs());
    controller.set_idle(file.idle);
    if let Some(state) = &state {
        state.restore_runs(&mut controller, segment, segment_id);
    }
    segment.header.supervisor.store(std::process::id(), Relaxed);
    crate::run::descriptors::raise_descriptor_limit();
    let (sender, requests) = mpsc::channel();
    let thread = std::thread::Builder::new()
        .name("controller".into())
        .spawn(move || controller.run(requests));
    let thread = thread.map_err(|error| DaemonError::System("thread", error))?;
    let shared = Arc::new(ClientShared {
        segment,
        segment_fd,
        areas,
        controller: sender,
        config: config.config.clone(),
        ram,
        pool_cap,
        codec,
        follows_forks,
        budget,
        digest: AtomicU64::new(file.digest),
        swap: Mutex::new(
            state.as_ref().map_or_else(|| file.swap.clone(), |state| state.swap.clone()),
        ),
        users: Mutex::new(file.userfaultfd.unwrap_or_default()),
        state: Mutex::new(directory),
        drain: Drain::new(file.drain_s),
    });
    if let Err(error) =
        shared.follow_list(&file).and_then(|changes| shared.change_list(&file, changes))
    {
        log_line(&format!("devices unchanged: {error}"));
    }
    shared.save();
    let path = crate::control::server::daemon_path();
    let listener = listen(&path).map_err(|error| DaemonError::State(path.clone(), error))?;
    if let Some(place) = &file.metrics {
        crate::daemon::metrics::serve(place, shared.controller.clone())
            .map_err(|error| DaemonError::System("metrics", error))?;
    }
    notify::ready(TAKING);
    serve(&shared, &listener, &signals);
    let _ = std::fs::remove_file(&path);
    shared.close();
    let _ = shared.controller.send(controller::ControllerRequest::Stop);
    let _ = thread.join();
    Ok(0)
}

fn budget_of(file: &Config, ram: u64) -> Result<u64, DaemonError> {
    // The file was checked when it was read.
    let budget = parse_share(file.ram.as_deref().unwrap_or(DEFAULT_RAM), ram).unwrap_or(0);
    if budget < MIN_BUDGET_BYTES { Err(DaemonError::SmallBudget(budget)) } else { Ok(budget) }
}

/// A fresh segment, and the devices that the file names.
fn set_up(
    file: &Config,
    budget: u64,
    segment: &'static Segment,
    areas: &Areas,
) -> Result<(u64, u32), DaemonError> {
    let (mut devices, mut tiers) = (file.devices.clone(), Tiers::new());
    // They were checked when the file was read.
    let _ = tiers.apply(&file.tiers, &[]);
    crate::swap::mirror::resolve_all(&mut devices, &tiers).map_err(DaemonError::Device)?;
    let space = spec::open(&devices, budget).map_err(DaemonError::Device)?;
    let (pool_cap, codec) = (space.pool_cap, space.codec.number());
    crate::run::segment::set_up_header(segment, budget, &space)
        .map_err(|error| DaemonError::System("shared segment", error))?;
    if file.follow_forks {
        segment.header.followed_forks.store(1, Relaxed);
    }
    for backing in space.devices {
        areas.add(backing).map_err(DaemonError::Area)?;
    }
    Ok((pool_cap, codec))
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    // The daemon with the state directory is the only one; a socket that is there was left behind.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Until a signal says that it is enough, and the runs have ended or had the time that they get. A
/// second signal ends it at once.
fn serve(shared: &Arc<ClientShared>, listener: &UnixListener, signals: &signals::Signals) {
    let talking = Arc::new(());
    let mut ending: Option<GracePeriod> = None;
    loop {
        if ending.is_some_and(|end| Instant::now() >= end.latest || !shared.has_runs()) {
            return;
        }
        let wait = ending.map(|_| LOOK_INTERVAL);
        let ready = poll_readable(&[signals.as_fd(), listener.as_fd()], wait).unwrap_or(0);
        while let Some(arrived) = signals.next() {
            match arrived.signal {
                libc::SIGTERM if ending.is_none() => {
                    let end = shared.drain.end();
                    notify::stopping("Waiting for the runs to end", end.grace + END_TIME);
                    ending = Some(end);
                }
                libc::SIGTERM | libc::SIGINT | libc::SIGQUIT => {
                    notify::stopping("Ending", END_TIME);
                    return;
                }
                libc::SIGHUP if ending.is_none() => {
                    if let Err(error) = shared.reload() {
                        log_line(&format!("configuration unchanged: {error}"));
                    }
                }
                _ => {}
            }
        }
        if ready & 2 == 0 {
            continue;
        }
        loop {
            let client = match listener.accept() {
                Ok((client, _)) => client,
                Err(error) => {
                    if error.kind() != io::ErrorKind::WouldBlock {
                        std::thread::sleep(ACCEPT_PAUSE);
                    }
                    break;
                }
            };
            let at = Arc::clone(&talking);
            // Runs that join come in crowds; a little more than one at a time may wait.
            if Arc::strong_count(&at) > 4 * MAX_CLIENTS + 1 {
                continue;
            }
            let shared = Arc::clone(shared);
            let talk = move || {
                // A client that misbehaves or went away is its own trouble.
                let _ = shared.converse(client);
                drop(at);
            };
            let _ = std::thread::Builder::new().name("client".into()).spawn(talk);
        }
    }
}

/// What a run is told that is not taken.
const DRAINED: &str = "the daemon takes no runs, it is being drained; start the program when that \
    is over (swaptide ctl ready), or with --no-daemon";

/// True if what is to be kept over a restart may be another after this.
fn changes_state(question: &Question) -> bool {
    !matches!(
        question,
        Question::Stats
            | Question::Budget
            | Question::StatsOf(_)
            | Question::Views
            | Question::Runs
            | Question::Look(_)
            | Question::Area(_)
            | Question::Totals
            | Question::Ready
            | Question::Drain(_)
    )
}

impl ClientShared {
    fn converse(self: &Arc<Self>, client: UnixStream) -> io::Result<()> {
        let PeerCred { pid, uid } = peer_of(client.as_fd())?;
        if pid == 0 {
            return Err(io::Error::other("a process of another pid namespace"));
        }
        let all = uid == 0 || uid == rustix::process::geteuid().as_raw();
        client.set_nonblocking(false)?;
        client.set_write_timeout(Some(REQUEST_TIMEOUT))?;
        let line = read_line(&client)?;
        let question: Question = match serde_json::from_slice(&line) {
            Ok(question) => question,
            Err(error) => {
                return send_answer(&client, &Answer::Error(format!("malformed request: {error}")));
            }
        };
        let changes = changes_state(&question);
        let answer = match question {
            Question::Area(number) => {
                let Ok(fd) = self.areas.open(AreaId(number)) else { return Ok(()) };
                return send_with(&client, &Answer::Done, fd.as_fd());
            }
            Question::Look(join) => match self.look(&join, pid) {
                Ok((joined, _)) => {
                    return send_with(&client, &Answer::Joined(joined), self.segment_fd.as_fd());
                }
                Err(error) => Answer::Error(error),
            },
            Question::Join(join) => match self.join(join, pid, uid, all) {
                Ok(joined) => {
                    self.save();
                    return send_with(&client, &Answer::Joined(joined), self.segment_fd.as_fd());
                }
                Err(_) if self.drain.is_closed() && !self.drain.is_on() => return Ok(()),
                Err(error) => Answer::Error(error),
            },
            Question::Totals => {
                let totals = controller::ask(&self.controller, move |controller| {
                    controller.final_totals(pid)
                });
                totals.map_or_else(ending, |totals| Answer::Totals(Box::new(totals)))
            }
            Question::Runs => {
                let runs = move |controller: &mut MemoryController| {
                    controller
                        .runs()
                        .filter(|run| all || run.uid == uid)
                        .map(|run| (run.launcher, run.root))
                        .collect()
                };
                controller::ask(&self.controller, runs).map_or_else(ending, Answer::Runs)
            }
            Question::StatsOf(pid) => self.stats(pid, uid, all),
            Question::Views => {
                let views = move |controller: &mut MemoryController| {
                    let runs: Vec<controller::ManagedRun> =
                        controller.runs().filter(|run| all || run.uid == uid).cloned().collect();
                    runs.into_iter().map(|run| view_of(controller, run)).collect()
                };
                controller::ask(&self.controller, views).map_or_else(ending, Answer::Views)
            }
            Question::SetBudget(_) => Answer::Error(
                "the budget is the daemon's: change ram in its file, then swaptide ctl reload"
                    .into(),
            ),
            Question::Ready => {
                let view = self.view(if all { None } else { Some(uid) });
                view.map_or_else(ending, Answer::Ready)
            }
            Question::Drain(_) if !all => {
                Answer::Error("only root and the daemon's user may drain it".into())
            }
            Question::Drain(false) | Question::Reload if self.drain.is_ending() => {
                Answer::Error("the daemon is ending".into())
            }
            Question::Drain(on) => {
                self.drain.set(on);
                notify::status(if on { DRAINING } else { TAKING });
                self.view(None).map_or_else(ending, Answer::Ready)
            }
            Question::Reload if !all => {
                Answer::Error("only root and the daemon's user may reload the configuration".into())
            }
            Question::Reload => match self.reload() {
                Ok(()) => Answer::Done,
                Err(error) => Answer::Error(error.to_string()),
            },
            question => {
                let (areas, controller) = (&*self.areas, &self.controller);
                RequestHandler { areas, controller, budget: self.budget, uid, all }
                    .answer(question, &client)
            }
        };
        if changes {
            self.save();
        }
        send_answer(&client, &answer)
    }

    /// Whether runs are taken, and what there is; of one user's runs alone, or of all.
    fn view(&self, uid: Option<u32>) -> Option<DaemonView> {
        let list = move |controller: &mut MemoryController| {
            let runs = controller.runs().filter(|run| uid.is_none_or(|uid| run.uid == uid));
            runs.map(|run| run.launcher).collect::<Vec<_>>()
        };
        let runs = controller::ask(&self.controller, list)?;
        let processes = self.segment.claimed().count();
        Some(DaemonView { draining: self.drain.is_on(), runs, processes })
    }

    /// True unless it is known that no run is kept and no process is left of one.
    fn has_runs(&self) -> bool {
        self.view(None).is_none_or(|view| !view.runs.is_empty() || view.processes > 0)
    }

    /// Waits a moment for runs of which the user has been told that they are over: their last
    /// processes are about to be gone.
    fn await_ends(&self) {
        let are_over = |controller: &mut MemoryController| {
            controller.runs().all(|run| life(run.launcher) == Life::Gone)
        };
        let latest = Instant::now() + ENDS_TIMEOUT;
        while self.has_runs()
            && Instant::now() < latest
            && controller::ask(&self.controller, are_over) == Some(true)
        {
            std::thread::sleep(ENDS_PAUSE);
        }
    }

    /// The group that a run would be in, and what it would have.
    fn look(&self, join: &Join, pid: u32) -> Result<(Joined, GroupPath), String> {
        if self.drain.is_on() {
            return Err(DRAINED.into());
        }
        let named = join
            .group
            .as_deref()
            .map(GroupPath::parse)
            .transpose()
            .map_err(|error| error.to_string())?;
        let cgroup = if named.is_none() { cgroup_of(pid) } else { None };
        let max = join.max;
        let find = move |controller: &mut MemoryController| {
            let own = controller.budget();
            let groups = controller.groups();
            let path = match named {
                Some(path) => {
                    groups.check_room([&path]).map_err(|error| error.to_string())?;
                    path
                }
                None => {
                    let index = groups.of_cgroup(cgroup.as_deref().unwrap_or("/"));
                    groups.get(index).map_or_else(GroupPath::root, |group| group.path.clone())
                }
            };
            let above = std::iter::successors(Some(path.clone()), GroupPath::parent);
            let indices: Vec<GroupIndex> =
                above.filter_map(|path| groups.find(&path).ok()).collect();
            let of_groups =
                indices.into_iter().filter_map(|index| groups.get(index)?.settings.ram_max).min();
            let budget = [Some(own), max, of_groups].into_iter().flatten().min().unwrap_or(own);
            Ok::<_, String>((budget, path))
        };
        let (budget, path) =
            controller::ask(&self.controller, find).ok_or("the daemon is shutting down")??;
        let userfaultfd = *self.users.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((
            Joined {
                budget,
                pool_cap: self.pool_cap,
                codec: self.codec,
                group: path.to_string(),
                userfaultfd,
                follows_forks: self.follows_forks,
            },
            path,
        ))
    }

    /// Keeps the processes that descend from the peer.
    fn join(self: &Arc<Self>, join: Join, pid: u32, uid: u32, all: bool) -> Result<Joined, String> {
        let (joined, path) = self.look(&join, pid)?;
        let started =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        let shared = self.clone();
        let add = move |controller: &mut MemoryController| {
            // What drains, or ends, looks for runs on this thread afterwards.
            if shared.drain.is_on() || shared.drain.is_closed() {
                return Err(DRAINED.into());
            }
            if join.group.is_some() && !all && !controller.groups().is_owned(&path, uid) {
                return Err(format!("{path}: not a group of this user"));
            }
            let group =
                Some(controller.groups().ensure(&path, uid).map_err(|error| error.to_string())?);
            let Join { launcher, program, max, strict, stall, container, recorded, .. } = join;
            controller.add_run(controller::ManagedRun {
                root: pid,
                launcher,
                uid,
                program,
                started,
                group,
                max,
                strict,
                stall,
                attached: false,
                // Others could take a place among another pod's numbers.
                container: container.filter(|_| all),
                recorded,
            });
            Ok(())
        };
        controller::ask(&self.controller, add).ok_or("the daemon is shutting down")??;
        Ok(joined)
    }

    fn stats(&self, pid: u32, uid: u32, all: bool) -> Answer {
        let find = move |controller: &mut MemoryController| {
            let run = controller.run_of(pid).filter(|run| all || run.uid == uid).cloned()?;
            Some(view_of(controller, run))
        };
        match controller::ask(&self.controller, find) {
            Some(Some(view)) => Answer::Stats(Box::new(view)),
            Some(None) => Answer::Error(format!("{pid}: not a process of a run of this daemon")),
            None => ending(),
        }
    }

    /// What the file's list of devices asks for: what is new is open already.
    fn follow_list(
        &self,
        file: &Config,
    ) -> Result<(crate::daemon::swap_list::Changes, Vec<BackingDevice>), DaemonError> {
        let before = self.swap.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut changes =
            crate::daemon::swap_list::compare(&before, &file.swap).map_err(DaemonError::Device)?;
        let mut tiers = Tiers::new();
        // They were checked when the file was read.
        let _ = tiers.apply(&file.tiers, &[]);
        let members = |all| controller::kept(&self.controller, all);
        let opened = changes.open(&tiers, &self.areas, self.segment, self.budget, members)?;
        Ok((changes, opened))
    }

    /// Does it. What is taken away takes its time.
    fn change_list(
        self: &Arc<Self>,
        file: &Config,
        (changes, opened): (crate::daemon::swap_list::Changes, Vec<BackingDevice>),
    ) -> Result<(), DaemonError> {
        for backing in opened {
            self.areas.add(backing).map_err(DaemonError::Area)?;
        }
        self.swap.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&file.swap);
        if changes.removes() {
            let shared = Arc::clone(self);
            let thread = std::thread::Builder::new().name("swapoff".into()).spawn(move || {
                changes.take_away(&shared.areas);
                shared.save();
            });
            thread.map_err(|error| DaemonError::System("thread", error))?;
        }
        Ok(())
    }

    /// Reads the configuration file again, and tells the service manager when that is done.
    fn reload(self: &Arc<Self>) -> Result<(), DaemonError> {
        notify::reloading();
        let result = self.read_again();
        match &result {
            Ok(()) => notify::ready(if self.drain.is_on() { DRAINING } else { TAKING }),
            Err(error) => notify::ready(&format!("Configuration unchanged: {error}")),
        }
        result
    }

    fn read_again(self: &Arc<Self>) -> Result<(), DaemonError> {
        let file = Config::load(&self.config, self.ram).map_err(DaemonError::Config)?;
        if file.follow_forks && !self.follows_forks {
            log_line("daemon.follow_forks counts when the daemon begins with no run left");
        }
        let budget = budget_of(&file, self.ram)?;
        let list = self.follow_list(&file)?;
        let whole = file.clone();
        let owner = rustix::process::geteuid().as_raw();
        let digest = file.digest;
        let apply = move |controller: &mut MemoryController| {
            file.apply(controller.groups(), owner)?;
            controller.set_budget(budget);
            controller.set_idle(file.idle);
            Ok::<(), GroupError>(())
        };
        let applied = controller::ask(&self.controller, apply).unwrap_or(Ok(()));
        applied.map_err(DaemonError::Groups)?;
        self.change_list(&whole, list)?;
        *self.users.lock().unwrap_or_else(PoisonError::into_inner) =
            whole.userfaultfd.unwrap_or_default();
        self.drain.set_grace(whole.drain_s);
        self.digest.store(digest, Relaxed);
        self.save();
        Ok(())
    }

    /// Writes down what a daemon needs that is started after this one. Without it, that one would
    /// begin with less.
    fn save(&self) {
        let mut directory = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (pool_cap, codec, segment) = (self.pool_cap, self.codec, self.segment);
        let areas = crate::daemon::state::areas(&self.areas, segment);
        let snapshot = controller::ask(&self.controller, move |controller| {
            SavedState::of(controller, pool_cap, codec)
        });
        if let Some(mut state) = snapshot {
            state.areas = areas;
            state.follows_forks = self.follows_forks;
            state.segment = SegmentId::of(&self.segment_fd).ok();
            state.swap = self.swap.lock().unwrap_or_else(PoisonError::into_inner).clone();
            state.config = self.digest.load(Relaxed);
            let before = directory.load();
            match directory.save(&state) {
                // Files that were taken away need no name any more.
                Ok(()) => before.iter().for_each(|before| before.remove_files_but(&state)),
                Err(error) => log_line(&format!(
                    "cannot write the state, so a restarted daemon will know less: {error}"
                )),
            }
        }
    }

    /// The end: if no run is kept any more, nothing stays behind.
    fn close(&self) {
        self.drain.close();
        self.await_ends();
        if self.has_runs() {
            self.save();
            return;
        }
        let directory = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        crate::daemon::state::areas(&self.areas, self.segment)
            .iter()
            .for_each(crate::daemon::state::SavedArea::remove_file);
        directory.clear();
    }
}

fn view_of(controller: &MemoryController, run: controller::ManagedRun) -> View {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    View {
        pid: run.launcher,
        program: run.program,
        wall_s: (now - run.started).max(0.0),
        ..controller.view(run.root)
    }
}

/// Logs the controller's lines about runs in a thread of its own: a log that blocks must not block
/// the controller.
fn log_of_runs() -> Box<SayToRun> {
    let (lines, said) = mpsc::sync_channel::<String>(64);
    // Without that thread nothing is logged.
    let _ = std::thread::Builder::new().name("log".into()).spawn(move || {
        said.iter().for_each(|line| log_line(&line));
    });
    Box::new(move |run, line| {
        let program = run.program.replace(char::is_control, "?");
        let _ = lines.try_send(format!("{program} (run {}): {line}", run.launcher));
    })
}
