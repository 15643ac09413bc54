//! The functions and variables of libc that the hooks call, each with its type.
//!
//! Owns: their addresses, looked up once by the constructor. Locks: none. A call that comes earlier
//! (from another library's constructor) looks its function up itself.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::Acquire, Ordering::Release};

use swaptide_sys::Errno;
use swaptide_sys::raw::check;

unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dladdr(address: *const c_void, object: *mut Object) -> c_int;
}

/// `RTLD_NEXT`: look behind this library.
const NEXT: *mut c_void = -1isize as *mut c_void;

/// The offset of the address in a [`Symbol`], for assembly.
pub(crate) const ADDRESS_OFFSET: usize = std::mem::offset_of!(SymbolAddress, address);

/// A name and, once looked up, its address.
struct SymbolAddress {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl SymbolAddress {
    /// Null where this libc has no such symbol.
    fn address(&self) -> *mut c_void {
        let found = self.address.load(Acquire);
        if !found.is_null() {
            return found;
        }
        // SAFETY: the name is NUL-terminated; dlsym may be called from a constructor.
        let found = unsafe { dlsym(NEXT, self.name.as_ptr()) };
        self.address.store(found, Release);
        found
    }
}

/// A symbol of libc with its type: a function pointer, or a pointer to a variable.
#[repr(transparent)]
pub struct Symbol<T> {
    lookup: SymbolAddress,
    kind: PhantomData<fn() -> T>,
}

impl<T: Copy> Symbol<T> {
    /// # Safety
    /// `T` has the size of a pointer and is the type of what libc calls `name`.
    const unsafe fn new(name: &'static CStr) -> Symbol<T> {
        const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
        let lookup = SymbolAddress { name, address: AtomicPtr::new(std::ptr::null_mut()) };
        Symbol { lookup, kind: PhantomData }
    }

    /// The function or variable; `None` where this libc has none.
    #[inline]
    pub(crate) fn get(&self) -> Option<T> {
        typed(self.lookup.address())
    }

    /// The same without a look-up: `None` before [`find`].
    fn found(&self) -> Option<T> {
        typed(self.lookup.address.load(Acquire))
    }

