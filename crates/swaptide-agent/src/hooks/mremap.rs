//! mremap over what swaptide has split.
//!
//! The kernel joins neighbouring anonymous mappings of a program, and `mremap` takes only one
//! mapping. Management keeps a mapping apart from a newer neighbour that is not managed yet, and
//! once both have pages of their own the kernel never joins them again. So a call that would
//! succeed without swaptide is refused with `EFAULT`. It is then carried out piece by piece: the
//! last piece grows in place, or all pieces move to a place that was reserved for them.
//!
//! Since Linux 6.17 a call that moves several mappings to a fixed place takes one after the other,
//! and refuses those that are managed. Where one that is not managed comes first, that has moved
//! when the call fails. So there the pieces are looked for before the call is made; but never for a
//! call that the kernel refuses for its arguments, since what is carried out here gives up what is
//! at the target first.
//!
//! There a call may also span mappings of several kinds, which it takes one after the other as the
//! kernel does.
//!
//! Under a filter of the program's the list of mappings cannot be read. There the pieces of a
//! mapping that grows are found by calls of `mremap` that change nothing.
//!
//! A move that leaves its old place mapped (`MREMAP_DONTUNMAP`) is carried out in the same way.
//!
//! Locks: none. Nothing is allocated; `/proc/self/maps` is open for a moment in the program's own
//! table.

use std::ffi::c_int;

use linux_raw_sys::general as k;
use swaptide_engine::requests::FaultRequest;
use swaptide_sys::maps::MapsFile;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::raw::syscall6;

use crate::process::has_threads;
use crate::shmem;

const SYS_MMAP: u32 = k::__NR_mmap;
const SYS_MUNMAP: u32 = k::__NR_munmap;
pub(crate) const SYS_MREMAP: u32 = k::__NR_mremap;
const EFAULT: isize = -(linux_raw_sys::errno::EFAULT as isize);
const MREMAP_MAYMOVE: usize = k::MREMAP_MAYMOVE as usize;
const MREMAP_FIXED: usize = k::MREMAP_FIXED as usize;
const MREMAP_DONTUNMAP: usize = k::MREMAP_DONTUNMAP as usize;
const ALL_FLAGS: usize = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
const PROT_NONE: usize = k::PROT_NONE as usize;
const MAP_RESERVE: usize = (k::MAP_PRIVATE | k::MAP_ANONYMOUS | k::MAP_NORESERVE) as usize;
const MAP_FIXED: usize = k::MAP_FIXED as usize;
const MAP_FIXED_NOREPLACE: usize = k::MAP_FIXED_NOREPLACE as usize;
/// All addresses of a program with four levels of page tables. A mapping of this size does not
/// fit in place: it ends behind the last address, or meets the stack. For more the kernel answers
/// before it looks at what is to grow. Fewer can be free: in a program at fixed addresses nearly
/// all are, and memory with `MAP_NORESERVE` is refused for nothing else.
const NEVER_FITS_BYTES: usize = (1 << 47) - PAGE_SIZE;
/// Most pieces of one call.
const MAX_PIECES: usize = 64;
/// Times a call is tried that is refused although there is no reason to be seen.
const MAX_TRIES: usize = 64;

/// mremap(2) as the program meant it. Returns the raw result of the system call.
pub(crate) fn remap(old: usize, old_len: usize, new_len: usize, flags: c_int, to: usize) -> isize {
    const ENOMEM: isize = -(linux_raw_sys::errno::ENOMEM as isize);
    shmem::around(old, old_len, new_len, flags, || remap_private(old, old_len, new_len, flags, to))
        .unwrap_or(ENOMEM)
}

