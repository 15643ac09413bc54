//! The functions of libc behind ours.
//!
//! Owns: their addresses, found once by the constructor. Locks: none. A call that comes earlier
//! (another library's constructor) looks its function up itself.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::Acquire, Ordering::Release};

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dladdr(address: *const c_void, object: *mut Object) -> c_int;
}

/// `RTLD_NEXT`.
const NEXT: *mut c_void = -1isize as *mut c_void;

/// Where the address lies in a [`Real`], for assembly.
pub const FOUND: usize = std::mem::offset_of!(Real, found);

/// A function we stand in front of.
pub struct Real {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Real {
    const fn new(name: &'static CStr) -> Real {
        Real { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Its address; null where this libc has none.
    pub fn address(&self) -> *mut c_void {
        let found = self.found.load(Acquire);
        if !found.is_null() {
            return found;
        }
        // SAFETY: the name is NUL-terminated; dlsym may be called from a constructor.
        let found = unsafe { dlsym(NEXT, self.name.as_ptr()) };
        self.found.store(found, Release);
        found
    }
}

pub static CREATE: Real = Real::new(c"pthread_create");
pub static THRD_CREATE: Real = Real::new(c"thrd_create");
pub static EXECVE: Real = Real::new(c"execve");
pub static EXECVPE: Real = Real::new(c"execvpe");
pub static FEXECVE: Real = Real::new(c"fexecve");
pub static EXECVEAT: Real = Real::new(c"execveat");
pub static SPAWN: Real = Real::new(c"posix_spawn");
pub static SPAWNP: Real = Real::new(c"posix_spawnp");
pub static CLONE: Real = Real::new(c"clone");
pub static PLAIN_FORK: Real = Real::new(c"_Fork");
pub static SYSCALL: Real = Real::new(c"syscall");
pub static MUTEX_INIT: Real = Real::new(c"pthread_mutex_init");
pub static MUTEX_DESTROY: Real = Real::new(c"pthread_mutex_destroy");
pub static KEY_CREATE: Real = Real::new(c"pthread_key_create");
pub static SET_SPECIFIC: Real = Real::new(c"pthread_setspecific");
static RSEQ_OFFSET: Real = Real::new(c"__rseq_offset");
pub static IOCTL: Real = Real::new(c"ioctl");
pub static REALLOC: Real = Real::new(c"realloc");
pub static VMSPLICE: Real = Real::new(c"vmsplice");
pub static SEND: Real = Real::new(c"send");
pub static SENDTO: Real = Real::new(c"sendto");
pub static SENDMSG: Real = Real::new(c"sendmsg");
pub static SENDMMSG: Real = Real::new(c"sendmmsg");
pub static SETSOCKOPT: Real = Real::new(c"setsockopt");
pub static OPEN: Real = Real::new(c"open");
pub static OPEN64: Real = Real::new(c"open64");
pub static OPENAT: Real = Real::new(c"openat");
pub static OPENAT64: Real = Real::new(c"openat64");
pub static FCNTL: Real = Real::new(c"fcntl");
pub static FCNTL64: Real = Real::new(c"fcntl64");
pub static OPEN_2: Real = Real::new(c"__open_2");
pub static OPEN64_2: Real = Real::new(c"__open64_2");
pub static OPENAT_2: Real = Real::new(c"__openat_2");
pub static OPENAT64_2: Real = Real::new(c"__openat64_2");
static USABLE_SIZE: Real = Real::new(c"malloc_usable_size");
static THREADLESS: Real = Real::new(c"__libc_single_threaded");

/// A loaded object, as `dladdr` tells of it.
#[repr(C)]
pub struct Object {
    pub path: *const c_char,
    base: usize,
    symbol: *const c_char,
    address: usize,
}

/// The object that an address lies in.
pub fn object_of(address: *const c_void) -> Option<Object> {
    let mut object =
        Object { path: std::ptr::null(), base: 0, symbol: std::ptr::null(), address: 0 };
    // SAFETY: any address may be asked for; the struct is the one that dladdr fills.
    (unsafe { dladdr(address, &raw mut object) } != 0).then_some(object)
}

/// `malloc_usable_size` of the allocator that `realloc` is of; null where it has none.
pub fn usable_size() -> *mut c_void {
    // Another allocator's function would look for its own words beside the block.
    if SAME_ALLOCATOR.load(Acquire) { USABLE_SIZE.address() } else { std::ptr::null_mut() }
}

static SAME_ALLOCATOR: AtomicBool = AtomicBool::new(false);

/// False only while libc says that the process has one thread.
pub fn has_threads() -> bool {
    let word = THREADLESS.found.load(Acquire).cast::<u8>();
    // SAFETY: not null, it is the address of libc's variable, a char, which is never unloaded.
    word.is_null() || unsafe { word.read_volatile() } == 0
}

/// The calling thread's control block.
pub fn thread_pointer() -> usize {
    let block: usize;
    // SAFETY: on x86-64 the first word of the control block is its own address.
    unsafe {
        std::arch::asm!("mov {}, fs:[0]", out(reg) block, options(nostack, preserves_flags, readonly))
    };
    block
}

/// Where libc keeps a thread's rseq area, from the thread pointer on; `None` in a libc that has
/// none.
pub fn rseq_offset() -> Option<isize> {
    let at = RSEQ_OFFSET.found.load(Acquire).cast::<isize>();
    // SAFETY: not null, it is the address of libc's constant, a ptrdiff_t.
    (!at.is_null()).then(|| unsafe { at.read_volatile() })
}

/// Finds them all: later, in a signal handler or a vforked child, there is no looking up.
pub fn find() {
    for real in [
        &CREATE,
        &THRD_CREATE,
        &EXECVE,
        &EXECVPE,
        &FEXECVE,
        &EXECVEAT,
        &SPAWN,
        &SPAWNP,
        &CLONE,
        &PLAIN_FORK,
        &SYSCALL,
        &MUTEX_INIT,
        &MUTEX_DESTROY,
        &RSEQ_OFFSET,
        &IOCTL,
        &REALLOC,
        &VMSPLICE,
        &SEND,
        &SENDTO,
        &SENDMSG,
        &SENDMMSG,
        &SETSOCKOPT,
        &OPEN,
        &OPEN64,
        &OPENAT,
        &OPENAT64,
        &FCNTL,
        &FCNTL64,
        &OPEN_2,
        &OPEN64_2,
        &OPENAT_2,
        &OPENAT64_2,
        &USABLE_SIZE,
        &THREADLESS,
    ] {
        real.address();
    }
    let base = |real: &Real| object_of(real.address()).map(|object| object.base);
    SAME_ALLOCATOR.store(base(&REALLOC).is_some() && base(&REALLOC) == base(&USABLE_SIZE), Release);
}

/// Sets the calling thread's `errno`.
pub fn set_errno(errno: c_int) {
    // SAFETY: libc's own location for this thread.
    unsafe { *__errno_location() = errno };
}

/// The calling thread's `errno`.
pub fn errno() -> c_int {
    // SAFETY: libc's own location for this thread.
    unsafe { *__errno_location() }
}

/// What a libc function makes of the kernel's word: the value, or -1 and `errno`.
pub fn libc_result(word: isize) -> c_long {
    if (-4095..0).contains(&word) {
        set_errno(-word as c_int);
        return -1;
    }
    word as c_long
}
