//! Which pages exist: PAGEMAP_SCAN (6.7), or `/proc/self/pagemap` page by page on older kernels.
//!
//! Only private anonymous pages are reported (present, or swapped out by the kernel itself); pages
//! of files, shared memory and pages that do not exist are not. A page poisoned through a
//! userfaultfd counts as swapped: the kernel keeps both in the same kind of entry. A guard page
//! (`MADV_GUARD_INSTALL`) is kept like that too, but holds nothing: it is left out where the kernel
//! tells it apart (6.15 and newer; see [`Pagemap::first_guard`]).

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use linux_raw_sys::general as k;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::Errno;

use crate::page::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::procfs;
use crate::raw::syscall;

/// An open `/proc/self/pagemap`. It shows the address space of the process that opened it: a forked
/// child opens its own.
#[derive(Debug)]
pub struct Pagemap(OwnedFd);

/// A run of pages in the same state.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// Its addresses.
    pub range: VirtRange,
    /// The kernel has swapped these pages out (or they are poisoned).
    pub swapped: bool,
    /// The shared page of zeros: costs no memory. Never set by the fallback, which cannot tell.
    pub zero: bool,
    /// Mapped by a huge page. Never set by the fallback.
    pub huge: bool,
}

#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Copy, Clone)]
struct ScanRegion {
    start: u64,
    end: u64,
    categories: u64,
}

const _: () = {
    assert!(size_of::<ScanArg>() == size_of::<k::pm_scan_arg>());
    assert!(size_of::<ScanRegion>() == size_of::<k::page_region>());
};

/// _IOWR('f', 16, struct pm_scan_arg)
const PAGEMAP_SCAN: u32 =
    (3 << 30) | ((size_of::<ScanArg>() as u32) << 16) | ((b'f' as u32) << 8) | 16;
const FILE: u64 = k::PAGE_IS_FILE as u64;
const PRESENT: u64 = k::PAGE_IS_PRESENT as u64;
const SWAPPED: u64 = k::PAGE_IS_SWAPPED as u64;
const PFNZERO: u64 = k::PAGE_IS_PFNZERO as u64;
const HUGE: u64 = k::PAGE_IS_HUGE as u64;
const GUARD: u64 = k::PAGE_IS_GUARD as u64;

/// The kernel refused the category of guard pages: it is older than 6.15.
static WITHOUT_GUARDS: AtomicBool = AtomicBool::new(false);

/// Bits of a `/proc/self/pagemap` word.
const WORD_PRESENT: u64 = 1 << 63;
const WORD_SWAPPED: u64 = 1 << 62;
const WORD_FILE: u64 = 1 << 61;
const WORD_GUARD: u64 = 1 << 58;
const WORD_EXCLUSIVE: u64 = 1 << 56;

impl Pagemap {
    /// Opens this process's own.
    pub fn open_self() -> Result<Pagemap, Errno> {
        procfs::open_own(c"/proc/thread-self/pagemap", c"pagemap").map(Pagemap)
    }

    /// Calls `out` with every run of private anonymous pages in `range` that exist, in order.
    pub fn present(&self, range: VirtRange, mut out: impl FnMut(VirtRange)) -> Result<(), Errno> {
        let mut open: Option<VirtRange> = None;
        self.runs(range, |run| match &mut open {
            Some(last) if last.end == run.range.start => last.end = run.range.end,
            _ => {
                if let Some(done) = open.replace(run.range) {
                    out(done);
                }
            }
        })?;
        open.into_iter().for_each(out);
        Ok(())
    }

    /// The same with each run's state; neighbours in different states come apart.
    pub fn runs(&self, range: VirtRange, mut out: impl FnMut(PageRun)) -> Result<(), Errno> {
        let range = VirtRange::new(range.start.page_down(), range.end.page_up());
        match self.scan(range, &mut out) {
            Err(Errno::NOTTY | Errno::NOSYS) => self.read_words(range, &mut out),
            other => other,
        }
    }

