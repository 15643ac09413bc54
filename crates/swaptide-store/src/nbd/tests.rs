use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::*;

mod broken;
mod lies;

const SIZE: u64 = 1 << 20;
const PAGE: u64 = PAGE_SIZE as u64;
const ALL: Flags = Flags::HAS_FLAGS
    .union(Flags::SEND_FLUSH)
    .union(Flags::SEND_FUA)
    .union(Flags::SEND_TRIM)
    .union(Flags::CAN_MULTI_CONN);

fn export() -> Export {
    Export { size: SIZE, flags: ALL, structured: true, longest: 32 << 20, connections: 1 }
}

/// Short enough for tests, long enough for a busy machine.
fn options() -> Options {
    Options {
        request_limit: Duration::from_millis(400),
        read_timeout: Duration::from_secs(20),
        write_timeout: Duration::from_secs(20),
        drain: Duration::from_millis(200),
        durable: false,
    }
}

/// A request as the server sees it.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    flags: u16,
    command: u16,
    cookie: u64,
    pub(crate) offset: u64,
    len: u32,
    data: Vec<u8>,
}

impl Asked {
    /// A write or a trim.
    pub(crate) fn changes(&self) -> bool {
        matches!(self.command, wire::WRITE | wire::TRIM)
    }
}

/// The server's end of a connection.
pub(crate) struct Peer {
    stream: UnixStream,
    /// Its index: 0, 1, ...
    number: u32,
    disk: Arc<Mutex<Vec<u8>>>,
}

impl Peer {
    /// The next request; `None` at the end or at a farewell.
    pub(crate) fn ask(&mut self) -> Option<Asked> {
        let mut head = [0; 28];
        self.stream.read_exact(&mut head).ok()?;
        assert_eq!(head[..4], [0x25, 0x60, 0x95, 0x13], "no request");
        let command = wire::u16_at(&head, 6).unwrap();
        if command == wire::DISC {
            return None;
        }
        let mut asked = Asked {
            flags: wire::u16_at(&head, 4).unwrap(),
            command,
            cookie: wire::u64_at(&head, 8).unwrap(),
            offset: wire::u64_at(&head, 16).unwrap(),
            len: wire::u32_at(&head, 24).unwrap(),
            data: Vec::new(),
        };
        let size = self.disk.lock().unwrap().len() as u64;
        assert!(asked.offset + u64::from(asked.len) <= size, "{asked:?} is not inside");
        if command == wire::WRITE {
            asked.data = vec![0; asked.len as usize];
            self.stream.read_exact(&mut asked.data).ok()?;
        }
        Some(asked)
    }

    /// Does what is asked, and returns the data for the reply.
    fn carry_out(&self, asked: &Asked) -> Vec<u8> {
        carry_out(&mut self.disk.lock().unwrap(), asked)
    }

    fn send(&mut self, bytes: &[u8]) {
        // The client may have hung up, with good reason.
        let _ = self.stream.write_all(bytes);
    }

    /// Carries out a request and sends the reply that the protocol requires: a data chunk for a
    /// read, a simple reply without an error for all else.
    pub(crate) fn answer(&mut self, asked: &Asked) {
        let data = self.carry_out(asked);
        let reply = if asked.command == wire::READ {
            chunk(
                1,
                wire::CHUNK_DATA,
                asked.cookie,
                &[&asked.offset.to_be_bytes(), &data[..]].concat(),
            )
        } else {
            simple(asked.cookie, 0, &[])
        };
        self.send(&reply);
    }

    /// Answers everything, until the end.
    fn serve(&mut self) {
        while let Some(asked) = self.ask() {
            self.answer(&asked);
        }
    }
}

/// Does what is asked, and returns the data for the reply.
fn carry_out(disk: &mut [u8], asked: &Asked) -> Vec<u8> {
    let place = asked.offset as usize..asked.offset as usize + asked.len as usize;
    match asked.command {
        wire::READ => disk[place].to_vec(),
        wire::WRITE => {
            disk[place].copy_from_slice(&asked.data);
            Vec::new()
        }
        wire::TRIM => {
            disk[place].fill(0);
            Vec::new()
        }
        _ => Vec::new(),
    }
}

