//! Words of the program that the kernel reads or writes without waiting for a userfaultfd.
//!
//! Finds them at the calls that announce them, and has their pages pinned
//! ([`crate::pages::pinned`]):
//!
//! - the control block of a thread: `clear_child_tid`, the head of its robust list, its rseq area;
//! - mutexes that are robust or inherit priorities, from `pthread_mutex_init` on. A mutex made by
//!   an initialiser is neither;
//! - what `set_tid_address`, `set_robust_list`, `rseq` and `clone` name, through libc's `syscall`
//!   and `clone`;
//! - what a futex operation that writes is called for through `syscall`. Such an operation fails
//!   with `EFAULT` on a page that is out. It is then made again; for a PI futex the page is pinned
//!   first.
//!
//! Owns: two flags. Locks: none; nothing is allocated. The same calls made by a bare instruction
//! are not seen (`docs/semantics.md`).

use std::ffi::{c_int, c_void};
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
};

use swaptide_sys::Errno;
use swaptide_sys::raw::syscall6;
use swaptide_sys::thread::{Tid, gettid};

use crate::pages::pinned;
use crate::probe::read;
use crate::process;
use crate::real;
use crate::seccomp;
use crate::shmem;

/// The end of the words that the kernel knows in a control block of glibc, but for the rseq area.
const CONTROL_BLOCK_BYTES: usize = 0x900;
const RSEQ_BYTES: usize = 32;

/// Pins the control block of the calling thread: it starts at the thread pointer.
pub(crate) fn pin_own_block() {
    if real::GNU_VERSION.get().is_none() {
        // Another libc's is elsewhere, and smaller.
        return;
    }
    let block = real::thread_pointer();
    let tid = seccomp::own_tid();
    let pin = |at, len| {
        shmem::keep(at, len);
        pinned::pin_for_thread(at, len, tid);
        // SAFETY: memory of this thread's own control block.
        unsafe { pinned::make_resident(at, len) };
    };
    pin(block, CONTROL_BLOCK_BYTES);
    if let Some(offset) = real::rseq_offset() {
        pin(block.wrapping_add_signed(offset), RSEQ_BYTES);
    }
}

type Mutex = *mut c_void;

const MUTEX_BYTES: usize = 40;
/// The offset of the kind of a mutex in glibc's ABI, as its static initialisers write it.
const KIND_AT: usize = 16;
const ROBUST: c_int = 16;
const INHERITS: c_int = 32;

/// A mutex was pinned in this process or its parent: until then none has to be looked at.
static ANY_MUTEX: AtomicBool = AtomicBool::new(false);

/// True if the kernel changes the word of a mutex by itself.
///
/// # Safety
/// It is initialised.
unsafe fn is_kernels(mutex: Mutex) -> bool {
    // SAFETY: the caller's; the offset is of the ABI.
    let kind = unsafe { mutex.byte_add(KIND_AT).cast::<c_int>().read_volatile() };
    // A destroyed one has -1 there.
    kind > 0 && kind & (ROBUST | INHERITS) != 0
}

/// Stands in front of libc's `pthread_mutex_init`: the page of a mutex that is robust or inherits
/// priorities stays.
///
/// # Safety
/// As for pthread_mutex_init(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pthread_mutex_init(mutex: Mutex, attr: *const c_void) -> c_int {
    let Some(init) = real::MUTEX_INIT.get() else { return Errno::NOSYS.raw_os_error() };
    // SAFETY: the caller's own arguments.
    let result = unsafe { init(mutex, attr) };
    // SAFETY: it was initialised just now.
    if result == 0 && !attr.is_null() && unsafe { is_kernels(mutex) } {
        ANY_MUTEX.store(true, Relaxed);
        shmem::keep(mutex as usize, MUTEX_BYTES);
        pinned::pin(mutex as usize, MUTEX_BYTES);
        // SAFETY: the program's mutex.
        unsafe { pinned::make_resident(mutex as usize, MUTEX_BYTES) };
    }
    result
}

/// Stands in front of libc's `pthread_mutex_destroy`.
///
/// # Safety
/// As for pthread_mutex_destroy(3).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn pthread_mutex_destroy(mutex: Mutex) -> c_int {
    let Some(destroy) = real::MUTEX_DESTROY.get() else { return Errno::NOSYS.raw_os_error() };
    // SAFETY: the caller destroys an initialised mutex.
    let unpin = ANY_MUTEX.load(Relaxed) && unsafe { is_kernels(mutex) };
    // SAFETY: the caller's own argument.
    let result = unsafe { destroy(mutex) };
    if result == 0 && unpin {
        pinned::unpin(mutex as usize, MUTEX_BYTES);
    }
    result
}

