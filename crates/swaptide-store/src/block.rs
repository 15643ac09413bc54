//! What the devices that hold blocks have in common.

/// Neighbouring blocks to read: one read, if the kernel does not cut it short.
pub(crate) struct BlockRun<'b> {
    pub(crate) offset: u64,
    /// The caller's number of the first block, for its errors.
    pub(crate) first: usize,
    /// Whole blocks.
    pub(crate) buf: &'b mut [u8],
}
