//! libc's fork handlers: what a fork does in the parent and in the child.
//!
//! Locks: [`FORK_LOCK`], from [`prepare`] to [`parent`] or [`child`].
//!
//! Handlers of the program's that were registered before these run between them, and may fork
//! themselves. So the thread that holds the lock may come here again:
//!
//! - before its fork or after it, in the parent: the engine is done with the outer fork first, and
//!   prepares for it again after the inner one ([`prepare_within`]);
//! - in the child of the outer fork: that is a process of its own first ([`child`]).

use std::ffi::c_int;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release, Ordering::SeqCst, fence,
};
use std::time::Duration;

use swaptide_engine::Engine;
use swaptide_engine::fork::Decline;
use swaptide_engine::requests::HandlerRequest;
use swaptide_engine::requests::fork_control::NO_FORK;
use swaptide_engine::sched::deadline::{WAIT_SLICE, Waited};
use swaptide_sys::high_fds;
use swaptide_sys::lock::futex;
use swaptide_sys::mem::after_fork_in_child;
use swaptide_sys::thread::{block_all_signals, getpid, gettid, restore_signals, sleep, tell};

use crate::allocator;
use crate::engage_gate;
use crate::exit_watch;
use crate::fork::child::{TAKEN_OVER, child_handler_main, stop};
use crate::fork::trampoline;
use crate::forking::{self, FORKING};
use crate::lifecycle::{self, PARENT, start_sleeper};
use crate::log;
use crate::marks::{is_copied_memory, set_own_mark};
use crate::own_pid::{OWN_PID, is_own_process};
use crate::pages::kernel_words;
use crate::process::{
    ENGINE, ENGINE_PID, FORK_LOCK, PLACE, SLOT_UNCLAIMED, detach, detach_without_calls, engine,
    engine_without_calls, inherited_engine, may_follow_forks, own_memory, spawn,
};
use crate::seccomp;
use crate::shmem;
use crate::starting;

/// The signal mask of the forking thread, from its prepare handler to the other end.
static FORK_MASK: AtomicU64 = AtomicU64::new(0);
/// The control block of the forking thread ([`control_block`]), which is its child's as well; 0:
/// there is none.
static FORKING_BLOCK: AtomicUsize = AtomicUsize::new(0);
/// The nesting depth of forks. Only the holder of [`FORK_LOCK`] changes it.
static DEPTH: AtomicU32 = AtomicU32::new(0);

/// The address of the calling thread's control block: a name for the thread that takes no system
/// call, and that the thread of a forked child has as well.
fn control_block() -> usize {
    let address;
    // SAFETY: the first word of the block is its own address, as the ABI of thread-locals says.
    unsafe {
        std::arch::asm!("mov {}, fs:0", out(reg) address,
            options(nostack, readonly, preserves_flags));
    }
    address
}

/// True in the thread that holds [`FORK_LOCK`] for a fork, and in its child until [`child`] is
/// over.
fn is_forking() -> bool {
    FORKING_BLOCK.load(Relaxed) == control_block()
}

/// True if the calling thread is between its prepare handler and the other end of a fork.
fn is_within_fork() -> bool {
    is_forking()
        && !is_copied_memory()
        && (FORKS_CONFINED.load(Relaxed) || FORKING.load(Relaxed) == gettid().0)
}

/// Returns when no management is beginning: what this thread has stored before is seen by one that
/// begins later. It does not wait for a fork, whose handlers may wait for this thread.
pub(crate) fn wait_for_begin() {
    fence(SeqCst);
    while is_own_process() && FORK_LOCK.is_locked() && FORKING_BLOCK.load(Relaxed) == 0 {
        sleep(Duration::from_micros(100));
    }
    fence(SeqCst);
}

/// Does with a fork what libc's handlers do, where libc calls none.
pub(crate) fn with_handlers(fork: impl FnOnce() -> c_int) -> c_int {
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
    if is_within_fork() {
        return prepare_within();
    }
    if seccomp::is() {
        // Nothing may begin meanwhile, and nothing is managed: neither end has anything to do.
        let take = || loop {
            match FORK_LOCK.try_lock() {
                Some(guard) => break std::mem::forget(guard),
                None => std::hint::spin_loop(),
            }
        };
        own_memory(false);
        take();
        while engine_without_calls().is_some() {
            // SAFETY: this thread took the lock and forgot its guard; a waiter looks again
            // by itself.
            unsafe { FORK_LOCK.force_unlock() };
            detach_without_calls();
            take();
        }
        FORKS_CONFINED.store(true, Relaxed);
        DEPTH.store(1, Relaxed);
        FORKING_BLOCK.store(control_block(), Relaxed);
        return;
    }
    if is_forking() && is_copied_memory() {
        // A handler of the outer fork's child: this process takes over what it has of its parent
        // before it has a child of its own.
        child();
    }
    let mask = block_all_signals().unwrap_or(0);
    own_memory(false);
    take_lock(mask, 1);
    PARENT.store(getpid().0, Relaxed);
    begin(mask);
}

