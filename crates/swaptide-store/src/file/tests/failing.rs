//! Devices that fail: what is told of it, and that nothing is lost.

use super::*;

#[test]
fn bytes_that_are_no_page_are_an_error() {
    let (disk, source) = (Disk::default(), Source::new(2));
    let device = device(&disk, &source);
    device.write(&[(Slot(4), Packed::Bytes(&[0x1f; 60]))]).unwrap();
    assert_eq!(
        read(&device, &[4]),
        Err(ReadError { slot: Slot(4), kind: ReadErrorKind::Unpacking })
    );
}

#[test]
fn refused_write_goes_to_another_device() {
    for errno in [Errno::IO, Errno::NOSPC, Errno::TIMEDOUT] {
        let (disk, source) = (Disk::default(), Source { second: Some(4), ..Source::new(8) });
        let device = device(&disk, &source);
        write_raw(&device, &[(1, 1)]).unwrap();
        disk.set_fault(Some(Fault::Refuses(4, errno)));
        assert_eq!(write_raw(&device, &[(2, 2), (3, 3)]), Ok(()), "{errno:?}");
        // And so do the next ones, without a try at the first.
        disk.set_fault(Some(Fault::Refuses(4, Errno::ACCESS)));
        write_raw(&device, &[(1, 4)]).unwrap();
        check(&device);
        for (slot, seed) in [(1, 4), (2, 2), (3, 3)] {
            assert!(*read(&device, &[slot]).unwrap()[0] == *raw_page(seed));
        }
    }
}

#[test]
fn a_failing_block_is_not_the_whole_device_but_a_full_one_is() {
    let (disk, source) = (Disk::default(), Source::new(8));
    let device = device(&disk, &source);
    write_raw(&device, &[(1, 1)]).unwrap();
    disk.set_fault(Some(Fault::Refuses(8, Errno::NOSPC)));
    let full = Err(WriteError { slot: Slot(2), errno: Errno::NOSPC });
    assert_eq!(
        (write_raw(&device, &[(2, 2)]), source.held()),
        (full, 1),
        "what lies there may be written over"
    );
    disk.set_fault(Some(Fault::Refuses(1, Errno::IO)));
    assert_eq!((write_raw(&device, &[(2, 2)]), source.held()), (Ok(()), 2));
    disk.set_fault(Some(Fault::Refuses(8, Errno::TIMEDOUT)));
    assert_eq!(
        write_raw(&device, &[(3, 3)]),
        Err(WriteError { slot: Slot(3), errno: Errno::TIMEDOUT }),
        "it was waited for"
    );
    check(&device);
    for slot in [1, 2] {
        assert!(*read(&device, &[slot]).unwrap()[0] == *raw_page(slot));
    }
}

#[test]
fn a_failed_write_keeps_the_old_pages_and_avoids_the_place() {
    let (disk, source) = (Disk::default(), Source::new(8));
    let device = device(&disk, &source);
    let old: Vec<_> = (0..100).map(|slot| (slot, slot)).collect();
    write_raw(&device, &old).unwrap();
    let new: Vec<_> = (0..100).map(|slot| (slot, slot + 1000)).collect();
    disk.set_fault(Some(Fault::Fails(1, Errno::IO)));
    // Two writes of 64 and 36 pages; the second fails, and whatever is tried elsewhere then.
    assert_eq!(write_raw(&device, &new), Err(WriteError { slot: Slot(64), errno: Errno::IO }));
    let tried = std::mem::take(&mut source.state.lock().unwrap().released);
    assert!(
        !tried.is_empty() && tried.iter().all(|(extent, punched)| *extent != Extent(0) && *punched),
        "{tried:?}"
    );
    disk.set_fault(None);
    check(&device);
    for (page, (_, seed)) in read(&device, &(0..100).collect::<Vec<_>>()).unwrap().iter().zip(&old)
    {
        assert!(**page == *raw_page(*seed));
    }
    write_raw(&device, &new).unwrap();
    assert_eq!(
        source.state.lock().unwrap().released,
        [(Extent(0), true)],
        "the extent that failed is let go"
    );
    for (page, (_, seed)) in read(&device, &(0..100).collect::<Vec<_>>()).unwrap().iter().zip(&new)
    {
        assert!(**page == *raw_page(*seed));
    }
    // A packed page that crosses the end of a write belongs to both.
    disk.set_fault(Some(Fault::Fails(1, Errno::IO)));
    let packed: Vec<_> = (0..400).map(|slot| (slot, slot * 8 + 3)).collect();
    let failed = write(&device, &packed).unwrap_err();
    let lengths = packed
        .iter()
        .map(|&(slot, seed)| (slot as usize % 2, page_of(seed)))
        .map(|(codec, page)| super::super::write::packed_len(&codecs()[codec].compress(&page)));
    let before: usize = lengths.take(failed.slot.0 as usize).sum();
    assert!(
        (63 * PAGE_SIZE..64 * PAGE_SIZE).contains(&before),
        "{before} bytes before slot {}",
        failed.slot
    );
}

