//! `process_vm_writev`, which writes past page tables ([`swaptide_ipc::Segment::write_past`]).
//!
//! Where the run has shared memory, the call is made a page at a time, each after what it reads was
//! touched: so none has to wait for that, as a rule, while it holds the page that it writes to.
//! What is counted meanwhile the pager of shared memory waits for.
//!
//! Owns: nothing. Locks: none; nothing is allocated.

use std::ffi::c_int;

use swaptide_sys::Errno;
use swaptide_sys::page::PAGE_SIZE;
use swaptide_sys::raw::syscall6;
use swaptide_sys::thread::{block_all_signals, getpid, restore_signals};

use crate::probe;
use crate::process;
use crate::real;
use crate::seccomp;
use crate::shmem;

pub(super) const SYS_PROCESS_VM_WRITEV: usize =
    linux_raw_sys::general::__NR_process_vm_writev as usize;
/// The kernel refuses more.
const MAX_VECTORS: usize = 1024;

fn call(words: [usize; 6]) -> isize {
    // SAFETY: the addresses are the program's own, or of a buffer that lives through the call.
    unsafe { syscall6(SYS_PROCESS_VM_WRITEV as u32, words) as isize }
}

/// A walk over the ranges of an array of vectors.
struct Cursor {
    next: usize,
    left: usize,
    addr: usize,
    len: usize,
}

impl Cursor {
    fn new(vectors: usize, count: usize) -> Cursor {
        Cursor { next: vectors, left: count, addr: 0, len: 0 }
    }

    /// The rest of the range that it is at; `None` at the end.
    ///
    /// # Errors
    /// Where a vector cannot be read, or is none.
    fn piece(&mut self) -> Result<Option<(usize, usize)>, ()> {
        while self.len == 0 {
            if self.left == 0 {
                return Ok(None);
            }
            let [addr, len] = probe::read_words(self.next).ok_or(())?;
            if isize::try_from(len).is_err() {
                return Err(());
            }
            (self.addr, self.len) = (addr, len);
            self.next += size_of::<[usize; 2]>();
            self.left -= 1;
        }
        Ok(Some((self.addr, self.len)))
    }

    /// True if all vectors are there, and are some.
    fn leads_to_end(mut self) -> bool {
        loop {
            match self.piece() {
                Ok(None) => return true,
                Ok(Some((_, len))) => self.advance(len),
                Err(()) => return false,
            }
        }
    }

    fn advance(&mut self, bytes: usize) {
        self.addr = self.addr.wrapping_add(bytes);
        self.len -= bytes;
    }
}

/// True if some of what is written to may be of shared memory that is managed.
fn may_be_shared(pid: usize, remote: usize, remotes: usize) -> bool {
    if pid as u32 != getpid().0 {
        return true;
    }
    let mut cursor = Cursor::new(remote, remotes);
    while let Ok(Some((addr, len))) = cursor.piece() {
        if shmem::concerns(addr, len) {
            return true;
        }
        cursor.advance(len);
    }
    false
}

/// process_vm_writev(2). Returns the raw result of the system call.
pub(super) fn write(words: [usize; 6]) -> isize {
    let [pid, _, locals, remote, remotes, flags] = words;
    let is_refused = flags != 0 || locals > MAX_VECTORS || remotes > MAX_VECTORS;
    let watching = process::own_slot().filter(|(segment, _)| segment.watches_past_writes());
    let Some((segment, slot)) = watching.filter(|_| !seccomp::is() && !is_refused) else {
        return call(words);
    };
    if !may_be_shared(pid, remote, remotes) {
        return call(words);
    }
    // No signal handler is to leave it while it is counted.
    let Ok(mask) = block_all_signals() else { return call(words) };
    let result = in_pieces(words, |piece| segment.write_past(slot, || call(piece)));
    restore_signals(mask);
    result
}