/// Takes the lock for a fork. `mask`: the calling thread's own signal mask.
fn take_lock(mask: u64, depth: u32) {
    std::mem::forget(FORK_LOCK.lock());
    FORK_MASK.store(mask, Relaxed);
    // That may be a copy as well, of a moment in which the parent took itself to be under a filter.
    FORKS_CONFINED.store(false, Relaxed);
    DEPTH.store(depth, Relaxed);
    FORKING.store(gettid().0, Relaxed);
    FORKING_BLOCK.store(control_block(), Relaxed);
}

/// Frees it; the mask that the thread had.
fn free_lock() -> u64 {
    let mask = FORK_MASK.load(Relaxed);
    FORKING_BLOCK.store(0, Relaxed);
    FORKING.store(0, Relaxed);
    // SAFETY: this thread took the lock in `take_lock` and forgot its guard.
    unsafe { FORK_LOCK.unlock() };
    mask
}

/// Before a fork within a fork: the engine, which is prepared for the outer one, ends that.
fn prepare_within() {
    DEPTH.fetch_add(1, Relaxed);
    if FORKS_CONFINED.load(Relaxed) {
        return;
    }
    forking::is_back();
    if let Some(engine) = engine() {
        end(engine);
        if engine.fork.followed {
            // The inner child may continue with the outer fork, which would not be followed.
            detach_before_fork("a fork handler forks, and forks are followed: detaching");
        }
    }
    begin(FORK_MASK.load(Relaxed));
}

/// Has the engine prepare for a fork. The calling thread has the lock; `mask` is its own.
fn begin(mask: u64) {
    if engine().is_some_and(|engine| engine.fork.followed && !trampoline::follow(engine)) {
        // No thread would serve the child: all memory comes back, and stays.
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
        engine.handler_requests.submit(HandlerRequest::ForkPrepare);
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
    let depth = DEPTH.load(Relaxed);
    let mask = free_lock();
    log::line(why);
    // libc's fork cannot be refused here.
    while !detach() {}
    take_lock(mask, depth);
}

/// A fork is over, or did not take place; returns when its child has what it needs.
fn end(engine: &Engine) {
    trampoline::leave();
    engine.fork.close_end(false);
    engine.fork.close_end(true);
    engine.handler_requests.submit(HandlerRequest::ForkDone);
    engine.fork.wait(NO_FORK, FORK_MASK.load(Relaxed));
    if engine.fork.was_child_killed() {
        tell(b"swaptide: a forked child did not take over its memory within 30 s and was killed\n");
    }
}

/// After a fork, in the parent. Not where the child of an inner fork continues with the outer one.
pub(crate) extern "C" fn parent() {
    if !is_forking() {
        return;
    }
    let is_inner = DEPTH.fetch_sub(1, Relaxed) > 1;
    if FORKS_CONFINED.load(Relaxed) {
        if !is_inner {
            FORKS_CONFINED.store(false, Relaxed);
            FORKING_BLOCK.store(0, Relaxed);
            // SAFETY: this thread took the lock in `prepare`; a waiter looks again by itself.
            unsafe { FORK_LOCK.force_unlock() };
        }
        return;
    }
    forking::is_back();
    if let Some(engine) = engine() {
        end(engine);
    }
    if is_inner {
        // The outer fork follows, or is over already.
        begin(FORK_MASK.load(Relaxed));
    } else {
        restore_signals(free_lock());
    }
}

/// After a fork, in the child, whose only thread this is. Not where [`prepare`] was not called
/// before, as where the child of an inner fork has gone on to the outer one, and not again.
pub(crate) extern "C" fn child() {
    if !is_forking() {
        return;
    }
    FORKING_BLOCK.store(0, Relaxed);
    high_fds::forked();
    starting::forked();
    engage_gate::forked();
    let is_inner = DEPTH.load(Relaxed) > 1;
    if FORKS_CONFINED.swap(false, Relaxed) {
        // SAFETY: no other thread exists here. This process is not managed.
        unsafe { FORK_LOCK.force_unlock() };
        own_memory(true);
        PLACE.store(SLOT_UNCLAIMED, Release);
        return;
    }
    after_fork_in_child();
    lifecycle::forked();
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
    own_memory(true);
    let inherited = inherited_engine().filter(|_| ENGINE_PID.load(Acquire) == PARENT.load(Relaxed));
    if inherited.is_none() {
        // The parent may be a child past libc, which has copies of its own parent's: a dead engine,
        // and an arena as it was in the midst of a change.
        ENGINE.store(std::ptr::null_mut(), Release);
        allocator::renew();
    }
    match inherited {
        // It may continue with the outer fork without `prepare`: nothing may be missing then.
        None if is_inner && may_follow_forks() => PLACE.store(SLOT_UNCLAIMED, Release),
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
