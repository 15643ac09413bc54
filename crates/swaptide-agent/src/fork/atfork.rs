//! libc's fork handlers: what a fork does in the parent and in the child.
//!
//! Locks: [`FORK_LOCK`], from [`prepare`] to [`parent`] or [`child`].

use std::ffi::c_int;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use swaptide_engine::fork::Decline;
use swaptide_engine::requests::HandlerRequest;
use swaptide_engine::requests::fork_control::NO_FORK;
use swaptide_engine::sched::deadline::{WAIT_SLICE, Waited};
use swaptide_sys::lock::futex;
use swaptide_sys::mem::after_fork_in_child;
use swaptide_sys::thread::{block_all_signals, getpid, gettid, restore_signals, tell};

use crate::exit_watch;
use crate::fork::child::{TAKEN_OVER, child_handler_main, stop};
use crate::fork::trampoline;
use crate::forking::{self, FORKING};
use crate::lifecycle::{PARENT, start_sleeper};
use crate::log;
use crate::own_pid::OWN_PID;
use crate::pages::kernel_words;
use crate::process::{
    ENGINE, ENGINE_PID, FORK_LOCK, NO_SLOT, PLACE, detach, detach_without_calls, disown_copy,
    engine, engine_without_calls, inherited_engine, set_own_mark, spawn,
};
use crate::seccomp;
use crate::shmem;

/// The process that forked last, or forks now: the child of a raw clone has a copy of a lock that
/// no thread of it will release.
static FORKER_PID: AtomicU32 = AtomicU32::new(0);
/// The signal mask of the forking thread, from its prepare handler to the other end.
static FORK_MASK: AtomicU64 = AtomicU64::new(0);

/// Does with a fork what libc's handlers do, where libc calls none. Not where the forking thread is
/// within a fork already.
pub(crate) fn with_handlers(fork: impl FnOnce() -> c_int) -> c_int {
    if !seccomp::is() && FORKING.load(Relaxed) == gettid().0 {
        return fork();
    }
    prepare();
    let pid = fork();
    if pid == 0 {
        child()
    } else {
        parent()
    }
    pid
}

/// The fork under way is one of a program that is [`seccomp`]. Guarded by [`FORK_LOCK`].
static FORKS_CONFINED: AtomicBool = AtomicBool::new(false);

/// Before a fork, in the forking thread. Signals wait until it is over: a handler that forks would
/// wait for this thread's own lock.
pub(crate) extern "C" fn prepare() {
    if seccomp::is() {
        // Nothing may begin meanwhile, and nothing is managed: neither end has anything to do.
        let take = || loop {
            match FORK_LOCK.try_lock() {
                Some(guard) => break std::mem::forget(guard),
                None => std::hint::spin_loop(),
            }
        };
        disown_copy();
        take();
        while engine_without_calls().is_some() {
            // SAFETY: this thread took the lock and forgot its guard; a waiter looks again
            // by itself.
            unsafe { FORK_LOCK.force_unlock() };
            detach_without_calls();
            take();
        }
        FORKS_CONFINED.store(true, Relaxed);
        return;
    }
    let mask = block_all_signals().unwrap_or(0);
    let this = getpid().0;
    let before = FORKER_PID.swap(this, Relaxed);
    if before != 0 && before != this && FORK_LOCK.is_locked() {
        // SAFETY: this is the child of a raw clone, and the holder a thread of its parent.
        unsafe { FORK_LOCK.force_unlock() };
    }
    std::mem::forget(FORK_LOCK.lock());
    FORK_MASK.store(mask, Relaxed);
    FORKING.store(gettid().0, Relaxed);
    PARENT.store(this, Relaxed);
    if engine().is_some_and(|engine| engine.fork.followed && !trampoline::follow(engine)) {
        // Nobody would see to it that the child is served: all comes back, and stays.
        detach_before_fork(
            "cannot follow a fork (ptrace is not permitted, or the descriptor table is full): \
                detaching",
        );
    }
    if let Some(engine) = engine() {
        engine.fork.forker.store(gettid().0, Release);
        if !engine.fork.followed {
            engine.fork.open_ends();
        }
        engine.bells.submit(HandlerRequest::ForkPrepare);
        if !engine.fork.wait_until_prepared(mask) {
            trampoline::leave();
            engine.fork.close_end(false);
            engine.fork.close_end(true);
            detach_before_fork(
                "cannot receive the userfaultfd of a child: the limit on open files is too low \
                    (ulimit -n): detaching",
            );
        }
    }
    forking::goes_on();
}

