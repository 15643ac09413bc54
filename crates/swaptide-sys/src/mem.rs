//! Memory the engine owns: private anonymous mappings, shared memory, and advice on ranges.
//!
//! This module owns the registry of the engine's own mappings. The agent reads it to know which
//! parts of `/proc/self/maps` are not the program's; adopting one of those would swap out memory
//! the fault handler itself needs, and the process would stop for ever.
//!
//! Invariants:
//! 1. A mapping made by this crate is in the registry from before its address is returned until
//!    after it is unmapped. While a thread [holds the registry still](hold_still), every mapping of
//!    this crate is in it.
//! 2. Reading the registry takes no lock and allocates nothing, so it works in a fault handler and
//!    in a freshly forked child.
//! 3. A range that [`own_ranges`] reports was, at some moment during the call, exactly a range of
//!    the engine's: never one half of an old entry and one half of a new one.
//!
//! A list of the process's mappings that was read a moment ago proves nothing: what was the
//! program's then may have been unmapped, and a mapping of this crate made in its place. A thread
//! that is about to do something with a range that is not the engine's looks into the registry
//! while it holds it still, and acts before it lets go.
//!
//! Locks: `CHANGES`, the innermost of all; nothing is allocated under it.

use core::ffi::CStr;
use core::ops::Deref;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use core::time::Duration;

use linux_raw_sys::general as k;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;

use crate::lock::{Guard, Lock};
use crate::page::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::raw::syscall;
use crate::time::sleep;

/// Mappings the registry can hold at one time.
const MAX_OWN_RANGES: usize = 4096;

/// A slot that nothing uses.
const FREE: usize = 0;
/// A slot that is being filled. No mapping starts at address 1.
const FILLING: usize = 1;

/// One registry entry. `start` is the publishing word: stored last when a range enters, so that a
/// thread that reads the same start before and after reading `end` has a pair that belonged
/// together.
struct RegistrySlot {
    start: AtomicUsize,
    end: AtomicUsize,
}

static SLOTS: [RegistrySlot; MAX_OWN_RANGES] =
    [const { RegistrySlot { start: AtomicUsize::new(FREE), end: AtomicUsize::new(0) } };
        MAX_OWN_RANGES];
/// One past the highest slot ever used: readers look no further.
static HIGH_WATER: AtomicUsize = AtomicUsize::new(0);
/// The place of the last free slot found; a hint only.
static NEXT_FREE_HINT: AtomicUsize = AtomicUsize::new(0);
/// Forked children have no use for the engine's mappings.
static IS_KEPT_FROM_CHILDREN: AtomicBool = AtomicBool::new(false);
/// Held from before a mapping is made until it is in the registry.
static CHANGES: Lock<()> = Lock::new(());
/// How often, and with what pauses, [`hold_still`] tries: a thread that makes a mapping may be
/// stopped in the middle (by a debugger, say).
const HOLD_STILL_TRIES: u32 = 100;
const HOLD_STILL_PAUSE: Duration = Duration::from_micros(20);

/// Calls `f` with every range of memory this crate has mapped: engine memory, stacks, shared maps.
pub fn own_ranges(mut f: impl FnMut(VirtRange)) {
    // Pairs with the fetch_max in `claim`: slots below the mark that were published before this
    // load are seen.
    for slot in &SLOTS[..HIGH_WATER.load(Ordering::Acquire)] {
        loop {
            // Acquire pairs with the Release store in `publish`.
            let start = slot.start.load(Ordering::Acquire);
            if start <= FILLING {
                break;
            }
            // Acquire: a newer `end` makes the FILLING that came before it visible to the load
            // below.
            let end = slot.end.load(Ordering::Acquire);
            if slot.start.load(Ordering::Relaxed) == start {
                f(VirtRange::new(VirtAddr(start), VirtAddr(end)));
                break;
            }
        }
    }
}

