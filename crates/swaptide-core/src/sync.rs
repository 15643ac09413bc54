//! The primitives everything else is built from, and all the unsafe code of the crate: a spin lock,
//! the publication of lazily made memory to readers that take no lock, and the memory of the swap
//! tables.
//!
//! Invariants:
//! 1. A chunk of a [`TableDirectory`] (cluster headers) is published once, complete, and stays
//!    where it is until the directory is dropped. The swap tables ([`Pages`]) all have their places
//!    from the start, until the device is dropped. So both are type-stable: a late reader reads an
//!    old word, never foreign memory. That stands for RCU's grace period (docs/linux-swap.md, "Swap
//!    table"): nothing is freed under a reader.
//! 2. Critical sections are short and call nothing that waits, so waiting is spinning. A waiter
//!    that has spun for long calls the hook given to [`set_yield`], because a holder may have lost
//!    its CPU.
//!
//! Under `cfg(loom)` the atomics and the lock are loom's, so that the models see every exchange.

#![allow(unsafe_code)]

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

use core::ptr;
#[cfg(not(loom))]
use core::ptr::NonNull;
#[cfg(not(loom))]
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

#[cfg(loom)]
pub(crate) use model::{SpinGuard, SpinLock};
#[cfg(not(loom))]
pub use spin::{SpinGuard, SpinLock};

#[cfg(not(loom))]
mod spin {
    use super::{AtomicBool, Ordering};
    use core::cell::UnsafeCell;
    use core::ops::{Deref, DerefMut};

    /// A lock for short critical sections. It knows no owner and no queue. All of the core's are
    /// this one; what is to be compared with the core should wait in the same way.
    #[derive(Default)]
    pub struct SpinLock<T> {
        locked: AtomicBool,
        value: UnsafeCell<T>,
    }

    // SAFETY: the value is reached only through a guard, and `locked` lets one guard exist at a
    // time.
    unsafe impl<T: Send> Sync for SpinLock<T> {}

    /// Exclusive access; ends when dropped.
    pub struct SpinGuard<'a, T> {
        lock: &'a SpinLock<T>,
    }

    impl<T> SpinLock<T> {
        /// A free lock.
        pub const fn new(value: T) -> Self {
            SpinLock { locked: AtomicBool::new(false), value: UnsafeCell::new(value) }
        }

        /// Access, if the lock is free.
        #[inline]
        pub fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
            // Acquire pairs with the release in `SpinGuard::drop`.
            if self.locked.load(Ordering::Relaxed) || self.locked.swap(true, Ordering::Acquire) {
                return None;
            }
            // Made only now: a guard that is dropped unlocks.
            Some(SpinGuard { lock: self })
        }

        /// Access; waits for its holder.
        #[inline]
        pub fn lock(&self) -> SpinGuard<'_, T> {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            self.wait()
        }

        #[cold]
        fn wait(&self) -> SpinGuard<'_, T> {
            super::WAITS.fetch_add(1, Ordering::Relaxed);
            let mut spins = 0;
            loop {
                super::relax(&mut spins);
                if let Some(guard) = self.try_lock() {
                    return guard;
                }
            }
        }
    }

    impl<T> Deref for SpinGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            // SAFETY: a guard exists only while `locked` is its own (`try_lock`).
            unsafe { &*self.lock.value.get() }
        }
    }

    impl<T> DerefMut for SpinGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            // SAFETY: a guard exists only while `locked` is its own (`try_lock`); `&mut self` makes
            // this the only reference taken from this guard.
            unsafe { &mut *self.lock.value.get() }
        }
    }

    impl<T> Drop for SpinGuard<'_, T> {
        fn drop(&mut self) {
            self.lock.locked.store(false, Ordering::Release);
        }
    }
}

#[cfg(loom)]
mod model {
    use core::ops::{Deref, DerefMut};
    use loom::sync::{Condvar, Mutex};

    /// A lock whose waiters sleep: a model cannot follow spinning. (loom's own mutex alone will not
    /// do: it lets a thread that only tries wait for the holder, and so sees deadlocks where there
    /// are none.) The value is in a mutex that no thread ever waits for, so that exclusion is
    /// checked, too.
    #[derive(Default)]
    pub(crate) struct SpinLock<T> {
        locked: Mutex<bool>,
        unlocked: Condvar,
        value: std::sync::Mutex<T>,
    }

