//! Which processes may write to memory past its page tables.
//!
//! Write protection stops a program's instructions and the kernel's copies. It does not stop a
//! device that was given the page itself: direct I/O into the memory, buffers registered with an
//! io_uring, RDMA, VFIO. While one of that kind may be at work nothing goes out, for what it writes
//! to a page after that was read would be lost.
//!
//! The kernel does not tell which pages are held so. It tells of a process whether it has pinned
//! memory for long (`VmPin`), and of each descriptor whether it is open for direct I/O, and on
//! which mount: some file systems read into a program's pages without being asked to. A file on a
//! mount that is in no list may be on any of them. All of this is asked after the pages were
//! write-protected and before anything is read: one that takes a page after that waits for it, and
//! one that has taken a page before has the descriptor open. Not seen is one that closed it, or
//! unmapped the memory, while such a read is under way (docs/semantics.md).
//!
//! `process_vm_writev` takes pages for writing, and writes to them later. Calls through libc are
//! counted while they last ([`Segment::past_writers`]), and waited for.
//!
//! Locks: none.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, StatxFlags, open, openat, statx};
use swaptide_ipc::Segment;
use swaptide_ipc::shared::REGION_PATH;

use crate::living::{self, ProcThread, is_gone, living_thread};

const O_DIRECT: u32 = 0o40000;
/// File systems that can be mounted without a cache for files.
const CACHELESS: [&str; 5] = ["virtiofs", "9p", "cifs", "smb3", "orangefs"];
/// The name of an io_uring's descriptor.
const RING: &str = "anon_inode:[io_uring]";
/// What is in a table of an io_uring and is no file of a file system.
const FILELESS: [&str; 3] = ["socket:", "anon_inode:", "pipe:"];
/// Lines that the kernel has for every descriptor: `pos`, `flags`, `mnt_id`, `ino`.
const USUAL_LINES: usize = 4;
/// Threads of a process that are asked, where each ends meanwhile.
const MAX_ASKED_THREADS: usize = 8;
/// More than the kernel has to say of most descriptors.
const USUAL_BYTES: usize = 1024;

/// Why memory of a process is left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PinnedBy {
    /// It has long-term pins (`VmPin`).
    LongTermPin,
    /// A region is locked in memory.
    Locked,
    /// It has something open for direct I/O.
    Direct,
    /// It cannot be asked.
    Unknown,
}

/// The time for which calls are waited for that write past page tables; then the memory waits.
const MAX_PAST_WRITES_WAIT: Duration = Duration::from_millis(2);
const PAST_WRITES_PAUSE: Duration = Duration::from_micros(50);

/// A process that has begun no other call for this time is taken for one of which a thread was
/// killed in the call by another's exec: a call writes one page.
const MAX_PAST_WRITE_TIME: Duration = Duration::from_secs(10);

/// Processes that were in such calls at the last look, and since when in the same one.
#[derive(Default)]
pub(crate) struct PastWriters(HashMap<(u32, u32), Instant>);

impl PastWriters {
    /// The processes in a call that may have begun before this, and may write past page tables.
    pub(crate) fn look(&mut self, segment: &Segment) -> Vec<u32> {
        let writers = past_writers(segment);
        self.0.retain(|writer, _| writers.contains(writer));
        let now = Instant::now();
        let is_late = |since: &mut Instant| now.duration_since(*since) >= MAX_PAST_WRITE_TIME;
        let mut live = |writer: &(u32, u32)| !is_late(self.0.entry(*writer).or_insert(now));
        writers.iter().filter(|writer| live(writer)).map(|(pid, _)| *pid).collect()
    }
}

/// The processes in such calls, and the number of calls that each has begun. Those whose calls end
/// at once are waited for.
fn past_writers(segment: &Segment) -> Vec<(u32, u32)> {
    let began = Instant::now();
    // Of each turn there may be some from before.
    let turns = [(); 2].map(|()| {
        let turn = segment.next_turn_of_past_writes();
        loop {
            let writers: Vec<(u32, u32)> = segment.past_writers(turn).collect();
            if writers.is_empty() || began.elapsed() > MAX_PAST_WRITES_WAIT {
                return writers;
            }
            std::thread::sleep(PAST_WRITES_PAUSE);
        }
    });
    turns.concat()
}