/// While it lives, this crate makes no mapping.
pub struct HeldStill(#[allow(dead_code)] Guard<'static, ()>);

/// Holds the registry still. `None` when another thread has been making a mapping for longer than
/// that takes.
///
/// Its holder must not make a mapping, allocate nothing therefore, and take no lock whose holder
/// may.
pub fn hold_still() -> Option<HeldStill> {
    for _ in 0..HOLD_STILL_TRIES {
        if let Some(guard) = CHANGES.try_lock() {
            return Some(HeldStill(guard));
        }
        sleep(HOLD_STILL_PAUSE);
    }
    None
}

/// Must be called in a forked child before anything else of this module: a thread of the parent
/// that was in the middle of a registration does not exist here and will never finish it.
pub fn after_fork_in_child() {
    // SAFETY: a forked child has one thread, which is here. What the lock's holder was making is
    // merely not in the registry.
    unsafe { CHANGES.force_unlock() };
}

/// A claimed registry slot; `publish` fills it, dropping it gives it back.
struct Registration {
    slot: usize,
}

impl Registration {
    /// Takes a free slot, before the mapping is made, so that a full registry fails early.
    fn claim() -> Result<Registration, Errno> {
        let hint = NEXT_FREE_HINT.load(Ordering::Relaxed);
        for n in 0..MAX_OWN_RANGES {
            let i = (hint + n) % MAX_OWN_RANGES;
            if SLOTS[i]
                .start
                .compare_exchange(FREE, FILLING, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                NEXT_FREE_HINT.store(i + 1, Ordering::Relaxed);
                HIGH_WATER.fetch_max(i + 1, Ordering::AcqRel);
                return Ok(Registration { slot: i });
            }
        }
        Err(Errno::NOMEM)
    }

    fn publish(&self, range: VirtRange) {
        let slot = &SLOTS[self.slot];
        // Release orders the FILLING of `claim` before the new end (see `own_ranges`).
        slot.end.store(range.end.0, Ordering::Release);
        slot.start.store(range.start.0, Ordering::Release);
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        SLOTS[self.slot].start.store(FREE, Ordering::Release);
        NEXT_FREE_HINT.store(self.slot, Ordering::Relaxed);
    }
}

/// Runs `map` with a claimed slot and publishes what it mapped (invariant 1).
fn map_registered(
    map: impl FnOnce() -> Result<VirtRange, Errno>,
) -> Result<(VirtRange, Registration), Errno> {
    let registration = Registration::claim()?;
    let _change = CHANGES.lock();
    let range = map()?;
    if IS_KEPT_FROM_CHILDREN.load(Ordering::Relaxed) {
        // SAFETY: no data changes. Where it is refused, a child has a copy that nothing uses.
        let _ = unsafe { advise(range, Advice::DontFork) };
    }
    registration.publish(range);
    Ok((range, registration))
}

/// Prefetches the memory at `at` into the cache: a hint, where the processor has one. Any address
/// will do.
#[inline]
pub fn prefetch<T>(at: *const T) {
    // SAFETY: a prefetch reads nothing that the program sees, and is without effect where nothing
    // can be read.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
}

/// Advice to the kernel about a range.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Drop the pages now; private anonymous memory reads as zero afterwards.
    DontNeed,
    /// The same, for locked pages too.
    DontNeedLocked,
    /// The pages may be dropped when memory is short, unless written to first.
    Free,
    /// Move the pages to the inactive end of the kernel's lists.
    Cold,
    /// Ask the kernel to swap the pages out.
    PageOut,
    /// Fault every page in for reading (5.14).
    PopulateRead,
    /// Fault every page in for writing (5.14); pages shared copy-on-write become private.
    PopulateWrite,
    /// No transparent huge pages here.
    NoHugePage,
    /// Transparent huge pages welcome here.
    HugePage,
    /// A forked child does not get this range.
    DontFork,
    /// A forked child gets this range.
    DoFork,
    /// The range is read without order. For memory without a file it is a mark, and no more.
    Random,
    /// The range is read in no particular way.
    Normal,
    /// A forked child finds zeros in this range.
    WipeOnFork,
    /// Leave the range out of core dumps.
    DontDump,
}

