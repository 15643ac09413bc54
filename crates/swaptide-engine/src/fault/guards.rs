//! Guard pages of the program (`MADV_GUARD_INSTALL`, Linux 6.13): a touch is a SIGSEGV, and the
//! contents are gone.
//!
//! The kernel sends no event for them. Where the program asks through libc, the agent installs the
//! guard, gives the range up with `MADV_DONTNEED` (which sends the event that empties the words),
//! and installs it again, since a page may have come in between. A bare instruction is not seen:
//! the words then keep what they were, and the guard is found when something is put there.
//!
//! Owns: nothing. [`crate::engine::Engine::guarded`] says that the program has had a guard.
//!
//! Invariants
//! 1. A fill never replaces a guard. `UFFDIO_MOVE` and `UFFDIO_POISON` answer `EEXIST` on one;
//!    `UFFDIO_COPY` fills over it, so what it fills is looked at first. The page of a waiting
//!    thread needs no look before the program's first guard: a touch of a guard is no userfaultfd
//!    fault.
//! 2. A slot whose page is a guard is released, and its word becomes `Empty`: the guard discarded
//!    the contents. Any other page that the program has where the word says swapped ends the
//!    process.
//!
//! Locks: none of its own. A look and the fill behind it happen under the memory lock, and the
//! event of the agent's `MADV_DONTNEED` is applied under it: a fill that was looked at before the
//! guard was installed is undone by that.

use std::sync::atomic::Ordering::Relaxed;

use swaptide_core::SwapEntry;
use swaptide_sys::page::PAGE_SIZE;

use crate::engine::Mm;
use crate::event_loop::Handler;
use crate::fault::path::{Stop, finish_fill};
use crate::mm::page_table::PageState;
use crate::mm::types::{PageNo, range_of};

impl Handler {
    /// Copies `n` pages in from the engine's memory at `from`, as far as no guard is in the way.
    /// [`Stop::Exists`] when the first page is a guard or is there.
    pub(crate) fn copy_in(&self, page: PageNo, from: *const u8, n: usize) -> Result<usize, Stop> {
        let is_asked = n == 1 && self.answering.is_some_and(|fault| PageNo::of(fault.addr) == page);
        let n = if is_asked && !self.engine.guarded.load(Relaxed) {
            n
        } else {
            self.before_guard(page, n)
        };
        if n == 0 {
            return Err(Stop::Exists);
        }
        // SAFETY: the caller's pages are the engine's own, in frames or buffers that nobody changes
        // meanwhile.
        finish_fill(unsafe { self.uffd.copy_pages(page.addr(), from, n * PAGE_SIZE, true, false) })
    }

    /// How many of `n` pages lie before the first guard.
    fn before_guard(&self, page: PageNo, n: usize) -> usize {
        self.pagemap
            .first_guard(range_of(page, n))
            .map_or(n, |at| (at.0 - page.addr().0) / PAGE_SIZE)
    }

    /// The program has something where a word says swapped. A guard discarded the contents, and the
    /// slot is released. Anything else: one of the two is wrong, and nothing tells which.
    pub(crate) fn resolve_mapped_twice(
        &mut self,
        mm: &mut Mm,
        page: PageNo,
        entry: SwapEntry,
    ) -> Result<usize, Stop> {
        if self.before_guard(page, 1) != 0 {
            crate::fatal(&format!(
                "page {:?} is swapped to {entry:?} and also mapped",
                page.addr()
            ));
        }
        self.engine.guarded.store(true, Relaxed);
        mm.table.set(page, PageState::Empty);
        self.engine.release(mm, entry);
        Ok(1)
    }
}
