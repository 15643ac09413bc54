//! One program is given the agent: its first thread is stopped, made to map the library and to
//! start a thread in it.
//!
//! Owns the layout of the memory that the new thread begins with, low to high:
//!
//! ```text
//!   arguments and texts | stack | thread-locals, zero | thread control page
//!                               ^ first stack frame   ^ thread pointer
//! ```
//!
//! The thread copies what it needs and unmaps it. Parts that are not written are the file's own
//! pages where the program has one thread and can open it; elsewhere (another root or mount
//! namespace) they are copied.
//!
//! Invariant: what fails half way leaves nothing behind; the program continues as before.
//!
//! Locks: none.

use linux_raw_sys::general as k;
use swaptide_ipc::injected::{
    ARGS_BYTES, INJECTED_FRAME_BYTES, InjectedArgs, InjectedRange, TLS_BYTES,
};
use swaptide_sys::process::{ProcInfo, can_compare, processes};
use swaptide_sys::remote::Remote;
use swaptide_sys::withdraw::LEFT_CODE;
use swaptide_sys::{Errno, PAGE_SIZE};

use super::image::{AgentImage, LibraryPart};

const STACK_BYTES: u64 = 64 << 10;
/// Room for the arguments, the socket's name and the paths.
const TEXT_BYTES: u64 = 4 * PAGE_SIZE as u64;
const MEMORY_BYTES: u64 = TEXT_BYTES + STACK_BYTES + TLS_BYTES as u64 + PAGE_SIZE as u64;
/// `struct stat` of x86-64: device and inode are its first two words.
const STAT_BYTES: usize = 144;
/// Pages in a row that are looked at.
const MAX_LEFT_PAGES: usize = 64;
const AT_FDCWD: u64 = -100i64 as u64;
const NO_FD: u64 = -1i64 as u64;

/// What the agent of a program is told.
pub(super) struct AgentTexts {
    pub socket: Vec<u8>,
    /// Path of the log; empty: none.
    pub log: Vec<u8>,
}

/// # Safety
/// The arguments are those of an mmap(2) that replaces nothing of the program's.
unsafe fn map(
    remote: &Remote,
    at: u64,
    len: u64,
    protection: u32,
    flags: u32,
    file: Option<(u64, u64)>,
) -> Result<u64, Errno> {
    let (fd, offset) = file.unwrap_or((NO_FD, 0));
    let flags = flags | k::MAP_PRIVATE | if file.is_none() { k::MAP_ANONYMOUS } else { 0 };
    let words = [at, len, protection.into(), flags.into(), fd, offset];
    // SAFETY: the caller's promise.
    unsafe { remote.call(k::__NR_mmap, words) }
}

/// Unmaps a part of the program's memory when dropped.
struct Unmapping<'a> {
    remote: &'a Remote,
    start: u64,
    len: u64,
}

impl Drop for Unmapping<'_> {
    fn drop(&mut self) {
        // SAFETY: memory that this module has mapped and nothing uses.
        let _ = unsafe { self.remote.call(k::__NR_munmap, [self.start, self.len, 0, 0, 0, 0]) };
    }
}

/// Puts the agent into a stopped program. `is_forked`: the process has executed nothing.
///
/// # Errors
/// The error of a call that it was made to make; `SRCH` when it is gone; `BUSY` when it runs on
/// another process's memory.
pub(super) fn put_in(
    remote: &Remote,
    image: &AgentImage,
    texts: &AgentTexts,
    is_forked: bool,
) -> Result<(), Errno> {
    unmap_left(remote);
    if is_forked && !can_compare() {
        look_for_sharers(remote)?;
    }
    let read_write = k::PROT_READ | k::PROT_WRITE;
    // SAFETY: the kernel chooses free addresses.
    let memory = unsafe { map(remote, 0, MEMORY_BYTES, read_write, k::MAP_NORESERVE, None) }?;
    let unused_memory = Unmapping { remote, start: memory, len: MEMORY_BYTES };
    // SAFETY: as above.
    let base = unsafe { map(remote, 0, image.span, k::PROT_NONE, k::MAP_NORESERVE, None) }?;
    let unused_image = Unmapping { remote, start: base, len: image.span };
    // Another thread could meet, close or replace the descriptor.
    let file = if remote.is_alone() { open(remote, memory, image) } else { None };
    let mapped = image.parts.iter().try_for_each(|part| map_part(remote, image, base, file, part));
    if let Some(fd) = file {
        // SAFETY: the descriptor was opened above, for this.
        unsafe { remote.call(k::__NR_close, [fd, 0, 0, 0, 0, 0]) }?;
    }
    mapped?;
    let stack_top = memory + TEXT_BYTES + STACK_BYTES;
    let thread_pointer = stack_top + TLS_BYTES as u64;
    write_control_page(remote, thread_pointer)?;
    write_arguments(remote, memory, (base, image.span), texts)?;
    let stack = stack_top - INJECTED_FRAME_BYTES;
    // SAFETY: memory of this module's own.
    unsafe { remote.write(stack, &memory.to_le_bytes()) }?;
    // SAFETY: the library is mapped and relocated; its code takes these arguments from the stack
    // and never returns.
    unsafe { remote.start_thread(base + image.start, stack, thread_pointer) }?;
    std::mem::forget((unused_memory, unused_image));
    Ok(())
}

