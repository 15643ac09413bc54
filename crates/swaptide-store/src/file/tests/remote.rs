//! Pages that only a server has: which reads wait for it, and what is known of a slot meanwhile.

use std::sync::mpsc;
use std::time::Duration;

use super::*;

/// A disk whose reads (or writes) of one extent wait until they may continue.
struct Slow {
    disk: Disk,
    extent: u64,
    writes: bool,
    begun: Mutex<mpsc::Sender<()>>,
    go: Mutex<mpsc::Receiver<()>>,
}

impl Slow {
    fn wait(&self, offset: u64, writes: bool) {
        if offset / EXTENT_BYTES == self.extent && writes == self.writes {
            self.begun.lock().unwrap().send(()).unwrap();
            // It continues also where the other end is gone.
            let _ = self.go.lock().unwrap().recv();
        }
    }
}

impl BlockIo for Slow {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, Errno> {
        self.wait(offset, false);
        self.disk.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
        self.wait(offset, true);
        self.disk.write_at(offset, bytes)
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.disk.punch(offset, len)
    }
}

/// A device on one, what tells that a thread waits, and what lets it continue.
fn slow(writes: bool) -> (FileDevice, mpsc::Receiver<()>, mpsc::Sender<()>) {
    let ((begun, has_begun), (finish, go)) = (mpsc::channel(), mpsc::channel());
    let slow = Slow {
        disk: Disk::default(),
        extent: 0,
        writes,
        begun: Mutex::new(begun),
        go: Mutex::new(go),
    };
    (FileDevice::on(Box::new(slow), [7; 32], 1, Box::new(Source::new(2))), has_begun, finish)
}

#[test]
fn a_reader_does_not_wait_for_another_ones_answer() {
    let (device, has_begun, finish) = slow(false);
    write_raw(&device, &(0..600).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    let device = &device;
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| read(device, &[3]));
        has_begun.recv_timeout(Duration::from_secs(20)).expect("it reads");
        assert_eq!(read(device, &[599]).unwrap(), [raw_page(599)]);
        write_raw(device, &[(599, 7)]).unwrap();
        assert_eq!(read(device, &[599]).unwrap(), [raw_page(7)]);
        assert!(!waits.is_finished());
        finish.send(()).unwrap();
        assert_eq!(waits.join().unwrap().unwrap(), [raw_page(3)]);
    });
}

