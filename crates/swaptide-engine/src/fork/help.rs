//! What other threads get from the handler while it waits for a fork.
//!
//! Between *prepared* and fork(2) the forking thread runs other libraries' fork handlers, which
//! take locks. A thread that holds such a lock may be waiting for the handler: at a page, in a hook
//! of `mmap`, `madvise`, `mremap` or `realloc`. It must continue, or all three wait for ever.
//!
//! Owns: how much CPU time the forking thread has used since it continues.
//!
//! Invariants
//! 1. Hints that may be dropped are answered at once and are not done. What was mapped is found at
//!    the next scan, which is due when the fork is over.
//! 2. Everything else changes the engine's memory. It is done only while the forking thread waits
//!    in a system call that is no fork (for [`MIN_WAIT_TIME`], or others have waited for
//!    [`MAX_UNHELPED_TIME`]), or has used [`SPIN_CPU_TIME`] of CPU time and the kernel reports no
//!    fork under way. If it is not seen waiting before and after, the copy counts as torn and the
//!    child does not use it.
//! 3. Where forks are told of, the kernel refuses fills and moves from the moment a fork copies
//!    managed memory until its event was read, and nothing is done after that event. So the child
//!    has every page that the table says is present.
//! 4. Where forks are followed nothing tells when the copy is made: a page that came in meanwhile
//!    may be missing in the child. Each is recorded with what it held
//!    ([`brought`](crate::events::brought)), and the child gets that. The record begins again
//!    whenever the forking thread is seen outside of fork(2).
//! 5. Where forks are followed, no range is released, and no change of mappings is applied unless
//!    the forking thread is seen waiting outside of fork(2): the table must know all that the child
//!    may lack, where the child has it. A thread that spins for [`MAX_FORK_CPU_TIME`] would have
//!    all others wait for ever; then changes are applied, and a child that is made before the
//!    thread is seen outside again is ended ([`child_uffd`](crate::fork::child_uffd)).
//!
//! Locks: the memory lock, never while it waits.

use std::sync::atomic::Ordering::{Relaxed, Release};
use std::time::Duration;

use swaptide_sys::process::waits_outside_fork;
use swaptide_sys::thread::{Nanos, Tid, cpu_time_of, now};
use swaptide_sys::uffd::Coverage;

use crate::events::reader::UffdReader;
use crate::fork::allow_fork::allow_fork_of_regions;
use crate::fork::populate::can_answer;
use crate::mm::types::PageNo;
use crate::pager::Pager;
use crate::requests::{HandlerRequest, Hint};
use crate::vma::madvise::hint;

/// CPU time after which the forking thread is taken to spin for a lock.
const SPIN_CPU_TIME: Duration = Duration::from_millis(20);

/// CPU time after which the forking thread is taken to spin for a lock rather than to be in
/// fork(2), though it is not seen outside. Should it be in there all the same, its child is ended.
const MAX_FORK_CPU_TIME: Duration = Duration::from_secs(5);

/// The time for which the forking thread must be seen in the same wait, with no other thread woken
/// meanwhile, before others are helped. What it waits for may be held by a thread that runs and
/// will release it soon; then it needs no help.
pub(super) const MIN_WAIT_TIME: Duration = Duration::from_micros(500);

/// After this time others are helped in any wait: the forking thread may sleep briefly between
/// looks at what it waits for.
const MAX_UNHELPED_TIME: Duration = Duration::from_millis(20);

/// The time that other threads wait when there is no room to record the pages they bring in.
const MAX_FULL_TIME: Duration = Duration::from_secs(5);

/// A wait of the forking thread. As long as these are the same it did not run, and no thread was
/// woken that may hold what it waits for.
#[derive(PartialEq, Eq)]
struct ForkerWait {
    /// CPU time that it has used.
    used: Nanos,
    /// Events that were read and noted: threads whose events are read continue.
    noted: usize,
    /// The number of the last hint that was answered.
    answered: u32,
}

/// The state of the forking thread.
pub(super) struct Forker {
    tid: u32,
    /// Its CPU time when it was first seen to continue.
    began: Option<Nanos>,
    /// The wait in which it was seen, and since when.
    wait: Option<(ForkerWait, Nanos)>,
    /// Since when there is a thread to help that was not.
    due_since: Option<Nanos>,
    /// When the record of pages that came in was first seen to be full.
    full_since: Option<Nanos>,
}

impl Forker {
    pub(super) fn new(tid: u32) -> Forker {
        Forker { tid, began: None, wait: None, due_since: None, full_since: None }
    }

    fn waits(&self) -> bool {
        waits_outside_fork(self.tid)
    }

    /// The time since it was first seen in its present wait; zero for a new wait.
    fn waited(&mut self, reader: &UffdReader) -> Duration {
        let (Some(used), now) = (cpu_time_of(Tid(self.tid)), now()) else { return Duration::ZERO };
        let answered = reader.engine.handler_requests.answered.load(Relaxed);
        let wait = ForkerWait { used, noted: reader.fork.noted.len(), answered };
        match &self.wait {
            Some((before, since)) if *before == wait => now.since(*since),
            _ => {
                self.wait = Some((wait, now));
                Duration::ZERO
            }
        }
    }

    /// CPU time that it has used since it was first seen to continue.
    fn used(&mut self) -> Duration {
        let Some(used) = cpu_time_of(Tid(self.tid)) else { return Duration::ZERO };
        used.since(*self.began.get_or_insert(used))
    }

