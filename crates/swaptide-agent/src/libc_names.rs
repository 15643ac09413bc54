//! Functions that the library has under names of libc's, for itself alone.
//!
//! The compiler and the standard library call `memcpy`, `close` and some others by name. In a
//! preloaded library such a name stands for what the program defines, if it defines it: a wrapper
//! of sockets has a `close`, a sanitizer that is linked into the program has a `memcpy`. An engine
//! thread would run code of the program then, which touches memory that only this thread can bring
//! back. So these names are defined here and hidden: the linker binds the library's own calls to
//! them, and no other object sees them.
//!
//! | names | what they do |
//! |---|---|
//! | `memcpy`, `memmove`, `memset`, `memcmp`, `bcmp`, `strlen` | jump to libc's own, which is made for the processor; to a plain one before [`find`], or where it cannot be told which is libc's |
//! | `__tls_get_addr` | jumps to the loader's, or to what [`use_own_blocks`] says. Named so, the library needs no glibc loader |
//! | `_Unwind_*` | nothing: a panic ends the process. Named so, the library needs no libgcc_s |
//! | `close`, `read`, `write`, `writev`, `munmap` | the bare system call. libc's `close` and others are points of cancellation: a hook that closed a file would end a thread of the program inside a function that is none |
//!
//! Owns: the addresses of libc's. Locks: none.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use linux_raw_sys::general::{__NR_close, __NR_munmap, __NR_read, __NR_write, __NR_writev};
use swaptide_sys::raw::syscall6;
use swaptide_sys::thread::TLS_BYTES;

use crate::real;

/// The target of a name.
type LibcName = AtomicPtr<c_void>;

static MEMCPY: LibcName = AtomicPtr::new(move_plainly as *mut c_void);
static MEMMOVE: LibcName = AtomicPtr::new(move_plainly as *mut c_void);
static MEMSET: LibcName = AtomicPtr::new(set_plainly as *mut c_void);
static MEMCMP: LibcName = AtomicPtr::new(compare_plainly as *mut c_void);
static BCMP: LibcName = AtomicPtr::new(compare_plainly as *mut c_void);
static STRLEN: LibcName = AtomicPtr::new(measure_plainly as *mut c_void);

/// Looks up libc's own. Called by the constructor.
pub(crate) fn find() {
    let targets: [(&CStr, &LibcName); 6] = [
        (c"memcpy", &MEMCPY),
        (c"memmove", &MEMMOVE),
        (c"memset", &MEMSET),
        (c"memcmp", &MEMCMP),
        (c"bcmp", &BCMP),
        (c"strlen", &STRLEN),
    ];
    for (name, target) in targets {
        if let Some(function) = real::libcs_own(name) {
            target.store(function, Relaxed);
        }
    }
}

/// The function that finds thread-local variables.
static TLS_LOOKUP: LibcName = AtomicPtr::new(find_lookup as *mut c_void);

/// From now on thread-local variables lie in the blocks that engine threads have, [`TLS_BYTES`]
/// below the thread pointer: there is no loader that knows of this library.
pub(crate) fn use_own_blocks() {
    TLS_LOOKUP.store(own_block as *mut c_void, Relaxed);
}

/// The place of a variable in an engine thread's block. It changes no register but the result's.
#[unsafe(naked)]
unsafe extern "C" fn own_block() {
    core::arch::naked_asm!(
        "mov rax, fs:[0]",
        "sub rax, {bytes}",
        "add rax, [rdi + 8]",
        "ret",
        bytes = const TLS_BYTES,
    )
}

/// The first call: looks the loader's function up, and goes there.
#[unsafe(naked)]
unsafe extern "C" fn find_lookup() {
    core::arch::naked_asm!(
        "push rdi",
        "call {loaders}",
        "pop rdi",
        "jmp rax",
        loaders = sym loaders_lookup,
    )
}

extern "C" fn loaders_lookup() -> *mut c_void {
    match real::TLS_GET_ADDR.get() {
        Some(lookup) => {
            let lookup = lookup as *mut c_void;
            TLS_LOOKUP.store(lookup, Relaxed);
            lookup
        }
        None => own_block as *mut c_void,
    }
}

/// In place of what a panic that unwinds would need.
#[unsafe(naked)]
unsafe extern "C" fn no_unwinding() {
    core::arch::naked_asm!("xor eax, eax", "ret")
}

/// Its caller could not continue.
#[unsafe(naked)]
unsafe extern "C" fn no_resumption() {
    core::arch::naked_asm!("ud2")
}

/// memmove(3).
#[unsafe(naked)]
unsafe extern "C" fn move_plainly() {
    core::arch::naked_asm!(
        "mov rax, rdi",
        "mov rcx, rdx",
        // Below zero, that is very large, where the target is in front of the source.
        "mov r8, rdi",
        "sub r8, rsi",
        "cmp r8, rdx",
        "jb 2f",
        "rep movsb",
        "ret",
        "2:",
        "lea rdi, [rdi + rdx - 1]",
        "lea rsi, [rsi + rdx - 1]",
        "std",
        "rep movsb",
        "cld",
        "ret",
    )
}