    pub(crate) struct SpinGuard<'a, T> {
        lock: &'a SpinLock<T>,
        value: Option<std::sync::MutexGuard<'a, T>>,
    }

    impl<T> SpinLock<T> {
        pub fn new(value: T) -> Self {
            SpinLock {
                locked: Mutex::new(false),
                unlocked: Condvar::new(),
                value: std::sync::Mutex::new(value),
            }
        }

        fn acquired(&self) -> SpinGuard<'_, T> {
            SpinGuard {
                lock: self,
                value: Some(self.value.try_lock().expect("one holder at a time")),
            }
        }

        pub fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
            let free =
                !core::mem::replace(&mut *self.locked.lock().expect("no holder panics"), true);
            free.then(|| self.acquired())
        }

        pub fn lock(&self) -> SpinGuard<'_, T> {
            let mut locked = self.locked.lock().expect("no holder panics");
            while *locked {
                locked = self.unlocked.wait(locked).expect("no holder panics");
            }
            *locked = true;
            drop(locked);
            self.acquired()
        }
    }

    impl<T> Deref for SpinGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.value.as_ref().expect("there until the guard is dropped")
        }
    }

    impl<T> DerefMut for SpinGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.value.as_mut().expect("there until the guard is dropped")
        }
    }

    impl<T> Drop for SpinGuard<'_, T> {
        fn drop(&mut self) {
            self.value = None;
            *self.lock.locked.lock().expect("no holder panics") = false;
            self.lock.unlocked.notify_one();
        }
    }
}

#[cfg(not(loom))]
static YIELD: AtomicPtr<fn()> = AtomicPtr::new(ptr::null_mut());

/// Installs what a long waiter calls to give up its CPU (`sched_yield`, usually). The core makes no
/// system call of its own; without a hook it only spins.
#[cfg(not(loom))]
pub fn set_yield(hook: &'static fn()) {
    YIELD.store(ptr::from_ref(hook).cast_mut(), Ordering::Release);
}

#[cfg(not(loom))]
static WAITS: AtomicU64 = AtomicU64::new(0);

/// The number of times that any [`SpinLock`] was found taken, since the process started. For
/// measurements.
#[cfg(not(loom))]
pub fn lock_waits() -> u64 {
    WAITS.load(Ordering::Relaxed)
}

/// One step of waiting; `spins` counts them.
pub(crate) fn relax(spins: &mut u32) {
    #[cfg(loom)]
    {
        *spins += 1;
        loom::thread::yield_now();
    }
    #[cfg(not(loom))]
    {
        *spins = spins.wrapping_add(1);
        if spins.is_multiple_of(256) {
            let hook = YIELD.load(Ordering::Acquire);
            if !hook.is_null() {
                // SAFETY: `set_yield` is the only writer, and what it stores is a `&'static fn()`.
                unsafe { (*hook)() };
            }
        }
        core::hint::spin_loop();
    }
}

/// Reads a word whose writers all hold the lock that the caller holds: the newest value, whatever
/// the ordering.
///
/// loom forgets another thread's read of a word once the writer has read it too, and then misses
/// the race with the write that follows; a read that counts as a write keeps it.
#[inline]
pub(crate) fn read_locked(word: &AtomicU64) -> u64 {
    #[cfg(loom)]
    return word.fetch_add(0, Ordering::AcqRel);
    #[cfg(not(loom))]
    word.load(Ordering::Relaxed)
}

/// Prefetches a word into the cache: a hint, where the processor has one.
#[inline]
pub(crate) fn prefetch(word: &AtomicU64) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    // SAFETY: a prefetch reads nothing that the program sees.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(
            word.as_ptr().cast(),
        );
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    let _ = word;
}

/// An array made chunk by chunk: `N` elements come into being together, at the first use of one of
/// them, and live until the directory is dropped. Reading takes no lock.
pub(crate) struct TableDirectory<T, const N: usize> {
    chunks: Box<[AtomicPtr<T>]>,
    made: AtomicUsize,
}

impl<T: Default, const N: usize> TableDirectory<T, N> {
    /// Room for `len` elements; none is made yet.
    pub fn new(len: usize) -> Self {
        TableDirectory {
            chunks: (0..len.div_ceil(N)).map(|_| AtomicPtr::new(ptr::null_mut())).collect(),
            made: AtomicUsize::new(0),
        }
    }

    /// Element `i`, if its chunk was made.
    #[inline]
    pub fn get(&self, i: usize) -> Option<&T> {
        // Acquire pairs with the release in `make`: the chunk's elements were written before its
        // address.
        let chunk = self.chunks.get(i / N)?.load(Ordering::Acquire);
        if chunk.is_null() {
            return None;
        }
        // SAFETY: a non-null chunk is the start of `N` initialised elements (`make`) that live as
        // long as `self` (invariant 1), and `i % N` is below `N`.
        Some(unsafe { &*chunk.add(i % N) })
    }