fn simple(cookie: u64, error: u32, data: &[u8]) -> Vec<u8> {
    [&0x6744_6698u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes(), data].concat()
}

fn chunk(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let len = (payload.len() as u32).to_be_bytes();
    [
        &0x668e_33efu32.to_be_bytes()[..],
        &flags.to_be_bytes(),
        &kind.to_be_bytes(),
        &cookie.to_be_bytes(),
        &len,
        payload,
    ]
    .concat()
}

fn error_chunk(cookie: u64, error: u32, text: &[u8]) -> Vec<u8> {
    chunk(
        1,
        0x8001,
        cookie,
        &[&error.to_be_bytes()[..], &(text.len() as u16).to_be_bytes(), text].concat(),
    )
}

type Script = dyn Fn(&mut Peer) + Send + Sync;

/// Makes connections to threads that follow a script; the script may refuse to be dialed.
#[derive(Clone)]
pub(crate) struct Lab {
    script: Arc<Script>,
    dialed: Arc<AtomicU32>,
    refuses: Arc<dyn Fn(u32) -> Option<Errno> + Send + Sync>,
    disk: Arc<Mutex<Vec<u8>>>,
}

impl Lab {
    fn new(script: impl Fn(&mut Peer) + Send + Sync + 'static) -> Lab {
        Lab::of_size(SIZE, script)
    }

    pub(crate) fn of_size(size: u64, script: impl Fn(&mut Peer) + Send + Sync + 'static) -> Lab {
        let bytes = (0..size).map(|i| ((i / 7) ^ (i / PAGE)) as u8).collect();
        Lab {
            script: Arc::new(script),
            dialed: Arc::default(),
            refuses: Arc::new(|_| None),
            disk: Arc::new(Mutex::new(bytes)),
        }
    }

    fn refusing(mut self, refuses: impl Fn(u32) -> Option<Errno> + Send + Sync + 'static) -> Lab {
        self.refuses = Arc::new(refuses);
        self
    }

    fn client(&self, export: Export, options: Options) -> Nbd {
        Nbd::new(export, options, Box::new(self.clone()), Vec::new())
    }

    /// Does what was asked before, on any connection.
    pub(crate) fn carry_out(&self, asked: &Asked) {
        carry_out(&mut self.disk.lock().unwrap(), asked);
    }

    fn on_disk(&self, offset: u64, len: usize) -> Vec<u8> {
        self.disk.lock().unwrap()[offset as usize..][..len].to_vec()
    }
}

