//! Reading `/proc` and `/sys` without allocating: paths on the stack, numbers out of bytes.

use core::ffi::CStr;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// A short path built on the stack, always ending in a zero byte.
pub struct ProcPath {
    bytes: [u8; 64],
    len: usize,
}

impl ProcPath {
    /// `/proc/PID/FILE`.
    pub(crate) fn proc(pid: u32, file: &str) -> ProcPath {
        let mut path = ProcPath { bytes: [0; 64], len: 0 };
        path.push(b"/proc/");
        path.push_number(pid);
        path.push(b"/");
        path.push(file.as_bytes());
        path
    }

    /// `/proc/PID/task/TID/FILE`.
    pub(crate) fn thread_of(pid: u32, tid: u32, file: &str) -> ProcPath {
        let mut path = ProcPath::proc(pid, "task/");
        path.push_number(tid);
        path.push(b"/");
        path.push(file.as_bytes());
        path
    }

    /// `/proc/self/task/TID/FILE`.
    pub fn task(tid: u32, file: &str) -> ProcPath {
        let mut path = ProcPath { bytes: [0; 64], len: 0 };
        path.push(b"/proc/self/task/");
        path.push_number(tid);
        path.push(b"/");
        path.push(file.as_bytes());
        path
    }

    fn push(&mut self, part: &[u8]) {
        // One byte always stays zero; the names used here are short.
        let room = self.bytes.len() - 1 - self.len;
        assert!(part.len() <= room, "a /proc path fits 63 bytes");
        self.bytes[self.len..self.len + part.len()].copy_from_slice(part);
        self.len += part.len();
    }

    fn push_number(&mut self, n: u32) {
        let mut digits = [0u8; 10];
        self.push(format_u64(n.into(), &mut digits));
    }

    /// As a C string.
    pub fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).expect("the last byte is never written")
    }
}

/// Writes `n` in decimal into the end of `buf`; gives the digits. `buf` must be long enough (20 for
/// any).
fn format_u64(mut n: u64, buf: &mut [u8]) -> &[u8] {
    let mut at = buf.len();
    loop {
        at -= 1;
        buf[at] = b'0' + (n % 10) as u8;
        n /= 10;
        if n == 0 {
            return &buf[at..];
        }
    }
}

/// Opens a file for reading.
pub(crate) fn open_read(path: &CStr) -> Result<OwnedFd, Errno> {
    retry(|| rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()))
}

/// True if a descriptor is that of a file of /proc.
pub(crate) fn is_of_proc(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|file| file.f_type == rustix::fs::PROC_SUPER_MAGIC)
}

/// Opens a file about this process, or, where that is not allowed or /proc is not to be seen, has
/// it opened ([`crate::helper`]). It is the calling thread's own, which has the same content: that
/// of the first thread is empty once that one has ended.
pub(crate) fn open_own(path: &CStr, name: &CStr) -> Result<OwnedFd, Errno> {
    open_read(path).or_else(|errno| match crate::helper::helper() {
        Some(helper) => (helper.proc_file)(name).ok_or(errno),
        None => Err(errno),
    })
}

/// Reads from `fd`, again when a signal came between.
pub(crate) fn read_fd(fd: impl AsFd, buf: &mut [u8]) -> Result<usize, Errno> {
    retry(|| rustix::io::read(&fd, &mut *buf))
}

/// Reads the beginning of a file, as much as `buf` holds.
pub fn read_file<'a>(path: &CStr, buf: &'a mut [u8]) -> Result<&'a [u8], Errno> {
    let fd = open_read(path)?;
    let mut len = 0;
    while len < buf.len() {
        match read_fd(&fd, &mut buf[len..])? {
            0 => break,
            n => len += n,
        }
    }
    Ok(&buf[..len])
}

/// Calls `f` until it ends otherwise than by a signal.
pub(crate) fn retry<T>(mut f: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match f() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

/// A decimal number that is all of `bytes`.
pub fn parse_u64(bytes: &[u8]) -> Option<u64> {
    parse_radix(bytes, 10)
}

/// A hexadecimal number that is all of `bytes`.
pub fn parse_hex(bytes: &[u8]) -> Option<u64> {
    parse_radix(bytes, 16)
}

fn parse_radix(bytes: &[u8], radix: u32) -> Option<u64> {
    if bytes.is_empty() {
        return None;
    }
    bytes.iter().try_fold(0u64, |n, &b| {
        let digit = (b as char).to_digit(radix)?;
        n.checked_mul(radix.into())?.checked_add(digit.into())
    })
}

/// The words of a line, split at blanks.
pub fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|b| b.is_ascii_whitespace()).filter(|w| !w.is_empty())
}

/// The number of kibibytes in the line `KEY:   123 kB`, in bytes.
pub fn kib_field(text: &[u8], key: &str) -> Option<u64> {
    Some(number_field(text, key)? * 1024)
}

/// The number in the line `KEY:   123`.
pub(crate) fn number_field(text: &[u8], key: &str) -> Option<u64> {
    text.split(|&b| b == b'\n').find_map(|line| {
        let rest = line.strip_prefix(key.as_bytes())?.strip_prefix(b":")?;
        parse_u64(words(rest).next()?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_numbers() {
        assert_eq!(ProcPath::proc(1234, "smaps_rollup").as_c_str(), c"/proc/1234/smaps_rollup");
        assert_eq!(ProcPath::task(u32::MAX, "stat").as_c_str(), c"/proc/self/task/4294967295/stat");
        assert_eq!(parse_u64(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(parse_u64(b"18446744073709551616"), None);
        assert_eq!(
            (parse_u64(b""), parse_u64(b"-1"), parse_hex(b"7f0aF")),
            (None, None, Some(0x7f0af))
        );
        assert_eq!(kib_field(b"MemTotal: 10 kB\nMemFree:    7 kB\n", "MemFree"), Some(7168));
        assert_eq!(kib_field(b"MemFreeX: 10 kB\n", "MemFree"), None);
        assert_eq!(format_u64(u64::MAX, &mut [0; 20]), b"18446744073709551615");
    }
}
