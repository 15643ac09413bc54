use super::*;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU32;

use crate::backing::devices::Devices;
use swaptide_ipc::{NewArea, Segment};
use swaptide_store::codec::Packed;
use swaptide_sys::mem::{SharedMap, memfd_create};

fn devices() -> Devices {
    devices_with_faults(0)
}

/// One transfer in this many fails in some way.
fn devices_with_faults(every: u32) -> Devices {
    let fd = memfd_create(c"segment", Segment::BYTES as u64).expect("memfd");
    let map = SharedMap::map(fd.as_fd(), Segment::BYTES).expect("map");
    let segment = Segment::raw(map).expect("segment");
    segment.add_area(NewArea::of_file(0, 8)).expect("an area");
    segment.header.injection.io_fault_every.store(every, Relaxed);
    let index = segment.claim(10, 0).expect("slot");
    Devices::new(segment, Arc::new(AtomicU32::new(index.0)), |_| memfd_create(c"swap", 16 << 20), 1)
        .expect("devices")
}

fn page(n: u8) -> Page {
    std::array::from_fn(|k| n ^ (k as u8).wrapping_mul(37))
}

fn request(buffer: usize, slots: &[(usize, u32)]) -> RemoteRead {
    let mut request = RemoteRead {
        buffer,
        server: ServerId(0),
        slots: [Slot(0); PAGES_PER_CHUNK],
        wanted: 0,
        read: 0,
        lost: 0,
        unasked: false,
    };
    for (k, slot) in slots {
        request.slots[*k] = Slot(*slot);
        request.wanted |= 1 << k;
    }
    request
}

#[test]
fn reads_fill_their_buffers_and_a_missing_page_fails_alone() {
    let (devices, remote) = (devices(), RemoteReads::new().expect("address space"));
    let device = &devices.areas.device;
    for n in 1..=5u8 {
        device.write(&[(Slot(u32::from(n)), Packed::Raw(&page(n)))]).expect("written");
    }
    let mut requests = [request(3, &[(0, 1), (15, 2)]), request(9, &[(7, 3)])];
    remote.read(device, &mut requests, false, |line| panic!("{line}"));
    assert_eq!(requests.map(|request| (request.read, request.lost)), [(0x8001, 0), (0x80, 0)]);
    let found = |request: &RemoteRead| {
        remote.pages(request).map(|(bit, _, page)| (bit, *page)).collect::<Vec<_>>()
    };
    assert!(found(&requests[0]) == [(1, page(1)), (0x8000, page(2))]);
    assert!(found(&requests[1]) == [(0x80, page(3))]);
    // A page is freed between its request and the reading.
    device.free(Slot(2));
    let mut requests = [request(3, &[(0, 1), (1, 2), (2, 4)]), request(9, &[(7, 5)])];
    remote.read(device, &mut requests, false, |line| panic!("{line}"));
    assert_eq!(
        requests.map(|request| (request.read, request.lost)),
        [(0b101, 0), (0x80, 0)],
        "a freed page is no loss"
    );
    assert!(remote.pages(&requests[0]).any(|(bit, _, there)| bit == 0b100 && *there == page(4)));
}

#[test]
fn damaged_page_is_lost_alone() {
    let (devices, remote) = (devices(), RemoteReads::new().expect("address space"));
    let device = &devices.areas.device;
    let pages: Vec<Page> =
        (0..4).map(|n| std::array::from_fn(|k| ((k * k) >> 3) as u8 ^ n)).collect();
    for (slot, page) in (1..).zip(&pages) {
        device.write(&[(Slot(slot), Packed::Raw(page))]).expect("written");
    }
    // What `devices` opens is one file after the other: this one has zeros where the page was.
    device.abandon(Vec::new());
    let mut requests = [request(0, &[(0, 1), (1, 2)]), request(1, &[(0, 3)])];
    remote.read(device, &mut requests, false, |_| ());
    assert_eq!(
        requests.map(|request| (request.read, request.lost)),
        [(0, 0b11), (0, 1)],
        "nothing of it is there any more"
    );
    device.write(&[(Slot(9), Packed::Raw(&pages[3]))]).expect("written");
    let mut requests = [request(0, &[(0, 1), (1, 9)]), request(1, &[(0, 3)])];
    remote.read(device, &mut requests, false, |_| ());
    assert_eq!(requests.map(|request| (request.read, request.lost)), [(0b10, 1), (0, 1)]);
    assert!(remote.pages(&requests[0]).any(|(bit, _, there)| bit == 0b10 && *there == pages[3]));
}

