//! System calls by inline assembly: the floor everything else stands on.
//!
//! A result is the kernel's own word: minus the error number, or the value. No `errno`, no
//! cancellation point, no thread-local is touched, so these work on a thread libc knows nothing of.

use rustix::io::Errno;

/// Makes one system call with six arguments (pass zero for those the call does not have).
///
/// # Safety
/// The caller answers for everything the call does to memory, descriptors and the process.
#[inline]
pub unsafe fn syscall6(nr: u32, a: [usize; 6]) -> isize {
    let ret: isize;
    // SAFETY: the kernel's calling convention: it clobbers rcx and r11 only. The caller
    // answers for all effects of the call ("Safety" above).
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") nr as usize as isize => ret,
            in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
            in("r10") a[3], in("r8") a[4], in("r9") a[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    ret
}

/// Turns the raw result of a system call into a value or an error.
#[inline]
pub fn check(ret: isize) -> Result<usize, Errno> {
    if (-4095..0).contains(&ret) {
        Err(Errno::from_raw_os_error(-ret as i32))
    } else {
        Ok(ret as usize)
    }
}

/// `syscall!(NR, a, b, ...)`: a system call with up to six `usize` arguments, as
/// `Result<usize, Errno>`. It is an unsafe operation: the caller says why it is sound there.
macro_rules! syscall {
    ($nr:expr $(, $a:expr)* $(,)?) => {
        $crate::raw::check($crate::raw::syscall6($nr, $crate::raw::pad(&[$($a as usize),*])))
    };
}
pub(crate) use syscall;

/// Pads an argument list with zeros to the six the assembly takes.
#[inline(always)]
pub(crate) fn pad<const N: usize>(args: &[usize; N]) -> [usize; 6] {
    const { assert!(N <= 6) };
    let mut out = [0; 6];
    let mut i = 0;
    while i < N {
        out[i] = args[i];
        i += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use linux_raw_sys::general::{__NR_close, __NR_getppid};

    #[test]
    fn values_and_errors_come_back() {
        // SAFETY: neither call touches memory; descriptor 1<<20 is open in no test process.
        let (parent, closed) =
            unsafe { (syscall!(__NR_getppid), syscall!(__NR_close, 1usize << 20)) };
        assert!(parent.unwrap() > 0);
        assert_eq!(closed, Err(Errno::BADF));
    }
}
