//! Shared regions as the processes that map them see it: what they ask their pager, and in which
//! order.
//!
//! A *region* is memory that several processes map shared, and that a pager outside of them swaps.
//! It is a memory file which no process reads or writes by its descriptor. Each process registers
//! its mappings with a userfaultfd of its own, which the pager has too. A *guard* is a thread of
//! the process that keeps the descriptor open and listens for the pager's end.
//!
//! Invariants
//! 1. A program gets the address of a mapping only after [`attach`] succeeded: no page of it was
//!    ever filled behind the pager's back.
//! 2. A forked child touches its regions only after its [`PagerGuard`] stands, if anything of any
//!    region may be swapped: as long as one holder of the userfaultfd lives, a missing page is
//!    waited for and never read as zeros.
//!
//! Locks: none. Nothing is allocated.

use core::ffi::CStr;

use swaptide_sys::maps::for_each_vma;
use swaptide_sys::mem::Landmark;
use swaptide_sys::sock::Conn;
use swaptide_sys::uffd::{Features, OpenError, Uffd};
use swaptide_sys::{AsFd, OwnedFd};

use crate::ids::SlotIndex;
use crate::layout::{ProcSlot, Segment};
use crate::wire::AgentRequest;

/// The name of a region's memory file.
pub const REGION_NAME: &CStr = c"swaptide-region";
/// The prefix of its mappings' names in `/proc/PID/maps`.
pub const REGION_PATH: &[u8] = b"/memfd:swaptide-region";
/// Regions smaller than this are not worth it.
pub const MIN_REGION_BYTES: u64 = 1 << 20;
/// The features of userfaultfds of shared regions.
pub const SHARED_FEATURES: Features = Features::EVENT_FORK
    .union(Features::EVENT_REMAP)
    .union(Features::EVENT_REMOVE)
    .union(Features::EVENT_UNMAP)
    .union(Features::PAGEFAULT_FLAG_WP)
    .union(Features::MISSING_SHMEM)
    .union(Features::WP_HUGETLBFS_SHMEM)
    .union(Features::POISON);

/// Advice before `mremap` maps a part of a region at further addresses: until [`ADVICE_RELEASE`]
/// nothing goes out of what the range that is given maps, or would map if the mapping in front of
/// it reached over it.
pub const ADVICE_HOLD: i32 = -1;
/// Advice after that, with the same range.
pub const ADVICE_RELEASE: i32 = -2;
/// Advice for a word that the kernel writes to when a thread ends, and waits for no pager then:
/// what is there comes in, and stays.
pub const ADVICE_KEEP: i32 = -3;
/// `MADV_REMOVE`: the pager gives the pages up, in the place of the kernel.
pub const ADVICE_REMOVE: i32 = 9;

/// The answer to [`AgentRequest::Attach`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Attached {
    /// All mappings are known.
    Done = 0,
    /// The process has no userfaultfd yet.
    Descriptor = 1,
    /// Its shared memory cannot be managed.
    Refused = 2,
}

/// The answer to [`AgentRequest::Advise`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AdviceOutcome {
    /// It is not the pager's: nothing of the range is in regions ([`ADVICE_REMOVE`]: not all of
    /// it), or the process is not known. Nothing was done.
    Elsewhere = 0,
    /// It was taken; what [`ADVICE_REMOVE`] asks for is done.
    Taken = 1,
    /// It could not be done, and may be done in part.
    Failed = 2,
}

/// Why there is no region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRegion {
    /// There is no pager, or it does not answer.
    NoPager,
    /// The pager has none of this length now.
    NotNow,
}

/// The second byte of an answer to [`AgentRequest::Region`] that brings no region.
pub const NO_REGION_NOW: u8 = 1;

/// Asks the pager behind a socket for a region of `bytes` bytes.
///
/// # Errors
/// [`NoRegion`].
pub fn region(socket: &[u8], bytes: u64) -> Result<OwnedFd, NoRegion> {
    let ask = || {
        let conn = Conn::connect_trusted(socket).ok()?;
        let mut request = [AgentRequest::Region as u8; 9];
        request[1..].copy_from_slice(&bytes.to_le_bytes());
        conn.send(&request, &[]).ok()?;
        let (mut reply, mut fds) = ([0u8; 2], [None]);
        let (length, _) = conn.recv(&mut reply, &mut fds).ok()?;
        let [fd] = fds;
        Some((fd, length == 2 && reply[1] == NO_REGION_NOW))
    };
    match ask() {
        Some((Some(fd), _)) => Ok(fd),
        Some((None, true)) => Err(NoRegion::NotNow),
        _ => Err(NoRegion::NoPager),
    }
}

/// What may be done with the memory of regions, by what userfaultfd the kernel gives this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Reach {
    /// No limit: forks and system calls work.
    Whole = 0,
    /// A forked child has none of it (the kernel tells of forks only with `CAP_SYS_PTRACE`): it
    /// maps a region again.
    NoForks = 1,
    /// The same, and a system call that touches what is out fails with `EFAULT`: this process has
    /// access neither to the system call nor to `/dev/userfaultfd`, but for faults of its own code.
    UserMode = 2,
}

