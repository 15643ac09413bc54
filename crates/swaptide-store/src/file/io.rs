//! Reading and writing the swap file.
//!
//! [`BlockIo`] is what the device needs of a file, one system call each, so that tests can put a
//! failing disk in its place; what turns those into whole transfers is here too. [`SwapFile`] is
//! the real one: plain `pread` and `pwrite`, with `O_DIRECT` where the file system takes it, and an
//! io_uring for batches of scattered reads.
//!
//! The ring is made by the thread that first needs it (a process may keep the engine's descriptors
//! apart from the program's) and used by one thread at a time.

use std::sync::atomic::{AtomicUsize, Ordering};

use io_uring::{IoUring, opcode, types};
use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use swaptide_sys::lock::Lock;
use swaptide_sys::mem::is_kept_from_children;
use swaptide_sys::{AsRawFd, Errno, OwnedFd};

use super::opened::HandedOver;
use crate::PAGE_SIZE;
use crate::block::BlockRun;
use crate::nbd::{Certainty, Nbd};

/// Scattered reads that make an io_uring worth entering.
const MIN_RING_READS: usize = 2;
/// Reads in flight at most.
const MAX_RING_READS: u32 = 64;

/// A file, one system call at a time. A transfer may be short.
pub(crate) trait BlockIo: Send + Sync {
    /// Reads some bytes; 0 at the end of the file.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, Errno>;

    /// Writes some bytes.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<usize, Errno>;

    /// Gives a range's space back; it reads as zeros afterwards.
    fn punch(&self, offset: u64, len: u64) -> Result<(), Errno>;

    /// True if what a call has begun may happen after it: there is a server that does it.
    fn is_remote(&self) -> bool {
        false
    }

    /// As [`Self::write_at`]; tells whether some of it may happen later.
    fn write_surely(&self, offset: u64, bytes: &[u8]) -> (Result<usize, Errno>, Certainty) {
        (self.write_at(offset, bytes), Certainty::Answered)
    }

    /// As [`Self::punch`]; tells whether some of it may happen later.
    fn punch_surely(&self, offset: u64, len: u64) -> (Result<(), Errno>, Certainty) {
        (self.punch(offset, len), Certainty::Answered)
    }

