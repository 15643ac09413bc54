//! What the core asks of its user: addresses for the swap tables, and giving the memory of empty
//! ones back to the system.

#![allow(unsafe_code)]

use core::ffi::c_void;
use core::ptr::{self, NonNull};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use swaptide_core::TableMemory;

/// A mapping; dropping it gives it back.
struct Reserved {
    start: NonNull<c_void>,
    len: usize,
}

// SAFETY: a range of addresses; it is used by the tables alone, which are `Send` and `Sync`.
unsafe impl Send for Reserved {}
// SAFETY: shared references give no access to the memory.
unsafe impl Sync for Reserved {}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: mapped by `reserve` with this length; the tables in it are gone.
        let done = unsafe { munmap(self.start.as_ptr(), self.len) };
        debug_assert!(done.is_ok(), "{done:?}");
    }
}

/// Address space for tables: bytes that take no memory until they are written to, and then a
/// page at a time.
pub(crate) fn reserve(len: usize) -> TableMemory {
    let len = len.max(4096).next_multiple_of(4096);
    let (access, flags) =
        (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a new mapping where the kernel has room; it replaces nothing.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), len, access, flags) }
        .expect("addresses for the swap tables");
    // SAFETY: changes no data. A kernel without huge pages refuses: then there are none.
    let _ = unsafe { madvise(start, len, Advice::LinuxNoHugepage) };
    let start = NonNull::new(start).expect("no mapping starts at zero");
    // SAFETY: new anonymous memory is zeros on whole pages, nothing else refers to it, and it stays
    // until `Reserved` is dropped.
    unsafe { TableMemory::new(start.cast(), len, Box::new(Reserved { start, len })) }
}

/// See [`swaptide_core::TableDiscard`].
pub(crate) fn discard(pages: *const u8, len: usize) {
    // SAFETY: the core calls this with whole pages of its own that hold zeros and nothing else;
    // they read as zeros afterwards.
    let done = unsafe { madvise(pages.cast_mut().cast(), len, Advice::LinuxDontNeed) };
    // Locked memory stays: the zeros stay as well.
    debug_assert!(done.is_ok() || cfg!(miri), "{done:?}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::designs::layers::{Layer, SwapTable};
    use std::os::unix::fs::FileExt;
    use swaptide_core::{
        CpuId, FolioId, GroupId, Kind, MAX_SLOTS, Order, SlotContent, SwapDevice, SwapOffset,
        SwapType,
    };

    /// Pages of a range that have memory, as the kernel knows it.
    fn present(start: usize, len: usize) -> usize {
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        let mut words = vec![0; len / 4096 * 8];
        pagemap.read_exact_at(&mut words, (start / 4096 * 8) as u64).unwrap();
        words.chunks_exact(8).filter(|word| word[7] & 0x80 != 0).count()
    }

    #[test]
    fn counted_memory_is_resident_memory() {
        let slots = MAX_SLOTS;
        let len = SwapDevice::table_bytes(slots);
        let memory = reserve(len);
        let start = memory.start().addr().get();
        let held = || present(start, len);
        assert_eq!(held(), 0);
        let device = SwapDevice::new_in(memory, SwapType::new(0).unwrap(), slots, 2, Kind::Solid)
            .with_table_discard(discard);
        // The last cluster is not whole: its table is in use.
        assert_eq!((held(), device.usage().tables), (1, 1));
        let before = device.metadata_bytes();
        assert!(before <= 160 << 10, "{before} bytes for 1 TiB without a used slot");
        let alloc = || device.alloc_folio(CpuId(0), Order::MAX, FolioId(1), GroupId(0)).unwrap();
        let offs: Vec<SwapOffset> = (0..1000).map(|_| alloc()).collect();
        assert_eq!((held(), device.usage().tables), (1001, 1001));
        let used = device.metadata_bytes() - before;
        assert!((1000 * 4096..1000 * (4096 + 48) + 4096).contains(&used), "{used}");
        assert_eq!(device.lookup(offs[999]), SlotContent::Folio(FolioId(1)));
        offs.iter().for_each(|&off| _ = device.free(off, 512, swaptide_core::Expect::Any).unwrap());
        let warm = held() - 1;
        assert!(warm <= 16 && device.usage().tables == 1, "{warm}");
        assert!(
            device.metadata_bytes() - before <= warm * 4096 + 1024 * 40,
            "{}",
            device.metadata_bytes() - before
        );
        assert_eq!(device.lookup(offs[500]), SlotContent::Free);
        // A walk looks into tables that have a record: 32 clusters get theirs together. Where there
        // is nothing the one page of zeros is mapped.
        assert_eq!(device.next_used(SwapOffset(0)), None);
        assert!(held() <= 1024 + 32, "{} of {} tables were touched", held(), len / 4096);
    }

    #[test]
    fn emptied_tables_cost_nothing() {
        let layer = SwapTable::new(1 << 18, 1 << 18, 1).giving_back();
        let empty = layer.bytes();
        let offs: Vec<u32> = (0..512).map(|i| layer.swap_out(0, 9, FolioId(i)).unwrap()).collect();
        let full = layer.bytes();
        assert!(full - empty >= 512 * 4096);
        offs[1..].iter().for_each(|&off| layer.free(0, off, 512));
        // 8 tables at most stay warm, and the clusters' records stay.
        assert!(layer.bytes() - empty <= 9 * 4096 + 512 * 40, "{}", layer.bytes() - empty);
        assert_eq!(layer.lookup(offs[0] + 511), Some(FolioId(0)));
        assert_eq!(layer.lookup(offs[300]), None);
        assert!(
            layer
                .swap_out(0, 9, FolioId(7))
                .is_some_and(|off| layer.lookup(off) == Some(FolioId(7)))
        );
    }
}
