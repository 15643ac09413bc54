//! What the supervisor and an agent that it puts into a running program agree on: the names that it
//! looks up in the library, and the arguments of the first thread.
//!
//! Owns nothing. Locks: none.

/// Name of the code that the first thread runs. A thread of the program makes a clone(2) at its
/// first instruction; the new one continues behind it, with [`INJECTED_FRAME_BYTES`] on its
/// stack: the address of an [`InjectedArgs`] in the program's memory.
pub const START: &str = "swaptide_injected_start";
/// It is taken from the stack before a function is called, as the ABI wants it.
pub const INJECTED_FRAME_BYTES: u64 = 8;
/// What the library needs of libc is looked up under this and its own name.
pub const STAND_IN: &str = "swaptide_injected_";
/// What has no such stand-in: it ends the process with a message.
pub const MISSING: &str = "swaptide_injected_missing";

pub use swaptide_sys::thread::TLS_BYTES;

/// A range of the program's memory: its address and its length in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedRange {
    /// Address of the first byte.
    pub start: u64,
    /// Bytes; 0 where there is none.
    pub len: u64,
}

/// The arguments of the first thread.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedArgs {
    /// Its own stack, with these arguments: to be unmapped by it.
    pub memory: InjectedRange,
    /// The library.
    pub image: InjectedRange,
    /// Name of the supervisor's socket.
    pub socket: InjectedRange,
    /// Path of the log for bug reports.
    pub log: InjectedRange,
}

/// Bytes of [`InjectedArgs`].
pub const ARGS_BYTES: usize = 64;
const _: () = assert!(size_of::<InjectedArgs>() == ARGS_BYTES);

impl InjectedArgs {
    /// As they lie in the program's memory.
    pub fn to_bytes(self) -> [u8; ARGS_BYTES] {
        let ranges = [self.memory, self.image, self.socket, self.log];
        let mut bytes = [0; ARGS_BYTES];
        let words = ranges.into_iter().flat_map(|range| [range.start, range.len]);
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_lie_in_memory_as_the_struct_does() {
        let range = |start| InjectedRange { start, len: start + 1 };
        let args =
            InjectedArgs { memory: range(1), image: range(3), socket: range(5), log: range(7) };
        let bytes = args.to_bytes();
        for (place, word) in bytes.chunks_exact(8).zip(1u64..) {
            assert_eq!(place, word.to_le_bytes());
        }
    }
}
