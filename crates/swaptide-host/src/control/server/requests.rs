//! What is done for the questions that change something: readahead, groups, tiers, reclaim, detach.
//!
//! Locks: none.

use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use swaptide_ipc::{Header, MIN_BUDGET_BYTES, OptionalLimit};

use super::{Answer, REQUEST_TIMEOUT, TiersView, send_answer};
use crate::cgroup::tree::{GroupPath, GroupView};
use crate::memctl::controller::{self, MemoryController, ReclaimOutcome};
use crate::units::human;

/// The keys of [`Question::Readahead`](super::Question::Readahead): `page-cluster` as `swaptide run
/// --page-cluster` takes it, and the largest order of a swap-in, each a power of two of pages from
/// 0 to 9, or `default`.
const READAHEAD: [&str; 2] = ["page-cluster", "largest-order"];

pub(super) fn change_readahead(
    header: &Header,
    set: &[(String, String)],
) -> Result<Vec<(String, String)>, String> {
    let words = [&header.swap_in.page_cluster, &header.swap_in.largest_order];
    let mut changes = Vec::new();
    for (key, value) in set {
        let at = READAHEAD.iter().position(|known| known == key);
        let word = words
            [at.ok_or_else(|| format!("there is no {key:?}; there are {}", READAHEAD.join(", ")))?];
        let limit = match (value.as_str(), value.parse::<u32>()) {
            ("default", _) => None,
            (_, Ok(order @ 0..=9)) => Some(order),
            _ => {
                return Err(format!(
                    "{key}: {value:?} is neither a number from 0 to 9 nor \"default\""
                ));
            }
        };
        changes.push((word, limit));
    }
    changes.into_iter().for_each(|(word, limit)| word.set(limit));
    let shown = |word: &OptionalLimit<AtomicU32>| {
        word.get().map_or_else(|| "default".to_owned(), |order| order.to_string())
    };
    Ok(READAHEAD.iter().zip(words).map(|(key, word)| ((*key).to_owned(), shown(word))).collect())
}

/// A group, for a client that may see and change it.
pub(super) fn owned(
    controller: &mut MemoryController,
    path: &str,
    uid: u32,
    all: bool,
) -> Result<GroupPath, String> {
    let path = GroupPath::parse(path).map_err(|error| error.to_string())?;
    if all || controller.groups().is_owned(&path, uid) {
        return Ok(path);
    }
    Err(format!("{path}: not a group of this user"))
}

pub(crate) fn ending() -> Answer {
    Answer::Error("the supervisor is shutting down".into())
}

pub(super) fn set_budget(
    controller: &mpsc::Sender<controller::ControllerRequest>,
    bytes: u64,
) -> Answer {
    if bytes < MIN_BUDGET_BYTES {
        return Answer::Error(format!(
            "budget: {} is too small; the minimum is {}",
            human(bytes),
            human(MIN_BUDGET_BYTES)
        ));
    }
    let set = controller::ask(controller, move |controller| controller.set_budget(bytes));
    set.map_or_else(ending, |()| Answer::Budget(bytes))
}

pub(super) fn tiers(controller: &mut MemoryController, text: Option<&str>) -> Answer {
    match text.map_or(Ok(()), |text| controller.groups().set_tiers(text)) {
        Ok(()) => Answer::Tiers(TiersView::of(controller.groups().tiers())),
        Err(error) => Answer::Error(error.to_string()),
    }
}

pub(super) fn group(
    controller: &mut MemoryController,
    path: &str,
    set: &[(String, String)],
    uid: u32,
    all: bool,
) -> Answer {
    // Without rights over all, the root is where one's own groups are.
    if !all && path == "/" && set.is_empty() {
        let views = controller.group_views(&GroupPath::root()).unwrap_or_default();
        let own = |view: &GroupView| {
            GroupPath::parse(&view.path).is_ok_and(|path| controller.groups().is_owned(&path, uid))
        };
        return Answer::Groups(views.into_iter().filter(own).collect());
    }
    let set = owned(controller, path, uid, all)
        .and_then(|path| set_group(controller, path, set, uid, all));
    match set.and_then(|path| controller.group_views(&path).map_err(|error| error.to_string())) {
        Ok(views) => Answer::Groups(views),
        Err(error) => Answer::Error(error),
    }
}

/// Carries out settings, all or none; a group that was made for one that is refused goes again.
fn set_group(
    controller: &mut MemoryController,
    path: GroupPath,
    set: &[(String, String)],
    uid: u32,
    all: bool,
) -> Result<GroupPath, String> {
    if set.is_empty() {
        return Ok(path);
    }
    let (moves, settings): (Vec<_>, Vec<_>) = set.iter().partition(|(key, _)| key == "processes");
    let number = |text: &str| {
        text.parse::<u32>().map_err(|_| format!("{path}: processes: {text:?} is not a process id"))
    };
    let pids =
        moves.iter().map(|(_, value)| number(value)).collect::<Result<Vec<u32>, String>>()?;
    if let Some(foreign) = pids
        .iter()
        .find(|pid| !controller.keeps(**pid) || !all && controller.owner_of(**pid) != Some(uid))
    {
        return Err(format!(
            "{path}: processes: {foreign} is not a process of this run; see swaptide ctl stats"
        ));
    }
    let before: Vec<GroupPath> =
        controller.groups().iter().map(|(_, group)| group.path.clone()).collect();
    let index = controller.groups().ensure(&path, uid).map_err(|error| error.to_string())?;
    let pairs = settings.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    if let Err(error) = controller.groups().set(index, pairs) {
        let mut made: Vec<GroupPath> =
            controller.groups().iter().map(|(_, group)| group.path.clone()).collect();
        made.retain(|path| !before.contains(path));
        // The deepest first; no process is in them yet.
        made.sort_by_key(|path| std::cmp::Reverse(path.depth()));
        made.iter().for_each(|path| drop(controller.remove_group(path)));
        return Err(error.to_string());
    }
    pids.into_iter().for_each(|pid| controller.move_process(pid, index));
    Ok(path)
}