impl Dialer for Lab {
    fn dial(&self) -> Result<OwnedFd, Errno> {
        let number = self.dialed.fetch_add(1, SeqCst);
        if let Some(errno) = (self.refuses)(number) {
            return Err(errno);
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut peer = Peer { stream: theirs, number, disk: Arc::clone(&self.disk) };
        let script = Arc::clone(&self.script);
        std::thread::spawn(move || script(&mut peer));
        Ok(ours.into())
    }
}

/// Reads with a guard on both sides of the buffer.
fn guarded_read(nbd: &Nbd, offset: u64, len: usize) -> (Result<usize, Errno>, Vec<u8>) {
    let mut buf = vec![0xEE; len + 128];
    let answer = nbd.read_at(offset, &mut buf[64..64 + len]);
    assert!(
        buf[..64].iter().chain(&buf[64 + len..]).all(|byte| *byte == 0xEE),
        "written outside of the buffer"
    );
    (answer, buf[64..64 + len].to_vec())
}

#[test]
fn read_back_with_both_reply_kinds() {
    for structured in [true, false] {
        let lab = Lab::new(move |peer| {
            while let Some(asked) = peer.ask() {
                if structured {
                    peer.answer(&asked);
                } else {
                    let data = peer.carry_out(&asked);
                    peer.send(&simple(asked.cookie, 0, &data));
                }
            }
        });
        let nbd = lab.client(Export { structured, ..export() }, options());
        for (offset, len) in [(0, 4096), (4096, 300 << 10), (SIZE - 8192, 8192), (12 << 10, 1)] {
            let data: Vec<u8> = (0..len).map(|i| (i * 31 + len) as u8).collect();
            assert_eq!(nbd.write_at(offset, &data), Ok(len));
            assert_eq!(lab.on_disk(offset, len), data);
            assert_eq!(guarded_read(&nbd, offset, len), (Ok(len), data));
        }
        assert_eq!(nbd.trim(0, SIZE), Ok(()));
        assert_eq!(guarded_read(&nbd, 4096, 4096), (Ok(4096), vec![0; 4096]));
        assert_eq!(nbd.flush(), Ok(()));
        // The end of the export.
        assert_eq!(guarded_read(&nbd, SIZE - 4096, 8192).0, Ok(4096));
        assert_eq!(guarded_read(&nbd, SIZE, 8192).0, Ok(0));
        assert_eq!(nbd.write_at(u64::MAX - 4, &[1; 8]), Ok(0));
        assert_eq!(
            nbd.read_many(&mut [(0, &mut [0; 8]), (SIZE - 4, &mut [0; 8])]),
            Err((1, Errno::INVAL))
        );
        assert_eq!(nbd.write_many(&[(0, &[0; 8]), (SIZE - 4, &[0; 8])]), Err((1, Errno::NOSPC)));
        assert_eq!(nbd.stats(), NbdStats { dialed: 1, ..NbdStats::default() });
    }
}

#[test]
fn all_requests_are_sent_first_and_replies_come_in_any_order() {
    const N: usize = 60;
    let lab = Lab::new(|peer| {
        // Reading on without answering shows that the client waits for nothing.
        let mut asked: Vec<Asked> = (0..N).map(|_| peer.ask().expect("all are sent")).collect();
        asked.reverse();
        asked.rotate_left(17);
        for one in &asked {
            peer.answer(one);
        }
        peer.serve();
    });
    let nbd = lab.client(export(), options());
    let mut pages = vec![[0u8; PAGE_SIZE]; N];
    let place = |i: usize| (i as u64 * 37 % 256) * PAGE;
    let mut places: Vec<(u64, &mut [u8])> =
        pages.iter_mut().enumerate().map(|(i, page)| (place(i), &mut page[..])).collect();
    assert_eq!(nbd.read_many(&mut places), Ok(()));
    for (i, page) in pages.iter().enumerate() {
        assert_eq!(page[..], lab.on_disk(place(i), PAGE_SIZE), "place {i}");
    }
    assert_eq!(nbd.stats(), NbdStats { dialed: 1, ..NbdStats::default() });
}

#[test]
fn a_deep_queue_uses_as_many_connections_as_the_export_allows() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let lab = {
        let seen = Arc::clone(&seen);
        Lab::new(move |peer| {
            while let Some(asked) = peer.ask() {
                seen.lock().unwrap().push(peer.number);
                peer.answer(&asked);
            }
        })
    };
    let nbd = lab.client(Export { connections: 4, ..export() }, options());
    let data = vec![7; PAGE_SIZE];
    let places: Vec<(u64, &[u8])> = (0..64).map(|i| (i * PAGE, &data[..])).collect();
    assert_eq!(nbd.write_many(&places), Ok(()));
    assert_eq!(nbd.stats().dialed, 4);
    let count = |number| seen.lock().unwrap().iter().filter(|n| **n == number).count();
    assert_eq!([count(0), count(1), count(2), count(3)], [16; 4]);
    // A small call needs one of them, and none more is made.
    assert_eq!(nbd.write_at(0, &data), Ok(PAGE_SIZE));
    assert_eq!(nbd.stats().dialed, 4);

    // Without the flag there is one, whatever else is said.
    let single = lab.client(
        Export { connections: 4, flags: ALL - Flags::CAN_MULTI_CONN, ..export() },
        options(),
    );
    assert_eq!(single.write_many(&places), Ok(()));
    assert_eq!(single.stats().dialed, 1);
}