impl Advice {
    pub(crate) const fn number(self) -> u32 {
        match self {
            Advice::DontNeed => k::MADV_DONTNEED,
            // Linux 5.18; also gives up locked pages (`mlockall`), where the plain one is refused.
            Advice::DontNeedLocked => k::MADV_DONTNEED_LOCKED,
            Advice::Free => k::MADV_FREE,
            Advice::Cold => k::MADV_COLD,
            Advice::PageOut => k::MADV_PAGEOUT,
            Advice::PopulateRead => k::MADV_POPULATE_READ,
            Advice::PopulateWrite => k::MADV_POPULATE_WRITE,
            Advice::NoHugePage => k::MADV_NOHUGEPAGE,
            Advice::HugePage => k::MADV_HUGEPAGE,
            Advice::DontFork => k::MADV_DONTFORK,
            Advice::DoFork => k::MADV_DOFORK,
            Advice::Random => k::MADV_RANDOM,
            Advice::Normal => k::MADV_NORMAL,
            Advice::WipeOnFork => k::MADV_WIPEONFORK,
            Advice::DontDump => k::MADV_DONTDUMP,
        }
    }
}

/// Gives `advice` on whole pages.
///
/// # Safety
/// `DontNeed` and `Free` destroy data: the range must hold none that is still wanted. A
/// `DontNeed` on memory registered with a userfaultfd that reports removals waits for its reader,
/// so that reader must never make this call on such memory.
pub unsafe fn advise(range: VirtRange, advice: Advice) -> Result<(), Errno> {
    // SAFETY: the caller answers for the data in the range.
    unsafe { syscall!(k::__NR_madvise, range.start.0, range.len(), advice.number()) }.map(drop)
}

/// Lets locked pages of `range` go again. No data changes, and where nothing is locked nothing
/// happens.
fn unlock(range: VirtRange) {
    // SAFETY: locks of pages are no part of their data.
    let _ = unsafe { syscall!(k::__NR_munlock, range.start.0, range.len()) };
}

/// Unlocks every mapping of this crate: the program has locked all of its memory, and meant its
/// own. Takes no lock and allocates nothing.
pub fn unlock_own_ranges() {
    own_ranges(unlock);
}

/// Mappings of this crate do not come along at a fork: for a program in which no forked child runs
/// any of the engine's code.
pub fn keep_from_children() {
    IS_KEPT_FROM_CHILDREN.store(true, Ordering::Relaxed);
    own_ranges(|range| {
        // SAFETY: no data changes.
        let _ = unsafe { advise(range, Advice::DontFork) };
    });
}

/// True if mappings of the engine's are to stay out of children.
pub fn is_kept_from_children() -> bool {
    IS_KEPT_FROM_CHILDREN.load(Ordering::Relaxed)
}

/// Enters a range that something else has mapped for the engine, for the life of the process.
///
/// # Errors
/// `NOMEM` when `MAX_OWN_RANGES` mappings exist.
pub fn note_own(range: VirtRange) -> Result<(), Errno> {
    let (_, registration) = map_registered(|| Ok(range))?;
    core::mem::forget(registration);
    Ok(())
}

/// Whether the kernel has something in the place of one page of this process.
pub fn is_mapped_in(page: VirtAddr) -> Result<bool, Errno> {
    let mut there = 0u8;
    // SAFETY: for one page the kernel writes one byte.
    unsafe { syscall!(k::__NR_mincore, page.0, PAGE_SIZE, (&raw mut there) as usize) }?;
    Ok(there & 1 == 1)
}

/// Maps `len` bytes (whole pages) for the time of one call: not entered in the registry; the caller
/// unmaps it.
pub fn map_scratch(len: usize) -> Result<NonNull<u8>, Errno> {
    let flags = k::MAP_PRIVATE | k::MAP_ANONYMOUS | k::MAP_NORESERVE;
    // SAFETY: the kernel chooses free addresses.
    let at = unsafe { mmap(0, len, k::PROT_READ | k::PROT_WRITE, flags, -1) }?;
    NonNull::new(at.as_ptr::<u8>()).ok_or(Errno::NOMEM)
}

/// A page at an address that no other process is likely to have anything at: a process that can do
/// something with that address knows whose address space it works in. Dropping it unmaps it.
pub struct Landmark(VirtRange);

