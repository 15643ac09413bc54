//! Reads of memory that may not be there.
//!
//! A system call answers `EFAULT` to a bad address. A hook that read the program's arguments itself
//! would end the program with a signal instead. So hooks read them by the kernel.
//!
//! Owns: nothing. Locks: none; nothing is allocated.

use std::ffi::c_char;

use swaptide_sys::page::PAGE_SIZE;
use swaptide_sys::raw::syscall6;
use swaptide_sys::thread::gettid;

use crate::seccomp;

const SYS_PROCESS_VM_READV: u32 = linux_raw_sys::general::__NR_process_vm_readv;
/// Ranges of one call: they stand on the program's stack, which may be a short one.
const MAX_RANGES: usize = 16;

/// Copies memory of this process from `addr` on. False if some of it is not there, or may not be
/// read in this way.
pub(crate) fn read(addr: usize, buf: &mut [u8]) -> bool {
    read_each(buf, &[[addr, buf.len()]]) == Some(buf.len())
}

/// `N` words from `addr` on, an argument of a system call that the program is about to make; `None`
/// where they cannot be read. Under a filter of system calls, which may forbid to ask, they are
/// read as they are.
pub(crate) fn read_words<const N: usize>(addr: usize) -> Option<[usize; N]> {
    if addr == 0 {
        return None;
    }
    if seccomp::is() {
        // SAFETY: the program's argument, which the kernel is about to read as well.
        return Some(unsafe { (addr as *const [usize; N]).read_unaligned() });
    }
    let mut words = [0usize; N];
    read(addr, bytes_of(&mut words)).then_some(words)
}

/// Words as the bytes that they are made of.
pub(crate) fn bytes_of<T: Word>(words: &mut [T]) -> &mut [u8] {
    // SAFETY: any bytes are words.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), size_of_val(words)) }
}

/// A type without padding of which any bytes are a value.
///
/// # Safety
/// The type is as said.
pub unsafe trait Word {}

// SAFETY: an integer.
unsafe impl Word for usize {}

/// Copies ranges (address, bytes) one behind the other. The bytes that were copied; `None` where
/// the kernel does not do this for the process at all.
fn read_each(buf: &mut [u8], ranges: &[[usize; 2]]) -> Option<usize> {
    const EFAULT: isize = -(linux_raw_sys::errno::EFAULT as isize);
    debug_assert!(ranges.iter().map(|range| range[1]).sum::<usize>() <= buf.len());
    let local = [buf.as_mut_ptr() as usize, buf.len()];
    // By this thread's number: the process's is that of its first thread, which has no memory any
    // more once it has ended.
    let a = [
        gettid().0 as usize,
        local.as_ptr() as usize,
        1,
        ranges.as_ptr() as usize,
        ranges.len(),
        0,
    ];
    // SAFETY: the kernel writes to the buffer and checks the other addresses.
    match unsafe { syscall6(SYS_PROCESS_VM_READV, a) } as isize {
        EFAULT => Some(0),
        word => usize::try_from(word).ok(),
    }
}

/// True if each string of a null-terminated array begins in memory that can be read, and the array
/// lies there. True where it cannot be asked: under a filter of system calls, say.
pub(crate) fn are_strings(array: *const *const c_char) -> bool {
    if array.is_null() || !array.is_aligned() || seccomp::is() {
        return true;
    }
    let mut at = array as usize;
    loop {
        let mut words = [0usize; MAX_RANGES];
        // What follows a page may not be there.
        let within = (PAGE_SIZE - at % PAGE_SIZE).min(size_of_val(&words));
        let Some(copied) = read_each(bytes_of(&mut words), &[[at, within]]) else { return true };
        let copied = copied / size_of::<usize>();
        let end = words[..copied].iter().position(|word| *word == 0);
        let strings = &words[..end.unwrap_or(copied)];
        let mut first_bytes = [[0; 2]; MAX_RANGES];
        first_bytes.iter_mut().zip(strings).for_each(|(range, string)| *range = [*string, 1]);
        let found = if strings.is_empty() {
            Some(0)
        } else {
            read_each(&mut [0; MAX_RANGES], &first_bytes[..strings.len()])
        };
        match found {
            Some(found) if found < strings.len() => return false,
            _ if end.is_some() => return true,
            _ if copied == 0 => return false,
            _ => at += copied * size_of::<usize>(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_not_read() {
        assert!(!read(4096, &mut [0; 8]));
        let mut copy = [0u8; 4];
        assert!(read(b"text".as_ptr() as usize, &mut copy));
        assert_eq!(&copy, b"text");
    }

    #[test]
    fn an_array_with_a_bad_string_is_found() {
        let good = c"A=1".as_ptr();
        let bad = std::ptr::without_provenance::<c_char>(64);
        let end = std::ptr::null();
        assert!(are_strings([end].as_ptr()));
        assert!(are_strings(std::ptr::null()));
        assert!(!are_strings(std::ptr::without_provenance(8)));
        for length in [1, 15, 16, 17, 63, 64, 65, 1000] {
            let mut array = vec![good; length];
            array.push(end);
            assert!(are_strings(array.as_ptr()), "{length}");
            array[length - 1] = bad;
            assert!(!are_strings(array.as_ptr()), "{length}");
        }
    }
}