/// memset(3).
#[unsafe(naked)]
unsafe extern "C" fn set_plainly() {
    core::arch::naked_asm!(
        "mov r8, rdi",
        "mov eax, esi",
        "mov rcx, rdx",
        "rep stosb",
        "mov rax, r8",
        "ret",
    )
}

/// memcmp(3).
#[unsafe(naked)]
unsafe extern "C" fn compare_plainly() {
    core::arch::naked_asm!(
        "xor eax, eax",
        "xor ecx, ecx",
        // Words first; the bytes of the one that differs tell.
        "4:",
        "lea r8, [rcx + 8]",
        "cmp r8, rdx",
        "ja 2f",
        "mov r9, [rdi + rcx]",
        "cmp r9, [rsi + rcx]",
        "jne 2f",
        "mov rcx, r8",
        "jmp 4b",
        "2:",
        "cmp rcx, rdx",
        "je 3f",
        "movzx eax, byte ptr [rdi + rcx]",
        "movzx r8d, byte ptr [rsi + rcx]",
        "inc rcx",
        "sub eax, r8d",
        "je 2b",
        "3:",
        "ret",
    )
}

/// strlen(3).
#[unsafe(naked)]
unsafe extern "C" fn measure_plainly() {
    core::arch::naked_asm!(
        "xor eax, eax",
        "2:",
        "cmp byte ptr [rdi + rax], 0",
        "je 3f",
        "inc rax",
        "jmp 2b",
        "3:",
        "ret",
    )
}

/// Makes a system call with what the standard library passes.
///
/// # Safety
/// As for the call.
unsafe fn call<const N: usize>(number: u32, arguments: [usize; N]) -> isize {
    let mut words = [0; 6];
    words[..N].copy_from_slice(&arguments);
    // SAFETY: the caller's promise.
    real::libc_result(unsafe { syscall6(number, words) }) as isize
}

/// # Safety
/// As for close(2).
unsafe extern "C" fn close_file(fd: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { call(__NR_close, [fd as usize]) as c_int }
}

/// # Safety
/// As for read(2).
unsafe extern "C" fn read_file(fd: c_int, buf: *mut c_void, len: usize) -> isize {
    // SAFETY: the caller's promise.
    unsafe { call(__NR_read, [fd as usize, buf as usize, len]) }
}

/// # Safety
/// As for write(2).
unsafe extern "C" fn write_file(fd: c_int, buf: *const c_void, len: usize) -> isize {
    // SAFETY: the caller's promise.
    unsafe { call(__NR_write, [fd as usize, buf as usize, len]) }
}

/// # Safety
/// As for writev(2).
unsafe extern "C" fn write_vectors(fd: c_int, iov: *const c_void, count: c_int) -> isize {
    // SAFETY: the caller's promise.
    unsafe { call(__NR_writev, [fd as usize, iov as usize, count as usize]) }
}

/// # Safety
/// As for munmap(2).
unsafe extern "C" fn unmap(addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { call(__NR_munmap, [addr as usize, len]) as c_int }
}

/// Gives the library names of its own: a jump, to where a [`LibcName`] points or to a function.
#[cfg(not(test))]
macro_rules! hidden {
    (names $name:literal, jumps $to:literal) => {
        concat!(
            ".globl ",
            $name,
            "\n.hidden ",
            $name,
            "\n.type ",
            $name,
            ", @function\n",
            $name,
            ": jmp ",
            $to,
            "\n.size ",
            $name,
            ", . - ",
            $name,
        )
    };
}

