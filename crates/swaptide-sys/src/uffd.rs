//! userfaultfd: page faults as messages, and the ioctls that answer them.
//!
//! Own binding: the calls report how far they came even when they fail, which the engine needs
//! (a MOVE that meets a changing address space stops half-way with `EAGAIN`).
//!
//! Facts the callers rely on, checked by `tests/uffd.rs` on the running kernel:
//! 1. While an event (fork, remap, remove, unmap) is unread, COPY, ZEROPAGE and MOVE answer
//!    `EAGAIN`. The thread that reads events must never wait for one of them to succeed.
//! 2. MOVE is issued on the descriptor its destination is registered with.
//! 3. CONTINUE on a private anonymous range never does anything; how it fails tells how the range
//!    stands ([`Uffd::coverage`]).
//! 4. A fork event carries a descriptor; a [`Message`] owns it until it is decoded.

mod abi;
mod features;
mod message;

use core::time::Duration;
use linux_raw_sys::general as k;

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use rustix::io::Errno;

use self::abi::{
    AbiApi, AbiFill, AbiRegister, AbiTransfer, AbiWriteProtect, COPY_WP, DONT_WAKE,
    MOVE_ALLOW_SRC_HOLES, UFFD_API, UFFDIO_API, UFFDIO_CONTINUE, UFFDIO_COPY, UFFDIO_POISON,
    UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT, UFFDIO_ZEROPAGE, USERFAULTFD_IOC_NEW,
    WRITEPROTECT_ON, abi_range,
};
pub use self::abi::{UFFDIO_MOVE, UFFDIO_REGISTER};
pub use self::features::{Features, OpenError};
pub use self::message::{Event, Message};
use crate::page::{PAGE_SIZE, VirtAddr, VirtRange};
use crate::raw::syscall;

/// The progress of an answering call.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[must_use = "a call may have done only a part"]
pub struct Progress {
    /// Bytes done, from the start of the range.
    pub done: usize,
    /// Why it stopped, if it stopped early. After a part, the kernel always says `EAGAIN`; the
    /// true reason shows when the rest is tried again.
    pub error: Option<Errno>,
}

impl Progress {
    /// `Ok` when everything was done, else the error; drops the count.
    pub fn complete(self) -> Result<(), Errno> {
        self.error.map_or(Ok(()), Err)
    }

    fn new(result: Result<usize, Errno>, field: i64, len: usize) -> Progress {
        match result {
            Ok(_) => Progress { done: len, error: None },
            // Where nothing was done, the field repeats the error, negative, or was never written.
            Err(errno) => {
                Progress { done: field.clamp(0, len as i64) as usize, error: Some(errno) }
            }
        }
    }
}

/// Options of [`Uffd::move_pages`].
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct MoveFlags {
    /// Leave the threads that wait for these pages asleep; [`Uffd::wake`] wakes them.
    pub dont_wake: bool,
    /// Skip source pages that do not exist (they stay missing at the destination, and count as
    /// done) instead of stopping with `ENOENT`.
    pub allow_src_holes: bool,
}

/// The registration state of a range, by [`Uffd::coverage`].
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// One anonymous VMA covers it and is registered (with whichever userfaultfd).
    Whole,
    /// The address space is changing: read the events and ask again.
    Changing,
    /// Something is unmapped, unregistered, of another kind, or a boundary of VMAs lies in it.
    NotWhole,
    /// The address space is gone: the process ended or called exec.
    Gone,
}

/// A userfaultfd. Closing it lets every page that was taken out read as zero, so an owner
/// brings all pages back, or stops the process, before dropping it.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

impl Uffd {
    /// Returns the features of this kernel, read by a temporary descriptor. Says nothing on whether
    /// [`EVENT_FORK`](Features::EVENT_FORK) is also permitted.
    pub fn probe() -> Result<Features, OpenError> {
        new_descriptor(open_flags(true, false))?.handshake(Features::empty())
    }

    /// The same for descriptors that serve only faults from user mode: those need no privilege, but
    /// a system call that touches a missing page fails with `EFAULT`.
    pub fn probe_user_mode_only() -> Result<Features, OpenError> {
        new_descriptor(open_flags(true, true))?.handshake(Features::empty())
    }

