//! Extents of this machine that another thread gives back than the one that emptied them.

use super::*;

fn later(most: u32) -> Source {
    Source { later: true, ..Source::new(most) }
}

fn pages_on(disk: &Disk) -> usize {
    disk.0.lock().unwrap().pages.len()
}

#[test]
fn freeing_the_last_page_of_an_extent_does_not_wait_for_io() {
    let (disk, source) = (Disk::default(), later(4));
    let device = device(&disk, &source);
    write_raw(&device, &(0..1030).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    assert_eq!(source.held(), 3);
    // Whatever is asked of the disk now fails.
    disk.set_fault(Some(Fault::Fails(0, Errno::IO)));
    (0..1024).for_each(|slot| assert!(device.free(Slot(slot))));
    assert_eq!((source.held(), pages_on(&disk)), (3, 1030), "it is punched by the one that frees");
    disk.set_fault(None);
    assert!(device.release_one_extent());
    assert_eq!((source.held(), pages_on(&disk)), (2, 518), "one at a time");
    assert!(device.release_one_extent() && !device.release_one_extent());
    assert_eq!((source.held(), pages_on(&disk)), (1, 6));
    assert!(source.state.lock().unwrap().released.iter().all(|(_, punched)| *punched));
    check(&device);
}

#[test]
fn pending_release_counts_as_room() {
    let (disk, source) = (Disk::default(), later(2));
    let device = device(&disk, &source);
    for round in 0..3 {
        write_raw(&device, &(0..900).map(|slot| (slot, slot + round)).collect::<Vec<_>>()).unwrap();
        assert_eq!(read(&device, &[899]).unwrap(), [raw_page(899 + round)]);
        (0..900).for_each(|slot| assert!(device.free(Slot(slot))));
    }
    check(&device);
}

#[test]
fn a_write_waits_for_the_thread_that_gives_its_room_back() {
    let (disk, source) = (Disk::default(), later(1));
    let device = device(&disk, &source);
    write_raw(&device, &(0..496).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    // Closed, so that it is given back when it is empty.
    device.store.state.lock().extents.distrust(Extent(0));
    let punches = disk.0.lock().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (0..496).for_each(|slot| assert!(device.free(Slot(slot))));
            assert!(device.release_one_extent());
        });
        let written = scope.spawn(|| {
            loop {
                // Not before all is freed.
                if device.stats().pages == 0 {
                    return write_raw(&device, &[(1, 5)]);
                }
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!written.is_finished());
        drop(punches);
        assert_eq!(written.join().unwrap(), Ok(()));
    });
    assert_eq!(read(&device, &[1]).unwrap(), [raw_page(5)]);
}

#[test]
fn end_releases_own_extents_only() {
    let (disk, source) = (Disk::default(), later(4));
    let parent = device(&disk, &source);
    write_raw(&parent, &(0..1030).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    (0..1024).for_each(|slot| assert!(parent.free(Slot(slot))));
    let child = forked(&parent, &disk, &source);
    *child.store.to_release.lock() = parent.store.to_release.lock().clone();
    child.abandon(Vec::new());
    assert!(!child.release_one_extent());
    assert_eq!(source.held(), 3);
    parent.clear();
    assert_eq!((source.held(), pages_on(&disk)), (0, 0));
}