/// The same a page at a time, by `write`.
#[inline(never)]
fn in_pieces(words: [usize; 6], write: impl Fn([usize; 6]) -> isize) -> isize {
    let [pid, local, locals, remote, remotes, _] = words;
    // What the kernel refuses it refuses as a whole, before it writes anything.
    if !Cursor::new(local, locals).leads_to_end() || !Cursor::new(remote, remotes).leads_to_end() {
        return write(words);
    }
    let (mut from, mut to) = (Cursor::new(local, locals), Cursor::new(remote, remotes));
    let mut done = 0;
    while let (Ok(Some((source, source_len))), Ok(Some((target, target_len)))) =
        (from.piece(), to.piece())
    {
        let bytes = source_len.min(target_len).min(PAGE_SIZE - target % PAGE_SIZE);
        // What is not there the call tells.
        for byte in [source, source.wrapping_add(bytes - 1)] {
            let _ = probe::read(byte, &mut [0]);
        }
        let (local, remote) = ([source, bytes], [target, bytes]);
        let word = write([pid, local.as_ptr() as usize, 1, remote.as_ptr() as usize, 1, 0]);
        if word != bytes as isize {
            return if done == 0 { word } else { done + word.max(0) };
        }
        done += word;
        from.advance(bytes);
        to.advance(bytes);
    }
    done
}

/// Stands in front of libc's `process_vm_writev`.
///
/// # Safety
/// As for process_vm_writev(2).
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn process_vm_writev(
    pid: c_int,
    local: usize,
    locals: usize,
    remote: usize,
    remotes: usize,
    flags: usize,
) -> isize {
    let result = write([pid as usize, local, locals, remote, remotes, flags]);
    if result < 0 {
        real::set_errno(Errno::from_raw_os_error(-result as i32));
        return -1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_that_do_not_match_are_written_as_by_the_kernel() {
        let bytes: Vec<u8> = (0..20_000u32).map(|k| (k * 7) as u8).collect();
        let source = [(0, 1), (1, 9_000), (9_001, 0), (9_001, 10_999)];
        for targets in [&[(3usize, 19_000usize)][..], &[(0, 4_096), (5_000, 2), (6_000, 30_000)]] {
            let mut out = [vec![0u8; 40_000], vec![0u8; 40_000]];
            let results = [0, 1].map(|way| {
                let base = out[way].as_mut_ptr() as usize;
                let local = source.map(|(at, len)| [bytes.as_ptr() as usize + at, len]);
                let remote: Vec<_> = targets.iter().map(|(at, len)| [base + at, *len]).collect();
                let pid = std::process::id() as usize;
                let (l, r) = (local.as_ptr() as usize, remote.as_ptr() as usize);
                let words = [pid, l, local.len(), r, remote.len(), 0];
                if way == 0 { call(words) } else { in_pieces(words, call) }
            });
            assert!(results[0] > 10_000 && results[0] == results[1], "{results:?}");
            assert!(out[0] == out[1]);
        }
        // Bad addresses, and a process that is not there.
        let mut some = [0u8; 8];
        let bad = [[4096usize, 8usize]];
        let good = [[some.as_mut_ptr() as usize, 8]];
        let (bad, good) = (bad.as_ptr() as usize, good.as_ptr() as usize);
        let some_bad = [[bytes.as_ptr() as usize, 8], [bytes.as_ptr() as usize, usize::MAX]];
        let pid = std::process::id() as usize;
        for words in [
            [pid, bad, 1, good, 1, 0],
            [pid, good, 1, bad, 1, 0],
            [pid, 4096, 1, good, 1, 0],
            [usize::MAX >> 33, good, 1, good, 1, 0],
            [pid, good, 0, good, 1, 0],
            [usize::MAX >> 33, bad, 1, good, 1, 0],
            [pid, some_bad.as_ptr() as usize, 2, good, 1, 0],
            [pid, good, 1, some_bad.as_ptr() as usize, 2, 0],
        ] {
            assert_eq!(in_pieces(words, call), call(words), "{words:?}");
        }
    }
}