/// Fails if what is mapped in a process is in another one, too.
fn look_for_sharers(remote: &Remote) -> Result<(), Errno> {
    let mut random = [0u8; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    // Half of the address space: what is in the other half lies together near its end.
    let at = (u64::from_le_bytes(random) >> 18).max(1 << 32) & !(PAGE_SIZE as u64 - 1);
    let flags = k::MAP_NORESERVE | k::MAP_FIXED_NOREPLACE;
    // SAFETY: nothing is replaced.
    unsafe { map(remote, at, PAGE_SIZE as u64, k::PROT_NONE, flags, None) }?;
    let _mapped = Unmapping { remote, start: at, len: PAGE_SIZE as u64 };
    let start = format!("{at:08x}-");
    let has = |info: &ProcInfo| {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", info.pid));
        maps.is_ok_and(|maps| maps.lines().any(|line| line.starts_with(&start)))
    };
    let mut others = processes()?.into_iter().filter(|info| info.pid != remote.tid());
    if others.any(|info| has(&info)) { Err(Errno::BUSY) } else { Ok(()) }
}

/// Unmaps the pages of code that agents before have left behind.
fn unmap_left(remote: &Remote) {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", remote.tid())).unwrap_or_default();
    for line in maps.lines().filter(|line| line.contains(" r-xp 00000000 00:00 0")) {
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let range = range.and_then(|(start, end)| Some((number(start)?, number(end)?)));
        let Some((start, end)) = range else { continue };
        for at in (start..end).step_by(PAGE_SIZE).take(MAX_LEFT_PAGES) {
            let mut code = [0u8; LEFT_CODE.len()];
            if remote.read(at, &mut code).is_err() || code != LEFT_CODE {
                break;
            }
            // SAFETY: a page of swaptide's own that no thread runs.
            let _ = unsafe { remote.call(k::__NR_munmap, [at, PAGE_SIZE as u64, 0, 0, 0, 0]) };
        }
    }
}

/// Opens the library in the program. `None` where that finds no such file, or another one.
fn open(remote: &Remote, memory: u64, image: &AgentImage) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let mut path = image.path.as_os_str().as_bytes().to_vec();
    path.push(0);
    if path.len() as u64 > TEXT_BYTES {
        return None;
    }
    // SAFETY: memory of this module's own.
    unsafe { remote.write(memory, &path) }.ok()?;
    let flags = u64::from(k::O_RDONLY | k::O_CLOEXEC | k::O_NONBLOCK | k::O_NOCTTY);
    // SAFETY: a new descriptor, which is closed again.
    let fd = unsafe { remote.call(k::__NR_openat, [AT_FDCWD, memory, flags, 0, 0, 0]) }.ok()?;
    // SAFETY: the struct fits the memory, which is this module's own.
    let told = unsafe { remote.call(k::__NR_fstat, [fd, memory, 0, 0, 0, 0]) };
    let mut stat = [0u8; STAT_BYTES];
    let word = |stat: &[u8], at: usize| stat[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
    let same = told.is_ok()
        && remote.read(memory, &mut stat).is_ok()
        && (word(&stat, 0), word(&stat, 8)) == image.identity;
    if !same {
        // SAFETY: the descriptor was opened above.
        let _ = unsafe { remote.call(k::__NR_close, [fd, 0, 0, 0, 0, 0]) };
    }
    same.then_some(fd)
}

fn map_part(
    remote: &Remote,
    image: &AgentImage,
    base: u64,
    file: Option<u64>,
    part: &LibraryPart,
) -> Result<(), Errno> {
    let (start, len) = part.pages();
    let at = base + start;
    let protection = k::PROT_READ | if part.is_executed { k::PROT_EXEC } else { 0 };
    if let (Some(fd), false) = (file, part.is_written) {
        let offset = part.offset - (part.start - start);
        // SAFETY: a part of what was reserved for the library.
        let mapped = unsafe { map(remote, at, len, protection, k::MAP_FIXED, Some((fd, offset))) };
        // A file system may forbid to execute (`noexec`): then it is copied, if that is allowed.
        if mapped.is_ok() {
            return Ok(());
        }
    }
    let protect = |protection: u32| {
        // SAFETY: as above.
        unsafe { remote.call(k::__NR_mprotect, [at, len, protection.into(), 0, 0, 0]) }
    };
    protect(k::PROT_READ | k::PROT_WRITE)?;
    let bytes = part.bytes_at(image, base).map_err(|_| Errno::IO)?;
    // SAFETY: as above.
    unsafe { remote.write(base + part.start, &bytes) }?;
    if !part.is_written {
        protect(protection)?;
    }
    Ok(())
}

/// The words that an engine thread's control page begins with (`swaptide_sys::thread`).
fn write_control_page(remote: &Remote, thread_pointer: u64) -> Result<(), Errno> {
    let mut guard = [0u8; 8];
    rustix::rand::getrandom(&mut guard, rustix::rand::GetRandomFlags::empty())?;
    // Itself, and again where libc reads it; several threads; the guard of the stack.
    let words = [
        thread_pointer,
        0,
        thread_pointer,
        1,
        0,
        // A text that is copied too far ends there.
        u64::from_le_bytes(guard) & !0xff,
    ];
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    // SAFETY: memory of this module's own.
    unsafe { remote.write(thread_pointer, &bytes) }
}

fn write_arguments(
    remote: &Remote,
    memory: u64,
    (base, span): (u64, u64),
    texts: &AgentTexts,
) -> Result<(), Errno> {
    let socket =
        InjectedRange { start: memory + ARGS_BYTES as u64, len: texts.socket.len() as u64 };
    let log = InjectedRange { start: socket.start + socket.len, len: texts.log.len() as u64 };
    let args = InjectedArgs {
        memory: InjectedRange { start: memory, len: MEMORY_BYTES },
        image: InjectedRange { start: base, len: span },
        socket,
        log,
    };
    let bytes = [&args.to_bytes()[..], &texts.socket, &texts.log].concat();
    if bytes.len() as u64 > TEXT_BYTES {
        return Err(Errno::NAMETOOLONG);
    }
    // SAFETY: memory of this module's own.
    unsafe { remote.write(memory, &bytes) }
}