impl Landmark {
    /// Maps it, without any access.
    pub fn raise() -> Result<Landmark, Errno> {
        // Half of the address space: what is in the other half lies together near its end.
        const SPAN: usize = 1 << 46;
        let flags = k::MAP_PRIVATE | k::MAP_ANONYMOUS | k::MAP_NORESERVE | k::MAP_FIXED_NOREPLACE;
        for _ in 0..64 {
            let mut random = [0u8; 8];
            rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
            let at = (usize::from_le_bytes(random) % SPAN).max(1 << 32) / PAGE_SIZE * PAGE_SIZE;
            // SAFETY: with MAP_FIXED_NOREPLACE nothing is replaced.
            match unsafe { mmap(at, PAGE_SIZE, k::PROT_NONE, flags, -1) } {
                Ok(start) => return Ok(Landmark(VirtRange::from_len(start, PAGE_SIZE))),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::EXIST)
    }

    /// Returns its range.
    pub fn range(&self) -> VirtRange {
        self.0
    }
}

impl Drop for Landmark {
    fn drop(&mut self) {
        // SAFETY: the page was never accessible.
        let _ = unsafe { unmap(self.0) };
    }
}

/// Unmaps `range`.
///
/// # Safety
/// Nothing may use the range any more.
pub unsafe fn unmap(range: VirtRange) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    unsafe { syscall!(k::__NR_munmap, range.start.0, range.len()) }.map(drop)
}

/// Changes the protection of `range` to read and write, or to none at all.
///
/// # Safety
/// With `access == false` nothing may touch the range any more.
pub unsafe fn protect(range: VirtRange, access: bool) -> Result<(), Errno> {
    let prot = if access { k::PROT_READ | k::PROT_WRITE } else { k::PROT_NONE };
    // SAFETY: the caller's promise.
    unsafe { syscall!(k::__NR_mprotect, range.start.0, range.len(), prot) }.map(drop)
}

unsafe fn mmap(addr: usize, len: usize, prot: u32, flags: u32, fd: i32) -> Result<VirtAddr, Errno> {
    // SAFETY: the caller answers for MAP_FIXED; other mappings replace nothing.
    unsafe { syscall!(k::__NR_mmap, addr, len, prot, flags, fd as isize, 0) }.map(VirtAddr)
}

/// Gives the range a name in `/proc/PID/maps` (`[anon:swaptide]`), where the kernel can do that.
/// It also keeps the kernel from merging the range with a neighbour of the program's.
fn name_range(range: VirtRange) {
    let name = c"swaptide";
    // SAFETY: the name lives for ever. A kernel without this answers EINVAL, which costs nothing
    // but the name.
    let _ = unsafe {
        syscall!(
            k::__NR_prctl,
            linux_raw_sys::prctl::PR_SET_VMA,
            linux_raw_sys::prctl::PR_SET_VMA_ANON_NAME,
            range.start.0,
            range.len(),
            name.as_ptr() as usize
        )
    };
}

/// A mapping in the registry; dropping it unmaps it. What [`Mapping`] and [`SharedMap`] have in
/// common.
pub struct OwnedRange {
    range: VirtRange,
    /// Leaves the registry when dropped, after the mapping is gone (invariant 1).
    _registration: Registration,
}

impl OwnedRange {
    /// Maps by `map`, and enters what it has mapped in the registry.
    fn map(map: impl FnOnce() -> Result<VirtRange, Errno>) -> Result<OwnedRange, Errno> {
        let (range, registration) = map_registered(map)?;
        Ok(OwnedRange { range, _registration: registration })
    }

    /// The first byte. Of shared memory, which other processes may change at any time, use atomics.
    pub fn as_ptr(&self) -> *mut u8 {
        self.range.start.as_ptr()
    }

    /// Bytes mapped.
    #[allow(clippy::len_without_is_empty)] // a mapping is never empty
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// The addresses mapped.
    pub fn range(&self) -> VirtRange {
        self.range
    }