    /// Opens a descriptor with exactly these features: by the system call, else by
    /// `/dev/userfaultfd`.
    pub fn open(features: Features, nonblocking: bool) -> Result<Uffd, OpenError> {
        Uffd::open_with(features, open_flags(nonblocking, false))
    }

    /// The same that serves faults from user mode alone, and needs no privilege: a system call that
    /// touches a missing page fails with `EFAULT`.
    pub fn open_user_mode_only(features: Features, nonblocking: bool) -> Result<Uffd, OpenError> {
        Uffd::open_with(features, open_flags(nonblocking, true))
    }

    fn open_with(features: Features, flags: u32) -> Result<Uffd, OpenError> {
        let uffd = new_descriptor(flags)?;
        match uffd.handshake(features) {
            Ok(_) => Ok(uffd),
            Err(OpenError::Refused { asked, errno }) => {
                // EINVAL does not say which bit is unknown; a second descriptor does.
                let missing =
                    Uffd::probe().map_or(Features::empty(), |have| features.difference(have));
                Err(if missing.is_empty() {
                    OpenError::Refused { asked, errno }
                } else {
                    OpenError::Unsupported { missing }
                })
            }
            Err(other) => Err(other),
        }
    }

    /// Wraps a descriptor that was received, from a fork event or over a socket. Its features are
    /// already set.
    pub fn from_fd(fd: OwnedFd) -> Uffd {
        Uffd(fd)
    }

    /// Makes [`Uffd::read`] return `EAGAIN` instead of waiting, or wait again. Polling needs a
    /// non-blocking descriptor: the kernel answers a poll of a blocking one with an error.
    pub fn set_nonblocking(&self, on: bool) -> Result<(), Errno> {
        let flags = rustix::fs::fcntl_getfl(&self.0)?;
        rustix::fs::fcntl_setfl(
            &self.0,
            if on {
                flags | rustix::fs::OFlags::NONBLOCK
            } else {
                flags - rustix::fs::OFlags::NONBLOCK
            },
        )
    }

    /// Asks the kernel for features of a descriptor that another process has made and cannot ask
    /// for itself.
    ///
    /// # Errors
    /// What the kernel answers; what is not a userfaultfd answers in its own way.
    pub fn complete_api(&self, features: Features) -> Result<(), OpenError> {
        self.handshake(features).map(drop)
    }

