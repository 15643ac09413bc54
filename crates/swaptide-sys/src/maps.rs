//! The process's VMAs: `/proc/PID/maps` read without allocating, and PROCMAP_QUERY (6.11) for one.
//!
//! A listing is not atomic: the kernel keeps lines whole, but mappings may change between two
//! reads. Callers treat each line as something that was true a moment ago.

use linux_raw_sys::general as k;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::Errno;

use crate::high_fds;
use crate::page::{VirtAddr, VirtRange};
use crate::procfs::{self, ProcPath, parse_hex, parse_u64};
use crate::raw::syscall;

/// The smallest buffer [`for_each_vma`] takes: a line without its name, several times over.
pub const MIN_BUFFER: usize = 256;

/// A file system, by the number that its files have (`st_dev`). Inodes are unique within one.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceNumber {
    /// The first part of the number.
    pub major: u32,
    /// The second part of the number.
    pub minor: u32,
}

impl DeviceNumber {
    /// From the number as stat(2) gives it.
    pub fn of_number(number: u64) -> DeviceNumber {
        DeviceNumber { major: rustix::fs::major(number), minor: rustix::fs::minor(number) }
    }

    /// `MAJOR:MINOR`, in hexadecimal digits.
    fn parse(word: &[u8]) -> Option<DeviceNumber> {
        let colon = word.iter().position(|&b| b == b':')?;
        let part = |digits| parse_hex(digits).and_then(|number| u32::try_from(number).ok());
        Some(DeviceNumber { major: part(&word[..colon])?, minor: part(&word[colon + 1..])? })
    }
}

/// One line of `/proc/PID/maps`.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Vma<'a> {
    /// From its first to behind its last byte.
    pub range: VirtRange,
    /// May be read (`PROT_READ`).
    pub read: bool,
    /// May be written (`PROT_WRITE`).
    pub write: bool,
    /// May be executed (`PROT_EXEC`).
    pub exec: bool,
    /// Private (copy on write), not shared.
    pub private: bool,
    /// Its offset in its file, in bytes.
    pub offset: u64,
    /// The device of the file.
    pub device: DeviceNumber,
    /// The file's inode; 0 for memory without a file.
    pub inode: u64,
    /// Path or pseudo-name (`[heap]`, `[anon:...]`), as `/proc` writes it; cut short when the line
    /// is longer than the caller's buffer.
    pub name: &'a [u8],
}

impl Vma<'_> {
    /// Private memory without a file: heap, stack, `mmap(MAP_ANONYMOUS)`, `.bss` tails.
    pub fn is_private_anon(&self) -> bool {
        self.private && self.inode == 0 && !self.name.starts_with(b"/")
    }
}

/// Calls `f` with every VMA of this process, in order of address, until it returns `false`.
/// `buf` is working space: the larger, the fewer reads; at least [`MIN_BUFFER`].
pub fn for_each_vma(buf: &mut [u8], f: impl FnMut(Vma<'_>) -> bool) -> Result<(), Errno> {
    each_line(procfs::open_own(c"/proc/thread-self/maps", c"maps")?, buf, f)
}

/// The same for a thread of another process.
pub fn for_each_vma_of(
    pid: u32,
    tid: u32,
    buf: &mut [u8],
    f: impl FnMut(Vma<'_>) -> bool,
) -> Result<(), Errno> {
    each_line(procfs::open_read(ProcPath::thread_of(pid, tid, "maps").as_c_str())?, buf, f)
}

/// The advice (madvise(2)) in effect for a VMA, as far as it is used here, and whether it is
/// locked.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Advised {
    /// `MADV_RANDOM`.
    pub random: bool,
    /// `MADV_WIPEONFORK`: a forked child finds it empty. `MAP_DROPPABLE` is so, too.
    pub wiped: bool,
    /// `MADV_DONTFORK`: a forked child does not have it.
    pub not_copied: bool,
    /// `MAP_DROPPABLE`.
    pub droppable: bool,
    /// Locked in memory (`mlock`).
    pub locked: bool,
}

impl Advised {
    /// From the words behind `VmFlags:`.
    fn of(flags: &[u8]) -> Advised {
        let mut advised = Advised::default();
        for flag in procfs::words(flags) {
            match flag {
                b"rr" => advised.random = true,
                b"wf" => advised.wiped = true,
                b"dc" => advised.not_copied = true,
                b"dp" => advised.droppable = true,
                b"lo" => advised.locked = true,
                _ => {}
            }
        }
        advised
    }
}

/// Calls `f` with every VMA of this process and what was advised for it, in order of address, until
/// it returns `false`. The kernel walks all page tables for it.
pub fn for_each_advised_vma(
    buf: &mut [u8],
    f: impl FnMut(VirtRange, Advised) -> bool,
) -> Result<(), Errno> {
    let fd = procfs::open_read(c"/proc/thread-self/smaps")?;
    for_each_advised_in(buf, |space| procfs::read_fd(&fd, space), f)
}

fn for_each_advised_in(
    buf: &mut [u8],
    read: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
    mut f: impl FnMut(VirtRange, Advised) -> bool,
) -> Result<(), Errno> {
    let mut range = None;
    split_lines(buf, read, |line| {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            return range.take().is_none_or(|range| f(range, Advised::of(flags)));
        }
        if let Some(vma) = parse_line(line) {
            range = Some(vma.range);
        }
        true
    })
}

