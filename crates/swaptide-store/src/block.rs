//! What the devices that hold blocks have in common.

use swaptide_sys::Errno;

/// Neighbouring blocks to read: one read, if the kernel does not cut it short.
pub(crate) struct BlockRun<'b> {
    pub(crate) offset: u64,
    /// The caller's number of the first block, for its errors.
    pub(crate) first: usize,
    /// Whole blocks.
    pub(crate) buf: &'b mut [u8],
}

/// True if an error says that this process or the machine is short of memory or descriptors. A
/// server's own shortage comes as another one.
pub(crate) fn is_own_shortage(errno: Errno) -> bool {
    matches!(errno, Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::AGAIN)
}
