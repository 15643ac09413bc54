//! Which device an extent lies on, and the open descriptors of the devices.
//!
//! A device is opened when its first extent is read or written, and again when its number has been
//! given to another one. In a forked child nothing of the parent's is used: its descriptors may be
//! other files there.
//!
//! An extent may have a copy on a *mirror*, a local device, while the extent's own is a server's.
//! Then writes go to both, and fail if one fails; reads go to the mirror, which answers at once,
//! and to the server if the mirror fails or has something else than was written
//! ([`BlockIo::read_copy`]). So what is mirrored is there as long as one of both is, and no
//! thread waits for a server to read it.
//!
//! Invariants:
//! 1. A transfer goes to the device whose generation is that of the extent's place at that moment.
//! 2. A write succeeds only when it is on the mirror and on the server.
//! 3. From before a write or a trim is sent to a server until it is answered, its extents are in
//!    doubt ([`AreaDirectory::doubt`]). Those of one that is never answered stay so.
//!
//! Locks: that of a device's descriptor, held while it is opened, not across transfers.

use core::ops::Range;
use core::time::Duration;
use std::sync::Arc;

use swaptide_sys::Errno;
use swaptide_sys::lock::Lock;
use swaptide_sys::thread::sleep;

use super::io::{self, BlockIo, SwapFile};
use super::opened::{HandedOver, Opened};
use super::{EXTENT_BYTES, Extent};
use crate::PAGE_SIZE;
use crate::block::{BlockRun, is_own_shortage};
use crate::nbd::{Certainty, Nbd, Options};

/// Areas that there can be.
pub const MAX_AREAS: usize = 16;

/// A place on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePlace {
    /// The number of its area, below [`MAX_AREAS`].
    pub area: u8,
    /// Tells the areas apart that have had this number.
    pub generation: u32,
    /// Its first byte there.
    pub offset: u64,
}

/// The location of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The place on the area that it belongs to.
    pub spot: FilePlace,
    /// A copy of it.
    pub mirror: Option<FilePlace>,
}

/// The areas that extents lie on.
pub trait AreaDirectory: Send + Sync {
    /// Returns the location of a leased extent.
    fn locate(&self, extent: Extent) -> Option<Location>;

    /// Opens an area for this process. May wait for another process.
    ///
    /// # Errors
    /// The error of a resource that this process lacks (descriptors, say), or `NODEV`.
    fn open(&self, area: u8) -> Result<Opened, Errno>;

    /// Counts a failed transfer; too many empty the area.
    fn failed(&self, area: u8);

    /// A change of an extent is sent to a server now. Tells whether the extent was not in doubt
    /// before.
    fn doubt(&self, _extent: Extent) -> bool {
        false
    }

    /// All of it was answered.
    fn clear_doubt(&self, _extent: Extent) {}

    /// Returns the fault of the next transfer, for tests.
    fn injected_fault(&self, _area: u8, _writes: bool) -> Option<InjectedFault> {
        None
    }
}

/// Faults of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// The transfer fails, and nothing of it is done.
    Fails(Errno),
    /// A write fails, and half of it is done; a read fails.
    Torn,
    /// A write does half, and says so; a read is whole.
    Short,
    /// The transfer takes so much longer, and is done.
    Slow(Duration),
}

type Io = Arc<dyn BlockIo>;

/// Sends each transfer to the area of its extent, and to the mirror.
pub(super) struct Router {
    areas: Box<dyn AreaDirectory>,
    open: [Lock<Option<(u32, Io)>>; MAX_AREAS],
}

fn io_of(opened: Opened) -> Io {
    match opened {
        Opened::File(fd) => Arc::new(SwapFile::new(fd)),
        Opened::Nbd { connection, export, dialer } => {
            Arc::new(Nbd::new(export, Options::default(), dialer, connection.into_iter().collect()))
        }
    }
}

impl Router {
    pub(super) fn new(areas: Box<dyn AreaDirectory>) -> Router {
        Router { areas, open: Default::default() }
    }

