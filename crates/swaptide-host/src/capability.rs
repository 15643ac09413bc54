//! What a supervisor does without a capability that it has: it lends its programs no rights.
//!
//! Owns nothing. Locks: none.

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// Runs `act` without a capability that this thread may have: the kernel decides as it would for a
/// thread without it. `None`, and nothing is done, where the capability cannot be dropped.
pub(crate) fn without<T>(capability: CapabilitySet, act: impl FnOnce() -> T) -> Option<T> {
    let sets = capabilities(None).ok()?;
    if !sets.effective.intersects(capability) {
        return Some(act());
    }
    let less = CapabilitySets { effective: sets.effective - capability, ..sets };
    set_capabilities(None, less).ok()?;
    let done = act();
    // What is permitted may always be made effective.
    let _ = set_capabilities(None, sets);
    Some(done)
}