#[test]
fn page_failing_three_times_is_not_lost() {
    let (devices, remote) = (devices_with_faults(1), RemoteReads::new().expect("address space"));
    let device = &devices.areas.device;
    let mut written = false;
    for _ in 0..8 {
        written = written
            || device
                .write(&[(Slot(1), Packed::Raw(&page(1))), (Slot(2), Packed::Raw(&page(2)))])
                .is_ok();
    }
    assert!(written);
    // Of reads the first fails, two do not, and then three do.
    let mut buffer = [0; PAGE_SIZE];
    assert_eq!(
        [(); 3].map(|()| device.read(&mut [(Slot(1), &mut buffer)]).is_ok()),
        [false, true, true]
    );
    let mut requests = [request(0, &[(0, 1), (5, 2)])];
    remote.read(device, &mut requests, false, |_| ());
    assert_eq!(requests.map(|request| (request.read, request.lost)), [(0b100001, 0)]);
    assert!(remote.pages(&requests[0]).map(|(_, _, there)| *there).eq([page(1), page(2)]));
}

#[test]
fn a_server_that_keeps_one_waiting_gets_no_other_reader() {
    let mut queue = Queue::default();
    let at = |server, buffer| RemoteRead { server: ServerId(server), ..request(buffer, &[(0, 1)]) };
    let take = |queue: &mut Queue, reader| {
        let mut requests = Vec::new();
        queue.take(reader, &mut requests);
        requests.iter().map(|request| request.buffer).collect::<Vec<_>>()
    };
    queue.sent.extend([at(1, 0), at(2, 1), at(1, 2)]);
    assert_eq!(take(&mut queue, 0), [0, 2], "those of one server together");
    assert_eq!(take(&mut queue, 1), [1]);
    queue.sent.extend([at(1, 3)]);
    assert_eq!(take(&mut queue, 2), [3], "several readers may wait for one");
    // The second one has not heard anything for long.
    queue.calls[1] = Some((ServerId(2), Nanos(now().0 - 2 * SLOW_SERVER_TIME.as_nanos() as u64)));
    queue.sent.extend([at(2, 4), at(1, 5)]);
    assert_eq!(take(&mut queue, 3), [5]);
    assert!(take(&mut queue, 4).is_empty());
    assert_eq!(take(&mut queue, 1), [4], "it is back itself");
    // One reader is left to the other servers.
    queue.calls = [Some((ServerId(1), now())); MAX_READERS];
    queue.calls[4] = None;
    queue.sent.extend([at(1, 6), at(2, 7)]);
    assert_eq!(take(&mut queue, 4), [7]);
}

#[test]
fn reads_for_faults_go_before_readahead() {
    let mut queue = Queue::default();
    let at = |buffer, unasked| RemoteRead { unasked, ..request(buffer, &[(0, 1)]) };
    queue.send([at(0, true), at(1, true)].into_iter());
    queue.send([at(2, false), at(3, false)].into_iter());
    queue.send([at(4, true)].into_iter());
    queue.send([at(5, false)].into_iter());
    assert_eq!(
        queue.sent.iter().map(|request| request.buffer).collect::<Vec<_>>(),
        [2, 3, 5, 0, 1, 4]
    );
}
