//! One address space that has regions mapped.
//!
//! Owns: its userfaultfd, the layout of its mappings, and the connection of its guard. The layout
//! is read from `/proc/PID/maps`; after any change that the kernel reports, it is read again. Until
//! a forked child's process is known, it has a copy of its parent's.
//!
//! An answer by address is safe whatever the layout says: while a change of mappings is under way,
//! or told of and not read, the kernel refuses it (`EAGAIN`).
//!
//! Locks: none; the pager's state holds it.

use std::collections::HashSet;
use std::ops::Range;
use std::time::Instant;

use swaptide_ipc::shared::REGION_PATH;
use swaptide_sys::Errno;
use swaptide_sys::maps::for_each_vma_of;
use swaptide_sys::page::{PAGE_SIZE, VirtAddr, VirtRange};
use swaptide_sys::sock::Conn;
use swaptide_sys::uffd::Uffd;

use crate::living::living_thread;
use crate::region::RegionId;

/// An address space: a number that is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SpaceId(pub u64);

/// A mapping of a part of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The addresses that it is mapped at.
    pub range: VirtRange,
    /// The shared region that is mapped there.
    pub region: RegionId,
    /// The page of the shared region at the first address.
    pub page: usize,
}

impl Piece {
    /// The pages of the shared region that it maps.
    pub fn pages(&self) -> Range<usize> {
        self.page..self.page + self.range.pages()
    }

    /// The addresses of those pages of a range that it maps.
    pub fn addresses(&self, region: RegionId, pages: &Range<usize>) -> Option<VirtRange> {
        let (start, end) = (pages.start.max(self.page), pages.end.min(self.pages().end));
        (region == self.region && start < end).then(|| {
            let first = self.range.start.offset((start - self.page) * PAGE_SIZE);
            VirtRange { start: first, end: first.offset((end - start) * PAGE_SIZE) }
        })
    }
}

/// The place at which pages of a fault are to be mapped at once.
#[derive(Clone, Copy)]
pub(crate) struct FaultSite {
    pub space: SpaceId,
    pub piece: Piece,
}

/// Pages that a thread is about to map at further addresses, which the pager is not told of when
/// a mapping grows in place. What is mapped already may go out meanwhile: the thread may be stopped
/// for any time.
#[derive(Clone, Debug)]
pub struct GrowthHold {
    /// The range as it was given.
    pub range: VirtRange,
    /// The pages that it may map later; `None` if unknown: any of the space's regions.
    pub pages: Option<(RegionId, Range<usize>)>,
    /// When the request came that began it.
    pub since: Instant,
}

/// The state of an address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceState {
    /// No change of its mappings is under way or unread.
    Quiet,
    /// A change of its mappings is under way or unread.
    Changing,
    /// It is gone: its process ended or executed another program.
    Gone,
}

/// An address space that has shared regions mapped.
pub struct Space {
    /// The userfaultfd with which its mappings are registered.
    pub uffd: Uffd,
    /// Its process, once that is known.
    pub pid: Option<u32>,
    /// The connection of its guard.
    pub guard: Option<Conn>,
    /// Since when it has no guard.
    pub unguarded: Instant,
    /// Its mappings of shared regions, as they were last read.
    pub layout: Vec<Piece>,
    /// The layout may be another one: it could not be read since it changed.
    pub stale: bool,
    /// The layout was read while events were unread: a fork among them may have been of an older
    /// one.
    pub is_ahead: bool,
    /// It cannot be managed: nothing of its regions goes out any more.
    pub broken: bool,
    /// Mappings that threads of it are growing.
    pub holds: Vec<GrowthHold>,
    /// The swapped pages of its regions have been brought back, because there is no guard.
    pub restored: bool,
}

impl Space {
    /// A space without a guard.
    pub fn new(uffd: Uffd, pid: Option<u32>, layout: Vec<Piece>) -> Space {
        Space {
            uffd,
            pid,
            guard: None,
            unguarded: Instant::now(),
            layout,
            stale: false,
            is_ahead: false,
            broken: false,
            holds: Vec::new(),
            restored: false,
        }
    }

    /// Another userfaultfd answers its faults, and some of its pages are out, for want of memory.
    pub(crate) fn needs_restore(&self) -> bool {
        self.broken && !self.restored
    }

    /// The state of the address space, from the result of a write-protect ioctl on a range that has
    /// no mapping.
    pub fn standing(&self) -> SpaceState {
        let nowhere = VirtRange::from_len(VirtAddr(1 << 16), PAGE_SIZE);
        match self.uffd.write_protect(nowhere, false) {
            Err(Errno::AGAIN) => SpaceState::Changing,
            Err(Errno::SRCH) => SpaceState::Gone,
            _ => SpaceState::Quiet,
        }
    }

