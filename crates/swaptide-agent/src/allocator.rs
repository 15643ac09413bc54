//! Memory for swaptide inside a program: an allocator over its own mapping, which is never the
//! program's heap.
//!
//! Locks: the arena's, the last but one in the lock order: its mapping is made under it.

use std::alloc::{GlobalAlloc, Layout};
use std::ptr::NonNull;

use rustix::process::{Resource, getrlimit};
use swaptide_sys::lock::Lock;
use swaptide_sys::mem::Mapping;
use talc::{OomHandler, Span, Talc};

/// Address space of the arena: more than tables for the largest program need; only what is touched
/// costs memory. The first of these that can be had; where the program has a limit, the last: the
/// rest is its own, and it is not managed.
const RESERVED: [usize; 4] = [32 << 30, 4 << 30, 512 << 20, 64 << 20];
/// Limit on a process's addresses or data, in bytes, below which it is not managed: an engine
/// reserves some 160 GiB, and as far as the kernel let it, would take what the program is to map.
pub(crate) const MIN_ADDRESS_LIMIT_BYTES: u64 = 512 << 30;
/// The arena grows in steps of this.
const GROWTH_BYTES: usize = 256 << 10;

/// Hands the allocator another piece of the mapping when it has none left.
struct Grow {
    base: usize,
    reserved: usize,
    claimed: usize,
}

impl Grow {
    fn reserve(&mut self) -> bool {
        if self.base == 0 {
            let from = if address_limit().is_some() { RESERVED.len() - 1 } else { 0 };
            for &len in &RESERVED[from..] {
                if let Ok(map) = Mapping::reserve(len) {
                    self.base = map.into_raw().as_ptr() as usize;
                    self.reserved = len;
                    break;
                }
            }
        }
        self.base != 0
    }
}

impl OomHandler for Grow {
    fn handle_oom(talc: &mut Talc<Self>, layout: Layout) -> Result<(), ()> {
        let grow = &mut talc.oom_handler;
        if !grow.reserve() {
            return Err(());
        }
        let old_end = grow.base + grow.claimed;
        let more = (layout.size() + layout.align() + GROWTH_BYTES).next_multiple_of(GROWTH_BYTES);
        if grow.claimed + more > grow.reserved {
            return Err(());
        }
        let first = grow.claimed == 0;
        grow.claimed += more;
        let whole = Span::new(grow.base as *mut u8, (old_end + more) as *mut u8);
        // SAFETY: the span lies in the mapping made above, which is never unmapped and used by
        // nothing else; when extended, the old heap is what was claimed before.
        unsafe {
            if first {
                talc.claim(whole)?;
            } else {
                let old = Span::new(talc.oom_handler.base as *mut u8, old_end as *mut u8);
                talc.extend(old, whole);
            }
        }
        Ok(())
    }
}

struct Arena(Lock<Talc<Grow>>);

// SAFETY: allocations come from the allocator under its lock; sizes and alignments are passed
// through as they came.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's layout has a size above 0.
        unsafe { self.0.lock().malloc(layout) }.map_or(std::ptr::null_mut(), NonNull::as_ptr)
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        if let Some(ptr) = NonNull::new(ptr) {
            // SAFETY: the caller's pointer came from `alloc` with this layout.
            unsafe { self.0.lock().free(ptr, layout) };
        }
    }
}

/// The limit that leaves too few addresses for an engine, if there is one: of what, and the option
/// of ulimit.
pub(crate) fn address_limit() -> Option<(&'static str, &'static str)> {
    let limits = [(Resource::As, "addresses", "-v"), (Resource::Data, "data", "-d")];
    let is_low =
        |resource| getrlimit(resource).current.is_some_and(|limit| limit < MIN_ADDRESS_LIMIT_BYTES);
    limits
        .into_iter()
        .find(|(resource, ..)| is_low(*resource))
        .map(|(_, what, option)| (what, option))
}

/// Makes sure there is an arena. False where the address space is too small for one: nothing may be
/// allocated then.
pub(crate) fn ready() -> bool {
    ARENA.0.lock().oom_handler.reserve()
}

/// A new arena, in a child that libc has forked and that has no engine to take over: nothing of the
/// old one is in use there, and it may be torn, its lock held by a thread of another process.
pub(crate) fn renew() {
    // SAFETY: no other thread exists in this process.
    unsafe { ARENA.0.force_unlock() };
    *ARENA.0.lock() = empty_arena();
}

const fn empty_arena() -> Talc<Grow> {
    Talc::new(Grow { base: 0, reserved: 0, claimed: 0 })
}

#[cfg_attr(not(test), global_allocator)]
static ARENA: Arena = Arena(Lock::new(empty_arena()));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_do_not_overlap_and_are_freed() {
        let mut kept: Vec<(*mut u8, Layout, u8)> = Vec::new();
        for round in 0..2000usize {
            let layout = Layout::from_size_align(1 + (round * 7919) % 20_000, 1 << (round % 8))
                .expect("a layout");
            // SAFETY: the size is above 0; the bytes written are the allocation's.
            let ptr = unsafe { ARENA.alloc(layout) };
            assert!(!ptr.is_null() && (ptr as usize).is_multiple_of(layout.align()));
            // SAFETY: the bytes are the allocation's.
            unsafe { ptr.write_bytes(round as u8, layout.size()) };
            kept.push((ptr, layout, round as u8));
            if round % 3 == 0 {
                let (ptr, layout, fill) = kept.swap_remove(round * 31 % kept.len());
                // SAFETY: it was allocated above with this layout.
                unsafe {
                    assert!((0..layout.size()).all(|i| *ptr.add(i) == fill));
                    ARENA.dealloc(ptr, layout);
                }
            }
        }
    }
}