    /// Gives the descriptor up.
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }

    fn handshake(&self, features: Features) -> Result<Features, OpenError> {
        let mut api = AbiApi { api: UFFD_API, features: features.bits(), ioctls: 0 };
        // SAFETY: `api` is the struct this ioctl reads and writes.
        match unsafe { self.ioctl(UFFDIO_API, &mut api) } {
            Ok(_) => Ok(Features::from_bits_retain(api.features)),
            Err(Errno::PERM)
                if crate::helper::helper()
                    .is_some_and(|p| (p.handshake)(self.0.as_fd(), features.bits())) =>
            {
                Ok(features)
            }
            Err(errno) => Err(OpenError::Refused { asked: features, errno }),
        }
    }

    /// # Safety
    /// `arg` is the struct `request` reads and writes, and what the request does to memory is the
    /// caller's answer.
    unsafe fn ioctl<T>(&self, request: u32, arg: &mut T) -> Result<usize, Errno> {
        // SAFETY: the caller's promise; `arg` lives through the call.
        unsafe {
            syscall!(k::__NR_ioctl, self.0.as_raw_fd(), request, core::ptr::from_mut(arg) as usize)
        }
    }

    fn register(&self, range: VirtRange, mode: u32) -> Result<(), Errno> {
        let mut arg = AbiRegister { range: abi_range(range), mode: mode.into(), ioctls: 0 };
        // SAFETY: the struct fits; registering changes no data, only the server of missing pages.
        unsafe { self.ioctl(UFFDIO_REGISTER, &mut arg) }.map(drop)
    }

    /// From now on, touching a page of `range` that does not exist makes the toucher wait for us.
    pub fn register_missing(&self, range: VirtRange) -> Result<(), Errno> {
        self.register(range, k::UFFDIO_REGISTER_MODE_MISSING)
    }

    /// The same, and pages can be write-protected too.
    pub fn register_missing_wp(&self, range: VirtRange) -> Result<(), Errno> {
        self.register(range, k::UFFDIO_REGISTER_MODE_MISSING | k::UFFDIO_REGISTER_MODE_WP)
    }

    /// Pages of `range` can be write-protected; missing ones are the kernel's to fill.
    pub fn register_wp(&self, range: VirtRange) -> Result<(), Errno> {
        self.register(range, k::UFFDIO_REGISTER_MODE_WP)
    }

    /// Ends the registration and wakes waiters. Pages that are out read as zero from now on:
    /// bring them back first.
    pub fn unregister(&self, range: VirtRange) -> Result<(), Errno> {
        // SAFETY: the struct fits; memory stays mapped.
        unsafe { self.ioctl(UFFDIO_UNREGISTER, &mut abi_range(range)) }.map(drop)
    }

    /// Wakes the threads that wait for pages of `range`; they touch again, and may fault again.
    pub fn wake(&self, range: VirtRange) -> Result<(), Errno> {
        // SAFETY: the struct fits; waking changes no data.
        unsafe { self.ioctl(UFFDIO_WAKE, &mut abi_range(range)) }.map(drop)
    }

    /// Moves the pages at `src` to `dst` without copying. `dst` is registered with this descriptor
    /// and empty (else `EEXIST`); both lie in private anonymous memory of one process, each within
    /// one VMA. A page that is shared copy-on-write or pinned answers `EBUSY`.
    ///
    /// # Safety
    /// The pages at `src` leave it: no code may rely on them there, and `dst` must be memory the
    /// caller may fill.
    pub unsafe fn move_pages(
        &self,
        dst: VirtAddr,
        src: VirtAddr,
        len: usize,
        flags: MoveFlags,
    ) -> Progress {
        let mode = if flags.dont_wake { DONT_WAKE } else { 0 }
            | if flags.allow_src_holes { MOVE_ALLOW_SRC_HOLES } else { 0 };
        // SAFETY: the caller's promise.
        unsafe { self.transfer(UFFDIO_MOVE, dst, src, len, mode) }
    }

    /// Fills `dst` with fresh pages that hold a copy of `len` bytes at `src`. Existing pages are
    /// never overwritten (`EEXIST`). With `wp` the pages arrive write-protected.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes without causing a fault this thread would have to answer,
    /// and `dst` is memory the caller may fill.
    pub unsafe fn copy_pages(
        &self,
        dst: VirtAddr,
        src: *const u8,
        len: usize,
        dont_wake: bool,
        wp: bool,
    ) -> Progress {
        let mode = if dont_wake { DONT_WAKE } else { 0 } | if wp { COPY_WP } else { 0 };
        // SAFETY: the caller's promise.
        unsafe { self.transfer(UFFDIO_COPY, dst, VirtAddr::from_ptr(src), len, mode) }
    }

    /// # Safety
    /// As [`move_pages`](Uffd::move_pages) or [`copy_pages`](Uffd::copy_pages), by `request`.
    unsafe fn transfer(
        &self,
        request: u32,
        dst: VirtAddr,
        src: VirtAddr,
        len: usize,
        mode: u64,
    ) -> Progress {
        let mut arg =
            AbiTransfer { dst: dst.0 as u64, src: src.0 as u64, len: len as u64, mode, done: 0 };
        // SAFETY: the struct fits; the rest is the caller's promise.
        let result = unsafe { self.ioctl(request, &mut arg) };
        Progress::new(result, arg.done, len)
    }

    /// Maps the zero page into every page of `range`; `EEXIST` where a page exists.
    pub fn zero_pages(&self, range: VirtRange, dont_wake: bool) -> Progress {
        self.fill(UFFDIO_ZEROPAGE, range, if dont_wake { DONT_WAKE } else { 0 })
    }

    /// Poisons the missing pages of `range`: from now on a touch of them is a `SIGBUS`.
    pub fn poison(&self, range: VirtRange) -> Progress {
        self.fill(UFFDIO_POISON, range, 0)
    }

    fn fill(&self, request: u32, range: VirtRange, mode: u64) -> Progress {
        let mut arg = AbiFill { range: abi_range(range), mode, done: 0 };
        // SAFETY: the struct fits; these calls only give pages to places that have none.
        let result = unsafe { self.ioctl(request, &mut arg) };
        Progress::new(result, arg.done, range.len())
    }

    /// Write-protects the pages of `range`, or lifts that and wakes threads that wait to write.
    pub fn write_protect(&self, range: VirtRange, on: bool) -> Result<(), Errno> {
        let mut arg =
            AbiWriteProtect { range: abi_range(range), mode: if on { WRITEPROTECT_ON } else { 0 } };
        // SAFETY: the struct fits; no data changes.
        unsafe { self.ioctl(UFFDIO_WRITEPROTECT, &mut arg) }.map(drop)
    }

    /// Returns the registration state of `range` in the address space of this descriptor; changes
    /// nothing.
    ///
    /// Ask only for ranges of private anonymous memory: there CONTINUE always fails, and its error
    /// is the answer. The kernel checks that the VMA is registered, not with which descriptor.
    pub fn coverage(&self, range: VirtRange) -> Coverage {
        if range.is_empty() || !range.is_page_aligned() {
            // Such a range also answers EINVAL, but before anything was looked at.
            return Coverage::NotWhole;
        }
        match self.fill(UFFDIO_CONTINUE, range, DONT_WAKE).error {
            Some(Errno::INVAL) => Coverage::Whole,
            Some(Errno::AGAIN) => Coverage::Changing,
            Some(Errno::SRCH) => Coverage::Gone,
            _ => Coverage::NotWhole,
        }
    }

    /// True if the kernel says that `range`, which lies in one mapping, is registered with no
    /// userfaultfd. To be asked as [`Uffd::coverage`].
    pub fn is_unarmed(&self, range: VirtRange) -> bool {
        self.fill(UFFDIO_CONTINUE, range, DONT_WAKE).error == Some(Errno::NOENT)
    }

    /// True when the address space of this descriptor is gone: no process runs on it any more. What
    /// is no userfaultfd has none.
    pub fn is_gone(&self) -> bool {
        // The stack lies lower: nothing is ever mapped there, and CONTINUE changes nothing.
        let top = VirtRange::new(VirtAddr(END_OF_ADDRESSES.0 - PAGE_SIZE), END_OF_ADDRESSES);
        let error = self.fill(UFFDIO_CONTINUE, top, DONT_WAKE).error;
        matches!(error, Some(Errno::SRCH | Errno::NOTTY))
    }

    /// The calling process serves this userfaultfd from here on. False if [`take_over`] was first:
    /// what it has read is lost.
    ///
    /// There are two marks on the open file, which every holder of a descriptor sees: its owner
    /// (`F_SETOWN`) and its signal (`F_SETSIG`), of which no other use is made here. Each side
    /// writes its own mark and then looks at the other's, so of two that come at once one sees
    /// the other.
    ///
    /// [`take_over`]: Uffd::take_over
    pub fn serve(&self, this: u32) -> Result<bool, Errno> {
        self.file_mark(k::F_SETOWN, this)?;
        for _ in 0..MAX_LOOKS {
            if self.file_mark(k::F_GETSIG, 0)? == 0 {
                return Ok(true);
            }
            crate::thread::sleep(LOOK_INTERVAL);
        }
        Ok(false)
    }

    /// The caller reads this userfaultfd from here on, of which process `pid` had an engine. False
    /// if another living process [serves](Uffd::serve) it; an owner that has ended is none.
    pub fn take_over(&self, pid: u32) -> bool {
        if self.file_mark(k::F_SETSIG, k::SIGURG).is_err() {
            return false;
        }
        let is_free = self.file_mark(k::F_GETOWN, 0).is_ok_and(|owner| owner == 0 || owner == pid);
        if !is_free {
            let _ = self.file_mark(k::F_SETSIG, 0);
        }
        is_free
    }

    fn file_mark(&self, what: u32, value: u32) -> Result<u32, Errno> {
        // SAFETY: no memory is involved.
        unsafe { syscall!(k::__NR_fcntl, self.0.as_raw_fd(), what, value) }.map(|word| word as u32)
    }

    /// As [`read`](Uffd::read), and never waits, whatever another holder of the descriptor has set.
    /// Before Linux 6.10, which cannot be told so in the call, the descriptor is set to that first.
    pub fn read_nowait(&self, buf: &mut [Message]) -> Result<usize, Errno> {
        buf.iter_mut().for_each(|m| drop(core::mem::take(m)));
        let part = [buf.as_mut_ptr() as usize, size_of_val(buf)];
        // SAFETY: `part` is one iovec of a buffer that takes whole messages; every bit pattern is a
        // Message.
        let bytes = unsafe {
            syscall!(
                k::__NR_preadv2,
                self.0.as_raw_fd(),
                part.as_ptr() as usize,
                1usize,
                usize::MAX,
                0usize,
                k::RWF_NOWAIT
            )
        };
        match bytes {
            Ok(bytes) => Ok(bytes / size_of::<Message>()),
            Err(Errno::OPNOTSUPP) => {
                self.set_nonblocking(true)?;
                self.read(buf)
            }
            Err(errno) => Err(errno),
        }
    }

    /// Reads messages into `buf`, at least one and at most what is there; `EAGAIN` when there is
    /// none and the descriptor does not block. A fork descriptor left in `buf` from before is
    /// closed.
    pub fn read(&self, buf: &mut [Message]) -> Result<usize, Errno> {
        buf.iter_mut().for_each(|m| drop(core::mem::take(m)));
        // SAFETY: the kernel writes whole messages into the buffer, and every bit pattern is a
        // Message.
        let bytes = unsafe {
            syscall!(k::__NR_read, self.0.as_raw_fd(), buf.as_mut_ptr() as usize, size_of_val(buf))
        }?;
        Ok(bytes / size_of::<Message>())
    }
}

