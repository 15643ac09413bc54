//! Memory for blocks on their way in and out.

use swaptide_sys::Errno;
use swaptide_sys::mem::Mapping;

use crate::PAGE_SIZE;

/// Block-aligned memory. Its addresses are reserved with the device: a program may limit its
/// address space later (`RLIMIT_AS`, `RLIMIT_DATA`), and must get its pages back all the same.
/// Where they cannot be had then they are asked for again when they are needed.
#[derive(Default)]
pub(super) struct Buffer(Option<Mapping>);

impl Buffer {
    pub(super) fn reserve(blocks: usize) -> Buffer {
        Buffer(Mapping::reserve(blocks * PAGE_SIZE).ok())
    }

    pub(super) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    pub(super) fn blocks(&mut self, n: usize) -> Result<&mut [u8], Errno> {
        let len = n * PAGE_SIZE;
        let mapping = match self.0.take() {
            Some(mapping) if mapping.len() >= len => mapping,
            _ => Mapping::reserve(len)?,
        };
        let mapping = self.0.insert(mapping);
        // SAFETY: the mapping is at least as long as this, its memory is initialized (anonymous),
        // and the exclusive borrow of its owner keeps others off.
        Ok(unsafe { core::slice::from_raw_parts_mut(mapping.as_ptr(), len) })
    }
}
