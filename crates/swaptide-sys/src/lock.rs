//! A mutex over one word, and the futex calls it is made of.
//!
//! The word is 0 (free), 1 (held) or 2 (held, and a thread may sleep). The lock keeps no owner and
//! no thread-local, so it works on threads libc does not know, and a forked child can free a lock
//! whose holder exists only in the parent ([`Lock::force_unlock`]).
//!
//! Invariants:
//! 1. A thread that takes a free word by 0 -> 1 or by swapping in 2 holds the lock.
//! 2. A thread sleeps only while the word is 2; a thread that frees a word that was 2 wakes one
//!    sleeper.

use core::cell::UnsafeCell;
use core::fmt;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use core::time::Duration;

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;

/// Tries before sleeping: about the time of a short critical section, nothing like a time slice.
const SPINS: u32 = 400;

/// A thread that has slept this long for a lock calls what [`on_long_wait`] set.
const LONG_WAIT: Duration = Duration::from_millis(3);

/// A `fn()`, or null.
static ON_LONG_WAIT: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());

/// Sets what a thread calls that has waited some milliseconds for a lock of this process, again and
/// again until it has it. It must take no lock.
pub fn on_long_wait(call: fn()) {
    ON_LONG_WAIT.store(call as *mut (), Ordering::Release);
}

#[cold]
fn late() {
    let call = ON_LONG_WAIT.load(Ordering::Acquire);
    if !call.is_null() {
        // SAFETY: what is not null was stored by `on_long_wait`, which takes a `fn()`.
        let call = unsafe { core::mem::transmute::<*mut (), fn()>(call) };
        call();
    }
}

/// A mutual exclusion lock around a `T`. Not recursive, not fair, no poisoning.
pub struct Lock<T: ?Sized> {
    word: AtomicU32,
    #[cfg(feature = "serial-part")]
    held: held::HeldTime,
    value: UnsafeCell<T>,
}

// SAFETY: the lock lets one thread at a time reach the value, so sending that access needs only
// `T: Send`.
unsafe impl<T: ?Sized + Send> Sync for Lock<T> {}
// SAFETY: owning the lock is owning the value.
unsafe impl<T: ?Sized + Send> Send for Lock<T> {}

impl<T> Lock<T> {
    /// A free lock around `value`.
    pub const fn new(value: T) -> Lock<T> {
        Lock {
            word: AtomicU32::new(FREE),
            #[cfg(feature = "serial-part")]
            held: held::HeldTime::new(),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the value out again.
    pub fn into_inner(self) -> T {
        self.value.into_inner()
    }
}

impl<T: ?Sized> Lock<T> {
    /// Takes the lock, sleeping for as long as another thread holds it.
    #[inline]
    pub fn lock(&self) -> Guard<'_, T> {
        // Acquire pairs with the Release in `Guard::drop`.
        if self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.lock_slow();
        }
        Guard::new(self)
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.word
            .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Guard::new(self))
    }

    /// True if a thread holds the lock at this moment: for assertions and statistics only.
    pub fn is_locked(&self) -> bool {
        self.word.load(Ordering::Relaxed) != FREE
    }

    /// Returns the nanoseconds that the lock was held so far, and the number of holds.
    #[cfg(feature = "serial-part")]
    pub fn held(&self) -> (u64, u64) {
        self.held.so_far()
    }

    /// The value, without locking: the exclusive borrow proves that no other thread has it.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }

    /// Frees the lock, whose guard the caller has forgotten, and wakes a waiter.
    ///
    /// # Safety
    /// The calling thread took the lock and its guard no longer exists.
    pub unsafe fn unlock(&self) {
        if self.word.swap(FREE, Ordering::Release) == CONTENDED {
            futex::wake(&self.word, 1, futex::Scope::Private);
        }
    }

    /// Frees the lock, whichever thread holds it.
    ///
    /// # Safety
    /// No thread of this process holds the lock: it was taken by a thread of the parent that the
    /// fork did not copy, and the value is whole or will be made so before it is used.
    pub unsafe fn force_unlock(&self) {
        self.word.store(FREE, Ordering::Release);
    }

    #[cold]
    fn lock_slow(&self) {
        for _ in 0..SPINS {
            core::hint::spin_loop();
            let word = self.word.load(Ordering::Relaxed);
            if word == FREE
                && self
                    .word
                    .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return;
            }
            if word == CONTENDED {
                // Others sleep already: spinning would only overtake them.
                break;
            }
        }
        // From here on the word is left at 2: this thread cannot know whether it is the last
        // sleeper.
        while self.word.swap(CONTENDED, Ordering::Acquire) != FREE {
            if futex::wait(&self.word, CONTENDED, Some(LONG_WAIT), futex::Scope::Private)
                == futex::TimedOut
            {
                late();
            }
        }
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.try_lock() {
            Some(guard) => f.debug_tuple("Lock").field(&&*guard).finish(),
            None => f.write_str("Lock(<held>)"),
        }
    }
}