/// All comes back, and there is no engine at the fork. The calling thread has the lock, and has it
/// again when this returns.
fn detach_before_fork(why: &str) {
    // SAFETY: this thread took the lock in `prepare` and forgot its guard.
    unsafe { FORK_LOCK.unlock() };
    log::line(why);
    // libc's fork cannot be refused here.
    while !detach() {}
    std::mem::forget(FORK_LOCK.lock());
}

/// After a fork, in the parent.
pub(crate) extern "C" fn parent() {
    if FORKS_CONFINED.swap(false, Relaxed) {
        // SAFETY: this thread took the lock in `prepare`; a waiter looks again by itself.
        unsafe { FORK_LOCK.force_unlock() };
        return;
    }
    forking::is_back();
    if let Some(engine) = engine() {
        trampoline::leave();
        engine.fork.close_end(false);
        engine.fork.close_end(true);
        engine.bells.submit(HandlerRequest::ForkDone);
        engine.fork.wait(NO_FORK, FORK_MASK.load(Relaxed));
        if engine.fork.was_child_killed() {
            tell(
                b"swaptide: a forked child did not take over its memory within 30 s and was \
                    killed\n",
            );
        }
    }
    let mask = FORK_MASK.load(Relaxed);
    FORKING.store(0, Relaxed);
    // SAFETY: this thread took the lock in `prepare` and forgot its guard.
    unsafe { FORK_LOCK.unlock() };
    restore_signals(mask);
}

/// After a fork, in the child, whose only thread this is.
pub(crate) extern "C" fn child() {
    if FORKS_CONFINED.swap(false, Relaxed) {
        // SAFETY: no other thread exists here. This process is not managed.
        unsafe { FORK_LOCK.force_unlock() };
        PLACE.store(NO_SLOT, Release);
        return;
    }
    after_fork_in_child();
    forking::is_back();
    FORKING.store(0, Relaxed);
    OWN_PID.store(getpid().0, Relaxed);
    exit_watch::forked();
    // This thread has another id here.
    kernel_words::pin_own_block();
    let mask = FORK_MASK.load(Relaxed);
    // SAFETY: the thread that took the lock in `prepare` is this one's original, and no other
    // thread exists here.
    unsafe { FORK_LOCK.force_unlock() };
    // Its holder is from now on a thread of this process: the one that begins management,
    // say. The next fork must wait for it.
    FORKER_PID.store(getpid().0, Relaxed);
    match inherited_engine().filter(|_| ENGINE_PID.load(Acquire) == PARENT.load(Relaxed)) {
        None => start_sleeper(),
        Some(engine) => {
            engine.forked();
            set_own_mark();
            ENGINE_PID.store(getpid().0, Release);
            TAKEN_OVER.store(0, Relaxed);
            engine.fork.close_end(false);
            if engine.fork.is_shut() {
                // The parent's handler serves this process until it has all its memory, and waits
                // for no word.
                engine.fork.close_end(true);
                ENGINE.store(std::ptr::null_mut(), Release);
            } else if spawn(child_handler_main) {
                let mut waited = Waited::default();
                while TAKEN_OVER.load(Acquire) == 0 {
                    waited.turn(
                        futex::wait(&TAKEN_OVER, 0, Some(WAIT_SLICE), futex::Scope::Private),
                        mask,
                    );
                }
                engine.fork.close_end(true);
            } else {
                // This thread asks for everything itself; the parent's handler serves its faults
                // until then.
                let declined = engine.decline(engine.fork.take_child_end(), Decline::NoThread);
                ENGINE.store(std::ptr::null_mut(), Release);
                if let Err(errno) = declined {
                    stop(errno);
                }
            }
        }
    }
    shmem::forked();
    restore_signals(mask);
}