#[cfg(not(test))]
core::arch::global_asm!(
    ".text",
    hidden!(names "memcpy", jumps "qword ptr [rip + {memcpy}]"),
    hidden!(names "memmove", jumps "qword ptr [rip + {memmove}]"),
    hidden!(names "memset", jumps "qword ptr [rip + {memset}]"),
    hidden!(names "memcmp", jumps "qword ptr [rip + {memcmp}]"),
    hidden!(names "bcmp", jumps "qword ptr [rip + {bcmp}]"),
    hidden!(names "strlen", jumps "qword ptr [rip + {strlen}]"),
    hidden!(names "close", jumps "{close}"),
    hidden!(names "read", jumps "{read}"),
    hidden!(names "write", jumps "{write}"),
    hidden!(names "writev", jumps "{writev}"),
    hidden!(names "munmap", jumps "{munmap}"),
    hidden!(names "__tls_get_addr", jumps "qword ptr [rip + {tls}]"),
    hidden!(names "_Unwind_Backtrace", jumps "{unwind}"),
    hidden!(names "_Unwind_DeleteException", jumps "{unwind}"),
    hidden!(names "_Unwind_GetCFA", jumps "{unwind}"),
    hidden!(names "_Unwind_GetDataRelBase", jumps "{unwind}"),
    hidden!(names "_Unwind_GetIP", jumps "{unwind}"),
    hidden!(names "_Unwind_GetIPInfo", jumps "{unwind}"),
    hidden!(names "_Unwind_GetLanguageSpecificData", jumps "{unwind}"),
    hidden!(names "_Unwind_GetRegionStart", jumps "{unwind}"),
    hidden!(names "_Unwind_GetTextRelBase", jumps "{unwind}"),
    hidden!(names "_Unwind_RaiseException", jumps "{unwind}"),
    hidden!(names "_Unwind_SetGR", jumps "{unwind}"),
    hidden!(names "_Unwind_SetIP", jumps "{unwind}"),
    hidden!(names "_Unwind_Resume", jumps "{resume}"),
    tls = sym TLS_LOOKUP,
    unwind = sym no_unwinding,
    resume = sym no_resumption,
    memcpy = sym MEMCPY,
    memmove = sym MEMMOVE,
    memset = sym MEMSET,
    memcmp = sym MEMCMP,
    bcmp = sym BCMP,
    strlen = sym STRLEN,
    close = sym close_file,
    read = sym read_file,
    write = sym write_file,
    writev = sym write_vectors,
    munmap = sym unmap,
);

#[cfg(test)]
mod tests {
    use super::*;

    type Move = unsafe extern "C" fn(*mut u8, *const u8, usize) -> *mut u8;
    type Set = unsafe extern "C" fn(*mut u8, c_int, usize) -> *mut u8;
    type Compare = unsafe extern "C" fn(*const u8, *const u8, usize) -> c_int;
    type Measure = unsafe extern "C" fn(*const u8) -> usize;

    #[test]
    fn the_plain_ones_do_what_libcs_do() {
        // SAFETY: these are the functions' types.
        let (mov, set, compare, measure) = unsafe {
            (
                std::mem::transmute::<*const (), Move>(move_plainly as *const ()),
                std::mem::transmute::<*const (), Set>(set_plainly as *const ()),
                std::mem::transmute::<*const (), Compare>(compare_plainly as *const ()),
                std::mem::transmute::<*const (), Measure>(measure_plainly as *const ()),
            )
        };
        let start: Vec<u8> = (0..64).collect();
        for len in 0..24 {
            for (from, to) in [(0, 30), (30, 0), (4, 5), (5, 4), (4, 12), (12, 4), (7, 7)] {
                let mut bytes = start.clone();
                let at = bytes.as_mut_ptr();
                // SAFETY: both ranges are within the vector.
                assert_eq!(unsafe { mov(at.add(to), at.add(from), len) }, unsafe { at.add(to) });
                let mut expected = start.clone();
                expected.copy_within(from..from + len, to);
                assert_eq!(bytes, expected, "{len} bytes from {from} to {to}");
            }
            let mut bytes = start.clone();
            // SAFETY: within the vector.
            unsafe { set(bytes.as_mut_ptr().add(3), 0x1ff, len) };
            assert_eq!(bytes[3..3 + len], vec![0xff; len]);
            assert_eq!((&bytes[..3], bytes[3 + len]), (&start[..3], 3 + len as u8));
        }
        // Longer ones, as what is compared in words at a time would be: one byte is greater.
        for (len, at) in
            [8, 16, 31, 64, 200].into_iter().flat_map(|n| (0..n).map(move |at| (n, at)))
        {
            let mut other = vec![0x80u8; len];
            let same = other.clone();
            other[at] = 0x81;
            // What follows must not matter.
            other[at + 1..].fill(0);
            // SAFETY: as many bytes as the vectors have.
            unsafe {
                assert!(compare(same.as_ptr(), other.as_ptr(), len) < 0, "{len} bytes, {at}");
                assert!(compare(other.as_ptr(), same.as_ptr(), len) > 0, "{len} bytes, {at}");
                assert_eq!(compare(same.as_ptr(), other.as_ptr(), at), 0, "{at} bytes");
            }
        }
        // SAFETY: as many bytes as said; the last one is a NUL.
        unsafe {
            assert_eq!(compare(b"abc".as_ptr(), b"abx".as_ptr(), 2), 0);
            assert!(compare(b"abc".as_ptr(), b"abx".as_ptr(), 3) < 0);
            assert!(compare(b"ab\xff".as_ptr(), b"abx".as_ptr(), 3) > 0);
            assert_eq!(compare(b"a".as_ptr(), b"b".as_ptr(), 0), 0);
            assert_eq!((measure(c"".as_ptr().cast()), measure(c"four".as_ptr().cast())), (0, 4));
        }
    }

    #[test]
    fn libcs_own_are_found() {
        find();
        let plain = [move_plainly as *mut c_void, set_plainly as *mut c_void];
        assert!([&MEMCPY, &MEMMOVE, &MEMSET].iter().all(|at| !plain.contains(&at.load(Relaxed))));
    }
}