#[test]
fn missing_connections_cost_one_attempt() {
    let lab = Lab::new(Peer::serve).refusing(|number| (number > 0).then_some(Errno::CONNREFUSED));
    let nbd = lab.client(Export { connections: 4, ..export() }, options());
    let mut pages = vec![[0u8; PAGE_SIZE]; 64];
    for _ in 0..3 {
        let mut places: Vec<(u64, &mut [u8])> =
            (0..).map(|i| i * PAGE).zip(pages.iter_mut().map(|page| &mut page[..])).collect();
        assert_eq!(nbd.read_many(&mut places), Ok(()));
    }
    assert_eq!(nbd.stats(), NbdStats { dialed: 1, dial_failed: 1, ..NbdStats::default() });
}

#[test]
fn refused_request_not_retried() {
    let asked_for = Arc::new(AtomicU32::new(0));
    for (number, errno) in [
        (1, Errno::PERM),
        (5, Errno::IO),
        (12, Errno::BUSY),
        (22, Errno::INVAL),
        (28, Errno::NOSPC),
        (75, Errno::OVERFLOW),
        (95, Errno::OPNOTSUPP),
        (4711, Errno::IO),
        (u32::MAX, Errno::IO),
    ] {
        for structured in [false, true] {
            let count = Arc::clone(&asked_for);
            let lab = Lab::new(move |peer| {
                while let Some(asked) = peer.ask() {
                    count.fetch_add(1, SeqCst);
                    let reply = if structured {
                        error_chunk(asked.cookie, number, b"no")
                    } else {
                        simple(asked.cookie, number, &[])
                    };
                    peer.send(&reply);
                }
            });
            asked_for.store(0, SeqCst);
            let nbd = lab.client(export(), options());
            assert_eq!(guarded_read(&nbd, 0, 4096).0, Err(errno));
            assert_eq!(nbd.write_at(0, &[1; 4096]), Err(errno));
            assert_eq!(nbd.trim(0, 4096), Err(errno));
            assert_eq!(nbd.flush(), Err(errno));
            assert_eq!(asked_for.load(SeqCst), 4);
            assert_eq!(nbd.stats(), NbdStats { dialed: 1, refused: 4, ..NbdStats::default() });
        }
    }
}

#[test]
fn the_block_that_cannot_be_read_is_named() {
    // Block 70 is bad: a read across it gets an error.
    let lab = Lab::new(|peer| {
        while let Some(asked) = peer.ask() {
            let bad = asked.offset <= 70 * PAGE && asked.offset + u64::from(asked.len) > 70 * PAGE;
            if bad && asked.command == wire::READ {
                peer.send(&error_chunk(asked.cookie, 5, b"bad block"));
            } else {
                peer.answer(&asked);
            }
        }
    });
    let nbd = lab.client(export(), options());
    let (mut a, mut b, mut c) =
        (vec![0; 4 * PAGE_SIZE], vec![0; 100 * PAGE_SIZE], vec![0; PAGE_SIZE]);
    let mut runs = [
        BlockRun { offset: 0, first: 0, buf: &mut a },
        BlockRun { offset: 20 * PAGE, first: 4, buf: &mut b },
        BlockRun { offset: 200 * PAGE, first: 104, buf: &mut c },
    ];
    assert_eq!(nbd.read_all(&mut runs), Err((4 + 50, Errno::IO)));
    assert_eq!(c, lab.on_disk(200 * PAGE, PAGE_SIZE));
    let mut runs = [BlockRun { offset: SIZE - 2 * PAGE, first: 3, buf: &mut a }];
    assert_eq!(nbd.read_all(&mut runs), Err((3 + 2, Errno::IO)));
    // A write tells how far it came.
    let lab = Lab::new(|peer| {
        while let Some(asked) = peer.ask() {
            let error = if asked.offset >= 256 << 10 { 28 } else { 0 };
            peer.send(&simple(asked.cookie, error, &[]));
        }
    });
    let nbd = lab.client(export(), options());
    assert_eq!(nbd.write_at(0, &vec![1; 512 << 10]), Ok(256 << 10));
    assert_eq!(nbd.write_at(256 << 10, &[1; 4096]), Err(Errno::NOSPC));
}

