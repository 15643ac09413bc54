//! References of the kernel to the program's pages: the note of them, and what a process has of
//! them from before its first hook.
//!
//! Owns: the note ([`REFERENCES`]). Locks: none.

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;

use rustix::fs::{Mode, OFlags, RawDir};
use swaptide_engine::References;
use swaptide_sys::engine_threads::table_holder;
use swaptide_sys::procfs::{parse_u64, read_file};
use swaptide_sys::raw::syscall6;
use swaptide_sys::thread::Tid;

/// Read by the engine; see [`References`].
pub(crate) static REFERENCES: References = References::new();

pub(crate) const O_DIRECT: c_int = linux_raw_sys::general::O_DIRECT as c_int;
/// File systems of Linux 6.18 whose direct reads do not pin the reader's pages: NFS and Ceph.
const UNPINNED: [u64; 2] = [0x6969, 0x00c3_6400];

/// True if direct reads by a descriptor pin nothing.
pub(crate) fn is_unpinned(fd: c_int) -> bool {
    const SYS_FSTATFS: u32 = linux_raw_sys::general::__NR_fstatfs;
    let mut buf = [0u64; 16];
    // SAFETY: the buffer is longer than the structure, whose first word is the type.
    let result =
        unsafe { syscall6(SYS_FSTATFS, [fd as usize, buf.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    result == 0 && UNPINNED.contains(&buf[0])
}

/// The descriptors that a process has from before its first hook: notes rings of io_uring. False if
/// there is one for direct reads that pin nothing, with which the process must not be managed.
pub(crate) fn look_at_inherited() -> bool {
    // This thread's own table is another one: the paths mean the program's.
    let holder = table_holder();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let path = Path::new(holder, b"fd");
    let Ok(path) = CStr::from_bytes_until_nul(&path.0) else { return true };
    let Ok(dir) = rustix::fs::open(path, flags, Mode::empty()) else { return true };
    let mut buf = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(dir, &mut buf);
    while let Some(Ok(entry)) = entries.next() {
        let Some(fd) = parse_u64(entry.file_name().to_bytes()) else { continue };
        let mut path = Path::new(holder, b"fd/");
        path.add(entry.file_name().to_bytes());
        let mut target = [0u8; 32];
        // SAFETY: the path ends with a zero, the buffer is as long as said.
        let len = unsafe {
            const SYS_READLINK: u32 = linux_raw_sys::general::__NR_readlink;
            syscall6(
                SYS_READLINK,
                [path.0.as_ptr() as usize, target.as_mut_ptr() as usize, target.len(), 0, 0, 0],
            )
        } as isize;
        let target = &target[..len.clamp(0, 32) as usize];
        if target == b"anon_inode:[io_uring]" {
            REFERENCES.note();
        }
        if target.first() == Some(&b'/') && is_direct(holder, fd) && is_unpinned_path(&path) {
            return false;
        }
    }
    true
}

/// A path of /proc that ends with a zero.
struct Path([u8; 64], usize);

impl Path {
    /// Of a file about a thread; `None`: the first one.
    fn new(thread: Option<Tid>, file: &[u8]) -> Path {
        let mut path = Path([0; 64], 0);
        path.add(b"/proc/self/");
        if let Some(tid) = thread {
            path.add(b"task/").add_number(tid.0.into()).add(b"/");
        }
        path.add(file);
        path
    }

    fn add(&mut self, part: &[u8]) -> &mut Path {
        let n = part.len().min(self.0.len() - 1 - self.1);
        self.0[self.1..self.1 + n].copy_from_slice(&part[..n]);
        self.1 += n;
        self
    }

    fn add_number(&mut self, number: u64) -> &mut Path {
        let mut digits = [0u8; 20];
        let mut at = digits.len();
        let mut rest = number;
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.add(&digits[at..])
    }
}

fn is_direct(holder: Option<Tid>, fd: u64) -> bool {
    let mut path = Path::new(holder, b"fdinfo/");
    path.add_number(fd);
    let mut text = [0u8; 256];
    let Ok(path) = CStr::from_bytes_until_nul(&path.0) else { return false };
    let Ok(text) = read_file(path, &mut text) else { return false };
    let line = text.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"flags:"));
    let octal = |flags: u64, byte: &u8| {
        if byte.is_ascii_digit() { flags << 3 | u64::from(byte - b'0') } else { flags }
    };
    line.is_some_and(|line| line.iter().fold(0, octal) & O_DIRECT as u64 != 0)
}

fn is_unpinned_path(path: &Path) -> bool {
    const SYS_STATFS: u32 = linux_raw_sys::general::__NR_statfs;
    let mut buf = [0u64; 16];
    // SAFETY: the path ends with a zero; the buffer is longer than the structure.
    let result = unsafe {
        syscall6(SYS_STATFS, [path.0.as_ptr() as usize, buf.as_mut_ptr() as usize, 0, 0, 0, 0])
    };
    result == 0 && UNPINNED.contains(&buf[0])
}