fn remap_private(old: usize, old_len: usize, new_len: usize, flags: c_int, to: usize) -> isize {
    // SAFETY: the arguments are the program's own; whatever the call does is what the program asked
    // for.
    let call = |a: [usize; 5]| unsafe { syscall6(SYS_MREMAP, [a[0], a[1], a[2], a[3], a[4], 0]) };
    if crate::seccomp::is() {
        let mut word = call([old, old_len, new_len, flags as usize, to]);
        if word == EFAULT {
            word = grow_confined(old, old_len, new_len, flags as usize, call);
        }
        if !(-4095..0).contains(&word) && (word as usize != old || new_len > old_len) {
            wait_for_events(word as usize);
        }
        return word;
    }
    let flags = flags as usize;
    let range =
        VirtRange { start: VirtAddr(old), end: VirtAddr(old.saturating_add(old_len)).page_up() };
    let mut pieces = [VirtRange { start: VirtAddr(0), end: VirtAddr(0) }; MAX_PIECES];
    let len = VirtAddr(new_len).page_up().0;
    let may_tear = flags & !MREMAP_DONTUNMAP == MREMAP_MAYMOVE | MREMAP_FIXED
        && is_moved_whole(range, len, to)
        && crate::process::engine().is_some();
    let of_any_kind = may_tear && kernel_moves_several();
    let found = may_tear.then(|| pieces_of(range, &mut pieces, of_any_kind)).flatten();
    let mut word = match found {
        Some(count @ 2..) => in_pieces(&pieces[..count], len, flags, to, call),
        _ => call([old, old_len, new_len, flags, to]),
    };
    for _ in 0..MAX_TRIES {
        if word != EFAULT
            || crate::process::engine().is_none()
            || flags & !ALL_FLAGS != 0
            || old_len == 0
        {
            break;
        }
        // Management joins and splits mappings while they are looked at: what was refused for two
        // may be one by now, and the other way round.
        word = match pieces_of(range, &mut pieces, false) {
            None => break,
            Some(1) => call([old, old_len, new_len, flags, to]),
            Some(count) => in_pieces(&pieces[..count], len, flags, to, call),
        };
    }
    if !(-4095..0).contains(&word) && (word as usize != old || new_len > old_len) {
        wait_for_events(word as usize);
    }
    word
}

/// A growth that the kernel has refused with `EFAULT`, under a filter of the program's: the list of
/// mappings cannot be read there, so the pieces are found by the call itself. Other changes of
/// several mappings stay refused.
fn grow_confined(
    old: usize,
    old_len: usize,
    new_len: usize,
    flags: usize,
    call: impl Fn([usize; 5]) -> isize,
) -> isize {
    let aligned = old.is_multiple_of(PAGE_SIZE);
    let (len, new_len) = (VirtAddr(old_len).page_up().0, VirtAddr(new_len).page_up().0);
    let end = old.checked_add(len);
    let (true, Some(end)) = (aligned && len != 0 && len < new_len, end) else { return EFAULT };
    if flags & !MREMAP_MAYMOVE != 0 || crate::process::engine_without_calls().is_none() {
        return EFAULT;
    }
    let mut pieces = [VirtRange { start: VirtAddr(0), end: VirtAddr(0) }; MAX_PIECES];
    let (mut at, mut count) = (old, 0);
    loop {
        let rest = end - at;
        // Of the whole range it is known that it is more than one piece.
        let word = if count == 0 { EFAULT } else { call([at, rest, rest + new_len - len, 0, 0]) };
        if !(-4095..0).contains(&word) {
            return old as isize;
        }
        let piece = if word == EFAULT { first_piece(at, rest, &call) } else { rest };
        let Some(place) = pieces.get_mut(count).filter(|_| piece != 0) else { return EFAULT };
        *place = VirtRange { start: VirtAddr(at), end: VirtAddr(at + piece) };
        count += 1;
        at += piece;
        if at == end {
            return match flags {
                0 => word,
                _ => in_pieces(&pieces[..count], new_len, flags, 0, &call),
            };
        }
    }
}

/// Bytes of the mapping at `at`, in a range of more than one, or with holes. A growth that fits
/// nowhere changes nothing: the kernel answers `EFAULT` where what is to grow is not one mapping,
/// and something else where it is.
fn first_piece(at: usize, range: usize, call: impl Fn([usize; 5]) -> isize) -> usize {
    let (mut one, mut several) = (0, range.min(NEVER_FITS_BYTES) / PAGE_SIZE);
    while one + 1 < several {
        let pages = one + (several - one) / 2;
        let word = call([at, pages * PAGE_SIZE, NEVER_FITS_BYTES, 0, 0]);
        if word == EFAULT {
            several = pages;
            continue;
        }
        one = pages;
        if word >= 0 {
            // Five levels of page tables, and a mapping above the stack.
            call([at, NEVER_FITS_BYTES, pages * PAGE_SIZE, 0, 0]);
        }
    }
    one * PAGE_SIZE
}

/// True if a fixed move of a range to `len` bytes at `to` leaves its size as it is and has
/// arguments that the kernel takes.
fn is_moved_whole(range: VirtRange, len: usize, to: usize) -> bool {
    let aligned = (range.start.0 | to).is_multiple_of(PAGE_SIZE);
    let apart = to.checked_add(len).is_some_and(|end| end <= range.start.0 || range.end.0 <= to);
    len == range.len() && aligned && apart
}