impl Reach {
    /// The best that this process has.
    pub fn here() -> Option<Reach> {
        [Reach::Whole, Reach::NoForks, Reach::UserMode]
            .into_iter()
            .find(|reach| reach.open().is_ok())
    }

    fn open(self) -> Result<Uffd, OpenError> {
        let without_forks = SHARED_FEATURES.difference(Features::EVENT_FORK);
        match self {
            Reach::Whole => Uffd::open(SHARED_FEATURES, true),
            Reach::NoForks => Uffd::open(without_forks, true),
            Reach::UserMode => Uffd::open_user_mode_only(without_forks, true),
        }
    }
}

/// Makes the calling process's mappings of regions known to the pager, with the userfaultfd of this
/// reach if it has none yet. With less than [`Reach::Whole`] none of them may come along at a fork
/// (`MADV_DONTFORK`).
pub fn attach(socket: &[u8], reach: Reach) -> Option<()> {
    let ask = |uffd: Option<&Uffd>| {
        let conn = Conn::connect_trusted(socket).ok()?;
        let fds = uffd.map(AsFd::as_fd);
        conn.send(&[AgentRequest::Attach as u8], fds.as_slice()).ok()?;
        let mut reply = [0u8; 2];
        let (length, _) = conn.recv(&mut reply, &mut []).ok()?;
        (length == 2).then_some(reply[1])
    };
    let mut answer = ask(None)?;
    if answer == Attached::Descriptor as u8 {
        let uffd = reach.open().ok()?;
        answer = ask(Some(&uffd))?;
    }
    (answer == Attached::Done as u8).then_some(())
}

/// Advice on a range. `None`: the pager does not answer.
pub fn advise(socket: &[u8], addr: usize, len: usize, advice: i32) -> Option<AdviceOutcome> {
    let conn = Conn::connect_trusted(socket).ok()?;
    let mut request = [AgentRequest::Advise as u8; 21];
    request[1..9].copy_from_slice(&(addr as u64).to_le_bytes());
    request[9..17].copy_from_slice(&(len as u64).to_le_bytes());
    request[17..].copy_from_slice(&advice.to_le_bytes());
    conn.send(&request, &[]).ok()?;
    let mut reply = [0u8; 2];
    let (length, _) = conn.recv(&mut reply, &mut []).ok()?;
    [AdviceOutcome::Elsewhere, AdviceOutcome::Taken, AdviceOutcome::Failed]
        .into_iter()
        .find(|answer| length == 2 && reply[1] == *answer as u8)
}

/// A process's connection to its pager.
pub struct PagerGuard {
    /// Hung up when the pager ends.
    pub conn: Conn,
    /// While this is open, missing pages are waited for.
    pub uffd: Uffd,
    /// The pager's slot in the segment: what it says of swapped memory tells whether its end is a
    /// loss.
    pub slot: SlotIndex,
}

impl PagerGuard {
    /// True if the pager's end is a loss to this process: it has regions mapped, and of some region
    /// something is out.
    pub fn has_lost(&self, segment: &Segment) -> bool {
        let slot = segment.slot(self.slot);
        let out = ProcSlot::bytes(&slot.usage.swapped_pool_bytes)
            + ProcSlot::bytes(&slot.usage.swapped_file_bytes);
        let mut mapped = false;
        let mut buffer = [0u8; 4096];
        let looked = for_each_vma(&mut buffer, |vma| {
            mapped |= vma.name.starts_with(REGION_PATH);
            !mapped
        });
        out > 0 && (mapped || looked.is_err())
    }
}

/// Why a process has no guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoGuard {
    /// It has no region mapped: a forked child to which none came along.
    NotNeeded,
    /// It has some mapped of which the pager knows nothing: what is out reads as zeros there.
    Unknown,
    /// The pager does not answer, or cannot be asked.
    Unanswered,
}

/// The second byte of an answer to [`AgentRequest::Guard`] that brings no descriptor:
/// [`NoGuard::Unknown`].
pub const UNKNOWN_REGIONS: u8 = 1;

/// Stands guard for the calling process. To be called in the thread that does: its descriptors are
/// to live in a table that the program does not see.
///
/// # Errors
/// [`NoGuard`].
pub fn guard(socket: &[u8]) -> Result<PagerGuard, NoGuard> {
    let ask = || {
        let landmark = Landmark::raise().ok()?;
        let conn = Conn::connect_trusted(socket).ok()?;
        let mut request = [AgentRequest::Guard as u8; 9];
        request[1..].copy_from_slice(&(landmark.range().start.0 as u64).to_le_bytes());
        conn.send(&request, &[]).ok()?;
        let (mut reply, mut fds) = ([0u8; 5], [None]);
        let (length, _) = conn.recv(&mut reply, &mut fds).ok()?;
        let [fd] = fds;
        Some((conn, length, reply, fd))
    };
    match ask() {
        Some((conn, 5, [_, slot @ ..], Some(fd))) => {
            let slot = SlotIndex(u32::from_le_bytes(slot));
            Ok(PagerGuard { conn, uffd: Uffd::from_fd(fd), slot })
        }
        Some((_, 1, ..)) => Err(NoGuard::NotNeeded),
        Some((_, 2, [_, UNKNOWN_REGIONS, ..], _)) => Err(NoGuard::Unknown),
        _ => Err(NoGuard::Unanswered),
    }
}
