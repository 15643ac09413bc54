//! A file without room: garbage is cleaned, and nothing is lost.

use super::*;

/// The number of blocks that two extents hold.
const TWO_FULL: u32 = 1024 - extents::RESERVE_BLOCKS as u32;

#[test]
fn a_full_file_is_an_error_and_its_free_pages_are_used() {
    let (disk, source) = (Disk::default(), Source::new(2));
    let device = device(&disk, &source);
    let all: Vec<_> = (0..TWO_FULL).map(|slot| (slot, slot)).collect();
    write_raw(&device, &all).unwrap();
    assert_eq!(
        write_raw(&device, &[(2000, 1)]),
        Err(WriteError { slot: Slot(2000), errno: Errno::NOSPC })
    );
    // Half an extent is not sparse, but the only room there is.
    (0..256).for_each(|slot| assert!(device.free(Slot(slot))));
    let more: Vec<_> = (2000..2256).map(|slot| (slot, slot)).collect();
    write_raw(&device, &more).unwrap();
    assert!(write_raw(&device, &[(3000, 1)]).is_err());
    for slot in (256..TWO_FULL).chain(2000..2256) {
        assert!(*read(&device, &[slot]).unwrap()[0] == *raw_page(slot));
    }
    check(&device);
}

#[test]
fn a_file_full_of_garbage_is_cleaned() {
    let (disk, source) = (Disk::default(), Source::new(1));
    let (device, mut left) = full_of_garbage(&disk, &source);
    // A reader meanwhile: what it wants moves under its hands.
    let stop = std::sync::atomic::AtomicBool::new(false);
    let fixed = left.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                for (slot, seed) in &fixed {
                    assert!(*read(&device, &[*slot]).unwrap()[0] == *page_of(*seed));
                }
            }
        });
        // Also when an assertion below fails.
        let _stops = Stops(&stop);
        let mut slot = 10_000;
        for _ in 0..40 {
            let new: Vec<_> = (slot..slot + 60).map(|slot| (slot, slot * 8 + 3)).collect();
            slot += 60;
            write(&device, &new).unwrap();
            check(&device);
            left.extend(&new);
            // Of what is new, two in three go again, the oldest first.
            let old: Vec<_> = left
                .extract_if(.., |(slot, _)| *slot >= 10_000 && *slot % 3 != 0)
                .take(45)
                .collect();
            old.iter().for_each(|(slot, _)| assert!(device.free(Slot(*slot))));
            if device.stats().stored_bytes > 300 * 4096 {
                let old: Vec<_> =
                    left.extract_if(.., |(slot, _)| *slot >= 10_000).take(200).collect();
                old.iter().for_each(|(slot, _)| assert!(device.free(Slot(*slot))));
            }
        }
    });
    assert_eq!(source.held(), 1);
    for (slot, seed) in left {
        assert!(*read(&device, &[slot]).unwrap()[0] == *page_of(seed));
    }
}

#[test]
fn cleaning_on_a_failing_disk_loses_nothing() {
    for n in (0..40).step_by(3) {
        for fault in [
            Fault::Fails(n, Errno::IO),
            Fault::Fails(n, Errno::NOSPC),
            Fault::Flipped(n),
            Fault::Short(1000),
        ] {
            let (disk, source) = (Disk::default(), Source::new(1));
            let (device, left) = full_of_garbage(&disk, &source);
            disk.set_fault(Some(fault));
            let new: Vec<_> = (5000..5200).map(|slot| (slot, slot)).collect();
            let written = write(&device, &new);
            disk.set_fault(None);
            check(&device);
            let new = if written.is_ok() { &new[..] } else { &[] };
            assert_eq!(device.stats().pages, left.len() + new.len());
            for (slot, seed) in left.iter().chain(new) {
                assert!(*read(&device, &[*slot]).unwrap()[0] == *page_of(*seed), "{fault:?}");
            }
        }
    }
}