    /// Element `i`, making its chunk when need be. `None` when there is no memory, or no such
    /// element.
    pub fn make(&self, i: usize) -> Option<&T> {
        let place = self.chunks.get(i / N)?;
        if place.load(Ordering::Acquire).is_null() {
            let mut chunk = Vec::new();
            chunk.try_reserve_exact(N).ok()?;
            chunk.extend((0..N).map(|_| T::default()));
            let chunk = Box::into_raw(chunk.into_boxed_slice()).cast::<T>();
            if place
                .compare_exchange(ptr::null_mut(), chunk, Ordering::Release, Ordering::Relaxed)
                .is_ok()
            {
                self.made.fetch_add(1, Ordering::Relaxed);
            } else {
                // SAFETY: `chunk` came from `into_raw` just above and was not published.
                unsafe { free_chunk::<T, N>(chunk) };
            }
        }
        self.get(i)
    }

    /// Number of elements made.
    pub fn made(&self) -> usize {
        self.made.load(Ordering::Relaxed) * N
    }

    /// Bytes asked of the allocator.
    pub fn bytes(&self) -> usize {
        self.chunks.len() * size_of::<AtomicPtr<T>>() + self.made() * size_of::<T>()
    }
}

/// `M` values on memory pages of their own.
#[repr(C, align(4096))]
pub(crate) struct Paged<U, const M: usize>(pub [U; M]);

/// Memory for all tables of a device: zeros that take no memory of the machine until they are
/// written to. The core makes no system call: its user reserves the range (`mmap` with
/// `MAP_NORESERVE`, without huge pages, is what is meant) and hands it in
/// ([`crate::SwapDevice::new_in`]).
#[cfg(not(loom))]
pub struct TableMemory {
    start: NonNull<u8>,
    len: usize,
    owner: Box<dyn Send + Sync>,
}

#[cfg(not(loom))]
impl TableMemory {
    /// `len` bytes from `start` on; dropping `owner` gives them back.
    ///
    /// # Safety
    /// Until `owner` is dropped the bytes may be read and written, and nothing else does so. They
    /// read as zeros. `start` is a multiple of 4096.
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: Box<dyn Send + Sync>) -> Self {
        assert!(start.as_ptr().addr().is_multiple_of(4096), "tables lie on whole pages");
        TableMemory { start, len, owner }
    }

    /// Returns its address.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// From the allocator. What it gets for this from the system it need not write zeros to; so
    /// with the usual ones only small devices hold memory for clusters that they do not use.
    pub(crate) fn allocate(len: usize) -> Self {
        // The allocator is not asked for whole pages: for those it would write the zeros itself.
        let layout = Layout::from_size_align(len + 4095, 16)
            .expect("the tables of 2^28 slots fit an address space");
        // SAFETY: the layout's size is not 0.
        let Some(base) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout)
        };
        let gap = base.as_ptr().align_offset(4096);
        // SAFETY: the gap is at most 4095 bytes, which were asked for in addition.
        let start = unsafe { base.add(gap) };
        // SAFETY: `len` bytes are left behind the gap; they are zeros, and stay until `Zeros` is
        // dropped.
        unsafe { TableMemory::new(start, len, Box::new(Zeros { base, layout })) }
    }
}

/// Memory of the allocator.
#[cfg(not(loom))]
struct Zeros {
    base: NonNull<u8>,
    layout: Layout,
}

