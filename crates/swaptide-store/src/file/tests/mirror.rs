//! Areas with a mirror.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::*;

/// Extents that have a mirror; those from here on are on a device of their own.
const MIRRORED: u32 = 8;
const SERVER: u8 = 0;
const MIRROR: u8 = 1;
const OTHER: u8 = 2;

struct Three {
    /// The files that the device has, with direct I/O.
    opened: [File; 3],
    /// The same files for the tests.
    files: [File; 3],
    failures: [AtomicU32; 3],
    /// The server takes no writes.
    away: std::sync::atomic::AtomicBool,
    /// What happens before the next transfer.
    next: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl AreaDirectory for &'static Three {
    fn locate(&self, extent: Extent) -> Option<Location> {
        let next = self.next.lock().unwrap().take();
        next.into_iter().for_each(|happens| happens());
        let spot = |area, extent: u32| FilePlace {
            area,
            generation: 0,
            offset: u64::from(extent) * EXTENT_BYTES,
        };
        if extent.0 < MIRRORED {
            // The mirror begins elsewhere than the area.
            return Some(Location {
                spot: spot(SERVER, extent.0),
                mirror: Some(spot(MIRROR, extent.0 + 1)),
            });
        }
        Some(Location { spot: spot(OTHER, extent.0 - MIRRORED), mirror: None })
    }

    fn open(&self, area: u8) -> Result<Opened, Errno> {
        let file = if area == SERVER && self.away.load(Relaxed) {
            File::open("/dev/null")
        } else {
            self.opened[usize::from(area)].try_clone()
        };
        Ok(Opened::File(file.map_err(|_| Errno::MFILE)?.into()))
    }

    fn failed(&self, area: u8) {
        self.failures[usize::from(area)].fetch_add(1, Relaxed);
    }
}

/// Extents, after a while none that have a mirror.
struct Closing(Source, Arc<std::sync::atomic::AtomicBool>);

impl ExtentSource for Closing {
    fn lease(&self) -> Option<Extent> {
        loop {
            let extent = self.0.lease()?;
            if extent.0 >= MIRRORED || !self.1.load(Relaxed) {
                return Some(extent);
            }
        }
    }

    fn release(&self, extent: Extent, exclusive_hole_punch: bool) {
        self.0.release(extent, exclusive_hole_punch);
    }
}

fn three() -> &'static Three {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let file = || {
        let name =
            format!("swaptide-mirror-{}-{}", std::process::id(), NUMBER.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        let again = File::options().read(true).write(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len((u64::from(MIRRORED) + 1) * EXTENT_BYTES).unwrap();
        (file, again)
    };
    let [(a, x), (b, y), (c, z)] = [file(), file(), file()];
    Box::leak(Box::new(Three {
        opened: [a, b, c],
        files: [x, y, z],
        failures: Default::default(),
        away: false.into(),
        next: Mutex::default(),
    }))
}

fn over(three: &'static Three, source: &Source) -> FileDevice {
    FileDevice::over(Box::new(three), [7; 32], 1, Box::new(source.clone()))
}

fn fill(device: &FileDevice, slots: core::ops::Range<u32>) {
    for batch in slots.collect::<Vec<_>>().chunks(100) {
        write(device, &batch.iter().map(|&slot| (slot, slot * 8 + 3)).collect::<Vec<_>>()).unwrap();
    }
}

fn holds(device: &FileDevice, slots: core::ops::Range<u32>) {
    let slots: Vec<u32> = slots.collect();
    for some in slots.chunks(70) {
        for (page, slot) in read(device, some).unwrap().iter().zip(some) {
            assert!(**page == *page_of(slot * 8 + 3), "slot {slot}");
        }
    }
    for slot in slots.iter().step_by(97) {
        assert!(*read(device, &[*slot]).unwrap()[0] == *page_of(slot * 8 + 3), "slot {slot}");
    }
}

/// Changes a byte in every Nth block.
fn damage(file: &File, every: usize) {
    for block in (0..file.metadata().unwrap().len() / PAGE_SIZE as u64).step_by(every) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, block * PAGE_SIZE as u64 + 5).unwrap();
        file.write_all_at(&[byte[0] ^ 0x40], block * PAGE_SIZE as u64 + 5).unwrap();
    }
}