/// True if a process may write to the memory of another by such a call, as far as its user tells,
/// and whether it has capabilities: one that says so of itself for ever does no harm to the others.
pub(crate) fn may_write_to(writer: u32, other: u32) -> bool {
    let status = |pid: u32| read_lossy(PathBuf::from(format!("/proc/{pid}/status")));
    let users = |text: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix("Uid:"));
        let users = line.unwrap_or_default().split_whitespace();
        users.map(str::to_owned).collect::<Vec<_>>()
    };
    let (writer, other) = match (status(writer), status(other)) {
        // One that is gone writes nothing.
        (Err(error), _) if is_gone(&error) => return false,
        (Ok(writer), Ok(other)) => (writer, other),
        _ => return true,
    };
    let capabilities = writer.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let has_some = capabilities
        .is_none_or(|set| set.bytes().any(|digit| digit.is_ascii_hexdigit() && digit != b'0'));
    has_some || users(&writer).iter().any(|user| users(&other).contains(user))
}

/// Whether a process may write past its page tables, or has locked a region. A question that fails,
/// for lack of descriptors for instance, says nothing; nor does that nothing is to be seen of it:
/// its memory may be another's, too. (An address space that is gone is noticed otherwise.)
pub(crate) fn pinned(pid: u32) -> Option<PinnedBy> {
    for _ in 0..MAX_ASKED_THREADS {
        let Ok(Some(thread)) = living_thread(pid) else { continue };
        match pinned_thread(thread) {
            // One that has ended meanwhile has nothing open, while others have.
            Ok(None) if !thread.has_memory().is_ok_and(|has| has) => {}
            Ok(found) => return found,
            Err(error) if is_gone(&error) => {}
            Err(_) => return Some(PinnedBy::Unknown),
        }
    }
    Some(PinnedBy::Unknown)
}

/// As [`pinned`], by what the kernel says of one thread.
///
/// # Errors
/// When it cannot be asked, or has ended.
fn pinned_thread(thread: ProcThread) -> io::Result<Option<PinnedBy>> {
    let status = read_lossy(thread.file("status"))?;
    if figure(&status, "VmPin:") > 0 {
        return Ok(Some(PinnedBy::LongTermPin));
    }
    let locked = figure(&status, "VmLck:");
    if locked > 0 && locks_region(&read_lossy(thread.file("smaps"))?, locked) {
        return Ok(Some(PinnedBy::Locked));
    }
    let mounts = MountLists::of(&read_lossy(thread.file("mountinfo"))?);
    let is_direct = any_descriptor(thread, |name, text| {
        // Only its name tells a ring that is busy from other descriptors without a file.
        let may_be_ring = anonymous_mount().is_none_or(|mount| figure(text, "mnt_id:") == mount);
        let is_ring = || {
            let link = || fs::read_link(thread.file("fd").join(name));
            may_be_ring && link().map_or_else(|error| !is_gone(&error), |name| name == *RING)
        };
        text.lines().any(is_direct)
            || mounts.reads_past_cache(figure(text, "mnt_id:"), || device_of(thread, name))
            || has_files(text, omits_empty_places(), is_ring)
    })?;
    Ok(is_direct.then_some(PinnedBy::Direct))
}