#[cfg(not(loom))]
impl Drop for Zeros {
    fn drop(&mut self) {
        // SAFETY: `base` was allocated with this layout, and only its owner is dropped.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

// SAFETY: memory may be given back by any thread; there is nothing else to do with it.
#[cfg(not(loom))]
unsafe impl Send for Zeros {}
// SAFETY: shared references give no access to the memory.
#[cfg(not(loom))]
unsafe impl Sync for Zeros {}

/// Pages of `M` words each that are all there from the start, as zeros. A word is found by one
/// addition, and those pages that were never written to take no memory: what keeps them is
/// [`TableMemory`].
#[cfg(not(loom))]
pub(crate) struct Pages<const M: usize> {
    first: NonNull<AtomicU64>,
    words: usize,
    /// Gives the memory back when dropped.
    _owner: Box<dyn Send + Sync>,
}

#[cfg(not(loom))]
impl<const M: usize> Pages<M> {
    /// `len` pages.
    pub fn new(len: usize, memory: TableMemory) -> Self {
        const {
            assert!(
                size_of::<Paged<AtomicU64, M>>() == M * size_of::<u64>(),
                "words lie without gaps"
            )
        };
        assert!(
            len * size_of::<Paged<AtomicU64, M>>() <= memory.len,
            "{len} tables do not fit {} bytes",
            memory.len
        );
        Pages { first: memory.start.cast(), words: len * M, _owner: memory.owner }
    }

    /// The first byte of the first page.
    pub fn start(&self) -> *const u8 {
        self.first.as_ptr().cast()
    }

    /// Page `i`.
    #[inline]
    pub fn get(&self, i: usize) -> Option<&Paged<AtomicU64, M>> {
        if i >= self.words / M {
            return None;
        }
        // SAFETY: `words / M` pages fit the memory (`new`), which is page-aligned, was zeros, a
        // value of `AtomicU64` like every other, and is written through references like this one
        // only; it stays as long as `self`.
        Some(unsafe { self.first.cast::<Paged<AtomicU64, M>>().add(i).as_ref() })
    }

    /// Word `i` of all, counted through the pages.
    #[inline]
    pub fn word(&self, i: usize) -> Option<&AtomicU64> {
        // SAFETY: word `i` lies inside the memory: pages have no gaps (`new`). It is an atomic that
        // lives as long as `self`.
        (i < self.words).then(|| unsafe { self.first.add(i).as_ref() })
    }
}

// SAFETY: the words are atomic, and their memory's owner is `Send`.
#[cfg(not(loom))]
unsafe impl<const M: usize> Send for Pages<M> {}
// SAFETY: the words are atomic; nothing else is reached through a shared reference.
#[cfg(not(loom))]
unsafe impl<const M: usize> Sync for Pages<M> {}

/// The same for models: loom's words cannot be made of zeros.
#[cfg(loom)]
pub(crate) struct Pages<const M: usize>(Box<[Paged<AtomicU64, M>]>);

#[cfg(loom)]
impl<const M: usize> Pages<M> {
    pub fn new(len: usize) -> Self {
        Pages((0..len).map(|_| Paged(core::array::from_fn(|_| AtomicU64::new(0)))).collect())
    }

    pub fn start(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }

    pub fn get(&self, i: usize) -> Option<&Paged<AtomicU64, M>> {
        self.0.get(i)
    }

    pub fn word(&self, i: usize) -> Option<&AtomicU64> {
        self.0.get(i / M).map(|page| &page.0[i % M])
    }
}

/// # Safety
/// `chunk` is the start of a boxed slice of `N` elements that nothing else uses.
unsafe fn free_chunk<T, const N: usize>(chunk: *mut T) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(chunk, N)) });
}

impl<T, const N: usize> Drop for TableDirectory<T, N> {
    fn drop(&mut self) {
        for place in &self.chunks {
            // Relaxed: `&mut self`, so it was published before.
            let chunk = place.load(Ordering::Relaxed);
            if !chunk.is_null() {
                // SAFETY: published by `make` from a boxed slice of `N`; `&mut self` says that no
                // reader is left.
                unsafe { free_chunk::<T, N>(chunk) };
            }
        }
    }
}

// SAFETY: the directory owns its elements and hands out shared references only.
unsafe impl<T: Send, const N: usize> Send for TableDirectory<T, N> {}
// SAFETY: the directory hands out shared references only; `T: Sync` allows that across threads.
unsafe impl<T: Send + Sync, const N: usize> Sync for TableDirectory<T, N> {}

/// A value published once to readers that take no lock, and kept until the cell is dropped or
/// emptied by its only owner.
pub(crate) struct Published<T>(AtomicPtr<T>);

impl<T> Default for Published<T> {
    fn default() -> Self {
        Published(AtomicPtr::new(ptr::null_mut()))
    }
}