#[test]
fn page_lost_by_server_read_from_mirror() {
    let (three, source) = (three(), Source::new(MIRRORED));
    let device = over(three, &source);
    fill(&device, 0..4000);
    damage(&three.files[0], 1);
    holds(&device, 0..4000);
    three.files[0].set_len(0).unwrap();
    holds(&device, 0..4000);
    let failures = three.failures.iter().map(|n| n.load(Relaxed)).collect::<Vec<_>>();
    assert_eq!(failures, [0, 0, 0], "the server was not asked");
}

#[test]
fn page_lost_by_mirror_read_from_server() {
    let (three, source) = (three(), Source::new(MIRRORED));
    let device = over(three, &source);
    fill(&device, 0..4000);
    damage(&three.files[1], 3);
    holds(&device, 0..4000);
    assert!(three.failures[1].load(Relaxed) > 0, "and it is told");
    three.files[1].set_len(0).unwrap();
    holds(&device, 0..4000);
    assert_eq!(three.failures[0].load(Relaxed), 0);
}

#[test]
fn page_lost_by_both_is_an_error() {
    let (three, source) = (three(), Source::new(MIRRORED));
    let device = over(three, &source);
    fill(&device, 0..600);
    let span = device.store.state.lock().places.get(Slot(300)).unwrap().span;
    for (file, at) in three.files.iter().zip([0, EXTENT_BYTES]) {
        file.write_all_at(b"?", at + span.start() + 3).unwrap();
    }
    assert_eq!(
        read(&device, &[300]),
        Err(ReadError { slot: Slot(300), kind: ReadErrorKind::Authentication })
    );
    holds(&device, 0..300);
    holds(&device, 301..600);
}

#[test]
fn a_write_that_the_server_does_not_take_records_nothing() {
    let (three, source) = (three(), Source::new(MIRRORED));
    let device = over(three, &source);
    fill(&device, 0..200);
    let away = over(three, &source);
    three.away.store(true, Relaxed);
    let failed = write(&away, &[(7, 70), (8, 80)]).unwrap_err();
    assert_eq!(
        (failed.slot, away.contains(Slot(7)), away.contains(Slot(8))),
        (Slot(7), false, false)
    );
    assert!(three.failures[0].load(Relaxed) > 0);
    holds(&device, 0..200);
}

#[test]
fn an_area_whose_server_is_gone_is_left_with_all_its_pages() {
    let (three, closed) = (three(), Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let source = Closing(Source::new(2 * MIRRORED), Arc::clone(&closed));
    let device = FileDevice::over(Box::new(three), [7; 32], 1, Box::new(source));
    fill(&device, 0..8000);
    let mut first = 0;
    device.leased(|extent| first += u32::from(extent.0 < MIRRORED));
    assert!(first > 2);
    // Some of the mirror is damaged, some of the server: of every page one copy is good.
    damage(&three.files[1], 5);
    closed.store(true, Relaxed);
    device.set_leaving(|extent| extent.0 < MIRRORED);
    while matches!(device.leave(), Leaving::Left(_)) {}
    assert_eq!(device.leave(), Leaving::Done);
    device.leased(|extent| assert!(extent.0 >= MIRRORED));
    check(&device);
    three.files[0].set_len(0).unwrap();
    three.files[1].set_len(0).unwrap();
    holds(&device, 0..8000);
}

#[test]
fn released_extent_punched_on_both() {
    use std::os::unix::fs::MetadataExt;
    let (three, source) = (three(), Source::new(MIRRORED));
    let device = over(three, &source);
    fill(&device, 0..2000);
    three.files.iter().for_each(|file| file.sync_all().unwrap());
    let blocks = || [0, 1].map(|n: usize| three.files[n].metadata().unwrap().blocks());
    let before = blocks();
    assert!(before[0] > 0 && before[1] > 0);
    device.clear();
    let after = blocks();
    assert!(after[0] * 2 < before[0] && after[1] * 2 < before[1], "{before:?} then {after:?}");
}

#[test]
fn what_is_freed_while_it_is_moved_says_nothing_of_the_mirror() {
    let (three, source) = (three(), Source::new(MIRRORED));
    let device: &'static FileDevice = Box::leak(Box::new(over(three, &source)));
    fill(device, 0..3000);
    assert_eq!(device.set_leaving(|extent| extent.0 == 0), 1);
    *three.next.lock().unwrap() = Some(Box::new(|| {
        (0..3000).for_each(|slot| assert!(device.free(Slot(slot))));
        device.trim_remote();
    }));
    assert_eq!(device.leave(), Leaving::Done);
    assert_eq!(three.failures[1].load(Relaxed), 0);
}