impl<T: Default> Default for Lock<T> {
    fn default() -> Self {
        Lock::new(T::default())
    }
}

/// Access to the value of a [`Lock`]; dropping it frees the lock.
#[must_use = "the lock is freed when the guard is dropped"]
pub struct Guard<'a, T: ?Sized> {
    lock: &'a Lock<T>,
    #[cfg(feature = "serial-part")]
    since: crate::time::Nanos,
}

impl<'a, T: ?Sized> Guard<'a, T> {
    /// The calling thread has just taken the lock.
    #[inline]
    fn new(lock: &'a Lock<T>) -> Guard<'a, T> {
        Guard {
            lock,
            #[cfg(feature = "serial-part")]
            since: crate::time::now(),
        }
    }
}

// SAFETY: a shared guard gives `&T` only.
unsafe impl<T: ?Sized + Sync> Sync for Guard<'_, T> {}

impl<T: ?Sized> Deref for Guard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard exists only while its thread holds the lock (invariant 1).
        unsafe { &*self.lock.value.get() }
    }
}

impl<T: ?Sized> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard exists only while its thread holds the lock (invariant 1), and it is
        // borrowed exclusively.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T: ?Sized> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        #[cfg(feature = "serial-part")]
        self.lock.held.add(self.since);
        if self.lock.word.swap(FREE, Ordering::Release) == CONTENDED {
            futex::wake(&self.lock.word, 1, futex::Scope::Private);
        }
    }
}

#[cfg(feature = "serial-part")]
mod held {
    use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use crate::time::{Nanos, now};

    /// The time that a lock was held. Changed by its holder alone.
    pub(super) struct HeldTime {
        ns: AtomicU64,
        holds: AtomicU64,
    }

    impl HeldTime {
        pub(super) const fn new() -> HeldTime {
            HeldTime { ns: AtomicU64::new(0), holds: AtomicU64::new(0) }
        }

        pub(super) fn add(&self, since: Nanos) {
            let ns = now().since(since).as_nanos() as u64;
            self.ns.store(self.ns.load(Relaxed) + ns, Relaxed);
            self.holds.store(self.holds.load(Relaxed) + 1, Relaxed);
        }

        pub(super) fn so_far(&self) -> (u64, u64) {
            (self.ns.load(Relaxed), self.holds.load(Relaxed))
        }
    }
}

/// Sleeping on a word until another thread (or process) changes it.
pub mod futex {
    use core::sync::atomic::AtomicU32;
    use core::time::Duration;

    use linux_raw_sys::general as k;
    use rustix::io::Errno;

    use crate::raw::syscall;

    /// The processes that may wait on the word.
    #[derive(Copy, Clone, Debug, PartialEq, Eq)]
    pub enum Scope {
        /// Threads of this process: cheaper.
        Private,
        /// Processes that map the same memory.
        Shared,
    }