/// Reads this process's memory, as far as it is there: what another thread may be unmapping is an
/// error here and no fault.
pub fn read_own(at: VirtAddr, buf: &mut [u8]) -> Result<usize, Errno> {
    let memory = procfs::open_read(c"/proc/thread-self/mem")?;
    procfs::retry(|| rustix::io::pread(memory.as_fd(), &mut *buf, at.0 as u64))
}

fn each_line(fd: OwnedFd, buf: &mut [u8], f: impl FnMut(Vma<'_>) -> bool) -> Result<(), Errno> {
    for_each_vma_in(buf, |space| procfs::read_fd(&fd, space), f)
}

/// The same for a text that `read` gives piece by piece, nothing at its end. What is no line of
/// such a file is passed over.
pub fn for_each_vma_in(
    buf: &mut [u8],
    read: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
    mut f: impl FnMut(Vma<'_>) -> bool,
) -> Result<(), Errno> {
    split_lines(buf, read, |line| parse_line(line).is_none_or(&mut f))
}

/// Feeds whole lines to `f` until it returns `false`. A line longer than `buf` comes cut short,
/// once; the rest of it is skipped.
fn split_lines(
    buf: &mut [u8],
    mut read: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
    mut f: impl FnMut(&[u8]) -> bool,
) -> Result<(), Errno> {
    if buf.len() < MIN_BUFFER {
        return Err(Errno::INVAL);
    }
    let mut filled = 0;
    let mut skipping = false;
    loop {
        let n = read(&mut buf[filled..])?;
        filled += n;
        let mut start = 0;
        while let Some(len) = buf[start..filled].iter().position(|&b| b == b'\n') {
            let line = &buf[start..start + len];
            start += len + 1;
            if !core::mem::take(&mut skipping) && !f(line) {
                return Ok(());
            }
        }
        buf.copy_within(start..filled, 0);
        filled -= start;
        if n == 0 {
            if filled > 0 && !skipping {
                f(&buf[..filled]);
            }
            return Ok(());
        }
        if filled == buf.len() {
            if !core::mem::replace(&mut skipping, true) && !f(buf) {
                return Ok(());
            }
            filled = 0;
        }
    }
}

/// `start-end perms offset dev inode   name`
fn parse_line(line: &[u8]) -> Option<Vma<'_>> {
    let mut rest = line;
    let mut next = || {
        let len = rest.iter().position(|&b| b == b' ').unwrap_or(rest.len());
        let (word, tail) = rest.split_at(len);
        rest = tail.strip_prefix(b" ").unwrap_or(tail);
        word
    };
    let range = next();
    let perms = next();
    let (offset, device) = (parse_hex(next())?, DeviceNumber::parse(next())?);
    let inode = parse_u64(next())?;
    let name = &rest[rest.iter().position(|&b| b != b' ').unwrap_or(rest.len())..];
    let dash = range.iter().position(|&b| b == b'-')?;
    let range = VirtRange::new(
        VirtAddr(parse_hex(&range[..dash])? as usize),
        VirtAddr(parse_hex(&range[dash + 1..])? as usize),
    );
    let &[r, w, x, p, ..] = perms else { return None };
    Some(Vma {
        range,
        read: r == b'r',
        write: w == b'w',
        exec: x == b'x',
        private: p == b'p',
        offset,
        device,
        inode,
        name,
    })
}

/// One VMA, with a name of its own (up to 64 bytes).
#[derive(Copy, Clone, Debug)]
pub struct VmaInfo {
    vma: Vma<'static>,
    name: [u8; 64],
    name_len: usize,
}

impl VmaInfo {
    /// The VMA, borrowing the name.
    pub fn vma(&self) -> Vma<'_> {
        Vma { name: &self.name[..self.name_len], ..self.vma }
    }

    fn copy_of(vma: Vma<'_>) -> VmaInfo {
        let mut name = [0; 64];
        let name_len = vma.name.len().min(name.len());
        name[..name_len].copy_from_slice(&vma.name[..name_len]);
        VmaInfo { vma: Vma { name: b"", ..vma }, name, name_len }
    }
}

