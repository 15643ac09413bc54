//! On files and in shared memory.

use swaptide_sys::mem::Mapping;

use super::*;

/// A file without a name, in the first directory that takes it.
fn real_file(directory: &std::path::Path) -> std::fs::File {
    static NAMES: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let n = NAMES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = directory.join(format!("swaptide-store-test-{}-{n}", std::process::id()));
    let file =
        std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file
}

/// Aligned pages, as an engine has them.
fn aligned_pages(n: usize) -> Mapping {
    Mapping::reserve(n * PAGE_SIZE).unwrap()
}

fn on_real_file(directory: &std::path::Path) {
    let file = real_file(directory);
    let source = Source::new(64);
    let device =
        FileDevice::new(file.try_clone().unwrap().into(), [9; 32], 4, Box::new(source.clone()));
    // Packed pages, larger writes, scattered reads.
    write(&device, &(2000..4000).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    let slots: Vec<u32> = (0..300).map(|i| 2000 + i * 37 % 2000).collect();
    for (page, slot) in read(&device, &slots).unwrap().iter().zip(&slots) {
        assert!(**page == *page_of(*slot));
    }
    (2000..4000).for_each(|slot| assert!(device.free(Slot(slot))));
    let at = source.state.lock().unwrap().next - 1;
    assert!(at <= 3, "{at}");
    drop(device);
    // From the start again, a block for each page.
    let source = Source::new(64);
    let device =
        FileDevice::new(file.try_clone().unwrap().into(), [9; 32], 5, Box::new(source.clone()));
    write_raw(&device, &(0..1500).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    // Scattered and many: through the ring where there is one. Into aligned pages, and not.
    let slots: Vec<u32> = (0..300).map(|i| i * 37 % 1500).collect();
    for (page, slot) in read(&device, &slots).unwrap().iter().zip(&slots) {
        assert!(**page == *raw_page(*slot));
    }
    let mapping = aligned_pages(slots.len());
    // SAFETY: this function alone uses the mapping, as long as it lives.
    let bytes = unsafe { core::slice::from_raw_parts_mut(mapping.as_ptr(), mapping.len()) };
    let mut reqs: Vec<_> =
        slots.iter().map(|&slot| Slot(slot)).zip(bytes.as_chunks_mut().0).collect();
    device.read(&mut reqs).unwrap();
    for (slot, page) in reqs {
        assert!(*page == *raw_page(slot.0));
    }
    // One run of neighbours.
    let all: Vec<u32> = (100..1400).collect();
    for (page, slot) in read(&device, &all).unwrap().iter().zip(&all) {
        assert!(**page == *raw_page(*slot));
    }
    // A bit flips on the disk.
    let page = aligned_pages(1);
    // SAFETY: this function alone uses the mapping, as long as it lives.
    let page = unsafe { core::slice::from_raw_parts_mut(page.as_ptr(), PAGE_SIZE) };
    file.read_exact_at(page, 77 * 4096).unwrap();
    page[123] ^= 1;
    file.write_all_at(page, 77 * 4096).unwrap();
    let error = read(&device, &[70, 77, 80]).unwrap_err();
    assert_eq!(error, ReadError { slot: Slot(77), kind: ReadErrorKind::Authentication });
    // Space is given back.
    let blocks =
        |file: &std::fs::File| std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap());
    let before = blocks(&file);
    (0..1024).for_each(|slot| assert!(device.free(Slot(slot))));
    let after = blocks(&file);
    // The file system's own blocks for the file's map count too.
    assert!(
        before >= after + 2 * EXTENT_BYTES / 512 * 9 / 10,
        "two extents were punched: {before} blocks, then {after}"
    );
    // The file is cut behind our back.
    file.set_len(2 * EXTENT_BYTES).unwrap();
    let slots: Vec<u32> = (1100..1140).step_by(3).collect();
    let error = read(&device, &slots).unwrap_err();
    assert_eq!(error, ReadError { slot: Slot(1100), kind: ReadErrorKind::Io(Errno::IO) });
    // A descriptor that takes nothing.
    let device = FileDevice::new(
        std::fs::File::open("/dev/null").unwrap().into(),
        [9; 32],
        6,
        Box::new(Source::new(64)),
    );
    assert_eq!(
        write_raw(&device, &[(5000, 1)]),
        Err(WriteError { slot: Slot(5000), errno: Errno::BADF })
    );
}

#[test]
fn works_on_a_real_file() {
    on_real_file(&std::env::temp_dir());
}

#[test]
fn works_in_shared_memory() {
    // A file system with other ideas of O_DIRECT and of hole punching.
    on_real_file(std::path::Path::new("/dev/shm"));
}