#[test]
fn replies_in_pieces_are_put_together_and_holes_are_zeros() {
    let lab = Lab::new(|peer| {
        while let Some(asked) = peer.ask() {
            let data = peer.carry_out(&asked);
            let piece = |from: usize, to: usize| {
                let place = asked.offset + from as u64;
                chunk(
                    0,
                    wire::CHUNK_DATA,
                    asked.cookie,
                    &[&place.to_be_bytes()[..], &data[from..to]].concat(),
                )
            };
            let hole = [&(asked.offset + 4096).to_be_bytes()[..], &8192u32.to_be_bytes()].concat();
            peer.send(&piece(20000, data.len()));
            peer.send(&chunk(0, wire::CHUNK_HOLE, asked.cookie, &hole));
            peer.send(&piece(0, 4096));
            // Byte after byte, as a network may deliver it.
            for byte in piece(4096 + 8192, 20000) {
                peer.send(&[byte]);
            }
            peer.send(&chunk(1, wire::CHUNK_NONE, asked.cookie, &[]));
        }
    });
    let nbd = lab.client(export(), Options { request_limit: Duration::from_secs(20), ..options() });
    let (answer, data) = guarded_read(&nbd, 8192, 100_000);
    let mut expected = lab.on_disk(8192, 100_000);
    expected[4096..4096 + 8192].fill(0);
    assert_eq!(answer, Ok(100_000));
    assert!(data == expected);
    assert_eq!(nbd.stats().dialed, 1);
}

#[test]
fn writes_can_be_asked_to_be_durable() {
    let flags = Arc::new(AtomicU64::new(0));
    let lab = {
        let flags = Arc::clone(&flags);
        Lab::new(move |peer| {
            while let Some(asked) = peer.ask() {
                flags.store(u64::from(asked.flags) << 16 | u64::from(asked.command), SeqCst);
                peer.answer(&asked);
            }
        })
    };
    let durable = Options { durable: true, ..options() };
    let nbd = lab.client(export(), durable);
    nbd.write_at(0, &[1; 4096]).unwrap();
    assert_eq!(flags.load(SeqCst), 1 << 16 | 1);
    nbd.read_at(0, &mut [1; 4096]).unwrap();
    assert_eq!(flags.load(SeqCst), 0);
    let cannot =
        Export { flags: ALL - Flags::SEND_FUA - Flags::SEND_TRIM - Flags::SEND_FLUSH, ..export() };
    let nbd = lab.client(cannot, durable);
    nbd.write_at(0, &[1; 4096]).unwrap();
    assert_eq!(flags.load(SeqCst), 1);
    assert_eq!(nbd.trim(0, 4096), Err(Errno::OPNOTSUPP));
    assert_eq!(nbd.flush(), Ok(()));
    assert_eq!(flags.load(SeqCst), 1);
}

#[test]
fn a_child_leaves_its_parents_connections_alone() {
    let lab = Lab::new(Peer::serve);
    let parent = lab.client(Export { connections: 2, ..export() }, options());
    parent.read_at(0, &mut [0; 4096]).unwrap();
    // A forked child has a copy of the client; here the client itself stands for it, and a
    // handed-in descriptor for the parent's.
    let idle = parent.pool.take().unwrap();
    let number = swaptide_sys::AsRawFd::as_raw_fd(&idle.fd());
    idle.put_back();
    parent.forget();
    // The number still is what it was: nothing was closed.
    let flags = rustix::io::fcntl_getfd(borrow(number));
    assert!(flags.is_ok());
    parent.read_at(0, &mut [0; 4096]).unwrap();
    assert_eq!(parent.stats().dialed, 2);
    // The same by way of the device; and one that is handed in is used instead of a new one.
    parent.forget();
    parent.adopt(lab.dial().unwrap());
    parent.read_at(0, &mut [0; 4096]).unwrap();
    assert_eq!(parent.stats().dialed, 2);
}

fn borrow(number: i32) -> swaptide_sys::BorrowedFd<'static> {
    // SAFETY: the test that calls this keeps the descriptor open: nothing closes what was
    // forgotten.
    unsafe { swaptide_sys::BorrowedFd::borrow_raw(number) }
}