/// An open `/proc/self/maps` to ask for single VMAs. It shows the address space of the process that
/// opened it: a forked child opens its own.
#[derive(Debug)]
pub struct MapsFile(OwnedFd);

#[repr(C)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}
const _: () = assert!(size_of::<ProcmapQuery>() == size_of::<k::procmap_query>());

/// _IOWR('f', 17, struct procmap_query)
const PROCMAP_QUERY: u32 =
    (3 << 30) | ((size_of::<ProcmapQuery>() as u32) << 16) | ((b'f' as u32) << 8) | 17;
const QUERY_READABLE: u64 = 1;
const QUERY_WRITABLE: u64 = 2;
const QUERY_EXECUTABLE: u64 = 4;
const QUERY_SHARED: u64 = 8;
const QUERY_COVERING_OR_NEXT: u64 = 0x10;

impl MapsFile {
    /// Opens this process's own.
    pub fn open_self() -> Result<MapsFile, Errno> {
        procfs::open_own(c"/proc/thread-self/maps", c"maps").map(MapsFile)
    }

    /// The same for a thread of the program's, out of the program's way ([`high_fds`]).
    pub fn open_high() -> Result<MapsFile, Errno> {
        let open = || procfs::open_own(c"/proc/thread-self/maps", c"maps");
        high_fds::open(open, procfs::is_of_proc).map(MapsFile)
    }

    /// The VMA that holds `addr`; `None` if there is none.
    pub fn vma_at(&self, addr: VirtAddr) -> Result<Option<VmaInfo>, Errno> {
        self.find(addr, false)
    }

    /// The VMA that holds `addr`, or else the next above it.
    pub fn vma_at_or_next(&self, addr: VirtAddr) -> Result<Option<VmaInfo>, Errno> {
        self.find(addr, true)
    }

    fn find(&self, addr: VirtAddr, or_next: bool) -> Result<Option<VmaInfo>, Errno> {
        match self.query(addr, or_next) {
            Err(Errno::NOTTY | Errno::INVAL | Errno::NOSYS) => self.scan(addr, or_next),
            other => other,
        }
    }

    /// By PROCMAP_QUERY; `ENOTTY` on kernels before 6.11.
    fn query(&self, addr: VirtAddr, or_next: bool) -> Result<Option<VmaInfo>, Errno> {
        let mut name = [0u8; 64];
        // A long name (a file's path) does not fit and fails the whole query: then ask without one.
        let mut query = match self.query_once(addr, or_next, &mut name) {
            Err(Errno::NAMETOOLONG) => {
                let found = self.query_once(addr, or_next, &mut []);
                name[0] = b'/';
                found.map(|query| ProcmapQuery { vma_name_size: 2, ..query })
            }
            other => other,
        };
        if let Err(Errno::NOENT) = query {
            return Ok(None);
        }
        let query = query.as_mut().map_err(|e| *e)?;
        let bit = |bit| query.vma_flags & bit != 0;
        let vma = Vma {
            range: VirtRange::new(
                VirtAddr(query.vma_start as usize),
                VirtAddr(query.vma_end as usize),
            ),
            read: bit(QUERY_READABLE),
            write: bit(QUERY_WRITABLE),
            exec: bit(QUERY_EXECUTABLE),
            private: !bit(QUERY_SHARED),
            offset: query.vma_offset,
            device: DeviceNumber { major: query.dev_major, minor: query.dev_minor },
            inode: query.inode,
            name: b"",
        };
        // The size counts the closing zero.
        Ok(Some(VmaInfo {
            vma,
            name,
            name_len: (query.vma_name_size as usize).saturating_sub(1).min(name.len()),
        }))
    }

