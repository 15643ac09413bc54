//! Advice on many ranges at a time.
//!
//! Owns nothing. Locks: none. Nothing is allocated.

use linux_raw_sys::general as k;
use rustix::fd::{AsFd, AsRawFd};
use rustix::io::Errno;

use crate::mem::{Advice, advise};
use crate::page::VirtRange;
use crate::process::pidfd_open;
use crate::raw::syscall;
use crate::thread::getpid;

/// Ranges that [`advise_each`] takes at most.
pub const MAX_ADVISED: usize = 256;
/// Fewer are not worth a descriptor.
const MIN_TOGETHER: usize = 64;

/// Gives `advice` on each of some ranges, at most [`MAX_ADVISED`] of them: in one call where the
/// kernel takes such advice on many of one's own (Linux 6.13). Calls `failed` with the number of
/// each range for which it was refused, and why.
///
/// # Safety
/// As for [`advise`], for each range.
pub unsafe fn advise_each(
    ranges: &[VirtRange],
    advice: Advice,
    mut failed: impl FnMut(usize, Errno),
) {
    let together = (MIN_TOGETHER..=MAX_ADVISED).contains(&ranges.len());
    let mut this = if together { pidfd_open(getpid().0).ok() } else { None };
    let mut vectors = [[0usize; 2]; MAX_ADVISED];
    for (vector, range) in vectors.iter_mut().zip(ranges) {
        *vector = [range.start.0, range.len()];
    }
    let mut at = 0;
    while at < ranges.len() {
        let mut was_refused = false;
        if let Some(this) = &this {
            let rest = &vectors[at..ranges.len()];
            // SAFETY: as many vectors as said lie there; for the ranges the caller answers.
            let done = unsafe {
                syscall!(
                    k::__NR_process_madvise,
                    this.as_fd().as_raw_fd(),
                    rest.as_ptr() as usize,
                    rest.len(),
                    advice.number(),
                    0usize
                )
            };
            was_refused = done.is_err();
            let mut done = done.unwrap_or(0);
            while at < ranges.len() && done >= ranges[at].len() {
                done -= ranges[at].len();
                at += 1;
            }
        }
        // The first that was not done, if there is one.
        let Some(range) = ranges.get(at) else { return };
        // SAFETY: the caller's promise.
        match unsafe { advise(*range, advice) } {
            // It is not for the range that the kernel has refused: it would refuse all others.
            Ok(()) if was_refused => this = None,
            Ok(()) => {}
            Err(errno) => failed(at, errno),
        }
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maps::for_each_advised_vma;
    use crate::mem::Mapping;
    use crate::page::{PAGE_SIZE, VirtAddr};
    use alloc::vec::Vec;

    #[test]
    fn each_range_is_advised_and_each_that_is_not_there_is_told() {
        let area = Mapping::reserve(4 * MAX_ADVISED * PAGE_SIZE).expect("memory");
        let start = area.range().start;
        let every = |step: usize| -> Vec<VirtRange> {
            (0..MAX_ADVISED)
                .map(|n| VirtRange::from_len(start.offset(n * step * PAGE_SIZE), PAGE_SIZE))
                .collect()
        };
        let ranges = every(4);
        let marked = || {
            let mut pages = 0;
            for_each_advised_vma(&mut [0; 4096], |range, advised| {
                let is_ours = start <= range.start && range.end <= area.range().end;
                pages += if is_ours && advised.random { range.len() / PAGE_SIZE } else { 0 };
                true
            })
            .expect("smaps");
            pages
        };
        for few in [5, MAX_ADVISED] {
            // SAFETY: the advice changes no data.
            unsafe { advise_each(&ranges[..few], Advice::Random, |at, _| panic!("{at}")) };
            assert_eq!(marked(), few);
        }
        // SAFETY: the advice changes no data.
        unsafe { advise_each(&ranges, Advice::Normal, |at, _| panic!("{at}")) };
        assert_eq!(marked(), 0);
        // Below vm.mmap_min_addr nothing is mapped. A hole in the area another test's thread could
        // have its memory in.
        let holes = [0, 7, 8, 200, 255];
        let mut ranges = ranges;
        for (n, at) in holes.into_iter().enumerate() {
            ranges[at] = VirtRange::from_len(VirtAddr((n + 1) * PAGE_SIZE), PAGE_SIZE);
        }
        let mut told = Vec::new();
        // SAFETY: the advice changes no data.
        unsafe { advise_each(&ranges, Advice::Random, |at, errno| told.push((at, errno))) };
        assert_eq!(told, holes.map(|at| (at, Errno::NOMEM)));
        assert_eq!(marked(), MAX_ADVISED - holes.len());
        // SAFETY: nothing is advised.
        unsafe { advise_each(&[], Advice::Random, |at, _| panic!("{at}")) };
    }
}