    /// Returns the location of the extent of a byte, and the byte's offset in it.
    fn find(&self, offset: u64) -> Result<(Location, u64), Errno> {
        let place =
            self.areas.locate(Extent((offset / EXTENT_BYTES) as u32)).ok_or(Errno::NODEV)?;
        Ok((place, offset % EXTENT_BYTES))
    }

    /// Does something with a device; a failure that speaks against the device is noted.
    fn on<T>(
        &self,
        spot: FilePlace,
        f: impl FnOnce(&dyn BlockIo, u64) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let io = self.device(spot.area, spot.generation)?;
        self.judged(spot.area, f(&*io, spot.offset))
    }

    fn device(&self, area: u8, generation: u32) -> Result<Io, Errno> {
        let mut open = self.open.get(usize::from(area)).ok_or(Errno::NODEV)?.lock();
        match &*open {
            Some((of, io)) if *of == generation => Ok(Arc::clone(io)),
            _ => {
                let io = io_of(self.areas.open(area)?);
                *open = Some((generation, Arc::clone(&io)));
                Ok(io)
            }
        }
    }

    /// Writes to a device, or has happen what a test wants.
    fn write_there(
        &self,
        area: u8,
        io: &dyn BlockIo,
        at: u64,
        bytes: &[u8],
    ) -> (Result<usize, Errno>, Certainty) {
        // Whole blocks, as devices do.
        let half = &bytes[..bytes.len() / 2 / PAGE_SIZE * PAGE_SIZE];
        match self.areas.injected_fault(area, true) {
            Some(InjectedFault::Fails(errno)) => (Err(errno), Certainty::Answered),
            Some(InjectedFault::Torn) => {
                let (written, certainty) = io.write_surely(at, half);
                (written.and(Err(Errno::IO)), certainty)
            }
            Some(InjectedFault::Short) if !half.is_empty() => io.write_surely(at, half),
            Some(InjectedFault::Slow(time)) => {
                sleep(time);
                io.write_surely(at, bytes)
            }
            _ => io.write_surely(at, bytes),
        }
    }

    /// Changes something in the extents of a range, which are in doubt until it is answered.
    fn change<T>(
        &self,
        io: &dyn BlockIo,
        range: Range<u64>,
        f: impl FnOnce() -> (Result<T, Errno>, Certainty),
    ) -> Result<T, Errno> {
        if !io.is_remote() {
            return f().0;
        }
        let extents = range.start / EXTENT_BYTES..range.end.div_ceil(EXTENT_BYTES);
        let fresh: Vec<Extent> = extents
            .map(|number| Extent(number as u32))
            .filter(|extent| self.areas.doubt(*extent))
            .collect();
        let (result, certainty) = f();
        if certainty == Certainty::Answered {
            fresh.into_iter().for_each(|extent| self.areas.clear_doubt(extent));
        }
        result
    }