    /// Gives up ownership: the mapping stays, and stays in the registry, for the life of the
    /// process.
    fn leak(self) -> NonNull<u8> {
        let start = self.as_ptr();
        core::mem::forget(self);
        NonNull::new(start).expect("no mapping starts at zero")
    }
}

impl Drop for OwnedRange {
    fn drop(&mut self) {
        // SAFETY: the owner is gone, and references were only lent on the promise not to outlive
        // it.
        let _ = unsafe { unmap(self.range) };
    }
}

/// An owned private anonymous mapping; dropping it unmaps it.
pub struct Mapping(OwnedRange);

impl Deref for Mapping {
    type Target = OwnedRange;

    fn deref(&self) -> &OwnedRange {
        &self.0
    }
}

impl Mapping {
    /// Reserves `len` bytes (rounded up to pages): readable, writable, no memory used until
    /// touched, never huge pages. `ENOMEM` also when `MAX_OWN_RANGES` mappings exist.
    pub fn reserve(len: usize) -> Result<Mapping, Errno> {
        Mapping::reserve_aligned(len, PAGE_SIZE)
    }

    /// Like [`reserve`](Mapping::reserve), at a multiple of `align` (a power of two, at least a
    /// page).
    pub fn reserve_aligned(len: usize, align: usize) -> Result<Mapping, Errno> {
        if len == 0 || !align.is_power_of_two() || align < PAGE_SIZE {
            return Err(Errno::INVAL);
        }
        let len = len.checked_next_multiple_of(PAGE_SIZE).ok_or(Errno::NOMEM)?;
        OwnedRange::map(|| {
            let range = map_aligned(len, align)?;
            // SAFETY: this advice changes no data. A kernel without huge pages answers EINVAL: then
            // there are none.
            let _ = unsafe { advise(range, Advice::NoHugePage) };
            name_range(range);
            Ok(range)
        })
        .map(Mapping)
    }

    fn part(&self, offset: usize, len: usize) -> Result<VirtRange, Errno> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => {
                Ok(VirtRange::from_len(self.range().start.offset(offset), len))
            }
            _ => Err(Errno::INVAL),
        }
    }

    /// Gives the pages of a part back to the kernel; it reads as zero afterwards. References into
    /// the part can only come from [`slice_mut`](Mapping::slice_mut), whose caller promised not to
    /// hold them across this.
    pub fn discard(&self, offset: usize, len: usize) -> Result<(), Errno> {
        let part = self.part(offset, len)?;
        // SAFETY: the memory is this mapping's own.
        unsafe { advise(part, Advice::DontNeedLocked) }
    }

    /// Lets its pages go again where `mlockall(MCL_FUTURE)` locked the new mapping.
    pub fn unlock(&self) {
        unlock(self.range());
    }

    /// Makes the pages of a part present and writable now. Kernels before 5.14: `EINVAL`.
    pub fn populate_write(&self, offset: usize, len: usize) -> Result<(), Errno> {
        let part = self.part(offset, len)?;
        // SAFETY: populating changes no data.
        unsafe { advise(part, Advice::PopulateWrite) }
    }

    /// A part as bytes; panics when it does not lie in the mapping.
    ///
    /// # Safety
    /// For as long as the slice lives nothing else uses the part, and its pages are neither
    /// discarded nor moved away.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        let part = self.part(offset, len).expect("the part lies in the mapping");
        // SAFETY: the part is mapped readable and writable; exclusiveness is the caller's promise.
        unsafe { core::slice::from_raw_parts_mut(part.start.as_ptr(), part.len()) }
    }

    /// Gives up ownership: the mapping stays, and stays in the registry, for the life of the
    /// process.
    pub fn into_raw(self) -> NonNull<u8> {
        self.0.leak()
    }
}

