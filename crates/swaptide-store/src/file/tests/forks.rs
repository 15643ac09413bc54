//! Extents that a process and its forked children have together.

use super::*;

#[test]
fn after_a_fork_neither_side_disturbs_the_other() {
    let (disk, source) = (Disk::default(), Source::new(8));
    let parent = device(&disk, &source);
    write_raw(&parent, &(0..700).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    parent.freeze_all();
    source.share(&parent);
    disk.0.lock().unwrap().frozen.extend([0, 1]);
    let child = forked(&parent, &disk, &source);
    child.rekey_salt(2);
    // Both replace the same slots, at the same counters: keys differ, so ciphertexts do (the disk
    // checks).
    write_raw(&parent, &(0..512).map(|slot| (slot, 5000)).collect::<Vec<_>>()).unwrap();
    write_raw(&child, &(0..512).map(|slot| (slot, 5000)).collect::<Vec<_>>()).unwrap();
    assert_eq!(source.state.lock().unwrap().released, [(Extent(0), false), (Extent(0), false)]);
    (512..700).for_each(|slot| assert!(parent.free(Slot(slot))));
    assert!(*read(&child, &[600]).unwrap()[0] == *raw_page(600));
    assert!(*read(&child, &[3]).unwrap()[0] == *raw_page(5000));
    assert_eq!(child.stats().shared_extents, 1);
    check(&parent);
    check(&child);
}

#[test]
fn a_shared_extent_is_punched_by_the_last_that_had_it() {
    let disk = Disk::default();
    let source = Source { retakes: true, ..Source::new(8) };
    let parent = device(&disk, &source);
    write_raw(&parent, &(0..400).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    parent.freeze_all();
    source.share(&parent);
    let child = forked(&parent, &disk, &source);
    child.rekey_salt(2);
    (0..400).for_each(|slot| assert!(child.free(Slot(slot))));
    assert_eq!(source.state.lock().unwrap().released, [(Extent(0), false)], "the parent has it");
    assert_eq!(disk.0.lock().unwrap().pages.len(), 400);
    (0..400).for_each(|slot| assert!(parent.free(Slot(slot))));
    assert_eq!(source.state.lock().unwrap().released[1..], [(Extent(0), false), (Extent(0), true)]);
    assert_eq!(
        (disk.0.lock().unwrap().pages.len(), source.held()),
        (0, 0),
        "what lay there is gone"
    );
}

#[test]
fn shared_extents_are_not_cleaned() {
    let (disk, source) = (Disk::default(), Source::new(1));
    let (parent, left) = full_of_garbage(&disk, &source);
    parent.freeze_all();
    source.share(&parent);
    disk.0.lock().unwrap().frozen.insert(0);
    let child = forked(&parent, &disk, &source);
    child.rekey_salt(2);
    for device in [&parent, &child] {
        assert_eq!(
            write(device, &[(9000, 3)]),
            Err(WriteError { slot: Slot(9000), errno: Errno::NOSPC })
        );
        for (slot, seed) in &left {
            assert!(*read(device, &[*slot]).unwrap()[0] == *page_of(*seed));
        }
        check(device);
    }
}