    /// True when nothing of its regions may go out: a program that would not be stopped by the
    /// pager's end, or an unknown layout.
    pub(crate) fn forbids(&self) -> bool {
        self.guard.is_none() || self.stale || self.broken
    }

    /// The pages that a range maps, or would if the mapping that ends where it begins were longer.
    pub(crate) fn pages_to_come(&self, range: VirtRange) -> Option<(RegionId, Range<usize>)> {
        let covers = |piece: &&Piece| piece.range.contains(range.start);
        let ends = |piece: &&Piece| piece.range.end == range.start;
        let piece = self.layout.iter().find(covers).or_else(|| self.layout.iter().find(ends))?;
        let first = piece.page + (range.start.0 - piece.range.start.0) / PAGE_SIZE;
        Some((piece.region, first..first.saturating_add(range.pages())))
    }

    /// The page at an address.
    pub(crate) fn translate(&self, addr: VirtAddr) -> Option<(Piece, usize)> {
        let piece = self.layout.iter().find(|piece| piece.range.contains(addr))?;
        Some((*piece, piece.page + (addr.0 - piece.range.start.0) / PAGE_SIZE))
    }

    /// The addresses of a run of pages, in every mapping of them.
    pub fn addresses<'a>(
        &'a self,
        region: RegionId,
        pages: &'a Range<usize>,
    ) -> impl Iterator<Item = VirtRange> + 'a {
        self.layout.iter().filter_map(move |piece| piece.addresses(region, pages))
    }
}

/// The mappings of a process of regions that are known.
///
/// # Errors
/// When its mappings cannot be read; `SRCH` when the thread that was asked has ended, or no thread
/// has any.
pub fn scan(pid: u32, known: &HashSet<RegionId>) -> Result<Vec<Piece>, Errno> {
    let mut pieces = Vec::new();
    let mut buffer = vec![0u8; 1 << 16];
    let thread = living_thread(pid)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?
        .ok_or(Errno::SRCH)?;
    for_each_vma_of(thread.pid, thread.tid, &mut buffer, |vma| {
        let region = RegionId { device: vma.device, inode: vma.inode };
        if !vma.private && vma.name.starts_with(REGION_PATH) && known.contains(&region) {
            let page = vma.offset as usize / PAGE_SIZE;
            pieces.push(Piece { range: vma.range, region, page });
        }
        true
    })
    .map_err(|errno| if errno == Errno::NOENT { Errno::SRCH } else { errno })?;
    // Of a thread that has ended meanwhile less may have been told.
    if !thread.has_memory().unwrap_or(false) {
        return Err(Errno::SRCH);
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use swaptide_sys::maps::DeviceNumber;

    use super::*;

    #[test]
    fn pieces_translate_both_ways() {
        let at = |page: usize| VirtAddr(0x7000_0000 + page * PAGE_SIZE);
        let device = DeviceNumber { major: 0, minor: 1 };
        let region = RegionId { device, inode: 3 };
        let piece = Piece { range: VirtRange { start: at(0), end: at(10) }, region, page: 100 };
        assert_eq!(
            piece.addresses(region, &(95..103)),
            Some(VirtRange { start: at(0), end: at(3) })
        );
        assert_eq!(
            piece.addresses(region, &(108..200)),
            Some(VirtRange { start: at(8), end: at(10) })
        );
        assert_eq!(piece.addresses(region, &(110..200)), None);
        assert_eq!(piece.addresses(RegionId { device, inode: 4 }, &(100..110)), None);
    }

    #[test]
    fn a_process_s_mappings_of_a_region_are_found_by_its_file() {
        let memory = swaptide_sys::mem::memfd_create(
            swaptide_ipc::shared::REGION_NAME,
            8 * PAGE_SIZE as u64,
        )
        .expect("memfd");
        let map =
            swaptide_sys::mem::SharedMap::map(swaptide_sys::AsFd::as_fd(&memory), 8 * PAGE_SIZE)
                .expect("map");
        let region = RegionId::of(&memory.into()).expect("stat");
        let found = |region| scan(std::process::id(), &HashSet::from([region])).expect("maps");
        assert_eq!(found(region), [Piece { range: map.range(), region, page: 0 }]);
        assert_eq!(found(RegionId { inode: region.inode + 1, ..region }), []);
        // Another file system may have a file of that name and inode.
        let device = DeviceNumber { minor: region.device.minor + 1, ..region.device };
        assert_eq!(found(RegionId { device, ..region }), []);
    }
}