/// How often [`Uffd::serve`] looks at the mark of a process that may be taking it back: that
/// process may have lost its CPU in the middle. 5 s in all.
const MAX_LOOKS: u32 = 5000;
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// The end of the addresses that a process on x86-64 has unless it asks for more.
const END_OF_ADDRESSES: VirtAddr = VirtAddr(0x7fff_ffff_f000);

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn open_flags(nonblocking: bool, user_mode_only: bool) -> u32 {
    k::O_CLOEXEC
        | if nonblocking { k::O_NONBLOCK } else { 0 }
        | if user_mode_only { k::UFFD_USER_MODE_ONLY } else { 0 }
}

/// A fresh descriptor, before the handshake.
fn new_descriptor(flags: u32) -> Result<Uffd, OpenError> {
    // SAFETY: the call only makes a descriptor.
    match unsafe { syscall!(k::__NR_userfaultfd, flags) } {
        // SAFETY: the kernel has just given us this descriptor.
        Ok(fd) => Ok(Uffd(unsafe { OwnedFd::from_raw_fd(fd as i32) })),
        // Not privileged, or a filter says so: the device has its own permissions.
        Err(syscall @ (Errno::PERM | Errno::ACCESS | Errno::NOSYS)) => device_descriptor(flags)
            .map_err(|errno| OpenError::Denied { syscall, device: Some(errno) }),
        Err(syscall) => Err(OpenError::Denied { syscall, device: None }),
    }
}