pub(crate) const SYS_FUTEX: usize = linux_raw_sys::general::__NR_futex as usize;
const EFAULT: isize = -(linux_raw_sys::errno::EFAULT as isize);
const FUTEX_CMD_MASK: usize = linux_raw_sys::general::FUTEX_CMD_MASK as u32 as usize;
const FUTEX_PRIVATE_FLAG: usize = linux_raw_sys::general::FUTEX_PRIVATE_FLAG as usize;
/// Times an operation is made again that fails with `EFAULT`. Each finds the page in memory, unless
/// it went out again within microseconds; memory that is not the caller's fails each time.
const MAX_TRIES: usize = 64;
/// Most pages pinned for futexes that are used by raw system calls; their end is not known.
const RAW_PAGES: usize = 4096;
static RAW_PINNED: AtomicUsize = AtomicUsize::new(0);

/// The words that an operation writes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Writes {
    /// Nothing, or by way of a page fault that is waited for.
    Nothing,
    /// The second word, once.
    Second,
    /// The first word, and the kernel keeps state for it.
    PiFirst,
    /// The second word, and the kernel keeps state for it.
    PiSecond,
}

fn writes(operation: usize) -> Writes {
    match operation & FUTEX_CMD_MASK {
        // FUTEX_WAKE_OP
        5 => Writes::Second,
        // FUTEX_LOCK_PI, FUTEX_UNLOCK_PI, FUTEX_TRYLOCK_PI, FUTEX_LOCK_PI2
        6 | 7 | 8 | 13 => Writes::PiFirst,
        // FUTEX_WAIT_REQUEUE_PI, FUTEX_CMP_REQUEUE_PI
        11 | 12 => Writes::PiSecond,
        _ => Writes::Nothing,
    }
}

/// futex(2) as the program meant it. Returns the raw result of the system call.
pub(crate) fn futex(a: [usize; 6]) -> isize {
    // SAFETY: the program's own arguments.
    let call = || unsafe { syscall6(SYS_FUTEX as u32, a) } as isize;
    let word = match writes(a[1]) {
        Writes::Nothing => return call(),
        Writes::PiFirst => a[0],
        Writes::Second | Writes::PiSecond => a[4],
    };
    let is_pi = writes(a[1]) != Writes::Second;
    if is_pi
        && word % 4 == 0
        && RAW_PINNED.load(Relaxed) < RAW_PAGES
        && pinned::pin_permanently(word, 4)
    {
        RAW_PINNED.fetch_add(1, Relaxed);
        shmem::keep(word, 4);
        pinned::await_taking();
        fetch(word, a[1]);
    }
    let mut result = call();
    for _ in 0..MAX_TRIES {
        if result != EFAULT || !fetch(a[0], a[1]) || (word != a[0] && !fetch(word, a[1])) {
            break;
        }
        result = call();
    }
    result
}

/// Has the page of a futex word in memory, by an operation that only reads it: one that the program
/// may use where it may use the other. A wait of no time would read it as well, but be a waiter for
/// a moment, for which others' operations on a PI futex answer with `EINVAL`, and on which a
/// wake-up may be spent. A requeue of no waiter queues none. False if the word cannot be read.
fn fetch(word: usize, operation: usize) -> bool {
    const FUTEX_CMP_REQUEUE: usize = linux_raw_sys::general::FUTEX_CMP_REQUEUE as usize;
    // SAFETY: the kernel reads the word; no waiter is woken or requeued.
    let result = unsafe {
        syscall6(
            SYS_FUTEX as u32,
            [word, FUTEX_CMP_REQUEUE | operation & FUTEX_PRIVATE_FLAG, 0, 0, word, 0],
        )
    } as isize;
    result != EFAULT
}

/// The program has set a robust list of its own.
static OWN_LISTS: AtomicBool = AtomicBool::new(false);
const SYS_GET_ROBUST_LIST: u32 = linux_raw_sys::general::__NR_get_robust_list;
/// Entries of a list that the kernel walks at most.
const MAX_LIST_ENTRIES: usize = 2048;
/// Bytes of a list's head.
const LIST_HEAD_BYTES: usize = 24;