    /// The result of a wait.
    #[derive(Copy, Clone, Debug, PartialEq, Eq)]
    pub enum Wait {
        /// A wake came (or the kernel woke us for no reason: look at the word).
        Woken,
        /// The word was not what was expected; nothing was waited for.
        Mismatch,
        /// The time is over.
        TimedOut,
        /// A signal handler ran.
        Interrupted,
    }
    pub use Wait::{Interrupted, Mismatch, TimedOut, Woken};

    fn op(base: u32, scope: Scope) -> u32 {
        base | if scope == Scope::Private { k::FUTEX_PRIVATE_FLAG } else { 0 }
    }

    /// Sleeps while `word` is `expected`, at most for `timeout`.
    pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>, scope: Scope) -> Wait {
        let time = timeout.map(|t| k::__kernel_timespec {
            tv_sec: t.as_secs().min(i64::MAX as u64) as i64,
            tv_nsec: t.subsec_nanos().into(),
        });
        let time_ptr =
            time.as_ref().map_or(core::ptr::null(), |t| t as *const k::__kernel_timespec);
        // SAFETY: word and time outlive the call; the kernel only reads them.
        let ret = unsafe {
            syscall!(
                k::__NR_futex,
                word.as_ptr() as usize,
                op(k::FUTEX_WAIT, scope),
                expected,
                time_ptr as usize
            )
        };
        match ret {
            Err(Errno::AGAIN) => Mismatch,
            Err(Errno::TIMEDOUT) => TimedOut,
            Err(Errno::INTR) => Interrupted,
            _ => Woken,
        }
    }

    /// Wakes up to `n` sleepers; says how many there were.
    pub fn wake(word: &AtomicU32, n: u32, scope: Scope) -> usize {
        let n = n.min(i32::MAX as u32);
        // SAFETY: the kernel does not touch the word; the address is only a key.
        unsafe { syscall!(k::__NR_futex, word.as_ptr() as usize, op(k::FUTEX_WAKE, scope), n) }
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn counts_right_under_contention() {
        let lock = Lock::new((0u64, 0u64));
        std::thread::scope(|s| {
            for t in 0..8 {
                let lock = &lock;
                s.spawn(move || {
                    for i in 0..20_000u32 {
                        let mut both = lock.lock();
                        both.0 += 1;
                        if t == 0 && i % 1000 == 0 {
                            // A holder that sleeps drives the others into the futex.
                            std::thread::sleep(Duration::from_micros(50));
                        }
                        both.1 += 1;
                        assert_eq!(both.0, both.1);
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), (160_000, 160_000));
        assert!(!lock.is_locked());
    }

    #[test]
    fn try_lock_and_force_unlock() {
        let lock = Lock::new(1);
        let guard = lock.lock();
        assert!(lock.try_lock().is_none());
        core::mem::forget(guard);
        // SAFETY: the only guard was forgotten above; no thread holds the lock.
        unsafe { lock.force_unlock() };
        *lock.try_lock().unwrap() += 1;
        assert_eq!(lock.into_inner(), 2);
    }

    #[test]
    fn futex_says_how_a_wait_ended() {
        let word = AtomicU32::new(5);
        assert_eq!(futex::wait(&word, 4, None, futex::Scope::Private), futex::Mismatch);
        let start = Instant::now();
        let short = Some(Duration::from_millis(20));
        assert_eq!(futex::wait(&word, 5, short, futex::Scope::Shared), futex::TimedOut);
        assert!(start.elapsed() >= Duration::from_millis(20));
        std::thread::scope(|s| {
            let sleeper = s.spawn(|| {
                while word.load(Ordering::Acquire) == 5 {
                    futex::wait(&word, 5, None, futex::Scope::Shared);
                }
            });
            word.store(6, Ordering::Release);
            // The sleeper may not sleep yet; it then sees the new value itself.
            futex::wake(&word, u32::MAX, futex::Scope::Shared);
            sleeper.join().unwrap();
        });
        assert_eq!(futex::wake(&word, 1, futex::Scope::Private), 0, "no thread is left");
    }
}