/// The calling thread has moved a mapping to `at`, or grown the one there: it continues when the
/// engine knows. A program with one thread need not wait: its changes are told in their order.
pub(crate) fn wait_for_events(at: usize) {
    if crate::seccomp::is() {
        if let Some(engine) = crate::process::engine_without_calls().filter(|_| has_threads()) {
            engine.handler_requests.submit_by_fault(
                FaultRequest::Fence,
                VirtRange { start: VirtAddr(at), end: VirtAddr(at) },
            );
        }
        return;
    }
    if let Some(engine) = crate::process::engine().filter(|_| has_threads()) {
        engine.handler_requests.fence(VirtAddr(at), false);
    }
}

/// True if a caller would have to wait in [`wait_for_events`].
pub(crate) fn matter() -> bool {
    let managed = if crate::seccomp::is() {
        crate::process::engine_without_calls()
    } else {
        crate::process::engine()
    };
    managed.is_some() && has_threads()
}

/// True if the kernel moves several mappings to a fixed place in one call (Linux 6.17).
fn kernel_moves_several() -> bool {
    swaptide_sys::process::kernel_version() >= Some((6, 17))
}

/// The mappings of a range that would be one without swaptide: neighbours of one kind, or any
/// neighbours. `None` where they are not.
fn pieces_of(
    range: VirtRange,
    pieces: &mut [VirtRange; MAX_PIECES],
    of_any_kind: bool,
) -> Option<usize> {
    let maps = MapsFile::open_high().ok()?;
    let mut count = 0;
    let mut at = range.start;
    let mut kind = None;
    while at < range.end {
        let info = maps.vma_at(at).ok()??;
        let vma = info.vma();
        let this = (vma.read, vma.write, vma.exec);
        let is_one = vma.is_private_anon() && *kind.get_or_insert(this) == this;
        if !is_one && !of_any_kind || vma.range.start > at {
            return None;
        }
        *pieces.get_mut(count)? = VirtRange { start: at, end: vma.range.end.min(range.end) };
        count += 1;
        at = vma.range.end;
    }
    Some(count)
}

fn in_pieces(
    pieces: &[VirtRange],
    new_len: usize,
    flags: usize,
    to: usize,
    call: impl Fn([usize; 5]) -> isize,
) -> isize {
    let (first, last) = (pieces[0], pieces[pieces.len() - 1]);
    let old = first.start.0;
    let old_len = last.end.0 - old;
    let keeps_old = flags & MREMAP_DONTUNMAP;
    if flags & (MREMAP_FIXED | MREMAP_DONTUNMAP) == 0 {
        if new_len <= old_len {
            return shrink(old, new_len, old_len);
        }
        let word = call([last.start.0, last.len(), last.len() + new_len - old_len, 0, 0]);
        if word >= 0 {
            return old as isize;
        }
        if flags & MREMAP_MAYMOVE == 0 {
            return word;
        }
    }
    // Reserved, so that no other mapping comes in between the pieces.
    let place = if flags & MREMAP_FIXED != 0 { [to, MAP_FIXED] } else { [0, 0] };
    // SAFETY: without MAP_FIXED the kernel chooses free addresses; with it the program has named
    // them to be mapped over.
    let target = unsafe {
        syscall6(SYS_MMAP, [place[0], new_len, PROT_NONE, MAP_RESERVE | place[1], usize::MAX, 0])
    };
    if target < 0 {
        return target;
    }
    let target = target as usize;
    for (at, piece) in pieces.iter().enumerate() {
        let offset = piece.start.0 - old;
        if offset >= new_len {
            break;
        }
        let is_last = at + 1 == pieces.len() || piece.end.0 - old >= new_len;
        let len = if is_last { new_len - offset } else { piece.len() };
        let moves = MREMAP_MAYMOVE | MREMAP_FIXED | keeps_old;
        let word = call([piece.start.0, piece.len(), len, moves, target + offset]);
        wait_for_events(target + offset);
        if word < 0 {
            for moved in &pieces[..at] {
                // What cannot go back stays where it is: the program is told of an error and its
                // data is nowhere else. Another thread may have got these addresses meanwhile.
                if keeps_old == 0 && !reserve(*moved) {
                    continue;
                }
                let _ = call([
                    target + moved.start.0 - old,
                    moved.len(),
                    moved.len(),
                    MREMAP_MAYMOVE | MREMAP_FIXED,
                    moved.start.0,
                ]);
            }
            // The rest of the reservation, which nothing came into; what is before it may be
            // another's by now.
            let rest = offset + len;
            if rest < new_len {
                // SAFETY: it was mapped above, and the program knows none of its addresses.
                unsafe { syscall6(SYS_MUNMAP, [target + rest, new_len - rest, 0, 0, 0, 0]) };
            }
            return word;
        }
    }
    if new_len < old_len {
        let word = shrink(old, new_len, old_len);
        if word < 0 {
            return word;
        }
    }
    target as isize
}