/// Maps `len` bytes at a multiple of `align`: one mapping of `len + align`, cut at both ends.
fn map_aligned(len: usize, align: usize) -> Result<VirtRange, Errno> {
    let flags = k::MAP_PRIVATE | k::MAP_ANONYMOUS | k::MAP_NORESERVE;
    let slack = if align > PAGE_SIZE { align } else { 0 };
    let total = len.checked_add(slack).ok_or(Errno::NOMEM)?;
    // SAFETY: a new mapping where the kernel has room; it replaces nothing.
    let start = unsafe { mmap(0, total, k::PROT_READ | k::PROT_WRITE, flags, -1)? };
    let whole = VirtRange::from_len(start, total);
    let wanted = VirtRange::from_len(start.align_up(align), len);
    for cut in [VirtRange::new(whole.start, wanted.start), VirtRange::new(wanted.end, whole.end)] {
        if !cut.is_empty() {
            // SAFETY: part of the mapping just made, not in use.
            let _ = unsafe { unmap(cut) };
        }
    }
    Ok(wanted)
}

/// An owned shared mapping of a memory file; dropping it unmaps it (the file lives on).
pub struct SharedMap(OwnedRange);

impl Deref for SharedMap {
    type Target = OwnedRange;

    fn deref(&self) -> &OwnedRange {
        &self.0
    }
}

impl SharedMap {
    /// Maps the first `len` bytes (rounded up to pages) of `fd`, readable and writable, shared.
    /// The file must be at least that long, or a touch beyond its end is a `SIGBUS`.
    pub fn map(fd: BorrowedFd<'_>, len: usize) -> Result<SharedMap, Errno> {
        if len == 0 {
            return Err(Errno::INVAL);
        }
        let len = len.checked_next_multiple_of(PAGE_SIZE).ok_or(Errno::NOMEM)?;
        OwnedRange::map(|| {
            // SAFETY: a new mapping where the kernel has room; it replaces nothing.
            let start = unsafe {
                mmap(0, len, k::PROT_READ | k::PROT_WRITE, k::MAP_SHARED, fd.as_raw_fd())?
            };
            Ok(VirtRange::from_len(start, len))
        })
        .map(SharedMap)
    }

    /// Gives up ownership: the mapping stays for the life of the process.
    pub fn leak(self) -> NonNull<u8> {
        self.0.leak()
    }
}

