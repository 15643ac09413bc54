//! The lock of all baselines: the core's algorithm, so that a comparison does not compare locks, and a count of the waits.
//!
//! Invariant: the value is reached through a guard only, and one guard exists at a time.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static WAITS: AtomicU64 = AtomicU64::new(0);

/// How often a lock of any baseline was found taken, since the process started.
pub fn lock_waits() -> u64 {
    WAITS.load(Ordering::Relaxed)
}

/// Lets the core's locks give up the CPU after a while, as the baselines' do: there may be more threads than CPUs.
pub fn use_yield() {
    static HOOK: fn() = std::thread::yield_now;
    swaptide_core::set_yield(&HOOK);
}

#[derive(Default)]
pub(crate) struct SpinLock<T> {
    locked: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a guard, and `locked` lets one guard exist at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}

pub(crate) struct Guard<'a, T>(&'a SpinLock<T>);

impl<T> SpinLock<T> {
    pub const fn new(value: T) -> Self {
        SpinLock { locked: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        if self.locked.load(Ordering::Relaxed) || self.locked.swap(true, Ordering::Acquire) {
            return None;
        }
        Some(Guard(self))
    }

    #[inline]
    pub fn lock(&self) -> Guard<'_, T> {
        if let Some(guard) = self.try_lock() {
            return guard;
        }
        WAITS.fetch_add(1, Ordering::Relaxed);
        let mut spins = 0u32;
        loop {
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(256) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
            if let Some(guard) = self.try_lock() {
                return guard;
            }
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: a guard exists only while `locked` is its own.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; `&mut self` makes this the only reference taken from this guard.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        self.0.locked.store(false, Ordering::Release);
    }
}

/// A value on cache lines of its own: what is per CPU, or written all the time, as the kernel would lay it out.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct OwnLine<T>(pub T);

impl<T> Deref for OwnLine<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_excludes_and_counts_waits() {
        let lock = SpinLock::new(0u64);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..20_000 {
                        let mut value = lock.lock();
                        let before = *value;
                        assert!(lock.try_lock().is_none());
                        *value = before + 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 80_000);
        let held = lock.lock();
        let before = lock_waits();
        std::thread::scope(|s| {
            s.spawn(|| drop(lock.lock()));
            while lock_waits() == before {
                std::thread::yield_now();
            }
            drop(held);
        });
        assert!(lock_waits() > before);
    }
}