#[test]
fn a_reader_of_this_machine_does_not_wait_for_those_of_servers() {
    let (device, has_begun, finish) = slow(false);
    write_raw(&device, &(0..600).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    let device = &device;
    std::thread::scope(|scope| {
        let away: Vec<_> = (0..MAX_REMOTE_READERS as u32)
            .map(|slot| scope.spawn(move || read(device, &[slot])))
            .collect();
        for _ in &away {
            has_begun.recv_timeout(Duration::from_secs(20)).expect("it reads");
        }
        let (done, is_done) = mpsc::channel();
        scope.spawn(move || done.send(read(device, &[599]).unwrap()));
        let local = is_done.recv_timeout(Duration::from_secs(5));
        away.iter().for_each(|_| finish.send(()).unwrap());
        assert_eq!(local, Ok(vec![raw_page(599)]));
    });
}

#[test]
fn leaving_reads_while_others_write() {
    let (device, has_begun, finish) = slow(false);
    write_raw(&device, &(0..600).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    assert_eq!(device.set_leaving(|extent| extent == Extent(0)), 1);
    let device = &device;
    std::thread::scope(|scope| {
        let leaves = scope.spawn(|| device.leave());
        has_begun.recv_timeout(Duration::from_secs(20)).expect("it reads");
        assert!(!device.is_writing_for(Duration::ZERO));
        let (done, is_done) = mpsc::channel();
        scope.spawn(move || done.send(write_raw(device, &[(700, 7)])));
        let written = is_done.recv_timeout(Duration::from_secs(5));
        drop(finish);
        assert!(written.is_ok_and(|written| written.is_ok()), "a write waits for it");
        // The reads fail from now on: their pages stay.
        let _ = leaves.join();
    });
    assert_eq!(read(device, &[700]).unwrap(), [raw_page(7)]);
}

#[test]
fn a_server_that_does_not_answer_is_left_later() {
    let (disk, source) = (Disk::default(), Source { remote: true, ..Source::new(4) });
    let device = device(&disk, &source);
    write_raw(&device, &(0..512).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    assert_eq!(device.set_leaving(|extent| extent == Extent(0)), 1);
    disk.set_fault(Some(Fault::Fails(0, Errno::TIMEDOUT)));
    assert_eq!(device.leave(), Leaving::Stuck { left: 1, full: false });
    let asked = disk.0.lock().unwrap().reads;
    assert_eq!(device.leave(), Leaving::Stuck { left: 1, full: false });
    assert_eq!(disk.0.lock().unwrap().reads, asked, "it was asked again at once");
    disk.set_fault(None);
    assert_eq!(read(&device, &[511]).unwrap(), [raw_page(511)]);
}

#[test]
fn a_stamp_is_that_of_one_page_in_one_place() {
    let (disk, source) = (Disk::default(), Source::new(4));
    let device = device(&disk, &source);
    assert_eq!(device.stamp(Slot(1)), None);
    write_raw(&device, &[(1, 5), (2, 5)]).unwrap();
    let first = device.stamp(Slot(1));
    assert!(first.is_some() && first != device.stamp(Slot(2)), "the same page, in two slots");
    read(&device, &[1]).unwrap();
    assert_eq!(device.stamp(Slot(1)), first);
    let mut seen = vec![first];
    for _ in 0..50 {
        // The same slot, the same page, and sooner or later the same block.
        device.free(Slot(1));
        assert_eq!(device.stamp(Slot(1)), None);
        write_raw(&device, &[(1, 5)]).unwrap();
        let stamp = device.stamp(Slot(1));
        assert!(!seen.contains(&stamp), "a stamp came twice");
        seen.push(stamp);
    }
}

#[test]
fn freeing_a_remote_page_does_not_wait_for_its_server() {
    for mirrored in [false, true] {
        let source = Source { remote: !mirrored, mirrored, ..Source::new(4) };
        frees_without_waiting(&source, (!mirrored).then_some(ServerId(0)));
    }
}

fn frees_without_waiting(source: &Source, server: Option<ServerId>) {
    let disk = Disk::default();
    let device = device(&disk, source);
    write_raw(&device, &(0..512).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    write_raw(&device, &[(600, 1)]).unwrap();
    assert_eq!((device.server_of(Slot(0)), device.server_of(Slot(700))), (server, None));
    assert_eq!(source.held(), 2);
    // Whatever is asked of the disk now fails.
    disk.set_fault(Some(Fault::Fails(0, Errno::IO)));
    (0..512).for_each(|slot| assert!(device.free(Slot(slot))));
    assert_eq!((source.held(), disk.0.lock().unwrap().pages.len()), (2, 513), "it is told later");
    disk.set_fault(None);
    device.trim_remote();
    assert_eq!((source.held(), disk.0.lock().unwrap().pages.len()), (1, 1));
    device.trim_remote();
    device.clear();
    assert_eq!((source.held(), disk.0.lock().unwrap().pages.len()), (0, 0));
}

#[test]
fn a_child_does_not_give_back_what_its_parent_has_emptied() {
    let (disk, source) = (Disk::default(), Source { remote: true, ..Source::new(4) });
    let parent = device(&disk, &source);
    write_raw(&parent, &(0..513).map(|slot| (slot, slot)).collect::<Vec<_>>()).unwrap();
    (0..512).for_each(|slot| assert!(parent.free(Slot(slot))));
    let child = forked(&parent, &disk, &source);
    *child.store.emptied.lock() = parent.store.emptied.lock().clone();
    assert_eq!(child.store.emptied.lock().len(), 1);
    child.abandon(Vec::new());
    child.trim_remote();
    assert_eq!(source.held(), 2);
    parent.trim_remote();
    assert_eq!(source.held(), 1);
}

#[test]
fn emptied_extents_are_room_for_what_is_written() {
    let (disk, source) = (Disk::default(), Source { remote: true, ..Source::new(2) });
    let device = device(&disk, &source);
    for round in 0..3 {
        write_raw(&device, &(0..900).map(|slot| (slot, slot + round)).collect::<Vec<_>>()).unwrap();
        assert_eq!(read(&device, &[899]).unwrap(), [raw_page(899 + round)]);
        (0..900).for_each(|slot| assert!(device.free(Slot(slot))));
    }
}

#[test]
fn a_write_tells_for_how_long_it_has_been_under_way() {
    let (device, has_begun, finish) = slow(true);
    assert!(!device.is_writing_for(Duration::ZERO));
    let device = &device;
    std::thread::scope(|scope| {
        let writes = scope.spawn(|| write_raw(device, &[(1, 5)]));
        has_begun.recv_timeout(Duration::from_secs(20)).expect("it writes");
        std::thread::sleep(Duration::from_millis(2));
        assert!(
            device.is_writing_for(Duration::from_millis(1))
                && !device.is_writing_for(Duration::from_secs(60))
        );
        finish.send(()).unwrap();
        writes.join().unwrap().unwrap();
    });
    assert!(!device.is_writing_for(Duration::ZERO));
}