/// A word that the kernel was told of by a raw system call: its page stays.
pub(crate) fn named(addr: usize, len: usize) {
    if addr == 0 {
        return;
    }
    shmem::keep(addr, len);
    if pinned::pin_permanently(addr, len) {
        pinned::await_taking();
        if seccomp::is() {
            return;
        }
        // By the call that the engine needs anyway: a filter of the program's may end it for
        // another.
        fetch(addr & !3, FUTEX_PRIVATE_FLAG);
        fetch(addr.wrapping_add(len - 1) & !3, FUTEX_PRIVATE_FLAG);
    }
}

/// The calling thread's robust list begins at `head` from now on.
pub(crate) fn named_list(head: usize) {
    OWN_LISTS.store(true, Relaxed);
    call_at_end();
    named(head, LIST_HEAD_BYTES);
}

/// Libc's key whose destructor is [`end_of_thread`], and 1 more; 0: none yet.
static KEY: AtomicU32 = AtomicU32::new(0);

/// Has libc call [`ending`] when the calling thread ends in whatever way: by a return, by
/// `pthread_exit`, or cancelled.
fn call_at_end() {
    let (Some(create), Some(set)) = (real::KEY_CREATE.get(), real::SET_SPECIFIC.get()) else {
        return;
    };
    if KEY.load(Acquire) == 0 {
        let mut key = 0;
        // SAFETY: `key` is written; the destructor is a function of this type.
        if unsafe { create(&raw mut key, end_of_thread) } != 0 {
            return;
        }
        // Two threads may have made one each: the second is not used.
        let _ = KEY.compare_exchange(0, key + 1, AcqRel, Acquire);
    }
    // SAFETY: the key was made above; the value is only compared with null.
    unsafe { set(KEY.load(Acquire) - 1, std::ptr::without_provenance(1)) };
}

extern "C" fn end_of_thread(_value: *mut c_void) {
    ending();
}

/// The calling thread is about to end: the kernel must find the entries of a robust list that is
/// the program's own. They are pinned until the thread is gone.
pub(crate) fn ending() {
    if !OWN_LISTS.load(Relaxed) || seccomp::is() || process::engine().is_none() {
        return;
    }
    let (mut head, mut len) = (0usize, 0usize);
    let (head_at, len_at) = ((&raw mut head) as usize, (&raw mut len) as usize);
    // SAFETY: the kernel writes two words.
    if unsafe { syscall6(SYS_GET_ROBUST_LIST, [0, head_at, len_at, 0, 0, 0]) } != 0 || head == 0 {
        return;
    }
    let tid = gettid();
    pin_entries(head, Some(tid));
    pinned::await_taking();
    pin_entries(head, None);
}

/// Reads the entries of a list as the kernel does, and pins them first where `tid` is given.
fn pin_entries(head: usize, tid: Option<Tid>) {
    let mut words = [0u8; LIST_HEAD_BYTES];
    if !read(head, &mut words) {
        return;
    }
    let word =
        |at: usize| usize::from_ne_bytes(words[at * 8..at * 8 + 8].try_into().expect("8 bytes"));
    let offset = word(1);
    let see = |entry: usize| {
        let (entry, mut next) = (entry & !1, [0u8; 8]);
        let futex = entry.wrapping_add(offset);
        if let Some(tid) = tid {
            pinned::pin_for_thread(entry, 8, tid);
            pinned::pin_for_thread(futex, 4, tid);
        }
        (read(entry, &mut next) && read(futex, &mut [0u8; 4])).then_some(usize::from_ne_bytes(next))
    };
    let mut at = word(0);
    for _ in 0..MAX_LIST_ENTRIES {
        if at & !1 == head {
            break;
        }
        match see(at) {
            Some(next) => at = next,
            None => break,
        }
    }
    if word(2) != 0 {
        see(word(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_futex_call_fails_as_in_kernel() {
        // LOCK_PI of a word in no mapping, of one that is misaligned, and WAKE_OP of the same.
        let mut word = 0u32;
        let at = (&raw mut word) as usize;
        assert_eq!(futex([4096, 6 | FUTEX_PRIVATE_FLAG, 0, 0, 0, 0]), EFAULT);
        assert_eq!(futex([at + 1, 6 | FUTEX_PRIVATE_FLAG, 0, 0, 0, 0]), -22);
        assert_eq!(futex([at, 5 | FUTEX_PRIVATE_FLAG, 1, 1, 4096, 0]), EFAULT);
        // FUTEX_OP(SET, 9, EQ, 0)
        assert_eq!(futex([at, 5 | FUTEX_PRIVATE_FLAG, 1, 1, at, 9 << 12]), 0);
        assert_eq!(word, 9);
    }
}
