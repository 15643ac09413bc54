//! The monotonic clock, and waiting by it.

use core::time::Duration;

use linux_raw_sys::general as k;
use rustix::io::Errno;

use crate::raw::syscall;

/// A moment of the monotonic clock, in nanoseconds.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Time since `earlier`; zero if that is later.
    pub fn since(self, earlier: Nanos) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Sleeps; signals do not cut it short.
pub fn sleep(time: Duration) {
    let mut left = k::__kernel_timespec {
        tv_sec: time.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: time.subsec_nanos().into(),
    };
    let left_ptr = (&raw mut left) as usize;
    // SAFETY: one struct serves as request and remainder; the kernel reads the first before it
    // writes the second.
    while unsafe { syscall!(k::__NR_nanosleep, left_ptr, left_ptr) } == Err(Errno::INTR) {}
}

/// The monotonic clock.
#[inline]
pub fn now() -> Nanos {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}