/// Creates a memory file of `len` bytes that can never grow or shrink, so that no process it
/// is passed to can make its mappings fault.
pub fn memfd_create(name: &CStr, len: u64) -> Result<OwnedFd, Errno> {
    let flags = k::MFD_CLOEXEC | k::MFD_ALLOW_SEALING;
    // SAFETY: the name is a valid string; the call only makes a descriptor.
    let fd = unsafe { syscall!(k::__NR_memfd_create, name.as_ptr() as usize, flags) }?;
    // SAFETY: the kernel has just given us this descriptor.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    rustix::fs::ftruncate(&fd, len)?;
    let seals =
        rustix::fs::SealFlags::GROW | rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(fd.as_fd(), seals)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::vec::Vec;

    /// The registry is one for the process; tests that count or fill it take turns.
    static TURN: Mutex<()> = Mutex::new(());

    fn listed() -> Vec<VirtRange> {
        let mut all = Vec::new();
        own_ranges(|r| all.push(r));
        all
    }

    #[test]
    fn a_mapping_is_listed_while_it_lives() {
        let _turn = TURN.lock().unwrap();
        let map = Mapping::reserve_aligned(3 * PAGE_SIZE + 1, 1 << 21).unwrap();
        let range = map.range();
        assert_eq!((range.start.0 % (1 << 21), range.pages()), (0, 4));
        assert!(listed().contains(&range));
        drop(map);
        assert!(!listed().contains(&range));
        let kept = Mapping::reserve(PAGE_SIZE).unwrap();
        let range = kept.range();
        let _ = kept.into_raw();
        assert!(listed().contains(&range), "a leaked mapping stays listed");
    }

    #[test]
    fn landmarks_are_where_nothing_is_and_go_again() {
        let (one, other) = (Landmark::raise().unwrap(), Landmark::raise().unwrap());
        assert_ne!(one.range(), other.range());
        let range = one.range();
        assert!(
            crate::maps::vma_at(range.start)
                .unwrap()
                .is_some_and(|info| info.vma().range == range && !info.vma().read)
        );
        drop(one);
        assert!(crate::maps::vma_at(range.start).unwrap().is_none());
    }

    #[test]
    fn discard_and_populate() {
        let map = Mapping::reserve(4 * PAGE_SIZE).unwrap();
        map.populate_write(0, map.len()).unwrap();
        // SAFETY: this test alone uses the mapping; the slice ends before the discard.
        unsafe { map.slice_mut(0, map.len()).fill(7) };
        map.discard(PAGE_SIZE, PAGE_SIZE).unwrap();
        // SAFETY: this test alone uses the mapping; no other slice of it lives.
        let bytes = unsafe { map.slice_mut(0, map.len()) };
        assert_eq!((bytes[0], bytes[PAGE_SIZE], bytes[2 * PAGE_SIZE]), (7, 0, 7));
        assert_eq!(
            map.discard(PAGE_SIZE, 4 * PAGE_SIZE),
            Err(Errno::INVAL),
            "a part outside is refused"
        );
        assert_eq!(map.discard(usize::MAX, 2), Err(Errno::INVAL));
    }

    #[test]
    fn a_full_registry_refuses_instead_of_hiding_a_mapping() {
        let _turn = TURN.lock().unwrap();
        let mut maps = Vec::new();
        let error = loop {
            match Mapping::reserve(PAGE_SIZE) {
                Ok(map) => maps.push(map),
                Err(errno) => break errno,
            }
        };
        assert_eq!(error, Errno::NOMEM);
        assert!(maps.len() > MAX_OWN_RANGES / 2);
        maps.pop();
        Mapping::reserve(PAGE_SIZE).unwrap();
    }

    #[test]
    fn readers_never_see_torn_ranges() {
        let _turn = TURN.lock().unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                for pages in (1..=7).cycle().take(4000) {
                    drop(Mapping::reserve_aligned(pages * PAGE_SIZE, 8 * PAGE_SIZE).unwrap());
                }
                stop.store(true, Ordering::SeqCst);
            });
            while !stop.load(Ordering::SeqCst) {
                own_ranges(|r| assert!(!r.is_empty() && r.len() < 1 << 40, "{r:?}"));
            }
        });
    }

    #[test]
    fn nothing_is_mapped_while_the_registry_is_held_still() {
        let _turn = TURN.lock().unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let made = AtomicUsize::new(0);
        std::thread::scope(|s| {
            s.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    drop(Mapping::reserve(8 * PAGE_SIZE).unwrap());
                    made.fetch_add(1, Ordering::SeqCst);
                }
            });
            let mut held = 0;
            for _ in 0..20 {
                let before = made.load(Ordering::SeqCst);
                let Some(still) = hold_still() else { continue };
                held += 1;
                let then = made.load(Ordering::SeqCst);
                sleep(Duration::from_millis(2));
                // One that was made before may be counted after.
                assert!(made.load(Ordering::SeqCst) <= then + 1);
                drop(still);
                let later = std::time::Instant::now() + Duration::from_secs(10);
                while made.load(Ordering::SeqCst) <= before + 1 && std::time::Instant::now() < later
                {
                    std::thread::yield_now();
                }
                assert!(made.load(Ordering::SeqCst) > before + 1, "and continues afterwards");
            }
            assert!(held > 0, "it can be held");
            stop.store(true, Ordering::SeqCst);
        });
    }

    #[test]
    fn shared_memory_is_shared_and_sealed() {
        let _turn = TURN.lock().unwrap();
        let fd = memfd_create(c"swaptide-test", 8192).unwrap();
        let (a, b) =
            (SharedMap::map(fd.as_fd(), 8192).unwrap(), SharedMap::map(fd.as_fd(), 8192).unwrap());
        // SAFETY: both maps are 8192 bytes and this test alone uses them.
        unsafe {
            a.as_ptr().add(5000).write_volatile(42);
            assert_eq!(b.as_ptr().add(5000).read_volatile(), 42);
        }
        assert!(listed().contains(&a.range()) && listed().contains(&b.range()));
        assert_eq!(rustix::fs::ftruncate(&fd, 0), Err(Errno::PERM));
    }
}
