//! Where packed pages are put.

use super::*;

#[test]
fn packed_pages_lie_close_together() {
    let (disk, source) = (Disk::default(), Source::new(8));
    let device = device(&disk, &source);
    let pages: Vec<_> = (0..2000).map(|slot| (slot, slot)).collect();
    for batch in pages.chunks(250) {
        write(&device, batch).unwrap();
    }
    let stats = device.stats();
    assert_eq!(disk.0.lock().unwrap().pages.len() as u64 * 4096, stats.block_bytes);
    // At most a block is left over per batch, and one per extent.
    assert!(
        stats.block_bytes - stats.stored_bytes <= (8 + stats.extents as u64) * 4096,
        "{stats:?}"
    );
    assert!(stats.stored_bytes < 2000 * 4096 / 2, "{stats:?}");
    assert!(stats.metadata_bytes < 2000 * 32 + 20_000, "{stats:?}");
    // Alone, in any order, and all at once.
    for slot in [0, 1999, 250, 249, 1000] {
        assert!(*read(&device, &[slot]).unwrap()[0] == *page_of(slot));
    }
    let all: Vec<u32> = (0..2000).rev().chain([5, 5, 1777, 0]).collect();
    for (page, slot) in read(&device, &all).unwrap().iter().zip(&all) {
        assert!(**page == *page_of(*slot), "slot {slot}");
    }
    check(&device);
}

#[test]
fn many_short_pages_share_a_block() {
    // More than a block's counter can count.
    let (disk, source) = (Disk::default(), Source::new(2));
    let device = device(&disk, &source);
    let pages: Vec<_> = (0..2000).map(|slot| (slot, slot * 8 + 1)).collect();
    write(&device, &pages).unwrap();
    assert_eq!(disk.0.lock().unwrap().pages.len(), 2000usize.div_ceil(255));
    for (page, (_, seed)) in
        read(&device, &(0..2000).collect::<Vec<_>>()).unwrap().iter().zip(&pages)
    {
        assert!(**page == *page_of(*seed));
    }
    check(&device);
}

#[test]
fn sparse_extents_are_filled_again() {
    let (disk, source) = (Disk::default(), Source::new(100));
    let device = device(&disk, &source);
    write_raw(&device, &(0..2000).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    assert_eq!(source.held(), 4);
    // One page in eight stays, in every extent.
    (0..2000).filter(|slot| slot % 8 != 0).for_each(|slot| assert!(device.free(Slot(slot))));
    write_raw(&device, &(3000..4500).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    assert_eq!(source.held(), 4, "no further extent was needed");
    for slot in (0..2000).step_by(8).chain(3000..4500) {
        assert!(*read(&device, &[slot]).unwrap()[0] == *raw_page(slot));
    }
    check(&device);
}
