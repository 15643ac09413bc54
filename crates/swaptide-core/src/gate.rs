//! A gate: many threads are inside at a time, or one has it closed.
//!
//! Going in and out costs a store to a word of the thread's own, so that threads which go in on
//! several CPUs share no line that is written. Closing costs a check of every place up to the last
//! one that was used.
//!
//! Invariants:
//! 1. A thread that goes in stores its place's word before it looks whether the gate is closed; one
//!    that closes it stores that before it looks at the places. Each has a fence between the two,
//!    so one of them sees the other. The thread that goes in is the one to step back.
//! 2. What happened inside happened before the gate was closed; what happens while it is closed
//!    happens before any thread is inside again.
//!
//! Waiting is as for the spin lock of this crate ([`crate::set_yield`]).

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicBool, AtomicUsize, Ordering, fence, relax};

/// A lock that many threads hold shared, each in a place of its own, or one thread holds closed.
pub struct SharedGate {
    closed: CachePadded<AtomicBool>,
    /// Threads have been inside by places below this.
    used: CachePadded<AtomicUsize>,
    places: Box<[CachePadded<AtomicBool>]>,
}

/// A thread is inside, until this is dropped.
#[must_use = "the thread leaves when this is dropped"]
pub struct Inside<'a> {
    place: &'a AtomicBool,
}

/// The gate is closed, until this is dropped.
#[must_use = "the gate opens when this is dropped"]
pub struct Closed<'a> {
    gate: &'a SharedGate,
}

impl SharedGate {
    /// An open gate for threads with numbers below `places`.
    pub fn new(places: usize) -> SharedGate {
        SharedGate {
            closed: CachePadded::new(AtomicBool::new(false)),
            used: CachePadded::new(AtomicUsize::new(0)),
            places: (0..places).map(|_| CachePadded::new(AtomicBool::new(false))).collect(),
        }
    }

    /// Goes in, when the gate is open.
    ///
    /// A place is one thread's: no other may be inside by it.
    ///
    /// # Panics
    /// When there is no such place.
    pub fn enter(&self, place: usize) -> Inside<'_> {
        let mut spins = 0;
        loop {
            if let Some(inside) = self.try_enter(place) {
                return inside;
            }
            while self.closed.load(Ordering::Relaxed) {
                relax(&mut spins);
            }
        }
    }

    /// Goes in, if the gate is open.
    ///
    /// # Panics
    /// As for [`SharedGate::enter`].
    pub fn try_enter(&self, place: usize) -> Option<Inside<'_>> {
        if place >= self.used.load(Ordering::Relaxed) {
            // Before the fence below, as the store to the place: invariant 1 holds for it as well.
            self.used.fetch_max(place + 1, Ordering::Relaxed);
        }
        let place = &*self.places[place];
        debug_assert!(!place.load(Ordering::Relaxed), "a thread is inside by this place");
        place.store(true, Ordering::Relaxed);
        // Invariant 1.
        fence(Ordering::SeqCst);
        // Acquire pairs with the release of `Closed::drop`.
        if self.closed.load(Ordering::Acquire) {
            place.store(false, Ordering::Release);
            return None;
        }
        Some(Inside { place })
    }

    /// Closes the gate, when no other thread has it closed, and waits until none is inside.
    pub fn close(&self) -> Closed<'_> {
        let mut spins = 0;
        let closed = loop {
            match self.shut() {
                Some(closed) => break closed,
                None => relax(&mut spins),
            }
        };
        for place in self.used_places() {
            while is_inside(place) {
                relax(&mut spins);
            }
        }
        closed
    }

    /// Closes the gate, if no thread is inside and no other has it closed.
    pub fn try_close(&self) -> Option<Closed<'_>> {
        let closed = self.shut()?;
        // What is dropped opens the gate again.
        (!self.used_places().any(is_inside)).then_some(closed)
    }

    /// No thread goes in from here on; some may be inside. `None` when another thread has it
    /// closed.
    fn shut(&self) -> Option<Closed<'_>> {
        // Acquire pairs with the release of the thread that had it closed before.
        let take = self.closed.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        if take.is_err() {
            return None;
        }
        // Invariant 1.
        fence(Ordering::SeqCst);
        Some(Closed { gate: self })
    }

    fn used_places(&self) -> impl Iterator<Item = &AtomicBool> {
        self.places[..self.used.load(Ordering::Relaxed)].iter().map(|place| &**place)
    }

    /// In a forked child: none of the threads exists that were inside or had it closed.
    pub fn reset(&self) {
        self.places.iter().for_each(|place| place.store(false, Ordering::Relaxed));
        self.closed.store(false, Ordering::Release);
    }
}

/// Acquire pairs with the release of `Inside::drop`.
fn is_inside(place: &AtomicBool) -> bool {
    place.load(Ordering::Acquire)
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.place.store(false, Ordering::Release);
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.gate.closed.store(false, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU64;

    /// Threads inside see the two halves of a sum agree, which changes only while it is closed.
    #[test]
    fn nothing_changes_around_a_thread_that_is_inside() {
        const THREADS: usize = 4;
        const ROUNDS: u64 = 5_000;
        let gate = SharedGate::new(THREADS);
        let halves = [AtomicU64::new(0), AtomicU64::new(0)];
        let both = || halves.each_ref().map(|half| half.load(Ordering::Relaxed));
        std::thread::scope(|scope| {
            for place in 0..THREADS {
                let (gate, halves) = (&gate, &halves);
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        let inside = gate.enter(place);
                        let seen = both();
                        assert_eq!(seen[0], seen[1]);
                        std::hint::spin_loop();
                        assert_eq!(both(), seen, "it changed meanwhile");
                        drop(inside);
                        let _closed = gate.close();
                        // Not one step: a second thread here would lose some.
                        for half in halves {
                            half.store(half.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(both(), [THREADS as u64 * ROUNDS; 2]);
    }

    #[test]
    fn a_forked_childs_gate_is_open() {
        let gate = SharedGate::new(2);
        core::mem::forget(gate.enter(1));
        gate.reset();
        core::mem::forget(gate.close());
        gate.reset();
        drop(gate.enter(1));
        drop(gate.close());
    }
}