/// Takes a range for the caller if nothing is mapped there.
fn reserve(range: VirtRange) -> bool {
    let flags = MAP_RESERVE | MAP_FIXED_NOREPLACE;
    let start = range.start.0;
    // SAFETY: nothing is mapped over.
    let word = unsafe { syscall6(SYS_MMAP, [start, range.len(), PROT_NONE, flags, usize::MAX, 0]) };
    word == start as isize
}

/// Gives up what lies behind the first `new_len` bytes.
fn shrink(old: usize, new_len: usize, old_len: usize) -> isize {
    if new_len == old_len {
        return old as isize;
    }
    // SAFETY: the program gives this part up.
    match unsafe { syscall6(SYS_MUNMAP, [old + new_len, old_len - new_len, 0, 0, 0, 0]) } {
        word if word < 0 => word,
        _ => old as isize,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP_ANON: usize = (k::MAP_PRIVATE | k::MAP_ANONYMOUS) as usize;
    const READ_WRITE: usize = (k::PROT_READ | k::PROT_WRITE) as usize;

    /// Maps pages and writes a byte to the first.
    fn map(at: usize, pages: usize, byte: u8) -> usize {
        let (len, flags) = (pages * PAGE_SIZE, MAP_ANON | MAP_FIXED_NOREPLACE);
        // SAFETY: nothing is mapped over.
        let got = unsafe { syscall6(SYS_MMAP, [at, len, READ_WRITE, flags, usize::MAX, 0]) };
        assert_eq!(got, at as isize);
        // SAFETY: mapped above.
        unsafe { (at as *mut u8).write(byte) };
        at
    }

    fn byte(at: usize) -> u8 {
        // SAFETY: callers name what is mapped, or the test ends by SIGSEGV.
        unsafe { (at as *const u8).read_volatile() }
    }

    #[test]
    fn pieces_go_back_but_not_over_others() {
        let kernel = |a: [usize; 5]| {
            // SAFETY: the ranges are this test's own.
            unsafe { syscall6(SYS_MREMAP, [a[0], a[1], a[2], a[3], a[4], 0]) }
        };
        for is_taken in [false, true] {
            // Where the kernel puts nothing by itself.
            let at = map((64 << 30) + usize::from(is_taken) * (1 << 30), 2, 7);
            let pieces = [at, at + PAGE_SIZE].map(|start| VirtRange {
                start: VirtAddr(start),
                end: VirtAddr(start + PAGE_SIZE),
            });
            let moved_to = std::cell::Cell::new(0);
            let call = |a: [usize; 5]| {
                if a[0] == at {
                    moved_to.set(a[4]);
                    return kernel(a);
                }
                if a[0] != at + PAGE_SIZE {
                    return kernel(a);
                }
                // It does not grow in place, nor does it move.
                if is_taken && a[3] != 0 {
                    map(at, 1, 9);
                }
                -(linux_raw_sys::errno::ENOMEM as isize)
            };
            let flags = MREMAP_MAYMOVE;
            assert!(in_pieces(&pieces, 4 * PAGE_SIZE, flags, 0, call) < 0);
            if is_taken {
                assert_eq!(byte(at), 9, "what another thread has mapped");
                assert_eq!(byte(moved_to.get()), 7, "the piece is where it was moved to");
            } else {
                assert_eq!(byte(at), 7);
            }
        }
    }

    #[test]
    fn only_whole_valid_moves_are_accepted() {
        let range = VirtRange { start: VirtAddr(0x10_0000), end: VirtAddr(0x11_0000) };
        let len = range.len();
        for to in [0xf_0000, 0x11_0000, 0x40_0000] {
            assert!(is_moved_whole(range, len, to), "{to:x}");
        }
        // Over itself, in part or whole; not at a page; past the end of addresses.
        for to in [0xf_1000, 0x10_0000, 0x10_1000, 0x10_f000, 0x40_0001, usize::MAX - 0xfff] {
            assert!(!is_moved_whole(range, len, to), "{to:x}");
        }
        assert!(!is_moved_whole(range, len + PAGE_SIZE, 0x40_0000), "it grows");
        let odd = VirtRange { start: VirtAddr(0x10_0001), end: VirtAddr(0x11_0000) };
        assert!(!is_moved_whole(odd, odd.len(), 0x40_0000));
    }
}
