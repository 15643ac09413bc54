//! What the core asks of its user: giving the memory of an empty table back to the system.

#![allow(unsafe_code)]

use rustix::mm::{Advice, madvise};

/// See [`swaptide_core::TableDiscard`].
pub(crate) fn discard(pages: *const u8, len: usize) {
    // SAFETY: the core calls this with whole pages of its own that hold zeros and nothing else; they read as zeros afterwards.
    let done = unsafe { madvise(pages.cast_mut().cast(), len, Advice::LinuxDontNeed) };
    // Locked memory stays: the zeros stay as well.
    debug_assert!(done.is_ok() || cfg!(miri), "{done:?}");
}

#[cfg(test)]
mod tests {
    use crate::layers::{Layer, SwapTable};
    use swaptide_core::FolioId;

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
        assert!(layer.swap_out(0, 9, FolioId(7)).is_some_and(|off| layer.lookup(off) == Some(FolioId(7))));
    }
}