    /// The address alone, to jump to; null where this libc has none.
    pub(crate) fn address(&self) -> *mut c_void {
        self.lookup.address()
    }
}

fn typed<T: Copy>(address: *mut c_void) -> Option<T> {
    // SAFETY: by the promise of `Symbol::new` a non-null address is a value of this type.
    (!address.is_null()).then(|| unsafe { std::mem::transmute_copy(&address) })
}

/// Declares the symbols, and the list of all of them.
macro_rules! symbols {
    ($($name:ident: $type:ty = $symbol:literal;)*) => {
        $(
            // SAFETY: the type is that of the libc headers; a variable argument list that holds
            // one word is passed as that word.
            pub static $name: Symbol<$type> = unsafe { Symbol::new($symbol) };
        )*
        static ALL: &[&SymbolAddress] = &[$(&$name.lookup),*];
    };
}

pub(crate) type CStrPtr = *const c_char;
/// A null-terminated array of texts.
pub(crate) type CStrArray = *const CStrPtr;
pub(crate) type Routine = extern "C" fn(*mut c_void) -> *mut c_void;
pub(crate) type C11Routine = extern "C" fn(*mut c_void) -> c_int;
pub(crate) type Bytes = *const c_void;
type Exec = unsafe extern "C" fn(CStrPtr, CStrArray, CStrArray) -> c_int;
type Spawn = unsafe extern "C" fn(*mut c_int, CStrPtr, Bytes, Bytes, CStrArray, CStrArray) -> c_int;
type OpenFn = unsafe extern "C" fn(CStrPtr, c_int, c_uint) -> c_int;
type OpenAtFn = unsafe extern "C" fn(c_int, CStrPtr, c_int, c_uint) -> c_int;
type ForkHandler = extern "C" fn();
type Open2 = unsafe extern "C" fn(CStrPtr, c_int) -> c_int;
type OpenAt2 = unsafe extern "C" fn(c_int, CStrPtr, c_int) -> c_int;
// Its third argument is read as one word.
type Fcntl = unsafe extern "C" fn(c_int, c_int, ...) -> c_int;

symbols! {
    CREATE: unsafe extern "C" fn(*mut c_void, Bytes, Routine, *mut c_void) -> c_int
        = c"pthread_create";
    THRD_CREATE: unsafe extern "C" fn(*mut c_void, C11Routine, *mut c_void) -> c_int
        = c"thrd_create";
    EXECVE: Exec = c"execve";
    EXECVPE: Exec = c"execvpe";
    FEXECVE: unsafe extern "C" fn(c_int, CStrArray, CStrArray) -> c_int = c"fexecve";
    SPAWN: Spawn = c"posix_spawn";
    SPAWNP: Spawn = c"posix_spawnp";
    CLONE: unsafe extern "C" fn() = c"clone";
    PLAIN_FORK: extern "C" fn() -> c_int = c"_Fork";
    SYSCALL: unsafe extern "C" fn() = c"syscall";
    MUTEX_INIT: unsafe extern "C" fn(*mut c_void, Bytes) -> c_int = c"pthread_mutex_init";
    MUTEX_DESTROY: unsafe extern "C" fn(*mut c_void) -> c_int = c"pthread_mutex_destroy";
    KEY_CREATE: unsafe extern "C" fn(*mut c_uint, extern "C" fn(*mut c_void)) -> c_int =
        c"pthread_key_create";
    SET_SPECIFIC: unsafe extern "C" fn(c_uint, Bytes) -> c_int = c"pthread_setspecific";
    RSEQ_OFFSET: *const isize = c"__rseq_offset";
    IOCTL: unsafe extern "C" fn(c_int, c_ulong, usize) -> c_int = c"ioctl";
    TLS_GET_ADDR: unsafe extern "C" fn(*const c_void) -> *mut c_void = c"__tls_get_addr";
    GNU_VERSION: extern "C" fn() -> CStrPtr = c"gnu_get_libc_version";
    REGISTER_ATFORK: unsafe extern "C" fn(ForkHandler, ForkHandler, ForkHandler, *mut c_void)
        -> c_int = c"__register_atfork";
    REALLOC: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void = c"realloc";
    VMSPLICE: unsafe extern "C" fn(c_int, Bytes, usize, c_uint) -> isize = c"vmsplice";
    SEND: unsafe extern "C" fn(c_int, Bytes, usize, c_int) -> isize = c"send";
    SENDTO: unsafe extern "C" fn(c_int, Bytes, usize, c_int, Bytes, c_uint) -> isize = c"sendto";
    SENDMSG: unsafe extern "C" fn(c_int, Bytes, c_int) -> isize = c"sendmsg";
    SENDMMSG: unsafe extern "C" fn(c_int, Bytes, c_uint, c_int) -> c_int = c"sendmmsg";
    SETSOCKOPT: unsafe extern "C" fn(c_int, c_int, c_int, Bytes, c_uint) -> c_int = c"setsockopt";
    OPEN: OpenFn = c"open";
    OPEN64: OpenFn = c"open64";
    OPENAT: OpenAtFn = c"openat";
    OPENAT64: OpenAtFn = c"openat64";
    FCNTL: Fcntl = c"fcntl";
    FCNTL64: Fcntl = c"fcntl64";
    DUP2: unsafe extern "C" fn(c_int, c_int) -> c_int = c"dup2";
    DUP3: unsafe extern "C" fn(c_int, c_int, c_int) -> c_int = c"dup3";
    OPEN_2: Open2 = c"__open_2";
    OPEN64_2: Open2 = c"__open64_2";
    OPENAT_2: OpenAt2 = c"__openat_2";
    OPENAT64_2: OpenAt2 = c"__openat64_2";
    USABLE_SIZE: unsafe extern "C" fn(*mut c_void) -> usize = c"malloc_usable_size";
    SINGLE_THREADED: *const u8 = c"__libc_single_threaded";
}

/// A loaded object, as `dladdr` tells of it.
#[repr(C)]
pub(crate) struct Object {
    pub path: *const c_char,
    base: usize,
    symbol: *const c_char,
    address: usize,
}

/// The object that an address lies in.
pub(crate) fn object_of(address: *const c_void) -> Option<Object> {
    let mut object =
        Object { path: std::ptr::null(), base: 0, symbol: std::ptr::null(), address: 0 };
    // SAFETY: any address may be asked for; the struct is the one that dladdr fills.
    (unsafe { dladdr(address, &raw mut object) } != 0).then_some(object)
}

/// The function that libc itself has under a name; `None` where another library's would come first.
pub(crate) fn libcs_own(name: &CStr) -> Option<*mut c_void> {
    let base = |address: *const c_void| object_of(address).map(|object| object.base);
    // No library but libc has this one.
    // SAFETY: the name is NUL-terminated.
    let libc = base(unsafe { dlsym(NEXT, c"gnu_get_libc_version".as_ptr()) })?;
    // SAFETY: the name is NUL-terminated.
    let found = unsafe { dlsym(NEXT, name.as_ptr()) };
    (base(found) == Some(libc)).then_some(found)
}

/// Bytes of a block, by the allocator that `realloc` is of; `None` where it does not tell.
///
/// # Safety
/// `block` is one of this allocator and is not freed meanwhile.
pub(crate) unsafe fn usable_size(block: *mut c_void) -> Option<usize> {
    // Another allocator's function would look for its own words next to the block.
    let size = USABLE_SIZE.get().filter(|_| SAME_ALLOCATOR.load(Acquire))?;
    // SAFETY: the caller's promise.
    Some(unsafe { size(block) })
}

static SAME_ALLOCATOR: AtomicBool = AtomicBool::new(false);

/// False only while libc says that the process has one thread.
pub(crate) fn has_threads() -> bool {
    // SAFETY: libc's variable, a char, which is never unloaded.
    SINGLE_THREADED.found().is_none_or(|word| unsafe { word.read_volatile() } == 0)
}

/// The calling thread's control block.
pub(crate) fn thread_pointer() -> usize {
    let block: usize;
    // SAFETY: on x86-64 the first word of the control block is its own address.
    unsafe {
        std::arch::asm!(
            "mov {}, fs:[0]",
            out(reg) block,
            options(nostack, preserves_flags, readonly)
        )
    };
    block
}

/// Returns the offset of a thread's rseq area from the thread pointer; `None` in a libc that has
/// none.
pub(crate) fn rseq_offset() -> Option<isize> {
    // SAFETY: libc's constant, a ptrdiff_t, which is never unloaded.
    RSEQ_OFFSET.found().map(|at| unsafe { at.read_volatile() })
}

/// Looks all symbols up: in a signal handler or a vforked child dlsym must not be called.
pub(crate) fn find() {
    for lookup in ALL {
        lookup.address();
    }
    let base = |address| object_of(address).map(|object| object.base);
    let (realloc, usable) = (base(REALLOC.address()), base(USABLE_SIZE.address()));
    SAME_ALLOCATOR.store(realloc.is_some() && realloc == usable, Release);
}

/// Sets the calling thread's `errno`.
pub(crate) fn set_errno(errno: Errno) {
    restore_errno(errno.raw_os_error());
}

/// Sets the calling thread's `errno` to what [`errno`] has returned, which may be 0.
pub(crate) fn restore_errno(errno: c_int) {
    // SAFETY: libc's own location for this thread.
    unsafe { *__errno_location() = errno };
}

/// The calling thread's `errno`.
pub(crate) fn errno() -> c_int {
    // SAFETY: libc's own location for this thread.
    unsafe { *__errno_location() }
}

/// Returns what a function of libc returns for a raw result of the kernel: the value, or -1 with
/// `errno` set.
pub(crate) fn libc_result(word: isize) -> c_long {
    match check(word) {
        Ok(value) => value as c_long,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}
