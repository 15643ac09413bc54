//! The variables of the environment by which the agent comes into a process, and stays in those
//! that it starts.
//!
//! Owns: their texts, written once by the constructor. Locks: none.

use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Release};

use swaptide_ipc::{ENV_AGENT_LOG, ENV_SOCKET};

/// The variable that names preloaded libraries.
pub(crate) const PRELOAD: &str = "LD_PRELOAD";

/// `NAME=VALUE` and its NUL, written once. Length 0: there is no such variable.
pub struct Variable {
    bytes: UnsafeCell<[u8; 4200]>,
    len: AtomicUsize,
}

// SAFETY: the bytes are written by the constructor alone, before the length that lets others read
// them.
unsafe impl Sync for Variable {}

impl Variable {
    pub(crate) const fn new() -> Variable {
        Variable { bytes: UnsafeCell::new([0; 4200]), len: AtomicUsize::new(0) }
    }

    pub(crate) fn set(&self, name: &str, value: &[u8]) {
        // SAFETY: see `Sync`.
        let bytes = unsafe { &mut *self.bytes.get() };
        let len = name.len() + 1 + value.len();
        if len < bytes.len() {
            bytes[..name.len()].copy_from_slice(name.as_bytes());
            bytes[name.len()] = b'=';
            bytes[name.len() + 1..len].copy_from_slice(value);
            self.len.store(len, Release);
        }
    }

    pub(crate) fn get(&self) -> Option<&CStr> {
        let len = self.len.load(Acquire);
        // SAFETY: see `Sync`; what follows the text is zero.
        (len > 0).then(|| unsafe { CStr::from_ptr(self.bytes.get().cast()) })
    }

    pub(crate) fn value(&self, name: &str) -> &[u8] {
        self.get().map_or(&[], |text| &text.to_bytes()[name.len() + 1..])
    }

    pub(crate) fn c_value(&self, name: &str) -> Option<&CStr> {
        let text = self.get()?.to_bytes_with_nul();
        CStr::from_bytes_with_nul(&text[name.len() + 1..]).ok()
    }
}

/// The supervisor's socket, if there is one.
pub(crate) fn socket() -> Option<&'static [u8]> {
    Some(SOCKET.value(ENV_SOCKET)).filter(|name| !name.is_empty())
}

pub(crate) static AGENT: Variable = Variable::new();
pub(crate) static SOCKET: Variable = Variable::new();
pub(crate) static LOG: Variable = Variable::new();

/// Remembers what a program of this tree needs. Called by the constructor.
pub(crate) fn remember(agent: &[u8], socket: &[u8], log: Option<&[u8]>) {
    AGENT.set(PRELOAD, agent);
    if let Some(log) = log {
        LOG.set(ENV_AGENT_LOG, log);
    }
    SOCKET.set(ENV_SOCKET, socket);
}
