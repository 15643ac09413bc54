//! Extents that are left, as when their device is taken away.

use super::*;

fn written(disk: &Disk, source: &Source, slots: core::ops::Range<u32>) -> FileDevice {
    let device = device(disk, source);
    for batch in slots.collect::<Vec<_>>().chunks(100) {
        write(&device, &batch.iter().map(|&slot| (slot, slot * 8 + 3)).collect::<Vec<_>>())
            .unwrap();
    }
    device
}

fn holds(device: &FileDevice, slots: core::ops::Range<u32>) {
    check(device);
    for slot in slots {
        assert!(*read(device, &[slot]).unwrap()[0] == *page_of(slot * 8 + 3), "slot {slot}");
    }
}

/// Leaves until there is nothing more to leave, or no way.
fn leave(device: &FileDevice) -> Leaving {
    loop {
        match device.leave() {
            Leaving::Left(_) => check(device),
            end => return end,
        }
    }
}

#[test]
fn pages_in_leaving_extents_move_and_the_extents_are_released() {
    let (disk, source) = (Disk::default(), Source::new(64));
    let device = written(&disk, &source, 0..6000);
    let mut held = Vec::new();
    device.leased(|extent| held.push(extent.0));
    assert!(held.len() > 2, "{held:?}");
    let most = *held.last().unwrap();
    // The open one is among them.
    assert_eq!(device.set_leaving(|extent| extent.0 != held[0]), held.len() - 1);
    assert_eq!(leave(&device), Leaving::Done);
    device.leased(|extent| {
        assert!(extent.0 == held[0] || extent.0 > most, "{extent:?} is still held")
    });
    holds(&device, 0..6000);
    // They may be used again when they are not named any more.
    assert_eq!(device.set_leaving(|_| false), 0);
    write(&device, &[(7000, 3)]).unwrap();
    assert_eq!(device.leave(), Leaving::Done);
}

#[test]
fn leaving_without_room_keeps_pages() {
    let (disk, source) = (Disk::default(), Source::new(2));
    let device = written(&disk, &source, 0..3500);
    assert_eq!(device.set_leaving(|extent| extent.0 == 0), 1);
    assert_eq!(leave(&device), Leaving::Stuck { left: 1, full: true });
    holds(&device, 0..3500);
    assert_eq!(device.set_leaving(|_| false), 0);
    (0..1000).for_each(|slot| assert!(device.free(Slot(slot))));
    for batch in (5000..5900).collect::<Vec<_>>().chunks(100) {
        write(&device, &batch.iter().map(|&slot| (slot, slot * 8 + 3)).collect::<Vec<_>>())
            .unwrap();
    }
    holds(&device, 1000..3500);
    holds(&device, 5000..5900);
}

#[test]
fn unreadable_page_blocks_only_itself() {
    let (disk, source) = (Disk::default(), Source::new(64));
    let device = written(&disk, &source, 0..3000);
    device.set_leaving(|extent| extent.0 == 0);
    disk.set_fault(Some(Fault::Fails(0, Errno::IO)));
    assert_eq!(leave(&device), Leaving::Stuck { left: 1, full: false });
    disk.set_fault(None);
    holds(&device, 0..3000);
    assert_eq!(leave(&device), Leaving::Done);
    holds(&device, 0..3000);
}

#[test]
fn extents_that_forked_processes_share_are_left_by_each() {
    let (disk, source) = (Disk::default(), Source::new(64));
    let parent = written(&disk, &source, 0..2000);
    parent.freeze_all();
    source.share(&parent);
    let before: BTreeSet<u32> = source.state.lock().unwrap().holders.keys().copied().collect();
    disk.0.lock().unwrap().frozen.extend(&before);
    let child = forked(&parent, &disk, &source);
    child.rekey_salt(2);
    for device in [&parent, &child] {
        assert_eq!(device.set_leaving(|extent| before.contains(&extent.0)), before.len());
        assert_eq!(leave(device), Leaving::Done);
    }
    let held: BTreeSet<u32> = source.state.lock().unwrap().holders.keys().copied().collect();
    assert!(held.is_disjoint(&before));
    holds(&parent, 0..2000);
    holds(&child, 0..2000);
}

#[test]
fn leaving_runs_concurrently_with_reads_writes_and_frees() {
    let (disk, source) = (Disk::default(), Source::new(200));
    let device = written(&disk, &source, 0..4000);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut turn = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                turn += 1;
                let slot = turn * 37 % 2000;
                assert!(*read(&device, &[slot]).unwrap()[0] == *page_of(slot * 8 + 3));
            }
        });
        scope.spawn(|| {
            let mut turn = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let slots = 2000 + turn * 50 % 2000..2050 + turn * 50 % 2000;
                turn += 1;
                slots.clone().step_by(2).for_each(|slot| assert!(device.free(Slot(slot))));
                write(&device, &slots.map(|slot| (slot, slot * 8 + 3)).collect::<Vec<_>>())
                    .unwrap();
            }
        });
        let _stops = Stops(&stop);
        for _ in 0..6 {
            let mut held = BTreeSet::new();
            device.leased(|extent| assert!(held.insert(extent.0)));
            device.set_leaving(|extent| held.contains(&extent.0));
            while let Leaving::Left(_) = device.leave() {}
            device.set_leaving(|_| false);
        }
    });
    holds(&device, 0..4000);
}