    /// The same before a read.
    fn before_read(&self, area: u8) -> Result<(), Errno> {
        match self.areas.injected_fault(area, false) {
            Some(InjectedFault::Fails(errno)) => Err(errno),
            Some(InjectedFault::Torn) => Err(Errno::IO),
            Some(InjectedFault::Slow(time)) => {
                sleep(time);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Notes a failure that speaks against the device. Not those of the caller: a quota is no more
    /// room, a limit on the size of files (`RLIMIT_FSIZE`) is this process's alone, and so is what
    /// it is short of. One that is short of something itself is not broken.
    fn judged<T>(&self, area: u8, result: Result<T, Errno>) -> Result<T, Errno> {
        let result =
            result.map_err(|errno| if errno == Errno::DQUOT { Errno::NOSPC } else { errno });
        if let Err(errno) = &result
            && !matches!(*errno, Errno::INTR | Errno::NOSPC | Errno::BUSY | Errno::FBIG)
            && !is_own_shortage(*errno)
        {
            self.areas.failed(area);
        }
        result
    }
}

impl Router {
    /// Reads runs that all lie on one area, from the spots that `of` says.
    fn read_there(
        &self,
        runs: &mut [BlockRun<'_>],
        of: impl Fn(Location) -> Option<FilePlace>,
        is_brief: bool,
    ) -> Result<(), (usize, Errno)> {
        let mut device = None;
        let mut there = Vec::with_capacity(runs.len());
        for run in runs {
            let (place, within) = self.find(run.offset).map_err(|errno| (run.first, errno))?;
            let spot = of(place).ok_or((run.first, Errno::NODEV))?;
            if device.is_none() {
                device = Some((
                    spot.area,
                    self.device(spot.area, spot.generation).map_err(|errno| (run.first, errno))?,
                ));
            }
            there.push(BlockRun {
                offset: spot.offset + within,
                first: run.first,
                buf: &mut *run.buf,
            });
        }
        let Some((area, io)) = device else { return Ok(()) };
        let first = there.first().map_or(0, |run| run.first);
        let read = self.before_read(area).map_err(|errno| (first, errno)).and_then(|()| {
            if is_brief { io.read_runs_briefly(&mut there) } else { io.read_runs(&mut there) }
        });
        read.map_err(|(block, errno)| {
            let _ = self.judged::<()>(area, Err(errno));
            (block, errno)
        })
    }

    /// Reads runs, those of each area together.
    fn read_all(&self, runs: &mut [BlockRun<'_>], is_brief: bool) -> Result<(), (usize, Errno)> {
        let mut rest = runs;
        while let Some(first) = rest.first() {
            let (lead, _) = self.find(first.offset).map_err(|errno| (first.first, errno))?;
            // Extents of two areas are never neighbours, so a run lies on one.
            let same = |run: &BlockRun<'_>| {
                self.find(run.offset).is_ok_and(|(place, _)| place.spot.area == lead.spot.area)
            };
            let n = rest.iter().take_while(|run| same(run)).count().max(1);
            let (some, later) = rest.split_at_mut(n);
            if lead.mirror.is_none()
                || self.read_there(some, |place| place.mirror, is_brief).is_err()
            {
                self.read_there(some, |place| Some(place.spot), is_brief)?;
            }
            rest = later;
        }
        Ok(())
    }
}

impl BlockIo for Router {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, Errno> {
        let (place, within) = self.find(offset)?;
        if let Some(mirror) = place.mirror
            && let Ok(n) = self.on(mirror, |io, at| io.read_at(at + within, buf))
            && n > 0
        {
            return Ok(n);
        }
        self.on(place.spot, |io, at| io.read_at(at + within, buf))
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
        let (place, within) = self.find(offset)?;
        if let Some(mirror) = place.mirror {
            self.on(mirror, |io, at| {
                io::write_all(io, at + within, bytes).map_err(|(_, errno)| errno)
            })?;
        }
        let range = offset..offset + bytes.len() as u64;
        self.on(place.spot, |io, at| {
            self.change(io, range, || self.write_there(place.spot.area, io, at + within, bytes))
        })
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), Errno> {
        // One that cannot punch is none the worse for it.
        let (place, within) = self.find(offset)?;
        let punch = |spot: FilePlace| {
            let io = self.device(spot.area, spot.generation)?;
            let range = offset..offset + len;
            self.change(&*io, range, || io.punch_surely(spot.offset + within, len))
        };
        let copy = place.mirror.map_or(Ok(()), punch);
        punch(place.spot).and(copy)
    }

    fn read_runs(&self, runs: &mut [BlockRun<'_>]) -> Result<(), (usize, Errno)> {
        self.read_all(runs, false)
    }

    fn read_runs_briefly(&self, runs: &mut [BlockRun<'_>]) -> Result<(), (usize, Errno)> {
        self.read_all(runs, true)
    }

    fn read_copy(&self, offset: u64, blocks: &mut [u8]) -> Result<(), Errno> {
        let (place, within) = self.find(offset)?;
        let mirror = place.mirror.ok_or(Errno::NODEV)?;
        // It has something else than was written, though it did not say so.
        self.areas.failed(mirror.area);
        self.on(place.spot, |io, at| {
            io::read_run(io, &mut BlockRun { offset: at + within, first: 0, buf: blocks })
                .map_err(|(_, errno)| errno)
        })
    }

    fn close(&self) {
        self.open.iter().for_each(|open| *open.lock() = None);
    }

    fn shared(&self) -> Vec<HandedOver> {
        let open = (0..).zip(&self.open);
        let shared = open.filter_map(|(area, open)| {
            let (generation, io) = open.lock().clone()?;
            Some(HandedOver { area, generation, opened: Opened::File(io.share()?) })
        });
        shared.collect()
    }

    fn abandon(&self, handed: Vec<HandedOver>) {
        for open in &self.open {
            // Not dropped: what it would close is another file here, or the parent's ring.
            std::mem::forget(open.lock().take());
        }
        for HandedOver { area, generation, opened } in handed {
            if let Some(open) = self.open.get(usize::from(area)) {
                *open.lock() = Some((generation, io_of(opened)));
            }
        }
    }

    unsafe fn force_unlock(&self) {
        for open in &self.open {
            // SAFETY: its holder does not exist in this process (caller), and what it guards
            // is replaced whole, by `abandon` at the latest.
            unsafe { open.force_unlock() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_SIZE;
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    /// Even extents lie on area 0, odd ones on area 1; each in a file of its own.
    struct Two {
        files: [File; 2],
        generation: AtomicU32,
        opened: Mutex<Vec<u8>>,
        failed: Mutex<Vec<u8>>,
        /// Number of times that an area cannot be opened for want of a descriptor.
        lacks: AtomicU32,
    }

    impl AreaDirectory for &'static Two {
        fn locate(&self, extent: Extent) -> Option<Location> {
            let generation = self.generation.load(Relaxed);
            let offset = u64::from(extent.0 / 2) * EXTENT_BYTES;
            let spot = FilePlace { area: (extent.0 % 2) as u8, generation, offset };
            (extent.0 < 8).then_some(Location { spot, mirror: None })
        }

        fn open(&self, area: u8) -> Result<Opened, Errno> {
            if self.lacks.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1)).is_ok() {
                return Err(Errno::MFILE);
            }
            self.opened.lock().unwrap().push(area);
            let file = &self.files[usize::from(area)];
            Ok(Opened::File(file.try_clone().map_err(|_| Errno::MFILE)?.into()))
        }

        fn failed(&self, area: u8) {
            self.failed.lock().unwrap().push(area);
        }
    }

    fn file() -> File {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("swaptide-router-{}-{}", std::process::id(), NUMBER.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(4 * EXTENT_BYTES).unwrap();
        file
    }

    fn two() -> &'static Two {
        let files = [file(), file()];
        let (generation, opened, failed, lacks) = Default::default();
        Box::leak(Box::new(Two { files, generation, opened, failed, lacks }))
    }

    fn block(byte: u8) -> super::super::buffer::Buffer {
        let mut buffer = super::super::buffer::Buffer::default();
        buffer.blocks(1).unwrap().fill(byte);
        buffer
    }

    #[test]
    fn an_area_not_opened_for_lack_of_descriptors_is_opened_later() {
        let two = two();
        let router = Router::new(Box::new(two));
        assert_eq!(router.write_at(0, block(7).blocks(1).unwrap()), Ok(PAGE_SIZE));
        // Its number is given to another generation: it is to be opened again.
        two.generation.store(1, Relaxed);
        two.lacks.store(2, Relaxed);
        let mut page = block(0);
        assert_eq!(router.read_at(0, page.blocks(1).unwrap()), Err(Errno::MFILE));
        let buf = page.blocks(1).unwrap();
        let read = router.read_runs(&mut [BlockRun { offset: 0, first: 3, buf }]);
        assert_eq!(read, Err((3, Errno::MFILE)));
        assert_eq!(router.read_at(0, page.blocks(1).unwrap()), Ok(PAGE_SIZE));
        assert_eq!(page.blocks(1).unwrap()[0], 7);
        assert!(two.failed.lock().unwrap().is_empty(), "nothing speaks against the area");
    }

    #[test]
    fn transfers_go_to_the_device_of_the_extent() {
        let two = two();
        let router = Router::new(Box::new(two));
        for extent in 0..8u8 {
            let at = u64::from(extent) * EXTENT_BYTES + PAGE_SIZE as u64;
            assert_eq!(router.write_at(at, block(extent + 1).blocks(1).unwrap()), Ok(PAGE_SIZE));
        }
        for extent in 0..8u8 {
            let mut page = block(0);
            let at = u64::from(extent / 2) * EXTENT_BYTES + PAGE_SIZE as u64;
            two.files[usize::from(extent % 2)].read_exact_at(page.blocks(1).unwrap(), at).unwrap();
            assert!(page.blocks(1).unwrap().iter().all(|byte| *byte == extent + 1));
        }
        let mut buffer = super::super::buffer::Buffer::default();
        let mut runs: Vec<_> = buffer
            .blocks(8)
            .unwrap()
            .chunks_mut(PAGE_SIZE)
            .enumerate()
            .map(|(i, buf)| BlockRun {
                offset: i as u64 * EXTENT_BYTES + PAGE_SIZE as u64,
                first: i,
                buf,
            })
            .collect();
        router.read_runs(&mut runs).unwrap();
        assert!(runs.iter().all(|run| run.buf[77] == run.first as u8 + 1));
        assert_eq!(*two.opened.lock().unwrap(), [0, 1], "each is opened once");
    }

    #[test]
    fn a_number_that_another_device_has_got_is_opened_again() {
        let two = two();
        let router = Router::new(Box::new(two));
        router.write_at(0, block(1).blocks(1).unwrap()).unwrap();
        two.generation.store(1, Relaxed);
        router.write_at(0, block(2).blocks(1).unwrap()).unwrap();
        assert_eq!(*two.opened.lock().unwrap(), [0, 0]);
    }

    #[test]
    fn an_extent_of_no_area_is_an_error_and_failures_are_told() {
        let two = two();
        let router = Router::new(Box::new(two));
        assert_eq!(
            router.read_at(8 * EXTENT_BYTES, block(0).blocks(1).unwrap()),
            Err(Errno::NODEV)
        );
        assert!(two.failed.lock().unwrap().is_empty());
        let read_only = File::open("/dev/null").unwrap();
        router.abandon(vec![HandedOver {
            area: 1,
            generation: 0,
            opened: Opened::File(read_only.into()),
        }]);
        assert_eq!(router.write_at(EXTENT_BYTES, block(1).blocks(1).unwrap()), Err(Errno::BADF));
        assert_eq!(*two.failed.lock().unwrap(), [1]);
    }

    #[test]
    fn a_quota_means_no_room_and_rlimits_blame_no_device() {
        let two = two();
        let router = Router::new(Box::new(two));
        assert_eq!(router.judged::<()>(0, Err(Errno::DQUOT)), Err(Errno::NOSPC));
        assert_eq!(router.judged::<()>(0, Err(Errno::FBIG)), Err(Errno::FBIG));
        assert!(two.failed.lock().unwrap().is_empty());
        assert_eq!(router.judged::<()>(1, Err(Errno::IO)), Err(Errno::IO));
        assert_eq!(*two.failed.lock().unwrap(), [1]);
    }

    #[test]
    fn a_child_uses_what_it_was_given_and_opens_the_rest() {
        let two = two();
        let router = Router::new(Box::new(two));
        for extent in [0, 1] {
            router.write_at(extent * EXTENT_BYTES, block(1).blocks(1).unwrap()).unwrap();
        }
        let own = file();
        let opened = Opened::File(own.try_clone().unwrap().into());
        router.abandon(vec![HandedOver { area: 0, generation: 0, opened }]);
        for extent in [0, 1] {
            router.write_at(extent * EXTENT_BYTES, block(9).blocks(1).unwrap()).unwrap();
        }
        let mut page = block(0);
        own.read_exact_at(page.blocks(1).unwrap(), 0).unwrap();
        assert_eq!(page.blocks(1).unwrap()[5], 9);
        assert_eq!(*two.opened.lock().unwrap(), [0, 1, 1]);
    }
}