impl<T> Published<T> {
    #[inline]
    pub fn get(&self) -> Option<&T> {
        // Acquire pairs with the release in `set`. SAFETY: a non-null pointer is a boxed value
        // published by `set`; it is freed only through `&mut self`.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// Publishes `value`, or gives it back when one is there already.
    pub fn set(&self, value: T) -> Result<(), T> {
        let value = Box::into_raw(Box::new(value));
        if self
            .0
            .compare_exchange(ptr::null_mut(), value, Ordering::Release, Ordering::Relaxed)
            .is_ok()
        {
            return Ok(());
        }
        // SAFETY: from `into_raw` just above, not published.
        Err(*unsafe { Box::from_raw(value) })
    }

    /// Takes the value out; `&mut self` says that no reader is left.
    pub fn take(&mut self) -> Option<T> {
        let value = self.0.swap(ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: a non-null pointer came from `into_raw` in `set`, and was just made unreachable.
        (!value.is_null()).then(|| *unsafe { Box::from_raw(value) })
    }
}

impl<T> Drop for Published<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

// SAFETY: the cell owns the value and hands out shared references only (`AtomicPtr` alone would ask
// nothing of `T`).
unsafe impl<T: Send> Send for Published<T> {}
// SAFETY: the cell hands out shared references only, hence `Sync`; `set` moves a value in from any
// thread, hence `Send`.
unsafe impl<T: Send + Sync> Sync for Published<T> {}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn the_lock_excludes() {
        static HOOK: fn() = std::thread::yield_now;
        set_yield(&HOOK);
        let lock = SpinLock::new(0u64);
        thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..20_000 {
                        let mut value = lock.lock();
                        let before = *value;
                        assert!(lock.try_lock().is_none());
                        *value = before + 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 80_000);
        let held = lock.lock();
        assert!(
            lock.try_lock().is_none() && lock.try_lock().is_none(),
            "a failed attempt unlocks nothing"
        );
        let before = lock_waits();
        thread::scope(|s| {
            s.spawn(|| drop(lock.lock()));
            while lock_waits() == before {
                thread::yield_now();
            }
            drop(held);
        });
        assert!(lock.try_lock().is_some());
    }

    #[test]
    fn a_value_is_published_once() {
        let mut cell = Published::default();
        assert_eq!(cell.get(), None);
        assert_eq!(cell.set(String::from("first")), Ok(()));
        assert_eq!(cell.set(String::from("second")), Err(String::from("second")));
        assert_eq!(cell.get().map(String::as_str), Some("first"));
        assert_eq!(cell.take().as_deref(), Some("first"));
        assert_eq!(cell.set(String::from("third")), Ok(()));
    }

    #[test]
    fn words_lie_one_after_the_other_and_are_zeros() {
        let pages = Pages::<512>::new(3, TableMemory::allocate(3 * 4096));
        assert!((0..3 * 512).all(|i| pages.word(i).unwrap().load(Ordering::Relaxed) == 0));
        assert!(pages.word(3 * 512).is_none() && pages.get(3).is_none());
        (0..3 * 512).for_each(|i| pages.word(i).unwrap().store(i as u64, Ordering::Relaxed));
        for page in 0..3 {
            let words = &pages.get(page).unwrap().0;
            assert!(core::ptr::from_ref(words).addr().is_multiple_of(4096));
            assert!(
                words
                    .iter()
                    .zip(page * 512..)
                    .all(|(word, i)| word.load(Ordering::Relaxed) == i as u64)
            );
        }
        let none = Pages::<512>::new(0, TableMemory::allocate(0));
        assert!(none.word(0).is_none() && none.get(0).is_none());
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn too_little_memory_for_the_tables_stops() {
        _ = Pages::<512>::new(4, TableMemory::allocate(3 * 4096));
    }

    #[test]
    fn the_owner_of_the_memory_goes_with_the_tables() {
        static DROPPED: AtomicU32 = AtomicU32::new(0);
        struct Owner(#[allow(dead_code)] Zeros);
        impl Drop for Owner {
            fn drop(&mut self) {
                DROPPED.fetch_add(1, Ordering::Relaxed);
            }
        }
        let layout = Layout::from_size_align(4096, 4096).unwrap();
        // SAFETY: the size is not 0.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        // SAFETY: zeros of its own, given back by their owner.
        let pages = Pages::<512>::new(1, unsafe {
            TableMemory::new(base, 4096, Box::new(Owner(Zeros { base, layout })))
        });
        pages.word(511).unwrap().store(1, Ordering::Relaxed);
        assert_eq!(DROPPED.load(Ordering::Relaxed), 0);
        drop(pages);
        assert_eq!(DROPPED.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_chunk_is_made_once_by_many() {
        let directory = TableDirectory::<AtomicU64, 8>::new(64);
        assert!(directory.get(3).is_none() && directory.make(64).is_none());
        thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    (0..64).for_each(|i| {
                        _ = directory.make(i).unwrap().fetch_add(1, Ordering::Relaxed)
                    })
                });
            }
        });
        assert_eq!(directory.made(), 64);
        assert!((0..64).all(|i| directory.get(i).unwrap().load(Ordering::Relaxed) == 4));
    }
}
