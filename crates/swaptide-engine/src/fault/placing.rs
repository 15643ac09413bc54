//! Putting pages in place without the memory lock, where several threads serve faults.
//!
//! Between the check of a page's word and the fill no change of mappings may be read
//! ([`crate::sched::handed`]). Where the handler alone serves faults, the memory lock is held over
//! both. Where there are servers, a thread that fills is inside the gate instead, and a thread that
//! reads a message has it closed: fills go on next to each other, and next to all that the lock
//! guards.
//!
//! Owns: a stay inside the gate. Lock order: the gate before the memory lock.

use swaptide_core::Inside;
use swaptide_sys::lock::Guard;

use crate::engine::{Engine, Mm};
use crate::mm::types::FillerNo;

/// How pages are put in place until it is dropped.
pub(crate) struct Placing {
    engine: &'static Engine,
    inside: Option<Inside<'static>>,
}

impl Placing {
    /// With the memory lock held.
    pub(crate) fn locked(engine: &'static Engine) -> Placing {
        Placing { engine, inside: None }
    }

    /// Without it, inside the gate. The calling thread does not hold the memory lock.
    pub(crate) fn inside(engine: &'static Engine, filler: FillerNo) -> Placing {
        Placing { engine, inside: Some(engine.serving.gate.enter(filler.0.into())) }
    }

    /// The memory lock is given back for `put`.
    pub(crate) fn is_inside(&self) -> bool {
        self.inside.is_some()
    }

    /// Does `put`, which changes pages of the program, without the memory lock if it may.
    pub(crate) fn put<T>(
        &self,
        guard: Guard<'static, Mm>,
        put: impl FnOnce() -> T,
    ) -> (Guard<'static, Mm>, T) {
        if !self.is_inside() {
            let result = put();
            return (guard, result);
        }
        drop(guard);
        let result = put();
        (self.engine.mm.lock(), result)
    }
}