    fn query_once(
        &self,
        addr: VirtAddr,
        or_next: bool,
        name: &mut [u8],
    ) -> Result<ProcmapQuery, Errno> {
        let mut query = ProcmapQuery {
            size: size_of::<ProcmapQuery>() as u64,
            query_flags: if or_next { QUERY_COVERING_OR_NEXT } else { 0 },
            query_addr: addr.0 as u64,
            vma_start: 0,
            vma_end: 0,
            vma_flags: 0,
            vma_page_size: 0,
            vma_offset: 0,
            inode: 0,
            dev_major: 0,
            dev_minor: 0,
            vma_name_size: name.len() as u32,
            build_id_size: 0,
            vma_name_addr: if name.is_empty() { 0 } else { name.as_mut_ptr() as u64 },
            build_id_addr: 0,
        };
        let arg = (&raw mut query) as usize;
        // SAFETY: the struct is the one this ioctl takes, and its name buffer is as long as it
        // says.
        unsafe { syscall!(k::__NR_ioctl, self.0.as_raw_fd(), PROCMAP_QUERY, arg) }?;
        Ok(query)
    }

    /// By reading the text.
    fn scan(&self, addr: VirtAddr, or_next: bool) -> Result<Option<VmaInfo>, Errno> {
        let mut buf = [0u8; 2048];
        let mut at = 0;
        let mut found = None;
        let read = |space: &mut [u8]| {
            let n = procfs::retry(|| rustix::io::pread(self.0.as_fd(), &mut *space, at))?;
            at += n as u64;
            Ok(n)
        };
        split_lines(&mut buf, read, |line| {
            let Some(vma) = parse_line(line) else { return true };
            if addr >= vma.range.end {
                return true;
            }
            if or_next || vma.range.contains(addr) {
                found = Some(VmaInfo::copy_of(vma));
            }
            false
        })?;
        Ok(found)
    }
}

