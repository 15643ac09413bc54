//! The end of an engine's last thread in a program that lives on: nothing of the engine is left
//! behind but one page of code, for a thread cannot unmap what it runs.
//!
//! Owns: that code. Locks: none; nothing is allocated.

use linux_raw_sys::general as k;
use rustix::io::Errno;

use crate::mem::{Advice, advise, own_ranges, unmap};
use crate::page::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::raw::syscall;

/// What the page that stays behind begins with. A supervisor that meets such a page unmaps it: no
/// thread runs it any more.
pub const LEFT_CODE: [u8; 48] = *b"\
    \xb8\x0b\x00\x00\x00\
    \x0f\x05\
    \x4c\x89\xe7\
    \x4c\x89\xee\
    \xb8\x0b\x00\x00\x00\
    \x0f\x05\
    \x31\xff\
    \xb8\x3c\x00\x00\x00\
    \x0f\x05\
    \x0f\x0b\
    swaptide left\0\0\0\0";

/// Ranges that the calling thread can unmap at most; more stay.
const MAX_RANGES: usize = 4096;

/// The page that stays, with its code.
fn map_code() -> Result<VirtRange, Errno> {
    let flags = k::MAP_PRIVATE | k::MAP_ANONYMOUS;
    let (none, access) = (-1i32, k::PROT_READ | k::PROT_WRITE);
    // SAFETY: the kernel chooses a free address.
    let at = unsafe { syscall!(k::__NR_mmap, 0usize, PAGE_SIZE, access, flags, none, 0usize) }?;
    let page = VirtRange::from_len(VirtAddr(at), PAGE_SIZE);
    // SAFETY: the page was mapped above, for this.
    unsafe {
        core::ptr::copy_nonoverlapping(LEFT_CODE.as_ptr(), at as *mut u8, LEFT_CODE.len());
        let access = k::PROT_READ | k::PROT_EXEC;
        // A child has nothing to leave behind.
        let _ = advise(page, Advice::DontFork);
        match syscall!(k::__NR_mprotect, at, PAGE_SIZE, access) {
            Ok(_) => Ok(page),
            Err(errno) => {
                let _ = unmap(page);
                Err(errno)
            }
        }
    }
}

/// Unmaps everything of the engine's, the library at `image` last, and ends the calling thread.
///
/// # Safety
/// The calling thread is an engine thread and the only one that runs code of the library or uses
/// memory of the engine's, now and later. Its stack and the library are in the registry of own
/// mappings.
///
/// # Errors
/// When there is no memory for the code of the end; nothing was unmapped then.
pub unsafe fn unmap_all_and_exit(image: VirtRange) -> Result<core::convert::Infallible, Errno> {
    let code = map_code()?;
    let mut ranges = [VirtRange { start: VirtAddr(0), end: VirtAddr(0) }; MAX_RANGES];
    let mut count = 0;
    own_ranges(|range| {
        if let Some(place) = ranges.get_mut(count) {
            *place = range;
            count += 1;
        }
    });
    let here = VirtAddr((&raw const count) as usize);
    let mut stack = VirtRange { start: VirtAddr(0), end: VirtAddr(0) };
    for range in &ranges[..count] {
        if range.start <= here && here < range.end {
            stack = *range;
        } else if *range != image {
            // SAFETY: the caller's promise.
            let _ = unsafe { unmap(*range) };
        }
    }
    // SAFETY: no memory is passed. The kernel would write to the library's words as the thread
    // ends, where the program may have mapped something by then.
    let _ = unsafe { syscall!(k::__NR_set_tid_address, 0usize) };
    // SAFETY: the code unmaps the two ranges, of which nothing is used any more, and ends the
    // thread; it uses no stack.
    unsafe {
        core::arch::asm!(
            "jmp rdx",
            in("r12") stack.start.0,
            in("r13") stack.len(),
            in("rdx") code.start.0,
            in("rdi") image.start.0,
            in("rsi") image.len(),
            options(noreturn, nostack),
        )
    }
}