#[test]
fn rlimit_fsize_blames_no_device_and_ends_the_processs_writes() {
    let (disk, source) = (Disk::default(), Source::new(8));
    let device = device(&disk, &source);
    write_raw(&device, &[(1, 1)]).unwrap();
    disk.set_fault(Some(Fault::Fails(0, Errno::FBIG)));
    let full = Err(WriteError { slot: Slot(2), errno: Errno::NOSPC });
    assert_eq!(write_raw(&device, &[(2, 2)]), full);
    assert!(source.barred.load(Relaxed));
    disk.set_fault(None);
    assert_eq!(write_raw(&device, &[(2, 2)]), full, "it leases nothing there for a while");
    assert!(*read(&device, &[1]).unwrap()[0] == *raw_page(1), "what is there stays readable");
    source.barred.store(false, Relaxed);
    write_raw(&device, &[(2, 2)]).unwrap();
    check(&device);
}

#[test]
fn a_read_error_names_the_slot() {
    let (disk, source) = (Disk::default(), Source::new(8));
    let device = device(&disk, &source);
    write_raw(&device, &(0..20).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    assert_eq!(
        read(&device, &[3, 40]),
        Err(ReadError { slot: Slot(40), kind: ReadErrorKind::NoSuchSlot })
    );
    // Page 5 on the disk changes places with page 6.
    {
        let mut disk = disk.0.lock().unwrap();
        let (five, six) = (disk.pages[&5].clone(), disk.pages[&6].clone());
        disk.pages.extend([(5, six), (6, five)]);
    }
    assert_eq!(
        read(&device, &[4, 5]),
        Err(ReadError { slot: Slot(5), kind: ReadErrorKind::Authentication })
    );
    assert!(read(&device, &[4, 7]).is_ok());
    disk.set_fault(Some(Fault::Fails(0, Errno::IO)));
    let error = read(&device, &[9]).unwrap_err();
    assert_eq!(error, ReadError { slot: Slot(9), kind: ReadErrorKind::Io(Errno::IO) });
    // Not in libc's words, which engine threads cannot ask for.
    assert!(error.to_string().ends_with("EIO (error 5)"), "{error}");
    assert!(!error.is_own_shortage());
}

#[test]
fn process_shortage_not_blamed_on_device() {
    let (disk, source) = (Disk::default(), Source::new(8));
    let device = device(&disk, &source);
    write_raw(&device, &[(1, 1)]).unwrap();
    for errno in [Errno::NOMEM, Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::AGAIN] {
        disk.set_fault(Some(Fault::Fails(0, errno)));
        let error = read(&device, &[1]).unwrap_err();
        assert!(error.is_own_shortage() && error.kind == ReadErrorKind::Io(errno), "{error}");
    }
    disk.set_fault(Some(Fault::Fails(0, Errno::BUSY)));
    assert!(!read(&device, &[1]).unwrap_err().is_own_shortage());
    disk.set_fault(None);
    assert!(*read(&device, &[1]).unwrap()[0] == *raw_page(1));
}