#[test]
fn threads_share_connections_and_take_turns() {
    for connections in [1, 3] {
        let lab = Lab::new(|peer| {
            // Some connections do not live long.
            for _ in 0..if peer.number % 3 == 1 { 40 } else { u32::MAX } {
                let Some(asked) = peer.ask() else { return };
                peer.answer(&asked);
            }
        });
        let nbd = lab.client(Export { connections, ..export() }, options());
        std::thread::scope(|s| {
            for thread in 0..6u64 {
                let nbd = &nbd;
                s.spawn(move || {
                    let base = thread * 40 * PAGE;
                    for round in 0..30u64 {
                        let data: Vec<[u8; PAGE_SIZE]> = (0..20)
                            .map(|i| [(thread * 97 + round * 13 + i) as u8; PAGE_SIZE])
                            .collect();
                        let places: Vec<(u64, &[u8])> = data
                            .iter()
                            .enumerate()
                            .map(|(i, page)| (base + i as u64 * 2 * PAGE, &page[..]))
                            .collect();
                        nbd.write_many(&places).unwrap();
                        let mut back = vec![[0u8; PAGE_SIZE]; 20];
                        let mut places: Vec<(u64, &mut [u8])> = back
                            .iter_mut()
                            .enumerate()
                            .map(|(i, page)| (base + i as u64 * 2 * PAGE, &mut page[..]))
                            .collect();
                        nbd.read_many(&mut places).unwrap();
                        assert!(back == data, "thread {thread}, round {round}");
                    }
                });
            }
        });
        let stats = nbd.stats();
        assert!(nbd.pool.take().is_some(), "a connection is left");
        if connections == 1 {
            assert_eq!(stats.dialed, stats.broken + 1, "{stats:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever comes, the call ends, nothing outside of its buffers changes, and success means
    /// that every byte came.
    #[test]
    fn noise_is_survived(
        pieces in prop::collection::vec(
            (0..8u8, any::<u64>(), any::<u16>(), any::<u32>(), 0..6000usize),
            1..12,
        ),
        cut in any::<prop::sample::Index>(),
    ) {
        let lab = Lab::new(move |peer| {
            let Some(asked) = peer.ask() else { return };
            if peer.number > 0 {
                peer.answer(&asked);
                return peer.serve();
            }
            let mut bytes = Vec::new();
            for &(shape, number, small, long, len) in &pieces {
                let near = asked.offset.wrapping_add(number % 6000);
                bytes.extend(match shape {
                    0 => simple(asked.cookie, long % 3, &vec![0x66; len]),
                    1 => simple(number, long, &[]),
                    2 => chunk(
                        small & 1,
                        small % 3,
                        asked.cookie,
                        &[&near.to_be_bytes()[..], &vec![0x66; len]].concat(),
                    ),
                    3 => chunk(small, small >> 8, asked.cookie, &vec![small as u8; len]),
                    4 => chunk(
                        0,
                        wire::CHUNK_HOLE,
                        asked.cookie,
                        &[&near.to_be_bytes()[..], &(long % 8192).to_be_bytes()].concat(),
                    ),
                    5 => error_chunk(asked.cookie, long % 120, &vec![b'x'; len % 300]),
                    6 => chunk(1, wire::CHUNK_NONE, asked.cookie, &[]),
                    _ => number.to_be_bytes().to_vec(),
                });
            }
            bytes.truncate(cut.index(bytes.len() + 1));
            peer.send(&bytes);
        });
        let nbd = lab
            .client(export(), Options { request_limit: Duration::from_millis(100), ..options() });
        let (answer, data) = guarded_read(&nbd, 16 * PAGE, 3 * PAGE_SIZE);
        match answer {
            Ok(n) => {
                prop_assert_eq!(n, 3 * PAGE_SIZE);
                // All of it came from the second connection, or all of it from the first, holes and
                // lies.
                let good = lab.on_disk(16 * PAGE, 3 * PAGE_SIZE);
                prop_assert!(
                    data == good
                        || data
                            .iter()
                            .all(|byte| [0, 0x66].contains(byte) || lab.dialed.load(SeqCst) == 1)
                );
            }
            Err(errno) => prop_assert!(nbd.stats().refused == 1, "{:?}", errno),
        }
    }
}