fn device_descriptor(flags: u32) -> Result<Uffd, Errno> {
    use rustix::fs::{Mode, OFlags};
    let open = rustix::fs::open(c"/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let device =
        open.or_else(|errno| crate::helper::helper().and_then(|p| (p.device)()).ok_or(errno))?;
    // SAFETY: the call only makes a descriptor.
    let fd = unsafe { syscall!(k::__NR_ioctl, device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) }?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(Uffd(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
}

/// Gives the raw descriptor number up, for tables that keep numbers (a forked child's, for
/// example).
impl IntoRawFd for Uffd {
    fn into_raw_fd(self) -> i32 {
        self.0.into_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_never_reports_more_than_was_asked() {
        let part = Progress::new(Err(Errno::AGAIN), 4096, 8192);
        assert_eq!((part.done, part.complete()), (4096, Err(Errno::AGAIN)));
        assert_eq!(Progress::new(Err(Errno::EXIST), -17, 8192).done, 0);
        assert_eq!(Progress::new(Ok(0), 0, 8192), Progress { done: 8192, error: None });
    }

    #[test]
    fn the_device_is_a_second_way() {
        match device_descriptor(open_flags(true, false)) {
            Ok(uffd) => {
                assert!(uffd.handshake(Features::empty()).unwrap().contains(Features::EVENT_REMOVE))
            }
            // No such device, or not for this user: the error that OpenError would carry.
            Err(errno) => {
                assert!(matches!(errno, Errno::NOENT | Errno::ACCESS | Errno::PERM), "{errno}")
            }
        }
        let denied = OpenError::Denied { syscall: Errno::PERM, device: Some(Errno::ACCESS) };
        assert!(std::format!("{denied}").contains("vm.unprivileged_userfaultfd=1"));
    }
}