/// Takes memory from a group, for now or for good. Waits until it is done: the controller tells
/// when nothing more goes out.
pub(super) fn answer_reclaim(
    controller: &mpsc::Sender<controller::ControllerRequest>,
    path: String,
    bytes: u64,
    freeze: bool,
    uid: u32,
    all: bool,
) -> Answer {
    let (done, result) = mpsc::channel();
    let begun = controller::ask(controller, move |controller| {
        let path = owned(controller, &path, uid, all)?;
        let index = controller.groups().find(&path).map_err(|error| error.to_string())?;
        if freeze {
            controller.freeze(index, true);
        }
        controller.reclaim(index, bytes, done);
        Ok::<(), String>(())
    });
    match begun {
        None => ending(),
        Some(Err(error)) => Answer::Error(error),
        Some(Ok(())) => match result.recv() {
            Ok(ReclaimOutcome { bytes, enough }) => {
                Answer::Reclaimed { bytes, enough: enough || freeze }
            }
            Err(_) => ending(),
        },
    }
}

/// Brings a group back. Waits until its processes have all that there is room for, or bring in
/// nothing more; tells how much is still out.
pub(super) fn preload(
    controller: &mpsc::Sender<controller::ControllerRequest>,
    path: String,
    uid: u32,
    all: bool,
    client: &UnixStream,
) -> Answer {
    let thaw = move |controller: &mut MemoryController| {
        let path = owned(controller, &path, uid, all)?;
        let index = controller.groups().find(&path).map_err(|error| error.to_string())?;
        controller.freeze(index, false);
        controller.preload(index);
        Ok::<_, String>((index, controller.groups().usage(index)))
    };
    let (index, before) = match controller::ask(controller, thaw) {
        None => return ending(),
        Some(Err(error)) => return Answer::Error(error),
        Some(Ok(begun)) => begun,
    };
    let (mut least, mut since, mut tells) = (u64::MAX, Instant::now(), true);
    loop {
        let give_up = since.elapsed() > REQUEST_TIMEOUT;
        let look = controller::ask(controller, move |controller| {
            (controller.preloading(index, give_up), controller.groups().usage(index))
        });
        let Some((busy, usage)) = look else { return ending() };
        if busy == 0 || give_up {
            let bytes = before.swapped.saturating_sub(usage.swapped);
            return Answer::Reclaimed { bytes, enough: busy == 0 };
        }
        if usage.swapped < least {
            // The client may have gone, or be stopped: the work continues all the same, untold.
            tells = tells && send_answer(client, &Answer::Left(usage.swapped)).is_ok();
            (least, since) = (usage.swapped, Instant::now());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Lets processes go. Waits until it is done, tells how much is still out, and gives it up where
/// nothing comes back any more.
pub(super) fn detach(
    controller: &mpsc::Sender<controller::ControllerRequest>,
    pid: u32,
    uid: u32,
    all: bool,
    client: &UnixStream,
) -> Answer {
    let begin = move |controller: &mut MemoryController| {
        if !controller.keeps(pid) && controller.run_of(pid).is_none()
            || !all && controller.owner_of(pid) != Some(uid)
        {
            return Err(format!(
                "detach: {pid} is not a process of this run; see swaptide ctl stats"
            ));
        }
        let pids = controller.detachable(pid);
        controller.detach(&pids).map(|()| pids)
    };
    let pids = match controller::ask(controller, begin) {
        None => return ending(),
        Some(Err(why)) => return Answer::Error(why),
        Some(Ok(pids)) => Arc::new(pids),
    };
    let (mut least, mut since) = ((usize::MAX, u64::MAX), Instant::now());
    loop {
        let asked = Arc::clone(&pids);
        let Some(now) = controller::ask(controller, move |controller| controller.detaching(&asked))
        else {
            // A run ends when its last process was let go: nothing is managed any more then.
            let noop = controller::ControllerRequest::Do(Box::new(|_| ()));
            return if controller.send(noop).is_err() { Answer::Done } else { ending() };
        };
        if now.processes == 0 {
            return Answer::Done;
        }
        if (now.processes, now.out) < least {
            (least, since) = ((now.processes, now.out), Instant::now());
        }
        if now.short || since.elapsed() > 5 * REQUEST_TIMEOUT {
            let asked = Arc::clone(&pids);
            let _ =
                controller::ask(controller, move |controller| controller.keep_after_all(&asked));
            let why = if now.short { "memory ran short" } else { "no more pages came in" };
            return Answer::Error(format!(
                "detach: {why} with {} still out: {} go on as before",
                human(now.out),
                if now.processes == 1 {
                    "the process".into()
                } else {
                    format!("{} processes", now.processes)
                }
            ));
        }
        // The client may have gone; the work continues all the same.
        let _ = send_answer(client, &Answer::Left(now.out));
        std::thread::sleep(Duration::from_millis(20));
    }
}