    /// Reads all runs in full, at once if it can. On failure, tells which block failed.
    fn read_runs(&self, runs: &mut [BlockRun<'_>]) -> Result<(), (usize, Errno)> {
        runs.iter_mut().try_for_each(|run| read_run(self, run))
    }

    /// As [`Self::read_runs`], and gives up on a server as soon as a write would.
    fn read_runs_briefly(&self, runs: &mut [BlockRun<'_>]) -> Result<(), (usize, Errno)> {
        self.read_runs(runs)
    }

    /// Reads whole blocks from the other copy that there is of them: what is read otherwise is not
    /// what was written.
    fn read_copy(&self, _offset: u64, _blocks: &mut [u8]) -> Result<(), Errno> {
        Err(Errno::NODEV)
    }

    /// The descriptor once more, where another process may use the same one.
    fn share(&self) -> Option<OwnedFd> {
        None
    }

    /// See [`super::FileDevice::shared`].
    fn shared(&self) -> Vec<HandedOver> {
        Vec::new()
    }

    /// See [`super::FileDevice::close`].
    fn close(&self) {}

    /// See [`super::FileDevice::abandon`].
    fn abandon(&self, _handed: Vec<HandedOver>) {}

    /// See [`super::FileDevice::force_unlock`].
    ///
    /// # Safety
    /// As there.
    unsafe fn force_unlock(&self) {}
}

impl BlockIo for Nbd {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, Errno> {
        Nbd::read_at(self, offset, buf)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
        Nbd::write_at(self, offset, bytes)
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.trim(offset, len)
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn write_surely(&self, offset: u64, bytes: &[u8]) -> (Result<usize, Errno>, Certainty) {
        Nbd::write_surely(self, offset, bytes)
    }

    fn punch_surely(&self, offset: u64, len: u64) -> (Result<(), Errno>, Certainty) {
        self.trim_surely(offset, len)
    }

    fn read_runs(&self, runs: &mut [BlockRun<'_>]) -> Result<(), (usize, Errno)> {
        self.read_all(runs)
    }

    fn read_runs_briefly(&self, runs: &mut [BlockRun<'_>]) -> Result<(), (usize, Errno)> {
        self.read_all_briefly(runs)
    }

    /// Nothing is handed over: a connection is one process's.
    fn abandon(&self, _handed: Vec<HandedOver>) {
        self.forget();
    }
}

/// Writes all of `bytes`. On failure, tells from which place of the file on.
pub(super) fn write_all(
    io: &dyn BlockIo,
    mut offset: u64,
    mut bytes: &[u8],
) -> Result<(), (u64, Errno)> {
    while !bytes.is_empty() {
        match io.write_at(offset, bytes) {
            // A device that takes nothing has nothing left to take.
            Ok(0) => return Err((offset, Errno::NOSPC)),
            Ok(n) => {
                offset += n as u64;
                bytes = &bytes[n..];
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err((offset, errno)),
        }
    }
    Ok(())
}

/// Reads a run in full. On failure, tells which block failed.
pub(super) fn read_run<I: BlockIo + ?Sized>(
    io: &I,
    run: &mut BlockRun<'_>,
) -> Result<(), (usize, Errno)> {
    let got = loop {
        match io.read_at(run.offset, run.buf) {
            Err(Errno::INTR) => {}
            // Which of the blocks it is, the reads one by one will show.
            Err(_) if run.buf.len() > PAGE_SIZE => break 0,
            Err(errno) => return Err((run.first, errno)),
            Ok(n) => break n,
        }
    };
    finish_run(io, run, got)
}

/// Reads what is missing of a run of which `got` bytes were read, block by block.
fn finish_run<I: BlockIo + ?Sized>(
    io: &I,
    run: &mut BlockRun<'_>,
    mut got: usize,
) -> Result<(), (usize, Errno)> {
    for (i, block) in run.buf.chunks_mut(PAGE_SIZE).enumerate() {
        let mut done = got.min(block.len());
        got -= done;
        while done < block.len() {
            match io.read_at(run.offset + (i * PAGE_SIZE + done) as u64, &mut block[done..]) {
                // The file ends before a block that was written to it: someone has cut it.
                Ok(0) => return Err((run.first + i, Errno::IO)),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(errno) => return Err((run.first + i, errno)),
            }
        }
    }
    Ok(())
}

/// The real swap file.
pub(super) struct SwapFile {
    /// With `O_DIRECT`, until a transfer was refused with it.
    fd: OwnedFd,
    ring: Lock<Ring>,
}

/// Mappings of one ring: its queues, and the submission entries.
const MAPPINGS_OF_RING: usize = 2;
/// Rings of this process that are the engine's, also forgotten ones of its parents: a child has
/// their mappings.
static OWN_RINGS: AtomicUsize = AtomicUsize::new(0);

/// At least as many mappings of io_uring as this crate has in the process now. There may be fewer
/// while a ring is being made.
pub fn own_ring_mappings() -> usize {
    OWN_RINGS.load(Ordering::Acquire) * MAPPINGS_OF_RING
}

/// Counts a ring from before it is mapped until after it is unmapped.
struct Counted;

impl Counted {
    fn new() -> Counted {
        OWN_RINGS.fetch_add(1, Ordering::AcqRel);
        Counted
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        OWN_RINGS.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A ring, which is dropped before it ceases to count.
struct OwnRing {
    ring: Box<IoUring>,
    _counted: Counted,
}

impl OwnRing {
    fn new() -> std::io::Result<OwnRing> {
        let counted = Counted::new();
        let mut builder = IoUring::builder();
        if is_kept_from_children() {
            builder.dontfork();
        }
        Ok(OwnRing { ring: Box::new(builder.build(MAX_RING_READS)?), _counted: counted })
    }
}

enum Ring {
    Untried,
    Ready(OwnRing),
    /// The kernel or a seccomp filter does not allow it.
    Refused,
}

impl SwapFile {
    pub(super) fn new(fd: OwnedFd) -> SwapFile {
        // File systems without it refuse the flag here, or the first transfer.
        let _ = fcntl_getfl(&fd).and_then(|flags| fcntl_setfl(&fd, flags | OFlags::DIRECT));
        SwapFile { fd, ring: Lock::new(Ring::Untried) }
    }

    /// After a refused transfer: whether to try again, without `O_DIRECT`. It is so too where the
    /// flag is off already: another thread's transfer may have been refused in between.
    fn drop_direct(&self, errno: Errno) -> bool {
        let fd = &self.fd;
        errno == Errno::INVAL
            && fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags - OFlags::DIRECT)).is_ok()
    }

    /// Reads all runs through the ring; what it leaves short is finished one by one.
    fn read_with_ring(
        &self,
        ring: &mut IoUring,
        runs: &mut [BlockRun<'_>],
    ) -> Result<(), (usize, Errno)> {
        let fd = &self.fd;
        for batch in runs.chunks_mut(MAX_RING_READS as usize) {
            let mut got = [0usize; MAX_RING_READS as usize];
            for (i, run) in batch.iter_mut().enumerate() {
                let read = opcode::Read::new(
                    types::Fd(fd.as_raw_fd()),
                    run.buf.as_mut_ptr(),
                    run.buf.len() as u32,
                )
                .offset(run.offset)
                .build()
                .user_data(i as u64);
                // SAFETY: the buffers outlive the request: this function does not return (and the
                // loop does not continue) before every request has completed.
                unsafe { ring.submission().push(&read) }
                    .expect("the ring has room for a batch, and is empty between batches");
            }
            let mut left = batch.len();
            while left > 0 {
                if let Err(err) = ring.submit_and_wait(left)
                    && err.raw_os_error() != Some(Errno::INTR.raw_os_error())
                    && err.raw_os_error() != Some(Errno::AGAIN.raw_os_error())
                    && err.raw_os_error() != Some(Errno::BUSY.raw_os_error())
                {
                    // It is unknown by now which buffers the kernel still writes to.
                    panic!(
                        "swap file: io_uring does not answer ({err}) with {left} reads under way"
                    );
                }
                for done in ring.completion() {
                    // A failed read counts as one of no bytes: it is tried again below, and its
                    // error seen there.
                    got[done.user_data() as usize] = usize::try_from(done.result()).unwrap_or(0);
                    left -= 1;
                }
            }
            for (run, got) in batch.iter_mut().zip(got) {
                if got != run.buf.len() {
                    finish_run(self, run, got)?;
                }
            }
        }
        Ok(())
    }
}

impl BlockIo for SwapFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, Errno> {
        let fd = &self.fd;
        match rustix::io::pread(fd, &mut *buf, offset) {
            Err(errno) if self.drop_direct(errno) => rustix::io::pread(fd, buf, offset),
            answer => answer,
        }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
        let fd = &self.fd;
        match rustix::io::pwrite(fd, bytes, offset) {
            Err(errno) if self.drop_direct(errno) => rustix::io::pwrite(fd, bytes, offset),
            answer => answer,
        }
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), Errno> {
        fallocate(&self.fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
    }

    fn share(&self) -> Option<OwnedFd> {
        self.fd.try_clone().ok()
    }

    fn read_runs(&self, runs: &mut [BlockRun<'_>]) -> Result<(), (usize, Errno)> {
        if runs.len() >= MIN_RING_READS
            && let Some(mut ring) = self.ring.try_lock()
        {
            if matches!(*ring, Ring::Untried) {
                *ring = OwnRing::new().map_or(Ring::Refused, Ring::Ready);
            }
            if let Ring::Ready(ring) = &mut *ring {
                return self.read_with_ring(&mut ring.ring, runs);
            }
        }
        runs.iter_mut().try_for_each(|run| read_run(self, run))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_io_refused_to_two_transfers_is_disabled_once() {
        let name = format!("swaptide-direct-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path);
        std::fs::remove_file(&path).expect("made just now");
        let file = SwapFile::new(file.expect("a file").into());
        // Both were refused before either has taken the flag off.
        assert!(file.drop_direct(Errno::INVAL));
        assert!(!fcntl_getfl(&file.fd).expect("flags").contains(OFlags::DIRECT));
        assert!(file.drop_direct(Errno::INVAL), "the second one counts against the area");
        assert!(!file.drop_direct(Errno::IO));
        assert_eq!(file.write_at(0, &[1; 100]), Ok(100));
    }
}