/// A file's text; names in it need not be letters.
fn read_lossy(path: PathBuf) -> io::Result<String> {
    living::read_text(&path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// True if `found` is, for the name of some descriptor of a thread and what the kernel tells of it.
/// Those that are closed meanwhile are left out.
fn any_descriptor(thread: ProcThread, found: impl Fn(&OsStr, &str) -> bool) -> io::Result<bool> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let folder = open(thread.file("fdinfo"), flags | OFlags::DIRECTORY, Mode::empty())?;
    let mut buffer = vec![0; USUAL_BYTES];
    for entry in Dir::read_from(&folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_bytes().starts_with(b".") {
            continue;
        }
        let text = openat(&folder, name, flags, Mode::empty())
            .map_err(io::Error::from)
            .and_then(|file| read_piece(file, &mut buffer));
        match text {
            Ok(text) if found(OsStr::from_bytes(name.to_bytes()), &text) => return Ok(true),
            Ok(_) => {}
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// The text of a file that the kernel makes in one piece: a read that does not fill the buffer has
/// all of it.
fn read_piece(file: OwnedFd, buffer: &mut Vec<u8>) -> io::Result<Cow<'_, str>> {
    let mut file = File::from(file);
    let mut len = file.read(buffer)?;
    while len == buffer.len() {
        buffer.resize(2 * len, 0);
        len += file.read(&mut buffer[len..])?;
    }
    Ok(String::from_utf8_lossy(&buffer[..len]))
}

/// The number of the mount of all descriptors that have no file, rings among them; `None` where it
/// cannot be told.
fn anonymous_mount() -> Option<u64> {
    static MOUNT: OnceLock<Option<u64>> = OnceLock::new();
    *MOUNT.get_or_init(|| {
        let one = eventfd(0, EventfdFlags::CLOEXEC).ok()?;
        let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", one.as_raw_fd())).ok()?;
        Some(figure(&text, "mnt_id:")).filter(|mount| *mount > 0)
    })
}

/// Major and minor number of a device.
type MountDevice = (u32, u32);

/// Mounts, as a list of them tells. Some file systems may read straight into a program's pages
/// though a file is not open for direct I/O: by the word of a server (FUSE), or without a cache.
#[derive(Debug, Default, PartialEq, Eq)]
struct Mounts {
    /// Whether that of a mount may, by its number.
    by_number: HashMap<u64, bool>,
    /// The same by its device.
    by_device: HashMap<MountDevice, bool>,
}

impl Mounts {
    fn of(mountinfo: &str) -> Mounts {
        let mut mounts = Mounts::default();
        for (mount, kind) in mountinfo.lines().filter_map(|line| line.split_once(" - ")) {
            let mut words = mount.split(' ');
            let Some(Ok(number)) = words.next().map(str::parse) else { continue };
            let kind = kind.split(' ').next().unwrap_or_default();
            let is_direct = kind.starts_with("fuse") || CACHELESS.contains(&kind);
            mounts.by_number.insert(number, is_direct);
            let device = words.nth(1).and_then(|device| device.split_once(':'));
            if let Some((Ok(major), Ok(minor))) =
                device.map(|(major, minor)| (major.parse(), minor.parse()))
            {
                mounts.by_device.insert((major, minor), is_direct);
            }
        }
        mounts
    }
}

/// The mounts of a process, and those that others see, for descriptors from elsewhere.
struct MountLists {
    own: Mounts,
    /// Of this process, and of the first one.
    others: OnceCell<[Mounts; 2]>,
}

impl MountLists {
    fn of(mountinfo: &str) -> MountLists {
        MountLists { own: Mounts::of(mountinfo), others: OnceCell::new() }
    }

    /// True if what is read from a descriptor on a mount may go past the cache. A mount in no list
    /// was taken away while it was in use, or is of another namespace, or the root above it is no
    /// mount: then the device of its file (`file`; `None` where it is of none) tells.
    fn reads_past_cache(&self, mount: u64, file: impl FnOnce() -> Option<MountDevice>) -> bool {
        if let Some(is_direct) = self.own.by_number.get(&mount) {
            return *is_direct;
        }
        if mount == 0 || Some(mount) == anonymous_mount() {
            return false;
        }
        let Some(device) = file() else { return false };
        let others = self.others.get_or_init(|| {
            ["/proc/self/mountinfo", "/proc/1/mountinfo"].map(|list| {
                read_lossy(list.into()).map_or_else(|_| Mounts::default(), |text| Mounts::of(&text))
            })
        });
        let told = [&self.own, &others[0], &others[1]];
        told.iter().find_map(|mounts| mounts.by_device.get(&device).copied()).unwrap_or(true)
    }
}

/// The device of a descriptor's file, if it is a file that may be on any file system: not of shared
/// memory, which is always in the page cache. The server of a file system is not asked.
fn device_of(thread: ProcThread, name: &OsStr) -> Option<MountDevice> {
    /// Of no file.
    const UNKNOWN: MountDevice = (u32::MAX, u32::MAX);
    /// Kept by the kernel.
    const IN_MEMORY: [&[u8]; 2] = [b"/memfd:", b"/secretmem"];
    let path = thread.file("fd").join(name);
    match statx(CWD, &path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE) {
        Ok(found) => {
            let kind = FileType::from_raw_mode(found.stx_mode.into());
            if kind != FileType::RegularFile {
                return None;
            }
            // What has no path has no file system either.
            let is_named = fs::read_link(&path).map_or(true, |name| {
                let name = name.as_os_str().as_bytes();
                name.starts_with(b"/") && !IN_MEMORY.iter().any(|kind| name.starts_with(kind))
            });
            is_named.then_some((found.stx_dev_major, found.stx_dev_minor))
        }
        Err(error) => (!is_gone(&error.into())).then_some(UNKNOWN),
    }
}

/// True if an io_uring has buffers registered, which count as pinned only for the process that made
/// it, or may have files registered, which may be open for direct I/O and in no table of
/// descriptors. `omits_empty`: the kernel lists only places that hold a file, and tells nothing
/// of a ring that is busy. Older ones list all places, and none of a busy ring's, and have a name
/// in the place of a path, which says nothing. `is_ring` tells
/// whether a descriptor of which nothing in particular is told is one.
fn has_files(fdinfo: &str, omits_empty: bool, is_ring: impl FnOnce() -> bool) -> bool {
    let mut lines = fdinfo.lines().skip_while(|line| !line.starts_with("UserFiles:"));
    let Some(head) = lines.next() else {
        return fdinfo.lines().count() <= USUAL_LINES && is_ring();
    };
    if figure(fdinfo, "UserBufs:") > 0 {
        return true;
    }
    let places = figure(head, "UserFiles:");
    let mut listed = 0;
    for line in lines.take_while(|line| !line.starts_with("UserBufs:")) {
        listed += 1;
        // A number, and a name or path.
        let name = line.split_once(": ").map_or("", |(_, name)| name.trim_start());
        let is_fileless = omits_empty && FILELESS.iter().any(|kind| name.starts_with(kind));
        if name != "<none>" && !is_fileless {
            return true;
        }
    }
    !omits_empty && listed < places
}

/// True if the kernel is as [`has_files`] says. (Seen in 6.18; what came between is taken for old.)
fn omits_empty_places() -> bool {
    static OMITS: OnceLock<bool> = OnceLock::new();
    *OMITS.get_or_init(|| swaptide_sys::process::kernel_version() >= Some((6, 18)))
}

fn is_direct(line: &str) -> bool {
    let Some(flags) = line.strip_prefix("flags:") else { return false };
    u32::from_str_radix(flags.trim(), 8).is_ok_and(|flags| flags & O_DIRECT != 0)
}

fn figure(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// True if a process that has `locked` KiB locked has locked a region, or has locked more than its
/// mappings say: so VFIO counts what a device may write to.
fn locks_region(smaps: &str, locked: u64) -> bool {
    let (of_mappings, has_region) = locked_mappings(smaps);
    has_region || of_mappings < locked
}

/// KiB of locked mappings, and whether a region is among them.
fn locked_mappings(smaps: &str) -> (u64, bool) {
    let path = std::str::from_utf8(REGION_PATH).unwrap_or_default();
    let (mut of_mappings, mut has_region) = (0, false);
    let (mut size, mut in_region) = (0, false);
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if flags.split_whitespace().any(|flag| flag == "lo") {
                of_mappings += size;
                has_region |= in_region;
            }
        } else if line.starts_with("Size:") {
            size = figure(line, "Size:");
        } else if line.split('-').next().is_some_and(|start| u64::from_str_radix(start, 16).is_ok())
        {
            // Only the first line of a mapping begins with its addresses.
            in_region = line.contains(path);
        }
    }
    (of_mappings, has_region)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;
    use std::sync::{Mutex, PoisonError};

    use swaptide_sys::AsFd;
    use swaptide_sys::mem::{SharedMap, memfd_create};

    /// A test that asks for this whole process, and one that makes a ring busy.
    static ALONE: Mutex<()> = Mutex::new(());

    #[test]
    fn a_call_that_goes_on_is_told_and_no_other() {
        let fd = memfd_create(c"test", Segment::BYTES as u64).expect("memfd");
        let map = SharedMap::map(fd.as_fd(), Segment::BYTES).expect("map");
        let segment = Segment::raw(map).expect("segment");
        let own = std::process::id();
        let slot = segment.slot(segment.claim(own, 0).expect("a slot"));
        let mut writers = PastWriters::default();
        assert_eq!(writers.look(segment), []);
        segment.write_past(slot, || {
            assert_eq!(writers.look(segment), [own]);
        });
        assert_eq!(writers.look(segment), []);
        // As if a thread had been killed in it a while ago.
        segment.write_past(slot, || {
            writers.look(segment);
            let long_ago = Instant::now().checked_sub(MAX_PAST_WRITE_TIME).expect("a time");
            writers.0.values_mut().for_each(|since| *since = long_ago);
            assert_eq!(writers.look(segment), []);
            segment.write_past(slot, || {
                assert!(!writers.look(segment).is_empty(), "another one has begun");
            });
        });
        assert!(may_write_to(own, own) && !may_write_to(u32::MAX / 2, own));
    }

    #[test]
    fn a_process_with_direct_io_is_told_from_one_without() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let path = std::env::temp_dir().join(format!("swaptide-direct-{}", std::process::id()));
        fs::write(&path, [0; 4096]).expect("file");
        assert_eq!(pinned(std::process::id()), None);
        match fs::OpenOptions::new().read(true).custom_flags(O_DIRECT as i32).open(&path) {
            Ok(_direct) => assert_eq!(pinned(std::process::id()), Some(PinnedBy::Direct)),
            // A file system without direct I/O: what cannot be opened needs no answer.
            Err(error) => assert_eq!(error.raw_os_error(), Some(22), "{error}"),
        }
        fs::remove_file(path).expect("remove");
        assert_eq!(pinned(std::process::id()), None);
        assert_eq!(pinned(u32::MAX / 2), Some(PinnedBy::Unknown), "no such process");
    }

    /// The text that the kernel has for a descriptor of this process.
    fn told_of(fd: i32) -> Option<String> {
        let told = std::cell::RefCell::new(None);
        let name = fd.to_string();
        let own = ProcThread { pid: std::process::id(), tid: std::process::id() };
        let all = any_descriptor(own, |of, text| {
            if of == name.as_str() {
                *told.borrow_mut() = Some(text.to_owned());
            }
            false
        });
        assert!(!all.expect("/proc can be read"));
        told.into_inner()
    }

    #[test]
    fn a_long_text_is_read_to_its_end() {
        use rustix::event::epoll;
        let watch = epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll");
        let watched: Vec<OwnedFd> =
            (0..100).map(|_| eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd")).collect();
        for (one, data) in watched.iter().zip(0..) {
            let data = epoll::EventData::new_u64(data);
            epoll::add(&watch, one, data, epoll::EventFlags::IN).expect("watch");
        }
        let text = told_of(watch.as_raw_fd()).expect("it is open");
        assert!(text.len() > 2 * USUAL_BYTES, "{} bytes", text.len());
        assert_eq!(text.lines().filter(|line| line.starts_with("tfd:")).count(), watched.len());
        assert_eq!(figure(&text, "mnt_id:"), anonymous_mount().expect("its mount is known"));
    }

    #[test]
    fn a_ring_is_of_the_mount_without_files() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut parameters = [0_u8; 120];
        // SAFETY: the kernel reads and writes `struct io_uring_params`, which has 120 bytes.
        let ring =
            unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) } as i32;
        if ring < 0 {
            eprintln!("not tested: no io_uring is allowed here");
            return;
        }
        // SAFETY: the call has just opened it, and nothing else owns it.
        let ring = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(ring) };
        let text = told_of(ring.as_raw_fd()).expect("it is open");
        assert_eq!(Some(figure(&text, "mnt_id:")), anonymous_mount());
    }

    #[test]
    fn mounts_are_told_apart_by_their_file_systems() {
        let mounts = MountLists::of(
            "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
             40 22 0:35 / /mnt/a\\040b rw - fuse.sshfs host: rw,user_id=0\n\
             41 22 0:36 / /mnt/c rw shared:9 master:2 - 9p share rw\n\
             42 22 0:37 / /run rw - tmpfs fuse rw\nnonsense\n",
        );
        let unasked = || -> Option<MountDevice> { unreachable!("it is in the list") };
        let of_number = [22, 40, 41, 42].map(|number| mounts.reads_past_cache(number, unasked));
        assert_eq!(of_number, [false, true, true, false]);
        let anonymous = anonymous_mount().expect("its mount is known");
        assert!([0, anonymous].iter().all(|mount| !mounts.reads_past_cache(*mount, unasked)));
        let devices = [None, Some((254, 0)), Some((0, 36)), Some((0, 1 << 20))];
        let of_device = devices.map(|device| mounts.reads_past_cache(u64::MAX, || device));
        assert_eq!(of_device, [false, false, true, true], "the last is in no list");
    }

    #[test]
    fn files_that_a_ring_has_registered_count() {
        let usual = "pos:\t0\nflags:\t02000002\nmnt_id:\t15\nino:\t7\n";
        let ring = |files: &str| {
            format!("{usual}SqMask:\t0x7\nUserFiles:\t8\n{files}UserBufs:\t0\nPollList:\n")
        };
        let of_none = || -> bool { unreachable!("it is known to be a ring") };
        let sockets = "    0: socket:[7]\n    2: anon_inode:[eventfd]\n    5: pipe:[9]\n";
        let names = "    0: <none>\n".repeat(8);
        for omits in [true, false] {
            assert!(has_files(&ring("    0: /tmp/file\n"), omits, of_none));
            assert!(has_files(&ring("    0: socket:[7]\n    3: /dev/sda\n"), omits, of_none));
            assert!(has_files(&ring("    0: file\n"), omits, of_none), "a name without a path");
            assert!(has_files(usual, omits, || true), "a busy ring tells nothing");
            assert!(!has_files(usual, omits, || false));
            assert!(!has_files(&ring(&names), omits, of_none), "it has places and no files");
            assert_eq!(has_files(&ring(sockets), omits, of_none), !omits, "they may be file names");
        }
        assert!(!has_files(&ring(""), true, of_none), "all places are empty");
        assert!(has_files(&ring(""), false, of_none), "it is busy");
    }

    #[test]
    fn more_locked_than_mappings_say_is_a_devices() {
        let smaps = "7f0000000000-7f0000100000 rw-s 00000000 00:01 9  /memfd:swaptide-region\n\
                     Size:               1024 kB\nVmFlags: rd wr sh\n\
                     7f0000200000-7f0000201000 rw-p 00000000 00:00 0\n\
                     Size:                  4 kB\nVmFlags: rd wr lo\n";
        assert_eq!(locked_mappings(smaps), (4, false));
        assert_eq!(locked_mappings(&smaps.replace("wr sh", "wr sh lo")), (1028, true));
    }
}