    /// True when the record has been full for so long that the forking thread is taken to spin for
    /// a lock, rather than to be in fork(2). Then pages that the child lacks are bus errors there.
    fn is_long_full(&mut self) -> bool {
        now().since(*self.full_since.get_or_insert_with(now)) > MAX_FULL_TIME
    }

    /// Helps one of the threads that wait, if the forking thread may be waiting for it (invariant
    /// 2). True if one was helped; `torn` is set if the copy cannot be used then.
    pub(super) fn help(&mut self, pager: &mut Pager, torn: &mut bool) -> bool {
        attend_hints(pager);
        refuse_release(pager);
        let reader = &mut pager.path.reader;
        let engine = reader.engine;
        let asks = reader
            .requests
            .iter()
            .any(|request| matches!(request, HandlerRequest::Fence | HandlerRequest::Hint));
        let is_due = asks || !reader.pending.is_empty() || reader.fork.is_noted_half_full();
        if reader.fork.child.is_some() || !engine.fork.goes_on() || !is_due {
            self.due_since = None;
            return false;
        }
        let waits = self.waits();
        let unhelped = now().since(*self.due_since.get_or_insert_with(now));
        if waits && self.waited(reader) < MIN_WAIT_TIME && unhelped < MAX_UNHELPED_TIME {
            return false;
        }
        let used = self.used();
        if !waits
            && (used < SPIN_CPU_TIME
                || reader.uffd.coverage(engine.handler_requests.range()) == Coverage::Changing)
        {
            return false;
        }
        reader.fork.seen_waiting = false;
        let is_outside = waits || !engine.fork.followed;
        let mut fault = None;
        if !is_outside {
            // It may be in fork(2), or behind it: the table stays what the child may have.
            let path = &pager.path;
            let at = path.reader.pending.iter().position(|f| can_answer(path, PageNo::of(f.addr)));
            fault = at.and_then(|at| pager.path.reader.pending.remove(at));
            if fault.is_none() && used <= MAX_FORK_CPU_TIME {
                return false;
            }
        }
        let reader = &mut pager.path.reader;
        if fault.is_none() {
            // If it is outside, no copy was made yet: the child will have what is here now.
            reader.fork.is_lost = !is_outside;
            reader.fork.brought.clear();
            reader.apply_noted();
            fault = reader.pending.pop_front();
        }
        if reader.record().is_some_and(|record| record.is_full()) && !self.is_long_full() {
            // A fork(2) that copies a large process is over soon.
            reader.pending.extend(fault);
            return false;
        }
        (self.wait, self.due_since) = (None, None);
        if let Some(fault) = fault {
            pager.answer(fault);
        } else if reader.take_request(HandlerRequest::Fence) {
            pager.answer_fences();
            if engine.fork.followed {
                // What was listed just now is kept out of forks.
                allow_fork_of_regions(&mut pager.path);
                // The thread was woken before that.
                pager.path.reader.fork.seen_waiting = false;
            }
        } else if reader.requests.contains(&HandlerRequest::Hint) {
            answer_hint(pager);
        }
        let fork = &mut pager.path.reader.fork;
        if fork.child.is_some() || !waits || !fork.seen_waiting && !self.waits() {
            *torn = true;
        } else {
            // The forking thread was not in fork(2): its child will have the pages.
            fork.brought.clear();
        }
        true
    }
}

/// Where forks are followed no range is let go meanwhile (invariant 5). The thread that asks for it
/// hears so at once, and decides how long it asks again.
fn refuse_release(pager: &mut Pager) {
    let path = &mut pager.path;
    let handler_requests = &path.engine.handler_requests;
    if !path.engine.fork.followed
        || !path.reader.requests.contains(&HandlerRequest::Hint)
        || handler_requests.may_be_dropped()
        || path.reader.fork.child.is_some()
    {
        return;
    }
    path.reader.take_request(HandlerRequest::Hint);
    if handler_requests.take_hint().is_some() {
        handler_requests.refused.store(true, Release);
    }
    handler_requests.answer();
}

/// Does what the hint in the mailbox asks for, and lets its thread continue.
fn answer_hint(pager: &mut Pager) {
    let engine = pager.path.engine;
    let mut is_done = true;
    if let Some((asked, range)) = engine.handler_requests.take_hint() {
        is_done = hint(&mut pager.path, &mut pager.adopter, asked, range).is_ok()
            && pager.path.reader.fork.child.is_none();
        if !is_done {
            // It is done when the fork is over.
            engine.handler_requests.put_back(asked);
        }
    }
    if is_done {
        pager.path.reader.take_request(HandlerRequest::Hint);
        pager.path.reader.is_about_to_wake();
        engine.handler_requests.answer();
    }
}

/// Answers the hints that may be dropped (invariant 1), and wakes the threads whose delay is over.
pub(super) fn attend_hints(pager: &mut Pager) {
    let path = &mut pager.path;
    let handler_requests = &path.engine.handler_requests;
    if path.reader.requests.contains(&HandlerRequest::Hint) && handler_requests.may_be_dropped() {
        path.reader.take_request(HandlerRequest::Hint);
        if let Some((Hint::Mapped, _)) = handler_requests.take_hint() {
            path.reader.note_request(HandlerRequest::Adopt);
        }
        handler_requests.answer();
    }
    path.wake_held();
}