/// The VMA of this process that holds `addr`. Opens `/proc/self/maps`; keep a [`MapsFile`] for
/// many.
pub fn vma_at(addr: VirtAddr) -> Result<Option<VmaInfo>, Errno> {
    MapsFile::open_self()?.vma_at(addr)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_told_for_the_mapping_it_stands_below() {
        let text = b"1000-3000 rw-p 00000000 00:00 0\nSize: 8 kB\nVmFlags: rd wr mr mw me ac rr \n\
            3000-4000 rw-p 00000000 00:00 0                  [heap]\nRss: 4 kB\nVmFlags: rd wr mr \
            mw me dc ac wf \n4000-5000 rw-p 00000000 00:00 0\nVmFlags: rd wr mr mw me ac\n";
        let mut rest = &text[..];
        let read = |space: &mut [u8]| {
            let n = space.len().min(rest.len()).min(100);
            space[..n].copy_from_slice(&rest[..n]);
            rest = &rest[n..];
            Ok(n)
        };
        let mut seen = alloc::vec::Vec::new();
        for_each_advised_in(&mut [0; 256], read, |range, advised| {
            seen.push((range.start.0, range.end.0, advised));
            true
        })
        .expect("a text");
        let random = Advised { random: true, ..Advised::default() };
        let apart = Advised { wiped: true, not_copied: true, ..Advised::default() };
        assert_eq!(
            seen,
            [
                (0x1000, 0x3000, random),
                (0x3000, 0x4000, apart),
                (0x4000, 0x5000, Advised::default())
            ]
        );
    }

    #[test]
    fn the_kernel_tells_what_was_advised() {
        use crate::mem::{Advice, advise};
        let map = Mapping::reserve(4 * PAGE_SIZE).expect("memory");
        let wiped = VirtRange::from_len(map.range().start.offset(PAGE_SIZE), PAGE_SIZE);
        // SAFETY: this test's own memory, of which nothing is used.
        unsafe { advise(wiped, Advice::WipeOnFork) }.expect("advice");
        let mut seen = alloc::vec::Vec::new();
        for_each_advised_vma(&mut [0; 4096], |range, advised| {
            if advised.wiped && map.range().contains(range.start) {
                seen.push(range);
            }
            true
        })
        .expect("smaps");
        assert_eq!(seen, [wiped]);
    }

    use crate::mem::Mapping;
    use crate::page::PAGE_SIZE;
    use std::vec::Vec;

    #[test]
    fn lines_are_parsed() {
        let vma = parse_line(
            b"55a0-55b0 rw-p 0001f000 fd:01 1234                       /a b/c (deleted)",
        )
        .unwrap();
        assert_eq!(vma.range, VirtRange::new(VirtAddr(0x55a0), VirtAddr(0x55b0)));
        assert!(vma.read && vma.write && !vma.exec && vma.private && !vma.is_private_anon());
        assert_eq!((vma.offset, vma.inode, vma.name), (0x1f000, 1234, &b"/a b/c (deleted)"[..]));
        assert_eq!(vma.device, DeviceNumber { major: 0xfd, minor: 1 });
        let anon = parse_line(b"7f00-7f10 ---s 00000000 00:00 0 ").unwrap();
        assert!(!anon.read && !anon.private && anon.name.is_empty());
        assert!(parse_line(b"nonsense").is_none());
        assert!(parse_line(b"").is_none());
    }

    /// Every way to cut the text into reads gives the same lines; too long a line comes cut, once.
    #[test]
    fn lines_cross_reads_and_buffers() {
        let long = std::format!("2000-3000 r--p 00000000 00:00 7 /{}", "x".repeat(600));
        let text = std::format!(
            "1000-2000 rw-p 00000000 00:00 0 [heap]\n{long}\n3000-4000 rw-p 00000000 00:00 0 \n"
        );
        for chunk in [1, 7, 100, 255, 256, 1000] {
            for size in [256, 300, 4096] {
                let (mut rest, mut got) = (text.as_bytes(), Vec::new());
                let read = |space: &mut [u8]| {
                    let n = chunk.min(space.len()).min(rest.len());
                    space[..n].copy_from_slice(&rest[..n]);
                    rest = &rest[n..];
                    Ok(n)
                };
                split_lines(&mut std::vec![0; size], read, |line| {
                    let vma = parse_line(line).unwrap();
                    got.push((vma.range.start.0, vma.inode, vma.name.len() > 100));
                    true
                })
                .unwrap();
                assert_eq!(
                    got,
                    [(0x1000, 0, false), (0x2000, 7, true), (0x3000, 0, false)],
                    "{chunk} {size}"
                );
            }
        }
        assert_eq!(split_lines(&mut [0; 10], |_| Ok(0), |_| true), Err(Errno::INVAL));
    }

    #[test]
    fn finds_a_mapping_of_ours_by_every_way() {
        // Between two pages that are not like it: neighbours of its kind, which other tests have,
        // would be joined with it.
        let whole = Mapping::reserve(7 * PAGE_SIZE).unwrap();
        let map = VirtRange::from_len(whole.range().start.offset(PAGE_SIZE), 5 * PAGE_SIZE);
        for end in [whole.range().start, map.end] {
            // SAFETY: the page is not used.
            unsafe { crate::mem::protect(VirtRange::from_len(end, PAGE_SIZE), false).unwrap() };
        }
        let inside = map.start.offset(PAGE_SIZE);
        let mut seen = None;
        for_each_vma(&mut [0; 512], |vma| {
            if vma.range.contains(inside) {
                seen = Some(vma.range);
                assert!(vma.is_private_anon() && vma.write);
            }
            seen.is_none()
        })
        .unwrap();
        let range = seen.unwrap();
        assert_eq!(range, map);
        let file = MapsFile::open_self().unwrap();
        for found in [
            vma_at(inside),
            file.scan(inside, false),
            file.scan(inside, true),
            file.vma_at_or_next(inside),
        ] {
            let info = found.unwrap().unwrap();
            assert_eq!(info.vma().range, range);
            assert!(info.vma().is_private_anon());
        }
        match file.query(inside, false) {
            Err(errno) => assert_eq!(errno, Errno::NOTTY, "only a kernel before 6.11 may refuse"),
            Ok(info) => assert_eq!(info.unwrap().vma().range, range),
        }
        assert!(file.vma_at(VirtAddr(PAGE_SIZE)).unwrap().is_none());
        assert!(file.scan(VirtAddr(PAGE_SIZE), false).unwrap().is_none());
        let (a, b) = (
            file.vma_at_or_next(VirtAddr(0)).unwrap().unwrap(),
            file.scan(VirtAddr(0), true).unwrap().unwrap(),
        );
        assert_eq!(a.vma().range, b.vma().range);
    }

    #[test]
    fn query_and_text_agree_on_every_vma() {
        let file = MapsFile::open_self().unwrap();
        let mut checked = 0;
        for_each_vma(&mut [0; 8192], |vma| {
            // Other tests map and unmap at the same time: compare what keeps still, the program's
            // own files.
            if vma.name.starts_with(b"/") {
                let info = file.vma_at(vma.range.start).unwrap().unwrap();
                let q = info.vma();
                assert_eq!(
                    (q.range, q.read, q.write, q.exec, q.private, q.device, q.inode),
                    (vma.range, vma.read, vma.write, vma.exec, vma.private, vma.device, vma.inode)
                );
                assert!(!q.is_private_anon() && q.name.starts_with(b"/"));
                checked += 1;
            }
            true
        })
        .unwrap();
        assert!(checked >= 4);
    }
}