    /// How many pages at the start of the range exist (`there`), or do not exist, whatever they
    /// hold.
    ///
    /// `UFFDIO_MOVE` may have moved more pages than it reports when it stops early (6.18 forgets a
    /// batch in some retries): the side that nothing else touches tells.
    pub fn leading(&self, range: VirtRange, there: bool) -> Result<usize, Errno> {
        let (mut edge, mut first) = (range.start, range.end);
        self.runs(range, |run| {
            if run.range.start <= edge {
                edge = edge.max(run.range.end);
            }
            first = first.min(run.range.start);
        })?;
        let end = if there { edge.min(range.end) } else { first.max(range.start) };
        Ok((end.0 - range.start.0) / PAGE_SIZE)
    }

    /// Returns a bit for each of the first `n` pages (at most 16) from `start` on that exists and
    /// is mapped by this process alone, as bits.
    pub fn exclusive(&self, start: VirtAddr, n: usize) -> Result<u16, Errno> {
        let mut bytes = [0u8; 16 * 8];
        let want = n.min(16) * 8;
        let at = start.page_number() as u64 * 8;
        let n = procfs::retry(|| rustix::io::pread(self.0.as_fd(), &mut bytes[..want], at))?;
        let words = bytes[..n]
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().expect("chunks of 8")));
        let is_own =
            |word: u64| word & (WORD_PRESENT | WORD_EXCLUSIVE) == WORD_PRESENT | WORD_EXCLUSIVE;
        Ok(words
            .enumerate()
            .filter(|(_, word)| is_own(*word))
            .fold(0, |bits, (at, _)| bits | 1 << at))
    }

    /// The first page of `range` that is a guard (`MADV_GUARD_INSTALL`): a touch of it is a
    /// SIGSEGV. Kernels before 6.15 do not tell, and neither does the fallback: `None`.
    pub fn first_guard(&self, range: VirtRange) -> Option<VirtAddr> {
        if range.is_empty() || WITHOUT_GUARDS.load(Relaxed) {
            return None;
        }
        let mut region = ScanRegion { start: 0, end: 0, categories: 0 };
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            flags: 0,
            start: range.start.0 as u64,
            end: range.end.0 as u64,
            walk_end: 0,
            vec: (&raw mut region) as u64,
            vec_len: 1,
            max_pages: 1,
            category_inverted: 0,
            category_mask: GUARD,
            category_anyof_mask: 0,
            return_mask: GUARD,
        };
        let arg_ptr = (&raw mut arg) as usize;
        // SAFETY: the struct is the one this ioctl takes; its vector has the one place it says.
        match procfs::retry(|| unsafe {
            syscall!(k::__NR_ioctl, self.0.as_raw_fd(), PAGEMAP_SCAN, arg_ptr)
        }) {
            Ok(1) => Some(VirtAddr(region.start as usize)),
            Err(Errno::INVAL) => {
                WITHOUT_GUARDS.store(true, Relaxed);
                None
            }
            _ => None,
        }
    }

    fn scan(&self, range: VirtRange, out: &mut impl FnMut(PageRun)) -> Result<(), Errno> {
        let mut regions = [ScanRegion { start: 0, end: 0, categories: 0 }; 64];
        let mut start = range.start.0 as u64;
        let end = range.end.0 as u64;
        while start < end {
            let left_out = if WITHOUT_GUARDS.load(Relaxed) { FILE } else { FILE | GUARD };
            let mut arg = ScanArg {
                size: size_of::<ScanArg>() as u64,
                flags: 0,
                start,
                end,
                walk_end: 0,
                vec: regions.as_mut_ptr() as u64,
                vec_len: regions.len() as u64,
                max_pages: 0,
                category_inverted: left_out,
                category_mask: left_out,
                category_anyof_mask: PRESENT | SWAPPED,
                return_mask: SWAPPED | PFNZERO | HUGE,
            };
            let arg_ptr = (&raw mut arg) as usize;
            // SAFETY: the struct is the one this ioctl takes; its vector is as long as it says.
            let found = procfs::retry(|| unsafe {
                syscall!(k::__NR_ioctl, self.0.as_raw_fd(), PAGEMAP_SCAN, arg_ptr)
            });
            if found == Err(Errno::INVAL) && left_out & GUARD != 0 {
                WITHOUT_GUARDS.store(true, Relaxed);
                continue;
            }
            let n = found?;
            for r in &regions[..n.min(regions.len())] {
                let has = |bit| r.categories & bit != 0;
                out(PageRun {
                    range: VirtRange::new(VirtAddr(r.start as usize), VirtAddr(r.end as usize)),
                    swapped: has(SWAPPED),
                    zero: has(PFNZERO),
                    huge: has(HUGE),
                });
            }
            // The walk stops early when the vector is full; it always makes progress.
            start = arg.walk_end.max(start + PAGE_SIZE as u64);
        }
        Ok(())
    }

    fn read_words(&self, range: VirtRange, out: &mut impl FnMut(PageRun)) -> Result<(), Errno> {
        let mut bytes = [0u8; 4096];
        let mut run: Option<PageRun> = None;
        let mut addr = range.start;
        while addr < range.end {
            let want = (range.end.page_number() - addr.page_number()).min(bytes.len() / 8) * 8;
            let at = addr.page_number() as u64 * 8;
            let n = procfs::retry(|| rustix::io::pread(self.0.as_fd(), &mut bytes[..want], at))?;
            if n < 8 {
                break;
            }
            for word in bytes[..n].chunks_exact(8) {
                let word = u64::from_ne_bytes(word.try_into().expect("chunks of 8"));
                let page = VirtRange::from_len(addr, PAGE_SIZE);
                addr = page.end;
                let exists = word & (WORD_PRESENT | WORD_SWAPPED) != 0
                    && word & (WORD_FILE | WORD_GUARD) == 0;
                let swapped = word & WORD_SWAPPED != 0;
                match &mut run {
                    Some(last)
                        if exists && last.swapped == swapped && last.range.end == page.start =>
                    {
                        last.range.end = page.end;
                    }
                    _ => {
                        let next = exists.then_some(PageRun {
                            range: page,
                            swapped,
                            zero: false,
                            huge: false,
                        });
                        if let Some(done) = core::mem::replace(&mut run, next) {
                            out(done);
                        }
                    }
                }
            }
        }
        run.into_iter().for_each(out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::{Mapping, SharedMap, memfd_create};
    use std::vec::Vec;

    fn pages(map: &Mapping, at: &[usize]) {
        for &page in at {
            // SAFETY: this test alone uses the mapping.
            unsafe { map.slice_mut(page * PAGE_SIZE, 1)[0] = 1 };
        }
    }

    fn relative(map: &Mapping, ranges: &[VirtRange]) -> Vec<(usize, usize)> {
        ranges.iter().map(|r| ((r.start.0 - map.range().start.0) / PAGE_SIZE, r.pages())).collect()
    }

    #[test]
    fn both_ways_find_the_written_pages() {
        let map = Mapping::reserve(1000 * PAGE_SIZE).unwrap();
        pages(&map, &[0, 1, 2, 5, 600, 999]);
        let pagemap = Pagemap::open_self().unwrap();
        let want = [(0, 3), (5, 1), (600, 1), (999, 1)];
        let mut got = Vec::new();
        pagemap.present(map.range(), |r| got.push(r)).unwrap();
        assert_eq!(relative(&map, &got), want);
        got.clear();
        pagemap.read_words(map.range(), &mut |run| got.push(run.range)).unwrap();
        assert_eq!(relative(&map, &got), want);
    }

    #[test]
    fn forked_pages_exclusive_after_write() {
        let map = Mapping::reserve(20 * PAGE_SIZE).unwrap();
        pages(&map, &[0, 1, 3, 17]);
        let pagemap = Pagemap::open_self().unwrap();
        let now =
            |at: usize, n| pagemap.exclusive(map.range().start.offset(at * PAGE_SIZE), n).unwrap();
        // Another test's fork may share them for a moment.
        let own = |at: usize, n, expected: u16| {
            (0..5000).any(|_| {
                crate::thread::sleep(core::time::Duration::from_millis(u64::from(
                    now(at, n) != expected,
                )));
                now(at, n) == expected
            })
        };
        assert!(own(0, 16, 0b1011) && own(0, 2, 0b11) && own(17, 1, 1) && own(16, 4, 0b10));
        // SAFETY: the child waits to be killed and does nothing else: it calls nothing and touches
        // no memory.
        let child = unsafe { syscall!(k::__NR_fork) }.unwrap() as u32;
        if child == 0 {
            loop {
                // SAFETY: it only waits.
                let _ = unsafe { syscall!(k::__NR_pause) };
            }
        }
        assert_eq!(now(0, 16), 0);
        pages(&map, &[1]);
        assert!(own(0, 16, 0b10));
        crate::thread::kill(crate::thread::Pid(child), 9).unwrap();
        // SAFETY: the child is this test's own; nothing is written anywhere.
        let ended = unsafe { syscall!(k::__NR_wait4, child, 0usize, 0usize, 0usize) };
        assert_eq!(ended, Ok(child as usize));
        assert!(own(0, 16, 0b1011));
    }

    #[test]
    fn guards_are_left_out_and_found() {
        let map = Mapping::reserve(8 * PAGE_SIZE).unwrap();
        pages(&map, &[0, 1, 2, 3, 6]);
        let guard = VirtRange::from_len(map.range().start.offset(2 * PAGE_SIZE), 2 * PAGE_SIZE);
        // SAFETY: this test's own memory; what the advice discards is not needed.
        let installed =
            unsafe { syscall!(k::__NR_madvise, guard.start.0, guard.len(), k::MADV_GUARD_INSTALL) };
        let pagemap = Pagemap::open_self().unwrap();
        if installed.is_err() || WITHOUT_GUARDS.load(Relaxed) {
            // Such a kernel has no guards, or does not tell.
            return;
        }
        assert_eq!(pagemap.first_guard(map.range()), Some(guard.start));
        assert_eq!(
            pagemap.first_guard(VirtRange::from_len(map.range().start, 2 * PAGE_SIZE)),
            None
        );
        let mut got = Vec::new();
        pagemap.present(map.range(), |r| got.push(r)).unwrap();
        assert_eq!(relative(&map, &got), [(0, 2), (6, 1)]);
        got.clear();
        pagemap.read_words(map.range(), &mut |run| got.push(run.range)).unwrap();
        assert_eq!(relative(&map, &got), [(0, 2), (6, 1)]);
    }

    #[test]
    fn more_runs_than_one_call_returns() {
        let map = Mapping::reserve(1024 * PAGE_SIZE).unwrap();
        let even: Vec<usize> = (0..1024).step_by(2).collect();
        pages(&map, &even);
        let mut got = Vec::new();
        Pagemap::open_self().unwrap().present(map.range(), |r| got.push(r)).unwrap();
        assert_eq!(relative(&map, &got), even.iter().map(|&p| (p, 1)).collect::<Vec<_>>());
    }

    #[test]
    fn zero_pages_are_told_apart_and_shared_ones_left_out() {
        let map = Mapping::reserve(4 * PAGE_SIZE).unwrap();
        pages(&map, &[0]);
        // SAFETY: reading own memory; the read brings the zero page in.
        assert_eq!(unsafe { map.as_ptr().add(PAGE_SIZE).read_volatile() }, 0);
        let pagemap = Pagemap::open_self().unwrap();
        let mut runs = Vec::new();
        pagemap.runs(map.range(), |run| runs.push(run)).unwrap();
        assert_eq!(runs.len(), 2, "{runs:?}");
        assert!(!runs[0].zero && !runs[0].swapped && runs[0].range.pages() == 1);
        assert!(runs[1].zero && runs[1].range.pages() == 1);

        let fd = memfd_create(c"swaptide-test", 8192).unwrap();
        let shared = SharedMap::map(fd.as_fd(), 8192).unwrap();
        // SAFETY: the map is 8192 bytes and this test alone uses it.
        unsafe { shared.as_ptr().write_volatile(1) };
        pagemap.runs(shared.range(), |run| panic!("{run:?} is shared")).unwrap();
        pagemap.read_words(shared.range(), &mut |run| panic!("{run:?} is shared")).unwrap();
    }
}
